//! All integration tests, in one binary.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stderr)]

mod architecture;
mod bad_input;
mod baseline;
mod batching;
mod cli;
mod cuda;
mod cuts;
mod emulator;
mod end_to_end;
mod families;
mod feedback;
mod folding;
mod formats;
mod gguf_container;
mod gguf_metadata;
mod golden_compressed;
mod golden_ggml;
mod golden_gptq;
mod hub;
mod integrity;
mod kernels;
mod licences;
mod modules;
mod report;
mod support;
mod text;
