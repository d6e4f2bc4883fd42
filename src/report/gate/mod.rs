//! The gate: a report against limits and against an earlier report.
//!
//! What was measured on a sample has a standard error, and decides with it. A limit is broken for certain, and fails,
//! only if the one-sided 95 % confidence bound of the value lies beyond it; a value beyond its limit whose bound is
//! within it is noise as far as anyone can tell, and warns. What was counted (bytes, bits), and percentiles and maxima,
//! which have no standard error here, fails as soon as it is beyond.
//!
//! - Perplexity over the reference: the logarithm of the ratio, paired token by token by the evaluation.
//! - Perplexity over a baseline: the difference of the windows' negative log-likelihoods, window by window, where both
//!   reports have the same windows; its error is that of a ratio estimate over windows, its bound Student's. Otherwise
//!   the difference of both logarithms of ratios to the common reference, their errors added as squares: too wide where
//!   the errors go together, never too narrow by more than that.
//! - Divergence and acceptance: their own standard errors, added as squares where two reports are compared.
//!
//! Only like is compared with like. Another text, convention, window, number of tokens or reference, and the row is
//! unknown and says what differs; a row that cannot be told and has a limit fails the gate. What only the baseline has is
//! told too.

mod gone;
mod rows;
mod statistics;

use serde::{Deserialize, Serialize};

pub use statistics::{Estimate, Side, paired};

use super::Report;
use super::number::Unit;
use super::table::clean;
use super::thresholds::Thresholds;
use crate::integrity::Status;

/// How a row came out, from good to bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// No limit was asked for.
    Info,
    Pass,
    /// Beyond its limit by less than chance explains, or a check's warning.
    Warn,
    /// Cannot be told.
    Unknown,
    Fail,
}

impl Outcome {
    pub fn name(self) -> &'static str {
        match self {
            Self::Info => "-",
            Self::Pass => "pass",
            Self::Warn => "warn",
            Self::Unknown => "unknown",
            Self::Fail => "fail",
        }
    }
}

/// One line of a verdict.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub what: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub baseline: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub now: Option<f64>,
    /// Of `baseline` and `now`.
    pub unit: Unit,
    /// From the baseline, or where the row says so from the reference, to now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moved: Option<f64>,
    /// Standard error of `moved`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moved_stderr: Option<f64>,
    /// `change` where `moved` is a relative change.
    pub moved_unit: Unit,
    /// The limit in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<String>,
    pub outcome: Outcome,
    /// Why, where the numbers do not say it all.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
}

impl Row {
    fn new(what: impl Into<String>, unit: Unit) -> Self {
        Self {
            what: what.into(),
            baseline: None,
            now: None,
            unit,
            moved: None,
            moved_stderr: None,
            moved_unit: unit,
            limit: None,
            outcome: Outcome::Info,
            note: String::new(),
        }
    }

    fn said(what: impl Into<String>, outcome: Outcome, note: impl Into<String>) -> Self {
        Self { outcome, note: note.into(), ..Self::new(what, Unit::Plain) }
    }

    /// What moved, for people: `+1.87 % ± 0.21`.
    pub fn moved_text(&self) -> String {
        let Some(moved) = self.moved else { return String::new() };
        // A ratio of plain values is a change in percent; between two percentages lie points.
        let text = match (self.moved_unit, self.unit) {
            (Unit::Change, Unit::Change) => self.unit.show_difference(moved),
            (Unit::Change, _) => Unit::Change.show(moved),
            (unit, _) => unit.show_difference(moved),
        };
        let scale = if matches!(self.moved_unit, Unit::Share | Unit::Change) { 100.0 } else { 1.0 };
        match self.moved_stderr.filter(|error| *error > 0.0) {
            Some(error) => format!("{text} ± {}", super::number::significant(error * scale, 2)),
            None => text,
        }
    }
}

/// What a report came to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    pub rows: Vec<Row>,
    /// Whether there was a baseline.
    pub compared: bool,
    /// Whether warnings were to count as failures.
    pub fail_on_warnings: bool,
}

impl Verdict {
    /// Whether the row fails the gate.
    pub fn fails(&self, row: &Row) -> bool {
        match row.outcome {
            Outcome::Fail => true,
            Outcome::Unknown => row.limit.is_some(),
            Outcome::Warn => self.fail_on_warnings,
            Outcome::Pass | Outcome::Info => false,
        }
    }

    /// Whether there is anything to show beside checks: limits or a baseline.
    pub fn decides(&self) -> bool {
        self.compared || self.rows.iter().any(|row| row.limit.is_some())
    }

    pub fn passed(&self) -> bool {
        !self.rows.iter().any(|row| self.fails(row))
    }

    /// The rows that fail, each as `what: why`.
    pub fn failures(&self) -> Vec<String> {
        let why = |row: &Row| {
            let mut parts = Vec::new();
            if let Some(now) = row.now {
                parts.push(row.unit.show(now));
            }
            if row.moved.is_some() {
                parts.push(row.moved_text());
            }
            parts.extend(row.limit.clone());
            parts.extend((!row.note.is_empty()).then(|| row.note.clone()));
            clean(&format!("{}: {}", row.what, parts.join(", ")))
        };
        self.rows.iter().filter(|row| self.fails(row)).map(why).collect()
    }

    pub fn count(&self, outcome: Outcome) -> usize {
        self.rows.iter().filter(|row| row.outcome == outcome).count()
    }
}

/// Holds `report` against the limits, and against `baseline` where there is one. Failed checks and numbers that are not
/// finite fail without a limit.
pub fn judge(report: &Report, baseline: Option<&Report>, limits: &Thresholds) -> Verdict {
    let mut rows = rows::Rows::new(report, baseline, limits);
    rows.perplexity();
    rows.divergence();
    rows.modules();
    rows.cache();
    rows.acceptance();
    rows.size();
    rows.consumers();
    rows.gone();
    rows.checks();
    rows.broken();
    Verdict { rows: rows.done(), compared: baseline.is_some(), fail_on_warnings: limits.fail_on_warnings }
}

impl From<Status> for Outcome {
    fn from(status: Status) -> Self {
        match status {
            Status::Skipped => Self::Info,
            Status::Pass => Self::Pass,
            Status::Warn => Self::Warn,
            Status::Fail => Self::Fail,
        }
    }
}

#[cfg(test)]
mod tests;
