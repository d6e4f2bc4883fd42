//! The command line, one definition for parsing, help and documentation.

use std::fmt;
use std::path::PathBuf;

use clap::{Arg, ArgGroup, Args, Parser, Subcommand, ValueEnum};

use super::environment::stand_in;
pub use super::gguf::{ConvertArgs, ConvertTo, FloatArg, GgufArgs, ImatrixArgs, ImatrixForm};
use super::methods::{AwqArgs, FormatArg, Fp8Args, KvCacheArg, SmoothquantArgs};
use super::parse::{
    parse_amount, parse_bits, parse_bos, parse_convention, parse_count, parse_device, parse_group_size, parse_share,
    parse_whole_share,
};
use super::planning::{PlanArgs, RunArgs};
use super::report::{CompareArgs, HistoryArgs};
use super::serving::ManyArgs;
use super::spec::{DraftArgs, SpecArgs};
use super::validation::{KvArgs, ValidateArgs};
use crate::evaluate::windows::Convention;
use crate::model::tokenizer::BosMode;
use crate::pipeline::options::{Evaluation, OnMisfit};
use crate::pipeline::source::ModelSource;
use crate::quantize::order::Order;
use crate::quantize::scale_search::ScaleSearch;

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

/// Where to compute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceArg {
    Auto,
    Cpu,
    AllCuda,
    /// Ordinals of CUDA devices.
    Cuda(Vec<usize>),
}

impl fmt::Display for DeviceArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceArg::Auto => f.write_str("auto"),
            DeviceArg::Cpu => f.write_str("cpu"),
            DeviceArg::AllCuda => f.write_str("cuda"),
            DeviceArg::Cuda(all) => {
                let all: Vec<String> = all.iter().map(usize::to_string).collect();
                write!(f, "cuda:{}", all.join(","))
            }
        }
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
