//! Amounts of memory, as people read and write them: kB, MB, GB and TB are powers of 1000, KiB to TiB of 1024.

const UNITS: [(&str, f64); 14] = [
    ("", 1.0),
    ("b", 1.0),
    ("k", 1e3),
    ("kb", 1e3),
    ("m", 1e6),
    ("mb", 1e6),
    ("g", 1e9),
    ("gb", 1e9),
    ("t", 1e12),
    ("tb", 1e12),
    ("kib", 1024.0),
    ("mib", 1048576.0),
    ("gib", 1073741824.0),
    ("tib", 1099511627776.0),
];

/// Beyond this no f64 counts bytes, and no machine has them.
const MOST: f64 = 9e15;

/// Bytes from a number and its unit, in either case: `300MB`, `1.5 GiB`; a bare number is one of bytes.
pub fn parse(text: &str) -> Option<u64> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let unit = unit.trim_start().to_ascii_lowercase();
    let (_, size) = UNITS.iter().find(|(name, _)| *name == unit)?;
    let bytes = number.parse::<f64>().ok()? * size;
    (bytes <= MOST).then(|| bytes.round() as u64)
}

/// Bytes in the unit that reads best.
pub fn bytes(n: u64) -> String {
    shown(n as f64)
}

/// The same of what need not be whole: means, differences.
pub fn shown(n: f64) -> String {
    match n {
        n if !n.is_finite() => "not finite".into(),
        n if n.abs() >= 1e9 => format!("{:.2} GB", n / 1e9),
        n if n.abs() >= 1e6 => format!("{:.1} MB", n / 1e6),
        n if n.abs() >= 1e3 => format!("{:.1} kB", n / 1e3),
        n => format!("{n:.0} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every spelling that an option or a file of limits ever took.
    #[test]
    fn spellings() {
        for (text, wanted) in [
            ("300", 300),
            ("0", 0),
            ("300MB", 300_000_000),
            ("1.5 GiB", 3 << 29),
            ("1.5 gib", 3 << 29),
            ("2k", 2000),
            ("2kB", 2000),
            ("3m", 3_000_000),
            ("4 G", 4_000_000_000),
            ("40GiB", 40 << 30),
            ("512MiB", 512 << 20),
            ("8KiB", 8 << 10),
            ("2TB", 2_000_000_000_000),
            ("1tib", 1 << 40),
            (" 7b ", 7),
        ] {
            assert_eq!(parse(text), Some(wanted), "{text}");
        }
        for text in ["", "MB", "3 apples", "-1", "1e9GB", "1.2.3", "40 Gi", "1e99GB", "nanGB", "99999999TB", ".", "٣MB"]
        {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn what_is_read_comes_back() {
        let all = [0u64, 999, 1000, 98_200_000, 1_500_000_000].map(bytes);
        assert_eq!(all, ["0 B", "999 B", "1.0 kB", "98.2 MB", "1.50 GB"]);
        assert_eq!([shown(-2500.0), shown(f64::NAN), shown(12.4)], ["-2.5 kB", "not finite", "12 B"]);
        assert!(all.iter().all(|text| parse(text).is_some()));
    }
}
