//! Importance files, as llama-imatrix writes them: for every linear the sums of squares of its input columns over the
//! calibration tokens. Two forms: a GGUF file, and the older `.dat`.
//!
//! A `.dat` is little-endian: i32 number of entries; each an i32 length and the name, i32 calls, i32 length and f32
//! values `mean square * calls`; then, not always, i32 chunks and the i32 length and name of the calibration text.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::MAGIC;
use super::parse::Problem;
use super::parse::{Part, parse};
use super::value::{Metadata, MetadataError, Text, Value};
use super::write::{Plan, TensorSpec, WriteError, Writer};
use crate::checkpoint;
use crate::format::output::{OutputError, write_atomic};
use crate::num::ggml::GgmlType;
use crate::tensor::{Bytes, Dtype, widened};

/// Tokens of a chunk where a file does not say.
pub const CHUNK_SIZE: u32 = 512;

const SUMS: &str = ".in_sum2";
const COUNTS: &str = ".counts";

/// Why a file of importance is not read or not used.
#[derive(Debug, Error)]
#[error("`{path}`: {problem}")]
pub struct ImatrixError {
    pub path: PathBuf,
    pub problem: ImatrixProblem,
}

#[derive(Debug, Error)]
pub enum ImatrixProblem {
    #[error("{0}")]
    Gguf(#[from] Problem),
    #[error("{0}")]
    Metadata(#[from] MetadataError),
    #[error("this GGUF file is no importance matrix: `general.type` is {0}")]
    Kind(String),
    #[error("the file ends at byte {end} inside {what}; it is cut off, damaged, or no importance matrix")]
    Truncated { what: String, end: usize },
    #[error("{what} is {found}; the file is damaged, or no importance matrix")]
    Number { what: String, found: i32 },
    #[error("the name of entry {0} is not UTF-8")]
    NotUtf8(usize),
    #[error("it holds no entries")]
    Empty,
    #[error("`{0}` stands twice")]
    Duplicate(String),
    #[error(
        "`{name}` has sums of shape {sums:?} and counts of shape {counts:?}; f32 [n, columns] and [n, 1] are needed"
    )]
    Shape { name: String, sums: Vec<usize>, counts: Vec<usize> },
    #[error("tensor `{0}` is neither sums nor counts that have each other")]
    Unpaired(String),
    #[error("`{name}` holds the value {value}; sums of squares are finite and not negative")]
    Value { name: String, value: f32 },
    #[error("`{name}` has {found} values; the tensor takes {cols} columns for {matrices} matrices")]
    Size { name: String, found: usize, cols: usize, matrices: usize },
}

/// What is known of the inputs of one weight: one row for each of its matrices (experts).
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// `[matrices, columns]`: sums of squares.
    pub sums: Vec<f32>,
    /// How many tokens each matrix saw.
    pub counts: Vec<f32>,
}

impl Entry {
    fn cols(&self) -> usize {
        self.sums.len() / self.counts.len().max(1)
    }

    /// Mean squares, `[matrices, columns]`; 1 for a matrix that saw no token.
    pub fn means(&self) -> Vec<f32> {
        let rows = self.sums.chunks(self.cols().max(1)).zip(&self.counts);
        rows.flat_map(|(row, &count)| row.iter().map(move |sum| if count > 0.0 { sum / count } else { 1.0 })).collect()
    }
}

/// A matrix of importance.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Imatrix {
    /// The calibration texts.
    pub datasets: Vec<String>,
    pub chunks: Option<u32>,
    /// Tokens in a chunk.
    pub chunk_size: u32,
    /// By the name of the weight, such as `blk.0.attn_q.weight`.
    pub entries: BTreeMap<String, Entry>,
}

impl Imatrix {
    /// Opens a file of either form.
    pub fn open(path: &Path) -> Result<Self, ImatrixError> {
        let fail = |problem| ImatrixError { path: path.into(), problem };
        let map = checkpoint::map(path).map_err(|e| fail(Problem::Io(e).into()))?;
        let len = map.len();
        Self::parse(Bytes::Mapped(map, 0..len)).map_err(fail)
    }

