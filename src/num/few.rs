//! Products of rows of weights with a few rows of activations. Every product is summed up in one order, whatever it is
//! computed together with and whatever vectors the processor has: a row's results are those of the row alone.

use super::lanes::{Simd, WithSimd, run};

/// Running sums of a product: sum `l` takes columns `l`, `l + LANES` and so on.
pub const LANES: usize = 32;
/// Rows of weights that are multiplied together.
pub const TOGETHER: usize = 4;
/// Outputs that stand side by side in [`side_by_side`].
pub const SIDE: usize = 32;

/// The sum of [`LANES`] lanes, by halves.
#[inline(always)]
pub fn total<S: Simd, const V: usize>(simd: S, mut sums: [S::f32s; V]) -> f32 {
    let mut count = V;
    while count > 1 {
        count /= 2;
        for i in 0..count {
            sums[i] = simd.add_f32s(sums[i], sums[i + count]);
        }
    }
    // Whichever way it turns: all lanes that far apart hold the same.
    let mut half = S::F32_LANES / 2;
    while half > 0 {
        sums[0] = simd.add_f32s(sums[0], simd.rotate_right_f32s(sums[0], half));
        half /= 2;
    }
    bytemuck::cast_slice::<S::f32s, f32>(&sums[..1])[0]
}

/// `out[n, r] = sum_k w[n, k] x[r, k]` for rows of `k` values, in [`LANES`] running sums; what is left over is summed up
/// by itself.
///
/// # Panics
/// If the sizes do not belong together.
pub fn products(w: &[f32], x: &[f32], k: usize, out: &mut [f32]) {
    if k == 0 {
        return out.fill(0.0);
    }
    let (n, t) = (w.len() / k, x.len() / k);
    assert!(w.len() == n * k && x.len() == t * k && out.len() == n * t);
    run(Products { w, x, k, out });
}

struct Products<'a> {
    w: &'a [f32],
    x: &'a [f32],
    k: usize,
    out: &'a mut [f32],
}

impl WithSimd for Products<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // As many sums as there are registers for; a product has `32 / F32_LANES` vectors of them.
        match S::F32_LANES {
            1 => self.blocks::<S, 32, 1, 1>(simd),
            2 => self.blocks::<S, 16, 1, 1>(simd),
            4 => self.blocks::<S, 8, 1, 1>(simd),
            8 => self.blocks::<S, 4, 2, 1>(simd),
            _ => self.blocks::<S, 2, 4, 2>(simd),
        }
    }
}

impl Products<'_> {
    /// `W` rows of weights by `R` rows of activations at a time.
    #[inline(always)]
    fn blocks<S: Simd, const V: usize, const W: usize, const R: usize>(self, simd: S) {
        let Self { w, x, k, out } = self;
        let t = x.len() / k;
        for (w, out) in w.chunks(W * k).zip(out.chunks_mut(W * t)) {
            for (i, x) in x.chunks(R * k).enumerate() {
                let out = &mut out[i * R..];
                match (w.len() == W * k, x.len() == R * k) {
                    (true, true) => block::<S, V, W, R>(simd, w, x, k, out, t),
                    (true, false) => each::<S, V, W, 1>(simd, w, x, k, out, t),
                    (false, true) => each::<S, V, 1, R>(simd, w, x, k, out, t),
                    (false, false) => each::<S, V, 1, 1>(simd, w, x, k, out, t),
                }
            }
        }
    }
}

/// What does not fill a block.
#[inline(always)]
fn each<S: Simd, const V: usize, const W: usize, const R: usize>(
    simd: S,
    w: &[f32],
    x: &[f32],
    k: usize,
    out: &mut [f32],
    t: usize,
) {
    for (n, w) in w.chunks_exact(W * k).enumerate() {
        for (r, x) in x.chunks_exact(R * k).enumerate() {
            block::<S, V, W, R>(simd, w, x, k, &mut out[n * W * t + r * R..], t);
        }
    }
}

/// `W` rows of weights by `R` rows of activations; the outputs of a weight lie `t` apart from the next one's.
#[inline(always)]
fn block<S: Simd, const V: usize, const W: usize, const R: usize>(
    simd: S,
    w: &[f32],
    x: &[f32],
    k: usize,
    out: &mut [f32],
    t: usize,
) {
    let steps = k / LANES;
    let whole = steps * LANES;
    let mut rows_w: [&[[S::f32s; V]]; W] = [&[]; W];
    let mut rows_x: [&[[S::f32s; V]]; R] = [&[]; R];
    for (to, row) in rows_w.iter_mut().zip(w.chunks_exact(k)) {
        *to = bytemuck::cast_slice::<f32, S::f32s>(&row[..whole]).as_chunks().0;
    }
    for (to, row) in rows_x.iter_mut().zip(x.chunks_exact(k)) {
        *to = bytemuck::cast_slice::<f32, S::f32s>(&row[..whole]).as_chunks().0;
    }
    assert!(V * S::F32_LANES == LANES && rows_w.iter().chain(&rows_x).all(|row| row.len() == steps));
    let mut sums = [[[simd.splat_f32s(0.0); V]; R]; W];
    for step in 0..steps {
        for n in 0..W {
            for r in 0..R {
                // SAFETY: `step` is below `steps`, the length that was asserted.
                let (w, x) = unsafe { (rows_w[n].get_unchecked(step), rows_x[r].get_unchecked(step)) };
                for v in 0..V {
                    sums[n][r][v] = simd.add_f32s(sums[n][r][v], simd.mul_f32s(w[v], x[v]));
                }
            }
        }
    }
    for n in 0..W {
        for r in 0..R {
            let mut tail = 0.0;
            for (w, x) in w[n * k + whole..(n + 1) * k].iter().zip(&x[r * k + whole..(r + 1) * k]) {
                tail += w * x;
            }
            out[n * t + r] = total(simd, sums[n][r]) + tail;
        }
    }
}

