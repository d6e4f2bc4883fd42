//! A linear of any artifact (safetensors or GGUF, in any quantization) as a matrix of ndarray.
//!
//!     cargo run --release --example read_weights MODEL

#![allow(clippy::print_stdout)]

use quantkit::{ModelSource, Reporter, cpu, locate, open};

fn main() -> quantkit::Result<()> {
    let name = std::env::args().nth(1);
    let found = locate(ModelSource { model: name.as_deref(), revision: None }, Reporter::silent())?;
    let model = open(&found.dir, cpu(), Reporter::silent())?.model;
    for linear in model.blocks.iter().flat_map(|block| block.all_linears()) {
        let weight = linear.weight.weight().to_array();
        let mean = weight.mean().unwrap_or_default();
        println!(
            "{}: {} x {}, mean {mean:+.2e}, deviation {:.2e}",
            linear.path,
            linear.rows,
            linear.cols,
            weight.std(0.0)
        );
    }
    Ok(())
}
