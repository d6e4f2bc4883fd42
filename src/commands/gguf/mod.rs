//! `quantkit gguf`, `quantkit imatrix`, `quantkit convert`: models to and from GGUF files.

mod calibrated;
mod convert;
mod coverage;
pub mod feedback;
mod forecast;
mod importance;
mod tensors;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::json;

pub use convert::run as convert;
pub use forecast::forecast;

use super::device::backend;
use super::few_tokens::{self, Found};
use super::open::{Runnable, corpus, locate, open};
use crate::backend::cuda::CudaOptions;
use crate::calibrate::corpus::Corpus;
use crate::cli::args::{GgufArgs, ImatrixArgs, ImatrixForm};
use crate::cli::interrupt;
use crate::cli::print::{Printer, Steps};
use crate::format;
use crate::format::gguf::file_type::FileType;
use crate::format::gguf::imatrix::Imatrix;
use crate::format::gguf::metadata::{self, describe};
use crate::format::gguf::names::{Architecture, ROPE_FACTORS};
use crate::format::gguf::parts;
use crate::format::gguf::pretokenizer;
use crate::format::gguf::read::GgufFile;
use crate::format::gguf::select::{
    Choice, ModelFacts, Options, is_quantized, kept, not_applied, parse_tensor_type, select,
};
use crate::format::gguf::value::Metadata;
use crate::format::gguf::write::{
    ImportanceNote, Plan, TensorSpec, WriteError, Writer, layer, parse_size, quantized_metadata, require_free,
};
use crate::model::tokenizer::{BosHabit, BosMode, BosRule};
use crate::num::ggml::GgmlType;
use crate::num::size::bytes;
use crate::pack::ggml::encode;
use tensors::Tensor;

/// Calibration windows of error feedback, unless told otherwise.
const FEEDBACK_CHUNKS: usize = 128;
/// What to do about too few of them.
const MORE_TEXT: &str = "give a longer text (--calib) or more --chunks";
/// Values encoded at once, so that memory is bounded whatever the model.
const VALUES_AT_ONCE: usize = 8 << 20;

pub fn run(args: &GgufArgs, printer: Printer) -> Result<()> {
    let began = Instant::now();
    let located = locate(&args.model, printer)?;
    let device = backend(&args.model.device, CudaOptions::default(), printer)?;
    let source = open(&located.dir, device, printer)?;
    if let Some(how) = source.quantized() {
        let again = if rounds(args) { ", and is rounded again" } else { "" };
        printer.warn(format!(
            "`{}` is quantized already ({how}): the lost precision does not come back{again}",
            located.dir.display()
        ));
    }
    let out = args.out.clone().unwrap_or_else(|| format!("{}-{}.gguf", located.name, args.kind.name()).into());
    free(&out, args, &located.dir)?;
    let max_part = match &args.split_max_size {
        Some(text) => Some(parse_size(text).context("--split-max-size is a number of bytes, or one with M or G")?),
        None => None,
    };
    if (args.calib.is_some() || args.chunks.is_some())
        && args.imatrix.as_deref() != Some("auto")
        && !args.error_feedback
    {
        bail!("--calib and --chunks are for `--imatrix auto` and `--error-feedback`");
    }
    interrupt::listen();
    let model = &source.model;
    let architecture = Architecture::of(model.config.family)?;
    let (mut own, rope_factors) = described(&located.dir, args, &source, printer)?;
    let all = tensors::of(model, architecture, rope_factors)?;
    if let Some(refused) = architecture.refused_biases(all.iter().map(|tensor| &*tensor.name)) {
        printer.warn(refused);
    }
    let choices = choose(&all, &source, architecture, args, printer)?;
    let planned = planned(&all, &choices)?;
    let imatrix = importance(args, &source, &planned, printer)?;
    if planned.iter().any(|(tensor, kind)| tensor.stored != *kind) {
        // What the source says of its importance is not true of this file.
        own.retain(|key| !key.starts_with("quantize.imatrix."));
    }
    let note = imatrix.as_ref().map(|given| ImportanceNote {
        file: given.file.clone(),
        dataset: given.imatrix.datasets.first().cloned(),
        entries: given.used as u32,
        chunks: given.imatrix.chunks,
    });
    let specs = planned.iter().map(|(tensor, kind)| TensorSpec::new(&*tensor.name, *kind, &*tensor.shape)).collect();
    let plan = Plan::new(&out, &quantized_metadata(&own, args.kind, note.as_ref()), specs, max_part)?;
    let size = plan.bytes();
    let mut output = Output {
        writer: if args.overwrite { Writer::replace(plan)? } else { Writer::create(plan)? },
        planned: &planned,
        next: 0,
        imatrix: imatrix.as_ref(),
        steps: printer.steps(args.kind.name(), planned.len() as u64),
    };
    if args.error_feedback {
        let (text, windows) =
            calibration(&source, args.calib.as_deref(), Some(args.chunks.unwrap_or(FEEDBACK_CHUNKS)))?;
        few_tokens::warn(model, windows.len() * windows[0].len(), Found::Hessians, MORE_TEXT, printer);
        printer.note(format!("error feedback: {} windows of {} tokens of {text}", windows.len(), windows[0].len()));
        calibrated::run(model, architecture, &windows, &mut output)?;
    }
    output.put_through(i64::MAX, &BTreeMap::new())?;
    let Output { writer, steps, .. } = output;
    drop(steps);
    let files = writer.finish()?;
    if args.overwrite {
        remove_earlier(&out, &files, &located.dir, printer)?;
    }
    summary(args, &source, (&files, size), &planned, &choices, began, printer)
}

