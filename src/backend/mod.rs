//! The device seam: a handful of coarse operations. The CPU is the reference; every other backend must
//! match it.

pub mod weight;
