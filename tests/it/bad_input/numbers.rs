//! Weights and activations that are no proper numbers, or too few of them.

use std::fs;

use half::f16;
use serde_json::Value;

use super::gptq;
use crate::end_to_end::gguf::byte_level_tokenizer;
use crate::support::scene::{Scene, Stored};

/// Overwrites elements of an f16 tensor.
fn set_f16(tensor: &mut Stored, at: impl IntoIterator<Item = usize>, value: f32) {
    let bytes = f16::from_f32(value).to_le_bytes();
    at.into_iter().for_each(|i| tensor.data[2 * i..2 * i + 2].copy_from_slice(&bytes));
}

/// Overwrites all of an f32 tensor.
fn fill_f32(tensor: &mut Stored, value: f32) {
    tensor.data.chunks_exact_mut(4).for_each(|b| b.copy_from_slice(&value.to_le_bytes()));
}

#[test]
fn weights_that_are_no_numbers() {
    for (tensor, value) in [
        ("model.layers.1.mlp.up_proj.weight", f32::NAN),
        ("model.embed_tokens.weight", f32::INFINITY),
        ("model.norm.weight", f32::NEG_INFINITY),
    ] {
        let scene = Scene::tiny("llama");
        scene.edit_weights(|tensors| set_f16(tensors.get_mut(tensor).unwrap(), [7, 9], value));
        let words = [&format!("tensor `{tensor}` holds 2 values"), "not finite", "element 7"];
        scene.refused(&gptq(&[]), &words);
        let args = ["rtn", "model", "-o", "out", "--group-size", "32"];
        scene.refused(&args, &words);
    }
}

#[test]
fn several_damaged_tensors_are_counted() {
    let scene = Scene::tiny("llama");
    scene.edit_weights(|tensors| {
        for name in ["model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"] {
            set_f16(tensors.get_mut(name).unwrap(), [0], f32::NAN);
        }
    });
    scene.refused(&gptq(&[]), &["`lm_head.weight` holds 1 value", "2 more tensors"]);
}

/// The channel is zero before the first linears of block 0 and there alone.
#[test]
fn input_channel_without_signal() {
    let scene = Scene::tiny("llama");
    scene.edit_weights(|tensors| {
        set_f16(tensors.get_mut("model.layers.0.input_layernorm.weight").unwrap(), [5, 40], 0.0)
    });
    let result = scene.tiny_run(&["gptq", "model", "-o", "out", "--json"]).ok().json();
    let (before, after) = (&result["perplexity_before"]["perplexity"], &result["perplexity_after"]["perplexity"]);
    assert!((after.as_f64().unwrap() / before.as_f64().unwrap() - 1.0).abs() < 0.1, "{before} {after}");
    // q, k and v share them.
    assert_eq!(result["dead_channels"], 2);
    for module in scene.json("out/quantkit.json")["modules"]["quantized"].as_array().unwrap() {
        let name = module["module"].as_str().unwrap();
        let first = ["q_proj", "k_proj", "v_proj"].iter().any(|p| name == format!("model.layers.0.self_attn.{p}"));
        assert_eq!(module["dead_channels"], if first { 2 } else { 0 }, "{name}");
        assert_eq!(module["method"], "gptq", "{name}");
    }
    let ran = scene.tiny_run(&["gptq", "model", "-o", "spoken", "--no-eval"]).ok();
    assert!(ran.stdout.contains("2 input channels were zero throughout calibration"), "{}", ran.stdout);
}

/// Hessians of rank one: damping makes them usable.
#[test]
fn calibration_of_one_repeated_token() {
    let scene = Scene::tiny("llama");
    scene.write("calib.txt", "a".repeat(200));
    for (out, more) in [("damped", &[][..]), ("undamped", &["--damp-percent", "0", "--damp-auto-increment", "0"])] {
        let result = scene.tiny_run(&[&["gptq", "model", "-o", out, "--json"], more].concat()).ok().json();
        let (before, after) = (&result["perplexity_before"]["nll"], &result["perplexity_after"]["nll"]);
        assert!((after.as_f64().unwrap() - before.as_f64().unwrap()).abs() < 0.5, "{before} {after}");
        assert_eq!(result["fallbacks"].as_array().unwrap().len(), 0);
        assert!(result["loss"].as_f64().unwrap().is_finite());
        for module in scene.json(&format!("{out}/quantkit.json"))["modules"]["quantized"].as_array().unwrap() {
            assert!(module["damp_percent"].as_f64().unwrap() > 0.0, "{module}");
        }
    }
}

