//! Quantizers: weight + statistics + scheme → integers, scales, zero points, order. Pure mathematics:
//! slices in, slices out.

mod curvature;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod definition;
pub mod float8;
pub mod gptq;
pub mod grids;
pub mod order;
mod pass;
pub mod rtn;
pub mod scale_search;
pub mod scaling;

use half::f16;
use rayon::prelude::*;

use crate::scheme::Scheme;

/// One quantized linear, before any packing.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    /// Output channels.
    pub rows: usize,
    /// Input channels.
    pub cols: usize,
    pub scheme: Scheme,
    /// `[rows, cols]`, each at most `scheme.top()`.
    pub codes: Vec<u8>,
    /// `[groups, rows]`; finite and never zero. A negative scale is allowed: it mirrors the grid.
    pub scales: Vec<f16>,
    /// `[groups, rows]` zero points.
    pub zeros: Vec<u8>,
    /// `[cols]`: the group of each input channel.
    pub g_idx: Vec<u32>,
}

/// What quantizing one linear cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Report {
    /// Half the squared output error, (w - q)' H (w - q) / 2 summed over rows, H being `2/tokens X'X`
    /// (damped); for RTN with H's diagonal alone.
    pub loss: f64,
}

impl Quantized {
    /// Number of groups.
    pub fn groups(&self) -> usize {
        self.scales.len() / self.rows
    }

    /// What all codes stand for, `[rows, cols]`.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.codes.len()];
        out.par_chunks_mut(self.cols).zip(self.codes.par_chunks(self.cols)).enumerate().for_each(
            |(row, (out, codes))| {
                let at = |g: u32| g as usize * self.rows + row;
                let levels: Vec<(f32, f32)> = (0..self.groups() as u32)
                    .map(|g| (self.scales[at(g)].to_f32(), self.zeros[at(g)] as f32))
                    .collect();
                for ((o, &code), &g) in out.iter_mut().zip(codes).zip(&self.g_idx) {
                    let (scale, zero) = levels[g as usize];
                    *o = scale * (code as f32 - zero);
                }
            },
        );
        out
    }

    /// The value that code `[row, col]` stands for.
    pub fn value(&self, row: usize, col: usize) -> f32 {
        let at = self.g_idx[col] as usize * self.rows + row;
        self.scales[at].to_f32() * (self.codes[row * self.cols + col] as f32 - self.zeros[at] as f32)
    }
}
