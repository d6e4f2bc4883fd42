//! Exit codes: 0 done, 1 a check failed, 2 usage or bad input, 3 internal or device, 130 interrupted.

use std::process::ExitCode;

use crate::cli::print::{named, to_stderr};
pub use crate::pipeline::failure::CheckFailed;
use crate::pipeline::failure::{Category, category};

/// The exit code of work that did not pass a check.
pub const CHECK_FAILED: u8 = 1;

/// The exit code of a device or a program that failed.
pub const DEVICE: u8 = 3;

/// The exit code of work that the user stopped.
pub const INTERRUPTED: u8 = 130;

/// The exit code of an error.
pub fn code(error: &anyhow::Error) -> u8 {
    match category(error) {
        Category::CheckFailed => CHECK_FAILED,
        Category::Input => 2,
        Category::Device => DEVICE,
        Category::Interrupted => INTERRUPTED,
    }
}

/// Reports an error on stderr, the whole chain in one line.
pub fn report(error: &anyhow::Error) -> ExitCode {
    let code = code(error);
    // A closed pipe is how a reader says that it has seen enough.
    if error
        .chain()
        .any(|e| e.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe))
    {
        return ExitCode::SUCCESS;
    }
    if code == INTERRUPTED {
        to_stderr("stopped: interrupted");
        return ExitCode::from(code);
    }
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        // Transparent wrappers say what their cause says.
        if !text.ends_with(&cause) {
            text = if text.is_empty() { cause } else { format!("{text}: {cause}") };
        }
    }
    to_stderr(&named(&format!("error: {text}")));
    ExitCode::from(code)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::DeviceError;
    use crate::engine::generate::GenerateError;
    use crate::model::ModelError;

    #[test]
    fn causes_decide() {
        let device = || DeviceError { device: "gpu".into(), why: "lost".into() };
        assert_eq!(code(&GenerateError::from(ModelError::Device(device())).into()), 3);
        assert_eq!(code(&GenerateError::from(ModelError::NonFinite { path: "x".into() }).into()), 1);
        assert_eq!(code(&GenerateError::EmptyPrompt.into()), 2);
    }
}
