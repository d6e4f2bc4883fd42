//! Speculative decoding: a small model proposes tokens, the large one looks at all of them in one pass.
//!
//! At temperature 0 the text is the target's own, token for token: a pass of at most `few_rows` rows gives each row the
//! bits that it has alone. Otherwise every token follows the target's distribution; see [`super::rejection`]. What is
//! drawn depends on the seed and on how many tokens are proposed at a time, which is never a matter of time then.

use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::cache::{CacheOptions, EngineError};
use super::generate::{GenerateError, Session, Stop, broken, capacity, choose};
use super::rejection::{Verdict, verify};
use super::sampler::{Sampler, SamplerError, greedy};
use crate::backend::cache::LayerScales;
use crate::model::Model;

/// Most proposals at a time where their number adapts.
const MOST_AHEAD: usize = 8;
/// How fast older rounds are forgotten.
const MEMORY: f64 = 0.97;
/// A mean of less than this is none any more.
const FORGOTTEN: f64 = 1e-6;
/// Proposals that are taken to have stood, and to have fallen, before there were any.
const PRIOR: f64 = 1.0;
/// Where nothing is to be gained, one proposal is made in so many rounds, to see whether that has changed.
const PROBE: usize = 16;

/// How many tokens are proposed at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ahead {
    Fixed(usize),
    /// As pays, by what has stood so far and by what passes cost: at temperature 0 as measured, otherwise by the sizes
    /// of the models, so that the same seed draws the same text.
    Auto,
}

/// Who proposes, and how.
#[derive(Clone)]
pub struct Speculation<'a> {
    pub draft: &'a Model,
    pub ahead: Ahead,
    /// The target's cache, where it is not to be as by default; its type is also that of the draft's.
    pub cache: Option<CacheOptions>,
    /// Calibrated scales of the draft's cache.
    pub draft_scales: Option<Arc<[LayerScales]>>,
}

/// Why two models cannot work together, or failed.
#[derive(Debug, Error)]
pub enum SpeculateError {
    #[error(
        "the draft has a vocabulary of {draft} tokens and the target one of {target}: the draft must have the target's \
         tokenizer"
    )]
    Vocabulary { draft: usize, target: usize },
    #[error("{ahead} tokens are to be proposed at a time; on {device} it can be 1 to {most}")]
    Ahead { ahead: usize, most: usize, device: String },
    #[error("the draft")]
    Draft(#[source] GenerateError),
    // Not transparent: that would hide the cause that decides the exit code.
    #[error("{0}")]
    Target(#[from] GenerateError),
}

impl From<EngineError> for SpeculateError {
    fn from(error: EngineError) -> Self {
        SpeculateError::Target(error.into())
    }
}

/// One verification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Round {
    /// Tokens written before.
    pub at: usize,
    pub proposed: usize,
    pub accepted: usize,
}

/// How the text came about.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Rounds {
    /// Those with proposals.
    pub rounds: Vec<Round>,
    /// Verifications in all, those without proposals included, and the seconds they took. What the models take to read
    /// the prompt is in no seconds.
    pub passes: usize,
    pub target_seconds: f64,
    /// Seconds that the proposals took.
    pub draft_seconds: f64,
    /// Why some steps of either model were not recorded although the backend can record.
    pub unrecorded: Vec<String>,
}

impl Rounds {
    pub fn drafted(&self) -> usize {
        self.rounds.iter().map(|round| round.proposed).sum()
    }

    pub fn accepted(&self) -> usize {
        self.rounds.iter().map(|round| round.accepted).sum()
    }

    /// Accepted by drafted tokens; `None` where none were drafted.
    pub fn acceptance_rate(&self) -> Option<f64> {
        let drafted = self.drafted();
        (drafted > 0).then(|| self.accepted() as f64 / drafted as f64)
    }
}

/// Whether a draft can serve a target.
pub fn check(target: &Model, draft: &Model, ahead: Ahead) -> Result<(), SpeculateError> {
    let (of_target, of_draft) = (target.config.vocab, draft.config.vocab);
    if of_target != of_draft {
        return Err(SpeculateError::Vocabulary { draft: of_draft, target: of_target });
    }
    let most = target.backend().few_rows() - 1;
    match ahead {
        Ahead::Fixed(ahead) if ahead == 0 || ahead > most => {
            Err(SpeculateError::Ahead { ahead, most, device: target.backend().device() })
        }
        _ => Ok(()),
    }
}

