//! The device seam: a handful of coarse operations over activations in the device's own memory. The CPU
//! is the reference; every other backend must match it.

pub mod cache;
pub mod cpu;
pub mod cuda;
pub mod solver;
pub mod tensor;
pub mod weight;

use std::borrow::Cow;
use std::sync::Arc;

use bytemuck::Pod;
use thiserror::Error;

use cache::{CacheType, Layer, Pool, PoolShape, SavedBlocks, Tables};
use solver::Solver;
use tensor::Tensor;
use weight::Weight;

/// A device that failed: out of memory, lost, wrong driver.
#[derive(Debug, Error)]
#[error("{device}: {why}")]
pub struct DeviceError {
    pub device: String,
    pub why: String,
}

/// How the reason begins where a device has too little memory.
pub const OUT_OF_MEMORY: &str = "out of memory";

impl DeviceError {
    /// Whether the device had too little memory.
    pub fn out_of_memory(&self) -> bool {
        self.why.starts_with(OUT_OF_MEMORY)
    }
}

/// Shorthand for what every operation returns.
pub type Done<T> = Result<T, DeviceError>;

/// A weight where a backend can use it.
#[derive(Clone, Debug)]
pub enum Matrix {
    Host(Weight),
    Cuda(Arc<cuda::weights::Stored>),
}

impl Matrix {
    /// The stored weight behind it.
    pub fn weight(&self) -> &Weight {
        match self {
            Matrix::Host(weight) => weight,
            Matrix::Cuda(stored) => &stored.weight,
        }
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

/// Token ids and where they stand: what a pass over some sequences starts from.
#[derive(Clone, Debug)]
pub struct Batch {
    pub ids: Vec<u32>,
    pub spans: Vec<Span>,
    /// Where keys and values of the sequences are, for passes over a cache.
    pub tables: Tables,
    /// The same on a device.
    cuda: Option<cuda::batch::OnDevice>,
}

impl Batch {
    /// A batch for a backend that computes in host memory.
    pub fn host(ids: Vec<u32>, spans: Vec<Span>) -> Self {
        Self { ids, spans, tables: Tables::default(), cuda: None }
    }

    /// One past the last position.
    pub fn end(&self) -> usize {
        self.spans.iter().map(|s| s.start + s.rows).max().unwrap_or(0)
    }
}

/// Cosines and sines of rotary embedding, `[positions, half]` each, scaled by the attention factor.
#[derive(Clone, Debug)]
pub struct RopeTable {
    pub cos: Tensor,
    pub sin: Tensor,
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

/// Sums over calibration tokens, where the backend keeps them.
#[derive(Clone, Debug)]
pub enum Sums<T> {
    Host(Vec<T>),
    Cuda(cuda::Buffer),
}

impl<T> Sums<T> {
    /// The host values.
    ///
    /// # Panics
    /// If another backend made them: backends are not mixed.
    pub fn host(&self) -> &[T] {
        match self {
            Sums::Host(values) => values,
            Sums::Cuda(buffer) => panic!("host sums are wanted, not {buffer:?}"),
        }
    }

    /// The host values, to be changed. Panics like [`Self::host`].
    pub fn host_mut(&mut self) -> &mut [T] {
        match self {
            Sums::Host(values) => values,
            Sums::Cuda(buffer) => panic!("host sums are wanted, not {buffer:?}"),
        }
    }

    /// A copy in host memory of the `count` sums.
    fn downloaded(&self, count: usize) -> Done<Vec<T>>
    where
        T: Pod,
    {
        match self {
            Sums::Host(values) => Ok(values.clone()),
            Sums::Cuda(buffer) => buffer.device().download(buffer, 0, count),
        }
    }

    fn buffer(&self) -> &cuda::Buffer {
        match self {
            Sums::Cuda(buffer) => buffer,
            Sums::Host(_) => panic!("device sums are wanted, not those in host memory"),
        }
    }
}

/// X'X of the inputs that a linear saw.
#[derive(Clone, Debug)]
pub struct Gram {
    pub n: usize,
    /// Row-major; only the lower triangle is kept up.
    pub lower: Sums<f64>,
    /// Rows of X so far.
    pub tokens: u64,
}

impl Gram {
    /// In host memory.
    pub fn host(n: usize, lower: Vec<f64>, tokens: u64) -> Self {
        Self { n, lower: Sums::Host(lower), tokens }
    }

    /// The same in host memory.
    ///
    /// # Errors
    /// When the device fails that has the sums.
    pub fn in_host_memory(&self) -> Done<Cow<'_, Self>> {
        match self.lower {
            Sums::Host(_) => Ok(Cow::Borrowed(self)),
            _ => Ok(Cow::Owned(Self::host(self.n, self.lower.downloaded(self.n * self.n)?, self.tokens))),
        }
    }
}

/// X'(O - X): how the inputs X that a linear gets in the quantized model have moved away from those it had
/// in the original, O.
#[derive(Clone, Debug)]
pub struct Drift {
    pub n: usize,
    /// Row-major.
    pub values: Sums<f32>,
    /// Rows of X so far.
    pub tokens: u64,
}

impl Drift {
    /// In host memory.
    pub fn host(n: usize, values: Vec<f32>, tokens: u64) -> Self {
        Self { n, values: Sums::Host(values), tokens }
    }

    /// The same in host memory.
    ///
    /// # Errors
    /// When the device fails that has the sums.
    pub fn in_host_memory(&self) -> Done<Cow<'_, Self>> {
        match self.values {
            Sums::Host(_) => Ok(Cow::Borrowed(self)),
            _ => Ok(Cow::Owned(Self::host(self.n, self.values.downloaded(self.n * self.n)?, self.tokens))),
        }
    }
}

/// A decoding step that runs at once. Dropping this ends it.
pub struct DecodingStep(Option<cuda::graph::Measuring>);

impl DecodingStep {
    /// Bytes of memory that it takes to record such a step, so far; `None` where it cannot be recorded.
    pub fn bytes(&self) -> Option<usize> {
        self.0.as_ref().and_then(cuda::graph::Measuring::bytes)
    }
}

/// Memory shared by recorded steps. A result in it is valid until the next step runs.
pub struct Workspace(cuda::graph::GraphSpace);

impl Workspace {
    pub fn bytes(&self) -> usize {
        self.0.bytes()
    }
}

/// A recording in progress. Dropping it before `finish` discards the recording.
pub struct RecordingStep(cuda::graph::Capture);

impl RecordingStep {
    /// Ends it.
    pub fn finish(self) -> Done<Recording> {
        self.0.finish().map(Recording)
    }
}

/// The device work of some operations, to be run again on other contents of the same memory.
pub struct Recording(cuda::graph::Graph);

impl Recording {
    /// Runs it.
    pub fn run(&mut self) -> Done<()> {
        self.0.run()
    }
}

/// The operations the engine is made of. Rows of every tensor are tokens. Operations may still be under way when
/// they return; `download` and everything else that gives numbers waits for them.
pub trait Backend: Send + Sync {
    /// The device in words, for reports.
    fn device(&self) -> String;

