//! The search for channel scales, block by block: candidates are tried on real inputs, and what comes out where they
//! matter is held against the original.

use anyhow::Result;

use super::modules::Modules;
use super::solve::stored;
use crate::backend::tensor::Tensor;
use crate::backend::weight::{Dense, Weight};
use crate::backend::{DeviceError, Matrix};
use crate::calibrate::driver::{Inputs, abs_max};
use crate::cli::interrupt;
use crate::format::layout::Layout;
use crate::model::block::{Block, Chunk, Linear, Stage};
use crate::model::fold::{Fold, Joint, tied};
use crate::model::{Model, ModelError};
use crate::quantize::grid::Grid;
use crate::quantize::rtn::rtn;
use crate::quantize::scaling::{awq_grid, awq_scales, column_maxima, relative_magnitudes, smooth_scales};
use crate::recipe::{Method, Rounding, Transform};
use crate::tensor::{Dtype, narrowed};

/// Strengths that are tried where the user leaves it to us.
const ALPHAS: [f32; 8] = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9];

/// Finds the folds of a block. `chunks` are its inputs, the first of them what candidates are tried on.
pub struct Search<'a> {
    pub method: &'a Method,
    pub modules: &'a Modules,
    pub layout: &'a dyn Layout,
    pub model: &'a Model,
}

/// The inputs of all stages, as the block computes with its own weights.
struct Seen {
    /// Those of the first chunk.
    sample: Vec<Tensor>,
    /// The mean magnitude of each channel, over all chunks.
    mean: Vec<Vec<f32>>,
    /// The largest.
    most: Vec<Vec<f32>>,
}

/// Folds, and what they make of the error that was measured: 1 where they change nothing.
pub struct Found {
    pub folds: Vec<Fold>,
    /// `None` where nothing was measured.
    pub error_ratio: Option<f64>,
    /// How strongly inputs were smoothed.
    pub alpha: Option<f32>,
}

