//! One pass over some sequences of a cache.

use std::sync::Arc;

use super::cache::{Cache, EngineError, SeqId};
use crate::backend::tensor::Tensor;
use crate::backend::{Batch, Span};
use crate::model::Model;

/// Tokens of a prompt that are taken through the model at once. What comes out may depend on it in the last bits, so
/// that it is one number for all who read prompts.
pub const PROMPT_TOKENS: usize = 512;

/// Which logits of a part are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    None,
    /// After the last token.
    Last,
    /// After every token.
    All,
}

/// The next tokens of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    pub seq: SeqId,
    pub tokens: &'a [u32],
    pub wanted: Wanted,
}

/// Takes sequences further by the tokens of their parts, which the cache takes up, and gives the logits that are wanted,
/// `[rows, vocab]`, in order. After an error the sequences are as they were.
///
/// In a pass of at most `few_rows` rows all in all, a row's logits have the same bits as if it were alone. A pass of one
/// token a sequence is recorded where the backend can, and replayed from then on; its logits hold until the next such
/// pass.
pub fn pass(model: &Model, cache: &mut Cache, parts: &[Part]) -> Result<Tensor, EngineError> {
    let more: Vec<(SeqId, usize)> = parts.iter().map(|part| (part.seq, part.tokens.len())).collect();
    if let Some((sequence, _)) = more.iter().find(|(_, tokens)| *tokens == 0) {
        return Err(EngineError::NoTokens(*sequence));
    }
    let ids = parts.iter().flat_map(|part| part.tokens).copied().collect::<Vec<u32>>();
    model.check(&ids)?;
    let spans = cache.grow(&more)?;
    let lengths: Vec<usize> = spans.iter().map(|span| span.start).collect();
    let logits = if parts.iter().all(|part| part.tokens.len() == 1 && part.wanted != Wanted::None) && !parts.is_empty()
    {
        step(model, cache, ids, &more, spans)
    } else {
        cache.batch(ids, &more, spans).and_then(|batch| whole(model, cache, batch, parts))
    };
    if logits.is_err() {
        for ((sequence, _), length) in more.iter().zip(lengths) {
            cache.truncate(*sequence, length)?;
        }
    }
    logits
}

/// Takes up `tokens` of a prompt, some at a time, and gives the logits after the last one, `[1, vocab]`.
pub fn prompt(model: &Model, cache: &mut Cache, seq: SeqId, tokens: &[u32]) -> Result<Tensor, EngineError> {
    let last = tokens.len().div_ceil(PROMPT_TOKENS).saturating_sub(1);
    let mut logits = None;
    for (i, tokens) in tokens.chunks(PROMPT_TOKENS).enumerate() {
        let wanted = if i == last { Wanted::Last } else { Wanted::None };
        logits = Some(pass(model, cache, &[Part { seq, tokens, wanted }])?);
    }
    logits.ok_or(EngineError::NoTokens(seq))
}

fn whole(model: &Model, cache: &mut Cache, batch: Batch, parts: &[Part]) -> Result<Tensor, EngineError> {
    let backend = model.backend();
    let mut chunks = [model.embed_batch(Arc::new(batch))?];
    model.forward(&mut chunks, Some(&mut cache.pool))?;
    let [chunk] = chunks;
    let (mut rows, mut next) = (Vec::new(), 0);
    for part in parts {
        let own = next..next + part.tokens.len();
        next = own.end;
        match part.wanted {
            Wanted::None => {}
            Wanted::Last => rows.push(own.end - 1),
            Wanted::All => rows.extend(own),
        }
    }
    if rows.is_empty() {
        return Ok(backend.upload(0, model.config.vocab, Vec::new())?);
    }
    if rows.len() == next {
        return Ok(model.logits(&chunk.hidden)?);
    }
    Ok(model.logits(&backend.rows(&chunk.hidden, &rows)?)?)
}

/// Rows of the recording that serves a step of `rows`. Unused rows pad the step, so that few sizes are needed.
fn filled(rows: usize) -> usize {
    if rows <= 8 { rows.next_power_of_two() } else { rows.next_multiple_of(8) }
}

/// One more token of each sequence. The first time a step of that size is computed, the second time recorded where the
/// backend can, and from then on replayed.
fn step(
    model: &Model,
    cache: &mut Cache,
    mut ids: Vec<u32>,
    sequences: &[(SeqId, usize)],
    mut spans: Vec<Span>,
) -> Result<Tensor, EngineError> {
    let backend = model.backend();
    let rows = ids.len();
    let size = if backend.records() && cache.spare.is_some() { filled(rows) } else { rows };
    let tables = cache.tables(sequences.iter().map(|(sequence, _)| *sequence), size - rows)?;
    // The others are the tokens of a sequence in the spare block.
    ids.resize(size, 0);
    spans.extend((0..size - rows).map(|start| Span { rows: 1, start }));
    let Cache { pool, steps, .. } = cache;
    let logits = steps.run(model, pool, ids, spans, tables)?;
    if size == rows {
        return Ok(logits);
    }
    Ok(backend.rows(&logits, &(0..rows).collect::<Vec<_>>())?)
}
