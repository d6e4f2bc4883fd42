//! `config.json` settled into numbers the engine needs, family defaults filled in.

use serde_json::Value;
use thiserror::Error;

use super::families::{self, Biases, Family, Sliding};
use super::rope::{self, Rope};
use crate::backend::Activation;

/// Why a config cannot be run.
#[derive(Debug, Error)]
pub enum ConfigError {
    #[error("model type `{name}` is not known; known: {known}")]
    UnknownFamily { name: String, known: String },
    #[error("config.json: `{key}` is missing")]
    Missing { key: &'static str },
    #[error("config.json: `{key}` is {found}; {wanted}")]
    Value { key: String, found: String, wanted: String },
}

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
    pub tied: bool,
    pub activation: Activation,
    pub attention_scale: f32,
    pub attention_softcap: Option<f32>,
    pub final_softcap: Option<f32>,
    pub embedding_scale: f32,
    pub qkv_bias: bool,
    pub o_bias: bool,
    pub mlp_bias: bool,
    pub layers: Vec<LayerKind>,
    pub ropes: Vec<Rope>,
}

/// Reads keys of one JSON object, naming what is wrong.
struct Keys<'a>(&'a Value);

impl<'a> Keys<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|v| !v.is_null())
    }

    fn read<T>(
        &self,
        key: &str,
        wanted: &str,
        convert: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        self.get(key).map(|v| convert(v).ok_or_else(|| bad(key, v, wanted))).transpose()
    }

    fn count(&self, key: &'static str) -> Result<Option<usize>, ConfigError> {
        self.read(key, "a positive whole number is needed", |v| {
            v.as_u64().filter(|&n| n > 0 && n < 1 << 24).map(|n| n as usize)
        })
    }

    fn need(&self, key: &'static str) -> Result<usize, ConfigError> {
        self.count(key)?.ok_or(ConfigError::Missing { key })
    }

    fn positive(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        self.read(key, "a positive number is needed", |v| v.as_f64().filter(|n| *n > 0.0))
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool, ConfigError> {
        Ok(self.read(key, "true or false is needed", Value::as_bool)?.unwrap_or(default))
    }
}

fn bad(key: &str, found: &Value, wanted: &str) -> ConfigError {
    ConfigError::Value { key: key.into(), found: found.to_string(), wanted: wanted.into() }
}

impl ModelConfig {
    /// Settles a `config.json`. `has_prefix` tells whether any tensor name starts with a given text: the
    /// multimodal wrappers changed theirs over time.
    pub fn parse(json: &Value, has_prefix: impl Fn(&str) -> bool) -> Result<Self, ConfigError> {
        let model_type = json.get("model_type").and_then(Value::as_str).unwrap_or_default();
        let architecture = json.pointer("/architectures/0").and_then(Value::as_str);
        if model_type.is_empty() && architecture.is_none() {
            return Err(ConfigError::Missing { key: "model_type" });
        }
        let family = families::find(model_type, architecture)?;
        let nested = json.get("text_config").filter(|v| v.is_object());
        let keys = Keys(nested.unwrap_or(json));
        const PREFIXES: [&str; 3] = ["language_model.model.", "model.language_model.", "model."];
        let prefix = PREFIXES.into_iter().find(|p| has_prefix(p)).unwrap_or("model.");
        let defaults = &family.defaults;

        let hidden = keys.need("hidden_size")?;
        let heads = keys.need("num_attention_heads")?;
        let kv_heads = keys.count("num_key_value_heads")?.or(defaults.kv_heads).unwrap_or(heads);
        if heads % kv_heads != 0 {
            return Err(bad(
                "num_key_value_heads",
                &kv_heads.into(),
                &format!("it must divide num_attention_heads = {heads}"),
            ));
        }
        let head_dim = match keys.count("head_dim")?.or(defaults.head_dim) {
            Some(dim) => dim,
            None if hidden % heads == 0 => hidden / heads,
            None => {
                return Err(bad(
                    "hidden_size",
                    &hidden.into(),
                    &format!("it is no multiple of num_attention_heads = {heads}"),
                ));
            }
        };
        let layer_count = keys.need("num_hidden_layers")?;
        if layer_count > 10_000 {
            return Err(bad("num_hidden_layers", &layer_count.into(), "no known model has that many"));
        }
        let max_positions = keys.count("max_position_embeddings")?.unwrap_or(2048);
        let activation = match keys
            .get("hidden_activation")
            .or(keys.get("hidden_act"))
            .map_or(Some(defaults.activation), Value::as_str)
        {
            Some("silu" | "swish") => Activation::Silu,
            Some("gelu_pytorch_tanh" | "gelu_new") => Activation::GeluTanh,
            other => return Err(bad("hidden_act", &other.into(), "known are silu and gelu_pytorch_tanh")),
        };
        let scalar = keys.positive("query_pre_attn_scalar")?.unwrap_or(if family.sandwich_norms {
            256.0
        } else {
            head_dim as f64
        });
        let attention_bias = keys.flag("attention_bias", false)?;
        let (layers, ropes) = layer_kinds(&keys, family, layer_count, head_dim, max_positions)?;
        let tied = match nested {
            // Wrappers say it at either level.
            Some(_) => keys.flag("tie_word_embeddings", Keys(json).flag("tie_word_embeddings", defaults.tied)?)?,
            None => keys.flag("tie_word_embeddings", defaults.tied)?,
        };
        Ok(Self {
            family,
            prefix,
            hidden,
            intermediate: keys.need("intermediate_size")?,
            heads,
            kv_heads,
            head_dim,
            vocab: keys.need("vocab_size")?,
            max_positions,
            eps: keys.positive("rms_norm_eps")?.unwrap_or(defaults.rms_norm_eps) as f32,
            tied,
            activation,
            attention_scale: (1.0 / scalar.sqrt()) as f32,
            attention_softcap: keys.positive("attn_logit_softcapping")?.map(|c| c as f32),
            final_softcap: keys.positive("final_logit_softcapping")?.map(|c| c as f32),
            embedding_scale: if family.scaled_embeddings { (hidden as f32).sqrt() } else { 1.0 },
            qkv_bias: attention_bias || family.biases == Biases::Qkv,
            o_bias: attention_bias && family.biases == Biases::Config,
            mlp_bias: keys.flag("mlp_bias", false)?,
            layers,
            ropes,
        })
    }

