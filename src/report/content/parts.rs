//! The later sections: what was measured in parts, and where all comes from.

use super::{Section, capital, corpora, describe, moved};
use crate::evaluate::cache_error::CacheErrors;
use crate::integrity::Fate;
use crate::num::size::shown;
use crate::report::Report;
use crate::report::number::{Unit, grouped, percent, significant};
use crate::report::sections::{
    Acceptance, Accounting, CacheFigures, ModuleError, Role, ScaleSource, Share, Speedup, TokensSeen,
};
use crate::report::table::{Column, Table};

/// Modules that are named as the worst.
const WORST: usize = 10;

pub fn modules(report: &Report) -> Option<Section> {
    let mut section = Section::new("modules", "Error by module");
    let on = report.module_corpus.as_ref().map(|on| format!(", on {} tokens of {}", grouped(on.tokens), on.name));
    section.lead.push(format!(
        "Relative error of what each module puts out, ‖got − wanted‖ / ‖wanted‖{}.",
        on.unwrap_or_default()
    ));
    let columns = [
        ("module", Column::Code),
        ("output error", Column::Number),
        ("weight error", Column::Number),
        ("bits", Column::Number),
    ];
    let cells = |module: &ModuleError| {
        let of = |value: Option<f64>, digits| value.map(|value| significant(value, digits)).unwrap_or_default();
        let output = significant(module.output_error, 3);
        [module.module.clone(), output, of(module.weight_error, 3), of(module.bits, 3)]
    };
    let mut worst: Vec<_> = report.modules.iter().collect();
    // Not finite is the worst.
    worst.sort_by(|a, b| b.output_error.abs().total_cmp(&a.output_error.abs()));
    let mut table = Table::new(format!("The {} modules with the largest error", WORST.min(worst.len())), &columns);
    worst.iter().take(WORST).for_each(|module| table.row(cells(module)));
    section.tables.push(table.trimmed());
    if worst.len() > WORST {
        let mut table = Table { long: true, ..Table::new(format!("All {} modules", worst.len()), &columns) };
        report.modules.iter().for_each(|module| table.row(cells(module)));
        section.tables.push(table.trimmed());
    }
    (!report.modules.is_empty()).then_some(section)
}

/// The type and where its scales come from.
pub fn cache_name(kind: &CacheFigures) -> String {
    let scales = match kind.scales {
        ScaleSource::Unit => ", scale 1.0",
        ScaleSource::Calibrated => ", calibrated",
        ScaleSource::Proposed => ", proposed",
        ScaleSource::ProposedPerHead => ", proposed by head",
        ScaleSource::Dynamic => ", by token",
        ScaleSource::None => "",
    };
    format!("{}{scales}", kind.kind)
}

pub fn cache(report: &Report) -> Option<Section> {
    let cache = report.cache.as_ref()?;
    let mut section = Section::new("cache", "Key-value cache");
    section.lead.push(format!(
        "The artifact with reduced caches, held against its own predictions with a cache of {} (perplexity {}), on {} \
         tokens of {}.",
        cache.baseline,
        significant(cache.baseline_perplexity, 5),
        grouped(cache.corpus.tokens),
        cache.corpus.name
    ));
    let columns = [
        ("cache", Column::Text),
        ("perplexity", Column::Number),
        ("mean KL", Column::Number),
        ("greedy agreement", Column::Number),
        ("largest error of keys", Column::Number),
        ("of values", Column::Number),
        ("of attention", Column::Number),
        ("per token", Column::Number),
    ];
    let mut table = Table::new("Caches by type", &columns);
    for kind in &cache.types {
        let largest = |grid: fn(&CacheErrors) -> &Vec<Vec<f64>>| {
            kind.errors.as_ref().and_then(|errors| largest(grid(errors))).map(|x| significant(x, 3)).unwrap_or_default()
        };
        table.row([
            cache_name(kind),
            moved(kind.ratio, kind.ratio_stderr),
            Unit::Nats.show(kind.mean_kl),
            percent(kind.greedy_agreement, 2),
            largest(|errors| &errors.keys),
            largest(|errors| &errors.values),
            largest(|errors| &errors.output),
            shown(kind.bytes_per_token),
        ]);
    }
    section.tables.push(table.trimmed());
    for kind in &cache.types {
        let Some(errors) = &kind.errors else { continue };
        let columns = [
            ("layer", Column::Number),
            ("keys", Column::Number),
            ("values", Column::Number),
            ("attention", Column::Number),
        ];
        let caption = format!("Errors by layer and head, {}", cache_name(kind));
        let mut table = Table { long: true, ..Table::new(caption, &columns) };
        let row = |row: &[f64]| row.iter().map(|x| significant(*x, 2)).collect::<Vec<_>>().join(" ");
        for (layer, ((keys, values), output)) in errors.keys.iter().zip(&errors.values).zip(&errors.output).enumerate()
        {
            table.row([layer.to_string(), row(keys), row(values), row(output)]);
        }
        section.tables.push(table);
    }
    section.tables.push(corpora("How caches were measured", std::iter::once(&cache.corpus)));
    (!cache.types.is_empty()).then_some(section)
}

