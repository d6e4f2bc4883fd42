//! `quantkit eval kl`

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use serde::Serialize;

use super::device::backend;
use super::open::{Located, Measurement, Runnable, corpus, locate, open, settle};
use crate::backend::Backend;
use crate::backend::cuda::CudaOptions;
use crate::calibrate::corpus::Corpus;
use crate::cli::args::{KlArgs, ModelArgs};
use crate::cli::exit::CheckFailed;
use crate::cli::interrupt;
use crate::cli::print::Printer;
use crate::evaluate::divergence::{Divergence, Reference, measure};
use crate::evaluate::logits_file::LogitsFile;
use crate::evaluate::perplexity::peak_rss_bytes;
use crate::evaluate::windows::{Convention, Window, plan};
use crate::model::tokenizer::{BosMode, BosRule, text_sha256};

/// What was compared, on what, and what came of it.
#[derive(Serialize)]
struct Report {
    artifact: String,
    /// The quantization method of an artifact.
    method: Option<&'static str>,
    reference: String,
    #[serde(flatten)]
    figures: Divergence,
    convention: Convention,
    window: usize,
    windows: usize,
    bos: &'static str,
    /// `None` where a file of logits brings tokens instead of a text.
    text_sha256: Option<String>,
    device: String,
    peak_rss_bytes: u64,
}

/// Tokens to predict, and how they came about.
struct Task {
    windows: Vec<Window>,
    convention: Convention,
    window: usize,
    bos: BosRule,
    text_sha256: Option<String>,
}

pub fn run(args: &KlArgs, printer: Printer) -> Result<()> {
    let device = backend(&args.device, CudaOptions::default(), printer)?;
    let find = |model: Option<String>, revision: &Option<String>| {
        locate(&ModelArgs { model, revision: revision.clone(), device: args.device.clone() }, printer)
    };
    let located = find(Some(args.artifact.clone()), &args.revision)?;
    let artifact = open(&located.dir, device.clone(), printer).context("the artifact")?;
    let report = match &args.reference_logits {
        Some(path) => against_file(args, (&located, &artifact), path, printer)?,
        None => {
            let original = find(args.reference.clone(), &args.reference_revision)?;
            against_model(args, (&located, &artifact), &original, device, printer)?
        }
    };
    printer.object(&report)?;
    show(&report, printer)?;
    gates(args, &report.figures)
}

/// Both models on the text's windows.
fn against_model(
    args: &KlArgs,
    (located, artifact): (&Located, &Runnable),
    original: &Located,
    device: Arc<dyn Backend>,
    printer: Printer,
) -> Result<Report> {
    let reference = open(&original.dir, device, printer).context("the reference")?;
    Reference::Model(&reference.model).check(&artifact.model)?;
    let corpus = corpus(args.text.as_deref(), Corpus::heldout, reference.model.checkpoint())?;
    let how = Measurement {
        corpus: &corpus,
        convention: args.convention,
        window: args.window.or(shorter_context(args.convention, &reference, artifact)),
        max_windows: args.max_windows,
        bos: args.bos,
    };
    let (window, bos, tokens) = settle(&reference, &how)?;
    check_context(artifact.model.config.max_positions, args.convention.positions(window), window)?;
    let text = corpus.text();
    same_tokens(&reference, artifact, &text, &tokens, printer)?;
    if args.bos == BosMode::Auto {
        printer.note(format!("BOS: {}", reference.tokenizer()?.bos_evidence()));
    }
    let windows = plan(args.convention, &tokens, window, bos, reference.tokenizer()?.rolling_prefix())?;
    let text_sha256 = Some(text_sha256(&text));
    let task = Task { windows, convention: args.convention, window, bos, text_sha256 };
    compare(args, (located, artifact), (&original.name, Reference::Model(&reference.model)), task, printer)
}

/// The artifact on the tokens of a file that holds the reference's predictions.
fn against_file(
    args: &KlArgs,
    (located, artifact): (&Located, &Runnable),
    path: &Path,
    printer: Printer,
) -> Result<Report> {
    let mut file = LogitsFile::open(path)?;
    Reference::File(&mut file).check(&artifact.model)?;
    check_context(artifact.model.config.max_positions, Convention::LlamaCpp.positions(file.window), file.window)?;
    // llama.cpp writes the tokens as the text gave them, and its BOS, where it adds one, only before the first.
    let first = file.tokens[0];
    let bos = match args.bos {
        BosMode::None | BosMode::Once => BosRule::None,
        BosMode::Window => artifact.tokenizer()?.bos().map(BosRule::Window).context("the tokenizer has no BOS")?,
        BosMode::Auto if artifact.tokenizer()?.bos() == Some(first) => BosRule::Window(first),
        BosMode::Auto => BosRule::None,
    };
    let score_from = file.score_from();
    let cut = |tokens: &[u32]| {
        let mut tokens = tokens.to_vec();
        if let BosRule::Window(bos) = bos {
            tokens[0] = bos;
        }
        Window { tokens, score_from }
    };
    let windows = file.tokens.chunks_exact(file.window).map(cut).collect();
    let task = Task { windows, convention: Convention::LlamaCpp, window: file.window, bos, text_sha256: None };
    let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    compare(args, (located, artifact), (&name, Reference::File(&mut file)), task, printer)
}

