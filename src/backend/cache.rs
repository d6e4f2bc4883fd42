//! The paged key-value cache: a pool of blocks that sequences take as they grow, in the types that serving engines
//! have. Keys are stored after rotary embedding.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{Span, cpu, cuda};

/// Tokens of a block. A block has the keys and values of all layers and heads.
pub const BLOCK: usize = 16;

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum CacheType {
    /// As they are computed; on the CPU only.
    #[serde(rename = "f32")]
    F32,
    #[serde(rename = "f16")]
    F16,
    /// FP8 E4M3: a scale for each head, 1 unless it has been calibrated.
    #[serde(rename = "fp8")]
    Fp8E4m3,
    /// FP8 E5M2, likewise.
    #[serde(rename = "fp8_e5m2")]
    Fp8E5m2,
    /// INT8: a scale for each token and head, or for each head where it has been calibrated.
    #[serde(rename = "int8")]
    Int8,
}

impl CacheType {
    pub const ALL: [CacheType; 5] =
        [CacheType::F32, CacheType::F16, CacheType::Fp8E4m3, CacheType::Fp8E5m2, CacheType::Int8];

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            CacheType::F32 => 4,
            CacheType::F16 => 2,
            CacheType::Fp8E4m3 | CacheType::Fp8E5m2 | CacheType::Int8 => 1,
        }
    }

    /// The largest number that it can hold where its scale is 1.
    pub fn largest(self) -> f32 {
        match self {
            CacheType::F32 => f32::MAX,
            CacheType::F16 => 65504.0,
            CacheType::Fp8E4m3 => 448.0,
            CacheType::Fp8E5m2 => 57344.0,
            CacheType::Int8 => 127.0,
        }
    }

    /// Whether it takes calibrated scales.
    pub fn has_scales(self) -> bool {
        matches!(self, CacheType::Fp8E4m3 | CacheType::Fp8E5m2 | CacheType::Int8)
    }

    pub fn name(self) -> &'static str {
        match self {
            CacheType::F32 => "f32",
            CacheType::F16 => "f16",
            CacheType::Fp8E4m3 => "fp8",
            CacheType::Fp8E5m2 => "fp8_e5m2",
            CacheType::Int8 => "int8",
        }
    }

    /// Bytes that one token takes in `layers` layers, scales included.
    pub fn token_bytes(self, layers: usize, kv_heads: usize, head_dim: usize) -> usize {
        let scale = if self == CacheType::Int8 { 4 } else { 0 };
        2 * layers * kv_heads * (head_dim * self.size() + scale)
    }
}

impl fmt::Display for CacheType {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for CacheType {
    type Err = String;

    /// `fp8_e4m3` is another name of `fp8`.
    fn from_str(name: &str) -> Result<Self, String> {
        let name = if name == "fp8_e4m3" { "fp8" } else { name };
        CacheType::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let known = CacheType::ALL.map(CacheType::name).join(", ");
            format!("`{name}` is no type of key-value cache; there are {known}")
        })
    }
}

/// What a stored 1 stands for in one layer: one number for all heads, or one a head.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerScales {
    pub keys: Vec<f32>,
    pub values: Vec<f32>,
}

/// What a cache gives back of rows of keys or values, `[rows, heads * head_dim]`; `scales` are one, or one a head, where
/// they are calibrated.
pub fn rounded(kind: CacheType, rows: &[f32], head_dim: usize, scales: Option<&[f32]>) -> Vec<f32> {
    cpu::cache::rounded(kind, rows, head_dim, scales)
}

/// What a pool is to hold.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolShape {
    pub layers: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub kind: CacheType,
    /// Blocks of [`BLOCK`] tokens.
    pub blocks: usize,
    /// Calibrated scales, one entry a layer.
    pub scales: Option<Arc<[LayerScales]>>,
}

impl PoolShape {
    /// Bytes of one block.
    pub fn block_bytes(&self) -> usize {
        BLOCK * self.kind.token_bytes(self.layers, self.kv_heads, self.head_dim)
    }

    /// What stands against such a pool.
    pub(super) fn check(&self) -> Result<(), String> {
        let Self { layers, kv_heads, kind, .. } = *self;
        if self.blocks > u32::MAX as usize / layers.max(1) {
            return Err(format!("a key-value cache of {} blocks is more than can be numbered", self.blocks));
        }
        let Some(scales) = &self.scales else { return Ok(()) };
        if !kind.has_scales() {
            return Err(format!("a key-value cache of {kind} has no scales"));
        }
        if scales.len() != layers {
            return Err(format!("scales of {} layers for a key-value cache of {layers}", scales.len()));
        }
        for (layer, scales) in scales.iter().enumerate() {
            for (what, scales) in [("key", &scales.keys), ("value", &scales.values)] {
                if scales.len() != 1 && scales.len() != kv_heads {
                    return Err(format!(
                        "layer {layer} has {} {what} scales; one, or one for each of {kv_heads} heads is wanted",
                        scales.len()
                    ));
                }
                if let Some(bad) = scales.iter().find(|s| !(s.is_finite() && **s > 0.0)) {
                    return Err(format!("layer {layer} has the {what} scale {bad}; positive numbers are wanted"));
                }
            }
        }
        Ok(())
    }

    /// Scales of keys and values of a layer, one a head, where they are settled: calibrated, or 1 for FP8.
    pub(super) fn fixed(&self, layer: usize) -> Option<[Vec<f32>; 2]> {
        let each = |scales: &[f32]| if scales.len() == 1 { vec![scales[0]; self.kv_heads] } else { scales.to_vec() };
        match &self.scales {
            Some(scales) => Some([each(&scales[layer].keys), each(&scales[layer].values)]),
            None if matches!(self.kind, CacheType::Fp8E4m3 | CacheType::Fp8E5m2) => {
                Some([vec![1.0; self.kv_heads], vec![1.0; self.kv_heads]])
            }
            None => None,
        }
    }
}

