//! Arguments, progress, interruption, exit codes.

pub mod args;
pub mod exit;
pub mod interrupt;
mod parse;
pub mod print;
