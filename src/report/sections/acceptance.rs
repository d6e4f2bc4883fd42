//! Speculative decoding with the artifact.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::evaluate::acceptance::{AcceptanceFigures, Replay, Speed, expected_length};

/// The artifact's part in speculative decoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// A draft model proposes, the artifact verifies.
    Target,
    /// The artifact proposes, another model, such as its own source, verifies.
    Draft,
}

/// Speculative decoding with `k` drafted tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Speedup {
    /// Drafted tokens of a step.
    pub k: usize,
    /// Tokens of a step, bonus token counted, as `alpha` lets expect: (1 − αᵏ⁺¹) / (1 − α).
    pub expected_length: f64,
    /// Tokens of a step that came of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_length: Option<f64>,
    /// Times faster than decoding without a draft, (1 − βᵏ⁺¹) / ((1 − β)(k·cost + 1)) of Leviathan et al. 2023, theorem
    /// 3.8, where β is not `alpha` but the mean of Σ min(p, q) over what the target wrote after the prompts, under the
    /// sampling that was asked for and loops left out: the text that a draft would have sped up.
    pub expected: f64,
    /// Times faster, by the clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<f64>,
}

impl Speedup {
    /// `None` where the cost of a draft is not known; `alpha` is that of the text.
    fn new(speed: &Speed, alpha: f64) -> Option<Self> {
        Some(Self {
            k: speed.ahead,
            expected_length: expected_length(alpha, speed.ahead),
            measured_length: speed.measured.as_ref().map(|m| m.mean_length),
            expected: speed.expected_speedup?,
            measured: speed.measured.as_ref().and_then(|m| m.speedup),
        })
    }
}

/// Speculative decoding of one pair of models, in vLLM's definitions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Acceptance {
    /// The artifact's part.
    pub role: Role,
    pub target: String,
    pub draft: String,
    /// Drafted tokens of a step.
    pub k: usize,
    /// 0 is greedy.
    pub temperature: f64,
    /// Tokens that were drafted, and how many were accepted.
    pub drafted: u64,
    pub accepted: u64,
    /// Steps of verification.
    pub drafts: u64,
    /// accepted / drafted
    pub rate: f64,
    /// Standard error of the rate.
    pub rate_stderr: f64,
    /// 1 + accepted / drafts
    pub mean_length: f64,
    /// Share of steps in which at least the first i + 1 tokens were accepted; never rises.
    pub per_position: Vec<f64>,
    /// Mean of Σ min(p, q) over the tokens of a text: what rejection sampling accepts, without sampling.
    pub alpha: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alpha_stderr: Option<f64>,
    /// Share of these tokens at which both hold the same token for the likeliest, 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub greedy_agreement: Option<f64>,
    /// Time of a draft model's step over that of the target's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<f64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub speedups: Vec<Speedup>,
    pub prompts: u64,
    /// Tokens that were written.
    pub tokens: u64,
    /// Those of them that only repeat what was there before, where anything is accepted; they do not count.
    pub looped_tokens: u64,
    /// Hash of the prompts or text that it was measured on.
    pub text_sha256: String,
}

impl Acceptance {
    /// Of `draft` proposing to `target`, `role` being the artifact's part; `text_sha256` is the hash of the text that both
    /// were measured on.
    pub fn new(role: Role, target: &str, draft: &str, figures: &AcceptanceFigures, text_sha256: String) -> Self {
        let replay = figures.replays.iter().find(|replay| replay.ahead == figures.ahead);
        let count = |of: fn(&Replay) -> f64| replay.map_or(0, |r| of(r).round() as u64);
        let drafts = count(|r| r.drafts);
        let on_text = figures.text.clone().unwrap_or_default();
        let speedup = |speed: &Speed| Speedup::new(speed, on_text.alpha.mean);
        Self {
            role,
            target: target.into(),
            draft: draft.into(),
            k: figures.ahead,
            temperature: figures.temperature,
            drafted: count(|r| r.drafted),
            accepted: count(|r| r.accepted),
            drafts,
            rate: figures.acceptance_rate,
            rate_stderr: rate_stderr(&figures.per_position, drafts),
            mean_length: figures.mean_length,
            per_position: figures.per_position.clone(),
            alpha: on_text.alpha.mean,
            alpha_stderr: on_text.alpha.stderr,
            greedy_agreement: figures.text.as_ref().map(|text| text.agreement.mean),
            cost: figures.cost.ratio,
            speedups: figures.speeds.iter().filter_map(speedup).collect(),
            prompts: figures.prompts as u64,
            tokens: figures.tokens as u64,
            looped_tokens: figures.looped as u64,
            text_sha256,
        }
    }
}

/// Standard error of the acceptance rate. The tokens of one draft go together, since the first that is refused takes all
/// after it along; drafts are what is independent. With N tokens of a draft accepted and pᵢ the share of drafts that come
/// past token i, E N = Σ pᵢ and E N² = Σ (2i + 1) pᵢ, i from 0.
fn rate_stderr(per_position: &[f64], drafts: u64) -> f64 {
    if per_position.is_empty() || drafts == 0 {
        return 0.0;
    }
    let mean: f64 = per_position.iter().sum();
    let square: f64 = per_position.iter().enumerate().map(|(i, p)| (2 * i + 1) as f64 * p).sum();
    ((square - mean * mean).max(0.0) / drafts as f64).sqrt() / per_position.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Against the scatter of drafts counted one by one.
    #[test]
    fn tokens_of_a_draft_are_not_independent() {
        let accepted = [0u32, 4, 4, 1, 0, 4, 2, 4, 3, 4, 0, 4];
        let n = accepted.len() as f64;
        let shares: Vec<f64> = (0..4).map(|i| accepted.iter().filter(|a| **a > i).count() as f64 / n).collect();
        let mean = accepted.iter().sum::<u32>() as f64 / n;
        let variance = accepted.iter().map(|a| (f64::from(*a) - mean).powi(2)).sum::<f64>() / n;
        let got = rate_stderr(&shares, accepted.len() as u64);
        assert!((got - (variance / n).sqrt() / 4.0).abs() < 1e-12, "{got}");
        let rate = mean / 4.0;
        assert!(got > 1.4 * (rate * (1.0 - rate) / (4.0 * n)).sqrt(), "a binomial error is too small: {got}");
        assert_eq!((rate_stderr(&[], 3), rate_stderr(&[0.5], 0), rate_stderr(&[1.0; 4], 9)), (0.0, 0.0, 0.0));
    }
}
