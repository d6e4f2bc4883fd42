//! What a GPTQ quantization config says, as AutoGPTQ, AutoRound, GPTQModel and quantkit write it.

use regex::Regex;
use serde_json::Value;

use crate::format::FormatError;
use crate::format::config::{Found, Unfit};
use crate::pack::gptq::Version;
use crate::scheme::{GroupSize, Scheme};

/// The readable part of a quantization config.
#[derive(Debug)]
pub struct Settings {
    pub scheme: Scheme,
    /// What `checkpoint_format` says.
    pub version: Version,
    rules: Vec<Rule>,
    /// Patterns of `dynamic` that cannot be evaluated here; where they may apply, shapes decide.
    pub unreadable: Vec<String>,
}

#[derive(Debug)]
struct Rule {
    pattern: Regex,
    /// `None` leaves the module in floating point.
    scheme: Option<Scheme>,
}

impl Settings {
    pub fn parse(found: &Found) -> Result<Self, FormatError> {
        parse(&found.value).map_err(|why| why.of(found))
    }

    /// The scheme of `module`; `None` if a rule leaves it in floating point.
    pub fn scheme_of(&self, module: &str) -> Option<Scheme> {
        match self.rules.iter().find(|rule| rule.pattern.is_match(module)) {
            Some(rule) => rule.scheme,
            None => Some(self.scheme),
        }
    }
}

fn parse(value: &Value) -> Result<Settings, Unfit> {
    let base = Scheme { bits: 0, group_size: GroupSize::CHANNEL, sym: true };
    for key in ["bits", "group_size"] {
        if value.get(key).is_none_or(Value::is_null) {
            return Err(format!("`{key}` is missing").into());
        }
    }
    let scheme = overridden(base, value)?;
    let label = ["checkpoint_format", "format"].into_iter().find_map(|key| value.get(key)?.as_str());
    let version = match label {
        None => Version::V1,
        Some(name) => Version::parse(name)
            .ok_or_else(|| Unfit::Unread(format!("tensors are laid out as `{name}`; `gptq` and `gptq_v2` are read")))?,
    };
    if value.get("is_marlin_format").and_then(Value::as_bool) == Some(true) {
        return Err(Unfit::Unread("tensors are laid out for Marlin kernels; `gptq` and `gptq_v2` are read".into()));
    }
    match value.get("pack_dtype").and_then(Value::as_str) {
        None | Some("int32") => {}
        Some(other) => return Err(Unfit::Unread(format!("integers are packed into `{other}`; only int32 is read"))),
    }
    let (mut rules, mut unreadable) = (vec![], vec![]);
    let dynamic = value.get("dynamic").and_then(Value::as_object);
    for (key, overrides) in dynamic.into_iter().flatten() {
        let (skip, pattern) = match key.strip_prefix("-:") {
            Some(pattern) => (true, pattern),
            None => (false, key.strip_prefix("+:").unwrap_or(key)),
        };
        // Python's `re.match` starts at the start and ends anywhere.
        match Regex::new(&format!("^(?:{pattern})")) {
            Ok(pattern) => {
                let scheme = if skip { None } else { Some(overridden(scheme, overrides)?) };
                rules.push(Rule { pattern, scheme });
            }
            Err(_) => unreadable.push(pattern.to_string()),
        }
    }
    Ok(Settings { scheme, version, rules, unreadable })
}

/// `base` with the `bits`, `group_size` and `sym` that `value` has.
fn overridden(base: Scheme, value: &Value) -> Result<Scheme, Unfit> {
    let present = |key: &str| value.get(key).filter(|v| !v.is_null());
    let mut scheme = base;
    if let Some(bits) = present("bits") {
        scheme.bits = match bits.as_u64() {
            Some(b @ (2 | 3 | 4 | 8)) => b as u8,
            Some(5..=7) => return Err(Unfit::Unread(format!("`bits` is {bits}; 2, 3, 4 and 8 are read"))),
            _ => return Err(format!("`bits` is {bits}; 2, 3, 4 and 8 are read").into()),
        };
    }
    if let Some(size) = present("group_size") {
        let read = size.as_i64().and_then(|s| i32::try_from(s).ok()).and_then(GroupSize::new);
        scheme.group_size = read.ok_or_else(|| format!("`group_size` is {size}; it must be positive or -1"))?;
    }
    if let Some(sym) = present("sym") {
        scheme.sym = sym.as_bool().ok_or_else(|| format!("`sym` is {sym}; it must be true or false"))?;
    }
    Ok(scheme)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn first_fitting_rule_counts() {
        let settings = parse(&json!({
            "bits": 4, "group_size": 128, "sym": true, "format": "gptq_v2",
            "dynamic": {
                "-:.*k_proj": {}, r"+:model\.layers\.1\.": {"bits": 8, "group_size": -1}, ".*": {"sym": false},
                r".*(?<!k)_proj": {"bits": 2},
            }
        }))
        .unwrap();
        assert_eq!(settings.version, Version::V2);
        assert_eq!(settings.scheme_of("model.layers.1.self_attn.k_proj"), None);
        let one = settings.scheme_of("model.layers.1.mlp.up_proj").unwrap();
        assert_eq!((one.bits, one.group_size, one.sym), (8, GroupSize::CHANNEL, true));
        let rest = settings.scheme_of("model.layers.11.mlp.up_proj").unwrap();
        assert_eq!((rest.bits, rest.group_size.raw(), rest.sym), (4, 128, false));
        assert_eq!(settings.unreadable, [".*(?<!k)_proj"]);
    }

    #[test]
    fn what_is_not_read_is_named() {
        for (value, word) in [
            (json!({"group_size": 128}), "`bits` is missing"),
            (json!({"bits": 5, "group_size": 128}), "`bits` is 5"),
            (json!({"bits": 4, "group_size": 0}), "`group_size` is 0"),
            (json!({"bits": 4, "group_size": 128, "sym": "yes"}), "`sym`"),
            (json!({"bits": 4, "group_size": 128, "format": "gptq_p"}), "`gptq_p`"),
            (json!({"bits": 4, "group_size": 128, "pack_dtype": "int64"}), "`int64`"),
            (json!({"bits": 4, "group_size": 128, "is_marlin_format": true}), "Marlin"),
        ] {
            let error = parse(&value).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }
}
