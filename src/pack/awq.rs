//! The layout of AutoAWQ ("GEMM"): four bits, everything packed along the output channels.
//!
//! | tensor | shape | holds |
//! |---|---|---|
//! | `qweight` | `[K, N / 8]` | eight output channels of one input channel |
//! | `qzeros` | `[groups, N / 8]` | eight zero points, as they are |
//! | `scales` | `[groups, N]` | |
//!
//! The field at bits `4 * i` of a word belongs to output channel `ORDER[i]` of its eight. Groups are runs of
//! neighbouring input channels. As AutoAWQ stores it.

use half::f16;
use rayon::prelude::*;

use super::gptq::{PackError, check_order, check_values};
use crate::backend::weight::{Gptq, Weight};
use crate::num::bits;
use crate::quantize::Quantized;
use crate::scheme::Scheme;

/// Which of eight output channels each field of a word holds, from the lowest bits.
pub const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// Fields of a word.
pub const FIELDS: usize = 8;

/// The one width.
pub const BITS: u8 = 4;

/// One linear in this layout.
#[derive(Clone, Debug, PartialEq)]
pub struct Packed {
    /// Output channels, N.
    pub rows: usize,
    /// Input channels, K.
    pub cols: usize,
    pub scheme: Scheme,
    /// `[cols, rows / 8]`
    pub qweight: Vec<u32>,
    /// `[groups, rows / 8]`
    pub qzeros: Vec<u32>,
    /// `[groups, rows]`
    pub scales: Vec<f16>,
}

/// Whether a linear of `rows` outputs by `cols` inputs has this form. Needs no data, so it can be asked before any
/// work.
pub fn check_shape(rows: usize, cols: usize, bits: u8) -> Result<(), PackError> {
    if bits != BITS {
        return Err(PackError::Bits { layout: "AWQ", widths: "4", bits });
    }
    if rows == 0 || cols == 0 {
        return Err(PackError::Empty { rows, cols });
    }
    if !rows.is_multiple_of(FIELDS) {
        return Err(PackError::Channels { what: "output", count: rows, bits, multiple: FIELDS });
    }
    Ok(())
}

/// Packs one quantized linear.
pub fn pack(weight: &Quantized) -> Result<Packed, PackError> {
    let Quantized { rows, cols, scheme, .. } = *weight;
    check_shape(rows, cols, scheme.bits)?;
    check_values(weight)?;
    check_order(weight, "AWQ")?;
    /// Input channels that one task packs: whole cache lines of codes.
    const RUN: usize = 64;
    let words = rows / FIELDS;
    let mut qweight = vec![0; cols * words];
    qweight.par_chunks_mut(RUN * words).enumerate().for_each(|(task, out)| {
        for w in 0..words {
            for (i, channel) in ORDER.iter().enumerate() {
                let codes = &weight.codes[(w * FIELDS + channel) * cols + task * RUN..];
                for (line, &code) in out.chunks_exact_mut(words).zip(codes) {
                    line[w] |= u32::from(code) << (4 * i);
                }
            }
        }
    });
    Ok(Packed {
        rows,
        cols,
        scheme,
        qweight,
        qzeros: weight.zeros.chunks_exact(FIELDS).map(word).collect(),
        scales: weight.scales.clone(),
    })
}

/// Eight values in channel order as one word.
fn word(values: &[u8]) -> u32 {
    ORDER.iter().enumerate().fold(0, |word, (i, &channel)| word | u32::from(values[channel]) << (4 * i))
}

/// The value that `word` holds of output channel `channel` of its eight.
fn field(word: u32, channel: usize) -> u32 {
    // The inverse of `ORDER`: even channels come first.
    let at = channel / 2 + if channel.is_multiple_of(2) { 0 } else { 4 };
    word >> (4 * at) & 15
}

/// `[.., rows / 8]` words to `[.., rows]` values.
pub fn unpack(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|&word| (0..FIELDS).map(move |channel| field(word, channel) as u8)).collect()
}

