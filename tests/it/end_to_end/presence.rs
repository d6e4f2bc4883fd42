//! Tensors that the config does not tell of: an output head beside tied embeddings, biases, tensors that nothing reads.

use std::collections::BTreeMap;

use half::f16;
use quantkit::format::gguf::read::GgufFile;
use safetensors::Dtype;
use serde_json::{Value, json};

use super::gguf::{byte_level_tokenizer, perplexity};
use super::number;
use crate::support::scene::{Scene, Stored, tensors};

const HEAD: &str = "lm_head.weight";
const TABLE: &str = "model.embed_tokens.weight";
const ATTENTION: [&str; 4] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"];
const MLP: [&str; 3] = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"];

/// Every quantizer, with what it needs of the tiny models.
const QUANTIZERS: [&[&str]; 5] = [
    &["gptq", "model", "--group-size", "32", "--calib", "calib.txt", "--nsamples", "4", "--seqlen", "32"],
    &["awq", "model", "--group-size", "32", "--calib", "calib.txt", "--nsamples", "4", "--seqlen", "32"],
    &["smoothquant", "model", "--calib", "calib.txt", "--nsamples", "4", "--seqlen", "32"],
    &["fp8", "model"],
    &["rtn", "model", "--bits", "8", "--format", "compressed-tensors", "--group-size", "32"],
];

/// What they measure, two windows as [`own_of`] does.
const MEASURED: [&str; 4] = ["--eval-text", "eval.txt", "--eval-windows", "2"];

/// A family's model that becomes a GGUF file too.
fn model(family: &str) -> Scene {
    let scene = Scene::tiny(family);
    scene.write("model/tokenizer.json", byte_level_tokenizer());
    scene
}

fn say(scene: &Scene, key: &str, value: impl Into<Value>) {
    scene.edit_json("model/config.json", |config| config[key] = value.into());
}

/// Small numbers that no training has made.
fn made(rows: usize, cols: Option<usize>) -> Stored {
    let shape: Vec<usize> = [rows].into_iter().chain(cols).collect();
    let len = shape.iter().product::<usize>();
    let value = |i: usize| f16::from_f32(((i * 7919 + 13) % 101) as f32 / 250.0 - 0.2);
    Stored { dtype: Dtype::F16, shape, data: (0..len).flat_map(|i| value(i).to_le_bytes()).collect() }
}

fn add_head(scene: &Scene, rows: usize) {
    scene.edit_weights(|tensors| drop(tensors.insert(HEAD.into(), made(rows, Some(64)))));
}

/// Biases of some linears in some layers.
fn add_biases(scene: &Scene, layers: &[usize], names: &[&str]) {
    scene.edit_weights(|tensors| {
        for module in layers.iter().flat_map(|i| names.iter().map(move |name| format!("model.layers.{i}.{name}"))) {
            let rows = tensors[&format!("{module}.weight")].shape[0];
            tensors.insert(format!("{module}.bias"), made(rows, None));
        }
    });
}

fn biases(of: &BTreeMap<String, Stored>) -> BTreeMap<&String, &Stored> {
    of.iter().filter(|(name, _)| name.ends_with(".bias")).collect()
}

fn near(found: f64, wanted: f64, what: &str) {
    assert!((found / wanted - 1.0).abs() < 1e-5, "{what}: {found}, not {wanted}");
}

/// The folder, its GGUF file and the folder made of that are one model, whose perplexity is returned.
fn one_model(scene: &Scene) -> f64 {
    scene.run(&["gguf", "model", "--type", "F32", "-o", "model.gguf", "--overwrite"]).ok();
    scene.run(&["convert", "model.gguf", "-o", "back", "--dtype", "f32"]).ok();
    let folder = perplexity(scene, &["model"]);
    for other in ["model.gguf", "back"] {
        near(perplexity(scene, &[other]), folder, other);
    }
    std::fs::remove_dir_all(scene.path("back")).unwrap();
    folder
}

