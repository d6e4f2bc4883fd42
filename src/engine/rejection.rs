//! Whether a proposed token stands, and what comes in its place: rejection sampling for speculative decoding
//! (Leviathan, Kalman and Matias, 2023; Chen and others, 2023).
//!
//! A draft draws a token from its distribution q where the target's is p. Kept with probability min(1, p / q), and
//! otherwise replaced by one drawn from what p has more than q, the token follows p. Distributions are those after
//! temperature, top-k and top-p, as [`Sampler::distribution`] gives them: a token that is not listed has none.

use super::sampler::Sampler;

/// Tokens with their probabilities, which sum to 1; no token is listed twice.
pub type Distribution = Vec<(u32, f64)>;

/// What became of some proposals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// How many of the proposals stand, from the first on.
    pub accepted: usize,
    /// The token after those: in place of the first that fell, or, where all stand, one more from the target.
    pub next: u32,
}

/// Decides over proposed tokens in turn. `draft[i]` is the distribution that proposal `i` was drawn from, `target[i]` the
/// target's in the same place, and `target` has one more, for the place after all proposals.
///
/// # Panics
/// If there is not one distribution of the draft for each proposal, and one more of the target.
pub fn verify(sampler: &mut Sampler, proposals: &[u32], draft: &[Distribution], target: &[Distribution]) -> Verdict {
    assert!(draft.len() == proposals.len() && target.len() == proposals.len() + 1);
    for (i, &token) in proposals.iter().enumerate() {
        let (p, q) = (&target[i], &draft[i]);
        if !stands(sampler, of(p, token), of(q, token)) {
            return Verdict { accepted: i, next: sampler.draw(&residual(p, q)) };
        }
    }
    Verdict { accepted: proposals.len(), next: sampler.draw(&target[proposals.len()]) }
}

/// Accepts with probability min(1, p / q). A token that the draft cannot have drawn stands if the target can.
fn stands(sampler: &mut Sampler, p: f64, q: f64) -> bool {
    // The number drawn is below 1, so the product is below q, and equal probabilities always stand.
    sampler.uniform() * q < p
}

/// The probability of a token.
pub fn of(distribution: &[(u32, f64)], token: u32) -> f64 {
    // One that holds all tokens is in their order.
    match distribution.get(token as usize) {
        Some(&(id, probability)) if id == token => probability,
        _ => distribution.iter().find(|(id, _)| *id == token).map_or(0.0, |(_, probability)| *probability),
    }
}

/// Both distributions in one: each token of either, in order, with its two probabilities.
fn paired(p: &[(u32, f64)], q: &[(u32, f64)]) -> Vec<(u32, f64, f64)> {
    let in_order = |d: &[(u32, f64)]| {
        let mut sorted = d.to_vec();
        if !sorted.is_sorted_by_key(|(id, _)| *id) {
            sorted.sort_unstable_by_key(|(id, _)| *id);
        }
        sorted.into_iter().peekable()
    };
    let (mut p, mut q) = (in_order(p), in_order(q));
    let mut all = Vec::new();
    loop {
        let id = match (p.peek(), q.peek()) {
            (Some(a), Some(b)) => a.0.min(b.0),
            (Some(a), None) => a.0,
            (None, Some(b)) => b.0,
            (None, None) => return all,
        };
        let one = p.next_if(|(token, _)| *token == id).map_or(0.0, |(_, probability)| probability);
        let other = q.next_if(|(token, _)| *token == id).map_or(0.0, |(_, probability)| probability);
        all.push((id, one, other));
    }
}

/// What p has more than q, as a distribution. Where it has nothing more, both are the same but for rounding, and what is
/// rejected with a probability of the size of rounding errors is drawn from p anew.
pub fn residual(p: &[(u32, f64)], q: &[(u32, f64)]) -> Distribution {
    let mut more: Distribution =
        paired(p, q).into_iter().filter(|(_, p, q)| p > q).map(|(token, p, q)| (token, p - q)).collect();
    let total: f64 = more.iter().map(|(_, weight)| weight).sum();
    if total > 0.0 {
        more.iter_mut().for_each(|(_, weight)| *weight /= total);
        more
    } else {
        p.to_vec()
    }
}

