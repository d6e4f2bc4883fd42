//! The trend of the key figures over many reports.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::charts::Chart;
use super::content::{Section, cache_name};
use super::html::{Page, page};
use super::number::Unit;
use super::plots::{relative, trend};
use super::sections::{Role, WindowedCorpus};
use super::table::{Column, Table, clean};
use super::{Report, ReportError};
use crate::integrity::Status;

/// The heights of a sparkline.
const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// A figure of one report.
struct Figure {
    name: String,
    unit: Unit,
    value: f64,
    /// What it was measured on: values with other ground are not comparable.
    ground: String,
}

/// A figure over all reports.
#[derive(Debug, Serialize)]
pub struct Trend {
    pub name: String,
    pub unit: Unit,
    /// One a report; absent (`null`) where it was not measured or is not finite.
    pub values: Vec<Option<f64>>,
    /// Places before which the ground changed: other text, windows or reference.
    pub cuts: Vec<usize>,
}

/// Reports in order, and their trends.
#[derive(Debug, Serialize)]
pub struct History {
    /// What each is called: its label, or its file.
    pub names: Vec<String>,
    pub files: Vec<PathBuf>,
    pub trends: Vec<Trend>,
    /// Whether a check failed in the report.
    pub failed: Vec<bool>,
}

/// The reports of a folder: `*.json` in it, and `report.json` in its folders. By name, numbers in names by size.
pub fn find(dir: &Path) -> Result<Vec<PathBuf>, ReportError> {
    let read = |source| ReportError::Read { path: dir.into(), source };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(read)? {
        let path = entry.map_err(read)?.path();
        let inner = path.join("report.json");
        if path.is_dir() && inner.is_file() {
            found.push(inner);
        } else if path.is_file() && path.extension().is_some_and(|end| end == "json") {
            found.push(path);
        }
    }
    // Names may be equal but for zeros before a number; the folder's own order is no order.
    found.sort_by_cached_key(|path| (natural(&path.to_string_lossy()), path.clone()));
    Ok(found)
}

/// Text and numbers of a name in turn, so that 2 comes before 10.
fn natural(name: &str) -> Vec<(String, u64)> {
    let mut out = Vec::new();
    let mut rest = name;
    while !rest.is_empty() {
        let text = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let (before, after) = rest.split_at(text);
        let digits = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
        out.push((before.to_string(), after[..digits].parse().unwrap_or(u64::MAX)));
        rest = &after[digits..];
    }
    out
}

impl History {
    /// Of reports with their files, in order.
    pub fn of(reports: &[(PathBuf, Report)]) -> Self {
        let mut trends: Vec<(Trend, Vec<Option<String>>)> = Vec::new();
        for (i, (_, report)) in reports.iter().enumerate() {
            for figure in figures(report) {
                let known = trends.iter().position(|(trend, _)| trend.name == figure.name);
                let place = known.unwrap_or_else(|| {
                    let values = vec![None; reports.len()];
                    let trend = Trend { name: figure.name.clone(), unit: figure.unit, values, cuts: Vec::new() };
                    trends.push((trend, vec![None; reports.len()]));
                    trends.len() - 1
                });
                let (trend, grounds) = &mut trends[place];
                trend.values[i] = Some(figure.value).filter(|value| value.is_finite());
                grounds[i] = Some(figure.ground);
            }
        }
        let cut = |(mut trend, grounds): (Trend, Vec<Option<String>>)| {
            let mut last: Option<&String> = None;
            for (i, ground) in grounds.iter().enumerate() {
                let Some(ground) = ground else { continue };
                if last.is_some_and(|last| last != ground) {
                    trend.cuts.push(i);
                }
                last = Some(ground);
            }
            trend
        };
        let file = |path: &Path| {
            let name = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
            let folder = path.parent().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
            if name == "report" { folder.unwrap_or(name) } else { name }
        };
        let name = |(path, report): &(PathBuf, Report)| clean(&report.label.clone().unwrap_or_else(|| file(path)));
        Self {
            names: reports.iter().map(name).collect(),
            files: reports.iter().map(|(path, _)| path.clone()).collect(),
            trends: trends.into_iter().map(cut).collect(),
            failed: reports.iter().map(|(_, report)| report.status() == Some(Status::Fail)).collect(),
        }
    }

