//! Text from a model: prefill, then one token at a time through the cache.

use rayon::prelude::*;
use thiserror::Error;

use super::cache::{Cache, CacheOptions, EngineError, SeqId};
use super::pass::{Part, Wanted, pass, prompt};
use super::sampler::{Sampler, SamplerError};
use crate::backend::tensor::Tensor;
use crate::model::{Model, ModelError};

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
    Cache(EngineError),
    #[error(transparent)]
    Sampler(#[from] SamplerError),
    #[error("the prompt has {tokens} tokens; the model takes {limit}")]
    PromptTooLong { tokens: usize, limit: usize },
    #[error("the prompt is empty and the tokenizer has no BOS token to start from; give a prompt")]
    EmptyPrompt,
}

impl From<EngineError> for GenerateError {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::Model(error) => GenerateError::Model(error),
            other => GenerateError::Cache(other),
        }
    }
}

/// One sequence on its way, in a cache of its own.
pub struct Session<'a> {
    model: &'a Model,
    cache: Cache<'a>,
    sequence: SeqId,
    len: usize,
}

impl<'a> Session<'a> {
    /// An empty sequence that can grow to `capacity` tokens.
    pub fn new(model: &'a Model, capacity: usize) -> Result<Self, EngineError> {
        Self::with(model, CacheOptions::for_sequences(1, capacity))
    }

    /// The same in a cache as the options say.
    pub fn with(model: &'a Model, options: CacheOptions) -> Result<Self, EngineError> {
        let mut cache = Cache::new(model, options)?;
        let sequence = cache.add();
        Ok(Self { model, cache, sequence, len: 0 })
    }

    /// Tokens so far.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn model(&self) -> &'a Model {
        self.model
    }

    pub fn cache(&self) -> &Cache<'a> {
        &self.cache
    }

    /// Takes up `tokens`, at least one, and returns the logits after the last one, `[1, vocab]`. They hold until the
    /// next call.
    pub fn feed(&mut self, tokens: &[u32]) -> Result<Tensor, EngineError> {
        let logits = prompt(self.model, &mut self.cache, self.sequence, tokens)?;
        self.len += tokens.len();
        Ok(logits)
    }

    /// The same for few tokens, in one pass, with the logits after each of them.
    pub fn feed_each(&mut self, tokens: &[u32]) -> Result<Tensor, EngineError> {
        let part = Part { seq: self.sequence, tokens, wanted: Wanted::All };
        let logits = pass(self.model, &mut self.cache, &[part])?;
        self.len += tokens.len();
        Ok(logits)
    }

    /// Forgets all but the first `len` tokens.
    pub fn truncate(&mut self, len: usize) -> Result<(), EngineError> {
        if len < self.len {
            self.cache.truncate(self.sequence, len)?;
            self.len = len;
        }
        Ok(())
    }
}

/// The error of logits that no token can be chosen from, after `tokens`: it names what broke the model.
pub(super) fn broken(model: &Model, tokens: &[u32], error: SamplerError) -> GenerateError {
    if !matches!(error, SamplerError::BrokenLogit { .. } | SamplerError::NoCandidate(_)) {
        return error.into();
    }
    match model.first_non_finite(tokens) {
        Ok(path) => ModelError::NonFinite { path: path.unwrap_or_else(|| "the output head".into()) }.into(),
        Err(error) => error.into(),
    }
}

/// The next token. The likeliest one is found where the logits are; anything else wants them all.
pub(super) fn choose(
    model: &Model,
    sampler: &mut Sampler,
    logits: &Tensor,
) -> Result<Result<u32, SamplerError>, ModelError> {
    if sampler.is_greedy()
        && let [Some(token)] = model.backend().argmax(logits)?[..]
    {
        return Ok(Ok(token));
    }
    Ok(sampler.sample(&model.backend().download(logits)?))
}

/// A token from each row of logits, or from the only one. The likeliest are found where the logits are; anything else
/// wants them all.
pub(super) fn choose_each(
    model: &Model,
    mut samplers: Vec<&mut Sampler>,
    logits: &Tensor,
) -> Result<Vec<Result<u32, SamplerError>>, ModelError> {
    let row = |i: usize| if logits.rows == 1 { 0 } else { i };
    if samplers.iter().all(|sampler| sampler.is_greedy()) {
        let best = model.backend().argmax(logits)?;
        if best.iter().all(Option::is_some) {
            return Ok((0..samplers.len()).filter_map(|i| best[row(i)]).map(Ok).collect());
        }
    }
    let values = model.backend().download(logits)?;
    let of = |i| &values[row(i) * logits.cols..(row(i) + 1) * logits.cols];
    Ok(samplers.par_iter_mut().enumerate().map(|(i, sampler)| sampler.sample(of(i))).collect())
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
    let capacity = capacity(model, prompt, limit)?;
    let mut session = Session::new(model, capacity)?;
    generate_in(&mut session, prompt, end, limit, sampler, each)
}

/// Tokens that a sequence may come to have; whether the prompt fits at all.
pub fn capacity(model: &Model, prompt: &[u32], limit: usize) -> Result<usize, GenerateError> {
    let context = model.config.max_positions;
    if prompt.is_empty() {
        return Err(GenerateError::EmptyPrompt);
    }
    if prompt.len() >= context {
        return Err(GenerateError::PromptTooLong { tokens: prompt.len(), limit: context - 1 });
    }
    Ok(context.min(prompt.len().saturating_add(limit)))
}

/// The same in a session, which is empty and has the [`capacity`].
pub fn generate_in(
    session: &mut Session,
    prompt: &[u32],
    end: &[u32],
    limit: usize,
    sampler: &mut Sampler,
    each: &mut dyn FnMut(u32) -> bool,
) -> Result<Stop, GenerateError> {
    let model = session.model;
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
        if session.len() == model.config.max_positions {
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
