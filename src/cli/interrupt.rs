//! Ctrl-C: a flag that long work looks at between steps.

use std::sync::atomic::{AtomicBool, Ordering};

use super::print::to_stderr;
use crate::pipeline::observer::Interrupted;

static ASKED: AtomicBool = AtomicBool::new(false);

/// Starts listening to SIGINT and SIGTERM: once there is something to tidy up, and steps that [`check`]. Until
/// then they end the process at once, as the second one does afterwards. Further calls change nothing.
#[allow(clippy::exit)]
pub fn listen() {
    let handler = || {
        if ASKED.swap(true, Ordering::SeqCst) {
            std::process::exit(130);
        }
        to_stderr("stopping after the step at hand; once more stops at once");
    };
    // Without a handler Ctrl-C still ends the process; it is only less tidy.
    let _ = ctrlc::set_handler(handler);
}

/// An error once the user has asked to stop.
pub fn check() -> Result<(), Interrupted> {
    if ASKED.load(Ordering::SeqCst) { Err(Interrupted) } else { Ok(()) }
}
