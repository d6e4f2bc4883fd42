//! Texts are read and tokenized in parts, as far as they are needed, and the tokens are those of the whole.

use std::fs;
use std::io::Write;

use quantkit::calibrate::corpus::Corpus;
use quantkit::checkpoint::Checkpoint;
use quantkit::format::gguf::pretokenizer::rules;
use quantkit::model::text_encoder::TextEncoder;
use quantkit::model::tokenizer::Tokenizer;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::repository;
use crate::support::scene::{Scene, character_tokenizer, text};

/// A tokenizer of a folder that has nothing else.
fn tokenizer(json: &str) -> Tokenizer {
    let dir = tempfile::tempdir().unwrap();
    let header = br#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    let weights = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 4]].concat();
    fs::write(dir.path().join("model.safetensors"), weights).unwrap();
    fs::write(dir.path().join("config.json"), "{}").unwrap();
    fs::write(dir.path().join("tokenizer.json"), json).unwrap();
    Tokenizer::load(&Checkpoint::open(dir.path()).unwrap()).unwrap()
}

fn golden(name: &str) -> Value {
    let path = repository(&format!("tests/golden/gguf/metadata/{name}/tokenizer.json"));
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn demo() -> Value {
    serde_json::from_str(&fs::read_to_string(repository("calib/demo/target/tokenizer.json")).unwrap()).unwrap()
}

fn changed(mut json: Value, key: &str, value: Value) -> Value {
    json[key] = value;
    json
}

fn added(content: &str, flags: &[&str]) -> Value {
    let flag = |name: &str| flags.contains(&name);
    json!({
        "id": 9000, "content": content, "single_word": flag("single_word"), "lstrip": flag("lstrip"),
        "rstrip": flag("rstrip"), "normalized": flag("normalized"), "special": flag("special"),
    })
}

fn with_added(mut json: Value, tokens: &[Value]) -> Value {
    let highest = json["model"]["vocab"].as_object().unwrap().values().filter_map(Value::as_u64).max().unwrap();
    let before = json["added_tokens"].as_array().unwrap().iter().filter_map(|token| token["id"].as_u64()).max();
    let first = highest.max(before.unwrap_or(0)) + 1;
    for (i, token) in tokens.iter().enumerate() {
        json["added_tokens"].as_array_mut().unwrap().push(changed(token.clone(), "id", json!(first + i as u64)));
    }
    json
}

/// With tokens for characters that had none.
fn with_tokens(mut json: Value, tokens: &[&str]) -> Value {
    let vocab = json["model"]["vocab"].as_object_mut().unwrap();
    let first = vocab.values().filter_map(Value::as_u64).max().unwrap() + 100;
    for (id, token) in (first..).zip(tokens) {
        vocab.entry(*token).or_insert(json!(id));
    }
    json
}

/// Numbers that look random, the same ones every time.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }
}

/// What tokenizers trip over.
const FRAGMENTS: [&str; 54] = [
    "the",
    "whale",
    " ",
    " ",
    " ",
    "  ",
    "   ",
    "\n",
    "\n",
    "\n\n",
    "\t",
    " \n",
    "\n ",
    ".",
    ",",
    "!",
    "'s",
    "'S we",
    "12345",
    "7",
    "Привет",
    "й",
    "ё",
    "море",
    "中文",
    "字",
    "かな",
    "が",
    "한글",
    "שלום",
    "سلام",
    "é",
    "e\u{301}",
    "\u{301}",
    "\u{2581}",
    "🚀",
    "\u{a0}",
    "<|end|>",
    "<stop>",
    "Yes",
    "HTTPServer",
    "a/b",
    "3",
    "4 5",
    "6 a",
    "b 8",
    "\n9",
    "\n{",
    "/",
    "\"",
    "<",
    "\u{338}",
    "한 글",
    "\n가",
];

fn awkward(seed: u64, fragments: usize) -> String {
    let mut numbers = Numbers(seed);
    (0..fragments).map(|_| FRAGMENTS[numbers.below(FRAGMENTS.len())]).collect()
}

