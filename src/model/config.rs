//! `config.json` settled into numbers the engine needs, family defaults filled in.

use std::collections::BTreeSet;

use serde_json::Value;

use super::config_error::ConfigError;
use super::families::{self, Family, Sliding};
use super::rope::{self, Rope};
use crate::backend::Activation;
use crate::checkpoint::{JsonKeys, KeyError};

/// Attention of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerKind {
    /// Tokens a query sees in a sliding layer.
    pub window: Option<usize>,
    /// Which of [`ModelConfig::ropes`] turns it.
    pub rope: usize,
}

/// A decoder in numbers.
#[derive(Clone, Debug)]
pub struct ModelConfig {
    pub family: &'static Family,
    /// Tensor names of the language model start with this.
    pub prefix: &'static str,
    pub hidden: usize,
    pub intermediate: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub vocab: usize,
    pub max_positions: usize,
    pub eps: f32,
    /// Whether the embedding is the output head.
    pub tied: bool,
    pub activation: Activation,
    pub attention_scale: f32,
    pub attention_softcap: Option<f32>,
    pub final_softcap: Option<f32>,
    pub embedding_scale: f32,
    /// Linears that have a bias, by path.
    pub biases: BTreeSet<String>,
    /// Those whose bias is not zero and that the config does not ask for.
    pub unasked: BTreeSet<String>,
    /// Contradictions between tensors and config.
    pub warnings: Vec<String>,
    pub layers: Vec<LayerKind>,
    pub ropes: Vec<Rope>,
}

impl ModelConfig {
    /// The linears of all blocks: path, output channels, input channels.
    pub fn linears(&self) -> Vec<(String, usize, usize)> {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let of_block = [
            ("self_attn.q_proj", q, self.hidden),
            ("self_attn.k_proj", kv, self.hidden),
            ("self_attn.v_proj", kv, self.hidden),
            ("self_attn.o_proj", self.hidden, q),
            ("mlp.gate_proj", self.intermediate, self.hidden),
            ("mlp.up_proj", self.intermediate, self.hidden),
            ("mlp.down_proj", self.hidden, self.intermediate),
        ];
        let named = |i| of_block.map(|(name, rows, cols)| (format!("{}.{name}", self.block_path(i)), rows, cols));
        (0..self.layers.len()).flat_map(named).collect()
    }

