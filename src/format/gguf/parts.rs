//! Split files in the place of earlier ones. Names of parts count the parts, so that sets of different sizes lie beside
//! each other; parts of equal sets replace each other, all or none.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::read::GgufFile;
use super::value::Value;
use super::{parse_part_name, part_name};
use crate::format::atomic;
use crate::format::output::{self, OutputError};
use crate::num::ggml::GgmlType;

/// Files under their new names, one of which may have taken the place of another.
type Moved = Vec<(PathBuf, PathBuf)>;

/// Gives hidden files their names: `(hidden, name)`, first part first. What has these names is put aside before, first
/// part first, and removed after; new parts come last part first. So the first part is there exactly when all parts are
/// of one set, and [`recover`] can tell what a kill left.
pub(super) fn put(files: &[(&Path, &Path)]) -> io::Result<()> {
    if let [(hidden, name)] = files {
        return fs::rename(hidden, name);
    }
    let (mut aside, mut placed) = (Moved::new(), Vec::new());
    let done = set_aside(files, &mut aside).and_then(|()| {
        files.iter().rev().try_for_each(|(hidden, name)| {
            fs::rename(hidden, name)?;
            placed.push(*name);
            Ok(())
        })
    });
    if done.is_err() {
        // The first error is the one to report; parts without a first one are of no use.
        placed.iter().for_each(|name| drop(fs::remove_file(name)));
        aside.iter().rev().for_each(|(name, aside)| drop(fs::rename(aside, name)));
        return done;
    }
    // What cannot be removed is harmless under a hidden name.
    aside.iter().for_each(|(_, aside)| drop(fs::remove_file(aside)));
    Ok(())
}

fn set_aside(files: &[(&Path, &Path)], aside: &mut Moved) -> io::Result<()> {
    for (_, name) in files.iter().filter(|(_, name)| fs::symlink_metadata(name).is_ok()) {
        let hidden = name.with_file_name(output::hidden(&name.file_name().unwrap_or_default().into(), "replaced", ""));
        fs::rename(name, &hidden)?;
        aside.push((name.to_path_buf(), hidden));
    }
    Ok(())
}

/// Ends what a killed [`put`] of these names began: with a first part the new set is whole, without it the earlier one
/// comes back.
pub(super) fn recover<'a>(names: impl Iterator<Item = &'a Path> + Clone) {
    let whole = names.clone().next().is_some_and(|first| fs::symlink_metadata(first).is_ok());
    for name in names {
        let Ok((parent, file)) = output::split(name) else { continue };
        for aside in atomic::abandoned(&parent, &file, "replaced") {
            // What cannot be moved stays for the user to find.
            let _ = if whole { fs::remove_file(&aside) } else { fs::rename(&aside, name) };
        }
    }
}

/// Files beside those that were written that have the same name but for the number of parts.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Earlier {
    /// Those that hold the same model in the same file type: what was written is in their place. First parts come
    /// first.
    pub replaced: Vec<PathBuf>,
    /// All others.
    pub others: Vec<PathBuf>,
}

/// Finds what earlier runs wrote to `out`, in one file or another number of parts. Nothing of the `source` counts.
///
/// # Errors
///
/// When the folder cannot be read.
pub fn earlier(out: &Path, written: &[PathBuf], source: &Path) -> Result<Earlier, OutputError> {
    let mut earlier = Earlier::default();
    let Some(new) = written.first().and_then(|first| Content::of(first)) else { return Ok(earlier) };
    let source = fs::canonicalize(source).ok();
    for set in sets(out)? {
        if set.iter().any(|path| written.contains(path)) {
            continue;
        }
        let is_source = set.iter().any(|path| source.is_some() && fs::canonicalize(path).ok() == source);
        let same = !is_source && set.iter().all(|path| is_file(path)) && Content::of(&set[0]).as_ref() == Some(&new);
        if same { earlier.replaced.extend(set) } else { earlier.others.extend(set) }
    }
    Ok(earlier)
}

fn is_file(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.is_file())
}

