//! A run: settle, check everything, quantize block by block, write, re-open, measure.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use serde_json::{Value, json};

use super::super::failure::{Category, CheckFailed, category};
use super::super::few_tokens::{self, Found};
use super::super::measure::EvaluationText;
use super::super::observer::Reporter;
use super::super::open::{Runnable, open, open_made};
use super::super::options::Resume;
use super::super::source::Located;
use super::calibration::Calibrated;
use super::control::{control, is_control, plain};
use super::job::Job;
use super::outcome::{BlockScaling, Outcome, Perplexities, PhaseSeconds};
use super::settle::{Settled, outside, refuse_non_finite, refuse_quantized};
use super::work::{self, ModuleReport, Work, blocks};
use super::{Quantization, artifact, memory};
use crate::backend::Backend;
use crate::calibrate::driver;
use crate::evaluate::perplexity::Measured;
use crate::format::atomic::OutputFolder;
use crate::format::kind::Module;
use crate::format::layout::Description;
use crate::format::manifest::{FileRecord, hash_files};
use crate::format::output::require_space;
use crate::format::safetensors::{plan_shards, planned_bytes};
use crate::format::verify_manifest;
use crate::model::Model;
use crate::model::block::Stage;
use crate::num::size::bytes;
use crate::recipe::{Recipe, Rounding};

/// Bytes of an artifact beside its weights, at the most.
const SIDE_FILES: u64 = 16 << 20;

/// A run whose options, model and texts have been checked.
struct Run<'a> {
    how: &'a Quantization,
    reporter: &'a Reporter,
    target: PathBuf,
    original: Runnable,
    settled: Settled,
    /// The quantization config of the artifact.
    config: Value,
    calibrated: Option<Calibrated>,
    /// The text of the perplexities.
    text: Option<EvaluationText<'a>>,
}

/// The places that a run writes to, and the record of it.
struct Begun {
    folder: OutputFolder,
    work: Work,
    recipe: Recipe,
    source_files: Vec<FileRecord>,
}

/// What all blocks gave.
struct Blocks {
    reports: Vec<ModuleReport>,
    transforms: Vec<BlockScaling>,
    seconds_solving: f64,
}

impl Quantization {
    /// Makes the artifact of `source` on `backend`: complete under its name, or not at all. Blocks that were finished when
    /// the run stops early are kept beside it.
    ///
    /// # Errors
    ///
    /// When an option, the model or a text cannot be used, the device fails, the observer stops the run, or the artifact
    /// does not pass a check.
    pub fn run(&self, source: &Located, backend: Arc<dyn Backend>, reporter: impl Into<Reporter>) -> Result<Outcome> {
        let reporter = &reporter.into();
        let clock = Instant::now();
        let run = Run::prepare(self, source, backend, reporter)?;
        let begun = run.begin()?;
        let mut seconds = PhaseSeconds { preparing: clock.elapsed().as_secs_f64(), ..PhaseSeconds::default() };

        let clock = Instant::now();
        // A model that cannot be measured is found before the long part of the work.
        let before = match run.text.as_ref().map(|text| text.before(&run.original, &source.dir, reporter)).transpose() {
            Ok(before) => before,
            Err(error) => return Err(run.stopped(error, begun.work)),
        };
        seconds.measuring = clock.elapsed().as_secs_f64();

        run.announce();
        let clock = Instant::now();
        let made = match run.blocks(&begun.work) {
            Ok(made) => made,
            Err(error) => return Err(run.stopped(error, begun.work)),
        };
        (seconds.quantizing, seconds.of_which_solving) = (clock.elapsed().as_secs_f64(), made.seconds_solving);

        let (size, after, control) = match run.write(&begun, &made, &mut seconds) {
            Ok(written) => written,
            Err(error) => return Err(run.stopped(error, begun.work)),
        };
        // Only what has passed gets the name, and takes the place of an older artifact.
        let clock = Instant::now();
        artifact::refuse_changed(&self.output, begun.folder.target())?;
        begun.folder.commit()?;
        begun.work.remove()?;
        seconds.writing += clock.elapsed().as_secs_f64();
        let perplexity = before.zip(after).map(|(before, after)| Perplexities { before, after, plain: control });
        Ok(run.outcome(size, made, seconds, perplexity))
    }
}

