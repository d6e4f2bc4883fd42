//! The CUDA backend: one or several devices of one machine, through a driver that is loaded when it is there.

mod attention;
pub mod batch;
mod blas;
pub mod cache;
mod device;
mod eight_bits;
mod ggml;
pub mod graph;
mod linear;
mod memory;
mod modules;
mod options;
pub mod solver;
pub mod weights;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use batch::OnDevice;
pub use device::{Device, count, installed};
use graph::{Capture, GraphSpace, Measuring};
pub use memory::Buffer;
pub use options::{CudaOptions, Precision};
use weights::{DeviceMatrix, Loader, Plane, Stored};

use super::cache::{CacheType, Layer, Memory, Pool, PoolShape, SavedBlocks, Tables};
use super::solver::Solver;
use super::tensor::Tensor;
use super::weight::Weight;
use super::{
    Activation, AttentionShape, Backend, Batch, DecodingStep, Done, Drift, Gram, Matrix, RecordingStep, RopeTable,
    Span, Sums, Workspace,
};

/// Logits held at once while scoring, so that large vocabularies do not decide the memory needed.
const LOGITS_AT_ONCE: usize = 64 << 20;
/// Threads of a block in kernels that take values one by one.
const BLOCK: usize = 256;

/// Some CUDA devices.
pub struct Cuda {
    loaders: Vec<Arc<Loader>>,
    options: CudaOptions,
    /// Bytes of all weights taken up.
    weights: Arc<AtomicU64>,
    /// Bytes of weights that may stay on a device.
    room: u64,
    /// Batches so far, which go to the devices in turn.
    batches: AtomicUsize,
}

impl Cuda {
    /// Opens the devices; fails with the reason where one cannot be used.
    pub fn open(options: CudaOptions) -> Done<Self> {
        let fail = |why: String| super::DeviceError { device: "cuda".into(), why };
        let count = count().map_err(fail)?;
        let mut devices = Vec::new();
        let mut room = u64::MAX;
        for (slot, &ordinal) in options.devices.iter().enumerate() {
            if ordinal >= count {
                let known = (0..count).map(|i| format!("cuda:{i}")).collect::<Vec<_>>().join(", ");
                return Err(fail(format!("there is no device {ordinal}; there are {known}")));
            }
            let device = Device::open(ordinal, slot, options.cublas)?;
            room = room.min(device.free_memory()? as u64 / 2);
            devices.push(device);
        }
        if devices.is_empty() {
            return Err(fail("no device is named".into()));
        }
        device::agree_on_cublas(&mut devices);
        let loaders: Vec<_> = devices.into_iter().map(Loader::new).collect();
        // Sums and activations of the others are fetched by the first, and rarely the other way round.
        for other in &loaders[1..] {
            memory::share(other.device(), loaders[0].device());
            memory::share(loaders[0].device(), other.device());
        }
        let room = options.weight_bytes.unwrap_or(room);
        Ok(Self { loaders, options, weights: Arc::default(), room, batches: AtomicUsize::new(0) })
    }

    /// What computes large dense products: cuBLAS in which version, or why it does not.
    pub fn library(&self) -> String {
        self.cublas().unwrap_or_else(|why| format!("no cuBLAS: {why}"))
    }

    /// cuBLAS with its version, or why it is not used; all devices agree on it.
    fn cublas(&self) -> Result<String, &str> {
        self.first().blas.as_ref().map(|blas| format!("cuBLAS {}", blas.version())).map_err(String::as_str)
    }

    /// The device that solves and decodes.
    pub(super) fn first(&self) -> &Arc<Device> {
        self.loaders[0].device()
    }

    /// A matrix on the device where `buffer` is.
    pub(super) fn matrix(&self, matrix: &Matrix, device: &Device) -> Done<Arc<DeviceMatrix>> {
        match matrix {
            Matrix::Cuda(stored) => self.loaders[device.slot].get(stored),
            Matrix::Host(_) => Err(device.failed("a weight of another backend")),
        }
    }

