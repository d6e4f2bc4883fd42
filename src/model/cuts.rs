//! Where a text may be cut so that its parts, tokenized one by one, give the tokens of the whole.
//!
//! Two kinds of places are used: between a letter and a single space before a letter, and between a letter and the single line
//! end before it. Whether they are safe follows from every step of the tokenizer: no added token may reach over the cut,
//! normalizers must treat each side by itself, and either a pre-tokenizer ends a piece there, or the vocabulary has no token
//! that holds the two characters, so that no merge joins them. A tokenizer with a step that is not known here has no cuts.

use std::collections::BTreeSet;

use rayon::prelude::*;
use serde_json::Value;
use tokenizers::models::ModelWrapper;
use tokenizers::{NormalizedString, Normalizer, NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior};

use super::splits::{AtCut, SPLITS, listed};
use super::tokenizer::{Tokenizer, TokenizerError};

/// Bytes of text tokenized at once: the tokenizer takes more than a hundred bytes of memory for each.
pub const PIECE: usize = 16 << 10;
/// Pieces tokenized side by side.
const SIDE_BY_SIDE: usize = 16;

/// The character that SentencePiece writes for a space.
const MARK: char = '\u{2581}';

/// The safe places of a tokenizer.
#[derive(Clone, Debug, Default)]
pub struct Cuts {
    words: bool,
    lines: bool,
    /// The normalizer puts a space before every text, so that the space at a cut is left out.
    drops_space: bool,
    /// Where merges alone decide: the characters that are tokens by themselves.
    singles: Option<BTreeSet<char>>,
    /// Letters after which a word cut is not safe, those before which it is not, and those before which a line cut is not.
    not_after: BTreeSet<char>,
    not_before: BTreeSet<char>,
    not_on_line: BTreeSet<char>,
}

/// What the steps passed so far do at both kinds of cuts.
struct Passed {
    words: AtCut,
    lines: AtCut,
    /// What a space has become.
    space: char,
    /// Whether text is no longer made of its own characters.
    bytes: bool,
}

impl Cuts {
    /// The safe places of `tokenizer`, or why it has none.
    pub fn of(tokenizer: &tokenizers::Tokenizer) -> Result<Self, String> {
        let mut cuts = Self { words: true, lines: true, ..Self::default() };
        let mut space = ' ';
        if let Some(normalizer) = tokenizer.get_normalizer() {
            cuts.normalizer(normalizer, &mut space)?;
        }
        if cuts.drops_space && space != MARK {
            return Err("its normalizer puts a character before every text".into());
        }
        let mut passed = Passed { words: AtCut::GoesOn, lines: AtCut::GoesOn, space, bytes: false };
        if let Some(pre_tokenizer) = tokenizer.get_pre_tokenizer() {
            cuts.pre_tokenizer(pre_tokenizer, &mut passed)?;
        }
        cuts.words &= passed.words != AtCut::Crosses;
        cuts.lines &= passed.lines != AtCut::Crosses;
        cuts.model(tokenizer.get_model(), &passed);
        cuts.added_tokens(tokenizer)?;
        if cuts.words || cuts.lines {
            Ok(cuts)
        } else {
            Err("its pieces of text go on over spaces and line ends".into())
        }
    }

    /// The first safe cut at or after byte `from`: where the part before it ends, and where the part after it begins.
    pub fn next(&self, text: &str, from: usize) -> Option<(usize, usize)> {
        let bytes = text.as_bytes();
        (from..bytes.len()).filter(|at| matches!(bytes[*at], b' ' | b'\n')).find_map(|at| {
            let before = text[..at].chars().next_back()?;
            let after = text[at + 1..].chars().next()?;
            let safe = if bytes[at] == b' ' { self.safe_word(before, after) } else { self.safe_line(before, after) };
            safe.then(|| match (bytes[at], self.drops_space) {
                (b' ', false) => (at, at),
                _ if bytes[at] == b'\n' => (at + 1, at + 1),
                _ => (at, at + 1),
            })
        })
    }

    fn is_single(&self, c: char) -> bool {
        self.singles.as_ref().is_none_or(|singles| singles.contains(&c))
    }

    fn safe_word(&self, before: char, after: char) -> bool {
        self.words
            && is_cased(before)
            && is_cased(after)
            && self.is_single(before)
            && !self.not_after.contains(&before)
            && !self.not_before.contains(&after)
    }

    fn safe_line(&self, before: char, after: char) -> bool {
        let letter = is_plain(after) || (self.singles.is_none() && is_composed(after));
        self.lines
            && !before.is_whitespace()
            && letter
            && self.is_single(after)
            && self.is_single('\n')
            && !self.not_on_line.contains(&after)
    }

