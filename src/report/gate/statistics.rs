//! Estimates with their standard errors, and what they say about a limit.

use super::Outcome;
use crate::evaluate::perplexity::WindowNats;

/// Quantile of the normal distribution below which 95 % lie.
const Z95: f64 = 1.644_853_626_951_472_2;

/// Windows below which their scatter says too little.
const LEAST_WINDOWS: usize = 4;

/// A value and how far chance may have moved it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    pub value: f64,
    pub stderr: f64,
    /// Standard errors from the value to its one-sided 95 % bound.
    pub reach: f64,
}

/// On which side of a limit a value must lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    AtMost,
    AtLeast,
}

impl Estimate {
    pub fn new(value: f64, stderr: f64) -> Self {
        Self { value, stderr, reach: Z95 }
    }

    /// What was counted.
    pub fn exact(value: f64) -> Self {
        Self::new(value, 0.0)
    }

    /// The difference of two that are taken as independent.
    pub fn minus(self, other: Self) -> Self {
        Self::new(self.value - other.value, self.stderr.hypot(other.stderr))
    }

    pub fn is_finite(self) -> bool {
        self.value.is_finite() && self.stderr.is_finite()
    }

    /// Passes on the right side, fails where the bound too is on the wrong one, and warns in between.
    pub fn against(self, side: Side, limit: f64) -> Outcome {
        let (value, limit) = match side {
            Side::AtMost => (self.value, limit),
            Side::AtLeast => (-self.value, -limit),
        };
        if !self.is_finite() {
            Outcome::Fail
        } else if value <= limit {
            Outcome::Pass
        } else if value - self.reach * self.stderr > limit {
            Outcome::Fail
        } else {
            Outcome::Warn
        }
    }
}

/// The mean difference of nll a token between two runs over the same windows, `None` where they are not the same or too
/// few. Cochran, Sampling Techniques, 3rd ed., section 2.11: a ratio estimate over clusters.
pub fn paired(now: &[WindowNats], before: &[WindowNats]) -> Option<Estimate> {
    let count = now.len();
    if count < LEAST_WINDOWS || before.len() != count || now.iter().zip(before).any(|(a, b)| a.tokens != b.tokens) {
        return None;
    }
    let tokens: f64 = now.iter().map(|window| window.tokens as f64).sum();
    let differences = || now.iter().zip(before).map(|(a, b)| (a.nats - b.nats, a.tokens as f64));
    let mean = differences().map(|(difference, _)| difference).sum::<f64>() / tokens;
    let squares: f64 = differences().map(|(difference, n)| (difference - mean * n).powi(2)).sum();
    let n = count as f64;
    let stderr = (squares * n / (n - 1.0)).sqrt() / tokens;
    (tokens > 0.0).then(|| Estimate { value: mean, stderr, reach: student95(n - 1.0) })
}

/// The 95 % quantile of Student's t. Abramowitz and Stegun 26.7.5; within 0.3 % from 3 degrees of freedom on.
fn student95(freedom: f64) -> f64 {
    let z = Z95;
    let g1 = (z.powi(3) + z) / 4.0;
    let g2 = (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / 96.0;
    let g3 = (3.0 * z.powi(7) + 19.0 * z.powi(5) + 17.0 * z.powi(3) - 15.0 * z) / 384.0;
    z + g1 / freedom + g2 / freedom.powi(2) + g3 / freedom.powi(3)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn limits_and_noise() {
        let value = Estimate::new(1.0, 0.1);
        assert_eq!(value.against(Side::AtMost, 1.0), Outcome::Pass);
        assert_eq!(value.against(Side::AtMost, 0.9), Outcome::Warn);
        assert_eq!(value.against(Side::AtMost, 0.83), Outcome::Fail);
        assert_eq!(value.against(Side::AtLeast, 1.1), Outcome::Warn);
        assert_eq!(value.against(Side::AtLeast, 1.17), Outcome::Fail);
        assert_eq!(Estimate::exact(1.0).against(Side::AtMost, 0.999), Outcome::Fail);
        assert_eq!(Estimate::new(f64::NAN, 0.0).against(Side::AtMost, 1.0), Outcome::Fail);
        assert_eq!(Estimate::new(0.0, f64::NAN).against(Side::AtMost, 1.0), Outcome::Fail);
    }

    #[test]
    fn student_s_quantiles() {
        // Tables: t(0.95) for 3, 9 and 30 degrees of freedom.
        for (freedom, wanted) in [(3.0, 2.3534), (9.0, 1.8331), (30.0, 1.6973)] {
            assert!((student95(freedom) / wanted - 1.0).abs() < 3e-3, "{freedom}: {}", student95(freedom));
        }
    }

    #[test]
    fn the_text_s_difficulty_cancels() {
        // Windows from 1 to 9 nats a token; now all are worse by 0.01 nats a token, give or take 0.001.
        let window = |i: usize, by: f64| WindowNats { nats: 100.0 * (1.0 + i as f64 + by), tokens: 100 };
        let before: Vec<_> = (0..9).map(|i| window(i, 0.0)).collect();
        let now: Vec<_> = (0..9).map(|i| window(i, 0.01 + 0.001 * (i as f64 - 4.0))).collect();
        let got = paired(&now, &before).unwrap();
        assert!((got.value - 0.01).abs() < 1e-12, "{got:?}");
        // Variance of -4..4 thousandths is 7.5e-6.
        assert!((got.stderr - (7.5e-6f64 / 9.0).sqrt()).abs() < 1e-9, "{got:?}");
        assert_eq!(paired(&now[..3], &before[..3]), None);
        assert_eq!(paired(&now[..8], &before), None);
        let shorter: Vec<_> = before.iter().map(|w| WindowNats { tokens: 99, ..*w }).collect();
        assert_eq!(paired(&now, &shorter), None);
    }
}
