//! What a report must reach, from a file or from options.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::format::consumers::{UnknownConsumer, parse};
use crate::num::size;

/// Limits; what is not named is not asked for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Thresholds {
    /// Perplexity over that of the baseline, or without a baseline over that of the reference.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_ppl_increase: Option<Percent>,
    /// Perplexity over that of the reference, whatever the baseline.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_ppl_over_reference: Option<Percent>,
    /// Mean divergence in nats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_kl: Option<f64>,
    /// 99.9th percentile of the divergence, in nats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_kl_p99_9: Option<f64>,
    /// Mean divergence over the baseline's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_kl_increase: Option<Percent>,
    /// Share of positions with the same likeliest token, 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_same_top: Option<f64>,
    /// Accepted draft tokens over drafted ones, 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_acceptance: Option<f64>,
    /// Tokens of a step of speculative decoding.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_acceptance_length: Option<f64>,
    /// Perplexity with a reduced cache over that with the cache's baseline.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_cache_ppl_increase: Option<Percent>,
    /// Share of positions at which a reduced cache leaves the likeliest token as it is, 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_cache_agreement: Option<f64>,
    /// Largest relative output error of a module.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_module_error: Option<f64>,
    /// Stored bits per weight, over all weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_bits: Option<f64>,
    /// Bytes of the artifact's weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_bytes: Option<Bytes>,
    /// Engines that must load the artifact, as `quantkit list` names them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub consumers: Vec<String>,
    /// Whether a warning is as bad as a failure.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub fail_on_warnings: bool,
}

/// Why there are no limits.
#[derive(Debug, Error)]
pub enum ThresholdsError {
    #[error("cannot read the thresholds `{path}`")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("thresholds `{path}`: {why}")]
    Invalid { path: PathBuf, why: String },
    #[error("thresholds: {0}")]
    Range(String),
}

impl Thresholds {
    /// Reads a file of TOML, or of JSON if its name ends so.
    pub fn read(path: &Path) -> Result<Self, ThresholdsError> {
        let text =
            std::fs::read_to_string(path).map_err(|source| ThresholdsError::Read { path: path.into(), source })?;
        let json = path.extension().is_some_and(|end| end.eq_ignore_ascii_case("json"));
        let parsed: Result<Self, String> = match json {
            true => serde_json::from_str(&text).map_err(|e| e.to_string()),
            false => toml::from_str(&text).map_err(|e| e.to_string().trim_end().to_string()),
        };
        let checked = parsed.and_then(|limits| limits.check().map(|()| limits).map_err(|e| e.to_string()));
        checked.map_err(|why| ThresholdsError::Invalid { path: path.into(), why })
    }

    /// Refuses limits that nothing could pass, or nothing miss.
    pub fn check(&self) -> Result<(), ThresholdsError> {
        let shares = [
            ("min_same_top", self.min_same_top),
            ("min_acceptance", self.min_acceptance),
            ("min_cache_agreement", self.min_cache_agreement),
        ];
        for (name, value) in shares {
            if let Some(value) = value.filter(|value| !(0.0..=1.0).contains(value)) {
                return Err(ThresholdsError::Range(format!("`{name}` is {value}, and must be from 0 to 1")));
            }
        }
        let amounts = [
            ("max_kl", self.max_kl),
            ("max_kl_p99_9", self.max_kl_p99_9),
            ("min_acceptance_length", self.min_acceptance_length),
            ("max_module_error", self.max_module_error),
            ("max_bits", self.max_bits),
        ];
        for (name, value) in amounts {
            if let Some(value) = value.filter(|value| !(0.0..=f64::MAX).contains(value)) {
                return Err(ThresholdsError::Range(format!(
                    "`{name}` is {value}, and must be finite and not negative"
                )));
            }
        }
        Ok(())
    }

    /// Names engines as reports do; an error for one that nobody knows.
    pub fn with_known_consumers(mut self) -> Result<Self, UnknownConsumer> {
        for name in &mut self.consumers {
            *name = parse(name)?.name.into();
        }
        Ok(self)
    }

    /// These, and for what they leave open those of `other`.
    pub fn or(self, other: Self) -> Self {
        Self {
            max_ppl_increase: self.max_ppl_increase.or(other.max_ppl_increase),
            max_ppl_over_reference: self.max_ppl_over_reference.or(other.max_ppl_over_reference),
            max_kl: self.max_kl.or(other.max_kl),
            max_kl_p99_9: self.max_kl_p99_9.or(other.max_kl_p99_9),
            max_kl_increase: self.max_kl_increase.or(other.max_kl_increase),
            min_same_top: self.min_same_top.or(other.min_same_top),
            min_acceptance: self.min_acceptance.or(other.min_acceptance),
            min_acceptance_length: self.min_acceptance_length.or(other.min_acceptance_length),
            max_cache_ppl_increase: self.max_cache_ppl_increase.or(other.max_cache_ppl_increase),
            min_cache_agreement: self.min_cache_agreement.or(other.min_cache_agreement),
            max_module_error: self.max_module_error.or(other.max_module_error),
            max_bits: self.max_bits.or(other.max_bits),
            max_bytes: self.max_bytes.or(other.max_bytes),
            consumers: if self.consumers.is_empty() { other.consumers } else { self.consumers },
            fail_on_warnings: self.fail_on_warnings || other.fail_on_warnings,
        }
    }
}

