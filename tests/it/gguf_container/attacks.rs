//! Each attack on the reader by its name. None may panic, and none takes memory for what the file cannot hold.

use quantkit::format::gguf::parse::parse;
use quantkit::format::gguf::value::{Text, Value};
use quantkit::format::gguf::{parse::Problem, read::GgufFile};

use super::raw::{Raw, array, pair, tensor, text};

fn with_pair(pair: Vec<u8>) -> Raw {
    let mut raw = Raw::sound();
    raw.pairs.push(pair);
    raw
}

fn with_tensors(tensors: Vec<Vec<u8>>) -> Raw {
    Raw { tensors, ..Raw::sound() }
}

#[track_caller]
fn told(raw: &Raw, parts: &[&str]) -> Problem {
    let problem = raw.read().unwrap_err();
    let message = problem.to_string();
    assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    problem
}

#[test]
fn a_sound_file_is_read() {
    let part = Raw::sound().read().unwrap();
    assert_eq!((part.version, part.metadata.len()), (3, 2));
    assert_eq!(part.tensors[0].shape, [2, 32]);
    assert_eq!(*part.tensors[0].bytes, [1; 36]);
    assert_eq!(*part.tensors[1].bytes, [2; 12]);
}

#[test]
fn version_2_is_read_and_others_are_not() {
    let version = |version| Raw { version: Some(version), ..Raw::sound() };
    assert_eq!(version(2).read().unwrap().version, 2);
    for old in [0, 1, 4, u32::MAX] {
        assert!(matches!(told(&version(old), &["versions 2 and 3"]), Problem::Version(v) if v == old));
    }
}

#[test]
fn big_endian() {
    let raw = Raw { version: Some(3u32.swap_bytes()), ..Raw::sound() };
    assert!(matches!(told(&raw, &["big-endian", "convert it"]), Problem::BigEndian));
}

#[test]
fn no_gguf_at_all() {
    for bytes in [&b""[..], b"G", b"GGML\x03\0\0\0", b"PK\x03\x04"] {
        let problem = parse(bytes.to_vec().into()).unwrap_err();
        assert!(matches!(problem, Problem::Magic { .. }), "{problem}");
    }
}

#[test]
fn truncated_anywhere() {
    let bytes = Raw::sound().bytes();
    // The padding after the last tensor may be missing.
    let needed = bytes.len() - 20;
    for end in 4..needed {
        let problem = parse(bytes[..end].to_vec().into()).unwrap_err();
        assert!(matches!(problem, Problem::Truncated { .. } | Problem::Count { .. }), "{end}: {problem}");
    }
    for end in needed..=bytes.len() {
        parse(bytes[..end].to_vec().into()).unwrap();
    }
}

#[test]
fn absurd_numbers_of_keys_and_tensors() {
    for count in [1 << 20, i64::MAX, -1, i64::MIN] {
        let raw = Raw { pair_count: Some(count), ..Raw::sound() };
        assert!(matches!(told(&raw, &[&count.to_string(), "metadata keys"]), Problem::Count { .. }));
        let raw = Raw { tensor_count: Some(count), ..Raw::sound() };
        assert!(matches!(told(&raw, &[&count.to_string(), "tensors"]), Problem::Count { .. }));
    }
}

#[test]
fn absurd_string_lengths() {
    for length in [1 << 20, u64::MAX] {
        let raw = with_pair(pair("long", 8, &length.to_le_bytes()));
        assert!(matches!(told(&raw, &["the value of `long`"]), Problem::Truncated { .. }));
        let raw = with_pair([length.to_le_bytes().to_vec(), vec![b'k'; 16]].concat());
        assert!(matches!(told(&raw, &["a metadata key"]), Problem::Truncated { .. }));
    }
}

#[test]
fn absurd_array_lengths() {
    for kind in (0..=12).filter(|kind| *kind != 9) {
        for count in [1 << 20, u64::MAX / 8, u64::MAX] {
            let raw = with_pair(array("many", kind, count, &[0; 16]));
            assert!(matches!(told(&raw, &["elements of `many`"]), Problem::Count { .. }));
        }
    }
}

#[test]
fn nested_arrays() {
    let raw = with_pair(array("nested", 9, 1, &[0; 16]));
    assert!(matches!(told(&raw, &["`nested`", "array of arrays"]), Problem::NestedArray(_)));
}

