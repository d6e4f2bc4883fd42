//! Products with weights, and calibration sums.

use std::sync::Arc;

use half::{bf16, f16};
use quantkit::backend::cpu::Cpu;
use quantkit::backend::cuda::{Cuda, CudaOptions, Precision};
use quantkit::backend::weight::{Dense, Gptq, Inputs, Weight};
use quantkit::backend::{Backend, Sums};
use quantkit::num::ggml::GgmlType;
use quantkit::tensor::Dtype;

use super::{cuda, noise};

/// What a product may differ by from the CPU's, as part of the lengths of the two vectors multiplied.
const AS_F32: f64 = 2e-5;
/// Activations rounded to f16, and to bf16.
const IN_F16: f64 = 1e-3;
const IN_BF16: f64 = 6e-3;

fn backend(precision: Precision, cublas: bool) -> Arc<Cuda> {
    cuda(CudaOptions { precision, cublas, ..CudaOptions::default() })
}

pub(super) fn dense(dtype: Dtype, rows: usize, cols: usize) -> Weight {
    let values = noise(rows * cols, 11);
    let bytes: Vec<u8> = match dtype {
        Dtype::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        Dtype::BF16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    };
    Weight::Dense(Dense { rows, cols, dtype, bytes: bytes.into() })
}

/// Random integers; the group of each column is `g_idx`.
pub(super) fn gptq(bits: u8, rows: usize, g_idx: Vec<u32>) -> Weight {
    let cols = g_idx.len();
    let groups = g_idx.iter().max().map_or(0, |g| *g as usize + 1);
    let words = cols * bits as usize / 32 * rows;
    let qweight = noise(words, 3).into_iter().zip(noise(words, 4)).map(|(a, b)| a.to_bits() << 9 ^ b.to_bits() >> 5);
    let zeros = noise(groups * rows, 5).into_iter().map(|z| (((z + 1.0) / 2.0) * f32::from((1u16 << bits) - 1)) as u8);
    let scales = noise(groups * rows, 6).into_iter().map(|s| 0.01 + 0.01 * s.abs());
    let (qweight, zeros, scales) = (qweight.collect(), zeros.collect(), scales.collect());
    Weight::Gptq(Arc::new(Gptq { rows, cols, bits, qweight, zeros, scales, g_idx }))
}

pub(super) fn natural(cols: usize, group: usize) -> Vec<u32> {
    (0..cols).map(|k| (k / group) as u32).collect()
}

/// Columns dealt to the groups as activation order deals them.
pub(super) fn scattered(cols: usize, group: usize) -> Vec<u32> {
    // 7 and any multiple of 32 have no common factor.
    (0..cols).map(|k| (k * 7 % cols / group) as u32).collect()
}

fn product(backend: &dyn Backend, weight: &Weight, x: &[f32], with_bias: bool) -> Vec<f32> {
    let (rows, cols) = (weight.rows(), weight.cols());
    let matrix = backend.load(weight.clone()).unwrap();
    let t = x.len() / cols;
    let x = backend.upload(t, cols, x.to_vec()).unwrap();
    let bias = with_bias.then(|| backend.upload(1, rows, noise(rows, 2)).unwrap());
    let out = backend.linear(&x, &matrix, bias.as_ref()).unwrap();
    assert_eq!((out.rows, out.cols), (t, rows));
    backend.download(&out).unwrap()
}

/// Holds products of `t` rows against the CPU's, entry by entry.
fn check(backend: &Cuda, weight: &Weight, t: usize, with_bias: bool, ceiling: f64) {
    check_of(backend, weight, &noise(t * weight.cols(), 1), with_bias, ceiling);
}

