//! Values of a wrong type, and values that contradict each other: none of them becomes a default.

use std::path::Path;

use quantkit::format::gguf::read::GgufFile;
use quantkit::format::gguf::value::{Metadata, Value as Typed};
use quantkit::format::gguf::write::{Plan, TensorSpec, Writer};
use serde_json::{Value, json};

use super::unreadable;
use crate::support::repository;
use crate::support::scene::{Scene, copy_folder};

const EVAL: [&str; 5] = ["eval", "ppl", "model", "--text", "eval.txt"];

/// Sets what is at `pointer`; objects on the way are made.
fn set(file: &mut Value, pointer: &str, value: Value) {
    let mut at = file;
    for key in pointer.trim_start_matches('/').split('/') {
        at = &mut at[key];
    }
    *at = value;
}

/// A scene whose `model/` is the demo checkpoint.
fn demo() -> Scene {
    let scene = Scene::demo();
    copy_folder(&repository("calib/demo/target"), &scene.model());
    scene
}

fn perplexity(scene: &Scene) -> f64 {
    let ran = scene.run(&[&EVAL[..], &["--window", "128", "--max-windows", "1", "--json"]].concat());
    ran.ok().json()["perplexity"].as_f64().unwrap()
}

/// Each edit of `file` is refused by `args`, with the words.
#[track_caller]
fn refusals(scene: &Scene, file: &str, args: &[&str], edits: &[(&str, Value, &str)]) {
    let before = scene.read(file);
    for (pointer, value, words) in edits {
        scene.edit_json(file, |json| set(json, pointer, value.clone()));
        scene.refused(args, &[words]);
        scene.write(file, &before);
    }
}

