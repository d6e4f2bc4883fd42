//! Tensors and configuration keys as GPTQModel 7 writes them.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use crate::format::safetensors::TensorSpec;
use crate::num::bits;
use crate::pack::gptq::{Packed, Version};
use crate::scheme::Scheme;
use crate::tensor::{Bytes, Dtype, words_to_bytes};

/// How an artifact was quantized, for its configuration files.
#[derive(Clone, Debug, PartialEq)]
pub struct GptqConfig {
    /// What modules without a rule have.
    pub scheme: Scheme,
    pub version: Version,
    /// Whether groups follow activation order, so that `g_idx` is scattered.
    pub desc_act: bool,
    /// Whether groups were laid over the original columns before ordering.
    pub static_groups: bool,
    /// Whether columns were ordered inside groups only.
    pub group_aware: bool,
    /// Share of the mean diagonal added to the Hessian; `None` for methods without one.
    pub damp_percent: Option<f64>,
    pub true_sequential: bool,
    /// How scales were chosen, such as `minmax`.
    pub grid: String,
    /// Exceptions; the first whose pattern fits a module counts.
    pub rules: Vec<Rule>,
}

/// An exception from the scheme of a whole artifact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Matched from the start of a module's path.
    pub pattern: String,
    /// The scheme instead; `None` leaves the modules in floating point.
    pub scheme: Option<Scheme>,
}

/// Linears that some consumers join into one, by the last part of their names.
const FUSED: [(&[&str], &str); 2] =
    [(&["q_proj", "k_proj", "v_proj"], "(q|k|v|qkv)_proj"), (&["gate_proj", "up_proj"], "(gate|up|gate_up)_proj")];

impl Rule {
    /// Rules for exactly `modules`, in their order. A pattern starts at the layer list, because consumers put
    /// other prefixes before it, and names the joined linear too where all its parts are in `modules`.
    pub fn for_modules<S: AsRef<str>>(modules: &[S], scheme: Option<Scheme>) -> Vec<Rule> {
        let mut children: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for module in modules {
            let (parent, name) = split(module.as_ref());
            children.entry(parent).or_default().push(name);
        }
        let (mut rules, mut known) = (Vec::new(), BTreeSet::new());
        for module in modules {
            let (parent, name) = split(module.as_ref());
            let whole = |parts: &[&str]| parts.contains(&name) && parts.iter().all(|p| children[parent].contains(p));
            let last = match FUSED.iter().find(|(parts, _)| whole(parts)) {
                Some((_, joined)) => (*joined).into(),
                None => regex::escape(name),
            };
            let parent = match parent.find("layers.") {
                Some(at) => &parent[at..],
                None => parent,
            };
            let separator = if parent.is_empty() { "" } else { r"\." };
            let pattern = format!(r"(.*\.)?{}{separator}{last}$", regex::escape(parent));
            if known.insert(pattern.clone()) {
                rules.push(Rule { pattern, scheme });
            }
        }
        rules
    }
}

fn split(module: &str) -> (&str, &str) {
    module.rsplit_once('.').unwrap_or(("", module))
}

impl GptqConfig {
    /// The object that `config.json` holds as `quantization_config` and `quantize_config.json` as a whole.
    pub fn quantization_config(&self) -> Value {
        let mut meta = Map::new();
        meta.insert("quantizer".into(), json!([concat!("quantkit:", env!("CARGO_PKG_VERSION"))]));
        if let Some(damp) = self.damp_percent {
            meta.insert("damp_percent".into(), damp.into());
        }
        meta.insert("static_groups".into(), self.static_groups.into());
        meta.insert("true_sequential".into(), self.true_sequential.into());
        meta.insert("act_group_aware".into(), self.group_aware.into());
        meta.insert("grid".into(), self.grid.clone().into());

        let mut out = Map::new();
        // Readers differ in which of each pair they look for.
        for key in ["quant_method", "method"] {
            out.insert(key.into(), "gptq".into());
        }
        out.insert("bits".into(), self.scheme.bits.into());
        out.insert("group_size".into(), self.scheme.group_size.raw().into());
        out.insert("desc_act".into(), self.desc_act.into());
        out.insert("sym".into(), self.scheme.sym.into());
        out.insert("lm_head".into(), false.into());
        for key in ["checkpoint_format", "format"] {
            out.insert(key.into(), self.version.name().into());
        }
        out.insert("pack_dtype".into(), "int32".into());
        if !self.rules.is_empty() {
            out.insert("dynamic".into(), self.rules.iter().map(rule_json).collect::<Map<_, _>>().into());
        }
        out.insert("meta".into(), meta.into());
        Value::Object(out)
    }
}

