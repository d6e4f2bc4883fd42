//! Encoding of ggml's blocks, byte for byte as llama.cpp's `llama-quantize` on x86-64 writes them.
//!
//! The algorithms are those of llama.cpp (`ggml-quants.c`, ggml 0.25), told anew: a search for the scale of a block whose
//! levels have the least weighted error. Importance, one number a column, weighs the errors: the mean square of the
//! activations that meet the column. Blocks are independent, so each lane of a vector encodes one, in ggml's order of
//! operations.

mod basic;
mod blocks;
mod codebook;
pub mod feedback;
mod iq1;
mod iq4;
mod k;
pub mod levels;
mod points;
mod search;

use rayon::prelude::*;
use thiserror::Error;

use self::blocks::{Blocks, Encoded};
use crate::num::ggml::GgmlType;
use crate::num::lanes::{self, Lanes, Simd, WithSimd};
use crate::num::simd::vectorized;

/// Why a matrix cannot be encoded.
#[derive(Debug, Error, PartialEq)]
pub enum EncodeError {
    #[error("{kind} has blocks of {block} values, which do not fill rows of {cols}")]
    Columns { kind: GgmlType, block: usize, cols: usize },
    #[error("{values} values are not whole rows of {cols}")]
    Values { values: usize, cols: usize },
    #[error("the importance has {given} numbers for {cols} columns; it takes one a column")]
    Importance { given: usize, cols: usize },
    #[error("the importance of column {col} is {value}; it must be a finite number, not negative")]
    BadImportance { col: usize, value: f32 },
    #[error("{kind} is too coarse without importance; give an importance matrix or take another type")]
    NeedsImportance { kind: GgmlType },
    #[error("row {row}, column {col} is {value}; only finite values can be encoded")]
    NotFinite { row: usize, col: usize, value: f32 },
    #[error("{given} bytes were given for {needed} encoded ones")]
    Length { given: usize, needed: usize },
}

/// Encodes a matrix of rows of `cols` values, one row of blocks after the other.
///
/// `importance` has one number a column; types that do not use it ignore it.
///
/// # Errors
///
/// When sizes do not belong together, a number is not finite, or the type needs importance and has none.
pub fn encode(kind: GgmlType, values: &[f32], cols: usize, importance: Option<&[f32]>) -> Result<Vec<u8>, EncodeError> {
    let mut out = vec![0; needed(kind, values.len(), cols)?];
    encode_into(kind, values, cols, importance, &mut out)?;
    Ok(out)
}

/// Whether the encoder of a type weighs errors by importance.
pub fn uses_importance(kind: GgmlType) -> bool {
    use GgmlType::*;
    !matches!(kind, F32 | F16 | BF16 | Q8_0 | TQ1_0 | TQ2_0 | MXFP4)
}

/// Whether a type is not encoded without importance.
pub fn requires_importance(kind: GgmlType) -> bool {
    use GgmlType::*;
    matches!(kind, IQ1_S | IQ2_XXS | IQ2_XS)
}

/// Bytes of an encoded matrix.
fn needed(kind: GgmlType, values: usize, cols: usize) -> Result<usize, EncodeError> {
    let row = kind.row_bytes(cols).ok_or(EncodeError::Columns { kind, block: kind.block(), cols })?;
    match values.checked_rem(cols) {
        Some(0) => Ok(values / cols * row),
        _ => Err(EncodeError::Values { values, cols }),
    }
}

