//! Folders of other programs: ModelOpt's FP8 is read, other forms are named for what they are.

use std::fs;

use quantkit::backend::weight::{Inputs, Weight};
use quantkit::checkpoint::Checkpoint;
use quantkit::format::{self, FormatError, Opened, pretty};
use quantkit::tensor::Dtype;
use serde_json::{Value, json};

use super::folder::{Folder, UP, inputs};

/// As `export_hf_checkpoint` of ModelOpt 0.29 writes it beside the weights.
fn modelopt(algorithm: Value, cache: Value) -> Value {
    json!({
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "quantization": {
            "quant_algo": algorithm, "kv_cache_quant_algo": cache, "exclude_modules": ["lm_head", "model.embed*"],
        },
    })
}

/// The same as newer versions repeat it in `config.json`.
fn inside(algorithm: &str) -> Value {
    let eight = json!({"dynamic": false, "num_bits": 8, "type": "float"});
    json!({
        "config_groups": {"group_0": {"input_activations": eight, "weights": eight, "targets": ["Linear"]}},
        "ignore": ["lm_head"], "quant_algo": algorithm, "producer": {"name": "modelopt", "version": "0.33.0"},
        "quant_method": "modelopt",
    })
}

fn opened(folder: &Folder, beside: Option<&Value>) -> Result<Opened, FormatError> {
    let dir = tempfile::tempdir().unwrap();
    folder.write(dir.path());
    if let Some(beside) = beside {
        fs::write(dir.path().join("hf_quant_config.json"), pretty(beside)).unwrap();
    }
    format::open(Checkpoint::open(dir.path()).unwrap())
}

#[test]
fn modelopt_fp8_is_read() {
    let mut folder = Folder::bare(Value::Null);
    folder.set("weight", Dtype::F8E4M3, &[2, 3], vec![0x38, 0xB8, 0x40, 0, 0x7E, 0x01]);
    folder.set("weight_scale", Dtype::F32, &[], 2f32.to_le_bytes().to_vec());
    folder.set("input_scale", Dtype::F32, &[], 0.25f32.to_le_bytes().to_vec());
    let beside = modelopt(json!("FP8"), json!("FP8"));
    let mut both = Folder { config: json!({"quantization_config": inside("FP8")}), tensors: folder.tensors.clone() };
    for (folder, beside) in [(&folder, Some(&beside)), (&both, Some(&beside)), (&both, None)] {
        let opened = opened(folder, beside).unwrap();
        assert_eq!((opened.method, opened.warnings.len()), (Some("modelopt"), 0));
        let weight = opened.source.linear(UP, 2, 3).unwrap();
        assert_eq!(weight.to_f32(), [2., -2., 4., 0., 896., 2. / 512.]);
        assert_eq!(inputs(&weight), Inputs::Tensor { scale: 0.25, zero: 0 });
    }
    let error = opened(&both, Some(&modelopt(json!("NVFP4"), Value::Null))).err().unwrap().to_string();
    assert!(error.contains("it says `FP8`, but `hf_quant_config.json` says `NVFP4`"), "{error}");
    // A scale a channel, inputs with a scale a token.
    both.config = json!({"quantization_config": inside("FP8_PER_CHANNEL_PER_TOKEN")});
    both.set("weight_scale", Dtype::F32, &[2], [2f32, 4.0].iter().flat_map(|s| s.to_le_bytes()).collect());
    let weight = opened(&both, None).unwrap().source.linear(UP, 2, 3).unwrap();
    assert_eq!((weight.to_f32(), inputs(&weight)), (vec![2., -2., 4., 0., 1792., 4. / 512.], Inputs::Token));
    assert!(matches!(weight, Weight::Fp8(weight) if weight.tile == (1, 3)));
    // Only the cache is quantized.
    let plain = Folder::bare(Value::Null);
    let found = opened(&plain, Some(&modelopt(Value::Null, json!("FP8")))).unwrap();
    assert_eq!((found.method, found.source.linear("lm_head", 2, 2).unwrap().to_f32()), (None, vec![1., 2., 3., 4.]));
}

#[test]
fn other_algorithms_of_modelopt_are_named() {
    let mut folder = Folder::bare(Value::Null);
    folder.set("weight", Dtype::U8, &[16, 8], vec![0; 128]);
    folder.set("weight_scale", Dtype::F8E4M3, &[16, 1], vec![0x38; 16]);
    folder.set("weight_scale_2", Dtype::F32, &[], 1f32.to_le_bytes().to_vec());
    folder.set("input_scale", Dtype::F32, &[], 1f32.to_le_bytes().to_vec());
    let mut mixed = modelopt(json!("MIXED_PRECISION"), Value::Null);
    mixed["quantization"]["quantized_layers"] = json!({"a": {"quant_algo": "NVFP4"}, "b": {"quant_algo": "FP8"}});
    for (beside, part) in [
        (modelopt(json!("NVFP4"), json!("FP8")), "`quant_algo` is NVFP4"),
        (modelopt(json!("W4A16_AWQ"), Value::Null), "`quant_algo` is W4A16_AWQ"),
        (modelopt(json!("FP8"), json!("NVFP4")), "a cache in \"NVFP4\""),
        (mixed, "MIXED_PRECISION, of FP8 and NVFP4"),
        (modelopt(json!("FP8"), json!({"num_bits": 8, "type": "int"})), "a cache in {"),
    ] {
        let error = opened(&folder, Some(&beside)).err().unwrap();
        assert!(error.is_unread() && error.to_string().contains(part), "{error}");
        assert!(error.to_string().contains("`modelopt` in a form that quantkit does not read"), "{error}");
    }
    folder.config = json!({"quantization_config": inside("NVFP4")});
    assert!(folder.damage().contains("`quant_algo` is NVFP4"));
}

