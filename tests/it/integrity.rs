//! What an artifact is found to be: honest ones have no failure, and each planted fault is named.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fs;
use std::path::Path;

use half::f16;
use quantkit::format::gguf::read::GgufFile;
use quantkit::format::manifest::{self, Manifest, hash_files};
use quantkit::integrity::{Check, Fate, Integrity, Status, check};
use quantkit::num::bits;
use quantkit::tensor::{bytes_to_words, words_to_bytes};
use safetensors::serialize;
use safetensors::tensor::TensorView;
use serde_json::Value;

use crate::support::scene::{Scene, Stored, copy_folder, tensors};

const CALIBRATION: [&str; 6] = ["--calib", "calib.txt", "--nsamples", "8", "--seqlen", "64"];
const UP: &str = "model.layers.1.mlp.up_proj";
const Q: &str = "model.layers.2.self_attn.q_proj";

/// The demo checkpoint as `model/`, with a chat template.
pub fn demo() -> Scene {
    let scene = Scene::demo();
    copy_folder(&Path::new(env!("CARGO_MANIFEST_DIR")).join("calib/demo/target"), &scene.model());
    scene.edit_json("model/tokenizer_config.json", |config| {
        config["chat_template"] = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}".into();
    });
    scene
}

/// Runs a method on `model/`; gives the folder `out`.
pub fn quantize(scene: &Scene, args: &[&str]) {
    let calibrated = !["rtn", "gguf"].contains(&args[0]);
    let rest: &[&str] = if args[0] == "gguf" { &[] } else { &["--no-eval"] };
    let calibration: &[&str] = if calibrated && args[0] != "fp8" { &CALIBRATION } else { &[] };
    scene.run(&[&args[..1], &["model"], &args[1..], rest, calibration].concat()).ok();
}

fn look(scene: &Scene, artifact: &str) -> Integrity {
    check(&scene.path(artifact), &scene.model(), &mut |_, _| Ok::<_, Infallible>(())).unwrap()
}

fn failures(integrity: &Integrity) -> Vec<&Check> {
    integrity.findings.iter().filter(|finding| finding.status == Status::Fail).collect()
}

/// A failure under this id has all of these words.
#[track_caller]
fn fails(scene: &Scene, artifact: &str, id: &str, words: &[&str]) {
    let integrity = look(scene, artifact);
    let found = failures(&integrity);
    let named = |finding: &&&Check| finding.id == id && words.iter().all(|word| finding.message.contains(word));
    assert!(found.iter().any(|finding| named(&finding)), "{artifact}: no {id} with {words:?} in {found:#?}");
    assert_eq!(integrity.status(), Status::Fail);
}

#[track_caller]
fn honest(scene: &Scene, artifact: &str) -> Integrity {
    let integrity = look(scene, artifact);
    assert!(failures(&integrity).is_empty(), "{artifact}: {:#?}", failures(&integrity));
    integrity
}

/// Changes the tensors of an artifact, and makes its manifest agree: what is found is found in the content.
pub fn edit(scene: &Scene, artifact: &str, change: impl FnOnce(&mut BTreeMap<String, Stored>)) {
    let path = scene.path(artifact).join("model.safetensors");
    let mut all = tensors(&path);
    change(&mut all);
    let views = all.iter().map(|(name, t)| (name, TensorView::new(t.dtype, t.shape.clone(), &t.data).unwrap()));
    fs::write(&path, serialize(views, None).unwrap()).unwrap();
    seal(scene, artifact);
}

pub fn seal(scene: &Scene, artifact: &str) {
    let dir = scene.path(artifact);
    let manifest = Manifest::read(&dir).unwrap();
    let names: Vec<String> = manifest.outputs.iter().map(|record| record.file.clone()).collect();
    Manifest { outputs: hash_files(&dir, &names).unwrap(), ..manifest }.write(&dir).unwrap();
}

/// The artifact once more, under another name.
pub fn copied<'a>(scene: &Scene, artifact: &str, name: &'a str) -> &'a str {
    copy_folder(&scene.path(artifact), &scene.path(name));
    name
}

