//! What a file would take, told without it.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;

use super::super::observer::Reporter;
use super::super::open::open;
use super::super::quantize::{Effort, Forecast};
use super::super::source::Located;
use super::plan::{choose, described, planned};
use super::{FEEDBACK_CHUNKS, GgufOptions, ImportanceSource, calibration, coverage, tensors};
use crate::backend::Backend;
use crate::format::gguf::imatrix::Imatrix;
use crate::format::gguf::names::Architecture;
use crate::format::gguf::write::{Plan, TensorSpec, quantized_metadata};

/// Settles everything as a run would, so that what cannot be is refused here.
///
/// # Errors
///
/// When the run would be refused.
pub fn forecast(
    options: &GgufOptions,
    located: &Located,
    backend: Arc<dyn Backend>,
    reporter: impl Into<Reporter>,
) -> Result<Forecast> {
    let reporter = &reporter.into();
    let kind = backend.kind();
    let source = open(&located.dir, backend, reporter)?;
    let architecture = Architecture::of(source.model.config.family)?;
    let (own, rope_factors) = described(&located.dir, options, &source, reporter)?;
    let all = tensors::of(&source.model, architecture, rope_factors)?;
    let choices = choose(&all, &source, architecture, options, reporter)?;
    let chosen = planned(&all, &choices)?;
    match &options.imatrix {
        Some(ImportanceSource::Auto) => coverage::require_outside_blocks(&chosen, options.error_feedback)?,
        Some(ImportanceSource::File(file)) => {
            let imatrix = Imatrix::open(Path::new(file))?;
            let found = coverage::settle(file, &imatrix, &chosen, options.error_feedback, options.kind)?;
            found.warnings.iter().for_each(|warning| reporter.warn(warning));
        }
        None => coverage::require(&chosen, options.error_feedback)?,
    }
    let specs = chosen.iter().map(|(tensor, kind)| TensorSpec::new(&*tensor.name, *kind, &*tensor.shape)).collect();
    let output = Plan::new(&located.dir, &quantized_metadata(&own, options.kind, None), specs, None)?.bytes();
    let weights: usize = chosen.iter().map(|(tensor, _)| tensor.len()).sum();
    let mut flops = 0.0;
    if options.error_feedback || options.imatrix == Some(ImportanceSource::Auto) {
        let most = options.chunks.or(options.error_feedback.then_some(FEEDBACK_CHUNKS));
        let (_, windows) = calibration(&source, options.calib.as_deref(), most)?;
        let tokens = windows.iter().map(Vec::len).sum::<usize>() as f64;
        // Passes through the model; error feedback goes through twice, and solves for each row as GPTQ does.
        let passes = if options.error_feedback { 2.0 } else { 1.0 };
        let blocks = source.model.blocks.iter().flat_map(|block| block.all_linears());
        for linear in blocks {
            let (rows, cols) = (linear.rows as f64, linear.cols as f64);
            flops += passes * 2.0 * tokens * rows * cols;
            if options.error_feedback {
                flops += tokens * cols * cols + rows * cols * cols;
            }
        }
    }
    let effort = Effort { weights: weights as u64, flops };
    Ok(Forecast { memory: None, output, disk: output, effort, device: kind })
}
