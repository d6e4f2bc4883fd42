//! Quantized weights to bytes and back, one file per layout.

pub mod ggml;
pub mod gptq;