/// Tensors with the types they will have, in the order of the file.
fn planned<'a>(all: &'a [Tensor], choices: &[Choice]) -> Result<Vec<(&'a Tensor, GgmlType)>> {
    let with_type = |choice: &Choice| {
        let tensor = all.iter().find(|t| t.name == choice.name).context("a tensor that was chosen")?;
        Ok((tensor, choice.kind.unwrap_or(kept(tensor.stored, &tensor.shape))))
    };
    choices.iter().map(with_type).collect()
}

/// Refuses before any work a file that would not be replaced after it.
fn free(out: &Path, args: &GgufArgs, source: &Path) -> Result<()> {
    if args.split_max_size.is_some() {
        // Parts have names of their own, which the plan tells.
        return Ok(());
    }
    if out.canonicalize().is_ok_and(|out| source.canonicalize().is_ok_and(|source| out == source)) {
        bail!("`{}` is the source; name another file with --out", out.display());
    }
    match require_free(out, args.overwrite) {
        Err(WriteError::Exists(_)) if require_free(out, true).is_ok() => {
            bail!("`{}` exists already; name another file with --out, or --overwrite it", out.display())
        }
        Err(WriteError::Exists(_)) => bail!("`{}` exists already; name another file with --out", out.display()),
        other => Ok(other?),
    }
}

/// Removes what an earlier run wrote to `out` in another number of parts; other files of such names stay.
fn remove_earlier(out: &Path, written: &[PathBuf], source: &Path, printer: Printer) -> Result<()> {
    let found = parts::earlier(out, written, source)?;
    let names = |paths: &[PathBuf]| match paths {
        [] => String::new(),
        [one] => format!("`{}`", one.display()),
        [first, more @ ..] => format!("`{}` and {} more", first.display(), more.len()),
    };
    for path in &found.replaced {
        std::fs::remove_file(path).with_context(|| format!("cannot remove `{}`", path.display()))?;
    }
    if !found.replaced.is_empty() {
        printer.note(format!("removed {}: the same model in another number of parts", names(&found.replaced)));
    }
    if !found.others.is_empty() {
        printer.note(format!("{} stay: they hold the source, another model or another type", names(&found.others)));
    }
    Ok(())
}

/// Whether any weight may be stored in fewer bits than F32, which holds all that a quantized source says.
fn rounds(args: &GgufArgs) -> bool {
    let mut own = [args.output_tensor_type, args.token_embedding_type].into_iter().flatten();
    args.kind != FileType::F32 || !args.tensor_types.is_empty() || own.any(|kind| kind != GgmlType::F32)
}

/// The file as it is written: tensors in the planned order.
struct Output<'a> {
    writer: Writer,
    planned: &'a [(&'a Tensor, GgmlType)],
    next: usize,
    imatrix: Option<&'a Given>,
    steps: Steps,
}

impl Output<'_> {
    /// Writes all tensors up to those of layer `last`; the bytes of some may be there already, rows as the source has
    /// them.
    fn put_through(&mut self, last: i64, encoded: &BTreeMap<String, Vec<u8>>) -> Result<()> {
        while let Some(&(tensor, kind)) = self.planned.get(self.next).filter(|(tensor, _)| layer(&tensor.name) <= last)
        {
            match encoded.get(&tensor.name) {
                Some(bytes) => self.writer.put(&tensor.name, &tensor.in_order(bytes))?,
                None => self.encode(tensor, kind)?,
            }
            self.steps.step(&format!("{} {}", tensor.name, kind.name()));
            self.next += 1;
        }
        Ok(())
    }

    fn encode(&mut self, tensor: &Tensor, kind: GgmlType) -> Result<()> {
        let importance = match self.imatrix {
            Some(given) if is_quantized(&tensor.name, &tensor.shape) => {
                given.imatrix.importance(&tensor.name, tensor.cols(), 1)?
            }
            _ => None,
        };
        let at_once = (VALUES_AT_ONCE / tensor.cols().max(1)).max(1);
        for first in (0..tensor.rows()).step_by(at_once) {
            interrupt::check()?;
            let count = at_once.min(tensor.rows() - first);
            let stored = if tensor.stored == kind { tensor.as_stored(first, count) } else { None };
            match stored {
                Some(stored) => self.writer.put(&tensor.name, &stored)?,
                None => {
                    let values = tensor.values(first, count);
                    let encoded = encode(kind, &values, tensor.cols(), importance.as_deref());
                    self.writer.put(&tensor.name, &encoded.with_context(|| format!("tensor `{}`", tensor.name))?)?;
                }
            }
        }
        Ok(())
    }
}

