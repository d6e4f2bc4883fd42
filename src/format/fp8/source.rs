//! Reading artifacts of the `fp8` method.

use serde_json::Value;

use super::write::names;
use crate::checkpoint::Checkpoint;
use crate::format::config::{Found, Unfit};
use crate::format::consumers::Kind;
use crate::format::float8::{self, Names};
use crate::format::layout::{InputsKind, Tile};
use crate::format::stored::{StoredSource, Tensors, having, left_out, nothing_quantized};
use crate::format::{FormatError, Opened};
use crate::scheme::Scheme;
use crate::tensor::Dtype;

/// What the config says.
#[derive(Debug)]
struct Settings {
    /// `None`: one scale a weight, or one a channel where shapes say so.
    block: Option<(usize, usize)>,
    inputs: InputsKind,
}

/// Opens a folder whose config says `fp8`.
pub fn open(checkpoint: Checkpoint, found: &Found) -> Result<Opened, FormatError> {
    let settings = parse(&found.value).map_err(|why| why.of(found))?;
    let names = having(&checkpoint, "weight", &[Dtype::F8E4M3]);
    if names.is_empty() {
        return Err(nothing_quantized(found, "of F8_E4M3 ends in `.weight`"));
    }
    let warnings = left_out(&names, |name| is_left(name, &found.value));
    let source = StoredSource::open(checkpoint, &found.method, &names, |tensors| check(tensors, &settings))?;
    let quantization =
        source.quantization(|found| (Kind::Fp8 { tile: found.shared, inputs: found.inputs }, Scheme::FLOAT8));
    Ok(Opened { method: Some("fp8"), source: Box::new(source), quantization, warnings })
}

/// Whether the config leaves out a module: by its path or that of what holds it.
fn is_left(name: &str, value: &Value) -> bool {
    let lists = ["ignored_layers", "modules_to_not_convert"].map(|key| value.get(key).and_then(Value::as_array));
    let mut left = lists.into_iter().flatten().flatten().filter_map(Value::as_str);
    left.any(|part| name.strip_prefix(part).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')))
}

fn parse(value: &Value) -> Result<Settings, Unfit> {
    let text = |key: &str| value.get(key).and_then(Value::as_str);
    if let Some(other) = text("fmt").filter(|fmt| !fmt.eq_ignore_ascii_case("e4m3")) {
        return Err(Unfit::Unread(format!("floats of 8 bits are `{other}`; only e4m3 is read")));
    }
    if let Some(other) = text("scale_fmt").filter(|fmt| !["float", "ue8m0"].contains(fmt)) {
        return Err(Unfit::Unread(format!("scales are `{other}`; floats are read")));
    }
    let block = match value.get("weight_block_size").filter(|v| !v.is_null()) {
        None => None,
        Some(size) => {
            let sides: Vec<usize> =
                size.as_array().into_iter().flatten().filter_map(|n| n.as_u64().map(|n| n as usize)).collect();
            match sides[..] {
                [height, width] if height > 0 && width > 0 => Some((height, width)),
                _ => return Err(format!("`weight_block_size` is {size}; it must be two positive numbers").into()),
            }
        }
    };
    let inputs = match (text("activation_scheme").unwrap_or("dynamic").to_lowercase().as_str(), block) {
        ("dynamic", None) => InputsKind::Token,
        ("dynamic", Some((_, width))) => InputsKind::Group(width),
        ("static", None) => InputsKind::Tensor,
        ("static", Some(_)) => return Err("blocks go with dynamic inputs; `activation_scheme` is static".into()),
        (other, _) => {
            return Err(Unfit::Unread(format!("`activation_scheme` is `{other}`; dynamic and static are read")));
        }
    };
    Ok(Settings { block, inputs })
}

fn check(tensors: Tensors, settings: &Settings) -> Result<float8::Found, String> {
    let tile = match settings.block {
        Some((height, width)) => Tile::Block(height, width),
        // Scales of channels are not in the config; shapes tell them.
        None => match tensors.find("weight_scale").map(|entry| entry.shape.iter().product::<usize>()) {
            Some(count) if count > 1 => Tile::Channel,
            _ => Tile::Tensor,
        },
    };
    // One scale a weight has had both names.
    let names = match (tile, tensors.find("weight_scale"), tensors.find("weight_scale_inv")) {
        (Tile::Tensor, None, Some(_)) => {
            let input = if tensors.find("activation_scale").is_some() { "activation_scale" } else { "input_scale" };
            Names { input, ..Names::BLOCKS }
        }
        _ => names(tile),
    };
    float8::Found::check(tensors, names, tile, settings.inputs)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn configs() {
        let deepseek = json!({"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 64]});
        let settings = parse(&deepseek).unwrap();
        assert_eq!((settings.block, settings.inputs), (Some((128, 64)), InputsKind::Group(64)));
        let bare = parse(&json!({"activation_scheme": "static"})).unwrap();
        assert_eq!((bare.block, bare.inputs), (None, InputsKind::Tensor));
        for (value, part) in [
            (json!({"fmt": "e5m2"}), "`e5m2`"),
            (json!({"weight_block_size": [128]}), "[128]"),
            (json!({"weight_block_size": [128, 0]}), "[128,0]"),
            (json!({"activation_scheme": "static", "weight_block_size": [128, 128]}), "dynamic inputs"),
            (json!({"activation_scheme": "none"}), "`none`"),
        ] {
            let error = parse(&value).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn modules_left_out_are_named_up_to_a_dot() {
        let value = json!({"ignored_layers": ["model.layers.1"], "modules_to_not_convert": null});
        assert!(is_left("model.layers.1.mlp.up_proj", &value) && is_left("model.layers.1", &value));
        assert!(!is_left("model.layers.11.mlp.up_proj", &value));
    }
}
