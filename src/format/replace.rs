//! An artifact in the place of an older one: what its manifest lists is replaced, everything else in the folder is the
//! user's and stays.
//!
//! The folders change places as a whole. The old one then has a hidden name; the user's files move from it into the
//! new one, and what the manifest lists is removed, the manifest last. A kill in between leaves the old folder under a
//! name by which [`super::atomic::recover`] finds it and does the rest.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::manifest::{self, Manifest, compare};
use super::output::OutputError;

/// The files of `dir` that quantkit wrote, by their paths inside it: the manifest and what it lists. None without a
/// manifest.
fn written(dir: &Path) -> BTreeSet<PathBuf> {
    let Ok(manifest) = Manifest::read(dir) else { return BTreeSet::new() };
    let listed = manifest.outputs.into_iter().map(|record| PathBuf::from(record.file));
    listed.chain([PathBuf::from(manifest::FILE)]).collect()
}

/// What else `dir` holds, by paths inside it. A folder is named as a whole unless it holds some of `written`.
fn strangers(dir: &Path, written: &BTreeSet<PathBuf>) -> io::Result<Vec<PathBuf>> {
    let (mut found, mut folders) = (Vec::new(), vec![PathBuf::new()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(dir.join(&folder))? {
            let entry = entry?;
            let path = folder.join(entry.file_name());
            let is_folder = entry.file_type()?.is_dir();
            if is_folder && written.iter().any(|file| *file != path && file.starts_with(&path)) {
                folders.push(path);
            } else if is_folder || !written.contains(&path) {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

fn unreadable(path: &Path) -> impl Fn(io::Error) -> OutputError {
    move |source| OutputError::Io { path: path.into(), source }
}

/// Refuses files `names` of a new artifact that are in the way of files in `dir` which quantkit did not write.
pub fn refuse_collisions<'a>(dir: &Path, names: impl IntoIterator<Item = &'a str>) -> Result<(), OutputError> {
    if !dir.is_dir() {
        return Ok(());
    }
    let strangers = strangers(dir, &written(dir)).map_err(unreadable(dir))?;
    for name in names.into_iter().map(Path::new) {
        if let Some(found) = strangers.iter().find(|found| name.starts_with(found) || found.starts_with(name)) {
            return Err(OutputError::Foreign(dir.join(found)));
        }
    }
    Ok(())
}

/// Refuses to replace a file of the artifact in `dir` that is no longer as quantkit wrote it. All files are hashed.
pub fn refuse_changed(dir: &Path) -> Result<(), OutputError> {
    let Ok(manifest) = Manifest::read(dir) else { return Ok(()) };
    for record in &manifest.outputs {
        let path = dir.join(&record.file);
        let changed = match fs::metadata(&path) {
            Ok(found) if found.is_file() => compare(dir, record).map_or(true, |mismatch| mismatch.is_some()),
            // What is gone is not lost by replacing it; a folder in its place is not quantkit's.
            _ => false,
        };
        if changed {
            return Err(OutputError::Changed(path));
        }
    }
    Ok(())
}

/// All files in `dir`, by paths inside it.
pub(super) fn files(dir: &Path) -> Result<Vec<PathBuf>, OutputError> {
    let (mut found, mut folders) = (Vec::new(), vec![PathBuf::new()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(dir.join(&folder)).map_err(unreadable(dir))? {
            let entry = entry.map_err(unreadable(dir))?;
            let path = folder.join(entry.file_name());
            let is_folder = entry.file_type().map_err(unreadable(dir))?.is_dir();
            if is_folder { folders.push(path) } else { found.push(path) }
        }
    }
    Ok(found)
}

/// Ends a replacement: the user's files move from the old folder into the new one, the rest of the old one is removed.
/// What has a name that is taken stays where it is, and the old folder with it.
pub(super) fn retire(old: &Path, new: &Path) -> Result<(), OutputError> {
    let written = written(old);
    for path in strangers(old, &written).map_err(unreadable(old))? {
        let (from, to) = (old.join(&path), new.join(&path));
        if fs::symlink_metadata(&to).is_ok() {
            continue;
        }
        if let Some(folder) = to.parent() {
            fs::create_dir_all(folder).map_err(unreadable(folder))?;
        }
        fs::rename(&from, &to).map_err(unreadable(&from))?;
    }
    // Without its manifest all that is left would count as the user's, so that goes last.
    let listed = written.iter().filter(|path| *path != Path::new(manifest::FILE));
    for path in listed.chain([&PathBuf::from(manifest::FILE)]) {
        // What cannot be removed is harmless under a hidden name.
        let _ = fs::remove_file(old.join(path));
        let inside = path.ancestors().skip(1).filter(|folder| *folder != Path::new(""));
        inside.for_each(|folder| drop(fs::remove_dir(old.join(folder))));
    }
    let _ = fs::remove_dir(old);
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::super::atomic::{OutputFolder, recover};
    use super::*;

    /// An artifact of one file and one in a folder, with text in both.
    fn artifact(text: &str, more: &[&str]) -> impl Fn(&OutputFolder) {
        let (text, more) = (text.to_string(), more.iter().map(|name| name.to_string()).collect::<Vec<_>>());
        move |folder| {
            fs::create_dir(folder.path().join("sub")).unwrap();
            let names = ["weights", "sub/part"].into_iter().chain(more.iter().map(|name| &**name));
            let outputs = names.map(|name| folder.write(name, text.as_bytes()).unwrap()).collect();
            let empty = json!({});
            let manifest = Manifest {
                tool: "quantkit".into(),
                options: empty.clone(),
                source: vec![],
                calibration: None,
                outputs,
                modules: empty,
            };
            manifest.write(folder.path()).unwrap();
        }
    }

    fn put(target: &Path, fill: impl Fn(&OutputFolder)) -> Result<(), OutputError> {
        let folder = OutputFolder::replace(target)?;
        fill(&folder);
        folder.commit()
    }

    fn all(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            files(dir).unwrap().iter().map(|path| path.to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn only_what_was_written_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        put(&target, artifact("first", &["shard-2", "shard-3"])).unwrap();
        for (name, text) in [("README.md", "card"), (".git/HEAD", "ref"), ("sub/own", "note")] {
            fs::create_dir_all(target.join(name).parent().unwrap()).unwrap();
            fs::write(target.join(name), text).unwrap();
        }
        fs::create_dir(target.join("empty")).unwrap();
        put(&target, artifact("second", &["shard-2"])).unwrap();
        let wanted = [".git/HEAD", "README.md", "quantkit.json", "shard-2", "sub/own", "sub/part", "weights"];
        assert_eq!(all(&target), wanted);
        assert!(target.join("empty").is_dir());
        assert_eq!(fs::read(target.join("weights")).unwrap(), b"second");
        assert_eq!(fs::read(target.join("README.md")).unwrap(), b"card");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);

        // A name that the user's file has.
        let error = put(&target, artifact("third", &["README.md"])).unwrap_err();
        assert!(matches!(&error, OutputError::Foreign(path) if path.ends_with("out/README.md")), "{error}");
        assert!(matches!(refuse_collisions(&target, ["x", ".git"]), Err(OutputError::Foreign(_))));
        refuse_collisions(&target, ["x", "weights", "sub/part"]).unwrap();
        assert_eq!(all(&target), wanted);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn changed_files_are_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        put(&target, artifact("text", &["a.safetensors"])).unwrap();
        refuse_changed(&target).unwrap();
        fs::write(target.join("a.safetensors"), "text of another size").unwrap();
        assert!(matches!(refuse_changed(&target), Err(OutputError::Changed(path)) if path.ends_with("a.safetensors")));
        fs::remove_file(target.join("a.safetensors")).unwrap();
        refuse_changed(&target).unwrap();
        fs::write(target.join("sub/part"), "tex2").unwrap();
        assert!(matches!(refuse_changed(&target), Err(OutputError::Changed(path)) if path.ends_with("sub/part")));
    }

    /// Every state in which a kill can leave a replacement becomes the old or the new artifact, with the user's files.
    #[test]
    fn interrupted_replacements_are_finished() {
        type Step = fn(&Path, &Path, &Path);
        let states: [(&str, Step); 5] = [
            // Before the folders change places: the new one has its second name.
            ("first", |_, aside, new| fs::rename(new, aside).unwrap()),
            // After that.
            ("second", |target, aside, new| {
                fs::rename(target, aside).unwrap();
                fs::rename(new, target).unwrap();
            }),
            // Some of the user's files have moved.
            ("second", |target, aside, new| {
                fs::rename(target, aside).unwrap();
                fs::rename(new, target).unwrap();
                fs::rename(aside.join("README.md"), target.join("README.md")).unwrap();
            }),
            // Some of the old artifact is gone.
            ("second", |target, aside, new| {
                fs::rename(target, aside).unwrap();
                fs::rename(new, target).unwrap();
                fs::remove_file(aside.join("weights")).unwrap();
            }),
            // Where folders cannot change places in one step: neither has the name.
            ("first", |target, aside, new| {
                fs::rename(target, aside).unwrap();
                fs::remove_dir_all(new).unwrap();
            }),
        ];
        for (i, (text, kill)) in states.into_iter().enumerate() {
            let dir = tempfile::tempdir().unwrap();
            let (target, new) = (dir.path().join("out"), dir.path().join("new"));
            put(&target, artifact("first", &[])).unwrap();
            fs::write(target.join("README.md"), "card").unwrap();
            put(&new, artifact("second", &[])).unwrap();
            // Process numbers end far below i32::MAX.
            kill(&target, &dir.path().join(format!(".out.replaced-{}", i32::MAX)), &new);
            recover(&target);
            assert_eq!(all(&target), ["README.md", "quantkit.json", "sub/part", "weights"], "state {i}");
            assert_eq!(fs::read_to_string(target.join("weights")).unwrap(), text, "state {i}");
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "state {i}");
        }
    }
}