pub fn get<'a>(all: &'a mut BTreeMap<String, Stored>, name: &str) -> &'a mut Stored {
    all.get_mut(name).unwrap_or_else(|| panic!("no {name}"))
}

#[test]
fn honest_artifacts_have_no_failure() {
    let scene = demo();
    for (out, args) in [
        ("w4", &["rtn", "--bits", "4"][..]),
        ("w2", &["rtn", "--bits", "2", "--group-size", "64"]),
        ("w2c", &["rtn", "--bits", "2", "--group-size", "-1", "--asym"]),
        ("g2", &["gptq", "--bits", "2", "--group-size", "64"]),
        ("g3", &["gptq", "--bits", "3", "--group-size", "32", "--asym", "--drift-correction"]),
        ("act", &["gptq", "--bits", "4", "--desc-act"]),
        ("awq", &["awq", "--group-size", "64"]),
        ("ct", &["awq", "--format", "compressed-tensors", "--group-size", "64"]),
        ("ct2", &["awq", "--format", "compressed-tensors", "--bits", "2", "--group-size", "64"]),
        ("ag", &["awq", "--rounding", "gptq"]),
        ("g8", &["gptq", "--bits", "8", "--drift-correction"]),
        ("d2", &["gptq", "--bits", "2", "--group-size", "64", "--drift-correction"]),
        ("sq", &["smoothquant"]),
        ("fp8", &["fp8"]),
        ("kv", &["gptq", "--format", "compressed-tensors", "--kv-cache", "fp8"]),
    ] {
        quantize(&scene, &[args, &["-o", out]].concat());
        let integrity = honest(&scene, out);
        let accounting = integrity.accounting.unwrap();
        let quantized = accounting.count(Fate::Quantized);
        assert_eq!((quantized, accounting.count(Fate::Missing), accounting.count(Fate::Changed)), (28, 0, 0), "{out}");
        let folded = accounting.count(Fate::Folded);
        assert_eq!(folded > 0, ["awq", "ct", "ct2", "ag", "sq"].contains(&out), "{out}: {folded} folded");
        assert_eq!(accounting.count(Fate::Added), if out == "kv" { 8 } else { 0 }, "{out}");
        let bits = accounting.bits_per_quantized_weight.unwrap();
        let wanted = match out {
            "w2" | "w2c" | "g2" | "d2" | "ct2" => 2.0..2.6,
            "g3" => 3.5..4.1,
            "sq" | "fp8" | "g8" => 8.0..8.6,
            _ => 4.0..4.8,
        };
        assert!(wanted.contains(&bits) && accounting.bits_per_weight > bits, "{out}: {bits}");
        let sum: u64 = tensors(&scene.path(out).join("model.safetensors")).values().map(|t| t.data.len() as u64).sum();
        assert_eq!(accounting.artifact_bytes, sum, "{out}");
        let worst = accounting.weights.iter().map(|w| w.error).fold(0.0, f64::max);
        assert!(worst < if bits < 3.0 { 0.9 } else { 0.4 }, "{out}: {worst}");
    }
    quantize(&scene, &["gguf", "--type", "Q4_K_M", "-o", "a.gguf"]);
    let integrity = honest(&scene, "a.gguf");
    assert!(integrity.accounting.unwrap().count(Fate::Quantized) >= 28);
    // The model is itself.
    let itself = honest(&scene, "model").accounting.unwrap();
    assert_eq!((itself.count(Fate::Quantized), itself.bits_per_weight), (0, 16.0));
    // What is told can be read again.
    let text = serde_json::to_string(&look(&scene, "w4")).unwrap();
    assert_eq!(serde_json::from_str::<Integrity>(&text).unwrap(), look(&scene, "w4"));
}

