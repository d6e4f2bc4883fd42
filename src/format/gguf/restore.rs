//! The way back: a GGUF file's metadata as the files of a Hugging Face folder, so that any GGUF model can be read
//! like a checkpoint and become one again.

pub mod tokenizer;

use serde_json::{Map, Value as Json, json};
use thiserror::Error;

use super::metadata::{implied_scale, window_pattern};
use super::names::{Architecture, NameError, RopeFactors};
use super::pretokenizer::PreTokenizerError;
use super::value::{Metadata, MetadataError, Text, Value};
use super::{ends, readme};
use crate::model::families;

/// More than any model has.
const MAX_LAYERS: usize = 10_000;

/// Why a GGUF file is no checkpoint that can be read.
#[derive(Debug, Error)]
pub enum RestoreError {
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    #[error(transparent)]
    Name(#[from] NameError),
    #[error(transparent)]
    PreTokenizer(#[from] PreTokenizerError),
    #[error("rope scaling of type `{0}` is not read; known are none, linear and yarn")]
    RopeScaling(String),
    #[error(
        "`rope_freqs.weight` does not hold factors of Llama 3's scaling (value {index} is {found}, nearest is {nearest}); \
         other factors are not read"
    )]
    RopeFreqs { index: usize, found: f32, nearest: f32 },
    #[error("a vocabulary of type `{0}` is not read; known are gpt2 (byte-level BPE) and llama (SentencePiece)")]
    Vocabulary(String),
    #[error("the metadata key `{key}` has {found} elements; `tokenizer.ggml.tokens` has {tokens}")]
    Length { key: &'static str, found: usize, tokens: usize },
    #[error("the metadata key `{key}` is {found}; {wanted}")]
    Range { key: String, found: String, wanted: String },
}

/// What tensors tell that metadata do not.
#[derive(Clone, Copy)]
pub struct Tensors<'a> {
    /// Whether the file has a tensor of this name.
    pub has: &'a dyn Fn(&str) -> bool,
    /// The values of `rope_freqs.weight`.
    pub rope_freqs: Option<&'a [f32]>,
}

/// The files of a Hugging Face folder, but for the weights.
#[derive(Debug)]
pub struct Files {
    pub config: Json,
    /// Nothing where the file has no vocabulary.
    pub tokenizer: Option<Json>,
    pub tokenizer_config: Json,
    pub generation_config: Json,
    /// README.md, where the file says what one would say.
    pub card: Option<String>,
    /// What the user should know.
    pub warnings: Vec<String>,
}

impl Files {
    /// Names and contents of the JSON files, in the order of names.
    pub fn named(&self) -> Vec<(&'static str, &Json)> {
        let mut all = vec![("config.json", &self.config), ("generation_config.json", &self.generation_config)];
        all.extend(self.tokenizer.as_ref().map(|tokenizer| ("tokenizer.json", tokenizer)));
        all.push(("tokenizer_config.json", &self.tokenizer_config));
        all
    }
}

