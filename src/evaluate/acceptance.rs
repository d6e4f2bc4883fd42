//! What a draft is worth to a target: how many of its proposals stand.
//!
//! Rates are vLLM's: the acceptance rate is accepted by drafted tokens; the mean acceptance length is 1 + accepted by
//! drafts, the token that the target adds included; the rate of position i is the share of drafts of which positions 0
//! to i all stood, so that rates never rise. A draft is what is proposed at one time.
//!
//! They are not counted in runs of their own for each number of proposals, but replayed on text that the target wrote:
//! speculation writes such text, and where the text has token x the draft's token stood there with probability
//! min(1, q(x) / p(x)), which decides where rounds begin; what a round that has come so far can expect to be accepted next
//! is the overlap of both distributions. Sums over what could have happened have no noise of their own, only that of the
//! text; at temperature 0 all is certain.

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::cache_error::Setting;
use super::perplexity::BATCH_TOKENS;
use super::windows::Window;
use crate::engine::cache::{Cache, CacheOptions, EngineError};
use crate::engine::logits::{Asked, Predictions, rows_at_once};
use crate::engine::pass::{Part, Wanted, pass};
use crate::engine::rejection::{overlap, stood};
use crate::engine::sampler::{Sampler, SamplerError, SamplerOptions};
use crate::model::{Model, ModelError};

/// Most proposals at a time that figures are given for.
pub const MOST_AHEAD: usize = 8;
/// Below this share of accepted proposals a draft is taken to be broken.
pub const NEAR_ZERO: f64 = 0.02;
/// The longest period of a loop, in tokens, and how often it must come again, in full and in tokens.
const LONGEST_PERIOD: usize = 64;
const REPEATS: usize = 2;
const REPEATED: usize = 16;

