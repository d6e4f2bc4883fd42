//! Reading a report back.

use std::io;
use std::path::{Path, PathBuf};

use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{Deserializer, IntoDeserializer, Visitor};
use serde_json::Value;
use thiserror::Error;

use super::{Report, SCHEMA};
use crate::format::output::OutputError;

/// Bytes of the largest report that is read. A model of 200 layers and 128 heads has some megabytes.
const MOST_BYTES: u64 = 256 << 20;

/// Why a report cannot be read or written.
#[derive(Debug, Error)]
pub enum ReportError {
    #[error("cannot read the report `{path}`")]
    Read { path: PathBuf, source: io::Error },
    #[error("`{path}` is no report: {why}")]
    Invalid { path: PathBuf, why: String },
    #[error(
        "`{path}` is a report of schema `{found}`, and this quantkit reads `{SCHEMA}`; compare it with the quantkit \
         that wrote it ({tool}), or make it anew"
    )]
    OtherSchema { path: PathBuf, found: String, tool: String },
    #[error("cannot write the report as JSON")]
    Json(#[source] serde_json::Error),
    #[error("cannot write the report as {form}: {why}")]
    Form { form: &'static str, why: String },
    #[error(transparent)]
    Write(#[from] OutputError),
}

pub(super) fn file(path: &Path) -> Result<Report, ReportError> {
    let read = |source| ReportError::Read { path: path.into(), source };
    let length = std::fs::metadata(path).map_err(read)?.len();
    if length > MOST_BYTES {
        let why = format!("it has {length} bytes, more than any report");
        return Err(ReportError::Invalid { path: path.into(), why });
    }
    text(&std::fs::read(path).map_err(read)?, path)
}

pub(super) fn text(text: &[u8], path: &Path) -> Result<Report, ReportError> {
    let invalid = |why: String| ReportError::Invalid { path: path.into(), why };
    let value: Value = serde_json::from_slice(text).map_err(|e| match e.is_eof() {
        true => invalid(format!("it ends too early, as a file does that was cut off ({e})")),
        false => invalid(format!("it is not JSON: {e}")),
    })?;
    let word = |key: &str| value.get(key).and_then(Value::as_str).map(str::to_owned);
    let schema = word("schema").ok_or_else(|| invalid("it has no `schema`".into()))?;
    if schema != SCHEMA {
        if !schema.starts_with("quantkit-report/") {
            return Err(invalid(format!("its schema is `{schema}`")));
        }
        let tool = word("tool").unwrap_or_else(|| "not named".into());
        return Err(ReportError::OtherSchema { path: path.into(), found: schema, tool });
    }
    let report: Report = serde_path_to_error::deserialize(Nullable(value)).map_err(|e| {
        let place = e.path().to_string();
        invalid(format!("at `{place}`: {}", e.into_inner()))
    })?;
    consistent(&report).map_err(invalid)?;
    Ok(report)
}

/// What types cannot say.
fn consistent(report: &Report) -> Result<(), String> {
    for (i, on) in report.divergence.iter().enumerate() {
        if let Some(bins) = &on.histogram
            && (bins.edges.len() != bins.counts.len() + 1 || !bins.edges.is_sorted_by(|a, b| a < b))
        {
            return Err(format!("at `divergence[{i}].histogram`: edges must rise, and be one more than counts"));
        }
    }
    for (i, kind) in report.cache.iter().flat_map(|cache| &cache.types).enumerate() {
        let Some(errors) = &kind.errors else { continue };
        let width = errors.keys.first().map_or(0, Vec::len);
        let even = |grid: &[Vec<f64>]| grid.len() == errors.keys.len() && grid.iter().all(|row| row.len() == width);
        if ![&errors.keys, &errors.values, &errors.output].into_iter().all(|grid| even(grid)) {
            return Err(format!("at `cache.types[{i}].errors`: every layer must have one error a head"));
        }
    }
    Ok(())
}

/// JSON in which `null` stands for a number that is not finite: it is read as NaN where a number is asked for.
struct Nullable(Value);

impl<'de> Deserializer<'de> for Nullable {
    type Error = serde_json::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        match self.0 {
            Value::Object(map) => {
                visitor.visit_map(MapDeserializer::new(map.into_iter().map(|(key, value)| (key, Nullable(value)))))
            }
            Value::Array(all) => visitor.visit_seq(SeqDeserializer::new(all.into_iter().map(Nullable))),
            plain => plain.deserialize_any(visitor),
        }
    }

    fn deserialize_f64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        match &self.0 {
            Value::Null => visitor.visit_f64(f64::NAN),
            // Where serde_json keeps numbers as text, it hands them on as a map unless asked.
            Value::Number(number) => visitor.visit_f64(number.as_f64().unwrap_or(f64::NAN)),
            _ => self.deserialize_any(visitor),
        }
    }

    /// `None` is always left out in writing.
    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        self.0.deserialize_enum(name, variants, visitor)
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct map struct identifier ignored_any
    }
}

