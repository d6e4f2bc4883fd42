//! Reading: one mapped file, or several parts as one model, checked on opening.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::parse::{Part, Problem, Tensor, parse_headers};
use super::value::{Metadata, MetadataError};
use super::{parse_part_name, part_name};
use crate::checkpoint;
use crate::tensor::Bytes;

/// Why a file is not read: where, and what stands there.
#[derive(Debug, Error)]
#[error("`{path}`: {problem}")]
pub struct ReadError {
    pub path: PathBuf,
    pub problem: Problem,
}

impl ReadError {
    /// Whether a file is a GGUF file whose content is broken, and not another kind of file, the wrong part of a model or
    /// a version that is not read. `given` is the file that was named: others belong to it.
    pub fn is_damage(&self, given: &Path) -> bool {
        match self.problem {
            Problem::Magic { .. } | Problem::BigEndian | Problem::Version(_) | Problem::Io(_) => self.path != given,
            Problem::NotFirst { .. } | Problem::PartName { .. } | Problem::TensorType { .. } => false,
            _ => true,
        }
    }
}

/// A GGUF model: its metadata, and its tensors in the order of the file.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    version: u32,
    metadata: Metadata,
    tensors: Vec<Tensor>,
    by_name: HashMap<String, usize>,
    parts: Vec<PathBuf>,
}

/// How many parts that cannot be read are reported one by one.
const NAMED_PARTS: usize = 3;

impl GgufFile {
    /// Opens a file, or all parts of a split model by its first. The keys about the split are taken out of the
    /// metadata, since what is opened is whole.
    pub fn open(path: &Path) -> Result<Self, ReadError> {
        let (file, damage) = Self::salvage(path)?;
        match damage.into_iter().next() {
            None => Ok(file),
            Some(error) => Err(error),
        }
    }

    /// What the headers say, with all that [`GgufFile::open`] refuses: data that are cut off, and parts that are
    /// missing or damaged. An error where not even the header of the first part can be read.
    pub fn salvage(path: &Path) -> Result<(Self, Vec<ReadError>), ReadError> {
        let first = open_part(path)?;
        let fail = |problem| ReadError { path: path.into(), problem };
        let mut damage = Vec::new();
        let split = first.split().map_err(|e| fail(e.into()))?;
        let mut parts = vec![path.to_path_buf()];
        let mut tensors = first.tensors;
        damage.extend(first.cut.map(fail));
        if let Some(split) = split {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let parsed = parse_part_name(&name);
            if split.no != 0 {
                let first = parsed.map(|(prefix, _, count)| path.with_file_name(part_name(prefix, 1, count)));
                return Err(fail(Problem::NotFirst { number: split.no.saturating_add(1), first }));
            }
            if split.count > 1 {
                let (prefix, _, count) = parsed
                    .filter(|(_, number, count)| *number == 1 && *count as u64 == split.count)
                    .ok_or_else(|| fail(Problem::PartName { count: split.count }))?;
                let mut missing = Vec::new();
                for number in 2..=count {
                    let path = path.with_file_name(part_name(prefix, number, count));
                    match further_part(&path, number as u64, split.count) {
                        Ok(part) => {
                            tensors.extend(part.tensors);
                            damage.extend(part.cut.map(|problem| ReadError { path: path.clone(), problem }));
                            parts.push(path);
                        }
                        Err(error) => missing.push(error),
                    }
                }
                // A file can claim any number of parts.
                let more = missing.len().saturating_sub(NAMED_PARTS) as u64;
                damage.extend(missing.drain(..).take(NAMED_PARTS));
                if more > 0 {
                    damage.push(fail(Problem::MoreParts { more }));
                }
            }
            let found = tensors.len() as u64;
            if let Some(wanted) = split.tensors.filter(|wanted| *wanted != found && damage.is_empty()) {
                damage.push(fail(Problem::PartTensors { found, wanted }));
            }
        }
        let mut metadata = first.metadata;
        if split.is_some() {
            metadata.retain(|key| !key.starts_with("split."));
        }
        let file = Self::of_parts(path, first.version, metadata, tensors, parts).map_err(fail)?;
        Ok((file, damage))
    }

