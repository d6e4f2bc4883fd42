//! Where every tensor of the source went.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::integrity::{Fate, TensorAccounting};

/// Tensors of one fate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Share {
    /// Tensors of the source.
    pub tensors: u64,
    /// Numbers in them.
    pub parameters: u64,
    /// Their bytes in the source.
    pub source_bytes: u64,
    /// Bytes of what became of them.
    pub artifact_bytes: u64,
}

/// A tensor that does not go the usual way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Exception {
    pub tensor: String,
    pub fate: Fate,
    /// The reason, for people.
    pub note: String,
}

/// What calibration saw of a module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TokensSeen {
    /// Its path, such as `model.layers.0.self_attn.q_proj`.
    pub module: String,
    /// Input channels.
    pub inputs: u64,
    /// Tokens that went into it.
    pub tokens: u64,
}

/// Bytes that one token of context occupies.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CacheMemory {
    /// `f16`, `fp8`, `fp8_e5m2`, `int8`, ...
    pub kind: String,
    /// Keys and values of all layers, scales included.
    pub bytes_per_token: f64,
}

/// Where every tensor of the source went, and what the result occupies.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Accounting {
    pub quantized: Share,
    pub copied: Share,
    pub folded: Share,
    pub dropped: Share,
    pub missing: Share,
    /// Bytes of all weights, as stored.
    pub source_bytes: u64,
    pub artifact_bytes: u64,
    /// Stored bits per parameter, scales and zero points included: of all weights, and of the quantized ones, where there
    /// are such.
    pub bits_per_weight: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits_per_quantized_weight: Option<f64>,
    /// Tensors that a reader would not expect where they are: linears in floating point, what was dropped or is missing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exceptions: Vec<Exception>,
    /// Tokens of calibration by module, where the method looked at inputs and the artifact says how many there were.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tokens_seen: Vec<TokensSeen>,
    /// Bytes that the weights occupy when the engine has loaded them.
    pub weights_memory_bytes: u64,
    /// The cache by type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cache_memory: Vec<CacheMemory>,
}

impl Accounting {
    fn share(&mut self, fate: Fate) -> Option<&mut Share> {
        match fate {
            Fate::Quantized => Some(&mut self.quantized),
            Fate::Copied => Some(&mut self.copied),
            Fate::Folded => Some(&mut self.folded),
            Fate::Dropped => Some(&mut self.dropped),
            Fate::Missing => Some(&mut self.missing),
            Fate::Changed | Fate::Added => None,
        }
    }
}

/// The sums of a report, from single tensors.
impl From<TensorAccounting> for Accounting {
    fn from(found: TensorAccounting) -> Self {
        let mut out = Self {
            source_bytes: found.source_bytes,
            artifact_bytes: found.artifact_bytes,
            bits_per_weight: found.bits_per_weight,
            bits_per_quantized_weight: found.bits_per_quantized_weight,
            weights_memory_bytes: found.artifact_bytes,
            ..Self::default()
        };
        for tensor in found.tensors {
            if let Some(share) = out.share(tensor.fate) {
                share.tensors += 1;
                share.parameters += tensor.parameters;
                share.source_bytes += tensor.source_bytes;
                share.artifact_bytes += tensor.bytes;
            }
            let missing = (tensor.fate == Fate::Missing).then(|| "it is not there".into());
            if let Some(note) = tensor.note.or(missing) {
                out.exceptions.push(Exception { tensor: tensor.tensor, fate: tensor.fate, note });
            }
        }
        out
    }
}
