//! `quantkit gptq`, `rtn`, `awq`, `smoothquant` and `fp8`: from the command line to a method, and what is said of the artifact.

pub mod summary;

use anyhow::{Context, Result, bail};

use super::device::backend;
use crate::backend::cuda::CudaOptions;
use crate::calibrate::corpus::Sampling;
use crate::cli::args::{CalibrationArgs, Command, GptqArgs, ModelArgs, OutputArgs, RtnArgs, SamplingArg, SchemeArgs};
use crate::cli::methods::{
    Alpha, AwqArgs, Float8FormatArg, Float8TileArg, FormatArg, Fp8Args, RoundingArg, SmoothquantArgs,
};
use crate::cli::options::KvCacheArg;
use crate::cli::print::Printer;
use crate::format::kind::{InputsKind, KvScales, Tile};
use crate::pack::gptq::Version;
use crate::pipeline::options::{OutputOptions, Resume, Selection, TextCalibration};
use crate::pipeline::quantize::{Forecast, Form, Quantization};
use crate::pipeline::source::locate;
use crate::quantize::gptq::{GptqOptions, PassOptions};
use crate::quantize::order::Order;
use crate::quantize::scale_search::ScaleSearch;
use crate::recipe::{Method, Rounding, Transform};
use crate::scheme::{GroupSize, Scheme};

/// A command that quantizes, ready to go.
pub struct Prepared<'a> {
    quantization: Quantization,
    model: &'a ModelArgs,
    output: &'a OutputArgs,
    printer: Printer,
}

impl Prepared<'_> {
    /// Makes the artifact and reports on it.
    pub fn go(self) -> Result<()> {
        self.quantization.supported()?;
        let located = locate(self.model, self.printer)?;
        let backend = backend(&self.model.device, CudaOptions::default(), self.printer)?;
        let made = self.quantization.run(&located, backend, self.printer)?;
        summary::conclude(&self.quantization.method, &made, &self.output.evaluation, self.printer)
    }

    /// What that would take.
    pub fn forecast(&self) -> Result<Forecast> {
        self.quantization.supported()?;
        let located = locate(self.model, self.printer)?;
        let backend = backend(&self.model.device, CudaOptions::default(), self.printer)?;
        self.quantization.forecast(&located, backend, self.printer)
    }
}

/// A command that quantizes, ready to go; `None` for any other.
pub fn prepared(command: &Command, printer: Printer) -> Option<Result<Prepared<'_>>> {
    let (settled, model, output) = match command {
        Command::Gptq(args) => (gptq(args), &args.model, &args.output),
        Command::Rtn(args) => (rtn(args), &args.model, &args.output),
        Command::Awq(args) => (awq(args), &args.model, &args.output),
        Command::Smoothquant(args) => (smoothquant(args), &args.model, &args.output),
        Command::Fp8(args) => (fp8(args), &args.model, &args.output),
        _ => return None,
    };
    Some(settled.map(|quantization| Prepared { quantization, model, output, printer }))
}

/// What all methods have in common.
fn quantization(
    method: Method,
    form: Form,
    selection: Selection,
    calibration: &CalibrationArgs,
    output: &OutputArgs,
) -> Result<Quantization> {
    let sampling = match (calibration.sampling, calibration.seed) {
        (Some(SamplingArg::Random), seed) => Sampling::Random { seed: seed.unwrap_or(0) },
        (_, Some(_)) => bail!("--seed is for `--sampling random`"),
        (_, None) => Sampling::InOrder,
    };
    let version = match &output.checkpoint_format {
        Some(name) => Some(Version::parse(name).context("--checkpoint-format is gptq or gptq_v2")?),
        None => None,
    };
    Ok(Quantization {
        method,
        form,
        selection,
        calibration: Box::new(TextCalibration {
            text: calibration.calib.clone(),
            nsamples: calibration.nsamples,
            seqlen: calibration.seqlen,
            sampling,
        }),
        output: OutputOptions {
            out: output.out.clone(),
            overwrite: output.overwrite,
            resume: match (output.resume_same, output.resume) {
                (true, _) => Resume::IfSame,
                (false, true) => Resume::Yes,
                (false, false) => Resume::No,
            },
            version,
            max_shard_bytes: output.max_shard_size * 1_000_000,
            consumers: output.consumers.clone(),
        },
        evaluation: output.evaluation.settled(),
        bos: output.bos,
    })
}

