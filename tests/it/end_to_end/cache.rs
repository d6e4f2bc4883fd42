//! `quantkit eval kv`, and the figures behind it.

use std::path::Path;
use std::sync::Arc;

use quantkit::backend::cache::{CacheType, LayerScales};
use quantkit::backend::cpu::Cpu;
use quantkit::calibrate::cache::Sharing;
use quantkit::checkpoint::Checkpoint;
use quantkit::evaluate::cache_error::{Setting, calibrated, head_errors, predictions};
use quantkit::evaluate::divergence::Divergence;
use quantkit::evaluate::windows::Window;
use quantkit::model::Model;
use quantkit::model::source::DenseSource;
use quantkit::tensor::{Dtype, widened};
use safetensors::Dtype as Stored;
use serde_json::Value;

use super::number;
use crate::support::scene::{Scene, copy_folder};
use crate::support::{fixture, golden_logits};

const HOW: [&str; 6] = ["--text", "eval.txt", "--window", "64", "--max-windows", "8"];

/// A scene whose `model/` is the demo checkpoint.
fn demo() -> Scene {
    let scene = Scene::demo();
    copy_folder(&Path::new(env!("CARGO_MANIFEST_DIR")).join("calib/demo/target"), &scene.model());
    scene
}

fn open(dir: &Path) -> Model {
    Model::open(Box::new(DenseSource(Checkpoint::open(dir).unwrap())), Arc::new(Cpu)).unwrap()
}

/// Multiplies tensors by factors, and stores them as f32.
fn scale(scene: &Scene, factor: fn(&str) -> f32) {
    scene.edit_weights(|tensors| {
        for (name, tensor) in tensors.iter_mut().filter(|(name, _)| factor(name) != 1.0) {
            let dtype = match tensor.dtype {
                Stored::F32 => Dtype::F32,
                Stored::F16 => Dtype::F16,
                Stored::BF16 => Dtype::BF16,
                other => panic!("{other:?}"),
            };
            let numbers = widened(dtype, &tensor.data).into_iter().map(|x| x * factor(name));
            (tensor.data, tensor.dtype) = (numbers.flat_map(f32::to_le_bytes).collect(), Stored::F32);
        }
    });
}

fn entry<'a>(report: &'a Value, kind: &str, scales: &str) -> &'a Value {
    let all = report["types"].as_array().unwrap();
    all.iter()
        .find(|t| t["kind"] == kind && t["scales"] == scales)
        .unwrap_or_else(|| panic!("{kind} {scales}: {report}"))
}

#[test]
fn eight_bits_cost_little_and_more_bits_less() {
    let scene = demo();
    let report = scene.run(&[&["eval", "kv", "model", "--json"], &HOW[..]].concat()).ok().json();
    let kl = |kind, scales| number(entry(&report, kind, scales), "/mean_kl");
    let (int8, fp8, e5m2) = (kl("int8", "dynamic"), kl("fp8", "proposed_per_head"), kl("fp8_e5m2", "unit"));
    assert!(int8 < fp8 && fp8 < e5m2 && e5m2 < 0.05, "{int8} {fp8} {e5m2}");
    let heads = |entry: &Value, what: &str| -> Vec<f64> {
        let layers = entry["errors"][what].as_array().unwrap();
        layers.iter().flat_map(|layer| layer.as_array().unwrap()).map(|x| x.as_f64().unwrap()).collect()
    };
    for what in ["keys", "values", "output"] {
        // Three bits of mantissa round by 2^-4 at most, and by 2.6 % in the mean; seven bits of a range far less.
        let errors = heads(entry(&report, "fp8", "proposed"), what);
        assert_eq!(errors.len() as f64, number(&report, "/layers") * number(&report, "/kv_heads"));
        assert!(errors.iter().all(|e| (0.001..0.0625).contains(e)), "{what}: {errors:?}");
        assert!(heads(entry(&report, "int8", "dynamic"), what).iter().all(|e| *e < 0.02), "{what}");
    }
    assert_eq!(report["warnings"], Value::Array(vec![]));
    // What it is held against, against itself.
    scene.run(&[&["eval", "kv", "model", "--kv-cache-dtype", "f16"], &HOW[..]].concat()).ended(2).says(&["beside f16"]);
    let exact =
        scene.run(&[&["eval", "kv", "model", "--json", "--kv-cache-dtype", "f32"], &HOW[..]].concat()).ok().json();
    assert!(number(entry(&exact, "f32", "none"), "/mean_kl") < 1e-5);
}

/// Keys a thousand times larger, and queries as much smaller: the same model, until keys are stored at a scale of 1.
#[test]
fn keys_beyond_a_scale_of_one_are_warned_of_and_mended() {
    let scene = demo();
    scale(&scene, |name| match name {
        name if name.contains("k_proj") => 1000.0,
        name if name.contains("q_proj") => 0.001,
        _ => 1.0,
    });
    let limit = ["--max-ppl-increase", "1%"];
    let run = scene.run(&[&["eval", "kv", "model", "--kv-cache-dtype", "fp8"], &HOW[..], &limit].concat());
    run.ended(1).says(&["a cache of fp8 (1.0) raises the perplexity"]);
    let report = scene.run(&[&["eval", "kv", "model", "--json"], &HOW[..]].concat()).ok().json();
    assert!(report["warnings"][0].as_str().unwrap().contains("--kv-cache fp8"), "{report}");
    let kl = |scales| number(entry(&report, "fp8", scales), "/mean_kl");
    assert!(kl("unit") > 20.0 * kl("proposed"), "{} {}", kl("unit"), kl("proposed"));

    let make = ["gptq", "model", "--bits", "8", "--format", "compressed-tensors", "--kv-cache", "fp8", "--no-eval"];
    scene.run(&[&make[..], &["--nsamples", "4", "--seqlen", "128", "-o", "stored"]].concat()).ok();
    let report = scene.run(&[&["eval", "kv", "stored", "--json"], &HOW[..], &limit].concat()).ok().json();
    assert_eq!(report["warnings"], Value::Array(vec![]));
    assert!(number(entry(&report, "fp8", "calibrated"), "/ratio") < 1.01);
}