/// Why acceptance was not measured.
#[derive(Debug, Error)]
pub enum AcceptanceError {
    #[error("the {side} failed")]
    Model { side: &'static str, source: ModelError },
    #[error("the {side} failed")]
    Engine { side: &'static str, source: EngineError },
    #[error(transparent)]
    Sampler(#[from] SamplerError),
    #[error("at window {window}")]
    Stopped { window: usize, source: Box<dyn std::error::Error + Send + Sync> },
}

/// The positions of one text of the target.
#[derive(Clone, Debug, Default)]
pub struct Chain {
    pub tokens: Vec<u32>,
    /// How likely it was that the draft's token stood, given the text.
    pub stood: Vec<f64>,
    /// How likely it was before the text went on: the overlap of both distributions.
    pub overlap: Vec<f64>,
    /// What repeats itself and is not counted.
    pub looped: Vec<bool>,
}

/// What came of proposing `ahead` tokens at a time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Replay {
    /// Proposals at a time; fewer where the text ends.
    pub ahead: usize,
    /// Times that tokens were proposed, tokens proposed, and tokens that stood.
    pub drafts: f64,
    pub drafted: f64,
    pub accepted: f64,
    /// Accepted by drafted.
    pub acceptance_rate: f64,
    /// 1 + accepted by drafts.
    pub mean_length: f64,
    /// The share of drafts of which all positions up to this one stood.
    pub per_position: Vec<f64>,
}

/// Marks what repeats itself: tokens equal to those one period before, where the period came again at least twice and
/// for at least 16 tokens. The first time is not marked.
pub fn loops(tokens: &[u32]) -> Vec<bool> {
    let mut looped = vec![false; tokens.len()];
    for period in 1..=LONGEST_PERIOD.min(tokens.len()) {
        let mut run = 0;
        for at in period..=tokens.len() {
            if at < tokens.len() && tokens[at] == tokens[at - period] {
                run += 1;
                continue;
            }
            if run >= (REPEATS * period).max(REPEATED) {
                looped[at - run..at].fill(true);
            }
            run = 0;
        }
    }
    looped
}

/// What would have come of proposing `ahead` tokens at a time on the chains, loops left out.
pub fn replay(chains: &[Chain], ahead: usize) -> Replay {
    let mut all = Replay { ahead, per_position: vec![0.0; ahead], ..Replay::default() };
    for chain in chains {
        let mut from = 0;
        for part in chain.looped.chunk_by(|a, b| a == b) {
            if !part[0] {
                let part = from..from + part.len();
                on_part(&chain.stood[part.clone()], &chain.overlap[part], &mut all);
            }
            from += part.len();
        }
    }
    let share = |of: f64, all: f64| if all > 0.0 { of / all } else { 0.0 };
    // On a text of a few tokens what is expected of a later position may come out higher, which it cannot be.
    for i in 1..ahead {
        all.per_position[i] = all.per_position[i].min(all.per_position[i - 1]);
    }
    all.accepted = all.per_position.iter().sum();
    all.acceptance_rate = share(all.accepted, all.drafted);
    all.mean_length = 1.0 + share(all.accepted, all.drafts);
    let drafts = all.drafts;
    all.per_position.iter_mut().for_each(|position| *position = share(*position, drafts));
    all
}

/// Adds what is expected of one stretch of text.
fn on_part(stood: &[f64], overlap: &[f64], all: &mut Replay) {
    // How likely it is that a round begins at each position.
    let mut begins = vec![0.0; stood.len() + 1];
    begins[0] = 1.0;
    for at in 0..stood.len() {
        // The last token is the target's own in any case.
        let proposed = all.ahead.min(stood.len() - at - 1);
        let mut reached = begins[at];
        if proposed > 0 {
            all.drafts += reached;
            all.drafted += reached * proposed as f64;
        }
        for i in 0..proposed {
            let on = reached * stood[at + i];
            begins[at + i + 1] += reached - on;
            all.per_position[i] += reached * overlap[at + i];
            reached = on;
        }
        begins[at + proposed + 1] += reached;
    }
}

/// Speed-up of `ahead` proposals that stand with probability `alpha` each, where a token of the draft costs the share
/// `cost` of one of the target (Leviathan, Kalman and Matias, 2023).
pub fn expected_speedup(alpha: f64, cost: f64, ahead: usize) -> f64 {
    expected_length(alpha, ahead) / (ahead as f64 * cost + 1.0)
}

/// Tokens that one verification gives: 1 + alpha + ... + alpha^ahead.
pub fn expected_length(alpha: f64, ahead: usize) -> f64 {
    (0..=ahead).map(|i| alpha.powi(i as i32)).sum()
}

/// A mean of positions with its standard error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Mean {
    pub mean: f64,
    /// `None` where one position tells nothing about it.
    pub stderr: Option<f64>,
}

impl Mean {
    pub fn of(values: impl ExactSizeIterator<Item = f64> + Clone) -> Self {
        let n = values.len() as f64;
        if n == 0.0 {
            return Self::default();
        }
        let mean = values.clone().sum::<f64>() / n;
        let squares: f64 = values.map(|value| (value - mean).powi(2)).sum();
        Self { mean, stderr: (n > 1.0).then(|| (squares / (n - 1.0) / n).sqrt()) }
    }
}

/// Both models on the same given text: no sampling, so little noise.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OnText {
    /// Tokens predicted.
    pub positions: usize,
    /// sum of min(p, q) at temperature 1: the chance that a proposal stands.
    pub alpha: Mean,
    /// Share of positions where both hold the same token for the likeliest.
    pub agreement: Mean,
    /// Chance that a run of proposals from anywhere in the text all stand, by length, at temperature 1 and at 0; `None`
    /// where no window is as long.
    pub runs: Vec<Option<f64>>,
    pub greedy_runs: Vec<Option<f64>>,
}

