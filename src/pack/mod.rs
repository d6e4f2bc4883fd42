//! Quantized weights to bytes and back, one file per layout.

pub mod awq;
pub mod compressed;
pub mod ggml;
pub mod gptq;
