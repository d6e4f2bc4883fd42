//! Running a model: scoring, cached decoding, sampling.

pub mod blocks;
pub mod cache;
pub mod capacity;
pub mod generate;
pub mod logits;
pub mod pass;
pub mod rejection;
pub mod sampler;
pub mod scheduler;
pub mod score;
pub mod speculate;
mod steps;
