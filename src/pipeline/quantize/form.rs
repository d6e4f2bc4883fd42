//! The form of an artifact, from the method to a layout.

use anyhow::{Result, bail};

use super::super::options::OutputOptions;
use crate::format::awq::AwqLayout;
use crate::format::compressed::CompressedLayout;
use crate::format::fp8::Fp8Layout;
use crate::format::gptq::GptqLayout;
use crate::format::kind::{self, KvScales, Tile};
use crate::format::layout::Layout;
use crate::pack::gptq::Version;
use crate::quantize::order::Order;
use crate::recipe::{Method, Rounding};

/// Where quantized linears are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Gptq,
    Awq,
    /// compressed-tensors, integers packed into words.
    Packed,
    /// compressed-tensors, signed bytes.
    Int8,
    /// compressed-tensors, E4M3.
    Float8,
    /// `quant_method` fp8.
    Fp8,
}

impl Form {
    /// The form as records name it.
    pub fn name(self, version: Version) -> &'static str {
        match self {
            Form::Gptq => version.name(),
            Form::Awq => "awq",
            Form::Packed => "pack-quantized",
            Form::Int8 => "int-quantized",
            Form::Float8 => "float-quantized",
            Form::Fp8 => "fp8",
        }
    }

    /// The form that records name so.
    pub fn named(name: &str) -> Option<(Self, Version)> {
        let all = [Form::Gptq, Form::Awq, Form::Packed, Form::Int8, Form::Float8, Form::Fp8];
        let versions = [Version::V1, Version::V2];
        let pairs = all.into_iter().flat_map(|form| versions.map(|version| (form, version)));
        pairs.into_iter().find(|(form, version)| form.name(*version) == name)
    }

    /// The form that a command writes unless it is told otherwise.
    pub fn usual(method: &str) -> Self {
        match method {
            "awq" => Form::Awq,
            "smoothquant" => Form::Int8,
            "fp8" => Form::Float8,
            _ => Form::Gptq,
        }
    }

    /// How default names of folders tell another form.
    pub fn suffix(self) -> &'static str {
        match self {
            Form::Gptq => "-gptq",
            Form::Awq => "-awq",
            Form::Packed | Form::Int8 | Form::Float8 => "-ct",
            Form::Fp8 => "-fp8",
        }
    }

    /// What the method asks of the artifact must have a place in it.
    pub fn supports(self, method: &Method, output: &OutputOptions) -> Result<()> {
        if method.kv_cache == Some(KvScales::Head) && self == Form::Fp8 {
            bail!("scales of each head have no place in `--format fp8`; write compressed-tensors, or `--kv-cache fp8`");
        }
        if method.kv_cache.is_some() && matches!(self, Form::Gptq | Form::Awq) {
            bail!(
                "--kv-cache: consumers look for such scales in compressed-tensors artifacts, not in this form; add `--format compressed-tensors`"
            );
        }
        if output.version.is_some() && self != Form::Gptq {
            bail!("--checkpoint-format is for GPTQ artifacts");
        }
        if matches!(&method.rounding, Rounding::Gptq { options, .. } if options.pass.order == Order::Activation && !options.pass.static_groups)
            && self != Form::Gptq
        {
            bail!(
                "groups in activation order are stored in GPTQ artifacts only; add --static-groups, or take another --order"
            );
        }
        Ok(())
    }

    /// How linears are stored.
    pub fn layout(self, method: &Method, version: Version) -> Box<dyn Layout> {
        let inputs = method.activations;
        let tile = match method.rounding {
            Rounding::Float8 { tile, .. } => tile,
            _ => Tile::Channel,
        };
        match self {
            Form::Gptq => Box::new(GptqLayout { version }),
            Form::Awq => Box::new(AwqLayout),
            Form::Packed => Box::new(CompressedLayout { form: kind::Form::Packed }),
            Form::Int8 => Box::new(CompressedLayout { form: kind::Form::Int8(inputs) }),
            Form::Float8 => Box::new(CompressedLayout { form: kind::Form::Float8 { tile, inputs } }),
            Form::Fp8 => Box::new(Fp8Layout { tile, inputs }),
        }
    }
}
