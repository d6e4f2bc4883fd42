//! Texts that do not serve.

use super::gptq;
use crate::support::scene::{Scene, text};

#[test]
fn empty_text() {
    let scene = Scene::tiny("llama");
    for contents in ["", " \n\n\t\n", "\u{feff}"] {
        scene.write("calib.txt", contents);
        scene.refused(&gptq(&[]), &["`calib.txt` holds no text"]);
    }
    scene.write("chat.jsonl", "\n\n{\"text\": \"\"}\n");
    scene.refused(&gptq(&["--calib", "chat.jsonl"])[..], &["`chat.jsonl` holds no text"]);
}

#[test]
fn short_text() {
    let scene = Scene::tiny("llama");
    scene.write("calib.txt", text("calibration.txt", 0, 100));
    scene.refused(&gptq(&[]), &["4 windows of 32 tokens need 128, it has 100", "`--nsamples 3`"]);
    scene.write("calib.txt", "thirty-two tokens are not here");
    scene.refused(&gptq(&[]), &["it has 30", "a smaller `--seqlen`"]);
}

#[test]
fn what_is_not_asked_for_need_not_be_there() {
    let scene = Scene::tiny("llama");
    scene.write("calib.txt", text("calibration.txt", 0, 100));
    let args =
        ["gptq", "model", "-o", "out", "--group-size", "32", "--calib", "calib.txt", "--seqlen", "32", "--no-eval"];
    scene.run(&args).ok().says(&["3 calibration windows of 32 tokens"]);
}

#[test]
fn nothing_asked_for() {
    let scene = Scene::tiny("llama");
    for option in ["--nsamples", "--seqlen"] {
        let args = ["gptq", "model", "-o", "out", "--group-size", "32", "--calib", "calib.txt", option, "0"];
        scene.refused(&args, &["must be positive"]);
    }
}

#[test]
fn bad_lines() {
    let scene = Scene::tiny("llama");
    let good = r#"{"text": "It was a bright cold day."}"#;
    for (line, words) in [
        ("{\"text\": \"unfinished", ["line 3", "not JSON"]),
        (r#"{"text": 5}"#, ["line 3", "`text` is not a string"]),
        (r#"{"prompt": "x"}"#, ["line 3", "neither `text` nor `messages`"]),
        (r#"{"messages": []}"#, ["line 3", "`messages`"]),
        (r#"{"messages": [{"role": "user", "content": "x"}]}"#, ["line 3", "no chat template"]),
        (
            r#"{"text": "x", "messages": [{"role": "user", "content": "x"}]}"#,
            ["line 3", "has both `text` and `messages`"],
        ),
        (r#"{"text": null, "messages": [{"role": "user", "content": "x"}]}"#, ["line 3", "no chat template"]),
        (r#"{"text": null}"#, ["line 3", "neither `text` nor `messages`"]),
    ] {
        scene.write("lines.jsonl", format!("{good}\n\n{line}\n{good}\n"));
        let args = ["gptq", "model", "-o", "out", "--group-size", "32", "--calib", "lines.jsonl"];
        scene.refused(&args, &["`lines.jsonl`", words[0], words[1]]);
    }
}

/// A chat template is read where a chat is.
#[test]
fn contradictory_chat_templates_stop_what_reads_chats() {
    let scene = Scene::tiny("llama");
    scene.edit_json("model/tokenizer_config.json", |config| config["chat_template"] = "one".into());
    scene.write("model/chat_template.jinja", "another");
    let document = format!("{{\"text\": \"{}\", \"messages\": null}}\n", "It was a bright cold day. ".repeat(20));
    scene.write("documents.jsonl", &document);
    scene.write("chat.jsonl", document + r#"{"messages": [{"role": "user", "content": "x"}]}"#);
    let ppl = |file: &'static str| ["eval", "ppl", "model", "--text", file, "--max-windows", "1"];
    scene.run(&ppl("eval.txt")).ok();
    scene.run(&ppl("documents.jsonl")).ok();
    scene
        .refused(&ppl("chat.jsonl"), &["`chat.jsonl`, line 2", "`model` has two chat templates of the name `default`"]);
}

#[test]
fn no_text_at_all() {
    let scene = Scene::tiny("llama");
    let with = |file: &'static str| ["gptq", "model", "-o", "out", "--group-size", "32", "--calib", file];
    scene.refused(&with("absent.txt"), &["cannot read `absent.txt`"]);
    scene.refused(&with("model"), &["cannot read `model`"]);
    scene.write("data.parquet", "PAR1");
    scene.refused(&with("data.parquet"), &[".parquet files are not read"]);
    scene.write("latin1.txt", b"caf\xe9");
    scene.refused(&with("latin1.txt"), &["`latin1.txt` is not UTF-8 text (first bad byte at 3)"]);
}

#[test]
fn windows_beyond_the_context() {
    let scene = Scene::tiny("llama");
    let args = ["gptq", "model", "-o", "out", "--group-size", "32", "--calib", "calib.txt", "--seqlen", "65"];
    scene.refused(&args, &["--seqlen 65", "64 positions"]);
    scene.refused(&["eval", "ppl", "model", "--text", "eval.txt", "--window", "66"], &["--window 66", "64 positions"]);
}

#[test]
fn evaluation_text_shorter_than_a_window() {
    let scene = Scene::tiny("llama");
    scene.write("eval.txt", "Too short by far.");
    scene.refused(&["eval", "ppl", "model", "--text", "eval.txt"], &["too short: 17 tokens", "needs 64"]);
    // Said before the work, not after it.
    scene.refused(&gptq(&[]), &["too short: 17 tokens", "needs 64"]);
    scene.refused(&gptq(&["--eval-text", "absent.txt"]), &["cannot read `absent.txt`"]);
}

#[test]
fn nothing_to_measure() {
    let scene = Scene::tiny("llama");
    for option in ["--window", "--max-windows"] {
        let ran = scene.run(&["eval", "ppl", "model", "--text", "eval.txt", option, "0"]).ended(2);
        assert_eq!(ran.stdout, "");
    }
    scene.tiny_run(&["gptq", "model", "-o", "out", "--eval-windows", "0"]).ended(2).says(&["--eval-windows"]);
}

#[test]
fn prompts_that_cannot_be_continued() {
    let scene = Scene::tiny("llama");
    let long = "x".repeat(64);
    scene.refused(&["generate", "model", "--prompt", &long], &["64 tokens", "takes 63"]);
    scene.refused(&["generate", "model", "--prompt", ""], &["prompt is empty"]);
    scene.refused(&["generate", "model", "--prompt", "x", "--chat"], &["no chat template"]);
    scene.refused(&["generate", "model", "--prompt", "x", "--temperature", "-1"], &["temperature"]);
    scene.refused(&["generate", "model", "--prompt", "x", "--temperature", "1", "--top-p", "7"], &["top-p", "7"]);
}
