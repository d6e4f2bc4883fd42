//! AWQ, SmoothQuant and FP8: what is read back is what the run measured, in every form and family.

use super::number;
use crate::support::scene::{Scene, tensors};

/// Calibration and evaluation of the tiny models.
const TEXTS: [&str; 4] = ["--eval-text", "eval.txt", "--eval-windows", "2"];
const CALIBRATION: [&str; 6] = ["--calib", "calib.txt", "--nsamples", "4", "--seqlen", "32"];

/// Runs a method; `eval ppl` of the artifact must give to the last bit what the run said. Gives the result.
#[track_caller]
fn made(scene: &Scene, args: &[&str], out: &str) -> serde_json::Value {
    let seen = ["--static-activations", "--kv-cache", "--rounding"].iter().any(|option| args.contains(option));
    let calibration = if args[0] == "fp8" && !seen { &[][..] } else { &CALIBRATION[..] };
    let all = [&args[..1], &["model", "-o", out, "--json"], &args[1..], &TEXTS[..], calibration].concat();
    let result = scene.run(&all).ok().json();
    let eval = ["eval", "ppl", out, "--text", "eval.txt", "--max-windows", "2", "--json"];
    let read = scene.run(&eval).ok().json();
    for key in ["perplexity", "nll", "tokens", "bos", "text_sha256"] {
        assert_eq!(read[key], result["perplexity_after"][key], "{args:?} {key}");
    }
    result
}

#[track_caller]
fn damage(result: &serde_json::Value) -> f64 {
    number(result, "/perplexity_after/nll") - number(result, "/perplexity_before/nll")
}

#[test]
fn awq_in_every_form() {
    let scene = Scene::tiny("llama");
    for (i, format) in ["awq", "gptq", "compressed-tensors"].into_iter().enumerate() {
        for (j, more) in [&[][..], &["--sym"], &["--rounding", "gptq"], &["--no-duo-scaling", "--grouped-values"]]
            .into_iter()
            .enumerate()
        {
            let out = format!("out-{i}-{j}");
            let args = [&["awq", "--format", format, "--group-size", "32", "--search-tokens", "64"], more].concat();
            let result = made(&scene, &args, &out);
            assert!(damage(&result).abs() < 0.5, "{args:?}: {}", damage(&result));
            assert!(number(&result, "/perplexity_rtn/nll") > 0.0 && result["loses_to_rtn"].is_boolean());
            let config = scene.json(&format!("{out}/config.json"));
            let wanted = if format == "gptq" { "gptq" } else { format };
            assert_eq!(config["quantization_config"]["quant_method"], wanted);
            // The norms have taken the scales over.
            let norm = "model.layers.0.input_layernorm.weight";
            let (before, after) = (
                tensors(&scene.path("model/model.safetensors")),
                tensors(&scene.path(&format!("{out}/model.safetensors"))),
            );
            assert_eq!(before[norm].dtype, after[norm].dtype);
            assert!(result["scaled"].as_array().unwrap().iter().all(|block| number(block, "/error_ratio") <= 1.0));
        }
    }
}

#[test]
fn all_families_are_scaled() {
    for family in ["llama3", "mistral", "qwen2", "qwen3", "gemma3_text", "smollm2"] {
        let scene = Scene::tiny(family);
        let awq = made(&scene, &["awq", "--group-size", "32", "--search-tokens", "64", "--on-misfit", "skip"], "awq");
        let smooth = made(&scene, &["smoothquant", "--search-tokens", "64"], "int8");
        let fp8 = made(&scene, &["fp8"], "fp8");
        for (result, most) in [(awq, 0.5), (smooth, 0.05), (fp8, 0.1)] {
            assert!(damage(&result).abs() < most, "{family}: {}", damage(&result));
        }
    }
}

#[test]
fn smoothquant_with_its_options() {
    let scene = Scene::tiny("qwen2");
    let options: [&[&str]; 4] = [
        &["--alpha", "0.5"],
        &["--alpha", "0.8", "--rounding", "rtn"],
        &["--static-activations"],
        &["--skip", "down_proj"],
    ];
    for (i, more) in options.into_iter().enumerate() {
        let out = format!("out-{i}");
        let args = [&["smoothquant", "--search-tokens", "64"], more].concat();
        let result = made(&scene, &args, &out);
        assert!(damage(&result).abs() < 0.1, "{args:?}: {}", damage(&result));
        let found = tensors(&scene.path(&format!("{out}/model.safetensors")));
        let down = &found["model.layers.0.mlp.down_proj.weight"];
        let skipped = more.contains(&"--skip");
        assert_eq!(down.dtype == safetensors::Dtype::I8, !skipped);
        assert_eq!(
            found.contains_key("model.layers.0.mlp.up_proj.input_scale"),
            more.contains(&"--static-activations")
        );
        let outliers = result["outliers"].as_array().unwrap();
        assert_eq!(outliers.is_empty(), skipped);
        // A strength that was given was not measured.
        let scaled = &result["scaled"][0];
        assert_eq!(scaled["error_ratio"].is_number(), !more.contains(&"--alpha"), "{scaled}");
        let modules = &scene.json(&format!("{out}/quantkit.json"))["modules"];
        let lists = |key: &str, name: &str| modules[key].as_array().unwrap().contains(&name.into());
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            let name = format!("model.layers.0.{norm}.weight");
            assert!(lists("folded_tensors", &name) && !lists("copied_tensors", &name), "{modules}");
        }
        assert!(lists("copied_tensors", "model.embed_tokens.weight"));
    }
}

