//! `quantkit gptq`, `rtn`, `awq`, `smoothquant` and `fp8`: from the command line to a method.

mod artifact;
mod calibration;
mod control;
mod forecast;
mod form;
mod job;
mod loadable;
mod memory;
mod modules;
mod run;
mod solve;
mod summary;
mod transform;
mod work;

use std::borrow::Cow;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use super::open::{Measurement, Runnable};
use crate::cli::args::{Command, GptqArgs, OnMisfit, OutputArgs, RtnArgs, SchemeArgs};
use crate::cli::methods::{
    Alpha, AwqArgs, Float8FormatArg, Float8TileArg, FormatArg, Fp8Args, KvCacheArg, RoundingArg, SmoothquantArgs,
};
use crate::cli::print::Printer;
use crate::evaluate::perplexity::Measured;
use crate::format::layout::{InputsKind, KvScales, Tile};
use crate::format::manifest::Manifest;
use crate::quantize::gptq::GptqOptions;
use crate::quantize::grid::Grid;
use crate::quantize::order::Order;
use crate::recipe::{Method, Recipe, Rounding, Transform};
use crate::scheme::{GroupSize, Scheme};
pub use forecast::{Effort, Forecast};
use form::Form;
pub use run::Run;
use transform::plainly;
pub use work::ModuleReport;

/// What GPTQ does unless it is told otherwise.
const DAMP_PERCENT: f64 = 0.05;
const DAMP_AUTO_INCREMENT: f64 = 0.01;

/// A command that quantizes, ready to go; `None` for any other.
pub fn prepared(command: &Command, printer: Printer) -> Option<Result<Run<'_>>> {
    match command {
        Command::Gptq(args) => Some(gptq(args, printer)),
        Command::Rtn(args) => Some(rtn(args, printer)),
        Command::Awq(args) => Some(awq(args, printer)),
        Command::Smoothquant(args) => Some(smoothquant(args, printer)),
        Command::Fp8(args) => Some(fp8(args, printer)),
        _ => None,
    }
}

fn gptq(args: &GptqArgs, printer: Printer) -> Result<Run<'_>> {
    let options = GptqOptions {
        scheme: scheme(&args.scheme, !args.asym)?,
        order: if args.desc_act { Order::Activation } else { args.order.into() },
        static_groups: args.static_groups,
        damp_percent: args.damp_percent,
        damp_auto_increment: args.damp_auto_increment,
        grid: args.grid.into(),
        sweeps: args.sweeps,
        least_zero: 0,
    };
    let rounding =
        Rounding::Gptq { options, true_sequential: !args.no_true_sequential, drift_correction: args.drift_correction };
    Ok(Run {
        method: method("gptq", rounding, &args.output),
        form: form(args.format),
        model: &args.model,
        scheme: Cow::Borrowed(&args.scheme),
        calibration: &args.calibration,
        output: &args.output,
        printer,
    })
}

fn rtn(args: &RtnArgs, printer: Printer) -> Result<Run<'_>> {
    let rounding = Rounding::Rtn { scheme: scheme(&args.scheme, !args.asym)?, grid: args.grid.into() };
    let method = method("rtn", rounding, &args.output);
    if let (false, Some(option)) = (method.calibrates(), args.calibration.given()) {
        bail!("{option} is for calibration, and rtn calibrates only with `--grid hessian` or `--kv-cache`");
    }
    Ok(Run {
        method,
        form: form(args.format),
        model: &args.model,
        scheme: Cow::Borrowed(&args.scheme),
        calibration: &args.calibration,
        output: &args.output,
        printer,
    })
}

fn awq(args: &AwqArgs, printer: Printer) -> Result<Run<'_>> {
    let rounding = rounding(args.rounding, scheme(&args.scheme, args.sym)?, args.grid.into());
    let transform = Transform::Awq {
        points: args.points.into(),
        duo_scaling: !args.no_duo_scaling,
        grouped_values: args.grouped_values,
        tokens: args.search_tokens as usize,
    };
    Ok(Run {
        method: Method { transform: Some(transform), ..method("awq", rounding, &args.output) },
        form: form(args.format),
        model: &args.model,
        scheme: Cow::Borrowed(&args.scheme),
        calibration: &args.calibration,
        output: &args.output,
        printer,
    })
}

fn smoothquant(args: &SmoothquantArgs, printer: Printer) -> Result<Run<'_>> {
    let scheme = Scheme { bits: 8, group_size: GroupSize::CHANNEL, sym: true };
    let alpha = match args.alpha {
        Alpha::Auto => None,
        Alpha::Fixed(alpha) => Some(alpha),
    };
    let activations = if args.static_activations { InputsKind::Tensor } else { InputsKind::Token };
    let transform = Some(Transform::Smoothquant { alpha, tokens: args.search_tokens as usize });
    let rounding = rounding(args.rounding, scheme, Grid::Hessian);
    Ok(Run {
        method: Method { transform, activations, ..method("smoothquant", rounding, &args.output) },
        form: Form::Int8,
        model: &args.model,
        scheme: Cow::Owned(fixed(scheme, &args.skips)),
        calibration: &args.calibration,
        output: &args.output,
        printer,
    })
}

