//! `quantkit eval spec`

use std::path::Path;

use anyhow::{Result, bail};
use serde::Serialize;

use super::accounted;
use super::device::one;
use super::{draft, kv_cache};
use crate::backend::cache::CacheType;
use crate::backend::cuda::CudaOptions;
use crate::calibrate::corpus::Corpus;
use crate::cli::exit::CheckFailed;
use crate::cli::interrupt;
use crate::cli::print::Printer;
use crate::cli::serving::ScalesArg;
use crate::cli::spec::{PairArgs, SpecArgs};
use crate::engine::sampler::SamplerOptions;
use crate::engine::speculate::Ahead;
use crate::evaluate::acceptance::{AcceptanceFigures, Cost, Mean, NEAR_ZERO};
use crate::evaluate::cache_error::Setting;
use crate::evaluate::speculation::{Task, measure};
use crate::evaluate::windows::{Convention, Window, plan};
use crate::model::presence::Unread;
use crate::model::tokenizer::{BosHabit, BosRule};
use crate::pipeline::observer::Progress;
use crate::pipeline::open::{Runnable, corpus, open};
use crate::pipeline::source::locate;

/// Tokens of a window at most.
const WINDOW: usize = 512;

/// What worked together, and what came of it.
#[derive(Serialize)]
struct Report {
    target: String,
    draft: String,
    /// The quantization methods, where artifacts record them, and the forms that their weights are stored in.
    target_method: Option<String>,
    target_format: Option<&'static str>,
    draft_method: Option<String>,
    draft_format: Option<&'static str>,
    /// The type of the key-value caches, where it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    cache: Option<CacheType>,
    #[serde(flatten)]
    figures: AcceptanceFigures,
    /// Tensors that the draft does not read.
    #[serde(skip_serializing_if = "Option::is_none")]
    draft_unread_tensors: Option<Unread>,
    device: String,
}

pub fn run(args: &SpecArgs, printer: Printer) -> Result<()> {
    if args.draft.is_none() && args.model.model.is_some() {
        bail!(
            "--draft is missing: which model is to propose tokens for `{}`?",
            args.model.model.as_deref().unwrap_or("")
        );
    }
    let located = locate(&args.model, printer)?;
    let device = one(&args.model.device, CudaOptions::default(), printer)?;
    let target = open(&located.dir, device.clone(), printer)?;
    let found = draft::find(args.draft.as_deref(), args.draft_revision.as_deref(), printer)?;
    let ahead = Ahead::Fixed(args.pair.num_speculative_tokens);
    let draft = draft::open_for(&target, &found.dir, ahead, device, printer)?;
    interrupt::listen();
    let caches = caches(args, &target, &draft, printer)?;
    let figures = figures_in(&args.pair, &target, &draft, caches.as_ref(), printer)?;
    let report = Report {
        cache: caches.map(|[target, _]| target.kind),
        target: located.name,
        draft: found.name,
        target_method: target.method.clone(),
        target_format: target.format,
        draft_method: draft.method.clone(),
        draft_format: draft.format,
        figures,
        draft_unread_tensors: draft.unread.clone(),
        device: target.model.backend().device(),
    };
    printer.object(&accounted(&report, target.unread.as_ref()))?;
    show(&report, printer)?;
    if !report.figures.has_rate() {
        printer.warn(
            "no token was proposed: what the target wrote is too short, or only repeats itself; ask for more with \
             --max-tokens and --max-prompts",
        );
    }
    gates(args, &report.figures)
}

/// The caches of both, where they are not to be as by default.
fn caches(args: &SpecArgs, target: &Runnable, draft: &Runnable, printer: Printer) -> Result<Option<[Setting; 2]>> {
    if args.cache.kv_cache_dtype.is_none() && args.cache.kv_cache_scales == ScalesArg::Auto {
        return Ok(None);
    }
    let of_target = kv_cache::setting(&args.cache, target, printer)?;
    let kind = of_target.kind;
    let scales = kv_cache::draft_scales(&args.cache, kind, draft, printer)?;
    if scales.is_none() && of_target.scales.is_some() {
        printer.warn(format!(
            "the draft brings no scales of its cache along, and its keys and values are stored by {}; \
             `--kv-cache-scales calibrated` finds some for both",
            if kind == CacheType::Int8 { "the range of each token" } else { "a scale of 1.0" }
        ));
    }
    Ok(Some([of_target, Setting { kind, scales }]))
}

/// What comes of a target and its draft.
pub fn figures(args: &PairArgs, target: &Runnable, draft: &Runnable, printer: Printer) -> Result<AcceptanceFigures> {
    figures_in(args, target, draft, None, printer)
}

