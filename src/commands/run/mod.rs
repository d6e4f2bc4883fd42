//! `quantkit run`: a recipe carried out. What is there already is left alone; the rest is made, measured and judged.

mod estimate;
mod options;
mod recipe;
mod record;
mod show;
mod validate;

use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::quantize;
use super::{device, gguf};
use crate::backend::cuda::CudaOptions;
use crate::cli::args::Command;
use crate::cli::exit::{self, CheckFailed};
use crate::cli::interrupt;
use crate::cli::planning::RunArgs;
use crate::cli::print::Printer;
use crate::format::atomic::lock;
use crate::format::manifest::{FileRecord, sha256_file};
use crate::pipeline::quantize::Forecast;
use crate::pipeline::source::{ModelSource, locate};
use crate::report::gate::{Verdict, judge};
use crate::report::{Report, html, junit, markdown};
use estimate::{Estimate, estimate};
use options::Step;
use recipe::{Recipe, Validate, unknown};
use record::{Inputs, Record, Records, State, Validation, source_files};
use validate::{Job, validate_step};

/// A step with what is known of it before, and what comes of it.
struct Task {
    step: Step,
    inputs: Inputs,
    /// Of an earlier run.
    record: Option<Record>,
    state: State,
    /// Where there is something to make.
    ahead: Option<Ahead>,
    done: Done,
}

/// What making it would take.
struct Ahead {
    forecast: Forecast,
    time: Estimate,
}

/// What came of a step.
#[derive(Default)]
struct Done {
    /// How long it took, where it was made.
    seconds: Option<f64>,
    /// Why there is no artifact.
    failed: Option<String>,
    /// Whether it was measured just now, and what came of that.
    judged: Option<(bool, Report, Verdict)>,
}

/// A recipe at work.
struct Work<'a> {
    args: &'a RunArgs,
    recipe: Recipe,
    records: Records,
    source: Vec<FileRecord>,
    printer: Printer,
}

pub fn run(args: &RunArgs, printer: Printer) -> Result<()> {
    let mut recipe = Recipe::read(&args.recipe, &args.device)?;
    let names: Vec<String> = recipe.steps.iter().map(|step| step.name.clone()).collect();
    if let Some(name) = args.only.iter().find(|name| !names.contains(name)) {
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        bail!("--only: {}", unknown("artifact", name, &names));
    }
    let steps = std::mem::take(&mut recipe.steps);
    let (model, revision) = (recipe.source.model.as_deref(), recipe.source.revision.as_deref());
    let located = locate(ModelSource { model, revision }, printer)?;
    let source = source_files(&located.dir)?;
    let work = Work { args, records: Records::new(&recipe.out), recipe, source, printer };
    let wanted = steps.into_iter().filter(|step| args.only.is_empty() || args.only.contains(&step.name));
    let mut tasks: Vec<Task> = wanted.map(|step| work.task(step)).collect::<Result<_>>()?;
    if !args.dry_run {
        work.go(&mut tasks)?;
    }
    let failures = show::results(&work, &tasks)?;
    match failures.is_empty() {
        true => Ok(()),
        false => Err(CheckFailed(failures.join("; ")).into()),
    }
}

