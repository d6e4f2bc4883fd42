//! GGUF blocks with error feedback: against a float64 definition, and against ggml's own encoding on correlated inputs
//! and on the layers of the demo checkpoint.

use std::sync::Arc;

use quantkit::backend::cache::LayerScales;
use quantkit::backend::cpu::Cpu;
use quantkit::backend::{Backend, Gram, Matrix};
use quantkit::calibrate::corpus::Corpus;
use quantkit::calibrate::driver::{self, Course, Inputs, Needs, Quantizing};
use quantkit::checkpoint::Checkpoint;
use quantkit::model::Model;
use quantkit::model::block::{Block, Stage};
use quantkit::model::source::DenseSource;
use quantkit::model::tokenizer::Tokenizer;
use quantkit::num::ggml::GgmlType::{self, *};
use quantkit::num::matmul::{View, add_gram, product};
use quantkit::pack::ggml::encode;
use quantkit::pack::ggml::feedback::{EncodedMatrix, FeedbackError, encode_with_feedback, supports};
use quantkit::pack::ggml::levels::{codes, layout, levels, replace_codes};
use quantkit::quantize::gptq::PassOptions;
use quantkit::quantize::grids::levels::{LevelLayout, Points, curvature};
use quantkit::quantize::order::Order;

use crate::support::repository;

/// The single pass as the paper has it.
const PLAIN: PassOptions = PassOptions {
    order: Order::Natural,
    static_groups: true,
    damp_percent: 0.01,
    damp_auto_increment: 0.01,
    sweeps: 0,
};

/// One linear and the Hessian of its inputs.
struct Problem {
    rows: usize,
    cols: usize,
    weight: Vec<f32>,
    gram: Gram,
}

impl Problem {
    /// Weights with heavy tails; inputs that follow a few common factors, as activations do.
    fn random(rows: usize, cols: usize, seed: u32) -> Self {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        };
        let weight = (0..rows * cols).map(|_| next() * next() * next()).collect();
        let (tokens, factors) = (2 * cols, cols / 8);
        let mixing: Vec<f32> = (0..factors * cols).map(|_| next()).collect();
        let sizes: Vec<f32> = (0..cols).map(|_| 0.2 + next().powi(2) * 2.0).collect();
        let mut x = vec![0.0; tokens * cols];
        for row in x.chunks_exact_mut(cols) {
            for mixing in mixing.chunks_exact(cols) {
                let factor = next();
                row.iter_mut().zip(mixing).for_each(|(x, m)| *x += factor * m);
            }
            row.iter_mut().zip(&sizes).for_each(|(x, size)| *x = *x * size + 0.3 * next());
        }
        let mut gram = vec![0.0; cols * cols];
        add_gram(&x, tokens, cols, &mut gram);
        Self { rows, cols, weight, gram: Gram::host(cols, gram, tokens as u64) }
    }

    fn diagonal(&self) -> Vec<f64> {
        Cpu.diagonal(&self.gram).unwrap()
    }

    fn importance(&self) -> Vec<f32> {
        self.diagonal().iter().map(|d| (d * 2.0 / self.gram.tokens as f64) as f32).collect()
    }

    fn encode(&self, kind: GgmlType, importance: Option<&[f32]>) -> Vec<u8> {
        encode(kind, &self.weight, self.cols, importance).unwrap()
    }

    fn feedback(&self, kind: GgmlType, options: &PassOptions) -> EncodedMatrix {
        let curvature = curvature(&self.gram, &self.diagonal(), None, kind.block(), options).unwrap();
        encode_with_feedback(kind, &self.weight, self.cols, &curvature, options).unwrap()
    }

    /// Half of (w - q)' H (w - q) over all rows, H undamped.
    fn loss(&self, kind: GgmlType, bytes: &[u8]) -> f64 {
        let mut d = vec![0.0; self.weight.len()];
        kind.decode(bytes, &mut d);
        d.iter_mut().zip(&self.weight).for_each(|(d, w)| *d = w - *d);
        let (n, h) = (self.cols, self.gram.lower.host());
        let h: Vec<f32> = (0..n * n).map(|x| h[(x / n).max(x % n) * n + (x / n).min(x % n)] as f32).collect();
        let mut hd = vec![0.0; d.len()];
        product(&mut hd, n, false, 1.0, View::new(&d, self.rows, n, n), View::new(&h, n, n, n));
        d.iter().zip(&hd).map(|(d, hd)| *d as f64 * *hd as f64).sum::<f64>() / self.gram.tokens as f64
    }
}

