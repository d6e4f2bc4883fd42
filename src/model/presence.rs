//! A config held against the tensors that are there: whether the output head is the embedding, which linears have
//! biases, which tensors are not read. Engines differ in which of the two they believe, so that a contradiction is
//! reported, and what is written says what was read.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;

use rayon::prelude::*;
use serde::Serialize;
use serde_json::Value;

use super::config::ModelConfig;
use super::config_error::ConfigError;
use super::families::Biases;
use super::head_path;
use crate::checkpoint::{Checkpoint, Entry};
use crate::num::size::bytes;
use crate::tensor::widened;

/// Elements that are compared at once, to bound memory for any vocabulary size.
const AT_ONCE: usize = 1 << 16;

/// Linears of a block, in the order of [`ModelConfig::linears`].
const ATTENTION: [&str; 4] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"];
const MLP: [&str; 3] = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"];

/// Parts of a weight in the formats that are read.
const PACKED: [&str; 13] = [
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_zero_point",
    "weight_g_idx",
    "weight_shape",
    "input_scale",
    "input_zero_point",
    "activation_scale",
];

/// Scales that belong to the cache, beside the attention or beside its linears.
const CACHE: [&str; 4] = ["k_scale", "v_scale", "q_scale", "prob_scale"];

/// Ends of the names of buffers that every reader computes.
const BUFFERS: [&str; 7] = [
    ".rotary_emb.inv_freq",
    ".rotary_emb.cos_cached",
    ".rotary_emb.sin_cached",
    ".attn.bias",
    ".attention.bias",
    ".masked_bias",
    ".position_ids",
];

/// Whether a tensor is a part of a weight that is not a plain matrix.
pub fn is_packed(tensor: &str) -> bool {
    tensor.rsplit_once('.').is_some_and(|(_, part)| PACKED.contains(&part))
}

/// Whether a tensor is a buffer that readers compute themselves.
pub fn is_buffer(tensor: &str) -> bool {
    BUFFERS.iter().any(|end| tensor.ends_with(end))
}

/// Tensors of a checkpoint that the language model does not read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Unread {
    pub count: usize,
    /// Their bytes.
    pub bytes: u64,
    /// The first few, in the order of names.
    pub first: Vec<String>,
    /// The layers that the config has, where tensors of further layers are among them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<usize>,
}

impl Unread {
    /// Names that are kept.
    const NAMED: usize = 5;
}

impl fmt::Display for Unread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let noun = if self.count == 1 { "tensor" } else { "tensors" };
        let are = if self.count == 1 { "is" } else { "are" };
        let names: Vec<String> = self.first.iter().map(|name| format!("`{name}`")).collect();
        write!(f, "{} {noun} ({}) {are} not read: {}", self.count, bytes(self.bytes), names.join(", "))?;
        match self.count - self.first.len() {
            0 => {}
            more => write!(f, " and {more} more")?,
        }
        self.layers.map_or(Ok(()), |layers| write!(f, "; the weights have more layers than the config ({layers})"))
    }
}

impl ModelConfig {
    /// The config of a checkpoint, settled with its tensors ([`Self::settle`]).
    pub fn of(checkpoint: &Checkpoint) -> Result<Self, ConfigError> {
        let mut config = Self::stated_by(checkpoint)?;
        config.settle(checkpoint)?;
        Ok(config)
    }

    /// The config of a checkpoint as it says, whatever the tensors are.
    pub fn stated_by(checkpoint: &Checkpoint) -> Result<Self, ConfigError> {
        let tensors = checkpoint.tensors();
        let shape_of = |start: &str| {
            let (name, entry) = tensors.range(start.to_string()..).next()?;
            name.starts_with(start).then_some(&entry.shape[..])
        };
        Self::parse(checkpoint.config(), shape_of)
    }

