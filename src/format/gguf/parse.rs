//! One file from its bytes. Counts are held against the bytes that are left before memory is taken for them, so
//! a hostile file costs at most a few times its size.

use std::collections::HashSet;
use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::value::{ARRAY, Array, Metadata, MetadataError, TYPE_NAMES, Text, Value};
use super::{ALIGNMENT, ALIGNMENT_KEY, MAGIC, MAX_DIMS, MAX_NAME};
use crate::num::ggml::GgmlType;
use crate::tensor::Bytes;

/// What can be wrong with a file. Positions are bytes from its start.
#[derive(Debug, Error)]
pub enum Problem {
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
    #[error("this is no GGUF file: it starts with {found:02x?} instead of `GGUF`")]
    Magic { found: Vec<u8> },
    #[error("this GGUF file is big-endian; only little-endian files are read, so convert it first")]
    BigEndian,
    #[error("GGUF version {0} is not read; versions 2 and 3 are")]
    Version(u32),
    #[error(
        "the file ends at byte {end} inside {what}, which begins at byte {at}; it is cut off or damaged, so get it again"
    )]
    Truncated { what: String, at: u64, end: u64 },
    #[error("{count} {what} cannot be in the {left} bytes that are left; the file is damaged, so get it again")]
    Count { what: String, count: i128, left: u64 },
    #[error("{what} at byte {at} is not UTF-8")]
    NotUtf8 { what: &'static str, at: u64 },
    #[error("a metadata key at byte {0} is empty")]
    EmptyKey(u64),
    #[error("the metadata key `{0}` stands twice")]
    DuplicateKey(String),
    #[error("the metadata key `{key}` has the value type {id}; types are 0 to 12")]
    ValueType { key: String, id: u32 },
    #[error("the metadata key `{0}` holds an array of arrays, which llama.cpp does not load either")]
    NestedArray(String),
    #[error("{0}")]
    Metadata(#[from] MetadataError),
    #[error("`general.alignment` is {0}; a u32 that is a power of two is needed")]
    Alignment(String),
    #[error("the tensor name `{name}` has {} bytes; at most {MAX_NAME} are allowed", .name.len())]
    NameLength { name: String },
    #[error("tensor `{0}` stands twice")]
    DuplicateTensor(String),
    #[error("tensor `{tensor}` has {dims} dimensions; at most {MAX_DIMS} are allowed")]
    Dimensions { tensor: String, dims: u32 },
    #[error("tensor `{tensor}` has the extents {extents:?}, of which one is negative or the product too large")]
    Extents { tensor: String, extents: Vec<i64> },
    #[error("tensor `{tensor}` is of the ggml type {id}, which is not read; read are {}", known_types())]
    TensorType { tensor: String, id: u32 },
    #[error("tensor `{tensor}` has rows of {cols} values; {kind} takes multiples of {}", kind.block())]
    Blocks { tensor: String, cols: usize, kind: GgmlType },
    #[error("tensor `{tensor}` begins at {found} of the data, but {wanted} is where the one before it ends")]
    Offset { tensor: String, found: u64, wanted: u64 },
    #[error("this is part {number} of a split model; give its first part{}", hint(.first))]
    NotFirst { number: u64, first: Option<PathBuf> },
    #[error(
        "this is the first of {count} parts, but its name does not end in `-00001-of-{count:05}.gguf`; rename the parts as they were"
    )]
    PartName { count: u64 },
    #[error("this part says it is number {found} of {found_count}; {wanted} of {count} is needed (counted from 1)")]
    PartNumber { found: u64, found_count: u64, wanted: u64, count: u64 },
    #[error("the parts hold {found} tensors together; the first says {wanted}, so parts of different models are mixed")]
    PartTensors { found: u64, wanted: u64 },
    #[error("{more} more parts are missing or damaged; put all parts into one folder")]
    MoreParts { more: u64 },
}

fn known_types() -> String {
    GgmlType::ALL.map(GgmlType::name).join(", ")
}

fn hint(first: &Option<PathBuf>) -> String {
    first.as_ref().map_or_else(String::new, |path| format!(", `{}`", path.display()))
}

