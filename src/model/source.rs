//! Where a model's matrices come from: a plain checkpoint, or an artifact that some format reads.

use thiserror::Error;

use crate::backend::weight::{Dense, Weight};
use crate::checkpoint::{Checkpoint, CheckpointError};

/// Why a matrix could not be had.
#[derive(Debug, Error)]
pub enum SourceError {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error("module `{module}` in `{dir}`: {why}")]
    Stored { module: String, dir: std::path::PathBuf, why: String },
}

/// A model folder seen as matrices in the form they are stored in.
pub trait WeightSource: Send + Sync {
    /// The folder underneath.
    fn checkpoint(&self) -> &Checkpoint;

    /// The weight of linear `module` (its path without `.weight`), `rows` outputs by `cols` inputs.
    fn linear(&self, module: &str, rows: usize, cols: usize) -> Result<Weight, SourceError>;
}

/// A floating-point checkpoint.
pub struct DenseSource(pub Checkpoint);

impl WeightSource for DenseSource {
    fn checkpoint(&self) -> &Checkpoint {
        &self.0
    }

    fn linear(&self, module: &str, rows: usize, cols: usize) -> Result<Weight, SourceError> {
        dense(&self.0, module, rows, cols)
    }
}

/// The float weight of `module` as it stands in the file.
pub fn dense(checkpoint: &Checkpoint, module: &str, rows: usize, cols: usize) -> Result<Weight, SourceError> {
    let entry = checkpoint.expect_float(&format!("{module}.weight"), &[rows, cols])?;
    Ok(Weight::Dense(Dense { rows, cols, dtype: entry.dtype, bytes: entry.bytes.clone() }))
}