/// Reads the windows with both models. `progress` hears how many windows of how many are done, and may stop the work.
pub fn on_text<E>(
    target: &Model,
    draft: &Model,
    caches: Option<&[Setting; 2]>,
    windows: &[Window],
    progress: &mut dyn FnMut(usize, usize) -> Result<(), E>,
) -> Result<OnText, AcceptanceError>
where
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let plain = Sampler::new(SamplerOptions { temperature: 1.0, ..SamplerOptions::default() })?;
    let mut found = Vec::new();
    let mut done = 0;
    while done < windows.len() {
        progress(done, windows.len()).map_err(|why| AcceptanceError::Stopped { window: done, source: why.into() })?;
        let count = (BATCH_TOKENS / windows[done].tokens.len().max(1)).clamp(1, windows.len() - done);
        let batch = &windows[done..done + count];
        let asked: Vec<Asked> = batch.iter().map(|w| Asked { tokens: &w.tokens, from: w.score_from }).collect();
        let compare = |_: usize, p: &[f32], q: &[f32]| {
            let (p, q) = (plain.distribution(p)?, plain.distribution(q)?);
            let likeliest = |d: &[(u32, f64)]| d.iter().fold((0, 0.0), |m, d| if d.1 > m.1 { *d } else { m }).0;
            Ok((overlap(&p, &q), likeliest(&p) == likeliest(&q)))
        };
        let rows = both(target, draft, caches, asked, &compare)?;
        let mut rows = rows.into_iter();
        found.extend(batch.iter().map(|w| rows.by_ref().take(w.scored()).collect::<Vec<_>>()));
        done += count;
    }
    let all: Vec<(f64, bool)> = found.iter().flatten().copied().collect();
    let agree = |same: bool| f64::from(u8::from(same));
    let runs = |of: &dyn Fn(&(f64, bool)) -> f64| {
        let mean = |length: usize| {
            let windows = found.iter().flat_map(|w| w.windows(length));
            let (sum, count) = windows.fold((0.0, 0), |(s, n), w| (s + w.iter().map(of).product::<f64>(), n + 1));
            (count > 0).then(|| sum / f64::from(count))
        };
        (1..=MOST_AHEAD).map(mean).collect()
    };
    Ok(OnText {
        positions: all.len(),
        alpha: Mean::of(all.iter().map(|(alpha, _)| *alpha)),
        agreement: Mean::of(all.iter().map(|(_, same)| agree(*same))),
        runs: runs(&|(alpha, _)| *alpha),
        greedy_runs: runs(&|(_, same)| agree(*same)),
    })
}

/// Compares both predictions of a row, by its number.
type Compare<'a, T> = dyn Fn(usize, &[f32], &[f32]) -> Result<T, SamplerError> + Sync + 'a;

/// What both models predict for the tokens asked for, row by row, with their keys and values as they are or through
/// `caches` of the target and the draft. Which of them failed is told.
fn both<T: Send>(
    target: &Model,
    draft: &Model,
    caches: Option<&[Setting; 2]>,
    asked: Vec<Asked>,
    compare: &Compare<T>,
) -> Result<Vec<T>, AcceptanceError> {
    let vocab = target.config.vocab;
    if let Some(caches) = caches {
        let mut all = Vec::new();
        for asked in asked {
            through_caches([target, draft], caches, asked, compare, &mut all)?;
        }
        return Ok(all);
    }
    let of = |side| move |source| AcceptanceError::Model { side, source };
    let p = Predictions::new(target, asked.clone()).map_err(of("target"))?;
    let q = Predictions::new(draft, asked).map_err(of("draft"))?;
    let (step, mut all) = (rows_at_once(vocab), Vec::with_capacity(p.len()));
    for first in (0..p.len()).step_by(step) {
        let rows = first..(first + step).min(p.len());
        let one = p.logits(rows.clone()).map_err(of("target"))?;
        let other = q.logits(rows).map_err(of("draft"))?;
        let rows = one.par_chunks(vocab).zip(other.par_chunks(vocab)).enumerate();
        all.extend(rows.map(|(i, (p, q))| compare(first + i, p, q)).collect::<Result<Vec<_>, _>>()?);
    }
    Ok(all)
}

