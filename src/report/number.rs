//! Numbers as people read them.

use serde::{Deserialize, Serialize};

use crate::num::size::shown;

/// A number with so many significant digits, without an exponent where that is readable.
pub fn significant(value: f64, digits: usize) -> String {
    if !value.is_finite() {
        return "not finite".into();
    }
    if value == 0.0 {
        return "0".into();
    }
    let power = value.abs().log10().floor() as i32;
    if !(-4..7).contains(&power) {
        return format!("{value:.*e}", digits.saturating_sub(1));
    }
    let places = (digits as i32 - 1 - power).max(0) as usize;
    format!("{value:.places$}")
}

/// A share as a percentage: `91.24 %`.
pub fn percent(share: f64, places: usize) -> String {
    if share.is_finite() { format!("{:.places$} %", 100.0 * share) } else { "not finite".into() }
}

/// A change as a percentage with its sign: `+1.87 %`.
pub fn change(share: f64, places: usize) -> String {
    if share.is_finite() { format!("{:+.places$} %", 100.0 * share) } else { "not finite".into() }
}

/// A whole number in groups of three, parted by narrow spaces.
pub fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) && digits.len() > 4 {
            out.push('\u{202f}');
        }
        out.push(digit);
    }
    out
}

/// How much of a thing there is, in which unit, and how that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Perplexities and lengths.
    Plain,
    Nats,
    /// A share of 1, shown in percent.
    Share,
    /// A relative change, shown in percent with its sign.
    Change,
    Bits,
    Bytes,
    /// A relative error.
    Error,
    Seconds,
}

impl Unit {
    pub fn show(self, value: f64) -> String {
        match self {
            Self::Plain => significant(value, 5),
            Self::Nats => format!("{} nats", significant(value, 3)),
            Self::Share => percent(value, 2),
            Self::Change => change(value, 2),
            Self::Bits => significant(value, 4),
            Self::Bytes => shown(value),
            Self::Error => significant(value, 3),
            Self::Seconds => format!("{} s", significant(value, 3)),
        }
    }

    /// A difference of two such values, with its sign.
    pub fn show_difference(self, value: f64) -> String {
        let text = match self {
            Self::Share | Self::Change => return change(value, 2).replace(" %", " points"),
            _ => self.show(value),
        };
        if value > 0.0 { format!("+{text}") } else { text }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        assert_eq!(significant(23.53712, 5), "23.537");
        assert_eq!(significant(0.000123456, 3), "0.000123");
        assert_eq!(significant(1.2e-9, 3), "1.20e-9");
        assert_eq!(significant(-0.5, 2), "-0.50");
        assert_eq!(significant(f64::NAN, 2), "not finite");
        assert_eq!(change(0.01869, 2), "+1.87 %");
        assert_eq!(grouped(1_234_567), "1\u{202f}234\u{202f}567");
        assert_eq!(grouped(1234), "1234");
        assert_eq!(Unit::Nats.show_difference(0.01), "+0.0100 nats");
        assert_eq!(Unit::Share.show_difference(-0.01), "-1.00 points");
    }
}