    /// The kind of device: equal kinds give equal bits, whatever their number.
    fn kind(&self) -> String;

    /// How many devices work side by side: batches go to them in turn.
    fn devices(&self) -> usize;

    /// In a pass of at most so many rows, every row's result of every operation is that of the row alone, bit for bit.
    fn few_rows(&self) -> usize;

    /// Bytes that can be had; on several devices, of the one that has least. `None` where the system does not tell.
    fn free_memory(&self) -> Option<u64>;

    /// GPTQ on the device, where it has its own; otherwise `quantize` computes on the host.
    fn solver(&self) -> Option<&dyn Solver>;

    /// Takes up a stored weight for `linear`.
    fn load(&self, weight: Weight) -> Done<Matrix>;

    /// `now` is about to be used, `next` after it: a device that does not hold all weights brings them in.
    fn expect(&self, now: &[&Matrix], next: &[&Matrix]) -> Done<()>;

    /// These will not be used for a while; their room may go to others.
    fn release(&self, matrices: &[&Matrix]);

    /// Brings a parameter, a vector or matrix of floats, to all devices.
    fn upload(&self, rows: usize, cols: usize, data: Vec<f32>) -> Done<Tensor>;

    /// Brings floats back.
    fn download(&self, x: &Tensor) -> Done<Vec<f32>>;

    /// Some rows of `x`, in the order named.
    fn rows(&self, x: &Tensor, rows: &[usize]) -> Done<Tensor>;

    /// Takes up token ids and their places, for a pass without a cache.
    fn batch(&self, ids: Vec<u32>, spans: Vec<Span>) -> Done<Batch> {
        self.paged_batch(ids, spans, Tables::default())
    }

    /// The same for a pass over a cache: `tables` have the blocks of each span's sequence, with room for its new
    /// tokens.
    fn paged_batch(&self, ids: Vec<u32>, spans: Vec<Span>, tables: Tables) -> Done<Batch>;

    /// Other ids, places and blocks for a batch of the same shape, in the same memory.
    fn rebatch(&self, batch: &Batch, ids: Vec<u32>, spans: Vec<Span>, tables: Tables) -> Done<Batch>;

    /// Rows of the embedding table, times `scale`.
    fn embed(&self, table: &Matrix, batch: &Batch, scale: f32) -> Done<Tensor>;

