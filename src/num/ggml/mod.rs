//! The element types of ggml as data: identifiers, block geometry, and decoding of blocks to f32.
//!
//! Numbers, names and layouts are those of ggml, the tensor library of llama.cpp; a type is known to GGUF files by
//! its identifier. A row of a tensor is a whole number of blocks.

pub mod basic;
pub mod grids;
mod iq;
pub mod k;
mod product;
pub mod ternary;

use half::f16;

use crate::num::simd::vectorized;

pub use iq::{IQ1_SHIFT, iq4_xs_scales};

/// An element type of ggml: how a block of a row's values is stored.
#[allow(non_camel_case_types, reason = "ggml's own names")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GgmlType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ1_S,
    IQ1_M,
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ3_XXS,
    IQ3_S,
    IQ4_NL,
    IQ4_XS,
    TQ1_0,
    TQ2_0,
    MXFP4,
}

use GgmlType::*;

/// Type, identifier in files, name, values of a block, bytes of a block.
const TABLE: [(GgmlType, u32, &str, usize, usize); 25] = [
    (F32, 0, "F32", 1, 4),
    (F16, 1, "F16", 1, 2),
    (BF16, 30, "BF16", 1, 2),
    (Q4_0, 2, "Q4_0", 32, 18),
    (Q4_1, 3, "Q4_1", 32, 20),
    (Q5_0, 6, "Q5_0", 32, 22),
    (Q5_1, 7, "Q5_1", 32, 24),
    (Q8_0, 8, "Q8_0", 32, 34),
    (Q2_K, 10, "Q2_K", 256, 84),
    (Q3_K, 11, "Q3_K", 256, 110),
    (Q4_K, 12, "Q4_K", 256, 144),
    (Q5_K, 13, "Q5_K", 256, 176),
    (Q6_K, 14, "Q6_K", 256, 210),
    (IQ1_S, 19, "IQ1_S", 256, 50),
    (IQ1_M, 29, "IQ1_M", 256, 56),
    (IQ2_XXS, 16, "IQ2_XXS", 256, 66),
    (IQ2_XS, 17, "IQ2_XS", 256, 74),
    (IQ2_S, 22, "IQ2_S", 256, 82),
    (IQ3_XXS, 18, "IQ3_XXS", 256, 98),
    (IQ3_S, 21, "IQ3_S", 256, 110),
    (IQ4_NL, 20, "IQ4_NL", 32, 18),
    (IQ4_XS, 23, "IQ4_XS", 256, 136),
    (TQ1_0, 34, "TQ1_0", 256, 54),
    (TQ2_0, 35, "TQ2_0", 256, 66),
    (MXFP4, 39, "MXFP4", 32, 17),
];

impl GgmlType {
    /// Every type, in the order of the declaration.
    pub const ALL: [GgmlType; TABLE.len()] = {
        let mut all = [F32; TABLE.len()];
        let mut i = 0;
        while i < all.len() {
            all[i] = TABLE[i].0;
            i += 1;
        }
        all
    };

    const fn row(self) -> (u32, &'static str, usize, usize) {
        let (_, id, name, block, bytes) = TABLE[self as usize];
        (id, name, block, bytes)
    }

    /// The number that stands for this type in a GGUF file.
    pub const fn id(self) -> u32 {
        self.row().0
    }

    /// The type of a number in a GGUF file; `None` for retired numbers and types that are not read here.
    pub fn from_id(id: u32) -> Option<Self> {
        TABLE.iter().find(|row| row.1 == id).map(|row| row.0)
    }

