//! Speculative decoding, in the engine and by `quantkit eval spec` and `quantkit generate --draft`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use quantkit::backend::Backend;
use quantkit::backend::cache::{CacheType, LayerScales};
use quantkit::backend::cpu::Cpu;
use quantkit::backend::cuda::{Cuda, CudaOptions};
use quantkit::checkpoint::Checkpoint;
use quantkit::engine::cache::CacheOptions;
use quantkit::engine::generate::{Stop, generate};
use quantkit::engine::sampler::{Sampler, SamplerOptions};
use quantkit::engine::speculate::{self, Ahead, Rounds, SpeculateError, Speculation};
use quantkit::evaluate::acceptance::{AcceptanceFigures, chains, replay};
use quantkit::evaluate::cache_error::Setting;
use quantkit::evaluate::speculation::{Task, measure};
use quantkit::format;
use quantkit::model::Model;
use safetensors::Dtype;
use serde_json::Value;

use super::number;
use crate::cuda;
use crate::support::emulator;
use crate::support::scene::{Scene, Stored, copy_folder};

fn demo(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("calib/demo").join(name)
}

fn open(dir: &Path, backend: Arc<dyn Backend>) -> Model {
    Model::open(format::open(Checkpoint::open(dir).unwrap()).unwrap().source, backend).unwrap()
}

/// A scene with the demo target rounded to 4 bits in `w4`.
fn rounded() -> Scene {
    let scene = Scene::demo();
    copy_folder(&demo("target"), &scene.model());
    scene.run(&["rtn", "model", "--bits", "4", "-o", "w4", "--no-eval"]).ok();
    scene
}

/// Tokens that look like text to nobody.
fn prompt(number: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| if i == 0 { 0 } else { 258 + (i * 37 + number * 211) % 700 }).collect()
}

fn greedy() -> Sampler {
    Sampler::new(SamplerOptions::default()).unwrap()
}

fn alone(model: &Model, prompt: &[u32], end: &[u32], limit: usize) -> (Vec<u32>, Stop) {
    let mut tokens = Vec::new();
    let stop = generate(model, prompt, end, limit, &mut greedy(), &mut |token| {
        tokens.push(token);
        true
    });
    (tokens, stop.unwrap())
}

fn together(
    (target, draft): (&Model, &Model),
    prompt: &[u32],
    end: &[u32],
    limit: usize,
    ahead: Ahead,
    sampler: &mut Sampler,
) -> (Vec<u32>, Stop, Rounds) {
    let mut tokens = Vec::new();
    let each = &mut |token| {
        tokens.push(token);
        true
    };
    let with = Speculation { draft, ahead, cache: None, draft_scales: None };
    let (stop, rounds) = speculate::generate(target, &with, prompt, end, limit, sampler, each).unwrap();
    (tokens, stop, rounds)
}

/// The text is the target's, token for token, wherever it ends.
fn same_text(target: &Model, draft: &Model, limits: &[(usize, usize)], aheads: &[Ahead]) {
    for (i, &(len, limit)) in limits.iter().enumerate() {
        let prompt = prompt(i as u32, len);
        let (tokens, stop) = alone(target, &prompt, &[], limit);
        // One of the last tokens as the end of the text.
        let end = [tokens[tokens.len() * 3 / 4]];
        let ended = alone(target, &prompt, &end, limit);
        assert_eq!(ended.1, Stop::End);
        for &ahead in aheads {
            let (found, why, rounds) = together((target, draft), &prompt, &[], limit, ahead, &mut greedy());
            assert_eq!((&found, why), (&tokens, stop), "{ahead:?}, {len} tokens of prompt");
            let written: usize = rounds.rounds.iter().map(|round| round.accepted).sum::<usize>() + rounds.passes + 1;
            assert_eq!(written, tokens.len(), "{rounds:?}");
            let (found, why, _) = together((target, draft), &prompt, &end, limit, ahead, &mut greedy());
            assert_eq!((found, why), ended, "{ahead:?}, ended");
        }
    }
}

const AHEAD: [Ahead; 3] = [Ahead::Fixed(1), Ahead::Fixed(5), Ahead::Auto];

