//! Tokenizer, chat template, corpus and perplexity conventions, on the demo checkpoint and on made-up folders.

use std::convert::Infallible;
use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use quantkit::calibrate::corpus::{Corpus, CorpusError, Sampling, windows};
use quantkit::checkpoint::Checkpoint;
use quantkit::evaluate::perplexity::{BATCH_TOKENS, Request, measure};
use quantkit::evaluate::windows::Convention;
use quantkit::model::chat::{ChatError, ChatTemplate, Message};
use quantkit::model::tokenizer::{BosHabit, BosMode, BosRule, Tokenizer, TokenizerError, ids_sha256};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::repository;

fn demo() -> Checkpoint {
    Checkpoint::open(&repository("calib/demo/target")).unwrap()
}

fn demo_tokenizer() -> Tokenizer {
    Tokenizer::load(&demo()).unwrap()
}

fn demo_json(name: &str) -> Value {
    serde_json::from_str(&fs::read_to_string(repository("calib/demo/target").join(name)).unwrap()).unwrap()
}

/// A model folder with one weight and the demo's files, some replaced (`Some`) or taken away (`None`).
fn folder(changes: &[(&str, Option<String>)]) -> (TempDir, Checkpoint) {
    let dir = tempfile::tempdir().unwrap();
    let header = br#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    let weights = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 4]].concat();
    fs::write(dir.path().join("model.safetensors"), weights).unwrap();
    for name in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(repository("calib/demo/target").join(name), dir.path().join(name)).unwrap();
    }
    for (name, content) in changes {
        match content {
            Some(content) => fs::write(dir.path().join(name), content).unwrap(),
            None => fs::remove_file(dir.path().join(name)).unwrap(),
        }
    }
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    (dir, checkpoint)
}

fn loaded(changes: &[(&str, Option<String>)]) -> Result<Tokenizer, TokenizerError> {
    let (_dir, checkpoint) = folder(changes);
    Tokenizer::load(&checkpoint)
}

struct Golden {
    text: String,
    ids: Vec<u32>,
    with_special: Vec<u32>,
}

fn golden() -> Vec<Golden> {
    let text = fs::read_to_string(repository("tests/golden/demo/tokens.json")).unwrap();
    let list: Vec<Value> = serde_json::from_str(&text).unwrap();
    let ids = |v: &Value| v.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
    list.iter()
        .map(|row| Golden {
            text: row["text"].as_str().unwrap().into(),
            ids: ids(&row["ids"]),
            with_special: ids(&row["ids_with_special"]),
        })
        .collect()
}

#[test]
fn tokens_are_those_of_the_python_tokenizer() {
    let tokenizer = demo_tokenizer();
    let rows = golden();
    assert!(rows.len() >= 10);
    for row in rows {
        assert_eq!(tokenizer.encode(&row.text).unwrap(), row.ids, "{:?}", row.text);
        assert_eq!(row.with_special, [&[tokenizer.bos().unwrap()], &row.ids[..]].concat(), "{:?}", row.text);
        assert_eq!(tokenizer.decode(&row.ids, false).unwrap(), row.text);
    }
}

#[test]
fn streaming_gives_whole_characters_and_the_same_text() {
    let tokenizer = demo_tokenizer();
    for row in golden() {
        let mut stream = tokenizer.decode_stream(false);
        let mut text = String::new();
        for &id in &row.ids {
            let piece = stream.push(id).unwrap();
            assert!(!piece.contains(char::REPLACEMENT_CHARACTER), "{piece:?} of {:?}", row.text);
            text += &piece;
        }
        text += &stream.finish().unwrap();
        assert_eq!(text, row.text);
    }
}

