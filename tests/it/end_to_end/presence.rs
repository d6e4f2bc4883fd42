//! Tensors that the config does not tell of: an output head beside tied embeddings.

use half::f16;
use quantkit::format::gguf::read::GgufFile;
use safetensors::Dtype;
use serde_json::Value;

use super::gguf::{byte_level_tokenizer, perplexity};
use super::number;
use crate::support::scene::{Scene, Stored, tensors};

const HEAD: &str = "lm_head.weight";
const TABLE: &str = "model.embed_tokens.weight";

/// Every quantizer, and every form in which one stores linears.
const QUANTIZERS: [&[&str]; 5] =
    [&["gptq"], &["awq"], &["smoothquant"], &["fp8"], &["rtn", "--bits", "8", "--format", "compressed-tensors"]];

/// A family's model that becomes a GGUF file too.
fn model(family: &str) -> Scene {
    let scene = Scene::tiny(family);
    scene.write("model/tokenizer.json", byte_level_tokenizer());
    scene
}

fn say(scene: &Scene, key: &str, value: impl Into<Value>) {
    scene.edit_json("model/config.json", |config| config[key] = value.into());
}

/// Small numbers that no training has made.
fn made(rows: usize, cols: Option<usize>) -> Stored {
    let shape: Vec<usize> = [rows].into_iter().chain(cols).collect();
    let len = shape.iter().product::<usize>();
    let value = |i: usize| f16::from_f32(((i * 7919 + 13) % 101) as f32 / 250.0 - 0.2);
    Stored { dtype: Dtype::F16, shape, data: (0..len).flat_map(|i| value(i).to_le_bytes()).collect() }
}

fn add_head(scene: &Scene, rows: usize) {
    scene.edit_weights(|tensors| drop(tensors.insert(HEAD.into(), made(rows, Some(64)))));
}

fn near(found: f64, wanted: f64, what: &str) {
    assert!((found / wanted - 1.0).abs() < 1e-5, "{what}: {found}, not {wanted}");
}

/// The folder, its GGUF file and the folder made of that are one model, whose perplexity is returned.
fn one_model(scene: &Scene) -> f64 {
    scene.run(&["gguf", "model", "--type", "F32", "-o", "model.gguf", "--overwrite"]).ok();
    scene.run(&["convert", "model.gguf", "-o", "back", "--dtype", "f32"]).ok();
    let folder = perplexity(scene, &["model"]);
    for other in ["model.gguf", "back"] {
        near(perplexity(scene, &[other]), folder, other);
    }
    std::fs::remove_dir_all(scene.path("back")).unwrap();
    folder
}

#[test]
fn a_head_that_differs_is_the_head_everywhere() {
    let scene = model("llama3");
    let tied = perplexity(&scene, &["model"]);
    add_head(&scene, 128);
    let said = ["config.json says `tie_word_embeddings` true", "`lm_head.weight` is stored and differs"];
    scene.run(&["eval", "ppl", "model", "--text", "eval.txt", "--max-windows", "1"]).ok().says(&said);
    let own = one_model(&scene);
    assert!((own / tied - 1.0).abs() > 0.05, "the head makes no difference: {own}, {tied}");
    scene.run(&["gguf", "model", "--type", "F32", "-o", "model.gguf", "--overwrite"]).ok().says(&said);
    assert!(GgufFile::open(&scene.path("model.gguf")).unwrap().tensor("output.weight").is_some());
    let source = tensors(&scene.path("model/model.safetensors"));
    for (i, quantizer) in QUANTIZERS.iter().enumerate() {
        let out = format!("q{i}");
        let ran = scene.tiny_run(&[quantizer, &["model", "-o", &out, "--json"][..]].concat()).ok().says(&said);
        near(number(&ran.json(), "/perplexity_before/perplexity"), own_of(&scene), quantizer[0]);
        // Said once, of the source: the artifact's config is right.
        assert_eq!(ran.stderr.matches(said[1]).count(), 1, "{}", ran.stderr);
        assert_eq!(scene.json(&format!("{out}/config.json"))["tie_word_embeddings"], false, "{quantizer:?}");
        let stored = tensors(&scene.path(&format!("{out}/model.safetensors")));
        assert_eq!((&stored[HEAD], &stored[TABLE]), (&source[HEAD], &source[TABLE]), "{quantizer:?}");
    }
    let plan = scene.run(&["plan", "model", "--json"]).ok().says(&said).json();
    assert!(plan["warnings"][0].as_str().unwrap().contains(said[1]), "{plan}");
    let facts = scene.run(&["inspect", "model", "--json"]).ok().says(&said).json();
    assert_eq!(facts["architecture"]["tied"], false);
    scene.run(&["generate", "model", "--prompt", "the", "--max-tokens", "1"]).ok().says(&said);
    let validate = ["validate", "q0", "--reference", "model", "--skip", "kv,spec,modules,control", "--json", "-o", "r"];
    let text = ["--text", "eval.txt", "--window", "32", "--max-windows", "1"];
    let report = scene.run(&[&validate[..], &text].concat()).says(&said).json();
    let check = report["checks"].as_array().unwrap().iter().find(|check| check["id"] == "config.tensors").unwrap();
    assert_eq!(check["status"], "warn");
    assert!(check["message"].as_str().unwrap().starts_with("the reference: config.json says"), "{check}");
}

