//! Arguments, progress, interruption, exit codes.

pub mod args;
pub mod environment;
pub mod exit;
pub mod gguf;
pub mod interrupt;
pub mod methods;
mod observer;
pub mod options;
pub mod parse;
pub mod planning;
pub mod print;
pub mod report;
pub mod serving;
pub mod spec;
pub mod validation;
