//! GPTQ against a float64 definition (`reference/make_golden_gptq.py`): twelve settings on one problem.

use half::f16;
use quantkit::backend::cpu::Cpu;
use quantkit::backend::weight::{Dense, Weight};
use quantkit::backend::{Backend, Drift, Gram};
use quantkit::quantize::Quantized;
use quantkit::quantize::gptq::{Curvature, CurvatureError, GptqOptions, PassOptions, gptq};
use quantkit::quantize::order::Order;
use quantkit::quantize::rtn::rtn;
use quantkit::quantize::scale_search::ScaleSearch;
use quantkit::scheme::{GroupSize, Scheme};
use quantkit::tensor::{Dtype, widened};
use safetensors::SafeTensors;
use serde_json::Value;

use crate::support::fixture;

struct Problem {
    rows: usize,
    cols: usize,
    weight: Vec<f32>,
    gram: Gram,
    file: Vec<u8>,
    index: Value,
}

fn curvature(gram: &Gram, drift: Option<&Drift>, options: &GptqOptions) -> Result<Curvature, CurvatureError> {
    Curvature::new(&Cpu, gram, &Cpu.diagonal(gram).unwrap(), drift, options.scheme.group_size, &options.pass)
}

fn solve(weight: &[f32], rows: usize, gram: &Gram, drift: Option<&Drift>, options: &GptqOptions) -> Quantized {
    let bytes = bytemuck::cast_slice(weight).to_vec().into();
    let weight = Weight::Dense(Dense { rows, cols: gram.n, dtype: Dtype::F32, bytes });
    gptq(&Cpu, &Cpu.load(weight).unwrap(), &curvature(gram, drift, options).unwrap(), options).unwrap().0
}

/// 2/tokens X'X, the diagonal.
fn hessian(gram: &Gram) -> Vec<f64> {
    Cpu.diagonal(gram).unwrap().iter().map(|d| d * 2.0 / gram.tokens as f64).collect()
}

