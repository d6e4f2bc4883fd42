//! Perplexity: how surprised a model is by a text, under a named convention.
//!
//! `exp(mean of -ln p(token | past))` over the tokens that the convention counts.

use std::time::Instant;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::calibrate::text::TextFacts;
use crate::evaluate::finite;
use crate::evaluate::windows::{Convention, Window, WindowError, plan};
use crate::model::tokenizer::BosRule;

/// Tokens handed to the model at once, if the caller has no better number.
pub const BATCH_TOKENS: usize = 4096;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// The text as a whole.
    pub text: &'a TextFacts,
    /// Its tokens, without special tokens; no fewer than `max_windows` windows need.
    pub tokens: &'a [u32],
    pub convention: Convention,
    pub window: usize,
    /// Only the first windows, if the text gives more.
    pub max_windows: Option<usize>,
    pub bos: BosRule,
    /// For lmeval without BOS: what the first token is predicted from.
    pub prefix: Option<u32>,
    /// Windows of equal length are batched up to this many tokens; one window is handed over whatever its length.
    pub batch_tokens: usize,
    /// What the model runs on, for the result.
    pub device: &'a str,
}

/// A perplexity with everything needed to repeat it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Perplexity {
    pub perplexity: f64,
    /// Why the perplexity is not finite, where it is not: it is `null` in JSON.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Mean negative log-likelihood of the counted tokens, in nats.
    pub nll: f64,
    /// Standard error of the perplexity: that of the mean nll times the perplexity (delta method). Neighbouring
    /// tokens are taken as independent, as in llama.cpp, so it is a lower bound.
    pub stderr: f64,
    /// How many tokens count.
    pub tokens: u64,
    /// Tokens the model read, per second of wall time.
    pub tokens_per_second: f64,
    pub convention: Convention,
    /// Window length in tokens.
    pub window: usize,
    pub windows: usize,
    /// `none`, `once` or `window`. lmeval begins with a BOS or EOS in any case.
    pub bos: String,
    pub text_sha256: String,
    pub device: String,
    /// How the inputs of linears were rounded, where the artifact asks for it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inputs: Vec<String>,
    /// 0 where the system does not tell.
    pub peak_rss_bytes: u64,
    /// `exp(total nll / words)`; words are what whitespace separates in the text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub word_perplexity: Option<f64>,
    /// `exp(total nll / bytes)` of the UTF-8 text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub byte_perplexity: Option<f64>,
    /// `total nll / (bytes * ln 2)`: comparable between tokenizers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits_per_byte: Option<f64>,
}

// Two models on the same windows can be compared window by window, which cancels the difficulty of the text.
/// What one window cost.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct WindowNats {
    /// Negative log-likelihood of its tokens that count, in nats, added up.
    pub nats: f64,
    /// How many count.
    pub tokens: u64,
}

/// A perplexity and its windows.
#[derive(Clone, Debug)]
pub struct Measured {
    pub result: Perplexity,
    pub windows: Vec<WindowNats>,
}

impl Measured {
    /// Whether this is worse than `other` on the same windows by more than the standard error of the difference, which the
    /// windows' own difficulty does not enter; never on less than two windows.
    pub fn exceeds(&self, other: &Measured) -> bool {
        let mean = |window: &WindowNats| window.nats / window.tokens.max(1) as f64;
        let differences: Vec<f64> = self.windows.iter().zip(&other.windows).map(|(a, b)| mean(a) - mean(b)).collect();
        let n = differences.len() as f64;
        let average = differences.iter().sum::<f64>() / n;
        let variance = differences.iter().map(|d| (d - average).powi(2)).sum::<f64>() / (n - 1.0);
        n > 1.0 && average > (variance / n).sqrt()
    }
}

/// Why there is no perplexity.
#[derive(Debug, Error)]
pub enum PerplexityError {
    #[error(transparent)]
    Window(#[from] WindowError),
    #[error("the model failed at window {window}: {source}")]
    Model { window: usize, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("window {window}: the model gave {given} scores for {wanted} predictions")]
    Shape { window: usize, given: usize, wanted: usize },
    #[error(
        "window {window}, position {position}: the negative log-likelihood is {nll}; the model's output is broken there"
    )]
    NonFinite { window: usize, position: usize, nll: f32 },
}

/// For each window given, the negative log-likelihood in nats of every token but the first.
pub type Scores<E> = Result<Vec<Vec<f32>>, E>;