    /// x / sqrt(mean(x²) + eps) * weight, row by row.
    fn rms_norm(&self, x: &Tensor, weight: &Tensor, eps: f32) -> Done<Tensor>;

    /// x += y, then the norm of x.
    fn add_rms_norm(&self, x: &mut Tensor, y: &Tensor, weight: &Tensor, eps: f32) -> Done<Tensor>;

    /// x W' + bias.
    fn linear(&self, x: &Tensor, weight: &Matrix, bias: Option<&Tensor>) -> Done<Tensor>;

    /// Rotates each head of `x` by its position (halves apart, as Hugging Face stores them), after an RMS
    /// norm over each head where `norm` gives its weight and eps.
    fn rope(
        &self,
        x: &mut Tensor,
        batch: &Batch,
        head_dim: usize,
        norm: Option<(&Tensor, f32)>,
        table: &RopeTable,
    ) -> Done<()>;

    /// The type of cache that is taken where none is asked for.
    fn cache_type(&self) -> CacheType;

    /// Memory for keys and values. What is in it is undefined.
    fn pool(&self, shape: PoolShape) -> Done<Pool>;

    /// Copies whole blocks, from the first to the second of each pair, one pair after the other.
    fn copy_blocks(&self, pool: &mut Pool, pairs: &[(u32, u32)]) -> Done<()>;

    /// Blocks in host memory.
    fn save_blocks(&self, pool: &Pool, blocks: &[u32]) -> Done<SavedBlocks>;

    /// Brings back what was saved of as many blocks of such a pool.
    fn restore_blocks(&self, pool: &mut Pool, blocks: &[u32], saved: &SavedBlocks) -> Done<()>;

    /// Causal attention of each span over itself and, with a layer of a pool, over what that holds of its sequence;
    /// the layer takes up the new keys and values. Over a pool, a row's bits depend on no other row in passes of few
    /// rows.
    fn attention(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        batch: &Batch,
        shape: &AttentionShape,
        layer: Option<Layer>,
    ) -> Done<Tensor>;

    /// activation(gate) * up.
    fn gated(&self, gate: &Tensor, up: &Tensor, activation: Activation) -> Done<Tensor>;

    /// x += y.
    fn add(&self, x: &mut Tensor, y: &Tensor) -> Done<()>;

    /// Zero sums for inputs of `n` channels.
    fn gram(&self, n: usize) -> Done<Gram>;

    /// Adds X'X to `gram`.
    fn add_gram(&self, x: &Tensor, gram: &mut Gram) -> Done<()>;

    /// The diagonal of X'X.
    fn diagonal(&self, gram: &Gram) -> Done<Vec<f64>>;

    /// The sum of squares of each channel.
    fn squares(&self, x: &Tensor) -> Done<Vec<f64>>;

    /// The largest magnitude of each channel; NaN where the channel has one.
    fn abs_max(&self, x: &Tensor) -> Done<Vec<f32>>;

    /// The sum of magnitudes of each channel.
    fn abs_sum(&self, x: &Tensor) -> Done<Vec<f64>>;

    /// Zero sums for inputs of `n` channels.
    fn drift(&self, n: usize) -> Done<Drift>;

    /// Adds X'(O - X) to `drift`.
    fn add_drift(&self, x: &Tensor, original: &Tensor, drift: &mut Drift) -> Done<()>;

    /// Negative log-likelihood (nats) of `targets[i]` under the softmax of row i of x W'.
    fn nll(&self, x: &Tensor, head: &Matrix, targets: &[u32], softcap: Option<f32>) -> Done<Vec<f32>>;

    /// x = cap * tanh(x / cap).
    fn softcap(&self, x: &mut Tensor, cap: f32) -> Done<()>;

    /// The channel with the largest value in each row, the lowest of equals; `None` where a row has none: NaN or
    /// plus infinity in it, or nothing above minus infinity.
    fn argmax(&self, x: &Tensor) -> Done<Vec<Option<u32>>>;

    /// Whether decoding steps can be recorded.
    fn records(&self) -> bool;

    /// Starts a decoding step, one more token of each of some sequences, that is computed at once. How its products are
    /// computed depends on their shapes and on its being such a step, but not on whether it is recorded.
    ///
    /// A device serves one decoding step at a time, from one thread. No other thread may give work to the device until the
    /// step, or its recording, has ended.
    fn begin_step(&self) -> Done<DecodingStep>;

    /// Memory for recorded steps.
    fn workspace(&self, bytes: usize) -> Done<Workspace>;

    /// Starts recording a decoding step, with its memory in `workspace`. A step of the same shape was computed before:
    /// nothing is loaded or allocated now.
    fn begin_recording(&self, workspace: &Workspace) -> Done<RecordingStep>;
}
