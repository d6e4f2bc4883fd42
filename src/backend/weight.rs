//! A stored weight: what a file holds, dequantized by panels of rows and never as a whole.

use std::ops::Range;
use std::sync::Arc;

use ndarray::Array2;

use crate::num::few::{self, SIDE};
use crate::num::ggml::GgmlType;
use crate::num::simd::{prefetch, vectorized};
use crate::num::{bits, e4m3, int8};
use crate::tensor::{Bytes, Dtype, widen};

/// A matrix of `rows` output channels by `cols` input channels, in the form its file holds.
#[derive(Clone, Debug)]
pub enum Weight {
    Dense(Dense),
    Gptq(Arc<Gptq>),
    Ggml(Ggml),
    Int8(Arc<Int8>),
    Fp8(Arc<Fp8>),
}

/// Row-major floats.
#[derive(Clone, Debug)]
pub struct Dense {
    pub rows: usize,
    pub cols: usize,
    pub dtype: Dtype,
    pub bytes: Bytes,
}

/// GPTQ integers: `W[n, k] = scales[g, n] * (q[k, n] - zeros[g, n])` with `g = g_idx[k]`.
#[derive(Clone, Debug)]
pub struct Gptq {
    pub rows: usize,
    pub cols: usize,
    pub bits: u8,
    /// `[cols * bits / 32, rows]`: fields packed along the input channels.
    pub qweight: Vec<u32>,
    /// `[groups, rows]`, true zero points (the v1 offset already undone).
    pub zeros: Vec<u8>,
    /// `[groups, rows]`, widened from the stored f16.
    pub scales: Vec<f32>,
    /// `[cols]`, the group of each input channel.
    pub g_idx: Vec<u32>,
}

/// Rows of ggml blocks, as a GGUF file holds them.
#[derive(Clone, Debug)]
pub struct Ggml {
    pub rows: usize,
    pub cols: usize,
    pub kind: GgmlType,
    pub bytes: Bytes,
}

/// Signed bytes: `W[n, k] = scales[n] * values[n, k]`, for inputs that are rounded to bytes as well.
#[derive(Clone, Debug)]
pub struct Int8 {
    pub rows: usize,
    pub cols: usize,
    /// `[rows, cols]`, two's complement.
    pub values: Bytes,
    /// `[rows]`
    pub scales: Vec<f32>,
    pub inputs: Inputs,
}

/// E4M3 numbers: `W[n, k] = scale * values[n, k]`, one scale a tile.
#[derive(Clone, Debug)]
pub struct Fp8 {
    pub rows: usize,
    pub cols: usize,
    /// `[rows, cols]`
    pub values: Bytes,
    /// `[ceil(rows / tile.0), ceil(cols / tile.1)]`
    pub scales: Vec<f32>,
    /// Rows and columns that share a scale.
    pub tile: (usize, usize),
    pub inputs: Inputs,
}

/// What becomes of the inputs of a linear before the product with numbers of 8 bits: they are rounded to the same
/// kind of number. The scale maps the largest magnitude to 127.5 (integers, as compressed-tensors has it) or 448.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Inputs {
    /// They stay as they are.
    Float,
    /// Each token by a scale of its own.
    Token,
    /// Each token and run of so many channels by a scale of its own.
    Group(usize),
    /// Each token by a scale and an integer zero point of its own: the whole range is used.
    TokenAsymmetric,
    /// All by one scale that calibration found; integers stand for `scale * (q - zero)`.
    Tensor { scale: f32, zero: i32 },
}

impl Inputs {
    /// Whether there may be zero points other than 0.
    pub fn has_zeros(self) -> bool {
        matches!(self, Inputs::TokenAsymmetric) || matches!(self, Inputs::Tensor { zero, .. } if zero != 0)
    }

    /// Channels, of `cols`, that share a scale.
    pub fn group(self, cols: usize) -> usize {
        match self {
            Inputs::Group(size) => size.clamp(1, cols.max(1)),
            _ => cols.max(1),
        }
    }

    /// Channels, of `cols`, whose products with bytes are summed as integers: of a group as many as its sums allow.
    /// Groups are no longer than that.
    pub fn segment(self, cols: usize) -> usize {
        self.group(cols).min(int8::LONGEST)
    }
}

