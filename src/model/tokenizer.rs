//! Text to token ids and back, from a model's `tokenizer.json`, and which ids begin and end a text.
//!
//! Whether a text starts with BOS is a property of the model's files, and getting it wrong changes
//! perplexity by orders of magnitude for some families; the decision is made here once, with its evidence.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::OnceLock;

use sha2::{Digest, Sha256};
use thiserror::Error;
use tokenizers::models::ModelWrapper;
use tokenizers::processors::PostProcessorWrapper;

use super::cuts::Cuts;
use crate::checkpoint::{Checkpoint, CheckpointError, KeyError};
use crate::num::hex::hex;

/// What can go wrong between text and token ids.
#[derive(Debug, Error)]
pub enum TokenizerError {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error("`{dir}` has no `tokenizer.json`, and text cannot be tokenized without it; {hint}")]
    Missing { dir: PathBuf, hint: &'static str },
    #[error("cannot read the tokenizer `{path}`: {why}")]
    Invalid { path: PathBuf, why: String },
    #[error(
        "`{path}` has token ids up to {highest} and so needs {} embedding rows; the model has {vocab_size} \
         (`vocab_size` in config.json): the two do not belong together, or tokens were added without resizing \
         the model",
        u64::from(*highest) + 1
    )]
    LargerThanModel { path: PathBuf, highest: u32, vocab_size: u64 },
    #[error("cannot tokenize the text: {0}")]
    Encode(String),
    #[error("cannot turn token ids back into text: {0}")]
    Decode(String),
    #[error(
        "BOS is wanted ({wanted}), but none of tokenizer_config.json, generation_config.json and config.json names a BOS token; use `--bos none`"
    )]
    NoBos { wanted: &'static str },
    #[error("`{0}` is no BOS mode; use auto, none, window or once")]
    UnknownMode(String),
}

/// A model's tokenizer.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    rows: usize,
    bos: Option<u32>,
    eos: Vec<u32>,
    prefix: Option<u32>,
    adds_bos: bool,
    evidence: String,
    warning: Option<String>,
    /// Found when first asked for: most texts are short.
    cuts: OnceLock<Result<Cuts, String>>,
}

impl Tokenizer {
    /// Reads `tokenizer.json` and checks it against the model's `vocab_size`. Tokens added beyond the embedding are
    /// only worth a [`Self::warning`]: published models have them (an image token, padding), and text rarely does.
    ///
    /// Truncation, padding and BPE dropout that the file asks for are switched off: a measurement needs the
    /// whole text, the same way every time.
    pub fn load(checkpoint: &Checkpoint) -> Result<Self, TokenizerError> {
        let dir = checkpoint.dir();
        let path = dir.join("tokenizer.json");
        let Some(text) = checkpoint.side_text("tokenizer.json")? else {
            return Err(TokenizerError::Missing { dir: dir.into(), hint: missing_hint(dir) });
        };
        let invalid = |why: String| TokenizerError::Invalid { path: path.clone(), why };
        let mut inner = text.parse::<tokenizers::Tokenizer>().map_err(|e| invalid(e.to_string()))?;
        drop(text);
        inner.with_truncation(None).map_err(|e| invalid(e.to_string()))?;
        inner.with_padding(None);
        if let ModelWrapper::BPE(bpe) = inner.get_model()
            && bpe.dropout.is_some()
        {
            let mut bpe = bpe.clone();
            bpe.dropout = None;
            inner.with_model(bpe);
        }

        let base = inner.get_vocab(false).into_values().max();
        let added = inner.get_added_tokens_decoder();
        let highest = base.max(added.keys().copied().max()).ok_or_else(|| invalid("no tokens in it".into()))?;
        let embedding = || {
            let (_, entry) = checkpoint.tensors().iter().find(|(name, _)| name.ends_with("embed_tokens.weight"))?;
            entry.shape.first().map(|rows| *rows as u64)
        };
        let config = checkpoint.keys();
        // Multimodal models have the size of their text part under `text_config`.
        let text_part = config.object("text_config")?.unwrap_or(config);
        let vocab_size = text_part.count("vocab_size")?;
        let vocab_size = vocab_size.map(|size| size as u64).or_else(embedding);
        if let Some(vocab_size) = vocab_size
            && let Some(highest) = base
            && u64::from(highest) >= vocab_size
        {
            return Err(TokenizerError::LargerThanModel { path, highest, vocab_size });
        }

        let mut outside: Vec<(u32, &str)> = added.iter().map(|(id, token)| (*id, &*token.content)).collect();
        outside.retain(|(id, _)| vocab_size.is_some_and(|size| u64::from(*id) >= size));
        let warning = outside.iter().min().map(|(id, token)| {
            let more = if outside.len() > 1 { format!(" and {} more", outside.len() - 1) } else { String::new() };
            format!(
                "`{}` adds token {id} (`{token}`){more} outside the embedding of the model, which has {} rows; text \
                 that spells it out will be refused",
                path.display(),
                vocab_size.unwrap_or_default()
            )
        });

        let files = SpecialIds::read(checkpoint, &inner, vocab_size.unwrap_or(u64::MAX))?;
        let seen = prepended(&inner)?;
        let speaks = inner.get_post_processor().is_some_and(can_add_tokens);
        let (adds_bos, evidence) = bos_policy(speaks, seen, files.add_bos_token, files.bos());
        Ok(Self {
            rows: highest as usize + 1,
            bos: if adds_bos { seen.or(files.bos()) } else { files.bos() },
            prefix: files.tokenizer_bos.or(files.tokenizer_eos).or(files.bos()).or(files.eos.first().copied()),
            eos: files.eos,
            adds_bos,
            evidence,
            warning,
            cuts: OnceLock::new(),
            inner,
        })
    }

