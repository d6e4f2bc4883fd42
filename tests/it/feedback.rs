//! GGUF blocks with error feedback: against a float64 definition, and against ggml's own encoding on correlated inputs
//! and on the layers of the demo checkpoint.

use std::sync::Arc;

use quantkit::backend::cpu::Cpu;
use quantkit::backend::{Backend, Gram, Matrix};
use quantkit::calibrate::corpus::Corpus;
use quantkit::calibrate::driver::{self, Course, Inputs, Quantizing};
use quantkit::checkpoint::Checkpoint;
use quantkit::commands::gguf::feedback::{Encoded, FeedbackError, encode_with_feedback, supports};
use quantkit::model::Model;
use quantkit::model::block::{Block, Stage};
use quantkit::model::source::DenseSource;
use quantkit::model::tokenizer::Tokenizer;
use quantkit::num::ggml::GgmlType::{self, *};
use quantkit::num::matmul::add_gram;
use quantkit::pack::ggml::encode;
use quantkit::pack::ggml::levels::{codes, layout, levels};
use quantkit::quantize::feedback::{FeedbackOptions, curvature};
use quantkit::quantize::order::Order;

use crate::support::repository;

const PLAIN: FeedbackOptions = FeedbackOptions {
    order: Order::Natural,
    damp_percent: 0.01,
    damp_auto_increment: 0.01,
    refit: false,
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

    fn feedback(&self, kind: GgmlType, options: &FeedbackOptions) -> Encoded {
        let curvature = curvature(&self.gram, &self.diagonal(), kind.block(), options).unwrap();
        encode_with_feedback(kind, &self.weight, self.cols, &curvature, options).unwrap()
    }

    /// Half of (w - q)' H (w - q) over all rows, H undamped.
    fn loss(&self, kind: GgmlType, bytes: &[u8]) -> f64 {
        let mut decoded = vec![0.0; self.weight.len()];
        kind.decode(bytes, &mut decoded);
        let (n, h) = (self.cols, self.gram.lower.host());
        let mut sum = 0.0;
        for (w, q) in self.weight.chunks_exact(n).zip(decoded.chunks_exact(n)) {
            let d: Vec<f64> = w.iter().zip(q).map(|(w, q)| (w - q) as f64).collect();
            for i in 0..n {
                let row = &h[i * n..i * n + i];
                let off: f64 = row.iter().zip(&d).map(|(h, d)| h * d).sum();
                sum += d[i] * (2.0 * off + h[i * n + i] * d[i]);
            }
        }
        sum / self.gram.tokens as f64
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

    fn restored(&mut self, _: &Block, _: Stage) -> anyhow::Result<Option<Vec<Matrix>>> {
        Ok(None)
    }

    fn quantize(&mut self, block: &Block, stage: Stage, inputs: &Inputs) -> anyhow::Result<Vec<Matrix>> {
        let linears = block.linears(stage);
        for linear in linears.iter().filter(|_| block.index < self.blocks) {
            let weight = linear.weight.weight().to_f32().to_vec();
            self.problems.push(Problem { rows: linear.rows, cols: linear.cols, weight, gram: inputs.gram.clone() });
        }
        Ok(linears.iter().map(|linear| linear.weight.clone()).collect())
    }

    fn finished(&mut self, _: &Block) -> anyhow::Result<()> {
        Ok(())
    }
}

/// The linears of the first blocks of the demo checkpoint.
fn demo(blocks: usize, windows: usize) -> Vec<Problem> {
    let dir = repository("calib/demo/target");
    let model = Model::open(Box::new(DenseSource(Checkpoint::open(&dir).unwrap())), Arc::new(Cpu)).unwrap();
    let tokens = Corpus::builtin().tokens(&Tokenizer::load(model.checkpoint()).unwrap()).unwrap();
    let windows: Vec<Vec<u32>> = tokens.chunks_exact(256).take(windows).map(<[u32]>::to_vec).collect();
    let mut problems = Vec::new();
    let mut job = Collect { problems: &mut problems, blocks };
    driver::run(&model, &windows, Course { true_sequential: true, drift: false }, &mut job).unwrap();
    problems
}

/// Prints what RESULTS.md reports: `cargo test --release --test it feedback::table -- --ignored --nocapture`.
#[test]
#[ignore = "prints figures"]
fn table() {
    let problems = demo(4, 128);
    println!("{} linears", problems.len());
    for kind in [Q4_0, Q4_K, Q3_K, Q2_K, Q5_K, IQ4_NL] {
        let total = |bytes: &dyn Fn(&Problem) -> Vec<u8>| problems.iter().map(|p| p.loss(kind, &bytes(p))).sum::<f64>();
        let plain = total(&|p| p.encode(kind, None));
        let important = total(&|p| p.encode(kind, Some(&p.importance())));
        println!("{kind}: plain {plain:.4} importance {important:.4} ({:.3})", important / plain);
        for (order, refit) in [
            (Order::Natural, false),
            (Order::Natural, true),
            (Order::GroupAware, false),
            (Order::GroupAware, true),
            (Order::Activation, false),
        ] {
            let mut line = format!("  {order:?} refit {refit}:");
            for sweeps in [0, 1, 3] {
                let options = FeedbackOptions { order, refit, sweeps, ..PLAIN };
                let loss = total(&|p| p.feedback(kind, &options).bytes);
                line += &format!(" {sweeps} sweeps {loss:.4} ({:.3})", loss / important);
            }
            println!("{line}");
        }
    }
}
