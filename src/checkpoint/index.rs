//! Which files make up a model folder.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use super::{CheckpointError, read_json};

/// The name of weights in one file.
pub const SINGLE: &str = "model.safetensors";
/// The name of the index of weights in several files.
pub const INDEX: &str = "model.safetensors.index.json";

/// Where transformers keeps all chat templates but the default one.
pub const TEMPLATES: &str = "additional_chat_templates";

/// The shards to open, and where the index (if there is one) places each tensor.
#[derive(Default)]
pub struct Shards {
    pub files: Vec<String>,
    pub weight_map: BTreeMap<String, String>,
    /// The shards of an index beside `model.safetensors`, where all of them are there: a second copy of the weights, or
    /// another model.
    pub second: Vec<String>,
    /// A warning about the index that does not prevent reading.
    pub note: Option<String>,
}

/// The folder itself, or the newest snapshot when it is a hub cache folder (`models--org--name`).
pub fn snapshot(dir: &Path) -> Result<PathBuf, CheckpointError> {
    let snapshots = dir.join("snapshots");
    if dir.join("config.json").exists() || !snapshots.is_dir() {
        return Ok(dir.into());
    }
    if let Ok(commit) = std::fs::read_to_string(dir.join("refs/main")) {
        let path = snapshots.join(commit.trim());
        if path.is_dir() {
            return Ok(path);
        }
    }
    let mut all: Vec<PathBuf> =
        list(&snapshots)?.into_iter().map(|name| snapshots.join(name)).filter(|p| p.is_dir()).collect();
    match all.len() {
        1 => Ok(all.remove(0)),
        _ => Err(CheckpointError::NoFile(dir.join("refs/main"))),
    }
}

/// Finds the safetensors files: `model.safetensors`, or those that an index names, or the only one.
pub fn shards(dir: &Path) -> Result<Shards, CheckpointError> {
    let index = dir.join(INDEX);
    if dir.join(SINGLE).exists() {
        // A model saved over a folder of shards leaves a stale index, which matters only if all of its shards are there.
        let mut found = Shards { files: vec![SINGLE.into()], ..Shards::default() };
        match if index.exists() { indexed(dir, &index) } else { Ok(Shards::default()) } {
            Ok(Shards { files, .. }) if files == [SINGLE] => {}
            Ok(Shards { files, .. }) => found.second = files,
            Err(error) => found.note = Some(format!("`{}` is not used, `{SINGLE}` is read: {error}", index.display())),
        }
        return Ok(found);
    }
    if index.exists() {
        return indexed(dir, &index);
    }
    let files: Vec<String> = list(dir)?.into_iter().filter(|f| f.ends_with(".safetensors")).collect();
    match files.len() {
        1 => Ok(Shards { files, ..Shards::default() }),
        0 => Err(CheckpointError::NoWeights(dir.into())),
        _ => Err(CheckpointError::NoFile(index)),
    }
}

/// The safetensors files that are there, whatever an index says.
pub fn present(dir: &Path) -> Shards {
    let mut files = list(dir).unwrap_or_default();
    files.retain(|file| file.ends_with(".safetensors"));
    Shards { files, ..Shards::default() }
}

fn indexed(dir: &Path, index: &Path) -> Result<Shards, CheckpointError> {
    let json = read_json(index)?;
    let invalid = |why: &str| CheckpointError::Json { path: index.into(), why: why.into() };
    let map = json.get("weight_map").and_then(|m| m.as_object()).ok_or_else(|| invalid("no `weight_map` object"))?;
    let mut weight_map = BTreeMap::new();
    for (tensor, shard) in map {
        let shard = shard.as_str().ok_or_else(|| invalid("a `weight_map` value is no file name"))?;
        let plain = Path::new(shard).components().all(|c| matches!(c, Component::Normal(_)));
        if shard.is_empty() || !plain {
            return Err(CheckpointError::ShardOutside { path: index.into(), shard: shard.into() });
        }
        weight_map.insert(tensor.clone(), shard.to_string());
    }
    if weight_map.is_empty() {
        return Err(invalid("`weight_map` is empty"));
    }
    let files: BTreeSet<&String> = weight_map.values().collect();
    for file in &files {
        if !dir.join(file).exists() {
            return Err(CheckpointError::NoFile(dir.join(file)));
        }
    }
    Ok(Shards { files: files.into_iter().cloned().collect(), weight_map, ..Shards::default() })
}

/// See [`super::Checkpoint::side_files`].
pub fn side_files(dir: &Path) -> Result<Vec<String>, CheckpointError> {
    const WEIGHTS: [&str; 9] =
        [".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".index.json"];
    // Written anew for the artifact, so never copied.
    const REPLACED: [&str; 4] = ["config.json", "quantize_config.json", "quant_config.json", "quantkit.json"];
    let mut names = list(dir)?;
    names.retain(|name| {
        dir.join(name).is_file()
            && !name.starts_with('.')
            && !WEIGHTS.iter().any(|end| name.ends_with(end))
            && !REPLACED.contains(&name.as_str())
    });
    if dir.join(TEMPLATES).is_dir() {
        let templates = list(&dir.join(TEMPLATES))?.into_iter().filter(|name| name.ends_with(".jinja"));
        names.extend(templates.map(|name| format!("{TEMPLATES}/{name}")));
        names.sort();
    }
    Ok(names)
}

fn list(dir: &Path) -> Result<Vec<String>, CheckpointError> {
    let io = |e: std::io::Error| CheckpointError::Io { path: dir.into(), why: e.to_string() };
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(io)? {
        if let Ok(name) = entry.map_err(io)?.file_name().into_string() {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}
