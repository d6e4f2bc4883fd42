//! `quantkit history`

use anyhow::{Result, bail};

use crate::cli::print::Printer;
use crate::cli::report::HistoryArgs;
use crate::format::output::write_atomic;
use crate::report::Report;
use crate::report::history::{History, find};

pub fn run(args: &HistoryArgs, printer: Printer) -> Result<()> {
    let mut reports = Vec::new();
    for path in find(&args.dir)? {
        match Report::read(&path) {
            Ok(report) => {
                // As seen from the folder: where that lies is nobody's business.
                let name = path.strip_prefix(&args.dir).unwrap_or(&path).to_path_buf();
                reports.push((name, report));
            }
            // Other JSON may lie there; and one damaged report is no reason to hide the others.
            Err(e) => printer.warn(format!("left out: {e}")),
        }
    }
    if reports.is_empty() {
        bail!("`{}` has no report: neither *.json nor folders with a report.json", args.dir.display());
    }
    let history = History::of(&reports);
    printer.object(&history)?;
    printer.text(format!("{} reports, {} to {}", reports.len(), history.names[0], history.names[reports.len() - 1]))?;
    printer.text(history.text().trim_end())?;
    for (name, failed) in history.names.iter().zip(&history.failed) {
        if *failed {
            printer.text(format!("  a check failed in {name}"))?;
        }
    }
    if let Some(path) = &args.html {
        write_atomic(path, history.html()?.as_bytes())?;
    }
    Ok(())
}
