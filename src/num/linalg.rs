//! Factorizations, in f64: calibration data are often close to rank-deficient.

use faer::linalg::solvers::Llt;
use faer::linalg::triangular_inverse::invert_lower_triangular;
use faer::{Mat, Par, Side};

/// The upper triangle U with H^-1 = U'U, row-major f32, for a symmetric `h` (`n` x `n`, row-major, only its
/// lower triangle is read); `None` when `h` is not positive definite.
///
/// With J the reversal of rows and columns and JHJ = LL', U is J L^-1 J: one factorization and one
/// triangular inverse instead of factorization, inverse, factorization.
pub fn inverse_factor(h: &[f64], n: usize) -> Option<Vec<f32>> {
    // Sequential, so that the result does not depend on the number of threads.
    faer::set_global_parallelism(Par::Seq);
    let reversed = Mat::from_fn(n, n, |i, j| h[(n - 1 - i.min(j)) * n + (n - 1 - i.max(j))]);
    let factor = Llt::new(reversed.as_ref(), Side::Lower).ok()?;
    let lower = factor.L();
    let mut inverse = Mat::<f64>::zeros(n, n);
    invert_lower_triangular(inverse.as_mut(), lower, Par::Seq);
    let mut upper = vec![0.0f32; n * n];
    for i in 0..n {
        for j in i..n {
            let value = inverse[(n - 1 - i, n - 1 - j)];
            if !value.is_finite() {
                return None;
            }
            upper[i * n + j] = value as f32;
        }
    }
    Some(upper)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factor_reproduces_the_inverse() {
        let n = 9;
        let a = |i: usize, j: usize| ((i * 7 + j * 3) % 5) as f64 - 2.0;
        let h: Vec<f64> = (0..n * n)
            .map(|x| (0..n).map(|k| a(x / n, k) * a(x % n, k)).sum::<f64>() + if x / n == x % n { 1.0 } else { 0.0 })
            .collect();
        let mut lower = h.clone();
        for i in 0..n {
            lower[i * n + i + 1..(i + 1) * n].fill(f64::NAN);
        }
        let u = inverse_factor(&lower, n).expect("positive definite");
        for i in 0..n {
            for j in 0..n {
                let product: f64 = (0..n)
                    .map(|m| h[i * n + m] * (0..n).map(|k| (u[k * n + m] * u[k * n + j]) as f64).sum::<f64>())
                    .sum();
                assert!((product - if i == j { 1.0 } else { 0.0 }).abs() < 1e-4);
            }
        }
    }

    #[test]
    fn indefinite_is_refused() {
        assert!(inverse_factor(&[1.0, 2.0, 2.0, 1.0], 2).is_none());
    }
}
