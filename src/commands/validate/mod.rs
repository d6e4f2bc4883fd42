//! `quantkit validate`: everything that can be known of an artifact, in one report, held against limits.

mod demo;
mod facts;
mod finish;
mod speculation;
pub mod texts;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Error, Result, bail};

use super::device::one;
use super::{draft, eval_kv, inspect};
use crate::backend::Backend;
use crate::backend::cuda::CudaOptions;
use crate::calibrate::corpus::Corpus;
use crate::cli::environment::variable;
use crate::cli::exit;
use crate::cli::interrupt;
use crate::cli::print::Printer;
use crate::cli::validation::{Part, ValidateArgs};
use crate::engine::speculate::Ahead;
use crate::evaluate::divergence::Reference;
use crate::evaluate::finite;
use crate::format::manifest::Manifest;
use crate::format::{self, FormatError};
use crate::integrity::{self, Check, Status};
use crate::pipeline::measure::Measurement;
use crate::pipeline::open::{Runnable, open};
use crate::pipeline::source::{Located, ModelSource, demo_draft, locate};
use crate::report::{Identity, Report, Role};
use facts::Weights;
pub use finish::summarize;
use finish::{Gate, check_out, finish};
use speculation::Pair;

/// What is validated, against what.
struct Subjects {
    artifact: Located,
    reference: Located,
    draft: Option<Located>,
}

pub fn run(args: &ValidateArgs, printer: Printer) -> Result<()> {
    let gate = Gate::settle(args)?;
    if let Some(out) = &args.out {
        check_out(out)?;
    }
    let subjects = Subjects::find(args, printer)?;
    let out = args.out.clone().unwrap_or_else(|| PathBuf::from(format!("{}-report", subjects.artifact.name)));
    check_out(&out)?;
    finish(&measured(args, &subjects, printer)?, &gate, &out, printer)
}

/// Everything that is measured.
pub fn report(args: &ValidateArgs, printer: Printer) -> Result<Report> {
    measured(args, &Subjects::find(args, printer)?, printer)
}

impl Subjects {
    fn find(args: &ValidateArgs, printer: Printer) -> Result<Self> {
        let find = |model: &Option<String>, revision: &Option<String>| {
            locate(ModelSource { model: model.as_deref(), revision: revision.as_deref() }, printer)
        };
        if args.artifact.is_none() && args.reference.is_some() {
            bail!("name the artifact too: `quantkit validate ARTIFACT --reference MODEL`");
        }
        let reference = find(&args.reference, &args.reference_revision)?;
        let draft = match (&args.draft, &args.artifact) {
            (None, Some(_)) => None,
            (None, None) => Some(demo_draft(printer)?),
            (Some(_), _) => Some(find(&args.draft, &None).context("the draft")?),
        };
        let artifact = match &args.artifact {
            Some(_) => find(&args.artifact, &args.revision)?,
            None => demo::artifact(&args.device, printer)?,
        };
        for model in [Some(&artifact), Some(&reference), draft.as_ref()].into_iter().flatten() {
            if !model.dir.exists() {
                bail!("`{}` does not exist", model.dir.display());
            }
        }
        // What is damaged is a finding; what is of another kind is the wrong thing to give.
        if let Some(unread) = format::open_path(&artifact.dir).err().filter(FormatError::is_unread) {
            return Err(unread).context("the artifact");
        }
        Ok(Self { artifact, reference, draft })
    }
}

/// What the artifact is held against, opened.
struct Ground {
    device: Arc<dyn Backend>,
    reference: Runnable,
    draft: Option<Runnable>,
    corpora: Vec<Corpus>,
}

impl Ground {
    /// Opens models and texts. What fails here is the user's to mend: it says nothing about the artifact.
    fn open(args: &ValidateArgs, subjects: &Subjects, printer: Printer) -> Result<Self> {
        let device = one(&args.device, CudaOptions::default(), printer)?;
        let reference = open(&subjects.reference.dir, device.clone(), printer).context("the reference")?;
        let corpora = texts::corpora(&args.texts, &reference)?;
        for corpus in &corpora {
            texts::task(&args.texts, &reference, &reference, corpus, printer.silent())?;
        }
        let mut draft = None;
        if !args.skip.contains(&Part::Spec) {
            speculation::check_text(args, &reference)?;
            if let Some(found) = &subjects.draft {
                let opened = open(&found.dir, device.clone(), printer).context("the draft")?;
                draft::serves(&reference, &opened, ahead(args), printer)?;
                draft = Some(opened);
            }
        }
        Ok(Self { device, reference, draft, corpora })
    }
}

fn ahead(args: &ValidateArgs) -> Ahead {
    Ahead::Fixed(args.num_speculative_tokens.into())
}

