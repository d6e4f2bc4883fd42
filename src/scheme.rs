//! What a quantizer is asked for: bits, symmetry, group.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How the columns of a row share scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GroupSize(i32);

impl GroupSize {
    /// One scale per output channel, written `-1` everywhere in this field.
    pub const CHANNEL: Self = Self(-1);

    /// `size` columns per scale; `None` unless -1 or positive.
    pub fn new(size: i32) -> Option<Self> {
        (size == -1 || size > 0).then_some(Self(size))
    }

    /// The number as users and config files write it.
    pub fn raw(self) -> i32 {
        self.0
    }

    /// Columns per group in a row of `cols`.
    pub fn columns(self, cols: usize) -> usize {
        if self.0 < 0 { cols } else { self.0 as usize }
    }

    /// Groups in a row of `cols`; the last one may be short.
    pub fn count(self, cols: usize) -> usize {
        cols.div_ceil(self.columns(cols).max(1))
    }

    /// Whether groups fill a row of `cols` exactly.
    pub fn divides(self, cols: usize) -> bool {
        cols.is_multiple_of(self.columns(cols).max(1))
    }
}

impl fmt::Display for GroupSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Integer weights: `bits` wide, with one scale (and zero point) per group of input channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scheme {
    pub bits: u8,
    pub group_size: GroupSize,
    pub sym: bool,
}

impl Scheme {
    /// Weights in E4M3: 8 bits; what shares a scale is the format's affair.
    pub const FLOAT8: Self = Self { bits: 8, group_size: GroupSize::CHANNEL, sym: true };

    /// The largest code, 2^bits - 1.
    pub fn top(self) -> u8 {
        ((1u16 << self.bits) - 1) as u8
    }

    /// The zero point of symmetric codes, 2^(bits - 1).
    pub fn middle(self) -> u8 {
        1 << (self.bits - 1)
    }
}
