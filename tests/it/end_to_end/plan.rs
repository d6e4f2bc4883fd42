//! `quantkit plan`: sizes told before any work are those that are written.

use std::collections::BTreeMap;
use std::fs;

use quantkit::checkpoint::Checkpoint;
use quantkit::model::config::ModelConfig;
use serde_json::Value;

use crate::support::scene::{Scene, copy_folder};
use crate::support::{fixture, repository};

fn plan(scene: &Scene, args: &[&str]) -> Value {
    let args = [&["plan"], args, &["--json"]].concat();
    scene.run(&args).ok().json()
}

#[track_caller]
fn weights<'a>(plan: &'a Value, name: &str) -> &'a Value {
    let found = plan["weights"].as_array().unwrap().iter().find(|size| size["name"] == name);
    found.unwrap_or_else(|| panic!("no {name} in {plan}"))
}

/// The published config, and figures that anyone can work out from it.
#[test]
fn seven_billion() {
    let scene = Scene::demo();
    fs::copy(fixture("configs/llama-2-7b.json"), scene.path("config.json")).unwrap();
    let plan = plan(&scene, &["config.json", "--memory", "40GiB", "--context", "2048"]);
    assert_eq!((&plan["parameters"], &plan["from_headers"]), (&6_738_415_616u64.into(), &false.into()));
    assert_eq!(weights(&plan, "fp16")["bytes"], 2 * 6_738_415_616u64);
    // Linears of 6 476 005 376 weights: half a byte each, 2.5 bytes for 128 of them; four bytes for each input.
    let linears = 6_476_005_376u64;
    let inputs = 32 * (4096 * 6 + 11008) * 4;
    let rest = 2 * (6_738_415_616 - linears);
    let four = linears / 2 + linears / 128 * 5 / 2 + inputs + rest;
    assert_eq!(weights(&plan, "gptq-w4g128")["bytes"], four);
    assert_eq!(format!("{:.1}", four as f64 / 1e9), "3.9");
    assert_eq!(plan["caches"][0]["bytes_per_sequence"], 1_073_741_824u64);
    assert_eq!(plan["caches"][1]["bytes_per_token"], 262_144);
    assert_eq!(plan["caches"][2]["bytes_per_token"], 2 * 32 * 32 * 132);
    let free = 40 * (1u64 << 30) - plan["memory"]["reserve_bytes"].as_u64().unwrap() - 2 * 6_738_415_616;
    assert_eq!(weights(&plan, "fp16")["sequences"]["f16"], free / (1 << 30));
    assert_eq!(weights(&plan, "fp16")["sequences"]["fp8"], free / (1 << 29));

    let text = scene.run(&["plan", "config.json", "--memory", "8GB", "--reserve", "1GiB"]).ok().stdout;
    for part in ["13.48 GB", "3.89 GB", "1.07 GB for 2048 tokens", "1.07 GB of it (13.4 %) kept free", "Q2_K"] {
        assert!(text.contains(part), "no `{part}` in:\n{text}");
    }
    // Weights that do not fit leave no room for sequences.
    let fp16 = text.lines().find(|line| line.starts_with("fp16")).unwrap();
    assert_eq!(fp16.split_whitespace().collect::<Vec<_>>(), ["fp16", "13.48", "GB", "16.00", "-", "-", "-"]);
}

/// What other programs put beside a config does not hide it.
#[test]
fn a_config_beside_files_of_other_programs() {
    let scene = Scene::demo();
    fs::create_dir(scene.path("pickled")).unwrap();
    fs::copy(fixture("configs/llama-2-7b.json"), scene.path("pickled/config.json")).unwrap();
    scene.write("pickled/pytorch_model.bin", b"");
    assert_eq!(plan(&scene, &["pickled"])["parameters"], 6_738_415_616u64);
    scene.write("pickled/config.json", b"{}");
    scene.refused(&["plan", "pickled"], &["a folder of pickled PyTorch weights (`pytorch_model.bin`)"]);
}

/// Tensors of each form of the demo checkpoint, as they are written.
#[test]
fn sizes_are_those_written() {
    let scene = Scene::demo();
    let plan = plan(&scene, &["--group-size", "64"]);
    assert_eq!(plan["from_headers"], true);
    let quick = |format: &'static str, bits: &'static str| {
        vec!["rtn", "--bits", bits, "--group-size", "64", "--grid", "max-abs", "--format", format]
    };
    for (name, args) in [
        ("gptq-w8g64", quick("gptq", "8")),
        ("gptq-w4g64", quick("gptq", "4")),
        ("gptq-w3g64", quick("gptq", "3")),
        ("gptq-w2g64", quick("gptq", "2")),
        ("awq-w4g64", [quick("awq", "4"), vec!["--asym"]].concat()),
        ("ct-w8g64", quick("compressed-tensors", "8")),
        ("ct-w4g64", quick("compressed-tensors", "4")),
        ("ct-w3g64", quick("compressed-tensors", "3")),
        ("ct-w2g64", quick("compressed-tensors", "2")),
        ("fp8", vec!["fp8"]),
        ("fp8-block", vec!["fp8", "--format", "fp8"]),
        ("int8", vec!["smoothquant", "--rounding", "rtn", "--alpha", "0.5", "--nsamples", "1", "--seqlen", "16"]),
    ] {
        scene.run(&[&args[..], &["--no-eval", "-o", name]].concat()).ok();
        let checkpoint = Checkpoint::open(&scene.path(name)).unwrap();
        let written: usize = checkpoint.tensors().values().map(|entry| entry.bytes.len()).sum();
        assert_eq!(weights(&plan, name)["bytes"], written, "{name}");
        assert_eq!(weights(&plan, name)["note"], Value::Null, "{name}");
    }
    for name in ["F16", "Q8_0", "Q4_0", "Q2_K", "Q3_K_M", "Q4_K_M", "Q6_K", "IQ4_XS", "TQ2_0"] {
        let file = format!("{name}.gguf");
        scene.run(&["gguf", "--type", name, "-o", &file]).ok();
        let found = scene.run(&["inspect", &file, "--json"]).ok().json();
        let data: u64 = found["tensors"].as_array().unwrap().iter().map(|t| t["bytes"].as_u64().unwrap()).sum();
        let planned = weights(&plan, name)["bytes"].as_u64().unwrap();
        // What fills tensors up to the alignment stands between them.
        let tensors = found["tensors"].as_array().unwrap().iter().map(|t| t["count"].as_u64().unwrap()).sum::<u64>();
        assert!(planned >= data && planned - data < 32 * tensors, "{name}: {planned}, {data}");
        let size = fs::metadata(scene.path(&file)).unwrap().len();
        assert!(size > planned && size - planned < 1 << 20, "{name}: {planned} of {size}");
    }
}