    /// The token ids of `text`, without the special tokens that a post-processor would put around it.
    /// Special tokens that are spelled out in the text become their ids, as in Hugging Face tokenizers.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        encode(&self.inner, text, false)
    }

    /// Where a text may be cut so that its parts have the tokens of the whole, or why that is not known.
    pub fn cuts(&self) -> Result<&Cuts, &str> {
        self.cuts.get_or_init(|| Cuts::of(&self.inner)).as_ref().map_err(String::as_str)
    }

    /// The text of `ids`; special tokens are left out if `skip_special`.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TokenizerError> {
        self.inner.decode(ids, skip_special).map_err(|e| TokenizerError::Decode(e.to_string()))
    }

    /// Text from tokens as they come.
    pub fn decode_stream(&self, skip_special: bool) -> DecodeStream<'_> {
        DecodeStream { tokenizer: self, skip_special, ids: Vec::new(), shown: 0 }
    }

    /// The id of a token by its text.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The text of a token by its id, as the vocabulary spells it.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// What the user should know about tokenizer and model.
    pub fn warning(&self) -> Option<&str> {
        self.warning.as_deref()
    }

    /// Embedding rows that the tokenizer asks for: its highest id plus one. Models may have more (padded vocabulary).
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The token that begins a text.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The tokens that end a text. The tokenizer's own comes first, then the ones in `generation_config.json` and
    /// `config.json`, where chat models list several.
    pub fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// What the first token of a text is predicted from where nothing precedes it: the tokenizer's BOS, else its
    /// EOS, as in lm-eval.
    pub fn rolling_prefix(&self) -> Option<u32> {
        self.prefix
    }

    /// Whether the model expects BOS before a text.
    pub fn adds_bos(&self) -> bool {
        self.adds_bos
    }

    /// Why [`Self::adds_bos`] is what it is, for the report.
    pub fn bos_evidence(&self) -> &str {
        &self.evidence
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("rows", &self.rows)
            .field("bos", &self.bos)
            .field("eos", &self.eos)
            .field("adds_bos", &self.adds_bos)
            .finish_non_exhaustive()
    }
}

fn encode(inner: &tokenizers::Tokenizer, text: &str, special: bool) -> Result<Vec<u32>, TokenizerError> {
    let encoding = inner.encode_fast(text, special).map_err(|e| TokenizerError::Encode(e.to_string()))?;
    Ok(encoding.get_ids().to_vec())
}

