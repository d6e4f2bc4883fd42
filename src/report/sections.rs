//! The sections of a report, with their units.
//!
//! Relative errors are norms: `‖got − wanted‖ / ‖wanted‖`, both over all tokens of the text.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::evaluate::divergence::Divergence;
use crate::evaluate::windows::Convention;
use crate::format::manifest::{FileRecord, sha256_bytes};

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
pub struct Corpus {
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

/// What became of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Fate {
    /// Stored in fewer bits.
    Quantized,
    /// Stored as floating point.
    Copied,
    /// Gone into another tensor, as a norm's scale into the linear after it.
    Folded,
    /// Left out on purpose, as what tied weights say twice.
    Dropped,
    /// Left out, and nothing says why.
    Missing,
    /// Other numbers, and nothing says why.
    Changed,
    /// In the artifact only.
    Added,
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

/// The perplexity of a cheaper method at the same bits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Control {
    /// `rtn`
    pub method: String,
    pub perplexity: f64,
    /// Over the reference's.
    pub ratio: f64,
    /// Standard error of the ratio, paired.
    pub ratio_stderr: f64,
}

/// What one window cost.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct WindowNats {
    /// Negative log-likelihood of its tokens that count, in nats, added up.
    pub nats: f64,
    /// How many count.
    pub tokens: u64,
}

/// Perplexities on one text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PerplexityOn {
    pub corpus: Corpus,
    pub artifact: f64,
    /// Standard error of the artifact's perplexity; the text's own difficulty is in it.
    pub artifact_stderr: f64,
    pub reference: f64,
    pub reference_stderr: f64,
    /// Artifact over reference.
    pub ratio: f64,
    /// Standard error of the ratio, paired: both predicted the same tokens, whose difficulty is not in it.
    pub ratio_stderr: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub control: Option<Control>,
    /// The artifact's windows: two reports on the same text can be compared window by window, which is far sharper than
    /// their perplexities.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub windows: Vec<WindowNats>,
}

/// How many positions have a divergence between two edges.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Bins {
    /// In nats, rising. The first counts what is at least the first edge and less than the second, and so on.
    pub edges: Vec<f64>,
    /// One less than there are edges.
    pub counts: Vec<u64>,
    /// Less than the first edge.
    pub below: u64,
    /// The last edge or more.
    pub above: u64,
    /// Neither.
    pub not_finite: u64,
}

/// Edges that rise by 2, 2.5 and 2 from 1e-7 to 10 nats: the same for all reports, so that histograms can be laid over
/// each other.
const KL_EDGES: [f64; 25] = [
    1e-7, 2e-7, 5e-7, 1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1,
    0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
];

impl Bins {
    /// Counts divergences in nats.
    pub fn of_kl(values: impl IntoIterator<Item = f64>) -> Self {
        let edges = KL_EDGES.to_vec();
        let mut bins = Self { counts: vec![0; edges.len() - 1], edges, below: 0, above: 0, not_finite: 0 };
        for value in values {
            let place = match bins.edges.partition_point(|&edge| edge <= value) {
                _ if !value.is_finite() => &mut bins.not_finite,
                0 => &mut bins.below,
                n if n == bins.edges.len() => &mut bins.above,
                n => &mut bins.counts[n - 1],
            };
            *place += 1;
        }
        bins
    }
}

/// Divergence from the reference on one text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DivergenceOn {
    pub corpus: Corpus,
    pub figures: Divergence,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub histogram: Option<Bins>,
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

/// Where the scales of a reduced cache come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ScaleSource {
    /// 1.0, as engines take it where an artifact has no scales.
    Unit,
    /// From calibration, as the artifact stores them.
    Calibrated,
    /// From calibration just now, one for keys and one for values of a layer; the artifact does not store them.
    Proposed,
    /// The same, one for each head.
    ProposedPerHead,
    /// From each token's own keys and values.
    Dynamic,
    /// The type needs none.
    None,
}

impl ScaleSource {
    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unit => "1.0",
            Self::Calibrated => "calibrated",
            Self::Proposed => "proposed",
            Self::ProposedPerHead => "proposed per head",
            Self::Dynamic => "of each token",
            Self::None => "none",
        }
    }
}

/// Relative errors, by layer and key-value head: `keys[layer][head]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CacheErrors {
    pub keys: Vec<Vec<f64>>,
    pub values: Vec<Vec<f64>>,
    /// What attention puts out, all query heads of a key-value head together.
    pub output: Vec<Vec<f64>>,
}

/// What a type of cache does to the artifact's predictions, against the artifact with the section's `baseline`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CacheType {
    /// `fp8`, `fp8_e5m2`, `int8`, ...
    pub kind: String,
    pub scales: ScaleSource,
    pub bytes_per_token: f64,
    /// KL(baseline || this type) in nats, mean over tokens.
    pub mean_kl: f64,
    pub mean_kl_stderr: f64,
    pub perplexity: f64,
    /// Of perplexities: this type over the baseline.
    pub ratio: f64,
    /// Standard error of the ratio, paired.
    pub ratio_stderr: f64,
    /// Share of positions at which both hold the same token for the likeliest, 0 to 1.
    pub greedy_agreement: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub errors: Option<CacheErrors>,
}

