//! The command line itself: help, usage, defaults, pipes.

use std::fs;
use std::io::Read;
use std::process::Stdio;

use predicates::prelude::PredicateBooleanExt;
use predicates::str::{contains, is_empty};
use quantkit::format::consumers::table;

use crate::support::command::{VARIABLES, command, std_command};
use crate::support::repository;
use crate::support::scene::Scene;

const GLOBAL: [&str; 3] = ["--threads", "--quiet", "--help"];
const MODEL: [&str; 2] = ["[MODEL]", "--revision"];
const SCHEME: [&str; 5] = ["--bits", "--group-size", "--rule", "--skip", "--on-misfit"];
const CALIBRATION: [&str; 5] = ["--calib", "--nsamples", "--seqlen", "--sampling", "--seed"];
const OUTPUT: [&str; 12] = [
    "--out",
    "--overwrite",
    "--resume",
    "--checkpoint-format",
    "--max-shard-size",
    "--for",
    "--no-eval",
    "--eval-text",
    "--eval-windows",
    "--max-increase",
    "--bos",
    "--json",
];
const GPTQ: [&str; 9] = [
    "--grid",
    "--order",
    "--desc-act",
    "--static-groups",
    "--damp-percent",
    "--damp-auto-increment",
    "--sweeps",
    "--no-true-sequential",
    "--drift-correction",
];

#[track_caller]
fn help(command_line: &[&str], parts: &[&[&str]]) {
    let scene = Scene::demo();
    for flag in ["--help", "-h"] {
        let ran = scene.run(&[command_line, &[flag]].concat()).ok();
        assert_eq!(ran.stderr, "");
        for word in parts.concat() {
            assert!(ran.stdout.contains(word), "{command_line:?} {flag} lacks {word}:\n{}", ran.stdout);
        }
    }
}

#[test]
fn every_command_explains_itself() {
    help(
        &[],
        &[
            &[
                "gptq",
                "rtn",
                "eval",
                "gguf",
                "convert",
                "inspect",
                "plan",
                "run",
                "generate",
                "compare",
                "history",
                "list",
                "--version",
                "Exit codes",
                "130",
            ],
            &GLOBAL,
        ],
    );
    help(&["gptq"], &[&GLOBAL, &MODEL, &SCHEME, &CALIBRATION, &OUTPUT, &GPTQ, &["--asym"]]);
    help(&["rtn"], &[&GLOBAL, &MODEL, &SCHEME, &CALIBRATION, &OUTPUT, &["--grid", "--asym"]]);
    help(&["awq"], &[&GLOBAL, &MODEL, &SCHEME, &CALIBRATION, &OUTPUT, &["--sym"]]);
    help(&["eval"], &[&["ppl", "kl", "kv", "spec"]]);
    let eval = ["--text", "--convention", "--window", "--max-windows", "--bos", "--json", "gptq, llamacpp, lmeval"];
    help(&["eval", "ppl"], &[&GLOBAL, &MODEL, &eval]);
    let kl = ["<ARTIFACT>", "--revision", "--reference", "--reference-logits", "--max-kl", "--min-same-top"];
    let baselines = ["--baseline", "--save-baseline"];
    help(&["eval", "kl"], &[&GLOBAL, &kl, &baselines, &eval]);
    let spec = [
        "--draft",
        "--num-speculative-tokens",
        "--text",
        "--prompts",
        "--max-prompts",
        "--max-tokens",
        "--temperature",
        "--kv-cache-dtype",
        "--kv-cache-scales",
        "--no-speed",
        "--min-acceptance",
        "--json",
    ];
    help(&["eval", "spec"], &[&GLOBAL, &MODEL, &spec]);
    let caches = ["--kv-cache-dtype", "fp8,fp8_e5m2,int8", "--max-ppl-increase"];
    help(&["eval", "kv"], &[&GLOBAL, &MODEL, &eval, &caches]);
    let validate =
        ["[ARTIFACT]", "--reference", "--draft", "--skip", "--out", "--label", "--baseline", "--max-kl", "--for"];
    help(&["validate"], &[&GLOBAL, &eval, &validate]);
    let generate = [
        "--draft",
        "--num-speculative-tokens",
        "--prompt",
        "--chat",
        "--system",
        "--max-tokens",
        "--temperature",
        "--top-p",
        "--top-k",
        "--seed",
        "--ignore-eos",
        "--prompts",
        "--num-samples",
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--kv-cache-dtype",
        "--kv-cache-scales",
        "calibrated",
        "--gpu-memory-utilization",
        "--swap-space",
        "--json",
    ];
    help(&["generate"], &[&GLOBAL, &MODEL, &generate]);
    help(&["gguf"], &[&GLOBAL, &MODEL, &["--type", "--out", "--overwrite", "--imatrix", "--tensor-type", "--json"]]);
    help(&["convert"], &[&GLOBAL, &["<FILE>", "--to", "safetensors", "--out", "--dtype", "--json"]]);
    help(&["inspect"], &[&GLOBAL, &["<PATH>", "--verify", "--json"]]);
    let plan = ["--revision", "--memory", "--reserve", "--context", "--group-size", "--json", "40GiB"];
    help(&["plan"], &[&GLOBAL, &["[MODEL]"], &plan]);
    help(&["run"], &[&GLOBAL, &["[RECIPE]", "quantkit.toml", "--only", "--dry-run", "--device", "--json"]]);
    help(&["list"], &[&GLOBAL, &["--json", "--report-schema"]]);
    let limits =
        ["--thresholds", "--max-ppl-increase", "--max-kl", "--max-kl-p99.9", "--min-same-top", "--min-acceptance"];
    let compare = ["<REPORT>", "--baseline", "--max-bytes", "--for", "--junit", "--markdown", "--html", "--json"];
    help(&["compare"], &[&GLOBAL, &limits, &compare]);
    help(&["history"], &[&GLOBAL, &["<DIR>", "--html", "--json"]]);
}

