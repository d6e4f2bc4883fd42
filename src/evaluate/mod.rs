//! Measurements of what is on disk.

pub mod divergence;
pub mod logits_file;
pub mod perplexity;
pub mod windows;