fn figures_in(
    args: &PairArgs,
    target: &Runnable,
    draft: &Runnable,
    caches: Option<&[Setting; 2]>,
    printer: Printer,
) -> Result<AcceptanceFigures> {
    let (prompts, windows) = texts(args, target, draft)?;
    let task = Task {
        prompts: &prompts,
        end: target.tokenizer()?.eos(),
        max_tokens: args.max_tokens,
        windows: &windows,
        options: SamplerOptions {
            temperature: args.temperature,
            top_p: args.top_p,
            top_k: args.top_k,
            seed: args.seed,
        },
        ahead: args.num_speculative_tokens,
        caches,
        speeds: !args.no_speed,
    };
    let mut steps = printer.steps("speculation", 0);
    Ok(measure(&target.model, &draft.model, &task, &mut |done, all| {
        steps.set(done as u64, all as u64);
        interrupt::check()
    })?)
}

/// Prompts, and windows of the text.
pub fn texts(args: &PairArgs, target: &Runnable, draft: &Runnable) -> Result<(Vec<Vec<u32>>, Vec<Window>)> {
    let (tokenizer, checkpoint) = (target.tokenizer()?, target.model.checkpoint());
    let context = target.model.config.max_positions.min(draft.model.config.max_positions);
    let bos = args.bos.settle(tokenizer, target.model.config.family.needs_bos, BosHabit::Window)?;
    let lead = match bos {
        BosRule::Once(bos) | BosRule::Window(bos) => Some(bos),
        BosRule::None => None,
    };
    let text = corpus(args.text.as_deref(), Corpus::heldout, checkpoint)?;
    let enough = match args.prompts {
        Some(_) => args.max_windows.saturating_mul(WINDOW).saturating_add(2),
        // Prompts are taken from all over the text.
        None => usize::MAX,
    };
    let tokens = target.text_tokens(&text, enough)?;
    let windows = match args.max_windows {
        0 => Vec::new(),
        most => {
            let window = WINDOW.min(context).min(tokens.len());
            let mut windows = plan(Convention::Gptq, &tokens, window, bos, tokenizer.rolling_prefix())?;
            windows.truncate(most);
            windows
        }
    };
    let with_lead = |mut tokens: Vec<u32>| {
        if let Some(bos) = lead.filter(|bos| tokens.first() != Some(bos)) {
            tokens.insert(0, bos);
        }
        tokens
    };
    let prompts: Vec<Vec<u32>> = match &args.prompts {
        Some(path) => own_prompts(path, target)?
            .iter()
            .take(args.max_prompts)
            .map(|prompt| Ok(with_lead(tokenizer.encode(prompt)?)))
            .collect::<Result<_>>()?,
        None => {
            // Whole prompts from places that lie evenly over the text.
            let count = args.max_prompts.min(tokens.len() / args.prompt_tokens);
            if count == 0 {
                bail!("the text has {} tokens, less than a prompt of {}", tokens.len(), args.prompt_tokens);
            }
            let apart = (tokens.len() - args.prompt_tokens) / count;
            let cut = |i: usize| with_lead(tokens[i * apart..i * apart + args.prompt_tokens].to_vec());
            (0..count).map(cut).collect()
        }
    };
    match prompts.iter().map(Vec::len).max() {
        Some(longest) if longest >= context => {
            bail!("a prompt has {longest} tokens; the models read {context}, and must have some to write")
        }
        _ => Ok((prompts, windows)),
    }
}

/// Prompts from a file: documents of a .jsonl file, or lines.
fn own_prompts(path: &Path, target: &Runnable) -> Result<Vec<String>> {
    let read = corpus(Some(path), Corpus::heldout, target.model.checkpoint())?;
    let lines = path.extension().is_none_or(|extension| !extension.eq_ignore_ascii_case("jsonl"));
    let prompts: Vec<String> = match lines {
        true => read.text()?.lines().filter(|line| !line.trim().is_empty()).map(Into::into).collect(),
        false => read.all_documents()?,
    };
    if prompts.is_empty() { Err(anyhow::anyhow!("`{}` has no prompt", path.display())) } else { Ok(prompts) }
}