/// Makes the files of a folder out of metadata.
pub fn files(metadata: &Metadata, tensors: Tensors) -> Result<Files, RestoreError> {
    let mut config = config(metadata, tensors)?;
    let (tokenizer, tokenizer_config, mut warnings) = match metadata.read::<&str>("tokenizer.ggml.model")? {
        None | Some("none" | "no_vocab") => (None, json!({}), Vec::new()),
        Some(_) => {
            let made = tokenizer::tokenizer(metadata)?;
            (Some(made.tokenizer), made.config, made.warnings)
        }
    };
    let mut generation = Map::new();
    let ends = ends::read(metadata)?;
    let tokens = metadata.read::<&[Text]>("tokenizer.ggml.tokens")?.map(<[_]>::len);
    let outside = ends.iter().find(|id| tokens.is_some_and(|count| **id as usize >= count));
    if let (Some(id), Some(count)) = (outside, tokens) {
        return Err(RestoreError::Range {
            key: "tokenizer.ggml.eos_token_id, eot_token_id, eom_token_id or quantkit.eos_token_ids".into(),
            found: id.to_string(),
            wanted: format!("the vocabulary has {count} tokens"),
        });
    }
    let ends = if ends.len() > 1 { Some(Json::from(ends)) } else { ends.first().map(|id| Json::from(*id)) };
    let bos = metadata.read::<u32>("tokenizer.ggml.bos_token_id")?.map(Json::from);
    for (kind, ids) in [("bos", bos), ("eos", ends)] {
        if let Some(ids) = ids {
            config.insert(format!("{kind}_token_id"), ids.clone());
            generation.insert(format!("{kind}_token_id"), ids);
        }
    }
    for (key, value) in metadata.iter() {
        let Some(name) = key.strip_prefix("general.sampling.") else { continue };
        let restored = match name {
            "temp" => "temperature",
            "penalty_repeat" => "repetition_penalty",
            other => other,
        };
        let value = match value {
            _ if name == "sequence" => metadata.need::<&str>(key)?.into(),
            Value::F32(v) => shortest(*v),
            Value::Bool(_) | Value::Text(_) | Value::Array(_) if !SAMPLING.contains(&name) => {
                warnings.push(format!("the metadata key `{key}` is not known, and is left out"));
                continue;
            }
            Value::F64(_) | Value::Bool(_) | Value::Text(_) | Value::Array(_) => metadata.need::<f64>(key)?.into(),
            _ => metadata.need::<i64>(key)?.into(),
        };
        generation.insert(restored.into(), value);
    }
    let (config, generation_config) = (config.into(), generation.into());
    let card = readme::readme(metadata, &mut warnings);
    Ok(Files { config, tokenizer, tokenizer_config, generation_config, card, warnings })
}

/// Numbers under `general.sampling.` that llama.cpp reads (`llama_model_meta_key_str`), all of them numbers.
const SAMPLING: [&str; 11] = [
    "top_k",
    "top_p",
    "min_p",
    "xtc_probability",
    "xtc_threshold",
    "temp",
    "penalty_last_n",
    "penalty_repeat",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
];

/// The shortest decimal number that is this `f32`: 1e-5 and not 9.99999974e-6.
fn shortest(value: f32) -> Json {
    let exact = || f64::from(value);
    value.to_string().parse::<f64>().unwrap_or_else(|_| exact()).into()
}

/// Keys of one architecture.
struct Keys<'a> {
    metadata: &'a Metadata,
    arch: &'static str,
}

impl Keys<'_> {
    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.arch)
    }

    /// A size; where a file has one for each layer, they must agree.
    fn size(&self, key: &str) -> Result<Option<usize>, RestoreError> {
        let name = self.name(key);
        let range =
            |found: String, wanted: &str| RestoreError::Range { key: name.clone(), found, wanted: wanted.into() };
        let size = match self.metadata.get(&name) {
            Some(Value::Array(_)) => {
                let all: Vec<usize> = self.metadata.need(&name)?;
                let first = all.first().copied().filter(|first| all.iter().all(|size| size == first));
                Some(first.ok_or_else(|| range(format!("{all:?}"), "layers of different sizes are not read"))?)
            }
            _ => self.metadata.read::<usize>(&name)?,
        };
        match size {
            Some(size) if size == 0 || size >= 1 << 24 => {
                Err(range(size.to_string(), "a positive whole number is needed"))
            }
            size => Ok(size),
        }
    }

    fn need(&self, key: &str) -> Result<usize, RestoreError> {
        self.size(key)?.ok_or_else(|| MetadataError::Missing(self.name(key)).into())
    }

    fn number(&self, key: &str) -> Result<Option<f32>, MetadataError> {
        self.metadata.read(&self.name(key))
    }
}