    fn stored<'a>(matrices: &'a [&'a Matrix]) -> impl Iterator<Item = &'a Arc<Stored>> {
        matrices.iter().filter_map(|matrix| match matrix {
            Matrix::Cuda(stored) => Some(stored),
            Matrix::Host(_) => None,
        })
    }

    /// Makes the tensor's memory its own, to be written in place.
    fn unshare(&self, x: &mut Tensor) -> Done<()> {
        if !x.is_unique() {
            let buffer = x.buffer().device().fetch(x.buffer())?;
            *x = Tensor::cuda(x.rows, x.cols, buffer);
        }
        Ok(())
    }

    fn on_device(batch: &Batch) -> &OnDevice {
        batch.cuda.as_ref().unwrap_or_else(|| panic!("a batch of another backend"))
    }

    fn store<'a>(&self, pool: &'a Pool) -> Done<&'a cache::Store> {
        match &pool.memory {
            Memory::Cuda(store) => Ok(store),
            Memory::Host(_) => Err(self.first().failed("a key-value cache of another backend")),
        }
    }

    fn logits(&self, x: &Tensor, head: &Matrix, bias: Option<&Tensor>) -> Done<Tensor> {
        let device = x.buffer().device();
        let bias = bias.map(|b| b.buffer_on(device));
        linear::linear(x, &*self.matrix(head, device)?, head.weight().rows(), bias, self.options.precision)
    }
}

/// Blocks of `BLOCK` threads for `n` values.
fn blocks(n: usize) -> [usize; 3] {
    [n.div_ceil(BLOCK), 1, 1]
}

/// Threads for a kernel that takes a row a block.
fn row_threads(cols: usize) -> usize {
    cols.next_multiple_of(32).min(BLOCK)
}

/// Fresh memory for `rows * cols` floats.
fn floats(device: &Arc<Device>, rows: usize, cols: usize) -> Done<Buffer> {
    device.alloc(rows * cols * 4)
}

impl Backend for Cuda {
    fn device(&self) -> String {
        self.loaders.iter().map(|l| l.device().name.as_str()).collect::<Vec<_>>().join(", ")
    }

    fn kind(&self) -> String {
        let mut kinds: Vec<&str> = self.loaders.iter().map(|l| l.device().model.as_str()).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let library = self.cublas().ok();
        kinds.extend(library.as_deref());
        kinds.join(", ")
    }

    fn devices(&self) -> usize {
        self.loaders.len()
    }

    fn few_rows(&self) -> usize {
        linear::FEW_ROWS
    }

    fn free_memory(&self) -> Option<u64> {
        self.loaders.iter().map(|l| l.device().free_memory().ok().map(|free| free as u64)).min()?
    }

    fn solver(&self) -> Option<&dyn Solver> {
        Some(self)
    }

    fn load(&self, weight: Weight) -> Done<Matrix> {
        Ok(Matrix::Cuda(Arc::new(Stored::new(weight, self.loaders.len(), &self.weights))))
    }

    fn expect(&self, now: &[&Matrix], next: &[&Matrix]) -> Done<()> {
        for loader in &self.loaders {
            loader.ahead(Self::stored(now).chain(Self::stored(next)).cloned());
        }
        Ok(())
    }

    fn release(&self, matrices: &[&Matrix]) {
        if self.weights.load(Ordering::Relaxed) <= self.room {
            return;
        }
        for loader in &self.loaders {
            Self::stored(matrices).for_each(|stored| stored.release(loader.device()));
        }
    }

    fn upload(&self, rows: usize, cols: usize, data: Vec<f32>) -> Done<Tensor> {
        let copies = self.loaders.iter().map(|l| l.device().upload(&data)).collect::<Done<Vec<_>>>()?;
        Ok(Tensor::everywhere(rows, cols, copies))
    }

    fn download(&self, x: &Tensor) -> Done<Vec<f32>> {
        x.buffer().device().download(x.buffer(), 0, x.rows * x.cols)
    }

    fn rows(&self, x: &Tensor, rows: &[usize]) -> Done<Tensor> {
        let device = x.buffer().device();
        let (out, bytes) = (floats(device, rows.len(), x.cols)?, x.cols * 4);
        let mut done = 0;
        for run in rows.chunk_by(|a, b| a + 1 == *b) {
            device.copy(x.buffer(), run[0] * bytes, &out, done * bytes, run.len() * bytes)?;
            done += run.len();
        }
        Ok(Tensor::cuda(rows.len(), x.cols, out))
    }