    /// For a terminal.
    pub fn text(&self) -> String {
        self.table(true).text("  ")
    }

    fn table(&self, sparks: bool) -> Table {
        let columns = [
            ("figure", Column::Text),
            ("first", Column::Number),
            ("before", Column::Number),
            ("last", Column::Number),
            ("since the first", Column::Number),
            ("trend", Column::Text),
        ];
        let mut table = Table::new("First and last of what can be compared", &columns);
        for trend in &self.trends {
            // What came before the last change of ground cannot be compared with what is now.
            let from = trend.cuts.last().copied().unwrap_or(0);
            let known: Vec<f64> = trend.values[from..].iter().flatten().copied().collect();
            let show = |value: Option<&f64>| value.map(|value| trend.unit.show(*value)).unwrap_or_default();
            let before = if known.len() > 2 { known.get(known.len() - 2) } else { None };
            let moved = match (known.first(), known.last(), trend.unit) {
                (Some(first), Some(last), Unit::Share | Unit::Change) if known.len() > 1 => {
                    trend.unit.show_difference(last - first)
                }
                (Some(first), Some(last), _) if known.len() > 1 => relative(*first, *last),
                _ => String::new(),
            };
            let spark = if sparks { sparkline(&trend.values, &trend.cuts) } else { String::new() };
            let last = show(trend.values.last().and_then(Option::as_ref));
            table.row([trend.name.clone(), show(known.first()), show(before), last, moved, spark]);
        }
        table.trimmed()
    }

    /// One HTML file with a chart a figure.
    pub fn html(&self) -> Result<String, ReportError> {
        let charts: Vec<Chart> = self
            .trends
            .iter()
            .enumerate()
            .map(|(i, one)| trend(&format!("trend-{i}"), &one.name, &self.names, &one.values, &one.cuts, one.unit))
            .collect();
        let mut figures = Section { id: "trends", title: "Trends", lead: Vec::new(), tables: vec![self.table(false)] };
        if self.trends.iter().any(|trend| !trend.cuts.is_empty()) {
            figures.lead.push(
                "Where a line is cut, the text, the windows or the reference changed: what stands before it is not \
                 comparable with what stands after."
                    .into(),
            );
        }
        let columns = [("report", Column::Code), ("checks", Column::Status), ("file", Column::Code)];
        let mut table = Table::new("Reports, in order", &columns);
        for ((name, file), failed) in self.names.iter().zip(&self.files).zip(&self.failed) {
            table.row([name.as_str(), if *failed { "fail" } else { "pass" }, &file.to_string_lossy()]);
        }
        let reports = Section { id: "reports", title: "Reports", lead: Vec::new(), tables: vec![table] };
        page(&Page {
            name: "History".into(),
            what: format!("{} reports", self.names.len()),
            sections: vec![(figures, charts), (reports, Vec::new())],
            tool: format!("quantkit {}", env!("CARGO_PKG_VERSION")),
            ..Page::default()
        })
    }
}

/// The values as one line of text, `|` where they stop being comparable.
fn sparkline(values: &[Option<f64>], cuts: &[usize]) -> String {
    let known = || values.iter().flatten();
    let (low, high) = known().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(*x), high.max(*x)));
    let mut out = String::new();
    for (i, value) in values.iter().enumerate() {
        if cuts.contains(&i) {
            out.push('|');
        }
        out.push(match value {
            None => ' ',
            Some(_) if high <= low => LEVELS[3],
            Some(value) => LEVELS[((value - low) / (high - low) * 7.0).round() as usize % 8],
        });
    }
    out
}

