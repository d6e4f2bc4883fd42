//! What inference engines accept, by version, as data: asked before any work begins.
//!
//! Each fact names the file it was read in. Engines change monthly, so a new version is a new row.

use std::collections::BTreeMap;
use std::fmt;

use thiserror::Error;

use crate::pack::gptq::Version;
use crate::scheme::{GroupSize, Scheme};

/// An engine of one version.
#[derive(Debug, PartialEq)]
pub struct Consumer {
    /// As users write it: `vllm-0.33`.
    pub name: &'static str,
    /// As people write it.
    pub title: &'static str,
    /// Ways it can load GPTQ, the preferred first. The first that takes the base of the config loads everything.
    loaders: &'static [Loader],
    /// Whether q/k/v and gate/up become one linear each, so that they must be quantized alike.
    fuses: bool,
}

/// One way to load a checkpoint.
#[derive(Debug, PartialEq)]
struct Loader {
    /// (bits, sym)
    pairs: &'static [(u8, bool)],
    /// Group sizes; `None` for any.
    groups: Option<&'static [i32]>,
    act_order: ActOrder,
    /// Whether groups must fill the input channels.
    whole_groups: bool,
    versions: Versions,
}

#[derive(Debug, PartialEq)]
enum ActOrder {
    Taken,
    /// Only where it changes nothing: one group a channel.
    ChannelOnly,
}

/// Which zero-point versions are understood.
#[derive(Debug, PartialEq)]
enum Versions {
    Both,
    /// v2 is taken for v1.
    V1,
    /// v1 is refused for asymmetric weights.
    AsymmetricV2,
}

const SYM_4_8: &[(u8, bool)] = &[(4, true), (8, true)];
const ANY_2_3_4_8: &[(u8, bool)] =
    &[(2, true), (3, true), (4, true), (8, true), (2, false), (3, false), (4, false), (8, false)];
const MARLIN_GROUPS: Option<&[i32]> = Some(&[-1, 32, 64, 128]);

// GPTQModel 7.7 nn_modules/qlinear/torch.py: SUPPORTS_BITS, SUPPORTS_GROUP_SIZE, SUPPORTS_AUTO_PADDING (a short
// last group is padded), both zero-point versions. models/loader.py: a symmetric=false checkpoint of format
// `gptq` is refused unless `meta.quantizer` names gptqmodel itself. Its packers need K and N to be multiples of
// 32 (nn_modules/qlinear/__init__.py), its loader only whole words.
const GPTQMODEL: &[Loader] = &[Loader {
    pairs: ANY_2_3_4_8,
    groups: Some(&[-1, 16, 32, 64, 128, 256, 512, 1024]),
    act_order: ActOrder::Taken,
    whole_groups: false,
    versions: Versions::AsymmetricV2,
}];

