//! Calibration text: where it comes from, and how it becomes token windows.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use rayon::prelude::*;
use serde_json::Value;
use thiserror::Error;

use super::text::{Counted, TextFacts, TextSource};
use crate::model::chat::{ChatError, Message};
use crate::model::text_encoder::{OnLongPart, PIECE, TextEncoder};
use crate::model::tokenizer::{BosRule, Tokenizer, TokenizerError};

/// Text shipped for calibration when the user gives none.
const CALIBRATION: &str = include_str!("../../calib/calibration.txt");
/// Text shipped for measurements, which calibration never sees.
const HELDOUT: &str = include_str!("../../calib/heldout.txt");
/// The same of another kind: prose that explains.
const HELDOUT_SCIENCE: &str = include_str!("../../calib/heldout-science.txt");

/// Documents tokenized side by side.
const AT_ONCE: usize = 256;
/// Bytes of documents from which on no more are added to those.
const BYTES_AT_ONCE: usize = 1 << 20;
/// Separator between documents that are joined into one text.
const BETWEEN: &str = "\n\n";

/// What can be wrong with a corpus.
#[derive(Debug, Error)]
pub enum CorpusError {
    #[error("cannot read `{path}`: {why}")]
    Io { path: PathBuf, why: String },
    #[error("`{path}` is not UTF-8 text (first bad byte at {offset}); convert it")]
    NotText { path: PathBuf, offset: usize },
    #[error(
        "`{path}`: .{extension} files are not read; give plain text, or .jsonl with a `text` or `messages` per line"
    )]
    Kind { path: PathBuf, extension: String },
    #[error("`{path}`, line {line}: {why}")]
    Line { path: PathBuf, line: usize, why: String },
    #[error("`{path}`, line {line}: {source}")]
    Chat { path: PathBuf, line: usize, source: ChatError },
    #[error("`{path}`, line {line} holds `messages`, but the model has no chat template; give lines with `text`")]
    NoTemplate { path: PathBuf, line: usize },
    #[error("`{path}` changed while it was in use; run the command again")]
    Changed { path: PathBuf },
    #[error("`{name}` holds no text")]
    Empty { name: String },
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    #[error("no windows asked for: {nsamples} of {seqlen} tokens; both numbers must be positive{}", bos_note(*bos))]
    NothingAsked { nsamples: usize, seqlen: usize, bos: bool },
    #[error("the corpus is too short: {nsamples} windows of {seqlen} tokens need {needed}, it has {found}; {}", advice(*fits))]
    TooShort { nsamples: usize, seqlen: usize, needed: usize, found: usize, fits: usize },
}

fn bos_note(bos: bool) -> &'static str {
    if bos { ", and BOS in every window takes one token of each" } else { "" }
}

fn advice(fits: usize) -> String {
    match fits {
        0 => "give a longer text or a smaller `--seqlen`".into(),
        n => format!("give a longer text or `--nsamples {n}`"),
    }
}

/// Renders a conversation with the model's chat template.
pub type RenderChat = Arc<dyn Fn(&[Message]) -> Result<String, ChatError> + Send + Sync>;

/// Loads the renderer of conversations; `None` if the model has no chat template.
pub type LoadChat<'a> = &'a mut dyn FnMut() -> Result<Option<RenderChat>, ChatError>;

/// Documents, and what the report calls them. A file is read again whenever its text is asked for, so that memory does not
/// grow with it.
#[derive(Clone)]
pub struct Corpus {
    /// `builtin`, `heldout`, `heldout-science` or the file.
    pub name: String,
    /// SHA-256 of the file.
    pub sha256: String,
    /// Documents that are not empty: one for a .txt file, one per line for .jsonl.
    pub documents: usize,
    /// All documents as one text.
    pub facts: TextFacts,
    source: TextSource,
}

impl fmt::Debug for Corpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, sha256, documents, facts, .. } = self;
        f.debug_struct("Corpus")
            .field("name", name)
            .field("sha256", sha256)
            .field("documents", documents)
            .field("facts", facts)
            .finish_non_exhaustive()
    }
}

impl Corpus {
    /// The shipped calibration text.
    pub fn builtin() -> Self {
        Self::shipped("builtin", CALIBRATION)
    }

    /// The shipped text for measurements.
    pub fn heldout() -> Self {
        Self::shipped("heldout", HELDOUT)
    }