fn fp8(args: &Fp8Args, printer: Printer) -> Result<Run<'_>> {
    let tile = match (args.weights, args.format) {
        (Some(Float8TileArg::Tensor), _) => Tile::Tensor,
        (Some(Float8TileArg::Channel), Float8FormatArg::Fp8) => {
            bail!("`--format fp8` has no scales for channels; use `--weights tensor` or `--weights block`")
        }
        (Some(Float8TileArg::Channel), _) | (None, Float8FormatArg::CompressedTensors) => Tile::Channel,
        (Some(Float8TileArg::Block), _) | (None, Float8FormatArg::Fp8) => Tile::Block(128, 128),
    };
    let activations = match (args.static_activations, tile) {
        (true, Tile::Tensor) => InputsKind::Tensor,
        (true, _) => bail!("--static-activations needs `--weights tensor`: no consumer takes them with other scales"),
        (false, Tile::Block(_, width)) => InputsKind::Group(width),
        (false, _) => InputsKind::Token,
    };
    let rounding = Rounding::Float8 { tile, feedback: args.rounding == RoundingArg::Gptq };
    let method = Method { activations, ..method("fp8", rounding, &args.output) };
    if let (false, Some(option)) = (method.calibrates(), args.calibration.given()) {
        bail!(
            "{option} is for calibration, and fp8 calibrates only with `--static-activations`, `--rounding gptq` or `--kv-cache`"
        );
    }
    Ok(Run {
        method,
        form: match args.format {
            Float8FormatArg::CompressedTensors => Form::Float8,
            Float8FormatArg::Fp8 => Form::Fp8,
        },
        model: &args.model,
        scheme: Cow::Owned(fixed(Scheme::FLOAT8, &args.skips)),
        calibration: &args.calibration,
        output: &args.output,
        printer,
    })
}

/// The perplexity that plain rounding at the same bits has, where the artifact's manifest tells what was asked for; `None`
/// where it does not, and where the artifact was made by plain rounding.
pub fn control_of(
    manifest: &Manifest,
    reference: &Runnable,
    how: &Measurement,
    printer: Printer,
) -> Result<Option<Measured>> {
    let Ok(recipe) = serde_json::from_value::<Recipe>(manifest.options.clone()) else { return Ok(None) };
    let Some((form, version)) = Form::named(&recipe.format) else { return Ok(None) };
    if is_control(&recipe.method) {
        return Ok(None);
    }
    let base = recipe.method.scheme();
    let args = SchemeArgs {
        bits: base.bits,
        group_size: base.group_size.raw(),
        rules: recipe.rules,
        skips: recipe.skips,
        on_misfit: OnMisfit::from_str(&recipe.on_misfit, false).unwrap_or(OnMisfit::Refuse),
        on_misfit_given: false,
    };
    let plain = control::plain(&recipe.method);
    let layout = form.layout(&plain, version);
    let mut modules = modules::settle(&reference.model, base, &args, &*layout)?;
    loadable::leave_recorded(&mut modules, &recipe.left_out);
    control::control(reference, &plain, &modules, &*layout, how, printer).map(Some)
}

/// Whether the method is what it would be held against.
fn is_control(method: &Method) -> bool {
    method.transform.is_none() && method.rounding == plainly(&method.rounding) && !method.activations.is_static()
}

/// A method that only rounds.
fn method(name: &str, rounding: Rounding, output: &OutputArgs) -> Method {
    let kv_cache = output.kv_cache.map(|kind| match kind {
        KvCacheArg::Fp8 => KvScales::Tensor,
        KvCacheArg::Fp8PerHead => KvScales::Head,
    });
    Method { name: name.into(), transform: None, rounding, activations: InputsKind::Float, kv_cache }
}

/// Rounding after scaling, GPTQ as it is by default.
fn rounding(kind: RoundingArg, scheme: Scheme, grid: Grid) -> Rounding {
    match kind {
        RoundingArg::Rtn => Rounding::Rtn { scheme, grid },
        RoundingArg::Gptq => Rounding::Gptq {
            options: GptqOptions {
                scheme,
                order: Order::GroupAware,
                static_groups: false,
                damp_percent: DAMP_PERCENT,
                damp_auto_increment: DAMP_AUTO_INCREMENT,
                grid,
                sweeps: 1,
                least_zero: 0,
            },
            true_sequential: true,
            drift_correction: false,
        },
    }
}

fn form(format: FormatArg) -> Form {
    match format {
        FormatArg::Gptq => Form::Gptq,
        FormatArg::Awq => Form::Awq,
        FormatArg::CompressedTensors => Form::Packed,
    }
}

fn scheme(args: &SchemeArgs, sym: bool) -> Result<Scheme> {
    let group_size = GroupSize::new(args.group_size).context("a group size is -1 or positive")?;
    Ok(Scheme { bits: args.bits, group_size, sym })
}

/// The arguments of a method whose scheme cannot be chosen.
fn fixed(scheme: Scheme, skips: &[String]) -> SchemeArgs {
    SchemeArgs {
        bits: scheme.bits,
        group_size: scheme.group_size.raw(),
        rules: Vec::new(),
        skips: skips.to_vec(),
        on_misfit: OnMisfit::Refuse,
        on_misfit_given: false,
    }
}
