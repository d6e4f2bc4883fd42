//! Output errors module by module.

use std::convert::Infallible;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use quantkit::backend::cpu::Cpu;
use quantkit::calibrate::corpus::Corpus;
use quantkit::evaluate::modules::{Errors, ModuleDeviation, ModulesError, measure};
use quantkit::format;
use quantkit::model::Model;
use quantkit::model::tokenizer::Tokenizer;
use quantkit::tensor::{bytes_to_words, words_to_bytes};
use safetensors::serialize;
use safetensors::tensor::TensorView;

use crate::integrity::{demo, quantize};
use crate::support::scene::{Scene, tensors};

fn open(path: &Path) -> Model {
    Model::open(format::open_path(path).unwrap().source, Arc::new(Cpu)).unwrap()
}

fn errors(scene: &Scene, artifact: &str) -> Result<Errors, ModulesError> {
    let (own, reference) = (open(&scene.path(artifact)), open(&scene.model()));
    let tokenizer = Tokenizer::load(reference.checkpoint()).unwrap();
    let tokens = Corpus::heldout().tokens(&tokenizer).unwrap();
    let windows: Vec<&[u32]> = tokens.chunks_exact(64).take(6).collect();
    let mut heard = Vec::new();
    let errors = measure(&own, &reference, &windows, &mut |done, all| {
        heard.push((done, all));
        Ok::<_, Infallible>(())
    })?;
    assert_eq!((heard.len(), heard[3]), (4, (3, 4)));
    Ok(errors)
}

fn of<'a>(errors: &'a Errors, module: &str) -> &'a ModuleDeviation {
    errors.modules.iter().find(|m| m.module == module).unwrap_or_else(|| panic!("no {module}"))
}

#[test]
fn errors_of_honest_artifacts() {
    let scene = demo();
    let itself = errors(&scene, "model").unwrap();
    assert_eq!((itself.tokens, itself.modules.len(), itself.blocks.len()), (384, 29, 4));
    assert!(itself.modules.iter().all(|m| m.error < 1e-6 && m.expected.is_none()), "{itself:#?}");
    assert!(itself.blocks.iter().all(|b| b.error == 0.0 && (1.0..1e4).contains(&b.hidden_max)), "{itself:#?}");
    assert!(itself.modules.iter().all(|m| m.output_max > 0.0 && !m.overflows_f16()));
    for (out, args, least, most) in [
        ("w8", &["rtn", "--bits", "8"][..], 1e-4, 0.02),
        ("w4", &["rtn", "--bits", "4"], 0.01, 0.25),
        ("w2", &["rtn", "--bits", "2", "--group-size", "64"], 0.1, 1.0),
        ("g2", &["gptq", "--bits", "2", "--group-size", "64"], 0.1, 1.0),
        ("awq", &["awq", "--group-size", "64"], 0.01, 0.25),
        ("sq", &["smoothquant"], 1e-4, 0.05),
        ("fp8", &["fp8"], 1e-3, 0.08),
    ] {
        quantize(&scene, &[args, &["-o", out]].concat());
        let got = errors(&scene, out).unwrap();
        assert!(got.suspects().is_empty(), "{out}: {:#?}", got.suspects());
        for module in &got.modules[1..] {
            assert!((least..most).contains(&module.error), "{out}: {module:?}");
            let ratio = module.error / module.expected.unwrap();
            assert!((0.1..2.0).contains(&ratio), "{out}: {module:?}");
        }
        assert!(got.modules[0].error < 1e-6 && got.modules[0].kind == "embed_tokens");
        assert!(got.blocks.iter().all(|b| b.error < b.update_error && b.update_error < 1.5 * most), "{out}: {got:#?}");
        assert_eq!(got, errors(&scene, out).unwrap());
    }
    quantize(&scene, &["gguf", "--type", "Q4_0", "-o", "a.gguf"]);
    let got = errors(&scene, "a.gguf").unwrap();
    assert!(got.suspects().is_empty() && got.modules[1..].iter().all(|m| (0.01..0.3).contains(&m.error)), "{got:#?}");
}

