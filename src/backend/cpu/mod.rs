//! The CPU backend, and the reference for the others: f32 but for products of bytes, stored weights widened by panels, or
//! multiplied from their stored form where there are few rows.

mod attention;
pub(super) mod cache;
mod elementwise;
mod linear;
mod paged;
mod rounding;

use rayon::prelude::*;

use super::cache::{CacheType, Layer, Memory, Pool, PoolShape, SavedBlocks, Tables};
use super::solver::Solver;
use super::tensor::Tensor;
use super::weight::Weight;
use super::{
    Activation, AttentionShape, Backend, Batch, DecodingStep, DeviceError, Done, Drift, Gram, Matrix, RecordingStep,
    RopeTable, Span, Workspace,
};
use crate::num::{matmul, simd};

/// All cores of the current thread pool.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu;

/// Logits held at once while scoring, so that large vocabularies do not decide the memory needed.
const LOGITS_AT_ONCE: usize = 16 << 20;

/// An error of this device.
fn failed(why: impl Into<String>) -> DeviceError {
    DeviceError { device: "cpu".into(), why: why.into() }
}

/// The codes of a pool in host memory.
fn store(pool: &mut Pool) -> Done<&mut cache::Store> {
    match &mut pool.memory {
        Memory::Host(store) => Ok(store),
        Memory::Cuda(_) => Err(failed("a key-value cache of another backend")),
    }
}

impl Backend for Cpu {
    fn device(&self) -> String {
        "cpu".into()
    }

    fn kind(&self) -> String {
        "cpu".into()
    }

    fn devices(&self) -> usize {
        1
    }

    fn few_rows(&self) -> usize {
        linear::FEW_ROWS
    }

