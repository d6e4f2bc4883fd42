//! Files put together byte by byte, so that anything can be wrong with them.

use quantkit::format::gguf::parse::{Part, Problem, parse};

/// A file to be; what is not set is as it should be.
#[derive(Clone, Default)]
pub struct Raw {
    pub pairs: Vec<Vec<u8>>,
    pub tensors: Vec<Vec<u8>>,
    pub data: Vec<u8>,
    pub version: Option<u32>,
    pub pair_count: Option<i64>,
    pub tensor_count: Option<i64>,
    pub alignment: Option<usize>,
}

pub fn text(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
}

pub fn pair(key: &str, kind: u32, value: &[u8]) -> Vec<u8> {
    [&*text(key.as_bytes()), &kind.to_le_bytes(), value].concat()
}

/// An array of `count` elements, whose bytes need not fit.
pub fn array(key: &str, kind: u32, count: u64, elements: &[u8]) -> Vec<u8> {
    pair(key, 9, &[&kind.to_le_bytes()[..], &count.to_le_bytes(), elements].concat())
}

pub fn tensor(name: &str, extents: &[i64], kind: u32, offset: u64) -> Vec<u8> {
    let extent_bytes: Vec<u8> = extents.iter().flat_map(|e| e.to_le_bytes()).collect();
    let dims = (extents.len() as u32).to_le_bytes();
    [&*text(name.as_bytes()), &dims, &extent_bytes, &kind.to_le_bytes(), &offset.to_le_bytes()].concat()
}

impl Raw {
    /// Two keys and two tensors, nothing wrong.
    pub fn sound() -> Self {
        Raw {
            pairs: vec![pair("general.architecture", 8, &text(b"llama")), pair("llama.block_count", 4, &[1, 0, 0, 0])],
            tensors: vec![tensor("a.weight", &[32, 2], 2, 0), tensor("b.weight", &[3], 0, 64)],
            data: [&[1; 36][..], &[0; 28], &[2; 12], &[0; 20]].concat(),
            ..Raw::default()
        }
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.unwrap_or(3).to_le_bytes());
        out.extend(self.tensor_count.unwrap_or(self.tensors.len() as i64).to_le_bytes());
        out.extend(self.pair_count.unwrap_or(self.pairs.len() as i64).to_le_bytes());
        out.extend(self.pairs.concat());
        out.extend(self.tensors.concat());
        out.resize(out.len().next_multiple_of(self.alignment.unwrap_or(32)), 0);
        out.extend(&self.data);
        out
    }

    pub fn read(&self) -> Result<Part, Problem> {
        parse(self.bytes().into())
    }
}
