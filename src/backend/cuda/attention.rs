//! Attention over fresh rows and over paged caches.

use std::sync::Arc;

use super::super::tensor::Tensor;
use super::super::{AttentionShape, Done, KvCache, Span};
use super::batch::{Keys, OnDevice};
use super::cache::{CacheType, Pages};
use super::device::{Device, Launch};
use super::floats;
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

const OVER_FP8: Kernels = Kernels {
    append: "cache_append_e4m3",
    prefill: ["attention_pages_e4m3_64", "attention_pages_e4m3_128", "attention_pages_e4m3_256"],
    decode: ["attention_decode_e4m3_64", "attention_decode_e4m3_128", "attention_decode_e4m3_256"],
};

const OVER_INT8: Kernels = Kernels {
    append: "cache_append_i8",
    prefill: ["attention_pages_i8_64", "attention_pages_i8_128", "attention_pages_i8_256"],
    decode: ["attention_decode_i8_64", "attention_decode_i8_128", "attention_decode_i8_256"],
};

/// See [`super::super::Backend::attention`]. Room in the caches has been reserved.
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    batch: &OnDevice,
    spans: &[Span],
    shape: &AttentionShape,
    caches: Option<&mut [KvCache]>,
) -> Done<Tensor> {
    let device = &batch.device;
    let Some(size) = SIZES.iter().position(|&size| shape.head_dim <= size && shape.head_dim.is_multiple_of(2)) else {
        return Err(device.failed(format!(
            "attention heads of {} channels; the kernels take even numbers up to {}",
            shape.head_dim,
            SIZES[SIZES.len() - 1]
        )));
    };
    let out = floats(device, q.rows, q.cols)?;
    match caches {
        Some(caches) => over_cache([q, k, v], batch, spans, shape, caches, size, &out)?,
        None => {
            let launch = device.launch(OVER_ROWS[size], [batch.tasks, shape.heads, 1], THREADS);
            let launch = launch.shared(prefill_memory(size, None));
            let launch = launch.buffer(q.buffer()).buffer(k.buffer()).buffer(v.buffer()).buffer(&out);
            shaped(launch.buffer_at(&batch.buffer, batch.tasks(Keys::Rows)), shape).go()?;
        }
    }
    Ok(Tensor::cuda(q.rows, q.cols, out))
}

fn over_cache(
    [q, k, v]: [&Tensor; 3],
    batch: &OnDevice,
    spans: &[Span],
    shape: &AttentionShape,
    caches: &[KvCache],
    size: usize,
    out: &Buffer,
) -> Done<()> {
    let device = &batch.device;
    let Some(cache) = tables_of(device, caches, spans.len())? else { return Ok(()) };
    if !Arc::ptr_eq(device, &cache.pool.device) {
        return Err(device.failed(format!("a cache on {}; sequences stay on one device", cache.pool.device.name)));
    }
    let kernels = match cache.pool.kind {
        CacheType::F16 => OVER_F16,
        CacheType::Fp8 => OVER_FP8,
        CacheType::Int8 => OVER_INT8,
    };
    let (at, positions) = (&batch.buffer, batch.positions());

    let launch = device.launch(kernels.append, [batch.rows, shape.kv_heads, 1], 64);
    let launch = stored(launch.buffer(k.buffer()).buffer(v.buffer()), cache);
    let launch = launch.buffer_at(at, batch.sequences()).buffer_at(at, positions);
    scales(launch.u32(shape.kv_heads).u32(shape.head_dim), cache).go()?;

    if spans.iter().any(|span| span.rows != 1) {
        let launch = device.launch(kernels.prefill[size], [batch.tasks, shape.heads, 1], THREADS);
        let launch = stored(launch.shared(prefill_memory(size, Some(cache.pool.kind))).buffer(q.buffer()), cache);
        let launch = launch.buffer(out).buffer_at(at, batch.tasks(Keys::Cache));
        return scales(shaped(launch, shape), cache).go();
    }
    let splits = splits(cache.pool.stride, shape.kv_heads);
    let partial = floats(device, spans.len() * shape.heads * splits, shape.head_dim + 2)?;
    let launch = device.launch(kernels.decode[size], [shape.kv_heads, splits, spans.len()], THREADS);
    let launch = stored(launch.buffer(q.buffer()), cache).buffer_at(at, positions).buffer(&partial);
    scales(shaped(launch, shape), cache).go()?;
    let launch = device.launch("attention_combine", [shape.heads, spans.len(), 1], THREADS);
    launch.buffer(&partial).buffer(out).u32(shape.heads).u32(shape.head_dim).u32(splits).go()
}

/// The first of the caches, whose tables of pages lie one behind the other; none if there are no caches.
fn tables_of<'a>(device: &Device, caches: &'a [KvCache], sequences: usize) -> Done<Option<&'a Pages>> {
    let pages = caches.iter().map(|cache| match cache {
        KvCache::Cuda(pages) => Ok(pages),
        KvCache::Host(_) => Err(device.failed("a key-value cache of another backend")),
    });
    let pages = pages.collect::<Done<Vec<_>>>()?;
    let follow = |pair: &[&Pages]| std::ptr::eq(&*pair[0].pool, &*pair[1].pool) && pair[0].table + 1 == pair[1].table;
    if pages.len() < sequences || !pages.windows(2).all(follow) {
        return Err(device.failed("key-value caches that are not those of consecutive sequences"));
    }
    Ok(pages.first().copied())
}

/// The pool and its tables, from those of `cache` on.
fn stored<'a>(launch: Launch<'a>, cache: &Pages) -> Launch<'a> {
    let pool = &cache.pool;
    let launch = launch.buffer(&pool.keys).buffer(&pool.values);
    let launch = launch.optional(pool.key_scales.as_ref()).optional(pool.value_scales.as_ref());
    launch.buffer_at(&pool.tables, cache.table * pool.stride * 4).u32(pool.stride)
}

fn shaped<'a>(launch: Launch<'a>, shape: &AttentionShape) -> Launch<'a> {
    let launch = launch.u32(shape.heads).u32(shape.kv_heads).u32(shape.head_dim).f32(shape.scale);
    launch.u32(shape.window.map_or(0, |w| w.min(u32::MAX as usize))).f32(shape.softcap.unwrap_or(0.0))
}

fn scales<'a>(launch: Launch<'a>, cache: &Pages) -> Launch<'a> {
    launch.f32(cache.key_scale).f32(cache.value_scale)
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
            for cache in [None, Some(CacheType::F16), Some(CacheType::Fp8), Some(CacheType::Int8)] {
                assert!(prefill_memory(size, cache) <= 96 << 10);
            }
        }
        assert_eq!(splits(1, 8), 1);
        assert_eq!(splits(2048, 8), 32);
        assert_eq!(splits(2048, 1), 64);
        assert_eq!(splits(5, 8), 2);
    }
}
