//! AWQ, compressed-tensors and the `fp8` method.

use std::collections::BTreeMap;

use super::gptq::MARLIN_GROUPS;
use super::{Complaint, Complaints, FUSED, Module, Plan};
use crate::format::kind::{Form, InputsKind, Tile};
use crate::scheme::{GroupSize, Scheme};

/// How AWQ is read.
#[derive(Debug, PartialEq)]
pub struct Awq {
    /// Group sizes; `None` for any.
    pub groups: Option<&'static [i32]>,
    pub kernels: AwqKernels,
}

/// What the kernels ask of a linear, of all its parts together where an engine joins them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AwqKernels {
    /// Nothing beside whole groups and words.
    Any,
    /// Marlin takes its group sizes, and shapes off its tiles if it `pads` them; all else goes to the plain kernel.
    MarlinOrPlain { pads: bool },
}

/// The plain kernel: outputs, and columns of a group, are multiples of these.
const PLAIN_OUTPUTS: usize = 64;
const PLAIN_GROUP: usize = 32;

/// How compressed-tensors is read.
#[derive(Debug, PartialEq)]
pub struct Compressed {
    pub packed: Packed,
    /// Whether 8-bit floats may have a scale a block.
    pub blocks: bool,
    /// The one size of blocks; `None` for any.
    pub block: Option<(usize, usize)>,
    /// Whether blocks must fill the weight.
    pub whole_blocks: bool,
}

/// How packed integers are read.
#[derive(Debug, PartialEq)]
pub struct Packed {
    pub bits: &'static [u8],
    /// Group sizes; `None` for any.
    pub groups: Option<&'static [i32]>,
    pub tiles: Tiles,
    /// Whether there may be zero points.
    pub asymmetric: bool,
}

/// Whose shapes must be multiples of the tiles of Marlin kernels: 64 outputs by 128 inputs.
#[derive(Debug, PartialEq)]
pub enum Tiles {
    /// No one's.
    Any,
    /// Those of asymmetric weights.
    Asymmetric,
    /// Everyone's.
    Marlin,
}

/// How the `fp8` method is read.
#[derive(Debug, PartialEq)]
pub struct Fp8 {
    /// Whether a weight may have one scale.
    pub tensor: bool,
    /// The one size of blocks; `None` for any.
    pub block: Option<(usize, usize)>,
    /// Whether blocks must fill the weight.
    pub whole_blocks: bool,
}

const NOT_READ: &str = "is not read; gptq and awq are";

fn group_complaint(groups: Option<&[i32]>, size: GroupSize) -> Option<String> {
    let known = groups.filter(|sizes| !sizes.contains(&size.raw()))?;
    let known = known.iter().map(i32::to_string).collect::<Vec<_>>().join(", ");
    Some(format!("group size {size} is not taken; {known} are"))
}

fn quantized(plan: &Plan) -> impl Iterator<Item = (&Module, Scheme)> {
    plan.modules.iter().filter_map(|module| Some((module, module.scheme?)))
}

pub fn awq(rules: &Awq, fuses: bool, plan: &Plan) -> Vec<Complaint> {
    let mut out = Complaints::default();
    for (module, Scheme { bits, group_size, .. }) in quantized(plan) {
        if bits != 4 {
            out.add(format!("{bits}-bit weights are not taken; 4-bit ones are"), module);
        }
        if let Some(why) = group_complaint(rules.groups, group_size) {
            out.add(why, module);
        }
        whole_groups(&mut out, module, group_size);
        if !module.rows.is_multiple_of(8) {
            out.add(format!("{} outputs do not fill 32-bit words; skip the module", module.rows), module);
        }
    }
    if let AwqKernels::MarlinOrPlain { pads } = rules.kernels {
        for parts in joined(plan, fuses) {
            if let Some(why) = plain_kernel(&parts, pads) {
                parts.iter().for_each(|module| out.add(why.clone(), module));
            }
        }
    }
    out.0
}

