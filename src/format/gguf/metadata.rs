//! The key-value list of a model: what llama.cpp's converter (`convert_hf_to_gguf.py`) writes for it, key by key
//! and in its order. Where a file needs more to say the same as the checkpoint, keys follow that llama.cpp
//! passes over.

use thiserror::Error;

use super::card;
use super::names::{Architecture, NameError, RopeFactors};
use super::tokenizer::{self, Habits, VocabularyError};
use super::value::Metadata;
use crate::checkpoint::{Checkpoint, CheckpointError, KeyError};
use crate::model::config::ModelConfig;
use crate::model::rope::Scaling;

/// `general.quantization_version` of today's block layouts.
pub const QUANTIZATION_VERSION: u32 = 2;

/// Every n-th layer attends to all tokens and the others to a window; 0 where llama.cpp has no windows.
pub(super) fn window_pattern(architecture: &str) -> usize {
    if architecture == "gemma3" { 6 } else { 0 }
}

/// Why a checkpoint has no metadata.
#[derive(Debug, Error)]
pub enum DescribeError {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error(transparent)]
    Vocabulary(#[from] VocabularyError),
    #[error(transparent)]
    Name(#[from] NameError),
}

/// What the file is to say of itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options<'a> {
    /// `general.file_type`: the number of the mixture of types.
    pub file_type: u32,
    /// Parameters of the model; counted if none, which is right where weights are stored as plain floats.
    pub parameters: Option<u64>,
    /// A pre-tokenizer to write, whatever tokenizer.json says.
    pub pre_tokenizer: Option<&'a str>,
}

/// A checkpoint's metadata.
#[derive(Debug)]
pub struct Described {
    pub metadata: Metadata,
    /// The values of the tensor `rope_freqs.weight` (F32), where Llama 3's scaling needs one.
    pub rope_freqs: Option<Vec<f32>>,
    /// What the user should know.
    pub warnings: Vec<String>,
}

/// Describes a checkpoint: `general.*`, hyperparameters, tokenizer.
pub fn describe(checkpoint: &Checkpoint, config: &ModelConfig, options: &Options) -> Result<Described, DescribeError> {
    let arch = Architecture::of(config.family)?;
    let keys = checkpoint.keys();
    let text = keys.object("text_config")?.unwrap_or(keys);
    let mut warnings = Vec::new();
    let mut metadata = Metadata::new();
    metadata.set("general.architecture", arch.name);
    metadata.set("general.type", "model");
    write_general(&mut metadata, checkpoint, config, options)?;

    let mut writer = Writer { metadata: &mut metadata, arch: arch.name };
    writer.number("block_count", config.layers.len());
    writer.number("context_length", config.max_positions);
    writer.number("embedding_length", config.hidden);
    writer.number("feed_forward_length", config.intermediate);
    writer.number("attention.head_count", config.heads);
    writer.number("attention.head_count_kv", config.kv_heads);
    write_rope(&mut writer, config, &mut warnings);
    writer.set("attention.layer_norm_rms_epsilon", config.eps);
    // transformers' configs of all other families have a `head_dim`, stated or not.
    if arch.name != "qwen2" || text.get("head_dim").is_some() || config.head_dim * config.heads != config.hidden {
        writer.number("attention.key_length", config.head_dim);
        writer.number("attention.value_length", config.head_dim);
    }
    writer.metadata.set("general.file_type", options.file_type);
    if arch.name == "llama" {
        writer.number("vocab_size", config.vocab);
        writer.number("rope.dimension_count", 2 * config.ropes[0].inv_freq.len());
    }
    write_attention(&mut writer, arch, config, &mut warnings);
    metadata.set("general.quantization_version", QUANTIZATION_VERSION);

    let habits = Habits {
        rows: config.vocab,
        no_space_prefix: arch.name == "gemma3",
        llama: arch.name == "llama",
        pre: options.pre_tokenizer,
    };
    warnings.extend(tokenizer::write(&mut metadata, checkpoint, &habits)?);
    Ok(Described { metadata, rope_freqs: rope_freqs(config), warnings })
}

/// The values of the tensor `rope_freqs.weight`, if the model needs one.
pub fn rope_freqs(config: &ModelConfig) -> Option<Vec<f32>> {
    let rope = &config.ropes[0];
    let Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original } = rope.scaling else { return None };
    let head_dim = 2 * rope.inv_freq.len();
    let factors = RopeFactors {
        theta: rope.theta,
        head_dim,
        factor,
        low_freq_factor,
        high_freq_factor,
        original_context: original,
    };
    Some(factors.values())
}

/// Sets keys of one architecture.
struct Writer<'a> {
    metadata: &'a mut Metadata,
    arch: &'static str,
}

impl Writer<'_> {
    fn set(&mut self, key: &str, value: impl Into<super::value::Value>) {
        self.metadata.set(format!("{}.{key}", self.arch), value);
    }

    fn number(&mut self, key: &str, value: usize) {
        // Sizes of a config are below 2^24.
        self.set(key, value as u32);
    }
}