    /// Opens the parts of a model in their order, whatever the names of the files. `name` is what the model is called.
    ///
    /// # Errors
    ///
    /// When a part cannot be read, is cut off, or is another part than its place says.
    pub fn open_parts(name: &Path, paths: &[PathBuf]) -> Result<Self, ReadError> {
        let mut parts = Vec::with_capacity(paths.len());
        for (number, path) in (1..).zip(paths) {
            let part = if number == 1 { open_part(path)? } else { further_part(path, number, paths.len() as u64)? };
            parts.push(part);
        }
        if let Some((path, problem)) =
            paths.iter().zip(&mut parts).find_map(|(path, part)| Some((path, part.cut.take()?)))
        {
            return Err(ReadError { path: path.clone(), problem });
        }
        let mut parts = parts.into_iter();
        let fail = |problem| ReadError { path: name.into(), problem };
        let first = parts.next().ok_or_else(|| fail(std::io::Error::from(std::io::ErrorKind::NotFound).into()))?;
        let mut metadata = first.metadata;
        metadata.retain(|key| !key.starts_with("split."));
        let tensors = first.tensors.into_iter().chain(parts.flat_map(|part| part.tensors)).collect();
        Self::of_parts(name, first.version, metadata, tensors, paths.to_vec()).map_err(fail)
    }

    fn of_parts(
        path: &Path,
        version: u32,
        metadata: Metadata,
        tensors: Vec<Tensor>,
        parts: Vec<PathBuf>,
    ) -> Result<Self, Problem> {
        let mut by_name = HashMap::with_capacity(tensors.len());
        for (i, tensor) in tensors.iter().enumerate() {
            if by_name.insert(tensor.name.clone(), i).is_some() {
                return Err(Problem::DuplicateTensor(tensor.name.clone()));
            }
        }
        Ok(Self { path: path.into(), version, metadata, tensors, by_name, parts })
    }

    /// The file, or the first part.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The version of the format.
    pub fn version(&self) -> u32 {
        self.version
    }

    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// In the order of the files.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.by_name.get(name).map(|&i| &self.tensors[i])
    }

    /// The files it is made of.
    pub fn parts(&self) -> &[PathBuf] {
        &self.parts
    }
}

fn open_part(path: &Path) -> Result<Part, ReadError> {
    let fail = |problem| ReadError { path: path.into(), problem };
    let map = checkpoint::map(path).map_err(|e| fail(e.into()))?;
    let len = map.len();
    parse_headers(Bytes::Mapped(map, 0..len)).map_err(fail)
}

/// Opens part `number` (from 1), which must say that it is that part.
fn further_part(path: &Path, number: u64, count: u64) -> Result<Part, ReadError> {
    let part = open_part(path)?;
    let fail = |problem| ReadError { path: path.into(), problem };
    let split = part.split().map_err(|e| fail(e.into()))?.unwrap_or(Split { no: 0, count: 1, tensors: None });
    // Some writers leave the count out of further parts.
    let right = split.no == number - 1 && (split.count == count || part.metadata.get(SPLIT_COUNT).is_none());
    if !right {
        let (found, found_count) = (split.no.saturating_add(1), split.count);
        return Err(fail(Problem::PartNumber { found, found_count, wanted: number, count }));
    }
    Ok(part)
}

pub(super) const SPLIT_NO: &str = "split.no";
pub(super) const SPLIT_COUNT: &str = "split.count";
pub(super) const SPLIT_TENSORS: &str = "split.tensors.count";

/// What a part says about the whole.
#[derive(Clone, Copy, Debug)]
struct Split {
    /// From 0.
    no: u64,
    count: u64,
    tensors: Option<u64>,
}

impl Part {
    fn split(&self) -> Result<Option<Split>, MetadataError> {
        let (no, count) = (self.metadata.read(SPLIT_NO)?, self.metadata.read(SPLIT_COUNT)?);
        if no.is_none() && count.is_none() {
            return Ok(None);
        }
        let tensors = self.metadata.read(SPLIT_TENSORS)?;
        Ok(Some(Split { no: no.unwrap_or(0), count: count.unwrap_or(1), tensors }))
    }
}
