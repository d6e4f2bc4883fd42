//! Products of signed bytes. Sums of integers are exact, so the order of additions is free and every instruction set
//! gives the same bits; floats enter at the end of a segment, in one order.
//!
//! `vpdpbusd` and its like multiply unsigned bytes by signed ones: weights are moved up by 128, and 128 times the sum
//! of a row's values is taken away again.

mod vectors;

use std::ops::Range;

use rayon::prelude::*;

#[cfg(target_arch = "x86_64")]
use vectors::x86;
use vectors::{Dot, Plain, Set};

/// Columns that are summed in 32 bits at most: even values less their zero point, up to 255, times 128 fit.
pub const LONGEST: usize = 1 << 16;
/// Padding of a row: the bytes of the widest vector.
const VECTOR: usize = 64;
/// Outputs of a packed panel.
const PANEL: usize = 32;
/// Output columns per task.
const TILE: usize = 96;
/// Rows per task.
const CHUNK: usize = 1024;
/// Rows up to which weights are read as they lie. For more, bringing them into panels pays.
const FEW: usize = 16;

/// What a segment of a row stands for: `scale * (value - zero)`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Factor {
    pub scale: f32,
    pub zero: i32,
    /// The sum of the segment's values.
    pub sum: i32,
}

/// Rows of signed bytes. Columns are cut into segments of equal length (but for the last), which have factors of
/// their own.
#[derive(Clone, Debug)]
pub struct Rows {
    pub count: usize,
    pub cols: usize,
    /// Columns of a segment, at most [`LONGEST`].
    pub segment: usize,
    /// `[count, stride]`: each segment filled up with zeros to four bytes, the row to whole vectors.
    values: Vec<i8>,
    /// `[count, segments]`
    factors: Vec<Factor>,
}

impl Rows {
    /// Zeros.
    ///
    /// # Panics
    /// If a segment has no columns, or too many.
    pub fn new(count: usize, cols: usize, segment: usize) -> Self {
        assert!((1..=LONGEST).contains(&segment), "segments of {segment} columns");
        let mut rows = Self { count, cols, segment, values: Vec::new(), factors: Vec::new() };
        rows.values = vec![0; count * rows.stride()];
        rows.factors = vec![Factor::default(); count * rows.segments()];
        rows
    }

    pub fn segments(&self) -> usize {
        self.cols.div_ceil(self.segment)
    }

    /// Bytes of a segment with its padding.
    fn padded(&self) -> usize {
        self.segment.next_multiple_of(4)
    }

    fn stride(&self) -> usize {
        (self.segments() * self.padded()).next_multiple_of(VECTOR)
    }

    /// The columns of segment `s`.
    fn columns(&self, s: usize) -> Range<usize> {
        s * self.segment..((s + 1) * self.segment).min(self.cols)
    }

    /// Fills all rows: `fill` gets a row's number, its segments' values (the last with fewer of them) and factors,
    /// whose sums are made here.
    pub fn fill(&mut self, fill: impl Fn(usize, &mut dyn Iterator<Item = &mut [i8]>, &mut [Factor]) + Sync) {
        let (segments, padded, stride, cols, segment) =
            (self.segments(), self.padded(), self.stride(), self.cols, self.segment);
        if stride == 0 {
            return;
        }
        let rows = self.values.par_chunks_exact_mut(stride).zip(self.factors.par_chunks_exact_mut(segments));
        rows.enumerate().with_min_len((1 << 14) / stride).for_each(|(r, (values, factors))| {
            let lengths = (0..segments).map(|s| segment.min(cols - s * segment));
            let mut parts = values.chunks_mut(padded).zip(lengths.clone()).map(|(part, n)| &mut part[..n]);
            fill(r, &mut parts, factors);
            for ((factor, part), n) in factors.iter_mut().zip(values.chunks(padded)).zip(lengths) {
                factor.sum = sum(&part[..n]);
            }
        });
    }

    /// The values and factor of segment `s` of row `r`.
    pub fn part(&self, r: usize, s: usize) -> (&[i8], Factor) {
        let at = r * self.stride() + s * self.padded();
        (&self.values[at..at + self.columns(s).len()], self.factors[r * self.segments() + s])
    }
}

fn sum(values: &[i8]) -> i32 {
    super::simd::vectorized(|| values.iter().map(|v| i32::from(*v)).sum())
}

/// Where the tasks of one call write.
struct Output {
    to: *mut f32,
    stride: usize,
}

// SAFETY: only used to hand disjoint tiles of one output to the tasks of one call.
unsafe impl Sync for Output {}

