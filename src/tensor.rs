//! What files hold: element types, shared read-only bytes.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

use bytemuck::cast_slice;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use memmap2::Mmap;

/// Element types that checkpoints and artifacts hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dtype {
    F32,
    F16,
    BF16,
    I32,
    I64,
    U8,
    I8,
    /// OCP E4M3: no infinities, largest 448.
    F8E4M3,
    Bool,
    // The following occur in the files of other programs; nothing here computes with them.
    I16,
    U16,
    U32,
    U64,
    F64,
    F8E5M2,
    /// Powers of two, the scales of MX formats.
    F8E8M0,
    /// Bytes of blocks, not elements: only the source of the weight can read them.
    Blocks,
}

impl Dtype {
    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            Dtype::I64 | Dtype::U64 | Dtype::F64 => 8,
            Dtype::F32 | Dtype::I32 | Dtype::U32 => 4,
            Dtype::F16 | Dtype::BF16 | Dtype::I16 | Dtype::U16 => 2,
            Dtype::U8 | Dtype::I8 | Dtype::F8E4M3 | Dtype::Bool | Dtype::Blocks => 1,
            Dtype::F8E5M2 | Dtype::F8E8M0 => 1,
        }
    }

    /// The name safetensors headers use.
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "F32",
            Dtype::F16 => "F16",
            Dtype::BF16 => "BF16",
            Dtype::I32 => "I32",
            Dtype::I64 => "I64",
            Dtype::U8 => "U8",
            Dtype::I8 => "I8",
            Dtype::F8E4M3 => "F8_E4M3",
            Dtype::Bool => "BOOL",
            Dtype::I16 => "I16",
            Dtype::U16 => "U16",
            Dtype::U32 => "U32",
            Dtype::U64 => "U64",
            Dtype::F64 => "F64",
            Dtype::F8E5M2 => "F8_E5M2",
            Dtype::F8E8M0 => "F8_E8M0",
            Dtype::Blocks => "blocks",
        }
    }

    /// The type a safetensors header names, if it is one we hold.
    pub fn parse(name: &str) -> Option<Self> {
        use Dtype::*;
        let all = [F32, F16, BF16, I32, I64, U8, I8, F8E4M3, Bool, I16, U16, U32, U64, F64, F8E5M2, F8E8M0];
        all.into_iter().find(|d| d.name() == name)
    }

    /// Whether weights may be stored in this type.
    pub const fn is_float(self) -> bool {
        matches!(self, Dtype::F32 | Dtype::F16 | Dtype::BF16)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Read-only bytes that several owners share: part of a mapped file, or memory.
#[derive(Clone)]
pub enum Bytes {
    /// A range of a memory-mapped file.
    Mapped(Arc<Mmap>, Range<usize>),
    /// Owned memory.
    Owned(Arc<[u8]>),
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        Bytes::Owned(bytes.into())
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Bytes::Mapped(map, range) => &map[range.clone()],
            Bytes::Owned(bytes) => bytes,
        }
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.len())
    }
}

/// Widens little-endian `dtype` elements to f32. `dtype` must be a float type and `out` as long as the
/// elements. bf16 widens exactly and never passes through f16.
pub fn widen(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    debug_assert_eq!(bytes.len(), out.len() * dtype.size());
    match dtype {
        Dtype::F16 => match bytemuck::try_cast_slice::<u8, f16>(bytes) {
            Ok(values) => values.convert_to_f32_slice(out),
            // Foreign files may place a tensor at an odd offset.
            Err(_) => {
                for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *o = f16::from_le_bytes([b[0], b[1]]).to_f32();
                }
            }
        },
        Dtype::BF16 => {
            for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *o = bf16::from_le_bytes([b[0], b[1]]).to_f32();
            }
        }
        Dtype::F32 => {
            for (o, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                *o = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
        other => unreachable!("{other} is no float type; checkpoints are checked when opened"),
    }
}

/// Widens a whole tensor.
pub fn widened(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![0.0; bytes.len() / dtype.size()];
    widen(dtype, bytes, &mut out);
    out
}

/// Floats as little-endian elements of a float type, rounded to nearest.
pub fn narrowed(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    match dtype {
        Dtype::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        Dtype::BF16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        Dtype::F32 => cast_slice(values).to_vec(),
        other => unreachable!("{other} is no float type"),
    }
}

/// u32 words as little-endian bytes.
pub fn words_to_bytes(words: &[u32]) -> Vec<u8> {
    cast_slice(words).to_vec()
}

/// Little-endian bytes as u32 words.
pub fn bytes_to_words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}