#[test]
fn a_head_that_differs_is_the_head_everywhere() {
    let scene = model("llama3");
    let tied = perplexity(&scene, &["model"]);
    add_head(&scene, 128);
    let said = ["config.json says `tie_word_embeddings` true", "`lm_head.weight` is stored and differs"];
    scene.run(&["eval", "ppl", "model", "--text", "eval.txt", "--max-windows", "1"]).ok().says(&said);
    let own = one_model(&scene);
    assert!((own / tied - 1.0).abs() > 0.05, "the head makes no difference: {own}, {tied}");
    scene.run(&["gguf", "model", "--type", "F32", "-o", "model.gguf", "--overwrite"]).ok().says(&said);
    assert!(GgufFile::open(&scene.path("model.gguf")).unwrap().tensor("output.weight").is_some());
    let source = tensors(&scene.path("model/model.safetensors"));
    for (i, quantizer) in QUANTIZERS.iter().enumerate() {
        let out = format!("q{i}");
        let ran = scene.run(&[quantizer, &["-o", &out, "--json"][..], &MEASURED[..]].concat()).ok().says(&said);
        near(number(&ran.json(), "/perplexity_before/perplexity"), own_of(&scene), quantizer[0]);
        // Said once, of the source: the artifact's config is right.
        assert_eq!(ran.stderr.matches(said[1]).count(), 1, "{}", ran.stderr);
        assert_eq!(scene.json(&format!("{out}/config.json"))["tie_word_embeddings"], false, "{quantizer:?}");
        let stored = tensors(&scene.path(&format!("{out}/model.safetensors")));
        assert_eq!((&stored[HEAD], &stored[TABLE]), (&source[HEAD], &source[TABLE]), "{quantizer:?}");
    }
    let plan = scene.run(&["plan", "model", "--json"]).ok().says(&said).json();
    assert!(plan["warnings"][0].as_str().unwrap().contains(said[1]), "{plan}");
    let facts = scene.run(&["inspect", "model", "--json"]).ok().says(&said).json();
    assert_eq!(facts["architecture"]["tied"], false);
    scene.run(&["generate", "model", "--prompt", "the", "--max-tokens", "1"]).ok().says(&said);
    let validate = ["validate", "q0", "--reference", "model", "--skip", "kv,spec,modules,control", "--json", "-o", "r"];
    let text = ["--text", "eval.txt", "--window", "32", "--max-windows", "1"];
    let report = scene.run(&[&validate[..], &text].concat()).says(&said).json();
    let check = report["checks"].as_array().unwrap().iter().find(|check| check["id"] == "config.tensors").unwrap();
    assert_eq!(check["status"], "warn");
    assert!(check["message"].as_str().unwrap().starts_with("the reference: config.json says"), "{check}");
}

/// The perplexity that quantizers measure first.
fn own_of(scene: &Scene) -> f64 {
    let args = ["eval", "ppl", "model", "--text", "eval.txt", "--window", "64", "--max-windows", "2", "--json"];
    number(&scene.run(&args).ok().json(), "/perplexity")
}

/// The same numbers in another type are the same head: one tensor is written, and the flag stays.
#[test]
fn a_head_that_repeats_the_embedding_is_left_out() {
    let scene = model("llama3");
    scene.tiny_run(&["gptq", "model", "-o", "before", "--no-eval"]).ok();
    let tied = perplexity(&scene, &["model"]);
    for dtype in [Dtype::F16, Dtype::F32] {
        scene.edit_weights(|tensors| {
            let table = tensors[TABLE].clone();
            let wide = |b: &[u8]| f16::from_le_bytes([b[0], b[1]]).to_f32().to_le_bytes();
            let data = match dtype {
                Dtype::F16 => table.data,
                _ => table.data.chunks_exact(2).flat_map(wide).collect(),
            };
            tensors.insert(HEAD.into(), Stored { dtype, shape: table.shape, data });
        });
        assert_eq!(one_model(&scene), tied);
        assert!(GgufFile::open(&scene.path("model.gguf")).unwrap().tensor("output.weight").is_none());
        let out = format!("of-{dtype:?}");
        let ran = scene.tiny_run(&["gptq", "model", "-o", &out, "--no-eval", "--json"]).ok();
        assert!(!ran.stderr.contains("lm_head") && ran.json()["unread_tensors"].is_null(), "{}", ran.stderr);
        assert_eq!(scene.read(&format!("{out}/model.safetensors")), scene.read("before/model.safetensors"));
        assert_eq!(scene.json(&format!("{out}/config.json"))["tie_word_embeddings"], true);
    }
}

