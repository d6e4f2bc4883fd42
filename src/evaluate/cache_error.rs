//! What a key-value cache of few bits does: to keys, values and attention, layer by layer and head by head, and to the
//! predictions that come of it.
//!
//! The first kind of figure shows where a type fails, the second whether that matters: a key may be stored badly and yet
//! meet no query that cares, or hardly move and tip an attention that was undecided.

use std::error::Error;
use std::sync::Arc;

use rayon::prelude::*;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::divergence::{Position, from_logits};
use super::perplexity::BATCH_TOKENS;
use super::windows::Window;
use crate::backend::cache::{CacheType, LayerScales, rounded};
use crate::backend::tensor::Tensor;
use crate::backend::{Batch, DeviceError, spans_of};
use crate::calibrate::cache::{Most, Search, Sharing};
use crate::engine::cache::{Cache, CacheOptions, EngineError};
use crate::engine::logits::rows_at_once;
use crate::engine::pass::{Part, Wanted, pass};
use crate::model::block::{Block, Stage};
use crate::model::{Model, ModelError};

/// Why there are no figures.
#[derive(Debug, Error)]
pub enum CacheErrorError {
    #[error("{0}")]
    Model(#[from] ModelError),
    #[error("{0}")]
    Engine(#[from] EngineError),
    #[error("stopped")]
    Stopped(#[source] Box<dyn Error + Send + Sync>),
}

impl From<DeviceError> for CacheErrorError {
    fn from(error: DeviceError) -> Self {
        Self::Model(error.into())
    }
}

/// Hears before each step how many of how many are done, and may stop the work.
pub type Progress<'a> = dyn FnMut(usize, usize) -> Result<(), Box<dyn Error + Send + Sync>> + 'a;

/// A way to store keys and values.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    pub kind: CacheType,
    /// What a stored 1 stands for; `None` takes the type's own way: 1 for FP8, each token's for INT8.
    pub scales: Option<Arc<[LayerScales]>>,
}

/// Relative errors, by layer and key-value head: `keys[layer][head]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CacheErrors {
    pub keys: Vec<Vec<f64>>,
    pub values: Vec<Vec<f64>>,
    /// What attention puts out, all query heads of a key-value head together.
    pub output: Vec<Vec<f64>>,
}

/// Windows that scales are tried on, of those that ranges are found on: attention is computed many times for each.
const TRIED: usize = 4;

/// Scales found on some windows, for each type and what shares a scale in it.
pub fn calibrated(
    model: &Model,
    windows: &[Window],
    wanted: &[(CacheType, Sharing)],
    progress: &mut Progress,
) -> Result<Vec<Arc<[LayerScales]>>, CacheErrorError> {
    let (backend, head_dim) = (model.backend(), model.config.head_dim);
    let some = if wanted.iter().any(|(kind, _)| Search::pays(*kind)) { TRIED } else { 0 };
    let tried = &windows[..windows.len().min(some)];
    let (all, blocks) = ((windows.len() + tried.len()) * model.blocks.len(), model.blocks.len());
    let mut most = vec![Most::default(); blocks];
    walk(model, windows, &mut |done, _| progress(done, all), &mut |block, _, [_, k, v], _| {
        most[block.index].add(backend, head_dim, k, v)
    })?;
    for (block, most) in model.blocks.iter().zip(&most) {
        most.check(block)?;
    }
    let search = |&(kind, sharing)| -> Vec<Search> {
        most.iter().map(|most| Search::new(kind, most.scales(kind, sharing))).collect()
    };
    let mut searches: Vec<Vec<Search>> = wanted.iter().map(search).collect();
    let before = windows.len() * blocks;
    walk(model, tried, &mut |done, _| progress(before + done, all), &mut |block, batch, qkv, attended| {
        searches.iter_mut().try_for_each(|all| all[block.index].add(model, block, batch, qkv, attended))
    })?;
    Ok(searches.iter().map(|all| all.iter().map(Search::best).collect()).collect())
}

/// Sums of squares of an error and of what is right.
#[derive(Clone, Copy, Default)]
struct Squares {
    error: f64,
    right: f64,
}

impl Squares {
    fn relative(self) -> f64 {
        if self.right > 0.0 { (self.error / self.right).sqrt() } else { self.error.sqrt() }
    }
}

/// `[layer][head]`, of keys, values and output.
type Sums = [Vec<Vec<Squares>>; 3];

/// What each setting does to keys, values and attention where all before is exact.
pub fn head_errors(
    model: &Model,
    windows: &[Window],
    settings: &[Setting],
    progress: &mut Progress,
) -> Result<Vec<CacheErrors>, CacheErrorError> {
    let (backend, config) = (model.backend(), &model.config);
    let (heads, dim) = (config.kv_heads, config.head_dim);
    let empty = || std::array::from_fn(|_| vec![vec![Squares::default(); heads]; model.blocks.len()]);
    let mut sums: Vec<Sums> = settings.iter().map(|_| empty()).collect();
    walk(model, windows, progress, &mut |block, batch, [q, k, v], attended| {
        let exact = [backend.download(k)?, backend.download(v)?, backend.download(attended)?];
        let widths = [dim, dim, config.heads / heads * dim];
        for (setting, sums) in settings.iter().zip(&mut sums) {
            let scales = setting.scales.as_ref().map(|scales| &scales[block.index]);
            let keys = rounded(setting.kind, &exact[0], dim, scales.map(|s| &s.keys[..]));
            let values = rounded(setting.kind, &exact[1], dim, scales.map(|s| &s.values[..]));
            let upload = |x: &Vec<f32>| backend.upload(k.rows, k.cols, x.clone());
            let output = block.attend(model, batch, [q, &upload(&keys)?, &upload(&values)?], None)?;
            let found = [keys, values, backend.download(&output)?];
            for (((sums, found), exact), width) in sums.iter_mut().zip(&found).zip(&exact).zip(widths) {
                add(&mut sums[block.index], found, exact, width);
            }
        }
        Ok(())
    })?;
    let relative = |sums: &Vec<Vec<Squares>>| -> Vec<Vec<f64>> {
        sums.iter().map(|layer| layer.iter().map(|squares| squares.relative()).collect()).collect()
    };
    let of = |[keys, values, output]: &Sums| CacheErrors {
        keys: relative(keys),
        values: relative(values),
        output: relative(output),
    };
    Ok(sums.iter().map(of).collect())
}

/// Adds the squares of rows in which each head has `width` channels.
fn add(heads: &mut [Squares], found: &[f32], exact: &[f32], width: usize) {
    let count = heads.len();
    heads.par_iter_mut().enumerate().for_each(|(head, squares)| {
        let rows = found.chunks_exact(count * width).zip(exact.chunks_exact(count * width));
        for (found, exact) in rows {
            for (f, x) in found[head * width..][..width].iter().zip(&exact[head * width..][..width]) {
                squares.error += f64::from(f - x).powi(2);
                squares.right += f64::from(*x).powi(2);
            }
        }
    });
}

/// What is seen of a block: queries, keys (both rotated) and values, and what attention makes of them.
type See<'a> = dyn FnMut(&Block, &Batch, [&Tensor; 3], &Tensor) -> Result<(), DeviceError> + 'a;

/// Takes windows through the model as it is.
fn walk(model: &Model, windows: &[Window], progress: &mut Progress, see: &mut See) -> Result<(), CacheErrorError> {
    let mut rest = windows;
    while !rest.is_empty() {
        let mut tokens = 0;
        let fitting = rest.iter().take_while(|window| {
            tokens += window.tokens.len();
            tokens <= BATCH_TOKENS
        });
        let (now, later) = rest.split_at(fitting.count().max(1));
        let sequences: Vec<&[u32]> = now.iter().map(|window| &window.tokens[..]).collect();
        let mut chunks = [model.embed(&sequences, spans_of(sequences.iter().map(|s| s.len())))?];
        for block in &model.blocks {
            let done = (windows.len() - rest.len()) * model.blocks.len() + block.index * now.len();
            progress(done, windows.len() * model.blocks.len()).map_err(CacheErrorError::Stopped)?;
            model.enter(block)?;
            let (mut inputs, mut attended) = (None, None);
            block.run::<ModelError>(model, &mut chunks, None, &mut |stage, xs| {
                match stage {
                    Stage::Qkv => inputs = xs.first().cloned(),
                    Stage::Output => attended = xs.first().cloned(),
                    _ => {}
                }
                Ok(None)
            })?;
            if let (Some(x), Some(attended)) = (inputs, attended) {
                let batch = chunks[0].batch.clone();
                let [q, k, v] = block.queries_keys_values(model, &batch, &x, None)?;
                see(block, &batch, [&q, &k, &v], &attended)?;
            }
            model.leave(block);
        }
        rest = later;
    }
    Ok(())
}

/// Predictions with each setting against those with `baseline`, for the tokens that count. All windows go through the
/// caches, so that what is stored badly is read again by all later tokens and layers.
pub fn predictions(
    model: &Model,
    windows: &[Window],
    baseline: &Setting,
    settings: &[Setting],
    progress: &mut Progress,
) -> Result<Vec<Vec<Position>>, CacheErrorError> {
    let vocab = model.config.vocab;
    let capacity = windows.iter().map(|window| window.tokens.len()).max().unwrap_or(0);
    let cache = |setting: &Setting| {
        let (kind, scales) = (Some(setting.kind), setting.scales.clone());
        Cache::new(model, CacheOptions { kind, scales, ..CacheOptions::for_sequences(1, capacity) })
    };
    let mut base = cache(baseline)?;
    let mut others = settings.iter().map(cache).collect::<Result<Vec<_>, _>>()?;
    let mut found = vec![Vec::new(); settings.len()];
    for (done, window) in windows.iter().enumerate() {
        let tokens = &window.tokens;
        let base_seq = base.add();
        let seqs: Vec<_> = others.iter_mut().map(Cache::add).collect();
        // Logits of token i predict token i + 1.
        let (before, counting) = tokens[..tokens.len() - 1].split_at(window.score_from - 1);
        let mut targets = &tokens[window.score_from..];
        let pieces = before.chunks(BATCH_TOKENS).map(|piece| (piece, Wanted::None));
        for (piece, wanted) in pieces.chain(counting.chunks(rows_at_once(vocab)).map(|piece| (piece, Wanted::All))) {
            progress(done, windows.len()).map_err(CacheErrorError::Stopped)?;
            let logits = |cache: &mut Cache, seq| -> Result<Vec<f32>, CacheErrorError> {
                let logits = pass(model, cache, &[Part { seq, tokens: piece, wanted }])?;
                let logits = model.backend().download(&logits)?;
                match logits.iter().all(|x| x.is_finite()) {
                    true => Ok(logits),
                    false => {
                        let path = model.first_non_finite(tokens)?.unwrap_or_else(|| "the output head".into());
                        Err(ModelError::NonFinite { path }.into())
                    }
                }
            };
            let exact = logits(&mut base, base_seq)?;
            let now = match wanted {
                Wanted::All => piece.len(),
                _ => 0,
            };
            let (these, later) = targets.split_at(now);
            for ((cache, seq), found) in others.iter_mut().zip(&seqs).zip(&mut found) {
                let rounded = logits(cache, *seq)?;
                let pairs = exact.par_chunks(vocab).zip(rounded.par_chunks(vocab)).zip(these);
                found.par_extend(pairs.map(|((exact, rounded), target)| from_logits(exact, rounded, *target)));
            }
            targets = later;
        }
        base.remove(base_seq)?;
        others.iter_mut().zip(seqs).try_for_each(|(cache, seq)| cache.remove(seq))?;
    }
    Ok(found)
}
