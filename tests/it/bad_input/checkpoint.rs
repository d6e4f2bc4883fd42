//! Damaged and strange model folders.

use std::collections::BTreeMap;
use std::fs;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::json;

use super::{gptq, unreadable};
use crate::support::scene::{Scene, Stored, character_tokenizer, tensors};

const SHARD: &str = "model/model-00002-of-00003.safetensors";
const INDEX: &str = "model/model.safetensors.index.json";

/// A file whose header claims `length` bytes and is `header`.
fn with_header(length: u64, header: &str) -> Vec<u8> {
    [&length.to_le_bytes(), header.as_bytes(), &[0; 64]].concat()
}

#[test]
fn no_such_folder() {
    let scene = Scene::demo();
    scene.refused(&["gptq", "no/such/model"], &["`no/such/model` is no folder", "hub id"]);
    scene.refused(&["eval", "ppl", "calib.txt"], &["`calib.txt` is no folder"]);
}

#[test]
fn no_weights() {
    let scene = Scene::tiny("llama");
    fs::rename(scene.path("model/model.safetensors"), scene.path("model/pytorch_model.bin")).unwrap();
    let pickled = ["`model` is a folder of pickled PyTorch weights (`pytorch_model.bin`)", "`save_pretrained` writes"];
    unreadable(&scene, &pickled);
    // State of a training run is no model.
    fs::rename(scene.path("model/pytorch_model.bin"), scene.path("model/training_args.bin")).unwrap();
    unreadable(&scene, &["holds no safetensors weights"]);
}

#[test]
fn missing_shard() {
    let scene = Scene::tiny("llama_sharded");
    fs::remove_file(scene.path(SHARD)).unwrap();
    unreadable(&scene, &["model-00002-of-00003.safetensors` is missing"]);
}

#[test]
fn truncated_shard() {
    let scene = Scene::tiny("llama_sharded");
    let whole = scene.read(SHARD);
    for length in [whole.len() - 1, whole.len() / 2, 100, 8, 3, 0] {
        scene.write(SHARD, &whole[..length]);
        unreadable(&scene, &["model-00002-of-00003.safetensors` is damaged", "download it again"]);
    }
}

#[test]
fn surplus_bytes() {
    let scene = Scene::tiny("llama_sharded");
    let longer = [scene.read(SHARD), vec![0; 16]].concat();
    scene.write(SHARD, longer);
    unreadable(&scene, &["model-00002-of-00003.safetensors` is damaged"]);
}