fn write_general(
    metadata: &mut Metadata,
    checkpoint: &Checkpoint,
    config: &ModelConfig,
    options: &Options,
) -> Result<(), CheckpointError> {
    card::write_sampling(metadata, &checkpoint.side("generation_config.json")?.keys())?;
    let counted = || {
        let tensors = checkpoint.tensors().iter().filter(|(name, _)| config.reads(name));
        let factors = rope_freqs(config).map_or(0, |f| f.len());
        tensors.map(|(_, entry)| entry.shape.iter().product::<usize>()).sum::<usize>() + factors
    };
    let parameters = options.parameters.unwrap_or_else(|| counted() as u64);
    let card = checkpoint.side_text("README.md").ok().flatten();
    let path = checkpoint.keys().text("_name_or_path")?;
    card::write_origin(metadata, card.as_deref(), path, &folder_name(checkpoint), parameters);
    Ok(())
}

/// The name of the model's folder; for a snapshot in a hub cache that of the model.
fn folder_name(checkpoint: &Checkpoint) -> String {
    let dir = std::path::absolute(checkpoint.dir()).unwrap_or_else(|_| checkpoint.dir().into());
    let name = |path: &std::path::Path| path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let cached = dir.parent().filter(|p| name(p) == "snapshots").and_then(|p| p.parent()).map(name);
    match cached.as_deref().and_then(|n| n.strip_prefix("models--")) {
        Some(id) => id.replacen("--", "/", 1),
        None => name(&dir),
    }
}

fn write_rope(writer: &mut Writer, config: &ModelConfig, warnings: &mut Vec<String>) {
    match config.ropes[0].scaling {
        Scaling::None | Scaling::Llama3 { .. } => {}
        Scaling::Linear { factor } => {
            writer.set("rope.scaling.type", "linear");
            writer.set("rope.scaling.factor", factor as f32);
        }
        Scaling::Yarn(yarn) => {
            writer.set("rope.scaling.type", "yarn");
            writer.set("rope.scaling.factor", yarn.factor as f32);
            writer.set("rope.scaling.original_context_length", yarn.original as u32);
            let numbers = [
                ("yarn_ext_factor", yarn.extrapolation_given.then_some(1.0)),
                ("yarn_attn_factor", yarn.attention_factor.or(yarn.attn_given.then_some(1.0))),
                ("yarn_beta_fast", yarn.beta_fast),
                ("yarn_beta_slow", yarn.beta_slow),
            ];
            for (key, value) in numbers {
                if let Some(value) = value {
                    writer.set(&format!("rope.scaling.{key}"), value as f32);
                }
            }
            if !yarn.truncate || yarn.mscale_all_dim.is_some_and(|m| m != 0.0) {
                warnings.push(
                    "config.json asks for YaRN with `truncate: false` or `mscale_all_dim`, which GGUF does not hold for \
                     this architecture: the file will not compute quite the same"
                        .into(),
                );
            }
        }
    }
    writer.set("rope.freq_base", config.ropes[0].theta as f32);
    if let Some(local) = config.ropes.get(1) {
        writer.set("rope.freq_base_swa", local.theta as f32);
    }
}

/// The scale of attention scores that llama.cpp takes for granted.
pub(super) fn implied_scale(arch: &str, layers: usize, hidden: usize, heads: usize, head_dim: usize) -> f64 {
    // The 27B model, which llama.cpp knows by its depth.
    let dim = if arch == "gemma3" && layers == 62 { hidden / heads } else { head_dim };
    1.0 / (dim as f64).sqrt()
}

/// Windows, caps and scales of attention. What llama.cpp does not know is written all the same, so that the file
/// becomes the same checkpoint again, and told.
fn write_attention(writer: &mut Writer, arch: &Architecture, config: &ModelConfig, warnings: &mut Vec<String>) {
    if let Some(cap) = config.final_softcap {
        writer.set("final_logit_softcapping", cap);
    }
    let windows: Vec<Option<usize>> = config.layers.iter().map(|layer| layer.window).collect();
    if let Some(window) = windows.iter().flatten().next() {
        writer.number("attention.sliding_window", *window);
        let pattern = window_pattern(arch.name);
        let implied = |i: usize| pattern > 0 && !(i + 1).is_multiple_of(pattern);
        if pattern == 0 {
            warnings.push(format!(
                "attention is limited to windows of {window} tokens, which llama.cpp does not do for this architecture: \
                 texts longer than that will compute differently there"
            ));
        }
        let differs = windows.iter().enumerate().any(|(i, w)| w.is_some() != implied(i));
        if differs && !(pattern == 0 && windows.iter().all(Option::is_some)) {
            writer.set("attention.sliding_window_pattern", windows.iter().map(Option::is_some).collect::<Vec<bool>>());
        }
    }
    if let Some(cap) = config.attention_softcap {
        writer.set("attn_logit_softcapping", cap);
        warnings.push("attention scores are capped, which llama.cpp does not do for this architecture".into());
    }
    let implied = implied_scale(arch.name, config.layers.len(), config.hidden, config.heads, config.head_dim);
    if (f64::from(config.attention_scale) / implied - 1.0).abs() > 1e-5 {
        writer.set("attention.scale", config.attention_scale);
        warnings.push(format!(
            "attention scores are scaled by {}, but llama.cpp takes {implied} for this architecture: it will compute \
             differently",
            config.attention_scale
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::families::FAMILIES;

    #[test]
    fn every_family_has_an_architecture() {
        for family in FAMILIES {
            assert!(Architecture::of(family).is_ok(), "{}", family.model_type);
        }
    }

    #[test]
    fn the_27b_model_has_its_own_scale() {
        assert_eq!(implied_scale("gemma3", 62, 5376, 32, 128), 1.0 / 168f64.sqrt());
        assert_eq!(implied_scale("gemma3", 34, 2560, 8, 256), 1.0 / 16.0);
    }
}
