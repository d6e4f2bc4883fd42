//! How far each module of an artifact is from its reference, by what it puts out.
//!
//! Both go through the blocks side by side on the hidden states of the *reference*, so that no module answers for the
//! errors of those before it. Scales that methods move between modules (AWQ, SmoothQuant) cancel: a linear behind a norm
//! reads what its own model's norm gives; outputs of v and up, which the next linear may take back, are compared up to
//! one scale a channel; o and down read the reference's inputs, multiplied by these scales.

use std::error::Error;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::backend::tensor::Tensor;
use crate::backend::weight::{Inputs, Weight};
use crate::backend::{DeviceError, spans_of};
use crate::model::block::{Block, Chunk, Linear, Stage};
use crate::model::source::SourceError;
use crate::model::{Model, ModelError};

/// Tokens in one chunk. Fixed, so that sums do not depend on the machine.
const CHUNK_TOKENS: usize = 4096;
/// The largest finite number of f16, in which many engines keep activations.
pub const F16_MAX: f32 = 65504.0;

/// A module is told to be damaged where its error is so many times what rounding to its grid gives on these inputs,
const MOST_EXPECTED: f64 = 2.5;
/// and half of what it puts out is wrong,
const MOST_ERROR: f64 = 0.5;
/// or so many times the error of the median of its kind.
const MOST_PEERS: f64 = 4.0;
/// Modules of a kind that make a median.
const PEERS: usize = 3;
/// Rounding of numbers with a mantissa of three bits, root mean square, relative.
const E4M3_NOISE: f64 = 0.026;

/// Why modules cannot be compared.
#[derive(Debug, Error)]
pub enum ModulesError {
    #[error("the artifact has {what} {artifact}, the reference {reference}: is this the model that it was made from?")]
    Shapes { what: &'static str, artifact: usize, reference: usize },
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("stopped at block {block}")]
    Stopped { block: usize, source: Box<dyn Error + Send + Sync> },
}

impl From<DeviceError> for ModulesError {
    fn from(error: DeviceError) -> Self {
        Self::Model(error.into())
    }
}

impl From<SourceError> for ModulesError {
    fn from(error: SourceError) -> Self {
        Self::Model(error.into())
    }
}

/// A module's output against that of the reference.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModuleDeviation {
    /// Its path, such as `model.layers.0.self_attn.q_proj`.
    pub module: String,
    /// The block it stands in.
    pub layer: Option<usize>,
    /// What it is, such as `q_proj`.
    pub kind: String,
    /// Norm of the difference over the norm of the reference's output, over all tokens.
    pub error: f64,
    /// The error that rounding to the nearest point of the module's grid would give on these inputs, were the errors of
    /// weights independent; `None` where the grid is not known, or the module is in floating point.
    pub expected: Option<f64>,
    /// The largest magnitudes of what it reads and puts out in the artifact.
    pub input_max: f32,
    pub output_max: f32,
}

impl ModuleDeviation {
    /// Whether an engine that keeps activations in f16 would overflow here.
    pub fn overflows_f16(&self) -> bool {
        self.input_max.max(self.output_max) > F16_MAX
    }
}

/// A block's output against that of the reference.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BlockDeviation {
    pub block: String,
    pub layer: usize,
    /// Norm of the difference over the norm of the hidden states that the reference's block gives,
    pub error: f64,
    /// and over that of what the block adds to them.
    pub update_error: f64,
    /// The largest magnitude of a hidden state.
    pub hidden_max: f32,
}

/// All errors.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Errors {
    pub tokens: usize,
    pub modules: Vec<ModuleDeviation>,
    pub blocks: Vec<BlockDeviation>,
}

/// A module that is no honest rounding of the reference's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Suspect {
    pub module: String,
    pub message: String,
}

