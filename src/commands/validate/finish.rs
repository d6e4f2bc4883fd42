//! The report on disk and on the terminal, and what it comes to.

use std::path::{Path, PathBuf};

use anyhow::{Context, Error, Result, bail};

use crate::cli::environment::variable;
use crate::cli::exit::CheckFailed;
use crate::cli::print::Printer;
use crate::cli::validation::ValidateArgs;
use crate::report::gate::judge;
use crate::report::thresholds::Thresholds;
use crate::report::{FORMS, Report, markdown, terminal, write_judged};

/// What the report is held against.
pub struct Gate {
    limits: Thresholds,
    baseline: Option<Report>,
}

impl Gate {
    /// Reads it, before any work.
    pub fn settle(args: &ValidateArgs) -> Result<Self> {
        let baseline = args.baseline.as_deref().map(Report::read).transpose().context("the baseline")?;
        Ok(Self { limits: args.limits.settle()?.with_known_consumers()?, baseline })
    }
}

/// Refuses before any work a folder that could not be written to after it.
pub fn check_out(out: &Path) -> Result<()> {
    let refused = || format!("the report cannot be written to `{}`: name another folder with --out", out.display());
    // Made only when there is something to put into it.
    let here = Path::new(".");
    let found = out.ancestors().map(|at| if at.as_os_str().is_empty() { here } else { at });
    let there = found.into_iter().find(|at| at.symlink_metadata().is_ok()).unwrap_or(here);
    if !there.is_dir() {
        bail!("{}; `{}` is no folder", refused(), there.display());
    }
    if let Some(name) = FORMS.into_iter().find(|name| out.join(name).is_dir()) {
        bail!("{}; `{name}` in it is a folder", refused());
    }
    tempfile::tempfile_in(there).with_context(refused).map(drop)
}

/// Writes all forms of the report, shows it, and fails where a limit is missed.
pub fn finish(report: &Report, gate: &Gate, out: &Path, printer: Printer) -> Result<()> {
    let verdict = judge(report, gate.baseline.as_ref(), &gate.limits);
    let written = write_judged(report, &verdict, out)?;
    printer.object(report)?;
    printer.text(terminal::summary(report, Some(&verdict)).trim_end())?;
    let names: Vec<String> = written.iter().map(|path: &PathBuf| path.display().to_string()).collect();
    printer.note(format!("written: {}", names.join(", ")));
    summarize(|| markdown::write(report, &verdict), printer);
    if verdict.passed() { Ok(()) } else { bail!(CheckFailed(verdict.failures().join("; "))) }
}

/// Adds to a job's summary where there is one. The verdict stands whether or not that can be written.
pub fn summarize(text: impl FnOnce() -> String, printer: Printer) {
    let Some(file) = variable("GITHUB_STEP_SUMMARY") else { return };
    if let Err(e) = markdown::append(&text(), Path::new(&file)) {
        printer.warn(format!("the job's summary was left out: {:#}", Error::from(e)));
    }
}
