//! Arguments of the commands that read reports.

use std::path::PathBuf;

use clap::Args;

use super::parse::{parse_amount, parse_whole_share};
use crate::report::thresholds::{Bytes, Percent, Thresholds, ThresholdsError};

/// Limits that a report must keep.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Limits")]
pub struct ThresholdArgs {
    /// File of limits, TOML or JSON: `max_kl = 0.02`, `max_ppl_increase = "0.5%"`; options go before it
    #[arg(long, value_name = "FILE")]
    pub thresholds: Option<PathBuf>,
    /// Perplexity over that of the baseline, or without a baseline over that of the reference
    #[arg(long, value_name = "PERCENT%")]
    pub max_ppl_increase: Option<Percent>,
    /// Perplexity over that of the reference, whatever the baseline
    #[arg(long, value_name = "PERCENT%")]
    pub max_ppl_over_reference: Option<Percent>,
    /// Mean divergence
    #[arg(long, value_name = "NATS", value_parser = parse_amount)]
    pub max_kl: Option<f64>,
    /// 99.9th percentile of the divergence
    #[arg(long = "max-kl-p99.9", value_name = "NATS", value_parser = parse_amount)]
    pub max_kl_p99_9: Option<f64>,
    /// Mean divergence over that of the baseline
    #[arg(long, value_name = "PERCENT%", requires = "baseline")]
    pub max_kl_increase: Option<Percent>,
    /// Share of positions with the same likeliest token, 0 to 1
    #[arg(long, value_name = "SHARE", value_parser = parse_whole_share)]
    pub min_same_top: Option<f64>,
    /// Share of drafted tokens that are accepted, 0 to 1
    #[arg(long, value_name = "SHARE", value_parser = parse_whole_share)]
    pub min_acceptance: Option<f64>,
    /// Tokens of a step of speculative decoding
    #[arg(long, value_name = "TOKENS", value_parser = parse_amount)]
    pub min_acceptance_length: Option<f64>,
    /// Perplexity with a reduced cache over that with a full one
    #[arg(long, value_name = "PERCENT%")]
    pub max_cache_ppl_increase: Option<Percent>,
    /// Share of positions at which a reduced cache leaves the likeliest token as it is, 0 to 1
    #[arg(long, value_name = "SHARE", value_parser = parse_whole_share)]
    pub min_cache_agreement: Option<f64>,
    /// Largest relative error of a module's output
    #[arg(long, value_name = "ERROR", value_parser = parse_amount)]
    pub max_module_error: Option<f64>,
    /// Stored bits per weight, over all weights
    #[arg(long, value_name = "BITS", value_parser = parse_amount)]
    pub max_bits: Option<f64>,
    /// Size of the weights: bytes, or 300MB, 1.5GiB
    #[arg(long, value_name = "SIZE")]
    pub max_bytes: Option<Bytes>,
    /// Engine that must load the artifact, e.g. vllm-0.33; see `quantkit list`
    #[arg(long = "for", value_name = "CONSUMER")]
    pub consumers: Vec<String>,
    /// Take warnings for failures
    #[arg(long)]
    pub fail_on_warnings: bool,
}

impl ThresholdArgs {
    /// The options, and where they are silent the file.
    pub fn settle(&self) -> Result<Thresholds, ThresholdsError> {
        let given = Thresholds {
            max_ppl_increase: self.max_ppl_increase,
            max_ppl_over_reference: self.max_ppl_over_reference,
            max_kl: self.max_kl,
            max_kl_p99_9: self.max_kl_p99_9,
            max_kl_increase: self.max_kl_increase,
            min_same_top: self.min_same_top,
            min_acceptance: self.min_acceptance,
            min_acceptance_length: self.min_acceptance_length,
            max_cache_ppl_increase: self.max_cache_ppl_increase,
            min_cache_agreement: self.min_cache_agreement,
            max_module_error: self.max_module_error,
            max_bits: self.max_bits,
            max_bytes: self.max_bytes,
            consumers: self.consumers.clone(),
            fail_on_warnings: self.fail_on_warnings,
        };
        let file = self.thresholds.as_deref().map(Thresholds::read).transpose()?;
        Ok(given.or(file.unwrap_or_default()))
    }
}

#[derive(Debug, Args)]
pub struct CompareArgs {
    /// The `report.json` to judge
    pub report: PathBuf,
    /// An earlier one to hold it against
    #[arg(long, value_name = "FILE")]
    pub baseline: Option<PathBuf>,
    /// Also write the verdict as JUnit XML
    #[arg(long, value_name = "FILE")]
    pub junit: Option<PathBuf>,
    /// Also write report and verdict as Markdown
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
    /// Also write report and verdict as HTML
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// One JSON object on stdout, nothing else
    #[arg(long)]
    pub json: bool,
    // Last, since its heading holds for what follows.
    #[command(flatten)]
    pub limits: ThresholdArgs,
}

#[derive(Debug, Args)]
pub struct HistoryArgs {
    /// Folder of reports: `*.json` in it, and `report.json` in its folders; taken in the order of their names
    pub dir: PathBuf,
    /// Also draw them, as one HTML file
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// One JSON object on stdout, nothing else
    #[arg(long)]
    pub json: bool,
}