/// The rows of one window, whose keys and values both models read from caches.
fn through_caches<T: Send>(
    models: [&Model; 2],
    settings: &[Setting; 2],
    Asked { tokens, from }: Asked,
    compare: &Compare<T>,
    all: &mut Vec<T>,
) -> Result<(), AcceptanceError> {
    const SIDES: [&str; 2] = ["target", "draft"];
    let vocab = models[0].config.vocab;
    let of = |side: usize| move |source| AcceptanceError::Engine { side: SIDES[side], source };
    let cache = |side: usize| {
        let Setting { kind, scales } = settings[side].clone();
        let options = CacheOptions { kind: Some(kind), scales, ..CacheOptions::for_sequences(1, tokens.len()) };
        Cache::new(models[side], options).map_err(of(side))
    };
    let mut caches = [cache(0)?, cache(1)?];
    let sequences = [caches[0].add(), caches[1].add()];
    // Logits of a token predict the next.
    let (before, counting) = tokens[..tokens.len() - 1].split_at(from - 1);
    let pieces = before.chunks(BATCH_TOKENS).map(|piece| (piece, Wanted::None));
    for (piece, wanted) in pieces.chain(counting.chunks(rows_at_once(vocab)).map(|piece| (piece, Wanted::All))) {
        let mut logits = |side: usize| -> Result<Vec<f32>, AcceptanceError> {
            let part = Part { seq: sequences[side], tokens: piece, wanted };
            let model = models[side];
            let logits = pass(model, &mut caches[side], &[part]).map_err(of(side))?;
            let logits = model.backend().download(&logits).map_err(|e| of(side)(e.into()))?;
            if logits.iter().all(|x| x.is_finite()) {
                return Ok(logits);
            }
            let broken = |source| AcceptanceError::Model { side: SIDES[side], source };
            let path = model.first_non_finite(tokens).map_err(broken)?.unwrap_or_else(|| "the output head".into());
            Err(broken(ModelError::NonFinite { path }))
        };
        let (one, other, first) = (logits(0)?, logits(1)?, all.len());
        let rows = one.par_chunks(vocab).zip(other.par_chunks(vocab)).enumerate();
        all.extend(rows.map(|(i, (p, q))| compare(first + i, p, q)).collect::<Result<Vec<_>, _>>()?);
    }
    Ok(())
}

/// Texts that the target wrote, prompts and what came after them, as chains. `options` are those they were written with.
/// A chain ends where the draft's context does, beyond which it proposes nothing.
pub fn chains(
    target: &Model,
    draft: &Model,
    caches: Option<&[Setting; 2]>,
    texts: &[(Vec<u32>, Vec<u32>)],
    options: SamplerOptions,
) -> Result<Vec<Chain>, AcceptanceError> {
    let sampler = Sampler::new(options)?;
    let mut all = Vec::new();
    for (prompt, written) in texts {
        let written = &written[..written.len().min(draft.config.max_positions.saturating_sub(prompt.len()))];
        if written.is_empty() {
            all.push(Chain::default());
            continue;
        }
        let tokens = [&prompt[..], written].concat();
        let compare = |row: usize, p: &[f32], q: &[f32]| {
            let q = sampler.distribution(q)?;
            // At temperature 0 the text is the target's distribution: read at once, it may differ in the last bits.
            let p = if sampler.is_greedy() { vec![(written[row], 1.0)] } else { sampler.distribution(p)? };
            Ok((stood(&p, &q, written[row]), overlap(&p, &q)))
        };
        let asked = vec![Asked { tokens: &tokens, from: prompt.len() }];
        let rows = both(target, draft, caches, asked, &compare)?;
        let (stood, overlap) = rows.into_iter().unzip();
        all.push(Chain { looped: loops(written), tokens: written.to_vec(), stood, overlap });
    }
    Ok(all)
}

/// What a token costs; `None` where no text was long enough to time it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Seconds of the target and of the draft for one token, one at a time.
    pub target_seconds: Option<f64>,
    pub draft_seconds: Option<f64>,
    /// The draft's share of the target's.
    pub ratio: Option<f64>,
    /// Weights of the target by those of the draft.
    pub size_ratio: f64,
}

/// What `ahead` proposals at a time give.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Speed {
    pub ahead: usize,
    /// Of the overlap on what the target wrote and the measured cost, as if positions were independent; `None` without
    /// either.
    pub expected_speedup: Option<f64>,
    /// Of the replayed mean length and the measured cost; `None` without either.
    pub replayed_speedup: Option<f64>,
    /// As measured; absent where it was not.
    pub measured: Option<MeasuredSpeed>,
}