#[test]
fn unknown_value_types() {
    for kind in [13, u32::MAX] {
        assert!(matches!(told(&with_pair(pair("odd", kind, &[0; 8])), &["`odd`"]), Problem::ValueType { .. }));
        assert!(matches!(told(&with_pair(array("odd", kind, 1, &[0; 8])), &["`odd`"]), Problem::ValueType { .. }));
    }
}

#[test]
fn duplicate_empty_and_broken_keys() {
    let raw = with_pair(pair("llama.block_count", 4, &[2, 0, 0, 0]));
    assert!(matches!(told(&raw, &["`llama.block_count` stands twice"]), Problem::DuplicateKey(_)));
    assert!(matches!(told(&with_pair(pair("", 4, &[0; 4])), &["is empty"]), Problem::EmptyKey(_)));
    let raw = with_pair([text(&[0xff, 0xfe]), vec![4, 0, 0, 0, 0, 0, 0, 0]].concat());
    assert!(matches!(told(&raw, &["a metadata key", "not UTF-8"]), Problem::NotUtf8 { .. }));
}

#[test]
fn tokens_that_are_not_utf8_are_kept() {
    let tokens = [text(b"good"), text(&[0xe2, 0x96]), text(&[0])].concat();
    let part = with_pair(array("tokenizer.ggml.tokens", 8, 3, &tokens)).read().unwrap();
    let read: &[Text] = part.metadata.need("tokenizer.ggml.tokens").unwrap();
    assert_eq!(read.iter().map(Text::bytes).collect::<Vec<_>>(), [&b"good"[..], &[0xe2, 0x96], &[0]]);
    let error = part.metadata.need::<Vec<&str>>("tokenizer.ggml.tokens").unwrap_err().to_string();
    assert!(error.contains("element 1 is not UTF-8"), "{error}");
}

#[test]
fn numbers_keep_their_bits() {
    let part = with_pair(pair("nan", 6, &0x7fc0_1234u32.to_le_bytes())).read().unwrap();
    assert!(matches!(part.metadata.get("nan"), Some(Value::F32(v)) if v.to_bits() == 0x7fc0_1234));
}

#[test]
fn alignments() {
    let aligned = |kind, value: &[u8], alignment| {
        let mut raw = with_pair(pair("general.alignment", kind, value));
        raw.alignment = Some(alignment);
        raw
    };
    let mut wide = aligned(4, &64u32.to_le_bytes(), 64);
    assert_eq!(*wide.read().unwrap().tensors[1].bytes, [2; 12]);
    wide.tensors[1] = tensor("b.weight", &[3], 0, 96);
    assert!(matches!(told(&wide, &["begins at 96", "64"]), Problem::Offset { .. }));
    for wrong in [0u32, 3, 33, u32::MAX] {
        let raw = aligned(4, &wrong.to_le_bytes(), 32);
        assert!(matches!(told(&raw, &["general.alignment", &wrong.to_string()]), Problem::Alignment(_)));
    }
    assert!(matches!(told(&aligned(10, &[32, 0, 0, 0, 0, 0, 0, 0], 32), &["of type u64"]), Problem::Alignment(_)));
    // The data would begin far behind the end of the file.
    let raw = aligned(4, &(1u32 << 31).to_le_bytes(), 32);
    assert!(matches!(told(&raw, &["`a.weight`", "byte 2147483648"]), Problem::Truncated { .. }));
}

#[test]
fn overlapping_offsets_gaps_and_other_orders() {
    for (first, second) in [(0, 0), (0, 32), (0, 128), (64, 0), (0, u64::MAX), (u64::MAX, 64), (32, 96)] {
        let raw = with_tensors(vec![tensor("a.weight", &[32, 2], 2, first), tensor("b.weight", &[3], 0, second)]);
        assert!(matches!(told(&raw, &["begins at"]), Problem::Offset { .. }));
    }
}

#[test]
fn unknown_tensor_types() {
    // Retired, of activations, not invented yet.
    for kind in [4, 5, 9, 15, 31, 40, 1000, u32::MAX] {
        let raw = with_tensors(vec![tensor("a.weight", &[32, 2], kind, 0)]);
        assert!(matches!(told(&raw, &["`a.weight`", &kind.to_string(), "Q4_K"]), Problem::TensorType { .. }));
    }
}

