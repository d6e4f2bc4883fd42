//! Scales that mean nothing, in whatever format: they are found by name, before any weight is read.

use super::Findings;
use crate::checkpoint::{Checkpoint, Entry};
use crate::tensor::widened;

/// What scales are called, whatever module they belong to.
const NAMES: [&str; 10] = [
    "scales",
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "input_scale",
    "activation_scale",
    "k_scale",
    "v_scale",
    "q_scale",
    "output_scale",
];

const ID: &str = "scales";

/// Looks at every scale: none is NaN, infinite or zero.
pub fn scan(checkpoint: &Checkpoint, findings: &mut Findings) {
    let is_scale = |name: &str| NAMES.contains(&name.rsplit('.').next().unwrap_or_default());
    let all = checkpoint.tensors().iter().filter(|(name, entry)| entry.dtype.is_float() && is_scale(name));
    let (mut tensors, mut count, mut bad) = (0, 0, Vec::new());
    for (name, entry) in all {
        tensors += 1;
        count += entry.shape.iter().product::<usize>();
        bad.extend(complaint(name, entry));
    }
    findings.fail_each(ID, bad);
    findings.otherwise(
        ID,
        match tensors {
            0 => "there are no tensors of scales".into(),
            _ => format!("{count} scales in {tensors} tensors, all finite, none zero"),
        },
    );
}

fn complaint(name: &str, entry: &Entry) -> Option<String> {
    let values = widened(entry.dtype, &entry.bytes);
    let wrong = |value: &f32| !value.is_finite() || *value == 0.0;
    let at = values.iter().position(wrong)?;
    let count = values.iter().filter(|value| wrong(value)).count();
    Some(format!(
        "`{name}` in `{}`: scale {at} is {}, and {count} of {} are no finite numbers or zero; the weights below them are \
         lost: quantize the module again",
        entry.file,
        values[at],
        values.len()
    ))
}
