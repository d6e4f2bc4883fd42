//! Text from a model: prefill, then one token at a time through the cache.

use std::sync::Arc;

use thiserror::Error;

use super::sampler::{Sampler, SamplerError};
use crate::backend::tensor::Tensor;
use crate::backend::{Batch, CacheShape, KvCache, Recording, Span};
use crate::model::{Model, ModelError};

/// Prompt tokens taken through the model at once.
const PREFILL_TOKENS: usize = 2048;

/// Why generation stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// An end-of-sequence token.
    End,
    /// The number of tokens asked for.
    Limit,
    /// The context is full.
    Context,
    /// The caller asked.
    Caller,
}

#[derive(Debug, Error)]
pub enum GenerateError {
    // Not transparent: that would hide the cause that decides the exit code.
    #[error("{0}")]
    Model(#[from] ModelError),
    #[error(transparent)]
    Sampler(#[from] SamplerError),
    #[error("the prompt has {tokens} tokens; the model takes {limit}")]
    PromptTooLong { tokens: usize, limit: usize },
    #[error("the prompt is empty and the tokenizer has no BOS token to start from; give a prompt")]
    EmptyPrompt,
}

/// One sequence on its way: its caches, and the decoding step as it was recorded.
pub struct Session<'a> {
    model: &'a Model,
    caches: Vec<Vec<KvCache>>,
    len: usize,
    capacity: usize,
    step: Option<Step>,
}

/// What a pass over one more token works on.
struct Step {
    batch: Arc<Batch>,
    recorded: Option<(Recording, Tensor)>,
}

impl<'a> Session<'a> {
    /// An empty sequence that can grow to `capacity` tokens.
    pub fn new(model: &'a Model, capacity: usize) -> Result<Self, ModelError> {
        let config = &model.config;
        let shape = CacheShape {
            layers: model.blocks.len(),
            sequences: 1,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            capacity,
        };
        // Tables that grew later would not be those that a recorded step reads.
        model.prepare(capacity)?;
        Ok(Self { model, caches: model.backend().caches(shape)?, len: 0, capacity, step: None })
    }

    /// Tokens so far.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Takes up `tokens` and returns the logits after the last one, `[1, vocab]`.
    pub fn feed(&mut self, tokens: &[u32]) -> Result<Tensor, ModelError> {
        debug_assert!(!tokens.is_empty() && self.len + tokens.len() <= self.capacity);
        if let ([token], true) = (tokens, self.len > 0) {
            return self.decode(*token);
        }
        let backend = self.model.backend();
        let mut last = None;
        for part in tokens.chunks(PREFILL_TOKENS) {
            let chunk = self.model.embed(&[part], vec![Span { rows: part.len(), start: self.len }])?;
            backend.reserve(&mut self.caches, &chunk.batch)?;
            let mut chunks = [chunk];
            self.model.forward(&mut chunks, Some(&mut self.caches))?;
            self.len += part.len();
            last = Some(backend.row(&chunks[0].hidden, part.len() - 1)?);
        }
        match last {
            Some(row) => self.model.logits(&row),
            None => Ok(backend.upload(0, 0, Vec::new())?),
        }
    }

    /// One more token. The first time it is computed, the second time recorded where the backend can, and from
    /// then on replayed.
    fn decode(&mut self, token: u32) -> Result<Tensor, ModelError> {
        let backend = self.model.backend();
        let (ids, spans) = (vec![token], vec![Span { rows: 1, start: self.len }]);
        self.model.check(&ids)?;
        let first = self.step.is_none();
        let step = match &mut self.step {
            Some(step) => {
                step.batch = Arc::new(backend.rebatch(&step.batch, ids, spans)?);
                step
            }
            none => none.insert(Step { batch: Arc::new(backend.batch(ids, spans)?), recorded: None }),
        };
        backend.reserve(&mut self.caches, &step.batch)?;
        self.len += 1;
        if !first && step.recorded.is_none() && backend.begin_recording()? {
            let logits = pass(self.model, step.batch.clone(), &mut self.caches);
            let recording = backend.end_recording();
            // Why a pass failed says more than that its recording was broken off.
            let logits = logits?;
            step.recorded = Some((recording?, logits));
        }
        match &mut step.recorded {
            Some((recording, logits)) => {
                recording.run()?;
                Ok(logits.clone())
            }
            None => pass(self.model, step.batch.clone(), &mut self.caches),
        }
    }
}

/// The logits of a batch of one row.
fn pass(model: &Model, batch: Arc<Batch>, caches: &mut [Vec<KvCache>]) -> Result<Tensor, ModelError> {
    let mut chunks = [model.embed_batch(batch)?];
    model.forward(&mut chunks, Some(caches))?;
    model.logits(&chunks[0].hidden)
}

/// The error of logits that no token can be chosen from, after `tokens`: it names what broke the model.
fn broken(model: &Model, tokens: &[u32], error: SamplerError) -> GenerateError {
    if !matches!(error, SamplerError::BrokenLogit { .. } | SamplerError::NoCandidate(_)) {
        return error.into();
    }
    match model.first_non_finite(tokens) {
        Ok(path) => ModelError::NonFinite { path: path.unwrap_or_else(|| "the output head".into()) }.into(),
        Err(error) => error.into(),
    }
}

/// The next token. The likeliest one is found where the logits are; anything else wants them all.
fn choose(model: &Model, sampler: &mut Sampler, logits: &Tensor) -> Result<Result<u32, SamplerError>, ModelError> {
    if sampler.is_greedy()
        && let [Some(token)] = model.backend().argmax(logits)?[..]
    {
        return Ok(Ok(token));
    }
    Ok(sampler.sample(&model.backend().download(logits)?))
}

/// Generates up to `limit` tokens after `prompt`; each goes to `each`, which may stop it with `false`.
pub fn generate(
    model: &Model,
    prompt: &[u32],
    end: &[u32],
    limit: usize,
    sampler: &mut Sampler,
    each: &mut dyn FnMut(u32) -> bool,
) -> Result<Stop, GenerateError> {
    let context = model.config.max_positions;
    if prompt.is_empty() {
        return Err(GenerateError::EmptyPrompt);
    }
    if prompt.len() >= context {
        return Err(GenerateError::PromptTooLong { tokens: prompt.len(), limit: context - 1 });
    }
    let mut session = Session::new(model, context.min(prompt.len() + limit))?;
    let mut logits = session.feed(prompt)?;
    let mut tokens = prompt.to_vec();
    for written in 0..limit {
        let token = choose(model, sampler, &logits)?.map_err(|error| broken(model, &tokens, error))?;
        if end.contains(&token) {
            return Ok(Stop::End);
        }
        if !each(token) {
            return Ok(Stop::Caller);
        }
        if session.len() == context {
            return Ok(Stop::Context);
        }
        if written + 1 == limit {
            break;
        }
        tokens.push(token);
        logits = session.feed(&[token])?;
    }
    Ok(Stop::Limit)
}
