//! Perplexity of opened models.

use std::path::Path;

use anyhow::{Result, bail};

use super::failure::CheckFailed;
use super::observer::Reporter;
use super::open::{Runnable, corpus};
use super::options::Evaluation;
use crate::calibrate::corpus::Corpus;
use crate::engine::score;
use crate::evaluate::finite::DAMAGED;
use crate::evaluate::perplexity::{BATCH_TOKENS, Measured, Request, measure};
use crate::evaluate::windows::{Convention, plan};
use crate::model::block::Chunk;
use crate::model::tokenizer::{BosMode, BosRule};

/// How perplexity is to be measured.
pub struct Measurement<'a> {
    pub corpus: &'a Corpus,
    pub convention: Convention,
    pub window: Option<usize>,
    pub max_windows: Option<usize>,
    pub bos: BosMode,
}

impl<'a> Measurement<'a> {
    /// The whole text in windows of the usual length, under the convention of the GPTQ paper.
    pub fn new(corpus: &'a Corpus) -> Self {
        Self { corpus, convention: Convention::Gptq, window: None, max_windows: None, bos: BosMode::Auto }
    }

    /// The same for the first `most` windows.
    pub fn windows(self, most: usize) -> Self {
        Self { max_windows: Some(most), ..self }
    }

    /// Tokens of the text that a measurement with windows of this length looks at, and one more, so that a last window is
    /// told from one with text after it.
    pub fn tokens(&self, window: usize) -> usize {
        self.max_windows.map_or(usize::MAX, |most| most.saturating_mul(window).saturating_add(2))
    }
}

/// The text of the perplexities before and after, long enough for at least one window.
pub struct EvaluationText<'a> {
    evaluation: &'a Evaluation,
    corpus: Corpus,
    bos: BosMode,
}

impl<'a> EvaluationText<'a> {
    /// Opens the text for `model`.
    ///
    /// # Errors
    ///
    /// When the text cannot be read or is too short.
    pub fn open(evaluation: &'a Evaluation, bos: BosMode, model: &Runnable) -> Result<Self> {
        let corpus = corpus(evaluation.text.as_deref(), Corpus::heldout, model.model.checkpoint())?;
        let text = Self { evaluation, corpus, bos };
        check_measurement(model, &text.measurement(model))?;
        Ok(text)
    }

    /// How `model` is measured on it.
    pub fn measurement(&self, model: &Runnable) -> Measurement<'_> {
        Measurement {
            corpus: &self.corpus,
            convention: Convention::Gptq,
            window: Some(512.min(model.model.config.max_positions)),
            max_windows: Some(self.evaluation.windows),
            bos: self.bos,
        }
    }

    /// The perplexity of the source, which has to be finite.
    ///
    /// # Errors
    ///
    /// When it is not.
    pub fn before(&self, source: &Runnable, dir: &Path, reporter: &Reporter) -> Result<Measured> {
        let measured = perplexity(source, &self.measurement(source), "before", reporter)?;
        match &measured.result.reason {
            None => Ok(measured),
            Some(reason) => bail!(CheckFailed(format!(
                "the source `{}` itself: {reason}: {DAMAGED}; `--no-eval` quantizes it unmeasured",
                dir.display()
            ))),
        }
    }

    /// The perplexity of an artifact that has no name yet.
    ///
    /// # Errors
    ///
    /// When it is not finite.
    pub fn after(&self, artifact: &Runnable, reporter: &Reporter) -> Result<Measured> {
        let measured = perplexity(artifact, &self.measurement(artifact), "after", reporter)?;
        match &measured.result.reason {
            None => Ok(measured),
            Some(reason) => bail!(CheckFailed(format!("the artifact: {reason}; nothing was written"))),
        }
    }
}

/// Window, BOS and tokens of a measurement; of a text that is longer than its windows, only the first tokens.
pub fn settle(runnable: &Runnable, how: &Measurement) -> Result<(usize, BosRule, Vec<u32>)> {
    let (model, tokenizer) = (&runnable.model, runnable.tokenizer()?);
    let context = model.config.max_positions;
    let window = match how.window {
        Some(window) if how.convention.positions(window) > context => {
            bail!("--window {window} is longer than the {context} positions the model was made for")
        }
        Some(window) => window,
        None => how.convention.default_window().min(context),
    };
    let bos = how.bos.settle(tokenizer, model.config.family.needs_bos, how.convention.bos_habit())?;
    if how.convention == Convention::LmEval && how.corpus.documents > 1 {
        bail!("lmeval scores documents one by one: give one document as plain text");
    }
    Ok((window, bos, runnable.text_tokens(how.corpus, how.tokens(window))?))
}

/// Refuses a measurement that [`perplexity`] would refuse, without running the model.
pub fn check_measurement(runnable: &Runnable, how: &Measurement) -> Result<()> {
    let (window, bos, tokens) = settle(runnable, how)?;
    plan(how.convention, &tokens, window, bos, runnable.tokenizer()?.rolling_prefix())?;
    Ok(())
}

/// What scoring may fail with. Not `anyhow::Error`, which would hide the cause that decides the exit code.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Measures the perplexity of a model.
pub fn perplexity(
    runnable: &Runnable,
    how: &Measurement,
    what: &str,
    reporter: impl Into<Reporter>,
) -> Result<Measured> {
    let mut forward = |chunks: &mut [Chunk]| Ok(runnable.model.forward(chunks, None)?);
    let at_once = runnable.model.backend().devices();
    perplexity_through(runnable, how, what, &reporter.into(), at_once, &mut forward)
}

/// The same where `forward` takes up to `at_once` chunks through the blocks, with other weights perhaps.
pub fn perplexity_through(
    runnable: &Runnable,
    how: &Measurement,
    what: &str,
    reporter: &Reporter,
    at_once: usize,
    forward: &mut dyn FnMut(&mut [Chunk]) -> Result<(), Failure>,
) -> Result<Measured> {
    let (model, tokenizer) = (&runnable.model, runnable.tokenizer()?);
    let (window, bos, tokens) = settle(runnable, how)?;
    let device = model.backend().device();
    let request = Request {
        text: &how.corpus.facts,
        tokens: &tokens,
        convention: how.convention,
        window,
        max_windows: how.max_windows,
        bos,
        prefix: tokenizer.rolling_prefix(),
        batch_tokens: BATCH_TOKENS * at_once,
        device: &device,
    };
    let mut steps = reporter.steps(what, 0);
    let measured = measure(&request, &mut |done, total| steps.set(done as u64, total as u64), &mut |windows| {
        reporter.check()?;
        score::nll_through(model, windows, at_once, forward)
    })?;
    Ok(measured)
}