impl IntoDeserializer<'_, serde_json::Error> for Nullable {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::integrity::{Check, Status};

    fn sample() -> Vec<u8> {
        std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/report/report.json")).unwrap()
    }

    fn parse(text: impl AsRef<[u8]>) -> Result<Report, String> {
        Report::parse(text.as_ref(), Path::new("some/report.json")).map_err(|e| e.to_string())
    }

    fn changed(change: fn(&mut Value)) -> Result<Report, String> {
        let mut value: Value = serde_json::from_slice(&sample()).unwrap();
        change(&mut value);
        parse(value.to_string())
    }

    /// Numbers by value: `1e-7` may also be written `1e-07`.
    fn plain(value: Value) -> Value {
        match value {
            Value::Number(n) if n.as_u64().is_none() => json!(n.as_f64()),
            Value::Array(all) => all.into_iter().map(plain).collect(),
            Value::Object(all) => Value::Object(all.into_iter().map(|(key, value)| (key, plain(value))).collect()),
            other => other,
        }
    }

    #[test]
    fn reports_come_back_as_they_went() {
        let report = parse(sample()).unwrap();
        let text = report.to_json().unwrap();
        assert_eq!(parse(&text).unwrap(), report);
        assert_eq!(parse(&text).unwrap().to_json().unwrap(), text);
        let value: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(plain(value), plain(serde_json::from_slice(&sample()).unwrap()), "nothing is lost");
        let bare = Report::new(report.artifact, "cpu");
        assert_eq!(parse(bare.to_json().unwrap()), Ok(bare));
    }

    #[test]
    fn null_is_a_number_that_is_not_finite() {
        let mut report = parse(sample()).unwrap();
        report.seconds = f64::INFINITY;
        report.modules[3].weight_error = Some(f64::NAN);
        report.modules[4].weight_error = None;
        let again = parse(report.to_json().unwrap()).unwrap();
        assert!(again.seconds.is_nan());
        assert!(again.modules[3].weight_error.is_some_and(f64::is_nan), "measured and broken");
        assert_eq!(again.modules[4].weight_error, None);
        assert!(changed(|v| v["device"] = json!(null)).unwrap_err().contains("at `device`"));
        assert!(changed(|v| v["accounting"]["quantized"]["tensors"] = json!(null)).is_err());
    }

    #[test]
    fn later_fields_are_passed_over() {
        let report = changed(|v| {
            v["weather"] = json!({"rain": [1, null]});
            v["divergence"][0]["figures"]["kl"]["p99_99"] = json!(1.5);
        });
        assert_eq!(report, parse(sample()));
    }

    #[test]
    fn what_is_wrong_is_told() {
        let text = sample();
        let cases = [
            (parse(&text[..text.len() / 2]), "ends too early"),
            (parse(""), "ends too early"),
            (parse("[1, 2"), "ends too early"),
            (parse("report"), "not JSON"),
            (parse(b"\xff\xfe"), "not JSON"),
            (parse("[]"), "no `schema`"),
            (parse("{\"schema\": 1}"), "no `schema`"),
            (parse("{\"schema\": \"bench/1\"}"), "its schema is `bench/1`"),
            (changed(|v| v["schema"] = json!("quantkit-report/2")), "reads `quantkit-report/1`"),
            (changed(|v| v["artifact"] = json!([])), "at `artifact`"),
            (
                changed(|v| v["divergence"][1]["figures"]["kl"]["mean"] = json!("low")),
                "at `divergence[1].figures.kl.mean`",
            ),
            (changed(|v| v["checks"][0]["status"] = json!("great")), "great"),
            (changed(|v| v["perplexity"][0]["corpus"]["window"] = json!(-1)), "at `perplexity[0].corpus.window`"),
            (changed(|v| drop(v["divergence"][0]["histogram"]["counts"].as_array_mut().unwrap().pop())), "histogram"),
            (changed(|v| v["divergence"][0]["histogram"]["edges"][3] = json!(null)), "edges must rise"),
            (
                changed(|v| drop(v["cache"]["types"][2]["errors"]["values"][5].as_array_mut().unwrap().pop())),
                "types[2]",
            ),
        ];
        for (got, word) in cases {
            let error = got.unwrap_err();
            assert!(error.contains(word) && error.contains("some/report.json"), "{word}: {error}");
        }
        assert!(parse("[".repeat(100_000)).is_err());
        assert!(file(Path::new("no/report.json")).unwrap_err().to_string().contains("no/report.json"));
    }

    #[test]
    fn the_worst_check_is_the_status() {
        let mut report = Report::new(Default::default(), "cpu");
        assert_eq!(report.status(), None);
        for status in [Status::Pass, Status::Warn, Status::Skipped] {
            report.checks.push(Check { id: "x".into(), status, message: String::new() });
        }
        assert_eq!(report.status(), Some(Status::Warn));
    }
}
