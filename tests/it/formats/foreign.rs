//! Folders of other programs: forms that are not read are named for what they are.

use quantkit::format::FormatError;
use quantkit::tensor::Dtype;
use serde_json::{Value, json};

use super::folder::Folder;

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