impl Errors {
    /// Modules whose error rounding does not explain, whatever the bits: it is far above what the grid gives, and above
    /// that of the same module in other blocks or half of the output.
    pub fn suspects(&self) -> Vec<Suspect> {
        let one = |module: &ModuleDeviation| {
            let mut peers: Vec<f64> = self
                .modules
                .iter()
                .filter(|other| other.kind == module.kind && other.expected.is_some() == module.expected.is_some())
                .map(|other| other.error)
                .collect();
            peers.sort_unstable_by(f64::total_cmp);
            let usual = (peers.len() >= PEERS).then(|| peers[peers.len() / 2]);
            let beside = usual.is_some_and(|usual| module.error > MOST_PEERS * usual && module.error > 1e-3);
            let far = match module.expected {
                Some(expected) => module.error > MOST_EXPECTED * expected,
                // The grid is not known: rounding that leaves more error than output is none.
                None => module.error > 1.0 || beside,
            };
            // Where the same module of all blocks is as bad, nothing befell this one.
            let coarse = module.expected.is_none() && !beside && usual.is_some_and(|usual| usual > MOST_ERROR);
            let why = match coarse {
                true => "the type is too coarse for these weights; take one of more bits",
                false => "rows were exchanged, or scales or zero points are wrong; quantize the module again",
            };
            (far && (beside || module.error > MOST_ERROR)).then(|| Suspect {
                module: module.module.clone(),
                message: format!(
                    "`{}`: its outputs are off by {:.1} % of the reference's{}{}: {why}",
                    module.module,
                    100.0 * module.error,
                    module.expected.map_or(String::new(), |e| format!(", where its grid explains {:.1} %", 100.0 * e)),
                    usual.map_or(String::new(), |u| format!(" and {:.1} % is usual for {}", 100.0 * u, module.kind)),
                ),
            })
        };
        self.modules.iter().filter_map(one).collect()
    }
}

/// Measures all modules on `windows`, whose activations are in memory together with one block of each model. `progress`
/// hears before each block how many of how many are done, and may stop the work.
pub fn measure<E>(
    artifact: &Model,
    reference: &Model,
    windows: &[&[u32]],
    progress: &mut dyn FnMut(usize, usize) -> Result<(), E>,
) -> Result<Errors, ModulesError>
where
    E: Into<Box<dyn Error + Send + Sync>>,
{
    same_shapes(artifact, reference)?;
    let groups = groups(windows);
    let embed = |model: &Model| -> Result<Vec<Chunk>, ModelError> {
        groups.iter().map(|group| model.embed(group, spans_of(group.iter().map(|w| w.len())))).collect()
    };
    let mut chunks = embed(reference)?;
    let mut errors = Errors { tokens: windows.iter().map(|w| w.len()).sum(), ..Errors::default() };
    let mut table = Sums::default();
    for (own, other) in embed(artifact)?.iter().zip(&chunks) {
        table.add(
            &artifact.backend().download(&own.hidden)?,
            &reference.backend().download(&other.hidden)?,
            own.hidden.cols,
        );
    }
    let path = format!("{}embed_tokens", artifact.config.prefix);
    errors.modules.push(table.module(&path, None, "embed_tokens", None, 0.0)?);
    drop(table);
    for (own, other) in artifact.blocks.iter().zip(&reference.blocks) {
        progress(own.index, artifact.blocks.len())
            .map_err(|why| ModulesError::Stopped { block: own.index, source: why.into() })?;
        artifact.enter(own)?;
        reference.enter(other)?;
        let before: Vec<Tensor> = chunks.iter().map(|chunk| chunk.hidden.clone()).collect();
        let mut through = chunks.clone();
        let mut seen = Side { artifact, own, reference, other, carried: None, modules: &mut errors.modules };
        other.run::<ModulesError>(reference, &mut chunks, None, &mut |stage, inputs| {
            seen.stage(stage, inputs)?;
            Ok(None)
        })?;
        own.run::<ModulesError>(artifact, &mut through, None, &mut |_, _| Ok(None))?;
        errors.blocks.push(block_error(artifact, own, [&through, &chunks], &before)?);
        artifact.leave(own);
        reference.leave(other);
    }
    Ok(errors)
}