/// Block 1 makes more than an f32 holds; block 0 is sound.
#[test]
fn activations_that_overflow() {
    for (tensor, value) in [("mlp.down_proj", 1e38), ("self_attn.v_proj", 3e38), ("self_attn.q_proj", 3e38)] {
        let scene = Scene::tiny("llama_yarn");
        let name = format!("model.layers.1.{tensor}.weight");
        scene.edit_weights(|tensors| fill_f32(tensors.get_mut(&name).unwrap(), value));
        scene.fails(&["eval", "ppl", "model", "--text", "eval.txt"], 1, &["`model.layers.1", "not finite"]);
        scene.fails(&gptq(&[]), 1, &["`model.layers.1", "not finite"]);
        scene.fails(&gptq(&["--no-eval"]), 1, &[&format!("model.layers.1.{tensor}"), "not finite"]);
        let rtn = ["rtn", "model", "-o", "out", "--group-size", "32", "--no-eval"];
        scene.fails(&rtn, 1, &[&format!("model.layers.1.{tensor}"), "not finite"]);
    }
}

#[test]
fn overflow_while_generating() {
    let scene = Scene::tiny("llama_yarn");
    scene.edit_weights(|tensors| fill_f32(tensors.get_mut("model.layers.1.mlp.down_proj.weight").unwrap(), 1e38));
    scene.fails(&["generate", "model", "--prompt", "once"], 1, &["`model.layers.1`", "not finite"]);
}

/// Two bits push the values of block 1 over what an f32 holds. The original passes, as it throws them away.
#[test]
fn artifacts_that_overflow() {
    let scene = Scene::tiny("llama_yarn");
    scene.tiny_run(&["rtn", "model", "-o", "out", "--no-eval"]).ok();
    scene.edit_weights(|tensors| {
        for (name, tensor) in tensors {
            match name.as_str() {
                "model.embed_tokens.weight" => fill_f32(tensor, 1.0),
                "model.layers.1.input_layernorm.weight" => fill_f32(tensor, 1e37),
                "model.layers.1.self_attn.v_proj.weight" => {
                    fill_f32(tensor, 0.36);
                    tensor.data.chunks_exact_mut(4 * 32).for_each(|g| g[..4].copy_from_slice(&1f32.to_le_bytes()));
                }
                "model.layers.0.self_attn.o_proj.weight" | "model.layers.0.mlp.down_proj.weight" => {
                    fill_f32(tensor, 0.0)
                }
                name if ["q_proj", "k_proj", "o_proj"]
                    .iter()
                    .any(|p| name == format!("model.layers.1.self_attn.{p}.weight")) =>
                {
                    fill_f32(tensor, 0.0)
                }
                _ => {}
            }
        }
    });
    scene.run(&["eval", "ppl", "model", "--text", "eval.txt"]).ok();
    let args = ["rtn", "model", "-o", "out", "--overwrite", "--bits", "2", "--group-size", "32", "--grid", "max-abs"];
    scene.fails(&[&args[..], &["--eval-text", "eval.txt"]].concat(), 1, &["`model.layers.1`", "not finite"]);
}

/// Logits so large that a token costs thousands of nats: each is finite, the perplexity is not.
fn shouting(scene: &Scene) {
    scene.edit_weights(|tensors| {
        let norm = tensors.get_mut("model.norm.weight").unwrap();
        let all = 0..norm.data.len() / 2;
        set_f16(norm, all, 60_000.0);
    });
}

