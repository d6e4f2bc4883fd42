//! The block-by-block driver: one forward pass over the calibration windows, in which each stage of each
//! block is quantized from the inputs it really gets and the quantized weights carry the pass on. Beside it
//! the windows can go through the original model, to tell how far the inputs have drifted.

use std::sync::Arc;

use super::cache::{self, Sharing};
use crate::backend::cache::LayerScales;
use crate::backend::tensor::Tensor;
use crate::backend::{Backend, Batch, DeviceError, Drift, Gram, Matrix, spans_of};
use crate::model::block::{Block, Chunk, Stage};
use crate::model::{Model, ModelError};

/// Tokens taken through a layer at once. Fixed, so that sums do not depend on the machine.
pub const CHUNK_TOKENS: usize = 4096;

/// What has to be seen.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Needs {
    /// X'X of the inputs of each stage, with their drift where the original model runs beside.
    pub gram: bool,
    /// The diagonal of X'X alone.
    pub diagonal: bool,
    /// The largest magnitude of each channel of those inputs.
    pub abs_max: bool,
    /// Scales for a cache of keys and values in E4M3.
    pub cache: Option<Sharing>,
}

/// What the driver asks on its way. All matrices are those of `block.linears(stage)`, in that order.
pub trait Quantizing {
    type Error: From<DeviceError> + From<ModelError>;

    fn needs(&self) -> Needs;

    /// The block as it is to be quantized, where it is to be changed before. `chunks` are its inputs; the leading ones
    /// are what [`Course::sample`] says.
    fn prepare(&mut self, _model: &Model, _block: &Block, _chunks: &[Chunk]) -> Result<Option<Block>, Self::Error> {
        Ok(None)
    }

    /// Weights of a stage that an earlier run finished; they are used as they are.
    fn restored(&mut self, block: &Block, stage: Stage) -> Result<Option<Vec<Matrix>>, Self::Error>;

    /// Quantizes a stage from what was seen of its inputs.
    fn quantize(&mut self, block: &Block, stage: Stage, inputs: &Inputs) -> Result<Vec<Matrix>, Self::Error>;

    /// The block is through; nothing of it is needed any more.
    fn finished(&mut self, block: &Block, cache: Option<LayerScales>) -> Result<(), Self::Error>;
}

/// Statistics of the inputs of one stage.
#[derive(Debug, Default)]
pub struct Inputs {
    pub gram: Option<Gram>,
    /// The diagonal of X'X, in host memory; empty if nothing was needed.
    pub diagonal: Vec<f64>,
    /// Against the original model, where it ran beside.
    pub drift: Option<Drift>,
    /// The largest magnitude of each channel; empty if it was not needed.
    pub abs_max: Vec<f32>,
    /// Rows seen.
    pub tokens: u64,
}

impl Inputs {
    /// How many channels never were anything but zero.
    pub fn dead(&self) -> usize {
        self.diagonal.iter().filter(|h| **h == 0.0).count()
    }
}

/// How the driver goes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Course {
    /// Each stage sees its predecessors in the block quantized; otherwise all stages of a block see it
    /// unquantized.
    pub true_sequential: bool,
    /// The windows go through the original model as well.
    pub drift: bool,
    /// Tokens of the leading chunks at most, see [`sample`]: what `prepare` may try things on.
    pub sample: Option<usize>,
}

/// Runs the calibration `windows` through all blocks.
pub fn run<Q: Quantizing>(model: &Model, windows: &[Vec<u32>], course: Course, job: &mut Q) -> Result<(), Q::Error> {
    let mut chunks = embed(model, windows, course.sample)?;
    let batches: Vec<Arc<Batch>> = chunks.iter().map(|chunk| chunk.batch.clone()).collect();
    let count = chunks.len();
    if course.drift {
        // They go through the same pass, stage by stage, and stay with the original weights.
        chunks.extend_from_within(..);
        chunks[count..].iter_mut().for_each(|chunk| chunk.original = true);
    }
    for original in &model.blocks {
        model.enter(original)?;
        let prepared = job.prepare(model, original, &chunks[..count])?;
        let block = prepared.as_ref().unwrap_or(original);
        let mut scales = None;
        let mut one_stage = |stage, inputs: &[Tensor], job: &mut Q| {
            let (inputs, originals) = inputs.split_at(count);
            if let Some(weights) = job.restored(block, stage)? {
                return Ok(weights);
            }
            let weights = one_stage(model, block, stage, inputs, originals, job)?;
            if let (Stage::Qkv, Some(sharing)) = (stage, job.needs().cache) {
                scales = Some(cache::scales(model, block, &batches, inputs, &weights, sharing)?);
            }
            Ok::<_, Q::Error>(weights)
        };
        if course.true_sequential {
            block.run::<Q::Error>(model, &mut chunks, None, &mut |stage, inputs| {
                one_stage(stage, inputs, job).map(Some)
            })?;
        } else {
            let mut swaps = Vec::new();
            let mut unquantized = chunks.clone();
            block.run(model, &mut unquantized, None, &mut |stage, inputs| {
                swaps.push(one_stage(stage, inputs, job)?);
                Ok::<_, Q::Error>(None)
            })?;
            drop(unquantized);
            let mut swaps = swaps.into_iter();
            block.run::<Q::Error>(model, &mut chunks, None, &mut |_, _| Ok(swaps.next()))?;
        }
        model.leave(original);
        job.finished(block, scales)?;
    }
    Ok(())
}