fn same_shapes(artifact: &Model, reference: &Model) -> Result<(), ModulesError> {
    let shapes = |model: &Model| {
        let c = &model.config;
        [
            ("a vocabulary of", c.vocab),
            ("blocks:", c.layers.len()),
            ("a hidden size of", c.hidden),
            ("an intermediate size of", c.intermediate),
            ("heads:", c.heads),
            ("key/value heads:", c.kv_heads),
            ("a head size of", c.head_dim),
        ]
    };
    for ((what, artifact), (_, reference)) in shapes(artifact).into_iter().zip(shapes(reference)) {
        if artifact != reference {
            return Err(ModulesError::Shapes { what, artifact, reference });
        }
    }
    Ok(())
}

/// Whole windows, packed into chunks in order.
fn groups<'a>(windows: &'a [&'a [u32]]) -> Vec<&'a [&'a [u32]]> {
    let mut out = Vec::new();
    let mut rest = windows;
    while !rest.is_empty() {
        let mut tokens = 0;
        let fitting = rest.iter().take_while(|window| {
            tokens += window.len();
            tokens <= CHUNK_TOKENS
        });
        let (now, later) = rest.split_at(fitting.count().max(1));
        out.push(now);
        rest = later;
    }
    out
}

fn block_error(
    model: &Model,
    block: &Block,
    [own, other]: [&[Chunk]; 2],
    before: &[Tensor],
) -> Result<BlockDeviation, ModulesError> {
    let backend = model.backend();
    let (mut off, mut all, mut added, mut most) = (0.0, 0.0, 0.0, 0.0f32);
    for ((own, other), before) in own.iter().zip(other).zip(before) {
        let (own, other, before) =
            (backend.download(&own.hidden)?, backend.download(&other.hidden)?, backend.download(before)?);
        for ((&a, &r), &b) in own.iter().zip(&other).zip(&before) {
            let (a64, r64, b64) = (f64::from(a), f64::from(r), f64::from(b));
            off += (a64 - r64) * (a64 - r64);
            all += r64 * r64;
            added += (r64 - b64) * (r64 - b64);
            most = larger(most, a);
        }
    }
    if !(off.is_finite() && all.is_finite()) {
        return Err(ModelError::NonFinite { path: block.path.clone() }.into());
    }
    let over = |norm: f64| if norm > 0.0 { (off / norm).sqrt() } else { 0.0 };
    Ok(BlockDeviation {
        block: block.path.clone(),
        layer: block.index,
        error: over(all),
        update_error: over(added),
        hidden_max: most,
    })
}

/// The larger magnitude; NaN stays.
fn larger(most: f32, x: f32) -> f32 {
    if most.is_nan() || x.abs() <= most { most } else { x.abs() }
}

/// One block of both models.
struct Side<'a> {
    artifact: &'a Model,
    own: &'a Block,
    reference: &'a Model,
    other: &'a Block,
    /// By how much the channels that the next stage reads are larger in the artifact.
    carried: Option<Vec<f32>>,
    modules: &'a mut Vec<ModuleDeviation>,
}

