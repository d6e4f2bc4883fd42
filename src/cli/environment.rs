//! Environment variables. One that is set to nothing counts as unset: that is how shells, CI systems and container files
//! spell "not set". `CUDA_VISIBLE_DEVICES` is the CUDA driver's alone, for which nothing means no device.

use std::ffi::OsString;
use std::path::Path;

/// The value of a variable that is set to something.
pub fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// The variable that stands in for an option, for clap: none while it is set to nothing, which clap would take for a
/// value.
pub fn stand_in(name: &'static str) -> Option<&'static str> {
    let unset = std::env::var_os(name).is_none();
    (unset || variable(name).is_some()).then_some(name)
}

/// Keeps libraries from reading variables that are set to nothing: temporary files would go to the current folder.
pub fn settle() {
    let empty = std::env::var_os("TMPDIR").is_some_and(|dir| dir.is_empty());
    if cfg!(unix) && empty {
        // It fails if it was done before.
        let _ = tempfile::env::override_temp_dir(Path::new("/tmp"));
    }
}
