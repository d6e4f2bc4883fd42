//! Labels against contents: what configs say of the artifact, and whether it is so.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{Findings, Side};
use crate::checkpoint::Checkpoint;
use crate::format::Opened;
use crate::format::config::{self, Found};
use crate::format::gptq::{GptqSource, ZeroPoints};
use crate::model::config::ModelConfig;
use crate::pack::gptq::{Version, zero_points};
use crate::tensor::bytes_to_words;

/// What the artifact's quantization config says, and what readers wondered at.
pub fn check(opened: &Opened, reference: &Checkpoint, findings: &mut Findings) {
    let checkpoint = opened.source.checkpoint();
    if opened.method.is_none() && reference.dir() != checkpoint.dir() {
        findings.warn("config.quantization", "the artifact is not quantized: its config names no method");
    }
    if let Ok(Some(found)) = config::find(checkpoint)
        && found.method == "gptq"
    {
        gptq(checkpoint, &found, findings);
    }
    let gptq = opened.method == Some("gptq");
    // What GPTQ's reader wonders at in zero points has been told module by module.
    for warning in opened.warnings.iter().filter(|w| !(gptq && w.contains("zero points"))) {
        findings.warn("config.quantization", warning);
    }
    findings.otherwise(
        "config.quantization",
        format!("the labels fit what is stored ({})", opened.method.unwrap_or("plain floats")),
    );
}

/// Zero points of symmetric GPTQ modules, which can be only one thing in each version.
fn gptq(checkpoint: &Checkpoint, found: &Found, findings: &mut Findings) {
    const ID: &str = "zeros";
    let label = ["checkpoint_format", "format"].into_iter().find_map(|key| found.value.get(key)?.as_str());
    let label = label.and_then(Version::parse).unwrap_or(Version::V1);
    let Ok(again) = Checkpoint::open(checkpoint.dir()) else { return };
    let Ok(source) = GptqSource::open(again, found) else { return };
    let modules = source.modules();
    let contradicting: Vec<&String> =
        modules.iter().filter(|(_, m)| m.zeros == ZeroPoints::Contradict).map(|(name, _)| name).collect();
    if let Some(first) = contradicting.first() {
        let other = if label == Version::V1 { Version::V2 } else { Version::V1 };
        findings.fail(
            ID,
            format!(
                "`checkpoint_format` says `{}`, but the zero points of {} of {} modules (first `{first}`) are stored as \
                 `{}`: a reader that believes the label shifts every weight by one step; set `checkpoint_format` to \
                 `{}`",
                label.name(),
                contradicting.len(),
                modules.len(),
                other.name(),
                other.name()
            ),
        );
    }
    let mixed = modules.iter().filter(|(_, stored)| stored.zeros == ZeroPoints::Mixed).map(|(name, stored)| {
        let Some(entry) = checkpoint.tensors().get(&format!("{name}.qzeros")) else { return name.clone() };
        let zeros = zero_points(&bytes_to_words(&entry.bytes), stored.rows, stored.scheme.bits, stored.version);
        let middle = stored.scheme.middle();
        let wrong = zeros.iter().filter(|&&zero| zero != middle).count();
        let at = zeros.iter().position(|&zero| zero != middle).unwrap_or(0);
        format!(
            "`{name}`: the config says symmetric, which makes every zero point {middle}, but {wrong} of {} are not (that \
             of output {} in group {} is {}): quantize the module again",
            zeros.len(),
            at % stored.rows,
            at / stored.rows,
            zeros[at]
        )
    });
    findings.fail_each(ID, mixed.collect());
    let symmetric = modules.values().filter(|stored| stored.scheme.sym).count();
    findings.otherwise(ID, format!("{symmetric} symmetric modules have the zero points of `{}`", label.name()));
}

/// Configs against the tensors beside them: heads and biases that a config does not mention, and tensors that are not
/// read.
pub fn tensors(artifact: &Side, reference: &Side, findings: &mut Findings) {
    const ID: &str = "config.tensors";
    const UNREAD: &str = "tensors.unread";
    for (name, side) in [("artifact", artifact), ("reference", reference)] {
        for warning in side.checkpoint().notes().iter().chain(&side.config.warnings) {
            findings.warn(ID, format!("the {name}: {warning}"));
        }
        if let Some(unread) = side.config.unread(side.checkpoint(), side.opened.method.is_none()) {
            findings.warn(UNREAD, format!("the {name}: {unread}"));
        }
    }
    findings.otherwise(ID, "output head and biases are as the configs say");
    findings.otherwise(UNREAD, "all tensors are read");
}

