//! `quantkit eval kl` with a baseline in place of the reference.

use std::path::Path;

use quantkit::evaluate::baseline::{Reader, Writer};
use serde_json::Value;

use super::number;
use crate::support::scene::{Scene, copy_folder, text};

/// `model/`, and `w4/` made of it.
fn rounded() -> Scene {
    let scene = Scene::demo();
    copy_folder(&Path::new(env!("CARGO_MANIFEST_DIR")).join("calib/demo/target"), &scene.model());
    scene.run(&["rtn", "model", "--bits", "4", "-o", "w4", "--no-eval"]).ok();
    scene
}

const TEXTS: [&str; 8] = ["--text", "eval.txt", "--text", "other.txt", "--window", "64", "--max-windows", "8"];

#[test]
fn a_baseline_stands_in_for_the_reference() {
    let scene = rounded();
    scene.write("other.txt", text("heldout-science.txt", 0, 6_000));
    let against = |args: &[&str]| scene.run(&[&["eval", "kl", "w4", "--json"], args].concat()).ok();
    let model = against(&[&TEXTS[..], &["--reference", "model", "--save-baseline", "base.qkl"]].concat());
    let model = model.says(&["baseline:", "bytes a prediction", "llama.cpp's file would take"]).json();
    let bytes = scene.read("base.qkl");
    against(&[&TEXTS[..], &["--reference", "model", "--save-baseline", "again.qkl", "--threads", "1"]].concat());
    assert!(bytes == scene.read("again.qkl"), "not the same bytes for another number of threads");
    let ran = against(&["--baseline", "base.qkl"]);
    assert!(!ran.stderr.contains("warning"), "{}", ran.stderr);
    let got = ran.json();

    // 2048 tokens; llama.cpp takes two bytes for each.
    let facts = &got["baseline"];
    assert_eq!((&facts["file"], &facts["bytes"]), (&"base.qkl".into(), &bytes.len().into()));
    assert_eq!((&facts["positions"], &facts["llamacpp_bytes_per_position"]), (&1008.into(), &4104.into()));
    assert!(number(facts, "/bytes_per_position") < 650.0, "{facts}");
    assert!((0.001..0.3).contains(&number(facts, "/mean_tail_mass")), "{facts}");
    assert_eq!(&model["baseline"], facts);
    assert_eq!(got["reference"], "model");

    for (i, name) in ["eval.txt", "other.txt"].into_iter().enumerate() {
        let (one, other) = (&model["corpora"][i], &got["corpora"][i]);
        assert!(one["corpus"] == name && one.get("kl_bound").is_none(), "{one}");
        for key in ["corpus", "convention", "window", "windows", "bos", "text_sha256", "positions", "same_top"] {
            assert_eq!(one[key], other[key], "{key}");
        }
        for (pointer, most) in [("/delta_p/rms", 1e-12), ("/delta_p/p1", 1e-12), ("/perplexity/ratio", 1e-12)] {
            assert!((number(one, pointer) - number(other, pointer)).abs() < most, "{pointer}: {one} {other}");
        }
        let (exact, kl) = (number(one, "/kl/mean"), number(other, "/kl/mean"));
        let [lower, upper, error] =
            ["lower", "upper", "sampling_stderr"].map(|key| number(other, &format!("/kl_bound/{key}")));
        assert!(lower < exact && exact < upper && lower < kl && kl < upper, "{exact} {other}");
        assert!((kl - exact).abs() < 4.0 * error && error < 0.02 * exact, "{exact} {other}");
        assert!(exact - lower < 0.4 * exact, "{exact} {other}");
    }
    let read = Reader::open(&scene.path("base.qkl")).unwrap();
    Writer::new(read.header).write(&scene.path("empty.qkl")).unwrap();
    scene.run(&["eval", "kl", "w4", "--baseline", "empty.qkl"]).ended(2).says(&["empty.qkl", "no texts"]);
    let said = scene.run(&["eval", "kl", "w4", "--baseline", "base.qkl", "--max-windows", "2"]).ok().stdout;
    for words in ["w4 against model", "eval.txt: 126 tokens in 2 windows", "other.txt: 126", "certainly from", "exact"]
    {
        assert!(said.contains(words), "no `{words}` in\n{said}");
    }
    scene
        .run(&["eval", "kl", "w4", "--baseline", "base.qkl", "--max-kl", "1e-6"])
        .ended(1)
        .says(&["on eval.txt the mean", "on other.txt the mean"]);

    // Without texts the two that come with the program.
    let both = scene.run(&["eval", "kl", "model", "--json", "--max-windows", "1", "--window", "32"]).ok().json();
    let names: Vec<&Value> = both["corpora"].as_array().unwrap().iter().map(|on| &on["corpus"]).collect();
    assert_eq!(names, ["heldout", "heldout-science"]);
}

