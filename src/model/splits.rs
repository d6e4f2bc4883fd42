//! How pre-tokenizers of published models split text, and where text may be cut under each.
//!
//! A row is a regular expression of a `Split` step that isolates its matches. Each was read: what a match can hold, and what it
//! looks at beyond its end.

use AtCut::{Crosses, Ends, GoesOn};

macro_rules! contractions {
    () => {
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    };
}
macro_rules! words {
    ($digits:literal) => {
        concat!(
            "split ",
            contractions!(),
            r"|[^\r\n\p{L}\p{N}]?\p{L}+|",
            $digits,
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
    };
}
macro_rules! cased {
    ($after:expr, $digits:literal) => {
        concat!(
            r"split [^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
            $after,
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
            $after,
            "|",
            $digits,
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
    };
}

/// Letters of scripts with case, as DeepSeek spells them out.
pub const LETTERS: &str = concat!(
    "split ",
    "\\s?[A-Za-z\u{b5}\u{c0}-\u{d6}\u{d8}-\u{f6}\u{f8}-\u{1ba}\u{1bc}-\u{1bf}\u{1c4}-\u{293}\u{295}-\u{2af}",
    "\u{370}-\u{373}\u{376}\u{377}\u{37b}-\u{37d}\u{37f}\u{386}\u{388}-\u{38a}\u{38c}\u{38e}-\u{3a1}\u{3a3}-",
    "\u{3f5}\u{3f7}-\u{481}\u{48a}-\u{52f}\u{531}-\u{556}\u{10a0}-\u{10c5}\u{13a0}-\u{13f5}\u{13f8}-\u{13fd}",
    "\u{1c90}-\u{1cba}\u{1cbd}-\u{1cbf}\u{1d00}-\u{1d2b}\u{1d6b}-\u{1d77}\u{1d79}-\u{1d9a}\u{1e00}-\u{1f15}",
    "\u{1f18}-\u{1f1d}\u{1f20}-\u{1f45}\u{1f48}-\u{1f4d}\u{1f50}-\u{1f57}\u{1f59}\u{1f5b}\u{1f5d}\u{1f5f}-",
    "\u{1f7d}\u{1f80}-\u{1fb4}\u{1fb6}-\u{1fbc}\u{1fbe}\u{1fc2}-\u{1fc4}\u{1fc6}-\u{1fcc}\u{1fd0}-\u{1fd3}",
    "\u{1fd6}-\u{1fdb}\u{1fe0}-\u{1fec}\u{1ff2}-\u{1ff4}\u{1ff6}-\u{1ffc}\u{2102}\u{2107}\u{210a}-\u{2113}",
    "\u{2115}\u{2119}-\u{211d}\u{2124}\u{2126}\u{2128}\u{212a}-\u{212d}\u{212f}-\u{2134}\u{2139}\u{213c}-",
    "\u{213f}\u{2145}-\u{2149}\u{214e}\u{2183}\u{2184}\u{2c00}-\u{2c7b}\u{2c7e}-\u{2ce4}\u{2ceb}-\u{2cee}",
    "\u{2cf2}\u{2cf3}\u{a640}-\u{a66d}\u{a680}-\u{a69b}\u{a722}-\u{a76f}\u{a771}-\u{a787}\u{a78b}-\u{a78e}",
    "\u{ab70}-\u{abbf}\u{fb00}-\u{fb06}\u{fb13}-\u{fb17}\u{ff21}-\u{ff3a}\u{ff41}-\u{ff5a}\u{10400}-\u{1044f}",
    "\u{104b0}-\u{104d3}\u{104d8}-\u{104fb}\u{10c80}-\u{10cb2}\u{10cc0}-\u{10cf2}\u{118a0}-\u{118df}\u{1e900}",
    "-\u{1e943}]+",
);
/// Llama 3: runs of up to three digits.
pub const WORDS_THREE_DIGITS: &str = words!(r"\p{N}{1,3}");
/// Qwen 2: digits one by one.
pub const WORDS_ONE_DIGIT: &str = words!(r"\p{N}");
/// Qwen 3.5: marks belong to words.
pub const WORDS_WITH_MARKS: &str = concat!(
    "split ",
    contractions!(),
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// Mistral's Tekken: words end where lower case does.
pub const CASED: &str = cased!("", r"\p{N}");
/// GPT-4o: the same with contractions.
pub const CASED_CONTRACTIONS: &str = cased!(concat!(contractions!(), "?"), r"\p{N}{1,3}");
pub const LINE_ENDS: &str = r"split [\r\n]";
/// DeepSeek LLM.
pub const PUNCTUATION: &str = "split \\s?[!-/:-~！-／：-～‘-‟\u{3000}-。]+";
pub const TRAILING_SPACE: &str = r"split \s+$";
pub const EAST_ASIAN: &str = "split [一-龥ࠀ-一가-퟿]+";
/// DeepSeek Coder.
pub const ANY_LETTERS: &str = r"split \s?\p{L}+";
pub const ANY_PUNCTUATION: &str = r"split \s?\p{P}+";
/// DeepSeek V3.
pub const THREE_DIGITS: &str = r"split \p{N}{1,3}";
pub const CHINESE_AND_KANA: &str = "split [一-龥\u{3040}-ゟ゠-ヿ]+";
pub const WORDS_OR_SYMBOLS: &str = r##"split [!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
/// Falcon.
pub const DIGIT_TRIPLES: &str = "split [0-9][0-9][0-9]";

/// What a step does at a cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtCut {
    /// A piece always ends there, and the text on each side is split independently.
    Ends,
    /// A piece may go on beyond it, and the text on each side is split independently.
    GoesOn,
    /// The text on one side can change how the other side is split.
    Crosses,
}

/// Kinds of cuts. The first three lie before a single space that stands after a letter with case, a digit or a Hangul
/// syllable, and before another of these. The last two lie after a single line end, before a letter or before a digit or
/// ASCII punctuation other than the slash.
pub const KINDS: usize = 5;
pub const LETTER: usize = 0;
pub const DIGIT: usize = 1;
pub const HANGUL: usize = 2;
pub const LINE: usize = 3;
pub const SIGN: usize = 4;

/// A step with what it does at each kind of cut.
pub const SPLITS: &[(&str, [AtCut; KINDS])] = &[
    // No match holds a letter or a digit and then a space, or a line end and then a character that is no space (but `CASED`
    // takes slashes after a line end). A letter is always part of a match, and so is a line end. Of one space or line end
    // between what is no space, nothing is left to `(?!\S)`; one space before a digit is a match of `\s+`.
    (WORDS_THREE_DIGITS, [Ends; KINDS]),
    (WORDS_ONE_DIGIT, [Ends; KINDS]),
    (WORDS_WITH_MARKS, [Ends; KINDS]),
    (CASED, [Ends; KINDS]),
    (CASED_CONTRACTIONS, [Ends; KINDS]),
    // Digits are no match, but a space after one is, alone or with the letters after it.
    (WORDS_OR_SYMBOLS, [Ends; KINDS]),
    (LINE_ENDS, [GoesOn, GoesOn, GoesOn, Ends, Ends]),
    // A line end may begin a match of letters.
    (LETTERS, [Ends, GoesOn, GoesOn, Crosses, GoesOn]),
    (ANY_LETTERS, [Ends, GoesOn, Ends, Crosses, GoesOn]),
    // A line end may begin a match of punctuation.
    (PUNCTUATION, [GoesOn, GoesOn, GoesOn, GoesOn, Crosses]),
    (ANY_PUNCTUATION, [GoesOn, GoesOn, GoesOn, GoesOn, Crosses]),
    // The part before the cut would end with space that the whole does not end with.
    (TRAILING_SPACE, [GoesOn, GoesOn, GoesOn, Crosses, Crosses]),
    // Hangul lies in its last range.
    (EAST_ASIAN, [GoesOn, GoesOn, Ends, GoesOn, GoesOn]),
    (CHINESE_AND_KANA, [GoesOn; KINDS]),
    (THREE_DIGITS, [GoesOn, Ends, GoesOn, GoesOn, GoesOn]),
    (DIGIT_TRIPLES, [GoesOn; KINDS]),
];

/// How a `Split` step with this regular expression is listed, on one line.
pub fn listed(regex: &str) -> String {
    format!("split {}", regex.replace('\r', r"\r").replace('\n', r"\n"))
}
