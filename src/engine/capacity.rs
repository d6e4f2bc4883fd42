//! How much memory keys and values take, and how many sequences fit: arithmetic alone, for planning.

use crate::backend::cache::{BLOCK, CacheType};
use crate::model::config::ModelConfig;

/// Bytes of keys and values of one token in all layers, scales included.
pub fn token_bytes(config: &ModelConfig, kind: CacheType) -> u64 {
    kind.token_bytes(config.layers.len(), config.kv_heads, config.head_dim) as u64
}

/// Bytes of a sequence of `tokens` in whole blocks. Blocks are those of all layers, as here in the engine; with
/// `windows` sliding layers hold no more than their window, as an engine has it that keeps blocks by layer.
pub fn sequence_bytes(config: &ModelConfig, kind: CacheType, tokens: usize, windows: bool) -> u64 {
    let layer = kind.token_bytes(1, config.kv_heads, config.head_dim);
    let of_layer = |window: Option<usize>| {
        let kept = match window {
            Some(window) if windows => window.min(tokens),
            _ => tokens,
        };
        (kept.div_ceil(BLOCK) * BLOCK * layer) as u64
    };
    config.layers.iter().map(|layer| of_layer(layer.window)).sum()
}

/// How many sequences of `tokens` fit into `budget` bytes, in whole blocks of all layers.
pub fn sequences(config: &ModelConfig, kind: CacheType, budget: u64, tokens: usize) -> u64 {
    let block = token_bytes(config, kind) * BLOCK as u64;
    let blocks = budget.checked_div(block).unwrap_or(0);
    blocks / tokens.div_ceil(BLOCK).max(1) as u64
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    fn config(json: serde_json::Value) -> ModelConfig {
        ModelConfig::parse(&json, |_| None).unwrap()
    }

    /// The published shape of Llama-2-7B: 2 * 32 layers * 32 heads * 128 * 2048 tokens * 2 bytes.
    #[test]
    fn seven_billion() {
        let config = config(json!({
            "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
            "num_hidden_layers": 32, "num_attention_heads": 32,
        }));
        assert_eq!(sequence_bytes(&config, CacheType::F16, 2048, false), 1_073_741_824);
        assert_eq!(sequence_bytes(&config, CacheType::Fp8E4m3, 2048, false), 536_870_912);
        // A scale to 128 numbers.
        assert_eq!(token_bytes(&config, CacheType::Int8), 2 * 32 * 32 * 132);
        // A token more takes a block more.
        assert_eq!(sequence_bytes(&config, CacheType::F16, 2049, false), 1_073_741_824 / 128 * 129);
        let budget = 10 * 1_073_741_824;
        assert_eq!(sequences(&config, CacheType::F16, budget, 2048), 10);
        assert_eq!(sequences(&config, CacheType::F16, budget - 1, 2048), 9);
        assert_eq!(sequences(&config, CacheType::F16, budget, 2049), 9);
        assert_eq!(sequences(&config, CacheType::Fp8E4m3, budget, 2048), 20);
        assert_eq!(sequences(&config, CacheType::F16, 0, 2048), 0);
    }

    #[test]
    fn windows_hold_less() {
        let config = config(json!({
            "model_type": "gemma3_text", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 64,
            "num_hidden_layers": 6, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
            "sliding_window": 512,
        }));
        let layer = 2 * 32 * 2;
        assert_eq!(sequence_bytes(&config, CacheType::F16, 4096, false), 6 * 4096 * layer);
        assert_eq!(sequence_bytes(&config, CacheType::F16, 4096, true), (5 * 512 + 4096) * layer);
        assert_eq!(sequence_bytes(&config, CacheType::F16, 256, true), 6 * 256 * layer);
    }
}
