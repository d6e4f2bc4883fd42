//! From logits to the next token.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use thiserror::Error;

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplerOptions {
    /// Divides the logits; 0 always takes the most likely token.
    pub temperature: f64,
    /// Keeps the most likely tokens until their mass reaches this; 1 keeps all.
    pub top_p: f64,
    /// Keeps this many of the most likely tokens; 0 keeps all.
    pub top_k: usize,
    pub seed: u64,
}

impl Default for SamplerOptions {
    fn default() -> Self {
        Self { temperature: 0.0, top_p: 1.0, top_k: 0, seed: 0 }
    }
}

/// Why no token could be chosen.
#[derive(Debug, Error, PartialEq)]
pub enum SamplerError {
    #[error("temperature {0} makes no sense; give 0 (greedy) or a positive number")]
    Temperature(f64),
    #[error("top-p {0} makes no sense; give a number above 0 and at most 1")]
    TopP(f64),
    #[error("the logit of token {token} is {value}: the model's output is broken, so no token can be chosen")]
    BrokenLogit { token: usize, value: f32 },
    #[error("no token has a finite logit among {0}")]
    NoCandidate(usize),
}

/// Chooses tokens: temperature, then top-k, then top-p, in Hugging Face's order. Two samplers with the same
/// options choose the same tokens from the same logits, on any platform.
#[derive(Clone, Debug)]
pub struct Sampler {
    options: SamplerOptions,
    rng: ChaCha8Rng,
}

impl Sampler {
    pub fn new(options: SamplerOptions) -> Result<Self, SamplerError> {
        if !(options.temperature.is_finite() && options.temperature >= 0.0) {
            return Err(SamplerError::Temperature(options.temperature));
        }
        if !(options.top_p > 0.0 && options.top_p <= 1.0) {
            return Err(SamplerError::TopP(options.top_p));
        }
        Ok(Self { options, rng: ChaCha8Rng::seed_from_u64(options.seed) })
    }

    /// Whether the likeliest token is taken every time.
    pub fn is_greedy(&self) -> bool {
        self.options.temperature == 0.0
    }