/// The largest number of a grid; NaN before all.
pub fn largest(grid: &[Vec<f64>]) -> Option<f64> {
    grid.iter().flatten().copied().max_by(|a, b| a.abs().total_cmp(&b.abs()))
}

/// The pair in words.
pub fn pair_name(pair: &Acceptance) -> String {
    match pair.role {
        Role::Target => format!("this artifact verifies what {} drafts", pair.draft),
        Role::Draft => format!("this artifact drafts for {}", pair.target),
    }
}

pub fn acceptance(report: &Report) -> Option<Section> {
    let mut section = Section::new("acceptance", "Speculative decoding");
    section.lead.push(
        "A draft model proposes, the target verifies in one pass. Alpha is the mean of Σ min(p, q) over a text: what \
         rejection sampling accepts, without sampling."
            .into(),
    );
    let columns = [
        ("pair", Column::Text),
        ("k", Column::Number),
        ("temperature", Column::Number),
        ("rate", Column::Number),
        ("mean length", Column::Number),
        ("alpha", Column::Number),
        ("greedy agreement", Column::Number),
        ("draft's cost", Column::Number),
        ("tokens in loops", Column::Number),
    ];
    let mut table = Table::new("Acceptance", &columns);
    let error = |of: Option<f64>| of.map(|error| format!(" ± {}", significant(error, 2))).unwrap_or_default();
    for pair in &report.acceptance {
        table.row([
            capital(&pair_name(pair)),
            pair.k.to_string(),
            significant(pair.temperature, 2),
            format!("{} ± {}", percent(pair.rate, 1), significant(100.0 * pair.rate_stderr, 2)),
            significant(pair.mean_length, 3),
            format!("{}{}", significant(pair.alpha, 3), error(pair.alpha_stderr)),
            pair.greedy_agreement.map(|share| percent(share, 1)).unwrap_or_default(),
            pair.cost.map(|cost| significant(cost, 2)).unwrap_or_default(),
            format!("{} of {}", pair.looped_tokens, pair.tokens),
        ]);
        section.lead.push(format!("{}: {}.", capital(&pair_name(pair)), honest(pair)));
    }
    section.tables.push(table.trimmed());
    for pair in &report.acceptance {
        let columns = [("position", Column::Number), ("accepted up to here", Column::Number)];
        let caption = format!("By position: {}", pair_name(pair));
        let mut table = Table { long: true, ..Table::new(caption, &columns) };
        let positions = pair.per_position.iter().enumerate();
        positions.for_each(|(i, share)| table.row([(i + 1).to_string(), percent(*share, 1)]));
        section.tables.push(table);
        let columns = [
            ("k", Column::Number),
            ("expected length", Column::Number),
            ("measured length", Column::Number),
            ("expected speed-up", Column::Number),
            ("measured speed-up", Column::Number),
        ];
        let mut table = Table { long: true, ..Table::new(format!("By k: {}", pair_name(pair)), &columns) };
        for row in &pair.speedups {
            let of = |value: Option<f64>| value.map(|value| significant(value, 3)).unwrap_or_default();
            let (length, expected) = (significant(row.expected_length, 3), significant(row.expected, 3));
            table.row([row.k.to_string(), length, of(row.measured_length), expected, of(row.measured)]);
        }
        section.tables.push(table.trimmed());
    }
    (!report.acceptance.is_empty()).then_some(section)
}

