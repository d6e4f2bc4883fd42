//! The driver's questions answered: prepare a block, quantize a stage, keep finished blocks, restore them.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Error, Result};

use super::super::observer::{Progress, Reporter};
use super::modules::Modules;
use super::solve::{Solved, solve};
use super::transform::Search;
use super::work::{BlockReport, Finished, ModuleReport, Work};
use crate::backend::cache::LayerScales;
use crate::backend::weight::{Dense, Weight};
use crate::backend::{Backend, Matrix};
use crate::calibrate::driver::{Inputs, Needs, Quantizing};
use crate::format::kind::KvScales;
use crate::format::layout::Layout;
use crate::format::safetensors::TensorSpec;
use crate::model::block::{Block, Chunk, Linear, Stage};
use crate::model::{Model, ModelError};
use crate::recipe::Method;
use crate::tensor::{Bytes, Dtype, narrowed};

/// One quantization run.
pub struct Job<'a> {
    pub method: &'a Method,
    pub modules: &'a Modules,
    pub layout: &'a dyn Layout,
    pub backend: Arc<dyn Backend>,
    pub work: &'a Work,
    pub reporter: &'a Reporter,
    steps: Box<dyn Progress>,
    /// Reports of all blocks so far.
    pub reports: Vec<BlockReport>,
    pub seconds_quantizing: f64,
    current: Current,
    restored: Option<Finished>,
}

/// What there is of the block at work.
#[derive(Default)]
struct Current {
    tensors: Vec<(TensorSpec, Bytes)>,
    report: BlockReport,
    /// Linears whose weights folding has changed.
    changed: Vec<String>,
}

impl<'a> Job<'a> {
    pub fn new(
        method: &'a Method,
        modules: &'a Modules,
        layout: &'a dyn Layout,
        backend: Arc<dyn Backend>,
        work: &'a Work,
        reporter: &'a Reporter,
        steps: Box<dyn Progress>,
    ) -> Self {
        Self {
            method,
            modules,
            layout,
            backend,
            work,
            reporter,
            steps,
            reports: Vec::new(),
            seconds_quantizing: 0.0,
            current: Current::default(),
            restored: None,
        }
    }

    /// Quantizes a block whose inputs need not be seen.
    pub fn without_data(&mut self, block: &Block) -> Result<()> {
        if !self.restore(block)? {
            for stage in Stage::ALL {
                self.linears(&block.linears(stage), None)?;
            }
        }
        self.finished(block, None)
    }

    /// Takes a block from the work folder if it is there.
    fn restore(&mut self, block: &Block) -> Result<bool> {
        if self.restored.as_ref().is_some_and(|finished| finished.report.block == block.path) {
            return Ok(true);
        }
        self.restored = self.work.load(block.index)?;
        Ok(self.restored.is_some())
    }

    /// Quantizes linears that share their inputs.
    fn linears(&mut self, linears: &[&Linear], inputs: Option<&Inputs>) -> Result<Vec<Matrix>> {
        self.reporter.check()?;
        let began = Instant::now();
        let schemes = self.modules.schemes(linears);
        let solved = solve(&*self.backend, self.method, self.layout.least_zero(), linears, &schemes, inputs)?;
        self.seconds_quantizing += began.elapsed().as_secs_f64();
        linears.iter().zip(solved).map(|(linear, solved)| self.keep(linear, solved, inputs)).collect()
    }

    /// Packs a solution, notes it, and gives the weight that goes on with the calibration: what is stored.
    fn keep(&mut self, linear: &Linear, solved: Option<Solved>, inputs: Option<&Inputs>) -> Result<Matrix> {
        let Some(Solved { scheme, solution, loss, method, damp }) = solved else { return self.floating(linear) };
        if !loss.is_finite() {
            return Err(ModelError::NonFinite { path: linear.path.clone() }.into());
        }
        let stored = self.layout.store(&linear.path, &solution).map_err(Error::msg);
        let stored = stored.with_context(|| format!("module `{}`", linear.path))?;
        let matrix = self.backend.load(stored.weight)?;
        let largest = inputs.and_then(|i| i.abs_max.iter().copied().reduce(f32::max));
        let rms = inputs
            .filter(|i| !i.diagonal.is_empty())
            .map(|i| (i.diagonal.iter().sum::<f64>() / (i.tokens.max(1) as f64 * i.diagonal.len() as f64)).sqrt());
        self.current.report.modules.push(ModuleReport {
            module: linear.path.clone(),
            method,
            bits: scheme.bits,
            group_size: scheme.group_size.raw(),
            sym: scheme.sym,
            loss,
            tokens: inputs.filter(|i| !i.diagonal.is_empty()).map(|i| i.tokens),
            damp_percent: damp,
            dead_channels: inputs.map_or(0, Inputs::dead),
            input_max: largest,
            input_crest: largest.zip(rms).filter(|(_, rms)| *rms > 0.0).map(|(max, rms)| max as f64 / rms),
        });
        self.current.tensors.extend(stored.tensors);
        Ok(matrix)
    }

