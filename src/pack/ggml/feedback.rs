//! The blocks of ggml's own search, with codes that compensate each other's errors.

use std::ops::Range;

use thiserror::Error;

use super::levels::{layout, levels, replace_codes};
use super::{EncodeError, encode};
use crate::num::ggml::GgmlType;
use crate::quantize::gptq::{Curvature, PassOptions};
use crate::quantize::grids::levels::{Chosen, Fit, choose};

/// Why codes cannot be chosen with feedback.
#[derive(Debug, Error, PartialEq)]
pub enum FeedbackError {
    #[error("{kind} has no codes of single values, so errors cannot be fed back; take another type, or do without")]
    Unsupported { kind: GgmlType },
    #[error(transparent)]
    Encode(#[from] EncodeError),
}

/// An encoded matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct EncodedMatrix {
    /// Rows of blocks, as `pack::ggml::encode` lays them out.
    pub bytes: Vec<u8>,
    /// See [`Chosen::loss`].
    pub loss: f64,
}

/// Whether a type can be encoded with feedback.
pub fn supports(kind: GgmlType) -> bool {
    layout(kind).is_some()
}

/// Encodes `weight`, rows of `cols` values. Scales come from ggml's search with the Hessian's diagonal as importance;
/// `curvature` is that of `grids::levels::curvature` for blocks of `kind.block()` columns and the same options.
///
/// # Errors
///
/// When the type has no codes of single values, blocks do not fill rows, or a value is not finite.
///
/// # Panics
///
/// When `curvature` has another number of columns.
pub fn encode_with_feedback(
    kind: GgmlType,
    weight: &[f32],
    cols: usize,
    curvature: &Curvature,
    options: &PassOptions,
) -> Result<EncodedMatrix, FeedbackError> {
    let layout = layout(kind).ok_or(FeedbackError::Unsupported { kind })?;
    if kind.row_bytes(cols).is_none() {
        return Err(EncodeError::Columns { kind, block: kind.block(), cols }.into());
    }
    if !matches!(weight.len().checked_rem(cols), Some(0)) {
        return Err(EncodeError::Values { values: weight.len(), cols }.into());
    }
    let importance = curvature.diagonal();
    let fit = |columns: Range<usize>, weights: &[f32]| -> Result<Fit, EncodeError> {
        let bytes = encode(kind, weights, columns.len(), Some(&importance[columns]))?;
        Ok(Fit { levels: levels(kind, &bytes), bytes })
    };
    let rows = weight.len() / cols;
    let Chosen { codes, mut bytes, loss } = choose(weight, rows, curvature, layout, options, &fit)?;
    replace_codes(kind, &mut bytes, &codes);
    Ok(EncodedMatrix { bytes, loss })
}
