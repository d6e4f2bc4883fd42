//! What goes with the weights into an artifact, into a GGUF file, and back: chat templates, the tokens that end a text,
//! the model card.

use std::fs;

use quantkit::format::gguf::read::GgufFile;
use quantkit::format::gguf::value::{Metadata, Text, Value as Typed};
use quantkit::format::verify_manifest;
use serde_json::{Value, json};

use crate::support::repository;
use crate::support::scene::{Scene, copy_folder};

const DEFAULT: &str = "{% for m in messages %}<{{ m.content }}>{% endfor %}";
const TOOLS: &str = "{% for m in messages %}[{{ m.content }}]{% endfor %}";

/// A scene whose `model/` is the demo checkpoint.
fn demo() -> Scene {
    let scene = Scene::demo();
    copy_folder(&repository("calib/demo/target"), &scene.model());
    scene
}

fn metadata(scene: &Scene, file: &str) -> Metadata {
    GgufFile::open(&scene.path(file)).unwrap().metadata().clone()
}

fn templates(scene: &Scene, file: &str) -> [Option<Typed>; 3] {
    let metadata = metadata(scene, file);
    ["tokenizer.chat_template", "tokenizer.chat_template.tool_use", "tokenizer.chat_templates"]
        .map(|key| metadata.get(key).cloned())
}

#[test]
fn chat_templates_in_all_their_places() {
    let named = json!([{"name": "default", "template": DEFAULT}, {"name": "tool_use", "template": TOOLS}]);
    let forms: [&dyn Fn(&Scene); 3] = [
        &|scene| scene.edit_json("model/tokenizer_config.json", |c| c["chat_template"] = named.clone()),
        &|scene| {
            let object = json!({"tool_use": TOOLS, "default": DEFAULT});
            scene.edit_json("model/tokenizer_config.json", |c| c["chat_template"] = object);
        },
        &|scene| {
            scene
                .edit_json("model/tokenizer_config.json", |c| drop(c.as_object_mut().unwrap().remove("chat_template")));
            scene.write("model/chat_template.jinja", DEFAULT);
            fs::create_dir(scene.path("model/additional_chat_templates")).unwrap();
            scene.write("model/additional_chat_templates/tool_use.jinja", TOOLS);
        },
    ];
    let chat = |scene: &Scene, model: &str| {
        let args = ["generate", model, "--prompt", "hi", "--chat", "--max-tokens", "1", "--json"];
        scene.run(&args).ok().json()["prompt_tokens"].as_u64().unwrap()
    };
    let wanted = [Some(DEFAULT.into()), Some(TOOLS.into()), Some(vec![Text::from("tool_use")].into())];
    for (at, form) in forms.into_iter().enumerate() {
        let scene = demo();
        form(&scene);
        let tokens = chat(&scene, "model");
        scene.run(&["gguf", "model", "--type", "Q8_0", "-o", "a.gguf"]).ok();
        assert_eq!(templates(&scene, "a.gguf"), wanted, "form {at}");
        scene.run(&["convert", "a.gguf", "-o", "back"]).ok();
        assert_eq!(scene.json("back/tokenizer_config.json")["chat_template"], named);
        scene.run(&["gguf", "back", "--type", "Q8_0", "-o", "b.gguf"]).ok();
        assert_eq!(templates(&scene, "b.gguf"), wanted, "form {at}");
        scene.run(&["rtn", "model", "-o", "w4", "--no-eval"]).ok();
        assert_eq!(verify_manifest(&scene.path("w4")).unwrap(), []);
        for model in ["a.gguf", "back", "b.gguf", "w4"] {
            assert_eq!(chat(&scene, model), tokens, "form {at}: {model}");
        }
        if at == 2 {
            let file = "additional_chat_templates/tool_use.jinja";
            assert_eq!(scene.read(&format!("w4/{file}")), TOOLS.as_bytes());
            assert_eq!(scene.json("w4/quantkit.json")["outputs"][0]["file"], file);
            // What is lost is named.
            fs::remove_dir_all(scene.path("w4/additional_chat_templates")).unwrap();
            let args = ["validate", "w4", "--reference", "model", "-o", "r", "--skip", "control,modules,kv,spec"];
            let short = ["--text", "eval.txt", "--window", "64", "--max-windows", "1"];
            scene.run(&[&args[..], &short].concat()).ended(1).says(&["the chat template `tool_use` is lost"]);
        }
    }
    let scene = demo();
    scene.edit_json("model/tokenizer_config.json", |c| c["chat_template"] = "other".into());
    scene.write("model/chat_template.jinja", DEFAULT);
    let words = ["`model` has two chat templates of the name `default`", "`chat_template.jinja`", "remove one of them"];
    scene.refused(&["gguf", "model", "-o", "x.gguf"], &words);
    scene.refused(&["generate", "model", "--prompt", "hi", "--chat"], &words);
    // The same from the folder of templates, and twice in one list.
    scene.edit_json("model/tokenizer_config.json", |c| drop(c.as_object_mut().unwrap().remove("chat_template")));
    fs::create_dir(scene.path("model/additional_chat_templates")).unwrap();
    scene.write("model/additional_chat_templates/default.jinja", TOOLS);
    let words = ["`chat_template.jinja`", "`additional_chat_templates/default.jinja`", "remove one of them"];
    scene.refused(&["gguf", "model", "-o", "x.gguf"], &words);
    let scene = demo();
    let twice = json!([{"name": "default", "template": DEFAULT}, {"name": "default", "template": TOOLS}]);
    scene.edit_json("model/tokenizer_config.json", |c| c["chat_template"] = twice);
    scene.refused(&["gguf", "model", "-o", "x.gguf"], &["has two templates of the name `default`; keep one"]);
}

