//! f32 matrix products. Work is split over tiles of the output whose sizes depend on the shapes alone, and
//! each tile is one sequential product: the same bits for any number of threads.

use std::ops::Range;

use gemm::Parallelism;
use rayon::prelude::*;

use super::few::SIDE;

/// Output columns per task: small enough to share narrow layers over cores, wide enough for the kernels.
const TILE: usize = 192;
/// Rows of a Gram matrix per task.
const BAND: usize = TILE / 2;
/// Columns of a Gram matrix that are computed at once.
const GRAM_TILE: usize = TILE;
/// Rows whose products are summed in f32.
const GRAM_ROWS: usize = 256;
/// Output rows per task.
const CHUNK: usize = 1024;
/// Products of a task, for few rows.
const AT_ONCE: usize = 1 << 16;

/// A strided view for [`product`]: element (r, c) is `data[r * row + c * col]`.
#[derive(Clone, Copy)]
pub struct View<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row: usize,
    col: usize,
}

impl<'a> View<'a> {
    /// A row-major matrix whose rows start `stride` elements apart.
    ///
    /// # Panics
    /// If `data` does not hold it.
    pub fn new(data: &'a [f32], rows: usize, cols: usize, stride: usize) -> Self {
        assert!(extent(rows, cols, stride).is_some_and(|n| n <= data.len()));
        Self { data, rows, cols, row: stride, col: 1 }
    }

    /// The transposed view.
    pub fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, row: self.col, col: self.row, ..self }
    }
}

/// Elements that a row-major matrix spans; `None` if that is more than can be counted.
fn extent(rows: usize, cols: usize, stride: usize) -> Option<usize> {
    if rows == 0 || cols == 0 { Some(0) } else { (rows - 1).checked_mul(stride)?.checked_add(cols) }
}

/// `out = out * keep + scale * a * b` for a row-major `out` whose rows start `stride` elements apart, with
/// `keep` 1 or 0.
pub fn product(out: &mut [f32], stride: usize, keep: bool, scale: f32, a: View, b: View) {
    assert_eq!(a.cols, b.rows);
    assert!(stride >= b.cols && extent(a.rows, b.cols, stride).is_some_and(|n| n <= out.len()));
    // SAFETY: the assertions above and in `View::new` keep every element inside its slice, and `out` is
    // borrowed exclusively.
    unsafe { raw(out.as_mut_ptr(), stride, keep, scale, a, b) }
}

