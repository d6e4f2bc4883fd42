//! Quantizers: weight + statistics + scheme → integers, scales, zero points, order. Pure mathematics:
//! slices in, slices out.

mod curvature;
pub mod feedback;
pub mod gptq;
pub mod grid;
pub mod order;
pub mod rtn;
mod tile;

use half::f16;

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

    /// The value that code `[row, col]` stands for.
    pub fn value(&self, row: usize, col: usize) -> f32 {
        let at = self.g_idx[col] as usize * self.rows + row;
        self.scales[at].to_f32() * (self.codes[row * self.cols + col] as f32 - self.zeros[at] as f32)
    }
}