/// One tensor of a file.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: String,
    pub kind: GgmlType,
    /// Outermost first, as elsewhere in this crate; files list extents the other way round.
    pub shape: Vec<usize>,
    /// Where the data begin, from the start of the data of its part.
    pub offset: u64,
    /// Nothing where the file ends before them; see [`salvage`](super::read::GgufFile::salvage).
    pub bytes: Bytes,
}

impl Tensor {
    /// Values in a row.
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// How many values it has.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes that it takes by its header.
    pub fn stored_bytes(&self) -> u64 {
        let rows = if self.cols() == 0 { 0 } else { self.len() / self.cols() };
        self.kind.row_bytes(self.cols()).map_or(0, |row| row as u64 * rows as u64)
    }

    /// Whether the file holds its data.
    pub fn is_whole(&self) -> bool {
        self.bytes.len() as u64 == self.stored_bytes()
    }
}

/// One file, checked.
#[derive(Debug)]
pub struct Part {
    pub version: u32,
    pub metadata: Metadata,
    pub tensors: Vec<Tensor>,
    /// The first tensor whose data the file does not hold to the end; such tensors have no bytes.
    pub cut: Option<Problem>,
}

/// Reads one file from its bytes.
pub fn parse(file: Bytes) -> Result<Part, Problem> {
    let mut part = parse_headers(file)?;
    match part.cut.take() {
        None => Ok(part),
        Some(cut) => Err(cut),
    }
}

/// Reads one file from its bytes, which may end anywhere after the list of tensors.
pub fn parse_headers(file: Bytes) -> Result<Part, Problem> {
    let mut cursor = Cursor { bytes: &file, at: 0 };
    let magic = &file[..file.len().min(4)];
    if magic != MAGIC {
        return Err(Problem::Magic { found: magic.into() });
    }
    cursor.at = 4;
    let version = cursor.u32("the version")?;
    match version {
        2 | 3 => {}
        // The bytes of a small number the other way round.
        _ if version != 0 && version & 0xffff == 0 => return Err(Problem::BigEndian),
        _ => return Err(Problem::Version(version)),
    }
    let tensor_count = cursor.i64("the number of tensors")?;
    let pair_count = cursor.i64("the number of metadata keys")?;
    // A pair takes a length, a character, a type and a byte; a tensor a length, dimensions, a type and an offset.
    let pair_count = cursor.count("metadata keys", pair_count.into(), 8 + 1 + 4 + 1)?;
    let tensor_count = cursor.count("tensors", tensor_count.into(), 8 + 4 + 4 + 8)?;

    let mut pairs = Vec::with_capacity(pair_count);
    let mut keys = HashSet::new();
    for _ in 0..pair_count {
        let at = cursor.at as u64;
        let key = cursor.name("a metadata key")?;
        if key.is_empty() {
            return Err(Problem::EmptyKey(at));
        }
        if !keys.insert(key) {
            return Err(Problem::DuplicateKey(key.into()));
        }
        pairs.push((key.to_string(), cursor.value(key)?));
    }
    let metadata = Metadata::of_distinct(pairs);
    let alignment = alignment(&metadata)?;

    let mut tensors = Vec::with_capacity(tensor_count);
    let mut names = HashSet::new();
    for _ in 0..tensor_count {
        let tensor = cursor.tensor()?;
        if !names.insert(tensor.name) {
            return Err(Problem::DuplicateTensor(tensor.name.into()));
        }
        tensors.push(tensor);
    }
    let start = (cursor.at as u64).next_multiple_of(alignment);
    let (tensors, cut) = place(&file, start, alignment, tensors)?;
    Ok(Part { version, metadata, tensors, cut })
}

fn alignment(metadata: &Metadata) -> Result<u64, Problem> {
    match metadata.get(ALIGNMENT_KEY) {
        None => Ok(ALIGNMENT),
        Some(&Value::U32(alignment)) if alignment.is_power_of_two() => Ok(alignment.into()),
        Some(Value::U32(other)) => Err(Problem::Alignment(other.to_string())),
        Some(other) => Err(Problem::Alignment(format!("of type {}", other.kind()))),
    }
}

/// A tensor as listed, its data not yet looked for.
struct Listed<'a> {
    name: &'a str,
    kind: GgmlType,
    shape: Vec<usize>,
    bytes: u64,
    offset: u64,
}

/// Bytes of the longest file that is believed.
const LONGEST: u64 = 1 << 48;