#[test]
fn settings_of_modelopt_are_read_strictly() {
    let mut folder = Folder::bare(Value::Null);
    folder.set("weight", Dtype::F8E4M3, &[2, 3], vec![0x38; 6]);
    folder.set("weight_scale", Dtype::F32, &[], 2f32.to_le_bytes().to_vec());
    let mut names = modelopt(json!("FP8"), Value::Null);
    names["quantization"]["exclude_modules"] = json!("lm_head");
    for (beside, part) in [
        (modelopt(json!(["FP8"]), Value::Null), "`quant_algo` is [\"FP8\"]; a text is needed"),
        (names, "`exclude_modules` is \"lm_head\"; a list of names is needed"),
    ] {
        let error = opened(&folder, Some(&beside)).err().unwrap();
        assert!(!error.is_unread() && error.to_string().contains(part), "{error}");
    }
}

/// Every format and strategy of compressed-tensors 0.20 that is not read: never called damaged.
#[test]
fn forms_of_compressed_tensors_are_named() {
    let whole = |format: &str, weights: Value, inputs: Value| {
        json!({
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
            "format": format, "ignore": ["lm_head"], "quant_method": "compressed-tensors",
        })
    };
    let float4 =
        json!({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": false});
    let int4 = json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128});
    let int8 = json!({"num_bits": 8, "type": "int", "strategy": "token", "dynamic": true});
    let block = json!({"num_bits": 8, "type": "int", "strategy": "block", "block_structure": [128, 128]});
    let mut folder = Folder::bare(Value::Null);
    folder.set("weight_packed", Dtype::U8, &[16, 8], vec![0; 128]);
    folder.set("weight_scale", Dtype::F8E4M3, &[16, 1], vec![0x38; 16]);
    folder.set("weight_global_scale", Dtype::F32, &[1], 1f32.to_le_bytes().to_vec());
    folder.set("input_global_scale", Dtype::F32, &[1], 1f32.to_le_bytes().to_vec());
    folder.set("meta", Dtype::I16, &[4], vec![0; 8]);
    let mut named = |quantization: Value, part: &str| {
        folder.config = json!({"quantization_config": quantization});
        let error = folder.open().err().unwrap();
        assert!(matches!(&error, FormatError::Variant { why, .. } if why.contains(part)), "{part}: {error}");
    };
    named(whole("nvfp4-pack-quantized", float4.clone(), float4.clone()), "`nvfp4-pack-quantized` (NVFP4");
    named(whole("pack-quantized", float4.clone(), Value::Null), "floats of 4 bits");
    named(whole("mxfp4-pack-quantized", float4.clone(), Value::Null), "MXFP4");
    named(whole("mxfp8-quantized", float4.clone(), Value::Null), "MXFP8");
    named(whole("marlin-24", int4.clone(), Value::Null), "`marlin-24` (2:4 sparse");
    named(whole("sparse-24-bitmask", int4.clone(), Value::Null), "2:4 sparse");
    named(whole("later-quantized", int4.clone(), Value::Null), "`later-quantized`;");
    let head = json!({"num_bits": 8, "type": "int", "strategy": "attn_head"});
    named(whole("int-quantized", head, Value::Null), "the strategy is `attn_head`");
    let mut sparse = whole("pack-quantized", int4.clone(), Value::Null);
    sparse["sparsity_config"] = json!({"format": "sparse-24-bitmask"});
    named(sparse, "stored sparse (`sparse-24-bitmask`)");
    let mut group = whole("mixed-precision", int4.clone(), Value::Null);
    group["config_groups"]["group_0"]["format"] = json!("nvfp4-pack-quantized");
    named(group, "in `group_0`: tensors are stored as `nvfp4-pack-quantized`");
    let packed = whole("pack-quantized", int4, int8);
    // What only tensors show.
    let mut folder = Folder::bare(packed);
    folder.set("weight_packed", Dtype::I32, &[16, 16], vec![0; 1024]);
    let error = folder.open().err().unwrap();
    assert!(error.is_unread() && error.to_string().contains("packed, though its inputs are rounded"), "{error}");
    let mut folder = Folder::bare(whole("int-quantized", block, Value::Null));
    folder.set("weight", Dtype::I8, &[16, 16], vec![0; 256]);
    let error = folder.open().err().unwrap();
    assert!(error.is_unread() && error.to_string().contains("a scale a block"), "{error}");
}

/// Of a hub repository only names are known before anything is downloaded.
#[test]
fn repositories_are_named_by_their_files() {
    let named = |files: &[&str]| {
        let files: Vec<String> = files.iter().map(ToString::to_string).collect();
        format::foreign_listing("org/name", &files).map(|error| error.to_string())
    };
    for (files, part) in [
        (&["README.md", "adapter_config.json", "adapter_model.safetensors"][..], "`org/name` is a LoRA adapter:"),
        (&["onnx/model.onnx", "config.json"], "a folder of ONNX graphs (`onnx/`)"),
        (&["x-Q4_K_M.gguf"], "download one of them"),
        (&["params.json", "consolidated.00.pth"], "Meta's original Llama layout"),
        (&["config.json", "pytorch_model.bin"], "pickled PyTorch weights"),
    ] {
        let said = named(files).unwrap();
        assert!(said.contains(part), "{said}");
    }
    assert_eq!(named(&["config.json", "model.safetensors", "consolidated.safetensors", "params.json"]), None);
    assert_eq!(named(&["README.md"]), None);
}
