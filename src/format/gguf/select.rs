//! Which type each tensor gets: llama-quantize's rules, so that a file of a given type has the same tensors in the
//! same types wherever it was made. Read in llama.cpp's src/llama-quant.cpp at 0c1e57098.

mod patterns;

use regex::Regex;
use thiserror::Error;

pub use super::file_type::FileType;
use super::file_type::FileType as F;
use super::names::Architecture;
use super::write::{layer, sort_as_written};
use crate::model::config::ModelConfig;
use crate::num::ggml::GgmlType::{self, *};
use patterns::why_without_effect;
pub use patterns::{not_applied, parse_tensor_type};

/// What the rules ask about a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFacts {
    /// `general.architecture`.
    pub architecture: String,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    /// 0 or 1 where there are none.
    pub experts: usize,
}

impl ModelFacts {
    /// Those of a model without experts, which all that are run are.
    pub fn of(config: &ModelConfig, architecture: &Architecture) -> Self {
        Self {
            architecture: architecture.name.into(),
            layers: config.layers.len(),
            heads: config.heads,
            kv_heads: config.kv_heads,
            experts: 0,
        }
    }
}

/// What the user asks for.
#[derive(Clone, Debug)]
pub struct Options {
    pub file_type: FileType,
    /// For `output.weight`, or the embedding where that is the output as well.
    pub output: Option<GgmlType>,
    /// For `token_embd.weight`.
    pub token_embedding: Option<GgmlType>,
    /// Types of tensors whose names a pattern is found in; the first that fits wins.
    pub tensors: Vec<(Regex, GgmlType)>,
    /// Leaves `output.weight` as it is.
    pub keep_output: bool,
    /// No mixture: one type for all.
    pub pure: bool,
    /// Where blocks do not fill a row, a type that does; otherwise that is an error.
    pub fallback: bool,
    /// Whether importance is at hand.
    pub importance: bool,
    /// Refuse without importance what needs it.
    pub require_importance: bool,
}

impl Options {
    pub fn new(file_type: FileType) -> Self {
        Self {
            file_type,
            output: None,
            token_embedding: None,
            tensors: vec![],
            keep_output: false,
            pure: false,
            fallback: true,
            importance: false,
            require_importance: true,
        }
    }
}

/// Why types cannot be given.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SelectError {
    #[error("`{0}` is no REGEX=TYPE, such as `attn_v=Q6_K`")]
    TensorType(String),
    #[error("`{name}` is no type of tensors; known are {known}")]
    UnknownType { name: String, known: String },
    #[error("the pattern `{pattern}` is not valid: {why}")]
    Pattern { pattern: String, why: String },
    #[error("tensor `{tensor}` cannot be {kind}: it has {cols} columns, no multiple of {}; allow another type", kind.block())]
    NoFallback { tensor: String, kind: GgmlType, cols: usize },
    #[error("tensor `{tensor}` would be {kind}, which is useless without importance; give an importance matrix")]
    NeedsImportance { tensor: String, kind: GgmlType },
    #[error("the pattern `{pattern}` gives no tensor its type: {why}")]
    NoEffect { pattern: String, why: String },
}

/// What becomes of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    pub name: String,
    /// `None`: it stays as it is.
    pub kind: Option<GgmlType>,
    /// What the rules wanted, where the shape did not allow it.
    pub wanted: Option<GgmlType>,
}

