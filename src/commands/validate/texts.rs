//! Perplexity and divergence on each text, from one pass of both models over it.

use anyhow::{Context, Result};

use super::super::task::{self, Cut, Task, builtin};
use crate::calibrate::corpus::Corpus;
use crate::cli::interrupt;
use crate::cli::print::Printer;
use crate::cli::validation::TextArgs;
use crate::evaluate::divergence::{Divergence, Position, Reference, measure};
use crate::evaluate::perplexity::WindowNats;
use crate::format::manifest::Manifest;
use crate::integrity::{Check, Status};
use crate::pipeline::measure::Measurement;
use crate::pipeline::observer::Progress;
use crate::pipeline::open::{self, Runnable};
use crate::pipeline::quantize::control_of;
use crate::report::gate::{Estimate, Outcome, Side, paired};
use crate::report::number::change;
use crate::report::{Bins, Control, DivergenceOn, PerplexityOn, WindowedCorpus};

/// Tokens of a window where nothing else is asked for.
const WINDOW: usize = 512;

/// The texts that were named, or the built-in ones.
pub fn corpora(args: &TextArgs, reference: &Runnable) -> Result<Vec<Corpus>> {
    if args.texts.is_empty() {
        return Ok(builtin());
    }
    args.texts.iter().map(|path| open::corpus(Some(path), Corpus::heldout, reference.model.checkpoint())).collect()
}

/// Cuts a text as all models are to read it.
pub fn task(
    args: &TextArgs,
    artifact: &Runnable,
    reference: &Runnable,
    corpus: &Corpus,
    printer: Printer,
) -> Result<Task> {
    let context = artifact.model.config.max_positions.min(reference.model.config.max_positions);
    let cut = Cut {
        convention: args.convention,
        window: Some(args.window.unwrap_or(WINDOW.min(context))),
        max_windows: Some(args.max_windows),
        bos: args.bos,
    };
    let mut task = task::task(&cut, artifact, reference, corpus, printer)?;
    task.windows.truncate(args.max_windows);
    Ok(task)
}

/// How a report names the text of a task.
pub fn corpus(task: &Task) -> WindowedCorpus {
    WindowedCorpus {
        name: task.corpus.clone(),
        sha256: task.text_sha256.clone().unwrap_or_default(),
        convention: task.convention,
        window: task.window,
        windows: task.windows.len(),
        bos: task.bos.clone(),
        tokens: task.windows.iter().map(|window| window.scored() as u64).sum(),
    }
}

/// What came of one text.
pub struct Compared {
    pub perplexity: PerplexityOn,
    pub divergence: DivergenceOn,
    /// The reference's windows.
    reference: Vec<WindowNats>,
}

/// Both sections of one text.
pub fn compare(artifact: &Runnable, reference: &Runnable, task: &Task, printer: Printer) -> Result<Compared> {
    let mut steps = printer.steps("divergence", task.windows.len() as u64);
    let reference = Reference::Model(&reference.model);
    let positions = measure(&artifact.model, reference, &task.windows, &mut |done, total| {
        steps.set(done as u64, total as u64);
        interrupt::check()
    })?;
    let figures = Divergence::of(&positions).context("nothing to compare")?;
    let by_window = |nll: fn(&Position) -> f64| {
        let mut rest = &positions[..];
        let one = |scored: usize| {
            let (now, later) = rest.split_at(scored);
            rest = later;
            WindowNats { nats: now.iter().map(nll).sum(), tokens: now.len() as u64 }
        };
        task.windows.iter().map(|window| window.scored()).map(one).collect::<Vec<_>>()
    };
    let perplexity = PerplexityOn::new(corpus(task), &figures, &positions, by_window(|p| p.nll_artifact));
    let histogram = Some(Bins::of_kl(positions.iter().map(|p| p.kl)));
    let divergence = DivergenceOn { corpus: corpus(task), figures, histogram };
    Ok(Compared { perplexity, divergence, reference: by_window(|p| p.nll_reference) })
}

/// Whether the artifact is better than plain rounding at the same bits, on the same windows.
pub fn loses_to_control(on: &PerplexityOn, control: &Control, windows: &[WindowNats]) -> Check {
    // Of few windows the errors of both ratios are all that is known; they go together, so that this is on the safe side.
    let worse = paired(&on.windows, windows).unwrap_or_else(|| {
        Estimate::new(
            on.ratio.ln() - control.ratio.ln(),
            (on.ratio_stderr / on.ratio).hypot(control.ratio_stderr / control.ratio),
        )
    });
    let figures = format!(
        "on `{}` the perplexity changes by {}, with plain rounding at the same bits by {}",
        on.corpus.name,
        change(on.ratio - 1.0, 2),
        change(control.ratio - 1.0, 2)
    );
    let (status, message) = match worse.against(Side::AtMost, 0.0) {
        Outcome::Fail => (Status::Warn, format!("{figures}: look at the calibration text, or take `quantkit rtn`")),
        _ => (Status::Pass, figures),
    };
    Check { id: "control".into(), status, message }
}

/// What plain rounding at the same bits comes to on the same windows, and window by window; `None` where the artifact does
/// not tell how it was made.
pub fn control(
    manifest: &Manifest,
    reference: &Runnable,
    how: &Measurement,
    compared: &Compared,
    printer: Printer,
) -> Result<Option<(Control, Vec<WindowNats>)>> {
    let measured = control_of(manifest, reference, how, printer)?;
    Ok(measured.map(|measured| {
        let control = Control::new("rtn", &measured, compared.perplexity.reference, &compared.reference);
        (control, measured.windows)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::windows::Convention;

    fn window(nats: f64) -> WindowNats {
        WindowNats { nats, tokens: 100 }
    }

    #[test]
    fn only_what_is_certain_loses_to_plain_rounding() {
        let corpus = WindowedCorpus {
            name: "text".into(),
            sha256: String::new(),
            convention: Convention::Gptq,
            window: 100,
            windows: 8,
            bos: "none".into(),
            tokens: 800,
        };
        let control = Control { method: "rtn".into(), perplexity: 20.0, ratio: 1.05, ratio_stderr: 0.03 };
        let windows: Vec<_> = (0..8).map(|i| window(200.0 + 40.0 * f64::from(i))).collect();
        let on = |by: [f64; 8]| PerplexityOn {
            corpus: corpus.clone(),
            artifact: 20.2,
            artifact_stderr: 3.0,
            reference: 19.0,
            reference_stderr: 3.0,
            ratio: 1.06,
            ratio_stderr: 0.03,
            control: None,
            windows: windows.iter().zip(by).map(|(window, by)| self::window(window.nats + by)).collect(),
        };
        let status = |by| loses_to_control(&on(by), &control, &windows).status;
        // Worse in every window by about the same, which the two errors of 3 % would hide.
        assert_eq!(status([0.9, 1.1, 1.0, 1.0, 0.8, 1.2, 1.0, 1.0]), Status::Warn);
        // Worse on average by one standard error and a half.
        assert_eq!(status([7.0, -3.0, 5.0, -1.0, 6.0, -4.0, 4.0, 2.0]), Status::Pass);
        assert_eq!(status([-1.0; 8]), Status::Pass);
        let few = PerplexityOn { windows: Vec::new(), ..on([0.0; 8]) };
        assert_eq!(loses_to_control(&few, &control, &[]).status, Status::Pass);
        let sure = PerplexityOn { ratio: 1.2, ..few };
        assert_eq!(loses_to_control(&sure, &control, &[]).status, Status::Warn);
    }
}