fn measured(args: &ValidateArgs, subjects: &Subjects, printer: Printer) -> Result<Report> {
    let began = Instant::now();
    interrupt::listen();
    let ground = Ground::open(args, subjects, printer)?;
    let (identity, consumers) = match inspect::identity(&subjects.artifact.dir, &subjects.artifact.name) {
        Ok(found) => found,
        // What cannot be read has a name all the same, and a report that says why.
        Err(_) => (Identity { name: subjects.artifact.name.clone(), ..Identity::default() }, Vec::new()),
    };
    let mut report = Report::new(identity, ground.device.device());
    report.consumers = consumers;
    report.reference = Some(inspect::identity(&subjects.reference.dir, &subjects.reference.name)?.0);
    report.draft =
        subjects.draft.as_ref().map(|d| Ok::<_, Error>(inspect::identity(&d.dir, &d.name)?.0)).transpose()?;
    report.label = args.label.clone().or_else(|| variable("GITHUB_SHA").and_then(|sha| sha.into_string().ok()));
    let weights = facts::files(&mut report, &subjects.artifact, &subjects.reference, printer)?;
    if let Err(error) = measure(&mut report, args, subjects, &ground, &weights, printer) {
        // What the device or the user ended says nothing about the artifact; all else does.
        if [exit::INTERRUPTED, exit::DEVICE].contains(&exit::code(&error)) {
            return Err(error);
        }
        let message = integrity::named_inside(&format!("{error:#}"), &subjects.artifact.dir);
        let mut message = integrity::named_inside(&message, &subjects.reference.dir);
        if let Some(draft) = &subjects.draft {
            message = integrity::named_inside(&message, &draft.dir);
        }
        report.checks.push(Check { id: "runs".into(), status: Status::Fail, message });
    }
    report.seconds = began.elapsed().as_secs_f64();
    Ok(report)
}

/// Runs the models.
fn measure(
    report: &mut Report,
    args: &ValidateArgs,
    subjects: &Subjects,
    ground: &Ground,
    weights: &Weights,
    printer: Printer,
) -> Result<()> {
    let Ground { reference, draft, corpora, device } = ground;
    let artifact = open(&subjects.artifact.dir, device.clone(), printer).context("the artifact")?;
    facts::cache_memory(report, &artifact.model.config);
    Reference::Model(&reference.model).check(&artifact.model)?;
    let wanted = |part| !args.skip.contains(&part);
    // All are looked at before any of them is measured.
    let one = |corpus| texts::task(&args.texts, &artifact, reference, corpus, printer);
    let tasks = corpora.iter().map(one).collect::<Result<Vec<_>>>()?;
    let manifest = Manifest::read(&subjects.artifact.dir).ok();
    for (corpus, task) in corpora.iter().zip(&tasks) {
        let mut compared = texts::compare(&artifact, reference, task, printer)?;
        if let Some(manifest) = manifest.as_ref().filter(|_| wanted(Part::Control)) {
            let how = Measurement {
                corpus,
                convention: task.convention,
                window: Some(task.window),
                max_windows: Some(task.windows.len()),
                bos: args.texts.bos,
            };
            if let Some((control, windows)) = texts::control(manifest, reference, &how, &compared, printer)? {
                report.checks.push(texts::loses_to_control(&compared.perplexity, &control, &windows));
                compared.perplexity.control = Some(control);
            }
        }
        if let Some(reason) = finite::comparison(&compared.divergence.figures) {
            let message = format!("on `{}` {reason}", corpus.name);
            report.checks.push(Check { id: "finite".into(), status: Status::Fail, message });
        }
        report.perplexity.push(compared.perplexity);
        report.divergence.push(compared.divergence);
    }
    if wanted(Part::Modules) {
        facts::modules(report, &artifact, reference, (&tasks[0], weights), printer)?;
    }
    if wanted(Part::Kv) {
        let cache = eval_kv::section(&artifact, &tasks[0], &args.texts, &args.kinds, printer)?;
        report.checks.push(match eval_kv::warning(&cache) {
            Some(message) => Check { id: "cache-scales".into(), status: Status::Warn, message },
            None => Check {
                id: "cache-scales".into(),
                status: Status::Pass,
                message: "caches of few bits do what they should with the scales that engines take".into(),
            },
        });
        if let Some(message) = eval_kv::broken(&cache) {
            report.checks.push(Check { id: "finite".into(), status: Status::Fail, message });
        }
        report.cache = Some(cache);
    }
    if wanted(Part::Spec) {
        let (name, original) = (&subjects.artifact.name, &subjects.reference.name);
        let mut pairs = Vec::new();
        if let (Some(found), Some(opened)) = (&subjects.draft, draft) {
            draft::serves(&artifact, opened, ahead(args), printer)?;
            pairs.push(Pair { role: Role::Target, target: (name, &artifact), draft: (&found.name, opened) });
        }
        pairs.push(Pair { role: Role::Draft, target: (original, reference), draft: (name, &artifact) });
        for pair in pairs {
            let (acceptance, check) = speculation::measure(args, &pair, &tasks[0], printer)?;
            report.acceptance.push(acceptance);
            report.checks.push(check);
        }
    }
    Ok(())
}
