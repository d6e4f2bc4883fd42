//! Overrides and exclusions, written and read back.

use quantkit::checkpoint::Checkpoint;
use quantkit::format;
use quantkit::format::config::find;
use quantkit::format::gptq::GptqSource;
use serde_json::json;

use super::number;
use crate::support::scene::{Scene, tensors};

#[test]
fn overrides_and_exclusions() {
    let scene = Scene::tiny("llama");
    let args = [
        "gptq",
        "model",
        "-o",
        "out",
        "--json",
        "--rule",
        "down_proj=bits:8,group_size:16",
        "--rule",
        "q_proj=sym:false",
        "--skip",
        r"layers\.0\.",
    ];
    let result = scene.tiny_run(&args).ok().json();
    // One asymmetric module is enough for `gptq_v2`.
    assert_eq!(scene.json("out/quantize_config.json")["checkpoint_format"], "gptq_v2");
    // The first match wins: rules come before exclusions, so block 0 keeps its q_proj and down_proj.
    assert_eq!(result["quantized_modules"], 9);

    let config = scene.json("out/config.json");
    let dynamic = config["quantization_config"]["dynamic"].as_object().unwrap();
    let with = |value: serde_json::Value| {
        dynamic.iter().filter(|(_, v)| **v == value).map(|(k, _)| k.as_str()).collect::<Vec<_>>()
    };
    let down = with(json!({"bits": 8, "group_size": 16, "sym": true}));
    let q = with(json!({"bits": 4, "group_size": 32, "sym": false}));
    let skipped = with(json!({}));
    assert!(!down.is_empty() && down.iter().all(|k| k.starts_with("+:") && k.contains("down_proj")), "{dynamic:?}");
    assert!(!q.is_empty() && q.iter().all(|k| k.starts_with("+:") && k.contains("q_proj")), "{dynamic:?}");
    assert!(!skipped.is_empty() && skipped.iter().all(|k| k.starts_with("-:")), "{dynamic:?}");

    let checkpoint = Checkpoint::open(&scene.path("out")).unwrap();
    let found = find(&checkpoint).unwrap().unwrap();
    let source = GptqSource::open(checkpoint, &found).unwrap();
    assert_eq!(source.warnings(), [""; 0]);
    let scheme = |module: &str| source.modules()[module].scheme;
    for layer in 0..2 {
        let down = scheme(&format!("model.layers.{layer}.mlp.down_proj"));
        assert_eq!((down.bits, down.group_size.raw(), down.sym), (8, 16, true));
        let q = scheme(&format!("model.layers.{layer}.self_attn.q_proj"));
        assert_eq!((q.bits, q.group_size.raw(), q.sym), (4, 32, false));
    }
    let up = scheme("model.layers.1.mlp.up_proj");
    assert_eq!((up.bits, up.group_size.raw(), up.sym), (4, 32, true));
    assert_eq!(source.modules().len(), 9);

    let (written, original) =
        (tensors(&scene.path("out/model.safetensors")), tensors(&scene.path("model/model.safetensors")));
    for module in ["self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj"] {
        let name = format!("model.layers.0.{module}.weight");
        assert_eq!(written[&name], original[&name]);
    }
    let eval = ["eval", "ppl", "out", "--text", "eval.txt", "--max-windows", "2", "--json"];
    assert_eq!(scene.run(&eval).ok().json()["nll"], result["perplexity_after"]["nll"]);
}

/// More bits where it hurts help; a block left alone is left alone.
#[test]
fn rules_change_the_result_as_they_should() {
    let scene = Scene::tiny("llama");
    let loss = |out: &str, more: &[&str]| {
        let args = [&["gptq", "model", "-o", out, "--json", "--no-eval"], more].concat();
        number(&scene.tiny_run(&args).ok().json(), "/loss")
    };
    let (plain, eight, skipped) =
        (loss("plain", &[]), loss("eight", &["--rule", ".=bits:8"]), loss("skipped", &["--skip", "layers.1"]));
    assert!(eight < plain / 50.0, "{eight} {plain}");
    assert!(skipped < plain, "{skipped} {plain}");
    assert_eq!(scene.json("eight/quantkit.json")["options"]["rules"], json!([".=bits:8"]));
    assert_eq!(scene.json("skipped/quantkit.json")["options"]["skips"], json!(["layers.1"]));
    let floats = &scene.json("skipped/quantkit.json")["modules"]["floating_point"];
    assert_eq!(floats.as_array().unwrap().len(), 7);
    let opened = format::open(Checkpoint::open(&scene.path("skipped")).unwrap()).unwrap();
    assert_eq!((opened.method, opened.warnings), (Some("gptq"), vec![]));
}