/// Every known consumer. Within an engine the newest comes first.
pub const CONSUMERS: &[Consumer] = &[
    Consumer {
        name: "vllm-0.33",
        title: "vLLM 0.33",
        loaders: &[
            // quantization/auto_gptq.py: the only loader, (bits, sym) of its type map. kernels/linear/
            // mixed_precision/marlin.py: group sizes; ragged K and N tiles are padded, groups are not.
            // utils/gptq_utils.py normalize_and_validate_gptq_desc_act: activation order only with -1.
            // Marlin has no zero points for symmetric types, so their version does not matter.
            Loader {
                pairs: SYM_4_8,
                groups: MARLIN_GROUPS,
                act_order: ActOrder::ChannelOnly,
                whole_groups: true,
                versions: Versions::Both,
            },
        ],
        fuses: true,
    },
    Consumer {
        name: "vllm-0.10",
        title: "vLLM 0.10",
        loaders: &[
            // quantization/gptq_marlin.py and utils/marlin_utils.py: type map, group sizes. Linears off Marlin's
            // tiles go to the ExLlama kernel of the same loader (kernels/mixed_precision/exllama.py), in f16.
            Loader {
                pairs: SYM_4_8,
                groups: MARLIN_GROUPS,
                act_order: ActOrder::Taken,
                whole_groups: true,
                versions: Versions::Both,
            },
            // quantization/gptq.py (ExLlama): 2, 3, 4, 8 bits; K a multiple of the group, N of whole words.
            // v2 was read as v1: vllm#26343, fixed by PR #26092 after this version.
            Loader {
                pairs: ANY_2_3_4_8,
                groups: None,
                act_order: ActOrder::Taken,
                whole_groups: true,
                versions: Versions::V1,
            },
        ],
        fuses: true,
    },
    Consumer {
        name: "sglang-0.5",
        title: "SGLang 0.5",
        loaders: &[
            // layers/quantization/gptq/gptq.py: 2, 3, 4, 8 bits; K a multiple of the group, N of whole words.
            // gptq/schemes/gptq_linear.py reads `checkpoint_format`.
            Loader {
                pairs: ANY_2_3_4_8,
                groups: None,
                act_order: ActOrder::Taken,
                whole_groups: true,
                versions: Versions::Both,
            },
        ],
        fuses: true,
    },
    Consumer {
        // quantizers/quantizer_gptq.py hands over to GPTQModel; utils/quantization_config.py: 2, 3, 4, 8 bits.
        name: "transformers-5",
        title: "transformers 5",
        loaders: GPTQMODEL,
        fuses: false,
    },
    Consumer { name: "gptqmodel-7", title: "GPTQModel 7", loaders: GPTQMODEL, fuses: false },
];

/// A name that is no consumer.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("`{name}` is no known consumer; known are: {known} (the name without a version means the newest)")]
pub struct UnknownConsumer {
    pub name: String,
    pub known: String,
}

/// The consumer that `name` means: `vllm-0.33`, or `vllm` for the newest.
pub fn parse(name: &str) -> Result<&'static Consumer, UnknownConsumer> {
    let fits = |consumer: &&Consumer| {
        let engine = consumer.name.rsplit_once('-').map_or(consumer.name, |(engine, _)| engine);
        name.eq_ignore_ascii_case(consumer.name) || name.eq_ignore_ascii_case(engine)
    };
    CONSUMERS.iter().find(fits).ok_or_else(|| UnknownConsumer {
        name: name.into(),
        known: CONSUMERS.iter().map(|consumer| consumer.name).collect::<Vec<_>>().join(", "),
    })
}

/// A GPTQ artifact to come.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// What modules have unless they say otherwise: the base of the config.
    pub scheme: Scheme,
    pub version: Version,
    /// Attention heads, and those of keys and values.
    pub heads: usize,
    pub kv_heads: usize,
    /// Whether `g_idx` will be scattered. Order inside groups, and static groups, leave it as it is.
    pub desc_act: bool,
    /// The linears of the decoder blocks, those left in floating point included.
    pub modules: Vec<Module>,
}

/// One linear of a [`Plan`].
#[derive(Clone, Debug, PartialEq)]
pub struct Module {
    pub name: String,
    /// Output channels, N.
    pub rows: usize,
    /// Input channels, K.
    pub cols: usize,
    /// `None` for a module left in floating point.
    pub scheme: Option<Scheme>,
}

/// Why a consumer would not take an artifact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Its title.
    pub consumer: &'static str,
    /// The modules concerned; none if it is the whole artifact.
    pub modules: Vec<String>,
    /// What is wrong, and what would be right.
    pub why: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.consumer, self.why)?;
        match &self.modules[..] {
            [] => Ok(()),
            [one] => write!(f, " (`{one}`)"),
            [first, rest @ ..] => write!(f, " (`{first}` and {} more)", rest.len()),
        }
    }
}