/// By every command, whatever the config says of ties.
#[test]
fn a_head_of_another_shape_is_refused() {
    let scene = model("llama3");
    add_head(&scene, 127);
    let words = ["tensor `lm_head.weight` has shape [127, 64]", "asks for [128, 64]"];
    for tied in [true, false] {
        say(&scene, "tie_word_embeddings", tied);
        refused_by_all(&scene, &words);
    }
}

#[track_caller]
fn refused_by_all(scene: &Scene, words: &[&str]) {
    scene.refused(&["eval", "ppl", "model", "--text", "eval.txt"], words);
    scene.refused(&["gptq", "model", "-o", "out"], words);
    scene.refused(&["rtn", "model", "-o", "out"], words);
    scene.refused(&["gguf", "model", "-o", "out.gguf"], words);
    scene.refused(&["imatrix", "model", "-o", "out.gguf"], words);
    scene.refused(&["plan", "model"], words);
    scene.refused(&["generate", "model", "--prompt", "x"], words);
    scene.run(&["inspect", "model"]).ended(1).says(words);
}

#[test]
fn a_head_that_is_missing_is_named() {
    let scene = model("llama3");
    let missing = "tensor `lm_head.weight` is missing from `model`";
    say(&scene, "tie_word_embeddings", false);
    refused_by_all(&scene, &[missing, "config.json says `tie_word_embeddings` false", "set the key to true"]);
    scene.edit_json("model/config.json", |config| drop(config.as_object_mut().unwrap().remove("tie_word_embeddings")));
    refused_by_all(&scene, &[missing, "config.json does not say `tie_word_embeddings`, which means false for Llama"]);
    // A family for which silence means true.
    let scene = model("gemma3_text");
    let tied = perplexity(&scene, &["model"]);
    scene.edit_json("model/config.json", |config| drop(config.as_object_mut().unwrap().remove("tie_word_embeddings")));
    assert_eq!(perplexity(&scene, &["model"]), tied);
    add_head(&scene, 128);
    let args = ["rtn", "model", "-o", "out", "--no-eval"];
    scene
        .tiny_run(&args)
        .ok()
        .says(&["does not say `tie_word_embeddings`, which means true for Gemma 3, but `lm_head"]);
    assert_eq!(scene.json("out/config.json")["tie_word_embeddings"], false);
    one_model(&scene);
}

