//! Writing: names, types, shapes and offsets are planned first; then tensors stream through, each in its turn, into
//! hidden files that get their names when everything is on the disk.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::file_type::FileType;
use super::read::{SPLIT_COUNT, SPLIT_NO, SPLIT_TENSORS};
use super::value::{Array, Metadata, Value};
use super::{ALIGNMENT, ALIGNMENT_KEY, MAGIC, MAX_DIMS, MAX_NAME, part_name, parts};
use crate::format::atomic;
use crate::format::output::{self, OutputError};
use crate::num::ggml::GgmlType;

/// The version of the format that is written.
const VERSION: u32 = 3;

/// How many parts the key `split.no` can number, and their names count.
const MAX_PARTS: usize = u16::MAX as usize;

/// A tensor to come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    pub name: String,
    pub kind: GgmlType,
    /// Outermost first.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    pub fn new(name: impl Into<String>, kind: GgmlType, shape: impl Into<Vec<usize>>) -> Self {
        Self { name: name.into(), kind, shape: shape.into() }
    }

    /// The size of its data; `None` when blocks do not fill a row, or when it is too large.
    pub fn bytes(&self) -> Option<u64> {
        let (&cols, rows) = self.shape.split_last().unwrap_or((&1, &[]));
        let row = self.kind.row_bytes(cols)?;
        rows.iter().try_fold(row, |bytes, &extent| bytes.checked_mul(extent)).map(|bytes| bytes as u64)
    }
}

/// Why a model cannot be written.
#[derive(Debug, Error)]
pub enum WriteError {
    #[error("`{0}` exists already; name a new file or remove it first")]
    Exists(PathBuf),
    #[error("`{0}` exists and is no GGUF file; it will not be replaced")]
    Foreign(PathBuf),
    #[error("cannot write `{path}`: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Output(#[from] OutputError),
    #[error("tensor `{0}` is planned twice")]
    Twice(String),
    #[error("the tensor name `{0}` is longer than {MAX_NAME} bytes, which llama.cpp does not load")]
    Name(String),
    #[error("tensor `{tensor}` has the shape {shape:?}; GGUF takes at most {MAX_DIMS} dimensions")]
    Dimensions { tensor: String, shape: Vec<usize> },
    #[error("tensor `{tensor}` cannot be {kind}: its shape is {shape:?}, and rows must be multiples of {}", kind.block())]
    Blocks { tensor: String, kind: GgmlType, shape: Vec<usize> },
    #[error("the model would be cut into {count} parts; {MAX_PARTS} are the most, so allow larger ones")]
    Parts { count: usize },
    #[error("tensor `{found}` came where {} was planned", wanted.as_ref().map_or("the end".into(), |w| format!("`{w}`")))]
    Order { found: String, wanted: Option<String> },
    #[error("tensor `{tensor}` came with {found} bytes or more; {wanted} were planned")]
    Length { tensor: String, found: u64, wanted: u64 },
    #[error("`{path}` ends inside or before tensor `{missing}`")]
    Unfinished { path: PathBuf, missing: String },
}

/// The layer of a tensor: the number in `blk.N.`; -1 for what belongs to no layer.
pub fn layer(name: &str) -> i64 {
    let number = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    number.and_then(|(number, _)| number.parse::<u32>().ok()).map_or(-1, i64::from)
}

/// Sorts names as llama-quantize writes tensors: by layer, then by the bytes of the name.
pub fn sort_as_written<T>(items: &mut [T], name: impl Fn(&T) -> &str) {
    items.sort_by(|a, b| (layer(name(a)), name(a)).cmp(&(layer(name(b)), name(b))));
}

/// What is noted about the importance a quantization used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImportanceNote {
    pub file: String,
    pub dataset: Option<String>,
    pub entries: u32,
    pub chunks: Option<u32>,
}

/// The metadata of a quantized model from those of its source, in llama-quantize's order: what is new or changed
/// comes last.
pub fn quantized_metadata(source: &Metadata, file_type: FileType, importance: Option<&ImportanceNote>) -> Metadata {
    let mut metadata = source.clone();
    metadata.retain(|key| !key.starts_with("split."));
    metadata.set("general.quantization_version", 2u32);
    metadata.set("general.file_type", file_type.number());
    if let Some(note) = importance {
        metadata.set("quantize.imatrix.file", cut(&note.file));
        if let Some(dataset) = &note.dataset {
            metadata.set("quantize.imatrix.dataset", cut(dataset));
        }
        metadata.set("quantize.imatrix.entries_count", note.entries);
        if let Some(chunks) = note.chunks {
            metadata.set("quantize.imatrix.chunks_count", chunks);
        }
    }
    metadata
}

/// At most 127 bytes, as llama.cpp keeps such notes, and no broken character.
fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(127)]
}

