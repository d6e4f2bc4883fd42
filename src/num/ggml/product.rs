//! Products of rows of blocks with vectors, from the blocks themselves: with one vector, only a run of 256 values is ever
//! decoded; with several, a few rows.

use super::GgmlType::{self, *};
use super::{basic, iq, k, ternary};
use crate::num::few::{LANES, total};
use crate::num::lanes::{Simd, WithSimd, run};
use crate::num::simd::half;

/// Values decoded at a time: what was just written is slow to read in wider vectors.
const RUN: usize = 256;

impl GgmlType {
    /// `out[r] = sum_k rows[r, k] x[k]`, in f32. A product depends on its row and on `x` alone, bit for bit, and is that
    /// of `num::few` with [`Self::values`].
    ///
    /// # Panics
    ///
    /// When the lengths do not belong together: `rows.len()` must be `row_bytes(x.len()) * out.len()`.
    pub fn products(self, rows: &[u8], x: &[f32], out: &mut [f32]) {
        let bytes = self.row_bytes(x.len()).and_then(|row| row.checked_mul(out.len()));
        assert_eq!(Some(rows.len()), bytes, "{} rows of {} values of {self}", out.len(), x.len());
        if rows.is_empty() {
            return out.fill(0.0);
        }
        self.decoder(Products { rows, x, out });
    }

    /// Decodes whole blocks, any number of them, to the numbers that products are made of.
    ///
    /// # Panics
    ///
    /// When the lengths do not belong together: `bytes.len()` must be `row_bytes(out.len())`.
    pub fn values(self, bytes: &[u8], out: &mut [f32]) {
        assert_eq!(Some(bytes.len()), self.row_bytes(out.len()), "{} values of {self}", out.len());
        self.decoder(Values { bytes, out });
    }

    fn decoder(self, task: impl Task) {
        match self {
            F32 => task.with(Numbers(f32::from_le_bytes)),
            F16 => task.with(Numbers(|b| half(u16::from_le_bytes(b)))),
            BF16 => task.with(Numbers(|b| f32::from_bits((u16::from_le_bytes(b) as u32) << 16))),
            Q4_0 => task.with(Codes::<_, _, _, 8, false>(q4_0)),
            Q5_0 => task.with(Codes::<_, _, _, 16, false>(q5_0)),
            Q8_0 => task.with(Codes::<_, _, _, 0, false>(q8_0)),
            Q4_K => task.with(Codes::<_, _, _, 0, true>(q4_k)),
            Q5_K => task.with(Codes::<_, _, _, 0, true>(q5_k)),
            Q6_K => task.with(Codes::<_, _, _, 32, false>(q6_k)),
            Q4_1 => task.with(Blocks(basic::q4_1)),
            Q5_1 => task.with(Blocks(basic::q5_1)),
            Q2_K => task.with(Blocks(k::q2_k)),
            Q3_K => task.with(Blocks(k::q3_k)),
            IQ1_S => task.with(Blocks(iq::iq1_s)),
            IQ1_M => task.with(Blocks(iq::iq1_m)),
            IQ2_XXS => task.with(Blocks(iq::iq2_xxs)),
            IQ2_XS => task.with(Blocks(iq::iq2_xs)),
            IQ2_S => task.with(Blocks(iq::iq2_s)),
            IQ3_XXS => task.with(Blocks(iq::iq3_xxs)),
            IQ3_S => task.with(Blocks(iq::iq3_s)),
            IQ4_NL => task.with(Blocks(basic::iq4_nl)),
            IQ4_XS => task.with(Blocks(iq::iq4_xs)),
            TQ1_0 => task.with(Blocks(ternary::tq1_0)),
            TQ2_0 => task.with(Blocks(ternary::tq2_0)),
            MXFP4 => task.with(Blocks(basic::mxfp4)),
        }
    }
}

/// What is done with rows, once it is known how they are decoded.
trait Task {
    fn with(self, decode: impl Decode);
}

