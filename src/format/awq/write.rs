//! Tensors and configuration keys as AutoAWQ writes them.

use serde_json::{Map, Value, json};

use crate::format::gptq::{Rule, rule_json};
use crate::format::kind::{Kind, Module};
use crate::format::layout::{Description, Layout, Solution, Stored, whole_groups};
use crate::format::safetensors::TensorSpec;
use crate::pack::awq::{self, FIELDS};
use crate::scheme::Scheme;
use crate::tensor::{Dtype, words_to_bytes};

/// AutoAWQ's layout. Zero points are always there, so symmetric weights have the same one everywhere: readers take
/// nothing else.
#[derive(Clone, Copy, Debug)]
pub struct AwqLayout;

impl Layout for AwqLayout {
    fn method(&self) -> &'static str {
        "awq"
    }

    fn side_file(&self) -> Option<&'static str> {
        Some("quant_config.json")
    }

    fn check(&self, rows: usize, cols: usize, scheme: Scheme) -> Result<(), String> {
        awq::check_shape(rows, cols, scheme.bits).map_err(|e| e.to_string())?;
        whole_groups(cols, scheme)
    }

    fn accepts(&self, modules: &[Module]) -> Result<(), String> {
        let quantized: Vec<&Module> = modules.iter().filter(|m| m.scheme.is_some()).collect();
        // Zero points say whether a module is symmetric; only the group size stands in the config.
        let group = |module: &Module| module.scheme.map(|s| s.group_size);
        if let Some(pair) = quantized.windows(2).find(|pair| group(pair[0]) != group(pair[1])) {
            let [Some(one), Some(other)] = [group(pair[0]), group(pair[1])] else { return Ok(()) };
            return Err(format!(
                "an AWQ artifact has one group size, but `{}` has {one} and `{}` has {other}; leave such modules in \
                 floating point, or write gptq or compressed-tensors",
                pair[0].name, pair[1].name
            ));
        }
        for left in modules.iter().filter(|m| m.scheme.is_none()) {
            if let Some(hit) = quantized.iter().find(|m| m.name.contains(&left.name)) {
                return Err(format!(
                    "an AWQ artifact names modules in floating point by parts of their names, and `{}` is part of \
                     `{}`, which is quantized; treat both alike, or write gptq or compressed-tensors",
                    left.name, hit.name
                ));
            }
        }
        Ok(())
    }

    fn least_zero(&self) -> u8 {
        0
    }

    fn specs(&self, module: &Module, scheme: Scheme) -> Vec<TensorSpec> {
        specs(&module.name, module.rows, module.cols, scheme)
    }

    fn store(&self, module: &str, solution: &Solution) -> Result<Stored, String> {
        let packed = awq::pack(solution.weights_only("awq")?).map_err(|e| e.to_string())?;
        let data = [
            words_to_bytes(&packed.qweight),
            words_to_bytes(&packed.qzeros),
            bytemuck::cast_slice(&packed.scales).to_vec(),
        ];
        let specs = specs(module, packed.rows, packed.cols, packed.scheme);
        let tensors = specs.into_iter().zip(data.map(Into::into)).collect();
        Ok(Stored { tensors, weight: packed.to_weight() })
    }

    fn kind(&self, _: bool) -> Kind {
        Kind::Awq
    }

    fn config(&self, how: &Description) -> Value {
        let scheme = how.modules.iter().find_map(|m| m.scheme).unwrap_or(how.base);
        let skipped = skipped(how);
        let mut out = json!({
            "quant_method": "awq",
            "bits": awq::BITS,
            "group_size": scheme.group_size.raw(),
            "zero_point": true,
            // Readers differ in which of the two they look for.
            "version": "gemm",
            "format": "gemm",
            "modules_to_not_convert": if skipped.is_empty() { Value::Null } else { json!(skipped) },
        });
        // GPTQModel knows modules in floating point only from rules like those of GPTQ.
        let left: Vec<&String> = how.modules.iter().filter(|m| m.scheme.is_none()).map(|m| &m.name).collect();
        if !left.is_empty() {
            out["dynamic"] = Rule::for_modules(&left, None).iter().map(rule_json).collect::<Map<_, _>>().into();
        }
        out
    }
}

fn specs(module: &str, rows: usize, cols: usize, scheme: Scheme) -> Vec<TensorSpec> {
    let groups = scheme.group_size.count(cols);
    vec![
        TensorSpec::new(format!("{module}.qweight"), Dtype::I32, [cols, rows / FIELDS]),
        TensorSpec::new(format!("{module}.qzeros"), Dtype::I32, [groups, rows / FIELDS]),
        TensorSpec::new(format!("{module}.scales"), Dtype::F16, [groups, rows]),
    ]
}