/// A size as `--split-max-size` takes it: `N`, `NM` or `NG`, decimal units.
pub fn parse_size(text: &str) -> Option<u64> {
    let (digits, unit) = match text.strip_suffix(['M', 'm']) {
        Some(digits) => (digits, 1_000_000),
        None => text.strip_suffix(['G', 'g']).map_or((text, 1), |digits| (digits, 1_000_000_000)),
    };
    let plain = digits.bytes().all(|b| b.is_ascii_digit());
    digits.parse::<u64>().ok().filter(|n| plain && *n > 0)?.checked_mul(unit)
}

/// One planned file.
#[derive(Debug)]
struct PlannedPart {
    path: PathBuf,
    /// Everything before the data, padding included.
    header: Vec<u8>,
    tensors: Vec<(TensorSpec, u64)>,
}

/// The layout of a model, settled before any data.
#[derive(Debug)]
pub struct Plan {
    parts: Vec<PlannedPart>,
}

impl Plan {
    /// Plans the file `path`, tensors in the order given. With `max_part_bytes` of padded tensor data exceeded it
    /// becomes several files beside each other, `PREFIX-00001-of-0000N.gguf` for `PREFIX.gguf`; a tensor larger than
    /// that stands alone.
    pub fn new(
        path: &Path,
        metadata: &Metadata,
        tensors: Vec<TensorSpec>,
        max_part_bytes: Option<u64>,
    ) -> Result<Self, WriteError> {
        let total = tensors.len();
        let cuts = cut_parts(sized(tensors)?, max_part_bytes.unwrap_or(u64::MAX));
        let count = cuts.len();
        if count > MAX_PARTS {
            return Err(WriteError::Parts { count });
        }
        let mut whole = metadata.clone();
        whole.retain(|key| !key.starts_with("split.") && key != ALIGNMENT_KEY);
        let parts = cuts.into_iter().enumerate().map(|(i, tensors)| {
            let mut metadata = if i == 0 { std::mem::take(&mut whole) } else { Metadata::new() };
            let mut file = path.to_path_buf();
            if count > 1 {
                metadata.set(SPLIT_NO, i as u16);
                metadata.set(SPLIT_TENSORS, total as i32);
                metadata.set(SPLIT_COUNT, count as u16);
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                file.set_file_name(part_name(name.strip_suffix(".gguf").unwrap_or(&name), i + 1, count));
            }
            PlannedPart { path: file, header: header(&metadata, &tensors), tensors }
        });
        Ok(Self { parts: parts.collect() })
    }

    /// The files that will be.
    pub fn paths(&self) -> impl Iterator<Item = &Path> + Clone {
        self.parts.iter().map(|part| &*part.path)
    }

    /// Bytes of all files together.
    pub fn bytes(&self) -> u64 {
        let data = |part: &PlannedPart| part.tensors.iter().map(|(_, bytes)| padded(*bytes)).sum::<u64>();
        self.parts.iter().map(|part| part.header.len() as u64 + data(part)).sum()
    }

    /// In the order in which they have to come.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorSpec> {
        self.parts.iter().flat_map(|part| part.tensors.iter().map(|(spec, _)| spec))
    }
}

/// Bytes that tensors take in a file, with what fills them up to the alignment; `None` where one has no size.
pub fn data_bytes(tensors: &[TensorSpec]) -> Option<u64> {
    tensors.iter().try_fold(0u64, |sum, spec| sum.checked_add(padded(spec.bytes()?)))
}

fn padded(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGNMENT)
}

/// Tensors with their sizes, each found to be fit for a file.
fn sized(tensors: Vec<TensorSpec>) -> Result<Vec<(TensorSpec, u64)>, WriteError> {
    let mut names = HashSet::new();
    for spec in &tensors {
        if !names.insert(&*spec.name) {
            return Err(WriteError::Twice(spec.name.clone()));
        }
        if spec.name.len() > MAX_NAME {
            return Err(WriteError::Name(spec.name.clone()));
        }
        if spec.shape.len() > MAX_DIMS {
            return Err(WriteError::Dimensions { tensor: spec.name.clone(), shape: spec.shape.clone() });
        }
    }
    let sized = tensors.into_iter().map(|spec| match spec.bytes() {
        Some(bytes) => Ok((spec, bytes)),
        None => Err(WriteError::Blocks { tensor: spec.name, kind: spec.kind, shape: spec.shape }),
    });
    sized.collect()
}

fn cut_parts(tensors: Vec<(TensorSpec, u64)>, max: u64) -> Vec<Vec<(TensorSpec, u64)>> {
    let mut parts = Vec::new();
    let (mut part, mut filled) = (Vec::new(), 0u64);
    for (spec, bytes) in tensors {
        if !part.is_empty() && filled.saturating_add(padded(bytes)) > max {
            parts.push(std::mem::take(&mut part));
            filled = 0;
        }
        filled = filled.saturating_add(padded(bytes));
        part.push((spec, bytes));
    }
    parts.push(part);
    parts
}

