//! `quantkit inspect`: what a model folder, an artifact or a GGUF file is, told from headers and configs.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::{Map, Value as Json, json};

use crate::checkpoint::Checkpoint;
use crate::cli::args::InspectArgs;
use crate::cli::print::{Printer, bytes};
use crate::format::consumers::{CONSUMERS, Kind, Module, Plan, check};
use crate::format::gguf::file_type::FileType;
use crate::format::gguf::names::ROPE_FACTORS;
use crate::format::gguf::read::GgufFile;
use crate::format::gguf::value::{Metadata, Value};
use crate::format::gptq::GptqSource;
use crate::format::manifest::{self, Manifest};
use crate::format::{self, FormatError, config};
use crate::model::chat::ChatTemplate;
use crate::model::config::ModelConfig;
use crate::num::ggml::GgmlType;
use crate::pack::gptq::Version;
use crate::scheme::{GroupSize, Scheme};

/// Characters of a metadata text that are shown.
const SHOWN: usize = 160;

/// What `--json` prints: these keys, always all of them, `null` for what is not known or does not apply.
#[derive(Debug, Default, Serialize)]
struct Facts {
    /// As it was given.
    path: PathBuf,
    /// `safetensors` or `gguf`.
    format: &'static str,
    /// Weight files, with their sizes.
    files: Vec<FileFacts>,
    /// Bytes of these files.
    bytes: u64,
    /// The quantization method: `quant_method` of a folder's config, `gguf` for blocks; null for plain floats.
    method: Option<String>,
    /// A variety of the method: the file type of a GGUF file, such as `Q4_K_M`; the checkpoint format of a folder.
    variant: Option<String>,
    /// Bits, group size (-1: one group a channel) and symmetry of most weights, as the quantization config says.
    bits: Option<u64>,
    group_size: Option<i64>,
    symmetric: Option<bool>,
    /// Weights and biases, counted before quantization.
    parameters: Option<u64>,
    quantized_parameters: Option<u64>,
    /// Bits that the file takes for a parameter, and for a quantized one, scales included.
    bits_per_weight: Option<f64>,
    bits_per_quantized_weight: Option<f64>,
    architecture: Architecture,
    /// Whether quantkit's engine runs it; if not, a warning says why.
    runs: bool,
    /// By element type or ggml type.
    tensors: Vec<TensorFacts>,
    /// `tokenizer.json`, `tokenizer.model`, or the tokenizer model a GGUF file names.
    tokenizer: Option<String>,
    chat_template: bool,
    /// The quantization config of a folder, as it stands there.
    quantization_config: Option<Json>,
    /// Keys of a GGUF file; arrays as `N x type`, long texts cut.
    metadata: Option<Map<String, Json>>,
    /// What `quantkit.json` says.
    manifest: Option<ManifestFacts>,
    /// Engines whose rules are known for this method.
    consumers: Option<Vec<ConsumerFacts>>,
    /// What is odd, yet readable.
    warnings: Vec<String>,
}

#[derive(Debug, Serialize)]
struct FileFacts {
    file: String,
    bytes: u64,
}

#[derive(Debug, Default, Serialize)]
struct Architecture {
    /// As the file calls it.
    name: Option<String>,
    /// What quantkit calls it; null for one that it does not know.
    family: Option<&'static str>,
    layers: Option<usize>,
    hidden: Option<usize>,
    intermediate: Option<usize>,
    heads: Option<usize>,
    kv_heads: Option<usize>,
    head_dim: Option<usize>,
    vocab: Option<usize>,
    positions: Option<usize>,
    /// Whether the output head is the embedding.
    tied: Option<bool>,
}

#[derive(Debug, Serialize)]
struct TensorFacts {
    #[serde(rename = "type")]
    kind: String,
    count: usize,
    bytes: u64,
}

#[derive(Debug, Serialize)]
struct ManifestFacts {
    tool: String,
    options: Json,
    calibration: Option<String>,
    source_files: usize,
    output_files: usize,
}