#[test]
fn zero_points() {
    let scene = demo();
    quantize(&scene, &["rtn", "--bits", "4", "-o", "w4"]);
    quantize(&scene, &["rtn", "--bits", "4", "--asym", "-o", "asym"]);
    quantize(&scene, &["awq", "--group-size", "64", "-o", "awq"]);
    quantize(&scene, &["rtn", "--bits", "4", "--asym", "--format", "compressed-tensors", "-o", "ct"]);
    quantize(&scene, &["gptq", "--bits", "4", "--asym", "-o", "gptq"]);

    // One of a symmetric module.
    edit(&scene, copied(&scene, "w4", "one"), |all| get(all, &format!("{UP}.qzeros")).data[5] ^= 1);
    fails(&scene, "one", "zeros", &[UP, "symmetric", "makes every zero point 8", "output 10 in group 0"]);
    // All of one module, by one step; the first channels of a compressed-tensors row are its low bits.
    let shift = |name: &str| {
        let name = name.to_string();
        move |all: &mut BTreeMap<String, Stored>| {
            let stored = get(all, &name);
            let words = bytes_to_words(&stored.data).into_iter().map(|word| {
                let fields =
                    bits::unpack(&[word], 8, 4).into_iter().map(|field| if field == 15 { 14 } else { field + 1 });
                bits::pack(fields, 8, 4)[0]
            });
            stored.data = words_to_bytes(&words.collect::<Vec<u32>>()).to_vec();
        }
    };
    for (from, part) in [("asym", "qzeros"), ("awq", "qzeros"), ("ct", "weight_zero_point")] {
        let name = format!("{from}-shifted");
        edit(&scene, copied(&scene, from, &name), shift(&format!("{UP}.{part}")));
        fails(&scene, &name, "zeros.shift", &[UP, "off by", "zero points are wrong"]);
        let failed = failures(&look(&scene, &name)).len();
        assert_eq!(failed, 1, "{from}: of one module");
    }
    // Some of one module, from 5 to 45 of 100.
    for (from, part, percent) in [
        ("awq", "qzeros", 5),
        ("awq", "qzeros", 30),
        ("awq", "qzeros", 45),
        ("gptq", "qzeros", 30),
        ("ct", "weight_zero_point", 30),
    ] {
        let name = format!("{from}-{percent}");
        edit(&scene, copied(&scene, from, &name), |all| {
            let stored = get(all, &format!("{Q}.{part}"));
            let words = bytes_to_words(&stored.data).into_iter().enumerate().map(|(n, word)| {
                let fields = bits::unpack(&[word], 8, 4).into_iter().enumerate().map(|(k, field)| {
                    let hit = (8 * n + k) * 37 % 100 < percent;
                    if hit { if field == 15 { 14 } else { field + 1 } } else { field }
                });
                bits::pack(fields, 8, 4)[0]
            });
            stored.data = words_to_bytes(&words.collect::<Vec<u32>>()).to_vec();
        });
        fails(&scene, &name, "zeros.shift", &[Q, "zero points are wrong"]);
    }
    // All modules: told of in lines that can be read.
    edit(&scene, copied(&scene, "asym", "asym-all"), |all| {
        let names: Vec<String> = all.keys().filter(|name| name.ends_with("qzeros")).cloned().collect();
        names.iter().for_each(|name| shift(name)(all));
    });
    fails(&scene, "asym-all", "zeros.shift", &["more of the kind"]);
    assert!(failures(&look(&scene, "asym-all")).len() < 18);
    // Labels of the other version.
    for (from, label, id, words) in [
        ("w4", "gptq_v2", "zeros", &["says `gptq_v2`", "stored as `gptq`", "28 of 28", "set `checkpoint_format`"][..]),
        ("asym", "gptq", "zeros.shift", &["layers.0.mlp.up_proj", "another version", "checkpoint_format"]),
    ] {
        let name = format!("{from}-label");
        copied(&scene, from, &name);
        let relabel = |settings: &mut Value| {
            ["checkpoint_format", "format"].iter().for_each(|key| settings[key] = label.into());
        };
        scene.edit_json(&format!("{name}/config.json"), |c| relabel(&mut c["quantization_config"]));
        scene.edit_json(&format!("{name}/quantize_config.json"), relabel);
        seal(&scene, &name);
        fails(&scene, &name, id, words);
    }
    scene.edit_json("w4/quantize_config.json", |c| c["bits"] = 8.into());
    seal(&scene, "w4");
    let words = ["`bits` is 4 in `quantization_config` of `config.json` and 8 in `quantize_config.json`"];
    fails(&scene, "w4", "files", &words);
    // Not validate alone: nothing reads such a folder.
    let eval = ["eval", "ppl", "w4", "--text", "eval.txt", "--max-windows", "1"];
    scene.refused(&eval, &words);
}