impl Side<'_> {
    /// Compares the linears of a stage on the reference's `inputs`, one tensor a chunk.
    fn stage(&mut self, stage: Stage, inputs: &[Tensor]) -> Result<(), ModulesError> {
        let scales = match self.carried.take() {
            Some(carried) => Some(carried),
            None => self.norm_ratio(stage)?,
        };
        let (own, other) = (self.own.linears(stage), self.other.linears(stage));
        let mut all: Vec<Sums> = own.iter().map(|_| Sums::default()).collect();
        let (mut energy, mut input_max) = (Energy::default(), 0.0);
        for input in inputs {
            let (backend, base) = (self.artifact.backend(), self.reference.backend());
            let mut x = base.download(input)?;
            if let Some(scales) = &scales {
                x.par_chunks_mut(input.cols).for_each(|row| row.iter_mut().zip(scales).for_each(|(x, s)| *x *= s));
            }
            energy.add(&x, input.cols);
            input_max = x.iter().fold(input_max, |most, &x| larger(most, x));
            let x = backend.upload(input.rows, input.cols, x)?;
            for ((own, other), sums) in own.iter().zip(&other).zip(&mut all) {
                let mine = backend.download(&backend.linear(&x, &own.weight, own.bias.as_ref())?)?;
                let theirs = base.download(&base.linear(input, &other.weight, other.bias.as_ref())?)?;
                sums.add(&mine, &theirs, own.rows);
            }
        }
        for (linear, sums) in own.iter().zip(&mut all) {
            let kind = linear.path.rsplit('.').next().unwrap_or_default();
            let mut noise = noise(self.artifact, linear, &energy)?;
            if ["v_proj", "up_proj"].contains(&kind) {
                let scales = sums.scales();
                sums.undo(&scales);
                noise.iter_mut().flatten().zip(&scales).for_each(|(n, &s)| *n /= f64::from(s) * f64::from(s));
                self.carried = Some(self.read_as(kind, scales));
            }
            let noise = noise.map(|channels| channels.iter().sum());
            self.modules.push(sums.module(&linear.path, Some(self.own.index), kind, noise, input_max)?);
        }
        Ok(())
    }

    /// The norm of the artifact over that of the reference, where they differ.
    fn norm_ratio(&self, stage: Stage) -> Result<Option<Vec<f32>>, ModulesError> {
        let (Some(own), Some(other)) = (self.own.norm_before(stage), self.other.norm_before(stage)) else {
            return Ok(None);
        };
        let (own, other) = (self.artifact.backend().download(own)?, self.reference.backend().download(other)?);
        if own == other {
            return Ok(None);
        }
        let ratio = |(&own, &other): (&f32, &f32)| if other == 0.0 { 1.0 } else { own / other };
        Ok(Some(own.iter().zip(&other).map(ratio).collect()))
    }

    /// Scales of outputs in the order of the next linear's inputs: query heads share a head of values.
    fn read_as(&self, kind: &str, scales: Vec<f32>) -> Vec<f32> {
        if kind != "v_proj" {
            return scales;
        }
        let (dim, share) = (self.own_dim(), self.artifact.config.heads / self.artifact.config.kv_heads);
        scales.chunks_exact(dim).flat_map(|head| std::iter::repeat_n(head, share)).flatten().copied().collect()
    }

    fn own_dim(&self) -> usize {
        self.artifact.config.head_dim
    }
}

/// What rounding of weights and inputs depends on.
#[derive(Debug, Default)]
struct Energy {
    tokens: usize,
    /// Sum of squares of each channel.
    channels: Vec<f64>,
    /// Sum over tokens of the square of the largest magnitude.
    peaks: f64,
}

impl Energy {
    fn add(&mut self, x: &[f32], cols: usize) {
        self.tokens += x.len() / cols.max(1);
        self.channels.resize(cols, 0.0);
        self.channels.par_iter_mut().enumerate().for_each(|(c, sum)| {
            *sum += x[c..].iter().step_by(cols).map(|&x| f64::from(x) * f64::from(x)).sum::<f64>();
        });
        let peaks: Vec<f32> = x.par_chunks(cols).map(|row| row.iter().fold(0.0, |most, &x| larger(most, x))).collect();
        self.peaks += peaks.iter().map(|&peak| f64::from(peak) * f64::from(peak)).sum::<f64>();
    }
}