#[test]
fn streaming_drops_half_a_character_at_the_end_and_skips_special_tokens() {
    let tokenizer = demo_tokenizer();
    let whole = tokenizer.encode("日").unwrap();
    assert!(whole.len() > 1, "the demo vocabulary has no token for this character");
    let mut stream = tokenizer.decode_stream(true);
    let ids = [&tokenizer.encode("a").unwrap()[..], &[tokenizer.eos()[0]], &whole[..whole.len() - 1]].concat();
    let text: String = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
    assert_eq!((text.as_str(), stream.finish().unwrap().as_str()), ("a", ""));
    // Broken bytes that never become a character are shown sooner or later.
    let mut stream = tokenizer.decode_stream(true);
    let text: String = (0..100).map(|_| stream.push(whole[whole.len() - 1]).unwrap()).collect();
    assert!(text.chars().count() > 80, "{text}");
}

#[test]
fn streaming_of_sentencepiece_tokens_keeps_spaces_and_joins_bytes() {
    let mut vocab = json!({"<unk>": 0, "<s>": 1, "</s>": 2});
    for byte in 0..256 {
        vocab[format!("<0x{byte:02X}>")] = json!(3 + byte);
    }
    for (i, piece) in ["\u{2581}", "H", "i", "\u{2581}H", "\u{2581}Hi"].into_iter().enumerate() {
        vocab[piece] = json!(259 + i);
    }
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(1, "<s>"), special(2, "</s>")],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u{2581}"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"}]},
        "pre_tokenizer": null,
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": 0.9, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocab, "merges": [["\u{2581}", "H"], ["\u{2581}H", "i"]]}
    });
    let config = json!({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": false});
    let tokenizer =
        loaded(&[("tokenizer.json", Some(file.to_string())), ("tokenizer_config.json", Some(config.to_string()))])
            .unwrap();
    assert!(tokenizer.adds_bos());
    assert!(tokenizer.bos_evidence().ends_with("`add_bos_token: false` is overruled"));

    let text = "Hi Hi 日本 🙂 Hi";
    let ids = tokenizer.encode(text).unwrap();
    assert_eq!(ids[..3], [263, 263, 259]);
    // Dropout is off, or this would hardly ever be the same twice.
    assert!((0..20).all(|_| tokenizer.encode(text).unwrap() == ids));
    let mut stream = tokenizer.decode_stream(true);
    let pieces: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
    assert_eq!(pieces[..3], ["Hi", " Hi", " "]);
    assert_eq!(pieces.concat(), text);
    assert!(!pieces.concat().contains(char::REPLACEMENT_CHARACTER));
}

#[test]
fn the_demo_s_special_tokens() {
    let tokenizer = demo_tokenizer();
    assert_eq!((tokenizer.bos(), tokenizer.eos(), tokenizer.rows()), (Some(0), &[1][..], 2048));
    assert_eq!(tokenizer.rolling_prefix(), Some(0));
    assert!(tokenizer.adds_bos());
    assert_eq!(tokenizer.bos_evidence(), "tokenizer.json puts token 0 before a text");
    assert_eq!(tokenizer.token(0).as_deref(), Some("<|begin|>"));
    assert_eq!(tokenizer.id("<|end|>"), Some(1));
}

#[test]
fn bos_comes_from_the_files() {
    let mut silent = demo_json("tokenizer.json");
    silent["post_processor"] = Value::Null;
    let silent = |key: Value| {
        let config = json!({"bos_token": {"content": "<|begin|>"}, "eos_token": "<|end|>", "add_bos_token": key});
        loaded(&[("tokenizer.json", Some(silent.to_string())), ("tokenizer_config.json", Some(config.to_string()))])
            .unwrap()
    };
    assert!(silent(json!(true)).adds_bos());
    assert!(silent(json!(true)).bos_evidence().contains("`add_bos_token: true`"));
    assert!(!silent(json!(false)).adds_bos());
    assert!(!silent(json!(null)).adds_bos());
    assert_eq!(silent(json!(null)).bos(), Some(0));

    let rule = |mode: BosMode, family, tokenizer: &Tokenizer, habit| mode.settle(tokenizer, family, habit).unwrap();
    let (with, without) = (demo_tokenizer(), silent(json!(false)));
    assert_eq!(rule(BosMode::Auto, false, &with, BosHabit::Once), BosRule::Once(0));
    assert_eq!(rule(BosMode::Auto, false, &with, BosHabit::Window), BosRule::Window(0));
    assert_eq!(rule(BosMode::Auto, true, &with, BosHabit::Once), BosRule::Window(0));
    assert_eq!(rule(BosMode::Auto, false, &without, BosHabit::Window), BosRule::None);
    assert_eq!(rule(BosMode::Window, false, &without, BosHabit::Once), BosRule::Window(0));
    assert_eq!(rule(BosMode::None, true, &with, BosHabit::Once), BosRule::None);

    let generation = json!({"eos_token_id": [5, 1, 9999]}).to_string();
    let mut config = demo_json("config.json");
    config["bos_token_id"] = Value::Null;
    let nameless = loaded(&[
        (
            "tokenizer.json",
            Some({
                let mut file = demo_json("tokenizer.json");
                file["post_processor"] = Value::Null;
                file.to_string()
            }),
        ),
        ("tokenizer_config.json", Some(json!({"eos_token": "<|end|>"}).to_string())),
        ("generation_config.json", Some(generation)),
        ("config.json", Some(config.to_string())),
    ])
    .unwrap();
    assert_eq!((nameless.bos(), nameless.eos()), (None, &[1, 5][..]));
    assert_eq!(nameless.rolling_prefix(), Some(1));
    let error = BosMode::Window.settle(&nameless, false, BosHabit::Once).unwrap_err().to_string();
    assert!(error.contains("use `--bos none`"), "{error}");
}

#[test]
fn truncation_and_padding_are_off() {
    let mut file = demo_json("tokenizer.json");
    file["truncation"] = json!({"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0});
    file["padding"] = json!({
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 1,
        "pad_type_id": 0, "pad_token": "<|end|>"
    });
    let tokenizer = loaded(&[("tokenizer.json", Some(file.to_string()))]).unwrap();
    let row = golden().into_iter().max_by_key(|row| row.ids.len()).unwrap();
    assert_eq!(tokenizer.encode(&row.text).unwrap(), row.ids);
}

#[test]
fn tokenizer_and_model_must_fit() {
    let mut config = demo_json("config.json");
    config["vocab_size"] = json!(2000);
    let error = loaded(&[("config.json", Some(config.to_string()))]).unwrap_err().to_string();
    assert!(error.contains("needs 2048 embedding rows; the model has 2000"), "{error}");
    config["vocab_size"] = json!(2112);
    let tokenizer = loaded(&[("config.json", Some(config.to_string()))]).unwrap();
    assert_eq!((tokenizer.rows(), tokenizer.warning()), (2048, None));
    let mut file = demo_json("tokenizer.json");
    file["model"]["vocab"]["<last>"] = json!(u32::MAX);
    let error = loaded(&[("tokenizer.json", Some(file.to_string()))]).unwrap_err().to_string();
    assert!(error.contains("needs 4294967296 embedding rows"), "{error}");
}

/// Gemma 3 1B and many finetunes of Llama add a token after the last row of the embedding.
#[test]
fn tokens_may_be_added_beyond_the_embedding() {
    let mut file = demo_json("tokenizer.json");
    let added = |id: u32, content: &str| {
        json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": true
        })
    };
    for (id, token) in [(2048, "[PAD]"), (2049, "<image>")] {
        file["added_tokens"].as_array_mut().unwrap().push(added(id, token));
    }
    let tokenizer = loaded(&[("tokenizer.json", Some(file.to_string()))]).unwrap();
    let warning = tokenizer.warning().unwrap();
    assert!(warning.contains("adds token 2048 (`[PAD]`) and 1 more") && warning.contains("2048 rows"), "{warning}");
    assert_eq!(tokenizer.encode("[PAD]").unwrap(), [2048]);
    assert_eq!(tokenizer.encode("plain text").unwrap(), demo_tokenizer().encode("plain text").unwrap());
}

#[test]
fn a_missing_or_broken_tokenizer_is_told_with_the_remedy() {
    let error = loaded(&[("tokenizer.json", None)]).unwrap_err().to_string();
    assert!(error.contains("copy it"), "{error}");
    let error = loaded(&[("tokenizer.json", None), ("tokenizer.model", Some("x".into()))]).unwrap_err().to_string();
    assert!(error.contains("`tokenizer.model` alone is not read"), "{error}");
    let error = loaded(&[("tokenizer.json", Some("{}".into()))]).unwrap_err();
    assert!(matches!(error, TokenizerError::Invalid { .. }), "{error}");
}

#[test]
fn megabytes_are_tokenized_in_seconds() {
    let tokenizer = demo_tokenizer();
    let corpus = Corpus::builtin();
    let bytes = corpus.facts.bytes;
    let began = Instant::now();
    let tokens = corpus.tokens(&tokenizer).unwrap();
    let took = began.elapsed();
    assert!(tokens.len() > bytes / 8, "{} tokens of {bytes} bytes", tokens.len());
    assert!(took < Duration::from_secs(30), "{bytes} bytes took {took:?}");
    assert_eq!(tokenizer.decode(&tokens, false).unwrap(), corpus.text().unwrap());
    assert_ne!(ids_sha256(&tokens), ids_sha256(&tokens[1..]));
}

/// ChatML, as SmolLM2 and Qwen have it: a system turn is put first where there is none.
const CHATML: &str = "{% for m in messages %}\n\
    {% if loop.first and m['role'] != 'system' %}{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}\n\
    {{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}\n\
    {% endfor %}\n\
    {% if add_generation_prompt %}\n    {{ '<|im_start|>assistant\n' }}\n{% endif %}\n";

/// Headers, BOS, trimmed content and a date, as Llama 3 has them.
const HEADERS: &str = "{{- bos_token }}\n\
    {%- if strftime_now is defined %}{% set date = strftime_now('%d %b %Y') %}{% else %}{% set date = '?' %}{% endif %}\n\
    {%- if messages[0]['role'] == 'system' %}\n\
    {%- set system = messages[0]['content']|trim %}{%- set messages = messages[1:] %}\n\
    {%- else %}{%- set system = '' %}{%- endif %}\n\
    {{- '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + date + '\n' + system + '<|eot_id|>' }}\n\
    {%- for message in messages %}\n\
    {%- if message.role not in ['user', 'assistant'] %}{{- raise_exception('no role ' ~ message.role) }}{%- endif %}\n\
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}\n\
    {%- endfor %}\n\
    {%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}\n";

fn turn(role: &str, content: &str) -> Message {
    Message { role: role.into(), content: content.into() }
}

fn template(source: &str) -> Result<ChatTemplate, ChatError> {
    ChatTemplate::new(source, "template", Some("<s>".into()), Some("</s>".into()))
}

#[test]
fn chat_templates_of_two_kinds() {
    let talk = [turn("user", " Hi <there> "), turn("assistant", "Yes?")];
    let got = template(CHATML).unwrap().render(&talk, true).unwrap();
    // Lines that hold only a block leave nothing behind; a printed value keeps the line break after it.
    assert_eq!(
        got,
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi <there> <|im_end|>\n\n\
         <|im_start|>assistant\nYes?<|im_end|>\n\n    <|im_start|>assistant\n\n"
    );

    let headers = template(HEADERS).unwrap();
    assert_eq!(
        headers.render(&talk, false).unwrap(),
        "<s><|start_header_id|>system<|end_header_id|>\n\nToday: 26 Jul 2024\n<|eot_id|>\
         <|start_header_id|>user<|end_header_id|>\n\nHi <there><|eot_id|>\
         <|start_header_id|>assistant<|end_header_id|>\n\nYes?<|eot_id|>"
    );
    let got = headers.render(&[turn("system", "S"), turn("user", "U")], true).unwrap();
    assert!(
        got.starts_with("<s><|start_header_id|>system<|end_header_id|>\n\nToday: 26 Jul 2024\nS<|eot_id|>"),
        "{got}"
    );
    assert!(got.ends_with("U<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"), "{got}");
    let error = headers.render(&[turn("tool", "x")], false).unwrap_err();
    assert!(matches!(&error, ChatError::Refused { why, .. } if why == "no role tool"), "{error}");
}

#[test]
fn hostile_templates_are_stopped() {
    let hostile = [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ 'x' * 2000000000 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set ns = namespace(s='x') %}{% for a in range(64) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(l=[1]) %}{% for a in range(50) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l | tojson }}",
        "{% set ns = namespace(l=[1]) %}{% for a in range(50) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
        "{{ [1] | tojson(indent=999999999999) }}{% set ns = namespace(l=1) %}{% for a in range(5000) %}\
         {% set ns.l = [ns.l] %}{% endfor %}{{ ns.l | tojson }}",
        "{% include 'chat' %}",
    ];
    for source in hostile {
        let began = Instant::now();
        let outcome = template(source).and_then(|t| t.render(&[turn("user", "hi")], true));
        outcome.map(|text| text.len()).expect_err(source);
        assert!(began.elapsed() < Duration::from_secs(10), "{source}: {:?}", began.elapsed());
    }
    let endless = template(hostile[0]).unwrap().render(&[], true).unwrap_err();
    assert!(matches!(endless, ChatError::Endless { line: 1, .. }), "{endless}");
    let flood = template(hostile[1]).unwrap().render(&[], true).unwrap_err();
    assert!(matches!(flood, ChatError::TooMuch { .. }), "{flood}");
    let long = template(&"x".repeat(300 << 10)).unwrap_err();
    assert!(matches!(long, ChatError::TooLong { bytes: 307_200, .. }), "{long}");
}