/// Why `consumer` would refuse or misread the planned artifact; nothing if it takes it. Engines look at the base
/// of the config alone to choose a loader, before any rule for modules; that loader must then take them all.
pub fn check(consumer: &Consumer, plan: &Plan) -> Vec<Refusal> {
    let chosen = consumer.loaders.iter().find(|loader| kind_complaints(loader, plan.scheme).is_empty());
    let (base, modules) = match chosen {
        Some(loader) => (storage_complaints(loader, plan, plan.scheme), complaints(loader, plan)),
        None => {
            let all = consumer.loaders.iter().map(|loader| kind_complaints(loader, plan.scheme));
            (all.min_by_key(Vec::len).unwrap_or_default(), Vec::new())
        }
    };
    let overridden = plan.modules.iter().all(|module| module.scheme != Some(plan.scheme));
    let more = if overridden { "; rules for modules do not mend what the other options say" } else { "" };
    let modules: Vec<Complaint> = modules.into_iter().filter(|(why, _)| !base.contains(why)).collect();
    let mut refused: Vec<Complaint> = base.into_iter().map(|why| (why + more, Vec::new())).collect();
    refused.extend(modules);
    if consumer.fuses {
        refused.extend(unlike_parts(plan));
    }
    refused.into_iter().map(|(why, modules)| Refusal { consumer: consumer.title, modules, why }).collect()
}

/// [`check`] for every known consumer.
pub fn refusals_everywhere(plan: &Plan) -> Vec<Refusal> {
    CONSUMERS.iter().flat_map(|consumer| check(consumer, plan)).collect()
}

type Complaint = (String, Vec<String>);

/// Bits, symmetry and group size: what a loader is chosen by.
fn kind_complaints(loader: &Loader, scheme: Scheme) -> Vec<String> {
    let Scheme { bits, group_size, sym } = scheme;
    let mut out = Vec::new();
    if !loader.pairs.contains(&(bits, sym)) {
        out.push(format!("{} weights are not taken; {} are", pair(&(bits, sym)), pairs(loader.pairs)));
    }
    if let Some(sizes) = loader.groups.filter(|sizes| !sizes.contains(&group_size.raw())) {
        let known = sizes.iter().map(i32::to_string).collect::<Vec<_>>().join(", ");
        out.push(format!("group size {group_size} is not taken; {known} are"));
    }
    out
}

/// Order of the input channels, and zero points.
fn storage_complaints(loader: &Loader, plan: &Plan, scheme: Scheme) -> Vec<String> {
    let mut out = Vec::new();
    if plan.desc_act && loader.act_order == ActOrder::ChannelOnly && scheme.group_size != GroupSize::CHANNEL {
        let why = "activation order with groups is not taken; order inside groups, static groups or group size -1 are";
        out.push(why.to_string());
    }
    match (&loader.versions, plan.version) {
        (Versions::V1, Version::V2) => out.push("zero points of `gptq_v2` are misread; write `gptq`".into()),
        (Versions::AsymmetricV2, Version::V1) if !scheme.sym => {
            out.push("asymmetric weights of format `gptq` are not taken; write `gptq_v2`".into());
        }
        _ => {}
    }
    out
}

fn complaints(loader: &Loader, plan: &Plan) -> Vec<Complaint> {
    let mut out: Vec<Complaint> = Vec::new();
    let mut complain = |why: String, module: &Module| match out.iter_mut().find(|(other, _)| *other == why) {
        Some((_, modules)) => modules.push(module.name.clone()),
        None => out.push((why, vec![module.name.clone()])),
    };
    for module in &plan.modules {
        let Some(scheme) = module.scheme else { continue };
        let Scheme { bits, group_size, .. } = scheme;
        let (n, k, g) = (module.rows, module.cols, group_size.columns(module.cols));
        let kind = kind_complaints(loader, scheme).into_iter();
        kind.chain(storage_complaints(loader, plan, scheme)).for_each(|why| complain(why, module));
        if loader.whole_groups && k % g != 0 {
            let why = format!("group size {group_size} does not divide {k} input channels; choose a divisor or skip");
            complain(why, module);
        }
        if !(n * bits as usize).is_multiple_of(32) {
            complain(format!("{n} outputs at {bits} bits do not fill 32-bit words; skip the module"), module);
        }
    }
    out
}

