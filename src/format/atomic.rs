//! Output that is whole or absent: a hidden sibling is filled, synced, and renamed into place.

use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use super::manifest::{FileRecord, sha256_bytes, sha256_file};
use super::output::{OutputError, hidden, split, sync};
use super::replace::{files, refuse_collisions, retire};

/// A folder that appears under its name only once it is complete.
#[derive(Debug)]
pub struct OutputFolder {
    target: PathBuf,
    temporary: PathBuf,
    /// Parents that were not there before, the outermost first.
    made: Vec<PathBuf>,
    replaces: bool,
    committed: bool,
    /// Tells other runs that `temporary` is in use.
    _lock: Option<File>,
}

impl OutputFolder {
    /// Starts the folder `target`, which must not exist or be empty. Creates `.NAME.partial-PID` beside it,
    /// which proves that the parent can be written before any work starts. Missing parents are created.
    pub fn create(target: &Path) -> Result<Self, OutputError> {
        recover(target);
        Self::start(settle(target)?, false)
    }

    /// Like [`OutputFolder::create`], but a folder `target` may exist: on commit the artifact in it is replaced, by what
    /// its manifest lists; all other files in it stay.
    pub fn replace(target: &Path) -> Result<Self, OutputError> {
        recover(target);
        let target = fs::canonicalize(target).unwrap_or_else(|_| target.into());
        recover(&target);
        let replaces = target.is_dir();
        Self::start(if replaces { target } else { settle(&target)? }, replaces)
    }

    fn start(target: PathBuf, replaces: bool) -> Result<Self, OutputError> {
        let (parent, name) = split(&target)?;
        let refused = |source| OutputError::Parent { parent: parent.clone(), source };
        let absent = parent.ancestors().take_while(|p| *p != Path::new("") && !p.exists());
        let mut made: Vec<PathBuf> = absent.map(Path::to_path_buf).collect();
        made.reverse();
        fs::create_dir_all(&parent).map_err(|e| {
            remove_empty(&made);
            refused(e)
        })?;
        remove_abandoned(&parent, &name);
        // A killed run may have left a folder under the same process number.
        for attempt in 0.. {
            let suffix = if attempt == 0 { String::new() } else { format!("-{attempt}") };
            let temporary = parent.join(hidden(&name, "partial", &suffix));
            match fs::create_dir(&temporary) {
                Ok(()) => {
                    let lock = lock(&temporary).ok().flatten();
                    let folder = Self { target, temporary, made, replaces, committed: false, _lock: lock };
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
        let path = self.place(name)?;
        fs::write(&path, bytes).map_err(|source| OutputError::Io { path, source })?;
        Ok(FileRecord { file: name.into(), bytes: bytes.len() as u64, sha256: sha256_bytes(bytes) })
    }

    /// Copies the contents of `from` to the file `name`. Permissions are those of a new file: hub caches hold
    /// links to files that only their owner may read.
    pub fn copy(&self, from: &Path, name: &str) -> Result<FileRecord, OutputError> {
        let path = self.place(name)?;
        let unreadable = |source| OutputError::Io { path: from.into(), source };
        let mut input = File::open(from).map_err(unreadable)?;
        let write = |source| OutputError::Io { path: path.clone(), source };
        let mut output = File::create(&path).map_err(write)?;
        io::copy(&mut input, &mut output).map_err(write)?;
        let (sha256, bytes) = sha256_file(&path).map_err(|e| write(io::Error::other(e)))?;
        Ok(FileRecord { file: name.into(), bytes, sha256 })
    }

    /// The path of the file `name`, in a folder that is there.
    fn place(&self, name: &str) -> Result<PathBuf, OutputError> {
        let path = self.path().join(name);
        if let Some(folder) = path.parent().filter(|_| name.contains('/')) {
            fs::create_dir_all(folder).map_err(|source| OutputError::Io { path: folder.into(), source })?;
        }
        Ok(path)
    }

    /// Makes everything durable and gives the folder its name.
    pub fn commit(mut self) -> Result<(), OutputError> {
        sync_tree(&self.temporary)?;
        if self.replaces {
            return self.commit_replacing();
        }
        fs::rename(&self.temporary, &self.target).map_err(|source| match source.kind() {
            io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
                OutputError::Exists(self.target.clone())
            }
            _ => OutputError::Io { path: self.target.clone(), source },
        })?;
        self.committed = true;
        sync(&split(&self.target)?.0)
    }

    /// The folders change places. Where that cannot be done at once, the old one has another name for a moment;
    /// [`recover`] finishes what a kill interrupts.
    fn commit_replacing(mut self) -> Result<(), OutputError> {
        let (parent, name) = split(&self.target)?;
        let new = files(&self.temporary)?;
        refuse_collisions(&self.target, new.iter().filter_map(|path| path.to_str()))?;
        let io = |source| OutputError::Io { path: self.target.clone(), source };
        // What has this name is not removed unseen: after the exchange it holds the user's files.
        let aside = unused(&parent, &name);
        fs::rename(&self.temporary, &aside).map_err(io)?;
        self.temporary = aside;
        let mut old = self.temporary.clone();
        if exchange(&self.temporary, &self.target).is_err() {
            old = unused(&parent, &name);
            fs::rename(&self.target, &old).map_err(io)?;
            if let Err(e) = fs::rename(&self.temporary, &self.target) {
                // Better the old one than none; that the new one has no place is what matters.
                let _ = fs::rename(&old, &self.target);
                return Err(io(e));
            }
        }
        self.committed = true;
        sync(&parent)?;
        retire(&old, &self.target)?;
        sync(&self.target)
    }
}

impl Drop for OutputFolder {
    fn drop(&mut self) {
        if !self.committed {
            // Nobody is left to hear of a failure here, and a hidden folder is harmless.
            let _ = fs::remove_dir_all(&self.temporary);
            remove_empty(&self.made);
        }
    }
}

/// Removes folders that hold nothing, from the innermost to the outermost.
pub(super) fn remove_empty(folders: &[PathBuf]) {
    for folder in folders.iter().rev() {
        // One that something has come into meanwhile stays.
        let _ = fs::remove_dir(folder);
    }
}

/// Takes the folder for this process until the file is dropped; `None` if another process has it. An error
/// where the file system knows no locks on folders.
pub fn lock(dir: &Path) -> io::Result<Option<File>> {
    let file = File::open(dir)?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(e)) => Err(e),
    }
}

