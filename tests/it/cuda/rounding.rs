//! Ceilings also hold where sums are cut as tensor cores cut them (`tests/cuda_emulator/truncation.h`): some tests run again
//! in separate processes. `sums_of_one_sign` fails there if sums are rounded to nearest.

use super::again;
use crate::support::emulator;

/// What multiplies on tensor cores, one test of each kind.
const TESTS: [&str; 10] = [
    "cuda::linear::sums_of_one_sign",
    "cuda::linear::dense_weights",
    "cuda::linear::quantized_weights",
    "cuda::ggml::every_type_multiplies_in_planes",
    "cuda::eight_bits::floats_of_eight_bits",
    "cuda::attention::rows",
    "cuda::attention::a_long_row",
    "cuda::attention::caches_of_exact_numbers",
    "cuda::model::logits_of_the_demo_checkpoint",
    "cuda::model::llama",
];

#[test]
fn as_hopper_adds() {
    if !emulator::on_gpu() {
        again(&TESTS, ("MMA", "hopper"));
    }
}

/// One bit less, and half as many products at once.
#[test]
fn as_ampere_adds() {
    if !emulator::on_gpu() {
        again(&TESTS[..1], ("MMA", "ampere"));
    }
}
