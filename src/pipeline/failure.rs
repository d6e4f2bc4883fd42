//! Kinds of failures, which decide what a caller does about them.

use std::fmt;

use super::observer::Interrupted;
use crate::backend::DeviceError;
use crate::evaluate::perplexity::PerplexityError;
use crate::model::ModelError;

/// The work was done, and what it made did not pass.
#[derive(Debug)]
pub struct CheckFailed(pub String);

impl fmt::Display for CheckFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for CheckFailed {}

/// What kind of failure an error is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Category {
    /// What was made or measured did not pass a check.
    CheckFailed,
    /// The input or an option cannot be used.
    Input,
    /// A device failed.
    Device,
    /// The work was asked to stop.
    Interrupted,
}

/// The category of an error, from whatever in its chain decides it.
pub fn category(error: &anyhow::Error) -> Category {
    let decided = error.chain().find_map(|cause| {
        if cause.is::<Interrupted>() {
            Some(Category::Interrupted)
        } else if cause.is::<CheckFailed>()
            || matches!(cause.downcast_ref(), Some(ModelError::NonFinite { .. }))
            || matches!(cause.downcast_ref(), Some(PerplexityError::NonFinite { .. }))
        {
            Some(Category::CheckFailed)
        } else if cause.is::<DeviceError>() || matches!(cause.downcast_ref(), Some(ModelError::Device(_))) {
            Some(Category::Device)
        } else {
            None
        }
    });
    decided.unwrap_or(Category::Input)
}