/// Lets two folders of one file system change places in one step.
#[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
fn exchange(a: &Path, b: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    Ok(renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE)?)
}

#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
fn exchange(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Brings back the folder `target` if a run was killed while it put another in its place, and finishes the replacement
/// if it was killed after that.
pub fn recover(target: &Path) {
    let Ok((parent, name)) = split(target) else { return };
    for aside in abandoned(&parent, &name, "replaced") {
        // What cannot be moved or removed stays for the user to find.
        match fs::symlink_metadata(target) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => drop(fs::rename(&aside, target)),
            _ => drop(retire(&aside, target)),
        }
    }
}

/// A name `.NAME.replaced-PID` that nothing has.
fn unused(parent: &Path, name: &OsString) -> PathBuf {
    let numbers = (0..).map(|i| if i == 0 { String::new() } else { format!("-{i}") });
    let mut paths = numbers.map(|suffix| parent.join(hidden(name, "replaced", &suffix)));
    paths.find(|path| fs::symlink_metadata(path).is_err()).unwrap_or_default()
}

/// Removes what killed runs left of the output `name`.
fn remove_abandoned(parent: &Path, name: &OsString) {
    for path in abandoned(parent, name, "partial") {
        if let Ok(Some(_held)) = lock(&path) {
            // What cannot be removed is no harm to this run.
            let _ = fs::remove_dir_all(path);
        }
    }
}

/// Folders and files `.NAME.WHAT-PID` of processes that are gone here. Others may hold them: the same folder may be seen
/// from another container.
pub(super) fn abandoned(parent: &Path, name: &OsString, what: &str) -> Vec<PathBuf> {
    let mut prefix = OsString::from(".");
    prefix.push(name);
    prefix.push(format!(".{what}-"));
    let is_abandoned = |file_name: &OsString| {
        let rest = file_name.as_encoded_bytes().strip_prefix(prefix.as_encoded_bytes());
        let Some(rest) = rest.and_then(|r| std::str::from_utf8(r).ok()) else { return false };
        let (process, attempt) = rest.split_once('-').unwrap_or((rest, "0"));
        attempt.parse::<u32>().is_ok() && process.parse().is_ok_and(is_gone)
    };
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> =
        entries.filter(|entry| is_abandoned(&entry.file_name())).map(|entry| entry.path()).collect();
    found.sort();
    found
}

