//! A safetensors writer that streams: the whole layout is planned first, then tensors are written one by one
//! and hashed on the way.
//!
//! A file is a little-endian u64 header length, a JSON header padded with spaces to a multiple of 8, and the
//! tensors without gaps: <https://github.com/huggingface/safetensors#format>. The header lists tensors by
//! name, so equal contents are equal bytes.

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use thiserror::Error;

use super::manifest::{FileRecord, sha256_bytes};
use super::pretty;
use crate::num::hex::hex;
use crate::tensor::{Bytes, Dtype};

/// Largest shard unless the user says otherwise; as Hugging Face tools cut.
pub const MAX_SHARD_BYTES: u64 = 5_000_000_000;

/// The file that says which shard holds a tensor, where there are several.
pub const INDEX: &str = "model.safetensors.index.json";

/// A tensor to come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
}

impl TensorSpec {
    pub fn new(name: impl Into<String>, dtype: Dtype, shape: impl Into<Vec<usize>>) -> Self {
        Self { name: name.into(), dtype, shape: shape.into() }
    }

    /// The size of its data.
    pub fn bytes(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64 * self.dtype.size() as u64
    }
}

/// Why tensors cannot be written.
#[derive(Debug, Error)]
pub enum WriteError {
    #[error("cannot write `{path}`: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("tensor `{0}` is planned twice")]
    Twice(String),
    #[error("tensor `{tensor}` came with {found} bytes; {dtype} {shape:?} takes {wanted}")]
    Length { tensor: String, found: u64, wanted: u64, dtype: Dtype, shape: Vec<usize> },
    #[error("tensor `{found}` came where {} was planned", wanted.as_ref().map_or("the end".into(), |w| format!("`{w}`")))]
    Order { found: String, wanted: Option<String> },
    #[error("`{path}` ends before tensor `{missing}`")]
    Unfinished { path: PathBuf, missing: String },
    #[error("tensor `{tensor}` cannot be had: {source}")]
    Data { tensor: String, source: Box<dyn StdError + Send + Sync> },
}

/// The order in which data lie in one file: as given, unless a tensor would then start at no multiple of its
/// element size, which some readers cannot map; then wide elements come first.
fn data_order(mut specs: Vec<TensorSpec>) -> Vec<TensorSpec> {
    let mut at = 0;
    let aligned = specs.iter().all(|spec| {
        let ok = at % spec.dtype.size() as u64 == 0;
        at += spec.bytes();
        ok
    });
    if !aligned {
        specs.sort_by_key(|spec| std::cmp::Reverse(spec.dtype.size()));
    }
    specs
}

/// Length and JSON, ready to be written.
fn header(specs: &[TensorSpec]) -> Result<Vec<u8>, WriteError> {
    let mut by_name = BTreeMap::new();
    let mut at = 0;
    for spec in specs {
        let end = at + spec.bytes();
        let entry = json!({"dtype": spec.dtype.name(), "shape": spec.shape, "data_offsets": [at, end]});
        if by_name.insert(&spec.name, entry).is_some() {
            return Err(WriteError::Twice(spec.name.clone()));
        }
        at = end;
    }
    let mut json = Map::new();
    json.insert("__metadata__".into(), json!({"format": "pt"}));
    json.extend(by_name.into_iter().map(|(name, entry)| (name.clone(), entry)));
    let mut text = Value::Object(json).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut text);
    Ok(bytes)
}

/// One file being written.
#[derive(Debug)]
pub struct FileWriter {
    path: PathBuf,
    file: BufWriter<File>,
    hash: Sha256,
    bytes: u64,
    specs: Vec<TensorSpec>,
    done: usize,
}

impl FileWriter {
    /// Creates the file at `path` and writes its header.
    pub fn create(path: &Path, specs: Vec<TensorSpec>) -> Result<Self, WriteError> {
        let specs = data_order(specs);
        let header = header(&specs)?;
        let file = File::create(path).map_err(|source| WriteError::Io { path: path.into(), source })?;
        let file = BufWriter::with_capacity(1 << 20, file);
        let mut writer = Self { path: path.into(), file, hash: Sha256::new(), bytes: 0, specs, done: 0 };
        writer.append(&header)?;
        Ok(writer)
    }

