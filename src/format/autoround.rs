//! AutoRound's own export: the tensors of GPTQ or of AWQ under a config of its own.
//!
//! Source: intel/auto-round, `export/export_to_autoround/export.py` (what is written), `inference/backend.py` (which
//! packings store zero points less one) and `inference/convert_model.py` (how the config is read).

use serde_json::{Map, Value, json};

use super::config::{Found, Unfit};
use super::stored::{having, left_out};
use super::{FormatError, Opened, awq, gptq};
use crate::checkpoint::{Checkpoint, JsonKeys, KeyError};
use crate::pack::gptq::Version;
use crate::scheme::GroupSize;
use crate::tensor::Dtype;

/// The tensors of an export.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Packing {
    Gptq(Version),
    Awq,
}

/// The first part of `packing_format` after `auto_round:`, with what it stands for. Older versions name the kernel that
/// packs for; those are AutoRound's own.
const PACKINGS: [(&str, Packing); 9] = [
    ("auto_gptq", Packing::Gptq(Version::V1)),
    ("gptq", Packing::Gptq(Version::V1)),
    ("gptqmodel", Packing::Gptq(Version::V2)),
    ("auto_round", Packing::Gptq(Version::V2)),
    ("exllamav2", Packing::Gptq(Version::V2)),
    ("triton", Packing::Gptq(Version::V2)),
    ("tritonv2", Packing::Gptq(Version::V2)),
    ("auto_awq", Packing::Awq),
    ("awq", Packing::Awq),
];

/// What may follow: kernels that read the packing as it is.
const KERNELS: [&str; 5] = ["exllamav2", "triton", "tritonv2", "cuda", "gemm"];

/// What AutoRound's readers take where the config says nothing.
const DEFAULT: &str = "auto_round:auto_gptq";

/// Numbers of this many bits are not quantized.
const FLOAT_BITS: u64 = 16;

/// Opens a folder whose config says `auto-round`.
pub(super) fn open(checkpoint: Checkpoint, found: &Found) -> Result<Opened, FormatError> {
    let quantized = having(&checkpoint, "qweight", &[Dtype::I32]);
    let refused = |why: Unfit| why.of(found);
    let (packing, mut warnings) = packing(&found.value).map_err(refused)?;
    let known = |module: &str| {
        ["qweight", "weight"].iter().any(|what| checkpoint.tensors().contains_key(&format!("{module}.{what}")))
    };
    let rules = rules(&found.value, &known).map_err(refused)?;
    let outside = outside(&found.value, &quantized, &rules).map_err(refused)?;
    warnings.extend(left_out(&quantized, |name| outside.iter().any(|other| other == name)));
    let present = |key: &str| found.value.get(key).filter(|value| !value.is_null()).cloned();
    let mut value = json!({"dynamic": rules});
    for key in ["bits", "group_size", "sym", "modules_to_not_convert"] {
        if let Some(given) = present(key) {
            value[key] = given;
        }
    }
    let mut opened = match packing {
        Packing::Gptq(version) => {
            value["checkpoint_format"] = version.name().into();
            gptq::open(checkpoint, &Found { value, ..found.clone() })?
        }
        Packing::Awq => {
            let settings = gptq::Settings::parse(&Found { value: value.clone(), ..found.clone() })?;
            let group_of =
                |module: &str| settings.scheme_of(module).map_or(settings.scheme.group_size, |s| s.group_size);
            let groups: &(dyn Fn(&str) -> GroupSize + Sync) = &group_of;
            if let Some((name, bits)) = other_bits(&settings, &quantized) {
                let why = format!("module `{name}` has {bits} bits; AWQ words of 4 are read");
                return Err(refused(Unfit::Unread(why)));
            }
            // Zero points are written for symmetric weights too; without them the middle is meant.
            value["zero_point"] = (!settings.scheme.sym).into();
            awq::open_grouped(checkpoint, &Found { value, ..found.clone() }, Some(groups))?
        }
    };
    opened.method = Some("auto-round");
    warnings.append(&mut opened.warnings);
    opened.warnings = warnings;
    Ok(opened)
}

