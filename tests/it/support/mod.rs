//! What several tests share.

pub mod command;
pub mod emulator;
pub mod hub_server;
pub mod scene;

use std::path::{Path, PathBuf};

use quantkit::tensor::{Dtype, widened};
use safetensors::SafeTensors;

/// A file or folder under `tests/golden`.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// A file of the repository.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// `tokens` and `logits` of a golden file.
pub fn golden_logits(path: &Path) -> (Vec<u32>, Vec<f32>) {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tokens = file
        .tensor("tokens")
        .unwrap()
        .data()
        .chunks_exact(4)
        .map(|b| u32::from_le_bytes(b.try_into().unwrap()))
        .collect();
    (tokens, widened(Dtype::F32, file.tensor("logits").unwrap().data()))
}