/// Finds the data, which must follow each other without gap or overlap, as llama.cpp demands.
fn place(
    file: &Bytes,
    start: u64,
    alignment: u64,
    listed: Vec<Listed>,
) -> Result<(Vec<Tensor>, Option<Problem>), Problem> {
    let (mut wanted, mut first_cut) = (0u64, None);
    let mut tensors = Vec::with_capacity(listed.len());
    for Listed { name, kind, shape, bytes, offset } in listed {
        if offset != wanted {
            return Err(first_cut.unwrap_or(Problem::Offset { tensor: name.into(), found: offset, wanted }));
        }
        let cut = || Problem::Truncated {
            what: format!("tensor `{name}`"),
            at: start.saturating_add(offset),
            end: file.len() as u64,
        };
        // No file is that long: sums of sizes must not overflow.
        let end = start.checked_add(offset).and_then(|at| at.checked_add(bytes)).filter(|end| *end <= LONGEST);
        if end.is_none() {
            return Err(first_cut.unwrap_or_else(cut));
        }
        let data = match end.filter(|end| *end <= file.len() as u64) {
            Some(end) => slice(file, (end - bytes) as usize, end as usize),
            None => {
                first_cut.get_or_insert_with(cut);
                Vec::new().into()
            }
        };
        tensors.push(Tensor { name: name.into(), kind, shape, offset, bytes: data });
        // The padding after the last tensor may be missing.
        wanted = offset.saturating_add(bytes).checked_next_multiple_of(alignment).unwrap_or(u64::MAX);
    }
    Ok((tensors, first_cut))
}

fn slice(file: &Bytes, from: usize, to: usize) -> Bytes {
    match file {
        Bytes::Mapped(map, range) => Bytes::Mapped(map.clone(), range.start + from..range.start + to),
        Bytes::Owned(bytes) => Bytes::Owned(bytes[from..to].into()),
    }
}

