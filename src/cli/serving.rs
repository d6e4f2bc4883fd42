//! Arguments of the key-value cache and of many sequences at a time.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::parse::{parse_amount, parse_count, parse_whole_share};
use crate::backend::cache::CacheType;

#[derive(Clone, Debug, Args)]
pub struct ManyArgs {
    /// Prompts to continue side by side: a text file with one a line, or .jsonl with `prompt` or `messages` a line
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    pub prompts: Option<PathBuf>,
    /// Continuations of each prompt; the second takes the seed after the first's, and so on
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = parse_count)]
    pub num_samples: usize,
    /// Most sequences that go on side by side
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = parse_count)]
    pub max_num_seqs: usize,
    /// Most tokens of a step, prompts included
    #[arg(long, default_value_t = 2048, value_name = "N", value_parser = parse_count)]
    pub max_num_batched_tokens: usize,
    #[command(flatten)]
    pub cache: CacheArgs,
}

/// Where the scales of an 8-bit cache come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ScalesArg {
    /// For fp8 the model's own if it brings any along, otherwise as `none`
    Auto,
    /// 1.0 for fp8 and fp8_e5m2, each token's own for int8
    None,
    /// The model's own, for any 8-bit type; an error if it brings none along
    Stored,
    /// Found on the built-in calibration text, one for each head
    Calibrated,
}

impl ScalesArg {
    pub fn name(self) -> &'static str {
        match self {
            ScalesArg::Auto => "auto",
            ScalesArg::None => "none",
            ScalesArg::Stored => "stored",
            ScalesArg::Calibrated => "calibrated",
        }
    }
}

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, Args)]
pub struct CacheTypeArgs {
    /// Type of the key-value cache: f32 (CPU), f16, fp8, fp8_e5m2, int8 [default: f32 on the CPU, f16 on GPUs]
    #[arg(long, value_name = "TYPE")]
    pub kv_cache_dtype: Option<CacheType>,
    /// Scales of a cache of 8 bits
    #[arg(long, value_enum, value_name = "SOURCE", default_value = "auto")]
    pub kv_cache_scales: ScalesArg,
}

#[derive(Clone, Debug, Args)]
pub struct CacheArgs {
    #[command(flatten)]
    pub kind: CacheTypeArgs,
    /// Share of the memory left beside the weights that the key-value cache may take, on the CPU of what is available
    #[arg(long, default_value_t = 0.9, value_name = "SHARE", value_parser = parse_whole_share)]
    pub gpu_memory_utilization: f64,
    /// Bytes that the key-value cache may take, instead of a share
    #[arg(long, value_name = "BYTES", conflicts_with = "gpu_memory_utilization")]
    pub kv_cache_memory_bytes: Option<u64>,
    /// GiB of host memory for sequences that give way when the key-value cache is full; beyond it they are computed again
    #[arg(long, default_value_t = 4.0, value_name = "GIB", value_parser = parse_amount)]
    pub swap_space: f64,
}
