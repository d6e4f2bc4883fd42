//! Reading artifacts of the `fp8` method.

use serde_json::Value;

use super::write::names;
use crate::checkpoint::{Checkpoint, JsonKeys, KeyError};
use crate::format::config::{Found, Unfit};
use crate::format::float8::{self, Names};
use crate::format::kind::{InputsKind, Kind, Tile};
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
    let left = left(&found.value).map_err(|why| FormatError::Config { path: found.path.clone(), why: why.into() })?;
    let warnings = left_out(&names, |name| is_left(name, &left));
    let source = StoredSource::open(checkpoint, &found.method, &names, |tensors| check(tensors, &settings))?;
    let quantization =
        source.quantization(|found| (Kind::Fp8 { tile: found.shared, inputs: found.inputs }, Scheme::FLOAT8));
    Ok(Opened { method: Some("fp8"), source: Box::new(source), quantization, warnings })
}

/// The modules that the config leaves out, and what holds such modules.
fn left(value: &Value) -> Result<Vec<&str>, KeyError> {
    let keys = JsonKeys::of("", value);
    let lists = [keys.texts("ignored_layers")?, keys.texts("modules_to_not_convert")?];
    Ok(lists.into_iter().flatten().flatten().collect())
}

/// Whether `left` names a module by its path or by that of what holds it.
fn is_left(name: &str, left: &[&str]) -> bool {
    left.iter().any(|part| name.strip_prefix(*part).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')))
}

fn parse(value: &Value) -> Result<Settings, Unfit> {
    let keys = JsonKeys::of("", value);
    if let Some(other) = keys.text("fmt")?.filter(|fmt| !fmt.eq_ignore_ascii_case("e4m3")) {
        return Err(Unfit::Unread(format!("floats of 8 bits are `{other}`; only e4m3 is read")));
    }
    if let Some(other) = keys.text("scale_fmt")?.filter(|fmt| !["float", "ue8m0"].contains(fmt)) {
        return Err(Unfit::Unread(format!("scales are `{other}`; floats are read")));
    }
    let block = keys.sides("weight_block_size")?;
    let inputs = match (keys.text("activation_scheme")?.unwrap_or("dynamic").to_lowercase().as_str(), block) {
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
        let left = left(&value).unwrap();
        assert!(is_left("model.layers.1.mlp.up_proj", &left) && is_left("model.layers.1", &left));
        assert!(!is_left("model.layers.11.mlp.up_proj", &left));
    }
}