impl Search<'_> {
    pub fn folds(&self, transform: Transform, block: &Block, chunks: &[Chunk]) -> Result<Found> {
        let seen = self.look(block, chunks)?;
        match transform {
            Transform::Awq { points, duo_scaling, grouped_values, .. } => {
                self.awq(block, &chunks[0], &seen, points, duo_scaling, grouped_values)
            }
            Transform::Smoothquant { alpha, .. } => self.smooth(block, &chunks[0], &seen, alpha),
        }
    }

    /// Takes all chunks through the block as it is.
    fn look(&self, block: &Block, chunks: &[Chunk]) -> Result<Seen> {
        let (model, backend) = (self.model, self.model.backend());
        let mut seen = Seen { sample: Vec::new(), mean: Vec::new(), most: Vec::new() };
        block.run::<ModelError>(model, &mut chunks.to_vec(), None, &mut |_, inputs| {
            let tokens: usize = inputs.iter().map(|x| x.rows).sum();
            let mut sums: Vec<f64> = vec![0.0; inputs[0].cols];
            for x in inputs {
                sums.iter_mut().zip(backend.abs_sum(x)?).for_each(|(sum, x)| *sum += x);
            }
            seen.mean.push(sums.iter().map(|sum| (sum / tokens as f64) as f32).collect());
            seen.most.push(abs_max(backend, inputs)?);
            seen.sample.push(inputs[0].clone());
            Ok(None)
        })?;
        let stage = Stage::ALL.into_iter().zip(&seen.most).find(|(_, most)| most.iter().any(|x| !x.is_finite()));
        match stage {
            Some((stage, _)) => {
                let path = format!("the input of {}", block.linears(stage)[0].path);
                Err(ModelError::NonFinite { path }.into())
            }
            None => Ok(seen),
        }
    }

    fn awq(
        &self,
        block: &Block,
        sample: &Chunk,
        seen: &Seen,
        points: usize,
        duo: bool,
        grouped_values: bool,
    ) -> Result<Found> {
        let (model, config) = (self.model, &self.model.config);
        let (mut folds, mut first, mut last) = (Vec::new(), 0.0, 0.0);
        for (i, joint) in Joint::ALL.into_iter().enumerate() {
            interrupt::check()?;
            let stage = joint.readers();
            let linears = block.linears(stage);
            let quantized: Vec<&&Linear> =
                linears.iter().filter(|linear| self.modules.scheme(&linear.path).is_some()).collect();
            let grouped = joint == Joint::Values && config.heads != config.kv_heads;
            let Some(scheme) = quantized.first().and_then(|linear| self.modules.scheme(&linear.path)) else { continue };
            if grouped && !grouped_values {
                continue;
            }
            let weights: Vec<Vec<f32>> = linears.iter().map(|linear| linear.weight.weight().to_f32()).collect();
            let cols = linears[0].cols;
            let slices: Vec<&[f32]> = weights.iter().map(Vec::as_slice).collect();
            let mut magnitudes = relative_magnitudes(&slices, cols, scheme);
            let mut mean = seen.mean[i].clone();
            if joint == Joint::Values {
                let average = |values: &[f32]| values.iter().sum::<f32>() / values.len() as f32;
                (mean, magnitudes) = (tied(model, &mean, average), tied(model, &magnitudes, average));
            }
            let x = &seen.sample[i];
            let wanted = outcome(block, model, stage, sample, x, None)?;
            let mut best: Option<(f64, Vec<f32>)> = None;
            for (ratio, duo) in awq_grid(points, duo) {
                let scales = awq_scales(&mean, duo.then_some(&magnitudes[..]), ratio);
                let matrices: Vec<Matrix> = linears
                    .iter()
                    .zip(&weights)
                    .map(|(linear, weight)| self.rounded(linear, weight, &scales))
                    .collect::<Result<_, DeviceError>>()?;
                let error = error(&outcome(block, model, stage, sample, x, Some(&matrices))?, &wanted);
                if best.is_none() {
                    if !error.is_finite() {
                        let path = linears[0].path.clone();
                        return Err(ModelError::NonFinite { path: format!("{path}, rounded,") }.into());
                    }
                    first += error;
                }
                if error.is_finite() && best.as_ref().is_none_or(|(least, _)| error < *least) {
                    best = Some((error, scales));
                }
            }
            if let Some((least, scales)) = best {
                last += least;
                if scales.iter().any(|s| *s != 1.0) {
                    folds.push(Fold { joint, scales });
                }
            }
        }
        Ok(Found { folds, error_ratio: Some(ratio(last, first)), alpha: None })
    }

    /// The weight that a linear would have with its columns scaled for rounding, and back.
    fn rounded(&self, linear: &Linear, weight: &[f32], scales: &[f32]) -> Result<Matrix, DeviceError> {
        let Some(scheme) = self.modules.scheme(&linear.path) else { return Ok(linear.weight.clone()) };
        let mut scaled = weight.to_vec();
        let rows = scaled.chunks_exact_mut(linear.cols);
        rows.for_each(|row| row.iter_mut().zip(scales).for_each(|(w, s)| *w *= s));
        let least_zero = self.layout.least_zero();
        let (quantized, _) = rtn(&scaled, linear.rows, linear.cols, None, scheme, Grid::MaxAbs, least_zero);
        let mut back = quantized.to_f32();
        let rows = back.chunks_exact_mut(linear.cols);
        rows.for_each(|row| row.iter_mut().zip(scales).for_each(|(w, s)| *w /= s));
        let bytes = narrowed(Dtype::F32, &back).into();
        let dense = Dense { rows: linear.rows, cols: linear.cols, dtype: Dtype::F32, bytes };
        self.model.backend().load(Weight::Dense(dense))
    }

    fn smooth(&self, block: &Block, sample: &Chunk, seen: &Seen, alpha: Option<f32>) -> Result<Found> {
        let joints = [(Joint::AttentionNorm, 0), (Joint::MlpNorm, 2)];
        let folds = |alpha: f32| -> Vec<Fold> {
            let one = |&(joint, stage): &(Joint, usize)| {
                let linears = block.linears(joint.readers());
                if linears.iter().all(|linear| self.modules.scheme(&linear.path).is_none()) {
                    return None;
                }
                let weights: Vec<Vec<f32>> = linears.iter().map(|linear| linear.weight.weight().to_f32()).collect();
                let slices: Vec<&[f32]> = weights.iter().map(Vec::as_slice).collect();
                let scales = smooth_scales(&seen.most[stage], &column_maxima(&slices, linears[0].cols), alpha);
                Some(Fold { joint, scales })
            };
            joints.iter().filter_map(one).collect()
        };
        if let Some(alpha) = alpha {
            return Ok(Found { folds: folds(alpha), error_ratio: None, alpha: Some(alpha) });
        }
        let backend = self.model.backend();
        let mut wanted = [sample.clone()];
        block.run::<ModelError>(self.model, &mut wanted, None, &mut |_, _| Ok(None))?;
        let wanted = backend.download(&wanted[0].hidden)?;
        let before = self.quantized_error(block, sample, &wanted)?;
        let (mut best, mut least) = (Found { folds: Vec::new(), error_ratio: Some(1.0), alpha: None }, 1.0);
        for alpha in ALPHAS {
            interrupt::check()?;
            let folds = folds(alpha);
            let folded = block.folded(self.model, &folds)?;
            let ratio = ratio(self.quantized_error(&folded.block, sample, &wanted)?, before);
            if ratio < least {
                (best, least) = (Found { folds, error_ratio: Some(ratio), alpha: Some(alpha) }, ratio);
            }
        }
        Ok(best)
    }

    /// The error of a block's output with weights and inputs rounded.
    fn quantized_error(&self, block: &Block, sample: &Chunk, wanted: &[f32]) -> Result<f64> {
        let backend = self.model.backend();
        let plain = Method { rounding: plainly(&self.method.rounding), transform: None, ..self.method.clone() };
        let mut chunks = [sample.clone()];
        block.run::<anyhow::Error>(self.model, &mut chunks, None, &mut |stage, inputs| {
            let inputs = Inputs { abs_max: abs_max(backend, inputs)?, ..Inputs::default() };
            let linears = block.linears(stage);
            let schemes = self.modules.schemes(&linears);
            stored(backend, &plain, self.layout, &linears, &schemes, Some(&inputs)).map(Some)
        })?;
        Ok(error(&backend.download(&chunks[0].hidden)?, wanted))
    }
}

/// The same numbers, rounded to nearest by the range of each group.
pub fn plainly(rounding: &Rounding) -> Rounding {
    match rounding {
        Rounding::Gptq { options, .. } => Rounding::Rtn { scheme: options.scheme, grid: Grid::MaxAbs },
        Rounding::Rtn { scheme, .. } => Rounding::Rtn { scheme: *scheme, grid: Grid::MaxAbs },
        Rounding::Float8 { tile, .. } => Rounding::Float8 { tile: *tile, feedback: false },
    }
}

fn outcome(
    block: &Block,
    model: &Model,
    stage: Stage,
    sample: &Chunk,
    x: &Tensor,
    swapped: Option<&[Matrix]>,
) -> Result<Vec<f32>, DeviceError> {
    model.backend().download(&block.outcome(model, stage, &sample.batch, x, swapped)?)
}

/// The sum of squares of the differences.
fn error(found: &[f32], wanted: &[f32]) -> f64 {
    found.iter().zip(wanted).map(|(f, w)| ((f - w) as f64).powi(2)).sum()
}

fn ratio(after: f64, before: f64) -> f64 {
    if before > 0.0 { after / before } else { 1.0 }
}
