//! A stored weight: what a file holds, dequantized by panels of rows and never as a whole.

use std::ops::Range;
use std::sync::Arc;

use crate::num::bits;
use crate::num::ggml::GgmlType;
use crate::tensor::{Bytes, Dtype, widen};

/// A matrix of `rows` output channels by `cols` input channels, in the form its file holds.
#[derive(Clone, Debug)]
pub enum Weight {
    Dense(Dense),
    Gptq(Arc<Gptq>),
    Ggml(Ggml),
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

impl Weight {
    pub fn rows(&self) -> usize {
        match self {
            Weight::Dense(w) => w.rows,
            Weight::Gptq(w) => w.rows,
            Weight::Ggml(w) => w.rows,
        }
    }

    pub fn cols(&self) -> usize {
        match self {
            Weight::Dense(w) => w.cols,
            Weight::Gptq(w) => w.cols,
            Weight::Ggml(w) => w.cols,
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
        }
    }

    /// The whole matrix as f32; for one linear at a time, where a method edits or compares it.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows() * self.cols()];
        self.panel(0..self.rows(), &mut out);
        out
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
}
