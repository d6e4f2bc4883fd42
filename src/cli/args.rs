//! The command line, one definition for parsing, help and documentation.

use std::path::PathBuf;

use clap::{Arg, ArgGroup, Args, Parser, Subcommand, ValueEnum};

use super::environment::stand_in;
pub use super::gguf::{ConvertArgs, ConvertTo, FloatArg, GgufArgs, ImatrixArgs, ImatrixForm};
use super::methods::{AwqArgs, FormatArg, Fp8Args, SmoothquantArgs};
pub use super::options::{CalibrationArgs, EvaluationArgs, GridArg, ModelArgs, OutputArgs, SamplingArg, SchemeArgs};
pub use super::parse::DeviceArg;
use super::parse::{
    parse_amount, parse_bos, parse_convention, parse_count, parse_device, parse_share, parse_whole_share,
};
use super::planning::{PlanArgs, RunArgs};
use super::report::{CompareArgs, HistoryArgs};
use super::serving::ManyArgs;
use super::spec::{DraftArgs, SpecArgs};
use super::validation::{KvArgs, ValidateArgs};
use crate::evaluate::windows::Convention;
use crate::model::tokenizer::BosMode;
use crate::quantize::order::Order;

/// Offline quantization and model conversion: an FP16 checkpoint in, a verified artifact out.
#[derive(Debug, Parser)]
#[command(name = "quantkit", version, propagate_version = true)]
#[command(
    after_help = "Exit codes: 0 done, 1 a check failed, 2 usage or bad input, 3 internal or device, 130 interrupted."
)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Clone, Debug, Args)]
pub struct Global {
    /// Threads to work with [default: all cores]. The output does not depend on it
    #[arg(long, global = true, env = stand_in("QUANTKIT_THREADS"), value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Say nothing but results, warnings and errors
    #[arg(long, short, global = true)]
    pub quiet: bool,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Quantize with GPTQ: calibrated rounding with error compensation
    Gptq(GptqArgs),
    /// Quantize by rounding to nearest: the control method
    Rtn(RtnArgs),
    /// Quantize with AWQ: channels whose inputs matter are scaled before rounding
    Awq(AwqArgs),
    /// Quantize weights and inputs to 8-bit integers, outliers smoothed away (SmoothQuant)
    Smoothquant(SmoothquantArgs),
    /// Round weights and inputs to 8-bit floats (E4M3)
    Fp8(Fp8Args),
    /// Write a GGUF file in any of llama.cpp's types, from a checkpoint, an artifact or another GGUF file
    Gguf(GgufArgs),
    /// Gather what the weights' inputs look like: importance for `gguf --imatrix` and llama.cpp
    Imatrix(ImatrixArgs),
    /// Make a Hugging Face folder of a GGUF file
    Convert(ConvertArgs),
    /// Measure a model or an artifact
    #[command(subcommand)]
    Eval(EvalCommand),
    /// Let a model or an artifact write text
    Generate(GenerateArgs),
    /// Tell what a model folder, an artifact or a GGUF file is, without reading its weights
    Inspect(InspectArgs),
    /// Tell what a model would take: weights in every format, the cache of a token, sequences that fit
    Plan(PlanArgs),
    /// Carry out a recipe: several artifacts of one model, each measured and held against limits
    Run(RunArgs),
    /// Measure everything about an artifact, in one report held against limits
    Validate(ValidateArgs),
    /// Judge a report against limits and an earlier report; exits with 1 if a limit or a check fails
    Compare(CompareArgs),
    /// Show how the figures of many reports developed
    History(HistoryArgs),
    /// Show what is known: model families, consumers, formats
    List(ListArgs),
}

impl Command {
    /// Where its artifact goes, for a command that quantizes to a folder.
    pub fn output(&self) -> Option<&OutputArgs> {
        match self {
            Self::Gptq(args) => Some(&args.output),
            Self::Rtn(args) => Some(&args.output),
            Self::Awq(args) => Some(&args.output),
            Self::Smoothquant(args) => Some(&args.output),
            Self::Fp8(args) => Some(&args.output),
            _ => None,
        }
    }

    /// The same, to be settled by whoever runs it.
    pub fn output_mut(&mut self) -> Option<&mut OutputArgs> {
        match self {
            Self::Gptq(args) => Some(&mut args.output),
            Self::Rtn(args) => Some(&mut args.output),
            Self::Awq(args) => Some(&mut args.output),
            Self::Smoothquant(args) => Some(&mut args.output),
            Self::Fp8(args) => Some(&mut args.output),
            _ => None,
        }
    }
}

