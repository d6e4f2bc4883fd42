//! `quantkit gptq` and `quantkit rtn`: settle, check everything, quantize block by block, write, re-open,
//! measure.

mod artifact;
mod job;
mod memory;
mod modules;
mod summary;
mod work;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use serde_json::json;

use super::device::backend;
use super::open::{Located, Measurement, Runnable, check_measurement, corpus, locate, open, perplexity};
use crate::backend::Backend;
use crate::backend::cuda::CudaOptions;
use crate::calibrate::corpus::{Corpus, CorpusError, Sampling, windows};
use crate::calibrate::driver;
use crate::cli::args::{CalibrationArgs, GptqArgs, ModelArgs, OutputArgs, RtnArgs, SamplingArg, SchemeArgs};
use crate::cli::exit::{self, CheckFailed};
use crate::cli::interrupt;
use crate::cli::print::{Printer, bytes};
use crate::evaluate::perplexity::{Perplexity, peak_rss_bytes};
use crate::evaluate::windows::Convention;
use crate::format::atomic::{OutputFolder, recover, require_space};
use crate::format::consumers::{check, largest_tp, parse, refusals_everywhere};
use crate::format::gptq::{GptqConfig, Rule};
use crate::format::manifest::hash_files;
use crate::format::safetensors::{plan_shards, planned_bytes};
use crate::format::verify_manifest;
use crate::model::Model;
use crate::model::block::Stage;
use crate::model::tokenizer::{BosHabit, ids_sha256};
use crate::pack::gptq::Version;
use crate::quantize::gptq::GptqOptions;
use crate::quantize::order::Order;
use crate::recipe::{CalibrationRecord, Method, Recipe};
use crate::scheme::{GroupSize, Scheme};
use job::Job;
use modules::Modules;
use summary::Summary;
use work::{Found, ModuleReport, Work, blocks};

pub fn gptq(args: &GptqArgs, printer: Printer) -> Result<()> {
    let order = if args.desc_act { Order::Activation } else { args.order.into() };
    let options = GptqOptions {
        scheme: scheme(&args.scheme)?,
        order,
        static_groups: args.static_groups,
        damp_percent: args.damp_percent,
        damp_auto_increment: args.damp_auto_increment,
        grid: args.grid.into(),
        sweeps: args.sweeps,
        least_zero: 0,
    };
    let method =
        Method::Gptq { options, true_sequential: !args.no_true_sequential, drift_correction: args.drift_correction };
    Run {
        method,
        model: &args.model,
        scheme: &args.scheme,
        calibration: &args.calibration,
        output: &args.output,
        printer,
    }
    .go()
}

pub fn rtn(args: &RtnArgs, printer: Printer) -> Result<()> {
    let method = Method::Rtn { scheme: scheme(&args.scheme)?, grid: args.grid.into() };
    if let (false, Some(option)) = (method.calibrates(), args.calibration.given()) {
        bail!("{option} is for calibration, and rtn calibrates only with `--grid hessian`");
    }
    Run {
        method,
        model: &args.model,
        scheme: &args.scheme,
        calibration: &args.calibration,
        output: &args.output,
        printer,
    }
    .go()
}

fn scheme(args: &SchemeArgs) -> Result<Scheme> {
    let group_size = GroupSize::new(args.group_size).context("a group size is -1 or positive")?;
    Ok(Scheme { bits: args.bits, group_size, sym: !args.asym })
}

struct Run<'a> {
    method: Method,
    model: &'a ModelArgs,
    scheme: &'a SchemeArgs,
    calibration: &'a CalibrationArgs,
    output: &'a OutputArgs,
    printer: Printer,
}

/// Calibration windows and their record.
type Calibrated = (Vec<Vec<u32>>, CalibrationRecord);

