//! What a compressed-tensors config says.

use regex::Regex;
use serde_json::Value;

use crate::checkpoint::{JsonKeys, KeyError, whole};
use crate::format::config::Unfit;
use crate::format::kind::InputsKind;

/// The readable part of a config.
#[derive(Debug)]
pub struct Settings {
    groups: Vec<Group>,
    ignore: Vec<Target>,
    /// Patterns that cannot be evaluated here.
    pub unreadable: Vec<String>,
    /// Groups that consumers read differently, and how they are read here.
    pub ambiguous: Vec<String>,
}

/// Modules with one scheme.
#[derive(Debug)]
pub struct Group {
    targets: Vec<Target>,
    pub weights: Arguments,
    pub inputs: InputsKind,
}

#[derive(Debug)]
enum Target {
    /// A path, or the name of a class.
    Name(String),
    Pattern(Regex),
}

/// How numbers become smaller ones.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arguments {
    pub bits: u8,
    pub float: bool,
    pub symmetric: bool,
    pub strategy: Strategy,
    dynamic: bool,
}

/// What shares a scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Strategy {
    Tensor,
    Channel,
    Token,
    Group(usize),
    Block(usize, usize),
}

/// The class of all modules read here, as configs name it.
const CLASS: &str = "Linear";

/// How tensors are stored in the forms that are read.
const FORMATS: [&str; 5] = ["pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision"];

/// Other forms, with what they are called elsewhere.
const OTHERS: [(&str, &str); 7] = [
    ("nvfp4-pack-quantized", "NVFP4: floats of 4 bits, a scale in E4M3 for 16 of them"),
    ("mxfp4-pack-quantized", "MXFP4: floats of 4 bits, a power of two for 32 of them"),
    ("mxfp8-quantized", "MXFP8: floats of 8 bits, a power of two for 32 of them"),
    ("marlin-24", "2:4 sparse integers for Marlin kernels"),
    ("sparse-24-bitmask", "2:4 sparse, with a mask of bits"),
    ("sparse-bitmask", "sparse, with a mask of bits"),
    ("nvfp4-e5m3-pack-quantized", "NVFP4 with scales in E5M3"),
];

impl Settings {
    pub fn parse(value: &Value) -> Result<Self, Unfit> {
        let keys = JsonKeys::of("", value);
        let filled = |key: &str| Ok::<_, KeyError>(keys.object(key)?.filter(|object| !object.is_empty()));
        if let Some(sparsity) = filled("sparsity_config")?
            && sparsity.text("format")? != Some("dense")
        {
            let format = sparsity.text("format")?.unwrap_or("no named form");
            return Err(Unfit::Unread(format!("its weights are stored sparse (`{format}`)")));
        }
        if let Some(transform) = filled("transform_config")?
            && transform.object("config_groups")?.is_none_or(|groups| !groups.is_empty())
        {
            return Err(Unfit::Unread("its inputs are to be rotated (`transform_config`)".into()));
        }
        let whole = known_format(&keys)?;
        let groups = keys.object("config_groups")?.ok_or_else(|| keys.missing("config_groups"))?;
        let (mut unreadable, mut ambiguous) = (Vec::new(), Vec::new());
        let mut parsed = Vec::new();
        for name in groups.all_names() {
            let is_object = groups.get(name).is_some_and(Value::is_object);
            let group = groups.object(name).ok().flatten().filter(|_| is_object);
            let group =
                group.ok_or_else(|| Unfit::Unread(format!("`{name}` is not an object; presets are not read")))?;
            let within = |why: Unfit| why.within(name);
            known_format(&group).map_err(within)?;
            // A group without weights is about the cache of keys and values.
            let Some(weights) = arguments(&group, "weights").map_err(within)? else { continue };
            let inputs = match arguments(&group, "input_activations").map_err(within)? {
                None => InputsKind::Float,
                // Packed integers in a file that says nothing of inputs are met with inputs as they are.
                Some(inputs) => {
                    scale_type(&group).map_err(within)?;
                    if inputs.dynamic && inputs.strategy == Strategy::Tensor {
                        ambiguous.push(format!(
                            "`{name}` has dynamic inputs of strategy `tensor`; each token gets a scale of its own, as in \
                             vLLM, where compressed-tensors' own modules find one scale for all tokens of a pass"
                        ));
                    }
                    inputs.inputs(&weights).map_err(within)?
                }
            };
            if group.get("output_activations").is_some() {
                return Err(within(Unfit::Unread("outputs are rounded too (`output_activations`)".into())));
            }
            let list = group.texts("targets")?.ok_or_else(|| group.missing("targets"))?;
            parsed.push(Group { targets: targets(list, &mut unreadable), weights, inputs });
        }
        if parsed.is_empty() {
            return Err(format!("no group of `config_groups` has weights (format {whole})").into());
        }
        let ignore = targets(keys.texts("ignore")?.unwrap_or_default(), &mut unreadable);
        Ok(Self { groups: parsed, ignore, unreadable, ambiguous })
    }

