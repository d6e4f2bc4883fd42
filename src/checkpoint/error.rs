use std::path::PathBuf;

use thiserror::Error;

use super::KeyError;
use crate::tensor::Dtype;

/// What can be wrong with a model folder.
#[derive(Debug, Error)]
pub enum CheckpointError {
    #[error("`{0}` is no folder; give a Hugging Face model folder or a hub id such as `org/name`")]
    NoFolder(PathBuf),
    #[error("`{0}` is missing")]
    NoFile(PathBuf),
    #[error("`{0}` holds no safetensors weights (`model.safetensors` or an index with its shards)")]
    NoWeights(PathBuf),
    #[error("cannot read `{path}`: {why}")]
    Io { path: PathBuf, why: String },
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error(
        "`{dir}` holds two models: tensor `{tensor}` {how} (those of `model.safetensors.index.json`); \
         transformers reads `model.safetensors`, vLLM and SGLang the shards: remove \
         `model.safetensors`, or the index with its shards"
    )]
    TwoModels { dir: PathBuf, tensor: String, how: &'static str },
    #[error("`{path}` is not valid: {why}")]
    Json { path: PathBuf, why: String },
    #[error("`{path}`: tensor `{tensor}` is {found}, which is not read; give a checkpoint in F32, F16 or BF16")]
    Unread { path: PathBuf, tensor: String, found: String },
    #[error("`{path}` is damaged: {why}; download it again")]
    Header { path: PathBuf, why: String },
    #[error("index `{path}` names shard `{shard}`, which lies outside the model folder")]
    ShardOutside { path: PathBuf, shard: String },
    #[error("the index places tensor `{tensor}` in `{path}`, where it is not")]
    IndexedTensorMissing { tensor: String, path: PathBuf },
    #[error("tensor `{tensor}` is missing from `{dir}`")]
    NoTensor { tensor: String, dir: PathBuf },
    #[error("tensor `{tensor}` has shape {found:?}; the config asks for {wanted:?}")]
    Shape { tensor: String, found: Vec<usize>, wanted: Vec<usize> },
    #[error("tensor `{tensor}` holds {why}")]
    Value { tensor: String, why: String },
    #[error("tensor `{tensor}` is {found}; wanted {wanted}")]
    Dtype { tensor: String, found: Dtype, wanted: &'static str },
}