/// Rows by one vector.
struct Products<'a> {
    rows: &'a [u8],
    x: &'a [f32],
    out: &'a mut [f32],
}

/// Blocks to numbers.
struct Values<'a> {
    bytes: &'a [u8],
    out: &'a mut [f32],
}

impl Task for Products<'_> {
    fn with(self, decode: impl Decode) {
        run(Decoding { task: self, decode: &decode });
    }
}

impl Task for Values<'_> {
    fn with(self, decode: impl Decode) {
        run(Decoding { task: self, decode: &decode });
    }
}

struct Decoding<'a, T, D> {
    task: T,
    decode: &'a D,
}

/// What makes values of a run `w`: `w[i] * scales[i / 16] - mins[i / 16]`.
struct Factors {
    scales: [f32; RUN / 16],
    mins: [f32; RUN / 16],
}

/// How bytes become a run.
trait Decode {
    /// Bytes and values of a block.
    const BLOCK: (usize, usize);
    /// Whether there are scales, and minima; otherwise scales are one and minima zero.
    const SCALES: bool = false;
    const MINS: bool = false;

    /// Decodes whole blocks of at most [`RUN`] values to the first of `w`.
    fn decode(&self, bytes: &[u8], w: &mut [f32], factors: &mut Factors);
}

/// Plain numbers.
struct Numbers<F, const BYTES: usize>(F);

impl<F: Fn([u8; BYTES]) -> f32, const BYTES: usize> Decode for Numbers<F, BYTES> {
    const BLOCK: (usize, usize) = (BYTES, 1);

    #[inline(always)]
    fn decode(&self, bytes: &[u8], w: &mut [f32], _: &mut Factors) {
        for (w, bytes) in w.iter_mut().zip(bytes.as_chunks().0) {
            *w = (self.0)(*bytes);
        }
    }
}

/// Blocks that are decoded to numbers.
struct Blocks<F, const BYTES: usize, const VALUES: usize>(F);

impl<F, const BYTES: usize, const VALUES: usize> Decode for Blocks<F, BYTES, VALUES>
where
    F: Fn(&[u8; BYTES], &mut [f32; VALUES]),
{
    const BLOCK: (usize, usize) = (BYTES, VALUES);

    #[inline(always)]
    fn decode(&self, bytes: &[u8], w: &mut [f32], _: &mut Factors) {
        for (w, bytes) in w.as_chunks_mut().0.iter_mut().zip(bytes.as_chunks().0) {
            (self.0)(bytes, w);
        }
    }
}

/// Blocks that are decoded to integers, less the one that stands for zero; scales apply to 16 of them at a time.
struct Codes<F, const BYTES: usize, const VALUES: usize, const ZERO: u8, const MINS: bool>(F);

/// Integers of a block, and its scales and minima, one for 16.
type Parts<'a, const VALUES: usize> = (&'a mut [u8; VALUES], &'a mut [f32], &'a mut [f32]);

impl<F, const BYTES: usize, const VALUES: usize, const ZERO: u8, const MINS: bool> Decode
    for Codes<F, BYTES, VALUES, ZERO, MINS>
where
    F: Fn(&[u8; BYTES], Parts<VALUES>),
{
    const BLOCK: (usize, usize) = (BYTES, VALUES);
    const SCALES: bool = true;
    const MINS: bool = MINS;

    #[inline(always)]
    fn decode(&self, bytes: &[u8], w: &mut [f32], Factors { scales, mins }: &mut Factors) {
        let mut codes = [0; RUN];
        let parts = codes.as_chunks_mut().0.iter_mut();
        let parts = parts.zip(scales.chunks_exact_mut(VALUES / 16)).zip(mins.chunks_exact_mut(VALUES / 16));
        for (((codes, scales), mins), bytes) in parts.zip(bytes.as_chunks().0) {
            (self.0)(bytes, (codes, scales, mins));
        }
        for (w, code) in w.iter_mut().zip(codes) {
            *w = (code.wrapping_sub(ZERO) as i8) as f32;
        }
    }
}