    fn paged_batch(&self, ids: Vec<u32>, spans: Vec<Span>, tables: Tables) -> Done<Batch> {
        // Pools are on the first device.
        let turn = match tables.stride {
            0 => self.batches.fetch_add(1, Ordering::Relaxed) % self.loaders.len(),
            _ => 0,
        };
        let cuda = Some(OnDevice::new(self.loaders[turn].device(), &ids, &spans, &tables)?);
        Ok(Batch { ids, spans, tables, cuda })
    }

    fn rebatch(&self, batch: &Batch, ids: Vec<u32>, spans: Vec<Span>, tables: Tables) -> Done<Batch> {
        let cuda = Some(Self::on_device(batch).rewrite(&ids, &spans, &tables)?);
        Ok(Batch { ids, spans, tables, cuda })
    }

    fn embed(&self, table: &Matrix, batch: &Batch, scale: f32) -> Done<Tensor> {
        let OnDevice { device, buffer, rows, .. } = Self::on_device(batch);
        let cols = table.weight().cols();
        let out = floats(device, *rows, cols)?;
        let matrix = self.matrix(table, device)?;
        let (plane, high, low, stride) = match &*matrix {
            DeviceMatrix::Dense { plane, high, low, stride } => (plane, high, low, stride),
            DeviceMatrix::Quant(_) | DeviceMatrix::Int8(_) | DeviceMatrix::Fp8(_) => {
                return Err(device.failed("a quantized embedding table"));
            }
            DeviceMatrix::Ggml { kind, blocks } => {
                let out = Tensor::cuda(*rows, cols, out);
                ggml::embed(*kind, blocks, buffer, scale, &out)?;
                return Ok(out);
            }
        };
        let kernel = match (plane, low) {
            (Plane::F16, _) => "embed_f16",
            (Plane::Bf16, None) => "embed_bf16",
            (Plane::Bf16, Some(_)) => "embed_planes",
        };
        let launch = device.launch(kernel, [*rows, 1, 1], 128).buffer(high);
        let launch = if let Some(low) = low { launch.buffer(low) } else { launch };
        launch.buffer(buffer).buffer(&out).f32(scale).u32(cols).u32(*stride).go()?;
        Ok(Tensor::cuda(*rows, cols, out))
    }

    fn rms_norm(&self, x: &Tensor, weight: &Tensor, eps: f32) -> Done<Tensor> {
        let device = x.buffer().device();
        let out = floats(device, x.rows, x.cols)?;
        let weight = weight.buffer_on(device);
        let launch = device.launch("rms_norm", [x.rows, 1, 1], row_threads(x.cols));
        launch.buffer(x.buffer()).buffer(weight).buffer(&out).f32(eps).u32(x.cols).go()?;
        Ok(Tensor::cuda(x.rows, x.cols, out))
    }

    fn add_rms_norm(&self, x: &mut Tensor, y: &Tensor, weight: &Tensor, eps: f32) -> Done<Tensor> {
        self.unshare(x)?;
        let device = x.buffer().device();
        let out = floats(device, x.rows, x.cols)?;
        let launch = device.launch("add_rms_norm", [x.rows, 1, 1], row_threads(x.cols));
        let launch = launch.buffer(x.buffer()).buffer(y.buffer()).buffer(weight.buffer_on(device));
        launch.buffer(&out).f32(eps).u32(x.cols).go()?;
        Ok(Tensor::cuda(x.rows, x.cols, out))
    }

    fn linear(&self, x: &Tensor, weight: &Matrix, bias: Option<&Tensor>) -> Done<Tensor> {
        self.logits(x, weight, bias)
    }

