//! Keys and values in host memory, as codes: what the other backends' caches are held against.

use bytemuck::{Pod, cast_slice, cast_slice_mut};
use half::f16;

use super::super::cache::{BLOCK, CacheType, PoolShape, SavedBlocks};
use crate::num::simd::{self, vectorized};
use crate::num::{e4m3, e5m2};

/// One kind of element.
pub trait Format {
    type Code: Pod + Send + Sync;

    fn encode(x: f32) -> Self::Code;

    /// What a code stands for, times its scale.
    fn decode(code: Self::Code) -> f32;
}

pub struct F32;
pub struct F16;
pub struct E4m3;
pub struct E5m2;
pub struct I8;

impl Format for F32 {
    type Code = f32;

    #[inline(always)]
    fn encode(x: f32) -> f32 {
        x
    }

    #[inline(always)]
    fn decode(code: f32) -> f32 {
        code
    }
}

impl Format for F16 {
    type Code = u16;

    /// Saturates, as the other types do; NaN stays NaN.
    #[inline(always)]
    fn encode(x: f32) -> u16 {
        f16::from_f32(x.clamp(-65504.0, 65504.0)).to_bits()
    }

    #[inline(always)]
    fn decode(code: u16) -> f32 {
        simd::half(code)
    }
}

impl Format for E4m3 {
    type Code = u8;

    #[inline(always)]
    fn encode(x: f32) -> u8 {
        e4m3::encode(x)
    }

    /// The same as `e4m3::decode`, without a table, so that loops over many are vectorized.
    #[inline(always)]
    fn decode(code: u8) -> f32 {
        let (sign, magnitude) = (u32::from(code & 128) << 24, u32::from(code & 127));
        let normal = f32::from_bits((magnitude << 20) + (120 << 23));
        // Without an exponent the mantissa counts steps of 2^-9: above 2^-6 they are as long.
        let small = f32::from_bits((magnitude << 20) + (121 << 23)) - 1.0 / 64.0;
        let value = if magnitude < 8 { small } else { normal };
        let value = if magnitude == 127 { f32::NAN } else { value };
        f32::from_bits(value.to_bits() | sign)
    }
}

impl Format for E5m2 {
    type Code = u8;

    #[inline(always)]
    fn encode(x: f32) -> u8 {
        e5m2::encode(x)
    }

    #[inline(always)]
    fn decode(code: u8) -> f32 {
        e5m2::decode(code)
    }
}

impl Format for I8 {
    type Code = i8;

    #[inline(always)]
    fn encode(x: f32) -> i8 {
        x.clamp(-127.0, 127.0).round_ties_even() as i8
    }

    #[inline(always)]
    fn decode(code: i8) -> f32 {
        f32::from(code)
    }
}

/// The scale of one head's numbers: `fixed`, or for INT8 what they need. INT8 has no code for NaN, but the scale has: it is
/// NaN where a number is, or infinite without a scale that would cut it off.
fn scale_of(kind: CacheType, row: &[f32], fixed: Option<f32>) -> f32 {
    match (fixed, kind) {
        (None, CacheType::Int8) => {
            let most = vectorized(|| row.iter().fold(0.0f32, |m, x| m.max(x.abs())));
            // `max` passes NaN over, the sum does not.
            let broken = vectorized(|| row.iter().fold(0.0f32, |sum, x| sum + x * 0.0)).is_nan();
            if broken { f32::NAN } else { most / 127.0 }
        }
        (Some(_), CacheType::Int8) if vectorized(|| row.iter().fold(false, |any, x| any | x.is_nan())) => f32::NAN,
        (fixed, _) => fixed.unwrap_or(1.0),
    }
}

