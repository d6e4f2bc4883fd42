//! What a quantization was asked to do, settled: the record that every artifact carries, and whose equality
//! lets an interrupted run go on.

use serde::{Deserialize, Serialize};

use crate::calibrate::driver::Course;
use crate::quantize::gptq::GptqOptions;
use crate::quantize::grid::Grid;
use crate::scheme::Scheme;

/// The method and what it needs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "method", rename_all = "kebab-case")]
pub enum Method {
    Gptq {
        #[serde(flatten)]
        options: GptqOptions,
        true_sequential: bool,
        /// Weights make up for the errors of earlier layers.
        drift_correction: bool,
    },
    Rtn {
        scheme: Scheme,
        grid: Grid,
    },
}

impl Method {
    pub fn name(&self) -> &'static str {
        match self {
            Method::Gptq { .. } => "gptq",
            Method::Rtn { .. } => "rtn",
        }
    }

    /// What modules get unless a rule says otherwise.
    pub fn scheme(&self) -> Scheme {
        match self {
            Method::Gptq { options, .. } => options.scheme,
            Method::Rtn { scheme, .. } => *scheme,
        }
    }

    pub fn grid(&self) -> Grid {
        match self {
            Method::Gptq { options, .. } => options.grid,
            Method::Rtn { grid, .. } => *grid,
        }
    }

    /// Whether inputs of the linears have to be seen.
    pub fn calibrates(&self) -> bool {
        matches!(self, Method::Gptq { .. }) || self.grid() == Grid::Hessian
    }

    /// How calibration goes through the blocks.
    pub fn course(&self) -> Course {
        match *self {
            Method::Gptq { true_sequential, drift_correction, .. } => {
                Course { true_sequential, drift: drift_correction }
            }
            Method::Rtn { .. } => Course { true_sequential: true, drift: false },
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
    pub checkpoint_format: String,
    pub max_shard_bytes: u64,
    /// The kind of device that calibrated: kinds differ in the last bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<CalibrationRecord>,
}
