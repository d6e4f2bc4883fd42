//! Which tokens are scored with which past: the conventions under which perplexities are published.
//!
//! Numbers of different conventions are not comparable (Llama-2-7B has about 5.5, 5.8 or 8.8 on WikiText-2),
//! so each is followed exactly and named in the result.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::model::tokenizer::{BosHabit, BosRule};

/// A way to cut a text into windows and to choose the tokens that count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Convention {
    /// The GPTQ paper's code, followed by AWQ, SmoothQuant, OmniQuant and QuIP#: the text tokenized once, windows
    /// without overlap, the tail dropped, every token but a window's first counts.
    Gptq,
    /// llama.cpp's `llama-perplexity`: windows without overlap, the tail dropped, BOS written over the first token
    /// of each window if the vocabulary adds BOS, and only the second half of each window counts.
    LlamaCpp,
    /// lm-eval's rolling log-likelihood with one token of context: every token counts once, the first after a
    /// BOS or EOS that stands for the beginning.
    LmEval,
}

impl Convention {
    pub const ALL: [Self; 3] = [Self::Gptq, Self::LlamaCpp, Self::LmEval];

    pub fn name(self) -> &'static str {
        match self {
            Self::Gptq => "gptq",
            Self::LlamaCpp => "llamacpp",
            Self::LmEval => "lmeval",
        }
    }

    /// The window length that published numbers use: 2048 in papers, 512 in llama.cpp, and for lm-eval what it
    /// takes when a model does not say how much it can read.
    pub fn default_window(self) -> usize {
        match self {
            Self::Gptq | Self::LmEval => 2048,
            Self::LlamaCpp => 512,
        }
    }

    /// Where BOS goes for a tokenizer that adds it, if the user leaves that open.
    pub fn bos_habit(self) -> BosHabit {
        match self {
            Self::Gptq | Self::LmEval => BosHabit::Once,
            Self::LlamaCpp => BosHabit::Window,
        }
    }

    /// How many positions a model must be able to read for windows of this length: the last token of a window is
    /// only predicted.
    pub fn positions(self, window: usize) -> usize {
        match self {
            Self::Gptq | Self::LlamaCpp => window.saturating_sub(1),
            Self::LmEval => window,
        }
    }
}

impl fmt::Display for Convention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Convention {
    type Err = WindowError;

    fn from_str(text: &str) -> Result<Self, WindowError> {
        Self::ALL.into_iter().find(|c| c.name() == text).ok_or_else(|| WindowError::UnknownConvention(text.into()))
    }
}

/// Why a text cannot be cut under a convention.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum WindowError {
    #[error("`{0}` is no perplexity convention; use gptq, llamacpp or lmeval")]
    UnknownConvention(String),
    #[error(
        "the text is too short: {found} tokens (BOS included), one {convention} window needs {needed}; give a longer text or a smaller window"
    )]
    TooShort { convention: Convention, found: usize, needed: usize },
    #[error("a {convention} window of {window} tokens has nothing to score; it needs at least {least}")]
    TooNarrow { convention: Convention, window: usize, least: usize },
    #[error("lmeval predicts the first token from BOS or EOS, and the tokenizer has neither; use `--convention gptq`")]
    NoPrefix,
}

/// Tokens that a model reads at once, and which of them count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    pub tokens: Vec<u32>,
    /// Index of the first predicted token that counts; all after it count as well. At least 1.
    pub score_from: usize,
}

impl Window {
    /// How many predictions count.
    pub fn scored(&self) -> usize {
        self.tokens.len() - self.score_from
    }
}

/// Cuts `tokens`, a text without special tokens, into windows.
///
/// `prefix` is what lm-eval's first token is predicted from where `bos` is [`BosRule::None`]. BOS that the text
/// begins with already is not doubled.
pub fn plan(
    convention: Convention,
    tokens: &[u32],
    window: usize,
    bos: BosRule,
    prefix: Option<u32>,
) -> Result<Vec<Window>, WindowError> {
    match convention {
        Convention::Gptq => blocks(convention, tokens, window, bos, 1),
        Convention::LlamaCpp => blocks(convention, tokens, window, bos, window / 2 + 1),
        Convention::LmEval => rolling(tokens, window, bos, prefix),
    }
}