#[test]
fn the_text_is_the_target_s() {
    let (target, draft) = (open(&demo("target"), Arc::new(Cpu)), open(&demo("draft"), Arc::new(Cpu)));
    // The last fills the context of 256 tokens.
    same_text(&target, &draft, &[(1, 1), (2, 2), (30, 50), (231, 60)], &AHEAD);
    // The models the other way round, and one with itself: all of its proposals stand.
    same_text(&draft, &target, &[(9, 40)], &AHEAD);
    let (_, _, rounds) = together((&target, &target), &prompt(3, 9), &[], 41, Ahead::Fixed(4), &mut greedy());
    assert_eq!((rounds.passes, rounds.acceptance_rate()), (8, Some(1.0)));
}

#[test]
fn the_text_is_the_artifact_s() {
    let scene = rounded();
    let (four, draft) = (open(&scene.path("w4"), Arc::new(Cpu)), open(&demo("draft"), Arc::new(Cpu)));
    same_text(&four, &draft, &[(5, 40), (230, 60)], &AHEAD);
    // An artifact as the draft of its source.
    let target = open(&demo("target"), Arc::new(Cpu));
    same_text(&target, &four, &[(12, 40)], &[Ahead::Fixed(4)]);
    let (_, _, rounds) = together((&target, &four), &prompt(7, 12), &[], 60, Ahead::Fixed(4), &mut greedy());
    assert!(rounds.acceptance_rate().unwrap() > 0.5, "{rounds:?}");
}

#[test]
fn the_text_is_the_target_s_on_a_device() {
    emulator::preload();
    let scene = rounded();
    let backend: Arc<dyn Backend> = Arc::new(Cuda::open(CudaOptions::default()).unwrap());
    let draft = open(&demo("draft"), backend.clone());
    for dir in [demo("target"), scene.path("w4")] {
        let target = open(&dir, backend.clone());
        same_text(&target, &draft, &[(6, 14)], &[Ahead::Fixed(3), Ahead::Auto]);
    }
}

/// A draft in a cache of 8 bits has its own scales there: a model that drafts for itself is always right.
#[test]
fn a_draft_has_its_own_scales() {
    let scene = Scene::demo();
    copy_folder(&demo("target"), &scene.model());
    scene.edit_weights(|tensors| {
        let layers: Vec<String> =
            tensors.keys().filter_map(|name| name.strip_suffix("k_proj.weight")).map(Into::into).collect();
        for (layer, name) in layers.iter().flat_map(|layer| [(layer, "k_scale"), (layer, "v_scale")]) {
            // So large that little is left of keys and values, which shows.
            let data = 1e4f32.to_le_bytes().to_vec();
            tensors.insert(format!("{layer}{name}"), Stored { dtype: Dtype::F32, shape: vec![1], data });
        }
    });
    let model = open(&scene.model(), Arc::new(Cpu));
    let own = model.cache_scales(CacheType::Fp8E4m3).unwrap();
    assert_eq!(own.as_ref().unwrap()[0], LayerScales { keys: vec![1e4], values: vec![1e4] });
    // Other types reach as far with theirs.
    let of_int8 = model.cache_scales(CacheType::Int8).unwrap().unwrap();
    assert!((of_int8[0].keys[0] * 127.0 - 1e4 * 448.0).abs() < 1.0, "{of_int8:?}");
    let text = |scales| {
        let cache = CacheOptions { kind: Some(CacheType::Fp8E4m3), scales, ..CacheOptions::for_sequences(1, 64) };
        let draft_scales = own.clone();
        let with = Speculation { draft: &model, ahead: Ahead::Fixed(4), cache: Some(cache), draft_scales };
        let each = &mut |_| true;
        speculate::generate(&model, &with, &prompt(3, 9), &[], 41, &mut greedy(), each).unwrap().1
    };
    assert_eq!(text(own.clone()).acceptance_rate(), Some(1.0));
    // The target's are not for the draft.
    assert!(text(None).acceptance_rate().unwrap() < 0.9);
}

#[test]
fn the_seed_decides() {
    let (target, draft) = (open(&demo("target"), Arc::new(Cpu)), open(&demo("draft"), Arc::new(Cpu)));
    let text = |seed, ahead| {
        let options = SamplerOptions { temperature: 0.8, top_p: 0.95, top_k: 100, seed };
        together((&target, &draft), &prompt(1, 8), &[], 40, ahead, &mut Sampler::new(options).unwrap())
    };
    for ahead in [Ahead::Fixed(3), Ahead::Auto] {
        let (one, again, other) = (text(1, ahead), text(1, ahead), text(2, ahead));
        assert_eq!((&one.0, &one.2.rounds), (&again.0, &again.2.rounds));
        assert_ne!(one.0, other.0);
        assert!(one.2.accepted() > 0 && one.2.accepted() < one.2.drafted(), "{:?}", one.2);
    }
}