impl<'a> Run<'a> {
    /// Opens the model, and checks all that can be checked before the work.
    fn prepare(
        how: &'a Quantization,
        source: &Located,
        backend: Arc<dyn Backend>,
        reporter: &'a Reporter,
    ) -> Result<Self> {
        how.supported()?;
        let target = how.target(source)?;
        let original = open(&source.dir, backend, reporter)?;
        refuse_quantized(&original, source)?;
        let model = &original.model;
        let settled = how.settle(model)?;
        let Settled { modules, layout, .. } = &settled;
        modules.notes.iter().for_each(|note| reporter.warn(note));
        how.check_consumers(modules, &**layout, reporter)?;
        how.refuse_ragged_tiles(modules)?;
        let config = layout.config(&Description {
            method: &how.method.name,
            base: how.method.scheme(),
            modules: &modules.modules,
            outside: &outside(model),
            gptq: how.gptq_facts(),
            grid: how.method.grid().name(),
            kv_cache: how.method.kv_cache,
        });
        refuse_non_finite(model, reporter)?;
        let mut calibrated = None;
        if how.method.calibrates() {
            let (windows, record) = how.calibration.windows(&original, how.bos)?;
            let found = if how.method.needs().gram { Found::Hessians } else { Found::Statistics };
            let remedy = "give a longer text (--calib), or a larger --nsamples or --seqlen";
            few_tokens::warn(model, windows.len() * record.seqlen, found, remedy, reporter);
            calibrated = Some((windows, record));
        }
        let mut run = Self { how, reporter, target, original, settled, config, calibrated, text: None };
        if let Some(evaluation) = &how.evaluation {
            run.text = Some(EvaluationText::open(evaluation, how.bos, &run.original)?);
        }
        Ok(run)
    }

    /// Makes the folders, and takes up what an earlier run has finished.
    fn begin(&self) -> Result<Begun> {
        let Self { how, reporter, target, original, .. } = self;
        let Settled { modules, layout, version, left_out } = &self.settled;
        let (model, output) = (&original.model, &how.output);
        reporter.stoppable();
        let folder = if output.overwrite { OutputFolder::replace(target)? } else { OutputFolder::create(target)? };
        reporter.renamed(folder.path(), target);
        reporter.renamed(folder.target(), target);
        let specs = artifact::specs(model, modules, &**layout, how.method.kv_cache);
        let shards = plan_shards(specs, output.max_shard_bytes);
        if output.overwrite {
            artifact::refuse_collisions(folder.target(), &shards, model, &**layout)?;
        }
        // The blocks are in the work folder until the artifact is complete.
        let needed = planned_bytes(&shards)? * 2 + SIDE_FILES;
        require_space(folder.path(), needed.saturating_sub(Work::held_bytes(target)?))?;

        let config = (!model.checkpoint().is_assembled()).then(|| "config.json".to_string());
        let sources: Vec<String> = model.checkpoint().files().iter().map(|f| f.to_string()).chain(config).collect();
        let mut source_files = Vec::new();
        for file in &sources {
            reporter.check()?;
            source_files.extend(hash_files(model.checkpoint().dir(), std::slice::from_ref(file))?);
        }
        let recipe = Recipe {
            method: how.method.clone(),
            rules: how.selection.rules.clone(),
            skips: how.selection.skips.clone(),
            on_misfit: how.selection.on_misfit.name().into(),
            left_out: left_out.clone(),
            format: how.form.name(*version).into(),
            max_shard_bytes: output.max_shard_bytes,
            device: self.calibrated.as_ref().map(|_| model.backend().kind()),
            calibration: self.calibrated.as_ref().map(|(_, record)| record.clone()),
        };
        let record = json!({"tool": env!("CARGO_PKG_VERSION"), "recipe": recipe, "source": source_files});
        let work::Found { work, resumed, removed } =
            Work::open(target, &record, self.config.clone(), output.resume, reporter)?;
        if output.resume == Resume::Yes && !resumed {
            reporter.note("--resume: no earlier run is there; starting from the first block");
        }
        if removed > 0 {
            reporter.note(format!("removed {} of an earlier run with other options", blocks(removed)));
        }
        Ok(Begun { folder, work, recipe, source_files })
    }

