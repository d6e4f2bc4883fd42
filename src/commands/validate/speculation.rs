//! Speculative decoding with the artifact: verifying what a draft proposes, and proposing to its own source.

use anyhow::Result;

use super::super::eval_spec;
use super::super::task::Task;
use crate::cli::print::Printer;
use crate::cli::spec::PairArgs;
use crate::cli::validation::ValidateArgs;
use crate::evaluate::acceptance::AcceptanceFigures;
use crate::integrity::{Check, Status};
use crate::pipeline::open::Runnable;
use crate::report::{Acceptance, Role};

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
    let acceptance = Acceptance::new(pair.role, pair.target.0, pair.draft.0, &figures, text_sha256);
    Ok((acceptance, check(pair, &figures)))
}

fn check(pair: &Pair, figures: &AcceptanceFigures) -> Check {
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