/// A place in a file.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    fn take(&mut self, len: usize, what: impl FnOnce() -> String) -> Result<&'a [u8], Problem> {
        match self.bytes[self.at..].get(..len) {
            Some(taken) => {
                self.at += len;
                Ok(taken)
            }
            None => Err(Problem::Truncated { what: what(), at: self.at as u64, end: self.bytes.len() as u64 }),
        }
    }

    fn array<const N: usize>(&mut self, what: impl FnOnce() -> String) -> Result<[u8; N], Problem> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N, what)?);
        Ok(out)
    }

    fn u32(&mut self, what: &str) -> Result<u32, Problem> {
        Ok(u32::from_le_bytes(self.array(|| what.into())?))
    }

    fn u64(&mut self, what: &str) -> Result<u64, Problem> {
        Ok(u64::from_le_bytes(self.array(|| what.into())?))
    }

    fn i64(&mut self, what: &str) -> Result<i64, Problem> {
        Ok(i64::from_le_bytes(self.array(|| what.into())?))
    }

    /// A count of things that take `least` bytes each at least.
    fn count(&self, what: &str, count: i128, least: u64) -> Result<usize, Problem> {
        match usize::try_from(count) {
            Ok(fine) if fine as u64 <= self.left() / least => Ok(fine),
            _ => Err(Problem::Count { what: what.into(), count, left: self.left() }),
        }
    }

    fn text(&mut self, what: &str) -> Result<&'a [u8], Problem> {
        let len = self.u64(what)?;
        let at = self.at as u64;
        let cut = |end| Problem::Truncated { what: what.into(), at, end };
        let len = usize::try_from(len).map_err(|_| cut(self.bytes.len() as u64))?;
        self.take(len, || what.into())
    }

    fn name(&mut self, what: &'static str) -> Result<&'a str, Problem> {
        let at = self.at as u64;
        std::str::from_utf8(self.text(what)?).map_err(|_| Problem::NotUtf8 { what, at })
    }

    fn value(&mut self, key: &str) -> Result<Value, Problem> {
        let what = || format!("the value of `{key}`");
        let id = self.u32("the type of a metadata value")?;
        macro_rules! numbers {
            ($($id:literal $variant:ident $type:ty;)*) => {
                match id {
                    $($id => return Ok(Value::$variant(<$type>::from_le_bytes(self.array(what)?))),)*
                    _ => {}
                }
            };
        }
        numbers! { 0 U8 u8; 1 I8 i8; 2 U16 u16; 3 I16 i16; 4 U32 u32; 5 I32 i32; 6 F32 f32; 10 U64 u64; 11 I64 i64; 12 F64 f64; }
        match id {
            7 => Ok(Value::Bool(self.array::<1>(what)? != [0])),
            8 => Ok(Value::Text(self.text(&what())?.to_vec().into())),
            ARRAY => Ok(Value::Array(self.elements(key)?)),
            _ => Err(Problem::ValueType { key: key.into(), id }),
        }
    }

    fn elements(&mut self, key: &str) -> Result<Array, Problem> {
        let id = self.u32("the type of array elements")?;
        let count = self.u64("the length of an array")?;
        // A string takes at least its length.
        let size = match id {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            ARRAY => return Err(Problem::NestedArray(key.into())),
            _ => return Err(Problem::ValueType { key: key.into(), id }),
        };
        let what = || format!("elements of `{key}` ({})", TYPE_NAMES[id as usize]);
        let count = self.count(&what(), count.into(), size)?;
        if id == 8 {
            let what = what();
            let mut texts = Vec::with_capacity(count);
            for _ in 0..count {
                texts.push(Text::from(self.text(&what)?.to_vec()));
            }
            return Ok(Array::Text(texts));
        }
        let bytes = self.take(count * size as usize, what)?;
        Ok(match id {
            0 => Array::U8(bytes.to_vec()),
            1 => Array::I8(numbers(bytes, i8::from_le_bytes)),
            2 => Array::U16(numbers(bytes, u16::from_le_bytes)),
            3 => Array::I16(numbers(bytes, i16::from_le_bytes)),
            4 => Array::U32(numbers(bytes, u32::from_le_bytes)),
            5 => Array::I32(numbers(bytes, i32::from_le_bytes)),
            6 => Array::F32(numbers(bytes, f32::from_le_bytes)),
            7 => Array::Bool(bytes.iter().map(|b| *b != 0).collect()),
            10 => Array::U64(numbers(bytes, u64::from_le_bytes)),
            11 => Array::I64(numbers(bytes, i64::from_le_bytes)),
            _ => Array::F64(numbers(bytes, f64::from_le_bytes)),
        })
    }

    fn tensor(&mut self) -> Result<Listed<'a>, Problem> {
        let name = self.name("a tensor name")?;
        if name.len() > MAX_NAME {
            return Err(Problem::NameLength { name: name.into() });
        }
        let dims = self.u32("the dimensions of a tensor")?;
        if dims as usize > MAX_DIMS {
            return Err(Problem::Dimensions { tensor: name.into(), dims });
        }
        let extents: Vec<i64> = (0..dims).map(|_| self.i64("the extents of a tensor")).collect::<Result<_, _>>()?;
        let id = self.u32("the type of a tensor")?;
        let offset = self.u64("the offset of a tensor")?;
        let kind = GgmlType::from_id(id).ok_or_else(|| Problem::TensorType { tensor: name.into(), id })?;
        let wrong = || Problem::Extents { tensor: name.into(), extents: extents.clone() };
        let shape: Vec<usize> =
            extents.iter().rev().map(|&e| usize::try_from(e).ok()).collect::<Option<_>>().ok_or_else(wrong)?;
        let cols = shape.last().copied().unwrap_or(1);
        if !cols.is_multiple_of(kind.block()) {
            return Err(Problem::Blocks { tensor: name.into(), cols, kind });
        }
        // An extent of 0 must not hide that the others are too large.
        let product = shape.iter().try_fold(1usize, |product, &e| product.checked_mul(e.max(1)));
        product.filter(|product| *product <= i64::MAX as usize / 4).ok_or_else(wrong)?;
        let rows: usize = shape[..shape.len().saturating_sub(1)].iter().product();
        let bytes = kind.row_bytes(cols).and_then(|row| row.checked_mul(rows)).ok_or_else(wrong)?;
        Ok(Listed { name, kind, shape, bytes: bytes as u64, offset })
    }
}

fn numbers<const N: usize, T>(bytes: &[u8], read: fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().map(|chunk| read(*chunk)).collect()
}