impl Weight {
    pub fn rows(&self) -> usize {
        match self {
            Weight::Dense(w) => w.rows,
            Weight::Gptq(w) => w.rows,
            Weight::Ggml(w) => w.rows,
            Weight::Int8(w) => w.rows,
            Weight::Fp8(w) => w.rows,
        }
    }

    pub fn cols(&self) -> usize {
        match self {
            Weight::Dense(w) => w.cols,
            Weight::Gptq(w) => w.cols,
            Weight::Ggml(w) => w.cols,
            Weight::Int8(w) => w.cols,
            Weight::Fp8(w) => w.cols,
        }
    }

    /// Writes output channels `rows` as f32, row-major, into `out`.
    pub fn panel(&self, rows: Range<usize>, out: &mut [f32]) {
        match self {
            Weight::Dense(w) => {
                let row = w.cols * w.dtype.size();
                widen(w.dtype, &w.bytes[rows.start * row..rows.end * row], out);
            }
            Weight::Gptq(w) => w.panel(rows, out),
            Weight::Ggml(w) => {
                let row = w.bytes.len() / w.rows;
                w.kind.decode(&w.bytes[rows.start * row..rows.end * row], out);
            }
            Weight::Int8(w) => w.panel(rows, out),
            Weight::Fp8(w) => w.panel(rows, out),
        }
    }

    /// Products of output channels `rows` with some rows of `x`, `out[i, r] = sum_k w[rows.start + i, k] x[r, k]`, from the
    /// stored form. A product depends on its channel and its row of `x` alone, bit for bit.
    pub fn products(&self, rows: Range<usize>, x: &[f32], out: &mut [f32]) {
        let cols = self.cols();
        if let Weight::Gptq(w) = self {
            return if x.len() == cols { w.products(rows, x, out) } else { w.products_of_few(rows, x, out) };
        }
        if x.len() == cols
            && let Some((kind, bytes)) = self.blocks(rows.clone())
        {
            return kind.products(bytes, x, out);
        }
        let mut values = vec![0.0; few::TOGETHER * cols];
        let at_once = out.len() / rows.len().max(1) * few::TOGETHER;
        for (i, out) in out.chunks_mut(at_once.max(1)).enumerate() {
            let first = rows.start + i * few::TOGETHER;
            let part = first..(first + few::TOGETHER).min(rows.end);
            let values = &mut values[..part.len() * cols];
            // The next rows come from memory while these are multiplied.
            let next = part.end..(part.end + few::TOGETHER).min(rows.end);
            if let Some((_, bytes)) = self.blocks(next) {
                prefetch(bytes);
            }
            match self.blocks(part.clone()) {
                Some((kind, bytes)) => kind.values(bytes, values),
                None => self.panel(part, values),
            }
            few::products(values, x, cols, out);
        }
    }

    /// Output channels `rows` as blocks of ggml, which plain floats are as well.
    fn blocks(&self, rows: Range<usize>) -> Option<(GgmlType, &[u8])> {
        let (kind, bytes, row) = match self {
            Weight::Dense(w) => {
                let kind = match w.dtype {
                    Dtype::F16 => GgmlType::F16,
                    Dtype::BF16 => GgmlType::BF16,
                    _ => GgmlType::F32,
                };
                (kind, &w.bytes, w.cols * w.dtype.size())
            }
            Weight::Ggml(w) => (w.kind, &w.bytes, w.bytes.len() / w.rows),
            Weight::Gptq(_) | Weight::Int8(_) | Weight::Fp8(_) => return None,
        };
        Some((kind, &bytes[rows.start * row..rows.end * row]))
    }

    /// The whole matrix, `[rows, cols]`, as f32.
    pub fn to_array(&self) -> Array2<f32> {
        let mut out = Array2::zeros((self.rows(), self.cols()));
        if let Some(values) = out.as_slice_mut() {
            self.panel(0..self.rows(), values);
        }
        out
    }

    /// The whole matrix as f32; for one linear at a time, where a method edits or compares it.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows() * self.cols()];
        self.panel(0..self.rows(), &mut out);
        out
    }
}

impl Int8 {
    fn panel(&self, rows: Range<usize>, out: &mut [f32]) {
        for (n, out) in rows.zip(out.chunks_exact_mut(self.cols)) {
            let scale = self.scales[n];
            let values = &self.values[n * self.cols..];
            vectorized(|| out.iter_mut().zip(values).for_each(|(o, &v)| *o = scale * f32::from(v as i8)));
        }
    }
}

