//! AutoAWQ artifacts ("GEMM"): three tensors for each linear, one scheme for all.

mod source;
mod write;

pub(super) use source::open;
pub use write::AwqLayout;
