//! What a run made, for people and for programs.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::modules::Modules;
use super::work::ModuleReport;
use crate::cli::print::bytes;

/// What the run made.
pub struct Summary {
    pub target: PathBuf,
    /// Bytes of the source's tensors.
    pub source: u64,
    /// Bytes of the artifact's tensors.
    pub size: u64,
    pub modules: Modules,
    pub reports: Vec<ModuleReport>,
    /// Input channels that calibration saw only as zero; one that several modules share counts once.
    pub dead_channels: usize,
    /// By phase.
    pub seconds: Value,
}

impl Summary {
    fn fallbacks(&self) -> Vec<&ModuleReport> {
        self.reports.iter().filter(|r| r.method.starts_with("rtn:")).collect()
    }

    /// Stored bits per weight of the quantized linears, scales and zero points included.
    fn effective_bits(&self) -> f64 {
        let (mut bits, mut weights) = (0.0, 0.0);
        for module in &self.modules.modules {
            let Some(scheme) = module.scheme else { continue };
            let groups = scheme.group_size.count(module.cols) * module.rows;
            bits += (module.rows * module.cols * scheme.bits as usize
                + groups * (16 + scheme.bits as usize)
                + module.cols * 32) as f64;
            weights += (module.rows * module.cols) as f64;
        }
        bits / weights
    }

    /// For people, a line each.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = vec![format!(
            "wrote {}: {} (source {}), {:.2} bits per quantized weight",
            self.target.display(),
            bytes(self.size),
            bytes(self.source),
            self.effective_bits()
        )];
        for report in self.fallbacks() {
            lines.push(format!("{}: fell back to rounding ({})", report.module, &report.method[5..]));
        }
        if self.dead_channels > 0 {
            // GPTQ does not keep weights that nothing was seen to depend on.
            let gptq = self.reports.iter().any(|r| r.dead_channels > 0 && r.method == "gptq");
            lines.push(format!(
                "{} input channels were zero throughout calibration{}",
                self.dead_channels,
                if gptq { "; their weights are zero now" } else { "" }
            ));
        }
        lines
    }

    /// For programs.
    pub fn json(&self) -> Value {
        json!({
            "out": self.target,
            "bytes": self.size,
            "source_bytes": self.source,
            "effective_bits": self.effective_bits(),
            "quantized_modules": self.reports.len(),
            "fallbacks": self.fallbacks().iter().map(|r| json!({"module": r.module, "why": &r.method[5..]})).collect::<Vec<_>>(),
            "changed_by_shape": self.modules.notes,
            "dead_channels": self.dead_channels,
            "loss": self.reports.iter().map(|r| r.loss).sum::<f64>(),
            "seconds": self.seconds,
        })
    }
}
