//! Typed metadata: the thirteen value types of GGUF, kept exactly as a file has them, so that reading and
//! writing a file changes nothing.

use std::fmt;

use thiserror::Error;

/// A string of a file: UTF-8 by the book, but vocabularies hold pieces of characters, so any bytes are kept.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Text(Vec<u8>);

impl Text {
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The text; `None` if it is not UTF-8.
    pub fn as_str(&self) -> Option<&str> {
        std::str::from_utf8(&self.0).ok()
    }
}

impl From<&str> for Text {
    fn from(text: &str) -> Self {
        Text(text.as_bytes().into())
    }
}

impl From<String> for Text {
    fn from(text: String) -> Self {
        Text(text.into_bytes())
    }
}

impl From<Vec<u8>> for Text {
    fn from(bytes: Vec<u8>) -> Self {
        Text(bytes)
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&String::from_utf8_lossy(&self.0), f)
    }
}

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Text(Text),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// An array; its elements are of one type. Arrays of arrays are in no file that llama.cpp loads.
#[derive(Clone, Debug, PartialEq)]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    Text(Vec<Text>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

/// The number of `array` among value types.
pub const ARRAY: u32 = 9;

/// Names of the value types; the place is the number.
pub const TYPE_NAMES: [&str; 13] =
    ["u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64"];

impl Value {
    /// The number of the type in files.
    pub fn type_id(&self) -> u32 {
        match self {
            Value::U8(_) => 0,
            Value::I8(_) => 1,
            Value::U16(_) => 2,
            Value::I16(_) => 3,
            Value::U32(_) => 4,
            Value::I32(_) => 5,
            Value::F32(_) => 6,
            Value::Bool(_) => 7,
            Value::Text(_) => 8,
            Value::Array(_) => ARRAY,
            Value::U64(_) => 10,
            Value::I64(_) => 11,
            Value::F64(_) => 12,
        }
    }

    /// The type in words, such as `u32` or `array of string`.
    pub fn kind(&self) -> String {
        match self {
            Value::Array(array) => format!("array of {}", TYPE_NAMES[array.type_id() as usize]),
            other => TYPE_NAMES[other.type_id() as usize].into(),
        }
    }
}

impl Array {
    /// The number of the elements' type in files.
    pub fn type_id(&self) -> u32 {
        match self {
            Array::U8(_) => 0,
            Array::I8(_) => 1,
            Array::U16(_) => 2,
            Array::I16(_) => 3,
            Array::U32(_) => 4,
            Array::I32(_) => 5,
            Array::F32(_) => 6,
            Array::Bool(_) => 7,
            Array::Text(_) => 8,
            Array::U64(_) => 10,
            Array::I64(_) => 11,
            Array::F64(_) => 12,
        }
    }

    pub fn len(&self) -> usize {
        match self {
            Array::U8(v) => v.len(),
            Array::I8(v) => v.len(),
            Array::U16(v) => v.len(),
            Array::I16(v) => v.len(),
            Array::U32(v) => v.len(),
            Array::I32(v) => v.len(),
            Array::F32(v) => v.len(),
            Array::Bool(v) => v.len(),
            Array::Text(v) => v.len(),
            Array::U64(v) => v.len(),
            Array::I64(v) => v.len(),
            Array::F64(v) => v.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

macro_rules! values_from {
    ($($variant:ident $type:ty;)*) => {$(
        impl From<$type> for Value {
            fn from(value: $type) -> Self {
                Value::$variant(value)
            }
        }

        impl From<Vec<$type>> for Value {
            fn from(values: Vec<$type>) -> Self {
                Value::Array(Array::$variant(values))
            }
        }
    )*};
}

values_from! { U8 u8; I8 i8; U16 u16; I16 i16; U32 u32; I32 i32; F32 f32; Bool bool; Text Text; U64 u64; I64 i64; F64 f64; }

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Value::Text(text.into())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Value::Text(text.into())
    }
}

impl From<Vec<String>> for Value {
    fn from(texts: Vec<String>) -> Self {
        Value::Array(Array::Text(texts.into_iter().map(Text::from).collect()))
    }
}

/// What a typed getter returns. Integers convert when they fit, since writers disagree about width and sign;
/// a number never becomes a flag or a text.
pub trait FromValue<'a>: Sized {
    /// What is asked for, in words.
    const WANTED: &'static str;

