//! The GPTQ layout: integers packed along the input channels, zero points along the output channels.
//!
//! | tensor | shape | holds |
//! |---|---|---|
//! | `qweight` | `[K * bits / 32, N]` | a little-endian bit stream down each column: input channels of one output |
//! | `qzeros` | `[groups, N * bits / 32]` | a little-endian bit stream along each row: outputs of one group |
//! | `scales` | `[groups, N]` | |
//! | `g_idx` | `[K]` | the group of each input channel |
//!
//! Layout and both zero-point conventions as AutoGPTQ and GPTQModel store them.

use half::f16;
use rayon::prelude::*;
use thiserror::Error;

use crate::backend::weight::{Gptq, Weight};
use crate::num::bits;
use crate::quantize::Quantized;
use crate::scheme::Scheme;

/// How a zero point `z` is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Version {
    /// `z - 1` modulo 2^bits: `checkpoint_format` is `gptq`.
    V1,
    /// `z`: `checkpoint_format` is `gptq_v2`.
    V2,
}

impl Version {
    /// The `checkpoint_format` that means this version.
    pub const fn name(self) -> &'static str {
        match self {
            Version::V1 => "gptq",
            Version::V2 => "gptq_v2",
        }
    }

    /// The version a `checkpoint_format` names.
    pub fn parse(name: &str) -> Option<Self> {
        [Version::V1, Version::V2].into_iter().find(|v| v.name() == name)
    }

    /// The version every reader takes the same way, for an artifact with these schemes. v1 is read most widely,
    /// but asymmetric grids lose a zero point to it.
    pub fn safest(schemes: impl IntoIterator<Item = Scheme>) -> Self {
        if schemes.into_iter().all(|scheme| scheme.sym) { Version::V1 } else { Version::V2 }
    }

    /// The smallest zero point that every reader takes the same way: 0 wraps in v1, where ExLlama kernels make it
    /// 2^bits and others leak a carry.
    pub const fn least_zero(self) -> u8 {
        match self {
            Version::V1 => 1,
            Version::V2 => 0,
        }
    }

    /// The stored field of zero point `zero`.
    pub const fn store(self, zero: u8, bits: u8) -> u8 {
        match self {
            Version::V1 => zero.wrapping_sub(1) & mask(bits),
            Version::V2 => zero,
        }
    }

    /// The zero point that a stored field means.
    pub const fn load(self, field: u8, bits: u8) -> u8 {
        match self {
            Version::V1 => field.wrapping_add(1) & mask(bits),
            Version::V2 => field,
        }
    }
}

const fn mask(bits: u8) -> u8 {
    ((1u16 << bits) - 1) as u8
}

/// One linear in the GPTQ layout.
#[derive(Clone, Debug, PartialEq)]
pub struct Packed {
    /// Output channels, N.
    pub rows: usize,
    /// Input channels, K.
    pub cols: usize,
    pub scheme: Scheme,
    pub version: Version,
    /// `[cols * bits / 32, rows]`
    pub qweight: Vec<u32>,
    /// `[groups, rows * bits / 32]`
    pub qzeros: Vec<u32>,
    /// `[groups, rows]`
    pub scales: Vec<f16>,
    /// `[cols]`
    pub g_idx: Vec<u32>,
}

/// Why a weight has no packed form.
#[derive(Debug, Error, PartialEq)]
pub enum PackError {
    #[error("{layout} words hold {widths} bits, not {bits}")]
    Bits { layout: &'static str, widths: &'static str, bits: u8 },
    #[error("it has {rows} outputs and {cols} inputs; there is nothing to pack")]
    Empty { rows: usize, cols: usize },
    #[error(
        "input channel {col} is in group {group}: {layout} holds only groups of neighbouring input channels; leave \
         out activation order, or use static groups"
    )]
    Scattered { layout: &'static str, col: usize, group: u32 },
    #[error("the zero point of output channel {row} in group {group} is {zero}; {wanted} belongs to symmetric weights")]
    Symmetric { row: usize, group: usize, zero: u8, wanted: u8 },
    #[error(
        "{count} {what} channels at {bits} bits fill {} bits, which is no whole number of 32-bit words; the \
         channel count must be a multiple of {multiple}: leave this module unquantized",
        count * *bits as usize
    )]
    Channels { what: &'static str, count: usize, bits: u8, multiple: usize },
    #[error("{what} holds {found} values; {wanted} belong to this shape")]
    Length { what: &'static str, found: usize, wanted: usize },
    #[error("the scale of output channel {row} in group {group} is {scale}; scales must be finite and not zero")]
    Scale { row: usize, group: usize, scale: f16 },
    #[error("{what} {value} at index {index} exceeds {top}, the largest value of {bits} bits")]
    TooLarge { what: &'static str, value: u8, index: usize, top: u8, bits: u8 },
    #[error(
        "the zero point of output channel {row} in group {group} is 0, which format `gptq` cannot hold: readers \
         differ on it; write `gptq_v2`"
    )]
    ZeroPoint { row: usize, group: usize },
    #[error("input channel {col} is in group {group}, but there are {groups} groups")]
    Group { col: usize, group: u32, groups: usize },
}

