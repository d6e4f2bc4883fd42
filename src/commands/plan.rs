//! `quantkit plan`: what a model would take in every format, and how many sequences fit beside it.

use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::backend::cache::{BLOCK, CacheType};
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::cli::parse::Reserve;
use crate::cli::planning::PlanArgs;
use crate::cli::print::Printer;
use crate::engine::capacity::{sequence_bytes, sequences, token_bytes};
use crate::format::gguf::source::GgufSource;
use crate::format::gguf::{parse::Tensor, read::GgufFile};
use crate::format::sizes::{self, Size, Source};
use crate::format::{self, config};
use crate::hub::{self, HubOptions};
use crate::model::config::ModelConfig;
use crate::model::presence::Unread;
use crate::num::size::bytes;
use crate::pipeline::source::{ModelSource, locate, transfer};
use crate::scheme::GroupSize;
use crate::tensor::Dtype;

/// The types of the cache that are planned with; both of FP8 are of one size.
const CACHES: [CacheType; 3] = [CacheType::F16, CacheType::Fp8E4m3, CacheType::Int8];

/// What `--json` prints: these keys, always all of them, `null` for what was not asked for.
#[derive(Debug, Serialize)]
struct Plan {
    model: String,
    /// Whether sizes come from tensor headers; otherwise from the config alone.
    from_headers: bool,
    parameters: u64,
    /// Bytes of the tensors that are there.
    stored_bytes: Option<u64>,
    /// Tokens of a sequence.
    context: usize,
    memory: Option<Memory>,
    caches: Vec<Cache>,
    weights: Vec<Weights>,
    /// Tensors that the language model does not read; artifacts of safetensors copy them.
    unread_tensors: Option<Unread>,
    warnings: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Memory {
    bytes: u64,
    /// Kept free for activations and the runtime.
    reserve_bytes: u64,
    /// Tokens that share a block of the cache.
    block_tokens: usize,
}

#[derive(Debug, Serialize)]
struct Cache {
    #[serde(rename = "type")]
    kind: CacheType,
    bytes_per_token: u64,
    /// Of a whole sequence, in blocks, all layers alike.
    bytes_per_sequence: u64,
    /// The same where sliding layers keep no more than their window; `null` where that is no less.
    bytes_per_sequence_windowed: Option<u64>,
}

#[derive(Debug, Serialize)]
struct Weights {
    #[serde(flatten)]
    size: Size,
    /// Sequences that fit beside them, by type of the cache; `null` without `--memory`, or if not even the weights do.
    sequences: Option<Sequences>,
}

#[derive(Debug, Serialize)]
struct Sequences {
    f16: u64,
    fp8: u64,
    int8: u64,
}

/// What is to be planned with.
struct Found {
    name: String,
    checkpoint: Checkpoint,
    /// Whether its weights are plain floats, so that headers tell what artifacts would have.
    plain: bool,
    /// Bytes of the tensors that are there.
    stored: u64,
    /// What is wrong with the files, whose headers can be read all the same.
    warnings: Vec<String>,
}

pub fn run(args: &PlanArgs, printer: Printer) -> Result<()> {
    let found = find(args, printer)?;
    let config = ModelConfig::of(&found.checkpoint).with_context(|| format!("`{}`", found.name))?;
    let unread_tensors = config.unread(&found.checkpoint, found.plain);
    let mut warnings = found.warnings;
    warnings.extend(config.warnings.iter().cloned());
    warnings.extend(unread_tensors.as_ref().map(ToString::to_string));
    let source = match found.plain {
        true => Source::measured(&found.checkpoint, &config),
        false => Source::configured(&found.checkpoint.keys(), &config)?,
    };
    let context = args.context.unwrap_or(2048.min(config.max_positions));
    if context > config.max_positions {
        warnings.push(format!(
            "{context} tokens are more than the {} positions the model was made for",
            config.max_positions
        ));
    }
    let memory = args.memory.map(|bytes| Memory { bytes, reserve_bytes: args.reserve.of(bytes), block_tokens: BLOCK });
    let cache = |kind: CacheType| {
        let (whole, windowed) =
            (sequence_bytes(&config, kind, context, false), sequence_bytes(&config, kind, context, true));
        Cache {
            kind,
            bytes_per_token: token_bytes(&config, kind),
            bytes_per_sequence: whole,
            bytes_per_sequence_windowed: (windowed < whole).then_some(windowed),
        }
    };
    let group_size = GroupSize::new(args.group_size).context("a group size is -1 or positive")?;
    let stored = found.stored;
    let mut all = sizes::all(&source, &config, group_size);
    if stored > 0 && !found.plain {
        let bits = stored as f64 * 8.0 / source.parameters().max(1) as f64;
        let (bytes, bits_per_weight) = (Some(stored), Some(bits));
        all.insert(0, Size { name: "stored".into(), command: None, bytes, bits_per_weight, note: None });
    }
    let weights = all.into_iter().map(|size| {
        let free = memory
            .as_ref()
            .zip(size.bytes)
            .and_then(|(memory, weights)| (memory.bytes - memory.reserve_bytes).checked_sub(weights));
        let fit = |free: u64| {
            let [f16, fp8, int8] = CACHES.map(|kind| sequences(&config, kind, free, context));
            Sequences { f16, fp8, int8 }
        };
        Weights { size, sequences: free.map(fit) }
    });
    let plan = Plan {
        model: found.name,
        from_headers: source.measured,
        parameters: source.parameters(),
        stored_bytes: (stored > 0).then_some(stored),
        context,
        caches: CACHES.map(cache).into(),
        weights: weights.collect(),
        memory,
        unread_tensors,
        warnings,
    };
    plan.warnings.iter().for_each(|warning| printer.warn(warning));
    printer.object(&plan)?;
    for line in lines(&plan, args.reserve) {
        printer.text(line)?;
    }
    Ok(())
}

/// The model, without its weights if they are not here.
fn find(args: &PlanArgs, printer: Printer) -> Result<Found> {
    if let Some(spec) = &args.model {
        let path = Path::new(spec);
        if path.is_file() && !format::is_file(path) {
            // A config that lies alone; one with another name has no place in a folder.
            let text = std::fs::read(path).with_context(|| format!("cannot read `{spec}`"))?;
            let json = serde_json::from_slice(&text)
                .with_context(|| format!("`{spec}` is no config.json; give that, a model folder or a .gguf file"))?;
            let dir = path.parent().unwrap_or(Path::new("")).to_path_buf();
            let none = Default::default();
            let checkpoint = Checkpoint::assembled(dir, json, none, vec![], Default::default());
            return Ok(Found { name: spec.clone(), checkpoint, plain: false, stored: 0, warnings: vec![] });
        }
        if !path.exists() && hub::looks_like_id(spec) {
            let mut options = HubOptions::from_env()?;
            options.revision.clone_from(&args.revision);
            let dir = transfer(spec, printer, |events| Ok(hub::fetch_config(spec, &options, events)?))?;
            return opened(&dir, spec.clone());
        }
    }
    let source = ModelSource { model: args.model.as_deref(), revision: args.revision.as_deref() };
    let located = locate(source, printer)?;
    opened(&located.dir, located.name.clone())
}

fn opened(dir: &Path, name: String) -> Result<Found> {
    if format::is_file(dir) {
        // Sizes are in the headers; a file without its data will do.
        let (file, damage) = GgufFile::salvage(dir)?;
        let (checkpoint, mut warnings) = GgufSource::outline(dir, &file)?;
        let plain = checkpoint.tensors().values().all(|entry| entry.dtype != Dtype::Blocks);
        let stored = file.tensors().iter().map(Tensor::stored_bytes).sum();
        warnings.extend(damage.iter().map(|error| format!("{error}; sizes are those of the headers")));
        return Ok(Found { name, checkpoint, plain, stored, warnings });
    }
    let (checkpoint, weights) = match Checkpoint::open(dir) {
        Err(CheckpointError::NoWeights(..)) => (config_alone(dir)?, false),
        opened => {
            format::refuse_foreign(dir)?;
            (opened?, true)
        }
    };
    // A plan for weights that no command reads is useless.
    let again = if weights { Checkpoint::open(dir)? } else { Checkpoint::open_config(dir)? };
    if let Some(error) = format::open(again).err().filter(|error| weights || error.is_unread()) {
        return Err(error.into());
    }
    let quantized = config::find(&checkpoint)?.is_some();
    let stored = checkpoint.tensors().values().map(|entry| entry.bytes.len() as u64).sum();
    let warnings = checkpoint.notes().to_vec();
    Ok(Found { name, checkpoint, plain: weights && !quantized, stored, warnings })
}

/// A folder without safetensors weights: the config of a model is enough, whatever files of other programs lie beside it.
fn config_alone(dir: &Path) -> Result<Checkpoint> {
    let checkpoint = Checkpoint::open_config(dir);
    if !checkpoint.as_ref().is_ok_and(|checkpoint| ModelConfig::stated_by(checkpoint).is_ok()) {
        format::refuse_foreign(dir)?;
    }
    Ok(checkpoint?)
}

/// The plan for people.
fn lines(plan: &Plan, reserve: Reserve) -> Vec<String> {
    let from = if plan.from_headers { "tensor headers" } else { "its config" };
    let mut out = vec![format!("{}: {:.1} M parameters, by {from}", plan.model, plan.parameters as f64 / 1e6)];
    out.extend(plan.stored_bytes.map(|stored| format!("stored here: {}", bytes(stored))));
    for cache in &plan.caches {
        let windowed = cache.bytes_per_sequence_windowed.map_or(String::new(), |windowed| {
            format!(" ({} where sliding layers keep their window only)", bytes(windowed))
        });
        out.push(format!(
            "cache {:<5} {} a token, {} for {} tokens{windowed}",
            cache.kind.name(),
            bytes(cache.bytes_per_token),
            bytes(cache.bytes_per_sequence),
            plan.context
        ));
    }
    if let Some(memory) = &plan.memory {
        let share = match reserve {
            Reserve::Share(share) => format!("{:.3}", share * 100.0).trim_end_matches('0').trim_end_matches('.').into(),
            Reserve::Bytes(_) => format!("{:.1}", memory.reserve_bytes as f64 * 100.0 / memory.bytes as f64),
        };
        out.push(format!(
            "memory {:.2} GiB ({}); {} of it ({share} %) kept free for activations and the runtime",
            memory.bytes as f64 / (1u64 << 30) as f64,
            bytes(memory.bytes),
            bytes(memory.reserve_bytes)
        ));
        out.push(format!(
            "sequences of {} tokens beside the weights, in blocks of {}:",
            plan.context, memory.block_tokens
        ));
    }
    let fits = if plan.memory.is_some() { format!("{:>6} {:>6} {:>6}  ", "f16", "fp8", "int8") } else { String::new() };
    out.push(format!("{:<14} {:>10} {:>6}  {fits}written by", "weights", "size", "bits"));
    for Weights { size, sequences } in &plan.weights {
        let number = |n: Option<u64>| n.map_or("-".into(), |n| n.to_string());
        let fits = match (&plan.memory, sequences) {
            (None, _) => String::new(),
            (Some(_), fit) => {
                let [f16, fp8, int8] =
                    [fit.as_ref().map(|f| f.f16), fit.as_ref().map(|f| f.fp8), fit.as_ref().map(|f| f.int8)];
                format!("{:>6} {:>6} {:>6}  ", number(f16), number(fp8), number(int8))
            }
        };
        let note = size.note.as_ref().map_or(String::new(), |note| format!(" ({note})"));
        out.push(format!(
            "{:<14} {:>10} {:>6}  {fits}{}{note}",
            size.name,
            size.bytes.map_or("-".into(), bytes),
            size.bits_per_weight.map_or("-".into(), |bits| format!("{bits:.2}")),
            size.command.as_deref().unwrap_or("")
        ));
    }
    out.into_iter().map(|line| line.trim_end().to_string()).collect()
}