/// What the plain kernel has against a linear that it gets.
fn plain_kernel(parts: &[&Module], pads: bool) -> Option<String> {
    let [first, ..] = parts else { return None };
    let Scheme { group_size, .. } = first.scheme?;
    let (rows, cols) = (parts.iter().map(|part| part.rows).sum::<usize>(), first.cols);
    let on_tiles = rows.is_multiple_of(64) && cols.is_multiple_of(128);
    if MARLIN_GROUPS.is_some_and(|sizes| sizes.contains(&group_size.raw())) && (pads || on_tiles) {
        return None;
    }
    let (group, together) = (group_size.columns(cols), if parts.len() > 1 { "joined " } else { "" });
    if !rows.is_multiple_of(PLAIN_OUTPUTS) {
        return Some(format!(
            "its plain AWQ kernel takes multiples of {PLAIN_OUTPUTS} outputs, not {rows} {together}ones"
        ));
    }
    if !group.is_multiple_of(PLAIN_GROUP) || !rows.is_multiple_of(group) {
        return Some(format!(
            "its plain AWQ kernel takes groups that are multiples of {PLAIN_GROUP} and divide the outputs, not groups of \
             {group} with {rows} {together}outputs"
        ));
    }
    None
}

/// Quantized linears as engines have them: those that they join together, if they join any, where all parts are there.
fn joined(plan: &Plan, fuses: bool) -> Vec<Vec<&Module>> {
    let by_name: BTreeMap<&str, &Module> = quantized(plan).map(|(module, _)| (&*module.name, module)).collect();
    let mut out: Vec<Vec<&Module>> = Vec::new();
    for (module, _) in quantized(plan) {
        let set = FUSED.iter().filter(|_| fuses).find_map(|parts| {
            let (parent, part) = parts.iter().find_map(|part| Some((module.name.strip_suffix(part)?, part)))?;
            let all: Option<Vec<&Module>> =
                parts.iter().map(|part| by_name.get(&*format!("{parent}{part}")).copied()).collect();
            Some((part == &parts[0], all?))
        });
        match set {
            Some((true, all)) => out.push(all),
            Some((false, _)) => {}
            None => out.push(vec![module]),
        }
    }
    out
}

fn whole_groups(out: &mut Complaints, module: &Module, size: GroupSize) {
    if !size.divides(module.cols) {
        let cols = module.cols;
        out.add(format!("group size {size} does not divide {cols} input channels; choose a divisor or skip"), module);
    }
}

pub fn compressed(rules: Option<&Compressed>, form: Form, fuses: bool, plan: &Plan) -> Vec<Complaint> {
    let Some(rules) = rules else { return vec![(format!("compressed-tensors {NOT_READ}"), Vec::new())] };
    match form {
        Form::Packed => packed(&rules.packed, plan),
        Form::Int8(InputsKind::Float | InputsKind::Group(_)) => {
            vec![("int-quantized weights need inputs rounded by token or as a whole".into(), Vec::new())]
        }
        Form::Int8(_) => Vec::new(),
        Form::Float8 { tile: tile @ Tile::Block(..), .. } if !rules.blocks => {
            let why = format!("scales of {} are not taken; those of channels are", described(tile));
            vec![(why, Vec::new())]
        }
        Form::Float8 { tile, .. } => blocks(rules.block, rules.whole_blocks, tile, fuses, plan),
    }
}

fn described(tile: Tile) -> String {
    match tile {
        Tile::Tensor => "whole weights".into(),
        Tile::Channel => "channels".into(),
        Tile::Block(height, width) => format!("blocks of {height} by {width}"),
    }
}

fn packed(rules: &Packed, plan: &Plan) -> Vec<Complaint> {
    let mut out = Complaints::default();
    for (module, Scheme { bits, group_size, sym }) in quantized(plan) {
        if !rules.bits.contains(&bits) {
            let known = rules.bits.iter().map(u8::to_string).collect::<Vec<_>>().join(", ");
            out.add(format!("{bits}-bit weights are not taken; those of {known} bits are"), module);
        }
        if let Some(why) = group_complaint(rules.groups, group_size) {
            out.add(why, module);
        }
        if !sym && !rules.asymmetric {
            out.add("zero points are not loaded; symmetric weights are".into(), module);
        }
        whole_groups(&mut out, module, group_size);
        let Module { rows, cols, .. } = *module;
        let tiles = match rules.tiles {
            Tiles::Any => false,
            Tiles::Asymmetric => !sym,
            Tiles::Marlin => true,
        };
        if tiles && !(rows.is_multiple_of(64) && cols.is_multiple_of(128)) {
            let why = format!("{rows} outputs by {cols} inputs are no multiples of 64 by 128; skip the module");
            out.add(why, module);
        }
        if !sym && !(rows * bits as usize).is_multiple_of(32) {
            out.add(format!("{rows} zero points at {bits} bits do not fill 32-bit words; skip the module"), module);
        }
    }
    out.0
}