fn pair((bits, sym): &(u8, bool)) -> String {
    format!("{bits}-bit {}", if *sym { "symmetric" } else { "asymmetric" })
}

fn pairs(pairs: &[(u8, bool)]) -> String {
    pairs.iter().map(pair).collect::<Vec<_>>().join(", ")
}

/// Linears that engines join, whose parts must be quantized alike.
const FUSED: [&[&str]; 3] = [&["q_proj", "k_proj", "v_proj"], &["gate_proj", "up_proj"], &["w1", "w3"]];

fn unlike_parts(plan: &Plan) -> Vec<Complaint> {
    // Mixtures of experts have tens of thousands of linears.
    let by_name: BTreeMap<&str, &Module> = plan.modules.iter().map(|module| (&*module.name, module)).collect();
    let mut out = Vec::new();
    for parts in FUSED {
        for first in &plan.modules {
            let Some(parent) = first.name.strip_suffix(parts[0]) else { continue };
            let of = |part: &&str| by_name.get(&*format!("{parent}{part}"));
            let present: Vec<&&Module> = parts.iter().filter_map(of).collect();
            if present.iter().any(|m| m.scheme != first.scheme) {
                let why = format!("{} become one linear and must all have one scheme or none", parts.join(", "));
                out.push((why, present.into_iter().map(|m| m.name.clone()).collect()));
            }
        }
    }
    out
}

/// How far an artifact can be split over devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorParallel {
    /// The largest of 1, 2, 4 and 8 that every module allows.
    pub degree: usize,
    /// What stands against the next one.
    pub limit: Option<String>,
}

/// Linears whose input channels are split; all others split their outputs.
const ROW_PARALLEL: [&str; 7] = ["o_proj", "down_proj", "out_proj", "w2", "dense", "dense_4h_to_h", "fc2"];

/// The largest tensor-parallel degree: heads are dealt out whole, key and value heads are dealt out or copied,
/// input splits must hold whole groups, output splits whole words.
pub fn largest_tp(plan: &Plan) -> TensorParallel {
    let mut degree = 1;
    for next in [2, 4, 8] {
        let limit = indivisible_heads(plan, next);
        let limit = limit.or_else(|| plan.modules.iter().find_map(|module| unsplittable(module, next, plan.kv_heads)));
        if let Some(limit) = limit {
            return TensorParallel { degree, limit: Some(limit) };
        }
        degree = next;
    }
    TensorParallel { degree, limit: None }
}

fn indivisible_heads(plan: &Plan, ways: usize) -> Option<String> {
    let Plan { heads, kv_heads, .. } = *plan;
    if !heads.is_multiple_of(ways) {
        return Some(format!("{heads} attention heads cannot be dealt out to {ways}"));
    }
    let even = kv_heads.is_multiple_of(ways) || ways.is_multiple_of(kv_heads);
    (!even).then(|| format!("{kv_heads} key and value heads can neither be dealt out to {ways} nor copied evenly"))
}

fn unsplittable(module: &Module, ways: usize, kv_heads: usize) -> Option<String> {
    let scheme = module.scheme?;
    let last = module.name.rsplit('.').next()?;
    // Beyond one head a device, key and value heads are copied.
    let ways = if matches!(last, "k_proj" | "v_proj") { ways.min(kv_heads) } else { ways };
    // Fields that fill whole words; 3-bit fields straddle words, and 32 of them fill three.
    let fields = if scheme.bits == 3 { 32 } else { 32 / scheme.bits as usize };
    let (what, count, unit) = if ROW_PARALLEL.contains(&last) {
        let group = if scheme.group_size == GroupSize::CHANNEL { 1 } else { scheme.group_size.columns(module.cols) };
        ("inputs", module.cols, least_common_multiple(group, fields))
    } else {
        ("outputs", module.rows, fields)
    };
    (count % (ways * unit) != 0)
        .then(|| format!("`{}` has {count} {what}: {ways} equal parts are no multiples of {unit}", module.name))
}

