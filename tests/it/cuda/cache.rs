//! What comes back of caches, code by code, also of numbers that are none: the CPU's cache is the reference.

use quantkit::backend::cache::{CacheType, LayerScales};
use quantkit::backend::cpu::Cpu;
use quantkit::backend::cuda::CudaOptions;
use quantkit::backend::{AttentionShape, Backend};
use quantkit::num::{e4m3, e5m2};

use super::attention::{Paged, shape};
use super::{cuda, noise};

const FLOATS: [CacheType; 3] = [CacheType::F16, CacheType::Fp8E4m3, CacheType::Fp8E5m2];
const ALL: [CacheType; 4] = [CacheType::F16, CacheType::Fp8E4m3, CacheType::Fp8E5m2, CacheType::Int8];

/// What a row of values comes back as where each query sees nothing but its own token: by decoding, and by prefill.
fn there_and_back(backend: &dyn Backend, kind: CacheType, scale: Option<f32>, row: &[f32]) -> [Vec<f32>; 2] {
    let dim = row.len();
    let shape = AttentionShape { window: Some(1), ..shape(1, 1, dim, 0, 0.0) };
    [1, 40].map(|rows| {
        let scales = scale.map(|scale| LayerScales { keys: vec![1.0], values: vec![scale] });
        let mut paged = Paged::new(backend, &shape, kind, 1, 64, scales);
        let zeros = vec![0.0; rows * dim];
        let out = paged.attend(&[zeros.clone(), zeros, row.repeat(rows)], &[(0, rows)]);
        let last = out[out.len() - dim..].to_vec();
        assert!(out.chunks(dim).all(|row| row.iter().zip(&last).all(|(a, b)| same(*a, *b))), "{kind}");
        last
    })
}

fn same(a: f32, b: f32) -> bool {
    a == b || a.is_nan() && b.is_nan()
}

/// Rows of 8-bit floats: all codes, halves between neighbours and what is beside them, and what is no number or beyond all.
fn rows_of(decode: fn(u8) -> f32) -> Vec<Vec<f32>> {
    let codes: Vec<f32> = (0..=255).map(decode).collect();
    let halves: Vec<f32> = (0..=255u8).map(|code| (decode(code) + decode(code.wrapping_add(1))) / 2.0).collect();
    let beside = |next: fn(f32) -> f32| halves.iter().map(|x| next(*x)).collect();
    let special = [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, 0.0, -0.0]
        .into_iter()
        .chain([1e-45, -1e-38, 1e-7, 448.0, 449.0, 464.0, -464.1, 480.0, 57344.0, 61439.0, -61440.0, 65504.0])
        .chain([65519.0, 65520.0, -1e5, 1e30, 6e-8, 2.9e-8, 2.98e-8, 3e-8]);
    vec![codes, beside(f32::next_up), beside(f32::next_down), halves, special.collect()]
}

#[test]
fn floats_are_the_cpus_bit_for_bit() {
    let device = cuda(CudaOptions::default());
    for kind in FLOATS {
        let rows = match kind {
            CacheType::Fp8E4m3 => rows_of(e4m3::decode),
            _ => rows_of(e5m2::decode),
        };
        let scales: &[Option<f32>] = match kind {
            CacheType::F16 => &[None],
            _ => &[None, Some(0.37), Some(3e-5), Some(700.0)],
        };
        for (&scale, (number, row)) in
            scales.iter().flat_map(|scale| std::iter::repeat(scale).zip(rows.iter().enumerate()))
        {
            let unit = scale.unwrap_or(1.0);
            let row: Vec<f32> = row.iter().map(|x| x * unit).collect();
            let want = there_and_back(&Cpu, kind, scale, &row);
            let got = there_and_back(&*device, kind, scale, &row);
            for (i, x) in row.iter().enumerate() {
                for (want, got) in want.iter().zip(&got) {
                    assert!(same(want[i], got[i]), "{kind}, scale {scale:?}: {x:e} is {:e}, not {:e}", got[i], want[i]);
                    assert_eq!(want[i].is_nan(), x.is_nan(), "{kind}: {x:e}");
                    // Codes stand for themselves; infinities become the largest number.
                    let most = kind.largest() * unit;
                    let cut = if x.is_infinite() { most.copysign(*x) } else { *x };
                    assert!(number > 0 || same(want[i], cut), "{kind}, scale {scale:?}: {x:e} is {:e}", want[i]);
                }
            }
        }
    }
}

