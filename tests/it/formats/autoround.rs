//! AutoRound's own export, written by hand as its packers write it.

use half::f16;
use quantkit::backend::weight::Weight;
use quantkit::format::FormatError;
use quantkit::tensor::{Dtype, words_to_bytes};
use serde_json::{Value, json};

use super::folder::{DOWN, Folder, UP};

/// As AutoRound 0.6 says it of a model.
fn config(packing: &str, sym: bool) -> Value {
    json!({
        "autoround_version": "0.6.0", "bits": 4, "block_name_to_quantize": "model.layers", "data_type": "int",
        "group_size": 4, "low_gpu_mem_usage": true, "packing_format": packing, "quant_method": "auto-round", "sym": sym,
    })
}

fn halves(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(|value| f16::from_f32(value).to_le_bytes()).collect()
}

/// 8 outputs by 8 inputs in groups of 4, packed as GPTQ: input k has the code k, the zero point of output n is stored as
/// n in the first group and as 2 in the second, the scale of group g and output n is (g + 1)(n + 1) / 4.
fn packed_along_inputs(folder: &mut Folder) {
    folder.set("qweight", Dtype::I32, &[1, 8], words_to_bytes(&[0x7654_3210; 8]));
    folder.set("qzeros", Dtype::I32, &[2, 1], words_to_bytes(&[0x7654_3210, 0x2222_2222]));
    let scales = (0..16).map(|i| ((i / 8 + 1) * (i % 8 + 1)) as f32 / 4.0);
    folder.set("scales", Dtype::F16, &[2, 8], halves(scales));
}

/// Its weights where `less` was taken from zero points before they were stored.
fn wanted(less: i32) -> Vec<f32> {
    let value = |(n, k): (i32, i32)| {
        let zero = less + if k < 4 { n } else { 2 };
        ((k / 4 + 1) * (n + 1)) as f32 / 4.0 * (k - zero) as f32
    };
    (0..64).map(|i| value((i / 8, i % 8))).collect()
}

/// Zero points are stored less one by `auto_gptq` and as they are by AutoRound's own packing and `gptqmodel`.
#[test]
fn packings_as_gptq() {
    for (packing, less) in [
        ("auto_round:auto_gptq", 1),
        ("auto_round:gptq", 1),
        ("auto_round:auto_gptq:exllamav2", 1),
        ("auto_gptq", 1),
        ("auto_round", 0),
        ("auto_round:gptqmodel", 0),
    ] {
        let mut folder = Folder::bare(config(packing, false));
        packed_along_inputs(&mut folder);
        let opened = folder.open().unwrap();
        assert_eq!((opened.method, &opened.warnings[..]), (Some("auto-round"), &[][..]), "{packing}");
        assert_eq!(opened.source.linear(UP, 8, 8).unwrap().to_f32(), wanted(less), "{packing}");
    }
    // Before 0.5 the key was `backend` and the method had its repository's name.
    let mut folder = Folder::bare(config("", false));
    packed_along_inputs(&mut folder);
    let quantization = folder.quantization();
    quantization["quant_method"] = "intel/auto-round".into();
    quantization["backend"] = "auto_round:exllamav2".into();
    assert_eq!(folder.read(8, 8), wanted(0));
    folder.quantization()["backend"] = Value::Null;
    let opened = folder.open().unwrap();
    assert!(opened.warnings[0].contains("names no `packing_format`"), "{:?}", opened.warnings);
    assert_eq!(opened.source.linear(UP, 8, 8).unwrap().to_f32(), wanted(1));
}

/// Symmetric weights tell by themselves which way their zero points are stored.
#[test]
fn symmetric_zero_points_decide() {
    for (word, packing) in [(0x7777_7777, "auto_round"), (0x8888_8888, "auto_round:auto_gptq")] {
        let mut folder = Folder::bare(config(packing, true));
        packed_along_inputs(&mut folder);
        folder.set("qzeros", Dtype::I32, &[2, 1], words_to_bytes(&[word; 2]));
        let opened = folder.open().unwrap();
        assert!(opened.warnings[0].contains("stored the other way"), "{:?}", opened.warnings);
        let first: Vec<f32> = (0..4).map(|k| (k - 8) as f32 / 4.0).collect();
        assert_eq!(opened.source.linear(UP, 8, 8).unwrap().to_f32()[..4], first);
    }
}

#[test]
fn packings_as_awq() {
    for packing in ["auto_round:auto_awq", "auto_round:awq:gemm"] {
        let mut folder = Folder::bare(config(packing, false));
        // Output channel n holds n everywhere, and its zero point is 7 - n.
        folder.set("qweight", Dtype::I32, &[4, 1], words_to_bytes(&[0x7531_6420; 4]));
        folder.set("qzeros", Dtype::I32, &[1, 1], words_to_bytes(&[0x0246_1357]));
        folder.set("scales", Dtype::F16, &[1, 8], halves((0..8).map(|n| n as f32 / 2.0)));
        let wanted: Vec<f32> = (0..32).map(|i| (i / 4) as f32 / 2.0 * (2 * (i / 4) - 7) as f32).collect();
        let opened = folder.open().unwrap();
        assert_eq!((opened.method, opened.warnings.len()), (Some("auto-round"), 0), "{packing}");
        let weight = opened.source.linear(UP, 8, 4).unwrap();
        assert!(matches!(weight, Weight::Gptq(_)));
        assert_eq!(weight.to_f32(), wanted, "{packing}");
        // A module with groups of its own.
        folder.set("qzeros", Dtype::I32, &[2, 1], words_to_bytes(&[0x0246_1357; 2]));
        folder.set("scales", Dtype::F16, &[2, 8], halves((0..16).map(|i| (i % 8) as f32 / 2.0)));
        assert!(folder.damage().contains("`scales` has shape [2, 8]; its config asks for [1, 8]"));
        folder.quantization()["extra_config"] = json!({UP: {"group_size": 2}});
        assert_eq!(folder.read(8, 4), wanted, "{packing}");
        folder.quantization()["extra_config"] = json!({UP: {"bits": 8}});
        assert!(folder.damage().contains(&format!("module `{UP}` has 8 bits")));
    }
}

