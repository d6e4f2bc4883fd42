//! Running a model: cache, sampling, generation.

pub mod sampler;
