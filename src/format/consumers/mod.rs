//! What inference engines accept, by version, as data: asked before any work begins.
//!
//! Each fact names the file it was read in. Engines change monthly, so a new version is a new row.

mod gptq;
mod others;
mod split;
mod table;

use std::collections::BTreeMap;
use std::fmt;

use thiserror::Error;

pub use split::{TensorParallel, largest_tp};
pub use table::{Row, table};

use super::kind::{Form, Kind, KvScales, Module};
use crate::scheme::Scheme;
use gptq::{ANY_2_3_4_8, ActOrder, GPTQMODEL, Loader, MARLIN_GROUPS, SYM_4_8, Versions};
use others::{Awq, AwqKernels, Compressed, Fp8, Packed, Tiles};

/// An engine of one version.
#[derive(Debug, PartialEq)]
pub struct Consumer {
    /// As users write it: `vllm-0.33`.
    pub name: &'static str,
    /// As people write it.
    pub title: &'static str,
    /// Ways it can load GPTQ, the preferred first. The first that takes the base of the config loads everything.
    loaders: &'static [Loader],
    awq: Awq,
    /// `None` where compressed-tensors is not read.
    compressed: Option<Compressed>,
    /// `None` where the `fp8` method is not read.
    fp8: Option<Fp8>,
    /// Whether q/k/v and gate/up become one linear each, so that they must be quantized alike.
    fuses: bool,
    /// Whether cache scales may be one a head; engines without such a cache pass scales over.
    head_scales: bool,
}

// GPTQModel 7.7 nn_modules/qlinear/torch_awq.py: SUPPORTS_GROUP_SIZE; outputs in eights.
const GPTQMODEL_AWQ: Awq = Awq { groups: Some(&[-1, 16, 32, 64, 128]), kernels: AwqKernels::Any };

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
        // quantization/auto_awq.py: 4 bits; group sizes without a Marlin kernel go to the plain one, all others to Marlin,
        // with padded tiles (utils/marlin_utils.py check_marlin_supports_layer). csrc/quantization/awq/gemm_kernels.cu
        // awq_gemm: what the plain kernel throws at.
        awq: Awq { groups: None, kernels: AwqKernels::MarlinOrPlain { pads: true } },
        // compressed_tensors/compressed_tensors.py and schemes/: 4 and 8 bits by Marlin (kernels/linear/
        // mixed_precision/marlin.py, tiles padded), other widths by Humming. utils/fp8_utils.py
        // validate_fp8_block_shape; utils/quant_utils.py knows blocks of 128 by 128 alone.
        compressed: Some(Compressed {
            packed: Packed { bits: &[2, 3, 4, 5, 6, 7, 8], groups: MARLIN_GROUPS, tiles: Tiles::Any, asymmetric: true },
            blocks: true,
            block: Some((128, 128)),
            whole_blocks: false,
        }),
        // quantization/fp8.py.
        fp8: Some(Fp8 { tensor: true, block: Some((128, 128)), whole_blocks: false }),
        fuses: true,
        head_scales: true,
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
        // quantization/awq_marlin.py get_quant_method: linears off Marlin's tiles go to awq.py and its awq_gemm
        // (csrc/quantization/awq/gemm_kernels.cu). Both look at the sum of the outputs that are joined.
        awq: Awq { groups: None, kernels: AwqKernels::MarlinOrPlain { pads: false } },
        // compressed_tensors/schemes/compressed_tensors_wNa16.py: 4 and 8 bits. Linears off Marlin's tiles go to
        // ExLlama, which takes no zero points. compressed_tensors.py `_is_fp8_w8a8`: tensor and channel scales.
        compressed: Some(Compressed {
            packed: Packed { bits: &[4, 8], groups: MARLIN_GROUPS, tiles: Tiles::Asymmetric, asymmetric: true },
            blocks: false,
            block: None,
            whole_blocks: false,
        }),
        // quantization/fp8.py.
        fp8: Some(Fp8 { tensor: true, block: Some((128, 128)), whole_blocks: false }),
        fuses: true,
        head_scales: false,
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
        // layers/quantization/awq/awq.py: whole groups, outputs in eights; weights are unpacked before products.
        awq: Awq { groups: None, kernels: AwqKernels::Any },
        // compressed_tensors/schemes/compressed_tensors_wNa16.py: Marlin alone, nothing padded.
        compressed: Some(Compressed {
            packed: Packed { bits: &[4, 8], groups: MARLIN_GROUPS, tiles: Tiles::Marlin, asymmetric: true },
            blocks: true,
            block: Some((128, 128)),
            whole_blocks: false,
        }),
        // layers/quantization/fp8.py.
        fp8: Some(Fp8 { tensor: true, block: Some((128, 128)), whole_blocks: false }),
        fuses: true,
        head_scales: false,
    },
    Consumer {
        // quantizers/quantizer_gptq.py hands over to GPTQModel; utils/quantization_config.py: 2, 3, 4, 8 bits.
        name: "transformers-5",
        title: "transformers 5",
        loaders: GPTQMODEL,
        // quantizers/quantizer_awq.py hands over to GPTQModel.
        awq: GPTQMODEL_AWQ,
        // quantizers/quantizer_compressed_tensors.py: the library itself unpacks, whatever the shape.
        compressed: Some(Compressed {
            // compressed-tensors 0.20.1 with transformers 5.24, run: zero points meet a shape that is not packed.
            packed: Packed { bits: &[2, 3, 4, 5, 6, 7, 8], groups: None, tiles: Tiles::Any, asymmetric: false },
            blocks: true,
            block: None,
            // Run: blocks that do not fill a weight fail in the forward pass.
            whole_blocks: true,
        }),
        // integrations/finegrained_fp8.py: scales are `weight_scale_inv` alone.
        fp8: Some(Fp8 { tensor: false, block: None, whole_blocks: true }),
        fuses: false,
        head_scales: true,
    },
    Consumer {
        name: "gptqmodel-7",
        title: "GPTQModel 7",
        loaders: GPTQMODEL,
        awq: GPTQMODEL_AWQ,
        // models/loader.py: others can be turned into floats (utils/model_dequant.py), not run.
        compressed: None,
        fp8: None,
        fuses: false,
        head_scales: true,
    },
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

