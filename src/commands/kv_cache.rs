//! From what the user asked to the options of a key-value cache.

use anyhow::{Result, bail};

use crate::backend::cache::CacheType;
use crate::cli::print::Printer;
use crate::cli::serving::CacheArgs;
use crate::engine::cache::{CacheOptions, Room};
use crate::model::Model;

/// A cache for up to `sequences` sequences of up to `capacity` tokens. FP8 (E4M3) takes an
/// artifact's own scales.
pub fn options(
    args: &CacheArgs,
    model: &Model,
    sequences: usize,
    capacity: usize,
    printer: Printer,
) -> Result<CacheOptions> {
    let kind = args.kv_cache_dtype.unwrap_or(model.backend().cache_type());
    let mut scales = None;
    if kind == CacheType::Fp8E4m3 {
        scales = model.cache_scales()?;
        if scales.is_none() {
            printer.warn(
                "--kv-cache-dtype fp8: the model brings no k_scale and v_scale along (`--kv-cache fp8` would have \
                 stored them when it was quantized); keys and values are rounded with scale 1.0 and cut off at 448",
            );
        }
    }
    let room = match args.kv_cache_memory_bytes {
        Some(bytes) => Room::Bytes(bytes),
        None if args.gpu_memory_utilization == 0.0 => bail!("--gpu-memory-utilization 0 leaves no key-value cache"),
        None => Room::Share(args.gpu_memory_utilization),
    };
    let swap_bytes = (args.swap_space * (1u64 << 30) as f64) as u64;
    Ok(CacheOptions { kind: Some(kind), room, swap_bytes, capacity, sequences, scales })
}