/// Input channels that fill whole words, and the words they fill.
fn period(bits: u8) -> Result<(usize, usize), PackError> {
    match bits {
        2 => Ok((16, 1)),
        3 => Ok((32, 3)),
        4 => Ok((8, 1)),
        8 => Ok((4, 1)),
        other => Err(PackError::Bits { layout: "GPTQ", widths: "2, 3, 4 or 8", bits: other }),
    }
}

/// Whether a linear of `rows` outputs by `cols` inputs has a GPTQ form at this width: both channel counts
/// must fill whole words. Needs no data, so it can be asked before any work.
pub fn check_shape(rows: usize, cols: usize, bits: u8) -> Result<(), PackError> {
    let (multiple, _) = period(bits)?;
    for (what, count) in [("input", cols), ("output", rows)] {
        if count == 0 || count % multiple != 0 {
            return Err(PackError::Channels { what, count, bits, multiple });
        }
    }
    Ok(())
}

/// Packs one quantized linear.
pub fn pack(weight: &Quantized, version: Version) -> Result<Packed, PackError> {
    check_shape(weight.rows, weight.cols, weight.scheme.bits)?;
    check_values(weight)?;
    let Quantized { rows, cols, scheme, .. } = *weight;
    if let Some(at) = weight.zeros.iter().position(|&zero| zero < version.least_zero()) {
        return Err(PackError::ZeroPoint { row: at % rows, group: at / rows });
    }
    let stored = weight
        .zeros
        .par_chunks(rows)
        .flat_map_iter(|zeros| bits::pack(zeros.iter().map(|&z| version.store(z, scheme.bits)), rows, scheme.bits));
    Ok(Packed {
        rows,
        cols,
        scheme,
        version,
        qweight: pack_codes(&weight.codes, rows, cols, scheme.bits)?,
        qzeros: stored.collect(),
        scales: weight.scales.clone(),
        g_idx: weight.g_idx.clone(),
    })
}

/// What every layout asks of a weight: counts that agree, values in range, usable scales.
pub(super) fn check_values(weight: &Quantized) -> Result<(), PackError> {
    let Quantized { rows, cols, scheme, .. } = *weight;
    if rows == 0 || cols == 0 {
        return Err(PackError::Empty { rows, cols });
    }
    let groups = weight.scales.len() / rows;
    for (what, found, wanted) in [
        ("codes", weight.codes.len(), rows * cols),
        ("scales", weight.scales.len(), groups.max(1) * rows),
        ("zeros", weight.zeros.len(), groups * rows),
        ("g_idx", weight.g_idx.len(), cols),
    ] {
        if found != wanted {
            return Err(PackError::Length { what, found, wanted });
        }
    }
    let top = scheme.top();
    for (what, values) in [("code", &weight.codes), ("zero point", &weight.zeros)] {
        // Whole chunks are compared before any index is looked for: this runs over every weight.
        let fits = values.par_chunks(1 << 16).all(|chunk| chunk.iter().fold(0, |max, &v| v.max(max)) <= top);
        if fits {
            continue;
        }
        if let Some(index) = values.iter().position(|&v| v > top) {
            return Err(PackError::TooLarge { what, value: values[index], index, top, bits: scheme.bits });
        }
    }
    if let Some(at) = weight.scales.iter().position(|s| !s.is_finite() || s.to_f32() == 0.0) {
        return Err(PackError::Scale { row: at % rows, group: at / rows, scale: weight.scales[at] });
    }
    match weight.g_idx.iter().position(|&g| g as usize >= groups) {
        Some(col) => Err(PackError::Group { col, group: weight.g_idx[col], groups }),
        None => Ok(()),
    }
}

/// For layouts without `g_idx`: groups must lie in the order of the input channels.
pub(super) fn check_order(weight: &Quantized, layout: &'static str) -> Result<(), PackError> {
    let size = weight.scheme.group_size.columns(weight.cols);
    match weight.g_idx.iter().enumerate().find(|(k, g)| **g as usize != k / size) {
        Some((col, &group)) => Err(PackError::Scattered { layout, col, group }),
        None => Ok(()),
    }
}