/// Which of the two levels of a multimodal config counts differs by program: the tensors decide.
#[test]
fn two_levels_that_disagree() {
    let scene = model("gemma3_text");
    scene.edit_json("model/config.json", |config| {
        let wrapper = json!({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"});
        let text = std::mem::replace(config, wrapper);
        config["text_config"] = text;
    });
    let tied = perplexity(&scene, &["model"]);
    for (outer, inner) in [(true, false), (false, true)] {
        scene.edit_json("model/config.json", |config| {
            config["tie_word_embeddings"] = outer.into();
            config["text_config"]["tie_word_embeddings"] = inner.into();
        });
        let both = format!("`tie_word_embeddings` {outer} and `text_config.tie_word_embeddings` {inner}, but no `");
        let eval = ["eval", "ppl", "model", "--text", "eval.txt", "--max-windows", "1"];
        scene.run(&eval).ok().says(&[&both, "embed_tokens.weight` is the output head"]);
        assert_eq!(perplexity(&scene, &["model"]), tied);
        scene.tiny_run(&["rtn", "model", "-o", "out", "--no-eval", "--overwrite"]).ok();
        let written = scene.json("out/config.json");
        assert_eq!(
            (&written["tie_word_embeddings"], &written["text_config"]["tie_word_embeddings"]),
            (&true.into(), &true.into())
        );
    }
}

/// Of q, k and v alone, as llama.cpp takes them: no config of Llama asks for these.
#[test]
fn biases_count_where_they_are() {
    let scene = model("llama3");
    let without = perplexity(&scene, &["model"]);
    add_biases(&scene, &[0, 1], &ATTENTION[..3]);
    let said = ["6 linears (first `model.layers.0.self_attn.k_proj`) have a bias that config.json does not ask for"];
    scene.run(&["eval", "ppl", "model", "--text", "eval.txt", "--max-windows", "1"]).ok().says(&said);
    let with = one_model(&scene);
    assert!((with / without - 1.0).abs() > 1e-3, "biases make no difference: {with}, {without}");
    scene.run(&["convert", "model.gguf", "-o", "back"]).ok().says(&["no key of a Llama 1, 2, 3; SmolLM2 config.json"]);
    assert_eq!(scene.json("back/config.json")["attention_bias"], false);
    let source = tensors(&scene.path("model/model.safetensors"));
    for (i, quantizer) in QUANTIZERS.iter().enumerate() {
        let out = format!("q{i}");
        let args = [quantizer, &["-o", &out, "--json"][..], &MEASURED[..]].concat();
        let ran = scene.run(&args).ok().says(&said).says(&["transformers 5: biases that config.json does not"]);
        near(number(&ran.json(), "/perplexity_before/perplexity"), own_of(&scene), quantizer[0]);
        let after = number(&ran.json(), "/perplexity_after/perplexity");
        assert!((after / own_of(&scene) - 1.0).abs() < 0.3, "{quantizer:?}: {after}");
        let stored = tensors(&scene.path(&format!("{out}/model.safetensors")));
        assert!(biases(&stored).keys().eq(biases(&source).keys()), "{quantizer:?}");
        let again = perplexity(&scene, &[&out]);
        assert!((again / with - 1.0).abs() < 0.3, "{quantizer:?}: {again} against {with}");
    }
    let refused = ["--for transformers: transformers 5: biases that config.json does not ask for are left out"];
    scene.refused(&["rtn", "model", "-o", "out", "--group-size", "32", "--for", "transformers"], &refused);
}

/// Where a key asks for them, it is written, and every engine takes the artifact.
#[test]
fn biases_that_a_config_can_ask_for() {
    for (names, key) in [(&ATTENTION[..], "attention_bias"), (&MLP[..], "mlp_bias")] {
        let scene = model("llama3");
        add_biases(&scene, &[0, 1], names);
        let with = one_model(&scene);
        let args = ["rtn", "model", "--bits", "8", "-o", "w8", "--no-eval", "--for", "transformers"];
        let ran = scene.tiny_run(&args).ok().says(&["that config.json does not ask for"]);
        assert!(!ran.stderr.contains("left out"), "{}", ran.stderr);
        let config = scene.json("w8/config.json");
        for other in ["attention_bias", "mlp_bias"] {
            assert_eq!(config[other], json!(other == key), "{other}");
        }
        let facts = scene.run(&["inspect", "w8", "--json"]).ok().json();
        assert_eq!((&facts["warnings"], &facts["consumers"][0]["loads"]), (&json!([]), &json!(true)));
        assert!((perplexity(&scene, &["w8"]) / with - 1.0).abs() < 0.1);
        scene.run(&["convert", "model.gguf", "-o", "back"]).ok();
        assert_eq!(scene.json("back/config.json")[key], true);
    }
}

/// Every linear of every family, and of one layer alone.
#[test]
fn no_bias_of_any_family_is_dropped() {
    let all: Vec<&str> = ATTENTION.into_iter().chain(MLP).collect();
    for family in ["llama3", "qwen2", "qwen3", "gemma3_text", "smollm2"] {
        for names in all.chunks(1).chain([&all[..]]) {
            let scene = model(family);
            scene.edit_weights(|tensors| {
                // Those that the family always has.
                tensors.iter_mut().filter(|(name, _)| name.ends_with(".bias")).for_each(|(_, t)| t.data.fill(0));
            });
            let without = perplexity(&scene, &["model"]);
            add_biases(&scene, &[0], names);
            let with = if names.len() > 1 { one_model(&scene) } else { perplexity(&scene, &["model"]) };
            // A bias of all keys adds the same to every score, but for rotation.
            assert!((with / without - 1.0).abs() > 1e-7, "{family} {names:?}: {with}, {without}");
        }
    }
    let scene = model("qwen3");
    add_biases(&scene, &[0], &all);
    let said = "for the architecture `qwen3` llama.cpp takes biases of attn_q, attn_k, attn_v only";
    let file = ["gguf", "model", "--type", "F16", "-o", "model.gguf"];
    scene.run(&file).ok().says(&[said, "4 (first `blk.0.ffn_down.bias`)"]);
    let facts = scene.run(&["inspect", "model.gguf", "--json"]).ok().json();
    assert_eq!(facts["consumers"][0]["loads"], false);
    assert!(facts["consumers"][0]["refusals"][0].as_str().unwrap().starts_with(said), "{facts}");
}

#[test]
fn biases_that_are_asked_for_and_missing() {
    for (module, why) in [
        ("model.layers.1.self_attn.o_proj", "`attention_bias` is true"),
        ("model.layers.0.mlp.up_proj", "`mlp_bias` is true"),
    ] {
        let scene = model("llama");
        scene.edit_weights(|tensors| drop(tensors.remove(&format!("{module}.bias"))));
        let missing = format!("tensor `{module}.bias` is missing from `model`");
        refused_by_all(&scene, &[&missing, "the config asks for it", why]);
    }
    let scene = model("qwen2");
    scene.edit_weights(|tensors| drop(tensors.remove("model.layers.1.self_attn.k_proj.bias")));
    let words = ["`model.layers.1.self_attn.k_proj.bias` is missing", "q, k and v of Qwen2, Qwen2.5 have one"];
    refused_by_all(&scene, &words);
}

/// Some writers store zeros for every linear: they change nothing, and nothing is said.
#[test]
fn biases_of_zero_are_no_matter() {
    let scene = model("llama3");
    let without = perplexity(&scene, &["model"]);
    add_biases(&scene, &[0, 1], &ATTENTION);
    scene.edit_weights(|tensors| {
        tensors.iter_mut().filter(|(name, _)| name.ends_with(".bias")).for_each(|(_, tensor)| tensor.data.fill(0));
    });
    assert_eq!(perplexity(&scene, &["model"]), without);
    let ran = scene.tiny_run(&["rtn", "model", "-o", "out", "--no-eval"]).ok();
    assert!(!ran.stderr.contains("bias"), "{}", ran.stderr);
    assert_eq!(scene.json("out/config.json")["attention_bias"], false);
}

/// A layer more than the config says, and heads of another kind, are named by all that measures or writes.
#[test]
fn tensors_that_are_not_read_are_listed() {
    let scene = model("llama3");
    scene.edit_weights(|tensors| {
        tensors.insert("mtp.eh_proj.weight".into(), made(64, Some(64)));
        tensors.insert("model.layers.0.self_attn.rotary_emb.inv_freq".into(), made(8, None));
    });
    say(&scene, "num_hidden_layers", 1);
    let (count, first) = (10, "model.layers.1.input_layernorm.weight");
    let size = 8192 + 2 * (2 * 64 + 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64);
    let said = ["warning: 10 tensors", " are not read: `model.layers.1.input_layernorm.weight`", "and 5 more"];
    let listed = |object: &Value, key: &str| {
        let found = &object[key];
        assert_eq!((&found["count"], &found["bytes"]), (&json!(count), &json!(size)), "{object}");
        assert_eq!((&found["first"][0], &found["layers"]), (&json!(first), &json!(1)), "{object}");
    };
    let text = ["--text", "eval.txt", "--window", "32", "--max-windows", "1"];
    let run = |args: &[&str]| {
        let ran = scene.run(&[args, &["--json"]].concat()).ok().says(&said);
        listed(&ran.json(), "unread_tensors");
        ran
    };
    for (i, quantizer) in QUANTIZERS.iter().enumerate() {
        let out = format!("q{i}");
        let args = [quantizer, &["-o", &out, "--no-eval", "--json"][..]].concat();
        let ran = scene.run(&args).ok().says(&said);
        listed(&ran.json(), "unread_tensors");
        assert_eq!(ran.stderr.matches("are not read").count(), 1, "{}", ran.stderr);
    }
    run(&[&["eval", "ppl", "model"], &text[..]].concat());
    run(&[&["eval", "kv", "model"], &text[..]].concat());
    let compared = run(&[&["eval", "kl", "q0", "--reference", "model"], &text[..]].concat());
    listed(&compared.json(), "reference_unread_tensors");
    let options = ["--max-prompts", "1", "--max-tokens", "2", "--prompt-tokens", "8", "--no-speed"];
    let pair = ["eval", "spec", "model", "--draft", "model", "--text", "eval.txt", "--max-windows", "1"];
    listed(&run(&[&pair[..], &options].concat()).json(), "draft_unread_tensors");
    run(&["gguf", "model", "--type", "F16", "-o", "model.gguf"]);
    run(&["imatrix", "model", "--calib", "calib.txt", "--chunks", "1", "-o", "imatrix.gguf"]);
    run(&["generate", "model", "--prompt", "the", "--max-tokens", "1"]);
    run(&["generate", "model", "--prompt", "the", "--max-tokens", "1", "--num-samples", "2"]);
    run(&["plan", "model"]);
    run(&["inspect", "model"]);
    let text_of = scene.run(&["gguf", "model", "--type", "F16", "-o", "again.gguf"]).ok();
    assert!(text_of.stdout.contains("left out: 10 tensors"), "{}", text_of.stdout);

    let skipped = ["--skip", "kv,spec,modules,control", "--json"];
    for (artifact, dropped) in [("q0", false), ("model.gguf", true)] {
        let args = [&["validate", artifact, "--reference", "model", "-o", "r"], &text[..], &skipped].concat();
        let report = scene.run(&args).ok().says(&said).json();
        let checks = report["checks"].as_array().unwrap();
        let of = |id: &str| checks.iter().filter(|check| check["id"] == id).collect::<Vec<_>>();
        let unread = of("tensors.unread");
        assert_eq!(unread.len(), if dropped { 1 } else { 2 }, "{unread:?}");
        for check in unread {
            assert_eq!(check["status"], "warn");
            assert!(check["message"].as_str().unwrap().contains("10 tensors"), "{check}");
        }
        assert_eq!(of("tensors.dropped").iter().any(|check| check["status"] == "warn"), dropped);
        std::fs::remove_dir_all(scene.path("r")).unwrap();
    }
}

/// A GGUF file with a block more than its metadata say.
#[test]
fn blocks_of_a_file_beyond_its_count() {
    let scene = model("llama3");
    scene.run(&["gguf", "model", "--type", "F16", "-o", "model.gguf"]).ok();
    let mut file = scene.read("model.gguf");
    let key = b"llama.block_count";
    let at = file.windows(key.len()).position(|window| window == key).unwrap() + key.len() + 4;
    assert_eq!(file[at], 2);
    file[at] = 1;
    scene.write("model.gguf", file);
    let args = ["eval", "ppl", "model.gguf", "--text", "eval.txt", "--max-windows", "1", "--json"];
    let found = scene.run(&args).ok().says(&["9 tensors", "are not read"]).json();
    assert_eq!((&found["unread_tensors"]["count"], &found["unread_tensors"]["layers"]), (&json!(9), &json!(1)));
    let facts = scene.run(&["inspect", "model.gguf", "--json"]).ok().json();
    assert_eq!((&facts["unread_tensors"]["count"], &facts["consumers"][0]["loads"]), (&json!(9), &json!(false)));
    scene.run(&["convert", "model.gguf", "-o", "back", "--json"]).ok().says(&["9 tensors"]);
}
