//! Tensors and configuration keys as compressed-tensors 0.20 has them.

use serde_json::{Map, Value, json};

use crate::backend::weight::{Inputs, Weight};
use crate::format::float8;
use crate::format::kind::{Form, InputsKind, Kind, KvScales, Module, Tile};
use crate::format::layout::{Description, Layout, Solution, Stored, whole_groups};
use crate::format::safetensors::TensorSpec;
use crate::num::bits;
use crate::pack::compressed;
use crate::scheme::{GroupSize, Scheme};
use crate::tensor::{Bytes, Dtype, words_to_bytes};

/// The layout of compressed-tensors. Scales of packed integers are f16, as they were made; those of whole bytes and
/// floats are f32, in which engines multiply.
#[derive(Clone, Copy, Debug)]
pub struct CompressedLayout {
    pub form: Form,
}

const METHOD: &str = "compressed-tensors";

impl Layout for CompressedLayout {
    fn method(&self) -> &'static str {
        METHOD
    }

    fn side_file(&self) -> Option<&'static str> {
        None
    }

    fn check(&self, rows: usize, cols: usize, scheme: Scheme) -> Result<(), String> {
        compressed::check_shape(rows, cols, scheme.bits).map_err(|e| e.to_string())?;
        let Scheme { bits, group_size, sym } = scheme;
        match self.form {
            Form::Packed => whole_groups(cols, scheme),
            Form::Int8(InputsKind::Float | InputsKind::Group(_)) => {
                Err("int-quantized is for inputs rounded by token or as a whole; use pack-quantized".into())
            }
            Form::Int8(_) if (bits, sym, group_size) != (8, true, GroupSize::CHANNEL) => {
                Err("int-quantized weights have 8 bits, are symmetric, and have group size -1".into())
            }
            Form::Float8 { inputs: InputsKind::TokenAsymmetric | InputsKind::TensorAsymmetric, .. } => {
                Err("inputs that become floats have no zero points".into())
            }
            Form::Float8 { .. } if bits != 8 => Err("float-quantized weights have 8 bits".into()),
            Form::Int8(_) | Form::Float8 { .. } => Ok(()),
        }
    }

    fn accepts(&self, _: &[Module]) -> Result<(), String> {
        Ok(())
    }

    fn least_zero(&self) -> u8 {
        0
    }

    fn specs(&self, module: &Module, scheme: Scheme) -> Vec<TensorSpec> {
        let Module { name, rows, cols, .. } = module;
        self.tensor_specs(name, *rows, *cols, scheme)
    }

    fn store(&self, module: &str, solution: &Solution) -> Result<Stored, String> {
        match self.form {
            Form::Packed => self.store_packed(module, solution),
            Form::Int8(kind) => self.store_int8(module, kind, solution),
            Form::Float8 { tile, inputs } => {
                let (weight, given) = solution.floats(METHOD)?;
                float8::same_inputs(inputs, given)?;
                let tile = float8::same_tile(tile, weight)?;
                let names = float8::Names::COMPRESSED;
                Ok(float8::store(module, names, tile, weight, given))
            }
        }
    }

    fn kind(&self, _: bool) -> Kind {
        Kind::Compressed(self.form)
    }

    fn config(&self, how: &Description) -> Value {
        let mut schemes: Vec<Scheme> = Vec::new();
        for scheme in how.modules.iter().filter_map(|m| m.scheme) {
            if !schemes.contains(&scheme) && (schemes.is_empty() || self.form == Form::Packed) {
                schemes.push(scheme);
            }
        }
        let mut groups = Map::new();
        for (i, scheme) in schemes.iter().enumerate() {
            let targets: Vec<&str> = match schemes.len() {
                1 => vec!["Linear"],
                _ => how.modules.iter().filter(|m| m.scheme == Some(*scheme)).map(|m| &*m.name).collect(),
            };
            let group = json!({
                "targets": targets,
                "weights": self.weights(*scheme),
                "input_activations": self.input_activations(),
                "output_activations": null,
                "format": self.form.name(),
            });
            groups.insert(format!("group_{i}"), group);
        }
        let left = how.modules.iter().filter(|m| m.scheme.is_none()).map(|m| &m.name);
        json!({
            "quant_method": METHOD,
            "format": self.form.name(),
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": left.chain(how.outside).collect::<Vec<_>>(),
            "kv_cache_scheme": how.kv_cache.map(kv_cache),
            "global_compression_ratio": null,
            // The release whose keys these are.
            "version": "0.20.1",
        })
    }
}

fn kv_cache(scales: KvScales) -> Value {
    let strategy = match scales {
        KvScales::Tensor => "tensor",
        KvScales::Head => "attn_head",
    };
    arguments("float", true, strategy, false)
}

/// Arguments of 8 bits.
fn arguments(kind: &str, symmetric: bool, strategy: &str, dynamic: bool) -> Value {
    json!({
        "num_bits": 8,
        "type": kind,
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": null,
        "dynamic": dynamic,
    })
}

