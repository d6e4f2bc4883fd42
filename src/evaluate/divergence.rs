//! Divergence: how far an artifact's predictions lie from those of its reference, token by token.
//!
//! Definitions are llama.cpp's (`llama-perplexity --kl-divergence`), so figures can be held against each other.

use std::error::Error;

use rayon::prelude::*;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::baseline::{Record as Kept, Settings};
use super::logits_file::{LogitsFile, LogitsFileError, Record};
use super::perplexity::BATCH_TOKENS;
use super::windows::Window;
use crate::engine::logits::{Asked, Predictions, rows_at_once};
use crate::model::{Model, ModelError};

/// Below this log-probability llama.cpp's file knows nothing, and its sum leaves tokens out.
const LEAST_LOG_PROB: f64 = -16.0;

/// Why there is no divergence.
#[derive(Debug, Error)]
pub enum DivergenceError {
    #[error(
        "the reference has a vocabulary of {reference} tokens and the artifact one of {artifact}: their predictions \
         cannot be compared; is this the model that the artifact was made from?"
    )]
    Vocabulary { reference: usize, artifact: usize },
    #[error("the {side} failed at window {window}")]
    Model { side: &'static str, window: usize, source: ModelError },
    #[error(transparent)]
    LogitsFile(#[from] LogitsFileError),
    #[error("the reference is known at {found} predictions, and {wanted} or more are asked for")]
    Records { found: usize, wanted: usize },
    #[error("at window {window}")]
    Stopped { window: usize, source: Box<dyn Error + Send + Sync> },
}

/// What is compared at one predicted token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Position {
    /// KL(reference || artifact) in nats.
    pub kl: f64,
    /// Both hold the same token for the likeliest; the first of equals.
    pub same_top: bool,
    /// Probability of the true token by the artifact minus that by the reference.
    pub delta_p: f64,
    /// Negative log-likelihood of the true token, in nats.
    pub nll_reference: f64,
    pub nll_artifact: f64,
    /// Where the reference is known in part only: what `kl` lies within.
    pub within: Option<Within>,
}

/// What is certain about a divergence that is estimated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Within {
    pub least: f64,
    pub most: f64,
    /// Variance of the estimate, from what was drawn.
    pub variance: f64,
}

/// The other side of the comparison.
pub enum Reference<'a> {
    Model(&'a Model),
    /// A model, of whose predictions something is kept: a record a prediction is added to the list.
    Keep {
        model: &'a Model,
        settings: Settings,
        records: &'a mut Vec<Kept>,
    },
    /// What was kept of a model with a vocabulary of this size: a record a prediction.
    Kept {
        vocab: usize,
        records: &'a [Kept],
    },
    /// The windows must be the file's own.
    File(&'a mut LogitsFile),
}

impl Reference<'_> {
    fn vocab(&self) -> usize {
        match self {
            Reference::Model(model) | Reference::Keep { model, .. } => model.config.vocab,
            Reference::Kept { vocab, .. } => *vocab,
            Reference::File(file) => file.vocab,
        }
    }

    /// Refuses what has another vocabulary.
    pub fn check(&self, artifact: &Model) -> Result<(), DivergenceError> {
        match (self.vocab(), artifact.config.vocab) {
            (reference, artifact) if reference != artifact => Err(DivergenceError::Vocabulary { reference, artifact }),
            _ => Ok(()),
        }
    }
}