    /// The next token.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, SamplerError> {
        if self.options.temperature == 0.0 {
            return greedy(logits);
        }
        let candidates = self.distribution(logits)?;
        Ok(self.draw(&candidates))
    }

    /// The tokens that may come next with their probabilities, which sum to 1. Greedy: the one token.
    /// In token order, or from the most likely down where top-k or top-p cut.
    pub fn distribution(&self, logits: &[f32]) -> Result<Vec<(u32, f64)>, SamplerError> {
        let best = greedy(logits)?;
        let SamplerOptions { temperature, top_p, top_k, .. } = self.options;
        if temperature == 0.0 {
            return Ok(vec![(best, 1.0)]);
        }
        let max = f64::from(logits[best as usize]);
        let weigh = |(id, &logit): (usize, &f32)| (id as u32, ((f64::from(logit) - max) / temperature).exp());
        let mut candidates: Vec<(u32, f64)> = logits.iter().enumerate().map(weigh).collect();
        let falling = |a: &(u32, f64), b: &(u32, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if top_k > 0 && top_k < candidates.len() {
            candidates.select_nth_unstable_by(top_k - 1, falling);
            candidates.truncate(top_k);
            candidates.sort_unstable_by(falling);
        }
        if top_p < 1.0 {
            candidates.sort_unstable_by(falling);
            let wanted = top_p * mass(&candidates);
            let mut reached = 0.0;
            let kept = candidates.iter().take_while(|(_, weight)| {
                let open = reached < wanted;
                reached += weight;
                open
            });
            let kept = kept.count().max(1);
            candidates.truncate(kept);
        }
        let total = mass(&candidates);
        candidates.iter_mut().for_each(|(_, weight)| *weight /= total);
        Ok(candidates)
    }

    /// One token of a distribution with at least one entry.
    pub fn draw(&mut self, candidates: &[(u32, f64)]) -> u32 {
        let mut left = self.uniform();
        let mut last = 0;
        for &(id, probability) in candidates.iter().filter(|(_, probability)| *probability > 0.0) {
            last = id;
            left -= probability;
            if left < 0.0 {
                break;
            }
        }
        last
    }

    /// A number from 0 up to, not including, 1, in steps of 2^-53.
    pub fn uniform(&mut self) -> f64 {
        (self.rng.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }
}

fn mass(candidates: &[(u32, f64)]) -> f64 {
    candidates.iter().map(|(_, weight)| weight).sum()
}

/// The token with the largest logit, the lowest of equals. Tokens with a logit of minus infinity are excluded
/// ones; NaN and plus infinity are errors.
pub fn greedy(logits: &[f32]) -> Result<u32, SamplerError> {
    let mut best = (0, f32::NEG_INFINITY);
    for (token, &value) in logits.iter().enumerate() {
        if value.is_nan() || value == f32::INFINITY {
            return Err(SamplerError::BrokenLogit { token, value });
        }
        if value > best.1 {
            best = (token, value);
        }
    }
    if best.1 == f32::NEG_INFINITY { Err(SamplerError::NoCandidate(logits.len())) } else { Ok(best.0 as u32) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(temperature: f64, top_p: f64, top_k: usize, seed: u64) -> Sampler {
        match Sampler::new(SamplerOptions { temperature, top_p, top_k, seed }) {
            Ok(sampler) => sampler,
            Err(e) => panic!("{e}"),
        }
    }

    /// Logits of probabilities 0.4, 0.1, 0.3, 0.2.
    fn logits() -> [f32; 4] {
        [0.4f32, 0.1, 0.3, 0.2].map(f32::ln)
    }

    fn ids(list: Result<Vec<(u32, f64)>, SamplerError>) -> Vec<u32> {
        list.unwrap_or_default().into_iter().map(|(id, _)| id).collect()
    }

    #[test]
    fn greedy_takes_the_lowest_of_equals() {
        assert_eq!(sampler(0.0, 1.0, 0, 0).sample(&[1.0, 3.0, 3.0, -1.0]), Ok(1));
        assert_eq!(greedy(&[f32::NEG_INFINITY, -5.0]), Ok(1));
    }

    #[test]
    fn broken_logits_are_errors() {
        let nan = sampler(1.0, 1.0, 0, 0).sample(&[0.0, f32::NAN]);
        assert!(matches!(nan, Err(SamplerError::BrokenLogit { token: 1, .. })));
        assert!(matches!(greedy(&[f32::INFINITY]), Err(SamplerError::BrokenLogit { token: 0, .. })));
        assert_eq!(greedy(&[f32::NEG_INFINITY; 3]), Err(SamplerError::NoCandidate(3)));
        assert_eq!(greedy(&[]), Err(SamplerError::NoCandidate(0)));
    }

    #[test]
    fn options_are_checked() {
        let new = |temperature, top_p| Sampler::new(SamplerOptions { temperature, top_p, ..Default::default() }).err();
        assert_eq!(new(-1.0, 1.0), Some(SamplerError::Temperature(-1.0)));
        assert_eq!(new(1.0, 0.0), Some(SamplerError::TopP(0.0)));
        assert!(new(1.0, f64::NAN).is_some() && new(f64::NAN, 1.0).is_some());
    }

    #[test]
    fn top_p_keeps_the_token_that_crosses_the_mass() {
        assert_eq!(ids(sampler(1.0, 0.65, 0, 0).distribution(&logits())), [0, 2]);
        assert_eq!(ids(sampler(1.0, 0.75, 0, 0).distribution(&logits())), [0, 2, 3]);
        assert_eq!(ids(sampler(1.0, 1e-9, 0, 0).distribution(&logits())), [0]);
        let kept = sampler(1.0, 0.65, 0, 0).distribution(&logits()).unwrap_or_default();
        assert!((kept[0].1 - 0.4 / 0.7).abs() < 1e-7 && (kept[1].1 - 0.3 / 0.7).abs() < 1e-7, "{kept:?}");
    }

    #[test]
    fn top_k_cuts_before_top_p() {
        assert_eq!(ids(sampler(1.0, 1.0, 3, 0).distribution(&logits())), [0, 2, 3]);
        // Among the best three, 0.4 of 0.9 is below one half, so a second token is needed; 0.7 of 0.9 suffices.
        assert_eq!(ids(sampler(1.0, 0.5, 3, 0).distribution(&logits())), [0, 2]);
    }

    #[test]
    fn temperature_sharpens() {
        // At temperature 1/2 probabilities are squared: 16, 1, 9, 4 of 30.
        let got = sampler(0.5, 1.0, 0, 0).distribution(&logits()).unwrap_or_default();
        for ((_, p), wanted) in got.iter().zip([16.0, 1.0, 9.0, 4.0]) {
            assert!((p - wanted / 30.0).abs() < 1e-6, "{got:?}");
        }
    }

    #[test]
    fn draws_follow_the_distribution() {
        let mut sampler = sampler(1.0, 1.0, 0, 7);
        let n = 20_000;
        let mut counts = [0usize; 4];
        for _ in 0..n {
            counts[sampler.sample(&logits()).unwrap_or_default() as usize] += 1;
        }
        let chi2: f64 = [0.4, 0.1, 0.3, 0.2]
            .iter()
            .zip(counts)
            .map(|(p, count)| (count as f64 - p * f64::from(n)).powi(2) / (p * f64::from(n)))
            .sum();
        // 16.27 is passed once in a thousand with three degrees of freedom.
        assert!(chi2 < 16.27, "chi-square {chi2}, counts {counts:?}");
    }

    #[test]
    fn the_seed_decides() {
        let run = |seed| {
            let mut sampler = sampler(1.0, 0.9, 0, seed);
            (0..64).map(|_| sampler.sample(&logits()).unwrap_or_default()).collect::<Vec<_>>()
        };
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
    }

    #[test]
    fn excluded_tokens_are_never_drawn() {
        let mut sampler = sampler(1.0, 1.0, 0, 3);
        let logits = [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY];
        assert!((0..1000).all(|_| sampler.sample(&logits) == Ok(1)));
    }
}
