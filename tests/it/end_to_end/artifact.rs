//! What a run leaves on disk and on stdout.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use quantkit::format::manifest::{Manifest, hash_files};
use quantkit::format::verify_manifest;
use serde_json::{Value, json};

use super::number;
use crate::support::scene::{Scene, copy_folder, listing, tensors};

/// Quantization of the demo checkpoint with little data.
const DEMO: [&str; 8] = ["--calib", "calib.txt", "--nsamples", "16", "--seqlen", "128", "--eval-text", "eval.txt"];

fn keys(value: &Value) -> BTreeSet<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

/// A scene whose `model/` is the demo checkpoint.
fn demo_folder() -> Scene {
    let scene = Scene::demo();
    copy_folder(&Path::new(env!("CARGO_MANIFEST_DIR")).join("calib/demo/target"), &scene.model());
    scene.write("model/chat_template.jinja", "{{ messages }}");
    scene.write("model/README.md", "# A model");
    scene
}

#[test]
fn four_bits_of_the_demo() {
    let scene = demo_folder();
    let args = ["gptq", "model", "--bits", "4", "--group-size", "128", "-o", "out", "--json"];
    let ran = scene.run(&[&args, &DEMO[..]].concat()).ok();
    let result = ran.json();
    assert_eq!(
        keys(&result),
        BTreeSet::from([
            "out",
            "bytes",
            "source_bytes",
            "effective_bits",
            "quantized_modules",
            "fallbacks",
            "changed_by_shape",
            "dead_channels",
            "loses_to_rtn",
            "loss",
            "outliers",
            "perplexity_rtn",
            "scaled",
            "seconds",
            "peak_rss_bytes",
            "perplexity_before",
            "perplexity_after",
        ])
    );
    for measured in ["perplexity_before", "perplexity_after"] {
        assert_eq!(
            keys(&result[measured]),
            BTreeSet::from([
                "perplexity",
                "nll",
                "stderr",
                "tokens",
                "tokens_per_second",
                "convention",
                "window",
                "windows",
                "bos",
                "text_sha256",
                "device",
                "peak_rss_bytes",
            ])
        );
    }
    assert_eq!(result["out"], "out");
    assert_eq!(result["quantized_modules"], 28);
    assert!((number(&result, "/effective_bits") - 4.25).abs() < 0.1);
    assert!(number(&result, "/bytes") < 0.4 * number(&result, "/source_bytes"));
    assert!(number(&result, "/loss") > 0.0);
    assert!(number(&result, "/seconds/quantizing") > 0.0);

    let (before, after) =
        (number(&result, "/perplexity_before/perplexity"), number(&result, "/perplexity_after/perplexity"));
    assert!((20.0..200.0).contains(&before), "{before}");
    assert!(after < before * 1.05, "{before} before, {after} after");
    let rtn = ["rtn", "model", "--grid", "max-abs", "-o", "rtn", "--json", "--eval-text", "eval.txt"];
    let control = scene.run(&rtn).ok().json();
    assert_eq!(number(&control, "/perplexity_before/perplexity"), before);
    let control = number(&control, "/perplexity_after/perplexity");
    assert!(after < control, "gptq {after}, rtn {control}");

    let files: BTreeSet<String> = listing(&scene.path("out")).into_keys().collect();
    let side = [
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "README.md",
        "train.log",
    ];
    let made = ["config.json", "model.safetensors", "quantize_config.json", "quantkit.json"];
    assert_eq!(files, side.iter().chain(&made).map(ToString::to_string).collect());
    for name in side {
        assert_eq!(scene.read(&format!("out/{name}")), scene.read(&format!("model/{name}")), "{name}");
    }

    let config = scene.json("out/config.json");
    let quantization = &config["quantization_config"];
    assert_eq!(scene.json("out/quantize_config.json"), *quantization);
    for (key, value) in [("quant_method", "gptq"), ("checkpoint_format", "gptq"), ("pack_dtype", "int32")] {
        assert_eq!(quantization[key], value);
    }
    assert_eq!((&quantization["bits"], &quantization["group_size"]), (&4.into(), &128.into()));
    assert_eq!((&quantization["sym"], &quantization["desc_act"]), (&true.into(), &false.into()));
    for (key, value) in scene.json("model/config.json").as_object().unwrap() {
        assert_eq!(config[key], *value, "{key}");
    }
}