impl Factors {
    fn new() -> Self {
        Self { scales: [1.0; RUN / 16], mins: [0.0; RUN / 16] }
    }
}

impl<D: Decode> WithSimd for Decoding<'_, Values<'_>, D> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { task: Values { bytes, out }, decode } = self;
        let (size, values) = D::BLOCK;
        let mut factors = Factors::new();
        for (blocks, out) in bytes.chunks(RUN / values * size).zip(out.chunks_mut(RUN)) {
            decode.decode(blocks, out, &mut factors);
            if D::SCALES {
                for (out, (scale, min)) in out.chunks_mut(16).zip(factors.scales.iter().zip(&factors.mins)) {
                    for out in out {
                        let scaled = scale * *out;
                        *out = if D::MINS { scaled - min } else { scaled };
                    }
                }
            }
        }
    }
}

impl<D: Decode> WithSimd for Decoding<'_, Products<'_>, D> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // Vectors that make up half the lanes.
        match S::F32_LANES {
            1 => self.multiply::<S, 16>(simd),
            2 => self.multiply::<S, 8>(simd),
            4 => self.multiply::<S, 4>(simd),
            8 => self.multiply::<S, 2>(simd),
            _ => self.multiply::<S, 1>(simd),
        }
    }
}

impl<D: Decode> Decoding<'_, Products<'_>, D> {
    #[inline(always)]
    fn multiply<S: Simd, const N: usize>(self, simd: S) {
        let Self { task: Products { rows, x, out }, decode } = self;
        let (bytes, values) = D::BLOCK;
        let (mut run, mut factors) = ([0.0; RUN], Factors::new());
        for (row, out) in rows.chunks_exact(x.len() / values * bytes).zip(out) {
            let mut sums = [[simd.splat_f32s(0.0); N]; 2];
            let mut tail = 0.0;
            for (blocks, x) in row.chunks(RUN / values * bytes).zip(x.chunks(RUN)) {
                decode.decode(blocks, &mut run, &mut factors);
                let (whole, rest) = run[..x.len()].as_chunks::<LANES>();
                let (whole_x, rest_x) = x.as_chunks::<LANES>();
                for (j, (w, x)) in whole.iter().zip(whole_x).enumerate() {
                    let (w, x) = (vectors::<S::f32s, N>(w), vectors::<S::f32s, N>(x));
                    for h in 0..2 {
                        let scale = simd.splat_f32s(factors.scales[2 * j + h]);
                        let min = simd.splat_f32s(factors.mins[2 * j + h]);
                        for n in 0..N {
                            let mut value = w[h][n];
                            if D::SCALES {
                                value = simd.mul_f32s(scale, value);
                            }
                            if D::MINS {
                                value = simd.sub_f32s(value, min);
                            }
                            sums[h][n] = simd.add_f32s(sums[h][n], simd.mul_f32s(value, x[h][n]));
                        }
                    }
                }
                // Only rows of plain numbers end so.
                for (w, x) in rest.iter().zip(rest_x) {
                    tail += w * x;
                }
            }
            let [mut first, second] = sums;
            for n in 0..N {
                first[n] = simd.add_f32s(first[n], second[n]);
            }
            *out = total(simd, first) + tail;
        }
    }
}

/// Two halves of as many lanes as there are sums.
#[inline(always)]
fn vectors<V: bytemuck::Pod, const N: usize>(values: &[f32; LANES]) -> &[[V; N]] {
    bytemuck::cast_slice::<f32, V>(values).as_chunks().0
}

#[inline(always)]
fn scale_at(block: &[u8], at: usize) -> f32 {
    half(u16::from_le_bytes([block[at], block[at + 1]]))
}

/// Low nibbles, then high ones.
#[inline(always)]
fn nibbles<const BYTES: usize>(bytes: &[u8], low: &mut [u8], high: &mut [u8]) {
    let all = (bytes.first_chunk::<BYTES>(), low.first_chunk_mut::<BYTES>(), high.first_chunk_mut::<BYTES>());
    if let (Some(bytes), Some(low), Some(high)) = all {
        for l in 0..BYTES {
            low[l] = bytes[l] & 15;
            high[l] = bytes[l] >> 4;
        }
    }
}