/// The ids of a text that comes in parts of random sizes.
fn in_parts(tokenizer: &Tokenizer, text: &str, piece: usize, seed: u64) -> Vec<u32> {
    let (mut ids, mut encoder, mut numbers) = (Vec::new(), TextEncoder::new(tokenizer, piece), Numbers(seed));
    let mut rest = text;
    while !rest.is_empty() {
        let mut end = rest.len().min(1 + numbers.below(40 * piece));
        while !rest.is_char_boundary(end) {
            end += 1;
        }
        encoder.push(&rest[..end], &mut ids).unwrap();
        rest = &rest[end..];
    }
    encoder.finish(&mut ids).unwrap();
    ids
}

#[track_caller]
fn same_tokens(name: &str, tokenizer: &Tokenizer) {
    let prose = [text("heldout.txt", 0, 6_000), text("heldout-science.txt", 500, 3_000)].concat();
    for (seed, text) in (0..6).map(|seed| (seed, awkward(seed, 700))).chain([(99, prose)]) {
        let whole = tokenizer.encode(&text).unwrap();
        for piece in [1, 60] {
            let parts = in_parts(tokenizer, &text, piece, seed);
            let at = parts.iter().zip(&whole).take_while(|(a, b)| a == b).count();
            let around = |ids: &[u32]| {
                tokenizer.decode(&ids[at.saturating_sub(3).min(ids.len())..(at + 3).min(ids.len())], false)
            };
            assert!(
                parts == whole,
                "{name}, text {seed}, piece {piece}: {:?} for {:?}",
                around(&parts),
                around(&whole)
            );
        }
    }
}

/// Cuts in a text: how many, and the longest stretch without one.
fn cuts(tokenizer: &Tokenizer, text: &str) -> (usize, usize) {
    let cuts = tokenizer.cuts().unwrap();
    let (mut count, mut longest, mut at) = (0, 0, 0);
    while let Some((_, next)) = cuts.next(text, at + 1) {
        (count, longest, at) = (count + 1, longest.max(next - at), next);
    }
    (count, longest.max(text.len() - at))
}

#[test]
fn parts_have_the_tokens_of_the_whole() {
    let prose = text("heldout.txt", 0, 20_000);
    for name in ["gemma3", "llama", "llama3", "mistral", "qwen2", "smollm2"] {
        let tokenizer = tokenizer(&golden(name).to_string());
        same_tokens(name, &tokenizer);
        let (count, longest) = cuts(&tokenizer, &prose);
        assert!(count > 500 && longest < 2_000, "{name}: {count} cuts, {longest} bytes without one");
    }
    same_tokens("demo", &tokenizer(&demo().to_string()));
}

/// Numbers and words of Hangul have spaces between them, and lines may begin with any character.
#[test]
fn text_without_letters_is_cut() {
    let lines = |line: &dyn Fn(usize) -> String| (0..2_000).map(line).collect::<String>();
    let spaced = lines(&|i| format!("{} {} {}\n", i, i * 7, i % 13));
    let hangul = lines(&|i| format!("한글 {} 글한", if i % 3 == 0 { "한" } else { "글" }));
    let table = lines(&|i| format!("{i},{},\"{}\"\n", i * 7, i % 13));
    let markup = lines(&|i| format!("<p>{i}</p>\n"));
    let kana = "かな\nカナ\n".repeat(500);
    for (name, json) in [
        ("demo", demo()),
        ("llama3", golden("llama3")),
        ("mistral", golden("mistral")),
        ("qwen2", golden("qwen2")),
        ("smollm2", golden("smollm2")),
        ("gemma3", with_tokens(golden("gemma3"), &["\n", "한", "글", "か", "な", "カ", "ナ", "<", "\""])),
        ("llama", with_tokens(golden("llama"), &["한", "글"])),
    ] {
        let tokenizer = tokenizer(&json.to_string());
        // A space is put before every text that this tokenizer is given, so that lines are not cut.
        let texts = [&*spaced, &*hangul, &*table, &*markup, &*kana];
        for text in &texts[..if name == "llama" { 2 } else { 5 }] {
            let (count, longest) = cuts(&tokenizer, text);
            assert!(count > 500 && longest < 100, "{name}: {count} cuts, {longest} bytes without one in {text:.20}");
            assert!(in_parts(&tokenizer, text, 60, 7) == tokenizer.encode(text).unwrap(), "{name}: {text:.20}");
        }
        same_tokens(name, &tokenizer);
    }
}

