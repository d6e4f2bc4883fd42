//! `quantkit generate`.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::support::command::command;
use crate::support::scene::Scene;

const PROMPT: &str = "It was a dark night, and the old man";

fn text(scene: &Scene, model: &[&str], more: &[&str]) -> String {
    let args = [&["generate"], model, &["--prompt", PROMPT, "--max-tokens", "24", "--ignore-eos"], more].concat();
    let ran = scene.run(&args).ok();
    assert_eq!(ran.stderr.lines().last().map(|line| line.starts_with("24 tokens after")), Some(true), "{}", ran.stderr);
    ran.stdout
}

#[test]
fn artifacts_write_text() {
    let scene = Scene::demo();
    scene.run(&["rtn", "-o", "out", "--bits", "8", "--no-eval"]).ok();
    let greedy = text(&scene, &["out"], &[]);
    assert!(greedy.split_whitespace().count() > 5, "{greedy}");
    assert_eq!(text(&scene, &["out"], &[]), greedy);
    assert_eq!(text(&scene, &["out"], &["--temperature", "1", "--top-k", "1"]), greedy);
    // Eight bits are as good as the original, as long as no two tokens are nearly as likely.
    let words = |text: &str| text.split_whitespace().take(4).map(str::to_string).collect::<Vec<_>>();
    assert_eq!(words(&text(&scene, &[], &[])), words(&greedy));

    let sampled = |seed| text(&scene, &["out"], &["--temperature", "1", "--top-p", "0.95", "--seed", seed]);
    let first = sampled("1");
    assert_eq!(sampled("1"), first);
    assert_ne!(sampled("2"), first);
    assert_ne!(first, greedy);
}

#[test]
fn json() {
    let scene = Scene::demo();
    let args = ["generate", "--prompt", PROMPT, "--max-tokens", "12", "--ignore-eos"];
    let spoken = scene.run(&args).ok().stdout;
    let got = scene.run(&[&args[..], &["--json", "--seed", "5"]].concat()).ok().json();
    let keys: BTreeSet<&str> = got.as_object().unwrap().keys().map(String::as_str).collect();
    let wanted = ["text", "prompt_tokens", "tokens", "tokens_per_second", "stop", "seed", "speculation"];
    assert_eq!(keys, BTreeSet::from(wanted));
    assert_eq!(got["speculation"], Value::Null, "nothing was proposed");
    assert_eq!(format!("{}\n", got["text"].as_str().unwrap()), spoken);
    assert_eq!((&got["tokens"], &got["stop"], &got["seed"]), (&12.into(), &"token limit".into(), &5.into()));
    assert!(got["prompt_tokens"].as_u64().unwrap() > 8);
}

#[test]
fn options_of_sampling_without_sampling() {
    let scene = Scene::demo();
    let args = ["generate", "--prompt", PROMPT, "--max-tokens", "2"];
    let ran = scene.run(&[&args[..], &["--top-k", "5", "--seed", "3"]].concat()).ok();
    let ran = ran.says(&["at temperature 0", "--top-k, --seed has no effect"]);
    assert!(!ran.stderr.contains("--top-p"), "{}", ran.stderr);
    let ran = scene.run(&[&args[..], &["--temperature", "1", "--seed", "3"]].concat()).ok();
    assert!(!ran.stderr.contains("no effect"), "{}", ran.stderr);
}

#[test]
fn prompts_from_stdin() {
    let scene = Scene::demo();
    let args = ["generate", "--prompt", "-", "--max-tokens", "8", "--quiet"];
    let output = command(scene.root(), &args).write_stdin(PROMPT).output().unwrap();
    assert!(output.status.success());
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    let direct = scene.run(&["generate", "--prompt", PROMPT, "--max-tokens", "8", "--quiet"]).ok().stdout;
    assert_eq!(String::from_utf8(output.stdout).unwrap(), direct);
}

#[test]
fn the_context_ends() {
    let scene = Scene::tiny("llama");
    let args = ["generate", "model", "--prompt", "abc", "--max-tokens", "500", "--ignore-eos", "--json"];
    let got = scene.run(&args).ok().json();
    assert_eq!(got["stop"], "context full");
    // Three of the prompt are in the context; the last token is written without being read again.
    assert_eq!(got["tokens"], 64 - 3 + 1);
}

#[test]
fn chats() {
    let scene = Scene::tiny("llama");
    let template =
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}";
    scene.write("model/chat_template.jinja", template);
    let args = ["generate", "model", "--prompt", "hi", "--chat", "--system", "be brief", "--max-tokens", "2", "--json"];
    let got = scene.run(&args).ok().json();
    assert_eq!(got["prompt_tokens"], "<system>be brief<user>hi>".len());
}

