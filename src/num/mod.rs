//! Number crunching that knows nothing of models: bit fields, matrix products, factorizations, run-time choice of
//! vector instructions, amounts of memory in words, bytes in hexadecimal. The only place that names the linear-algebra crates.

pub mod bits;
pub mod e4m3;
pub mod e5m2;
pub mod few;
pub mod ggml;
pub mod hex;
pub mod int8;
pub mod lanes;
pub mod linalg;
pub mod matmul;
pub mod short;
pub mod simd;
pub mod size;