    fn rope(
        &self,
        x: &mut Tensor,
        batch: &Batch,
        head_dim: usize,
        norm: Option<(&Tensor, f32)>,
        table: &RopeTable,
    ) -> Done<()> {
        self.unshare(x)?;
        let OnDevice { device, buffer, rows, .. } = Self::on_device(batch);
        let heads = x.cols / head_dim;
        if let Some((weight, eps)) = norm {
            let launch = device.launch("rms_norm", [rows * heads, 1, 1], row_threads(head_dim));
            let launch = launch.buffer(x.buffer()).buffer(weight.buffer_on(device)).buffer(x.buffer());
            launch.f32(eps).u32(head_dim).go()?;
        }
        let half = table.cos.cols;
        let launch = device.launch("rope", [*rows, (heads * half).div_ceil(128), 1], 128);
        let launch = launch.buffer(x.buffer()).buffer_at(buffer, Self::on_device(batch).positions());
        let launch = launch.buffer(table.cos.buffer_on(device)).buffer(table.sin.buffer_on(device));
        launch.u32(*rows).u32(heads).u32(head_dim).u32(half).go()
    }

    fn cache_type(&self) -> CacheType {
        CacheType::F16
    }

    fn pool(&self, shape: PoolShape) -> Done<Pool> {
        shape.check().map_err(|why| self.first().failed(why))?;
        let memory = Memory::Cuda(cache::Store::new(self.first(), &shape)?);
        Ok(Pool { shape, memory })
    }

    fn copy_blocks(&self, pool: &mut Pool, pairs: &[(u32, u32)]) -> Done<()> {
        self.store(pool)?.copy(pairs)
    }

    fn save_blocks(&self, pool: &Pool, blocks: &[u32]) -> Done<SavedBlocks> {
        self.store(pool)?.save(blocks)
    }

    fn restore_blocks(&self, pool: &mut Pool, blocks: &[u32], saved: &SavedBlocks) -> Done<()> {
        self.store(pool)?.restore(blocks, saved)
    }

    fn attention(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        batch: &Batch,
        shape: &AttentionShape,
        layer: Option<Layer>,
    ) -> Done<Tensor> {
        let places = Self::on_device(batch);
        if let Some(layer) = &layer {
            let fits = batch.tables.check(&batch.spans, layer.pool.shape.blocks);
            fits.map_err(|why| places.device.failed(why))?;
        }
        attention::attention([q, k, v], batch, places, shape, layer)
    }

    fn gated(&self, gate: &Tensor, up: &Tensor, activation: Activation) -> Done<Tensor> {
        let device = gate.buffer().device();
        let n = gate.rows * gate.cols;
        let out = floats(device, gate.rows, gate.cols)?;
        let kind = match activation {
            Activation::Silu => 0,
            Activation::GeluTanh => 1,
        };
        let launch = device.launch("gated", blocks(n), BLOCK);
        launch.buffer(gate.buffer()).buffer(up.buffer()).buffer(&out).u64(n).i32(kind).go()?;
        Ok(Tensor::cuda(gate.rows, gate.cols, out))
    }

    fn add(&self, x: &mut Tensor, y: &Tensor) -> Done<()> {
        self.unshare(x)?;
        let n = x.rows * x.cols;
        let launch = x.buffer().device().launch("add", blocks(n), BLOCK);
        launch.buffer(x.buffer()).buffer(y.buffer()).u64(n).go()
    }

    fn gram(&self, n: usize) -> Done<Gram> {
        let lower = self.first().alloc(n * n * 8)?;
        self.first().zero(&lower)?;
        Ok(Gram { n, lower: Sums::Cuda(lower), tokens: 0 })
    }

    fn add_gram(&self, x: &Tensor, gram: &mut Gram) -> Done<()> {
        // Whatever device has the rows, their sum is added on the first, in the order of the calls.
        let part = self.first().fetch_shared(&linear::gram(x)?)?;
        linear::accumulate(gram.lower.buffer(), &part)?;
        gram.tokens += x.rows as u64;
        Ok(())
    }

    fn diagonal(&self, gram: &Gram) -> Done<Vec<f64>> {
        solver::diagonal(gram.lower.buffer(), gram.n)
    }

    fn squares(&self, x: &Tensor) -> Done<Vec<f64>> {
        let device = x.buffer().device();
        let out = device.alloc(x.cols * 8)?;
        let launch = device.launch("column_squares", [x.cols.div_ceil(32), 1, 1], BLOCK).buffer(x.buffer());
        launch.buffer(&out).u32(x.rows).u32(x.cols).go()?;
        device.download(&out, 0, x.cols)
    }

