//! The key-value cache of a model: a pool of blocks, and the sequences in it.

use std::collections::BTreeMap;
use std::sync::Arc;

use thiserror::Error;

use super::blocks::{BlockError, Blocks};
pub use super::blocks::{SeqId, Statistics};
use super::steps::Steps;
use crate::backend::cache::{BLOCK, CacheType, LayerScales, Pool, PoolShape, SavedBlocks, Tables};
use crate::backend::{Batch, DeviceError, Span};
use crate::model::{Model, ModelError};

/// Why sequences cannot be taken further.
#[derive(Debug, Error)]
pub enum EngineError {
    // Not transparent: that would hide the cause that decides the exit code.
    #[error("{0}")]
    Model(#[from] ModelError),
    #[error(transparent)]
    Blocks(#[from] BlockError),
    #[error("a share of {0} of the memory for the key-value cache makes no sense; give more than 0 and at most 1")]
    Share(f64),
    #[error(
        "the key-value cache gets {bytes} bytes, and a block of {BLOCK} tokens takes {block}: give it more memory, or \
         take a narrower type than {kind}"
    )]
    NoRoom { bytes: u64, block: usize, kind: CacheType },
    #[error("the system does not tell how much memory is free; say in bytes how much the key-value cache may take")]
    UnknownMemory,
    #[error("{0} is to be taken further by no token")]
    NoTokens(SeqId),
}

impl From<DeviceError> for EngineError {
    fn from(error: DeviceError) -> Self {
        EngineError::Model(error.into())
    }
}

/// How much memory a cache may take. It never takes more than all its sequences can need.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Room {
    /// Blocks of [`BLOCK`] tokens.
    Blocks(usize),
    Bytes(u64),
    /// A share of the memory that is free once the weights are there.
    Share(f64),
}

/// Tokens that tables are made for at most, unless sequences can be longer.
const WIDEST: usize = 1 << 20;

/// What a cache is to be like.
#[derive(Clone, Debug)]
pub struct CacheOptions {
    /// How keys and values are stored; by default as the backend does.
    pub kind: Option<CacheType>,
    pub room: Room,
    /// Bytes of host memory for sequences that are swapped out.
    pub swap_bytes: u64,
    /// Most tokens of a sequence.
    pub capacity: usize,
    /// Most sequences at a time, as far as it decides the size.
    pub sequences: usize,
    /// Calibrated scales, one entry a layer.
    pub scales: Option<Arc<[LayerScales]>>,
}

impl CacheOptions {
    /// Room for so many sequences of up to `capacity` tokens.
    pub fn for_sequences(sequences: usize, capacity: usize) -> Self {
        let blocks = sequences.saturating_mul(capacity.div_ceil(BLOCK).max(1));
        Self { kind: None, room: Room::Blocks(blocks), swap_bytes: 0, capacity, sequences, scales: None }
    }
}

/// The cache of a model.
pub struct Cache<'a> {
    model: &'a Model,
    pub(super) pool: Pool,
    blocks: Blocks,
    saved: BTreeMap<SeqId, SavedBlocks>,
    /// Blocks that a sequence can have.
    stride: usize,
    /// The block of rows that no sequence has, which fill steps up.
    pub(super) spare: Option<u32>,
    pub(super) steps: Steps,
}

impl<'a> Cache<'a> {
    /// An empty cache.
    pub fn new(model: &'a Model, options: CacheOptions) -> Result<Self, EngineError> {
        let (backend, config) = (model.backend(), &model.config);
        let own = options.capacity.div_ceil(BLOCK).max(1);
        // Tables as wide as the model's context: how decoding splits its sums goes by their width, and must not depend on
        // what else is in the cache.
        let stride = config.max_positions.min(WIDEST).div_ceil(BLOCK).max(own);
        let mut shape = PoolShape {
            layers: model.blocks.len(),
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            kind: options.kind.unwrap_or(backend.cache_type()),
            blocks: options.sequences.saturating_mul(own),
            scales: options.scales,
        };
        let block = shape.block_bytes();
        // Tables that grew later would not be those that a recorded step reads.
        model.prepare(options.capacity.max(BLOCK))?;
        let spare = u64::from(backend.records());
        let room = match options.room {
            Room::Blocks(0) => 0,
            Room::Blocks(blocks) => (blocks as u64).saturating_add(spare),
            Room::Bytes(bytes) => bytes / block as u64,
            Room::Share(share) if share > 0.0 && share <= 1.0 => {
                // Weights come in when they are first needed.
                model.forward(&mut [model.embed(&[&[0]], vec![Span { rows: 1, start: 0 }])?], None)?;
                let free = backend.free_memory().ok_or(EngineError::UnknownMemory)?;
                (free as f64 * share) as u64 / block as u64
            }
            Room::Share(share) => return Err(EngineError::Share(share)),
        };
        // Rather than for the spare block, the only one is for a sequence.
        let spare = spare.min(room.saturating_sub(1));
        shape.blocks = shape.blocks.min(usize::try_from(room - spare).unwrap_or(usize::MAX));
        if shape.blocks == 0 {
            let bytes = match options.room {
                Room::Bytes(bytes) => bytes,
                _ => room.saturating_mul(block as u64),
            };
            return Err(EngineError::NoRoom { bytes, block, kind: shape.kind });
        }
        let swap = usize::try_from(options.swap_bytes / block as u64).unwrap_or(usize::MAX);
        let blocks = Blocks::new(shape.blocks, swap, options.capacity);
        let spare = u32::try_from(shape.blocks).ok().filter(|_| spare > 0);
        shape.blocks += usize::from(spare.is_some());
        let pool = backend.pool(shape)?;
        Ok(Self { model, pool, blocks, saved: BTreeMap::new(), stride, spare, steps: Steps::default() })
    }