#[test]
fn scales() {
    let scene = demo();
    for (out, args, part, half) in [
        ("w4", &["rtn", "--bits", "4"][..], "scales", true),
        ("ct", &["rtn", "--bits", "4", "--format", "compressed-tensors"], "weight_scale", true),
        ("fp8", &["fp8"], "weight_scale", false),
    ] {
        quantize(&scene, &[args, &["-o", out]].concat());
        let tensor = format!("{UP}.{part}");
        let put = |name: &str, value: f32| {
            edit(&scene, copied(&scene, out, name), |all| {
                let stored = get(all, &tensor);
                match half && stored.dtype != safetensors::Dtype::F32 {
                    true => stored.data[2..4].copy_from_slice(&f16::from_f32(value).to_le_bytes()),
                    false => stored.data[4..8].copy_from_slice(&value.to_le_bytes()),
                }
            });
        };
        for (value, word) in [(f32::NAN, "scale 1 is NaN"), (f32::INFINITY, "scale 1 is inf"), (0.0, "scale 1 is 0")] {
            let name = format!("{out}-{value}");
            put(&name, value);
            fails(&scene, &name, "scales", &[&tensor, word, "model.safetensors"]);
        }
        let gone = format!("{out}-gone");
        edit(&scene, copied(&scene, out, &gone), |all| drop(all.remove(&tensor).unwrap()));
        fails(&scene, &gone, "files", &[UP, &format!("`{part}` is missing")]);
    }
}

/// All numbers of an f16 tensor.
fn halves(all: &mut BTreeMap<String, Stored>, name: &str, change: impl Fn(f32) -> f32) {
    let halves = get(all, name).data.as_chunks_mut::<2>().0;
    halves.iter_mut().for_each(|b| *b = f16::from_f32(change(f16::from_le_bytes(*b).to_f32())).to_le_bytes());
}