    /// The shipped text of another kind for measurements.
    pub fn heldout_science() -> Self {
        Self::shipped("heldout-science", HELDOUT_SCIENCE)
    }

    fn shipped(name: &str, text: &'static str) -> Self {
        let facts = TextFacts::of(text);
        Self { name: name.into(), sha256: facts.sha256.clone(), documents: 1, facts, source: TextSource::Shipped(text) }
    }

    /// A user's file: `.jsonl` is one JSON object per line with `text` or `messages`, anything else one plain
    /// text. Empty lines and empty texts are passed over. Line ends become LF, as when Python reads text: the
    /// published figures on files with CR LF are made so.
    ///
    /// # Errors
    /// For a file that cannot be read, is not text, or has a line that is not understood, whether or not that part of it
    /// will be needed.
    pub fn read(path: &Path, chat: Option<RenderChat>) -> Result<Self, CorpusError> {
        Self::read_with(path, &mut || Ok(chat.clone()))
    }

    /// As [`Corpus::read`], with a renderer that is loaded when the first line with `messages` is met.
    ///
    /// # Errors
    /// As [`Corpus::read`], and when the renderer is needed and cannot be loaded.
    pub fn read_with(path: &Path, load: LoadChat<'_>) -> Result<Self, CorpusError> {
        let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default().to_ascii_lowercase();
        if ["json", "parquet", "csv", "gz", "zst", "zip", "pdf"].contains(&&*extension) {
            return Err(CorpusError::Kind { path: path.into(), extension });
        }
        let mut source = TextSource::file(path, extension == "jsonl")?;
        let mut reader = source.open(Some(load))?;
        let (mut facts, mut documents, mut ended, mut blank) = (Counted::default(), 0, true, true);
        while let Some(piece) = reader.next_piece()? {
            if ended && documents > 0 {
                facts.add(BETWEEN);
            }
            documents += usize::from(ended);
            ended = piece.ends;
            blank &= piece.text.trim().is_empty();
            facts.add(&piece.text);
        }
        if blank {
            return Err(CorpusError::Empty { name: path.display().to_string() });
        }
        // Reports are to be the same wherever the text lies.
        let name = path.file_name().map_or_else(|| path.display().to_string(), |n| n.to_string_lossy().into_owned());
        let sha256 = reader.sha256();
        source.expect(&sha256);
        Ok(Self { name, sha256, documents, facts: facts.finish(), source })
    }