/// As [`encode`], into bytes that are there.
pub fn encode_into(
    kind: GgmlType,
    values: &[f32],
    cols: usize,
    importance: Option<&[f32]>,
    out: &mut [u8],
) -> Result<(), EncodeError> {
    let needed = needed(kind, values.len(), cols)?;
    if out.len() != needed {
        return Err(EncodeError::Length { given: out.len(), needed });
    }
    if let Some(i) = not_finite(values) {
        return Err(EncodeError::NotFinite { row: i / cols, col: i % cols, value: values[i] });
    }
    if let Some(importance) = importance {
        if importance.len() != cols {
            return Err(EncodeError::Importance { given: importance.len(), cols });
        }
        if let Some(col) = importance.iter().position(|v| !(v.is_finite() && *v >= 0.0)) {
            return Err(EncodeError::BadImportance { col, value: importance[col] });
        }
    }
    use GgmlType::*;
    if importance.is_none() && requires_importance(kind) {
        return Err(EncodeError::NeedsImportance { kind });
    }
    let matrix = Matrix { values, cols, importance: importance.filter(|_| uses_importance(kind)) };
    match kind {
        F32 => matrix.numbers(out, f32::to_le_bytes),
        F16 => matrix.numbers(out, |x| half::f16::from_f32(x).to_le_bytes()),
        BF16 => matrix.numbers(out, |x| half::bf16::from_f32(x).to_le_bytes()),
        Q4_0 => matrix.lanes(out, Q40),
        Q4_1 => matrix.lanes(out, Q41),
        Q5_0 => matrix.lanes(out, Q50),
        Q5_1 => matrix.lanes(out, Q51),
        Q8_0 => matrix.lanes(out, Q80),
        Q2_K => matrix.lanes(out, Q2K),
        Q3_K => matrix.lanes(out, Q3K),
        Q4_K => matrix.lanes(out, Q4K),
        Q5_K => matrix.lanes(out, Q5K),
        Q6_K => matrix.lanes(out, Q6K),
        IQ4_NL => matrix.lanes(out, Iq4Nl),
        IQ4_XS => matrix.lanes(out, Iq4Xs),
        TQ1_0 => matrix.lanes(out, Tq1),
        TQ2_0 => matrix.lanes(out, Tq2),
        MXFP4 => matrix.lanes(out, Mxfp4),
        IQ2_XXS => matrix.points(out, Iq2Xxs),
        IQ2_XS => matrix.points(out, Iq2Xs),
        IQ2_S => matrix.points(out, Iq2S),
        IQ3_XXS => matrix.points(out, Iq3Xxs),
        IQ3_S => matrix.points(out, Iq3S),
        IQ1_S => matrix.points(out, Iq1S),
        IQ1_M => matrix.points(out, Iq1M),
    }
    Ok(())
}

/// Where the first value is that is not finite.
fn not_finite(values: &[f32]) -> Option<usize> {
    let piece = 65536;
    let bad = |piece: &[f32]| vectorized(|| piece.iter().fold(false, |bad, v| bad | !v.is_finite()));
    let first = values.par_chunks(piece).position_first(bad)? * piece;
    values[first..].iter().position(|v| !v.is_finite()).map(|i| first + i)
}

/// What is encoded.
#[derive(Clone, Copy)]
struct Matrix<'a> {
    values: &'a [f32],
    cols: usize,
    importance: Option<&'a [f32]>,
}

/// Blocks that one thread encodes at a time.
const PIECE: usize = 256;

/// The encoder of a type.
trait Encoder<const VALUES: usize, const BYTES: usize>: Copy + Sync {
    fn encode<S: Simd>(self, blocks: &Blocks<S, VALUES>, out: Encoded<BYTES>);
}

macro_rules! encoders {
    ($($name:ident = $module:ident::$function:ident, $values:literal, $bytes:literal;)*) => {
        $(
            #[derive(Clone, Copy)]
            struct $name;

            impl Encoder<$values, $bytes> for $name {
                #[inline(always)]
                fn encode<S: Simd>(self, blocks: &Blocks<S, $values>, out: Encoded<$bytes>) {
                    $module::$function(blocks, out);
                }
            }
        )*
    };
}