/// Importance that is used.
struct Given {
    /// The file it comes from, or `auto`.
    file: String,
    imatrix: Imatrix,
    /// How many of its entries are used.
    used: usize,
}

/// The importance of a file, or what is gathered now; `None` where no tensor uses it.
fn importance(
    args: &GgufArgs,
    source: &Runnable,
    planned: &[(&Tensor, GgmlType)],
    printer: Printer,
) -> Result<Option<Given>> {
    let Some(file) = &args.imatrix else {
        coverage::require(planned, args.error_feedback)?;
        return Ok(None);
    };
    let imatrix = if file != "auto" {
        Imatrix::open(Path::new(file))?
    } else if coverage::users(planned, args.error_feedback).any(|(tensor, _)| tensor.name.starts_with("blk.")) {
        coverage::require_outside_blocks(planned, args.error_feedback)?;
        gathered(args, source, printer)?
    } else {
        let why = if args.error_feedback { "--error-feedback gathers its own" } else { "no type here weighs by it" };
        printer.warn(format!("--imatrix auto: importance is not computed, {why}"));
        coverage::require(planned, args.error_feedback)?;
        return Ok(None);
    };
    let found = coverage::settle(file, &imatrix, planned, args.error_feedback, args.kind)?;
    found.warnings.iter().for_each(|warning| printer.warn(warning));
    Ok((found.used > 0).then(|| Given { file: file.clone(), imatrix, used: found.used }))
}

/// Importance on the calibration text.
fn gathered(args: &GgufArgs, source: &Runnable, printer: Printer) -> Result<Imatrix> {
    let (text, windows) = calibration(source, args.calib.as_deref(), args.chunks)?;
    // Error feedback takes no more windows of the same text, and warns itself.
    if !args.error_feedback {
        few_tokens::warn(&source.model, windows.len() * windows[0].len(), Found::Statistics, MORE_TEXT, printer);
    }
    printer.note(format!("importance: {} windows of {} tokens of {text}", windows.len(), windows[0].len()));
    importance::gather(&source.model, &windows, &text, &mut printer.steps("importance", windows.len() as u64))
}

