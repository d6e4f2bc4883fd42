//! The command line of speculative decoding.

use std::path::PathBuf;

use clap::Args;

use super::options::ModelArgs;
use super::parse::{parse_bos, parse_count, parse_whole_share};
use super::serving::CacheTypeArgs;
use crate::engine::speculate::Ahead;
use crate::evaluate::acceptance::MOST_AHEAD;
use crate::model::tokenizer::BosMode;

/// A small model that proposes tokens.
#[derive(Clone, Debug, Args)]
pub struct DraftArgs {
    /// Speculative decoding: this model, smaller and with the same tokenizer, proposes tokens, and the model looks at
    /// several in one pass. The text stays the model's own. A folder, a GGUF file or a hub id
    #[arg(long, value_name = "MODEL", conflicts_with_all = ["prompts", "num_samples"])]
    pub draft: Option<String>,
    /// Branch, tag or commit of a hub draft [default: main]
    #[arg(long, value_name = "REVISION", requires = "draft")]
    pub draft_revision: Option<String>,
    /// Tokens proposed at a time; `auto` goes by what stands and what passes cost [default: auto]
    #[arg(long, value_name = "N|auto", requires = "draft", value_parser = parse_ahead)]
    pub num_speculative_tokens: Option<Ahead>,
}

#[derive(Debug, Args)]
pub struct SpecArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// The model that proposes: a folder, a GGUF file or a hub id. An artifact as the draft of the model it was made
    /// from tells how true it is [default, where no model is given: the built-in demo draft]
    #[arg(long, value_name = "MODEL")]
    pub draft: Option<String>,
    /// Branch, tag or commit of a hub draft [default: main]
    #[arg(long, value_name = "REVISION", requires = "draft")]
    pub draft_revision: Option<String>,
    #[command(flatten)]
    pub pair: PairArgs,
    #[command(flatten)]
    pub cache: CacheTypeArgs,
    /// Exit with 1 if a smaller share of the proposed tokens is accepted, 0 to 1. Next to none is always a failure
    #[arg(long, value_name = "SHARE", value_parser = parse_whole_share)]
    pub min_acceptance: Option<f64>,
    /// One JSON object on stdout, nothing else
    #[arg(long)]
    pub json: bool,
}

/// How a target and its draft are measured.
#[derive(Clone, Debug, Args)]
pub struct PairArgs {
    /// Tokens proposed at a time in the main figures, 1 to 8; a table has them all
    #[arg(long, value_name = "N", default_value_t = PairArgs::default().num_speculative_tokens, value_parser = parse_ahead_count)]
    pub num_speculative_tokens: usize,
    /// Text to read with both, and to cut prompts from [default: built-in held-out text]
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Prompts of your own: .jsonl with `text` or chat `messages`, or one a line [default: cut from the text]
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Prompts at most
    #[arg(long, default_value_t = PairArgs::default().max_prompts, value_parser = parse_count)]
    pub max_prompts: usize,
    /// Tokens of a prompt that is cut from the text
    #[arg(long, default_value_t = PairArgs::default().prompt_tokens, value_parser = parse_count)]
    pub prompt_tokens: usize,
    /// Tokens to write after each prompt at most
    #[arg(long, default_value_t = PairArgs::default().max_tokens, value_parser = parse_count)]
    pub max_tokens: usize,
    /// Windows of the text that both read, of 512 tokens or what the context allows
    #[arg(long, default_value_t = PairArgs::default().max_windows)]
    pub max_windows: usize,
    /// 0 takes the likeliest token every time
    #[arg(long, default_value_t = PairArgs::default().temperature, allow_negative_numbers = true)]
    pub temperature: f64,
    /// Sample from the likeliest tokens that together reach this probability
    #[arg(long, default_value_t = PairArgs::default().top_p)]
    pub top_p: f64,
    /// Sample from this many likeliest tokens; 0 for all
    #[arg(long, default_value_t = PairArgs::default().top_k)]
    pub top_k: usize,
    /// Seed of sampling
    #[arg(long, default_value_t = PairArgs::default().seed)]
    pub seed: u64,
    /// Do not run both models together to see how fast they are
    #[arg(long)]
    pub no_speed: bool,
    /// BOS: auto, none, window, once (both of which start each prompt with one)
    #[arg(long, default_value = "auto", value_parser = parse_bos)]
    pub bos: BosMode,
}

impl Default for PairArgs {
    fn default() -> Self {
        Self {
            num_speculative_tokens: 4,
            text: None,
            prompts: None,
            max_prompts: 32,
            prompt_tokens: 32,
            max_tokens: 96,
            max_windows: 16,
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            seed: 0,
            no_speed: false,
            bos: BosMode::Auto,
        }
    }
}

fn parse_ahead(text: &str) -> Result<Ahead, String> {
    match text {
        "auto" => Ok(Ahead::Auto),
        _ => parse_count(text).map(Ahead::Fixed).map_err(|_| "a positive whole number or `auto` is needed".into()),
    }
}

fn parse_ahead_count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count) if (1..=MOST_AHEAD).contains(&count) => Ok(count),
        _ => Err(format!("a number from 1 to {MOST_AHEAD} is needed")),
    }
}
