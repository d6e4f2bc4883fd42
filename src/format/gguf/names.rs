//! Tensors of Hugging Face checkpoints as GGUF has them: names, the order of query and key rows, norms, and the rope
//! factors of Llama 3. Read in llama.cpp's gguf-py/gguf/tensor_mapping.py and conversion/ at 0c1e57098.

use std::f64::consts::PI;

use thiserror::Error;

use crate::model::families::{FAMILIES, Family};
use crate::model::presence::is_buffer;

/// How one `general.architecture` stores a family.
#[derive(Debug, PartialEq, Eq)]
pub struct Architecture {
    pub name: &'static str,
    /// The `model_type`s it stands for; the first is the one to read it as.
    model_types: &'static [&'static str],
    /// Query and key rows are in the order of a rope that turns neighbours, not halves.
    pub interleaved: bool,
    /// Linears whose biases llama.cpp loads. It refuses a file with a tensor that it does not load.
    biases: &'static [&'static str],
}

// llama.cpp, src/llama-model.cpp: create_tensor_qkv; src/models/{llama,qwen2,qwen3,gemma3}.cpp: load_arch_tensors.
const QKV: &[&str] = &["attn_q", "attn_k", "attn_v"];
const QKV_AND_HEAD: &[&str] = &["attn_q", "attn_k", "attn_v", "output"];
const ALL_LINEARS: &[&str] = &["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"];

/// Every architecture of the families that are run: one row each.
pub const ARCHITECTURES: &[Architecture] = &[
    Architecture { name: "llama", model_types: &["llama", "mistral"], interleaved: true, biases: ALL_LINEARS },
    Architecture { name: "qwen2", model_types: &["qwen2"], interleaved: false, biases: QKV_AND_HEAD },
    Architecture { name: "qwen3", model_types: &["qwen3"], interleaved: false, biases: QKV },
    Architecture { name: "gemma3", model_types: &["gemma3_text", "gemma3"], interleaved: false, biases: QKV },
];

/// Why a tensor or a model has no place.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NameError {
    #[error("the GGUF architecture `{name}` is not read; read are {known}")]
    Architecture { name: String, known: String },
    #[error("the family {0} has no GGUF architecture here")]
    Family(&'static str),
    #[error("tensor `{tensor}` has no place in the GGUF architecture `{architecture}`")]
    Tensor { tensor: String, architecture: &'static str },
}

/// What happens to the values of a tensor between a checkpoint and a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    None,
    /// Rows of query heads change places: [`interleave`].
    Queries,
    /// Rows of key heads do.
    Keys,
    /// One is added: the file holds the factor itself, the checkpoint the factor less one.
    PlusOne,
}

/// Modules of a block: in checkpoints, in files.
const BLOCK: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// The norm before the MLP, which is the second of a plain block.
const PLAIN_NORMS: &[(&str, &str)] = &[("post_attention_layernorm", "ffn_norm")];

/// Norms after attention and around the MLP.
const SANDWICH_NORMS: &[(&str, &str)] = &[
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];

/// Modules beside the blocks.
const MODEL: &[(&str, &str)] = &[("embed_tokens", "token_embd"), ("norm", "output_norm"), ("lm_head", "output")];

/// What names of the language model start with; multimodal wrappers changed theirs over time.
const PREFIXES: [&str; 4] = ["language_model.model.", "model.language_model.", "language_model.", "model."];

/// Starts of the names of other parts of multimodal models.
const OTHER_PARTS: [&str; 4] =
    ["vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."];

/// A part of Hugging Face tensor names that `text` holds, such as `down_proj`, and what GGUF has for it.
pub fn hugging_face_part(text: &str) -> Option<(&'static str, &'static str)> {
    let all = BLOCK.iter().chain(PLAIN_NORMS).chain(SANDWICH_NORMS).chain(MODEL);
    let parts = all.map(|(hf, gguf)| (hf.rsplit('.').next().unwrap_or(hf), *gguf));
    // `norm`, and `q_norm` of `attn_q_norm`, are parts of names in GGUF as well.
    let found = parts.filter(|(part, gguf)| !gguf.contains(part) && text.contains(part));
    found.max_by_key(|(part, _)| part.len())
}

