//! What the pipeline reports while it works, and how it is asked to stop.

use std::path::Path;
use std::sync::Arc;

use thiserror::Error;

/// Receives notes, warnings and progress of a run, and may stop it. Every method does nothing unless it is overridden.
pub trait Observer: Send + Sync {
    /// A line about the work.
    fn note(&self, _text: &str) {}

    /// What the caller should know, even where notes are not shown.
    fn warn(&self, _text: &str) {}

    /// A phase of `total` steps begins, of an unknown number where `total` is 0.
    fn phase(&self, _what: &str, _total: u64) -> Box<dyn Progress> {
        Box::new(Unobserved)
    }

    /// The transfer of a file of `bytes` bytes begins.
    fn transfer(&self, _file: &str, _bytes: u64) -> Box<dyn Progress> {
        Box::new(Unobserved)
    }

    /// From now on there are files to remove or to keep when the work stops early: [`Observer::stops`] is asked between steps.
    fn stoppable(&self) {}

    /// Whether the work is to stop.
    fn stops(&self) -> bool {
        false
    }

    /// Messages that name the path `temporary` mean `name`.
    fn renamed(&self, _temporary: &Path, _name: &Path) {}
}

/// Progress of one phase, which ends when this is dropped.
pub trait Progress {
    /// One step is done, with a line about it.
    fn step(&mut self, message: &str);

    /// `done` of `total` steps are done.
    fn set(&mut self, done: u64, total: u64);
}

/// Shows nothing and never stops the work.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unobserved;

impl Observer for Unobserved {}

impl Progress for Unobserved {
    fn step(&mut self, _message: &str) {}

    fn set(&mut self, _done: u64, _total: u64) {}
}

/// The work was asked to stop.
#[derive(Debug, Error)]
#[error("interrupted")]
pub struct Interrupted;

/// A shared observer.
#[derive(Clone)]
pub struct Reporter(Arc<dyn Observer>);

impl Reporter {
    /// Reports to `observer`.
    pub fn new(observer: impl Observer + 'static) -> Self {
        Self(Arc::new(observer))
    }

    /// Reports to nobody.
    pub fn silent() -> Self {
        Self::new(Unobserved)
    }

    pub(crate) fn note(&self, text: impl AsRef<str>) {
        self.0.note(text.as_ref());
    }

    pub(crate) fn warn(&self, text: impl AsRef<str>) {
        self.0.warn(text.as_ref());
    }

    pub(crate) fn steps(&self, what: &str, total: u64) -> Box<dyn Progress> {
        self.0.phase(what, total)
    }

    pub(crate) fn transfer(&self, file: &str, bytes: u64) -> Box<dyn Progress> {
        self.0.transfer(file, bytes)
    }

    pub(crate) fn stoppable(&self) {
        self.0.stoppable();
    }

    /// An error once the work is to stop.
    pub(crate) fn check(&self) -> Result<(), Interrupted> {
        if self.0.stops() { Err(Interrupted) } else { Ok(()) }
    }

    pub(crate) fn renamed(&self, temporary: &Path, name: &Path) {
        self.0.renamed(temporary, name);
    }
}

impl From<&Reporter> for Reporter {
    fn from(reporter: &Reporter) -> Self {
        reporter.clone()
    }
}
