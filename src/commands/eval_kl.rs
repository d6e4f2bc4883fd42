//! `quantkit eval kl`

use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::Serialize;

use super::accounted;
use super::device::backend;
use super::task::{Cut, Task, builtin, check_context, task};
use crate::backend::cuda::CudaOptions;
use crate::calibrate::corpus::Corpus;
use crate::cli::args::{KlArgs, ModelArgs};
use crate::cli::exit::CheckFailed;
use crate::cli::interrupt;
use crate::cli::print::Printer;
use crate::evaluate::baseline::{
    BaselineCorpus, CorpusRecord, Header, Reader, ReferenceRecord, Settings, Writer, tokenizer_sha256,
};
use crate::evaluate::divergence::{Divergence, KlBound, Reference, measure};
use crate::evaluate::finite;
use crate::evaluate::logits_file::{LogitsFile, record_bytes};
use crate::evaluate::perplexity::peak_rss_bytes;
use crate::evaluate::windows::{Convention, Window, plan};
use crate::model::presence::Unread;
use crate::model::tokenizer::{BosMode, BosRule};
use crate::num::size::bytes;
use crate::pipeline::observer::Progress;
use crate::pipeline::open::{Runnable, corpus, open};
use crate::pipeline::source::locate;

/// What was compared, on what, and what came of it.
#[derive(Serialize)]
struct Report {
    artifact: String,
    /// The quantization method, where the artifact records it.
    method: Option<String>,
    /// The form that its weights are stored in.
    format: Option<&'static str>,
    reference: String,
    corpora: Vec<OnCorpus>,
    /// The baseline that was written or read.
    #[serde(skip_serializing_if = "Option::is_none")]
    baseline: Option<BaselineFacts>,
    /// Tensors that the reference does not read.
    #[serde(skip_serializing_if = "Option::is_none")]
    reference_unread_tensors: Option<Unread>,
    device: String,
    peak_rss_bytes: u64,
}

/// What came of it on one text.
#[derive(Serialize)]
struct OnCorpus {
    corpus: String,
    /// Why figures are not finite, where some are not: they are `null`.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[serde(flatten)]
    figures: Divergence,
    /// Where the divergence is an estimate.
    #[serde(skip_serializing_if = "Option::is_none")]
    kl_bound: Option<KlBound>,
    convention: Convention,
    window: usize,
    windows: usize,
    bos: String,
    /// `None` where a file of logits brings tokens instead of a text.
    text_sha256: Option<String>,
}

/// A baseline in numbers.
#[derive(Serialize)]
struct BaselineFacts {
    file: String,
    bytes: usize,
    positions: usize,
    /// Mass, on average, of the tokens that are not kept one by one.
    mean_tail_mass: f64,
    bytes_per_position: f64,
    /// What llama.cpp's file takes.
    llamacpp_bytes_per_position: usize,
}

impl BaselineFacts {
    fn of(path: &Path, read: &Reader) -> Self {
        let positions = read.positions();
        Self {
            file: file_name(path),
            bytes: read.bytes,
            positions,
            mean_tail_mass: read.mean_tail_mass(),
            bytes_per_position: read.bytes as f64 / positions.max(1) as f64,
            llamacpp_bytes_per_position: record_bytes(read.header.vocab),
        }
    }
}

pub fn run(args: &KlArgs, printer: Printer) -> Result<()> {
    if let Some(path) = &args.save_baseline {
        check_target(path)?;
    }
    let device = backend(&args.device, CudaOptions::default(), printer)?;
    let find = |model: Option<String>, revision: &Option<String>| {
        locate(&ModelArgs { model, revision: revision.clone(), device: args.device.clone() }, printer)
    };
    let located = find(Some(args.artifact.clone()), &args.revision)?;
    let artifact = open(&located.dir, device.clone(), printer).context("the artifact")?;
    interrupt::listen();
    let mut reference_unread_tensors = None;
    let compared = match (&args.reference_logits, &args.baseline) {
        (Some(path), _) => against_file(args, &artifact, path, printer)?,
        (None, Some(path)) => against_baseline(args, &artifact, path, printer)?,
        (None, None) => {
            let original = find(args.reference.clone(), &args.reference_revision)?;
            let reference = open(&original.dir, device, printer).context("the reference")?;
            reference_unread_tensors.clone_from(&reference.unread);
            against_model(args, &artifact, (&original.name, &reference), printer)?
        }
    };
    let (reference, corpora, baseline) = compared;
    let report = Report {
        artifact: located.name,
        method: artifact.method.clone(),
        format: artifact.format,
        reference,
        corpora,
        baseline,
        reference_unread_tensors,
        device: artifact.model.backend().device(),
        peak_rss_bytes: peak_rss_bytes(),
    };
    printer.object(&accounted(&report, artifact.unread.as_ref()))?;
    show(&report, printer)?;
    gates(args, &report.corpora)
}