#[test]
fn what_cannot_work_together_is_refused() {
    let target = open(&demo("target"), Arc::new(Cpu));
    let other = crate::support::fixture("families/llama");
    let other = open(&other, Arc::new(Cpu));
    let vocabulary = speculate::check(&target, &other, Ahead::Auto).unwrap_err();
    assert!(matches!(vocabulary, SpeculateError::Vocabulary { target: 2048, .. }), "{vocabulary}");
    for ahead in [0, 64] {
        let error = speculate::check(&target, &target, Ahead::Fixed(ahead)).unwrap_err();
        assert!(error.to_string().contains("1 to 63"), "{error}");
    }
}

/// Rates from chains are those of speculation itself.
#[test]
fn replays_are_what_happens() {
    let (target, draft) = (open(&demo("target"), Arc::new(Cpu)), open(&demo("draft"), Arc::new(Cpu)));
    let prompts: Vec<Vec<u32>> = (0..4).map(|i| prompt(i, 16)).collect();
    // Also where both models read their caches in few bits.
    let few_bits = [CacheType::Fp8E5m2, CacheType::Int8].map(|kind| [0, 1].map(|_| Setting { kind, scales: None }));
    for caches in few_bits.iter().map(Some).chain([None]) {
        let task = Task {
            prompts: &prompts,
            end: &[],
            max_tokens: 40,
            windows: &[],
            options: SamplerOptions::default(),
            ahead: 3,
            caches,
            speeds: true,
        };
        let found = measure(&target, &draft, &task, &mut |_, _| Ok::<_, std::io::Error>(())).unwrap();
        for (replay, speed) in found.replays.iter().zip(&found.speeds) {
            let measured = speed.measured.as_ref().unwrap();
            assert_eq!(measured.identical, Some(true));
            // Reading a text at once rounds otherwise than token by token, and loops are cut in both but not alike.
            assert!((replay.acceptance_rate - measured.acceptance_rate).abs() < 0.04, "{replay:?} {measured:?}");
            assert!((replay.mean_length - measured.mean_length).abs() < 0.12, "{replay:?} {measured:?}");
            assert!(
                replay.per_position.is_sorted_by(|a, b| a >= b) && measured.per_position.is_sorted_by(|a, b| a >= b)
            );
        }
        let json = serde_json::to_string(&found).unwrap();
        assert_eq!(serde_json::from_str::<AcceptanceFigures>(&json).unwrap(), found);
    }
}

/// Through caches that lose nothing the same is predicted as without; what others lose shows.
#[test]
fn chains_through_caches() {
    let (target, draft) = (open(&demo("target"), Arc::new(Cpu)), open(&demo("draft"), Arc::new(Cpu)));
    let texts: Vec<_> = (0..2).map(|i| (prompt(i, 20), prompt(i + 9, 40))).collect();
    let options = SamplerOptions { temperature: 1.0, ..SamplerOptions::default() };
    let overlaps = |caches: Option<&[Setting; 2]>| -> Vec<f64> {
        chains(&target, &draft, caches, &texts, options).unwrap().into_iter().flat_map(|chain| chain.overlap).collect()
    };
    let away = |kind, scales: Option<[&Model; 2]>| {
        let setting = |side: usize| Setting {
            kind,
            scales: scales.map(|models| {
                let far = LayerScales { keys: vec![1e4], values: vec![1e4] };
                vec![far; models[side].blocks.len()].into()
            }),
        };
        let found = overlaps(Some(&[setting(0), setting(1)]));
        overlaps(None).iter().zip(found).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
    };
    let far = away(CacheType::Int8, Some([&target, &draft]));
    let near = [CacheType::F32, CacheType::Int8, CacheType::Fp8E5m2].map(|kind| away(kind, None));
    assert!(near[0] < 1e-4 && near.is_sorted() && near[2] < far, "{near:?} {far}");
}

#[test]
fn caches_of_few_bits_are_measured() {
    let scene = Scene::demo();
    let found = spec(&scene, &["--kv-cache-dtype", "int8", "--kv-cache-scales", "calibrated", "--no-speed"]);
    assert_eq!(found["cache"], "int8");
    assert!((0.3..0.9).contains(&number(&found, "/text/alpha/mean")), "{found}");
    let exact = spec(&scene, &["--no-speed"]);
    assert_eq!(exact.get("cache"), None);
    let apart = (number(&found, "/text/alpha/mean") - number(&exact, "/text/alpha/mean")).abs();
    assert!(apart > 0.0 && apart < 0.02, "{apart}");
    let stored = ["eval", "spec", "--kv-cache-dtype", "fp8_e5m2", "--kv-cache-scales", "stored"];
    scene.refused(&stored, &["--kv-cache-scales stored", "no k_scale and v_scale"]);
}