fn config(metadata: &Metadata, tensors: Tensors) -> Result<Map<String, Json>, RestoreError> {
    let arch = Architecture::parse(metadata.need("general.architecture")?)?;
    let keys = Keys { metadata, arch: arch.name };
    let layers = keys.need("block_count")?;
    if layers > MAX_LAYERS {
        let wanted = "no known model has that many".into();
        return Err(RestoreError::Range { key: keys.name("block_count"), found: layers.to_string(), wanted });
    }
    let window = keys.size("attention.sliding_window")?;
    // Only Mistral's attention is windowed among those that are stored as `llama`.
    let (model_type, class) = match (arch.name, window) {
        ("llama", Some(_)) => ("mistral", "MistralForCausalLM"),
        _ => {
            let family = arch.family()?;
            (family.model_type, family.architectures.first().copied().unwrap_or_default())
        }
    };
    let (hidden, heads) = (keys.need("embedding_length")?, keys.need("attention.head_count")?);
    let head_dim = keys.size("attention.key_length")?.unwrap_or(hidden / heads);
    let tokens = metadata.read::<&[Text]>("tokenizer.ggml.tokens")?.map(<[_]>::len);
    let vocab = keys.size("vocab_size")?.or(tokens);
    let has = tensors.has;
    let mut config = Map::new();
    let mut set = |key: &str, value: Json| config.insert(key.into(), value);
    set("architectures", json!([class]));
    set("model_type", model_type.into());
    set("hidden_size", hidden.into());
    set("intermediate_size", keys.need("feed_forward_length")?.into());
    set("num_hidden_layers", layers.into());
    set("num_attention_heads", heads.into());
    set("num_key_value_heads", keys.size("attention.head_count_kv")?.unwrap_or(heads).into());
    set("head_dim", head_dim.into());
    set("max_position_embeddings", keys.need("context_length")?.into());
    set("vocab_size", vocab.ok_or_else(|| MetadataError::Missing("tokenizer.ggml.tokens".into()))?.into());
    let eps: f32 = metadata.need(&keys.name("attention.layer_norm_rms_epsilon"))?;
    set("rms_norm_eps", shortest(eps));
    set("tie_word_embeddings", (!has("output.weight")).into());
    let activation = arch.family()?.defaults.activation;
    set(if activation == "silu" { "hidden_act" } else { "hidden_activation" }, activation.into());
    // A key asks for the biases of all its linears; others count all the same, since they are there.
    let biased = |names: &[&str]| (0..layers).all(|i| names.iter().all(|name| has(&format!("blk.{i}.{name}.bias"))));
    for (key, names) in [
        ("attention_bias", &["attn_q", "attn_k", "attn_v", "attn_output"][..]),
        ("mlp_bias", &["ffn_gate", "ffn_up", "ffn_down"]),
    ] {
        let read = families::find(model_type, None).is_ok_and(|family| family.bias_keys.contains(&key));
        // Gemma's configs leave a false one out.
        if read && (biased(names) || arch.name != "gemma3") {
            set(key, biased(names).into());
        }
    }
    rope(&keys, tensors, head_dim, &mut set)?;
    attention(&keys, layers, window, [hidden, heads, head_dim], &mut set)?;
    Ok(config)
}

