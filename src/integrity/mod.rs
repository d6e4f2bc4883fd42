//! Whether an artifact is whole, told from files alone: every tensor of its reference accounted for, weights that are
//! those of the reference, scales and zero points that mean something, labels that say what is there, side files that
//! came along.
//!
//! Each thing looked at gives at least one finding; a failure names the module or file, and says what to do.

mod accounting;
mod findings;
mod folds;
mod labels;
mod scales;
mod side;
mod weights;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use accounting::{Fate, TensorAccounting, TensorRecord};
use findings::Findings;
pub use findings::{Check, Status};
pub use weights::WeightError;

use crate::checkpoint::Checkpoint;
use crate::format::manifest::{self, Manifest, verify_manifest};
use crate::format::{self, FormatError, Opened};
use crate::model::config::ModelConfig;
use crate::model::config_error::ConfigError;

/// Why nothing can be said.
#[derive(Debug, Error)]
pub enum IntegrityError<E> {
    #[error("the reference cannot be opened")]
    Reference(#[source] FormatError),
    #[error("the config of the reference in `{dir}`")]
    Config { dir: PathBuf, source: ConfigError },
    /// What `progress` said.
    #[error(transparent)]
    Stopped(E),
}

/// What an artifact is, held against its reference.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Integrity {
    /// `None` where the artifact cannot be opened.
    pub accounting: Option<TensorAccounting>,
    pub findings: Vec<Check>,
}

impl Integrity {
    /// The worst of all findings.
    pub fn status(&self) -> Status {
        self.findings.iter().map(|finding| finding.status).max().unwrap_or(Status::Pass)
    }
}

/// An open model folder or GGUF file, with its config settled.
struct Side<'a> {
    opened: &'a Opened,
    config: &'a ModelConfig,
}

impl Side<'_> {
    fn checkpoint(&self) -> &Checkpoint {
        self.opened.source.checkpoint()
    }
}

/// A message in which files of the model at `path`, a folder or a file, are named from its folder on, and the folder by
/// its own name: what is found says nothing of where models lie.
pub fn named_inside(message: &str, path: &Path) -> String {
    let place = path.display().to_string();
    let place = place.trim_end_matches('/');
    let name = path.file_name().map_or_else(|| ".".into(), |name| name.to_string_lossy());
    let folder = if path.is_dir() { Some(place) } else { place.rsplit_once('/').map(|(folder, _)| folder) };
    let message = message.replace(&format!("`{place}`"), &format!("`{name}`"));
    folder.map_or(message.clone(), |folder| message.replace(&format!("`{folder}/"), "`"))
}

/// Holds the artifact at `artifact` against the model at `reference`, each a folder or a GGUF file. `progress` hears
/// how many linears of how many are done, and may stop the work. Findings name files from these folders on.
pub fn check<E>(
    artifact: &Path,
    reference: &Path,
    progress: &mut dyn FnMut(usize, usize) -> Result<(), E>,
) -> Result<Integrity, IntegrityError<E>> {
    let mut found = look(artifact, reference, progress)?;
    for Check { message, .. } in &mut found.findings {
        *message = named_inside(&named_inside(message, artifact), reference);
    }
    Ok(found)
}

