//! How long a step will take: from what earlier steps took, or else by a rule of thumb that says that it is one.

use serde::Serialize;

use super::record::Record;
use crate::pipeline::quantize::Effort;

/// Seconds, and how they were come by.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// `None` where there is nothing to go by.
    pub seconds: Option<f64>,
    pub basis: String,
}

/// What a core does, to the order of magnitude: multiplications and additions of calibration in f32, and weights
/// rounded with a search of the scale.
const FLOPS: f64 = 1e10;
const WEIGHTS: f64 = 2e6;

/// The time of a step of `method` on a device of the kind `device`.
pub fn estimate(
    name: &str,
    method: &str,
    effort: Effort,
    device: &str,
    threads: usize,
    earlier: &[(String, Record)],
) -> Estimate {
    let fits = |record: &&(String, Record)| {
        record.1.inputs.method == method && record.1.device == device && record.1.seconds > 0.0
    };
    let own = earlier.iter().filter(fits).find(|(other, _)| other == name);
    if let Some((other, record)) = own.or_else(|| earlier.iter().find(fits)) {
        // Both grow with the model; calibration outweighs rounding where there is any.
        let ratio = match record.flops > 0.0 && effort.flops > 0.0 {
            true => Some(effort.flops / record.flops),
            false if record.flops == effort.flops && record.weights > 0 => {
                Some(effort.weights as f64 / record.weights as f64)
            }
            false => None,
        };
        if let Some(ratio) = ratio {
            let basis = format!("`{other}` took {}", spoken(record.seconds));
            return Estimate { seconds: Some(record.seconds * ratio), basis };
        }
    }
    if device != "cpu" {
        return Estimate { seconds: None, basis: format!("nothing measured yet on {device}") };
    }
    let seconds = (effort.flops / FLOPS + effort.weights as f64 / WEIGHTS) / threads.max(1) as f64;
    let basis = format!(
        "rule of thumb, nothing measured yet: {:.0} GFLOP/s and {:.0} million weights/s a thread, {threads} threads",
        FLOPS / 1e9,
        WEIGHTS / 1e6
    );
    Estimate { seconds: Some(seconds), basis }
}

/// A time in words, no finer than an estimate is.
pub fn spoken(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => "less than 1 s".into(),
        s if s < 100.0 => format!("{s:.0} s"),
        s if s < 100.0 * 60.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.0} h", s / 3600.0),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::record::Inputs;
    use super::*;

    fn record(method: &str, device: &str, seconds: f64, flops: f64) -> Record {
        let inputs = Inputs {
            tool: String::new(),
            method: method.into(),
            options: Default::default(),
            files: Default::default(),
            source: vec![],
        };
        Record {
            key: String::new(),
            inputs,
            outputs: vec![],
            seconds,
            device: device.into(),
            weights: 1000,
            flops,
            validation: None,
        }
    }

    #[test]
    fn what_was_measured_goes_first() {
        let earlier = vec![
            ("a".to_string(), record("gptq", "cpu", 10.0, 1e9)),
            ("b".to_string(), record("gptq", "cpu", 50.0, 1e9)),
            ("c".to_string(), record("rtn", "cpu", 4.0, 0.0)),
        ];
        let of = |name: &str, method: &str, flops: f64, device: &str| {
            estimate(name, method, Effort { weights: 2000, flops }, device, 2, &earlier)
        };
        assert_eq!(of("b", "gptq", 2e9, "cpu").seconds, Some(100.0));
        assert_eq!(of("z", "gptq", 3e9, "cpu").seconds, Some(30.0));
        assert_eq!(of("z", "rtn", 0.0, "cpu").seconds, Some(8.0));
        // Rounding alone tells nothing of calibration.
        let thumb = of("c", "rtn", 2e10, "cpu");
        assert!(thumb.basis.starts_with("rule of thumb"), "{thumb:?}");
        assert!((thumb.seconds.unwrap() - 1.0005).abs() < 1e-9, "{thumb:?}");
        assert_eq!(of("a", "gptq", 1e9, "cuda").seconds, None);
    }

    #[test]
    fn words_are_no_finer_than_estimates() {
        let all = [0.2, 7.4, 150.0, 8000.0].map(spoken);
        assert_eq!(all, ["less than 1 s", "7 s", "2 min", "2 h"]);
    }
}