/// A key bias as Qwen 2 has them, more than twice what E4M3 holds.
#[test]
fn a_large_key_bias_is_caught() {
    let scene = Scene::tiny("qwen2");
    scale(&scene, |name| if name.ends_with("k_proj.bias") { 4000.0 } else { 1.0 });
    let model = open(&scene.model());
    let (tokens, _) = golden_logits(&fixture("families/qwen2/golden.safetensors"));
    let windows = [Window { tokens, score_from: 1 }];
    let kind = CacheType::Fp8E4m3;
    let found = calibrated(&model, &windows, &[(kind, Sharing::Head)], &mut |_, _| Ok(())).unwrap().remove(0);
    assert!(found.iter().flat_map(|layer| &layer.keys).any(|scale| *scale > 2.0), "{found:?}");
    let setting = |scales| Setting { kind, scales };
    let settings = [setting(None), setting(Some(found))];
    let errors = head_errors(&model, &windows, &settings, &mut |_, _| Ok(())).unwrap();
    let worst = |grid: &[Vec<f64>]| grid.iter().flatten().copied().fold(0.0, f64::max);
    assert!(worst(&errors[0].keys) > 0.5 && worst(&errors[1].keys) < 0.0625, "{errors:?}");
    let baseline = Setting { kind: CacheType::F32, scales: None };
    let found = predictions(&model, &windows, &baseline, &settings, &mut |_, _| Ok(())).unwrap();
    let kl = |i: usize| Divergence::of(&found[i]).unwrap().kl.mean;
    // A bias takes away digits even where a scale holds it.
    assert!(kl(0) > 2.0 * kl(1), "{} {}", kl(0), kl(1));
}

/// Scales lie in the octave above that of the largest magnitude, and what attention makes of keys and values is nearer to
/// what it was than with that.
#[test]
fn found_scales_err_less() {
    let scene = demo();
    let model = open(&scene.model());
    let window = |seed: u32| Window { tokens: (0..96).map(|i| (i * 37 + seed * 101) % 2000).collect(), score_from: 1 };
    let windows = [window(1), window(2)];
    // Integers get the largest magnitude itself.
    let wanted = [(CacheType::Fp8E4m3, Sharing::Layer), (CacheType::Int8, Sharing::Layer)];
    let mut all = calibrated(&model, &windows, &wanted, &mut |_, _| Ok(())).unwrap();
    let (whole, found) = (all.remove(1), all.remove(0));
    let unit = CacheType::Int8.largest() / CacheType::Fp8E4m3.largest();
    let scaled = |scales: &[f32]| scales.iter().map(|s| s * unit).collect::<Vec<f32>>();
    let base: Arc<[LayerScales]> =
        whole.iter().map(|s| LayerScales { keys: scaled(&s.keys), values: scaled(&s.values) }).collect();
    let mut moved = 0;
    for (base, found) in base.iter().zip(found.iter()) {
        for (base, found) in base.keys.iter().chain(&base.values).zip(found.keys.iter().chain(&found.values)) {
            let step = (found / base).log2() * 8.0;
            assert!((step - step.round()).abs() < 1e-3 && (0.0..8.0).contains(&step.round()), "{base} {found}");
            moved += usize::from(step.round() > 0.0);
        }
    }
    assert!(moved > 0);
    let settings = [base, found].map(|scales| Setting { kind: CacheType::Fp8E4m3, scales: Some(scales) });
    let errors = head_errors(&model, &windows, &settings, &mut |_, _| Ok(())).unwrap();
    let squares = |i: usize| errors[i].output.iter().flatten().map(|e| e * e).sum::<f64>();
    assert!(squares(1) < squares(0), "{} {}", squares(1), squares(0));
}

/// Caches read again what they hold: windows through a cache of f32 give what a pass without a cache gives.
#[test]
fn an_exact_cache_changes_nothing() {
    let model = open(&fixture("families/gemma3_text"));
    let (tokens, _) = golden_logits(&fixture("families/gemma3_text/golden.safetensors"));
    let windows = [Window { tokens: tokens.clone(), score_from: tokens.len() / 2 }, Window { tokens, score_from: 1 }];
    let exact = Setting { kind: CacheType::F32, scales: None };
    let found = predictions(&model, &windows, &exact, std::slice::from_ref(&exact), &mut |_, _| Ok(())).unwrap();
    let scored: usize = windows.iter().map(Window::scored).sum();
    assert_eq!(found[0].len(), scored);
    assert!(found[0].iter().all(|p| p.kl == 0.0 && p.same_top));
    let asked = windows.iter().map(|w| quantkit::engine::logits::Asked { tokens: &w.tokens, from: w.score_from });
    let whole = quantkit::engine::logits::Predictions::new(&model, asked.collect()).unwrap();
    let vocab = model.config.vocab;
    let targets = windows.iter().flat_map(|w| &w.tokens[w.score_from..]);
    for ((row, target), p) in whole.logits(0..scored).unwrap().chunks(vocab).zip(targets).zip(&found[0]) {
        let nll = quantkit::evaluate::divergence::from_logits(row, row, *target).nll_artifact;
        assert!((nll - p.nll_reference).abs() < 1e-4, "{nll} {}", p.nll_reference);
    }
}
