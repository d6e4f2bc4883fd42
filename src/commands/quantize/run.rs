//! A run: settle, check everything, quantize block by block, write, re-open, measure.

use std::borrow::Cow;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use serde_json::json;

use super::super::device::backend;
use super::super::few_tokens::{self, Found};
use super::super::open::{
    Located, Measurement, Runnable, check_measurement, corpus, locate, open, open_made, perplexity,
};
use super::artifact;
use super::calibration::{Calibrated, calibrated};
use super::control::{control, plain};
use super::form::Form;
use super::job::Job;
use super::loadable::LeftOut;
use super::memory;
use super::modules::{self, Modules};
use super::summary::{BlockScaling, Summary};
use super::work::{self, ModuleReport, Resume, Work, blocks};
use crate::backend::Backend;
use crate::backend::cuda::CudaOptions;
use crate::calibrate::corpus::Corpus;
use crate::calibrate::driver;
use crate::checkpoint::Entry;
use crate::cli::args::{CalibrationArgs, ModelArgs, OutputArgs, SamplingArg, SchemeArgs};
use crate::cli::exit::{self, CheckFailed};
use crate::cli::interrupt;
use crate::cli::print::{Printer, report_as};
use crate::evaluate::finite::DAMAGED;
use crate::evaluate::perplexity::{Measured, Perplexity, peak_rss_bytes};
use crate::evaluate::windows::Convention;
use crate::format::atomic::{OutputFolder, recover, require_space};
use crate::format::consumers::Module;
use crate::format::layout::{Description, GptqFacts, Layout};
use crate::format::manifest::hash_files;
use crate::format::safetensors::{plan_shards, planned_bytes};
use crate::format::verify_manifest;
use crate::model::Model;
use crate::model::block::Stage;
use crate::num::size::bytes;
use crate::pack::gptq::Version;
use crate::quantize::order::Order;
use crate::recipe::{Method, Recipe, Rounding};
use crate::scheme::GroupSize;

/// What was asked for.
pub struct Run<'a> {
    pub method: Method,
    pub form: Form,
    pub model: &'a ModelArgs,
    pub scheme: Cow<'a, SchemeArgs>,
    pub calibration: &'a CalibrationArgs,
    pub output: &'a OutputArgs,
    pub printer: Printer,
}

/// What is settled before any work.
pub struct Settled {
    pub modules: Modules,
    pub left_out: LeftOut,
    pub version: Version,
    pub layout: Box<dyn Layout>,
}

