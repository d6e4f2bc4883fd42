//! Architectures as data, block mathematics over a backend, tokenizer, chat template.

pub mod block;
mod cache_scales;
pub mod chat;
pub mod config;
pub mod config_error;
pub mod cuts;
pub mod families;
pub mod fold;
mod parts;
pub mod presence;
pub mod rope;
pub mod source;
pub mod splits;
pub mod text_encoder;
pub mod tokenizer;

use std::sync::{Arc, Mutex};

use thiserror::Error;

use crate::backend::cache::Pool;
use crate::backend::tensor::Tensor;
use crate::backend::{Backend, Batch, DeviceError, Matrix, RopeTable, Span};
use crate::checkpoint::Checkpoint;
use block::{Block, Chunk};
use config::ModelConfig;
use config_error::ConfigError;
use source::{SourceError, WeightSource};

/// Why a model cannot be opened or run.
#[derive(Debug, Error)]
pub enum ModelError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("token {token} is outside the vocabulary of {vocab}: is this the model's own tokenizer?")]
    Token { token: u32, vocab: usize },
    #[error("`{path}` produces values that are not finite: the weights are damaged, or the activations overflow")]
    NonFinite { path: String },
}

/// A decoder whose shapes have all been checked; matrices stay where the source keeps them.
pub struct Model {
    pub config: ModelConfig,
    pub blocks: Vec<Block>,
    backend: Arc<dyn Backend>,
    source: Box<dyn WeightSource>,
    embedding: Matrix,
    final_norm: Tensor,
    head: Matrix,
    /// One table a kind of rope, grown when longer sequences come.
    ropes: Mutex<Vec<Option<Arc<RopeTable>>>>,
}

impl Model {
    /// Opens a model; every tensor the config asks for must be there, in shape.
    pub fn open(source: Box<dyn WeightSource>, backend: Arc<dyn Backend>) -> Result<Self, ModelError> {
        let config = ModelConfig::of(source.checkpoint())?;
        let table = source.linear(&format!("{}embed_tokens", config.prefix), config.vocab, config.hidden)?;
        let embedding = backend.load(table)?;
        let head = match config.tied {
            true => embedding.clone(),
            false => backend.load(source.linear(head_path(config.prefix), config.vocab, config.hidden)?)?,
        };
        let final_norm = block::norm(&config, &*source, &*backend, &format!("{}norm", config.prefix), config.hidden)?;
        let blocks =
            (0..config.layers.len()).map(|i| block::load(&config, &*source, &*backend, i)).collect::<Result<_, _>>()?;
        let ropes = Mutex::new(vec![None; config.ropes.len()]);
        Ok(Self { config, blocks, backend, source, embedding, final_norm, head, ropes })
    }

    pub fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// The backend, to be shared with other models.
    pub fn backend_handle(&self) -> Arc<dyn Backend> {
        self.backend.clone()
    }

    pub fn checkpoint(&self) -> &Checkpoint {
        self.source.checkpoint()
    }

    /// Where the matrices come from.
    pub fn source(&self) -> &dyn WeightSource {
        &*self.source
    }

    /// The matrices beside the blocks, with their rows: the embedding, and the output head where it is another.
    pub fn tables(&self) -> Vec<(String, usize)> {
        let mut tables = vec![(format!("{}embed_tokens", self.config.prefix), self.config.vocab)];
        if !self.config.tied {
            tables.push((head_path(self.config.prefix).to_string(), self.config.vocab));
        }
        tables
    }

    /// Embeds token sequences, one after another, into one chunk.
    pub fn embed(&self, sequences: &[&[u32]], spans: Vec<Span>) -> Result<Chunk, ModelError> {
        let ids = sequences.concat();
        self.check(&ids)?;
        self.embed_batch(Arc::new(self.backend.batch(ids, spans)?))
    }

    /// Refuses ids outside the vocabulary.
    pub fn check(&self, ids: &[u32]) -> Result<(), ModelError> {
        let vocab = self.config.vocab;
        match ids.iter().find(|&&id| id as usize >= vocab) {
            Some(&token) => Err(ModelError::Token { token, vocab }),
            None => Ok(()),
        }
    }

