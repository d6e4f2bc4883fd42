//! One transformer block: its weights, and the one place where its mathematics is written down.

use std::sync::Arc;

use super::config::ModelConfig;
use super::source::{SourceError, WeightSource};
use super::{Model, ModelError};
use crate::backend::cache::{Layer, Pool};
use crate::backend::tensor::Tensor;
use crate::backend::{AttentionShape, Backend, Batch, DeviceError, Matrix};

/// A linear layer, with the path that tensor names and reports use.
#[derive(Clone, Debug)]
pub struct Linear {
    pub path: String,
    pub rows: usize,
    pub cols: usize,
    pub weight: Matrix,
    pub bias: Option<Tensor>,
}

/// The points of a block where linears share one input. In this order a block is calibrated ("true
/// sequential"): each stage sees what the quantized stages before it produce.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stage {
    /// q, k, v.
    Qkv,
    /// The attention output projection.
    Output,
    /// gate, up.
    GateUp,
    Down,
}

impl Stage {
    pub const ALL: [Stage; 4] = [Stage::Qkv, Stage::Output, Stage::GateUp, Stage::Down];
}

/// The weights of one block.
#[derive(Clone, Debug)]
pub struct Block {
    pub index: usize,
    /// `model.layers.N`
    pub path: String,
    pub(super) attention_norm: Tensor,
    pub(super) q: Linear,
    pub(super) k: Linear,
    pub(super) v: Linear,
    pub(super) o: Linear,
    q_norm: Option<Tensor>,
    k_norm: Option<Tensor>,
    after_attention_norm: Option<Tensor>,
    pub(super) mlp_norm: Tensor,
    pub(super) gate: Linear,
    pub(super) up: Linear,
    pub(super) down: Linear,
    after_mlp_norm: Option<Tensor>,
}

/// Activations of some sequences on their way through the blocks.
#[derive(Clone, Debug)]
pub struct Chunk {
    pub hidden: Tensor,
    pub batch: Arc<Batch>,
    /// Keeps to the block's own weights, whatever takes their place for others.
    pub original: bool,
}

impl Chunk {
    /// The weights that take the place of a stage's own for this chunk.
    fn instead<'a>(&self, swapped: &'a Option<Vec<Matrix>>) -> Option<&'a [Matrix]> {
        swapped.as_deref().filter(|_| !self.original)
    }
}

/// Called with the inputs of a stage, one tensor a chunk; what it returns takes the place of the stage's
/// weights for the rest of the pass, but for original chunks.
pub type Tap<'a, E> = dyn FnMut(Stage, &[Tensor]) -> Result<Option<Vec<Matrix>>, E> + 'a;

/// Loads what the config says a block has, checking shapes.
pub(super) fn load(
    config: &ModelConfig,
    source: &dyn WeightSource,
    backend: &dyn Backend,
    index: usize,
) -> Result<Block, ModelError> {
    let path = config.block_path(index);
    let norm = |name: &str, len: usize| norm(config, source, backend, &format!("{path}.{name}"), len);
    let linear = |name: &str, rows: usize, cols: usize| -> Result<Linear, ModelError> {
        let path = format!("{path}.{name}");
        let weight = backend.load(source.linear(&path, rows, cols)?)?;
        let bias = match config.has_bias(&path) {
            true => Some(backend.upload(
                1,
                rows,
                source.checkpoint().vector(&format!("{path}.bias"), rows).map_err(SourceError::from)?,
            )?),
            false => None,
        };
        Ok(Linear { path, rows, cols, weight, bias })
    };
    let (hidden, inner) = (config.hidden, config.intermediate);
    let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
    let family = config.family;
    let (after_attention, mlp_norm) = if family.sandwich_norms {
        (Some("post_attention_layernorm"), "pre_feedforward_layernorm")
    } else {
        (None, "post_attention_layernorm")
    };
    let head_norm = |name: &str| family.qk_norm.then(|| norm(name, config.head_dim)).transpose();
    Ok(Block {
        index,
        attention_norm: norm("input_layernorm", hidden)?,
        q: linear("self_attn.q_proj", q, hidden)?,
        k: linear("self_attn.k_proj", kv, hidden)?,
        v: linear("self_attn.v_proj", kv, hidden)?,
        o: linear("self_attn.o_proj", hidden, q)?,
        q_norm: head_norm("self_attn.q_norm")?,
        k_norm: head_norm("self_attn.k_norm")?,
        after_attention_norm: after_attention.map(|name| norm(name, hidden)).transpose()?,
        mlp_norm: norm(mlp_norm, hidden)?,
        gate: linear("mlp.gate_proj", inner, hidden)?,
        up: linear("mlp.up_proj", inner, hidden)?,
        down: linear("mlp.down_proj", hidden, inner)?,
        after_mlp_norm: family.sandwich_norms.then(|| norm("post_feedforward_layernorm", hidden)).transpose()?,
        path,
    })
}