/// Many prompts at a time have the texts that each has alone, whatever the cache has room for.
#[test]
fn prompts_side_by_side() {
    let scene = Scene::demo();
    let prompts = ["It was a dark night, and the old man", "The sea", "A letter came: \"do not", "The sea"];
    scene.write("prompts.txt", prompts.join("\n\n") + "\n");
    let common = ["--max-tokens", "20", "--ignore-eos", "--temperature", "0.8", "--seed", "3"];
    let alone: Vec<String> = prompts
        .iter()
        .map(|prompt| scene.run(&[&["generate", "--prompt", prompt][..], &common].concat()).ok().stdout)
        .map(|text| text.strip_suffix('\n').unwrap().replace('\n', "\\n") + "\n")
        .collect();
    let many = [&["generate", "--prompts", "prompts.txt"][..], &common].concat();
    let ran = scene.run(&many).ok().says(&[
        "80 tokens of 4 sequences",
        "up to 4 sequences side by side",
        "no sequence gave way",
    ]);
    assert_eq!(ran.stdout, alone.concat());
    // Three blocks of 16 tokens of four layers with two heads of 64 channels, in f32.
    let bytes = (3 * 16 * 2 * 4 * 2 * 64 * 4).to_string();
    let tight = [&many[..], &["--kv-cache-memory-bytes", &bytes]].concat();
    let ran = scene.run(&[&tight[..], &["--swap-space", "0"]].concat()).ok().says(&["to be computed again"]);
    assert_eq!(ran.stdout, alone.concat());
    let got = scene.run(&[&tight[..], &["--json"]].concat()).ok().json();
    assert!(got["cache"]["swapped"].as_u64().unwrap() > 0, "{got}");
    assert_eq!(
        (&got["cache"]["type"], &got["cache"]["blocks"], &got["tokens"]),
        (&"f32".into(), &3.into(), &80.into())
    );
    let texts =
        got["results"].as_array().unwrap().iter().map(|r| r["text"].as_str().unwrap().replace('\n', "\\n") + "\n");
    assert_eq!(texts.collect::<String>(), alone.concat());
}

#[test]
fn samples_of_one_prompt() {
    let scene = Scene::tiny("llama");
    scene.write("model/chat_template.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}");
    let lines = ["{\"prompt\": \"abc\"}", "{\"messages\": [{\"role\": \"user\", \"content\": \"abc\"}]}"];
    scene.write("prompts.jsonl", lines.join("\n"));
    let common = ["--max-tokens", "9", "--ignore-eos", "--temperature", "1", "--json"];
    let alone = |seed: &str| {
        let args = [&["generate", "model", "--prompt", "abc", "--seed", seed][..], &common].concat();
        scene.run(&args).ok().json()["text"].clone()
    };
    let wanted = [alone("7"), alone("8"), alone("9")];
    assert_ne!(wanted[0], wanted[1]);
    let sources = [["--prompt", "abc"], ["--prompts", "prompts.jsonl"]];
    for (source, prompts) in sources.into_iter().zip([1, 2]) {
        let samples = ["--num-samples", "3", "--seed", "7", "--max-num-seqs", "4"];
        let got = scene.run(&[&["generate", "model"], &source[..], &common, &samples].concat()).ok().json();
        let results = got["results"].as_array().unwrap();
        assert_eq!(results.len(), 3 * prompts);
        for (i, result) in results.iter().enumerate() {
            assert_eq!((&result["prompt"], &result["sample"]), (&(i / 3).into(), &(i % 3).into()));
            assert_eq!((&result["text"], &result["seed"]), (&wanted[i % 3], &(7 + i % 3).into()));
        }
    }
}

/// Narrow caches: near the exact one, with an artifact's own scales where it has any.
#[test]
fn types_of_cache() {
    let scene = Scene::demo();
    let text = |model: &[&str], kind: &str| {
        let args = ["--prompt", PROMPT, "--max-tokens", "8", "--ignore-eos", "--kv-cache-dtype", kind];
        scene.run(&[&["generate"], model, &args].concat()).ok()
    };
    let exact = text(&[], "f32").stdout;
    assert_eq!(text(&[], "f16").stdout, exact);
    assert_eq!(text(&[], "int8").stdout[..10], exact[..10]);
    assert!(!text(&[], "fp8_e5m2").stderr.contains("scale 1.0"));
    let told = text(&[], "fp8").says(&["warning: --kv-cache-dtype fp8", "no k_scale and v_scale", "scale 1.0"]);
    assert!(!told.stdout.is_empty());
    let fp8 = ["fp8", "-o", "scaled", "--kv-cache", "fp8-per-head", "--no-eval", "--format", "compressed-tensors"];
    scene.run(&[&fp8[..], &["--nsamples", "4", "--seqlen", "64"]].concat()).ok();
    assert!(!text(&["scaled"], "fp8").stderr.contains("scale 1.0"));
    // Where they are to come from can be said for every type of 8 bits.
    let text_by = |model: &[&str], kind: &str, scales: &str| {
        let args = ["--prompt", PROMPT, "--max-tokens", "8", "--ignore-eos", "--kv-cache-dtype", kind];
        scene.run(&[&["generate"], model, &args, &["--kv-cache-scales", scales]].concat()).ok().stdout
    };
    let plain = ["generate", "--prompt", "The whale swam", "--max-tokens", "8", "--ignore-eos"];
    let int8 = ["--kv-cache-dtype", "int8", "--kv-cache-scales", "calibrated"];
    assert_eq!(scene.run(&[&plain[..], &int8].concat()).ok().stdout, scene.run(&plain).ok().stdout);
    let own_way = ["fp8_e5m2", "int8"].map(|kind| text_by(&["scaled"], kind, "none"));
    let stored = ["fp8_e5m2", "int8"].map(|kind| text_by(&["scaled"], kind, "stored"));
    assert_eq!(text_by(&["scaled"], "fp8", "stored"), text(&["scaled"], "fp8").stdout);
    // Scales that are far off show: they are used.
    let scaled = text(&["scaled"], "fp8").stdout;
    let path = "scaled/model.safetensors";
    let mut tensors = crate::support::scene::tensors(&scene.path(path));
    let large: Vec<u8> = (0..2).flat_map(|_| 1e4f32.to_le_bytes()).collect();
    let mut changed = 0;
    for (_, tensor) in tensors.iter_mut().filter(|(name, _)| name.ends_with("v_scale")) {
        assert_eq!(tensor.shape, [2, 1, 1]);
        tensor.data.clone_from(&large);
        changed += 1;
    }
    assert_eq!(changed, 4);
    let views = tensors
        .iter()
        .map(|(name, t)| (name, safetensors::tensor::TensorView::new(t.dtype, t.shape.clone(), &t.data).unwrap()));
    scene.write(path, safetensors::serialize(views, None).unwrap());
    assert_ne!(text(&["scaled"], "fp8").stdout, scaled);
    for (kind, before) in ["fp8_e5m2", "int8"].into_iter().zip(stored) {
        assert_ne!(text_by(&["scaled"], kind, "stored"), before, "{kind}");
    }
    assert_eq!(["fp8_e5m2", "int8"].map(|kind| text_by(&["scaled"], kind, "none")), own_way);
    assert_eq!(own_way, ["fp8_e5m2", "int8"].map(|kind| text(&["scaled"], kind).stdout));
}