#[test]
fn rope_values_of_a_wrong_type() {
    let scene = Scene::tiny("llama");
    let edits = [
        ("/rope_parameters/rope_theta", json!("777.0"), "`rope_parameters.rope_theta` is \"777.0\"; a positive number"),
        ("/rope_parameters/rope_theta", json!([777.0]), "`rope_parameters.rope_theta` is [777.0]"),
        ("/rope_parameters/rope_theta", json!(0.5), "`rope_parameters.rope_theta` is 0.5; a number above 1"),
        ("/rope_theta", json!({}), "`rope_theta` is {}"),
        ("/rope_parameters", json!([]), "`rope_parameters` is []; an object is needed"),
        ("/rope_scaling", json!("linear"), "`rope_scaling` is \"linear\"; an object is needed"),
        ("/rope_parameters/partial_rotary_factor", json!("0.5"), "`rope_parameters.partial_rotary_factor` is \"0.5\""),
        ("/partial_rotary_factor", json!(true), "`partial_rotary_factor` is true"),
        ("/partial_rotary_factor", json!(1.5), "`partial_rotary_factor` is 1.5; a share of at most 1"),
        ("/original_max_position_embeddings", json!("64"), "`original_max_position_embeddings` is \"64\""),
        (
            "/original_max_position_embeddings",
            json!(64.5),
            "`original_max_position_embeddings` is 64.5; a positive whole",
        ),
        ("/rope_parameters/rope_type", json!(["yarn"]), "`rope_parameters.rope_type` is [\"yarn\"]; a text is needed"),
        (
            "/rope_parameters/rope_type",
            json!("dynamic"),
            "`rope_parameters.rope_type` is \"dynamic\"; known are default",
        ),
    ];
    refusals(&scene, "model/config.json", &EVAL, &edits);
    let yarn =
        json!({"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64});
    scene.edit_json("model/config.json", |config| config["rope_parameters"] = yarn);
    let edits = [
        ("factor", json!("4"), "is \"4\"; a positive number"),
        ("original_max_position_embeddings", json!("64"), "is \"64\"; a positive"),
        ("attention_factor", json!("1"), "is \"1\""),
        ("beta_fast", json!([32]), "is [32]"),
        ("beta_slow", json!(false), "is false"),
        ("mscale", json!("1"), "is \"1\"; a number"),
        ("mscale_all_dim", json!({}), "is {}"),
        ("truncate", json!("no"), "is \"no\"; true or false"),
        ("extrapolation_factor", json!(0.5), "is 0.5; not every program applies it"),
        ("attn_factor", json!(2), "is 2; not every program applies it"),
    ];
    let named: Vec<(String, Value, String)> = edits
        .into_iter()
        .map(|(key, value, words)| {
            (format!("/rope_parameters/{key}"), value, format!("config.json: `rope_parameters.{key}` {words}"))
        })
        .collect();
    let named: Vec<(&str, Value, &str)> = named.iter().map(|(a, b, c)| (&**a, b.clone(), &**c)).collect();
    refusals(&scene, "model/config.json", &EVAL, &named);
    // Whatever reads the config, refuses it.
    scene.edit_json("model/config.json", |config| config["rope_parameters"]["rope_theta"] = json!("777.0"));
    unreadable(&scene, &["`rope_parameters.rope_theta` is \"777.0\""]);
    for command in [&["gguf", "model", "-o", "x.gguf"][..], &["plan", "model"], &["generate", "model", "--prompt", "a"]]
    {
        scene.refused(command, &["`rope_parameters.rope_theta` is \"777.0\""]);
    }
    let told = scene.run(&["inspect", "model"]).ok();
    assert!(told.stderr.contains("`rope_parameters.rope_theta` is \"777.0\""), "{}", told.stderr);
}

/// The spellings that Python programs write, and null for what is not set.
#[test]
fn values_in_another_spelling() {
    let scene = demo();
    scene.edit_json("model/config.json", |config| config["rope_parameters"]["rope_theta"] = json!(777.0));
    let wanted = perplexity(&scene);
    let before = scene.read("model/config.json");
    let check = |change: &dyn Fn(&mut Value)| {
        scene.edit_json("model/config.json", |config| change(config));
        assert_eq!(perplexity(&scene), wanted);
        scene.write("model/config.json", &before);
    };
    check(&|c| c["rope_parameters"]["rope_theta"] = json!(777));
    check(&|c| c["rope_theta"] = json!(777));
    check(&|c| {
        c.as_object_mut().unwrap().remove("rope_parameters");
        c["rope_theta"] = json!(777.0);
    });
    // An empty or null object hides nothing.
    check(&|c| c["rope_scaling"] = json!({}));
    check(&|c| c["rope_scaling"] = Value::Null);
    check(&|c| c["rope_scaling"] = c["rope_parameters"].clone());
    check(&|c| c["hidden_size"] = json!(c["hidden_size"].as_u64().unwrap() as f64));
    check(&|c| c["partial_rotary_factor"] = json!(1));
    scene.edit_json("model/config.json", |config| config["rope_parameters"]["rope_theta"] = json!(10_000.0));
    let other = perplexity(&scene);
    assert!(wanted > 1.3 * other, "{wanted} with another base, {other} with the model's own");
}

#[test]
fn values_that_contradict_each_other() {
    let scene = Scene::tiny("llama");
    let keep = "programs differ in which one they read; remove the wrong one";
    let edits = [
        ("/rope_theta", json!(777.0), "`rope_parameters.rope_theta` is 10000.0, but `rope_theta` is 777.0: programs"),
        (
            "/rope_scaling",
            json!({"type": "linear", "factor": 2.0}),
            "`rope_scaling` is {\"type\":\"linear\",\"factor\":2.0}",
        ),
        ("/rope_scaling", json!({"rope_theta": 777.0}), keep),
        (
            "/rope_parameters",
            json!({"full_attention": {"rope_theta": 10000.0}, "sliding_attention": {"rope_theta": 777.0}}),
            "`rope_parameters.full_attention` is {\"rope_theta\":10000.0}, but `rope_parameters.sliding_attention`",
        ),
        (
            "/rope_parameters/factor",
            json!(8.0),
            "`rope_parameters.factor` is 8.0; it has no effect without a `rope_type`",
        ),
        (
            "/rope_parameters/type",
            json!("linear"),
            "`rope_parameters.rope_type` is \"default\", but `rope_parameters.type`",
        ),
        (
            "/hidden_activation",
            json!("gelu_pytorch_tanh"),
            "`hidden_activation` is \"gelu_pytorch_tanh\", but `hidden_act`",
        ),
    ];
    refusals(&scene, "model/config.json", &EVAL, &edits);
    scene.edit_json("model/config.json", |config| config["rope_parameters"]["partial_rotary_factor"] = json!(0.5));
    let edits = [("/partial_rotary_factor", json!(1.0), "is 0.5, but `partial_rotary_factor` is 1.0")];
    refusals(&scene, "model/config.json", &EVAL, &edits);
    let scene = Scene::tiny("gemma3_text");
    let edits = [
        ("/rope_local_base_freq", json!(77.0), "but `rope_local_base_freq` is 77.0"),
        ("/rope_parameters/rope_theta", json!(5.0), "`rope_parameters.rope_theta` is 5.0; only `full_attention`"),
        ("/rope_parameters/sliding_attention", json!([]), "`rope_parameters.sliding_attention` is []; an object"),
        ("/rope_parameters/full_attention", json!(null), "`rope_parameters.full_attention` is missing"),
        ("/rope_parameters/sliding_attention", json!(null), "`rope_parameters.sliding_attention` is missing"),
    ];
    refusals(&scene, "model/config.json", &EVAL, &edits);
}

#[test]
fn other_values_of_a_wrong_type() {
    let scene = Scene::tiny("llama");
    let edits = [
        ("/model_type", json!(5), "config.json: `model_type` is 5; a text is needed"),
        ("/architectures", json!("LlamaForCausalLM"), "`architectures` is \"LlamaForCausalLM\"; a list of texts"),
        ("/text_config", json!("llama"), "`text_config` is \"llama\"; an object is needed"),
        ("/attention_bias", json!("yes"), "`attention_bias` is \"yes\"; true or false"),
        ("/eos_token_id", json!("2"), "`eos_token_id` is \"2\"; an id or a list of ids"),
        ("/eos_token_id", json!([2, "3"]), "`eos_token_id` is [2,\"3\"]"),
        ("/bos_token_id", json!(1.5), "`bos_token_id` is 1.5"),
    ];
    refusals(&scene, "model/config.json", &EVAL, &edits);
    scene.write("model/generation_config.json", "{}");
    let edits = [
        ("/eos_token_id", json!({"id": 2}), "model/generation_config.json: `eos_token_id` is {\"id\":2}"),
        ("/bos_token_id", json!("<s>"), "model/generation_config.json: `bos_token_id` is \"<s>\""),
    ];
    refusals(&scene, "model/generation_config.json", &EVAL, &edits);
    let edits = [
        ("/add_bos_token", json!("true"), "model/tokenizer_config.json: `add_bos_token` is \"true\"; true or false"),
        ("/bos_token", json!(1), "model/tokenizer_config.json: `bos_token` is 1; a text, or an object with `content`"),
        ("/eos_token", json!({"text": "</s>"}), "`eos_token` is {\"text\":\"</s>\"}"),
    ];
    refusals(&scene, "model/tokenizer_config.json", &EVAL, &edits);
    scene.write("model/tokenizer_config.json", "[]");
    scene.refused(&EVAL, &["`model/tokenizer_config.json` is not valid: not a JSON object"]);
}

/// What only a GGUF file takes from the side files.
#[test]
fn side_files_of_a_gguf_file() {
    let scene = demo();
    let gguf = ["gguf", "model", "-o", "x.gguf"];
    let edits = [
        ("/temperature", json!("0.7"), "model/generation_config.json: `temperature` is \"0.7\"; a number is needed"),
        ("/top_k", json!(2.5), "`top_k` is 2.5; a whole number of 32 bits"),
    ];
    refusals(&scene, "model/generation_config.json", &gguf, &edits);
    let edits = [
        ("/add_prefix_space", json!(1), "model/tokenizer_config.json: `add_prefix_space` is 1"),
        ("/pad_token", json!(["<pad>"]), "`pad_token` is [\"<pad>\"]"),
        ("/add_eos_token", json!("no"), "`add_eos_token` is \"no\""),
        ("/additional_special_tokens", json!([3]), "`additional_special_tokens` is [3]; a list of texts"),
        ("/chat_template", json!(5), "`chat_template` is 5; a template, a list"),
        ("/chat_template", json!([{"name": "default"}]), "`chat_template` is [{\"name\":\"default\"}]"),
    ];
    refusals(&scene, "model/tokenizer_config.json", &gguf, &edits);
    let edits = [("/_name_or_path", json!({}), "config.json: `_name_or_path` is {}; a text is needed")];
    refusals(&scene, "model/config.json", &gguf, &edits);
    scene.write("model/generation_config.json", "version https://git-lfs.github.com/spec/v1");
    scene.refused(&gguf, &["`model/generation_config.json` is not valid"]);
}

/// Quantizes `model` into `out`; edits of its quantization config are refused.
#[track_caller]
fn quantized(scene: &Scene, out: &str, args: &[&str], edits: &[(&str, Value, &str)]) {
    let all = [args, &["model", "-o", out, "--no-eval"]].concat();
    if args[0] == "rtn" { scene.tiny_run(&all) } else { scene.run(&all) }.ok();
    // They say the same a second time.
    for file in ["quantize_config.json", "quant_config.json"] {
        let _ = std::fs::remove_file(scene.path(&format!("{out}/{file}")));
    }
    let keys: Vec<String> = edits.iter().map(|(key, ..)| format!("/quantization_config/{key}")).collect();
    let edits: Vec<(&str, Value, &str)> =
        keys.iter().zip(edits).map(|(key, (_, value, words))| (&**key, value.clone(), *words)).collect();
    refusals(scene, &format!("{out}/config.json"), &["eval", "ppl", out, "--text", "eval.txt"], &edits);
}

#[test]
fn quantization_configs_of_a_wrong_type() {
    let scene = Scene::tiny("llama");
    quantized(
        &scene,
        "gptq",
        &["rtn"],
        &[
            ("bits", json!("4"), "`bits` is \"4\"; 2, 3, 4 and 8 are read"),
            ("group_size", json!("32"), "`group_size` is \"32\""),
            ("sym", json!(1), "`sym` is 1; it must be true or false"),
            ("checkpoint_format", json!(2), "`checkpoint_format` is 2; a text is needed"),
            ("format", json!("gptq_v2"), "`checkpoint_format` is \"gptq\", but `format` is \"gptq_v2\""),
            ("is_marlin_format", json!("yes"), "`is_marlin_format` is \"yes\""),
            ("pack_dtype", json!(32), "`pack_dtype` is 32"),
            ("dynamic", json!(["-:.*"]), "`dynamic` is [\"-:.*\"]; an object is needed"),
            ("dynamic", json!({".*up_proj": 8}), "`dynamic..*up_proj` is 8; an object is needed"),
            ("quant_method", json!(["gptq"]), "`quant_method` is [\"gptq\"]"),
        ],
    );
    quantized(
        &scene,
        "awq",
        &["rtn", "--format", "awq", "--asym"],
        &[
            ("bits", json!("4"), "`bits` is \"4\"; AWQ words of 4 are read"),
            ("group_size", json!([32]), "`group_size` is [32]"),
            ("w_bit", json!(3), "`bits` is 4, but `w_bit` is 3"),
            ("zero_point", json!("no"), "`zero_point` is \"no\""),
            ("version", json!(1), "`version` is 1; a text is needed"),
            ("modules_to_not_convert", json!("lm_head"), "`modules_to_not_convert` is \"lm_head\"; a list of texts"),
        ],
    );
    quantized(
        &scene,
        "fp8",
        &["fp8", "--format", "fp8"],
        &[
            ("activation_scheme", json!(["static"]), "`activation_scheme` is [\"static\"]"),
            ("fmt", json!(4), "`fmt` is 4"),
            ("weight_block_size", json!(128), "`weight_block_size` is 128; two positive whole numbers"),
            ("ignored_layers", json!([1]), "`ignored_layers` is [1]; a list of texts"),
        ],
    );
    let weights = "config_groups/group_0/weights";
    quantized(
        &scene,
        "compressed",
        &["rtn", "--format", "compressed-tensors"],
        &[
            (&format!("{weights}/num_bits"), json!("4"), "`config_groups.group_0.weights.num_bits` is \"4\"; 2 to 8"),
            (&format!("{weights}/group_size"), json!("32"), "group_size` is \"32\"; it must be positive or -1"),
            (&format!("{weights}/strategy"), json!(1), "strategy` is 1; a text is needed"),
            (&format!("{weights}/type"), json!(["int"]), "type` is [\"int\"]; a text is needed"),
            (&format!("{weights}/symmetric"), json!("true"), "symmetric` is \"true\"; true or false"),
            ("config_groups/group_0/targets", json!("Linear"), "targets` is \"Linear\"; a list of texts"),
            ("format", json!(5), "`format` is 5; a text is needed"),
            ("ignore", json!("lm_head"), "`ignore` is \"lm_head\"; a list of texts"),
            ("sparsity_config", json!("none"), "`sparsity_config` is \"none\"; an object is needed"),
        ],
    );
}

/// The GGUF file `from` with other metadata.
fn rewrite(from: &Path, to: &Path, change: impl FnOnce(&mut Metadata)) {
    let file = GgufFile::open(from).unwrap();
    let mut metadata = file.metadata().clone();
    change(&mut metadata);
    let specs = file.tensors().iter().map(|t| TensorSpec::new(&*t.name, t.kind, &*t.shape)).collect();
    let mut writer = Writer::create(Plan::new(to, &metadata, specs, None).unwrap()).unwrap();
    file.tensors().iter().for_each(|t| writer.put(&t.name, &t.bytes).unwrap());
    writer.finish().unwrap();
}

#[test]
fn gguf_metadata_of_a_wrong_type() {
    let scene = demo();
    scene.run(&["gguf", "model", "--type", "Q8_0", "-o", "good.gguf"]).ok();
    let changes: [(&str, Typed, &str); 8] = [
        ("llama.rope.freq_base", "10000".into(), "the metadata key `llama.rope.freq_base` is of type string"),
        ("llama.block_count", 4.0f32.into(), "`llama.block_count` is of type f32; an integer"),
        ("llama.attention.layer_norm_rms_epsilon", 1u32.into(), "is the u32 1; a floating-point number is needed"),
        ("general.sampling.temp", "0.5".into(), "`general.sampling.temp` is of type string; a floating-point number"),
        ("general.sampling.top_p", true.into(), "`general.sampling.top_p` is of type bool; a floating-point number"),
        ("general.sampling.top_k", vec![1u32].into(), "`general.sampling.top_k` is an array of u32"),
        ("tokenizer.ggml.eos_token_id", "2".into(), "`tokenizer.ggml.eos_token_id` is of type string"),
        ("quantkit.eos_token_ids", 2u32.into(), "`quantkit.eos_token_ids` is the u32 2; an array of integers"),
    ];
    for (key, value, words) in changes {
        rewrite(&scene.path("good.gguf"), &scene.path("bad.gguf"), |metadata| metadata.set(key, value));
        let args = ["eval", "ppl", "bad.gguf", "--text", "eval.txt", "--window", "64", "--max-windows", "1"];
        scene.refused(&args, &[words]);
        std::fs::remove_file(scene.path("bad.gguf")).unwrap();
    }
    // A key that llama.cpp does not know may have any type.
    let later: Typed = true.into();
    rewrite(&scene.path("good.gguf"), &scene.path("later.gguf"), |metadata| {
        metadata.set("general.sampling.later", later);
    });
    let words = ["the metadata key `general.sampling.later` is not known, and is left out"];
    scene.run(&["generate", "later.gguf", "--prompt", "a", "--max-tokens", "1"]).ok().says(&words);
    // A vocabulary without the name of its pre-tokenizer is read, and said to be.
    rewrite(&scene.path("good.gguf"), &scene.path("old.gguf"), |metadata| drop(metadata.remove("tokenizer.ggml.pre")));
    let words =
        ["warning: the file names no pre-tokenizer (`tokenizer.ggml.pre`); `default` is taken, as in llama.cpp"];
    for args in [
        &["eval", "ppl", "old.gguf", "--text", "eval.txt", "--window", "64", "--max-windows", "1"][..],
        &["generate", "old.gguf", "--prompt", "a", "--max-tokens", "1"],
        &["gguf", "old.gguf", "--type", "Q4_0", "-o", "again.gguf"],
        &["convert", "old.gguf", "-o", "folder"],
        &["inspect", "old.gguf"],
    ] {
        scene.run(args).ok().says(&words);
    }
    let said = scene.run(&["inspect", "good.gguf"]).ok().stderr;
    assert!(!said.contains("pre-tokenizer"), "{said}");

    // It can be named, once.
    let named = |source: &'static str, name: &'static str| {
        ["gguf", source, "--type", "Q8_0", "-o", "named.gguf", "--pre", name]
    };
    scene.run(&named("old.gguf", "qwen2")).ok();
    let file = GgufFile::open(&scene.path("named.gguf")).unwrap();
    assert_eq!(file.metadata().read::<&str>("tokenizer.ggml.pre").unwrap(), Some("qwen2"));
    std::fs::remove_file(scene.path("named.gguf")).unwrap();
    scene.refused(&named("old.gguf", "qwen"), &["`qwen` is not a pre-tokenizer of llama.cpp"]);
    scene.refused(&named("good.gguf", "llama-bpe"), &["of the source is `qwen2`", "`--pre` says `llama-bpe`"]);
    let calibrated = [&named("old.gguf", "qwen2")[..], &["--imatrix", "auto"]].concat();
    scene.refused(&calibrated, &["names no pre-tokenizer", "write the file with `--pre` first"]);
}
