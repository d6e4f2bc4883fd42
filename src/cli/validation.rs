//! Arguments of `quantkit eval kv` and `quantkit validate`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::environment::stand_in;
use super::options::ModelArgs;
use super::parse::{DeviceArg, parse_bos, parse_convention, parse_count, parse_device};
use super::report::ThresholdArgs;
use crate::backend::cache::CacheType;
use crate::evaluate::windows::Convention;
use crate::model::tokenizer::BosMode;
use crate::report::thresholds::Percent;

/// Texts and how they are cut.
#[derive(Clone, Debug, Args)]
pub struct TextArgs {
    /// Text to measure on; may be given several times [default: built-in held-out texts]
    #[arg(long = "text", value_name = "FILE")]
    pub texts: Vec<PathBuf>,
    /// Whose convention: gptq, llamacpp, lmeval
    #[arg(long, default_value = "gptq", value_parser = parse_convention)]
    pub convention: Convention,
    /// Tokens per window [default: 512, or the model's context if that is shorter]
    #[arg(long, value_parser = parse_count)]
    pub window: Option<usize>,
    /// Windows of each text at most
    #[arg(long, default_value = "16", value_parser = parse_count)]
    pub max_windows: usize,
    /// BOS: auto, none, window (each window starts with one), once (at the start of the text)
    #[arg(long, default_value = "auto", value_parser = parse_bos)]
    pub bos: BosMode,
}

#[derive(Debug, Args)]
pub struct KvArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub texts: TextArgs,
    /// Types of the cache, each held against f16
    #[arg(long = "kv-cache-dtype", value_name = "TYPE", value_delimiter = ',', default_value = "fp8,fp8_e5m2,int8")]
    pub kinds: Vec<CacheType>,
    /// Exit with 1 if a cache that engines would use raises perplexity by more than this, such as `0.5%`
    #[arg(long, value_name = "PERCENT")]
    pub max_ppl_increase: Option<Percent>,
    /// One JSON object on stdout, nothing else
    #[arg(long)]
    pub json: bool,
}

/// A part of a validation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Plain rounding beside the artifact
    Control,
    /// The error of each module
    Modules,
    /// Key-value caches of few bits
    Kv,
    /// Speculative decoding
    Spec,
}

#[derive(Debug, Args)]
pub struct ValidateArgs {
    /// The artifact: a folder, a GGUF file or a hub id `org/name` [default: the built-in demo checkpoint, quantized
    /// to 4 bits first]
    pub artifact: Option<String>,
    /// Branch, tag or commit of a hub artifact [default: main]
    #[arg(long)]
    pub revision: Option<String>,
    /// The model that it was made from [default: the built-in demo checkpoint]
    #[arg(long, value_name = "MODEL")]
    pub reference: Option<String>,
    /// Branch, tag or commit of a hub reference [default: main]
    #[arg(long)]
    pub reference_revision: Option<String>,
    /// A draft model for speculative decoding with the artifact [default: none; the demo's own for the demo]
    #[arg(long, value_name = "MODEL")]
    pub draft: Option<String>,
    #[command(flatten)]
    pub texts: TextArgs,
    /// Types of the key-value cache, each held against f16
    #[arg(long = "kv-cache-dtype", value_name = "TYPE", value_delimiter = ',', default_value = "fp8,fp8_e5m2,int8")]
    pub kinds: Vec<CacheType>,
    /// Drafted tokens of a step of speculative decoding
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=8))]
    pub num_speculative_tokens: u8,
    /// Leave out parts that take long
    #[arg(long, value_enum, value_name = "PART", value_delimiter = ',')]
    pub skip: Vec<Part>,
    /// Folder for report.json, report.md, report.html and junit.xml [default: named after the artifact, in the
    /// current folder]
    #[arg(long, short, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// What to call this run in a history [default: $GITHUB_SHA]
    #[arg(long)]
    pub label: Option<String>,
    /// An earlier report to hold this one against
    #[arg(long, value_name = "FILE")]
    pub baseline: Option<PathBuf>,
    /// Where to compute: auto (all CUDA devices, or the CPU), cpu, cuda (all), cuda:0, cuda:0,1
    #[arg(long, default_value = "auto", env = stand_in("QUANTKIT_DEVICE"), value_parser = parse_device)]
    pub device: DeviceArg,
    /// One JSON object on stdout, nothing else
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub limits: ThresholdArgs,
}
