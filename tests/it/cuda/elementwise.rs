//! Operations on rows and single values.

use half::{bf16, f16};
use quantkit::backend::cpu::Cpu;
use quantkit::backend::weight::{Dense, Weight};
use quantkit::backend::{Activation, Backend, RopeTable, Span};
use quantkit::tensor::{Bytes, Dtype};

use super::{cuda, noise};

/// Shapes that fill no block, and some that fill one or more.
const SHAPES: &[(usize, usize)] = &[(1, 1), (3, 33), (7, 64), (2, 257), (5, 1000), (1, 4100)];

/// Holds what the CUDA backend computes against what the CPU's does; `ceiling` is relative to numbers above 1.
#[track_caller]
fn compare(what: &str, ceiling: f32, compute: impl Fn(&dyn Backend) -> Vec<f32>) {
    let (found, wanted) = (compute(&*cuda(Default::default())), compute(&Cpu));
    assert_eq!(found.len(), wanted.len(), "{what}");
    for (i, (found, wanted)) in found.into_iter().zip(wanted).enumerate() {
        let same = found == wanted || found.is_nan() && wanted.is_nan();
        let close = (found - wanted).abs() <= ceiling * wanted.abs().max(1.0);
        assert!(same || close, "{what}, value {i}: {found}, not {wanted}");
    }
}

fn scaled(values: Vec<f32>, scale: f32) -> Vec<f32> {
    values.into_iter().map(|v| v * scale).collect()
}

/// A dense weight that holds `values` as exactly as its type can.
fn dense(rows: usize, cols: usize, dtype: Dtype, values: &[f32]) -> Weight {
    let bytes: Vec<u8> = match dtype {
        Dtype::F16 => values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
        Dtype::BF16 => values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    };
    Weight::Dense(Dense { rows, cols, dtype, bytes: Bytes::from(bytes) })
}

#[test]
fn embedding() {
    let (vocab, ids) = (11, vec![10, 0, 3, 3, 7]);
    for (dtype, ceiling) in [(Dtype::F16, 0.0), (Dtype::BF16, 0.0), (Dtype::F32, 1e-5)] {
        for cols in [1, 31, 130, 300] {
            compare(&format!("{dtype}, {cols} columns"), ceiling, |backend| {
                let table = backend.load(dense(vocab, cols, dtype, &noise(vocab * cols, 1))).unwrap();
                let batch = backend.batch(ids.clone(), vec![Span { rows: ids.len(), start: 0 }]).unwrap();
                backend.download(&backend.embed(&table, &batch, 1.7).unwrap()).unwrap()
            });
        }
    }
}

#[test]
fn norms() {
    for &(rows, cols) in SHAPES {
        let (x, y, w) = (noise(rows * cols, 1), noise(rows * cols, 2), noise(cols, 3));
        compare(&format!("norm of {rows}x{cols}"), 3e-6, |backend| {
            let x = backend.upload(rows, cols, x.clone()).unwrap();
            let w = backend.upload(1, cols, w.clone()).unwrap();
            backend.download(&backend.rms_norm(&x, &w, 1e-6).unwrap()).unwrap()
        });
        compare(&format!("sum and norm of {rows}x{cols}"), 3e-6, |backend| {
            let mut x = backend.upload(rows, cols, x.clone()).unwrap();
            let y = backend.upload(rows, cols, y.clone()).unwrap();
            let w = backend.upload(1, cols, w.clone()).unwrap();
            let normal = backend.add_rms_norm(&mut x, &y, &w, 1e-6).unwrap();
            [backend.download(&x).unwrap(), backend.download(&normal).unwrap()].concat()
        });
    }
}

#[test]
fn sums_leave_other_owners_alone() {
    let device = cuda(Default::default());
    for backend in [&*device as &dyn Backend, &Cpu] {
        for &(rows, cols) in SHAPES {
            let y = backend.upload(rows, cols, noise(rows * cols, 2)).unwrap();
            let w = backend.upload(1, cols, vec![1.0; cols]).unwrap();
            let mut x = backend.rms_norm(&y, &w, 1e-6).unwrap();
            let (before, owner) = (backend.download(&x).unwrap(), x.clone());
            backend.add(&mut x, &y).unwrap();
            assert_eq!(backend.download(&owner).unwrap(), before);
            let sums: Vec<f32> = before.iter().zip(backend.download(&y).unwrap()).map(|(b, y)| b + y).collect();
            assert_eq!(backend.download(&x).unwrap(), sums, "{rows}x{cols}");
        }
    }
}

#[test]
fn magnitudes_of_columns() {
    for &(rows, cols) in SHAPES.iter().chain(&[(70, 33)]) {
        let mut x = scaled(noise(rows * cols, 1), 5.0);
        for bad in [None, Some(f32::NAN), Some(f32::NEG_INFINITY)] {
            if let Some(bad) = bad {
                x[rows / 2 * cols + cols / 3] = bad;
            }
            compare(&format!("largest of {rows}x{cols}, {bad:?}"), 0.0, |backend| {
                backend.abs_max(&backend.upload(rows, cols, x.clone()).unwrap()).unwrap()
            });
            let of = |backend: &dyn Backend| {
                let x = backend.upload(rows, cols, x.clone()).unwrap();
                (backend.abs_max(&x).unwrap(), backend.abs_sum(&x).unwrap())
            };
            let ((most, found), (_, wanted)) = (of(&*cuda(Default::default())), of(&Cpu));
            for (c, (found, wanted)) in found.into_iter().zip(wanted).enumerate() {
                let same = found == wanted || found.is_nan() && wanted.is_nan();
                assert!(same || (found - wanted).abs() <= 1e-14 * wanted, "column {c}: {found} for {wanted}");
                let broken = bad.is_some() && c == cols / 3;
                assert_eq!(most[c].is_finite(), !broken, "column {c} of {rows}x{cols}, {bad:?}");
            }
        }
    }
}

