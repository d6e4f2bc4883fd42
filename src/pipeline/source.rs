//! From the name of a model to its folder: a path, a hub id, or the built-in demo checkpoint.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use tempfile::TempDir;

use super::observer::Reporter;
use crate::format;
use crate::hub::{self, HubError, HubEvent, HubOptions};
use crate::num::size::bytes;

/// What the demo checkpoints are called.
const DEMO_NAME: &str = "quantkit-demo";
const DEMO_DRAFT_NAME: &str = "quantkit-demo-draft";

/// The files of the demo checkpoint.
const DEMO: [(&str, &[u8]); 5] = [
    ("config.json", include_bytes!("../../calib/demo/target/config.json")),
    ("generation_config.json", include_bytes!("../../calib/demo/target/generation_config.json")),
    ("model.safetensors", include_bytes!("../../calib/demo/target/model.safetensors")),
    ("tokenizer.json", include_bytes!("../../calib/demo/target/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../../calib/demo/target/tokenizer_config.json")),
];

/// The files of a small model with the same tokenizer.
const DEMO_DRAFT: [(&str, &[u8]); 5] = [
    ("config.json", include_bytes!("../../calib/demo/draft/config.json")),
    ("generation_config.json", include_bytes!("../../calib/demo/draft/generation_config.json")),
    ("model.safetensors", include_bytes!("../../calib/demo/draft/model.safetensors")),
    ("tokenizer.json", include_bytes!("../../calib/demo/target/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../../calib/demo/draft/tokenizer_config.json")),
];

/// A model folder that has been found.
pub struct Located {
    pub dir: PathBuf,
    /// What reports and default file names call it.
    pub name: String,
    /// Keeps a folder made for it, such as the unpacked demo checkpoint.
    _unpacked: Option<TempDir>,
}

/// A model in a folder that is gone with the result.
pub fn unpacked(dir: PathBuf, name: &str, folder: TempDir) -> Located {
    Located { dir, name: name.into(), _unpacked: Some(folder) }
}

/// The name of a model as users give it.
#[derive(Clone, Copy, Debug, Default)]
pub struct ModelSource<'a> {
    /// A path or a hub id; the built-in demo checkpoint where there is none.
    pub model: Option<&'a str>,
    /// A branch, tag or commit of a hub model.
    pub revision: Option<&'a str>,
}

impl<'a> From<&'a str> for ModelSource<'a> {
    fn from(model: &'a str) -> Self {
        Self { model: Some(model), revision: None }
    }
}

/// Finds the model: downloads it, or unpacks the demo, where need be.
///
/// # Errors
///
/// When a hub model cannot be fetched or the demo cannot be unpacked. Whether a path exists is not looked at.
pub fn locate<'a>(source: impl Into<ModelSource<'a>>, reporter: impl Into<Reporter>) -> Result<Located> {
    let (source, reporter) = (source.into(), &reporter.into());
    let Some(spec) = source.model else {
        warn_of_revision(&source, "the built-in demo checkpoint", reporter);
        reporter.note("no model given: using the built-in demo checkpoint (Llama architecture, 3.7 M parameters)");
        return unpack(DEMO_NAME, &DEMO, reporter);
    };
    let path = Path::new(spec);
    if !path.exists() && hub::looks_like_id(spec) {
        let mut options = HubOptions::from_env()?;
        options.revision = source.revision.map(Into::into);
        let dir = transfer(spec, reporter, |events| Ok(hub::fetch(spec, &options, events)?))?;
        let name = spec.rsplit('/').next().unwrap_or(spec).to_string();
        return Ok(Located { dir, name, _unpacked: None });
    }
    warn_of_revision(&source, &format!("`{spec}` on this machine"), reporter);
    let name = path.canonicalize().ok().and_then(|p| {
        let name = if p.is_file() { p.file_stem() } else { p.file_name() };
        name.map(|n| n.to_string_lossy().into_owned())
    });
    Ok(Located { dir: path.into(), name: name.unwrap_or_else(|| "model".into()), _unpacked: None })
}

/// The built-in draft of the demo checkpoint.
pub fn demo_draft(reporter: impl Into<Reporter>) -> Result<Located> {
    let reporter = &reporter.into();
    reporter.note("no draft given: using the built-in demo draft (0.7 M parameters)");
    unpack(DEMO_DRAFT_NAME, &DEMO_DRAFT, reporter)
}

fn unpack(name: &str, files: &[(&str, &[u8])], reporter: &Reporter) -> Result<Located> {
    let failed = "cannot unpack the demo checkpoint";
    let unpacked = tempfile::Builder::new().prefix("quantkit-").tempdir().context(failed)?;
    // Formats that tell the name of a model take that of its folder.
    let dir = unpacked.path().join(name);
    std::fs::create_dir(&dir).context(failed)?;
    reporter.renamed(&dir, Path::new(name));
    for (file, contents) in files {
        std::fs::write(dir.join(file), contents).context(failed)?;
    }
    Ok(Located { dir, name: name.into(), _unpacked: Some(unpacked) })
}

/// Lets `fetch` bring files of the hub model `spec`, and shows how they come.
pub fn transfer(
    spec: &str,
    reporter: impl Into<Reporter>,
    fetch: impl FnOnce(&mut hub::Events<'_>) -> Result<PathBuf>,
) -> Result<PathBuf> {
    let reporter = reporter.into();
    let (mut bar, mut size, mut done, mut fetched) = (None, 0, 0, 0);
    let dir = fetch(&mut |event| match event {
        HubEvent::FileStarted { name, bytes } => {
            (size, done) = (bytes, 0);
            bar = Some(reporter.transfer(&name, bytes));
        }
        HubEvent::Bytes(more) => {
            (done, fetched) = (done + more, fetched + more);
            if let Some(bar) = &mut bar {
                bar.set(done, size);
            }
        }
        HubEvent::FileDone { .. } => bar = None,
    })
    .map_err(|error| {
        let listing = error.downcast_ref().and_then(HubError::listing);
        listing.and_then(|files| format::foreign_listing(spec, files)).map_or(error, Into::into)
    })?;
    if fetched > 0 {
        reporter.note(format!("fetched {} of {spec}", bytes(fetched)));
    }
    Ok(dir)
}

fn warn_of_revision(source: &ModelSource, what: &str, reporter: &Reporter) {
    if let Some(revision) = source.revision {
        reporter.warn(format!("{what} has no revisions; --revision {revision} is ignored"));
    }
}

/// The last part of a path, for reports.
pub fn file_name(path: &Path) -> String {
    path.file_name().map_or_else(|| path.display().to_string(), |n| n.to_string_lossy().into_owned())
}