/// Whether drafting is worth it.
pub fn honest(pair: &Acceptance) -> String {
    let best = |of: fn(&Speedup) -> Option<f64>| {
        let all = pair.speedups.iter().filter_map(|row| of(row).map(|times| (row.k, times)));
        all.max_by(|a, b| a.1.total_cmp(&b.1))
    };
    let times = |(k, times): (usize, f64)| {
        let tokens = if k == 1 { "token" } else { "tokens" };
        format!("{} times as fast with {k} drafted {tokens}", significant(times, 3))
    };
    match (best(|row| row.measured), best(|row| Some(row.expected))) {
        (Some(best), _) if best.1 > 1.0 => format!("measured at best {}", times(best)),
        (Some(best), _) => format!("slower than plain decoding for every k that was measured; at best {}", times(best)),
        (None, Some(best)) if best.1 > 1.0 => format!("expected at best {}; no speed was measured", times(best)),
        (None, Some(_)) => "expected to be slower than plain decoding for every k; no speed was measured".into(),
        (None, None) => "no speed was measured".into(),
    }
}

/// Bits of a quantized weight after `lead`; nothing where there are none.
pub fn of_quantized(all: &Accounting, lead: &str) -> String {
    let bits = all.bits_per_quantized_weight;
    bits.map(|bits| format!("{lead}{} of the quantized ones", significant(bits, 3))).unwrap_or_default()
}

pub fn accounting(report: &Report) -> Option<Section> {
    let all = report.accounting.as_ref()?;
    let mut section = Section::new("accounting", "Accounting");
    section.lead.push(format!(
        "{} of weights became {}: {} bits per weight{}. Loaded, they occupy {}.",
        shown(all.source_bytes as f64),
        shown(all.artifact_bytes as f64),
        significant(all.bits_per_weight, 3),
        of_quantized(all, ", "),
        shown(all.weights_memory_bytes as f64)
    ));
    let columns = [
        ("source tensors", Column::Text),
        ("tensors", Column::Number),
        ("parameters", Column::Number),
        ("bytes before", Column::Number),
        ("after", Column::Number),
    ];
    let mut table = Table::new("What became of the source", &columns);
    let shares = [
        ("quantized", &all.quantized),
        ("copied", &all.copied),
        ("folded", &all.folded),
        ("dropped", &all.dropped),
        ("missing", &all.missing),
    ];
    for (name, share) in shares {
        let Share { tensors, parameters, source_bytes, artifact_bytes } = *share;
        let (before, after) = (shown(source_bytes as f64), shown(artifact_bytes as f64));
        table.row([name.to_string(), tensors.to_string(), grouped(parameters), before, after]);
    }
    section.tables.push(table);
    if !all.exceptions.is_empty() {
        let columns = [("tensor", Column::Code), ("became", Column::Text), ("reason", Column::Text)];
        let mut table = Table::new("Exceptions", &columns);
        table.long = all.exceptions.len() > WORST;
        for exception in &all.exceptions {
            table.row([exception.tensor.as_str(), fate(exception.fate), &exception.note]);
        }
        section.tables.push(table);
    }
    if !all.tokens_seen.is_empty() {
        section.tables.push(tokens_seen(&all.tokens_seen));
    }
    if !all.cache_memory.is_empty() {
        let columns = [("cache", Column::Text), ("per token", Column::Number), ("2048 tokens", Column::Number)];
        let mut table = Table::new("Memory of the cache", &columns);
        for cache in &all.cache_memory {
            let of = |tokens: f64| shown(cache.bytes_per_token * tokens);
            table.row([cache.kind.clone(), of(1.0), of(2048.0)]);
        }
        section.tables.push(table);
    }
    Some(section)
}

