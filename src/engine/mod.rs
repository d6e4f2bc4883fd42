//! Running a model: scoring, cached decoding, sampling.

pub mod generate;
pub mod logits;
pub mod sampler;
pub mod score;
