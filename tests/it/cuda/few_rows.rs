//! Up to `few_rows` rows, each has the results of the row alone, bit for bit: on both backends.

use quantkit::backend::cpu::Cpu;
use quantkit::backend::cuda::{Cuda, CudaOptions};
use quantkit::backend::tensor::Tensor;
use quantkit::backend::weight::{Inputs, Weight};
use quantkit::backend::{Activation, Backend, RopeTable, Span};
use quantkit::num::ggml::GgmlType;
use quantkit::tensor::Dtype;

use super::eight_bits::{fp8, int8};
use super::ggml::{columns, weight};
use super::linear::{dense, gptq, natural, scattered};
use super::{cuda, noise};

/// Every kind of weight, in shapes that fill no tile.
fn weights() -> Vec<Weight> {
    let mut all = Vec::new();
    for dtype in [Dtype::F16, Dtype::BF16, Dtype::F32] {
        all.extend([(1, 32), (33, 100), (75, 520)].map(|(rows, cols)| dense(dtype, rows, cols)));
    }
    for bits in [2, 3, 4, 8] {
        all.extend([natural(224, 128), natural(96, 16), scattered(160, 64)].map(|g_idx| gptq(bits, 37, g_idx)));
    }
    for kind in GgmlType::ALL {
        all.extend(columns(kind).map(|cols| weight(kind, 11, cols, 5)));
    }
    let group = Inputs::Group(32);
    for inputs in
        [Inputs::Float, Inputs::Token, group, Inputs::TokenAsymmetric, Inputs::Tensor { scale: 0.02, zero: 5 }]
    {
        all.extend([int8(37, 100, inputs), fp8(37, 160, (1, 160), inputs), fp8(21, 96, (16, 32), inputs)]);
        all.push(fp8(5, 77, (16, 32), inputs));
    }
    all
}

fn bits(backend: &dyn Backend, x: &Tensor) -> Vec<u32> {
    backend.download(x).unwrap().into_iter().map(f32::to_bits).collect()
}

/// Runs an operation on many rows and on each alone; `values` are what it reads a row.
fn check(what: &str, values: &[f32], rows: usize, counts: &[usize], operate: &dyn Fn(&[f32], Span) -> Vec<u32>) {
    let cols = values.len() / rows;
    let row = |r: usize| operate(&values[r * cols..(r + 1) * cols], Span { rows: 1, start: 3 + r });
    let alone: Vec<Vec<u32>> = (0..rows).map(row).collect();
    for &count in counts {
        let together = operate(&values[..count * cols], Span { rows: count, start: 3 });
        for (r, (together, alone)) in together.chunks(alone[0].len()).zip(&alone).enumerate() {
            assert!(together == alone, "{what}: row {r} of {count} is not what it is alone");
        }
    }
}

fn products(backend: &dyn Backend, counts: &[usize]) {
    let rows = counts.iter().copied().max().unwrap();
    for weight in weights() {
        let (n, cols) = (weight.rows(), weight.cols());
        let matrix = backend.load(weight.clone()).unwrap();
        let bias = backend.upload(1, n, noise(n, 2)).unwrap();
        let x: Vec<f32> = noise(rows * cols, 1).into_iter().map(|v| v + 0.3).collect();
        let what = format!("{n}x{cols}, {}", format!("{weight:?}").chars().take(60).collect::<String>());
        check(&what, &x, rows, counts, &|x, span| {
            let x = backend.upload(span.rows, cols, x.to_vec()).unwrap();
            bits(backend, &backend.linear(&x, &matrix, Some(&bias)).unwrap())
        });
    }
}

fn operations(backend: &dyn Backend, counts: &[usize]) {
    let rows = counts.iter().copied().max().unwrap();
    let (head_dim, cols, vocab) = (22, 3 * 22, 50);
    let weight = backend.upload(1, cols, noise(cols, 5)).unwrap();
    let of_head = backend.upload(1, head_dim, noise(head_dim, 6)).unwrap();
    let angles = |seed| backend.upload(rows + 3, 11, noise((rows + 3) * 11, seed)).unwrap();
    let table = RopeTable { cos: angles(7), sin: angles(8) };
    let embedding = backend.load(dense(Dtype::BF16, vocab, cols)).unwrap();
    let batch = |x: &[f32], span: Span| {
        let ids = x.chunks(cols).map(|x| (x[0].abs() * vocab as f32) as u32 % vocab as u32).collect();
        backend.batch(ids, vec![span]).unwrap()
    };
    let tensor = |x: &[f32]| backend.upload(x.len() / cols, cols, x.to_vec()).unwrap();
    let other = |x: &[f32]| tensor(&x.iter().map(|x| x * x - 0.2).collect::<Vec<_>>());
    type Operation<'a> = (&'a str, &'a dyn Fn(&[f32], Span) -> Tensor);
    let all: [Operation; 8] = [
        ("rms_norm", &|x, _| backend.rms_norm(&tensor(x), &weight, 1e-5).unwrap()),
        ("add_rms_norm", &|x, _| backend.add_rms_norm(&mut tensor(x), &other(x), &weight, 1e-5).unwrap()),
        ("rope", &|x, span| {
            let mut out = tensor(x);
            backend.rope(&mut out, &batch(x, span), head_dim, Some((&of_head, 1e-5)), &table).unwrap();
            out
        }),
        ("embed", &|x, span| backend.embed(&embedding, &batch(x, span), 1.5).unwrap()),
        ("silu", &|x, _| backend.gated(&tensor(x), &other(x), Activation::Silu).unwrap()),
        ("gelu", &|x, _| backend.gated(&tensor(x), &other(x), Activation::GeluTanh).unwrap()),
        ("add", &|x, _| {
            let mut out = tensor(x);
            backend.add(&mut out, &other(x)).unwrap();
            out
        }),
        ("softcap", &|x, _| {
            let mut out = tensor(x);
            backend.softcap(&mut out, 2.5).unwrap();
            out
        }),
    ];
    let x: Vec<f32> = noise(rows * cols, 1).into_iter().map(|v| 3.0 * v).collect();
    for (what, operation) in all {
        check(what, &x, rows, counts, &|x, span| bits(backend, &operation(x, span)));
    }
}

#[test]
fn on_the_cpu() {
    assert!(Cpu.few_rows() >= 64);
    let counts: Vec<usize> = (2..=Cpu.few_rows()).collect();
    products(&Cpu, &counts);
    operations(&Cpu, &counts);
}

#[test]
fn on_the_device() {
    let backend: &Cuda = &cuda(CudaOptions::default());
    let most = backend.few_rows();
    assert!(most >= 16);
    products(backend, &[2, 3, 5, 8, most - 1, most]);
    operations(backend, &[2, 3, 4, 7, most]);
}
