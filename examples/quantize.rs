//! A checkpoint, or the built-in demo model, quantized with GPTQ to 4 bits.
//!
//!     cargo run --release --example quantize [MODEL] OUT

#![allow(clippy::print_stdout)]

use quantkit::{GroupSize, ModelSource, Quantization, Reporter, cpu, locate};

fn main() -> quantkit::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (model, out) = match &arguments[..] {
        [out] => (None, out),
        [model, out] => (Some(&**model), out),
        _ => return Err(quantkit::Error::msg("usage: quantize [MODEL] OUT")),
    };
    let found = locate(ModelSource { model, revision: None }, Reporter::silent())?;
    let group_size = GroupSize::new(64).unwrap_or(GroupSize::CHANNEL);
    let made = Quantization::gptq(4, group_size).out(out).run(&found, cpu(), Reporter::silent())?;
    if let Some(measured) = &made.perplexity {
        let (before, after) = (measured.before.result.perplexity, measured.after.result.perplexity);
        println!("{}: perplexity {before:.2} before, {after:.2} after", made.target.display());
    }
    Ok(())
}