/// Ids of a GGUF file: EOS, EOT, EOM, and quantkit's own list.
fn ends(metadata: &Metadata) -> ([Option<u32>; 3], Option<Vec<u32>>) {
    let one = |kind: &str| metadata.read::<u32>(&format!("tokenizer.ggml.{kind}_token_id")).unwrap();
    (["eos", "eot", "eom"].map(one), metadata.read("quantkit.eos_token_ids").unwrap())
}

#[test]
fn every_end_of_a_text() {
    let scene = demo();
    let own = scene.json("model/generation_config.json")["eos_token_id"].as_u64().unwrap() as u32;
    // The first token of a text, which ends at once where that token is an end.
    let first = |model: &str| {
        let args = ["generate", model, "--prompt", "It was a", "--max-tokens", "1", "--json"];
        scene.run(&args).ok().json()
    };
    scene.run(&["gguf", "model", "--type", "F32", "-o", "one.gguf"]).ok();
    assert_eq!(ends(&metadata(&scene, "one.gguf")), ([Some(own), None, None], None));
    let before = first("one.gguf");
    assert_eq!((&before["tokens"], &before["stop"]), (&json!(1), &json!("token limit")));
    let token = before["text"].as_str().unwrap().replace(' ', "Ġ").replace('\n', "Ċ");
    let id = scene.json("model/tokenizer.json")["model"]["vocab"][token].as_u64().unwrap() as u32;

    let list = [own, 300, 301, id];
    scene.edit_json("model/generation_config.json", |c| c["eos_token_id"] = json!(list));
    let warning = ["warning: the model ends a text at 4 tokens", &format!("llama.cpp will not stop at {id} (`")];
    scene.run(&["gguf", "model", "--type", "F32", "-o", "four.gguf"]).ok().says(&warning);
    let found = ends(&metadata(&scene, "four.gguf"));
    assert_eq!(found, ([Some(own), Some(300), Some(301)], Some(list.to_vec())));
    scene.run(&["convert", "four.gguf", "-o", "back", "--dtype", "f32"]).ok();
    for file in ["back/generation_config.json", "back/config.json"] {
        assert_eq!(scene.json(file)["eos_token_id"], json!(list), "{file}");
    }
    for model in ["model", "four.gguf", "back"] {
        let got = first(model);
        assert_eq!((&got["stop"], &got["tokens"]), (&json!("end of sequence"), &json!(0)), "{model}: {got}");
    }
    // Two need no key of quantkit's own: other programs read the file as well.
    scene.edit_json("model/generation_config.json", |c| c["eos_token_id"] = json!([own, id]));
    let ran = scene.run(&["gguf", "model", "--type", "F32", "-o", "two.gguf"]).ok();
    assert!(!ran.stderr.contains("ends a text"), "{}", ran.stderr);
    assert_eq!(ends(&metadata(&scene, "two.gguf")), ([Some(own), Some(id), None], None));
    assert_eq!(first("two.gguf")["tokens"], json!(0));
}

#[test]
fn the_card_comes_back() {
    let scene = demo();
    let card = "---\nlicense: apache-2.0\ntags:\n- tiny\n- 'a: b'\nlanguage: [en, de]\nbasename: Demo\nauthor: Some One\n\
                base_model: lab/Base-7B-v1\ndatasets:\n- lab/texts\n---\n# The demo\n";
    scene.write("model/README.md", card);
    scene.run(&["gguf", "model", "--type", "Q8_0", "-o", "a.gguf"]).ok();
    scene.run(&["convert", "a.gguf", "-o", "chat-model-7B-v3"]).ok();
    let back = String::from_utf8(scene.read("chat-model-7B-v3/README.md")).unwrap();
    assert!(back.starts_with("---\nlicense: apache-2.0\n") && back.contains("\ntags:\n- tiny\n- \"a: b\"\n"), "{back}");
    scene.run(&["gguf", "chat-model-7B-v3", "--type", "Q8_0", "-o", "b.gguf"]).ok();
    let general = |file: &str| -> Vec<(String, Typed)> {
        let all = metadata(&scene, file);
        all.iter().filter(|(key, _)| key.starts_with("general.")).map(|(k, v)| (k.into(), v.clone())).collect()
    };
    let (first, second) = (general("a.gguf"), general("b.gguf"));
    for key in ["license", "tags", "languages", "basename", "base_model.0.repo_url", "dataset.0.name", "author"] {
        assert!(first.iter().any(|(name, _)| *name == format!("general.{key}")), "{key}: {first:?}");
    }
    assert_eq!(second, first);
    // An artifact of the file has it too.
    scene.run(&["gguf", "model", "--type", "F16", "-o", "f.gguf"]).ok();
    scene.run(&["rtn", "f.gguf", "-o", "w4", "--no-eval"]).ok();
    assert_eq!(scene.read("w4/README.md"), back.as_bytes());
}

/// The value under a key of a JSON file stays one value where it was one.
#[test]
fn one_end_stays_one() {
    let scene = demo();
    scene.run(&["gguf", "model", "--type", "Q8_0", "-o", "a.gguf"]).ok();
    scene.run(&["convert", "a.gguf", "-o", "back"]).ok();
    assert!(matches!(scene.json("back/generation_config.json")["eos_token_id"], Value::Number(_)));
}