/// The same for the rows `x`.
fn check_of(backend: &Cuda, weight: &Weight, x: &[f32], with_bias: bool, ceiling: f64) {
    let (rows, cols) = (weight.rows(), weight.cols());
    let t = x.len() / cols;
    let (want, got) = (product(&Cpu, weight, x, with_bias), product(backend, weight, x, with_bias));
    let length = |v: &[f32]| v.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
    let w = weight.to_f32();
    for r in 0..t {
        for n in 0..rows {
            let (want, got) = (f64::from(want[r * rows + n]), f64::from(got[r * rows + n]));
            let scale = length(&x[r * cols..(r + 1) * cols]) * length(&w[n * cols..(n + 1) * cols]);
            let error = (want - got).abs() / scale;
            assert!(
                error < ceiling,
                "row {r} of {t}, output {n} of {rows}, {cols} columns: {got} for {want}, {error:e}"
            );
        }
    }
}

/// Row counts for every kernel: decoding, few rows, many rows, no tile filled.
const ROWS: [usize; 6] = [1, 3, 4, 5, 33, 130];

#[test]
fn dense_weights() {
    for cublas in [false, true] {
        let backend = backend(Precision::Double, cublas);
        for dtype in [Dtype::F16, Dtype::BF16, Dtype::F32] {
            for (i, &t) in ROWS.iter().enumerate() {
                for (rows, cols) in [(1, 32), (33, 100), (200, 520), (96, 33)] {
                    check(&backend, &dense(dtype, rows, cols), t, (i + rows) % 2 == 0, AS_F32);
                }
            }
        }
    }
}

#[test]
fn dense_weights_with_rounded_activations() {
    for cublas in [false, true] {
        let backend = backend(Precision::Single, cublas);
        for t in [5, 130] {
            check(&backend, &dense(Dtype::F16, 33, 100), t, true, IN_F16);
            check(&backend, &dense(Dtype::BF16, 33, 100), t, false, IN_BF16);
            // These were not to be rounded.
            check(&backend, &dense(Dtype::F32, 33, 100), t, true, AS_F32);
        }
    }
}

#[test]
fn quantized_weights() {
    let backend = backend(Precision::Double, true);
    for bits in [2, 3, 4, 8] {
        for (i, &t) in ROWS.iter().enumerate() {
            // Whole groups, a short last one, groups of half a unit, one group for all, scattered columns.
            let orders = [
                natural(256, 128),
                natural(224, 128),
                natural(96, 16),
                natural(160, 160),
                scattered(256, 64),
                scattered(160, 64),
            ];
            for (j, g_idx) in orders.into_iter().enumerate() {
                let rows = [33, 96, 1, 200][(i + j) % 4];
                check(&backend, &gptq(bits, rows, g_idx), t, (i + j) % 2 == 0, AS_F32);
            }
        }
    }
}

#[test]
fn quantized_weights_with_rounded_activations() {
    let backend = backend(Precision::Single, false);
    for bits in [2, 3, 4, 8] {
        for t in [5, 130] {
            check(&backend, &gptq(bits, 96, natural(256, 64)), t, true, IN_F16);
            check(&backend, &gptq(bits, 33, scattered(160, 64)), t, false, IN_F16);
        }
    }
}

/// bf16 planes keep what f16 ones would cut off.
#[test]
fn large_activations() {
    let backend = backend(Precision::Double, false);
    let weight = gptq(4, 8, natural(64, 32));
    let x: Vec<f32> = noise(5 * 64, 9).iter().map(|v| v * 1e8).collect();
    let run = |backend: &dyn Backend| {
        let x = backend.upload(5, 64, x.clone()).unwrap();
        backend.download(&backend.linear(&x, &backend.load(weight.clone()).unwrap(), None).unwrap()).unwrap()
    };
    let (want, got) = (run(&Cpu), run(&*backend));
    let largest = want.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    for (want, got) in want.iter().zip(&got) {
        assert!((want - got).abs() < 1e-4 * largest, "{got} for {want}");
    }
}

