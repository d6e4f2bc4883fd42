//! Perplexity and divergence on one text.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::WindowedCorpus;
use crate::evaluate::divergence::{Divergence, Mean, Position};
use crate::evaluate::perplexity::{Measured, WindowNats};

/// The perplexity of a cheaper method at the same bits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Control {
    /// `rtn`
    pub method: String,
    pub perplexity: f64,
    /// Over the reference's.
    pub ratio: f64,
    /// Standard error of the ratio, paired.
    pub ratio_stderr: f64,
}

impl Control {
    /// What was measured with `method`, against the perplexity of the reference and what its windows cost.
    pub fn new(method: &str, measured: &Measured, perplexity: f64, reference: &[WindowNats]) -> Self {
        let (windows, ratio) = (&measured.windows, measured.result.perplexity / perplexity);
        // Paired by windows, as a ratio estimate.
        let tokens: f64 = windows.iter().map(|window| window.tokens as f64).sum();
        let pairs = windows.iter().zip(reference);
        let squares: f64 = pairs.map(|(w, r)| (w.nats - r.nats - ratio.ln() * w.tokens as f64).powi(2)).sum();
        let n = windows.len() as f64;
        let error = if n > 1.0 { (squares * n / (n - 1.0)).sqrt() / tokens } else { 0.0 };
        Self { method: method.into(), perplexity: measured.result.perplexity, ratio, ratio_stderr: ratio * error }
    }
}

/// Perplexities on one text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PerplexityOn {
    pub corpus: WindowedCorpus,
    pub artifact: f64,
    /// Standard error of the artifact's perplexity; the text's own difficulty is in it.
    pub artifact_stderr: f64,
    pub reference: f64,
    pub reference_stderr: f64,
    /// Artifact over reference.
    pub ratio: f64,
    /// Standard error of the ratio, paired: both predicted the same tokens, whose difficulty is not in it.
    pub ratio_stderr: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub control: Option<Control>,
    /// The artifact's windows: two reports on the same text can be compared window by window, which is far sharper than
    /// their perplexities.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub windows: Vec<WindowNats>,
}

impl PerplexityOn {
    /// Of a text's predictions, without a control. `figures` are those of `positions`, `windows` what the artifact's
    /// windows cost.
    pub fn new(corpus: WindowedCorpus, figures: &Divergence, positions: &[Position], windows: Vec<WindowNats>) -> Self {
        let error = |nll: fn(&Position) -> f64| {
            let mean = Mean::of(positions.iter().map(nll));
            mean.mean.exp() * mean.stderr
        };
        Self {
            corpus,
            artifact: figures.perplexity.artifact,
            artifact_stderr: error(|p| p.nll_artifact),
            reference: figures.perplexity.reference,
            reference_stderr: error(|p| p.nll_reference),
            ratio: figures.perplexity.ratio,
            ratio_stderr: figures.perplexity.ratio_stderr,
            control: None,
            windows,
        }
    }
}

/// How many positions have a divergence between two edges.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Bins {
    /// In nats, rising. The first counts what is at least the first edge and less than the second, and so on.
    pub edges: Vec<f64>,
    /// One less than there are edges.
    pub counts: Vec<u64>,
    /// Less than the first edge.
    pub below: u64,
    /// The last edge or more.
    pub above: u64,
    /// Neither.
    pub not_finite: u64,
}

/// Edges that rise by 2, 2.5 and 2 from 1e-7 to 10 nats: the same for all reports, so that histograms can be laid over
/// each other.
const KL_EDGES: [f64; 25] = [
    1e-7, 2e-7, 5e-7, 1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1,
    0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
];

impl Bins {
    /// Counts divergences in nats.
    pub fn of_kl(values: impl IntoIterator<Item = f64>) -> Self {
        let edges = KL_EDGES.to_vec();
        let mut bins = Self { counts: vec![0; edges.len() - 1], edges, below: 0, above: 0, not_finite: 0 };
        for value in values {
            let place = match bins.edges.partition_point(|&edge| edge <= value) {
                _ if !value.is_finite() => &mut bins.not_finite,
                0 => &mut bins.below,
                n if n == bins.edges.len() => &mut bins.above,
                n => &mut bins.counts[n - 1],
            };
            *place += 1;
        }
        bins
    }
}

/// Divergence from the reference on one text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DivergenceOn {
    pub corpus: WindowedCorpus,
    pub figures: Divergence,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub histogram: Option<Bins>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_count_each_value_once() {
        let values = [0.0, 9.99e-8, 1e-7, 1.99e-7, 2e-7, 0.05, 9.99, 10.0, 1e9, f64::NAN, f64::INFINITY];
        let bins = Bins::of_kl(values);
        assert_eq!((bins.below, bins.above, bins.not_finite), (2, 2, 2));
        let filled: Vec<_> = (0..bins.counts.len()).filter(|&i| bins.counts[i] > 0).collect();
        assert_eq!(filled.iter().map(|&i| bins.counts[i]).collect::<Vec<_>>(), [2, 1, 1, 1]);
        for (i, value) in filled.into_iter().zip([1.5e-7, 2e-7, 0.05, 9.99]) {
            assert!(bins.edges[i] <= value && value < bins.edges[i + 1], "{value} in bin {i}");
        }
    }
}
