//! Products with signed bytes and with E4M3 numbers.

use std::sync::Arc;

use quantkit::backend::Backend;
use quantkit::backend::cpu::Cpu;
use quantkit::backend::cuda::{Cuda, CudaOptions, Precision};
use quantkit::backend::weight::{Fp8, Inputs, Int8, Weight};

use super::{cuda, noise};
use crate::golden_compressed;

/// Row counts for every kernel: decoding, few rows, many.
const ROWS: [usize; 5] = [1, 3, 5, 70, 131];

/// What a product in 16-bit planes may differ by, as part of the sum of its terms' magnitudes.
const PLANES: f64 = 2e-5;
/// The same where planes hold all factors exactly, or none are used.
const EXACT: f64 = 1e-6;
/// With activations rounded to f16.
const IN_F16: f64 = 1e-3;

const ROUNDED: [Inputs; 6] = [
    Inputs::Token,
    Inputs::TokenAsymmetric,
    Inputs::Group(32),
    Inputs::Group(128),
    Inputs::Tensor { scale: 0.011, zero: -17 },
    Inputs::Tensor { scale: 0.004, zero: 0 },
];

fn backend(precision: Precision, cublas: bool) -> Arc<Cuda> {
    cuda(CudaOptions { precision, cublas, ..CudaOptions::default() })
}

fn codes(n: usize, seed: u64) -> Vec<u8> {
    noise(n, seed).into_iter().map(|v| (v * 128.0) as i32 as i8 as u8).collect()
}

pub(super) fn int8(rows: usize, cols: usize, inputs: Inputs) -> Weight {
    let scales = noise(rows, 3).into_iter().map(|s| 0.01 + 0.005 * s).collect();
    Weight::Int8(Arc::new(Int8 { rows, cols, values: codes(rows * cols, 4).into(), scales, inputs }))
}

pub(super) fn fp8(rows: usize, cols: usize, tile: (usize, usize), inputs: Inputs) -> Weight {
    // Every code but those of NaN.
    let values: Vec<u8> = codes(rows * cols, 5).into_iter().map(|c| if c & 127 == 127 { 1 } else { c }).collect();
    let tiles = rows.div_ceil(tile.0) * cols.div_ceil(tile.1);
    let scales = noise(tiles, 6).into_iter().map(|s| 0.01 + 0.005 * s).collect();
    Weight::Fp8(Arc::new(Fp8 { rows, cols, values: values.into(), scales, tile, inputs }))
}

/// Inputs that are not centred, so that zero points matter.
fn inputs(t: usize, cols: usize) -> Vec<f32> {
    let mut x: Vec<f32> = noise(t * cols, 1).into_iter().map(|v| v + 0.3).collect();
    // A token of zeros.
    if t > 2 {
        x[2 * cols..3 * cols].fill(0.0);
    }
    x
}

fn product(backend: &dyn Backend, weight: &Weight, x: &[f32], with_bias: bool) -> Vec<f32> {
    let (rows, cols) = (weight.rows(), weight.cols());
    let t = x.len() / cols;
    let matrix = backend.load(weight.clone()).unwrap();
    let x = backend.upload(t, cols, x.to_vec()).unwrap();
    let bias = with_bias.then(|| backend.upload(1, rows, noise(rows, 2)).unwrap());
    let out = backend.linear(&x, &matrix, bias.as_ref()).unwrap();
    assert_eq!((out.rows, out.cols), (t, rows));
    backend.download(&out).unwrap()
}

/// Holds products of `t` rows against the CPU's, entry by entry.
#[track_caller]
fn check(backend: &Cuda, weight: &Weight, t: usize, with_bias: bool, ceiling: f64) {
    let (rows, cols) = (weight.rows(), weight.cols());
    let x = inputs(t, cols);
    let (want, got) = (product(&Cpu, weight, &x, with_bias), product(backend, weight, &x, with_bias));
    let w = weight.to_f32();
    for (i, (want, got)) in want.iter().zip(&got).enumerate() {
        let terms = x[i / rows * cols..][..cols].iter().zip(&w[i % rows * cols..][..cols]);
        let size: f64 = terms.map(|(x, w)| f64::from(x * w).abs()).sum();
        let error = f64::from(want - got).abs();
        assert!(error <= ceiling * (size + 1.0), "{t} rows, {cols} columns, at {i}: {got} for {want}");
    }
}

const SHAPES: [(usize, usize); 5] = [(1, 1), (33, 100), (130, 64), (96, 33), (200, 272)];