#[derive(Debug, Subcommand)]
pub enum EvalCommand {
    /// Perplexity on a text
    Ppl(PplArgs),
    /// Divergence of an artifact's predictions from those of the model it was made from
    Kl(KlArgs),
    /// What key-value caches of few bits do to a model
    Kv(KvArgs),
    /// Speculative decoding: how many tokens of a draft stand, and what that gains
    Spec(SpecArgs),
}

#[derive(Debug, Args)]
pub struct GptqArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub scheme: SchemeArgs,
    /// Zero points per group instead of a grid symmetric around zero
    #[arg(long)]
    pub asym: bool,
    /// Form of the artifact
    #[arg(long, value_enum, default_value_t = FormatArg::Gptq)]
    pub format: FormatArg,
    /// How scales are chosen
    #[arg(long, value_enum, default_value_t = GridArg::Hessian)]
    pub grid: GridArg,
    /// Order in which columns are rounded
    #[arg(long, value_enum, default_value_t = OrderArg::GroupAware)]
    pub order: OrderArg,
    /// Activation order (descending Hessian diagonal); same as --order activation
    #[arg(long, conflicts_with = "order")]
    pub desc_act: bool,
    /// Grids from the original weights, groups of stored columns
    #[arg(long)]
    pub static_groups: bool,
    /// Share of the mean Hessian diagonal added to the diagonal
    #[arg(long, default_value_t = 0.05, value_parser = parse_share)]
    pub damp_percent: f64,
    /// Growth of the damping when the Hessian cannot be factored
    #[arg(long, default_value_t = 0.01, value_parser = parse_share)]
    pub damp_auto_increment: f64,
    /// Sweeps of coordinate descent over codes and scales after the single pass
    #[arg(long, default_value_t = 1)]
    pub sweeps: usize,
    /// Let weights make up for the errors of earlier layers too: calibration also runs through the original
    /// model. Often the better artifact, in about twice the time
    #[arg(long)]
    pub drift_correction: bool,
    /// Calibrate all linears of a block on the unquantized block
    #[arg(long)]
    pub no_true_sequential: bool,
    #[command(flatten)]
    pub calibration: CalibrationArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Debug, Args)]
pub struct RtnArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub scheme: SchemeArgs,
    /// Zero points per group instead of a grid symmetric around zero
    #[arg(long)]
    pub asym: bool,
    /// Form of the artifact
    #[arg(long, value_enum, default_value_t = FormatArg::Gptq)]
    pub format: FormatArg,
    /// How scales are chosen; `hessian` calibrates, the others need no data
    #[arg(long, value_enum, default_value_t = GridArg::Mse)]
    pub grid: GridArg,
    #[command(flatten)]
    pub calibration: CalibrationArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OrderArg {
    /// As stored
    Natural,
    /// By importance inside groups and by groups: every consumer loads the result
    GroupAware,
    /// By importance over the whole row (desc_act)
    Activation,
}

impl From<OrderArg> for Order {
    fn from(arg: OrderArg) -> Self {
        match arg {
            OrderArg::Natural => Order::Natural,
            OrderArg::GroupAware => Order::GroupAware,
            OrderArg::Activation => Order::Activation,
        }
    }
}

