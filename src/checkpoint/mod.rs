//! A read-only model folder: `config.json`, tensors by name, and the files beside them.
//!
//! Everything is checked on opening, before any work: index entries, file lengths, headers, element types.
//! Tensors stay in the mapped files until someone reads them.

mod error;
mod index;
mod keys;
mod scan;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;
use rayon::prelude::*;
use safetensors::SafeTensors;
use serde_json::Value;

pub use error::CheckpointError;
pub use index::{TEMPLATES, snapshot};
pub use keys::{JsonKeys, KeyError, whole};
pub use scan::NonFinite;

use crate::tensor::{Bytes, Dtype, widened};

/// One tensor of a checkpoint.
#[derive(Clone, Debug)]
pub struct Entry {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Bytes,
    /// The file that holds it, relative to the folder.
    pub file: Arc<str>,
}

/// A side file of JSON.
#[derive(Debug)]
pub struct SideFile {
    name: String,
    json: Value,
}

impl SideFile {
    /// What the file says; nothing where there is no file.
    pub fn keys(&self) -> JsonKeys<'_> {
        JsonKeys::of(&self.name, &self.json)
    }
}

/// A model folder, opened and checked.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    config: Value,
    tensors: BTreeMap<String, Entry>,
    files: Vec<Arc<str>>,
    notes: Vec<String>,
    /// Side files that are not on disk: those that a GGUF file says in its own way.
    made: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens a Hugging Face model folder (symbolic links into a hub cache included).
    pub fn open(dir: &Path) -> Result<Self, CheckpointError> {
        let Self { dir, config, .. } = Self::open_config(dir)?;
        let mut shards = index::shards(&dir)?;
        let mut tensors = BTreeMap::new();
        let mut files = Vec::new();
        for file in std::mem::take(&mut shards.files) {
            let file: Arc<str> = file.into();
            map_file(&dir, &file, &mut tensors)?;
            files.push(file);
        }
        let notes = shards.note.take().into_iter().chain(second_copy(&dir, &shards.second, &tensors)?).collect();
        for (name, file) in &shards.weight_map {
            match tensors.get(name) {
                Some(entry) if *entry.file == **file => {}
                _ => return Err(CheckpointError::IndexedTensorMissing { tensor: name.clone(), path: dir.join(file) }),
            }
        }
        Ok(Self { dir, config, tensors, files, notes, made: BTreeMap::new() })
    }

    /// What can be read of a folder, with all that stands against [`Checkpoint::open`]: shards that are missing or cut
    /// off, tensors that are not where the index says, a config that is no JSON and left empty then. An error only where
    /// there is no `config.json` to begin with.
    pub fn salvage(dir: &Path) -> Result<(Self, Vec<CheckpointError>), CheckpointError> {
        let mut damage = Vec::new();
        let mut found = match Self::open_config(dir) {
            Err(error @ CheckpointError::Json { .. }) => {
                damage.push(error);
                let none = Default::default();
                Self::assembled(snapshot(dir)?, Value::Null, none, Vec::new(), Default::default())
            }
            opened => opened?,
        };
        let shards = index::shards(&found.dir).unwrap_or_else(|error| {
            damage.push(error);
            index::present(&found.dir)
        });
        for file in shards.files {
            let file: Arc<str> = file.into();
            // Tensors that were read before the file was found wanting are not to be trusted.
            let mut tensors = BTreeMap::new();
            match map_file(&found.dir, &file, &mut tensors) {
                Ok(()) => {
                    found.tensors.extend(tensors);
                    found.files.push(file);
                }
                Err(error) => damage.push(error),
            }
        }
        if let Err(error) = second_copy(&found.dir, &shards.second, &found.tensors) {
            damage.push(error);
        }
        let missing = shards.weight_map.iter().find(|(name, file)| {
            found.files.iter().any(|there| **there == ***file) && !found.tensors.contains_key(*name)
        });
        damage.extend(missing.map(|(tensor, file)| CheckpointError::IndexedTensorMissing {
            tensor: tensor.clone(),
            path: found.dir.join(file),
        }));
        Ok((found, damage))
    }

    /// A folder of which only `config.json` is wanted: no weights need be there.
    pub fn open_config(dir: &Path) -> Result<Self, CheckpointError> {
        if !dir.is_dir() {
            return Err(CheckpointError::NoFolder(dir.into()));
        }
        let dir = snapshot(dir)?;
        let config = read_json(&dir.join("config.json"))?;
        if !config.is_object() {
            return Err(CheckpointError::Json { path: dir.join("config.json"), why: "not a JSON object".into() });
        }
        Ok(Self::assembled(dir, config, BTreeMap::new(), vec![], BTreeMap::new()))
    }

    /// What another format holds, seen as a model folder: `files` lie in `dir`, `made` are side files by name.
    pub fn assembled(
        dir: PathBuf,
        config: Value,
        tensors: BTreeMap<String, Entry>,
        files: Vec<Arc<str>>,
        made: BTreeMap<String, String>,
    ) -> Self {
        Self { dir, config, tensors, files, notes: Vec::new(), made }
    }

    /// Warnings about the weight files that do not prevent reading.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The folder (for a hub cache, the snapshot inside it).
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The folder, or the file of another format that holds the model, for messages.
    pub fn shown(&self) -> PathBuf {
        match self.files.first().filter(|_| self.is_assembled()) {
            Some(file) => self.dir.join(&**file),
            None => self.dir.clone(),
        }
    }

    /// `config.json`, parsed.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// The safetensors files, in the order read.
    pub fn files(&self) -> &[Arc<str>] {
        &self.files
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> &BTreeMap<String, Entry> {
        &self.tensors
    }

    /// A tensor that must be there with this shape.
    pub fn expect(&self, name: &str, shape: &[usize]) -> Result<&Entry, CheckpointError> {
        let entry = self
            .tensors
            .get(name)
            .ok_or_else(|| CheckpointError::NoTensor { tensor: name.into(), dir: self.dir.clone() })?;
        if entry.shape != shape {
            return Err(CheckpointError::Shape {
                tensor: name.into(),
                found: entry.shape.clone(),
                wanted: shape.to_vec(),
            });
        }
        Ok(entry)
    }

    /// A float tensor that must be there with this shape.
    pub fn expect_float(&self, name: &str, shape: &[usize]) -> Result<&Entry, CheckpointError> {
        let entry = self.expect(name, shape)?;
        if !entry.dtype.is_float() {
            return Err(CheckpointError::Dtype { tensor: name.into(), found: entry.dtype, wanted: "F32, F16 or BF16" });
        }
        Ok(entry)
    }

    /// A float vector, widened.
    pub fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, CheckpointError> {
        let entry = self.expect_float(name, &[len])?;
        Ok(widened(entry.dtype, &entry.bytes))
    }

    /// A side file as text, if it is there.
    pub fn side_text(&self, name: &str) -> Result<Option<String>, CheckpointError> {
        if let Some(text) = self.made.get(name) {
            return Ok(Some(text.clone()));
        }
        let path = self.dir.join(name);
        if self.is_assembled() {
            return Ok(None);
        }
        match std::fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(CheckpointError::Io { path, why: e.to_string() }),
        }
    }

    /// A side file as a JSON object, if it is there.
    pub fn side_json(&self, name: &str) -> Result<Option<Value>, CheckpointError> {
        let path = self.dir.join(name);
        let Some(text) = self.side_text(name)? else { return Ok(None) };
        let json = parse_json(&path, &text)?;
        match json.is_object() {
            true => Ok(Some(json)),
            false => Err(CheckpointError::Json { path, why: "not a JSON object".into() }),
        }
    }

    /// The keys of a side file; none if it is not there.
    pub fn side(&self, name: &str) -> Result<SideFile, CheckpointError> {
        let json = self.side_json(name)?.unwrap_or_default();
        let name = match self.is_assembled() {
            true => format!("{} ({name})", self.shown().display()),
            false => self.dir.join(name).display().to_string(),
        };
        Ok(SideFile { name, json })
    }

    /// The keys of `config.json`.
    pub fn keys(&self) -> JsonKeys<'_> {
        JsonKeys::of("config.json", &self.config)
    }

    /// Files beside the weights that belong to the model: tokenizer, generation config, chat templates (those in
    /// `additional_chat_templates/` included), processors, modelling code, cards. Sorted; other weight formats, other
    /// folders and hidden files are left out.
    pub fn side_files(&self) -> Result<Vec<String>, CheckpointError> {
        if self.is_assembled() { Ok(self.made.keys().cloned().collect()) } else { index::side_files(&self.dir) }
    }

    /// A side file that is made, not on disk.
    pub fn made(&self, name: &str) -> Option<&str> {
        self.made.get(name).map(String::as_str)
    }

    /// Whether side files are made, not on disk.
    pub fn is_assembled(&self) -> bool {
        !self.made.is_empty()
    }

    /// Every weight that holds NaN or infinity, with how many.
    pub fn non_finite(&self) -> Vec<NonFinite> {
        scan::non_finite(&self.tensors)
    }
}

