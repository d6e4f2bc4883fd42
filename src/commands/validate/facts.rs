//! What files tell, and what modules put out.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use serde_json::Value;

use super::super::task::Task;
use super::texts;
use crate::backend::cache::CacheType;
use crate::cli::interrupt;
use crate::cli::print::Printer;
use crate::evaluate::modules;
use crate::format;
use crate::format::gguf::read::GgufFile;
use crate::format::gguf::second_reader;
use crate::format::manifest::Manifest;
use crate::integrity::{self, Check, Integrity, Status, WeightError};
use crate::model::config::ModelConfig;
use crate::pipeline::observer::Progress;
use crate::pipeline::open::Runnable;
use crate::pipeline::quantize::ModuleReport;
use crate::pipeline::source::Located;
use crate::recipe::Recipe;
use crate::report::{CacheMemory, CalibrationTokens, ModuleError, Report, TokensSeen, WindowedCorpus};

/// Windows that modules are measured on.
const MODULE_WINDOWS: usize = 4;

/// Findings of one kind that are named; of the rest only the number is told.
const NAMED: usize = 8;

/// What is known of weights from files alone, by module.
pub type Weights = BTreeMap<String, WeightError>;

/// Holds the artifact's files against the reference's.
pub fn files(report: &mut Report, artifact: &Located, reference: &Located, printer: Printer) -> Result<Weights> {
    let mut steps = printer.steps("files", 0);
    let Integrity { accounting, findings } = integrity::check(&artifact.dir, &reference.dir, &mut |done, all| {
        steps.set(done as u64, all as u64);
        interrupt::check()
    })?;
    report.checks.extend(findings);
    report.checks.extend(read_by_gguf_rs(&artifact.dir));
    let mut weights = Weights::new();
    if let Some(accounting) = accounting {
        weights.extend(accounting.weights.iter().map(|weight| (weight.module.clone(), weight.clone())));
        report.accounting = Some(accounting.into());
    }
    if let Ok(manifest) = Manifest::read(&artifact.dir)
        && let Some(calibration) = manifest.calibration
    {
        tokens_seen(report, &manifest.modules, &weights);
        let recipe = serde_json::from_value::<Recipe>(manifest.options).ok().and_then(|recipe| recipe.calibration);
        report.calibration = Some(CalibrationTokens {
            description: calibration.description,
            tokens_sha256: calibration.tokens_sha256,
            tokens: recipe.map(|record| (record.nsamples * record.seqlen) as u64),
        });
    }
    Ok(weights)
}

/// Whether gguf-rs reads a GGUF file alike; `None` for folders, and for files that are damaged.
fn read_by_gguf_rs(path: &Path) -> Option<Check> {
    let file = GgufFile::open(path).ok().filter(|_| format::is_file(path))?;
    let mut differences = file.parts().iter().flat_map(|part| second_reader::differences(part));
    let (status, message) = match differences.next() {
        Some(first) => (Status::Fail, first),
        None => (Status::Pass, "gguf-rs reads the same keys and tensors".to_string()),
    };
    Some(Check { id: "second-reader".into(), status, message })
}

/// What the artifact says that its method saw of each module, and whether that was enough: of fewer tokens than it has
/// inputs, a Hessian has no full rank.
fn tokens_seen(report: &mut Report, modules: &Value, weights: &Weights) {
    let made: Vec<ModuleReport> = serde_json::from_value(modules["quantized"].clone()).unwrap_or_default();
    let seen = |module: &ModuleReport| {
        let inputs = weights.get(&module.module)?.shape[1] as u64;
        Some(TokensSeen { module: module.module.clone(), inputs, tokens: module.tokens? })
    };
    let all: Vec<TokensSeen> = made.iter().filter_map(seen).collect();
    // Other methods take ranges or a strength from what they see, for which few tokens may do.
    let with_hessian =
        |seen: &&TokensSeen| made.iter().any(|module| module.module == seen.module && module.damp_percent.is_some());
    let few: Vec<&TokensSeen> = all.iter().filter(with_hessian).filter(|seen| seen.tokens < seen.inputs).collect();
    if let Some(least) = all.iter().min_by_key(|seen| seen.tokens) {
        let (status, message) = match &few[..] {
            [] => (Status::Pass, format!("every module saw at least {} tokens of calibration", least.tokens)),
            [first, rest @ ..] => (
                Status::Warn,
                format!(
                    "`{}` saw {} tokens of calibration and has {} inputs{}: what their Hessians say of the rest is \
                     damping; calibrate on more text, or with a larger --nsamples or --seqlen",
                    first.module,
                    first.tokens,
                    first.inputs,
                    if rest.is_empty() {
                        String::new()
                    } else {
                        format!(", and {} more modules are like it", rest.len())
                    }
                ),
            ),
        };
        report.checks.push(Check { id: "calibration".into(), status, message });
    }
    if let Some(accounting) = &mut report.accounting {
        accounting.tokens_seen = all;
    }
}

