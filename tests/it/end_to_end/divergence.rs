//! `quantkit eval kl`.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use quantkit::backend::cpu::Cpu;
use quantkit::backend::spans_of;
use quantkit::checkpoint::Checkpoint;
use quantkit::evaluate::divergence::{Divergence, Position, from_logits};
use quantkit::format;
use quantkit::format::manifest::sha256_bytes;
use quantkit::model::Model;
use serde_json::Value;

use super::number;
use crate::cuda;
use crate::support::scene::{Scene, copy_folder};
use crate::support::{fixture, golden_logits};

const VOCAB: usize = 2048;

/// A scene whose `model/` is the demo checkpoint, with it rounded to 4 and to 8 bits beside it.
fn rounded() -> Scene {
    let scene = Scene::demo();
    copy_folder(&Path::new(env!("CARGO_MANIFEST_DIR")).join("calib/demo/target"), &scene.model());
    for bits in ["4", "8"] {
        scene.run(&["rtn", "model", "--bits", bits, "-o", &format!("w{bits}"), "--no-eval"]).ok();
    }
    scene
}

fn kl(scene: &Scene, artifact: &str, more: &[&str]) -> Value {
    let text = ["--text", "eval.txt", "--reference", "model", "--window", "64", "--max-windows", "12"];
    alone(&scene.run(&[&["eval", "kl", artifact, "--json"], &text[..], more].concat()).ok().json())
}

/// What a report says of its only text.
fn alone(report: &Value) -> Value {
    let [one] = &report["corpora"].as_array().unwrap()[..] else { panic!("not one text: {report}") };
    one.clone()
}

fn keys(value: &Value) -> BTreeSet<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn more_bits_diverge_less() {
    let scene = rounded();
    let itself = kl(&scene, "model", &[]);
    assert!(number(&itself, "/kl/max") < 1e-9, "{itself}");
    for (pointer, wanted) in [("/same_top/share", 1.0), ("/perplexity/ratio", 1.0), ("/delta_p/rms", 0.0)] {
        assert_eq!(number(&itself, pointer), wanted, "{pointer}");
    }

    let (four, eight) = (kl(&scene, "w4", &[]), kl(&scene, "w8", &[]));
    for pointer in ["/kl/mean", "/kl/median", "/kl/p99", "/kl/max", "/delta_p/rms"] {
        assert!(number(&eight, pointer) < number(&four, pointer) / 5.0, "{pointer}: {eight} {four}");
    }
    assert!((0.005..0.3).contains(&number(&four, "/kl/mean")), "{four}");
    assert!(number(&eight, "/kl/mean") < 1e-3, "{eight}");
    assert!(number(&eight, "/same_top/share") > 0.95 && number(&four, "/same_top/share") > 0.6, "{eight} {four}");
    assert!(number(&four, "/same_top/share") < number(&eight, "/same_top/share"));

    // The perplexities are those of `eval ppl`; what both have in common is not in the ratio's error.
    for (model, pointer) in [("model", "/perplexity/reference"), ("w4", "/perplexity/artifact")] {
        let args = ["eval", "ppl", model, "--text", "eval.txt", "--window", "64", "--max-windows", "12", "--json"];
        let alone = scene.run(&args).ok().json();
        let (alone, stderr) = (number(&alone, "/perplexity"), number(&alone, "/stderr"));
        assert!((number(&four, pointer) / alone - 1.0).abs() < 1e-5, "{four} {alone}");
        assert!(number(&four, "/perplexity/ratio_stderr") < stderr / alone / 2.0, "{four}");
    }
}

