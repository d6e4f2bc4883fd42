//! `inspect --verify`: files against the hashes of their manifest, or, where there is none, against what their headers
//! and configs say of them.

use std::path::Path;

use anyhow::Result;
use rayon::prelude::*;

use super::facts::{Against, Facts, Verification};
use crate::checkpoint::Checkpoint;
use crate::cli::interrupt;
use crate::format;
use crate::format::gguf::second_reader;
use crate::format::gguf::{parse::Tensor, read::GgufFile};
use crate::format::manifest::{self, verify_manifest};
use crate::model::config::ModelConfig;

/// Blocks that are decoded at once.
const BLOCKS_AT_ONCE: usize = 4096;

/// Checks the files; `None` where a manifest that is damaged itself says nothing of them.
pub fn verified(path: &Path, facts: &Facts) -> Result<Option<Verification>> {
    let dir = Checkpoint::salvage(path).map(|(checkpoint, _)| checkpoint.dir().to_path_buf());
    if let Some(dir) = dir.ok().filter(|dir| dir.join(manifest::FILE).exists()) {
        let Some(manifest) = &facts.manifest else { return Ok(None) };
        let mismatches = verify_manifest(&dir)?.iter().map(ToString::to_string).collect();
        return Ok(Some(Verification { against: Against::Manifest, files: manifest.output_files, mismatches }));
    }
    interrupt::listen();
    let files = facts.files.len();
    let mismatches = match (facts.damage.is_empty(), format::is_file(path)) {
        // The headers are not reliable.
        (false, _) => Vec::new(),
        (true, true) => blocks(path)?,
        (true, false) => folder(path)?,
    };
    Ok(Some(Verification { against: Against::Structure, files, mismatches }))
}

/// Values of a folder that are not finite, and linears that cannot be loaded in the shapes of the config.
fn folder(path: &Path) -> Result<Vec<String>> {
    let checkpoint = Checkpoint::open(path)?;
    let mut out: Vec<String> = Vec::new();
    // Masks of other parts of a multimodal model may hold infinities.
    let config = ModelConfig::stated_by(&checkpoint).ok();
    let reads = |tensor: &str| config.as_ref().is_none_or(|config| config.reads(tensor));
    for found in checkpoint.non_finite().into_iter().filter(|found| reads(&found.tensor)) {
        let file = checkpoint.tensors().get(&found.tensor).map_or("", |entry| &*entry.file);
        out.push(not_finite(&found.tensor, file, found.count, found.first));
    }
    // What is not read has been named, and its tensors are of no known meaning.
    let Ok(opened) = format::open(checkpoint) else { return Ok(out) };
    let checkpoint = opened.source.checkpoint();
    let Ok(config) = ModelConfig::stated_by(checkpoint) else { return Ok(out) };
    let quantized = |module: &str| opened.quantization.as_ref().is_some_and(|q| q.schemes.contains_key(module));
    for (module, rows, cols) in config.linears().into_iter().filter(|(module, ..)| quantized(module)) {
        interrupt::check()?;
        if let Err(error) = opened.source.linear(&module, rows, cols) {
            out.push(error.to_string());
        }
    }
    Ok(out)
}

/// What gguf-rs reads differently, and tensors whose blocks decode to values that are not finite.
fn blocks(path: &Path) -> Result<Vec<String>> {
    let file = GgufFile::open(path)?;
    let mut out: Vec<String> = file.parts().iter().flat_map(|part| second_reader::differences(part)).collect();
    for tensor in file.tensors() {
        interrupt::check()?;
        let (count, first) = scan(tensor);
        if count > 0 {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            out.push(not_finite(&tensor.name, &name, count, first));
        }
    }
    Ok(out)
}

/// How many values of a tensor are no numbers, and the first of them.
fn scan(tensor: &Tensor) -> (usize, usize) {
    let (block, size) = (tensor.kind.block(), tensor.kind.bytes());
    let pieces = tensor.bytes.par_chunks(BLOCKS_AT_ONCE * size).enumerate();
    let of = |(at, bytes): (usize, &[u8])| {
        let mut values = vec![0.0; bytes.len() / size * block];
        tensor.kind.decode(bytes, &mut values);
        let mut bad = values.iter().enumerate().filter(|(_, value)| !value.is_finite()).map(|(i, _)| i);
        let first = bad.next().map_or(usize::MAX, |i| at * BLOCKS_AT_ONCE * block + i);
        (usize::from(first != usize::MAX) + bad.count(), first)
    };
    pieces.map(of).reduce(|| (0, usize::MAX), |a, b| (a.0 + b.0, a.1.min(b.1)))
}

fn not_finite(tensor: &str, file: &str, count: usize, first: usize) -> String {
    format!("tensor `{tensor}` in `{file}` holds {count} values that are not finite, the first at {first}")
}