impl Fp8 {
    fn panel(&self, rows: Range<usize>, out: &mut [f32]) {
        let across = self.cols.div_ceil(self.tile.1);
        for (n, out) in rows.zip(out.chunks_exact_mut(self.cols)) {
            let values = self.values[n * self.cols..].chunks(self.tile.1);
            let scales = &self.scales[n / self.tile.0 * across..];
            for ((out, values), &scale) in out.chunks_mut(self.tile.1).zip(values).zip(scales) {
                e4m3::decode_all(values, scale, out);
            }
        }
    }
}

impl Gptq {
    fn panel(&self, rows: Range<usize>, out: &mut [f32]) {
        for (n, out) in rows.zip(out.chunks_exact_mut(self.cols)) {
            let word = |w: usize| self.qweight[w * self.rows + n];
            let mut k = 0;
            while k < self.cols {
                // Runs of equal g_idx are whole groups unless activation order scattered them.
                let g = self.g_idx[k] as usize;
                let end =
                    self.g_idx[k..].iter().position(|&other| other as usize != g).map_or(self.cols, |run| k + run);
                let (scale, zero) = (self.scales[g * self.rows + n], self.zeros[g * self.rows + n] as f32);
                match self.bits {
                    4 => self.run::<8>(word, k..end, scale, zero, out),
                    2 => self.run::<16>(word, k..end, scale, zero, out),
                    8 => self.run::<4>(word, k..end, scale, zero, out),
                    bits => {
                        for k in k..end {
                            out[k] = scale * (bits::get(word, k, bits) as f32 - zero);
                        }
                    }
                }
                k = end;
            }
        }
    }

    /// One run of columns for widths that divide a word into `PER` fields.
    #[inline(always)]
    fn run<const PER: usize>(
        &self,
        word: impl Fn(usize) -> u32,
        run: Range<usize>,
        scale: f32,
        zero: f32,
        out: &mut [f32],
    ) {
        let mask = (1u32 << self.bits) - 1;
        let mut k = run.start;
        while k < run.end {
            if k.is_multiple_of(PER) && k + PER <= run.end {
                let packed = word(k / PER);
                for (j, o) in out[k..k + PER].iter_mut().enumerate() {
                    *o = scale * (((packed >> (32 / PER * j)) & mask) as f32 - zero);
                }
                k += PER;
            } else {
                out[k] = scale * (bits::get(&word, k, self.bits) as f32 - zero);
                k += 1;
            }
        }
    }

    /// A word holds one output channel, so channels stand side by side: each sums up its input channels in order.
    fn products(&self, rows: Range<usize>, x: &[f32], out: &mut [f32]) {
        vectorized(|| {
            for (i, out) in out.chunks_mut(SIDE).enumerate() {
                let first = rows.start + i * SIDE;
                match self.bits {
                    4 => self.side_by_side::<8>(first, x, out),
                    2 => self.side_by_side::<16>(first, x, out),
                    8 => self.side_by_side::<4>(first, x, out),
                    _ => self.side_by_side::<0>(first, x, out),
                }
            }
        });
    }

    /// `PER` as in [`Self::run`], or 0.
    #[inline(always)]
    fn side_by_side<const PER: usize>(&self, first: usize, x: &[f32], out: &mut [f32]) {
        let (count, mask) = (out.len(), (1u32 << self.bits) - 1);
        let words = |w: usize| &self.qweight[w * self.rows + first..][..count];
        let mut sums = [0.0; SIDE];
        let mut k = 0;
        while k < self.cols {
            let group = self.g_idx[k];
            let end = self.g_idx[k..].iter().position(|&other| other != group).map_or(self.cols, |run| k + run);
            let at = group as usize * self.rows + first;
            let (mut zeros, mut products) = ([0.0; SIDE], [0.0; SIDE]);
            for (to, &zero) in zeros.iter_mut().zip(&self.zeros[at..at + count]) {
                *to = zero as f32;
            }
            while k < end {
                if PER > 0 && k.is_multiple_of(PER) && k + PER <= end {
                    let mut packed = [0; SIDE];
                    packed[..count].copy_from_slice(words(k / PER));
                    for j in 0..PER {
                        for l in 0..SIDE {
                            products[l] += x[k + j] * ((packed[l] & mask) as f32 - zeros[l]);
                            packed[l] >>= self.bits;
                        }
                    }
                    k += PER;
                } else {
                    for l in 0..count {
                        products[l] += x[k] * (bits::get(|w| words(w)[l], k, self.bits) as f32 - zeros[l]);
                    }
                    k += 1;
                }
            }
            for ((sum, product), scale) in sums.iter_mut().zip(products).zip(&self.scales[at..at + count]) {
                *sum += scale * product;
            }
        }
        out.copy_from_slice(&sums[..count]);
    }