#[test]
fn fields() {
    let scene = rounded();
    let args = ["eval", "kl", "w4", "--text", "eval.txt", "--window", "64", "--max-windows", "12"];
    let whole = scene.run(&[&args[..], &["--reference", "model", "--json"]].concat()).ok().json();
    let wanted = ["artifact", "method", "format", "reference", "corpora", "device", "peak_rss_bytes"];
    assert_eq!(keys(&whole), BTreeSet::from(wanted));
    let got = alone(&whole);
    let wanted = [
        "corpus",
        "kl",
        "same_top",
        "delta_p",
        "perplexity",
        "positions",
        "convention",
        "window",
        "windows",
        "bos",
        "text_sha256",
    ];
    assert_eq!(keys(&got), BTreeSet::from(wanted));
    let figures = ["mean", "stderr", "median", "p90", "p95", "p99", "p99_9", "max"];
    assert_eq!(keys(&got["kl"]), BTreeSet::from(figures));
    assert_eq!(keys(&got["same_top"]), BTreeSet::from(["share", "stderr"]));
    let delta = ["mean", "stderr", "rms", "rms_stderr", "min", "p1", "p5", "p10", "median", "p90", "p95", "p99", "max"];
    assert_eq!(keys(&got["delta_p"]), BTreeSet::from(delta));
    let ratio = ["reference", "artifact", "ratio", "ratio_stderr", "log_ratio", "log_ratio_stderr"];
    assert_eq!(keys(&got["perplexity"]), BTreeSet::from(ratio));
    let names = (&whole["artifact"], &whole["method"], &whole["format"], &whole["reference"]);
    assert_eq!(names, (&"w4".into(), &"rtn".into(), &"gptq".into(), &"model".into()));
    assert_eq!((&got["positions"], &got["windows"], &got["window"]), (&756.into(), &12.into(), &64.into()));
    assert_eq!((&got["convention"], &got["bos"], &whole["device"]), (&"gptq".into(), &"once".into(), &"cpu".into()));
    assert_eq!(got["corpus"], "eval.txt");
    assert_eq!(got["text_sha256"], sha256_bytes(&scene.read("eval.txt")));
    let rising: Vec<f64> = figures[2..].iter().map(|f| number(&got, &format!("/kl/{f}"))).collect();
    assert!(rising.is_sorted() && number(&got, "/kl/stderr") > 0.0, "{got}");
    let rising: Vec<f64> = delta[4..].iter().map(|f| number(&got, &format!("/delta_p/{f}"))).collect();
    assert!(rising.is_sorted(), "{got}");

    // The demo checkpoint is what `model/` holds.
    let said = scene.run(&args).ok().says(&["built-in demo checkpoint"]).stdout;
    for words in [
        "w4 against quantkit-demo, on cpu".to_string(),
        "eval.txt: 756 tokens in 12 windows of 64, convention gptq, BOS once".to_string(),
        format!("mean {:.6} ± {:.6} nats", number(&got, "/kl/mean"), number(&got, "/kl/stderr")),
        format!("ratio {:.5} ± {:.5}", number(&got, "/perplexity/ratio"), number(&got, "/perplexity/ratio_stderr")),
    ] {
        assert!(said.contains(&words), "no `{words}` in\n{said}");
    }
}

#[test]
fn gates() {
    let scene = rounded();
    let common = ["eval", "kl", "w4", "--reference", "model", "--text", "eval.txt", "--max-windows", "1", "--json"];
    let with = |more: &[&str]| scene.run(&[&common[..], more].concat());
    with(&["--max-kl", "10", "--min-same-top", "0.1"]).ok();
    let ran = with(&["--max-kl", "1e-6", "--min-same-top", "1"]).ended(1);
    let ran =
        ran.says(&["on eval.txt the mean divergence is 0.0", "more than 0.000001", "at a share of 0.", "less than 1"]);
    // The figures are there all the same.
    assert!(number(&ran.json(), "/corpora/0/kl/mean") > 1e-6);
    with(&["--min-same-top", "95"]).ended(2).says(&["--min-same-top", "from 0 to 1"]);
    with(&["--max-kl", "NaN"]).ended(2).says(&["--max-kl"]);
}

/// Conventions cut the text as for perplexity.
#[test]
fn conventions() {
    let scene = rounded();
    for (convention, bos, positions) in [("llamacpp", "window", 12 * 31), ("lmeval", "once", 12 * 64)] {
        let got = kl(&scene, "w8", &["--convention", convention]);
        assert_eq!((&got["bos"], &got["positions"]), (&bos.into(), &positions.into()));
        let none = kl(&scene, "w8", &["--convention", convention, "--bos", "none"]);
        assert_eq!(none["bos"], "none");
    }
}

