//! What importance is used for, settled before any tensor is encoded: which tensors it covers, and which it should.

use anyhow::{Context, Result, bail};

use super::tensors::Tensor;
use crate::format::gguf::file_type::FileType;
use crate::format::gguf::imatrix::Imatrix;
use crate::format::gguf::select::{is_quantized, needs_importance};
use crate::num::ggml::GgmlType;
use crate::pack::ggml::{requires_importance, uses_importance};

/// Tensors with the types they will have.
type Planned<'a> = [(&'a Tensor, GgmlType)];

/// The tensors that importance decides about, those that `--error-feedback` calibrates by itself excepted.
pub fn users<'a>(planned: &'a Planned, feedback: bool) -> impl Iterator<Item = &'a (&'a Tensor, GgmlType)> {
    planned.iter().filter(move |(tensor, kind)| {
        let calibrated = feedback && tensor.name.starts_with("blk.");
        is_quantized(&tensor.name, &tensor.shape) && uses_importance(*kind) && tensor.stored != *kind && !calibrated
    })
}

/// Refuses types that cannot do without importance, where there is none at all for a tensor.
pub fn require(planned: &Planned, feedback: bool) -> Result<()> {
    match users(planned, feedback).find(|(_, kind)| requires_importance(*kind)) {
        Some((tensor, kind)) => bail!(
            "tensor `{}` would be {kind}, which cannot be encoded without importance; give an importance matrix or another \
             type",
            tensor.name
        ),
        None => Ok(()),
    }
}

/// Refuses, before it is computed, what importance of the calibration text would leave without: it covers the linears of
/// blocks alone.
pub fn require_outside_blocks(planned: &Planned, feedback: bool) -> Result<()> {
    let outside = |tensor: &Tensor| !tensor.name.starts_with("blk.");
    match users(planned, feedback).find(|(tensor, kind)| outside(tensor) && requires_importance(*kind)) {
        Some((tensor, kind)) => bail!(
            "tensor `{}` would be {kind}, which cannot be encoded without importance, and `--imatrix auto` computes it for \
             linears of blocks alone; give a file that covers it or another type",
            tensor.name
        ),
        None => Ok(()),
    }
}

/// Result of matching an importance matrix with the tensors.
#[derive(Debug, Default)]
pub struct Coverage {
    /// How many of its entries weigh the errors of a tensor.
    pub used: usize,
    /// What the user has to know.
    pub warnings: Vec<String>,
}

/// Compares the importance in `file` with the tensors to be written.
///
/// # Errors
///
/// When no entry is of a tensor of this model, an entry has another width than its tensor, or a type needs importance
/// where there is none.
pub fn settle(
    file: &str,
    imatrix: &Imatrix,
    planned: &Planned,
    feedback: bool,
    file_type: FileType,
) -> Result<Coverage> {
    let entry = |tensor: &Tensor| {
        let found = imatrix.importance(&tensor.name, tensor.cols(), 1);
        found.with_context(|| format!("the importance in `{file}` does not fit this model"))
    };
    let matrices = || planned.iter().filter(|(tensor, _)| is_quantized(&tensor.name, &tensor.shape));
    let mut fitting = Vec::new();
    for (tensor, _) in matrices() {
        if entry(tensor)?.is_some() {
            fitting.push(&*tensor.name);
        }
    }
    let entries = || imatrix.entries.keys().map(|name| &**name);
    if fitting.is_empty() {
        let first = matrices().map(|(tensor, _)| &*tensor.name).find(|name| name.starts_with("blk."));
        bail!(
            "`{file}` has importance for no tensor of this model: it names {}, the model has `{}`; give a file made of this \
             model, as `quantkit imatrix` makes it",
            listed(entries()),
            first.unwrap_or_default()
        );
    }
    let mut coverage = Coverage::default();
    let others: Vec<&str> = entries().filter(|name| !planned.iter().any(|(tensor, _)| tensor.name == *name)).collect();
    if !others.is_empty() {
        let (count, names) = (others.len(), listed(others.into_iter()));
        coverage.warnings.push(format!("`{file}` has importance for {count} tensors that this model lacks: {names}"));
    }
    let (covered, missing): (Vec<_>, Vec<_>) =
        users(planned, feedback).partition(|(tensor, _)| fitting.contains(&&*tensor.name));
    coverage.used = covered.len();
    let needs = |tensor: &Tensor, kind| requires_importance(kind) || needs_importance(&tensor.name, kind, file_type);
    if let Some((tensor, kind)) = missing.iter().find(|(tensor, kind)| needs(tensor, *kind)) {
        bail!(
            "tensor `{}` would be {kind}, which needs importance, and `{file}` has none for it; give a file \
             that covers it or another type",
            tensor.name
        );
    }
    // llama-imatrix leaves the embedding out, and the output head unless it is asked for.
    let gaps: Vec<&str> =
        missing.iter().map(|(tensor, _)| &*tensor.name).filter(|name| name.starts_with("blk.")).collect();
    if coverage.used == 0 {
        let why = match feedback {
            true => "--error-feedback computes importance from its calibration text",
            false => "no tensor that it covers gets a type that weighs by importance",
        };
        coverage.warnings.push(format!("`{file}` is not used: {why}"));
    } else if !gaps.is_empty() {
        coverage.warnings.push(format!(
            "`{file}` has no importance for {} of {} tensors, which are encoded without: {}",
            gaps.len(),
            gaps.len() + coverage.used,
            listed(gaps.iter().copied())
        ));
    }
    Ok(coverage)
}

/// The first names, and how many more there are.
fn listed<'a>(names: impl Iterator<Item = &'a str>) -> String {
    const SHOWN: usize = 3;
    let names: Vec<String> = names.map(|name| format!("`{name}`")).collect();
    let shown = names[..names.len().min(SHOWN)].join(", ");
    if names.len() > SHOWN { format!("{shown} and {} more", names.len() - SHOWN) } else { shown }
}
