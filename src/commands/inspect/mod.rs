//! `quantkit inspect`: what a model folder, an artifact or a GGUF file is, told from headers and configs.

mod facts;
mod identity;
mod lines;
mod verify;

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Result, bail};
pub use identity::identity;
use serde_json::{Map, Value as Json, json};

use crate::checkpoint::Checkpoint;
use crate::cli::args::InspectArgs;
use crate::cli::exit::CheckFailed;
use crate::cli::print::Printer;
use crate::format::consumers::{CONSUMERS, Plan, check};
use crate::format::gguf::file_type::FileType;
use crate::format::gguf::names::{Architecture, ROPE_FACTORS};
use crate::format::gguf::read::GgufFile;
use crate::format::gguf::source::GgufSource;
use crate::format::gguf::value::{Metadata, Value};
use crate::format::{self, config, manifest};
use crate::model::presence::Unread;
use crate::num::ggml::GgmlType;
use crate::tensor::Dtype;
use facts::{ConsumerFacts, Facts, TensorFacts};
use lines::lines;

/// Characters of a metadata text that are shown.
const SHOWN: usize = 160;

/// Where a GGUF file keeps its chat template.
const TEMPLATE_KEY: &str = "tokenizer.chat_template";

/// What is at `path`.
fn look(path: &Path) -> Result<Facts> {
    if format::is_file(path) {
        return file(path);
    }
    format::refuse_foreign(path)?;
    if path.is_dir() {
        folder(path)
    } else if path.exists() {
        bail!("`{}` is neither a model folder nor a .gguf file", path.display())
    } else {
        bail!("`{}` does not exist", path.display())
    }
}

pub fn run(args: &InspectArgs, printer: Printer) -> Result<()> {
    let path = &args.path;
    let mut facts = look(path)?;
    if args.verify {
        facts.verification = verify::verified(path, &facts)?;
    }
    printer.object(&facts)?;
    for line in lines(&facts) {
        printer.text(line)?;
    }
    facts.warnings.iter().for_each(|warning| printer.warn(warning));
    let mismatches = facts.verification.iter().flat_map(|found| &found.mismatches);
    let wrong: Vec<&str> = facts.damage.iter().chain(mismatches).map(String::as_str).collect();
    match wrong.is_empty() {
        true => Ok(()),
        false => Err(CheckFailed(format!("`{}` is damaged: {}", path.display(), wrong.join("; "))).into()),
    }
}

fn folder(path: &Path) -> Result<Facts> {
    // What cannot be opened may still tell much; only without a config there is nothing to tell.
    let (checkpoint, damage) = match Checkpoint::open(path) {
        Ok(checkpoint) => (checkpoint, Vec::new()),
        Err(error) => Checkpoint::salvage(path).map_err(|_| error)?,
    };
    let mut facts = Facts { path: path.into(), format: "safetensors", ..Facts::default() };
    facts.damage = damage.iter().map(ToString::to_string).collect();
    facts.warnings.extend_from_slice(checkpoint.notes());
    let found = config::find(&checkpoint).unwrap_or_else(|error| {
        facts.damage.push(error.to_string());
        None
    });
    for name in checkpoint.files() {
        facts.file(&checkpoint.dir().join(&**name), name)?;
    }
    facts.tensors = by_type(checkpoint.tensors().values().map(|e| (e.dtype.name(), e.bytes.len() as u64)));
    let side = checkpoint.side_files()?;
    facts.tokenizer =
        ["tokenizer.json", "tokenizer.model"].into_iter().find(|name| side.iter().any(|s| s == name)).map(Into::into);
    if let Some(found) = &found {
        (facts.method, facts.layout) = (Some(found.method.clone()), Some(found.method.clone()));
        facts.quantization(&found.value);
        facts.quantization_config = Some(found.value.clone());
    }
    let broken = match checkpoint.dir().join(manifest::FILE).exists() {
        true => facts.manifest(checkpoint.dir()),
        false => None,
    };
    let config = facts.architecture(&checkpoint);
    facts.parameters(&checkpoint, config.as_ref());
    facts.cache_scales(&checkpoint);
    match format::open(checkpoint) {
        Ok(opened) => {
            facts.warnings.extend(opened.warnings);
            let stored = opened.quantization.as_ref();
            if let Some(stored) = stored {
                facts.schemes(stored, config.as_ref());
            }
            if let Some(config) = &config {
                facts.inputs = stored.map(|stored| stored.inputs.clone()).filter(|inputs| !inputs.is_empty());
                let quantized = |module: &str| stored.is_some_and(|q| q.schemes.contains_key(module));
                facts.missing(opened.source.checkpoint(), config, &quantized);
                facts.unread(opened.source.checkpoint(), config, opened.method.is_none());
                // Their rules are about folders that say `gptq`, `awq` and so on.
                let known = stored.filter(|_| !matches!(opened.method, Some("auto-round" | "modelopt")));
                facts.consumers = known.map(|stored| consumers(&stored.plan(config)));
            }
        }
        Err(unread) if unread.is_unread() => {
            facts.not_run();
            facts.warnings.push(unread.to_string());
        }
        // That of a config was found before.
        Err(error) if !facts.damage.contains(&error.to_string()) => facts.damage.push(error.to_string()),
        Err(_) => {}
    }
    if !facts.damage.is_empty() {
        facts.not_run();
    }
    // The model is none the worse for a manifest that cannot be read.
    facts.damage.extend(broken);
    Ok(facts)
}