fn missing_hint(dir: &Path) -> &'static str {
    if dir.join("tokenizer.model").exists() {
        "`tokenizer.model` alone is not read: let transformers write tokenizer.json \
         (`AutoTokenizer.from_pretrained(dir).save_pretrained(dir)`)"
    } else if dir.join("vocab.json").exists() {
        "`vocab.json` and `merges.txt` alone are not read: let transformers write tokenizer.json \
         (`AutoTokenizer.from_pretrained(dir).save_pretrained(dir)`)"
    } else {
        "copy it, and tokenizer_config.json, from the original model"
    }
}

/// What the files beside the tokenizer say about BOS and EOS.
struct SpecialIds {
    tokenizer_bos: Option<u32>,
    tokenizer_eos: Option<u32>,
    model_bos: Option<u32>,
    eos: Vec<u32>,
    add_bos_token: Option<bool>,
}

impl SpecialIds {
    fn read(checkpoint: &Checkpoint, inner: &tokenizers::Tokenizer, rows: u64) -> Result<Self, CheckpointError> {
        let id_of = |token: &str| inner.token_to_id(token);
        Ok(Self {
            tokenizer_bos: own_token(checkpoint, "bos_token", &id_of)?,
            tokenizer_eos: own_token(checkpoint, "eos_token", &id_of)?,
            model_bos: model_ids(checkpoint, "bos_token_id", rows)?.first().copied(),
            eos: ends(checkpoint, id_of, rows)?,
            add_bos_token: checkpoint.side("tokenizer_config.json")?.keys().given_flag("add_bos_token")?,
        })
    }

    fn bos(&self) -> Option<u32> {
        self.tokenizer_bos.or(self.model_bos)
    }
}

/// The tokens that end a text, each once: the tokenizer's own, then the ones in `generation_config.json` and
/// `config.json`. `id_of` gives the id of a token by its text; ids beyond `rows` are left out.
pub(crate) fn ends(
    checkpoint: &Checkpoint,
    id_of: impl Fn(&str) -> Option<u32>,
    rows: u64,
) -> Result<Vec<u32>, CheckpointError> {
    let own = own_token(checkpoint, "eos_token", &id_of)?;
    let mut all: Vec<u32> = Vec::new();
    for id in own.into_iter().chain(model_ids(checkpoint, "eos_token_id", rows)?) {
        if !all.contains(&id) {
            all.push(id);
        }
    }
    Ok(all)
}

/// The id of the token that tokenizer_config.json, else special_tokens_map.json, gives a role.
fn own_token(
    checkpoint: &Checkpoint,
    role: &str,
    id_of: &dyn Fn(&str) -> Option<u32>,
) -> Result<Option<u32>, CheckpointError> {
    let (config, map) = (checkpoint.side("tokenizer_config.json")?, checkpoint.side("special_tokens_map.json")?);
    let named = match config.keys().token(role)? {
        Some(token) => id_of(token),
        None => map.keys().token(role)?.and_then(id_of),
    };
    Ok(named)
}

/// Ids that `generation_config.json`, then `config.json` give a role. A negative one means that there is no such token;
/// one beyond `rows` is left over from the model that a small one was cut from.
fn model_ids(checkpoint: &Checkpoint, key: &str, rows: u64) -> Result<Vec<u32>, CheckpointError> {
    let mut ids = checkpoint.side("generation_config.json")?.keys().ids(key)?;
    let config = checkpoint.keys();
    // Multimodal models may have them at either level.
    match config.object("text_config")?.filter(|text| config.get(key).is_none() && text.get(key).is_some()) {
        Some(text) => ids.extend(text.ids(key)?),
        None => ids.extend(config.ids(key)?),
    }
    let inside = |id: i64| u32::try_from(id).ok().filter(|id| u64::from(*id) < rows);
    Ok(ids.into_iter().filter_map(inside).collect())
}