#[inline(always)]
fn q4_0(block: &[u8; 18], (codes, scales, _): Parts<32>) {
    scales.fill(scale_at(block, 0));
    let (low, high) = codes.split_at_mut(16);
    nibbles::<16>(&block[2..], low, high);
}

#[inline(always)]
fn q5_0(block: &[u8; 22], (codes, scales, _): Parts<32>) {
    scales.fill(scale_at(block, 0));
    let (low, high) = codes.split_at_mut(16);
    nibbles::<16>(&block[6..], low, high);
    for (codes, &bits) in codes.as_chunks_mut::<8>().0.iter_mut().zip(&block[2..6]) {
        *codes = (u64::from_le_bytes(*codes) | fifth_bits(bits)).to_le_bytes();
    }
}

/// Bit `i` of a byte as the fifth bit of byte `i`.
#[inline(always)]
fn fifth_bits(bits: u8) -> u64 {
    // One bit is left in each byte, wherever it stands; the sum carries it to the top.
    let single = (bits as u64 * 0x0101_0101_0101_0101) & 0x8040_2010_0804_0201;
    ((single + 0x7f7f_7f7f_7f7f_7f7f) & 0x8080_8080_8080_8080) >> 3
}

#[inline(always)]
fn q8_0(block: &[u8; 34], (codes, scales, _): Parts<32>) {
    scales.fill(scale_at(block, 0));
    codes.copy_from_slice(&block[2..]);
}

/// Scales and minima of Q4_K and Q5_K, each for 32 values.
#[inline(always)]
fn k_scales(block: &[u8], scales: &mut [f32], mins: &mut [f32]) {
    let (d, dmin) = (scale_at(block, 0), scale_at(block, 2));
    let word = |at: usize| u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
    let (a, b, c) = (word(4), word(8), word(12));
    let (six, four, two) = (0x3f3f_3f3f, 0x0f0f_0f0f, 0x3030_3030);
    let halves = [(a & six, b & six), (c & four | (a >> 2) & two, (c >> 4) & four | (b >> 2) & two)];
    for (h, (s, m)) in halves.into_iter().enumerate() {
        for (j, (s, m)) in s.to_le_bytes().into_iter().zip(m.to_le_bytes()).enumerate() {
            scales[8 * h + 2 * j..][..2].fill(d * s as f32);
            mins[8 * h + 2 * j..][..2].fill(dmin * m as f32);
        }
    }
}

#[inline(always)]
fn q4_k(block: &[u8; 144], (codes, scales, mins): Parts<256>) {
    k_scales(block, scales, mins);
    for (codes, bytes) in codes.chunks_exact_mut(64).zip(block[16..].chunks_exact(32)) {
        let (low, high) = codes.split_at_mut(32);
        nibbles::<32>(bytes, low, high);
    }
}

#[inline(always)]
fn q5_k(block: &[u8; 176], (codes, scales, mins): Parts<256>) {
    k_scales(block, scales, mins);
    for j in 0..4 {
        for l in 0..32 {
            let (byte, high) = (block[48 + 32 * j + l], block[16 + l] >> (2 * j));
            codes[64 * j + l] = byte & 15 | (high & 1) << 4;
            codes[64 * j + 32 + l] = byte >> 4 | (high & 2) << 3;
        }
    }
}

