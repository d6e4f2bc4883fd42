use super::*;
pub const CASES: &[Case] = &[];