    /// As [`Self::products`], with the same sums in the same order, for several rows of `x`.
    fn products_of_few(&self, rows: Range<usize>, x: &[f32], out: &mut [f32]) {
        let t = x.len() / self.cols.max(1);
        let mut scratch = Scratch { w: vec![[0.0; SIDE]; DEPTH], products: Vec::new(), sums: Vec::new() };
        for (i, out) in out.chunks_mut((SIDE * t).max(1)).enumerate() {
            let first = rows.start + i * SIDE;
            match self.bits {
                4 => self.side_by_side_of_few::<8>(first, x, out, &mut scratch),
                2 => self.side_by_side_of_few::<16>(first, x, out, &mut scratch),
                8 => self.side_by_side_of_few::<4>(first, x, out, &mut scratch),
                _ => self.side_by_side_of_few::<0>(first, x, out, &mut scratch),
            }
        }
    }

    fn side_by_side_of_few<const PER: usize>(&self, first: usize, x: &[f32], out: &mut [f32], scratch: &mut Scratch) {
        let t = x.len() / self.cols;
        let count = out.len() / t;
        let Scratch { w, products, sums } = scratch;
        sums.clear();
        sums.resize(t, [0.0; SIDE]);
        let mut k = 0;
        while k < self.cols {
            let group = self.g_idx[k];
            let end = self.g_idx[k..].iter().position(|&other| other != group).map_or(self.cols, |run| k + run);
            products.clear();
            products.resize(t, [0.0; SIDE]);
            while k < end {
                let part = k..(k + DEPTH).min(end);
                let w = &mut w[..part.len()];
                vectorized(|| self.differences::<PER>(first, count, part, w));
                few::side_by_side(w, &x[k..], self.cols, products);
                k += w.len();
            }
            let at = group as usize * self.rows + first;
            let mut scales = [0.0; SIDE];
            scales[..count].copy_from_slice(&self.scales[at..at + count]);
            vectorized(|| {
                for (sums, products) in sums.iter_mut().zip(&*products) {
                    for l in 0..SIDE {
                        sums[l] += scales[l] * products[l];
                    }
                }
            });
        }
        for (l, out) in out.chunks_exact_mut(t).enumerate() {
            out.iter_mut().zip(&*sums).for_each(|(out, sums)| *out = sums[l]);
        }
    }

    /// Codes less zero points of `count` channels from `first` on, of columns `part`, which have one group.
    #[inline(always)]
    fn differences<const PER: usize>(&self, first: usize, count: usize, part: Range<usize>, w: &mut [[f32; SIDE]]) {
        let mask = (1u32 << self.bits) - 1;
        let words = |word: usize| &self.qweight[word * self.rows + first..][..count];
        let at = self.g_idx[part.start] as usize * self.rows + first;
        let mut zeros = [0.0; SIDE];
        for (to, &zero) in zeros.iter_mut().zip(&self.zeros[at..at + count]) {
            *to = zero as f32;
        }
        let mut k = part.start;
        while k < part.end {
            let to = &mut w[k - part.start..];
            if PER > 0 && k.is_multiple_of(PER) && k + PER <= part.end {
                let mut packed = [0; SIDE];
                packed[..count].copy_from_slice(words(k / PER));
                for to in &mut to[..PER] {
                    for l in 0..SIDE {
                        to[l] = (packed[l] & mask) as f32 - zeros[l];
                        packed[l] >>= self.bits;
                    }
                }
                k += PER;
            } else {
                for l in 0..count {
                    to[0][l] = bits::get(|w| words(w)[l], k, self.bits) as f32 - zeros[l];
                }
                k += 1;
            }
        }
    }
}

/// Columns of GPTQ integers that are decoded at a time.
const DEPTH: usize = 64;

