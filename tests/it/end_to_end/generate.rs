//! `quantkit generate`.

use std::collections::BTreeSet;

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
    assert_eq!(keys, BTreeSet::from(["text", "prompt_tokens", "tokens", "tokens_per_second", "stop", "seed"]));
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
