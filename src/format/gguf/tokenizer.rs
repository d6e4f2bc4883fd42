//! A model's vocabulary as `tokenizer.ggml.*`: byte-level BPE from tokenizer.json, SentencePiece from
//! tokenizer.model or from the tokenizer.json that was made of one.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde_json::Value as Json;
use thiserror::Error;

use super::ends;
use super::pretokenizer::{self, PreTokenizerError};
use super::sentencepiece::{self, Kind, PieceError};
use super::special::Special;
use super::value::{Metadata, MetadataError, Text};
use crate::checkpoint::{Checkpoint, CheckpointError, JsonKeys, KeyError, SideFile, whole};
use crate::model::chat::ChatError;
use crate::model::tokenizer;

/// The score of a token that text never merges into.
const NEVER: f32 = -1000.0;
/// The score of a row without a token.
const PADDING: f32 = -10_000.0;
/// The space of SentencePiece.
pub(super) const SPACE: char = '\u{2581}';

/// Why a tokenizer has no form in GGUF.
#[derive(Debug, Error)]
pub enum VocabularyError {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    PreTokenizer(#[from] PreTokenizerError),
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error(transparent)]
    Chat(#[from] ChatError),
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    #[error("`{0}` has neither tokenizer.json nor tokenizer.model; copy them from the original model")]
    Missing(PathBuf),
    #[error("cannot read `{path}`: {why}")]
    Invalid { path: PathBuf, why: String },
    #[error(
        "the tokenizer `{path}` is of type {found}, for which GGUF has no form here; byte-level BPE and BPE with byte \
         fallback are written"
    )]
    Model { path: PathBuf, found: String },
    #[error("`{path}` has token {id}, but the model has {rows} rows; the two do not belong together")]
    Outside { path: PathBuf, id: u64, rows: usize },
}

/// Tokens by id.
struct Vocabulary {
    tokens: Vec<String>,
    scores: Vec<f32>,
    kinds: Vec<Kind>,
}

impl Vocabulary {
    fn padded(rows: usize) -> Self {
        Self {
            tokens: (0..rows).map(|id| format!("[PAD{id}]")).collect(),
            scores: vec![PADDING; rows],
            kinds: vec![Kind::Unused; rows],
        }
    }

    fn set(&mut self, id: usize, token: impl Into<String>, score: f32, kind: Kind) {
        (self.tokens[id], self.scores[id], self.kinds[id]) = (token.into(), score, kind);
    }

    fn write(self, metadata: &mut Metadata, with_scores: bool) {
        metadata.set("tokenizer.ggml.tokens", self.tokens);
        if with_scores {
            metadata.set("tokenizer.ggml.scores", self.scores);
        }
        metadata.set("tokenizer.ggml.token_type", self.kinds.iter().map(|kind| *kind as i32).collect::<Vec<i32>>());
    }
}

/// A token that is found in text before anything else is done to it.
struct Added<'a> {
    id: usize,
    content: &'a str,
    special: bool,
    normalized: bool,
}

/// What the files of a tokenizer say.
struct Files<'a> {
    checkpoint: &'a Checkpoint,
    rows: usize,
    path: PathBuf,
    tokenizer: Json,
    config: SideFile,
}

/// Adds the pre-tokenizer that the user names to the metadata of a file that names none. Returns whether it was added.
pub fn add_pre_tokenizer(metadata: &mut Metadata, given: &str) -> Result<bool, VocabularyError> {
    let name = pretokenizer::named(given)?.name;
    if metadata.read::<&str>("tokenizer.ggml.model")? != Some("gpt2") {
        return Err(PreTokenizerError::NoByteLevel(given.into()).into());
    }
    match metadata.read::<&str>("tokenizer.ggml.pre")?.filter(|stated| !stated.is_empty()) {
        Some(stated) if stated == name => Ok(false),
        Some(stated) => Err(PreTokenizerError::Stated { stated: stated.into(), given: given.into() }.into()),
        None => {
            metadata.set("tokenizer.ggml.pre", name);
            Ok(true)
        }
    }
}

