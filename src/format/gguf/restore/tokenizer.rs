//! `tokenizer.*` as a tokenizer.json and a tokenizer_config.json.

use std::collections::HashMap;

use serde_json::{Map, Value as Json, json};

use super::RestoreError;
use crate::format::gguf::pretokenizer;
use crate::format::gguf::sentencepiece::Kind;
use crate::format::gguf::special::{TEMPLATE_KEY, TEMPLATES_KEY};
use crate::format::gguf::tokenizer::{SPACE, is_byte};
use crate::format::gguf::value::Metadata;

/// Bytes of the longest piece that is cut in two; the longest in use have some hundred.
const LONGEST: usize = 1024;

/// A vocabulary as a file has it.
struct Vocabulary<'a> {
    tokens: Vec<&'a str>,
    kinds: Vec<i32>,
}

impl<'a> Vocabulary<'a> {
    fn read(metadata: &'a Metadata) -> Result<Self, RestoreError> {
        let tokens: Vec<&str> = metadata.need("tokenizer.ggml.tokens")?;
        let kinds = metadata.read::<Vec<i32>>("tokenizer.ggml.token_type")?;
        let kinds = kinds.unwrap_or_else(|| vec![Kind::Normal as i32; tokens.len()]);
        same_length("tokenizer.ggml.token_type", kinds.len(), tokens.len())?;
        Ok(Self { tokens, kinds })
    }

    fn of_kind(&self, kind: Kind) -> impl Iterator<Item = (usize, &'a str)> {
        self.tokens.iter().enumerate().filter(move |(id, _)| self.kinds[*id] == kind as i32).map(|(id, t)| (id, *t))
    }

    /// `model.vocab`: all but rows without a token. Added tokens are in it too, so that they keep their ids.
    fn vocab(&self) -> Map<String, Json> {
        let used = self.tokens.iter().enumerate().filter(|(id, _)| self.kinds[*id] != Kind::Unused as i32);
        used.map(|(id, token)| ((*token).to_owned(), id.into())).collect()
    }

    /// Tokens that are found in a text before anything else is done to it, by id.
    fn added(&self, special: &[Kind]) -> Vec<Json> {
        let mut all: Vec<(usize, &str, bool)> = Vec::new();
        all.extend(special.iter().flat_map(|kind| self.of_kind(*kind)).map(|(id, token)| (id, token, true)));
        all.extend(self.of_kind(Kind::UserDefined).map(|(id, token)| (id, token, false)));
        all.sort_unstable();
        let entry = |(id, content, special): (usize, &str, bool)| {
            json!({
                "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": special
            })
        };
        all.into_iter().map(entry).collect()
    }
}

fn same_length(key: &'static str, found: usize, tokens: usize) -> Result<(), RestoreError> {
    if found == tokens { Ok(()) } else { Err(RestoreError::Length { key, found, tokens }) }
}

/// The two files of a tokenizer, and what the user should know.
#[derive(Debug)]
pub struct Restored {
    /// tokenizer.json
    pub tokenizer: Json,
    /// tokenizer_config.json
    pub config: Json,
    pub warnings: Vec<String>,
}