/// Writes windows, caps and the scale of attention.
fn attention(
    keys: &Keys,
    layers: usize,
    window: Option<usize>,
    [hidden, heads, head_dim]: [usize; 3],
    set: &mut dyn FnMut(&str, Json) -> Option<Json>,
) -> Result<(), RestoreError> {
    let period = match keys.metadata.get(&keys.name("attention.sliding_window_pattern")) {
        Some(Value::Array(_)) => None,
        _ => Some(keys.size("attention.sliding_window_pattern")?.unwrap_or(window_pattern(keys.arch))),
    };
    let windowed: Vec<bool> = match period {
        Some(period) => (0..layers).map(|i| period == 0 || !(i + 1).is_multiple_of(period)).collect(),
        None => {
            let name = keys.name("attention.sliding_window_pattern");
            let flags = keys.metadata.read::<&[bool]>(&name);
            let list = flags.map(|f| f.unwrap_or_default().to_vec());
            let list =
                list.or_else(|_| keys.metadata.need::<Vec<u32>>(&name).map(|v| v.iter().map(|v| *v != 0).collect()))?;
            if list.len() != layers {
                let wanted = format!("one for each of {layers} layers is needed");
                return Err(RestoreError::Range { key: name, found: format!("{} flags", list.len()), wanted });
            }
            list
        }
    };
    match (keys.arch, window) {
        ("gemma3", window) => {
            let kind = |w: &bool| if *w && window.is_some() { "sliding_attention" } else { "full_attention" };
            set("layer_types", windowed.iter().map(kind).collect::<Vec<_>>().into());
            set("sliding_window", window.unwrap_or(keys.need("context_length")?).into());
            let implied = implied_scale(keys.arch, layers, hidden, heads, head_dim);
            let scale = keys.number("attention.scale")?.map_or(implied, f64::from);
            let scalar = 1.0 / (scale * scale);
            let whole = scalar.round();
            // The scale is stored in 24 bits.
            let near = (scalar / whole - 1.0).abs() < 1e-5;
            set("query_pre_attn_scalar", if near { json!(whole as u64) } else { json!(scalar) });
        }
        ("llama", Some(window)) => {
            set("sliding_window", window.into());
        }
        (_, Some(window)) => {
            let kind = |w: &bool| if *w { "sliding_attention" } else { "full_attention" };
            set("use_sliding_window", true.into());
            set("sliding_window", window.into());
            set("max_window_layers", windowed.iter().position(|w| *w).unwrap_or(layers).max(1).into());
            set("layer_types", windowed.iter().map(kind).collect::<Vec<_>>().into());
        }
        ("llama", None) => {}
        (_, None) => {
            set("use_sliding_window", false.into());
        }
    }
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if let Some(cap) = keys.number(key)? {
            set(key, shortest(cap));
        }
    }
    Ok(())
}

/// Writes bases and scaling of rotary embeddings in the spelling that every version of transformers reads.
fn rope(
    keys: &Keys,
    tensors: Tensors,
    head_dim: usize,
    set: &mut dyn FnMut(&str, Json) -> Option<Json>,
) -> Result<(), RestoreError> {
    let base = keys.number("rope.freq_base")?.unwrap_or(10_000.0);
    set("rope_theta", shortest(base));
    if keys.arch == "gemma3" {
        set("rope_local_base_freq", shortest(keys.number("rope.freq_base_swa")?.unwrap_or(10_000.0)));
    }
    let dim = keys.size("rope.dimension_count")?.unwrap_or(head_dim);
    if dim != head_dim {
        set("partial_rotary_factor", (dim as f64 / head_dim as f64).into());
    }
    let factor = keys.number("rope.scaling.factor")?.unwrap_or(1.0);
    let mut scaling = Map::new();
    match keys.metadata.read::<&str>(&keys.name("rope.scaling.type"))? {
        None if factor == 1.0 => {}
        Some("none") => {}
        // llama.cpp scales linearly where the type is not said.
        None | Some("linear") => {
            scaling.insert("rope_type".into(), "linear".into());
            scaling.insert("factor".into(), shortest(factor));
        }
        Some("yarn") => {
            scaling.insert("rope_type".into(), "yarn".into());
            scaling.insert("factor".into(), shortest(factor));
            if let Some(original) = keys.size("rope.scaling.original_context_length")? {
                scaling.insert("original_max_position_embeddings".into(), original.into());
            }
            for (key, name) in [
                ("yarn_ext_factor", "extrapolation_factor"),
                ("yarn_attn_factor", "attention_factor"),
                ("yarn_beta_fast", "beta_fast"),
                ("yarn_beta_slow", "beta_slow"),
            ] {
                if let Some(value) = keys.number(&format!("rope.scaling.{key}"))? {
                    scaling.insert(name.into(), shortest(value));
                }
            }
        }
        Some(other) => return Err(RestoreError::RopeScaling(other.into())),
    }
    if let Some(values) = tensors.rope_freqs {
        let found = fit(values, f64::from(base), keys.need("context_length")?)?;
        scaling.insert("rope_type".into(), "llama3".into());
        for (key, value) in [
            ("factor", found.factor),
            ("low_freq_factor", found.low_freq_factor),
            ("high_freq_factor", found.high_freq_factor),
            ("original_max_position_embeddings", found.original_context),
        ] {
            let whole = value.fract() == 0.0 && key.starts_with("original");
            scaling.insert(key.into(), if whole { json!(value as u64) } else { json!(value) });
        }
    }
    if !scaling.is_empty() {
        set("rope_scaling", scaling.into());
    }
    Ok(())
}

