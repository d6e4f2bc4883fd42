//! `quantkit gguf`, `imatrix` and `convert`: files that are written, read again, measured and converted back.

use std::fs;
use std::path::Path;

use quantkit::format::gguf::imatrix::Imatrix;
use quantkit::format::gguf::read::GgufFile;
use quantkit::num::ggml::GgmlType;
use serde_json::json;

use crate::support::scene::{Scene, tensors};

pub fn perplexity(scene: &Scene, model: &[&str]) -> f64 {
    let args =
        [&["eval", "ppl"], model, &["--text", "eval.txt", "--window", "32", "--max-windows", "8", "--json"]].concat();
    scene.run(&args).ok().json()["perplexity"].as_f64().unwrap()
}

fn kinds(path: &Path) -> Vec<(String, GgmlType)> {
    GgufFile::open(path).unwrap().tensors().iter().map(|t| (t.name.clone(), t.kind)).collect()
}

/// What is written is read back and measured: the source, the file, and the same types without importance.
#[test]
fn files_are_measured_and_judged() {
    let scene = Scene::demo();
    let gguf = |kind: &str, out: &str, more: &[&str]| {
        scene.run(&[&["gguf", "--type", kind, "-o", out, "--eval-windows", "2", "--json"], more].concat())
    };
    let of = |value: &serde_json::Value, key: &str| value[key]["perplexity"].as_f64().unwrap();
    let again = |model: &[&str]| {
        let args = [&["eval", "ppl"], model, &["--max-windows", "2", "--json"]].concat();
        scene.run(&args).ok().json()["perplexity"].as_f64().unwrap()
    };
    let plain = gguf("Q4_0", "plain.gguf", &[]).ok().json();
    assert_eq!((of(&plain, "perplexity_before"), of(&plain, "perplexity_after")), (again(&[]), again(&["plain.gguf"])));
    assert!(plain["perplexity_rtn"].is_null() && plain["loses_to_rtn"].is_null(), "{plain}");
    // Plain rounding beside importance is the file without it.
    let weighed = gguf("Q4_0", "weighed.gguf", &["--imatrix", "auto", "--chunks", "2"]).ok().json();
    assert_eq!(of(&weighed, "perplexity_after"), again(&["weighed.gguf"]));
    assert_eq!(of(&weighed, "perplexity_rtn"), of(&plain, "perplexity_after"));
    assert!(weighed["loses_to_rtn"].is_boolean(), "{weighed}");
    // A split file, and one that is worse than the user allows: it is written all the same.
    gguf("Q4_0", "split.gguf", &["--split-max-size", "1M"]).ok();
    gguf("Q2_K", "bad.gguf", &["--max-increase", "0.01"]).ended(1).says(&["more than the 0.01 %", "`bad.gguf`"]);
    assert!(again(&["bad.gguf"]) > again(&[]));
    assert!(scene.listing().keys().all(|name| !name.starts_with('.')));
}

/// Every kind of type: what it costs in perplexity is bounded, and F16 costs nothing.
#[test]
fn types_of_the_demo_checkpoint() {
    let scene = Scene::demo();
    let source = perplexity(&scene, &[]);
    let types = [
        ("F16", 1e-6),
        ("BF16", 2e-3),
        ("Q8_0", 5e-3),
        ("Q6_K", 1e-2),
        ("Q5_1", 3e-2),
        ("Q4_K_M", 5e-2),
        ("IQ4_XS", 8e-2),
        ("Q3_K_M", 0.15),
        ("Q2_K", 1.0),
    ];
    for (kind, ceiling) in types {
        let file = format!("{kind}.gguf");
        scene.run(&["gguf", "--type", kind, "-o", &file]).ok();
        let found = perplexity(&scene, &[&file]);
        assert!(found / source - 1.0 < ceiling, "{kind}: {found} against {source}");
    }
}