pub fn fp8(rules: Option<&Fp8>, tile: Tile, fuses: bool, plan: &Plan) -> Vec<Complaint> {
    let Some(rules) = rules else { return vec![(format!("fp8 {NOT_READ}"), Vec::new())] };
    match tile {
        Tile::Tensor if !rules.tensor => {
            vec![("one scale a weight is looked for under another name; blocks are taken".into(), Vec::new())]
        }
        Tile::Channel => vec![("scales of channels are not taken; write compressed-tensors".into(), Vec::new())],
        _ => blocks(rules.block, rules.whole_blocks, tile, fuses, plan),
    }
}

/// Blocks: of the one size, and none of them in two parts of a joined linear.
fn blocks(known: Option<(usize, usize)>, whole: bool, tile: Tile, fuses: bool, plan: &Plan) -> Vec<Complaint> {
    let Tile::Block(height, width) = tile else { return Vec::new() };
    if let Some((h, w)) = known.filter(|size| *size != (height, width)) {
        return vec![(format!("scales of {} are not taken; those of {h} by {w} are", described(tile)), Vec::new())];
    }
    let mut out = Complaints::default();
    for (module, _) in quantized(plan).filter(|_| whole) {
        let Module { rows, cols, .. } = *module;
        if !(rows.is_multiple_of(height) && cols.is_multiple_of(width)) {
            out.add(format!("blocks of {height} by {width} do not fill {rows} outputs by {cols} inputs"), module);
        }
    }
    // The last part may end inside a block.
    let first = |name: &str| FUSED.iter().any(|parts| parts[..parts.len() - 1].iter().any(|part| name.ends_with(part)));
    for (module, _) in quantized(plan).filter(|(module, _)| fuses && first(&module.name)) {
        if !module.rows.is_multiple_of(height) {
            let rows = module.rows;
            out.add(format!("{rows} outputs of a part of a joined linear end inside a block of {height}"), module);
        }
    }
    out.0
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::{CONSUMERS, Kind, check, largest_tp, parse};
    use super::*;

    fn scheme(bits: u8, group: i32, sym: bool) -> Scheme {
        Scheme { bits, group_size: GroupSize::new(group).unwrap(), sym }
    }

    fn plan(kind: Kind, linears: &[(&str, usize, usize, Option<Scheme>)]) -> Plan {
        let modules = linears.iter().map(|&(name, rows, cols, scheme)| Module {
            name: format!("model.layers.0.{name}"),
            rows,
            cols,
            scheme,
        });
        Plan {
            scheme: scheme(8, -1, true),
            kind,
            heads: 8,
            kv_heads: 8,
            kv_cache: None,
            modules: modules.collect(),
            unasked: vec![],
        }
    }

    /// Columns: vllm-0.33, vllm-0.10, sglang-0.5, transformers-5, gptqmodel-7.
    fn taken(plan: &Plan) -> [bool; 5] {
        let all: Vec<bool> = CONSUMERS.iter().map(|consumer| check(consumer, plan).is_empty()).collect();
        all.try_into().unwrap()
    }

    #[test]
    fn awq() {
        let down = |rows, cols, scheme| plan(Kind::Awq, &[("mlp.down_proj", rows, cols, Some(scheme))]);
        assert_eq!(taken(&down(1024, 1024, scheme(4, 128, false))), [true; 5]);
        assert_eq!(taken(&down(1024, 1024, scheme(4, 256, false))), [true, true, true, false, false]);
        // Off the tiles of Marlin: padded by the newer vLLM, the older one's plain kernel wants multiples of 64 outputs.
        assert_eq!(taken(&down(1000, 1024, scheme(4, 128, false))), [true, false, true, true, true]);
        assert_eq!(taken(&down(1000, 1024, scheme(4, 256, false))), [false, false, true, false, false]);
        assert_eq!(taken(&down(1024, 1024, scheme(4, 16, false))), [false, false, true, true, true]);
        assert_eq!(taken(&down(1000, 1040, scheme(4, 128, false))), [false; 5]);
        assert_eq!(taken(&down(1004, 1024, scheme(4, 128, false))), [false; 5]);
        // Zero points are there for all, so that parts of a joined linear may differ in them, not in being there.
        // The joined linear is what counts: 32 and 32 outputs make 64.
        let gated = |rows, group| {
            let up = Some(scheme(4, group, false));
            plan(Kind::Awq, &[("mlp.gate_proj", rows, 64, up), ("mlp.up_proj", rows, 64, up)])
        };
        assert_eq!(taken(&gated(32, 64)), [true; 5]);
        assert_eq!(taken(&gated(16, 64)), [true, false, true, true, true]);
        let refused = check(parse("vllm-0.10").unwrap(), &gated(16, 64));
        assert_eq!(refused[0].modules.len(), 2);
        assert!(refused[0].why.contains("multiples of 64 outputs, not 32 joined ones"), "{refused:?}");
        let mut alone = gated(32, 64);
        alone.modules[1].scheme = None;
        assert!(check(parse("vllm-0.10").unwrap(), &alone).iter().any(|refusal| refusal.why.contains("not 32 ones")));
        let parts = |q, k| {
            let linears = [("self_attn.q_proj", q), ("self_attn.k_proj", k), ("self_attn.v_proj", q)];
            plan(Kind::Awq, &linears.map(|(name, scheme)| (name, 64, 128, scheme)))
        };
        let (asym, sym) = (Some(scheme(4, 128, false)), Some(scheme(4, 128, true)));
        assert_eq!(taken(&parts(asym, sym)), [true; 5]);
        assert_eq!(taken(&parts(asym, None)), [false, false, false, true, true]);
    }

    #[test]
    fn packed_integers() {
        let down =
            |rows, cols, scheme| plan(Kind::Compressed(Form::Packed), &[("mlp.down_proj", rows, cols, Some(scheme))]);
        assert_eq!(taken(&down(64, 128, scheme(4, 64, false))), [true, true, true, false, false]);
        assert_eq!(taken(&down(72, 192, scheme(4, 64, true))), [true, true, false, true, false]);
        assert_eq!(taken(&down(72, 192, scheme(4, 64, false))), [true, false, false, false, false]);
        assert_eq!(taken(&down(64, 128, scheme(5, 64, true))), [true, false, false, true, false]);
        assert_eq!(taken(&down(64, 128, scheme(4, 16, true))), [false, false, false, true, false]);
        assert_eq!(taken(&down(60, 128, scheme(4, 64, false))), [false; 5]);
        let refused = check(parse("sglang").unwrap(), &down(72, 192, scheme(4, 64, true)));
        assert!(refused[0].why.contains("72 outputs by 192 inputs are no multiples of 64 by 128"), "{refused:?}");
    }

    #[test]
    fn blocks_end_where_parts_do() {
        let eight = Some(scheme(8, -1, true));
        let block =
            |size| Kind::Compressed(Form::Float8 { tile: Tile::Block(size, size), inputs: InputsKind::Group(size) });
        let qkv = |kind, rows| {
            let names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
            plan(kind, &names.map(|name| (name, rows, 256, eight)))
        };
        assert_eq!(taken(&qkv(block(128), 256)), [true, false, true, true, false]);
        assert_eq!(taken(&qkv(block(128), 192)), [false, false, false, false, false]);
        assert_eq!(taken(&qkv(block(64), 256)), [false, false, false, true, false]);
        // The last part may end inside a block.
        let mut last = qkv(block(128), 256);
        last.modules[2].rows = 200;
        assert!(check(parse("vllm").unwrap(), &last).is_empty());
        let method = |tile| Kind::Fp8 { tile, inputs: InputsKind::Token };
        assert_eq!(taken(&qkv(method(Tile::Tensor), 192)), [true, true, true, false, false]);
        assert_eq!(taken(&qkv(method(Tile::Channel), 192)), [false; 5]);
    }

    #[test]
    fn splits() {
        let degree = |kind, rows, cols, scheme: Scheme| {
            let linears = [("mlp.up_proj", rows, cols, Some(scheme)), ("mlp.down_proj", cols, rows, Some(scheme))];
            largest_tp(&plan(kind, &linears)).degree
        };
        // Eight outputs stay together in AWQ, which have no words of inputs.
        assert_eq!(degree(Kind::Awq, 64, 64, scheme(4, 4, false)), 8);
        assert_eq!(degree(Kind::Awq, 48, 64, scheme(4, 4, false)), 2);
        let packed = Kind::Compressed(Form::Packed);
        assert_eq!(degree(packed, 48, 64, scheme(4, 4, false)), 2);
        assert_eq!(degree(packed, 256, 64, scheme(5, 64, true)), 4);
        assert_eq!(degree(Kind::Compressed(Form::Int8(InputsKind::Token)), 8, 8, scheme(8, -1, true)), 8);
        let block = Kind::Fp8 { tile: Tile::Block(128, 128), inputs: InputsKind::Group(128) };
        assert_eq!(degree(block, 512, 64, scheme(8, -1, true)), 4);
    }
}
