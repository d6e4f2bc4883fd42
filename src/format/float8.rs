//! Linears in E4M3, as compressed-tensors and the `fp8` method store them: both differ in little but names.

use crate::backend::weight::{Fp8, Inputs, Weight};
use crate::format::kind::{InputsKind, Tile};
use crate::format::layout::Stored;
use crate::format::safetensors::TensorSpec;
use crate::format::stored::{FLOATS, Linear, Tensors};
use crate::quantize::float8::Float8;
use crate::tensor::{Bytes, Dtype};

/// What tensors are called.
#[derive(Clone, Copy, Debug)]
pub struct Names {
    /// Scales of tiles.
    pub scale: &'static str,
    /// The scale of inputs, where there is one.
    pub input: &'static str,
}

impl Names {
    pub const COMPRESSED: Self = Self { scale: "weight_scale", input: "input_scale" };
    /// Blocks of the `fp8` method, DeepSeek's way. All scales are factors, whatever the name.
    pub const BLOCKS: Self = Self { scale: "weight_scale_inv", input: "input_scale" };
}

/// Holds the inputs of a solution against those the artifact tells.
pub fn same_inputs(kind: InputsKind, given: Inputs) -> Result<(), String> {
    if !kind.holds(given) {
        return Err(format!("its inputs are {given:?}, but the artifact is to say {kind:?}"));
    }
    match given {
        Inputs::Tensor { scale, .. } if !(scale.is_finite() && scale > 0.0) => {
            Err(format!("the scale of its inputs is {scale}; it must be positive"))
        }
        _ => Ok(()),
    }
}

/// Holds the tiles of a solution against those the artifact tells.
pub fn same_tile(tile: Tile, weight: &Float8) -> Result<Tile, String> {
    let Float8 { rows, cols, .. } = *weight;
    let (height, width) = tile.size(rows, cols);
    if weight.tile != (height, width) {
        let (h, w) = weight.tile;
        return Err(format!("its scales belong to tiles of {h} by {w}, but the artifact is to say {tile:?}"));
    }
    let wanted = tile.scales(rows, cols).iter().product::<usize>();
    if weight.values.len() != rows * cols || weight.scales.len() != wanted {
        return Err(format!("{} scales came with it; {wanted} belong to its shape", weight.scales.len()));
    }
    match weight.scales.iter().find(|s| !(s.is_finite() && **s > 0.0)) {
        Some(scale) => Err(format!("one of its scales is {scale}; scales must be positive")),
        None => Ok(tile),
    }
}

/// The tensors to come.
pub fn specs(module: &str, names: Names, tile: Tile, inputs: InputsKind, rows: usize, cols: usize) -> Vec<TensorSpec> {
    let mut out = vec![
        TensorSpec::new(format!("{module}.weight"), Dtype::F8E4M3, [rows, cols]),
        TensorSpec::new(format!("{module}.{}", names.scale), Dtype::F32, tile.scales(rows, cols)),
    ];
    if inputs.is_static() {
        out.push(TensorSpec::new(format!("{module}.{}", names.input), Dtype::F32, [1]));
    }
    out
}

/// The tensors of a solution that has passed [`same_inputs`] and [`same_tile`].
pub fn store(module: &str, names: Names, tile: Tile, weight: &Float8, inputs: Inputs) -> Stored {
    let values = Bytes::from(weight.values.clone());
    let mut data = vec![values.clone(), bytemuck::cast_slice(&weight.scales).to_vec().into()];
    let kind = match inputs {
        Inputs::Tensor { scale, .. } => {
            data.push(scale.to_le_bytes().to_vec().into());
            InputsKind::Tensor
        }
        _ => InputsKind::Float,
    };
    let Float8 { rows, cols, tile: size, ref scales, .. } = *weight;
    let specs = specs(module, names, tile, kind, rows, cols);
    let fp8 = Fp8 { rows, cols, values, scales: scales.clone(), tile: size, inputs };
    Stored { tensors: specs.into_iter().zip(data).collect(), weight: Weight::Fp8(fp8.into()) }
}

/// A linear in E4M3 that was found in a folder.
#[derive(Clone, Debug)]
pub struct Found {
    pub rows: usize,
    pub cols: usize,
    pub tile: (usize, usize),
    /// What the tile is by its nature.
    pub shared: Tile,
    pub inputs: InputsKind,
    pub names: Names,
}

impl Found {
    /// Checks types and shapes. A single scale may be a vector of one or no vector at all, those of channels may have
    /// one dimension or two.
    pub fn check(tensors: Tensors, names: Names, tile: Tile, inputs: InputsKind) -> Result<Self, String> {
        let (_, rows, cols) = tensors.matrix("weight", &[Dtype::F8E4M3])?;
        let scale = tensors.typed(names.scale, FLOATS)?;
        let shape = &scale.shape[..];
        let fits = match tile {
            Tile::Tensor => shape.iter().product::<usize>() == 1,
            Tile::Channel => shape == [rows, 1] || shape == [rows],
            Tile::Block(..) => shape == tile.scales(rows, cols),
        };
        if !fits {
            return Err(format!(
                "`{}` has shape {shape:?}; its config asks for {:?}",
                names.scale,
                tile.scales(rows, cols)
            ));
        }
        if inputs.is_static() {
            tensors.one(names.input, FLOATS)?;
        }
        Ok(Self { rows, cols, tile: tile.size(rows, cols), shared: tile, inputs, names })
    }
}

/// What becomes of inputs, with the numbers that the artifact has for them.
pub fn inputs(tensors: Tensors, kind: InputsKind, scale: &str, zero: &str) -> Result<Inputs, String> {
    let static_scale = || {
        let found = tensors.scales(scale)?[0];
        if found > 0.0 { Ok(found) } else { Err(format!("`{scale}` is {found}; it must be positive")) }
    };
    Ok(match kind {
        InputsKind::Float => Inputs::Float,
        InputsKind::Token => Inputs::Token,
        InputsKind::TokenAsymmetric => Inputs::TokenAsymmetric,
        InputsKind::Group(size) => Inputs::Group(size),
        InputsKind::Tensor => Inputs::Tensor { scale: static_scale()?, zero: 0 },
        InputsKind::TensorAsymmetric => {
            let entry = tensors.get(zero)?;
            let zero = match (entry.dtype, &*entry.bytes) {
                (Dtype::I8, [byte]) => i32::from(*byte as i8),
                (Dtype::I32, &[a, b, c, d]) => i32::from_le_bytes([a, b, c, d]),
                _ => return Err(format!("`{zero}` is {}; it should be one I8 or I32", entry.dtype)),
            };
            if !(-128..128).contains(&zero) {
                return Err(format!("the zero point {zero} of its inputs is no byte"));
            }
            Inputs::Tensor { scale: static_scale()?, zero }
        }
    })
}

impl Linear for Found {
    fn shape(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    fn load(&self, tensors: Tensors) -> Result<Weight, String> {
        let values = tensors.get("weight")?.bytes.clone();
        // All ones but the sign is the one code that is no number.
        if let Some(at) = values.iter().position(|v| v & 127 == 127) {
            return Err(format!("its weight is no number at output {}, input {}", at / self.cols, at % self.cols));
        }
        let scales = tensors.scales(self.names.scale)?;
        let inputs = inputs(tensors, self.inputs, self.names.input, "input_zero_point")?;
        let fp8 = Fp8 { rows: self.rows, cols: self.cols, values, scales, tile: self.tile, inputs };
        Ok(Weight::Fp8(fp8.into()))
    }
}
