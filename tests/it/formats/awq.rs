//! AutoAWQ artifacts, foreign and spoiled.

use half::f16;
use quantkit::backend::weight::{Inputs, Weight};
use quantkit::format::awq::AwqLayout;
use quantkit::format::layout::Solution;
use quantkit::tensor::{Dtype, words_to_bytes};
use serde_json::{Value, json};

use super::folder::{Folder, UP, integers, same};
use super::{scheme, values};

fn fresh() -> (Folder, Vec<f32>) {
    let base = scheme(4, 32, false);
    let weight = integers(32, 64, base, 3);
    let values = values(&weight);
    (Folder::new(&AwqLayout, &[(UP, base, Solution::Integers { weight, inputs: Inputs::Float })]), values)
}

#[test]
fn words_by_hand() {
    // As AutoAWQ 0.2.9 says it of a model whose every linear it quantized.
    let mut folder = Folder::bare(json!({
        "bits": 4, "group_size": 4, "modules_to_not_convert": null, "quant_method": "awq", "version": "gemm",
        "zero_point": true,
    }));
    // Output channel n holds n everywhere, and its zero point is 7 - n.
    folder.set("qweight", Dtype::I32, &[4, 1], words_to_bytes(&[0x7531_6420; 4]));
    folder.set("qzeros", Dtype::I32, &[1, 1], words_to_bytes(&[0x0246_1357]));
    let scales: Vec<f16> = (0..8).map(|n| f16::from_f32(n as f32 / 2.0)).collect();
    folder.set("scales", Dtype::F16, &[1, 8], bytemuck::cast_slice(&scales).to_vec());
    let wanted: Vec<f32> = (0..32).map(|i| (i / 4) as f32 / 2.0 * (2 * (i / 4) - 7) as f32).collect();
    assert_eq!(folder.read(8, 4), wanted);
}

#[test]
fn foreign_variants_are_read() {
    let (mut folder, values) = fresh();
    *folder.quantization() = json!({"w_bit": 4, "q_group_size": 32, "zero_point": true, "version": "GEMM"});
    same(&folder.read(32, 64), &values, "");
    let Weight::Gptq(weight) = folder.open().unwrap().source.linear(UP, 32, 64).unwrap() else { panic!() };
    assert_eq!((weight.bits, weight.qweight.len(), weight.zeros.len()), (4, 8 * 32, 2 * 32));

    // Without zero points the middle is meant.
    let base = scheme(4, 32, true);
    let symmetric = integers(32, 64, base, 4);
    let solution = Solution::Integers { weight: symmetric.clone(), inputs: Inputs::Float };
    let mut folder = Folder::new(&AwqLayout, &[(UP, base, solution)]);
    folder.tensors.remove(&format!("{UP}.qzeros"));
    assert!(folder.damage().contains("`qzeros` is missing"));
    folder.quantization()["zero_point"] = false.into();
    same(&folder.read(32, 64), &super::values(&symmetric), "");

    let (mut folder, values) = fresh();
    folder.quantization()["modules_to_not_convert"] = json!(["lm_head", "up_proj"]);
    let opened = folder.open().unwrap();
    assert!(opened.warnings[0].contains("1 of 1") && opened.warnings[0].contains(UP), "{:?}", opened.warnings);
    same(&opened.source.linear(UP, 32, 64).unwrap().to_f32(), &values, "");
}

#[test]
fn hostile_artifacts_are_refused() {
    let with = |what: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>| {
        let (mut folder, _) = fresh();
        folder.set(what, dtype, shape, bytes);
        folder.damage()
    };
    for (error, part) in [
        (with("qweight", Dtype::I32, &[63, 4], vec![0; 1008]), "group size 32 does not divide its 63 input"),
        (
            with("qweight", Dtype::I32, &[64, 5], vec![0; 1280]),
            "`scales` has shape [2, 32]; its config asks for [2, 40]",
        ),
        (with("qweight", Dtype::I32, &[256], vec![0; 1024]), "two dimensions"),
        (with("qweight", Dtype::I32, &[0, 1 << 62], vec![]), "empty"),
        (with("qzeros", Dtype::I32, &[1, 4], vec![0; 16]), "`qzeros` has shape [1, 4]"),
        (with("qzeros", Dtype::F32, &[2, 4], vec![0; 32]), "`qzeros` is F32; it should be I32"),
        (with("scales", Dtype::F16, &[32, 2], vec![0; 128]), "`scales` has shape [32, 2]"),
        (with("scales", Dtype::I32, &[2, 32], vec![0; 256]), "`scales` is I32"),
    ] {
        assert!(error.contains(part) && error.contains(UP), "{error}");
    }
    for what in ["scales", "qzeros"] {
        let (mut folder, _) = fresh();
        folder.tensors.remove(&format!("{UP}.{what}"));
        assert!(folder.damage().contains(&format!("`{what}` is missing")));
    }
    let (mut folder, _) = fresh();
    folder.set("scales", Dtype::F16, &[2, 32], [0, 0x7E].repeat(64));
    assert!(folder.unloadable(32, 64).contains("element 0 of `scales` is NaN"));
    let (mut folder, _) = fresh();
    folder.tensors.retain(|name, _| !name.starts_with(UP));
    assert!(folder.damage().contains("the config says `awq`, but no tensor of I32 ends in `.qweight`"));
    for (key, value, part) in [
        ("version", json!("gemv"), "`gemv`"),
        ("bits", json!(3), "`bits` is 3"),
        ("group_size", Value::Null, "`group_size` is missing"),
    ] {
        let (mut folder, _) = fresh();
        folder.quantization()[key] = value;
        let error = folder.damage();
        assert!(error.contains(part), "{error}");
    }
}