fn one_stage<Q: Quantizing>(
    model: &Model,
    block: &Block,
    stage: Stage,
    inputs: &[Tensor],
    originals: &[Tensor],
    job: &mut Q,
) -> Result<Vec<Matrix>, Q::Error> {
    let (backend, needs) = (model.backend(), job.needs());
    let width = inputs.first().map_or(0, |x| x.cols);
    let mut seen = Inputs { tokens: inputs.iter().map(|x| x.rows as u64).sum(), ..Inputs::default() };
    if needs.gram {
        let mut gram = backend.gram(width)?;
        for x in inputs {
            backend.add_gram(x, &mut gram)?;
        }
        seen.diagonal = backend.diagonal(&gram)?;
        seen.gram = Some(gram);
        for (x, original) in inputs.iter().zip(originals) {
            let sums = match &mut seen.drift {
                Some(sums) => sums,
                none => none.insert(backend.drift(width)?),
            };
            backend.add_drift(x, original, sums)?;
        }
    }
    if needs.abs_max {
        seen.abs_max = abs_max(backend, inputs)?;
    }
    if !needs.gram && (needs.diagonal || needs.abs_max) {
        seen.diagonal = vec![0.0; width];
        for x in inputs {
            seen.diagonal.iter_mut().zip(backend.squares(x)?).for_each(|(sum, x)| *sum += x);
        }
    }
    // No entry of X'X is larger than the diagonal allows.
    if seen.diagonal.iter().any(|h| !h.is_finite()) || seen.abs_max.iter().any(|x| !x.is_finite()) {
        let path = block.linears(stage)[0].path.clone();
        return Err(ModelError::NonFinite { path: format!("the input of {path}") }.into());
    }
    job.quantize(block, stage, &seen)
}

/// The largest magnitude of each channel over all of `xs`.
pub fn abs_max(backend: &dyn Backend, xs: &[Tensor]) -> Result<Vec<f32>, DeviceError> {
    let mut most: Vec<f32> = Vec::new();
    for x in xs {
        let here = backend.abs_max(x)?;
        match most.is_empty() {
            true => most = here,
            // A NaN must stay.
            false => most.iter_mut().zip(here).for_each(|(m, h)| *m = if h.is_nan() || h > *m { h } else { *m }),
        }
    }
    Ok(most)
}

/// What part of a sample is its first chunk, where many things can be tried in little time.
const FIRST_PART: usize = 4;

/// The leading chunks that are the sample of at most `tokens` tokens.
pub fn sample(chunks: &[Chunk], tokens: usize) -> &[Chunk] {
    let mut sum = 0;
    let fitting = chunks.iter().take_while(|chunk| {
        sum += chunk.batch.ids.len();
        sum <= tokens
    });
    &chunks[..fitting.count().max(1).min(chunks.len())]
}

/// Whole windows, packed into chunks in order; a sample is two chunks, where it has several windows.
fn embed(model: &Model, windows: &[Vec<u32>], sample: Option<usize>) -> Result<Vec<Chunk>, ModelError> {
    let length = windows.first().map_or(1, Vec::len).max(1);
    let per_chunk = |tokens: usize| (tokens / length).max(1).min(windows.len());
    let (first, rest) = windows.split_at(sample.map_or(0, per_chunk));
    let (first, second) = first.split_at(first.len().div_ceil(FIRST_PART));
    let whole = rest.chunks(per_chunk(CHUNK_TOKENS).max(1));
    [first, second]
        .into_iter()
        .filter(|part| !part.is_empty())
        .chain(whole)
        .map(|windows| {
            let sequences: Vec<&[u32]> = windows.iter().map(Vec::as_slice).collect();
            model.embed(&sequences, spans_of(windows.iter().map(Vec::len)))
        })
        .collect()
}