/// Makes the files of a tokenizer out of `tokenizer.*`, whatever the architecture.
pub fn tokenizer(metadata: &Metadata) -> Result<Restored, RestoreError> {
    let (mut config, mut warnings) = (Map::new(), Vec::new());
    let vocabulary = Vocabulary::read(metadata)?;
    config.insert("tokenizer_class".into(), "PreTrainedTokenizerFast".into());
    for (kind, name) in
        [("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("seperator", "sep"), ("padding", "pad"), ("mask", "mask")]
    {
        let key = format!("tokenizer.ggml.{kind}_token_id");
        let Some(id) = metadata.read::<usize>(&key)? else { continue };
        let token = vocabulary.tokens.get(id).ok_or_else(|| RestoreError::Range {
            key,
            found: id.to_string(),
            wanted: format!("the vocabulary has {} tokens", vocabulary.tokens.len()),
        })?;
        config.insert(format!("{name}_token"), (*token).into());
    }
    write_templates(metadata, &mut config)?;

    let model: &str = metadata.need("tokenizer.ggml.model")?;
    let (mut tokenizer, adds_bos) = match model {
        "gpt2" => byte_level(metadata, &vocabulary, &mut warnings)?,
        "llama" => sentencepiece(metadata, &vocabulary, &mut warnings)?,
        other => return Err(RestoreError::Vocabulary(other.into())),
    };
    let adds = |kind: &str, default: bool| -> Result<bool, RestoreError> {
        Ok(metadata.read::<bool>(&format!("tokenizer.ggml.add_{kind}_token"))?.unwrap_or(default))
    };
    let (bos, eos) = (adds("bos", adds_bos)?, adds("eos", false)?);
    config.insert("add_bos_token".into(), bos.into());
    config.insert("add_eos_token".into(), eos.into());
    let first = named_id(&config, &vocabulary, "bos_token").filter(|_| bos);
    let last = named_id(&config, &vocabulary, "eos_token").filter(|_| eos);
    if first.is_some() || last.is_some() {
        tokenizer["post_processor"] = template(first, last);
    }
    Ok(Restored { tokenizer, config: config.into(), warnings })
}

fn named_id<'a>(config: &Map<String, Json>, vocabulary: &Vocabulary<'a>, key: &str) -> Option<(usize, &'a str)> {
    let text = config.get(key)?.as_str()?;
    vocabulary.tokens.iter().position(|token| *token == text).map(|id| (id, vocabulary.tokens[id]))
}

fn write_templates(metadata: &Metadata, config: &mut Map<String, Json>) -> Result<(), RestoreError> {
    let default = metadata.read::<&str>(TEMPLATE_KEY)?;
    let mut names = metadata.read::<Vec<&str>>(TEMPLATES_KEY)?.unwrap_or_default();
    // Whether the list names it or not.
    let own = metadata.iter().filter_map(|(key, _)| key.strip_prefix(TEMPLATE_KEY)?.strip_prefix('.'));
    let more: Vec<&str> = own.filter(|name| !names.contains(name)).collect();
    names.extend(more);
    let mut all = Vec::new();
    // gguf-py writes the default one without a name.
    if let Some(again) = default {
        let key = format!("{TEMPLATE_KEY}.default");
        match metadata.read::<&str>(&key)? {
            Some(named) if named != again => {
                let (found, wanted) =
                    ("a template".into(), format!("`{TEMPLATE_KEY}` is another one; one of them is needed"));
                return Err(RestoreError::Range { key, found, wanted });
            }
            _ => names.retain(|name| *name != "default"),
        }
    }
    all.extend(default.map(|source| json!({"name": "default", "template": source})));
    for name in names {
        let source = metadata.need::<&str>(&format!("{TEMPLATE_KEY}.{name}"))?;
        all.push(json!({"name": name, "template": source}));
    }
    match (all.len(), default) {
        (0, _) => {}
        (1, Some(source)) => {
            config.insert("chat_template".into(), source.into());
        }
        _ => {
            config.insert("chat_template".into(), all.into());
        }
    }
    Ok(())
}

/// BOS before a text and EOS after it.
fn template(first: Option<(usize, &str)>, last: Option<(usize, &str)>) -> Json {
    let special = |token: Option<(usize, &str)>, part: usize| {
        token.map(|(_, text)| json!({"SpecialToken": {"id": text, "type_id": part}}))
    };
    let part = |name: &str, part: usize| -> Vec<Json> {
        let sequence = json!({"Sequence": {"id": name, "type_id": part}});
        special(first, part).into_iter().chain([sequence]).chain(special(last, part)).collect()
    };
    let tokens: Map<String, Json> = first
        .into_iter()
        .chain(last)
        .map(|(id, text)| (text.to_owned(), json!({"id": text, "ids": [id], "tokens": [text]})))
        .collect();
    let pair = [part("A", 0), part("B", 1)].concat();
    json!({"type": "TemplateProcessing", "single": part("A", 0), "pair": pair, "special_tokens": tokens})
}

fn byte_level(
    metadata: &Metadata,
    vocabulary: &Vocabulary,
    warnings: &mut Vec<String>,
) -> Result<(Json, bool), RestoreError> {
    let name = metadata.read::<&str>("tokenizer.ggml.pre")?.filter(|name| !name.is_empty()).unwrap_or_else(|| {
        warnings.push(
            "the file names no pre-tokenizer (`tokenizer.ggml.pre`); `default` is taken, as in llama.cpp, and the model \
             may be given other tokens than it was trained on: convert the original model again"
                .into(),
        );
        "default"
    });
    let rules = pretokenizer::rules(name)?;
    let merges: Vec<&str> = metadata.need("tokenizer.ggml.merges")?;
    let merges: Vec<Json> = merges.iter().filter_map(|m| m.split_once(' ')).map(|(a, b)| json!([a, b])).collect();
    // The tokenizers of Qwen2 and Qwen3 compose characters first; llama.cpp does not, and files do not say.
    let qwen = metadata.read::<&str>("general.architecture")?.is_some_and(|arch| arch.starts_with("qwen"));
    let normalizer = if qwen && name == "qwen2" { json!({"type": "NFC"}) } else { Json::Null };
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": vocabulary.added(&[Kind::Control]),
        "normalizer": normalizer,
        "pre_tokenizer": rules.pre_tokenizer,
        "post_processor": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": rules.ignore_merges, "vocab": vocabulary.vocab(), "merges": merges
        }
    });
    Ok((tokenizer, rules.adds_bos))
}