fn header(metadata: &Metadata, tensors: &[(TensorSpec, u64)]) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend(VERSION.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata.iter() {
        put_text(&mut out, key.as_bytes());
        out.extend(value.type_id().to_le_bytes());
        put_value(&mut out, value);
    }
    let mut offset = 0u64;
    for (spec, bytes) in tensors {
        put_text(&mut out, spec.name.as_bytes());
        out.extend((spec.shape.len() as u32).to_le_bytes());
        for extent in spec.shape.iter().rev() {
            out.extend((*extent as u64).to_le_bytes());
        }
        out.extend(spec.kind.id().to_le_bytes());
        out.extend(offset.to_le_bytes());
        offset += padded(*bytes);
    }
    out.resize(padded(out.len() as u64) as usize, 0);
    out
}

fn put_text(out: &mut Vec<u8>, text: &[u8]) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text);
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U8(v) => out.push(*v),
        Value::I8(v) => out.extend(v.to_le_bytes()),
        Value::U16(v) => out.extend(v.to_le_bytes()),
        Value::I16(v) => out.extend(v.to_le_bytes()),
        Value::U32(v) => out.extend(v.to_le_bytes()),
        Value::I32(v) => out.extend(v.to_le_bytes()),
        Value::F32(v) => out.extend(v.to_le_bytes()),
        Value::Bool(v) => out.push((*v).into()),
        Value::Text(v) => put_text(out, v.bytes()),
        Value::U64(v) => out.extend(v.to_le_bytes()),
        Value::I64(v) => out.extend(v.to_le_bytes()),
        Value::F64(v) => out.extend(v.to_le_bytes()),
        Value::Array(array) => {
            out.extend(array.type_id().to_le_bytes());
            out.extend((array.len() as u64).to_le_bytes());
            match array {
                Array::U8(v) => out.extend(v),
                Array::I8(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
                Array::U16(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
                Array::I16(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
                Array::U32(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
                Array::I32(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
                Array::F32(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
                Array::Bool(v) => out.extend(v.iter().map(|v| u8::from(*v))),
                Array::Text(v) => v.iter().for_each(|v| put_text(out, v.bytes())),
                Array::U64(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
                Array::I64(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
                Array::F64(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
            }
        }
    }
}

/// A file under its hidden name.
#[derive(Debug)]
struct Hidden {
    path: PathBuf,
    file: BufWriter<File>,
}

/// A model being written. Dropped before [`Writer::finish`], it leaves nothing behind.
#[derive(Debug)]
pub struct Writer {
    plan: Plan,
    /// One for each part begun; the last is being filled.
    files: Vec<Hidden>,
    /// Tensors of the current part that are complete.
    done: usize,
    /// Bytes of the tensor whose turn it is.
    filled: u64,
    /// Folders that were not there before, the outermost first.
    made: Vec<PathBuf>,
    finished: bool,
    replaces: bool,
}

/// Whether a file may be written to `path`: nothing may be there, or with `replaces` a GGUF file.
pub fn require_free(path: &Path, replaces: bool) -> Result<(), WriteError> {
    if fs::symlink_metadata(path).is_err() {
        return Ok(());
    }
    if !replaces {
        return Err(WriteError::Exists(path.into()));
    }
    let mut start = [0; MAGIC.len()];
    // Pipes and devices are not to be waited for.
    let read = fs::metadata(path).is_ok_and(|found| found.is_file())
        && File::open(path).and_then(|mut file| file.read_exact(&mut start)).is_ok();
    if read && start == MAGIC { Ok(()) } else { Err(WriteError::Foreign(path.into())) }
}

impl Writer {
    /// Starts writing. No file may have the name of a planned one, and all of them must fit on the disk.
    pub fn create(plan: Plan) -> Result<Self, WriteError> {
        Self::start(plan, false)
    }

    /// Like [`Writer::create`], but GGUF files may be there: each is replaced in one step when all are complete.
    pub fn replace(plan: Plan) -> Result<Self, WriteError> {
        Self::start(plan, true)
    }

    fn start(plan: Plan, replaces: bool) -> Result<Self, WriteError> {
        let mut writer = Self { plan, files: vec![], done: 0, filled: 0, made: vec![], finished: false, replaces };
        parts::recover(writer.plan.paths());
        writer.plan.paths().try_for_each(|path| require_free(path, replaces))?;
        let (parent, _) = output::split(&writer.plan.parts[0].path)?;
        output::require_space(&parent, writer.plan.bytes())?;
        writer.made = parent.ancestors().take_while(|p| *p != Path::new("") && !p.exists()).map(Into::into).collect();
        writer.made.reverse();
        fs::create_dir_all(&parent).map_err(|source| OutputError::Parent { parent, source })?;
        writer.begin_part()?;
        Ok(writer)
    }

    /// The tensor whose turn it is; `None` once all are complete.
    pub fn next(&self) -> Option<&TensorSpec> {
        let rest = self.plan.parts[self.files.len() - 1].tensors.get(self.done);
        rest.or_else(|| self.plan.parts.get(self.files.len())?.tensors.first()).map(|(spec, _)| spec)
    }

    /// Writes data of the tensor `name`, which must be [`Writer::next`]: all of it, or the next piece.
    pub fn put(&mut self, name: &str, data: &[u8]) -> Result<(), WriteError> {
        match self.next() {
            Some(spec) if spec.name == name => {}
            other => return Err(WriteError::Order { found: name.into(), wanted: other.map(|s| s.name.clone()) }),
        }
        if self.done == self.plan.parts[self.files.len() - 1].tensors.len() {
            self.begin_part()?;
        }
        let wanted = self.plan.parts[self.files.len() - 1].tensors[self.done].1;
        let found = self.filled + data.len() as u64;
        if found > wanted {
            return Err(WriteError::Length { tensor: name.into(), found, wanted });
        }
        self.append(data)?;
        self.filled = found;
        if found == wanted {
            self.append(&[0; ALIGNMENT as usize][..(padded(wanted) - wanted) as usize])?;
            self.done += 1;
            self.filled = 0;
        }
        Ok(())
    }

    /// Makes everything durable, and gives the paths under which the parts can be read until [`Writer::finish`] names them.
    ///
    /// # Errors
    ///
    /// When a tensor is missing, or a file cannot be written.
    pub fn close(&mut self) -> Result<Vec<PathBuf>, WriteError> {
        if let Some(spec) = self.next() {
            let path = self.plan.parts[self.files.len() - 1].path.clone();
            return Err(WriteError::Unfinished { missing: spec.name.clone(), path });
        }
        for (hidden, part) in self.files.iter_mut().zip(&self.plan.parts) {
            let synced = hidden.file.flush().and_then(|()| hidden.file.get_ref().sync_all());
            synced.map_err(|source| WriteError::Io { path: part.path.clone(), source })?;
        }
        Ok(self.files.iter().map(|hidden| hidden.path.clone()).collect())
    }

    /// Makes everything durable and gives the files their names, the first part last, so that whoever finds it finds
    /// all; earlier parts of these names are replaced all or none. Returns the paths.
    ///
    /// # Errors
    ///
    /// When a tensor is missing, a file cannot be written, or one that may not be replaced is in the way.
    pub fn finish(mut self) -> Result<Vec<PathBuf>, WriteError> {
        self.close()?;
        self.plan.paths().try_for_each(|path| require_free(path, self.replaces))?;
        let files: Vec<(&Path, &Path)> = self.files.iter().map(|hidden| &*hidden.path).zip(self.plan.paths()).collect();
        parts::put(&files).map_err(|source| WriteError::Io { path: self.plan.parts[0].path.clone(), source })?;
        self.finished = true;
        output::sync(&output::split(&self.plan.parts[0].path)?.0)?;
        Ok(self.plan.paths().map(Into::into).collect())
    }

    fn begin_part(&mut self) -> Result<(), WriteError> {
        let part = &mut self.plan.parts[self.files.len()];
        let (parent, name) = output::split(&part.path)?;
        for path in atomic::abandoned(&parent, &name, "partial") {
            if let Ok(Some(_held)) = atomic::lock(&path) {
                // What cannot be removed is no harm to this run.
                let _ = fs::remove_file(path);
            }
        }
        let path = parent.join(output::hidden(&name, "partial", ""));
        let file = File::create(&path).map_err(|source| OutputError::Parent { parent, source })?;
        // Tells other runs that the file is in use; where files cannot be locked, nobody will remove it either.
        let _ = file.try_lock();
        self.files.push(Hidden { path, file: BufWriter::with_capacity(1 << 20, file) });
        self.done = 0;
        let header = std::mem::take(&mut part.header);
        self.append(&header)
    }

    fn append(&mut self, data: &[u8]) -> Result<(), WriteError> {
        let at = self.files.len() - 1;
        let written = self.files[at].file.write_all(data);
        written.map_err(|source| WriteError::Io { path: self.plan.parts[at].path.clone(), source })
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if !self.finished {
            for hidden in &self.files {
                // Nobody is left to hear of a failure here, and a hidden file is harmless.
                let _ = fs::remove_file(&hidden.path);
            }
            atomic::remove_empty(&self.made);
        }
    }
}
