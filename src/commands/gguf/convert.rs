//! `quantkit convert`: a GGUF file becomes a Hugging Face folder again.

use std::error::Error;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::super::open::open;
use crate::backend::cpu::Cpu;
use crate::backend::weight::Weight;
use crate::cli::args::{ConvertArgs, ConvertTo, FloatArg};
use crate::cli::interrupt;
use crate::cli::print::{Printer, report_as};
use crate::format;
use crate::format::atomic::OutputFolder;
use crate::format::pretty;
use crate::format::safetensors::{TensorSpec, write_sharded};
use crate::num::size::bytes;
use crate::tensor::{Bytes, Dtype, narrowed};

pub fn run(args: &ConvertArgs, printer: Printer) -> Result<()> {
    // One form for now.
    let ConvertTo::Safetensors = args.to;
    if !format::is_file(&args.file) {
        format::refuse_foreign(&args.file)?;
        bail!("`{}` is no GGUF file; `convert` makes a folder of one", args.file.display());
    }
    let source = open(&args.file, Arc::new(Cpu), printer)?;
    let (model, checkpoint) = (&source.model, source.model.checkpoint());
    let (dtype, short) = match args.dtype {
        FloatArg::F32 => (Dtype::F32, "f32"),
        FloatArg::F16 => (Dtype::F16, "f16"),
        FloatArg::Bf16 => (Dtype::BF16, "bf16"),
    };
    let name = args.file.file_stem().unwrap_or_default().to_string_lossy();
    let out = args.out.clone().unwrap_or_else(|| format!("{name}-{short}").into());
    interrupt::listen();
    let folder = OutputFolder::create(&out)?;
    report_as(folder.path(), &out);
    let specs: Vec<TensorSpec> = checkpoint
        .tensors()
        .iter()
        .map(|(name, entry)| TensorSpec::new(name.clone(), dtype, entry.shape.clone()))
        .collect();
    let written = write_sharded(folder.path(), specs, args.max_shard_size * 1_000_000, |spec: &TensorSpec| {
        interrupt::check()?;
        let values = match (&spec.shape[..], spec.name.strip_suffix(".weight")) {
            (&[rows, cols], Some(module)) => model.source().linear(module, rows, cols)?.to_f32(),
            (&[len], _) => checkpoint.vector(&spec.name, len)?,
            _ => return Err(Box::<dyn Error + Send + Sync>::from("a tensor of three dimensions")),
        };
        Ok(Bytes::from(narrowed(dtype, &values)))
    })?;
    for name in checkpoint.side_files()? {
        let mut text = checkpoint.side_text(&name)?.context("a file that was made")?;
        if name == "config.json" {
            let mut config = model.config.restated(checkpoint.config());
            config["torch_dtype"] = json!(match args.dtype {
                FloatArg::F32 => "float32",
                FloatArg::F16 => "float16",
                FloatArg::Bf16 => "bfloat16",
            });
            text = String::from_utf8(pretty(&config)).context("config.json")?;
        }
        folder.write(&name, text.as_bytes())?;
    }
    folder.commit()?;
    let blocks =
        model.blocks.iter().flat_map(|b| b.all_linears()).any(|l| matches!(l.weight.weight(), Weight::Ggml(_)));
    let object = json!({"folder": out, "bytes": written.total_size, "was_quantized": blocks});
    printer.object(&source.accounted(object))?;
    printer.text(format!("wrote {}: {} of {}", out.display(), bytes(written.total_size), dtype))?;
    if let Some(first) = model.config.unstated_biases().first() {
        printer.warn(format!(
            "no key of a {} config.json asks for biases as that of `{first}`: engines that go by the config leave them out",
            model.config.family.label
        ));
    }
    if blocks {
        printer.note("its weights were quantized: the folder holds what was left of them");
    }
    Ok(())
}
