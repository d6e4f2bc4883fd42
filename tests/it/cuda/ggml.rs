//! Weights in ggml blocks, against sums in f64 over what `GgmlType::decode` gives.

use std::sync::Arc;

use half::f16;
use quantkit::backend::cuda::{Cuda, CudaOptions, Precision};
use quantkit::backend::weight::{Ggml, Weight};
use quantkit::backend::{Backend, Span};
use quantkit::num::ggml::GgmlType;

use super::{cuda, noise};

/// What a product may differ by, as part of the lengths of the two vectors multiplied: from blocks in f32, with both
/// sides in two bf16 planes, and with both rounded to f16.
const FUSED: f64 = 1e-6;
const DOUBLE: f64 = 2e-5;
const SINGLE: f64 = 1e-3;

fn backend(precision: Precision, cublas: bool) -> Arc<Cuda> {
    cuda(CudaOptions { precision, cublas, ..CudaOptions::default() })
}

/// Where the half-precision numbers of a block stand.
fn halves(kind: GgmlType) -> &'static [usize] {
    use GgmlType::*;
    match kind {
        F32 | F16 | BF16 | MXFP4 | IQ1_M => &[],
        Q4_0 | Q5_0 | Q8_0 | IQ4_NL | IQ4_XS | IQ1_S | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S => &[0],
        Q4_1 | Q5_1 | Q4_K | Q5_K => &[0, 2],
        Q2_K => &[80, 82],
        Q3_K => &[108],
        Q6_K => &[208],
        TQ1_0 => &[52],
        TQ2_0 => &[64],
    }
}

/// Random blocks: any bits, but for scales of a sensible size.
pub(super) fn weight(kind: GgmlType, rows: usize, cols: usize, seed: u64) -> Weight {
    let bytes = rows * kind.row_bytes(cols).unwrap();
    let mut bytes: Vec<u8> = match kind {
        GgmlType::F32 => noise(bytes / 4, seed).iter().flat_map(|v| v.to_le_bytes()).collect(),
        GgmlType::F16 => noise(bytes / 2, seed).iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        GgmlType::BF16 => noise(bytes / 2, seed).iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect(),
        _ => noise(bytes, seed).iter().map(|v| (v.to_bits() >> 3) as u8 ^ (v.to_bits() >> 13) as u8).collect(),
    };
    let scales = noise(bytes.len() / kind.bytes() * 2, seed + 1);
    for (block, scales) in bytes.chunks_exact_mut(kind.bytes()).zip(scales.chunks_exact(2)) {
        for (at, scale) in halves(kind).iter().zip(scales) {
            block[*at..at + 2].copy_from_slice(&f16::from_f32(0.02 + 0.01 * scale).to_le_bytes());
        }
        match kind {
            GgmlType::MXFP4 => block[0] = 120 + block[0] % 8,
            // Its scale lies in the highest bits of four words.
            GgmlType::IQ1_M => {
                let scale = f16::from_f32(0.02 + 0.01 * scales[0]).to_bits();
                for j in 0..4 {
                    block[49 + 2 * j] = block[49 + 2 * j] & 15 | ((scale >> (4 * j)) as u8 & 15) << 4;
                }
            }
            _ => {}
        }
    }
    Weight::Ggml(Ggml { rows, cols, kind, bytes: bytes.into() })
}

/// The largest error of products of `t` rows with `weight`, as part of the lengths of the vectors multiplied.
fn error(backend: &Cuda, weight: &Weight, t: usize, with_bias: bool) -> f64 {
    let (rows, cols) = (weight.rows(), weight.cols());
    let (x, bias) = (noise(t * cols, 1), noise(rows, 2));
    let got = {
        let matrix = backend.load(weight.clone()).unwrap();
        let x = backend.upload(t, cols, x.clone()).unwrap();
        let bias = with_bias.then(|| backend.upload(1, rows, bias.clone()).unwrap());
        let out = backend.linear(&x, &matrix, bias.as_ref()).unwrap();
        assert_eq!((out.rows, out.cols), (t, rows));
        backend.download(&out).unwrap()
    };
    let w = weight.to_f32();
    let mut largest = 0.0f64;
    for (x, got) in x.chunks_exact(cols).zip(got.chunks_exact(rows)) {
        for (n, (w, got)) in w.chunks_exact(cols).zip(got).enumerate() {
            let (mut sum, mut xx, mut ww) = (if with_bias { f64::from(bias[n]) } else { 0.0 }, 0.0, 0.0);
            for (x, w) in x.iter().zip(w) {
                let (x, w) = (f64::from(*x), f64::from(*w));
                sum += x * w;
                xx += x * x;
                ww += w * w;
            }
            let error = (sum - f64::from(*got)).abs() / f64::sqrt(xx * ww);
            assert!(got.is_finite(), "output {n}: {got}");
            largest = largest.max(error);
        }
    }
    largest
}

fn check(backend: &Cuda, weight: &Weight, t: usize, with_bias: bool, ceiling: f64) {
    let error = error(backend, weight, t, with_bias);
    let Weight::Ggml(w) = weight else { unreachable!() };
    assert!(error < ceiling, "{}, {}x{}, {t} rows: {error:e}", w.kind, w.rows, w.cols);
}

