//! Attention over rows and over paged caches.

use quantkit::backend::cache::{CacheType, Layer, LayerScales, Pool, PoolShape, Tables};
use quantkit::backend::cpu::Cpu;
use quantkit::backend::cuda::CudaOptions;
use quantkit::backend::{AttentionShape, Backend, Span, spans_of};

use super::{cuda, noise};

/// What the length of a head's output may differ by from the CPU's, as part of the CPU's.
const AS_F32: f64 = 1e-5;
/// The same for numbers that each kind of cache rounds.
const IN_F16: f64 = 1e-3;
const IN_FP8: f64 = 6e-2;
const IN_E5M2: f64 = 2e-1;
const IN_INT8: f64 = 2e-2;

/// The types that devices have, with what they lose.
const CACHES: [(CacheType, f64); 4] =
    [(CacheType::F16, IN_F16), (CacheType::Fp8E4m3, IN_FP8), (CacheType::Fp8E5m2, IN_E5M2), (CacheType::Int8, IN_INT8)];

pub fn shape(heads: usize, kv_heads: usize, head_dim: usize, window: usize, softcap: f32) -> AttentionShape {
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
        // Three bits are within E4M3's four, two within E5M2's three; with 127 / 64 the largest, the scale of INT8 is
        // 1 / 64.
        let steps = if kind == CacheType::Fp8E5m2 { 2.0 } else { 4.0 };
        k.iter_mut().chain(&mut v).for_each(|x| *x = (*x * steps).trunc() / steps);
        if kind == CacheType::Int8 {
            let heads = k.chunks_exact_mut(shape.head_dim).chain(v.chunks_exact_mut(shape.head_dim));
            heads.for_each(|head| head[0] = 127.0 / 64.0);
        }
    }
    [q, k, v]
}

/// A cache of some sequences whose blocks are strewn over a pool, as they are after a while.
pub struct Paged<'a> {
    backend: &'a dyn Backend,
    shape: AttentionShape,
    pool: Pool,
    /// Of each sequence.
    tables: Tables,
    lengths: Vec<usize>,
}

impl<'a> Paged<'a> {
    /// `capacity` tokens for each of some sequences, in the second of two layers.
    pub fn new(
        backend: &'a dyn Backend,
        shape: &AttentionShape,
        kind: CacheType,
        sequences: usize,
        capacity: usize,
        scales: Option<LayerScales>,
    ) -> Self {
        let stride = capacity.div_ceil(16);
        // Seven is to have no factor in common with it.
        let blocks = sequences * stride + 3;
        let blocks = blocks + usize::from(blocks.is_multiple_of(7));
        let AttentionShape { kv_heads, head_dim, .. } = *shape;
        let scales = scales.map(|scales| vec![scales; 2].into());
        let pool = backend.pool(PoolShape { layers: 2, kv_heads, head_dim, kind, blocks, scales }).unwrap();
        let blocks = (0..sequences * stride).map(|i| ((i * 7 + 2) % blocks) as u32).collect();
        Self { backend, shape: *shape, pool, tables: Tables { stride, blocks }, lengths: vec![0; sequences] }
    }

    /// Attention of the next rows of some sequences.
    pub fn attend(&mut self, [q, k, v]: &[Vec<f32>; 3], parts: &[(usize, usize)]) -> Vec<f32> {
        let rows = parts.iter().map(|(_, rows)| rows).sum::<usize>();
        let spans = parts.iter().map(|&(sequence, rows)| Span { rows, start: self.lengths[sequence] }).collect();
        parts.iter().for_each(|&(sequence, rows)| self.lengths[sequence] += rows);
        let tables = Tables::new(self.tables.stride, parts.iter().map(|part| self.tables.of(part.0)));
        let batch = self.backend.paged_batch(vec![0; rows], spans, tables).unwrap();
        let upload = |x: &[f32]| self.backend.upload(rows, x.len() / rows, x.to_vec()).unwrap();
        let layer = Some(Layer { pool: &mut self.pool, index: 1 });
        let out = self.backend.attention(&upload(q), &upload(k), &upload(v), &batch, &self.shape, layer).unwrap();
        assert_eq!((out.rows, out.cols), (rows, self.shape.heads * self.shape.head_dim));
        self.backend.download(&out).unwrap()
    }
}

