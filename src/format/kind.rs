//! Kinds of artifacts: what holds the weights, what inputs are rounded to, what shares a scale.

use serde::{Deserialize, Serialize};

use crate::backend::weight::Inputs;
use crate::pack::gptq::Version;
use crate::scheme::Scheme;

/// What holds the linears, with what decides whether it is understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `desc_act`: whether `g_idx` will be scattered. Order inside groups, and static groups, leave it as it is.
    Gptq {
        version: Version,
        desc_act: bool,
    },
    Awq,
    Compressed(Form),
    Fp8 {
        tile: Tile,
        inputs: InputsKind,
    },
}

impl Kind {
    /// How the engine rounds the inputs of linears stored so; `None` where they stay floats.
    pub fn inputs(self) -> Option<String> {
        match self {
            Kind::Gptq { .. } | Kind::Awq | Kind::Compressed(Form::Packed) => None,
            Kind::Compressed(Form::Int8(inputs)) => inputs.reading(Rounded::Integers),
            Kind::Compressed(Form::Float8 { inputs, .. }) | Kind::Fp8 { inputs, .. } => inputs.reading(Rounded::Floats),
        }
    }
}

/// What weights and inputs become in compressed-tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Integers of 2 to 8 bits, packed; inputs stay floats. `pack-quantized`.
    Packed,
    /// Bytes with one scale an output channel, for inputs in bytes. `int-quantized`.
    Int8(InputsKind),
    /// E4M3. `float-quantized`, or `naive-quantized` where inputs stay floats.
    Float8 { tile: Tile, inputs: InputsKind },
}

impl Form {
    /// What `format` says.
    pub fn name(self) -> &'static str {
        match self {
            Form::Packed => "pack-quantized",
            Form::Int8(_) => "int-quantized",
            Form::Float8 { inputs: InputsKind::Float, .. } => "naive-quantized",
            Form::Float8 { .. } => "float-quantized",
        }
    }

    pub fn inputs(self) -> InputsKind {
        match self {
            Form::Packed => InputsKind::Float,
            Form::Int8(inputs) | Form::Float8 { inputs, .. } => inputs,
        }
    }
}

/// What becomes of the inputs of all linears: [`Inputs`] before anything is known in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum InputsKind {
    /// They stay as they are.
    #[default]
    Float,
    /// Each token by a scale of its own.
    Token,
    /// Each token by a scale and a zero point of its own.
    TokenAsymmetric,
    /// Each token and run of so many channels by a scale of its own.
    Group(usize),
    /// All by one scale of the artifact.
    Tensor,
    /// All by one scale and one zero point of the artifact.
    TensorAsymmetric,
}

impl InputsKind {
    /// Whether `inputs` are of this kind; the module's own numbers do not matter, except that a symmetric scale has
    /// no zero point.
    pub fn holds(self, inputs: Inputs) -> bool {
        match inputs {
            Inputs::Float => self == InputsKind::Float,
            Inputs::Token => self == InputsKind::Token,
            Inputs::TokenAsymmetric => self == InputsKind::TokenAsymmetric,
            Inputs::Group(size) => self == InputsKind::Group(size),
            Inputs::Tensor { zero, .. } => {
                self == InputsKind::TensorAsymmetric || (self == InputsKind::Tensor && zero == 0)
            }
        }
    }

    /// Whether they stay as they are.
    pub fn is_float(&self) -> bool {
        *self == InputsKind::Float
    }

    /// The same for a linear whose inputs are at most `largest` in magnitude, which `top` is to stand for.
    pub fn inputs(self, largest: f32, top: f32) -> Inputs {
        match self {
            InputsKind::Float => Inputs::Float,
            InputsKind::Token => Inputs::Token,
            InputsKind::TokenAsymmetric => Inputs::TokenAsymmetric,
            InputsKind::Group(columns) => Inputs::Group(columns),
            InputsKind::Tensor | InputsKind::TensorAsymmetric => {
                Inputs::Tensor { scale: (largest / top).max(f32::MIN_POSITIVE), zero: 0 }
            }
        }
    }

    /// How the engine rounds them, for records and people; `None` where they stay floats. `numbers` are those of the
    /// weights. This is compressed-tensors' own arithmetic (`calculate_qparams`, `fake_quantize`) in f32; engines that
    /// serve artifacts differ where the text says so (vLLM `int8/scaled_quant.cu`, SGLang `int8_kernel.py`).
    pub fn reading(self, numbers: Rounded) -> Option<String> {
        let each = match self {
            InputsKind::Float => return None,
            InputsKind::Token | InputsKind::TokenAsymmetric => "each token".into(),
            InputsKind::Group(size) => format!("each {size} inputs of a token"),
            InputsKind::Tensor | InputsKind::TensorAsymmetric => "the artifact's".into(),
        };
        Some(match (numbers, self) {
            (Rounded::Integers, InputsKind::Tensor) => format!("8-bit integers, scale: {each}"),
            (Rounded::Integers, InputsKind::TensorAsymmetric) => {
                format!("8-bit integers, scale and zero point: {each}")
            }
            (Rounded::Integers, InputsKind::TokenAsymmetric) => format!(
                "8-bit integers, scale of {each}: (max - min) / 255, 0 within the range, as in compressed-tensors (vLLM: \
                 without 0)"
            ),
            (Rounded::Integers, _) => format!(
                "8-bit integers, scale of {each}: max|x| / 127.5, as in compressed-tensors (vLLM and SGLang: / 127)"
            ),
            (Rounded::Floats, kind) if kind.is_static() => format!("E4M3, scale: {each}"),
            (Rounded::Floats, _) => format!("E4M3, scale of {each}: max|x| / 448"),
        })
    }

    /// Whether the artifact holds a scale for them.
    pub fn is_static(self) -> bool {
        matches!(self, InputsKind::Tensor | InputsKind::TensorAsymmetric)
    }
}

/// What inputs are rounded to: the same kind of number as the weights beside them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounded {
    Integers,
    Floats,
}

/// What shares a scale in weights of 8-bit floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tile {
    /// The whole weight. Engines that join linears round all parts anew unless these have equal scales.
    Tensor,
    /// One output channel.
    Channel,
    /// So many outputs by so many inputs; those at the edges are smaller.
    Block(usize, usize),
}

impl Tile {
    /// As the command line names it.
    pub fn name(self) -> &'static str {
        match self {
            Tile::Tensor => "tensor",
            Tile::Channel => "channel",
            Tile::Block(..) => "block",
        }
    }

    /// Outputs and inputs that share a scale in a weight of `rows` by `cols`.
    pub fn size(self, rows: usize, cols: usize) -> (usize, usize) {
        match self {
            Tile::Tensor => (rows.max(1), cols.max(1)),
            Tile::Channel => (1, cols.max(1)),
            Tile::Block(height, width) => (height.max(1), width.max(1)),
        }
    }

    /// The shape of the tensor of scales.
    pub fn scales(self, rows: usize, cols: usize) -> Vec<usize> {
        match self {
            Tile::Tensor => vec![1],
            Tile::Channel => vec![rows, 1],
            Tile::Block(height, width) => vec![rows.div_ceil(height.max(1)), cols.div_ceil(width.max(1))],
        }
    }
}

/// What shares a scale in a cache of 8-bit keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KvScales {
    Tensor,
    Head,
}

/// One linear of an artifact to come.
#[derive(Clone, Debug, PartialEq)]
pub struct Module {
    pub name: String,
    /// Output channels, N.
    pub rows: usize,
    /// Input channels, K.
    pub cols: usize,
    /// `None` for a module left in floating point.
    pub scheme: Option<Scheme>,
}
