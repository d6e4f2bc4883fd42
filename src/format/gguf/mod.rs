//! GGUF, the file format of llama.cpp.

pub mod card;
mod fingerprints;
pub mod metadata;
pub mod pretokenizer;
pub mod sentencepiece;
pub mod special;
pub mod tokenizer;
pub mod value;