/// Windows without overlap, the incomplete last one dropped.
///
/// With BOS in each window the two conventions differ. gptq: BOS stands before `window - 1` tokens of text, none of
/// which is lost. llamacpp: the text is tokenized with one BOS before it, and BOS overwrites the first token of
/// every window, as that program does.
fn blocks(
    convention: Convention,
    tokens: &[u32],
    window: usize,
    bos: BosRule,
    score_from: usize,
) -> Result<Vec<Window>, WindowError> {
    let least = if convention == Convention::Gptq { 2 } else { 3 };
    if window < least {
        return Err(WindowError::TooNarrow { convention, window, least });
    }
    let overwrites = convention == Convention::LlamaCpp;
    let (stream, lead) = match bos {
        BosRule::None => (tokens.to_vec(), None),
        BosRule::Window(bos) if !overwrites => (without_first(tokens, bos).to_vec(), Some(bos)),
        BosRule::Once(bos) | BosRule::Window(bos) => ([&[bos], without_first(tokens, bos)].concat(), None),
    };
    let text = window - usize::from(lead.is_some());
    if stream.len() < text {
        let found = stream.len() + usize::from(lead.is_some());
        return Err(WindowError::TooShort { convention, found, needed: window });
    }
    let cut = |chunk: &[u32]| {
        let mut tokens: Vec<u32> = lead.into_iter().chain(chunk.iter().copied()).collect();
        if let (true, BosRule::Window(bos)) = (overwrites, bos) {
            tokens[0] = bos;
        }
        Window { tokens, score_from }
    };
    Ok(stream.chunks_exact(text).map(cut).collect())
}

/// lm-eval's windows: the model reads at most `window` tokens at once; each token is predicted once. Windows after
/// the first begin with one token already predicted; the last one reaches back as far as it can.
///
/// With [`BosRule::Window`] BOS overwrites the first token of the later windows too.
fn rolling(tokens: &[u32], window: usize, bos: BosRule, prefix: Option<u32>) -> Result<Vec<Window>, WindowError> {
    let convention = Convention::LmEval;
    if window == 0 {
        return Err(WindowError::TooNarrow { convention, window, least: 1 });
    }
    let (first, every, text) = match bos {
        BosRule::None => (prefix.ok_or(WindowError::NoPrefix)?, None, tokens),
        BosRule::Once(bos) => (bos, None, without_first(tokens, bos)),
        BosRule::Window(bos) => (bos, Some(bos), without_first(tokens, bos)),
    };
    if text.is_empty() {
        return Err(WindowError::TooShort { convention, found: tokens.len(), needed: 1 });
    }
    let head = text.len().min(window);
    let mut windows = vec![Window { tokens: [&[first], &text[..head]].concat(), score_from: 1 }];
    let mut done = head;
    while done < text.len() {
        let end = text.len().min(done + window);
        let mut tokens = text[end - window - 1..end].to_vec();
        if let Some(bos) = every {
            tokens[0] = bos;
        }
        windows.push(Window { score_from: tokens.len() - (end - done), tokens });
        done = end;
    }
    Ok(windows)
}

