//! What a recipe's folder remembers of each artifact: what it was made of, and the hash of every file, so that what is
//! unchanged is left alone and what is damaged is found.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::options::Step;
use crate::format::manifest::{self, FileRecord, Manifest, hash_files, sha256_bytes, sha256_file};
use crate::format::output::write_atomic;
use crate::format::{self, pretty};

/// Everything that decides an artifact; its hash is the key of a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Inputs {
    /// Program and version.
    pub tool: String,
    pub method: String,
    /// As the command has settled them, defaults included.
    pub options: BTreeMap<String, Vec<String>>,
    /// SHA-256 of the files that options name.
    pub files: BTreeMap<String, String>,
    /// The files of the model.
    pub source: Vec<FileRecord>,
}

/// What was made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Hash of the inputs.
    pub key: String,
    pub inputs: Inputs,
    /// Files of the artifact, by their paths in the recipe's folder; none until it is finished.
    pub outputs: Vec<FileRecord>,
    /// How long it took, on what.
    pub seconds: f64,
    pub device: String,
    /// Weights that were rounded, and what there was to compute.
    pub weights: u64,
    pub flops: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation: Option<Validation>,
}

/// What was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Validation {
    /// Hash of the artifact, the settings and the texts.
    pub key: String,
    /// The report, by its path in the recipe's folder.
    pub report: FileRecord,
    pub seconds: f64,
}

/// What is to be done about a step.
#[derive(Clone, Debug, PartialEq)]
pub enum State {
    UpToDate,
    New,
    /// What is no longer as it was.
    Changed(String),
    /// What is wrong with the files.
    Damaged(String),
}

impl State {
    pub fn name(&self) -> &'static str {
        match self {
            State::UpToDate => "up_to_date",
            State::New => "new",
            State::Changed(_) => "changed",
            State::Damaged(_) => "damaged",
        }
    }

    pub fn why(&self) -> Option<&str> {
        match self {
            State::UpToDate | State::New => None,
            State::Changed(why) | State::Damaged(why) => Some(why),
        }
    }
}

impl Inputs {
    /// Those of a step, with the files as they are now.
    pub fn of(step: &Step, source: &[FileRecord]) -> Result<Self> {
        let hash = |(key, path): (&String, &PathBuf)| Ok((key.clone(), sha256_file(path)?.0));
        Ok(Self {
            tool: concat!("quantkit ", env!("CARGO_PKG_VERSION")).into(),
            method: step.method.clone(),
            options: step.options.clone(),
            files: step.files.iter().map(hash).collect::<Result<_>>()?,
            source: source.to_vec(),
        })
    }

    pub fn key(&self) -> Result<String> {
        key(self)
    }

    /// The first thing in which these differ from earlier ones.
    fn difference(&self, earlier: &Inputs) -> String {
        if self.tool != earlier.tool {
            return format!("made by {}", earlier.tool);
        }
        if self.method != earlier.method {
            return format!("`method` was {}", earlier.method);
        }
        let said = |values: Option<&Vec<String>>| values.map_or("not given".into(), |values| values.join(", "));
        let keys = self.options.keys().chain(earlier.options.keys());
        for key in keys {
            let (now, then) = (self.options.get(key), earlier.options.get(key));
            if now != then {
                return format!("`{key}` was {}", said(then));
            }
        }
        if let Some(key) =
            self.files.keys().chain(earlier.files.keys()).find(|k| self.files.get(*k) != earlier.files.get(*k))
        {
            return format!("the file of `{key}` was another");
        }
        let other = |file: &&FileRecord| !earlier.source.contains(file);
        match self.source.iter().find(other).or_else(|| earlier.source.iter().find(|file| !self.source.contains(file)))
        {
            Some(file) => format!("`{}` of the model was another", file.file),
            None => "its inputs were others".into(),
        }
    }
}

/// SHA-256 of a value's JSON.
pub fn key(value: &impl Serialize) -> Result<String> {
    Ok(sha256_bytes(serde_json::to_string(value)?.as_bytes()))
}

/// The records of a recipe's folder.
pub struct Records {
    out: PathBuf,
}

