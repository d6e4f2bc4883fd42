//! Artifacts of the `fp8` method, foreign and spoiled.

use quantkit::backend::weight::{Inputs, Weight};
use quantkit::format::fp8::Fp8Layout;
use quantkit::format::kind::{InputsKind, Module, Tile};
use quantkit::format::layout::{Description, Layout, Solution};
use quantkit::tensor::Dtype;
use serde_json::{Value, json};

use super::folder::{DOWN, EIGHT, Folder, UP, floats, inputs, same, values};

fn blocks() -> (Folder, Vec<f32>) {
    let tile = Tile::Block(32, 48);
    let up = Solution::Float8 { weight: floats(40, 100, tile, 9), inputs: Inputs::Group(48) };
    let values = values(&up);
    (Folder::new(&Fp8Layout { tile, inputs: InputsKind::Group(48) }, &[(UP, EIGHT, up)]), values)
}

#[test]
fn configs() {
    let module = |name: &str, scheme| Module { name: name.into(), rows: 64, cols: 64, scheme };
    let config = |tile, inputs| {
        Fp8Layout { tile, inputs }.config(&Description {
            method: "rtn",
            base: EIGHT,
            modules: &[module(UP, Some(EIGHT)), module(DOWN, None)],
            outside: &["lm_head".to_string()],
            gptq: None,
            grid: "max-abs",
            kv_cache: None,
        })
    };
    let left = json!([DOWN, "lm_head"]);
    assert_eq!(
        config(Tile::Block(128, 128), InputsKind::Group(128)),
        json!({
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "ignored_layers": left, "modules_to_not_convert": left,
        })
    );
    let whole = config(Tile::Tensor, InputsKind::Tensor);
    assert_eq!((&whole["activation_scheme"], &whole["weight_block_size"]), (&json!("static"), &Value::Null));
}

#[test]
fn foreign_variants_are_read() {
    // DeepSeek's config, down to the letter.
    let (mut folder, values) = blocks();
    *folder.quantization() = json!({
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [32, 48],
    });
    assert!(folder.tensors.contains_key(&format!("{UP}.weight_scale_inv")));
    same(&folder.read(40, 100), &values, "");

    // One scale without a dimension, as AutoFP8 wrote it, and under the other name.
    for (scale, input) in [("weight_scale", "input_scale"), ("weight_scale_inv", "activation_scale")] {
        let mut folder = Folder::bare(json!({"quant_method": "fp8", "activation_scheme": "static"}));
        folder.set("weight", Dtype::F8E4M3, &[2, 3], vec![0x38, 0xB8, 0x40, 0x00, 0x7E, 0x01]);
        folder.set(scale, Dtype::F32, &[], 2f32.to_le_bytes().to_vec());
        folder.set(input, Dtype::F32, &[], 0.25f32.to_le_bytes().to_vec());
        assert_eq!(folder.read(2, 3), [2., -2., 4., 0., 896., 2. / 512.]);
        let weight = folder.open().unwrap().source.linear(UP, 2, 3).unwrap();
        assert_eq!(inputs(&weight), Inputs::Tensor { scale: 0.25, zero: 0 });
        folder.quantization()["activation_scheme"] = "dynamic".into();
        let weight = folder.open().unwrap().source.linear(UP, 2, 3).unwrap();
        assert_eq!(inputs(&weight), Inputs::Token);
    }

    let mut channels = Folder::bare(json!({"quant_method": "fp8", "ignored_layers": ["model.layers.0"]}));
    channels.set("weight", Dtype::F8E4M3, &[2, 2], vec![0x38; 4]);
    channels.set("weight_scale", Dtype::BF16, &[2, 1], vec![0x80, 0x3F, 0x00, 0x40]);
    assert_eq!(channels.read(2, 2), [1., 1., 2., 2.]);
    let opened = channels.open().unwrap();
    assert!(opened.warnings[0].contains("1 of 1 quantized modules"), "{:?}", opened.warnings);
    assert!(matches!(opened.source.linear(UP, 2, 2).unwrap(), Weight::Fp8(weight) if weight.tile == (1, 2)));
}

#[test]
fn hostile_artifacts_are_refused() {
    let with = |what: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>| {
        let (mut folder, _) = blocks();
        folder.set(what, dtype, shape, bytes);
        folder
    };
    for (folder, part) in [
        (with("weight_scale_inv", Dtype::F32, &[3, 2], vec![0; 24]), "shape [3, 2]; its config asks for [2, 3]"),
        (with("weight_scale_inv", Dtype::I32, &[2, 3], vec![0; 24]), "`weight_scale_inv` is I32"),
        (with("weight", Dtype::F8E4M3, &[4000], vec![0; 4000]), "two dimensions"),
        (with("weight", Dtype::F8E4M3, &[0, 4000], vec![]), "empty"),
    ] {
        let error = folder.damage();
        assert!(error.contains(part) && error.contains(UP), "{error}");
    }
    let (mut folder, _) = blocks();
    folder.tensors.remove(&format!("{UP}.weight_scale_inv"));
    assert!(folder.damage().contains("`weight_scale_inv` is missing"));
    folder.tensors.remove(&format!("{UP}.weight"));
    assert!(folder.damage().contains("no tensor of F8_E4M3"));
    let infinite = [1f32, 2., f32::NAN, 1., 1., 1.];
    let folder = with("weight_scale_inv", Dtype::F32, &[2, 3], bytemuck::cast_slice(&infinite).to_vec());
    assert!(folder.unloadable(40, 100).contains("element 2 of `weight_scale_inv` is NaN"));
    let mut codes = vec![0; 4000];
    codes[123] = 0xFF;
    let folder = with("weight", Dtype::F8E4M3, &[40, 100], codes);
    assert!(folder.unloadable(40, 100).contains("no number at output 1, input 23"));
    let mut folder = Folder::bare(json!({"quant_method": "fp8", "activation_scheme": "static"}));
    folder.set("weight", Dtype::F8E4M3, &[1, 1], vec![0x38]);
    folder.set("weight_scale", Dtype::F32, &[1], 2f32.to_le_bytes().to_vec());
    assert!(folder.damage().contains("`input_scale` is missing"));
    folder.set("input_scale", Dtype::F32, &[2], vec![0; 8]);
    assert!(folder.damage().contains("it should be one number"));
    folder.set("input_scale", Dtype::F32, &[1], vec![0; 4]);
    assert!(folder.unloadable(1, 1).contains("`input_scale` is 0; it must be positive"));
}

#[test]
fn floats_of_8_bits_need_a_config() {
    let (mut folder, _) = blocks();
    folder.config = json!({});
    let error = folder.damage();
    assert!(error.contains(&format!("`{UP}.weight` is F8_E4M3: nothing says how it is scaled")), "{error}");
}