    /// Holds the config against the tensors. The output head is the embedding if the config says so and no other head is
    /// stored; linears have the biases that are stored. What the config says otherwise goes into
    /// [`ModelConfig::warnings`]; what it asks for and is missing, or has another shape, is an error. Without tensors the
    /// config alone decides.
    pub fn settle(&mut self, checkpoint: &Checkpoint) -> Result<(), ConfigError> {
        if checkpoint.tensors().is_empty() {
            return Ok(());
        }
        self.settle_head(checkpoint)?;
        self.settle_biases(checkpoint)
    }

    fn settle_head(&mut self, checkpoint: &Checkpoint) -> Result<(), ConfigError> {
        let tensors = checkpoint.tensors();
        let (head, table) =
            (format!("{}.weight", head_path(self.prefix)), format!("{}embed_tokens.weight", self.prefix));
        let own = tensors.get(&head);
        let packed = PACKED.iter().any(|part| tensors.contains_key(&format!("{}.{part}", head_path(self.prefix))));
        let [outer, inner] = levels(checkpoint.config(), "tie_word_embeddings");
        let two = outer.zip(inner).filter(|(outer, inner)| outer != inner);
        let said = match (two, outer.or(inner)) {
            (Some((outer, inner)), _) => {
                format!("config.json says `tie_word_embeddings` {outer} and `text_config.tie_word_embeddings` {inner}")
            }
            (None, Some(_)) => format!("config.json says `tie_word_embeddings` {}", self.tied),
            (None, None) => {
                let (tied, label) = (self.tied, self.family.label);
                format!("config.json does not say `tie_word_embeddings`, which means {tied} for {label}")
            }
        };
        if own.is_some() {
            checkpoint.expect(&head, &[self.vocab, self.hidden])?;
        }
        let repeated = || own.zip(tensors.get(&table)).is_some_and(|(own, table)| equal(own, table));
        let why = match own.is_some() || packed {
            true if packed => format!("a quantized `{}` is stored", head_path(self.prefix)),
            true if (self.tied || two.is_some()) && repeated() => return Ok(()),
            true => format!("`{head}` is stored and differs from `{table}`"),
            false if self.tied || two.is_some() => format!("no `{head}` is stored"),
            false => return Err(ConfigError::Head { tensor: head, dir: checkpoint.shown(), said }),
        };
        let tied = own.is_none() && !packed;
        if two.is_some() || tied != self.tied {
            let used = if tied { &table } else { &head };
            self.warnings.push(format!("{said}, but {why}: `{used}` is the output head in measurements and artifacts"));
        }
        self.tied = tied;
        Ok(())
    }

    fn settle_biases(&mut self, checkpoint: &Checkpoint) -> Result<(), ConfigError> {
        let tensors = checkpoint.tensors();
        for (module, rows, _) in self.linears() {
            let name = format!("{module}.bias");
            let asked = self.biases.contains(&module);
            let Some(entry) = tensors.get(&name) else {
                let start = format!("{module}.");
                let stored = tensors.range(start.clone()..).next().is_some_and(|(name, _)| name.starts_with(&start));
                // Of a linear that is missing altogether, its weight is the better complaint.
                if asked && stored {
                    return Err(ConfigError::Bias { tensor: name, dir: checkpoint.shown(), why: self.asks(&module) });
                }
                continue;
            };
            checkpoint.expect_float(&name, &[rows])?;
            if !asked {
                self.biases.insert(module.clone());
                // Some writers store zeros for every linear.
                if widened(entry.dtype, &entry.bytes).iter().any(|value| *value != 0.0) {
                    self.unasked.insert(module);
                }
            }
        }
        // The config of a GGUF file is made here, and the file's own form is to store what there is.
        if let Some(first) = self.unasked.first().filter(|_| !checkpoint.is_assembled()) {
            self.warnings.push(format!(
                "{} linears (first `{first}`) have a bias that config.json does not ask for; the biases are used in \
                 measurements and written to artifacts",
                self.unasked.len()
            ));
        }
        Ok(())
    }

