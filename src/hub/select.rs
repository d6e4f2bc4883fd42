//! Which files of a repository make up the model. Names come from the server and are not trusted.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;

use super::HubError;

pub const CONFIG: &str = "config.json";
pub const INDEX: &str = "model.safetensors.index.json";
pub const SINGLE: &str = "model.safetensors";

/// How the weights are stored.
pub enum Weights {
    One(String),
    /// In the shards that [`INDEX`] names.
    Indexed,
    /// In [`SINGLE`], and in the shards that [`INDEX`] names if all of them are listed.
    Both,
}

/// The listing without repeats, in its order; refused if a name would leave the folder.
pub fn checked(id: &str, names: Vec<String>) -> Result<Vec<String>, HubError> {
    if let Some(name) = names.iter().find(|name| outside(name)) {
        return Err(HubError::NameOutside { id: id.into(), name: name.escape_debug().to_string() });
    }
    let mut seen = BTreeSet::new();
    Ok(names.into_iter().filter(|name| seen.insert(name.clone())).collect())
}

/// Finds the weights as `Checkpoint::open` will: `model.safetensors`, else an index, else the only one. With both of the
/// former, it compares them.
pub fn weights(id: &str, names: &[String]) -> Result<Weights, HubError> {
    let listed = |name: &str| names.iter().any(|n| n == name);
    match (listed(SINGLE), listed(INDEX)) {
        (true, true) => return Ok(Weights::Both),
        (true, false) => return Ok(Weights::One(SINGLE.into())),
        (false, true) => return Ok(Weights::Indexed),
        (false, false) => {}
    }
    let here: Vec<&String> = names.iter().filter(|n| !n.contains('/')).collect();
    let found: Vec<&&String> = here.iter().filter(|n| n.ends_with(".safetensors")).collect();
    if let [only] = found[..] {
        return Ok(Weights::One(only.to_string()));
    }
    let any = |ends: &[&str]| here.iter().any(|n| ends.iter().any(|end| n.ends_with(end)));
    let hint = if !found.is_empty() {
        ": there are several files but no `model.safetensors.index.json`"
    } else if any(&[".bin", ".pt", ".pth"]) {
        "; pickled weights are not read: look for a safetensors version of the model"
    } else if any(&[".gguf"]) {
        "; it holds GGUF files: give the model they were made from"
    } else {
        ""
    };
    Err(HubError::NoWeights { id: id.into(), hint, files: names.to_vec() })
}

/// The shards that an index names, each once, sorted.
pub fn shards(id: &str, index: &Path) -> Result<Vec<String>, HubError> {
    let invalid = |why: String| HubError::Index { id: id.into(), why };
    let text = std::fs::read_to_string(index).map_err(|e| invalid(e.to_string()))?;
    let json: Value = serde_json::from_str(&text).map_err(|e| invalid(e.to_string()))?;
    let map = json.get("weight_map").and_then(Value::as_object);
    let map = map.filter(|m| !m.is_empty()).ok_or_else(|| invalid("no tensors in `weight_map`".into()))?;
    let mut shards = BTreeSet::new();
    for shard in map.values() {
        let shard = shard.as_str().ok_or_else(|| invalid("a `weight_map` value is no file name".into()))?;
        if outside(shard) || !shard.ends_with(".safetensors") {
            return Err(HubError::ShardOutside { id: id.into(), shard: shard.escape_debug().to_string() });
        }
        shards.insert(shard.to_string());
    }
    Ok(shards.into_iter().collect())
}

/// Tokenizer, templates, processors, modelling code, cards: what belongs to the model beside its weights.
pub fn side_files(names: &[String]) -> Vec<String> {
    const ENDS: [&str; 6] = [".json", ".jinja", ".model", ".txt", ".py", ".md"];
    const BEGINS: [&str; 3] = ["tokenizer.", "LICENSE", "NOTICE"];
    const OTHER_WEIGHTS: [&str; 9] =
        [".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".index.json"];
    let wanted = |name: &&String| {
        let template = name.strip_prefix("additional_chat_templates/");
        if let Some(template) = template.filter(|template| !template.contains('/')) {
            return template.ends_with(".jinja");
        }
        let here = !name.contains('/') && !name.starts_with('.') && *name != CONFIG;
        let named = ENDS.iter().any(|end| name.ends_with(end)) || BEGINS.iter().any(|begin| name.starts_with(begin));
        here && named && !OTHER_WEIGHTS.iter().any(|end| name.ends_with(end))
    };
    names.iter().filter(wanted).cloned().collect()
}

/// Whether a model can be one with this file empty.
pub fn may_be_empty(name: &str) -> bool {
    !name.ends_with(".safetensors") && !name.ends_with(".json")
}

/// Whether a name would leave the folder it is joined to, or is no file name at all.
fn outside(name: &str) -> bool {
    let odd = |c: char| c.is_control() || c == '\\';
    name.len() > 512 || name.contains(odd) || name.split('/').any(|part| part.is_empty() || part == "." || part == "..")
}
