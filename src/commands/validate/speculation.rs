//! Speculative decoding with the artifact: verifying what a draft proposes, and proposing to its own source.

use anyhow::Result;

use super::super::eval_spec;
use super::super::task::Task;
use crate::cli::print::Printer;
use crate::cli::spec::PairArgs;
use crate::cli::validation::ValidateArgs;
use crate::evaluate::acceptance::{Acceptance as Figures, Speed, expected_length};
use crate::pipeline::open::Runnable;
use crate::report::{Acceptance, Check, Role, Speedup, Status};

/// Less than `eval spec` takes by itself: a report has to wait for it.
const PROMPTS: usize = 16;
const TOKENS: usize = 48;
const WINDOWS: usize = 8;

/// A target and its draft, by name.
pub struct Pair<'a> {
    pub role: Role,
    pub target: (&'a str, &'a Runnable),
    pub draft: (&'a str, &'a Runnable),
}

/// What is measured of a pair.
fn arguments(args: &ValidateArgs, role: Role) -> PairArgs {
    PairArgs {
        num_speculative_tokens: args.num_speculative_tokens.into(),
        text: args.texts.texts.first().cloned(),
        max_prompts: PROMPTS,
        max_tokens: TOKENS,
        max_windows: WINDOWS,
        // The artifact as a draft tells how true it is; it is not meant to be fast.
        no_speed: role == Role::Draft,
        bos: args.texts.bos,
        ..PairArgs::default()
    }
}

/// Refuses a text that gives no prompts, without running a model.
pub fn check_text(args: &ValidateArgs, reference: &Runnable) -> Result<()> {
    eval_spec::texts(&arguments(args, Role::Draft), reference, reference).map(drop)
}

/// Measures a pair.
pub fn measure(args: &ValidateArgs, pair: &Pair, text: &Task, printer: Printer) -> Result<(Acceptance, Check)> {
    let spec = arguments(args, pair.role);
    let figures = eval_spec::figures(&spec, pair.target.1, pair.draft.1, printer)?;
    let text_sha256 = text.text_sha256.clone().unwrap_or_default();
    Ok((Acceptance { text_sha256, ..converted(pair, &figures) }, check(pair, &figures)))
}

fn converted(pair: &Pair, figures: &Figures) -> Acceptance {
    let replay = figures.replays.iter().find(|replay| replay.ahead == figures.ahead);
    let count = |of: fn(&crate::evaluate::acceptance::Replay) -> f64| replay.map_or(0, |r| of(r).round() as u64);
    let (rate, drafted) = (figures.acceptance_rate, count(|r| r.drafted));
    let on_text = figures.text.clone().unwrap_or_default();
    let row = |speed: &Speed| {
        Some(Speedup {
            k: speed.ahead,
            expected_length: expected_length(on_text.alpha.mean, speed.ahead),
            measured_length: speed.measured.as_ref().map(|m| m.mean_length),
            expected: speed.expected_speedup?,
            measured: speed.measured.as_ref().and_then(|m| m.speedup),
        })
    };
    let speedups = figures.speeds.iter().filter_map(row);
    Acceptance {
        role: pair.role,
        target: pair.target.0.into(),
        draft: pair.draft.0.into(),
        k: figures.ahead,
        temperature: figures.temperature,
        drafted,
        accepted: count(|r| r.accepted),
        drafts: count(|r| r.drafts),
        rate,
        rate_stderr: rate_stderr(&figures.per_position, count(|r| r.drafts)),
        mean_length: figures.mean_length,
        per_position: figures.per_position.clone(),
        alpha: on_text.alpha.mean,
        alpha_stderr: on_text.alpha.stderr,
        greedy_agreement: figures.text.as_ref().map(|text| text.agreement.mean),
        cost: figures.cost.ratio,
        speedups: speedups.collect(),
        prompts: figures.prompts as u64,
        tokens: figures.tokens as u64,
        looped_tokens: figures.looped as u64,
        text_sha256: String::new(),
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

fn check(pair: &Pair, figures: &Figures) -> Check {
    let (target, draft) = (pair.target.0, pair.draft.0);
    let other = figures.speeds.iter().find(|s| s.measured.as_ref().is_some_and(|m| m.identical == Some(false)));
    let rate = 100.0 * figures.acceptance_rate;
    let (status, message) = match other {
        Some(speed) => (
            Status::Fail,
            format!("with {} tokens of `{draft}` at a time the text is not that of `{target}` itself", speed.ahead),
        ),
        None if figures.is_near_zero() => (
            Status::Fail,
            format!(
                "`{target}` accepts {rate:.2} % of what `{draft}` proposes: one of the two is broken, or they are not of \
                 one family"
            ),
        ),
        None if !figures.has_rate() => (
            Status::Skipped,
            format!("`{draft}` had nothing to propose: what `{target}` wrote is too short, or only repeats itself"),
        ),
        None => (
            Status::Pass,
            format!("`{target}` accepts {rate:.1} % of what `{draft}` proposes, {} tokens at a time", figures.ahead),
        ),
    };
    let id = match pair.role {
        Role::Target => "acceptance.target",
        Role::Draft => "acceptance.draft",
    };
    Check { id: id.into(), status, message }
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
