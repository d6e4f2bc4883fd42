//! Scoring of token windows.

use crate::backend::spans_of;
use crate::model::{Model, ModelError};

/// Tokens taken through a layer at once.
const CHUNK_TOKENS: usize = 4096;

/// For each window the negative log-likelihood (nats) of every token but its first, given those before it.
/// A value that is no number is an error that names the first block to produce one.
pub fn nll(model: &Model, windows: &[&[u32]]) -> Result<Vec<Vec<f32>>, ModelError> {
    let mut out = Vec::with_capacity(windows.len());
    let mut rest = windows;
    while let Some(first) = rest.first() {
        let mut tokens = first.len();
        let fitting = 1 + rest[1..]
            .iter()
            .take_while(|w| {
                tokens += w.len();
                tokens <= CHUNK_TOKENS
            })
            .count();
        let (now, later) = rest.split_at(fitting);
        let chunk = model.embed(now, spans_of(now.iter().map(|w| w.len())))?;
        let hidden = model.forward(chunk, None)?.hidden;
        // The last token of a window predicts nothing that is known; its row is scored and dropped.
        let targets: Vec<u32> = now.iter().flat_map(|w| w[1..].iter().copied().chain([0])).collect();
        let scores = model.nll(&hidden, &targets)?;
        let mut at = 0;
        for window in now {
            let scores = &scores[at..at + window.len() - 1];
            at += window.len();
            if scores.iter().any(|s| !s.is_finite()) {
                let path = model.first_non_finite(window)?.unwrap_or_else(|| "the output head".into());
                return Err(ModelError::NonFinite { path });
            }
            out.push(scores.to_vec());
        }
        rest = later;
    }
    Ok(out)
}
