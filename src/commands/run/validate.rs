//! What is measured of an artifact.

use std::path::Path;

use anyhow::{Result, anyhow, bail};
use clap::Parser;

use super::super::validate;
use super::recipe::{Source, Validate};
use crate::cli::args::{Cli, Command, DeviceArg};
use crate::cli::print::Printer;
use crate::cli::validation::ValidateArgs;
use crate::report::Report;

/// An artifact to be measured.
pub struct Job<'a> {
    pub name: &'a str,
    pub method: &'a str,
    pub artifact: &'a Path,
    pub source: &'a Source,
    pub how: &'a Validate,
    pub device: &'a DeviceArg,
}

/// Measures an artifact. The one place where a recipe's validation is done.
pub fn validate_step(job: &Job, printer: Printer) -> Result<Report> {
    let mut report = validate::report(&job.arguments()?, printer)?;
    report.artifact.name = job.name.into();
    report.artifact.method.get_or_insert_with(|| job.method.into());
    Ok(report)
}

impl Job<'_> {
    /// The measurement as its own command would be asked for it.
    fn arguments(&self) -> Result<ValidateArgs> {
        let mut argv: Vec<String> = ["quantkit", "validate"].map(Into::into).into();
        let mut add = |option: &str, value: Option<String>| {
            argv.extend(value.map(|value| format!("--{option}={value}")));
        };
        add("reference", self.source.model.clone());
        add("reference-revision", self.source.model.as_ref().and(self.source.revision.clone()));
        for text in &self.how.texts {
            add("text", Some(text.to_string_lossy().into_owned()));
        }
        add("convention", self.how.convention.clone());
        add("window", self.how.window.map(|n| n.to_string()));
        add("max-windows", self.how.windows.map(|n| n.to_string()));
        add("bos", self.how.bos.clone());
        add("draft", self.how.draft.clone());
        for part in &self.how.skip {
            add("skip", Some(part.clone()));
        }
        add("device", Some(self.device.to_string()));
        argv.extend(["--".to_string(), self.artifact.to_string_lossy().into_owned()]);
        match Cli::try_parse_from(&argv) {
            Ok(Cli { command: Command::Validate(args), .. }) => Ok(args),
            Ok(_) => bail!("`validate` is another command"),
            Err(error) => {
                let text = error.to_string();
                let first = text.strip_prefix("error: ").unwrap_or(&text).lines().next().unwrap_or_default();
                Err(anyhow!("[validate]: {first}"))
            }
        }
    }

    /// Refuses settings that no command takes.
    pub fn check(&self) -> Result<()> {
        self.arguments().map(drop)
    }
}