#[test]
fn the_template_s_three_places() {
    let rendered = |changes: &[(&str, Option<String>)]| {
        let (_dir, checkpoint) = folder(changes);
        let chat = ChatTemplate::load(&checkpoint)?;
        chat.map(|chat| chat.render(&[], false)).transpose()
    };
    let file = |name, content: Value| (name, Some(content.to_string()));
    let config = |template: Value| file("tokenizer_config.json", json!({"chat_template": template, "bos_token": "B"}));
    let jinja = ("chat_template.jinja", Some("{{ bos_token }} jinja".to_owned()));
    let processor = file("chat_template.json", json!({"chat_template": "processor"}));

    assert_eq!(rendered(&[]).unwrap(), None);
    assert_eq!(rendered(&[jinja.clone(), processor.clone()]).unwrap().as_deref(), Some("<|begin|> jinja"));
    // In two places it may be, if it is one; jinja drops a line end at the end.
    let same = config(json!("{{ bos_token }} jinja\n"));
    assert_eq!(rendered(&[jinja.clone(), same]).unwrap().as_deref(), Some("B jinja"));
    let error = rendered(&[jinja.clone(), config(json!("config"))]).unwrap_err().to_string();
    assert!(
        error.contains("two chat templates of the name `default`: that in `chat_template.jinja` is not"),
        "{error}"
    );
    assert_eq!(rendered(&[config(json!({"x": "t", "default": "d"}))]).unwrap().as_deref(), Some("d"));
    assert_eq!(rendered(&[config(json!("config")), processor.clone()]).unwrap().as_deref(), Some("config"));
    assert_eq!(rendered(&[processor]).unwrap().as_deref(), Some("processor"));
    let named = |name: &str| json!([{"name": "tool_use", "template": "t"}, {"name": name, "template": "d"}]);
    assert_eq!(rendered(&[config(named("default"))]).unwrap().as_deref(), Some("d"));
    let error = rendered(&[config(named("rag"))]).unwrap_err().to_string();
    assert!(error.contains("(tool_use, rag)"), "{error}");
    let error = rendered(&[("chat_template.jinja", Some("a\nb {{ x".into()))]).unwrap_err().to_string();
    assert!(error.contains("chat_template.jinja` fails at line 2"), "{error}");
}