#[test]
fn every_known_way_of_splitting() {
    for way in [
        "llama-bpe",
        "qwen2",
        "qwen35",
        "gpt-2",
        "smollm",
        "tekken",
        "gpt-4o",
        "deepseek-llm",
        "deepseek-coder",
        "deepseek-v3",
        "falcon",
    ] {
        let rules = rules(way).unwrap();
        let mut json = changed(demo(), "pre_tokenizer", rules.pre_tokenizer);
        json["model"]["ignore_merges"] = json!(rules.ignore_merges);
        let tokenizer = tokenizer(&json.to_string());
        assert!(tokenizer.cuts().is_ok(), "{way}: {:?}", tokenizer.cuts());
        same_tokens(way, &tokenizer);
    }
    // Old conversions keep matches by removing all else, or write line ends as they are.
    let regex = demo()["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"].as_str().unwrap().to_string();
    let split = json!({"type": "Split", "pattern": {"Regex": regex.replace(r"\r", "\r").replace(r"\n", "\n")},
        "behavior": "Removed", "invert": true});
    let mut json = demo();
    json["pre_tokenizer"]["pretokenizers"][0] = split;
    let tokenizer = tokenizer(&json.to_string());
    assert!(tokenizer.cuts().is_ok());
    same_tokens("matches kept", &tokenizer);
}

#[test]
fn normalizers_and_prefixes() {
    let metaspace =
        |scheme: &str| json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": true});
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    for (name, json) in [
        ("nfc", changed(demo(), "normalizer", json!({"type": "NFC"}))),
        ("nfkd", changed(demo(), "normalizer", json!({"type": "NFKD"}))),
        ("lowercase", changed(demo(), "normalizer", json!({"type": "Lowercase"}))),
        (
            "replace",
            changed(demo(), "normalizer", json!({"type": "Replace", "pattern": {"String": "/"}, "content": "-"})),
        ),
        ("prefix", changed(demo(), "pre_tokenizer", byte_level)),
        ("always", changed(changed(golden("llama"), "normalizer", Value::Null), "pre_tokenizer", metaspace("always"))),
        ("first", changed(changed(golden("llama"), "normalizer", Value::Null), "pre_tokenizer", metaspace("first"))),
        ("never", changed(changed(golden("llama"), "normalizer", Value::Null), "pre_tokenizer", metaspace("never"))),
    ] {
        let tokenizer = tokenizer(&json.to_string());
        assert!(tokenizer.cuts().is_ok(), "{name}: {:?}", tokenizer.cuts());
        same_tokens(name, &tokenizer);
    }
}

#[test]
fn added_tokens_are_not_cut() {
    let tokens = [
        added("<stop>", &["special", "rstrip"]),
        added("whale sea", &["normalized"]),
        added("Yes", &["lstrip"]),
        added("море", &["rstrip", "normalized"]),
        added(".\nthe", &[]),
        added("wha", &["single_word"]),
        added("the whale", &["lstrip", "rstrip", "normalized"]),
    ];
    for (name, json) in
        [("demo", demo()), ("llama", golden("llama")), ("gemma3", golden("gemma3")), ("qwen2", golden("qwen2"))]
    {
        for token in &tokens {
            let tokenizer = tokenizer(&with_added(json.clone(), std::slice::from_ref(token)).to_string());
            assert!(tokenizer.cuts().is_ok(), "{name} {token}: {:?}", tokenizer.cuts());
            same_tokens(&format!("{name} {token}"), &tokenizer);
        }
        same_tokens(name, &tokenizer(&with_added(json, &tokens).to_string()));
    }
}

