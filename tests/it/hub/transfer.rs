//! Broken connections, leftovers of interrupted runs, several processes at once.

use std::fs::File;
use std::time::Duration;

use quantkit::checkpoint::Checkpoint;
use quantkit::hub::{HubError, HubEvent, fetch};

use super::{Case, SHARDS, first_shard, ranges, sharded};
use crate::support::hub_server::{MODEL, sha256};

#[test]
fn a_cut_connection_is_taken_up_where_it_broke() {
    for politely in [false, true] {
        let case = Case::new();
        case.server.change(|hub| (hub.cut, hub.cut_politely) = (vec![1000; 3], politely));
        let mut bytes = 0;
        let mut count = |event| match event {
            HubEvent::Bytes(more) => bytes += more,
            HubEvent::FileStarted { .. } | HubEvent::FileDone { .. } => {}
        };
        Checkpoint::open(&fetch(MODEL, &case.options, &mut count).unwrap()).unwrap();
        assert_eq!(bytes, sharded().iter().map(|(_, b)| b.len() as u64).sum::<u64>());
        let wanted = ["bytes=0-", "bytes=1000-", "bytes=2000-", "bytes=3000-"];
        assert_eq!(ranges(&case.server.seen(), SHARDS[0]), wanted, "politely: {politely}");
    }
}

#[test]
fn an_interrupted_run_is_resumed_by_the_next() {
    let mut case = Case::new();
    case.options.retries = 0;
    case.server.change(|hub| hub.cut = vec![1000, 0]);
    let error = case.refused();
    assert!(matches!(&error, HubError::Network { file, .. } if file == SHARDS[0]), "{error}");
    assert!(error.to_string().contains("run again to go on where it stopped"));
    case.server.seen();
    Checkpoint::open(&case.fetch().unwrap()).unwrap();
    assert_eq!(ranges(&case.server.seen(), SHARDS[0]), ["bytes=1000-"]);
}

#[test]
fn a_transfer_that_never_moves_ends() {
    let case = Case::new();
    case.server.change(|hub| hub.cut = vec![0; 100]);
    let error = case.refused();
    assert!(matches!(&error, HubError::Network { file, .. } if file == "config.json"), "{error}");
    assert_eq!(ranges(&case.server.seen(), "config.json").len(), 5);
}

#[test]
fn a_busy_server_is_asked_again() {
    let case = Case::new();
    case.server.change(|hub| {
        hub.status.insert("list".into(), (503, 2));
        hub.status.insert(SHARDS[1].into(), (500, 2));
    });
    Checkpoint::open(&case.fetch().unwrap()).unwrap();
}

#[test]
fn a_damaged_leftover_is_not_glued_on() {
    let case = Case::new();
    case.leave_part(&[7; 700]);
    Checkpoint::open(&case.fetch().unwrap()).unwrap();
    assert_eq!(ranges(&case.server.seen(), SHARDS[0]), ["bytes=700-", "bytes=0-"]);
}

#[test]
fn a_server_that_ignores_ranges_gives_no_glued_file() {
    let case = Case::new();
    case.leave_part(&first_shard()[..700]);
    case.server.change(|hub| hub.ignore_range = true);
    Checkpoint::open(&case.fetch().unwrap()).unwrap();
    assert_eq!(ranges(&case.server.seen(), SHARDS[0]), ["bytes=700-", "bytes=0-"]);
}

#[test]
fn a_complete_leftover_is_used_if_it_is_right() {
    let whole = first_shard();
    let longer = [&whole[..], b"more"].concat();
    let damaged = vec![7; whole.len()];
    for (left, asked) in [(&whole, &[][..]), (&damaged, &["bytes=0-"]), (&longer, &["bytes=0-"])] {
        let case = Case::new();
        case.leave_part(left);
        Checkpoint::open(&case.fetch().unwrap()).unwrap();
        assert_eq!(ranges(&case.server.seen(), SHARDS[0]), asked);
    }
    // Without a hash to check it by, it is fetched again.
    let case = Case::new();
    let part = case.staged(&format!("{}.part", &sha256(b"{}")[..40]));
    std::fs::create_dir_all(part.parent().unwrap()).unwrap();
    std::fs::write(part, "xx").unwrap();
    let dir = case.fetch().unwrap();
    assert_eq!(std::fs::read(dir.join("tokenizer.json")).unwrap(), b"{}");
}

#[test]
fn a_refused_range_starts_the_file_again_once() {
    let case = Case::new();
    case.leave_part(&first_shard()[..700]);
    case.server.change(|hub| hub.refuse_resume = 1);
    Checkpoint::open(&case.fetch().unwrap()).unwrap();
    assert_eq!(ranges(&case.server.seen(), SHARDS[0]), ["bytes=700-", "bytes=0-"]);

    let case = Case::new();
    case.leave_part(&first_shard()[..700]);
    case.server.change(|hub| (hub.refuse_resume, hub.cut) = (usize::MAX, vec![1000; 9]));
    let error = case.refused();
    assert!(error.to_string().contains("HTTP status 416"), "{error}");
    assert_eq!(ranges(&case.server.seen(), SHARDS[0]), ["bytes=700-", "bytes=0-", "bytes=1000-"]);
}

#[test]
fn a_second_downloader_is_told_to_wait() {
    let case = Case::new();
    let staging = case.root().join(".quantkit");
    std::fs::create_dir_all(&staging).unwrap();
    let lock = File::create(staging.join("lock")).unwrap();
    lock.lock().unwrap();
    assert!(case.refused().to_string().contains("another quantkit is downloading `acme/tiny`"));
    drop(lock);
    let dir = case.fetch().unwrap();
    // Who only reads needs no lock.
    let lock = File::create(staging.join("lock")).unwrap();
    lock.lock().unwrap();
    assert_eq!(case.fetch().unwrap(), dir);
}

#[test]
fn two_downloads_at_once_share_the_work() {
    let mut case = Case::new();
    case.options.lock_wait = Duration::from_secs(60);
    std::thread::scope(|scope| {
        let both = [scope.spawn(|| case.fetch().unwrap()), scope.spawn(|| case.fetch().unwrap())];
        for dir in both.map(|thread| thread.join().unwrap()) {
            Checkpoint::open(&dir).unwrap();
        }
    });
    let seen = case.server.seen();
    assert_eq!(SHARDS.map(|shard| ranges(&seen, shard).len()), [1, 1]);
}
