//! Channel scales moved from linears into what feeds them, so that a model computes the same with weights that are
//! easier to round: what AWQ (2306.00978) and SmoothQuant (2211.10438) rest on.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::block::{Block, Linear, Stage};
use super::source::SourceError;
use super::{Model, ModelError};
use crate::backend::tensor::Tensor;
use crate::backend::weight::{Dense, Weight};
use crate::tensor::{Bytes, Dtype, narrowed, widened};

/// Where what an operation gives is read by linears alone, which can take a scale back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Joint {
    /// The norm before q, k and v.
    AttentionNorm,
    /// v, whose channels the output projection reads after they were mixed over tokens.
    Values,
    /// The norm before gate and up.
    MlpNorm,
    /// up, a factor of what down reads.
    Up,
}

impl Joint {
    pub const ALL: [Joint; 4] = [Joint::AttentionNorm, Joint::Values, Joint::MlpNorm, Joint::Up];

    /// The linears that take the scale back.
    pub fn readers(self) -> Stage {
        match self {
            Joint::AttentionNorm => Stage::Qkv,
            Joint::Values => Stage::Output,
            Joint::MlpNorm => Stage::GateUp,
            Joint::Up => Stage::Down,
        }
    }
}

/// Scales at one joint: channel c of what the readers see is divided by `scales[c]`, their columns are multiplied.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fold {
    pub joint: Joint,
    pub scales: Vec<f32>,
}

/// A block with folds in it.
#[derive(Debug)]
pub struct Folded {
    pub block: Block,
    /// Norms and biases that have changed, in the type the checkpoint has for them.
    pub tensors: BTreeMap<String, (Dtype, Bytes)>,
    /// Linears whose weights have changed.
    pub linears: Vec<String>,
}

/// Query heads that share a head of values read the same channels of it: one scale for all of them, by `join`.
pub fn tied(model: &Model, per_channel: &[f32], join: impl Fn(&[f32]) -> f32) -> Vec<f32> {
    let (dim, share) = (model.config.head_dim, model.config.heads / model.config.kv_heads);
    let mut out = vec![0.0; per_channel.len()];
    for kv in 0..model.config.kv_heads {
        for d in 0..dim {
            let places: Vec<usize> = (0..share).map(|r| (kv * share + r) * dim + d).collect();
            let values: Vec<f32> = places.iter().map(|&at| per_channel[at]).collect();
            let joined = join(&values);
            places.into_iter().for_each(|at| out[at] = joined);
        }
    }
    out
}

impl Block {
    /// The block with `folds` in it, which computes what it did but for rounding in 32 bits. Norms and biases stay in
    /// the type of the checkpoint: the scales that count are those that their rounded values are really divided by.
    pub fn folded(&self, model: &Model, folds: &[Fold]) -> Result<Folded, ModelError> {
        let mut out = Folded { block: self.clone(), tensors: BTreeMap::new(), linears: Vec::new() };
        for fold in folds {
            let scales = match fold.joint {
                Joint::AttentionNorm => {
                    let norm = &mut out.block.attention_norm;
                    fold_norm(model, &format!("{}.input_layernorm.weight", self.path), norm, fold, &mut out.tensors)?
                }
                Joint::MlpNorm => {
                    let name = match model.config.family.sandwich_norms {
                        true => "pre_feedforward_layernorm",
                        false => "post_attention_layernorm",
                    };
                    let norm = &mut out.block.mlp_norm;
                    fold_norm(model, &format!("{}.{name}.weight", self.path), norm, fold, &mut out.tensors)?
                }
                Joint::Values => {
                    let (dim, share) = (model.config.head_dim, model.config.heads / model.config.kv_heads);
                    let heads = fold.scales.chunks_exact(dim).step_by(share);
                    let own = heads.flatten().copied().collect();
                    let own = divide_rows(model, &mut out.block.v, own, &mut out.tensors)?;
                    out.linears.push(out.block.v.path.clone());
                    own.chunks_exact(dim).flat_map(|head| std::iter::repeat_n(head, share)).flatten().copied().collect()
                }
                Joint::Up => {
                    out.linears.push(out.block.up.path.clone());
                    divide_rows(model, &mut out.block.up, fold.scales.clone(), &mut out.tensors)?
                }
            };
            for linear in out.block.linears_mut(fold.joint.readers()) {
                multiply_columns(model, linear, &scales)?;
                out.linears.push(linear.path.clone());
            }
        }
        out.linears.sort();
        out.linears.dedup();
        Ok(out)
    }

