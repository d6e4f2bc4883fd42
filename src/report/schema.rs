//! The JSON Schema of a report, derived from its types.

use schemars::Schema;
use schemars::generate::SchemaSettings;
use schemars::transform::RecursiveTransform;
use serde_json::{Value, json};

use super::{Report, SCHEMA};

/// The schema (draft 2020-12). Further fields are allowed, as later minor versions may have some.
pub fn report() -> Value {
    let of_numbers = RecursiveTransform(numbers_may_be_null);
    let settings = SchemaSettings::draft2020_12().for_serialize().with_transform(of_numbers);
    let mut schema = settings.into_generator().into_root_schema_for::<Report>();
    schema.insert("$id".into(), json!(SCHEMA));
    if let Some(properties) = schema.get_mut("properties").and_then(Value::as_object_mut) {
        properties.insert("schema".into(), json!({"description": "The schema's name and version.", "const": SCHEMA}));
    }
    schema.to_value()
}

/// `null` stands for a number that is not finite, and for nothing else: what is not there is left out.
fn numbers_may_be_null(schema: &mut Schema) {
    let number = |kind: &Value| kind == "number";
    let kind = match schema.get("type") {
        Some(kind) if number(kind) => json!(["number", "null"]),
        Some(Value::Array(kinds)) if !kinds.iter().any(number) => {
            let rest: Vec<_> = kinds.iter().filter(|kind| *kind != "null").cloned().collect();
            if let [one] = &rest[..] { one.clone() } else { json!(rest) }
        }
        _ => json!(null),
    };
    if !kind.is_null() {
        schema.insert("type".into(), kind);
    }
    let alone = match schema.get("anyOf") {
        Some(Value::Array(all)) if all.len() == 2 && all[1] == json!({"type": "null"}) => all[0].get("$ref").cloned(),
        _ => None,
    };
    if let Some(reference) = alone {
        schema.remove("anyOf");
        schema.insert("$ref".into(), reference);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// `quantkit list --report-schema` writes it anew.
    #[test]
    fn the_published_schema_is_that_of_the_types() {
        let published: Value = serde_json::from_str(include_str!("../../reference/report/schema.json")).unwrap();
        assert_eq!(published, report(), "write reference/report/schema.json anew: quantkit list --report-schema");
    }

    #[test]
    fn null_stands_for_numbers_alone() {
        let schema = report();
        let number = json!(["number", "null"]);
        assert_eq!(schema["properties"]["seconds"]["type"], number);
        assert_eq!(schema["properties"]["device"]["type"], "string");
        assert_eq!(schema["properties"]["label"]["type"], "string");
        assert_eq!(schema["properties"]["cache"]["$ref"], "#/$defs/Cache");
        assert_eq!(schema["$defs"]["ModuleError"]["properties"]["weight_error"]["type"], number);
        assert_eq!(schema["$defs"]["KlFigures"]["properties"]["p99_9"]["type"], number);
        let required = schema["required"].as_array().unwrap();
        assert!(required.contains(&json!("artifact")) && !required.contains(&json!("cache")));
    }

    /// What of `value` the schema does not allow, as far as the words go that this schema uses.
    fn wrong(schema: &Value, root: &Value, value: &Value, at: &str) -> Vec<String> {
        if let Some(name) = schema["$ref"].as_str() {
            return wrong(root.pointer(&name[1..]).unwrap(), root, value, at);
        }
        if let Some(all) = schema["oneOf"].as_array() {
            let fits = all.iter().filter(|one| wrong(one, root, value, at).is_empty()).count();
            return if fits == 1 { vec![] } else { vec![format!("{at}: {fits} of oneOf")] };
        }
        let mut out = Vec::new();
        let is = |kind: &str| match kind {
            "object" => value.is_object(),
            "array" => value.is_array(),
            "string" => value.is_string(),
            "integer" => value.is_u64() || value.is_i64(),
            "number" => value.is_number(),
            "boolean" => value.is_boolean(),
            "null" => value.is_null(),
            _ => false,
        };
        let fits = match &schema["type"] {
            Value::String(kind) => is(kind),
            Value::Array(kinds) => kinds.iter().any(|kind| is(kind.as_str().unwrap())),
            _ => true,
        };
        let listed = schema["enum"].as_array().is_none_or(|all| all.contains(value));
        if !fits || !listed || schema.get("const").is_some_and(|only| only != value) {
            out.push(format!("{at}: {value}"));
        }
        for name in schema["required"].as_array().into_iter().flatten() {
            if value.get(name.as_str().unwrap()).is_none() {
                out.push(format!("{at} lacks {name}"));
            }
        }
        for (name, inner) in value.as_object().into_iter().flatten() {
            match schema["properties"].get(name) {
                Some(schema) => out.extend(wrong(schema, root, inner, &format!("{at}.{name}"))),
                None if schema["properties"].is_object() => out.push(format!("{at}.{name} is not in the schema")),
                None => {}
            }
        }
        for (i, inner) in value.as_array().into_iter().flatten().enumerate() {
            out.extend(wrong(&schema["items"], root, inner, &format!("{at}[{i}]")));
        }
        out
    }

    #[test]
    fn reports_keep_to_the_schema() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/report/report.json");
        let mut sample = Report::read(&path).unwrap();
        sample.seconds = f64::NAN;
        let value: Value = serde_json::from_slice(&sample.to_json().unwrap()).unwrap();
        let schema = report();
        assert_eq!(wrong(&schema, &schema, &value, ""), [""; 0]);
        for (place, bad) in [
            ("/schema", json!("quantkit-report/2")),
            ("/device", json!(null)),
            ("/divergence/0/figures/kl/mean", json!("low")),
            ("/checks/0/status", json!("great")),
            ("/perplexity/1/corpus", json!({})),
        ] {
            let mut value = value.clone();
            *value.pointer_mut(place).unwrap() = bad;
            assert!(!wrong(&schema, &schema, &value, "").is_empty(), "{place}");
        }
    }
}