    /// Makes all tables that sequences of `positions` tokens need.
    pub fn prepare(&self, positions: usize) -> Result<(), DeviceError> {
        (0..self.config.ropes.len()).try_for_each(|kind| self.rope_table(kind, positions).map(drop))
    }

    /// Embeds a batch, whose ids are in the vocabulary.
    pub fn embed_batch(&self, batch: Arc<Batch>) -> Result<Chunk, ModelError> {
        let hidden = self.backend.embed(&self.embedding, &batch, self.config.embedding_scale)?;
        Ok(Chunk { hidden, batch, original: false })
    }

    /// Takes chunks through all blocks. Over a pool, their batches have tables.
    pub fn forward(&self, chunks: &mut [Chunk], mut pool: Option<&mut Pool>) -> Result<(), ModelError> {
        for block in &self.blocks {
            self.enter(block)?;
            block.run::<ModelError>(self, chunks, pool.as_deref_mut(), &mut |_, _| Ok(None))?;
            self.leave(block);
        }
        Ok(())
    }

    /// The block's weights are about to be used.
    pub fn enter(&self, block: &Block) -> Result<(), DeviceError> {
        let next = self.blocks.get(block.index + 1).map_or(Vec::new(), Block::matrices);
        self.backend.expect(&block.matrices(), &next)
    }

    /// The block's weights have been used.
    pub fn leave(&self, block: &Block) {
        self.backend.release(&block.matrices());
    }

    /// Negative log-likelihood of `targets`, one a row of `hidden` (the output of the last block).
    pub fn nll(&self, hidden: &Tensor, targets: &[u32]) -> Result<Vec<f32>, ModelError> {
        let x = self.backend.rms_norm(hidden, &self.final_norm, self.config.eps)?;
        Ok(self.backend.nll(&x, &self.head, targets, self.config.final_softcap)?)
    }

    /// Logits of each row of `hidden`, `[rows, vocab]`.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor, ModelError> {
        let x = self.backend.rms_norm(hidden, &self.final_norm, self.config.eps)?;
        let mut logits = self.backend.linear(&x, &self.head, None)?;
        if let Some(cap) = self.config.final_softcap {
            self.backend.softcap(&mut logits, cap)?;
        }
        Ok(logits)
    }

    /// The first block that makes something that is no number out of `tokens`, for error messages.
    pub fn first_non_finite(&self, tokens: &[u32]) -> Result<Option<String>, ModelError> {
        let mut chunks = [self.embed(&[tokens], vec![Span { rows: tokens.len(), start: 0 }])?];
        let finite =
            |chunk: &Chunk| Ok::<_, ModelError>(self.backend.download(&chunk.hidden)?.iter().all(|x| x.is_finite()));
        if !finite(&chunks[0])? {
            return Ok(Some(format!("{}embed_tokens", self.config.prefix)));
        }
        for block in &self.blocks {
            self.enter(block)?;
            block.run::<ModelError>(self, &mut chunks, None, &mut |_, _| Ok(None))?;
            self.leave(block);
            if !finite(&chunks[0])? {
                return Ok(Some(block.path.clone()));
            }
        }
        Ok(None)
    }

    /// The table of rope `kind` for at least `positions` positions.
    pub(crate) fn rope_table(&self, kind: usize, positions: usize) -> Result<Arc<RopeTable>, DeviceError> {
        let mut tables = self.ropes.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(table) = tables[kind].as_ref().filter(|table| table.cos.rows >= positions) {
            return Ok(table.clone());
        }
        let (rope, rows) = (&self.config.ropes[kind], positions.next_power_of_two());
        let (half, [cos, sin]) = (rope.inv_freq.len(), rope.table(rows));
        let upload = |values| self.backend.upload(rows, half, values);
        let table = Arc::new(RopeTable { cos: upload(cos)?, sin: upload(sin)? });
        tables[kind] = Some(table.clone());
        Ok(table)
    }
}

/// Where an untied output head is kept.
pub fn head_path(prefix: &str) -> &'static str {
    if prefix == "language_model.model." { "language_model.lm_head" } else { "lm_head" }
}
