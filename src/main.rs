//! The `quantkit` binary: parse, run, map errors to exit codes.

use std::process::ExitCode;

use clap::Parser;
use quantkit::cli::args::Cli;
use quantkit::cli::{environment, exit};

fn main() -> ExitCode {
    environment::settle();
    let cli = Cli::parse();
    match std::panic::catch_unwind(|| quantkit::commands::execute(cli)) {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) => exit::report(&error),
        // The panic hook has said where; a defect of ours, not of the input.
        Err(_) => ExitCode::from(3),
    }
}
