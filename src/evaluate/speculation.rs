//! A target and its draft at work: the figures of [`super::acceptance`], measured.

use std::error::Error;
use std::time::Instant;

use thiserror::Error;

use super::acceptance::{
    AcceptanceError, AcceptanceFigures, Cost, MOST_AHEAD, Mean, MeasuredSpeed, Speed, chains, expected_speedup,
    on_text, replay,
};
use super::cache_error::Setting;
use super::windows::Window;
use crate::engine::cache::CacheOptions;
use crate::engine::generate::{GenerateError, Session, Stop, capacity, generate_in};
use crate::engine::sampler::{Sampler, SamplerError, SamplerOptions};
use crate::engine::speculate::{self, Ahead, Round, SpeculateError, Speculation, weights};
use crate::model::Model;

/// Prompts whose continuation by the draft tells what its tokens cost.
const TIMED: usize = 4;

/// What is to be measured.
pub struct Task<'a> {
    /// Each is continued by the target.
    pub prompts: &'a [Vec<u32>],
    /// Tokens that end a text.
    pub end: &'a [u32],
    /// Tokens of each continuation at most.
    pub max_tokens: usize,
    /// A given text for both to read; none without windows.
    pub windows: &'a [Window],
    /// How tokens are chosen; the seed is that of the first prompt.
    pub options: SamplerOptions,
    /// Proposals at a time that the main figures are of, 1 to [`MOST_AHEAD`].
    pub ahead: usize,
    /// How keys and values of the target and the draft are stored, where it is not to be as by default.
    pub caches: Option<&'a [Setting; 2]>,
    /// Whether speculation is run for each number of proposals, to see how fast it is.
    pub speeds: bool,
}