#[test]
fn folds() {
    let scene = demo();
    // Rows of zeros take extreme scales, which is honest.
    scene.edit_weights(|all| {
        for (module, row) in [("model.layers.0.mlp.gate_proj", 0), ("model.layers.1.mlp.up_proj", 3)] {
            let stored = all.get_mut(&format!("{module}.weight")).unwrap();
            let bytes = stored.data.len() / stored.shape[0];
            stored.data[row * bytes..(row + 1) * bytes].fill(0);
        }
    });
    quantize(&scene, &["awq", "--group-size", "64", "-o", "awq"]);
    honest(&scene, "awq");
    quantize(&scene, &["rtn", "--bits", "4", "-o", "w4"]);
    for (from, part, factor, words) in [
        ("w4", "q_proj", 1.2, &["q_proj`: its weights are 1.", "its scales are wrong"][..]),
        ("awq", "k_proj", 1.2, &["k_proj`: its weights are 1.", "its scales are wrong"]),
        ("w4", "v_proj", 2.0, &["v_proj` and `", "o_proj`: together they are ", "scales of one of them are wrong"]),
        ("awq", "v_proj", 2.0, &["v_proj` and `", "together they are"]),
        ("awq", "o_proj", 0.5, &["o_proj`: together they are 0."]),
    ] {
        let name = format!("{from}-{part}");
        let tensor = format!("model.layers.2.self_attn.{part}.scales");
        edit(&scene, copied(&scene, from, &name), |all| halves(all, &tensor, |scale| scale * factor));
        fails(&scene, &name, "folds", words);
        assert_eq!(failures(&look(&scene, &name)).len(), 1, "{name}");
    }
    // A norm that says nothing of the scales in its linears.
    let norm = "model.layers.2.input_layernorm.weight";
    let original = get(&mut tensors(&scene.path("model/model.safetensors")), norm).data.clone();
    quantize(&scene, &["smoothquant", "-o", "sq"]);
    edit(&scene, copied(&scene, "sq", "back"), |all| get(all, norm).data = original);
    fails(&scene, "back", "folds", &[Q, "`input_layernorm` does not take that back"]);

    // The same of gentle scales: those that the search of AWQ finds, in whatever block it finds some.
    let norms = ["input_layernorm", "post_attention_layernorm"].map(|norm| format!("model.layers.2.{norm}.weight"));
    let lost = |from: &str, name: &str, norms: &[String]| {
        let mut original = tensors(&scene.path("model/model.safetensors"));
        edit(&scene, copied(&scene, from, name), |all| {
            norms.iter().for_each(|norm| get(all, norm).data = get(&mut original, norm).data.clone());
        });
    };
    quantize(&scene, &["awq", "--group-size", "128", "--rounding", "gptq", "-o", "awq-gptq"]);
    for from in ["awq", "awq-gptq"] {
        honest(&scene, from);
        let back = format!("{from}-back");
        lost(from, &back, &norms);
        let words = ["model.layers.2.input_layernorm`: inputs of q_proj, k_proj, v_proj were scaled alike (by"];
        fails(&scene, &back, "folds", &words);
    }
    // Of 2 % in three channels of four, whatever the method and the bits.
    copied(&scene, "model", "gentle");
    let path = scene.path("gentle/model.safetensors");
    let mut all = tensors(&path);
    for name in ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "input_layernorm"] {
        let stored = get(&mut all, &format!("model.layers.2.{name}.weight"));
        let width = *stored.shape.last().unwrap();
        for (i, half) in stored.data.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let scale = [1.0f32, 1.02, 1.0 / 1.02, 1.02][(i % width * 7 + i % width / 16) % 4];
            let scale = if stored.shape.len() == 1 { 1.0 / scale } else { scale };
            *half = f16::from_f32(f16::from_le_bytes(*half).to_f32() * scale).to_le_bytes();
        }
    }
    let views = all.iter().map(|(name, t)| (name, TensorView::new(t.dtype, t.shape.clone(), &t.data).unwrap()));
    fs::write(&path, serialize(views, None).unwrap()).unwrap();
    let calibration = [&["--no-eval"], &CALIBRATION[..]].concat();
    for (out, args, rest) in [
        ("r8", &["rtn", "gentle", "--bits", "8"][..], &["--no-eval"][..]),
        ("r4", &["rtn", "gentle", "--bits", "4", "--group-size", "64"], &["--no-eval"]),
        ("g4", &["gptq", "gentle", "--bits", "4", "--drift-correction"], &calibration[..]),
        ("r3", &["rtn", "gentle", "--bits", "3", "--group-size", "64"], &["--no-eval"]),
    ] {
        scene.run(&[args, rest, &["-o", out]].concat()).ok();
        honest(&scene, out);
        let back = format!("{out}-back");
        lost(out, &back, &norms[..1]);
        fails(&scene, &back, "folds", &["model.layers.2.input_layernorm`: inputs of", "does not take that back"]);
        let found = look(&scene, &back);
        assert_eq!(failures(&found).len(), 1, "{out}: {:?}", failures(&found));
    }

    // What has failed is not told of again.
    let scales = "model.layers.2.self_attn.k_proj.scales";
    edit(&scene, copied(&scene, "awq", "nan"), |all| {
        get(all, scales).data[2..4].copy_from_slice(&f16::NAN.to_le_bytes());
    });
    let found = look(&scene, "nan");
    assert!(!failures(&found).is_empty());
    for failure in failures(&found) {
        assert!(
            ["files", "scales", "weights"].contains(&&*failure.id) && failure.message.contains("k_proj"),
            "{failure:#?}"
        );
    }
}