/// What is kept from one run of columns to the next.
struct Scratch {
    /// Decoded columns.
    w: Vec<[f32; SIDE]>,
    /// Sums within a group, and of groups, a row each.
    products: Vec<[f32; SIDE]>,
    sums: Vec<[f32; SIDE]>,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::backend::cpu::Cpu;
    use crate::backend::tensor::Tensor;
    use crate::backend::{Backend, Matrix};

    fn noise(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        };
        (0..n).map(|_| next()).collect()
    }

    fn gptq(bits: u8, rows: usize, cols: usize, group: usize, scattered: bool) -> Weight {
        let groups = cols.div_ceil(group);
        let top = (1u32 << bits) - 1;
        let g_idx = (0..cols).map(|k| if scattered { k * 7 % groups } else { k / group } as u32).collect();
        Weight::Gptq(Arc::new(Gptq {
            rows,
            cols,
            bits,
            qweight: noise(cols * bits as usize / 32 * rows, 5)
                .iter()
                .map(|v| v.to_bits().wrapping_mul(0x9e37_79b9))
                .collect(),
            zeros: noise(groups * rows, 6).iter().map(|v| ((v + 1.0) / 2.0 * top as f32) as u8).collect(),
            scales: noise(groups * rows, 7),
            g_idx,
        }))
    }

    /// Odd numbers of rows, groups that end inside a word, rows that several tasks share.
    fn weights() -> Vec<Weight> {
        let mut all = Vec::new();
        for bits in [2, 3, 4, 8] {
            for (rows, cols, group, scattered) in [
                (1, 32, 32, false),
                (77, 128, 64, false),
                (33, 96, 20, false),
                (40, 64, 16, true),
                (801, 256, 128, false),
            ] {
                all.push(gptq(bits, rows, cols, group, scattered));
            }
        }
        for (dtype, size) in [(Dtype::F32, 4), (Dtype::F16, 2), (Dtype::BF16, 2)] {
            for (rows, cols) in [(1, 1), (7, 77), (1203, 300)] {
                let values = noise(rows * cols, 9);
                let bytes: Vec<u8> = match dtype {
                    Dtype::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
                    Dtype::F16 => values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect(),
                    _ => values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect(),
                };
                assert_eq!(bytes.len(), rows * cols * size);
                all.push(Weight::Dense(Dense { rows, cols, dtype, bytes: bytes.into() }));
            }
        }
        let (rows, cols) = (1001, 256);
        let scale = half::f16::from_f32(0.02).to_le_bytes();
        let mut bytes: Vec<u8> = noise(rows * 8 * 18, 4).iter().map(|v| (v.to_bits() >> 9) as u8).collect();
        bytes.chunks_exact_mut(18).for_each(|block| block[..2].copy_from_slice(&scale));
        all.push(Weight::Ggml(Ggml { rows, cols, kind: GgmlType::Q4_0, bytes: bytes.into() }));
        all
    }

    /// One row of activations, and the same row so many times that it goes through panels.
    #[test]
    fn products_are_those_of_panels_for_any_number_of_threads() {
        for weight in weights() {
            let (rows, cols) = (weight.rows(), weight.cols());
            let what = format!("{:?}", (rows, cols, weight.to_f32().first()));
            let x = noise(cols, 3);
            let matrix = Matrix::Host(weight.clone());
            let on = |threads: usize, t: usize| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let out = pool.install(|| Cpu.linear(&Tensor::host(t, cols, x.repeat(t)), &matrix, None)).unwrap();
                out.as_host()[..rows].to_vec()
            };
            let (one, panels) = (on(1, 1), on(1, Cpu.few_rows() + 1));
            let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            let values = weight.to_f32();
            for (n, (found, panel)) in one.iter().zip(&panels).enumerate() {
                let length = |v: &[f32]| v.iter().map(|v| v * v).sum::<f32>().sqrt();
                let size = length(&values[n * cols..][..cols]) * length(&x);
                assert!((found - panel).abs() <= 1e-5 * size, "{what}, output {n}: {found}, not {panel}");
            }
            let one = bits(one);
            for (threads, t) in [(3, 1), (1, 2), (3, 2), (1, 13)] {
                assert_eq!(bits(on(threads, t)), one, "{what}");
            }
        }
    }
}