/// Memory of keys and values that all layers and sequences share, in that of a backend.
#[derive(Debug)]
pub struct Pool {
    pub shape: PoolShape,
    pub(super) memory: Memory,
}

#[derive(Debug)]
pub(super) enum Memory {
    Host(cpu::cache::Store),
    Cuda(cuda::cache::Store),
}

/// One layer of a pool, for attention.
pub struct Layer<'a> {
    pub pool: &'a mut Pool,
    pub index: usize,
}

/// The blocks of the sequences of a batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tables {
    /// Blocks that a sequence can have. It stays the same for a cache, so that a recorded step stays right.
    pub stride: usize,
    /// `[sequences, stride]`: block numbers in order, zeros after the last.
    pub blocks: Vec<u32>,
}

impl Tables {
    /// # Panics
    /// If a sequence has more than `stride` blocks.
    pub fn new<'a>(stride: usize, sequences: impl IntoIterator<Item = &'a [u32]>) -> Self {
        let mut blocks = Vec::new();
        for (i, sequence) in sequences.into_iter().enumerate() {
            assert!(sequence.len() <= stride);
            blocks.extend_from_slice(sequence);
            blocks.resize((i + 1) * stride, 0);
        }
        Self { stride, blocks }
    }

    /// Blocks of one sequence.
    pub fn of(&self, sequence: usize) -> &[u32] {
        &self.blocks[sequence * self.stride..(sequence + 1) * self.stride]
    }

    /// What stands against attention of `spans` over a pool of so many blocks.
    pub(super) fn check(&self, spans: &[Span], blocks: usize) -> Result<(), String> {
        if self.blocks.len() != spans.len() * self.stride {
            return Err(format!("a batch of {} sequences without their blocks of the key-value cache", spans.len()));
        }
        if let Some(span) = spans.iter().find(|span| span.start + span.rows > self.stride * BLOCK) {
            let (tokens, most) = (span.start + span.rows, self.stride * BLOCK);
            return Err(format!("a sequence of {tokens} tokens in a key-value cache for {most} a sequence"));
        }
        match self.blocks.iter().find(|block| **block as usize >= blocks) {
            Some(block) => Err(format!("block {block} of a key-value cache that has {blocks}")),
            None => Ok(()),
        }
    }
}

/// Blocks that were taken out of a pool, in host memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedBlocks {
    /// Block by block, layer by layer: keys, values and their scales.
    pub(super) words: Vec<u32>,
}

impl SavedBlocks {
    /// Bytes of host memory.
    pub fn bytes(&self) -> usize {
        size_of_val(&self.words[..])
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back() {
        for kind in CacheType::ALL {
            assert_eq!(kind.to_string().parse::<CacheType>(), Ok(kind));
        }
        assert_eq!("fp8_e4m3".parse::<CacheType>(), Ok(CacheType::Fp8E4m3));
        assert!("bf16".parse::<CacheType>().unwrap_err().contains("f32, f16, fp8, fp8_e5m2, int8"));
    }

    #[test]
    fn a_token_of_llama_2_7b() {
        assert_eq!(CacheType::F16.token_bytes(32, 32, 128), 524_288);
        assert_eq!(CacheType::Fp8E5m2.token_bytes(32, 32, 128), 262_144);
        assert_eq!(CacheType::Int8.token_bytes(32, 32, 128), 262_144 + 2 * 32 * 32 * 4);
    }

    #[test]
    fn scales_are_checked() {
        let shape = |kind, scales: Vec<LayerScales>| PoolShape {
            layers: 1,
            kv_heads: 2,
            head_dim: 8,
            kind,
            blocks: 4,
            scales: Some(scales.into()),
        };
        let of = |keys: &[f32], values: &[f32]| LayerScales { keys: keys.to_vec(), values: values.to_vec() };
        let refused = |kind, scales, word: &str| {
            let why = shape(kind, scales).check().unwrap_err();
            assert!(why.contains(word), "{why}");
        };
        refused(CacheType::F16, vec![of(&[1.0], &[1.0])], "no scales");
        refused(CacheType::Int8, vec![], "scales of 0 layers");
        refused(CacheType::Int8, vec![of(&[1.0; 3], &[1.0])], "3 key scales");
        refused(CacheType::Fp8E4m3, vec![of(&[1.0], &[0.0])], "value scale 0");
        refused(CacheType::Fp8E4m3, vec![of(&[f32::NAN], &[1.0])], "key scale NaN");
        let good = shape(CacheType::Fp8E4m3, vec![of(&[0.5], &[1.0, 2.0])]);
        assert_eq!((good.check(), good.fixed(0)), (Ok(()), Some([vec![0.5; 2], vec![1.0, 2.0]])));
        assert_eq!(PoolShape { scales: None, kind: CacheType::Int8, ..good }.fixed(0), None);
    }

    #[test]
    fn tables_are_checked() {
        let tables = Tables::new(2, [&[3u32, 1][..], &[2]]);
        assert_eq!((tables.of(0), tables.of(1)), (&[3, 1][..], &[2, 0][..]));
        let spans = |rows| vec![Span { rows, start: 0 }, Span { rows: 1, start: 3 }];
        assert_eq!(tables.check(&spans(32), 4), Ok(()));
        assert!(tables.check(&spans(33), 4).unwrap_err().contains("33 tokens"));
        assert!(tables.check(&spans(1), 3).unwrap_err().contains("block 3"));
        assert!(tables.check(&spans(1)[..1], 4).unwrap_err().contains("1 sequences"));
    }
}
