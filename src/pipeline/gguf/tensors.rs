//! The tensors of a model as a GGUF file has them: names, shapes, and their values row by row.

use anyhow::Result;
use rayon::prelude::*;

use crate::backend::weight::{Dense, Weight};
use crate::format::gguf::names::{Architecture, Change, ROPE_FACTORS, interleaved_row, plus_one};
use crate::model::Model;
use crate::model::presence::is_packed;
use crate::num::ggml::GgmlType;
use crate::tensor::Dtype;

/// Where the values of a tensor come from.
enum Values {
    Matrix(Weight),
    Vector(Vec<f32>),
}

/// One tensor.
pub struct Tensor {
    /// As in the file.
    pub name: String,
    /// Outermost first.
    pub shape: Vec<usize>,
    /// How the source stores it.
    pub stored: GgmlType,
    values: Values,
    change: Change,
    head_dim: usize,
}

/// The tensors of `model`, and the rope factors where its metadata have some.
pub fn of(model: &Model, architecture: &Architecture, rope_factors: Option<Vec<f32>>) -> Result<Vec<Tensor>> {
    let head_dim = model.config.head_dim;
    let place = |name: &str| architecture.to_gguf(name);
    let mut tensors = Vec::new();
    let mut matrix = |name: String, weight: Weight| -> Result<()> {
        if let Some(name) = place(&name)? {
            let (shape, change) = (vec![weight.rows(), weight.cols()], architecture.change(&name));
            let stored = stored(&weight);
            tensors.push(Tensor { name, shape, stored, values: Values::Matrix(weight), change, head_dim });
        }
        Ok(())
    };
    let linears = || model.blocks.iter().flat_map(|block| block.all_linears());
    for linear in linears() {
        matrix(format!("{}.weight", linear.path), linear.weight.weight().clone())?;
    }
    for (module, rows) in model.tables() {
        matrix(format!("{module}.weight"), model.source().linear(&module, rows, model.config.hidden)?)?;
    }
    // What is left are vectors; parts of a quantized linear have other names.
    for (name, entry) in model.checkpoint().tensors() {
        let [len] = entry.shape[..] else { continue };
        if !entry.dtype.is_float() || !model.config.reads(name) || is_packed(name) {
            continue;
        }
        let Some(name_there) = place(name)? else { continue };
        let change = architecture.change(&name_there);
        let values = Values::Vector(model.checkpoint().vector(name, len)?);
        tensors.push(Tensor { name: name_there, shape: vec![len], stored: GgmlType::F32, values, change, head_dim });
    }
    if let Some(factors) = rope_factors {
        tensors.push(Tensor {
            name: ROPE_FACTORS.into(),
            shape: vec![factors.len()],
            stored: GgmlType::F32,
            values: Values::Vector(factors),
            change: Change::None,
            head_dim,
        });
    }
    Ok(tensors)
}

fn stored(weight: &Weight) -> GgmlType {
    match weight {
        Weight::Dense(Dense { dtype: Dtype::F16, .. }) => GgmlType::F16,
        Weight::Dense(Dense { dtype: Dtype::BF16, .. }) => GgmlType::BF16,
        Weight::Ggml(w) => w.kind,
        Weight::Dense(_) | Weight::Gptq(_) | Weight::Int8(_) | Weight::Fp8(_) => GgmlType::F32,
    }
}

impl Tensor {
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    pub fn rows(&self) -> usize {
        self.len() / self.cols().max(1)
    }

    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// The bytes of some rows that are stored in blocks; `None` where the rows have to be made.
    pub fn as_stored(&self, first: usize, count: usize) -> Option<Vec<u8>> {
        let Values::Matrix(Weight::Ggml(w)) = &self.values else { return None };
        let size = w.bytes.len() / w.rows;
        let row = |row: usize| {
            let there = self.row_there(first + row);
            &w.bytes[there * size..(there + 1) * size]
        };
        Some((0..count).flat_map(row).copied().collect())
    }

    /// Rows of blocks in the order of the source, put into that of the file.
    pub fn in_order(&self, rows: &[u8]) -> Vec<u8> {
        let size = rows.len() / self.rows().max(1);
        (0..self.rows()).flat_map(|row| &rows[self.row_there(row) * size..][..size]).copied().collect()
    }

    /// The source's row that becomes row `row` of the file.
    fn row_there(&self, row: usize) -> usize {
        match self.change {
            Change::Queries | Change::Keys => interleaved_row(row, self.head_dim),
            Change::None | Change::PlusOne => row,
        }
    }

    /// Rows `first..first + count` of the file.
    pub fn values(&self, first: usize, count: usize) -> Vec<f32> {
        let cols = self.cols();
        let mut out = vec![0.0; count * cols];
        match &self.values {
            // Biases turn with the rows they belong to.
            Values::Vector(values) => out.iter_mut().enumerate().for_each(|(i, out)| *out = values[self.row_there(i)]),
            Values::Matrix(weight) => out.par_chunks_mut(cols).enumerate().for_each(|(i, out)| {
                let row = self.row_there(first + i);
                weight.panel(row..row + 1, out);
            }),
        }
        if self.change == Change::PlusOne {
            plus_one(&mut out);
        }
        out
    }
}
