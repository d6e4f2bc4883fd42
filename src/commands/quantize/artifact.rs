//! The finished folder: every source tensor copied or replaced, side files, configs, manifest.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::modules::Modules;
use super::work::Work;
use crate::checkpoint::Checkpoint;
use crate::cli::interrupt;
use crate::format::atomic::OutputFolder;
use crate::format::config::config_json;
use crate::format::gptq::linear_specs;
use crate::format::manifest::{Calibration, FileRecord, Manifest};
use crate::format::pretty;
use crate::format::safetensors::{TensorSpec, write_sharded};
use crate::recipe::Recipe;

/// The tensors of the artifact: quantized linears replace `weight` by theirs, everything else stays.
pub fn specs(source: &Checkpoint, modules: &Modules) -> Vec<TensorSpec> {
    let quantized: BTreeMap<&str, _> =
        modules.modules.iter().filter_map(|m| Some((m.name.as_str(), (m, m.scheme?)))).collect();
    let mut specs = Vec::new();
    for (name, entry) in source.tensors() {
        match name.strip_suffix(".weight").and_then(|module| quantized.get(module)) {
            Some((module, scheme)) => specs.extend(linear_specs(&module.name, module.rows, module.cols, *scheme)),
            None => specs.push(TensorSpec::new(name.clone(), entry.dtype, entry.shape.clone())),
        }
    }
    specs
}

/// What the artifact's folder is filled with.
pub struct Contents<'a> {
    pub source: &'a Checkpoint,
    pub source_files: Vec<FileRecord>,
    pub modules: &'a Modules,
    pub recipe: &'a Recipe,
    pub quantization: &'a Value,
    pub reports: Value,
    pub work: &'a Work,
    pub blocks: usize,
}

/// Fills `folder`; returns the size of the weight files.
pub fn fill(folder: &OutputFolder, contents: &Contents) -> Result<u64> {
    let Contents { source, modules, recipe, quantization, work, .. } = contents;
    let mut stored = BTreeMap::new();
    for index in 0..contents.blocks {
        let (opened, _) = work.load(index)?.context("a finished block has disappeared from the work folder")?;
        stored.extend(opened.source.checkpoint().tensors().clone());
    }
    let sharded = write_sharded(folder.path(), specs(source, modules), recipe.max_shard_bytes, |spec: &TensorSpec| {
        interrupt::check()?;
        let entry = stored.get(&spec.name).or_else(|| source.tensors().get(&spec.name));
        // Not `anyhow::Error`, which would hide the cause that decides the exit code.
        entry.map(|e| e.bytes.clone()).ok_or_else(|| Box::<dyn Error + Send + Sync>::from("it has no data"))
    })?;
    let mut outputs = sharded.files;
    outputs.push(folder.write("config.json", &pretty(&config_json(source.config(), quantization)))?);
    outputs.push(folder.write("quantize_config.json", &pretty(quantization))?);
    for name in source.side_files()? {
        if name == "config.json" {
            continue;
        }
        outputs.push(match source.made(&name) {
            Some(text) => folder.write(&name, text.as_bytes())?,
            None => folder.copy(&source.dir().join(&name), &name)?,
        });
    }
    outputs.sort_by(|a, b| a.file.cmp(&b.file));
    let calibration = recipe.calibration.as_ref().map(|c| Calibration {
        description: format!("{} windows of {} tokens of {}, {}", c.nsamples, c.seqlen, c.text, c.sampling),
        tokens_sha256: c.tokens_sha256.clone(),
    });
    let manifest = Manifest {
        tool: concat!("quantkit ", env!("CARGO_PKG_VERSION")).into(),
        options: serde_json::to_value(recipe)?,
        source: contents.source_files.clone(),
        calibration,
        outputs,
        modules: json!({
            "quantized": contents.reports,
            "floating_point": modules.modules.iter().filter(|m| m.scheme.is_none()).map(|m| &m.name).collect::<Vec<_>>(),
            "changed_by_shape": modules.notes,
            "copied_tensors": source.tensors().keys().filter(|name| !is_quantized(name, modules)).collect::<Vec<_>>(),
        }),
    };
    manifest.write(folder.path())?;
    Ok(sharded.total_size)
}

fn is_quantized(tensor: &str, modules: &Modules) -> bool {
    tensor.strip_suffix(".weight").is_some_and(|module| modules.scheme(module).is_some())
}

/// Whether `dir` is an artifact of ours, which may be replaced when the user says so.
pub fn is_ours(dir: &Path) -> bool {
    Manifest::read(dir).is_ok()
}
