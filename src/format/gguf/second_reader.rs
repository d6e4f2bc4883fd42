//! A GGUF file as gguf-rs reads it. It shares no code with the reader here, so that a mistake of one shows.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use super::parse::{Part, parse_headers};
use super::value::Value;
use crate::checkpoint;
use crate::num::ggml::GgmlType;
use crate::tensor::Bytes;

/// What gguf-rs 0.1.8 is known to read differently, which is not compared.
pub const NOT_COMPARED: [&str; 2] =
    ["sizes of tensors, which it has wrong for several types", "texts that are not UTF-8"];

/// How gguf-rs reads the file `path` differently; empty where both agree in keys, values, and names, types, shapes and
/// offsets of tensors. Of a split model this is one part.
pub fn differences(path: &Path) -> Vec<String> {
    let ours = match checkpoint::map(path).map_err(|e| e.to_string()).and_then(|map| {
        let length = map.len();
        parse_headers(Bytes::Mapped(map, 0..length)).map_err(|e| e.to_string())
    }) {
        Ok(part) => part,
        Err(why) => return vec![format!("`{}` cannot be read: {why}", path.display())],
    };
    // It may panic on what it does not know.
    let theirs = catch_unwind(AssertUnwindSafe(|| read(path)));
    let theirs = theirs.unwrap_or_else(|_| Err("it panicked".into()));
    match theirs {
        Ok(theirs) => compared(&ours, &theirs),
        Err(why) => vec![format!("gguf-rs does not read `{}`: {why}", path.display())],
    }
}

fn read(path: &Path) -> Result<gguf_rs::GGUFModel, String> {
    let path = path.to_str().ok_or("its path is not UTF-8")?;
    let mut container = gguf_rs::get_gguf_container_array_size(path, u64::MAX).map_err(|e| e.to_string())?;
    container.decode().map_err(|e| e.to_string())
}

fn compared(ours: &Part, theirs: &gguf_rs::GGUFModel) -> Vec<String> {
    let mut out = Vec::new();
    let keys: BTreeSet<&str> = ours.metadata.iter().map(|(key, _)| key).collect();
    let other: BTreeSet<&str> = theirs.metadata().keys().map(String::as_str).collect();
    out.extend(keys.difference(&other).map(|key| format!("gguf-rs does not see the key `{key}`")));
    out.extend(other.difference(&keys).map(|key| format!("gguf-rs sees a key `{key}`")));
    for (key, value) in ours.metadata.iter() {
        if let Some(found) = theirs.metadata().get(key).filter(|found| !same(value, found)) {
            out.push(format!("gguf-rs reads the key `{key}` as {}", shortened(&found.to_string())));
        }
    }
    if ours.tensors.len() != theirs.tensors().len() {
        out.push(format!("gguf-rs sees {} tensors instead of {}", theirs.tensors().len(), ours.tensors.len()));
    }
    for (tensor, found) in ours.tensors.iter().zip(theirs.tensors()) {
        let shape: Vec<u64> = tensor.shape.iter().rev().map(|extent| *extent as u64).collect();
        let agree = found.name == tensor.name
            && found.kind == tensor.kind.id()
            && found.offset == tensor.offset
            && found.shape == shape;
        if !agree {
            let kind = GgmlType::from_id(found.kind).map_or(format!("type {}", found.kind), |kind| kind.to_string());
            out.push(format!(
                "gguf-rs reads tensor `{}` as `{}`: {kind}, shape {:?}, offset {}",
                tensor.name, found.name, found.shape, found.offset
            ));
        }
    }
    out
}

/// Whether a value is the same; of arrays the length counts.
fn same(ours: &Value, theirs: &serde_json::Value) -> bool {
    let number = |value: f64| theirs.as_f64().is_some_and(|found| found == value || (found as f32) == value as f32);
    match ours {
        Value::U8(v) => theirs.as_u64() == Some((*v).into()),
        Value::U16(v) => theirs.as_u64() == Some((*v).into()),
        Value::U32(v) => theirs.as_u64() == Some((*v).into()),
        Value::U64(v) => theirs.as_u64() == Some(*v),
        Value::I8(v) => theirs.as_i64() == Some((*v).into()),
        Value::I16(v) => theirs.as_i64() == Some((*v).into()),
        Value::I32(v) => theirs.as_i64() == Some((*v).into()),
        Value::I64(v) => theirs.as_i64() == Some(*v),
        // JSON has no numbers that are not finite.
        Value::F32(v) => number((*v).into()) || !v.is_finite(),
        Value::F64(v) => number(*v) || !v.is_finite(),
        Value::Bool(v) => theirs.as_bool() == Some(*v),
        Value::Text(text) => text.as_str().is_none_or(|text| theirs.as_str() == Some(text)),
        Value::Array(array) => theirs.as_array().is_none_or(|found| found.len() == array.len()),
    }
}

fn shortened(text: &str) -> &str {
    &text[..text.floor_char_boundary(60)]
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::value::Metadata;
    use super::super::write::{Plan, TensorSpec, Writer};
    use super::*;

    /// Both readers agree on every type; whatever is changed in what one of them read is noticed.
    #[test]
    fn mistakes_show() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.gguf");
        let mut metadata = Metadata::new();
        metadata.set("general.architecture", "llama");
        metadata.set("llama.block_count", 2u32);
        metadata.set("llama.rope.freq_base", 1e4f32);
        metadata.set("tokenizer.ggml.scores", vec![0.5f32, 1.5]);
        let specs: Vec<TensorSpec> =
            GgmlType::ALL.iter().map(|kind| TensorSpec::new(format!("{kind}.weight"), *kind, vec![2, 256])).collect();
        let mut writer = Writer::create(Plan::new(&path, &metadata, specs.clone(), None).unwrap()).unwrap();
        for spec in &specs {
            writer.put(&spec.name, &vec![0; spec.bytes().unwrap() as usize]).unwrap();
        }
        writer.finish().unwrap();
        assert_eq!(differences(&path), [""; 0]);

        let theirs = read(&path).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let changed = |change: &dyn Fn(&mut Part), said: &str| {
            let mut part = parse_headers(bytes.clone().into()).unwrap();
            change(&mut part);
            let found = compared(&part, &theirs);
            assert!(found.iter().any(|line| line.contains(said)), "{said}: {found:?}");
        };
        changed(&|part| part.metadata.set("llama.block_count", 3u32), "reads the key `llama.block_count` as 2");
        changed(&|part| part.metadata.set("other", true), "does not see the key `other`");
        changed(&|part| part.metadata.retain(|key| key != "llama.rope.freq_base"), "sees a key `llama.rope.freq_base`");
        changed(&|part| part.metadata.set("tokenizer.ggml.scores", vec![0.5f32]), "the key `tokenizer.ggml.scores`");
        changed(&|part| part.tensors[3].shape = vec![256, 2], "shape [256, 2]");
        changed(&|part| part.tensors[3].offset += 32, "offset");
        changed(&|part| part.tensors[3].name.push('x'), "reads tensor");
        changed(&|part| drop(part.tensors.pop()), "tensors instead of");
        std::fs::write(&path, &bytes[..40]).unwrap();
        assert!(differences(&path)[0].contains("cannot be read"), "{:?}", differences(&path));
    }
}