    /// All documents as one stream of tokens. Between documents stands the tokenizer's EOS, if it has one, unless
    /// the document ends with an EOS already (chat templates write their own).
    pub fn tokens(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>, CorpusError> {
        self.first_tokens(tokenizer, usize::MAX)
    }

    /// As [`Corpus::tokens`], but text after the first `enough` tokens is neither read nor tokenized.
    pub fn first_tokens(&self, tokenizer: &Tokenizer, enough: usize) -> Result<Vec<u32>, CorpusError> {
        self.first_tokens_warning(tokenizer, enough, &|_| ())
    }

    /// As [`Corpus::first_tokens`]; `on_long_part` is called before a part is tokenized that takes much memory.
    pub fn first_tokens_warning(
        &self,
        tokenizer: &Tokenizer,
        enough: usize,
        on_long_part: OnLongPart<'_>,
    ) -> Result<Vec<u32>, CorpusError> {
        let (mut stream, mut reader) = (Vec::new(), self.source.open(None)?);
        let (mut whole, mut bytes): (Vec<String>, usize) = (Vec::new(), 0);
        let mut begun: Option<TextEncoder> = None;
        while stream.len() < enough
            && let Some(piece) = reader.next_piece()?
        {
            match (begun.take(), piece.ends) {
                // Documents that come in one piece are tokenized side by side. Nearly every token has at least one byte, so
                // that fewer bytes than the tokens to come are not enough.
                (None, true) => {
                    bytes += piece.text.len();
                    whole.push(piece.text.into_owned());
                    if whole.len() == AT_ONCE || bytes >= BYTES_AT_ONCE.min(enough - stream.len()) {
                        append(&mut stream, tokenizer, &std::mem::take(&mut whole))?;
                        bytes = 0;
                    }
                }
                (encoder, ends) => {
                    let mut encoder = match encoder {
                        Some(encoder) => encoder,
                        None => {
                            append(&mut stream, tokenizer, &std::mem::take(&mut whole))?;
                            bytes = 0;
                            between(&mut stream, tokenizer);
                            TextEncoder::warning(tokenizer, PIECE, on_long_part)
                        }
                    };
                    encoder.push(&piece.text, &mut stream)?;
                    match ends {
                        true => encoder.finish(&mut stream)?,
                        false => begun = Some(encoder),
                    }
                }
            }
        }
        if stream.len() < enough {
            append(&mut stream, tokenizer, &whole)?;
        }
        if stream.is_empty() {
            return Err(CorpusError::Empty { name: self.name.clone() });
        }
        Ok(stream)
    }

    /// The tokens of [`Corpus::text`], at least `enough` of them if it has so many; text after them is neither read nor
    /// tokenized.
    pub fn first_text_tokens(&self, tokenizer: &Tokenizer, enough: usize) -> Result<Vec<u32>, CorpusError> {
        self.first_text_tokens_warning(tokenizer, enough, &|_| ())
    }

    /// As [`Corpus::first_text_tokens`]; `on_long_part` is called before a part is tokenized that takes much memory.
    pub fn first_text_tokens_warning(
        &self,
        tokenizer: &Tokenizer,
        enough: usize,
        on_long_part: OnLongPart<'_>,
    ) -> Result<Vec<u32>, CorpusError> {
        let (mut ids, mut reader) = (Vec::new(), self.source.open(None)?);
        let mut encoder = TextEncoder::warning(tokenizer, PIECE, on_long_part);
        let (mut ended, mut first) = (true, true);
        while ids.len() < enough {
            let Some(piece) = reader.next_piece()? else {
                encoder.finish(&mut ids)?;
                break;
            };
            if ended && !first {
                encoder.push(BETWEEN, &mut ids)?;
            }
            (ended, first) = (piece.ends, false);
            encoder.push(&piece.text, &mut ids)?;
        }
        Ok(ids)
    }

    /// All documents as one text for measurements, a blank line between them, as the papers join the rows of
    /// a data set.
    pub fn text(&self) -> Result<String, CorpusError> {
        Ok(self.all_documents()?.join(BETWEEN))
    }

    /// The documents themselves.
    pub fn all_documents(&self) -> Result<Vec<String>, CorpusError> {
        let (mut out, mut ended, mut reader) = (Vec::new(), true, self.source.open(None)?);
        while let Some(piece) = reader.next_piece()? {
            match (ended, out.last_mut()) {
                (false, Some(last)) => String::push_str(last, &piece.text),
                _ => out.push(piece.text.into_owned()),
            }
            ended = piece.ends;
        }
        Ok(out)
    }
}

/// Adds whole documents to a stream.
fn append(stream: &mut Vec<u32>, tokenizer: &Tokenizer, documents: &[String]) -> Result<(), CorpusError> {
    let one = |document: &String| {
        let (mut ids, mut encoder) = (Vec::new(), TextEncoder::new(tokenizer, PIECE));
        encoder.push(document, &mut ids)?;
        encoder.finish(&mut ids)?;
        Ok::<_, TokenizerError>(ids)
    };
    // Taken in order, so that the first fault is the one that is reported.
    for tokens in documents.par_iter().map(one).collect::<Vec<_>>() {
        let tokens = tokens?;
        between(stream, tokenizer);
        stream.extend(tokens);
    }
    Ok(())
}

/// Appends EOS unless the stream already ends with one.
fn between(stream: &mut Vec<u32>, tokenizer: &Tokenizer) {
    let ended = stream.last().is_none_or(|last| tokenizer.eos().contains(last));
    if let (false, Some(&eos)) = (ended, tokenizer.eos().first()) {
        stream.push(eos);
    }
}

/// What a line of a .jsonl file holds.
pub(super) fn document(path: &Path, number: usize, line: &str, chat: LoadChat<'_>) -> Result<String, CorpusError> {
    let bad = |why: String| CorpusError::Line { path: path.into(), line: number, why };
    let mut value: Value = serde_json::from_str(line).map_err(|e| bad(format!("not JSON: {}", json_reason(&e))))?;
    let mut field = |name: &str| value.get_mut(name).map(Value::take).filter(|value| !value.is_null());
    match (field("text"), field("messages")) {
        (Some(_), Some(_)) => Err(bad("has both `text` and `messages`".into())),
        (Some(Value::String(text)), None) => Ok(text),
        (Some(_), None) => Err(bad("`text` is not a string".into())),
        (None, Some(list)) => {
            let messages = messages(&list).map_err(bad)?;
            let failed = |source| CorpusError::Chat { path: path.into(), line: number, source };
            let chat = chat().map_err(failed)?;
            let chat = chat.ok_or_else(|| CorpusError::NoTemplate { path: path.into(), line: number })?;
            chat(&messages).map_err(failed)
        }
        (None, None) => Err(bad("has neither `text` nor `messages`".into())),
    }
}

/// The parser counts lines from the start of the one line it was given, which would mislead here.
fn json_reason(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    format!("{} at column {}", text.strip_suffix(&place).unwrap_or(&text), error.column())
}

/// Messages with `role` and `content`; content in parts must be text alone.
pub fn messages(list: &Value) -> Result<Vec<Message>, String> {
    let list = list.as_array().filter(|list| !list.is_empty()).ok_or("`messages` is not a list with turns in it")?;
    let turn = |(index, item): (usize, &Value)| {
        let role = item.get("role").and_then(Value::as_str).ok_or(format!("message {} has no `role`", index + 1))?;
        let content = match item.get("content") {
            Some(Value::String(text)) => text.clone(),
            Some(Value::Array(parts)) => parts
                .iter()
                .map(|part| part.get("text").and_then(Value::as_str))
                .collect::<Option<String>>()
                .ok_or(format!("message {} has content other than text", index + 1))?,
            _ => return Err(format!("message {} has no `content`", index + 1)),
        };
        Ok(Message { role: role.into(), content })
    };
    list.iter().enumerate().map(turn).collect()
}

/// Which windows of the stream are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sampling {
    /// One after the other from the start, without overlap.
    InOrder,
    /// At random starts, all different, as in the GPTQ paper's code; windows may overlap. The same seed gives the
    /// same starts on every platform.
    Random { seed: u64 },
}

