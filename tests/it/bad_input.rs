//! What users get wrong, and what fails around them: the message names it, the exit code is 2 (1 where a check
//! of the work failed), and nothing is left behind.

mod calibration;
mod checkpoint;
mod foreign;
mod numbers;
mod options;
mod output;
mod values;

use crate::support::scene::{Scene, tiny_args};

/// `gptq model -o out` with `more` and what else [`TINY`] says.
fn gptq<'a>(more: &[&'a str]) -> Vec<&'a str> {
    tiny_args(&[&["gptq", "model", "-o", "out"], more].concat())
}

/// Both ways into a model refuse it alike.
#[track_caller]
fn unreadable(scene: &Scene, words: &[&str]) {
    scene.refused(&gptq(&[]), words);
    scene.refused(&["eval", "ppl", "model", "--text", "eval.txt"], words);
}
