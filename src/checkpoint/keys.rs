//! Strict reading of the JSON files of a model folder: a key is absent, of the type that is asked for, or refused by
//! name. A value of another type never becomes a default.
//!
//! `null` counts as absent: transformers writes it for what is not set. Where a whole number is asked for, a number such
//! as `777.0` counts as one, because Python programs write both; where any number is asked for, whole ones count.

use serde_json::{Map, Value};
use thiserror::Error;

/// Characters of a value that messages show.
const SHOWN: usize = 120;

/// Why a key of a file cannot be read. In a box: it is part of most other errors, and long.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct KeyError(Box<KeyFault>);

#[derive(Clone, Debug, PartialEq, Eq, Error)]
enum KeyFault {
    #[error("{}`{key}` is {found}; {wanted}", place(file))]
    Value { file: String, key: String, found: String, wanted: String },
    #[error("{}`{key}` is missing", place(file))]
    Missing { file: String, key: String },
    #[error(
        "{}`{key}` is {found}, but `{other}` is {there}: programs differ in which one they read; remove the wrong one",
        place(file)
    )]
    Contradiction { file: String, key: String, found: String, other: String, there: String },
}

impl From<KeyFault> for KeyError {
    fn from(fault: KeyFault) -> Self {
        Self(Box::new(fault))
    }
}

impl KeyError {
    /// A value `found` under `key` of `file` that is not what is `wanted`.
    pub fn value(file: String, key: String, found: String, wanted: String) -> Self {
        KeyFault::Value { file, key, found, wanted }.into()
    }
}

fn place(file: &str) -> String {
    if file.is_empty() { String::new() } else { format!("{file}: ") }
}

impl From<KeyError> for String {
    fn from(error: KeyError) -> Self {
        error.to_string()
    }
}

/// The keys of one JSON object.
#[derive(Clone, Debug)]
pub struct JsonKeys<'a> {
    /// What messages call the file; may be empty.
    file: String,
    /// Where the object is in the file: `rope_parameters.`, or nothing for the whole file.
    path: String,
    object: Option<&'a Map<String, Value>>,
}

impl<'a> JsonKeys<'a> {
    /// The keys of a whole file, which messages call `file`. A value that is not an object has no keys; files are checked
    /// when they are read.
    pub fn of(file: &str, value: &'a Value) -> Self {
        Self { file: file.into(), path: String::new(), object: value.as_object() }
    }

    pub fn is_empty(&self) -> bool {
        self.object.is_none_or(Map::is_empty)
    }

    /// The names of the keys that have a value, in the order of the file.
    pub fn names(&self) -> impl Iterator<Item = &'a str> {
        self.object.into_iter().flatten().filter(|(_, value)| !value.is_null()).map(|(name, _)| &**name)
    }

    /// The names of all keys, those without a value included.
    pub fn all_names(&self) -> impl Iterator<Item = &'a str> {
        self.object.into_iter().flatten().map(|(name, _)| &**name)
    }

    /// Whether a key is present with the value `null`.
    pub fn is_null(&self, key: &str) -> bool {
        self.object.and_then(|object| object.get(key)).is_some_and(Value::is_null)
    }

    /// A value of any type.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.object?.get(key).filter(|value| !value.is_null())
    }

    /// The complaint about a key that is there.
    pub fn bad(&self, key: &str, wanted: impl Into<String>) -> KeyError {
        let found = self.get(key).map_or_else(|| "missing".into(), shown);
        KeyError::value(self.file.clone(), format!("{}{key}", self.path), found, wanted.into())
    }

    pub fn missing(&self, key: &str) -> KeyError {
        KeyFault::Missing { file: self.file.clone(), key: format!("{}{key}", self.path) }.into()
    }

    /// The complaint about two keys that say different things.
    pub fn contradiction(&self, key: &str, other: &JsonKeys, other_key: &str) -> KeyError {
        let found = |keys: &JsonKeys, key: &str| keys.get(key).map_or_else(|| "missing".into(), shown);
        KeyFault::Contradiction {
            file: self.file.clone(),
            key: format!("{}{key}", self.path),
            found: found(self, key),
            other: format!("{}{other_key}", other.path),
            there: found(other, other_key),
        }
        .into()
    }

    /// A value as `convert` takes it.
    pub fn read<T>(
        &self,
        key: &str,
        wanted: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, KeyError> {
        self.get(key).map(|value| convert(value).ok_or_else(|| self.bad(key, wanted))).transpose()
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>, KeyError> {
        self.read(key, "a text is needed", Value::as_str)
    }

    pub fn given_flag(&self, key: &str) -> Result<Option<bool>, KeyError> {
        self.read(key, "true or false is needed", Value::as_bool)
    }

    pub fn flag(&self, key: &str, default: bool) -> Result<bool, KeyError> {
        Ok(self.given_flag(key)?.unwrap_or(default))
    }

    /// A whole number of any sign.
    pub fn whole(&self, key: &str) -> Result<Option<i64>, KeyError> {
        self.read(key, "a whole number is needed", whole)
    }

    /// A size: from 1 to 2^24 - 1.
    pub fn count(&self, key: &str) -> Result<Option<usize>, KeyError> {
        self.read(key, "a positive whole number is needed", |value| {
            whole(value).filter(|n| (1..1 << 24).contains(n)).map(|n| n as usize)
        })
    }

    pub fn need(&self, key: &str) -> Result<usize, KeyError> {
        self.count(key)?.ok_or_else(|| self.missing(key))
    }

    /// A finite number.
    pub fn number(&self, key: &str) -> Result<Option<f64>, KeyError> {
        self.read(key, "a number is needed", Value::as_f64)
    }

    pub fn positive(&self, key: &str) -> Result<Option<f64>, KeyError> {
        self.read(key, "a positive number is needed", |value| value.as_f64().filter(|n| *n > 0.0))
    }

    pub fn object(&self, key: &str) -> Result<Option<JsonKeys<'a>>, KeyError> {
        let inner = self.read(key, "an object is needed", Value::as_object)?;
        Ok(inner.map(|object| JsonKeys {
            file: self.file.clone(),
            path: format!("{}{key}.", self.path),
            object: Some(object),
        }))
    }

    pub fn list(&self, key: &str) -> Result<Option<&'a [Value]>, KeyError> {
        self.read(key, "a list is needed", |value| value.as_array().map(Vec::as_slice))
    }

    pub fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>, KeyError> {
        self.read(key, "a list of texts is needed", |value| value.as_array()?.iter().map(Value::as_str).collect())
    }

    /// Two positive whole numbers.
    pub fn sides(&self, key: &str) -> Result<Option<(usize, usize)>, KeyError> {
        self.read(key, "two positive whole numbers are needed", |value| match &value.as_array()?[..] {
            [a, b] => {
                let side = |value| whole(value).filter(|n| (1..1 << 24).contains(n)).map(|n| n as usize);
                Some((side(a)?, side(b)?))
            }
            _ => None,
        })
    }

    /// Ids of tokens: one, or a list of them.
    pub fn ids(&self, key: &str) -> Result<Vec<i64>, KeyError> {
        let wanted = "an id or a list of ids is needed";
        let found = self.read(key, wanted, |value| match value {
            Value::Array(list) => list.iter().map(whole).collect(),
            one => whole(one).map(|id| vec![id]),
        })?;
        Ok(found.unwrap_or_default())
    }

    /// A token as tokenizer_config.json has it: its text, or an object with the text as `content`.
    pub fn token(&self, key: &str) -> Result<Option<&'a str>, KeyError> {
        let wanted = "a text, or an object with `content`, is needed";
        self.read(key, wanted, |value| value.as_str().or_else(|| value.get("content")?.as_str()))
    }
}