impl Run<'_> {
    pub fn go(self) -> Result<()> {
        let began = Instant::now();
        let printer = self.printer;
        let base = self.method.scheme();
        if self.calibration.seed.is_some() && self.calibration.sampling != Some(SamplingArg::Random) {
            bail!("--seed is for `--sampling random`");
        }
        self.form.supports(&self.method, self.output)?;
        let located = locate(self.model, printer)?;
        let target = self.target(&located)?;
        let backend = backend(&self.model.device, CudaOptions::default(), printer)?;
        if backend.solver().is_some() && matches!(self.method.rounding, Rounding::Float8 { feedback: true, .. }) {
            bail!("fp8 with `--rounding gptq` computes on the CPU; add `--device cpu`");
        }
        let original = open(&located.dir, backend.clone(), printer)?;
        self.refuse_quantized(&original, &located)?;
        let model = &original.model;
        let Settled { modules, left_out, version, layout } = self.settle(model)?;
        modules.notes.iter().for_each(|note| printer.warn(note));
        self.check_consumers(&modules, &*layout)?;
        if let Rounding::Float8 { tile, feedback: true } = self.method.rounding {
            let ragged = |m: &&Module| m.scheme.is_some() && !m.cols.is_multiple_of(tile.size(m.rows, m.cols).1);
            if let Some(module) = modules.modules.iter().find(ragged) {
                bail!(
                    "{}: blocks of 128 do not fill its {} input channels, which `--rounding gptq` needs; use `--weights channel`, or leave it out with --skip",
                    module.name,
                    module.cols
                );
            }
        }
        let quantization = layout.config(&Description {
            method: &self.method.name,
            base,
            modules: &modules.modules,
            outside: &outside(model),
            gptq: self.gptq_facts(),
            grid: self.method.grid().name(),
            kv_cache: self.method.kv_cache,
        });
        // Masks among the buffers of other parts may well hold infinities.
        let (bad, elsewhere): (Vec<_>, Vec<_>) =
            model.checkpoint().non_finite().into_iter().partition(|found| model.config.reads(&found.tensor));
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
        let calibrated = if self.method.calibrates() {
            let (windows, record) = calibrated(self.calibration, self.output.bos, &original)?;
            let found = if self.method.needs().gram { Found::Hessians } else { Found::Statistics };
            let remedy = "give a longer text (--calib), or a larger --nsamples or --seqlen";
            few_tokens::warn(model, windows.len() * record.seqlen, found, remedy, printer);
            Some((windows, record))
        } else {
            None
        };
        let measurement = if self.output.no_eval { None } else { Some(self.eval_text(&original)?) };

        interrupt::listen();
        let folder =
            if self.output.overwrite { OutputFolder::replace(&target)? } else { OutputFolder::create(&target)? };
        report_as(folder.path(), &target);
        report_as(folder.target(), &target);
        let shards =
            plan_shards(artifact::specs(model, &modules, &*layout, self.method.kv_cache), self.max_shard_bytes());
        if self.output.overwrite {
            artifact::refuse_collisions(folder.target(), &shards, model, &*layout)?;
        }
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
            left_out,
            format: self.form.name(version).into(),
            max_shard_bytes: self.max_shard_bytes(),
            device: calibrated.as_ref().map(|_| backend.kind()),
            calibration: calibrated.as_ref().map(|(_, record)| record.clone()),
        };
        let record = json!({"tool": env!("CARGO_PKG_VERSION"), "recipe": recipe, "source": source_files});
        let work::Found { work, resumed, removed } = Work::open(&target, &record, quantization.clone(), self.resume())?;
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
        if let Some(reason) = before.as_ref().and_then(|before| before.result.reason.as_ref()) {
            let source = located.dir.display();
            let failed =
                format!("the source `{source}` itself: {reason}: {DAMAGED}; `--no-eval` quantizes it unmeasured");
            return Err(self.stopped(CheckFailed(failed).into(), work));
        }
        let measuring = phase.elapsed().as_secs_f64();
        self.announce(model, &modules, calibrated.as_ref());
        let steps = printer.steps(&self.method.name, model.blocks.len() as u64);
        let mut job = Job::new(&self.method, &modules, &*layout, backend.clone(), &work, steps);
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
        let (mut reports, mut transforms) = (Vec::new(), Vec::new());
        for report in std::mem::take(&mut job.reports) {
            if self.method.transform.is_some() {
                transforms.push(BlockScaling {
                    block: report.block,
                    error_ratio: report.error_ratio,
                    alpha: report.alpha,
                });
            }
            reports.extend(report.modules);
        }
        let solving = job.seconds_quantizing;
        drop(job);

        let phase = Instant::now();
        let contents = artifact::Contents {
            model,
            layout: &*layout,
            source_files,
            modules: &modules,
            recipe: &recipe,
            quantization: &quantization,
            reports: serde_json::to_value(&reports)?,
            transforms: serde_json::to_value(&transforms)?,
            work: &work,
        };
        let finished = artifact::fill(&folder, &contents).and_then(|size| {
            let writing = phase.elapsed().as_secs_f64();
            let artifact = read_back(folder.path(), backend.clone(), printer)?;
            let phase = Instant::now();
            let after = measurement.as_ref().map(|text| self.measure(&artifact, text, "after")).transpose()?;
            if let Some(reason) = after.as_ref().and_then(|after| after.result.reason.as_ref()) {
                bail!(CheckFailed(format!("the artifact: {reason}; nothing was written")));
            }
            let control = match &measurement {
                Some(text) if !super::is_control(&self.method) => {
                    let how = self.measurement(&original, text);
                    let plain = plain(&self.method);
                    let layout = self.form.layout(&plain, version);
                    match control(&original, &plain, &modules, &*layout, &how, printer) {
                        Err(error) if exit::code(&error) == exit::INTERRUPTED => return Err(error),
                        // The artifact is none the worse for it.
                        Err(error) => {
                            printer.warn(format!("plain rounding could not be measured: {error:#}"));
                            None
                        }
                        measured => measured.ok(),
                    }
                }
                _ => None,
            };
            interrupt::check()?;
            Ok((size, after, control, writing, measuring + phase.elapsed().as_secs_f64()))
        });
        let (size, after, control, writing, measuring) = match finished {
            Ok(finished) => finished,
            Err(error) => return Err(self.stopped(error, work)),
        };
        // Only what has passed gets the name, and takes the place of an older artifact.
        let phase = Instant::now();
        artifact::refuse_changed(self.output, folder.target())?;
        folder.commit()?;
        work.remove()?;
        let writing = writing + phase.elapsed().as_secs_f64();

        let of_module = |module: &Module| module.scheme.map(|scheme| layout.specs(module, scheme));
        let layout_bytes = modules.modules.iter().filter_map(of_module).flatten().map(|spec| spec.bytes()).sum();
        let summary = Summary {
            target,
            source: source_size(&original),
            size,
            modules,
            dead_channels: dead_channels(model, &reports),
            reports,
            transforms,
            tensors: layout_bytes,
            unread: original.unread.clone(),
            seconds: json!({"preparing": prepared, "quantizing": quantizing, "of_which_solving": solving, "writing": writing, "measuring": measuring}),
        };
        self.conclude(&summary, before.zip(after), control)
    }

    /// What is quantized already cannot be a source.
    pub fn refuse_quantized(&self, original: &Runnable, located: &Located) -> Result<()> {
        if let Some(how) = original.quantized() {
            bail!(
                "`{}` is quantized already ({how}); give the floating-point checkpoint it was made from",
                located.dir.display()
            );
        }
        Ok(())
    }

    /// Which linears are quantized, and how they are stored; refused here if that cannot be.
    pub fn settle(&self, model: &Model) -> Result<Settled> {
        let base = self.method.scheme();
        let mut modules = modules::settle(model, base, &self.scheme, &*self.form.layout(&self.method, Version::V1))?;
        let left_out = self.leave_out(&mut modules)?;
        let version = match &self.output.checkpoint_format {
            Some(name) => Version::parse(name).context("--checkpoint-format is gptq or gptq_v2")?,
            None => modules.safest_version(base),
        };
        let layout = self.form.layout(&self.method, version);
        layout.accepts(&modules.modules).map_err(anyhow::Error::msg)?;
        Ok(Settled { modules, left_out, version, layout })
    }

    /// What happens to finished blocks when the run ends early.
    fn stopped(&self, error: anyhow::Error, work: Work) -> anyhow::Error {
        if exit::code(&error) == exit::CHECK_FAILED {
            // The same options would come to the same end.
            return work.remove().err().unwrap_or(error);
        }
        if work.finished() > 0 {
            let how = if self.output.resume_same { "the same recipe" } else { "the same command with --resume" };
            self.printer.note(format!(
                "{} finished, kept in `{}`; {how} goes on from there",
                blocks(work.finished()),
                work.dir().display()
            ));
        }
        error
    }

    fn resume(&self) -> Resume {
        match (self.output.resume_same, self.output.resume) {
            (true, _) => Resume::IfSame,
            (false, true) => Resume::Yes,
            (false, false) => Resume::No,
        }
    }

    pub fn max_shard_bytes(&self) -> u64 {
        self.output.max_shard_size * 1_000_000
    }

    /// The output folder: given, or named after the model; checked before any work.
    fn target(&self, located: &Located) -> Result<PathBuf> {
        let base = self.method.scheme();
        let target = self.output.out.clone().unwrap_or_else(|| {
            let bits = match self.method.rounding {
                Rounding::Float8 { tile, .. } => tile.name().into(),
                _ => format!("w{}{}", base.bits, group_name(base.group_size)),
            };
            let sym = if base.sym { "" } else { "-asym" };
            let form = if self.form == Form::usual(&self.method.name) { "" } else { self.form.suffix() };
            format!("{}-{}-{bits}{sym}{form}", located.name, self.method.name).into()
        });
        recover(&target);
        if !target.exists() || fs::read_dir(&target).is_ok_and(|mut entries| entries.next().is_none()) {
            return Ok(target);
        }
        match (self.output.overwrite, artifact::is_ours(&target)) {
            (true, true) => {
                artifact::refuse_changed(self.output, &target)?;
                Ok(target)
            }
            // What a recipe's damaged artifact left; the rest of the folder stays.
            (true, false) if self.output.resume_same && target.is_dir() => Ok(target),
            (true, false) => {
                bail!("`{}` exists and holds no artifact of quantkit; it will not be replaced", target.display())
            }
            (false, true) => {
                bail!("`{}` exists already; name another folder with --out, or --overwrite it", target.display())
            }
            (false, false) => bail!("`{}` exists already; name another folder with --out", target.display()),
        }
    }

    fn gptq_facts(&self) -> Option<GptqFacts> {
        match &self.method.rounding {
            Rounding::Gptq { options, true_sequential, .. } => Some(GptqFacts {
                desc_act: self.scattered(),
                static_groups: options.static_groups,
                group_aware: options.order == Order::GroupAware,
                damp_percent: options.damp_percent,
                true_sequential: *true_sequential,
            }),
            _ => None,
        }
    }

    /// Whether groups follow activation order.
    pub fn scattered(&self) -> bool {
        matches!(&self.method.rounding, Rounding::Gptq { options, .. } if options.order == Order::Activation && !options.static_groups)
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
            self.method.name, count, base.bits, base.group_size
        ));
        if base.bits < 4 && matches!(self.method.rounding, Rounding::Gptq { drift_correction: false, .. }) {
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
    fn conclude(
        &self,
        summary: &Summary,
        measured: Option<(Measured, Measured)>,
        control: Option<Measured>,
    ) -> Result<()> {
        let printer = self.printer;
        let mut object = summary.json();
        object["peak_rss_bytes"] = peak_rss_bytes().into();
        for line in summary.lines() {
            printer.text(line)?;
        }
        let mut too_much = None;
        if let Some((before, after)) = measured {
            let loses = control.as_ref().is_some_and(|control| after.exceeds(control));
            let (before, after, control) = (before.result, after.result, control.map(|control| control.result));
            object["perplexity_before"] = serde_json::to_value(&before)?;
            object["perplexity_after"] = serde_json::to_value(&after)?;
            let change = |of: &Perplexity| (of.perplexity / before.perplexity - 1.0) * 100.0;
            let rose = change(&after);
            let beside = control.as_ref().map_or(String::new(), |control| {
                format!("; plain rounding {:.4} ({:+.2} %)", control.perplexity, change(control))
            });
            printer.text(format!(
                "perplexity {:.4} before, {:.4} after ({rose:+.2} %){beside}, {} tokens of {}, convention {convention}, BOS {}",
                before.perplexity, after.perplexity, before.tokens, self.eval_text_name(), before.bos,
                convention = before.convention
            ))?;
            if let Some(control) = &control {
                object["perplexity_rtn"] = serde_json::to_value(control)?;
                object["loses_to_rtn"] = loses.into();
                if loses {
                    printer.warn(format!(
                        "on this model {} does worse than plain rounding at the same bits: look at the calibration text, or take `quantkit rtn`",
                        self.method.name
                    ));
                }
            }
            too_much = self.output.max_increase.filter(|limit| rose > *limit).map(|limit| (rose, limit));
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

    fn measure(&self, runnable: &Runnable, text: &Corpus, what: &str) -> Result<Measured> {
        perplexity(runnable, &self.measurement(runnable, text), what, self.printer)
    }
}

/// Opens what was written, and holds it against its manifest. Failing here is no fault of the input.
fn read_back(dir: &Path, backend: Arc<dyn Backend>, printer: Printer) -> Result<Runnable> {
    let failed = |why: String| anyhow::Error::from(CheckFailed(why));
    let artifact =
        open_made(dir, backend, printer).map_err(|e| failed(format!("the artifact cannot be read back: {e:#}")))?;
    let wrong = verify_manifest(dir).map_err(|e| failed(format!("the artifact cannot be read back: {e:#}")))?;
    match wrong.first() {
        Some(wrong) => Err(failed(format!("the artifact on disk is not what was written: {wrong}"))),
        None => Ok(artifact),
    }
}

/// Linears beside those of the blocks: the output head, whether or not it has a weight of its own, and those of other
/// parts of the model.
fn outside(model: &Model) -> Vec<String> {
    let inside = |name: &str| model.blocks.iter().any(|block| name.starts_with(&format!("{}.", block.path)));
    let linear = |(name, entry): (&String, &Entry)| {
        let module = name.strip_suffix(".weight")?;
        let table = module.ends_with("embed_tokens") || module.ends_with("embedding");
        (entry.shape.len() == 2 && !table && !inside(module)).then(|| module.to_string())
    };
    let mut names: Vec<String> = model.checkpoint().tensors().iter().filter_map(linear).collect();
    if !names.iter().any(|name| name.ends_with("lm_head")) {
        names.push("lm_head".into());
    }
    names
}

/// Linears of a stage share their inputs, so that each stage counts once.
fn dead_channels(model: &Model, reports: &[ModuleReport]) -> usize {
    let of = |path: &str| reports.iter().find(|r| r.module == path).map_or(0, |r| r.dead_channels);
    let stages = model.blocks.iter().flat_map(|block| Stage::ALL.map(|stage| block.linears(stage)));
    stages.map(|linears| linears.iter().map(|linear| of(&linear.path)).max().unwrap_or(0)).sum()
}

fn group_name(size: GroupSize) -> String {
    if size == GroupSize::CHANNEL { "channel".into() } else { format!("g{size}") }
}

/// How the command line spells a choice.
fn spelling(choice: impl ValueEnum) -> String {
    choice.to_possible_value().map(|value| value.get_name().to_string()).unwrap_or_default()
}

fn source_size(original: &Runnable) -> u64 {
    original.model.checkpoint().tensors().values().map(|e| e.bytes.len() as u64).sum()
}

/// The last part of a path, for reports.
pub fn file_name(path: &Path) -> String {
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
