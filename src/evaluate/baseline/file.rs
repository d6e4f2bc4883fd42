//! Baselines as files, written whole and read with distrust.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use thiserror::Error;

use super::{BaselineCorpus, CorpusRecord, Header, Record};
use crate::evaluate::windows::Window;
use crate::format::output::{OutputError, write_atomic};

const MAGIC: &[u8; 8] = b"QKLBASE\0";
const VERSION: u32 = 1;
const HASH_BYTES: usize = 32;
/// Magic, version, length of the header.
const START: usize = 16;

/// Log-probabilities that a file may hold above 0, and masses above 1: what rounding explains.
const SLACK: f64 = 1e-6;

/// What is wrong with a baseline.
#[derive(Debug, Error)]
pub enum BaselineError {
    #[error("cannot read `{path}`: {why}")]
    Io { path: PathBuf, why: String },
    #[error("`{path}` is no baseline of quantkit: it does not begin with `QKLBASE`")]
    Magic { path: PathBuf },
    #[error(
        "`{path}` is a baseline of version {found}; version {VERSION} is read: write it again with --save-baseline"
    )]
    Version { path: PathBuf, found: u32 },
    #[error(
        "`{path}` is truncated or damaged: the hash of its {bytes} bytes is not the one at its end; copy it again, or \
         write it again with --save-baseline"
    )]
    Checksum { path: PathBuf, bytes: usize },
    #[error("`{path}`, byte {at}: {why}; the file is damaged")]
    Damaged { path: PathBuf, at: usize, why: String },
    #[error("the baseline cannot be written: {0}")]
    Content(String),
    #[error(transparent)]
    Write(#[from] OutputError),
}

/// A baseline on its way to a file.
#[derive(Debug)]
pub struct Writer {
    header: Header,
    body: Vec<u8>,
}

impl Writer {
    /// Starts a file; the header's corpora come with [`Writer::add`].
    pub fn new(header: Header) -> Self {
        Self { header: Header { corpora: Vec::new(), ..header }, body: Vec::new() }
    }

    /// Takes up a text. Its counts are taken from its windows and records, which must fit.
    pub fn add(&mut self, corpus: &BaselineCorpus) -> Result<(), BaselineError> {
        let BaselineCorpus { record, windows, records } = corpus;
        let positions: usize = windows.iter().map(Window::scored).sum();
        if positions != records.len() {
            let name = &record.name;
            return Err(BaselineError::Content(format!(
                "`{name}` has {} predictions and records of {}",
                positions,
                records.len()
            )));
        }
        let wide = is_wide(self.header.vocab);
        for Window { tokens, score_from } in windows {
            for number in [tokens.len(), *score_from] {
                self.body.extend((number as u32).to_le_bytes());
            }
            tokens.iter().for_each(|&id| put_id(&mut self.body, id, wide));
        }
        for record in records {
            for count in [record.ids.len(), record.drawn.len()] {
                let count = u16::try_from(count)
                    .map_err(|_| BaselineError::Content(format!("{count} tokens are kept; {} fit", u16::MAX)))?;
                self.body.extend(count.to_le_bytes());
            }
            for number in [record.tail_log_mass, record.tail_log_sum, record.target_log_prob] {
                self.body.extend(number.to_le_bytes());
            }
            record.ids.iter().for_each(|&id| put_id(&mut self.body, id, wide));
            record.log_probs.iter().for_each(|p| self.body.extend(p.to_le_bytes()));
            record.drawn.iter().for_each(|&(id, _)| put_id(&mut self.body, id, wide));
            record.drawn.iter().for_each(|(_, p)| self.body.extend(p.to_le_bytes()));
        }
        self.header.corpora.push(CorpusRecord { windows: windows.len(), positions, ..record.clone() });
        Ok(())
    }

    /// The whole file. Equal contents are equal bytes.
    pub fn bytes(&self) -> Result<Vec<u8>, BaselineError> {
        let header = serde_json::to_vec(&self.header).map_err(|e| BaselineError::Content(e.to_string()))?;
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((header.len() as u32).to_le_bytes());
        bytes.extend(header);
        bytes.extend_from_slice(&self.body);
        let hash = Sha256::digest(&bytes);
        bytes.extend_from_slice(&hash);
        Ok(bytes)
    }

