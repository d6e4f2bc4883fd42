//! Numbers of 32 bits in JSON: as many digits as tell them apart, not those of the same number in 64 bits.

use serde::{Serialize, Serializer};

/// The shortest decimal of an `f32`, as the `f64` that prints so.
fn short(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

/// For `serialize_with`.
pub fn option<S: Serializer>(value: &Option<f32>, serializer: S) -> Result<S::Ok, S::Error> {
    value.map(short).serialize(serializer)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn no_digits_that_mean_nothing() {
        for value in [0.8f32, 0.1, 1.0 / 3.0, f32::MIN_POSITIVE, f32::MAX, -0.0] {
            assert_eq!(short(value) as f32, value);
        }
        let json = serde_json::to_value(short(0.8)).unwrap().to_string();
        assert_eq!(json, "0.8");
    }
}