fn kinds() -> impl Iterator<Item = GgmlType> {
    GgmlType::ALL.into_iter().filter(|kind| supports(*kind))
}

/// Collects the problems that a calibration meets.
struct Collect<'a> {
    problems: &'a mut Vec<Problem>,
    blocks: usize,
}

impl Quantizing for Collect<'_> {
    type Error = anyhow::Error;

    fn needs(&self) -> Needs {
        Needs { gram: true, ..Needs::default() }
    }

    fn restored(&mut self, _: &Block, _: Stage) -> anyhow::Result<Option<Vec<Matrix>>> {
        Ok(None)
    }

    fn quantize(&mut self, block: &Block, stage: Stage, inputs: &Inputs) -> anyhow::Result<Vec<Matrix>> {
        let linears = block.linears(stage);
        for linear in linears.iter().filter(|_| block.index < self.blocks) {
            let weight = linear.weight.weight().to_f32().to_vec();
            self.problems.push(Problem {
                rows: linear.rows,
                cols: linear.cols,
                weight,
                gram: inputs.gram.clone().unwrap(),
            });
        }
        Ok(linears.iter().map(|linear| linear.weight.clone()).collect())
    }

    fn finished(&mut self, _: &Block, _: Option<LayerScales>) -> anyhow::Result<()> {
        Ok(())
    }
}

/// The linears of the first blocks of the demo checkpoint, as windows of a text see them.
fn demo(text: Corpus, blocks: usize, windows: usize) -> Vec<Problem> {
    let dir = repository("calib/demo/target");
    let model = Model::open(Box::new(DenseSource(Checkpoint::open(&dir).unwrap())), Arc::new(Cpu)).unwrap();
    let tokens = text.tokens(&Tokenizer::load(model.checkpoint()).unwrap()).unwrap();
    let windows: Vec<Vec<u32>> = tokens.chunks_exact(256).take(windows).map(<[u32]>::to_vec).collect();
    let mut problems = Vec::new();
    let mut job = Collect { problems: &mut problems, blocks };
    driver::run(&model, &windows, Course { true_sequential: true, drift: false, sample: None }, &mut job).unwrap();
    problems
}

/// Blocks as the encoder writes them, with other codes: they decode to what levels and codes say.
#[test]
fn blocks_decode_to_the_chosen_values() {
    let problem = Problem::random(6, 512, 5);
    assert_eq!(kinds().count(), 12);
    for kind in kinds() {
        let LevelLayout { points, run, .. } = layout(kind).unwrap();
        let bytes = problem.encode(kind, None);
        let (scales, own) = (levels(kind, &bytes), codes(kind, &bytes));
        let (low, count) = match points {
            Points::Even { low, high, zero } => (low + zero, (high - low + 1) as u32),
            Points::Table(_) => (0, 16),
        };
        let other =
            (0..6 * 512u32).map(|i| ((i.wrapping_mul(2_654_435_761) >> 16) % count) as u8 + low as u8).collect();
        for chosen in [own.clone(), other] {
            let mut changed = bytes.clone();
            replace_codes(kind, &mut changed, &chosen);
            assert_eq!(changed == bytes, chosen == own, "{kind}");
            assert_eq!(codes(kind, &changed), chosen, "{kind}");
            assert_eq!(levels(kind, &changed), scales, "{kind}");
            let mut decoded = vec![0.0; problem.weight.len()];
            kind.decode(&changed, &mut decoded);
            for (i, (&code, &value)) in chosen.iter().zip(&decoded).enumerate() {
                let (scale, offset) = scales[i / run];
                assert_eq!(scale * points.point(code) as f32 + offset, value, "{kind}, value {i}");
            }
        }
    }
}

/// Feedback never loses against the encoding whose scales it takes; nor does a sweep against none.
#[test]
fn losses_on_correlated_inputs() {
    let problem = Problem::random(70, 512, 1);
    for kind in kinds() {
        let encoded = problem.loss(kind, &problem.encode(kind, Some(&problem.importance())));
        let mut last = f64::INFINITY;
        for (sweeps, ceiling) in [(0, 0.35), (1, 0.08), (3, 0.05)] {
            let loss = problem.loss(kind, &problem.feedback(kind, &PassOptions { sweeps, ..PLAIN }).bytes);
            assert!(loss < ceiling * encoded, "{kind}, {sweeps} sweeps: {loss} after {encoded}");
            assert!(loss < 1.001 * last, "{kind}, {sweeps} sweeps: {loss} after {last}");
            last = loss;
        }
    }
}

