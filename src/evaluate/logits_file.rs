//! The file in which llama.cpp's `llama-perplexity` keeps what a model predicts (`--kl-divergence-base`).
//!
//! `_logits_`, then the window length, the size of the vocabulary and the number of windows (u32, i32, i32), the
//! tokens of all windows (i32), and for each prediction of the second half of each window a record of u16 words:
//! two f32, scale and least log-probability, then a code a token, and a pad to an even number. The log-probability is
//! `scale * code + least`; codes reach 16 nats down from the largest, and what is below has code 0.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use thiserror::Error;

const MAGIC: &[u8; 8] = b"_logits_";
const HEADER_BYTES: u64 = 20;

/// What is wrong with a file of logits.
#[derive(Debug, Error)]
pub enum LogitsFileError {
    #[error("cannot read `{path}`: {why}")]
    Io { path: PathBuf, why: String },
    #[error("`{path}` is no logits file of llama.cpp: it does not begin with `_logits_`")]
    Magic { path: PathBuf },
    #[error("`{path}`: {what} is {value}, which cannot be; the file is damaged")]
    Count { path: PathBuf, what: &'static str, value: i64 },
    #[error(
        "`{path}` has {found} bytes, and {chunks} windows of {window} tokens over {vocab} entries take {wanted}: the \
         file is truncated or damaged; was the program that wrote it interrupted?"
    )]
    Size { path: PathBuf, found: u64, wanted: String, chunks: usize, window: usize, vocab: usize },
    #[error("`{path}`: token {index} is {token}, outside the vocabulary of {vocab}; the file is damaged")]
    Token { path: PathBuf, index: usize, token: i32, vocab: usize },
    #[error("`{path}`, prediction {record}: scale {scale} and least log-probability {least}; the file is damaged")]
    Record { path: PathBuf, record: u64, scale: f32, least: f32 },
}

/// An open file, its records read one after another.
#[derive(Debug)]
pub struct LogitsFile {
    path: PathBuf,
    input: BufReader<File>,
    /// Tokens of a window.
    pub window: usize,
    pub vocab: usize,
    /// Of all windows, one after another, as the text was tokenized; where llama.cpp adds BOS, the model read BOS in
    /// place of the first token of each.
    pub tokens: Vec<u32>,
    /// Records read so far.
    record: u64,
}

/// What the reference predicts at one position.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    pub scale: f32,
    pub least: f32,
    pub codes: Vec<u16>,
}

impl Record {
    /// The log-probability of a token.
    pub fn log_prob(&self, token: usize) -> f64 {
        f64::from(self.scale) * f64::from(self.codes[token]) + f64::from(self.least)
    }
}

impl LogitsFile {
    /// Opens a file; its counts must fit its size.
    pub fn open(path: &Path) -> Result<Self, LogitsFileError> {
        let io = |e: std::io::Error| LogitsFileError::Io { path: path.into(), why: e.to_string() };
        let file = File::open(path).map_err(io)?;
        let found = file.metadata().map_err(io)?.len();
        let mut input = BufReader::with_capacity(1 << 20, file);
        let mut header = [0; HEADER_BYTES as usize];
        if found >= HEADER_BYTES {
            input.read_exact(&mut header).map_err(io)?;
        } else {
            let head = found as usize;
            input.read_exact(&mut header[..head]).map_err(io)?;
        }
        if &header[..8] != MAGIC {
            return Err(LogitsFileError::Magic { path: path.into() });
        }
        let count = |at: usize, what, least: i32| {
            let value = i32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
            match usize::try_from(value) {
                Ok(count) if value >= least => Ok(count),
                _ => Err(LogitsFileError::Count { path: path.into(), what, value: value.into() }),
            }
        };
        let window = count(8, "the window length", 3)?;
        let vocab = count(12, "the size of the vocabulary", 1)?;
        let chunks = count(16, "the number of windows", 1)?;
        let records = chunks as u128 * (window - 1 - window / 2) as u128;
        let wanted =
            u128::from(HEADER_BYTES) + 4 * chunks as u128 * window as u128 + records * 2 * record_words(vocab) as u128;
        if u128::from(found) != wanted {
            let (path, wanted) = (path.into(), wanted.to_string());
            return Err(LogitsFileError::Size { path, found, wanted, chunks, window, vocab });
        }
        let mut bytes = vec![0; 4 * chunks * window];
        input.read_exact(&mut bytes).map_err(io)?;
        let mut tokens = Vec::with_capacity(chunks * window);
        for (index, bytes) in bytes.as_chunks::<4>().0.iter().enumerate() {
            let token = i32::from_le_bytes(*bytes);
            match u32::try_from(token) {
                Ok(id) if (id as usize) < vocab => tokens.push(id),
                _ => return Err(LogitsFileError::Token { path: path.into(), index, token, vocab }),
            }
        }
        Ok(Self { path: path.into(), input, window, vocab, tokens, record: 0 })
    }

    /// Index of the first token of a window that is predicted by a record; all after it are as well.
    pub fn score_from(&self) -> usize {
        self.window / 2 + 1
    }

    /// The next `count` records.
    pub fn records(&mut self, count: usize) -> Result<Vec<Record>, LogitsFileError> {
        (0..count).map(|_| self.next_record()).collect()
    }

    fn next_record(&mut self) -> Result<Record, LogitsFileError> {
        let Self { path, input, vocab, record, .. } = self;
        let mut bytes = vec![0; 2 * record_words(*vocab)];
        let io = |e: std::io::Error| LogitsFileError::Io { path: path.clone(), why: e.to_string() };
        input.read_exact(&mut bytes).map_err(io)?;
        let float = |at: usize| f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let (scale, least) = (float(0), float(4));
        if !(scale.is_finite() && least.is_finite() && scale >= 0.0) {
            return Err(LogitsFileError::Record { path: path.clone(), record: *record, scale, least });
        }
        *record += 1;
        let codes = bytes[8..].as_chunks::<2>().0.iter().take(*vocab).map(|b| u16::from_le_bytes(*b)).collect();
        Ok(Record { scale, least, codes })
    }
}

/// Bytes that the file takes for a prediction over a vocabulary of this size.
pub fn record_bytes(vocab: usize) -> usize {
    2 * record_words(vocab)
}

/// Words of a record: four for the two floats, and an even number of codes.
fn record_words(vocab: usize) -> usize {
    4 + vocab.next_multiple_of(2)
}
