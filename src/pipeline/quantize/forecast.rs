//! What a run would take, told without it.

use std::sync::Arc;

use anyhow::{Context, Result};

use super::super::observer::Reporter;
use super::super::open::open;
use super::super::source::Located;
use super::settle::{Settled, refuse_quantized};
use super::{Quantization, artifact, memory};
use crate::backend::Backend;
use crate::format::safetensors::{plan_shards, planned_bytes};
use crate::model::Model;
use crate::model::block::Stage;
use crate::recipe::Rounding;

/// What a run would take.
#[derive(Clone, Debug, PartialEq)]
pub struct Forecast {
    /// Bytes of activations, matrices and the weights at work; `None` where there is no rule for them.
    pub memory: Option<u64>,
    /// Bytes of the weight files that it writes.
    pub output: u64,
    /// Bytes on the disk at the most, until the work folder is gone.
    pub disk: u64,
    pub effort: Effort,
    /// The kind of device that would compute.
    pub device: String,
}

/// How much there is to compute.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Effort {
    /// Weights that are rounded.
    pub weights: u64,
    /// Multiplications and additions of calibration and of matrices, roughly; 0 where weights are rounded only.
    pub flops: f64,
}

impl Quantization {
    /// Settles everything as a run would, so that what cannot be is refused here.
    ///
    /// # Errors
    ///
    /// When the run would be refused.
    pub fn forecast(
        &self,
        source: &Located,
        backend: Arc<dyn Backend>,
        reporter: impl Into<Reporter>,
    ) -> Result<Forecast> {
        let reporter = &reporter.into();
        let device = backend.kind();
        self.supported()?;
        let original = open(&source.dir, backend, reporter)?;
        refuse_quantized(&original, source)?;
        let model = &original.model;
        let Settled { modules, layout, .. } = self.settle(model)?;
        self.check_consumers(&modules, &*layout, reporter)?;
        let specs = artifact::specs(model, &modules, &*layout, self.method.kv_cache);
        let output = planned_bytes(&plan_shards(specs, self.output.max_shard_bytes))?;
        let tokens = match self.method.calibrates() {
            true => {
                let (windows, record) = self.calibration.windows(&original, self.bos)?;
                windows.len() * record.seqlen
            }
            false => 0,
        };
        let chosen = modules.modules.iter().filter(|module| module.scheme.is_some());
        Ok(Forecast {
            memory: Some(memory::estimate(model, &self.method, tokens)),
            output,
            disk: output * 2,
            device,
            effort: Effort {
                weights: chosen.map(|module| (module.rows * module.cols) as u64).sum(),
                flops: self.flops(model, tokens as f64).context("the model has no blocks")?,
            },
        })
    }

    /// Passes of the calibration tokens through the blocks, their second moments, and the solution of each linear.
    fn flops(&self, model: &Model, tokens: f64) -> Option<f64> {
        if tokens == 0.0 {
            return Some(0.0);
        }
        let block = model.blocks.first()?;
        let course = self.method.course();
        let weights: f64 = block.all_linears().map(|linear| (linear.rows * linear.cols) as f64).sum();
        // As it is and as it becomes; drift takes the original through too.
        let passes =
            2.0 + if course.drift { 1.0 } else { 0.0 } + if self.method.transform.is_some() { 1.0 } else { 0.0 };
        let mut flops = passes * 2.0 * tokens * weights;
        if self.method.needs().gram {
            for stage in Stage::ALL {
                let linears = block.linears(stage);
                let cols = linears[0].cols as f64;
                flops += tokens * cols * cols + 2.0 * cols * cols * cols;
                let rows: usize = linears.iter().map(|linear| linear.rows).sum();
                let sweeps = match &self.method.rounding {
                    Rounding::Gptq { options, .. } => 1.0 + options.pass.sweeps as f64,
                    _ => 1.0,
                };
                flops += sweeps * rows as f64 * cols * cols;
            }
        }
        Some(flops * model.blocks.len() as f64)
    }
}
