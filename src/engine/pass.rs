//! One pass over some sequences of a cache.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::cache::{Cache, EngineError, SeqId};
use crate::backend::cache::Pool;
use crate::backend::tensor::Tensor;
use crate::backend::{Backend, Batch, Recording, Span, Workspace};
use crate::model::{Model, ModelError};

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

/// Steps over one more token of each of some sequences, by their rows.
#[derive(Default)]
pub(super) struct Steps {
    by_rows: BTreeMap<usize, Step>,
    /// Memory of all recorded steps, which run one at a time.
    workspace: Option<Workspace>,
    /// Why a step that could have been recorded is not.
    pub(super) unrecorded: Option<String>,
}

/// Steps of one number of rows.
struct Step {
    batch: Arc<Batch>,
    replay: Replay,
}

/// What a step is computed by the next time.
enum Replay {
    /// Its kernels: it is not recorded.
    Never,
    /// Not recorded yet; recording takes this many bytes.
    Next(usize),
    Recorded {
        bytes: usize,
        recording: Recording,
        logits: Tensor,
    },
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
    let logits = match steps.by_rows.get_mut(&size) {
        Some(step) => {
            step.batch = Arc::new(backend.rebatch(&step.batch, ids, spans, tables)?);
            steps.again(model, size, pool)?
        }
        None => {
            let batch = Arc::new(backend.paged_batch(ids, spans, tables)?);
            let (logits, bytes) = computed(model, batch.clone(), pool)?;
            let replay = bytes.map_or(Replay::Never, Replay::Next);
            steps.by_rows.insert(size, Step { batch, replay });
            logits
        }
    };
    if size == rows {
        return Ok(logits);
    }
    Ok(backend.rows(&logits, &(0..rows).collect::<Vec<_>>())?)
}

impl Steps {
    /// Sizes of steps that are replayed.
    pub(super) fn recorded(&self) -> usize {
        self.by_rows.values().filter(|step| matches!(step.replay, Replay::Recorded { .. })).count()
    }

    /// A step of a size that has been computed before, over the batch that it has now. Any error, usually too little memory,
    /// only makes the step slower: from then on it is computed without a recording.
    fn again(&mut self, model: &Model, size: usize, pool: &mut Pool) -> Result<Tensor, EngineError> {
        match self.replayed(model, size, pool) {
            Ok(Some(logits)) => return Ok(logits),
            Ok(None) => {}
            Err(why) => {
                self.unrecorded.get_or_insert(why.to_string());
                if let Some(step) = self.by_rows.get_mut(&size) {
                    step.replay = Replay::Never;
                }
                if self.recorded() == 0 {
                    self.workspace = None;
                }
            }
        }
        Ok(computed(model, self.by_rows[&size].batch.clone(), pool)?.0)
    }

    /// The logits by replaying, which may have to be recorded before; `None` where that is not to be.
    fn replayed(&mut self, model: &Model, size: usize, pool: &mut Pool) -> Result<Option<Tensor>, ModelError> {
        let step = &self.by_rows[&size];
        if let Replay::Next(bytes) = step.replay {
            let batch = step.batch.clone();
            let workspace = self.workspace(model.backend(), bytes)?;
            let guard = model.backend().begin_recording(workspace)?;
            let logits = logits(model, batch, pool)?;
            let recording = guard.finish()?;
            if let Some(step) = self.by_rows.get_mut(&size) {
                step.replay = Replay::Recorded { bytes, recording, logits };
            }
        }
        match self.by_rows.get_mut(&size).map(|step| &mut step.replay) {
            Some(Replay::Recorded { recording, logits, .. }) => {
                recording.run()?;
                Ok(Some(logits.clone()))
            }
            _ => Ok(None),
        }
    }

    /// Memory of at least so many bytes. Growing it discards all recordings; they are made again.
    fn workspace(&mut self, backend: &dyn Backend, bytes: usize) -> Result<&Workspace, ModelError> {
        let workspace = match self.workspace.take().filter(|workspace| workspace.bytes() >= bytes) {
            Some(workspace) => workspace,
            None => {
                for step in self.by_rows.values_mut() {
                    if let Replay::Recorded { bytes, .. } = step.replay {
                        step.replay = Replay::Next(bytes);
                    }
                }
                backend.workspace(bytes)?
            }
        };
        Ok(self.workspace.insert(workspace))
    }
}

/// The logits of a step that is computed at once, with the memory that it takes to record it, where that can be done.
fn computed(model: &Model, batch: Arc<Batch>, pool: &mut Pool) -> Result<(Tensor, Option<usize>), EngineError> {
    let step = model.backend().begin_step()?;
    let logits = logits(model, batch, pool)?;
    Ok((logits, step.bytes()))
}

/// The logits after every row of a batch.
fn logits(model: &Model, batch: Arc<Batch>, pool: &mut Pool) -> Result<Tensor, ModelError> {
    let mut chunks = [model.embed_batch(batch)?];
    model.forward(&mut chunks, Some(pool))?;
    model.logits(&chunks[0].hidden)
}