impl Architecture {
    /// The architecture a family is stored as.
    pub fn of(family: &Family) -> Result<&'static Self, NameError> {
        ARCHITECTURES
            .iter()
            .find(|row| row.model_types.contains(&family.model_type))
            .ok_or(NameError::Family(family.model_type))
    }

    /// The architecture `general.architecture` names.
    pub fn parse(name: &str) -> Result<&'static Self, NameError> {
        ARCHITECTURES.iter().find(|row| row.name == name).ok_or_else(|| NameError::Architecture {
            name: name.into(),
            known: ARCHITECTURES.iter().map(|row| row.name).collect::<Vec<_>>().join(", "),
        })
    }

    /// The family it is read as.
    pub fn family(&self) -> Result<&'static Family, NameError> {
        let first = self.model_types[0];
        FAMILIES.iter().find(|family| family.model_type == first).ok_or(NameError::Family(first))
    }

    /// Modules of a block, those of both kinds of norms included.
    fn block(&self) -> impl Iterator<Item = &'static (&'static str, &'static str)> {
        let sandwich = self.family().is_ok_and(|family| family.sandwich_norms);
        BLOCK.iter().chain(if sandwich { SANDWICH_NORMS } else { PLAIN_NORMS })
    }

    /// The name in a file of a checkpoint's tensor; `None` for what files leave out: buffers that are computed, and
    /// parts of multimodal models that see or hear.
    pub fn to_gguf(&self, tensor: &str) -> Result<Option<String>, NameError> {
        if is_buffer(tensor) || OTHER_PARTS.iter().any(|part| tensor.starts_with(part)) {
            return Ok(None);
        }
        let unknown = || NameError::Tensor { tensor: tensor.into(), architecture: self.name };
        let inner = PREFIXES.iter().find_map(|prefix| tensor.strip_prefix(prefix)).unwrap_or(tensor);
        let (module, kind) = inner.rsplit_once('.').ok_or_else(unknown)?;
        let named = match module.strip_prefix("layers.") {
            Some(rest) => {
                let (layer, module) = rest.split_once('.').ok_or_else(unknown)?;
                let (_, name) = self.block().find(|(hf, _)| *hf == module).ok_or_else(unknown)?;
                let layer: usize = layer.parse().map_err(|_| unknown())?;
                format!("blk.{layer}.{name}.{kind}")
            }
            None => {
                let (_, name) = MODEL.iter().find(|(hf, _)| *hf == module).ok_or_else(unknown)?;
                format!("{name}.{kind}")
            }
        };
        if matches!(kind, "weight" | "bias") { Ok(Some(named)) } else { Err(unknown()) }
    }

    /// The name in a checkpoint of a file's tensor; `None` for the rope factors, which a checkpoint has in its config.
    pub fn to_hf(&self, tensor: &str) -> Result<Option<String>, NameError> {
        if tensor == ROPE_FACTORS {
            return Ok(None);
        }
        let unknown = || NameError::Tensor { tensor: tensor.into(), architecture: self.name };
        let (module, kind) = tensor.rsplit_once('.').ok_or_else(unknown)?;
        let named = match module.strip_prefix("blk.") {
            Some(rest) => {
                let (layer, module) = rest.split_once('.').ok_or_else(unknown)?;
                let (name, _) = self.block().find(|(_, gguf)| *gguf == module).ok_or_else(unknown)?;
                let layer: usize = layer.parse().map_err(|_| unknown())?;
                format!("model.layers.{layer}.{name}.{kind}")
            }
            None => match MODEL.iter().find(|(_, gguf)| *gguf == module).ok_or_else(unknown)?.0 {
                head @ "lm_head" => format!("{head}.{kind}"),
                name => format!("model.{name}.{kind}"),
            },
        };
        if matches!(kind, "weight" | "bias") { Ok(Some(named)) } else { Err(unknown()) }
    }

    /// Why llama.cpp would refuse a file with these tensors, named as in a file: it takes fewer biases than are stored.
    pub fn refused_biases<'a>(&self, tensors: impl IntoIterator<Item = &'a str>) -> Option<String> {
        let taken = |tensor: &&str| {
            let linear = tensor.strip_suffix(".bias").and_then(|module| module.rsplit('.').next());
            linear.is_none_or(|linear| self.biases.contains(&linear))
        };
        let mut refused = tensors.into_iter().filter(|tensor| !taken(tensor));
        let first = refused.next()?;
        Some(format!(
            "for the architecture `{}` llama.cpp takes biases of {} only, and refuses a file with others: {} (first \
             `{first}`)",
            self.name,
            self.biases.join(", "),
            1 + refused.count()
        ))
    }

    /// What is done to the values of a tensor, named as in a file, on the way there; the inverse on the way back.
    pub fn change(&self, tensor: &str) -> Change {
        let module = tensor.rsplit('.').nth(1).unwrap_or_default();
        match module {
            "attn_q" if self.interleaved => Change::Queries,
            "attn_k" if self.interleaved => Change::Keys,
            // Every norm, those of queries and keys included.
            norm if norm.ends_with("norm") && self.family().is_ok_and(|family| family.norm_plus_one) => Change::PlusOne,
            _ => Change::None,
        }
    }
}

