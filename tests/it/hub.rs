//! Models by hub id, against a stand-in hub on 127.0.0.1.

mod hostile;
mod transfer;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use quantkit::checkpoint::Checkpoint;
use quantkit::hub::{HubError, HubEvent, HubOptions, fetch, looks_like_id};
use tempfile::TempDir;

use crate::support::hub_server::{COMMIT, HubServer, MODEL, Seen, sha256};

const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
const TOKEN: &str = "hf_secretSecretSecret";

/// A safetensors file with one f32 tensor.
fn safetensors(tensor: &str, value: f32) -> Vec<u8> {
    let data: Vec<u8> = (0..1024).flat_map(|i| (value + i as f32).to_le_bytes()).collect();
    let mut header = format!(r#"{{"{tensor}":{{"dtype":"F32","shape":[1024],"data_offsets":[0,4096]}}}}"#);
    header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.bytes());
    file.extend(data);
    file
}

fn sharded() -> Vec<(&'static str, Vec<u8>)> {
    let index = serde_json::json!({ "weight_map": { "a": SHARDS[0], "b": SHARDS[1] } });
    vec![
        ("config.json", br#"{"model_type": "llama"}"#.to_vec()),
        ("model.safetensors.index.json", index.to_string().into_bytes()),
        (SHARDS[0], safetensors("a", 1.0)),
        (SHARDS[1], safetensors("b", 2.0)),
        ("tokenizer.json", b"{}".to_vec()),
    ]
}

/// A hub with a sharded model, and a home for the cache.
struct Case {
    server: HubServer,
    home: TempDir,
    options: HubOptions,
}

impl Case {
    fn new() -> Self {
        Self::with(sharded())
    }

    fn with(files: Vec<(&'static str, Vec<u8>)>) -> Self {
        let (server, home) = (HubServer::start(files), TempDir::new().unwrap());
        let mut options = HubOptions::new(home.path());
        options.endpoint = server.endpoint();
        options.backoff = Duration::from_millis(1);
        options.lock_wait = Duration::from_millis(100);
        Self { server, home, options }
    }

    fn fetch(&self) -> Result<PathBuf, HubError> {
        fetch(MODEL, &self.options, &mut |_| {})
    }

    fn refused(&self) -> HubError {
        let error = self.fetch().unwrap_err();
        let text = format!("{error} {error:?}");
        assert!(!text.contains(TOKEN), "{text}");
        error
    }

    fn root(&self) -> PathBuf {
        self.home.path().join("hub/models--acme--tiny")
    }

    fn staged(&self, name: &str) -> PathBuf {
        self.root().join(".quantkit/models--acme--tiny/blobs").join(name)
    }

    /// Puts down what an interrupted run leaves of the first shard.
    fn leave_part(&self, bytes: &[u8]) {
        let path = self.staged(&format!("{}.part", sha256(&first_shard())));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
}

fn first_shard() -> Vec<u8> {
    safetensors("a", 1.0)
}

/// The ranges asked for of a file, without the probes for its size.
fn ranges(seen: &[Seen], name: &str) -> Vec<String> {
    let of_file = seen.iter().filter(|s| s.path.ends_with(&format!("/{name}")));
    of_file.filter_map(|s| s.range.clone()).filter(|r| r != "bytes=0-0").collect()
}

fn tree(dir: &Path) -> Vec<PathBuf> {
    let mut found = vec![];
    for entry in std::fs::read_dir(dir).into_iter().flatten() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.is_symlink() {
            found.extend(tree(&path));
        } else {
            found.push(path);
        }
    }
    found
}

#[test]
fn a_sharded_model_comes_whole_and_opens() {
    let case = Case::new();
    let mut events = vec![];
    let dir = fetch(MODEL, &case.options, &mut |event| events.push(event)).unwrap();
    assert_eq!(dir, case.root().join("snapshots").join(COMMIT));
    let checkpoint = Checkpoint::open(&dir).unwrap();
    assert_eq!(checkpoint.tensors().len(), 2);
    assert_eq!(checkpoint.vector("b", 1024).unwrap()[..2], [2.0, 3.0]);
    assert_eq!(checkpoint.side_files().unwrap(), ["tokenizer.json"]);
    assert_eq!(std::fs::read_to_string(case.root().join("refs/main")).unwrap(), COMMIT);
    assert_eq!(tree(&case.root().join(".quantkit")), [case.root().join(".quantkit/lock")]);
    // The ordinary layout: links to blobs named by etag.
    let link = std::fs::read_link(dir.join(SHARDS[0])).unwrap();
    assert_eq!(link, Path::new("../../blobs").join(sha256(&first_shard())));

    let mut done = vec![];
    let (mut open, mut left) = (None, 0);
    for event in events {
        match event {
            HubEvent::FileStarted { name, bytes } => {
                assert_eq!((open.take(), left), (None, 0));
                (open, left) = (Some(name), bytes);
            }
            HubEvent::Bytes(bytes) => left -= bytes,
            HubEvent::FileDone { name } => {
                assert_eq!((open.take().as_ref(), left), (Some(&name), 0));
                done.push(name);
            }
        }
    }
    assert_eq!(done, ["config.json", "model.safetensors.index.json", SHARDS[0], SHARDS[1], "tokenizer.json"]);
}

#[test]
fn what_the_cache_holds_is_not_asked_for_again() {
    let case = Case::new();
    let first = case.fetch().unwrap();
    case.server.seen();
    let mut events = 0;
    assert_eq!(fetch(MODEL, &case.options, &mut |_| events += 1).unwrap(), first);
    let seen = case.server.seen();
    assert_eq!(seen.iter().map(|s| &*s.path).collect::<Vec<_>>(), ["/api/models/acme/tiny/revision/main"]);
    assert_eq!(events, 0);
    // Another revision with the same contents shares the blobs: only probes.
    let other = "2222222222222222222222222222222222222222";
    case.server.change(|hub| _ = ["v2", other].map(|r| hub.revisions.insert(r.into(), other.into())));
    let options = HubOptions { revision: Some("v2".into()), ..case.options.clone() };
    Checkpoint::open(&fetch(MODEL, &options, &mut |_| {}).unwrap()).unwrap();
    assert!(case.server.seen().iter().all(|s| s.range.as_deref().is_none_or(|r| r == "bytes=0-0")));
}

#[test]
fn offline_uses_the_cache_alone() {
    let mut case = Case::new();
    let dir = case.fetch().unwrap();
    case.server.seen();
    case.options.offline = true;
    assert_eq!(case.fetch().unwrap(), dir);
    case.options.revision = Some(COMMIT.into());
    assert_eq!(case.fetch().unwrap(), dir);
    case.options.revision = Some("v9".into());
    let text = case.refused().to_string();
    assert!(
        text.contains("`config.json`") && text.contains("`v9`") && text.contains("HF_HUB_OFFLINE is set"),
        "{text}"
    );
    case.options.revision = None;
    std::fs::remove_file(case.root().join("blobs").join(sha256(&first_shard()))).unwrap();
    let text = case.refused().to_string();
    assert!(text.contains(SHARDS[0]), "{text}");
    assert!(case.server.seen().is_empty());
    // A link whose blob is gone is made good by the next download.
    case.options.offline = false;
    Checkpoint::open(&case.fetch().unwrap()).unwrap();
}

#[test]
fn the_token_is_sent_and_never_shown() {
    let mut case = Case::new();
    case.server.change(|hub| hub.token = Some(TOKEN.into()));
    let error = case.refused();
    assert!(matches!(error, HubError::NeedsToken { .. }), "{error}");
    assert!(error.to_string().contains("accept its licence at") && error.to_string().contains("HF_TOKEN"));
    case.server.change(|hub| hub.token = Some("another".into()));
    case.options.token = Some(TOKEN.into());
    assert!(matches!(case.refused(), HubError::TokenRefused { .. }));
    case.server.change(|hub| hub.token = Some(TOKEN.into()));
    case.server.seen();
    case.fetch().unwrap();
    assert!(case.server.seen().iter().all(|s| s.token.as_deref() == Some(TOKEN)));
    let shown = format!("{:?} {:#?}", case.options, case.options);
    assert!(!shown.contains(TOKEN) && shown.contains("hidden"), "{shown}");
    for path in tree(case.home.path()) {
        assert!(!String::from_utf8_lossy(&std::fs::read(&path).unwrap()).contains(TOKEN), "{}", path.display());
    }
    case.options.token = Some(format!("{TOKEN}\nX-Other: 1"));
    assert!(matches!(case.refused(), HubError::BadToken));
    case.options.token = Some(TOKEN.into());
    case.options.endpoint = format!("http://user:{TOKEN}@127.0.0.1:1");
    case.options.retries = 0;
    assert!(!format!("{:?}", case.options).contains(TOKEN));
    assert!(case.refused().to_string().contains("`http://127.0.0.1:1`"));
}

#[test]
fn refusals_become_sentences() {
    let mut case = Case::new();
    case.server.change(|hub| _ = hub.status.insert("config.json".into(), (403, 1)));
    assert!(matches!(case.refused(), HubError::Gated { .. }));
    case.server.change(|hub| _ = hub.status.insert("config.json".into(), (404, 1)));
    let text = case.refused().to_string();
    assert!(text.contains("`config.json`") && text.contains("listed but not there"), "{text}");
    let error = fetch("acme/unknown", &case.options, &mut |_| {}).unwrap_err();
    assert!(error.to_string().contains("knows no model `acme/unknown` with revision `main`"), "{error}");
    for id in ["tiny", "a/b/c", "../x", "acme/ti ny", "acme/", "acme/x--y"] {
        assert!(matches!(fetch(id, &case.options, &mut |_| {}), Err(HubError::BadId { .. })), "{id}");
    }
    for revision in ["", "../main", "a//b", "a b", "a?b", "/x"] {
        case.options.revision = Some(revision.into());
        assert!(matches!(case.refused(), HubError::BadRevision { .. }), "{revision}");
    }
    case.options.revision = None;
    case.options.endpoint = "ftp://example".into();
    assert!(matches!(case.refused(), HubError::BadEndpoint { .. }));
}

#[test]
fn an_unreachable_hub_is_named() {
    let mut case = Case::new();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    case.options.endpoint = format!("http://{free}/");
    case.options.retries = 1;
    let text = case.refused().to_string();
    assert!(text.contains(&format!("`http://{free}`")) && text.contains("HF_HUB_OFFLINE=1"), "{text}");
}

#[test]
fn a_revision_is_a_branch_a_tag_or_a_commit() {
    let mut case = Case::new();
    let other = "2222222222222222222222222222222222222222";
    case.server.change(|hub| {
        for revision in ["refs/pr/1", other] {
            hub.revisions.insert(revision.into(), other.into());
        }
    });
    case.options.revision = Some("refs/pr/1".into());
    let dir = case.fetch().unwrap();
    assert!(dir.ends_with(other));
    assert_eq!(std::fs::read_to_string(case.root().join("refs/refs/pr/1")).unwrap(), other);
    assert!(!case.root().join("refs/main").exists());
    // Everything is taken from the commit, whatever the branch does meanwhile.
    let seen = case.server.seen();
    assert!(seen.iter().filter(|s| s.range.is_some()).all(|s| s.path.contains(&format!("/resolve/{other}/"))));
    case.options.revision = Some(other.into());
    assert_eq!(case.fetch().unwrap(), dir);
    assert!(!case.root().join("refs").join(other).exists());
    case.options.revision = Some("v9".into());
    assert!(matches!(case.refused(), HubError::NotFound { revision, .. } if revision == "v9"));
}

#[test]
fn only_what_belongs_to_the_model_is_asked_for() {
    let case = Case::new();
    let side = ["LICENSE", "README.md", "chat_template.jinja", "generation_config.json", "merges.txt", "modeling.py"];
    let more = ["additional_chat_templates/tool_use.jinja", "spiece.model", "tokenizer.model.v3", "with space.txt"];
    let side = [&side[..], &more].concat();
    let other = ["consolidated.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json"];
    let other = [&other[..], &["a.pt", "b.pth", "c.gguf", "d.onnx", "e.h5", "f.msgpack", "g.png", ".gitattributes"]];
    let other = [&other.concat()[..], &["original/params.json", "onnx/model.onnx", ".hidden.json"]].concat();
    let other = [&other[..], &["additional_chat_templates/notes.txt", "other/x.jinja"]].concat();
    case.server.change(|hub| {
        for name in side.iter().chain(&other) {
            hub.files.insert(name.to_string(), format!("the file {name}").into_bytes());
        }
        hub.extra_names = vec!["config.json".into(), "README.md".into(), SHARDS[0].into()];
    });
    let dir = case.fetch().unwrap();
    let mut wanted: Vec<String> = side.iter().map(|s| s.to_string()).collect();
    wanted.extend(sharded().iter().map(|(name, _)| name.to_string()));
    wanted.sort();
    let name = |path: &PathBuf| path.strip_prefix(&dir).unwrap().to_string_lossy().into_owned();
    let mut found: Vec<String> = tree(&dir).iter().map(name).collect();
    found.sort();
    assert_eq!(found, wanted);
    let seen = case.server.seen();
    assert!(seen.iter().all(|s| !other.iter().any(|name| s.path.ends_with(&format!("/{name}")))));
    assert_eq!(ranges(&seen, "README.md").len(), 1);
}

#[test]
fn one_file_of_weights_redirected_and_an_empty_file_beside_it() {
    for name in ["model.safetensors", "weights.safetensors"] {
        let config = ("config.json", b"{}".to_vec());
        let case = Case::with(vec![config, (name, safetensors("a", 1.0)), ("notes.txt", vec![])]);
        case.server.change(|hub| hub.redirect = true);
        let dir = case.fetch().unwrap();
        assert_eq!(Checkpoint::open(&dir).unwrap().tensors().len(), 1);
        assert_eq!(std::fs::read(dir.join("notes.txt")).unwrap(), b"");
        let offline = HubOptions { offline: true, ..case.options.clone() };
        assert_eq!(fetch(MODEL, &offline, &mut |_| {}).unwrap(), dir);
    }
}

#[test]
fn a_repository_that_is_no_model_fails_fast() {
    let case = Case::with(vec![("README.md", b"x".to_vec()), (SHARDS[0], first_shard())]);
    assert!(matches!(case.refused(), HubError::NoConfig { .. }));
    assert_eq!(case.server.seen().len(), 1);
    let case = Case::with(vec![("config.json", b"{}".to_vec()), ("pytorch_model.bin", vec![0; 9])]);
    let text = case.refused().to_string();
    assert!(text.contains("no safetensors weights") && text.contains("pickled"), "{text}");
}

/// Which of two copies counts is not the download's to decide.
#[test]
fn one_file_beside_shards() {
    let case = Case::new();
    case.server.change(|hub| drop(hub.files.insert("model.safetensors".into(), safetensors("a", 5.0))));
    let dir = case.fetch().unwrap();
    for name in [SHARDS[0], SHARDS[1], "model.safetensors"] {
        assert!(dir.join(name).exists(), "{name}");
    }
    let error = Checkpoint::open(&dir).unwrap_err().to_string();
    assert!(error.contains("holds two models: tensor `b` is not in `model.safetensors`, but in the shards"), "{error}");
    // An index of shards that are not there says nothing.
    let case = Case::new();
    case.server.change(|hub| {
        hub.files.insert("model.safetensors".into(), safetensors("a", 5.0));
        hub.files.remove(SHARDS[1]);
    });
    let dir = case.fetch().unwrap();
    assert!(!dir.join(SHARDS[0]).exists());
    let opened = Checkpoint::open(&dir).unwrap();
    assert!(opened.notes()[0].contains("is not used"), "{:?}", opened.notes());
    // Nor does one that cannot be read.
    for index in ["{", r#"{"weight_map": {"a": "../a.safetensors"}}"#] {
        let case = Case::new();
        case.server.change(|hub| {
            hub.files.insert("model.safetensors".into(), safetensors("a", 5.0));
            hub.files.insert("model.safetensors.index.json".into(), index.into());
        });
        let opened = Checkpoint::open(&case.fetch().unwrap()).unwrap();
        assert!(opened.notes()[0].contains("is not used"), "{:?}", opened.notes());
    }
}

#[test]
fn options_come_from_the_environment() {
    let home = TempDir::new().unwrap();
    std::fs::write(home.path().join("token"), " from-file \n").unwrap();
    let options = |set: &[(&str, &str)]| {
        let mut all: BTreeMap<String, OsString> = BTreeMap::from([("HF_HOME".into(), home.path().into())]);
        all.extend(set.iter().map(|(name, value)| (name.to_string(), value.into())));
        HubOptions::from_variables(|name| all.get(name).cloned()).unwrap()
    };
    let plain = options(&[]);
    assert_eq!((&*plain.endpoint, plain.offline), ("https://huggingface.co", false));
    assert_eq!(plain.token.as_deref(), Some("from-file"));
    assert_eq!(plain.cache_dir(), home.path().join("hub"));
    let set = options(&[("HF_TOKEN", "from-env"), ("HF_ENDPOINT", "http://mirror"), ("HF_HUB_CACHE", "/elsewhere")]);
    assert_eq!((set.token.as_deref(), &*set.endpoint), (Some("from-env"), "http://mirror"));
    assert_eq!(set.cache_dir(), Path::new("/elsewhere"));
    for (value, offline) in [("1", true), ("true", true), ("YES", true), ("0", false), ("", false), ("no", false)] {
        assert_eq!(options(&[("HF_HUB_OFFLINE", value)]).offline, offline, "{value}");
    }
    let empty = options(&[("HF_TOKEN", ""), ("HF_ENDPOINT", " "), ("HF_HUB_CACHE", "")]);
    assert_eq!(format!("{empty:?}"), format!("{plain:?}"));
    let unset = HubOptions::from_variables(|name| (name == "HOME").then(|| "/home/someone".into())).unwrap();
    assert_eq!(unset.cache_dir(), Path::new("/home/someone/.cache/huggingface/hub"));
}

#[test]
fn ids_and_paths_are_told_apart() {
    for id in ["acme/tiny", "Qwen/Qwen2.5-0.5B", "a/b", "TheOrg/x_y"] {
        assert!(looks_like_id(id), "{id}");
    }
    for path in
        ["tiny", "./tiny", "/acme/tiny", "acme/tiny/", "a/b/c", "../tiny", "~/tiny", "a b/c", "", "/", "src/hub"]
    {
        assert!(!looks_like_id(path), "{path}");
    }
}
