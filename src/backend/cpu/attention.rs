//! Causal attention of sequences over themselves, by blocks of queries: scores of one block and head at a time, softmax, values.

use rayon::prelude::*;

use super::super::tensor::Tensor;
use super::super::{AttentionShape, Span};
use super::elementwise::softcap;
use crate::num::matmul::{View, product};
use crate::num::simd::{self, vectorized};

/// Queries per task.
const BLOCK: usize = 64;

/// A block of queries of one sequence, and all the keys and values its sequence has.
struct Task<'a> {
    out: &'a mut [f32],
    q: &'a [f32],
    keys: &'a [f32],
    values: &'a [f32],
    /// Position of the first query; the keys start at position 0.
    first: usize,
    rows: usize,
}

pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, spans: &[Span], shape: &AttentionShape) -> Tensor {
    let (width, kv_width) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let mut out = Tensor::zeros(q.rows, width);
    let mut tasks = Vec::new();
    let mut rest = out.as_host_mut();
    let mut row = 0;
    for span in spans {
        let own = row * kv_width..(row + span.rows) * kv_width;
        let (keys, values) = (&k.as_host()[own.clone()], &v.as_host()[own]);
        for block in (0..span.rows).step_by(BLOCK) {
            let rows = BLOCK.min(span.rows - block);
            let (out, after) = std::mem::take(&mut rest).split_at_mut(rows * width);
            rest = after;
            let q = &q.as_host()[(row + block) * width..(row + block + rows) * width];
            tasks.push(Task { out, q, keys, values, first: span.start + block, rows });
        }
        row += span.rows;
    }
    tasks.into_par_iter().for_each_init(Vec::new, |scores, task| one_block(task, shape, scores));
    out
}

fn one_block(task: Task, shape: &AttentionShape, scores: &mut Vec<f32>) {
    let Task { out, q, keys, values, first, rows } = task;
    let dim = shape.head_dim;
    let (width, kv_width) = (shape.heads * dim, shape.kv_heads * dim);
    let visible = |position: usize| shape.window.map_or(0, |w| (position + 1).saturating_sub(w));
    let (from, to) = (visible(first), first + rows);
    let context = to - from;
    scores.resize(rows * context, 0.0);
    for head in 0..shape.heads {
        let kv_head = head / (shape.heads / shape.kv_heads);
        let queries = View::new(&q[head * dim..], rows, dim, width);
        let at = from * kv_width + kv_head * dim;
        let keys = View::new(&keys[at..], context, dim, kv_width);
        let values = View::new(&values[at..], context, dim, kv_width);
        product(scores, context, false, shape.scale, queries, keys.t());
        if let Some(cap) = shape.softcap {
            softcap(scores, cap);
        }
        for (r, row) in scores.chunks_exact_mut(context).enumerate() {
            let seen = visible(first + r) - from..first + r + 1 - from;
            vectorized(|| {
                let max = simd::max(&row[seen.clone()]);
                let scale = 1.0 / simd::exp_in_place(&mut row[seen.clone()], max);
                row[seen.clone()].iter_mut().for_each(|x| *x *= scale);
            });
            row[..seen.start].fill(0.0);
            row[seen.end..].fill(0.0);
        }
        product(&mut out[head * dim..], width, false, 1.0, View::new(scores, rows, context, context), values);
    }
}