    fn normalizer(&mut self, normalizer: &NormalizerWrapper, space: &mut char) -> Result<(), String> {
        match normalizer {
            // Both kinds of cuts lie before a character that begins a sequence of its own in every normal form.
            NormalizerWrapper::NFC(_)
            | NormalizerWrapper::NFD(_)
            | NormalizerWrapper::NFKC(_)
            | NormalizerWrapper::NFKD(_)
            | NormalizerWrapper::Lowercase(_) => Ok(()),
            NormalizerWrapper::Sequence(list) => list.as_ref().iter().try_for_each(|one| self.normalizer(one, space)),
            NormalizerWrapper::Prepend(prepend) if prepend.prepend.chars().eq([MARK]) => {
                (self.drops_space, self.lines) = (true, false);
                Ok(())
            }
            NormalizerWrapper::Replace(replace) => {
                let value = serde_json::to_value(replace).unwrap_or_default();
                let pattern = value.pointer("/pattern/String").and_then(Value::as_str);
                match pattern {
                    Some(" ") if replace.content.chars().eq([MARK]) => {
                        *space = MARK;
                        Ok(())
                    }
                    // It leaves letters, spaces and line ends as they are, and puts none where there was none.
                    Some(pattern)
                        if !pattern.chars().any(|c| c.is_alphanumeric() || c.is_whitespace() || c == MARK)
                            && !replace.content.is_empty()
                            && !replace.content.chars().any(|c| c.is_whitespace() || c == MARK) =>
                    {
                        Ok(())
                    }
                    _ => Err("its normalizer replaces text by a rule that is not known".into()),
                }
            }
            _ => Err("its normalizer is not known to treat parts of a text alike".into()),
        }
    }

    fn pre_tokenizer(&mut self, step: &PreTokenizerWrapper, passed: &mut Passed) -> Result<(), String> {
        let unknown = || Err("its pre-tokenizer splits text by a rule that is not known".to_string());
        let ends = passed.words == AtCut::Ends && passed.lines == AtCut::Ends;
        if passed.bytes && !ends {
            return unknown();
        }
        let (words, lines) = match step {
            PreTokenizerWrapper::Sequence(list) => {
                return list.as_ref().iter().try_for_each(|step| self.pre_tokenizer(step, passed));
            }
            PreTokenizerWrapper::ByteLevel(step) => {
                if step.use_regex && passed.space != ' ' {
                    return unknown();
                }
                // A space is put before a text that does not begin with one.
                self.lines &= !step.add_prefix_space || passed.lines == AtCut::Ends;
                passed.bytes = true;
                if step.use_regex { (AtCut::Ends, AtCut::Ends) } else { (AtCut::GoesOn, AtCut::GoesOn) }
            }
            PreTokenizerWrapper::Split(step) => {
                let pattern = serde_json::to_value(&step.pattern).unwrap_or_default();
                let regex = pattern.get("Regex").and_then(Value::as_str);
                let text = pattern.get("String").and_then(Value::as_str);
                let isolates = match step.behavior {
                    SplitDelimiterBehavior::Isolated => !step.invert,
                    SplitDelimiterBehavior::Removed => step.invert,
                    _ => false,
                };
                let known = regex.filter(|_| isolates && passed.space == ' ').map(listed);
                let row = known.and_then(|known| SPLITS.iter().find(|(pattern, ..)| *pattern == known));
                match (row, text.map(|text| text.chars().collect::<Vec<_>>()).as_deref()) {
                    (Some((_, words, lines)), _) => (*words, *lines),
                    // A character that neither side of a cut is.
                    (None, Some([c])) if *c != passed.space && *c != '\n' && !c.is_alphanumeric() => {
                        (AtCut::GoesOn, AtCut::GoesOn)
                    }
                    _ => return unknown(),
                }
            }
            PreTokenizerWrapper::Digits(_) | PreTokenizerWrapper::Punctuation(_) => (AtCut::GoesOn, AtCut::GoesOn),
            PreTokenizerWrapper::Whitespace(_)
            | PreTokenizerWrapper::WhitespaceSplit(_)
            | PreTokenizerWrapper::BertPreTokenizer(_) => {
                if passed.space != ' ' {
                    return unknown();
                }
                (AtCut::Ends, AtCut::Ends)
            }
            PreTokenizerWrapper::Metaspace(step) => {
                use tokenizers::pre_tokenizers::metaspace::PrependScheme;
                passed.space = step.get_replacement();
                self.lines &= step.get_prepend_scheme() == PrependScheme::Never;
                (if step.get_split() { AtCut::Ends } else { AtCut::GoesOn }, AtCut::GoesOn)
            }
            _ => return unknown(),
        };
        // What comes after the end of a piece does not join pieces again.
        let and = |before: AtCut, now: AtCut| if before == AtCut::GoesOn { now } else { before };
        (passed.words, passed.lines) = (and(passed.words, words), and(passed.lines, lines));
        Ok(())
    }

