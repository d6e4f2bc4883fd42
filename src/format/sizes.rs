//! What a model takes in every form that is written here, told before any work: from tensor headers, or from
//! `config.json` alone. Layouts and type rules are those that writing uses.

use serde::Serialize;

use super::awq::AwqLayout;
use super::compressed::CompressedLayout;
use super::fp8::Fp8Layout;
use super::gguf::file_type::FileType;
use super::gguf::metadata::rope_freqs;
use super::gguf::names::{Architecture, ROPE_FACTORS};
use super::gguf::select::{ModelFacts, Options, SelectError, kept, select};
use super::gguf::write::{self, data_bytes};
use super::gptq::GptqLayout;
use super::kind::{self, InputsKind, Module, Tile};
use super::layout::{Layout, fitting, laid_out};
use super::safetensors::TensorSpec;
use crate::checkpoint::{Checkpoint, Entry, JsonKeys, KeyError};
use crate::model::config::ModelConfig;
use crate::num::ggml::GgmlType;
use crate::pack::gptq::Version;
use crate::scheme::{GroupSize, Scheme};
use crate::tensor::Dtype;

/// The floating-point model that artifacts are made from.
#[derive(Clone, Debug, PartialEq)]
pub struct Source {
    pub tensors: Vec<TensorSpec>,
    /// Whether tensors are those of a file; otherwise the config tells what they would be.
    pub measured: bool,
}

impl Source {
    /// The tensors of a folder in plain floats, as artifacts take them up: a head that repeats the embedding is left out.
    pub fn measured(checkpoint: &Checkpoint, config: &ModelConfig) -> Self {
        let spec = |(name, entry): (&String, &Entry)| TensorSpec::new(name.clone(), entry.dtype, entry.shape.clone());
        let tensors = checkpoint.tensors().iter().filter(|(name, _)| !config.is_repeated(name));
        Self { tensors: tensors.map(spec).collect(), measured: true }
    }

    /// What a config asks for, in the number type that it names, F16 if none.
    pub fn configured(keys: &JsonKeys, config: &ModelConfig) -> Result<Self, KeyError> {
        let levels = [Some(keys.clone()), keys.object("text_config")?];
        let mut dtype = None;
        for level in levels.iter().flatten() {
            dtype = dtype.or(float_type(level)?);
        }
        let dtype = dtype.unwrap_or(Dtype::F16);
        let tensors = config.tensors().into_iter().map(|(name, shape)| TensorSpec::new(name, dtype, shape));
        Ok(Self { tensors: tensors.collect(), measured: false })
    }

    /// Numbers in floating-point tensors.
    pub fn parameters(&self) -> u64 {
        let floats = self.tensors.iter().filter(|spec| spec.dtype.is_float());
        floats.map(|spec| spec.shape.iter().product::<usize>() as u64).sum()
    }

    /// Bytes of all tensors as they are.
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(TensorSpec::bytes).sum()
    }

    /// Bytes with floats of 16 bits.
    pub fn half_bytes(&self) -> u64 {
        let bytes = |spec: &TensorSpec| match spec.dtype.is_float() {
            true => 2 * spec.shape.iter().product::<usize>() as u64,
            false => spec.bytes(),
        };
        self.tensors.iter().map(bytes).sum()
    }
}

/// The type of numbers that one level of a config names; `dtype` is the newer spelling.
fn float_type(keys: &JsonKeys) -> Result<Option<Dtype>, KeyError> {
    let read = |key: &str| {
        keys.read(key, "known are float32, float16 and bfloat16", |name| {
            match name.as_str()?.trim_start_matches("torch.") {
                "float32" => Some(Dtype::F32),
                "bfloat16" => Some(Dtype::BF16),
                "float16" | "auto" => Some(Dtype::F16),
                _ => None,
            }
        })
    };
    match (read("dtype")?, read("torch_dtype")?) {
        (Some(one), Some(other)) if one != other => Err(keys.contradiction("dtype", keys, "torch_dtype")),
        (one, other) => Ok(one.or(other)),
    }
}

