//! Which charts a section has.

use super::Report;
use super::charts::{Bar, Chart, Dot, Line, Place, bars, columns, dots, heat, heat_legend, lines};
use super::content::{artifact_method, cache_name, largest, moved, pair_name};
use super::number::{Unit, change, grouped, percent, significant};
use super::sections::{Acceptance, Bins, CacheFigures, DivergenceOn, PerplexityOn};

/// The charts of the section with this name.
pub fn charts(report: &Report, section: &str) -> Vec<Chart> {
    match section {
        "perplexity" => report.perplexity.iter().enumerate().map(|(i, on)| perplexity(report, on, i)).collect(),
        "divergence" => {
            let all = report.divergence.iter().enumerate();
            let drawn = |bins: &&Bins| !bins.counts.is_empty() && bins.edges[0] > 0.0;
            all.filter_map(|(i, on)| Some(histogram(on, on.histogram.as_ref().filter(drawn)?, i))).collect()
        }
        "modules" => modules(report).into_iter().collect(),
        "cache" => {
            let types = report.cache.iter().flat_map(|cache| &cache.types).enumerate();
            types.flat_map(|(i, kind)| caches(kind, i)).collect()
        }
        "acceptance" => {
            let all = report.acceptance.iter().enumerate();
            all.flat_map(|(i, pair)| positions(pair, i).into_iter().chain(speed(pair, i))).collect()
        }
        _ => Vec::new(),
    }
}

fn perplexity(report: &Report, on: &PerplexityOn, i: usize) -> Chart {
    let mut all = vec![Bar {
        name: "reference".into(),
        value: 0.0,
        stderr: 0.0,
        text: significant(on.reference, 5),
        class: "c3",
    }];
    let text = |perplexity: f64, ratio: f64, stderr: f64| {
        format!("{}  ({})", significant(perplexity, 5), moved(ratio, stderr))
    };
    all.push(Bar {
        name: artifact_method(report),
        value: on.ratio - 1.0,
        stderr: on.ratio_stderr,
        text: text(on.artifact, on.ratio, on.ratio_stderr),
        class: "c1",
    });
    if let Some(control) = &on.control {
        all.push(Bar {
            name: format!("{} (control)", control.method),
            value: control.ratio - 1.0,
            stderr: control.ratio_stderr,
            text: text(control.perplexity, control.ratio, control.ratio_stderr),
            class: "c2",
        });
    }
    let title = format!("Perplexity over the reference, {}", on.corpus.name);
    let svg = bars(&format!("perplexity-{i}"), &title, &all);
    Chart { caption: title, note: String::new(), legend: Vec::new(), svg, frame: "bars" }
}

fn histogram(on: &DivergenceOn, bins: &Bins, i: usize) -> Chart {
    let sum = |counts: &[u64]| counts.iter().fold(0u64, |all, count| all.saturating_add(*count));
    let all = sum(&bins.counts).saturating_add(sum(&[bins.below, bins.above, bins.not_finite]));
    let share = |count: u64| count as f64 / all.max(1) as f64;
    // Without the empty ends, but always a decade or more.
    let used = |i: &usize| bins.counts[*i] > 0;
    let first = (0..bins.counts.len()).find(used).unwrap_or(0) / 3 * 3;
    let last = (0..bins.counts.len()).rfind(used).map_or(bins.counts.len(), |last| last + 1);
    let shown = first..last.max(first + 1).min(bins.counts.len()).next_multiple_of(3).min(bins.counts.len());
    // What lies beyond the columns is shown in the outermost ones.
    let count = |i: usize| {
        let below = sum(&bins.counts[..first]).saturating_add(bins.below);
        let above = sum(&bins.counts[shown.end..]).saturating_add(bins.above);
        sum(&[bins.counts[i], if i == first { below } else { 0 }, if i + 1 == shown.end { above } else { 0 }])
    };
    let places: Vec<Place> = shown
        .clone()
        .map(|i| Place { name: String::new(), text: String::new(), value: share(count(i)), class: "c1" })
        .collect();
    let highest = places.iter().map(|place| place.value).fold(0.0, f64::max);
    let (low, high) = (bins.edges[first], bins.edges[shown.end]);
    let at = |value: f64| ((value / low).ln() / (high / low).ln()).clamp(0.0, 1.0);
    let kl = &on.figures.kl;
    let marks: Vec<(f64, &str)> = [(kl.mean, "mean"), (kl.p99_9, "99.9 %")]
        .into_iter()
        .filter(|(value, _)| *value > low && *value < high)
        .map(|(value, name)| (at(value), name))
        .collect();
    let title = format!("Divergence of {} tokens, {}", grouped(all), on.corpus.name);
    let description = format!(
        "Histogram on a logarithmic axis from {} to {} nats. Median {}, mean {}, 99 % below {}, 99.9 % below {} nats.",
        significant(low, 1),
        significant(high, 1),
        significant(kl.median, 3),
        significant(kl.mean, 3),
        significant(kl.p99, 3),
        significant(kl.p99_9, 3)
    );
    let show = |value: f64| percent(value, 0);
    let id = format!("divergence-{i}");
    let mut svg = columns(&id, (&title, &description), &places, (highest * 1.05, &show), &marks);
    // Decades below the columns.
    let decades = bins.edges[first..=shown.end].iter().enumerate().step_by(3);
    let every = if shown.len() > 18 { 2 } else { 1 };
    let mut labels = String::new();
    for (i, edge) in decades.step_by(every) {
        let x = 100.0 * i as f64 / shown.len() as f64;
        labels.push_str(&format!("<text class=\"tick middle\" x=\"{x:.2}%\" y=\"198\">{}</text>", decade(*edge)));
    }
    svg.insert_str(svg.len() - "</svg>".len(), &labels);
    Chart { caption: format!("{title} (nats)"), note: String::new(), legend: Vec::new(), svg, frame: "plot" }
}

