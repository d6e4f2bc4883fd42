//! Scales that an artifact holds for a cache of 8-bit keys and values, as llm-compressor and vLLM name them.

use std::sync::Arc;

use super::Model;
use crate::backend::cache::{CacheType, LayerScales};
use crate::checkpoint::CheckpointError;
use crate::tensor::widened;

/// Where the scales of an attention are, by the program that wrote them.
const NAMES: [[&str; 2]; 2] = [["k_scale", "v_scale"], ["k_proj.k_scale", "v_proj.v_scale"]];

impl Model {
    /// Scales of keys and values for a cache of 8 bits, one entry a layer; `None` where the artifact has none, or not for all
    /// layers. They are stored for E4M3; other types get those with which their largest number is as large.
    pub fn cache_scales(&self, kind: CacheType) -> Result<Option<Arc<[LayerScales]>>, CheckpointError> {
        let factor = CacheType::Fp8E4m3.largest() / kind.largest();
        let checkpoint = self.checkpoint();
        let tensors = checkpoint.tensors();
        let mut all = Vec::new();
        for block in &self.blocks {
            let path = |name: &str| format!("{}.self_attn.{name}", block.path);
            let Some(names) = NAMES.iter().find(|names| names.iter().all(|name| tensors.contains_key(&path(name))))
            else {
                return Ok(None);
            };
            let read = |name: &str| {
                let name = path(name);
                let shape = &tensors[&name].shape;
                let entry = checkpoint.expect_float(&name, shape)?;
                let scales = widened(entry.dtype, &entry.bytes);
                let count = scales.len();
                let why = match scales.iter().find(|scale| !(scale.is_finite() && **scale > 0.0)) {
                    Some(bad) => format!("the scale {bad} for a cache, and engines want positive numbers"),
                    None if count != 1 && count != self.config.kv_heads => {
                        format!("{count} scales for a cache of {} key-value heads", self.config.kv_heads)
                    }
                    None => return Ok(scales.into_iter().map(|scale| scale * factor).collect::<Vec<f32>>()),
                };
                Err(CheckpointError::Value { tensor: name, why })
            };
            all.push(LayerScales { keys: read(names[0])?, values: read(names[1])? });
        }
        Ok(Some(all.into()))
    }
}