/// Compares the predictions of all tokens that count. `progress` hears before each step how many windows of how many
/// are done, and may stop the work.
pub fn measure<E>(
    artifact: &Model,
    mut reference: Reference<'_>,
    windows: &[Window],
    progress: &mut dyn FnMut(usize, usize) -> Result<(), E>,
) -> Result<Vec<Position>, DivergenceError>
where
    E: Into<Box<dyn Error + Send + Sync>>,
{
    reference.check(artifact)?;
    let vocab = artifact.config.vocab;
    let mut positions = Vec::new();
    let mut done = 0;
    while done < windows.len() {
        let batch = batch(&windows[done..], BATCH_TOKENS * artifact.backend().devices());
        let failed = |side| move |source| DivergenceError::Model { side, window: done, source };
        let predict = |model, side| {
            let asked = batch.iter().map(|w| Asked { tokens: &w.tokens, from: w.score_from }).collect();
            Predictions::new(model, asked).map_err(failed(side))
        };
        let mut go_on = || {
            let stopped = |why: E| DivergenceError::Stopped { window: done, source: why.into() };
            progress(done, windows.len()).map_err(stopped)
        };
        go_on()?;
        let original = match &reference {
            Reference::Model(model) | Reference::Keep { model, .. } => Some(predict(model, "reference")?),
            Reference::File(_) | Reference::Kept { .. } => None,
        };
        let quantized = predict(artifact, "artifact")?;
        let targets: Vec<u32> = batch.iter().flat_map(|w| &w.tokens[w.score_from..]).copied().collect();
        let step = rows_at_once(vocab);
        for (i, targets) in targets.chunks(step).enumerate() {
            go_on()?;
            let rows = i * step..i * step + targets.len();
            let other = quantized.logits(rows.clone()).map_err(failed("artifact"))?;
            let pairs = other.par_chunks(vocab).zip(targets);
            let first = positions.len();
            let one = match &original {
                Some(original) => original.logits(rows).map_err(failed("reference"))?,
                None => Vec::new(),
            };
            match &mut reference {
                Reference::File(file) => {
                    let records = file.records(targets.len())?;
                    positions.par_extend(pairs.zip(&records).map(|((row, &t), record)| from_record(record, row, t)));
                    continue;
                }
                Reference::Kept { records, .. } => {
                    let missing = || DivergenceError::Records { found: records.len(), wanted: first + targets.len() };
                    let records = records.get(first..first + targets.len()).ok_or_else(missing)?;
                    positions.par_extend(pairs.zip(records).map(|((row, &t), record)| record.compare(row, t)));
                    continue;
                }
                Reference::Keep { settings, records, .. } => {
                    let rows = one.par_chunks(vocab).zip(targets).enumerate();
                    let seed = records.len();
                    records.par_extend(rows.map(|(i, (row, &t))| Kept::of(row, t, (seed + i) as u64, *settings)));
                }
                Reference::Model(_) => {}
            }
            positions.par_extend(pairs.zip(one.par_chunks(vocab)).map(|((row, &t), one)| from_logits(one, row, t)));
        }
        done += batch.len();
    }
    Ok(positions)
}

/// The leading windows that fit the budget, at least one.
fn batch(windows: &[Window], budget: usize) -> &[Window] {
    let mut tokens = 0;
    let fitting = windows.iter().take_while(|window| {
        tokens += window.tokens.len();
        tokens <= budget
    });
    let count = fitting.count().max(1);
    &windows[..count]
}

/// Compares two rows of logits.
///
/// # Panics
/// If a row is empty, or `target` is outside.
pub fn from_logits(reference: &[f32], artifact: &[f32], target: u32) -> Position {
    let (top_r, max_r) = largest(reference);
    let (top_a, max_a) = largest(artifact);
    let (mut sum_r, mut sum_a, mut weighted) = (0.0f64, 0.0f64, 0.0f64);
    for (&r, &a) in reference.iter().zip(artifact) {
        let (r, a) = (f64::from(r) - max_r, f64::from(a) - max_a);
        let power = r.exp();
        sum_r += power;
        sum_a += a.exp();
        weighted += power * (r - a);
    }
    let (log_r, log_a) = (sum_r.ln(), sum_a.ln());
    let nll = |row: &[f32], max: f64, log: f64| log - (f64::from(row[target as usize]) - max);
    let (nll_reference, nll_artifact) = (nll(reference, max_r, log_r), nll(artifact, max_a, log_a));
    Position {
        // Only rounding makes it negative.
        kl: (weighted / sum_r - log_r + log_a).max(0.0),
        same_top: top_r == top_a,
        delta_p: (-nll_artifact).exp() - (-nll_reference).exp(),
        nll_reference,
        nll_artifact,
        within: None,
    }
}

