//! `quantkit inspect`: folders, artifacts and GGUF files.

use std::fs;

use serde_json::{Value, json};

use crate::support::scene::Scene;

/// The keys of the object, which programs rely on.
const KEYS: [&str; 29] = [
    "path",
    "format",
    "files",
    "bytes",
    "method",
    "layout",
    "variant",
    "bits",
    "group_size",
    "symmetric",
    "schemes",
    "inputs",
    "parameters",
    "quantized_parameters",
    "bits_per_weight",
    "bits_per_quantized_weight",
    "architecture",
    "runs",
    "tensors",
    "tokenizer",
    "chat_template",
    "chat_template_places",
    "kv_cache",
    "quantization_config",
    "metadata",
    "manifest",
    "consumers",
    "verification",
    "damage",
];

#[track_caller]
fn inspect(scene: &Scene, path: &str) -> Value {
    let before = scene.listing();
    let found = scene.run(&["inspect", path, "--json"]).ok().json();
    let keys: Vec<&String> = found.as_object().unwrap().keys().collect();
    assert_eq!(keys, [&KEYS[..], &["unread_tensors", "warnings"]].concat());
    let text = scene.run(&["inspect", path]).ok();
    assert!(text.stdout.contains("architecture"), "{}", text.stdout);
    assert_eq!(scene.listing(), before);
    found
}

/// Bytes of the tensors, by type, are those of the files but for headers.
fn tensor_bytes(found: &Value) -> u64 {
    found["tensors"].as_array().unwrap().iter().map(|t| t["bytes"].as_u64().unwrap()).sum()
}

#[test]
fn floats_artifact_and_gguf_of_one_model() {
    let scene = Scene::tiny("llama");
    let floats = inspect(&scene, "model");
    assert_eq!(floats["format"], "safetensors");
    assert_eq!((&floats["method"], &floats["bits"], &floats["consumers"]), (&json!(null), &json!(null), &json!(null)));
    assert_eq!(floats["quantized_parameters"], 0);
    assert_eq!((&floats["runs"], &floats["warnings"]), (&json!(true), &json!([])));
    assert_eq!((&floats["tokenizer"], &floats["chat_template"]), (&json!("tokenizer.json"), &json!(false)));
    let config = scene.json("model/config.json");
    for (key, name) in [("layers", "num_hidden_layers"), ("hidden", "hidden_size"), ("heads", "num_attention_heads")] {
        assert_eq!(floats["architecture"][key], config[name], "{key}");
    }
    let parameters = floats["parameters"].as_u64().unwrap();
    let bits = floats["bits_per_weight"].as_f64().unwrap();
    assert_eq!((bits * parameters as f64 / 8.0).round() as u64, tensor_bytes(&floats));
    assert!(bits == 16.0 || bits == 32.0, "{bits}");

    scene.tiny_run(&["rtn", "model", "--bits", "8", "-o", "w8", "--no-eval"]).ok();
    let artifact = inspect(&scene, "w8");
    let how = (&artifact["method"], &artifact["layout"], &artifact["variant"]);
    assert_eq!(how, (&json!("rtn"), &json!("gptq"), &json!("gptq")));
    let said = scene.run(&["inspect", "w8"]).ok().stdout;
    assert!(said.contains("rtn, stored as gptq (gptq)"), "{said}");
    // Another tool's artifact records no more than its form.
    fs::remove_file(scene.path("w8/quantkit.json")).unwrap();
    let foreign = inspect(&scene, "w8");
    assert_eq!((&foreign["method"], &foreign["layout"]), (&json!("gptq"), &json!("gptq")));
    let args = ["eval", "kl", "w8", "--reference", "model", "--text", "eval.txt", "--max-windows", "1", "--json"];
    let compared = scene.run(&args).ok().json();
    assert_eq!((&compared["method"], &compared["format"]), (&json!(null), &json!("gptq")));
    assert_eq!((&artifact["bits"], &artifact["group_size"]), (&json!(8), &json!(32)));
    assert_eq!(artifact["symmetric"], true);
    assert_eq!(artifact["parameters"], floats["parameters"]);
    let linears = artifact["quantized_parameters"].as_u64().unwrap();
    assert!(linears > 0 && linears < parameters, "{linears}");
    // Codes, a scale and a zero point for 32 of them, and the group of each input channel.
    let bits = artifact["bits_per_quantized_weight"].as_f64().unwrap();
    assert!(bits > 8.0 + 24.0 / 32.0 && bits < 10.5, "{bits}");
    assert_eq!(artifact["quantization_config"], scene.json("w8/config.json")["quantization_config"]);
    assert!(artifact["manifest"]["tool"].as_str().unwrap().starts_with("quantkit "));
    let loads: Vec<bool> =
        artifact["consumers"].as_array().unwrap().iter().map(|c| c["loads"].as_bool().unwrap()).collect();
    assert_eq!(loads, [true; 5]);
    scene.tiny_run(&["rtn", "model", "--bits", "4", "--asym", "-o", "a4", "--no-eval"]).ok();
    let asymmetric = inspect(&scene, "a4");
    assert_eq!((&asymmetric["symmetric"], &asymmetric["variant"]), (&json!(false), &json!("gptq_v2")));
    let vllm = &asymmetric["consumers"][0];
    assert_eq!((&vllm["name"], &vllm["loads"]), (&json!("vllm-0.33"), &json!(false)));
    assert!(vllm["refusals"][0].as_str().unwrap().contains("asymmetric"), "{vllm}");
}

