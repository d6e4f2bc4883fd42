//! One result type, many forms.
//!
//! A [`Report`] says what an artifact is and how far it is from the model that it was made from. Sections that were not
//! measured are absent, so a partial run gives a report as well.
//!
//! Numbers that are not finite are `null` in JSON, where JSON has no other word for them, and come back as NaN: what is
//! absent was not measured, what is `null` was measured and is broken. Times and speeds apart, nothing in a report
//! depends on the clock or the place, so equal runs give equal reports.

pub mod charts;
pub mod content;
pub mod gate;
pub mod history;
pub mod html;
pub mod junit;
pub mod markdown;
pub mod number;
pub mod plots;
mod read;
pub mod schema;
pub mod sections;
pub mod table;
pub mod terminal;
pub mod thresholds;

use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::format::output::{OutputError, write_atomic};
use crate::integrity::{Check, Status};

pub use read::ReportError;
pub use sections::{
    Acceptance, Accounting, Bins, CacheFigures, CacheMemory, CacheSection, CalibrationTokens, ConsumerVerdict, Control,
    DivergenceOn, Exception, Identity, ModuleError, PerplexityOn, Role, ScaleSource, Share, Speedup, TokensSeen,
    WindowedCorpus,
};

/// The schema's name and major version. Fields may be added under one major version; none changes its meaning.
pub const SCHEMA: &str = "quantkit-report/1";

/// What a validation found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Report {
    /// `quantkit-report/1`
    pub schema: String,
    /// Program and version, such as `quantkit 0.1.0`.
    pub tool: String,
    /// What to call this run in a history: a label that was given, or a commit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// What was measured.
    pub artifact: Identity,
    /// The model that it was made from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<Identity>,
    /// The draft model of speculative decoding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<Identity>,
    /// Where the models ran, such as `cpu` or the name of a GPU.
    pub device: String,
    /// Wall time of all measurements, in seconds.
    pub seconds: f64,
    /// Where every tensor of the source went, and what the result occupies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accounting: Option<Accounting>,
    /// Perplexities, one entry a text.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub perplexity: Vec<PerplexityOn>,
    /// Divergence from the reference, one entry a text.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub divergence: Vec<DivergenceOn>,
    /// The text that the modules were measured on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub module_corpus: Option<WindowedCorpus>,
    /// Errors of single modules, in the model's order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub modules: Vec<ModuleError>,
    /// Errors of reduced key-value caches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<CacheSection>,
    /// Speculative decoding, one entry a pair of models.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub acceptance: Vec<Acceptance>,
    /// What was looked at and passed, or did not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub checks: Vec<Check>,
    /// Which engines load the artifact.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub consumers: Vec<ConsumerVerdict>,
    /// What the method learned from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<CalibrationTokens>,
}

impl Report {
    /// A report without sections.
    pub fn new(artifact: Identity, device: impl Into<String>) -> Self {
        Self {
            schema: SCHEMA.into(),
            tool: format!("quantkit {}", env!("CARGO_PKG_VERSION")),
            label: None,
            artifact,
            reference: None,
            draft: None,
            device: device.into(),
            seconds: 0.0,
            accounting: None,
            perplexity: Vec::new(),
            divergence: Vec::new(),
            module_corpus: None,
            modules: Vec::new(),
            cache: None,
            acceptance: Vec::new(),
            checks: Vec::new(),
            consumers: Vec::new(),
            calibration: None,
        }
    }

    /// Reads `report.json`.
    pub fn read(path: &Path) -> Result<Self, ReportError> {
        read::file(path)
    }

    /// Reads the text of a report; `path` is for messages.
    pub fn parse(text: &[u8], path: &Path) -> Result<Self, ReportError> {
        read::text(text, path)
    }

    /// The text of `report.json`.
    pub fn to_json(&self) -> Result<Vec<u8>, ReportError> {
        let mut text = serde_json::to_vec_pretty(self).map_err(ReportError::Json)?;
        text.push(b'\n');
        Ok(text)
    }