/// Columns: one block, and several that do not fill a warp's step.
pub(super) fn columns(kind: GgmlType) -> [usize; 2] {
    match kind.block() {
        256 => [256, 768],
        _ => [32, 544],
    }
}

#[test]
fn every_type_multiplies_from_its_blocks() {
    let backend = backend(Precision::Double, false);
    for kind in GgmlType::ALL {
        for (i, rows) in [1, 3, 33].into_iter().enumerate() {
            for cols in columns(kind) {
                for t in [1, 3, 4] {
                    let weight = weight(kind, rows, cols, 11 + rows as u64);
                    // f32 is two bf16 planes on the device.
                    let ceiling = if kind == GgmlType::F32 { DOUBLE } else { FUSED };
                    check(&backend, &weight, t, (t + i) % 2 == 0, ceiling);
                }
            }
        }
    }
}

#[test]
fn every_type_multiplies_in_planes() {
    for cublas in [false, true] {
        let (double, single) = (backend(Precision::Double, cublas), backend(Precision::Single, cublas));
        for kind in GgmlType::ALL {
            for (rows, cols, t) in [(1, 0, 5), (33, 1, 33), (130, 0, 70)] {
                let weight = weight(kind, rows, columns(kind)[cols], 5);
                check(&double, &weight, t, t == 33, DOUBLE);
                // bf16 keeps its form, and has three bits less.
                let ceiling = if kind == GgmlType::BF16 { 8.0 * SINGLE } else { SINGLE };
                check(&single, &weight, t, t != 33, ceiling);
            }
        }
    }
}

/// More rows than are decoded at once.
#[test]
fn panels_follow_one_another() {
    let weight = weight(GgmlType::Q4_0, (64 << 20) / 4 / 32 + 77, 32, 3);
    for with_bias in [false, true] {
        check(&backend(Precision::Double, false), &weight, 5, with_bias, DOUBLE);
    }
}

#[test]
fn every_type_embeds() {
    let backend = backend(Precision::Double, false);
    let ids = vec![10, 0, 3, 3, 7];
    for kind in GgmlType::ALL {
        for cols in columns(kind) {
            let table = weight(kind, 11, cols, 17);
            let values = table.to_f32();
            let table = backend.load(table).unwrap();
            let batch = backend.batch(ids.clone(), vec![Span { rows: ids.len(), start: 0 }]).unwrap();
            let got = backend.download(&backend.embed(&table, &batch, 1.7).unwrap()).unwrap();
            let row = |id: u32| &values[id as usize * cols..(id as usize + 1) * cols];
            let largest = values.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            for (i, (got, want)) in got.iter().zip(ids.iter().flat_map(|id| row(*id))).enumerate() {
                // Two bf16 planes for f32; a scale times a code less a minimum, rounded once or twice.
                let ceiling = if kind == GgmlType::F32 { 1e-5 } else { 3e-7 };
                assert!((got - 1.7 * want).abs() <= ceiling * largest, "{kind}, value {i}: {got}, not {}", 1.7 * want);
            }
        }
    }
}

/// Scales at the ends of MXFP4's range.
#[test]
fn powers_of_two_may_be_subnormal() {
    let backend = backend(Precision::Double, false);
    let Weight::Ggml(mut w) = weight(GgmlType::MXFP4, 4, 32, 7) else { unreachable!() };
    let mut bytes = w.bytes.to_vec();
    for (block, e) in bytes.chunks_exact_mut(17).zip([0, 1, 2, 250]) {
        block[0] = e;
    }
    w.bytes = bytes.into();
    let weight = Weight::Ggml(w);
    let values = weight.to_f32();
    let table = backend.load(weight).unwrap();
    let batch = backend.batch(vec![0, 1, 2, 3], vec![Span { rows: 4, start: 0 }]).unwrap();
    assert_eq!(backend.download(&backend.embed(&table, &batch, 1.0).unwrap()).unwrap(), values);
}

/// Recorded products give the bits of launched ones, each time.
#[test]
fn recorded_products_are_the_same() {
    let backend = backend(Precision::Double, false);
    let workspace = backend.workspace(1 << 20).unwrap();
    for kind in [GgmlType::Q4_K, GgmlType::Q6_K, GgmlType::Q8_0, GgmlType::IQ2_S, GgmlType::MXFP4] {
        let cols = columns(kind)[1];
        let matrix = backend.load(weight(kind, 33, cols, 3)).unwrap();
        for t in [1, 3, 5] {
            let x = backend.upload(t, cols, noise(t * cols, 1)).unwrap();
            let launched = backend.download(&backend.linear(&x, &matrix, None).unwrap()).unwrap();
            let recording = backend.begin_recording(&workspace).unwrap();
            let out = backend.linear(&x, &matrix, None);
            let (out, mut recording) = (out.unwrap(), recording.finish().unwrap());
            for _ in 0..2 {
                recording.run().unwrap();
                assert!(backend.download(&out).unwrap() == launched, "{kind}, {t} rows");
            }
        }
    }
}
