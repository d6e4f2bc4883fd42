//! What a model's weights see: the mean square of each input channel over calibration text.

use std::collections::BTreeMap;

use anyhow::{Context, Result};

use crate::backend::spans_of;
use crate::cli::interrupt;
use crate::cli::print::Steps;
use crate::format::gguf::imatrix::{CHUNK_SIZE, Entry, Imatrix};
use crate::format::gguf::names::Architecture;
use crate::model::{Model, ModelError};

/// Windows taken through a layer at once.
const WINDOWS: usize = 8;

/// Gathers importance over whole windows of tokens, as llama.cpp's tool does: sums of squares of the inputs of every
/// linear of the blocks.
pub fn gather(model: &Model, windows: &[Vec<u32>], text: &str, steps: &mut Steps) -> Result<Imatrix> {
    let architecture = Architecture::of(model.config.family)?;
    let backend = model.backend();
    let mut sums: BTreeMap<String, (Vec<f64>, u64)> = BTreeMap::new();
    for (done, windows) in windows.chunks(WINDOWS).enumerate() {
        interrupt::check()?;
        let sequences: Vec<&[u32]> = windows.iter().map(Vec::as_slice).collect();
        let mut chunks = [model.embed(&sequences, spans_of(sequences.iter().map(|s| s.len())))?];
        for block in &model.blocks {
            model.enter(block)?;
            block.run::<ModelError>(model, &mut chunks, None, &mut |stage, inputs| {
                for x in inputs {
                    let squares = backend.squares(x)?;
                    for linear in block.linears(stage) {
                        let (sum, tokens) = sums.entry(linear.path.clone()).or_insert_with(|| (vec![0.0; x.cols], 0));
                        sum.iter_mut().zip(&squares).for_each(|(sum, square)| *sum += square);
                        *tokens += x.rows as u64;
                    }
                }
                Ok(None)
            })?;
            model.leave(block);
        }
        steps.set((done * WINDOWS + sequences.len()) as u64, 0);
    }
    let mut imatrix = Imatrix {
        datasets: vec![text.into()],
        chunks: Some(windows.len() as u32),
        chunk_size: windows.first().map_or(CHUNK_SIZE, |window| window.len() as u32),
        entries: BTreeMap::new(),
    };
    for (path, (sum, tokens)) in sums {
        let name = architecture.to_gguf(&format!("{path}.weight"))?.context("a linear without a place in GGUF")?;
        if let Some(channel) = sum.iter().position(|s| !s.is_finite()) {
            return Err(ModelError::NonFinite { path: format!("the input of {path}, channel {channel}") }.into());
        }
        let entry = Entry { sums: sum.into_iter().map(|s| s as f32).collect(), counts: vec![tokens as f32] };
        imatrix.entries.insert(name, entry);
    }
    Ok(imatrix)
}
