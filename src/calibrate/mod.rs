//! Corpus to token windows, and the block-by-block driver.

pub mod cache;
pub mod corpus;
pub mod driver;
pub mod text;