fn compare(
    args: &KlArgs,
    (located, artifact): (&Located, &Runnable),
    (name, reference): (&str, Reference<'_>),
    task: Task,
    printer: Printer,
) -> Result<Report> {
    interrupt::listen();
    let Task { mut windows, convention, window, bos, text_sha256 } = task;
    windows.truncate(args.max_windows.unwrap_or(usize::MAX));
    let mut steps = printer.steps("divergence", windows.len() as u64);
    let positions = measure(&artifact.model, reference, &windows, &mut |done, total| {
        steps.set(done as u64, total as u64);
        interrupt::check()
    })?;
    Ok(Report {
        artifact: located.name.clone(),
        method: artifact.method,
        reference: name.into(),
        figures: Divergence::of(&positions).context("nothing to compare")?,
        convention,
        window,
        windows: windows.len(),
        bos: bos.name(),
        text_sha256,
        device: artifact.model.backend().device(),
        peak_rss_bytes: peak_rss_bytes(),
    })
}

/// The window to take where the artifact's context is shorter than its reference's and the default.
fn shorter_context(convention: Convention, reference: &Runnable, artifact: &Runnable) -> Option<usize> {
    let context = artifact.model.config.max_positions;
    let usual = convention.default_window().min(reference.model.config.max_positions);
    (context < usual).then_some(context)
}

fn check_context(context: usize, needed: usize, window: usize) -> Result<()> {
    if needed > context {
        bail!("a window of {window} tokens is longer than the {context} positions the artifact was made for");
    }
    Ok(())
}

/// Both must read the text as the same tokens: with another tokenizer the artifact would be judged on what its users
/// never give it.
fn same_tokens(reference: &Runnable, artifact: &Runnable, text: &str, tokens: &[u32], printer: Printer) -> Result<()> {
    let file = |of: &Runnable| of.model.checkpoint().side_text("tokenizer.json");
    let Some(own) = file(artifact)? else {
        printer.warn("the artifact has no `tokenizer.json`; the text is read with the reference's");
        return Ok(());
    };
    if file(reference)?.as_ref() != Some(&own) {
        let given = artifact.tokenizer().context("the artifact")?.encode(text).context("the artifact")?;
        if given != tokens {
            let at = tokens.iter().zip(&given).take_while(|(a, b)| a == b).count();
            let name = |tokens: &[u32]| tokens.get(at).map_or("nothing".into(), ToString::to_string);
            bail!(
                "the artifact's tokenizer is not the reference's: the text is {} tokens for the reference and {} for \
                 the artifact, and token {at} is {} for the one and {} for the other; copy `tokenizer.json` from the \
                 reference",
                tokens.len(),
                given.len(),
                name(tokens),
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

fn show(report: &Report, printer: Printer) -> Result<()> {
    let Report { figures: Divergence { kl, same_top, delta_p, perplexity, positions }, .. } = report;
    printer.text(format!(
        "{} against {}: {positions} tokens in {} windows of {}, convention {}, BOS {}, on {}",
        report.artifact, report.reference, report.windows, report.window, report.convention, report.bos, report.device
    ))?;
    printer.text(format!("KL divergence   mean {:.6} ± {:.6} nats", kl.mean, kl.stderr))?;
    let shares = [("median", kl.median), ("90 %", kl.p90), ("95 %", kl.p95), ("99 %", kl.p99), ("99.9 %", kl.p99_9)];
    printer.text(row(shares.into_iter().chain([("max", kl.max)]), 6))?;
    printer.text(format!("same top token  {:.3} ± {:.3} %", 100.0 * same_top.share, 100.0 * same_top.stderr))?;
    printer.text(format!(
        "delta-p         mean {:.3} ± {:.3} %, RMS {:.3} ± {:.3} %",
        100.0 * delta_p.mean,
        100.0 * delta_p.stderr,
        100.0 * delta_p.rms,
        100.0 * delta_p.rms_stderr
    ))?;
    let low = [("min", delta_p.min), ("1 %", delta_p.p1), ("5 %", delta_p.p5), ("10 %", delta_p.p10)];
    let high = [("90 %", delta_p.p90), ("95 %", delta_p.p95), ("99 %", delta_p.p99), ("max", delta_p.max)];
    let all = low.into_iter().chain([("median", delta_p.median)]).chain(high);
    printer.text(row(all.map(|(name, p)| (name, 100.0 * p)), 3))?;
    printer.text(format!(
        "perplexity      reference {:.4}, artifact {:.4}, ratio {:.5} ± {:.5}",
        perplexity.reference, perplexity.artifact, perplexity.ratio, perplexity.ratio_stderr
    ))?;
    Ok(())
}

/// Quantiles below the figure they belong to.
fn row<'a>(quantiles: impl Iterator<Item = (&'a str, f64)>, digits: usize) -> String {
    let all: Vec<String> = quantiles.map(|(name, value)| format!("{name} {value:.digits$}")).collect();
    format!("                {}", all.join(", "))
}

fn gates(args: &KlArgs, figures: &Divergence) -> Result<()> {
    let mut failed = Vec::new();
    if let Some(limit) = args.max_kl.filter(|limit| figures.kl.mean > *limit) {
        failed.push(format!("the mean divergence is {:.6} nats, more than {limit}", figures.kl.mean));
    }
    if let Some(limit) = args.min_same_top.filter(|limit| figures.same_top.share < *limit) {
        let share = figures.same_top.share;
        failed.push(format!("the likeliest token is the same at a share of {share:.5}, less than {limit}"));
    }
    if !failed.is_empty() {
        bail!(CheckFailed(failed.join("; ")));
    }
    Ok(())
}