/// What a cache gives back of rows of `heads * head_dim` numbers, by `scales` of heads where they are calibrated.
pub fn rounded(kind: CacheType, rows: &[f32], head_dim: usize, scales: Option<&[f32]>) -> Vec<f32> {
    fn of<F: Format>(kind: CacheType, rows: &[f32], head_dim: usize, scales: Option<&[f32]>) -> Vec<f32> {
        let mut out = Vec::with_capacity(rows.len());
        for (i, row) in rows.chunks(head_dim).enumerate() {
            let scale = scale_of(kind, row, scales.map(|scales| scales[i % scales.len()]));
            let by = if scale > 0.0 { scale } else { 1.0 };
            out.extend(row.iter().map(|x| F::decode(F::encode(x / by)) * scale));
        }
        out
    }
    match kind {
        CacheType::F32 => rows.to_vec(),
        CacheType::F16 => of::<F16>(kind, rows, head_dim, None),
        CacheType::Fp8E4m3 => of::<E4m3>(kind, rows, head_dim, scales),
        CacheType::Fp8E5m2 => of::<E5m2>(kind, rows, head_dim, scales),
        CacheType::Int8 => of::<I8>(kind, rows, head_dim, scales),
    }
}

/// The codes of a pool.
#[derive(Debug)]
pub struct Store {
    /// `[layer, block, kv_head, head_dim, slot]`: scores are computed for the tokens of a block side by side.
    keys: Vec<u32>,
    /// `[layer, block, kv_head, slot, head_dim]`
    values: Vec<u32>,
    /// `[layer, block, kv_head, slot]`, for INT8.
    key_scales: Vec<f32>,
    value_scales: Vec<f32>,
    /// Scales of keys and values by layer and head, where they are settled.
    fixed: Vec<Option<[Vec<f32>; 2]>>,
    kind: CacheType,
    blocks: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl Store {
    pub fn new(shape: &PoolShape) -> Self {
        let slots = shape.layers * shape.blocks * shape.kv_heads * BLOCK;
        let words = slots * shape.head_dim * shape.kind.size() / 4;
        let scales = if shape.kind == CacheType::Int8 { slots } else { 0 };
        // Zeroed memory costs nothing until it is written.
        Self {
            keys: vec![0; words],
            values: vec![0; words],
            key_scales: vec![0.0; scales],
            value_scales: vec![0.0; scales],
            fixed: (0..shape.layers).map(|layer| shape.fixed(layer)).collect(),
            kind: shape.kind,
            blocks: shape.blocks,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
        }
    }

    /// Which tile of [`BLOCK`] tokens and one head it is.
    fn tile(&self, layer: usize, block: u32, head: usize) -> usize {
        (layer * self.blocks + block as usize) * self.kv_heads + head
    }

    /// Codes of a block of keys, `[head_dim, slot]`.
    pub fn keys<F: Format>(&self, layer: usize, block: u32, head: usize) -> &[F::Code] {
        let n = BLOCK * self.head_dim;
        &cast_slice(&self.keys)[self.tile(layer, block, head) * n..][..n]
    }

    /// Codes of a block of values, `[slot, head_dim]`.
    pub fn values<F: Format>(&self, layer: usize, block: u32, head: usize) -> &[F::Code] {
        let n = BLOCK * self.head_dim;
        &cast_slice(&self.values)[self.tile(layer, block, head) * n..][..n]
    }

    /// Scales of a block's keys and values, `[slot]` each.
    pub fn scales(&self, layer: usize, block: u32, head: usize) -> [[f32; BLOCK]; 2] {
        if self.key_scales.is_empty() {
            let fixed = self.fixed[layer].as_ref();
            return [0, 1].map(|i| [fixed.map_or(1.0, |fixed| fixed[i][head]); BLOCK]);
        }
        let at = self.tile(layer, block, head) * BLOCK;
        [&self.key_scales, &self.value_scales].map(|scales| std::array::from_fn(|slot| scales[at + slot]))
    }

    /// Writes the key and value of one token: `head_dim` numbers for each head.
    pub fn append<F: Format>(&mut self, layer: usize, block: u32, slot: usize, key: &[f32], value: &[f32]) {
        let dim = self.head_dim;
        for (head, (key, value)) in key.chunks_exact(dim).zip(value.chunks_exact(dim)).enumerate() {
            let tile = self.tile(layer, block, head);
            let fixed = |i: usize| self.fixed[layer].as_ref().map(|fixed| fixed[i][head]);
            let scales = [scale_of(self.kind, key, fixed(0)), scale_of(self.kind, value, fixed(1))];
            if !self.key_scales.is_empty() {
                self.key_scales[tile * BLOCK + slot] = scales[0];
                self.value_scales[tile * BLOCK + slot] = scales[1];
            }
            // Rows of zeros have no scale.
            let [by_key, by_value] = scales.map(|s| if s > 0.0 { s } else { 1.0 });
            let keys = &mut cast_slice_mut::<u32, F::Code>(&mut self.keys)[tile * BLOCK * dim..][..BLOCK * dim];
            for (code, x) in keys[slot..].iter_mut().step_by(BLOCK).zip(key) {
                *code = F::encode(x / by_key);
            }
            let values = &mut cast_slice_mut(&mut self.values)[(tile * BLOCK + slot) * dim..][..dim];
            vectorized(|| values.iter_mut().zip(value).for_each(|(code, x)| *code = F::encode(x / by_value)));
        }
    }

    /// Words that one block takes in one layer, of keys, values and their scales.
    fn units(&self) -> [usize; 4] {
        let layers = self.fixed.len();
        [self.keys.len(), self.values.len(), self.key_scales.len(), self.value_scales.len()]
            .map(|words| words / (layers * self.blocks).max(1))
    }

    fn planes(&self) -> [&[u32]; 4] {
        [&self.keys, &self.values, cast_slice(&self.key_scales), cast_slice(&self.value_scales)]
    }

    fn planes_mut(&mut self) -> [&mut [u32]; 4] {
        [&mut self.keys, &mut self.values, cast_slice_mut(&mut self.key_scales), cast_slice_mut(&mut self.value_scales)]
    }

    /// Copies whole blocks, one pair after the other.
    pub fn copy(&mut self, pairs: &[(u32, u32)]) {
        let (layers, blocks, units) = (self.fixed.len(), self.blocks, self.units());
        for (plane, unit) in self.planes_mut().into_iter().zip(units) {
            for layer in 0..layers {
                for &(from, to) in pairs {
                    let [from, to] = [from, to].map(|block| (layer * blocks + block as usize) * unit);
                    plane.copy_within(from..from + unit, to);
                }
            }
        }
    }

    pub fn save(&self, blocks: &[u32]) -> SavedBlocks {
        let mut words = Vec::new();
        for &block in blocks {
            for layer in 0..self.fixed.len() {
                for (plane, unit) in self.planes().into_iter().zip(self.units()) {
                    words.extend_from_slice(&plane[(layer * self.blocks + block as usize) * unit..][..unit]);
                }
            }
        }
        SavedBlocks { words }
    }

    /// # Panics
    /// If as many blocks of such a pool were not saved.
    pub fn restore(&mut self, blocks: &[u32], saved: &SavedBlocks) {
        let (layers, all, units) = (self.fixed.len(), self.blocks, self.units());
        let mut rest = &saved.words[..];
        for &block in blocks {
            for layer in 0..layers {
                for (plane, unit) in self.planes_mut().into_iter().zip(units) {
                    let (now, later) = rest.split_at(unit);
                    plane[(layer * all + block as usize) * unit..][..unit].copy_from_slice(now);
                    rest = later;
                }
            }
        }
        assert!(rest.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::cache::LayerScales;
    use super::*;

    #[test]
    fn codes_are_decoded_as_tables_have_them() {
        for code in 0..=255u8 {
            let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
            assert!(same(E4m3::decode(code), e4m3::decode(code)), "{code}");
        }
    }

    #[test]
    fn halves_saturate() {
        let there_and_back = |x| F16::decode(F16::encode(x));
        assert_eq!((there_and_back(1e6), there_and_back(-f32::INFINITY)), (65504.0, -65504.0));
        assert_eq!((there_and_back(0.1), there_and_back(1e-9)), (0.099_975_586, 0.0));
        assert!(there_and_back(f32::NAN).is_nan());
    }

    #[test]
    fn what_is_no_number_stays_none() {
        for kind in CacheType::ALL {
            for scales in [None, kind.has_scales().then_some(&[4.0 / 127.0][..])] {
                let got = rounded(kind, &[1.0, f32::NAN, 2.0, 3.0], 2, scales);
                assert!(got[1].is_nan(), "{kind}: {got:?}");
                assert!((got[2] - 2.0).abs() < 0.1 && (got[3] - 3.0).abs() < 0.1, "{kind}: {got:?}");
            }
        }
        // What is infinite is cut off where a scale says so, and stays otherwise.
        let of_int8 = |scales| rounded(CacheType::Int8, &[f32::NEG_INFINITY, 1.0], 2, scales);
        assert!(of_int8(None)[0].is_nan());
        assert_eq!(of_int8(Some(&[0.5][..])), [-63.5, 1.0]);
    }

    /// What is read of a cache is what `rounded` says.
    #[test]
    fn rows_come_back_rounded() {
        let row: Vec<f32> = (0..20).map(|i| (i as f32 - 8.3).powi(3) * 0.013).collect();
        for kind in CacheType::ALL {
            for scales in [None, kind.has_scales().then(|| LayerScales { keys: vec![0.3], values: vec![0.05, 0.2] })] {
                let layer = scales.clone().map(|scales| vec![scales].into());
                let mut store =
                    Store::new(&PoolShape { layers: 1, kv_heads: 2, head_dim: 10, kind, blocks: 2, scales: layer });
                let key: Vec<f32> = row.iter().rev().copied().collect();
                let (mut keys, mut values) = (Vec::new(), Vec::new());
                fn through<F: Format>(store: &mut Store, key: &[f32], value: &[f32], out: [&mut Vec<f32>; 2]) {
                    store.append::<F>(0, 1, 5, key, value);
                    for head in 0..2 {
                        let [by_key, by_value] = store.scales(0, 1, head);
                        let codes = store.keys::<F>(0, 1, head).iter().skip(5).step_by(BLOCK);
                        out[0].extend(codes.map(|code| F::decode(*code) * by_key[5]));
                        let codes = &store.values::<F>(0, 1, head)[5 * 10..6 * 10];
                        out[1].extend(codes.iter().map(|code| F::decode(*code) * by_value[5]));
                    }
                }
                let out = [&mut keys, &mut values];
                match kind {
                    CacheType::F32 => through::<F32>(&mut store, &key, &row, out),
                    CacheType::F16 => through::<F16>(&mut store, &key, &row, out),
                    CacheType::Fp8E4m3 => through::<E4m3>(&mut store, &key, &row, out),
                    CacheType::Fp8E5m2 => through::<E5m2>(&mut store, &key, &row, out),
                    CacheType::Int8 => through::<I8>(&mut store, &key, &row, out),
                }
                assert_eq!(keys, rounded(kind, &key, 10, scales.as_ref().map(|s| &s.keys[..])), "{kind}");
                assert_eq!(values, rounded(kind, &row, 10, scales.as_ref().map(|s| &s.values[..])), "{kind}");
                let worst = keys.iter().zip(&key).map(|(a, b)| (a - b).abs() / b.abs().max(1.0)).fold(0.0, f32::max);
                assert!(worst < 0.5, "{kind}: {worst}");
            }
        }
    }

    #[test]
    fn bytes_are_rounded_to_even() {
        assert_eq!([0.5, 1.5, -2.5, 126.6, 1e9, -1e9].map(I8::encode), [0, 2, -2, 127, 127, -127]);
    }
}