/// The perplexity that quantizers measure first.
fn own_of(scene: &Scene) -> f64 {
    let args = ["eval", "ppl", "model", "--text", "eval.txt", "--window", "64", "--max-windows", "2", "--json"];
    number(&scene.run(&args).ok().json(), "/perplexity")
}

/// The same numbers in another type are the same head: one tensor is written, and the flag stays.
#[test]
fn a_head_that_repeats_the_embedding_is_left_out() {
    let scene = model("llama3");
    scene.tiny_run(&["gptq", "model", "-o", "before", "--no-eval"]).ok();
    let tied = perplexity(&scene, &["model"]);
    for dtype in [Dtype::F16, Dtype::F32] {
        scene.edit_weights(|tensors| {
            let table = tensors[TABLE].clone();
            let wide = |b: &[u8]| f16::from_le_bytes([b[0], b[1]]).to_f32().to_le_bytes();
            let data = match dtype {
                Dtype::F16 => table.data,
                _ => table.data.chunks_exact(2).flat_map(wide).collect(),
            };
            tensors.insert(HEAD.into(), Stored { dtype, shape: table.shape, data });
        });
        assert_eq!(one_model(&scene), tied);
        assert!(GgufFile::open(&scene.path("model.gguf")).unwrap().tensor("output.weight").is_none());
        let out = format!("of-{dtype:?}");
        let ran = scene.tiny_run(&["gptq", "model", "-o", &out, "--no-eval", "--json"]).ok();
        assert!(!ran.stderr.contains("lm_head"), "{}", ran.stderr);
        assert_eq!(scene.read(&format!("{out}/model.safetensors")), scene.read("before/model.safetensors"));
        assert_eq!(scene.json(&format!("{out}/config.json"))["tie_word_embeddings"], true);
    }
}

/// By every command, whatever the config says of ties.
#[test]
fn a_head_of_another_shape_is_refused() {
    let scene = model("llama3");
    add_head(&scene, 127);
    let words = ["tensor `lm_head.weight` has shape [127, 64]", "asks for [128, 64]"];
    for tied in [true, false] {
        say(&scene, "tie_word_embeddings", tied);
        refused_by_all(&scene, &words);
    }
}

#[track_caller]
fn refused_by_all(scene: &Scene, words: &[&str]) {
    scene.refused(&["eval", "ppl", "model", "--text", "eval.txt"], words);
    scene.refused(&["gptq", "model", "-o", "out"], words);
    scene.refused(&["rtn", "model", "-o", "out"], words);
    scene.refused(&["gguf", "model", "-o", "out.gguf"], words);
    scene.refused(&["imatrix", "model", "-o", "out.gguf"], words);
    scene.refused(&["plan", "model"], words);
    scene.refused(&["generate", "model", "--prompt", "x"], words);
    scene.run(&["inspect", "model"]).ended(1).says(words);
}

#[test]
fn a_head_that_is_missing_is_named() {
    let scene = model("llama3");
    let missing = "tensor `lm_head.weight` is missing from `model`";
    say(&scene, "tie_word_embeddings", false);
    refused_by_all(&scene, &[missing, "config.json says `tie_word_embeddings` false", "set the key to true"]);
    scene.edit_json("model/config.json", |config| drop(config.as_object_mut().unwrap().remove("tie_word_embeddings")));
    refused_by_all(&scene, &[missing, "config.json does not say `tie_word_embeddings`, which means false for Llama"]);
    // A family for which silence means true.
    let scene = model("gemma3_text");
    let tied = perplexity(&scene, &["model"]);
    scene.edit_json("model/config.json", |config| drop(config.as_object_mut().unwrap().remove("tie_word_embeddings")));
    assert_eq!(perplexity(&scene, &["model"]), tied);
    add_head(&scene, 128);
    let args = ["rtn", "model", "-o", "out", "--no-eval"];
    scene
        .tiny_run(&args)
        .ok()
        .says(&["does not say `tie_word_embeddings`, which means true for Gemma 3, but `lm_head"]);
    assert_eq!(scene.json("out/config.json")["tie_word_embeddings"], false);
    one_model(&scene);
}
