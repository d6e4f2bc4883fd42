//! The calibration text of GGUF files.

use std::path::Path;

use anyhow::{Result, bail};

use super::super::open::{Runnable, corpus};
use crate::calibrate::corpus::Corpus;
use crate::model::tokenizer::{BosHabit, BosMode, BosRule};

/// What to do about too few windows.
pub const MORE_TEXT: &str = "give a longer text (--calib) or more --chunks";

/// Whole windows of the calibration text, each begun with BOS where the model wants one, as llama.cpp has them.
pub fn calibration(source: &Runnable, file: Option<&Path>, chunks: Option<usize>) -> Result<(String, Vec<Vec<u32>>)> {
    let (model, tokenizer) = (&source.model, source.tokenizer()?);
    let text = corpus(file, Corpus::builtin, model.checkpoint())?;
    let length = 512.min(model.config.max_positions);
    let rule = BosMode::Auto.settle(tokenizer, model.config.family.needs_bos, BosHabit::Window)?;
    let tokens = source.document_tokens(&text, chunks.map_or(usize::MAX, |chunks| chunks.saturating_mul(length)))?;
    let mut windows: Vec<Vec<u32>> =
        tokens.chunks_exact(length).take(chunks.unwrap_or(usize::MAX)).map(<[u32]>::to_vec).collect();
    if let BosRule::Window(bos) | BosRule::Once(bos) = rule {
        windows.iter_mut().for_each(|window| window[0] = bos);
    }
    let name = file.map_or("the built-in text".into(), |f| f.display().to_string());
    if windows.is_empty() {
        bail!("{name} has {} tokens; at least {length} are needed", tokens.len());
    }
    Ok((name, windows))
}
