//! Output that is whole or absent: a hidden sibling is filled, synced, and renamed into place.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::manifest::{FileRecord, sha256_bytes, sha256_file};

/// Why output cannot be written.
#[derive(Debug, Error)]
pub enum OutputError {
    #[error("`{0}` exists already; name a new folder or remove it first")]
    Exists(PathBuf),
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

/// A folder that appears under its name only once it is complete.
#[derive(Debug)]
pub struct OutputFolder {
    target: PathBuf,
    temporary: PathBuf,
    committed: bool,
}

impl OutputFolder {
    /// Starts the folder `target`, which must not exist or be empty. Creates `.NAME.partial-PID` beside it,
    /// which proves that the parent can be written before any work starts. Missing parents are created.
    pub fn create(target: &Path) -> Result<Self, OutputError> {
        let target = settle(target)?;
        let (parent, name) = split(&target)?;
        let refused = |source| OutputError::Parent { parent: parent.clone(), source };
        fs::create_dir_all(&parent).map_err(refused)?;
        // A killed run may have left a folder under the same process number.
        for attempt in 0.. {
            let suffix = if attempt == 0 { String::new() } else { format!("-{attempt}") };
            let temporary = parent.join(hidden(&name, &suffix));
            match fs::create_dir(&temporary) {
                Ok(()) => {
                    let folder = Self { target, temporary, committed: false };
                    let probe = folder.path().join(".probe");
                    File::create_new(&probe).and_then(|_| fs::remove_file(&probe)).map_err(refused)?;
                    return Ok(folder);
                }
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists && attempt < 1000 => {}
                Err(e) => return Err(refused(e)),
            }
        }
        unreachable!("the loop ends by returning")
    }

    /// Where the folder will be.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Where its files are written meanwhile.
    pub fn path(&self) -> &Path {
        &self.temporary
    }

    /// Writes the file `name`.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<FileRecord, OutputError> {
        let path = self.path().join(name);
        fs::write(&path, bytes).map_err(|source| OutputError::Io { path, source })?;
        Ok(FileRecord { file: name.into(), bytes: bytes.len() as u64, sha256: sha256_bytes(bytes) })
    }

    /// Copies the contents of `from` to the file `name`. Permissions are those of a new file: hub caches hold
    /// links to files that only their owner may read.
    pub fn copy(&self, from: &Path, name: &str) -> Result<FileRecord, OutputError> {
        let path = self.path().join(name);
        let unreadable = |source| OutputError::Io { path: from.into(), source };
        let mut input = File::open(from).map_err(unreadable)?;
        let write = |source| OutputError::Io { path: path.clone(), source };
        let mut output = File::create(&path).map_err(write)?;
        io::copy(&mut input, &mut output).map_err(write)?;
        let (sha256, bytes) = sha256_file(&path).map_err(|e| write(io::Error::other(e)))?;
        Ok(FileRecord { file: name.into(), bytes, sha256 })
    }

    /// Makes everything durable and gives the folder its name.
    pub fn commit(mut self) -> Result<(), OutputError> {
        sync_tree(&self.temporary)?;
        fs::rename(&self.temporary, &self.target).map_err(|source| match source.kind() {
            io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
                OutputError::Exists(self.target.clone())
            }
            _ => OutputError::Io { path: self.target.clone(), source },
        })?;
        self.committed = true;
        sync(&split(&self.target)?.0)
    }
}

impl Drop for OutputFolder {
    fn drop(&mut self) {
        if !self.committed {
            // Nobody is left to hear of a failure here, and a hidden folder is harmless.
            let _ = fs::remove_dir_all(&self.temporary);
        }
    }
}

/// The target with links resolved, if it exists as an empty folder; itself if it does not exist.
fn settle(target: &Path) -> Result<PathBuf, OutputError> {
    if fs::symlink_metadata(target).is_err() {
        return Ok(target.into());
    }
    let exists = || OutputError::Exists(target.into());
    let resolved = fs::canonicalize(target).map_err(|_| exists())?;
    let empty = fs::read_dir(&resolved).map_err(|_| exists())?.next().is_none();
    if empty { Ok(resolved) } else { Err(exists()) }
}

fn split(path: &Path) -> Result<(PathBuf, OsString), OutputError> {
    let name = path.file_name().ok_or_else(|| OutputError::NoName(path.into()))?;
    let parent = match path.parent() {
        Some(parent) if parent != Path::new("") => parent.into(),
        _ => PathBuf::from("."),
    };
    Ok((parent, name.into()))
}

fn hidden(name: &OsString, suffix: &str) -> OsString {
    let mut hidden = OsString::from(".");
    hidden.push(name);
    hidden.push(format!(".partial-{}{suffix}", std::process::id()));
    hidden
}

fn sync(path: &Path) -> Result<(), OutputError> {
    File::open(path).and_then(|f| f.sync_all()).map_err(|source| OutputError::Io { path: path.into(), source })
}

fn sync_tree(dir: &Path) -> Result<(), OutputError> {
    let io = |source| OutputError::Io { path: dir.into(), source };
    for entry in fs::read_dir(dir).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.is_dir() { sync_tree(&path)? } else { sync(&path)? }
    }
    sync(dir)
}

/// Replaces the file at `path` by `bytes`, or leaves it as it was.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<(), OutputError> {
    let (parent, name) = split(path)?;
    let temporary = parent.join(hidden(&name, ""));
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

    #[cfg(unix)]
    #[test]
    fn new_files_are_as_readable_as_any() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let mode = |p: &Path| fs::metadata(p).unwrap().permissions().mode() & 0o777;
        fs::write(dir.path().join("plain"), "").unwrap();
        write_atomic(&dir.path().join("atomic"), b"").unwrap();
        assert_eq!(mode(&dir.path().join("atomic")), mode(&dir.path().join("plain")));

        let private = dir.path().join("private");
        fs::write(&private, "x").unwrap();
        fs::set_permissions(&private, PermissionsExt::from_mode(0o400)).unwrap();
        let out = OutputFolder::create(&dir.path().join("out")).unwrap();
        out.copy(&private, "copy").unwrap();
        out.commit().unwrap();
        assert_eq!(mode(&dir.path().join("out/copy")), mode(&dir.path().join("plain")));
    }
}