#[test]
fn lying_headers() {
    let scene = Scene::tiny("llama");
    let data = |from: u64, to: u64| format!(r#"{{"x":{{"dtype":"F32","shape":[4],"data_offsets":[{from},{to}]}}}}"#);
    for file in [
        with_header(u64::MAX, "{}"),
        with_header(1 << 40, "{}"),
        with_header(1000, "{}"),
        with_header(11, "this is no json"),
        with_header(2, "[]"),
        with_header(data(0, 1 << 40).len() as u64, &data(0, 1 << 40)),
        with_header(data(u64::MAX - 16, u64::MAX).len() as u64, &data(u64::MAX - 16, u64::MAX)),
        with_header(data(16, 0).len() as u64, &data(16, 0)),
        with_header(data(0, 8).len() as u64, &data(0, 8)),
    ] {
        scene.write("model/model.safetensors", file);
        unreadable(&scene, &["model.safetensors` is damaged"]);
    }
}

#[test]
fn index_names_what_is_not_there() {
    let scene = Scene::tiny("llama_sharded");
    scene.edit_json(INDEX, |index| {
        index["weight_map"]["model.ghost.weight"] = json!("model-00001-of-00003.safetensors")
    });
    unreadable(
        &scene,
        &["index places tensor `model.ghost.weight`", "model-00001-of-00003.safetensors`, where it is not"],
    );
}

#[test]
fn index_leads_outside() {
    let scene = Scene::tiny("llama_sharded");
    scene.write("x.safetensors", scene.read(SHARD));
    for shard in ["../x.safetensors", "/etc/passwd", "sub/../../x.safetensors", ".."] {
        scene.edit_json(INDEX, |index| index["weight_map"]["model.norm.weight"] = json!(shard));
        unreadable(&scene, &[&format!("names shard `{shard}`"), "outside the model folder"]);
    }
}

#[test]
fn index_is_no_index() {
    let scene = Scene::tiny("llama_sharded");
    for (text, word) in [
        ("{", "model.safetensors.index.json` is not valid"),
        ("{}", "no `weight_map` object"),
        (r#"{"weight_map": {}}"#, "`weight_map` is empty"),
        (r#"{"weight_map": {"a": 1}}"#, "no file name"),
    ] {
        scene.write(INDEX, text);
        unreadable(&scene, &[word]);
    }
}

/// transformers reads `model.safetensors`, vLLM and SGLang the shards of the index.
#[test]
fn one_file_beside_all_shards() {
    let scene = Scene::tiny("llama_sharded");
    let shards = [1, 2, 3].map(|i| format!("model/model-0000{i}-of-00003.safetensors"));
    let mut all = BTreeMap::new();
    shards.iter().for_each(|shard| all.extend(tensors(&scene.path(shard))));
    scene.write("model/model.safetensors", safetensors::serialize(Vec::<(String, TensorView)>::new(), None).unwrap());
    scene.edit_weights(|tensors| *tensors = all);
    let eval = ["eval", "ppl", "model", "--text", "eval.txt", "--json"];
    let twice = ["warning: `model` holds its weights twice, in `model.safetensors` and in the 3 shards"];
    let same = scene.run(&eval).ok().says(&twice).json()["perplexity"].clone();

    let name = "model.layers.0.mlp.up_proj.weight";
    scene.edit_weights(|tensors| tensors.get_mut(name).unwrap().data[0] ^= 1);
    let words = [
        "`model` holds two models",
        &format!("tensor `{name}` has other values in `model.safetensors` than in the shards"),
        "remove `model.safetensors`, or the index with its shards",
    ];
    unreadable(&scene, &words);
    scene.run(&["inspect", "model"]).ended(1).says(&words);
    // What is left when one of the two is removed.
    scene.edit_weights(|tensors| tensors.get_mut(name).unwrap().data[0] ^= 1);
    let single = scene.read("model/model.safetensors");
    fs::remove_file(scene.path("model/model.safetensors")).unwrap();
    let ran = scene.run(&eval).ok();
    assert!(!ran.stderr.contains("warning"), "{}", ran.stderr);
    assert_eq!(ran.json()["perplexity"], same);
    // An index whose shards are gone is another thing: nothing can be read by it.
    scene.write("model/model.safetensors", single);
    fs::remove_file(scene.path(SHARD)).unwrap();
    let ran = scene.run(&eval).ok().says(&["model.safetensors.index.json` is not used", SHARD, "is missing"]);
    assert_eq!(ran.json()["perplexity"], same);
}

#[test]
fn tensor_in_two_shards() {
    let scene = Scene::tiny("llama_sharded");
    scene.write("model/model-00003-of-00003.safetensors", scene.read(SHARD));
    unreadable(&scene, &["is in `model-00002-of-00003.safetensors` as well"]);
}

#[test]
fn missing_tensor() {
    let scene = Scene::tiny("llama");
    scene.edit_weights(|tensors| drop(tensors.remove("model.layers.1.mlp.up_proj.weight")));
    unreadable(&scene, &["tensor `model.layers.1.mlp.up_proj.weight` is missing from `model`"]);
}

#[test]
fn wrong_dtype() {
    let name = "model.layers.0.self_attn.k_proj.weight";
    for (dtype, size, word) in [
        (Dtype::I32, 4, "I32; wanted F32, F16 or BF16"),
        (Dtype::F8_E5M2, 1, "F8_E5M2; wanted F32, F16 or BF16"),
        (Dtype::F8_E4M3, 1, "F8_E4M3: nothing says how it is scaled"),
    ] {
        let scene = Scene::tiny("llama");
        scene.edit_weights(|tensors| {
            let tensor = tensors.get_mut(name).unwrap();
            let data = vec![0; tensor.shape.iter().product::<usize>() * size];
            *tensor = Stored { dtype, shape: tensor.shape.clone(), data };
        });
        unreadable(&scene, &[&format!("tensor `{name}` is {word}")]);
    }
}

#[test]
fn wrong_shape() {
    let scene = Scene::tiny("llama");
    scene.edit_weights(|tensors| tensors.get_mut("model.layers.0.mlp.down_proj.weight").unwrap().shape = vec![96, 64]);
    unreadable(&scene, &["tensor `model.layers.0.mlp.down_proj.weight` has shape [96, 64]", "asks for [64, 96]"]);
}

#[test]
fn config_at_odds_with_the_weights() {
    let scene = Scene::tiny("llama");
    scene.edit_json("model/config.json", |config| config["num_key_value_heads"] = json!(4));
    unreadable(&scene, &["k_proj", "has shape", "asks for [64"]);
}

#[test]
fn unknown_model_type() {
    let scene = Scene::tiny("llama");
    scene.edit_json("model/config.json", |config| {
        config["model_type"] = json!("mamba2");
        config["architectures"] = json!(["Mamba2ForCausalLM"]);
    });
    unreadable(&scene, &["model type `mamba2` is not known", "llama", "qwen3", "gemma3_text"]);
}

#[test]
fn no_model_type() {
    let scene = Scene::tiny("llama");
    scene.edit_json("model/config.json", |config| {
        config.as_object_mut().unwrap().retain(|key, _| key != "model_type" && key != "architectures");
    });
    unreadable(&scene, &["`model_type` is missing"]);
}

#[test]
fn unusable_config_values() {
    let scene = Scene::tiny("llama");
    for (key, value) in [
        ("hidden_size", json!("big")),
        ("hidden_size", json!(-1)),
        ("num_attention_heads", json!(0)),
        ("num_hidden_layers", json!(1.5)),
        ("num_key_value_heads", json!(3)),
        ("hidden_act", json!("relu")),
        ("rms_norm_eps", json!("small")),
    ] {
        let before = scene.read("model/config.json");
        scene.edit_json("model/config.json", |config| config[key] = value.clone());
        scene.refused(&gptq(&[]), &["config.json", &format!("`{key}` is {value}")]);
        scene.write("model/config.json", before);
    }
    scene.edit_json("model/config.json", |config| drop(config.as_object_mut().unwrap().remove("intermediate_size")));
    unreadable(&scene, &["`intermediate_size` is missing"]);
}

#[test]
fn no_config() {
    let scene = Scene::tiny("llama");
    fs::remove_file(scene.path("model/config.json")).unwrap();
    unreadable(&scene, &["config.json` is missing"]);
    for text in ["", "{\"model_type\": ", "not json", "[1, 2]"] {
        scene.write("model/config.json", text);
        unreadable(&scene, &["config.json` is not valid"]);
    }
}

#[test]
fn no_tokenizer() {
    let scene = Scene::tiny("llama");
    fs::remove_file(scene.path("model/tokenizer.json")).unwrap();
    unreadable(&scene, &["no `tokenizer.json`", "from the original model"]);
    scene.write("model/tokenizer.json", "{}");
    unreadable(&scene, &["cannot read the tokenizer `model/tokenizer.json`"]);
}

#[test]
fn tokenizer_larger_than_the_model() {
    let scene = Scene::tiny("llama");
    scene.write("model/tokenizer.json", character_tokenizer(130));
    unreadable(&scene, &["token ids up to 129", "needs 130 embedding rows", "the model has 128"]);
}

/// A token after the last row of the embedding is worth a warning, until the text has it.
#[test]
fn token_added_beyond_the_embedding() {
    let scene = Scene::tiny("llama");
    scene.edit_json("model/tokenizer.json", |file| {
        let mut token = file["added_tokens"][0].clone();
        token["id"] = json!(128);
        token["content"] = json!("[PAD]");
        file["added_tokens"].as_array_mut().unwrap().push(token);
    });
    let eval = ["eval", "ppl", "model", "--text", "eval.txt", "--max-windows", "1"];
    scene.run(&eval).ok().says(&["warning: `model/tokenizer.json` adds token 128 (`[PAD]`) outside the embedding"]);
    scene.write("eval.txt", "[PAD]".repeat(3000));
    scene.refused(&eval, &["token 128 is outside the vocabulary of 128"]);
}

#[test]
fn quantized_already() {
    let scene = Scene::tiny("llama");
    scene.tiny_run(&["rtn", "model", "-o", "first", "--no-eval"]).ok();
    scene.refused(
        &["gptq", "first", "-o", "out"],
        &["`first` is quantized already (rtn, stored as gptq)", "floating-point"],
    );
    scene.refused(&["rtn", "first", "-o", "out"], &["`first` is quantized already (rtn, stored as gptq)"]);
}

#[test]
fn quantized_by_another_method() {
    let scene = Scene::tiny("llama");
    scene.edit_json("model/config.json", |config| config["quantization_config"] = json!({"quant_method": "bitnet"}));
    unreadable(&scene, &["quantized by `bitnet`, which is not read", "gptq"]);
}

#[test]
fn damaged_artifact() {
    let scene = Scene::tiny("llama");
    scene.tiny_run(&["rtn", "model", "-o", "artifact", "--no-eval"]).ok();
    fs::remove_dir_all(scene.model()).unwrap();
    fs::rename(scene.path("artifact"), scene.model()).unwrap();
    let whole = scene.read("model/model.safetensors");
    let eval = ["eval", "ppl", "model", "--text", "eval.txt"];
    scene.run(&eval).ok();
    scene.edit_weights(|tensors| drop(tensors.remove("model.layers.1.mlp.up_proj.scales")));
    scene.refused(&eval, &["module `model.layers.1.mlp.up_proj`", "`scales` is missing"]);
    scene.write("model/model.safetensors", &whole);
    scene.edit_weights(|tensors| tensors.get_mut("model.layers.0.mlp.up_proj.g_idx").unwrap().data[0] = 77);
    scene.refused(&eval, &["module `model.layers.0.mlp.up_proj`", "into group 77"]);
}
