//! The CPU backend, and the reference for the others: f32 throughout, stored weights widened by panels.

mod attention;
mod elementwise;

use rayon::prelude::*;

use super::weight::Weight;
use super::{Activation, AttentionShape, Backend, Done, Drift, Gram, KvCache, Matrix, RopeTable, Span};
use crate::num::{matmul, simd};
use crate::tensor::Tensor;

/// All cores of the current thread pool.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu;

/// Logits held at once while scoring, so that large vocabularies do not decide the memory needed.
const LOGITS_AT_ONCE: usize = 16 << 20;

impl Backend for Cpu {
    fn device(&self) -> String {
        "cpu".into()
    }

    fn load(&self, weight: Weight) -> Done<Matrix> {
        Ok(Matrix::Host(weight))
    }

    fn upload(&self, rows: usize, cols: usize, data: Vec<f32>) -> Done<Tensor> {
        Ok(Tensor::host(rows, cols, data))
    }

    fn download(&self, x: &Tensor) -> Done<Vec<f32>> {
        Ok(x.as_host().to_vec())
    }

    fn embed(&self, table: &Matrix, ids: &[u32], scale: f32) -> Done<Tensor> {
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

    fn linear(&self, x: &Tensor, weight: &Matrix, bias: Option<&Tensor>) -> Done<Tensor> {
        let weight = weight.weight();
        let mut out = Tensor::zeros(x.rows, weight.rows());
        matmul::linear(x.as_host(), x.rows, x.cols, weight.rows(), &|rows, b| weight.panel(rows, b), out.as_host_mut());
        if let Some(bias) = bias {
            elementwise::add_row(out.as_host_mut(), bias.as_host());
        }
        Ok(out)
    }

    fn rope(
        &self,
        x: &mut Tensor,
        spans: &[Span],
        head_dim: usize,
        norm: Option<(&Tensor, f32)>,
        table: &RopeTable,
    ) -> Done<()> {
        if let Some((weight, eps)) = norm {
            elementwise::rms_norm(x.as_host_mut(), weight.as_host(), eps);
        }
        elementwise::rope(x, spans, head_dim, table);
        Ok(())
    }

    fn attention(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        spans: &[Span],
        shape: &AttentionShape,
        caches: Option<&mut [KvCache]>,
    ) -> Done<Tensor> {
        Ok(attention::attention(q, k, v, spans, shape, caches))
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

    fn add_gram(&self, x: &Tensor, gram: &mut Gram) -> Done<()> {
        matmul::add_gram(x.as_host(), x.rows, x.cols, &mut gram.lower);
        gram.tokens += x.rows as u64;
        Ok(())
    }

    fn add_drift(&self, x: &Tensor, original: &Tensor, drift: &mut Drift) -> Done<()> {
        let mut moved = original.clone();
        elementwise::subtract(moved.as_host_mut(), x.as_host());
        matmul::add_cross(x.as_host(), moved.as_host(), x.rows, x.cols, &mut drift.values);
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
            matmul::linear(x, targets.len(), weight.cols(), vocab, &|rows, b| weight.panel(rows, b), &mut logits);
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
}
