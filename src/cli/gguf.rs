//! The command line of GGUF files.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::options::{EvaluationArgs, ModelArgs};
use super::parse::{parse_count, parse_file_type, parse_ggml_type};
use crate::format::gguf::file_type::FileType;
use crate::num::ggml::GgmlType;

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
    #[arg(long, conflicts_with = "output_tensor_type")]
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
    #[command(flatten)]
    pub evaluation: EvaluationArgs,
    /// Name of the pre-tokenizer, where neither tokenizer.json nor the GGUF file says which it is
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
