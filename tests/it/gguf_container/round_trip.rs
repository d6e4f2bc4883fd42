//! What is written is read back by this crate, and by gguf-rs, which shares no code with it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use quantkit::format::gguf::file_type::FileType;
use quantkit::format::gguf::read::GgufFile;
use quantkit::format::gguf::value::{Metadata, Text, Value};
use quantkit::format::gguf::write::{
    ImportanceNote, Plan, TensorSpec, WriteError, Writer, parse_size, quantized_metadata, sort_as_written,
};
use quantkit::num::ggml::GgmlType;

use super::raw::{Raw, pair, tensor, text};

/// A key of every type.
fn metadata() -> Metadata {
    let mut metadata = Metadata::new();
    metadata.set("general.architecture", "llama");
    metadata.set("u8", 200u8);
    metadata.set("i8", -100i8);
    metadata.set("u16", 60_000u16);
    metadata.set("i16", -30_000i16);
    metadata.set("u32", u32::MAX);
    metadata.set("i32", i32::MIN);
    metadata.set("u64", u64::MAX);
    metadata.set("i64", i64::MIN);
    metadata.set("f32", f32::MIN_POSITIVE);
    metadata.set("f64", std::f64::consts::PI);
    metadata.set("bool", true);
    metadata.set("text", "naïve ▁");
    metadata.set("bytes", Text::from(vec![0xf0, 0x9f]));
    metadata.set("u8s", vec![1u8, 2]);
    metadata.set("i8s", vec![-1i8]);
    metadata.set("u16s", vec![1u16; 3]);
    metadata.set("i16s", vec![-1i16; 3]);
    metadata.set("u32s", vec![1u32; 3]);
    metadata.set("i32s", vec![-1i32; 3]);
    metadata.set("u64s", vec![1u64; 3]);
    metadata.set("i64s", vec![-1i64; 3]);
    metadata.set("f32s", vec![0.5f32, -0.0]);
    metadata.set("f64s", vec![1e300f64]);
    metadata.set("bools", vec![true, false]);
    metadata.set("texts", vec![Text::from("a"), Text::from(""), Text::from(vec![0xff])]);
    metadata.set("none", Vec::<Text>::new());
    metadata
}

/// A tensor of every type, and of every number of dimensions.
fn tensors() -> Vec<TensorSpec> {
    let of = |kind: GgmlType| TensorSpec::new(format!("blk.0.{kind}.weight"), kind, [3, 256]);
    let mut specs: Vec<TensorSpec> = GgmlType::ALL.into_iter().map(of).collect();
    specs.push(TensorSpec::new("one", GgmlType::F32, [5]));
    specs.push(TensorSpec::new("three", GgmlType::Q4_0, [2, 3, 32]));
    specs.push(TensorSpec::new("four", GgmlType::F16, [2, 3, 4, 5]));
    specs.push(TensorSpec::new("empty", GgmlType::F16, [0, 5]));
    specs
}

fn data(spec: &TensorSpec) -> Vec<u8> {
    let seed = spec.name.len() + spec.kind.id() as usize;
    (0..spec.bytes().unwrap() as usize).map(|i| (i * 7 + seed) as u8).collect()
}

pub fn write(path: &Path, metadata: &Metadata, specs: Vec<TensorSpec>, max: Option<u64>) -> Vec<std::path::PathBuf> {
    let plan = Plan::new(path, metadata, specs, max).unwrap();
    let (bytes, paths) = (plan.bytes(), plan.paths().map(Path::to_path_buf).collect::<Vec<_>>());
    let mut writer = Writer::create(plan).unwrap();
    while let Some(spec) = writer.next().cloned() {
        let data = data(&spec);
        // In pieces that fit nothing.
        for piece in data.chunks(1000) {
            writer.put(&spec.name, piece).unwrap();
        }
        if data.is_empty() {
            writer.put(&spec.name, &[]).unwrap();
        }
    }
    assert_eq!(writer.finish().unwrap(), paths);
    assert_eq!(paths.iter().map(|path| path.metadata().unwrap().len()).sum::<u64>(), bytes);
    paths
}

