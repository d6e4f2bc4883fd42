//! The device seam: a handful of coarse operations over activations in the device's own memory. The CPU
//! is the reference; every other backend must match it.

pub mod cpu;
pub mod weight;

use thiserror::Error;

use crate::tensor::Tensor;
use weight::Weight;

/// A device that failed: out of memory, lost, wrong driver.
#[derive(Debug, Error)]
#[error("{device}: {why}")]
pub struct DeviceError {
    pub device: String,
    pub why: String,
}

/// Shorthand for what every operation returns.
pub type Done<T> = Result<T, DeviceError>;

/// A weight where a backend can use it.
#[derive(Clone, Debug)]
pub enum Matrix {
    Host(Weight),
}

impl Matrix {
    /// The stored weight behind it.
    pub fn weight(&self) -> &Weight {
        let Matrix::Host(weight) = self;
        weight
    }
}

/// The function inside a gated MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    Silu,
    /// The tanh form of GELU.
    GeluTanh,
}

/// Consecutive rows of a batch that belong to one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub rows: usize,
    /// Position of the first row in its sequence.
    pub start: usize,
}

/// Rows per span for whole windows that start at position 0.
pub fn spans_of(lengths: impl IntoIterator<Item = usize>) -> Vec<Span> {
    lengths.into_iter().map(|rows| Span { rows, start: 0 }).collect()
}

/// Cosines and sines of rotary embedding, `[positions, half]` each, scaled by the attention factor.
#[derive(Clone, Debug, Default)]
pub struct RopeTable {
    pub half: usize,
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
}

/// Shapes and scale of one attention layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub scale: f32,
    /// Tokens a query sees, itself included, in a sliding layer.
    pub window: Option<usize>,
    /// Scores are squashed to ±cap by tanh (Gemma 2).
    pub softcap: Option<f32>,
}

/// Keys and values of one sequence in one layer.
#[derive(Clone, Debug, Default)]
pub struct KvCache {
    pub len: usize,
    pub keys: Vec<f32>,
    pub values: Vec<f32>,
}

/// X'X of the inputs that a linear saw.
#[derive(Clone, Debug)]
pub struct Gram {
    pub n: usize,
    /// Row-major; only the lower triangle is kept up.
    pub lower: Vec<f64>,
    /// Rows of X so far.
    pub tokens: u64,
}

impl Gram {
    pub fn new(n: usize) -> Self {
        Self { n, lower: vec![0.0; n * n], tokens: 0 }
    }

    /// How many channels never were anything but zero.
    pub fn dead(&self) -> usize {
        (0..self.n).filter(|i| self.lower[i * self.n + i] == 0.0).count()
    }
}

/// X'(O - X): how the inputs X that a linear gets in the quantized model have moved away from those it had
/// in the original, O.
#[derive(Clone, Debug)]
pub struct Drift {
    pub n: usize,
    /// Row-major.
    pub values: Vec<f32>,
    /// Rows of X so far.
    pub tokens: u64,
}

impl Drift {
    pub fn new(n: usize) -> Self {
        Self { n, values: vec![0.0; n * n], tokens: 0 }
    }
}

/// The operations the engine is made of. Rows of every tensor are tokens.
pub trait Backend: Send + Sync {
    /// The device in words, for reports.
    fn device(&self) -> String;

    /// Brings a stored weight to where `linear` can use it.
    fn load(&self, weight: Weight) -> Done<Matrix>;

    /// Brings a vector or matrix of floats to the device.
    fn upload(&self, rows: usize, cols: usize, data: Vec<f32>) -> Done<Tensor>;

    /// Brings floats back.
    fn download(&self, x: &Tensor) -> Done<Vec<f32>>;

    /// Rows `ids` of the embedding table, times `scale`.
    fn embed(&self, table: &Matrix, ids: &[u32], scale: f32) -> Done<Tensor>;

    /// x / sqrt(mean(x²) + eps) * weight, row by row.
    fn rms_norm(&self, x: &Tensor, weight: &Tensor, eps: f32) -> Done<Tensor>;

    /// x W' + bias.
    fn linear(&self, x: &Tensor, weight: &Matrix, bias: Option<&Tensor>) -> Done<Tensor>;

    /// Rotates each head of `x` by its position (halves apart, as Hugging Face stores them), after an RMS
    /// norm over each head where `norm` gives its weight and eps.
    fn rope(
        &self,
        x: &mut Tensor,
        spans: &[Span],
        head_dim: usize,
        norm: Option<(&Tensor, f32)>,
        table: &RopeTable,
    ) -> Done<()>;

    /// Causal attention of each span over itself and, with caches (one a span), over what they hold; the
    /// caches take up the new keys and values.
    fn attention(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        spans: &[Span],
        shape: &AttentionShape,
        caches: Option<&mut [KvCache]>,
    ) -> Done<Tensor>;

    /// activation(gate) * up.
    fn gated(&self, gate: &Tensor, up: &Tensor, activation: Activation) -> Done<Tensor>;

    /// x += y.
    fn add(&self, x: &mut Tensor, y: &Tensor) -> Done<()>;

    /// Adds X'X to `gram`.
    fn add_gram(&self, x: &Tensor, gram: &mut Gram) -> Done<()>;

    /// Adds X'(O - X) to `drift`.
    fn add_drift(&self, x: &Tensor, original: &Tensor, drift: &mut Drift) -> Done<()>;

    /// Negative log-likelihood (nats) of `targets[i]` under the softmax of row i of x W'.
    fn nll(&self, x: &Tensor, head: &Matrix, targets: &[u32], softcap: Option<f32>) -> Done<Vec<f32>>;
}
