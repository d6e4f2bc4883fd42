//! Text files as they are read: in pieces, decoded and checked on the way.

use std::borrow::Cow;
use std::fs::File;
use std::io::{Cursor, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::corpus::{CorpusError, RenderChat, document};

/// Bytes read at once.
const CHUNK: u64 = 256 << 10;

/// What is known of a text as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextFacts {
    /// SHA-256 of its UTF-8 bytes.
    pub sha256: String,
    /// UTF-8 bytes.
    pub bytes: usize,
    /// What whitespace separates.
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
        TextFacts { sha256: hex(self.hash), bytes: self.bytes, words: self.words }
    }
}

fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

/// Where documents come from.
#[derive(Clone)]
pub(super) enum TextSource {
    Shipped(&'static str),
    File {
        path: PathBuf,
        /// What cannot be read twice, such as a pipe.
        held: Option<Arc<[u8]>>,
        /// For a .jsonl file: what renders its chats, if anything does.
        lines: Option<Option<RenderChat>>,
    },
}

impl TextSource {
    pub fn file(path: &Path, lines: Option<Option<RenderChat>>) -> Result<Self, CorpusError> {
        let failed = |e: std::io::Error| CorpusError::Io { path: path.into(), why: e.to_string() };
        let regular = std::fs::metadata(path).map_err(failed)?.is_file();
        let held = if regular { None } else { Some(std::fs::read(path).map_err(failed)?.into()) };
        Ok(Self::File { path: path.into(), held, lines })
    }

    pub fn open(&self) -> Result<TextReader, CorpusError> {
        let (path, reader, lines): (PathBuf, Box<dyn Read>, _) = match self {
            Self::Shipped(text) => (PathBuf::new(), Box::new(Cursor::new(*text)), None),
            Self::File { path, held: Some(bytes), lines } => {
                (path.clone(), Box::new(Cursor::new(bytes.clone())), lines.clone())
            }
            Self::File { path, held: None, lines } => {
                let failed = |e: std::io::Error| CorpusError::Io { path: path.clone(), why: e.to_string() };
                (path.clone(), Box::new(File::open(path).map_err(failed)?), lines.clone())
            }
        };
        Ok(TextReader {
            path,
            reader,
            hash: Sha256::new(),
            pending: Vec::new(),
            offset: 0,
            return_pending: false,
            ended: false,
            lines,
            line: String::new(),
            taken: 0,
            searched: 0,
            number: 0,
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
pub(super) struct TextReader {
    path: PathBuf,
    reader: Box<dyn Read>,
    hash: Sha256,
    /// Bytes of a character that has not come as a whole.
    pending: Vec<u8>,
    /// Bytes before them.
    offset: usize,
    /// Whether a carriage return came last, which may be half of a line end.
    return_pending: bool,
    ended: bool,
    lines: Option<Option<RenderChat>>,
    /// Lines that have come, the bytes of them that were given out, and those that were searched for a line end.
    line: String,
    taken: usize,
    searched: usize,
    /// Lines given out.
    number: usize,
    /// Whether a plain text has had a piece.
    begun: bool,
}

impl TextReader {
    /// The next piece of a document that is not empty.
    pub fn next_piece(&mut self) -> Result<Option<TextPiece>, CorpusError> {
        match self.lines.clone() {
            None => self.next_of_text(),
            Some(chat) => self.next_line(chat.as_ref()),
        }
    }

    /// SHA-256 of the bytes read so far.
    pub fn sha256(self) -> String {
        hex(self.hash)
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

    fn next_line(&mut self, chat: Option<&RenderChat>) -> Result<Option<TextPiece>, CorpusError> {
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
            let text = document(&self.path, self.number, &line, chat)?;
            if !text.is_empty() {
                return Ok(Some(TextPiece { text: text.into(), ends: true }));
            }
        }
    }

    /// More of the file as text: UTF-8 without a byte order mark, line ends LF.
    fn decoded(&mut self) -> Result<Option<String>, CorpusError> {
        if self.ended {
            return Ok(None);
        }
        let held = self.pending.len();
        let read = self.reader.by_ref().take(CHUNK).read_to_end(&mut self.pending);
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