impl Records {
    pub fn new(out: &Path) -> Self {
        Self { out: out.into() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.out.join("records").join(format!("{name}.json"))
    }

    /// The record of an artifact; one that cannot be read is as good as none.
    pub fn read(&self, name: &str) -> Option<Record> {
        serde_json::from_slice(&std::fs::read(self.path(name)).ok()?).ok()
    }

    /// All that there are, by name.
    pub fn all(&self) -> Vec<(String, Record)> {
        let entries = std::fs::read_dir(self.out.join("records")).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().to_str()?.strip_suffix(".json").map(Into::into)).collect();
        names.sort();
        names.into_iter().filter_map(|name| self.read(&name).map(|record| (name, record))).collect()
    }

    pub fn write(&self, name: &str, record: &Record) -> Result<()> {
        self.store(&self.path(name), &pretty(&serde_json::to_value(record)?))
    }

    /// Writes a file beside the reports; returns its record.
    pub fn write_page(&self, name: &str, text: &[u8]) -> Result<FileRecord> {
        let file = format!("reports/{name}");
        self.store(&self.out.join(&file), text)?;
        Ok(FileRecord { file, bytes: text.len() as u64, sha256: sha256_bytes(text) })
    }

    fn store(&self, path: &Path, text: &[u8]) -> Result<()> {
        if let Some(dir) = path.parent() {
            std::fs::create_dir_all(dir).with_context(|| format!("cannot create `{}`", dir.display()))?;
        }
        Ok(write_atomic(path, text)?)
    }

    /// What is to be done about an artifact with these inputs.
    pub fn state(&self, inputs: &Inputs, record: Option<&Record>) -> Result<State> {
        let Some(record) = record else { return Ok(State::New) };
        if record.key != inputs.key()? || record.inputs != *inputs {
            return Ok(State::Changed(inputs.difference(&record.inputs)));
        }
        if record.outputs.is_empty() {
            return Ok(State::Damaged("an earlier run did not finish it".into()));
        }
        Ok(match self.damage(&record.outputs)? {
            Some(why) => State::Damaged(why),
            None => State::UpToDate,
        })
    }

    /// The first of these files that is not as it was recorded.
    pub fn damage(&self, files: &[FileRecord]) -> Result<Option<String>> {
        for record in files {
            if let Some(mismatch) = manifest::compare(&self.out, record)? {
                return Ok(Some(mismatch.to_string()));
            }
        }
        Ok(None)
    }

    /// Records the files of a finished artifact.
    pub fn outputs(&self, target: &Path) -> Result<Vec<FileRecord>> {
        let name = target.file_name().context("an artifact has a name")?.to_string_lossy().into_owned();
        let mut files = Vec::new();
        match target.is_dir() {
            false => files.push(name),
            // Other files in the folder are the user's.
            true => {
                let written = Manifest::read(target)?.outputs.into_iter().map(|record| record.file);
                files.extend(written.chain([manifest::FILE.into()]).map(|file| format!("{name}/{file}")));
            }
        }
        files.sort();
        Ok(hash_files(&self.out, &files)?)
    }

    /// Removes the files of a damaged artifact, of which the record says that they are ours: without its manifest the
    /// command would take a folder for another's.
    pub fn clear(&self, record: &Record, target: &Path) {
        for file in &record.outputs {
            // What is gone need not be removed, and what stays is told of by whoever writes there.
            let path = self.out.join(&file.file);
            let _ = std::fs::remove_file(&path);
            // A folder inside goes with its last file.
            let _ = path.parent().filter(|dir| *dir != target && dir.starts_with(target)).map(std::fs::remove_dir);
        }
        let _ = std::fs::remove_dir(target);
    }
}

/// The files of the model at `dir` that an artifact may depend on.
pub fn source_files(dir: &Path) -> Result<Vec<FileRecord>> {
    let opened = format::open_path(dir)?;
    let checkpoint = opened.source.checkpoint();
    let mut names: Vec<String> = checkpoint.files().iter().map(|file| file.to_string()).collect();
    if !checkpoint.is_assembled() {
        names.push("config.json".into());
        names.extend(checkpoint.side_files()?);
    }
    names.sort();
    names.dedup();
    Ok(hash_files(checkpoint.dir(), &names)?)
}
