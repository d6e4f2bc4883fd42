//! Artifact formats: names, files, configuration keys; written out and read back.

pub mod atomic;
pub mod consumers;
pub mod gptq;
pub mod manifest;
pub mod safetensors;

pub use manifest::verify_manifest;

use serde_json::Value;

/// Indented JSON with a closing newline, as model folders hold it.
pub fn pretty(value: &Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}
