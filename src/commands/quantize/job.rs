//! The driver's questions answered: quantize a stage, keep finished blocks, restore them.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Error, Result};

use super::modules::Modules;
use super::work::{ModuleReport, Work};
use crate::backend::weight::Weight;
use crate::backend::{Backend, Matrix};
use crate::calibrate::driver::{Inputs, Quantizing};
use crate::cli::interrupt;
use crate::cli::print::Steps;
use crate::format::Opened;
use crate::model::ModelError;
use crate::model::block::{Block, Linear, Stage};
use crate::pack::gptq::{Packed, Version, pack};
use crate::quantize::gptq::{Curvature, GptqOptions, NotPositive, gptq};
use crate::quantize::grid::Grid;
use crate::quantize::rtn::rtn;
use crate::quantize::{Quantized, Report};
use crate::recipe::Method;
use crate::scheme::Scheme;

/// One quantization run.
pub struct Job<'a> {
    pub method: &'a Method,
    pub modules: &'a Modules,
    pub version: Version,
    pub backend: Arc<dyn Backend>,
    pub work: &'a Work,
    pub steps: Steps,
    /// Reports of all modules so far.
    pub reports: Vec<ModuleReport>,
    current: Vec<(String, Packed)>,
    current_reports: Vec<ModuleReport>,
    restored: Option<(usize, Opened)>,
    pub seconds_quantizing: f64,
}

impl<'a> Job<'a> {
    pub fn new(
        method: &'a Method,
        modules: &'a Modules,
        version: Version,
        backend: Arc<dyn Backend>,
        work: &'a Work,
        steps: Steps,
    ) -> Self {
        Self {
            method,
            modules,
            version,
            backend,
            work,
            steps,
            reports: Vec::new(),
            current: Vec::new(),
            current_reports: Vec::new(),
            restored: None,
            seconds_quantizing: 0.0,
        }
    }

    /// Quantizes a block whose inputs need not be seen.
    pub fn without_data(&mut self, block: &Block) -> Result<()> {
        if !self.restore(block)? {
            for linear in block.all_linears() {
                self.linear(linear, None, &mut Vec::new())?;
            }
        }
        self.finished(block)
    }

    /// Takes block reports from the work folder if the block is there.
    fn restore(&mut self, block: &Block) -> Result<bool> {
        if self.restored.as_ref().is_some_and(|(index, _)| *index == block.index) {
            return Ok(true);
        }
        let Some((opened, reports)) = self.work.load(block.index)? else { return Ok(false) };
        self.restored = Some((block.index, opened));
        self.current_reports = reports;
        Ok(true)
    }

    /// Quantizes one linear; curvatures are shared by linears of a stage that agree on the group size.
    fn linear(
        &mut self,
        linear: &Linear,
        inputs: Option<&Inputs>,
        shared: &mut Vec<(Scheme, Result<Curvature, NotPositive>)>,
    ) -> Result<Matrix> {
        interrupt::check()?;
        let Some(scheme) = self.modules.scheme(&linear.path) else { return Ok(linear.weight.clone()) };
        let weight = linear.weight.weight().to_f32();
        let began = Instant::now();
        let ((quantized, report), method, damp) = match self.method {
            Method::Rtn { grid, .. } => (
                rtn(&weight, linear.rows, linear.cols, inputs.map(|i| &i.gram), scheme, *grid),
                "rtn".to_string(),
                None,
            ),
            Method::Gptq { options, .. } => {
                let inputs = inputs.context("GPTQ without calibration")?;
                let options = GptqOptions { scheme, ..options.clone() };
                gptq_or_fallback(&weight, linear, inputs, &options, shared)
            }
        };
        self.seconds_quantizing += began.elapsed().as_secs_f64();
        if !report.loss.is_finite() {
            return Err(ModelError::NonFinite { path: linear.path.clone() }.into());
        }
        let packed = pack(&quantized, self.version).with_context(|| format!("module `{}`", linear.path))?;
        let matrix = self.backend.load(packed.to_weight())?;
        self.current_reports.push(ModuleReport {
            module: linear.path.clone(),
            method,
            bits: scheme.bits,
            group_size: scheme.group_size.raw(),
            sym: scheme.sym,
            loss: report.loss,
            damp_percent: damp,
            dead_channels: inputs
                .map(|i| &i.gram)
                .map_or(0, |g| (0..g.n).filter(|i| g.lower[i * g.n + i] == 0.0).count()),
        });
        self.current.push((linear.path.clone(), packed));
        Ok(matrix)
    }
}

type Outcome = ((Quantized, Report), String, Option<f64>);