#[test]
fn what_a_baseline_cannot_do() {
    let scene = rounded();
    let texts = &["--text", "eval.txt", "--window", "64", "--max-windows", "2"][..];
    let save = ["--reference", "model", "--save-baseline", "base.qkl"];
    scene.run(&[&["eval", "kl", "model"], texts, &save[..]].concat()).ok();
    scene.refused(&["eval", "kl", "w4", "--baseline", "nowhere"], &["nowhere", "cannot read"]);
    scene.refused(&["eval", "kl", "w4", "--baseline", "eval.txt"], &["eval.txt", "no baseline"]);
    for other in [&["--reference", "model"][..], &texts[..2], &["--bos", "none"], &["--save-baseline", "b"]] {
        let args = [&["eval", "kl", "w4", "--baseline", "base.qkl"], other].concat();
        scene.run(&args).ended(2).says(&[other[0], "cannot be used with"]);
    }
    for target in ["tmp", "no/such/folder"] {
        let args = [&["eval", "kl", "w4", "--reference", "model", "--save-baseline", target], texts].concat();
        scene.refused(&args, &[target, "name a file in a folder that exists"]);
    }
    let whole = scene.read("base.qkl");
    scene.write("base.qkl", &whole[..whole.len() / 2]);
    scene.refused(&["eval", "kl", "w4", "--baseline", "base.qkl"], &["truncated or damaged", "--save-baseline"]);
    scene.write("base.qkl", &whole);
    let tiny = Scene::tiny("llama");
    tiny.write("base.qkl", &whole);
    let words = ["vocabulary of 2048 tokens", "the artifact one of 128"];
    tiny.refused(&["eval", "kl", "model", "--baseline", "base.qkl"], &words);

    // Another tokenizer: told where the text is not known, found where it is.
    let tokenizer = String::from_utf8(scene.read("w4/tokenizer.json")).unwrap();
    scene.write("w4/tokenizer.json", format!("{tokenizer}\n"));
    scene.run(&["eval", "kl", "w4", "--baseline", "base.qkl"]).ok().says(&["warning", "tokenizer.json", "cannot tell"]);
    let save = ["--window", "64", "--max-windows", "1", "--reference", "model", "--save-baseline", "own.qkl"];
    scene.run(&[&["eval", "kl", "model"], &save[..]].concat()).ok();
    let ran = scene.run(&["eval", "kl", "w4", "--baseline", "own.qkl"]).ok();
    assert!(!ran.stderr.contains("warning"), "{}", ran.stderr);
    let mut swapped: Value = serde_json::from_str(&tokenizer).unwrap();
    let vocab = swapped["model"]["vocab"].as_object_mut().unwrap();
    let (e, a) = (vocab["e"].clone(), vocab["a"].clone());
    vocab.insert("e".into(), a);
    vocab.insert("a".into(), e);
    scene.write("w4/tokenizer.json", swapped.to_string());
    let words = ["tokenizer is not the reference's", "`heldout-science`", "copy `tokenizer.json`"];
    scene.refused(&["eval", "kl", "w4", "--baseline", "own.qkl"], &words);
}
