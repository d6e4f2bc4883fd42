//! The file as it is written.

use std::collections::BTreeMap;

use anyhow::{Context, Result};

use super::super::observer::{Progress, Reporter};
use super::importance::Given;
use super::tensors::Tensor;
use crate::format::gguf::select::is_quantized;
use crate::format::gguf::write::{Writer, layer};
use crate::num::ggml::GgmlType;
use crate::pack::ggml::encode;

/// Values encoded at once, so that memory is bounded whatever the model.
const VALUES_AT_ONCE: usize = 8 << 20;

/// The file as it is written: tensors in the planned order.
pub struct Output<'a> {
    pub writer: Writer,
    pub planned: &'a [(&'a Tensor, GgmlType)],
    pub next: usize,
    pub imatrix: Option<&'a Given>,
    pub reporter: &'a Reporter,
    pub steps: Box<dyn Progress>,
}

impl Output<'_> {
    /// Writes all tensors up to those of layer `last`; the bytes of some may be there already, rows as the source has
    /// them.
    pub fn put_through(&mut self, last: i64, encoded: &BTreeMap<String, Vec<u8>>) -> Result<()> {
        while let Some(&(tensor, kind)) = self.planned.get(self.next).filter(|(tensor, _)| layer(&tensor.name) <= last)
        {
            match encoded.get(&tensor.name) {
                Some(bytes) => self.writer.put(&tensor.name, &tensor.in_order(bytes))?,
                None => self.encode(tensor, kind)?,
            }
            self.steps.step(&format!("{} {}", tensor.name, kind.name()));
            self.next += 1;
        }
        Ok(())
    }

    fn encode(&mut self, tensor: &Tensor, kind: GgmlType) -> Result<()> {
        let importance = match self.imatrix {
            Some(given) if is_quantized(&tensor.name, &tensor.shape) => {
                given.imatrix.importance(&tensor.name, tensor.cols(), 1)?
            }
            _ => None,
        };
        let at_once = (VALUES_AT_ONCE / tensor.cols().max(1)).max(1);
        for first in (0..tensor.rows()).step_by(at_once) {
            self.reporter.check()?;
            let count = at_once.min(tensor.rows() - first);
            let stored = if tensor.stored == kind { tensor.as_stored(first, count) } else { None };
            match stored {
                Some(stored) => self.writer.put(&tensor.name, &stored)?,
                None => {
                    let values = tensor.values(first, count);
                    let encoded = encode(kind, &values, tensor.cols(), importance.as_deref());
                    self.writer.put(&tensor.name, &encoded.with_context(|| format!("tensor `{}`", tensor.name))?)?;
                }
            }
        }
        Ok(())
    }
}
