//! What GPTQ knows of a linear's inputs: the Hessian of its output error, ordered, damped and factored.

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::order::{Order, Sequence, sequence};
use crate::backend::solver::{Factor, Ordered, Solver};
use crate::backend::{Backend, DeviceError, Drift, Gram};
use crate::num::linalg::inverse_factor;
use crate::scheme::GroupSize;

/// How GPTQ's pass goes, on every grid.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PassOptions {
    pub order: Order,
    /// Levels come from the weights before the pass, in groups of stored columns; otherwise those of a group are
    /// chosen when the pass reaches it.
    pub static_groups: bool,
    /// Share of the mean Hessian diagonal that is added to the diagonal.
    pub damp_percent: f64,
    /// How much damping grows when the Hessian cannot be factored.
    pub damp_auto_increment: f64,
    /// Sweeps of coordinate descent over codes, and scales where they are free, after GPTQ's single pass.
    pub sweeps: usize,
}

impl PassOptions {
    /// Defaults for integers.
    pub const INTEGERS: Self = Self {
        order: Order::GroupAware,
        static_groups: false,
        damp_percent: 0.05,
        damp_auto_increment: 0.01,
        sweeps: 1,
    };
    /// Defaults for ggml's types and E4M3: what had the least loss on the layers of the demo checkpoint, for every
    /// type.
    pub const CODES_ONLY: Self = Self {
        order: Order::GroupAware,
        static_groups: false,
        damp_percent: 0.01,
        damp_auto_increment: 0.01,
        sweeps: 3,
    };
}

/// Why there is no curvature.
#[derive(Debug, Error)]
pub enum CurvatureError {
    /// No damping below 100 % makes the Hessian positive definite.
    #[error("the Hessian is not positive definite even with damping {tried:.2}")]
    NotPositive { tried: f64 },
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// A Hessian made ready once for all linears that share an input.
pub struct Curvature {
    pub(super) n: usize,
    pub(super) sequence: Sequence,
    /// Channels that never were anything but zero, by stored column.
    pub(super) dead: Vec<bool>,
    /// Undamped diagonal, in the order of the sequence.
    pub(super) importance: Vec<f32>,
    pub(super) factors: Factors,
    /// The damping that was needed.
    pub damp_percent: f64,
}

/// Where the factored Hessian is.
pub(super) enum Factors {
    Host(HostFactors),
    Device(Factor),
}

/// All in the order of the sequence.
pub(super) struct HostFactors {
    /// Damped Hessian, whole, for coordinate descent; empty without sweeps.
    pub h: Vec<f32>,
    /// `2/tokens X'(O - X)`; empty when not known.
    pub drift: Vec<f32>,
    /// Upper factor U with H^-1 = U'U.
    pub u: Vec<f32>,
}

impl Curvature {
    /// Orders, damps and factors `2/tokens X'X`, on the backend's own solver where it has one. `diagonal` is that
    /// of X'X; `group_size` decides the order of columns.
    ///
    /// # Errors
    /// When no damping makes the Hessian positive definite, or the device fails.
    pub fn new(
        backend: &dyn Backend,
        gram: &Gram,
        diagonal: &[f64],
        drift: Option<&Drift>,
        group_size: GroupSize,
        options: &PassOptions,
    ) -> Result<Self, CurvatureError> {
        Self::with_solver(backend.solver(), gram, diagonal, drift, group_size, options)
    }

    /// The same in host memory, wherever the sums are: for grids that no device solver knows.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn on_host(
        gram: &Gram,
        diagonal: &[f64],
        drift: Option<&Drift>,
        group_size: GroupSize,
        options: &PassOptions,
    ) -> Result<Self, CurvatureError> {
        let (gram, drift) = (gram.in_host_memory()?, drift.map(Drift::in_host_memory).transpose()?);
        Self::with_solver(None, &gram, diagonal, drift.as_deref(), group_size, options)
    }