    /// ggml's name, such as `Q4_K`.
    pub const fn name(self) -> &'static str {
        self.row().1
    }

    /// The type a name stands for, in upper or lower case.
    pub fn parse(name: &str) -> Option<Self> {
        TABLE.iter().find(|row| row.2.eq_ignore_ascii_case(name)).map(|row| row.0)
    }

    /// Values in a block.
    pub const fn block(self) -> usize {
        self.row().2
    }

    /// Bytes of a block.
    pub const fn bytes(self) -> usize {
        self.row().3
    }

    /// Bytes of a row of `cols` values; `None` when blocks do not fill it, or when the number is too large.
    pub const fn row_bytes(self, cols: usize) -> Option<usize> {
        match cols % self.block() {
            0 => (cols / self.block()).checked_mul(self.bytes()),
            _ => None,
        }
    }

    /// Decodes whole blocks, any number of them: `bytes` into `out`.
    ///
    /// # Panics
    ///
    /// When the lengths do not belong together: `bytes.len()` must be `row_bytes(out.len())`.
    pub fn decode(self, bytes: &[u8], out: &mut [f32]) {
        assert_eq!(Some(bytes.len()), self.row_bytes(out.len()), "{} values of {self}", out.len());
        vectorized(|| match self {
            F32 => blocks(bytes, out, basic::f32),
            F16 => blocks(bytes, out, basic::f16),
            BF16 => blocks(bytes, out, basic::bf16),
            Q4_0 => blocks(bytes, out, basic::q4_0),
            Q4_1 => blocks(bytes, out, basic::q4_1),
            Q5_0 => blocks(bytes, out, basic::q5_0),
            Q5_1 => blocks(bytes, out, basic::q5_1),
            Q8_0 => blocks(bytes, out, basic::q8_0),
            Q2_K => blocks(bytes, out, k::q2_k),
            Q3_K => blocks(bytes, out, k::q3_k),
            Q4_K => blocks(bytes, out, k::q4_k),
            Q5_K => blocks(bytes, out, k::q5_k),
            Q6_K => blocks(bytes, out, k::q6_k),
            IQ1_S => blocks(bytes, out, iq::iq1_s),
            IQ1_M => blocks(bytes, out, iq::iq1_m),
            IQ2_XXS => blocks(bytes, out, iq::iq2_xxs),
            IQ2_XS => blocks(bytes, out, iq::iq2_xs),
            IQ2_S => blocks(bytes, out, iq::iq2_s),
            IQ3_XXS => blocks(bytes, out, iq::iq3_xxs),
            IQ3_S => blocks(bytes, out, iq::iq3_s),
            IQ4_NL => blocks(bytes, out, basic::iq4_nl),
            IQ4_XS => blocks(bytes, out, iq::iq4_xs),
            TQ1_0 => blocks(bytes, out, ternary::tq1_0),
            TQ2_0 => blocks(bytes, out, ternary::tq2_0),
            MXFP4 => blocks(bytes, out, basic::mxfp4),
        })
    }

    /// Bits a value takes, scales included.
    pub const fn bits(self) -> f64 {
        8.0 * self.bytes() as f64 / self.block() as f64
    }
}

/// Decodes one block after the other.
#[inline(always)]
fn blocks<const BYTES: usize, const VALUES: usize>(
    bytes: &[u8],
    out: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; VALUES]),
) {
    for (block, out) in bytes.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        decode(block, out);
    }
}

/// The half-precision number at a byte of a block.
#[inline(always)]
pub fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

impl std::fmt::Display for GgmlType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_stands_in_the_order_of_the_declaration() {
        for (i, kind) in GgmlType::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, i);
            assert_eq!(kind.name(), format!("{kind:?}"));
            assert_eq!(GgmlType::from_id(kind.id()), Some(kind));
            assert_eq!(GgmlType::parse(&kind.name().to_lowercase()), Some(kind));
        }
        assert_eq!(GgmlType::from_id(4), None);
        assert_eq!(GgmlType::parse("Q4"), None);
    }

    #[test]
    fn rows_are_whole_blocks() {
        assert_eq!(Q4_K.row_bytes(512), Some(288));
        assert_eq!(Q4_K.row_bytes(288), None);
        assert_eq!(F16.row_bytes(3), Some(6));
        assert_eq!(F32.row_bytes(usize::MAX), None);
        assert_eq!(IQ2_XXS.bits(), 2.0625);
    }
}
