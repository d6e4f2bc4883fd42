//! One stage solved: what a method makes of linears that share their inputs.

use anyhow::{Context, Error, Result};
use rayon::prelude::*;

use crate::backend::weight::Inputs as Activations;
use crate::backend::{Backend, Matrix};
use crate::calibrate::driver::Inputs;
use crate::format::kind::Tile;
use crate::format::layout::{Layout, Solution};
use crate::model::block::Linear;
use crate::num::e4m3;
use crate::quantize::float8::{curvature, float8, float8_with_feedback, largest, scale};
use crate::quantize::gptq::{Curvature, CurvatureError, GptqOptions, PassOptions, gptq};
use crate::quantize::rtn::rtn;
use crate::recipe::{Method, Rounding};
use crate::scheme::{GroupSize, Scheme};

/// What a quantizer made of one linear.
pub struct Solved {
    pub scheme: Scheme,
    pub solution: Solution,
    pub loss: f64,
    /// The method, or why it was another.
    pub method: String,
    pub damp: Option<f64>,
}

/// What signed bytes stand for at most, on either side.
const INT8_TOP: f32 = 127.5;

/// Weights of linears that share their inputs; `None` for those left in floating point.
pub fn solve(
    backend: &dyn Backend,
    method: &Method,
    least_zero: u8,
    linears: &[&Linear],
    schemes: &[Option<Scheme>],
    inputs: Option<&Inputs>,
) -> Result<Vec<Option<Solved>>> {
    let magnitude = inputs.map_or(0.0, |i| i.abs_max.iter().fold(0.0f32, |m, x| m.max(*x)));
    match &method.rounding {
        Rounding::Float8 { tile, feedback } => {
            let activations = method.activations.inputs(magnitude, e4m3::MAX);
            let inputs = if *feedback { Some(inputs.context("GPTQ without calibration")?) } else { None };
            to_float8(*tile, activations, linears, schemes, inputs)
        }
        Rounding::Gptq { options, .. } => {
            let activations = method.activations.inputs(magnitude, INT8_TOP);
            with_gptq(backend, options, least_zero, activations, linears, schemes, inputs)
        }
        Rounding::Rtn { grid, .. } => {
            let activations = method.activations.inputs(magnitude, INT8_TOP);
            let hessian = inputs.filter(|i| !i.diagonal.is_empty()).map(hessian_diagonal);
            let one = |(linear, scheme): (&&Linear, &Option<Scheme>)| {
                let scheme = (*scheme)?;
                let weight = linear.weight.weight().to_f32();
                let (weight, report) =
                    rtn(&weight, linear.rows, linear.cols, hessian.as_deref(), scheme, *grid, least_zero);
                let solution = Solution::Integers { weight, inputs: activations };
                Some(Solved { scheme, solution, loss: report.loss, method: "rtn".into(), damp: None })
            };
            Ok(linears.par_iter().zip(schemes).map(one).collect())
        }
    }
}

/// The weights that linears would have in an artifact.
pub fn stored(
    backend: &dyn Backend,
    method: &Method,
    layout: &dyn Layout,
    linears: &[&Linear],
    schemes: &[Option<Scheme>],
    inputs: Option<&Inputs>,
) -> Result<Vec<Matrix>> {
    let solved = solve(backend, method, layout.least_zero(), linears, schemes, inputs)?;
    let one = |(linear, solved): (&&Linear, Option<Solved>)| match solved {
        None => Ok(linear.weight.clone()),
        Some(solved) => {
            let stored = layout.store(&linear.path, &solved.solution).map_err(Error::msg);
            Ok(backend.load(stored.with_context(|| format!("module `{}`", linear.path))?.weight)?)
        }
    };
    linears.iter().zip(solved).map(one).collect()
}

fn hessian_diagonal(inputs: &Inputs) -> Vec<f64> {
    let scale = 2.0 / inputs.tokens.max(1) as f64;
    inputs.diagonal.iter().map(|d| d * scale).collect()
}