/// Name, type, shape and offset of every tensor and the keys, as gguf-rs sees them. Its sizes are wrong for several
/// types, so they are not looked at, and it may panic.
pub fn check_with_gguf_rs(path: &Path, keys: usize) {
    let read = || {
        let path = path.to_str().unwrap();
        gguf_rs::get_gguf_container_array_size(path, u64::MAX).unwrap().decode().unwrap()
    };
    let theirs = catch_unwind(AssertUnwindSafe(read)).unwrap();
    let part = quantkit::format::gguf::parse::parse(std::fs::read(path).unwrap().into()).unwrap();
    assert_eq!(theirs.get_version(), "v3");
    let mut ours: Vec<&str> = part.metadata.iter().map(|(key, _)| key).collect();
    ours.sort();
    assert_eq!(theirs.metadata().keys().map(String::as_str).collect::<Vec<_>>(), ours);
    assert_eq!(ours.len(), keys);
    assert_eq!(theirs.tensors().len(), part.tensors.len());
    assert_eq!(theirs.data_offset() % 32, 0);
    let file = std::fs::read(path).unwrap();
    for (theirs_of, tensor) in theirs.tensors().iter().zip(&part.tensors) {
        assert_eq!(theirs_of.name, tensor.name);
        assert_eq!(theirs_of.kind, tensor.kind.id());
        assert_eq!(theirs_of.offset, tensor.offset);
        let extents: Vec<u64> = tensor.shape.iter().rev().map(|e| *e as u64).collect();
        assert_eq!(theirs_of.shape, extents);
        let at = (theirs.data_offset() + theirs_of.offset) as usize;
        assert_eq!(file[at..at + tensor.bytes.len()], *tensor.bytes);
    }
}

#[test]
fn both_readers_read_what_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("made/on/the/way/model.gguf");
    write(&path, &metadata(), tensors(), None);
    let read = GgufFile::open(&path).unwrap();
    assert_eq!((read.version(), read.parts()), (3, &[path.clone()][..]));
    assert_eq!(read.metadata(), &metadata());
    for (spec, tensor) in tensors().iter().zip(read.tensors()) {
        assert_eq!((&tensor.name, tensor.kind, &tensor.shape), (&spec.name, spec.kind, &spec.shape));
        assert_eq!(*tensor.bytes, data(spec), "{}", spec.name);
    }
    assert_eq!(read.tensors().len(), tensors().len());
    assert_eq!(read.tensor("three").unwrap().shape, [2, 3, 32]);
    check_with_gguf_rs(&path, metadata().len());
    assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
}

/// The bytes, by the description of the format.
#[test]
fn the_bytes_of_a_small_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let mut metadata = Metadata::new();
    metadata.set("general.architecture", "llama");
    metadata.set("llama.block_count", 1u32);
    // Written files are aligned to 32 and are whole.
    metadata.set("general.alignment", 64u32);
    metadata.set("split.count", 3u16);
    let specs =
        vec![TensorSpec::new("a.weight", GgmlType::Q4_0, [2, 32]), TensorSpec::new("b.weight", GgmlType::F32, [3])];
    let mut writer = Writer::create(Plan::new(&path, &metadata, specs, None).unwrap()).unwrap();
    writer.put("a.weight", &[1; 36]).unwrap();
    writer.put("b.weight", &[2; 12]).unwrap();
    writer.finish().unwrap();
    let raw = Raw {
        pairs: vec![pair("general.architecture", 8, &text(b"llama")), pair("llama.block_count", 4, &[1, 0, 0, 0])],
        tensors: vec![tensor("a.weight", &[32, 2], 2, 0), tensor("b.weight", &[3], 0, 64)],
        data: [&[1; 36][..], &[0; 28], &[2; 12], &[0; 20]].concat(),
        ..Raw::default()
    };
    assert_eq!(std::fs::read(&path).unwrap(), raw.bytes());
}

#[test]
fn plans_that_cannot_be() {
    let planned = |name: &str, kind, shape: &[usize]| {
        let specs = vec![TensorSpec::new("a", GgmlType::F32, [1]), TensorSpec::new(name, kind, shape)];
        Plan::new(Path::new("x.gguf"), &Metadata::new(), specs, None).unwrap_err()
    };
    assert!(matches!(planned("a", GgmlType::F32, &[1]), WriteError::Twice(_)));
    assert!(matches!(planned(&"n".repeat(64), GgmlType::F32, &[1]), WriteError::Name(_)));
    assert!(matches!(planned("b", GgmlType::F32, &[1; 5]), WriteError::Dimensions { .. }));
    let blocks = planned("b", GgmlType::Q4_K, &[2, 128]).to_string();
    assert!(blocks.contains("`b` cannot be Q4_K") && blocks.contains("multiples of 256"), "{blocks}");
    assert!(matches!(planned("b", GgmlType::F32, &[usize::MAX, 2]), WriteError::Blocks { .. }));
    let many = (0..70_000).map(|i| TensorSpec::new(i.to_string(), GgmlType::F32, [1])).collect();
    let parts = Plan::new(Path::new("x.gguf"), &Metadata::new(), many, Some(1)).unwrap_err();
    assert!(matches!(parts, WriteError::Parts { count: 70_000 }));
}

