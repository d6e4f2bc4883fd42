//! quantkit: offline quantization and model conversion, and an engine that measures what was made.
//!
//! A checkpoint is quantized, written, opened again and measured; without a model named, it is the built-in demo checkpoint:
//!
//! ```
//! use quantkit::{Corpus, GroupSize, Measurement, ModelSource, Quantization, Reporter, TextCalibration, cpu};
//!
//! # fn main() -> quantkit::Result<()> {
//! let folder = tempfile::tempdir()?;
//! let model = quantkit::locate(ModelSource::default(), Reporter::silent())?;
//! let calibration = TextCalibration { nsamples: Some(8), seqlen: Some(64), ..TextCalibration::default() };
//! let job = Quantization::gptq(4, GroupSize::new(64).expect("positive")).calibration(calibration).unmeasured();
//! let made = job.out(folder.path().join("w4")).run(&model, cpu(), Reporter::silent())?;
//! let artifact = quantkit::open(&made.target, cpu(), Reporter::silent())?;
//! let text = Corpus::heldout();
//! let measured = quantkit::perplexity(&artifact, &Measurement::new(&text).windows(2), "w4", Reporter::silent())?;
//! println!("{:.2} bits, perplexity {:.2}", made.effective_bits(), measured.result.perplexity);
//! # assert!(measured.result.perplexity < 100.0);
//! # Ok(())
//! # }
//! ```
//!
//! Text is generated faster with a small draft, which proposes tokens that the model verifies:
//!
//! ```
//! use quantkit::speculative::{Ahead, Sampler, SamplerOptions, Speculation, generate};
//! use quantkit::{ModelSource, Reporter, cpu};
//!
//! # fn main() -> quantkit::Result<()> {
//! let (found, small) = (quantkit::locate(ModelSource::default(), Reporter::silent())?, quantkit::demo_draft(Reporter::silent())?);
//! let target = quantkit::open(&found.dir, cpu(), Reporter::silent())?;
//! let draft = quantkit::open(&small.dir, cpu(), Reporter::silent())?;
//! let prompt = target.tokenizer()?.encode("It was a dark night")?;
//! let with = Speculation { draft: &draft.model, ahead: Ahead::Fixed(4), cache: None, draft_scales: None };
//! let mut text = Vec::new();
//! let mut greedy = Sampler::new(SamplerOptions::default())?;
//! let (_, rounds) = generate(&target.model, &with, &prompt, &[], 16, &mut greedy, &mut |token| {
//!     text.push(token);
//!     true
//! })?;
//! println!("{}, acceptance rate {:?}", target.tokenizer()?.decode(&text, true)?, rounds.acceptance_rate());
//! # assert_eq!(text.len(), 16);
//! # Ok(())
//! # }
//! ```
//!
//! # Rooms
//!
//! Data flows one way, and so do imports: a module uses only what is to its left or below.
//!
//! ```text
//!     commands ─ cli           pipeline        recipe
//! checkpoint ─► model ─► calibrate ─► quantize ─► pack ─► format ─► engine ─► evaluate ─► report
//!   hub                                                          integrity
//!                  backend     num     tensor     scheme
//! ```
//!
//! `tests/it/architecture.rs` holds this picture against every `use crate::` line; inside a module files form no circles.

pub mod backend;
pub mod calibrate;
pub mod checkpoint;
pub mod cli;
pub mod commands;
pub mod engine;
pub mod evaluate;
pub mod format;
pub mod hub;
pub mod integrity;
pub mod model;
pub mod num;
pub mod pack;
pub mod pipeline;
pub mod quantize;
pub mod recipe;
pub mod report;
pub mod scheme;
pub mod tensor;

pub use calibrate::corpus::Corpus;
pub use pipeline::gguf::{GgufOptions, ImportanceSource};
pub use pipeline::measure::{Measurement, perplexity};
pub use pipeline::observer::{Observer, Progress, Reporter};
pub use pipeline::open::{Runnable, open};
pub use pipeline::options::{Evaluation, OutputOptions, Selection, TextCalibration};
pub use pipeline::quantize::{CalibrationSource, Form, Outcome, Quantization};
pub use pipeline::source::{Located, ModelSource, demo_draft, locate};
pub use pipeline::{Error, Result, cpu};
pub use scheme::{GroupSize, Scheme};

/// What sources of calibration windows need.
pub mod calibration {
    pub use crate::format::manifest::sha256_bytes;
    pub use crate::model::tokenizer::{BosMode, ids_sha256};
    pub use crate::pipeline::quantize::Calibrated;
    pub use crate::recipe::CalibrationRecord;
}

/// Speculative decoding: a draft proposes tokens, the model verifies them.
pub mod speculative {
    pub use crate::engine::sampler::{Sampler, SamplerOptions};
    pub use crate::engine::speculate::{Ahead, Rounds, Speculation, generate};
}