/// A merge over a space, in a vocabulary without pre-tokenizer, takes the letter before it out of the safe ones.
#[test]
fn merges_over_spaces_are_seen() {
    let mut json = golden("gemma3");
    let (vocab, highest) = {
        let vocab = json["model"]["vocab"].as_object().unwrap();
        (vocab.clone(), vocab.values().filter_map(Value::as_u64).max().unwrap())
    };
    assert!(vocab.contains_key("e") && vocab.contains_key("\u{2581}"));
    json["model"]["vocab"]["e\u{2581}"] = json!(highest + 100);
    json["model"]["merges"].as_array_mut().unwrap().insert(0, json!(["e", "\u{2581}"]));
    let merging = tokenizer(&json.to_string());
    let cuts = merging.cuts().unwrap();
    assert_eq!((cuts.next("the sea", 1), cuts.next("whales sea", 1)), (None, Some((6, 6))));
    same_tokens("merges over spaces", &merging);
}

#[test]
fn what_is_not_known_is_not_cut() {
    let regex = json!({"type": "Split", "pattern": {"Regex": r"\w+ \w+|\W"}, "behavior": "Isolated", "invert": false});
    let strip = json!({"type": "Strip", "strip_left": true, "strip_right": true});
    for (json, why) in [
        (changed(demo(), "pre_tokenizer", regex), "pre-tokenizer splits text by a rule that is not known"),
        (changed(demo(), "normalizer", strip), "normalizer is not known"),
        (
            changed(demo(), "normalizer", json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})),
            "normalizer replaces text by a rule that is not known",
        ),
        (with_added(demo(), &[added(" odd", &["single_word"])]), "begins or ends with space"),
    ] {
        let tokenizer = tokenizer(&json.to_string());
        let found = tokenizer.cuts().map(|_| ()).unwrap_err();
        assert!(found.contains(why), "{found}");
        let text = awkward(3, 2_000);
        assert_eq!(in_parts(&tokenizer, &text, 5, 1), tokenizer.encode(&text).unwrap());
    }
}

/// A file of `megabytes` of prose, and its folder.
fn long_text(scene: &Scene, name: &str, megabytes: usize) {
    let line =
        "The whale swam across the sea, and the sailors watched it go. It was a cold morning. ".repeat(12) + "\n";
    let mut file = fs::File::create(scene.path(name)).unwrap();
    let block = line.repeat(64);
    (0..(megabytes << 20) / block.len()).for_each(|_| file.write_all(block.as_bytes()).unwrap());
}

#[track_caller]
fn peak(scene: &Scene, args: &[&str]) -> f64 {
    scene.run(args).ok().json()["peak_rss_bytes"].as_u64().unwrap() as f64 / f64::from(1 << 20)
}

#[test]
fn memory_does_not_grow_with_the_text() {
    let scene = Scene::demo();
    long_text(&scene, "short.txt", 1);
    long_text(&scene, "long.txt", 24);
    let measured = |file: &str| {
        peak(
            &scene,
            &["eval", "ppl", "--text", file, "--window", "32", "--max-windows", "1", "--json", "--threads", "2"],
        )
    };
    let (short, long) = (measured("short.txt"), measured("long.txt"));
    assert!(long - short < 24.0, "{short} MiB, {long} MiB with 23 MiB of text more");
    let lines = "{\"text\": \"The whale swam across the sea, and the sailors watched it go.\"}\n";
    scene.write("short.jsonl", lines.repeat(1_000));
    scene.write("long.jsonl", lines.repeat(200_000));
    let (short, long) = (measured("short.jsonl"), measured("long.jsonl"));
    assert!(long - short < 24.0, "{short} MiB, {long} MiB with 14 MiB of lines more");
}

