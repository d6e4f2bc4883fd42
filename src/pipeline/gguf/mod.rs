//! Models as GGUF files, and importance for them.

mod calibrated;
mod convert;
mod coverage;
mod forecast;
mod importance;
mod output;
mod plan;
mod proof;
mod tensors;
mod text;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Result, bail};

use super::few_tokens::{self, Found};
use super::measure::EvaluationText;
use super::observer::Reporter;
use super::open::{Runnable, open};
use super::options::Evaluation;
use super::quantize::Perplexities;
use super::source::Located;
use crate::backend::Backend;
use crate::format::gguf::file_type::FileType;
use crate::format::gguf::imatrix::Imatrix;
use crate::format::gguf::names::Architecture;
use crate::format::gguf::select::Choice;
use crate::format::gguf::write::{ImportanceNote, Plan, TensorSpec, Writer, quantized_metadata};
use crate::model::presence::Unread;
use crate::model::tokenizer::BosMode;
use crate::num::ggml::GgmlType;
pub use convert::{ConversionOptions, Converted, convert};
pub use forecast::forecast;
use importance::importance;
use output::Output;
use tensors::Tensor;
use text::{MORE_TEXT, calibration};

/// Calibration windows of error feedback, unless options say otherwise.
const FEEDBACK_CHUNKS: usize = 128;

/// How a model becomes a GGUF file.
#[derive(Clone, Debug)]
pub struct GgufOptions {
    pub kind: FileType,
    /// The file; named after model and type, in the current folder, where there is none.
    pub out: Option<PathBuf>,
    /// Replace a GGUF file that is there.
    pub overwrite: bool,
    pub imatrix: Option<ImportanceSource>,
    /// Codes are chosen so that they make up for each other's errors.
    pub error_feedback: bool,
    /// The calibration text; the built-in one where there is none.
    pub calib: Option<PathBuf>,
    /// Windows of that text at most.
    pub chunks: Option<usize>,
    /// `REGEX=TYPE` by tensor name; the first match decides.
    pub tensor_types: Vec<String>,
    pub output_tensor_type: Option<GgmlType>,
    pub token_embedding_type: Option<GgmlType>,
    /// The output head keeps its type.
    pub leave_output_tensor: bool,
    /// One type for all tensors.
    pub pure: bool,
    /// Refuse tensors whose rows are not multiples of the blocks of their type, instead of taking another type.
    pub no_fallback: bool,
    /// Bytes of a part; one file where there is none.
    pub max_part_bytes: Option<u64>,
    /// Perplexity before and after; `None` measures nothing.
    pub evaluation: Option<Evaluation>,
    /// The name of the pre-tokenizer, where the source does not say which it is.
    pub pre: Option<String>,
}

impl GgufOptions {
    /// A file of one type of mixture with the default options.
    pub fn new(kind: FileType) -> Self {
        Self {
            kind,
            out: None,
            overwrite: false,
            imatrix: None,
            error_feedback: false,
            calib: None,
            chunks: None,
            tensor_types: Vec::new(),
            output_tensor_type: None,
            token_embedding_type: None,
            leave_output_tensor: false,
            pure: false,
            no_fallback: false,
            max_part_bytes: None,
            evaluation: Some(Evaluation::default()),
            pre: None,
        }
    }
}

/// Where importance comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImportanceSource {
    /// Computed on the calibration text.
    Auto,
    /// A file of `quantkit imatrix` or llama.cpp.
    File(String),
}