#[derive(Debug, Serialize)]
struct ConsumerFacts {
    name: &'static str,
    title: &'static str,
    loads: bool,
    /// Why not.
    refusals: Vec<String>,
}

pub fn run(args: &InspectArgs, printer: Printer) -> Result<()> {
    let path = &args.path;
    let facts = if format::is_file(path) {
        file(path)?
    } else if path.is_dir() {
        folder(path)?
    } else if path.exists() {
        bail!("`{}` is neither a model folder nor a .gguf file", path.display())
    } else {
        bail!("`{}` does not exist", path.display())
    };
    printer.object(&facts)?;
    for line in lines(&facts) {
        printer.text(line)?;
    }
    facts.warnings.iter().for_each(|warning| printer.warn(warning));
    Ok(())
}

fn folder(path: &Path) -> Result<Facts> {
    let checkpoint = Checkpoint::open(path)?;
    let found = config::find(&checkpoint)?;
    let mut facts = Facts { path: path.into(), format: "safetensors", ..Facts::default() };
    for name in checkpoint.files() {
        facts.file(&checkpoint.dir().join(&**name), name)?;
    }
    facts.tensors = by_type(checkpoint.tensors().values().map(|e| (e.dtype.name(), e.bytes.len() as u64)));
    let side = checkpoint.side_files()?;
    facts.tokenizer =
        ["tokenizer.json", "tokenizer.model"].into_iter().find(|name| side.iter().any(|s| s == name)).map(Into::into);
    if let Some(found) = &found {
        facts.method = Some(found.method.clone());
        facts.quantization(&found.value);
        facts.quantization_config = Some(found.value.clone());
    }
    if checkpoint.dir().join(manifest::FILE).exists() {
        facts.manifest(checkpoint.dir());
    }
    let config = facts.architecture(&checkpoint);
    facts.parameters(&checkpoint, config.as_ref());
    match format::open(Checkpoint::open(path)?) {
        Ok(opened) => facts.warnings.extend(opened.warnings),
        Err(unread @ FormatError::Method { .. }) => {
            facts.runs = false;
            facts.warnings.push(unread.to_string());
        }
        Err(other) => return Err(other.into()),
    }
    if let (Some(found), Some(config)) = (&found, &config)
        && found.method == "gptq"
    {
        let source = GptqSource::open(checkpoint, found)?;
        facts.consumers = facts.scheme().map(|scheme| consumers(scheme, &source, config));
    }
    Ok(facts)
}

fn file(path: &Path) -> Result<Facts> {
    let file = GgufFile::open(path)?;
    let metadata = file.metadata();
    let mut facts = Facts { path: path.into(), format: "gguf", ..Facts::default() };
    for part in file.parts() {
        facts.file(part, &part.file_name().unwrap_or_default().to_string_lossy())?;
    }
    facts.tensors = by_type(file.tensors().iter().map(|t| (t.kind.name(), t.bytes.len() as u64)));
    let weights = || file.tensors().iter().filter(|t| t.name != ROPE_FACTORS);
    let plain = |kind: GgmlType| matches!(kind, GgmlType::F32 | GgmlType::F16 | GgmlType::BF16);
    let sum = |blocks: bool| {
        let chosen = weights().filter(|t| !blocks || !plain(t.kind));
        chosen.fold((0, 0), |(count, size), t| (count + t.len() as u64, size + t.bytes.len() as u64))
    };
    facts.counted(sum(false), sum(true));
    facts.method = (sum(true).0 > 0).then(|| "gguf".into());
    let number: Option<u32> = metadata.read("general.file_type").unwrap_or_default();
    facts.variant = number.map(|n| FileType::from_number(n).map_or(format!("file type {n}"), |t| t.name().into()));
    facts.tokenizer = text(metadata, "tokenizer.ggml.model");
    facts.chat_template = metadata.get("tokenizer.chat_template").is_some();
    facts.metadata = Some(summary(metadata));
    match format::open_file(path) {
        Ok(opened) => {
            facts.warnings.extend(opened.warnings);
            facts.architecture(opened.source.checkpoint());
        }
        Err(error) => facts.warnings.push(format!("it is no model that quantkit runs: {error}")),
    }
    // The file's own word, not that of the config made of it.
    facts.architecture.name = text(metadata, "general.architecture");
    Ok(facts)
}

