//! Attention over rows and over paged caches.

use quantkit::backend::cpu::Cpu;
use quantkit::backend::cuda::cache::CacheType;
use quantkit::backend::cuda::{Cuda, CudaOptions};
use quantkit::backend::{AttentionShape, Backend, CacheShape, KvCache, Span, spans_of};

use super::{cuda, noise};

/// What the length of a head's output may differ by from the CPU's, as part of the CPU's.
const AS_F32: f64 = 1e-5;
/// The same for numbers that each kind of cache rounds.
const IN_F16: f64 = 1e-3;
const IN_FP8: f64 = 6e-2;
const IN_INT8: f64 = 2e-2;

fn shape(heads: usize, kv_heads: usize, head_dim: usize, window: usize, softcap: f32) -> AttentionShape {
    AttentionShape {
        heads,
        kv_heads,
        head_dim,
        scale: 1.0 / (head_dim as f32).sqrt(),
        window: (window > 0).then_some(window),
        softcap: (softcap > 0.0).then_some(softcap),
    }
}

/// Head counts and sizes that fill no tile, windows, soft caps.
fn shapes() -> Vec<AttentionShape> {
    vec![
        shape(2, 2, 8, 0, 0.0),
        shape(9, 3, 16, 5, 0.0),
        shape(4, 1, 32, 16, 30.0),
        shape(33, 3, 64, 0, 30.0),
        shape(32, 8, 80, 0, 0.0),
        shape(4, 2, 128, 5, 0.0),
        shape(3, 1, 256, 0, 30.0),
        // No multiple of what is read at once.
        shape(4, 2, 10, 16, 0.0),
        shape(2, 1, 90, 0, 0.0),
        shape(2, 1, 250, 5, 0.0),
    ]
}

/// What numbers attention is given.
#[derive(Clone, Copy, PartialEq)]
enum Values {
    Any,
    /// Such that scores are small, and the rounding of keys moves them little.
    Mild,
    /// Numbers that the kind of cache holds exactly.
    Exact(CacheType),
}

/// Queries, keys and values of `rows` tokens.
fn tokens(shape: &AttentionShape, rows: usize, values: Values, seed: u64) -> [Vec<f32>; 3] {
    let (width, kv_width) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let largest = if values == Values::Mild { 1.0 } else { 3.0 };
    let q = noise(rows * width, seed).into_iter().map(|x| largest * x).collect();
    let [mut k, mut v] =
        [1, 2].map(|i| -> Vec<f32> { noise(rows * kv_width, seed + 1000 * i).into_iter().map(|x| 2.0 * x).collect() });
    if let Values::Exact(kind) = values {
        // Three bits are within FP8's four; with 127 / 64 the largest, the scale of INT8 is 1 / 64.
        k.iter_mut().chain(&mut v).for_each(|x| *x = (*x * 4.0).trunc() / 4.0);
        if kind == CacheType::Int8 {
            let heads = k.chunks_exact_mut(shape.head_dim).chain(v.chunks_exact_mut(shape.head_dim));
            heads.for_each(|head| head[0] = 127.0 / 64.0);
        }
    }
    [q, k, v]
}

fn attend(
    backend: &dyn Backend,
    shape: &AttentionShape,
    [q, k, v]: &[Vec<f32>; 3],
    spans: &[Span],
    caches: Option<&mut [Vec<KvCache>]>,
) -> Vec<f32> {
    let rows = spans.iter().map(|span| span.rows).sum::<usize>();
    let upload = |x: &[f32]| backend.upload(rows, x.len() / rows, x.to_vec()).unwrap();
    let batch = backend.batch(vec![0; rows], spans.to_vec()).unwrap();
    let caches = caches.map(|caches| {
        backend.reserve(caches, &batch).unwrap();
        &mut caches.last_mut().unwrap()[..]
    });
    let out = backend.attention(&upload(q), &upload(k), &upload(v), &batch, shape, caches).unwrap();
    assert_eq!((out.rows, out.cols), (rows, shape.heads * shape.head_dim));
    backend.download(&out).unwrap()
}

fn compare(shape: &AttentionShape, what: &str, want: &[f32], got: &[f32], ceiling: f64) {
    assert_eq!(want.len(), got.len());
    let pairs = want.chunks_exact(shape.head_dim).zip(got.chunks_exact(shape.head_dim));
    for (i, (want, got)) in pairs.enumerate() {
        let square = |x: f64| x * x;
        let length = want.iter().map(|w| square(f64::from(*w))).sum::<f64>().sqrt();
        let away = want.iter().zip(got).map(|(w, g)| square(f64::from(*w) - f64::from(*g))).sum::<f64>().sqrt();
        let (row, head) = (i / shape.heads, i % shape.heads);
        assert!(
            away == 0.0 || away / length < ceiling,
            "{shape:?}, {what}, row {row}, head {head}: {:e}",
            away / length
        );
    }
}

#[test]
fn rows() {
    let device = cuda(CudaOptions::default());
    for shape in shapes() {
        let spans = spans_of([1, 15, 16, 17, 65]);
        let tokens = tokens(&shape, 114, Values::Any, 1);
        let [want, got] = [&Cpu as &dyn Backend, &*device].map(|b| attend(b, &shape, &tokens, &spans, None));
        compare(&shape, "rows", &want, &got, AS_F32);
    }
}

#[test]
fn a_long_row() {
    let device = cuda(CudaOptions::default());
    for shape in [shape(2, 1, 64, 0, 0.0), shape(2, 1, 64, 300, 0.0)] {
        let tokens = tokens(&shape, 1025, Values::Any, 2);
        let [want, got] = [&Cpu as &dyn Backend, &*device].map(|b| attend(b, &shape, &tokens, &spans_of([1025]), None));
        compare(&shape, "1025 rows", &want, &got, AS_F32);
    }
}

