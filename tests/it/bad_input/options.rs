//! Options that cannot be, and options that do not fit the model.

use super::gptq;
use crate::support::scene::{Scene, TINY, tensors, tiny_args};

/// clap's message is more than one line; it names the option and exits with 2.
#[track_caller]
fn usage(args: &[&str], words: &[&str]) {
    let scene = Scene::demo();
    let before = scene.listing();
    let ran = scene.run(args).ended(2).says(words);
    assert_eq!(ran.stdout, "");
    assert_eq!(scene.listing(), before);
}

#[test]
fn impossible_values() {
    usage(&["gptq", "--bits", "5"], &["--bits", "2, 3, 4 or 8"]);
    usage(&["rtn", "--bits", "four"], &["--bits", "2, 3, 4 or 8"]);
    usage(&["gptq", "--group-size", "0"], &["--group-size", "-1", "positive"]);
    usage(&["gptq", "--group-size", "-2"], &["--group-size", "-1", "positive"]);
    usage(&["gptq", "--damp-percent", "1.5"], &["--damp-percent"]);
    usage(&["gptq", "--damp-percent", "NaN"], &["--damp-percent"]);
    usage(&["gptq", "--order", "random"], &["--order", "group-aware", "activation", "natural"]);
    usage(&["gptq", "--order", "natural", "--desc-act"], &["--order", "--desc-act", "cannot be used with"]);
    usage(&["gptq", "--max-shard-size", "0"], &["--max-shard-size"]);
    usage(&["gptq", "--max-shard-size", "18446744073710"], &["--max-shard-size"]);
    usage(&["gptq", "--max-increase", "NaN"], &["--max-increase"]);
    usage(&["gptq", "--threads", "0"], &["--threads"]);
    usage(&["gptq", "--checkpoint-format", "awq"], &["--checkpoint-format", "gptq_v2"]);
    usage(&["eval", "ppl", "--convention", "gguf"], &["--convention", "gptq, llamacpp, lmeval"]);
    usage(&["eval", "ppl", "--bos", "maybe"], &["--bos", "auto, none, window, once"]);
    usage(&["gptq", "--frobnicate"], &["--frobnicate"]);
    usage(&["quantise"], &["quantise"]);
}

/// Options that nothing would read.
#[test]
fn options_without_effect() {
    for option in [["--calib", "calib.txt"], ["--nsamples", "4"], ["--seqlen", "32"], ["--sampling", "random"]] {
        usage(&[&["rtn", "-o", "out"], &option[..]].concat(), &[option[0], "--grid hessian"]);
    }
    usage(&["gptq", "-o", "out", "--seed", "1"], &["--seed", "--sampling random"]);
    for option in [["--eval-text", "eval.txt"], ["--eval-windows", "2"], ["--max-increase", "5"]] {
        usage(&[&["gptq", "-o", "out", "--no-eval"], &option[..]].concat(), &[option[0], "--no-eval"]);
    }
    let scene = Scene::tiny("llama");
    for model in [&["model"][..], &[]] {
        let args = [&["generate"], model, &["--prompt", "a", "--max-tokens", "1", "--revision", "v2"]].concat();
        scene.run(&args).ok().says(&["warning: ", "--revision v2 is ignored"]);
    }
}

/// The tiny models have 64 and 96 input channels: 48 divides neither, 64 only one.
#[test]
fn group_size_that_does_not_divide() {
    let scene = Scene::tiny("llama");
    scene.refused(
        &["gptq", "model", "-o", "out", "--group-size", "48"],
        &[
            "model.layers.0.self_attn.q_proj",
            "group size 48",
            "64 input channels",
            "64, 32, 16 or -1 would",
            "--on-misfit",
        ],
    );
    scene.refused(
        &["rtn", "model", "-o", "out", "--group-size", "64"],
        &["model.layers.0.mlp.down_proj", "group size 64", "96 input channels", "32, 16 or -1 would", "1 more module"],
    );
}