/// Byte-level BPE without merges: the printable characters of ASCII and the line end.
pub fn byte_level_tokenizer() -> String {
    let mut vocab = serde_json::Map::new();
    let names = ["<s>".to_string(), "</s>".into(), "\u{120}".into(), "\u{10a}".into()];
    for name in names.into_iter().chain(('!'..='~').map(String::from)) {
        vocab.insert(name, vocab.len().into());
    }
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "special": true, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false})
    };
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": [special(0, "<s>"), special(1, "</s>")],
        "pre_tokenizer": bytes,
        "decoder": bytes,
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "ignore_merges": false},
    });
    tokenizer.to_string()
}

/// Families whose rows turn, whose norms lack one, which have biases: through the file and back, the model is the same.
#[test]
fn families_come_back_as_they_were() {
    for family in ["llama", "llama3", "llama_linear", "llama_yarn", "qwen2", "qwen3", "gemma3_text", "smollm2"] {
        let scene = Scene::tiny(family);
        scene.write("model/tokenizer.json", byte_level_tokenizer());
        scene.run(&["gguf", "model", "--type", "F32", "-o", "model.gguf"]).ok();
        let (source, file) = (perplexity(&scene, &["model"]), perplexity(&scene, &["model.gguf"]));
        assert!((file / source - 1.0).abs() < 1e-5, "{family}: {file} against {source}");
        scene.run(&["convert", "model.gguf", "-o", "back", "--dtype", "f32"]).ok();
        let back = perplexity(&scene, &["back"]);
        assert!((back / source - 1.0).abs() < 1e-5, "{family}: {back} against {source}");
    }
}

#[test]
fn importance_helps_and_repeats() {
    let scene = Scene::demo();
    scene.run(&["imatrix", "-o", "a.gguf", "--calib", "calib.txt", "--chunks", "16"]).ok();
    scene.run(&["imatrix", "-o", "a.dat", "--format", "dat", "--calib", "calib.txt", "--chunks", "16"]).ok();
    let [gguf, dat] = ["a.gguf", "a.dat"].map(|name| Imatrix::open(&scene.path(name)).unwrap());
    assert_eq!(gguf.entries.len(), 28);
    assert!(gguf.entries.keys().eq(dat.entries.keys()));
    for (name, entry) in &gguf.entries {
        for (a, b) in entry.means().iter().zip(dat.entries[name].means()) {
            assert!((a - b).abs() <= 1e-4 * a.abs(), "{name}: {a} {b}");
        }
    }
    scene.run(&["gguf", "--type", "Q2_K", "-o", "plain.gguf"]).ok();
    scene.run(&["gguf", "--type", "Q2_K", "-o", "file.gguf", "--imatrix", "a.gguf"]).ok();
    let auto = ["gguf", "--type", "Q2_K", "--imatrix", "auto", "--calib", "calib.txt", "--chunks", "16", "--threads"];
    for threads in ["1", "2"] {
        scene.run(&[&auto[..], &[threads, "-o", &format!("auto{threads}.gguf")]].concat()).ok();
    }
    assert_eq!(scene.read("auto1.gguf"), scene.read("auto2.gguf"));
    let data = |name: &str| -> Vec<Vec<u8>> {
        GgufFile::open(&scene.path(name)).unwrap().tensors().iter().map(|t| t.bytes.to_vec()).collect()
    };
    assert_eq!(data("auto1.gguf"), data("file.gguf"));
    let on_more = |model: &str| {
        let args = ["eval", "ppl", model, "--window", "256", "--max-windows", "20", "--json"];
        scene.run(&args).ok().json()["perplexity"].as_f64().unwrap()
    };
    let (plain, better) = (on_more("plain.gguf"), on_more("file.gguf"));
    assert!(better < plain, "{better} with importance, {plain} without");
}