/// Compares the weights that are read with the shards of an index that are there as well, complete. Programs differ in
/// which of the two they read: transformers takes `model.safetensors`, vLLM and SGLang take what the index names.
fn second_copy(
    dir: &Path,
    second: &[String],
    tensors: &BTreeMap<String, Entry>,
) -> Result<Option<String>, CheckpointError> {
    let mut others = BTreeMap::new();
    for file in second {
        map_file(dir, &file.as_str().into(), &mut others)?;
    }
    if second.is_empty() {
        return Ok(None);
    }
    let names: BTreeSet<&String> = tensors.keys().chain(others.keys()).collect();
    let header = |name: &&String| match (tensors.get(*name), others.get(*name)) {
        (Some(a), Some(b)) if a.dtype != b.dtype || a.shape != b.shape => {
            Some("has another type or shape in `model.safetensors` than in the shards")
        }
        (Some(_), Some(_)) => None,
        (Some(_), None) => Some("is in `model.safetensors`, not in the shards"),
        (None, _) => Some("is not in `model.safetensors`, but in the shards"),
    };
    let bytes = |name: &&String| {
        (!equal(&tensors[*name].bytes, &others[*name].bytes))
            .then_some("has other values in `model.safetensors` than in the shards")
    };
    let find = |differs: &dyn Fn(&&String) -> Option<&'static str>| {
        names.iter().find_map(|name| differs(name).map(|how| (name.to_string(), how)))
    };
    // Headers first: weights may have hundreds of gigabytes.
    match find(&header).or_else(|| find(&bytes)) {
        Some((tensor, how)) => Err(CheckpointError::TwoModels { dir: dir.into(), tensor, how }),
        None => Ok(Some(format!(
            "`{}` holds its weights twice, in `{}` and in the {} shards of `{}`; they are the same, and the first is \
             read; remove one of them",
            dir.display(),
            index::SINGLE,
            second.len(),
            index::INDEX
        ))),
    }
}

