//! Key-value caches of reduced precision.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::WindowedCorpus;
use crate::backend::cache::CacheType;
use crate::evaluate::cache_error::CacheErrors;
use crate::evaluate::divergence::Divergence;

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

/// What a type of cache does to the artifact's predictions, against the artifact with the section's `baseline`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "CacheType")]
pub struct CacheFigures {
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

impl CacheFigures {
    /// Of a type and where its scales come from; `figures` are those of the type against the section's baseline.
    pub fn new(
        kind: CacheType,
        scales: ScaleSource,
        bytes_per_token: usize,
        figures: &Divergence,
        errors: CacheErrors,
    ) -> Self {
        Self {
            kind: kind.to_string(),
            scales,
            bytes_per_token: bytes_per_token as f64,
            mean_kl: figures.kl.mean,
            mean_kl_stderr: figures.kl.stderr,
            perplexity: figures.perplexity.artifact,
            ratio: figures.perplexity.ratio,
            ratio_stderr: figures.perplexity.ratio_stderr,
            greedy_agreement: figures.same_top.share,
            errors: Some(errors),
        }
    }
}

/// Key-value caches of reduced precision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Cache")]
pub struct CacheSection {
    pub corpus: WindowedCorpus,
    /// The type that the others are held against: `f16` or `f32`.
    pub baseline: String,
    pub baseline_perplexity: f64,
    pub layers: usize,
    pub kv_heads: usize,
    /// One entry a type and source of scales.
    pub types: Vec<CacheFigures>,
}

impl CacheSection {
    /// Whether engines would take the scales of this entry: those that the artifact stores, or 1.0 where it has none.
    pub fn taken_by_engines(&self, entry: &CacheFigures) -> bool {
        match entry.scales {
            ScaleSource::Unit => {
                !self.types.iter().any(|other| other.kind == entry.kind && other.scales == ScaleSource::Calibrated)
            }
            ScaleSource::Calibrated | ScaleSource::Dynamic | ScaleSource::None => true,
            ScaleSource::Proposed | ScaleSource::ProposedPerHead => false,
        }
    }
}