#[test]
fn misfits_may_be_left_out() {
    let scene = Scene::tiny("llama");
    let args = ["gptq", "model", "-o", "out", "--on-misfit", "skip", "--group-size", "64", "--json"];
    let ran = scene.run(&[&args, &TINY[2..]].concat()).ok();
    ran.json()["changed_by_shape"].as_array().unwrap().iter().for_each(|note| {
        assert!(note.as_str().unwrap().contains("left in floating point"), "{note}");
    });
    let (found, source) =
        (tensors(&scene.path("out/model.safetensors")), tensors(&scene.path("model/model.safetensors")));
    for layer in 0..2 {
        let down = format!("model.layers.{layer}.mlp.down_proj.weight");
        assert_eq!(found[&down], source[&down]);
        assert!(found.contains_key(&format!("model.layers.{layer}.mlp.up_proj.qweight")));
    }
    let config = scene.json("out/config.json");
    let skipped = config["quantization_config"]["dynamic"].as_object().unwrap();
    assert!(skipped.keys().all(|key| key.starts_with("-:") && key.contains("down_proj")), "{skipped:?}");
}

#[test]
fn misfits_may_get_smaller_groups() {
    let scene = Scene::tiny("llama");
    let args = ["gptq", "model", "-o", "out", "--on-misfit", "smaller-group", "--group-size", "64"];
    scene.run(&[&args, &TINY[2..]].concat()).ok().says(&["warning", "down_proj", "group size 32 instead of 64"]);
    let found = tensors(&scene.path("out/model.safetensors"));
    assert_eq!(found["model.layers.1.mlp.down_proj.scales"].shape, [3, 64]);
    assert_eq!(found["model.layers.1.mlp.up_proj.scales"].shape, [1, 96]);
}

