//! The layout of compressed-tensors: integers packed along the input channels, zero points along the output
//! channels, both as dense little-endian streams of fields that may straddle words.
//!
//! | tensor | shape | holds |
//! |---|---|---|
//! | `weight_packed` | `[N, ceil(K * bits / 32)]` | one stream a row |
//! | `weight_zero_point` | `[ceil(N * bits / 32), groups]` | one stream a group; asymmetric weights alone |
//! | `weight_scale` | `[N, groups]` | |
//!
//! Fields hold the signed integer plus 2^(bits - 1), which is a code as quantizers here make them. As compressed-tensors
//! 0.20 stores it; versions that left the rest of a word free are read as well.

use half::f16;
use rayon::prelude::*;

use super::gptq::{PackError, check_order, check_values};
use crate::backend::weight::{Gptq, Inputs, Int8, Weight};
use crate::num::bits;
use crate::quantize::Quantized;
use crate::scheme::Scheme;
use crate::tensor::Bytes;

/// One linear in this layout.
#[derive(Clone, Debug, PartialEq)]
pub struct Packed {
    /// Output channels, N.
    pub rows: usize,
    /// Input channels, K.
    pub cols: usize,
    pub scheme: Scheme,
    /// `[rows, ceil(cols * bits / 32)]`
    pub words: Vec<u32>,
    /// `[ceil(rows * bits / 32), groups]`; `None` for symmetric weights.
    pub zeros: Option<Vec<u32>>,
    /// `[rows, groups]`
    pub scales: Vec<f16>,
}

/// Whether a linear of `rows` outputs by `cols` inputs has this form.
pub fn check_shape(rows: usize, cols: usize, bits: u8) -> Result<(), PackError> {
    if !(2..=8).contains(&bits) {
        return Err(PackError::Bits { layout: "compressed-tensors", widths: "2 to 8", bits });
    }
    if rows == 0 || cols == 0 { Err(PackError::Empty { rows, cols }) } else { Ok(()) }
}

/// Packs one quantized linear.
pub fn pack(weight: &Quantized) -> Result<Packed, PackError> {
    let Quantized { rows, cols, scheme, .. } = *weight;
    check(weight, scheme.sym)?;
    let groups = weight.groups();
    let words = weight.codes.par_chunks(cols).flat_map_iter(|row| bits::pack(row.iter().copied(), cols, scheme.bits));
    let zeros = (!scheme.sym).then(|| {
        let streams: Vec<u32> =
            weight.zeros.chunks(rows).flat_map(|zeros| bits::pack(zeros.iter().copied(), rows, scheme.bits)).collect();
        transposed(&streams, groups)
    });
    Ok(Packed { rows, cols, scheme, words: words.collect(), zeros, scales: transposed(&weight.scales, groups) })
}

/// `middle`: whether all zero points must be that of symmetric weights, since they are not stored.
fn check(weight: &Quantized, middle: bool) -> Result<(), PackError> {
    let Quantized { rows, cols, scheme, .. } = *weight;
    check_shape(rows, cols, scheme.bits)?;
    check_values(weight)?;
    check_order(weight, "compressed-tensors")?;
    let wanted = scheme.middle();
    match weight.zeros.iter().position(|&zero| middle && zero != wanted) {
        Some(at) => Err(PackError::Symmetric { row: at % rows, group: at / rows, zero: weight.zeros[at], wanted }),
        None => Ok(()),
    }
}

/// `[rows, n]` to `[n, rows]`.
pub fn transposed<T: Copy + Send + Sync>(values: &[T], rows: usize) -> Vec<T> {
    let across = values.len() / rows.max(1);
    (0..across).into_par_iter().flat_map_iter(|at| (0..rows).map(move |row| values[row * across + at])).collect()
}

/// Whether rows of `words` words hold `count` fields of `bits` bits densely; `None` if they cannot hold them at all.
/// Until 2025 compressed-tensors began each word with a whole field and left the rest of the last one free.
pub fn is_dense(words: usize, count: usize, bits: u8) -> Option<bool> {
    if words == bits::words(count, bits) {
        Some(true)
    } else if words == count.div_ceil(32 / bits as usize) {
        Some(false)
    } else {
        None
    }
}

/// Rows of words that begin with a whole field each, packed densely: `[rows, words]` in `data` to
/// `[rows, ceil(count * bits / 32)]`.
pub fn densified(data: &[u32], rows: usize, count: usize, bits: u8) -> Vec<u32> {
    let fields = 32 / bits as usize;
    let field = |row: &[u32], i: usize| (row[i / fields] >> (i % fields * bits as usize)) as u8;
    let row = |row: &[u32]| bits::pack((0..count).map(|i| field(row, i)), count, bits);
    data.par_chunks((data.len() / rows.max(1)).max(1)).flat_map_iter(row).collect()
}

/// `[ceil(rows * bits / 32), groups]` words to `[groups, rows]` zero points.
pub fn zero_points(words: &[u32], rows: usize, groups: usize, bits: u8) -> Vec<u8> {
    let streams = transposed(words, words.len() / groups.max(1));
    streams.chunks(bits::words(rows, bits)).flat_map(|stream| bits::unpack(stream, rows, bits)).collect()
}

