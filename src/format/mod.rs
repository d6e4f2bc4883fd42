//! Artifact formats: names, files, configuration keys; written out and read back.

pub mod atomic;
pub mod consumers;
pub mod gptq;
pub mod manifest;
pub mod safetensors;