/// A config alone, an artifact and a GGUF file tell the same as the model they are of.
#[test]
fn any_form_of_the_model_will_do() {
    let scene = Scene::demo();
    copy_folder(&repository("calib/demo/target"), &scene.model());
    let sizes = |plan: &Value| -> BTreeMap<String, Value> {
        let all = plan["weights"].as_array().unwrap().iter();
        all.map(|size| (size["name"].as_str().unwrap().to_string(), size["bytes"].clone())).collect()
    };
    let wanted = plan(&scene, &["model", "--group-size", "32"]);
    scene.tiny_run(&["rtn", "model", "-o", "w4", "--no-eval"]).ok();
    scene.run(&["gguf", "model", "--type", "Q4_0", "-o", "q4.gguf"]).ok();
    fs::create_dir(scene.path("bare")).unwrap();
    fs::copy(scene.path("model/config.json"), scene.path("bare/config.json")).unwrap();
    for path in ["w4", "q4.gguf", "bare", "bare/config.json"] {
        let found = plan(&scene, &[path, "--group-size", "32"]);
        assert_eq!(found["from_headers"], false, "{path}");
        assert_eq!(found["parameters"], wanted["parameters"], "{path}");
        assert_eq!(found["caches"], wanted["caches"], "{path}");
        let (mut found, wanted) = (sizes(&found), sizes(&wanted));
        let stored = found.remove("stored");
        assert_eq!(stored.is_some(), !path.starts_with("bare"), "{path}");
        assert_eq!(found["fp16"], wanted["fp16"], "{path}");
        // A GGUF file does not tell the number type of its source.
        if path != "q4.gguf" {
            assert_eq!(found, wanted, "{path}");
        }
    }
    assert!(plan(&scene, &["w4"])["stored_bytes"].as_u64() < wanted["stored_bytes"].as_u64());
}

#[test]
fn a_config_asks_for_the_tensors_of_its_checkpoint() {
    let families = fs::read_dir(fixture("families")).unwrap();
    let mut seen = 0;
    for dir in families.map(|entry| entry.unwrap().path()) {
        let checkpoint = Checkpoint::open(&dir).unwrap();
        let shape_of = |start: &str| {
            let (name, entry) = checkpoint.tensors().range(start.to_string()..).next()?;
            name.starts_with(start).then_some(&entry.shape[..])
        };
        let config = ModelConfig::parse(checkpoint.config(), shape_of).unwrap();
        let asked: BTreeMap<String, Vec<usize>> = config.tensors().into_iter().collect();
        let there: BTreeMap<String, Vec<usize>> =
            checkpoint.tensors().iter().map(|(name, entry)| (name.clone(), entry.shape.clone())).collect();
        assert_eq!(asked, there, "{}", dir.display());
        seen += 1;
    }
    assert!(seen >= 8);
}

#[test]
fn windows_and_misfits_are_told() {
    let scene = Scene::tiny("gemma3_text");
    let found = plan(&scene, &["model", "--group-size", "48", "--context", "64"]);
    assert!(weights(&found, "gptq-w4g48")["note"].as_str().unwrap().contains("group size 48 does not divide"));
    let cache = &found["caches"][0];
    let (whole, windowed) = (cache["bytes_per_sequence"].as_u64(), cache["bytes_per_sequence_windowed"].as_u64());
    assert!(windowed.unwrap() < whole.unwrap(), "{cache}");
    let long = plan(&scene, &["model", "--context", "1000000"]);
    assert!(long["warnings"][0].as_str().unwrap().contains("positions"), "{}", long["warnings"]);
}

#[test]
fn bad_input() {
    let scene = Scene::demo();
    scene.write("notes.txt", "no config");
    scene.write("other.json", r#"{"model_type": "mamba"}"#);
    for (args, part) in [
        (&["nowhere"][..], "no folder"),
        (&["notes.txt"], "no config.json"),
        (&["other.json"], "model type `mamba` is not known"),
        (&["--memory", "40"], "40GiB (2^30 bytes) or 24GB (10^9)"),
        (&["--memory", "1GB", "--reserve", "100%"], "share from 0%"),
        (&["--reserve", "1GB"], "--memory"),
        (&["--context", "0"], "positive whole number"),
    ] {
        scene.run(&[&["plan"], args].concat()).ended(2).says(&[part]);
    }
}
