//! Products with stored weights.

use super::super::weight::Weight;
use super::rounding;
use crate::num::{int8, matmul};

/// Rows up to which each has the same results as alone; they are multiplied from the stored form. More go through panels.
pub const FEW_ROWS: usize = 64;

/// `out` = x W' for rows of `weight.cols()` values: bytes by bytes in integers, all else in f32.
pub fn linear(x: &[f32], rows: usize, weight: &Weight, out: &mut [f32]) {
    let (n, cols) = (weight.rows(), weight.cols());
    let product = |x: &[f32], out: &mut [f32]| {
        if rows <= FEW_ROWS {
            matmul::linear_of_few(rows, cols, n, &|outputs, out| weight.products(outputs, x, out), out);
        } else {
            matmul::linear(x, rows, cols, n, &|outputs, b| weight.panel(outputs, b), out);
        }
    };
    match weight {
        Weight::Int8(w) => match rounding::bytes(x, cols, w.inputs) {
            // Sums of integers are the same in any order.
            Some(x) => int8::linear(&x, &w.values, &w.scales, out),
            None => product(x, out),
        },
        Weight::Fp8(w) => match rounding::floats(x, cols, w.inputs) {
            Some(x) => product(&x, out),
            None => product(x, out),
        },
        Weight::Dense(_) | Weight::Gptq(_) | Weight::Ggml(_) => product(x, out),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;

    use rayon::ThreadPoolBuilder;

    use super::super::super::weight::{Dense, Fp8, Inputs, Int8};
    use super::*;
    use crate::num::e4m3;
    use crate::tensor::{Bytes, Dtype};

    const INPUTS: [Inputs; 5] = [
        Inputs::Float,
        Inputs::Token,
        Inputs::Group(32),
        Inputs::TokenAsymmetric,
        Inputs::Tensor { scale: 0.02, zero: 5 },
    ];

    fn noise(n: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 7919 % 4093) as f32 - 1800.0) * 1e-3).collect()
    }

    fn codes(n: usize) -> Bytes {
        Bytes::from((0..n).map(|i| (i * 197 % 251) as u8).collect::<Vec<u8>>())
    }

    fn int8(rows: usize, cols: usize, inputs: Inputs) -> Weight {
        let scales = (0..rows).map(|n| 0.01 + n as f32 * 1e-4).collect();
        Weight::Int8(Arc::new(Int8 { rows, cols, values: codes(rows * cols), scales, inputs }))
    }

    fn fp8(rows: usize, cols: usize, tile: (usize, usize), inputs: Inputs) -> Weight {
        let values: Vec<u8> = codes(rows * cols).iter().map(|c| if c & 127 == 127 { 0 } else { *c }).collect();
        let scales = (0..rows.div_ceil(tile.0) * cols.div_ceil(tile.1)).map(|n| 0.01 + n as f32 * 1e-3).collect();
        Weight::Fp8(Arc::new(Fp8 { rows, cols, values: Bytes::from(values), scales, tile, inputs }))
    }

    fn product(x: &[f32], rows: usize, weight: &Weight) -> Vec<f32> {
        let mut out = vec![f32::NAN; rows * weight.rows()];
        linear(x, rows, weight, &mut out);
        out
    }

    /// Products of the inputs as they are rounded, in f64.
    #[test]
    fn products_are_those_of_rounded_inputs() {
        let (n, cols) = (37, 100);
        for rows in [1, 3, 70] {
            let x = noise(rows * cols);
            for inputs in INPUTS {
                for weight in [int8(n, cols, inputs), fp8(n, cols, (n, cols), inputs), fp8(n, cols, (16, 32), inputs)] {
                    let w = weight.to_f32();
                    let rounded: Vec<f64> = match (&weight, inputs) {
                        (_, Inputs::Float) => x.iter().map(|x| f64::from(*x)).collect(),
                        (Weight::Int8(_), _) => {
                            let rows = rounding::bytes(&x, cols, inputs).unwrap();
                            let part = |r, s| {
                                let (values, factor) = rows.part(r, s);
                                let value =
                                    move |v: &i8| f64::from(factor.scale) * f64::from(i32::from(*v) - factor.zero);
                                values.iter().map(value).collect::<Vec<_>>()
                            };
                            let rows = &rows;
                            (0..rows.count).flat_map(|r| (0..rows.segments()).flat_map(move |s| part(r, s))).collect()
                        }
                        _ => rounding::floats(&x, cols, inputs).unwrap().into_iter().map(f64::from).collect(),
                    };
                    let out = product(&x, rows, &weight);
                    for (i, &found) in out.iter().enumerate() {
                        let (x, w) = (&rounded[i / n * cols..][..cols], &w[i % n * cols..][..cols]);
                        let terms = || x.iter().zip(w).map(|(x, w)| x * f64::from(*w));
                        let (want, size): (f64, f64) = (terms().sum(), terms().map(f64::abs).sum());
                        let error = (f64::from(found) - want).abs();
                        assert!(error <= 1e-6 * size, "{weight:?}: {found} for {want} at {i} of {rows} rows");
                    }
                }
            }
        }
    }

    #[test]
    fn the_number_of_threads_does_not_show() {
        let (n, cols) = (230, 576);
        for rows in [2, 70] {
            let x = noise(rows * cols);
            for inputs in INPUTS {
                for weight in [int8(n, cols, inputs), fp8(n, cols, (128, 128), inputs)] {
                    let on = |threads| {
                        let pool = ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                        pool.install(|| product(&x, rows, &weight))
                    };
                    assert_eq!(on(1), on(3), "{inputs:?}");
                }
            }
        }
    }

    /// Seconds that this thread has run, so that what else the machine does matters little.
    fn busy() -> f64 {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
        text.split(' ').next().unwrap().parse::<f64>().unwrap() * 1e-9
    }

    /// Prints times: `cargo test --release --lib cpu::linear::tests::speed -- --ignored --nocapture`.
    #[test]
    #[cfg(target_os = "linux")]
    #[ignore = "measures"]
    fn speed() {
        let (n, cols) = (1536, 576);
        let pool = ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let dense = |dtype| {
            let wide = int8(n, cols, Inputs::Float).to_f32();
            let bytes: Vec<u8> = match dtype {
                Dtype::BF16 => wide.iter().flat_map(|w| half::bf16::from_f32(*w).to_le_bytes()).collect(),
                _ => wide.iter().flat_map(|w| w.to_le_bytes()).collect(),
            };
            Weight::Dense(Dense { rows: n, cols, dtype, bytes: Bytes::from(bytes) })
        };
        for rows in [2048, 16, 1] {
            let x = noise(rows * cols);
            let mut first = None;
            for (name, weight) in [
                ("f32", dense(Dtype::F32)),
                ("bf16", dense(Dtype::BF16)),
                ("int8, tokens", int8(n, cols, Inputs::Token)),
                ("int8, asymmetric", int8(n, cols, Inputs::TokenAsymmetric)),
                ("int8, groups of 128", int8(n, cols, Inputs::Group(128))),
                ("int8, floats", int8(n, cols, Inputs::Float)),
                ("fp8, tokens", fp8(n, cols, (1, cols), Inputs::Token)),
                ("fp8, blocks", fp8(n, cols, (128, 128), Inputs::Group(128))),
            ] {
                let mut out = vec![0.0; rows * n];
                // Many times over, for the clock ticks a few hundred times a second.
                let times = (1 << 14) / rows;
                let time = pool.install(|| {
                    let start = busy();
                    (0..times).for_each(|_| linear(&x, rows, &weight, &mut out));
                    (busy() - start) / times as f64
                });
                let first = *first.get_or_insert(time);
                let speed = 2.0 * (rows * n * cols) as f64 / time * 1e-9;
                println!("{rows} rows, {name}: {:.3} ms, {speed:.0} Gop/s, {:.2} x f32", time * 1e3, first / time);
            }
        }
        let (values, mut wide) = (codes(n * cols), vec![0.0; n * cols]);
        let start = busy();
        (0..200).for_each(|_| e4m3::decode_all(&values, 1.0, &mut wide));
        let time = (busy() - start) / 200.0;
        println!("decoding E4M3: {:.1} G/s", (n * cols) as f64 / time * 1e-9);
    }
}
