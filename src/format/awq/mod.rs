//! AutoAWQ artifacts ("GEMM"): three tensors for each linear, one scheme for all.

mod source;
mod write;

pub(super) use source::{open, open_grouped};
pub use write::AwqLayout;