/// Weights that a token goes through.
pub fn weights(model: &Model) -> f64 {
    let of = |matrix: &crate::backend::Matrix| matrix.weight().rows() as f64 * matrix.weight().cols() as f64;
    let blocks: f64 = model.blocks.iter().flat_map(|block| block.matrices()).map(of).sum();
    blocks + model.config.vocab as f64 * model.config.hidden as f64
}

/// Generates up to `limit` tokens after `text` as the target would; each goes to `each`, which may stop it with `false`.
pub fn generate(
    target: &Model,
    with: &Speculation,
    text: &[u32],
    end: &[u32],
    limit: usize,
    sampler: &mut Sampler,
    each: &mut dyn FnMut(u32) -> bool,
) -> Result<(Stop, Rounds), SpeculateError> {
    let Speculation { draft, ahead, .. } = *with;
    check(target, draft, ahead)?;
    let capacity = capacity(target, text, limit)?;
    let mut told = Rounds::default();
    if limit == 0 {
        return Ok((Stop::Limit, told));
    }
    let of_draft = |error: EngineError| SpeculateError::Draft(error.into());
    let own = with.cache.clone().unwrap_or_else(|| CacheOptions::for_sequences(1, capacity));
    let mut other = CacheOptions::for_sequences(1, capacity.min(draft.config.max_positions));
    other.kind = own.kind;
    other.scales.clone_from(&with.draft_scales);
    let mut pair = Pair {
        target: Session::with(target, own)?,
        draft: Session::with(draft, other).map_err(of_draft)?,
        room: draft.config.max_positions,
        tokens: text.to_vec(),
    };
    let mut pace = Pace::new(ahead, target.backend().few_rows() - 1, weights(draft) / weights(target));
    pace.measured = sampler.is_greedy();
    let logits = pair.target.feed(text)?;
    let first = choose(target, sampler, &logits).map_err(GenerateError::from)?;
    let mut next = first.map_err(|error| broken(target, text, error))?;
    // The draft reads the prompt here, where neither `each` nor a clock of its caller sees it.
    if pace.next() > 0 && limit > 1 && text.len() < pair.room && !end.contains(&next) {
        pair.catch_up(0)?;
    }
    let mut written = 0;
    let stop = 'text: loop {
        if end.contains(&next) {
            break 'text Stop::End;
        }
        if !each(next) {
            break 'text Stop::Caller;
        }
        written += 1;
        if pair.target.len() == target.config.max_positions {
            break 'text Stop::Context;
        }
        if written == limit {
            break 'text Stop::Limit;
        }
        pair.tokens.push(next);
        // The last token is the target's own; the draft must have room for what it reads.
        let most = (limit - written - 1).min(capacity - pair.tokens.len());
        let of_draft = (pair.room + 1).saturating_sub(pair.tokens.len());
        let count = pace.next().min(most).min(of_draft);
        if count > 0 {
            let (began, prompt) = (Instant::now(), pair.draft.is_empty());
            pair.catch_up(1)?;
            told.draft_seconds += if prompt { 0.0 } else { began.elapsed().as_secs_f64() };
        }
        let began = Instant::now();
        let proposed = pair.propose(count, sampler)?;
        let after_draft = Instant::now();
        let verdict = pair.judge(&proposed, sampler)?;
        let seconds = [after_draft - began, after_draft.elapsed()].map(|time| time.as_secs_f64());
        told.draft_seconds += seconds[0];
        told.target_seconds += seconds[1];
        told.passes += 1;
        let count = proposed.tokens.len();
        pace.heard(count, verdict.accepted, seconds);
        if count > 0 {
            told.rounds.push(Round { at: written, proposed: count, accepted: verdict.accepted });
        }
        for &token in &proposed.tokens[..verdict.accepted] {
            if end.contains(&token) {
                break 'text Stop::End;
            }
            if !each(token) {
                break 'text Stop::Caller;
            }
            written += 1;
            pair.tokens.push(token);
        }
        pair.target.truncate(pair.tokens.len())?;
        let kept = pair.draft.len().min(pair.tokens.len());
        pair.draft.truncate(kept).map_err(|error| SpeculateError::Draft(error.into()))?;
        next = verdict.next;
    };
    let caches = [pair.target.cache(), pair.draft.cache()];
    told.unrecorded = caches.into_iter().filter_map(|cache| cache.unrecorded().map(String::from)).collect();
    Ok((stop, told))
}

