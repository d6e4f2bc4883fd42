//! What was written is read back by two readers and measured before it has its name.

use std::path::{Path, PathBuf};

use anyhow::{Error, Result};

use super::super::failure::{Category, CheckFailed, category};
use super::super::measure::{EvaluationText, Failure, perplexity_through};
use super::super::observer::Reporter;
use super::super::open::{Runnable, made_of};
use super::super::quantize::Perplexities;
use crate::backend::Matrix;
use crate::backend::weight::{Ggml, Weight};
use crate::evaluate::perplexity::Measured;
use crate::format;
use crate::format::gguf::second_reader;
use crate::model::block::{Chunk, Linear};
use crate::num::ggml::GgmlType;
use crate::pack::ggml::{encode, requires_importance};

/// Chunks of windows that go through a block together, since each time its weights are rounded anew.
const AT_ONCE: usize = 16;

/// Opens the model in `parts`, which is to be called `out`, on the backend of its source.
///
/// # Errors
///
/// When it cannot be read, or gguf-rs reads it differently.
pub fn read_back(out: &Path, parts: &[PathBuf], source: &Runnable) -> Result<Runnable> {
    let failed = |why: String| Error::from(CheckFailed(why));
    if let Some(difference) = parts.iter().flat_map(|part| second_reader::differences(part)).next() {
        return Err(failed(format!("the file is not what was to be written: {difference}")));
    }
    let unreadable = |error: Error| failed(format!("the file cannot be read back: {error:#}"));
    let opened = format::open_gguf_parts(out, parts).map_err(|error| unreadable(error.into()))?;
    // Its warnings are those of the source.
    made_of(opened, out, source.model.backend_handle(), Reporter::silent()).map_err(unreadable)
}

/// The perplexities of the source, the artifact, and with `beside` of the same types rounded plainly.
///
/// # Errors
///
/// When that of the artifact is not finite, the device fails, or the observer stops the work.
pub fn measured(
    text: &EvaluationText,
    before: Measured,
    source: &Runnable,
    artifact: &Runnable,
    beside: bool,
    reporter: &Reporter,
) -> Result<Perplexities> {
    let after = text.after(artifact, reporter)?;
    let plain = if beside { plain(text, source, artifact, reporter)? } else { None };
    Ok(Perplexities { before, after, plain })
}

/// The perplexity of the artifact with the linears of its blocks rounded without importance and feedback; `None` where a
/// type cannot do without.
fn plain(
    text: &EvaluationText,
    source: &Runnable,
    artifact: &Runnable,
    reporter: &Reporter,
) -> Result<Option<Measured>> {
    let kinds = artifact.model.blocks.iter().flat_map(|block| block.all_linears()).filter_map(kind);
    if kinds.into_iter().any(requires_importance) {
        return Ok(None);
    }
    let mut forward = |chunks: &mut [Chunk]| -> Result<(), Failure> {
        for (block, original) in artifact.model.blocks.iter().zip(&source.model.blocks) {
            reporter.check()?;
            artifact.model.enter(block)?;
            block.run::<Failure>(&artifact.model, chunks, None, &mut |stage, _| {
                let linears = block.linears(stage).into_iter().zip(original.linears(stage));
                linears.map(|(made, from)| rounded(artifact, made, from)).collect::<Result<Vec<_>, _>>().map(Some)
            })?;
            artifact.model.leave(block);
        }
        Ok(())
    };
    match perplexity_through(artifact, &text.measurement(artifact), "rtn", reporter, AT_ONCE, &mut forward) {
        Err(error) if category(&error) == Category::Interrupted => Err(error),
        // The artifact is none the worse for it.
        Err(error) => {
            reporter.warn(format!("plain rounding could not be measured: {error:#}"));
            Ok(None)
        }
        Ok(measured) => Ok(Some(measured)),
    }
}

/// The type of a linear that is stored in blocks.
fn kind(linear: &Linear) -> Option<GgmlType> {
    match linear.weight.weight() {
        Weight::Ggml(blocks) => Some(blocks.kind),
        _ => None,
    }
}

/// `from` in the type of `made`.
fn rounded(artifact: &Runnable, made: &Linear, from: &Linear) -> Result<Matrix, Failure> {
    let Some(kind) = kind(made) else { return Ok(made.weight.clone()) };
    if self::kind(from) == Some(kind) {
        return Ok(made.weight.clone());
    }
    let (rows, cols) = (made.rows, made.cols);
    let bytes = encode(kind, &from.weight.weight().to_f32(), cols, None)?;
    Ok(artifact.model.backend().load(Weight::Ggml(Ggml { rows, cols, kind, bytes: bytes.into() }))?)
}
