//! GPTQ on the device against the one in quantize.

use half::{bf16, f16};
use quantkit::backend::cpu::Cpu;
use quantkit::backend::cuda::{Cuda, Device};
use quantkit::backend::weight::{Dense, Weight};
use quantkit::backend::{Backend, Drift, Gram, Sums};
use quantkit::quantize::gptq::{Curvature, CurvatureError, GptqOptions, PassOptions, gptq};
use quantkit::quantize::order::Order;
use quantkit::quantize::scale_search::ScaleSearch;
use quantkit::quantize::{Quantized, Report};
use quantkit::scheme::{GroupSize, Scheme};
use quantkit::tensor::Dtype;

use super::{cuda, noise};

/// Calibration sums and a weight.
struct Problem {
    rows: usize,
    n: usize,
    /// X'X, the lower triangle; NaN above, where nobody may look.
    lower: Vec<f64>,
    tokens: usize,
    drift: Option<Vec<f32>>,
    weight: Weight,
}

impl Problem {
    /// Channels of very different size that have something in common, a few of them dead; rows of very different
    /// size, one of them zero.
    fn new(rows: usize, n: usize, dtype: Dtype, with_drift: bool, seed: u64) -> Self {
        let tokens = n / 2 + 5;
        let (own, common, sizes) = (noise(tokens * n, seed), noise(tokens, seed + 1), noise(n, seed + 2));
        let x = |t: usize, i: usize| {
            let alive = if n > 20 && i % 19 == 3 { 0.0 } else { 1.0 };
            alive * f64::from((1.5 * sizes[i]).exp() * (own[t * n + i] + 0.5 * common[t]))
        };
        let mut lower = vec![f64::NAN; n * n];
        for i in 0..n {
            for j in 0..=i {
                lower[i * n + j] = (0..tokens).map(|t| x(t, i) * x(t, j)).sum();
            }
        }
        let drift = with_drift.then(|| noise(n * n, seed + 3).into_iter().map(|d| d * 0.05).collect());
        let row_size = |row: usize| [1.0, 0.3, 1.0, 0.0, 3.0, 1e-5][row % 6];
        let values = noise(rows * n, seed + 4).into_iter().enumerate().map(|(at, w)| {
            let outlier = if at % 61 == 0 { 4.0 } else { 1.0 };
            w * row_size(at / n) * outlier
        });
        let bytes: Vec<u8> = match dtype {
            Dtype::F16 => values.flat_map(|v| f16::from_f32(v).to_le_bytes()).collect(),
            Dtype::BF16 => values.flat_map(|v| bf16::from_f32(v).to_le_bytes()).collect(),
            _ => values.flat_map(f32::to_le_bytes).collect(),
        };
        let weight = Weight::Dense(Dense { rows, cols: n, dtype, bytes: bytes.into() });
        Self { rows, n, lower, tokens, drift, weight }
    }

    fn solve(
        &self,
        backend: &dyn Backend,
        gram: Gram,
        drift: Option<Drift>,
        options: &GptqOptions,
    ) -> (Quantized, Report, f64) {
        let diagonal = backend.diagonal(&gram).unwrap();
        let curvature =
            Curvature::new(backend, &gram, &diagonal, drift.as_ref(), options.scheme.group_size, &options.pass)
                .unwrap();
        let matrix = backend.load(self.weight.clone()).unwrap();
        let (quantized, report) = gptq(backend, &matrix, &curvature, options).unwrap();
        (quantized, report, curvature.damp_percent)
    }

    fn on_host(&self, options: &GptqOptions) -> (Quantized, Report, f64) {
        let drift = self.drift.clone().map(|values| Drift::host(self.n, values, self.tokens as u64));
        self.solve(&Cpu, Gram::host(self.n, self.lower.clone(), self.tokens as u64), drift, options)
    }

    fn on_device(&self, cuda: &Cuda, options: &GptqOptions) -> (Quantized, Report, f64) {
        let drift = self.drift.as_ref().map(|values| device_drift(self.n, values, self.tokens));
        self.solve(cuda, device_gram(self.n, &self.lower, self.tokens), drift, options)
    }
}