fn look<E>(
    artifact: &Path,
    reference: &Path,
    progress: &mut dyn FnMut(usize, usize) -> Result<(), E>,
) -> Result<Integrity, IntegrityError<E>> {
    let original = format::open_path(reference).map_err(IntegrityError::Reference)?;
    let dir = reference.into();
    let config =
        ModelConfig::of(original.source.checkpoint()).map_err(|source| IntegrityError::Config { dir, source })?;
    let original = Side { opened: &original, config: &config };
    let mut findings = Findings::default();
    hashes(artifact, original.checkpoint(), &mut findings);
    let opened = match format::open_path(artifact) {
        Ok(opened) => opened,
        Err(error) => {
            findings.fail("files", error.to_string());
            if let Ok(checkpoint) = Checkpoint::open(artifact) {
                scales::scan(&checkpoint, &mut findings);
                side::check(&checkpoint, original.checkpoint(), &mut findings);
            }
            return Ok(Integrity { accounting: None, findings: findings.into_checks() });
        }
    };
    let count = opened.source.checkpoint().files().len();
    findings.otherwise("files", format!("{count} weight files, of the lengths that their headers tell"));
    labels::check(&opened, original.checkpoint(), &mut findings);
    scales::scan(opened.source.checkpoint(), &mut findings);
    side::check(opened.source.checkpoint(), original.checkpoint(), &mut findings);
    let own = match ModelConfig::of(opened.source.checkpoint()) {
        Ok(config) => config,
        Err(error) => {
            findings.fail("config", format!("the artifact's config cannot be run: {error}"));
            return Ok(Integrity { accounting: None, findings: findings.into_checks() });
        }
    };
    let quantized = Side { opened: &opened, config: &own };
    labels::compare(&quantized, &original, &mut findings);
    labels::tensors(&quantized, &original, &mut findings);
    let (compared, unread) =
        weights::compare(&quantized, &original, &mut findings, progress).map_err(IntegrityError::Stopped)?;
    let accounting = accounting::account(&quantized, &original, &compared, &unread, &mut findings);
    Ok(Integrity { accounting: Some(accounting), findings: findings.into_checks() })
}

/// Holds the files against `quantkit.json`, and the reference against what that says it read.
fn hashes(artifact: &Path, reference: &Checkpoint, findings: &mut Findings) {
    const ID: &str = "manifest";
    if !artifact.join(manifest::FILE).exists() {
        findings.otherwise(ID, format!("there is no `{}` to hold the files against", manifest::FILE));
        return;
    }
    match verify_manifest(artifact) {
        Ok(mismatches) => {
            for mismatch in mismatches {
                findings.fail(
                    ID,
                    format!("{mismatch}: the file was changed or damaged after it was written; copy it again"),
                );
            }
            findings.otherwise(ID, format!("every file is as `{}` says", manifest::FILE));
        }
        Err(error) => findings.fail(ID, error.to_string()),
    }
    let Ok(manifest) = Manifest::read(artifact) else { return };
    for record in manifest.source.iter().filter(|record| record.file != "config.json") {
        let path = reference.dir().join(&record.file);
        let known = reference.files().iter().any(|file| **file == *record.file);
        match known.then(|| manifest::sha256_file(&path)) {
            Some(Ok((hash, _))) if hash != record.sha256 => findings.warn(
                "source",
                format!(
                    "the artifact was made from another `{}` than that of the reference: give the model it was made from",
                    record.file
                ),
            ),
            _ => {}
        }
    }
    findings.otherwise("source", "no file of the reference is another than the one the artifact was made from");
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn files_are_named_from_their_folder_on() {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("w4");
        std::fs::create_dir(&model).unwrap();
        let file = dir.path().join("a.gguf");
        std::fs::write(&file, "").unwrap();
        let (place, root) = (model.display(), dir.path().display());
        let message =
            format!("module `x` in `{place}` is damaged, `{place}/sub/model.safetensors` and `{place}-other/a`");
        let wanted = format!("module `x` in `w4` is damaged, `sub/model.safetensors` and `{place}-other/a`");
        assert_eq!(named_inside(&message, &model), wanted);
        assert_eq!(named_inside(&message, &model.join("")), wanted);
        let message = format!("`{root}/a.gguf` and its part `{root}/a-00002-of-00002.gguf`");
        assert_eq!(named_inside(&message, &file), "`a.gguf` and its part `a-00002-of-00002.gguf`");
        assert_eq!(named_inside("`a.gguf`: cut off", Path::new("a.gguf")), "`a.gguf`: cut off");
    }
}