/// # Safety
/// `out` must be valid for writes at `r * stride + c` for every row of `a` and column of `b`, and nobody
/// else may touch those elements meanwhile.
unsafe fn raw(out: *mut f32, stride: usize, keep: bool, scale: f32, a: View, b: View) {
    if a.rows == 0 || b.cols == 0 {
        return;
    }
    // SAFETY: by this function's contract for `out`; `View::new` checked the operands.
    unsafe {
        gemm::gemm(
            a.rows,
            b.cols,
            a.cols,
            out,
            1,
            stride as isize,
            keep,
            a.data.as_ptr(),
            a.col as isize,
            a.row as isize,
            b.data.as_ptr(),
            b.col as isize,
            b.row as isize,
            1.0,
            scale,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

struct Shared(*mut f32);
// SAFETY: only used to hand disjoint tiles of one output to the tasks of one call.
unsafe impl Sync for Shared {}

/// `out[t, n] = sum_k x[t, k] w[n, k]` for `t` rows of `x`; `panel(rows, buffer)` supplies rows of w, so
/// that a stored weight is never widened as a whole.
pub fn linear(
    x: &[f32],
    t: usize,
    k: usize,
    n: usize,
    panel: &(dyn Fn(Range<usize>, &mut [f32]) + Sync),
    out: &mut [f32],
) {
    assert!(Some(x.len()) == t.checked_mul(k) && Some(out.len()) == t.checked_mul(n));
    let tile = if t < CHUNK { TILE / 2 } else { TILE };
    let (down, across) = (t.div_ceil(CHUNK), n.div_ceil(tile));
    let shared = Shared(out.as_mut_ptr());
    let shared = &shared;
    (0..down * across).into_par_iter().for_each_init(Vec::new, |buffer: &mut Vec<f32>, task| {
        let rows = task / across * CHUNK..(task / across * CHUNK + CHUNK).min(t);
        let cols = task % across * tile..(task % across * tile + tile).min(n);
        buffer.resize(cols.len() * k, 0.0);
        panel(cols.clone(), buffer);
        let a = View::new(&x[rows.start * k..rows.end * k], rows.len(), k, k);
        let b = View::new(buffer, cols.len(), k, k).t();
        // SAFETY: tasks own disjoint tiles `rows` x `cols` of `out`, which the assertion above sized.
        unsafe { raw(shared.0.add(rows.start * n + cols.start), n, false, 1.0, a, b) }
    });
}

/// `out[t, n] = sum_k x[t, k] w[n, k]` for few rows of `x`, `k` values each; `products(rows, out)` gives the sums of some
/// rows of w as `[rows, t]`.
pub fn linear_of_few(
    t: usize,
    k: usize,
    n: usize,
    products: &(dyn Fn(Range<usize>, &mut [f32]) + Sync),
    out: &mut [f32],
) {
    assert!(Some(out.len()) == t.checked_mul(n));
    let tile = (AT_ONCE / (t * k).max(1)).max(1).next_multiple_of(SIDE);
    if t == 1 {
        return out.par_chunks_mut(tile).enumerate().for_each(|(i, out)| products(i * tile..i * tile + out.len(), out));
    }
    let shared = Shared(out.as_mut_ptr());
    let shared = &shared;
    (0..n.div_ceil(tile)).into_par_iter().for_each_init(Vec::new, |buffer: &mut Vec<f32>, task| {
        let rows = task * tile..(task * tile + tile).min(n);
        buffer.resize(rows.len() * t, 0.0);
        products(rows.clone(), buffer);
        for (n_at, sums) in rows.zip(buffer.chunks_exact(t)) {
            for (r, sum) in sums.iter().enumerate() {
                // SAFETY: tasks own disjoint columns of `out`, which the assertion above sized.
                unsafe { *shared.0.add(r * n + n_at) = *sum };
            }
        }
    });
}

/// Adds the lower triangle of X'X to `acc` (`k` x `k`, row-major). Products of [`GRAM_ROWS`] rows are summed in
/// f32, the rest in f64: what calibration rounds off decides codes.
pub fn add_gram(x: &[f32], t: usize, k: usize, acc: &mut [f64]) {
    assert!(x.len() == t * k && acc.len() == k * k);
    // Lower bands are longer; taking them first leaves the short ones to fill gaps.
    acc.par_chunks_mut(BAND * k).enumerate().rev().for_each_init(Vec::new, |buffer: &mut Vec<f32>, (i, band)| {
        let rows = i * BAND..i * BAND + band.len() / k;
        for x in x.chunks(GRAM_ROWS * k) {
            let t = x.len() / k;
            for start in (0..rows.end).step_by(GRAM_TILE) {
                let cols = start..(start + GRAM_TILE).min(rows.end);
                buffer.resize(rows.len() * cols.len(), 0.0);
                product(buffer, cols.len(), false, 1.0, columns(x, t, k, &rows).t(), columns(x, t, k, &cols));
                for (r, line) in buffer.chunks_exact(cols.len()).enumerate() {
                    for (a, b) in band[r * k + cols.start..].iter_mut().zip(line) {
                        *a += *b as f64;
                    }
                }
            }
        }
    });
}

/// Columns `range` of a row-major `t` x `k` matrix.
fn columns<'a>(x: &'a [f32], t: usize, k: usize, range: &Range<usize>) -> View<'a> {
    View::new(x.get(range.start..).unwrap_or_default(), t, range.len(), k)
}

/// Adds X'Y to `acc` (`k` x `k`, row-major) for `t` rows of `x` and `y`.
pub fn add_cross(x: &[f32], y: &[f32], t: usize, k: usize, acc: &mut [f32]) {
    assert!(x.len() == t * k && y.len() == t * k && acc.len() == k * k);
    let y = View::new(y, t, k, k);
    acc.par_chunks_mut(BAND * k).enumerate().for_each(|(i, band)| {
        let rows = i * BAND..i * BAND + band.len() / k;
        product(band, k, true, 1.0, columns(x, t, k, &rows).t(), y);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        };
        (0..n).map(|_| next()).collect()
    }

    #[test]
    fn linear_matches_f64() {
        for (t, k, n) in [(1, 7, 5), (33, 65, 200), (1030, 40, 193)] {
            let (x, w) = (numbers(t * k, 1), numbers(n * k, 2));
            let mut out = vec![f32::NAN; t * n];
            linear(&x, t, k, n, &|r, b| b.copy_from_slice(&w[r.start * k..r.end * k]), &mut out);
            for (i, &o) in out.iter().enumerate() {
                let want: f64 = (0..k).map(|j| x[i / n * k + j] as f64 * w[i % n * k + j] as f64).sum();
                assert!((o as f64 - want).abs() < 1e-4, "{t}x{k}x{n} at {i}: {o} {want}");
            }
        }
    }

    #[test]
    fn cross_matches_f64_and_accumulates() {
        let (t, k) = (50, 200);
        let (x, y) = (numbers(t * k, 4), numbers(t * k, 5));
        let mut acc = vec![0.0; k * k];
        add_cross(&x[..20 * k], &y[..20 * k], 20, k, &mut acc);
        add_cross(&x[20 * k..], &y[20 * k..], 30, k, &mut acc);
        for (i, &found) in acc.iter().enumerate() {
            let want: f64 = (0..t).map(|s| x[s * k + i / k] as f64 * y[s * k + i % k] as f64).sum();
            assert!((found as f64 - want).abs() < 1e-4);
        }
    }

    #[test]
    fn gram_matches_f64_and_accumulates() {
        let (t, k) = (50, 200);
        let x = numbers(t * k, 3);
        let mut acc = vec![0.0; k * k];
        add_gram(&x[..20 * k], 20, k, &mut acc);
        add_gram(&x[20 * k..], 30, k, &mut acc);
        for i in 0..k {
            for j in 0..=i {
                let want: f64 = (0..t).map(|s| x[s * k + i] as f64 * x[s * k + j] as f64).sum();
                assert!((acc[i * k + j] - want).abs() < 1e-4);
            }
        }
    }

    #[test]
    #[should_panic]
    fn extents_that_overflow_are_refused() {
        View::new(&[0.0], 2, 2, usize::MAX);
    }

    #[test]
    #[should_panic]
    fn sizes_that_overflow_are_refused() {
        linear(&[], 1 << 32, 0, 1 << 32, &|_, _| (), &mut []);
    }
}