#[test]
fn gguf_files() {
    let scene = Scene::demo();
    scene.run(&["gguf", "--type", "Q4_K_M", "-o", "whole.gguf"]).ok();
    let whole = inspect(&scene, "whole.gguf");
    assert_eq!(
        (&whole["format"], &whole["method"], &whole["variant"]),
        (&json!("gguf"), &json!("gguf"), &json!("Q4_K_M"))
    );
    assert_eq!(whole["architecture"]["name"], "llama");
    assert_eq!((&whole["runs"], &whole["manifest"]), (&json!(true), &json!(null)));
    assert_eq!(whole["bytes"].as_u64().unwrap(), fs::metadata(scene.path("whole.gguf")).unwrap().len());
    assert!(whole["tensors"].as_array().unwrap().iter().any(|t| t["type"] == "Q4_K" && t["count"] != 0));
    let bits = whole["bits_per_quantized_weight"].as_f64().unwrap();
    assert!((4.5..6.6).contains(&bits), "{bits}");
    assert!(whole["metadata"]["tokenizer.ggml.tokens"].as_str().unwrap().ends_with(" x string"));
    assert_eq!(whole["metadata"]["general.architecture"], "llama");

    scene.run(&["gguf", "--type", "Q4_K_M", "-o", "cut.gguf", "--split-max-size", "1M"]).ok();
    let count = fs::read_dir(scene.root())
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().starts_with("cut-"))
        .count();
    let cut = inspect(&scene, &format!("cut-00001-of-{count:05}.gguf"));
    assert_eq!(cut["files"].as_array().unwrap().len(), count);
    for key in ["parameters", "quantized_parameters", "bits_per_weight", "tensors", "architecture", "variant"] {
        assert_eq!(cut[key], whole[key], "{key}");
    }
    assert_eq!(tensor_bytes(&cut), tensor_bytes(&whole));
    // Back in a folder there are as many parameters.
    scene.run(&["convert", "whole.gguf", "-o", "folder"]).ok();
    assert_eq!(inspect(&scene, "folder")["parameters"], whole["parameters"]);
}