    /// Quantizes all blocks into the work folder.
    fn blocks(&self, work: &Work) -> Result<Blocks> {
        let Self { how, reporter, original, .. } = self;
        let model = &original.model;
        let steps = reporter.steps(&how.method.name, model.blocks.len() as u64);
        let Settled { modules, layout, .. } = &self.settled;
        let mut job = Job::new(&how.method, modules, &**layout, model.backend_handle(), work, reporter, steps);
        match &self.calibrated {
            Some((windows, _)) => driver::run(model, windows, how.method.course(), &mut job)?,
            None => model.blocks.iter().try_for_each(|block| job.without_data(block))?,
        }
        let mut made = Blocks { reports: Vec::new(), transforms: Vec::new(), seconds_solving: job.seconds_quantizing };
        for report in std::mem::take(&mut job.reports) {
            if how.method.transform.is_some() {
                let (error_ratio, alpha) = (report.error_ratio, report.alpha);
                made.transforms.push(BlockScaling { block: report.block, error_ratio, alpha });
            }
            made.reports.extend(report.modules);
        }
        Ok(made)
    }

    /// Fills the folder, reads it back and measures it: its size, its perplexity, and that of plain rounding.
    fn write(
        &self,
        begun: &Begun,
        made: &Blocks,
        seconds: &mut PhaseSeconds,
    ) -> Result<(u64, Option<Measured>, Option<Measured>)> {
        let clock = Instant::now();
        let Settled { modules, layout, .. } = &self.settled;
        let contents = artifact::Contents {
            model: &self.original.model,
            layout: &**layout,
            source_files: begun.source_files.clone(),
            modules,
            recipe: &begun.recipe,
            quantization: &self.config,
            reports: serde_json::to_value(&made.reports)?,
            transforms: serde_json::to_value(&made.transforms)?,
            work: &begun.work,
            reporter: self.reporter,
        };
        let size = artifact::fill(&begun.folder, &contents)?;
        seconds.writing = clock.elapsed().as_secs_f64();
        let artifact = read_back(begun.folder.path(), self.original.model.backend_handle(), self.reporter)?;
        let clock = Instant::now();
        let after = self.text.as_ref().map(|text| text.after(&artifact, self.reporter)).transpose()?;
        let control = self.control()?;
        self.reporter.check()?;
        seconds.measuring += clock.elapsed().as_secs_f64();
        Ok((size, after, control))
    }

    /// The perplexity of plain rounding, unless the artifact is that.
    fn control(&self) -> Result<Option<Measured>> {
        let Some(text) = self.text.as_ref().filter(|_| !is_control(&self.how.method)) else { return Ok(None) };
        let how = text.measurement(&self.original);
        let plain = plain(&self.how.method);
        let layout = self.how.form.layout(&plain, self.settled.version);
        match control(&self.original, &plain, &self.settled.modules, &*layout, &how, self.reporter) {
            Err(error) if category(&error) == Category::Interrupted => Err(error),
            // The artifact is none the worse for it.
            Err(error) => {
                self.reporter.warn(format!("plain rounding could not be measured: {error:#}"));
                Ok(None)
            }
            Ok(measured) => Ok(Some(measured)),
        }
    }