fn with_gptq(
    backend: &dyn Backend,
    options: &GptqOptions,
    least_zero: u8,
    activations: Activations,
    linears: &[&Linear],
    schemes: &[Option<Scheme>],
    inputs: Option<&Inputs>,
) -> Result<Vec<Option<Solved>>> {
    let inputs = inputs.context("GPTQ without calibration")?;
    let gram = inputs.gram.as_ref().context("GPTQ without a Gram matrix")?;
    // One Hessian serves all linears that agree on the group size, which decides the order of columns.
    let mut curvatures: Vec<(GroupSize, Result<Curvature, f64>)> = Vec::new();
    for &scheme in schemes.iter().flatten() {
        if !curvatures.iter().any(|(size, _)| *size == scheme.group_size) {
            let (size, drift) = (scheme.group_size, inputs.drift.as_ref());
            let curvature = match Curvature::new(backend, gram, &inputs.diagonal, drift, size, &options.pass) {
                Ok(curvature) => Ok(curvature),
                Err(CurvatureError::NotPositive { tried }) => Err(tried),
                Err(CurvatureError::Device(error)) => return Err(error.into()),
            };
            curvatures.push((size, curvature));
        }
    }
    let hessian = hessian_diagonal(inputs);
    let one = |(linear, scheme): (&&Linear, &Option<Scheme>)| -> Result<Option<Solved>> {
        let Some(scheme) = *scheme else { return Ok(None) };
        let (_, curvature) = curvatures.iter().find(|(size, _)| *size == scheme.group_size).context("a Hessian")?;
        let ((weight, report), method, damp) = match curvature {
            Ok(curvature) => {
                let options = GptqOptions { scheme, least_zero, ..options.clone() };
                let solution = gptq(backend, &linear.weight, curvature, &options)?;
                (solution, "gptq".into(), Some(curvature.damp_percent))
            }
            Err(tried) => {
                let weight = linear.weight.weight().to_f32();
                let hessian = Some(&hessian[..]);
                let solution = rtn(&weight, linear.rows, linear.cols, hessian, scheme, options.grid, least_zero);
                (solution, format!("rtn: {}", CurvatureError::NotPositive { tried: *tried }), None)
            }
        };
        let solution = Solution::Integers { weight, inputs: activations };
        Ok(Some(Solved { scheme, solution, loss: report.loss, method, damp }))
    };
    // A device takes one after the other, and is busy with each.
    if backend.solver().is_some() {
        return linears.iter().zip(schemes).map(one).collect();
    }
    let solved: Vec<Result<_>> = linears.par_iter().zip(schemes).map(one).collect();
    // The first fault in order is reported, whichever thread finds one first.
    solved.into_iter().collect()
}