/// What cannot be run is told of all the same.
#[test]
fn unknown_models_and_methods() {
    let scene = Scene::tiny("llama");
    scene.edit_json("model/config.json", |config| {
        config["model_type"] = json!("warbler");
        config["architectures"] = json!(["WarblerForCausalLM"]);
        config["quantization_config"] = json!({"quant_method": "hum", "bits": 5, "group_size": 48, "zero_point": true});
    });
    let found = inspect(&scene, "model");
    assert_eq!((&found["method"], &found["bits"], &found["symmetric"]), (&json!("hum"), &json!(5), &json!(false)));
    assert_eq!(found["architecture"]["name"], "WarblerForCausalLM");
    assert_eq!((&found["architecture"]["family"], &found["runs"]), (&json!(null), &json!(false)));
    let warnings = found["warnings"].to_string();
    assert!(warnings.contains("warbler") && warnings.contains("`hum`"), "{warnings}");
}

#[test]
fn what_is_no_model() {
    let scene = Scene::tiny("llama");
    scene.refused(&["inspect", "nowhere"], &["`nowhere` does not exist"]);
    scene.refused(&["inspect", "calib.txt"], &["`calib.txt` is neither a model folder nor a .gguf file"]);
    scene.refused(&["inspect", "tmp"], &["config.json"]);
    // Another kind of file, and what is not read in any state.
    scene.write("other.gguf", b"PK\x03\x04 and so on and so on and so on");
    scene.refused(&["inspect", "other.gguf"], &["`other.gguf`", "no GGUF file"]);
    scene.write("later.gguf", b"GGUF\x09\0\0\0 and so on and so on and so on");
    scene.refused(&["inspect", "later.gguf"], &["`later.gguf`", "version 9"]);
}

