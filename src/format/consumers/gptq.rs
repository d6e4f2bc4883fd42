//! GPTQ: an engine looks at the base of the config alone to choose a loader, before any rule for modules; that loader
//! must then take them all.

use super::{Complaint, Complaints, Plan};
use crate::pack::gptq::Version;
use crate::scheme::{GroupSize, Scheme};

/// One way to load a checkpoint.
#[derive(Debug, PartialEq)]
pub(super) struct Loader {
    /// (bits, sym)
    pub pairs: &'static [(u8, bool)],
    /// Group sizes; `None` for any.
    pub groups: Option<&'static [i32]>,
    pub act_order: ActOrder,
    /// Whether groups must fill the input channels.
    pub whole_groups: bool,
    pub versions: Versions,
}

#[derive(Debug, PartialEq)]
pub(super) enum ActOrder {
    Taken,
    /// Only where it changes nothing: one group a channel.
    ChannelOnly,
}

/// Which zero-point versions are understood.
#[derive(Debug, PartialEq)]
pub(super) enum Versions {
    Both,
    /// v2 is taken for v1.
    V1,
    /// v1 is refused for asymmetric weights.
    AsymmetricV2,
}

pub(super) const SYM_4_8: &[(u8, bool)] = &[(4, true), (8, true)];
pub(super) const ANY_2_3_4_8: &[(u8, bool)] =
    &[(2, true), (3, true), (4, true), (8, true), (2, false), (3, false), (4, false), (8, false)];
pub(super) const MARLIN_GROUPS: Option<&[i32]> = Some(&[-1, 32, 64, 128]);

// GPTQModel 7.7 nn_modules/qlinear/torch.py: SUPPORTS_BITS, SUPPORTS_GROUP_SIZE, SUPPORTS_AUTO_PADDING (a short
// last group is padded), both zero-point versions. models/loader.py: a symmetric=false checkpoint of format
// `gptq` is refused unless `meta.quantizer` names gptqmodel itself. Its packers need K and N to be multiples of
// 32 (nn_modules/qlinear/__init__.py), its loader only whole words.
pub(super) const GPTQMODEL: &[Loader] = &[Loader {
    pairs: ANY_2_3_4_8,
    groups: Some(&[-1, 16, 32, 64, 128, 256, 512, 1024]),
    act_order: ActOrder::Taken,
    whole_groups: false,
    versions: Versions::AsymmetricV2,
}];

/// How integers and zero points will lie in the files.
#[derive(Clone, Copy)]
pub(super) struct Stored {
    pub version: Version,
    pub desc_act: bool,
}

/// Why the preferred loader would refuse or misread the plan.
pub(super) fn complaints(loaders: &[Loader], stored: Stored, plan: &Plan) -> Vec<Complaint> {
    let chosen = loaders.iter().find(|loader| kind_complaints(loader, plan.scheme).is_empty());
    let (base, modules) = match chosen {
        Some(loader) => (storage_complaints(loader, stored, plan.scheme), module_complaints(loader, stored, plan)),
        None => {
            let all = loaders.iter().map(|loader| kind_complaints(loader, plan.scheme));
            (all.min_by_key(Vec::len).unwrap_or_default(), Vec::new())
        }
    };
    let overridden = plan.modules.iter().all(|module| module.scheme != Some(plan.scheme));
    let more = if overridden { "; rules for modules do not mend what the other options say" } else { "" };
    let modules: Vec<Complaint> = modules.into_iter().filter(|(why, _)| !base.contains(why)).collect();
    let mut out: Vec<Complaint> = base.into_iter().map(|why| (why + more, Vec::new())).collect();
    out.extend(modules);
    out
}

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
fn storage_complaints(loader: &Loader, stored: Stored, scheme: Scheme) -> Vec<String> {
    let mut out = Vec::new();
    if stored.desc_act && loader.act_order == ActOrder::ChannelOnly && scheme.group_size != GroupSize::CHANNEL {
        let why = "activation order with groups is not taken; order inside groups, static groups or group size -1 are";
        out.push(why.to_string());
    }
    match (&loader.versions, stored.version) {
        (Versions::V1, Version::V2) => out.push("zero points of `gptq_v2` are misread; write `gptq`".into()),
        (Versions::AsymmetricV2, Version::V1) if !scheme.sym => {
            out.push("asymmetric weights of format `gptq` are not taken; write `gptq_v2`".into());
        }
        _ => {}
    }
    out
}

fn module_complaints(loader: &Loader, stored: Stored, plan: &Plan) -> Vec<Complaint> {
    let mut out = Complaints::default();
    for module in &plan.modules {
        let Some(scheme) = module.scheme else { continue };
        let Scheme { bits, group_size, .. } = scheme;
        let (n, k, g) = (module.rows, module.cols, group_size.columns(module.cols));
        let kind = kind_complaints(loader, scheme).into_iter();
        kind.chain(storage_complaints(loader, stored, scheme)).for_each(|why| out.add(why, module));
        if loader.whole_groups && k % g != 0 {
            let why = format!("group size {group_size} does not divide {k} input channels; choose a divisor or skip");
            out.add(why, module);
        }
        if !(n * bits as usize).is_multiple_of(32) {
            out.add(format!("{n} outputs at {bits} bits do not fill 32-bit words; skip the module"), module);
        }
    }
    out.0
}

fn pair((bits, sym): &(u8, bool)) -> String {
    format!("{bits}-bit {}", if *sym { "symmetric" } else { "asymmetric" })
}

fn pairs(pairs: &[(u8, bool)]) -> String {
    pairs.iter().map(pair).collect::<Vec<_>>().join(", ")
}
