//! Tensors and configuration keys of the `fp8` method.

use serde_json::{Map, Value, json};

use crate::format::float8::{self, Names};
use crate::format::kind::{InputsKind, Kind, Module, Tile};
use crate::format::layout::{Description, Layout, Solution, Stored};
use crate::format::safetensors::TensorSpec;
use crate::scheme::Scheme;

/// Weights in E4M3 under the `fp8` method. One scale a weight goes with inputs by token or by a scale of the artifact,
/// blocks go with inputs in groups as wide as they are.
#[derive(Clone, Copy, Debug)]
pub struct Fp8Layout {
    pub tile: Tile,
    pub inputs: InputsKind,
}

impl Fp8Layout {
    fn names(&self) -> Names {
        names(self.tile)
    }
}

/// What tensors are called, which depends on what shares a scale.
pub fn names(tile: Tile) -> Names {
    if matches!(tile, Tile::Block(..)) { Names::BLOCKS } else { Names::COMPRESSED }
}

impl Layout for Fp8Layout {
    fn method(&self) -> &'static str {
        "fp8"
    }

    fn side_file(&self) -> Option<&'static str> {
        None
    }

    fn check(&self, rows: usize, cols: usize, scheme: Scheme) -> Result<(), String> {
        if rows == 0 || cols == 0 {
            return Err(format!("it has {rows} outputs and {cols} inputs; there is nothing to store"));
        }
        if scheme.bits != 8 {
            return Err("an fp8 artifact has weights of 8 bits".into());
        }
        match (self.tile, self.inputs) {
            (Tile::Channel, _) => Err("fp8 has no scales for channels; write compressed-tensors".into()),
            (Tile::Tensor, InputsKind::Token | InputsKind::Tensor) => Ok(()),
            (Tile::Tensor, _) => Err("fp8 with one scale a weight has inputs rounded by token or as a whole".into()),
            (Tile::Block(_, width), InputsKind::Group(size)) if size == width => Ok(()),
            (Tile::Block(..), _) => Err("fp8 in blocks has inputs rounded in groups as wide as a block".into()),
        }
    }

    fn accepts(&self, _: &[Module]) -> Result<(), String> {
        Ok(())
    }

    fn least_zero(&self) -> u8 {
        0
    }

    fn specs(&self, module: &Module, _: Scheme) -> Vec<TensorSpec> {
        float8::specs(&module.name, self.names(), self.tile, self.inputs, module.rows, module.cols)
    }

    fn store(&self, module: &str, solution: &Solution) -> Result<Stored, String> {
        let (weight, inputs) = solution.floats("fp8")?;
        float8::same_inputs(self.inputs, inputs)?;
        let tile = float8::same_tile(self.tile, weight)?;
        Ok(float8::store(module, self.names(), tile, weight, inputs))
    }

    fn kind(&self, _: bool) -> Kind {
        Kind::Fp8 { tile: self.tile, inputs: self.inputs }
    }

    fn config(&self, how: &Description) -> Value {
        let left = how.modules.iter().filter(|m| m.scheme.is_none()).map(|m| &m.name);
        let left: Vec<&String> = left.chain(how.outside).collect();
        let mut out = Map::new();
        out.insert("quant_method".into(), "fp8".into());
        out.insert("fmt".into(), "e4m3".into());
        out.insert("activation_scheme".into(), if self.inputs.is_static() { "static" } else { "dynamic" }.into());
        // Readers have defaults of their own for a size that is missing.
        let size = if let Tile::Block(height, width) = self.tile { json!([height, width]) } else { Value::Null };
        out.insert("weight_block_size".into(), size);
        // Readers differ in which of the two they look for.
        for key in ["ignored_layers", "modules_to_not_convert"] {
            out.insert(key.into(), json!(left));
        }
        Value::Object(out)
    }
}
