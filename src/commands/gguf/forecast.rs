//! What a file would take, told without it.

use std::path::Path;

use anyhow::Result;

use super::super::device::backend;
use super::super::open::{locate, open};
use super::super::quantize::{Effort, Forecast};
use super::{FEEDBACK_CHUNKS, calibration, choose, coverage, described, planned, tensors};
use crate::backend::cuda::CudaOptions;
use crate::cli::args::GgufArgs;
use crate::cli::print::Printer;
use crate::format::gguf::imatrix::Imatrix;
use crate::format::gguf::names::Architecture;
use crate::format::gguf::write::{Plan, TensorSpec, quantized_metadata};

/// Settles everything as a run would, so that what cannot be is refused here.
pub fn forecast(args: &GgufArgs, printer: Printer) -> Result<Forecast> {
    let located = locate(&args.model, printer)?;
    let device = backend(&args.model.device, CudaOptions::default(), printer)?;
    let kind = device.kind();
    let source = open(&located.dir, device, printer)?;
    let architecture = Architecture::of(source.model.config.family)?;
    let (own, rope_factors) = described(&located.dir, args, &source, printer)?;
    let all = tensors::of(&source.model, architecture, rope_factors)?;
    let choices = choose(&all, &source, architecture, args, printer)?;
    let chosen = planned(&all, &choices)?;
    match args.imatrix.as_deref() {
        Some("auto") => coverage::require_outside_blocks(&chosen, args.error_feedback)?,
        Some(file) => {
            let imatrix = Imatrix::open(Path::new(file))?;
            let found = coverage::settle(file, &imatrix, &chosen, args.error_feedback, args.kind)?;
            found.warnings.iter().for_each(|warning| printer.warn(warning));
        }
        None => coverage::require(&chosen, args.error_feedback)?,
    }
    let specs = chosen.iter().map(|(tensor, kind)| TensorSpec::new(&*tensor.name, *kind, &*tensor.shape)).collect();
    let output = Plan::new(&located.dir, &quantized_metadata(&own, args.kind, None), specs, None)?.bytes();
    let weights: usize = chosen.iter().map(|(tensor, _)| tensor.len()).sum();
    let mut flops = 0.0;
    if args.error_feedback || args.imatrix.as_deref() == Some("auto") {
        let most = args.chunks.or(args.error_feedback.then_some(FEEDBACK_CHUNKS));
        let (_, windows) = calibration(&source, args.calib.as_deref(), most)?;
        let tokens = windows.iter().map(Vec::len).sum::<usize>() as f64;
        // Passes through the model; error feedback goes through twice, and solves for each row as GPTQ does.
        let passes = if args.error_feedback { 2.0 } else { 1.0 };
        let blocks = source.model.blocks.iter().flat_map(|block| block.all_linears());
        for linear in blocks {
            let (rows, cols) = (linear.rows as f64, linear.cols as f64);
            flops += passes * 2.0 * tokens * rows * cols;
            if args.error_feedback {
                flops += tokens * cols * cols + rows * cols * cols;
            }
        }
    }
    let effort = Effort { weights: weights as u64, flops };
    Ok(Forecast { memory: None, output, disk: output, effort, device: kind })
}
