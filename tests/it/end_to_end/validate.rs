//! `quantkit validate`: a whole report, and a gate that names each planted fault.

use std::collections::BTreeMap;
use std::fs;

use serde_json::Value;

use super::number;
use crate::integrity::{copied, demo, edit, get, quantize, seal};
use crate::support::command::{Ran, command};
use crate::support::scene::{Scene, Stored};

const Q: &str = "model.layers.2.self_attn.q_proj";
const UP: &str = "model.layers.1.mlp.up_proj";
const SHORT: [&str; 6] = ["--text", "eval.txt", "--window", "64", "--max-windows", "2"];

fn status<'a>(report: &'a Value, id: &str) -> Vec<&'a str> {
    let checks = report["checks"].as_array().unwrap();
    checks.iter().filter(|check| check["id"] == id).map(|check| check["status"].as_str().unwrap()).collect()
}

#[test]
fn an_honest_artifact_passes_with_a_whole_report() {
    let scene = demo();
    quantize(&scene, &["gptq", "--bits", "4", "--group-size", "64", "-o", "w4"]);
    let command = [&["validate", "w4", "--reference", "model", "--json", "--label", "first", "-o", "r"], &SHORT[..]];
    let run = scene.run(&command.concat()).ok();
    let report = run.json();
    assert_eq!(report, scene.json("r/report.json"));
    assert_eq!((&report["label"], &report["artifact"]["name"]), (&"first".into(), &"w4".into()));
    assert_eq!(report["artifact"]["scheme"], "4 bits, group size 64, symmetric");
    assert_eq!(report["reference"]["format"], "safetensors");
    let ratio = number(&report, "/perplexity/0/ratio");
    assert!((0.9..1.2).contains(&ratio), "{ratio}");
    assert!((1.0..1.5).contains(&number(&report, "/perplexity/0/control/ratio")), "plain rounding: {report}");
    let kl = number(&report, "/divergence/0/figures/kl/mean");
    assert!(kl > 1e-4 && kl < 0.1, "{kl}");
    assert_eq!(report["modules"].as_array().unwrap().len(), 29, "four blocks of seven, and the embedding");
    let weights = report["modules"].as_array().unwrap().iter().filter_map(|module| module["weight_error"].as_f64());
    assert_eq!(weights.filter(|error| (0.01..0.3).contains(error)).count(), 28, "all that is quantized");
    let modules = report["modules"].as_array().unwrap();
    let bits = |of: &dyn Fn(&str) -> bool| -> Vec<f64> {
        let found = modules.iter().filter(|module| of(module["kind"].as_str().unwrap()));
        found.map(|module| module["bits"].as_f64().unwrap()).collect()
    };
    assert_eq!(bits(&|kind| kind == "embed_tokens"), [16.0]);
    // Codes, for 64 of them a scale and a zero point, and the groups of inputs that all outputs share.
    for bits in bits(&|kind| kind != "embed_tokens") {
        let least = 4.0 + 20.0 / 64.0;
        assert!((least..least + 32.0 / 128.0 + 1e-9).contains(&bits), "{bits}");
    }
    let seen = report["accounting"]["tokens_seen"].as_array().unwrap();
    assert_eq!(seen.len(), 28);
    for module in seen {
        let inputs = if module["module"].as_str().unwrap().ends_with("down_proj") { 768 } else { 256 };
        assert_eq!((&module["inputs"], &module["tokens"]), (&inputs.into(), &512.into()), "{module}");
    }
    assert_eq!(status(&report, "calibration"), ["warn"]);
    let warning = report["checks"].as_array().unwrap().iter().find(|check| check["id"] == "calibration").unwrap();
    let words = ["down_proj` saw 512 tokens of calibration and has 768 inputs, and 3 more", "--nsamples"];
    assert!(words.iter().all(|word| warning["message"].as_str().unwrap().contains(word)), "{warning}");
    assert_eq!(report["cache"]["types"].as_array().unwrap().len(), 6);
    assert_eq!(number(&report, "/accounting/quantized/tensors"), 28.0);
    assert!((4.3..4.7).contains(&number(&report, "/accounting/bits_per_quantized_weight")));
    let pair = &report["acceptance"][0];
    assert_eq!((&pair["role"], &pair["target"], &pair["draft"]), (&"draft".into(), &"model".into(), &"w4".into()));
    assert!(number(pair, "/rate") > 0.6 && number(pair, "/alpha") > 0.85, "{pair}");
    assert_eq!(status(&report, "modules"), ["pass"]);
    assert!(report["consumers"].as_array().unwrap().iter().any(|c| c["name"] == "vllm-0.33" && c["loads"] == true));
    assert!(number(&report, "/calibration/tokens") == 8.0 * 64.0);
    let html = String::from_utf8(scene.read("r/report.html")).unwrap();
    assert!(html.contains("<svg") && !html.contains("<script"), "charts that need no script");

    // The same once more, on one thread: equal but for what the clock says.
    let again = [&command.concat()[..], &["--threads", "1"]].concat();
    let timeless = |mut report: Value| {
        report["seconds"] = 0.into();
        for pair in report["acceptance"].as_array_mut().unwrap() {
            for key in ["cost", "speedups"] {
                pair.as_object_mut().unwrap().remove(key);
            }
        }
        report
    };
    assert_eq!(timeless(scene.run(&again).ok().json()), timeless(report));

    let gate = ["compare", "r/report.json", "--baseline", "r/report.json", "--max-ppl-increase", "0.5%"];
    scene.run(&[&gate[..], &["--min-acceptance", "0.5", "--for", "vllm-0.33"]].concat()).ok();
    scene.run(&[&gate[..], &["--max-kl", "0.0001"]].concat()).ended(1).says(&["mean divergence", "0.0001"]);
    // Limits on the spot.
    let short = [&["validate", "w4", "--reference", "model", "--skip", "control,modules,kv,spec"], &SHORT[..]].concat();
    scene.run(&[&short[..], &["--max-bits", "4"]].concat()).ended(1).says(&["bits per weight"]);
    assert!(scene.path("w4-report/junit.xml").is_file());
    scene.run(&[&short[..], &["--min-acceptance", "0.5"]].concat()).ended(1).says(&["acceptance"]);
}