/// The first token that the tokenizer's post-processor puts before a text.
fn prepended(inner: &tokenizers::Tokenizer) -> Result<Option<u32>, TokenizerError> {
    let (bare, full) = (encode(inner, "a", false)?, encode(inner, "a", true)?);
    let at = full.windows(bare.len().max(1)).position(|w| w == bare);
    Ok(if at == Some(0) { None } else { full.first().copied().filter(|_| full.len() > bare.len()) })
}

/// Whether this kind of post-processor is where special tokens come from; a byte-level one only moves offsets.
fn can_add_tokens(processor: &PostProcessorWrapper) -> bool {
    match processor {
        PostProcessorWrapper::ByteLevel(_) => false,
        PostProcessorWrapper::Sequence(list) => (0..).map_while(|i| list.get(i)).any(can_add_tokens),
        _ => true,
    }
}

/// The post-processor decides if it can; `add_bos_token` only fills its silence.
fn bos_policy(speaks: bool, seen: Option<u32>, key: Option<bool>, bos: Option<u32>) -> (bool, String) {
    match (speaks, seen, key) {
        (true, Some(id), key) => {
            let other = bos.filter(|bos| *bos != id).map(|bos| format!(", though the files name {bos} as BOS"));
            let against = if key == Some(false) { "; `add_bos_token: false` is overruled" } else { "" };
            (true, format!("tokenizer.json puts token {id} before a text{}{against}", other.unwrap_or_default()))
        }
        (true, None, Some(true)) => {
            (false, "tokenizer.json puts nothing before a text; `add_bos_token: true` is overruled".into())
        }
        (true, None, _) => (false, "tokenizer.json puts nothing before a text".into()),
        (false, _, Some(true)) if bos.is_none() => {
            (false, "tokenizer_config.json has `add_bos_token: true`, but no file names a BOS token".into())
        }
        (false, _, Some(key)) => {
            (key, format!("tokenizer_config.json has `add_bos_token: {key}`; tokenizer.json does not say"))
        }
        (false, _, None) => (false, "neither tokenizer.json nor tokenizer_config.json asks for BOS".into()),
    }
}

/// Where the user wants BOS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BosMode {
    /// As the model's files and the convention have it.
    #[default]
    Auto,
    /// Nowhere.
    None,
    /// At the first position of every window.
    Window,
    /// Once, before the whole text.
    Once,
}

impl FromStr for BosMode {
    type Err = TokenizerError;

    fn from_str(text: &str) -> Result<Self, TokenizerError> {
        match text {
            "auto" => Ok(Self::Auto),
            "none" => Ok(Self::None),
            "window" => Ok(Self::Window),
            "once" => Ok(Self::Once),
            other => Err(TokenizerError::UnknownMode(other.into())),
        }
    }
}

/// Where a convention puts BOS for a tokenizer that adds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BosHabit {
    Once,
    Window,
}

/// Where BOS goes, settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BosRule {
    None,
    Once(u32),
    Window(u32),
}

impl BosRule {
    /// The word for reports: `none`, `once` or `window`.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Once(_) => "once",
            Self::Window(_) => "window",
        }
    }
}

impl BosMode {
    /// Turns the wish into a rule. `auto`: families that break down without BOS (Gemma) get it in every window;
    /// others get it where `habit` says if their tokenizer adds it, and nowhere otherwise.
    pub fn settle(
        self,
        tokenizer: &Tokenizer,
        family_needs_bos: bool,
        habit: BosHabit,
    ) -> Result<BosRule, TokenizerError> {
        let bos = |wanted| tokenizer.bos().ok_or(TokenizerError::NoBos { wanted });
        match (self, habit) {
            (Self::None, _) => Ok(BosRule::None),
            (Self::Once, _) => bos("`--bos once`").map(BosRule::Once),
            (Self::Window, _) => bos("`--bos window`").map(BosRule::Window),
            (Self::Auto, _) if family_needs_bos => bos("this model family needs it").map(BosRule::Window),
            (Self::Auto, _) if !tokenizer.adds_bos() => Ok(BosRule::None),
            (Self::Auto, BosHabit::Once) => bos("the tokenizer adds it").map(BosRule::Once),
            (Self::Auto, BosHabit::Window) => bos("the tokenizer adds it").map(BosRule::Window),
        }
    }
}

