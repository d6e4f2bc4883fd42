//! Folders of NVIDIA ModelOpt: weights in E4M3 are those of the `fp8` method under another config; other algorithms are
//! named and refused.
//!
//! Source: NVIDIA/Model-Optimizer, `modelopt/torch/export/quant_utils.py` and `convert_hf_config.py`.

use serde_json::{Value, json};

use super::config::{Found, MODELOPT_FILE, Unfit};
use super::{FormatError, Opened, fp8};
use crate::checkpoint::Checkpoint;
use crate::model::source::DenseSource;

/// Opens a folder whose config, or `hf_quant_config.json` beside it, is ModelOpt's.
pub(super) fn open(checkpoint: Checkpoint, found: &Found) -> Result<Opened, FormatError> {
    let refused = |why: Unfit| why.of(found);
    let beside = checkpoint.side_json(MODELOPT_FILE)?;
    let (here, there) = (algorithm(&found.value).map_err(refused)?, beside.as_ref().map(algorithm));
    let there = there.transpose().map_err(refused)?.flatten();
    if let (Some(here), Some(there)) = (here, there)
        && here != there
    {
        let why = format!("it says `{here}`, but `{MODELOPT_FILE}` says `{there}`");
        return Err(FormatError::Config { path: found.path.clone(), why });
    }
    let config = |key: &str| field(&found.value, key).or(beside.as_ref().and_then(|beside| field(beside, key)));
    if let Some(cache) = config("kv_cache_quant_algo").or(config("kv_cache_scheme")) {
        // The latter may also be a scheme as compressed-tensors writes it.
        let eight_bits = cache.get("num_bits").and_then(Value::as_u64) == Some(8);
        let float = cache.get("type").and_then(Value::as_str) == Some("float");
        if cache != "FP8" && !(eight_bits && float) {
            return Err(refused(Unfit::Unread(format!("keys and values are for a cache in {cache}; FP8 is read"))));
        }
    }
    let activation_scheme = match here.or(there) {
        // Only keys and values have scales.
        None => {
            let source = Box::new(DenseSource(checkpoint));
            return Ok(Opened { method: None, source, quantization: None, warnings: vec![] });
        }
        Some("FP8") => "static",
        Some("FP8_PER_CHANNEL_PER_TOKEN") => "dynamic",
        Some("MIXED_PRECISION") => {
            let why = format!("`quant_algo` is MIXED_PRECISION, of {}", mixed(&found.value, beside.as_ref()));
            return Err(refused(Unfit::Unread(why)));
        }
        Some(other) => {
            let known = "FP8 and FP8_PER_CHANNEL_PER_TOKEN are read";
            return Err(refused(Unfit::Unread(format!("`quant_algo` is {other}; {known}"))));
        }
    };
    // Patterns end in a star; paths up to it are what the reader compares.
    let left = config("exclude_modules").or(found.value.get("ignore").filter(|value| !value.is_null()));
    let names = |list: &Value| -> Option<Vec<String>> {
        let path = |name: &Value| Some(name.as_str()?.trim_end_matches('*').trim_end_matches('.').to_string());
        list.as_array()?.iter().map(path).collect()
    };
    let left = left.map(|list| {
        names(list).ok_or_else(|| refused(format!("`exclude_modules` is {list}; a list of names is needed").into()))
    });
    let left = left.transpose()?.unwrap_or_default();
    let value = json!({"activation_scheme": activation_scheme, "ignored_layers": left});
    let opened = fp8::open(checkpoint, &Found { value, ..found.clone() })?;
    Ok(Opened { method: Some("modelopt"), ..opened })
}

/// A field of `hf_quant_config.json`, or of the form of it that is in `config.json`.
fn field<'a>(value: &'a Value, key: &str) -> Option<&'a Value> {
    value.get("quantization").and_then(|inner| inner.get(key)).or(value.get(key)).filter(|value| !value.is_null())
}

fn algorithm(value: &Value) -> Result<Option<&str>, Unfit> {
    let given = field(value, "quant_algo");
    given
        .map(|name| name.as_str().ok_or_else(|| format!("`quant_algo` is {name}; a text is needed").into()))
        .transpose()
}

/// The algorithms of modules, each once.
fn mixed(value: &Value, beside: Option<&Value>) -> String {
    let layers = field(value, "quantized_layers").or(beside.and_then(|beside| field(beside, "quantized_layers")));
    let layers = layers.and_then(Value::as_object).into_iter().flatten();
    let mut names: Vec<&str> = layers.filter_map(|(_, layer)| algorithm(layer).ok().flatten()).collect();
    names.sort_unstable();
    names.dedup();
    if names.is_empty() { "algorithms it does not name".into() } else { names.join(" and ") }
}