/// Random windows need all tokens: an id each, and no more.
#[test]
fn memory_of_a_whole_text_is_that_of_its_ids() {
    let scene = Scene::demo();
    long_text(&scene, "short.txt", 1);
    long_text(&scene, "long.txt", 9);
    let measured = |file: &str, out: &str| {
        let args =
            ["rtn", "--grid", "hessian", "--no-eval", "--sampling", "random", "--nsamples", "1", "--seqlen", "16"];
        peak(&scene, &[&args[..], &["--calib", file, "-o", out, "--json", "--threads", "2"]].concat())
    };
    let (short, long) = (measured("short.txt", "a"), measured("long.txt", "b"));
    assert!(long - short < 8.0 * 8.0, "{short} MiB, {long} MiB with 8 MiB of text more");
}

#[test]
fn a_text_that_cannot_be_cut_is_named() {
    let scene = Scene::tiny("llama");
    scene.write("model/tokenizer.json", character_tokenizer(128));
    long_text(&scene, "long.txt", 2);
    let args = ["eval", "ppl", "model", "--text", "long.txt", "--max-windows", "1"];
    let ran =
        scene.run(&args).ok().says(&["`long.txt`", "has to be tokenized in one piece", "pre-tokenizer splits text"]);
    assert_eq!(ran.stderr.matches("in one piece").count(), 1, "{}", ran.stderr);
}

#[test]
fn a_text_without_a_place_to_cut_is_named() {
    let scene = Scene::demo();
    scene.write("flat.json.txt", "{\"a\":[1,2]},".repeat(100_000));
    scene.write("numbers.txt", "1 2 3\n4 5 6\n".repeat(100_000));
    let run = |file: &str| {
        let args = ["eval", "ppl", "--text", file, "--window", "32", "--max-windows", "1"];
        scene.run(&args).ok()
    };
    let words = ["`flat.json.txt`", "has to be tokenized in one piece", "no place at which a cut is known to be safe"];
    let flat = run("flat.json.txt").says(&words);
    assert_eq!(flat.stderr.matches("in one piece").count(), 1, "{}", flat.stderr);
    let numbers = run("numbers.txt");
    assert!(!numbers.stderr.contains("in one piece"), "{}", numbers.stderr);
    // A document of a .jsonl file is no different.
    let documents = format!("{{\"text\": {}}}\n", json!("{\"a\":[1,2]},".repeat(100_000)));
    scene.write("flat.jsonl", documents);
    run("flat.jsonl").says(&["`flat.jsonl`", "in one piece"]);
}

fn file(name: &str, content: &[u8]) -> (TempDir, Corpus) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    fs::write(&path, content).unwrap();
    let corpus = Corpus::read(&path, None).unwrap();
    (dir, corpus)
}

/// Characters and line ends of two bytes lie where one read ends and the next begins.
#[test]
fn reads_end_anywhere() {
    for shift in 0..4 {
        let mut content = "x".repeat(shift);
        while content.len() < 600_000 {
            content.push_str("дом\r\nmer\r€\n\r\n");
        }
        let wanted = content.replace("\r\n", "\n").replace('\r', "\n");
        let (_dir, corpus) = file("a.txt", content.as_bytes());
        assert!(corpus.text().unwrap() == wanted, "shift {shift}");
        assert_eq!((corpus.facts.bytes, corpus.documents), (wanted.len(), 1));
        assert_eq!(corpus.facts.words, wanted.split_whitespace().count());
    }
    let (_dir, ends) = file("a.txt", b"one\r");
    assert_eq!(ends.text().unwrap(), "one\n");
    let bad = [&vec![b'a'; 300_000][..], b"\xff"].concat();
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a.txt"), bad).unwrap();
    let error = Corpus::read(&dir.path().join("a.txt"), None).unwrap_err().to_string();
    assert!(error.contains("first bad byte at 300000"), "{error}");
}