    /// Writes it to `path`, whole or not at all; gives its size in bytes.
    pub fn write(&self, path: &Path) -> Result<usize, BaselineError> {
        let bytes = self.bytes()?;
        write_atomic(path, &bytes)?;
        Ok(bytes.len())
    }
}

/// A baseline that was read, all of it checked.
#[derive(Debug)]
pub struct Reader {
    pub header: Header,
    pub corpora: Vec<BaselineCorpus>,
    /// Size of the file.
    pub bytes: usize,
}

impl Reader {
    /// Opens a file.
    pub fn open(path: &Path) -> Result<Self, BaselineError> {
        let bytes = std::fs::read(path).map_err(|e| BaselineError::Io { path: path.into(), why: e.to_string() })?;
        Self::parse(&bytes, path)
    }

    /// Reads what a file holds; `path` is for messages.
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self, BaselineError> {
        if !bytes.starts_with(MAGIC) {
            return Err(BaselineError::Magic { path: path.into() });
        }
        let checksum = || BaselineError::Checksum { path: path.into(), bytes: bytes.len() };
        let (content, hash) = bytes
            .len()
            .checked_sub(HASH_BYTES)
            .filter(|&end| end >= START)
            .map(|end| bytes.split_at(end))
            .ok_or_else(checksum)?;
        let mut cursor = Cursor { content, at: MAGIC.len() };
        let damaged = |cursor: &Cursor, why: String| BaselineError::Damaged { path: path.into(), at: cursor.at, why };
        let version = cursor.u32().map_err(|why| damaged(&cursor, why))?;
        if version != VERSION {
            return Err(BaselineError::Version { path: path.into(), found: version });
        }
        if Sha256::digest(content).as_slice() != hash {
            return Err(checksum());
        }
        // Written by nobody's program perhaps, with a hash that is right all the same.
        let mut all = || {
            let length = cursor.u32()? as usize;
            let header: Header =
                serde_json::from_slice(cursor.take(length)?).map_err(|e| format!("the header is not valid: {e}"))?;
            if header.vocab == 0 || u32::try_from(header.vocab).is_err() {
                return Err(format!("the vocabulary has {} tokens", header.vocab));
            }
            let corpora =
                header.corpora.iter().map(|record| cursor.corpus(record, header.vocab)).collect::<Result<_, _>>()?;
            match cursor.content.len() - cursor.at {
                0 => Ok((header, corpora)),
                more => Err(format!("{more} bytes follow the last record")),
            }
        };
        let (header, corpora) = all().map_err(|why| damaged(&cursor, why))?;
        Ok(Self { header, corpora, bytes: bytes.len() })
    }

    /// Predicted tokens of all texts.
    pub fn positions(&self) -> usize {
        self.corpora.iter().map(|corpus| corpus.records.len()).sum()
    }

    /// The mean mass of what is not kept token by token.
    pub fn mean_tail_mass(&self) -> f64 {
        let masses = self.corpora.iter().flat_map(|c| &c.records).map(|r| r.tail_log_mass.exp());
        masses.sum::<f64>() / self.positions().max(1) as f64
    }
}

fn is_wide(vocab: usize) -> bool {
    vocab > 1 << 16
}

fn put_id(bytes: &mut Vec<u8>, id: u32, wide: bool) {
    let all = id.to_le_bytes();
    bytes.extend_from_slice(if wide { &all } else { &all[..2] });
}