    /// Reads either form from the bytes of a file.
    pub fn parse(bytes: Bytes) -> Result<Self, ImatrixProblem> {
        let imatrix = if bytes.starts_with(&MAGIC) { from_gguf(parse(bytes)?)? } else { from_dat(&bytes)? };
        if imatrix.entries.is_empty() {
            return Err(ImatrixProblem::Empty);
        }
        for (name, entry) in &imatrix.entries {
            let wrong = |v: &&f32| !v.is_finite() || **v < 0.0;
            if let Some(&value) = entry.sums.iter().chain(&entry.counts).find(wrong) {
                return Err(ImatrixProblem::Value { name: name.clone(), value });
            }
        }
        Ok(imatrix)
    }

    /// The importance of the columns of a weight of `matrices` matrices, `[matrices, cols]`; `None` when the file does
    /// not cover it. What embeddings have does not count, as in llama-quantize.
    pub fn importance(&self, name: &str, cols: usize, matrices: usize) -> Result<Option<Vec<f32>>, ImatrixProblem> {
        let Some(entry) = self.entries.get(name) else { return Ok(None) };
        let found = entry.sums.len();
        if cols.checked_mul(matrices) != Some(found) {
            if name == "token_embd.weight" {
                return Ok(None);
            }
            return Err(ImatrixProblem::Size { name: name.into(), found, cols, matrices });
        }
        Ok(Some(entry.means()))
    }

    /// Writes the GGUF form.
    pub fn write_gguf(&self, path: &Path) -> Result<(), WriteError> {
        let mut metadata = Metadata::new();
        metadata.set("general.type", "imatrix");
        metadata.set("imatrix.datasets", self.datasets.clone());
        metadata.set("imatrix.chunk_count", self.chunks.unwrap_or(0));
        metadata.set("imatrix.chunk_size", self.chunk_size);
        let spec =
            |name: &str, end: &str, shape: [usize; 2]| TensorSpec::new(format!("{name}{end}"), GgmlType::F32, shape);
        let pairs = self.entries.iter().flat_map(|(name, entry)| {
            let matrices = entry.counts.len();
            [spec(name, SUMS, [matrices, entry.cols()]), spec(name, COUNTS, [matrices, 1])]
        });
        let mut writer = Writer::create(Plan::new(path, &metadata, pairs.collect(), None)?)?;
        for (name, entry) in &self.entries {
            writer.put(&format!("{name}{SUMS}"), &little_endian(&entry.sums))?;
            writer.put(&format!("{name}{COUNTS}"), &little_endian(&entry.counts))?;
        }
        writer.finish().map(drop)
    }

    /// Writes the older form, which older programs read. It has room for one calibration text.
    pub fn write_dat(&self, path: &Path) -> Result<(), OutputError> {
        let mut out = (self.entries.len() as i32).to_le_bytes().to_vec();
        for (name, entry) in &self.entries {
            // Tokens of the matrix that saw most, in chunks.
            let tokens = entry.counts.iter().fold(0f32, |a, b| a.max(*b));
            let calls = (tokens / self.chunk_size.max(1) as f32).ceil().max(1.0);
            out.extend((name.len() as i32).to_le_bytes());
            out.extend(name.as_bytes());
            out.extend((calls as i32).to_le_bytes());
            out.extend((entry.sums.len() as i32).to_le_bytes());
            out.extend(entry.means().iter().flat_map(|mean| (mean * calls).to_le_bytes()));
        }
        let dataset = self.datasets.first().map_or("", String::as_str);
        out.extend((self.chunks.unwrap_or(0) as i32).to_le_bytes());
        out.extend((dataset.len() as i32).to_le_bytes());
        out.extend(dataset.as_bytes());
        write_atomic(path, &out)
    }
}

