//! One file a verb; no algorithm.
