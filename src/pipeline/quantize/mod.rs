//! From a checkpoint to a quantized folder: settled, calibrated, rounded block by block, written, read back and measured.

mod artifact;
mod calibration;
mod control;
mod forecast;
mod form;
mod job;
mod loadable;
mod memory;
mod modules;
mod outcome;
mod run;
mod settle;
mod solve;
mod transform;
mod work;

use std::path::PathBuf;

use anyhow::Result;

use super::measure::Measurement;
use super::observer::Reporter;
use super::open::Runnable;
use super::options::{Evaluation, OnMisfit, OutputOptions, Selection, TextCalibration};
use crate::evaluate::perplexity::Measured;
use crate::format::kind::InputsKind;
use crate::format::manifest::Manifest;
use crate::model::tokenizer::BosMode;
use crate::quantize::gptq::GptqOptions;
use crate::quantize::scale_search::ScaleSearch;
use crate::recipe::{Method, Recipe, Rounding};
use crate::scheme::{GroupSize, Scheme};
pub use calibration::{Calibrated, CalibrationSource};
pub use forecast::{Effort, Forecast};
pub use form::Form;
pub use modules::Modules;
pub use outcome::{BlockScaling, Outcome, Perplexities, PhaseSeconds};
pub use work::ModuleReport;

/// What is to be made of a checkpoint.
pub struct Quantization {
    pub method: Method,
    pub form: Form,
    pub selection: Selection,
    pub calibration: Box<dyn CalibrationSource>,
    pub output: OutputOptions,
    /// Perplexity before and after, and that of plain rounding; `None` measures nothing.
    pub evaluation: Option<Evaluation>,
    /// BOS in calibration and evaluation.
    pub bos: BosMode,
}

impl Quantization {
    /// `method` in the form that is usual for it, with the built-in texts and the default options.
    pub fn new(method: Method) -> Self {
        Self {
            form: Form::usual(&method.name),
            method,
            selection: Selection::default(),
            calibration: Box::new(TextCalibration::default()),
            output: OutputOptions::default(),
            evaluation: Some(Evaluation::default()),
            bos: BosMode::Auto,
        }
    }

    /// GPTQ with its default options: `bits` of 2, 3, 4 or 8, and `group_size` input channels to a scale.
    pub fn gptq(bits: u8, group_size: GroupSize) -> Self {
        let options = GptqOptions::new(Scheme { bits, group_size, sym: true }, ScaleSearch::Hessian);
        let rounding = Rounding::Gptq { options, true_sequential: true, drift_correction: false };
        Self::new(Method {
            name: "gptq".into(),
            transform: None,
            rounding,
            activations: InputsKind::Float,
            kv_cache: None,
        })
    }

    /// The same, written to the folder `out`.
    pub fn out(mut self, out: impl Into<PathBuf>) -> Self {
        self.output.out = Some(out.into());
        self
    }

    /// The same with other calibration windows.
    pub fn calibration(self, source: impl CalibrationSource + 'static) -> Self {
        Self { calibration: Box::new(source), ..self }
    }

    /// The same without perplexities.
    pub fn unmeasured(self) -> Self {
        Self { evaluation: None, ..self }
    }
}

/// The perplexity that plain rounding at the same bits has, by the record of an artifact; `None` where it has no such
/// record, and where the artifact was made by plain rounding.
///
/// # Errors
///
/// When the record does not fit `reference`, or it cannot be measured.
pub fn control_of(
    manifest: &Manifest,
    reference: &Runnable,
    how: &Measurement,
    reporter: impl Into<Reporter>,
) -> Result<Option<Measured>> {
    let Ok(recipe) = serde_json::from_value::<Recipe>(manifest.options.clone()) else { return Ok(None) };
    let Some((form, version)) = Form::named(&recipe.format) else { return Ok(None) };
    if control::is_control(&recipe.method) {
        return Ok(None);
    }
    let selection = Selection {
        rules: recipe.rules,
        skips: recipe.skips,
        on_misfit: OnMisfit::named(&recipe.on_misfit).unwrap_or_default(),
    };
    let plain = control::plain(&recipe.method);
    let layout = form.layout(&plain, version);
    let mut modules = modules::settle(&reference.model, &recipe.method, &selection, &*layout)?;
    loadable::leave_recorded(&mut modules, &recipe.left_out);
    control::control(reference, &plain, &modules, &*layout, how, &reporter.into()).map(Some)
}