/// Llama 3's scaling by its effect. Only the ratios of the two bounds to the original context show in it, so that
/// context is a choice: 8192, as in every published model, or as far as the model reaches.
fn fit(values: &[f32], theta: f64, context: usize) -> Result<RopeFactors, RestoreError> {
    let head_dim = 2 * values.len();
    let factor = values.iter().copied().fold(1.0f32, f32::max);
    let original = 8192.0f64.min(context as f64);
    let scaling = |low: f64, high: f64| RopeFactors {
        theta,
        head_dim,
        factor: f64::from(factor),
        low_freq_factor: low,
        high_freq_factor: high,
        original_context: original,
    };
    let turns = |i: usize| original / (2.0 * std::f64::consts::PI * theta.powf(2.0 * i as f64 / head_dim as f64));
    let worst = |candidate: &RopeFactors| {
        // What is no number is as far off as can be.
        let off = |(a, b): (&f32, &f32)| Some((a / b - 1.0).abs()).filter(|e| !e.is_nan()).unwrap_or(f32::INFINITY);
        let all = candidate.values();
        let errors = all.iter().zip(values).map(off).enumerate();
        errors.fold((0, 0.0f32), |worst, (i, error)| if error > worst.1 { (i, error) } else { worst })
    };
    let published = scaling(1.0, 4.0);
    // In the blended band `smooth` is a line over the turns; two of its points, the outermost, give both bounds.
    let f = f64::from(factor);
    let smooth = |i: usize| (1.0 / f64::from(values[i]) - 1.0 / f) / (1.0 - 1.0 / f);
    let band: Vec<usize> = (0..values.len()).filter(|&i| values[i] > 1.0 && values[i] < factor).collect();
    let mut candidates = vec![published];
    if let [first, .., last] = *band {
        let slope = (smooth(first) - smooth(last)) / (turns(first) - turns(last));
        let low = turns(last) - smooth(last) / slope;
        candidates.push(scaling(low, low + 1.0 / slope));
    } else {
        // Bounds between the neighbours of the band, through its one point if there is one.
        let above = values.iter().rposition(|v| *v <= 1.0).map_or(2.0 * turns(0), turns);
        let below = values.iter().position(|v| *v >= factor).map_or(turns(values.len()) / 2.0, turns);
        let middle = |share: f64| below + (above - below) * share;
        candidates.push(match band.first() {
            Some(&one) => {
                // The widest band that keeps both neighbours outside.
                let (t, s) = (turns(one), smooth(one));
                let width = ((above - t) / (1.0 - s)).min((t - below) / s) * 0.999;
                scaling(t - s * width, t + (1.0 - s) * width)
            }
            None => scaling(middle(1.0 / 3.0), middle(2.0 / 3.0)),
        });
    }
    let best = candidates.iter().find(|c| worst(c).1 < 1e-4);
    best.copied().ok_or_else(|| {
        let last = &candidates[candidates.len() - 1];
        let (index, _) = worst(last);
        RestoreError::RopeFreqs { index, found: values[index], nearest: last.values()[index] }
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn scalings_are_found_by_their_effect() {
        for (theta, head_dim, factor, low, high, original) in [
            (500_000.0, 128, 8.0, 1.0, 4.0, 8192.0),
            (500_000.0, 64, 32.0, 1.0, 4.0, 8192.0),
            (500_000.0, 128, 16.0, 1.0, 1.5, 8192.0),
            (100.0, 16, 8.0, 1.0, 2.0, 16.0),
            (10_000.0, 8, 4.0, 2.0, 3.0, 4096.0),
        ] {
            let wanted = RopeFactors {
                theta,
                head_dim,
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_context: original,
            };
            let values = wanted.values();
            let found = fit(&values, theta, 4096).unwrap().values();
            for (a, b) in found.iter().zip(&values) {
                assert!((a / b - 1.0).abs() < 1e-4, "{wanted:?}: {found:?} {values:?}");
            }
        }
        assert!(matches!(fit(&[1.0, 3.0, 2.0, 5.0], 10_000.0, 8192), Err(RestoreError::RopeFreqs { .. })));
    }

    fn small() -> Metadata {
        let mut metadata = Metadata::new();
        metadata.set("general.architecture", "gemma3");
        for (key, value) in [
            ("block_count", 2u32),
            ("context_length", 64),
            ("embedding_length", 32),
            ("feed_forward_length", 64),
            ("attention.head_count", 2),
            ("vocab_size", 9),
        ] {
            metadata.set(format!("gemma3.{key}"), value);
        }
        metadata.set("gemma3.attention.layer_norm_rms_epsilon", 1e-6f32);
        metadata
    }

    fn made(metadata: &Metadata) -> Result<Files, RestoreError> {
        files(metadata, Tensors { has: &|_| false, rope_freqs: None })
    }

    #[test]
    fn what_a_file_leaves_out_is_as_in_llama_cpp() {
        let mut metadata = small();
        metadata.set("gemma3.rope.scaling.factor", 8.0f32);
        let files = made(&metadata).unwrap();
        assert!(files.tokenizer.is_none());
        assert_eq!(files.config["rope_scaling"], json!({"rope_type": "linear", "factor": 8.0}));
        assert_eq!(files.config["query_pre_attn_scalar"], 16);
        assert_eq!((&files.config["head_dim"], &files.config["num_key_value_heads"]), (&json!(16), &json!(2)));
        assert_eq!(files.config["tie_word_embeddings"], true);
    }

    #[test]
    fn absurd_sizes_are_refused() {
        for (key, value, told) in [
            ("block_count", Value::U32(1 << 23), "no known model has that many"),
            ("block_count", Value::U32(0), "a positive whole number is needed"),
            ("embedding_length", Value::I32(-1), "the i32 -1"),
            ("feed_forward_length", vec![64u32, 32].into(), "layers of different sizes are not read"),
            ("attention.sliding_window_pattern", vec![true].into(), "1 flags; one for each of 2 layers is needed"),
            ("rope.scaling.type", "longrope".into(), "rope scaling of type `longrope` is not read"),
        ] {
            let mut metadata = small();
            metadata.set(format!("gemma3.{key}"), value);
            let message = made(&metadata).unwrap_err().to_string();
            assert!(message.contains(told), "{key}: {message}");
        }
        let mut metadata = small();
        metadata.set("general.architecture", "rwkv");
        assert!(made(&metadata).unwrap_err().to_string().contains("`rwkv` is not read; read are llama"));
        for values in [vec![], vec![f32::NAN; 4], vec![f32::INFINITY, 1.0], vec![0.0, -1.0]] {
            let found = files(&small(), Tensors { has: &|_| false, rope_freqs: Some(&values) });
            assert_eq!(found.is_ok(), values.is_empty(), "{values:?}");
        }
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!(shortest(1e-5), json!(1e-5));
        assert_eq!(shortest(10_000.0), json!(1e4));
        assert_eq!(shortest(0.6), json!(0.6));
    }
}