/// With `inputs`, errors are mended in the columns not yet taken.
fn to_float8(
    tile: Tile,
    activations: Activations,
    linears: &[&Linear],
    schemes: &[Option<Scheme>],
    inputs: Option<&Inputs>,
) -> Result<Vec<Option<Solved>>> {
    let weights: Vec<Option<Vec<f32>>> =
        linears.iter().zip(schemes).map(|(linear, scheme)| scheme.map(|_| linear.weight.weight().to_f32())).collect();
    let scales = |linear: &Linear, weight: &[f32]| -> Vec<f32> {
        largest(weight, linear.cols, tile.size(linear.rows, linear.cols)).into_iter().map(scale).collect()
    };
    let mut scales: Vec<Option<Vec<f32>>> =
        linears.iter().zip(&weights).map(|(linear, weight)| weight.as_ref().map(|w| scales(linear, w))).collect();
    if tile == Tile::Tensor {
        // Consumers join these linears and take the largest scale for all: a second rounding, unless it is theirs.
        let most = scales.iter().flatten().flatten().fold(0.0f32, |m, s| m.max(*s));
        scales.iter_mut().flatten().for_each(|s| s.fill(most));
    }
    let options = PassOptions::CODES_ONLY;
    let mut mended = None;
    if let Some(inputs) = inputs {
        let gram = inputs.gram.as_ref().context("GPTQ without a Gram matrix")?;
        mended = match curvature(gram, &inputs.diagonal, None, &options) {
            Ok(curvature) => Some(Ok(curvature)),
            Err(CurvatureError::NotPositive { tried }) => Some(Err(tried)),
            Err(CurvatureError::Device(error)) => return Err(error.into()),
        };
    }
    let one = |linear: &Linear, scheme: Option<Scheme>, original: Option<Vec<f32>>, scales: Option<Vec<f32>>| {
        let (scheme, original, scales) = (scheme?, original?, scales?);
        let (rows, cols) = (linear.rows, linear.cols);
        let shape = tile.size(rows, cols);
        let rounded = |scales| {
            let weight = float8(&original, rows, cols, shape, scales);
            let loss = weight.squared_error(&original) / 2.0;
            (weight, loss)
        };
        let ((weight, loss), method, damp) = match &mended {
            None => (rounded(scales), "fp8".into(), None),
            Some(Err(tried)) => {
                (rounded(scales), format!("rtn: {}", CurvatureError::NotPositive { tried: *tried }), None)
            }
            Some(Ok(_)) if !cols.is_multiple_of(shape.1) => {
                let why = format!("tiles of {} columns do not fill its {cols}", shape.1);
                (rounded(scales), format!("rtn: {why}"), None)
            }
            Some(Ok(curvature)) => {
                let made = float8_with_feedback(&original, rows, cols, shape, scales, curvature, &options);
                (made, "gptq".into(), Some(curvature.damp_percent))
            }
        };
        let solution = Solution::Float8 { weight, inputs: activations };
        Some(Solved { scheme, solution, loss, method, damp })
    };
    let weights = weights.into_iter().zip(scales);
    let solved = linears.iter().zip(schemes).zip(weights);
    Ok(solved.map(|((linear, scheme), (weight, scales))| one(linear, *scheme, weight, scales)).collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::backend::Gram;
    use crate::backend::cpu::Cpu;
    use crate::backend::weight::{Dense, Weight};
    use crate::format::kind::InputsKind;
    use crate::quantize::order::Order;
    use crate::quantize::scale_search::ScaleSearch;
    use crate::tensor::{Bytes, Dtype};

    /// No damping below 100 % mends a Hessian with such a diagonal: the module alone is rounded.
    #[test]
    fn hessians_that_cannot_be_used() {
        let n = 32;
        let weight: Vec<f32> = (0..n * n).map(|i| (i as f32 * 0.7).sin()).collect();
        let bytes = Bytes::from(bytemuck::cast_slice(&weight).to_vec());
        let stored = Weight::Dense(Dense { rows: n, cols: n, dtype: Dtype::F32, bytes });
        let linear = Linear { path: "x".into(), rows: n, cols: n, weight: Cpu.load(stored).unwrap(), bias: None };
        let scheme = Scheme { bits: 4, group_size: GroupSize::new(16).unwrap(), sym: true };
        let options = GptqOptions {
            scheme,
            pass: PassOptions {
                order: Order::GroupAware,
                static_groups: false,
                damp_percent: 0.05,
                damp_auto_increment: 0.2,
                sweeps: 1,
            },
            grid: ScaleSearch::MaxAbs,
            least_zero: 0,
        };
        let quantized = |sign: f64| {
            let mut gram = Gram::host(n, vec![0.0; n * n], 8);
            (0..n).for_each(|i| gram.lower.host_mut()[i * n + i] = if i == 3 { sign } else { 1.0 });
            let diagonal = Cpu.diagonal(&gram).unwrap();
            let inputs = Inputs { gram: Some(gram), diagonal, tokens: 8, ..Inputs::default() };
            let rounding = Rounding::Gptq { options: options.clone(), true_sequential: true, drift_correction: false };
            let method = Method {
                name: "gptq".into(),
                transform: None,
                rounding,
                activations: InputsKind::Float,
                kv_cache: None,
            };
            solve(&Cpu, &method, 0, &[&linear], &[Some(scheme)], Some(&inputs)).unwrap().remove(0).unwrap()
        };
        let Solved { method, damp: damping, .. } = quantized(1.0);
        assert_eq!((method.as_str(), damping), ("gptq", Some(0.05)));
        let Solved { solution, loss, method, damp: damping, .. } = quantized(-100.0);
        assert_eq!(method, "rtn: the Hessian is not positive definite even with damping 0.85");
        assert_eq!(damping, None);
        assert!(loss.is_finite());
        let wanted = rtn(&weight, n, n, None, scheme, ScaleSearch::MaxAbs, 0).0;
        assert_eq!(solution, Solution::Integers { weight: wanted, inputs: Activations::Float });
    }
}
