//! Folders and files of other programs: every command names them for what they are, and says what to do.

use std::fs;

use safetensors::Dtype;
use serde_json::json;

use crate::support::scene::{Scene, Stored};

/// Every command that takes a model refuses it alike.
#[track_caller]
fn refused_everywhere(scene: &Scene, model: &str, words: &[&str]) {
    for args in [
        &["eval", "ppl", model, "--text", "eval.txt"][..],
        &["eval", "kl", model, "--reference", model, "--text", "eval.txt"],
        &["eval", "kv", model, "--text", "eval.txt"],
        &["eval", "spec", model, "--draft", model, "--text", "eval.txt"],
        &["generate", model, "--prompt", "a"],
        &["gptq", model, "-o", "out"],
        &["rtn", model, "-o", "out"],
        &["awq", model, "-o", "out"],
        &["smoothquant", model, "-o", "out"],
        &["fp8", model, "-o", "out"],
        &["gguf", model, "-o", "out.gguf"],
        &["imatrix", model, "-o", "out.gguf"],
        &["plan", model],
        &["validate", model, "--text", "eval.txt"],
    ] {
        scene.refused(args, words);
    }
}

/// Makes an MLX folder of the model: words of U32 for every linear and the embedding, with scales and biases.
fn mlx(scene: &Scene) {
    scene.edit_weights(|tensors| {
        let linears: Vec<String> =
            tensors.keys().filter(|name| name.contains("proj") || name.contains("embed")).cloned().collect();
        for name in linears {
            let [rows, cols] = tensors[&name].shape[..] else { continue };
            let module = name.strip_suffix(".weight").unwrap().to_string();
            let stored = |dtype: Dtype, cols: usize, size: usize| Stored {
                dtype,
                shape: vec![rows, cols],
                data: vec![0; rows * cols * size],
            };
            tensors.insert(name, stored(Dtype::U32, cols / 8, 4));
            tensors.insert(format!("{module}.scales"), stored(Dtype::F16, cols / 32, 2));
            tensors.insert(format!("{module}.biases"), stored(Dtype::F16, cols / 32, 2));
        }
    });
    scene.edit_json("model/config.json", |config| {
        config["quantization"] = json!({"group_size": 32, "bits": 4});
        config["quantization_config"] = json!({"group_size": 32, "bits": 4});
    });
}

#[test]
fn mlx_folders() {
    let scene = Scene::tiny("llama");
    mlx(&scene);
    let name = "`model` is MLX 4-bit, group_size 32: quantkit does not read this";
    refused_everywhere(&scene, "model", &[name, "mlx_lm.convert --dequantize"]);
    let found = scene.run(&["inspect", "model", "--json"]).ok().json();
    assert_eq!((&found["method"], &found["bits"], &found["group_size"]), (&json!("mlx"), &json!(4), &json!(32)));
    assert_eq!((&found["runs"], &found["damage"]), (&json!(false), &json!([])));
    assert_eq!(found["architecture"]["family"], "Llama 1, 2, 3; SmolLM2");
    assert!(found["warnings"].to_string().contains(name), "{}", found["warnings"]);
    assert!(found["tensors"].as_array().unwrap().iter().any(|t| t["type"] == "U32"));
    // Modules otherwise, and another mode.
    scene.edit_json("model/config.json", |config| {
        config["quantization"] = json!({"group_size": 32, "bits": 4, "mode": "mxfp4", "lm_head": {"bits": 8}});
    });
    scene.refused(&["plan", "model"], &["MLX 4-bit, group_size 32, mxfp4, 1 modules otherwise"]);
    // Where the config says nothing, tensors do.
    scene.edit_json("model/config.json", |config| {
        config.as_object_mut().unwrap().retain(|key, _| !key.starts_with("quantization"));
    });
    scene.refused(&["eval", "ppl", "model", "--text", "eval.txt"], &["`model` is MLX, quantized"]);
    scene.run(&["inspect", "model"]).ok().says(&["`model` is MLX, quantized"]);
}

#[test]
fn forms_of_known_methods() {
    let scene = Scene::tiny("llama");
    let float4 = json!({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16});
    scene.edit_json("model/config.json", |config| {
        config["quantization_config"] = json!({
            "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": float4, "input_activations": float4}},
        });
    });
    let words = ["`compressed-tensors` in a form that quantkit does not read", "`nvfp4-pack-quantized` (NVFP4"];
    refused_everywhere(&scene, "model", &words);
    let found = scene.run(&["inspect", "model", "--json"]).ok().says(&words).json();
    assert_eq!((&found["bits"], &found["variant"]), (&json!(4), &json!("nvfp4-pack-quantized")));
    assert_eq!((&found["runs"], &found["damage"]), (&json!(false), &json!([])));

    scene.edit_json("model/config.json", |config| config["quantization_config"] = json!(null));
    let beside = json!({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}});
    scene.write("model/hf_quant_config.json", beside.to_string());
    let words = ["`modelopt` in a form that quantkit does not read", "`quant_algo` is NVFP4"];
    refused_everywhere(&scene, "model", &words);
    let found = scene.run(&["inspect", "model", "--json"]).ok().says(&words).json();
    assert_eq!((&found["method"], &found["variant"]), (&json!("modelopt"), &json!("NVFP4")));
}

