//! Servers that lie: content, names, headers.

use quantkit::checkpoint::Checkpoint;
use quantkit::hub::{HubError, HubOptions, fetch};

use super::{Case, SHARDS, first_shard, ranges, tree};
use crate::support::hub_server::{MODEL, sha256};

#[test]
fn corrupted_content_is_refused_and_leaves_nothing_to_trust() {
    let case = Case::new();
    case.server.change(|hub| hub.spoiled = vec![SHARDS[0].into()]);
    let error = case.refused();
    assert!(matches!(&error, HubError::Hash { file, .. } if file == SHARDS[0]), "{error}");
    let hash = sha256(&first_shard());
    for path in tree(&case.root()) {
        let name = path.file_name().unwrap().to_str().unwrap();
        let trusted = name == hash || name == format!("{hash}.part") || name == SHARDS[0] || name == "main";
        assert!(!trusted, "left behind: {}", path.display());
    }
    let offline = HubOptions { offline: true, ..case.options.clone() };
    assert!(matches!(fetch(MODEL, &offline, &mut |_| {}), Err(HubError::Offline { .. })));
    case.server.change(|hub| hub.spoiled.clear());
    Checkpoint::open(&case.fetch().unwrap()).unwrap();
}

#[test]
fn an_answer_that_cannot_be_followed_is_an_error() {
    let case = Case::new();
    case.server.change(|hub| hub.redirect_nowhere = true);
    assert!(matches!(case.refused(), HubError::Answer { file, .. } if file == SHARDS[0]));
    let case = Case::new();
    case.server.change(|hub| _ = hub.files.insert(SHARDS[0].into(), vec![]));
    assert!(case.refused().to_string().contains("HTTP status 416"));
}

#[test]
fn hostile_names_in_the_list_are_refused() {
    for name in ["../evil.json", "/etc/evil.json", "a/../../evil.json", "..", "a\\..\\evil.json", "e\u{1b}[2J.json", ""]
    {
        let case = Case::new();
        case.server.change(|hub| hub.extra_names = vec![name.into()]);
        let error = case.refused();
        assert!(matches!(error, HubError::NameOutside { .. }), "{name:?}: {error}");
        assert!(!error.to_string().contains('\u{1b}'));
        assert_eq!(case.server.seen().len(), 1);
        assert!(tree(case.home.path()).is_empty());
    }
}

#[test]
fn a_hostile_index_is_refused() {
    for shard in ["../evil.safetensors", "/etc/evil.safetensors", "config.json", "a\\b.safetensors"] {
        let case = Case::new();
        let index = serde_json::json!({ "weight_map": { "a": SHARDS[0], "b": shard } }).to_string();
        case.server.change(|hub| _ = hub.files.insert("model.safetensors.index.json".into(), index.into_bytes()));
        assert!(matches!(case.refused(), HubError::ShardOutside { .. }), "{shard}");
        assert!(ranges(&case.server.seen(), SHARDS[0]).is_empty());
    }
    for (index, wanted) in [
        (r#"{"weight_map":{"a":"absent.safetensors"}}"#, "names shard `absent.safetensors`"),
        (r#"{"weight_map":{"a":1}}"#, "no file name"),
        (r#"{"weight_map":{}}"#, "no tensors"),
        (r#"{"weight_map""#, "is not valid"),
    ] {
        let case = Case::new();
        case.server.change(|hub| _ = hub.files.insert("model.safetensors.index.json".into(), index.into()));
        let text = case.refused().to_string();
        assert!(text.contains(wanted), "{text}");
    }
}

#[test]
fn hostile_headers_do_not_become_paths() {
    for etag in ["../../../evil", "a/b", "", ".", "a.part", "W/../x"] {
        let case = Case::new();
        case.server.change(|hub| _ = hub.etags.insert("config.json".into(), etag.into()));
        assert!(matches!(case.refused(), HubError::Answer { .. }), "{etag}");
        assert!(ranges(&case.server.seen(), "config.json").is_empty());
    }
    for commit in ["../../evil", "", "2222222222222222222222222222222222222222"] {
        let case = Case::new();
        case.server.change(|hub| hub.stated_commit = Some(commit.into()));
        assert!(matches!(case.refused(), HubError::Answer { .. }), "{commit}");
        let case = Case::new();
        case.server.change(|hub| _ = hub.revisions.insert("main".into(), format!("../{commit}")));
        assert!(matches!(case.refused(), HubError::Answer { .. }), "{commit}");
        assert!(tree(case.home.path()).is_empty());
    }
}