/// Why it was not measured.
#[derive(Debug, Error)]
pub enum SpeculationError {
    #[error(transparent)]
    Acceptance(#[from] AcceptanceError),
    // Not transparent: that would hide the cause that decides the exit code.
    #[error("{0}")]
    Speculate(#[from] SpeculateError),
    #[error("{0}")]
    Generate(#[from] GenerateError),
    #[error(transparent)]
    Sampler(#[from] SamplerError),
    #[error("{0} proposals at a time; figures are given for 1 to {MOST_AHEAD}")]
    Ahead(usize),
    #[error("there is no prompt to continue")]
    NoPrompts,
    #[error("stopped")]
    Stopped(#[source] Box<dyn Error + Send + Sync>),
}

/// A text that the target wrote by itself.
struct Written {
    tokens: Vec<u32>,
    /// Whether an end token came after them.
    ended: Option<u32>,
    /// Seconds from the first token on to each.
    seconds: Vec<f64>,
    /// Tokens before the first loop.
    sound: usize,
}

/// Measures everything. `progress` hears how much of how much is done, and may stop the work.
pub fn measure<E>(
    target: &Model,
    draft: &Model,
    task: &Task,
    progress: &mut dyn FnMut(usize, usize) -> Result<(), E>,
) -> Result<AcceptanceFigures, SpeculationError>
where
    E: Into<Box<dyn Error + Send + Sync>>,
{
    if !(1..=MOST_AHEAD).contains(&task.ahead) {
        return Err(SpeculationError::Ahead(task.ahead));
    }
    if task.prompts.is_empty() {
        return Err(SpeculationError::NoPrompts);
    }
    speculate::check(target, draft, Ahead::Fixed(task.ahead))?;
    let rounds = 1 + if task.speeds { MOST_AHEAD } else { 0 };
    let all = task.windows.len() + task.prompts.len() * rounds;
    let mut done = 0;
    let mut stopped = None;
    let mut go_on = |more: usize| {
        let answer = progress(done, all).map_err(Into::into);
        done += more;
        answer
    };
    let text = if task.windows.is_empty() {
        None
    } else {
        let mut before = 0;
        let found = on_text(target, draft, task.caches, task.windows, &mut |now, _| {
            let more = now - before;
            before = now;
            go_on(more)
        })?;
        go_on(task.windows.len() - before).map_err(SpeculationError::Stopped)?;
        Some(found)
    };
    let mut written = Vec::with_capacity(task.prompts.len());
    for (i, prompt) in task.prompts.iter().enumerate() {
        written.push(alone(target, 0, prompt, task, i)?);
        go_on(1).map_err(SpeculationError::Stopped)?;
    }
    let texts: Vec<(Vec<u32>, Vec<u32>)> = task
        .prompts
        .iter()
        .zip(&written)
        .map(|(prompt, text)| (prompt.clone(), text.tokens.iter().copied().chain(text.ended).collect()))
        .collect();
    let chains = chains(target, draft, task.caches, &texts, task.options)?;
    for (text, chain) in written.iter_mut().zip(&chains) {
        text.sound = chain.looped.iter().take(text.tokens.len()).position(|l| *l).unwrap_or(text.tokens.len());
    }
    let replays: Vec<_> = (1..=MOST_AHEAD).map(|ahead| replay(&chains, ahead)).collect();
    let counted: Vec<f64> = chains
        .iter()
        .flat_map(|chain| chain.overlap.iter().zip(&chain.looped).filter(|(_, looped)| !**looped).map(|(o, _)| *o))
        .collect();
    let overlap = (!counted.is_empty()).then(|| Mean::of(counted.into_iter()));

    // What is timed are the tokens after the first, which the prompt gives, and before any loop.
    let (mut tokens, mut seconds) = (0, 0.0);
    for text in &written {
        tokens += text.sound.saturating_sub(1);
        seconds += text.sound.checked_sub(1).map_or(0.0, |last| text.seconds[last]);
    }
    let plain = rate(tokens, seconds);
    let (mut draft_tokens, mut draft_seconds) = (0, 0.0);
    let fits = |(_, prompt): &(usize, &Vec<u32>)| prompt.len() < draft.config.max_positions;
    for (i, prompt) in task.prompts.iter().enumerate().filter(fits).take(TIMED) {
        let text = alone(draft, 1, prompt, task, i).map_err(SpeculateError::Draft)?;
        draft_tokens += text.seconds.len().saturating_sub(1);
        draft_seconds += text.seconds.last().copied().unwrap_or(0.0);
    }
    let per = |seconds: f64, tokens: usize| rate(tokens, seconds).map(f64::recip);
    let (of_target, of_draft) = (per(seconds, tokens), per(draft_seconds, draft_tokens));
    let cost = Cost {
        target_seconds: of_target,
        draft_seconds: of_draft,
        ratio: of_draft.zip(of_target).map(|(draft, target)| draft / target),
        size_ratio: weights(target) / weights(draft),
    };
    let mut speeds = Vec::new();
    for found in &replays {
        let ahead = found.ahead;
        let measured = if task.speeds {
            Some(together(target, draft, task, &written, ahead, plain, &mut |more| {
                go_on(more).map_err(|why| stopped = Some(why)).is_ok()
            })?)
        } else {
            None
        };
        if let Some(why) = stopped.take() {
            return Err(SpeculationError::Stopped(why));
        }
        speeds.push(Speed {
            ahead,
            expected_speedup: overlap
                .zip(cost.ratio)
                .map(|(overlap, ratio)| expected_speedup(overlap.mean, ratio, ahead)),
            replayed_speedup: cost
                .ratio
                .filter(|_| found.drafted > 0.0)
                .map(|ratio| found.mean_length / (ahead as f64 * ratio + 1.0)),
            measured,
        });
    }
    let SamplerOptions { temperature, top_p, top_k, seed } = task.options;
    let main = replays[task.ahead - 1].clone();
    Ok(AcceptanceFigures {
        temperature,
        top_p,
        top_k,
        seed,
        prompts: task.prompts.len(),
        tokens: texts.iter().map(|(_, text)| text.len()).sum(),
        looped: chains.iter().flat_map(|chain| &chain.looped).filter(|looped| **looped).count(),
        ahead: task.ahead,
        acceptance_rate: main.acceptance_rate,
        mean_length: main.mean_length,
        per_position: main.per_position,
        overlap,
        replays,
        text,
        plain_tokens_per_second: plain,
        cost,
        speeds,
    })
}

/// Tokens per second, where there are any.
fn rate(tokens: usize, seconds: f64) -> Option<f64> {
    (tokens > 0 && seconds > 0.0).then(|| tokens as f64 / seconds)
}

/// The sampler of a prompt.
fn sampler(task: &Task, prompt: usize) -> Result<Sampler, SamplerError> {
    Sampler::new(SamplerOptions { seed: task.options.seed.wrapping_add(prompt as u64), ..task.options })
}

/// The cache of one sequence of the target (0) or the draft (1).
fn cache(task: &Task, side: usize, capacity: usize) -> CacheOptions {
    let options = CacheOptions::for_sequences(1, capacity);
    match task.caches {
        Some(settings) => {
            let Setting { kind, scales } = settings[side].clone();
            CacheOptions { kind: Some(kind), scales, ..options }
        }
        None => options,
    }
}

/// One model's continuation of a prompt.
fn alone(model: &Model, side: usize, prompt: &[u32], task: &Task, number: usize) -> Result<Written, GenerateError> {
    let mut session = Session::with(model, cache(task, side, capacity(model, prompt, task.max_tokens)?))?;
    let mut sampler = sampler(task, number)?;
    let (mut tokens, mut seconds, mut began) = (Vec::new(), Vec::new(), None);
    // An end token is taken for one of the text, since it is one that a draft can have proposed.
    let stop = generate_in(&mut session, prompt, &[], task.max_tokens, &mut sampler, &mut |token| {
        let began: &Instant = began.get_or_insert_with(Instant::now);
        seconds.push(began.elapsed().as_secs_f64());
        tokens.push(token);
        !task.end.contains(&token)
    })?;
    let ended = if stop == Stop::Caller { tokens.pop() } else { None };
    seconds.truncate(tokens.len());
    Ok(Written { sound: tokens.len(), tokens, ended, seconds })
}

/// The same prompts with the draft, each as far as its text by itself did not repeat itself. As for the target by itself,
/// the clock starts at the first token, which comes once both have read the prompt.
fn together(
    target: &Model,
    draft: &Model,
    task: &Task,
    written: &[Written],
    ahead: usize,
    plain: Option<f64>,
    go_on: &mut dyn FnMut(usize) -> bool,
) -> Result<MeasuredSpeed, SpeculationError> {
    let greedy = task.options.temperature == 0.0;
    let (mut tokens, mut seconds, mut identical) = (0, 0.0, true);
    let mut rounds: Vec<Round> = Vec::new();
    for (i, (prompt, text)) in task.prompts.iter().zip(written).enumerate() {
        if !go_on(1) {
            return Ok(MeasuredSpeed::default());
        }
        let mut sampler = sampler(task, i)?;
        let (mut own, mut began, mut last) = (Vec::new(), None, 0.0);
        let of_target = match task.caches {
            Some(_) => Some(cache(task, 0, capacity(target, prompt, text.sound)?)),
            None => None,
        };
        let draft_scales = task.caches.and_then(|settings| settings[1].scales.clone());
        let with = Speculation { draft, ahead: Ahead::Fixed(ahead), cache: of_target, draft_scales };
        let each = &mut |token| {
            let began: &Instant = began.get_or_insert_with(Instant::now);
            last = began.elapsed().as_secs_f64();
            own.push(token);
            true
        };
        let (_, told) = speculate::generate(target, &with, prompt, task.end, text.sound, &mut sampler, each)?;
        tokens += own.len().saturating_sub(1);
        seconds += last;
        identical &= own == text.tokens[..text.sound];
        rounds.extend(told.rounds);
    }
    let share = |of: usize, all: usize| if all > 0 { of as f64 / all as f64 } else { 0.0 };
    let (drafted, accepted) = rounds.iter().fold((0, 0), |(d, a), r| (d + r.proposed, a + r.accepted));
    let rate = rate(tokens, seconds);
    Ok(MeasuredSpeed {
        tokens_per_second: rate,
        speedup: rate.zip(plain).map(|(rate, plain)| rate / plain),
        acceptance_rate: share(accepted, drafted),
        mean_length: 1.0 + share(accepted, rounds.len()),
        per_position: (0..ahead)
            .map(|i| share(rounds.iter().filter(|r| r.accepted > i).count(), rounds.len()))
            .collect(),
        identical: greedy.then_some(identical),
    })
}
