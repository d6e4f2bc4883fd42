//! What consumers would load: asked before any work. Linears that one of `--for` would not load are left in floating point
//! where `--on-misfit skip` says so.

use std::collections::BTreeMap;

use anyhow::{Result, bail};

use super::super::observer::Reporter;
use super::super::options::OnMisfit;
use super::Quantization;
use super::modules::Modules;
use crate::format::consumers::{Plan, Refusal, check, largest_tp, parse, refusals_everywhere};
use crate::format::layout::Layout;

/// Linears left in floating point, each with the reason.
pub type LeftOut = BTreeMap<String, String>;

/// Takes the schemes from all linears that one of `consumers` refuses, those that it joins with them included, until none
/// is refused. Complaints about the artifact as a whole are left to the check that follows. `plan` is how consumers look at
/// the modules.
fn leave_out(modules: &mut Modules, consumers: &[String], plan: &dyn Fn(&Modules) -> Plan) -> Result<LeftOut> {
    let mut left = LeftOut::new();
    for name in consumers {
        let consumer = parse(name)?;
        loop {
            let refused = check(consumer, &plan(modules)).into_iter().find(|refusal| !refusal.modules.is_empty());
            let Some(refusal) = refused else { break };
            let Refusal { consumer, modules: concerned, why } = &refusal;
            let mut more = false;
            for module in modules.modules.iter_mut().filter(|module| concerned.contains(&module.name)) {
                if module.scheme.take().is_some() {
                    more = true;
                    left.insert(module.name.clone(), format!("{consumer}: {why}"));
                }
            }
            if modules.modules.iter().all(|module| module.scheme.is_none()) {
                bail!("--for {name}: {refusal}; no module is left to quantize");
            }
            if !more {
                break;
            }
            modules.notes.push(format!("left in floating point: {refusal}"));
        }
    }
    Ok(left)
}

/// Does again what a record says.
pub fn leave_recorded(modules: &mut Modules, left: &LeftOut) {
    modules.modules.iter_mut().filter(|module| left.contains_key(&module.name)).for_each(|module| module.scheme = None);
}

impl Quantization {
    /// What `--on-misfit skip` leaves out for the consumers of `--for`.
    pub(super) fn leave_out(&self, modules: &mut Modules) -> Result<LeftOut> {
        if self.selection.on_misfit != OnMisfit::Skip {
            return Ok(LeftOut::new());
        }
        let base = self.method.scheme();
        let plan = |modules: &Modules| {
            let version = self.output.version.unwrap_or_else(|| modules.safest_version(base));
            let layout = self.form.layout(&self.method, version);
            modules.plan(base, layout.kind(self.scattered()), self.method.kv_cache)
        };
        leave_out(modules, &self.output.consumers, &plan)
    }

    /// `--for` refuses; without it, consumers that would not load the artifact are named.
    pub(super) fn check_consumers(&self, modules: &Modules, layout: &dyn Layout, reporter: &Reporter) -> Result<()> {
        let plan = modules.plan(self.method.scheme(), layout.kind(self.scattered()), self.method.kv_cache);
        for name in &self.output.consumers {
            if let Some(refusal) = check(parse(name)?, &plan).first() {
                let offer = self.method.chooses_groups() && !refusal.modules.is_empty();
                let hint = if offer { "; `--on-misfit skip` leaves such modules in floating point" } else { "" };
                bail!("--for {name}: {refusal}{hint}");
            }
        }
        if self.output.consumers.is_empty() {
            refusals_everywhere(&plan)
                .iter()
                .for_each(|refusal| reporter.warn(format!("would not be loaded by {refusal}")));
        }
        let split = largest_tp(&plan);
        if let Some(limit) = &split.limit {
            reporter.note(format!("tensor parallel up to {}: {limit}", split.degree));
        }
        Ok(())
    }
}
