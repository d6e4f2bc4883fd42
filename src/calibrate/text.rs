//! Text files as they are read: in pieces, decoded and checked on the way.

use std::borrow::Cow;
use std::fs::{File, Metadata};
use std::io::{Cursor, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use sha2::{Digest, Sha256};

use super::corpus::{CorpusError, LoadChat, RenderChat, document};
use crate::model::chat::ChatError;
use crate::num::hex::hex;

/// Bytes read at once, and the most that a piece of a document from a .jsonl file has.
const CHUNK: usize = 256 << 10;

/// Hash and sizes of a whole text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextFacts {
    /// SHA-256 of its UTF-8 bytes.
    pub sha256: String,
    /// UTF-8 bytes.
    pub bytes: usize,
    /// Words separated by whitespace.
    pub words: usize,
}

impl TextFacts {
    pub fn of(text: &str) -> Self {
        let mut counted = Counted::default();
        counted.add(text);
        counted.finish()
    }
}

/// [`TextFacts`] of a text that comes in parts.
#[derive(Default)]
pub(super) struct Counted {
    hash: Sha256,
    bytes: usize,
    words: usize,
    in_word: bool,
}

impl Counted {
    pub fn add(&mut self, text: &str) {
        self.hash.update(text);
        self.bytes += text.len();
        for c in text.chars() {
            let word = !c.is_whitespace();
            self.words += usize::from(word && !self.in_word);
            self.in_word = word;
        }
    }

    pub fn finish(self) -> TextFacts {
        TextFacts { sha256: hex(&self.hash.finalize()), bytes: self.bytes, words: self.words }
    }
}

/// The renderer of a file's chats, if the model has a template; set when the first chat is met.
type Chats = Arc<OnceLock<Option<RenderChat>>>;

/// What shows that a file was changed.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Stamp {
    bytes: u64,
    modified: Option<SystemTime>,
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        Self { bytes: metadata.len(), modified: metadata.modified().ok() }
    }
}

/// Where documents come from.
#[derive(Clone)]
pub(super) enum TextSource {
    Shipped(&'static str),
    File {
        path: PathBuf,
        /// The content of a file that cannot be read twice, such as a pipe.
        held: Option<Arc<[u8]>>,
        stamp: Stamp,
        /// SHA-256 of the file, once it was read to its end.
        sha256: Option<String>,
        /// For a .jsonl file: the renderer of its chats.
        lines: Option<Chats>,
    },
}

impl TextSource {
    /// A file; `lines` for .jsonl.
    pub fn file(path: &Path, lines: bool) -> Result<Self, CorpusError> {
        let failed = |e: std::io::Error| CorpusError::Io { path: path.into(), why: e.to_string() };
        let metadata = std::fs::metadata(path).map_err(failed)?;
        let held = if metadata.is_file() { None } else { Some(std::fs::read(path).map_err(failed)?.into()) };
        let lines = lines.then(Chats::default);
        Ok(Self::File { path: path.into(), held, stamp: Stamp::of(&metadata), sha256: None, lines })
    }

    /// From now on a file whose hash is another one is refused.
    pub fn expect(&mut self, hash: &str) {
        if let Self::File { sha256, .. } = self {
            *sha256 = Some(hash.into());
        }
    }

    /// Reads from the start. `load` is asked for the renderer when a chat is met for the first time.
    ///
    /// # Errors
    /// When the file cannot be opened, or is not as it was.
    pub fn open<'a>(&self, load: Option<LoadChat<'a>>) -> Result<TextReader<'a>, CorpusError> {
        let (path, reader, expected, lines): (PathBuf, Box<dyn Read>, _, _) = match self {
            Self::Shipped(text) => (PathBuf::new(), Box::new(Cursor::new(*text)), None, None),
            Self::File { path, held: Some(bytes), lines, .. } => {
                (path.clone(), Box::new(Cursor::new(bytes.clone())), None, lines.clone())
            }
            Self::File { path, held: None, stamp, sha256, lines } => {
                let failed = |e: std::io::Error| CorpusError::Io { path: path.clone(), why: e.to_string() };
                let file = File::open(path).map_err(failed)?;
                if Stamp::of(&file.metadata().map_err(failed)?) != *stamp {
                    return Err(CorpusError::Changed { path: path.clone() });
                }
                (path.clone(), Box::new(file), sha256.clone(), lines.clone())
            }
        };
        Ok(TextReader {
            path,
            reader,
            hash: Sha256::new(),
            expected,
            pending: Vec::new(),
            offset: 0,
            return_pending: false,
            ended: false,
            lines,
            load,
            line: String::new(),
            taken: 0,
            searched: 0,
            number: 0,
            document: String::new(),
            given: 0,
            begun: false,
        })
    }
}

/// A part of a document.
pub(super) struct TextPiece {
    pub text: Cow<'static, str>,
    /// Whether the document ends with it.
    pub ends: bool,
}

/// Reads documents, piece by piece.
pub(super) struct TextReader<'a> {
    path: PathBuf,
    reader: Box<dyn Read>,
    hash: Sha256,
    /// The hash of the whole file, where it is known.
    expected: Option<String>,
    /// The first bytes of an incomplete character.
    pending: Vec<u8>,
    /// Bytes before them.
    offset: usize,
    /// Whether a carriage return came last, which may be half of a line end.
    return_pending: bool,
    ended: bool,
    lines: Option<Chats>,
    load: Option<LoadChat<'a>>,
    /// Buffered lines; bytes of them already returned; bytes already searched for a line end.
    line: String,
    taken: usize,
    searched: usize,
    /// Lines already returned.
    number: usize,
    /// The document of the last of them; bytes of it already returned.
    document: String,
    given: usize,
    /// Whether a piece of a plain text was returned.
    begun: bool,
}