/// A tile of the output.
struct Task<'a> {
    x: &'a Rows,
    /// `[n, cols]`
    weights: &'a [u8],
    scales: &'a [f32],
    rows: Range<usize>,
    outputs: Range<usize>,
    out: &'a Output,
    /// Whether a zero point is other than 0.
    zeros: bool,
}

/// `out[t, n] = scales[n] * sum_k x[t, k] w[n, k]`: segments are summed in integers, times their scale in f32, then
/// added in f32 in order. `weights` is `[n, cols]` in two's complement.
///
/// # Panics
/// If the sizes do not belong together.
pub fn linear(x: &Rows, weights: &[u8], scales: &[f32], out: &mut [f32]) {
    let best = Set::all().first().copied().unwrap_or(Set::Plain);
    with(best, x, weights, scales, out);
}

fn with(set: Set, x: &Rows, weights: &[u8], scales: &[f32], out: &mut [f32]) {
    let n = scales.len();
    assert!(Some(weights.len()) == n.checked_mul(x.cols) && Some(out.len()) == n.checked_mul(x.count));
    let few = x.count <= FEW && (x.segments() == 1 || x.segment.is_multiple_of(VECTOR));
    let tile = if few { PANEL } else { TILE };
    let (down, across) = (x.count.div_ceil(CHUNK), n.div_ceil(tile));
    let zeros = x.factors.iter().any(|f| f.zero != 0);
    let output = Output { to: out.as_mut_ptr(), stride: n };
    (0..down * across).into_par_iter().for_each_init(Vec::new, |buffer: &mut Vec<u8>, i| {
        let rows = i / across * CHUNK..(i / across * CHUNK + CHUNK).min(x.count);
        let outputs = i % across * tile..(i % across * tile + tile).min(n);
        let task = Task { x, weights, scales, rows, outputs, out: &output, zeros };
        // SAFETY: `Set::all` has looked for the instructions. Tasks own disjoint tiles of `out`, which has the size
        // that the assertion above asks for.
        unsafe {
            match set {
                Set::Plain => run::<Plain, 2>(&task, few, buffer),
                #[cfg(target_arch = "x86_64")]
                Set::Avx2 => avx2(&task, few, buffer),
                #[cfg(target_arch = "x86_64")]
                Set::AvxVnni => avx_vnni(&task, few, buffer),
                #[cfg(target_arch = "x86_64")]
                Set::Avx512 => avx512(&task, few, buffer),
            }
        }
    });
}

/// # Safety
/// As for [`run`]; the instruction set must be there.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2(task: &Task, few: bool, buffer: &mut Vec<u8>) {
    // SAFETY: by the contract.
    unsafe { run::<x86::Pairs, 4>(task, few, buffer) }
}

/// # Safety
/// As for [`run`]; the instruction set must be there.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,avxvnni")]
unsafe fn avx_vnni(task: &Task, few: bool, buffer: &mut Vec<u8>) {
    // SAFETY: by the contract.
    unsafe { run::<x86::Narrow, 6>(task, few, buffer) }
}

/// # Safety
/// As for [`run`]; the instruction set must be there.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn avx512(task: &Task, few: bool, buffer: &mut Vec<u8>) {
    // SAFETY: by the contract.
    unsafe { run::<x86::Wide, 12>(task, few, buffer) }
}

/// # Safety
/// The instruction set must be there, and nobody else may touch the task's tile of the output, which must be there.
#[inline(always)]
unsafe fn run<D: Dot, const ROWS: usize>(task: &Task, few: bool, buffer: &mut Vec<u8>) {
    // SAFETY: by this function's contract.
    unsafe {
        if few {
            return as_they_lie::<D>(task);
        }
        for first in task.outputs.clone().step_by(PANEL) {
            let outputs = first..(first + PANEL).min(task.outputs.end);
            pack(task, outputs.clone(), buffer);
            let sums = if task.zeros { sums_of(task, outputs.clone()) } else { Vec::new() };
            let mut r = task.rows.start;
            while r < task.rows.end {
                let rows = match task.rows.end - r {
                    left if left >= ROWS => ROWS,
                    4.. => 4,
                    _ => 1,
                };
                for half in (0..PANEL).step_by(2 * D::LANES) {
                    match rows {
                        1 => block::<D, 1>(task, r, outputs.clone(), half, buffer, &sums),
                        4 => block::<D, 4>(task, r, outputs.clone(), half, buffer, &sums),
                        _ => block::<D, ROWS>(task, r, outputs.clone(), half, buffer, &sums),
                    }
                }
                r += rows;
            }
        }
    }
}