fn little_endian(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn from_gguf(part: Part) -> Result<Imatrix, ImatrixProblem> {
    match part.metadata.get("general.type") {
        Some(Value::Text(kind)) if kind.as_str() == Some("imatrix") => {}
        Some(Value::Text(other)) => return Err(ImatrixProblem::Kind(format!("{other:?}"))),
        Some(_) | None => return Err(ImatrixProblem::Kind("missing".into())),
    }
    let datasets: &[Text] = part.metadata.read("imatrix.datasets")?.unwrap_or_default();
    let mut imatrix = Imatrix {
        // The names are for people.
        datasets: datasets.iter().map(|text| String::from_utf8_lossy(text.bytes()).into_owned()).collect(),
        chunks: part.metadata.read("imatrix.chunk_count")?,
        chunk_size: part.metadata.read("imatrix.chunk_size")?.unwrap_or(CHUNK_SIZE),
        entries: BTreeMap::new(),
    };
    let by_name: BTreeMap<&str, _> = part.tensors.iter().map(|tensor| (&*tensor.name, tensor)).collect();
    for tensor in &part.tensors {
        let unpaired = || ImatrixProblem::Unpaired(tensor.name.clone());
        let (name, other) = match (tensor.name.strip_suffix(SUMS), tensor.name.strip_suffix(COUNTS)) {
            (Some(name), _) => (name, COUNTS),
            (_, Some(name)) => (name, SUMS),
            _ => return Err(unpaired()),
        };
        let other = by_name.get(&*format!("{name}{other}")).ok_or_else(unpaired)?;
        if tensor.name.ends_with(COUNTS) {
            continue;
        }
        let matrices = other.len();
        let float = tensor.kind == GgmlType::F32 && other.kind == GgmlType::F32;
        if !float || tensor.is_empty() || other.cols() != 1 || tensor.len() != matrices * tensor.cols() {
            let (sums, counts) = (tensor.shape.clone(), other.shape.clone());
            return Err(ImatrixProblem::Shape { name: name.into(), sums, counts });
        }
        let entry = Entry { sums: widened(Dtype::F32, &tensor.bytes), counts: widened(Dtype::F32, &other.bytes) };
        imatrix.entries.insert(name.into(), entry);
    }
    Ok(imatrix)
}

/// A place in a `.dat`.
struct Dat<'a> {
    left: &'a [u8],
    end: usize,
}