    fn abs_max(&self, x: &Tensor) -> Done<Vec<f32>> {
        let device = x.buffer().device();
        let out = device.alloc(x.cols * 4)?;
        let launch = device.launch("column_abs_max", [x.cols.div_ceil(32), 1, 1], BLOCK).buffer(x.buffer());
        launch.buffer(&out).u32(x.rows).u32(x.cols).go()?;
        device.download(&out, 0, x.cols)
    }

    fn abs_sum(&self, x: &Tensor) -> Done<Vec<f64>> {
        let device = x.buffer().device();
        let out = device.alloc(x.cols * 8)?;
        let launch = device.launch("column_abs_sum", [x.cols.div_ceil(32), 1, 1], BLOCK).buffer(x.buffer());
        launch.buffer(&out).u32(x.rows).u32(x.cols).go()?;
        device.download(&out, 0, x.cols)
    }

    fn drift(&self, n: usize) -> Done<Drift> {
        let values = self.first().alloc(n * n * 4)?;
        self.first().zero(&values)?;
        Ok(Drift { n, values: Sums::Cuda(values), tokens: 0 })
    }

    fn add_drift(&self, x: &Tensor, original: &Tensor, drift: &mut Drift) -> Done<()> {
        let part = self.first().fetch_shared(&linear::cross(x, original)?)?;
        let (device, n) = (self.first(), drift.n * drift.n);
        device.launch("add", blocks(n), BLOCK).buffer(drift.values.buffer()).buffer(&part).u64(n).go()?;
        drift.tokens += x.rows as u64;
        Ok(())
    }

    fn nll(&self, x: &Tensor, head: &Matrix, targets: &[u32], softcap: Option<f32>) -> Done<Vec<f32>> {
        let device = x.buffer().device();
        let vocab = head.weight().rows();
        let at_once = (LOGITS_AT_ONCE / vocab).max(1);
        let mut scores = Vec::new();
        for (i, targets) in targets.chunks(at_once).enumerate() {
            let rows = targets.len();
            let part = floats(device, rows, x.cols)?;
            device.copy(x.buffer(), i * at_once * x.cols * 4, &part, 0, rows * x.cols * 4)?;
            let mut logits = self.logits(&Tensor::cuda(rows, x.cols, part), head, None)?;
            if let Some(cap) = softcap {
                self.softcap(&mut logits, cap)?;
            }
            let (targets, out) = (device.upload(targets)?, floats(device, rows, 1)?);
            let launch = device.launch("nll", [rows, 1, 1], BLOCK);
            launch.buffer(logits.buffer()).buffer(&targets).buffer(&out).u32(vocab).go()?;
            scores.push((out, rows));
        }
        let mut all = Vec::with_capacity(targets.len());
        for (out, rows) in scores {
            all.extend(device.download::<f32>(&out, 0, rows)?);
        }
        Ok(all)
    }

    fn softcap(&self, x: &mut Tensor, cap: f32) -> Done<()> {
        self.unshare(x)?;
        let n = x.rows * x.cols;
        x.buffer().device().launch("softcap", blocks(n), BLOCK).buffer(x.buffer()).u64(n).f32(cap).go()
    }

    fn argmax(&self, x: &Tensor) -> Done<Vec<Option<u32>>> {
        let device = x.buffer().device();
        let out = device.alloc(x.rows * 4)?;
        device.launch("argmax", [x.rows, 1, 1], BLOCK).buffer(x.buffer()).buffer(&out).u32(x.cols).go()?;
        let tokens = device.download::<u32>(&out, 0, x.rows)?;
        Ok(tokens.into_iter().map(|token| (token != u32::MAX).then_some(token)).collect())
    }

    fn records(&self) -> bool {
        // Weights that come and go cannot be part of a graph.
        self.options.graphs && self.weights.load(Ordering::Relaxed) <= self.room
    }

    fn begin_step(&self) -> Done<DecodingStep> {
        Measuring::new(self.first(), self.records()).map(|step| DecodingStep(Some(step)))
    }

    fn workspace(&self, bytes: usize) -> Done<Workspace> {
        GraphSpace::new(self.first(), bytes).map(Workspace)
    }

    fn begin_recording(&self, workspace: &Workspace) -> Done<RecordingStep> {
        Capture::begin(self.first(), &workspace.0).map(RecordingStep)
    }
}
