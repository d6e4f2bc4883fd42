//! What is kept of one prediction of the reference, and what it tells about the divergence of another model.
//!
//! Kept are the likeliest tokens with their log-probabilities, the mass of all others (the tail), and a few tokens drawn
//! from the tail. With p of the reference, q of the artifact, T the tail and P, Q its masses, the chain rule gives
//!
//! ```text
//! KL(p || q) = sum over kept p ln(p / q) + P ln(P / Q)  +  P KL(p / P || q / Q on T)
//! ```
//!
//! The first two terms are known. The last is not negative, so that they are a lower bound. As log q is known for every
//! token and S = sum over T of p ln p is kept, an upper bound is `kept + S - P ln(least q on T)`. Between them the last
//! term is estimated from the drawn tokens as the mean of `r - 1 - ln r`, r = (q / Q) / (p / P): each value is at least
//! 0, and since the mean of r under p / P is 1, the estimate has no bias.

use std::cmp::Ordering;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::evaluate::divergence::{Position, Within};

/// The largest number of kept tokens that a file can hold.
pub const MOST: usize = u16::MAX as usize;

/// How much is kept of each prediction.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Tokens are kept, the likeliest first, until the others have less than this mass,
    pub tail: f64,
    /// but never more than so many. From 1 to [`MOST`].
    pub most: usize,
}

impl Default for Settings {
    fn default() -> Self {
        // Language leaves several percent of the mass to thousands of tokens: more kept tokens make a larger file, and
        // draws tell about the rest with less.
        Self { tail: 0.01, most: 64 }
    }
}

/// A token outside the kept ones is drawn for each so much mass of the tail,
const MASS_PER_SAMPLE: f64 = 1e-3;
/// but not fewer and not more than so many,
const SAMPLES: std::ops::RangeInclusive<usize> = 4..=32;
/// and none from a tail below this mass, whose inner divergence then counts as none.
const LEAST_SAMPLED: f64 = 1e-5;

/// What is kept of one prediction. Logarithms are natural.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// The likeliest tokens, the likeliest first, of equals the lowest id first.
    pub ids: Vec<u32>,
    /// Their log-probabilities.
    pub log_probs: Vec<f32>,
    /// Log of the mass of all other tokens; negative infinity if there are none.
    pub tail_log_mass: f64,
    /// Sum of p ln p over them.
    pub tail_log_sum: f64,
    /// Log-probability of the true token.
    pub target_log_prob: f64,
    /// Tokens of the tail, drawn by their probabilities, with their log-probabilities. One may come several times.
    pub drawn: Vec<(u32, f32)>,
}

impl Record {
    /// Keeps of a row of finite logits what `settings` says. Which tokens are drawn depends on `seed` and the row alone.
    ///
    /// # Panics
    /// If the row is empty, or `target` is outside.
    pub fn of(logits: &[f32], target: u32, seed: u64, settings: Settings) -> Self {
        let log_sum = log_sum(logits.iter().map(|&x| f64::from(x)));
        let log_prob = |token: usize| f64::from(logits[token]) - log_sum;
        let ids = likeliest(logits, &|token| log_prob(token as usize).exp(), settings);
        let mut rest = vec![true; logits.len()];
        ids.iter().for_each(|&id| rest[id as usize] = false);
        let tail = || (0..logits.len()).filter(|&token| rest[token]);
        let tail_log_mass = self::log_sum(tail().map(log_prob));
        let tail_log_sum = tail().map(|token| log_prob(token).exp() * log_prob(token)).sum();
        let mass = tail_log_mass.exp();
        let count = match mass < LEAST_SAMPLED {
            true => 0,
            false => ((mass / MASS_PER_SAMPLE).ceil() as usize).clamp(*SAMPLES.start(), *SAMPLES.end()),
        };
        let drawn = draw(tail().map(|token| (token as u32, log_prob(token))), mass, count, seed);
        Self {
            log_probs: ids.iter().map(|&id| log_prob(id as usize) as f32).collect(),
            ids,
            tail_log_mass,
            tail_log_sum,
            target_log_prob: log_prob(target as usize),
            drawn,
        }
    }