/// The probability that a token drawn from q stands: sum of min(p, q), which is 1 less the total variation distance.
pub fn overlap(p: &[(u32, f64)], q: &[(u32, f64)]) -> f64 {
    paired(p, q).into_iter().map(|(_, p, q)| p.min(q)).sum()
}

/// The probability that the draft's token stood, where the target's text has `token`: min(1, q / p), as accepted or not
/// and the token that came of it are distributed.
pub fn stood(p: &[(u32, f64)], q: &[(u32, f64)], token: u32) -> f64 {
    let (p, q) = (of(p, token), of(q, token));
    if p > 0.0 { (q / p).min(1.0) } else { 0.0 }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::HashMap;
    use std::path::Path;
    use std::sync::Arc;

    use super::*;
    use crate::backend::cpu::Cpu;
    use crate::backend::{Backend, spans_of};
    use crate::checkpoint::Checkpoint;
    use crate::engine::sampler::SamplerOptions;
    use crate::model::Model;
    use crate::model::source::DenseSource;

    type Verify = dyn Fn(&mut Sampler, &[u32], &[Distribution], &[Distribution]) -> Verdict;

    fn sampler(seed: u64) -> Sampler {
        Sampler::new(SamplerOptions { temperature: 1.0, seed, ..Default::default() }).unwrap()
    }

    /// Mistakes that have been made.
    fn planted() -> Vec<(&'static str, Box<Verify>)> {
        vec![
            (
                "every proposal stands",
                Box::new(|sampler, proposals, _, target| Verdict {
                    accepted: proposals.len(),
                    next: sampler.draw(&target[proposals.len()]),
                }),
            ),
            (
                "what fell is drawn from p",
                Box::new(|sampler, proposals, draft, target| {
                    for (i, &token) in proposals.iter().enumerate() {
                        if !stands(sampler, of(&target[i], token), of(&draft[i], token)) {
                            return Verdict { accepted: i, next: sampler.draw(&target[i]) };
                        }
                    }
                    Verdict { accepted: proposals.len(), next: sampler.draw(&target[proposals.len()]) }
                }),
            ),
            (
                "a row too far",
                Box::new(|sampler, proposals, draft, target| {
                    let mut moved = target[1..].to_vec();
                    moved.extend(target.last().cloned());
                    verify(sampler, proposals, draft, &moved)
                }),
            ),
            (
                "equality of samples",
                Box::new(|sampler, proposals, _, target| {
                    for (i, &token) in proposals.iter().enumerate() {
                        let drawn = sampler.draw(&target[i]);
                        if drawn != token {
                            // The token is right; so is the distribution. Only the acceptance is poor.
                            return Verdict { accepted: i, next: drawn };
                        }
                    }
                    Verdict { accepted: proposals.len(), next: sampler.draw(&target[proposals.len()]) }
                }),
            ),
        ]
    }

    /// What a chi-square statistic with so many degrees of freedom passes once in ten thousand (Wilson and Hilferty).
    fn critical(freedom: f64) -> f64 {
        let part = 2.0 / (9.0 * freedom);
        freedom * (1.0 - part + 3.719 * part.sqrt()).powi(3)
    }

    /// Draws the first two tokens many times by rounds of `ahead` proposals and holds their counts against the target's
    /// joint distribution: the statistic, what it may be, and the share of accepted proposals.
    ///
    /// `p` and `q` give the distributions after some tokens.
    fn chi_square(
        rounds: usize,
        ahead: usize,
        verify: &Verify,
        p: &dyn Fn(&[u32]) -> Distribution,
        q: &dyn Fn(&[u32]) -> Distribution,
    ) -> (f64, f64, f64) {
        let mut sampler = sampler(11);
        let mut counts = std::collections::BTreeMap::<(u32, u32), f64>::new();
        let (mut drafted, mut accepted) = (0, 0);
        for _ in 0..rounds {
            let mut tokens = Vec::new();
            while tokens.len() < 2 {
                let mut context = tokens.clone();
                let (mut proposals, mut draft, mut target) = (Vec::new(), Vec::new(), vec![p(&context)]);
                for _ in 0..ahead {
                    draft.push(q(&context));
                    let token = sampler.draw(&draft[draft.len() - 1]);
                    proposals.push(token);
                    context.push(token);
                    target.push(p(&context));
                }
                let verdict = verify(&mut sampler, &proposals, &draft, &target);
                drafted += ahead;
                accepted += verdict.accepted;
                tokens.extend(&proposals[..verdict.accepted]);
                tokens.push(verdict.next);
            }
            *counts.entry((tokens[0], tokens[1])).or_default() += 1.0;
        }
        // Cells that are rarely met are counted together.
        let (mut statistic, mut cells, mut rare, mut seen) = (0.0, 0.0, (0.0, 0.0), 0.0);
        for (one, p_one) in p(&[]) {
            for (two, p_two) in p(&[one]) {
                let expected = p_one * p_two * rounds as f64;
                let count = counts.get(&(one, two)).copied().unwrap_or_default();
                seen += count;
                if expected < 5.0 {
                    rare = (rare.0 + expected, rare.1 + count);
                } else {
                    statistic += (count - expected).powi(2) / expected;
                    cells += 1.0;
                }
            }
        }
        rare.1 += rounds as f64 - seen;
        if rare.0 > 0.0 || rare.1 > 0.0 {
            statistic += (rare.1 - rare.0).powi(2) / rare.0.max(1e-3);
            cells += 1.0;
        }
        (statistic, critical(cells - 1.0), f64::from(accepted as u32) / f64::from(drafted as u32))
    }

    /// Distributions that depend on the tokens before.
    fn synthetic(tilt: f64) -> impl Fn(&[u32]) -> Distribution {
        move |tokens| {
            let state = tokens.iter().fold(3u32, |state, token| state * 7 + token);
            // Some tokens are none of it at all.
            let weight = |id: u32| match (state + id) % 5 {
                0 => 0.0,
                part => (f64::from(part) + tilt * f64::from(id)).exp() / 30.0,
            };
            let total: f64 = (0..6).map(weight).sum();
            (0..6).filter(|id| weight(*id) > 0.0).map(|id| (id, weight(id) / total)).collect()
        }
    }

    #[test]
    fn tokens_follow_the_target() {
        let (p, q) = (synthetic(0.0), synthetic(-0.4));
        for ahead in [1, 3] {
            let (found, most, share) = chi_square(100_000, ahead, &verify, &p, &q);
            assert!(found < most, "{ahead} ahead: chi-square {found}, at most {most}");
            assert!(share > 0.4, "{share}");
        }
    }

    #[test]
    fn mistakes_are_found() {
        let (p, q) = (synthetic(0.0), synthetic(-0.4));
        let share = chi_square(20_000, 1, &verify, &p, &q).2;
        for (what, planted) in planted() {
            let (found, most, poor) = chi_square(20_000, 1, &planted, &p, &q);
            if what == "equality of samples" {
                assert!(found < most && poor < share - 0.1, "{what}: {found}, {poor} for {share}");
            } else {
                assert!(found > most, "{what}: chi-square {found}, no more than {most}");
            }
        }
    }

    /// The demo models' distributions after a prompt and up to one more token; what comes later nobody asks for.
    fn demo(name: &str, others: &mut dyn FnMut(&Distribution) -> Vec<u32>) -> HashMap<Vec<u32>, Distribution> {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("calib/demo").join(name);
        let source = Box::new(DenseSource(Checkpoint::open(&dir).unwrap()));
        let model = Model::open(source, Arc::new(Cpu)).unwrap();
        let shape = Sampler::new(SamplerOptions { temperature: 1.0, top_k: 8, ..Default::default() }).unwrap();
        let after = |more: &[u32]| {
            let tokens = [&[0, 300, 412, 518, 290, 371, 1033, 266], more].concat();
            let mut chunks = [model.embed(&[&tokens], spans_of([tokens.len()])).unwrap()];
            model.forward(&mut chunks, None).unwrap();
            let last = Cpu.rows(&chunks[0].hidden, &[tokens.len() - 1]).unwrap();
            shape.distribution(model.logits(&last).unwrap().as_host()).unwrap()
        };
        let first = after(&[]);
        let mut all: HashMap<Vec<u32>, Distribution> =
            others(&first).into_iter().map(|token| (vec![token], after(&[token]))).collect();
        all.insert(Vec::new(), first);
        all
    }

    #[test]
    fn the_demo_target_is_followed() {
        // Every token that either model can begin with.
        let mut begins = Vec::new();
        let mut gather = |first: &Distribution| {
            begins.extend(first.iter().map(|(token, _)| *token));
            begins.clone()
        };
        demo("draft", &mut gather);
        let p = demo("target", &mut gather);
        let q = demo("draft", &mut |_| begins.clone());
        // Only mistakes lead elsewhere.
        let of = |table: &HashMap<Vec<u32>, Distribution>, tokens: &[u32]| {
            table.get(&tokens[..tokens.len().min(1)]).unwrap_or(&table[&Vec::new()]).clone()
        };
        let (p, q) = (|tokens: &[u32]| of(&p, tokens), |tokens: &[u32]| of(&q, tokens));
        for ahead in [1, 2] {
            let (found, most, share) = chi_square(100_000, ahead, &verify, &p, &q);
            assert!(found < most, "{ahead} ahead: chi-square {found}, at most {most}");
            assert!(share > 0.2, "{share}");
            for (what, planted) in planted().iter().filter(|(what, _)| *what != "equality of samples") {
                let (found, most, _) = chi_square(100_000, ahead, planted, &p, &q);
                assert!(found > most, "{what}, {ahead} ahead: chi-square {found}, no more than {most}");
            }
        }
    }

    #[test]
    fn acceptance_is_the_overlap() {
        let (p, q) = (synthetic(0.0), synthetic(-0.4));
        let (p, q) = (p(&[]), q(&[]));
        let (mut sampler, n) = (sampler(5), 100_000);
        let (mut accepted, mut chance) = (0, 0.0);
        for _ in 0..n {
            let token = sampler.draw(&q);
            let verdict = verify(&mut sampler, &[token], std::slice::from_ref(&q), &[p.clone(), p.clone()]);
            accepted += verdict.accepted;
            // The other way round: how likely it was, from the text alone.
            chance += stood(&p, &q, if verdict.accepted == 1 { token } else { verdict.next });
        }
        let (share, chance) = (accepted as f64 / f64::from(n), chance / f64::from(n));
        assert!((share - overlap(&p, &q)).abs() < 0.005, "{share} for {}", overlap(&p, &q));
        assert!((chance - overlap(&p, &q)).abs() < 0.005, "{chance} for {}", overlap(&p, &q));
    }

    #[test]
    fn ends_of_the_range() {
        let mut sampler = sampler(1);
        let one = |id: u32| vec![(id, 1.0)];
        // The same distributions: everything stands.
        let even: Distribution = (0..7).map(|id| (id, 1.0 / 7.0)).collect();
        for i in 0..2000 {
            let verdict = verify(&mut sampler, &[i % 7], std::slice::from_ref(&even), &[even.clone(), one(3)]);
            assert_eq!(verdict, Verdict { accepted: 1, next: 3 });
        }
        // Nothing in common: nothing stands, and what comes is the target's.
        let verdict = verify(&mut sampler, &[1], &[one(1)], &[one(2), one(3)]);
        assert_eq!(verdict, Verdict { accepted: 0, next: 2 });
        // A token that the draft's distribution does not have, but the target's does, and neither.
        assert_eq!(verify(&mut sampler, &[2], &[one(1)], &[one(2), one(3)]).accepted, 1);
        assert_eq!(verify(&mut sampler, &[4], &[one(1)], &[one(2), one(3)]), Verdict { accepted: 0, next: 2 });
        // No proposals: the target's own token.
        assert_eq!(verify(&mut sampler, &[], &[], &[one(5)]), Verdict { accepted: 0, next: 5 });
        // Nothing is left of p: p itself, and not a division by zero.
        assert_eq!(residual(&even, &even), even);
        assert_eq!(residual(&[(0, 0.5), (1, 0.5)], &[(1, 0.75), (0, 0.25)]), [(0, 1.0)]);
        // Cut distributions stand in the order of their probabilities.
        assert_eq!(of(&[(9, 0.6), (2, 0.4)], 2), 0.4);
        assert_eq!(overlap(&[(9, 0.6), (2, 0.4)], &[(2, 1.0)]), 0.4);
    }
}
