//! Options that several commands share.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::environment::stand_in;
use super::parse::{DeviceArg, parse_amount, parse_bits, parse_bos, parse_device, parse_group_size};
use crate::model::tokenizer::BosMode;
use crate::pipeline::options::{Evaluation, OnMisfit};
use crate::pipeline::source::ModelSource;
use crate::quantize::scale_search::ScaleSearch;

/// A model: a folder, a hub id, or nothing for the built-in demo checkpoint.
#[derive(Clone, Debug, Args)]
pub struct ModelArgs {
    /// Model folder or hub id `org/name` [default: the built-in demo checkpoint]
    pub model: Option<String>,
    /// Branch, tag or commit of a hub model [default: main]
    #[arg(long)]
    pub revision: Option<String>,
    /// Where to compute: auto (all CUDA devices, or the CPU), cpu, cuda (all), cuda:0, cuda:0,1
    #[arg(long, default_value = "auto", env = stand_in("QUANTKIT_DEVICE"), value_parser = parse_device)]
    pub device: DeviceArg,
}

impl<'a> From<&'a ModelArgs> for ModelSource<'a> {
    fn from(args: &'a ModelArgs) -> Self {
        Self { model: args.model.as_deref(), revision: args.revision.as_deref() }
    }
}

#[derive(Clone, Debug, Args)]
pub struct SchemeArgs {
    /// Bits per weight: 2, 3, 4 or 8
    #[arg(long, default_value_t = 4, value_parser = parse_bits)]
    pub bits: u8,
    /// Input channels that share a scale; -1 for one scale per output channel
    #[arg(long, default_value_t = 128, allow_negative_numbers = true, value_parser = parse_group_size)]
    pub group_size: i32,
    /// Override for modules whose path matches: `REGEX=bits:8,group_size:32,sym:false`; the first match wins
    #[arg(long = "rule", value_name = "REGEX=...")]
    pub rules: Vec<String>,
    /// Leave modules whose path matches in floating point
    #[arg(long = "skip", value_name = "REGEX")]
    pub skips: Vec<String>,
    /// What to do where the group size does not divide a module's input; with `skip`, modules that a consumer of --for
    /// would not load stay in floating point too
    #[arg(long, value_enum, default_value_t = OnMisfitArg::Refuse)]
    pub on_misfit: OnMisfitArg,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnMisfitArg {
    /// Stop before any work, and say which sizes would do
    Refuse,
    /// Leave the module in floating point
    Skip,
    /// Take the largest smaller group size that divides
    SmallerGroup,
}

impl From<OnMisfitArg> for OnMisfit {
    fn from(arg: OnMisfitArg) -> Self {
        match arg {
            OnMisfitArg::Refuse => Self::Refuse,
            OnMisfitArg::Skip => Self::Skip,
            OnMisfitArg::SmallerGroup => Self::SmallerGroup,
        }
    }
}

#[derive(Clone, Debug, Args)]
pub struct CalibrationArgs {
    /// Calibration text: .txt, or .jsonl with `text` or chat `messages` [default: built-in]
    #[arg(long, value_name = "FILE")]
    pub calib: Option<PathBuf>,
    /// Calibration windows [default: 128, or what the text gives]
    #[arg(long)]
    pub nsamples: Option<usize>,
    /// Tokens per window [default: 512, or the model's context if that is shorter]
    #[arg(long)]
    pub seqlen: Option<usize>,
    /// Which windows are taken [default: in-order]
    #[arg(long, value_enum)]
    pub sampling: Option<SamplingArg>,
    /// Seed of random sampling [default: 0]
    #[arg(long)]
    pub seed: Option<u64>,
}

impl CalibrationArgs {
    /// The first option given that only calibration reads.
    pub fn given(&self) -> Option<&'static str> {
        let options = [
            ("--calib", self.calib.is_some()),
            ("--nsamples", self.nsamples.is_some()),
            ("--seqlen", self.seqlen.is_some()),
            ("--sampling", self.sampling.is_some()),
            ("--seed", self.seed.is_some()),
        ];
        options.into_iter().find(|(_, given)| *given).map(|(name, _)| name)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SamplingArg {
    /// Consecutive windows from the start of the text
    InOrder,
    /// Windows at seeded random places
    Random,
}

#[derive(Clone, Debug, Args)]
pub struct OutputArgs {
    /// Folder to write [default: named after model, method and bits, in the current folder]
    #[arg(long, short, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Replace an artifact of quantkit that stands there already
    #[arg(long)]
    pub overwrite: bool,
    /// Continue an interrupted run with the same options
    #[arg(long)]
    pub resume: bool,
    /// Continue one with the same options, and start anew after any other: what a recipe wants.
    #[arg(skip)]
    pub resume_same: bool,
    /// Calibrate scales for a cache of 8-bit keys and values and store them (compressed-tensors and fp8)
    #[arg(long, value_enum, value_name = "TYPE")]
    pub kv_cache: Option<KvCacheArg>,
    /// Zero-point convention of a GPTQ artifact [default: gptq, or gptq_v2 when anything is asymmetric]
    #[arg(long, value_parser = ["gptq", "gptq_v2"])]
    pub checkpoint_format: Option<String>,
    /// Largest size of one weight file, in MB
    #[arg(long, default_value_t = 5000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub max_shard_size: u64,
    /// Refuse what this consumer does not load, e.g. vllm-0.33; see `quantkit list`
    #[arg(long = "for", value_name = "CONSUMER")]
    pub consumers: Vec<String>,
    #[command(flatten)]
    pub evaluation: EvaluationArgs,
    /// BOS in calibration and evaluation
    #[arg(long, default_value = "auto", value_parser = parse_bos)]
    pub bos: BosMode,
    /// One JSON object on stdout, nothing else
    #[arg(long)]
    pub json: bool,
}

/// The perplexities before and after.
#[derive(Clone, Debug, Args)]
pub struct EvaluationArgs {
    /// Do not measure perplexity before and after
    #[arg(long)]
    pub no_eval: bool,
    /// Text for the perplexities [default: built-in held-out text]
    #[arg(long, value_name = "FILE", conflicts_with = "no_eval")]
    pub eval_text: Option<PathBuf>,
    /// Windows of 512 tokens for the perplexities [default: 16]
    #[arg(long, conflicts_with = "no_eval", value_parser = clap::value_parser!(u32).range(1..))]
    pub eval_windows: Option<u32>,
    /// Exit with 1 if the perplexity rises by more than this many percent; the artifact is written all the same
    #[arg(long, value_name = "PERCENT", conflicts_with = "no_eval", value_parser = parse_amount)]
    pub max_increase: Option<f64>,
}

impl EvaluationArgs {
    /// What is measured, if anything is.
    pub fn settled(&self) -> Option<Evaluation> {
        let usual = Evaluation::default().windows;
        let windows = self.eval_windows.map_or(usual, |windows| windows as usize);
        (!self.no_eval).then(|| Evaluation { text: self.eval_text.clone(), windows })
    }
}

/// Scales for a cache of 8-bit keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KvCacheArg {
    /// One scale a layer for keys and one for values
    Fp8,
    /// One scale a head
    Fp8PerHead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GridArg {
    /// The largest weight of a group decides
    MaxAbs,
    /// Least squared error of the weights
    Mse,
    /// Least squared error of the output, as calibration saw the inputs
    Hessian,
}

impl From<GridArg> for ScaleSearch {
    fn from(arg: GridArg) -> Self {
        match arg {
            GridArg::MaxAbs => ScaleSearch::MaxAbs,
            GridArg::Mse => ScaleSearch::Mse,
            GridArg::Hessian => ScaleSearch::Hessian,
        }
    }
}