/// Products of one sign over many columns, where sums are largest beside their terms and every cut of a sum shows (see
/// `rounding`).
#[test]
fn sums_of_one_sign() {
    let (cols, rows) = (4096, 33);
    let Weight::Gptq(of_any_sign) = gptq(4, rows, natural(cols, cols)) else { unreachable!() };
    let one_group = Weight::Gptq(Arc::new(Gptq { zeros: vec![0; rows], ..(*of_any_sign).clone() }));
    let positive = |dtype| {
        let values = noise(rows * cols, 11).into_iter().map(f32::abs);
        let bytes: Vec<u8> = match dtype {
            Dtype::F16 => values.flat_map(|v| f16::from_f32(v).to_le_bytes()).collect(),
            _ => values.flat_map(f32::to_le_bytes).collect(),
        };
        Weight::Dense(Dense { rows, cols, dtype, bytes: bytes.into() })
    };
    for (cublas, ceiling) in [(false, 4e-6), (true, 1.5e-5)] {
        let backend = backend(Precision::Double, cublas);
        let (mut sum, mut count, mut worst) = (0.0, 0.0, 0.0f64);
        for weight in [positive(Dtype::F16), positive(Dtype::F32), one_group.clone()] {
            let w = weight.to_f32();
            for t in [33, 130] {
                let x: Vec<f32> = noise(t * cols, 1).into_iter().map(f32::abs).collect();
                let got = product(&*backend, &weight, &x, false);
                for (i, got) in got.into_iter().enumerate() {
                    let terms = x[i / rows * cols..][..cols].iter().zip(&w[i % rows * cols..][..cols]);
                    let want: f64 = terms.map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                    let error = f64::from(got) / want - 1.0;
                    assert!(error.abs() < ceiling, "{t} rows, cuBLAS {cublas}, at {i}: {got} for {want}, {error:e}");
                    (sum, count, worst) = (sum + error, count + 1.0, worst.max(error.abs()));
                }
            }
        }
        // Sums that are cut drift towards zero; those that are rounded to nearest do not.
        if std::env::var_os("QUANTKIT_EMULATOR_MMA").is_some() {
            let drift = sum / count;
            assert!(worst > 3e-7 && drift < -1e-7, "cuBLAS {cublas}: {worst:e}, {drift:e} on average: no sum was cut");
        }
    }
}

/// Activations beyond both ends of f16, the type of prefill's planes. Decoding and prefill are as near the CPU as with other
/// activations, and a row does not change the results of the others.
#[test]
fn activations_that_f16_does_not_hold() {
    let weights = [
        (dense(Dtype::F16, 33, 100), IN_F16),
        (gptq(4, 96, natural(256, 64)), IN_F16),
        (gptq(8, 33, scattered(160, 64)), IN_F16),
        (super::ggml::weight(GgmlType::Q4_K, 33, 256, 5), IN_F16),
        (super::eight_bits::int8(33, 100, Inputs::Float), IN_F16),
        (super::eight_bits::fp8(33, 100, (1, 100), Inputs::Float), IN_F16),
    ];
    for (precision, cublas) in [(Precision::Single, false), (Precision::Single, true), (Precision::Double, false)] {
        let backend = backend(precision, cublas);
        for (weight, ceiling) in &weights {
            let (cols, ceiling) = (weight.cols(), if precision == Precision::Double { AS_F32 } else { *ceiling });
            for t in [1, 3, 33, 130] {
                let plain = noise(t * cols, 1);
                // An outlier channel, as inputs of down projections have them, in all rows and in some.
                let mut large = plain.clone();
                large.iter_mut().skip(5).step_by(cols).for_each(|x| *x = 1e5);
                check_of(&backend, weight, &large, true, ceiling);
                let mut mixed = plain.clone();
                mixed[5] = -3e6;
                check_of(&backend, weight, &mixed, true, ceiling);
                let with = product(&*backend, weight, &mixed, true);
                let without = product(&*backend, weight, &plain, true);
                assert!(with[weight.rows()..] == without[weight.rows()..], "{t} rows: the first row changes others");
                let small: Vec<f32> = plain.iter().map(|x| x * 1e-6).collect();
                check_of(&backend, weight, &small, false, ceiling);
            }
        }
    }
}