/// `extra_config` names modules by their paths, which come first, and by patterns that may fit anywhere.
#[test]
fn modules_with_settings_of_their_own() {
    let mut folder = Folder::bare(config("auto_round:auto_gptq", false));
    packed_along_inputs(&mut folder);
    // Four outputs by four inputs of 8 bits in one group: codes 0 to 3, zero points 128.
    folder.add(&format!("{DOWN}.qweight"), Dtype::I32, &[1, 4], words_to_bytes(&[0x0302_0100; 4]));
    folder.add(&format!("{DOWN}.qzeros"), Dtype::I32, &[1, 1], words_to_bytes(&[0x7F7F_7F7F]));
    folder.add(&format!("{DOWN}.scales"), Dtype::F16, &[1, 4], halves([0.5; 4]));
    let down: Vec<f32> = (0..16).map(|i| (i % 4 - 128) as f32 / 2.0).collect();
    let own = json!({"bits": 8, "group_size": -1, "sym": true});
    for extra in [
        json!({DOWN: own, "lm_head": {"bits": 16, "data_type": "float"}}),
        json!({"mlp.down": own, "up_proj": null}),
        json!({".*_proj.*": own, UP: {"bits": 4}}),
    ] {
        let mut extra = extra;
        extra.as_object_mut().unwrap().retain(|_, own| !own.is_null());
        folder.quantization()["extra_config"] = extra.clone();
        let opened = folder.open().unwrap();
        assert_eq!(opened.source.linear(DOWN, 4, 4).unwrap().to_f32(), down, "{extra}");
        assert_eq!(opened.source.linear(UP, 8, 8).unwrap().to_f32(), wanted(1), "{extra}");
        assert_eq!(opened.warnings, [""; 0], "{extra}");
    }
    let schemes = folder.open().unwrap().quantization.unwrap().schemes;
    assert_eq!((schemes[UP].bits, schemes[DOWN].bits, schemes[DOWN].group_size.raw()), (4, 8, -1));
    // A module outside the named blocks is read, and said to be.
    folder.quantization()["block_name_to_quantize"] = json!([["model.layers.1", "model.layers.2"]]);
    folder.quantization()["extra_config"] = json!({DOWN: own});
    let warnings = folder.open().unwrap().warnings;
    assert!(warnings[0].contains("1 of 2 quantized modules") && warnings[0].contains(UP), "{warnings:?}");
}

#[test]
fn what_is_not_read_is_named() {
    let refused = |change: &dyn Fn(&mut Value)| {
        let mut folder = Folder::bare(config("auto_round:auto_gptq", true));
        packed_along_inputs(&mut folder);
        change(folder.quantization());
        folder.open().err().unwrap()
    };
    for (key, value, part) in [
        ("packing_format", json!("auto_round:llm_compressor"), "packed as `auto_round:llm_compressor`"),
        ("packing_format", json!("auto_round:gptq:marlin"), "packed as `auto_round:gptq:marlin`"),
        ("data_type", json!("mx_fp"), "`data_type` is \"mx_fp\""),
        ("act_bits", json!(8), "inputs are rounded to 8 bits"),
        ("super_bits", json!(6), "`super_bits` is 6"),
        ("rotation_config", json!({"kind": "hadamard"}), "`rotation_config`"),
        ("bits", json!(6), "`bits` is 6"),
        ("extra_config", json!({UP: {"data_type": "nv_fp"}}), &format!("in `{UP}`: the `data_type` is \"nv_fp\"")),
        ("extra_config", json!({"up_proj": {"act_bits": 4}}), "in `up_proj`: inputs are rounded to 4 bits"),
        ("extra_config", json!({UP: {"bits": 5}}), "`bits` is 5"),
    ] {
        let error = refused(&|quantization| quantization[key] = value.clone());
        let said = error.to_string();
        assert!(matches!(error, FormatError::Variant { .. }), "{said}");
        assert!(said.contains(part) && said.contains("`auto-round` in a form that quantkit does not read"), "{said}");
    }
    for (value, part) in [
        (json!([UP]), "`extra_config` is not an object"),
        (json!({UP: 4}), "of `extra_config` is not an object"),
        (json!({UP: {"bits": "four"}}), "in `extra_config` is \"four\""),
    ] {
        let error = refused(&|quantization| quantization["extra_config"] = value.clone());
        assert!(matches!(&error, FormatError::Config { why, .. } if why.contains(part)), "{error}");
    }
}
