//! Token ids of a text that comes in parts.

use rayon::prelude::*;

use super::tokenizer::{Tokenizer, TokenizerError};

/// Bytes of text tokenized at once: the tokenizer takes more than a hundred bytes of memory for each.
pub const PIECE: usize = 16 << 10;
/// Bytes of a part beyond which the memory for it is worth a warning.
pub const LONGEST_PART: usize = 1 << 20;
/// Pieces tokenized side by side.
const SIDE_BY_SIDE: usize = 16;

/// Told of the bytes of a part that is longer than [`LONGEST_PART`], before it is tokenized in one piece.
pub type OnLongPart<'a> = &'a dyn Fn(usize);

/// Token ids of a text that comes in parts: the ids are those of [`Tokenizer::encode`] for the whole, without special tokens
/// around it. Where the tokenizer has safe cuts, text is held only until the next one.
pub struct TextEncoder<'a> {
    tokenizer: &'a Tokenizer,
    piece: usize,
    on_long_part: Option<OnLongPart<'a>>,
    rest: String,
    /// Bytes at the start of `rest` without a cut.
    searched: usize,
}

impl<'a> TextEncoder<'a> {
    /// An encoder that tokenizes about `piece` bytes at once, such as [`PIECE`].
    pub fn new(tokenizer: &'a Tokenizer, piece: usize) -> Self {
        Self { tokenizer, piece, on_long_part: None, rest: String::new(), searched: 0 }
    }

    /// The same that calls `on_long_part` before it tokenizes a part that takes much memory.
    pub fn warning(tokenizer: &'a Tokenizer, piece: usize, on_long_part: OnLongPart<'a>) -> Self {
        Self { on_long_part: Some(on_long_part), ..Self::new(tokenizer, piece) }
    }

    /// Takes more text; the ids that are certain are added to `ids`.
    ///
    /// # Errors
    /// When the tokenizer cannot encode the text.
    pub fn push(&mut self, text: &str, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        self.rest.push_str(text);
        if self.rest.len() >= self.piece.saturating_mul(SIDE_BY_SIDE) { self.encode(false, ids) } else { Ok(()) }
    }

    /// The text has ended: adds the remaining ids.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub fn finish(mut self, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        self.encode(true, ids)
    }

    fn encode(&mut self, ended: bool, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        let (mut parts, mut start) = (Vec::new(), 0);
        if let Ok(cuts) = self.tokenizer.cuts() {
            while let Some((end, next)) = cuts.next(&self.rest, self.searched.max(start + self.piece)) {
                parts.push(&self.rest[start..end]);
                start = next;
            }
            // The character after a cut is needed to recognize it.
            self.searched = self.rest.len().saturating_sub(1).saturating_sub(start);
        }
        if ended && start < self.rest.len() {
            parts.push(&self.rest[start..]);
            start = self.rest.len();
        }
        if let Some(on_long_part) = self.on_long_part {
            parts.iter().filter(|part| part.len() > LONGEST_PART).for_each(|part| on_long_part(part.len()));
        }
        // Taken in order, so that the first fault is the one that is reported.
        let tokenizer = self.tokenizer;
        let encoded: Vec<_> = parts.par_iter().map(|part| tokenizer.encode(part)).collect();
        for part in encoded {
            ids.extend(part?);
        }
        self.rest.drain(..start);
        Ok(())
    }
}
