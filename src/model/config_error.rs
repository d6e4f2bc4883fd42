//! Why a config cannot be run.

use std::path::PathBuf;

use thiserror::Error;

use crate::checkpoint::{CheckpointError, KeyError};

/// Why a config cannot be run.
#[derive(Debug, Error)]
pub enum ConfigError {
    #[error("model type `{name}` is not known; known: {known}")]
    UnknownFamily { name: String, known: String },
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error(transparent)]
    Tensor(#[from] CheckpointError),
    #[error(
        "tensor `{tensor}` is missing from `{dir}`, and {said}; add the tensor, or set the key to true if the embedding is \
         the output head"
    )]
    Head { tensor: String, dir: PathBuf, said: String },
    #[error(
        "tensor `{tensor}` is missing from `{dir}`, and the config asks for it ({why}); add the tensor, or correct the \
         config"
    )]
    Bias { tensor: String, dir: PathBuf, why: String },
}