#[test]
fn rotation() {
    // Heads, channels, and how many pairs of them turn; sequences that start anywhere.
    let spans = vec![Span { rows: 3, start: 4 }, Span { rows: 1, start: 0 }, Span { rows: 2, start: 9 }];
    for (heads, head_dim, half) in [(1, 2, 1), (3, 20, 10), (3, 20, 6), (5, 64, 32)] {
        for with_norm in [false, true] {
            let positions = 11;
            let (rows, cols) = (6, heads * head_dim);
            compare(&format!("{heads} heads of {head_dim}, {half} turn, norm {with_norm}"), 3e-6, |backend| {
                let mut x = backend.upload(rows, cols, noise(rows * cols, 1)).unwrap();
                let batch = backend.batch(vec![0; rows], spans.clone()).unwrap();
                let angles = noise(positions * half, 2);
                let table = RopeTable {
                    cos: backend.upload(positions, half, angles.iter().map(|a| a.cos()).collect()).unwrap(),
                    sin: backend.upload(positions, half, angles.iter().map(|a| a.sin()).collect()).unwrap(),
                };
                let weight = backend.upload(1, head_dim, noise(head_dim, 3)).unwrap();
                let norm = with_norm.then_some((&weight, 1e-5));
                backend.rope(&mut x, &batch, head_dim, norm, &table).unwrap();
                backend.download(&x).unwrap()
            });
        }
    }
}

#[test]
fn gates() {
    for activation in [Activation::Silu, Activation::GeluTanh] {
        for &(rows, cols) in SHAPES {
            let mut gate = scaled(noise(rows * cols, 1), 9.0);
            let extremes = [-200.0, 200.0, -1e20, 1e20, 0.0, f32::NAN];
            gate.iter_mut().rev().zip(extremes).for_each(|(g, extreme)| *g = extreme);
            compare(&format!("{activation:?} of {rows}x{cols}"), 3e-6, |backend| {
                let gate = backend.upload(rows, cols, gate.clone()).unwrap();
                let up = backend.upload(rows, cols, noise(rows * cols, 2)).unwrap();
                backend.download(&backend.gated(&gate, &up, activation).unwrap()).unwrap()
            });
        }
    }
}

#[test]
fn caps() {
    for (cap, scale) in [(30.0, 100.0), (0.7, 0.1), (50.0, 1e-3)] {
        let mut x = scaled(noise(777, 1), scale);
        x[5] = 1e9;
        x[6] = f32::NAN;
        compare(&format!("cap {cap}"), 3e-6, |backend| {
            let mut x = backend.upload(7, 111, x.clone()).unwrap();
            backend.softcap(&mut x, cap).unwrap();
            backend.download(&x).unwrap()
        });
    }
}

#[test]
fn largest_channels() {
    let (rows, cols) = (9, 1003);
    let mut x = noise(rows * cols, 1);
    let mut set = |row: usize, col: usize, value: f32| x[row * cols + col] = value;
    // Equals: the lowest wins, wherever its thread is.
    [1000, 17, 16, 999].into_iter().for_each(|col| set(0, col, 2.0));
    set(1, cols - 1, 3.0);
    set(2, 0, 3.0);
    // These rows have none.
    set(3, 1002, f32::NAN);
    set(4, 0, f32::NAN);
    set(5, 500, f32::INFINITY);
    (0..cols).for_each(|col| set(6, col, f32::NEG_INFINITY));
    (0..cols).for_each(|col| set(7, col, if col == 640 { f32::MIN } else { f32::NEG_INFINITY }));
    let of = |backend: &dyn Backend| backend.argmax(&backend.upload(rows, cols, x.clone()).unwrap()).unwrap();
    let (found, wanted) = (of(&*cuda(Default::default())), of(&Cpu));
    assert_eq!(found, wanted);
    assert_eq!(found[..8], [Some(16), Some(1002), Some(0), None, None, None, None, Some(640)]);
}

#[test]
fn likelihoods() {
    let (rows, cols, vocab) = (13, 40, 603);
    let targets: Vec<u32> = (0..rows as u32).map(|i| i * 50 % vocab as u32).collect();
    for softcap in [None, Some(3.0)] {
        let mut x = scaled(noise(rows * cols, 1), 4.0);
        x[3 * cols + 7] = f32::NAN;
        compare(&format!("cap {softcap:?}"), 2e-5, |backend| {
            let head = backend.load(dense(vocab, cols, Dtype::BF16, &noise(vocab * cols, 2))).unwrap();
            let scores =
                backend.nll(&backend.upload(rows, cols, x.clone()).unwrap(), &head, &targets, softcap).unwrap();
            assert!(scores[3].is_nan() && scores.iter().filter(|s| s.is_nan()).count() == 1, "{scores:?}");
            scores
        });
    }
}
