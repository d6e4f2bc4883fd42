//! `quantkit gguf`, `quantkit imatrix`, `quantkit convert`: models to and from GGUF files.

use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::accounted;
use super::device::backend;
use super::quantize::summary::{gate, perplexities};
use crate::backend::cuda::CudaOptions;
use crate::cli::args::{ConvertArgs, ConvertTo, FloatArg, GgufArgs, ImatrixArgs, ImatrixForm};
use crate::cli::print::Printer;
use crate::format::gguf::write::parse_size;
use crate::num::size::bytes;
use crate::pipeline::gguf::{self, ConversionOptions, GgufOptions, ImportanceSource};
use crate::pipeline::open::open;
use crate::pipeline::quantize::Forecast;
use crate::pipeline::source::locate;
use crate::tensor::Dtype;

/// The options of the pipeline.
fn options(args: &GgufArgs) -> Result<GgufOptions> {
    let max_part_bytes = match &args.split_max_size {
        Some(text) => Some(parse_size(text).context("--split-max-size is a number of bytes, or one with M or G")?),
        None => None,
    };
    let imatrix = args.imatrix.as_ref().map(|file| match &**file {
        "auto" => ImportanceSource::Auto,
        file => ImportanceSource::File(file.into()),
    });
    Ok(GgufOptions {
        kind: args.kind,
        out: args.out.clone(),
        overwrite: args.overwrite,
        imatrix,
        error_feedback: args.error_feedback,
        calib: args.calib.clone(),
        chunks: args.chunks,
        tensor_types: args.tensor_types.clone(),
        output_tensor_type: args.output_tensor_type,
        token_embedding_type: args.token_embedding_type,
        leave_output_tensor: args.leave_output_tensor,
        pure: args.pure,
        no_fallback: args.no_fallback,
        max_part_bytes,
        evaluation: args.evaluation.settled(),
        pre: args.pre.clone(),
    })
}

pub fn run(args: &GgufArgs, printer: Printer) -> Result<()> {
    let began = Instant::now();
    let options = options(args)?;
    let located = locate(&args.model, printer)?;
    let device = backend(&args.model.device, CudaOptions::default(), printer)?;
    let made = gguf::write(&options, &located, device, printer)?;
    let names: Vec<String> = made.files.iter().map(|f| f.display().to_string()).collect();
    let mut object = json!({
        "files": names,
        "type": args.kind.name(),
        "bytes": made.bytes,
        "bits_per_weight": made.bits_per_weight,
        "share_changed_by_shape": made.share_changed,
        "tensors": made.kinds.iter().map(|(name, count)| (name.to_string(), json!(count))).collect::<serde_json::Map<_, _>>(),
        "seconds": began.elapsed().as_secs_f64(),
    });
    let listed = made.kinds.iter().map(|(name, count)| format!("{count} {name}")).collect::<Vec<_>>().join(", ");
    printer.text(format!(
        "wrote {}: {}, {:.2} bits per weight; tensors: {listed}",
        names.join(", "),
        bytes(made.bytes),
        made.bits_per_weight
    ))?;
    if made.share_changed > 0.0 {
        printer.text(format!(
            "{:.1} % of the weights have another type than {} would give them: their rows are no multiples of its blocks",
            made.share_changed * 100.0,
            args.kind.name()
        ))?;
    }
    if let Some(unread) = &made.unread {
        printer.text(format!("left out: {unread}"))?;
    }
    let instead = "leave --imatrix and --error-feedback out";
    let rose = made
        .perplexity
        .as_ref()
        .map(|measured| perplexities(args.kind.name(), measured, &args.evaluation, instead, &mut object, printer));
    let rose = rose.transpose()?;
    printer.object(&accounted(object, made.unread.as_ref()))?;
    gate(rose, &args.evaluation, &made.files[0])
}

/// What [`run`] would take.
pub fn forecast(args: &GgufArgs, printer: Printer) -> Result<Forecast> {
    let options = options(args)?;
    let located = locate(&args.model, printer)?;
    let device = backend(&args.model.device, CudaOptions::default(), printer)?;
    gguf::forecast(&options, &located, device, printer)
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
    let gguf::ImportanceOutcome { imatrix, text, windows, window } =
        gguf::gather(&source, args.calib.as_deref(), args.chunks, printer)?;
    match args.format {
        ImatrixForm::Gguf => imatrix.write_gguf(&out)?,
        ImatrixForm::Dat => imatrix.write_dat(&out)?,
    }
    let object = json!({"file": out, "weights": imatrix.entries.len(), "windows": windows, "text": text});
    printer.object(&accounted(object, source.unread.as_ref()))?;
    printer.text(format!(
        "wrote {}: importance of {} weights from {windows} windows of {window} tokens",
        out.display(),
        imatrix.entries.len()
    ))?;
    Ok(())
}

pub fn convert(args: &ConvertArgs, printer: Printer) -> Result<()> {
    // One form for now.
    let ConvertTo::Safetensors = args.to;
    let options = ConversionOptions {
        file: args.file.clone(),
        out: args.out.clone(),
        dtype: match args.dtype {
            FloatArg::F32 => Dtype::F32,
            FloatArg::F16 => Dtype::F16,
            FloatArg::Bf16 => Dtype::BF16,
        },
        max_shard_bytes: args.max_shard_size * 1_000_000,
    };
    let made = gguf::convert(&options, printer)?;
    let object = json!({"folder": made.folder, "bytes": made.bytes, "was_quantized": made.was_quantized});
    printer.object(&accounted(object, made.unread.as_ref()))?;
    printer.text(format!("wrote {}: {} of {}", made.folder.display(), bytes(made.bytes), options.dtype))?;
    if let Some((path, family)) = &made.unstated_bias {
        printer.warn(format!(
            "no key of a {family} config.json asks for biases as that of `{path}`: engines that go by the config leave them out"
        ));
    }
    if made.was_quantized {
        printer.note("its weights were quantized: the folder holds what was left of them");
    }
    Ok(())
}