/// Modules of one kind and width in a row: they differ in nothing but their block.
fn tokens_seen(all: &[TokensSeen]) -> Table {
    let columns = [
        ("modules", Column::Code),
        ("how many", Column::Number),
        ("inputs", Column::Number),
        ("tokens seen", Column::Number),
    ];
    let mut rows: Vec<(&str, u64, Vec<u64>)> = Vec::new();
    for TokensSeen { module, inputs, tokens } in all {
        let kind = module.rsplit('.').next().unwrap_or(module);
        match rows.iter_mut().find(|(other, width, _)| *other == kind && width == inputs) {
            Some((_, _, seen)) => seen.push(*tokens),
            None => rows.push((kind, *inputs, vec![*tokens])),
        }
    }
    let mut table = Table::new("What calibration saw", &columns);
    for (kind, inputs, seen) in rows {
        let (least, most) = (seen.iter().min().copied().unwrap_or(0), seen.iter().max().copied().unwrap_or(0));
        let range = if least == most { grouped(least) } else { format!("{} to {}", grouped(least), grouped(most)) };
        table.row([kind.to_string(), seen.len().to_string(), grouped(inputs), range]);
    }
    table
}

fn fate(fate: Fate) -> &'static str {
    match fate {
        Fate::Quantized => "quantized",
        Fate::Copied => "copied",
        Fate::Folded => "folded",
        Fate::Dropped => "dropped",
        Fate::Missing => "missing",
        Fate::Changed => "changed",
        Fate::Added => "added",
    }
}

pub fn consumers(report: &Report) -> Option<Section> {
    let mut section = Section::new("consumers", "Who loads it");
    let mut table =
        Table::new("Engines", &[("engine", Column::Text), ("loads it", Column::Text), ("why not", Column::Text)]);
    for consumer in &report.consumers {
        let loads = if consumer.loads { "yes" } else { "no" };
        table.row([consumer.title.as_str(), loads, &consumer.refusals.join("; ")]);
    }
    section.tables.push(table.trimmed());
    (!report.consumers.is_empty()).then_some(section)
}

pub fn provenance(report: &Report) -> Option<Section> {
    let mut section = Section::new("provenance", "Provenance");
    let label = report.label.as_ref().map(|label| format!(" as {label}")).unwrap_or_default();
    section.lead.push(format!(
        "Measured by {} on {}{label} in {}.",
        report.tool,
        report.device,
        Unit::Seconds.show(report.seconds)
    ));
    if let Some(calibration) = &report.calibration {
        let tokens = calibration.tokens.map(|n| format!(", {} tokens", grouped(n))).unwrap_or_default();
        let hash = calibration.tokens_sha256.chars().take(12).collect::<String>();
        section.lead.push(format!("Calibrated on {}{tokens} (SHA-256 {hash}).", calibration.description));
    }
    for reading in &report.artifact.inputs {
        section.lead.push(format!("Inputs of the artifact's linears are rounded: {reading}."));
    }
    let columns = [
        ("model", Column::Text),
        ("name", Column::Code),
        ("what", Column::Text),
        ("SHA-256 over its files", Column::Code),
    ];
    let mut table = Table::new("Models", &columns);
    let models = [
        ("artifact", Some(&report.artifact)),
        ("reference", report.reference.as_ref()),
        ("draft", report.draft.as_ref()),
    ];
    for (part, identity) in models.into_iter().filter_map(|(part, identity)| Some((part, identity?))) {
        table.row([part.to_string(), identity.name.clone(), describe(identity), identity.sha256.clone()]);
    }
    section.tables.push(table);
    if let Some(options) = report.artifact.options.as_ref().and_then(|options| options.as_object()) {
        let mut table =
            Table::new("Options that made the artifact", &[("option", Column::Code), ("value", Column::Code)]);
        table.long = true;
        for (key, value) in options {
            table.row([key.clone(), value.as_str().map_or_else(|| value.to_string(), str::to_owned)]);
        }
        section.tables.push(table);
    }
    Some(section)
}
