//! A GGUF file becomes a Hugging Face folder again.

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::super::observer::Reporter;
use super::super::open::open;
use crate::backend::cpu::Cpu;
use crate::backend::weight::Weight;
use crate::format;
use crate::format::atomic::OutputFolder;
use crate::format::pretty;
use crate::format::safetensors::{TensorSpec, write_sharded};
use crate::model::block::Linear;
use crate::model::presence::Unread;
use crate::tensor::{Bytes, Dtype, narrowed};

/// How a GGUF file becomes a folder.
#[derive(Clone, Debug)]
pub struct ConversionOptions {
    pub file: PathBuf,
    /// The folder; named after file and element type, in the current folder, where there is none.
    pub out: Option<PathBuf>,
    /// F32, F16 or BF16.
    pub dtype: Dtype,
    /// Largest size of one weight file.
    pub max_shard_bytes: u64,
}

/// A folder that was written.
pub struct Converted {
    pub folder: PathBuf,
    pub bytes: u64,
    /// Whether weights were blocks, so that the folder holds what rounding left of them.
    pub was_quantized: bool,
    pub unread: Option<Unread>,
    /// A linear with a bias that no key of the config asks for, and the label of the family.
    pub unstated_bias: Option<(String, &'static str)>,
}

/// Writes the model of a GGUF file as a Hugging Face folder.
///
/// # Errors
///
/// When the file is not a GGUF model, the folder is in the way, or the observer stops the work. Then nothing is left of it.
pub fn convert(options: &ConversionOptions, reporter: impl Into<Reporter>) -> Result<Converted> {
    let reporter = &reporter.into();
    let file = &options.file;
    if !format::is_file(file) {
        format::refuse_foreign(file)?;
        bail!("`{}` is no GGUF file; `convert` makes a folder of one", file.display());
    }
    let source = open(file, Arc::new(Cpu), reporter)?;
    let (model, checkpoint) = (&source.model, source.model.checkpoint());
    let (dtype, short, long) = match options.dtype {
        Dtype::F32 => (Dtype::F32, "f32", "float32"),
        Dtype::BF16 => (Dtype::BF16, "bf16", "bfloat16"),
        _ => (Dtype::F16, "f16", "float16"),
    };
    let name = file.file_stem().unwrap_or_default().to_string_lossy();
    let out = options.out.clone().unwrap_or_else(|| format!("{name}-{short}").into());
    reporter.stoppable();
    let folder = OutputFolder::create(&out)?;
    reporter.renamed(folder.path(), &out);
    let specs: Vec<TensorSpec> = checkpoint
        .tensors()
        .iter()
        .map(|(name, entry)| TensorSpec::new(name.clone(), dtype, entry.shape.clone()))
        .collect();
    let written = write_sharded(folder.path(), specs, options.max_shard_bytes, |spec: &TensorSpec| {
        reporter.check()?;
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
            config["torch_dtype"] = json!(long);
            text = String::from_utf8(pretty(&config)).context("config.json")?;
        }
        folder.write(&name, text.as_bytes())?;
    }
    folder.commit()?;
    let is_block = |linear: &Linear| matches!(linear.weight.weight(), Weight::Ggml(_));
    let was_quantized = model.blocks.iter().flat_map(|b| b.all_linears()).any(is_block);
    let unstated = model.config.unstated_biases().into_iter().next();
    let unstated_bias = unstated.map(|path| (path, model.config.family.label));
    Ok(Converted { folder: out, bytes: written.total_size, was_quantized, unread: source.unread, unstated_bias })
}
