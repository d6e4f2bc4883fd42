//! Models in several files.

use std::path::{Path, PathBuf};

use quantkit::format::gguf::value::{Metadata, Value};
use quantkit::format::gguf::write::TensorSpec;
use quantkit::format::gguf::{parse::Problem, read::GgufFile};
use quantkit::num::ggml::GgmlType;

use super::round_trip::{check_with_gguf_rs, write};

fn metadata() -> Metadata {
    let mut metadata = Metadata::new();
    metadata.set("general.architecture", "llama");
    metadata
}

/// Four tensors of 32 padded bytes, two a part, and a large one that stands alone.
fn written(dir: &Path) -> Vec<PathBuf> {
    let small = |name: &str| TensorSpec::new(name, GgmlType::F32, [4]);
    let specs = vec![small("a"), small("b"), TensorSpec::new("big", GgmlType::F32, [40]), small("c"), small("d")];
    write(&dir.join("model.gguf"), &metadata(), specs, Some(64))
}

#[test]
fn parts_are_written_and_read_as_one() {
    let dir = tempfile::tempdir().unwrap();
    let paths = written(dir.path());
    let names: Vec<_> = paths.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
    assert_eq!(names, [1, 2, 3].map(|i| format!("model-0000{i}-of-00003.gguf")));
    let model = GgufFile::open(&paths[0]).unwrap();
    assert_eq!(model.metadata(), &metadata());
    assert_eq!(model.tensors().iter().map(|t| &*t.name).collect::<Vec<_>>(), ["a", "b", "big", "c", "d"]);
    assert_eq!(model.parts(), paths);
    assert_eq!(model.tensor("c").unwrap().bytes.len(), 16);
    for (i, path) in paths.iter().enumerate() {
        let part = quantkit::format::gguf::parse::parse(std::fs::read(path).unwrap().into()).unwrap();
        let first = [("general.architecture", Value::from("llama"))];
        let keys = [
            ("split.no", Value::U16(i as u16)),
            ("split.tensors.count", Value::I32(5)),
            ("split.count", Value::U16(3)),
        ];
        let wanted: Vec<_> = first.into_iter().filter(|_| i == 0).chain(keys).collect();
        assert_eq!(part.metadata.iter().map(|(k, v)| (k, v.clone())).collect::<Vec<_>>(), wanted);
        check_with_gguf_rs(path, wanted.len());
    }
}

#[test]
fn what_fits_is_not_split() {
    let dir = tempfile::tempdir().unwrap();
    let specs = vec![TensorSpec::new("a", GgmlType::F32, [4])];
    let paths = write(&dir.path().join("model.gguf"), &metadata(), specs, Some(32));
    assert_eq!(paths, [dir.path().join("model.gguf")]);
    assert!(GgufFile::open(&paths[0]).unwrap().metadata().get("split.count").is_none());
}

#[test]
fn a_further_part_points_to_the_first() {
    let dir = tempfile::tempdir().unwrap();
    let error = GgufFile::open(&written(dir.path())[1]).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error.problem, Problem::NotFirst { number: 2, .. }), "{text}");
    assert!(text.contains("part 2") && text.contains("model-00001-of-00003.gguf`"), "{text}");
}

#[test]
fn missing_parts() {
    let dir = tempfile::tempdir().unwrap();
    let paths = written(dir.path());
    std::fs::remove_file(&paths[2]).unwrap();
    let error = GgufFile::open(&paths[0]).unwrap_err();
    assert!(matches!(error.problem, Problem::Io(_)) && error.path == paths[2], "{error}");
}

#[test]
fn renamed_parts() {
    let dir = tempfile::tempdir().unwrap();
    let paths = written(dir.path());
    for wrong in ["model.gguf", "model-00001-of-00004.gguf", "model-00002-of-00003.gguf", "model-1-of-3.gguf"] {
        let renamed = dir.path().join("renamed").join(wrong);
        std::fs::create_dir_all(renamed.parent().unwrap()).unwrap();
        std::fs::copy(&paths[0], &renamed).unwrap();
        let error = GgufFile::open(&renamed).unwrap_err();
        assert!(matches!(error.problem, Problem::PartName { count: 3 }), "{error}");
        assert!(error.to_string().contains("-00001-of-00003.gguf"), "{error}");
    }
}

#[test]
fn wrong_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let paths = written(dir.path());
    std::fs::copy(&paths[1], &paths[2]).unwrap();
    let error = GgufFile::open(&paths[0]).unwrap_err();
    assert!(matches!(error.problem, Problem::PartNumber { found: 2, wanted: 3, .. }), "{error}");
    // A whole model in the place of a part.
    let specs = vec![TensorSpec::new("a", GgmlType::F32, [4])];
    std::fs::remove_file(&paths[2]).unwrap();
    write(&paths[2], &metadata(), specs, None);
    let error = GgufFile::open(&paths[0]).unwrap_err();
    assert!(matches!(error.problem, Problem::PartNumber { found: 1, wanted: 3, .. }), "{error}");
}

#[test]
fn parts_of_other_models() {
    let dir = tempfile::tempdir().unwrap();
    let paths = written(dir.path());
    // The same number of parts, another number of tensors.
    let other = tempfile::tempdir().unwrap();
    let specs = ["w", "x", "y"].map(|name| TensorSpec::new(name, GgmlType::F32, [9])).to_vec();
    let others = write(&other.path().join("model.gguf"), &metadata(), specs, Some(64));
    for i in [1, 2] {
        std::fs::copy(&others[i], &paths[i]).unwrap();
    }
    let error = GgufFile::open(&paths[0]).unwrap_err();
    assert!(matches!(error.problem, Problem::PartTensors { found: 4, wanted: 5 }), "{error}");
}

#[test]
fn a_tensor_in_two_parts() {
    let dir = tempfile::tempdir().unwrap();
    let paths = written(dir.path());
    // The name of `c` becomes that of a tensor of the first part.
    let mut part = std::fs::read(&paths[2]).unwrap();
    let at = part.windows(9).position(|nine| nine == [1, 0, 0, 0, 0, 0, 0, 0, b'c']).unwrap();
    part[at + 8] = b'a';
    std::fs::write(&paths[2], part).unwrap();
    let error = GgufFile::open(&paths[0]).unwrap_err();
    assert!(matches!(&error.problem, Problem::DuplicateTensor(name) if name == "a"), "{error}");
}
