//! The search for channel scales, block by block: candidates are tried on real inputs, and what comes out where they
//! matter is held against the original.

use anyhow::Result;

use super::super::observer::Reporter;
use super::modules::Modules;
use super::solve::stored;
use crate::backend::tensor::Tensor;
use crate::backend::weight::{Dense, Weight};
use crate::backend::{DeviceError, Matrix};
use crate::calibrate::driver::{Inputs, abs_max, sample};
use crate::format::layout::Layout;
use crate::model::block::{Block, Chunk, Linear, Stage};
use crate::model::fold::{Fold, Joint, tied};
use crate::model::{Model, ModelError};
use crate::quantize::rtn::scaled_and_back;
use crate::quantize::scale_search::ScaleSearch;
use crate::quantize::scaling::{awq_grid, awq_scales, column_maxima, relative_magnitudes, smooth_scales};
use crate::recipe::{Method, Rounding, Transform};
use crate::tensor::{Dtype, narrowed};

/// Strengths that are tried where the user leaves it to us.
const ALPHAS: [f32; 8] = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9];
/// Candidates that are tried on the whole sample: those that do best on its first part.
const FINALISTS: usize = 3;

/// Finds the folds of a block from its inputs, the leading of which are a sample that candidates are tried on.
pub struct Search<'a> {
    pub method: &'a Method,
    pub modules: &'a Modules,
    pub layout: &'a dyn Layout,
    pub model: &'a Model,
    pub reporter: &'a Reporter,
}