/// The same sums as on the host: those that a device adds up itself differ in their last bits.
fn device_gram(n: usize, lower: &[f64], tokens: usize) -> Gram {
    Gram { n, lower: Sums::Cuda(uploaded(lower)), tokens: tokens as u64 }
}

fn device_drift(n: usize, values: &[f32], tokens: usize) -> Drift {
    Drift { n, values: Sums::Cuda(uploaded(values)), tokens: tokens as u64 }
}

fn uploaded<T: bytemuck::Pod>(values: &[T]) -> quantkit::backend::cuda::Buffer {
    let device = Device::open(0, 0, false).unwrap();
    let buffer = device.upload(values).unwrap();
    device.synchronize().unwrap();
    buffer
}

fn options(bits: u8, group_size: i32, sym: bool, order: Order) -> GptqOptions {
    GptqOptions {
        scheme: Scheme { bits, group_size: GroupSize::new(group_size).unwrap(), sym },
        pass: PassOptions { order, static_groups: false, damp_percent: 0.01, damp_auto_increment: 0.01, sweeps: 0 },
        grid: ScaleSearch::Hessian,
        least_zero: 0,
    }
}

/// How many codes and levels of groups there are, and how many are equal. Sums in another order may tip a weight
/// that lies between two codes, and what follows it in its row.
#[derive(Default)]
struct Agreement {
    codes: usize,
    equal_codes: usize,
    levels: usize,
    equal_levels: usize,
}

impl Agreement {
    /// Compares one problem's solutions.
    #[track_caller]
    fn compare(&mut self, cuda: &Cuda, problem: &Problem, options: &GptqOptions) {
        let what = format!("{}x{}, {options:?}", problem.rows, problem.n);
        let (found, found_report, found_damp) = problem.on_device(cuda, options);
        let (wanted, wanted_report, wanted_damp) = problem.on_host(options);
        assert_eq!((found.rows, found.cols, &found.g_idx), (wanted.rows, wanted.cols, &wanted.g_idx), "{what}");
        assert_eq!((found.codes.len(), found.scales.len()), (wanted.codes.len(), wanted.scales.len()), "{what}");
        assert_eq!(found_damp, wanted_damp, "{what}");
        let equal = found.codes.iter().zip(&wanted.codes).filter(|(a, b)| a == b).count();
        assert!(equal * 100 >= wanted.codes.len() * 98, "{what}: {equal} of {} codes are equal", wanted.codes.len());
        let (a, b) = (found_report.loss, wanted_report.loss);
        assert!((a - b).abs() <= 1e-3 * b.abs(), "{what}: loss {a}, not {b}");
        self.codes += wanted.codes.len();
        self.equal_codes += equal;
        let levels = |q: &Quantized| q.scales.iter().copied().zip(q.zeros.iter().copied()).collect::<Vec<_>>();
        self.levels += wanted.scales.len();
        self.equal_levels += levels(&found).into_iter().zip(levels(&wanted)).filter(|(a, b)| a == b).count();
    }
}

impl Drop for Agreement {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let Self { codes, equal_codes, levels, equal_levels } = *self;
            assert!(equal_codes * 1000 >= codes * 999, "{equal_codes} of {codes} codes are equal");
            assert!(equal_levels * 100 >= levels * 99, "{equal_levels} of {levels} levels are equal");
        }
    }
}

const ORDERS: [(Order, bool); 6] = [
    (Order::Natural, false),
    (Order::GroupAware, false),
    (Order::Activation, false),
    (Order::Natural, true),
    (Order::GroupAware, true),
    (Order::Activation, true),
];
const GRIDS: [ScaleSearch; 3] = [ScaleSearch::Hessian, ScaleSearch::MaxAbs, ScaleSearch::Mse];

#[test]
fn every_scheme_and_order() {
    let (cuda, mut agreement) = (cuda(Default::default()), Agreement::default());
    let problem = Problem::new(13, 300, Dtype::F16, false, 1);
    let mut turn = 0;
    for group_size in [16, 32, 128, -1] {
        for sym in [false, true] {
            for (order, static_groups) in ORDERS {
                let bits = [2, 3, 4, 8][turn % 4];
                let grid = GRIDS[turn / 2 % 3];
                let mut options = GptqOptions { grid, ..options(bits, group_size, sym, order) };
                options.pass.static_groups = static_groups;
                agreement.compare(&cuda, &problem, &options);
                turn += 1;
            }
            turn += 1;
        }
    }
}