/// Whole windows of the calibration text, each begun with BOS where the model wants one, as llama.cpp has them.
fn calibration(source: &Runnable, file: Option<&Path>, chunks: Option<usize>) -> Result<(String, Vec<Vec<u32>>)> {
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

/// The metadata of the file to be, and rope factors if it needs some: a GGUF file's own, or made of a folder.
fn described(
    path: &Path,
    args: &GgufArgs,
    source: &Runnable,
    printer: Printer,
) -> Result<(Metadata, Option<Vec<f32>>)> {
    if format::is_file(path) {
        let file = GgufFile::open(path)?;
        let factors = file.tensor(ROPE_FACTORS).map(|tensor| {
            let mut values = vec![0.0; tensor.len()];
            tensor.kind.decode(&tensor.bytes, &mut values);
            values
        });
        let mut own = file.metadata().clone();
        let added = args.pre.as_deref().map(|name| pretokenizer::add(&mut own, name)).transpose()?;
        if added == Some(true) && (args.error_feedback || args.imatrix.as_deref() == Some("auto")) {
            bail!(
                "`{}` names no pre-tokenizer, so calibration would cut text as `default` does; write the file with \
                 `--pre` first, then calibrate on what was written",
                path.display()
            );
        }
        return Ok((own, factors));
    }
    let model = &source.model;
    let linears = model.blocks.iter().flat_map(|b| b.all_linears()).map(|l| (l.rows * l.cols) as u64).sum::<u64>();
    let tables = model.tables().iter().map(|(_, rows)| (rows * model.config.hidden) as u64).sum::<u64>();
    let options = metadata::Options {
        file_type: args.kind.number(),
        parameters: source.format.map(|_| linears + tables),
        pre_tokenizer: args.pre.as_deref(),
    };
    let described = describe(model.checkpoint(), &model.config, &options)?;
    described.warnings.iter().for_each(|warning| printer.warn(warning));
    Ok((described.metadata, described.rope_freqs))
}

fn choose(
    all: &[Tensor],
    source: &Runnable,
    architecture: &Architecture,
    args: &GgufArgs,
    printer: Printer,
) -> Result<Vec<Choice>> {
    let facts = ModelFacts::of(&source.model.config, architecture);
    let options = Options {
        output: args.output_tensor_type,
        token_embedding: args.token_embedding_type,
        tensors: args.tensor_types.iter().map(|text| parse_tensor_type(text)).collect::<Result<_, _>>()?,
        keep_output: args.leave_output_tensor,
        pure: args.pure,
        fallback: !args.no_fallback,
        importance: args.imatrix.is_some() || args.error_feedback,
        ..Options::new(args.kind)
    };
    let shapes: Vec<(String, Vec<usize>)> = all.iter().map(|t| (t.name.clone(), t.shape.clone())).collect();
    let choices = select(&shapes, &facts, &options)?;
    not_applied(&shapes, &options).iter().for_each(|what| printer.warn(what));
    Ok(choices)
}

fn summary(
    args: &GgufArgs,
    source: &Runnable,
    (files, size): (&[PathBuf], u64),
    planned: &[(&Tensor, GgmlType)],
    choices: &[Choice],
    began: Instant,
    printer: Printer,
) -> Result<()> {
    let total: usize = planned.iter().map(|(tensor, _)| tensor.len()).sum();
    let changed: usize = planned
        .iter()
        .zip(choices)
        .filter(|(_, choice)| choice.wanted.is_some())
        .map(|((tensor, _), _)| tensor.len())
        .sum();
    let data: f64 = planned
        .iter()
        .map(|(tensor, kind)| tensor.len() as f64 * kind.bytes() as f64 * 8.0 / kind.block() as f64)
        .sum();
    let share = changed as f64 / total.max(1) as f64;
    let mut kinds: Vec<(&str, usize)> = Vec::new();
    for (_, kind) in planned {
        match kinds.iter_mut().find(|(name, _)| *name == kind.name()) {
            Some((_, count)) => *count += 1,
            None => kinds.push((kind.name(), 1)),
        }
    }
    let names: Vec<String> = files.iter().map(|f| f.display().to_string()).collect();
    printer.object(&source.accounted(json!({
        "files": names,
        "type": args.kind.name(),
        "bytes": size,
        "bits_per_weight": data / total as f64,
        "share_changed_by_shape": share,
        "tensors": kinds.iter().map(|(name, count)| (name.to_string(), json!(count))).collect::<serde_json::Map<_, _>>(),
        "seconds": began.elapsed().as_secs_f64(),
    })))?;
    let listed = kinds.iter().map(|(name, count)| format!("{count} {name}")).collect::<Vec<_>>().join(", ");
    printer.text(format!(
        "wrote {}: {}, {:.2} bits per weight; tensors: {listed}",
        names.join(", "),
        bytes(size),
        data / total as f64
    ))?;
    if changed > 0 {
        printer.text(format!(
            "{:.1} % of the weights have another type than {} would give them: their rows are no multiples of its blocks",
            share * 100.0,
            args.kind.name()
        ))?;
    }
    if let Some(unread) = &source.unread {
        printer.text(format!("left out: {unread}"))?;
    }
    Ok(())
}

pub fn imatrix(args: &ImatrixArgs, printer: Printer) -> Result<()> {
    let located = locate(&args.model, printer)?;
    let source = open(&located.dir, backend(&args.model.device, CudaOptions::default(), printer)?, printer)?;
    let end = match args.format {
        ImatrixForm::Gguf => "gguf",
        ImatrixForm::Dat => "dat",
    };
    let out = args.out.clone().unwrap_or_else(|| format!("{}-imatrix.{end}", located.name).into());
    if out.exists() {
        bail!("`{}` exists already; name another file with --out", out.display());
    }
    let (text, windows) = calibration(&source, args.calib.as_deref(), args.chunks)?;
    few_tokens::warn(&source.model, windows.len() * windows[0].len(), Found::Statistics, MORE_TEXT, printer);
    interrupt::listen();
    let mut steps = printer.steps("importance", windows.len() as u64);
    let imatrix = importance::gather(&source.model, &windows, &text, &mut steps)?;
    drop(steps);
    match args.format {
        ImatrixForm::Gguf => imatrix.write_gguf(&out)?,
        ImatrixForm::Dat => imatrix.write_dat(&out)?,
    }
    let object = json!({"file": out, "weights": imatrix.entries.len(), "windows": windows.len(), "text": text});
    printer.object(&source.accounted(object))?;
    printer.text(format!(
        "wrote {}: importance of {} weights from {} windows of {} tokens",
        out.display(),
        imatrix.entries.len(),
        windows.len(),
        windows[0].len()
    ))?;
    Ok(())
}