/// Documents and measured text have the tokens that they have one by one and joined.
#[test]
fn lines_have_the_tokens_of_their_documents() {
    let tokenizer = tokenizer(&demo().to_string());
    let documents: Vec<String> =
        (0..700).map(|i| if i == 3 { text("heldout.txt", 0, 140_000).repeat(4) } else { awkward(i, 20) }).collect();
    let lines: String = documents.iter().map(|text| format!("{}\n", json!({"text": text}))).collect();
    let (_dir, corpus) = file("a.jsonl", lines.as_bytes());
    assert_eq!(corpus.all_documents().unwrap(), documents);
    assert_eq!(corpus.documents, 700);
    let joined = documents.join("\n\n");
    let all = corpus.first_text_tokens(&tokenizer, usize::MAX).unwrap();
    assert!(all == tokenizer.encode(&joined).unwrap());
    let some = corpus.first_text_tokens(&tokenizer, 500).unwrap();
    assert!(some.len() >= 500 && some.len() < all.len() && all.starts_with(&some));
    let stream = corpus.tokens(&tokenizer).unwrap();
    let first = corpus.first_tokens(&tokenizer, 500).unwrap();
    assert!(first.len() >= 500 && first.len() < stream.len() && stream.starts_with(&first));
    let ids = documents.iter().map(|text| tokenizer.encode(text).unwrap().len()).sum::<usize>();
    // The tokenizer of this folder names no EOS to put between them.
    assert_eq!(stream.len(), ids);
}

#[test]
fn a_long_document_is_tokenized_as_far_as_it_is_needed() {
    let tokenizer = tokenizer(&demo().to_string());
    let long = (text("heldout.txt", 0, 100_000) + " дом€ ").repeat(24);
    let lines = format!("{}\n{}\n{}\n", json!({"text": "first"}), json!({"text": long}), json!({"text": "last"}));
    let (_dir, corpus) = file("a.jsonl", lines.as_bytes());
    assert!(corpus.all_documents().unwrap() == ["first", &long, "last"]);
    assert_eq!((corpus.documents, corpus.facts.bytes), (3, 5 + 2 + long.len() + 2 + 4));
    let (all, some) = (corpus.tokens(&tokenizer).unwrap(), corpus.first_tokens(&tokenizer, 500).unwrap());
    assert!(some.len() >= 500 && some.len() * 3 < all.len() && all.starts_with(&some), "{} tokens", some.len());
    let ids = ["first", &long, "last"].map(|text| in_parts(&tokenizer, text, 1_000, 1)).concat();
    assert!(all == ids);
    let some = corpus.first_text_tokens(&tokenizer, 500).unwrap();
    assert!(some.len() >= 500 && some.len() * 3 < all.len(), "{} tokens", some.len());
    // Of many documents, no more than what may be enough.
    let document = json!({"text": text("heldout.txt", 0, 2_000)});
    let (_dir, corpus) = file("b.jsonl", format!("{document}\n").repeat(200).as_bytes());
    let (all, some) = (corpus.tokens(&tokenizer).unwrap(), corpus.first_tokens(&tokenizer, 100).unwrap());
    assert!(some.len() >= 100 && some.len() * 100 < all.len() && all.starts_with(&some), "{} tokens", some.len());
}

/// Reports say the hash of the text: another text must not be read under it.
#[test]
fn a_file_that_changes_is_not_read_again() {
    let wanted = "a.txt` changed while it was in use; run the command again";
    let (dir, corpus) = file("a.txt", b"one two");
    let path = dir.path().join("a.txt");
    assert_eq!(corpus.text().unwrap(), "one two");
    fs::write(&path, "one two three").unwrap();
    let error = corpus.text().unwrap_err().to_string();
    assert!(error.ends_with(wanted), "{error}");
    // The hash tells where size and time are the same.
    let (dir, corpus) = file("a.txt", b"one two");
    let path = dir.path().join("a.txt");
    let modified = fs::metadata(&path).unwrap().modified().unwrap();
    fs::write(&path, "one six").unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_modified(modified).unwrap();
    let error = corpus.text().unwrap_err().to_string();
    assert!(error.ends_with(wanted), "{error}");
}
