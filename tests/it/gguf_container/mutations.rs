//! Sound files with random damage: whatever the reader says, it says it without a panic, and what it accepts hangs
//! together. Some seconds long; `QUANTKIT_FUZZ_CASES` sets another number of cases. `tests/fuzz` has it for libFuzzer,
//! and what libFuzzer found worth keeping is read here too.

use std::path::Path;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use quantkit::checkpoint::Checkpoint;
use quantkit::format::gguf::imatrix::Imatrix;
use quantkit::format::gguf::parse::parse;

use super::raw::{Raw, array, pair, text};

fn cases(usual: u32) -> ProptestConfig {
    let asked = std::env::var("QUANTKIT_FUZZ_CASES").ok().and_then(|text| text.parse().ok());
    ProptestConfig { cases: asked.unwrap_or(usual), failure_persistence: None, ..ProptestConfig::default() }
}

/// A change of a file; places are taken modulo its length.
#[derive(Clone, Debug)]
enum Damage {
    Byte(usize, u8),
    Word(usize, u64),
    Cut(usize),
    Remove(usize, usize),
    Repeat(usize, usize),
}

fn damages() -> impl Strategy<Value = Vec<Damage>> {
    let words = prop_oneof![
        any::<u64>(),
        0u64..300,
        (0u32..64).prop_map(|bit| 1 << bit),
        (0u64..300).prop_map(|below| u64::MAX - below),
    ];
    let one = prop_oneof![
        (any::<usize>(), any::<u8>()).prop_map(|(at, byte)| Damage::Byte(at, byte)),
        (any::<usize>(), words).prop_map(|(at, word)| Damage::Word(at, word)),
        any::<usize>().prop_map(Damage::Cut),
        (any::<usize>(), 1usize..40).prop_map(|(at, len)| Damage::Remove(at, len)),
        (any::<usize>(), 1usize..40).prop_map(|(at, len)| Damage::Repeat(at, len)),
    ];
    prop::collection::vec(one, 1..4)
}

fn damaged(sound: &[u8], damages: &[Damage]) -> Vec<u8> {
    let mut bytes = sound.to_vec();
    for damage in damages {
        if bytes.is_empty() {
            break;
        }
        let len = bytes.len();
        match *damage {
            Damage::Byte(at, byte) => bytes[at % len] = byte,
            Damage::Word(at, word) => {
                let at = at % len;
                let end = (at + 8).min(len);
                bytes[at..end].copy_from_slice(&word.to_le_bytes()[..end - at]);
            }
            Damage::Cut(at) => bytes.truncate(at % len),
            Damage::Remove(at, count) => drop(bytes.drain(at % len..(at % len + count).min(len))),
            Damage::Repeat(at, count) => {
                let piece = bytes[at % len..(at % len + count).min(len)].to_vec();
                bytes.splice(at % len..at % len, piece);
            }
        }
    }
    bytes
}

/// Whether the reader of GGUF files takes these bytes.
fn gguf(bytes: Vec<u8>) -> bool {
    let Ok(part) = parse(bytes.into()) else { return false };
    for tensor in &part.tensors {
        let row = tensor.kind.row_bytes(tensor.cols()).unwrap();
        let rows = tensor.len().checked_div(tensor.cols()).unwrap_or(0);
        assert_eq!(tensor.bytes.len(), rows * row);
    }
    true
}

/// Whether the reader of importance takes these bytes.
fn importance(bytes: Vec<u8>) -> bool {
    let Ok(read) = Imatrix::parse(bytes.into()) else { return false };
    assert!(read.entries.values().all(|entry| entry.means().len() == entry.sums.len()));
    true
}

/// Whether a checkpoint opens with these bytes as its weights; `dir` has its config.
fn safetensors(dir: &Path, bytes: Vec<u8>) -> bool {
    // A new file each time: some file systems flush one that is cut and filled again.
    let path = dir.join("model.safetensors");
    let _ = std::fs::remove_file(&path);
    std::fs::write(&path, bytes).unwrap();
    let Ok(checkpoint) = Checkpoint::open(dir) else { return false };
    for entry in checkpoint.tensors().values() {
        assert_eq!(entry.bytes.len(), entry.shape.iter().product::<usize>() * entry.dtype.size());
    }
    checkpoint.non_finite();
    true
}

#[test]
fn damaged_gguf_files() {
    let mut raw = Raw::sound();
    raw.pairs.push(array("tokenizer.ggml.tokens", 8, 2, &[text(b"a"), text(b"b")].concat()));
    raw.pairs.push(array("tokenizer.ggml.scores", 6, 3, &[0; 12]));
    raw.pairs.push(pair("general.alignment", 4, &32u32.to_le_bytes()));
    let sound = raw.bytes();
    raw.read().unwrap();
    let check = |damages: Vec<Damage>| {
        gguf(damaged(&sound, &damages));
        Ok(())
    };
    TestRunner::new(cases(100_000)).run(&damages(), check).unwrap();
}

#[test]
fn damaged_importance_files() {
    let dir = tempfile::tempdir().unwrap();
    let entry = quantkit::format::gguf::imatrix::Entry { sums: vec![1.0; 6], counts: vec![2.0, 3.0] };
    let imatrix = Imatrix {
        datasets: vec!["text".into()],
        chunks: Some(1),
        chunk_size: 512,
        entries: [("blk.0.attn_q.weight".into(), entry.clone()), ("blk.0.attn_v.weight".into(), entry)].into(),
    };
    let (gguf, dat) = (dir.path().join("imatrix.gguf"), dir.path().join("imatrix.dat"));
    imatrix.write_gguf(&gguf).unwrap();
    imatrix.write_dat(&dat).unwrap();
    for sound in [gguf, dat].map(|path| std::fs::read(path).unwrap()) {
        let check = |damages: Vec<Damage>| {
            importance(damaged(&sound, &damages));
            Ok(())
        };
        TestRunner::new(cases(30_000)).run(&damages(), check).unwrap();
    }
}

#[test]
fn damaged_safetensors_files() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), "{}").unwrap();
    let header = br#"{"a":{"dtype":"F16","shape":[2,2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}"#;
    let sound = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 12]].concat();
    let check = |damages: Vec<Damage>| {
        safetensors(dir.path(), damaged(&sound, &damages));
        Ok(())
    };
    check(vec![]).unwrap();
    assert_eq!(Checkpoint::open(dir.path()).unwrap().tensors().len(), 2);
    TestRunner::new(cases(5_000)).run(&damages(), check).unwrap();
}

/// The files that libFuzzer kept because each reaches code that no other does: both verdicts are among them.
#[test]
fn files_that_libfuzzer_kept() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), "{}").unwrap();
    let corpus = |target: &str| -> Vec<Vec<u8>> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus").join(target);
        let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths.iter().map(|path| std::fs::read(path).unwrap()).collect()
    };
    let both = |reader: &str, verdicts: Vec<bool>| {
        let taken = verdicts.iter().filter(|taken| **taken).count();
        assert!(taken > 0 && taken < verdicts.len(), "{reader} takes {taken} of {} files", verdicts.len());
    };
    both("GGUF", corpus("gguf").into_iter().map(gguf).collect());
    both("importance", corpus("gguf").into_iter().map(importance).collect());
    both("safetensors", corpus("safetensors").into_iter().map(|bytes| safetensors(dir.path(), bytes)).collect());
}