/// A run with both models.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MeasuredSpeed {
    /// After the first token, which the prompt gives; `None` where there were no others.
    pub tokens_per_second: Option<f64>,
    /// Against the target by itself.
    pub speedup: Option<f64>,
    pub acceptance_rate: f64,
    pub mean_length: f64,
    pub per_position: Vec<f64>,
    /// Whether every token was that of the target by itself; only asked at temperature 0.
    pub identical: Option<bool>,
}

/// Everything about a target and a draft.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AcceptanceFigures {
    pub temperature: f64,
    pub top_p: f64,
    pub top_k: usize,
    pub seed: u64,
    pub prompts: usize,
    /// Tokens that the target wrote, and those of them that were left out because they repeat.
    pub tokens: usize,
    pub looped: usize,
    /// Proposals at a time that the following are of.
    pub ahead: usize,
    pub acceptance_rate: f64,
    pub mean_length: f64,
    pub per_position: Vec<f64>,
    /// Mean overlap of both distributions at the positions of the target's text; `None` where none counts.
    pub overlap: Option<Mean>,
    /// For 1, 2, ... proposals at a time.
    pub replays: Vec<Replay>,
    /// On a given text.
    pub text: Option<OnText>,
    /// Tokens per second of the target by itself; `None` where no text was long enough.
    pub plain_tokens_per_second: Option<f64>,
    pub cost: Cost,
    pub speeds: Vec<Speed>,
}

impl AcceptanceFigures {
    /// Whether anything was proposed on what the target wrote, so that the acceptance rate is one.
    pub fn has_rate(&self) -> bool {
        self.replays.iter().any(|replay| replay.drafted > 0.0)
    }

    /// Whether there is anything to judge the draft by: proposals, or a given text.
    pub fn is_measured(&self) -> bool {
        self.has_rate() || self.given().is_some()
    }

    /// Whether the draft seems to be broken rather than weak.
    pub fn is_near_zero(&self) -> bool {
        let first = self.replays.first().is_some_and(|one| one.drafted > 0.0 && one.acceptance_rate < NEAR_ZERO);
        first || self.given().is_some_and(|text| text.alpha.mean < NEAR_ZERO)
    }