fn attend(backend: &dyn Backend, shape: &AttentionShape, [q, k, v]: &[Vec<f32>; 3], spans: &[Span]) -> Vec<f32> {
    let rows = spans.iter().map(|span| span.rows).sum::<usize>();
    let upload = |x: &[f32]| backend.upload(rows, x.len() / rows, x.to_vec()).unwrap();
    let batch = backend.batch(vec![0; rows], spans.to_vec()).unwrap();
    let out = backend.attention(&upload(q), &upload(k), &upload(v), &batch, shape, None).unwrap();
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
        let [want, got] = [&Cpu as &dyn Backend, &*device].map(|b| attend(b, &shape, &tokens, &spans));
        compare(&shape, "rows", &want, &got, AS_F32);
    }
}

#[test]
fn a_long_row() {
    let device = cuda(CudaOptions::default());
    for shape in [shape(2, 1, 64, 0, 0.0), shape(2, 1, 64, 300, 0.0)] {
        let tokens = tokens(&shape, 1025, Values::Any, 2);
        let [want, got] = [&Cpu as &dyn Backend, &*device].map(|b| attend(b, &shape, &tokens, &spans_of([1025])));
        compare(&shape, "1025 rows", &want, &got, AS_F32);
    }
}

/// Three sequences: their prompts, a part more of each, some tokens one by one, and a part again.
const PASSES: [[usize; 3]; 6] = [[1, 16, 37], [33, 1, 20], [1, 1, 1], [1, 1, 1], [2, 1, 5], [1, 1, 1]];

/// Numbers of the first `kind` that is to be compared, over caches of both.
fn through_caches(
    kinds: [CacheType; 2],
    shape: &AttentionShape,
    values: Values,
    scales: Option<LayerScales>,
    ceiling: f64,
) {
    let device = cuda(CudaOptions::default());
    let mut host = Paged::new(&Cpu, shape, kinds[0], 3, 200, if kinds[0].has_scales() { scales.clone() } else { None });
    let mut paged = Paged::new(&*device, shape, kinds[1], 3, 200, scales);
    for (i, rows) in PASSES.iter().enumerate() {
        let parts: Vec<_> = rows.iter().copied().enumerate().collect();
        let tokens = tokens(shape, rows.iter().sum(), values, 10 + i as u64);
        let [want, got] = [&mut host, &mut paged].map(|cache| cache.attend(&tokens, &parts));
        compare(shape, &format!("{kinds:?}, pass {i}"), &want, &got, ceiling);
    }
}

#[test]
fn caches() {
    for (cache, rounding) in CACHES {
        for shape in shapes().into_iter().step_by(3) {
            through_caches([CacheType::F32, cache], &shape, Values::Mild, None, rounding);
        }
    }
}

/// The same codes, from any numbers.
#[test]
fn caches_are_the_cpus() {
    for (cache, _) in CACHES {
        for shape in shapes().into_iter().skip(1).step_by(3) {
            through_caches([cache; 2], &shape, Values::Any, None, AS_F32);
        }
    }
}

/// Without rounding by the cache, everything else is as good as f32.
#[test]
fn caches_of_exact_numbers() {
    for (cache, _) in CACHES {
        for shape in shapes() {
            through_caches([CacheType::F32, cache], &shape, Values::Exact(cache), None, AS_F32);
        }
    }
}

/// Calibrated scales, of a layer and of its heads; numbers beyond them saturate alike.
#[test]
fn settled_scales() {
    for cache in [CacheType::Fp8E4m3, CacheType::Fp8E5m2, CacheType::Int8] {
        for shape in [shape(9, 3, 16, 5, 0.0), shape(6, 3, 80, 0, 30.0)] {
            let unit = if cache == CacheType::Int8 { 1.0 / 127.0 } else { 0.01 };
            let heads = |seed: u64| noise(3, seed).iter().map(|x| unit * (1.5 + x)).collect::<Vec<_>>();
            for scales in [
                LayerScales { keys: vec![unit], values: vec![1.5 * unit] },
                LayerScales { keys: heads(1), values: heads(2) },
            ] {
                through_caches([cache; 2], &shape, Values::Any, Some(scales), AS_F32);
            }
        }
    }
}

