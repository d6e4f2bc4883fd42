//! Paged key-value caches: pages of a pool, handed out as sequences grow.

use std::sync::{Arc, Mutex};

use super::super::{CacheShape, Done, KvCache};
use super::device::Device;
use super::memory::Buffer;

/// Tokens a page holds.
pub const PAGE: usize = 16;

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheType {
    #[default]
    F16,
    /// FP8 E4M3 with one scale a layer for keys and one for values.
    Fp8,
    /// INT8 with a scale for each token and head.
    Int8,
}

impl CacheType {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        if self == CacheType::F16 { 2 } else { 1 }
    }
}

/// Memory of keys and values that the layers and sequences of one session share.
#[derive(Debug)]
pub struct Pool {
    pub device: Arc<Device>,
    pub kind: CacheType,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// `[page, kv_head, slot, head_dim]`.
    pub keys: Buffer,
    pub values: Buffer,
    /// `[page, kv_head, slot]` f32, for INT8.
    pub key_scales: Option<Buffer>,
    pub value_scales: Option<Buffer>,
    /// `[layers, sequences, stride]` u32: pages of each sequence in order.
    pub tables: Buffer,
    /// Pages a table can name.
    pub stride: usize,
    pub sequences: usize,
    free: Mutex<Vec<u32>>,
}

/// The pages of one sequence in one layer.
#[derive(Debug)]
pub struct Pages {
    pub pool: Arc<Pool>,
    /// Which table of the pool lists them.
    pub table: usize,
    /// Tokens there will be after the pass that was last reserved for.
    pub len: usize,
    pages: Vec<u32>,
    /// Scales of FP8 keys and values.
    pub key_scale: f32,
    pub value_scale: f32,
}

impl Pages {
    /// Makes room for sequences of `len` tokens.
    pub fn reserve(&mut self, len: usize) -> Done<()> {
        let needed = len.div_ceil(PAGE);
        let device = &self.pool.device;
        if needed > self.pool.stride {
            return Err(device
                .failed(format!("the key-value cache was made for {} tokens a sequence", self.pool.stride * PAGE)));
        }
        let first = self.pages.len();
        while self.pages.len() < needed {
            let page = self.pool.free.lock().unwrap_or_else(|e| e.into_inner()).pop();
            self.pages.push(page.ok_or_else(|| device.failed("the key-value cache has no page left"))?);
        }
        if self.pages.len() > first {
            let at = (self.table * self.pool.stride + first) * 4;
            device.write(&self.pool.tables, at, &self.pages[first..])?;
        }
        self.len = len;
        Ok(())
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        self.pool.free.lock().unwrap_or_else(|e| e.into_inner()).append(&mut self.pages);
    }
}

/// Empty caches of a session, `[layer][sequence]`, and memory for all of it.
pub fn new(device: &Arc<Device>, kind: CacheType, shape: CacheShape) -> Done<Vec<Vec<KvCache>>> {
    let CacheShape { layers, sequences, kv_heads, head_dim, capacity } = shape;
    let stride = capacity.div_ceil(PAGE).max(1);
    let pages = layers * sequences * stride;
    let slots = pages * kv_heads * PAGE;
    let scales = || -> Done<Option<Buffer>> {
        if kind == CacheType::Int8 { device.alloc(slots * 4).map(Some) } else { Ok(None) }
    };
    let pool = Arc::new(Pool {
        device: device.clone(),
        kind,
        kv_heads,
        head_dim,
        keys: device.alloc(slots * head_dim * kind.size())?,
        values: device.alloc(slots * head_dim * kind.size())?,
        key_scales: scales()?,
        value_scales: scales()?,
        tables: device.alloc(pages * 4)?,
        stride,
        sequences,
        free: Mutex::new((0..pages as u32).rev().collect()),
    });
    let cache = |table| {
        let pages = Vec::with_capacity(stride);
        KvCache::Cuda(Pages { pool: pool.clone(), table, len: 0, pages, key_scale: 1.0, value_scale: 1.0 })
    };
    Ok((0..layers).map(|layer| (0..sequences).map(|s| cache(layer * sequences + s)).collect()).collect())
}