    fn outcome(self, bytes: u64, made: Blocks, seconds: PhaseSeconds, perplexity: Option<Perplexities>) -> Outcome {
        let Settled { modules, layout, .. } = self.settled;
        let of_module = |module: &Module| module.scheme.map(|scheme| layout.specs(module, scheme));
        let quantized_bytes = modules.modules.iter().filter_map(of_module).flatten().map(|spec| spec.bytes()).sum();
        Outcome {
            target: self.target,
            source_bytes: self.original.model.checkpoint().tensors().values().map(|e| e.bytes.len() as u64).sum(),
            bytes,
            quantized_bytes,
            modules,
            dead_channels: dead_channels(&self.original.model, &made.reports),
            reports: made.reports,
            transforms: made.transforms,
            unread: self.original.unread,
            seconds,
            perplexity,
        }
    }

    /// What happens to finished blocks when the run ends early.
    fn stopped(&self, error: anyhow::Error, work: Work) -> anyhow::Error {
        if category(&error) == Category::CheckFailed {
            // The same options would come to the same end.
            return work.remove().err().unwrap_or(error);
        }
        if work.finished() > 0 {
            let how = match self.how.output.resume {
                Resume::IfSame => "the same recipe",
                Resume::Yes | Resume::No => "the same command with --resume",
            };
            self.reporter.note(format!(
                "{} finished, kept in `{}`; {how} goes on from there",
                blocks(work.finished()),
                work.dir().display()
            ));
        }
        error
    }

    fn announce(&self) {
        let Self { how, reporter, .. } = self;
        let base = how.method.scheme();
        let count = self.settled.modules.modules.iter().filter(|m| m.scheme.is_some()).count();
        let data = self.calibrated.as_ref().map_or("no calibration data".into(), |(_, c)| {
            format!("{} calibration windows of {} tokens from {} (BOS {})", c.nsamples, c.seqlen, c.text, c.bos)
        });
        let kind = if base.sym { "symmetric" } else { "asymmetric" };
        reporter.note(format!(
            "{}: {} linears to {} bits, group size {}, {kind}; {data}",
            how.method.name, count, base.bits, base.group_size
        ));
        if base.bits < 4 && matches!(how.method.rounding, Rounding::Gptq { drift_correction: false, .. }) {
            reporter.note(format!("{} bits: --drift-correction may gain much", base.bits));
        }
        if let Some((windows, record)) = &self.calibrated {
            self.announce_memory(windows.len(), record.seqlen);
        }
    }

    fn announce_memory(&self, windows: usize, seqlen: usize) {
        let (model, method) = (&self.original.model, &self.how.method);
        let needed = memory::estimate(model, method, windows * seqlen);
        self.reporter.note(format!("memory: about {}", bytes(needed)));
        let backend = model.backend();
        if let Some(free) = backend.free_memory().filter(|free| *free < needed) {
            let what = match memory::fitting(model, method, windows, seqlen, free) {
                Some(count) => format!("--nsamples {count} would fit"),
                None => "a shorter --seqlen needs less".into(),
            };
            self.reporter.warn(format!("only {} are free on {}; {what}", bytes(free), backend.device()));
        }
    }
}

/// Opens what was written, and holds it against its manifest. Failing here is no fault of the input.
fn read_back(dir: &Path, backend: Arc<dyn Backend>, reporter: &Reporter) -> Result<Runnable> {
    let failed = |why: String| anyhow::Error::from(CheckFailed(why));
    let artifact =
        open_made(dir, backend, reporter).map_err(|e| failed(format!("the artifact cannot be read back: {e:#}")))?;
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::backend::cpu::Cpu;

    /// The input was fine; what was made of it is not.
    #[test]
    fn damaged_output_is_a_failed_check() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), "{").unwrap();
        let error = read_back(dir.path(), Arc::new(Cpu), &Reporter::silent()).err().unwrap();
        assert_eq!(category(&error), Category::CheckFailed);
        assert!(error.to_string().starts_with("the artifact cannot be read back: "), "{error}");
    }
}