/// The inputs of all stages, as the block computes with its own weights.
struct Seen {
    /// Those of the sample's chunks.
    sample: Vec<Vec<Tensor>>,
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
        let sample = match transform {
            Transform::Awq { tokens, .. } | Transform::Smoothquant { tokens, .. } => sample(chunks, tokens),
        };
        let seen = self.look(block, chunks, sample.len())?;
        match transform {
            Transform::Awq { points, duo_scaling, grouped_values, .. } => {
                self.awq(block, sample, &seen, points, duo_scaling, grouped_values)
            }
            Transform::Smoothquant { alpha, .. } => self.smooth(block, sample, &seen, alpha),
        }
    }

    /// Takes all chunks through the block as it is; the first `kept` are the sample.
    fn look(&self, block: &Block, chunks: &[Chunk], kept: usize) -> Result<Seen> {
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
            seen.sample.push(inputs[..kept].to_vec());
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
        sample: &[Chunk],
        seen: &Seen,
        points: usize,
        duo: bool,
        grouped_values: bool,
    ) -> Result<Found> {
        let (model, config) = (self.model, &self.model.config);
        let (mut folds, mut first, mut last) = (Vec::new(), 0.0, 0.0);
        let candidates = awq_grid(points, duo);
        for (i, joint) in Joint::ALL.into_iter().enumerate() {
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
            let scales = |candidate: usize| {
                let (ratio, duo) = candidates[candidate];
                awq_scales(&mean, duo.then_some(&magnitudes[..]), ratio)
            };
            let outcome = |part: usize, swapped: Option<&[Matrix]>| -> Result<Vec<f32>, DeviceError> {
                let found = block.outcome(model, stage, &sample[part].batch, &seen.sample[i][part], swapped)?;
                model.backend().download(&found)
            };
            let wanted = (0..sample.len()).map(|part| outcome(part, None)).collect::<Result<Vec<_>, _>>()?;
            let mut on_first = vec![0.0; candidates.len()];
            let best = best(candidates.len(), sample.len() > 1, self.reporter, &mut |candidate, whole| {
                let scales = scales(candidate);
                let matrices: Vec<Matrix> = linears
                    .iter()
                    .zip(&weights)
                    .map(|(linear, weight)| self.rounded(linear, weight, &scales))
                    .collect::<Result<_, DeviceError>>()?;
                if !whole {
                    on_first[candidate] = error(&outcome(0, Some(&matrices))?, &wanted[0]);
                    return Ok(on_first[candidate]);
                }
                let rest = (1..sample.len()).map(|part| Ok(error(&outcome(part, Some(&matrices))?, &wanted[part])));
                Ok(on_first[candidate] + rest.sum::<Result<f64, DeviceError>>()?)
            })?;
            if !best.before.is_finite() {
                let path = linears[0].path.clone();
                return Err(ModelError::NonFinite { path: format!("{path}, rounded,") }.into());
            }
            (first, last) = (first + best.before, last + best.error);
            let scales = scales(best.candidate);
            if scales.iter().any(|s| *s != 1.0) {
                folds.push(Fold { joint, scales });
            }
        }
        Ok(Found { folds, error_ratio: Some(ratio(last, first)), alpha: None })
    }

    /// The weight that a linear would have with its columns scaled for rounding, and back.
    fn rounded(&self, linear: &Linear, weight: &[f32], scales: &[f32]) -> Result<Matrix, DeviceError> {
        let Some(scheme) = self.modules.scheme(&linear.path) else { return Ok(linear.weight.clone()) };
        let back = scaled_and_back(weight, linear.cols, scales, scheme, self.layout.least_zero());
        let bytes = narrowed(Dtype::F32, &back).into();
        let dense = Dense { rows: linear.rows, cols: linear.cols, dtype: Dtype::F32, bytes };
        self.model.backend().load(Weight::Dense(dense))
    }

    fn smooth(&self, block: &Block, sample: &[Chunk], seen: &Seen, alpha: Option<f32>) -> Result<Found> {
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
        let mut wanted = sample.to_vec();
        block.run::<ModelError>(self.model, &mut wanted, None, &mut |_, _| Ok(None))?;
        // Candidate 0 is the block as it is.
        let best = best(1 + ALPHAS.len(), sample.len() > 1, self.reporter, &mut |candidate, whole| {
            let parts = if whole { sample.len() } else { 1 };
            let (sample, wanted) = (&sample[..parts], &wanted[..parts]);
            match candidate.checked_sub(1) {
                None => self.quantized_error(block, sample, wanted),
                Some(i) => self.quantized_error(&block.folded(self.model, &folds(ALPHAS[i]))?.block, sample, wanted),
            }
        })?;
        let alpha = best.candidate.checked_sub(1).map(|i| ALPHAS[i]);
        let error_ratio = Some(ratio(best.error, best.before));
        Ok(Found { folds: alpha.map_or_else(Vec::new, folds), error_ratio, alpha })
    }

    /// The error of a block's output with weights and inputs rounded.
    fn quantized_error(&self, block: &Block, sample: &[Chunk], wanted: &[Chunk]) -> Result<f64> {
        let backend = self.model.backend();
        let plain = Method { rounding: plainly(&self.method.rounding), transform: None, ..self.method.clone() };
        let mut chunks = sample.to_vec();
        block.run::<anyhow::Error>(self.model, &mut chunks, None, &mut |stage, inputs| {
            let inputs = Inputs { abs_max: abs_max(backend, inputs)?, ..Inputs::default() };
            let linears = block.linears(stage);
            let schemes = self.modules.schemes(&linears);
            stored(backend, &plain, self.layout, &linears, &schemes, Some(&inputs)).map(Some)
        })?;
        let one = |(found, wanted): (&Chunk, &Chunk)| {
            Ok(error(&backend.download(&found.hidden)?, &backend.download(&wanted.hidden)?))
        };
        chunks.iter().zip(wanted).map(one).sum()
    }
}

/// Which candidate did best.
struct Best {
    candidate: usize,
    error: f64,
    /// The error of candidate 0.
    before: f64,
}