fn file(path: &Path) -> Result<Facts> {
    let mut facts = Facts { path: path.into(), format: "gguf", ..Facts::default() };
    let (file, damage) = match GgufFile::salvage(path) {
        Err(error) if error.is_damage(path) => {
            facts.file(path, &path.file_name().unwrap_or_default().to_string_lossy())?;
            facts.damage.push(error.to_string());
            return Ok(facts);
        }
        opened => opened?,
    };
    facts.damage = damage.iter().map(ToString::to_string).collect();
    let metadata = file.metadata();
    for part in file.parts() {
        facts.file(part, &part.file_name().unwrap_or_default().to_string_lossy())?;
    }
    facts.tensors = by_type(file.tensors().iter().map(|t| (t.kind.name(), t.stored_bytes())));
    let weights = || file.tensors().iter().filter(|t| t.name != ROPE_FACTORS);
    let plain = |kind: GgmlType| matches!(kind, GgmlType::F32 | GgmlType::F16 | GgmlType::BF16);
    let sum = |blocks: bool| {
        let chosen = weights().filter(|t| !blocks || !plain(t.kind));
        chosen.fold((0, 0), |(count, size), t| (count + t.len() as u64, size + t.stored_bytes()))
    };
    facts.counted(sum(false), sum(true));
    facts.layout = (sum(true).0 > 0).then(|| "gguf".into());
    facts.method.clone_from(&facts.layout);
    let number = metadata.read::<u32>("general.file_type").unwrap_or_else(|error| {
        facts.warnings.push(error.to_string());
        None
    });
    facts.variant = number.map(|n| FileType::from_number(n).map_or(format!("file type {n}"), |t| t.name().into()));
    facts.tokenizer = text(metadata, "tokenizer.ggml.model");
    facts.chat_template = metadata.get(TEMPLATE_KEY).is_some();
    facts.chat_template_places = facts.chat_template.then(|| TEMPLATE_KEY.to_string()).into_iter().collect();
    facts.metadata = Some(summary(metadata));
    if !facts.damage.is_empty() {
        // Of what its headers say of the model, nothing runs.
        match GgufSource::outline(path, &file) {
            Ok((outline, warnings)) => {
                facts.warnings.extend(warnings);
                facts.architecture(&outline);
            }
            Err(error) => facts.warnings.push(format!("quantkit does not run this model: {error}")),
        }
        facts.architecture.name = text(metadata, "general.architecture");
        facts.not_run();
        return Ok(facts);
    }
    match format::open_file(path) {
        Ok(opened) => {
            facts.warnings.extend(opened.warnings);
            let checkpoint = opened.source.checkpoint();
            if let Some(config) = facts.architecture(checkpoint) {
                let blocks = |module: &str| {
                    let entry = checkpoint.tensors().get(&format!("{module}.weight"));
                    entry.is_some_and(|entry| entry.dtype == Dtype::Blocks)
                };
                facts.missing(checkpoint, &config, &blocks);
                facts.unread(checkpoint, &config, opened.method.is_none());
            }
            facts.consumers = Some(vec![llama_cpp(&file, facts.unread_tensors.as_ref())]);
        }
        Err(error) => facts.warnings.push(format!("quantkit does not run this model: {error}")),
    }
    // The file's own word, not that of the config made of it.
    facts.architecture.name = text(metadata, "general.architecture");
    if !facts.damage.is_empty() {
        facts.not_run();
    }
    Ok(facts)
}