    /// Settles a `config.json`. `shape_of` gives the shape of the first tensor whose name starts with a given
    /// text: the multimodal wrappers changed their names over time, and Gemma 3 leaves `vocab_size` unsaid.
    pub fn parse<'a>(json: &Value, shape_of: impl Fn(&str) -> Option<&'a [usize]>) -> Result<Self, ConfigError> {
        let whole = JsonKeys::of("config.json", json);
        let model_type = whole.text("model_type")?.unwrap_or_default();
        let architecture = whole.texts("architectures")?.and_then(|names| names.first().copied());
        if model_type.is_empty() && architecture.is_none() {
            return Err(whole.missing("model_type").into());
        }
        let family = families::find(model_type, architecture)?;
        let keys = whole.object("text_config")?.unwrap_or(whole.clone());
        const PREFIXES: [&str; 3] = ["language_model.model.", "model.language_model.", "model."];
        let prefix = PREFIXES.into_iter().find(|p| shape_of(p).is_some()).unwrap_or("model.");
        let defaults = &family.defaults;

        let hidden = keys.need("hidden_size")?;
        let heads = keys.count("num_attention_heads")?.or(defaults.heads);
        let heads = heads.ok_or_else(|| keys.missing("num_attention_heads"))?;
        let kv_heads = keys.count("num_key_value_heads")?.or(defaults.kv_heads).unwrap_or(heads);
        if heads % kv_heads != 0 {
            let wanted = format!("it must divide num_attention_heads = {heads}");
            return Err(keys.bad("num_key_value_heads", wanted).into());
        }
        let head_dim = match keys.count("head_dim")?.or(defaults.head_dim) {
            Some(dim) => dim,
            None if hidden % heads == 0 => hidden / heads,
            None => {
                let wanted = format!("it is not a multiple of num_attention_heads = {heads}");
                return Err(keys.bad("hidden_size", wanted).into());
            }
        };
        let layer_count = keys.need("num_hidden_layers")?;
        if layer_count > 10_000 {
            return Err(keys.bad("num_hidden_layers", "no known model has that many").into());
        }
        let max_positions = keys.count("max_position_embeddings")?.unwrap_or(defaults.max_positions);
        let activation = match (activation(&keys, "hidden_activation")?, activation(&keys, "hidden_act")?) {
            (Some(one), Some(other)) if one != other => {
                return Err(keys.contradiction("hidden_activation", &keys, "hidden_act").into());
            }
            (Some(one), _) | (None, Some(one)) => one,
            (None, None) => known_activation(defaults.activation).ok_or_else(|| keys.missing("hidden_act"))?,
        };
        let scalar = keys.positive("query_pre_attn_scalar")?.unwrap_or(if family.sandwich_norms {
            256.0
        } else {
            head_dim as f64
        });
        let attention_bias = keys.flag("attention_bias", false)?;
        let (layers, ropes) = layer_kinds(&keys, family, layer_count, head_dim, max_positions)?;
        // Wrappers say it at either level.
        let tied = keys.flag("tie_word_embeddings", whole.flag("tie_word_embeddings", defaults.tied)?)?;
        let embedding_rows = || shape_of(&format!("{prefix}embed_tokens.weight"))?.first().copied();
        let vocab = keys.count("vocab_size")?.or_else(embedding_rows);
        let mut config = Self {
            family,
            prefix,
            hidden,
            intermediate: keys.need("intermediate_size")?,
            heads,
            kv_heads,
            head_dim,
            vocab: vocab.ok_or_else(|| keys.missing("vocab_size"))?,
            max_positions,
            eps: keys.positive("rms_norm_eps")?.unwrap_or(defaults.rms_norm_eps) as f32,
            tied,
            activation,
            attention_scale: (1.0 / scalar.sqrt()) as f32,
            attention_softcap: keys.positive("attn_logit_softcapping")?.map(|c| c as f32),
            final_softcap: keys.positive("final_logit_softcapping")?.map(|c| c as f32),
            embedding_scale: if family.scaled_embeddings { (hidden as f32).sqrt() } else { 1.0 },
            biases: BTreeSet::new(),
            unasked: BTreeSet::new(),
            warnings: Vec::new(),
            layers,
            ropes,
        };
        config.biases = config.asked_biases(attention_bias, keys.flag("mlp_bias", false)?);
        Ok(config)
    }

    /// The path of block `index`, as tensor names spell it.
    pub fn block_path(&self, index: usize) -> String {
        format!("{}layers.{index}", self.prefix)
    }
}

fn known_activation(name: &str) -> Option<Activation> {
    match name {
        "silu" | "swish" => Some(Activation::Silu),
        "gelu_pytorch_tanh" | "gelu_new" => Some(Activation::GeluTanh),
        _ => None,
    }
}

fn activation(keys: &JsonKeys, key: &str) -> Result<Option<Activation>, KeyError> {
    keys.read(key, "known are silu and gelu_pytorch_tanh", |name| known_activation(name.as_str()?))
}

fn layer_kinds(
    keys: &JsonKeys,
    family: &Family,
    count: usize,
    head_dim: usize,
    max_positions: usize,
) -> Result<(Vec<LayerKind>, Vec<Rope>), ConfigError> {
    let window = match keys.is_null("sliding_window") {
        // Spelled out it means no window; but a pattern of sliding layers is nothing without one.
        true if !matches!(family.sliding, Sliding::Pattern(_)) => None,
        _ => keys.count("sliding_window")?.or(Some(family.defaults.sliding_window)),
    };
    let types = read_types(keys, count)?;
    let sliding = |i: usize, default: bool| types.as_ref().map_or(default, |t| t[i]);
    let window_of: Vec<Option<usize>> = match family.sliding {
        Sliding::None => vec![None; count],
        Sliding::All => vec![window; count],
        Sliding::Upper => {
            let from = keys.count("max_window_layers")?.unwrap_or(28);
            let used = keys.flag("use_sliding_window", false)?;
            (0..count).map(|i| window.filter(|_| used && sliding(i, i >= from))).collect()
        }
        Sliding::Pattern(default) => {
            let every = keys.count("sliding_window_pattern")?.unwrap_or(default);
            (0..count).map(|i| window.filter(|_| sliding(i, (i + 1) % every != 0))).collect()
        }
    };
    let local = matches!(family.sliding, Sliding::Pattern(_));
    let ropes = rope::parse(keys, family, local, head_dim, max_positions)?;
    let layers = window_of
        .into_iter()
        .map(|window| LayerKind { window, rope: usize::from(local && window.is_some()) })
        .collect();
    Ok((layers, ropes))
}