impl Run<'_> {
    fn go(self) -> Result<()> {
        let began = Instant::now();
        let printer = self.printer;
        let base = self.method.scheme();
        if self.calibration.seed.is_some() && self.calibration.sampling != Some(SamplingArg::Random) {
            bail!("--seed is for `--sampling random`");
        }
        let located = locate(self.model, printer)?;
        let target = self.target(&located)?;
        let backend = backend(&self.model.device, CudaOptions::default(), printer)?;
        let original = open(&located.dir, backend.clone(), printer)?;
        if let Some(method) = original.method {
            bail!(
                "`{}` is quantized already (by {method}); give the floating-point checkpoint it was made from",
                located.dir.display()
            );
        }
        let model = &original.model;
        let modules = modules::settle(model, base, self.scheme)?;
        modules.notes.iter().for_each(|note| printer.warn(note));
        let version = match &self.output.checkpoint_format {
            Some(name) => Version::parse(name).context("--checkpoint-format is gptq or gptq_v2")?,
            None => modules.safest_version(base),
        };
        let scattered = matches!(&self.method, Method::Gptq { options, .. } if options.order == Order::Activation && !options.static_groups);
        self.check_consumers(&modules, version, scattered)?;
        let config = self.gptq_config(&modules, version, scattered);
        let quantization = config.quantization_config();
        // Masks among the buffers of other parts may well hold infinities.
        let (bad, elsewhere): (Vec<_>, Vec<_>) =
            model.checkpoint().non_finite().into_iter().partition(|found| model.reads(&found.tensor));
        for found in elsewhere {
            self.printer.warn(format!(
                "tensor `{}`, which is only copied, holds {} values that are not finite",
                found.tensor, found.count
            ));
        }
        if let Some(first) = bad.first() {
            bail!(
                "tensor `{}` holds {} values that are not finite (first at element {}){}: the checkpoint is damaged",
                first.tensor,
                first.count,
                first.first,
                others(bad.len())
            );
        }
        let calibrated = if self.method.calibrates() { Some(self.calibrated(&original)?) } else { None };

        let measurement = if self.output.no_eval { None } else { Some(self.eval_text(&original)?) };

        interrupt::listen();
        let folder =
            if self.output.overwrite { OutputFolder::replace(&target)? } else { OutputFolder::create(&target)? };
        let shards = plan_shards(artifact::specs(model.checkpoint(), &modules), self.max_shard_bytes());
        // The blocks stand in the work folder until the artifact is whole.
        let needed = planned_bytes(&shards)? * 2 + (16 << 20);
        require_space(folder.path(), needed.saturating_sub(Work::held_bytes(&target)?))?;

        let config = (!model.checkpoint().is_assembled()).then(|| "config.json".to_string());
        let sources: Vec<String> = model.checkpoint().files().iter().map(|f| f.to_string()).chain(config).collect();
        let mut source_files = Vec::new();
        for file in &sources {
            interrupt::check()?;
            source_files.extend(hash_files(model.checkpoint().dir(), std::slice::from_ref(file))?);
        }
        let recipe = Recipe {
            method: self.method.clone(),
            rules: self.scheme.rules.clone(),
            skips: self.scheme.skips.clone(),
            on_misfit: spelling(self.scheme.on_misfit),
            checkpoint_format: version.name().into(),
            max_shard_bytes: self.max_shard_bytes(),
            device: calibrated.as_ref().map(|_| backend.kind()),
            calibration: calibrated.as_ref().map(|(_, record)| record.clone()),
        };
        let record = json!({"tool": env!("CARGO_PKG_VERSION"), "recipe": recipe, "source": source_files});
        let Found { work, resumed, removed } = Work::open(&target, &record, quantization.clone(), self.output.resume)?;
        if self.output.resume && !resumed {
            printer.note("--resume: no earlier run is there; starting from the first block");
        }

        if removed > 0 {
            printer.note(format!("removed {} of an earlier run with other options", blocks(removed)));
        }

        let prepared = began.elapsed().as_secs_f64();
        let phase = Instant::now();
        // A model that cannot be measured is found before the long part of the work.
        let before = measurement.as_ref().map(|text| self.measure(&original, text, "before")).transpose()?;
        let measuring = phase.elapsed().as_secs_f64();
        self.announce(model, &modules, calibrated.as_ref());
        let steps = printer.steps(self.method.name(), model.blocks.len() as u64);
        let mut job = Job::new(&self.method, &modules, version, backend.clone(), &work, steps);
        let phase = Instant::now();
        let done = match &calibrated {
            Some((windows, _)) => driver::run(model, windows, self.method.course(), &mut job),
            None => model.blocks.iter().try_for_each(|block| job.without_data(block)),
        };
        if let Err(error) = done {
            drop(job);
            return Err(self.stopped(error, work));
        }
        let quantizing = phase.elapsed().as_secs_f64();
        let reports = std::mem::take(&mut job.reports);
        let solving = job.seconds_quantizing;
        drop(job);

        let phase = Instant::now();
        let contents = artifact::Contents {
            source: model.checkpoint(),
            source_files,
            modules: &modules,
            recipe: &recipe,
            quantization: &quantization,
            reports: serde_json::to_value(&reports)?,
            work: &work,
            blocks: model.blocks.len(),
        };
        let finished = artifact::fill(&folder, &contents).and_then(|size| {
            let writing = phase.elapsed().as_secs_f64();
            let artifact = read_back(folder.path(), backend.clone(), printer)?;
            let phase = Instant::now();
            let after = measurement.as_ref().map(|text| self.measure(&artifact, text, "after")).transpose()?;
            if let Some(after) = after.as_ref().filter(|after| !after.perplexity.is_finite()) {
                bail!(CheckFailed(format!("the perplexity of the artifact is {}", after.perplexity)));
            }
            interrupt::check()?;
            Ok((size, after, writing, measuring + phase.elapsed().as_secs_f64()))
        });
        let (size, after, writing, measuring) = match finished {
            Ok(finished) => finished,
            Err(error) => return Err(self.stopped(error, work)),
        };
        // Only what has passed gets the name, and takes the place of an older artifact.
        let phase = Instant::now();
        folder.commit()?;
        work.remove()?;
        let writing = writing + phase.elapsed().as_secs_f64();

        let summary = Summary {
            target,
            source: source_size(&original),
            size,
            modules,
            dead_channels: dead_channels(model, &reports),
            reports,
            seconds: json!({"preparing": prepared, "quantizing": quantizing, "of_which_solving": solving, "writing": writing, "measuring": measuring}),
        };
        self.conclude(&summary, before.zip(after))
    }

    /// What happens to finished blocks when the run ends early.
    fn stopped(&self, error: anyhow::Error, work: Work) -> anyhow::Error {
        if exit::code(&error) == exit::CHECK_FAILED {
            // The same options would come to the same end.
            return work.remove().err().unwrap_or(error);
        }
        if work.finished() > 0 {
            self.printer.note(format!(
                "{} finished, kept in `{}`; the same command with --resume goes on from there",
                blocks(work.finished()),
                work.dir().display()
            ));
        }
        error
    }

    fn max_shard_bytes(&self) -> u64 {
        self.output.max_shard_size * 1_000_000
    }

    /// The output folder: given, or named after the model; checked before any work.
    fn target(&self, located: &Located) -> Result<PathBuf> {
        let base = self.method.scheme();
        let group =
            if base.group_size == GroupSize::CHANNEL { "channel".into() } else { format!("g{}", base.group_size) };
        let target = self.output.out.clone().unwrap_or_else(|| {
            format!(
                "{}-{}-w{}{group}{}",
                located.name,
                self.method.name(),
                base.bits,
                if base.sym { "" } else { "-asym" }
            )
            .into()
        });
        recover(&target);
        if !target.exists() || fs::read_dir(&target).is_ok_and(|mut entries| entries.next().is_none()) {
            return Ok(target);
        }
        match (self.output.overwrite, artifact::is_ours(&target)) {
            (true, true) => Ok(target),
            (true, false) => {
                bail!("`{}` exists and holds no artifact of quantkit; it will not be replaced", target.display())
            }
            (false, true) => {
                bail!("`{}` exists already; name another folder with --out, or --overwrite it", target.display())
            }
            (false, false) => bail!("`{}` exists already; name another folder with --out", target.display()),
        }
    }

    /// `--for` refuses; without it, consumers that would not load the artifact are named.
    fn check_consumers(&self, modules: &Modules, version: Version, scattered: bool) -> Result<()> {
        let plan = modules.plan(self.method.scheme(), version, scattered);
        for name in &self.output.consumers {
            if let Some(refusal) = check(parse(name)?, &plan).first() {
                bail!("--for {name}: {refusal}");
            }
        }
        if self.output.consumers.is_empty() {
            refusals_everywhere(&plan)
                .iter()
                .for_each(|refusal| self.printer.warn(format!("would not be loaded by {refusal}")));
        }
        let split = largest_tp(&plan);
        if let Some(limit) = &split.limit {
            self.printer.note(format!("tensor parallel up to {}: {limit}", split.degree));
        }
        Ok(())
    }

    fn gptq_config(&self, modules: &Modules, version: Version, scattered: bool) -> GptqConfig {
        let base = self.method.scheme();
        let mut schemes: Vec<Option<Scheme>> = Vec::new();
        for module in modules.modules.iter().filter(|m| m.scheme != Some(base)) {
            if !schemes.contains(&module.scheme) {
                schemes.push(module.scheme);
            }
        }
        let paths = |scheme: &Option<Scheme>| -> Vec<&String> {
            modules.modules.iter().filter(|m| m.scheme == *scheme).map(|m| &m.name).collect()
        };
        let (options, true_sequential) = match &self.method {
            Method::Gptq { options, true_sequential, .. } => (Some(options), *true_sequential),
            Method::Rtn { .. } => (None, false),
        };
        GptqConfig {
            scheme: base,
            version,
            desc_act: scattered,
            static_groups: options.is_some_and(|o| o.static_groups),
            group_aware: options.is_some_and(|o| o.order == Order::GroupAware),
            damp_percent: options.map(|o| o.damp_percent),
            true_sequential,
            grid: serde_json::to_value(self.method.grid())
                .ok()
                .and_then(|v| v.as_str().map(str::to_string))
                .unwrap_or_default(),
            rules: schemes.iter().flat_map(|scheme| Rule::for_modules(&paths(scheme), *scheme)).collect(),
        }
    }

    fn calibrated(&self, original: &Runnable) -> Result<Calibrated> {
        let args = self.calibration;
        let (model, tokenizer) = (&original.model, original.tokenizer()?);
        let corpus = corpus(args.calib.as_deref(), Corpus::builtin, model.checkpoint())?;
        let context = model.config.max_positions;
        let seqlen = args.seqlen.unwrap_or(512.min(context));
        if seqlen > context {
            bail!("--seqlen {seqlen} is longer than the {context} positions the model was made for");
        }
        let bos = self.output.bos.settle(tokenizer, model.config.family.needs_bos, BosHabit::Once)?;
        let (sampling, described) = match args.sampling {
            None | Some(SamplingArg::InOrder) => (Sampling::InOrder, "in-order".to_string()),
            Some(SamplingArg::Random) => {
                let seed = args.seed.unwrap_or(0);
                (Sampling::Random { seed }, format!("random, seed {seed}"))
            }
        };
        let tokens = match sampling {
            Sampling::InOrder => {
                corpus.first_tokens(tokenizer, args.nsamples.unwrap_or(128).saturating_mul(seqlen).saturating_add(1))?
            }
            Sampling::Random { .. } => corpus.tokens(tokenizer)?,
        };
        let windows = match (windows(&tokens, args.nsamples.unwrap_or(128), seqlen, sampling, bos), args.nsamples) {
            // Nobody asked for 128: take what there is.
            (Err(CorpusError::TooShort { fits, .. }), None) if fits > 0 => {
                windows(&tokens, fits, seqlen, sampling, bos)?
            }
            (windows, _) => windows?,
        };
        let record = CalibrationRecord {
            text: args.calib.as_deref().map_or(corpus.name.clone(), file_name),
            text_sha256: corpus.sha256,
            nsamples: windows.len(),
            seqlen,
            sampling: described,
            bos: bos.name().into(),
            tokens_sha256: ids_sha256(&windows.concat()),
        };
        Ok((windows, record))
    }

    fn announce(&self, model: &Model, modules: &Modules, calibrated: Option<&Calibrated>) {
        let base = self.method.scheme();
        let count = modules.modules.iter().filter(|m| m.scheme.is_some()).count();
        let data = calibrated.map_or("no calibration data".into(), |(_, c)| {
            format!("{} calibration windows of {} tokens from {} (BOS {})", c.nsamples, c.seqlen, c.text, c.bos)
        });
        let kind = if base.sym { "symmetric" } else { "asymmetric" };
        self.printer.note(format!(
            "{}: {} linears to {} bits, group size {}, {kind}; {data}",
            self.method.name(),
            count,
            base.bits,
            base.group_size
        ));
        if base.bits < 4 && matches!(self.method, Method::Gptq { drift_correction: false, .. }) {
            self.printer.note(format!("{} bits: --drift-correction may gain much", base.bits));
        }
        if let Some((windows, record)) = calibrated {
            let needed = memory::estimate(model, &self.method, windows.len() * record.seqlen);
            self.printer.note(format!("memory: about {}", bytes(needed)));
            let backend = model.backend();
            if let Some(free) = backend.free_memory().filter(|free| *free < needed) {
                let what = match memory::fitting(model, &self.method, windows.len(), record.seqlen, free) {
                    Some(count) => format!("--nsamples {count} would fit"),
                    None => "a shorter --seqlen needs less".into(),
                };
                self.printer.warn(format!("only {} are free on {}; {what}", bytes(free), backend.device()));
            }
        }
    }

    /// Says what came of it all, and holds it against the limit the user set.
    fn conclude(&self, summary: &Summary, measured: Option<(Perplexity, Perplexity)>) -> Result<()> {
        let printer = self.printer;
        let mut object = summary.json();
        object["peak_rss_bytes"] = peak_rss_bytes().into();
        for line in summary.lines() {
            printer.text(line)?;
        }
        let mut too_much = None;
        if let Some((before, after)) = measured {
            object["perplexity_before"] = serde_json::to_value(&before)?;
            object["perplexity_after"] = serde_json::to_value(&after)?;
            let change = (after.perplexity / before.perplexity - 1.0) * 100.0;
            printer.text(format!(
                "perplexity {:.4} before, {:.4} after ({change:+.2} %), {} tokens of {}, convention {convention}, BOS {}",
                before.perplexity, after.perplexity, before.tokens, self.eval_text_name(), before.bos,
                convention = before.convention
            ))?;
            too_much = self.output.max_increase.filter(|limit| change > *limit).map(|limit| (change, limit));
        }
        printer.object(&object)?;
        match too_much {
            Some((change, limit)) => Err(CheckFailed(format!(
                "the perplexity rose by {change:.2} %, more than the {limit} % of --max-increase; the artifact is in `{}` all the same",
                summary.target.display()
            ))
            .into()),
            None => Ok(()),
        }
    }

    fn eval_text_name(&self) -> String {
        self.output.eval_text.as_deref().map_or("the built-in held-out text".into(), file_name)
    }

    /// The text for the perplexities, long enough for at least one window.
    fn eval_text(&self, original: &Runnable) -> Result<Corpus> {
        let text = corpus(self.output.eval_text.as_deref(), Corpus::heldout, original.model.checkpoint())?;
        check_measurement(original, &self.measurement(original, &text))?;
        Ok(text)
    }

    fn measurement<'a>(&self, runnable: &Runnable, text: &'a Corpus) -> Measurement<'a> {
        Measurement {
            corpus: text,
            convention: Convention::Gptq,
            window: Some(512.min(runnable.model.config.max_positions)),
            max_windows: Some(self.output.eval_windows.unwrap_or(16) as usize),
            bos: self.output.bos,
        }
    }

    fn measure(&self, runnable: &Runnable, text: &Corpus, what: &str) -> Result<Perplexity> {
        Ok(perplexity(runnable, &self.measurement(runnable, text), what, self.printer)?.result)
    }
}

