//! The search for scale and zero point of one group of integers, for a tile of rows side by side.

use half::f16;
use half::slice::HalfFloatSliceExt;
use serde::{Deserialize, Serialize};

use super::grids::{LANES, Lane};
use crate::backend::solver::Candidate;
use crate::num::simd::round;
use crate::scheme::Scheme;

/// How a group's scale is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScaleSearch {
    /// The largest weight decides: `2 max|w| / (2^bits - 1)`, or the range from min to max.
    MaxAbs,
    /// The scale with the least squared error.
    Mse,
    /// The scale with the least squared error weighted by the Hessian diagonal.
    Hessian,
}

impl ScaleSearch {
    /// As records name it.
    pub fn name(self) -> &'static str {
        match self {
            ScaleSearch::MaxAbs => "max-abs",
            ScaleSearch::Mse => "mse",
            ScaleSearch::Hessian => "hessian",
        }
    }
}

/// Scales (exactly representable in f16, never zero) and zero points of a tile's rows.
#[derive(Clone, Debug)]
pub struct IntegerLevels {
    pub scale: Lane,
    pub zero: Lane,
}

impl IntegerLevels {
    /// The code nearest to `w` in row `lane`.
    #[inline(always)]
    pub fn code(&self, lane: usize, w: f32, top: f32) -> f32 {
        // The bounds are whole numbers, so clamping first changes nothing; `round` wants moderate numbers.
        let steps = w / self.scale[lane];
        let steps = if steps < -self.zero[lane] { -self.zero[lane] } else { steps };
        let most = top - self.zero[lane];
        round(if steps > most { most } else { steps }) + self.zero[lane]
    }

    /// What that code stands for.
    #[inline(always)]
    pub fn value(&self, lane: usize, code: f32) -> f32 {
        (code - self.zero[lane]) * self.scale[lane]
    }
}

/// Rounds to f16, away from zero and infinity: such a scale would destroy its group.
pub fn round_scales(scale: &mut Lane) {
    let mut narrow = [f16::ZERO; LANES];
    narrow.convert_from_f32_slice(scale);
    narrow.convert_to_f32_slice(scale);
    scale.iter_mut().for_each(|s| *s = usable(*s));
}

/// A scale of f16 that destroys no group.
#[inline(always)]
fn usable(scale: f32) -> f32 {
    let least = f16::from_bits(1).to_f32();
    if scale == 0.0 { least } else { scale.clamp(-65504.0, 65504.0) }
}

/// The step of a grid over the whole range of a group.
#[inline(always)]
fn step(low: f32, high: f32, scheme: Scheme, least_zero: f32) -> f32 {
    let top = scheme.top() as f32;
    let range = if scheme.sym { 2.0 * high.max(-low) } else { high - low };
    let step = if range == 0.0 { 1.0 } else { range / top };
    // A raised zero point leaves fewer codes above it, which must reach as high.
    if !scheme.sym && least_zero > 0.0 { step.max(high / (top - least_zero)) } else { step }
}

/// The zero point of an asymmetric grid, before it is moved into its bounds.
#[inline(always)]
fn zero_point(low: f32, scale: f32) -> f32 {
    round((-low / scale).min(300.0))
}

/// Scale and zero point of one group by its range, as [`levels`] has them for the first candidate.
#[inline(always)]
pub fn range_levels(low: f32, high: f32, scheme: Scheme, least_zero: u8) -> (f32, f32) {
    let (top, lowest) = (scheme.top() as f32, least_zero as f32);
    let scale = usable(f16::from_f32(step(low, high, scheme, lowest)).to_f32());
    let zero = if scheme.sym { scheme.middle() as f32 } else { zero_point(low, scale).clamp(lowest, top) };
    (scale, zero)
}

/// Shrink factors of the range, tried by the searches, in steps of a hundredth.
fn shrinks(bits: u8, sym: bool) -> impl Iterator<Item = f32> {
    // Few codes waste most of a range that outliers set; with many, clipping never pays.
    let (from, to) = match (bits, sym) {
        (2, true) => (30, 120),
        (2, false) => (30, 104),
        (3, _) => (40, 108),
        (4, _) => (50, 106),
        _ => (90, 101),
    };
    (from..=to).map(|p| p as f32 / 100.0)
}