/// A norm weight, with the family's offset added.
pub(super) fn norm(
    config: &ModelConfig,
    source: &dyn WeightSource,
    backend: &dyn Backend,
    name: &str,
    len: usize,
) -> Result<Tensor, ModelError> {
    let mut weight = source.checkpoint().vector(&format!("{name}.weight"), len).map_err(SourceError::from)?;
    if config.family.norm_plus_one {
        weight.iter_mut().for_each(|w| *w += 1.0);
    }
    Ok(backend.upload(1, len, weight)?)
}

impl Block {
    /// The linears that share the input of `stage`.
    pub fn linears(&self, stage: Stage) -> Vec<&Linear> {
        match stage {
            Stage::Qkv => vec![&self.q, &self.k, &self.v],
            Stage::Output => vec![&self.o],
            Stage::GateUp => vec![&self.gate, &self.up],
            Stage::Down => vec![&self.down],
        }
    }

    /// The weight of the norm whose output the linears of `stage` read, where there is one.
    pub fn norm_before(&self, stage: Stage) -> Option<&Tensor> {
        match stage {
            Stage::Qkv => Some(&self.attention_norm),
            Stage::GateUp => Some(&self.mlp_norm),
            Stage::Output | Stage::Down => None,
        }
    }

    /// The matrices of all linears.
    pub fn matrices(&self) -> Vec<&Matrix> {
        self.all_linears().map(|linear| &linear.weight).collect()
    }

    /// All linears, in the order of the stages.
    pub fn all_linears(&self) -> impl Iterator<Item = &Linear> {
        Stage::ALL.into_iter().flat_map(|stage| self.linears(stage))
    }

    /// Takes `chunks` through the block, all chunks stage by stage. Over a pool, the batches have tables.
    pub fn run<E: From<DeviceError>>(
        &self,
        model: &Model,
        chunks: &mut [Chunk],
        mut pool: Option<&mut Pool>,
        tap: &mut Tap<E>,
    ) -> Result<(), E> {
        let (config, backend) = (&model.config, model.backend());
        let inputs = normed(backend, chunks, &self.attention_norm, config.eps)?;
        let swapped = tap(Stage::Qkv, &inputs)?;
        let mut attended = Vec::with_capacity(chunks.len());
        for (chunk, x) in chunks.iter().zip(inputs) {
            let [q, k, v] = self.queries_keys_values(model, &chunk.batch, &x, chunk.instead(&swapped))?;
            attended.push(self.attend(model, &chunk.batch, [&q, &k, &v], pool.as_deref_mut())?);
        }
        let swapped = tap(Stage::Output, &attended)?;
        let next = Some(&self.mlp_norm);
        let inputs = self.join(model, chunks, attended, &self.o, swapped, self.after_attention_norm.as_ref(), next)?;
        let swapped = tap(Stage::GateUp, &inputs)?;
        let mut gated = Vec::with_capacity(chunks.len());
        for (chunk, x) in chunks.iter().zip(inputs) {
            gated.push(self.gate_up(model, &x, chunk.instead(&swapped))?);
        }
        let swapped = tap(Stage::Down, &gated)?;
        self.join(model, chunks, gated, &self.down, swapped, self.after_mlp_norm.as_ref(), None)?;
        Ok(())
    }