/// In passes of few rows, each row has the bits that it has alone, whatever its sequence and whoever is beside it.
#[test]
fn few_rows_are_each_alone() {
    let device = cuda(CudaOptions::default());
    for (cache, _) in CACHES {
        for (backend, shape) in [(&Cpu as &dyn Backend, shape(9, 3, 16, 5, 0.0)), (&*device, shape(8, 2, 64, 0, 30.0))]
        {
            let width = |i: usize| if i == 0 { shape.heads } else { shape.kv_heads } * shape.head_dim;
            let caches = || {
                let mut paged = Paged::new(backend, &shape, cache, 3, 200, None);
                paged.attend(&tokens(&shape, 100, Values::Any, 1), &[(0, 30), (1, 1), (2, 69)]);
                paged
            };
            let next = tokens(&shape, 10, Values::Any, 2);
            let row = |row: usize| [0, 1, 2].map(|i| next[i][row * width(i)..(row + 1) * width(i)].to_vec());
            let parts = [(2, 3), (0, 6), (1, 1)];
            let together = caches().attend(&next, &parts);
            let (mut alone, mut at) = (caches(), 0);
            for (sequence, rows) in parts {
                for _ in 0..rows {
                    let got = alone.attend(&row(at), &[(sequence, 1)]);
                    assert!(got == together[at * width(0)..(at + 1) * width(0)], "{cache}, {shape:?}, row {at}");
                    at += 1;
                }
            }
        }
    }
}

/// On the CPU that is so in passes of any size.
#[test]
fn on_the_cpu_all_rows_are_alone() {
    let shape = shape(4, 2, 10, 40, 30.0);
    let tokens = tokens(&shape, 130, Values::Any, 3);
    for kind in CacheType::ALL {
        let whole = Paged::new(&Cpu, &shape, kind, 1, 130, None).attend(&tokens, &[(0, 130)]);
        let (mut parts, mut by_parts, mut at) = (Paged::new(&Cpu, &shape, kind, 1, 130, None), Vec::new(), 0);
        for rows in [1, 33, 16, 2, 64, 14] {
            let of = |x: &Vec<f32>| x[at * x.len() / 130..(at + rows) * x.len() / 130].to_vec();
            by_parts.extend(parts.attend(&[of(&tokens[0]), of(&tokens[1]), of(&tokens[2])], &[(0, rows)]));
            at += rows;
        }
        assert!(whole == by_parts, "{kind}");
    }
}

/// Blocks that are copied, or go to host memory and back to other places, hold what they held.
#[test]
fn blocks_move() {
    let device = cuda(CudaOptions::default());
    for backend in [&Cpu as &dyn Backend, &*device] {
        let shape = shape(4, 2, 10, 0, 0.0);
        for (cache, _) in CACHES {
            let scales = (cache != CacheType::F16).then(|| LayerScales { keys: vec![0.03], values: vec![0.02] });
            let new = || {
                let mut paged = Paged::new(backend, &shape, cache, 1, 64, scales.clone());
                paged.attend(&tokens(&shape, 40, Values::Any, 4), &[(0, 40)]);
                paged
            };
            let next = tokens(&shape, 1, Values::Any, 5);
            let (mut stayed, mut copied, mut swapped) = (new(), new(), new());
            let want = stayed.attend(&next, &[(0, 1)]);
            let blocks = copied.tables.blocks[..3].to_vec();
            let others: Vec<u32> = (0..7).filter(|block| !blocks.contains(block)).take(3).collect();
            let pairs: Vec<_> = blocks.iter().copied().zip(others.iter().copied()).collect();
            backend.copy_blocks(&mut copied.pool, &pairs).unwrap();
            copied.tables.blocks[..3].copy_from_slice(&others);
            assert!(copied.attend(&next, &[(0, 1)]) == want, "{cache}, copied");
            let saved = backend.save_blocks(&swapped.pool, &blocks).unwrap();
            let row = cache.token_bytes(2, 2, 10);
            assert_eq!(saved.bytes(), 3 * 16 * row);
            backend.restore_blocks(&mut swapped.pool, &others, &saved).unwrap();
            swapped.tables.blocks[..3].copy_from_slice(&others);
            assert!(swapped.attend(&next, &[(0, 1)]) == want, "{cache}, swapped");
        }
    }
}