/// A key of `dynamic` and what it overrides.
pub fn rule_json(rule: &Rule) -> (String, Value) {
    match rule.scheme {
        None => (format!("-:{}", rule.pattern), json!({})),
        Some(Scheme { bits, group_size, sym }) => {
            let overrides = json!({"bits": bits, "group_size": group_size.raw(), "sym": sym});
            (format!("+:{}", rule.pattern), overrides)
        }
    }
}

/// The tensors that linear `module` of `rows` outputs by `cols` inputs will have.
pub fn linear_specs(module: &str, rows: usize, cols: usize, scheme: Scheme) -> Vec<TensorSpec> {
    let groups = scheme.group_size.count(cols);
    vec![
        TensorSpec::new(format!("{module}.g_idx"), Dtype::I32, [cols]),
        TensorSpec::new(format!("{module}.qweight"), Dtype::I32, [bits::words(cols, scheme.bits), rows]),
        TensorSpec::new(format!("{module}.qzeros"), Dtype::I32, [groups, bits::words(rows, scheme.bits)]),
        TensorSpec::new(format!("{module}.scales"), Dtype::F16, [groups, rows]),
    ]
}

/// The tensors of linear `module`, as [`linear_specs`] announced them.
pub fn linear_tensors(module: &str, packed: &Packed) -> Vec<(TensorSpec, Bytes)> {
    let data: [Vec<u8>; 4] = [
        words_to_bytes(&packed.g_idx),
        words_to_bytes(&packed.qweight),
        words_to_bytes(&packed.qzeros),
        bytemuck::cast_slice(&packed.scales).to_vec(),
    ];
    let specs = linear_specs(module, packed.rows, packed.cols, packed.scheme);
    specs.into_iter().zip(data.map(Bytes::from)).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::scheme::GroupSize;

    fn scheme(bits: u8) -> Scheme {
        Scheme { bits, group_size: GroupSize::new(64).unwrap(), sym: true }
    }

    #[test]
    fn rules_fit_their_modules_and_no_others() {
        let modules = ["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj", "model.layers.1.self_attn.q_proj"];
        let rules = Rule::for_modules(&modules, None);
        assert_eq!(rules.len(), 2);
        let fits = |name: &str| {
            rules.iter().any(|r| regex::Regex::new(&format!("^(?:{})", r.pattern)).unwrap().is_match(name))
        };
        for name in
            modules.into_iter().chain(["model.layers.1.mlp.gate_up_proj", "language_model.layers.1.mlp.up_proj"])
        {
            assert!(fits(name), "{name}");
        }
        for name in ["model.layers.11.mlp.up_proj", "model.layers.1.mlp.down_proj", "model.layers.1.self_attn.qkv_proj"]
        {
            assert!(!fits(name), "{name}");
        }
        assert_eq!(Rule::for_modules(&["lm_head"], None)[0].pattern, r"(.*\.)?lm_head$");
    }

    #[test]
    fn config_keys() {
        let config = GptqConfig {
            scheme: scheme(4),
            version: Version::V2,
            desc_act: true,
            static_groups: false,
            group_aware: false,
            damp_percent: Some(0.05),
            true_sequential: true,
            grid: "minmax".into(),
            rules: vec![
                Rule { pattern: ".*k_proj$".into(), scheme: None },
                Rule { pattern: ".*down_proj$".into(), scheme: Some(scheme(8)) },
            ],
        };
        let version = env!("CARGO_PKG_VERSION");
        assert_eq!(
            config.quantization_config(),
            json!({
                "quant_method": "gptq", "method": "gptq", "bits": 4, "group_size": 64, "desc_act": true, "sym": true,
                "lm_head": false, "checkpoint_format": "gptq_v2", "format": "gptq_v2", "pack_dtype": "int32",
                "dynamic": {"-:.*k_proj$": {}, "+:.*down_proj$": {"bits": 8, "group_size": 64, "sym": true}},
                "meta": {
                    "quantizer": [format!("quantkit:{version}")], "damp_percent": 0.05, "static_groups": false,
                    "true_sequential": true, "act_group_aware": false, "grid": "minmax",
                },
            })
        );
        let plain = GptqConfig { rules: vec![], damp_percent: None, ..config }.quantization_config();
        assert!(plain.get("dynamic").is_none() && plain["meta"].get("damp_percent").is_none());
    }
}