encoders! {
    Q40 = basic::q4_0, 32, 18;
    Q41 = basic::q4_1, 32, 20;
    Q50 = basic::q5_0, 32, 22;
    Q51 = basic::q5_1, 32, 24;
    Q80 = basic::q8_0, 32, 34;
    Mxfp4 = basic::mxfp4, 32, 17;
    Tq1 = basic::tq1_0, 256, 54;
    Tq2 = basic::tq2_0, 256, 66;
    Q2K = k::q2_k, 256, 84;
    Q3K = k::q3_k, 256, 110;
    Q4K = k::q4_k, 256, 144;
    Q5K = k::q5_k, 256, 176;
    Q6K = k::q6_k, 256, 210;
    Iq4Nl = iq4::iq4_nl, 32, 18;
    Iq4Xs = iq4::iq4_xs, 256, 136;
}

impl Matrix<'_> {
    /// Plain numbers.
    fn numbers<const BYTES: usize>(self, out: &mut [u8], store: impl Fn(f32) -> [u8; BYTES] + Sync) {
        let piece = 65536;
        out.par_chunks_mut(piece * BYTES).zip(self.values.par_chunks(piece)).for_each(|(out, values)| {
            for (out, &x) in out.as_chunks_mut().0.iter_mut().zip(values) {
                *out = store(x);
            }
        });
    }

    /// Blocks side by side in lanes.
    fn lanes<const VALUES: usize, const BYTES: usize>(self, out: &mut [u8], encoder: impl Encoder<VALUES, BYTES>) {
        let squares = self.row_squares(VALUES);
        out.as_chunks_mut().0.par_chunks_mut(PIECE).enumerate().for_each(|(i, out)| {
            lanes::run(Piece { matrix: self, squares: &squares, first: i * PIECE, out, encoder });
        });
    }

    /// Blocks of 256 one after the other, for the types with grids.
    fn points<const BYTES: usize>(self, out: &mut [u8], encoder: impl PointEncoder<BYTES>) {
        out.as_chunks_mut().0.par_chunks_mut(4).enumerate().for_each(|(i, out)| {
            lanes::run(PointPiece { matrix: self, first: i * 4, out, encoder });
        });
    }

    /// Mean squares of rows, for the small blocks that weigh by them.
    fn row_squares(self, values: usize) -> Vec<f32> {
        if self.importance.is_none() || values != 32 {
            return Vec::new();
        }
        let mean = |row: &[f32]| row.iter().fold(0.0, |sum, x| sum + x * x) / self.cols as f32;
        self.values.par_chunks(self.cols).map(mean).collect()
    }
}

/// The encoder of a type with a grid.
trait PointEncoder<const BYTES: usize>: Copy + Sync {
    fn encode<S: Simd>(self, simd: S, x: &[f32; 256], importance: Option<&[f32]>, out: &mut [u8; BYTES]);
}

macro_rules! point_encoders {
    ($($name:ident = $module:ident::$function:ident, $bytes:literal;)*) => {
        $(
            #[derive(Clone, Copy)]
            struct $name;

            impl PointEncoder<$bytes> for $name {
                #[inline(always)]
                fn encode<S: Simd>(self, simd: S, x: &[f32; 256], importance: Option<&[f32]>, out: &mut [u8; $bytes]) {
                    $module::$function(simd, x, importance, out);
                }
            }
        )*
    };
}

point_encoders! {
    Iq1S = iq1::iq1_s, 50;
    Iq1M = iq1::iq1_m, 56;
    Iq2Xxs = points::iq2_xxs, 66;
    Iq2Xs = points::iq2_xs, 74;
    Iq2S = points::iq2_s, 82;
    Iq3Xxs = points::iq3_xxs, 98;
    Iq3S = points::iq3_s, 110;
}

/// Successive blocks of a type with a grid for one thread.
struct PointPiece<'a, E, const BYTES: usize> {
    matrix: Matrix<'a>,
    first: usize,
    out: &'a mut [[u8; BYTES]],
    encoder: E,
}