/// The reference's name, figures by text, and the baseline that was written or read.
type Compared = (String, Vec<OnCorpus>, Option<BaselineFacts>);

/// Refuses before any work what could not be written after it.
fn check_target(path: &Path) -> Result<()> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if path.is_dir() || !parent.is_dir() {
        bail!("the baseline cannot be written to `{}`: name a file in a folder that exists", path.display());
    }
    Ok(())
}

/// Both models on the windows of all texts.
fn against_model(
    args: &KlArgs,
    artifact: &Runnable,
    (original, reference): (&str, &Runnable),
    printer: Printer,
) -> Result<Compared> {
    Reference::Model(&reference.model).check(&artifact.model)?;
    let mut corpora = Vec::new();
    for path in &args.texts {
        corpora.push(corpus(Some(path), Corpus::heldout, reference.model.checkpoint())?);
    }
    if corpora.is_empty() {
        corpora = builtin();
    }
    let KlArgs { convention, window, max_windows, bos, .. } = *args;
    let cut = Cut { convention, window, max_windows, bos };
    // All are looked at before any of them is measured.
    let tasks: Vec<Task> =
        corpora.iter().map(|corpus| task(&cut, artifact, reference, corpus, printer)).collect::<Result<_>>()?;
    if args.bos == BosMode::Auto {
        printer.note(format!("BOS: {}", reference.tokenizer()?.bos_evidence()));
    }
    let Some(path) = &args.save_baseline else {
        let one = |task| compare(args, artifact, Reference::Model(&reference.model), task, printer);
        return Ok((original.into(), tasks.into_iter().map(one).collect::<Result<_>>()?, None));
    };
    let settings = Settings::default();
    let mut writer = Writer::new(Header {
        tool: concat!("quantkit ", env!("CARGO_PKG_VERSION")).into(),
        reference: ReferenceRecord::of(original, reference.model.checkpoint())?,
        vocab: reference.model.config.vocab,
        settings,
        corpora: Vec::new(),
    });
    let mut figures = Vec::new();
    for task in tasks {
        let mut records = Vec::new();
        let windows = task.windows[..task.windows.len().min(args.max_windows.unwrap_or(usize::MAX))].to_vec();
        let record = CorpusRecord {
            name: task.corpus.clone(),
            text_sha256: task.text_sha256.clone().unwrap_or_default(),
            convention: task.convention,
            window: task.window,
            bos: task.bos.clone(),
            windows: windows.len(),
            positions: 0,
        };
        let keep = Reference::Keep { model: &reference.model, settings, records: &mut records };
        figures.push(compare(args, artifact, keep, task, printer)?);
        writer.add(&BaselineCorpus { record, windows, records })?;
    }
    writer.write(path)?;
    let facts = BaselineFacts::of(path, &Reader::open(path)?);
    printer.note(format!(
        "baseline: {} in `{}`, {:.0} bytes a prediction; llama.cpp's file would take {}",
        bytes(facts.bytes as u64),
        path.display(),
        facts.bytes_per_position,
        bytes((facts.positions * facts.llamacpp_bytes_per_position) as u64)
    ));
    Ok((original.into(), figures, Some(facts)))
}

/// The artifact on the texts of a baseline.
fn against_baseline(args: &KlArgs, artifact: &Runnable, path: &Path, printer: Printer) -> Result<Compared> {
    let read = Reader::open(path)?;
    let facts = BaselineFacts::of(path, &read);
    let Reader { header, corpora, .. } = read;
    if corpora.is_empty() {
        bail!("`{}` has no texts: there is nothing to compare with; write the baseline anew", path.display());
    }
    let vocab = header.vocab;
    Reference::Kept { vocab, records: &[] }.check(&artifact.model)?;
    for corpus in &corpora {
        let longest = corpus.windows.iter().map(|window| window.tokens.len() - 1).max().unwrap_or(0);
        check_context(artifact.model.config.max_positions, longest, corpus.record.window)?;
        same_windows(&header, corpus, artifact, printer)?;
    }
    let mut figures = Vec::new();
    for BaselineCorpus { record, windows, records } in corpora {
        let task = Task {
            corpus: record.name,
            windows,
            convention: record.convention,
            window: record.window,
            bos: record.bos,
            text_sha256: Some(record.text_sha256),
        };
        figures.push(compare(args, artifact, Reference::Kept { vocab, records: &records }, task, printer)?);
    }
    Ok((header.reference.name, figures, Some(facts)))
}

