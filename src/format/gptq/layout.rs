//! GPTQ as a [`Layout`].

use serde_json::Value;

use super::write::{GptqConfig, Rule, linear_specs, linear_tensors};
use crate::format::kind::{Kind, Module};
use crate::format::layout::{Description, Layout, Solution, Stored, whole_groups};
use crate::format::safetensors::TensorSpec;
use crate::pack::gptq::{Version, check_shape, pack};
use crate::scheme::Scheme;

/// The four tensors of GPTQ, with zero points stored as `version` has it.
#[derive(Clone, Copy, Debug)]
pub struct GptqLayout {
    pub version: Version,
}

impl Layout for GptqLayout {
    fn method(&self) -> &'static str {
        "gptq"
    }

    fn side_file(&self) -> Option<&'static str> {
        Some("quantize_config.json")
    }

    fn check(&self, rows: usize, cols: usize, scheme: Scheme) -> Result<(), String> {
        check_shape(rows, cols, scheme.bits).map_err(|e| e.to_string())?;
        whole_groups(cols, scheme)
    }

    fn accepts(&self, _: &[Module]) -> Result<(), String> {
        Ok(())
    }

    fn least_zero(&self) -> u8 {
        self.version.least_zero()
    }

    fn specs(&self, module: &Module, scheme: Scheme) -> Vec<TensorSpec> {
        linear_specs(&module.name, module.rows, module.cols, scheme)
    }

    fn store(&self, module: &str, solution: &Solution) -> Result<Stored, String> {
        let quantized = solution.weights_only("GPTQ")?;
        let packed = pack(quantized, self.version).map_err(|e| e.to_string())?;
        Ok(Stored { tensors: linear_tensors(module, &packed), weight: packed.into_weight() })
    }

    fn kind(&self, desc_act: bool) -> Kind {
        Kind::Gptq { version: self.version, desc_act }
    }

    fn config(&self, how: &Description) -> Value {
        let mut schemes: Vec<Option<Scheme>> = Vec::new();
        for module in how.modules.iter().filter(|m| m.scheme != Some(how.base)) {
            if !schemes.contains(&module.scheme) {
                schemes.push(module.scheme);
            }
        }
        let paths = |scheme: &Option<Scheme>| -> Vec<&String> {
            how.modules.iter().filter(|m| m.scheme == *scheme).map(|m| &m.name).collect()
        };
        let facts = how.gptq;
        let config = GptqConfig {
            scheme: how.base,
            version: self.version,
            desc_act: facts.is_some_and(|f| f.desc_act),
            static_groups: facts.is_some_and(|f| f.static_groups),
            group_aware: facts.is_some_and(|f| f.group_aware),
            damp_percent: facts.map(|f| f.damp_percent),
            true_sequential: facts.is_some_and(|f| f.true_sequential),
            grid: how.grid.into(),
            rules: schemes.iter().flat_map(|scheme| Rule::for_modules(&paths(scheme), *scheme)).collect(),
        };
        config.quantization_config()
    }
}