/// `[rows, cols]` codes to `[cols * bits / 32, rows]` words.
fn pack_codes(codes: &[u8], rows: usize, cols: usize, bits: u8) -> Result<Vec<u32>, PackError> {
    let (fields, words) = period(bits)?;
    let mut out = vec![0; cols / fields * words * rows];
    match bits {
        2 => transpose::<16, 1>(codes, rows, cols, &mut out, |run| [little_endian(run, 2)]),
        4 => transpose::<8, 1>(codes, rows, cols, &mut out, |run| [little_endian(run, 4)]),
        8 => transpose::<4, 1>(codes, rows, cols, &mut out, |run| [little_endian(run, 8)]),
        _ => transpose::<32, 3>(codes, rows, cols, &mut out, |run| {
            let stream = run.iter().rev().fold(0u128, |stream, &code| stream << bits | code as u128);
            [stream as u32, (stream >> 32) as u32, (stream >> 64) as u32]
        }),
    }
    Ok(out)
}

#[inline(always)]
fn little_endian<const FIELDS: usize>(run: &[u8; FIELDS], bits: u8) -> u32 {
    run.iter().enumerate().fold(0, |word, (j, &code)| word | (code as u32) << (j * bits as usize))
}

/// Fills `out` with the words of every run of `FIELDS` codes, `WORDS` a run, tile by tile: a word's
/// neighbours in memory belong to other rows, whose codes lie `cols` apart.
fn transpose<const FIELDS: usize, const WORDS: usize>(
    codes: &[u8],
    rows: usize,
    cols: usize,
    out: &mut [u32],
    word: impl Fn(&[u8; FIELDS]) -> [u32; WORDS] + Sync,
) {
    /// Runs that one task packs, and rows of one tile: whole cache lines on both sides.
    const RUNS: usize = 16;
    const ROWS: usize = 16;
    out.par_chunks_mut(RUNS * WORDS * rows).enumerate().for_each(|(task, out)| {
        let first = task * RUNS * FIELDS;
        let last = cols.min(first + RUNS * FIELDS);
        let mut tile = [[[0; ROWS]; WORDS]; RUNS];
        for n in (0..rows).step_by(ROWS) {
            let height = ROWS.min(rows - n);
            for i in 0..height {
                let row = &codes[(n + i) * cols + first..(n + i) * cols + last];
                for (run, tile) in row.as_chunks::<FIELDS>().0.iter().zip(&mut tile) {
                    for (w, tile) in word(run).into_iter().zip(tile) {
                        tile[i] = w;
                    }
                }
            }
            for (line, tile) in out.chunks_exact_mut(rows).zip(tile.as_flattened()) {
                line[n..n + height].copy_from_slice(&tile[..height]);
            }
        }
    });
}

/// `[groups, rows * bits / 32]` stored words to `[groups, rows]` true zero points.
pub fn zero_points(qzeros: &[u32], rows: usize, bits: u8, version: Version) -> Vec<u8> {
    let load = |words| bits::unpack(words, rows, bits).into_iter().map(|field| version.load(field, bits));
    qzeros.par_chunks(bits::words(rows, bits)).flat_map_iter(load).collect()
}

/// The integers, scales and zero points that a packed linear holds.
pub fn unpack(packed: &Packed) -> Quantized {
    let Packed { rows, cols, scheme, version, .. } = *packed;
    let mut codes = vec![0; rows * cols];
    codes.par_chunks_mut(cols.max(1)).enumerate().for_each(|(n, row)| {
        for (k, code) in row.iter_mut().enumerate() {
            *code = bits::get(|w| packed.qweight[w * rows + n], k, scheme.bits);
        }
    });
    Quantized {
        rows,
        cols,
        scheme,
        codes,
        scales: packed.scales.clone(),
        zeros: zero_points(&packed.qzeros, rows, scheme.bits, version),
        g_idx: packed.g_idx.clone(),
    }
}

impl Packed {
    /// The number of groups.
    pub fn groups(&self) -> usize {
        self.scales.len() / self.rows
    }

    /// The weight a reader of the packed tensors would hold.
    pub fn to_weight(&self) -> Weight {
        self.clone().into_weight()
    }

