//! Artifact formats: names, files, configuration keys; written out and read back.

pub mod atomic;
pub mod awq;
pub mod compressed;
pub mod config;
pub mod consumers;
mod float8;
pub mod fp8;
pub mod gguf;
pub mod gptq;
pub mod layout;
pub mod manifest;
pub mod safetensors;
mod stored;

use std::path::{Path, PathBuf};

use serde_json::Value;
use thiserror::Error;

pub use manifest::verify_manifest;

use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::model::source::{DenseSource, WeightSource};
use crate::tensor::Dtype;

/// A stored form of quantized weights that can be read.
struct Format {
    /// What `quant_method` says.
    method: &'static str,
    open: fn(Checkpoint, &config::Found) -> Result<Opened, FormatError>,
}

/// Every readable format: one row each.
const FORMATS: &[Format] = &[
    Format { method: "gptq", open: gptq::open },
    Format { method: "awq", open: awq::open },
    Format { method: "compressed-tensors", open: compressed::open },
    Format { method: "fp8", open: fp8::open },
];

/// The `quant_method`s that [`open`] reads.
pub fn readable() -> impl Iterator<Item = &'static str> {
    FORMATS.iter().map(|format| format.method)
}

/// A model folder, opened by the format its config names.
pub struct Opened {
    /// The `quant_method`, or `None` for plain floats.
    pub method: Option<&'static str>,
    pub source: Box<dyn WeightSource>,
    /// What is odd about the folder, yet readable.
    pub warnings: Vec<String>,
}

/// Why a quantized folder cannot be read.
#[derive(Debug, Error)]
pub enum FormatError {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Gguf(#[from] gguf::source::GgufError),
    #[error("`{dir}` is quantized by `{method}`, which is not read; readable are: {known}")]
    Method { dir: PathBuf, method: String, known: String },
    #[error("the quantization config in `{path}` is not valid: {why}")]
    Config { path: PathBuf, why: String },
    #[error("module `{module}` in `{dir}` is damaged: {why}; download or quantize it again")]
    Damaged { module: String, dir: PathBuf, why: String },
}

/// Opens the weights of a model folder, whatever form they are stored in.
pub fn open(checkpoint: Checkpoint) -> Result<Opened, FormatError> {
    let Some(found) = config::find(&checkpoint)? else {
        // Without its scale such a weight is only a direction.
        if let Some((name, _)) = checkpoint.tensors().iter().find(|(_, entry)| entry.dtype == Dtype::F8E4M3) {
            let why = format!("there is none, yet tensor `{name}` is {}: nothing says how it is scaled", Dtype::F8E4M3);
            return Err(FormatError::Config { path: checkpoint.dir().join("config.json"), why });
        }
        return Ok(Opened { method: None, source: Box::new(DenseSource(checkpoint)), warnings: vec![] });
    };
    match FORMATS.iter().find(|format| format.method == found.method) {
        Some(format) => (format.open)(checkpoint, &found),
        None => Err(FormatError::Method {
            dir: checkpoint.dir().into(),
            method: found.method,
            known: readable().collect::<Vec<_>>().join(", "),
        }),
    }
}

/// Whether a path is that of a model in one file.
pub fn is_file(path: &Path) -> bool {
    path.is_file() && path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf"))
}

/// Opens a model that is one file: GGUF.
pub fn open_file(path: &Path) -> Result<Opened, FormatError> {
    let source = gguf::source::GgufSource::open(path)?;
    let warnings = source.warnings().to_vec();
    Ok(Opened { method: source.is_quantized().then_some("gguf"), source: Box::new(source), warnings })
}

/// Indented JSON with a closing newline, as model folders hold it.
pub fn pretty(value: &Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}