/// What llama.cpp's loader takes: what is read here, but no tensor beside that.
fn llama_cpp(file: &GgufFile, unread: Option<&Unread>) -> ConsumerFacts {
    let architecture = text(file.metadata(), "general.architecture").and_then(|name| Architecture::parse(&name).ok());
    let names = || file.tensors().iter().map(|tensor| &*tensor.name);
    let biases = architecture.and_then(|architecture| architecture.refused_biases(names()));
    let surplus = unread.map(|unread| format!("a file with more tensors than the model has is refused: {unread}"));
    let refusals: Vec<String> = biases.into_iter().chain(surplus).collect();
    ConsumerFacts { name: "llama.cpp", title: "llama.cpp", loads: refusals.is_empty(), refusals }
}

/// A text of the metadata, if it is there and one.
fn text(metadata: &Metadata, key: &str) -> Option<String> {
    metadata.read::<&str>(key).ok().flatten().map(Into::into)
}

fn by_type<'a>(tensors: impl Iterator<Item = (&'a str, u64)>) -> Vec<TensorFacts> {
    let mut found: BTreeMap<&str, (usize, u64)> = BTreeMap::new();
    for (kind, bytes) in tensors {
        let entry = found.entry(kind).or_default();
        *entry = (entry.0 + 1, entry.1 + bytes);
    }
    found.into_iter().map(|(kind, (count, bytes))| TensorFacts { kind: kind.into(), count, bytes }).collect()
}

/// Which engines take an artifact.
fn consumers(plan: &Plan) -> Vec<ConsumerFacts> {
    let ask = |consumer| check(consumer, plan).into_iter().map(|refusal| refusal.to_string()).collect::<Vec<_>>();
    CONSUMERS
        .iter()
        .map(|consumer| {
            let refusals = ask(consumer);
            ConsumerFacts { name: consumer.name, title: consumer.title, loads: refusals.is_empty(), refusals }
        })
        .collect()
}

/// Metadata in a form that fits a screen.
fn summary(metadata: &Metadata) -> Map<String, Json> {
    let show = |value: &Value| match value {
        Value::U8(v) => json!(v),
        Value::I8(v) => json!(v),
        Value::U16(v) => json!(v),
        Value::I16(v) => json!(v),
        Value::U32(v) => json!(v),
        Value::I32(v) => json!(v),
        Value::F32(v) => json!(v),
        Value::Bool(v) => json!(v),
        Value::U64(v) => json!(v),
        Value::I64(v) => json!(v),
        Value::F64(v) => json!(v),
        Value::Text(text) => {
            let text = String::from_utf8_lossy(text.bytes());
            match text.char_indices().nth(SHOWN) {
                Some((end, _)) => json!(format!("{}...", &text[..end])),
                None => json!(text),
            }
        }
        Value::Array(array) => json!(format!("{} x {}", array.len(), value.kind().trim_start_matches("array of "))),
    };
    metadata.iter().map(|(key, value)| (key.to_string(), show(value))).collect()
}
