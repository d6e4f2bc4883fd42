//! A compact baseline: what a reference predicts on some texts, in megabytes where all log-probabilities take
//! gigabytes, so that a later artifact can be compared without the reference.
//!
//! A file is little-endian:
//!
//! ```text
//! "QKLBASE\0"  u32 version (1)  u32 length of the header
//! header       JSON, see [`Header`]
//! each corpus  its windows: u32 tokens, u32 first predicted token, ids;
//!              then for each predicted token
//!                u16 kept tokens k, u16 drawn tokens m,
//!                f64 log of the tail's mass, f64 its sum of p ln p, f64 log-probability of the true token,
//!                k ids, k f32 log-probabilities, m ids, m f32 log-probabilities
//! SHA-256 of all before
//! ```
//!
//! An id takes two bytes where the vocabulary has at most 65536 tokens, otherwise four.

mod file;
mod record;

pub use file::{BaselineError, Reader, Writer};
pub use record::{MOST, Record, Settings};

use serde::{Deserialize, Serialize};

use super::windows::{Convention, Window};
use crate::checkpoint::Checkpoint;
use crate::format::manifest::{ManifestError, hash_files, sha256_bytes};

/// What a file says about itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// Program and version that wrote it.
    pub tool: String,
    pub reference: ReferenceRecord,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    pub settings: Settings,
    pub corpora: Vec<CorpusRecord>,
}

/// The model whose predictions these are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReferenceRecord {
    pub name: String,
    /// SHA-256 over names and SHA-256 of its weight files and its config.
    pub sha256: String,
    /// SHA-256 of its `tokenizer.json`.
    pub tokenizer_sha256: Option<String>,
}

impl ReferenceRecord {
    /// Reads all files of the model once.
    pub fn of(name: &str, checkpoint: &Checkpoint) -> Result<Self, ManifestError> {
        let mut files: Vec<&str> = checkpoint.files().iter().map(|file| &**file).collect();
        if !checkpoint.is_assembled() {
            files.push("config.json");
        }
        let records = hash_files(checkpoint.dir(), &files)?;
        let lines: String = records.iter().map(|record| format!("{} {}\n", record.sha256, record.file)).collect();
        Ok(Self {
            name: name.into(),
            sha256: sha256_bytes(lines.as_bytes()),
            tokenizer_sha256: tokenizer_sha256(checkpoint),
        })
    }
}

/// SHA-256 of a model's `tokenizer.json`, if there is one that can be read.
pub fn tokenizer_sha256(checkpoint: &Checkpoint) -> Option<String> {
    let text = checkpoint.side_text("tokenizer.json").ok().flatten()?;
    Some(sha256_bytes(text.as_bytes()))
}

/// A text, and how it was cut.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CorpusRecord {
    pub name: String,
    pub text_sha256: String,
    pub convention: Convention,
    /// Tokens a window, as asked for.
    pub window: usize,
    /// `none`, `once` or `window`.
    pub bos: String,
    pub windows: usize,
    /// Predicted tokens of all windows.
    pub positions: usize,
}

/// A text's windows, and what the reference predicted: a record a predicted token, window after window.
#[derive(Clone, Debug, PartialEq)]
pub struct BaselineCorpus {
    pub record: CorpusRecord,
    pub windows: Vec<Window>,
    pub records: Vec<Record>,
}