/// Measures. `score` is given windows of one length and returns, for each, the negative log-likelihood in nats of
/// every token but the first given those before it. `progress` hears how many windows of how many are done.
///
/// The predictions that the convention does not count may be anything, NaN included.
pub fn measure<E>(
    request: &Request<'_>,
    progress: &mut dyn FnMut(usize, usize),
    score: &mut dyn FnMut(&[&[u32]]) -> Scores<E>,
) -> Result<Measured, PerplexityError>
where
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let Request { text, tokens, convention, window, max_windows, bos, prefix, batch_tokens, device } = *request;
    let mut windows = plan(convention, tokens, window, bos, prefix)?;
    let whole = windows.len() <= max_windows.unwrap_or(usize::MAX);
    windows.truncate(max_windows.unwrap_or(usize::MAX));
    let began = Instant::now();
    let mut moments = Moments::default();
    let mut sums = Vec::with_capacity(windows.len());
    while sums.len() < windows.len() {
        let first = sums.len();
        let batch = batch(&windows[first..], batch_tokens);
        let inputs: Vec<&[u32]> = batch.iter().map(|w| w.tokens.as_slice()).collect();
        let scores = score(&inputs).map_err(|e| PerplexityError::Model { window: first, source: e.into() })?;
        if scores.len() != batch.len() {
            return Err(PerplexityError::Shape { window: first, given: scores.len(), wanted: batch.len() });
        }
        for (window, nlls) in batch.iter().zip(&scores) {
            sums.push(count_window(sums.len(), window, nlls, &mut moments)?);
        }
        progress(sums.len(), windows.len());
    }
    let seconds = began.elapsed().as_secs_f64();
    let read: usize = windows.iter().map(|w| w.tokens.len() - 1).sum();

    let total: f64 = sums.iter().map(|w| w.nats).sum();
    let nll = total / moments.count as f64;
    // Words and bytes are those of the whole text.
    let per = |unit: usize| (convention == Convention::LmEval && whole && unit > 0).then(|| total / unit as f64);
    let (per_word, per_byte) = (per(text.words), per(text.bytes));
    let result = Perplexity {
        perplexity: nll.exp(),
        reason: finite::perplexity(nll),
        nll,
        stderr: nll.exp() * moments.standard_error(),
        tokens: moments.count,
        tokens_per_second: if seconds > 0.0 { read as f64 / seconds } else { 0.0 },
        convention,
        window,
        windows: windows.len(),
        bos: bos.name().into(),
        text_sha256: text.sha256.clone(),
        device: device.into(),
        inputs: Vec::new(),
        peak_rss_bytes: peak_rss_bytes(),
        word_perplexity: per_word.map(f64::exp),
        byte_perplexity: per_byte.map(f64::exp),
        bits_per_byte: per_byte.map(|nats| nats / std::f64::consts::LN_2),
    };
    Ok(Measured { result, windows: sums })
}

/// The leading windows of one length that fit the budget, at least one.
fn batch(windows: &[Window], budget: usize) -> &[Window] {
    let len = windows.first().map_or(0, |w| w.tokens.len());
    let most = (budget / len.max(1)).max(1);
    let same = windows.iter().take(most).take_while(|w| w.tokens.len() == len).count();
    &windows[..same]
}

fn count_window(
    index: usize,
    window: &Window,
    nlls: &[f32],
    moments: &mut Moments,
) -> Result<WindowNats, PerplexityError> {
    let wanted = window.tokens.len() - 1;
    if nlls.len() != wanted {
        return Err(PerplexityError::Shape { window: index, given: nlls.len(), wanted });
    }
    let mut nats = 0.0;
    for position in window.score_from..window.tokens.len() {
        let nll = nlls[position - 1];
        if !nll.is_finite() {
            return Err(PerplexityError::NonFinite { window: index, position, nll });
        }
        nats += f64::from(nll);
        moments.add(f64::from(nll));
    }
    Ok(WindowNats { nats, tokens: window.scored() as u64 })
}

/// Mean and spread in one pass (Welford), since squares of long sums lose digits.
#[derive(Default)]
struct Moments {
    count: u64,
    mean: f64,
    squares: f64,
}

impl Moments {
    fn add(&mut self, x: f64) {
        self.count += 1;
        let off = x - self.mean;
        self.mean += off / self.count as f64;
        self.squares += off * (x - self.mean);
    }

    /// Of the mean.
    fn standard_error(&self) -> f64 {
        if self.count < 2 {
            return 0.0;
        }
        let n = self.count as f64;
        (self.squares / (n - 1.0) / n).sqrt()
    }
}

