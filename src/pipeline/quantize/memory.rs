//! How much memory a run will take, told before it starts.

use crate::calibrate::driver::CHUNK_TOKENS;
use crate::model::Model;
use crate::model::block::{Block, Stage};
use crate::recipe::{Method, Rounding};

/// Bytes of activations, statistics and factors at the widest stage, for `tokens` of calibration, and of the weights at
/// work; what the mapped files take is not counted, the system can drop it.
pub fn estimate(model: &Model, method: &Method, tokens: usize) -> u64 {
    let course = method.course();
    let streams = 1 + u64::from(course.drift) + u64::from(!course.true_sequential);
    let Some(block) = model.blocks.first() else { return 0 };
    let widths = Stage::ALL.map(|stage| block.linears(stage)[0].cols as u64);
    // Inputs of a stage, and those of the next, which grow out of them.
    let stages = widths.windows(2).map(|pair| pair[0] + pair[1]).max().unwrap_or(0);
    let activations = streams * tokens as u64 * (model.config.hidden as u64 + stages) * 4;
    let widest = widths.into_iter().max().unwrap_or(0);
    // f64: Gram matrix, damped copy, factor and its inverse; f32: factor, Hessian, drift in both orders.
    let per_weight = 4 * 8 + 4 + 4 + if course.drift { 8 } else { 0 };
    let matrices = if method.needs().gram { widest * widest * per_weight } else { 0 };
    // A transform keeps the inputs of the block, sees it through once more, and has its weights in f32 twice.
    let weights: u64 = block.all_linears().map(|linear| (linear.rows * linear.cols * 4) as u64).sum();
    let transform = match method.transform {
        Some(_) => tokens as u64 * model.config.hidden as u64 * 4 + 2 * weights,
        None => 0,
    };
    // Queries, keys and values of a sample, what attention makes of them, and the same rounded.
    let config = &model.config;
    let cache = match method.kv_cache {
        Some(_) => {
            tokens.min(CHUNK_TOKENS) as u64 * (3 * (config.heads + config.kv_heads) * config.head_dim) as u64 * 4
        }
        None => 0,
    };
    activations + matrices + transform + cache + at_work(block, method)
}

/// Bytes of what becomes of a block's weights: the linears of a stage at a time are rounded, and the finished ones wait
/// for the others.
fn at_work(block: &Block, method: &Method) -> u64 {
    let per_weight = match method.rounding {
        // f32: the weight, a copy in the order it is taken, points of the grid as floats; then codes in bytes.
        Rounding::Gptq { .. } | Rounding::Rtn { .. } => 4 + 4 + 4 + 1,
        // The weight, what error feedback moves, and codes.
        Rounding::Float8 { .. } => 4 + 4 + 1,
    };
    let stages = Stage::ALL.map(|stage| block.linears(stage).iter().map(|linear| linear.rows * linear.cols).sum());
    let finished = stages.iter().sum::<usize>() as u64 * u64::from(method.scheme().bits) / 8;
    stages.into_iter().max().unwrap_or(0) as u64 * per_weight + finished
}

/// How many of `windows` windows of `length` tokens fit into `free` bytes; `None` if not even one does.
pub fn fitting(model: &Model, method: &Method, windows: usize, length: usize, free: u64) -> Option<usize> {
    (1..=windows).rev().find(|count| estimate(model, method, count * length) <= free)
}
