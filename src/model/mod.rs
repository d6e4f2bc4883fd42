//! Architectures as data, block mathematics over a backend, tokenizer, chat template.

pub mod chat;
pub mod source;
pub mod tokenizer;