/// An artifact to come.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// What modules have unless they say otherwise: the base of the config.
    pub scheme: Scheme,
    pub kind: Kind,
    /// Attention heads, and those of keys and values.
    pub heads: usize,
    pub kv_heads: usize,
    /// Scales of keys and values that come with it.
    pub kv_cache: Option<KvScales>,
    /// The linears of the decoder blocks, those left in floating point included.
    pub modules: Vec<Module>,
    /// Linears with a bias that the config does not ask for.
    pub unasked: Vec<String>,
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

/// Why `consumer` would refuse or misread the planned artifact; nothing if it takes it.
pub fn check(consumer: &Consumer, plan: &Plan) -> Vec<Refusal> {
    let mut refused = match plan.kind {
        Kind::Gptq { version, desc_act } => {
            gptq::complaints(consumer.loaders, gptq::Stored { version, desc_act }, plan)
        }
        Kind::Awq => others::awq(&consumer.awq, consumer.fuses, plan),
        Kind::Compressed(form) => others::compressed(consumer.compressed.as_ref(), form, consumer.fuses, plan),
        Kind::Fp8 { tile, .. } => others::fp8(consumer.fp8.as_ref(), tile, consumer.fuses, plan),
    };
    if consumer.fuses {
        refused.extend(unlike_parts(plan));
    }
    if plan.kv_cache == Some(KvScales::Head) && !consumer.head_scales {
        refused.push(("cache scales of each head are not taken; one a layer is: `--kv-cache fp8`".into(), vec![]));
    }
    if let Some(first) = plan.unasked.first() {
        // Engines build linears by the config. vLLM (model_executor/models/{llama,gemma3}.py) and SGLang
        // (models/gemma3_causal.py) skip a stored `.bias` without a parameter; GPTQModel gives a quantized linear a bias
        // if the module of transformers has one. A linear in floating point loses its bias as well.
        let count = plan.unasked.len();
        let why = format!("biases that config.json does not ask for are left out: {count} linears, first `{first}`");
        refused.push((why, vec![]));
    }
    refused.into_iter().map(|(why, modules)| Refusal { consumer: consumer.title, modules, why }).collect()
}

/// [`check`] for every known consumer.
pub fn refusals_everywhere(plan: &Plan) -> Vec<Refusal> {
    CONSUMERS.iter().flat_map(|consumer| check(consumer, plan)).collect()
}

type Complaint = (String, Vec<String>);

/// Complaints, each with all modules it is about.
#[derive(Default)]
struct Complaints(Vec<Complaint>);

impl Complaints {
    fn add(&mut self, why: String, module: &Module) {
        match self.0.iter_mut().find(|(other, _)| *other == why) {
            Some((_, modules)) => modules.push(module.name.clone()),
            None => self.0.push((why, vec![module.name.clone()])),
        }
    }
}

/// Linears that engines join, whose parts must be quantized alike.
const FUSED: [&[&str]; 3] = [&["q_proj", "k_proj", "v_proj"], &["gate_proj", "up_proj"], &["w1", "w3"]];

fn unlike_parts(plan: &Plan) -> Vec<Complaint> {
    // Mixtures of experts have tens of thousands of linears.
    let by_name: BTreeMap<&str, &Module> = plan.modules.iter().map(|module| (&*module.name, module)).collect();
    let mut out = Complaints::default();
    for parts in FUSED {
        for first in &plan.modules {
            let Some(parent) = first.name.strip_suffix(parts[0]) else { continue };
            let of = |part: &&str| by_name.get(&*format!("{parent}{part}"));
            let present: Vec<&&Module> = parts.iter().filter_map(of).collect();
            // Where the scheme is no matter of modules, only whether they have one is.
            let alike = |m: &Module| match plan.kind {
                Kind::Gptq { .. } | Kind::Compressed(Form::Packed) => m.scheme == first.scheme,
                Kind::Awq | Kind::Compressed(_) | Kind::Fp8 { .. } => m.scheme.is_some() == first.scheme.is_some(),
            };
            if !present.iter().all(|m| alike(m)) {
                let why = format!("{} become one linear and must all have one scheme or none", parts.join(", "));
                present.into_iter().for_each(|module| out.add(why.clone(), module));
            }
        }
    }
    out.0
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::pack::gptq::Version;
    use crate::scheme::GroupSize;

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
        Plan {
            scheme,
            kind: Kind::Gptq { version, desc_act },
            heads: 8,
            kv_heads: 8,
            kv_cache: None,
            modules,
            unasked: vec![],
        }
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
        // One complaint, however many layers it is about.
        let mut deep = plan.clone();
        let more = plan.modules.iter().map(|m| Module { name: m.name.replace("layers.0", "layers.1"), ..m.clone() });
        deep.modules.extend(more);
        let refused = check(parse("sglang").unwrap(), &deep);
        assert_eq!((refused.len(), refused[0].modules.len()), (1, 6));
        assert!(refused[0].to_string().ends_with("(`model.layers.0.self_attn.q_proj` and 5 more)"), "{}", refused[0]);
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
