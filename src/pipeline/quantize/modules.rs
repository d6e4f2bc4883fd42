//! Which linears are quantized, and how: rules, exclusions, group sizes that do not fit.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use regex::Regex;

use super::super::options::{OnMisfit, Selection};
use crate::backend::weight::Weight;
use crate::format::consumers::Plan;
use crate::format::kind::{Kind, KvScales, Module};
use crate::format::layout::{Layout, fitting};
use crate::model::Model;
use crate::model::block::Linear;
use crate::pack::gptq::Version;
use crate::recipe::Method;
use crate::scheme::{GroupSize, Scheme};
use crate::tensor::Dtype;

/// The linears of all blocks with their settled schemes, and what had to be changed to get there.
pub struct Modules {
    pub modules: Vec<Module>,
    pub notes: Vec<String>,
    heads: usize,
    kv_heads: usize,
    /// Linears whose biases the artifact's config cannot ask for.
    unstated: Vec<String>,
    /// The types of the linears' weights in the checkpoint.
    dtypes: BTreeMap<String, Dtype>,
}

impl Modules {
    /// The scheme of a module, `None` if it stays in floating point.
    pub fn scheme(&self, path: &str) -> Option<Scheme> {
        self.modules.iter().find(|m| m.name == path).and_then(|m| m.scheme)
    }

    /// Those of some linears.
    pub fn schemes(&self, linears: &[&Linear]) -> Vec<Option<Scheme>> {
        linears.iter().map(|linear| self.scheme(&linear.path)).collect()
    }

    /// The type that the checkpoint has for the weight of a module.
    pub fn dtype(&self, path: &str) -> Dtype {
        self.dtypes.get(path).copied().unwrap_or(Dtype::F32)
    }

    /// The artifact to come, as consumers look at it.
    pub fn plan(&self, scheme: Scheme, kind: Kind, kv_cache: Option<KvScales>) -> Plan {
        let Self { heads, kv_heads, .. } = *self;
        let (modules, unasked) = (self.modules.clone(), self.unstated.clone());
        Plan { scheme, kind, heads, kv_heads, kv_cache, modules, unasked }
    }

    /// The version that readers of these modules and of their common `base` take the same way.
    pub fn safest_version(&self, base: Scheme) -> Version {
        Version::safest(self.modules.iter().filter_map(|module| module.scheme).chain([base]))
    }
}

/// Settles the scheme of every linear before any work.
pub fn settle(model: &Model, method: &Method, selection: &Selection, layout: &dyn Layout) -> Result<Modules> {
    let base = method.scheme();
    let rules = parse_rules(selection, base)?;
    let mut used = vec![false; rules.len()];
    let mut modules = Vec::new();
    let mut notes = Vec::new();
    let mut misfits = Vec::new();
    for linear in model.blocks.iter().flat_map(|b| b.all_linears()) {
        let rule = rules.iter().position(|(pattern, _)| pattern.is_match(&linear.path));
        let mut scheme = match rule {
            Some(i) => {
                used[i] = true;
                rules[i].1
            }
            None => Some(base),
        };
        if let Some(wanted) = scheme
            && let Err(why) = layout.check(linear.rows, linear.cols, wanted)
        {
            let path = &linear.path;
            scheme = match selection.on_misfit {
                OnMisfit::Refuse => {
                    misfits.push(format!("{path}: {why}{}", alternatives(layout, linear.rows, linear.cols, wanted)));
                    continue;
                }
                OnMisfit::Skip => None,
                OnMisfit::SmallerGroup => smaller(layout, linear.rows, linear.cols, wanted),
            };
            notes.push(match scheme {
                Some(s) => format!("{path}: group size {} instead of {} ({why})", s.group_size, wanted.group_size),
                None => format!("{path}: left in floating point ({why})"),
            });
        }
        modules.push(Module { name: linear.path.clone(), rows: linear.rows, cols: linear.cols, scheme });
    }
    if let Some(first) = misfits.first() {
        let more = if misfits.len() > 1 { format!(" (and {} more modules)", misfits.len() - 1) } else { String::new() };
        match method.chooses_groups() {
            true => bail!("{first}{more}; or use `--on-misfit skip` or `--on-misfit smaller-group`"),
            false => bail!("{first}{more}; leave such modules out with --skip"),
        }
    }
    if let Some(i) = used.iter().position(|used| !used) {
        if let Some(module) = modules.iter().find(|module| rules[i].0.is_match(&module.name)) {
            bail!(
                "`{}` has no effect: a rule before it decides about all modules that it matches, such as `{}`; the first match \
                 wins, and rules come before skips",
                rules[i].0.as_str(),
                module.name
            );
        }
        bail!(
            "no module matches `{}`; module paths look like `{}`",
            rules[i].0.as_str(),
            modules.first().map_or("", |m| &m.name)
        );
    }
    if modules.iter().all(|m| m.scheme.is_none()) {
        bail!("no module is left to quantize");
    }
    let dtype = |linear: &Linear| match linear.weight.weight() {
        Weight::Dense(weight) => weight.dtype,
        _ => Dtype::F32,
    };
    let linears = model.blocks.iter().flat_map(|b| b.all_linears());
    Ok(Modules {
        modules,
        notes,
        heads: model.config.heads,
        kv_heads: model.config.kv_heads,
        unstated: model.config.unstated_biases(),
        dtypes: linears.map(|linear| (linear.path.clone(), dtype(linear))).collect(),
    })
}

fn smaller(layout: &dyn Layout, rows: usize, cols: usize, scheme: Scheme) -> Option<Scheme> {
    fitting(layout, rows, cols, scheme).find(|s| s.group_size.raw() < scheme.group_size.raw())
}

fn alternatives(layout: &dyn Layout, rows: usize, cols: usize, scheme: Scheme) -> String {
    let sizes: Vec<String> = fitting(layout, rows, cols, scheme).map(|s| s.group_size.to_string()).collect();
    if sizes.is_empty() { "; no group size would do".into() } else { format!("; {} or -1 would", sizes.join(", ")) }
}

/// `--rule` and `--skip`, in the order rules, skips; `None` leaves a module alone.
fn parse_rules(selection: &Selection, base: Scheme) -> Result<Vec<(Regex, Option<Scheme>)>> {
    let regex = |pattern: &str| {
        Regex::new(pattern).map_err(|e| {
            anyhow::anyhow!(
                "`{pattern}` is no regular expression: {}",
                e.to_string().lines().last().unwrap_or_default()
            )
        })
    };
    let mut rules = Vec::new();
    for rule in &selection.rules {
        let Some((pattern, overrides)) = rule.rsplit_once('=') else {
            bail!("--rule `{rule}`: write `REGEX=bits:8,group_size:32,sym:false`");
        };
        let mut scheme = base;
        for part in overrides.split(',') {
            let (key, value) = part.split_once(':').unwrap_or((part, ""));
            let ok = match key.trim() {
                "bits" => value.parse().ok().filter(|b| [2, 3, 4, 8].contains(b)).map(|b| scheme.bits = b),
                "group_size" => value.parse().ok().and_then(GroupSize::new).map(|g| scheme.group_size = g),
                "sym" => value.parse().ok().map(|s| scheme.sym = s),
                _ => None,
            };
            if ok.is_none() {
                bail!(
                    "--rule `{rule}`: `{part}` is not understood; known are bits:2|3|4|8, group_size:N, sym:true|false"
                );
            }
        }
        rules.push((regex(pattern)?, Some(scheme)));
    }
    for pattern in &selection.skips {
        rules.push((regex(pattern)?, None));
    }
    Ok(rules)
}