#[test]
fn rows() {
    let scene = demo();
    for (out, args) in [
        ("w4", &["rtn", "--bits", "4"][..]),
        ("g2", &["gptq", "--bits", "2", "--group-size", "64"]),
        ("sq", &["smoothquant"]),
    ] {
        quantize(&scene, &[args, &["-o", out]].concat());
        let name = format!("{out}-rows");
        edit(&scene, copied(&scene, out, &name), |all| {
            if out == "sq" {
                let stored = get(all, &format!("{Q}.weight"));
                let row = stored.shape[1];
                let (one, other) = stored.data.split_at_mut(70 * row);
                one[3 * row..4 * row].swap_with_slice(&mut other[..row]);
                // Scales come along: they may be negative.
                get(all, &format!("{Q}.weight_scale")).data.as_chunks_mut::<4>().0.swap(3, 70);
                return;
            }
            // Outputs lie side by side in words of neighbouring inputs.
            let stored = get(all, &format!("{Q}.qweight"));
            let rows = stored.shape[1];
            let mut words = bytes_to_words(&stored.data);
            words.chunks_exact_mut(rows).for_each(|line| line.swap(3, 70));
            stored.data = words_to_bytes(&words).to_vec();
            let scales = get(all, &format!("{Q}.scales")).data.as_chunks_mut::<2>().0;
            scales.chunks_exact_mut(rows).for_each(|line| line.swap(3, 70));
        });
        fails(&scene, &name, "weights", &[Q, "2 of 256 outputs", "first 3", "reference's output 70"]);
    }
    // Two whole modules exchanged, as far as shapes allow.
    edit(&scene, copied(&scene, "w4", "kv"), |all| {
        for part in ["qweight", "scales", "qzeros"] {
            let names = ["k_proj", "v_proj"].map(|name| format!("model.layers.0.self_attn.{name}.{part}"));
            let [one, other] = names.clone().map(|name| all.remove(&name).unwrap());
            let [first, second] = names;
            all.extend([(first, other), (second, one)]);
        }
    });
    for module in ["model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj"] {
        fails(&scene, "kv", "weights", &[module, "128 of 128 outputs", "none of the reference's"]);
    }
}

#[test]
fn tensors_and_files() {
    let scene = demo();
    quantize(&scene, &["rtn", "--bits", "4", "-o", "w4"]);
    quantize(&scene, &["rtn", "--bits", "4", "--max-shard-size", "1", "-o", "shards"]);
    let embedding = "model.embed_tokens.weight";
    // A bit that the manifest knows of, and one that it does not.
    copied(&scene, "w4", "hash");
    let mut bytes = scene.read("hash/model.safetensors");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    scene.write("hash/model.safetensors", &bytes);
    fails(&scene, "hash", "manifest", &["`model.safetensors` has SHA-256", "copy it again"]);
    edit(&scene, copied(&scene, "w4", "edited"), |all| get(all, embedding).data[1] ^= 16);
    fails(&scene, "edited", "tensors", &[embedding, "1 of 524288 elements", "element 0"]);
    let norm = "model.layers.3.post_attention_layernorm.weight";
    edit(&scene, copied(&scene, "w4", "norm"), |all| {
        let halves = get(all, norm).data.as_chunks_mut::<2>().0;
        halves.iter_mut().for_each(|b| *b = f16::from_f32(f16::from_le_bytes(*b).to_f32() * 1.3).to_le_bytes());
    });
    fails(&scene, "norm", "tensors", &[norm, "do not make up for it"]);
    edit(&scene, copied(&scene, "w4", "without"), |all| {
        let moved = all.remove(norm).unwrap();
        all.insert("model.layers.3.other.weight".into(), moved);
    });
    let gone = look(&scene, "without");
    assert!(failures(&gone).iter().any(|f| f.message.contains(norm)), "{:#?}", failures(&gone));

    // Shards.
    honest(&scene, "shards");
    let index = scene.json("shards/model.safetensors.index.json");
    let shard = index["weight_map"][format!("{UP}.qweight")].as_str().unwrap().to_string();
    let path = format!("shards/{shard}");
    let whole = scene.read(&path);
    scene.write(&path, &whole[..whole.len() - 100]);
    fails(&scene, "shards", "files", &[&shard, "damaged"]);
    fails(&scene, "shards", "manifest", &[&shard, "bytes; the manifest says"]);
    scene.write(&path, &whole[..4]);
    fails(&scene, "shards", "files", &[&shard]);
    fs::remove_file(scene.path(&path)).unwrap();
    fails(&scene, "shards", "files", &[&shard, "is missing"]);

    // Another reference.
    scene.edit_weights(|all| all.get_mut(embedding).unwrap().data[0] ^= 1);
    let other = look(&scene, "w4");
    let source = other.findings.iter().find(|finding| finding.id == "source").unwrap();
    assert!(source.status == Status::Warn && source.message.contains("another `model.safetensors`"), "{source:?}");
    fs::remove_file(scene.path("w4").join(manifest::FILE)).unwrap();
    fails(&scene, "w4", "tensors", &[embedding]);
}

