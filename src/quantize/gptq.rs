//! GPTQ (Frantar et al., 2210.17323): columns are rounded one after another, and what each rounding breaks
//! is mended in the columns not yet taken. Afterwards, coordinate descent on the same objective.
//!
//! Where it is known how far the inputs X of a linear have drifted from O, those of the original model, the
//! weights first move to the ridge solution of min |X W' - O w|², so that errors of earlier layers are
//! mended too (the asymmetric calibration of GPTAQ, 2504.02692, solved in closed form).

pub use super::curvature::{Curvature, CurvatureError, GptqOptions};
use half::f16;

use super::curvature::Factors;
use super::grid::{Grid, candidates};
use super::tile::{self, Tile};
use super::{Quantized, Report};
use crate::backend::solver::Rounding;
use crate::backend::{Backend, Done, Matrix};

/// Quantizes one linear, on the backend's own solver where that has the Hessian.
pub fn gptq(
    backend: &dyn Backend,
    weight: &Matrix,
    curvature: &Curvature,
    options: &GptqOptions,
) -> Done<(Quantized, Report)> {
    let candidates = candidates(options.scheme, options.grid);
    let ones = vec![1.0; curvature.n];
    let rounding = Rounding {
        scheme: options.scheme,
        static_groups: options.static_groups,
        sweeps: options.sweeps,
        least_zero: options.least_zero,
        candidates: &candidates,
        importance: if options.grid == Grid::Hessian { &curvature.importance } else { &ones },
    };
    let rows = weight.weight().rows();
    let (Some(solver), Factors::Device(factor)) = (backend.solver(), &curvature.factors) else {
        return Ok(on_host(&weight.weight().to_f32(), rows, curvature, &rounding));
    };
    let solution = solver.solve(weight, factor, curvature.order(), &rounding)?;
    let mut g_idx = vec![0; curvature.n];
    for (&column, &group) in curvature.sequence.columns.iter().zip(&curvature.sequence.groups) {
        g_idx[column] = group as u32;
    }
    let quantized = Quantized {
        rows,
        cols: curvature.n,
        scheme: options.scheme,
        codes: solution.codes,
        scales: solution.scales.into_iter().map(f16::from_f32).collect(),
        zeros: solution.zeros,
        g_idx,
    };
    Ok((quantized, Report { loss: solution.loss }))
}

/// Quantizes `weight` (`rows` x `n`, row-major).
fn on_host(weight: &[f32], rows: usize, curvature: &Curvature, rounding: &Rounding) -> (Quantized, Report) {
    let n = curvature.n;
    tile::quantize(weight, rows, n, rounding.scheme, &curvature.sequence, &curvature.dead, |tile: &mut Tile| {
        tile.follow_drift(curvature);
        tile.compensate(curvature, rounding);
        for _ in 0..rounding.sweeps {
            tile.sweep(curvature, rounding.scheme);
        }
    })
}
