//! What a GPTQ quantization config says, as AutoGPTQ, AutoRound, GPTQModel and quantkit write it.

use regex::Regex;
use serde_json::Value;

use crate::checkpoint::{JsonKeys, whole};
use crate::format::FormatError;
use crate::format::config::{Found, Unfit, group_size};
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
    let keys = JsonKeys::of("", value);
    for key in ["bits", "group_size"] {
        if keys.get(key).is_none() {
            return Err(keys.missing(key).into());
        }
    }
    let scheme = overridden(base, &keys)?;
    // GPTQModel writes both.
    let label = match (keys.text("checkpoint_format")?, keys.text("format")?) {
        (Some(one), Some(other)) if one != other => {
            return Err(keys.contradiction("checkpoint_format", &keys, "format").into());
        }
        (one, other) => one.or(other),
    };
    let version = match label {
        None => Version::V1,
        Some(name) => Version::parse(name)
            .ok_or_else(|| Unfit::Unread(format!("tensors are laid out as `{name}`; `gptq` and `gptq_v2` are read")))?,
    };
    if keys.flag("is_marlin_format", false)? {
        return Err(Unfit::Unread("tensors are laid out for Marlin kernels; `gptq` and `gptq_v2` are read".into()));
    }
    match keys.text("pack_dtype")? {
        None | Some("int32") => {}
        Some(other) => return Err(Unfit::Unread(format!("integers are packed into `{other}`; only int32 is read"))),
    }
    let (mut rules, mut unreadable) = (vec![], vec![]);
    let dynamic = keys.object("dynamic")?;
    for (dynamic, key) in dynamic.iter().flat_map(|rules| rules.all_names().map(move |key| (rules, key))) {
        let (skip, pattern) = match key.strip_prefix("-:") {
            Some(pattern) => (true, pattern),
            None => (false, key.strip_prefix("+:").unwrap_or(key)),
        };
        let overrides = dynamic.object(key)?;
        // Python's `re.match` starts at the start and ends anywhere.
        match Regex::new(&format!("^(?:{pattern})")) {
            Ok(pattern) => {
                let scheme = match overrides {
                    _ if skip => None,
                    Some(overrides) => Some(overridden(scheme, &overrides)?),
                    None => Some(scheme),
                };
                rules.push(Rule { pattern, scheme });
            }
            Err(_) => unreadable.push(pattern.to_string()),
        }
    }
    Ok(Settings { scheme, version, rules, unreadable })
}

/// `base` with the `bits`, `group_size` and `sym` that `keys` have.
fn overridden(base: Scheme, keys: &JsonKeys) -> Result<Scheme, Unfit> {
    let mut scheme = base;
    // GPTQModel packs these in planes.
    if let Some(bits @ 5..=7) = keys.get("bits").and_then(whole) {
        return Err(Unfit::Unread(format!("`bits` is {bits}; 2, 3, 4 and 8 are read")));
    }
    let bits = |value: &Value| whole(value).filter(|bits| [2, 3, 4, 8].contains(bits)).map(|bits| bits as u8);
    if let Some(bits) = keys.read("bits", "2, 3, 4 and 8 are read", bits)? {
        scheme.bits = bits;
    }
    if let Some(size) = keys.read("group_size", "it must be positive or -1", group_size)? {
        scheme.group_size = size;
    }
    if let Some(sym) = keys.read("sym", "it must be true or false", Value::as_bool)? {
        scheme.sym = sym;
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