#[test]
fn fp8_with_its_options() {
    let scene = Scene::tiny("llama");
    let options: [&[&str]; 7] = [
        &["--rounding", "gptq"],
        &["--rounding", "gptq", "--weights", "tensor"],
        &["--weights", "tensor"],
        &["--weights", "channel", "--format", "compressed-tensors"],
        &["--weights", "block", "--format", "fp8"],
        &["--weights", "tensor", "--static-activations"],
        &["--weights", "tensor", "--static-activations", "--format", "fp8"],
    ];
    for (i, more) in options.into_iter().enumerate() {
        let out = format!("out-{i}");
        let result = made(&scene, &[&["fp8"], more].concat(), &out);
        assert!(damage(&result).abs() < 0.1, "{more:?}: {}", damage(&result));
        let found = tensors(&scene.path(&format!("{out}/model.safetensors")));
        let scale = |module: &str| {
            let names = ["weight_scale", "weight_scale_inv"].map(|name| format!("model.layers.0.{module}.{name}"));
            names.iter().find_map(|name| found.get(name)).unwrap().data.clone()
        };
        if more.contains(&"tensor") {
            assert_eq!(scale("self_attn.q_proj"), scale("self_attn.v_proj"), "joined linears share their scale");
            assert_eq!(scale("mlp.gate_proj"), scale("mlp.up_proj"));
            assert_ne!(scale("mlp.gate_proj"), scale("mlp.down_proj"));
        }
    }
    scene.refused(&["fp8", "model", "--static-activations"], &["--weights tensor"]);
    scene.refused(&["fp8", "model", "--format", "fp8", "--weights", "channel"], &["--weights tensor"]);
    scene.refused(&["fp8", "model", "--weights", "block", "--rounding", "gptq"], &["blocks of 128", "--skip"]);
    made(&scene, &["fp8", "--format", "fp8"], "blocks");
    assert_eq!(
        scene.json("blocks/config.json")["quantization_config"]["weight_block_size"],
        serde_json::json!([128, 128])
    );
    scene.refused(&["fp8", "model", "--nsamples", "4"], &["--nsamples is for calibration"]);
}

#[test]
fn cache_scales_come_with_any_method() {
    let scene = Scene::tiny("llama");
    let commands: [&[&str]; 4] = [
        &["gptq", "--group-size", "32", "--format", "compressed-tensors"],
        &["rtn", "--group-size", "32", "--format", "compressed-tensors"],
        &["smoothquant", "--alpha", "0.5"],
        &["fp8"],
    ];
    for (i, command) in commands.into_iter().enumerate() {
        for (kind, shape) in [("fp8", vec![1]), ("fp8-per-head", vec![2, 1, 1])] {
            let out = format!("out-{i}-{kind}");
            made(&scene, &[command, &["--kv-cache", kind]].concat(), &out);
            let found = tensors(&scene.path(&format!("{out}/model.safetensors")));
            for name in ["k_scale", "v_scale"] {
                let scale = &found[&format!("model.layers.1.self_attn.{name}")];
                assert_eq!(scale.shape, shape, "{out}");
                assert!(scale.data.chunks(4).all(|b| f32::from_le_bytes(b.try_into().unwrap()) > 0.0));
            }
            let config = scene.json(&format!("{out}/config.json"));
            let strategy = if kind == "fp8" { "tensor" } else { "attn_head" };
            assert_eq!(config["quantization_config"]["kv_cache_scheme"]["strategy"], strategy);
        }
    }
    scene.refused(&["gptq", "model", "--kv-cache", "fp8"], &["--format compressed-tensors"]);
    let heads = ["fp8", "model", "--kv-cache", "fp8-per-head"];
    scene.refused(&[&heads[..], &["--format", "fp8"]].concat(), &["no place", "compressed-tensors"]);
    scene.refused(&[&heads[..], &["--for", "vllm-0.10"]].concat(), &["cache scales of each head"]);
}

/// Any number of threads, and any interruption, gives the same bytes.
#[test]
fn bytes_do_not_depend_on_threads() {
    let scene = Scene::tiny("smollm2");
    for (name, args) in [
        ("awq", vec!["awq", "model", "--group-size", "32", "--search-tokens", "64", "--on-misfit", "skip"]),
        ("smooth", vec!["smoothquant", "model", "--search-tokens", "64", "--kv-cache", "fp8"]),
    ] {
        let run = |threads: &'static str, out: &str| {
            let more = ["-o", out, "--no-eval", "--threads", threads];
            scene.run(&[&args[..], &more, &CALIBRATION].concat()).ok();
        };
        let (one, three) = (format!("{name}-1"), format!("{name}-3"));
        run("1", &one);
        run("3", &three);
        for file in ["model.safetensors", "config.json", "quantkit.json"] {
            let read = |out: &str| std::fs::read(scene.path(&format!("{out}/{file}"))).unwrap();
            assert_eq!(read(&one), read(&three), "{name} {file}");
        }
    }
}
