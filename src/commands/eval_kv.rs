//! `quantkit eval kv`

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use serde::Serialize;

use super::accounted;
use super::device::one;
use super::kv_cache;
use super::task::Task;
use super::validate::texts;
use crate::backend::cache::{CacheType, LayerScales};
use crate::backend::cuda::CudaOptions;
use crate::calibrate::cache::Sharing;
use crate::calibrate::corpus::Corpus;
use crate::cli::exit::CheckFailed;
use crate::cli::interrupt;
use crate::cli::print::Printer;
use crate::cli::validation::{KvArgs, TextArgs};
use crate::evaluate::cache_error::{CacheErrors, Setting, head_errors, predictions};
use crate::evaluate::divergence::Divergence;
use crate::evaluate::finite::{self, DAMAGED};
use crate::pipeline::observer::Progress;
use crate::pipeline::open::{Runnable, corpus, open};
use crate::pipeline::source::locate;
use crate::report::{CacheFigures, CacheSection, ScaleSource, number};

/// Windows that errors of single heads are measured on.
const HEAD_WINDOWS: usize = 4;
/// What engines' default may cost before it is warned of: a rise of perplexity for certain, or a divergence.
const NOTABLE_RISE: f64 = 0.005;
const NOTABLE_KL: f64 = 0.01;

/// What is printed as JSON.
#[derive(Serialize)]
struct Output<'a> {
    model: &'a str,
    /// Why figures are not finite, where some are not: they are `null`.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
    #[serde(flatten)]
    cache: &'a CacheSection,
    warnings: Vec<String>,
}

pub fn run(args: &KvArgs, printer: Printer) -> Result<()> {
    let located = locate(&args.model, printer)?;
    let device = one(&args.model.device, CudaOptions::default(), printer)?;
    let runnable = open(&located.dir, device, printer)?;
    let corpus = match &args.texts.texts[..] {
        [] => Corpus::heldout(),
        [path] => corpus(Some(path), Corpus::heldout, runnable.model.checkpoint())?,
        _ => bail!("give one --text: caches are measured on one"),
    };
    let task = texts::task(&args.texts, &runnable, &runnable, &corpus, printer)?;
    interrupt::listen();
    let cache = section(&runnable, &task, &args.texts, &args.kinds, printer)?;
    let warnings: Vec<String> = warning(&cache).into_iter().collect();
    let reason = broken(&cache);
    let output = Output { model: &located.name, reason: reason.as_deref(), cache: &cache, warnings: warnings.clone() };
    printer.object(&accounted(&output, runnable.unread.as_ref()))?;
    for line in lines(&cache) {
        printer.text(line)?;
    }
    warnings.iter().for_each(|warning| printer.warn(warning));
    if let Some(reason) = reason {
        bail!(CheckFailed(format!("`{}`: {reason}", located.name)));
    }
    let Some(limit) = args.max_ppl_increase else { return Ok(()) };
    let beyond = |kind: &&CacheFigures| cache.taken_by_engines(kind) && kind.ratio - 1.0 > limit.0;
    match cache.types.iter().find(beyond) {
        Some(kind) => bail!(CheckFailed(format!(
            "a cache of {} ({}) raises the perplexity by {}, more than {}",
            kind.kind,
            kind.scales.name(),
            number::change(kind.ratio - 1.0, 3),
            number::percent(limit.0, 3)
        ))),
        None => Ok(()),
    }
}

/// Why figures of caches are not finite; the model is named where its own perplexity is not.
pub fn broken(cache: &CacheSection) -> Option<String> {
    if let Some(why) = finite::of_value(cache.baseline_perplexity) {
        return Some(format!("with a cache of {} {why}: {DAMAGED}", cache.baseline));
    }
    let broken = |kind: &CacheFigures| {
        let why = finite::of_value(kind.perplexity).or_else(|| {
            let value = [kind.mean_kl, kind.ratio].into_iter().find(|value| !value.is_finite())?;
            Some(format!("the divergence or ratio is {value}"))
        })?;
        Some(format!("with a cache of {} ({}) {why}", kind.kind, kind.scales.name()))
    };
    cache.types.iter().find_map(broken)
}

/// A type of cache whose default costs quality, which scales would save.
pub fn warning(cache: &CacheSection) -> Option<String> {
    let default = cache.types.iter().find(|kind| {
        kind.scales == ScaleSource::Unit && cache.taken_by_engines(kind) && {
            let rise = kind.ratio - 1.645 * kind.ratio_stderr - 1.0;
            rise > NOTABLE_RISE || kind.mean_kl - 1.645 * kind.mean_kl_stderr > NOTABLE_KL || !kind.mean_kl.is_finite()
        }
    })?;
    let same = cache.types.iter().filter(|kind| kind.kind == default.kind && kind.scales != ScaleSource::Unit);
    let best = same.min_by(|a, b| a.mean_kl.total_cmp(&b.mean_kl));
    let better = best.filter(|best| best.mean_kl < 0.5 * default.mean_kl).map_or(String::new(), |best| {
        format!(
            "; with scales of its own it is {} ({} nats): quantize with `--kv-cache fp8`",
            number::change(best.ratio - 1.0, 2),
            number::significant(best.mean_kl, 3)
        )
    });
    Some(format!(
        "the artifact has no scales for its cache, so engines take 1.0, and a cache of {} then changes perplexity by {} \
         (mean divergence {} nats){better}",
        default.kind,
        number::change(default.ratio - 1.0, 2),
        number::significant(default.mean_kl, 3)
    ))
}