/// A whole number, written with or without a fraction of zero.
pub fn whole(value: &Value) -> Option<i64> {
    // Doubles are exact up to 2^53.
    let integral = |n: &f64| n.fract() == 0.0 && n.abs() < (1u64 << 53) as f64;
    value.as_i64().or_else(|| value.as_f64().filter(integral).map(|n| n as i64))
}

/// A value in messages: long ones are cut.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_in_both_spellings() {
        let file = json!({"a": 777.0, "b": 777, "c": 777.5, "d": "777", "e": null, "f": 1e300, "g": -1});
        let keys = JsonKeys::of("config.json", &file);
        assert_eq!((keys.count("a"), keys.count("b")), (Ok(Some(777)), Ok(Some(777))));
        assert_eq!((keys.count("e"), keys.count("z"), keys.whole("g")), (Ok(None), Ok(None), Ok(Some(-1))));
        assert_eq!(keys.number("b"), Ok(Some(777.0)));
        for (key, found) in [("c", "777.5"), ("d", "\"777\""), ("f", "1e+300"), ("g", "-1")] {
            let error = keys.count(key).unwrap_err().to_string();
            assert_eq!(error, format!("config.json: `{key}` is {found}; a positive whole number is needed"));
        }
    }

    #[test]
    fn keys_are_named_by_their_path() {
        let file = json!({"rope": {"theta": [1.0], "kind": {"deep": 1}}, "list": [1, "x"]});
        let keys = JsonKeys::of("", &file);
        let rope = keys.object("rope").unwrap().unwrap();
        assert_eq!(
            rope.positive("theta").unwrap_err().to_string(),
            "`rope.theta` is [1.0]; a positive number is needed"
        );
        let deep = rope.object("kind").unwrap().unwrap();
        assert!(deep.text("deep").unwrap_err().to_string().starts_with("`rope.kind.deep` is 1"));
        assert!(keys.texts("list").unwrap_err().to_string().contains("a list of texts is needed"));
        assert_eq!(rope.missing("x").to_string(), "`rope.x` is missing");
    }

    #[test]
    fn ids_and_tokens() {
        let file =
            json!({"one": 2, "many": [2, 3.0], "none": -1, "wrong": ["2"], "a": "x", "b": {"content": "y"}, "c": {}});
        let keys = JsonKeys::of("f", &file);
        assert_eq!((keys.ids("one"), keys.ids("many"), keys.ids("none")), (Ok(vec![2]), Ok(vec![2, 3]), Ok(vec![-1])));
        assert!(keys.ids("wrong").is_err() && keys.token("c").is_err());
        assert_eq!((keys.token("a"), keys.token("b")), (Ok(Some("x")), Ok(Some("y"))));
    }
}
