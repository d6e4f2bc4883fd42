//! How a byte-level BPE vocabulary cuts text before merging, by the names that llama.cpp gives these ways
//! (`tokenizer.ggml.pre`).
//!
//! The name is decided from the rules in tokenizer.json, which is what it stands for. llama.cpp's converter
//! decides by a fingerprint of the whole vocabulary instead, so its table is the cross-check. It also tells names
//! apart that share one way of cutting, and names ways that are not known here.

use serde_json::{Value as Json, json};
use thiserror::Error;

use super::fingerprints::FINGERPRINTS;
use crate::model::splits::{
    ANY_LETTERS, ANY_PUNCTUATION, CASED, CASED_CONTRACTIONS, CHINESE_AND_KANA, DIGIT_TRIPLES, EAST_ASIAN, LETTERS,
    LINE_ENDS, PUNCTUATION, THREE_DIGITS, TRAILING_SPACE, WORDS_ONE_DIGIT, WORDS_OR_SYMBOLS, WORDS_THREE_DIGITS,
    WORDS_WITH_MARKS, listed,
};
use crate::model::tokenizer::text_sha256;

/// A way of cutting text.
struct Way {
    name: &'static str,
    /// Steps of tokenizer.json's pre-tokenizer, as [`steps`] writes them.
    steps: &'static [&'static str],
    /// What llama.cpp does for this name: a whole piece that is in the vocabulary is not merged up.
    ignore_merges: Option<bool>,
    /// Whether llama.cpp puts BOS before a text where the file does not say.
    adds_bos: bool,
    /// Other names that cut the same way.
    aliases: &'static [&'static str],
}

const PLAIN: Way = Way { name: "", steps: &[], ignore_merges: None, adds_bos: false, aliases: &[] };

/// Known ways. Of two with the same steps the first whose `ignore_merges` agrees counts.
const WAYS: &[Way] = &[
    Way {
        name: "llama-bpe",
        steps: &[WORDS_THREE_DIGITS, "bytes"],
        ignore_merges: Some(true),
        adds_bos: true,
        aliases: &["llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "glm4"],
    },
    Way {
        name: "dbrx",
        steps: &[WORDS_THREE_DIGITS, "bytes"],
        ignore_merges: Some(false),
        aliases: &["smaug-bpe", "chatglm-bpe"],
        ..PLAIN
    },
    Way {
        name: "qwen2",
        steps: &[WORDS_ONE_DIGIT, "bytes"],
        aliases: &["deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "solar-open", "kormo", "f2llmv2", "grok-2"],
        ..PLAIN
    },
    Way { name: "qwen35", steps: &[WORDS_WITH_MARKS, "bytes"], ..PLAIN },
    Way {
        name: "gpt-2",
        steps: &["words and bytes"],
        aliases: &[
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "roberta-bpe",
            "jina-v1-en",
            "jina-v2-code",
            "jina-v2-es",
            "jina-v2-de",
        ],
        ..PLAIN
    },
    Way {
        name: "smollm",
        steps: &["each digit", "words and bytes"],
        aliases: &["starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"],
        ..PLAIN
    },
    Way { name: "tekken", steps: &[CASED, "bytes"], ignore_merges: Some(true), adds_bos: true, ..PLAIN },
    Way {
        name: "gpt-4o",
        steps: &[CASED_CONTRACTIONS, "bytes"],
        aliases: &["llama4", "kanana2", "talkie", "minimax-m2"],
        ..PLAIN
    },
    Way {
        name: "deepseek-llm",
        steps: &[LINE_ENDS, LETTERS, PUNCTUATION, TRAILING_SPACE, EAST_ASIAN, "each digit", "bytes"],
        ..PLAIN
    },
    Way {
        name: "deepseek-coder",
        steps: &[LINE_ENDS, ANY_LETTERS, ANY_PUNCTUATION, EAST_ASIAN, "each digit", "bytes"],
        ..PLAIN
    },
    Way {
        name: "deepseek-v3",
        steps: &[THREE_DIGITS, CHINESE_AND_KANA, WORDS_OR_SYMBOLS, "bytes"],
        aliases: &["hunyuan-dense", "joyai-llm", "hy_v4"],
        ..PLAIN
    },
    Way { name: "falcon", steps: &["punctuation", "words and bytes", "digits", DIGIT_TRIPLES], ..PLAIN },
];

/// The text whose token ids, with special tokens, are fingerprinted; the same in llama.cpp's converter.
pub const PROBE: &str = concat!(
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n",
    "🚀 (normal) 😶\u{200d}🌫️ (multiple emojis concatenated) ✅ 🦙🦙 3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3 ",
    "3...3 កាន់តែពិសេសអាច😁 ?我想在apple工作1314151天～ ------======= нещо на Български ''''''```````\"\"\"\"......!!!!!!?????? ",
    "I've been 'told he's there, 'RE you sure? 'M not sure I'll make it, 'D you like some tea? We'Ve a'lL"
);

/// What was decided.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// The value of `tokenizer.ggml.pre`.
    pub name: &'static str,
    /// What the user should know.
    pub warning: Option<String>,
}

/// A tokenizer whose way of cutting has no name.
#[derive(Debug, Error)]
pub enum PreTokenizerError {
    #[error(
        "tokenizer.json cuts text in a way that llama.cpp has no name for ({steps}), and the fingerprint {fingerprint} of \
         its vocabulary is not known either; known are {known}: if one of them cuts alike, name it with `--pre NAME`"
    )]
    Unknown { steps: String, fingerprint: String, known: String },
    #[error("`{0}` is not a pre-tokenizer of llama.cpp that is known here; known are {1}")]
    NoSuchName(String, String),
    #[error(
        "`--pre {0}`: only byte-level BPE has a pre-tokenizer in GGUF, and this tokenizer is of another kind; leave `--pre` out"
    )]
    NoByteLevel(String),
    #[error("`tokenizer.ggml.pre` of the source is `{stated}`, but `--pre` says `{given}`; leave `--pre` out")]
    Stated { stated: String, given: String },
}

