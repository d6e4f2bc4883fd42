//! Whole runs of the program: what they write, say, and measure.

mod artifact;
mod baseline;
mod cache;
mod combinations;
mod companions;
mod divergence;
mod evaluate;
mod generate;
pub mod gguf;
mod gguf_options;
mod inspect;
mod interruption;
mod plan;
mod presence;
mod recipe;
mod rules;
mod scaling;
mod speculation;
mod structure;
mod validate;

use serde_json::Value;

/// A number somewhere in a JSON value.
#[track_caller]
fn number(value: &Value, pointer: &str) -> f64 {
    value.pointer(pointer).and_then(Value::as_f64).unwrap_or_else(|| panic!("no number at {pointer} in {value}"))
}
