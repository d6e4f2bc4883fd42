//! The block-by-block driver: one forward pass over the calibration windows, in which each stage of each
//! block is quantized from the inputs it really gets and the quantized weights carry the pass on. Beside it
//! the windows can go through the original model, to tell how far the inputs have drifted.

use crate::backend::tensor::Tensor;
use crate::backend::{DeviceError, Drift, Gram, Matrix, spans_of};
use crate::model::block::{Block, Chunk, Stage};
use crate::model::{Model, ModelError};

/// Tokens taken through a layer at once. Fixed, so that sums do not depend on the machine.
const CHUNK_TOKENS: usize = 4096;

/// What the driver asks on its way. All matrices are those of `block.linears(stage)`, in that order.
pub trait Quantizing {
    type Error: From<DeviceError> + From<ModelError>;

    /// Weights of a stage that an earlier run finished; they are used as they are.
    fn restored(&mut self, block: &Block, stage: Stage) -> Result<Option<Vec<Matrix>>, Self::Error>;

    /// Quantizes a stage from what was seen of its inputs.
    fn quantize(&mut self, block: &Block, stage: Stage, inputs: &Inputs) -> Result<Vec<Matrix>, Self::Error>;

    /// The block is through; nothing of it is needed any more.
    fn finished(&mut self, block: &Block) -> Result<(), Self::Error>;
}

/// Statistics of the inputs of one stage.
pub struct Inputs {
    pub gram: Gram,
    /// The diagonal of the Gram matrix, in host memory.
    pub diagonal: Vec<f64>,
    /// Against the original model, where it ran beside.
    pub drift: Option<Drift>,
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
}

/// Runs the calibration `windows` through all blocks.
pub fn run<Q: Quantizing>(model: &Model, windows: &[Vec<u32>], course: Course, job: &mut Q) -> Result<(), Q::Error> {
    let mut chunks = embed(model, windows)?;
    let count = chunks.len();
    if course.drift {
        // They go through the same pass, stage by stage, and stay with the original weights.
        chunks.extend_from_within(..);
        chunks[count..].iter_mut().for_each(|chunk| chunk.original = true);
    }
    for block in &model.blocks {
        model.enter(block)?;
        let one_stage = |stage, inputs: &[Tensor], job: &mut Q| {
            let (inputs, originals) = inputs.split_at(count);
            one_stage(model, block, stage, inputs, originals, job)
        };
        if course.true_sequential {
            block.run(model, &mut chunks, None, &mut |stage, inputs| one_stage(stage, inputs, job).map(Some))?;
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
        model.leave(block);
        job.finished(block)?;
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
    if let Some(weights) = job.restored(block, stage)? {
        return Ok(weights);
    }
    let backend = model.backend();
    let width = inputs.first().map_or(0, |x| x.cols);
    let mut gram = backend.gram(width)?;
    for x in inputs {
        backend.add_gram(x, &mut gram)?;
    }
    // No entry of X'X is larger than the diagonal allows.
    let diagonal = backend.diagonal(&gram)?;
    if diagonal.iter().any(|h| !h.is_finite()) {
        let path = block.linears(stage)[0].path.clone();
        return Err(ModelError::NonFinite { path: format!("the input of {path}") }.into());
    }
    let mut drift = None;
    for (x, original) in inputs.iter().zip(originals) {
        let sums = match &mut drift {
            Some(sums) => sums,
            none => none.insert(backend.drift(width)?),
        };
        backend.add_drift(x, original, sums)?;
    }
    job.quantize(block, stage, &Inputs { gram, diagonal, drift })
}

/// Whole windows, packed into chunks in order.
fn embed(model: &Model, windows: &[Vec<u32>]) -> Result<Vec<Chunk>, ModelError> {
    let per_chunk = (CHUNK_TOKENS / windows.first().map_or(1, Vec::len).max(1)).max(1);
    windows
        .chunks(per_chunk)
        .map(|windows| {
            let sequences: Vec<&[u32]> = windows.iter().map(Vec::as_slice).collect();
            model.embed(&sequences, spans_of(windows.iter().map(Vec::len)))
        })
        .collect()
}
