//! The search for NaN and infinity.

use std::collections::BTreeMap;

use rayon::prelude::*;

use super::Entry;
use crate::tensor::Dtype;

/// A tensor with values that are no numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct NonFinite {
    pub tensor: String,
    /// How many elements are NaN or infinite.
    pub count: usize,
    /// Index of the first one, row-major.
    pub first: usize,
}

pub fn non_finite(tensors: &BTreeMap<String, Entry>) -> Vec<NonFinite> {
    let entries: Vec<_> = tensors.iter().filter(|(_, e)| e.dtype.is_float()).collect();
    entries
        .into_par_iter()
        .filter_map(|(name, entry)| {
            let (first, count) = search(entry.dtype, &entry.bytes)?;
            Some(NonFinite { tensor: name.clone(), count, first })
        })
        .collect()
}

/// A float is NaN or infinite when all its exponent bits are set.
fn search(dtype: Dtype, bytes: &[u8]) -> Option<(usize, usize)> {
    match dtype {
        Dtype::F32 => bad(bytes
            .chunks_exact(4)
            .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]) & 0x7F80_0000 == 0x7F80_0000)),
        Dtype::F16 => bad(bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]) & 0x7C00 == 0x7C00)),
        _ => bad(bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]) & 0x7F80 == 0x7F80)),
    }
}

/// The first set flag and how many there are.
fn bad(flags: impl Iterator<Item = bool>) -> Option<(usize, usize)> {
    let mut positions = flags.enumerate().filter_map(|(i, bad)| bad.then_some(i));
    let first = positions.next()?;
    Some((first, 1 + positions.count()))
}