    fn free_memory(&self) -> Option<u64> {
        let info = std::fs::read_to_string("/proc/meminfo").ok()?;
        let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kilobytes| kilobytes * 1024)
    }

    fn solver(&self) -> Option<&dyn Solver> {
        None
    }

    fn load(&self, weight: Weight) -> Done<Matrix> {
        Ok(Matrix::Host(weight))
    }

    fn expect(&self, _now: &[&Matrix], _next: &[&Matrix]) -> Done<()> {
        Ok(())
    }

    fn release(&self, _matrices: &[&Matrix]) {}

    fn upload(&self, rows: usize, cols: usize, data: Vec<f32>) -> Done<Tensor> {
        Ok(Tensor::host(rows, cols, data))
    }

    fn download(&self, x: &Tensor) -> Done<Vec<f32>> {
        Ok(x.as_host().to_vec())
    }

    fn rows(&self, x: &Tensor, rows: &[usize]) -> Done<Tensor> {
        let data = rows.iter().flat_map(|row| &x.as_host()[row * x.cols..(row + 1) * x.cols]).copied().collect();
        Ok(Tensor::host(rows.len(), x.cols, data))
    }

    fn paged_batch(&self, ids: Vec<u32>, spans: Vec<Span>, tables: Tables) -> Done<Batch> {
        Ok(Batch { ids, spans, tables, cuda: None })
    }

    fn rebatch(&self, _batch: &Batch, ids: Vec<u32>, spans: Vec<Span>, tables: Tables) -> Done<Batch> {
        self.paged_batch(ids, spans, tables)
    }

    fn embed(&self, table: &Matrix, batch: &Batch, scale: f32) -> Done<Tensor> {
        let ids = &batch.ids;
        let weight = table.weight();
        let cols = weight.cols();
        let mut out = Tensor::zeros(ids.len(), cols);
        out.as_host_mut().par_chunks_mut(cols).zip(ids).for_each(|(row, &id)| {
            let id = id as usize;
            weight.panel(id..id + 1, row);
            row.iter_mut().for_each(|x| *x *= scale);
        });
        Ok(out)
    }

    fn rms_norm(&self, x: &Tensor, weight: &Tensor, eps: f32) -> Done<Tensor> {
        let mut out = x.clone();
        elementwise::rms_norm(out.as_host_mut(), weight.as_host(), eps);
        Ok(out)
    }

    fn add_rms_norm(&self, x: &mut Tensor, y: &Tensor, weight: &Tensor, eps: f32) -> Done<Tensor> {
        self.add(x, y)?;
        self.rms_norm(x, weight, eps)
    }

    fn linear(&self, x: &Tensor, weight: &Matrix, bias: Option<&Tensor>) -> Done<Tensor> {
        let weight = weight.weight();
        let mut out = Tensor::zeros(x.rows, weight.rows());
        linear::linear(x.as_host(), x.rows, weight, out.as_host_mut());
        if let Some(bias) = bias {
            elementwise::add_row(out.as_host_mut(), bias.as_host());
        }
        Ok(out)
    }

    fn rope(
        &self,
        x: &mut Tensor,
        batch: &Batch,
        head_dim: usize,
        norm: Option<(&Tensor, f32)>,
        table: &RopeTable,
    ) -> Done<()> {
        if let Some((weight, eps)) = norm {
            elementwise::rms_norm(x.as_host_mut(), weight.as_host(), eps);
        }
        elementwise::rope(x, &batch.spans, head_dim, table);
        Ok(())
    }

    fn cache_type(&self) -> CacheType {
        CacheType::F32
    }

    fn pool(&self, shape: PoolShape) -> Done<Pool> {
        shape.check().map_err(failed)?;
        let memory = Memory::Host(cache::Store::new(&shape));
        Ok(Pool { shape, memory })
    }

    fn copy_blocks(&self, pool: &mut Pool, pairs: &[(u32, u32)]) -> Done<()> {
        store(pool)?.copy(pairs);
        Ok(())
    }

    fn save_blocks(&self, pool: &Pool, blocks: &[u32]) -> Done<SavedBlocks> {
        match &pool.memory {
            Memory::Host(store) => Ok(store.save(blocks)),
            Memory::Cuda(_) => Err(failed("a key-value cache of another backend")),
        }
    }

    fn restore_blocks(&self, pool: &mut Pool, blocks: &[u32], saved: &SavedBlocks) -> Done<()> {
        store(pool)?.restore(blocks, saved);
        Ok(())
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
        let Some(Layer { pool, index }) = layer else {
            return Ok(attention::attention(q, k, v, &batch.spans, shape));
        };
        batch.tables.check(&batch.spans, pool.shape.blocks).map_err(failed)?;
        let Pool { shape: pool, memory: Memory::Host(store) } = pool else {
            return Err(failed("a key-value cache of another backend"));
        };
        Ok(paged::attention([q, k, v], batch, shape, store, pool, index))
    }

    fn gated(&self, gate: &Tensor, up: &Tensor, activation: Activation) -> Done<Tensor> {
        let mut out = gate.clone();
        elementwise::gated(out.as_host_mut(), up.as_host(), activation);
        Ok(out)
    }

    fn add(&self, x: &mut Tensor, y: &Tensor) -> Done<()> {
        elementwise::add(x.as_host_mut(), y.as_host());
        Ok(())
    }

    fn gram(&self, n: usize) -> Done<Gram> {
        Ok(Gram::host(n, vec![0.0; n * n], 0))
    }

    fn add_gram(&self, x: &Tensor, gram: &mut Gram) -> Done<()> {
        matmul::add_gram(x.as_host(), x.rows, x.cols, gram.lower.host_mut());
        gram.tokens += x.rows as u64;
        Ok(())
    }

    fn diagonal(&self, gram: &Gram) -> Done<Vec<f64>> {
        let lower = gram.lower.host();
        Ok((0..gram.n).map(|i| lower[i * gram.n + i]).collect())
    }

    fn squares(&self, x: &Tensor) -> Done<Vec<f64>> {
        Ok(elementwise::squares(x.as_host(), x.cols))
    }

    fn abs_max(&self, x: &Tensor) -> Done<Vec<f32>> {
        Ok(elementwise::abs_max(x.as_host(), x.cols))
    }

    fn abs_sum(&self, x: &Tensor) -> Done<Vec<f64>> {
        Ok(elementwise::abs_sum(x.as_host(), x.cols))
    }

    fn drift(&self, n: usize) -> Done<Drift> {
        Ok(Drift::host(n, vec![0.0; n * n], 0))
    }

    fn add_drift(&self, x: &Tensor, original: &Tensor, drift: &mut Drift) -> Done<()> {
        let mut moved = original.clone();
        elementwise::subtract(moved.as_host_mut(), x.as_host());
        matmul::add_cross(x.as_host(), moved.as_host(), x.rows, x.cols, drift.values.host_mut());
        drift.tokens += x.rows as u64;
        Ok(())
    }

    fn nll(&self, x: &Tensor, head: &Matrix, targets: &[u32], softcap: Option<f32>) -> Done<Vec<f32>> {
        let weight: &Weight = head.weight();
        let vocab = weight.rows();
        let rows = (LOGITS_AT_ONCE / vocab).max(1);
        let mut out = Vec::with_capacity(targets.len());
        let mut logits = Vec::new();
        for (x, targets) in x.as_host().chunks(rows * x.cols).zip(targets.chunks(rows)) {
            logits.resize(targets.len() * vocab, 0.0);
            linear::linear(x, targets.len(), weight, &mut logits);
            if let Some(cap) = softcap {
                elementwise::softcap(&mut logits, cap);
            }
            let scores = logits.par_chunks(vocab).zip(targets).map(|(row, &target)| {
                simd::vectorized(|| {
                    let max = simd::max(row);
                    // A NaN anywhere must show: max ignores it, the sum does not.
                    simd::sum_exp(row, max).ln() + max - row[target as usize]
                })
            });
            out.par_extend(scores);
        }
        Ok(out)
    }

    fn softcap(&self, x: &mut Tensor, cap: f32) -> Done<()> {
        elementwise::softcap(x.as_host_mut(), cap);
        Ok(())
    }

    fn argmax(&self, x: &Tensor) -> Done<Vec<Option<u32>>> {
        Ok(x.as_host().par_chunks(x.cols).map(elementwise::argmax).collect())
    }

    fn records(&self) -> bool {
        false
    }

    fn begin_step(&self) -> Done<DecodingStep> {
        Ok(DecodingStep(None))
    }

    fn workspace(&self, _: usize) -> Done<Workspace> {
        Err(DeviceError { device: self.device(), why: "nothing is recorded here".into() })
    }

    fn begin_recording(&self, _: &Workspace) -> Done<RecordingStep> {
        Err(DeviceError { device: self.device(), why: "nothing is recorded here".into() })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn the_system_tells_what_is_free() {
        assert!(Cpu.free_memory().unwrap() > 1 << 20);
    }
}
