//! A GGUF model as the engine sees it: the tensors of a checkpoint under its names, the files of a folder made of
//! the metadata, and weights in the blocks they are stored in.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde_json::Value as Json;
use thiserror::Error;

use super::names::{Architecture, Change, NameError, ROPE_FACTORS, deinterleave, minus_one};
use super::parse::Tensor;
use super::read::{GgufFile, ReadError};
use super::restore::{self, RestoreError, Tensors};
use super::value::{Metadata, MetadataError};
use crate::backend::weight::{Ggml, Weight};
use crate::checkpoint::{Checkpoint, Entry};
use crate::model::source::{SourceError, WeightSource, dense};
use crate::num::ggml::GgmlType;
use crate::tensor::{Bytes, Dtype};

/// Why a GGUF file is no model for the engine.
#[derive(Debug, Error)]
pub enum GgufError {
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error("`{path}`: {why}")]
    Metadata { path: std::path::PathBuf, why: MetadataError },
    #[error("`{path}`: {why}")]
    Restore { path: std::path::PathBuf, why: RestoreError },
    #[error("`{path}`: {why}")]
    Name { path: std::path::PathBuf, why: NameError },
}

/// An open GGUF model.
#[derive(Debug)]
pub struct GgufSource {
    checkpoint: Checkpoint,
    metadata: Metadata,
    /// Types of the tensors, by the checkpoint's names.
    kinds: BTreeMap<String, GgmlType>,
    warnings: Vec<String>,
}

impl GgufSource {
    /// Opens a file, or a split model by its first part.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        Self::of(path, &GgufFile::open(path)?)
    }

    /// The model of a file, its data aside where the file is cut off: config and shapes come from the headers. With
    /// it comes what is odd about the file, yet readable.
    pub fn outline(path: &Path, file: &GgufFile) -> Result<(Checkpoint, Vec<String>), GgufError> {
        let Self { checkpoint, warnings, .. } = Self::of(path, file)?;
        Ok((checkpoint, warnings))
    }

    /// The model of an open file that is called `path`.
    ///
    /// # Errors
    ///
    /// When its metadata do not describe a model of a known family.
    pub fn of(path: &Path, file: &GgufFile) -> Result<Self, GgufError> {
        let metadata = file.metadata();
        let name = |why| GgufError::Name { path: path.into(), why };
        let broken = |why| GgufError::Metadata { path: path.into(), why };
        let text: &str = metadata.need("general.architecture").map_err(broken)?;
        let architecture = Architecture::parse(text).map_err(name)?;
        let factors = file.tensor(ROPE_FACTORS).filter(|tensor| tensor.is_whole()).map(decoded);
        let tensors = Tensors { has: &|name| file.tensor(name).is_some(), rope_freqs: factors.as_deref() };
        let files = restore::files(metadata, tensors).map_err(|why| GgufError::Restore { path: path.into(), why })?;
        let heads = head_sizes(&files.config);

        let file_name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let parts: Vec<Arc<str>> = file.parts().iter().map(|part| file_name(part).into()).collect();
        let (mut entries, mut kinds) = (BTreeMap::new(), BTreeMap::new());
        for tensor in file.tensors() {
            let Some(hf) = architecture.to_hf(&tensor.name).map_err(name)? else { continue };
            let (dtype, bytes) = as_checkpoint(tensor, architecture.change(&tensor.name), heads);
            kinds.insert(hf.clone(), tensor.kind);
            entries.insert(hf, Entry { dtype, shape: tensor.shape.clone(), bytes, file: parts[0].clone() });
        }
        let named = files.named().into_iter().map(|(name, json)| (name.to_string(), format!("{json:#}\n")));
        let made = named.chain(files.card.clone().map(|card| ("README.md".to_string(), card))).collect();
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let checkpoint = Checkpoint::assembled(dir.into(), files.config, entries, parts, made);
        Ok(Self { checkpoint, metadata: metadata.clone(), kinds, warnings: files.warnings })
    }

    /// What is odd about the file, yet readable.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Whether any tensor is stored in blocks.
    pub fn is_quantized(&self) -> bool {
        self.kinds.values().any(|kind| float(*kind).is_none())
    }

    /// The file's own metadata.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }
}

impl WeightSource for GgufSource {
    fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    fn linear(&self, module: &str, rows: usize, cols: usize) -> Result<Weight, SourceError> {
        let name = format!("{module}.weight");
        match self.kinds.get(&name) {
            Some(kind) if float(*kind).is_none() => {
                let entry = self.checkpoint.expect(&name, &[rows, cols])?;
                Ok(Weight::Ggml(Ggml { rows, cols, kind: *kind, bytes: entry.bytes.clone() }))
            }
            _ => dense(&self.checkpoint, module, rows, cols),
        }
    }
}

/// The type of plain numbers.
fn float(kind: GgmlType) -> Option<Dtype> {
    match kind {
        GgmlType::F32 => Some(Dtype::F32),
        GgmlType::F16 => Some(Dtype::F16),
        GgmlType::BF16 => Some(Dtype::BF16),
        _ => None,
    }
}

fn decoded(tensor: &Tensor) -> Vec<f32> {
    let mut values = vec![0.0; tensor.len()];
    tensor.kind.decode(&tensor.bytes, &mut values);
    values
}

/// Rows of a head of queries and of keys, which are as many.
fn head_sizes(config: &Json) -> usize {
    let number = |key: &str| config.get(key).and_then(Json::as_u64).unwrap_or(0) as usize;
    match number("head_dim") {
        0 => number("hidden_size") / number("num_attention_heads").max(1),
        size => size,
    }
}

/// Type and bytes of a tensor as a checkpoint has them. Vectors become plain floats; matrices keep their blocks.
fn as_checkpoint(tensor: &Tensor, change: Change, head_dim: usize) -> (Dtype, Bytes) {
    let plain = float(tensor.kind);
    if !tensor.is_whole() {
        let vector = if tensor.shape.len() == 1 { Dtype::F32 } else { Dtype::Blocks };
        return (plain.unwrap_or(vector), tensor.bytes.clone());
    }
    if change == Change::PlusOne || (tensor.shape.len() == 1 && plain.is_none()) {
        let mut values = decoded(tensor);
        if change == Change::PlusOne {
            minus_one(&mut values);
        }
        return (Dtype::F32, bytemuck::cast_slice(&values).to_vec().into());
    }
    let bytes = match change {
        Change::Queries | Change::Keys if head_dim > 0 => {
            let rows = tensor.shape.first().copied().unwrap_or(1);
            deinterleave(&tensor.bytes, tensor.bytes.len() / rows.max(1), head_dim).into()
        }
        _ => tensor.bytes.clone(),
    };
    (plain.unwrap_or(Dtype::Blocks), bytes)
}
