//! Arguments, progress, interruption, exit codes.

pub mod args;
pub mod exit;
pub mod interrupt;
pub mod methods;
mod parse;
pub mod print;