/// A text of the metadata, if it is there and one.
fn text(metadata: &Metadata, key: &str) -> Option<String> {
    metadata.read::<&str>(key).ok().flatten().map(Into::into)
}

impl Facts {
    fn file(&mut self, path: &Path, name: &str) -> Result<()> {
        let bytes = fs::metadata(path).with_context(|| format!("cannot read `{}`", path.display()))?.len();
        self.files.push(FileFacts { file: name.into(), bytes });
        self.bytes += bytes;
        Ok(())
    }

    /// What a quantization config says of most weights, whichever method it belongs to.
    fn quantization(&mut self, value: &Json) {
        // compressed-tensors has groups of modules, each with its own settings.
        let first = value.get("config_groups").and_then(Json::as_object).and_then(|groups| groups.values().next());
        let places = [Some(value), first.and_then(|group| group.get("weights"))];
        let find = |keys: &[&str]| {
            let at = |place: &&Json| keys.iter().find_map(|key| place.get(key).filter(|v| !v.is_null()).cloned());
            places.iter().flatten().find_map(at)
        };
        self.bits = find(&["bits", "w_bit", "num_bits"]).and_then(|v| v.as_u64());
        if self.bits.is_none() && self.method.as_deref() == Some("fp8") {
            self.bits = Some(8);
        }
        self.group_size = find(&["group_size", "q_group_size"]).and_then(|v| v.as_i64());
        self.symmetric = match find(&["sym", "symmetric"]) {
            Some(flag) => flag.as_bool(),
            None => find(&["zero_point"]).and_then(|v| v.as_bool()).map(|zero| !zero),
        };
        let variant = find(&["checkpoint_format", "format", "version"]);
        self.variant = variant.and_then(|v| v.as_str().map(Into::into));
    }

    /// The scheme that a GPTQ config gives to most weights.
    fn scheme(&self) -> Option<Scheme> {
        let size = i32::try_from(self.group_size?).ok().and_then(GroupSize::new)?;
        Some(Scheme { bits: u8::try_from(self.bits?).ok()?, group_size: size, sym: self.symmetric.unwrap_or(true) })
    }

    fn manifest(&mut self, dir: &Path) {
        match Manifest::read(dir) {
            Ok(manifest) => {
                self.manifest = Some(ManifestFacts {
                    tool: manifest.tool,
                    options: manifest.options,
                    calibration: manifest.calibration.map(|c| c.description),
                    source_files: manifest.source.len(),
                    output_files: manifest.outputs.len(),
                });
            }
            Err(error) => self.warnings.push(error.to_string()),
        }
    }

    /// Names and shapes; a config that the engine cannot run is told of in a warning.
    fn architecture(&mut self, checkpoint: &Checkpoint) -> Option<ModelConfig> {
        let json = checkpoint.config();
        let name = json.pointer("/architectures/0").or(json.get("model_type")).and_then(Json::as_str);
        self.architecture.name = name.map(Into::into);
        match ChatTemplate::load(checkpoint) {
            Ok(template) => self.chat_template |= template.is_some(),
            Err(error) => self.warnings.push(error.to_string()),
        }
        let tensors = checkpoint.tensors();
        let shape_of = |start: &str| {
            let (name, entry) = tensors.range(start.to_string()..).next()?;
            name.starts_with(start).then_some(&entry.shape[..])
        };
        match ModelConfig::parse(json, shape_of) {
            Ok(config) => {
                self.runs = true;
                self.architecture = Architecture {
                    name: self.architecture.name.take(),
                    family: Some(config.family.label),
                    layers: Some(config.layers.len()),
                    hidden: Some(config.hidden),
                    intermediate: Some(config.intermediate),
                    heads: Some(config.heads),
                    kv_heads: Some(config.kv_heads),
                    head_dim: Some(config.head_dim),
                    vocab: Some(config.vocab),
                    positions: Some(config.max_positions),
                    tied: Some(config.tied),
                };
                Some(config)
            }
            Err(error) => {
                self.warnings.push(format!("quantkit does not run it: {error}"));
                None
            }
        }
    }