/// What is accepted of samples does not hang on the seed.
#[test]
fn acceptance_is_the_same_for_other_seeds() {
    let (target, draft) = (open(&demo("target"), Arc::new(Cpu)), open(&demo("draft"), Arc::new(Cpu)));
    let rate = |seed: u64| {
        let options = SamplerOptions { temperature: 1.0, seed, ..SamplerOptions::default() };
        let texts: Vec<(Vec<u32>, Vec<u32>)> = (0..16u64)
            .map(|i| {
                let mut sampler = Sampler::new(SamplerOptions { seed: seed * 1000 + i, ..options }).unwrap();
                let (prompt, mut tokens) = (prompt(i as u32, 16), Vec::new());
                let each = &mut |token| {
                    tokens.push(token);
                    true
                };
                generate(&target, &prompt, &[], 60, &mut sampler, each).unwrap();
                (prompt, tokens)
            })
            .collect();
        replay(&chains(&target, &draft, None, &texts, options).unwrap(), 1).acceptance_rate
    };
    let rates = [1, 2, 3].map(rate);
    let (least, most) = rates.iter().fold((1.0f64, 0.0f64), |(l, m), r| (l.min(*r), m.max(*r)));
    assert!(most - least < 0.04 && least > 0.4, "{rates:?}");
}

const SMALL: [&str; 8] = ["--max-prompts", "3", "--max-tokens", "24", "--max-windows", "2", "--text", "eval.txt"];

fn spec(scene: &Scene, args: &[&str]) -> Value {
    scene.run(&[&["eval", "spec", "--json"], args, &SMALL].concat()).ok().json()
}

#[test]
fn the_demo_pair_is_measured() {
    let scene = Scene::demo();
    let found = spec(&scene, &["--no-speed", "--num-speculative-tokens", "3", "--min-acceptance", "0.1"]);
    assert_eq!((&found["target"], &found["draft"]), (&"quantkit-demo".into(), &"quantkit-demo-draft".into()));
    assert_eq!(found["per_position"].as_array().unwrap().len(), 3);
    assert_eq!(found["replays"].as_array().unwrap().len(), 8);
    assert!((0.3..0.9).contains(&number(&found, "/text/alpha/mean")), "{found}");
    assert!((5.0..6.5).contains(&number(&found, "/cost/size_ratio")), "{found}");
    let failed =
        scene.run(&[&["eval", "spec", "--no-speed", "--min-acceptance", "0.99"], &SMALL[..]].concat()).ended(1);
    failed.says(&["error: ", "the acceptance rate is", "less than 0.99"]);
}

#[test]
fn what_was_not_measured_is_not_told() {
    let scene = Scene::demo();
    let few = ["eval", "spec", "--max-prompts", "2", "--max-tokens", "1", "--max-windows", "0", "--no-speed"];
    let ran = scene.run(&few).ok();
    assert!(!ran.stdout.contains(" x") && ran.stdout.contains("too short to time"), "{}", ran.stdout);
    ran.says(&["no token was proposed"]);
    let found = scene.run(&[&few[..], &["--json"]].concat()).ok().json();
    for absent in ["/cost/ratio", "/speeds/0/expected_speedup", "/speeds/0/replayed_speedup"] {
        assert_eq!(found.pointer(absent), Some(&Value::Null), "{absent} in {found}");
    }
    let asked = scene.run(&[&few[..], &["--min-acceptance", "0.1"]].concat()).ended(1);
    asked.says(&["no acceptance rate was measured"]);
}

/// Nothing is proposed beyond the draft's context.
#[test]
fn chains_end_where_the_draft_does() {
    let scene = Scene::demo();
    copy_folder(&demo("draft"), &scene.model());
    scene.edit_json("model/config.json", |config| config["max_position_embeddings"] = 32.into());
    let (target, draft) = (open(&demo("target"), Arc::new(Cpu)), open(&scene.model(), Arc::new(Cpu)));
    let text = |i: u32, len: usize| (prompt(i, len), prompt(i + 9, 40));
    let texts = [text(0, 20), text(1, 32), text(2, 40)];
    let found = chains(&target, &draft, None, &texts, SamplerOptions::default()).unwrap();
    let lengths: Vec<[usize; 4]> =
        found.iter().map(|c| [c.tokens.len(), c.stood.len(), c.overlap.len(), c.looped.len()]).collect();
    assert_eq!(lengths, [[12; 4], [0; 4], [0; 4]]);
    same_text(&target, &draft, &[(20, 40)], &[Ahead::Fixed(3), Ahead::Auto]);
}