#[inline(always)]
fn q6_k(block: &[u8; 210], (codes, scales, _): Parts<256>) {
    scales.copy_from_slice(&k::q6_scales(block));
    for h in 0..2 {
        for l in 0..32 {
            let (a, b, high) = (block[64 * h + l], block[64 * h + 32 + l], block[128 + 32 * h + l]);
            for (k, low) in [a & 15, b & 15, a >> 4, b >> 4].into_iter().enumerate() {
                codes[128 * h + 32 * k + l] = low | (high >> (2 * k) & 3) << 4;
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::num::few;
    use crate::num::lanes::Scalar;

    fn noise(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        };
        (0..n).map(|_| next()).collect()
    }

    /// Any bits, but for exponents of half and single precision that stay far from the ends.
    fn rows(kind: GgmlType, rows: usize, cols: usize) -> Vec<u8> {
        match kind {
            F32 => noise(rows * cols, 3).iter().flat_map(|v| v.to_le_bytes()).collect(),
            _ => noise(rows * kind.row_bytes(cols).unwrap(), 3)
                .iter()
                .enumerate()
                .map(|(i, v)| (v.to_bits() >> 7) as u8 & if kind == MXFP4 && i % 17 == 0 { 0x7f } else { 0xbb })
                .collect(),
        }
    }

    /// Sizes: less than a run, whole runs, and what is left of one; of plain numbers also what is left of the lanes.
    fn columns(kind: GgmlType) -> &'static [usize] {
        match kind.block() {
            1 => &[1, 31, 32, 77, 256, 700],
            32 => &[32, 96, 256, 544],
            _ => &[256, 768],
        }
    }

    #[test]
    fn products_are_those_of_decoded_rows() {
        for kind in GgmlType::ALL {
            for &cols in columns(kind) {
                let (bytes, x) = (rows(kind, 5, cols), noise(cols, 7));
                let mut decoded = vec![0.0; 5 * cols];
                kind.decode(&bytes, &mut decoded);
                let mut out = [f32::NAN; 5];
                kind.products(&bytes, &x, &mut out);
                let (mut values, mut again) = (vec![f32::NAN; 5 * cols], [f32::NAN; 5]);
                kind.values(&bytes, &mut values);
                few::products(&values, &x, cols, &mut again);
                assert_eq!(again.map(f32::to_bits), out.map(f32::to_bits), "{kind}, {cols} columns");
                for (row, out) in decoded.chunks_exact(cols).zip(out) {
                    let terms = || row.iter().zip(&x).map(|(w, x)| f64::from(*w) * f64::from(*x));
                    let (want, size) = (terms().sum::<f64>(), terms().map(|v| v * v).sum::<f64>().sqrt());
                    assert!(out.is_finite() && size > 0.0, "{kind}, {cols} columns: {out}");
                    assert!((f64::from(out) - want).abs() <= 1e-5 * size, "{kind}, {cols} columns: {out}, not {want}");
                }
            }
        }
    }

    #[test]
    fn every_width_gives_the_same_bits() {
        fn check(kind: GgmlType, decode: &impl Decode) {
            for &cols in columns(kind) {
                let (bytes, x) = (rows(kind, 3, cols), noise(cols, 7));
                let (mut wide, mut narrow) = ([f32::NAN; 3], [f32::NAN; 3]);
                kind.products(&bytes, &x, &mut wide);
                Decoding { task: Products { rows: &bytes, x: &x, out: &mut narrow }, decode }.with_simd(Scalar::new());
                assert_eq!(wide.map(f32::to_bits), narrow.map(f32::to_bits), "{kind}, {cols} columns");
            }
        }
        check(F16, &Numbers(|b| half(u16::from_le_bytes(b))));
        check(Q4_0, &Codes::<_, _, _, 8, false>(q4_0));
        check(Q5_K, &Codes::<_, _, _, 0, true>(q5_k));
        check(Q6_K, &Codes::<_, _, _, 32, false>(q6_k));
        check(IQ3_S, &Blocks(iq::iq3_s));
    }

    #[test]
    fn no_columns_give_zeros() {
        let mut out = [1.0; 2];
        Q4_0.products(&[], &[], &mut out);
        assert_eq!(out, [0.0; 2]);
    }

    #[test]
    #[should_panic]
    fn lengths_must_belong_together() {
        Q4_0.products(&[0; 18], &[0.0; 64], &mut [0.0]);
    }
}