/// A power of ten, short.
fn decade(edge: f64) -> String {
    let power = edge.log10().round() as i32;
    if (-3..=3).contains(&power) { significant(edge, 1) } else { format!("1e{power}") }
}

fn modules(report: &Report) -> Option<Chart> {
    let layers = report.modules.iter().filter_map(|module| module.layer).max()?.checked_add(1)?;
    // More layers than any model has are no layers, and would make a chart of empty places.
    if layers > 4 * report.modules.len() + 8 {
        return None;
    }
    let class = |kind: &str| match kind {
        _ if kind.contains("down") || kind.contains("fc2") || kind.contains("w2") => "c2",
        _ if kind.contains("gate") || kind.contains("up") || kind.contains("mlp") || kind.contains("fc1") => "c3",
        _ => "c1",
    };
    let all: Vec<Dot> = report
        .modules
        .iter()
        .filter_map(|module| {
            let words = format!("{}: {}", module.module, significant(module.output_error, 3));
            Some((module.layer?, module.output_error, class(&module.kind), words))
        })
        .collect();
    let mut sorted: Vec<f64> = all.iter().map(|dot| dot.1).collect();
    sorted.sort_by(f64::total_cmp);
    let worst = report.modules.iter().max_by(|a, b| a.output_error.abs().total_cmp(&b.output_error.abs()))?;
    let description = format!(
        "{} modules in {layers} layers on a logarithmic axis. Median {}; largest {}, {}.",
        all.len(),
        significant(sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN), 3),
        significant(worst.output_error, 3),
        worst.module
    );
    let title = "Relative output error by layer";
    let kinds = |wanted: &str| {
        let mut names: Vec<&str> = Vec::new();
        for module in report.modules.iter().filter(|module| module.layer.is_some()) {
            if class(&module.kind) == wanted && !names.contains(&module.kind.as_str()) {
                names.push(&module.kind);
            }
        }
        names.join(", ")
    };
    let legend = ["c1", "c3", "c2"].map(|class| (class.to_string(), kinds(class)));
    let legend = legend.into_iter().filter(|(_, names)| !names.is_empty()).collect();
    let svg = dots("modules-0", title, &description, layers, &all);
    Some(Chart { caption: title.into(), note: String::new(), legend, svg, frame: "plot wide" })
}

fn caches(kind: &CacheFigures, i: usize) -> Vec<Chart> {
    let Some(errors) = &kind.errors else { return Vec::new() };
    let parts = [("keys", &errors.keys), ("values", &errors.values), ("attention", &errors.output)];
    let chart = |(name, grid): (&str, &Vec<Vec<f64>>)| {
        let title = format!("{}: {name}", cache_name(kind));
        let (mut worst, mut place) = (0.0f64, (0, 0));
        for (layer, row) in grid.iter().enumerate() {
            for (head, error) in row.iter().enumerate() {
                if error.abs().total_cmp(&worst).is_gt() {
                    (worst, place) = (error.abs(), (layer, head));
                }
            }
        }
        let description = format!(
            "Relative error by layer (across, {}) and key-value head (down, {}). Largest {}, layer {}, head {}.",
            grid.len(),
            grid.first().map_or(0, Vec::len),
            significant(worst, 3),
            place.0,
            place.1
        );
        let svg = heat(&format!("cache-{i}-{name}"), &title, &description, grid);
        let most = largest(grid).map_or(String::new(), |most| format!("largest {}", percent(most, 1)));
        Chart { caption: title, note: most, legend: Vec::new(), svg, frame: "plot heat" }
    };
    parts.into_iter().filter(|(_, grid)| !grid.is_empty()).map(chart).collect()
}

