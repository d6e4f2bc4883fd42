//! Where model folders say how they are quantized: found when reading, placed when writing.

use std::fmt;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::FormatError;
use crate::checkpoint::{Checkpoint, CheckpointError, JsonKeys, KeyError, whole};
use crate::scheme::GroupSize;

/// The key of `config.json` that every consumer reads.
const KEY: &str = "quantization_config";

/// Where MLX writes its own; it repeats the object under [`KEY`], without a method.
const MLX_KEY: &str = "quantization";

/// NVIDIA ModelOpt's file.
pub(super) const MODELOPT_FILE: &str = "hf_quant_config.json";

/// Side files that hold the same object, in order of precedence: AutoGPTQ's, AutoAWQ's, AutoRound's
/// and ModelOpt's.
const SIDE_FILES: [&str; 4] = ["quantize_config.json", "quant_config.json", "quantization_config.json", MODELOPT_FILE];

/// A quantization config and where it was.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    pub path: PathBuf,
    /// `quant_method`, in lower case.
    pub method: String,
    pub value: Value,
}

/// Keys that say how tensors are stored: where a folder has a config twice, both must say the same.
const DECISIVE: [&str; 8] =
    ["quant_method", "bits", "group_size", "desc_act", "sym", "checkpoint_format", "zero_point", "packing_format"];

/// Looks for the quantization config: in `config.json`, there under `text_config`, then in the side files. Programs
/// differ in the place that they read, so that configs which contradict each other are an error.
pub fn find(checkpoint: &Checkpoint) -> Result<Option<Found>, FormatError> {
    let config = checkpoint.config();
    let keys = checkpoint.keys();
    let nested = keys.object("text_config").map_err(CheckpointError::from)?.and_then(|text| text.get(KEY));
    const CONFIG: &str = "config.json";
    let places = [
        (format!("`{KEY}` of `{CONFIG}`"), config.get(KEY)),
        (format!("`text_config.{KEY}` of `{CONFIG}`"), nested),
        (format!("`compression_config` of `{CONFIG}`"), config.get("compression_config")),
    ];
    let mut all: Vec<(String, PathBuf, Value)> = Vec::new();
    let path = checkpoint.dir().join(CONFIG);
    for (place, value) in places {
        if let Some(value) = value.filter(|value| !value.is_null()) {
            all.push((place, path.clone(), value.clone()));
        }
    }
    let inside = all.first().map(|(.., value)| value);
    let named = inside.is_some_and(|value| value.get("quant_method").is_some());
    let mlx = config.get(MLX_KEY).filter(|value| value.get("group_size").is_some() && value.get("bits").is_some());
    if let (Some(value), false) = (mlx, named) {
        return Ok(Some(Found { path, method: "mlx".into(), value: value.clone() }));
    }
    for file in SIDE_FILES {
        if let Some(value) = checkpoint.side_json(file)? {
            all.push((format!("`{file}`"), checkpoint.dir().join(file), value));
        }
    }
    let mut all = all.into_iter();
    let Some((place, path, value)) = all.next() else { return Ok(None) };
    for (other, _, there) in all {
        if let Some((key, one, two)) = contradiction(&value, &there) {
            let why = format!(
                "`{key}` is {one} in {place} and {two} in {other}; programs differ in which one they read: make both say \
                 what is stored"
            );
            return Err(FormatError::Config { path, why });
        }
    }
    found(path, value).map(Some)
}

/// The first key that decides and that two configs give different values.
fn contradiction<'a>(one: &'a Value, other: &'a Value) -> Option<(&'static str, &'a Value, &'a Value)> {
    let given = |value: &'a Value, key: &str| value.get(key).filter(|value| !value.is_null());
    let differs = |a: &Value, b: &Value| match (a.as_f64(), b.as_f64(), a.as_str(), b.as_str()) {
        (Some(a), Some(b), ..) => a != b,
        (.., Some(a), Some(b)) => !a.eq_ignore_ascii_case(b),
        _ => a != b,
    };
    DECISIVE.into_iter().find_map(|key| {
        let (a, b) = (given(one, key)?, given(other, key)?);
        differs(a, b).then_some((key, a, b))
    })
}

