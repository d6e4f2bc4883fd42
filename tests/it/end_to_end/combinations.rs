//! Every scheme and order: what is read back is what the run measured.

use super::number;
use crate::support::scene::{Scene, TINY, tensors, tiny_args};

const ORDERS: [&[&str]; 4] = [
    &["--order", "group-aware"],
    &["--order", "natural"],
    &["--order", "activation"],
    &["--desc-act", "--static-groups"],
];

/// `eval ppl` of the artifact gives to the last bit what the run said.
#[track_caller]
fn reads_back(scene: &Scene, args: &[&str], out: &str) -> f64 {
    let quantize = [&["gptq", "model", "-o", out, "--json"], args, &TINY[..]].concat();
    let result = scene.run(&quantize).ok().json();
    let eval = ["eval", "ppl", out, "--text", "eval.txt", "--max-windows", "2", "--json"];
    let read = scene.run(&eval).ok().json();
    for key in ["perplexity", "nll", "stderr", "tokens", "window", "windows", "bos", "text_sha256"] {
        assert_eq!(read[key], result["perplexity_after"][key], "{args:?} {key}");
    }
    number(&result, "/perplexity_after/nll") - number(&result, "/perplexity_before/nll")
}

fn all_orders(bits: &str) {
    let scene = Scene::tiny("llama");
    for sym in [true, false] {
        for (i, order) in ORDERS.iter().enumerate() {
            let out = format!("out-{sym}-{i}");
            let mut args = [&["--bits", bits], *order].concat();
            if !sym {
                args.push("--asym");
            }
            let damage = reads_back(&scene, &args, &out);
            let most =
                [("2", 3.0), ("3", 1.0), ("4", 0.5), ("8", 0.02)].into_iter().find(|(b, _)| *b == bits).unwrap().1;
            assert!(damage.abs() < most, "{args:?} changes the nll by {damage}");

            let config = scene.json(&format!("{out}/quantize_config.json"));
            assert_eq!(config["bits"].to_string(), bits);
            assert_eq!(config["sym"], sym);
            assert_eq!(config["checkpoint_format"], if sym { "gptq" } else { "gptq_v2" });
            assert_eq!(config["meta"]["static_groups"], i == 3);
            let found = tensors(&scene.path(&format!("{out}/model.safetensors")));
            let g_idx = &found["model.layers.0.mlp.down_proj.g_idx"].data;
            let in_order = g_idx.chunks(4).enumerate().all(|(k, g)| g == ((k / 32) as u32).to_le_bytes());
            assert_eq!(in_order, i != 2, "{args:?}");
            assert_eq!(config["desc_act"], i == 2, "{args:?}");
        }
    }
}

#[test]
fn two_bits() {
    all_orders("2");
}

#[test]
fn three_bits() {
    all_orders("3");
}

#[test]
fn four_bits() {
    all_orders("4");
}

#[test]
fn eight_bits() {
    all_orders("8");
}

#[test]
fn families() {
    for family in ["llama3", "llama_linear", "llama_yarn", "mistral", "qwen2", "gemma3_text"] {
        let damage = reads_back(&Scene::tiny(family), &[], "out");
        assert!(damage.abs() < 0.5, "{family}: {damage}");
    }
    // 72 input channels: group sizes that are powers of two do not fit.
    let scene = Scene::tiny("smollm2");
    let args = [
        "gptq",
        "model",
        "-o",
        "out",
        "--group-size",
        "24",
        "--calib",
        "calib.txt",
        "--nsamples",
        "4",
        "--seqlen",
        "32",
        "--no-eval",
    ];
    scene.run(&args).ok().says(&["would not be loaded by", "group size 24"]);
}

#[test]
fn other_settings() {
    let scene = Scene::tiny("llama");
    for (i, args) in [
        &["--grid", "max-abs"][..],
        &["--grid", "mse", "--sweeps", "0"],
        &["--sweeps", "3"],
        &["--no-true-sequential"],
        &["--drift-correction"],
        &["--damp-percent", "0.2"],
        &["--sampling", "random", "--seed", "7"],
        &["--bos", "window"],
    ]
    .iter()
    .enumerate()
    {
        if args[0] == "--bos" {
            // `eval ppl` would need the same option.
            let args = [&["gptq", "model", "-o", "bos", "--no-eval"], *args].concat();
            scene.run(&tiny_args(&args)).ok().says(&["(BOS window)"]);
        } else {
            reads_back(&scene, args, &format!("out{i}"));
        }
    }
    // Each of them changes what is written.
    let mut weights: Vec<Vec<u8>> = (0..7).map(|i| scene.read(&format!("out{i}/model.safetensors"))).collect();
    weights.push(scene.read("bos/model.safetensors"));
    reads_back(&scene, &[], "plain");
    weights.push(scene.read("plain/model.safetensors"));
    for i in 0..weights.len() {
        assert!(!weights[..i].contains(&weights[i]), "setting {i} changes nothing");
    }
}

#[test]
fn one_scale_per_channel() {
    let scene = Scene::tiny("llama");
    let args = ["gptq", "model", "-o", "out", "--group-size", "-1"];
    let ran = scene.run(&[&args, &TINY[2..]].concat()).ok();
    assert!(ran.stdout.contains("perplexity"), "{}", ran.stdout);
    assert_eq!(tensors(&scene.path("out/model.safetensors"))["model.layers.0.mlp.down_proj.scales"].shape, [1, 64]);
    assert_eq!(scene.json("out/quantize_config.json")["group_size"], -1);
}

/// Zero points are stored one lower in `gptq`; the model is the same.
#[test]
fn both_zero_point_versions() {
    for more in [&[][..], &["--asym"]] {
        let scene = Scene::tiny("llama");
        for version in ["gptq", "gptq_v2"] {
            reads_back(&scene, &[&["--checkpoint-format", version], more].concat(), version);
            assert_eq!(scene.json(&format!("{version}/quantize_config.json"))["checkpoint_format"], version);
        }
        let (old, new) =
            (tensors(&scene.path("gptq/model.safetensors")), tensors(&scene.path("gptq_v2/model.safetensors")));
        for (name, tensor) in &old {
            assert_eq!(*tensor == new[name], !name.ends_with(".qzeros"), "{name}");
        }
        let nibble = |t: &crate::support::scene::Stored| t.data[0] & 15;
        let name = "model.layers.0.mlp.up_proj.qzeros";
        assert_eq!((nibble(&old[name]) + 1) % 16, nibble(&new[name]));
    }
}
