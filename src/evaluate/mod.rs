//! Measurements of what is on disk.

pub mod perplexity;
pub mod windows;
