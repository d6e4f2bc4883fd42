//! The driver's questions answered: quantize a stage, keep finished blocks, restore them.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Error, Result, bail};
use half::f16;
use rayon::prelude::*;

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
use crate::quantize::gptq::{Curvature, CurvatureError, GptqOptions, gptq};
use crate::quantize::rtn::rtn;
use crate::quantize::{Quantized, Report};
use crate::recipe::Method;
use crate::scheme::{GroupSize, Scheme};

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
            self.linears(&block.all_linears().collect::<Vec<_>>(), None)?;
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

    /// Quantizes linears that share their inputs.
    fn linears(&mut self, linears: &[&Linear], inputs: Option<&Inputs>) -> Result<Vec<Matrix>> {
        interrupt::check()?;
        let began = Instant::now();
        let schemes: Vec<Option<Scheme>> = linears.iter().map(|linear| self.modules.scheme(&linear.path)).collect();
        let solved = solve(&*self.backend, self.method, self.version.least_zero(), linears, &schemes, inputs)?;
        self.seconds_quantizing += began.elapsed().as_secs_f64();
        linears.iter().zip(solved).map(|(linear, solved)| self.keep(linear, solved, inputs)).collect()
    }

    /// Packs a solution, notes it, and gives the weight that goes on with the calibration: what is stored.
    fn keep(&mut self, linear: &Linear, solved: Option<Solved>, inputs: Option<&Inputs>) -> Result<Matrix> {
        let Some(Solved { scheme, solution: (quantized, report), method, damp }) = solved else {
            return Ok(linear.weight.clone());
        };
        if !report.loss.is_finite() {
            return Err(ModelError::NonFinite { path: linear.path.clone() }.into());
        }
        if quantized.scales.iter().any(|s| s.to_f32().abs() >= f16::MAX.to_f32()) {
            bail!("module `{}`: its weights are too large for the f16 scales of a GPTQ artifact", linear.path);
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
            dead_channels: inputs.map_or(0, Inputs::dead),
        });
        self.current.push((linear.path.clone(), packed));
        Ok(matrix)
    }
}

/// What a quantizer made of one linear.
struct Solved {
    scheme: Scheme,
    solution: (Quantized, Report),
    /// See [`ModuleReport::method`].
    method: String,
    damp: Option<f64>,
}

/// Codes and scales of linears that share their inputs; `None` for those left in floating point.
fn solve(
    backend: &dyn Backend,
    method: &Method,
    least_zero: u8,
    linears: &[&Linear],
    schemes: &[Option<Scheme>],
    inputs: Option<&Inputs>,
) -> Result<Vec<Option<Solved>>> {
    // One Hessian serves all linears that agree on the group size, which decides the order of columns.
    let mut curvatures: Vec<(GroupSize, Result<Curvature, f64>)> = Vec::new();
    if let Method::Gptq { options, .. } = method {
        let Inputs { gram, diagonal, drift } = inputs.context("GPTQ without calibration")?;
        for &scheme in schemes.iter().flatten() {
            if !curvatures.iter().any(|(size, _)| *size == scheme.group_size) {
                let options = GptqOptions { scheme, ..options.clone() };
                let curvature = match Curvature::new(backend, gram, diagonal, drift.as_ref(), &options) {
                    Ok(curvature) => Ok(curvature),
                    Err(CurvatureError::NotPositive { tried }) => Err(tried),
                    Err(CurvatureError::Device(error)) => return Err(error.into()),
                };
                curvatures.push((scheme.group_size, curvature));
            }
        }
    }
    let hessian = inputs.map(|i| {
        let scale = 2.0 / i.gram.tokens.max(1) as f64;
        i.diagonal.iter().map(|d| d * scale).collect::<Vec<f64>>()
    });
    let one = |(linear, scheme): (&&Linear, &Option<Scheme>)| -> Result<Option<Solved>> {
        let Some(scheme) = *scheme else { return Ok(None) };
        let curvature = curvatures.iter().find(|(size, _)| *size == scheme.group_size).map(|(_, c)| c);
        let round = || {
            let weight = linear.weight.weight().to_f32();
            rtn(&weight, linear.rows, linear.cols, hessian.as_deref(), scheme, method.grid(), least_zero)
        };
        let (solution, name, damp) = match (method, curvature) {
            (Method::Gptq { options, .. }, Some(Ok(curvature))) => {
                let options = GptqOptions { scheme, least_zero, ..options.clone() };
                let solution = gptq(backend, &linear.weight, curvature, &options)?;
                (solution, "gptq".into(), Some(curvature.damp_percent))
            }
            (_, Some(Err(tried))) => (round(), format!("rtn: {}", CurvatureError::NotPositive { tried: *tried }), None),
            (_, _) => (round(), "rtn".into(), None),
        };
        Ok(Some(Solved { scheme, solution, method: name, damp }))
    };
    // A device takes one after the other, and is busy with each.
    if backend.solver().is_some() {
        return linears.iter().zip(schemes).map(one).collect();
    }
    linears.par_iter().zip(schemes).map(one).collect()
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
        self.linears(&block.linears(stage), Some(inputs))
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
    use crate::quantize::grid::Grid;
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
            least_zero: 0,
        };
        let quantized = |sign: f64| {
            let mut gram = Gram::host(n, vec![0.0; n * n], 8);
            (0..n).for_each(|i| gram.lower.host_mut()[i * n + i] = if i == 3 { sign } else { 1.0 });
            let diagonal = Cpu.diagonal(&gram).unwrap();
            let inputs = Inputs { gram, diagonal, drift: None };
            let method = Method::Gptq { options: options.clone(), true_sequential: true, drift_correction: false };
            solve(&Cpu, &method, 0, &[&linear], &[Some(scheme)], Some(&inputs)).unwrap().remove(0).unwrap()
        };
        let Solved { method, damp: damping, .. } = quantized(1.0);
        assert_eq!((method.as_str(), damping), ("gptq", Some(0.05)));
        let Solved { solution: (codes, report), method, damp: damping, .. } = quantized(-100.0);
        assert_eq!(method, "rtn: the Hessian is not positive definite even with damping 0.85");
        assert_eq!(damping, None);
        assert!(report.loss.is_finite());
        assert_eq!(codes, rtn(&weight, n, n, None, scheme, Grid::MaxAbs, 0).0);
    }
}
