//! The control: what rounding to nearest, by the range of each group, would do to the same model at the same bits.

use anyhow::Result;

use super::super::measure::{Failure, Measurement, perplexity_through};
use super::super::observer::Reporter;
use super::super::open::Runnable;
use super::modules::Modules;
use super::solve::stored;
use super::transform::plainly;
use crate::evaluate::perplexity::Measured;
use crate::format::kind::InputsKind;
use crate::format::layout::Layout;
use crate::model::block::{Block, Chunk};
use crate::recipe::Method;

/// Chunks of windows that go through a block together, since each time its weights are rounded anew.
const AT_ONCE: usize = 16;

/// Whether the method is its own control.
pub fn is_control(method: &Method) -> bool {
    method.transform.is_none() && method.rounding == plainly(&method.rounding) && !method.activations.is_static()
}

/// The control of a method.
pub fn plain(method: &Method) -> Method {
    // One scale for all inputs would have to be found first; each token's own is no worse.
    let activations = match method.activations {
        InputsKind::Tensor | InputsKind::TensorAsymmetric => InputsKind::Token,
        other => other,
    };
    Method { name: "rtn".into(), transform: None, rounding: plainly(&method.rounding), activations, kv_cache: None }
}

/// The perplexity of `original` with its linears rounded by `plain`, block by block as the windows pass.
pub fn control(
    original: &Runnable,
    plain: &Method,
    modules: &Modules,
    layout: &dyn Layout,
    how: &Measurement,
    reporter: &Reporter,
) -> Result<Measured> {
    let model = &original.model;
    let round = |block: &Block, chunks: &mut [Chunk]| {
        block.run::<Failure>(model, chunks, None, &mut |stage, _| {
            let linears = block.linears(stage);
            let schemes = modules.schemes(&linears);
            Ok(Some(stored(model.backend(), plain, layout, &linears, &schemes, None)?))
        })
    };
    let mut forward = |chunks: &mut [Chunk]| -> Result<(), Failure> {
        for block in &model.blocks {
            reporter.check()?;
            model.enter(block)?;
            round(block, chunks)?;
            model.leave(block);
        }
        Ok(())
    };
    perplexity_through(original, how, "rtn", reporter, AT_ONCE, &mut forward)
}