    fn from_value(value: &'a Value) -> Option<Self>;
}

/// Any integer.
fn integer(value: &Value) -> Option<i128> {
    Some(match *value {
        Value::U8(v) => v.into(),
        Value::I8(v) => v.into(),
        Value::U16(v) => v.into(),
        Value::I16(v) => v.into(),
        Value::U32(v) => v.into(),
        Value::I32(v) => v.into(),
        Value::U64(v) => v.into(),
        Value::I64(v) => v.into(),
        _ => return None,
    })
}

/// Any array of integers.
fn integers(value: &Value) -> Option<Vec<i128>> {
    let Value::Array(array) = value else { return None };
    Some(match array {
        Array::U8(v) => v.iter().map(|&v| v.into()).collect(),
        Array::I8(v) => v.iter().map(|&v| v.into()).collect(),
        Array::U16(v) => v.iter().map(|&v| v.into()).collect(),
        Array::I16(v) => v.iter().map(|&v| v.into()).collect(),
        Array::U32(v) => v.iter().map(|&v| v.into()).collect(),
        Array::I32(v) => v.iter().map(|&v| v.into()).collect(),
        Array::U64(v) => v.iter().map(|&v| v.into()).collect(),
        Array::I64(v) => v.iter().map(|&v| v.into()).collect(),
        _ => return None,
    })
}

macro_rules! integers_of {
    ($($type:ty, $one:literal, $many:literal;)*) => {$(
        impl FromValue<'_> for $type {
            const WANTED: &'static str = $one;

            fn from_value(value: &Value) -> Option<Self> {
                integer(value)?.try_into().ok()
            }
        }

        impl FromValue<'_> for Vec<$type> {
            const WANTED: &'static str = $many;

            fn from_value(value: &Value) -> Option<Self> {
                integers(value)?.into_iter().map(|v| v.try_into().ok()).collect()
            }
        }
    )*};
}

integers_of! {
    u32, "an integer from 0 to 2^32 - 1", "an array of integers from 0 to 2^32 - 1";
    i32, "an integer of 32 bits", "an array of integers of 32 bits";
    u64, "an integer of at least 0", "an array of integers of at least 0";
    usize, "an integer of at least 0", "an array of integers of at least 0";
    i64, "an integer", "an array of integers";
}

impl FromValue<'_> for f64 {
    const WANTED: &'static str = "a floating-point number";

    fn from_value(value: &Value) -> Option<Self> {
        match *value {
            Value::F32(v) => Some(v.into()),
            Value::F64(v) => Some(v),
            _ => None,
        }
    }
}

impl FromValue<'_> for f32 {
    const WANTED: &'static str = f64::WANTED;

    fn from_value(value: &Value) -> Option<Self> {
        f64::from_value(value).map(|v| v as f32)
    }
}

impl FromValue<'_> for bool {
    const WANTED: &'static str = "a bool";

    fn from_value(value: &Value) -> Option<Self> {
        if let Value::Bool(v) = *value { Some(v) } else { None }
    }
}

impl<'a> FromValue<'a> for &'a str {
    const WANTED: &'static str = "a string in UTF-8";

    fn from_value(value: &'a Value) -> Option<Self> {
        if let Value::Text(text) = value { text.as_str() } else { None }
    }
}

impl<'a> FromValue<'a> for Vec<&'a str> {
    const WANTED: &'static str = "an array of strings in UTF-8";

    fn from_value(value: &'a Value) -> Option<Self> {
        <&[Text]>::from_value(value)?.iter().map(Text::as_str).collect()
    }
}

impl<'a> FromValue<'a> for &'a [Text] {
    const WANTED: &'static str = "an array of strings";

    fn from_value(value: &'a Value) -> Option<Self> {
        if let Value::Array(Array::Text(texts)) = value { Some(texts) } else { None }
    }
}

impl<'a> FromValue<'a> for &'a [f32] {
    const WANTED: &'static str = "an array of f32";

    fn from_value(value: &'a Value) -> Option<Self> {
        if let Value::Array(Array::F32(values)) = value { Some(values) } else { None }
    }
}

impl<'a> FromValue<'a> for &'a [bool] {
    const WANTED: &'static str = "an array of bool";

    fn from_value(value: &'a Value) -> Option<Self> {
        if let Value::Array(Array::Bool(values)) = value { Some(values) } else { None }
    }
}

/// A key that is not as it must be.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum MetadataError {
    #[error("the metadata key `{0}` is missing")]
    Missing(String),
    #[error("the metadata key `{key}` is {found}; {wanted} is needed")]
    Kind { key: String, found: String, wanted: &'static str },
}

/// Keys and values in the order of the file; no key stands twice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata {
    pairs: Vec<(String, Value)>,
}

impl Metadata {
    pub fn new() -> Self {
        Self::default()
    }

    /// Pairs whose keys are known to differ.
    pub(super) fn of_distinct(pairs: Vec<(String, Value)>) -> Self {
        Self { pairs }
    }

