//! The `fp8` method: weights in E4M3 with a scale for each block, as DeepSeek has them, or for the whole.

mod source;
mod write;

pub(super) use source::open;
pub use write::Fp8Layout;