#[test]
fn side_files() {
    let scene = demo();
    quantize(&scene, &["rtn", "--bits", "4", "-o", "w4"]);
    let with = |name: &str, change: &dyn Fn(&str)| {
        copied(&scene, "w4", name);
        change(name);
        seal_existing(&scene, name);
    };
    let without =
        |file: &'static str| move |scene: &Scene, name: &str| fs::remove_file(scene.path(name).join(file)).unwrap();
    with("chat", &|name| {
        scene.edit_json(&format!("{name}/tokenizer_config.json"), |c| {
            drop(c.as_object_mut().unwrap().remove("chat_template"))
        });
    });
    let words = ["the chat template is lost", "`tokenizer_config.json`", "copy"];
    fails(&scene, "chat", "side.chat-template", &words);
    // In another of the three places it is there all the same.
    let template = scene.json("model/tokenizer_config.json")["chat_template"].as_str().unwrap().to_string();
    scene.write("chat/chat_template.jinja", &template);
    honest(&scene, "chat");
    scene.write("chat/chat_template.jinja", template.replace(": ", "> "));
    fails(&scene, "chat", "side.chat-template", &["`chat_template.jinja` is not that"]);

    with("tokenizer", &|name| without("tokenizer.json")(&scene, name));
    fails(&scene, "tokenizer", "side.tokenizer", &["`tokenizer.json` is missing"]);
    with("settings", &|name| without("tokenizer_config.json")(&scene, name));
    fails(&scene, "settings", "side.files", &["`tokenizer_config.json` is missing", "belongs to the tokenizer"]);
    with("spaced", &|name| {
        let text = String::from_utf8(scene.read(&format!("{name}/tokenizer.json"))).unwrap();
        scene.write(&format!("{name}/tokenizer.json"), format!("{text}\n"));
    });
    honest(&scene, "spaced");
    with("other", &|name| {
        scene.edit_json(&format!("{name}/tokenizer.json"), |tokenizer: &mut Value| {
            let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
            let (e, a) = (vocab["e"].clone(), vocab["a"].clone());
            vocab.insert("e".into(), a);
            vocab.insert("a".into(), e);
        });
    });
    fails(&scene, "other", "side.tokenizer", &["is not the reference's", "copy the reference's"]);
    with("generation", &|name| without("generation_config.json")(&scene, name));
    let found = honest(&scene, "generation");
    let warned = |f: &&Check| f.status == Status::Warn && f.message.contains("`generation_config.json` is missing");
    assert!(found.findings.iter().any(|f| warned(&f)), "{found:#?}");
    with("eps", &|name| scene.edit_json(&format!("{name}/config.json"), |c| c["rms_norm_eps"] = 1e-3.into()));
    fails(&scene, "eps", "config", &["norm epsilon", "take the reference's"]);
    with("rope", &|name| {
        scene.edit_json(&format!("{name}/config.json"), |c| c["rope_parameters"]["rope_theta"] = 5e5.into());
    });
    fails(&scene, "rope", "config", &["rotary frequencies"]);
    let ids = |name: &str, key: &'static str, value: Value| {
        with(name, &|name| scene.edit_json(&format!("{name}/config.json"), |c| c[key] = value.clone()));
    };
    ids("eos", "eos_token_id", 7.into());
    fails(&scene, "eos", "config", &["`eos_token_id`: 7 in the artifact's config, 1 in the reference's"]);
    ids("more", "eos_token_id", vec![1, 7].into());
    fails(&scene, "more", "config", &["`eos_token_id`: 1, 7 in", "take the reference's"]);
    ids("bos", "bos_token_id", Value::Null);
    fails(&scene, "bos", "config", &["`bos_token_id`: none in the artifact's config, 0 in"]);
    ids("list", "eos_token_id", vec![1].into());
    honest(&scene, "list");
    ids("pad", "pad_token_id", 3.into());
    let found = honest(&scene, "pad").findings;
    assert!(found.iter().any(|f| f.status == Status::Warn && f.message.contains("`pad_token_id`: 3")), "{found:#?}");

    // A token, and a merge, that no shipped text needs.
    let tokenizer = |name: &str, change: &dyn Fn(&mut Value)| {
        with(name, &|name| scene.edit_json(&format!("{name}/tokenizer.json"), |json: &mut Value| change(json)));
    };
    tokenizer("rare", &|json| {
        let vocab = json["model"]["vocab"].as_object_mut().unwrap();
        let rare = vocab.keys().filter(|token| token.chars().count() == 1 && !token.is_ascii()).cloned();
        let rare: Vec<String> = rare.collect();
        let [first, .., last] = &rare[..] else { panic!("no bytes in the vocabulary") };
        let (one, other) = (vocab[first].clone(), vocab[last].clone());
        vocab.insert(first.clone(), other);
        vocab.insert(last.clone(), one);
    });
    fails(&scene, "rare", "side.tokenizer", &["is not the reference's: token", "copy the reference's"]);
    tokenizer("merge", &|json| {
        let merges = json["model"]["merges"].as_array_mut().unwrap();
        let last = merges.len() - 1;
        merges.swap(last - 1, last);
    });
    fails(&scene, "merge", "side.tokenizer", &["is not the reference's: merge", "copy the reference's"]);
}

