//! quantkit: offline quantization and model conversion.
//!
//! Data flows one way, and so do imports: a module uses only what stands to its left or below.
//!
//! ```text
//!                        commands ─ cli        recipe
//! checkpoint ─► model ─► calibrate ─► quantize ─► pack ─► format ─► engine ─► evaluate ─► report
//!   hub
//!                  backend     num     tensor     scheme
//! ```
//!
//! `tests/it/architecture.rs` holds this picture against every `use crate::` line.

pub mod backend;
pub mod calibrate;
pub mod checkpoint;
pub mod cli;
pub mod commands;
pub mod engine;
pub mod evaluate;
pub mod format;
pub mod hub;
pub mod model;
pub mod num;
pub mod pack;
pub mod quantize;
pub mod recipe;
pub mod report;
pub mod scheme;
pub mod tensor;