/// The weight that these tensors mean, its words laid out anew: `qweight` `[cols, rows / 8]`, `zeros` and `scales`
/// `[groups, rows]`, groups of `group` neighbouring input channels.
pub fn weight(rows: usize, cols: usize, group: usize, qweight: &[u32], zeros: Vec<u8>, scales: Vec<f32>) -> Weight {
    let words = rows / FIELDS;
    let mut out = vec![0; bits::words(cols, BITS) * rows];
    out.par_chunks_mut(rows).enumerate().for_each(|(run, out)| {
        let lines = qweight[run * FIELDS * words..].chunks_exact(words).take(FIELDS);
        for (i, line) in lines.enumerate() {
            for (&packed, out) in line.iter().zip(out.chunks_exact_mut(FIELDS)) {
                for (channel, out) in out.iter_mut().enumerate() {
                    *out |= field(packed, channel) << (4 * i);
                }
            }
        }
    });
    let g_idx = (0..cols).map(|k| (k / group.max(1)) as u32).collect();
    Weight::Gptq(Gptq { rows, cols, bits: BITS, qweight: out, zeros, scales, g_idx }.into())
}

impl Packed {
    /// The weight a reader of the packed tensors would hold.
    pub fn to_weight(&self) -> Weight {
        let scales = self.scales.iter().map(|s| s.to_f32()).collect();
        let group = self.scheme.group_size.columns(self.cols);
        weight(self.rows, self.cols, group, &self.qweight, unpack(&self.qzeros), scales)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::scheme::GroupSize;

    fn sample(rows: usize, cols: usize, value: impl Fn(usize, usize) -> u8) -> Quantized {
        Quantized {
            rows,
            cols,
            scheme: Scheme { bits: 4, group_size: GroupSize::new(4).unwrap(), sym: false },
            codes: (0..rows * cols).map(|i| value(i / cols, i % cols)).collect(),
            scales: vec![f16::ONE; cols / 4 * rows],
            zeros: (0..cols / 4 * rows).map(|i| (i % rows % 16) as u8).collect(),
            g_idx: (0..cols).map(|k| k as u32 / 4).collect(),
        }
    }

    #[test]
    fn channels_interleave_in_a_word() {
        let packed = pack(&sample(16, 8, |n, _| n as u8 % 16)).unwrap();
        assert_eq!(packed.qweight, [0x7531_6420, 0xFDB9_ECA8].repeat(8));
        assert_eq!(packed.qzeros, [0x7531_6420, 0xFDB9_ECA8].repeat(2));
        assert_eq!(unpack(&packed.qzeros[..2]), (0..16).collect::<Vec<u8>>());
    }

    #[test]
    fn inputs_keep_their_places() {
        // More input channels than one task packs, and no whole number of words of them.
        let weight = sample(8, 132, |n, k| ((n * 5 + k * 3) % 16) as u8);
        let packed = pack(&weight).unwrap();
        let values = packed.to_weight().to_f32();
        for n in 0..8 {
            for k in 0..132 {
                assert_eq!(values[n * 132 + k], weight.value(n, k), "{n}, {k}");
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let eight = Quantized { scheme: Scheme { bits: 8, ..sample(8, 8, |_, _| 0).scheme }, ..sample(8, 8, |_, _| 0) };
        assert_eq!(pack(&eight).unwrap_err().to_string(), "AWQ words hold 4 bits, not 8");
        let narrow = pack(&sample(12, 8, |_, _| 0)).unwrap_err().to_string();
        assert!(narrow.contains("12 output channels") && narrow.contains("multiple of 8"), "{narrow}");
        let mut scattered = sample(8, 8, |_, _| 0);
        scattered.g_idx.swap(3, 4);
        let error = pack(&scattered).unwrap_err().to_string();
        assert!(error.starts_with("input channel 3 is in group 1: AWQ"), "{error}");
        let large = pack(&sample(8, 8, |n, k| if (n, k) == (1, 2) { 16 } else { 0 })).unwrap_err().to_string();
        assert!(large.contains("code 16 at index 10"), "{large}");
    }
}
