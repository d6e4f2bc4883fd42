//! A report on a terminal.

use super::Report;
use super::content::{
    cache_name, counted, gate_notes, gate_table, honest, judgement, moved, of_quantized, pair_name, title,
};
use super::gate::Verdict;
use super::number::{percent, significant};
use super::table::clean;
use crate::integrity::Status;
use crate::num::size::shown;

/// Characters of the column of names.
const NAMES: usize = 12;

/// Lines with a name before them; of several under one name only the first has it.
#[derive(Default)]
struct Lines {
    text: String,
    last: String,
}

impl Lines {
    fn add(&mut self, name: &str, text: impl AsRef<str>) {
        let shown = if self.last == name { "" } else { name };
        self.text.push_str(format!("  {shown:<NAMES$} {}", clean(text.as_ref())).trim_end());
        self.text.push('\n');
        self.last = name.into();
    }
}

/// The report on a screenful; with a verdict also its rows.
pub fn summary(report: &Report, verdict: Option<&Verdict>) -> String {
    let mut lines = Lines::default();
    for on in &report.perplexity {
        let control = on
            .control
            .as_ref()
            .map(|control| format!("  ({} {})", control.method, moved(control.ratio, control.ratio_stderr)));
        lines.add(
            "perplexity",
            format!(
                "{:<12} {} -> {}  {}{}",
                on.corpus.name,
                significant(on.reference, 5),
                significant(on.artifact, 5),
                moved(on.ratio, on.ratio_stderr),
                control.unwrap_or_default()
            ),
        );
    }
    for on in &report.divergence {
        let kl = &on.figures.kl;
        lines.add(
            "divergence",
            format!(
                "{:<12} mean {} ± {} nats, 99 % {}, 99.9 % {}; same top token {}",
                on.corpus.name,
                significant(kl.mean, 3),
                significant(kl.stderr, 2),
                significant(kl.p99, 3),
                significant(kl.p99_9, 3),
                percent(on.figures.same_top.share, 2)
            ),
        );
    }
    let worst = report.modules.iter().max_by(|a, b| a.output_error.abs().total_cmp(&b.output_error.abs()));
    if let Some(worst) = worst {
        lines.add(
            "modules",
            format!(
                "largest error {} of {}: {}",
                significant(worst.output_error, 3),
                report.modules.len(),
                worst.module
            ),
        );
    }
    for kind in report.cache.iter().flat_map(|cache| &cache.types) {
        lines.add(
            "cache",
            format!(
                "{:<20} perplexity {}, KL {} nats, greedy agreement {}",
                cache_name(kind),
                moved(kind.ratio, kind.ratio_stderr),
                significant(kind.mean_kl, 2),
                percent(kind.greedy_agreement, 2)
            ),
        );
    }
    for pair in &report.acceptance {
        lines.add(
            "acceptance",
            format!(
                "{}: {} of k = {}, length {}, alpha {}",
                pair_name(pair),
                percent(pair.rate, 1),
                pair.k,
                significant(pair.mean_length, 3),
                significant(pair.alpha, 3)
            ),
        );
        lines.add("acceptance", format!("  {}", honest(pair)));
    }
    if let Some(all) = &report.accounting {
        lines.add(
            "weights",
            format!(
                "{} of {}, {} bits each{}",
                shown(all.artifact_bytes as f64),
                shown(all.source_bytes as f64),
                significant(all.bits_per_weight, 3),
                of_quantized(all, "; ")
            ),
        );
    }
    let names = |loads: bool| {
        let all = report.consumers.iter().filter(|consumer| consumer.loads == loads);
        all.map(|consumer| consumer.title.as_str()).collect::<Vec<_>>().join(", ")
    };
    if !report.consumers.is_empty() {
        let (yes, no) = (names(true), names(false));
        lines.add("loads in", if yes.is_empty() { "no engine that is known".into() } else { yes });
        if !no.is_empty() {
            lines.add("not in", no);
        }
    }
    if !report.checks.is_empty() {
        lines.add("checks", counted(report));
        for check in report.checks.iter().filter(|check| check.status >= Status::Warn) {
            lines.add("checks", format!("{}: {}: {}", check.status.name(), check.id, check.message));
        }
    }
    let mut out = format!("{}\n{}", clean(&format!("{}: {}", report.artifact.name, title(report))), lines.text);
    if let Some(verdict) = verdict {
        let table = gate_table(verdict);
        if verdict.decides() && !table.rows.is_empty() {
            out.push('\n');
            out.push_str(&table.text("  "));
        }
        for row in gate_notes(verdict).filter(|row| !row.what.starts_with("check ")) {
            out.push_str(&clean(&format!("  {}: {}: {}", row.outcome.name(), row.what, row.note)));
            out.push('\n');
        }
        out.push_str(&format!("{}\n", judgement(verdict)));
    }
    out
}
