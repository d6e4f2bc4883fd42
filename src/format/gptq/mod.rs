//! The GPTQ artifact: four tensors for each linear, and one quantization config.

mod layout;
mod settings;
mod source;
mod write;

pub use layout::GptqLayout;
pub(super) use settings::Settings;
pub use source::{GptqSource, Stored, ZeroPoints};
pub(super) use write::rule_json;
pub use write::{GptqConfig, Rule, linear_specs, linear_tensors};

use super::{FormatError, Opened, config};
use crate::checkpoint::Checkpoint;

/// Opens a folder whose config says `gptq`.
pub(super) fn open(checkpoint: Checkpoint, found: &config::Found) -> Result<Opened, FormatError> {
    let source = GptqSource::open(checkpoint, found)?;
    let warnings = source.warnings().to_vec();
    let quantization = source.quantization();
    Ok(Opened { method: Some("gptq"), source: Box::new(source), quantization, warnings })
}
