//! `quantkit eval ppl`.

use std::collections::BTreeSet;

use quantkit::format::manifest::sha256_bytes;
use serde_json::Value;

use super::number;
use crate::support::scene::Scene;

fn eval(scene: &Scene, more: &[&str]) -> Value {
    let args = [&["eval", "ppl", "--text", "eval.txt", "--window", "64", "--json"], more].concat();
    scene.run(&args).ok().json()
}

#[test]
fn fields() {
    let scene = Scene::demo();
    let got = eval(&scene, &["--max-windows", "3"]);
    let keys: BTreeSet<&str> = got.as_object().unwrap().keys().map(String::as_str).collect();
    let wanted = [
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
    ];
    assert_eq!(keys, BTreeSet::from(wanted));
    assert_eq!(number(&got, "/perplexity"), number(&got, "/nll").exp());
    assert!(number(&got, "/stderr") > 0.0 && number(&got, "/stderr") < number(&got, "/perplexity"));
    assert_eq!((&got["convention"], &got["window"], &got["windows"]), (&"gptq".into(), &64.into(), &3.into()));
    assert_eq!((&got["tokens"], &got["bos"], &got["device"]), (&189.into(), &"once".into(), &"cpu".into()));
    assert_eq!(got["text_sha256"], sha256_bytes(&scene.read("eval.txt")));
    assert!(number(&got, "/tokens_per_second") > 0.0);
    assert!(number(&got, "/peak_rss_bytes") > 1e6);
    let said = scene.run(&["eval", "ppl", "--text", "eval.txt", "--window", "64", "--max-windows", "3"]).ok().stdout;
    let shown = format!("perplexity {:.4} ± {:.4}", number(&got, "/perplexity"), number(&got, "/stderr"));
    assert!(
        said.starts_with(&shown) && said.contains("189 tokens in 3 windows of 64, convention gptq, BOS once"),
        "{said}"
    );
}

#[test]
fn conventions_and_bos() {
    let scene = Scene::demo();
    let mut seen = Vec::new();
    for (convention, auto, per_window) in [("gptq", "once", 63), ("llamacpp", "window", 31), ("lmeval", "once", 64)] {
        for bos in ["auto", "none", "once", "window"] {
            let got = eval(&scene, &["--convention", convention, "--bos", bos, "--max-windows", "4"]);
            assert_eq!(got["convention"], convention);
            assert_eq!(got["bos"], if bos == "auto" { auto } else { bos });
            assert_eq!(got["tokens"], 4 * per_window, "{convention} {bos}");
            // Bytes are those of the whole text, of which this is a part.
            assert_eq!(got.get("bits_per_byte"), None, "{convention}");
            assert!((10.0..2000.0).contains(&number(&got, "/perplexity")), "{got}");
            let nll = number(&got, "/nll");
            let same: Vec<&(&str, &str, f64)> = seen.iter().filter(|(_, _, other)| *other == nll).collect();
            match bos {
                "auto" => assert_eq!(same.len(), 0, "{convention} {same:?}"),
                // lmeval begins with BOS in any case.
                _ if bos == auto || (convention, bos) == ("lmeval", "none") => {
                    assert!(same.iter().any(|(c, b, _)| (*c, *b) == (convention, "auto")), "{convention} {bos}");
                }
                _ => assert_eq!(same.len(), 0, "{convention} {bos} {same:?}"),
            }
            seen.push((convention, bos, nll));
        }
    }
}

/// The whole text, each token once: words and bytes are counted too.
#[test]
fn whole_texts() {
    let scene = Scene::demo();
    scene.write("eval.txt", "Alice was beginning to get very tired of sitting by her sister.\n");
    let got = eval(&scene, &["--convention", "lmeval"]);
    let total = number(&got, "/nll") * number(&got, "/tokens");
    assert!((number(&got, "/word_perplexity").ln() - total / 12.0).abs() < 1e-9);
    assert!((number(&got, "/byte_perplexity").ln() - total / 64.0).abs() < 1e-9);
    assert!((number(&got, "/bits_per_byte") - total / 64.0 / 2f64.ln()).abs() < 1e-9);
}

#[test]
fn line_ends_do_not_matter() {
    let scene = Scene::demo();
    let text = String::from_utf8(scene.read("eval.txt")).unwrap();
    assert!(text.contains('\n') && !text.contains('\r'));
    let unix = eval(&scene, &["--max-windows", "8"]);
    scene.write("eval.txt", format!("\u{feff}{}", text.replace('\n', "\r\n")));
    let windows = eval(&scene, &["--max-windows", "8"]);
    for key in ["nll", "tokens", "text_sha256"] {
        assert_eq!(windows[key], unix[key], "{key}");
    }
}

#[test]
fn the_window_is_the_context_unless_it_is_named() {
    let scene = Scene::tiny("llama");
    let got = scene.run(&["eval", "ppl", "model", "--text", "eval.txt", "--json"]).ok().json();
    assert_eq!((&got["window"], &got["bos"]), (&64.into(), &"none".into()));
    assert_eq!(got["windows"], 12_000 / 64);
    let once = scene.run(&["eval", "ppl", "model", "--text", "eval.txt", "--bos", "once", "--json"]).ok().json();
    assert_ne!(once["nll"], got["nll"]);
}
