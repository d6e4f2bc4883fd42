//! `--error-feedback`: blocks of the model are calibrated one after another, each on what the quantized ones before it
//! give, and written when they are finished.

use std::collections::BTreeMap;

use anyhow::{Context, Error, Result};

use super::output::Output;
use crate::backend::Matrix;
use crate::backend::cache::LayerScales;
use crate::backend::weight::{Ggml, Weight};
use crate::calibrate::driver::{self, Course, Inputs, Needs, Quantizing};
use crate::format::gguf::names::Architecture;
use crate::model::Model;
use crate::model::block::{Block, Linear, Stage};
use crate::num::ggml::GgmlType;
use crate::pack::ggml::encode;
use crate::pack::ggml::feedback::{encode_with_feedback, supports};
use crate::quantize::gptq::{Curvature, PassOptions};
use crate::quantize::grids::levels::curvature;

/// Encodes the linears of all blocks and writes them.
pub fn run(model: &Model, architecture: &Architecture, windows: &[Vec<u32>], output: &mut Output) -> Result<()> {
    let options = PassOptions::CODES_ONLY;
    let mut job = Job { model, architecture, output, options, encoded: BTreeMap::new() };
    driver::run(model, windows, Course { true_sequential: true, drift: false, sample: None }, &mut job)
}

struct Job<'a, 'b> {
    model: &'a Model,
    architecture: &'a Architecture,
    output: &'a mut Output<'b>,
    options: PassOptions,
    /// Rows of blocks of the current block's linears, by their names in the file.
    encoded: BTreeMap<String, Vec<u8>>,
}

impl Job<'_, '_> {
    fn encode(
        &self,
        linear: &Linear,
        kind: GgmlType,
        inputs: &Inputs,
        curvatures: &mut BTreeMap<usize, Curvature>,
    ) -> Result<Vec<u8>> {
        let weight = linear.weight.weight().to_f32();
        if supports(kind) {
            let curvature = match curvatures.entry(kind.block()) {
                std::collections::btree_map::Entry::Occupied(found) => found.into_mut(),
                std::collections::btree_map::Entry::Vacant(empty) => {
                    let gram = inputs.gram.as_ref().context("a Gram matrix")?;
                    empty.insert(curvature(gram, &inputs.diagonal, None, kind.block(), &self.options)?)
                }
            };
            return Ok(encode_with_feedback(kind, &weight, linear.cols, curvature, &self.options)?.bytes);
        }
        // Types whose codes stand for several values: importance alone.
        let tokens = inputs.tokens.max(1) as f64;
        let importance: Vec<f32> = inputs.diagonal.iter().map(|sum| (sum / tokens) as f32).collect();
        Ok(encode(kind, &weight, linear.cols, Some(&importance))?)
    }
}

impl Quantizing for Job<'_, '_> {
    type Error = Error;

    fn needs(&self) -> Needs {
        Needs { gram: true, ..Needs::default() }
    }

    fn restored(&mut self, _block: &Block, _stage: Stage) -> Result<Option<Vec<Matrix>>> {
        Ok(None)
    }

    fn quantize(&mut self, block: &Block, stage: Stage, inputs: &Inputs) -> Result<Vec<Matrix>> {
        let mut curvatures = BTreeMap::new();
        let mut matrices = Vec::new();
        for linear in block.linears(stage) {
            self.output.reporter.check()?;
            let name = self.architecture.to_gguf(&format!("{}.weight", linear.path))?.context("a place in the file")?;
            let planned = self.output.planned.iter().find(|(tensor, _)| tensor.name == name);
            let kind = planned.context("a planned tensor")?.1;
            if matches!(kind, GgmlType::F32 | GgmlType::F16 | GgmlType::BF16) {
                matrices.push(linear.weight.clone());
                continue;
            }
            let bytes =
                self.encode(linear, kind, inputs, &mut curvatures).with_context(|| format!("tensor `{name}`"))?;
            let stored = Ggml { rows: linear.rows, cols: linear.cols, kind, bytes: bytes.clone().into() };
            matrices.push(self.model.backend().load(Weight::Ggml(stored))?);
            self.encoded.insert(name, bytes);
        }
        Ok(matrices)
    }

    fn finished(&mut self, block: &Block, _cache: Option<LayerScales>) -> Result<()> {
        let encoded = std::mem::take(&mut self.encoded);
        self.output.put_through(block.index as i64, &encoded)
    }
}