    /// Where no piece ends at a cut, merges must not go over it.
    fn model(&mut self, model: &ModelWrapper, passed: &Passed) {
        let (words_end, lines_end) = (passed.words == AtCut::Ends, passed.lines == AtCut::Ends);
        if words_end && (lines_end || !self.lines) {
            return;
        }
        let merges = match model {
            ModelWrapper::BPE(bpe) if !passed.bytes && !bpe.ignore_merges => {
                let plain = bpe.continuing_subword_prefix.is_none() && bpe.end_of_word_suffix.is_none();
                plain.then(|| bpe.get_vocab())
            }
            _ => None,
        };
        let Some(vocab) = merges else {
            (self.words, self.lines) = (self.words && words_end, self.lines && lines_end);
            return;
        };
        // A character without a token would be joined with its neighbour, or come as bytes.
        let mut singles = BTreeSet::new();
        for token in vocab.keys() {
            let mut chars = token.chars();
            let Some(mut before) = chars.next() else { continue };
            if chars.as_str().is_empty() {
                singles.insert(before);
            }
            for c in chars {
                if c == passed.space {
                    self.not_after.insert(before);
                }
                if before == '\n' {
                    self.not_on_line.insert(c);
                }
                before = c;
            }
        }
        self.words &= words_end || singles.contains(&passed.space);
        self.singles = Some(singles);
    }

    /// Bars the places that an added token may reach over, or take space from.
    fn added_tokens(&mut self, tokenizer: &tokenizers::Tokenizer) -> Result<(), String> {
        let is_space = |c: char| c == MARK || c.is_whitespace();
        let both = |c: char| c.to_lowercase().chain(c.to_uppercase()).chain([c]).collect::<Vec<_>>();
        for token in tokenizer.get_added_tokens_decoder().into_values() {
            let mut normalized = NormalizedString::from(token.content.as_str());
            if let Some(normalizer) = tokenizer.get_normalizer() {
                normalizer.normalize(&mut normalized).map_err(|e| e.to_string())?;
            }
            // A token is looked for in the text as it is, or in the normalized one.
            let forms = if token.normalized { vec![normalized.get()] } else { vec![token.content.as_str()] };
            for text in forms {
                let chars: Vec<char> = text.chars().collect();
                let (Some(&first), Some(&last)) = (chars.first(), chars.last()) else { continue };
                if token.single_word && (is_space(first) || is_space(last)) {
                    return Err(format!("its added token `{}` begins or ends with space", token.content));
                }
                for pair in chars.windows(2) {
                    if is_space(pair[1]) {
                        self.not_after.extend(both(pair[0]));
                    }
                    if pair[0] == '\n' {
                        self.not_on_line.extend(both(pair[1]));
                    }
                }
                if token.rstrip || self.drops_space {
                    self.not_after.extend(both(last));
                }
                if token.lstrip {
                    self.not_on_line.extend(both(first));
                }
                if self.drops_space {
                    let letter = chars.iter().find(|c| !is_space(**c));
                    match letter {
                        Some(letter) => self.not_before.extend(both(*letter)),
                        None if chars.len() == 1 => return Err("a space is an added token of its own".into()),
                        None => {}
                    }
                }
            }
        }
        Ok(())
    }
}

/// Letters that are written with spaces between words, and that no normal form changes.
fn is_cased(c: char) -> bool {
    c.is_ascii_alphabetic()
        || matches!(c, '\u{391}'..='\u{3a1}' | '\u{3a3}'..='\u{3a9}' | '\u{3b1}'..='\u{3c9}')
        || (matches!(c, '\u{410}'..='\u{44f}') && !matches!(c, '\u{419}' | '\u{439}'))
}

/// Letters that no normal form changes: these, Hebrew, Arabic, Devanagari, Thai, and Chinese characters.
fn is_plain(c: char) -> bool {
    is_cased(c)
        || matches!(c, '\u{5d0}'..='\u{5ea}' | '\u{627}'..='\u{63a}' | '\u{641}'..='\u{64a}')
        || matches!(c, '\u{905}'..='\u{928}' | '\u{92a}'..='\u{930}' | '\u{e01}'..='\u{e2e}' | '\u{4e00}'..='\u{9fa5}')
}

/// Letters that some normal forms take apart: kana and Hangul.
fn is_composed(c: char) -> bool {
    matches!(c, '\u{3041}'..='\u{3096}' | '\u{30a1}'..='\u{30fa}' | '\u{ac00}'..='\u{d7a3}')
}

/// Token ids of a text that comes in parts: the ids are those of [`Tokenizer::encode`] for the whole, without special tokens
/// around it. Where the tokenizer has safe cuts, text is held only until the next one.
pub struct TextEncoder<'a> {
    tokenizer: &'a Tokenizer,
    piece: usize,
    rest: String,
    /// Bytes at the start of `rest` without a cut.
    searched: usize,
}

impl<'a> TextEncoder<'a> {
    /// An encoder that tokenizes about `piece` bytes at once, such as [`PIECE`].
    pub fn new(tokenizer: &'a Tokenizer, piece: usize) -> Self {
        Self { tokenizer, piece, rest: String::new(), searched: 0 }
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
            // A cut shows itself by the character after it.
            self.searched = self.rest.len().saturating_sub(1).saturating_sub(start);
        }
        if ended && start < self.rest.len() {
            parts.push(&self.rest[start..]);
            start = self.rest.len();
        }
        // Taken in order, so that the first fault is the one that is reported.
        let encoded: Vec<_> = parts.par_iter().map(|part| self.tokenizer.encode(part)).collect();
        for part in encoded {
            ids.extend(part?);
        }
        self.rest.drain(..start);
        Ok(())
    }
}