#[test]
fn the_manifest_tells_what_was_read_and_written() {
    let scene = Scene::tiny("llama");
    scene.tiny_run(&["gptq", "model", "-o", "out", "--no-eval"]).ok();
    let out = scene.path("out");
    assert_eq!(verify_manifest(&out).unwrap(), []);
    let manifest = Manifest::read(&out).unwrap();
    let named: BTreeSet<String> = manifest.outputs.iter().map(|record| record.file.clone()).collect();
    let mut files: BTreeSet<String> = listing(&out).into_keys().collect();
    assert!(files.remove("quantkit.json"));
    assert_eq!(named, files);
    assert_eq!(manifest.source, hash_files(&scene.model(), &["model.safetensors", "config.json"]).unwrap());
    assert_eq!(manifest.options["calibration"]["nsamples"], 4);
    assert_eq!(manifest.options["calibration"]["text"], "calib.txt");
    assert!(manifest.calibration.unwrap().description.starts_with("4 windows of 32 tokens of calib.txt"));
    assert_eq!(manifest.modules["quantized"].as_array().unwrap().len(), 14);
    let text = fs::read_to_string(out.join("quantkit.json")).unwrap();
    assert!(!text.contains(scene.root().to_str().unwrap()), "the manifest names a local path");

    let weights = out.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&weights, bytes).unwrap();
    assert_eq!(verify_manifest(&out).unwrap().len(), 1);
}

/// Neither threads nor time nor place decide a byte.
#[test]
fn equal_runs_write_equal_bytes() {
    let scene = Scene::demo();
    fs::create_dir(scene.path("elsewhere")).unwrap();
    for (out, threads) in [("one", "1"), ("two", "2"), ("elsewhere/three", "3")] {
        let args = ["gptq", "-o", out, "--threads", threads, "--calib", "calib.txt", "--no-eval"];
        scene.run(&[&args[..], &["--nsamples", "8", "--seqlen", "64"]].concat()).ok();
    }
    let one = listing(&scene.path("one"));
    for other in ["two", "elsewhere/three"] {
        assert_eq!(listing(&scene.path(other)), one, "{other}");
    }
}

#[test]
fn measurements_do_not_depend_on_threads() {
    let scene = Scene::demo();
    let nll = |threads| {
        let args = ["eval", "ppl", "--text", "eval.txt", "--window", "128", "--max-windows", "8", "--json"];
        number(&scene.run(&[&args[..], &["--threads", threads]].concat()).ok().json(), "/nll")
    };
    assert_eq!(nll("1"), nll("2"));
}

#[test]
fn rounding_without_data() {
    let scene = Scene::tiny("llama");
    scene.run(&["rtn", "model", "-o", "out", "--group-size", "32", "--no-eval"]).ok();
    let manifest = scene.json("out/quantkit.json");
    assert_eq!(manifest["options"]["method"], "rtn");
    assert_eq!(
        manifest["options"]["rounding"],
        json!({"kind": "rtn", "scheme": {"bits": 4, "group_size": 32, "sym": true}, "grid": "mse"})
    );
    assert!(manifest.get("calibration").is_none(), "{manifest}");
    for module in manifest["modules"]["quantized"].as_array().unwrap() {
        assert_eq!((&module["method"], &module["dead_channels"]), (&"rtn".into(), &0.into()));
    }
    // With the Hessian grid the same method looks at calibration text.
    scene.tiny_run(&["rtn", "model", "-o", "seen", "--grid", "hessian", "--no-eval"]).ok();
    assert_eq!(scene.json("seen/quantkit.json")["options"]["calibration"]["text"], "calib.txt");
    assert_ne!(scene.read("seen/model.safetensors"), scene.read("out/model.safetensors"));
}

/// `llama` and `llama_sharded` are one model in different files.
#[test]
fn sharded_sources() {
    let (whole, sharded) = (Scene::tiny("llama"), Scene::tiny("llama_sharded"));
    for scene in [&whole, &sharded] {
        scene.tiny_run(&["gptq", "model", "-o", "out", "--no-eval"]).ok();
    }
    assert_eq!(whole.read("out/model.safetensors"), sharded.read("out/model.safetensors"));
    let source = sharded.json("out/quantkit.json")["source"].clone();
    let files: Vec<&str> = source.as_array().unwrap().iter().map(|record| record["file"].as_str().unwrap()).collect();
    assert_eq!(
        files,
        [
            "model-00001-of-00003.safetensors",
            "model-00002-of-00003.safetensors",
            "model-00003-of-00003.safetensors",
            "config.json"
        ]
    );
    assert!(!sharded.path("out/model.safetensors.index.json").exists());
}