#[test]
fn rtn_has_nothing_of_gptq_s() {
    let scene = Scene::demo();
    for option in ["--order", "--damp-percent", "--sweeps", "--desc-act"] {
        let help = scene.run(&["rtn", "--help"]).ok().stdout;
        assert!(!help.contains(option), "{option}");
    }
}

#[test]
fn version() {
    let scene = Scene::demo();
    let wanted = concat!("quantkit ", env!("CARGO_PKG_VERSION"), "\n");
    command(scene.root(), &["--version"]).assert().success().stdout(wanted).stderr(is_empty());
}

#[test]
fn no_command() {
    let scene = Scene::demo();
    for (args, word) in [(&[][..], "Usage: quantkit"), (&["eval"], "Usage: quantkit eval")] {
        command(scene.root(), args)
            .assert()
            .code(2)
            .stdout(is_empty())
            .stderr(contains(word).and(contains("Commands:")));
    }
    command(scene.root(), &["generate"]).assert().code(2).stderr(contains("--prompt"));
}

/// The quick start: no model, no files.
#[test]
fn the_demo_is_the_default() {
    let scene = Scene::demo();
    let args =
        ["gptq", "--bits", "4", "--group-size", "128", "--nsamples", "4", "--seqlen", "64", "--eval-windows", "1"];
    let ran = scene.run(&args).ok().says(&["no model given: using the built-in demo checkpoint", "builtin (BOS once)"]);
    assert!(ran.stdout.contains("wrote quantkit-demo-gptq-w4g128: 2.7 MB"), "{}", ran.stdout);
    assert!(ran.stdout.contains("tokens of the built-in held-out text"), "{}", ran.stdout);
    assert!(scene.path("quantkit-demo-gptq-w4g128/model.safetensors").exists());
    assert_eq!(fs::read_dir(scene.path("tmp")).unwrap().count(), 0, "the demo checkpoint was left unpacked");
}

#[test]
fn default_names() {
    let scene = Scene::tiny("llama");
    for (args, name) in [
        (&["rtn", "model", "--group-size", "32"][..], "model-rtn-w4g32"),
        (&["rtn", "./model/", "--group-size", "-1", "--bits", "8"], "model-rtn-w8channel"),
        (&["rtn", "model", "--group-size", "16", "--bits", "3", "--asym"], "model-rtn-w3g16-asym"),
    ] {
        let ran = scene.run(&[args, &["--no-eval"]].concat()).ok();
        assert!(ran.stdout.starts_with(&format!("wrote {name}: ")), "{}", ran.stdout);
        assert!(scene.path(name).join("quantkit.json").exists());
    }
}

#[test]
fn lists() {
    let scene = Scene::demo();
    let ran = scene.run(&["list", "--json"]).ok();
    assert_eq!(ran.stderr, "");
    let list = ran.json();
    let names = |key: &str, field: &str| -> Vec<String> {
        list[key].as_array().unwrap().iter().map(|row| row[field].as_str().unwrap().to_string()).collect()
    };
    for family in ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"] {
        assert!(names("families", "model_type").contains(&family.to_string()), "{family}");
    }
    assert!(names("consumers", "name").contains(&"vllm-0.33".to_string()));
    let formats = ["gptq", "awq", "compressed-tensors", "fp8", "auto-round", "modelopt"];
    assert_eq!(list["formats"], serde_json::json!(formats));
    let text = scene.run(&["list"]).ok().stdout;
    for name in names("families", "model_type").into_iter().chain(names("consumers", "title")) {
        assert!(text.contains(&name), "{name}");
    }
}

/// README's table of who loads what is that of the rules.
#[test]
fn readme_tells_the_rules() {
    let rows = table();
    let mut wanted = String::from("| artifact |");
    rows[0].consumers.iter().for_each(|(title, _)| wanted += &format!(" {title} |"));
    wanted += &format!("\n|{}\n", "---|".repeat(rows[0].consumers.len() + 1));
    for row in &rows {
        wanted += &format!("| {} |", row.artifact);
        row.consumers.iter().for_each(|(_, why)| wanted += if why.is_none() { " yes |" } else { " no |" });
        wanted += "\n";
    }
    let readme = fs::read_to_string(repository("README.md")).unwrap();
    let (_, rest) = readme.split_once("<!-- consumers -->\n").unwrap();
    let (found, _) = rest.split_once("<!-- /consumers -->").unwrap();
    assert!(found == wanted, "README should say:\n{wanted}");
}