#[test]
fn every_shape() {
    let (cuda, mut agreement) = (cuda(Default::default()), Agreement::default());
    // Groups longer than a block too, and such as do not fill a row.
    for (rows, n, group_size) in
        [(1, 1, 16), (33, 7, -1), (8, 64, 64), (50, 130, 32), (1, 413, 200), (9, 257, 129), (13, 131, 5)]
    {
        for (turn, dtype) in [Dtype::F16, Dtype::BF16, Dtype::F32].into_iter().enumerate() {
            let problem = Problem::new(rows, n, dtype, false, 10 + turn as u64);
            let order = [Order::Natural, Order::GroupAware, Order::Activation][turn];
            agreement.compare(&cuda, &problem, &options(4, group_size, turn != 1, order));
        }
    }
}

#[test]
fn sweeps_and_drift() {
    let (cuda, mut agreement) = (cuda(Default::default()), Agreement::default());
    for (turn, (order, static_groups)) in ORDERS.into_iter().enumerate() {
        for (sweeps, with_drift, group_size) in [(0, true, 32), (1, false, 16), (2, true, 128), (2, false, 150)] {
            let problem = Problem::new(9, 290, Dtype::BF16, with_drift, 20 + turn as u64);
            let bits = [4, 3, 2][turn % 3];
            let mut options = options(bits, group_size, turn % 2 == 0, order);
            (options.pass.static_groups, options.pass.sweeps) = (static_groups, sweeps);
            agreement.compare(&cuda, &problem, &options);
        }
    }
}

#[test]
fn raised_zero_points() {
    let (cuda, mut agreement) = (cuda(Default::default()), Agreement::default());
    let mut problem = Problem::new(16, 96, Dtype::F32, false, 30);
    // All positive: these want a zero point of 0.
    let positive =
        problem.weight.to_f32().into_iter().flat_map(|w| (w.abs() + 0.01).to_le_bytes()).collect::<Vec<u8>>();
    problem.weight = Weight::Dense(Dense { rows: 16, cols: 96, dtype: Dtype::F32, bytes: positive.into() });
    for (bits, grid) in [2, 3, 4, 8].into_iter().flat_map(|bits| GRIDS.map(|grid| (bits, grid))) {
        for static_groups in [false, true] {
            let mut options = GptqOptions { grid, least_zero: 1, ..options(bits, 16, false, Order::Natural) };
            (options.pass.static_groups, options.pass.sweeps) = (static_groups, 1);
            agreement.compare(&cuda, &problem, &options);
        }
    }
}

#[test]
fn what_is_not_positive_definite_is_damped_or_refused() {
    let (cuda, n) = (cuda(Default::default()), 150);
    let mut setting = options(4, -1, true, Order::Natural);
    setting.pass.damp_percent = 0.0;
    let solve = |backend: &dyn Backend, gram: Gram| {
        let diagonal = backend.diagonal(&gram).unwrap();
        Curvature::new(backend, &gram, &diagonal, None, setting.scheme.group_size, &setting.pass)
    };
    let sums = |value: fn(usize, usize) -> f64| (0..n * n).map(|x| value(x / n, x % n)).collect::<Vec<_>>();
    // All channels equal.
    let equal = sums(|_, _| 1.0);
    let damped = solve(&*cuda, device_gram(n, &equal, 2)).unwrap();
    assert_eq!(damped.damp_percent, solve(&Cpu, Gram::host(n, equal, 2)).unwrap().damp_percent);
    assert!(damped.damp_percent > 0.0);
    let indefinite = sums(|i, j| if i == j { 1.0 } else { -3.0 });
    let refused = solve(&*cuda, device_gram(n, &indefinite, 2));
    assert!(matches!(refused, Err(CurvatureError::NotPositive { .. })));
}
