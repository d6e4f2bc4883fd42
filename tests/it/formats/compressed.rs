//! compressed-tensors artifacts, foreign and spoiled.

use half::f16;
use quantkit::backend::weight::{Inputs, Weight};
use quantkit::format::compressed::CompressedLayout;
use quantkit::format::kind::{Form, InputsKind, KvScales, Module, Tile};
use quantkit::format::layout::{Description, Layout, Solution};
use quantkit::quantize::Quantized;
use quantkit::scheme::Scheme;
use quantkit::tensor::{Dtype, words_to_bytes};
use serde_json::{Value, json};

use super::folder::{DOWN, EIGHT, Folder, UP, floats, inputs, integers, same};
use super::{scheme, values};

const PACKED: CompressedLayout = CompressedLayout { form: Form::Packed };

fn packed(rows: usize, cols: usize, scheme: Scheme) -> (Folder, Quantized) {
    let weight = integers(rows, cols, scheme, 3);
    let solution = Solution::Integers { weight: weight.clone(), inputs: Inputs::Float };
    (Folder::new(&PACKED, &[(UP, scheme, solution)]), weight)
}

fn config(form: Form, modules: &[Module], kv_cache: Option<KvScales>) -> Value {
    let outside = ["lm_head".to_string()];
    let base = modules[0].scheme.unwrap();
    let how = Description { method: "rtn", base, modules, outside: &outside, gptq: None, grid: "mse", kv_cache };
    CompressedLayout { form }.config(&how)
}

fn module(name: &str, scheme: Option<Scheme>) -> Module {
    Module { name: name.into(), rows: 64, cols: 64, scheme }
}

#[test]
fn one_group_names_the_class() {
    let modules = [module(UP, Some(scheme(4, 64, true))), module(DOWN, None)];
    assert_eq!(
        config(Form::Packed, &modules, None),
        json!({
            "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": 64,
                    "dynamic": false,
                },
                "input_activations": null, "output_activations": null, "format": "pack-quantized",
            }},
            "ignore": [DOWN, "lm_head"], "kv_cache_scheme": null, "global_compression_ratio": null,
            "version": "0.20.1",
        })
    );
}

#[test]
fn several_groups_name_modules() {
    let modules = [module(UP, Some(scheme(4, 64, false))), module(DOWN, Some(scheme(8, -1, true)))];
    let groups = &config(Form::Packed, &modules, None)["config_groups"];
    assert_eq!(groups["group_0"]["targets"], json!([UP]));
    assert_eq!(groups["group_1"]["targets"], json!([DOWN]));
    assert_eq!(groups["group_0"]["weights"]["symmetric"], json!(false));
    let channel = &groups["group_1"]["weights"];
    assert_eq!((&channel["strategy"], &channel["group_size"]), (&json!("channel"), &Value::Null));
}

#[test]
fn inputs_and_caches_are_told() {
    let modules = [module(UP, Some(EIGHT)), module(DOWN, Some(EIGHT))];
    let group = |form| config(form, &modules, None)["config_groups"]["group_0"].clone();
    let token = |kind: &str, symmetric: bool| {
        json!({
            "num_bits": 8, "type": kind, "symmetric": symmetric, "strategy": "token", "group_size": null,
            "dynamic": true,
        })
    };
    let int8 = group(Form::Int8(InputsKind::TokenAsymmetric));
    assert_eq!(int8["input_activations"], token("int", false));
    assert_eq!((&int8["format"], &int8["weights"]["strategy"]), (&json!("int-quantized"), &json!("channel")));
    let float8 = |tile, inputs| group(Form::Float8 { tile, inputs });
    let channel = float8(Tile::Channel, InputsKind::Token);
    assert_eq!(channel["input_activations"], token("float", true));
    assert_eq!(channel["format"], "float-quantized");
    let block = float8(Tile::Block(128, 64), InputsKind::Group(64));
    assert_eq!(block["weights"]["block_structure"], json!([128, 64]));
    assert_eq!(block["input_activations"]["group_size"], 64);
    let whole = float8(Tile::Tensor, InputsKind::Tensor);
    assert_eq!(whole["input_activations"]["dynamic"], json!(false));
    assert_eq!(float8(Tile::Channel, InputsKind::Float)["format"], "naive-quantized");

    for (scales, strategy) in [(KvScales::Tensor, "tensor"), (KvScales::Head, "attn_head")] {
        let scheme = &config(Form::Packed, &modules, Some(scales))["kv_cache_scheme"];
        assert_eq!(
            *scheme,
            json!({
                "num_bits": 8, "type": "float", "symmetric": true, "strategy": strategy, "group_size": null,
                "dynamic": false,
            })
        );
    }
}

