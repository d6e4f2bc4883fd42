//! What headers alone tell: mixed schemes, files that are cut off, and the check of files without hashes.

use std::fs;

use half::f16;
use quantkit::format::gguf::read::GgufFile;
use safetensors::Dtype;
use serde_json::{Value, json};

use crate::support::scene::{Scene, Stored};

/// A model whose attention has 4 bits, as most rules of its config say, and whose larger MLP has 8.
fn mixed(scene: &Scene, format: &str) {
    let rule = ".*mlp.*=bits:8,group_size:16";
    let args = ["rtn", "model", "--bits", "4", "--rule", rule, "--format", format, "-o", "mixed", "--no-eval"];
    scene.tiny_run(&args).ok();
}

#[test]
fn the_scheme_of_most_weights_is_named() {
    for format in ["gptq", "compressed-tensors"] {
        let scene = Scene::tiny("llama");
        mixed(&scene, format);
        let found = scene.run(&["inspect", "mixed", "--json"]).ok().json();
        let scheme = |bits: u64, size: i64, modules: u64, weights: u64| json!({"bits": bits, "group_size": size, "symmetric": true, "modules": modules, "weights": weights});
        // Two layers: three matrices of 64 by 96, and 64 by 64, 32 by 64 twice each.
        let schemes = json!([scheme(8, 16, 6, 36_864), scheme(4, 32, 8, 24_576)]);
        assert_eq!(found["schemes"], schemes, "{format}");
        assert_eq!((&found["bits"], &found["group_size"]), (&json!(8), &json!(16)), "{format}");
        let text = scene.run(&["inspect", "mixed"]).ok().stdout;
        let lines: Vec<&str> =
            text.lines().filter(|line| line.starts_with("scheme") || line.contains("others")).collect();
        let [most, other] = lines[..] else { panic!("{text}") };
        assert!(most.ends_with("8 bits, group size 16, symmetric, 60.0 % of their weights in 6 modules"), "{most}");
        assert!(other.ends_with("4 bits, group size 32, symmetric, 40.0 % of their weights in 8 modules"), "{other}");
    }
    let scene = Scene::tiny("llama");
    let floats = scene.run(&["inspect", "model", "--json"]).ok().json();
    assert_eq!(floats["schemes"], Value::Null);
}

