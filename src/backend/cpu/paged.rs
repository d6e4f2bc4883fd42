//! Causal attention over a pool of stored keys and values. Every query has an order of sums of its own, which its
//! position alone decides: over channels in four strands for a score, over positions one after the other for values.
//! So its bits depend neither on the rows beside it nor on how its sequence came into the cache.

use std::ops::Range;

use rayon::prelude::*;

use super::super::cache::{BLOCK, CacheType, PoolShape};
use super::super::tensor::Tensor;
use super::super::{AttentionShape, Batch};
use super::cache::{E4m3, E5m2, F16, F32, Format, I8, Store};
use super::elementwise::softcap;
use crate::num::simd::{self, vectorized};

/// Queries per task: what is decoded from the pool serves them all.
const ROWS: usize = 32;

/// The keys and values of one layer, and what attention is like.
struct Paged<'a> {
    store: &'a Store,
    layer: usize,
    shape: &'a AttentionShape,
}

/// A block of queries of one sequence, for the heads that share keys.
struct Task<'a> {
    /// `[rows, heads of the group, head_dim]`
    out: &'a mut [f32],
    /// The first row; rows are `heads * head_dim` wide.
    q: &'a [f32],
    kv_head: usize,
    table: &'a [u32],
    /// Position of the first query.
    first: usize,
    rows: usize,
}

/// Buffers of a task.
#[derive(Default)]
struct Scratch {
    /// One tile of keys or values.
    tile: Vec<f32>,
    /// `[rows * heads of the group, context]`
    scores: Vec<f32>,
}

/// Takes up the new keys and values, then attends over all. The tables of `batch` have been checked.
pub fn attention(
    [q, k, v]: [&Tensor; 3],
    batch: &Batch,
    shape: &AttentionShape,
    store: &mut Store,
    pool: &PoolShape,
    layer: usize,
) -> Tensor {
    match pool.kind {
        CacheType::F32 => over::<F32>([q, k, v], batch, shape, store, layer),
        CacheType::F16 => over::<F16>([q, k, v], batch, shape, store, layer),
        CacheType::Fp8E4m3 => over::<E4m3>([q, k, v], batch, shape, store, layer),
        CacheType::Fp8E5m2 => over::<E5m2>([q, k, v], batch, shape, store, layer),
        CacheType::Int8 => over::<I8>([q, k, v], batch, shape, store, layer),
    }
}

fn over<F: Format>(
    [q, k, v]: [&Tensor; 3],
    batch: &Batch,
    shape: &AttentionShape,
    store: &mut Store,
    layer: usize,
) -> Tensor {
    let (width, kv_width) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let mut new = k.as_host().chunks_exact(kv_width).zip(v.as_host().chunks_exact(kv_width));
    for (i, span) in batch.spans.iter().enumerate() {
        let table = batch.tables.of(i);
        for (position, (key, value)) in (span.start..span.start + span.rows).zip(&mut new) {
            store.append::<F>(layer, table[position / BLOCK], position % BLOCK, key, value);
        }
    }
    let group = shape.heads / shape.kv_heads * shape.head_dim;
    // By task: rows of the heads that share keys.
    let mut parts = vec![0.0; q.rows * width];
    let (mut tasks, mut rest, mut row) = (Vec::new(), &mut parts[..], 0);
    for (i, span) in batch.spans.iter().enumerate() {
        for at in (0..span.rows).step_by(ROWS) {
            let rows = ROWS.min(span.rows - at);
            for kv_head in 0..shape.kv_heads {
                let (out, after) = std::mem::take(&mut rest).split_at_mut(rows * group);
                rest = after;
                let (q, table) = (&q.as_host()[(row + at) * width..], batch.tables.of(i));
                tasks.push(Task { out, q, kv_head, table, first: span.start + at, rows });
            }
        }
        row += span.rows;
    }
    let paged = Paged { store, layer, shape };
    tasks.into_par_iter().for_each_init(Scratch::default, |scratch, task| paged.attend::<F>(task, scratch));

    let mut out = Tensor::zeros(q.rows, width);
    let (mut rest, mut row) = (&parts[..], 0);
    for span in &batch.spans {
        for at in (0..span.rows).step_by(ROWS) {
            let rows = row + at..row + span.rows.min(at + ROWS);
            for kv_head in 0..shape.kv_heads {
                for row in rows.clone() {
                    let (now, later) = rest.split_at(group);
                    out.as_host_mut()[row * width + kv_head * group..][..group].copy_from_slice(now);
                    rest = later;
                }
            }
        }
        row += span.rows;
    }
    out
}