fn gptq(args: &GptqArgs) -> Result<Quantization> {
    let pass = PassOptions {
        order: if args.desc_act { Order::Activation } else { args.order.into() },
        static_groups: args.static_groups,
        damp_percent: args.damp_percent,
        damp_auto_increment: args.damp_auto_increment,
        sweeps: args.sweeps,
    };
    let options = GptqOptions { pass, ..GptqOptions::new(scheme(&args.scheme, !args.asym)?, args.grid.into()) };
    let rounding =
        Rounding::Gptq { options, true_sequential: !args.no_true_sequential, drift_correction: args.drift_correction };
    let method = method("gptq", rounding, &args.output);
    quantization(method, form(args.format), selection(&args.scheme), &args.calibration, &args.output)
}

fn rtn(args: &RtnArgs) -> Result<Quantization> {
    let rounding = Rounding::Rtn { scheme: scheme(&args.scheme, !args.asym)?, grid: args.grid.into() };
    let method = method("rtn", rounding, &args.output);
    if let (false, Some(option)) = (method.calibrates(), args.calibration.given()) {
        bail!("{option} is for calibration, and rtn calibrates only with `--grid hessian` or `--kv-cache`");
    }
    quantization(method, form(args.format), selection(&args.scheme), &args.calibration, &args.output)
}

fn awq(args: &AwqArgs) -> Result<Quantization> {
    let rounding = rounding(args.rounding, scheme(&args.scheme, args.sym)?, args.grid.into());
    let transform = Transform::Awq {
        points: args.points.into(),
        duo_scaling: !args.no_duo_scaling,
        grouped_values: args.grouped_values,
        tokens: args.search_tokens as usize,
    };
    let method = Method { transform: Some(transform), ..method("awq", rounding, &args.output) };
    quantization(method, form(args.format), selection(&args.scheme), &args.calibration, &args.output)
}

fn smoothquant(args: &SmoothquantArgs) -> Result<Quantization> {
    let scheme = Scheme { bits: 8, group_size: GroupSize::CHANNEL, sym: true };
    let alpha = match args.alpha {
        Alpha::Auto => None,
        Alpha::Fixed(alpha) => Some(alpha),
    };
    let activations = if args.static_activations { InputsKind::Tensor } else { InputsKind::Token };
    let transform = Some(Transform::Smoothquant { alpha, tokens: args.search_tokens as usize });
    let rounding = rounding(args.rounding, scheme, ScaleSearch::Hessian);
    let method = Method { transform, activations, ..method("smoothquant", rounding, &args.output) };
    let selection = Selection { skips: args.skips.clone(), ..Selection::default() };
    quantization(method, Form::Int8, selection, &args.calibration, &args.output)
}

fn fp8(args: &Fp8Args) -> Result<Quantization> {
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
    let form = match args.format {
        Float8FormatArg::CompressedTensors => Form::Float8,
        Float8FormatArg::Fp8 => Form::Fp8,
    };
    let selection = Selection { skips: args.skips.clone(), ..Selection::default() };
    quantization(method, form, selection, &args.calibration, &args.output)
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
fn rounding(kind: RoundingArg, scheme: Scheme, grid: ScaleSearch) -> Rounding {
    match kind {
        RoundingArg::Rtn => Rounding::Rtn { scheme, grid },
        RoundingArg::Gptq => {
            Rounding::Gptq { options: GptqOptions::new(scheme, grid), true_sequential: true, drift_correction: false }
        }
    }
}

fn selection(args: &SchemeArgs) -> Selection {
    Selection { rules: args.rules.clone(), skips: args.skips.clone(), on_misfit: args.on_misfit.into() }
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
