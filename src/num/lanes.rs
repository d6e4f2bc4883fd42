//! Vectors whose lanes are separate problems. A lane computes what scalar code would, in the same order and without
//! fused operations, so results do not depend on how many lanes this processor's vectors have.

use std::ops::{Add, AddAssign, BitAnd, BitOr, Div, Mul, Neg, Sub};

pub use pulp::{Scalar, Simd, WithSimd};

/// 1.5 * 2^23: adding it puts an integer into the lowest bits.
const ROUND: f32 = 12_582_912.0;

/// 2^23: from here on the fraction bits of a float count ones.
const INTEGERS: f32 = 8_388_608.0;

/// A number for each lane.
#[derive(Clone, Copy)]
pub struct Lanes<S: Simd> {
    simd: S,
    v: S::f32s,
}

/// A truth for each lane.
#[derive(Clone, Copy)]
pub struct Truths<S: Simd> {
    simd: S,
    m: S::m32s,
}

impl<S: Simd> Lanes<S> {
    /// How many lanes there are; at most 16.
    pub const COUNT: usize = S::F32_LANES;

    /// One number in every lane.
    #[inline(always)]
    pub fn splat(simd: S, x: f32) -> Self {
        Self { simd, v: simd.splat_f32s(x) }
    }

    /// Lane by lane from a function.
    #[inline(always)]
    pub fn from_fn(simd: S, f: impl Fn(usize) -> f32) -> Self {
        let mut lanes = Self::splat(simd, 0.0);
        for (i, x) in lanes.as_mut_slice().iter_mut().enumerate() {
            *x = f(i);
        }
        lanes
    }

    /// The bits `shift` and following of a word for each lane, as numbers; `mask` has as many low bits. Fields end
    /// below bit 23.
    #[inline(always)]
    pub fn field(simd: S, words: &[u32], shift: usize, mask: u32) -> Self {
        let words: &[S::u32s] = bytemuck::cast_slice(&words[..Self::COUNT]);
        // In a float with this exponent the field's lowest bit stands for one.
        let power = f32::from_bits((127 + 23 - shift as u32) << 23);
        let field = simd.and_u32s(words[0], simd.splat_u32s(mask << shift));
        let v = simd.or_u32s(field, simd.splat_u32s(power.to_bits()));
        Self { simd, v: simd.transmute_f32s_u32s(v) } - Self::splat(simd, power)
    }

    /// Whether a bit of a word is set, for each lane.
    #[inline(always)]
    pub fn bit(simd: S, words: &[u32], bit: usize) -> Truths<S> {
        let words: &[S::u32s] = bytemuck::cast_slice(&words[..Self::COUNT]);
        let set = simd.and_u32s(words[0], simd.splat_u32s(1 << bit));
        Truths { simd, m: simd.greater_than_u32s(set, simd.splat_u32s(0)) }
    }

    /// The same number in every lane, other than this one's.
    #[inline(always)]
    pub fn with(self, x: f32) -> Self {
        Self::splat(self.simd, x)
    }

    #[inline(always)]
    pub fn as_slice(&self) -> &[f32] {
        bytemuck::cast_slice(std::slice::from_ref(&self.v))
    }

    #[inline(always)]
    pub fn as_mut_slice(&mut self) -> &mut [f32] {
        bytemuck::cast_slice_mut(std::slice::from_mut(&mut self.v))
    }

    #[inline(always)]
    pub fn map(mut self, f: impl Fn(f32) -> f32) -> Self {
        for x in self.as_mut_slice() {
            *x = f(*x);
        }
        self
    }

    #[inline(always)]
    pub fn abs(self) -> Self {
        Self { v: self.simd.abs_f32s(self.v), ..self }
    }

    #[inline(always)]
    pub fn sqrt(self) -> Self {
        Self { v: self.simd.sqrt_f32s(self.v), ..self }
    }

    /// The nearest integer, ties to even, for magnitudes below 2^22. For all others what ggml computes: the low 23 bits
    /// of the sum with 1.5 * 2^23, less 2^22; infinities give -2^22, NaN 0.
    #[inline(always)]
    pub fn round(self) -> Self {
        self.shifted(0x007f_ffff) - self.with(ROUND)
    }

    /// The lowest byte of an integer below 2^22, negative ones in two's complement, as a number.
    #[inline(always)]
    pub fn byte(self) -> Self {
        self.low_bits(8)
    }

    /// The lowest bits of an integer below 2^22, negative ones in two's complement, as a number.
    #[inline(always)]
    pub fn low_bits(self, count: u32) -> Self {
        self.shifted((1 << count) - 1) - self.with(INTEGERS)
    }

