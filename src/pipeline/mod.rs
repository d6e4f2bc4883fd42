//! Making artifacts: a model is found, opened, quantized or encoded, written, read back and measured.
//!
//! Nothing here knows of a command line: what happens is reported to an [`observer::Observer`], which may also stop the work.

pub mod failure;
pub mod few_tokens;
pub mod gguf;
pub mod measure;
pub mod observer;
pub mod open;
pub mod options;
pub mod quantize;
pub mod source;

use std::sync::Arc;

use crate::backend::Backend;
use crate::backend::cpu::Cpu;

pub use anyhow::Error;

/// What the pipeline gives.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The backend that computes on the CPU.
pub fn cpu() -> Arc<dyn Backend> {
    Arc::new(Cpu)
}