/// The pass in plain float64 loops: the inverse Hessian is taken down column by column (Frantar et al., equations 2 and
/// 3), no blocks, no factor.
#[test]
fn codes_are_those_of_the_definition() {
    let problem = Problem::random(5, 256, 3);
    let n = problem.cols;
    let (h, scale) = (problem.gram.lower.host(), 2.0 / problem.gram.tokens as f64);
    let damp = 0.01 * scale * problem.diagonal().iter().sum::<f64>() / n as f64;
    let at = |i: usize, j: usize| scale * h[i.max(j) * n + i.min(j)] + if i == j { damp } else { 0.0 };
    let damped: Vec<f64> = (0..n * n).map(|x| at(x / n, x % n)).collect();
    let start = inverse(&damped, n);
    for kind in [Q4_0, Q2_K, Q3_K, Q4_K, IQ4_XS] {
        let LevelLayout { points, run, .. } = layout(kind).unwrap();
        let importance = problem.importance();
        let bytes = problem.encode(kind, Some(&importance));
        let scales = levels(kind, &bytes);
        let range = match points {
            Points::Even { low, high, zero } => low + zero..=high + zero,
            Points::Table(_) => 0..=15,
        };
        let mut wanted = Vec::new();
        for (row, scales) in problem.weight.chunks_exact(n).zip(scales.chunks_exact(n / run)) {
            let mut w: Vec<f64> = row.iter().map(|w| *w as f64).collect();
            let mut inverse = start.clone();
            for i in 0..n {
                let (scale, offset) = scales[i / run];
                let value = |code: i32| scale as f64 * points.point(code as u8) as f64 + offset as f64;
                let distance = |code: &i32| (value(*code) - w[i]).abs();
                let code = range.clone().min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap();
                wanted.push(code as u8);
                let error = (w[i] - value(code)) / inverse[i * n + i];
                (i..n).for_each(|j| w[j] -= error * inverse[i * n + j]);
                let pivot: Vec<f64> = inverse[i * n..][..n].to_vec();
                for j in i + 1..n {
                    (i + 1..n).for_each(|k| inverse[j * n + k] -= pivot[j] * pivot[k] / pivot[i]);
                }
            }
        }
        let found = codes(kind, &problem.feedback(kind, &PLAIN).bytes);
        let value = |at: usize, code: u8| scales[at / run].0 * points.point(code) as f32;
        let other = (0..found.len()).filter(|&i| value(i, found[i]) != value(i, wanted[i])).count();
        // Near halfway between two levels f32 may decide otherwise, and what follows in that row with it.
        assert!(other <= found.len() / 100, "{kind}: {other} codes differ");
    }
}

/// The inverse by Gauss and Jordan.
fn inverse(a: &[f64], n: usize) -> Vec<f64> {
    let mut a = a.to_vec();
    for p in 0..n {
        let pivot = std::mem::replace(&mut a[p * n + p], 1.0);
        a[p * n..][..n].iter_mut().for_each(|x| *x /= pivot);
        let row = a[p * n..][..n].to_vec();
        for i in (0..n).filter(|i| *i != p) {
            let factor = std::mem::replace(&mut a[i * n + p], 0.0);
            a[i * n..][..n].iter_mut().zip(&row).for_each(|(x, r)| *x -= factor * r);
        }
    }
    a
}

#[test]
fn threads_do_not_matter() {
    let problem = Problem::random(70, 256, 4);
    let solve = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let options = PassOptions { sweeps: 1, ..PLAIN };
        let refit = PassOptions { static_groups: false, order: Order::GroupAware, ..options };
        pool.install(|| [Q4_K, IQ4_NL].map(|kind| [problem.feedback(kind, &options), problem.feedback(kind, &refit)]))
    };
    assert_eq!(solve(1), solve(5));
}

/// Channels without signal, one whole block of them, and rows of zeros.
#[test]
fn dead_channels_and_rows() {
    let mut problem = Problem::random(3, 512, 6);
    problem.weight[..512].fill(0.0);
    for (x, h) in problem.gram.lower.host_mut().iter_mut().enumerate() {
        if x / 512 >= 250 || x % 512 >= 250 {
            *h = 0.0;
        }
    }
    for kind in kinds() {
        for refit in [false, true] {
            let options = PassOptions { static_groups: !refit, sweeps: 1, ..PLAIN };
            let encoded = problem.feedback(kind, &options);
            let mut decoded = vec![f32::NAN; problem.weight.len()];
            kind.decode(&encoded.bytes, &mut decoded);
            assert!(decoded.iter().all(|x| x.is_finite()) && encoded.loss.is_finite(), "{kind}");
            assert!(decoded[..512].iter().all(|x| *x == 0.0), "{kind}");
        }
    }
}

