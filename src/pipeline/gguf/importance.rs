//! What a model's weights see: the mean square of each input channel over calibration text.

use std::collections::BTreeMap;

use std::path::Path;

use anyhow::{Context, Result};

use super::super::few_tokens::{self, Found};
use super::super::observer::Reporter;
use super::super::open::Runnable;
use super::tensors::Tensor;
use super::text::{MORE_TEXT, calibration};
use super::{GgufOptions, ImportanceSource, coverage};

use crate::backend::spans_of;
use crate::format::gguf::imatrix::{CHUNK_SIZE, Entry, Imatrix};
use crate::format::gguf::names::Architecture;
use crate::model::{Model, ModelError};
use crate::num::ggml::GgmlType;

/// Windows taken through a layer at once.
const WINDOWS: usize = 8;

/// Gathers importance over whole windows of tokens, as llama.cpp's tool does: sums of squares of the inputs of every
/// linear of the blocks.
pub fn gather(model: &Model, windows: &[Vec<u32>], text: &str, reporter: &Reporter) -> Result<Imatrix> {
    let mut steps = reporter.steps("importance", windows.len() as u64);
    let architecture = Architecture::of(model.config.family)?;
    let backend = model.backend();
    let mut sums: BTreeMap<String, (Vec<f64>, u64)> = BTreeMap::new();
    for (done, windows) in windows.chunks(WINDOWS).enumerate() {
        reporter.check()?;
        let sequences: Vec<&[u32]> = windows.iter().map(Vec::as_slice).collect();
        let mut chunks = [model.embed(&sequences, spans_of(sequences.iter().map(|s| s.len())))?];
        for block in &model.blocks {
            model.enter(block)?;
            block.run::<ModelError>(model, &mut chunks, None, &mut |stage, inputs| {
                for x in inputs {
                    let squares = backend.squares(x)?;
                    for linear in block.linears(stage) {
                        let (sum, tokens) = sums.entry(linear.path.clone()).or_insert_with(|| (vec![0.0; x.cols], 0));
                        sum.iter_mut().zip(&squares).for_each(|(sum, square)| *sum += square);
                        *tokens += x.rows as u64;
                    }
                }
                Ok(None)
            })?;
            model.leave(block);
        }
        steps.set((done * WINDOWS + sequences.len()) as u64, 0);
    }
    let mut imatrix = Imatrix {
        datasets: vec![text.into()],
        chunks: Some(windows.len() as u32),
        chunk_size: windows.first().map_or(CHUNK_SIZE, |window| window.len() as u32),
        entries: BTreeMap::new(),
    };
    for (path, (sum, tokens)) in sums {
        let name = architecture.to_gguf(&format!("{path}.weight"))?.context("a linear without a place in GGUF")?;
        if let Some(channel) = sum.iter().position(|s| !s.is_finite()) {
            return Err(ModelError::NonFinite { path: format!("the input of {path}, channel {channel}") }.into());
        }
        let entry = Entry { sums: sum.into_iter().map(|s| s as f32).collect(), counts: vec![tokens as f32] };
        imatrix.entries.insert(name, entry);
    }
    Ok(imatrix)
}

/// Importance that is used.
pub struct Given {
    /// The file it comes from, or `auto`.
    pub file: String,
    pub imatrix: Imatrix,
    /// How many of its entries are used.
    pub used: usize,
}

/// The importance of a file, or what is gathered now; `None` where no tensor uses it.
pub fn importance(
    options: &GgufOptions,
    source: &Runnable,
    planned: &[(&Tensor, GgmlType)],
    reporter: &Reporter,
) -> Result<Option<Given>> {
    let feedback = options.error_feedback;
    let (file, imatrix) = match &options.imatrix {
        None => {
            coverage::require(planned, feedback)?;
            return Ok(None);
        }
        Some(ImportanceSource::File(file)) => (file.clone(), Imatrix::open(Path::new(file))?),
        Some(ImportanceSource::Auto) => {
            if !coverage::users(planned, feedback).any(|(tensor, _)| tensor.name.starts_with("blk.")) {
                let why = if feedback { "--error-feedback gathers its own" } else { "no type here weighs by it" };
                reporter.warn(format!("--imatrix auto: importance is not computed, {why}"));
                coverage::require(planned, feedback)?;
                return Ok(None);
            }
            coverage::require_outside_blocks(planned, feedback)?;
            ("auto".to_string(), gathered(options, source, reporter)?)
        }
    };
    let found = coverage::settle(&file, &imatrix, planned, feedback, options.kind)?;
    found.warnings.iter().for_each(|warning| reporter.warn(warning));
    Ok((found.used > 0).then_some(Given { file, imatrix, used: found.used }))
}

/// Importance on the calibration text.
fn gathered(options: &GgufOptions, source: &Runnable, reporter: &Reporter) -> Result<Imatrix> {
    let (text, windows) = calibration(source, options.calib.as_deref(), options.chunks)?;
    // Error feedback takes no more windows of the same text, and warns itself.
    if !options.error_feedback {
        few_tokens::warn(&source.model, windows.len() * windows[0].len(), Found::Statistics, MORE_TEXT, reporter);
    }
    reporter.note(format!("importance: {} windows of {} tokens of {text}", windows.len(), windows[0].len()));
    gather(&source.model, &windows, &text, reporter)
}