/// Gives each tensor (name, shape with the outermost extent first) its type. Choices come in the order in which
/// llama-quantize writes tensors, on which some rules depend.
///
/// # Errors
///
/// When the rows of a tensor do not fit its type and no other is allowed, a tensor needs importance that is not at hand,
/// or a pattern gives no tensor its type.
pub fn select(
    tensors: &[(String, Vec<usize>)],
    facts: &ModelFacts,
    options: &Options,
) -> Result<Vec<Choice>, SelectError> {
    let mut sorted: Vec<&(String, Vec<usize>)> = tensors.iter().collect();
    sort_as_written(&mut sorted, |tensor| &tensor.0);
    let mut rules = Rules {
        file_type: options.file_type,
        base: options.file_type.base(),
        importance: options.importance,
        facts,
        tied: !tensors.iter().any(|(name, _)| name == "output.weight"),
        values: sorted.iter().filter(|(name, _)| is_value(name)).count(),
        value: 0,
        down: 0,
        gate: 0,
        up: 0,
    };
    let mut choices = Vec::with_capacity(sorted.len());
    let mut used = vec![false; options.tensors.len()];
    for (name, shape) in &sorted {
        let kept = !is_quantized(name, shape) || (options.keep_output && name == "output.weight");
        if kept {
            choices.push(Choice { name: name.clone(), kind: None, wanted: None });
            continue;
        }
        // The rules count the tensors that are left to them.
        let wanted = match asked(name, rules.tied, options) {
            Some((kind, pattern)) => {
                pattern.into_iter().for_each(|pattern| used[pattern] = true);
                kind
            }
            None if options.pure || matches!(rules.base, F32 | F16 | BF16) => rules.base,
            None => rules.choose(name, shape),
        };
        let cols = shape.last().copied().unwrap_or(1);
        let kind = fitting(wanted, cols);
        if kind != wanted && !options.fallback {
            return Err(SelectError::NoFallback { tensor: name.clone(), kind: wanted, cols });
        }
        if options.require_importance && !options.importance && needs_importance(name, kind, options.file_type) {
            return Err(SelectError::NeedsImportance { tensor: name.clone(), kind });
        }
        choices.push(Choice { name: name.clone(), kind: Some(kind), wanted: (kind != wanted).then_some(wanted) });
    }
    if let Some(unused) = used.iter().position(|used| !used) {
        let pattern = &options.tensors[unused].0;
        let why = why_without_effect(pattern, &sorted, options);
        return Err(SelectError::NoEffect { pattern: pattern.as_str().into(), why });
    }
    Ok(choices)
}

fn is_embedding(name: &str) -> bool {
    name == "token_embd.weight" || name == "per_layer_token_embd.weight"
}

/// The type that the user gave a tensor, and which pattern decided it.
fn asked(name: &str, tied: bool, options: &Options) -> Option<(GgmlType, Option<usize>)> {
    let pattern = options.tensors.iter().position(|(pattern, _)| pattern.is_match(name));
    let by_pattern = pattern.map(|pattern| (options.tensors[pattern].1, Some(pattern)));
    let by_option = |kind: Option<GgmlType>| kind.map(|kind| (kind, None));
    let output = by_option(options.output.filter(|_| name == "output.weight"));
    let embedding = match name {
        "token_embd.weight" => by_option(options.token_embedding),
        // A table of its own, which a pattern may single out.
        _ if is_embedding(name) => by_pattern.or(by_option(options.token_embedding)),
        _ => None,
    };
    let shared = options.output.filter(|_| tied && is_embedding(name) && !options.pure);
    output.or(embedding).or(by_pattern).or(by_option(shared))
}

/// Parts of names of small or delicate matrices that stay as they are.
const KEPT: &[&str] = &[
    "_norm.weight",
    "ffn_gate_inp.weight",
    "ffn_gate_tid2eid.weight",
    "altup",
    "laurel",
    "per_layer_model_proj",
    "ssm_conv1d",
    "shortconv.conv.weight",
    "indexer.k_proj.weight",
    "indexer.q_proj.weight",
    "time_mix_first.weight",
    "time_mix_w0.weight",
    "time_mix_w1.weight",
    "time_mix_w2.weight",
    "time_mix_v0.weight",
    "time_mix_v1.weight",
    "time_mix_v2.weight",
    "time_mix_a0.weight",
    "time_mix_a1.weight",
    "time_mix_a2.weight",
    "time_mix_g1.weight",
    "time_mix_g2.weight",
    "time_mix_decay_w1.weight",
    "time_mix_decay_w2.weight",
    "time_mix_lerp_fused.weight",
    "attn_rel_b.weight",
    ".position_embd",
    "sam.pos_embd",
    "sam.neck.",
    "sam.net_",
    ".rel_pos",
    ".patch_embd",
    ".patch_merger",
    "a.rvq.codebook",
    "mm.a.code_embd",
];

/// Whether a tensor is quantized at all.
pub fn is_quantized(name: &str, shape: &[usize]) -> bool {
    let positions = name == "position_embd.weight" || name == "token_types.weight";
    let kept = positions || KEPT.iter().any(|part| name.contains(part));
    shape.len() >= 2 && name.ends_with("weight") && !kept
}

/// The type itself, or where its blocks do not fill rows of `cols` values the one that takes its place.
pub fn fitting(kind: GgmlType, cols: usize) -> GgmlType {
    if cols.is_multiple_of(kind.block()) {
        return kind;
    }
    let other = match kind {
        IQ1_S | IQ1_M | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S | IQ4_XS => IQ4_NL,
        Q2_K | Q3_K | TQ1_0 | TQ2_0 => Q4_0,
        Q4_K => Q5_0,
        Q5_K => Q5_1,
        Q6_K => Q8_0,
        _ => F16,
    };
    if cols.is_multiple_of(other.block()) { other } else { F16 }
}