fn is_gone(process: i32) -> bool {
    let known = rustix::process::Pid::from_raw(process).map(rustix::process::test_kill_process);
    matches!(known, Some(Err(rustix::io::Errno::SRCH)))
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

fn sync_tree(dir: &Path) -> Result<(), OutputError> {
    let io = |source| OutputError::Io { path: dir.into(), source };
    for entry in fs::read_dir(dir).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.is_dir() { sync_tree(&path)? } else { sync(&path)? }
    }
    sync(dir)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::output::write_atomic;
    use super::*;

    #[test]
    fn created_parents_go_again_unless_something_came_into_them() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("a/b/out");
        drop(OutputFolder::create(&target).unwrap());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        let out = OutputFolder::create(&target).unwrap();
        fs::write(dir.path().join("a/note"), "").unwrap();
        drop(out);
        assert!(dir.path().join("a/note").exists() && !dir.path().join("a/b").exists());
    }

    #[test]
    fn replacing() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        // Without a manifest everything in the folder is the user's.
        for (i, text) in ["first", "second"].into_iter().enumerate() {
            let out = OutputFolder::replace(&target).unwrap();
            out.write(text, b"").unwrap();
            assert!(!target.join(text).exists());
            out.commit().unwrap();
            assert_eq!(fs::read_dir(&target).unwrap().count(), i + 1);
            assert!(target.join(text).exists());
        }
        drop(OutputFolder::replace(&target).unwrap());
        assert!(target.join("second").exists());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    /// A run was killed between the two renames of a replacement, or just after them.
    #[test]
    fn old_folders_come_back() {
        let dir = tempfile::tempdir().unwrap();
        let (target, aside) = (dir.path().join("out"), dir.path().join(format!(".out.replaced-{}", i32::MAX)));
        fs::create_dir(&aside).unwrap();
        fs::write(aside.join("old"), "").unwrap();
        assert!(matches!(OutputFolder::create(&target), Err(OutputError::Exists(_))));
        assert!(target.join("old").exists() && !aside.exists());

        fs::create_dir(&aside).unwrap();
        drop(OutputFolder::replace(&target).unwrap());
        assert!(target.join("old").exists() && !aside.exists());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn folders_change_places() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        for path in [&a, &b] {
            fs::create_dir(path).unwrap();
        }
        fs::write(a.join("x"), "").unwrap();
        exchange(&a, &b).unwrap();
        assert!(b.join("x").exists() && !a.join("x").exists());
        assert!(exchange(&a, &dir.path().join("absent")).is_err());
    }

    #[test]
    fn abandoned_folders_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        // Process numbers end far below i32::MAX; 1 always lives; this process is not gone either.
        let gone = i32::MAX;
        let mine = std::process::id();
        let make = |name: String| fs::create_dir(dir.path().join(name)).unwrap();
        let stays = [
            ".out.partial-1".to_string(),
            format!(".out.partial-{mine}-7"),
            format!(".other.partial-{gone}"),
            format!(".out.partial-{gone}-x"),
            ".out.partial-".into(),
            ".out.quantkit-work".into(),
        ];
        stays.iter().cloned().for_each(make);
        [format!(".out.partial-{gone}"), format!(".out.partial-{gone}-3")].into_iter().for_each(make);
        let held = format!(".out.partial-{}", gone - 1);
        make(held.clone());
        let _lock = lock(&dir.path().join(&held)).unwrap().unwrap();
        assert!(lock(&dir.path().join(&held)).unwrap().is_none());

        drop(OutputFolder::create(&dir.path().join("out")).unwrap());
        let mut left: Vec<String> =
            fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        let mut wanted = stays.to_vec();
        wanted.push(held);
        left.sort();
        wanted.sort();
        assert_eq!(left, wanted);
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