impl<E: PointEncoder<BYTES>, const BYTES: usize> WithSimd for PointPiece<'_, E, BYTES> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Matrix { values, cols, importance } = self.matrix;
        let blocks = &values.as_chunks().0[self.first..];
        for (i, (x, out)) in blocks.iter().zip(self.out).enumerate() {
            let start = (self.first + i) % (cols / 256) * 256;
            self.encoder.encode(simd, x, importance.map(|all| &all[start..start + 256]), out);
        }
    }
}

/// Successive blocks for one thread.
struct Piece<'a, E, const VALUES: usize, const BYTES: usize> {
    matrix: Matrix<'a>,
    squares: &'a [f32],
    /// Number of the first block in the matrix.
    first: usize,
    out: &'a mut [[u8; BYTES]],
    encoder: E,
}

impl<E: Encoder<VALUES, BYTES>, const VALUES: usize, const BYTES: usize> WithSimd for Piece<'_, E, VALUES, BYTES> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Matrix { values, cols, importance } = self.matrix;
        let per_row = cols / VALUES;
        let zero = Lanes::splat(simd, 0.0);
        let mut blocks = Blocks { x: [zero; VALUES], importance: importance.map(|_| [zero; VALUES]), row_square: zero };
        for (i, out) in self.out.chunks_mut(Lanes::<S>::COUNT).enumerate() {
            let first = self.first + i * Lanes::<S>::COUNT;
            for lane in 0..out.len() {
                let block = first + lane;
                for (lanes, &x) in blocks.x.iter_mut().zip(&values[block * VALUES..]) {
                    lanes.as_mut_slice()[lane] = x;
                }
                if let (Some(lanes), Some(importance)) = (&mut blocks.importance, importance) {
                    let start = block % per_row * VALUES;
                    for (lanes, &q) in lanes.iter_mut().zip(&importance[start..start + VALUES]) {
                        lanes.as_mut_slice()[lane] = q;
                    }
                }
                blocks.row_square.as_mut_slice()[lane] = self.squares.get(block / per_row).copied().unwrap_or(0.0);
            }
            self.encoder.encode(&blocks, Encoded(out));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::num::lanes::Scalar;

    /// Values over many magnitudes, with ties, zeros and a few of one sign.
    fn values(n: usize) -> Vec<f32> {
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 8
        };
        let mut scale = 1.0;
        (0..n)
            .map(|i| {
                if i % 256 == 0 {
                    scale = 2f32.powi((next() % 60) as i32 - 40);
                }
                match next() % 16 {
                    0 => 0.0,
                    1 => scale,
                    2 => -(scale * 0.5),
                    _ => scale * ((next() % 4001) as f32 - 2000.0) / 1000.0,
                }
            })
            .collect()
    }

    fn same<const VALUES: usize, const BYTES: usize>(encoder: impl Encoder<VALUES, BYTES>) {
        let values = values(37 * 256);
        let importance: Vec<f32> = (0..256).map(|i| (i * 37 % 101) as f32 * 0.3).collect();
        for importance in [None, Some(&importance[..])] {
            let matrix = Matrix { values: &values, cols: 256, importance };
            let mut wide = vec![0; values.len() / VALUES * BYTES];
            matrix.lanes(&mut wide, encoder);
            let mut narrow = vec![[0; BYTES]; values.len() / VALUES];
            let squares = matrix.row_squares(VALUES);
            Piece { matrix, squares: &squares, first: 0, out: &mut narrow, encoder }.with_simd(Scalar);
            assert_eq!(wide, narrow.as_flattened());
        }
    }

    #[test]
    fn lanes_do_what_one_lane_does() {
        same(Q40);
        same(Q51);
        same(Q80);
        same(Mxfp4);
        same(Tq1);
        same(Q2K);
        same(Q3K);
        same(Q4K);
        same(Q5K);
        same(Q6K);
        same(Iq4Nl);
        same(Iq4Xs);
    }
}
