//! The seam of formats, on the side of writing: what a linear becomes on disk.

use std::collections::BTreeMap;

use half::f16;
use serde_json::Value;

use super::kind::{Kind, KvScales, Module};
use super::safetensors::TensorSpec;
use crate::backend::weight::{Inputs, Weight};
use crate::quantize::Quantized;
use crate::quantize::float8::Float8;
use crate::scheme::{GroupSize, Scheme};
use crate::tensor::Bytes;

/// A quantized linear as methods give it, with what its inputs become.
#[derive(Clone, Debug, PartialEq)]
pub enum Solution {
    Integers { weight: Quantized, inputs: Inputs },
    Float8 { weight: Float8, inputs: Inputs },
}

impl Solution {
    /// The integers and what becomes of inputs, for a layout `name` that holds no floats of 8 bits.
    pub fn integers(&self, name: &str) -> Result<(&Quantized, Inputs), String> {
        match self {
            // A scale that was cut off at the end of f16 has destroyed its group.
            Solution::Integers { weight, .. }
                if weight.scales.iter().any(|s| s.to_f32().abs() >= f16::MAX.to_f32()) =>
            {
                Err(format!("its weights are too large for f16, which scales of {name} are"))
            }
            Solution::Integers { weight, inputs } => Ok((weight, *inputs)),
            Solution::Float8 { .. } => Err(format!("{name} holds integers, not floats of 8 bits")),
        }
    }

    /// The integers, for a layout `name` that leaves inputs as they are.
    pub fn weights_only(&self, name: &str) -> Result<&Quantized, String> {
        match self.integers(name)? {
            (weight, Inputs::Float) => Ok(weight),
            _ => Err(format!("{name} cannot say how inputs are rounded")),
        }
    }

    /// The floats of 8 bits and what becomes of inputs, for a layout `name` that holds no integers.
    pub fn floats(&self, name: &str) -> Result<(&Float8, Inputs), String> {
        match self {
            Solution::Float8 { weight, inputs } => Ok((weight, *inputs)),
            Solution::Integers { .. } => Err(format!("{name} holds floats of 8 bits, not integers")),
        }
    }
}

/// What it becomes.
pub struct Stored {
    /// As [`Layout::specs`] announced them.
    pub tensors: Vec<(TensorSpec, Bytes)>,
    /// The weight as the reader of the format will see it.
    pub weight: Weight,
}

/// How an artifact came to be, for its configuration files.
pub struct Description<'a> {
    /// `gptq`, `awq` and so on.
    pub method: &'a str,
    /// What modules have unless they say otherwise.
    pub base: Scheme,
    /// The linears of all blocks, those left in floating point included.
    pub modules: &'a [Module],
    /// Linears elsewhere, such as the output head: all in floating point.
    pub outside: &'a [String],
    /// How columns were ordered and the Hessian was damped, where there was one.
    pub gptq: Option<GptqFacts>,
    /// How scales were chosen, such as `minmax`.
    pub grid: &'a str,
    /// Scales of keys and values are in the artifact, for a cache of E4M3: one a layer, or one a head.
    pub kv_cache: Option<KvScales>,
}

/// Settings of GPTQ that configuration files tell.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GptqFacts {
    /// Whether groups follow activation order, so that `g_idx` is scattered.
    pub desc_act: bool,
    /// Whether groups were laid over the original columns before ordering.
    pub static_groups: bool,
    /// Whether columns were ordered inside groups only.
    pub group_aware: bool,
    /// Share of the mean diagonal added to the Hessian.
    pub damp_percent: f64,
    pub true_sequential: bool,
}

/// A form in which quantized linears are stored.
pub trait Layout: Send + Sync {
    /// What `quant_method` says.
    fn method(&self) -> &'static str;

    /// The file that holds the quantization config beside `config.json`, if consumers look for one.
    fn side_file(&self) -> Option<&'static str>;

    /// What stands against storing such a linear; asked before any work.
    fn check(&self, rows: usize, cols: usize, scheme: Scheme) -> Result<(), String>;

    /// What stands against storing these linears together, each of which [`Layout::check`] takes; asked before any
    /// work.
    fn accepts(&self, modules: &[Module]) -> Result<(), String>;

    /// The smallest zero point it can hold.
    fn least_zero(&self) -> u8;

    /// The tensors that a quantized linear will have; `module.scheme` is there.
    fn specs(&self, module: &Module, scheme: Scheme) -> Vec<TensorSpec>;

    /// Packs one linear.
    fn store(&self, module: &str, solution: &Solution) -> Result<Stored, String>;

    /// What consumers look at; `desc_act` is that of [`GptqFacts`].
    fn kind(&self, desc_act: bool) -> Kind;

    /// The object that `config.json` holds as `quantization_config`.
    fn config(&self, how: &Description) -> Value;
}

/// What stands against groups that do not fill the inputs: several readers take none such.
pub fn whole_groups(cols: usize, scheme: Scheme) -> Result<(), String> {
    if scheme.group_size.divides(cols) {
        return Ok(());
    }
    Err(format!("group size {} does not divide its {cols} input channels", scheme.group_size))
}

/// Group sizes in use, largest first.
const SIZES: [i32; 7] = [1024, 512, 256, 128, 64, 32, 16];

/// Schemes like `scheme` with the group sizes that `layout` stores for this shape, largest first.
pub fn fitting(layout: &dyn Layout, rows: usize, cols: usize, scheme: Scheme) -> impl Iterator<Item = Scheme> {
    let sizes = SIZES.into_iter().filter_map(GroupSize::new);
    sizes.map(move |group_size| Scheme { group_size, ..scheme }).filter(move |s| layout.check(rows, cols, *s).is_ok())
}

/// The tensors of an artifact from those of its source: a quantized linear's `weight` is replaced by what `layout`
/// has for it, everything else stays.
pub fn laid_out(
    source: impl IntoIterator<Item = TensorSpec>,
    modules: &[Module],
    layout: &dyn Layout,
) -> Vec<TensorSpec> {
    let quantized: BTreeMap<&str, _> = modules.iter().filter_map(|m| Some((m.name.as_str(), (m, m.scheme?)))).collect();
    let mut specs = Vec::new();
    for spec in source {
        match spec.name.strip_suffix(".weight").and_then(|module| quantized.get(module)) {
            Some((module, scheme)) => specs.extend(layout.specs(module, *scheme)),
            None => specs.push(spec),
        }
    }
    specs
}
