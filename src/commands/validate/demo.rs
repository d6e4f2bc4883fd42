//! An artifact of the built-in demo checkpoint, for those who name none.

use std::ffi::OsStr;

use anyhow::{Context, Result};
use clap::Parser;

use super::super::quantize;
use crate::cli::args::{Cli, DeviceArg};
use crate::cli::print::Printer;
use crate::pipeline::source::{Located, unpacked};

/// How the demo checkpoint is quantized.
const ARGUMENTS: [&str; 7] = ["quantkit", "gptq", "--bits", "4", "--group-size", "128", "--no-eval"];

/// Quantizes the demo checkpoint into a folder that is gone with the result.
pub fn artifact(device: &DeviceArg, printer: Printer) -> Result<Located> {
    printer.note(format!("no artifact given: making one with `{}`", ARGUMENTS[..6].join(" ")));
    let folder =
        tempfile::Builder::new().prefix("quantkit-").tempdir().context("cannot make a folder for the artifact")?;
    let name = "quantkit-demo-gptq-w4g128";
    let out = folder.path().join(name);
    let argv = ARGUMENTS.iter().map(OsStr::new).chain([OsStr::new("--out"), out.as_os_str()]);
    let argv = argv.map(OsStr::to_owned).chain([format!("--device={device}").into()]);
    let command = Cli::try_parse_from(argv)?.command;
    quantize::prepared(&command, printer.silent()).context("`gptq` is another command")??.go()?;
    Ok(unpacked(out, name, folder))
}