fn least_common_multiple(a: usize, b: usize) -> usize {
    let gcd = |mut a: usize, mut b: usize| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    a / gcd(a, b) * b
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn scheme(bits: u8, group: i32, sym: bool) -> Scheme {
        Scheme { bits, group_size: GroupSize::new(group).unwrap(), sym }
    }

    fn module(name: &str, rows: usize, cols: usize, scheme: Scheme) -> Module {
        Module { name: format!("model.layers.0.{name}"), rows, cols, scheme: Some(scheme) }
    }

    fn plan(scheme: Scheme, version: Version, desc_act: bool) -> Plan {
        let modules = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
            .map(|name| module(name, 1024, 1024, scheme))
            .to_vec();
        Plan { scheme, version, desc_act, heads: 8, kv_heads: 8, modules }
    }

    #[test]
    fn names() {
        assert_eq!(parse("vllm-0.33").unwrap().title, "vLLM 0.33");
        assert_eq!(parse("vLLM").unwrap().name, "vllm-0.33");
        assert_eq!(parse("gptqmodel").unwrap().name, "gptqmodel-7");
        let error = parse("vllm-0.2").unwrap_err().to_string();
        assert!(error.contains("`vllm-0.2`") && error.contains("vllm-0.10, sglang-0.5"), "{error}");
    }

    #[test]
    fn rows_of_the_table() {
        use Version::{V1, V2};
        // Columns: vllm-0.33, vllm-0.10, sglang-0.5, transformers-5, gptqmodel-7.
        for (scheme, version, desc_act, taken) in [
            (scheme(4, 128, true), V1, false, [true, true, true, true, true]),
            (scheme(8, -1, true), V1, true, [true, true, true, true, true]),
            (scheme(4, 128, true), V1, true, [false, true, true, true, true]),
            (scheme(4, 128, true), V2, false, [true, true, true, true, true]),
            (scheme(4, 128, false), V1, false, [false, true, true, false, false]),
            (scheme(4, 128, false), V2, false, [false, false, true, true, true]),
            (scheme(3, 128, true), V1, false, [false, true, true, true, true]),
            (scheme(2, 64, true), V2, false, [false, false, true, true, true]),
            (scheme(4, 256, true), V1, false, [false, true, true, true, true]),
            (scheme(4, 8, true), V1, false, [false, true, true, false, false]),
            (scheme(4, 96, true), V1, false, [false, false, false, false, false]),
        ] {
            let plan = plan(scheme, version, desc_act);
            let found: Vec<bool> = CONSUMERS.iter().map(|consumer| check(consumer, &plan).is_empty()).collect();
            assert_eq!(found, taken, "{scheme:?} {version:?} desc_act {desc_act}");
        }
    }

    #[test]
    fn short_groups_are_refused_by_name() {
        let scheme = scheme(4, 128, true);
        let mut plan = plan(scheme, Version::V1, false);
        plan.modules.push(module("mlp.down_proj", 1024, 192, scheme));
        let refused = check(parse("vllm").unwrap(), &plan);
        let text = refused[0].to_string();
        assert_eq!(refused.len(), 1);
        assert!(text.starts_with("vLLM 0.33: group size 128 does not divide 192 input channels"), "{text}");
        assert!(text.ends_with("(`model.layers.0.mlp.down_proj`)"), "{text}");
        assert!(check(parse("gptqmodel").unwrap(), &plan).is_empty());
        let mut who: Vec<&str> = refusals_everywhere(&plan).iter().map(|refusal| refusal.consumer).collect();
        who.dedup();
        assert_eq!(who, ["vLLM 0.33", "vLLM 0.10", "SGLang 0.5"]);
    }

    #[test]
    fn the_base_chooses_the_loader() {
        let (three, four) = (scheme(3, 128, true), scheme(4, 128, true));
        // All modules are fine, but no loader is ever asked about them.
        let all_overridden = Plan { scheme: three, ..plan(four, Version::V1, false) };
        let refused = check(parse("vllm-0.33").unwrap(), &all_overridden);
        let [Refusal { modules, why, .. }] = &refused[..] else { panic!("{refused:?}") };
        assert_eq!(modules.len(), 0);
        assert!(
            why.starts_with("3-bit symmetric weights are not taken") && why.contains("rules for modules do not"),
            "{why}"
        );
        assert!(check(parse("vllm-0.10").unwrap(), &all_overridden).is_empty());

        // ExLlama would take both, but the base goes to Marlin.
        let mut mixed = plan(four, Version::V1, false);
        mixed.modules.push(module("mlp.down_proj", 1024, 1024, three));
        let refused = check(parse("vllm-0.10").unwrap(), &mixed);
        assert_eq!(refused.len(), 1);
        assert_eq!(refused[0].modules, ["model.layers.0.mlp.down_proj"]);
        assert!(check(parse("sglang").unwrap(), &mixed).is_empty());

        // Asymmetric in the config, symmetric everywhere else: GPTQModel looks at the config.
        let asymmetric = Plan { scheme: scheme(4, 128, false), ..plan(four, Version::V1, false) };
        assert!(check(parse("gptqmodel").unwrap(), &asymmetric)[0].why.contains("write `gptq_v2`"));
    }

    #[test]
    fn joined_linears_go_together() {
        let four = scheme(4, 128, true);
        let mut plan = plan(four, Version::V1, false);
        plan.modules[1].scheme = None;
        let refused = check(parse("sglang").unwrap(), &plan);
        assert_eq!(refused.len(), 1);
        assert_eq!(refused[0].modules.len(), 3);
        assert!(check(parse("transformers").unwrap(), &plan).is_empty());
        plan.modules[1].scheme = Some(scheme(8, 128, true));
        assert_eq!(check(parse("sglang").unwrap(), &plan).len(), 1);
        for module in &mut plan.modules[..3] {
            module.scheme = None;
        }
        assert!(check(parse("sglang").unwrap(), &plan).is_empty());
    }

    #[test]
    fn splits() {
        let four = scheme(4, 128, true);
        let mut plan = plan(four, Version::V1, false);
        assert_eq!(largest_tp(&plan), TensorParallel { degree: 8, limit: None });
        plan.modules.push(module("mlp.down_proj", 4096, 27392, four));
        let split = largest_tp(&plan);
        assert_eq!(split.degree, 2);
        assert!(split.limit.unwrap().contains("27392 inputs: 4 equal parts are no multiples of 128"));
        plan.modules = vec![module("self_attn.k_proj", 16, 1024, four)];
        assert_eq!(largest_tp(&plan).degree, 2);
        plan.modules = vec![module("self_attn.o_proj", 16, 1024, scheme(3, -1, true))];
        assert_eq!(largest_tp(&plan).degree, 8);
    }

    #[test]
    fn heads_are_dealt_out_whole() {
        let of =
            |heads, kv_heads| largest_tp(&Plan { heads, kv_heads, ..plan(scheme(4, 128, true), Version::V1, false) });
        assert_eq!(of(14, 2).degree, 2);
        assert_eq!(of(14, 2).limit.unwrap(), "14 attention heads cannot be dealt out to 4");
        assert_eq!(of(9, 3).degree, 1);
        // One key and value head is copied to all.
        assert_eq!(of(8, 1), TensorParallel { degree: 8, limit: None });
        assert_eq!(of(24, 6).degree, 2);
        assert!(of(24, 6).limit.unwrap().starts_with("6 key and value heads"));
        // Copied heads are not cut: 16 outputs are split in two at most.
        let mut two = Plan { heads: 8, kv_heads: 2, ..plan(scheme(4, 128, true), Version::V1, false) };
        two.modules = vec![module("self_attn.k_proj", 16, 1024, two.scheme)];
        assert_eq!(largest_tp(&two).degree, 8);
    }
}