impl Packed {
    /// The weight a reader of the packed tensors would hold.
    pub fn to_weight(&self) -> Weight {
        let Packed { rows, cols, scheme, .. } = *self;
        let groups = self.scales.len() / rows;
        let scales: Vec<f32> = self.scales.iter().map(|s| s.to_f32()).collect();
        let zeros = match &self.zeros {
            Some(words) => zero_points(words, rows, groups, scheme.bits),
            None => vec![scheme.middle(); self.scales.len()],
        };
        let group = scheme.group_size.columns(cols);
        Weight::Gptq(
            Gptq {
                rows,
                cols,
                bits: scheme.bits,
                qweight: transposed(&self.words, rows),
                zeros,
                scales: transposed(&scales, rows),
                g_idx: (0..cols).map(|k| (k / group) as u32).collect(),
            }
            .into(),
        )
    }
}

/// Bytes and one scale an output channel, for inputs that are rounded as well.
pub fn int8(weight: &Quantized, inputs: Inputs) -> Result<Int8, PackError> {
    let Quantized { rows, cols, scheme, .. } = *weight;
    if scheme.bits != 8 {
        return Err(PackError::Bits { layout: "whole", widths: "8", bits: scheme.bits });
    }
    check(weight, true)?;
    if weight.scales.len() != rows {
        return Err(PackError::Length { what: "scales", found: weight.scales.len(), wanted: rows });
    }
    let values: Vec<u8> = weight.codes.iter().map(|code| code ^ 0x80).collect();
    let scales = weight.scales.iter().map(|s| s.to_f32()).collect();
    Ok(Int8 { rows, cols, values: Bytes::from(values), scales, inputs })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::scheme::GroupSize;

    fn sample(rows: usize, cols: usize, bits: u8, sym: bool) -> Quantized {
        let scheme = Scheme { bits, group_size: GroupSize::CHANNEL, sym };
        Quantized {
            rows,
            cols,
            scheme,
            codes: (0..rows * cols).map(|i| (i % cols) as u8 & scheme.top()).collect(),
            scales: (0..rows).map(|n| f16::from_f32(n as f32 + 1.0)).collect(),
            zeros: (0..rows).map(|n| if sym { scheme.middle() } else { n as u8 & scheme.top() }).collect(),
            g_idx: vec![0; cols],
        }
    }

    #[test]
    fn words_run_along_the_inputs() {
        for (bits, words) in [
            (2, vec![0xE4E4_E4E4; 2]),
            (3, vec![0x88FA_C688, 0xC688_FAC6, 0xFAC6_88FA]),
            (4, vec![0x7654_3210, 0xFEDC_BA98, 0x7654_3210, 0xFEDC_BA98]),
            (8, (0..8).map(|w| 0x0302_0100 + 0x0404_0404 * w).collect()),
        ] {
            let packed = pack(&sample(2, 32, bits, true)).unwrap();
            assert_eq!(packed.words, words.repeat(2), "{bits} bits");
            assert_eq!(packed.zeros, None);
        }
        // The zero points 0, 1 .. 9 of the one group run down the outputs.
        assert_eq!(pack(&sample(10, 32, 4, false)).unwrap().zeros, Some(vec![0x7654_3210, 0x98]));
    }

    #[test]
    fn the_values_come_back() {
        for bits in 2..=8 {
            for sym in [true, false] {
                // Neither side fills whole words.
                let weight = sample(13, 37, bits, sym);
                let values: Vec<f32> = (0..13 * 37).map(|i| weight.value(i / 37, i % 37)).collect();
                assert_eq!(pack(&weight).unwrap().to_weight().to_f32(), values, "{bits} bits, symmetric {sym}");
            }
        }
        let bytes = int8(&sample(3, 300, 8, true), Inputs::Token).unwrap();
        assert_eq!(&bytes.values[..3], [0x80, 0x81, 0x82]);
        let values: Vec<f32> = (0..900).map(|i| sample(3, 300, 8, true).value(i / 300, i % 300)).collect();
        assert_eq!(Weight::Int8(bytes.into()).to_f32(), values);
    }

    #[test]
    fn older_words_are_recognized() {
        assert_eq!(is_dense(12, 64, 6), Some(true));
        assert_eq!(is_dense(13, 64, 6), Some(false));
        assert_eq!(is_dense(11, 64, 6), None);
        // Ten fields of three bits a word.
        let loose: Vec<u32> = (0..2)
            .flat_map(|_| [0..10, 10..20, 20..30, 30..32])
            .map(|run| run.enumerate().fold(0, |word, (at, i)| word | (i as u32 % 8) << (3 * at)))
            .collect();
        assert_eq!(densified(&loose, 2, 32, 3), pack(&sample(2, 32, 3, true)).unwrap().words);
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let error = |weight: &Quantized| pack(weight).unwrap_err().to_string();
        let mut odd = sample(2, 8, 4, true);
        odd.zeros[1] = 7;
        assert!(error(&odd).contains("output channel 1 in group 0 is 7; 8 belongs"), "{}", error(&odd));
        let mut wide = sample(2, 8, 4, true);
        wide.scheme.bits = 9;
        assert!(error(&wide).contains("2 to 8 bits, not 9"));
        let four = int8(&sample(2, 8, 4, true), Inputs::Token).unwrap_err().to_string();
        assert!(four.contains("8 bits, not 4"), "{four}");
        assert!(int8(&sample(2, 8, 8, false), Inputs::Token).is_err());
    }
}
