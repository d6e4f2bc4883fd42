//! The command line of what looks ahead: plans and recipes.

use std::path::PathBuf;

use clap::Args;

use super::environment::stand_in;
use super::parse::{DeviceArg, Reserve, parse_bytes, parse_count, parse_device, parse_group_size, parse_reserve};

#[derive(Debug, Args)]
pub struct PlanArgs {
    /// Model folder, artifact, GGUF file, config.json or hub id; no weights need be there [default: the built-in demo
    /// checkpoint]
    pub model: Option<String>,
    /// Branch, tag or commit of a hub model [default: main]
    #[arg(long)]
    pub revision: Option<String>,
    /// Memory of the device, such as 40GiB (2^30) or 24GB (10^9): tells how many sequences fit beside the weights
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub memory: Option<u64>,
    /// Kept free of it for activations and the runtime: a size, or a share such as 10%
    #[arg(long, value_name = "SIZE|SHARE", default_value = "10%", value_parser = parse_reserve, requires = "memory")]
    pub reserve: Reserve,
    /// Tokens of a sequence [default: 2048, or the model's context if that is shorter]
    #[arg(long, value_name = "TOKENS", value_parser = parse_count)]
    pub context: Option<usize>,
    /// Group size of the integer formats; -1 for one scale per output channel
    #[arg(long, default_value_t = 128, allow_negative_numbers = true, value_parser = parse_group_size)]
    pub group_size: i32,
    /// One JSON object on stdout, nothing else
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct RunArgs {
    /// The recipe
    #[arg(default_value = "quantkit.toml")]
    pub recipe: PathBuf,
    /// Only these artifacts
    #[arg(long, value_name = "NAME")]
    pub only: Vec<String>,
    /// Tell what would be done, and what it would take; nothing is written
    #[arg(long)]
    pub dry_run: bool,
    /// Where to compute, unless an artifact of the recipe says otherwise: auto, cpu, cuda, cuda:0, cuda:0,1
    #[arg(long, default_value = "auto", env = stand_in("QUANTKIT_DEVICE"), value_parser = parse_device)]
    pub device: DeviceArg,
    /// One JSON object on stdout, nothing else
    #[arg(long)]
    pub json: bool,
}
