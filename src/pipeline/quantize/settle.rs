//! What is settled before any work: modules, layout, target, and what is refused.

use std::fs;
use std::path::PathBuf;

use anyhow::{Result, bail};

use super::super::observer::Reporter;
use super::super::open::Runnable;
use super::super::options::Resume;
use super::super::source::Located;
use super::form::Form;
use super::loadable::LeftOut;
use super::modules::{self, Modules};
use super::{Quantization, artifact};
use crate::checkpoint::Entry;
use crate::format::atomic::recover;
use crate::format::kind::Module;
use crate::format::layout::{GptqFacts, Layout};
use crate::model::Model;
use crate::pack::gptq::Version;
use crate::quantize::order::Order;
use crate::recipe::Rounding;
use crate::scheme::GroupSize;

/// What is settled before any work.
pub struct Settled {
    pub modules: Modules,
    pub left_out: LeftOut,
    pub version: Version,
    pub layout: Box<dyn Layout>,
}

impl Quantization {
    /// Refuses what the form of the artifact has no place for, before anything is opened.
    ///
    /// # Errors
    ///
    /// When method, form and options do not go together.
    pub fn supported(&self) -> Result<()> {
        self.form.supports(&self.method, &self.output)
    }

    /// Which linears are quantized, and how they are stored; refused here if that cannot be.
    pub(super) fn settle(&self, model: &Model) -> Result<Settled> {
        let base = self.method.scheme();
        let layout = self.form.layout(&self.method, Version::V1);
        let mut modules = modules::settle(model, &self.method, &self.selection, &*layout)?;
        let left_out = self.leave_out(&mut modules)?;
        let version = self.output.version.unwrap_or_else(|| modules.safest_version(base));
        let layout = self.form.layout(&self.method, version);
        layout.accepts(&modules.modules).map_err(anyhow::Error::msg)?;
        Ok(Settled { modules, left_out, version, layout })
    }

    /// The output folder: given, or named after the model; checked before any work.
    pub(super) fn target(&self, source: &Located) -> Result<PathBuf> {
        let base = self.method.scheme();
        let target = self.output.out.clone().unwrap_or_else(|| {
            let bits = match self.method.rounding {
                Rounding::Float8 { tile, .. } => tile.name().into(),
                _ => format!("w{}{}", base.bits, group_name(base.group_size)),
            };
            let sym = if base.sym { "" } else { "-asym" };
            let form = if self.form == Form::usual(&self.method.name) { "" } else { self.form.suffix() };
            format!("{}-{}-{bits}{sym}{form}", source.name, self.method.name).into()
        });
        recover(&target);
        if !target.exists() || fs::read_dir(&target).is_ok_and(|mut entries| entries.next().is_none()) {
            return Ok(target);
        }
        match (self.output.overwrite, artifact::is_ours(&target)) {
            (true, true) => {
                artifact::refuse_changed(&self.output, &target)?;
                Ok(target)
            }
            // What a recipe's damaged artifact left; the rest of the folder stays.
            (true, false) if self.output.resume == Resume::IfSame && target.is_dir() => Ok(target),
            (true, false) => {
                bail!("`{}` exists and holds no artifact of quantkit; it will not be replaced", target.display())
            }
            (false, true) => {
                bail!("`{}` exists already; name another folder with --out, or --overwrite it", target.display())
            }
            (false, false) => bail!("`{}` exists already; name another folder with --out", target.display()),
        }
    }

    pub(super) fn gptq_facts(&self) -> Option<GptqFacts> {
        match &self.method.rounding {
            Rounding::Gptq { options, true_sequential, .. } => Some(GptqFacts {
                desc_act: self.scattered(),
                static_groups: options.pass.static_groups,
                group_aware: options.pass.order == Order::GroupAware,
                damp_percent: options.pass.damp_percent,
                true_sequential: *true_sequential,
            }),
            _ => None,
        }
    }

    /// Whether groups follow activation order.
    pub(super) fn scattered(&self) -> bool {
        matches!(&self.method.rounding, Rounding::Gptq { options, .. } if options.pass.order == Order::Activation && !options.pass.static_groups)
    }

    /// Tiles of E4M3 must fill the rows where errors are fed back through them.
    pub(super) fn refuse_ragged_tiles(&self, modules: &Modules) -> Result<()> {
        let Rounding::Float8 { tile, feedback: true } = self.method.rounding else { return Ok(()) };
        let ragged = |m: &&Module| m.scheme.is_some() && !m.cols.is_multiple_of(tile.size(m.rows, m.cols).1);
        match modules.modules.iter().find(ragged) {
            Some(module) => bail!(
                "{}: blocks of 128 do not fill its {} input channels, which `--rounding gptq` needs; use `--weights channel`, or leave it out with --skip",
                module.name,
                module.cols
            ),
            None => Ok(()),
        }
    }
}

/// What is quantized already cannot be a source.
pub(super) fn refuse_quantized(original: &Runnable, source: &Located) -> Result<()> {
    match original.quantized() {
        Some(how) => bail!(
            "`{}` is quantized already ({how}); give the floating-point checkpoint it was made from",
            source.dir.display()
        ),
        None => Ok(()),
    }
}

/// Refuses values that are not finite where the model reads them, and warns of others.
pub(super) fn refuse_non_finite(model: &Model, reporter: &Reporter) -> Result<()> {
    // Masks among the buffers of other parts may well hold infinities.
    let (bad, elsewhere): (Vec<_>, Vec<_>) =
        model.checkpoint().non_finite().into_iter().partition(|found| model.config.reads(&found.tensor));
    for found in elsewhere {
        reporter.warn(format!(
            "tensor `{}`, which is only copied, holds {} values that are not finite",
            found.tensor, found.count
        ));
    }
    let Some(first) = bad.first() else { return Ok(()) };
    let others = if bad.len() > 1 { format!(", and {} more tensors do", bad.len() - 1) } else { String::new() };
    bail!(
        "tensor `{}` holds {} values that are not finite (first at element {}){others}: the checkpoint is damaged",
        first.tensor,
        first.count,
        first.first
    );
}

/// Linears beside those of the blocks: the output head, whether or not it has a weight of its own, and those of other
/// parts of the model.
pub(super) fn outside(model: &Model) -> Vec<String> {
    let inside = |name: &str| model.blocks.iter().any(|block| name.starts_with(&format!("{}.", block.path)));
    let linear = |(name, entry): (&String, &Entry)| {
        let module = name.strip_suffix(".weight")?;
        let table = module.ends_with("embed_tokens") || module.ends_with("embedding");
        (entry.shape.len() == 2 && !table && !inside(module)).then(|| module.to_string())
    };
    let mut names: Vec<String> = model.checkpoint().tensors().iter().filter_map(linear).collect();
    if !names.iter().any(|name| name.ends_with("lm_head")) {
        names.push("lm_head".into());
    }
    names
}

fn group_name(size: GroupSize) -> String {
    if size == GroupSize::CHANNEL { "channel".into() } else { format!("g{size}") }
}