    /// Compares with a row of the artifact's logits. All but the divergence is exact; that is an estimate, with what it
    /// lies within.
    ///
    /// # Panics
    /// If an id, or `target`, is outside the row.
    pub fn compare(&self, artifact: &[f32], target: u32) -> Position {
        let log_sum = log_sum(artifact.iter().map(|&x| f64::from(x)));
        let log_q = |token: u32| f64::from(artifact[token as usize]) - log_sum;
        let mut rest = vec![true; artifact.len()];
        let mut kept = 0.0;
        for (&id, &log_p) in self.ids.iter().zip(&self.log_probs) {
            rest[id as usize] = false;
            let log_p = f64::from(log_p);
            kept += log_p.exp() * (log_p - log_q(id));
        }
        let tail = || artifact.iter().zip(&rest).filter_map(|(&x, &is)| is.then_some(f64::from(x) - log_sum));
        let (mut least, mut estimate, mut variance, mut most) = (kept, 0.0, 0.0, kept);
        if self.tail_log_mass > f64::NEG_INFINITY {
            let (mass, log_mass) = (self.tail_log_mass.exp(), self::log_sum(tail()));
            least += mass * (self.tail_log_mass - log_mass);
            most += self.tail_log_sum - mass * tail().fold(f64::INFINITY, f64::min);
            let inner = self.drawn.iter().map(|&(id, log_p)| {
                let log_r = (log_q(id) - log_mass) - (f64::from(log_p) - self.tail_log_mass);
                log_r.exp_m1() - log_r
            });
            let n = self.drawn.len() as f64;
            if n > 0.0 {
                let mean = inner.clone().sum::<f64>() / n;
                let squares: f64 = inner.map(|x| (x - mean) * (x - mean)).sum();
                estimate = mass * mean;
                variance = mass * mass * squares / (n - 1.0).max(1.0) / n;
            }
        }
        // Only rounding makes the one negative, or larger than the other.
        let least = least.max(0.0);
        let most = most.max(least);
        let nll_artifact = -log_q(target);
        Position {
            kl: (least + estimate).min(most),
            same_top: self.ids.first() == Some(&top(artifact)),
            delta_p: (-nll_artifact).exp() - self.target_log_prob.exp(),
            nll_reference: -self.target_log_prob,
            nll_artifact,
            within: Some(Within { least, most, variance }),
        }
    }
}

/// ln of the sum of exponentials; negative infinity of nothing.
fn log_sum(values: impl Iterator<Item = f64> + Clone) -> f64 {
    let max = values.clone().fold(f64::NEG_INFINITY, f64::max);
    if max == f64::NEG_INFINITY { max } else { max + values.map(|x| (x - max).exp()).sum::<f64>().ln() }
}

/// The first of the largest.
fn top(row: &[f32]) -> u32 {
    row.iter().enumerate().fold(0, |top, (i, &x)| if x > row[top] { i } else { top }) as u32
}

/// The tokens to keep, in their order.
fn likeliest(logits: &[f32], prob: &dyn Fn(u32) -> f64, settings: Settings) -> Vec<u32> {
    let order = |a: &u32, b: &u32| -> Ordering {
        let value = |id: &u32| logits[*id as usize];
        value(b).partial_cmp(&value(a)).unwrap_or(Ordering::Equal).then(a.cmp(b))
    };
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    let most = settings.most.clamp(1, MOST);
    if most < ids.len() {
        ids.select_nth_unstable_by(most, order);
        ids.truncate(most);
    }
    ids.sort_unstable_by(order);
    let mut left = 1.0;
    let full = ids.iter().position(|&id| {
        left -= prob(id);
        left < settings.tail
    });
    ids.truncate(full.map_or(ids.len(), |at| at + 1));
    ids
}

/// `count` tokens of a tail of this mass, by systematic sampling: points one step apart from a random start, each
/// giving the token in whose share it falls.
fn draw(tail: impl Iterator<Item = (u32, f64)>, mass: f64, count: usize, seed: u64) -> Vec<(u32, f32)> {
    let mut drawn = Vec::with_capacity(count);
    if count == 0 {
        return drawn;
    }
    let step = mass / count as f64;
    let start = ChaCha8Rng::seed_from_u64(seed).next_u64() >> 11;
    let mut next = step * (start as f64 / (1u64 << 53) as f64);
    let (mut sum, mut last) = (0.0, None);
    for (id, log_p) in tail {
        sum += log_p.exp();
        while sum > next && drawn.len() < count {
            drawn.push((id, log_p as f32));
            next += step;
        }
        last = Some((id, log_p as f32));
    }
    // The sum may end a rounding short of the mass.
    drawn.extend(std::iter::repeat_n(last, count - drawn.len()).flatten());
    drawn
}