fn sentencepiece(
    metadata: &Metadata,
    vocabulary: &Vocabulary,
    warnings: &mut Vec<String>,
) -> Result<(Json, bool), RestoreError> {
    let scores = metadata.read::<&[f32]>("tokenizer.ggml.scores")?;
    if let Some(scores) = scores {
        same_length("tokenizer.ggml.scores", scores.len(), vocabulary.tokens.len())?;
    }
    let merges = merges(vocabulary, scores, warnings);
    let prefix = metadata.read::<bool>("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let space = SPACE.to_string();
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": space});
    let prepend = json!({"type": "Prepend", "prepend": space});
    let normalizer = if prefix { json!({"type": "Sequence", "normalizers": [prepend, replace]}) } else { replace };
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": space}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefix {
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    let unknown = match metadata.read::<usize>("tokenizer.ggml.unknown_token_id")? {
        Some(id) => vocabulary.tokens.get(id).copied(),
        None => vocabulary.of_kind(Kind::Unknown).next().map(|(_, token)| token),
    };
    let bytes = vocabulary.tokens.iter().any(|token| is_byte(token));
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": vocabulary.added(&[Kind::Control, Kind::Unknown]),
        "normalizer": normalizer, "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": bytes, "ignore_merges": false,
            "vocab": vocabulary.vocab(), "merges": merges
        }
    });
    Ok((tokenizer, true))
}

/// SentencePiece joins the neighbours whose piece scores best; as merges, that is every way to cut a piece in two
/// pieces, best pieces first.
fn merges(vocabulary: &Vocabulary, scores: Option<&[f32]>, warnings: &mut Vec<String>) -> Vec<Json> {
    let normal: Vec<(usize, &str)> = vocabulary.of_kind(Kind::Normal).collect();
    let ids: HashMap<&str, usize> = normal.iter().map(|(id, token)| (*token, *id)).collect();
    let varied = scores.filter(|scores| {
        let mut all = normal.iter().map(|(id, _)| scores[*id]);
        let first = all.next();
        all.any(|score| Some(score) != first)
    });
    if varied.is_none() && normal.len() > 1 {
        warnings.push(
            "the pieces of the vocabulary have no scores of their own, as in files that were converted without \
             tokenizer.model; their order is taken for the order of merging"
                .into(),
        );
    }
    let rank = |id: usize| varied.map_or(-(id as f64), |scores| f64::from(scores[id]));
    let mut cuts: Vec<(f64, usize, usize, &str, &str)> = Vec::new();
    for (id, token) in normal.iter().filter(|(_, token)| token.len() <= LONGEST) {
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            if let (Some(a), Some(b)) = (ids.get(left), ids.get(right)) {
                cuts.push((rank(*id), *a, *b, left, right));
            }
        }
    }
    cuts.sort_by(|x, y| y.0.total_cmp(&x.0).then((x.1, x.2).cmp(&(y.1, y.2))));
    cuts.into_iter().map(|(_, _, _, left, right)| json!([left, right])).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::super::value::Text;
    use super::*;

    fn spm(scores: Vec<f32>) -> Metadata {
        let mut metadata = Metadata::new();
        metadata.set("tokenizer.ggml.model", "llama");
        let tokens = ["<unk>", "a", "b", "c", "ab", "bc", "abc"];
        metadata.set("tokenizer.ggml.tokens", tokens.map(Text::from).to_vec());
        metadata.set("tokenizer.ggml.scores", scores);
        metadata.set("tokenizer.ggml.token_type", vec![2, 1, 1, 1, 1, 1, 1]);
        metadata
    }

    #[test]
    fn pieces_become_merges_by_score() {
        let metadata = spm(vec![0.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0]);
        let found = tokenizer(&metadata).unwrap();
        assert!(found.warnings.is_empty());
        let found = found.tokenizer;
        assert_eq!(found["model"]["merges"], json!([["b", "c"], ["a", "b"], ["a", "bc"], ["ab", "c"]]));
        assert_eq!(found["model"]["unk_token"], "<unk>");
        let found = tokenizer(&spm(vec![-1000.0; 7])).unwrap();
        assert_eq!(found.tokenizer["model"]["merges"][0], json!(["a", "b"]));
        assert!(found.warnings[0].contains("no scores of their own"));
    }

    #[test]
    fn refusals() {
        let told = |metadata: &Metadata| tokenizer(metadata).unwrap_err().to_string();
        assert!(
            told(&spm(vec![0.0])).contains("`tokenizer.ggml.scores` has 1 elements; `tokenizer.ggml.tokens` has 7")
        );
        let mut metadata = spm(vec![0.0; 7]);
        metadata.set("tokenizer.ggml.bos_token_id", 7u32);
        assert!(told(&metadata).contains("is 7; the vocabulary has 7 tokens"));
        metadata.remove("tokenizer.ggml.bos_token_id");
        metadata.set("tokenizer.ggml.model", "bert");
        assert!(told(&metadata).contains("type `bert` is not read"));
        metadata.set("tokenizer.ggml.model", "gpt2");
        metadata.set("tokenizer.ggml.pre", "nonsense");
        assert!(told(&metadata).contains("`nonsense` is not a pre-tokenizer"));
    }
}