#[test]
fn consumers() {
    let scene = Scene::tiny("llama");
    // Refused before calibration: its text, which is not even there, is never read.
    let args = ["gptq", "model", "-o", "out", "--group-size", "32", "--calib", "absent.txt"];
    let with = |more: &[&'static str]| [&args, more].concat();
    scene.refused(&with(&["--bits", "3", "--for", "vllm-0.33"]), &["vLLM 0.33", "3-bit symmetric", "4-bit symmetric"]);
    scene.refused(&with(&["--desc-act", "--for", "vllm-0.33"]), &["vLLM 0.33", "activation order"]);
    scene.refused(&with(&["--asym", "--checkpoint-format", "gptq", "--for", "gptqmodel"]), &["GPTQModel", "gptq_v2"]);
    scene.refused(
        &with(&["--for", "vllm-9"]),
        &["`vllm-9` is no known consumer", "vllm-0.33", "sglang-0.5", "gptqmodel-7"],
    );
    scene.refused(&with(&["--for", "vllm-0.33", "--rule", "q_proj=bits:8"]), &["q_proj, k_proj, v_proj", "one scheme"]);
    // The base of the config is looked at first, whatever rules say of modules.
    scene
        .refused(&with(&["--bits", "3", "--rule", ".=bits:4", "--for", "vllm-0.33"]), &["vLLM 0.33", "3-bit", "rules"]);
    let args = ["gptq", "--group-size", "128", "--calib", "absent.txt", "--for", "vllm-0.10"];
    scene.refused(
        &[&args[..], &["--rule", "down_proj=bits:3"]].concat(),
        &["vLLM 0.10: 3-bit symmetric", "down_proj` and 3 more"],
    );
}

/// With `--on-misfit skip` what the consumer would not load stays in floating point, together with what it joins it to.
#[test]
fn what_a_consumer_would_not_load_is_left_out() {
    let scene = Scene::tiny("llama");
    let loads = |folder: &str, title: &str| {
        let found = scene.run(&["inspect", folder, "--json"]).ok().json();
        let consumers = found["consumers"].as_array().unwrap().clone();
        consumers.iter().find(|consumer| consumer["title"] == title).unwrap()["loads"] == true
    };
    let mixed = ["rtn", "model", "-o", "mixed", "--no-eval", "--rule", "q_proj=bits:8", "--for", "vllm-0.33"];
    let joined = "vLLM 0.33: q_proj, k_proj, v_proj become one linear and must all have one scheme or none";
    scene.refused(&tiny_args(&mixed), &[joined, "`--on-misfit skip` leaves such modules in floating point"]);
    let left = scene.tiny_run(&[&mixed[..], &["--on-misfit", "skip"]].concat()).ok();
    let left = left.says(&["left in floating point: ", joined, "`model.layers.0.self_attn.q_proj` and 5 more"]);
    assert_eq!(left.stderr.matches("left in floating point").count(), 1, "{}", left.stderr);
    let manifest = scene.json("mixed/quantkit.json");
    let recorded = manifest["options"]["left_out"].as_object().unwrap();
    assert_eq!(recorded.len(), 6);
    assert_eq!(recorded["model.layers.1.self_attn.v_proj"], joined);
    assert_eq!(manifest["modules"]["floating_point"].as_array().unwrap().len(), 6);
    assert!(loads("mixed", "vLLM 0.33"));
    // What plain rounding is to do for comparison leaves out the same.
    let validate =
        ["validate", "mixed", "--reference", "model", "--text", "eval.txt", "--window", "32", "--max-windows", "1"];
    scene
        .run(&[&validate[..], &["--skip", "modules", "--skip", "kv", "--skip", "spec", "--out", "report"]].concat())
        .ok();

    let awq = ["awq", "model", "-o", "awq", "--no-eval", "--points", "3", "--skip", "up_proj", "--for", "vllm-0.10"];
    // Together they have 192 outputs; gate_proj alone has 96.
    let alone = "its plain AWQ kernel takes multiples of 64 outputs, not 96 ones";
    scene.refused(&tiny_args(&awq), &[alone, "`model.layers.0.mlp.gate_proj`", "--on-misfit skip"]);
    scene.tiny_run(&[&awq[..], &["--on-misfit", "skip"]].concat()).ok().says(&["left in floating point", alone]);
    let config = scene.json("awq/config.json");
    let names = config["quantization_config"]["modules_to_not_convert"].as_array().unwrap().clone();
    for name in ["gate_proj", "up_proj", "gate_up_proj"] {
        assert!(names.contains(&format!("model.layers.0.mlp.{name}").into()), "{name}: {names:?}");
    }
    assert!(loads("awq", "vLLM 0.10"));
    // Nothing would be left.
    let none =
        ["rtn", "model", "-o", "none", "--no-eval", "--rule", ".=bits:3", "--for", "vllm-0.33", "--on-misfit", "skip"];
    scene.refused(&tiny_args(&none), &["3-bit", "no module is left to quantize"]);
}

#[test]
fn unnamed_consumers_are_warned_of() {
    let scene = Scene::tiny("llama");
    let args = ["rtn", "model", "-o", "out", "--bits", "3", "--no-eval"];
    scene.tiny_run(&args).ok().says(&["warning: would not be loaded by vLLM 0.33: 3-bit symmetric"]);
    let ran = scene.tiny_run(&["rtn", "model", "-o", "out4", "--bits", "4", "--no-eval", "--for", "vllm"]).ok();
    assert!(!ran.stderr.contains("would not be loaded"), "{}", ran.stderr);
}

#[test]
fn rules() {
    let scene = Scene::tiny("llama");
    for (rule, words) in [
        ("down_proj", ["down_proj", "REGEX=bits:8"]),
        ("down_proj=bits:5", ["`bits:5`", "bits:2|3|4|8"]),
        ("down_proj=group_size:0", ["`group_size:0`", "group_size:N"]),
        ("down_proj=sym:maybe", ["`sym:maybe`", "sym:true|false"]),
        ("down_proj=colour:red", ["`colour:red`", "known are"]),
        ("down_proj=", ["``", "known are"]),
        ("(=bits:8", ["`(`", "no regular expression"]),
        ("experts=bits:8", ["no module matches `experts`", "model.layers.0.self_attn.q_proj"]),
    ] {
        scene.refused(&gptq(&["--rule", rule]), &words);
    }
    scene.refused(&gptq(&["--skip", "lm_head"]), &["no module matches `lm_head`", "model.layers.0.self_attn.q_proj"]);
    scene.refused(&gptq(&["--skip", "["]), &["`[`", "no regular expression"]);
    scene.refused(&gptq(&["--skip", "."]), &["no module is left to quantize"]);
    scene.refused(&gptq(&["--rule", "down_proj=group_size:64"]), &["down_proj", "group size 64", "96 input channels"]);
}