/// The fault is named by the gate, and a report says so too.
#[track_caller]
fn caught(scene: &Scene, artifact: &str, words: &[&str]) {
    let command = ["validate", artifact, "--reference", "model", "-o", "r", "--skip", "control,kv,spec"];
    scene.run(&[&command[..], &SHORT].concat()).ended(1).says(words);
    let report = scene.json("r/report.json");
    let failed = report["checks"].as_array().unwrap().iter().filter(|check| check["status"] == "fail");
    let texts: Vec<&str> = failed.map(|check| check["message"].as_str().unwrap()).collect();
    assert!(texts.iter().any(|text| words.iter().all(|word| text.contains(word))), "{words:?} in {texts:#?}");
}

/// Exchanges outputs of a 4-bit GPTQ weight, as a converter does that takes rotary halves for pairs.
fn exchange_rows(all: &mut BTreeMap<String, Stored>) {
    for (part, size) in [("qweight", 4), ("scales", 2)] {
        let stored = get(all, &format!("{Q}.{part}"));
        let columns = stored.shape[1];
        for row in stored.data.chunks_exact_mut(columns * size) {
            let old = row.to_vec();
            for head in 0..columns / 32 {
                for i in 0..32 {
                    let (to, from) = (head * 32 + i, head * 32 + i / 2 + i % 2 * 16);
                    row[to * size..(to + 1) * size].copy_from_slice(&old[from * size..(from + 1) * size]);
                }
            }
        }
    }
}

#[test]
fn planted_faults_are_named() {
    let scene = demo();
    quantize(&scene, &["gptq", "--bits", "4", "--group-size", "64", "-o", "w4"]);

    edit(&scene, copied(&scene, "w4", "zero"), |all| get(all, &format!("{UP}.qzeros")).data[5] ^= 1);
    caught(&scene, "zero", &[UP, "zero point"]);

    edit(&scene, copied(&scene, "w4", "scale"), |all| drop(all.remove(&format!("{UP}.scales")).unwrap()));
    caught(&scene, "scale", &[UP, "`scales` is missing"]);

    edit(&scene, copied(&scene, "w4", "rows"), exchange_rows);
    caught(&scene, "rows", &[Q, "rows"]);

    let file = scene.path(copied(&scene, "w4", "cut")).join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() - 1000]).unwrap();
    caught(&scene, "cut", &["model.safetensors"]);

    copied(&scene, "w4", "mute");
    scene.edit_json("mute/tokenizer_config.json", |config| {
        drop(config.as_object_mut().unwrap().remove("chat_template"))
    });
    seal(&scene, "mute");
    caught(&scene, "mute", &["chat template"]);

    copied(&scene, "w4", "label");
    scene.edit_json("label/config.json", |c| c["quantization_config"]["checkpoint_format"] = "gptq_v2".into());
    scene.edit_json("label/quantize_config.json", |c| c["checkpoint_format"] = "gptq_v2".into());
    seal(&scene, "label");
    caught(&scene, "label", &["gptq_v2", "checkpoint_format"]);
}

