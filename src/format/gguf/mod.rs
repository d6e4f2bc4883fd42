//! GGUF, the file format of llama.cpp: metadata and tensors of one model in one file, or split over several.
//!
//! Versions 2 and 3, little-endian. The format is described with ggml
//! (<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>); where llama.cpp's loader is stricter than the
//! description, so is this room, because a file that it refuses is of no use.

mod card;
mod ends;
pub mod file_type;
mod fingerprints;
pub mod imatrix;
pub mod metadata;
pub mod names;
pub mod parse;
pub mod parts;
pub mod pretokenizer;
pub mod read;
mod readme;
pub mod restore;
pub mod second_reader;
pub mod select;
pub mod sentencepiece;
pub mod source;
mod special;
pub mod tokenizer;
pub mod value;
pub mod write;

/// The first bytes of a file.
pub const MAGIC: [u8; 4] = *b"GGUF";

/// What tensor data are aligned to where a file does not say otherwise; written files never do.
pub const ALIGNMENT: u64 = 32;

/// The key that says otherwise.
pub const ALIGNMENT_KEY: &str = "general.alignment";

/// The longest tensor name: llama.cpp keeps it in 64 bytes with a closing zero.
pub const MAX_NAME: usize = 63;

/// The most dimensions a tensor may have.
pub const MAX_DIMS: usize = 4;

/// The path of part `number` (from 1) of `count`: `PREFIX-00001-of-00003.gguf`.
pub fn part_name(prefix: &str, number: usize, count: usize) -> String {
    format!("{prefix}-{number:05}-of-{count:05}.gguf")
}

/// Takes [`part_name`] apart.
pub fn parse_part_name(name: &str) -> Option<(&str, usize, usize)> {
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (prefix, number) = rest.rsplit_once('-')?;
    let digits = |text: &str| if text.len() == 5 { text.parse().ok() } else { None };
    Some((prefix, digits(number)?, digits(count)?))
}
