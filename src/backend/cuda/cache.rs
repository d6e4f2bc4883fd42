//! Keys and values in device memory, as the kernels of `kernels/cache.cu` lay them out.

use std::sync::Arc;

use super::super::Done;
use super::super::cache::{BLOCK, CacheType, PoolShape, SavedBlocks};
use super::device::Device;
use super::memory::Buffer;

/// The codes of a pool.
#[derive(Debug)]
pub struct Store {
    pub device: Arc<Device>,
    /// `[layer, block, kv_head, slot, head_dim]`
    pub keys: Buffer,
    pub values: Buffer,
    /// f32: of rows, `[layer, block, kv_head, slot]`, for INT8; of heads, `[layer, kv_head]`, for FP8.
    pub scales: Option<[Buffer; 2]>,
    /// Scales of heads that INT8 takes instead of each row's own, likewise.
    pub fixed: Option<[Buffer; 2]>,
    /// Whether `scales` are of rows.
    of_rows: bool,
    layers: usize,
    blocks: usize,
}

/// A part of a store, with the bytes that one block takes in one layer.
struct Plane<'a> {
    buffer: &'a Buffer,
    unit: usize,
}

impl Store {
    pub fn new(device: &Arc<Device>, shape: &PoolShape) -> Done<Self> {
        let PoolShape { layers, kv_heads, head_dim, kind, blocks, .. } = *shape;
        if kind == CacheType::F32 {
            return Err(device.failed("key-value caches of f32 are for the CPU; take f16"));
        }
        let slots = layers * blocks * kv_heads * BLOCK;
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for [of_keys, of_values] in (0..layers).map_while(|layer| shape.fixed(layer)) {
            keys.extend(of_keys);
            values.extend(of_values);
        }
        let heads = if keys.is_empty() { None } else { Some([device.upload(&keys)?, device.upload(&values)?]) };
        let (scales, fixed) = match kind {
            CacheType::Int8 => (Some([device.alloc(slots * 4)?, device.alloc(slots * 4)?]), heads),
            _ => (heads, None),
        };
        let bytes = slots * head_dim * kind.size();
        let (keys, values) = (device.alloc(bytes)?, device.alloc(bytes)?);
        Ok(Self {
            device: device.clone(),
            keys,
            values,
            scales,
            fixed,
            of_rows: kind == CacheType::Int8,
            layers,
            blocks,
        })
    }

    fn planes(&self) -> Vec<Plane<'_>> {
        // Scales of heads belong to no block.
        let rows = self.scales.iter().filter(|_| self.of_rows).flatten();
        let all = [&self.keys, &self.values].into_iter().chain(rows);
        all.map(|buffer| Plane { buffer, unit: buffer.bytes() / (self.layers * self.blocks).max(1) }).collect()
    }

    /// Byte at which a layer's part of the codes, or of the scales of rows, starts.
    pub fn layer(&self, buffer: &Buffer, layer: usize) -> usize {
        buffer.bytes() / self.layers * layer
    }

    /// Copies whole blocks, one pair after the other.
    pub fn copy(&self, pairs: &[(u32, u32)]) -> Done<()> {
        for Plane { buffer, unit } in self.planes() {
            for layer in 0..self.layers {
                for &(from, to) in pairs {
                    let [from, to] = [from, to].map(|block| (layer * self.blocks + block as usize) * unit);
                    self.device.copy(buffer, from, buffer, to, unit)?;
                }
            }
        }
        Ok(())
    }

    /// Byte ranges of blocks, in the order in which they are saved.
    fn parts(&self, blocks: &[u32]) -> Vec<(&Buffer, usize, usize)> {
        let mut parts = Vec::new();
        for &block in blocks {
            for layer in 0..self.layers {
                for Plane { buffer, unit } in self.planes() {
                    parts.push((buffer, (layer * self.blocks + block as usize) * unit, unit));
                }
            }
        }
        parts
    }

    pub fn save(&self, blocks: &[u32]) -> Done<SavedBlocks> {
        Ok(SavedBlocks { words: self.device.download_parts(&self.parts(blocks))? })
    }

    pub fn restore(&self, blocks: &[u32], saved: &SavedBlocks) -> Done<()> {
        let mut rest = &saved.words[..];
        for (buffer, at, bytes) in self.parts(blocks) {
            let Some((now, later)) = rest.split_at_checked(bytes / 4) else {
                return Err(self.device.failed("saved blocks of another key-value cache"));
            };
            self.device.write(buffer, at, now)?;
            rest = later;
        }
        Ok(())
    }
}