    /// [`Packed::to_weight`] without copying the integers.
    pub fn into_weight(self) -> Weight {
        Weight::Gptq(
            Gptq {
                rows: self.rows,
                cols: self.cols,
                bits: self.scheme.bits,
                zeros: zero_points(&self.qzeros, self.rows, self.scheme.bits, self.version),
                qweight: self.qweight,
                scales: self.scales.iter().map(|s| s.to_f32()).collect(),
                g_idx: self.g_idx,
            }
            .into(),
        )
    }
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
            scales: vec![f16::from_f32(0.5); rows],
            zeros: vec![scheme.middle(); rows],
            g_idx: vec![0; cols],
        }
    }

    #[test]
    fn zero_words_of_symmetric_weights() {
        for (bits, version, words) in [
            (2, Version::V1, vec![0x5555_5555; 2]),
            (4, Version::V1, vec![0x7777_7777; 4]),
            (8, Version::V1, vec![0x7F7F_7F7F; 8]),
            (3, Version::V1, vec![0xDB6D_B6DB, 0xB6DB_6DB6, 0x6DB6_DB6D]),
            (2, Version::V2, vec![0xAAAA_AAAA; 2]),
            (4, Version::V2, vec![0x8888_8888; 4]),
            (8, Version::V2, vec![0x8080_8080; 8]),
            (3, Version::V2, vec![0x2492_4924, 0x4924_9249, 0x9249_2492]),
        ] {
            assert_eq!(pack(&sample(32, 32, bits, true), version).unwrap().qzeros, words, "{bits} bits, {version:?}");
        }
    }

    #[test]
    fn code_words_run_down_the_input_channels() {
        for (bits, words) in [
            (2, vec![0xE4E4_E4E4; 2]),
            (3, vec![0x88FA_C688, 0xC688_FAC6, 0xFAC6_88FA]),
            (4, vec![0x7654_3210, 0xFEDC_BA98, 0x7654_3210, 0xFEDC_BA98]),
            (8, (0..8).map(|w| 0x0302_0100 + 0x0404_0404 * w).collect()),
        ] {
            let packed = pack(&sample(32, 32, bits, true), Version::V1).unwrap();
            let column: Vec<u32> = packed.qweight.chunks(32).map(|row| row[7]).collect();
            assert_eq!(column, words, "{bits} bits");
        }
    }

    #[test]
    fn a_zero_of_zero_is_read_but_not_written_in_v1() {
        let mut weight = sample(8, 8, 4, false);
        weight.zeros = vec![3, 1, 15, 3, 8, 0, 7, 2];
        assert_eq!(pack(&weight, Version::V1), Err(PackError::ZeroPoint { row: 5, group: 0 }));
        assert_eq!(pack(&weight, Version::V2).unwrap().qzeros, [0x2708_3F13]);
        weight.zeros[5] = 1;
        let packed = pack(&weight, Version::V1).unwrap();
        assert_eq!(packed.qzeros, [0x1607_2E02]);
        assert_eq!(unpack(&packed).zeros, weight.zeros);
        // What others wrote: each field is increased on its own.
        assert_eq!(zero_points(&[0x16F7_FE0F], 8, 4, Version::V1), [0, 1, 15, 0, 8, 0, 7, 2]);
    }

    #[test]
    fn one_asymmetric_module_decides_the_version() {
        let scheme = |sym| Scheme { bits: 4, group_size: GroupSize::CHANNEL, sym };
        assert_eq!(Version::safest([scheme(true), scheme(true)]), Version::V1);
        assert_eq!(Version::safest([scheme(true), scheme(false)]), Version::V2);
    }

    #[test]
    fn refusals_name_the_numbers() {
        let odd = pack(&sample(32, 36, 4, true), Version::V1).unwrap_err().to_string();
        assert!(odd.contains("36 input") && odd.contains("144 bits") && odd.contains("multiple of 8"), "{odd}");
        let narrow = pack(&sample(40, 64, 3, true), Version::V1).unwrap_err().to_string();
        assert!(narrow.contains("40 output") && narrow.contains("multiple of 32"), "{narrow}");
        assert_eq!(check_shape(32, 32, 5).unwrap_err().to_string(), "GPTQ words hold 2, 3, 4 or 8 bits, not 5");

        let mut zero = sample(8, 8, 4, true);
        zero.scales[3] = f16::NEG_ZERO;
        assert!(matches!(pack(&zero, Version::V1), Err(PackError::Scale { row: 3, group: 0, .. })));
        zero.scales[3] = f16::INFINITY;
        assert!(matches!(pack(&zero, Version::V1), Err(PackError::Scale { row: 3, .. })));

        let mut large = sample(8, 8, 4, true);
        large.codes[9] = 16;
        assert!(matches!(pack(&large, Version::V1), Err(PackError::TooLarge { value: 16, index: 9, top: 15, .. })));
        let mut lost = sample(8, 8, 4, true);
        lost.g_idx[2] = 1;
        assert_eq!(pack(&lost, Version::V1), Err(PackError::Group { col: 2, group: 1, groups: 1 }));
        lost.g_idx.pop();
        assert!(matches!(pack(&lost, Version::V1), Err(PackError::Length { what: "g_idx", found: 7, wanted: 8 })));
    }
}