#[derive(Debug, Args)]
pub struct PplArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Text to score [default: built-in held-out text]
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Whose convention: gptq, llamacpp, lmeval
    #[arg(long, default_value = "gptq", value_parser = parse_convention)]
    pub convention: Convention,
    /// Tokens per window [default: 2048, llamacpp 512; or the model's context if that is shorter]
    #[arg(long)]
    pub window: Option<usize>,
    /// Score only the first windows
    #[arg(long, value_parser = parse_count)]
    pub max_windows: Option<usize>,
    /// BOS: auto, none, window (each window starts with one), once (at the start of the text)
    #[arg(long, default_value = "auto", value_parser = parse_bos)]
    pub bos: BosMode,
    /// One JSON object on stdout, nothing else
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct KlArgs {
    /// The artifact: a folder or a hub id `org/name`
    pub artifact: String,
    /// Branch, tag or commit of a hub artifact [default: main]
    #[arg(long)]
    pub revision: Option<String>,
    /// The model it was made from: a folder or a hub id [default: the built-in demo checkpoint]
    #[arg(long, value_name = "MODEL")]
    pub reference: Option<String>,
    /// Branch, tag or commit of a hub reference [default: main]
    #[arg(long, value_name = "REVISION", requires = "reference")]
    pub reference_revision: Option<String>,
    /// In place of a model, what llama.cpp wrote with --kl-divergence-base: predictions and the text's tokens
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["reference", "reference_revision", "texts", "convention", "window"]
    )]
    pub reference_logits: Option<PathBuf>,
    /// In place of a model, what --save-baseline wrote: the texts' tokens and the likeliest predictions; their
    /// divergence is an estimate within bounds that are told, all other figures are exact
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = [
            "reference", "reference_revision", "reference_logits", "save_baseline", "texts", "convention", "window", "bos"
        ]
    )]
    pub baseline: Option<PathBuf>,
    /// Keep the reference's predictions in a file of some megabytes, for --baseline
    #[arg(long, value_name = "FILE", conflicts_with = "reference_logits")]
    pub save_baseline: Option<PathBuf>,
    /// Where to compute: auto (all CUDA devices, or the CPU), cpu, cuda (all), cuda:0, cuda:0,1
    #[arg(long, default_value = "auto", env = stand_in("QUANTKIT_DEVICE"), value_parser = parse_device)]
    pub device: DeviceArg,
    /// Text to compare on; may be given several times [default: two built-in held-out texts, a story and science]
    #[arg(long = "text", value_name = "FILE")]
    pub texts: Vec<PathBuf>,
    /// Whose convention: gptq, llamacpp, lmeval
    #[arg(long, default_value = "gptq", value_parser = parse_convention)]
    pub convention: Convention,
    /// Tokens per window [default: 2048, llamacpp 512; or the models' context if that is shorter]
    #[arg(long)]
    pub window: Option<usize>,
    /// Compare only the first windows of each text
    #[arg(long, value_parser = parse_count)]
    pub max_windows: Option<usize>,
    /// BOS: auto, none, window (each window starts with one), once (at the start of the text)
    #[arg(long, default_value = "auto", value_parser = parse_bos)]
    pub bos: BosMode,
    /// Exit with 1 if on any text the mean divergence is above this many nats
    #[arg(long, value_name = "NATS", value_parser = parse_amount)]
    pub max_kl: Option<f64>,
    /// Exit with 1 if both agree on the likeliest token at less than this share of positions, 0 to 1
    #[arg(long, value_name = "SHARE", value_parser = parse_whole_share)]
    pub min_same_top: Option<f64>,
    /// One JSON object on stdout, nothing else
    #[arg(long)]
    pub json: bool,
}

/// What one sequence would take no notice of is refused.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("several").args(["prompts", "num_samples"]).multiple(true))]
#[command(mut_args(of_several))]
pub struct GenerateArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// What to continue, or with --chat what to answer; `-` reads stdin
    #[arg(long, short, required_unless_present = "prompts")]
    pub prompt: Option<String>,
    #[command(flatten)]
    pub many: ManyArgs,
    /// Put the prompt through the model's chat template
    #[arg(long)]
    pub chat: bool,
    /// System message for --chat
    #[arg(long, requires = "chat")]
    pub system: Option<String>,
    /// Tokens to write at most
    #[arg(long, default_value_t = 128)]
    pub max_tokens: usize,
    /// 0 takes the likeliest token every time
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub temperature: f64,
    /// Sample from the likeliest tokens that together reach this probability [default: 1]
    #[arg(long)]
    pub top_p: Option<f64>,
    /// Sample from this many likeliest tokens; 0 for all [default: 0]
    #[arg(long)]
    pub top_k: Option<usize>,
    /// Seed of sampling [default: 0]
    #[arg(long)]
    pub seed: Option<u64>,
    #[command(flatten)]
    pub draft: DraftArgs,
    /// Launch the kernels of each token one by one instead of as one recorded CUDA graph
    #[arg(long)]
    pub no_cuda_graph: bool,
    /// Do not stop at end-of-sequence tokens
    #[arg(long)]
    pub ignore_eos: bool,
    /// One JSON object on stdout, nothing else
    #[arg(long)]
    pub json: bool,
}

/// Shares of memory and of steps are for sequences side by side.
fn of_several(arg: Arg) -> Arg {
    match arg.get_id().as_str() {
        "max_num_seqs" | "max_num_batched_tokens" | "gpu_memory_utilization" | "swap_space" => arg.requires("several"),
        _ => arg,
    }
}

#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Model folder, artifact or GGUF file (of a split one the first part)
    pub path: PathBuf,
    /// Hash every file of an artifact again and compare it with `quantkit.json`; without that, check headers, shapes and
    /// that all numbers are finite. Exit with 1 if something is wrong
    #[arg(long)]
    pub verify: bool,
    /// One JSON object on stdout, nothing else
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct ListArgs {
    /// The JSON Schema of `report.json`, nothing else
    #[arg(long)]
    pub report_schema: bool,
    /// One JSON object on stdout, nothing else
    #[arg(long)]
    pub json: bool,
}