#[test]
fn bytes_have_the_bits_of_the_cpu() {
    let backend = backend(Precision::Double, false);
    for (i, inputs_of) in ROUNDED.into_iter().enumerate() {
        for (j, &t) in ROWS.iter().enumerate() {
            for (rows, cols) in SHAPES {
                let (weight, x) = (int8(rows, cols, inputs_of), inputs(t, cols));
                let with_bias = (i + j + rows) % 2 == 0;
                let (want, got) = (product(&Cpu, &weight, &x, with_bias), product(&*backend, &weight, &x, with_bias));
                assert_eq!(got, want, "{inputs_of:?}, {t} rows, {rows}x{cols}");
            }
        }
    }
}

#[test]
fn bytes_whose_inputs_stay_floats() {
    for (precision, cublas, ceiling) in
        [(Precision::Double, false, PLANES), (Precision::Double, true, PLANES), (Precision::Single, false, IN_F16)]
    {
        let backend = backend(precision, cublas);
        for (i, &t) in ROWS.iter().enumerate() {
            for (rows, cols) in SHAPES {
                check(&backend, &int8(rows, cols, Inputs::Float), t, (i + rows) % 2 == 0, ceiling);
            }
        }
    }
}

#[test]
fn floats_of_eight_bits() {
    for (precision, cublas, planes) in
        [(Precision::Double, false, PLANES), (Precision::Double, true, PLANES), (Precision::Single, false, IN_F16)]
    {
        let backend = backend(precision, cublas);
        for (i, inputs_of) in ROUNDED.into_iter().chain([Inputs::Float]).enumerate() {
            for (j, &t) in ROWS.iter().enumerate() {
                let (rows, cols) = SHAPES[(i + j) % SHAPES.len()];
                // One scale for all, one an output, blocks that end early, blocks of 128.
                for tile in [(rows, cols), (1, cols), (16, 24), (128, 128)] {
                    let whole = tile.1 >= cols && !matches!(inputs_of, Inputs::Float | Inputs::Group(_));
                    // What is rounded to E4M3 once is not rounded again.
                    let ceiling = match inputs_of {
                        _ if whole || t <= 4 => EXACT,
                        Inputs::Float => planes,
                        _ => PLANES,
                    };
                    check(&backend, &fp8(rows, cols, tile, inputs_of), t, (i + j) % 2 == 0, ceiling);
                }
            }
        }
    }
}

/// Linears of compressed-tensors, decoded, few rows at a time and many.
#[test]
fn linears_of_compressed_tensors() {
    for precision in [Precision::Double, Precision::Single] {
        let backend = backend(precision, false);
        for copies in [1, 6] {
            golden_compressed::check(&*backend, copies);
        }
        golden_compressed::check_one_by_one(&*backend);
    }
}

#[test]
fn a_nan_stays_one() {
    let backend = backend(Precision::Double, false);
    for bad in [f32::NAN, f32::INFINITY] {
        for t in [2, 5, 70] {
            for inputs_of in ROUNDED {
                // Static scales cut infinity off, on the CPU as well.
                if bad.is_infinite() && matches!(inputs_of, Inputs::Tensor { .. }) {
                    continue;
                }
                for weight in [int8(33, 160, inputs_of), fp8(33, 160, (1, 160), inputs_of)] {
                    let mut x = inputs(t, 160);
                    x[160 + 70] = bad;
                    for backend in [&*backend as &dyn Backend, &Cpu] {
                        let out = product(backend, &weight, &x, true);
                        for (i, v) in out.iter().enumerate() {
                            assert_eq!(v.is_nan(), i / 33 == 1, "{inputs_of:?}, {t} rows, {bad}: value {i}");
                        }
                    }
                }
            }
        }
    }
}

/// Weights that do not fit the room for planes are decoded a panel at a time.
#[test]
fn panels() {
    let backend = backend(Precision::Double, false);
    let (rows, cols) = (900, 40_000);
    for weight in [fp8(rows, cols, (128, 128), Inputs::Float), int8(rows, cols, Inputs::Float)] {
        check(&backend, &weight, 5, true, PLANES);
    }
}

/// Recorded products give the bits of launched ones, each time.
#[test]
fn recorded_products_are_the_same() {
    let backend = backend(Precision::Double, false);
    let workspace = backend.workspace(1 << 20).unwrap();
    for weight in [int8(33, 96, Inputs::TokenAsymmetric), fp8(33, 96, (33, 96), Inputs::Token)] {
        let matrix = backend.load(weight).unwrap();
        for t in [1, 5] {
            let x = backend.upload(t, 96, inputs(t, 96)).unwrap();
            let launched = backend.download(&backend.linear(&x, &matrix, None).unwrap()).unwrap();
            let recording = backend.begin_recording(&workspace).unwrap();
            let out = backend.linear(&x, &matrix, None);
            let (out, mut recording) = (out.unwrap(), recording.finish().unwrap());
            for _ in 0..2 {
                recording.run().unwrap();
                assert!(backend.download(&out).unwrap() == launched, "{t} rows");
            }
        }
    }
}
