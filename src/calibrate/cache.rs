//! Scales for a cache of 8-bit keys and values.
//!
//! A scale that takes the largest magnitude to the end of the range cuts nothing off. For floating-point numbers larger
//! ones within an octave are as good at first sight, since the relative error is the same; but which numbers are met
//! exactly moves with the scale, and what keys and values have in common decides what attention makes of that. So each
//! is tried on real queries.

use std::sync::Arc;

use rayon::prelude::*;

use crate::backend::cache::{CacheType, LayerScales, rounded};
use crate::backend::tensor::Tensor;
use crate::backend::{Backend, Batch, DeviceError, Matrix};
use crate::model::block::Block;
use crate::model::{Model, ModelError};

/// Scales tried in an octave.
const STEPS: usize = 8;
/// Tokens that they are tried on, if whole batches have as few.
const TOKENS: usize = 2048;

/// What shares a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    Layer,
    Head,
}

/// The largest magnitudes of keys (after rotary embedding) and values, by key-value head.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Most {
    pub keys: Vec<f32>,
    pub values: Vec<f32>,
}

impl Most {
    /// Takes up keys and values.
    pub fn add(&mut self, backend: &dyn Backend, head_dim: usize, k: &Tensor, v: &Tensor) -> Result<(), DeviceError> {
        for (x, most) in [(k, &mut self.keys), (v, &mut self.values)] {
            let channels = backend.abs_max(x)?;
            most.resize(channels.len() / head_dim, 0.0);
            // A NaN must stay.
            for (head, most) in channels.chunks(head_dim).zip(most) {
                head.iter().for_each(|x| *most = if x.is_nan() || *x > *most { *x } else { *most });
            }
        }
        Ok(())
    }

    /// An error where something was not finite.
    pub fn check(&self, block: &Block) -> Result<(), ModelError> {
        match self.keys.iter().chain(&self.values).all(|x| x.is_finite()) {
            true => Ok(()),
            false => Err(ModelError::NonFinite { path: format!("keys or values of {}", block.path) }),
        }
    }

    /// Scales that take the largest magnitude to the end of `kind`. A head that never was anything but zero gets 1.
    pub fn scales(&self, kind: CacheType, sharing: Sharing) -> LayerScales {
        let scale = |most: f32| match most / kind.largest() {
            scale if scale > 0.0 => scale,
            _ => 1.0,
        };
        let of = |heads: &[f32]| match sharing {
            Sharing::Head => heads.iter().map(|most| scale(*most)).collect(),
            Sharing::Layer => vec![scale(heads.iter().copied().fold(0.0, f32::max))],
        };
        LayerScales { keys: of(&self.keys), values: of(&self.values) }
    }
}

/// Tries scales of one block.
pub struct Search {
    kind: CacheType,
    /// The smallest of them.
    base: LayerScales,
    /// Squared errors of attention's output, of keys and of values, by scale and step.
    errors: [Vec<[f64; STEPS]>; 2],
}

impl Search {
    pub fn new(kind: CacheType, base: LayerScales) -> Self {
        let errors = [vec![[0.0; STEPS]; base.keys.len()], vec![[0.0; STEPS]; base.values.len()]];
        Self { kind, base, errors }
    }

    /// Whether there is anything to choose: integers lie evenly, and smaller steps are better for them.
    pub fn pays(kind: CacheType) -> bool {
        matches!(kind, CacheType::Fp8E4m3 | CacheType::Fp8E5m2)
    }

    /// Tries all scales on some tokens: queries, keys (both rotated) and values, and what attention makes of them.
    pub fn add(
        &mut self,
        model: &Model,
        block: &Block,
        batch: &Batch,
        [q, k, v]: [&Tensor; 3],
        attended: &Tensor,
    ) -> Result<(), DeviceError> {
        if !Self::pays(self.kind) {
            return Ok(());
        }
        let (backend, config) = (model.backend(), &model.config);
        let exact = backend.download(attended)?;
        let sides = [(&self.base.keys, k), (&self.base.values, v)];
        for (side, (base, x)) in sides.into_iter().enumerate() {
            let rows = backend.download(x)?;
            for step in 0..STEPS {
                let scales: Vec<f32> = base.iter().map(|scale| scale * factor(step)).collect();
                let rounded = rounded(self.kind, &rows, config.head_dim, Some(&scales));
                let rounded = backend.upload(x.rows, x.cols, rounded)?;
                let kv = if side == 0 { [q, &rounded, v] } else { [q, k, &rounded] };
                let found = backend.download(&block.attend(model, batch, kv, None)?)?;
                let errors = &mut self.errors[side];
                // Query heads that share keys stand side by side.
                let all = config.heads * config.head_dim;
                let width = all / errors.len();
                errors.par_iter_mut().enumerate().for_each(|(i, errors)| {
                    for (f, x) in found.chunks_exact(all).zip(exact.chunks_exact(all)) {
                        let own = i * width..(i + 1) * width;
                        let terms = f[own.clone()].iter().zip(&x[own]).map(|(f, x)| f64::from(f - x).powi(2));
                        errors[step] += terms.sum::<f64>();
                    }
                });
            }
        }
        Ok(())
    }

    /// The scales of least error, the smallest of equals.
    pub fn best(&self) -> LayerScales {
        let of = |base: &[f32], errors: &[[f64; STEPS]]| -> Vec<f32> {
            let best = |errors: &[f64; STEPS]| (1..STEPS).fold(0, |b, i| if errors[i] < errors[b] { i } else { b });
            base.iter().zip(errors).map(|(scale, errors)| scale * factor(best(errors))).collect()
        };
        LayerScales { keys: of(&self.base.keys, &self.errors[0]), values: of(&self.base.values, &self.errors[1]) }
    }
}

fn factor(step: usize) -> f32 {
    (step as f32 / STEPS as f32).exp2()
}

/// Scales of a block whose linears have the `weights` of queries, keys and values; `inputs` are those of each batch.
pub fn scales(
    model: &Model,
    block: &Block,
    batches: &[Arc<Batch>],
    inputs: &[Tensor],
    weights: &[Matrix],
    sharing: Sharing,
) -> Result<LayerScales, ModelError> {
    let (mut most, mut sample, mut tokens) = (Most::default(), Vec::new(), 0);
    for (batch, x) in batches.iter().zip(inputs) {
        let qkv = block.queries_keys_values(model, batch, x, Some(weights))?;
        most.add(model.backend(), model.config.head_dim, &qkv[1], &qkv[2])?;
        tokens += x.rows;
        if sample.is_empty() || tokens <= TOKENS {
            sample.push((batch, qkv));
        }
    }
    most.check(block)?;
    let mut search = Search::new(CacheType::Fp8E4m3, most.scales(CacheType::Fp8E4m3, sharing));
    for (batch, [q, k, v]) in &sample {
        let attended = block.attend(model, batch, [q, k, v], None)?;
        search.add(model, block, batch, [q, k, v], &attended)?;
    }
    Ok(search.best())
}
