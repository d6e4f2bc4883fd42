//! Arguments, settings, progress, exit codes.