/// What differs between architectures.
pub(super) struct Habits<'a> {
    /// Rows of the embedding; every row gets a token.
    pub rows: usize,
    /// Gemma: text gets no space before it.
    pub no_space_prefix: bool,
    /// The arch `llama`, whose converter passes `add_prefix_space` on and knows vocabularies by their size.
    pub llama: bool,
    /// A pre-tokenizer named by the user.
    pub pre: Option<&'a str>,
}

/// Writes `tokenizer.*`. Returns what the user should know.
pub(super) fn write(
    metadata: &mut Metadata,
    checkpoint: &Checkpoint,
    habits: &Habits,
) -> Result<Vec<String>, VocabularyError> {
    let path = checkpoint.dir().join("tokenizer.json");
    let files = Files {
        checkpoint,
        rows: habits.rows,
        tokenizer: checkpoint.side_json("tokenizer.json")?.unwrap_or_default(),
        config: checkpoint.side("tokenizer_config.json")?,
        path,
    };
    let name = files.path.display().to_string();
    let mut special = Special::read(checkpoint, &JsonKeys::of(&name, &files.tokenizer), habits.rows)?;
    let add_prefix = files.config.keys().given_flag("add_prefix_space")?;
    let add_prefix = add_prefix.filter(|_| habits.llama);
    if let Some(add) = add_prefix {
        metadata.set("tokenizer.ggml.add_space_prefix", add);
    }
    let mut warnings = Vec::new();
    let mut space_prefix = None;
    let model = checkpoint.dir().join("tokenizer.model");
    let pieces = model.is_file() || !files.tokenizer.is_null() && files.is_sentencepiece()?;
    if let Some(pre) = habits.pre.filter(|_| pieces) {
        return Err(PreTokenizerError::NoByteLevel(pre.into()).into());
    }
    if model.is_file() {
        write_pieces(metadata, files.read_model(&model, &mut warnings)?);
        space_prefix = habits.no_space_prefix.then_some(false);
    } else if files.tokenizer.is_null() {
        return Err(VocabularyError::Missing(checkpoint.dir().into()));
    } else if pieces {
        write_pieces(metadata, files.read_merged(&mut warnings)?);
        space_prefix = Some(false).filter(|_| habits.no_space_prefix || !files.prepends_space());
    } else {
        files.write_byte_level(metadata, habits, &mut warnings)?;
    }
    if habits.llama && habits.rows == 49_152 {
        // Granite's small models and SmolLM share this size and take no BOS.
        special.overrule_added("bos", false);
    }
    warnings.extend(special.write(metadata));
    if habits.llama && habits.rows == 32_016 {
        // CodeLlama names these tokens nowhere.
        for (key, id) in [("prefix", 32_007u32), ("suffix", 32_008), ("middle", 32_009), ("eot", 32_010)] {
            metadata.set(format!("tokenizer.ggml.{key}_token_id"), id);
        }
    }
    if let Some(add) = space_prefix.filter(|_| add_prefix.is_none()) {
        metadata.set("tokenizer.ggml.add_space_prefix", add);
    }
    let tokens: Vec<Text> = metadata.need::<&[Text]>("tokenizer.ggml.tokens")?.to_vec();
    let ends = tokenizer::ends(checkpoint, |token| files.id_of(token, &tokens), habits.rows as u64)?;
    warnings.extend(ends::write(metadata, &ends)?);
    Ok(warnings)
}

fn write_pieces(metadata: &mut Metadata, vocabulary: Vocabulary) {
    metadata.set("tokenizer.ggml.model", "llama");
    metadata.set("tokenizer.ggml.pre", "default");
    vocabulary.write(metadata, true);
}

/// Added tokens that are for control even where their files do not say so.
fn looks_special(token: &str) -> bool {
    matches!(token, "<pad>" | "<mask>" | "<2mass>" | "[@BOS@]")
        || [("<|", "|>"), ("<｜", "｜>"), ("<unused", ">")]
            .iter()
            .any(|(a, b)| token.starts_with(a) && token.ends_with(b))
}