/// A file and its corpus, which reads the file again when its text is asked for.
fn corpus(name: &str, content: impl AsRef<[u8]>) -> Result<(TempDir, Corpus), CorpusError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    fs::write(&path, content).unwrap();
    let chat = template(CHATML).unwrap();
    let corpus = Corpus::read(&path, Some(Arc::new(move |messages| chat.render(messages, false))))?;
    Ok((dir, corpus))
}

#[test]
fn corpora_from_files() {
    let (_dir, text) = corpus("a.txt", "\u{feff}one\n\ntwo\n").unwrap();
    assert_eq!(text.all_documents().unwrap(), ["one\n\ntwo\n"]);
    assert_eq!(text.sha256, "0d3cce5abe0888511afe66aece8c9b43c5fb070559c747d16c5b16bfa1ed952f");

    let lines = concat!(
        r#"{"text": "first", "id": 1}"#,
        "\n\n",
        r#"{"text": ""}"#,
        "\r\n",
        r#"{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]}]}"#,
    );
    let (_dir, chat) = corpus("a.jsonl", lines).unwrap();
    assert_eq!(
        chat.all_documents().unwrap(),
        ["first", "<|im_start|>system\ns<|im_end|>\n\n<|im_start|>user\nu<|im_end|>\n\n"]
    );

    let tokenizer = demo_tokenizer();
    let [a, b] = [0, 1].map(|i| tokenizer.encode(&chat.all_documents().unwrap()[i]).unwrap());
    assert_eq!(chat.tokens(&tokenizer).unwrap(), [&a[..], &[1], &b[..]].concat());
    // A document that ends with EOS itself gets no second one.
    let (_dir, ended) = corpus("a.jsonl", "{\"text\": \"x<|end|>\"}\n{\"text\": \"y\"}").unwrap();
    let tokens = ended.tokens(&tokenizer).unwrap();
    assert_eq!(tokens.iter().filter(|id| **id == 1).count(), 1, "{tokens:?}");
}