    /// The bitwise or of integers from 0 to 2^22.
    #[inline(always)]
    pub fn or(self, other: Self) -> Self {
        let simd = self.simd;
        let bits = |l: Self| simd.transmute_u32s_f32s((l + l.with(INTEGERS)).v);
        let v = simd.transmute_f32s_u32s(simd.or_u32s(bits(self), bits(other)));
        Self { v, ..self } - self.with(INTEGERS)
    }

    /// Some of the low bits of the sum with [`ROUND`], which hold the integer, counted from 2^23.
    #[inline(always)]
    fn shifted(self, mask: u32) -> Self {
        let simd = self.simd;
        let bits = simd.transmute_u32s_f32s((self + self.with(ROUND)).v);
        let low = simd.and_u32s(bits, simd.splat_u32s(mask));
        let v = simd.or_u32s(low, simd.splat_u32s(INTEGERS.to_bits()));
        Self { v: simd.transmute_f32s_u32s(v), ..self }
    }

    /// The lowest byte of an integer below 2^22, negative ones in two's complement, for each lane.
    #[inline(always)]
    pub fn low_bytes(self) -> [u8; 16] {
        let shifted = self + self.with(ROUND);
        let mut bytes = [0; 16];
        for (byte, x) in bytes.iter_mut().zip(shifted.as_slice()) {
            *byte = x.to_bits() as u8;
        }
        bytes
    }

    #[inline(always)]
    pub fn lt(self, other: Self) -> Truths<S> {
        Truths { simd: self.simd, m: self.simd.less_than_f32s(self.v, other.v) }
    }

    #[inline(always)]
    pub fn gt(self, other: Self) -> Truths<S> {
        other.lt(self)
    }

    #[inline(always)]
    pub fn ge(self, other: Self) -> Truths<S> {
        Truths { simd: self.simd, m: self.simd.greater_than_or_equal_f32s(self.v, other.v) }
    }

    #[inline(always)]
    pub fn eq(self, other: Self) -> Truths<S> {
        Truths { simd: self.simd, m: self.simd.equal_f32s(self.v, other.v) }
    }

    /// The smallest number of all lanes, none of which may be NaN.
    #[inline(always)]
    pub fn least(self) -> f32 {
        self.simd.reduce_min_f32s(self.v)
    }

    /// The smaller one, `other` when both are equal.
    #[inline(always)]
    pub fn min(self, other: Self) -> Self {
        self.lt(other).select(self, other)
    }

    /// The larger one, `other` when both are equal.
    #[inline(always)]
    pub fn max(self, other: Self) -> Self {
        self.gt(other).select(self, other)
    }

    /// The number between two bounds that is nearest.
    #[inline(always)]
    pub fn clamp(self, low: f32, high: f32) -> Self {
        self.max(self.with(low)).min(self.with(high))
    }
}

impl<S: Simd> Truths<S> {
    /// `yes` where true, `no` where false.
    #[inline(always)]
    pub fn select(self, yes: Lanes<S>, no: Lanes<S>) -> Lanes<S> {
        Lanes { simd: self.simd, v: self.simd.select_f32s(self.m, yes.v, no.v) }
    }

    /// Whether some lane is true.
    #[inline(always)]
    pub fn any(self) -> bool {
        self.simd.first_true_m32s(self.m) < S::F32_LANES
    }
}

macro_rules! operator {
    ($trait:ident, $name:ident, $vector:ident) => {
        impl<S: Simd> $trait for Lanes<S> {
            type Output = Self;

            #[inline(always)]
            fn $name(self, other: Self) -> Self {
                Self { v: self.simd.$vector(self.v, other.v), ..self }
            }
        }
    };
}

operator!(Add, add, add_f32s);
operator!(Sub, sub, sub_f32s);
operator!(Mul, mul, mul_f32s);
operator!(Div, div, div_f32s);

impl<S: Simd> AddAssign for Lanes<S> {
    #[inline(always)]
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl<S: Simd> Neg for Lanes<S> {
    type Output = Self;

    #[inline(always)]
    fn neg(self) -> Self {
        Self { v: self.simd.neg_f32s(self.v), ..self }
    }
}

impl<S: Simd> BitAnd for Truths<S> {
    type Output = Self;

    #[inline(always)]
    fn bitand(self, other: Self) -> Self {
        Self { m: self.simd.and_m32s(self.m, other.m), ..self }
    }
}

impl<S: Simd> BitOr for Truths<S> {
    type Output = Self;

    #[inline(always)]
    fn bitor(self, other: Self) -> Self {
        Self { m: self.simd.or_m32s(self.m, other.m), ..self }
    }
}

/// Runs a task with the widest vectors this processor has.
pub fn run<T: WithSimd>(task: T) -> T::Output {
    pulp::Arch::new().dispatch(task)
}