#[test]
fn quiet_leaves_only_results() {
    let scene = Scene::tiny("llama");
    let ran = scene.tiny_run(&["gptq", "model", "-o", "out", "--quiet"]).ok();
    assert!(ran.stderr.lines().all(|line| line.starts_with("warning: ")), "{}", ran.stderr);
    assert!(ran.stdout.contains("wrote out") && ran.stdout.contains("perplexity"), "{}", ran.stdout);
    let ran = scene.tiny_run(&["gptq", "model", "-o", "three", "--bits", "3", "--quiet", "--no-eval"]).ok();
    assert!(ran.stderr.lines().all(|line| line.starts_with("warning: ")), "{}", ran.stderr);
}

#[test]
fn threads_from_the_environment() {
    let scene = Scene::demo();
    let run = |threads| command(scene.root(), &["list"]).env("QUANTKIT_THREADS", threads).assert();
    run("2").success();
    run("none").code(2).stderr(contains("--threads"));
}

/// Set to nothing is not set: options, the hub's settings, the folder of temporary files.
#[test]
fn empty_variables() {
    let scene = Scene::demo();
    scene.write("quantkit.toml", "[[artifact]]\nname = \"w4\"\nmethod = \"rtn\"\n");
    for args in [&["eval", "ppl", "--window", "64", "--max-windows", "1"][..], &["run", "--dry-run"], &["plan"]] {
        let mut run = command(scene.root(), args);
        for name in VARIABLES {
            run.env(name, "");
        }
        run.assert().success();
    }
    // Nothing can be made in this folder, so temporary files do not go where the program was started.
    if cfg!(target_os = "linux") {
        let args = ["eval", "ppl", "--window", "64", "--max-windows", "1"];
        command(std::path::Path::new("/proc"), &args).env("TMPDIR", "").assert().success();
    }
}

/// A reader that has gone is no failure, and no reason to panic.
#[cfg(unix)]
#[test]
fn closed_pipes() {
    let scene = Scene::tiny("llama");
    let eval = ["eval", "ppl", "model", "--text", "eval.txt", "--max-windows", "1"];
    let generate = ["generate", "model", "--prompt", "x", "--max-tokens", "4", "--ignore-eos"];
    for args in [&["list"][..], &["list", "--json"], &["--help"], &eval, &generate] {
        let mut child = std_command(scene.root(), args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(0), "{args:?}: {said}");
        assert!(!said.contains("panicked") && !said.contains("error"), "{args:?}: {said}");
    }
}

/// The work goes on when nobody listens to its progress.
#[cfg(unix)]
#[test]
fn closed_stderr() {
    let scene = Scene::tiny("llama");
    let args = [
        "gptq",
        "model",
        "-o",
        "out",
        "--group-size",
        "32",
        "--calib",
        "calib.txt",
        "--nsamples",
        "4",
        "--seqlen",
        "32",
        "--no-eval",
    ];
    let mut child = std_command(scene.root(), &args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stderr.take());
    let mut said = String::new();
    child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(said.contains("wrote out") && scene.path("out/quantkit.json").exists(), "{said}");
    let mut child = std_command(scene.root(), &args).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stderr.take());
    assert_eq!(child.wait().unwrap().code(), Some(2), "the folder exists by now");
}

#[test]
fn hub_ids_without_a_network() {
    let scene = Scene::demo();
    fs::create_dir(scene.path("hf")).unwrap();
    for args in [&["gptq", "nobody/such-model"][..], &["eval", "ppl", "nobody/such-model"]] {
        command(scene.root(), args)
            .env("HF_HUB_OFFLINE", "1")
            .env("HF_HOME", scene.path("hf"))
            .assert()
            .code(2)
            .stdout(is_empty())
            .stderr(contains("error: `config.json` of `nobody/such-model` (revision `main`) is not in the cache"))
            .stderr(contains("HF_HUB_OFFLINE is set"));
    }
    assert_eq!(fs::read_dir(scene.path("hf")).unwrap().count(), 0);
    command(scene.root(), &["gptq", "nobody/such-model"])
        .env("HF_ENDPOINT", "http://127.0.0.1:1")
        .env("HF_HOME", scene.path("hf"))
        .assert()
        .code(2)
        .stderr(contains("cannot download").and(contains("127.0.0.1:1")).and(contains("HF_HUB_OFFLINE=1")));
}

#[cfg(unix)]
#[test]
fn arguments_that_are_no_text() {
    use std::os::unix::ffi::OsStrExt;
    let scene = Scene::demo();
    let mut run = std_command(scene.root(), &["generate", "--prompt"]);
    let output = run.arg(std::ffi::OsStr::from_bytes(b"\xff")).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("UTF-8") && !said.contains("panicked"), "{said}");
}