/// Opens what was written, and holds it against its manifest. Failing here is no fault of the input.
fn read_back(dir: &Path, backend: Arc<dyn Backend>, printer: Printer) -> Result<Runnable> {
    let failed = |why: String| anyhow::Error::from(CheckFailed(why));
    let artifact =
        open(dir, backend, printer).map_err(|e| failed(format!("the artifact cannot be read back: {e:#}")))?;
    let wrong = verify_manifest(dir).map_err(|e| failed(format!("the artifact cannot be read back: {e:#}")))?;
    match wrong.first() {
        Some(wrong) => Err(failed(format!("the artifact on disk is not what was written: {wrong}"))),
        None => Ok(artifact),
    }
}

/// Linears of a stage share their inputs, so that each stage counts once.
fn dead_channels(model: &Model, reports: &[ModuleReport]) -> usize {
    let of = |path: &str| reports.iter().find(|r| r.module == path).map_or(0, |r| r.dead_channels);
    let stages = model.blocks.iter().flat_map(|block| Stage::ALL.map(|stage| block.linears(stage)));
    stages.map(|linears| linears.iter().map(|linear| of(&linear.path)).max().unwrap_or(0)).sum()
}

/// How the command line spells a choice.
fn spelling(choice: impl ValueEnum) -> String {
    choice.to_possible_value().map(|value| value.get_name().to_string()).unwrap_or_default()
}

fn source_size(original: &Runnable) -> u64 {
    original.model.checkpoint().tensors().values().map(|e| e.bytes.len() as u64).sum()
}

fn file_name(path: &Path) -> String {
    path.file_name().map_or_else(|| path.display().to_string(), |n| n.to_string_lossy().into_owned())
}

fn others(count: usize) -> String {
    if count > 1 { format!(", and {} more tensors do", count - 1) } else { String::new() }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::backend::cpu::Cpu;

    /// The input was fine; what was made of it is not.
    #[test]
    fn damaged_output_is_a_failed_check() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), "{").unwrap();
        let error = read_back(dir.path(), Arc::new(Cpu), Printer::new(true, false)).err().unwrap();
        assert_eq!(exit::code(&error), exit::CHECK_FAILED);
        assert!(error.to_string().starts_with("the artifact cannot be read back: "), "{error}");
    }
}