/// Measures caches of `kinds` on the windows of `task`.
pub fn section(
    runnable: &Runnable,
    task: &Task,
    how: &TextArgs,
    kinds: &[CacheType],
    printer: Printer,
) -> Result<CacheSection> {
    let model = &runnable.model;
    let (layers, kv_heads) = (model.blocks.len(), model.config.kv_heads);
    let baseline = Setting { kind: CacheType::F16, scales: None };
    let (sources, settings): (Vec<_>, Vec<_>) = settings(runnable, how, kinds, printer)?.into_iter().unzip();
    let mut steps = printer.steps("cache: heads", 0);
    let mut progress = |done: usize, total: usize| {
        steps.set(done as u64, total as u64);
        Ok(interrupt::check()?)
    };
    let some = &task.windows[..task.windows.len().min(HEAD_WINDOWS)];
    let errors = head_errors(model, some, &settings, &mut progress)?;
    let mut steps = printer.steps("cache: text", 0);
    let mut progress = |done: usize, total: usize| {
        steps.set(done as u64, total as u64);
        Ok(interrupt::check()?)
    };
    let positions = predictions(model, &task.windows, &baseline, &settings, &mut progress)?;
    let (mut types, mut perplexity) = (Vec::new(), f64::NAN);
    for (((source, setting), errors), positions) in sources.into_iter().zip(&settings).zip(errors).zip(&positions) {
        let figures = Divergence::of(positions).context("the text has no token to predict")?;
        perplexity = figures.perplexity.reference;
        let bytes = setting.kind.token_bytes(layers, kv_heads, model.config.head_dim);
        types.push(CacheFigures::new(setting.kind, source, bytes, &figures, errors));
    }
    let corpus = texts::corpus(task);
    Ok(CacheSection {
        corpus,
        baseline: baseline.kind.to_string(),
        baseline_perplexity: perplexity,
        layers,
        kv_heads,
        types,
    })
}

/// The types with every source of scales that they can have.
fn settings(
    runnable: &Runnable,
    how: &TextArgs,
    kinds: &[CacheType],
    printer: Printer,
) -> Result<Vec<(ScaleSource, Setting)>> {
    let (mut all, mut wanted) = (Vec::new(), Vec::new());
    let mut to_find = |all: &mut Vec<_>, kind, sharing| {
        let source = match sharing {
            Sharing::Layer => ScaleSource::Proposed,
            Sharing::Head => ScaleSource::ProposedPerHead,
        };
        wanted.push((kind, sharing));
        all.push((source, kind, None));
    };
    for (i, &kind) in kinds.iter().enumerate() {
        if kind == CacheType::F16 || kinds[..i].contains(&kind) {
            continue;
        }
        match kind {
            CacheType::F32 | CacheType::F16 => all.push((ScaleSource::None, kind, None)),
            CacheType::Fp8E5m2 => all.push((ScaleSource::Unit, kind, None)),
            CacheType::Int8 => {
                all.push((ScaleSource::Dynamic, kind, None));
                to_find(&mut all, kind, Sharing::Head);
            }
            CacheType::Fp8E4m3 => {
                all.push((ScaleSource::Unit, kind, None));
                if let Some(scales) = runnable.model.cache_scales(kind)? {
                    all.push((ScaleSource::Calibrated, kind, Some(scales)));
                } else {
                    to_find(&mut all, kind, Sharing::Layer);
                    to_find(&mut all, kind, Sharing::Head);
                }
            }
        }
    }
    if all.is_empty() {
        bail!("--kv-cache-dtype: name a type beside f16, which all are held against");
    }
    let found = if wanted.is_empty() { Vec::new() } else { kv_cache::calibrated(runnable, how.bos, &wanted, printer)? };
    let mut found = found.into_iter();
    let one = |(source, kind, scales): (ScaleSource, CacheType, Option<Arc<[LayerScales]>>)| {
        let proposed = matches!(source, ScaleSource::Proposed | ScaleSource::ProposedPerHead);
        let scales = if proposed { found.next() } else { scales };
        (source, Setting { kind, scales })
    };
    Ok(all.into_iter().map(one).collect())
}

/// The figures for people.
fn lines(cache: &CacheSection) -> Vec<String> {
    let mut out = vec![format!(
        "caches, on {}: {} tokens in {} windows of {}, perplexity with {} {:.4}",
        cache.corpus.name,
        cache.corpus.tokens,
        cache.corpus.windows,
        cache.corpus.window,
        cache.baseline,
        cache.baseline_perplexity
    )];
    out.push(format!(
        "{:<10} {:<22} {:>12} {:>12} {:>12} {:>10} {:>10} {:>10} {:>10}",
        "type", "scales", "bytes/token", "perplexity", "mean KL", "same top", "keys", "values", "attention"
    ));
    for kind in &cache.types {
        let worst = |grid: fn(&CacheErrors) -> &Vec<Vec<f64>>| {
            let all = kind.errors.iter().flat_map(|errors| grid(errors).iter().flatten().copied());
            number::significant(all.fold(0.0, f64::max), 3)
        };
        out.push(format!(
            "{:<10} {:<22} {:>12} {:>12} {:>12} {:>10} {:>10} {:>10} {:>10}",
            kind.kind,
            kind.scales.name(),
            kind.bytes_per_token,
            number::change(kind.ratio - 1.0, 3),
            number::significant(kind.mean_kl, 3),
            number::percent(kind.greedy_agreement, 2),
            worst(|errors| &errors.keys),
            worst(|errors| &errors.values),
            worst(|errors| &errors.output),
        ));
    }
    out.push("keys, values, attention: the largest relative error of a layer and head".into());
    out
}