#[test]
fn an_artifact_is_the_draft_of_its_source() {
    let scene = rounded();
    let found = spec(&scene, &["model", "--draft", "w4", "--temperature", "1"]);
    assert_eq!((&found["target_method"], &found["target_format"]), (&Value::Null, &Value::Null));
    assert_eq!((&found["draft_method"], &found["draft_format"]), (&"rtn".into(), &"gptq".into()));
    let (alpha, rate) = (number(&found, "/text/alpha/mean"), number(&found, "/acceptance_rate"));
    assert!(alpha > 0.85 && rate > 0.75, "{found}");
    // Nothing is asked of sampled text but its distribution.
    assert_eq!(found.pointer("/speeds/0/measured/identical"), Some(&Value::Null));
}

#[test]
fn a_broken_draft_fails() {
    let scene = Scene::demo();
    copy_folder(&demo("draft"), &scene.model());
    scene.edit_weights(|tensors| {
        // Every row of the embedding becomes that of another token.
        let table = tensors.get_mut("model.embed_tokens.weight").unwrap();
        let row = table.data.len() / table.shape[0];
        table.data = table.data.chunks(row).rev().flatten().copied().collect();
    });
    let args = [&["eval", "spec", "--draft", "model", "--no-speed"], &SMALL[..]].concat();
    scene.run(&args).ended(1).says(&["next to none of the proposed tokens are accepted", "broken"]);
}

#[test]
fn drafts_with_other_tokens_are_refused() {
    let scene = Scene::demo();
    copy_folder(&demo("draft"), &scene.model());
    scene.edit_json("model/tokenizer.json", |tokenizer| {
        let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
        let name = |id: u64, vocab: &serde_json::Map<String, Value>| {
            vocab.iter().find(|(_, v)| v.as_u64() == Some(id)).map(|(k, _)| k.clone()).unwrap()
        };
        let (one, other) = (name(1501, vocab), name(1502, vocab));
        vocab.insert(one, 1502.into());
        vocab.insert(other, 1501.into());
    });
    let generate = ["generate", "--draft", "model", "--prompt", "A"];
    scene.refused(&generate, &["the draft's tokenizer is not the target's: token 1501 is"]);
    let scene = Scene::tiny("llama");
    scene.refused(&["generate", "--draft", "model", "--prompt", "A"], &["a vocabulary of 128 tokens", "2048"]);
    scene.refused(&["eval", "spec", "model"], &["--draft is missing"]);
    scene.run(&["generate", "--num-speculative-tokens", "3", "--prompt", "A"]).ended(2).says(&["--draft <MODEL>"]);
    let ahead = ["generate", "--draft", "x", "--num-speculative-tokens", "none", "--prompt", "A"];
    scene.run(&ahead).ended(2).says(&["a positive whole number or `auto`"]);
}

#[test]
fn generating_with_a_draft_changes_nothing() {
    let scene = Scene::demo();
    copy_folder(&demo("draft"), &scene.path("draft"));
    let base = ["generate", "--prompt", "The whale", "--max-tokens", "48"];
    let plain = scene.run(&base).ok().stdout;
    for ahead in ["2", "auto"] {
        let ran = scene.run(&[&base[..], &["--draft", "draft", "--num-speculative-tokens", ahead]].concat()).ok();
        assert_eq!(ran.stdout, plain);
        ran.says(&["proposed tokens stood", "passes of the model for"]);
    }
    let json = scene.run(&[&base[..], &["--draft", "draft", "--json"]].concat()).ok().json();
    assert!(number(&json, "/speculation/drafted") >= number(&json, "/speculation/accepted"), "{json}");
}

/// Both models on the device.
#[test]
fn the_demo_pair_on_a_device() {
    let scene = Scene::demo();
    let few = ["--max-prompts", "1", "--max-tokens", "6", "--max-windows", "0", "--no-speed", "--json"];
    let ran = cuda::run(&scene, &[&["eval", "spec"], &few[..]].concat(), false, &[]).ok().json();
    assert_eq!(number(&ran, "/tokens"), 6.0);
    assert_eq!(ran["text"], Value::Null);
}
