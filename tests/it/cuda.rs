//! The CUDA backend against the CPU's, on the emulated driver or, with `QUANTKIT_TEST_GPU=1`, on a real one.

mod attention;
mod cache;
mod calibration;
mod commands;
mod eight_bits;
mod elementwise;
mod few_rows;
mod ggml;
pub mod graphs;
mod linear;
mod model;
mod races;
mod rounding;
mod solver;

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use quantkit::backend::cuda::{Cuda, CudaOptions};

use crate::support::command::{Ran, command};
use crate::support::emulator;
use crate::support::scene::Scene;

/// A backend on the first device, or on those named.
fn cuda(options: CudaOptions) -> Arc<Cuda> {
    emulator::preload();
    Arc::new(Cuda::open(options).unwrap())
}

/// `quantkit ARGS` with a CUDA driver, and cuBLAS or not. `settings` are variables for the emulator.
pub fn run(scene: &Scene, args: &[&str], cublas: bool, settings: &[(&str, &str)]) -> Ran {
    let mut command = command(scene.root(), args);
    command.env("QUANTKIT_DEVICE", "auto").timeout(Duration::from_secs(600)).envs(settings.iter().copied());
    if !emulator::on_gpu() {
        command.env("LD_LIBRARY_PATH", emulator::library_path(cublas));
    }
    Ran::new(command.output().unwrap(), args)
}

/// Runs tests again in a separate process, in which the emulator has a setting. A process that hangs fails.
fn again(tests: &[&str], (name, value): (&str, &str)) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(tests).arg("--exact").env(format!("QUANTKIT_EMULATOR_{name}"), value);
    let output = assert_cmd::Command::from_std(command).timeout(Duration::from_secs(1200)).output().unwrap();
    let words = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{name} {value}:\n{words}{}", String::from_utf8_lossy(&output.stderr));
    assert!(words.contains(&format!(" {} passed", tests.len())), "{words}");
}

/// Numbers between -1 and 1 that look random.
fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}