impl Problem {
    fn load() -> Self {
        let bytes = std::fs::read(fixture("gptq/golden.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let w = file.tensor("W").unwrap();
        let h = widened(Dtype::F32, file.tensor("H").unwrap().data());
        let (rows, cols) = (w.shape()[0], w.shape()[1]);
        // The golden H is already 2/tokens X'X.
        let gram = Gram::host(cols, h.iter().map(|h| *h as f64).collect(), 2);
        let index = serde_json::from_slice(&std::fs::read(fixture("gptq/index.json")).unwrap()).unwrap();
        Self { rows, cols, weight: widened(Dtype::F16, w.data()), gram, index, file: bytes }
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        SafeTensors::deserialize(&self.file).unwrap().tensor(name).unwrap().data().to_vec()
    }

    /// sum over rows of (w - q)' H (w - q), dead channels left out.
    fn output_error(&self, q: &Quantized) -> f64 {
        let n = self.cols;
        let alive = |k: usize| self.gram.lower.host()[k * n + k] != 0.0;
        (0..self.rows)
            .map(|r| {
                let d: Vec<f64> = (0..n)
                    .map(|k| if alive(k) { (self.weight[r * n + k] - q.value(r, k)) as f64 } else { 0.0 })
                    .collect();
                (0..n)
                    .map(|i| (0..n).map(|j| d[i] * self.gram.lower.host()[i * n + j] * d[j]).sum::<f64>())
                    .sum::<f64>()
            })
            .sum()
    }

    fn solve(&self, options: &GptqOptions) -> Quantized {
        solve(&self.weight, self.rows, &self.gram, None, options)
    }
}

fn options(setting: &Value) -> GptqOptions {
    let order = setting["order"].as_str().unwrap();
    GptqOptions {
        scheme: Scheme {
            bits: setting["bits"].as_u64().unwrap() as u8,
            group_size: GroupSize::new(setting["group_size"].as_i64().unwrap() as i32).unwrap(),
            sym: setting["sym"].as_bool().unwrap(),
        },
        pass: PassOptions {
            order: match order {
                "natural" => Order::Natural,
                "gar" => Order::GroupAware,
                _ => Order::Activation,
            },
            static_groups: order == "desc_act_static",
            damp_percent: setting["damp"].as_f64().unwrap(),
            damp_auto_increment: 0.01,
            sweeps: 0,
        },
        grid: ScaleSearch::MaxAbs,
        least_zero: 0,
    }
}

#[test]
fn codes_scales_and_order_equal_the_definition() {
    let problem = Problem::load();
    let settings = problem.index.as_object().unwrap();
    assert_eq!(settings.len(), 12);
    for (name, setting) in settings {
        let q = problem.solve(&options(setting));
        let codes = problem.bytes(&format!("{name}.codes"));
        let equal = codes.iter().zip(&q.codes).filter(|(a, b)| a == b).count();
        assert!(equal as f64 >= 0.999 * codes.len() as f64, "{name}: {equal} of {} codes equal", codes.len());
        let scales: Vec<f16> = problem
            .bytes(&format!("{name}.scales"))
            .chunks_exact(2)
            .map(|b| f16::from_le_bytes([b[0], b[1]]))
            .collect();
        let same = scales.iter().zip(&q.scales).filter(|(a, b)| a == b).count();
        // Dynamic grids come from weights mended in f32 here, in f64 there: a last bit of f16 may differ.
        assert!(same as f64 >= 0.99 * scales.len() as f64, "{name}: {same} of {} scales equal", scales.len());
        for (a, b) in scales.iter().zip(&q.scales) {
            assert!((a.to_f32() - b.to_f32()).abs() <= 1e-3 * a.to_f32().abs(), "{name}: scale {a} against {b}");
        }
        assert_eq!(problem.bytes(&format!("{name}.zeros")), q.zeros, "{name}: zeros");
        let g_idx: Vec<u32> = problem
            .bytes(&format!("{name}.g_idx"))
            .chunks_exact(4)
            .map(|b| u32::from_le_bytes(b.try_into().unwrap()))
            .collect();
        assert_eq!(g_idx, q.g_idx, "{name}: g_idx");
        let (found, wanted) = (problem.output_error(&q), setting["output_error"].as_f64().unwrap());
        assert!((found / wanted - 1.0).abs() < 1e-3, "{name}: output error {found}, wanted {wanted}");
    }
}

#[test]
fn searched_grids_and_sweeps_only_help() {
    let problem = Problem::load();
    for (name, setting) in problem.index.as_object().unwrap() {
        let plain = options(setting);
        let error = |grid, sweeps| {
            let pass = PassOptions { sweeps, ..plain.pass };
            problem.output_error(&problem.solve(&GptqOptions { grid, pass, ..plain }))
        };
        let errors = [error(ScaleSearch::MaxAbs, 0), error(ScaleSearch::Hessian, 0), error(ScaleSearch::Hessian, 3)];
        // With 8 bits there is nothing left to search.
        assert!(errors[1] < errors[0] * if plain.scheme.bits == 8 { 1.02 } else { 1.0 }, "{name}: {errors:?}");
        assert!(errors[2] < errors[1], "{name}: {errors:?}");
        let control = rtn(
            &problem.weight,
            problem.rows,
            problem.cols,
            Some(&hessian(&problem.gram)),
            plain.scheme,
            ScaleSearch::Hessian,
            0,
        )
        .0;
        assert!(errors[2] < problem.output_error(&control), "{name}: worse than rounding to nearest");
    }
}

#[test]
fn a_rank_deficient_hessian_is_damped_or_refused() {
    let n = 8;
    let gram = |value: fn(usize, usize) -> f64| Gram::host(n, (0..n * n).map(|x| value(x / n, x % n)).collect(), 2);
    let setting = GptqOptions {
        scheme: Scheme { bits: 4, group_size: GroupSize::CHANNEL, sym: true },
        pass: PassOptions {
            order: Order::Natural,
            static_groups: false,
            damp_percent: 0.0,
            damp_auto_increment: 0.01,
            sweeps: 0,
        },
        grid: ScaleSearch::MaxAbs,
        least_zero: 0,
    };
    let duplicates = gram(|_, _| 1.0);
    let damped = curvature(&duplicates, None, &setting).unwrap();
    assert!(damped.damp_percent > 0.0, "all channels equal need damping");
    let indefinite = gram(|i, j| if i == j { 1.0 } else { -3.0 });
    assert!(curvature(&indefinite, None, &setting).is_err());
}

/// With inputs X in the quantized model and O in the original one, the outputs on X must come as near to those
/// of the weights on O as any weights can (against a direct solution of the normal equations).
#[test]
fn drift_is_corrected_by_the_ridge_solution() {
    let (n, rows, tokens) = (6, 3, 40);
    let noise = |i: usize, seed: usize| ((i * 7919 + seed * 104_729) % 1009) as f64 / 504.5 - 1.0;
    let original: Vec<f64> = (0..tokens * n).map(|i| noise(i, 1)).collect();
    let seen: Vec<f64> = (0..tokens * n).map(|i| original[i] * 0.8 + 0.3 * noise(i, 2)).collect();
    let weight: Vec<f32> = (0..rows * n).map(|i| noise(i, 3) as f32).collect();
    let sum = |f: &dyn Fn(usize) -> f64| (0..tokens).map(f).sum::<f64>();
    let gram: Vec<f64> = (0..n * n).map(|x| sum(&|t| seen[t * n + x / n] * seen[t * n + x % n])).collect();
    let cross: Vec<f64> = (0..n * n).map(|x| sum(&|t| seen[t * n + x / n] * original[t * n + x % n])).collect();
    let drift = (0..n * n).map(|x| (cross[x] - gram[x]) as f32).collect();
    let setting = GptqOptions {
        scheme: Scheme { bits: 8, group_size: GroupSize::CHANNEL, sym: true },
        pass: PassOptions {
            order: Order::Activation,
            static_groups: false,
            damp_percent: 1e-6,
            damp_auto_increment: 0.01,
            sweeps: 0,
        },
        grid: ScaleSearch::MaxAbs,
        least_zero: 0,
    };
    let gram = Gram::host(n, gram, tokens as u64);
    let drift = Drift::host(n, drift, tokens as u64);
    let corrected = solve(&weight, rows, &gram, Some(&drift), &setting);
    let plain = solve(&weight, rows, &gram, None, &setting);
    for r in 0..rows {
        // The gradient of |X q - O w|²: zero at the best q, but for rounding to 8 bits.
        let gradient = |q: &Quantized, i: usize| -> f64 {
            (0..n)
                .map(|k| {
                    gram.lower.host()[i * n + k] * q.value(r, k) as f64 - cross[i * n + k] * weight[r * n + k] as f64
                })
                .sum()
        };
        let size = |q: &Quantized| (0..n).map(|i| gradient(q, i).abs()).sum::<f64>();
        assert!(size(&corrected) < 0.05 * size(&plain), "row {r}: {} against {}", size(&corrected), size(&plain));
    }
}

/// Weights that are all positive want a zero point of 0; where a format cannot hold that, 1 must do, without
/// cutting off the largest weights.
#[test]
fn the_least_zero_point_is_kept() {
    let (rows, n) = (32, 32);
    let weight: Vec<f32> = (0..rows * n).map(|i| 0.05 + (i * 7919 % 1009) as f32 / 1009.0).collect();
    let lower = (0..n * n).map(|x| if x / n == x % n { 1.0 } else { 0.1 }).collect();
    let gram = Gram::host(n, lower, 2);
    for (bits, grid) in [2, 3, 4, 8]
        .into_iter()
        .flat_map(|b| [ScaleSearch::MaxAbs, ScaleSearch::Mse, ScaleSearch::Hessian].map(|g| (b, g)))
    {
        for static_groups in [false, true] {
            let scheme = Scheme { bits, group_size: GroupSize::new(16).unwrap(), sym: false };
            let options = |least_zero| GptqOptions {
                scheme,
                pass: PassOptions {
                    order: Order::Natural,
                    static_groups,
                    damp_percent: 0.05,
                    damp_auto_increment: 0.01,
                    sweeps: 1,
                },
                grid,
                least_zero,
            };
            let solved = |least| solve(&weight, rows, &gram, None, &options(least));
            let rounded = |least| rtn(&weight, rows, n, Some(&hessian(&gram)), scheme, grid, least).0;
            assert!(solved(0).zeros.contains(&0) && rounded(0).zeros.contains(&0), "{bits} bits, {grid:?}");
            for q in [solved(1), rounded(1)] {
                assert!(q.zeros.iter().all(|&zero| zero > 0), "{bits} bits, {grid:?}");
            }
            // One code less above zero: steps are coarser, not more.
            let worst = |q: &Quantized| {
                let error = |i: usize| (weight[i] - q.value(i / n, i % n)).abs();
                (0..rows * n).map(error).fold(0.0, f32::max)
            };
            let top = scheme.top() as f32;
            if grid == ScaleSearch::MaxAbs {
                let step = 1.05 / (top - 1.0);
                assert!(worst(&rounded(1)) <= 0.51 * step, "{bits} bits: {}", worst(&rounded(1)));
            }
        }
    }
}