    fn linears_mut(&mut self, stage: Stage) -> Vec<&mut Linear> {
        match stage {
            Stage::Qkv => vec![&mut self.q, &mut self.k, &mut self.v],
            Stage::Output => vec![&mut self.o],
            Stage::GateUp => vec![&mut self.gate, &mut self.up],
            Stage::Down => vec![&mut self.down],
        }
    }
}

/// Divides a norm's weight, and gives the scales that come of it.
fn fold_norm(
    model: &Model,
    name: &str,
    norm: &mut Tensor,
    fold: &Fold,
    tensors: &mut BTreeMap<String, (Dtype, Bytes)>,
) -> Result<Vec<f32>, ModelError> {
    let offset = if model.config.family.norm_plus_one { 1.0 } else { 0.0 };
    let mut scales = fold.scales.clone();
    *norm = divide(model, name, norm, offset, &mut scales, tensors)?;
    Ok(scales)
}

/// Divides the output channels of a linear, its bias with them, and gives the scales that come of it.
fn divide_rows(
    model: &Model,
    linear: &mut Linear,
    mut scales: Vec<f32>,
    tensors: &mut BTreeMap<String, (Dtype, Bytes)>,
) -> Result<Vec<f32>, ModelError> {
    if let Some(bias) = &mut linear.bias {
        *bias = divide(model, &format!("{}.bias", linear.path), bias, 0.0, &mut scales, tensors)?;
    }
    edit(model, linear, |row, weight| weight.iter_mut().for_each(|w| *w /= scales[row]))?;
    Ok(scales)
}

/// Divides a vector that is stored less `offset`, in the type the checkpoint has for it. `scales` become what the
/// rounded values are really divided by.
fn divide(
    model: &Model,
    name: &str,
    vector: &Tensor,
    offset: f32,
    scales: &mut [f32],
    tensors: &mut BTreeMap<String, (Dtype, Bytes)>,
) -> Result<Tensor, ModelError> {
    let entry = model.checkpoint().expect_float(name, &[vector.cols]).map_err(SourceError::from)?;
    let (dtype, size, before) = (entry.dtype, entry.dtype.size(), model.backend().download(vector)?);
    let divided: Vec<f32> = before.iter().zip(&*scales).map(|(w, s)| w / s - offset).collect();
    let mut bytes = narrowed(dtype, &divided);
    let mut after: Vec<f32> = widened(dtype, &bytes).iter().map(|w| w + offset).collect();
    for (c, scale) in scales.iter_mut().enumerate().filter(|(c, _)| before[*c] != 0.0) {
        let real = before[c] / after[c];
        if (0.5..2.0).contains(&(real / *scale)) {
            *scale = real;
        } else {
            // The type cannot hold the quotient, or holds it badly: the channel stays as it was.
            let range = c * size..(c + 1) * size;
            bytes[range.clone()].copy_from_slice(&entry.bytes[range]);
            (after[c], *scale) = (before[c], 1.0);
        }
    }
    tensors.insert(name.to_string(), (dtype, bytes.into()));
    Ok(model.backend().upload(1, after.len(), after)?)
}

fn multiply_columns(model: &Model, linear: &mut Linear, scales: &[f32]) -> Result<(), ModelError> {
    edit(model, linear, |_, weight| weight.iter_mut().zip(scales).for_each(|(w, s)| *w *= s))
}

/// Changes the weight of a linear row by row; it is floats of 32 bits from then on.
fn edit(model: &Model, linear: &mut Linear, change: impl Fn(usize, &mut [f32])) -> Result<(), ModelError> {
    let mut weight = linear.weight.weight().to_f32();
    weight.chunks_exact_mut(linear.cols).enumerate().for_each(|(row, weight)| change(row, weight));
    let bytes = narrowed(Dtype::F32, &weight).into();
    let dense = Dense { rows: linear.rows, cols: linear.cols, dtype: Dtype::F32, bytes };
    linear.weight = model.backend().load(Weight::Dense(dense))?;
    Ok(())
}