/// What a tensor that is not quantized is stored as, where the source has it as `stored`: vectors always in F32.
pub fn kept(stored: GgmlType, shape: &[usize]) -> GgmlType {
    match shape {
        [] | [_] => F32,
        [.., cols] => fitting(stored, *cols),
    }
}

/// Whether llama-quantize refuses to give a tensor this type without importance.
pub fn needs_importance(name: &str, kind: GgmlType, file_type: FileType) -> bool {
    if is_embedding(name) || name == "output.weight" {
        return false;
    }
    match kind {
        IQ1_S | IQ1_M | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS => true,
        Q2_K => file_type == F::Q2_K_S,
        _ => false,
    }
}

/// Value projections, alone or fused with others.
fn is_value(name: &str) -> bool {
    ["attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight"].iter().any(|part| name.contains(part))
}

/// Layers that get more bits: the first and last eighth, and every third between.
fn more_bits(layer: usize, layers: usize) -> bool {
    layer < layers / 8 || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2
}

/// The mixture rules, with what they count.
struct Rules<'a> {
    file_type: FileType,
    base: GgmlType,
    importance: bool,
    facts: &'a ModelFacts,
    /// The embedding is the output as well.
    tied: bool,
    /// Value projections of the model, and how many came so far.
    values: usize,
    value: usize,
    /// The same for the linears of the MLP.
    down: usize,
    gate: usize,
    up: usize,
}