/// Proposed tokens, with the distributions that they were drawn from unless they are the likeliest.
#[derive(Default)]
struct Proposed {
    tokens: Vec<u32>,
    distributions: Vec<Vec<(u32, f64)>>,
}

/// Both models on the same text. The target has read all of `tokens` but the last, the draft perhaps fewer.
struct Pair<'a> {
    target: Session<'a>,
    draft: Session<'a>,
    /// Tokens that the draft can read.
    room: usize,
    tokens: Vec<u32>,
}

impl Pair<'_> {
    /// The draft reads what it has not: the prompt, or what came while nothing was proposed. The last `but` tokens are
    /// left to the next proposal, and so are two, as there are wherever all proposals stood.
    fn catch_up(&mut self, but: usize) -> Result<(), SpeculateError> {
        let of_draft = |error: EngineError| SpeculateError::Draft(error.into());
        let unread = &self.tokens[self.draft.len()..self.tokens.len() - but];
        if self.draft.is_empty() || unread.len() > 1 {
            let logits = self.draft.feed(unread).map_err(of_draft)?;
            // Waits for a device to be done.
            self.draft.model().backend().argmax(&logits).map_err(|error| of_draft(error.into()))?;
        }
        Ok(())
    }

    fn propose(&mut self, count: usize, sampler: &mut Sampler) -> Result<Proposed, SpeculateError> {
        let mut proposed = Proposed::default();
        let Self { draft, tokens, .. } = self;
        for i in 0..count {
            let unread = if i == 0 { &tokens[draft.len()..] } else { &proposed.tokens[i - 1..] };
            let logits = draft.feed(unread).map_err(|error| SpeculateError::Draft(error.into()))?;
            let chosen = if sampler.is_greedy() {
                choose(draft.model(), sampler, &logits)
            } else {
                let logits = draft.model().backend().download(&logits).map_err(|e| EngineError::from(e).into());
                let drawn = sampler.distribution(&logits.map_err(SpeculateError::Draft)?).map(|distribution| {
                    let token = sampler.draw(&distribution);
                    proposed.distributions.push(distribution);
                    token
                });
                Ok(drawn)
            };
            let chosen = chosen.map_err(|error| SpeculateError::Draft(error.into()))?;
            let failed = |error| {
                let seen = [&tokens[..], &proposed.tokens].concat();
                SpeculateError::Draft(broken(draft.model(), &seen, error))
            };
            proposed.tokens.push(chosen.map_err(failed)?);
        }
        Ok(proposed)
    }

    /// Reads the last token and the proposals, and decides over those.
    fn judge(&mut self, proposed: &Proposed, sampler: &mut Sampler) -> Result<Verdict, SpeculateError> {
        let Some(last) = self.tokens.last() else { return Ok(Verdict { accepted: 0, next: 0 }) };
        let backend = self.target.model().backend();
        let logits = self.target.feed_each(&[std::slice::from_ref(last), &proposed.tokens].concat())?;
        let verdict = if sampler.is_greedy() {
            let likeliest = backend.argmax(&logits).map_err(EngineError::from)?;
            let stands = |(token, likeliest): &(&u32, &Option<u32>)| **likeliest == Some(**token);
            let accepted = proposed.tokens.iter().zip(&likeliest).take_while(stands).count();
            match likeliest[accepted] {
                Some(next) => Ok(Verdict { accepted, next }),
                None => {
                    let row = backend.rows(&logits, &[accepted]).and_then(|row| backend.download(&row));
                    greedy(&row.map_err(EngineError::from)?).map(|next| Verdict { accepted, next })
                }
            }
        } else {
            let logits = backend.download(&logits).map_err(EngineError::from)?;
            let rows = logits.chunks(self.target.model().config.vocab);
            let target = rows.map(|row| sampler.distribution(row)).collect::<Result<Vec<_>, SamplerError>>();
            target.map(|target| verify(sampler, &proposed.tokens, &proposed.distributions, &target))
        };
        Ok(verdict.map_err(|error| {
            let seen = [&self.tokens[..], &proposed.tokens].concat();
            broken(self.target.model(), &seen, error)
        })?)
    }
}