    /// The group of a quantized module: by its path, then by patterns, then by its class.
    pub fn group_of(&self, module: &str) -> Result<&Group, String> {
        let ranked = self.groups.iter().filter_map(|group| Some((rank(&group.targets, module)?, group)));
        // The first of the best.
        match ranked.min_by_key(|(rank, _)| *rank) {
            Some((_, group)) => Ok(group),
            // It may be what an unreadable pattern means.
            None if self.groups.len() == 1 && !self.unreadable.is_empty() => Ok(&self.groups[0]),
            None => Err("its weight is quantized, but no group of the config names it".into()),
        }
    }

    /// Whether the config leaves a module out.
    pub fn ignores(&self, module: &str) -> bool {
        rank(&self.ignore, module).is_some()
    }

    /// Paths that groups name.
    pub fn named(&self) -> impl Iterator<Item = &str> {
        self.groups.iter().flat_map(|group| &group.targets).filter_map(|target| match target {
            Target::Name(name) => Some(name.as_str()),
            Target::Pattern(_) => None,
        })
    }
}

/// How well targets fit a module: 0 by its path, 1 by a pattern, 2 by its class.
fn rank(targets: &[Target], module: &str) -> Option<u8> {
    let of = |target: &Target| match target {
        Target::Name(name) if name == module => Some(0),
        Target::Name(name) if name == CLASS => Some(2),
        Target::Pattern(pattern) if pattern.is_match(module) => Some(1),
        _ => None,
    };
    targets.iter().filter_map(of).min()
}

fn targets(list: Vec<&str>, unreadable: &mut Vec<String>) -> Vec<Target> {
    let mut out = Vec::new();
    for text in list {
        let Some(pattern) = text.strip_prefix("re:") else {
            out.push(Target::Name(text.into()));
            continue;
        };
        // Python's `re.match` starts at the start and ends anywhere.
        match Regex::new(&format!("^(?:{pattern})")) {
            Ok(pattern) => out.push(Target::Pattern(pattern)),
            Err(_) => unreadable.push(pattern.into()),
        }
    }
    out
}

fn known_format(keys: &JsonKeys) -> Result<&'static str, Unfit> {
    let Some(format) = keys.text("format")? else { return Ok("not given") };
    FORMATS.into_iter().find(|known| *known == format).ok_or_else(|| {
        let known = OTHERS.into_iter().find(|(other, _)| *other == format);
        let called = known.map_or(String::new(), |(_, name)| format!(" ({name})"));
        Unfit::Unread(format!("tensors are stored as `{format}`{called}; {} are read", FORMATS.join(", ")))
    })
}

/// The arguments under a key of a group.
fn arguments(group: &JsonKeys, key: &str) -> Result<Option<Arguments>, Unfit> {
    if let Some(preset) = group.get(key).filter(|value| !value.is_object()) {
        return Err(Unfit::Unread(format!("{preset} is not an object; presets are not read")));
    }
    group.object(key)?.map(|keys| Arguments::parse(&keys)).transpose()
}

/// Refuses scales of inputs that compressed-tensors rounds to another type than f32 before it uses them.
fn scale_type(group: &JsonKeys) -> Result<(), Unfit> {
    let Some(inputs) = group.object("input_activations")? else { return Ok(()) };
    match inputs.text("scale_dtype")? {
        None | Some("torch.float32") => Ok(()),
        Some(given) => Err(Unfit::Unread(format!("the scales of inputs are rounded to {given} (`scale_dtype`)"))),
    }
}

