//! The command line of the methods that scale channels or write numbers of 8 bits.

use std::str::FromStr;

use clap::{Args, ValueEnum};

use super::options::{CalibrationArgs, GridArg, ModelArgs, OutputArgs, SchemeArgs};

/// Where weights of a few bits are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FormatArg {
    /// As AutoGPTQ and GPTQModel store them
    Gptq,
    /// As AutoAWQ stores them (GEMM)
    Awq,
    /// As llm-compressor stores them (pack-quantized)
    CompressedTensors,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RoundingArg {
    /// Each weight to the nearest code
    Rtn,
    /// With error compensation
    Gptq,
}

/// How strongly SmoothQuant smooths.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Alpha {
    /// The best for each block.
    Auto,
    Fixed(f32),
}

impl FromStr for Alpha {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.parse()) {
            ("auto", _) => Ok(Alpha::Auto),
            (_, Ok(alpha)) if (0.0..=1.0).contains(&alpha) => Ok(Alpha::Fixed(alpha)),
            _ => Err("auto, or a number from 0 to 1 is needed".into()),
        }
    }
}

#[derive(Debug, Args)]
pub struct AwqArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub scheme: SchemeArgs,
    /// A grid symmetric around zero instead of zero points per group, which are the default here
    #[arg(long)]
    pub sym: bool,
    /// Form of the artifact
    #[arg(long, value_enum, default_value_t = FormatArg::Awq)]
    pub format: FormatArg,
    /// How the scaled weights are rounded
    #[arg(long, value_enum, default_value_t = RoundingArg::Rtn)]
    pub rounding: RoundingArg,
    /// How ranges are clipped; `hessian` weighs errors by the inputs
    #[arg(long, value_enum, default_value_t = GridArg::Hessian)]
    pub grid: GridArg,
    /// Strengths that the search tries, from none to full
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u16).range(3..=1000))]
    pub points: u16,
    /// Let only the inputs decide the scales, not the weights
    #[arg(long)]
    pub no_duo_scaling: bool,
    /// Scale values and output projection too where several query heads share their values
    #[arg(long)]
    pub grouped_values: bool,
    /// Calibration tokens that the search measures losses on, in whole windows; statistics are taken from all
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..))]
    pub search_tokens: u32,
    #[command(flatten)]
    pub calibration: CalibrationArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Debug, Args)]
pub struct SmoothquantArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// How much of the inputs' outliers goes into the weights, 0 to 1, or `auto` for the best of each block
    #[arg(long, default_value = "auto")]
    pub alpha: Alpha,
    /// How the smoothed weights are rounded
    #[arg(long, value_enum, default_value_t = RoundingArg::Gptq)]
    pub rounding: RoundingArg,
    /// Round inputs by one scale for all tokens that calibration finds, not each token by its own
    #[arg(long)]
    pub static_activations: bool,
    /// Leave modules whose path matches in floating point, such as `down_proj`
    #[arg(long = "skip", value_name = "REGEX")]
    pub skips: Vec<String>,
    /// Calibration tokens that `--alpha auto` measures losses on, in whole windows; statistics are taken from all
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..))]
    pub search_tokens: u32,
    #[command(flatten)]
    pub calibration: CalibrationArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// What shares a scale among E4M3 weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Float8TileArg {
    /// One scale a weight; q, k, v and gate, up have it in common
    Tensor,
    /// One an output channel
    Channel,
    /// One for 128 by 128
    Block,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Float8FormatArg {
    /// As llm-compressor stores them (float-quantized)
    CompressedTensors,
    /// With `quant_method` fp8, as DeepSeek stores them
    Fp8,
}

#[derive(Debug, Args)]
pub struct Fp8Args {
    #[command(flatten)]
    pub model: ModelArgs,
    /// What shares a scale among the weights [default: channel; block with `--format fp8`]
    #[arg(long, value_enum)]
    pub weights: Option<Float8TileArg>,
    /// Form of the artifact
    #[arg(long, value_enum, default_value_t = Float8FormatArg::CompressedTensors)]
    pub format: Float8FormatArg,
    /// How the weights are rounded: to nearest needs no data; `gptq` chooses codes on the CPU
    #[arg(long, value_enum, default_value_t = RoundingArg::Rtn)]
    pub rounding: RoundingArg,
    /// Round inputs by one scale for all tokens that calibration finds, not each token by its own; needs `--weights
    /// tensor`, which consumers take it with
    #[arg(long)]
    pub static_activations: bool,
    /// Leave modules whose path matches in floating point
    #[arg(long = "skip", value_name = "REGEX")]
    pub skips: Vec<String>,
    #[command(flatten)]
    pub calibration: CalibrationArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}