#[test]
fn tensor_names() {
    let raw = with_tensors(vec![tensor("a.weight", &[32, 2], 2, 0), tensor("a.weight", &[3], 0, 64)]);
    assert!(matches!(told(&raw, &["`a.weight` stands twice"]), Problem::DuplicateTensor(_)));
    with_tensors(vec![tensor(&"n".repeat(63), &[3], 0, 0)]).read().unwrap();
    let raw = with_tensors(vec![tensor(&"n".repeat(64), &[3], 0, 0)]);
    assert!(matches!(told(&raw, &["64 bytes", "63"]), Problem::NameLength { .. }));
    let mut broken = tensor("a.weight", &[3], 0, 0);
    broken[8] = 0xff;
    assert!(matches!(told(&with_tensors(vec![broken]), &["a tensor name"]), Problem::NotUtf8 { .. }));
}

#[test]
fn shapes() {
    let shaped = |extents: &[i64], kind| with_tensors(vec![tensor("a.weight", extents, kind, 0)]);
    assert!(matches!(told(&shaped(&[1; 5], 0), &["5 dimensions", "4"]), Problem::Dimensions { .. }));
    for extents in
        [&[-1][..], &[32, -2], &[i64::MAX], &[1 << 31, 1 << 31, 1 << 31], &[0, i64::MAX, i64::MAX], &[i64::MIN, 1]]
    {
        let cut = shaped(extents, 0).read().unwrap_err();
        assert!(matches!(cut, Problem::Extents { .. }), "{extents:?}: {cut}");
    }
    assert!(matches!(told(&shaped(&[33], 2), &["33", "Q4_0", "32"]), Problem::Blocks { .. }));
    assert!(matches!(told(&shaped(&[128, 2], 12), &["128", "Q4_K", "256"]), Problem::Blocks { .. }));
    assert!(matches!(told(&shaped(&[1 << 40], 0), &["`a.weight`"]), Problem::Truncated { .. }));
    // Each tensor has a possible size, and all of them together none.
    let huge = |name: &str, offset: u64| tensor(name, &[1 << 60], 0, offset);
    let raw = with_tensors(vec![huge("a.weight", 0), huge("b.weight", 1 << 62), huge("c.weight", 1 << 63)]);
    assert!(matches!(told(&raw, &["`a.weight`"]), Problem::Truncated { .. }));
    // Dimensions that take three billion words to list.
    let mut many = tensor("a.weight", &[1], 0, 0);
    many[16..20].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(matches!(told(&with_tensors(vec![many]), &["dimensions"]), Problem::Dimensions { .. }));
    // Nothing and a single value are tensors too.
    assert_eq!(shaped(&[], 0).read().unwrap().tensors[0].len(), 1);
    assert!(shaped(&[32, 0], 2).read().unwrap().tensors[0].is_empty());
}

/// A file can claim to be the first of any number of parts.
#[test]
fn missing_parts_are_counted() {
    let mut raw = Raw::sound();
    let number = |key: &str, value: u16| pair(key, 2, &value.to_le_bytes());
    raw.pairs.extend([number("split.no", 0), number("split.count", 60_000)]);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model-00001-of-60000.gguf");
    std::fs::write(&path, raw.bytes()).unwrap();
    let (file, damage) = GgufFile::salvage(&path).unwrap();
    assert_eq!(file.tensors().len(), 2);
    let damage: Vec<String> = damage.iter().map(ToString::to_string).collect();
    assert_eq!(damage.len(), 4, "{damage:?}");
    assert!(damage[0].contains("model-00002-of-60000.gguf") && damage[2].contains("00004-of"), "{damage:?}");
    assert!(damage[3].contains("59996 more parts are missing or damaged"), "{damage:?}");
    assert!(GgufFile::open(&path).is_err());
}

#[test]
fn errors_name_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let absent = GgufFile::open(&path).unwrap_err().to_string();
    assert!(absent.contains("model.gguf") && absent.contains("cannot be read"), "{absent}");
    std::fs::write(&path, "").unwrap();
    let empty = GgufFile::open(&path).unwrap_err().to_string();
    assert!(empty.contains("model.gguf") && empty.contains("no GGUF file"), "{empty}");
}
