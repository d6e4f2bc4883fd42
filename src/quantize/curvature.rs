//! What GPTQ knows of a linear's inputs: the Hessian of its output error, ordered, damped and factored.

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::grid::Grid;
use super::order::{Order, Sequence, sequence};
use crate::backend::{Drift, Gram};
use crate::num::linalg::inverse_factor;
use crate::scheme::Scheme;

/// What the user may choose.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GptqOptions {
    pub scheme: Scheme,
    pub order: Order,
    /// Grids come from the original weights, in groups of stored columns.
    pub static_groups: bool,
    /// Share of the mean Hessian diagonal that is added to the diagonal.
    pub damp_percent: f64,
    /// How much damping grows when the Hessian cannot be factored.
    pub damp_auto_increment: f64,
    pub grid: Grid,
    /// Sweeps of coordinate descent over codes and scales after GPTQ's single pass.
    pub sweeps: usize,
    /// The smallest zero point allowed. It follows from the format that is written, which a record names anyway.
    #[serde(skip)]
    pub least_zero: u8,
}

/// A Hessian that no damping below 100 % makes positive definite.
#[derive(Debug, Error)]
#[error("the Hessian is not positive definite even with damping {tried:.2}")]
pub struct NotPositive {
    pub tried: f64,
}

/// A Hessian made ready once for all linears that share an input.
pub struct Curvature {
    pub(super) n: usize,
    pub(super) sequence: Sequence,
    /// Channels that never were anything but zero, by stored column.
    pub(super) dead: Vec<bool>,
    /// Undamped diagonal, in the order of the sequence.
    pub(super) importance: Vec<f32>,
    /// Damped Hessian in the order of the sequence, whole, for coordinate descent; empty without sweeps.
    pub(super) h: Vec<f32>,
    /// `2/tokens X'(O - X)` in the order of the sequence; empty when not known.
    pub(super) drift: Vec<f32>,
    /// Upper factor U with H^-1 = U'U.
    pub(super) u: Vec<f32>,
    /// The damping that was needed.
    pub damp_percent: f64,
}

impl Curvature {
    /// Orders, damps and factors `2/tokens X'X`.
    pub fn new(gram: &Gram, drift: Option<&Drift>, options: &GptqOptions) -> Result<Self, NotPositive> {
        let n = gram.n;
        let scale = 2.0 / gram.tokens.max(1) as f64;
        let diag: Vec<f64> = (0..n).map(|i| gram.lower[i * n + i] * scale).collect();
        let dead: Vec<bool> = diag.iter().map(|d| *d == 0.0).collect();
        let sequence = sequence(options.order, options.static_groups, &diag, options.scheme.group_size);
        let at = |i: usize, j: usize| {
            let (a, b) = (sequence.columns[i], sequence.columns[j]);
            gram.lower[a.max(b) * n + a.min(b)] * scale
        };
        let alive = |i: usize| if dead[sequence.columns[i]] { 1.0 } else { at(i, i) };
        let mean = (0..n).map(alive).sum::<f64>() / n as f64;
        let mut lower = vec![0.0; n * n];
        lower.par_chunks_mut(n).enumerate().for_each(|(i, row)| (0..i).for_each(|j| row[j] = at(i, j)));
        let mut damp = options.damp_percent;
        let u = loop {
            (0..n).for_each(|i| lower[i * n + i] = alive(i) + damp * mean);
            if let Some(u) = inverse_factor(&lower, n) {
                break u;
            }
            let next = damp + options.damp_auto_increment.max(1e-3);
            if next >= 1.0 {
                return Err(NotPositive { tried: damp });
            }
            damp = next;
        };
        let h = match options.sweeps {
            0 => Vec::new(),
            _ => {
                let whole = |x: usize| lower[(x / n).max(x % n) * n + (x / n).min(x % n)] as f32;
                (0..n * n).into_par_iter().map(whole).collect()
            }
        };
        let drift = drift.map_or(Vec::new(), |drift| {
            let scale = 2.0 / drift.tokens.max(1) as f32;
            let columns = &sequence.columns;
            columns.iter().flat_map(|&i| columns.iter().map(move |&j| drift.values[i * n + j] * scale)).collect()
        });
        let importance = (0..n).map(|i| at(i, i) as f32).collect();
        Ok(Self { n, sequence, dead, importance, h, drift, u, damp_percent: damp })
    }
}