/// A file that was written.
pub struct GgufOutcome {
    pub files: Vec<PathBuf>,
    pub bytes: u64,
    pub bits_per_weight: f64,
    /// The share of the weights whose type is another than the file type wants, because their rows are not multiples of its
    /// blocks.
    pub share_changed: f64,
    /// How many tensors have each type, in the order of the file.
    pub kinds: Vec<(&'static str, usize)>,
    pub unread: Option<Unread>,
    /// `None` where nothing was to be measured.
    pub perplexity: Option<Perplexities>,
}

/// Writes `source` as a GGUF file.
///
/// # Errors
///
/// When options do not fit the model, data cannot be used, a file is in the way, or the observer stops the work. Then
/// nothing is left of the file.
pub fn write(
    options: &GgufOptions,
    located: &Located,
    backend: Arc<dyn Backend>,
    reporter: impl Into<Reporter>,
) -> Result<GgufOutcome> {
    let reporter = &reporter.into();
    let source = open(&located.dir, backend, reporter)?;
    warn_of_lost_precision(options, &source, located, reporter);
    let out = options.out.clone().unwrap_or_else(|| format!("{}-{}.gguf", located.name, options.kind.name()).into());
    plan::free(&out, options, &located.dir)?;
    let auto = options.imatrix == Some(ImportanceSource::Auto);
    if (options.calib.is_some() || options.chunks.is_some()) && !auto && !options.error_feedback {
        bail!("--calib and --chunks are for `--imatrix auto` and `--error-feedback`");
    }
    let text = options.evaluation.as_ref().map(|how| EvaluationText::open(how, BosMode::Auto, &source)).transpose()?;
    reporter.stoppable();
    let model = &source.model;
    let architecture = Architecture::of(model.config.family)?;
    let (mut own, rope_factors) = plan::described(&located.dir, options, &source, reporter)?;
    let all = tensors::of(model, architecture, rope_factors)?;
    if let Some(refused) = architecture.refused_biases(all.iter().map(|tensor| &*tensor.name)) {
        reporter.warn(refused);
    }
    let choices = plan::choose(&all, &source, architecture, options, reporter)?;
    let planned = plan::planned(&all, &choices)?;
    let before = text.as_ref().map(|text| text.before(&source, &located.dir, reporter)).transpose()?;
    let imatrix = importance(options, &source, &planned, reporter)?;
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
    let metadata = quantized_metadata(&own, options.kind, note.as_ref());
    let plan = Plan::new(&out, &metadata, specs, options.max_part_bytes)?;
    let size = plan.bytes();
    let mut output = Output {
        writer: if options.overwrite { Writer::replace(plan)? } else { Writer::create(plan)? },
        planned: &planned,
        next: 0,
        imatrix: imatrix.as_ref(),
        reporter,
        steps: reporter.steps(options.kind.name(), planned.len() as u64),
    };
    if options.error_feedback {
        let most = Some(options.chunks.unwrap_or(FEEDBACK_CHUNKS));
        let (text, windows) = calibration(&source, options.calib.as_deref(), most)?;
        few_tokens::warn(model, windows.len() * windows[0].len(), Found::Hessians, MORE_TEXT, reporter);
        reporter.note(format!("error feedback: {} windows of {} tokens of {text}", windows.len(), windows[0].len()));
        calibrated::run(model, architecture, &windows, &mut output)?;
    }
    output.put_through(i64::MAX, &BTreeMap::new())?;
    let Output { mut writer, steps, .. } = output;
    drop(steps);
    let parts = writer.close()?;
    parts.iter().for_each(|part| reporter.renamed(part, &out));
    let artifact = proof::read_back(&out, &parts, &source)?;
    let beside = imatrix.is_some() || options.error_feedback;
    let perplexity = text
        .as_ref()
        .zip(before)
        .map(|(text, before)| proof::measured(text, before, &source, &artifact, beside, reporter));
    let perplexity = perplexity.transpose()?;
    reporter.check()?;
    // Only what has passed gets the name.
    drop(artifact);
    let files = writer.finish()?;
    if options.overwrite {
        plan::remove_earlier(&out, &files, &located.dir, reporter)?;
    }
    Ok(GgufOutcome { perplexity, ..outcome(files, size, &planned, &choices, source.unread) })
}

fn warn_of_lost_precision(options: &GgufOptions, source: &Runnable, located: &Located, reporter: &Reporter) {
    if let Some(how) = source.quantized() {
        let again = if rounds(options) { ", and is rounded again" } else { "" };
        reporter.warn(format!(
            "`{}` is quantized already ({how}): the lost precision does not come back{again}",
            located.dir.display()
        ));
    }
}

/// Whether any weight may be stored in fewer bits than F32, which holds all that a quantized source says.
fn rounds(options: &GgufOptions) -> bool {
    let mut own = [options.output_tensor_type, options.token_embedding_type].into_iter().flatten();
    options.kind != FileType::F32 || !options.tensor_types.is_empty() || own.any(|kind| kind != GgmlType::F32)
}

fn outcome(
    files: Vec<PathBuf>,
    bytes: u64,
    planned: &[(&Tensor, GgmlType)],
    choices: &[Choice],
    unread: Option<Unread>,
) -> GgufOutcome {
    let total: usize = planned.iter().map(|(tensor, _)| tensor.len()).sum();
    let changed = planned.iter().zip(choices).filter(|(_, choice)| choice.wanted.is_some());
    let changed: usize = changed.map(|((tensor, _), _)| tensor.len()).sum();
    let bits =
        |(tensor, kind): &(&Tensor, GgmlType)| tensor.len() as f64 * kind.bytes() as f64 * 8.0 / kind.block() as f64;
    let data: f64 = planned.iter().map(bits).sum();
    let mut kinds: Vec<(&'static str, usize)> = Vec::new();
    for (_, kind) in planned {
        match kinds.iter_mut().find(|(name, _)| *name == kind.name()) {
            Some((_, count)) => *count += 1,
            None => kinds.push((kind.name(), 1)),
        }
    }
    GgufOutcome {
        files,
        bytes,
        bits_per_weight: data / total as f64,
        share_changed: changed as f64 / total.max(1) as f64,
        kinds,
        unread,
        perplexity: None,
    }
}

/// Importance on windows of a calibration text.
pub struct ImportanceOutcome {
    pub imatrix: Imatrix,
    pub text: String,
    pub windows: usize,
    /// Tokens of a window.
    pub window: usize,
}

/// Computes the importance of the input channels of every linear of the blocks, on at most `chunks` windows of `text`.
///
/// # Errors
///
/// When the text cannot be used, or the observer stops the work.
pub fn gather(
    source: &Runnable,
    text: Option<&std::path::Path>,
    chunks: Option<usize>,
    reporter: impl Into<Reporter>,
) -> Result<ImportanceOutcome> {
    let reporter = &reporter.into();
    let (text, windows) = calibration(source, text, chunks)?;
    few_tokens::warn(&source.model, windows.len() * windows[0].len(), Found::Statistics, MORE_TEXT, reporter);
    reporter.stoppable();
    let imatrix = importance::gather(&source.model, &windows, &text, reporter)?;
    Ok(ImportanceOutcome { imatrix, text, windows: windows.len(), window: windows[0].len() })
}
