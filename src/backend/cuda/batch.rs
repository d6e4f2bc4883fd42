//! Token ids and places on a device.

use std::sync::Arc;

use super::super::cache::Tables;
use super::super::{Done, Span};
use super::device::Device;
use super::memory::Buffer;

/// Queries that one block of the prefill kernels takes.
pub const QUERIES: usize = 64;

/// Where a task's keys are: at consecutive rows, or in the cache of a sequence.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Keys {
    Rows,
    Cache,
}

/// One buffer with all that kernels ask about a batch: ids, positions and sequence of each row, the tasks of
/// attention, four words each, and the blocks of each sequence.
#[derive(Clone, Debug)]
pub struct OnDevice {
    pub device: Arc<Device>,
    pub buffer: Buffer,
    pub rows: usize,
    pub tasks: usize,
}

impl OnDevice {
    pub fn new(device: &Arc<Device>, ids: &[u32], spans: &[Span], tables: &Tables) -> Done<Self> {
        let (words, tasks) = words(ids, spans, tables);
        Ok(Self { device: device.clone(), buffer: device.upload(&words)?, rows: ids.len(), tasks })
    }

    /// Other ids, places and blocks of the same shape, in the same memory.
    pub fn rewrite(&self, ids: &[u32], spans: &[Span], tables: &Tables) -> Done<Self> {
        let (words, tasks) = words(ids, spans, tables);
        if ids.len() != self.rows || tasks != self.tasks || words.len() * 4 != self.buffer.bytes() {
            return Err(self.device.failed("a batch of another shape"));
        }
        self.device.write(&self.buffer, 0, &words)?;
        Ok(self.clone())
    }

    /// Byte at which the ids start.
    pub fn ids(&self) -> usize {
        0
    }

    /// Byte at which the positions start.
    pub fn positions(&self) -> usize {
        self.padded() * 4
    }

    /// Byte at which the sequence indices start.
    pub fn sequences(&self) -> usize {
        self.padded() * 8
    }

    /// Byte at which the tasks start.
    pub fn tasks(&self, keys: Keys) -> usize {
        self.padded() * 12 + if keys == Keys::Cache { self.tasks * 16 } else { 0 }
    }

    /// Byte at which the tables start.
    pub fn tables(&self) -> usize {
        self.padded() * 12 + self.tasks * 32
    }

    /// Tasks are read sixteen bytes at a time.
    fn padded(&self) -> usize {
        self.rows.next_multiple_of(4)
    }
}

fn words(ids: &[u32], spans: &[Span], tables: &Tables) -> (Vec<u32>, usize) {
    let padded = ids.len().next_multiple_of(4);
    let mut words = vec![0u32; padded * 3];
    words[..ids.len()].copy_from_slice(ids);
    let (mut by_rows, mut by_cache) = (Vec::new(), Vec::new());
    let mut row = 0;
    for (sequence, span) in spans.iter().enumerate() {
        for i in 0..span.rows {
            words[padded + row + i] = (span.start + i) as u32;
            words[2 * padded + row + i] = sequence as u32;
        }
        for first in (0..span.rows).step_by(QUERIES) {
            let task = [row + first, QUERIES.min(span.rows - first), span.start + first].map(|w| w as u32);
            by_rows.extend([task[0], task[1], task[2], row as u32]);
            by_cache.extend([task[0], task[1], task[2], sequence as u32]);
        }
        row += span.rows;
    }
    let tasks = by_rows.len() / 4;
    words.extend(by_rows);
    words.extend(by_cache);
    words.extend(&tables.blocks);
    (words, tasks)
}
