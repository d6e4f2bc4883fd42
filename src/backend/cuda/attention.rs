//! Attention over fresh rows and over paged caches.

use std::sync::Arc;

use super::super::cache::{CacheType, Layer, Memory};
use super::super::tensor::Tensor;
use super::super::{AttentionShape, Batch, Done};
use super::batch::{Keys, OnDevice};
use super::cache::Store;
use super::device::Launch;
use super::floats;
use super::linear::FEW_ROWS;
use super::memory::Buffer;

/// Head dimensions that kernels are made for; others are filled up to the next.
const SIZES: [usize; 3] = [64, 128, 256];

/// Queries that a block of the prefill kernels has room for.
const ROWS: usize = 64;

/// Threads of a block, except in `cache_append_*`.
const THREADS: usize = 128;

/// Pages that are worth a block of their own: one a warp.
const PAGES_PER_SPLIT: usize = 4;
/// Blocks that decoding should have where the cache is large enough for them.
const DECODING_BLOCKS: usize = 256;
/// What `attention_combine` takes.
const MOST_SPLITS: usize = 64;

/// Kernels without a cache, by [`SIZES`].
const OVER_ROWS: [&str; 3] = ["attention_rows_64", "attention_rows_128", "attention_rows_256"];

/// Kernels over one kind of cache, by [`SIZES`].
struct Kernels {
    append: &'static str,
    prefill: [&'static str; 3],
    decode: [&'static str; 3],
}

const OVER_F16: Kernels = Kernels {
    append: "cache_append_f16",
    prefill: ["attention_pages_f16_64", "attention_pages_f16_128", "attention_pages_f16_256"],
    decode: ["attention_decode_f16_64", "attention_decode_f16_128", "attention_decode_f16_256"],
};

const OVER_E4M3: Kernels = Kernels {
    append: "cache_append_e4m3",
    prefill: ["attention_pages_e4m3_64", "attention_pages_e4m3_128", "attention_pages_e4m3_256"],
    decode: ["attention_decode_e4m3_64", "attention_decode_e4m3_128", "attention_decode_e4m3_256"],
};

const OVER_E5M2: Kernels = Kernels {
    append: "cache_append_e5m2",
    prefill: ["attention_pages_e5m2_64", "attention_pages_e5m2_128", "attention_pages_e5m2_256"],
    decode: ["attention_decode_e5m2_64", "attention_decode_e5m2_128", "attention_decode_e5m2_256"],
};

const OVER_INT8: Kernels = Kernels {
    append: "cache_append_i8",
    prefill: ["attention_pages_i8_64", "attention_pages_i8_128", "attention_pages_i8_256"],
    decode: ["attention_decode_i8_64", "attention_decode_i8_128", "attention_decode_i8_256"],
};

/// See [`super::super::Backend::attention`]. The tables of `batch` have been checked.
pub fn attention(
    [q, k, v]: [&Tensor; 3],
    batch: &Batch,
    places: &OnDevice,
    shape: &AttentionShape,
    layer: Option<Layer>,
) -> Done<Tensor> {
    let device = &places.device;
    let Some(size) = SIZES.iter().position(|&size| shape.head_dim <= size && shape.head_dim.is_multiple_of(2)) else {
        return Err(device.failed(format!(
            "attention heads of {} channels; the kernels take even numbers up to {}",
            shape.head_dim,
            SIZES[SIZES.len() - 1]
        )));
    };
    let out = floats(device, q.rows, q.cols)?;
    match layer {
        Some(layer) => over_cache([q, k, v], batch, places, shape, layer, size, &out)?,
        None => {
            let launch = device.launch(OVER_ROWS[size], [places.tasks, shape.heads, 1], THREADS);
            let launch = launch.shared(prefill_memory(size, None));
            let launch =
                launch.buffer(q.buffer_on(device)).buffer(k.buffer_on(device)).buffer(v.buffer_on(device)).buffer(&out);
            shaped(launch.buffer_at(&places.buffer, places.tasks(Keys::Rows)), shape).go()?;
        }
    }
    Ok(Tensor::cuda(q.rows, q.cols, out))
}

fn over_cache(
    [q, k, v]: [&Tensor; 3],
    batch: &Batch,
    places: &OnDevice,
    shape: &AttentionShape,
    layer: Layer,
    size: usize,
    out: &Buffer,
) -> Done<()> {
    let device = &places.device;
    let Memory::Cuda(store) = &layer.pool.memory else {
        return Err(device.failed("a key-value cache of another backend"));
    };
    if !Arc::ptr_eq(device, &store.device) {
        return Err(device.failed(format!("a cache on {}; sequences stay on one device", store.device.name)));
    }
    let kind = layer.pool.shape.kind;
    let kernels = match kind {
        CacheType::F32 => return Err(device.failed("key-value caches of f32 are for the CPU")),
        CacheType::F16 => OVER_F16,
        CacheType::Fp8E4m3 => OVER_E4M3,
        CacheType::Fp8E5m2 => OVER_E5M2,
        CacheType::Int8 => OVER_INT8,
    };
    let (at, sequences, positions) = (&places.buffer, places.sequences(), places.positions());
    let stride = batch.tables.stride;
    let index = layer.index;
    let stored = |launch| stored(launch, store, index).buffer_at(at, places.tables()).u32(stride);

    let launch = device.launch(kernels.append, [places.rows, shape.kv_heads, 1], 64);
    let launch = stored(launch.buffer(k.buffer_on(device)).buffer(v.buffer_on(device)));
    let launch = launch.buffer_at(at, sequences).buffer_at(at, positions).u32(shape.kv_heads).u32(shape.head_dim);
    // Scales of FP8 are those that attention multiplies by; INT8 writes its own, or these.
    let fixed = if kind == CacheType::Int8 { &store.fixed } else { &store.scales };
    both(launch, fixed.as_ref(), store, index).go()?;

    // Few rows of a sequence are taken one by one, as when decoding.
    if batch.spans.iter().any(|span| span.rows > FEW_ROWS) {
        let launch = device.launch(kernels.prefill[size], [places.tasks, shape.heads, 1], THREADS);
        let launch = stored(launch.shared(prefill_memory(size, Some(kind))).buffer(q.buffer_on(device)));
        return shaped(launch.buffer(out).buffer_at(at, places.tasks(Keys::Cache)), shape).go();
    }
    let splits = splits(stride, shape.kv_heads);
    let partial = floats(device, places.rows * shape.heads * splits, shape.head_dim + 2)?;
    let launch = device.launch(kernels.decode[size], [shape.kv_heads, splits, places.rows], THREADS);
    let launch = stored(launch.buffer(q.buffer_on(device))).buffer_at(at, sequences).buffer_at(at, positions);
    shaped(launch.buffer(&partial), shape).go()?;
    let launch = device.launch("attention_combine", [shape.heads, places.rows, 1], THREADS);
    launch.buffer(&partial).buffer(out).u32(shape.heads).u32(shape.head_dim).u32(splits).go()
}

/// Codes and scales of a pool, from a layer on.
fn stored<'a>(launch: Launch<'a>, store: &Store, layer: usize) -> Launch<'a> {
    let launch = launch.buffer_at(&store.keys, store.layer(&store.keys, layer));
    let launch = launch.buffer_at(&store.values, store.layer(&store.values, layer));
    both(launch, store.scales.as_ref(), store, layer)
}

