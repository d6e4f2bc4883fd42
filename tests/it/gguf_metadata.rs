//! GGUF metadata against llama.cpp's converter (`reference/make_gguf_metadata.py`), key by key, and back again.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use quantkit::checkpoint::Checkpoint;
use quantkit::format::gguf::metadata::{Described, Options, describe};
use quantkit::format::gguf::names::Architecture;
use quantkit::format::gguf::pretokenizer;
use quantkit::format::gguf::read::GgufFile;
use quantkit::format::gguf::restore::tokenizer as restore_tokenizer;
use quantkit::format::gguf::restore::{self, Tensors};
use quantkit::format::gguf::value::{Array, Metadata, Text, Value};
use quantkit::format::pretty;
use quantkit::model::config::ModelConfig;
use quantkit::model::tokenizer::Tokenizer;
use serde_json::Value as Json;
use sha2::{Digest, Sha256};

use crate::support::fixture;

/// The file type of the goldens, F16.
const F16: u32 = 1;

fn json(path: &Path) -> Json {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The model folder of a case, put together as it was when its golden was made.
fn folder(case: &str, golden: &Json) -> (tempfile::TempDir, PathBuf) {
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path().join(golden["folder"].as_str().unwrap());
    std::fs::create_dir(&dir).unwrap();
    for entry in std::fs::read_dir(fixture(&format!("gguf/metadata/{case}"))).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), dir.join(entry.file_name())).unwrap();
    }
    std::fs::remove_file(dir.join("golden.json")).unwrap();
    let weights = fixture(&format!("families/{}/model.safetensors", golden["weights"].as_str().unwrap()));
    std::fs::copy(weights, dir.join("model.safetensors")).unwrap();
    (tmp, dir)
}

/// The weights of some cases were made for a smaller vocabulary than their tokenizer has: the config alone counts.
fn open(dir: &Path) -> (Checkpoint, ModelConfig) {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let config = ModelConfig::stated_by(&checkpoint).unwrap();
    (checkpoint, config)
}

fn described(dir: &Path) -> Described {
    let (checkpoint, config) = open(dir);
    describe(&checkpoint, &config, &Options { file_type: F16, ..Options::default() }).unwrap()
}

/// The elements of an array in GGUF encoding, hashed, and how many they are.
fn digest(array: &Array) -> (usize, String) {
    let mut hash = Sha256::new();
    match array {
        Array::Text(texts) => texts.iter().for_each(|t| {
            hash.update((t.bytes().len() as u64).to_le_bytes());
            hash.update(t.bytes());
        }),
        Array::I32(values) => values.iter().for_each(|v| hash.update(v.to_le_bytes())),
        Array::F32(values) => values.iter().for_each(|v| hash.update(v.to_le_bytes())),
        other => panic!("no golden has {other:?}"),
    }
    (array.len(), hash.finalize().iter().map(|b| format!("{b:02x}")).collect())
}

fn numbers(values: &Json) -> Vec<f64> {
    values.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
}

/// Whether a value is the golden's, type included.
fn equal(found: &Value, wanted: &Json) -> bool {
    let value = &wanted["value"];
    match (found, wanted["type"].as_str().unwrap()) {
        (Value::Text(text), "string") => text.as_str() == value.as_str(),
        (Value::U32(n), "uint32") => Some(u64::from(*n)) == value.as_u64(),
        (Value::I32(n), "int32") => Some(i64::from(*n)) == value.as_i64(),
        (Value::F32(n), "float32") => Some(f64::from(*n)) == value.as_f64(),
        (Value::Bool(b), "bool") => Some(*b) == value.as_bool(),
        (Value::Array(array), kind) => {
            let same_type = matches!(
                (array, kind),
                (Array::Text(_), "array<string>") | (Array::I32(_), "array<int32>") | (Array::F32(_), "array<float32>")
            );
            same_type
                && match array {
                    _ if value.is_null() => {
                        let (length, hash) = digest(array);
                        Some(length as u64) == wanted["length"].as_u64() && Some(&*hash) == wanted["sha256"].as_str()
                    }
                    Array::Text(texts) => {
                        let list: Vec<Text> =
                            value.as_array().unwrap().iter().map(|v| v.as_str().unwrap().into()).collect();
                        *texts == list
                    }
                    Array::I32(list) => list.iter().map(|v| f64::from(*v)).collect::<Vec<_>>() == numbers(value),
                    Array::F32(list) => list.iter().map(|v| f64::from(*v)).collect::<Vec<_>>() == numbers(value),
                    _ => false,
                }
        }
        _ => false,
    }
}