/// Names the way a byte-level BPE tokenizer cuts text. `ids` are those of [`PROBE`], with special tokens.
pub fn decide(tokenizer: &Json, ids: &[u32]) -> Result<Decision, PreTokenizerError> {
    let fingerprint = fingerprint(ids);
    let steps = steps(tokenizer.get("pre_tokenizer").unwrap_or(&Json::Null));
    let ignore_merges = tokenizer.pointer("/model/ignore_merges").and_then(Json::as_bool).unwrap_or(false);
    let same = |way: &&Way| way.steps.iter().eq(&steps);
    let exact = WAYS.iter().filter(same).find(|way| way.ignore_merges.is_none_or(|i| i == ignore_merges));
    let way = exact.or_else(|| WAYS.iter().find(same));
    let listed = FINGERPRINTS.iter().find(|(hash, _)| *hash == fingerprint).map(|(_, name)| *name);
    match (way, listed) {
        (Some(way), Some(name)) if of_way(name).is_some_and(|listed| listed.steps == way.steps) => {
            Ok(Decision { name, warning: None })
        }
        (Some(way), Some(name)) => Ok(Decision {
            name: way.name,
            warning: Some(format!(
                "tokenizer.json cuts text as `{}` does, which is written; by the fingerprint of the vocabulary llama.cpp's \
                 converter would write `{name}`",
                way.name
            )),
        }),
        (None, Some(name)) => Ok(Decision { name, warning: None }),
        (Some(way), None) => Ok(Decision {
            name: way.name,
            warning: Some(format!(
                "llama.cpp's converter does not know this vocabulary (fingerprint {fingerprint}); tokenizer.json cuts text \
                 as `{}` does, which is written{}",
                way.name,
                if exact.is_none() { ", though `ignore_merges` differs" } else { "" }
            )),
        }),
        (None, None) => Err(PreTokenizerError::Unknown { steps: steps.join(", then "), fingerprint, known: known() }),
    }
}

/// A name given by the user.
pub fn named(name: &str) -> Result<Decision, PreTokenizerError> {
    let all = WAYS.iter().flat_map(|way| way.aliases.iter().copied().chain([way.name]));
    let listed = all.chain(FINGERPRINTS.iter().map(|(_, name)| *name)).find(|listed| *listed == name);
    listed
        .map(|name| Decision { name, warning: None })
        .ok_or_else(|| PreTokenizerError::NoSuchName(name.into(), known()))
}

fn of_way(name: &str) -> Option<&'static Way> {
    WAYS.iter().find(|way| way.name == name || way.aliases.contains(&name))
}

fn known() -> String {
    WAYS.iter().map(|way| way.name).collect::<Vec<_>>().join(", ")
}

/// SHA-256 of the ids, written as a Python list.
pub fn fingerprint(ids: &[u32]) -> String {
    text_sha256(&format!("{ids:?}"))
}

