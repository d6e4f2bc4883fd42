//! A report as one HTML file that needs nothing else: no script, no font, no picture from outside.

use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, context};

use super::charts::{self, Chart};
use super::content::{Section, artifact_method, judgement, sections, title};
use super::gate::{Outcome, Verdict};
use super::number::{Unit, change, percent, significant};
use super::plots;
use super::sections::Role;
use super::table::{Column, Table};
use super::{Report, ReportError};
use crate::num::size::shown;

/// What a page shows.
#[derive(Default)]
pub struct Page {
    pub name: String,
    pub what: String,
    pub judgement: String,
    /// `pass`, `warn` or `fail`.
    pub judgement_class: &'static str,
    pub tiles: Vec<Tile>,
    pub sections: Vec<(Section, Vec<Chart>)>,
    pub tool: String,
}

/// A figure in large letters.
pub struct Tile {
    pub label: String,
    pub value: String,
    pub note: String,
}

/// The page of a report.
pub fn write(report: &Report, verdict: &Verdict) -> Result<String, ReportError> {
    let with_charts = |section: Section| {
        let charts = plots::charts(report, section.id);
        (section, charts)
    };
    let judgement_class = match (verdict.passed(), verdict.count(Outcome::Warn)) {
        (false, _) => "fail",
        (true, 0) => "pass",
        (true, _) => "warn",
    };
    page(&Page {
        name: report.artifact.name.clone(),
        what: title(report),
        judgement: judgement(verdict),
        judgement_class,
        tiles: tiles(report),
        sections: sections(report, verdict).into_iter().map(with_charts).collect(),
        tool: report.tool.clone(),
    })
}

/// The HTML of a page.
pub fn page(page: &Page) -> Result<String, ReportError> {
    let failed = |e: minijinja::Error| ReportError::Form { form: "HTML", why: format!("{e:#}") };
    let mut environment = Environment::new();
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    environment.add_template("page.html", include_str!("page.html")).map_err(failed)?;
    let sections: Vec<Value> = page.sections.iter().map(|(section, charts)| section_value(section, charts)).collect();
    let text = environment.get_template("page.html").and_then(|template| {
        template.render(context! {
            name => page.name.as_str(),
            what => page.what.as_str(),
            judgement => page.judgement.as_str(),
            judgement_class => page.judgement_class,
            tiles => page.tiles.iter().map(tile_value).collect::<Vec<_>>(),
            sections => sections,
            tool => page.tool.as_str(),
            style => Value::from_safe_string(include_str!("report.css").into()),
        })
    });
    // Names and messages may hold what a viewer would obey; the page itself has no control characters but line ends.
    let text = text.map_err(failed)?;
    Ok(text.chars().map(|c| if c.is_control() && c != '\n' { ' ' } else { c }).collect::<String>() + "\n")
}

fn section_value(section: &Section, charts: &[Chart]) -> Value {
    let chart = |chart: &Chart| {
        context! {
            caption => chart.caption.as_str(),
            note => chart.note.as_str(),
            legend => legend_value(&chart.legend),
            frame => chart.frame,
            svg => Value::from_safe_string(chart.svg.clone()),
        }
    };
    context! {
        id => section.id,
        title => section.title,
        lead => section.lead.clone(),
        legend => legend_value(&plots::legend(section.id, charts)),
        charts => charts.iter().map(chart).collect::<Vec<_>>(),
        tables => section.tables.iter().filter(|table| !table.rows.is_empty()).map(table_value).collect::<Vec<_>>(),
    }
}

fn tile_value(tile: &Tile) -> Value {
    context! { label => tile.label.as_str(), value => tile.value.as_str(), note => tile.note.as_str() }
}

fn legend_value(legend: &[(String, String)]) -> Vec<Value> {
    legend.iter().map(|(class, words)| context! { class => class.as_str(), words => words.as_str() }).collect()
}

fn table_value(table: &Table) -> Value {
    let class = |column: Column| match column {
        Column::Text => "text",
        Column::Number => "number",
        Column::Code => "code",
        Column::Status => "status",
    };
    let row = |row: &Vec<String>| {
        let cells = row.iter().zip(&table.columns);
        let cell = |(text, (label, column)): (&String, &(&str, Column))| {
            // Paths of modules may be broken after a dot, hashes anywhere.
            let text = match column {
                Column::Code => Value::from_safe_string(charts::escape(text).replace('.', ".<wbr>")),
                _ => Value::from(text.as_str()),
            };
            context! { text => text, label => *label, class => class(*column) }
        };
        cells.map(cell).collect::<Vec<_>>()
    };
    context! {
        caption => table.caption.as_str(),
        long => table.long,
        stack => matches!(table.columns.first(), Some((_, Column::Status))),
        columns => table
            .columns
            .iter()
            .map(|(title, column)| context! { title => *title, class => class(*column) })
            .collect::<Vec<_>>(),
        rows => table.rows.iter().map(row).collect::<Vec<_>>(),
    }
}

/// The key figures.
fn tiles(report: &Report) -> Vec<Tile> {
    let mut out = Vec::new();
    let mut tile = |label: &str, value: String, note: String| out.push(Tile { label: label.into(), value, note });
    if let Some(on) = report.perplexity.first() {
        let note =
            format!("{} against {}, {}", significant(on.artifact, 5), significant(on.reference, 5), on.corpus.name);
        tile("Perplexity", change(on.ratio - 1.0, 2), note);
    }
    if let Some(on) = report.divergence.first() {
        let kl = &on.figures.kl;
        let note = format!("nats a token; 99.9 % below {}", significant(kl.p99_9, 3));
        tile("Mean divergence", significant(kl.mean, 3), note);
        let note = format!("of {}'s predictions", on.corpus.name);
        tile("Same top token", percent(on.figures.same_top.share, 1), note);
    }
    if let Some(pair) = report.acceptance.first() {
        let other = match pair.role {
            Role::Target => format!("of what {} drafts", pair.draft),
            Role::Draft => format!("of its drafts, by {}", pair.target),
        };
        let note = format!("{other}; length {}", significant(pair.mean_length, 3));
        tile("Acceptance", percent(pair.rate, 1), note);
    }
    let ratio = |kind: &&super::CacheFigures| kind.ratio;
    let kinds = report.cache.iter().flat_map(|cache| &cache.types);
    if let Some(best) = kinds.min_by(|a, b| ratio(a).total_cmp(&ratio(b))) {
        let note = format!("perplexity, {} cache", super::content::cache_name(best));
        tile("Best reduced cache", change(best.ratio - 1.0, 2), note);
    }
    if let Some(all) = &report.accounting {
        let note = format!("{} of {}", shown(all.artifact_bytes as f64), shown(all.source_bytes as f64));
        tile("Bits per weight", significant(all.bits_per_weight, 3), note);
    }
    if out.is_empty() && report.seconds > 0.0 {
        let label = artifact_method(report);
        out.push(Tile { label, value: Unit::Seconds.show(report.seconds), note: "of measurements".into() });
    }
    out
}