#[test]
fn what_cannot_be_done_is_refused() {
    let problem = Problem::random(2, 288, 7);
    let curvature = curvature(&problem.gram, &problem.diagonal(), None, 32, &PLAIN).unwrap();
    let refused = |kind, weight: &[f32]| encode_with_feedback(kind, weight, 288, &curvature, &PLAIN).unwrap_err();
    assert_eq!(refused(IQ3_S, &problem.weight), FeedbackError::Unsupported { kind: IQ3_S });
    assert!(matches!(refused(Q4_K, &problem.weight), FeedbackError::Encode(_)));
    let mut bad = problem.weight.clone();
    bad[5] = f32::NAN;
    assert!(matches!(refused(Q4_0, &bad), FeedbackError::Encode(_)));
}

/// Prints what RESULTS.md reports: `cargo test --release --test it feedback::table -- --ignored --nocapture`.
#[test]
#[ignore = "prints figures"]
fn table() {
    let problems = demo(Corpus::builtin(), 4, 48);
    let unseen = demo(Corpus::heldout(), 4, 48);
    let variants = [
        (Order::Natural, false),
        (Order::Natural, true),
        (Order::GroupAware, false),
        (Order::GroupAware, true),
        (Order::Activation, false),
    ];
    let sweeps = [0, 1, 3];
    let kinds = [Q4_0, IQ4_NL, Q4_K, Q3_K, Q2_K, Q5_K];
    let mut sums = vec![vec![[0.0; 2]; 2 + variants.len() * sweeps.len()]; kinds.len()];
    for (problem, unseen) in problems.iter().zip(&unseen) {
        let add = |sums: &mut [f64; 2], kind: GgmlType, bytes: &[u8]| {
            sums[0] += problem.loss(kind, bytes);
            sums[1] += unseen.loss(kind, bytes);
        };
        for (kind, sums) in kinds.iter().zip(&mut sums) {
            add(&mut sums[0], *kind, &problem.encode(*kind, None));
            add(&mut sums[1], *kind, &problem.encode(*kind, Some(&problem.importance())));
        }
        for (v, (order, refit)) in variants.into_iter().enumerate() {
            for block in [32, 256] {
                let options = PassOptions { order, static_groups: !refit, sweeps: 1, ..PLAIN };
                let curvature = curvature(&problem.gram, &problem.diagonal(), None, block, &options).unwrap();
                for (kind, sums) in kinds.iter().zip(&mut sums).filter(|(kind, _)| kind.block() == block) {
                    for (s, sweeps) in sweeps.into_iter().enumerate() {
                        let options = PassOptions { sweeps, ..options };
                        let encoded = encode_with_feedback(*kind, &problem.weight, problem.cols, &curvature, &options);
                        add(&mut sums[2 + v * 3 + s], *kind, &encoded.unwrap().bytes);
                    }
                }
            }
        }
    }
    println!(
        "{} linears; loss on the calibration text / on another one (share of that with importance)",
        problems.len()
    );
    for (kind, sums) in kinds.iter().zip(&sums) {
        let shown =
            |s: &[f64; 2]| format!("{:.3} / {:.3} ({:.3} / {:.3})", s[0], s[1], s[0] / sums[1][0], s[1] / sums[1][1]);
        println!("{kind}: plain {}, importance {}", shown(&sums[0]), shown(&sums[1]));
        for ((order, refit), s) in variants.iter().zip(sums[2..].chunks(3)) {
            println!("  {order:?}, refit {refit}: {}, sweeps 1: {}, 3: {}", shown(&s[0]), shown(&s[1]), shown(&s[2]));
        }
    }
}

/// Layers of a trained model, judged on a text that calibration has not seen.
#[test]
fn losses_on_layers_of_the_demo_checkpoint() {
    let (problems, unseen) = (demo(Corpus::builtin(), 1, 16), demo(Corpus::heldout(), 1, 16));
    for (kind, ceiling) in [(Q4_0, 0.65), (IQ4_NL, 0.65), (Q4_K, 0.7), (Q3_K, 0.7), (Q2_K, 0.7)] {
        let (mut encoded, mut mended) = (0.0, 0.0);
        for (problem, unseen) in problems.iter().zip(&unseen) {
            encoded += unseen.loss(kind, &problem.encode(kind, Some(&problem.importance())));
            mended += unseen.loss(kind, &problem.feedback(kind, &PassOptions::CODES_ONLY).bytes);
        }
        assert!(mended < ceiling * encoded, "{kind}: {mended} after {encoded}");
    }
}