/// A pre-tokenizer as a list of steps in words.
fn steps(pre: &Json) -> Vec<String> {
    let kind = pre.get("type").and_then(Json::as_str).unwrap_or_default();
    let flag = |key: &str, default: bool| pre.get(key).and_then(Json::as_bool).unwrap_or(default);
    let behavior = pre.get("behavior").and_then(Json::as_str).unwrap_or_default();
    match kind {
        "" => Vec::new(),
        "Sequence" => {
            let list = pre.get("pretokenizers").and_then(Json::as_array);
            list.into_iter().flatten().flat_map(steps).collect()
        }
        "Split" => {
            let regex = pre.pointer("/pattern/Regex").and_then(Json::as_str);
            // What is kept when everything that does not match is removed are the matches as well.
            let isolates =
                behavior == "Isolated" && !flag("invert", false) || behavior == "Removed" && flag("invert", false);
            match regex.filter(|_| isolates) {
                Some(regex) => vec![listed(regex)],
                None => vec![format!("split by {} ({behavior})", pre.get("pattern").unwrap_or(&Json::Null))],
            }
        }
        "Digits" => vec![if flag("individual_digits", false) { "each digit" } else { "digits" }.into()],
        "ByteLevel" => vec![if flag("use_regex", true) { "words and bytes" } else { "bytes" }.into()],
        "Punctuation" if matches!(behavior, "Contiguous" | "Isolated" | "") => vec!["punctuation".into()],
        other => vec![other.into()],
    }
}

/// What is needed to cut text again as a name says.
pub struct Rules {
    /// The pre-tokenizer of a tokenizer.json.
    pub pre_tokenizer: Json,
    pub ignore_merges: bool,
    /// Whether texts begin with BOS where the file does not say.
    pub adds_bos: bool,
}

/// The rules behind a `tokenizer.ggml.pre`; llama.cpp takes an absent one for `default`, GPT-2's way in essence.
pub fn rules(name: &str) -> Result<Rules, PreTokenizerError> {
    let name = if name == "default" { "gpt-2" } else { name };
    let way = of_way(name).ok_or_else(|| PreTokenizerError::NoSuchName(name.into(), known()))?;
    let byte_level =
        |regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex});
    let step = |step: &&str| match *step {
        "bytes" => byte_level(false),
        "words and bytes" => byte_level(true),
        "each digit" => json!({"type": "Digits", "individual_digits": true}),
        "digits" => json!({"type": "Digits", "individual_digits": false}),
        "punctuation" => json!({"type": "Punctuation", "behavior": "Contiguous"}),
        split => json!({
            "type": "Split", "pattern": {"Regex": split.trim_start_matches("split ")}, "behavior": "Isolated",
            "invert": false
        }),
    };
    let list: Vec<Json> = way.steps.iter().map(step).collect();
    Ok(Rules {
        pre_tokenizer: json!({"type": "Sequence", "pretokenizers": list}),
        ignore_merges: way.ignore_merges.unwrap_or(false),
        adds_bos: way.adds_bos,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_recognised_again() {
        for way in WAYS {
            let rules = rules(way.name).unwrap();
            assert_eq!(steps(&rules.pre_tokenizer), way.steps, "{}", way.name);
            let tokenizer =
                json!({"pre_tokenizer": rules.pre_tokenizer, "model": {"ignore_merges": rules.ignore_merges}});
            let found = decide(&tokenizer, &[1]).unwrap();
            assert_eq!(found.name, way.name);
            assert!(found.warning.unwrap().contains("does not know this vocabulary"));
            for alias in way.aliases {
                assert_eq!(of_way(alias).unwrap().name, way.name);
            }
        }
    }

    #[test]
    fn regexes_compile() {
        for way in WAYS {
            let rules = rules(way.name).unwrap();
            let parsed = serde_json::from_value::<tokenizers::PreTokenizerWrapper>(rules.pre_tokenizer);
            assert!(parsed.is_ok(), "{}: {parsed:?}", way.name);
        }
    }

    #[test]
    fn unknown_ways_say_what_to_do() {
        let tokenizer = json!({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "a+"}, "behavior": "Isolated"}});
        let message = decide(&tokenizer, &[1]).unwrap_err().to_string();
        assert!(message.contains("(split a+)") && message.contains("`--pre NAME`"), "{message}");
        assert!(named("nonsense").unwrap_err().to_string().contains("known are llama-bpe, dbrx"));
        assert_eq!(named("starcoder").unwrap().name, "starcoder");
    }

    #[test]
    fn fingerprints_are_of_python_lists() {
        // printf '[1, 2, 3]' | sha256sum
        assert_eq!(fingerprint(&[1, 2, 3]), "a36b1f2c3f84522dd1005145646617d7054c0851e97c72a039c0bdfac9fa07f3");
    }
}