impl Files<'_> {
    fn invalid(&self, why: &str) -> VocabularyError {
        VocabularyError::Invalid { path: self.path.clone(), why: why.into() }
    }

    /// The id of a token by its text in tokenizer.json, or else in the vocabulary as it was written.
    fn id_of(&self, token: &str, written: &[Text]) -> Option<u32> {
        let list = self.tokenizer.get("added_tokens").and_then(Json::as_array);
        let same = |added: &&Json| added.get("content").and_then(Json::as_str) == Some(token);
        let added = list.into_iter().flatten().find(same).and_then(|added| whole(added.get("id")?));
        let own = || self.tokenizer.pointer("/model/vocab")?.get(token).and_then(whole);
        let piece = || written.iter().position(|text| text.as_str() == Some(token)).map(|id| id as i64);
        added.or_else(own).or_else(piece).and_then(|id| u32::try_from(id).ok())
    }

    /// Tokens of `model.vocab` with their ids.
    fn vocab(&self) -> Result<impl Iterator<Item = (&str, usize)>, VocabularyError> {
        let vocab = self.tokenizer.pointer("/model/vocab").and_then(Json::as_object);
        let vocab = vocab.ok_or_else(|| self.invalid("it has no `model.vocab`"))?;
        let id = |v: &Json| {
            let id = whole(v).and_then(|id| u64::try_from(id).ok());
            id.ok_or_else(|| self.invalid("an id in `model.vocab` is no whole number"))
        };
        let pairs: Vec<(&str, u64)> =
            vocab.iter().map(|(token, v)| Ok((token.as_str(), id(v)?))).collect::<Result<_, VocabularyError>>()?;
        if let Some((_, id)) = pairs.iter().find(|(_, id)| *id >= self.rows as u64) {
            return Err(VocabularyError::Outside { path: self.path.clone(), id: *id, rows: self.rows });
        }
        Ok(pairs.into_iter().map(|(token, id)| (token, id as usize)))
    }

    /// Added tokens; those without a row are passed over, as their texts are by the model.
    fn added(&self, warnings: &mut Vec<String>) -> Result<Vec<Added<'_>>, VocabularyError> {
        let named = self.named()?;
        let name = self.path.display().to_string();
        let list = JsonKeys::of(&name, &self.tokenizer).list("added_tokens")?;
        let mut added: Vec<Added> = Vec::new();
        for token in list.into_iter().flatten() {
            let at = format!("{name}: a token of `added_tokens`");
            let keys = JsonKeys::of(&at, token);
            let read = || -> Result<Added<'_>, KeyError> {
                let content = keys.text("content")?.ok_or_else(|| keys.missing("content"))?;
                let id = keys.whole("id")?.ok_or_else(|| keys.missing("id"))?;
                let id = usize::try_from(id).map_err(|_| keys.bad("id", "an id is needed"))?;
                let special = keys.flag("special", false)? || named.contains(&content);
                Ok(Added { id, content, special, normalized: keys.flag("normalized", false)? })
            };
            added.push(read()?);
        }
        if let Some(token) = added.iter().find(|token| token.id >= self.rows) {
            warnings.push(format!(
                "`{}` adds token {} (`{}`), for which the model has no row; it is left out",
                self.path.display(),
                token.id,
                token.content
            ));
        }
        added.retain(|token| token.id < self.rows);
        Ok(added)
    }

    /// Tokens that tokenizer_config.json gives a role.
    fn named(&self) -> Result<Vec<&str>, CheckpointError> {
        const ROLES: [&str; 7] =
            ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
        let config = self.config.keys();
        let mut all = Vec::new();
        for role in ROLES {
            all.extend(config.token(role)?);
        }
        for key in ["additional_special_tokens", "extra_special_tokens"] {
            let wanted = "a list of texts, or of objects with `content`, is needed";
            let more = config.read(key, wanted, |list| {
                let text = |token| Json::as_str(token).or_else(|| token.get("content")?.as_str());
                match list {
                    Json::Array(list) => list.iter().map(text).collect::<Option<Vec<_>>>(),
                    // By the names of their attributes: tokens of other kinds of input.
                    Json::Object(object) => object.values().map(text).collect::<Option<Vec<_>>>().map(|_| Vec::new()),
                    _ => None,
                }
            })?;
            all.extend(more.into_iter().flatten());
        }
        Ok(all)
    }

    /// Whether tokenizer.json was made of a SentencePiece model: BPE that falls back to bytes.
    fn is_sentencepiece(&self) -> Result<bool, VocabularyError> {
        let name = self.path.display().to_string();
        let read = || -> Result<(Option<&str>, bool), KeyError> {
            let Some(model) = JsonKeys::of(&name, &self.tokenizer).object("model")? else { return Ok((None, false)) };
            Ok((model.text("type")?, model.flag("byte_fallback", false)?))
        };
        let (kind, falls_back) = read()?;
        match kind.unwrap_or("of no stated type") {
            "BPE" => Ok(falls_back),
            other => Err(VocabularyError::Model { path: self.path.clone(), found: other.into() }),
        }
    }

    fn prepends_space(&self) -> bool {
        let finds = |value: Option<&Json>, wanted: &str| value.is_some_and(|v| v.to_string().contains(wanted));
        let metaspace = self.tokenizer.get("pre_tokenizer");
        finds(self.tokenizer.get("normalizer"), r#""type":"Prepend""#)
            || finds(metaspace, r#""type":"Metaspace""#) && !finds(metaspace, r#""prepend_scheme":"never""#)
    }

    /// `model.merges`, in both of its spellings.
    fn merges(&self) -> Result<Vec<(&str, &str)>, VocabularyError> {
        let list = match self.tokenizer.pointer("/model/merges").filter(|merges| !merges.is_null()) {
            None => &[][..],
            Some(merges) => merges.as_array().ok_or_else(|| self.invalid("`model.merges` is no list"))?,
        };
        list.iter().map(|merge| pair(merge).ok_or_else(|| self.invalid("a merge is no pair of tokens"))).collect()
    }

    fn write_byte_level(
        &self,
        metadata: &mut Metadata,
        habits: &Habits,
        warnings: &mut Vec<String>,
    ) -> Result<(), VocabularyError> {
        let text = self.checkpoint.side_text("tokenizer.json")?.unwrap_or_default();
        let mut runs = text.parse::<tokenizers::Tokenizer>().map_err(|e| self.invalid(&e.to_string()))?;
        runs.with_padding(None);
        runs.with_truncation(None).map_err(|e| self.invalid(&e.to_string()))?;
        let ids = |text: &str, special: bool| -> Result<Vec<u32>, VocabularyError> {
            let encoding = runs.encode_fast(text, special).map_err(|e| self.invalid(&e.to_string()))?;
            Ok(encoding.get_ids().to_vec())
        };

        let mut vocabulary = Vocabulary::padded(self.rows);
        for (token, id) in self.vocab()? {
            vocabulary.set(id, token, 0.0, Kind::Normal);
        }
        for token in self.added(warnings)? {
            // What text must hold for this token, after normalization.
            let text = match token.normalized {
                true => token.content.to_owned(),
                false => runs.decode(&ids(token.content, false)?, false).map_err(|e| self.invalid(&e.to_string()))?,
            };
            if token.special || looks_special(&text) {
                vocabulary.set(token.id, text, 0.0, Kind::Control);
            } else {
                vocabulary.set(token.id, text.replace(SPACE, " "), 0.0, Kind::UserDefined);
            }
        }
        let decision = match habits.pre {
            Some(name) => pretokenizer::named(name)?,
            None => pretokenizer::decide(&self.tokenizer, &ids(pretokenizer::PROBE, true)?)?,
        };
        warnings.extend(decision.warning);
        metadata.set("tokenizer.ggml.model", "gpt2");
        metadata.set("tokenizer.ggml.pre", decision.name);
        vocabulary.write(metadata, false);
        // A space inside a token would end it.
        let escaped = |part: &str| part.replace(' ', "Ġ");
        let merges = self.merges()?.into_iter().map(|(a, b)| format!("{} {}", escaped(a), escaped(b)));
        metadata.set("tokenizer.ggml.merges", merges.collect::<Vec<String>>());
        Ok(())
    }

    /// The pieces of tokenizer.model, with the tokens that other files add or rename.
    fn read_model(&self, path: &Path, warnings: &mut Vec<String>) -> Result<Vocabulary, VocabularyError> {
        let bytes = std::fs::read(path).map_err(|e| CheckpointError::Io { path: path.into(), why: e.to_string() })?;
        let invalid = |e: PieceError| VocabularyError::Invalid { path: path.into(), why: e.to_string() };
        let mut vocabulary = Vocabulary::padded(self.rows);
        let pieces = sentencepiece::pieces(&bytes).map_err(invalid)?;
        if pieces.len() > self.rows {
            warnings.push(format!(
                "`{}` has {} pieces, the model {} rows; the pieces beyond are left out",
                path.display(),
                pieces.len(),
                self.rows
            ));
        }
        for (id, piece) in pieces.into_iter().take(self.rows).enumerate() {
            // llama.cpp's converter does not ask for user-defined pieces; the other files name them.
            let kind = if piece.kind == Kind::UserDefined { Kind::Normal } else { piece.kind };
            vocabulary.set(id, piece.text, piece.score, kind);
        }
        let added = self.checkpoint.side("added_tokens.json")?;
        let added = added.keys();
        for token in added.names() {
            let id = added.whole(token)?.and_then(|id| usize::try_from(id).ok());
            if let Some(id) = id.filter(|id| *id < self.rows) {
                vocabulary.set(id, token, NEVER, Kind::UserDefined);
            }
        }
        let config = self.config.keys();
        let decoder = config.object("added_tokens_decoder")?;
        for (decoder, key) in decoder.iter().flat_map(|decoder| decoder.names().map(move |key| (decoder, key))) {
            let Some(token) = decoder.object(key)? else { continue };
            let id = key.parse::<usize>().map_err(|_| decoder.bad(key, "keys are ids"))?;
            let content = token.text("content")?;
            let special = token.flag("special", false)?;
            match content.filter(|_| id < self.rows) {
                None => {}
                Some(content) if special || looks_special(content) => {
                    vocabulary.set(id, content, NEVER, Kind::Control);
                }
                Some(content) => vocabulary.set(id, content.replace(SPACE, " "), NEVER, Kind::UserDefined),
            }
        }
        Ok(vocabulary)
    }

    /// A SentencePiece vocabulary back from tokenizer.json. Pieces are merged by their scores, so the scores must
    /// order them as the merges do; llama.cpp's converter gives all of them the same one.
    fn read_merged(&self, warnings: &mut Vec<String>) -> Result<Vocabulary, VocabularyError> {
        let merges = self.merges()?;
        let mut ranks: HashMap<String, usize> = HashMap::with_capacity(merges.len());
        for (rank, (a, b)) in merges.iter().enumerate() {
            ranks.entry(format!("{a}{b}")).or_insert(rank);
        }
        let unknown = self.tokenizer.pointer("/model/unk_token").and_then(Json::as_str);
        let mut vocabulary = Vocabulary::padded(self.rows);
        let named = self.named()?;
        for (token, id) in self.vocab()? {
            let kind = match token {
                _ if is_byte(token) => Kind::Byte,
                _ if named.contains(&token) => Kind::Control,
                _ if unknown == Some(token) => Kind::Unknown,
                _ => Kind::Normal,
            };
            let score = match kind {
                Kind::Normal => -(*ranks.get(token).unwrap_or(&merges.len()) as f32),
                _ => 0.0,
            };
            vocabulary.set(id, token, score, kind);
        }
        for token in self.added(warnings)? {
            let kind = match vocabulary.kinds[token.id] {
                Kind::Unknown => Kind::Unknown,
                _ if token.special || looks_special(token.content) => Kind::Control,
                _ => Kind::UserDefined,
            };
            let content = token.content.to_owned();
            vocabulary.set(
                token.id,
                if kind == Kind::UserDefined { content.replace(SPACE, " ") } else { content },
                NEVER,
                kind,
            );
        }
        Ok(vocabulary)
    }
}

/// The two sides of a merge: `"a b"` or `["a", "b"]`.
fn pair(merge: &Json) -> Option<(&str, &str)> {
    match merge {
        Json::String(text) => text.split_once(' '),
        Json::Array(pair) => Some((pair.first()?.as_str()?, pair.get(1)?.as_str()?)),
        _ => None,
    }
}

/// `<0x0A>` and the like.
pub(super) fn is_byte(token: &str) -> bool {
    let digits = token.strip_prefix("<0x").and_then(|t| t.strip_suffix('>'));
    digits.is_some_and(|d| d.len() == 2 && d.chars().all(|c| c.is_ascii_hexdigit()))
}
