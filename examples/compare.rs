//! The perplexities of two models on the built-in held-out text, window by window.
//!
//!     cargo run --release --example compare MODEL OTHER

#![allow(clippy::print_stdout)]

use quantkit::{Corpus, Measurement, Reporter, cpu, locate, open, perplexity};

fn main() -> quantkit::Result<()> {
    let text = Corpus::heldout();
    let how = Measurement::new(&text).windows(4);
    let mut measured = Vec::new();
    for name in std::env::args().skip(1).take(2) {
        let found = locate(&*name, Reporter::silent())?;
        let model = open(&found.dir, cpu(), Reporter::silent())?;
        measured.push((name, perplexity(&model, &how, "score", Reporter::silent())?));
    }
    let [(one, first), (other, second)] = &measured[..] else {
        return Err(quantkit::Error::msg("usage: compare MODEL OTHER"));
    };
    for (name, measured) in [(one, first), (other, second)] {
        println!("{name}: perplexity {:.3}", measured.result.perplexity);
    }
    for (number, (a, b)) in first.windows.iter().zip(&second.windows).enumerate() {
        println!("window {number}: {:+.4} nats per token", (b.nats - a.nats) / a.tokens as f64);
    }
    Ok(())
}
