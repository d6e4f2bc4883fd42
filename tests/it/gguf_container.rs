//! GGUF files: written and read back by two readers, damaged in every way there is a name for, and the types that
//! llama-quantize gives tensors.

mod attacks;
mod mutations;
mod raw;
mod round_trip;
mod selection;
mod split;
