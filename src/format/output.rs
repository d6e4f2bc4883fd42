//! Files that are whole or absent, and the room for them.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Why output cannot be written.
#[derive(Debug, Error)]
pub enum OutputError {
    #[error("`{0}` exists already; name a new folder or remove it first")]
    Exists(PathBuf),
    #[error(
        "`{0}` is not quantkit's, and the new artifact has a file of this name; move it away or choose another output folder"
    )]
    Foreign(PathBuf),
    #[error("`{0}` is not as quantkit wrote it; to replace it all the same, remove it or move it away first")]
    Changed(PathBuf),
    #[error("`{0}` does not end in the name of a folder to create")]
    NoName(PathBuf),
    #[error("cannot write in `{parent}`: {source}; choose another output folder")]
    Parent { parent: PathBuf, source: io::Error },
    #[error("cannot write `{path}`: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error(
        "the output needs {} MB, but `{path}` has {} MB free; make room or choose another output folder",
        megabytes(*.needed),
        .free / 1_000_000
    )]
    Space { path: PathBuf, needed: u64, free: u64 },
}

/// Rounded up, so that what is needed is never shown smaller than it is.
fn megabytes(bytes: u64) -> u64 {
    bytes.div_ceil(1_000_000)
}

pub(super) fn split(path: &Path) -> Result<(PathBuf, OsString), OutputError> {
    let name = path.file_name().ok_or_else(|| OutputError::NoName(path.into()))?;
    let parent = match path.parent() {
        Some(parent) if parent != Path::new("") => parent.into(),
        _ => PathBuf::from("."),
    };
    Ok((parent, name.into()))
}

/// `.NAME.WHAT-PID`
pub(super) fn hidden(name: &OsString, what: &str, suffix: &str) -> OsString {
    let mut hidden = OsString::from(".");
    hidden.push(name);
    hidden.push(format!(".{what}-{}{suffix}", std::process::id()));
    hidden
}

pub(super) fn sync(path: &Path) -> Result<(), OutputError> {
    File::open(path).and_then(|f| f.sync_all()).map_err(|source| OutputError::Io { path: path.into(), source })
}

/// Replaces the file at `path` by `bytes`, or leaves it as it was.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<(), OutputError> {
    let (parent, name) = split(path)?;
    let temporary = parent.join(hidden(&name, "partial", ""));
    let io = |source| OutputError::Io { path: path.into(), source };
    let written = File::create(&temporary).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    if let Err(e) = written.and_then(|()| fs::rename(&temporary, path)) {
        // The error that is reported matters more than one while tidying up.
        let _ = fs::remove_file(&temporary);
        return Err(io(e));
    }
    sync(&parent)
}

/// Bytes that an ordinary user may still write where `path` is, or will be.
pub fn free_space(path: &Path) -> Result<u64, OutputError> {
    let here = path.ancestors().find(|p| p.exists()).unwrap_or(Path::new("."));
    let stat = rustix::fs::statvfs(here).map_err(|e| OutputError::Io { path: here.into(), source: e.into() })?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Refuses unless `bytes` fit where `path` is, or will be.
pub fn require_space(path: &Path, bytes: u64) -> Result<(), OutputError> {
    let free = free_space(path)?;
    if bytes > free { Err(OutputError::Space { path: path.into(), needed: bytes, free }) } else { Ok(()) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn space_is_told_in_megabytes() {
        let dir = tempfile::tempdir().unwrap();
        require_space(&dir.path().join("not/yet/there"), 1).unwrap();
        let error = require_space(dir.path(), u64::MAX).unwrap_err();
        assert!(matches!(error, OutputError::Space { needed: u64::MAX, .. }));
        let text = OutputError::Space { path: "out".into(), needed: 1_500_001, free: 999_999 }.to_string();
        assert!(text.contains("needs 2 MB") && text.contains("`out` has 0 MB"), "{text}");
    }

    #[test]
    fn single_files_are_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("report.json");
        write_atomic(&path, b"one").unwrap();
        write_atomic(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        assert!(write_atomic(&dir.path().join("absent/report.json"), b"").is_err());
    }
}