/// Brings the weights of up to [`PANEL`] outputs into the order of the products, plus 128: four columns of each output
/// side by side, segments filled up.
#[inline(always)]
fn pack(task: &Task, outputs: Range<usize>, buffer: &mut Vec<u8>) {
    let x = task.x;
    // What fills up meets zeros of x and may be anything.
    buffer.resize(x.segments() * x.padded() * PANEL, 0);
    for s in 0..x.segments() {
        let columns = x.columns(s);
        let panel = &mut buffer[s * x.padded() * PANEL..];
        for (j, n) in outputs.clone().enumerate() {
            let row = &task.weights[n * x.cols..(n + 1) * x.cols][columns.clone()];
            let (fours, rest) = row.as_chunks::<4>();
            let (to, _) = panel.as_chunks_mut::<4>();
            for (to, four) in to.iter_mut().skip(j).step_by(PANEL).zip(fours) {
                *to = (u32::from_ne_bytes(*four) ^ 0x8080_8080).to_ne_bytes();
            }
            if !rest.is_empty() {
                let mut four = [0; 4];
                four[..rest.len()].copy_from_slice(rest);
                to[fours.len() * PANEL + j] = four.map(|v| v ^ 0x80);
            }
        }
    }
}

/// Sums of the weights of up to [`PANEL`] outputs in each segment.
#[inline(always)]
fn sums_of(task: &Task, outputs: Range<usize>) -> Vec<[i32; PANEL]> {
    let x = task.x;
    let mut sums = vec![[0; PANEL]; x.segments()];
    for (j, n) in outputs.enumerate() {
        let row = &task.weights[n * x.cols..(n + 1) * x.cols];
        for (sums, part) in sums.iter_mut().zip(row.chunks(x.segment)) {
            for v in part {
                sums[j] += i32::from(*v as i8);
            }
        }
    }
    sums
}

/// `ROWS` rows from `r` on by two vectors of a panel, those from output `half` on.
///
/// # Safety
/// As for [`run`]; the rows are the task's.
#[inline(always)]
unsafe fn block<D: Dot, const ROWS: usize>(
    task: &Task,
    r: usize,
    outputs: Range<usize>,
    half: usize,
    panel: &[u8],
    sums: &[[i32; PANEL]],
) {
    let x = task.x;
    let (stride, segments) = (x.stride(), x.segments());
    let width = 2 * D::LANES;
    if half >= outputs.len() {
        return;
    }
    let mut total = [[0.0f32; PANEL]; ROWS];
    for s in 0..segments {
        let at = s * x.padded();
        // SAFETY: rows and panel hold this segment with its padding.
        let acc = unsafe {
            let values = x.values.as_ptr().add(r * stride + at);
            let weights = panel.as_ptr().add(at * PANEL + half * 4);
            panel_sums::<D, ROWS>(values, stride, weights, x.columns(s).len())
        };
        for i in 0..ROWS {
            let mut whole = [0i32; PANEL];
            // SAFETY: two vectors fit.
            unsafe {
                D::store(acc[i][0], whole.as_mut_ptr());
                D::store(acc[i][1], whole.as_mut_ptr().add(D::LANES));
            }
            let factor = x.factors[(r + i) * segments + s];
            let lifted = factor.sum.wrapping_mul(128);
            if factor.zero != 0 {
                for (whole, sum) in whole[..width].iter_mut().zip(&sums[s][half..]) {
                    *whole = whole.wrapping_sub(factor.zero.wrapping_mul(*sum));
                }
            }
            for (total, whole) in total[i][..width].iter_mut().zip(&whole[..width]) {
                *total += whole.wrapping_sub(lifted) as f32 * factor.scale;
            }
        }
    }
    let first = outputs.start + half;
    let count = width.min(outputs.end - first);
    let scales = &task.scales[first..first + count];
    for (i, total) in total.iter_mut().enumerate() {
        total.iter_mut().zip(scales).for_each(|(total, scale)| *total *= scale);
        // SAFETY: this part of the row is in the task's tile.
        unsafe {
            let to = task.out.to.add((r + i) * task.out.stride + first);
            to.copy_from_nonoverlapping(total.as_ptr(), count);
        }
    }
}