#[test]
fn scales_that_are_not_there() {
    let scene = Scene::tiny("llama");
    let refused = |args: &[&str], words: &[&str]| {
        drop(scene.refused(&[&["generate", "model", "--prompt", "x", "--kv-cache-scales"], args].concat(), words));
    };
    refused(&["stored"], &["--kv-cache-scales stored", "of f32 has no scales", "--kv-cache-dtype fp8"]);
    refused(&["calibrated", "--kv-cache-dtype", "f16"], &["--kv-cache-scales calibrated", "of f16 has no scales"]);
    for kind in ["fp8", "fp8_e5m2", "int8"] {
        refused(&["stored", "--kv-cache-dtype", kind], &["no k_scale and v_scale", "--kv-cache fp8", "calibrated"]);
    }
}

#[test]
fn caches_and_prompts_that_make_no_sense() {
    let scene = Scene::tiny("llama");
    scene.write("empty.txt", "\n  \n");
    scene.write("bad.jsonl", "{\"prompt\": \"x\"}\n{\"prompt\": 5}\n");
    scene.write("chat.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}]}");
    scene.write("long.txt", format!("x\n{}", "y".repeat(70)));
    let refused = |args: &[&str], words: &[&str]| drop(scene.refused(&[&["generate", "model"], args].concat(), words));
    refused(&["--prompts", "nowhere.txt"], &["cannot read `nowhere.txt`"]);
    refused(&["--prompts", "empty.txt"], &["`empty.txt` holds no prompts"]);
    refused(&["--prompts", "bad.jsonl"], &["`bad.jsonl`, line 2", "`prompt` is not a string"]);
    refused(&["--prompts", "chat.jsonl"], &["prompt 1", "no chat template"]);
    refused(&["--prompts", "long.txt"], &["prompt 2", "70 tokens", "takes 63"]);
    let x = ["--prompt", "x"];
    refused(&[&x[..], &["--num-samples", "5", "--max-num-seqs", "4"]].concat(), &["--num-samples 5", "4 sequences"]);
    refused(
        &[&x[..], &["--num-samples", "2", "--max-num-batched-tokens", "64"]].concat(),
        &["max-num-batched-tokens 64"],
    );
    refused(&[&x[..], &["--kv-cache-memory-bytes", "100"]].concat(), &["gets 100 bytes", "a block of 16 tokens takes"]);
    let none = ["--num-samples", "2", "--gpu-memory-utilization", "0"];
    refused(&[&x[..], &none].concat(), &["leaves no key-value cache"]);
    let wrong =
        |args: &[&str], words: &[&str]| drop(scene.run(&[&["generate", "model"], args].concat()).ended(2).says(words));
    wrong(&[&x[..], &["--kv-cache-dtype", "bf16"]].concat(), &["there are f32, f16, fp8, fp8_e5m2, int8"]);
    wrong(&[&x[..], &["--prompts", "long.txt"]].concat(), &["cannot be used with"]);
    // One sequence takes what it needs.
    for option in [
        ["--max-num-seqs", "4"],
        ["--max-num-batched-tokens", "4096"],
        ["--gpu-memory-utilization", "0.9"],
        ["--swap-space", "1"],
    ] {
        wrong(&[&x[..], &option].concat(), &["not provided", "--prompts <FILE>", "--num-samples <N>"]);
    }
}