/// The row of a checkpoint that becomes row `row` of a file, with heads of `head_dim` rows each: halves of a head
/// turn together there, neighbours here.
pub fn interleaved_row(row: usize, head_dim: usize) -> usize {
    let (head, at) = (row / head_dim, row % head_dim);
    head * head_dim + at / 2 + at % 2 * (head_dim / 2)
}

/// Rows of `row_bytes` in the order of a file. The length must be heads of `head_dim` rows, `head_dim` even.
pub fn interleave(rows: &[u8], row_bytes: usize, head_dim: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(rows.len());
    for row in 0..rows.len() / row_bytes {
        let from = interleaved_row(row, head_dim) * row_bytes;
        out.extend_from_slice(&rows[from..from + row_bytes]);
    }
    out
}

/// The inverse of [`interleave`].
pub fn deinterleave(rows: &[u8], row_bytes: usize, head_dim: usize) -> Vec<u8> {
    let mut out = vec![0; rows.len()];
    for (row, bytes) in rows.chunks_exact(row_bytes).enumerate() {
        let to = interleaved_row(row, head_dim) * row_bytes;
        out[to..to + row_bytes].copy_from_slice(bytes);
    }
    out
}

/// Norm weights of a checkpoint as a file has them, where they are stored less one.
pub fn plus_one(weights: &mut [f32]) {
    weights.iter_mut().for_each(|w| *w += 1.0);
}

/// The inverse of [`plus_one`], up to the rounding of the sum.
pub fn minus_one(weights: &mut [f32]) {
    weights.iter_mut().for_each(|w| *w -= 1.0);
}

/// The name of the tensor that holds what [`RopeFactors::values`] gives.
pub const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Llama 3.1's stretching of slow frequencies, by `rope_scaling` of a config.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeFactors {
    pub theta: f64,
    pub head_dim: usize,
    pub factor: f64,
    pub low_freq_factor: f64,
    pub high_freq_factor: f64,
    pub original_context: f64,
}