    /// The tensor whose turn it is; `None` once all are written.
    pub fn next(&self) -> Option<&TensorSpec> {
        self.specs.get(self.done)
    }

    /// Writes the data of tensor `name`, which must be [`FileWriter::next`].
    pub fn put(&mut self, name: &str, data: &[u8]) -> Result<(), WriteError> {
        let spec = match self.next() {
            Some(spec) if spec.name == name => spec,
            other => {
                return Err(WriteError::Order { found: name.into(), wanted: other.map(|spec| spec.name.clone()) });
            }
        };
        let (found, wanted) = (data.len() as u64, spec.bytes());
        if found != wanted {
            let (dtype, shape) = (spec.dtype, spec.shape.clone());
            return Err(WriteError::Length { tensor: name.into(), found, wanted, dtype, shape });
        }
        self.done += 1;
        self.append(data)
    }

    /// Closes the file, which must hold every planned tensor.
    pub fn finish(mut self) -> Result<FileRecord, WriteError> {
        if let Some(spec) = self.next() {
            return Err(WriteError::Unfinished { missing: spec.name.clone(), path: self.path });
        }
        self.file.flush().map_err(|source| WriteError::Io { path: self.path.clone(), source })?;
        let file = self.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(FileRecord { file, bytes: self.bytes, sha256: hex(&self.hash.finalize()) })
    }

    fn append(&mut self, data: &[u8]) -> Result<(), WriteError> {
        self.hash.update(data);
        self.bytes += data.len() as u64;
        self.file.write_all(data).map_err(|source| WriteError::Io { path: self.path.clone(), source })
    }
}

/// Writes one file, asking `data` for each tensor in turn.
pub fn write<E: Into<Box<dyn StdError + Send + Sync>>>(
    path: &Path,
    specs: Vec<TensorSpec>,
    mut data: impl FnMut(&TensorSpec) -> Result<Bytes, E>,
) -> Result<FileRecord, WriteError> {
    let mut writer = FileWriter::create(path, specs)?;
    while let Some(spec) = writer.next().cloned() {
        let bytes = data(&spec).map_err(|e| WriteError::Data { tensor: spec.name.clone(), source: e.into() })?;
        writer.put(&spec.name, &bytes)?;
    }
    writer.finish()
}

/// One planned file of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    pub file: String,
    /// In the order of the data.
    pub specs: Vec<TensorSpec>,
}

/// Cuts tensors, in the order given, into files of at most `max_bytes` of data. A larger tensor stands alone.
pub fn plan_shards(specs: Vec<TensorSpec>, max_bytes: u64) -> Vec<Shard> {
    let mut cuts: Vec<Vec<TensorSpec>> = vec![vec![]];
    let mut filled = 0;
    for spec in specs {
        if filled > 0 && filled + spec.bytes() > max_bytes {
            cuts.push(vec![]);
            filled = 0;
        }
        filled += spec.bytes();
        if let Some(last) = cuts.last_mut() {
            last.push(spec);
        }
    }
    let count = cuts.len();
    let name = |i: usize| match count {
        1 => "model.safetensors".to_string(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
    };
    cuts.into_iter().enumerate().map(|(i, specs)| Shard { file: name(i), specs: data_order(specs) }).collect()
}

/// Bytes that the planned files take, headers included.
pub fn planned_bytes(shards: &[Shard]) -> Result<u64, WriteError> {
    let size = |shard: &Shard| {
        let data: u64 = shard.specs.iter().map(TensorSpec::bytes).sum();
        Ok(header(&shard.specs)?.len() as u64 + data)
    };
    shards.iter().map(size).sum()
}

/// A model being written into a folder, shard after shard, and at last the index.
#[derive(Debug)]
pub struct ShardedWriter {
    dir: PathBuf,
    shards: Vec<Shard>,
    /// The shard `current` writes.
    at: usize,
    current: FileWriter,
    written: Vec<FileRecord>,
}

/// What [`ShardedWriter::finish`] wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sharded {
    /// The shards, then the index if there is one.
    pub files: Vec<FileRecord>,
    /// Bytes of tensor data.
    pub total_size: u64,
}