/// The candidate with the least error, the first of equals, among those that do best on the first part of the sample
/// and candidate 0; the others are in order of strength, and of them every second one is tried and then the neighbours of
/// the best. `measure` gives the error of a candidate on the first part or on the whole sample.
fn best(
    candidates: usize,
    several: bool,
    reporter: &Reporter,
    measure: &mut dyn FnMut(usize, bool) -> Result<f64>,
) -> Result<Best> {
    let mut errors = Vec::with_capacity(candidates);
    let mut measure = |candidate, whole| -> Result<f64> {
        reporter.check()?;
        let error = measure(candidate, whole)?;
        Ok(if error.is_finite() { error } else { f64::INFINITY })
    };
    for candidate in std::iter::once(0).chain((1..candidates).step_by(2)) {
        errors.push((candidate, measure(candidate, false)?));
    }
    let leading = errors[1..].iter().min_by(|a, b| a.1.total_cmp(&b.1)).map_or(0, |(candidate, _)| *candidate);
    for candidate in [leading.saturating_sub(1), leading + 1] {
        if candidate > 0 && candidate < candidates {
            errors.push((candidate, measure(candidate, false)?));
        }
    }
    errors.sort_by_key(|(candidate, _)| *candidate);
    if several {
        let mut by_error = errors.split_off(1);
        by_error.sort_by(|a, b| a.1.total_cmp(&b.1));
        by_error.truncate(FINALISTS);
        errors.extend(by_error);
        errors.sort_by_key(|(candidate, _)| *candidate);
        for (candidate, error) in &mut errors {
            *error = measure(*candidate, true)?;
        }
    }
    let before = errors[0].1;
    let (candidate, error) = errors.into_iter().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((0, before));
    Ok(Best { candidate, error, before })
}

/// The same numbers, rounded to nearest by the range of each group.
pub fn plainly(rounding: &Rounding) -> Rounding {
    match rounding {
        Rounding::Gptq { options, .. } => Rounding::Rtn { scheme: options.scheme, grid: ScaleSearch::MaxAbs },
        Rounding::Rtn { scheme, .. } => Rounding::Rtn { scheme: *scheme, grid: ScaleSearch::MaxAbs },
        Rounding::Float8 { tile, .. } => Rounding::Float8 { tile: *tile, feedback: false },
    }
}

/// The sum of squares of the differences.
fn error(found: &[f32], wanted: &[f32]) -> f64 {
    found.iter().zip(wanted).map(|(f, w)| ((f - w) as f64).powi(2)).sum()
}

fn ratio(after: f64, before: f64) -> f64 {
    if before > 0.0 { after / before } else { 1.0 }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// What is found among candidates of these errors, and how many were measured, on the first part and on the whole.
    fn search(errors: &[f64], several: bool) -> (Best, [usize; 2]) {
        let mut measured = [0, 0];
        let best = best(errors.len(), several, &Reporter::silent(), &mut |candidate, whole| {
            measured[usize::from(whole)] += 1;
            Ok(errors[candidate] * if whole { 4.0 } else { 1.0 })
        });
        (best.unwrap(), measured)
    }

    #[test]
    fn the_best_is_found_from_its_neighbours() {
        for lowest in 1..20 {
            let mut errors: Vec<f64> = (0..20).map(|i| 1.0 + (f64::from(i) - f64::from(lowest)).abs()).collect();
            errors[0] = 9.0;
            let (found, measured) = search(&errors, true);
            assert_eq!((found.candidate, found.error, found.before), (lowest as usize, 4.0, 36.0));
            // Candidate 0, ten of the others and the neighbours there are; then those in the end and candidate 0.
            assert!(measured[0] <= 13 && measured[1] == 1 + FINALISTS, "{measured:?}");
            let (found, measured) = search(&errors, false);
            assert_eq!((found.candidate, found.error, measured[1]), (lowest as usize, 1.0, 0));
        }
    }

    #[test]
    fn what_cannot_be_measured_is_not_taken() {
        assert_eq!(search(&[1.0], true).0.candidate, 0);
        assert_eq!(search(&[1.0, 2.0], true).0.candidate, 0);
        assert_eq!(search(&[1.0, 1.0, 1.0], true).0.candidate, 0);
        assert_eq!(search(&[2.0, f64::NAN, 1.0, f64::INFINITY], true).0.candidate, 2);
        let (found, _) = search(&[f64::NAN, f64::NAN], true);
        assert!(found.before.is_infinite());
    }
}