/// Nothing is read where nothing calibrates or measures.
#[test]
fn rounding_needs_no_tokenizer() {
    let scene = Scene::tiny("llama");
    fs::remove_file(scene.path("model/tokenizer.json")).unwrap();
    scene.tiny_run(&["rtn", "model", "-o", "out", "--no-eval"]).ok();
    assert!(scene.path("out/model.safetensors").exists());
    scene.refused(&["rtn", "model", "-o", "more", "--group-size", "32"], &["no `tokenizer.json`"]);
}

#[test]
fn too_much_damage() {
    let scene = Scene::demo();
    let args = ["rtn", "--bits", "2", "--grid", "max-abs", "--eval-text", "eval.txt", "--eval-windows", "2", "-o"];
    let ran = scene.run(&[&args[..], &["out", "--max-increase", "5", "--json"]].concat()).ended(1);
    ran.json()["perplexity_after"].as_object().unwrap();
    let said = ran.says(&["error: the perplexity rose by", "5 % of --max-increase", "the artifact is in `out`"]);
    assert_eq!(said.code, Some(1));
    assert!(scene.path("out/quantkit.json").exists() && !scene.path(".out.quantkit-work").exists());
    scene.run(&[&args[..], &["more", "--max-increase", "1e9"]].concat()).ok();
}

/// What the user wrote is what the record says.
#[test]
fn options_are_recorded_as_they_are_spelled() {
    let scene = Scene::tiny("llama");
    let args = ["rtn", "model", "-o", "out", "--on-misfit", "smaller-group", "--group-size", "64", "--no-eval"];
    scene.run(&args).ok();
    assert_eq!(scene.json("out/quantkit.json")["options"]["on_misfit"], "smaller-group");
}

#[test]
fn small_shards_make_an_index() {
    let scene = Scene::demo();
    let args =
        ["rtn", "--max-shard-size", "1", "-o", "out", "--json", "--eval-text", "eval.txt", "--eval-windows", "2"];
    let result = scene.run(&args).ok().json();
    let index = scene.json("out/model.safetensors.index.json");
    let map = index["weight_map"].as_object().unwrap();
    let shards: BTreeSet<&str> = map.values().map(|file| file.as_str().unwrap()).collect();
    assert!(shards.len() >= 3, "{shards:?}");
    let mut total = 0;
    for shard in shards {
        let held = tensors(&scene.path("out").join(shard));
        let bytes: usize = held.values().map(|t| t.data.len()).sum();
        // The embedding of 1,048,576 bytes stands alone.
        assert!(bytes <= 1_000_000 || held.len() == 1, "{shard} holds {bytes} bytes");
        assert!(held.keys().all(|name| map[name] == shard));
        total += bytes;
    }
    assert_eq!(index["metadata"]["total_size"], total);
    assert_eq!(result["bytes"], total);
    assert_eq!(verify_manifest(&scene.path("out")).unwrap(), []);
    let eval = ["eval", "ppl", "out", "--text", "eval.txt", "--window", "256", "--max-windows", "2", "--json"];
    assert_eq!(scene.run(&eval).ok().json()["nll"], result["perplexity_after"]["nll"]);
}

#[test]
fn everything_but_the_linears_is_copied() {
    for (family, tied) in [("llama3", true), ("llama", false), ("gemma3_text", true), ("qwen3", false)] {
        let scene = Scene::tiny(family);
        let args = ["rtn", "model", "-o", "out", "--group-size", "32", "--no-eval"];
        scene.run(&args).ok();
        let (source, found) =
            (tensors(&scene.path("model/model.safetensors")), tensors(&scene.path("out/model.safetensors")));
        assert_eq!(source.contains_key("lm_head.weight"), !tied, "{family}");
        for (name, tensor) in &source {
            let linear = name.strip_suffix("_proj.weight").filter(|name| name.contains("layers."));
            match linear {
                None => assert_eq!(found[name], *tensor, "{family} {name}"),
                Some(linear) => {
                    assert!(!found.contains_key(name), "{family} {name}");
                    for part in ["qweight", "qzeros", "scales", "g_idx"] {
                        assert!(found.contains_key(&format!("{linear}_proj.{part}")), "{family} {linear} {part}");
                    }
                }
            }
        }
        let quantized = source.keys().filter(|name| name.ends_with("_proj.weight")).count();
        assert_eq!(found.len(), source.len() + 3 * quantized, "{family}: tensors from nowhere");
    }
}