impl Arguments {
    fn parse(keys: &JsonKeys) -> Result<Self, Unfit> {
        let unread = |what: String| Err(Unfit::Unread(what));
        if let Some(bits @ 9..) = keys.get("num_bits").and_then(whole) {
            return unread(format!("`num_bits` is {bits}; 2 to 8 are read"));
        }
        let bits = keys.read("num_bits", "2 to 8 are read", |v| whole(v).filter(|b| (2..=8).contains(b)))?;
        let bits = bits.map_or(8, |bits| bits as u8);
        let float = match keys.text("type")?.map(str::to_lowercase).as_deref() {
            None | Some("int") => false,
            Some("float") => true,
            Some(other) => return unread(format!("`type` is `{other}`; int and float are read")),
        };
        if float && bits != 8 {
            return unread(format!("numbers are floats of {bits} bits"));
        }
        let scales = keys.text("scale_dtype")?.map(|name| name.trim_start_matches("torch."));
        if let Some(power @ ("uint8" | "float8_e8m0fnu")) = scales {
            return unread(format!("scales are powers of two (`scale_dtype` is {power}), as in MX formats"));
        }
        if keys.get("dynamic").and_then(Value::as_str) == Some("local") {
            return unread("scales are found for each group as the model runs (`dynamic` is local)".into());
        }
        let positive = |v: &Value| whole(v).filter(|s| *s > 0 || *s == -1);
        let size = keys.read("group_size", "it must be positive or -1", positive)?;
        let strategy = match (keys.text("strategy")?, size) {
            (None, None) => Strategy::Tensor,
            (None, Some(-1)) => Strategy::Channel,
            (None | Some("group"), Some(size)) if size > 0 => Strategy::Group(size as usize),
            (Some("tensor"), _) => Strategy::Tensor,
            (Some("channel"), _) => Strategy::Channel,
            (Some("token"), _) => Strategy::Token,
            (Some("block"), _) => match keys.sides("block_structure")? {
                Some((height, width)) => Strategy::Block(height, width),
                None => return Err(keys.missing("block_structure").into()),
            },
            (Some("group"), _) => return Err("strategy `group` needs a `group_size`".into()),
            (other, _) => return unread(format!("the strategy is `{}`", other.unwrap_or_default())),
        };
        let (symmetric, dynamic) = (keys.flag("symmetric", true)?, keys.flag("dynamic", false)?);
        Ok(Self { bits, float, symmetric, strategy, dynamic })
    }

