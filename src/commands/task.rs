//! Texts as both sides of a comparison are to read them.

use anyhow::{Context, Result, bail};

use crate::calibrate::corpus::Corpus;
use crate::cli::print::Printer;
use crate::evaluate::windows::{Convention, Window, plan};
use crate::model::tokenizer::BosMode;
use crate::pipeline::measure::{Measurement, settle};
use crate::pipeline::open::Runnable;

/// How texts are cut.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    pub convention: Convention,
    pub window: Option<usize>,
    pub max_windows: Option<usize>,
    pub bos: BosMode,
}

/// Tokens to predict, and how they came about.
pub struct Task {
    pub corpus: String,
    pub windows: Vec<Window>,
    pub convention: Convention,
    pub window: usize,
    pub bos: String,
    pub text_sha256: Option<String>,
}

/// The texts that come with the program.
pub fn builtin() -> Vec<Corpus> {
    vec![Corpus::heldout(), Corpus::heldout_science()]
}

/// Cuts a text as both models are to read it.
pub fn task(cut: &Cut, artifact: &Runnable, reference: &Runnable, corpus: &Corpus, printer: Printer) -> Result<Task> {
    let how = Measurement {
        corpus,
        convention: cut.convention,
        window: cut.window.or(shorter_context(cut.convention, reference, artifact)),
        max_windows: cut.max_windows,
        bos: cut.bos,
    };
    let (window, bos, tokens) = settle(reference, &how)?;
    check_context(artifact.model.config.max_positions, cut.convention.positions(window), window)?;
    same_tokens(reference, artifact, corpus, (&tokens, how.tokens(window)), printer)?;
    let mut windows = plan(cut.convention, &tokens, window, bos, reference.tokenizer()?.rolling_prefix())
        .with_context(|| format!("`{}`", corpus.name))?;
    windows.truncate(cut.max_windows.unwrap_or(usize::MAX));
    Ok(Task {
        corpus: corpus.name.clone(),
        windows,
        convention: cut.convention,
        window,
        bos: bos.name().into(),
        text_sha256: Some(corpus.facts.sha256.clone()),
    })
}

/// The window to take where the artifact's context is shorter than its reference's and the default.
fn shorter_context(convention: Convention, reference: &Runnable, artifact: &Runnable) -> Option<usize> {
    let context = artifact.model.config.max_positions;
    let usual = convention.default_window().min(reference.model.config.max_positions);
    (context < usual).then_some(context)
}

/// Refuses windows that the artifact cannot read.
pub fn check_context(context: usize, needed: usize, window: usize) -> Result<()> {
    if needed > context {
        bail!("a window of {window} tokens is longer than the {context} positions the artifact was made for");
    }
    Ok(())
}

/// Both must read the text as the same tokens: with another tokenizer the artifact would be judged on what its users
/// never give it. `enough` of the reference's `tokens` are compared.
fn same_tokens(
    reference: &Runnable,
    artifact: &Runnable,
    corpus: &Corpus,
    (tokens, enough): (&[u32], usize),
    printer: Printer,
) -> Result<()> {
    let file = |of: &Runnable| of.model.checkpoint().side_text("tokenizer.json");
    let Some(own) = file(artifact)? else {
        printer.warn("the artifact has no `tokenizer.json`; the text is read with the reference's");
        return Ok(());
    };
    if file(reference)?.as_ref() != Some(&own) {
        let given = artifact.text_tokens(corpus, enough).context("the artifact")?;
        let looked_at = |tokens: &[u32]| tokens[..tokens.len().min(enough)].to_vec();
        let (given, tokens) = (looked_at(&given), looked_at(tokens));
        if given != tokens {
            let at = tokens.iter().zip(&given).take_while(|(a, b)| a == b).count();
            let name = |tokens: &[u32]| tokens.get(at).map_or("nothing".into(), ToString::to_string);
            bail!(
                "the artifact's tokenizer is not the reference's: token {at} of the text is {} for the reference and {} for \
                 the artifact; copy `tokenizer.json` from the reference",
                name(&tokens),
                name(&given)
            );
        }
    }
    let (one, other) = (reference.tokenizer()?, artifact.tokenizer().context("the artifact")?);
    if (one.adds_bos(), one.bos()) != (other.adds_bos(), other.bos()) {
        printer.warn(format!(
            "BOS differs: the reference {}, the artifact {}; both are measured as the reference wants it",
            one.bos_evidence(),
            other.bos_evidence()
        ));
    }
    Ok(())
}