#[test]
fn documents_beyond_what_is_needed_are_not_tokenized() {
    let tokenizer = Tokenizer::load(&demo()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("many.jsonl");
    fs::write(&path, "{\"text\": \"a whale\"}\n".repeat(600)).unwrap();
    let corpus = Corpus::read(&path, None).unwrap();
    let (all, some) = (corpus.tokens(&tokenizer).unwrap(), corpus.first_tokens(&tokenizer, 20).unwrap());
    assert!(some.len() >= 20 && some.len() < all.len());
    assert_eq!(some[..], all[..some.len()]);
    assert_eq!(corpus.text().unwrap().matches("a whale\n\na whale").count(), 300, "joined by blank lines");
}

#[test]
fn bad_corpora_are_told_by_line() {
    let message = |name: &str, content: &[u8]| corpus(name, content).unwrap_err().to_string();
    let text = message("a.jsonl", b"{\"text\": \"ok\"}\n{\"text\": }\n");
    assert!(text.ends_with("a.jsonl`, line 2: not JSON: expected value at column 10"), "{text}");
    let text = message("a.jsonl", b"{\"prompt\": \"x\"}");
    assert!(text.ends_with("line 1: has neither `text` nor `messages`"), "{text}");
    let text = message("a.jsonl", b"\n{\"text\": 3}");
    assert!(text.ends_with("line 2: `text` is not a string"), "{text}");
    let text = message("a.jsonl", b"{\"messages\": [{\"role\": \"user\"}]}");
    assert!(text.ends_with("line 1: message 1 has no `content`"), "{text}");
    let text = message("a.jsonl", br#"{"messages": [{"role": "user", "content": [{"type": "image"}]}]}"#);
    assert!(text.ends_with("message 1 has content other than text"), "{text}");
    assert!(message("a.txt", b" \n").ends_with("holds no text"));
    assert!(message("a.jsonl", b"").ends_with("holds no text"));
    assert!(message("a.txt", b"ab\xff").contains("first bad byte at 2"));
    assert!(message("a.parquet", b"x").contains(".parquet files are not read"));

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.jsonl");
    fs::write(&path, "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}]}").unwrap();
    assert!(matches!(Corpus::read(&path, None), Err(CorpusError::NoTemplate { line: 1, .. })));
    let refuse = |_: &[Message]| Err(ChatError::Refused { origin: "t".into(), why: "no".into() });
    let error = Corpus::read(&path, Some(Arc::new(refuse))).unwrap_err().to_string();
    assert!(error.contains("line 1: the chat template in `t` refuses this conversation: no"), "{error}");
    assert!(matches!(Corpus::read(&dir.path().join("none.txt"), None), Err(CorpusError::Io { .. })));
}

#[test]
fn shipped_text_is_enough_for_the_usual_calibration() {
    let tokenizer = demo_tokenizer();
    let tokens = Corpus::builtin().tokens(&tokenizer).unwrap();
    let cut = |sampling| windows(&tokens, 128, 2048, sampling, BosRule::Window(0)).unwrap();
    for sampling in [Sampling::InOrder, Sampling::Random { seed: 0 }] {
        let windows = cut(sampling);
        assert_eq!(windows.len(), 128);
        assert!(windows.iter().all(|w| w.len() == 2048 && w[0] == 0));
        assert_eq!(windows, cut(sampling));
    }
    assert_ne!(cut(Sampling::Random { seed: 0 }), cut(Sampling::Random { seed: 1 }));
    assert_ne!(Corpus::builtin().sha256, Corpus::heldout().sha256);
}

#[test]
fn a_uniform_model_on_the_heldout_text() {
    let tokenizer = demo_tokenizer();
    let corpus = Corpus::heldout();
    let tokens = corpus.tokens(&tokenizer).unwrap();
    for convention in Convention::ALL {
        let bos = BosMode::Auto.settle(&tokenizer, false, convention.bos_habit()).unwrap();
        let request = Request {
            text: &corpus.facts,
            tokens: &tokens,
            convention,
            window: 512,
            max_windows: None,
            bos,
            prefix: tokenizer.rolling_prefix(),
            batch_tokens: BATCH_TOKENS,
            device: "cpu",
        };
        let mut uniform = |batch: &[&[u32]]| -> Result<Vec<Vec<f32>>, Infallible> {
            assert!(batch.len() * batch[0].len() <= BATCH_TOKENS);
            assert!(batch.iter().all(|w| w.len() <= 513));
            Ok(batch.iter().map(|w| vec![2048f32.ln(); w.len() - 1]).collect())
        };
        let measured = measure(&request, &mut |_, _| {}, &mut uniform).unwrap();
        let result = &measured.result;
        assert!((result.perplexity / 2048.0 - 1.0).abs() < 1e-6, "{}", result.perplexity);
        assert_eq!(result.text_sha256, corpus.sha256);
        assert_eq!(measured.windows.iter().map(|w| w.tokens).sum::<u64>(), result.tokens);
        let keys: Vec<String> = match serde_json::to_value(result).unwrap() {
            Value::Object(map) => map.keys().cloned().collect(),
            other => panic!("{other}"),
        };
        let common = [
            "perplexity",
            "nll",
            "stderr",
            "tokens",
            "tokens_per_second",
            "convention",
            "window",
            "windows",
            "bos",
            "text_sha256",
            "device",
            "peak_rss_bytes",
        ];
        let of_text = ["word_perplexity", "byte_perplexity", "bits_per_byte"];
        match convention {
            Convention::LmEval => {
                assert_eq!(keys, [&common[..], &of_text[..]].concat());
                assert_eq!(result.tokens, tokens.len() as u64);
                let bits = result.nll * tokens.len() as f64 / 2f64.ln() / corpus.facts.bytes as f64;
                assert!((result.bits_per_byte.unwrap() / bits - 1.0).abs() < 1e-12);
            }
            Convention::LlamaCpp => {
                assert_eq!((keys, result.bos.as_str()), (common.map(String::from).to_vec(), "window"));
                assert_eq!(result.tokens, ((tokens.len() + 1) / 512 * 255) as u64);
            }
            Convention::Gptq => {
                assert_eq!((keys, result.bos.as_str()), (common.map(String::from).to_vec(), "once"));
                assert_eq!(result.tokens, ((tokens.len() + 1) / 512 * 511) as u64);
            }
        }
    }
}