/// `sums[r, l] += sum_k x[r, k] w[k, l]` for outputs that stand side by side, column after column: `x` holds rows
/// `stride` apart, of which the first `w.len()` columns are meant.
///
/// # Panics
/// If `x` does not hold them.
pub fn side_by_side(w: &[[f32; SIDE]], x: &[f32], stride: usize, sums: &mut [[f32; SIDE]]) {
    let last = sums.len().saturating_sub(1) * stride;
    assert!(w.len() <= stride && x.len() >= last + w.len());
    run(SideBySide { w, x, stride, sums });
}

struct SideBySide<'a> {
    w: &'a [[f32; SIDE]],
    x: &'a [f32],
    stride: usize,
    sums: &'a mut [[f32; SIDE]],
}

impl WithSimd for SideBySide<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match S::F32_LANES {
            1 => self.rows::<S, 32, 1>(simd),
            2 => self.rows::<S, 16, 1>(simd),
            4 => self.rows::<S, 8, 1>(simd),
            8 => self.rows::<S, 4, 2>(simd),
            _ => self.rows::<S, 2, 8>(simd),
        }
    }
}

impl SideBySide<'_> {
    /// `R` rows at a time of `N` vectors each.
    #[inline(always)]
    fn rows<S: Simd, const N: usize, const R: usize>(self, simd: S) {
        let Self { w, x, stride, sums } = self;
        for (i, sums) in sums.chunks_mut(R).enumerate() {
            let x = &x[i * R * stride..];
            match sums.as_chunks_mut::<R>().0 {
                [sums] => columns::<S, N, R>(simd, w, x, stride, sums),
                _ => {
                    for (r, sums) in sums.as_chunks_mut::<1>().0.iter_mut().enumerate() {
                        columns::<S, N, 1>(simd, w, &x[r * stride..], stride, sums);
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn columns<S: Simd, const N: usize, const R: usize>(
    simd: S,
    w: &[[f32; SIDE]],
    x: &[f32],
    stride: usize,
    sums: &mut [[f32; SIDE]; R],
) {
    let mut rows: [&[f32]; R] = [&[]; R];
    for (r, row) in rows.iter_mut().enumerate() {
        *row = &x[r * stride..][..w.len()];
    }
    let mut acc = [[simd.splat_f32s(0.0); N]; R];
    for (acc, sums) in acc.iter_mut().zip(&*sums) {
        acc.copy_from_slice(bytemuck::cast_slice(sums));
    }
    for (k, w) in w.iter().enumerate() {
        let w: &[S::f32s] = bytemuck::cast_slice(w);
        for r in 0..R {
            // SAFETY: each row has as many columns as `w`.
            let x = simd.splat_f32s(unsafe { *rows[r].get_unchecked(k) });
            for n in 0..N {
                acc[r][n] = simd.add_f32s(acc[r][n], simd.mul_f32s(x, w[n]));
            }
        }
    }
    for (acc, sums) in acc.iter().zip(sums) {
        bytemuck::cast_slice_mut::<f32, S::f32s>(sums).copy_from_slice(acc);
    }
}

#[cfg(test)]
mod tests {
    use super::super::lanes::Scalar;
    use super::*;

    fn noise(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        };
        (0..n).map(|_| next()).collect()
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|v| v.to_bits()).collect()
    }

    #[test]
    fn every_product_is_that_of_its_two_rows() {
        for k in [1, 31, 32, 100, 257] {
            for (n, t) in [(1, 1), (3, 2), (4, 4), (9, 7), (5, 13)] {
                let (w, x) = (noise(n * k, 1), noise(t * k, 2));
                let mut out = vec![f32::NAN; n * t];
                products(&w, &x, k, &mut out);
                let mut narrow = out.clone();
                Products { w: &w, x: &x, k, out: &mut narrow }.with_simd(Scalar::new());
                assert_eq!(bits(&narrow), bits(&out));
                for (i, found) in out.into_iter().enumerate() {
                    let (w, x) = (&w[i / t * k..][..k], &x[i % t * k..][..k]);
                    let mut one = [f32::NAN];
                    products(w, x, k, &mut one);
                    assert_eq!(one[0].to_bits(), found.to_bits(), "{n}x{t}x{k} at {i}");
                    let want: f64 = w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                    assert!((f64::from(found) - want).abs() < 1e-5 * k as f64);
                }
            }
        }
        let mut out = [1.0; 2];
        products(&[], &[], 0, &mut out);
        assert_eq!(out, [0.0; 2]);
    }

    #[test]
    fn side_by_side_sums_columns_in_order() {
        let (k, stride) = (21, 30);
        let w = noise(k * SIDE, 3).as_chunks::<SIDE>().0.to_vec();
        for t in [1, 2, 8, 19] {
            let x = noise(t * stride, 4);
            let first: Vec<[f32; SIDE]> = vec![[0.25; SIDE]; t];
            let (mut sums, mut narrow) = (first.clone(), first.clone());
            side_by_side(&w, &x, stride, &mut sums);
            SideBySide { w: &w, x: &x, stride, sums: &mut narrow }.with_simd(Scalar::new());
            for r in 0..t {
                for l in 0..SIDE {
                    let want = (0..k).fold(0.25f32, |sum, k| sum + x[r * stride + k] * w[k][l]);
                    assert_eq!((sums[r][l].to_bits(), narrow[r][l].to_bits()), (want.to_bits(), want.to_bits()));
                }
            }
        }
    }
}