/// Three sequences: their prompts, a part more of each, some tokens one by one, and a part again.
fn through_caches(device: &Cuda, shape: &AttentionShape, values: Values, ceiling: f64) {
    let passes: [[usize; 3]; 6] = [[1, 16, 37], [33, 1, 20], [1, 1, 1], [1, 1, 1], [2, 1, 5], [1, 1, 1]];
    let of = |backend: &dyn Backend| {
        // The first layer's caches stay empty: tables and pages of layers lie side by side.
        let room =
            CacheShape { layers: 2, sequences: 3, kv_heads: shape.kv_heads, head_dim: shape.head_dim, capacity: 200 };
        backend.caches(room).unwrap()
    };
    let (mut host, mut paged) = (of(&Cpu), of(device));
    let mut lengths = [0; 3];
    for (i, rows) in passes.iter().enumerate() {
        let spans: Vec<_> = rows.iter().zip(&lengths).map(|(&rows, &start)| Span { rows, start }).collect();
        rows.iter().zip(&mut lengths).for_each(|(rows, length)| *length += rows);
        let tokens = tokens(shape, rows.iter().sum(), values, 10 + i as u64);
        let want = attend(&Cpu, shape, &tokens, &spans, Some(&mut host));
        let got = attend(device, shape, &tokens, &spans, Some(&mut paged));
        compare(shape, &format!("pass {i}"), &want, &got, ceiling);
    }
}

#[test]
fn caches() {
    for (cache, rounding) in [(CacheType::F16, IN_F16), (CacheType::Fp8, IN_FP8), (CacheType::Int8, IN_INT8)] {
        let device = cuda(CudaOptions { cache, ..CudaOptions::default() });
        for shape in shapes().into_iter().step_by(3) {
            through_caches(&device, &shape, Values::Mild, rounding);
        }
    }
}

/// Without rounding by the cache, everything else is as good as f32.
#[test]
fn caches_of_exact_numbers() {
    for cache in [CacheType::F16, CacheType::Int8, CacheType::Fp8] {
        let device = cuda(CudaOptions { cache, ..CudaOptions::default() });
        for shape in shapes() {
            through_caches(&device, &shape, Values::Exact(cache), AS_F32);
        }
    }
}

#[test]
fn decoding_over_a_long_context() {
    for (cache, rounding) in [(CacheType::F16, IN_F16), (CacheType::Fp8, IN_FP8), (CacheType::Int8, IN_INT8)] {
        let device = cuda(CudaOptions { cache, ..CudaOptions::default() });
        for shape in [shape(8, 2, 64, 0, 0.0), shape(17, 1, 64, 100, 0.0)] {
            let room = CacheShape { layers: 1, sequences: 1, kv_heads: shape.kv_heads, head_dim: 64, capacity: 1100 };
            let (mut host, mut paged) = (Cpu.caches(room).unwrap(), device.caches(room).unwrap());
            let prompt = tokens(&shape, 1024, Values::Mild, 3);
            let next = tokens(&shape, 1, Values::Mild, 4);
            for (tokens, start) in [(&prompt, 0), (&next, 1024)] {
                let spans = [Span { rows: tokens[0].len() / (shape.heads * 64), start }];
                let want = attend(&Cpu, &shape, tokens, &spans, Some(&mut host));
                let got = attend(&*device, &shape, tokens, &spans, Some(&mut paged));
                compare(&shape, &format!("{cache:?} from {start}"), &want, &got, rounding);
            }
        }
    }
}

/// Rows of zeros have no scale; large numbers saturate in FP8.
#[test]
fn extreme_numbers() {
    let shape = shape(2, 1, 64, 0, 0.0);
    for cache in [CacheType::F16, CacheType::Fp8, CacheType::Int8] {
        let device = cuda(CudaOptions { cache, ..CudaOptions::default() });
        let room = CacheShape { layers: 1, sequences: 1, kv_heads: 1, head_dim: 64, capacity: 16 };
        let mut paged = device.caches(room).unwrap();
        let [q, _, _] = tokens(&shape, 2, Values::Any, 5);
        let zeros = [q, vec![0.0; 128], vec![0.0; 128]];
        let got = attend(&*device, &shape, &zeros, &[Span { rows: 2, start: 0 }], Some(&mut paged));
        assert!(got.iter().all(|x| *x == 0.0), "{cache:?}: {got:?}");
        let [q, _, _] = tokens(&shape, 1, Values::Any, 6);
        let large = [q.iter().map(|x| x.abs()).collect(), vec![1000.0; 64], vec![1000.0; 64]];
        let got = attend(&*device, &shape, &large, &[Span { rows: 1, start: 2 }], Some(&mut paged));
        // The large key has all the weight.
        let want = if cache == CacheType::Fp8 { 448.0 } else { 1000.0 };
        assert!(got.iter().all(|x| (x / want - 1.0).abs() < 1e-5), "{cache:?}: {got:?}");
    }
}

#[test]
fn heads_that_no_kernel_takes() {
    let device = cuda(CudaOptions::default());
    let shape = shape(1, 1, 258, 0, 0.0);
    let [q, k, v] = tokens(&shape, 1, Values::Any, 7).map(|x| device.upload(1, 258, x).unwrap());
    let batch = device.batch(vec![0], spans_of([1])).unwrap();
    let error = device.attention(&q, &k, &v, &batch, &shape, None).unwrap_err().to_string();
    assert!(error.contains("heads of 258 channels"), "{error}");
}