impl Paged<'_> {
    fn attend<F: Format>(&self, task: Task, scratch: &mut Scratch) {
        let Self { store, layer, shape } = *self;
        let Task { out, q, kv_head, table, first, rows } = task;
        let (dim, group) = (shape.head_dim, shape.heads / shape.kv_heads);
        let first_seen = |position: usize| shape.window.map_or(0, |w| (position + 1).saturating_sub(w));
        let blocks = first_seen(first) / BLOCK..(first + rows).div_ceil(BLOCK);
        let (from, context) = (blocks.start * BLOCK, blocks.len() * BLOCK);
        let Scratch { tile, scores } = scratch;
        tile.resize(dim * BLOCK, 0.0);
        scores.resize(rows * group * context, 0.0);
        for block in blocks.clone() {
            let number = table[block];
            let [scales, _] = store.scales(layer, number, kv_head);
            let units = scales.map(|scale| scale * shape.scale);
            let codes = store.keys::<F>(layer, number, kv_head);
            vectorized(|| {
                decode::<F>(codes, tile);
                for row in 0..rows {
                    let position = first + row;
                    if block * BLOCK > position || (block + 1) * BLOCK <= first_seen(position) {
                        continue;
                    }
                    for head in 0..group {
                        let q = &q[(row * shape.heads + kv_head * group + head) * dim..][..dim];
                        let to = (row * group + head) * context + block * BLOCK - from;
                        products(q, tile, &units, &mut scores[to..to + BLOCK]);
                    }
                }
            });
        }
        for (i, scores) in scores.chunks_exact_mut(context).enumerate() {
            let position = first + i / group;
            let seen = &mut scores[first_seen(position) - from..position + 1 - from];
            if let Some(cap) = shape.softcap {
                softcap(seen, cap);
            }
            vectorized(|| {
                let max = simd::max(seen);
                let factor = 1.0 / simd::exp_in_place(seen, max);
                seen.iter_mut().for_each(|x| *x *= factor);
            });
        }
        out.fill(0.0);
        for block in blocks {
            let number = table[block];
            let [_, scales] = store.scales(layer, number, kv_head);
            let codes = store.values::<F>(layer, number, kv_head);
            vectorized(|| {
                decode::<F>(codes, tile);
                for (i, out) in out.chunks_exact_mut(dim).enumerate() {
                    let position = first + i / group;
                    let start = first_seen(position).max(block * BLOCK);
                    let end = (position + 1).min((block + 1) * BLOCK);
                    if start >= end {
                        continue;
                    }
                    let mut weights = [0.0; BLOCK];
                    for slot in start - block * BLOCK..end - block * BLOCK {
                        weights[slot] = scores[i * context + block * BLOCK - from + slot] * scales[slot];
                    }
                    add_values(&weights, start - block * BLOCK..end - block * BLOCK, tile, out);
                }
            });
        }
    }
}

#[inline(always)]
fn decode<F: Format>(codes: &[F::Code], out: &mut [f32]) {
    out.iter_mut().zip(codes).for_each(|(out, code)| *out = F::decode(*code));
}

/// Scores of one query and the sixteen keys of a tile, `[dim, slot]`.
#[inline(always)]
fn products(q: &[f32], tile: &[f32], units: &[f32; BLOCK], out: &mut [f32]) {
    let mut strands = [[0.0f32; BLOCK]; 4];
    let (fours, tail) = q.as_chunks::<4>();
    let (tiles, _) = tile.as_chunks::<BLOCK>();
    for (q, tiles) in fours.iter().zip(tiles.chunks_exact(4)) {
        for (strand, (q, tile)) in strands.iter_mut().zip(q.iter().zip(tiles)) {
            for i in 0..BLOCK {
                strand[i] += q * tile[i];
            }
        }
    }
    for (strand, (q, tile)) in strands.iter_mut().zip(tail.iter().zip(&tiles[fours.len() * 4..])) {
        for i in 0..BLOCK {
            strand[i] += q * tile[i];
        }
    }
    for i in 0..BLOCK {
        out[i] = ((strands[0][i] + strands[1][i]) + (strands[2][i] + strands[3][i])) * units[i];
    }
}

/// Adds the values of some slots of a tile, `[slot, dim]`, by their weights.
#[inline(always)]
fn add_values(weights: &[f32; BLOCK], slots: Range<usize>, tile: &[f32], out: &mut [f32]) {
    let dim = out.len();
    let (pieces, tail) = out.as_chunks_mut::<16>();
    for (i, piece) in pieces.iter_mut().enumerate() {
        let mut sums = *piece;
        for slot in slots.clone() {
            let values = &tile[slot * dim + 16 * i..][..16];
            for j in 0..16 {
                sums[j] += weights[slot] * values[j];
            }
        }
        *piece = sums;
    }
    let done = dim - tail.len();
    for (j, sum) in tail.iter_mut().enumerate() {
        for slot in slots.clone() {
            *sum += weights[slot] * tile[slot * dim + done + j];
        }
    }
}