/// The shapes and constants of the artifact's config against the reference's.
pub fn compare(artifact: &Side, reference: &Side, findings: &mut Findings) {
    const ID: &str = "config";
    let facts = |c: &ModelConfig| {
        [
            ("family", Value::from(c.family.model_type)),
            ("layers", c.layers.len().into()),
            ("hidden size", c.hidden.into()),
            ("intermediate size", c.intermediate.into()),
            ("heads", c.heads.into()),
            ("key/value heads", c.kv_heads.into()),
            ("head size", c.head_dim.into()),
            ("vocabulary", c.vocab.into()),
            ("norm epsilon", f64::from(c.eps).into()),
            ("attention scale", f64::from(c.attention_scale).into()),
            ("tied embeddings", c.tied.into()),
            ("sliding windows", c.layers.iter().map(|l| l.window.unwrap_or(0)).collect::<Vec<_>>().into()),
        ]
    };
    for ((what, own), (_, wanted)) in facts(artifact.config).into_iter().zip(facts(reference.config)) {
        if own != wanted {
            findings.fail(
                ID,
                format!("{what}: {own} in the artifact's config, {wanted} in the reference's; take the reference's"),
            );
        }
    }
    let frequencies = |c: &ModelConfig| -> Vec<f32> {
        c.layers.iter().filter_map(|l| c.ropes.get(l.rope)).flat_map(|r| r.inv_freq.iter().copied()).collect()
    };
    let (own, wanted) = (frequencies(artifact.config), frequencies(reference.config));
    let same = own.len() == wanted.len()
        && own.iter().zip(&wanted).all(|(a, b)| (a - b).abs() <= 1e-4 * b.abs().max(f32::MIN_POSITIVE));
    if !same {
        findings.fail(
            ID,
            "rotary frequencies are not those of the reference: take `rope_theta` and `rope_scaling` from its config",
        );
    }
    let positions = [artifact.config.max_positions, reference.config.max_positions];
    if positions[0] != positions[1] {
        findings.warn(
            ID,
            format!("the artifact says that it reads {} positions, the reference {}", positions[0], positions[1]),
        );
    }
    special_ids(artifact, reference, findings);
    findings.otherwise(ID, "shapes, constants and special tokens are those of the reference");
}

/// The special tokens that `config.json` names: engines begin and end texts with them.
fn special_ids(artifact: &Side, reference: &Side, findings: &mut Findings) {
    const ID: &str = "config";
    let ids = |side: &Side, key: &str| -> BTreeSet<u64> {
        let config = side.checkpoint().config();
        let found = |config: &Value| config.get(key).filter(|value| !value.is_null()).cloned();
        // Multimodal models have them in the part that is the language model.
        match found(config).or_else(|| found(config.get("text_config")?)) {
            Some(Value::Array(list)) => list.iter().filter_map(Value::as_u64).collect(),
            Some(value) => value.as_u64().into_iter().collect(),
            None => BTreeSet::new(),
        }
    };
    let assembled = artifact.checkpoint().is_assembled() || reference.checkpoint().is_assembled();
    for key in ["bos_token_id", "eos_token_id", "pad_token_id"] {
        let (own, wanted) = (ids(artifact, key), ids(reference, key));
        // A GGUF file holds one of each, and takes those from the tokenizer that a config leaves out.
        let apart = own.is_disjoint(&wanted) && !own.is_empty() && !wanted.is_empty();
        if own == wanted || assembled && !apart {
            continue;
        }
        let told = |ids: &BTreeSet<u64>| match ids.is_empty() {
            true => "none".to_string(),
            false => ids.iter().map(u64::to_string).collect::<Vec<_>>().join(", "),
        };
        let message = format!(
            "`{key}`: {} in the artifact's config, {} in the reference's; take the reference's",
            told(&own),
            told(&wanted)
        );
        // Padding is masked wherever it stands.
        match assembled || key == "pad_token_id" {
            true => findings.warn(ID, message),
            false => findings.fail(ID, message),
        }
    }
}