/// Changes one tensor of an artifact.
fn change(scene: &Scene, artifact: &str, name: &str, change: impl FnOnce(&mut Vec<u8>, &[usize])) {
    let path = scene.path(artifact).join("model.safetensors");
    let mut all = tensors(&path);
    let stored = all.get_mut(name).unwrap();
    change(&mut stored.data, &stored.shape.clone());
    let views = all.iter().map(|(name, t)| (name, TensorView::new(t.dtype, t.shape.clone(), &t.data).unwrap()));
    fs::write(&path, serialize(views, None).unwrap()).unwrap();
}

#[test]
fn damaged_modules_are_named_and_no_others() {
    let scene = demo();
    for (bits, group) in [("4", "128"), ("2", "64")] {
        let out = format!("w{bits}");
        quantize(&scene, &["rtn", "--bits", bits, "--group-size", group, "-o", &out]);
        // The second half of the heads in place of the first.
        let q = "model.layers.2.self_attn.q_proj";
        change(&scene, &out, &format!("{q}.qweight"), |data, shape| {
            let mut words = bytes_to_words(data);
            words.chunks_exact_mut(shape[1]).for_each(|line| line.rotate_left(128));
            *data = words_to_bytes(&words).to_vec();
        });
        let got = errors(&scene, &out).unwrap();
        let suspects = got.suspects();
        assert_eq!(suspects.len(), 1, "{bits} bits: {suspects:#?}");
        assert!(suspects[0].module == q && suspects[0].message.contains("rows were exchanged"), "{suspects:#?}");
        assert!(of(&got, q).error > 1.0, "{:?}", of(&got, q));
        // What comes after it is not held against it.
        let other = of(&got, "model.layers.2.self_attn.o_proj");
        assert!(other.error < 2.0 * other.expected.unwrap(), "{other:?}");
        assert!(bits == "2" || got.blocks[2].update_error > 1.5 * got.blocks[1].update_error, "{:#?}", got.blocks);
    }
}

#[test]
fn activations_beyond_f16_and_no_numbers() {
    let scene = demo();
    quantize(&scene, &["rtn", "--bits", "4", "-o", "w4"]);
    let scales = "model.layers.1.mlp.down_proj.scales";
    change(&scene, "w4", scales, |data, _| {
        for b in data.as_chunks_mut::<2>().0 {
            *b = half::f16::from_f32(half::f16::from_le_bytes(*b).to_f32() * 4e5).to_le_bytes();
        }
    });
    let got = errors(&scene, "w4").unwrap();
    let down = of(&got, "model.layers.1.mlp.down_proj");
    assert!(down.overflows_f16(), "{down:?}");
    assert!(got.modules.iter().all(|m| m.overflows_f16() == (m.module == down.module)), "{got:#?}");
    assert!(got.blocks[1].hidden_max > 65504.0 && got.blocks[2].hidden_max < 65504.0);
    assert_eq!(got.suspects()[0].module, down.module);

    quantize(&scene, &["rtn", "--bits", "4", "-o", "nan"]);
    change(&scene, "nan", "model.layers.1.input_layernorm.weight", |data, _| {
        data[..2].copy_from_slice(&half::f16::NAN.to_le_bytes());
    });
    let error = errors(&scene, "nan").unwrap_err().to_string();
    assert!(error.contains("model.layers.1.self_attn.q_proj"), "{error}");
    let tiny = Scene::tiny("llama");
    let error = measure(&open(&tiny.model()), &open(&scene.model()), &[&[1, 2]], &mut |_, _| Ok::<_, Infallible>(()));
    assert!(error.unwrap_err().to_string().contains("a vocabulary of 128, the reference 2048"));
}
