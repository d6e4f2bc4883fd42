//! Scoring of token windows.

use crate::backend::spans_of;
use crate::model::block::Chunk;
use crate::model::{Model, ModelError};

/// Tokens taken through a layer at once.
const CHUNK_TOKENS: usize = 4096;

/// For each window the negative log-likelihood (nats) of every token but its first, given those before it.
/// A value that is no number is an error that names the first block to produce one.
pub fn nll(model: &Model, windows: &[&[u32]]) -> Result<Vec<Vec<f32>>, ModelError> {
    // One chunk a device, so that all devices have work before the first one is waited for.
    nll_through(model, windows, model.backend().devices(), &mut |chunks| model.forward(chunks, None))
}

/// The same where `forward` takes up to `at_once` chunks through the blocks, with other weights perhaps.
pub fn nll_through<E: From<ModelError>>(
    model: &Model,
    windows: &[&[u32]],
    at_once: usize,
    forward: &mut dyn FnMut(&mut [Chunk]) -> Result<(), E>,
) -> Result<Vec<Vec<f32>>, E> {
    let mut out = Vec::with_capacity(windows.len());
    let mut rest = windows;
    while !rest.is_empty() {
        let mut groups: Vec<&[&[u32]]> = Vec::new();
        while groups.len() < at_once && !rest.is_empty() {
            let (now, later) = rest.split_at(fitting(rest));
            groups.push(now);
            rest = later;
        }
        let embed = |group: &&[&[u32]]| model.embed(group, spans_of(group.iter().map(|w| w.len())));
        let mut chunks = groups.iter().map(embed).collect::<Result<Vec<_>, _>>()?;
        forward(&mut chunks)?;
        for (group, chunk) in groups.iter().zip(&chunks) {
            // The last token of a window predicts nothing that is known; its row is scored and dropped.
            let targets: Vec<u32> = group.iter().flat_map(|w| w[1..].iter().copied().chain([0])).collect();
            let scores = model.nll(&chunk.hidden, &targets)?;
            let mut at = 0;
            for window in *group {
                let scores = &scores[at..at + window.len() - 1];
                at += window.len();
                if scores.iter().any(|s| !s.is_finite()) {
                    let path = model.first_non_finite(window)?.unwrap_or_else(|| "the output head".into());
                    return Err(ModelError::NonFinite { path }.into());
                }
                out.push(scores.to_vec());
            }
        }
    }
    Ok(out)
}

/// How many of the next windows go into one chunk; at least one.
pub(super) fn fitting(windows: &[&[u32]]) -> usize {
    let mut tokens = 0;
    let more = windows.iter().take_while(|window| {
        tokens += window.len();
        tokens <= CHUNK_TOKENS
    });
    more.count().max(1)
}
