//! Calibration on windows of one's own: here each line of standard input is a text, and the lines that are long enough give
//! one window each.
//!
//!     cargo run --release --example calibration_source OUT < lines.txt

#![allow(clippy::print_stdout)]

use std::io::Read;

use quantkit::calibration::{BosMode, Calibrated, CalibrationRecord, ids_sha256, sha256_bytes};
use quantkit::{CalibrationSource, GroupSize, ModelSource, Quantization, Reporter, Runnable, cpu, locate};

/// Tokens of a window.
const LENGTH: usize = 16;

struct Lines(String);

impl CalibrationSource for Lines {
    fn windows(&self, model: &Runnable, _bos: BosMode) -> quantkit::Result<Calibrated> {
        let tokenizer = model.tokenizer()?;
        let mut windows = Vec::new();
        for line in self.0.lines() {
            let tokens = tokenizer.encode(line)?;
            windows.extend(tokens.get(..LENGTH).map(<[u32]>::to_vec));
        }
        if windows.is_empty() {
            return Err(quantkit::Error::msg(format!("no line of the input has {LENGTH} tokens")));
        }
        let record = CalibrationRecord {
            text: "standard input".into(),
            text_sha256: sha256_bytes(self.0.as_bytes()),
            nsamples: windows.len(),
            seqlen: LENGTH,
            sampling: "lines".into(),
            bos: "none".into(),
            tokens_sha256: ids_sha256(&windows.concat()),
        };
        Ok((windows, record))
    }
}

fn main() -> quantkit::Result<()> {
    let out = std::env::args().nth(1).unwrap_or("demo-lines".into());
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text)?;
    let found = locate(ModelSource::default(), Reporter::silent())?;
    let group_size = GroupSize::new(64).unwrap_or(GroupSize::CHANNEL);
    let job = Quantization::gptq(4, group_size).calibration(Lines(text)).out(out);
    let made = job.run(&found, cpu(), Reporter::silent())?;
    println!("{}: {} linears", made.target.display(), made.reports.len());
    Ok(())
}