    /// The worst status of all checks; `None` without checks.
    pub fn status(&self) -> Option<Status> {
        self.checks.iter().map(|check| check.status).max()
    }
}

/// The files that a report is written to.
pub const FORMS: [&str; 4] = ["report.json", "report.md", "report.html", "junit.xml"];

/// Writes `report.json`, `report.md`, `report.html` and `junit.xml` into `dir`, which is made if need be, each whole or
/// not at all.
pub fn write_judged(report: &Report, verdict: &gate::Verdict, dir: &Path) -> Result<Vec<PathBuf>, ReportError> {
    // All forms before any file: one that fails leaves no half of a report.
    let forms = [
        report.to_json()?,
        markdown::write(report, verdict).into_bytes(),
        html::write(report, verdict)?.into_bytes(),
        junit::write(report, verdict)?.into_bytes(),
    ];
    let io = |source| ReportError::Write(OutputError::Io { path: dir.into(), source });
    std::fs::create_dir_all(dir).map_err(io)?;
    let mut written = Vec::new();
    for (name, text) in FORMS.into_iter().zip(forms) {
        let path = dir.join(name);
        write_atomic(&path, &text)?;
        written.push(path);
    }
    Ok(written)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::{Rng, SeedableRng};
    use serde_json::{Value, json};

    use super::*;

    /// Puts odd values into the leaves of `value`, one in `rarity`.
    fn spoil(value: &mut Value, random: &mut ChaCha8Rng, rarity: u32) {
        match value {
            Value::Array(all) if random.next_u32().is_multiple_of(8 * rarity) => {
                all.truncate(random.next_u32() as usize % (all.len() + 1));
            }
            Value::Array(all) => all.iter_mut().for_each(|value| spoil(value, random, rarity)),
            Value::Object(map) => map.values_mut().for_each(|value| spoil(value, random, rarity)),
            _ if !random.next_u32().is_multiple_of(rarity) => {}
            Value::Number(number) => {
                let odd = [json!(0), json!(1), json!(u64::MAX), json!(1u64 << 40)];
                let broken =
                    [json!(null), json!(-1), json!(1e308), json!(-1e308), json!(5e-324), json!(0.0), json!(1e19)];
                let n = random.next_u32() as usize;
                *value = if number.is_f64() { broken[n % broken.len()].clone() } else { odd[n % odd.len()].clone() };
            }
            Value::String(text) if text.len() > 12 => {
                *text = ["", "<&\"'>", "\u{0}\n|"][random.next_u32() as usize % 3].into()
            }
            _ => {}
        }
    }

    /// Reports come from elsewhere: whatever can be read can be judged and shown.
    #[test]
    fn odd_reports_are_shown_all_the_same() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/report/report.json");
        let sample: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let whole = Report::read(&path).unwrap();
        let all = thresholds::Thresholds {
            max_kl_increase: Some(thresholds::Percent(0.1)),
            max_ppl_increase: Some(thresholds::Percent(0.1)),
            ..Default::default()
        };
        let (mut random, mut read) = (ChaCha8Rng::seed_from_u64(6), 0);
        for round in 0..60 {
            let mut value = sample.clone();
            spoil(&mut value, &mut random, [10, 100, 1000][round % 3]);
            value["schema"] = json!(SCHEMA);
            let Ok(report) = Report::parse(value.to_string().as_bytes(), &path) else { continue };
            read += 1;
            for (now, before) in [(&report, &whole), (&whole, &report), (&report, &report)] {
                let verdict = gate::judge(now, Some(before), &all);
                html::write(now, &verdict).unwrap();
                junit::write(now, &verdict).unwrap();
                markdown::write(now, &verdict);
                terminal::summary(now, Some(&verdict));
            }
            let history = history::History::of(&[("a.json".into(), whole.clone()), ("b.json".into(), report)]);
            history.html().unwrap();
            history.text();
        }
        assert!(read > 20, "only {read} of 60 could be read");
    }
}