/// The same size and types, and nearer to the source than importance alone brings it.
#[test]
fn errors_that_mend_each_other() {
    let scene = Scene::demo();
    let data = ["--calib", "calib.txt", "--chunks", "24"];
    for kind in ["Q4_0", "Q4_K_M", "Q2_K"] {
        scene.run(&[&["gguf", "--type", kind, "-o", "plain.gguf", "--imatrix", "auto"], &data[..]].concat()).ok();
        scene.run(&[&["gguf", "--type", kind, "-o", "fed.gguf", "--error-feedback"], &data[..]].concat()).ok();
        assert_eq!(kinds(&scene.path("fed.gguf")), kinds(&scene.path("plain.gguf")));
        let divergence = |file: &str| {
            let args = ["eval", "kl", file, "--text", "eval.txt", "--window", "128", "--json"];
            scene.run(&args).ok().json()["corpora"][0]["kl"]["mean"].as_f64().unwrap()
        };
        let (plain, fed) = (divergence("plain.gguf"), divergence("fed.gguf"));
        assert!(fed < 0.9 * plain, "{kind}: {fed} with feedback, {plain} with importance");
        ["plain.gguf", "fed.gguf"].iter().for_each(|file| fs::remove_file(scene.path(file)).unwrap());
    }
    let args = ["gguf", "--type", "Q4_K_M", "--error-feedback", "--calib", "calib.txt", "--chunks", "4", "--threads"];
    for threads in ["1", "2"] {
        scene.run(&[&args[..], &[threads, "-o", &format!("fed{threads}.gguf")]].concat()).ok();
    }
    assert_eq!(scene.read("fed1.gguf"), scene.read("fed2.gguf"));
}

/// From an artifact, and from another GGUF file: told, and done.
#[test]
fn quantized_sources() {
    let scene = Scene::demo();
    scene.run(&["rtn", "-o", "w8", "--bits", "8", "--no-eval"]).ok();
    scene
        .run(&["gguf", "w8", "--type", "Q8_0", "-o", "of-artifact.gguf"])
        .ok()
        .says(&["is quantized already (rtn, stored as gptq)"]);
    scene.run(&["gguf", "--type", "Q6_K", "-o", "six.gguf"]).ok();
    scene
        .run(&["gguf", "six.gguf", "--type", "Q4_K_S", "-o", "of-gguf.gguf"])
        .ok()
        .says(&["quantized already (stored as gguf)", "the lost precision does not come back, and is rounded again"]);
    // What is only expanded is not rounded, unless a tensor is asked to be.
    let expand = ["gguf", "six.gguf", "--type", "F32", "--overwrite", "-o", "wide.gguf"];
    let said = scene.run(&expand).ok().says(&["the lost precision does not come back"]);
    assert!(!said.stderr.contains("rounded again"), "{}", said.stderr);
    scene.run(&[&expand[..], &["--token-embedding-type", "F16"]].concat()).ok().says(&["rounded again"]);
    let source = perplexity(&scene, &[]);
    for file in ["of-artifact.gguf", "of-gguf.gguf"] {
        let found = perplexity(&scene, &[file]);
        assert!(found / source - 1.0 < 0.06, "{file}: {found} against {source}");
    }
    // The same type again changes nothing.
    scene.run(&["gguf", "six.gguf", "--type", "Q6_K", "-o", "again.gguf"]).ok();
    assert_eq!(scene.read("again.gguf"), scene.read("six.gguf"));
}

#[test]
fn types_by_tensor_and_split_files() {
    let scene = Scene::demo();
    let options = ["--tensor-type", r"ffn_down=Q8_0", "--token-embedding-type", "F16", "--pure"];
    scene.run(&[&["gguf", "--type", "Q4_0", "-o", "own.gguf"], &options[..]].concat()).ok();
    for (name, kind) in kinds(&scene.path("own.gguf")) {
        let wanted = match &*name {
            "token_embd.weight" => GgmlType::F16,
            name if name.contains("norm") => GgmlType::F32,
            name if name.contains("ffn_down") => GgmlType::Q8_0,
            _ => GgmlType::Q4_0,
        };
        assert_eq!(kind, wanted, "{name}");
    }
    scene.run(&["gguf", "--type", "Q8_0", "-o", "whole.gguf"]).ok();
    scene.run(&["gguf", "--type", "Q8_0", "-o", "cut.gguf", "--split-max-size", "1M"]).ok();
    let parts = fs::read_dir(scene.root())
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().starts_with("cut-0000"));
    let count = parts.count();
    assert!(count > 2, "{count} parts");
    let first = format!("cut-00001-of-{count:05}.gguf");
    assert_eq!(perplexity(&scene, &[&first]), perplexity(&scene, &["whole.gguf"]));
}