#[test]
fn cuda_gives_the_same_figures() {
    let scene = rounded();
    let args =
        ["eval", "kl", "w4", "--reference", "model", "--text", "eval.txt", "--window", "32", "--max-windows", "3"];
    let on = |device| {
        let args = [&args[..], &["--json", "--device", device]].concat();
        cuda::run(&scene, &args, true, &[]).ok().json()
    };
    let (host, device) = (on("cpu"), on("cuda:0"));
    assert_ne!(device["device"], "cpu");
    let (host, device) = (alone(&host), alone(&device));
    for pointer in ["/kl/mean", "/kl/p95", "/delta_p/rms", "/perplexity/reference", "/perplexity/artifact"] {
        let (host, device) = (number(&host, pointer), number(&device, pointer));
        assert!((device / host - 1.0).abs() < 1e-2, "{pointer}: {device} {host}");
    }
}

/// Log-probabilities by the definition, in f64.
fn log_probs(logits: &[f32]) -> Vec<f64> {
    let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
    logits.iter().map(|&x| f64::from(x) - sum.ln()).collect()
}

fn by_definition(reference: &[f32], artifact: &[f32], target: u32) -> Position {
    let (p, q) = (log_probs(reference), log_probs(artifact));
    let top = |row: &[f64]| (0..row.len()).rev().max_by(|a, b| row[*a].total_cmp(&row[*b]));
    let target = target as usize;
    Position {
        kl: p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum(),
        same_top: top(&p) == top(&q),
        delta_p: q[target].exp() - p[target].exp(),
        nll_reference: -p[target],
        nll_artifact: -q[target],
        within: None,
    }
}

fn logits(dir: &Path, tokens: &[u32]) -> Vec<f32> {
    let opened = format::open(Checkpoint::open(dir).unwrap()).unwrap();
    let model = Model::open(opened.source, Arc::new(Cpu)).unwrap();
    let mut chunks = [model.embed(&[tokens], spans_of([tokens.len()])).unwrap()];
    model.forward(&mut chunks, None).unwrap();
    model.backend().download(&model.logits(&chunks[0].hidden).unwrap()).unwrap()
}

/// A file as llama-perplexity writes it: log-probabilities as 16-bit codes over the upper 16 nats of logits.
fn logits_file(window: usize, tokens: &[u32], logits: &[f32]) -> Vec<u8> {
    let mut file = b"_logits_".to_vec();
    let chunks = tokens.len() / window;
    for count in [window, VOCAB, chunks] {
        file.extend((count as i32).to_le_bytes());
    }
    tokens.iter().for_each(|token| file.extend((*token as i32).to_le_bytes()));
    for chunk in logits.chunks(window * VOCAB) {
        for row in chunk.chunks(VOCAB).take(window - 1).skip(window / 2) {
            let max = row.iter().copied().fold(f32::MIN, f32::max);
            let min = row.iter().copied().fold(f32::MAX, f32::min).max(max - 16.0);
            let scale = (max - min) / 65535.0;
            let sum: f32 = row.iter().map(|x| (x - max).exp()).sum();
            file.extend(scale.to_le_bytes());
            file.extend((min - max - sum.ln()).to_le_bytes());
            row.iter().for_each(|x| file.extend((((x - min) / scale).round().max(0.0) as u16).to_le_bytes()));
        }
    }
    file
}