fn figures(report: &Report) -> Vec<Figure> {
    let mut out = Vec::new();
    let reference = report.reference.as_ref().map(|reference| reference.sha256.as_str()).unwrap_or_default();
    let on = |corpus: &WindowedCorpus| format!("{corpus:?} {reference}");
    let mut add = |name: String, unit: Unit, value: f64, ground: String| out.push(Figure { name, unit, value, ground });
    for one in &report.perplexity {
        let text = &one.corpus.name;
        add(format!("perplexity, {text}"), Unit::Plain, one.artifact, on(&one.corpus));
        add(format!("perplexity over the reference, {text}"), Unit::Change, one.ratio - 1.0, on(&one.corpus));
    }
    for one in &report.divergence {
        let text = &one.corpus.name;
        add(format!("mean divergence, {text}"), Unit::Nats, one.figures.kl.mean, on(&one.corpus));
        add(format!("divergence, 99.9 %, {text}"), Unit::Nats, one.figures.kl.p99_9, on(&one.corpus));
        add(format!("same top token, {text}"), Unit::Share, one.figures.same_top.share, on(&one.corpus));
    }
    if !report.modules.is_empty() {
        let worst = report.modules.iter().map(|module| module.output_error).fold(0.0, f64::max);
        let ground = report.module_corpus.as_ref().map(on).unwrap_or_default();
        add("largest error of a module".into(), Unit::Error, worst, ground);
    }
    if let Some(cache) = &report.cache {
        for kind in &cache.types {
            let ground = format!("{:?} {}", cache.corpus, cache.baseline);
            add(format!("perplexity change, {} cache", cache_name(kind)), Unit::Change, kind.ratio - 1.0, ground);
        }
    }
    for pair in &report.acceptance {
        let other = match pair.role {
            Role::Target => report.draft.as_ref().map(|draft| draft.sha256.clone()).unwrap_or_default(),
            Role::Draft => reference.to_string(),
        };
        let name = match pair.role {
            Role::Target => "acceptance rate, verifying",
            Role::Draft => "acceptance rate, drafting",
        };
        let ground = format!("{other} {} {} {}", pair.text_sha256, pair.k, pair.temperature);
        add(name.into(), Unit::Share, pair.rate, ground);
    }
    if let Some(all) = &report.accounting {
        add("bits per weight".into(), Unit::Bits, all.bits_per_weight, String::new());
        add("size of the weights".into(), Unit::Bytes, all.artifact_bytes as f64, String::new());
    }
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn sample(name: &str) -> Report {
        Report::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/report").join(name)).unwrap()
    }

    #[test]
    fn numbers_in_names_go_by_size() {
        let mut names = ["r10", "r9", "r9b", "a", "r", "2026-01-02", "2026-01-10"];
        names.sort_by_cached_key(|name| natural(name));
        assert_eq!(names, ["2026-01-02", "2026-01-10", "a", "r9", "r9b", "r10", "r"].map(|x| x));
    }

    #[test]
    fn equal_numbers_go_by_name() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["r1.json", "r001.json", "r01.json", "r0001.json"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        let names =
            find(dir.path()).unwrap().iter().map(|path| path.file_name().unwrap().to_os_string()).collect::<Vec<_>>();
        assert_eq!(names, ["r0001.json", "r001.json", "r01.json", "r1.json"]);
    }

    #[test]
    fn sparks() {
        let values = [Some(0.0), Some(7.0), None, Some(3.0)];
        assert_eq!(sparkline(&values, &[3]), "▁█ |▄");
        assert_eq!(sparkline(&[Some(2.0); 2], &[]), "▄▄");
        assert_eq!(sparkline(&[None], &[]), " ");
    }

    #[test]
    fn trends_are_cut_where_the_ground_changes() {
        let (first, mut last) = (sample("baseline.json"), sample("report.json"));
        last.reference.as_mut().unwrap().sha256 = "other".into();
        last.label = None;
        last.cache = None;
        last.perplexity[1].artifact = f64::NAN;
        let all = [
            ("h/1.json".into(), first),
            ("h/2/report.json".into(), sample("report.json")),
            ("h/3/report.json".into(), last),
        ];
        let history = History::of(&all);
        assert_eq!(history.names, ["3f8c2d1", "a91e07b", "3"]);
        let of = |name: &str| history.trends.iter().find(|trend| trend.name == name).unwrap();
        assert_eq!(of("mean divergence, heldout").cuts, [2]);
        assert_eq!(of("bits per weight").cuts, [0usize; 0]);
        assert_eq!(of("perplexity change, int8, by token cache").values[2], None);
        assert_eq!(of("perplexity, code").values[2], None);
        let text = history.text();
        assert!(text.contains('|') && text.lines().count() == history.trends.len() + 1, "{text}");
        assert!(history.html().unwrap().contains("not comparable"));
        assert!(History::of(&[]).html().is_ok());
    }
}