/// Compares a row of logits with a record of llama.cpp's file. The record is rounded, so its probabilities do not sum
/// to one, and the divergence may be a little below zero.
///
/// # Panics
/// As [`from_logits`].
pub fn from_record(reference: &Record, artifact: &[f32], target: u32) -> Position {
    let (top, max) = largest(artifact);
    let log = max + artifact.iter().map(|&a| (f64::from(a) - max).exp()).sum::<f64>().ln();
    let (mut kl, mut reference_top) = (0.0, 0);
    for (token, &a) in artifact.iter().enumerate() {
        let log_prob = reference.log_prob(token);
        if log_prob > LEAST_LOG_PROB {
            kl += log_prob.exp() * (log_prob - (f64::from(a) - log));
        }
        if reference.codes[token] > reference.codes[reference_top] {
            reference_top = token;
        }
    }
    let (nll_reference, nll_artifact) =
        (-reference.log_prob(target as usize), log - f64::from(artifact[target as usize]));
    Position {
        kl,
        same_top: top == reference_top,
        delta_p: (-nll_artifact).exp() - (-nll_reference).exp(),
        nll_reference,
        nll_artifact,
        within: None,
    }
}

/// The first of the largest values, and where it is.
fn largest(row: &[f32]) -> (usize, f64) {
    let top = row.iter().enumerate().fold(0, |top, (i, &x)| if x > row[top] { i } else { top });
    (top, f64::from(row[top]))
}

/// A mean and its standard error, positions taken as independent as in llama.cpp.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Mean {
    pub mean: f64,
    pub stderr: f64,
}

impl Mean {
    /// Of no values it is 0, of one the error is 0.
    pub fn of(values: impl ExactSizeIterator<Item = f64> + Clone) -> Self {
        let n = values.len() as f64;
        if n == 0.0 {
            return Self::default();
        }
        let mean = values.clone().sum::<f64>() / n;
        let squares: f64 = values.map(|x| (x - mean) * (x - mean)).sum();
        Self { mean, stderr: if n > 1.0 { (squares / (n - 1.0) / n).sqrt() } else { 0.0 } }
    }
}

/// At how many positions both hold the same token for the likeliest.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SameTop {
    /// 0 to 1.
    pub share: f64,
    pub stderr: f64,
}

/// Divergence in nats over all positions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct KlFigures {
    pub mean: f64,
    pub stderr: f64,
    pub median: f64,
    pub p90: f64,
    pub p95: f64,
    pub p99: f64,
    pub p99_9: f64,
    pub max: f64,
}

/// Change of the true token's probability.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DeltaP {
    pub mean: f64,
    pub stderr: f64,
    pub rms: f64,
    pub rms_stderr: f64,
    pub min: f64,
    pub p1: f64,
    pub p5: f64,
    pub p10: f64,
    pub median: f64,
    pub p90: f64,
    pub p95: f64,
    pub p99: f64,
    pub max: f64,
}

/// Perplexities of both over the same positions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Perplexities {
    pub reference: f64,
    pub artifact: f64,
    /// Artifact over reference.
    pub ratio: f64,
    /// Paired: the difficulty of the text, common to both, is not in it.
    pub ratio_stderr: f64,
    /// The ratio's logarithm: the mean of the differences of nll.
    pub log_ratio: f64,
    pub log_ratio_stderr: f64,
}

/// All figures of a comparison.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Divergence {
    pub kl: KlFigures,
    pub same_top: SameTop,
    pub delta_p: DeltaP,
    pub perplexity: Perplexities,
    pub positions: usize,
}