fn show(report: &Report, printer: Printer) -> Result<()> {
    let f = &report.figures;
    let sampling = if f.temperature == 0.0 { "greedy".into() } else { format!("temperature {}", f.temperature) };
    printer.text(format!(
        "{} with {} as its draft: {} prompts, {} tokens written ({} in loops left out), {sampling}, on {}{}",
        report.target,
        report.draft,
        f.prompts,
        f.tokens,
        f.looped,
        report.device,
        report.cache.map_or(String::new(), |kind| format!(", caches of {kind}"))
    ))?;
    if f.has_rate() {
        printer.text(format!(
            "{} ahead         acceptance rate {:.2} %, mean acceptance length {:.3}",
            f.ahead,
            100.0 * f.acceptance_rate,
            f.mean_length
        ))?;
        printer.text(format!("by position     {}", shares(&f.per_position)))?;
    }
    if let Some(overlap) = f.overlap {
        printer.text(format!("overlap         {} on what was written", with_error(overlap, 1.0, 4)))?;
    }
    if let Some(text) = &f.text {
        printer.text(format!(
            "on the text     alpha {} at temperature 1, same likeliest token {} %, {} tokens",
            with_error(text.alpha, 1.0, 4),
            with_error(text.agreement, 100.0, 2),
            text.positions
        ))?;
    }
    let times = match f.cost {
        Cost { target_seconds: Some(target), draft_seconds: Some(draft), ratio: Some(ratio), .. } => {
            format!("{:.2} ms a token against {:.2} ms, a share of {ratio:.3}", 1e3 * draft, 1e3 * target)
        }
        _ => "the texts are too short to time a token".into(),
    };
    printer.text(format!("cost            {:.1} times fewer weights; {times}", f.cost.size_ratio))?;
    if !f.has_rate() {
        return Ok(());
    }
    printer.text("ahead  acceptance  length  expected  replayed  measured")?;
    for (replay, speed) in f.replays.iter().zip(&f.speeds) {
        let times = |speedup: Option<f64>| speedup.map_or("-".into(), |times| format!("{times:.2} x"));
        printer.text(format!(
            "{:>5}  {:>8.2} %  {:>6.3}  {:>8}  {:>8}  {:>8}",
            replay.ahead,
            100.0 * replay.acceptance_rate,
            replay.mean_length,
            times(speed.expected_speedup),
            times(speed.replayed_speedup),
            times(speed.measured.as_ref().and_then(|measured| measured.speedup))
        ))?;
    }
    let best = f.speeds.iter().filter_map(|s| Some((s.ahead, s.measured.as_ref()?.speedup?)));
    let best = best.max_by(|a, b| a.1.total_cmp(&b.1));
    if let Some(((ahead, speedup), plain)) = best.zip(f.plain_tokens_per_second) {
        printer.text(if speedup > 1.0 {
            format!("fastest with {ahead} ahead: {speedup:.2} times the {plain:.1} tokens/s of the target by itself")
        } else {
            format!(
                "slower than the target by itself ({plain:.1} tokens/s) with any number ahead: the draft costs too much"
            )
        })?;
    }
    Ok(())
}

/// A mean and its error where there is one, `times` as large.
fn with_error(of: Mean, times: f64, digits: usize) -> String {
    let error = of.stderr.map_or(String::new(), |error| format!(" ± {:.digits$}", times * error));
    format!("{:.digits$}{error}", times * of.mean)
}

fn shares(of: &[f64]) -> String {
    of.iter().map(|share| format!("{:.1} %", 100.0 * share)).collect::<Vec<_>>().join(", ")
}

fn gates(args: &SpecArgs, figures: &AcceptanceFigures) -> Result<()> {
    let mut failed = Vec::new();
    let text = figures.text.as_ref().map(|text| text.alpha.mean);
    let broken = [Some(figures.acceptance_rate), figures.overlap.map(|overlap| overlap.mean), text];
    if let Some(value) = broken.into_iter().flatten().find(|value| !value.is_finite()) {
        failed.push(format!("a share of accepted tokens is {value}: the target or the draft is damaged"));
    }
    if figures.is_near_zero() {
        let rate = figures.replays.first().map_or(0.0, |replay| replay.acceptance_rate);
        let alpha =
            figures.text.as_ref().map_or(String::new(), |t| format!(", alpha on the text is {:.4}", t.alpha.mean));
        failed.push(format!(
            "next to none of the proposed tokens are accepted ({:.2} %{alpha}; {:.0} % is the least): the draft is \
             broken, or not of this target",
            100.0 * rate,
            100.0 * NEAR_ZERO
        ));
    }
    if let Some(least) = args.min_acceptance.filter(|_| !figures.has_rate()) {
        failed.push(format!("no acceptance rate was measured, and {least} is the least"));
    } else if let Some(least) = args.min_acceptance.filter(|least| figures.acceptance_rate < *least) {
        let rate = figures.acceptance_rate;
        failed.push(format!("the acceptance rate is {rate:.4} with {} ahead, less than {least}", figures.ahead));
    }
    let other = figures.speeds.iter().find(|s| s.measured.as_ref().is_some_and(|m| m.identical == Some(false)));
    if let Some(speed) = other {
        failed.push(format!("with {} ahead the text is not the target's own", speed.ahead));
    }
    if !failed.is_empty() {
        bail!(CheckFailed(failed.join("; ")));
    }
    Ok(())
}