/// The packing, with a warning where the config does not say.
fn packing(value: &Value) -> Result<(Packing, Vec<String>), Unfit> {
    let keys = JsonKeys::of("", value);
    let text = |key: &str| Ok::<_, KeyError>(keys.text(key)?.filter(|text| !text.is_empty() && *text != "auto"));
    // Versions before 0.5 call it `backend`.
    match (text("packing_format")?, text("backend")?) {
        (Some(one), Some(other)) => {
            let packing = packing_of(one)?;
            match packing_of(other).is_ok_and(|other| other == packing) {
                true => Ok((packing, Vec::new())),
                false => Err(keys.contradiction("packing_format", &keys, "backend").into()),
            }
        }
        (Some(given), None) | (None, Some(given)) => Ok((packing_of(given)?, Vec::new())),
        (None, None) => {
            let warning =
                format!("the config names no `packing_format`; tensors are read as `{DEFAULT}`, as AutoRound does");
            Ok((packing_of(DEFAULT)?, vec![warning]))
        }
    }
}

fn packing_of(given: &str) -> Result<Packing, Unfit> {
    let own = given.strip_prefix("auto_round:").unwrap_or(given);
    let mut parts = own.split(':');
    let first = parts.next().unwrap_or_default();
    let packing = PACKINGS.into_iter().find(|(name, _)| *name == first).map(|(_, packing)| packing);
    match packing {
        Some(packing) if parts.all(|kernel| KERNELS.contains(&kernel)) => Ok(packing),
        _ => Err(Unfit::Unread(format!("tensors are packed as `{given}`; packings as GPTQ and AWQ are read"))),
    }
}

/// Settings of modules in the order in which they are asked, as `dynamic` of GPTQ has them: `known` modules by their
/// paths, then patterns, which AutoRound searches anywhere in a path.
fn rules(value: &Value, known: &dyn Fn(&str) -> bool) -> Result<Map<String, Value>, Unfit> {
    readable(value).map_err(|what| Unfit::Unread(what.to_string()))?;
    let (mut exact, mut patterns) = (Map::new(), Map::new());
    let extra = match value.get("extra_config").filter(|extra| !extra.is_null()) {
        None => return Ok(exact),
        Some(extra) => extra.as_object().ok_or("`extra_config` is not an object")?,
    };
    for (module, own) in extra {
        let own = own.as_object().ok_or_else(|| format!("`{module}` of `extra_config` is not an object"))?;
        let own = Value::Object(
            own.iter().filter(|(_, value)| !value.is_null()).map(|(k, v)| (k.clone(), v.clone())).collect(),
        );
        let float = match own.get("bits") {
            None => false,
            Some(bits) => {
                bits.as_u64().ok_or_else(|| format!("`bits` of `{module}` in `extra_config` is {bits}"))? >= FLOAT_BITS
            }
        };
        if !float {
            readable(&own).map_err(|what| Unfit::Unread(what.to_string()).within(module))?;
        }
        let sign = if float { "-:" } else { "+:" };
        match known(module) {
            true => exact.insert(format!("{sign}{}$", regex::escape(module)), own),
            false => patterns.insert(format!("{sign}.*?(?:{module})"), own),
        };
    }
    exact.extend(patterns);
    Ok(exact)
}

/// Refuses schemes other than integer weights.
fn readable(scheme: &Value) -> Result<(), String> {
    let present = |key: &str| scheme.get(key).filter(|value| !value.is_null());
    if let Some(kind) = present("data_type").filter(|kind| *kind != "int") {
        return Err(format!("the `data_type` is {kind}; int is read"));
    }
    if let Some(bits) = present("act_bits").filter(|bits| bits.as_u64().is_none_or(|bits| bits < FLOAT_BITS)) {
        return Err(format!("inputs are rounded to {bits} bits"));
    }
    for key in ["super_bits", "rotation_config", "spinquant_config", "transform_config"] {
        if let Some(given) = present(key).filter(|given| !given.as_object().is_some_and(Map::is_empty)) {
            return Err(format!("`{key}` is {given}"));
        }
    }
    Ok(())
}

