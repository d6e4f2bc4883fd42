//! What a quantization was asked to do, settled: the record that every artifact carries, and whose equality
//! lets an interrupted run go on.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::calibrate::cache::Sharing;
use crate::calibrate::driver::{Course, Needs};
use crate::format::kind::{InputsKind, KvScales, Tile};
use crate::quantize::gptq::GptqOptions;
use crate::quantize::scale_search::ScaleSearch;
use crate::scheme::Scheme;

/// The method and what it needs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Method {
    /// As users call it.
    #[serde(rename = "method")]
    pub name: String,
    /// What becomes of a block before its linears are rounded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transform: Option<Transform>,
    pub rounding: Rounding,
    /// What becomes of the linears' inputs.
    #[serde(default, skip_serializing_if = "InputsKind::is_float")]
    pub activations: InputsKind,
    /// Scales for a cache of 8-bit keys and values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_cache: Option<KvScales>,
}

/// Scales moved between operations.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Transform {
    Awq {
        /// Points of the search.
        points: usize,
        /// Weights' magnitudes count beside those of inputs.
        duo_scaling: bool,
        /// Values and output projection are scaled even where several heads share their values.
        grouped_values: bool,
        /// Tokens that losses are measured on.
        tokens: usize,
    },
    Smoothquant {
        /// `None` finds the best for each block.
        #[serde(serialize_with = "crate::num::short::option")]
        alpha: Option<f32>,
        /// Tokens that losses are measured on.
        tokens: usize,
    },
}

/// How the weights are rounded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Rounding {
    Gptq {
        #[serde(flatten)]
        options: GptqOptions,
        true_sequential: bool,
        /// Weights make up for the errors of earlier layers.
        drift_correction: bool,
    },
    Rtn {
        scheme: Scheme,
        grid: ScaleSearch,
    },
    /// To E4M3.
    Float8 {
        tile: Tile,
        /// Errors are mended in the columns not yet taken.
        feedback: bool,
    },
}

impl Method {
    /// What modules get unless a rule says otherwise.
    pub fn scheme(&self) -> Scheme {
        match &self.rounding {
            Rounding::Gptq { options, .. } => options.scheme,
            Rounding::Rtn { scheme, .. } => *scheme,
            Rounding::Float8 { .. } => Scheme::FLOAT8,
        }
    }

    pub fn grid(&self) -> ScaleSearch {
        match &self.rounding {
            Rounding::Gptq { options, .. } => options.grid,
            Rounding::Rtn { grid, .. } => *grid,
            Rounding::Float8 { .. } => ScaleSearch::MaxAbs,
        }
    }

    /// What has to be seen of the model at work.
    pub fn needs(&self) -> Needs {
        Needs {
            gram: matches!(self.rounding, Rounding::Gptq { .. } | Rounding::Float8 { feedback: true, .. }),
            diagonal: self.grid() == ScaleSearch::Hessian,
            abs_max: self.activations.is_static() || (!self.activations.is_float() && self.transform.is_some()),
            cache: self.kv_cache.map(|kind| match kind {
                KvScales::Tensor => Sharing::Layer,
                KvScales::Head => Sharing::Head,
            }),
        }
    }

    /// Whether the model has to be seen at work at all.
    pub fn calibrates(&self) -> bool {
        self.needs() != Needs::default() || self.transform.is_some()
    }

    /// Whether bits and group size are options of the method, rather than part of it.
    pub fn chooses_groups(&self) -> bool {
        !matches!(self.rounding, Rounding::Float8 { .. })
            && !matches!(self.transform, Some(Transform::Smoothquant { .. }))
    }

    /// How calibration goes through the blocks.
    pub fn course(&self) -> Course {
        let sample = self.transform.map(|transform| match transform {
            Transform::Awq { tokens, .. } | Transform::Smoothquant { tokens, .. } => tokens,
        });
        match self.rounding {
            Rounding::Gptq { true_sequential, drift_correction, .. } => {
                Course { true_sequential, drift: drift_correction, sample }
            }
            _ => Course { true_sequential: true, drift: false, sample },
        }
    }
}

/// Calibration data as settled.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CalibrationRecord {
    /// File name, or that of the built-in text.
    pub text: String,
    pub text_sha256: String,
    pub nsamples: usize,
    pub seqlen: usize,
    /// `in-order`, or `random` with its seed.
    pub sampling: String,
    /// `none`, `once` or `window`.
    pub bos: String,
    /// SHA-256 over the token ids of all windows.
    pub tokens_sha256: String,
}

/// Everything that decides the bytes of an artifact, apart from the source model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recipe {
    #[serde(flatten)]
    pub method: Method,
    /// As given on the command line.
    pub rules: Vec<String>,
    pub skips: Vec<String>,
    pub on_misfit: String,
    /// Linears left in floating point because a consumer named by `--for` would not load them, each with its reason.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub left_out: BTreeMap<String, String>,
    /// The form of the artifact.
    pub format: String,
    pub max_shard_bytes: u64,
    /// The kind of device that calibrated: kinds differ in the last bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<CalibrationRecord>,
}