/// [`seal`], for what is still there.
fn seal_existing(scene: &Scene, artifact: &str) {
    let dir = scene.path(artifact);
    let manifest = Manifest::read(&dir).unwrap();
    let names: Vec<String> =
        manifest.outputs.iter().map(|record| record.file.clone()).filter(|file| dir.join(file).exists()).collect();
    Manifest { outputs: hash_files(&dir, &names).unwrap(), ..manifest }.write(&dir).unwrap();
}

#[test]
fn gguf_files() {
    let scene = demo();
    quantize(&scene, &["gguf", "--type", "Q4_0", "-o", "a.gguf"]);
    honest(&scene, "a.gguf");
    let whole = scene.read("a.gguf");
    let place = |name: &str| {
        let file = GgufFile::open(&scene.path("a.gguf")).unwrap();
        let bytes = file.tensor(name).unwrap().bytes.to_vec();
        whole.windows(64).position(|window| window == &bytes[..64]).unwrap()
    };
    scene.write("b.gguf", &whole[..whole.len() - 1000]);
    fails(&scene, "b.gguf", "files", &["b.gguf"]);
    // The scale of one block.
    let mut bytes = whole.clone();
    let at = place("blk.1.ffn_up.weight");
    bytes[at..at + 2].copy_from_slice(&f16::NAN.to_le_bytes());
    scene.write("b.gguf", &bytes);
    fails(&scene, "b.gguf", "weights", &[UP, "first 0", "no finite numbers"]);
    let mut bytes = whole.clone();
    let at = place("blk.1.ffn_norm.weight");
    bytes[at + 3] ^= 0x80;
    scene.write("b.gguf", &bytes);
    fails(&scene, "b.gguf", "tensors", &["model.layers.1.post_attention_layernorm.weight"]);
    // Two rows of 256 inputs: 8 blocks of 18 bytes.
    let mut bytes = whole.clone();
    let at = place("blk.1.ffn_up.weight");
    let (one, other) = bytes[at..].split_at_mut(9 * 144);
    one[..144].swap_with_slice(&mut other[..144]);
    scene.write("b.gguf", &bytes);
    fails(&scene, "b.gguf", "weights", &[UP, "2 of 768 outputs", "reference's output 9"]);
    // Where a type is too coarse for all of a module, nothing was exchanged.
    quantize(&scene, &["gguf", "--type", "TQ1_0", "-o", "coarse.gguf"]);
    for failure in failures(&look(&scene, "coarse.gguf")) {
        assert!(!failure.message.contains("exchanged"), "{failure:#?}");
    }
    scene.edit_json("model/tokenizer_config.json", |config| config["chat_template"] = "other".into());
    fails(&scene, "a.gguf", "side.chat-template", &["is not that"]);
}