impl CompressedLayout {
    fn weights(&self, scheme: Scheme) -> Value {
        match self.form {
            Form::Packed => {
                let channel = scheme.group_size == GroupSize::CHANNEL;
                let mut out = arguments("int", scheme.sym, if channel { "channel" } else { "group" }, false);
                out["num_bits"] = scheme.bits.into();
                if !channel {
                    out["group_size"] = scheme.group_size.raw().into();
                }
                out
            }
            Form::Int8(_) => arguments("int", true, "channel", false),
            Form::Float8 { tile, .. } => match tile {
                Tile::Tensor => arguments("float", true, "tensor", false),
                Tile::Channel => arguments("float", true, "channel", false),
                Tile::Block(height, width) => {
                    let mut out = arguments("float", true, "block", false);
                    out["block_structure"] = json!([height, width]);
                    out
                }
            },
        }
    }

    fn input_activations(&self) -> Value {
        let kind = if matches!(self.form, Form::Float8 { .. }) { "float" } else { "int" };
        match self.form.inputs() {
            InputsKind::Float => Value::Null,
            InputsKind::Token => arguments(kind, true, "token", true),
            InputsKind::TokenAsymmetric => arguments(kind, false, "token", true),
            InputsKind::Tensor => arguments(kind, true, "tensor", false),
            InputsKind::TensorAsymmetric => arguments(kind, false, "tensor", false),
            InputsKind::Group(size) => {
                let mut out = arguments(kind, true, "group", true);
                out["group_size"] = size.into();
                out
            }
        }
    }

    fn tensor_specs(&self, module: &str, rows: usize, cols: usize, scheme: Scheme) -> Vec<TensorSpec> {
        let spec =
            |what: &str, dtype: Dtype, shape: Vec<usize>| TensorSpec::new(format!("{module}.{what}"), dtype, shape);
        let mut out = match self.form {
            Form::Packed => {
                let groups = scheme.group_size.count(cols);
                let mut out = vec![
                    spec("weight_packed", Dtype::I32, vec![rows, bits::words(cols, scheme.bits)]),
                    spec("weight_scale", Dtype::F16, vec![rows, groups]),
                    spec("weight_shape", Dtype::I64, vec![2]),
                ];
                if !scheme.sym {
                    let shape = vec![bits::words(rows, scheme.bits), groups];
                    out.push(spec("weight_zero_point", Dtype::I32, shape));
                }
                out
            }
            Form::Int8(_) => {
                vec![spec("weight", Dtype::I8, vec![rows, cols]), spec("weight_scale", Dtype::F32, vec![rows, 1])]
            }
            Form::Float8 { tile, inputs } => {
                return float8::specs(module, float8::Names::COMPRESSED, tile, inputs, rows, cols);
            }
        };
        if self.form.inputs().is_static() {
            out.push(spec("input_scale", Dtype::F32, vec![1]));
        }
        if self.form.inputs() == InputsKind::TensorAsymmetric {
            out.push(spec("input_zero_point", Dtype::I8, vec![1]));
        }
        out
    }

    fn store_packed(&self, module: &str, solution: &Solution) -> Result<Stored, String> {
        let packed = compressed::pack(solution.weights_only(METHOD)?).map_err(|e| e.to_string())?;
        let shape: Vec<u8> = [packed.rows, packed.cols].iter().flat_map(|n| (*n as u64).to_le_bytes()).collect();
        let mut data = vec![words_to_bytes(&packed.words), bytemuck::cast_slice(&packed.scales).to_vec(), shape];
        data.extend(packed.zeros.as_deref().map(words_to_bytes));
        let specs = self.tensor_specs(module, packed.rows, packed.cols, packed.scheme);
        let tensors = specs.into_iter().zip(data.into_iter().map(Bytes::from)).collect();
        Ok(Stored { tensors, weight: packed.to_weight() })
    }

    fn store_int8(&self, module: &str, kind: InputsKind, solution: &Solution) -> Result<Stored, String> {
        let (weight, inputs) = solution.integers(METHOD)?;
        float8::same_inputs(kind, inputs)?;
        let bytes = compressed::int8(weight, inputs).map_err(|e| e.to_string())?;
        let mut data = vec![bytes.values.clone(), bytemuck::cast_slice(&bytes.scales).to_vec().into()];
        if let Inputs::Tensor { scale, zero } = inputs {
            data.push(scale.to_le_bytes().to_vec().into());
            let zero = i8::try_from(zero).map_err(|_| format!("the zero point {zero} of its inputs is no byte"))?;
            if kind == InputsKind::TensorAsymmetric {
                data.push(zero.to_le_bytes().to_vec().into());
            }
        }
        let specs = self.tensor_specs(module, weight.rows, weight.cols, weight.scheme);
        Ok(Stored { tensors: specs.into_iter().zip(data).collect(), weight: Weight::Int8(bytes.into()) })
    }
}