/// A model that is there and broken is damaged, in whatever form it is: exit code 1, and an object that says so.
#[test]
fn damage_has_one_exit_code() {
    let scene = Scene::demo();
    let damaged = |args: &[&str], part: &str| {
        let ran = scene.run(&[&["inspect"], args, &["--json"]].concat()).ended(1).says(&["is damaged", part]);
        let found = ran.json();
        let keys: Vec<&String> = found.as_object().unwrap().keys().collect();
        assert_eq!(keys, [&KEYS[..], &["unread_tensors", "warnings"]].concat());
        assert!(found["damage"].to_string().contains(part), "{}", found["damage"]);
        found
    };
    scene.write("broken.gguf", b"GGUF\x03\0\0\0 and nothing");
    assert_eq!(damaged(&["broken.gguf"], "broken.gguf")["format"], "gguf");
    scene.run(&["gguf", "--type", "Q4_0", "-o", "whole.gguf"]).ok();
    let whole = scene.read("whole.gguf");
    scene.write("whole.gguf", &whole[..whole.len() - 100]);
    assert_eq!(damaged(&["whole.gguf"], "cut off")["runs"], false);
    // A name that no tensor of the model has.
    let at = whole.windows(17).position(|window| window == b"blk.1.ffn_norm.we").unwrap();
    let mut renamed = whole.clone();
    renamed[at + 4] = b'3';
    scene.write("whole.gguf", &renamed);
    damaged(&["whole.gguf"], "stands twice");
    renamed[at + 4] = b'9';
    scene.write("whole.gguf", &renamed);
    damaged(&["whole.gguf"], "model.layers.1.post_attention_layernorm.weight");
    scene.run(&["gguf", "--type", "Q4_0", "-o", "cut.gguf", "--split-max-size", "1M"]).ok();
    let first = fs::read_dir(scene.root()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let first = first.filter(|name| name.starts_with("cut-00001-of-")).last().unwrap();
    let second = first.replace("00001-of", "00002-of");
    fs::remove_file(scene.path(&second)).unwrap();
    damaged(&[&first], &second);

    let scene = Scene::tiny("llama");
    scene.run(&["rtn", "model", "--group-size", "32", "-o", "w4", "--no-eval"]).ok();
    let manifest = scene.read("w4/quantkit.json");
    scene.write("w4/quantkit.json", &manifest[..manifest.len() / 2]);
    for verify in [&["w4"][..], &["w4", "--verify"]] {
        let ran = scene.run(&[&["inspect", "--json"], verify].concat()).ended(1).says(&["quantkit.json"]);
        assert_eq!((&ran.json()["runs"], &ran.json()["verification"]), (&json!(true), &Value::Null));
    }
    scene.write("w4/quantkit.json", &manifest);
    let config = scene.read("w4/config.json");
    scene.write("w4/config.json", &config[..config.len() / 2]);
    let ran = scene.run(&["inspect", "w4", "--json"]).ended(1).says(&["config.json"]);
    assert_eq!((&ran.json()["runs"], &ran.json()["architecture"]["family"]), (&json!(false), &Value::Null));
    let ran = scene.run(&["inspect", "w4", "--verify", "--json"]).ended(1).says(&["`config.json`"]);
    assert_eq!(ran.json()["verification"]["mismatches"].as_array().unwrap().len(), 1);
    scene.write("w4/config.json", b"\xff\xfe");
    scene.run(&["inspect", "w4"]).ended(1).says(&["config.json"]);
}

/// Every method tells who loads it, with the scales of a cache where there are some.
#[test]
fn consumers_of_every_method() {
    let scene = Scene::tiny("llama");
    let loads = |found: &Value| -> Vec<bool> {
        found["consumers"].as_array().unwrap().iter().map(|c| c["loads"].as_bool().unwrap()).collect()
    };
    let quick = ["--no-eval", "--nsamples", "2", "--seqlen", "16", "--calib", "calib.txt"];
    let made = |name: &'static str, args: &[&str]| {
        scene.run(&[args, &quick, &["-o", name]].concat()).ok();
        inspect(&scene, name)
    };
    let awq = made("awq", &["awq", "model", "--group-size", "32", "--points", "3"]);
    assert_eq!((&awq["method"], loads(&awq)), (&json!("awq"), vec![true; 5]));
    // The tiny model's linears are below Marlin's tiles, which SGLang does not pad.
    let ct = ["gptq", "model", "--group-size", "32", "--format", "compressed-tensors", "--kv-cache", "fp8-per-head"];
    let packed = made("ct", &ct);
    let how = (&packed["method"], &packed["layout"], &packed["variant"]);
    assert_eq!(how, (&json!("gptq"), &json!("compressed-tensors"), &json!("pack-quantized")));
    assert_eq!(loads(&packed), [true, false, false, true, false], "{}", packed["consumers"]);
    let layers = &packed["architecture"]["layers"];
    assert_eq!((&packed["kv_cache"]["scales"], &packed["kv_cache"]["layers"]), (&json!("head"), layers));
    let keys = packed["kv_cache"]["keys"].as_array().unwrap();
    assert!(keys[0].as_f64().unwrap() > 0.0 && keys[0].as_f64() <= keys[1].as_f64(), "{keys:?}");
    let vllm = packed["consumers"][1]["refusals"].to_string();
    assert!(vllm.contains("cache scales of each head"), "{vllm}");
    let smooth = made("w8a8", &["smoothquant", "model", "--alpha", "0.5"]);
    assert_eq!(loads(&smooth), [true, true, true, true, false]);
    // How inputs are rounded is on record: engines differ.
    let by_token =
        "8-bit integers, scale of each token: max|x| / 127.5, as in compressed-tensors (vLLM and SGLang: / 127)";
    assert_eq!((&smooth["inputs"], &packed["inputs"]), (&json!([by_token]), &Value::Null));
    let shown = scene.run(&["inspect", "w8a8"]).ok().stdout;
    assert!(shown.contains("inputs         8-bit integers, scale of each token"), "{shown}");
    let ppl = ["eval", "ppl", "w8a8", "--text", "eval.txt", "--max-windows", "1", "--json"];
    let measured = scene.run(&ppl).ok().says(&["inputs of linears are rounded: 8-bit integers"]);
    assert_eq!(measured.json()["inputs"], json!([by_token]));
    scene.run(&["fp8", "model", "--format", "fp8", "--weights", "tensor", "-o", "fp8", "--no-eval"]).ok();
    let fp8 = inspect(&scene, "fp8");
    assert_eq!((&fp8["bits"], loads(&fp8)), (&json!(8), vec![true, true, true, false, false]));
    assert_eq!(fp8["inputs"], json!(["E4M3, scale of each token: max|x| / 448"]));
    assert_eq!(fp8["kv_cache"], Value::Null);
    scene.run(&["gguf", "--type", "Q8_0", "-o", "q8.gguf"]).ok();
    assert_eq!(inspect(&scene, "q8.gguf")["consumers"][0]["name"], "llama.cpp");
}

