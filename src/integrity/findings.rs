//! What was looked at, and how it came out.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How a check came out, from good to bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Could not be looked at, for a reason that is no fault.
    Skipped,
    Pass,
    Warn,
    Fail,
}

impl Status {
    pub fn name(self) -> &'static str {
        match self {
            Self::Skipped => "skipped",
            Self::Pass => "pass",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }
}

/// Something that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Check {
    /// Lasting name, such as `side-files`.
    pub id: String,
    pub status: Status,
    /// What was found; of a failure also what to do.
    pub message: String,
}

/// Findings on their way.
#[derive(Debug, Default)]
pub struct Findings(Vec<Check>);

impl Findings {
    pub fn into_checks(self) -> Vec<Check> {
        self.0
    }

    pub fn add(&mut self, id: &str, status: Status, message: impl Into<String>) {
        self.0.push(Check { id: id.into(), status, message: message.into() });
    }

    pub fn warn(&mut self, id: &str, message: impl Into<String>) {
        self.add(id, Status::Warn, message);
    }

    pub fn fail(&mut self, id: &str, message: impl Into<String>) {
        self.add(id, Status::Fail, message);
    }

    /// `message` where nothing was found under `id`.
    pub fn otherwise(&mut self, id: &str, message: impl Into<String>) {
        if !self.0.iter().any(|finding| finding.id == id) {
            self.add(id, Status::Pass, message);
        }
    }

    /// A few of many, so that a file full of damage is told in lines that can be read.
    pub fn fail_each(&mut self, id: &str, messages: Vec<String>) {
        self.each(id, Status::Fail, messages);
    }

    pub fn warn_each(&mut self, id: &str, messages: Vec<String>) {
        self.each(id, Status::Warn, messages);
    }

    fn each(&mut self, id: &str, status: Status, messages: Vec<String>) {
        const SHOWN: usize = 8;
        let more = messages.len().saturating_sub(SHOWN);
        for message in messages.into_iter().take(SHOWN) {
            self.add(id, status, message);
        }
        if more > 0 {
            self.add(id, status, format!("and {more} more of the kind"));
        }
    }
}