/// Compares key by key, in order. `extra` are keys that the converter does not write, `other` keys whose value
/// is meant to be another one.
#[track_caller]
fn compare(found: &Metadata, golden: &Json, extra: &[&str], other: &[&str]) {
    let pairs = golden["pairs"].as_array().unwrap();
    for wanted in pairs {
        let key = wanted["key"].as_str().unwrap();
        let value = found.get(key).unwrap_or_else(|| panic!("`{key}` is missing"));
        if other.contains(&key) {
            assert!(!equal(value, wanted), "`{key}` is the converter's after all");
        } else {
            let shown = format!("{value:?}");
            assert!(equal(value, wanted), "`{key}` is {:.300}, not {:.300}", shown, wanted.to_string());
        }
    }
    let keys: Vec<&str> = found.iter().map(|(key, _)| key).filter(|key| !extra.contains(key)).collect();
    let wanted: Vec<&str> = pairs.iter().map(|pair| pair["key"].as_str().unwrap()).collect();
    assert_eq!(keys, wanted, "keys and their order");
    for key in extra {
        assert!(found.get(key).is_some(), "`{key}` is missing");
    }
}

struct Case {
    extra: &'static [&'static str],
    other: &'static [&'static str],
    /// What the warnings are about, in order.
    warnings: &'static [&'static str],
}

const EQUAL: Case = Case { extra: &[], other: &[], warnings: &[] };
const BPE: Case = Case { warnings: &["does not know this vocabulary"], ..EQUAL };
/// The config names another end than the tokenizer, for which the converter has no key.
const TWO_ENDS: Case = Case { extra: &["tokenizer.ggml.eom_token_id"], ..BPE };
/// Windows in every other layer and a scale that llama.cpp does not have.
const GEMMA: Case = Case {
    extra: &["gemma3.attention.sliding_window_pattern", "gemma3.attention.scale"],
    warnings: &["attention scores are scaled by"],
    ..EQUAL
};

fn check(name: &str, case: &Case) {
    let golden = json(&fixture(&format!("gguf/metadata/{name}/golden.json")));
    let (_tmp, dir) = folder(name, &golden);
    let found = described(&dir);
    compare(&found.metadata, &golden, case.extra, case.other);
    assert_eq!(found.warnings.len(), case.warnings.len(), "{:?}", found.warnings);
    for (found, wanted) in found.warnings.iter().zip(case.warnings) {
        assert!(found.contains(wanted), "{found}");
    }
    let factors = golden.get("rope_freqs").map(numbers);
    let values = found.rope_freqs.iter().flatten().map(|v| f64::from(*v)).collect::<Vec<_>>();
    assert_eq!(values, factors.unwrap_or_default());
    and_back(&dir, &found);
}

