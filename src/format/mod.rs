//! Artifact formats: names, files, configuration keys; written out and read back.

pub mod atomic;
mod autoround;
pub mod awq;
pub mod compressed;
pub mod config;
pub mod consumers;
mod float8;
mod foreign;
pub mod fp8;
pub mod gguf;
pub mod gptq;
pub mod kind;
pub mod layout;
pub mod manifest;
mod modelopt;
pub mod output;
pub mod replace;
pub mod safetensors;
pub mod sizes;
mod stored;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;
use thiserror::Error;

pub use manifest::verify_manifest;

use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::model::config::ModelConfig;
use crate::model::source::{DenseSource, WeightSource};
use crate::scheme::Scheme;
use crate::tensor::Dtype;
use consumers::Plan;
use kind::{Kind, KvScales, Module};

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
    Format { method: "auto-round", open: autoround::open },
    Format { method: "modelopt", open: modelopt::open },
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
    /// How linears of a folder are stored; `None` for plain floats and for blocks of GGUF.
    pub quantization: Option<Quantization>,
    /// What is odd about the folder, yet readable.
    pub warnings: Vec<String>,
}

/// What consumers look at in a quantized folder.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantization {
    /// Of all linears; of most weights where they differ.
    pub kind: Kind,
    /// What the config says of most linears, or that of the first.
    pub base: Scheme,
    /// By module; all others are floats.
    pub schemes: BTreeMap<String, Scheme>,
    /// Scales of keys and values.
    pub kv_cache: Option<KvScales>,
    /// How the inputs of linears are rounded, each way once, in the order of modules; empty where all stay floats.
    pub inputs: Vec<String>,
}

impl Quantization {
    /// The folder as consumers look at it.
    pub fn plan(&self, config: &ModelConfig) -> Plan {
        let modules = config.linears().into_iter().map(|(name, rows, cols)| {
            let scheme = self.schemes.get(&name).copied();
            Module { name, rows, cols, scheme }
        });
        Plan {
            scheme: self.base,
            kind: self.kind,
            heads: config.heads,
            kv_heads: config.kv_heads,
            kv_cache: self.kv_cache,
            modules: modules.collect(),
            unasked: config.unasked.iter().cloned().collect(),
        }
    }
}

/// What shares the scales of keys and values that a folder holds, if it holds any.
pub fn cache_scales(checkpoint: &Checkpoint) -> Option<KvScales> {
    let scale = |name: &&String| [".k_scale", ".v_scale"].iter().any(|end| name.ends_with(end));
    let mut found = checkpoint.tensors().iter().filter(|(name, _)| scale(name)).peekable();
    found.peek()?;
    let single = found.all(|(_, entry)| entry.shape.iter().product::<usize>() == 1);
    Some(if single { KvScales::Tensor } else { KvScales::Head })
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
    #[error("`{path}` is {name}: quantkit does not read this; {advice}")]
    Foreign { path: PathBuf, name: String, advice: String },
    #[error(
        "`{dir}` is quantized by `{method}` in a form that quantkit does not read: {why}; give the model it was made from"
    )]
    Variant { dir: PathBuf, method: String, why: String },
    #[error("the quantization config in `{path}` is not valid: {why}")]
    Config { path: PathBuf, why: String },
    #[error("module `{module}` in `{dir}` is damaged: {why}; download or quantize it again")]
    Damaged { module: String, dir: PathBuf, why: String },
}

impl FormatError {
    /// Whether there is nothing wrong with what was given, but that it is of a kind that is not read.
    pub fn is_unread(&self) -> bool {
        matches!(self, FormatError::Method { .. } | FormatError::Foreign { .. } | FormatError::Variant { .. })
    }
}

/// Opens the weights of a model folder, whatever form they are stored in.
pub fn open(checkpoint: Checkpoint) -> Result<Opened, FormatError> {
    let found = config::find(&checkpoint)?;
    foreign::refuse_quantized(&checkpoint, found.as_ref())?;
    let Some(found) = found else {
        // Without its scale such a weight is only a direction.
        if let Some((name, _)) = checkpoint.tensors().iter().find(|(_, entry)| entry.dtype == Dtype::F8E4M3) {
            let why = format!("there is none, yet tensor `{name}` is {}: nothing says how it is scaled", Dtype::F8E4M3);
            return Err(FormatError::Config { path: checkpoint.dir().join("config.json"), why });
        }
        return Ok(Opened {
            method: None,
            source: Box::new(DenseSource(checkpoint)),
            quantization: None,
            warnings: vec![],
        });
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

/// Opens the weights at `path`: a model folder or a GGUF file, whatever form they are stored in.
pub fn open_path(path: &Path) -> Result<Opened, FormatError> {
    if is_file(path) {
        return open_file(path);
    }
    refuse_foreign(path)?;
    open(Checkpoint::open(path)?)
}

/// What a hub repository is by the names of its files, where those are signs of something else than a model.
pub fn foreign_listing(id: &str, files: &[String]) -> Option<FormatError> {
    foreign::listed(id, files)
}

/// Refuses by name what is no model folder and no GGUF file, but is known to be something else.
pub fn refuse_foreign(path: &Path) -> Result<(), FormatError> {
    foreign::refuse(path)
}

/// Opens a model that is one file: GGUF.
pub fn open_file(path: &Path) -> Result<Opened, FormatError> {
    Ok(opened(gguf::source::GgufSource::open(path)?))
}

/// Opens a GGUF model that was just written, before its `parts` have their names; it is called `path`.
///
/// # Errors
///
/// When the parts are not a model.
pub fn open_gguf_parts(path: &Path, parts: &[PathBuf]) -> Result<Opened, FormatError> {
    let file = gguf::read::GgufFile::open_parts(path, parts).map_err(gguf::source::GgufError::from)?;
    Ok(opened(gguf::source::GgufSource::of(path, &file)?))
}

fn opened(source: gguf::source::GgufSource) -> Opened {
    let warnings = source.warnings().to_vec();
    Opened { method: source.is_quantized().then_some("gguf"), source: Box::new(source), quantization: None, warnings }
}

/// Indented JSON with a closing newline, as model folders hold it.
pub fn pretty(value: &Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}