/// Reports say nothing of where folders lie, whatever is broken and however it was named.
#[test]
fn damage_is_named_from_the_folder_on() {
    let scene = demo();
    quantize(&scene, &["rtn", "--bits", "4", "-o", "w4"]);
    let root = scene.root().display().to_string();
    type Damage<'a> = (&'a str, &'a dyn Fn(&str));
    let breaks: [Damage; 4] = [
        ("model.safetensors", &|name| {
            let bytes = scene.read(&format!("{name}/model.safetensors"));
            scene.write(&format!("{name}/model.safetensors"), &bytes[..bytes.len() - 1000]);
        }),
        ("tokenizer.json", &|name| {
            scene.write(&format!("{name}/tokenizer.json"), "{");
            seal(&scene, name);
        }),
        ("config.json", &|name| scene.write(&format!("{name}/config.json"), "{")),
        ("quantkit.json", &|name| scene.write(&format!("{name}/quantkit.json"), "{")),
    ];
    for (file, damage) in breaks {
        copied(&scene, "w4", "broken");
        damage("broken");
        for artifact in ["broken", &format!("{root}/broken"), "./broken/"] {
            let args = ["validate", artifact, "--reference", &format!("{root}/model"), "-o", "r"];
            scene.run(&[&args[..], &["--skip", "control,modules,kv,spec"], &SHORT].concat()).ended(1);
            let report = scene.json("r/report.json");
            let checks = report["checks"].as_array().unwrap().iter();
            let messages: Vec<&str> = checks.map(|check| check["message"].as_str().unwrap()).collect();
            assert!(messages.iter().any(|text| text.contains(&format!("`{file}"))), "{file}: {messages:#?}");
            let path = messages.iter().find(|text| text.contains(&root) || text.contains("broken/"));
            assert_eq!(path, None, "{artifact}, {file}");
        }
        fs::remove_dir_all(scene.path("broken")).unwrap();
    }
}

#[test]
fn what_cannot_be_validated_is_said_first() {
    let scene = demo();
    scene.fails(&["validate", "nowhere/at/all", "--reference", "model"], 2, &["nowhere/at/all"]);
    scene.fails(&["validate", "--reference", "model"], 2, &["name the artifact too"]);
    scene.fails(&["validate", "model", "--reference", "model", "--baseline", "eval.txt"], 2, &["eval.txt"]);
    scene.run(&["validate", "model", "--reference", "model", "--max-ppl-increase", "3"]).ended(2).says(&["3%"]);
}

/// What the user got wrong is no fault of the artifact: no report says so, and none is written.
#[test]
fn mistakes_of_the_user_are_no_faults_of_the_artifact() {
    let scene = demo();
    scene.write("empty.txt", "");
    scene.write("short.txt", "Hi.");
    fs::write(scene.path("latin.txt"), b"caf\xe9 ".repeat(400)).unwrap();
    fs::write(scene.path("taken"), "").unwrap();
    fs::create_dir_all(scene.path("half/junit.xml")).unwrap();
    copied(&scene, "model", "mute");
    fs::remove_file(scene.path("mute/tokenizer.json")).unwrap();
    let cases: [(&[&str], &str); 12] = [
        (&["--text", "nosuch"], "nosuch"),
        (&["--text", "empty.txt"], "empty.txt"),
        (&["--text", "short.txt"], "short.txt"),
        (&["--text", "latin.txt"], "latin.txt"),
        (&["--window", "0"], "window"),
        (&["--window", "100000"], "100000"),
        (&["--reference", "mute"], "tokenizer.json"),
        (&["--draft", "nosuch"], "nosuch"),
        (&["--for", "vlm"], "vlm"),
        (&["--out", "taken"], "no folder"),
        (&["--out", "taken/deeper"], "no folder"),
        (&["--out", "half"], "junit.xml"),
    ];
    for (wrong, word) in cases {
        let mut args = vec!["validate", "model"];
        if !wrong.contains(&"--reference") {
            args.extend(["--reference", "model"]);
        }
        if !wrong.contains(&"--out") {
            args.extend(["--out", "r"]);
        }
        args.extend(wrong);
        scene.run(&args).ended(2).says(&[word]);
        assert!(!scene.path("r").exists(), "{wrong:?} wrote a report");
    }
}

/// A summary that cannot be written changes nothing of the verdict.
#[test]
fn the_job_s_summary_is_not_the_verdict() {
    let scene = demo();
    let quick = ["validate", "model", "--reference", "model", "--skip", "control,modules,kv,spec", "-o", "r"];
    let run = |more: &[&str]| {
        let args = [&quick[..], &SHORT, more].concat();
        let mut command = command(scene.root(), &args);
        Ran::new(command.env("GITHUB_STEP_SUMMARY", "no/such/folder/summary.md").output().unwrap(), &args)
    };
    let ran = run(&[]).ok();
    assert!(ran.stderr.contains("summary") && ran.stdout.contains("passed"), "{} {}", ran.stdout, ran.stderr);
    run(&["--max-bits", "4"]).ended(1).says(&["bits per weight"]);
}
