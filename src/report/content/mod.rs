//! What each section says, in sentences and tables, for all forms.

mod parts;

use super::Report;
use super::gate::{Outcome, Row, Verdict};
use super::number::{change, grouped, percent, significant};
use super::sections::{Identity, WindowedCorpus};
use super::table::{Column, Table};
use crate::integrity::Status;
use parts::{acceptance, accounting, cache, consumers, modules, provenance};
pub use parts::{cache_name, honest, largest, of_quantized, pair_name};

/// A section of a report.
pub struct Section {
    /// Lasting name, for links and charts.
    pub id: &'static str,
    pub title: &'static str,
    /// Sentences.
    pub lead: Vec<String>,
    pub tables: Vec<Table>,
}

impl Section {
    fn new(id: &'static str, title: &'static str) -> Self {
        Self { id, title, lead: Vec::new(), tables: Vec::new() }
    }
}

/// The sections that are there, what decides first.
pub fn sections(report: &Report, verdict: &Verdict) -> Vec<Section> {
    let all = [
        gate(verdict),
        checks(report),
        perplexity(report),
        divergence(report),
        modules(report),
        cache(report),
        acceptance(report),
        accounting(report),
        consumers(report),
        provenance(report),
    ];
    all.into_iter().flatten().collect()
}

/// What was measured, in one line.
pub fn title(report: &Report) -> String {
    let what = describe(&report.artifact);
    match &report.reference {
        Some(reference) => format!("{what}, against {}", reference.name),
        None => what,
    }
}

/// Format, method and scheme.
pub fn describe(identity: &Identity) -> String {
    let mut parts = vec![identity.format.clone()];
    parts.extend(identity.method.clone().filter(|method| *method != identity.format));
    parts.extend(identity.scheme.clone());
    parts.retain(|part| !part.is_empty());
    parts.join(", ")
}

/// Passed or not, in one line.
pub fn judgement(verdict: &Verdict) -> String {
    let failed = verdict.rows.iter().filter(|row| verdict.fails(row)).count();
    let warned = verdict.rows.iter().filter(|row| row.outcome == Outcome::Warn && !verdict.fails(row)).count();
    let count = |n: usize, one: &str, many: &str| if n == 1 { format!("1 {one}") } else { format!("{n} {many}") };
    match (failed, warned) {
        (0, 0) => "passed".into(),
        (0, n) => format!("passed with {}", count(n, "warning", "warnings")),
        (n, 0) => format!("failed: {}", count(n, "row", "rows")),
        (n, m) => format!("failed: {}, and {}", count(n, "row", "rows"), count(m, "warning", "warnings")),
    }
}

/// The rows of a verdict that have figures or a limit.
pub fn gate_table(verdict: &Verdict) -> Table {
    let mut table = Table::new(
        "Limits and what moved",
        &[
            ("result", Column::Status),
            ("what", Column::Text),
            ("baseline", Column::Number),
            ("now", Column::Number),
            ("moved", Column::Number),
            ("limit", Column::Number),
            ("note", Column::Text),
        ],
    );
    for row in verdict.rows.iter().filter(|row| row.now.is_some() || row.limit.is_some()) {
        let show = |value: Option<f64>| value.map(|value| row.unit.show(value)).unwrap_or_default();
        let (baseline, now, limit) = (show(row.baseline), show(row.now), row.limit.clone().unwrap_or_default());
        let result = row.outcome.name().to_string();
        table.row([result, row.what.clone(), baseline, now, row.moved_text(), limit, row.note.clone()]);
    }
    table.trimmed()
}

/// The rows that only speak, where they are no good news.
pub fn gate_notes(verdict: &Verdict) -> impl Iterator<Item = &Row> {
    let speaks = |row: &&Row| row.now.is_none() && row.limit.is_none() && row.outcome >= Outcome::Warn;
    verdict.rows.iter().filter(speaks)
}

fn gate(verdict: &Verdict) -> Option<Section> {
    let mut notes =
        Table::new("What else counts", &[("result", Column::Status), ("what", Column::Text), ("note", Column::Text)]);
    // Checks have a section of their own.
    for row in gate_notes(verdict).filter(|row| !row.what.starts_with("check ")) {
        notes.row([row.outcome.name(), &row.what, &row.note]);
    }
    if notes.rows.is_empty() && !verdict.decides() {
        return None;
    }
    let mut section = Section::new("gate", "Gate");
    section.lead.push(format!(
        "{}. A value that has a standard error fails where its 95 % bound lies beyond the limit, and warns where only \
         the value does.",
        capital(&judgement(verdict))
    ));
    if verdict.decides() {
        section.tables.push(gate_table(verdict));
    }
    section.tables.push(notes);
    Some(section)
}

fn checks(report: &Report) -> Option<Section> {
    let mut section = Section::new("checks", "Checks");
    let mut table =
        Table::new("Checks", &[("result", Column::Status), ("check", Column::Code), ("found", Column::Text)]);
    let mut all: Vec<_> = report.checks.iter().collect();
    // What needs attention first; otherwise as they were made.
    all.sort_by_key(|check| std::cmp::Reverse(check.status.max(Status::Pass)));
    for check in &all {
        table.row([check.status.name(), check.id.as_str(), &check.message]);
    }
    section.lead.push(format!("{}.", capital(&counted(report))));
    section.tables.push(table);
    (!all.is_empty()).then_some(section)
}