/// The results of a row with an infinite activation are infinite or NaN.
#[test]
fn infinity_is_not_a_large_number() {
    for precision in [Precision::Single, Precision::Double] {
        let backend = backend(precision, false);
        for weight in [dense(Dtype::F16, 33, 100), gptq(4, 33, natural(96, 32))] {
            for t in [2, 33, 130] {
                let mut x = noise(t * weight.cols(), 1);
                x[weight.cols() + 3] = f32::INFINITY;
                for (i, v) in product(&*backend, &weight, &x, true).into_iter().enumerate() {
                    assert_eq!(v.is_finite(), i / 33 != 1, "{precision:?}, {t} rows: {v} at {i}");
                }
            }
        }
    }
}

#[test]
fn a_nan_stays_one() {
    let backend = backend(Precision::Double, false);
    for (weight, t) in
        [(dense(Dtype::F16, 33, 100), 5), (gptq(4, 33, natural(96, 32)), 130), (dense(Dtype::BF16, 8, 64), 2)]
    {
        let mut x = noise(t * weight.cols(), 1);
        x[weight.cols() + 3] = f32::NAN;
        let x = backend.upload(t, weight.cols(), x).unwrap();
        let rows = weight.rows();
        let out = backend.download(&backend.linear(&x, &backend.load(weight).unwrap(), None).unwrap()).unwrap();
        for (i, v) in out.iter().enumerate() {
            assert_eq!(v.is_nan(), i / rows == 1, "value {} of row {}", i % rows, i / rows);
        }
    }
}

/// The same rows give the same bits whenever they are asked for.
#[test]
fn products_repeat() {
    let backend = backend(Precision::Double, false);
    for t in [2, 20, 100] {
        let x = backend.upload(t, 256, noise(t * 256, 1)).unwrap();
        let matrix = backend.load(gptq(4, 96, natural(256, 64))).unwrap();
        let run = || backend.download(&backend.linear(&x, &matrix, None).unwrap()).unwrap();
        assert_eq!(run(), run());
    }
}

fn values<T: bytemuck::Pod>(sums: &Sums<T>) -> Vec<T> {
    match sums {
        Sums::Host(values) => values.clone(),
        Sums::Cuda(buffer) => buffer.device().download(buffer, 0, buffer.bytes() / size_of::<T>()).unwrap(),
    }
}

#[test]
fn calibration_sums() {
    for cublas in [false, true] {
        let backend = backend(Precision::Double, cublas);
        for (t, n) in [(1, 1), (7, 33), (70, 130), (33, 260)] {
            let run = |backend: &dyn Backend| {
                let (mut gram, mut drift) = (backend.gram(n).unwrap(), backend.drift(n).unwrap());
                for seed in [1, 2] {
                    let x = backend.upload(t, n, noise(t * n, seed)).unwrap();
                    let original = backend.upload(t, n, noise(t * n, seed + 2)).unwrap();
                    backend.add_gram(&x, &mut gram).unwrap();
                    backend.add_drift(&x, &original, &mut drift).unwrap();
                }
                assert_eq!((gram.tokens, drift.tokens), (2 * t as u64, 2 * t as u64));
                (gram, drift)
            };
            let ((want, want_drift), (got, got_drift)) = (run(&Cpu), run(&*backend));
            let (want, got) = (values(&want.lower), values(&got.lower));
            for i in 0..n {
                for j in 0..=i {
                    let (want, got) = (want[i * n + j], got[i * n + j]);
                    assert!((want - got).abs() < 1e-6 * 2.0 * t as f64, "X'X at {i}, {j}: {got} for {want}");
                }
            }
            for (at, (want, got)) in values(&want_drift.values).iter().zip(values(&got_drift.values)).enumerate() {
                assert!((want - got).abs() < 1e-6 * 2.0 * t as f32, "drift at {at}: {got} for {want}");
            }
        }
    }
}