/// Whether the artifact reads a text as the tokens of a baseline, as far as that can be told without the text.
fn same_windows(header: &Header, corpus: &BaselineCorpus, artifact: &Runnable, printer: Printer) -> Result<()> {
    let own = tokenizer_sha256(artifact.model.checkpoint());
    if own.is_none() || own == header.reference.tokenizer_sha256 {
        return Ok(());
    }
    let record = &corpus.record;
    let Some(text) = builtin().into_iter().find(|text| text.sha256 == record.text_sha256) else {
        printer.warn(format!(
            "the artifact's `tokenizer.json` is not written as the reference's; whether both read `{}` as the same \
             tokens, a baseline cannot tell",
            record.name
        ));
        return Ok(());
    };
    let tokenizer = artifact.tokenizer().context("the artifact")?;
    let tokens = text.first_text_tokens(tokenizer, usize::MAX).context("the artifact")?;
    // What BOS is, the reference decided.
    let first = corpus.windows.first().and_then(|window| window.tokens.first()).copied();
    let bos = match (record.bos.as_str(), first) {
        ("once", Some(first)) => BosRule::Once(first),
        ("window", Some(first)) => BosRule::Window(first),
        _ => BosRule::None,
    };
    let windows = plan(record.convention, &tokens, record.window, bos, first)?;
    if windows.get(..corpus.windows.len()) != Some(&corpus.windows) {
        bail!(
            "the artifact's tokenizer is not the reference's: it reads `{}` as other tokens than the baseline has; copy \
             `tokenizer.json` from the reference",
            record.name
        );
    }
    Ok(())
}

/// The artifact on the tokens of a file that holds the reference's predictions.
fn against_file(args: &KlArgs, artifact: &Runnable, path: &Path, printer: Printer) -> Result<Compared> {
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
    let name = file_name(path);
    let task = Task {
        corpus: name.clone(),
        windows: file.tokens.chunks_exact(file.window).map(cut).collect(),
        convention: Convention::LlamaCpp,
        window: file.window,
        bos: bos.name().into(),
        text_sha256: None,
    };
    let figures = compare(args, artifact, Reference::File(&mut file), task, printer)?;
    Ok((name, vec![figures], None))
}

fn file_name(path: &Path) -> String {
    path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

fn compare(
    args: &KlArgs,
    artifact: &Runnable,
    reference: Reference<'_>,
    task: Task,
    printer: Printer,
) -> Result<OnCorpus> {
    let Task { corpus, mut windows, convention, window, bos, text_sha256 } = task;
    windows.truncate(args.max_windows.unwrap_or(usize::MAX));
    let mut steps = printer.steps("divergence", windows.len() as u64);
    let positions = measure(&artifact.model, reference, &windows, &mut |done, total| {
        steps.set(done as u64, total as u64);
        interrupt::check()
    })?;
    let figures = Divergence::of(&positions).context("nothing to compare")?;
    Ok(OnCorpus {
        corpus,
        reason: finite::comparison(&figures),
        figures,
        kl_bound: KlBound::of(&positions),
        convention,
        window,
        windows: windows.len(),
        bos,
        text_sha256,
    })
}

fn show(report: &Report, printer: Printer) -> Result<()> {
    printer.text(format!("{} against {}, on {}", report.artifact, report.reference, report.device))?;
    for on in &report.corpora {
        show_corpus(on, printer)?;
    }
    if let (Some(baseline), None) = (&report.baseline, report.corpora.iter().find(|on| on.kl_bound.is_none())) {
        printer.text(format!(
            "from `{}`, {:.0} bytes a prediction, which names all but {:.3} % of the reference's mass token by token; \
             all figures but the divergence are exact",
            baseline.file,
            baseline.bytes_per_position,
            100.0 * baseline.mean_tail_mass
        ))?;
    }
    Ok(())
}

fn show_corpus(on: &OnCorpus, printer: Printer) -> Result<()> {
    let OnCorpus { figures: Divergence { kl, same_top, delta_p, perplexity, positions }, .. } = on;
    printer.text(format!(
        "{}: {positions} tokens in {} windows of {}, convention {}, BOS {}",
        on.corpus, on.windows, on.window, on.convention, on.bos
    ))?;
    printer.text(format!("KL divergence   mean {:.6} ± {:.6} nats", kl.mean, kl.stderr))?;
    if let Some(bound) = &on.kl_bound {
        printer.text(format!(
            "                an estimate, ± {:.6} of it by sampling; certainly from {:.6} to {:.6}",
            bound.sampling_stderr, bound.lower, bound.upper
        ))?;
    }
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

fn gates(args: &KlArgs, corpora: &[OnCorpus]) -> Result<()> {
    let mut failed = Vec::new();
    for OnCorpus { corpus, figures, reason, .. } in corpora {
        if let Some(reason) = reason {
            failed.push(format!("on {corpus} {reason}"));
            continue;
        }
        if let Some(limit) = args.max_kl.filter(|limit| figures.kl.mean > *limit) {
            failed.push(format!("on {corpus} the mean divergence is {:.6} nats, more than {limit}", figures.kl.mean));
        }
        if let Some(limit) = args.min_same_top.filter(|limit| figures.same_top.share < *limit) {
            let share = figures.same_top.share;
            failed.push(format!(
                "on {corpus} the likeliest token is the same at a share of {share:.5}, less than {limit}"
            ));
        }
    }
    if !failed.is_empty() {
        bail!(CheckFailed(failed.join("; ")));
    }
    Ok(())
}