/// Arguments as llm-compressor 0.12 writes them, with every key.
fn arguments(bits: u8, symmetric: bool, strategy: &str, group: Value, order: Value) -> Value {
    json!({
        "actorder": order, "block_structure": null, "dynamic": strategy == "token", "group_size": group,
        "num_bits": bits, "observer": "memoryless_minmax", "observer_kwargs": {}, "scale_dtype": null,
        "strategy": strategy, "symmetric": symmetric, "type": "int",
        "zp_dtype": if symmetric { Value::Null } else { json!("torch.int8") },
    })
}

fn foreign(format: &str, weights: Value, inputs: Value) -> Value {
    json!({
        "config_groups": {"group_0": {
            "format": format, "input_activations": inputs, "output_activations": null, "targets": ["Linear"],
            "weights": weights,
        }},
        "format": format, "global_compression_ratio": null, "ignore": ["lm_head"], "kv_cache_scheme": null,
        "quant_method": "compressed-tensors", "quantization_status": "compressed", "sparsity_config": {},
        "transform_config": {}, "version": "0.19.0",
    })
}

#[test]
fn configs_of_llm_compressor_are_read() {
    for (sym, order) in [(true, json!("static")), (false, Value::Null)] {
        let (mut folder, weight) = packed(24, 128, scheme(4, 64, sym));
        *folder.quantization() = foreign("pack-quantized", arguments(4, sym, "group", json!(64), order), Value::Null);
        same(&folder.read(24, 128), &values(&weight), "");
    }
    let weight = integers(24, 100, EIGHT, 3);
    let solution = Solution::Integers { weight: weight.clone(), inputs: Inputs::Token };
    let form = Form::Int8(InputsKind::Token);
    let mut folder = Folder::new(&CompressedLayout { form }, &[(UP, EIGHT, solution)]);
    let channel = arguments(8, true, "channel", Value::Null, json!("static"));
    *folder.quantization() =
        foreign("int-quantized", channel.clone(), arguments(8, true, "token", Value::Null, Value::Null));
    let read = folder.open().unwrap().source.linear(UP, 24, 100).unwrap();
    assert_eq!((read.to_f32(), inputs(&read)), (values(&weight), Inputs::Token));
    // The same bytes with inputs as they are: integers like any others.
    *folder.quantization() = foreign("naive-quantized", channel, Value::Null);
    let read = folder.open().unwrap().source.linear(UP, 24, 100).unwrap();
    assert!(matches!(read, Weight::Gptq(_)));
    assert_eq!(read.to_f32(), values(&weight));
}

#[test]
fn words_by_hand() {
    // Outputs of -8 .. -1 and 0 .. 7, four bits; one group of zero points -8 and 7.
    let mut folder =
        Folder::bare(foreign("pack-quantized", arguments(4, false, "channel", Value::Null, Value::Null), Value::Null));
    folder.set("weight_packed", Dtype::I32, &[2, 1], words_to_bytes(&[0x7654_3210, 0xFEDC_BA98]));
    folder.set("weight_shape", Dtype::I64, &[2], [2u64, 8].iter().flat_map(|n| n.to_le_bytes()).collect());
    folder.set("weight_scale", Dtype::F32, &[2, 1], bytemuck::cast_slice(&[0.5f32, -2.0]).to_vec());
    folder.set("weight_zero_point", Dtype::I32, &[1, 1], words_to_bytes(&[0xF0]));
    let wanted: Vec<f32> = (0..8).map(|q| q as f32 / 2.0).chain((0..8).map(|q| (q - 7) as f32 * -2.0)).collect();
    assert_eq!(folder.read(2, 8), wanted);
    // Older versions left them as they are.
    folder.set("weight_zero_point", Dtype::I8, &[2, 1], vec![0xF8, 7]);
    assert_eq!(folder.read(2, 8), wanted);
}

/// Fields of whole words: `32 / bits` of them in each.
fn loose(values: &[u8], bits: u8) -> Vec<u32> {
    let run = |run: &[u8]| run.iter().rev().fold(0, |word: u32, &v| word << bits | u32::from(v));
    values.chunks(32 / bits as usize).map(run).collect()
}

