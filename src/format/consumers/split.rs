//! Tensor parallelism: how linears can be cut over devices.

use super::{Kind, Module, Plan};
use crate::format::kind::{Form, Tile};
use crate::scheme::{GroupSize, Scheme};

/// How far an artifact can be split over devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorParallel {
    /// The largest of 1, 2, 4 and 8 that every module allows.
    pub degree: usize,
    /// What stands against the next one.
    pub limit: Option<String>,
}

/// Linears whose input channels are split; all others split their outputs.
const ROW_PARALLEL: [&str; 7] = ["o_proj", "down_proj", "out_proj", "w2", "dense", "dense_4h_to_h", "fc2"];

/// The largest tensor-parallel degree: heads are dealt out whole, key and value heads are dealt out or copied,
/// input splits must hold whole groups, output splits whole words.
pub fn largest_tp(plan: &Plan) -> TensorParallel {
    let mut degree = 1;
    for next in [2, 4, 8] {
        let limit = indivisible_heads(plan, next);
        let limit = limit.or_else(|| plan.modules.iter().find_map(|module| unsplittable(plan, module, next)));
        if let Some(limit) = limit {
            return TensorParallel { degree, limit: Some(limit) };
        }
        degree = next;
    }
    TensorParallel { degree, limit: None }
}

fn indivisible_heads(plan: &Plan, ways: usize) -> Option<String> {
    let Plan { heads, kv_heads, .. } = *plan;
    if !heads.is_multiple_of(ways) {
        return Some(format!("{heads} attention heads cannot be dealt out to {ways}"));
    }
    let even = kv_heads.is_multiple_of(ways) || ways.is_multiple_of(kv_heads);
    (!even).then(|| format!("{kv_heads} key and value heads can neither be dealt out to {ways} nor copied evenly"))
}

fn unsplittable(plan: &Plan, module: &Module, ways: usize) -> Option<String> {
    let scheme = module.scheme?;
    let last = module.name.rsplit('.').next()?;
    // Beyond one head a device, key and value heads are copied.
    let ways = if matches!(last, "k_proj" | "v_proj") { ways.min(plan.kv_heads) } else { ways };
    let (inputs, outputs) = units(plan.kind, scheme, module.cols);
    let (what, count, unit) =
        if ROW_PARALLEL.contains(&last) { ("inputs", module.cols, inputs) } else { ("outputs", module.rows, outputs) };
    (count % (ways * unit) != 0)
        .then(|| format!("`{}` has {count} {what}: {ways} equal parts are no multiples of {unit}", module.name))
}

/// Inputs and outputs that stay together.
fn units(kind: Kind, scheme: Scheme, cols: usize) -> (usize, usize) {
    // Fields that fill whole words; those of odd widths straddle words, and 32 of them fill as many as they have bits.
    let fields = if 32 % scheme.bits == 0 { 32 / scheme.bits as usize } else { 32 };
    let group = if scheme.group_size == GroupSize::CHANNEL { 1 } else { scheme.group_size.columns(cols) };
    let of_tile = |tile| if let Tile::Block(height, width) = tile { (width, height) } else { (1, 1) };
    match kind {
        Kind::Gptq { .. } => (least_common_multiple(group, fields), fields),
        Kind::Awq => (group, fields),
        // Only zero points are packed along the outputs.
        Kind::Compressed(Form::Packed) => (least_common_multiple(group, fields), if scheme.sym { 1 } else { fields }),
        Kind::Compressed(Form::Int8(_)) => (1, 1),
        Kind::Compressed(Form::Float8 { tile, .. }) | Kind::Fp8 { tile, .. } => of_tile(tile),
    }
}

fn least_common_multiple(a: usize, b: usize) -> usize {
    let gcd = |mut a: usize, mut b: usize| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    a / gcd(a, b) * b
}