    /// The path of block `index`, as tensor names spell it.
    pub fn block_path(&self, index: usize) -> String {
        format!("{}layers.{index}", self.prefix)
    }
}

fn layer_kinds(
    keys: &Keys,
    family: &Family,
    count: usize,
    head_dim: usize,
    max_positions: usize,
) -> Result<(Vec<LayerKind>, Vec<Rope>), ConfigError> {
    let window = keys.count("sliding_window")?;
    let types = match keys.get("layer_types") {
        Some(types) => Some(read_types(types, count)?),
        None => None,
    };
    let sliding = |i: usize, default: bool| types.as_ref().map_or(default, |t| t[i]);
    let window_of: Vec<Option<usize>> = match family.sliding {
        Sliding::None => vec![None; count],
        Sliding::All(default) => {
            let explicit_null = keys.0.get("sliding_window").is_some_and(Value::is_null);
            vec![if explicit_null { None } else { window.or(Some(default)) }; count]
        }
        Sliding::Upper => {
            let from = keys.count("max_window_layers")?.unwrap_or(28);
            let used = keys.flag("use_sliding_window", false)?;
            (0..count).map(|i| window.filter(|_| used && sliding(i, i >= from))).collect()
        }
        Sliding::Pattern(default) => {
            let every = keys.count("sliding_window_pattern")?.unwrap_or(default);
            (0..count).map(|i| Some(window.unwrap_or(4096)).filter(|_| sliding(i, (i + 1) % every != 0))).collect()
        }
    };
    let local = matches!(family.sliding, Sliding::Pattern(_));
    let ropes = rope::parse(keys.0, family, local, head_dim, max_positions)?;
    let layers = window_of
        .into_iter()
        .map(|window| LayerKind { window, rope: usize::from(local && window.is_some()) })
        .collect();
    Ok((layers, ropes))
}

/// `layer_types` as "is sliding" per layer.
fn read_types(types: &Value, count: usize) -> Result<Vec<bool>, ConfigError> {
    let wanted = format!("{count} of `full_attention` and `sliding_attention` are needed");
    let list = types.as_array().filter(|l| l.len() == count).ok_or_else(|| bad("layer_types", types, &wanted))?;
    list.iter()
        .map(|t| match t.as_str() {
            Some("full_attention") => Ok(false),
            Some("sliding_attention") => Ok(true),
            _ => Err(bad("layer_types", t, &wanted)),
        })
        .collect()
}