/// A layer's scales of keys and values, or null pointers.
fn both<'a>(launch: Launch<'a>, scales: Option<&[Buffer; 2]>, store: &Store, layer: usize) -> Launch<'a> {
    match scales {
        Some([keys, values]) => {
            launch.buffer_at(keys, store.layer(keys, layer)).buffer_at(values, store.layer(values, layer))
        }
        None => launch.optional(None).optional(None),
    }
}

fn shaped<'a>(launch: Launch<'a>, shape: &AttentionShape) -> Launch<'a> {
    let launch = launch.u32(shape.heads).u32(shape.kv_heads).u32(shape.head_dim).f32(shape.scale);
    launch.u32(shape.window.map_or(0, |w| w.min(u32::MAX as usize))).f32(shape.softcap.unwrap_or(0.0))
}

/// Shared memory of a prefill kernel: queries in two planes; keys and values in two, or in one from a cache; their
/// scales.
fn prefill_memory(size: usize, cache: Option<CacheType>) -> usize {
    let dim = SIZES[size];
    let keys = if dim > 128 { 16 } else { 32 };
    let planes = if cache.is_none() { 2 } else { 1 };
    let scales = if cache == Some(CacheType::Int8) { 2 * keys } else { 0 };
    4 * (ROWS * dim + planes * keys * dim + scales)
}

/// Blocks that share the context of one head while decoding. It depends on what the cache can hold, not on what it
/// holds, so that a recorded step stays right and sums keep their order; and on no property of the device.
fn splits(pages: usize, kv_heads: usize) -> usize {
    DECODING_BLOCKS.div_ceil(kv_heads).min(pages.div_ceil(PAGES_PER_SPLIT)).clamp(1, MOST_SPLITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_fit() {
        for size in 0..SIZES.len() {
            for cache in [None, Some(CacheType::F16), Some(CacheType::Fp8E5m2), Some(CacheType::Int8)] {
                assert!(prefill_memory(size, cache) <= 96 << 10);
            }
        }
        assert_eq!(splits(1, 8), 1);
        assert_eq!(splits(2048, 8), 32);
        assert_eq!(splits(2048, 1), 64);
        assert_eq!(splits(5, 8), 2);
    }
}