impl RopeFactors {
    /// What each frequency is divided by: `head_dim / 2` values. Computed in f32 and in this order, as the converter
    /// of llama.cpp does.
    pub fn values(&self) -> Vec<f32> {
        let (low, high) = (self.low_freq_factor as f32, self.high_freq_factor as f32);
        let (factor, original) = (self.factor as f32, self.original_context as f32);
        let (longest, shortest) = (
            (self.original_context / self.low_freq_factor) as f32,
            (self.original_context / self.high_freq_factor) as f32,
        );
        let one = |i: usize| {
            let frequency = 1.0 / (self.theta as f32).powf(2.0 * i as f32 / self.head_dim as f32);
            let wavelength = (1.0 / frequency) * (2.0 * PI) as f32;
            if wavelength < shortest {
                1.0
            } else if wavelength > longest {
                factor
            } else {
                let smooth = ((1.0 / wavelength) * original - low) / (high - low);
                1.0 / ((1.0 - smooth) / factor + smooth)
            }
        };
        (0..self.head_dim / 2).map(one).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_family_has_an_architecture() {
        for family in FAMILIES {
            let architecture = Architecture::of(family).unwrap();
            assert_eq!(Architecture::parse(architecture.name).unwrap(), architecture);
            let read = architecture.family().unwrap();
            assert_eq!(
                (read.norm_plus_one, read.qk_norm, read.sandwich_norms),
                (family.norm_plus_one, family.qk_norm, family.sandwich_norms)
            );
        }
        let error = Architecture::parse("mamba").unwrap_err().to_string();
        assert!(error.contains("`mamba`") && error.contains("llama, qwen2, qwen3, gemma3"), "{error}");
    }

    #[test]
    fn names_there_and_back() {
        let gemma = Architecture::parse("gemma3").unwrap();
        let llama = Architecture::parse("llama").unwrap();
        for (architecture, hf, gguf) in [
            (llama, "model.embed_tokens.weight", "token_embd.weight"),
            (llama, "model.norm.weight", "output_norm.weight"),
            (llama, "lm_head.weight", "output.weight"),
            (llama, "model.layers.12.self_attn.q_proj.weight", "blk.12.attn_q.weight"),
            (llama, "model.layers.0.self_attn.k_proj.bias", "blk.0.attn_k.bias"),
            (llama, "model.layers.0.self_attn.o_proj.weight", "blk.0.attn_output.weight"),
            (llama, "model.layers.0.input_layernorm.weight", "blk.0.attn_norm.weight"),
            (llama, "model.layers.0.post_attention_layernorm.weight", "blk.0.ffn_norm.weight"),
            (llama, "model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
            (gemma, "model.layers.0.post_attention_layernorm.weight", "blk.0.post_attention_norm.weight"),
            (gemma, "model.layers.0.pre_feedforward_layernorm.weight", "blk.0.ffn_norm.weight"),
            (gemma, "model.layers.0.post_feedforward_layernorm.weight", "blk.0.post_ffw_norm.weight"),
            (gemma, "model.layers.0.self_attn.q_norm.weight", "blk.0.attn_q_norm.weight"),
        ] {
            assert_eq!(architecture.to_gguf(hf).unwrap().unwrap(), gguf);
            assert_eq!(architecture.to_hf(gguf).unwrap().unwrap(), hf);
        }
        for wrapped in ["language_model.model.norm.weight", "model.language_model.norm.weight"] {
            assert_eq!(gemma.to_gguf(wrapped).unwrap().unwrap(), "output_norm.weight");
        }
        assert_eq!(gemma.to_gguf("language_model.lm_head.weight").unwrap().unwrap(), "output.weight");
    }

    #[test]
    fn what_has_no_place() {
        let llama = Architecture::parse("llama").unwrap();
        assert_eq!(llama.to_gguf("model.layers.0.self_attn.rotary_emb.inv_freq"), Ok(None));
        assert_eq!(llama.to_gguf("vision_tower.layers.0.mlp.fc1.weight"), Ok(None));
        assert_eq!(llama.to_hf(ROPE_FACTORS), Ok(None));
        for odd in [
            "model.layers.0.mlp.experts.0.w1.weight",
            "model.layers.x.mlp.up_proj.weight",
            "model.layers.0.pre_feedforward_layernorm.weight",
            "model.layers.0.mlp.up_proj.qweight",
            "weight",
        ] {
            assert!(llama.to_gguf(odd).unwrap_err().to_string().contains(odd), "{odd}");
        }
        for odd in ["blk.0.ffn_up_exps.weight", "blk.0", "output.scale", "blk.0.post_ffw_norm.weight"] {
            assert!(llama.to_hf(odd).is_err(), "{odd}");
        }
    }

    #[test]
    fn changes() {
        let change = |name: &str, tensor: &str| Architecture::parse(name).unwrap().change(tensor);
        assert_eq!(change("llama", "blk.0.attn_q.weight"), Change::Queries);
        assert_eq!(change("llama", "blk.0.attn_k.bias"), Change::Keys);
        assert_eq!(change("llama", "blk.0.attn_norm.weight"), Change::None);
        assert_eq!(change("qwen2", "blk.0.attn_q.weight"), Change::None);
        assert_eq!(change("gemma3", "output_norm.weight"), Change::PlusOne);
        assert_eq!(change("gemma3", "blk.0.attn_q_norm.weight"), Change::PlusOne);
        assert_eq!(change("gemma3", "blk.0.ffn_up.weight"), Change::None);
    }

    #[test]
    fn rows_of_heads_interleave() {
        // Two heads of four rows, one byte a row.
        let rows = [0, 1, 2, 3, 10, 11, 12, 13];
        let mixed = interleave(&rows, 1, 4);
        assert_eq!(mixed, [0, 2, 1, 3, 10, 12, 11, 13]);
        assert_eq!(deinterleave(&mixed, 1, 4), rows);
        let wide: Vec<u8> = (0..48).collect();
        assert_eq!(deinterleave(&interleave(&wide, 3, 8), 3, 8), wide);
        assert_eq!(interleave(&wide, 3, 8)[..6], [0, 1, 2, 12, 13, 14]);
    }

    #[test]
    fn norms() {
        let mut weights = [0.25, -0.5];
        plus_one(&mut weights);
        assert_eq!(weights, [1.25, 0.5]);
        minus_one(&mut weights);
        assert_eq!(weights, [0.25, -0.5]);
    }

    #[test]
    fn rope_factors_of_llama_3() {
        let factors = RopeFactors {
            theta: 500_000.0,
            head_dim: 128,
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192.0,
        };
        let values = factors.values();
        assert_eq!(values.len(), 64);
        // The first fast frequency that is not left alone, and the first that is stretched in full.
        assert_eq!(values.iter().position(|v| *v != 1.0), Some(29));
        assert_eq!(values.iter().position(|v| *v == 8.0), Some(35));
        // What the converter's expressions give in PyTorch 2.15, bit for bit.
        let between = [0x3f9a8ed5, 0x3fc6d64a, 0x4001af1d, 0x402c732e, 0x406bcace, 0x40a83c06];
        assert_eq!(values[29..35].iter().map(|v| v.to_bits()).collect::<Vec<_>>(), between);
    }
}