/// Key-value caches of reduced precision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Cache {
    pub corpus: Corpus,
    /// The type that the others are held against: `f16` or `f32`.
    pub baseline: String,
    pub baseline_perplexity: f64,
    pub layers: usize,
    pub kv_heads: usize,
    /// One entry a type and source of scales.
    pub types: Vec<CacheType>,
}

impl Cache {
    /// Whether engines would take the scales of this entry: those that the artifact stores, or 1.0 where it has none.
    pub fn taken_by_engines(&self, entry: &CacheType) -> bool {
        match entry.scales {
            ScaleSource::Unit => {
                !self.types.iter().any(|other| other.kind == entry.kind && other.scales == ScaleSource::Calibrated)
            }
            ScaleSource::Calibrated | ScaleSource::Dynamic | ScaleSource::None => true,
            ScaleSource::Proposed | ScaleSource::ProposedPerHead => false,
        }
    }
}

/// The artifact's part in speculative decoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// A draft model proposes, the artifact verifies.
    Target,
    /// The artifact proposes, another model, such as its own source, verifies.
    Draft,
}

/// Speculative decoding with `k` drafted tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Speedup {
    /// Drafted tokens of a step.
    pub k: usize,
    /// Tokens of a step, bonus token counted, as `alpha` lets expect: (1 − αᵏ⁺¹) / (1 − α).
    pub expected_length: f64,
    /// Tokens of a step that came of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_length: Option<f64>,
    /// Times faster than decoding without a draft, (1 − βᵏ⁺¹) / ((1 − β)(k·cost + 1)) of Leviathan et al. 2023, theorem
    /// 3.8, where β is not `alpha` but the mean of Σ min(p, q) over what the target wrote after the prompts, under the
    /// sampling that was asked for and loops left out: the text that a draft would have sped up.
    pub expected: f64,
    /// Times faster, by the clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<f64>,
}

/// Speculative decoding of one pair of models, in vLLM's definitions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Acceptance {
    /// The artifact's part.
    pub role: Role,
    pub target: String,
    pub draft: String,
    /// Drafted tokens of a step.
    pub k: usize,
    /// 0 is greedy.
    pub temperature: f64,
    /// Tokens that were drafted, and how many were accepted.
    pub drafted: u64,
    pub accepted: u64,
    /// Steps of verification.
    pub drafts: u64,
    /// accepted / drafted
    pub rate: f64,
    /// Standard error of the rate.
    pub rate_stderr: f64,
    /// 1 + accepted / drafts
    pub mean_length: f64,
    /// Share of steps in which at least the first i + 1 tokens were accepted; never rises.
    pub per_position: Vec<f64>,
    /// Mean of Σ min(p, q) over the tokens of a text: what rejection sampling accepts, without sampling.
    pub alpha: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alpha_stderr: Option<f64>,
    /// Share of these tokens at which both hold the same token for the likeliest, 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub greedy_agreement: Option<f64>,
    /// Time of a draft model's step over that of the target's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<f64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub speedups: Vec<Speedup>,
    pub prompts: u64,
    /// Tokens that were written.
    pub tokens: u64,
    /// Those of them that only repeat what was there before, where anything is accepted; they do not count.
    pub looped_tokens: u64,
    /// Hash of the prompts or text that it was measured on.
    pub text_sha256: String,
}

/// How a check came out, from good to bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Could not be looked at, for a reason that is no fault.
    Skipped,
    Pass,
    Warn,
    Fail,
}

impl Status {
    pub fn name(self) -> &'static str {
        match self {
            Self::Skipped => "skipped",
            Self::Pass => "pass",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }
}

/// Something that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Check {
    /// Lasting name, such as `side-files`.
    pub id: String,
    pub status: Status,
    /// What was found; of a failure also what to do.
    pub message: String,
}

/// Whether an engine loads the artifact.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Consumer {
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
    fn bins_count_each_value_once() {
        let values = [0.0, 9.99e-8, 1e-7, 1.99e-7, 2e-7, 0.05, 9.99, 10.0, 1e9, f64::NAN, f64::INFINITY];
        let bins = Bins::of_kl(values);
        assert_eq!((bins.below, bins.above, bins.not_finite), (2, 2, 2));
        let filled: Vec<_> = (0..bins.counts.len()).filter(|&i| bins.counts[i] > 0).collect();
        assert_eq!(filled.iter().map(|&i| bins.counts[i]).collect::<Vec<_>>(), [2, 1, 1, 1]);
        for (i, value) in filled.into_iter().zip([1.5e-7, 2e-7, 0.05, 9.99]) {
            assert!(bins.edges[i] <= value && value < bins.edges[i + 1], "{value} in bin {i}");
        }
    }

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