/// Whether two tensors have the same bytes.
fn equal(one: &[u8], other: &[u8]) -> bool {
    const AT_ONCE: usize = 1 << 20;
    one.len() == other.len() && one.par_chunks(AT_ONCE).zip(other.par_chunks(AT_ONCE)).all(|(a, b)| a == b)
}

fn read_json(path: &Path) -> Result<Value, CheckpointError> {
    let text = std::fs::read_to_string(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => CheckpointError::NoFile(path.into()),
        std::io::ErrorKind::InvalidData => CheckpointError::Json { path: path.into(), why: "it is no UTF-8".into() },
        _ => CheckpointError::Io { path: path.into(), why: e.to_string() },
    })?;
    parse_json(path, &text)
}

fn parse_json(path: &Path, text: &str) -> Result<Value, CheckpointError> {
    serde_json::from_str(text).map_err(|e| CheckpointError::Json { path: path.into(), why: e.to_string() })
}

/// Maps a file into memory, read-only.
pub fn map(path: &Path) -> std::io::Result<Arc<Mmap>> {
    let file = File::open(path)?;
    // SAFETY: the map is read-only; a model file that another process truncates while it is in use is
    // outside what any reader can survive, and model files are replaced by renaming, not by writing.
    Ok(Arc::new(unsafe { Mmap::map(&file) }?))
}

fn map_file(dir: &Path, file: &Arc<str>, tensors: &mut BTreeMap<String, Entry>) -> Result<(), CheckpointError> {
    let path = dir.join(&**file);
    let io = |e: std::io::Error| CheckpointError::Io { path: path.clone(), why: e.to_string() };
    let map = map(&path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => CheckpointError::NoFile(path.clone()),
        _ => io(e),
    })?;
    let header = |why: String| CheckpointError::Header { path: path.clone(), why };
    let (data_start, metadata) = SafeTensors::read_metadata(&map).map_err(|e| header(e.to_string()))?;
    let data_start = data_start + 8;
    // Sorted: the crate's map has another order in every run, and the first fault is the one reported.
    for (name, info) in metadata.tensors().into_iter().collect::<BTreeMap<_, _>>() {
        let dtype = Dtype::parse(&info.dtype.to_string()).ok_or_else(|| CheckpointError::Unread {
            path: path.clone(),
            tensor: name.clone(),
            found: info.dtype.to_string(),
        })?;
        let (start, end) = info.data_offsets;
        let range = data_start + start..data_start + end;
        if range.end > map.len() {
            return Err(header(format!("tensor `{name}` ends at byte {}, the file at {}", range.end, map.len())));
        }
        let entry =
            Entry { dtype, shape: info.shape.clone(), bytes: Bytes::Mapped(map.clone(), range), file: file.clone() };
        if let Some(other) = tensors.insert(name.clone(), entry) {
            return Err(header(format!("tensor `{name}` is in `{}` as well", other.file)));
        }
    }
    Ok(())
}