impl ShardedWriter {
    /// Starts the model in `dir`: `model.safetensors`, or numbered shards when it exceeds `max_shard_bytes`.
    pub fn create(dir: &Path, specs: Vec<TensorSpec>, max_shard_bytes: u64) -> Result<Self, WriteError> {
        let mut names: Vec<&str> = specs.iter().map(|spec| &*spec.name).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(WriteError::Twice(pair[0].into()));
        }
        let shards = plan_shards(specs, max_shard_bytes);
        let current = FileWriter::create(&dir.join(&shards[0].file), shards[0].specs.clone())?;
        Ok(Self { dir: dir.into(), shards, at: 0, current, written: vec![] })
    }

    /// The tensor whose turn it is; `None` once all are written.
    pub fn next(&self) -> Option<&TensorSpec> {
        self.current.next().or_else(|| self.shards.get(self.at + 1)?.specs.first())
    }

    /// Writes the data of tensor `name`, which must be [`ShardedWriter::next`].
    pub fn put(&mut self, name: &str, data: &[u8]) -> Result<(), WriteError> {
        if self.current.next().is_none() && self.at + 1 < self.shards.len() {
            self.at += 1;
            let Shard { file, specs } = &self.shards[self.at];
            let full = std::mem::replace(&mut self.current, FileWriter::create(&self.dir.join(file), specs.clone())?);
            self.written.push(full.finish()?);
        }
        self.current.put(name, data)
    }

    /// Closes the last shard and writes `model.safetensors.index.json` if there are several.
    pub fn finish(mut self) -> Result<Sharded, WriteError> {
        if let Some(spec) = self.next() {
            return Err(WriteError::Unfinished { missing: spec.name.clone(), path: self.dir });
        }
        self.written.push(self.current.finish()?);
        let total_size = self.shards.iter().flat_map(|shard| &shard.specs).map(TensorSpec::bytes).sum();
        if self.shards.len() > 1 {
            self.written.push(write_index(&self.dir, &self.shards, total_size)?);
        }
        Ok(Sharded { files: self.written, total_size })
    }
}

fn write_index(dir: &Path, shards: &[Shard], total_size: u64) -> Result<FileRecord, WriteError> {
    let map: BTreeMap<&str, &str> =
        shards.iter().flat_map(|shard| shard.specs.iter().map(|spec| (&*spec.name, &*shard.file))).collect();
    let text = pretty(&json!({"metadata": {"total_size": total_size}, "weight_map": map}));
    let path = dir.join(INDEX);
    std::fs::write(&path, &text).map_err(|source| WriteError::Io { path, source })?;
    Ok(FileRecord { file: INDEX.into(), bytes: text.len() as u64, sha256: sha256_bytes(&text) })
}

