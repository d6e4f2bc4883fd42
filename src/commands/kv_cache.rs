//! From what the user asked to the options of a key-value cache.

use std::sync::Arc;

use anyhow::{Context, Result, bail};

use crate::backend::cache::{CacheType, LayerScales};
use crate::calibrate::cache::Sharing;
use crate::calibrate::corpus::Corpus;
use crate::cli::interrupt;
use crate::cli::print::Printer;
use crate::cli::serving::{CacheArgs, CacheTypeArgs, ScalesArg};
use crate::engine::cache::{CacheOptions, Room};
use crate::evaluate::cache_error::{self, Setting};
use crate::evaluate::windows::{Convention, Window, plan};
use crate::model::tokenizer::BosMode;
use crate::pipeline::few_tokens::{self, Found};
use crate::pipeline::measure::{Measurement, settle};
use crate::pipeline::observer::Progress;
use crate::pipeline::open::Runnable;

/// Windows of the calibration text that scales are found on.
const CALIBRATION_WINDOWS: usize = 8;

/// A cache for up to `sequences` sequences of up to `capacity` tokens.
pub fn options(
    args: &CacheArgs,
    runnable: &Runnable,
    sequences: usize,
    capacity: usize,
    printer: Printer,
) -> Result<CacheOptions> {
    let Setting { kind, scales } = setting(&args.kind, runnable, printer)?;
    let room = match args.kv_cache_memory_bytes {
        Some(bytes) => Room::Bytes(bytes),
        None if args.gpu_memory_utilization == 0.0 => bail!("--gpu-memory-utilization 0 leaves no key-value cache"),
        None => Room::Share(args.gpu_memory_utilization),
    };
    let swap_bytes = (args.swap_space * (1u64 << 30) as f64) as u64;
    Ok(CacheOptions { kind: Some(kind), room, swap_bytes, capacity, sequences, scales })
}

/// How keys and values of a model are to be stored.
pub fn setting(args: &CacheTypeArgs, runnable: &Runnable, printer: Printer) -> Result<Setting> {
    let model = &runnable.model;
    let kind = args.kv_cache_dtype.unwrap_or(model.backend().cache_type());
    let (option, source) = ("--kv-cache-scales", args.kv_cache_scales.name());
    if matches!(args.kv_cache_scales, ScalesArg::Stored | ScalesArg::Calibrated) && !kind.has_scales() {
        bail!(
            "{option} {source}: a key-value cache of {kind} has no scales; add --kv-cache-dtype fp8, fp8_e5m2 or int8"
        );
    }
    let scales = match args.kv_cache_scales {
        ScalesArg::Auto if kind == CacheType::Fp8E4m3 => {
            let scales = model.cache_scales(kind)?;
            if scales.is_none() {
                printer.warn(
                    "--kv-cache-dtype fp8: the model brings no k_scale and v_scale along (`--kv-cache fp8` would have \
                     stored them when it was quantized); keys and values are rounded with scale 1.0 and cut off at 448. \
                     `--kv-cache-scales calibrated` finds some now",
                );
            }
            scales
        }
        ScalesArg::Auto | ScalesArg::None => None,
        ScalesArg::Stored => Some(model.cache_scales(kind)?.with_context(|| {
            format!(
                "{option} {source}: the model brings no k_scale and v_scale along; quantize it with `--kv-cache fp8`, or \
                 take `{option} calibrated`"
            )
        })?),
        ScalesArg::Calibrated => Some(by_head(runnable, kind, printer)?),
    };
    Ok(Setting { kind, scales })
}

/// Scales of a draft that serves a model whose cache is like this. It may do without those that it does not bring along:
/// a draft changes no text.
pub fn draft_scales(
    args: &CacheTypeArgs,
    kind: CacheType,
    draft: &Runnable,
    printer: Printer,
) -> Result<Option<Arc<[LayerScales]>>> {
    match args.kv_cache_scales {
        ScalesArg::Auto if kind != CacheType::Fp8E4m3 => Ok(None),
        ScalesArg::None => Ok(None),
        ScalesArg::Auto | ScalesArg::Stored => draft.model.cache_scales(kind).context("the draft"),
        ScalesArg::Calibrated => Ok(Some(by_head(draft, kind, printer).context("the draft")?)),
    }
}

fn by_head(runnable: &Runnable, kind: CacheType, printer: Printer) -> Result<Arc<[LayerScales]>> {
    let mut found = calibrated(runnable, BosMode::Auto, &[(kind, Sharing::Head)], printer)?;
    found.pop().context("scales of one kind")
}

/// Scales found on the built-in calibration text, for each type and what shares a scale in it.
pub fn calibrated(
    runnable: &Runnable,
    bos: BosMode,
    wanted: &[(CacheType, Sharing)],
    printer: Printer,
) -> Result<Vec<Arc<[LayerScales]>>> {
    let windows = calibration(runnable, bos)?;
    let tokens = windows.iter().map(|window| window.tokens.len()).sum();
    let remedy = "store scales with the model: quantize it with `--kv-cache fp8` and a larger --nsamples";
    few_tokens::warn(&runnable.model, tokens, Found::CacheScales, remedy, printer);
    let mut steps = printer.steps("cache: scales", 0);
    Ok(cache_error::calibrated(&runnable.model, &windows, wanted, &mut |done, total| {
        steps.set(done as u64, total as u64);
        Ok(interrupt::check()?)
    })?)
}

/// Windows of that text.
fn calibration(runnable: &Runnable, bos: BosMode) -> Result<Vec<Window>> {
    let corpus = Corpus::builtin();
    let measurement = Measurement {
        corpus: &corpus,
        convention: Convention::Gptq,
        window: Some(512.min(runnable.model.config.max_positions)),
        max_windows: Some(CALIBRATION_WINDOWS),
        bos,
    };
    let (window, bos, tokens) = settle(runnable, &measurement)?;
    let mut windows = plan(Convention::Gptq, &tokens, window, bos, runnable.tokenizer()?.rolling_prefix())?;
    windows.truncate(CALIBRATION_WINDOWS);
    Ok(windows)
}