    /// What these arguments, given for inputs, make of them beside such weights.
    fn inputs(self, weights: &Arguments) -> Result<InputsKind, Unfit> {
        if self.float != weights.float {
            return Err(Unfit::Unread("inputs and weights are rounded to different kinds of numbers".into()));
        }
        if self.bits != 8 {
            return Err(Unfit::Unread(format!("inputs are rounded to {} bits", self.bits)));
        }
        match (self.strategy, self.dynamic, self.symmetric) {
            (Strategy::Token, true, true) => Ok(InputsKind::Token),
            // vLLM takes a scale for each token all the same; a warning names the difference.
            (Strategy::Tensor, true, true) if self.float => Ok(InputsKind::Token),
            (Strategy::Token, true, false) if !self.float => Ok(InputsKind::TokenAsymmetric),
            (Strategy::Tensor, false, true) => Ok(InputsKind::Tensor),
            (Strategy::Tensor, false, false) if !self.float => Ok(InputsKind::TensorAsymmetric),
            (Strategy::Group(size), true, true) if self.float => Ok(InputsKind::Group(size)),
            (strategy, dynamic, _) => {
                let when = if dynamic { "dynamic" } else { "static" };
                Err(Unfit::Unread(format!("inputs are rounded with {when} scales by {strategy:?}")))
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    fn one(weights: Value, inputs: Value) -> Value {
        let group = json!({"targets": ["Linear"], "weights": weights, "input_activations": inputs});
        json!({"config_groups": {"group_0": group}, "ignore": ["lm_head"], "format": "int-quantized"})
    }

    #[test]
    fn names_come_before_patterns_and_those_before_classes() {
        let weights = |bits: u8| json!({"num_bits": bits, "group_size": 64});
        let settings = Settings::parse(&json!({
            "config_groups": {
                "a": {"targets": ["Linear"], "weights": weights(2)},
                "b": {"targets": ["re:.*\\.down_proj"], "weights": weights(3)},
                "c": {"targets": ["LlamaAttention"], "weights": null, "input_activations": weights(8)},
                "d": {"targets": ["re:.*(?<!k)_proj", "x.mlp.down_proj"], "weights": weights(5)},
            },
            "ignore": ["re:.*head$", "x.router"],
        }))
        .unwrap();
        let bits = |name: &str| settings.group_of(name).unwrap().weights.bits;
        assert_eq!([bits("x.mlp.down_proj"), bits("y.mlp.down_proj"), bits("y.mlp.up_proj")], [5, 3, 2]);
        assert_eq!(settings.unreadable, [".*(?<!k)_proj"]);
        assert!(settings.ignores("lm_head") && settings.ignores("x.router"));
        assert!(!settings.ignores("x.router.up_proj") && !settings.ignores("lm_head.x"));
    }

    #[test]
    fn what_a_group_without_a_fitting_target_means() {
        let mut value = one(json!({"num_bits": 4, "strategy": "channel"}), Value::Null);
        value["config_groups"]["group_0"]["targets"] = json!(["re:model.*"]);
        assert!(Settings::parse(&value).unwrap().group_of("lm_head").unwrap_err().contains("no group"));
        value["config_groups"]["group_0"]["targets"] = json!(["re:(?!model).*"]);
        assert!(Settings::parse(&value).unwrap().group_of("lm_head").is_ok());
    }

    #[test]
    fn inputs() {
        let int = json!({"num_bits": 8, "strategy": "channel"});
        let float = json!({"num_bits": 8, "type": "float", "strategy": "channel"});
        let kind =
            |weights: &Value, inputs: Value| Settings::parse(&one(weights.clone(), inputs)).map(|s| s.groups[0].inputs);
        assert_eq!(kind(&int, Value::Null), Ok(InputsKind::Float));
        assert_eq!(kind(&int, json!({"strategy": "token", "dynamic": true})), Ok(InputsKind::Token));
        let asymmetric = json!({"strategy": "token", "dynamic": true, "symmetric": false});
        assert_eq!(kind(&int, asymmetric), Ok(InputsKind::TokenAsymmetric));
        assert_eq!(kind(&int, json!({"symmetric": false})), Ok(InputsKind::TensorAsymmetric));
        let group = json!({"type": "float", "group_size": 128, "dynamic": true});
        assert_eq!(kind(&float, group), Ok(InputsKind::Group(128)));
        let error = kind(&int, json!({"type": "float"})).unwrap_err().to_string();
        assert!(error.starts_with("in `group_0`: inputs and weights"), "{error}");
        let error = kind(&int, json!({"strategy": "channel"})).unwrap_err().to_string();
        assert!(error.contains("static scales by Channel"), "{error}");
        assert!(kind(&int, json!({"num_bits": 4, "strategy": "token", "dynamic": true})).is_err());
    }

    /// Consumers differ in one form; a warning names both readings. compressed-tensors rounds in two more places.
    #[test]
    fn readings_that_differ_are_named() {
        let float = json!({"num_bits": 8, "type": "float", "strategy": "tensor"});
        let parse = |inputs: Value| Settings::parse(&one(float.clone(), inputs));
        let settings = parse(json!({"type": "float", "strategy": "tensor", "dynamic": true})).unwrap();
        assert_eq!(settings.groups[0].inputs, InputsKind::Token);
        assert!(settings.ambiguous[0].contains("one scale for all tokens of a pass"), "{:?}", settings.ambiguous);
        for plain in [json!({"type": "float"}), json!({"type": "float", "strategy": "token", "dynamic": true})] {
            assert!(parse(plain).unwrap().ambiguous.is_empty());
        }
        let rounded = |dtype: &str| parse(json!({"type": "float", "scale_dtype": dtype}));
        assert!(rounded("torch.float32").is_ok());
        let error = rounded("torch.float8_e4m3fn").unwrap_err().to_string();
        assert!(error.starts_with("in `group_0`: the scales of inputs are rounded to"), "{error}");
        let mut value = one(float, json!({"type": "float"}));
        value["config_groups"]["group_0"]["output_activations"] = json!({"type": "float"});
        let error = Settings::parse(&value).unwrap_err().to_string();
        assert!(error.contains("`output_activations`"), "{error}");
    }

    #[test]
    fn what_is_not_read_is_named() {
        for (weights, part) in [
            (json!({"num_bits": 16}), "`num_bits` is 16"),
            (json!({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}), "floats of 4"),
            (json!({"strategy": "tensor_group"}), "`tensor_group`"),
            (json!({"strategy": "group"}), "needs a `group_size`"),
            (json!({"strategy": "block", "block_structure": [128]}), "block_structure` is [128]"),
            (json!({"group_size": 0}), "group_size` is 0"),
            (json!({"symmetric": 1}), "symmetric` is 1"),
            (json!({"type": "log"}), "`log`"),
            (json!({"dynamic": "local"}), "`dynamic` is local"),
            (json!({"dynamic": "often"}), "dynamic` is"),
            (json!({"type": "float", "group_size": 32, "scale_dtype": "torch.uint8"}), "powers of two"),
        ] {
            let error = Settings::parse(&one(weights, Value::Null)).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        let fine = one(json!({"num_bits": 4, "strategy": "channel"}), Value::Null);
        for (key, value, part) in [
            ("format", json!("nvfp4-pack-quantized"), "`nvfp4-pack-quantized`"),
            ("sparsity_config", json!({"format": "sparse-24-bitmask"}), "sparse"),
            ("transform_config", json!({"config_groups": {"R1": {}}}), "rotated"),
            ("config_groups", json!({}), "no group"),
            ("config_groups", json!({"W4A16": ["Linear"]}), "presets"),
            ("config_groups", Value::Null, "`config_groups` is missing"),
            ("ignore", json!([1]), "`ignore` is [1]"),
        ] {
            let mut wrong = fine.clone();
            wrong[key] = value;
            let error = Settings::parse(&wrong).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        let mut empty = fine;
        empty["sparsity_config"] = json!({});
        empty["transform_config"] = json!({});
        assert!(Settings::parse(&empty).is_ok());
    }
}