/// INT8 has no code for NaN or infinities: they are in the scale of the row. No size is too large for it.
#[test]
fn bytes_are_the_cpus() {
    let device = cuda(CudaOptions::default());
    let mut any = noise(64, 1);
    any[7] = 1.0;
    let rows: Vec<Vec<f32>> = [1.0, 1e-30, 3e-5, 15e3, 17e3, 1e5, 1e30, 3e37]
        .map(|size| any.iter().map(|x| x * size).collect())
        .into_iter()
        .chain([f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY].map(|x| [&any[..20], &[x], &any[21..]].concat()))
        .chain([vec![0.0; 64], vec![-127.0; 64]])
        .collect();
    for (scale, row) in
        [None, Some(1.0 / 200.0), Some(200.0)].into_iter().flat_map(|s| rows.iter().map(move |r| (s, r)))
    {
        let want = there_and_back(&Cpu, CacheType::Int8, scale, row);
        let got = there_and_back(&*device, CacheType::Int8, scale, row);
        let broken = row.iter().any(|x| x.is_nan() || scale.is_none() && x.is_infinite());
        for (want, got) in want.iter().zip(&got) {
            for ((x, want), got) in row.iter().zip(want).zip(got) {
                assert_eq!((want.is_nan(), got.is_nan()), (broken, broken), "{scale:?}: {x:e}");
                let near = broken || (want - got).abs() <= want.abs() * 1e-6;
                assert!(near, "{scale:?}: {x:e} is {got:e}, not {want:e}");
            }
        }
    }
    // With scales of few digits nothing is lost.
    let exact: Vec<f32> = (-127..=127).chain([0]).map(|code| code as f32 / 64.0).collect();
    let beyond: Vec<f32> = exact.iter().map(|x| 2.0 * x).collect();
    for (scale, row) in [(None, &exact), (Some(1.0 / 64.0), &exact), (Some(1.0 / 64.0), &beyond)] {
        let want = there_and_back(&Cpu, CacheType::Int8, scale, row);
        assert_eq!(there_and_back(&*device, CacheType::Int8, scale, row), want);
        assert!(want[0].iter().zip(row).all(|(w, x)| *w == x.clamp(-127.0 / 64.0, 127.0 / 64.0)));
    }
}

/// Keys and values of a few tokens are NaN, or only their first channel is. It is seen wherever the CPU sees it, and by
/// decoding nowhere else: neither by earlier tokens nor past the window.
#[test]
fn no_nan_is_hidden() {
    const PASSES: [usize; 7] = [40, 1, 5, 16, 16, 1, 12];
    let device = cuda(CudaOptions::default());
    for (kind, of_keys, window) in
        ALL.into_iter().flat_map(|kind| [(kind, true, 0), (kind, false, 0), (kind, true, 9), (kind, false, 9)])
    {
        let shape = shape(4, 2, 16, window, 0.0);
        // One token, one that is the last of a pass of few, and all of a block, which is a split of its own.
        for (bad, whole) in [(20..21, false), (45..46, false), (48..64, true), (48..64, false)] {
            // As much room as makes every block a split.
            let [mut host, mut paged] =
                [&Cpu as &dyn Backend, &*device].map(|backend| Paged::new(backend, &shape, kind, 1, 1100, None));
            let mut at = 0;
            for rows in PASSES {
                let width = |heads: usize| rows * heads * 16;
                let mut tokens = [width(4), width(2), width(2)].map(|n| noise(n, at as u64 + n as u64));
                for token in bad.clone().filter(|token| (at..at + rows).contains(token)) {
                    let row = &mut tokens[if of_keys { 1 } else { 2 }][(token - at) * 32..][..32];
                    let end = if whole { 32 } else { 1 };
                    row[..end].fill(f32::NAN);
                }
                let [want, got] = [&mut host, &mut paged].map(|cache| cache.attend(&tokens, &[(0, rows)]));
                // A tile of prefill hands NaN among values on to all its queries.
                let few = rows <= 16;
                let strict = few || of_keys || kind == CacheType::Int8;
                for (i, (want, got)) in want.iter().zip(&got).enumerate() {
                    let place = format!("{kind}, keys {of_keys}, window {window}, {bad:?}: token {}, {i}", at + i / 64);
                    assert!(got.is_nan() || !want.is_nan(), "{place}: {got}, not {want}");
                    assert!(!strict || got.is_nan() == want.is_nan(), "{place}: {got}, not {want}");
                    assert!(got.is_nan() || (got - want).abs() < 1e-4, "{place}: {got}, not {want}");
                }
                at += rows;
                assert!(
                    want.iter().any(|x| x.is_nan()) == (at > bad.start && (window == 0 || at - rows < bad.end + 8))
                );
            }
        }
    }
}
