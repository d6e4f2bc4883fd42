//! `quantkit gguf`.

pub mod feedback;
