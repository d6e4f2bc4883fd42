//! The printer as the observer of the pipeline, which Ctrl-C stops.

use std::path::Path;

use super::interrupt;
use super::print::{Printer, report_as};
use crate::pipeline::observer::{Observer, Progress, Reporter};

impl Observer for Printer {
    fn note(&self, text: &str) {
        Printer::note(self, text);
    }

    fn warn(&self, text: &str) {
        Printer::warn(self, text);
    }

    fn phase(&self, what: &str, total: u64) -> Box<dyn Progress> {
        Box::new(self.steps(what, total))
    }

    fn transfer(&self, file: &str, bytes: u64) -> Box<dyn Progress> {
        Box::new(Printer::transfer(self, file, bytes))
    }

    fn stoppable(&self) {
        interrupt::listen();
    }

    fn stops(&self) -> bool {
        interrupt::check().is_err()
    }

    fn renamed(&self, temporary: &Path, name: &Path) {
        report_as(temporary, name);
    }
}

impl From<Printer> for Reporter {
    fn from(printer: Printer) -> Self {
        Reporter::new(printer)
    }
}
