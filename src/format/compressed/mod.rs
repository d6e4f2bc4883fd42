//! compressed-tensors artifacts, as llm-compressor writes them: packed integers, whole bytes, floats of 8 bits.

mod settings;
mod source;
mod write;

pub(super) use source::open;
pub use write::CompressedLayout;