/// Bytes of a token in the caches that engines have.
pub fn cache_memory(report: &mut Report, config: &ModelConfig) {
    if let Some(accounting) = &mut report.accounting {
        accounting.cache_memory = [CacheType::F16, CacheType::Fp8E4m3, CacheType::Int8]
            .map(|kind| CacheMemory {
                kind: kind.to_string(),
                bytes_per_token: kind.token_bytes(config.layers.len(), config.kv_heads, config.head_dim) as f64,
            })
            .into();
    }
}

/// Errors of modules, those that rounding does not explain, and activations beyond f16.
pub fn modules(
    report: &mut Report,
    artifact: &Runnable,
    reference: &Runnable,
    (task, weights): (&Task, &Weights),
    printer: Printer,
) -> Result<()> {
    let windows: Vec<&[u32]> = task.windows.iter().take(MODULE_WINDOWS).map(|window| &window.tokens[..]).collect();
    let mut steps = printer.steps("modules", 0);
    let errors = modules::measure(&artifact.model, &reference.model, &windows, &mut |done, all| {
        steps.set(done as u64, all as u64);
        interrupt::check()
    })?;
    let suspects = errors.suspects();
    for suspect in suspects.iter().take(NAMED) {
        report.checks.push(Check { id: "modules".into(), status: Status::Fail, message: suspect.message.clone() });
    }
    if suspects.len() > NAMED {
        let message = format!("so it is with {} more modules", suspects.len() - NAMED);
        report.checks.push(Check { id: "modules".into(), status: Status::Fail, message });
    }
    if suspects.is_empty() {
        let message = format!("the errors of {} modules are those of rounding", errors.modules.len());
        report.checks.push(Check { id: "modules".into(), status: Status::Pass, message });
    }
    report.checks.push(range(&errors));
    let corpus = texts::corpus(task);
    report.module_corpus = Some(WindowedCorpus { windows: windows.len(), tokens: errors.tokens as u64, ..corpus });
    report.modules = errors
        .modules
        .into_iter()
        .map(|module| {
            let weight = weights.get(&module.module);
            ModuleError::new(module, weight)
        })
        .collect();
    Ok(())
}

/// Whether engines that keep activations in f16 would overflow.
fn range(errors: &modules::Errors) -> Check {
    let beyond = errors.modules.iter().find(|module| module.overflows_f16());
    let hidden = errors.blocks.iter().map(|block| block.hidden_max).fold(0.0f32, f32::max);
    let (status, message) = match beyond {
        Some(module) => (
            Status::Warn,
            format!(
                "`{}` reads numbers up to {} and puts out up to {}: an engine that keeps activations in f16, which ends \
                 at 65504, overflows there; serve it in bfloat16",
                module.module, module.input_max, module.output_max
            ),
        ),
        None if hidden > 65504.0 => (
            Status::Warn,
            format!("hidden states reach {hidden}, beyond f16, which ends at 65504; serve it in bfloat16"),
        ),
        None => {
            let most = errors.modules.iter().map(|m| m.input_max.max(m.output_max)).fold(hidden, f32::max);
            (Status::Pass, format!("activations reach {most}, within f16"))
        }
    };
    Check { id: "range".into(), status, message }
}