/// Writes a whole model into `dir`, asking `data` for each tensor in turn.
pub fn write_sharded<E: Into<Box<dyn StdError + Send + Sync>>>(
    dir: &Path,
    specs: Vec<TensorSpec>,
    max_shard_bytes: u64,
    mut data: impl FnMut(&TensorSpec) -> Result<Bytes, E>,
) -> Result<Sharded, WriteError> {
    let mut writer = ShardedWriter::create(dir, specs, max_shard_bytes)?;
    while let Some(spec) = writer.next().cloned() {
        let bytes = data(&spec).map_err(|e| WriteError::Data { tensor: spec.name.clone(), source: e.into() })?;
        writer.put(&spec.name, &bytes)?;
    }
    writer.finish()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    fn spec(name: &str, dtype: Dtype, len: usize) -> TensorSpec {
        TensorSpec::new(name, dtype, [len])
    }

    fn filled(spec: &TensorSpec) -> Result<Bytes, Infallible> {
        Ok(vec![spec.name.len() as u8; spec.bytes() as usize].into())
    }

    #[test]
    fn the_crate_reads_what_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        let specs = vec![spec("zz", Dtype::I32, 3), spec("a", Dtype::F16, 6), spec("empty", Dtype::F32, 0)];
        let record = write(&path, specs, filled).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(
            record,
            FileRecord { file: "x.safetensors".into(), bytes: bytes.len() as u64, sha256: sha256_bytes(&bytes) }
        );
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        assert_eq!(length % 8, 0);
        let text = std::str::from_utf8(&bytes[8..8 + length as usize]).unwrap();
        assert!(text.starts_with(r#"{"__metadata__":{"format":"pt"},"a":{"#), "{text}");
        let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(read.tensor("zz").unwrap().data(), [2; 12]);
        assert_eq!(read.tensor("a").unwrap().data(), [1; 12]);
        assert_eq!(read.tensor("empty").unwrap().shape(), [0]);
    }

    #[test]
    fn data_keep_their_order_where_alignment_allows() {
        let names = |specs: Vec<TensorSpec>| data_order(specs).into_iter().map(|s| s.name).collect::<String>();
        assert_eq!(names(vec![spec("b", Dtype::F16, 2), spec("a", Dtype::I32, 1)]), "ba");
        assert_eq!(names(vec![spec("b", Dtype::F16, 3), spec("c", Dtype::U8, 1), spec("a", Dtype::I32, 1)]), "abc");
    }

    #[test]
    fn mistakes_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        let two = || vec![spec("a", Dtype::F32, 2), spec("b", Dtype::F32, 1)];
        let twice = FileWriter::create(&path, vec![spec("a", Dtype::F32, 2), spec("a", Dtype::F32, 1)]);
        assert!(matches!(twice, Err(WriteError::Twice(name)) if name == "a"));
        let mut writer = FileWriter::create(&path, two()).unwrap();
        assert!(matches!(writer.put("b", &[0; 4]), Err(WriteError::Order { wanted: Some(w), .. }) if w == "a"));
        let short = writer.put("a", &[0; 7]).unwrap_err().to_string();
        assert!(short.contains("`a` came with 7 bytes; F32 [2] takes 8"), "{short}");
        writer.put("a", &[0; 8]).unwrap();
        assert!(matches!(writer.finish(), Err(WriteError::Unfinished { missing, .. }) if missing == "b"));
        let failed = write(&path, two(), |_| Err::<Bytes, _>("disk on fire")).unwrap_err().to_string();
        assert!(failed.contains("`a`") && failed.contains("disk on fire"), "{failed}");
    }

    #[test]
    fn shards_and_their_index() {
        let dir = tempfile::tempdir().unwrap();
        let specs: Vec<_> =
            ["c", "a", "big", "b"].into_iter().zip([4, 4, 40, 4]).map(|(n, l)| spec(n, Dtype::F32, l)).collect();
        let planned = planned_bytes(&plan_shards(specs.clone(), 32)).unwrap();
        let written = write_sharded(dir.path(), specs.clone(), 32, filled).unwrap();
        let names: Vec<&str> = written.files.iter().map(|f| &*f.file).collect();
        assert_eq!(names[0], "model-00001-of-00003.safetensors");
        assert_eq!(names[3], "model.safetensors.index.json");
        assert_eq!(planned, written.files[..3].iter().map(|f| f.bytes).sum::<u64>());
        let index: Value = serde_json::from_slice(&std::fs::read(dir.path().join(names[3])).unwrap()).unwrap();
        assert_eq!(index["metadata"]["total_size"], 52 * 4);
        assert_eq!(index["weight_map"]["a"], names[0]);
        assert_eq!(index["weight_map"]["big"], names[1]);
        assert_eq!(index["weight_map"]["b"], names[2]);
        for record in &written.files {
            assert_eq!(sha256_bytes(&std::fs::read(dir.path().join(&record.file)).unwrap()), record.sha256);
        }

        let single = tempfile::tempdir().unwrap();
        let written = write_sharded(single.path(), specs, MAX_SHARD_BYTES, filled).unwrap();
        assert_eq!(written.files.len(), 1);
        assert_eq!(written.files[0].file, "model.safetensors");
    }
}
