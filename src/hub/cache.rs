//! The folder of one model in the hub cache.
//!
//! ```text
//! models--org--name/blobs/<etag>               file contents
//!                   snapshots/<commit>/<name>  links into blobs
//!                   refs/<branch>              the commit a branch stood at
//!                   .quantkit/                 staging: what is still being downloaded, and a lock
//! ```

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::HubError;

/// One model's folder.
pub struct Store {
    id: String,
    root: PathBuf,
    folder: String,
}

impl Store {
    pub fn new(cache: &Path, id: &str) -> Self {
        let folder = format!("models--{}", id.replace('/', "--"));
        Self { id: id.into(), root: cache.join(&folder), folder }
    }

    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.root.join("snapshots").join(commit)
    }

    pub fn blob(&self, key: &str) -> PathBuf {
        self.root.join("blobs").join(key)
    }

    /// A hub cache of its own, inside the model's folder and so on the same file system.
    pub fn staging(&self) -> PathBuf {
        self.root.join(".quantkit")
    }

    /// A finished download in the staging cache.
    pub fn staged(&self, etag: &str) -> PathBuf {
        self.staging().join(&self.folder).join("blobs").join(etag)
    }

    /// An unfinished one, named as `hf-hub` names it.
    pub fn part(&self, etag: &str) -> PathBuf {
        self.staged(etag).with_extension("part")
    }

    /// Removes the links that the staging cache made: `hf-hub` fails where a dangling one is left.
    pub fn clear_staged_links(&self) {
        let _ = std::fs::remove_dir_all(self.staging().join(&self.folder).join("snapshots"));
    }

    /// Removes what staging holds, stale parts of other commits included, but for the lock.
    pub fn clear_staging(&self) {
        let _ = std::fs::remove_dir_all(self.staging().join(&self.folder));
    }

    /// Takes the model's lock, which lives as long as the file.
    pub fn lock(&self, wait: Duration) -> Result<File, HubError> {
        let path = self.staging().join("lock");
        create_folder(&self.staging())?;
        let file = File::options().create(true).append(true).open(&path).map_err(|e| failed(&path, &e))?;
        let end = Instant::now() + wait;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::Error(e)) => return Err(failed(&path, &e)),
                Err(TryLockError::WouldBlock) if Instant::now() >= end => {
                    return Err(HubError::Busy { id: self.id.clone() });
                }
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    /// Moves a checked download among the blobs.
    pub fn keep(&self, staged: &Path, key: &str) -> Result<(), HubError> {
        let blob = self.blob(key);
        create_folder(&self.root.join("blobs"))?;
        std::fs::rename(staged, &blob).map_err(|e| failed(&blob, &e))
    }

    /// Makes a blob appear as a file of the snapshot.
    pub fn link(&self, key: &str, commit: &str, name: &str) -> Result<PathBuf, HubError> {
        let path = self.snapshot(commit).join(name);
        let folder = path.parent().unwrap_or(&path);
        create_folder(folder)?;
        // Made beside and renamed over, so a dangling link from elsewhere is replaced and no reader finds a gap.
        let fresh = folder.join(format!(".link-{}", std::process::id()));
        let _ = std::fs::remove_file(&fresh);
        let up = "../".repeat(2 + name.matches('/').count());
        place(&self.blob(key), &format!("{up}blobs/{key}"), &fresh).map_err(|e| failed(&path, &e))?;
        std::fs::rename(&fresh, &path).map_err(|e| failed(&path, &e))?;
        Ok(path)
    }

    /// Records where a branch or tag stands.
    pub fn record(&self, revision: &str, commit: &str) -> Result<(), HubError> {
        let path = self.root.join("refs").join(revision);
        if revision == commit || std::fs::read_to_string(&path).is_ok_and(|old| old.trim() == commit) {
            return Ok(());
        }
        let folder = path.parent().unwrap_or(&path);
        create_folder(folder)?;
        let fresh = folder.join(format!(".ref-{}", std::process::id()));
        std::fs::write(&fresh, commit).and_then(|()| std::fs::rename(&fresh, &path)).map_err(|e| failed(&path, &e))
    }

    /// The snapshot folder of a revision, as far as the cache knows it.
    pub fn recorded(&self, revision: &str) -> Option<PathBuf> {
        let commit = std::fs::read_to_string(self.root.join("refs").join(revision));
        let commit = commit.map_or_else(|_| revision.to_string(), |commit| commit.trim().to_string());
        Some(commit).filter(|c| legal_commit(c)).map(|c| self.snapshot(&c)).filter(|dir| dir.is_dir())
    }
}

/// Names directly in a folder.
pub fn names(dir: &Path) -> Result<Vec<String>, HubError> {
    let entries = std::fs::read_dir(dir).map_err(|e| failed(dir, &e))?;
    Ok(entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect())
}

/// A commit becomes a folder name.
pub fn legal_commit(commit: &str) -> bool {
    (1..=64).contains(&commit.len()) && commit.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c))
}

/// A revision becomes a path below `refs` and a part of the address.
pub fn legal_revision(revision: &str) -> bool {
    let part = |part: &str| !part.is_empty() && !part.starts_with('.') && !part.contains("..");
    revision.len() <= 200
        && revision.chars().all(|c| c.is_ascii_alphanumeric() || "-_./".contains(c))
        && revision.split('/').all(part)
}

/// The blob's name for an etag, which a weak etag shares with its strong twin.
pub fn blob_key(etag: &str) -> Option<&str> {
    let key = etag.strip_prefix("W/").unwrap_or(etag);
    let legal = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
    ((1..=128).contains(&key.len()) && key.chars().all(legal)).then_some(key)
}

pub fn create_folder(path: &Path) -> Result<(), HubError> {
    std::fs::create_dir_all(path).map_err(|e| failed(path, &e))
}

pub fn failed(path: &Path, error: &std::io::Error) -> HubError {
    HubError::Io { path: path.into(), why: error.to_string() }
}

#[cfg(unix)]
fn place(_blob: &Path, relative: &str, link: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(relative, link)
}

#[cfg(not(unix))]
fn place(blob: &Path, _relative: &str, link: &Path) -> std::io::Result<()> {
    // Symbolic links ask for a privilege there.
    std::fs::hard_link(blob, link).or_else(|_| std::fs::copy(blob, link).map(|_| ()))
}