/// Cuts `nsamples` windows of `seqlen` tokens out of the stream. Every window is full: there is no padding that
/// could enter a statistic.
///
/// [`BosRule::Once`] puts BOS before the stream; [`BosRule::Window`] makes it the first token of each window,
/// followed by `seqlen - 1` tokens of text. BOS that the stream begins with already is not doubled. Random windows
/// come in the order drawn, so that fewer windows of the same seed are the first of more.
pub fn windows(
    tokens: &[u32],
    nsamples: usize,
    seqlen: usize,
    sampling: Sampling,
    bos: BosRule,
) -> Result<Vec<Vec<u32>>, CorpusError> {
    let (stream, lead) = match bos {
        BosRule::None => (tokens.to_vec(), None),
        BosRule::Once(bos) => ([&[bos], without_first(tokens, bos)].concat(), None),
        BosRule::Window(bos) => (without_first(tokens, bos).to_vec(), Some(bos)),
    };
    let text = seqlen.saturating_sub(usize::from(lead.is_some()));
    if nsamples == 0 || text == 0 {
        return Err(CorpusError::NothingAsked { nsamples, seqlen, bos: lead.is_some() });
    }
    let found = stream.len();
    let (needed, fits) = match sampling {
        Sampling::InOrder => (nsamples.saturating_mul(text), found / text),
        Sampling::Random { .. } => (text.saturating_add(nsamples - 1), (found + 1).saturating_sub(text)),
    };
    if found < needed {
        return Err(CorpusError::TooShort { nsamples, seqlen, needed, found, fits });
    }
    let starts: Vec<usize> = match sampling {
        Sampling::InOrder => (0..nsamples).map(|i| i * text).collect(),
        Sampling::Random { seed } => distinct(nsamples, fits, seed),
    };
    Ok(starts.into_iter().map(|at| lead.into_iter().chain(stream[at..at + text].iter().copied()).collect()).collect())
}

fn without_first(tokens: &[u32], bos: u32) -> &[u32] {
    tokens.strip_prefix(&[bos]).unwrap_or(tokens)
}