/// Golden logits of transformers on one side, the 4-bit artifact on the other: by definition, and by the program from
/// llama.cpp's file.
#[test]
fn golden_logits_as_reference() {
    let scene = rounded();
    let (tokens, golden) = golden_logits(&fixture("demo/logits.safetensors"));
    let own = logits(&scene.path("w4"), &tokens);
    let pairs = |from: usize| {
        (from - 1..tokens.len() - 1)
            .map(|i| (&golden[i * VOCAB..(i + 1) * VOCAB], &own[i * VOCAB..(i + 1) * VOCAB], tokens[i + 1]))
    };
    for (one, other, target) in pairs(1) {
        let (got, wanted) = (from_logits(one, other, target), by_definition(one, other, target));
        let both = |p: Position| [p.kl, p.delta_p, p.nll_reference, p.nll_artifact];
        for (got, wanted) in both(got).into_iter().zip(both(wanted)) {
            assert!((got - wanted).abs() < 1e-11, "{got} {wanted}");
        }
        assert_eq!(got.same_top, wanted.same_top);
    }

    scene.write("base.kld", logits_file(tokens.len(), &tokens, &golden));
    let of =
        |artifact| alone(&scene.run(&["eval", "kl", artifact, "--reference-logits", "base.kld", "--json"]).ok().json());
    let (itself, got) = (of("model"), of("w4"));
    // The codes are steps of 16 / 65535.
    assert!(number(&itself, "/kl/mean").abs() < 1e-4 && number(&itself, "/kl/max") < 1e-3, "{itself}");
    assert!(number(&itself, "/same_top/share") > 0.9, "{itself}");
    let from = tokens.len() / 2 + 1;
    let wanted: Vec<Position> = pairs(from).map(|(one, other, target)| by_definition(one, other, target)).collect();
    let wanted = serde_json::to_value(Divergence::of(&wanted).unwrap()).unwrap();
    assert_eq!(got["positions"], tokens.len() - from);
    assert_eq!((&got["convention"], &got["bos"]), (&"llamacpp".into(), &"window".into()));
    assert_eq!((&got["text_sha256"], &got["corpus"]), (&Value::Null, &"base.kld".into()));
    for pointer in ["/kl/mean", "/kl/p90", "/kl/max", "/delta_p/rms", "/perplexity/log_ratio"] {
        let (got, wanted) = (number(&got, pointer), number(&wanted, pointer));
        assert!((got - wanted).abs() < 2e-4, "{pointer}: {got} {wanted}");
    }
}

/// BOS stands in the file before the first window alone; the model reads it before each.
#[test]
fn bos_of_a_logits_file() {
    let scene = rounded();
    let (tokens, _) = golden_logits(&fixture("demo/logits.safetensors"));
    let tokens = &tokens[..48];
    let mut read = tokens.to_vec();
    read[24] = tokens[0];
    let rows: Vec<f32> = read.chunks(24).flat_map(|window| logits(&scene.model(), window)).collect();
    scene.write("base.kld", logits_file(24, tokens, &rows));
    let of = |more: &[&str]| {
        alone(
            &scene
                .run(&[&["eval", "kl", "model", "--reference-logits", "base.kld", "--json"], more].concat())
                .ok()
                .json(),
        )
    };
    let got = of(&[]);
    assert_eq!((&got["windows"], &got["positions"], &got["bos"]), (&2.into(), &22.into(), &"window".into()));
    assert!(number(&got, "/kl/max") < 1e-3, "{got}");
    assert!(number(&of(&["--bos", "none"]), "/kl/max") > 1e-2);
    assert_eq!(of(&["--max-windows", "1"])["positions"], 11);
}