    fn given(&self) -> Option<&OnText> {
        self.text.as_ref().filter(|text| text.positions > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(stood: &[f64]) -> Chain {
        let n = stood.len();
        Chain { tokens: vec![0; n], stood: stood.to_vec(), overlap: stood.to_vec(), looped: vec![false; n] }
    }

    /// Plain counting of one course of events.
    fn counted(stood: &[bool], ahead: usize) -> (f64, f64, Vec<f64>) {
        let (mut at, mut drafts, mut drafted, mut positions) = (0, 0.0, 0.0, vec![0.0; ahead]);
        while at < stood.len() {
            let proposed = ahead.min(stood.len() - at - 1);
            let accepted = stood[at..at + proposed].iter().take_while(|stood| **stood).count();
            if proposed > 0 {
                drafts += 1.0;
                drafted += proposed as f64;
            }
            positions[..accepted].iter_mut().for_each(|n| *n += 1.0);
            at += accepted + 1;
        }
        (drafts, drafted, positions)
    }

    #[test]
    fn certain_chains_are_counted() {
        let stood: Vec<bool> = (0..200).map(|i| i * 7919 % 13 > 3).collect();
        let certain: Vec<f64> = stood.iter().map(|s| f64::from(u8::from(*s))).collect();
        for ahead in 1..=MOST_AHEAD {
            let found = replay(&[chain(&certain)], ahead);
            let (drafts, drafted, positions) = counted(&stood, ahead);
            assert_eq!((found.drafts, found.drafted), (drafts, drafted));
            assert_eq!(found.accepted, positions.iter().sum::<f64>());
            assert_eq!(found.acceptance_rate, found.accepted / drafted);
            assert_eq!(found.mean_length, 1.0 + found.accepted / drafts);
            let rates: Vec<f64> = positions.iter().map(|n| n / drafts).collect();
            assert_eq!(found.per_position, rates);
            assert!(found.per_position.is_sorted_by(|a, b| a >= b));
        }
    }

    #[test]
    fn uncertain_chains_give_what_is_expected() {
        let stood = [0.3, 0.9, 0.5, 1.0, 0.0, 0.7, 0.25];
        for ahead in 1..=4 {
            let found = replay(&[chain(&stood)], ahead);
            let (mut drafts, mut drafted, mut accepted) = (0.0, 0.0, 0.0);
            for course in 0u32..1 << stood.len() {
                let events: Vec<bool> = (0..stood.len()).map(|i| course >> i & 1 == 1).collect();
                let chance: f64 = events.iter().zip(stood).map(|(e, p)| if *e { p } else { 1.0 - p }).product();
                let (d, t, positions) = counted(&events, ahead);
                drafts += chance * d;
                drafted += chance * t;
                accepted += chance * positions.iter().sum::<f64>();
            }
            assert!((found.drafts - drafts).abs() < 1e-12 && (found.drafted - drafted).abs() < 1e-12);
            assert!((found.accepted - accepted).abs() < 1e-12, "{} for {accepted}", found.accepted);
        }
    }

    #[test]
    fn equal_chances_give_the_formula() {
        let found = replay(&[chain(&vec![0.8; 20_000])], 5);
        assert!((found.mean_length - expected_length(0.8, 5)).abs() < 1e-3);
        assert!((expected_length(0.8, 5) - (1.0 - 0.8f64.powi(6)) / 0.2).abs() < 1e-12);
        assert_eq!(expected_length(1.0, 7), 8.0);
        assert!((expected_speedup(0.8, 0.1, 5) - expected_length(0.8, 5) / 1.5).abs() < 1e-12);
    }

    #[test]
    fn loops_are_left_out() {
        let text: Vec<u32> = (0..40).map(|i| i * i % 101).collect();
        assert!(!loops(&text).contains(&true));
        // Forty tokens, then seven over and over, then something else.
        let mut tokens = text.clone();
        tokens.extend((0..35).map(|i| 200 + i % 7));
        tokens.extend(300..310);
        let looped = loops(&tokens);
        assert_eq!(looped.iter().position(|l| *l), Some(47));
        assert_eq!(looped.iter().filter(|l| **l).count(), 28);
        // The same token again and again, to the end.
        let looped = loops(&[&text[..], &[9; 30]].concat());
        assert_eq!(looped.iter().filter(|l| **l).count(), 29);
        // Twice is no loop yet, nor is a short one.
        assert!(!loops(&(0..60).map(|i| i % 30).collect::<Vec<_>>()).contains(&true));
        assert!(!loops(&[&text[..], &[9; 16]].concat()).contains(&true));
        // A draft that is good in loops only is not good.
        let mut stood = vec![0.0; 50];
        stood.extend([1.0; 50]);
        let mut all = chain(&stood);
        all.looped[50..].fill(true);
        assert_eq!(replay(&[all], 3).accepted, 0.0);
    }

    #[test]
    fn nothing_gives_nothing() {
        for chains in [vec![], vec![chain(&[])], vec![chain(&[1.0])]] {
            let found = replay(&chains, 4);
            assert_eq!((found.drafts, found.acceptance_rate, found.mean_length), (0.0, 0.0, 1.0));
        }
        assert_eq!(Mean::of([].into_iter()), Mean::default());
        assert_eq!(Mean::of([0.5].into_iter()), Mean { mean: 0.5, stderr: None });
        let found = |drafted| AcceptanceFigures {
            replays: vec![Replay { drafted, ..Replay::default() }],
            ..Default::default()
        };
        let (none, broken) = (found(0.0), found(10.0));
        assert!(!none.is_near_zero() && !none.is_measured() && broken.is_near_zero() && broken.is_measured());
        let text =
            |positions| AcceptanceFigures { text: Some(OnText { positions, ..OnText::default() }), ..found(0.0) };
        assert!(text(3).is_near_zero() && text(3).is_measured() && !text(3).has_rate());
        assert!(!text(0).is_near_zero() && !text(0).is_measured());
    }
}
