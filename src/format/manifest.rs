//! `quantkit.json`: what made an artifact, and the hash of every file in it.
//!
//! Nothing in it depends on the clock or on where the folders lie, so that equal runs write equal bytes.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

use rayon::prelude::*;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use thiserror::Error;

use super::output::{OutputError, write_atomic};
use super::pretty;
use crate::num::hex::hex;

/// The manifest's name in an artifact folder.
pub const FILE: &str = "quantkit.json";

/// A file as it was read or written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FileRecord {
    /// Name inside its folder.
    pub file: String,
    pub bytes: u64,
    /// SHA-256, in lower-case hexadecimal.
    pub sha256: String,
}

/// The text that a method learned from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Calibration {
    /// Corpus, windows, and how they were cut, in words.
    pub description: String,
    /// SHA-256 of the token ids as little-endian u32, window after window.
    pub tokens_sha256: String,
}

/// What `quantkit.json` says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Program and version, such as `quantkit 0.1.0`.
    pub tool: String,
    /// The settings that made the artifact.
    pub options: Value,
    /// The files read.
    pub source: Vec<FileRecord>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<Calibration>,
    /// The files written, this one excepted.
    pub outputs: Vec<FileRecord>,
    /// Results by module.
    pub modules: Value,
}

/// Why a manifest cannot be written, read or checked.
#[derive(Debug, Error)]
pub enum ManifestError {
    #[error("cannot read `{path}`: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("`{path}` is no manifest of quantkit: {why}")]
    Invalid { path: PathBuf, why: String },
    #[error(transparent)]
    Write(#[from] OutputError),
}

/// A file that is not what the manifest says.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Mismatch {
    #[error("`{file}` is missing")]
    Missing { file: String },
    #[error("`{file}` has {found} bytes; the manifest says {wanted}")]
    Size { file: String, found: u64, wanted: u64 },
    #[error("`{file}` has SHA-256 {found}; the manifest says {wanted}")]
    Hash { file: String, found: String, wanted: String },
}

impl Manifest {
    /// The quantization method that the settings name.
    pub fn method(&self) -> Option<&str> {
        self.options.get("method")?.as_str()
    }

    /// Writes `quantkit.json` into `dir`.
    pub fn write(&self, dir: &Path) -> Result<(), ManifestError> {
        let path = dir.join(FILE);
        let invalid = |e: serde_json::Error| ManifestError::Invalid { path: path.clone(), why: e.to_string() };
        let value = serde_json::to_value(self).map_err(invalid)?;
        Ok(write_atomic(&path, &pretty(&value))?)
    }

    /// Reads the manifest of `dir`.
    pub fn read(dir: &Path) -> Result<Self, ManifestError> {
        let path = dir.join(FILE);
        let text = std::fs::read(&path).map_err(|source| ManifestError::Read { path: path.clone(), source })?;
        let invalid = |why: String| ManifestError::Invalid { path: path.clone(), why };
        let manifest: Self = serde_json::from_slice(&text).map_err(|e| invalid(e.to_string()))?;
        let inside = |name: &str| {
            !name.is_empty() && Path::new(name).components().all(|part| matches!(part, Component::Normal(_)))
        };
        match manifest.outputs.iter().find(|record| !inside(&record.file)) {
            Some(record) => Err(invalid(format!("`{}` lies outside the folder", record.file))),
            None => Ok(manifest),
        }
    }
}

/// Re-hashes the outputs that the manifest of `dir` names; what differs, in the manifest's order.
pub fn verify_manifest(dir: &Path) -> Result<Vec<Mismatch>, ManifestError> {
    let manifest = Manifest::read(dir)?;
    let found: Vec<Result<Option<Mismatch>, ManifestError>> =
        manifest.outputs.par_iter().map(|record| compare(dir, record)).collect();
    // The first fault in order is reported, whichever thread finds one first.
    let found: Vec<Option<Mismatch>> = found.into_iter().collect::<Result<_, _>>()?;
    Ok(found.into_iter().flatten().collect())
}

