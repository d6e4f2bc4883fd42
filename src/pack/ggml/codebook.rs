//! The points of a grid, and for each combination of levels that is no point the points near it.

use std::sync::LazyLock;

use rayon::prelude::*;

use crate::num::ggml::grids;
use crate::num::lanes::{Lanes, Simd};

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
    /// Neighbours are the points within the `reach` smallest distances that occur, nearest first, then in the grid's
    /// order.
    fn new(grid: &'static [u16], values: usize, reach: usize) -> Self {
        let bits = if values == 8 { 2 } else { 3 };
        let (mask, top) = ((1 << bits) - 1, if values == 8 { 2 } else { 7 });
        let level = |code: usize, i: usize| code >> (bits * i) & mask;
        let neighbours = |code: usize| -> Vec<Near> {
            if grid.binary_search(&(code as u16)).is_ok() || (0..values).any(|i| level(code, i) > top) {
                return Vec::new();
            }
            let distance = |point: u16| -> usize {
                (0..values).map(|i| level(code, i).abs_diff(level(point as usize, i)).pow(2)).sum()
            };
            let mut sorted: Vec<(usize, usize)> = grid.iter().map(|&p| distance(p)).zip(0..).collect();
            sorted.sort_unstable();
            let mut distances: Vec<usize> = sorted.iter().map(|pair| pair.0).collect();
            distances.dedup();
            let furthest = distances[reach.min(distances.len()) - 1];
            let points: Vec<u16> =
                sorted.iter().take_while(|pair| pair.0 <= furthest).map(|pair| pair.1 as u16).collect();
            points.chunks(16).map(|points| Near::new(grid, points)).collect()
        };
        let lists: Vec<Vec<Near>> = (0..1 << (bits * values)).into_par_iter().map(neighbours).collect();
        let mut places = vec![0; lists.len()];
        for (i, &code) in grid.iter().enumerate() {
            places[code as usize] = i as i32;
        }
        let (mut spans, mut near) = (Vec::new(), Vec::new());
        for (place, list) in places.iter_mut().zip(lists) {
            if !list.is_empty() {
                *place = -1 - spans.len() as i32;
                spans.push((near.len() as u32, (near.len() + list.len()) as u32));
                near.extend(list);
            }
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
        let (mut best, mut point) = (f32::MAX.to_bits(), 0);
        for near in &self.near[start as usize..end as usize] {
            let mut errors = [0.0f32; 16];
            for (errors, levels) in errors.chunks_mut(Lanes::<S>::COUNT).zip(near.levels.chunks(Lanes::<S>::COUNT)) {
                let mut sum = Lanes::splat(simd, 0.0);
                for i in 0..VALUES {
                    let level = Lanes::field(simd, levels, self.bits * i, (1 << self.bits) - 1);
                    let difference = sum.with(scale) * (sum.with(a) * level + sum.with(b)) - sum.with(x[i]);
                    sum += sum.with(weights[i]) * difference * difference;
                }
                errors.copy_from_slice(sum.as_slice());
            }
            // Errors are not negative, so they are ordered like their bits.
            let mut least = u32::MAX;
            for lane in 0..16 {
                least = least.min(errors[lane].to_bits());
            }
            if least < best {
                best = least;
                let lane = errors.iter().position(|e| e.to_bits() == least);
                point = near.points[lane.unwrap_or(0)];
            }
        }
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
