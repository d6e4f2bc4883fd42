//! The table of architectures. A family is a row: what its config leaves unsaid and how its block differs
//! from the plain pre-norm, gated, rotary decoder that all of them share.

use super::config_error::ConfigError;

/// Where linears carry biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Biases {
    /// As the config keys `attention_bias` (q, k, v, o) and `mlp_bias` say.
    Config,
    /// q, k and v always.
    Qkv,
}

/// Which layers attend over a sliding window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sliding {
    None,
    /// All layers, unless `sliding_window` is null.
    All,
    /// Layers from `max_window_layers` on, if `use_sliding_window`.
    Upper,
    /// All but every n-th layer (or as `layer_types` says).
    Pattern(usize),
}

/// One row of the table.
#[derive(Debug)]
pub struct Family {
    pub model_type: &'static str,
    /// Names in `architectures` that mean this family.
    pub architectures: &'static [&'static str],
    /// What users call it.
    pub label: &'static str,
    pub biases: Biases,
    /// Keys of `config.json` by which transformers' class gives linears biases.
    pub bias_keys: &'static [&'static str],
    pub sliding: Sliding,
    /// Weights of RMS norms are stored minus one.
    pub norm_plus_one: bool,
    /// q and k heads are normalized before rotation.
    pub qk_norm: bool,
    /// Norms on both sides of attention and MLP.
    pub sandwich_norms: bool,
    /// Embeddings are multiplied by sqrt(hidden_size).
    pub scaled_embeddings: bool,
    /// Without a BOS token the model is far off its training distribution.
    pub needs_bos: bool,
    /// Values of keys that hub configs omit.
    pub defaults: Defaults,
}

/// Config values that the family's own code fills in.
#[derive(Clone, Copy, Debug)]
pub struct Defaults {
    pub rms_norm_eps: f64,
    /// Where it is none, every config has the key.
    pub heads: Option<usize>,
    pub kv_heads: Option<usize>,
    pub head_dim: Option<usize>,
    pub max_positions: usize,
    pub sliding_window: usize,
    pub tied: bool,
    pub rope_theta: f64,
    pub local_rope_theta: f64,
    pub activation: &'static str,
}

const PLAIN: Defaults = Defaults {
    rms_norm_eps: 1e-6,
    heads: None,
    kv_heads: None,
    head_dim: None,
    max_positions: 2048,
    sliding_window: 4096,
    tied: false,
    rope_theta: 10_000.0,
    local_rope_theta: 10_000.0,
    activation: "silu",
};

const LLAMA: Family = Family {
    model_type: "llama",
    architectures: &["LlamaForCausalLM"],
    label: "Llama 1, 2, 3; SmolLM2",
    biases: Biases::Config,
    bias_keys: &["attention_bias", "mlp_bias"],
    sliding: Sliding::None,
    norm_plus_one: false,
    qk_norm: false,
    sandwich_norms: false,
    scaled_embeddings: false,
    needs_bos: false,
    defaults: PLAIN,
};

const GEMMA3: Family = Family {
    model_type: "gemma3_text",
    architectures: &["Gemma3ForCausalLM"],
    label: "Gemma 3",
    bias_keys: &["attention_bias"],
    sliding: Sliding::Pattern(6),
    norm_plus_one: true,
    qk_norm: true,
    sandwich_norms: true,
    scaled_embeddings: true,
    needs_bos: true,
    defaults: Defaults {
        heads: Some(8),
        kv_heads: Some(4),
        head_dim: Some(256),
        max_positions: 131_072,
        tied: true,
        rope_theta: 1_000_000.0,
        activation: "gelu_pytorch_tanh",
        ..PLAIN
    },
    ..LLAMA
};

/// Every architecture the engine runs.
pub const FAMILIES: &[Family] = &[
    LLAMA,
    Family {
        model_type: "mistral",
        architectures: &["MistralForCausalLM"],
        label: "Mistral",
        bias_keys: &[],
        sliding: Sliding::All,
        defaults: Defaults { kv_heads: Some(8), max_positions: 131_072, ..PLAIN },
        ..LLAMA
    },
    Family {
        model_type: "qwen2",
        architectures: &["Qwen2ForCausalLM"],
        label: "Qwen2, Qwen2.5",
        biases: Biases::Qkv,
        bias_keys: &[],
        sliding: Sliding::Upper,
        defaults: Defaults { max_positions: 32_768, ..PLAIN },
        ..LLAMA
    },
    Family {
        model_type: "qwen3",
        architectures: &["Qwen3ForCausalLM"],
        label: "Qwen3",
        bias_keys: &["attention_bias"],
        sliding: Sliding::Upper,
        qk_norm: true,
        defaults: Defaults { head_dim: Some(128), max_positions: 32_768, ..PLAIN },
        ..LLAMA
    },
    GEMMA3,
    // The multimodal wrapper: its language model sits under `text_config`; other tensors are copied.
    Family {
        model_type: "gemma3",
        architectures: &["Gemma3ForConditionalGeneration"],
        label: "Gemma 3 (text part)",
        ..GEMMA3
    },
];

/// The family of a `config.json`.
pub fn find(model_type: &str, architecture: Option<&str>) -> Result<&'static Family, ConfigError> {
    let by_type = FAMILIES.iter().find(|f| f.model_type == model_type);
    match (by_type, architecture) {
        (Some(family), Some(name)) if !family.architectures.contains(&name) => {
            Err(unknown(&format!("{model_type} ({name})")))
        }
        (Some(family), _) => Ok(family),
        (None, Some(name)) if model_type.is_empty() => {
            FAMILIES.iter().find(|f| f.architectures.contains(&name)).ok_or_else(|| unknown(name))
        }
        (None, _) => Err(unknown(model_type)),
    }
}

fn unknown(name: &str) -> ConfigError {
    ConfigError::UnknownFamily {
        name: name.into(),
        known: FAMILIES.iter().map(|f| format!("{} ({})", f.model_type, f.label)).collect::<Vec<_>>().join(", "),
    }
}