    /// A linear that is not quantized: as it is, or as folding has left it, in the type of the checkpoint.
    fn floating(&mut self, linear: &Linear) -> Result<Matrix> {
        if !self.current.changed.contains(&linear.path) {
            return Ok(linear.weight.clone());
        }
        let dtype = self.modules.dtype(&linear.path);
        let bytes = Bytes::from(narrowed(dtype, &linear.weight.weight().to_f32()));
        let (rows, cols) = (linear.rows, linear.cols);
        self.current
            .tensors
            .push((TensorSpec::new(format!("{}.weight", linear.path), dtype, [rows, cols]), bytes.clone()));
        Ok(self.backend.load(Weight::Dense(Dense { rows, cols, dtype, bytes }))?)
    }

    /// The scales that a cache of 8-bit keys and values is to have.
    fn cache_scales(&mut self, block: &Block, kind: KvScales, scales: &LayerScales) {
        for (name, scales) in [("k_scale", &scales.keys), ("v_scale", &scales.values)] {
            let spec = cache_spec(&block.path, name, kind, scales.len());
            self.current.tensors.push((spec, narrowed(Dtype::F32, scales).into()));
        }
    }
}

/// The tensor of a block's key or value scales.
pub fn cache_spec(block: &str, name: &str, kind: KvScales, heads: usize) -> TensorSpec {
    let shape = match kind {
        KvScales::Tensor => vec![1],
        KvScales::Head => vec![heads, 1, 1],
    };
    TensorSpec::new(format!("{block}.self_attn.{name}"), Dtype::F32, shape)
}

impl Quantizing for Job<'_> {
    type Error = Error;

    fn needs(&self) -> Needs {
        self.method.needs()
    }

    fn prepare(&mut self, model: &Model, block: &Block, chunks: &[Chunk]) -> Result<Option<Block>> {
        let restored = self.restore(block)?;
        let Some(transform) = self.method.transform else { return Ok(None) };
        let began = Instant::now();
        if let (true, Some(finished)) = (restored, &self.restored) {
            return Ok(Some(block.folded(model, &finished.report.folds)?.block));
        }
        let search =
            Search { method: self.method, modules: self.modules, layout: self.layout, model, reporter: self.reporter };
        let found = search.folds(transform, block, chunks)?;
        let folded = block.folded(model, &found.folds)?;
        for (name, (dtype, bytes)) in folded.tensors {
            let shape = [bytes.len() / dtype.size()];
            self.current.tensors.push((TensorSpec::new(name, dtype, shape), bytes));
        }
        self.current.changed = folded.linears;
        self.current.report.folds = found.folds;
        self.current.report.error_ratio = found.error_ratio;
        self.current.report.alpha = found.alpha;
        self.seconds_quantizing += began.elapsed().as_secs_f64();
        Ok(Some(folded.block))
    }

    fn restored(&mut self, block: &Block, stage: Stage) -> Result<Option<Vec<Matrix>>> {
        self.reporter.check()?;
        if !self.restore(block)? {
            return Ok(None);
        }
        let Some(Finished { opened, .. }) = &self.restored else { return Ok(None) };
        let weights = block.linears(stage).into_iter().map(|linear| {
            let stored = opened.source.checkpoint().tensors().contains_key(&format!("{}.weight", linear.path));
            if stored || self.modules.scheme(&linear.path).is_some() {
                let weight: Weight = opened.source.linear(&linear.path, linear.rows, linear.cols)?;
                Ok(self.backend.load(weight)?)
            } else {
                Ok(linear.weight.clone())
            }
        });
        weights.collect::<Result<Vec<_>>>().map(Some)
    }

    fn quantize(&mut self, block: &Block, stage: Stage, inputs: &Inputs) -> Result<Vec<Matrix>> {
        self.linears(&block.linears(stage), Some(inputs))
    }

    fn finished(&mut self, block: &Block, cache: Option<LayerScales>) -> Result<()> {
        let restored = self.restored.take();
        let was_restored = restored.is_some();
        let mut report = match restored {
            Some(finished) => {
                self.current = Current::default();
                finished.report
            }
            None => {
                if let (Some(kind), Some(scales)) = (self.method.kv_cache, &cache) {
                    self.cache_scales(block, kind, scales);
                }
                let current = std::mem::take(&mut self.current);
                let report = BlockReport { block: block.path.clone(), ..current.report };
                self.work.store(block.index, &current.tensors, &report)?;
                report
            }
        };
        let loss: f64 = report.modules.iter().map(|r| r.loss).sum();
        self.steps.step(&format!("{} {}loss {loss:.4}", block.path, if was_restored { "restored, " } else { "" }));
        // The scales are on disk; the model may have many of them.
        report.folds.clear();
        self.reports.push(report);
        Ok(())
    }
}
