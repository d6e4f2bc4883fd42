//! Blocks side by side: lane `i` of every vector belongs to block `i` of a few.

use half::f16;

use super::search::each;
use crate::num::lanes::{Lanes, Simd};

/// The values of as many blocks as there are lanes.
#[repr(C, align(64))]
pub struct Blocks<S: Simd, const VALUES: usize> {
    pub x: [Lanes<S>; VALUES],
    /// The importance of each value's column.
    pub importance: Option<[Lanes<S>; VALUES]>,
    /// The mean square of each block's row; zero without importance.
    pub row_square: Lanes<S>,
}

impl<S: Simd, const VALUES: usize> Blocks<S, VALUES> {
    /// Weights of the errors of values `first` and following: importance times the root of `spread + x^2`, or nothing
    /// when there is no importance.
    #[inline(always)]
    pub fn weights<const N: usize>(&self, first: usize, spread: Lanes<S>) -> Option<[Lanes<S>; N]> {
        let importance = self.importance.as_ref()?;
        Some(each!(self.row_square, |i| {
            let x = self.x[first + i];
            importance[first + i] * (spread + x * x).sqrt()
        }))
    }

    /// Values `first` and following.
    #[inline(always)]
    pub fn part<const N: usize>(&self, first: usize) -> [Lanes<S>; N] {
        each!(self.row_square, |i| self.x[first + i])
    }
}

/// All but the lowest four bits of an integer below 256.
#[inline(always)]
pub fn high<S: Simd>(l: Lanes<S>) -> Lanes<S> {
    ((l - l.with(7.5)) * l.with(1.0 / 16.0)).round()
}

/// The lowest four bits, given the others.
#[inline(always)]
pub fn low<S: Simd>(l: Lanes<S>, high: Lanes<S>) -> Lanes<S> {
    l - high * l.with(16.0)
}

/// A byte of four numbers below 4, the first one lowest.
#[inline(always)]
pub fn four<S: Simd>([a, b, c, d]: [Lanes<S>; 4]) -> Lanes<S> {
    a + b * a.with(4.0) + c * a.with(16.0) + d * a.with(64.0)
}

/// The encoded bytes of the blocks, fewer than lanes at the end of a tensor.
pub struct Encoded<'a, const BYTES: usize>(pub &'a mut [[u8; BYTES]]);

impl<const BYTES: usize> Encoded<'_, BYTES> {
    /// Writes an integer's low byte into every block.
    #[inline(always)]
    pub fn byte<S: Simd>(&mut self, at: usize, value: Lanes<S>) {
        let bytes = value.low_bytes();
        for (block, byte) in self.0.iter_mut().zip(bytes) {
            block[at] = byte;
        }
    }

    /// Writes a half-precision number into every block, and returns what was written.
    #[inline(always)]
    pub fn half<S: Simd>(&mut self, at: usize, value: Lanes<S>) -> Lanes<S> {
        for (block, &x) in self.0.iter_mut().zip(value.as_slice()) {
            block[at..at + 2].copy_from_slice(&f16::from_f32(x).to_le_bytes());
        }
        let mut stored = value;
        for x in stored.as_mut_slice() {
            *x = f16::from_f32(*x).to_f32();
        }
        stored
    }

    /// Nibbles of 32 levels below 16: values 0 to 15 low, 16 to 31 high.
    #[inline(always)]
    pub fn nibbles<S: Simd>(&mut self, at: usize, levels: &[Lanes<S>]) {
        for j in 0..16 {
            self.byte(at + j, levels[j] + levels[j + 16] * levels[j].with(16.0));
        }
    }
}