/// A folder made of the metadata reads as the same model, tokenizes alike, and has the same metadata again.
fn and_back(dir: &Path, first: &Described) {
    let (checkpoint, config) = open(dir);
    let architecture = Architecture::of(config.family).unwrap();
    let has = |name: &str| {
        let there = architecture.to_hf(name).unwrap().unwrap();
        let inner = there.strip_prefix("model.").map(|inner| format!("{}{inner}", config.prefix));
        checkpoint.tensors().contains_key(&inner.unwrap_or(there))
    };
    let tensors = Tensors { has: &has, rope_freqs: first.rope_freqs.as_deref() };
    let files = restore::files(&first.metadata, tensors).unwrap();
    let tmp = tempfile::tempdir().unwrap();
    let back = tmp.path().join(dir.file_name().unwrap());
    std::fs::create_dir(&back).unwrap();
    for (name, content) in files.named() {
        std::fs::write(back.join(name), pretty(content)).unwrap();
    }
    std::fs::copy(dir.join("model.safetensors"), back.join("model.safetensors")).unwrap();

    let (again, restored) = open(&back);
    let close = |a: f32, b: f32| (a / b - 1.0).abs() < 1e-5;
    assert_eq!(restored.layers, config.layers);
    let sizes = |c: &ModelConfig| [c.hidden, c.intermediate, c.heads, c.kv_heads, c.head_dim, c.vocab, c.max_positions];
    assert_eq!(sizes(&restored), sizes(&config));
    let flags = |c: &ModelConfig| (c.tied, c.biases.clone());
    assert_eq!(flags(&restored), flags(&config));
    assert_eq!((restored.activation, restored.eps), (config.activation, config.eps));
    assert!(close(restored.attention_scale, config.attention_scale));
    assert!(close(restored.embedding_scale, config.embedding_scale));
    assert_eq!(restored.ropes.len(), config.ropes.len());
    for (a, b) in restored.ropes.iter().zip(&config.ropes) {
        assert!(close(a.factor, b.factor));
        assert!(a.inv_freq.iter().zip(&b.inv_freq).all(|(a, b)| close(*a, *b)), "{a:?} {b:?}");
    }

    let (old, new) = (Tokenizer::load(&checkpoint).unwrap(), Tokenizer::load(&again).unwrap());
    for text in [
        "The other, and then the inner thing.",
        " a  sand 1234 bananas\n\n  in it's THE",
        "<|im_start|>the<s>in</s>",
        "",
    ] {
        assert_eq!(new.encode(text).unwrap(), old.encode(text).unwrap(), "{text:?}");
    }
    let ids = old.encode("the rest, and in it").unwrap();
    assert_eq!(new.decode(&ids, false).unwrap(), old.decode(&ids, false).unwrap());
    assert_eq!(new.eos().first(), old.eos().first());
    let all = |tokenizer: &Tokenizer| tokenizer.eos().iter().copied().collect::<BTreeSet<u32>>();
    assert_eq!(all(&new), all(&old));

    let second = describe(&again, &restored, &Options { file_type: F16, ..Options::default() }).unwrap();
    // What only model cards have does not come back, nor do flags that say what is so anyway.
    let kept = |key: &str| !key.starts_with("general.") && !key.contains(".add_") && !key.ends_with(".eot_token_id");
    for (key, value) in first.metadata.iter().filter(|(key, _)| kept(key)) {
        if key == "tokenizer.ggml.scores" {
            continue;
        }
        let found = second.metadata.get(key).unwrap_or_else(|| panic!("`{key}` is missing"));
        assert_eq!(without_unknown(found), without_unknown(value), "`{key}`");
    }
}

/// Token types with the unknown token as one for control, which it is to the converter unless there is a
/// tokenizer.model.
fn without_unknown(value: &Value) -> Value {
    match value {
        Value::Array(Array::I32(kinds)) => {
            kinds.iter().map(|k| if *k == 2 { 3 } else { *k }).collect::<Vec<_>>().into()
        }
        other => other.clone(),
    }
}

macro_rules! cases {
    ($($name:ident $case:expr;)*) => {$(
        #[test]
        fn $name() {
            check(stringify!($name), &$case);
        }
    )*};
}

cases! {
    llama EQUAL;
    // Scores that order pieces as the merges do, where the converter gives all the same one.
    llama_hf Case { other: &["tokenizer.ggml.scores"], ..EQUAL };
    llama3 Case { extra: &["tokenizer.ggml.eot_token_id"], ..BPE };
    llama_linear BPE;
    llama_yarn BPE;
    mistral Case {
        extra: &["llama.attention.sliding_window"],
        warnings: &["limited to windows of 8 tokens", "does not know this vocabulary"],
        ..EQUAL
    };
    qwen2 TWO_ENDS;
    qwen3 TWO_ENDS;
    qwen3_legacy TWO_ENDS;
    gemma3_text GEMMA;
    gemma3 Case {
        extra: &[
            "gemma3.attention.sliding_window_pattern",
            "gemma3.attention.scale",
            "tokenizer.ggml.eot_token_id",
        ],
        ..GEMMA
    };
    smollm2 BPE;
}