#[test]
fn decoding_over_a_long_context() {
    let device = cuda(CudaOptions::default());
    for (cache, rounding) in CACHES {
        for shape in [shape(8, 2, 64, 0, 0.0), shape(17, 1, 64, 100, 0.0)] {
            let mut host = Paged::new(&Cpu, &shape, CacheType::F32, 1, 1100, None);
            let mut paged = Paged::new(&*device, &shape, cache, 1, 1100, None);
            for (rows, seed) in [(1024, 3), (1, 4)] {
                let tokens = tokens(&shape, rows, Values::Mild, seed);
                let [want, got] = [&mut host, &mut paged].map(|cache| cache.attend(&tokens, &[(0, rows)]));
                compare(&shape, &format!("{cache}, {rows} rows"), &want, &got, rounding);
            }
        }
    }
}

/// Rows of zeros have no scale; large numbers saturate in FP8.
#[test]
fn extreme_numbers() {
    let device = cuda(CudaOptions::default());
    let shape = shape(2, 1, 64, 0, 0.0);
    for backend in [&Cpu as &dyn Backend, &*device] {
        for (cache, _) in CACHES {
            let mut paged = Paged::new(backend, &shape, cache, 1, 16, None);
            let [q, _, _] = tokens(&shape, 2, Values::Any, 5);
            let got = paged.attend(&[q, vec![0.0; 128], vec![0.0; 128]], &[(0, 2)]);
            assert!(got.iter().all(|x| *x == 0.0), "{cache}: {got:?}");
            let [q, _, _] = tokens(&shape, 1, Values::Any, 6);
            let most = if cache == CacheType::Int8 { 1e30 } else { 1e5 };
            let large = [q.iter().map(|x| x.abs()).collect(), vec![most; 64], vec![most; 64]];
            let got = paged.attend(&large, &[(0, 1)]);
            // The large key has all the weight.
            let want = match cache {
                CacheType::F16 => 65504.0,
                CacheType::Fp8E4m3 => 448.0,
                CacheType::Fp8E5m2 => 57344.0,
                _ => most,
            };
            assert!(got.iter().all(|x| (x / want - 1.0).abs() < 1e-5), "{cache}: {got:?}");
        }
    }
}

#[test]
fn caches_that_do_not_fit() {
    let device = cuda(CudaOptions::default());
    let shape = shape(2, 1, 8, 0, 0.0);
    let pool = PoolShape { layers: 1, kv_heads: 1, head_dim: 8, kind: CacheType::F32, blocks: 2, scales: None };
    let error = device.pool(pool.clone()).unwrap_err().to_string();
    assert!(error.contains("for the CPU"), "{error}");
    for (backend, other) in [(&Cpu as &dyn Backend, &*device as &dyn Backend), (&*device, &Cpu)] {
        let f16 = |backend: &dyn Backend| backend.pool(PoolShape { kind: CacheType::F16, ..pool.clone() }).unwrap();
        let refused = |mut pool: Pool, rows: usize, stride: usize, blocks: &[u32], word: &str| {
            let tables = Tables { stride, blocks: blocks.to_vec() };
            let batch = backend.paged_batch(vec![0; rows], spans_of([rows]), tables).unwrap();
            let x = |cols: usize| backend.upload(rows, cols, vec![0.0; rows * cols]).unwrap();
            let layer = Some(Layer { pool: &mut pool, index: 0 });
            let error = backend.attention(&x(16), &x(8), &x(8), &batch, &shape, layer).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        };
        refused(f16(backend), 1, 1, &[2], "block 2");
        refused(f16(backend), 17, 1, &[1], "17 tokens");
        refused(f16(backend), 1, 1, &[], "without their blocks");
        refused(f16(other), 1, 1, &[0], "another backend");
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