/// What a search for levels tries, in this order; the first is the range as it is.
pub fn candidates(scheme: Scheme, search: ScaleSearch) -> Vec<Candidate> {
    let range = Candidate { shrink: 1.0, sign: 1.0, shift: 0.0 };
    if search == ScaleSearch::MaxAbs {
        return vec![range];
    }
    // A negative scale mirrors the symmetric grid, so that its spare code serves the positive side; an
    // asymmetric grid may gain from a zero point one step aside.
    let variants: &[(f32, f32)] =
        if scheme.sym { &[(1.0, 0.0), (-1.0, 0.0)] } else { &[(1.0, 0.0), (1.0, -1.0), (1.0, 1.0)] };
    let searched = shrinks(scheme.bits, scheme.sym)
        .flat_map(|shrink| variants.iter().map(move |&(sign, shift)| Candidate { shrink, sign, shift }));
    std::iter::once(range).chain(searched).collect()
}

/// Chooses the levels of a group whose columns are `columns` (one [`Lane`] each): those of the candidate with the
/// least squared error, each column weighted by its `importance`. Zero points are at least `least_zero`, for
/// formats that cannot hold smaller ones.
#[inline(always)]
pub fn levels(
    columns: &[Lane],
    importance: &[f32],
    scheme: Scheme,
    candidates: &[Candidate],
    least_zero: u8,
) -> IntegerLevels {
    let (mut low, mut high) = ([0.0f32; LANES], [0.0f32; LANES]);
    for w in columns {
        for l in 0..LANES {
            low[l] = if w[l] < low[l] { w[l] } else { low[l] };
            high[l] = if w[l] > high[l] { w[l] } else { high[l] };
        }
    }
    let (top, lowest) = (scheme.top() as f32, least_zero as f32);
    let mut base = [0.0; LANES];
    for l in 0..LANES {
        base[l] = step(low[l], high[l], scheme, lowest);
    }
    let candidate = |by: &Candidate| {
        let mut levels = IntegerLevels { scale: base, zero: [scheme.middle() as f32; LANES] };
        levels.scale.iter_mut().for_each(|s| *s *= by.shrink * by.sign);
        round_scales(&mut levels.scale);
        if !scheme.sym {
            for l in 0..LANES {
                levels.zero[l] = (zero_point(low[l] * by.shrink, levels.scale[l]) + by.shift).clamp(lowest, top);
            }
        }
        levels
    };
    let mut best = candidate(&candidates[0]);
    if candidates.len() == 1 {
        return best;
    }
    let mut least = error(columns, &best, top, importance);
    for by in &candidates[1..] {
        let levels = candidate(by);
        let error = error(columns, &levels, top, importance);
        for l in 0..LANES {
            if error[l] < least[l] {
                least[l] = error[l];
                best.scale[l] = levels.scale[l];
                best.zero[l] = levels.zero[l];
            }
        }
    }
    best
}

/// Weighted squared error of each row.
#[inline(always)]
fn error(columns: &[Lane], levels: &IntegerLevels, top: f32, importance: &[f32]) -> Lane {
    let mut inverse = [0.0; LANES];
    let (mut least, mut most) = ([0.0; LANES], [0.0; LANES]);
    for l in 0..LANES {
        inverse[l] = 1.0 / levels.scale[l];
        (least[l], most[l]) = (-levels.zero[l], top - levels.zero[l]);
    }
    let mut sum = [0.0f32; LANES];
    for (w, &h) in columns.iter().zip(importance) {
        for l in 0..LANES {
            let steps = w[l] * inverse[l];
            let steps = if steps < least[l] { least[l] } else { steps };
            let steps = if steps > most[l] { most[l] } else { steps };
            let e = round(steps) * levels.scale[l] - w[l];
            sum[l] += h * e * e;
        }
    }
    sum
}