impl Work<'_> {
    /// What is to be done about a step; what cannot be done is refused here, before any work.
    fn task(&self, step: Step) -> Result<Task> {
        interrupt::check()?;
        let inputs = Inputs::of(&step, &self.source)?;
        let record = self.records.read(&step.name);
        let state = self.records.state(&inputs, record.as_ref())?;
        if state == State::New && step.target.exists() {
            bail!(
                "`{}` is there, but no record says that this recipe made it; move it away, or choose another `out`",
                step.target.display()
            );
        }
        if let Some(how) = &self.recipe.validate {
            self.job(&step, how).check()?;
        }
        let ahead = match state {
            State::UpToDate => None,
            _ => Some(self.ahead(&step).with_context(|| format!("artifact `{}`", step.name))?),
        };
        Ok(Task { step, inputs, record, state, ahead, done: Done::default() })
    }

    fn ahead(&self, step: &Step) -> Result<Ahead> {
        let silent = self.printer.silent();
        let forecast = match (&step.command, quantize::prepared(&step.command, silent)) {
            (_, Some(run)) => run?.forecast()?,
            (Command::Gguf(args), None) => gguf::forecast(args, silent)?,
            _ => bail!("`{}` makes no artifacts", step.method),
        };
        let threads = rayon::current_num_threads();
        let earlier = self.records.all();
        let time = estimate(&step.name, &step.method, forecast.effort, &forecast.device, threads, &earlier);
        Ok(Ahead { forecast, time })
    }

    fn go(&self, tasks: &mut [Task]) -> Result<()> {
        let out = &self.recipe.out;
        fs::create_dir_all(out).with_context(|| format!("cannot create `{}`", out.display()))?;
        // Where folders cannot be locked, two runs at once are the user's affair.
        let _held = match lock(out) {
            Ok(None) => bail!("another run works in `{}`; wait for it", out.display()),
            held => held.ok().flatten(),
        };
        interrupt::listen();
        for task in tasks.iter_mut() {
            interrupt::check()?;
            self.make(task).with_context(|| format!("artifact `{}`", task.step.name))?;
        }
        for task in tasks.iter_mut().filter(|task| task.done.failed.is_none()) {
            interrupt::check()?;
            if let Some(how) = &self.recipe.validate {
                self.measure(task, how).with_context(|| format!("artifact `{}`", task.step.name))?;
            }
        }
        Ok(())
    }

    /// Makes an artifact that is not there as it should be.
    fn make(&self, task: &mut Task) -> Result<()> {
        let (step, printer) = (&task.step, self.printer);
        let Some(ahead) = &task.ahead else {
            printer.note(format!("{}: up to date", step.name));
            return Ok(());
        };
        let why = task.state.why().map_or(String::new(), |why| format!(" ({why})"));
        printer.note(format!("{}: {}{why}", step.name, task.state.name()));
        if let (State::Damaged(_), Some(record)) = (&task.state, &task.record) {
            self.records.clear(record, &step.target);
        }
        // Whoever stops here finds at the next run that what stands there is ours.
        let mut record = Record {
            key: task.inputs.key()?,
            inputs: task.inputs.clone(),
            outputs: Vec::new(),
            seconds: 0.0,
            device: ahead.forecast.device.clone(),
            weights: ahead.forecast.effort.weights,
            flops: ahead.forecast.effort.flops,
            validation: None,
        };
        self.records.write(&step.name, &record)?;
        let began = Instant::now();
        let made = match (&step.command, quantize::prepared(&step.command, printer.step_of())) {
            (_, Some(run)) => run.and_then(|run| run.go()),
            (Command::Gguf(args), None) => gguf::run(args, printer.step_of()),
            _ => bail!("`{}` makes no artifacts", step.method),
        };
        let seconds = began.elapsed().as_secs_f64();
        match made {
            // The others may well pass.
            Err(error) if exit::code(&error) == exit::CHECK_FAILED => {
                printer.warn(format!("{}: {error:#}", step.name));
                task.done.failed = Some(format!("{error:#}"));
                return Ok(());
            }
            made => made?,
        }
        (record.outputs, record.seconds) = (self.records.outputs(&step.target)?, seconds);
        self.records.write(&step.name, &record)?;
        task.done.seconds = Some(seconds);
        task.record = Some(record);
        Ok(())
    }

    fn job<'a>(&'a self, step: &'a Step, how: &'a Validate) -> Job<'a> {
        Job {
            name: &step.name,
            method: &step.method,
            artifact: &step.target,
            source: &self.recipe.source,
            how,
            device: &self.args.device,
        }
    }

    /// Measures an artifact, unless that was done, and judges it.
    fn measure(&self, task: &mut Task, how: &Validate) -> Result<()> {
        let step = &task.step;
        let Some(record) = &mut task.record else { return Ok(()) };
        let texts: Vec<String> = how.texts.iter().map(|t| Ok(sha256_file(t)?.0)).collect::<Result<_>>()?;
        let draft = how.draft.as_ref().map(Path::new).filter(|path| path.exists()).map(source_files).transpose()?;
        let settings = Validate { texts: vec![], ..how.clone() };
        let tool = &task.inputs.tool;
        let device = self.args.device.to_string();
        let key = record::key(&json!([tool, record.outputs, self.source, settings, texts, draft, device]))?;
        let earlier = match &record.validation {
            Some(known) if known.key == key && self.records.damage(std::slice::from_ref(&known.report))?.is_none() => {
                Report::read(&self.recipe.out.join(&known.report.file)).ok()
            }
            _ => None,
        };
        let fresh = earlier.is_none();
        let report = match earlier {
            Some(report) => report,
            None => {
                self.printer.note(format!("{}: measuring", step.name));
                let began = Instant::now();
                let report = validate_step(&self.job(step, how), self.printer.step_of())?;
                let seconds = began.elapsed().as_secs_f64();
                let file = self.records.write_page(&format!("{}.json", step.name), &report.to_json()?)?;
                record.validation = Some(Validation { key, report: file, seconds });
                self.records.write(&step.name, record)?;
                report
            }
        };
        let verdict = judge(&report, None, &step.thresholds);
        // The same figures under other limits are another page.
        let pages = [
            ("html", html::write(&report, &verdict)?),
            ("md", markdown::write(&report, &verdict)),
            ("xml", junit::write(&report, &verdict)?),
        ];
        for (end, text) in pages {
            self.records.write_page(&format!("{}.{end}", step.name), text.as_bytes())?;
        }
        task.done.judged = Some((fresh, report, verdict));
        Ok(())
    }

    /// The kind of device for what is said before anything runs.
    fn device(&self) -> Result<String> {
        Ok(device::backend(&self.args.device, CudaOptions::default(), self.printer.silent())?.kind())
    }
}