#[test]
fn words_with_free_ends_are_read() {
    for bits in [3, 5, 6, 7] {
        let scheme = scheme(bits, 64, false);
        let (mut folder, weight) = packed(48, 128, scheme);
        let words: Vec<u32> = weight.codes.chunks(128).flat_map(|row| loose(row, bits)).collect();
        folder.set("weight_packed", Dtype::I32, &[48, words.len() / 48], words_to_bytes(&words));
        // At 3 bits both forms of the zero points have as many words: those of the weight tell.
        let columns: Vec<Vec<u32>> = weight.zeros.chunks(48).map(|zeros| loose(zeros, bits)).collect();
        let words: Vec<u32> = (0..columns[0].len()).flat_map(|w| columns.iter().map(move |column| column[w])).collect();
        folder.set("weight_zero_point", Dtype::I32, &[columns[0].len(), 2], words_to_bytes(&words));
        same(&folder.read(48, 128), &values(&weight), &format!("{bits} bits"));
    }
}

#[test]
fn activation_order_is_read() {
    let (mut folder, weight) = packed(8, 128, scheme(4, 64, true));
    let g_idx: Vec<u32> = (0..128).map(|k| (k % 2) as u32).collect();
    folder.set("weight_g_idx", Dtype::I32, &[128], words_to_bytes(&g_idx));
    let ordered = Quantized { g_idx, ..weight.clone() };
    same(&folder.read(8, 128), &values(&ordered), "");
    for unset in [0, u32::MAX] {
        folder.set("weight_g_idx", Dtype::I32, &[128], words_to_bytes(&[unset; 128]));
        same(&folder.read(8, 128), &values(&weight), "");
    }
    folder.set("weight_g_idx", Dtype::I32, &[128], words_to_bytes(&[2; 128]));
    assert!(folder.damage().contains("input 0 into group 2"));
}

#[test]
fn groups_go_by_name_pattern_and_class() {
    let (four, eight) = (scheme(4, 64, true), scheme(8, -1, false));
    let (up, down) = (integers(16, 64, four, 1), integers(16, 64, eight, 2));
    let solution = |weight: &Quantized| Solution::Integers { weight: weight.clone(), inputs: Inputs::Float };
    let mut folder = Folder::new(&PACKED, &[(UP, four, solution(&up)), (DOWN, eight, solution(&down))]);
    folder.quantization()["config_groups"]["group_0"]["targets"] = json!(["Linear"]);
    folder.quantization()["config_groups"]["group_1"]["targets"] = json!(["re:.*down_proj$"]);
    let opened = folder.open().unwrap();
    same(&opened.source.linear(UP, 16, 64).unwrap().to_f32(), &values(&up), "");
    same(&opened.source.linear(DOWN, 16, 64).unwrap().to_f32(), &values(&down), "");
    folder.quantization()["config_groups"]["group_0"]["targets"] = json!(["re:.*gate_proj$"]);
    let error = folder.damage();
    assert!(error.contains(UP) && error.contains("no group of the config names it"), "{error}");
    // A module that is named must be there in this form.
    folder.quantization()["config_groups"]["group_0"]["targets"] = json!(["Linear", "lm_head"]);
    folder.quantization()["ignore"] = json!([]);
    assert!(folder.damage().contains("module `lm_head`"));
    folder.quantization()["ignore"] = json!(["re:.*head", UP]);
    let opened = folder.open().unwrap();
    assert!(opened.warnings[0].contains("1 of 2") && opened.warnings[0].contains(UP), "{:?}", opened.warnings);
}

