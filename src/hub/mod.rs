//! Models by hub id: `org/name` becomes a folder in the ordinary Hugging Face cache.
//!
//! The transfer itself is `hf-hub`; here stands what it leaves open. Files come into a staging folder
//! first and enter the cache only once their size and, where the hub states it, their SHA-256 are right,
//! so nothing in the cache needs to be doubted later. The commit is fixed before the first file, so a push
//! during the download cannot mix two versions, and the branch name is recorded after the last one.
//! Names, etags and commits that the server sends are checked before they become paths.

mod cache;
mod download;
mod error;
mod options;
mod select;

use std::path::{Path, PathBuf};

pub use error::HubError;
pub use options::HubOptions;

use cache::Store;
use download::Remote;
use select::{CONFIG, INDEX, Weights};

/// What happens during a download, for whoever draws the progress.
///
/// Only files that are really downloaded are reported, one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HubEvent {
    /// A file of this many bytes begins.
    FileStarted { name: String, bytes: u64 },
    /// So many bytes more of it are on disk (those of an earlier, interrupted run included).
    Bytes(u64),
    /// The file is complete and checked.
    FileDone { name: String },
}

/// Where events go.
pub type Events<'a> = dyn FnMut(HubEvent) + 'a;

/// Downloads the model `id` (`org/name`), as far as it is not in the cache yet, and returns its snapshot
/// folder: `config.json`, the safetensors weights, and the tokenizer and other side files.
///
/// Weights in other formats, hidden files, and folders but that of further chat templates are left out.
pub fn fetch(id: &str, options: &HubOptions, events: &mut Events<'_>) -> Result<PathBuf, HubError> {
    if !legal_id(id) {
        return Err(HubError::BadId { id: id.into() });
    }
    let revision = options.revision.as_deref().unwrap_or("main");
    if !cache::legal_revision(revision) {
        return Err(HubError::BadRevision { revision: revision.into() });
    }
    let store = Store::new(&options.cache_dir(), id);
    if options.offline {
        return offline(id, revision, options, &store);
    }

    let (mut remote, names) = Remote::open(id, revision, options, &store)?;
    let names = select::checked(id, names)?;
    let listed = |name: &str| names.iter().any(|n| n == name);
    // The configuration first: a repository that is no model fails before gigabytes have come.
    if !listed(CONFIG) {
        return Err(HubError::NoConfig { id: id.into(), revision: revision.into(), files: names });
    }
    remote.obtain(CONFIG, events)?;
    let shards = match select::weights(id, &names)? {
        Weights::One(file) => vec![file],
        Weights::Indexed => {
            let shards = select::shards(id, &remote.obtain(INDEX, events)?)?;
            if let Some(shard) = shards.iter().find(|s| !listed(s)) {
                return Err(HubError::ShardMissing { id: id.into(), shard: shard.clone() });
            }
            shards
        }
        Weights::Both => {
            // A damaged index beside `model.safetensors` is not used, as in a folder on disk.
            let mut shards = select::shards(id, &remote.obtain(INDEX, events)?).unwrap_or_default();
            if !shards.iter().all(|shard| listed(shard)) {
                shards.clear();
            }
            if !shards.iter().any(|shard| shard == select::SINGLE) {
                shards.push(select::SINGLE.into());
            }
            shards
        }
    };
    for name in shards.iter().chain(&select::side_files(&names)) {
        remote.obtain(name, events)?;
    }
    remote.finish()
}

/// Downloads `config.json` of the model `id` alone, as far as it is not in the cache yet, and returns the folder that
/// holds it. Weights may be there or not.
pub fn fetch_config(id: &str, options: &HubOptions, events: &mut Events<'_>) -> Result<PathBuf, HubError> {
    if !legal_id(id) {
        return Err(HubError::BadId { id: id.into() });
    }
    let revision = options.revision.as_deref().unwrap_or("main");
    if !cache::legal_revision(revision) {
        return Err(HubError::BadRevision { revision: revision.into() });
    }
    let store = Store::new(&options.cache_dir(), id);
    if options.offline {
        return offline(id, revision, options, &store);
    }
    let (mut remote, names) = Remote::open(id, revision, options, &store)?;
    let files = select::checked(id, names)?;
    if !files.iter().any(|name| name == CONFIG) {
        return Err(HubError::NoConfig { id: id.into(), revision: revision.into(), files });
    }
    let mut dir = remote.obtain(CONFIG, events)?;
    dir.pop();
    Ok(dir)
}

/// Whether this can be a hub id (`org/name`) rather than a path: one slash, legal characters, and nothing
/// of that name on disk.
pub fn looks_like_id(spec: &str) -> bool {
    legal_id(spec) && !Path::new(spec).exists()
}

fn legal_id(id: &str) -> bool {
    let part = |part: &str| {
        let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric() || c == '_');
        (1..=96).contains(&part.len())
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
            && edge(part.chars().next())
            && edge(part.chars().next_back())
            // `--` would make two ids share a cache folder.
            && !part.contains("--")
            && !part.contains("..")
    };
    id.split_once('/').is_some_and(|(org, name)| part(org) && part(name))
}

/// The snapshot as the cache has it, provided that config and weights are all there.
fn offline(id: &str, revision: &str, options: &HubOptions, store: &Store) -> Result<PathBuf, HubError> {
    let missing = |file: &str| HubError::Offline {
        id: id.into(),
        revision: revision.into(),
        file: file.into(),
        cache: options.cache_dir(),
    };
    let dir = store.recorded(revision).ok_or_else(|| missing(CONFIG))?;
    if !dir.join(CONFIG).exists() {
        return Err(missing(CONFIG));
    }
    let shards = if dir.join(INDEX).exists() && !dir.join(select::SINGLE).exists() {
        select::shards(id, &dir.join(INDEX))?
    } else {
        match select::weights(id, &cache::names(&dir)?) {
            Ok(Weights::One(file)) => vec![file],
            _ => vec![select::SINGLE.to_string()],
        }
    };
    match shards.iter().find(|shard| !dir.join(shard).exists()) {
        Some(shard) => Err(missing(shard)),
        None => Ok(dir),
    }
}