#[test]
fn the_demo_model() {
    let golden = json(&fixture("gguf/metadata/demo.json"));
    let found = described(&Path::new(env!("CARGO_MANIFEST_DIR")).join("calib/demo/target"));
    compare(&found.metadata, &golden, &[], &[]);
}

/// SmolLM2-135M-Instruct lies outside the repository; `QUANTKIT_TEST_SMOLLM2` names its folder.
#[test]
fn smollm2_135m() {
    let Some(dir) = std::env::var_os("QUANTKIT_TEST_SMOLLM2") else {
        eprintln!("skipped: QUANTKIT_TEST_SMOLLM2 names no folder");
        return;
    };
    let golden = json(&fixture("gguf/metadata/smollm2-135m.json"));
    let found = described(Path::new(&dir));
    compare(&found.metadata, &golden, &[], &[]);
    assert_eq!(found.warnings, [""; 0]);
}

/// llama.cpp's vocabularies for tests, with texts and the ids that transformers gives them, lie outside the
/// repository; `QUANTKIT_TEST_GGUF_VOCABS` names their folder (`models/` of llama.cpp).
#[test]
fn vocabularies_of_other_writers() {
    let Some(dir) = std::env::var_os("QUANTKIT_TEST_GGUF_VOCABS") else {
        eprintln!("skipped: QUANTKIT_TEST_GGUF_VOCABS names no folder");
        return;
    };
    let names = [
        "command-r",
        "deepseek-coder",
        "deepseek-llm",
        "falcon",
        "gpt-2",
        "llama-bpe",
        "llama-spm",
        "mpt",
        "phi-3",
        "qwen2",
        "qwen35",
        "refact",
        "starcoder",
    ];
    let mut wrong = Vec::new();
    for name in names {
        let path = Path::new(&dir).join(format!("ggml-vocab-{name}.gguf"));
        let file = GgufFile::open(&path).unwrap();
        let restored = restore_tokenizer::tokenizer(file.metadata()).unwrap();
        assert_eq!(restored.warnings, [""; 0], "{name}");
        let tokenizer: tokenizers::Tokenizer = restored.tokenizer.to_string().parse().unwrap();
        if file.metadata().need::<&str>("tokenizer.ggml.model") == Ok("gpt2") {
            let probe = tokenizer.encode_fast(pretokenizer::PROBE, true).unwrap();
            let decision = pretokenizer::decide(&restored.tokenizer, probe.get_ids()).unwrap();
            let pre: &str = file.metadata().need("tokenizer.ggml.pre").unwrap();
            // One vocabulary has two names; the vocabulary of `qwen35` here is that of Qwen2, with other rules.
            let wanted = if pre == "mpt" { "olmo" } else { pre };
            if decision.name != wanted || decision.warning.is_some() != (pre == "qwen35") {
                wrong.push(format!("{name}: {decision:?}, not `{pre}`"));
            }
        }
        let side = |end: &str| std::fs::read_to_string(format!("{}.{end}", path.display())).unwrap();
        let (texts, ids) = (side("inp"), side("out"));
        for (text, wanted) in texts.split("\n__ggml_vocab_test__\n").zip(ids.lines()) {
            let wanted: Vec<u32> = wanted.split_whitespace().map(|id| id.parse().unwrap()).collect();
            let found = tokenizer.encode_fast(text, false).unwrap();
            if found.get_ids() != wanted {
                wrong.push(format!("{name}: {text:?}\n  {:?}\n  {wanted:?}", found.get_ids()));
            }
        }
    }
    assert!(wrong.is_empty(), "{} texts differ:\n{}", wrong.len(), wrong.join("\n"));
}