/// Chooses how many tokens are proposed.
struct Pace {
    ahead: Ahead,
    most: usize,
    /// Whether seconds count.
    measured: bool,
    /// Proposals that were looked at, and those that stood, older ones counting less.
    seen: f64,
    stood: f64,
    /// Since something was proposed.
    idle: usize,
    /// Whether there was a round with proposals. The first is not timed: it does what is done once, such as recording.
    warm: bool,
    /// A token of the draft by one of the target, going by the models' sizes.
    sizes: f64,
    /// A pass of the draft.
    draft: Average,
    /// Verifications, by the proposals in them.
    target: [Average; MOST_AHEAD + 1],
}

/// A mean of seconds, older ones counting less.
#[derive(Clone, Copy, Default)]
struct Average {
    sum: f64,
    count: f64,
}

impl Average {
    fn fade(&mut self) {
        self.sum *= MEMORY;
        self.count *= MEMORY;
    }

    fn add(&mut self, value: f64, count: f64) {
        self.sum += value;
        self.count += count;
    }

    fn mean(&self) -> Option<f64> {
        (self.count > FORGOTTEN).then(|| self.sum / self.count)
    }
}

impl Pace {
    fn new(ahead: Ahead, most: usize, sizes: f64) -> Self {
        let (draft, target) = Default::default();
        Self { ahead, most, measured: false, seen: 0.0, stood: 0.0, idle: 0, warm: false, sizes, draft, target }
    }

    fn next(&self) -> usize {
        if let Ahead::Fixed(ahead) = self.ahead {
            return ahead;
        }
        let alpha = (self.stood + PRIOR) / (self.seen + 2.0 * PRIOR);
        let (draft, first, more) = self.costs();
        // Tokens by cost: the first of equals.
        let mut best = (0, 0.0);
        let mut tokens = 0.0;
        for ahead in 0..=self.most.min(MOST_AHEAD) {
            tokens += alpha.powi(ahead as i32);
            let worth = tokens / (ahead as f64 * (draft + more) + first);
            if worth > best.1 {
                best = (ahead, worth);
            }
        }
        if best.0 == 0 && self.idle + 1 >= PROBE { 1 } else { best.0 }
    }

    /// What a proposal, a verification of none, and each proposal in one cost.
    fn costs(&self) -> (f64, f64, f64) {
        let known = self.target.iter().enumerate().filter_map(|(ahead, a)| Some((ahead as f64, a.mean()?, a.count)));
        let by_size = (self.sizes, 1.0, 0.0);
        let (Some(draft), true) = (self.draft.mean(), self.measured) else { return by_size };
        // The line through all means.
        let [n, x, y] = known.clone().fold([0.0; 3], |[n, x, y], (a, t, w)| [n + w, x + w * a, y + w * t]);
        let (x, y) = (x / n, y / n);
        let (xx, xy) =
            known.fold((0.0, 0.0), |(xx, xy), (a, t, w)| (xx + w * (a - x).powi(2), xy + w * (a - x) * (t - y)));
        let more = if xx > 0.0 { (xy / xx).max(0.0) } else { 0.0 };
        let first = y - more * x;
        if first > 0.0 { (draft, first, more) } else { (draft, y, 0.0) }
    }

