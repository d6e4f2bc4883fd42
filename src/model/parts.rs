//! The tensors that a config asks for, without any file: what there is to plan with before weights are here.

use super::config::ModelConfig;
use super::head_path;

impl ModelConfig {
    /// Every tensor of the language model with its shape, outermost extent first: tables, norms, linears, biases.
    pub fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let mut out = vec![(format!("{}embed_tokens.weight", self.prefix), vec![self.vocab, self.hidden])];
        for i in 0..self.layers.len() {
            let block = self.block_path(i);
            let norms = ["input_layernorm", "post_attention_layernorm"].into_iter();
            let sandwich = ["pre_feedforward_layernorm", "post_feedforward_layernorm"];
            let norms = norms.chain(sandwich.into_iter().filter(|_| self.family.sandwich_norms));
            out.extend(norms.map(|name| (format!("{block}.{name}.weight"), vec![self.hidden])));
            let of_heads = ["q_norm", "k_norm"].into_iter().filter(|_| self.family.qk_norm);
            out.extend(of_heads.map(|name| (format!("{block}.self_attn.{name}.weight"), vec![self.head_dim])));
        }
        for (module, rows, cols) in self.linears() {
            let biased = match module.rsplit('.').next() {
                Some("q_proj" | "k_proj" | "v_proj") => self.qkv_bias,
                Some("o_proj") => self.o_bias,
                _ => self.mlp_bias,
            };
            if biased {
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
