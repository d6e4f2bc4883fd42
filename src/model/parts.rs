//! The tensors that a config asks for, without any file: what there is to plan with before weights are here.

use super::config::ModelConfig;
use super::head_path;

impl ModelConfig {
    /// Every tensor of the language model with its shape, outermost extent first: tables, norms, linears, biases.
    pub fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let mut out = vec![(format!("{}embed_tokens.weight", self.prefix), vec![self.vocab, self.hidden])];
        for i in 0..self.layers.len() {
            let block = self.block_path(i);
            for name in self.block_norms() {
                let len = if name.starts_with("self_attn.") { self.head_dim } else { self.hidden };
                out.push((format!("{block}.{name}.weight"), vec![len]));
            }
        }
        for (module, rows, cols) in self.linears() {
            if self.has_bias(&module) {
                out.push((format!("{module}.bias"), vec![rows]));
            }
            out.push((format!("{module}.weight"), vec![rows, cols]));
        }
        out.push((format!("{}norm.weight", self.prefix), vec![self.hidden]));
        if !self.tied {
            out.push((format!("{}.weight", head_path(self.prefix)), vec![self.vocab, self.hidden]));
        }
        out
    }
}