/// Linears that engines join, by the last part of their names.
const FUSED: [(&[&str], &str); 2] =
    [(&["q_proj", "k_proj", "v_proj"], "qkv_proj"), (&["gate_proj", "up_proj"], "gate_up_proj")];

/// What stays in floating point, for readers that look for parts of names: full paths, since a short part may well be
/// one of another name. Nothing if that is only the output head, which every reader leaves alone.
fn skipped(how: &Description) -> Vec<String> {
    let is_left = |name: &str| how.modules.iter().any(|m| m.scheme.is_none() && m.name == name);
    let mut names: Vec<String> = Vec::new();
    for module in how.modules.iter().filter(|m| m.scheme.is_none()) {
        names.push(module.name.clone());
        // Some readers look for the joined linear under its own name alone.
        for (parts, joined) in FUSED {
            let Some(parent) = module.name.strip_suffix(parts[0]) else { continue };
            if parts.iter().all(|part| is_left(&format!("{parent}{part}"))) {
                names.push(format!("{parent}{joined}"));
            }
        }
    }
    if names.is_empty() && how.outside.iter().all(|name| name == "lm_head") {
        return names;
    }
    names.extend(how.outside.iter().cloned());
    names
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::scheme::GroupSize;

    fn scheme(group: i32, sym: bool) -> Scheme {
        Scheme { bits: 4, group_size: GroupSize::new(group).unwrap(), sym }
    }

    fn module(name: &str, scheme: Option<Scheme>) -> Module {
        Module { name: format!("model.layers.0.{name}"), rows: 64, cols: 64, scheme }
    }

    fn config(modules: &[Module], outside: &[String]) -> Value {
        let base = scheme(128, true);
        let kv_cache = None;
        AwqLayout.config(&Description { method: "awq", base, modules, outside, gptq: None, grid: "mse", kv_cache })
    }

    #[test]
    fn config_keys() {
        let head = ["lm_head".to_string()];
        let whole = [module("mlp.up_proj", Some(scheme(32, false)))];
        assert_eq!(
            config(&whole, &head),
            json!({
                "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": true, "version": "gemm",
                "format": "gemm", "modules_to_not_convert": null,
            })
        );
        let mut some = vec![module("mlp.down_proj", Some(scheme(32, false)))];
        some.extend(["mlp.gate_proj", "mlp.up_proj", "self_attn.q_proj"].map(|name| module(name, None)));
        let rules: Vec<String> = config(&some, &head)["dynamic"].as_object().unwrap().keys().cloned().collect();
        assert_eq!(
            rules,
            [r"-:(.*\.)?layers\.0\.mlp\.(gate|up|gate_up)_proj$", r"-:(.*\.)?layers\.0\.self_attn\.q_proj$",]
        );
        assert_eq!(
            config(&some, &head)["modules_to_not_convert"],
            json!([
                "model.layers.0.mlp.gate_proj",
                "model.layers.0.mlp.gate_up_proj",
                "model.layers.0.mlp.up_proj",
                "model.layers.0.self_attn.q_proj",
                "lm_head",
            ])
        );
    }

    #[test]
    fn what_one_config_cannot_say() {
        let both = |a: Module, b: Module| AwqLayout.accepts(&[a, b]);
        let up = |s| module("mlp.up_proj", s);
        assert_eq!(both(up(Some(scheme(32, true))), module("mlp.down_proj", Some(scheme(32, false)))), Ok(()));
        let mixed = both(up(Some(scheme(32, true))), module("mlp.down_proj", Some(scheme(64, true)))).unwrap_err();
        assert!(mixed.contains("`model.layers.0.mlp.up_proj` has 32") && mixed.contains("has 64"), "{mixed}");
        let part = both(module("mlp.gate", None), module("mlp.gate_proj", Some(scheme(32, true)))).unwrap_err();
        assert!(part.contains("`model.layers.0.mlp.gate` is part of `model.layers.0.mlp.gate_proj`"), "{part}");
        assert!(AwqLayout.check(64, 96, scheme(64, true)).unwrap_err().contains("does not divide"));
        assert!(AwqLayout.check(64, 96, Scheme { bits: 8, ..scheme(32, true) }).is_err());
        assert_eq!(AwqLayout.check(8, 96, scheme(32, true)), Ok(()));
    }
}
