//! The points of a grid, and for each combination of levels that is no point the points near it.

use std::sync::LazyLock;

use crate::num::ggml::grids;
use crate::num::lanes::{Lanes, Simd};
use crate::num::simd::vectorized;

/// Sixteen points that are compared side by side.
pub struct Near {
    /// Levels of each point, packed as in the grid.
    levels: [u32; 16],
    points: [u16; 16],
}

/// A grid of points of `values` levels of `bits` bits. Combinations of levels are numbers packed like the grid's.
pub struct Codebook {
    grid: &'static [u16],
    values: usize,
    bits: usize,
    /// For each combination: the number of its point, or the place of its neighbours, negative and less one.
    places: Vec<i32>,
    /// Where each off-grid combination's neighbours start and end.
    spans: Vec<(u32, u32)>,
    near: Vec<Near>,
}

pub static IQ2_XXS: LazyLock<Codebook> = LazyLock::new(|| Codebook::new(&grids::IQ2_XXS, 8, 2));
pub static IQ2_XS: LazyLock<Codebook> = LazyLock::new(|| Codebook::new(&grids::IQ2_XS, 8, 2));
pub static IQ2_S: LazyLock<Codebook> = LazyLock::new(|| Codebook::new(&grids::IQ2_S, 8, 1));
pub static IQ3_XXS: LazyLock<Codebook> = LazyLock::new(|| Codebook::new(&grids::IQ3_XXS, 4, 2));
pub static IQ3_S: LazyLock<Codebook> = LazyLock::new(|| Codebook::new(&grids::IQ3_S, 4, 3));
pub static IQ1: LazyLock<Codebook> = LazyLock::new(|| Codebook::new(&grids::IQ1, 8, 3));

impl Codebook {
    // In one thread: threads of a pool that wait for the first use could be given other work that waits for it too.
    /// Neighbours are the points within the `reach` smallest distances that occur, nearest first, then in the grid's
    /// order.
    fn new(grid: &'static [u16], values: usize, reach: usize) -> Self {
        let (bits, levels) = if values == 8 { (2, 3usize) } else { (3, 8) };
        let unpacked = |code: usize| -> [i32; 8] {
            std::array::from_fn(|i| if i < values { (code >> (bits * i) & ((1 << bits) - 1)) as i32 } else { 0 })
        };
        let points: Vec<[i32; 8]> = grid.iter().map(|&code| unpacked(code as usize)).collect();
        let mut places = vec![0; 1 << (bits * values)];
        for (i, &code) in grid.iter().enumerate() {
            places[code as usize] = i as i32;
        }
        let (mut spans, mut near) = (Vec::new(), Vec::new());
        let mut distances = vec![0; grid.len()];
        for code in 0..places.len() {
            let here = unpacked(code);
            if grid.binary_search(&(code as u16)).is_ok() || here.iter().any(|&level| level >= levels as i32) {
                continue;
            }
            vectorized(|| {
                for (distance, point) in distances.iter_mut().zip(&points) {
                    *distance = (0..8).map(|i| (here[i] - point[i]) * (here[i] - point[i])).sum();
                }
            });
            let (mut list, mut distance) = (Vec::new(), 0);
            for _ in 0..reach {
                let Some(next) = distances.iter().copied().filter(|&d| d > distance).min() else { break };
                distance = next;
                list.extend((0..grid.len()).filter(|&i| distances[i] == distance).map(|i| i as u16));
            }
            places[code] = -1 - spans.len() as i32;
            let first = near.len() as u32;
            near.extend(list.chunks(16).map(|points| Near::new(grid, points)));
            spans.push((first, near.len() as u32));
        }
        Self { grid, values, bits, places, spans, near }
    }

    /// Level of a value of a point.
    #[inline(always)]
    pub fn level(&self, point: u16, i: usize) -> u8 {
        (self.grid[point as usize] >> (self.bits * i)) as u8 & ((1 << self.bits) - 1)
    }

    /// The number of a combination of levels.
    #[inline(always)]
    pub fn code(&self, levels: &[u8]) -> usize {
        let mut code = 0;
        for i in 0..self.values {
            code |= (levels[i] as usize) << (self.bits * i);
        }
        code
    }

    /// The point for a combination of levels and whether it has exactly these; else the neighbour with the least
    /// weighted squared distance of `scale * (a * level + b)` from the values.
    #[inline(always)]
    pub fn nearest<S: Simd, const VALUES: usize>(
        &self,
        simd: S,
        code: usize,
        x: &[f32; VALUES],
        weights: &[f32; VALUES],
        scale: f32,
        (a, b): (f32, f32),
    ) -> (u16, bool) {
        let place = self.places[code];
        if place >= 0 {
            return (place as u16, true);
        }
        let (start, end) = self.spans[(-1 - place) as usize];
        // What each value costs at each level; with three levels choosing is quicker than computing.
        let mut costs = [[0.0f32; VALUES]; 3];
        for level in 0..3 {
            for i in 0..VALUES {
                let difference = scale * (a * level as f32 + b) - x[i];
                costs[level][i] = weights[i] * difference * difference;
            }
        }
        let list = &self.near[start as usize..end as usize];
        // Error and place in the list: among equal errors the first place wins.
        let (mut best, mut first) = (f32::INFINITY, 0.0);
        for part in (0..16).step_by(Lanes::<S>::COUNT) {
            let (mut least, mut number) = (Lanes::splat(simd, f32::MAX), Lanes::splat(simd, 0.0));
            for (n, near) in list.iter().enumerate() {
                let levels = &near.levels[part..part + Lanes::<S>::COUNT];
                let mut sum = least.with(0.0);
                for i in 0..VALUES {
                    if VALUES == 8 {
                        let low = Lanes::bit(simd, levels, 2 * i).select(sum.with(costs[1][i]), sum.with(costs[0][i]));
                        sum += Lanes::bit(simd, levels, 2 * i + 1).select(sum.with(costs[2][i]), low);
                    } else {
                        let level = Lanes::field(simd, levels, 3 * i, 7);
                        let difference = sum.with(scale) * (sum.with(a) * level + sum.with(b)) - sum.with(x[i]);
                        sum += sum.with(weights[i]) * difference * difference;
                    }
                }
                let nearer = sum.lt(least);
                least = nearer.select(sum, least);
                number = nearer.select(least.with(n as f32), number);
            }
            let error = least.least();
            let places = number * number.with(16.0) + Lanes::from_fn(simd, |lane| (part + lane) as f32);
            let place = least.eq(least.with(error)).select(places, least.with(f32::MAX)).least();
            if error < best || error == best && place < first {
                (best, first) = (error, place);
            }
        }
        let first = first as usize;
        let point = list[first / 16].points[first % 16];
        (point, false)
    }
}

impl Near {
    /// Up to sixteen points; the last one fills what is left, which cannot be nearer than itself.
    fn new(grid: &[u16], points: &[u16]) -> Self {
        let points = std::array::from_fn(|lane| points[lane.min(points.len() - 1)]);
        Self { levels: points.map(|point| grid[point as usize] as u32), points }
    }
}
