//! Ceilings hold as well where sums are cut as tensor cores cut them (`tests/cuda_emulator/truncation.h`): some tests again,
//! in processes of their own.

use std::process::Command;

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

fn hold(tests: &[&str], device: &str) {
    if emulator::on_gpu() {
        return;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command.args(tests).arg("--exact").env("QUANTKIT_EMULATOR_MMA", device).output().unwrap();
    let words = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{device}:\n{words}{}", String::from_utf8_lossy(&output.stderr));
    assert!(words.contains(&format!(" {} passed", tests.len())), "{words}");
}

#[test]
fn as_hopper_adds() {
    hold(&TESTS, "hopper");
}

/// One bit less, and half as many products at once.
#[test]
fn as_ampere_adds() {
    hold(&TESTS[..1], "ampere");
}