/// Tokens held back at most while they end in the middle of a character. A character is at most four bytes, but
/// tokens may straddle characters; a longer run is broken text and is shown as such.
const HELD: usize = 16;

/// Turns tokens into text as they come, in pieces that are whole characters.
///
/// Tokens cannot be decoded one by one: bytes of a character may be spread over several, and spaces depend on the
/// neighbour. Each piece is the difference between two decodings that share the tokens shown last as context.
pub struct DecodeStream<'a> {
    tokenizer: &'a Tokenizer,
    skip_special: bool,
    ids: Vec<u32>,
    shown: usize,
}

impl DecodeStream<'_> {
    /// Takes the next token; the piece is empty while a character is incomplete.
    pub fn push(&mut self, id: u32) -> Result<String, TokenizerError> {
        self.ids.push(id);
        let now = self.tokenizer.decode(&self.ids, self.skip_special)?;
        if now.ends_with(char::REPLACEMENT_CHARACTER) && self.ids.len() - self.shown < HELD {
            return Ok(String::new());
        }
        let piece = self.after_shown(&now)?;
        // A token without text (skipped, or empty) is no context for the next one.
        if !piece.is_empty() {
            self.ids.drain(..self.shown);
        }
        self.shown = self.ids.len();
        Ok(piece)
    }

    /// What is still held back, without an incomplete character at its end.
    pub fn finish(self) -> Result<String, TokenizerError> {
        let now = self.tokenizer.decode(&self.ids, self.skip_special)?;
        let rest = self.after_shown(&now)?;
        let held = self.ids.len() > self.shown;
        Ok(if held { rest.trim_end_matches(char::REPLACEMENT_CHARACTER).into() } else { String::new() })
    }

    fn after_shown(&self, now: &str) -> Result<String, TokenizerError> {
        let before = self.tokenizer.decode(&self.ids[..self.shown], self.skip_special)?;
        let same = before.chars().zip(now.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum();
        Ok(now[same..].into())
    }
}

/// SHA-256 of token ids as little-endian 32-bit numbers, in hex: two runs with the same hash saw the same tokens.
pub fn ids_sha256(ids: &[u32]) -> String {
    let mut hash = Sha256::new();
    for id in ids {
        hash.update(id.to_le_bytes());
    }
    hex(&hash.finalize())
}

/// SHA-256 of a text's UTF-8 bytes, in hex.
pub fn text_sha256(text: &str) -> String {
    hex(&Sha256::digest(text.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_post_processor_outranks_the_key() {
        assert!(bos_policy(true, Some(1), Some(false), Some(1)).0);
        assert!(!bos_policy(true, None, Some(true), Some(1)).0);
        assert!(bos_policy(false, None, Some(true), Some(1)).0);
        assert!(!bos_policy(false, None, Some(true), None).0);
        assert!(!bos_policy(false, None, Some(false), Some(1)).0);
        assert!(!bos_policy(false, None, None, Some(1)).0);
        assert!(bos_policy(true, Some(5), None, Some(1)).1.contains("token 5"));
    }

    #[test]
    fn modes_are_parsed() {
        assert_eq!("window".parse::<BosMode>().ok(), Some(BosMode::Window));
        assert_eq!("auto".parse::<BosMode>().ok(), Some(BosMode::default()));
        let message = "bos".parse::<BosMode>().map_err(|e| e.to_string());
        assert_eq!(message, Err("`bos` is no BOS mode; use auto, none, window or once".into()));
    }

    #[test]
    fn hashes_are_those_of_the_bytes() {
        // `printf abc | sha256sum`, and the same for the eight bytes 01 00 00 00 00 01 00 00.
        assert_eq!(text_sha256("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(ids_sha256(&[1, 256]), "242045e2f1bb37769b514f182fd91b3d215324cb57f187cced1e9c62921dbac3");
    }
}