/// One form of the weights.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Size {
    /// `fp16`, `gptq-w4g128`, `Q4_K_M` and so on; `stored` for what is there, where that is quantized.
    pub name: String,
    /// What writes it, without the model; none for what is there already.
    pub command: Option<String>,
    /// Bytes of the tensors; a file is larger by its header. `None` where the form cannot be written.
    pub bytes: Option<u64>,
    /// By the parameters of the source.
    pub bits_per_weight: Option<f64>,
    /// What differs from what was asked for, or why there is none.
    pub note: Option<String>,
}

/// Sizes in all forms: floats of 16 bits, then layouts of safetensors, then the types of GGUF.
pub fn all(source: &Source, config: &ModelConfig, group_size: GroupSize) -> Vec<Size> {
    let parameters = source.parameters().max(1) as f64;
    let size = |name: String, command: Option<String>, bytes: Result<u64, String>, note: Option<String>| Size {
        name,
        command,
        bytes: bytes.as_ref().ok().copied(),
        bits_per_weight: bytes.as_ref().ok().map(|bytes| *bytes as f64 * 8.0 / parameters),
        note: bytes.err().or(note),
    };
    let mut out = vec![size("fp16".into(), None, Ok(source.half_bytes()), None)];
    for form in forms(group_size) {
        let (modules, note) = settled(config, &*form.layout, form.scheme);
        let bytes = match modules.iter().all(|module| module.scheme.is_none()) {
            true => Err(note.clone().unwrap_or_default()),
            false => form.layout.accepts(&modules).map(|()| {
                let specs = laid_out(source.tensors.iter().cloned(), &modules, &*form.layout);
                specs.iter().map(TensorSpec::bytes).sum()
            }),
        };
        out.push(size(form.name, Some(form.command), bytes, note));
    }
    for kind in FileType::all() {
        let (bytes, note) = match gguf(source, config, kind) {
            Ok((bytes, note)) => (Ok(bytes), note),
            Err(why) => (Err(why), None),
        };
        out.push(size(kind.name().into(), Some(format!("gguf --type {kind}")), bytes, note));
    }
    out
}

struct Form {
    name: String,
    command: String,
    layout: Box<dyn Layout>,
    scheme: Scheme,
}

fn forms(group_size: GroupSize) -> Vec<Form> {
    let group = if group_size == GroupSize::CHANNEL { "channel".into() } else { format!("g{group_size}") };
    let options = |bits: u8| format!("--bits {bits} --group-size {group_size}");
    let form = |name: &str, command: &str, layout: Box<dyn Layout>, scheme| Form {
        name: name.into(),
        command: command.into(),
        layout,
        scheme,
    };
    let (float8, block) = (kind::Form::Float8 { tile: Tile::Channel, inputs: InputsKind::Token }, 128);
    let mut out = vec![
        form("fp8", "fp8", Box::new(CompressedLayout { form: float8 }), Scheme::FLOAT8),
        form(
            "fp8-block",
            "fp8 --format fp8",
            Box::new(Fp8Layout { tile: Tile::Block(block, block), inputs: InputsKind::Group(block) }),
            Scheme::FLOAT8,
        ),
        form(
            "int8",
            "smoothquant",
            Box::new(CompressedLayout { form: kind::Form::Int8(InputsKind::Token) }),
            Scheme { bits: 8, group_size: GroupSize::CHANNEL, sym: true },
        ),
    ];
    for bits in [8, 4, 3, 2] {
        let scheme = Scheme { bits, group_size, sym: true };
        let layout = Box::new(GptqLayout { version: Version::safest([scheme]) });
        out.push(form(&format!("gptq-w{bits}{group}"), &format!("gptq {}", options(bits)), layout, scheme));
    }
    let scheme = Scheme { bits: 4, group_size, sym: false };
    out.push(form(&format!("awq-w4{group}"), &format!("awq {}", options(4)), Box::new(AwqLayout), scheme));
    for bits in [8, 4, 3, 2] {
        let scheme = Scheme { bits, group_size, sym: true };
        let layout = Box::new(CompressedLayout { form: kind::Form::Packed });
        let command = format!("gptq --format compressed-tensors {}", options(bits));
        out.push(form(&format!("ct-w{bits}{group}"), &command, layout, scheme));
    }
    out
}