/// How many checks came out how.
pub fn counted(report: &Report) -> String {
    let count = |status| report.checks.iter().filter(|check| check.status == status).count();
    let all = [(Status::Fail, "failed"), (Status::Warn, "with a warning"), (Status::Pass, "passed")];
    let mut parts: Vec<String> = all
        .into_iter()
        .map(|(status, word)| (count(status), word))
        .filter(|(n, _)| *n > 0)
        .map(|(n, word)| format!("{n} {word}"))
        .collect();
    match count(Status::Skipped) {
        0 => {}
        n => parts.push(format!("{n} skipped")),
    }
    parts.join(", ")
}

fn perplexity(report: &Report) -> Option<Section> {
    let mut section = Section::new("perplexity", "Perplexity");
    section.lead.push(
        "How surprised the model is by a text. Both predict the same tokens, so the ratio's error leaves the text's own \
         difficulty out."
            .into(),
    );
    let mut table = Table::new(
        "Perplexity by text and method",
        &[
            ("text", Column::Text),
            ("method", Column::Text),
            ("perplexity", Column::Number),
            ("over the reference", Column::Number),
        ],
    );
    for on in &report.perplexity {
        let text = &on.corpus.name;
        let value = |value: f64, error: f64| format!("{} ± {}", significant(value, 5), significant(error, 2));
        table.row([text.clone(), "reference".into(), value(on.reference, on.reference_stderr), String::new()]);
        let over = moved(on.ratio, on.ratio_stderr);
        table.row([text.clone(), artifact_method(report), value(on.artifact, on.artifact_stderr), over]);
        if let Some(control) = &on.control {
            let over = moved(control.ratio, control.ratio_stderr);
            let name = format!("{} (control)", control.method);
            table.row([text.clone(), name, significant(control.perplexity, 5), over]);
        }
    }
    section.tables.push(table.trimmed());
    section.tables.push(corpora("How perplexity was measured", report.perplexity.iter().map(|on| &on.corpus)));
    (!report.perplexity.is_empty()).then_some(section)
}

/// What the artifact's row is called.
pub fn artifact_method(report: &Report) -> String {
    match &report.artifact.method {
        Some(method) => format!("this artifact ({method})"),
        None => "this artifact".into(),
    }
}

/// `+2.31 % ± 0.21`
pub fn moved(ratio: f64, stderr: f64) -> String {
    let error = if stderr > 0.0 { format!(" ± {}", significant(100.0 * stderr, 2)) } else { String::new() };
    format!("{}{error}", change(ratio - 1.0, 2))
}

fn corpora<'a>(caption: &str, all: impl Iterator<Item = &'a WindowedCorpus>) -> Table {
    let columns = [
        ("text", Column::Text),
        ("convention", Column::Text),
        ("window", Column::Number),
        ("windows", Column::Number),
        ("BOS", Column::Text),
        ("tokens that count", Column::Number),
        ("SHA-256", Column::Code),
    ];
    let mut table = Table { long: true, ..Table::new(caption, &columns) };
    for corpus in all {
        let WindowedCorpus { name, sha256, convention, window, windows, bos, tokens } = corpus;
        let (window, windows) = (window.to_string(), windows.to_string());
        table.row([
            name.clone(),
            convention.to_string(),
            window,
            windows,
            bos.clone(),
            grouped(*tokens),
            sha256.clone(),
        ]);
    }
    table
}

fn divergence(report: &Report) -> Option<Section> {
    let mut section = Section::new("divergence", "Divergence from the reference");
    section.lead.push(
        "KL(reference ‖ artifact) of the predictions, in nats a token: 0 where both say the same. Rare large values \
         show in the last percentiles, not in the mean."
            .into(),
    );
    let columns = [
        ("text", Column::Text),
        ("mean", Column::Number),
        ("median", Column::Number),
        ("99 %", Column::Number),
        ("99.9 %", Column::Number),
        ("max", Column::Number),
        ("same top token", Column::Number),
        ("RMS delta-p", Column::Number),
    ];
    let mut table = Table::new("Divergence by text", &columns);
    for on in &report.divergence {
        let (kl, top) = (&on.figures.kl, &on.figures.same_top);
        let nats = |value| significant(value, 3);
        table.row([
            on.corpus.name.clone(),
            format!("{} ± {}", nats(kl.mean), significant(kl.stderr, 2)),
            nats(kl.median),
            nats(kl.p99),
            nats(kl.p99_9),
            nats(kl.max),
            format!("{} ± {}", percent(top.share, 2), significant(100.0 * top.stderr, 2)),
            percent(on.figures.delta_p.rms, 2),
        ]);
    }
    section.tables.push(table);
    for on in &report.divergence {
        let Some(bins) = &on.histogram else { continue };
        let columns = [("nats", Column::Text), ("positions", Column::Number)];
        let mut table = Table { long: true, ..Table::new(format!("Histogram, {}", on.corpus.name), &columns) };
        let edge = |edge: Option<&f64>| edge.map(|edge| significant(*edge, 1)).unwrap_or_default();
        table.row([format!("less than {}", edge(bins.edges.first())), grouped(bins.below)]);
        for (pair, count) in bins.edges.windows(2).zip(&bins.counts) {
            table.row([format!("{} to {}", edge(Some(&pair[0])), edge(Some(&pair[1]))), grouped(*count)]);
        }
        table.row([format!("{} or more", edge(bins.edges.last())), grouped(bins.above)]);
        table.row(["not finite".to_string(), grouped(bins.not_finite)]);
        section.tables.push(table);
    }
    section.tables.push(corpora("How divergence was measured", report.divergence.iter().map(|on| &on.corpus)));
    (!report.divergence.is_empty()).then_some(section)
}

/// With a capital letter.
pub fn capital(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}