    /// What comes out where `stage` begins with `x` and its linears have the weights of `swapped`: of the attention
    /// or the MLP as a whole, or of the one linear.
    pub fn outcome(
        &self,
        model: &Model,
        stage: Stage,
        batch: &Batch,
        x: &Tensor,
        swapped: Option<&[Matrix]>,
    ) -> Result<Tensor, DeviceError> {
        let backend = model.backend();
        match stage {
            Stage::Qkv => {
                let [q, k, v] = self.queries_keys_values(model, batch, x, swapped)?;
                apply(backend, &self.attend(model, batch, [&q, &k, &v], None)?, &self.o, None)
            }
            Stage::Output => apply(backend, x, &self.o, swapped.map(|s| &s[0])),
            Stage::GateUp => apply(backend, &self.gate_up(model, x, swapped)?, &self.down, None),
            Stage::Down => apply(backend, x, &self.down, swapped.map(|s| &s[0])),
        }
    }

    /// Queries and keys, rotated, and values.
    pub fn queries_keys_values(
        &self,
        model: &Model,
        batch: &Batch,
        x: &Tensor,
        swapped: Option<&[Matrix]>,
    ) -> Result<[Tensor; 3], DeviceError> {
        let (config, backend) = (&model.config, model.backend());
        let table = model.rope_table(config.layers[self.index].rope, batch.end())?;
        let apply = |i: usize, linear| apply(backend, x, linear, swapped.map(|s| &s[i]));
        let (mut q, mut k, v) = (apply(0, &self.q)?, apply(1, &self.k)?, apply(2, &self.v)?);
        for (x, norm) in [(&mut q, &self.q_norm), (&mut k, &self.k_norm)] {
            let norm = norm.as_ref().map(|n| (n, config.eps));
            backend.rope(x, batch, config.head_dim, norm, &table)?;
        }
        Ok([q, k, v])
    }

    /// Attention, before the output projection. A pool takes up the keys and values.
    pub fn attend(
        &self,
        model: &Model,
        batch: &Batch,
        [q, k, v]: [&Tensor; 3],
        pool: Option<&mut Pool>,
    ) -> Result<Tensor, DeviceError> {
        let config = &model.config;
        let shape = AttentionShape {
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            scale: config.attention_scale,
            window: config.layers[self.index].window,
            softcap: config.attention_softcap,
        };
        let layer = pool.map(|pool| Layer { pool, index: self.index });
        model.backend().attention(q, k, v, batch, &shape, layer)
    }

    fn gate_up(&self, model: &Model, x: &Tensor, swapped: Option<&[Matrix]>) -> Result<Tensor, DeviceError> {
        let backend = model.backend();
        let apply = |i: usize, linear| apply(backend, x, linear, swapped.map(|s| &s[i]));
        backend.gated(&apply(0, &self.gate)?, &apply(1, &self.up)?, model.config.activation)
    }

    /// hidden += norm(linear(x)); what comes back is the `next` norm of the new hidden state, where asked for.
    fn join<E: From<DeviceError>>(
        &self,
        model: &Model,
        chunks: &mut [Chunk],
        xs: Vec<Tensor>,
        linear: &Linear,
        swapped: Option<Vec<Matrix>>,
        norm: Option<&Tensor>,
        next: Option<&Tensor>,
    ) -> Result<Vec<Tensor>, E> {
        let backend = model.backend();
        let mut normed = Vec::with_capacity(chunks.len());
        for (chunk, x) in chunks.iter_mut().zip(xs) {
            let mut y = apply(backend, &x, linear, chunk.instead(&swapped).map(|s| &s[0]))?;
            if let Some(norm) = norm {
                y = backend.rms_norm(&y, norm, model.config.eps)?;
            }
            match next {
                Some(next) => normed.push(backend.add_rms_norm(&mut chunk.hidden, &y, next, model.config.eps)?),
                None => backend.add(&mut chunk.hidden, &y)?,
            }
        }
        Ok(normed)
    }
}

/// The linear, with the weight that goes for it.
fn apply(backend: &dyn Backend, x: &Tensor, linear: &Linear, swapped: Option<&Matrix>) -> Result<Tensor, DeviceError> {
    backend.linear(x, swapped.unwrap_or(&linear.weight), linear.bias.as_ref())
}

fn normed(backend: &dyn Backend, chunks: &[Chunk], weight: &Tensor, eps: f32) -> Result<Vec<Tensor>, DeviceError> {
    chunks.iter().map(|chunk| backend.rms_norm(&chunk.hidden, weight, eps)).collect()
}