    pub fn len(&self) -> usize {
        self.pairs.len()
    }

    pub fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }

    /// In the order of the file.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.pairs.iter().map(|(key, value)| (&**key, value))
    }

    pub fn get(&self, key: &str) -> Option<&Value> {
        self.pairs.iter().find(|(k, _)| k == key).map(|(_, value)| value)
    }

    /// Sets a key. One that was there leaves its place and comes to the end, as in llama.cpp.
    pub fn set(&mut self, key: impl Into<String>, value: impl Into<Value>) {
        let key = key.into();
        self.remove(&key);
        self.pairs.push((key, value.into()));
    }

    /// Takes a key out.
    pub fn remove(&mut self, key: &str) -> Option<Value> {
        let at = self.pairs.iter().position(|(k, _)| k == key)?;
        Some(self.pairs.remove(at).1)
    }

    /// Keeps the keys that `keep` wants.
    pub fn retain(&mut self, mut keep: impl FnMut(&str) -> bool) {
        self.pairs.retain(|(key, _)| keep(key));
    }

    /// A key that may be absent, but not of the wrong type.
    pub fn read<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Option<T>, MetadataError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match T::from_value(value) {
            Some(read) => Ok(Some(read)),
            None => Err(MetadataError::Kind { key: key.into(), found: shown(value), wanted: T::WANTED }),
        }
    }

    /// A key that must be there.
    pub fn need<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<T, MetadataError> {
        self.read(key)?.ok_or_else(|| MetadataError::Missing(key.into()))
    }
}

/// Type, and the value where that explains the refusal.
fn shown(value: &Value) -> String {
    match value {
        Value::Text(text) if text.as_str().is_none() => "a string that is not UTF-8".into(),
        Value::Array(Array::Text(texts)) => match texts.iter().position(|text| text.as_str().is_none()) {
            Some(at) => format!("an array of strings of which element {at} is not UTF-8"),
            None => "an array of string".into(),
        },
        Value::Array(_) => format!("an {}", value.kind()),
        other => match integer(other) {
            Some(number) => format!("the {} {number}", other.kind()),
            None => format!("of type {}", other.kind()),
        },
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn metadata() -> Metadata {
        let mut metadata = Metadata::new();
        metadata.set("count", 7u32);
        metadata.set("negative", -1i32);
        metadata.set("name", "llama");
        metadata.set("raw", Text::from(vec![0xff]));
        metadata.set("tokens", vec![Text::from("a"), Text::from(vec![0xc3])]);
        metadata.set("layers", vec![1i32, 2]);
        metadata.set("eps", 1e-5f32);
        metadata
    }

    #[test]
    fn getters_convert_what_fits() {
        let m = metadata();
        assert_eq!(m.need::<u64>("count"), Ok(7));
        assert_eq!(m.need::<i32>("count"), Ok(7));
        assert_eq!(m.need::<Vec<usize>>("layers"), Ok(vec![1, 2]));
        assert_eq!(m.need::<f32>("eps"), Ok(1e-5));
        assert_eq!(m.need::<&str>("name"), Ok("llama"));
        assert_eq!(m.need::<&[Text]>("tokens").unwrap()[1].bytes(), [0xc3]);
        assert_eq!(m.read::<u32>("absent"), Ok(None));
    }

    #[test]
    fn refusals_name_key_and_types() {
        let m = metadata();
        let told = |e: MetadataError| e.to_string();
        assert_eq!(told(m.need::<u32>("absent").unwrap_err()), "the metadata key `absent` is missing");
        assert_eq!(
            told(m.need::<u32>("negative").unwrap_err()),
            "the metadata key `negative` is the i32 -1; an integer from 0 to 2^32 - 1 is needed"
        );
        assert!(told(m.need::<&str>("raw").unwrap_err()).contains("a string that is not UTF-8"));
        assert!(told(m.need::<Vec<&str>>("tokens").unwrap_err()).contains("element 1 is not UTF-8"));
        assert!(told(m.need::<bool>("count").unwrap_err()).contains("the u32 7; a bool is needed"));
        assert!(told(m.need::<u32>("eps").unwrap_err()).contains("of type f32"));
        assert!(told(m.need::<&[f32]>("layers").unwrap_err()).contains("an array of i32; an array of f32"));
    }

    #[test]
    fn a_key_set_again_comes_last() {
        let mut m = metadata();
        m.set("count", 8u16);
        assert_eq!(m.iter().last(), Some(("count", &Value::U16(8))));
        assert_eq!(m.len(), 7);
        assert_eq!(m.remove("count"), Some(Value::U16(8)));
        assert!(m.get("count").is_none());
    }
}