fn gptq_or_fallback(
    weight: &[f32],
    linear: &Linear,
    inputs: &Inputs,
    options: &GptqOptions,
    shared: &mut Vec<(Scheme, Result<Curvature, NotPositive>)>,
) -> Outcome {
    let agrees = |scheme: &Scheme| scheme.group_size == options.scheme.group_size;
    let at = match shared.iter().position(|(scheme, _)| agrees(scheme)) {
        Some(at) => at,
        None => {
            shared.push((options.scheme, Curvature::new(&inputs.gram, inputs.drift.as_ref(), options)));
            shared.len() - 1
        }
    };
    match &shared[at].1 {
        Ok(curvature) => (gptq(weight, linear.rows, curvature, options), "gptq".into(), Some(curvature.damp_percent)),
        Err(why) => {
            let grid = if options.grid == Grid::MaxAbs { Grid::MaxAbs } else { Grid::Hessian };
            (
                rtn(weight, linear.rows, linear.cols, Some(&inputs.gram), options.scheme, grid),
                format!("rtn: {why}"),
                None,
            )
        }
    }
}

impl Quantizing for Job<'_> {
    type Error = Error;

    fn restored(&mut self, block: &Block, stage: Stage) -> Result<Option<Vec<Matrix>>> {
        interrupt::check()?;
        if !self.restore(block)? {
            return Ok(None);
        }
        let Some((_, opened)) = &self.restored else { return Ok(None) };
        let weights = block.linears(stage).into_iter().map(|linear| match self.modules.scheme(&linear.path) {
            Some(_) => {
                let weight: Weight = opened.source.linear(&linear.path, linear.rows, linear.cols)?;
                Ok(self.backend.load(weight)?)
            }
            None => Ok(linear.weight.clone()),
        });
        weights.collect::<Result<Vec<_>>>().map(Some)
    }

    fn quantize(&mut self, block: &Block, stage: Stage, inputs: &Inputs) -> Result<Vec<Matrix>> {
        let mut shared = Vec::new();
        block.linears(stage).into_iter().map(|linear| self.linear(linear, Some(inputs), &mut shared)).collect()
    }

    fn finished(&mut self, block: &Block) -> Result<()> {
        let restored = self.restored.take().is_some();
        let linears = std::mem::take(&mut self.current);
        let reports = std::mem::take(&mut self.current_reports);
        if !restored {
            self.work.store(block.index, &linears, &reports)?;
        }
        let loss: f64 = reports.iter().map(|r| r.loss).sum();
        self.steps.step(&format!("{} {}loss {loss:.4}", block.path, if restored { "restored, " } else { "" }));
        self.reports.extend(reports);
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::backend::Gram;
    use crate::backend::cpu::Cpu;
    use crate::backend::weight::Dense;
    use crate::quantize::order::Order;
    use crate::scheme::GroupSize;
    use crate::tensor::{Bytes, Dtype};

    /// No damping below 100 % mends a Hessian with such a diagonal: the module alone is rounded.
    #[test]
    fn hessians_that_cannot_be_used() {
        let n = 32;
        let weight: Vec<f32> = (0..n * n).map(|i| (i as f32 * 0.7).sin()).collect();
        let bytes = Bytes::from(bytemuck::cast_slice(&weight).to_vec());
        let stored = Weight::Dense(Dense { rows: n, cols: n, dtype: Dtype::F32, bytes });
        let linear = Linear { path: "x".into(), rows: n, cols: n, weight: Cpu.load(stored).unwrap(), bias: None };
        let scheme = Scheme { bits: 4, group_size: GroupSize::new(16).unwrap(), sym: true };
        let options = GptqOptions {
            scheme,
            order: Order::GroupAware,
            static_groups: false,
            damp_percent: 0.05,
            damp_auto_increment: 0.2,
            grid: Grid::MaxAbs,
            sweeps: 1,
        };
        let quantized = |sign: f64| {
            let mut gram = Gram::new(n);
            gram.tokens = 8;
            (0..n).for_each(|i| gram.lower[i * n + i] = if i == 3 { sign } else { 1.0 });
            let inputs = Inputs { gram, drift: None };
            gptq_or_fallback(&weight, &linear, &inputs, &options, &mut Vec::new())
        };
        let (_, method, damping) = quantized(1.0);
        assert_eq!((method.as_str(), damping), ("gptq", Some(0.05)));
        let ((codes, report), method, damping) = quantized(-100.0);
        assert_eq!(method, "rtn: the Hessian is not positive definite even with damping 1.05");
        assert_eq!(damping, None);
        assert!(report.loss.is_finite());
        assert_eq!(codes, rtn(&weight, n, n, None, scheme, Grid::MaxAbs).0);
    }
}
