//! What a run made.

use std::path::PathBuf;

use serde::Serialize;

use super::modules::Modules;
use super::work::ModuleReport;
use crate::evaluate::perplexity::Measured;
use crate::model::presence::Unread;

/// What scaling did to a block.
#[derive(Clone, Debug, Serialize)]
pub struct BlockScaling {
    pub block: String,
    /// The error that the search measured, in parts of what it was without.
    pub error_ratio: Option<f64>,
    /// How strongly inputs were smoothed.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "crate::num::short::option")]
    pub alpha: Option<f32>,
}

/// Seconds by phase.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct PhaseSeconds {
    pub preparing: f64,
    pub quantizing: f64,
    /// Of the seconds quantizing.
    pub of_which_solving: f64,
    pub writing: f64,
    pub measuring: f64,
}

/// Perplexities on the evaluation text.
pub struct Perplexities {
    pub before: Measured,
    pub after: Measured,
    /// That of plain rounding at the same bits; `None` where the artifact is that.
    pub plain: Option<Measured>,
}

/// What a run made.
pub struct Outcome {
    /// The folder of the artifact.
    pub target: PathBuf,
    /// Bytes of the source's tensors.
    pub source_bytes: u64,
    /// Bytes of the artifact's weight files.
    pub bytes: u64,
    /// Bytes of the tensors that replace the quantized linears.
    pub quantized_bytes: u64,
    pub modules: Modules,
    pub reports: Vec<ModuleReport>,
    pub transforms: Vec<BlockScaling>,
    /// Input channels that calibration saw only as zero; one that several modules share counts once.
    pub dead_channels: usize,
    /// Tensors of the source that the model does not read; they are copied.
    pub unread: Option<Unread>,
    pub seconds: PhaseSeconds,
    /// `None` where nothing was to be measured.
    pub perplexity: Option<Perplexities>,
}

impl Outcome {
    /// Stored bits per weight of the quantized linears, scales and zero points included.
    pub fn effective_bits(&self) -> f64 {
        let quantized = self.modules.modules.iter().filter(|module| module.scheme.is_some());
        let weights: usize = quantized.map(|module| module.rows * module.cols).sum();
        self.quantized_bytes as f64 * 8.0 / weights as f64
    }
}