/// The file `out`, and all parts that would be its, by how many their names count.
fn sets(out: &Path) -> Result<Vec<Vec<PathBuf>>, OutputError> {
    let (parent, name) = output::split(out)?;
    let name = name.to_string_lossy();
    let prefix = name.strip_suffix(".gguf").unwrap_or(&name);
    let unreadable = |source| OutputError::Io { path: parent.clone(), source };
    let mut numbers: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
    for entry in fs::read_dir(&parent).map_err(unreadable)? {
        let file = entry.map_err(unreadable)?.file_name();
        let Some((of, number, count)) = file.to_str().and_then(parse_part_name) else { continue };
        if of == prefix {
            numbers.entry(count).or_default().insert(number);
        }
    }
    let single = fs::symlink_metadata(out).is_ok().then(|| vec![out.to_path_buf()]);
    let parts = numbers.into_iter().map(|(count, numbers)| {
        numbers.into_iter().map(|number| out.with_file_name(part_name(prefix, number, count))).collect()
    });
    Ok(single.into_iter().chain(parts).collect())
}

/// What makes two files the same model with the same types and importance.
#[derive(PartialEq)]
struct Content {
    metadata: Vec<(String, Value)>,
    tensors: BTreeMap<String, (GgmlType, Vec<usize>)>,
}

impl Content {
    /// That of a whole model; `None` where there is none.
    fn of(first: &Path) -> Option<Self> {
        let file = GgufFile::open(first).ok()?;
        let metadata = file.metadata().iter().filter(|(key, _)| !key.starts_with("split."));
        Some(Self {
            metadata: metadata.map(|(key, value)| (key.into(), value.clone())).collect(),
            tensors: file
                .tensors()
                .iter()
                .map(|tensor| (tensor.name.clone(), (tensor.kind, tensor.shape.clone())))
                .collect(),
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn parts(dir: &Path, text: &str) -> Vec<PathBuf> {
        let names: Vec<PathBuf> = (1..=3).map(|number| dir.join(part_name("m", number, 3))).collect();
        names.iter().for_each(|name| fs::write(name, text).unwrap());
        names
    }

    fn texts(dir: &Path) -> Vec<String> {
        let mut paths: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths.iter().map(|path| fs::read_to_string(path).unwrap()).collect()
    }

    #[test]
    fn parts_replace_each_other_all_or_none() {
        let dir = tempfile::tempdir().unwrap();
        let names = parts(dir.path(), "old");
        let hidden: Vec<PathBuf> = (1..=3).map(|number| dir.path().join(format!(".new-{number}"))).collect();
        hidden.iter().for_each(|path| fs::write(path, "new").unwrap());
        let files: Vec<(&Path, &Path)> = hidden.iter().zip(&names).map(|(a, b)| (&**a, &**b)).collect();
        put(&files).unwrap();
        assert_eq!(texts(dir.path()), ["new"; 3]);

        // The first part cannot come: the earlier ones are back.
        hidden[1..].iter().for_each(|path| fs::write(path, "newer").unwrap());
        assert!(put(&files).is_err());
        assert_eq!(texts(dir.path()), ["new"; 3]);
    }

    /// Every state in which a kill can leave [`put`].
    #[test]
    fn interrupted_replacements_are_finished() {
        let gone = i32::MAX;
        // Parts that were put aside, new parts that came, and what is there in the end.
        for (aside, came, want) in
            [(0..1, 3..3, "old"), (0..3, 3..3, "old"), (0..3, 2..3, "old"), (0..3, 1..3, "old"), (0..3, 0..3, "new")]
        {
            let dir = tempfile::tempdir().unwrap();
            let names = parts(dir.path(), "old");
            for name in &names[aside.clone()] {
                let file = name.file_name().unwrap().to_str().unwrap();
                fs::rename(name, dir.path().join(format!(".{file}.replaced-{gone}"))).unwrap();
            }
            names[came.clone()].iter().for_each(|name| fs::write(name, "new").unwrap());
            recover(names.iter().map(|name| &**name));
            assert_eq!(texts(dir.path()), [want; 3], "aside {aside:?}, came {came:?}");
        }
    }
}
