//! The sections of a report, with their units.
//!
//! Relative errors are norms: `‖got − wanted‖ / ‖wanted‖`, both over all tokens of the text.

mod acceptance;
mod accounting;
mod cache;
mod perplexity;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::evaluate::modules::ModuleDeviation;
use crate::evaluate::windows::Convention;
use crate::format::manifest::{FileRecord, sha256_bytes};
use crate::integrity::WeightError;

pub use acceptance::{Acceptance, Role, Speedup};
pub use accounting::{Accounting, CacheMemory, Exception, Share, TokensSeen};
pub use cache::{CacheFigures, CacheSection, ScaleSource};
pub use perplexity::{Bins, Control, DivergenceOn, PerplexityOn};

/// A model, an artifact or a file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Identity {
    /// The folder's or file's own name, or the hub id; no path.
    pub name: String,
    /// `safetensors`, `gptq`, `awq`, `compressed-tensors`, `fp8`, `gguf`.
    pub format: String,
    /// What chose the codes: `gptq`, `rtn`, `awq`, `smoothquant`, ...; absent for plain floats and where nothing tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    /// The scheme in words, such as `4 bits, group size 128, symmetric` or `Q4_K_M`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheme: Option<String>,
    /// How inputs of linears are rounded, each way once; empty where all stay floats.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inputs: Vec<String>,
    /// Bits of a code.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits: Option<f64>,
    /// The family, such as `Llama 1 to 3`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub family: Option<String>,
    /// Its files, in the order of their names.
    pub files: Vec<FileRecord>,
    /// SHA-256 over all files: see [`Identity::digest`].
    pub sha256: String,
    /// The options in `quantkit.json`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub options: Option<Value>,
}

impl Identity {
    /// One hash of many files: that of the lines `HASH  NAME`, sorted by name, as `sha256sum` prints them.
    pub fn digest(files: &[FileRecord]) -> String {
        let mut files: Vec<_> = files.iter().collect();
        files.sort_by(|a, b| a.file.cmp(&b.file));
        let lines: String = files.iter().map(|record| format!("{}  {}\n", record.sha256, record.file)).collect();
        sha256_bytes(lines.as_bytes())
    }
}

/// A text, and how it was cut into windows. Figures are comparable only where all of it is equal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Corpus")]
pub struct WindowedCorpus {
    pub name: String,
    /// SHA-256 of the text.
    pub sha256: String,
    pub convention: Convention,
    /// Tokens of a window.
    pub window: usize,
    pub windows: usize,
    /// `none`, `once` or `window`.
    pub bos: String,
    /// Tokens that count.
    pub tokens: u64,
}

/// How far one module is from the reference's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ModuleError {
    /// Its path, such as `model.layers.0.self_attn.q_proj`.
    pub module: String,
    /// The block it stands in, from 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer: Option<usize>,
    /// What the module is, such as `q_proj`; the same in every block.
    pub kind: String,
    /// Relative error of what it puts out.
    pub output_error: f64,
    /// Relative error of its weight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_error: Option<f64>,
    /// Stored bits per weight, scales and zero points included, a bias not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits: Option<f64>,
}

impl ModuleError {
    /// What was measured of a module's output, and what its files say of its weight, where it has one.
    pub fn new(output: ModuleDeviation, weight: Option<&WeightError>) -> Self {
        Self {
            module: output.module,
            layer: output.layer,
            kind: output.kind,
            output_error: output.error,
            weight_error: weight.map(|weight| weight.error),
            bits: weight.and_then(|weight| weight.bits),
        }
    }
}

/// Whether an engine loads the artifact.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Consumer")]
pub struct ConsumerVerdict {
    /// As in `--for`: `vllm-0.33`.
    pub name: String,
    /// For people: `vLLM 0.33`.
    pub title: String,
    pub loads: bool,
    /// Why not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refusals: Vec<String>,
}

/// What the method learned from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CalibrationTokens {
    /// Corpus, windows, and how they were cut, in words.
    pub description: String,
    /// SHA-256 of the token ids, as in `quantkit.json`.
    pub tokens_sha256: String,
    /// Tokens of all windows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_do_not_depend_on_order() {
        let file = |name: &str, hash: &str| FileRecord { file: name.into(), bytes: 1, sha256: hash.into() };
        let (a, b) = (file("a", "11"), file("b", "22"));
        let both = Identity::digest(&[a.clone(), b.clone()]);
        assert_eq!(both, sha256_bytes(b"11  a\n22  b\n"));
        assert_eq!(both, Identity::digest(&[b, a.clone()]));
        assert_ne!(both, Identity::digest(&[a]));
    }
}