/// A GGUF file that ends after its list of tensors, or anywhere in its data.
#[test]
fn gguf_files_that_are_cut_off() {
    let scene = Scene::demo();
    scene.run(&["gguf", "--type", "Q4_0", "-o", "whole.gguf"]).ok();
    let whole = scene.run(&["inspect", "whole.gguf", "--json"]).ok().json();
    let bytes = scene.read("whole.gguf");
    let data: u64 = whole["tensors"].as_array().unwrap().iter().map(|t| t["bytes"].as_u64().unwrap()).sum();
    let planned = scene.run(&["plan", "whole.gguf", "--json"]).ok().json();
    for left in [bytes.len() - data as usize, bytes.len() / 2, bytes.len() - 1] {
        scene.write("cut.gguf", &bytes[..left]);
        let ran = scene.run(&["inspect", "cut.gguf", "--json"]).ended(1).says(&["`cut.gguf` is damaged", "cut off"]);
        let cut = ran.json();
        for key in ["method", "variant", "architecture", "tensors", "tokenizer", "metadata"] {
            assert_eq!(cut[key], whole[key], "{key} of {left} bytes");
        }
        assert_eq!((&cut["runs"], &cut["parameters"]), (&json!(false), &Value::Null));
        let ran = scene.run(&["plan", "cut.gguf", "--json"]).ok().says(&["cut off", "sizes are those of the headers"]);
        let plan = ran.json();
        for key in ["parameters", "stored_bytes", "caches", "weights"] {
            assert_eq!(plan[key], planned[key], "{key} of {left} bytes");
        }
        // What needs the data refuses it.
        scene.fails(&["eval", "ppl", "cut.gguf", "--text", "eval.txt"], 2, &["cut off"]);
    }
    // A part that is missing.
    scene.run(&["gguf", "--type", "Q4_0", "-o", "split.gguf", "--split-max-size", "1M"]).ok();
    let names = || fs::read_dir(scene.root()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let first = names().find(|name| name.starts_with("split-00001-of-")).unwrap();
    fs::remove_file(scene.path(&first.replace("00001-of", "00002-of"))).unwrap();
    let found = scene.run(&["inspect", &first, "--json"]).ended(1).says(&["00002-of"]).json();
    assert_eq!(found["architecture"], whole["architecture"]);
}

fn verification(scene: &Scene, path: &str, code: i32) -> Value {
    scene.run(&["inspect", path, "--verify", "--json"]).ended(code).json()["verification"].clone()
}

/// Without hashes the structure is checked, and it is said which of the two was.
#[test]
fn files_without_hashes_are_checked_by_structure() {
    let scene = Scene::tiny("llama");
    scene.tiny_run(&["rtn", "model", "-o", "w4", "--no-eval"]).ok();
    scene.run(&["gguf", "--type", "Q8_0", "-o", "w8.gguf"]).ok();
    assert_eq!(verification(&scene, "w4", 0)["against"], "manifest");
    fs::remove_file(scene.path("w4/quantkit.json")).unwrap();
    for path in ["model", "w4", "w8.gguf"] {
        assert_eq!(verification(&scene, path, 0), json!({"against": "structure", "files": 1, "mismatches": []}));
        let text = scene.run(&["inspect", path, "--verify"]).ok().stdout;
        assert!(text.contains("no hashes to compare with; the structure of 1 files is sound"), "{text}");
    }

    let infinite = f16::INFINITY.to_le_bytes();
    // A mask of a part that is not read may hold infinities.
    scene.edit_weights(|tensors| {
        let mask = Stored { dtype: Dtype::F16, shape: vec![1], data: infinite.to_vec() };
        tensors.insert("vision_tower.mask".into(), mask);
    });
    assert_eq!(verification(&scene, "model", 0)["mismatches"], json!([]));
    scene.edit_weights(|tensors| {
        tensors.get_mut("model.norm.weight").unwrap().data[4..6].copy_from_slice(&infinite);
    });
    scene.run(&["inspect", "model"]).ok();
    let found = verification(&scene, "model", 1);
    let said = "tensor `model.norm.weight` in `model.safetensors` holds 1 values that are not finite, the first at 2";
    assert_eq!(found["mismatches"], json!([said]));

    fs::remove_dir_all(scene.model()).unwrap();
    fs::rename(scene.path("w4"), scene.model()).unwrap();
    scene.edit_weights(|tensors| {
        tensors.get_mut("model.layers.1.mlp.up_proj.scales").unwrap().data[..2].copy_from_slice(&infinite);
    });
    let found = verification(&scene, "model", 1)["mismatches"].to_string();
    assert!(found.contains("`model.layers.1.mlp.up_proj.scales`") && found.contains("not finite"), "{found}");

    // The scale of a block of 32.
    let mut bytes = scene.read("w8.gguf");
    let name = "blk.0.ffn_up.weight";
    let file = GgufFile::open(&scene.path("w8.gguf")).unwrap();
    let block = file.tensor(name).unwrap().bytes[..34].to_vec();
    drop(file);
    let at = bytes.windows(34).position(|window| window == block).unwrap();
    bytes[at..at + 2].copy_from_slice(&infinite);
    scene.write("w8.gguf", &bytes);
    scene.run(&["inspect", "w8.gguf"]).ok();
    let found = verification(&scene, "w8.gguf", 1)["mismatches"].to_string();
    let said = format!("tensor `{name}` in `w8.gguf` holds 32 values that are not finite, the first at 0");
    assert!(found.contains(&said), "{found}");
    // What is damaged by its headers is that, and checked no further.
    scene.write("w8.gguf", &bytes[..bytes.len() - 100]);
    let ran = scene.run(&["inspect", "w8.gguf", "--verify", "--json"]).ended(1).says(&["cut off"]);
    assert_eq!(ran.json()["verification"], json!({"against": "structure", "files": 1, "mismatches": []}));
}

/// AutoRound's export of the same integers is the same model.
#[test]
fn exports_of_autoround_run() {
    let scene = Scene::tiny("llama");
    scene.tiny_run(&["rtn", "model", "-o", "w4", "--no-eval"]).ok();
    let perplexity = |model: &str| {
        let args = ["eval", "ppl", model, "--text", "eval.txt", "--max-windows", "1", "--json"];
        scene.run(&args).ok().json()["perplexity"].as_f64().unwrap()
    };
    let wanted = perplexity("w4");
    for file in ["quantize_config.json", "quantkit.json"] {
        fs::remove_file(scene.path(&format!("w4/{file}"))).unwrap();
    }
    scene.edit_json("w4/config.json", |config| {
        config["quantization_config"] = json!({
            "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32,
            "sym": true, "data_type": "int", "block_name_to_quantize": "model.layers", "autoround_version": "0.6.0",
        });
    });
    assert_eq!(perplexity("w4"), wanted);
    let found = scene.run(&["inspect", "w4", "--json"]).ok().json();
    assert_eq!((&found["method"], &found["variant"]), (&json!("auto-round"), &json!("auto_round:auto_gptq")));
    assert_eq!((&found["runs"], &found["bits"], &found["consumers"]), (&json!(true), &json!(4), &Value::Null));
    assert_eq!((&found["damage"], &found["warnings"]), (&json!([]), &json!([])));
}