impl Divergence {
    /// `None` where there is no position.
    pub fn of(positions: &[Position]) -> Option<Self> {
        if positions.is_empty() {
            return None;
        }
        let mean = |f: fn(&Position) -> f64| Mean::of(positions.iter().map(f));
        let (kls, deltas) = (sorted(positions, |p| p.kl), sorted(positions, |p| p.delta_p));
        let kl = |share| quantile(&kls, share);
        let delta = |share| quantile(&deltas, share);
        let (kl_mean, delta_mean) = (mean(|p| p.kl), mean(|p| p.delta_p));
        let square = mean(|p| p.delta_p * p.delta_p);
        let same = mean(|p| f64::from(u8::from(p.same_top)));
        let rms = square.mean.sqrt();
        let ratio = mean(|p| p.nll_artifact - p.nll_reference);
        Some(Self {
            kl: KlFigures {
                mean: kl_mean.mean,
                stderr: kl_mean.stderr,
                median: kl(0.5),
                p90: kl(0.9),
                p95: kl(0.95),
                p99: kl(0.99),
                p99_9: kl(0.999),
                max: kl(1.0),
            },
            same_top: SameTop { share: same.mean, stderr: same.stderr },
            delta_p: DeltaP {
                mean: delta_mean.mean,
                stderr: delta_mean.stderr,
                rms,
                // Delta method, as for the ratio of perplexities.
                rms_stderr: if rms > 0.0 { square.stderr / (2.0 * rms) } else { 0.0 },
                min: delta(0.0),
                p1: delta(0.01),
                p5: delta(0.05),
                p10: delta(0.1),
                median: delta(0.5),
                p90: delta(0.9),
                p95: delta(0.95),
                p99: delta(0.99),
                max: delta(1.0),
            },
            perplexity: Perplexities {
                reference: mean(|p| p.nll_reference).mean.exp(),
                artifact: mean(|p| p.nll_artifact).mean.exp(),
                ratio: ratio.mean.exp(),
                ratio_stderr: ratio.mean.exp() * ratio.stderr,
                log_ratio: ratio.mean,
                log_ratio_stderr: ratio.stderr,
            },
            positions: positions.len(),
        })
    }
}

/// What is certain about a mean divergence that is estimated, because the reference is known in part only.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct KlBound {
    /// The mean is no less,
    pub lower: f64,
    /// and no more.
    pub upper: f64,
    /// Standard error that the estimate owes to what was drawn; it is part of the standard error of the mean.
    pub sampling_stderr: f64,
}

impl KlBound {
    /// `None` where the divergence is exact.
    pub fn of(positions: &[Position]) -> Option<Self> {
        if positions.iter().all(|p| p.within.is_none()) {
            return None;
        }
        let n = positions.len() as f64;
        let exact = |p: &Position| p.within.unwrap_or(Within { least: p.kl, most: p.kl, variance: 0.0 });
        let sum = |f: fn(Within) -> f64| positions.iter().map(|p| f(exact(p))).sum::<f64>();
        Some(Self {
            lower: sum(|w| w.least) / n,
            upper: sum(|w| w.most) / n,
            sampling_stderr: sum(|w| w.variance).sqrt() / n,
        })
    }
}

fn sorted(positions: &[Position], value: fn(&Position) -> f64) -> Vec<f64> {
    let mut values: Vec<f64> = positions.iter().map(value).collect();
    values.sort_unstable_by(f64::total_cmp);
    values
}