impl<'a> Dat<'a> {
    fn take(&mut self, len: usize, what: impl FnOnce() -> String) -> Result<&'a [u8], ImatrixProblem> {
        let (taken, left) =
            self.left.split_at_checked(len).ok_or_else(|| ImatrixProblem::Truncated { what: what(), end: self.end })?;
        self.left = left;
        Ok(taken)
    }

    fn number(&mut self, what: impl Fn() -> String) -> Result<i32, ImatrixProblem> {
        let bytes = self.take(4, &what)?;
        Ok(i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    /// A number that must be at least `least`.
    fn count(&mut self, least: i32, what: impl Fn() -> String) -> Result<usize, ImatrixProblem> {
        match self.number(&what)? {
            found if found < least => Err(ImatrixProblem::Number { what: what(), found }),
            fine => Ok(fine as usize),
        }
    }
}

fn from_dat(bytes: &[u8]) -> Result<Imatrix, ImatrixProblem> {
    let mut dat = Dat { left: bytes, end: bytes.len() };
    let count = dat.count(1, || "the number of entries".into())?;
    let mut imatrix = Imatrix { chunk_size: CHUNK_SIZE, ..Imatrix::default() };
    for i in 0..count {
        let len = dat.count(1, || format!("the length of the name of entry {i}"))?;
        let name = dat.take(len, || format!("the name of entry {i}"))?;
        let name = std::str::from_utf8(name).map_err(|_| ImatrixProblem::NotUtf8(i))?;
        let calls = dat.count(0, || format!("the number of calls of `{name}`"))?;
        let values = dat.count(1, || format!("the number of values of `{name}`"))?;
        let values = dat.take(values.saturating_mul(4), || format!("the values of `{name}`"))?;
        // Without calls the values are taken as they are. A power of two changes no digit.
        let tokens = CHUNK_SIZE as f32;
        let sums = widened(Dtype::F32, values).iter().map(|v| v * tokens).collect();
        let entry = Entry { sums, counts: vec![calls.max(1) as f32 * tokens] };
        if imatrix.entries.insert(name.into(), entry).is_some() {
            return Err(ImatrixProblem::Duplicate(name.into()));
        }
    }
    // The oldest files end here.
    if !dat.left.is_empty() {
        imatrix.chunks = Some(dat.count(0, || "the number of chunks".into())? as u32);
        let len = dat.count(0, || "the length of the name of the text".into())?;
        let name = dat.take(len, || "the name of the text".into())?;
        imatrix.datasets = vec![String::from_utf8_lossy(name).into_owned()];
    }
    Ok(imatrix)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn imatrix() -> Imatrix {
        let entries = [
            ("blk.0.attn_q.weight", Entry { sums: vec![512.0, 1024.0, 0.0], counts: vec![1024.0] }),
            ("blk.0.ffn_up_exps.weight", Entry { sums: vec![3.0, 6.0, 0.0, 0.0], counts: vec![3.0, 0.0] }),
        ];
        Imatrix {
            datasets: vec!["text.txt".into()],
            chunks: Some(2),
            chunk_size: 512,
            entries: entries.into_iter().map(|(name, entry)| (name.to_string(), entry)).collect(),
        }
    }

    #[test]
    fn the_gguf_form_keeps_everything() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("imatrix.gguf");
        imatrix().write_gguf(&path).unwrap();
        let read = Imatrix::open(&path).unwrap();
        assert_eq!(read, imatrix());
        assert_eq!(read.importance("blk.0.attn_q.weight", 3, 1).unwrap().unwrap(), [0.5, 1.0, 0.0]);
        // An expert that saw nothing counts as 1.
        assert_eq!(read.importance("blk.0.ffn_up_exps.weight", 2, 2).unwrap().unwrap(), [1.0, 2.0, 1.0, 1.0]);
        assert!(read.importance("output.weight", 3, 1).unwrap().is_none());
        let error = read.importance("blk.0.attn_q.weight", 4, 1).unwrap_err().to_string();
        assert!(error.contains("has 3 values; the tensor takes 4 columns for 1 matrices"), "{error}");
    }

    #[test]
    fn the_older_form_keeps_the_means() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("imatrix.dat");
        imatrix().write_dat(&path).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        // Two chunks of tokens are two calls: 512/1024 * 2 and so on.
        assert_eq!(bytes[..8], [2, 0, 0, 0, 19, 0, 0, 0]);
        assert_eq!(bytes[27..35], [2, 0, 0, 0, 3, 0, 0, 0]);
        assert_eq!(bytes[35..39], 1f32.to_le_bytes());
        let read = Imatrix::open(&path).unwrap();
        assert_eq!((read.chunks, &*read.datasets[0]), (Some(2), "text.txt"));
        assert_eq!(read.importance("blk.0.attn_q.weight", 3, 1).unwrap().unwrap(), [0.5, 1.0, 0.0]);
        assert_eq!(read.importance("blk.0.ffn_up_exps.weight", 2, 2).unwrap().unwrap(), [1.0, 2.0, 1.0, 1.0]);
    }

    #[test]
    fn files_without_a_trailer() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("imatrix.dat");
        imatrix().write_dat(&path).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let short = &bytes[..bytes.len() - 4 - 4 - "text.txt".len()];
        let read = Imatrix::parse(short.to_vec().into()).unwrap();
        assert_eq!((read.entries.len(), read.chunks), (2, None));
    }

    #[test]
    fn damage_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("imatrix.dat");
        imatrix().write_dat(&path).unwrap();
        let whole = std::fs::read(&path).unwrap();
        let told = |bytes: &[u8]| Imatrix::parse(bytes.to_vec().into()).unwrap_err().to_string();
        let trailer = whole.len() - 4 - 4 - "text.txt".len();
        for end in (0..whole.len()).filter(|end| *end != trailer) {
            assert!(told(&whole[..end]).contains("the file ends at byte"), "{end}");
        }
        let with = |at: usize, new: &[u8]| {
            let mut bytes = whole.clone();
            bytes[at..at + new.len()].copy_from_slice(new);
            told(&bytes)
        };
        assert!(with(0, &(-1i32).to_le_bytes()).contains("the number of entries is -1"));
        assert!(with(31, &i32::MAX.to_le_bytes()).contains("the values of `blk.0.attn_q.weight`"));
        assert!(with(35, &f32::NAN.to_le_bytes()).contains("holds the value NaN"));
        assert!(with(35, &(-1f32).to_le_bytes()).contains("not negative"));
        assert!(with(8, &[0xff]).contains("the name of entry 0 is not UTF-8"));
    }
}