/// The linears with what they would get: where the group size does not fit, the next smaller that does.
fn settled(config: &ModelConfig, layout: &dyn Layout, scheme: Scheme) -> (Vec<Module>, Option<String>) {
    let (mut modules, mut smaller, mut left) = (Vec::new(), Vec::new(), Vec::new());
    for (name, rows, cols) in config.linears() {
        let scheme = match layout.check(rows, cols, scheme) {
            Ok(()) => Some(scheme),
            Err(why) => {
                let below = |s: &Scheme| s.group_size.raw() < scheme.group_size.raw();
                let found = fitting(layout, rows, cols, scheme).find(below);
                match found {
                    Some(found) => smaller.push((found, why)),
                    None => left.push(why),
                }
                found
            }
        };
        modules.push(Module { name, rows, cols, scheme });
    }
    let count = modules.len();
    let smaller = smaller.first().map(|(found, why)| {
        let many = smaller.len();
        format!("{many} of {count} linears with group size {} (--on-misfit smaller-group): {why}", found.group_size)
    });
    let left = left
        .first()
        .map(|why| format!("{} of {count} linears stay in floating point (--on-misfit skip): {why}", left.len()));
    let notes: Vec<String> = smaller.into_iter().chain(left).collect();
    (modules, (!notes.is_empty()).then(|| notes.join("; ")))
}

/// Bytes of the tensors of a GGUF file, and what it takes to make it.
fn gguf(source: &Source, config: &ModelConfig, kind: FileType) -> Result<(u64, Option<String>), String> {
    let architecture = Architecture::of(config.family).map_err(|e| e.to_string())?;
    let mut tensors: Vec<write::TensorSpec> = Vec::new();
    for spec in source.tensors.iter().filter(|spec| spec.dtype.is_float() && config.reads(&spec.name)) {
        let stored = match spec.dtype {
            Dtype::F16 => GgmlType::F16,
            Dtype::BF16 => GgmlType::BF16,
            _ => GgmlType::F32,
        };
        if let Some(name) = architecture.to_gguf(&spec.name).map_err(|e| e.to_string())? {
            tensors.push(write::TensorSpec::new(name, stored, spec.shape.clone()));
        }
    }
    if let Some(factors) = rope_freqs(config) {
        tensors.push(write::TensorSpec::new(ROPE_FACTORS, GgmlType::F32, [factors.len()]));
    }
    let shapes: Vec<(String, Vec<usize>)> = tensors.iter().map(|t| (t.name.clone(), t.shape.clone())).collect();
    let facts = ModelFacts::of(config, architecture);
    let chosen = |importance| select(&shapes, &facts, &Options { importance, ..Options::new(kind) });
    let (choices, importance) = match chosen(false) {
        Err(SelectError::NeedsImportance { .. }) => (chosen(true).map_err(|e| e.to_string())?, true),
        other => (other.map_err(|e| e.to_string())?, false),
    };
    let changed = choices.iter().filter(|choice| choice.wanted.is_some()).count();
    let mut note = importance.then(|| "needs --imatrix".to_string());
    if changed > 0 {
        let text = format!("{changed} of {} tensors of another type: rows do not fill blocks", choices.len());
        note = Some(note.map_or(text.clone(), |note| format!("{note}; {text}")));
    }
    for choice in choices {
        if let Some(tensor) = tensors.iter_mut().find(|tensor| tensor.name == choice.name) {
            tensor.kind = choice.kind.unwrap_or(kept(tensor.kind, &tensor.shape));
        }
    }
    let bytes = data_bytes(&tensors).ok_or("a tensor has no size in its type")?;
    Ok((bytes, note))
}