    /// `draft` are the seconds of as many passes as there were proposals.
    fn heard(&mut self, proposed: usize, accepted: usize, [draft, target]: [f64; 2]) {
        self.idle = if proposed == 0 { self.idle + 1 } else { 0 };
        if proposed > 0 {
            let seen = (accepted + 1).min(proposed);
            self.seen = self.seen * MEMORY + seen as f64;
            self.stood = self.stood * MEMORY + accepted as f64;
        }
        let warm = self.warm;
        self.warm |= proposed > 0;
        if !warm {
            return;
        }
        // Old times are no more true where nothing was proposed since.
        self.target.iter_mut().chain([&mut self.draft]).for_each(Average::fade);
        if proposed > 0 {
            self.draft.add(draft, proposed as f64);
        }
        if let Some(average) = self.target.get_mut(proposed) {
            average.add(target, 1.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pace after many rounds in which proposals stand with a probability, in thirds, and passes cost so much.
    fn settled(stands: usize, draft: f64, target: impl Fn(usize) -> f64, measured: bool) -> usize {
        let mut pace = Pace::new(Ahead::Auto, 15, 0.1);
        pace.measured = measured;
        let mut drawn = 0;
        for _ in 0..400 {
            let ahead = pace.next();
            let accepted = (0..ahead).take_while(|_| {
                drawn += 1;
                drawn * 7919 % 101 % 3 < stands
            });
            let accepted = accepted.count();
            pace.heard(ahead, accepted, [draft * ahead as f64, target(ahead)]);
        }
        pace.next()
    }

    #[test]
    fn more_is_proposed_where_more_stands() {
        let flat = |_| 1.0;
        let (all, some) = (settled(3, 0.1, flat, true), settled(1, 0.1, flat, true));
        assert_eq!(all, MOST_AHEAD);
        assert!((1..4).contains(&some), "{some}");
        // Nothing stands: nothing, but for a probe now and then.
        assert!(settled(0, 0.1, flat, true) <= 1);
    }

    #[test]
    fn costs_count_where_they_may() {
        // A draft as slow as its target gains nothing, nor does a target whose passes are as long as their rows.
        assert!(settled(2, 1.0, |_| 1.0, true) <= 1);
        assert!(settled(1, 0.2, |ahead| 1.0 + ahead as f64, true) <= 1);
        // Without a clock the sizes decide, whatever passes cost.
        assert_eq!(settled(2, 1.0, |_| 1.0, false), settled(2, 0.001, |ahead| ahead as f64 + 1.0, false));
    }

    #[test]
    fn one_slow_round_does_not_end_it() {
        let rounds = |slow: usize| {
            let mut pace = Pace::new(Ahead::Auto, 15, 0.2);
            pace.measured = true;
            let mut without = 0;
            for round in 0..60 {
                let ahead = pace.next();
                without += usize::from(ahead == 0);
                let draft = if round == slow { 40.0 } else { 0.2 * ahead as f64 };
                pace.heard(ahead, ahead.min(2), [draft, 1.0]);
            }
            (without, pace.next())
        };
        // The first, in which all is done for the first time, is not counted.
        assert_eq!(rounds(0), rounds(100));
        assert_eq!(rounds(0).0, 0);
        // Nor is another one remembered for ever, however seldom it is asked since.
        let mut pace = Pace::new(Ahead::Auto, 15, 0.2);
        pace.measured = true;
        for round in 0..200 {
            let ahead = pace.next();
            let draft = if round == 1 { 40.0 } else { 0.2 * ahead as f64 };
            pace.heard(ahead, ahead.min(2), [draft, 1.0]);
        }
        assert!(pace.next() > 1, "{}", pace.next());
    }

    #[test]
    fn a_fixed_number_stays() {
        assert_eq!(Pace::new(Ahead::Fixed(3), 15, 1.0).next(), 3);
        assert!(Pace::new(Ahead::Auto, 2, 0.01).next() <= 2);
    }

    #[test]
    fn rates_are_of_what_was_drafted() {
        let round = |proposed, accepted| Round { at: 0, proposed, accepted };
        let told = Rounds { rounds: vec![round(4, 4), round(4, 0), round(2, 1)], ..Rounds::default() };
        assert_eq!((told.drafted(), told.accepted(), told.acceptance_rate()), (10, 5, Some(0.5)));
        assert_eq!(Rounds::default().acceptance_rate(), None);
    }
}