    /// Counts what a folder holds. How many weights a quantized linear has, its tensors do not tell in any one way;
    /// the config does.
    fn parameters(&mut self, checkpoint: &Checkpoint, config: Option<&ModelConfig>) {
        let tensors = checkpoint.tensors();
        let (mut all, mut quantized) = ((0, 0), (0, 0));
        let mut linears: BTreeMap<String, u64> = BTreeMap::new();
        for (module, rows, cols) in config.into_iter().flat_map(ModelConfig::linears) {
            let whole = tensors.get(&format!("{module}.weight"));
            if whole.is_none_or(|entry| !entry.dtype.is_float()) {
                linears.insert(module, (rows * cols) as u64);
            }
        }
        for (name, entry) in tensors {
            let size = entry.bytes.len() as u64;
            all.1 += size;
            let (module, part) = name.rsplit_once('.').unwrap_or(("", name));
            if part != "bias" && linears.contains_key(module) {
                quantized.1 += size;
            } else if entry.dtype.is_float() && part != "scales" {
                all.0 += entry.shape.iter().product::<usize>() as u64;
            } else if config.is_none() {
                // Parts of weights whose shapes are not known.
                return;
            }
        }
        quantized.0 = linears.values().sum();
        all.0 += quantized.0;
        self.counted(all, quantized);
    }

    /// Takes up numbers of parameters with their bytes.
    fn counted(&mut self, all: (u64, u64), quantized: (u64, u64)) {
        let bits = |(count, size): (u64, u64)| (count > 0).then(|| 8.0 * size as f64 / count as f64);
        self.parameters = Some(all.0);
        self.bits_per_weight = bits(all);
        self.quantized_parameters = Some(quantized.0);
        self.bits_per_quantized_weight = bits(quantized);
    }
}

fn by_type<'a>(tensors: impl Iterator<Item = (&'a str, u64)>) -> Vec<TensorFacts> {
    let mut found: BTreeMap<&str, (usize, u64)> = BTreeMap::new();
    for (kind, bytes) in tensors {
        let entry = found.entry(kind).or_default();
        *entry = (entry.0 + 1, entry.1 + bytes);
    }
    found.into_iter().map(|(kind, (count, bytes))| TensorFacts { kind: kind.into(), count, bytes }).collect()
}

/// Which engines take a GPTQ artifact.
fn consumers(scheme: Scheme, source: &GptqSource, config: &ModelConfig) -> Vec<ConsumerFacts> {
    let stored = source.modules();
    let modules = config.linears().into_iter().map(|(name, rows, cols)| {
        let scheme = stored.get(&name).map(|module| module.scheme);
        Module { name, rows, cols, scheme }
    });
    let plan = Plan {
        scheme,
        kind: Kind::Gptq {
            version: stored.values().next().map_or(Version::V1, |module| module.version),
            desc_act: stored.values().any(|module| module.scattered),
        },
        heads: config.heads,
        kv_heads: config.kv_heads,
        kv_cache: None,
        modules: modules.collect(),
    };
    let ask = |consumer| check(consumer, &plan).into_iter().map(|refusal| refusal.to_string()).collect::<Vec<_>>();
    CONSUMERS
        .iter()
        .map(|consumer| {
            let refusals = ask(consumer);
            ConsumerFacts { name: consumer.name, title: consumer.title, loads: refusals.is_empty(), refusals }
        })
        .collect()
}