    /// Linears that the config asks to have a bias.
    pub(super) fn asked_biases(&self, attention: bool, mlp: bool) -> BTreeSet<String> {
        let qkv = attention || self.family.biases == Biases::Qkv;
        let output = attention && self.family.biases == Biases::Config;
        let asked = |module: &String| match () {
            () if module.ends_with(ATTENTION[3]) => output,
            () if ATTENTION.iter().any(|name| module.ends_with(name)) => qkv,
            () => mlp,
        };
        self.linears().into_iter().map(|(module, ..)| module).filter(asked).collect()
    }

    /// What asks for the bias of a linear.
    fn asks(&self, module: &str) -> String {
        let qkv = ATTENTION[..3].iter().any(|name| module.ends_with(name));
        match () {
            () if MLP.iter().any(|name| module.ends_with(name)) => "`mlp_bias` is true".into(),
            () if qkv && self.family.biases == Biases::Qkv => format!("q, k and v of {} have one", self.family.label),
            () => "`attention_bias` is true".into(),
        }
    }

    /// Whether a linear has a bias.
    pub fn has_bias(&self, module: &str) -> bool {
        self.biases.contains(module)
    }

    /// Keys of `config.json` that ask for all biases of some linears, where transformers' class of the family reads them
    /// and the linears of all layers have theirs.
    fn keys_that_ask(&self) -> Vec<(&'static str, &'static [&'static str])> {
        let all = |names: &[&str]| {
            let each = |i| names.iter().all(|name| self.biases.contains(&format!("{}.{name}", self.block_path(i))));
            (0..self.layers.len()).all(each)
        };
        let pairs: [(&'static str, &'static [&'static str]); 2] = [("attention_bias", &ATTENTION), ("mlp_bias", &MLP)];
        pairs.into_iter().filter(|(key, names)| self.family.bias_keys.contains(key) && all(names)).collect()
    }

    /// Linears whose biases no `config.json` of the family asks for: engines that build linears by the config leave them
    /// out.
    pub fn unstated_biases(&self) -> Vec<String> {
        let keys = self.keys_that_ask();
        let stated = |module: &String| keys.iter().any(|(_, names)| names.iter().any(|name| module.ends_with(name)));
        self.unasked.iter().filter(|module| !stated(module)).cloned().collect()
    }

    /// `json`, the source's config, updated to match the tensors that were read: whether the head is the embedding, and
    /// which biases there are.
    pub fn restated(&self, json: &Value) -> Value {
        let mut json = json.clone();
        let said: Vec<&Value> = levels(&json, "tie_word_embeddings").into_iter().flatten().collect();
        let right = match said.is_empty() {
            true => self.tied == self.family.defaults.tied,
            false => said.iter().all(|value| value.as_bool() == Some(self.tied)),
        };
        if !right {
            // Readers of wrapped models look at either level.
            if let Some(text) = json.get_mut("text_config").filter(|text| text.is_object()) {
                text["tie_word_embeddings"] = self.tied.into();
            }
            json["tie_word_embeddings"] = self.tied.into();
        }
        for (key, names) in self.keys_that_ask() {
            if self.unasked.iter().any(|module| names.iter().any(|name| module.ends_with(name))) {
                let nested = json.get("text_config").is_some_and(Value::is_object);
                let level = if nested { &mut json["text_config"] } else { &mut json };
                level[key] = true.into();
            }
        }
        json
    }

    /// Whether a stored output head says only what the embedding says.
    pub fn is_repeated(&self, tensor: &str) -> bool {
        self.tied && tensor.strip_suffix(".weight") == Some(head_path(self.prefix))
    }

    /// Whether the language model reads this tensor; the rest of a checkpoint is only passed on.
    pub fn reads(&self, tensor: &str) -> bool {
        let Some((module, part)) = tensor.rsplit_once('.') else { return false };
        let weight = part == "weight" || PACKED.contains(&part);
        if module == head_path(self.prefix) {
            return !self.tied && weight;
        }
        match module.strip_prefix(self.prefix) {
            Some("embed_tokens") => weight,
            Some("norm") => part == "weight",
            Some(inner) => self.block_reads(inner, part),
            None => false,
        }
    }

    /// The same for `layers.N.MODULE`.
    fn block_reads(&self, inner: &str, part: &str) -> bool {
        let Some((layer, module)) = inner.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) else {
            return false;
        };
        if layer.parse::<usize>().map_or(true, |n| n >= self.layers.len() || n.to_string() != layer) {
            return false;
        }
        let linear = ATTENTION.contains(&module) || MLP.contains(&module);
        match part {
            _ if linear => matches!(part, "weight" | "bias") || PACKED.contains(&part) || CACHE.contains(&part),
            "weight" => self.block_norms().contains(&module),
            _ => module == "self_attn" && CACHE.contains(&part),
        }
    }

    /// Norms of a block.
    pub(super) fn block_norms(&self) -> Vec<&'static str> {
        let mut names = vec!["input_layernorm", "post_attention_layernorm"];
        if self.family.sandwich_norms {
            names.extend(["pre_feedforward_layernorm", "post_feedforward_layernorm"]);
        }
        if self.family.qk_norm {
            names.extend(["self_attn.q_norm", "self_attn.k_norm"]);
        }
        names
    }

    /// The tensors of a checkpoint that are not read, buffers and a repeated head aside. With `plain` weights nothing
    /// reads the parts of packed ones either.
    pub fn unread(&self, checkpoint: &Checkpoint, plain: bool) -> Option<Unread> {
        // Of a module that is stored twice the packed form is read.
        let twice = |name: &str| {
            let parts =
                ["qweight", "weight_packed"].map(|part| name.strip_suffix("weight").map(|m| format!("{m}{part}")));
            parts.iter().flatten().any(|part| checkpoint.tensors().contains_key(part))
        };
        let passed_over = |name: &str| if plain { is_packed(name) } else { twice(name) };
        let ignored = |name: &str| self.reads(name) && !passed_over(name) || is_buffer(name) || self.is_repeated(name);
        let mut found = Unread { count: 0, bytes: 0, first: vec![], layers: None };
        let blocks = format!("{}layers.", self.prefix);
        for (name, entry) in checkpoint.tensors().iter().filter(|(name, _)| !ignored(name)) {
            found.count += 1;
            found.bytes += entry.bytes.len() as u64;
            if found.first.len() < Unread::NAMED {
                found.first.push(name.clone());
            }
            let layer = name.strip_prefix(&*blocks).and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
            if layer.is_some_and(|layer| layer >= self.layers.len()) {
                found.layers = Some(self.layers.len());
            }
        }
        (found.count > 0).then_some(found)
    }
}

/// What a config says under `key`: outside, and at the level of the language model of a multimodal one.
fn levels<'a>(json: &'a Value, key: &str) -> [Option<&'a Value>; 2] {
    let nested = json.get("text_config").and_then(|text| text.get(key));
    [json.get(key), nested].map(|value| value.filter(|value| !value.is_null()))
}

/// Whether two tensors hold the same numbers, bit by bit; their float types may differ.
fn equal(a: &Entry, b: &Entry) -> bool {
    if a.shape != b.shape {
        return false;
    }
    if a.dtype == b.dtype {
        let pieces = a.bytes.par_chunks(AT_ONCE).zip(b.bytes.par_chunks(AT_ONCE));
        return a.bytes.len() == b.bytes.len() && pieces.all(|(a, b)| a == b);
    }
    let values = |entry: &Entry, at: Range<usize>| {
        let size = entry.dtype.size();
        widened(entry.dtype, &entry.bytes[at.start * size..at.end * size])
    };
    let len = a.shape.iter().product::<usize>();
    let same = |i: usize| {
        let at = i * AT_ONCE..((i + 1) * AT_ONCE).min(len);
        let (one, other) = (values(a, at.clone()), values(b, at));
        one.iter().zip(&other).all(|(x, y)| x.to_bits() == y.to_bits())
    };
    a.dtype.is_float() && b.dtype.is_float() && (0..len.div_ceil(AT_ONCE)).into_par_iter().all(same)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::tensor::{Dtype, narrowed};

    fn entry(dtype: Dtype, values: &[f32]) -> Entry {
        Entry { dtype, shape: vec![values.len()], bytes: narrowed(dtype, values).into(), file: "x".into() }
    }

    #[test]
    fn numbers_are_compared_and_not_types() {
        let mut values: Vec<f32> = (0..AT_ONCE + 3).map(|i| (i % 200) as f32 - 100.0).collect();
        let [f16, bf16, f32] = [Dtype::F16, Dtype::BF16, Dtype::F32].map(|dtype| entry(dtype, &values));
        assert!(equal(&f16, &bf16) && equal(&f16, &f32) && equal(&bf16, &bf16.clone()));
        // The last number, behind the first piece.
        *values.last_mut().unwrap() += 1.0;
        for dtype in [Dtype::F16, Dtype::BF16, Dtype::F32] {
            let other = entry(dtype, &values);
            assert!(!equal(&f16, &other) && !equal(&bf16, &other) && !equal(&f32, &other), "{dtype}");
        }
        assert!(!equal(&f16, &entry(Dtype::F16, &values[1..])));
        assert!(!equal(&entry(Dtype::F16, &[0.0]), &entry(Dtype::F32, &[-0.0])));
    }

    fn config(more: Value) -> (Value, ModelConfig) {
        let mut json = json!({
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
            "num_hidden_layers": 2, "vocab_size": 128
        });
        json.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let config = ModelConfig::parse(&json, |_| None).unwrap();
        (json, config)
    }

    #[test]
    fn the_tensors_that_are_read() {
        let (_, config) = config(json!({}));
        for (name, read) in [
            ("model.embed_tokens.weight", true),
            ("lm_head.weight", true),
            ("lm_head.bias", false),
            ("model.norm.weight", true),
            ("model.norm.bias", false),
            ("model.layers.1.mlp.up_proj.bias", true),
            ("model.layers.1.mlp.up_proj.qweight", true),
            ("model.layers.1.mlp.up_proj.lora_a.weight", false),
            ("model.layers.1.input_layernorm.weight", true),
            ("model.layers.1.pre_feedforward_layernorm.weight", false),
            ("model.layers.1.self_attn.q_norm.weight", false),
            ("model.layers.1.self_attn.k_scale", true),
            ("model.layers.1.self_attn.k_proj.k_scale", true),
            ("model.layers.1.eh_proj.weight", false),
            ("model.layers.2.mlp.up_proj.weight", false),
            ("model.layers.01.mlp.up_proj.weight", false),
            ("mtp.layers.0.mlp.up_proj.weight", false),
            ("vision_tower.norm.weight", false),
        ] {
            assert_eq!(config.reads(name), read, "{name}");
        }
    }

    #[test]
    fn what_is_written_says_what_was_read() {
        let (json, mut config) = config(json!({"tie_word_embeddings": true}));
        assert_eq!(config.restated(&json), json);
        config.tied = false;
        assert_eq!(config.restated(&json)["tie_word_embeddings"], false);
        // Silence means false here.
        let (json, mut silent) = self::config(json!({}));
        assert_eq!(silent.restated(&json), json);
        silent.tied = true;
        assert_eq!(silent.restated(&json)["tie_word_embeddings"], true);

        let (json, mut config) = self::config(json!({"attention_bias": false}));
        let attention: Vec<String> =
            (0..2).flat_map(|i| ATTENTION.map(|name| format!("model.layers.{i}.{name}"))).collect();
        config.biases = attention.iter().cloned().collect();
        config.unasked = config.biases.clone();
        assert_eq!(config.restated(&json)["attention_bias"], true);
        assert!(config.unstated_biases().is_empty());
        // No key describes the biases of a single layer.
        config.biases.remove(&attention[7]);
        config.unasked.remove(&attention[7]);
        assert_eq!(config.restated(&json), json);
        let mut stated_by_none = attention[..7].to_vec();
        stated_by_none.sort();
        assert_eq!(config.unstated_biases(), stated_by_none);
    }
}
