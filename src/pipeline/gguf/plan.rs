//! What a file will hold: metadata, tensors, and a type for each.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::super::observer::Reporter;
use super::super::open::Runnable;
use super::tensors::Tensor;
use super::{GgufOptions, ImportanceSource};
use crate::format;
use crate::format::gguf::metadata::{self, describe};
use crate::format::gguf::names::{Architecture, ROPE_FACTORS};
use crate::format::gguf::parts;
use crate::format::gguf::read::GgufFile;
use crate::format::gguf::select::{Choice, ModelFacts, Options, kept, not_applied, parse_tensor_type, select};
use crate::format::gguf::tokenizer::add_pre_tokenizer;
use crate::format::gguf::value::Metadata;
use crate::format::gguf::write::{WriteError, require_free};
use crate::num::ggml::GgmlType;

/// Tensors with the types they will have, in the order of the file.
pub fn planned<'a>(all: &'a [Tensor], choices: &[Choice]) -> Result<Vec<(&'a Tensor, GgmlType)>> {
    let with_type = |choice: &Choice| {
        let tensor = all.iter().find(|t| t.name == choice.name).context("a tensor that was chosen")?;
        Ok((tensor, choice.kind.unwrap_or(kept(tensor.stored, &tensor.shape))))
    };
    choices.iter().map(with_type).collect()
}

/// Refuses before any work a file that would not be replaced after it.
pub fn free(out: &Path, options: &GgufOptions, source: &Path) -> Result<()> {
    if options.max_part_bytes.is_some() {
        // Parts have names of their own, which the plan tells.
        return Ok(());
    }
    if out.canonicalize().is_ok_and(|out| source.canonicalize().is_ok_and(|source| out == source)) {
        bail!("`{}` is the source; name another file with --out", out.display());
    }
    match require_free(out, options.overwrite) {
        Err(WriteError::Exists(_)) if require_free(out, true).is_ok() => {
            bail!("`{}` exists already; name another file with --out, or --overwrite it", out.display())
        }
        Err(WriteError::Exists(_)) => bail!("`{}` exists already; name another file with --out", out.display()),
        other => Ok(other?),
    }
}

/// Removes what an earlier run wrote to `out` in another number of parts; other files of such names stay.
pub fn remove_earlier(out: &Path, written: &[PathBuf], source: &Path, reporter: &Reporter) -> Result<()> {
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
        reporter.note(format!("removed {}: the same model in another number of parts", names(&found.replaced)));
    }
    if !found.others.is_empty() {
        reporter.note(format!("{} stay: they hold the source, another model or another type", names(&found.others)));
    }
    Ok(())
}

/// The metadata of the file to be, and rope factors if it needs some: a GGUF file's own, or made of a folder.
pub fn described(
    path: &Path,
    options: &GgufOptions,
    source: &Runnable,
    reporter: &Reporter,
) -> Result<(Metadata, Option<Vec<f32>>)> {
    if format::is_file(path) {
        let file = GgufFile::open(path)?;
        let factors = file.tensor(ROPE_FACTORS).map(|tensor| {
            let mut values = vec![0.0; tensor.len()];
            tensor.kind.decode(&tensor.bytes, &mut values);
            values
        });
        let mut own = file.metadata().clone();
        let added = options.pre.as_deref().map(|name| add_pre_tokenizer(&mut own, name)).transpose()?;
        if added == Some(true) && (options.error_feedback || options.imatrix == Some(ImportanceSource::Auto)) {
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
    let facts = metadata::Options {
        file_type: options.kind.number(),
        parameters: source.format.map(|_| linears + tables),
        pre_tokenizer: options.pre.as_deref(),
    };
    let described = describe(model.checkpoint(), &model.config, &facts)?;
    described.warnings.iter().for_each(|warning| reporter.warn(warning));
    Ok((described.metadata, described.rope_freqs))
}

/// The types of all tensors.
pub fn choose(
    all: &[Tensor],
    source: &Runnable,
    architecture: &Architecture,
    options: &GgufOptions,
    reporter: &Reporter,
) -> Result<Vec<Choice>> {
    let facts = ModelFacts::of(&source.model.config, architecture);
    let wanted = Options {
        output: options.output_tensor_type,
        token_embedding: options.token_embedding_type,
        tensors: options.tensor_types.iter().map(|text| parse_tensor_type(text)).collect::<Result<_, _>>()?,
        keep_output: options.leave_output_tensor,
        pure: options.pure,
        fallback: !options.no_fallback,
        importance: options.imatrix.is_some() || options.error_feedback,
        ..Options::new(options.kind)
    };
    let shapes: Vec<(String, Vec<usize>)> = all.iter().map(|t| (t.name.clone(), t.shape.clone())).collect();
    let choices = select(&shapes, &facts, &wanted)?;
    not_applied(&shapes, &wanted).iter().for_each(|what| reporter.warn(what));
    Ok(choices)
}