#[test]
fn infinite_perplexity_fails_every_measurement() {
    let scene = Scene::tiny("llama");
    let sound = scene.read("model/model.safetensors");
    shouting(&scene);
    let measured = |args: &[&str], words: &[&str]| {
        let args = [args, &["--text", "eval.txt", "--window", "32", "--max-windows", "2"]].concat();
        scene.run(&args).ended(1).says(words);
        let ran = scene.run(&[&args[..], &["--json"]].concat()).ended(1).says(words);
        ran.json()
    };
    let infinite = "the perplexity is infinite: a token costs";
    let found = measured(&["eval", "ppl", "model"], &["`model`", infinite, "config.json does not describe them"]);
    assert_eq!(found["perplexity"], Value::Null);
    assert!(found["reason"].as_str().unwrap().contains("exp overflows beyond 709.7"), "{found}");
    assert!(found["nll"].as_f64().unwrap() > 710.0, "{found}");
    let found = measured(&["eval", "kv", "model", "--kv-cache-dtype", "f32"], &["with a cache of f16", infinite]);
    assert_eq!(found["baseline_perplexity"], Value::Null);
    assert!(found["reason"].as_str().unwrap().contains("infinite"), "{found}");

    // A source that is broken itself is told from an artifact that is.
    scene.fails(&gptq(&[]), 1, &["the source `model` itself: the perplexity is infinite", "--no-eval"]);
    scene.tiny_run(&["rtn", "model", "-o", "out", "--no-eval"]).ok();
    let kl = ["eval", "kl", "out", "--reference", "model"];
    let found = measured(&kl, &["on eval.txt of the reference the perplexity is infinite"]);
    let on = &found["corpora"][0];
    assert_eq!((&on["perplexity"]["reference"], &on["perplexity"]["artifact"]), (&Value::Null, &Value::Null));
    assert!(on["reason"].as_str().unwrap().starts_with("of the reference"), "{on}");
    let validate = ["validate", "out", "--reference", "model", "--text", "eval.txt", "--window", "32"];
    let validate =
        [&validate[..], &["--max-windows", "2", "--skip", "modules,kv,spec,control", "--out", "report"]].concat();
    scene.run(&validate).ended(1).says(&["finite", "of the reference the perplexity is infinite"]);

    scene.write("model/model.safetensors", sound);
    measured(&kl, &["on eval.txt of the artifact the perplexity is infinite", "the reference has"]);
    fs::remove_dir_all(scene.path("report")).unwrap();
    scene.run(&validate).ended(1).says(&["of the artifact the perplexity is infinite"]);

    shouting(&scene);
    scene.write("model/tokenizer.json", byte_level_tokenizer());
    let gguf = ["gguf", "model", "--type", "Q8_0", "-o", "x.gguf", "--eval-text", "eval.txt", "--eval-windows", "1"];
    scene.fails(&gguf, 1, &["the source `model` itself: the perplexity is infinite"]);
}

/// Few tokens leave a Hessian without full rank, and statistics to chance.
#[test]
fn calibration_on_a_handful_of_tokens_warns_once() {
    let scene = Scene::tiny("llama");
    let warned = |args: &[&str], words: &[&str]| {
        let ran = scene.run(args).ok().says(words);
        assert_eq!(ran.stderr.matches("warning: calibration sees").count(), 1, "{}", ran.stderr);
    };
    let short = ["--group-size", "32", "--calib", "calib.txt", "--nsamples", "2", "--seqlen", "32", "--no-eval"];
    let hessian = ["calibration sees 64 tokens", "has 96 inputs", "rank of 64", "--nsamples"];
    let statistics = ["calibration sees 64 tokens", "fewer than 4096", "--nsamples"];
    warned(&[&["gptq", "model", "-o", "a"], &short[..]].concat(), &hessian);
    warned(&[&["awq", "model", "-o", "b", "--points", "3"], &short[..]].concat(), &statistics);
    warned(&[&["rtn", "model", "-o", "c", "--grid", "hessian"], &short[..]].concat(), &statistics);
    // Its linears are rounded by GPTQ.
    warned(&[&["smoothquant", "model", "-o", "d", "--alpha", "0.5"], &short[2..]].concat(), &hessian);
    warned(&[&["fp8", "model", "-o", "e", "--kv-cache", "fp8"], &short[2..]].concat(), &statistics);
    warned(
        &[&["fp8", "model", "-o", "f", "--rounding", "gptq", "--weights", "channel"], &short[2..]].concat(),
        &hessian,
    );
    let chunks = ["--calib", "calib.txt", "--chunks", "1"];
    warned(&[&["imatrix", "model", "-o", "j.gguf"], &chunks[..]].concat(), &["64 tokens", "fewer than 4096"]);
    let kv = ["eval", "kv", "model", "--kv-cache-dtype", "int8", "--text", "eval.txt", "--window", "32"];
    warned(&[&kv[..], &["--max-windows", "1"]].concat(), &["fewer than 2048", "`--kv-cache fp8`"]);
    let enough =
        ["gptq", "model", "-o", "k", "--calib", "calib.txt", "--group-size", "32", "--nsamples", "64", "--no-eval"];
    let ran = scene.run(&[&enough[..], &["--seqlen", "64"]].concat()).ok();
    assert!(!ran.stderr.contains("calibration sees"), "{}", ran.stderr);
    // GGUF takes tokenizers with merges only.
    let demo = Scene::demo();
    let warned = |args: &[&str], words: &[&str]| {
        let gguf = ["gguf", "--type", "q4_0", "--chunks", "1"];
        let ran = demo.run(&[&gguf[..], args].concat()).ok().says(words);
        assert_eq!(ran.stderr.matches("warning: calibration sees").count(), 1, "{}", ran.stderr);
    };
    warned(&["-o", "g.gguf", "--imatrix", "auto"], &["256 tokens", "more --chunks"]);
    warned(&["-o", "h.gguf", "--error-feedback"], &["has 768 inputs", "rank of 256"]);
    warned(&["-o", "i.gguf", "--error-feedback", "--imatrix", "auto"], &["rank of 256"]);
}
