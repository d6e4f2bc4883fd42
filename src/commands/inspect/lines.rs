//! The facts for people.

use super::facts::{Against, Architecture, Facts, SchemeFacts};
use crate::format::kind::KvScales;
use crate::num::size::bytes;

fn symmetry(symmetric: bool) -> &'static str {
    if symmetric { "symmetric" } else { "asymmetric" }
}

/// The facts for people.
pub fn lines(facts: &Facts) -> Vec<String> {
    let mut out = Vec::new();
    let mut line = |name: &str, text: String| out.push(format!("{name:<14} {text}"));
    let files = match &facts.files[..] {
        [one] => one.file.clone(),
        all => format!("{} files", all.len()),
    };
    line("format", format!("{}: {files}, {}", facts.format, bytes(facts.bytes)));
    line(
        "method",
        match (&facts.method, &facts.variant) {
            (Some(method), variant) if facts.layout.as_ref().is_some_and(|layout| layout != method) => {
                let variant = variant.as_ref().map_or(String::new(), |variant| format!(" ({variant})"));
                format!("{method}, stored as {}{variant}", facts.layout.as_deref().unwrap_or_default())
            }
            (Some(method), Some(variant)) => format!("{method} ({variant})"),
            (Some(one), None) => one.clone(),
            (None, Some(variant)) => format!("none, plain floats ({variant})"),
            (None, None) => "none, plain floats".into(),
        },
    );
    let mut scheme = Vec::new();
    scheme.extend(facts.bits.map(|bits| format!("{bits} bits")));
    scheme.extend(facts.group_size.map(|size| format!("group size {size}")));
    scheme.extend(facts.symmetric.map(|sym| symmetry(sym).to_string()));
    let mixed = facts.schemes.as_deref().filter(|all| all.len() > 1).unwrap_or_default();
    let sum: u64 = mixed.iter().map(|scheme| scheme.weights).sum();
    let share = |scheme: &SchemeFacts| match sum {
        0 => format!("{} modules", scheme.modules),
        _ => format!(
            "{:.1} % of their weights in {} modules",
            100.0 * scheme.weights as f64 / sum as f64,
            scheme.modules
        ),
    };
    scheme.extend(mixed.first().map(share));
    if !scheme.is_empty() {
        line("scheme", scheme.join(", "));
    }
    for other in mixed.iter().skip(1) {
        let SchemeFacts { bits, group_size, symmetric, .. } = other;
        line("  others", format!("{bits} bits, group size {group_size}, {}, {}", symmetry(*symmetric), share(other)));
    }
    for reading in facts.inputs.iter().flatten() {
        line("inputs", reading.clone());
    }
    if let (Some(count), Some(bits)) = (facts.parameters, facts.bits_per_weight) {
        line("parameters", format!("{:.1} M, {bits:.2} bits each", count as f64 / 1e6));
    }
    if let (Some(count), Some(bits)) = (facts.quantized_parameters, facts.bits_per_quantized_weight) {
        line("  quantized", format!("{:.1} M, {bits:.2} bits each", count as f64 / 1e6));
    }
    let Architecture { name, family, .. } = &facts.architecture;
    let name = name.as_deref().unwrap_or("not named");
    line("architecture", family.map_or(name.into(), |family| format!("{name}: {family}")));
    let a = &facts.architecture;
    let shapes = [
        ("layers", a.layers),
        ("hidden", a.hidden),
        ("intermediate", a.intermediate),
        ("heads", a.heads),
        ("key/value heads", a.kv_heads),
        ("head size", a.head_dim),
        ("vocabulary", a.vocab),
        ("positions", a.positions),
    ];
    let shapes: Vec<String> = shapes.iter().filter_map(|(name, n)| n.map(|n| format!("{name} {n}"))).collect();
    if !shapes.is_empty() {
        line("shapes", shapes.join(", "));
    }
    line("runs here", if facts.runs { "yes" } else { "no" }.into());
    for tensors in &facts.tensors {
        line("tensors", format!("{} {}, {}", tensors.count, tensors.kind, bytes(tensors.bytes)));
    }
    line("tokenizer", facts.tokenizer.clone().unwrap_or_else(|| "none".into()));
    line(
        "chat template",
        match (facts.chat_template, &facts.chat_template_places[..]) {
            (false, []) => "none".into(),
            (_, places) => places.join(", "),
        },
    );
    if let Some(cache) = &facts.kv_cache {
        let shared = if cache.scales == KvScales::Head { "one a head" } else { "one a layer" };
        let range = |range: Option<[f32; 2]>| range.map_or("none".into(), |[low, high]| format!("{low} to {high}"));
        let (keys, values) = (range(cache.keys), range(cache.values));
        line("cache scales", format!("{shared}, {} layers; keys {keys}, values {values}", cache.layers));
    }
    if let Some(manifest) = &facts.manifest {
        let calibration = manifest.calibration.as_deref().unwrap_or("no calibration");
        line("made by", format!("{}; {calibration}", manifest.tool));
    }
    if let Some(found) = &facts.verification {
        let text = match (&found.mismatches[..], found.against) {
            (all @ [_, ..], _) => all.join("; "),
            ([], Against::Manifest) => format!("all {} files are as the manifest says", found.files),
            ([], Against::Structure) if facts.damage.is_empty() => format!(
                "no hashes to compare with; the structure of {} files is sound: headers, sizes, shapes, finite numbers",
                found.files
            ),
            ([], Against::Structure) => "no hashes to compare with; the structure is damaged".into(),
        };
        line("verification", text);
    }
    facts.damage.iter().for_each(|damage| line("damaged", damage.clone()));
    for consumer in facts.consumers.iter().flatten() {
        let answer = if consumer.loads { "loads it".into() } else { consumer.refusals.join("; ") };
        line("consumer", format!("{}: {answer}", consumer.title));
    }
    for (key, value) in facts.metadata.iter().flatten() {
        let text = value.as_str().map_or(value.to_string(), |text| text.replace(['\n', '\r'], " "));
        line("metadata", format!("{key} = {text}"));
    }
    out
}