fn without_first(tokens: &[u32], bos: u32) -> &[u32] {
    tokens.strip_prefix(&[bos]).unwrap_or(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Convention::{Gptq, LlamaCpp, LmEval};

    const BOS: u32 = 1;

    fn got(convention: Convention, n: u32, window: usize, bos: BosRule) -> Vec<(Vec<u32>, usize)> {
        let tokens: Vec<u32> = (10..10 + n).collect();
        let windows = plan(convention, &tokens, window, bos, Some(2)).unwrap_or_default();
        windows.into_iter().map(|w| (w.tokens, w.score_from)).collect()
    }

    #[test]
    fn gptq_windows() {
        assert_eq!(got(Gptq, 7, 3, BosRule::None), [(vec![10, 11, 12], 1), (vec![13, 14, 15], 1)]);
        assert_eq!(got(Gptq, 7, 4, BosRule::Once(BOS)), [(vec![BOS, 10, 11, 12], 1), (vec![13, 14, 15, 16], 1)]);
        assert_eq!(
            got(Gptq, 7, 3, BosRule::Window(BOS)),
            [(vec![BOS, 10, 11], 1), (vec![BOS, 12, 13], 1), (vec![BOS, 14, 15], 1)]
        );
    }

    #[test]
    fn llamacpp_windows() {
        // Of four tokens the inputs at 2 .. 2 predict those at 3 .. 3.
        assert_eq!(got(LlamaCpp, 9, 4, BosRule::None), [(vec![10, 11, 12, 13], 3), (vec![14, 15, 16, 17], 3)]);
        assert_eq!(got(LlamaCpp, 9, 4, BosRule::Window(BOS)), [(vec![BOS, 10, 11, 12], 3), (vec![BOS, 14, 15, 16], 3)]);
        assert_eq!(got(LlamaCpp, 9, 4, BosRule::Once(BOS)), [(vec![BOS, 10, 11, 12], 3), (vec![13, 14, 15, 16], 3)]);
        // 255 of 512, predicting tokens 257 to 511.
        let tokens = vec![5; 1100];
        let windows = plan(LlamaCpp, &tokens, 512, BosRule::None, None).unwrap_or_default();
        assert_eq!(windows.len(), 2);
        assert!(windows.iter().all(|w| w.score_from == 257 && w.scored() == 255));
    }

    #[test]
    fn lmeval_windows() {
        // Eight tokens, three at a time: 10-12 after the prefix, 13-15 after 12, then 16 and 17 with the longest
        // past that fits.
        assert_eq!(
            got(LmEval, 8, 3, BosRule::None),
            [(vec![2, 10, 11, 12], 1), (vec![12, 13, 14, 15], 1), (vec![14, 15, 16, 17], 2)]
        );
        assert_eq!(got(LmEval, 2, 3, BosRule::Once(BOS)), [(vec![BOS, 10, 11], 1)]);
        assert_eq!(got(LmEval, 5, 3, BosRule::Window(BOS)), [(vec![BOS, 10, 11, 12], 1), (vec![BOS, 12, 13, 14], 2)]);
    }

    #[test]
    fn lmeval_scores_every_token_once() {
        for (n, window) in [(1, 1), (5, 1), (7, 7), (8, 7), (100, 13), (4096, 2048), (4097, 2048)] {
            let tokens: Vec<u32> = (100..100 + n).collect();
            let windows = plan(LmEval, &tokens, window, BosRule::None, Some(0)).unwrap_or_default();
            let scored: Vec<u32> = windows.iter().flat_map(|w| w.tokens[w.score_from..].to_vec()).collect();
            assert_eq!(scored, tokens, "{n} tokens, window {window}");
            assert!(windows.iter().all(|w| w.tokens.len() <= window + 1));
        }
    }

    #[test]
    fn bos_is_not_doubled() {
        let tokens = [BOS, 10, 11, 12];
        for (convention, rule) in
            [(Gptq, BosRule::Once(BOS)), (LlamaCpp, BosRule::Window(BOS)), (LmEval, BosRule::Once(BOS))]
        {
            let windows = plan(convention, &tokens, 4, rule, None).unwrap_or_default();
            assert_eq!(windows[0].tokens, tokens, "{convention}");
        }
    }

    #[test]
    fn errors_have_numbers() {
        let short = plan(Gptq, &[5; 9], 10, BosRule::None, None);
        assert_eq!(short, Err(WindowError::TooShort { convention: Gptq, found: 9, needed: 10 }));
        assert!(plan(Gptq, &[5; 9], 10, BosRule::Once(BOS), None).is_ok());
        assert!(plan(Gptq, &[5; 9], 10, BosRule::Window(BOS), None).is_ok());
        assert!(plan(Gptq, &[5; 8], 10, BosRule::Window(BOS), None).is_err());
        assert_eq!(plan(LmEval, &[5], 10, BosRule::None, None), Err(WindowError::NoPrefix));
        assert!(plan(LmEval, &[], 10, BosRule::None, Some(2)).is_err());
        let narrow = plan(LlamaCpp, &[5; 9], 2, BosRule::None, None);
        assert_eq!(narrow, Err(WindowError::TooNarrow { convention: LlamaCpp, window: 2, least: 3 }));
        assert!("gguf".parse::<Convention>().is_err());
        assert!(Convention::ALL.into_iter().all(|c| c.name().parse() == Ok(c)));
    }
}
