//! Values of options, from text, and the types of those that only the command line has.

use std::fmt;

use crate::evaluate::windows::Convention;
use crate::format::gguf::file_type::FileType;
use crate::model::tokenizer::BosMode;
use crate::num::ggml::GgmlType;
use crate::num::size;

/// Where to compute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceArg {
    Auto,
    Cpu,
    AllCuda,
    /// Ordinals of CUDA devices.
    Cuda(Vec<usize>),
}

impl fmt::Display for DeviceArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceArg::Auto => f.write_str("auto"),
            DeviceArg::Cpu => f.write_str("cpu"),
            DeviceArg::AllCuda => f.write_str("cuda"),
            DeviceArg::Cuda(all) => {
                let all: Vec<String> = all.iter().map(usize::to_string).collect();
                write!(f, "cuda:{}", all.join(","))
            }
        }
    }
}

/// What of the memory is not for weights and cache.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reserve {
    Bytes(u64),
    /// From 0 up to, but not including, 1.
    Share(f64),
}

impl Reserve {
    pub fn of(self, memory: u64) -> u64 {
        match self {
            Reserve::Bytes(bytes) => bytes.min(memory),
            Reserve::Share(share) => (memory as f64 * share).round() as u64,
        }
    }
}

pub fn parse_file_type(text: &str) -> Result<FileType, String> {
    let known = || FileType::all().map(FileType::name).collect::<Vec<_>>().join(", ");
    FileType::parse(text).ok_or_else(|| format!("known are {}", known()))
}

pub fn parse_ggml_type(text: &str) -> Result<GgmlType, String> {
    GgmlType::parse(text).ok_or_else(|| format!("known are {}", GgmlType::ALL.map(GgmlType::name).join(", ")))
}

pub fn parse_device(text: &str) -> Result<DeviceArg, String> {
    let known = || "known are auto, cpu, cuda, cuda:N, cuda:N,M".to_string();
    match text {
        "auto" => Ok(DeviceArg::Auto),
        "cpu" => Ok(DeviceArg::Cpu),
        "cuda" => Ok(DeviceArg::AllCuda),
        _ => {
            let list = text.strip_prefix("cuda:").ok_or_else(known)?;
            let ordinals: Vec<usize> =
                list.split(',').map(|n| n.parse().map_err(|_| known())).collect::<Result<_, _>>()?;
            match ordinals.iter().enumerate().find(|(i, n)| ordinals[..*i].contains(n)) {
                Some((_, twice)) => Err(format!("device {twice} is named twice")),
                None => Ok(DeviceArg::Cuda(ordinals)),
            }
        }
    }
}

pub fn parse_bits(text: &str) -> Result<u8, String> {
    match text.parse() {
        Ok(bits @ (2 | 3 | 4 | 8)) => Ok(bits),
        _ => Err("bits are 2, 3, 4 or 8".into()),
    }
}

pub fn parse_group_size(text: &str) -> Result<i32, String> {
    match text.parse() {
        Ok(size) if size == -1 || size > 0 => Ok(size),
        _ => Err("a group size is -1 (one group per output channel) or positive".into()),
    }
}

pub fn parse_count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count) if count > 0 => Ok(count),
        _ => Err("a positive whole number is needed".into()),
    }
}

pub fn parse_share(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(share) if (0.0..1.0).contains(&share) => Ok(share),
        _ => Err("a number from 0 up to, but not including, 1 is needed".into()),
    }
}

pub fn parse_whole_share(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("a number from 0 to 1 is needed".into()),
    }
}

pub fn parse_amount(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(amount) if (0.0..=f64::MAX).contains(&amount) => Ok(amount),
        _ => Err("a number that is not negative is needed".into()),
    }
}

pub fn parse_bos(text: &str) -> Result<BosMode, String> {
    text.parse().map_err(|_| "known are auto, none, window, once".into())
}

pub fn parse_convention(text: &str) -> Result<Convention, String> {
    text.parse().map_err(|_| "known are gptq, llamacpp, lmeval".into())
}

/// A size with its unit. A bare number could be meant in any.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let has_unit = text.trim_end().ends_with(|c: char| c.is_ascii_alphabetic());
    match size::parse(text).filter(|bytes| has_unit && *bytes > 0) {
        Some(bytes) => Ok(bytes),
        None => Err("a size with its unit is needed, such as 40GiB (2^30 bytes) or 24GB (10^9)".into()),
    }
}

pub fn parse_reserve(text: &str) -> Result<Reserve, String> {
    match text.strip_suffix('%').map(|share| share.trim().parse::<f64>()) {
        Some(Ok(percent)) if (0.0..100.0).contains(&percent) => Ok(Reserve::Share(percent / 100.0)),
        Some(_) => Err("a share from 0% up to, but not including, 100% is needed".into()),
        None => parse_bytes(text).map(Reserve::Bytes).map_err(|why| format!("{why}, or a share such as 10%")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [
            ("40GiB", 40 << 30),
            ("24GB", 24_000_000_000),
            ("1.5 gib", 3 << 29),
            ("512MiB", 512 << 20),
            ("7b", 7),
            ("2kB", 2000),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["40", "GiB", "-1GB", "40 Gi", "1e99GB", "nanGB", "0GB", ""] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
        assert_eq!(parse_reserve("12.5%"), Ok(Reserve::Share(0.125)));
        assert_eq!(parse_reserve("2GiB"), Ok(Reserve::Bytes(2 << 30)));
        assert!(parse_reserve("100%").is_err() && parse_reserve("-1%").is_err() && parse_reserve("x%").is_err());
        assert_eq!(Reserve::Bytes(5).of(3), 3);
        assert_eq!(Reserve::Share(0.1).of(1000), 100);
    }
}
