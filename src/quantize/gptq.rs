//! GPTQ on integers, by the pass of `pass.rs` or a device's own.
//!
//! Where it is known how far the inputs X of a linear have drifted from O, those of the original model, the
//! weights first move to the ridge solution of min |X W' - O w|², so that errors of earlier layers are
//! compensated too (the asymmetric calibration of GPTAQ, 2504.02692, solved in closed form).

use half::f16;
use serde::ser::SerializeStruct;
use serde::{Deserialize, Serialize, Serializer};

pub use super::curvature::{Curvature, CurvatureError, PassOptions};

use super::curvature::Factors;
use super::grids::integer;
use super::scale_search::{ScaleSearch, candidates};
use super::{Quantized, Report};
use crate::backend::solver::Rounding;
use crate::backend::{Backend, Done, Matrix};
use crate::scheme::Scheme;

/// What the user may choose.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct GptqOptions {
    /// Bits, symmetry and groups.
    pub scheme: Scheme,
    /// How the pass goes.
    #[serde(flatten)]
    pub pass: PassOptions,
    /// How the scales of groups are chosen.
    pub grid: ScaleSearch,
    /// The smallest zero point allowed. It follows from the format that is written, which a record names anyway.
    #[serde(skip)]
    pub least_zero: u8,
}

/// Keys in the order of earlier records, so that equal options give equal bytes.
impl Serialize for GptqOptions {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let pass = &self.pass;
        let mut out = serializer.serialize_struct("GptqOptions", 7)?;
        out.serialize_field("scheme", &self.scheme)?;
        out.serialize_field("order", &pass.order)?;
        out.serialize_field("static_groups", &pass.static_groups)?;
        out.serialize_field("damp_percent", &pass.damp_percent)?;
        out.serialize_field("damp_auto_increment", &pass.damp_auto_increment)?;
        out.serialize_field("grid", &self.grid)?;
        out.serialize_field("sweeps", &pass.sweeps)?;
        out.end()
    }
}

impl GptqOptions {
    /// The default options for a scheme.
    pub fn new(scheme: Scheme, grid: ScaleSearch) -> Self {
        Self { scheme, pass: PassOptions::INTEGERS, grid, least_zero: 0 }
    }
}

/// Quantizes one linear, on the backend's own solver where that has the Hessian.
///
/// # Errors
/// When the device fails.
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
        static_groups: options.pass.static_groups,
        sweeps: options.pass.sweeps,
        least_zero: options.least_zero,
        candidates: &candidates,
        importance: if options.grid == ScaleSearch::Hessian { &curvature.importance } else { &ones },
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

/// Quantizes `weight` (`rows` x columns of the curvature, row-major).
fn on_host(weight: &[f32], rows: usize, curvature: &Curvature, rounding: &Rounding) -> (Quantized, Report) {
    integer::quantize(weight, rows, &curvature.sequence, &curvature.dead, rounding, |tile| {
        tile.pass(curvature, rounding.static_groups, rounding.sweeps)
    })
}