/// The most memory this process has had resident, 0 where the system does not tell.
pub fn peak_rss_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = peak.and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request<'a>(text: &'a TextFacts, tokens: &'a [u32], convention: Convention, window: usize) -> Request<'a> {
        Request {
            text,
            tokens,
            convention,
            window,
            max_windows: None,
            bos: BosRule::None,
            prefix: Some(0),
            batch_tokens: 16,
            device: "cpu",
        }
    }

    /// Gives the k-th token of each window the score `f(k)`.
    fn run(request: &Request<'_>, f: impl Fn(usize) -> f32) -> Result<Measured, PerplexityError> {
        let mut score =
            |batch: &[&[u32]]| -> Scores<String> { Ok(batch.iter().map(|w| (1..w.len()).map(&f).collect()).collect()) };
        measure(request, &mut |_, _| {}, &mut score)
    }

    #[test]
    fn a_uniform_model_has_the_vocabulary_as_perplexity() {
        let tokens = [7; 50];
        for convention in Convention::ALL {
            let got = run(&request(&TextFacts::of("seven words"), &tokens, convention, 8), |_| 2048f32.ln());
            let got = got.map(|m| m.result).unwrap_or_else(|e| panic!("{e}"));
            assert!((got.perplexity - 2048.0).abs() < 1e-2, "{convention}: {}", got.perplexity);
            assert!(got.stderr < 1e-9, "{convention}: {}", got.stderr);
            let counted = match convention {
                Convention::Gptq => 6 * 7,
                Convention::LlamaCpp => 6 * 3,
                Convention::LmEval => 50,
            };
            assert_eq!(got.tokens, counted, "{convention}");
        }
    }

    #[test]
    fn mean_and_standard_error() {
        // Two gptq windows of three: scores 1 and 2 in each. Mean 1.5; sample variance 1/3; error sqrt(1/12).
        let got = run(&request(&TextFacts::of("x"), &[7; 6], Convention::Gptq, 3), |k| k as f32)
            .map(|m| (m.result, m.windows));
        let (result, windows) = got.unwrap_or_else(|e| panic!("{e}"));
        assert!((result.nll - 1.5).abs() < 1e-12);
        assert!((result.perplexity - 1.5f64.exp()).abs() < 1e-12);
        assert!((result.stderr - 1.5f64.exp() * (1.0f64 / 12.0).sqrt()).abs() < 1e-12);
        assert_eq!(windows, [WindowNats { nats: 3.0, tokens: 2 }; 2]);
        assert_eq!((result.word_perplexity, result.bits_per_byte), (None, None));
    }

    #[test]
    fn words_and_bytes_of_the_text() {
        // Four tokens of 2 nats: 8 nats over two words and five bytes.
        let got = run(&request(&TextFacts::of("é  b\n"), &[7; 4], Convention::LmEval, 10), |_| 2.0);
        let got = got.map(|m| m.result).unwrap_or_else(|e| panic!("{e}"));
        let close = |x: Option<f64>, y: f64| x.is_some_and(|x| (x - y).abs() < 1e-9 * y);
        assert!(close(got.word_perplexity, 4f64.exp()), "{got:?}");
        assert!(close(got.byte_perplexity, (8f64 / 6.0).exp()), "{got:?}");
        assert!(close(got.bits_per_byte, 8.0 / 6.0 / 2f64.ln()), "{got:?}");
    }

    #[test]
    fn broken_scores_are_errors_only_where_they_count() {
        let text = TextFacts::of("x");
        let request = request(&text, &[7; 16], Convention::LlamaCpp, 8);
        assert!(run(&request, |k| if k < 5 { f32::NAN } else { 1.0 }).is_ok());
        let error = run(&request, |k| if k == 6 { f32::INFINITY } else { 1.0 }).err();
        assert!(matches!(error, Some(PerplexityError::NonFinite { window: 0, position: 6, .. })), "{error:?}");
    }

    #[test]
    fn batches_are_bounded_and_of_one_length() {
        let tokens: Vec<u32> = (0..50).collect();
        let text = TextFacts::of("x");
        let request = request(&text, &tokens, Convention::LmEval, 7);
        let mut sizes = Vec::new();
        let mut seen = Vec::new();
        let mut score = |batch: &[&[u32]]| -> Scores<String> {
            assert!(batch.iter().all(|w| w.len() == batch[0].len()));
            sizes.push(batch.len());
            Ok(batch.iter().map(|w| vec![1.0; w.len() - 1]).collect())
        };
        let got = measure(&request, &mut |done, all| seen.push((done, all)), &mut score);
        assert_eq!(got.map(|m| m.result.windows).ok(), Some(8));
        assert_eq!(sizes, [2, 2, 2, 2]);
        assert_eq!(seen, [(2, 8), (4, 8), (6, 8), (8, 8)]);
    }

    #[test]
    fn the_model_s_failure_is_passed_on() {
        let text = TextFacts::of("x");
        let request = request(&text, &[7; 6], Convention::Gptq, 3);
        let mut fails = |_: &[&[u32]]| Err::<Vec<Vec<f32>>, _>("no memory");
        let error = measure(&request, &mut |_, _| {}, &mut fails).map(|_| ()).map_err(|e| e.to_string());
        assert_eq!(error, Err("the model failed at window 0: no memory".into()));
        let mut short = |_: &[&[u32]]| Ok::<_, String>(vec![vec![1.0]; 2]);
        let error = measure(&request, &mut |_, _| {}, &mut short).err();
        assert!(matches!(error, Some(PerplexityError::Shape { window: 0, given: 1, wanted: 2 })), "{error:?}");
    }

    #[test]
    fn peak_memory_is_told_on_linux() {
        assert!(!cfg!(target_os = "linux") || peak_rss_bytes() > 1 << 20);
    }
}
