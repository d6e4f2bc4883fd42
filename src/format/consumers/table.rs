//! The rules as a table for people.

use super::{CONSUMERS, Kind, Module, Plan, check};
use crate::format::kind::{Form, InputsKind, Tile};
use crate::pack::gptq::Version;
use crate::scheme::{GroupSize, Scheme};

/// One kind of artifact.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Format and scheme.
    pub artifact: String,
    /// Each consumer by its title, with why it would not take the artifact.
    pub consumers: Vec<(&'static str, Option<String>)>,
}

/// What each consumer says to linears of 1024 by 1024 in every form.
pub fn table() -> Vec<Row> {
    artifacts().into_iter().map(|(artifact, kind, scheme)| row(artifact, kind, scheme)).collect()
}

fn row(artifact: String, kind: Kind, scheme: Scheme) -> Row {
    let modules = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"].map(|name| Module {
        name: format!("model.layers.0.{name}"),
        rows: 1024,
        cols: 1024,
        scheme: Some(scheme),
    });
    let plan = Plan { scheme, kind, heads: 8, kv_heads: 8, kv_cache: None, modules: modules.to_vec(), unasked: vec![] };
    let why = |refusals: Vec<super::Refusal>| refusals.into_iter().next().map(|refusal| refusal.why);
    let consumers = CONSUMERS.iter().map(|consumer| (consumer.title, why(check(consumer, &plan)))).collect();
    Row { artifact, consumers }
}

fn artifacts() -> Vec<(String, Kind, Scheme)> {
    let scheme =
        |bits, group, sym| Scheme { bits, group_size: GroupSize::new(group).unwrap_or(GroupSize::CHANNEL), sym };
    let mut out = Vec::new();
    let mut add = |name: String, kind, scheme| out.push((name, kind, scheme));
    let symmetry = |sym| if sym { "symmetric" } else { "asymmetric" };
    for (bits, sym) in [(2, true), (3, true), (4, true), (8, true), (2, false), (3, false), (4, false), (8, false)] {
        let scheme = scheme(bits, 128, sym);
        let version = Version::safest([scheme]);
        let name = format!("gptq, {bits}-bit {}", symmetry(sym));
        add(name, Kind::Gptq { version, desc_act: false }, scheme);
    }
    let four = scheme(4, 128, true);
    add("gptq, 4-bit, activation order".into(), Kind::Gptq { version: Version::V1, desc_act: true }, four);
    add("awq, 4-bit".into(), Kind::Awq, scheme(4, 128, false));
    for (bits, sym) in [(2, true), (3, true), (4, true), (8, true), (4, false), (8, false)] {
        let name = format!("compressed-tensors, {bits}-bit {}", symmetry(sym));
        add(name, Kind::Compressed(Form::Packed), scheme(bits, 128, sym));
    }
    let eight = scheme(8, -1, true);
    for (name, inputs) in [
        ("W8A8, inputs by token", InputsKind::Token),
        ("W8A8, inputs by token, asymmetric", InputsKind::TokenAsymmetric),
        ("W8A8, static inputs", InputsKind::Tensor),
    ] {
        add(format!("compressed-tensors, {name}"), Kind::Compressed(Form::Int8(inputs)), eight);
    }
    let block = Tile::Block(128, 128);
    for (name, tile, inputs) in [
        ("FP8, channels, inputs by token", Tile::Channel, InputsKind::Token),
        ("FP8, static", Tile::Tensor, InputsKind::Tensor),
        ("FP8, blocks", block, InputsKind::Group(128)),
    ] {
        add(format!("compressed-tensors, {name}"), Kind::Compressed(Form::Float8 { tile, inputs }), eight);
    }
    add("fp8, static".into(), Kind::Fp8 { tile: Tile::Tensor, inputs: InputsKind::Tensor }, eight);
    add("fp8, blocks".into(), Kind::Fp8 { tile: block, inputs: InputsKind::Group(128) }, eight);
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn cells() {
        let table = table();
        let cell = |artifact: &str, consumer: &str| {
            let row = table.iter().find(|row| row.artifact == artifact).unwrap();
            row.consumers.iter().find(|(title, _)| *title == consumer).unwrap().1.clone()
        };
        assert_eq!(cell("gptq, 4-bit symmetric", "vLLM 0.33"), None);
        assert!(cell("gptq, 4-bit, activation order", "vLLM 0.33").unwrap().starts_with("activation order"));
        assert!(cell("compressed-tensors, 3-bit symmetric", "vLLM 0.10").unwrap().contains("4, 8 bits are"));
        assert_eq!(cell("compressed-tensors, 3-bit symmetric", "vLLM 0.33"), None);
        assert!(cell("compressed-tensors, FP8, blocks", "vLLM 0.10").unwrap().contains("128 by 128 are not taken"));
        assert_eq!(cell("fp8, blocks", "vLLM 0.10"), None);
        assert!(cell("fp8, static", "transformers 5").unwrap().contains("another name"));
        assert!(cell("compressed-tensors, FP8, static", "GPTQModel 7").unwrap().contains("is not read"));
        // Nothing is offered that no one takes.
        for row in &table {
            assert!(row.consumers.iter().any(|(_, why)| why.is_none()), "{}", row.artifact);
        }
    }
}
