//! `quantkit gptq`, `rtn`, `awq`, `smoothquant` and `fp8`: from the command line to a method.

mod artifact;
mod calibration;
mod control;
mod form;
mod job;
mod memory;
mod modules;
mod run;
mod solve;
mod summary;
mod transform;
mod work;

use anyhow::{Context, Result, bail};

use crate::cli::args::{GptqArgs, OnMisfit, OutputArgs, RtnArgs, SchemeArgs};
use crate::cli::methods::{
    Alpha, AwqArgs, Float8FormatArg, Float8TileArg, FormatArg, Fp8Args, KvCacheArg, RoundingArg, SmoothquantArgs,
};
use crate::cli::print::Printer;
use crate::format::layout::{InputsKind, KvScales, Tile};
use crate::quantize::gptq::GptqOptions;
use crate::quantize::grid::Grid;
use crate::quantize::order::Order;
use crate::recipe::{Method, Rounding, Transform};
use crate::scheme::{GroupSize, Scheme};
use form::Form;
use run::Run;

/// What GPTQ does unless it is told otherwise.
const DAMP_PERCENT: f64 = 0.05;
const DAMP_AUTO_INCREMENT: f64 = 0.01;

pub fn gptq(args: &GptqArgs, printer: Printer) -> Result<()> {
    let options = GptqOptions {
        scheme: scheme(&args.scheme, !args.scheme.asym)?,
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
    Run {
        method: method("gptq", rounding, &args.output),
        form: form(args.format),
        model: &args.model,
        scheme: &args.scheme,
        calibration: &args.calibration,
        output: &args.output,
        printer,
    }
    .go()
}

pub fn rtn(args: &RtnArgs, printer: Printer) -> Result<()> {
    let rounding = Rounding::Rtn { scheme: scheme(&args.scheme, !args.scheme.asym)?, grid: args.grid.into() };
    let method = method("rtn", rounding, &args.output);
    if let (false, Some(option)) = (method.calibrates(), args.calibration.given()) {
        bail!("{option} is for calibration, and rtn calibrates only with `--grid hessian` or `--kv-cache`");
    }
    Run {
        method,
        form: form(args.format),
        model: &args.model,
        scheme: &args.scheme,
        calibration: &args.calibration,
        output: &args.output,
        printer,
    }
    .go()
}

pub fn awq(args: &AwqArgs, printer: Printer) -> Result<()> {
    let rounding = rounding(args.rounding, scheme(&args.scheme, args.sym)?, args.grid.into());
    let transform = Transform::Awq {
        points: args.points.into(),
        duo_scaling: !args.no_duo_scaling,
        grouped_values: args.grouped_values,
        tokens: args.search_tokens as usize,
    };
    Run {
        method: Method { transform: Some(transform), ..method("awq", rounding, &args.output) },
        form: form(args.format),
        model: &args.model,
        scheme: &args.scheme,
        calibration: &args.calibration,
        output: &args.output,
        printer,
    }
    .go()
}

pub fn smoothquant(args: &SmoothquantArgs, printer: Printer) -> Result<()> {
    let scheme = Scheme { bits: 8, group_size: GroupSize::CHANNEL, sym: true };
    let alpha = match args.alpha {
        Alpha::Auto => None,
        Alpha::Fixed(alpha) => Some(alpha),
    };
    let activations = if args.static_activations { InputsKind::Tensor } else { InputsKind::Token };
    let transform = Some(Transform::Smoothquant { alpha, tokens: args.search_tokens as usize });
    let rounding = rounding(args.rounding, scheme, Grid::Hessian);
    Run {
        method: Method { transform, activations, ..method("smoothquant", rounding, &args.output) },
        form: Form::Int8,
        model: &args.model,
        scheme: &fixed(scheme, &args.skips),
        calibration: &args.calibration,
        output: &args.output,
        printer,
    }
    .go()
}

pub fn fp8(args: &Fp8Args, printer: Printer) -> Result<()> {
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
    Run {
        method,
        form: match args.format {
            Float8FormatArg::CompressedTensors => Form::Float8,
            Float8FormatArg::Fp8 => Form::Fp8,
        },
        model: &args.model,
        scheme: &fixed(Scheme::FLOAT8, &args.skips),
        calibration: &args.calibration,
        output: &args.output,
        printer,
    }
    .go()
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
        asym: !scheme.sym,
        rules: Vec::new(),
        skips: skips.to_vec(),
        on_misfit: OnMisfit::Refuse,
        on_misfit_given: false,
    }
}