#[test]
fn chat_templates_are_found_where_they_are() {
    let scene = Scene::tiny("llama");
    scene.edit_json("model/tokenizer_config.json", |config| config["chat_template"] = json!("{{ messages }}"));
    assert_eq!(inspect(&scene, "model")["chat_template_places"], json!(["tokenizer_config.json"]));
    scene.write("model/chat_template.jinja", "{{ messages }}");
    let found = inspect(&scene, "model");
    assert_eq!(found["chat_template_places"], json!(["chat_template.jinja", "tokenizer_config.json"]));
}

#[test]
fn hashes_are_held_against_the_manifest() {
    let scene = Scene::tiny("llama");
    scene.run(&["rtn", "model", "--group-size", "32", "-o", "w4", "--no-eval"]).ok();
    let found = scene.run(&["inspect", "w4", "--verify", "--json"]).ok().json();
    assert_eq!(found["verification"]["mismatches"], json!([]));
    assert_eq!(found["verification"]["files"], found["manifest"]["output_files"]);
    let mut weights = scene.read("w4/model.safetensors");
    *weights.last_mut().unwrap() ^= 1;
    scene.write("w4/model.safetensors", weights);
    scene.run(&["inspect", "w4"]).ok();
    let ran = scene.run(&["inspect", "w4", "--verify", "--json"]).ended(1).says(&["`model.safetensors` has SHA-256"]);
    assert!(ran.json()["verification"]["mismatches"][0].as_str().unwrap().contains("model.safetensors"));
}

/// What is damaged is told, with all that can still be told.
#[test]
fn damaged_folders() {
    let scene = Scene::tiny("llama_sharded");
    let shards: Vec<String> = fs::read_dir(scene.model())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".safetensors"))
        .collect();
    assert!(shards.len() > 1);
    let shard = format!("model/{}", shards[0]);
    let whole = scene.read(&shard);
    let damaged = |part: &str| {
        let ran = scene.run(&["inspect", "model", "--json"]).ended(1).says(&["`model` is damaged", part]);
        let found = ran.json();
        assert!(found["damage"].to_string().contains(part), "{}", found["damage"]);
        assert_eq!((&found["runs"], &found["architecture"]["family"].is_string()), (&json!(false), &true));
        assert_eq!(found["files"].as_array().unwrap().len(), shards.len() - 1);
        let text = scene.run(&["inspect", "model"]).ended(1).stdout;
        assert!(text.lines().any(|line| line.starts_with("damaged") && line.contains(part)), "{text}");
    };
    scene.write(&shard, &whole[..whole.len() - 10]);
    damaged(&shards[0]);
    fs::remove_file(scene.path(&shard)).unwrap();
    damaged(&shards[0]);
    scene.write(&shard, &whole);
    scene.run(&["inspect", "model"]).ok();

    let scene = Scene::tiny("llama");
    scene.run(&["rtn", "model", "--group-size", "32", "-o", "w4", "--no-eval"]).ok();
    let weights = scene.read("w4/model.safetensors");
    scene.write("w4/model.safetensors", &weights[..weights.len() - 100]);
    let ran = scene.run(&["inspect", "w4", "--json"]).ended(1).says(&["model.safetensors"]);
    assert_eq!((&ran.json()["method"], &ran.json()["bits"]), (&json!("rtn"), &json!(4)));
    scene.edit_weights(|tensors| {
        tensors.remove("model.norm.weight");
    });
    scene.run(&["inspect", "model"]).ended(1).says(&["`model.norm.weight`"]);
}
