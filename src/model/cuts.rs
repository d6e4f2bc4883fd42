//! Where a text may be cut so that its parts, tokenized one by one, give the tokens of the whole.
//!
//! Two kinds of places are used: between a letter or digit and a single space before a letter or digit, and between a single
//! line end and the letter, digit or punctuation after it. Whether they are safe follows from every step of the tokenizer: no added token may reach over the cut,
//! normalizers must treat each side by itself, and either a pre-tokenizer ends a piece there, or the vocabulary has no token
//! that holds the two characters, so that no merge joins them. A tokenizer with a step that is not known here has no cuts.

use std::collections::BTreeSet;

use serde_json::Value;
use tokenizers::models::ModelWrapper;
use tokenizers::{NormalizedString, Normalizer, NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior};

use super::splits::AtCut::{self, Crosses, Ends, GoesOn};
use super::splits::{DIGIT, HANGUL, KINDS, LETTER, LINE, SIGN, SPLITS, listed};

/// The character that SentencePiece writes for a space.
const MARK: char = '\u{2581}';

/// The safe places of a tokenizer.
#[derive(Clone, Debug, Default)]
pub struct Cuts {
    /// Which kinds are safe.
    kinds: [bool; KINDS],
    /// The normalizer puts a space before every text, so that the space at a cut is left out.
    drops_space: bool,
    /// Where merges alone decide: the characters that are tokens by themselves.
    singles: Option<BTreeSet<char>>,
    /// Characters after which a word cut is not safe, those before which it is not, and those before which a line cut is not.
    not_after: BTreeSet<char>,
    not_before: BTreeSet<char>,
    not_on_line: BTreeSet<char>,
    /// What the normalizer does to characters.
    changes: Changes,
}

/// What a normalizer does to characters.
#[derive(Clone, Copy, Debug, Default)]
struct Changes {
    /// It joins characters with the marks after them.
    composes: bool,
    /// It takes characters apart.
    decomposes: bool,
    lowercases: bool,
}

/// Effect of the steps so far on all kinds of cuts.
struct Passed {
    at: [AtCut; KINDS],
    /// The character that now represents a space.
    space: char,
    /// Whether characters were replaced by their bytes.
    bytes: bool,
}

impl Passed {
    fn ends(&self) -> bool {
        self.at == [Ends; KINDS]
    }
}

