//! The finished folder: every source tensor copied or replaced, side files, configs, manifest.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::super::observer::Reporter;
use super::super::options::{OutputOptions, Resume};
use super::job::cache_spec;
use super::modules::Modules;
use super::work::Work;
use crate::format::atomic::OutputFolder;
use crate::format::config::config_json;
use crate::format::kind::KvScales;
use crate::format::layout::{Layout, laid_out};
use crate::format::manifest::{self, Calibration, FileRecord, Manifest};
use crate::format::safetensors::{INDEX, Shard, TensorSpec, write_sharded};
use crate::format::{pretty, replace};
use crate::model::Model;
use crate::recipe::Recipe;

/// The tensors of the artifact: quantized linears replace `weight` by theirs, everything else stays but a head that
/// repeats the embedding. Scales for a cache come on top.
pub fn specs(model: &Model, modules: &Modules, layout: &dyn Layout, kv_cache: Option<KvScales>) -> Vec<TensorSpec> {
    let source = model.checkpoint().tensors().iter().filter(|(name, _)| !model.config.is_repeated(name));
    let source = source.map(|(name, entry)| TensorSpec::new(name.clone(), entry.dtype, entry.shape.clone()));
    let mut specs = laid_out(source, &modules.modules, layout);
    for (block, kind) in model.blocks.iter().flat_map(|block| kv_cache.map(|kind| (block, kind))) {
        let heads = model.config.kv_heads;
        specs.extend(["k_scale", "v_scale"].map(|name| cache_spec(&block.path, name, kind, heads)));
    }
    specs
}

/// What the artifact's folder is filled with.
pub struct Contents<'a> {
    pub model: &'a Model,
    pub layout: &'a dyn Layout,
    pub source_files: Vec<FileRecord>,
    pub modules: &'a Modules,
    pub recipe: &'a Recipe,
    pub quantization: &'a Value,
    pub reports: Value,
    pub transforms: Value,
    pub work: &'a Work,
    pub reporter: &'a Reporter,
}

/// Fills `folder`; returns the size of the weight files.
pub fn fill(folder: &OutputFolder, contents: &Contents) -> Result<u64> {
    let Contents { model, layout, modules, recipe, quantization, work, .. } = contents;
    let source = model.checkpoint();
    let mut stored = BTreeMap::new();
    for index in 0..model.blocks.len() {
        let finished = work.load(index)?.context("a finished block has disappeared from the work folder")?;
        stored.extend(finished.opened.source.checkpoint().tensors().clone());
    }
    let sharded = write_sharded(
        folder.path(),
        specs(model, modules, *layout, recipe.method.kv_cache),
        recipe.max_shard_bytes,
        |spec: &TensorSpec| {
            contents.reporter.check()?;
            let entry = stored.get(&spec.name).or_else(|| source.tensors().get(&spec.name));
            // Not `anyhow::Error`, which would hide the cause that decides the exit code.
            entry.map(|e| e.bytes.clone()).ok_or_else(|| Box::<dyn Error + Send + Sync>::from("it has no data"))
        },
    )?;
    let mut outputs = sharded.files;
    let config = config_json(&model.config.restated(source.config()), quantization);
    outputs.push(folder.write("config.json", &pretty(&config))?);
    if let Some(file) = layout.side_file() {
        outputs.push(folder.write(file, &pretty(quantization))?);
    }
    for name in source.side_files()? {
        if name == "config.json" || Some(&name[..]) == layout.side_file() {
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
    let of_source = |fits: &dyn Fn(&String) -> bool| -> Vec<&String> {
        let kept = |name: &&String| !is_quantized(name, modules) && !model.config.is_repeated(name);
        source.tensors().keys().filter(|name| kept(name) && fits(name)).collect()
    };
    let manifest = Manifest {
        tool: concat!("quantkit ", env!("CARGO_PKG_VERSION")).into(),
        options: serde_json::to_value(recipe)?,
        source: contents.source_files.clone(),
        calibration,
        outputs,
        modules: json!({
            "quantized": contents.reports,
            "scaled": contents.transforms,
            "floating_point": modules.modules.iter().filter(|m| m.scheme.is_none()).map(|m| &m.name).collect::<Vec<_>>(),
            "changed_by_shape": modules.notes,
            "folded_tensors": of_source(&|name| stored.contains_key(name)),
            "copied_tensors": of_source(&|name| !stored.contains_key(name)),
        }),
    };
    manifest.write(folder.path())?;
    Ok(sharded.total_size)
}

fn is_quantized(tensor: &str, modules: &Modules) -> bool {
    tensor.strip_suffix(".weight").is_some_and(|module| modules.scheme(module).is_some())
}

/// Refuses files of the artifact to come whose names the user's own files in `target` have.
pub fn refuse_collisions(target: &Path, shards: &[Shard], model: &Model, layout: &dyn Layout) -> Result<()> {
    let side = model.checkpoint().side_files()?;
    let names = shards.iter().map(|shard| &*shard.file).chain(side.iter().map(|name| &**name));
    let own = ["config.json", manifest::FILE].into_iter().chain(layout.side_file());
    let index = Some(INDEX).filter(|_| shards.len() > 1);
    Ok(replace::refuse_collisions(target, names.chain(own).chain(index))?)
}

/// Refuses to replace what the user has changed in an older artifact; a recipe reports that and replaces it.
pub fn refuse_changed(output: &OutputOptions, target: &Path) -> Result<()> {
    match output.overwrite && output.resume != Resume::IfSame {
        true => Ok(replace::refuse_changed(target)?),
        false => Ok(()),
    }
}

/// Whether `dir` is an artifact of ours, which may be replaced when the user says so.
pub fn is_ours(dir: &Path) -> bool {
    Manifest::read(dir).is_ok()
}
