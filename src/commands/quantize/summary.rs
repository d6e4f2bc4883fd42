//! What a run made, for people and for programs.

use std::path::PathBuf;

use serde::Serialize;
use serde_json::{Value, json};

use super::modules::Modules;
use super::work::ModuleReport;
use crate::model::presence::Unread;
use crate::num::size::bytes;

/// What scaling did to a block.
#[derive(Clone, Debug, Serialize)]
pub struct BlockScaling {
    pub block: String,
    /// The error that the search measured, in parts of what it was without.
    pub error_ratio: Option<f64>,
    /// How strongly inputs were smoothed.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "crate::num::short::option")]
    pub alpha: Option<f32>,
}

/// What the run made.
pub struct Summary {
    pub target: PathBuf,
    /// Bytes of the source's tensors.
    pub source: u64,
    /// Bytes of the artifact's tensors.
    pub size: u64,
    pub modules: Modules,
    pub reports: Vec<ModuleReport>,
    pub transforms: Vec<BlockScaling>,
    /// Bytes of the tensors that stand for the quantized linears.
    pub tensors: u64,
    /// Input channels that calibration saw only as zero; one that several modules share counts once.
    pub dead_channels: usize,
    /// Tensors of the source that the model does not read; they are copied.
    pub unread: Option<Unread>,
    /// By phase.
    pub seconds: Value,
}

impl Summary {
    fn fallbacks(&self) -> Vec<&ModuleReport> {
        self.reports.iter().filter(|r| r.method.starts_with("rtn:")).collect()
    }

    /// Stored bits per weight of the quantized linears, scales and zero points included.
    fn effective_bits(&self) -> f64 {
        let quantized = self.modules.modules.iter().filter(|module| module.scheme.is_some());
        let weights: usize = quantized.map(|module| module.rows * module.cols).sum();
        self.tensors as f64 * 8.0 / weights as f64
    }

    /// The linears behind the MLP's product whose inputs have the largest outliers: what rounding of inputs suffers
    /// from most, and no norm can take over.
    fn outliers(&self) -> Vec<&ModuleReport> {
        let crest = |report: &ModuleReport| report.input_crest.unwrap_or(0.0);
        let mut found: Vec<&ModuleReport> =
            self.reports.iter().filter(|r| r.module.ends_with("down_proj") && crest(r) > 0.0).collect();
        found.sort_by(|a, b| crest(b).total_cmp(&crest(a)));
        found.truncate(3);
        found
    }

    /// The mean over blocks of what scaling made of the measured error.
    fn scaling(&self) -> Option<f64> {
        let ratios: Vec<f64> = self.transforms.iter().filter_map(|t| t.error_ratio).collect();
        (!ratios.is_empty()).then(|| ratios.iter().sum::<f64>() / ratios.len() as f64)
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
        if let Some(ratio) = self.scaling() {
            lines.push(format!("scaling left {:.1} % of the error of rounding, by the blocks' outputs", ratio * 100.0));
        }
        for report in self.outliers() {
            lines.push(format!(
                "{}: inputs up to {:.1}, {:.0} times their root mean square",
                report.module,
                report.input_max.unwrap_or_default(),
                report.input_crest.unwrap_or_default()
            ));
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
        lines.extend(self.unread.as_ref().map(|unread| format!("copied as stored: {unread}")));
        lines
    }

    /// For programs.
    pub fn json(&self) -> Value {
        let mut object = json!({
            "out": self.target,
            "bytes": self.size,
            "source_bytes": self.source,
            "effective_bits": self.effective_bits(),
            "quantized_modules": self.reports.len(),
            "fallbacks": self.fallbacks().iter().map(|r| json!({"module": r.module, "why": &r.method[5..]})).collect::<Vec<_>>(),
            "changed_by_shape": self.modules.notes,
            "dead_channels": self.dead_channels,
            "scaled": self.transforms,
            "outliers": self.outliers().iter().map(|r| json!({"module": r.module, "max": r.input_max, "crest": r.input_crest})).collect::<Vec<_>>(),
            "loss": self.reports.iter().map(|r| r.loss).sum::<f64>(),
            "seconds": self.seconds,
        });
        if let Some(unread) = &self.unread {
            object["unread_tensors"] = json!(unread);
        }
        object
    }
}