fn found(path: PathBuf, value: Value) -> Result<Found, FormatError> {
    let invalid = |why: String| FormatError::Config { path: path.clone(), why };
    if !value.is_object() {
        return Err(invalid(format!("it is {value}; an object is needed")));
    }
    let keys = JsonKeys::of("", &value);
    let text = |key: &str| keys.text(key).map_err(|why| invalid(why.into()));
    // Old side files name no method, but each has keys that only its writer used.
    let guessed = if value.get("w_bit").is_some() {
        Some("awq")
    } else if value.get("desc_act").is_some() {
        Some("gptq")
    } else if value.pointer("/producer/name").and_then(Value::as_str) == Some("modelopt") {
        Some("modelopt")
    } else {
        None
    };
    let method = text("quant_method")?.or(text("method")?).or(guessed).map(str::to_lowercase);
    match method.as_deref() {
        // AutoRound's older spellings.
        Some("intel/auto-round" | "auto_round") => Ok(Found { method: "auto-round".into(), path, value }),
        Some(method) => Ok(Found { method: method.into(), path, value }),
        None => Err(invalid("it names no `quant_method`".into())),
    }
}

/// A group size of a quantization config.
pub fn group_size(value: &Value) -> Option<GroupSize> {
    whole(value).and_then(|size| i32::try_from(size).ok()).and_then(GroupSize::new)
}

/// Why what a config says is not read.
#[derive(Clone, Debug, PartialEq)]
pub enum Unfit {
    /// No writer's config says this: it is damaged.
    Invalid(String),
    /// A sound config of a form that is not read here.
    Unread(String),
}

impl From<String> for Unfit {
    fn from(why: String) -> Self {
        Unfit::Invalid(why)
    }
}

impl From<&str> for Unfit {
    fn from(why: &str) -> Self {
        Unfit::Invalid(why.into())
    }
}

impl From<KeyError> for Unfit {
    fn from(why: KeyError) -> Self {
        Unfit::Invalid(why.into())
    }
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unfit::Invalid(why) | Unfit::Unread(why) => f.write_str(why),
        }
    }
}

impl Unfit {
    /// The same with the place in the config where it is.
    pub(super) fn within(self, place: &str) -> Self {
        match self {
            Unfit::Invalid(why) => Unfit::Invalid(format!("in `{place}`: {why}")),
            Unfit::Unread(why) => Unfit::Unread(format!("in `{place}`: {why}")),
        }
    }

    /// The error about the config of a folder.
    pub(super) fn of(self, found: &Found) -> FormatError {
        let (path, method) = (found.path.clone(), found.method.clone());
        match self {
            Unfit::Invalid(why) => FormatError::Config { path, why },
            Unfit::Unread(why) => {
                let dir = path.parent().unwrap_or(Path::new("")).into();
                FormatError::Variant { dir, method, why }
            }
        }
    }
}

/// The artifact's `config.json`: `source` with `quantization` added, keys in their order. A nested text
/// config gets it too, since some consumers look only there, and each level names its element type by both
/// `dtype` and `torch_dtype` if it does by one: older readers know only the latter.
pub fn config_json(source: &Value, quantization: &Value) -> Value {
    let Some(source) = source.as_object() else { return source.clone() };
    let mut out = Map::new();
    for (key, value) in source {
        match key.as_str() {
            // The source was quantized another way; what it said is no longer so.
            KEY | "compression_config" => {}
            "text_config" if value.is_object() => {
                out.insert(key.clone(), config_json(value, quantization));
            }
            "dtype" | "torch_dtype" => {
                let twin = if key == "dtype" { "torch_dtype" } else { "dtype" };
                out.insert(key.clone(), value.clone());
                if !source.contains_key(twin) {
                    out.insert(twin.into(), value.clone());
                }
            }
            _ => {
                out.insert(key.clone(), value.clone());
            }
        }
    }
    out.insert(KEY.into(), quantization.clone());
    Value::Object(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn keys_keep_their_order() {
        let source = json!({"z": 1, "torch_dtype": "bfloat16", "a": 2, "compression_config": {}});
        let text = config_json(&source, &json!({"bits": 4})).to_string();
        let wanted = r#"{"z":1,"torch_dtype":"bfloat16","dtype":"bfloat16","a":2,"quantization_config":{"bits":4}}"#;
        assert_eq!(text, wanted);
        let both = json!({"dtype": "float16", "torch_dtype": "float32"});
        assert_eq!(config_json(&both, &json!(1)), json!({"dtype": "float16", "torch_dtype": "float32", KEY: 1}));
        assert_eq!(config_json(&json!({KEY: {"bits": 8}}), &json!(1)), json!({KEY: 1}));
    }

    #[test]
    fn nested_text_configs_get_it_too() {
        let source = json!({"text_config": {"dtype": "float16"}, "vision_config": {"dtype": "float16"}});
        let written = config_json(&source, &json!({"bits": 4}));
        assert_eq!(written["quantization_config"]["bits"], 4);
        assert_eq!(written["text_config"]["quantization_config"]["bits"], 4);
        assert_eq!(written["text_config"]["torch_dtype"], "float16");
        assert_eq!(written["vision_config"], source["vision_config"]);
    }
}
