//! Logits of whole windows, a bounded number of rows at a time.

use std::ops::Range;

use super::score::fitting;
use crate::backend::spans_of;
use crate::model::{Model, ModelError};

/// Logits held at once, so that large vocabularies do not decide the memory needed.
const LOGITS_AT_ONCE: usize = 16 << 20;

/// Rows of logits that are computed at once for a vocabulary of this size.
pub fn rows_at_once(vocab: usize) -> usize {
    (LOGITS_AT_ONCE / vocab.max(1)).max(1)
}

/// Tokens that a model reads at once, and the first of them whose prediction is asked for (at least 1).
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    pub tokens: &'a [u32],
    pub from: usize,
}

/// What a model predicts for the tokens asked for: the states before the output head are kept, in host memory, and
/// become logits when they are asked for.
pub struct Predictions<'a> {
    model: &'a Model,
    windows: Vec<Asked<'a>>,
    /// Row-major, `[predictions, hidden]`.
    states: Vec<f32>,
}

impl<'a> Predictions<'a> {
    /// Takes windows through all blocks.
    pub fn new(model: &'a Model, windows: Vec<Asked<'a>>) -> Result<Self, ModelError> {
        let tokens: Vec<&[u32]> = windows.iter().map(|w| w.tokens).collect();
        let mut groups: Vec<&[&[u32]]> = Vec::new();
        let mut rest = &tokens[..];
        while !rest.is_empty() {
            let (now, later) = rest.split_at(fitting(rest));
            groups.push(now);
            rest = later;
        }
        let embed = |group: &&[&[u32]]| model.embed(group, spans_of(group.iter().map(|w| w.len())));
        let width = model.config.hidden;
        let mut states = Vec::new();
        let mut next = windows.iter();
        for groups in groups.chunks(model.backend().devices()) {
            let mut chunks = groups.iter().map(embed).collect::<Result<Vec<_>, _>>()?;
            model.forward(&mut chunks, None)?;
            for (group, chunk) in groups.iter().zip(&chunks) {
                let hidden = model.backend().download(&chunk.hidden)?;
                let mut at = 0;
                for window in next.by_ref().take(group.len()) {
                    let end = at + window.tokens.len();
                    states.extend_from_slice(&hidden[(at + window.from - 1) * width..(end - 1) * width]);
                    at = end;
                }
            }
        }
        Ok(Self { model, windows, states })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.states.len() / self.model.config.hidden
    }

    pub fn is_empty(&self) -> bool {
        self.states.is_empty()
    }

    /// Logits of some of them, `[rows, vocab]`. One that is no number is an error that names the first block to
    /// produce any.
    pub fn logits(&self, rows: Range<usize>) -> Result<Vec<f32>, ModelError> {
        let Self { model, states, .. } = self;
        let (backend, width) = (model.backend(), model.config.hidden);
        let part = states[rows.start * width..rows.end * width].to_vec();
        let logits = backend.download(&model.logits(&backend.upload(rows.len(), width, part)?)?)?;
        if let Some(bad) = logits.iter().position(|x| !x.is_finite()) {
            let window = self.window_of(rows.start + bad / model.config.vocab);
            let path = model.first_non_finite(window)?.unwrap_or_else(|| "the output head".into());
            return Err(ModelError::NonFinite { path });
        }
        Ok(logits)
    }

    /// The window that a prediction belongs to.
    fn window_of(&self, row: usize) -> &'a [u32] {
        let mut before = 0;
        let owner = self.windows.iter().find(|w| {
            before += w.tokens.len() - w.from;
            row < before
        });
        owner.map_or(&[], |w| w.tokens)
    }
}