/// Quantized modules that are in none of the named blocks, and not named themselves.
fn outside(value: &Value, quantized: &[String], rules: &Map<String, Value>) -> Result<Vec<String>, Unfit> {
    const KEYS: [&str; 2] = ["block_name_to_quantize", "to_quant_block_names"];
    let keys = JsonKeys::of("", value);
    let wanted = "a text or a list of names is needed";
    let [new, old] = KEYS.map(|key| {
        keys.read(key, wanted, |value| match value {
            Value::String(names) => Some(names.split(',').map(|name| name.trim().into()).collect::<Vec<String>>()),
            Value::Array(names) => Some(names.iter().flat_map(block_names).collect()),
            _ => None,
        })
    });
    let blocks = match (new?, old?) {
        (Some(new), Some(old)) if new != old => return Err(keys.contradiction(KEYS[0], &keys, KEYS[1]).into()),
        (Some(blocks), _) | (None, Some(blocks)) => blocks,
        (None, None) => return Ok(Vec::new()),
    };
    let named: Vec<regex::Regex> =
        rules.keys().filter_map(|rule| regex::Regex::new(&format!("^(?:{})", rule.strip_prefix("+:")?)).ok()).collect();
    let inside = |name: &String| {
        blocks.iter().any(|block| name.starts_with(block.as_str())) || named.iter().any(|rule| rule.is_match(name))
    };
    Ok(quantized.iter().filter(|name| !inside(name)).cloned().collect())
}

/// A block, or a list of those of one stack of layers.
fn block_names(value: &Value) -> Vec<String> {
    match value {
        Value::String(name) => vec![name.clone()],
        Value::Array(names) => names.iter().filter_map(Value::as_str).map(Into::into).collect(),
        _ => Vec::new(),
    }
}

/// The first of the modules to which the config gives other than four bits.
fn other_bits<'a>(settings: &gptq::Settings, modules: &'a [String]) -> Option<(&'a String, u8)> {
    let bits = modules.iter().map(|name| (name, settings.scheme_of(name).map_or(settings.scheme.bits, |s| s.bits)));
    bits.into_iter().find(|(_, bits)| *bits != 4)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn packings() {
        let of = |name: &str| packing(&json!({"packing_format": name})).map(|(packing, _)| packing);
        let (v1, v2) = (Packing::Gptq(Version::V1), Packing::Gptq(Version::V2));
        for (name, wanted) in [
            ("auto_round:auto_gptq", v1),
            ("auto_round:gptq", v1),
            ("auto_round:auto_gptq:exllamav2", v1),
            ("auto_gptq", v1),
            ("auto_round", v2),
            ("auto_round:gptqmodel", v2),
            ("auto_round:exllamav2", v2),
            ("auto_round:auto_awq", Packing::Awq),
            ("auto_round:awq:gemm", Packing::Awq),
        ] {
            assert_eq!(of(name), Ok(wanted), "{name}");
        }
        for name in
            ["auto_round:marlin", "auto_round:gptq:marlin", "auto_round:llm_compressor", "auto_round:fp8_static", "mlx"]
        {
            assert!(matches!(of(name), Err(Unfit::Unread(why)) if why.contains(&format!("`{name}`"))), "{name}");
        }
        assert_eq!(packing(&json!({"backend": "auto_round:awq"})).unwrap().0, Packing::Awq);
        let both = json!({"packing_format": "auto_round:gptq", "backend": "auto_round:gptq:exllamav2"});
        assert_eq!(packing(&both).unwrap().0, v1);
        for config in
            [json!({"packing_format": 7}), json!({"packing_format": "auto_gptq", "backend": "auto_round:awq"})]
        {
            assert!(matches!(packing(&config), Err(Unfit::Invalid(_))), "{config}");
        }
        let (default, warnings) = packing(&json!({})).unwrap();
        assert_eq!(default, v1);
        assert!(warnings[0].contains("no `packing_format`"), "{warnings:?}");
    }

    #[test]
    fn blocks_that_are_named() {
        let modules = ["model.layers.0.up".to_string(), "lm_head".into(), "visual.0.up".into()];
        let rules = rules(&json!({"extra_config": {"lm_head": {"bits": 4}}}), &|_| true).unwrap();
        for blocks in [json!("model.layers"), json!(["model.layers"]), json!([["model.layers.0", "model.layers.1"]])] {
            let found = outside(&json!({"block_name_to_quantize": blocks}), &modules, &rules).unwrap();
            assert_eq!(found, ["visual.0.up"]);
        }
        assert!(outside(&json!({}), &modules, &rules).unwrap().is_empty());
        for config in [
            json!({"block_name_to_quantize": 5}),
            json!({"block_name_to_quantize": "model.layers", "to_quant_block_names": "visual"}),
        ] {
            assert!(matches!(outside(&config, &modules, &rules), Err(Unfit::Invalid(_))), "{config}");
        }
    }
}