/// The value below which `share` of the sorted values lie, between two of them by linear interpolation.
///
/// # Panics
/// If there are no values.
pub fn quantile(sorted: &[f64], share: f64) -> f64 {
    let last = sorted.len() - 1;
    let at = share.clamp(0.0, 1.0) * last as f64;
    let below = (at as usize).min(last);
    let between = at - below as f64;
    (1.0 - between) * sorted[below] + between * sorted[(below + 1).min(last)]
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-12 * (1.0 + b.abs())
    }

    #[test]
    fn two_coins() {
        // Logits are free up to a constant: P = (3/4, 1/4), Q = (1/2, 1/2).
        let got = from_logits(&[5.0 + 3f32.ln(), 5.0], &[-2.0, -2.0], 1);
        let wanted = 0.75 * 1.5f64.ln() + 0.25 * 0.5f64.ln();
        assert!((got.kl - wanted).abs() < 1e-6, "{got:?}");
        assert!(got.same_top, "the first of equals");
        assert!((got.delta_p - 0.25).abs() < 1e-6);
        assert!((got.nll_reference - 4f64.ln()).abs() < 1e-6 && close(got.nll_artifact, 2f64.ln()));
        assert!(!from_logits(&[1.0, 2.0], &[2.0, 1.0], 0).same_top);
    }

    #[test]
    fn far_logits_stay_finite() {
        let got = from_logits(&[3e4, -3e4], &[-3e4, 3e4], 0);
        assert!(close(got.kl, 6e4) && close(got.nll_artifact, 6e4) && close(got.delta_p, -1.0), "{got:?}");
        assert_eq!(from_logits(&[0.3, -7.0, 11.0], &[0.3, -7.0, 11.0], 2).kl, 0.0);
    }

    #[test]
    fn a_record_is_read_as_llama_cpp_reads_it() {
        // ln p = 0.5 * code - 17: codes 34 and 2 are ln p = 0 and -16; the second is left out.
        let record = Record { scale: 0.5, least: -17.0, codes: vec![2, 34] };
        let got = from_record(&record, &[0.0, 0.0], 0);
        assert!(close(got.kl, 2f64.ln()), "{got:?}");
        assert!(!got.same_top && close(got.nll_reference, 16.0) && close(got.nll_artifact, 2f64.ln()));
        assert!(from_record(&record, &[0.0, 1.0], 0).same_top);
    }

    #[test]
    fn quantiles_are_interpolated() {
        let values = [1.0, 2.0, 4.0, 8.0, 16.0];
        for (share, wanted) in
            [(0.0, 1.0), (0.125, 1.5), (0.5, 4.0), (0.75, 8.0), (0.9, 12.8), (0.99, 15.68), (1.0, 16.0)]
        {
            assert!(close(quantile(&values, share), wanted), "{share}");
        }
        assert_eq!(quantile(&[3.0], 0.999), 3.0);
    }

    #[test]
    fn figures_by_hand() {
        let at = |kl, same_top, delta_p, nll_reference, nll_artifact| Position {
            kl,
            same_top,
            delta_p,
            nll_reference,
            nll_artifact,
            within: None,
        };
        let positions = [at(0.3, true, 0.3, 1.0, 1.5), at(0.1, false, -0.4, 3.0, 3.1), at(0.2, true, 0.0, 2.0, 2.3)];
        let got = Divergence::of(&positions).unwrap();
        assert!(close(got.kl.mean, 0.2) && close(got.kl.median, 0.2) && close(got.kl.max, 0.3));
        // Sample variance 0.01.
        assert!(close(got.kl.stderr, (0.01f64 / 3.0).sqrt()));
        assert!(close(got.kl.p90, 0.28) && close(got.kl.p99_9, 0.2998));
        assert!(close(got.same_top.share, 2.0 / 3.0) && close(got.same_top.stderr, 1.0 / 3.0));
        assert!(close(got.delta_p.rms, (0.25f64 / 3.0).sqrt()) && close(got.delta_p.mean, -0.1 / 3.0));
        assert!(close(got.delta_p.min, -0.4) && close(got.delta_p.p10, -0.32) && close(got.delta_p.max, 0.3));
        // Differences 0.5, 0.1, 0.3: mean 0.3, variance 0.04.
        assert!(close(got.perplexity.reference, 2f64.exp()) && close(got.perplexity.artifact, 2.3f64.exp()));
        assert!(close(got.perplexity.ratio, 0.3f64.exp()));
        assert!(close(got.perplexity.ratio_stderr, 0.3f64.exp() * (0.04f64 / 3.0).sqrt()));
        assert_eq!(Divergence::of(&[]), None);
        let one = Divergence::of(&positions[..1]).unwrap();
        assert_eq!((one.kl.stderr, one.kl.p99, one.positions), (0.0, 0.3, 1));
    }
}