/// Products of `ROWS` rows, `stride` apart, and two vectors of a panel over `columns` columns.
///
/// # Safety
/// The instruction set must be there; rows and panel must hold the columns, rounded up to four.
#[inline(always)]
unsafe fn panel_sums<D: Dot, const ROWS: usize>(
    values: *const i8,
    stride: usize,
    weights: *const u8,
    columns: usize,
) -> [[D::Vector; 2]; ROWS] {
    let mut acc = [[D::zero(); 2]; ROWS];
    let mut k = 0;
    while k < columns {
        // SAFETY: by this function's contract.
        unsafe {
            let w0 = D::load(weights.add(k * PANEL));
            let w1 = D::load(weights.add(k * PANEL + D::LANES * 4));
            let mut i = 0;
            while i < ROWS {
                let four = D::splat(values.add(i * stride + k));
                acc[i] = [D::dot(acc[i][0], w0, four), D::dot(acc[i][1], w1, four)];
                i += 1;
            }
        }
        k += 4;
    }
    acc
}

/// Few rows: products along the rows of the weights, four outputs at a time.
///
/// # Safety
/// As for [`run`]; segments are whole vectors, or there is one only.
#[inline(always)]
unsafe fn as_they_lie<D: Dot>(task: &Task) {
    let sums = if task.zeros { sums_of(task, task.outputs.clone()) } else { Vec::new() };
    let mut n = task.outputs.start;
    // SAFETY: by this function's contract; rows and outputs are the task's.
    unsafe {
        while n < task.outputs.end {
            let four = n + 4 <= task.outputs.end;
            let mut r = task.rows.start;
            while r < task.rows.end {
                let two = r + 2 <= task.rows.end;
                match (two, four) {
                    (true, true) => along::<D, 2, 4>(task, r, n, &sums),
                    (true, false) => along::<D, 2, 1>(task, r, n, &sums),
                    (false, true) => along::<D, 1, 4>(task, r, n, &sums),
                    (false, false) => along::<D, 1, 1>(task, r, n, &sums),
                }
                r += if two { 2 } else { 1 };
            }
            n += if four { 4 } else { 1 };
        }
    }
}

/// # Safety
/// As for [`as_they_lie`]; the rows and outputs are the task's.
#[inline(always)]
unsafe fn along<D: Dot, const ROWS: usize, const OUTPUTS: usize>(
    task: &Task,
    r: usize,
    n: usize,
    sums: &[[i32; PANEL]],
) {
    let x = task.x;
    let (stride, segments) = (x.stride(), x.segments());
    let vector = D::LANES * 4;
    let mut total = [[0.0f32; OUTPUTS]; ROWS];
    for s in 0..segments {
        let columns = x.columns(s);
        let whole = columns.len() / vector * vector;
        let mut weights: [&[u8]; OUTPUTS] = [&[]; OUTPUTS];
        for (j, weights) in weights.iter_mut().enumerate() {
            *weights = &task.weights[(n + j) * x.cols..(n + j + 1) * x.cols][columns.clone()];
        }
        let mut acc = [[D::zero(); OUTPUTS]; ROWS];
        // SAFETY: vectors of weights end in their row, or are the buffer; rows of x are filled up to vectors.
        unsafe {
            let values = x.values.as_ptr().add(r * stride + s * x.padded());
            let mut from = [std::ptr::null(); OUTPUTS];
            for k in (0..whole).step_by(vector) {
                for (from, weights) in from.iter_mut().zip(&weights) {
                    *from = weights.as_ptr().add(k);
                }
                step::<D, ROWS, OUTPUTS>(&mut acc, values.add(k), stride, &from);
            }
            if whole < columns.len() {
                let mut rest = [[0u8; VECTOR]; OUTPUTS];
                for ((from, rest), weights) in from.iter_mut().zip(&mut rest).zip(&weights) {
                    rest[..columns.len() - whole].copy_from_slice(&weights[whole..]);
                    *from = rest.as_ptr();
                }
                step::<D, ROWS, OUTPUTS>(&mut acc, values.add(whole), stride, &from);
            }
        }
        for i in 0..ROWS {
            let factor = x.factors[(r + i) * segments + s];
            for j in 0..OUTPUTS {
                let mut lanes = [0i32; 16];
                // SAFETY: no vector has more lanes.
                unsafe { D::store(acc[i][j], lanes.as_mut_ptr()) };
                let mut sum = lanes.iter().fold(0i32, |sum, lane| sum.wrapping_add(*lane));
                sum = sum.wrapping_sub(factor.sum.wrapping_mul(128));
                if factor.zero != 0 {
                    sum = sum.wrapping_sub(factor.zero.wrapping_mul(sums[s][n - task.outputs.start + j]));
                }
                total[i][j] += sum as f32 * factor.scale;
            }
        }
    }
    for i in 0..ROWS {
        for j in 0..OUTPUTS {
            // SAFETY: it is in the task's tile.
            unsafe { *task.out.to.add((r + i) * task.out.stride + n + j) = total[i][j] * task.scales[n + j] };
        }
    }
}