#[test]
fn adapters() {
    let scene = Scene::tiny("llama");
    fs::create_dir(scene.path("lora")).unwrap();
    scene.write("lora/adapter_model.safetensors", b"");
    let config = json!({"peft_type": "LORA", "r": 16, "base_model_name_or_path": "org/base"});
    scene.write("lora/adapter_config.json", config.to_string());
    let words =
        ["`lora` is a LoRA adapter of rank 16 for `org/base`: quantkit does not read this", "`merge_and_unload`"];
    refused_everywhere(&scene, "lora", &words);
    scene.refused(&["inspect", "lora"], &words);
    scene.refused(&["inspect", "lora/adapter_model.safetensors"], &["is a LoRA adapter"]);
    // Beside the weights of a model it would be added to them.
    scene.write("model/adapter_model.bin", b"");
    scene.write("model/adapter_config.json", r#"{"peft_type": "IA3"}"#);
    let words = ["an adapter of the type IA3 beside the weights of a model (`model.safetensors`)", "move `adapter*`"];
    scene.refused(&["inspect", "model"], &words);
    // Its config alone, left over from merging, is no adapter.
    fs::remove_file(scene.path("model/adapter_model.bin")).unwrap();
    scene.run(&["inspect", "model"]).ok();
}

#[test]
fn other_layouts() {
    let scene = Scene::tiny("llama");
    let folder = |name: &str, files: &[(&str, &[u8])]| {
        fs::create_dir(scene.path(name)).unwrap();
        files.iter().for_each(|(file, bytes)| scene.write(&format!("{name}/{file}"), bytes));
    };
    let params = br#"{"dim": 4096, "n_layers": 32}"#;
    folder("mistral", &[("params.json", params), ("consolidated.safetensors", b""), ("tekken.json", b"{}")]);
    folder("meta", &[("params.json", params), ("consolidated.00.pth", b""), ("tokenizer.model", b"")]);
    folder("onnx", &[("config.json", b"{}"), ("model.onnx", b"")]);
    folder("pickled", &[("config.json", b"{}"), ("pytorch_model-00001-of-00002.bin", b""), ("model.onnx", b"")]);
    folder("checkpoint", &[("weights.pth", b"")]);
    folder("ggufs", &[("config.json", b"{}"), ("x-Q4_0.gguf", b"GGUF"), ("x-Q8_0.gguf", b"GGUF")]);
    folder("keras", &[("config.json", b"{}"), ("tf_model.h5", b"")]);
    folder("engine", &[("config.json", b"{}"), ("rank0.engine", b"")]);
    folder("pipeline", &[("model_index.json", b"{}")]);
    for (name, words) in [
        (
            "mistral",
            &["Mistral's original layout (`consolidated.safetensors`, 32 layers of width 4096)", "convert_mistral"][..],
        ),
        ("meta", &["Meta's original Llama layout (`consolidated.00.pth`", "convert_llama"]),
        ("onnx", &["a folder of ONNX graphs (`model.onnx`)", "exported from"]),
        ("pickled", &["a folder of pickled PyTorch weights (`pytorch_model-00001-of-00002.bin`)", "`save_pretrained`"]),
        ("checkpoint", &["a folder of pickled PyTorch weights (`weights.pth`)"]),
        ("ggufs", &["a folder of GGUF files (`x-Q4_0.gguf`)", "give one of them: `ggufs/x-Q4_0.gguf`"]),
        ("keras", &["a model of TensorFlow or Flax (`tf_model.h5`)"]),
        ("engine", &["a model for TensorRT-LLM (`rank0.engine`)"]),
        ("pipeline", &["a pipeline of diffusers"]),
    ] {
        let start = format!("`{name}` is ");
        let words = [&[&start, ": quantkit does not read this; "], words].concat();
        scene.refused(&["eval", "ppl", name, "--text", "eval.txt"], &words);
        scene.refused(&["inspect", name], &words);
        scene.refused(&["plan", name], &words);
    }
    refused_everywhere(&scene, "mistral", &["Mistral's original layout"]);
    // A folder in both layouts is read in Hugging Face's.
    scene.write("model/params.json", params);
    scene.write("model/consolidated.safetensors", b"");
    scene.run(&["inspect", "model"]).ok();
}

#[test]
fn files() {
    let scene = Scene::tiny("llama");
    scene.write("model.onnx", b"\x08\x07");
    scene.write("model.pth", b"PK\x03\x04");
    scene.write("old.bin2", b"tjgg....");
    scene.write("model-q4", b"GGUF\x03\0\0\0");
    for (name, words) in [
        ("model.onnx", &["an ONNX graph", "exported from"][..]),
        ("model.pth", &["a file of pickled PyTorch weights"]),
        ("old.bin2", &["a GGML file, a format from before GGUF", "llama.cpp"]),
        ("model-q4", &["a GGUF file whose name does not end in `.gguf`"]),
        ("model/model.safetensors", &["a safetensors file by itself", "give its folder, `model`"]),
    ] {
        for args in [&["eval", "ppl", name, "--text", "eval.txt"][..], &["inspect", name], &["convert", name]] {
            scene.refused(args, words);
        }
    }
}
