//! What a quantization is asked to do beside its method.

use std::path::PathBuf;

use crate::calibrate::corpus::Sampling;
use crate::pack::gptq::Version;

/// Which linears are quantized.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// `REGEX=bits:8,group_size:32,sym:false` by module path; the first match decides.
    pub rules: Vec<String>,
    /// Regular expressions of modules that stay in floating point.
    pub skips: Vec<String>,
    pub on_misfit: OnMisfit,
}

/// What happens to a module whose inputs the group size does not divide.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnMisfit {
    /// The run stops before any work.
    #[default]
    Refuse,
    /// The module stays in floating point, as do modules that a consumer would not load.
    Skip,
    /// The module gets the largest smaller group size that divides.
    SmallerGroup,
}

impl OnMisfit {
    const ALL: [Self; 3] = [Self::Refuse, Self::Skip, Self::SmallerGroup];

    /// As records and the command line spell it.
    pub fn name(self) -> &'static str {
        match self {
            OnMisfit::Refuse => "refuse",
            OnMisfit::Skip => "skip",
            OnMisfit::SmallerGroup => "smaller-group",
        }
    }

    /// The choice that is spelled so.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|choice| choice.name() == name)
    }
}

/// Windows of a calibration text.
#[derive(Clone, Debug)]
pub struct TextCalibration {
    /// `.txt`, or `.jsonl` with `text` or chat `messages`; the built-in text where there is none.
    pub text: Option<PathBuf>,
    /// Number of windows; 128, or what the text gives, where there is none.
    pub nsamples: Option<usize>,
    /// Tokens of a window; 512, or the context of the model if that is shorter, where there is none.
    pub seqlen: Option<usize>,
    pub sampling: Sampling,
}

impl Default for TextCalibration {
    fn default() -> Self {
        Self { text: None, nsamples: None, seqlen: None, sampling: Sampling::InOrder }
    }
}

/// Where and how an artifact is written.
#[derive(Clone, Debug)]
pub struct OutputOptions {
    /// The folder; named after model, method and bits, in the current folder, where there is none.
    pub out: Option<PathBuf>,
    /// Replace an artifact of quantkit that is there.
    pub overwrite: bool,
    pub resume: Resume,
    /// Zero-point convention of a GPTQ artifact; the safest where there is none.
    pub version: Option<Version>,
    /// Largest size of one weight file.
    pub max_shard_bytes: u64,
    /// Names of consumers that have to load the artifact, such as `vllm-0.33`.
    pub consumers: Vec<String>,
}

impl Default for OutputOptions {
    fn default() -> Self {
        Self {
            out: None,
            overwrite: false,
            resume: Resume::No,
            version: None,
            max_shard_bytes: 5_000_000_000,
            consumers: Vec::new(),
        }
    }
}

/// What happens to blocks of an earlier run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resume {
    /// Those of an equal run stop this one, so that the user may decide; others are removed.
    No,
    /// They must be those of an equal run.
    Yes,
    /// Those of an equal run are taken up; others are removed.
    IfSame,
}

/// The perplexities before and after.
#[derive(Clone, Debug)]
pub struct Evaluation {
    /// The text; the built-in held-out text where there is none.
    pub text: Option<PathBuf>,
    /// Windows of 512 tokens.
    pub windows: usize,
}

impl Default for Evaluation {
    fn default() -> Self {
        Self { text: None, windows: 16 }
    }
}
