//! The kernels in the emulator's checked build, which reports races for shared memory, bad indices and bad alignment: small
//! tests run again in a separate process.

use super::again;
use crate::support::emulator;

/// Few and small products, solutions and passes, which reach every kind of kernel.
const TESTS: [&str; 14] = [
    // gemm, gemv, quant_4.
    "cuda::linear::dense_weights_with_rounded_activations",
    "cuda::linear::products_repeat",
    // int8, eight_bits.
    "cuda::eight_bits::a_nan_stays_one",
    "cuda::eight_bits::recorded_products_are_the_same",
    // ggml_basic, ggml_k, ggml_iq, ggml_panel.
    "cuda::ggml::powers_of_two_may_be_subnormal",
    "cuda::ggml::recorded_products_are_the_same",
    // cache, attention_64, attention_combine.
    "cuda::attention::blocks_move",
    "cuda::attention::extreme_numbers",
    // gather, gptq, sweep, cholesky.
    "cuda::solver::raised_zero_points",
    "cuda::solver::what_is_not_positive_definite_is_damped_or_refused",
    // simt.
    "cuda::linear::calibration_sums",
    // elementwise.
    "cuda::elementwise::magnitudes_of_columns",
    "cuda::elementwise::norms",
    "cuda::elementwise::largest_channels",
];

#[test]
fn no_kernel_races() {
    if !emulator::on_gpu() {
        emulator::build_checked();
        again(&TESTS, ("CHECKED", "1"));
    }
}