/// The first `count` numbers of a random order of `0..range`: a Fisher-Yates shuffle that stores only the places
/// it has touched.
fn distinct(count: usize, range: usize, seed: u64) -> Vec<usize> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut moved: HashMap<usize, usize> = HashMap::new();
    (0..count)
        .map(|i| {
            let j = i + below(&mut rng, (range - i) as u64) as usize;
            let at_i = moved.get(&i).copied().unwrap_or(i);
            moved.insert(j, at_i).unwrap_or(j)
        })
        .collect()
}

/// A number below `n`, each as likely: draws from the incomplete last stretch of 64 bits are thrown away.
fn below(rng: &mut ChaCha8Rng, n: u64) -> u64 {
    let whole = u64::MAX - u64::MAX % n;
    loop {
        let draw = rng.next_u64();
        if draw < whole {
            return draw % n;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(n: u32, nsamples: usize, seqlen: usize, sampling: Sampling, bos: BosRule) -> Result<Vec<Vec<u32>>, String> {
        let tokens: Vec<u32> = (10..10 + n).collect();
        windows(&tokens, nsamples, seqlen, sampling, bos).map_err(|e| e.to_string())
    }

    #[test]
    fn windows_in_order() {
        let got = cut(7, 2, 3, Sampling::InOrder, BosRule::None);
        assert_eq!(got, Ok(vec![vec![10, 11, 12], vec![13, 14, 15]]));
        let got = cut(7, 2, 3, Sampling::InOrder, BosRule::Once(1));
        assert_eq!(got, Ok(vec![vec![1, 10, 11], vec![12, 13, 14]]));
        let got = cut(7, 3, 3, Sampling::InOrder, BosRule::Window(1));
        assert_eq!(got, Ok(vec![vec![1, 10, 11], vec![1, 12, 13], vec![1, 14, 15]]));
    }

    #[test]
    fn bos_is_not_doubled() {
        let got = cut(4, 1, 3, Sampling::InOrder, BosRule::Once(10));
        assert_eq!(got, Ok(vec![vec![10, 11, 12]]));
        let got = cut(4, 1, 3, Sampling::InOrder, BosRule::Window(10));
        assert_eq!(got, Ok(vec![vec![10, 11, 12]]));
    }

    #[test]
    fn short_text_is_an_error_with_numbers() {
        let got = cut(7, 3, 3, Sampling::InOrder, BosRule::None).err().unwrap_or_default();
        assert_eq!(
            got,
            "the corpus is too short: 3 windows of 3 tokens need 9, it has 7; \
             give a longer text or `--nsamples 2`"
        );
        let got = cut(7, 1, 8, Sampling::InOrder, BosRule::None).err().unwrap_or_default();
        assert!(got.ends_with("give a longer text or a smaller `--seqlen`"), "{got}");
        assert!(cut(7, 0, 3, Sampling::InOrder, BosRule::None).is_err());
        assert!(cut(7, 1, 1, Sampling::InOrder, BosRule::Window(1)).is_err());
        assert!(cut(7, 5, 3, Sampling::Random { seed: 0 }, BosRule::None).is_ok());
        assert!(cut(7, 6, 3, Sampling::Random { seed: 0 }, BosRule::None).is_err());
    }

    #[test]
    fn random_starts_are_distinct_and_reproducible() {
        let starts = |seed, n| distinct(n, 1000, seed);
        assert_eq!(starts(0, 64), starts(0, 64));
        assert_eq!(starts(0, 64)[..16], starts(0, 16)[..]);
        assert_ne!(starts(0, 64), starts(1, 64));
        let mut all = distinct(1000, 1000, 5);
        all.sort_unstable();
        assert_eq!(all, (0..1000).collect::<Vec<_>>());
        assert_eq!(starts(42, 4), GOLDEN);
    }

    /// Pins the generator: other numbers here mean that calibration sets of old reports cannot be had again.
    const GOLDEN: [usize; 4] = [737, 788, 316, 763];

    #[test]
    fn draws_are_even() {
        let mut counts = [0u32; 10];
        for seed in 0..5000 {
            counts[distinct(1, 10, seed)[0]] += 1;
        }
        let chi2: f64 = counts.iter().map(|&c| (f64::from(c) - 500.0).powi(2) / 500.0).sum();
        // 27.88 is passed once in a thousand with nine degrees of freedom.
        assert!(chi2 < 27.88, "chi-square {chi2}, counts {counts:?}");
    }
}
