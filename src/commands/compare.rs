//! `quantkit compare`

use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::Serialize;

use super::validate::summarize;
use crate::cli::exit::CheckFailed;
use crate::cli::print::Printer;
use crate::cli::report::CompareArgs;
use crate::format::output::write_atomic;
use crate::report::content::{gate_notes, gate_table, judgement};
use crate::report::gate::{Verdict, judge};
use crate::report::table::clean;
use crate::report::{Report, html, junit, markdown};

/// What `--json` prints.
#[derive(Serialize)]
struct Judged<'a> {
    passed: bool,
    #[serde(flatten)]
    verdict: &'a Verdict,
    failures: Vec<String>,
}

pub fn run(args: &CompareArgs, printer: Printer) -> Result<()> {
    let limits = args.limits.settle()?;
    let report = Report::read(&args.report)?;
    let baseline = args.baseline.as_deref().map(Report::read).transpose().context("the baseline")?;
    let verdict = judge(&report, baseline.as_ref(), &limits);

    printer.object(&Judged { passed: verdict.passed(), verdict: &verdict, failures: verdict.failures() })?;
    let against = baseline.as_ref().map(|baseline| format!(" against {}", name(baseline)));
    printer.text(format!("{}{}", name(&report), against.unwrap_or_default()))?;
    let table = gate_table(&verdict);
    if !table.rows.is_empty() {
        printer.text(table.text("  ").trim_end())?;
    }
    for row in gate_notes(&verdict) {
        printer.text(clean(&format!("  {}: {}: {}", row.outcome.name(), row.what, row.note)))?;
    }
    printer.text(judgement(&verdict))?;

    let write = |path: &Option<_>, text: &dyn Fn() -> Result<String>| match path {
        Some(path) => Ok(write_atomic(Path::new(path), text()?.as_bytes())?),
        None => Ok::<_, anyhow::Error>(()),
    };
    write(&args.junit, &|| Ok(junit::write(&report, &verdict)?))?;
    write(&args.markdown, &|| Ok(markdown::write(&report, &verdict)))?;
    write(&args.html, &|| Ok(html::write(&report, &verdict)?))?;
    summarize(|| markdown::write(&report, &verdict), printer);
    if !verdict.passed() {
        bail!(CheckFailed(verdict.failures().join("; ")));
    }
    Ok(())
}

/// The artifact, and where there is one its label.
fn name(report: &Report) -> String {
    match &report.label {
        Some(label) => clean(&format!("{} ({label})", report.artifact.name)),
        None => clean(&report.artifact.name),
    }
}