impl Cuts {
    /// The safe places of `tokenizer`, or why it has none.
    pub fn of(tokenizer: &tokenizers::Tokenizer) -> Result<Self, String> {
        let mut cuts = Self { kinds: [true; KINDS], ..Self::default() };
        let mut space = ' ';
        if let Some(normalizer) = tokenizer.get_normalizer() {
            cuts.normalizer(normalizer, &mut space)?;
        }
        if cuts.drops_space && space != MARK {
            return Err("its normalizer puts a character before every text".into());
        }
        let mut passed = Passed { at: [GoesOn; KINDS], space, bytes: false };
        if let Some(pre_tokenizer) = tokenizer.get_pre_tokenizer() {
            cuts.pre_tokenizer(pre_tokenizer, &mut passed)?;
        }
        for (safe, at) in cuts.kinds.iter_mut().zip(passed.at) {
            *safe &= at != Crosses;
        }
        // Marks and parts of Hangul would have to be looked for in added tokens as well.
        cuts.kinds[HANGUL] &= !cuts.changes.decomposes;
        cuts.model(tokenizer.get_model(), &passed);
        cuts.added_tokens(tokenizer)?;
        if cuts.kinds.contains(&true) {
            Ok(cuts)
        } else {
            Err("its pre-tokenizer does not split at spaces or line ends".into())
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
        // What ends a piece is the character before the space; with letters it may also be that after it.
        kind_in_words(before).is_some_and(|kind| self.kinds[kind])
            && kind_in_words(after).is_some_and(|kind| self.kinds[kind])
            && self.is_single(before)
            && !self.not_after.contains(&before)
            && !self.not_before.contains(&after)
    }

    fn safe_line(&self, before: char, after: char) -> bool {
        kind_on_line(after).is_some_and(|kind| self.kinds[kind])
            && !before.is_whitespace()
            && self.is_single(after)
            && self.is_single('\n')
            && !self.not_on_line.contains(&after)
    }

    fn no_lines(&mut self) {
        (self.kinds[LINE], self.kinds[SIGN]) = (false, false);
    }

    /// No line cut before `c`, nor before a character that becomes `c` with the marks after it.
    fn not_on_line(&mut self, c: char) {
        if self.changes.composes && !c.is_ascii() {
            self.no_lines();
        }
        self.not_on_line.extend(both_cases(c));
    }

    fn normalizer(&mut self, normalizer: &NormalizerWrapper, space: &mut char) -> Result<(), String> {
        match normalizer {
            // No normal form joins a space or a line end with what stands before it, or a line end with what comes after.
            NormalizerWrapper::NFC(_) | NormalizerWrapper::NFKC(_) => {
                self.changes.composes = true;
                Ok(())
            }
            NormalizerWrapper::NFD(_) | NormalizerWrapper::NFKD(_) => {
                self.changes.decomposes = true;
                Ok(())
            }
            NormalizerWrapper::Lowercase(_) => {
                self.changes.lowercases = true;
                Ok(())
            }
            NormalizerWrapper::Sequence(list) => list.as_ref().iter().try_for_each(|one| self.normalizer(one, space)),
            NormalizerWrapper::Prepend(prepend) if prepend.prepend.chars().eq([MARK]) => {
                self.drops_space = true;
                self.no_lines();
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
                    // It leaves letters, digits, spaces and line ends as they are, and puts no space where there was none.
                    Some(pattern)
                        if !pattern.chars().any(|c| c.is_alphanumeric() || c.is_whitespace() || c == MARK)
                            && !replace.content.is_empty()
                            && !replace.content.chars().any(|c| c.is_whitespace() || c == MARK) =>
                    {
                        pattern.chars().next().into_iter().for_each(|c| self.not_on_line(c));
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
        if passed.bytes && !passed.ends() {
            return unknown();
        }
        let at = match step {
            PreTokenizerWrapper::Sequence(list) => {
                return list.as_ref().iter().try_for_each(|step| self.pre_tokenizer(step, passed));
            }
            PreTokenizerWrapper::ByteLevel(step) => {
                if step.use_regex && passed.space != ' ' {
                    return unknown();
                }
                // A space is put before a text that does not begin with one.
                for kind in [LINE, SIGN] {
                    self.kinds[kind] &= !step.add_prefix_space || passed.at[kind] == Ends;
                }
                passed.bytes = true;
                [if step.use_regex { Ends } else { GoesOn }; KINDS]
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
                    (Some((_, at)), _) => *at,
                    // A character that is on neither side of a cut, or first on a line.
                    (None, Some([c])) if *c != passed.space && *c != '\n' && !c.is_alphanumeric() => {
                        if kind_on_line(*c) == Some(SIGN) { at_sign(step.behavior) } else { [GoesOn; KINDS] }
                    }
                    _ => return unknown(),
                }
            }
            PreTokenizerWrapper::Digits(_) => [GoesOn, Ends, GoesOn, GoesOn, GoesOn],
            PreTokenizerWrapper::Punctuation(step) => at_sign(step.behavior),
            PreTokenizerWrapper::Whitespace(_)
            | PreTokenizerWrapper::WhitespaceSplit(_)
            | PreTokenizerWrapper::BertPreTokenizer(_) => {
                if passed.space != ' ' {
                    return unknown();
                }
                [Ends; KINDS]
            }
            PreTokenizerWrapper::Metaspace(step) => {
                use tokenizers::pre_tokenizers::metaspace::PrependScheme;
                passed.space = step.get_replacement();
                if step.get_prepend_scheme() != PrependScheme::Never {
                    self.no_lines();
                }
                let words = if step.get_split() { Ends } else { GoesOn };
                [words, words, words, GoesOn, GoesOn]
            }
            _ => return unknown(),
        };
        // What comes after the end of a piece does not join pieces again.
        for (before, now) in passed.at.iter_mut().zip(at) {
            if *before == GoesOn {
                *before = now;
            }
        }
        Ok(())
    }

    /// Where no piece ends at a cut, merges must not go over it.
    fn model(&mut self, model: &ModelWrapper, passed: &Passed) {
        let ends = passed.at.map(|at| at == Ends);
        if (0..KINDS).all(|kind| ends[kind] || !self.kinds[kind]) {
            return;
        }
        let merges = match model {
            ModelWrapper::BPE(bpe) if !passed.bytes && !bpe.ignore_merges => {
                let plain = bpe.continuing_subword_prefix.is_none() && bpe.end_of_word_suffix.is_none();
                plain.then(|| bpe.get_vocab())
            }
            _ => None,
        };
        // The characters that merges see must be those of the text.
        let Changes { composes, decomposes, lowercases } = self.changes;
        for (kind, safe) in self.kinds.iter_mut().enumerate() {
            let same = match kind {
                LETTER | DIGIT => !lowercases,
                _ => !(composes || decomposes || lowercases),
            };
            *safe &= ends[kind] || (merges.is_some() && same);
        }
        let Some(vocab) = merges else { return };
        // A character without a token may be merged with its neighbour or encoded as bytes.
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
        for kind in [LETTER, DIGIT, HANGUL] {
            self.kinds[kind] &= ends[kind] || singles.contains(&passed.space);
        }
        self.singles = Some(singles);
    }

    /// Excludes cuts that an added token could span, or whose whitespace it could strip.
    fn added_tokens(&mut self, tokenizer: &tokenizers::Tokenizer) -> Result<(), String> {
        let is_space = |c: char| c == MARK || c.is_whitespace();
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
                        self.not_after.extend(both_cases(pair[0]));
                    }
                    if pair[0] == '\n' {
                        self.not_on_line(pair[1]);
                    }
                }
                if token.rstrip || self.drops_space {
                    self.not_after.extend(both_cases(last));
                }
                if token.lstrip {
                    self.not_on_line(first);
                }
                if self.drops_space {
                    let letter = chars.iter().find(|c| !is_space(**c));
                    match letter {
                        Some(letter) => self.not_before.extend(both_cases(*letter)),
                        None if chars.len() == 1 => return Err("a space is an added token of its own".into()),
                        None => {}
                    }
                }
            }
        }
        Ok(())
    }
}

fn both_cases(c: char) -> impl Iterator<Item = char> {
    c.to_lowercase().chain(c.to_uppercase()).chain([c])
}

/// What a step does that splits at punctuation.
fn at_sign(behavior: SplitDelimiterBehavior) -> [AtCut; KINDS] {
    // A line end before the cut would be joined with punctuation after it.
    let sign = if behavior == SplitDelimiterBehavior::MergedWithPrevious { Crosses } else { GoesOn };
    [GoesOn, GoesOn, GoesOn, GoesOn, sign]
}

/// The kind of word cut that a character on a side of it is of.
fn kind_in_words(c: char) -> Option<usize> {
    match c {
        c if is_cased(c) => Some(LETTER),
        '0'..='9' => Some(DIGIT),
        '\u{ac00}'..='\u{d7a3}' => Some(HANGUL),
        _ => None,
    }
}

/// The kind of line cut before a character.
fn kind_on_line(c: char) -> Option<usize> {
    match c {
        c if is_plain(c) || is_composed(c) => Some(LINE),
        '/' => None,
        '!'..='~' => Some(SIGN),
        _ => None,
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
