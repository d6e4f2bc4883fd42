//! Running a model: scoring, cached decoding, sampling.

pub mod generate;
pub mod sampler;
pub mod score;