/// What is wrong with a file of `dir`, if anything.
pub fn compare(dir: &Path, record: &FileRecord) -> Result<Option<Mismatch>, ManifestError> {
    let FileRecord { file, bytes, sha256 } = record.clone();
    let path = dir.join(&file);
    if !path.is_file() {
        return Ok(Some(Mismatch::Missing { file }));
    }
    let (hash, size) = sha256_file(&path)?;
    Ok(if size != bytes {
        Some(Mismatch::Size { file, found: size, wanted: bytes })
    } else if hash != sha256 {
        Some(Mismatch::Hash { file, found: hash, wanted: sha256 })
    } else {
        None
    })
}

/// SHA-256 (hexadecimal) and size of the file at `path`.
pub fn sha256_file(path: &Path) -> Result<(String, u64), ManifestError> {
    let read = |source| ManifestError::Read { path: path.into(), source };
    let mut file = File::open(path).map_err(read)?;
    let mut buffer = vec![0; 1 << 20];
    let (mut hash, mut size) = (Sha256::new(), 0);
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok((hex(&hash.finalize()), size)),
            Ok(n) => {
                hash.update(&buffer[..n]);
                size += n as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(read(e)),
        }
    }
}

/// Hashes files of `dir`, several at a time; records come in the order of `names`.
pub fn hash_files<S: AsRef<str> + Sync>(dir: &Path, names: &[S]) -> Result<Vec<FileRecord>, ManifestError> {
    let record = |name: &S| {
        let file = name.as_ref().to_string();
        let (sha256, bytes) = sha256_file(&dir.join(&file))?;
        Ok(FileRecord { file, bytes, sha256 })
    };
    let records: Vec<Result<FileRecord, ManifestError>> = names.par_iter().map(record).collect();
    records.into_iter().collect()
}

/// SHA-256 of bytes in memory, in hexadecimal.
pub fn sha256_bytes(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn manifest(outputs: Vec<FileRecord>) -> Manifest {
        let (options, modules) = (serde_json::json!({"bits": 4}), serde_json::json!({"model.layers.0": {"loss": 0.5}}));
        let calibration = Some(Calibration { description: "two windows".into(), tokens_sha256: sha256_bytes(b"") });
        Manifest { tool: "quantkit 0.1.0".into(), options, source: vec![], calibration, outputs, modules }
    }

    #[test]
    fn known_hash() {
        assert_eq!(sha256_bytes(b"abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }

    #[test]
    fn differences_are_named() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["same", "longer", "changed", "gone"] {
            std::fs::write(dir.path().join(name), "12345").unwrap();
        }
        let outputs = hash_files(dir.path(), &["same", "longer", "changed", "gone"]).unwrap();
        let written = manifest(outputs);
        written.write(dir.path()).unwrap();
        assert_eq!(Manifest::read(dir.path()).unwrap(), written);
        assert_eq!(verify_manifest(dir.path()).unwrap(), []);

        std::fs::write(dir.path().join("longer"), "123456").unwrap();
        std::fs::write(dir.path().join("changed"), "12344").unwrap();
        std::fs::remove_file(dir.path().join("gone")).unwrap();
        let found = verify_manifest(dir.path()).unwrap();
        assert!(
            matches!(&found[..], [
                Mismatch::Size { found: 6, wanted: 5, .. },
                Mismatch::Hash { file, .. },
                Mismatch::Missing { .. }
            ] if file == "changed"),
            "{found:?}"
        );
    }

    #[test]
    fn equal_manifests_are_equal_bytes() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for dir in [&a, &b] {
            manifest(vec![]).write(dir.path()).unwrap();
        }
        let read = |dir: &tempfile::TempDir| std::fs::read(dir.path().join(FILE)).unwrap();
        assert_eq!(read(&a), read(&b));
    }

    #[test]
    fn names_stay_inside() {
        let dir = tempfile::tempdir().unwrap();
        let out = FileRecord { file: "../secret".into(), bytes: 0, sha256: String::new() };
        manifest(vec![out]).write(dir.path()).unwrap();
        assert!(matches!(verify_manifest(dir.path()), Err(ManifestError::Invalid { .. })));
    }
}