    fn with_solver(
        solver: Option<&dyn Solver>,
        gram: &Gram,
        diagonal: &[f64],
        drift: Option<&Drift>,
        group_size: GroupSize,
        options: &PassOptions,
    ) -> Result<Self, CurvatureError> {
        let n = gram.n;
        let scale = 2.0 / gram.tokens.max(1) as f64;
        let diag: Vec<f64> = diagonal.iter().map(|d| d * scale).collect();
        let dead: Vec<bool> = diag.iter().map(|d| *d == 0.0).collect();
        let sequence = sequence(options.order, options.static_groups, &diag, group_size);
        let columns = &sequence.columns;
        let alive: Vec<f64> = columns.iter().map(|&c| if dead[c] { 1.0 } else { diag[c] }).collect();
        let mean = alive.iter().sum::<f64>() / n as f64;
        let mut damp = options.damp_percent;
        let factor = |damped: &[f64]| -> Result<Option<Factors>, CurvatureError> {
            match solver {
                Some(solver) => {
                    let order = Ordered { columns, groups: &sequence.groups, dead: &dead };
                    let factor = solver.factor(gram, drift, order, scale, damped, options.sweeps > 0)?;
                    Ok(factor.map(Factors::Device))
                }
                None => {
                    let factors = HostFactors::new(gram, drift, columns, scale, damped, options.sweeps > 0);
                    Ok(factors.map(Factors::Host))
                }
            }
        };
        let factors = loop {
            let damped: Vec<f64> = alive.iter().map(|d| d + damp * mean).collect();
            if let Some(factors) = factor(&damped)? {
                break factors;
            }
            let next = damp + options.damp_auto_increment.max(1e-3);
            if next >= 1.0 {
                return Err(CurvatureError::NotPositive { tried: damp });
            }
            damp = next;
        };
        let importance = columns.iter().map(|&c| diag[c] as f32).collect();
        Ok(Self { n, sequence, dead, importance, factors, damp_percent: damp })
    }

    /// The undamped diagonal by stored column: the importance of each, as searches for scales want it.
    pub fn diagonal(&self) -> Vec<f32> {
        let mut diagonal = vec![0.0; self.n];
        for (&column, &importance) in self.sequence.columns.iter().zip(&self.importance) {
            diagonal[column] = importance;
        }
        diagonal
    }

    /// The order of columns, as solvers want it.
    pub(super) fn order(&self) -> Ordered<'_> {
        Ordered { columns: &self.sequence.columns, groups: &self.sequence.groups, dead: &self.dead }
    }

    /// The factors in host memory.
    ///
    /// # Panics
    /// If a device has them: then its solver does the work.
    pub(super) fn host(&self) -> &HostFactors {
        match &self.factors {
            Factors::Host(factors) => factors,
            Factors::Device(_) => panic!("the factors are on a device"),
        }
    }
}

impl HostFactors {
    fn new(
        gram: &Gram,
        drift: Option<&Drift>,
        columns: &[usize],
        scale: f64,
        damped: &[f64],
        whole: bool,
    ) -> Option<Self> {
        let (n, stored) = (gram.n, gram.lower.host());
        let at = |i: usize, j: usize| {
            let (a, b) = (columns[i], columns[j]);
            stored[a.max(b) * n + a.min(b)] * scale
        };
        let mut lower = vec![0.0; n * n];
        lower.par_chunks_mut(n).enumerate().for_each(|(i, row)| {
            (0..i).for_each(|j| row[j] = at(i, j));
            row[i] = damped[i];
        });
        let u = inverse_factor(&lower, n)?;
        let h = if whole {
            let whole = |x: usize| lower[(x / n).max(x % n) * n + (x / n).min(x % n)] as f32;
            (0..n * n).into_par_iter().map(whole).collect()
        } else {
            Vec::new()
        };
        let drift = drift.map_or(Vec::new(), |drift| {
            let (scale, values) = (scale as f32, drift.values.host());
            columns.iter().flat_map(|&i| columns.iter().map(move |&j| values[i * n + j] * scale)).collect()
        });
        Some(Self { h, drift, u })
    }
}