/// What is left to read, and how far that is from the start.
struct Cursor<'a> {
    content: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], String> {
        let left = self.content.len() - self.at;
        if count > left {
            return Err(format!("{count} bytes are to come, {left} are left"));
        }
        let taken = &self.content[self.at..self.at + count];
        self.at += count;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    fn u32(&mut self) -> Result<u32, String> {
        self.array().map(u32::from_le_bytes)
    }

    fn f64(&mut self) -> Result<f64, String> {
        self.array().map(f64::from_le_bytes)
    }

    /// Ids of the vocabulary.
    fn ids(&mut self, count: usize, vocab: usize) -> Result<Vec<u32>, String> {
        let size = if is_wide(vocab) { 4 } else { 2 };
        let bytes = self.take(count.checked_mul(size).ok_or("too many tokens")?)?;
        let mut ids = Vec::with_capacity(count);
        for bytes in bytes.chunks_exact(size) {
            let id = bytes.iter().rev().fold(0, |id, &byte| id << 8 | u32::from(byte));
            if id as usize >= vocab {
                return Err(format!("token {id} is outside the vocabulary of {vocab}"));
            }
            ids.push(id);
        }
        Ok(ids)
    }

    /// Log-probabilities.
    fn log_probs(&mut self, count: usize) -> Result<Vec<f32>, String> {
        let values = self.take(4 * count)?.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b));
        values.map(|p| if is_log_prob(f64::from(p)) { Ok(p) } else { Err(no_log_prob(f64::from(p))) }).collect()
    }

    fn corpus(&mut self, record: &CorpusRecord, vocab: usize) -> Result<BaselineCorpus, String> {
        let name = &record.name;
        let mut windows = Vec::new();
        for number in 0..record.windows {
            let (tokens, score_from) = (self.u32()? as usize, self.u32()? as usize);
            if score_from == 0 || score_from >= tokens {
                return Err(format!(
                    "window {number} of `{name}` has {tokens} tokens, of which the first to be predicted is \
                     {score_from}"
                ));
            }
            windows.push(Window { tokens: self.ids(tokens, vocab)?, score_from });
        }
        let positions: usize = windows.iter().map(Window::scored).sum();
        if positions != record.positions || positions == 0 {
            return Err(format!("`{name}` is to have {} predictions; its windows have {positions}", record.positions));
        }
        let records = (0..positions)
            .map(|at| self.record(vocab).map_err(|why| format!("prediction {at} of `{name}`: {why}")))
            .collect::<Result<_, _>>()?;
        Ok(BaselineCorpus { record: record.clone(), windows, records })
    }

    fn record(&mut self, vocab: usize) -> Result<Record, String> {
        let (kept, drawn) = (self.array().map(u16::from_le_bytes)?, self.array().map(u16::from_le_bytes)?);
        let (kept, drawn) = (usize::from(kept), usize::from(drawn));
        let (tail_log_mass, tail_log_sum, target_log_prob) = (self.f64()?, self.f64()?, self.f64()?);
        if kept == 0 || kept > vocab {
            return Err(format!("{kept} tokens of {vocab} are kept"));
        }
        let (ids, log_probs) = (self.ids(kept, vocab)?, self.log_probs(kept)?);
        let (others, others_log_probs) = (self.ids(drawn, vocab)?, self.log_probs(drawn)?);
        if !log_probs.is_sorted_by(|a, b| a >= b) {
            return Err("the kept tokens are not in the order of their probabilities".into());
        }
        let mut sorted = ids.clone();
        sorted.sort_unstable();
        if let Some(twice) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(format!("token {} is kept twice", twice[0]));
        }
        if let Some(id) = others.iter().find(|id| sorted.binary_search(id).is_ok()) {
            return Err(format!("token {id} is kept, and drawn from those that are not"));
        }
        if !is_log_prob(target_log_prob) {
            return Err(no_log_prob(target_log_prob));
        }
        let empty = tail_log_mass == f64::NEG_INFINITY;
        if empty != (kept == vocab) || !(empty || is_log_prob(tail_log_mass)) || (empty && drawn > 0) {
            return Err(format!("{kept} of {vocab} tokens are kept, and ln of the others' mass is {tail_log_mass}"));
        }
        if !(tail_log_sum.is_finite() && tail_log_sum <= SLACK) {
            return Err(format!("the sum of p ln p is {tail_log_sum}"));
        }
        let mass = tail_log_mass.exp() + log_probs.iter().map(|&p| f64::from(p).exp()).sum::<f64>();
        if (mass - 1.0).abs() > 1e-4 {
            return Err(format!("the probabilities sum to {mass}"));
        }
        let drawn = others.into_iter().zip(others_log_probs).collect();
        Ok(Record { ids, log_probs, tail_log_mass, tail_log_sum, target_log_prob, drawn })
    }
}

fn is_log_prob(value: f64) -> bool {
    value.is_finite() && value <= SLACK
}

fn no_log_prob(value: f64) -> String {
    format!("{value} is no log-probability")
}
