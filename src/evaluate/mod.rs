//! Measurements of what is on disk.

pub mod acceptance;
pub mod baseline;
pub mod cache_error;
pub mod divergence;
pub mod finite;
pub mod logits_file;
pub mod modules;
pub mod perplexity;
pub mod speculation;
pub mod windows;
