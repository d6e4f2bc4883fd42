//! What is said of an artifact, to people and to programs.

use std::path::Path;

use anyhow::Result;
use serde_json::{Value, json};

use crate::cli::args::EvaluationArgs;
use crate::cli::print::Printer;
use crate::evaluate::perplexity::{Perplexity, peak_rss_bytes};
use crate::num::size::bytes;
use crate::pipeline::failure::CheckFailed;
use crate::pipeline::quantize::{ModuleReport, Outcome, Perplexities};
use crate::pipeline::source::file_name;
use crate::recipe::Method;

/// Reports on the artifact, and compares it with the limit that the user set.
pub fn conclude(method: &Method, made: &Outcome, evaluation: &EvaluationArgs, printer: Printer) -> Result<()> {
    let mut object = json(made);
    object["peak_rss_bytes"] = peak_rss_bytes().into();
    for line in lines(made) {
        printer.text(line)?;
    }
    let measured = made.perplexity.as_ref();
    let rose = measured
        .map(|measured| perplexities(&method.name, measured, evaluation, "take `quantkit rtn`", &mut object, printer));
    let rose = rose.transpose()?;
    printer.object(&object)?;
    gate(rose, evaluation, &made.target)
}

/// An error where the perplexity rose by more percent than the user allows.
pub fn gate(rose: Option<f64>, evaluation: &EvaluationArgs, target: &Path) -> Result<()> {
    match rose.zip(evaluation.max_increase).filter(|(rose, limit)| rose > limit) {
        Some((change, limit)) => Err(CheckFailed(format!(
            "the perplexity rose by {change:.2} %, more than the {limit} % of --max-increase; the artifact is in `{}` all the same",
            target.display()
        ))
        .into()),
        None => Ok(()),
    }
}

/// Prints the perplexities, and gives the increase in percent; `instead` is what to do where plain rounding is better.
pub fn perplexities(
    method: &str,
    measured: &Perplexities,
    evaluation: &EvaluationArgs,
    instead: &str,
    object: &mut Value,
    printer: Printer,
) -> Result<f64> {
    let loses = measured.plain.as_ref().is_some_and(|plain| measured.after.exceeds(plain));
    let (before, after) = (&measured.before.result, &measured.after.result);
    let control = measured.plain.as_ref().map(|plain| &plain.result);
    object["perplexity_before"] = serde_json::to_value(before)?;
    object["perplexity_after"] = serde_json::to_value(after)?;
    let change = |of: &Perplexity| (of.perplexity / before.perplexity - 1.0) * 100.0;
    let rose = change(after);
    let beside = control.map_or(String::new(), |control| {
        format!("; plain rounding {:.4} ({:+.2} %)", control.perplexity, change(control))
    });
    let text = evaluation.eval_text.as_deref().map_or("the built-in held-out text".into(), file_name);
    printer.text(format!(
        "perplexity {:.4} before, {:.4} after ({rose:+.2} %){beside}, {} tokens of {text}, convention {convention}, BOS {}",
        before.perplexity, after.perplexity, before.tokens, before.bos,
        convention = before.convention
    ))?;
    if let Some(control) = control {
        object["perplexity_rtn"] = serde_json::to_value(control)?;
        object["loses_to_rtn"] = loses.into();
        if loses {
            printer.warn(format!(
                "on this model {method} does worse than plain rounding at the same bits: look at the calibration text, or {instead}"
            ));
        }
    }
    Ok(rose)
}

fn fallbacks(made: &Outcome) -> Vec<&ModuleReport> {
    made.reports.iter().filter(|r| r.method.starts_with("rtn:")).collect()
}

/// The linears behind the MLP's product whose inputs have the largest outliers: what rounding of inputs suffers
/// from most, and no norm can take over.
fn outliers(made: &Outcome) -> Vec<&ModuleReport> {
    let crest = |report: &ModuleReport| report.input_crest.unwrap_or(0.0);
    let mut found: Vec<&ModuleReport> =
        made.reports.iter().filter(|r| r.module.ends_with("down_proj") && crest(r) > 0.0).collect();
    found.sort_by(|a, b| crest(b).total_cmp(&crest(a)));
    found.truncate(3);
    found
}

/// The mean over blocks of what scaling made of the measured error.
fn scaling(made: &Outcome) -> Option<f64> {
    let ratios: Vec<f64> = made.transforms.iter().filter_map(|t| t.error_ratio).collect();
    (!ratios.is_empty()).then(|| ratios.iter().sum::<f64>() / ratios.len() as f64)
}

/// For people, a line each.
fn lines(made: &Outcome) -> Vec<String> {
    let mut lines = vec![format!(
        "wrote {}: {} (source {}), {:.2} bits per quantized weight",
        made.target.display(),
        bytes(made.bytes),
        bytes(made.source_bytes),
        made.effective_bits()
    )];
    for report in fallbacks(made) {
        lines.push(format!("{}: fell back to rounding ({})", report.module, &report.method[5..]));
    }
    if let Some(ratio) = scaling(made) {
        lines.push(format!("scaling left {:.1} % of the error of rounding, by the blocks' outputs", ratio * 100.0));
    }
    for report in outliers(made) {
        lines.push(format!(
            "{}: inputs up to {:.1}, {:.0} times their root mean square",
            report.module,
            report.input_max.unwrap_or_default(),
            report.input_crest.unwrap_or_default()
        ));
    }
    if made.dead_channels > 0 {
        // GPTQ does not keep weights that nothing was seen to depend on.
        let gptq = made.reports.iter().any(|r| r.dead_channels > 0 && r.method == "gptq");
        lines.push(format!(
            "{} input channels were zero throughout calibration{}",
            made.dead_channels,
            if gptq { "; their weights are zero now" } else { "" }
        ));
    }
    lines.extend(made.unread.as_ref().map(|unread| format!("copied as stored: {unread}")));
    lines
}

/// For programs.
fn json(made: &Outcome) -> Value {
    let mut object = json!({
        "out": made.target,
        "bytes": made.bytes,
        "source_bytes": made.source_bytes,
        "effective_bits": made.effective_bits(),
        "quantized_modules": made.reports.len(),
        "fallbacks": fallbacks(made).iter().map(|r| json!({"module": r.module, "why": &r.method[5..]})).collect::<Vec<_>>(),
        "changed_by_shape": made.modules.notes,
        "dead_channels": made.dead_channels,
        "scaled": made.transforms,
        "outliers": outliers(made).iter().map(|r| json!({"module": r.module, "max": r.input_max, "crest": r.input_crest})).collect::<Vec<_>>(),
        "loss": made.reports.iter().map(|r| r.loss).sum::<f64>(),
        "seconds": made.seconds,
    });
    if let Some(unread) = &made.unread {
        object["unread_tensors"] = json!(unread);
    }
    object
}