impl Rules<'_> {
    fn choose(&mut self, name: &str, shape: &[usize]) -> GgmlType {
        let embedding = is_embedding(name);
        if name == "output.weight" || (self.tied && embedding) {
            return self.output(shape);
        }
        if self.file_type == F::MXFP4_MOE {
            return if shape.len() > 2 && shape[shape.len() - 3] > 1 { MXFP4 } else { Q8_0 };
        }
        if embedding {
            return match self.file_type {
                F::IQ1_S | F::IQ1_M | F::IQ2_XXS | F::IQ2_XS => Q2_K,
                F::IQ2_S | F::IQ2_M | F::IQ3_XXS => IQ3_S,
                F::TQ1_0 | F::TQ2_0 => Q4_K,
                _ => self.base,
            };
        }
        match self.file_type {
            F::IQ1_S | F::IQ1_M | F::IQ2_XXS | F::IQ2_XS | F::IQ2_S | F::IQ2_M => self.two_bits(name),
            _ => self.mixture(name),
        }
    }

    fn falcon(&self) -> bool {
        self.facts.architecture == "falcon"
    }

    /// Query heads to a key head.
    fn shared(&self) -> usize {
        self.facts.heads / self.facts.kv_heads.max(1)
    }

    fn output(&self, shape: &[usize]) -> GgmlType {
        let fits = shape.last().is_some_and(|cols| cols % self.base.block() == 0);
        match self.file_type {
            F::MXFP4_MOE => Q8_0,
            _ if self.falcon() || !fits => Q8_0,
            F::IQ1_S | F::IQ1_M | F::IQ2_XXS | F::IQ2_XS | F::IQ2_S | F::IQ2_M | F::IQ3_XXS => Q5_K,
            F::Q8_0 => Q8_0,
            _ => Q6_K,
        }
    }

    fn two_bits(&mut self, name: &str) -> GgmlType {
        let finer = matches!(self.file_type, F::IQ2_S | F::IQ2_M);
        let raised = if finer { IQ3_S } else { Q2_K };
        let eight = self.facts.experts == 8;
        if is_value(name) {
            self.value += 1;
            return if self.shared() >= 4 || self.facts.experts >= 4 { Q4_K } else { raised };
        }
        if eight && name.contains("attn_k.weight") {
            return Q4_K;
        }
        if name.contains("ffn_down") {
            self.down += 1;
            return if self.down <= self.facts.layers / 8 { raised } else { self.base };
        }
        if name.contains("attn_output.weight") {
            return match self.file_type {
                _ if eight => Q5_K,
                F::IQ1_S | F::IQ1_M => IQ2_XXS,
                _ if finer => IQ3_S,
                _ => self.base,
            };
        }
        self.base
    }

    fn mixture(&mut self, name: &str) -> GgmlType {
        let eight = self.facts.experts == 8;
        if is_value(name) {
            return self.value_projection();
        }
        if name.contains("attn_k.weight") && eight {
            return Q8_0;
        }
        if name.contains("attn_k.weight") || name.contains("attn_q.weight") {
            return match self.file_type {
                F::IQ3_XS => IQ3_XXS,
                F::IQ3_XXS => IQ2_S,
                _ => self.base,
            };
        }
        if name.contains("ffn_down") {
            self.down += 1;
            let at = self.place(name, self.down - 1);
            return self.down_projection(at);
        }
        if name.contains("attn_output.weight") {
            return self.attention_output(eight);
        }
        let count = if name.contains("ffn_gate") {
            &mut self.gate
        } else if name.contains("ffn_up") {
            &mut self.up
        } else {
            return self.base;
        };
        *count += 1;
        let nth = *count - 1;
        let (at, layers) = (self.place(name, nth), self.facts.layers);
        let middle = layers / 8 <= at && at < 7 * layers / 8;
        if self.file_type == F::IQ3_XS && middle { IQ3_XXS } else { self.base }
    }

    /// Which linear of its kind a tensor is: the layer it says with experts, where a layer has several, otherwise the
    /// count.
    fn place(&self, name: &str, nth: usize) -> usize {
        if self.facts.experts > 1 { usize::try_from(layer(name)).unwrap_or(nth) } else { nth }
    }

    fn value_projection(&mut self) -> GgmlType {
        let (at, shared) = (self.value, self.shared() >= 4);
        self.value += 1;
        let mut kind = match self.file_type {
            F::Q2_K => {
                if shared {
                    Q4_K
                } else {
                    Q3_K
                }
            }
            F::Q2_K_S | F::IQ3_XXS | F::IQ3_XS | F::IQ3_S if shared => Q4_K,
            F::IQ3_XXS if !self.importance => IQ3_S,
            F::IQ3_M => Q4_K,
            F::Q3_K_M => {
                if at < 2 {
                    Q5_K
                } else {
                    Q4_K
                }
            }
            F::Q3_K_L => Q5_K,
            F::IQ4_NL | F::IQ4_XS if shared => Q5_K,
            F::Q4_K_M | F::Q5_K_M if more_bits(at, self.values) => Q6_K,
            F::Q4_K_S if at < 4 => Q5_K,
            _ => self.base,
        };
        // In the 70B models eight heads share these weights, so they are small and matter much.
        let llama = self.facts.architecture == "llama" && self.facts.heads != self.facts.kv_heads;
        let big = self.facts.layers == 80 && (llama || self.facts.architecture == "qwen2");
        if big && matches!(kind, Q3_K | Q4_K) {
            kind = Q5_K;
        }
        if self.facts.experts == 8 { Q8_0 } else { kind }
    }

    fn down_projection(&self, at: usize) -> GgmlType {
        let n = self.facts.layers;
        let (early, more, falcon) = (at < n / 8, more_bits(at, n), self.falcon());
        match self.file_type {
            F::Q2_K => Q3_K,
            F::Q2_K_S if early => Q4_K,
            F::IQ3_XXS if !self.importance => {
                if early {
                    Q4_K
                } else {
                    Q3_K
                }
            }
            F::Q3_K_M if at < n / 16 => Q5_K,
            F::Q3_K_M => {
                if !falcon || more {
                    Q4_K
                } else {
                    Q3_K
                }
            }
            F::IQ3_M if early || (self.facts.experts == 8 && more) => Q4_K,
            F::Q3_K_L => {
                if falcon {
                    Q4_K
                } else {
                    Q5_K
                }
            }
            F::Q4_K_M if falcon && at < n / 16 => Q6_K,
            F::Q4_K_M if more => {
                if falcon {
                    Q5_K
                } else {
                    Q6_K
                }
            }
            F::IQ4_NL | F::IQ4_XS if early && !self.importance => Q5_K,
            F::Q5_K_M if more => Q6_K,
            F::Q4_K_S if early && !falcon => Q5_K,
            F::Q4_0 if early && self.importance => Q4_1,
            F::Q5_0 if early && self.importance => Q5_1,
            _ => self.base,
        }
    }

    fn attention_output(&self, eight: bool) -> GgmlType {
        match self.file_type {
            F::Q3_K_L if self.falcon() => Q4_K,
            _ if self.falcon() => self.base,
            F::Q2_K
            | F::IQ3_XXS
            | F::IQ3_XS
            | F::IQ3_S
            | F::IQ3_M
            | F::Q3_K_S
            | F::Q3_K_M
            | F::IQ4_NL
            | F::IQ4_XS
            | F::Q4_K_S
            | F::Q4_K_M
                if eight =>
            {
                Q5_K
            }
            _ if eight => self.base,
            F::Q2_K => Q3_K,
            F::IQ3_XXS => IQ3_S,
            F::Q3_K_M | F::IQ3_M => Q4_K,
            F::Q3_K_L => Q5_K,
            _ => self.base,
        }
    }
}