/// Metadata in a form that fits a screen.
fn summary(metadata: &Metadata) -> Map<String, Json> {
    let show = |value: &Value| match value {
        Value::U8(v) => json!(v),
        Value::I8(v) => json!(v),
        Value::U16(v) => json!(v),
        Value::I16(v) => json!(v),
        Value::U32(v) => json!(v),
        Value::I32(v) => json!(v),
        Value::F32(v) => json!(v),
        Value::Bool(v) => json!(v),
        Value::U64(v) => json!(v),
        Value::I64(v) => json!(v),
        Value::F64(v) => json!(v),
        Value::Text(text) => {
            let text = String::from_utf8_lossy(text.bytes());
            match text.char_indices().nth(SHOWN) {
                Some((end, _)) => json!(format!("{}...", &text[..end])),
                None => json!(text),
            }
        }
        Value::Array(array) => json!(format!("{} x {}", array.len(), value.kind().trim_start_matches("array of "))),
    };
    metadata.iter().map(|(key, value)| (key.to_string(), show(value))).collect()
}

/// The facts for people.
fn lines(facts: &Facts) -> Vec<String> {
    let mut out = Vec::new();
    let mut line = |name: &str, text: String| out.push(format!("{name:<14} {text}"));
    let files = match &facts.files[..] {
        [one] => one.file.clone(),
        all => format!("{} files", all.len()),
    };
    line("format", format!("{}: {files}, {}", facts.format, bytes(facts.bytes)));
    line(
        "method",
        match (&facts.method, &facts.variant) {
            (Some(method), Some(variant)) => format!("{method} ({variant})"),
            (Some(one), None) => one.clone(),
            (None, Some(variant)) => format!("none, plain floats ({variant})"),
            (None, None) => "none, plain floats".into(),
        },
    );
    let mut scheme = Vec::new();
    scheme.extend(facts.bits.map(|bits| format!("{bits} bits")));
    scheme.extend(facts.group_size.map(|size| format!("group size {size}")));
    scheme.extend(facts.symmetric.map(|sym| if sym { "symmetric" } else { "asymmetric" }.to_string()));
    if !scheme.is_empty() {
        line("scheme", scheme.join(", "));
    }
    if let (Some(count), Some(bits)) = (facts.parameters, facts.bits_per_weight) {
        line("parameters", format!("{:.1} M, {bits:.2} bits each", count as f64 / 1e6));
    }
    if let (Some(count), Some(bits)) = (facts.quantized_parameters, facts.bits_per_quantized_weight) {
        line("  quantized", format!("{:.1} M, {bits:.2} bits each", count as f64 / 1e6));
    }
    let Architecture { name, family, .. } = &facts.architecture;
    let name = name.as_deref().unwrap_or("not named");
    line("architecture", family.map_or(name.into(), |family| format!("{name}: {family}")));
    let a = &facts.architecture;
    let shapes = [
        ("layers", a.layers),
        ("hidden", a.hidden),
        ("intermediate", a.intermediate),
        ("heads", a.heads),
        ("key/value heads", a.kv_heads),
        ("head size", a.head_dim),
        ("vocabulary", a.vocab),
        ("positions", a.positions),
    ];
    let shapes: Vec<String> = shapes.iter().filter_map(|(name, n)| n.map(|n| format!("{name} {n}"))).collect();
    if !shapes.is_empty() {
        line("shapes", shapes.join(", "));
    }
    line("runs here", if facts.runs { "yes" } else { "no" }.into());
    for tensors in &facts.tensors {
        line("tensors", format!("{} {}, {}", tensors.count, tensors.kind, bytes(tensors.bytes)));
    }
    line("tokenizer", facts.tokenizer.clone().unwrap_or_else(|| "none".into()));
    line("chat template", if facts.chat_template { "yes" } else { "no" }.into());
    if let Some(manifest) = &facts.manifest {
        let calibration = manifest.calibration.as_deref().unwrap_or("no calibration");
        line("made by", format!("{}; {calibration}", manifest.tool));
    }
    for consumer in facts.consumers.iter().flatten() {
        let answer = if consumer.loads { "loads it".into() } else { consumer.refusals.join("; ") };
        line("consumer", format!("{}: {answer}", consumer.title));
    }
    for (key, value) in facts.metadata.iter().flatten() {
        let text = value.as_str().map_or(value.to_string(), |text| text.replace(['\n', '\r'], " "));
        line("metadata", format!("{key} = {text}"));
    }
    out
}