/// `layer_types` as "is sliding" per layer.
fn read_types(keys: &JsonKeys, count: usize) -> Result<Option<Vec<bool>>, KeyError> {
    let wanted = format!("{count} of `full_attention` and `sliding_attention` are needed");
    let sliding = |kind: &Value| match kind.as_str()? {
        "full_attention" => Some(false),
        "sliding_attention" => Some(true),
        _ => None,
    };
    keys.read("layer_types", &wanted, |types| {
        types.as_array().filter(|list| list.len() == count)?.iter().map(sliding).collect()
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The keys of the multimodal Gemma 3 4B as published, and nothing more.
    #[test]
    fn gemma_3_as_published() {
        let json = json!({
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024
            },
            "vision_config": {"hidden_size": 1152, "num_attention_heads": 16, "num_hidden_layers": 27}
        });
        let shape_of = |start: &str| "language_model.model.embed_tokens.weight".starts_with(start);
        let config = ModelConfig::parse(&json, |start| shape_of(start).then_some(&[262_208, 2560][..])).unwrap();
        assert_eq!(config.prefix, "language_model.model.");
        assert_eq!((config.heads, config.kv_heads, config.head_dim), (8, 4, 256));
        assert_eq!((config.vocab, config.max_positions, config.tied), (262_208, 131_072, true));
        let windows: Vec<Option<usize>> = config.layers.iter().map(|layer| layer.window).collect();
        assert_eq!(windows[..7], [Some(1024), Some(1024), Some(1024), Some(1024), Some(1024), None, Some(1024)]);
        assert_eq!(config.ropes.len(), 2);
        // Full layers are stretched eightfold, local ones not.
        assert_eq!((config.ropes[0].inv_freq[0], config.ropes[1].inv_freq[0]), (0.125, 1.0));
        assert!((config.attention_scale - 1.0 / 16.0).abs() < 1e-9);

        let error = ModelConfig::parse(&json, |_| None).unwrap_err().to_string();
        assert_eq!(error, "config.json: `text_config.vocab_size` is missing");
    }

    fn small(model_type: &str, more: Value) -> ModelConfig {
        let mut json = json!({
            "model_type": model_type, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
            "num_hidden_layers": 4, "vocab_size": 128
        });
        json.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ModelConfig::parse(&json, |_| None).unwrap()
    }

    #[test]
    fn context_of_each_family() {
        for (family, positions) in
            [("llama", 2048), ("mistral", 131_072), ("qwen2", 32_768), ("qwen3", 32_768), ("gemma3_text", 131_072)]
        {
            let more = if family == "mistral" { json!({"num_key_value_heads": 2}) } else { json!({}) };
            assert_eq!(small(family, more).max_positions, positions, "{family}");
        }
    }

    #[test]
    fn windows_left_unsaid() {
        let windows = |family: &str, more: Value| -> Vec<Option<usize>> {
            small(family, more).layers.iter().map(|layer| layer.window).collect()
        };
        let upper = json!({"use_sliding_window": true, "max_window_layers": 2});
        assert_eq!(windows("qwen2", upper), [None, None, Some(4096), Some(4096)]);
        let null = json!({"use_sliding_window": true, "max_window_layers": 2, "sliding_window": null});
        assert_eq!(windows("qwen2", null), [None; 4]);
        assert_eq!(windows("qwen2", json!({})), [None; 4]);
        let mistral = |window: Value| json!({"num_key_value_heads": 2, "sliding_window": window});
        assert_eq!(windows("mistral", json!({"num_key_value_heads": 2})), [Some(4096); 4]);
        assert_eq!(windows("mistral", mistral(Value::Null)), [None; 4]);
        assert_eq!(windows("mistral", mistral(json!(7))), [Some(7); 4]);
    }
}
