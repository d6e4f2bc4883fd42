//! A report as Markdown, as GitHub shows it.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

use super::content::{judgement, sections, title};
use super::gate::Verdict;
use super::table::escape;
use super::{Report, ReportError};
use crate::format::output::OutputError;

/// The whole report, long tables left out.
pub fn write(report: &Report, verdict: &Verdict) -> String {
    let mark = if verdict.passed() { "✅" } else { "❌" };
    let mut out =
        format!("# {mark} {}\n\n{}: {}.\n", escape(&report.artifact.name), escape(&title(report)), judgement(verdict));
    for section in sections(report, verdict) {
        out.push_str(&format!("\n## {}\n", section.title));
        for sentence in &section.lead {
            out.push_str(&format!("\n{}\n", escape(sentence)));
        }
        for table in section.tables.iter().filter(|table| !table.long && !table.rows.is_empty()) {
            out.push_str(&format!("\n{}", table.markdown()));
        }
    }
    out
}

/// Adds to a job's summary: the file that GitHub names in `GITHUB_STEP_SUMMARY`.
pub fn append(text: &str, file: &Path) -> Result<(), ReportError> {
    let written = OpenOptions::new().append(true).create(true).open(file).and_then(|mut f| writeln!(f, "{text}"));
    written.map_err(|source| ReportError::Write(OutputError::Io { path: file.into(), source }))
}