/// Sums of squares that rounding of the weights to the nearest point of their grid adds to each output channel, for
/// inputs of this energy a channel; `None` where nothing is rounded, or the grid is not one of even steps.
fn noise(model: &Model, linear: &Linear, energy: &Energy) -> Result<Option<Vec<f64>>, ModulesError> {
    let weight = model.source().linear(&linear.path, linear.rows, linear.cols)?;
    let square = |s: f32| f64::from(s) * f64::from(s);
    // The sum of what `of` makes of a row's weights and the energy of their inputs, row by row.
    let rows = |of: &(dyn Fn(f64, f64) -> f64 + Sync)| -> Vec<f64> {
        let one = |n| {
            let mut row = vec![0.0; linear.cols];
            weight.panel(n..n + 1, &mut row);
            row.iter().zip(&energy.channels).map(|(&w, &e)| of(square(w), e)).sum()
        };
        (0..linear.rows).into_par_iter().map(one).collect()
    };
    Ok(match &weight {
        Weight::Gptq(w) => {
            let mut by_group = vec![0.0; w.scales.len() / w.rows];
            w.g_idx.iter().zip(&energy.channels).for_each(|(&g, e)| by_group[g as usize] += e / 12.0);
            let mut channels = vec![0.0; w.rows];
            for (scales, e) in w.scales.chunks_exact(w.rows).zip(by_group) {
                channels.iter_mut().zip(scales).for_each(|(sum, &s)| *sum += square(s) * e);
            }
            Some(channels)
        }
        Weight::Int8(w) => {
            let all: f64 = energy.channels.iter().sum();
            // The step of inputs, squared, summed over tokens.
            let steps = match w.inputs {
                Inputs::Float => 0.0,
                Inputs::Tensor { scale, .. } => energy.tokens as f64 * square(scale),
                Inputs::Token | Inputs::TokenAsymmetric | Inputs::Group(_) => energy.peaks / (127.5 * 127.5),
            };
            let inputs = rows(&|w, _| w * steps / 12.0);
            Some(w.scales.iter().zip(inputs).map(|(&s, inputs)| square(s) * all / 12.0 + inputs).collect())
        }
        // Inputs are rounded to the same kind of number.
        Weight::Fp8(_) => Some(rows(&|w, e| 2.0 * E4M3_NOISE * E4M3_NOISE * w * e)),
        Weight::Dense(_) | Weight::Ggml(_) => None,
    })
}

/// What is summed up of outputs, by channel: squares of the artifact's, products, squares of the reference's.
#[derive(Debug, Default)]
struct Sums {
    channels: Vec<[f64; 3]>,
    most: f32,
}

impl Sums {
    fn add(&mut self, own: &[f32], other: &[f32], cols: usize) {
        self.channels.resize(cols, [0.0; 3]);
        self.channels.par_iter_mut().enumerate().for_each(|(c, sums)| {
            for (&a, &r) in own[c..].iter().step_by(cols).zip(other[c..].iter().step_by(cols)) {
                let (a, r) = (f64::from(a), f64::from(r));
                sums[0] += a * a;
                sums[1] += a * r;
                sums[2] += r * r;
            }
        });
        self.most = own.iter().fold(self.most, |most, &x| larger(most, x));
    }

    /// By how much each channel is larger than that of the reference.
    fn scales(&self) -> Vec<f32> {
        let scale = |&[_, product, square]: &[f64; 3]| {
            let scale = product / square;
            if scale.is_finite() && scale > 0.0 { scale as f32 } else { 1.0 }
        };
        self.channels.iter().map(scale).collect()
    }

    fn undo(&mut self, scales: &[f32]) {
        for ([own, product, _], &scale) in self.channels.iter_mut().zip(scales) {
            let scale = f64::from(scale);
            *own /= scale * scale;
            *product /= scale;
        }
    }

    fn module(
        &self,
        path: &str,
        layer: Option<usize>,
        kind: &str,
        noise: Option<f64>,
        input_max: f32,
    ) -> Result<ModuleDeviation, ModulesError> {
        let (mut off, mut all) = (0.0, 0.0);
        for [own, product, other] in &self.channels {
            off += own - 2.0 * product + other;
            all += other;
        }
        if !(off.is_finite() && input_max.is_finite()) {
            return Err(ModelError::NonFinite { path: path.into() }.into());
        }
        let over = |squares: f64| if all > 0.0 { (squares.max(0.0) / all).sqrt() } else { 0.0 };
        Ok(ModuleDeviation {
            module: path.into(),
            layer,
            kind: kind.into(),
            error: over(off),
            expected: noise.map(over),
            input_max,
            output_max: self.most,
        })
    }
}
