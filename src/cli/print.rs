//! The one printer: results to stdout, everything else to stderr; bars on a terminal, plain lines in CI.

use std::cmp::Reverse;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use crate::num::size::bytes;
use crate::pipeline::observer::Progress;

/// How much a command says.
#[derive(Clone, Copy, Debug)]
pub struct Printer {
    quiet: bool,
    json: bool,
    part: Part,
}

/// Whose words they are.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Part {
    /// The command's own.
    Whole,
    /// Those of a step of it, whose results are not the command's.
    Step,
    /// Those of work that only looks ahead.
    Silent,
}

impl Printer {
    /// With `json`, stdout carries one object and nothing else.
    pub fn new(quiet: bool, json: bool) -> Self {
        Self { quiet, json, part: Part::Whole }
    }

    /// For a step of a command: its results go where notes go, and no object is written.
    pub fn step_of(self) -> Self {
        Self { part: Part::Step, ..self }
    }

    /// For work that only looks ahead: nothing is said.
    pub fn silent(self) -> Self {
        Self { quiet: true, part: Part::Silent, ..self }
    }

    /// A line about the work, on stderr.
    pub fn note(&self, text: impl AsRef<str>) {
        if !self.quiet {
            to_stderr(text.as_ref());
        }
    }

    /// A warning, on stderr, quiet or not.
    pub fn warn(&self, text: impl AsRef<str>) {
        if self.part != Part::Silent {
            to_stderr(&named(&format!("warning: {}", text.as_ref())));
        }
    }

    /// The result for people, on stdout; nothing when JSON is asked for.
    pub fn text(&self, text: impl AsRef<str>) -> io::Result<()> {
        match self.part {
            Part::Step => self.note(text),
            Part::Whole if !self.json => writeln!(io::stdout().lock(), "{}", text.as_ref())?,
            Part::Whole | Part::Silent => {}
        }
        Ok(())
    }

    /// The result for programs, on stdout; nothing unless JSON is asked for.
    pub fn object(&self, value: &impl Serialize) -> io::Result<()> {
        if !self.json || self.part != Part::Whole {
            return Ok(());
        }
        let mut out = io::stdout().lock();
        serde_json::to_writer_pretty(&mut out, value)?;
        writeln!(out)
    }

    /// Progress over `total` steps of `what`.
    pub fn steps(&self, what: &str, total: u64) -> Steps {
        self.bar(what, total, "{prefix:>12} {bar:32} {pos}/{len} {eta:>5} {msg}")
    }

    /// Progress of a file of `total` bytes; one line in CI.
    pub fn transfer(&self, file: &str, total: u64) -> Steps {
        let bar = self.bar(file, total, "{prefix} {bar:32} {bytes}/{total_bytes} {bytes_per_sec} {eta:>5}");
        if bar.bar.is_none() {
            self.note(format!("fetching {file} ({})", bytes(total)));
        }
        bar
    }

    fn bar(&self, what: &str, total: u64, template: &str) -> Steps {
        let terminal = io::stderr().is_terminal() && !self.quiet;
        let bar = terminal.then(|| {
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
            // Templates are constants; if one did not parse, the default bar would serve as well.
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style);
            }
            bar.set_prefix(what.to_string());
            bar.enable_steady_tick(Duration::from_millis(250));
            bar
        });
        Steps { printer: *self, what: what.into(), total, done: 0, began: Instant::now(), bar }
    }
}

/// Progress of one phase.
pub struct Steps {
    printer: Printer,
    what: String,
    total: u64,
    done: u64,
    began: Instant,
    bar: Option<ProgressBar>,
}

impl Progress for Steps {
    /// A line each in CI.
    fn step(&mut self, message: &str) {
        self.done += 1;
        match &self.bar {
            Some(bar) => {
                bar.set_message(message.to_string());
                bar.inc(1);
            }
            None => {
                let seconds = self.began.elapsed().as_secs_f64();
                self.printer.note(format!("{} {}/{} {message} ({seconds:.1} s)", self.what, self.done, self.total));
            }
        }
    }

    /// Without a line in CI.
    fn set(&mut self, done: u64, total: u64) {
        if let Some(bar) = &self.bar {
            bar.set_length(total);
            bar.set_position(done);
        }
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Temporary places, and what the user calls what is made there.
static STAND_INS: Mutex<Vec<(String, String)>> = Mutex::new(Vec::new());

/// From now on, errors and warnings say `name` for `temporary`: a folder that is filled under another name, or one that nobody
/// asked for, says nothing to the user.
pub fn report_as(temporary: &Path, name: &Path) {
    let name = name.display().to_string();
    let mut all = STAND_INS.lock().unwrap_or_else(PoisonError::into_inner);
    for place in [Some(temporary.to_path_buf()), temporary.canonicalize().ok()].into_iter().flatten() {
        all.push((place.display().to_string(), name.clone()));
    }
    // A place inside another is looked for first.
    all.sort_by_key(|(place, _)| Reverse(place.len()));
}

/// `text` with temporary places by the names of [`report_as`].
pub fn named(text: &str) -> String {
    let all = STAND_INS.lock().unwrap_or_else(PoisonError::into_inner);
    all.iter().fold(text.into(), |text: String, (place, name)| text.replace(place, name))
}

/// A line on stderr. If nobody listens there, the work goes on all the same.
pub fn to_stderr(line: &str) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}