/// The legend that all heat maps of a section share.
pub fn legend(section: &str, charts: &[Chart]) -> Vec<(String, String)> {
    if section == "cache" && !charts.is_empty() { heat_legend() } else { Vec::new() }
}

fn positions(pair: &Acceptance, i: usize) -> Option<Chart> {
    let places: Vec<Place> = pair
        .per_position
        .iter()
        .enumerate()
        .map(|(i, share)| {
            let text = if share.is_finite() { format!("{:.0} %", 100.0 * share) } else { String::new() };
            Place { name: (i + 1).to_string(), text, value: *share, class: "c1" }
        })
        .collect();
    let title = format!("Accepted by position: {}", pair_name(pair));
    let said: Vec<String> = pair.per_position.iter().map(|share| percent(*share, 1)).collect();
    let description = format!(
        "Share of steps in which at least so many drafted tokens were accepted, from 1 on: {}.",
        said.join(", ")
    );
    let id = format!("positions-{i}");
    let svg = columns(&id, (&title, &description), &places, (1.0, &|share| percent(share, 0)), &[]);
    (!places.is_empty()).then_some(Chart {
        caption: title,
        note: String::new(),
        legend: Vec::new(),
        svg,
        frame: "plot",
    })
}

fn speed(pair: &Acceptance, i: usize) -> Option<Chart> {
    let names: Vec<String> = pair.speedups.iter().map(|row| row.k.to_string()).collect();
    let measured: Vec<Option<f64>> = pair.speedups.iter().map(|row| row.measured).collect();
    let any = measured.iter().any(Option::is_some);
    let mut all = vec![Line { class: "c3", values: pair.speedups.iter().map(|row| Some(row.expected)).collect() }];
    let mut legend = vec![("c3".to_string(), "expected".to_string())];
    if any {
        all.push(Line { class: "c1", values: measured });
        legend.push(("c1".into(), "measured".into()));
    }
    let title = format!("Times as fast as plain decoding, by drafted tokens: {}", pair_name(pair));
    let show = |value: f64| significant(value, 2);
    let said = pair.speedups.iter().map(|row| {
        let measured = row.measured.map(|times| format!(", measured {}", show(times))).unwrap_or_default();
        format!("k {}: expected {}{measured}", row.k, show(row.expected))
    });
    let description = format!("{}.", said.collect::<Vec<_>>().join("; "));
    let svg = lines(&format!("speed-{i}"), (&title, &description), &names, &all, (&[], Some(1.0), 0.0), &show);
    (!names.is_empty()).then_some(Chart { caption: title, note: String::new(), legend, svg, frame: "plot" })
}

/// A trend of one figure over many reports.
pub fn trend(id: &str, title: &str, names: &[String], values: &[Option<f64>], cuts: &[usize], unit: Unit) -> Chart {
    let known: Vec<(usize, f64)> = values.iter().enumerate().filter_map(|(i, value)| Some((i, (*value)?))).collect();
    let description = match (known.first(), known.last()) {
        (Some(first), Some(last)) => {
            let (from, to) = (unit.show(first.1), unit.show(last.1));
            format!("From {from} in {} to {to} in {}.", names[first.0], names[last.0])
        }
        _ => "Not measured.".into(),
    };
    // Percentages that hardly move are not blown up to fill the chart.
    let least = if matches!(unit, Unit::Share | Unit::Change) { 0.002 } else { 0.0 };
    let show = |value: f64| match unit {
        Unit::Share => percent(value, 1),
        Unit::Change => change(value, 1),
        Unit::Nats => significant(value, 3),
        _ => unit.show(value),
    };
    let line = Line { class: "c1", values: values.to_vec() };
    let svg = lines(id, (title, &description), names, &[line], (cuts, None, least), &show);
    let note = if unit == Unit::Nats { "nats".into() } else { String::new() };
    Chart { caption: title.into(), note, legend: Vec::new(), svg, frame: "plot trend" }
}

/// A change from the first to the last, for a table.
pub fn relative(first: f64, last: f64) -> String {
    if first == 0.0 { String::new() } else { change(last / first - 1.0, 1) }
}