#[test]
fn hostile_packed_integers_are_refused() {
    let with = |what: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>| {
        let (mut folder, _) = packed(32, 128, scheme(4, 64, false));
        folder.set(what, dtype, shape, bytes);
        folder.damage()
    };
    let shape = |n: i64, k: i64| [n, k].iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    for (error, part) in [
        (with("weight_packed", Dtype::I32, &[32, 15], vec![0; 1920]), "32 rows of 15 words, in which 32 by 128"),
        (with("weight_packed", Dtype::I32, &[512], vec![0; 2048]), "two dimensions"),
        (with("weight_shape", Dtype::I64, &[2], shape(31, 128)), "31 by 128 integers of 4 bits do not lie"),
        (with("weight_shape", Dtype::I64, &[2], shape(32, -1)), "do not lie"),
        (with("weight_shape", Dtype::I64, &[2], shape(32, i64::MAX)), "do not lie"),
        (with("weight_shape", Dtype::I64, &[2], shape(32, 0)), "do not lie"),
        (with("weight_shape", Dtype::F32, &[2], vec![0; 8]), "`weight_shape` is F32"),
        (with("weight_shape", Dtype::I64, &[1], vec![0; 8]), "`weight_shape` has shape [1]"),
        (with("weight_scale", Dtype::F16, &[32, 1], vec![0; 64]), "`weight_scale` has shape [32, 1]"),
        (with("weight_scale", Dtype::I32, &[32, 2], vec![0; 256]), "`weight_scale` is I32"),
        (with("weight_zero_point", Dtype::I32, &[5, 2], vec![0; 40]), "shape [5, 2]; its config asks for [4, 2]"),
        (with("weight_zero_point", Dtype::I8, &[32, 1], vec![0; 32]), "asks for 64 numbers"),
        (with("weight_g_idx", Dtype::I32, &[64], vec![0; 256]), "`weight_g_idx` has shape [64]"),
    ] {
        assert!(error.contains(part) && error.contains(UP), "{error}");
    }
    for what in ["weight_scale", "weight_shape", "weight_zero_point"] {
        let (mut folder, _) = packed(32, 128, scheme(4, 64, false));
        folder.tensors.remove(&format!("{UP}.{what}"));
        let error = folder.damage();
        assert!(
            error.contains(&format!("module `{UP}`")) && error.contains(&format!("`{what}` is missing")),
            "{error}"
        );
    }
    let (mut folder, _) = packed(32, 128, scheme(4, 64, false));
    folder.set("weight_scale", Dtype::F16, &[32, 2], bytemuck::cast_slice(&[f16::INFINITY; 64]).to_vec());
    assert!(folder.unloadable(32, 128).contains("element 0 of `weight_scale` is inf"));
    assert!(folder.unloadable(128, 32).contains("it has 32 outputs and 128 inputs"));
    folder.quantization()["config_groups"]["group_0"]["weights"]["type"] = "float".into();
    assert!(folder.damage().contains("floats of 4 bits"));
    folder.tensors.retain(|name, _| !name.starts_with(UP));
    folder.quantization()["config_groups"]["group_0"]["weights"]["type"] = "int".into();
    assert!(folder.damage().contains("no tensor ends in `.weight_packed`"));
}

#[test]
fn hostile_bytes_are_refused() {
    let fresh = |kind: InputsKind, inputs: Inputs| {
        let solution = Solution::Integers { weight: integers(16, 40, EIGHT, 3), inputs };
        Folder::new(&CompressedLayout { form: Form::Int8(kind) }, &[(UP, EIGHT, solution)])
    };
    let fixed = || fresh(InputsKind::TensorAsymmetric, Inputs::Tensor { scale: 0.5, zero: 4 });
    for what in ["weight_scale", "input_scale", "input_zero_point"] {
        let mut folder = fixed();
        folder.tensors.remove(&format!("{UP}.{what}"));
        assert!(folder.damage().contains(&format!("`{what}` is missing")), "{what}");
    }
    let mut folder = fixed();
    folder.set("input_scale", Dtype::F32, &[1], f32::NAN.to_le_bytes().to_vec());
    assert!(folder.unloadable(16, 40).contains("element 0 of `input_scale` is NaN"));
    let mut folder = fixed();
    folder.set("input_zero_point", Dtype::I32, &[1], 200i32.to_le_bytes().to_vec());
    assert!(folder.unloadable(16, 40).contains("200"));
    folder.set("input_zero_point", Dtype::I32, &[1], (-3i32).to_le_bytes().to_vec());
    let weight = folder.open().unwrap().source.linear(UP, 16, 40).unwrap();
    assert_eq!(inputs(&weight), Inputs::Tensor { scale: 0.5, zero: -3 });
    let mut folder = fresh(InputsKind::Token, Inputs::Token);
    folder.quantization()["config_groups"]["group_0"]["weights"]["symmetric"] = false.into();
    assert!(folder.damage().contains("integers with zero points or groups"));
    folder.set("weight", Dtype::F8E4M3, &[16, 40], vec![0; 640]);
    assert!(folder.damage().contains("F8_E4M3, but the config says integers"));

    let tile = Tile::Channel;
    let floating = Solution::Float8 { weight: floats(16, 40, tile, 3), inputs: Inputs::Token };
    let form = Form::Float8 { tile, inputs: InputsKind::Token };
    let mut folder = Folder::new(&CompressedLayout { form }, &[(UP, EIGHT, floating)]);
    folder.set("weight_scale", Dtype::F32, &[1], vec![0; 4]);
    assert!(folder.damage().contains("`weight_scale` has shape [1]; its config asks for [16, 1]"));
    folder.quantization()["config_groups"]["group_0"]["weights"]["strategy"] = "tensor".into();
    assert!(folder.open().is_ok());
    folder.set("weight", Dtype::I8, &[16, 40], vec![0; 640]);
    assert!(folder.damage().contains("integers, but the config says floats"));
}