#[test]
fn files_are_replaced_when_asked() {
    let scene = Scene::demo();
    scene.run(&["gguf", "--type", "Q8_0", "-o", "model.gguf"]).ok();
    scene.refused(&["gguf", "--type", "Q4_0", "-o", "model.gguf"], &["`model.gguf` exists already", "--overwrite"]);
    scene.run(&["gguf", "--type", "Q4_0", "-o", "model.gguf", "--overwrite"]).ok();
    scene.run(&["gguf", "--type", "Q4_0", "-o", "fresh.gguf", "--overwrite"]).ok();
    assert_eq!(scene.read("model.gguf"), scene.read("fresh.gguf"));
    let cut = ["gguf", "--type", "Q8_0", "-o", "cut.gguf", "--split-max-size", "1M"];
    scene.run(&cut).ok();
    scene.refused(&cut, &["-00001-of-", "exists already"]);
    let before = scene.listing();
    scene.run(&[&cut[..], &["--overwrite"]].concat()).ok();
    assert_eq!(scene.listing(), before);
}

#[test]
fn folders_made_of_files() {
    let scene = Scene::demo();
    scene.run(&["gguf", "--type", "F16", "-o", "model.gguf"]).ok();
    scene.run(&["convert", "model.gguf", "--to", "safetensors"]).ok();
    fs::rename(scene.path("model-f16"), scene.path("folder")).unwrap();
    let made = tensors(&scene.path("folder/model.safetensors"));
    let own = tensors(&Path::new(env!("CARGO_MANIFEST_DIR")).join("calib/demo/target/model.safetensors"));
    for (name, tensor) in &own {
        assert_eq!(made[name].shape, tensor.shape, "{name}");
        assert!(made[name].dtype != tensor.dtype || made[name].data == tensor.data, "{name}");
    }
    assert_eq!(perplexity(&scene, &["folder"]), perplexity(&scene, &[]));
    // A quantizer takes the file of floats like a folder.
    scene.run(&["rtn", "model.gguf", "-o", "w4", "--group-size", "64", "--no-eval"]).ok();
    assert!(perplexity(&scene, &["w4"]) < 1.2 * perplexity(&scene, &[]));
}

#[test]
fn what_is_refused() {
    let scene = Scene::demo();
    scene.run(&["gguf", "--type", "Q4_X", "-o", "x.gguf"]).ended(2).says(&["known are F32, F16"]);
    scene.fails(&["gguf", "--type", "IQ2_XS", "-o", "x.gguf"], 2, &["useless without importance"]);
    scene.fails(&["gguf", "--tensor-type", "ffn_down", "-o", "x.gguf"], 2, &["is no REGEX=TYPE"]);
    scene.write("broken.gguf", b"GGUF\x03\0\0\0 and nothing");
    scene.fails(&["eval", "ppl", "broken.gguf"], 2, &["broken.gguf"]);
    scene.write("x.gguf", "");
    scene.fails(&["gguf", "--type", "Q8_0", "-o", "x.gguf"], 2, &["`x.gguf` exists already"]);
    scene.fails(&["gguf", "--overwrite", "-o", "x.gguf"], 2, &["`x.gguf` exists and is no GGUF file"]);
    scene.fails(&["gguf", "--overwrite", "-o", "tmp"], 2, &["`tmp` exists and is no GGUF file"]);
    scene.run(&["gguf", "--type", "Q8_0", "-o", "eight.gguf"]).ok();
    scene.fails(&["gptq", "eight.gguf", "-o", "out"], 2, &["is quantized already (stored as gguf)"]);
    scene.fails(&["gguf", "eight.gguf", "--overwrite", "-o", "eight.gguf"], 2, &["`eight.gguf` is the source"]);
    scene.fails(&["convert", "calib.txt", "-o", "out"], 2, &["calib.txt"]);
    scene.run(&["convert", "eight.gguf", "--to", "onnx"]).ended(2).says(&["safetensors"]);
    // It computes nothing that a device would do.
    scene.run(&["convert", "eight.gguf", "--device", "cpu"]).ended(2).says(&["--device"]);
}
