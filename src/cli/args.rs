//! The command line, one definition for parsing, help and documentation.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use super::methods::{AwqArgs, FormatArg, Fp8Args, KvCacheArg, SmoothquantArgs};
use super::parse::{
    parse_amount, parse_bits, parse_bos, parse_convention, parse_count, parse_device, parse_file_type, parse_ggml_type,
    parse_group_size, parse_share, parse_whole_share,
};
use crate::evaluate::windows::Convention;
use crate::format::gguf::file_type::FileType;
use crate::model::tokenizer::BosMode;
use crate::num::ggml::GgmlType;
use crate::quantize::grid::Grid;
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
    #[arg(long, global = true, env = "QUANTKIT_THREADS", value_parser = clap::value_parser!(u16).range(1..=1024))]
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
    /// Show what is known: model families, consumers, formats
    List(ListArgs),
}

#[derive(Debug, Subcommand)]
pub enum EvalCommand {
    /// Perplexity on a text
    Ppl(PplArgs),
    /// Divergence of an artifact's predictions from those of the model it was made from
    Kl(KlArgs),
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
    #[arg(long, default_value = "auto", env = "QUANTKIT_DEVICE", value_parser = parse_device)]
    pub device: DeviceArg,
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

#[derive(Clone, Debug, Args)]
pub struct SchemeArgs {
    /// Bits per weight: 2, 3, 4 or 8
    #[arg(long, default_value_t = 4, value_parser = parse_bits)]
    pub bits: u8,
    /// Input channels that share a scale; -1 for one scale per output channel
    #[arg(long, default_value_t = 128, allow_negative_numbers = true, value_parser = parse_group_size)]
    pub group_size: i32,
    /// Zero points per group instead of a grid symmetric around zero
    #[arg(long)]
    pub asym: bool,
    /// Override for modules whose path matches: `REGEX=bits:8,group_size:32,sym:false`; the first match wins
    #[arg(long = "rule", value_name = "REGEX=...")]
    pub rules: Vec<String>,
    /// Leave modules whose path matches in floating point
    #[arg(long = "skip", value_name = "REGEX")]
    pub skips: Vec<String>,
    /// What to do where the group size does not divide a module's input
    #[arg(long, value_enum, default_value_t = OnMisfit::Refuse)]
    pub on_misfit: OnMisfit,
    /// Whether the command has that option.
    #[arg(skip = true)]
    pub on_misfit_given: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnMisfit {
    /// Stop before any work, and say which sizes would do
    Refuse,
    /// Leave the module in floating point
    Skip,
    /// Take the largest smaller group size that divides
    SmallerGroup,
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
    /// BOS in calibration and evaluation
    #[arg(long, default_value = "auto", value_parser = parse_bos)]
    pub bos: BosMode,
    /// One JSON object on stdout, nothing else
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct GptqArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub scheme: SchemeArgs,
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

#[derive(Debug, Args)]
pub struct GgufArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Type of the file, such as Q4_K_M, Q6_K, IQ4_XS, Q8_0, F16
    #[arg(long = "type", default_value = "Q4_K_M", value_name = "TYPE", value_parser = parse_file_type)]
    pub kind: FileType,
    /// File to write [default: named after model and type, in the current folder]
    #[arg(long, short, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Replace a GGUF file that stands there already
    #[arg(long)]
    pub overwrite: bool,
    /// Importance of the input channels: a file of `imatrix` or llama.cpp, or `auto` to gather it now
    #[arg(long, value_name = "FILE|auto")]
    pub imatrix: Option<String>,
    /// Choose codes so that they mend each other's errors (GPTQ's idea, on the blocks of the type): same size, loads in
    /// any llama.cpp. Measured closer to the source (KL divergence) on text like the calibration text, less so on
    /// other text; perplexity need not fall. Calibrates block by block
    #[arg(long)]
    pub error_feedback: bool,
    /// Text for `--imatrix auto` and `--error-feedback` [default: built-in]
    #[arg(long, value_name = "FILE")]
    pub calib: Option<PathBuf>,
    /// Windows of that text at most [default: all; 128 for `--error-feedback`]
    #[arg(long, value_parser = parse_count)]
    pub chunks: Option<usize>,
    /// Type of tensors whose names the pattern is found in: `REGEX=TYPE`; the first match wins
    #[arg(long = "tensor-type", value_name = "REGEX=TYPE")]
    pub tensor_types: Vec<String>,
    /// Type of the output head
    #[arg(long, value_name = "TYPE", value_parser = parse_ggml_type)]
    pub output_tensor_type: Option<GgmlType>,
    /// Type of the embedding
    #[arg(long, value_name = "TYPE", value_parser = parse_ggml_type)]
    pub token_embedding_type: Option<GgmlType>,
    /// Leave the output head as it is
    #[arg(long)]
    pub leave_output_tensor: bool,
    /// One type for all tensors, no mixture
    #[arg(long)]
    pub pure: bool,
    /// Stop where a tensor's rows are no multiples of its type's blocks, instead of taking another type
    #[arg(long)]
    pub no_fallback: bool,
    /// Several files of at most this size: a number of bytes, or one with M or G
    #[arg(long, value_name = "SIZE")]
    pub split_max_size: Option<String>,
    /// Name of the pre-tokenizer, where tokenizer.json does not tell
    #[arg(long, value_name = "NAME")]
    pub pre: Option<String>,
    /// One JSON object on stdout, nothing else
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct ImatrixArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// File to write [default: named after the model, in the current folder]
    #[arg(long, short, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Form of the file
    #[arg(long, value_enum, default_value_t = ImatrixForm::Gguf)]
    pub format: ImatrixForm,
    /// Calibration text: .txt, or .jsonl with `text` or chat `messages` [default: built-in]
    #[arg(long, value_name = "FILE")]
    pub calib: Option<PathBuf>,
    /// Windows of 512 tokens at most [default: all of the text]
    #[arg(long, value_parser = parse_count)]
    pub chunks: Option<usize>,
    /// One JSON object on stdout, nothing else
    #[arg(long)]
    pub json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ImatrixForm {
    /// What llama.cpp writes now
    Gguf,
    /// What it wrote before
    Dat,
}

#[derive(Debug, Args)]
pub struct ConvertArgs {
    /// GGUF file (of a split one the first part)
    pub file: PathBuf,
    /// What to make of it
    #[arg(long, value_enum, default_value_t = ConvertTo::Safetensors)]
    pub to: ConvertTo,
    /// Folder to write [default: named after file and number type, in the current folder]
    #[arg(long, short, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Number type of the weights
    #[arg(long, value_enum, default_value_t = FloatArg::F16)]
    pub dtype: FloatArg,
    /// Largest size of one weight file, in MB
    #[arg(long, default_value_t = 5000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub max_shard_size: u64,
    /// One JSON object on stdout, nothing else
    #[arg(long)]
    pub json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ConvertTo {
    /// A Hugging Face folder
    Safetensors,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FloatArg {
    F32,
    F16,
    Bf16,
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

impl From<GridArg> for Grid {
    fn from(arg: GridArg) -> Self {
        match arg {
            GridArg::MaxAbs => Grid::MaxAbs,
            GridArg::Mse => Grid::Mse,
            GridArg::Hessian => Grid::Hessian,
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
        conflicts_with_all = ["reference", "reference_revision", "text", "convention", "window"]
    )]
    pub reference_logits: Option<PathBuf>,
    /// Where to compute: auto (all CUDA devices, or the CPU), cpu, cuda (all), cuda:0, cuda:0,1
    #[arg(long, default_value = "auto", env = "QUANTKIT_DEVICE", value_parser = parse_device)]
    pub device: DeviceArg,
    /// Text to compare on [default: built-in held-out text]
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Whose convention: gptq, llamacpp, lmeval
    #[arg(long, default_value = "gptq", value_parser = parse_convention)]
    pub convention: Convention,
    /// Tokens per window [default: 2048, llamacpp 512; or the models' context if that is shorter]
    #[arg(long)]
    pub window: Option<usize>,
    /// Compare only the first windows
    #[arg(long, value_parser = parse_count)]
    pub max_windows: Option<usize>,
    /// BOS: auto, none, window (each window starts with one), once (at the start of the text)
    #[arg(long, default_value = "auto", value_parser = parse_bos)]
    pub bos: BosMode,
    /// Exit with 1 if the mean divergence is above this many nats
    #[arg(long, value_name = "NATS", value_parser = parse_amount)]
    pub max_kl: Option<f64>,
    /// Exit with 1 if both agree on the likeliest token at less than this share of positions, 0 to 1
    #[arg(long, value_name = "SHARE", value_parser = parse_whole_share)]
    pub min_same_top: Option<f64>,
    /// One JSON object on stdout, nothing else
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct GenerateArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// What to continue, or with --chat what to answer; `-` reads stdin
    #[arg(long, short)]
    pub prompt: String,
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

#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Model folder, artifact or GGUF file (of a split one the first part)
    pub path: PathBuf,
    /// One JSON object on stdout, nothing else
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct ListArgs {
    /// One JSON object on stdout, nothing else
    #[arg(long)]
    pub json: bool,
}
