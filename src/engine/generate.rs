//! Text from a model: prefill, then one token at a time through the cache.

use thiserror::Error;

use super::sampler::{Sampler, SamplerError};
use crate::backend::{KvCache, Span};
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

/// Keys and values of one sequence in all layers.
pub struct Session<'a> {
    model: &'a Model,
    caches: Vec<Vec<KvCache>>,
    len: usize,
}

impl<'a> Session<'a> {
    pub fn new(model: &'a Model) -> Self {
        Self { model, caches: vec![vec![KvCache::default()]; model.blocks.len()], len: 0 }
    }

    /// Takes up `tokens` and returns the logits after the last one.
    pub fn feed(&mut self, tokens: &[u32]) -> Result<Vec<f32>, ModelError> {
        let mut logits = Vec::new();
        let parts = tokens.chunks(PREFILL_TOKENS);
        let last = parts.len().saturating_sub(1);
        for (i, part) in parts.enumerate() {
            let chunk = self.model.embed(&[part], vec![Span { rows: part.len(), start: self.len }])?;
            let hidden = self.model.forward(chunk, Some(&mut self.caches))?.hidden;
            self.len += part.len();
            if i == last {
                let row = hidden.as_host()[(part.len() - 1) * hidden.cols..].to_vec();
                let row = self.model.backend().upload(1, hidden.cols, row).map_err(ModelError::from)?;
                logits = self.model.logits(&row)?;
            }
        }
        Ok(logits)
    }
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
    let mut session = Session::new(model);
    let mut logits = session.feed(prompt)?;
    let mut tokens = prompt.to_vec();
    for _ in 0..limit {
        let token = sampler.sample(&logits).map_err(|error| broken(model, &tokens, error))?;
        if end.contains(&token) {
            return Ok(Stop::End);
        }
        if !each(token) {
            return Ok(Stop::Caller);
        }
        if session.len == context {
            return Ok(Stop::Context);
        }
        tokens.push(token);
        logits = session.feed(&[token])?;
    }
    Ok(Stop::Limit)
}