    /// How keys and values are stored.
    pub fn kind(&self) -> CacheType {
        self.pool.shape.kind
    }

    /// Bytes of a block of [`BLOCK`] tokens.
    pub fn block_bytes(&self) -> usize {
        self.pool.shape.block_bytes()
    }

    /// Most tokens of a sequence.
    pub fn capacity(&self) -> usize {
        self.blocks.capacity()
    }

    /// Blocks that sequences can have.
    pub fn blocks(&self) -> usize {
        self.pool.shape.blocks - usize::from(self.spare.is_some())
    }

    /// How many sizes of decoding steps are replayed from a recording.
    pub fn recorded_steps(&self) -> usize {
        self.steps.recorded()
    }

    /// Why some decoding steps are not recorded although the backend can record; usually too little memory.
    pub fn unrecorded(&self) -> Option<&str> {
        self.steps.unrecorded.as_deref()
    }

    /// Those that no sequence has.
    pub fn free_blocks(&self) -> usize {
        self.blocks.free()
    }

    /// A new, empty sequence.
    pub fn add(&mut self) -> SeqId {
        self.blocks.add()
    }

    /// Another sequence with the same tokens so far; both share memory until one of them goes on.
    pub fn fork(&mut self, sequence: SeqId) -> Result<SeqId, EngineError> {
        Ok(self.blocks.fork(sequence)?)
    }

    /// Gives up a sequence, wherever it is.
    pub fn remove(&mut self, sequence: SeqId) -> Result<(), EngineError> {
        self.saved.remove(&sequence);
        Ok(self.blocks.remove(sequence)?)
    }

    /// Forgets all tokens but the first `len`.
    pub fn truncate(&mut self, sequence: SeqId, len: usize) -> Result<(), EngineError> {
        Ok(self.blocks.truncate(sequence, len)?)
    }

    /// Tokens of a sequence.
    pub fn len(&self, sequence: SeqId) -> Result<usize, EngineError> {
        Ok(self.blocks.len(sequence)?)
    }

    /// Whether there are no sequences.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Whether so many more tokens of each sequence fit, all of which are in the pool.
    pub fn room(&self, more: &[(SeqId, usize)]) -> bool {
        self.blocks.room(more)
    }

    /// Moves a sequence to host memory.
    pub fn swap_out(&mut self, sequence: SeqId) -> Result<(), EngineError> {
        let blocks = self.blocks.swap_out(sequence)?;
        self.saved.insert(sequence, self.model.backend().save_blocks(&self.pool, &blocks)?);
        Ok(())
    }

    /// Brings a sequence back from host memory.
    pub fn swap_in(&mut self, sequence: SeqId) -> Result<(), EngineError> {
        let blocks = self.blocks.swap_in(sequence)?;
        if let Some(saved) = self.saved.remove(&sequence) {
            self.model.backend().restore_blocks(&mut self.pool, &blocks, &saved)?;
        }
        Ok(())
    }

    /// What is in use.
    pub fn statistics(&self) -> Statistics {
        self.blocks.statistics()
    }

    /// Makes room for so many more tokens of each sequence; where they stand.
    pub(super) fn grow(&mut self, more: &[(SeqId, usize)]) -> Result<Vec<Span>, EngineError> {
        let copies = self.blocks.grow(more)?;
        self.model.backend().copy_blocks(&mut self.pool, &copies)?;
        let span = |&(sequence, rows)| Ok(Span { rows, start: self.blocks.len(sequence)? - rows });
        more.iter().map(span).collect()
    }

    /// The blocks of some sequences, and of `more` that have the spare block alone.
    pub(super) fn tables(
        &self,
        sequences: impl IntoIterator<Item = SeqId>,
        more: usize,
    ) -> Result<Tables, EngineError> {
        let mut tables = sequences.into_iter().map(|s| self.blocks.table(s)).collect::<Result<Vec<_>, _>>()?;
        tables.extend(std::iter::repeat_n(self.spare.as_slice(), more));
        Ok(Tables::new(self.stride, tables))
    }

    /// A batch over this cache, of sequences that have grown.
    pub(super) fn batch(
        &self,
        ids: Vec<u32>,
        sequences: &[(SeqId, usize)],
        spans: Vec<Span>,
    ) -> Result<Batch, EngineError> {
        let tables = self.tables(sequences.iter().map(|(sequence, _)| *sequence), 0)?;
        Ok(self.model.backend().paged_batch(ids, spans, tables)?)
    }
}