#[test]
fn mistakes_while_writing_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("below/model.gguf");
    let begin = || {
        let specs = vec![TensorSpec::new("a", GgmlType::F32, [2]), TensorSpec::new("b", GgmlType::F32, [1])];
        Writer::create(Plan::new(&path, &Metadata::new(), specs, Some(32)).unwrap()).unwrap()
    };
    let mut writer = begin();
    assert!(matches!(writer.put("b", &[0; 4]), Err(WriteError::Order { wanted: Some(w), .. }) if w == "a"));
    writer.put("a", &[0; 5]).unwrap();
    assert!(matches!(writer.put("a", &[0; 4]), Err(WriteError::Length { found: 9, wanted: 8, .. })));
    writer.put("a", &[0; 3]).unwrap();
    assert!(matches!(writer.finish(), Err(WriteError::Unfinished { missing, .. }) if missing == "b"));
    let mut writer = begin();
    writer.put("a", &[0; 8]).unwrap();
    writer.put("b", &[0; 4]).unwrap();
    assert!(matches!(writer.put("c", &[]), Err(WriteError::Order { wanted: None, .. })));
    drop(writer);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn nothing_is_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let plan = || Plan::new(&path, &Metadata::new(), vec![], None).unwrap();
    let writer = Writer::create(plan()).unwrap();
    std::fs::write(&path, "mine").unwrap();
    assert!(matches!(writer.finish(), Err(WriteError::Exists(_))));
    assert!(matches!(Writer::create(plan()), Err(WriteError::Exists(_))));
    assert_eq!(std::fs::read(&path).unwrap(), b"mine");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn what_killed_runs_left_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let left = dir.path().join(format!(".model.gguf.partial-{}", i32::MAX));
    std::fs::write(&left, "half").unwrap();
    write(&dir.path().join("model.gguf"), &Metadata::new(), tensors(), None);
    assert!(!left.exists());
}

#[test]
fn keys_and_tensors_in_the_order_of_llama_quantize() {
    let mut source = Metadata::new();
    for (key, value) in [
        ("general.architecture", Value::from("llama")),
        ("general.file_type", 1u32.into()),
        ("split.no", 0u16.into()),
        ("split.tensors.count", 9i32.into()),
        ("general.quantization_version", 2u32.into()),
        ("tokenizer.ggml.model", "gpt2".into()),
    ] {
        source.set(key, value);
    }
    let note = ImportanceNote { file: "é".repeat(64), dataset: None, entries: 210, chunks: Some(32) };
    let metadata = quantized_metadata(&source, FileType::Q4_K_M, Some(&note));
    assert_eq!(
        metadata.iter().map(|(key, _)| key).collect::<Vec<_>>(),
        [
            "general.architecture",
            "tokenizer.ggml.model",
            "general.quantization_version",
            "general.file_type",
            "quantize.imatrix.file",
            "quantize.imatrix.entries_count",
            "quantize.imatrix.chunks_count",
        ]
    );
    assert_eq!(metadata.get("general.file_type"), Some(&Value::U32(15)));
    assert_eq!(metadata.need::<&str>("quantize.imatrix.file"), Ok(&*"é".repeat(63)));

    let mut names =
        ["blk.10.attn_k.weight", "token_embd.weight", "blk.2.ffn_up.weight", "output.weight", "blk.2.attn_q.weight"];
    sort_as_written(&mut names, |name| name);
    assert_eq!(
        names,
        ["output.weight", "token_embd.weight", "blk.2.attn_q.weight", "blk.2.ffn_up.weight", "blk.10.attn_k.weight"]
    );
}

#[test]
fn sizes() {
    assert_eq!(parse_size("300"), Some(300));
    assert_eq!(parse_size("300M"), Some(300_000_000));
    assert_eq!(parse_size("2G"), Some(2_000_000_000));
    for wrong in ["", "0", "M", "-1M", "+1M", "1.5G", "2T", "99999999999G"] {
        assert_eq!(parse_size(wrong), None, "{wrong}");
    }
}
