//! Weights and activations that are no proper numbers, or too few of them.

use half::f16;

use super::gptq;
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