impl TextReader<'_> {
    /// The next piece of a document that is not empty.
    pub fn next_piece(&mut self) -> Result<Option<TextPiece>, CorpusError> {
        if self.lines.is_none() {
            return self.next_of_text();
        }
        if self.given == self.document.len() {
            let Some(document) = self.next_document()? else { return Ok(None) };
            if document.len() <= CHUNK {
                return Ok(Some(TextPiece { text: document.into(), ends: true }));
            }
            (self.document, self.given) = (document, 0);
        }
        let rest = &self.document[self.given..];
        let mut end = rest.len().min(CHUNK);
        while !rest.is_char_boundary(end) {
            end -= 1;
        }
        let (text, ends) = (rest[..end].to_string(), end == rest.len());
        self.given += end;
        if ends {
            (self.document, self.given) = (String::new(), 0);
        }
        Ok(Some(TextPiece { text: text.into(), ends }))
    }

    /// SHA-256 of the bytes read so far.
    pub fn sha256(self) -> String {
        hex(&self.hash.finalize())
    }

    fn next_of_text(&mut self) -> Result<Option<TextPiece>, CorpusError> {
        while let Some(text) = self.decoded()? {
            if !text.is_empty() {
                self.begun = true;
                return Ok(Some(TextPiece { text: text.into(), ends: false }));
            }
        }
        let ends = std::mem::take(&mut self.begun);
        Ok(ends.then_some(TextPiece { text: Cow::Borrowed(""), ends }))
    }

    /// The next document of a .jsonl file that is not empty.
    fn next_document(&mut self) -> Result<Option<String>, CorpusError> {
        loop {
            let line = match self.line[self.searched..].find('\n') {
                Some(found) => {
                    let end = self.searched + found;
                    let line = self.line[self.taken..end].to_string();
                    (self.taken, self.searched) = (end + 1, end + 1);
                    line
                }
                None => {
                    self.line.drain(..std::mem::take(&mut self.taken));
                    self.searched = self.line.len();
                    match self.decoded()? {
                        Some(text) => {
                            self.line.push_str(&text);
                            continue;
                        }
                        None if self.line.is_empty() => return Ok(None),
                        None => {
                            self.searched = 0;
                            std::mem::take(&mut self.line)
                        }
                    }
                }
            };
            self.number += 1;
            if line.trim().is_empty() {
                continue;
            }
            let (lines, load) = (&self.lines, &mut self.load);
            let text = document(&self.path, self.number, &line, &mut || renderer(lines.as_ref(), load))?;
            if !text.is_empty() {
                return Ok(Some(text));
            }
        }
    }

    /// More of the file as text: UTF-8 without a byte order mark, line ends LF.
    fn decoded(&mut self) -> Result<Option<String>, CorpusError> {
        if self.ended {
            return Ok(None);
        }
        let held = self.pending.len();
        let read = self.reader.by_ref().take(CHUNK as u64).read_to_end(&mut self.pending);
        let read = read.map_err(|e| CorpusError::Io { path: self.path.clone(), why: e.to_string() })?;
        self.hash.update(&self.pending[held..]);
        let bad = |offset| CorpusError::NotText { path: self.path.clone(), offset };
        let valid = match std::str::from_utf8(&self.pending) {
            Ok(text) => text.len(),
            Err(e) if e.error_len().is_none() && read > 0 => e.valid_up_to(),
            Err(e) => return Err(bad(self.offset + e.valid_up_to())),
        };
        let rest = self.pending.split_off(valid);
        let bytes = std::mem::replace(&mut self.pending, rest);
        let first = self.offset == 0;
        self.offset += bytes.len();
        self.ended = read == 0;
        if self.ended && self.expected.as_ref().is_some_and(|hash| *hash != hex(&self.hash.clone().finalize())) {
            return Err(CorpusError::Changed { path: self.path.clone() });
        }
        let mut text = String::from_utf8(bytes).map_err(|_| bad(self.offset))?;
        // A byte order mark is an editor's trace, not text.
        if first && text.starts_with('\u{feff}') {
            text.drain(..'\u{feff}'.len_utf8());
        }
        if std::mem::take(&mut self.return_pending) {
            text.insert(0, '\r');
        }
        if !self.ended && text.ends_with('\r') {
            text.pop();
            self.return_pending = true;
        }
        if text.contains('\r') {
            text = text.replace("\r\n", "\n").replace('\r', "\n");
        }
        Ok(Some(text))
    }
}

/// The renderer of chats, loaded if none was needed so far.
fn renderer(chats: Option<&Chats>, load: &mut Option<LoadChat<'_>>) -> Result<Option<RenderChat>, ChatError> {
    let Some(chats) = chats else { return Ok(None) };
    if let Some(found) = chats.get() {
        return Ok(found.clone());
    }
    let Some(load) = load else { return Ok(None) };
    let found = load()?;
    Ok(chats.get_or_init(|| found).clone())
}