/// A relative change, written as `0.5%`; held as a share.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Percent(pub f64);

impl FromStr for Percent {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // A bare number could be a share as well as a percentage, a hundredfold difference.
        let number = text.trim().strip_suffix('%').ok_or_else(|| format!("write a percentage: `{text}%`"))?;
        match number.trim_end().parse::<f64>() {
            Ok(value) if (0.0..=f64::MAX).contains(&value) => Ok(Self(value / 100.0)),
            _ => Err(format!("`{text}` is no percentage; write for example `0.5%`")),
        }
    }
}

impl TryFrom<String> for Percent {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Percent> for String {
    fn from(percent: Percent) -> Self {
        percent.to_string()
    }
}

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Twelve digits hide what the division by a hundred rounds.
        let value = format!("{:.12}", 100.0 * self.0);
        write!(f, "{}%", value.trim_end_matches('0').trim_end_matches('.'))
    }
}

/// An amount of memory: a number of bytes, or `300MB`, `1.5GiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Amount", into = "u64")]
pub struct Bytes(pub u64);

#[derive(Deserialize)]
#[serde(untagged)]
enum Amount {
    Number(u64),
    Text(String),
}

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bytes = size::parse(text).map(Self);
        bytes.ok_or_else(|| format!("`{}` is no amount of memory; write for example `300MB` or `1.5GiB`", text.trim()))
    }
}

impl TryFrom<Amount> for Bytes {
    type Error = String;

    fn try_from(amount: Amount) -> Result<Self, String> {
        match amount {
            Amount::Number(n) => Ok(Self(n)),
            Amount::Text(text) => text.parse(),
        }
    }
}

impl From<Bytes> for u64 {
    fn from(bytes: Bytes) -> Self {
        bytes.0
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn percentages_say_so() {
        assert_eq!("0.5%".parse(), Ok(Percent(0.005)));
        assert_eq!(" 12 % ".parse(), Ok(Percent(0.12)));
        assert_eq!(Percent(0.005).to_string(), "0.5%");
        assert_eq!(Percent(0.07).to_string(), "7%");
        assert_eq!("0.5".parse::<Percent>().unwrap_err(), "write a percentage: `0.5%`");
        for bad in ["", "%", "-1%", "x%", "inf%", "NaN%"] {
            assert!(bad.parse::<Percent>().is_err(), "{bad}");
        }
    }

    #[test]
    fn amounts() {
        assert_eq!("1.5 GiB".parse(), Ok(Bytes(3 << 29)));
        assert_eq!("300".parse(), Ok(Bytes(300)));
        let wrong = "3 apples".parse::<Bytes>();
        assert!(wrong.is_err_and(|why| why.contains("`3 apples`") && why.contains("300MB")));
    }

    #[test]
    fn files() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            Thresholds::read(&path).map_err(|e| e.to_string())
        };
        let wanted = Thresholds {
            max_ppl_increase: Some(Percent(0.005)),
            max_kl: Some(0.02),
            max_bytes: Some(Bytes(300_000_000)),
            consumers: vec!["vllm-0.33".into()],
            ..Thresholds::default()
        };
        let toml = "max_ppl_increase = \"0.5%\"\nmax_kl = 0.02\nmax_bytes = \"300MB\"\nconsumers = [\"vllm-0.33\"]\n";
        assert_eq!(write("gate.toml", toml), Ok(wanted.clone()));
        let json = serde_json::to_string(&wanted).unwrap();
        assert_eq!(write("gate.json", &json), Ok(wanted.clone()));
        assert_eq!(toml::from_str::<Thresholds>(&toml::to_string(&wanted).unwrap()), Ok(wanted));
        for (text, word) in [
            ("max_kl = \"much\"", "max_kl"),
            ("max_lk = 1", "max_lk"),
            ("max_ppl_increase = 0.5", "max_ppl_increase"),
            ("max_ppl_increase = \"0.5\"", "0.5%"),
            ("min_same_top = 90", "from 0 to 1"),
            ("max_kl = nan", "finite"),
            ("max_kl", "line 1"),
        ] {
            let error = write("gate.toml", text).unwrap_err();
            assert!(error.contains(word) && error.contains("gate.toml"), "{text}: {error}");
        }
        assert!(Thresholds::read(&dir.path().join("none.toml")).unwrap_err().to_string().contains("none.toml"));
    }

    #[test]
    fn engines_are_named_as_in_reports() {
        let of = |name: &str| Thresholds { consumers: vec![name.into()], ..Thresholds::default() };
        let newest = of("vllm").with_known_consumers().unwrap().consumers;
        assert!(newest[0].starts_with("vllm-"), "{newest:?}");
        assert!(of("vlm").with_known_consumers().unwrap_err().to_string().contains("`vlm`"));
    }

    #[test]
    fn options_go_before_the_file() {
        let option = Thresholds { max_kl: Some(0.1), ..Thresholds::default() };
        let file =
            Thresholds { max_kl: Some(0.5), max_bits: Some(5.0), fail_on_warnings: true, ..Thresholds::default() };
        let both = option.or(file);
        assert_eq!((both.max_kl, both.max_bits, both.fail_on_warnings), (Some(0.1), Some(5.0), true));
    }
}