/// One vector of columns.
///
/// # Safety
/// The instruction set must be there; a vector must be readable at each place.
#[inline(always)]
unsafe fn step<D: Dot, const ROWS: usize, const OUTPUTS: usize>(
    acc: &mut [[D::Vector; OUTPUTS]; ROWS],
    values: *const i8,
    stride: usize,
    weights: &[*const u8; OUTPUTS],
) {
    // SAFETY: by this function's contract.
    unsafe {
        let mut v = [D::zero(); ROWS];
        for (i, v) in v.iter_mut().enumerate() {
            *v = D::load(values.add(i * stride).cast());
        }
        for j in 0..OUTPUTS {
            let w = D::lift(D::load(weights[j]));
            for i in 0..ROWS {
                acc[i][j] = D::dot(acc[i][j], w, v[i]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(n: usize, seed: u32) -> Vec<i8> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as i8
        };
        // The ends of the range come often: they are where sums would be cut off.
        (0..n).map(|i| if i % 3 == 0 { [-128, 127][i / 3 % 2] } else { next() }).collect()
    }

    fn rows(count: usize, cols: usize, segment: usize, with_zeros: bool) -> Rows {
        let values = bytes(count * cols, 7);
        let mut rows = Rows::new(count, cols, segment);
        rows.fill(|r, parts, factors| {
            let mut from = &values[r * cols..(r + 1) * cols];
            for (s, (part, factor)) in parts.zip(factors).enumerate() {
                let (now, after) = from.split_at(part.len());
                part.copy_from_slice(now);
                from = after;
                factor.scale = 0.01 + 0.003 * (r % 5) as f32 + 0.001 * s as f32;
                factor.zero = if with_zeros { [-128, 3, 0, 127][r % 4] } else { 0 };
            }
        });
        rows
    }

    /// Plain loops in 64 bits, the same floats at the end.
    fn oracle(x: &Rows, weights: &[u8], scales: &[f32]) -> Vec<f32> {
        let mut out = Vec::new();
        for r in 0..x.count {
            for (n, scale) in scales.iter().enumerate() {
                let mut total = 0.0f32;
                for s in 0..x.segments() {
                    let (values, factor) = x.part(r, s);
                    let weights = &weights[n * x.cols + s * x.segment..];
                    let sum: i64 = values
                        .iter()
                        .zip(weights)
                        .map(|(v, w)| (i64::from(*v) - i64::from(factor.zero)) * i64::from(*w as i8))
                        .sum();
                    total += sum as f32 * factor.scale;
                }
                out.push(total * scale);
            }
        }
        out
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        for (count, cols, segment, n) in [
            (1, 1, 1, 1),
            (3, 7, 7, 5),
            (2, 576, 576, 40),
            (16, 130, 130, 33),
            (17, 130, 130, 33),
            (29, 257, 257, 97),
            (5, 384, 128, 9),
            (31, 200, 33, 70),
            (2, 200, 33, 70),
            (1030, 20, 20, 98),
        ] {
            let weights: Vec<u8> = bytes(n * cols, 3).into_iter().map(|v| v as u8).collect();
            let scales: Vec<f32> = (0..n).map(|j| 0.02 + 0.001 * (j % 11) as f32).collect();
            for with_zeros in [false, true] {
                let x = rows(count, cols, segment, with_zeros);
                let want = oracle(&x, &weights, &scales);
                for set in Set::all() {
                    let mut out = vec![f32::NAN; count * n];
                    with(set, &x, &weights, &scales, &mut out);
                    assert_eq!(out, want, "{set:?}: {count}x{cols} in {segment}, {n} outputs, zeros {with_zeros}");
                }
            }
        }
    }

    #[test]
    fn the_longest_sums_are_not_cut_off() {
        let cols = LONGEST + 70;
        let mut x = Rows::new(18, cols, LONGEST);
        x.fill(|_, parts, factors| {
            for (part, factor) in parts.zip(factors) {
                part.fill(127);
                *factor = Factor { scale: 1.0, zero: -128, sum: 0 };
            }
        });
        let weights = vec![128u8; 2 * cols];
        let want = (255 * -128 * LONGEST as i64) as f32 + (255 * -128 * 70) as f32;
        for set in Set::all() {
            let mut out = vec![0.0; 36];
            with(set, &x, &weights, &[1.0, 0.5], &mut out);
            assert_eq!((out[0], out[35]), (want, want * 0.5), "{set:?}");
        }
    }

    #[test]
    #[should_panic]
    fn weights_of_another_size_are_refused() {
        linear(&Rows::new(1, 4, 4), &[0; 7], &[1.0, 1.0], &mut [0.0, 0.0]);
    }
}