#[test]
fn damaged_logits_files() {
    let scene = rounded();
    let (tokens, golden) = golden_logits(&fixture("demo/logits.safetensors"));
    let whole = logits_file(tokens.len(), &tokens, &golden);
    let refused = |bytes: &[u8], words: &[&str]| {
        scene.write("base.kld", bytes);
        scene.refused(&["eval", "kl", "model", "--reference-logits", "base.kld"], words);
    };
    let with = |at: usize, value: i32| {
        let mut bytes = whole.clone();
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        bytes
    };
    refused(b"", &["base.kld", "does not begin with `_logits_`"]);
    refused(b"GGUF\x03\0\0\0 and more than twenty bytes", &["does not begin with `_logits_`"]);
    refused(b"_logits_\x38\0\0\0", &["base.kld", "cannot be"]);
    refused(&whole[..whole.len() - 1], &["truncated", &whole.len().to_string(), "1 windows of 56 tokens"]);
    refused(&[&whole[..], &[0]].concat(), &["truncated or damaged"]);
    for (at, what) in [(8, "the window length"), (12, "the size of the vocabulary"), (16, "the number of windows")] {
        refused(&with(at, -5), &[what, "-5", "damaged"]);
        refused(&with(at, i32::MAX), &["truncated or damaged"]);
    }
    refused(&with(24, 2048), &["token 1 is 2048", "vocabulary of 2048"]);
    refused(&with(24, -1), &["token 1 is -1"]);
    let record = 20 + 4 * tokens.len() + 2 * (VOCAB + 4);
    refused(&with(record, f32::NAN.to_bits() as i32), &["prediction 1", "scale NaN"]);
    refused(&with(record + 4, f32::INFINITY.to_bits() as i32), &["prediction 1", "inf"]);
    scene.refused(&["eval", "kl", "model", "--reference-logits", "nowhere"], &["nowhere", "cannot read"]);
    scene.write("base.kld", &whole);
    let tiny = Scene::tiny("llama");
    tiny.write("base.kld", &whole);
    let words = ["vocabulary of 2048 tokens", "the artifact one of 128"];
    tiny.refused(&["eval", "kl", "model", "--reference-logits", "base.kld"], &words);
    for other in [["--reference", "model"], ["--text", "eval.txt"], ["--window", "32"], ["--convention", "gptq"]] {
        let args = [&["eval", "kl", "model", "--reference-logits", "base.kld"], &other[..]].concat();
        scene.run(&args).ended(2).says(&[other[0], "cannot be used with"]);
    }
}

#[test]
fn what_cannot_be_compared() {
    let scene = Scene::tiny("llama");
    let args = ["eval", "kl", "model", "--text", "eval.txt"];
    // The demo checkpoint is the reference.
    scene.refused(&args, &["vocabulary of 2048 tokens", "the artifact one of 128"]);
    copy_folder(&scene.model(), &scene.path("other"));
    let args = [&args[..], &["--reference", "other"]].concat();
    scene.run(&args).ok();
    scene.refused(&[&args[..], &["--window", "100"]].concat(), &["--window 100", "64 positions"]);
    scene.refused(&["eval", "kl", "nowhere", "--reference", "other"], &["nowhere"]);
    scene.run(&["eval", "kl"]).ended(2).says(&["<ARTIFACT>"]);

    // A tokenizer that is only written in another way is the same; one that gives other tokens is not.
    let tokenizer = String::from_utf8(scene.read("model/tokenizer.json")).unwrap();
    scene.write("model/tokenizer.json", tokenizer.replace(r#""padding":null"#, r#""padding":  null"#));
    let ran = scene.run(&args).ok();
    assert!(!ran.stderr.contains("warning"), "{}", ran.stderr);
    let swapped = tokenizer.replace(r#""e":"#, r#""E_":"#).replace(r#""E":"#, r#""e":"#).replace("E_", "E");
    scene.write("model/tokenizer.json", swapped);
    scene.refused(&args, &["tokenizer is not the reference's", "for the artifact", "copy `tokenizer.json`"]);
    std::fs::remove_file(scene.path("model/tokenizer.json")).unwrap();
    scene.run(&args).ok().says(&["warning: the artifact has no `tokenizer.json`"]);
}

#[test]
fn broken_models_are_named() {
    let scene = Scene::tiny("llama");
    copy_folder(&scene.model(), &scene.path("other"));
    scene.edit_weights(|tensors| {
        let norm = tensors.get_mut("model.layers.1.input_layernorm.weight").unwrap();
        norm.data.chunks_exact_mut(2).for_each(|b| b.copy_from_slice(&half::f16::NAN.to_le_bytes()));
    });
    let text = ["--text", "eval.txt"];
    for (artifact, reference, side) in [("model", "other", "the artifact failed"), ("other", "model", "the reference")]
    {
        let args = [&["eval", "kl", artifact, "--reference", reference], &text[..]].concat();
        scene.fails(&args, 1, &[side, "`model.layers.1`", "not finite"]);
    }
}
