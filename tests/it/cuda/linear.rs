//! Products with weights, and calibration sums.
