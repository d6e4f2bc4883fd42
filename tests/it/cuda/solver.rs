//! GPTQ on the device against the one in quantize.
