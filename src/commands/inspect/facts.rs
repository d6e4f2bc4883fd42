//! What there is to say of a model, as `--json` prints it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::{Map, Value as Json};

use crate::checkpoint::Checkpoint;
use crate::format::kind::KvScales;
use crate::format::manifest::Manifest;
use crate::format::{self, Quantization};
use crate::model::chat::ChatTemplate;
use crate::model::config::ModelConfig;
use crate::model::presence::Unread;
use crate::scheme::Scheme;
use crate::tensor::widened;

/// What `--json` prints: these keys, always all of them, `null` for what is not known or does not apply.
#[derive(Debug, Default, Serialize)]
pub struct Facts {
    /// As it was given.
    pub path: PathBuf,
    /// `safetensors` or `gguf`.
    pub format: &'static str,
    /// Weight files, with their sizes.
    pub files: Vec<FileFacts>,
    /// Bytes of these files.
    pub bytes: u64,
    /// The quantization method as the artifact records it: in `quantkit.json`, else as `layout`, since other tools record no
    /// more; null for plain floats.
    pub method: Option<String>,
    /// The form that weights are stored in: `quant_method` of a folder's config, `gguf` for blocks; null for plain floats.
    pub layout: Option<String>,
    /// A variety of the method: the file type of a GGUF file, such as `Q4_K_M`; the checkpoint format of a folder.
    pub variant: Option<String>,
    /// Bits, group size (-1: one group a channel) and symmetry of most weights, as the quantization config says.
    pub bits: Option<u64>,
    pub group_size: Option<i64>,
    pub symmetric: Option<bool>,
    /// How linears are quantized, those of most weights first, where the folder can be read.
    pub schemes: Option<Vec<SchemeFacts>>,
    /// How the engine rounds the inputs of quantized linears, each way once; null where all stay floats.
    pub inputs: Option<Vec<String>>,
    /// Weights and biases, counted before quantization.
    pub parameters: Option<u64>,
    pub quantized_parameters: Option<u64>,
    /// Bits that the file takes for a parameter, and for a quantized one, scales included.
    pub bits_per_weight: Option<f64>,
    pub bits_per_quantized_weight: Option<f64>,
    pub architecture: Architecture,
    /// Whether quantkit's engine runs it; if not, a warning says why.
    pub runs: bool,
    /// By element type or ggml type.
    pub tensors: Vec<TensorFacts>,
    /// `tokenizer.json`, `tokenizer.model`, or the tokenizer model a GGUF file names.
    pub tokenizer: Option<String>,
    pub chat_template: bool,
    /// Files that hold one, or the key of a GGUF file; the first is the one that counts.
    pub chat_template_places: Vec<String>,
    /// Scales for a cache of 8-bit keys and values.
    pub kv_cache: Option<CacheFacts>,
    /// The quantization config of a folder, as it stands there.
    pub quantization_config: Option<Json>,
    /// Keys of a GGUF file; arrays as `N x type`, long texts cut.
    pub metadata: Option<Map<String, Json>>,
    /// What `quantkit.json` says.
    pub manifest: Option<ManifestFacts>,
    /// Engines whose rules are known for this method.
    pub consumers: Option<Vec<ConsumerFacts>>,
    /// The check of the files, where that was asked for.
    pub verification: Option<Verification>,
    /// What cannot be read or is not as the config says.
    pub damage: Vec<String>,
    /// Tensors that the language model does not read; null where all are read.
    pub unread_tensors: Option<Unread>,
    /// What is odd, yet readable.
    pub warnings: Vec<String>,
}

#[derive(Debug, Serialize)]
pub struct FileFacts {
    pub file: String,
    pub bytes: u64,
}

#[derive(Debug, Default, Serialize)]
pub struct Architecture {
    /// As the file calls it.
    pub name: Option<String>,
    /// What quantkit calls it; null for one that it does not know.
    pub family: Option<&'static str>,
    pub layers: Option<usize>,
    pub hidden: Option<usize>,
    pub intermediate: Option<usize>,
    pub heads: Option<usize>,
    pub kv_heads: Option<usize>,
    pub head_dim: Option<usize>,
    pub vocab: Option<usize>,
    pub positions: Option<usize>,
    /// Whether the output head is the embedding.
    pub tied: Option<bool>,
}

#[derive(Debug, Serialize)]
pub struct TensorFacts {
    #[serde(rename = "type")]
    pub kind: String,
    pub count: usize,
    pub bytes: u64,
}

#[derive(Debug, Serialize)]
pub struct ManifestFacts {
    pub tool: String,
    pub options: Json,
    pub calibration: Option<String>,
    pub source_files: usize,
    pub output_files: usize,
}

/// Scales of keys and values.
#[derive(Debug, Serialize)]
pub struct CacheFacts {
    /// `tensor`: one a layer; `head`: one a head.
    pub scales: KvScales,
    /// Layers that have some.
    pub layers: usize,
    /// The smallest and the largest scale of keys, and of values.
    pub keys: Option<[f32; 2]>,
    pub values: Option<[f32; 2]>,
}

#[derive(Debug, Serialize)]
pub struct Verification {
    pub against: Against,
    /// Files that the manifest names, or the weight files.
    pub files: usize,
    /// What differs, and how.
    pub mismatches: Vec<String>,
}

/// What files were compared with.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Against {
    /// The hashes in `quantkit.json`.
    Manifest,
    /// Headers, shapes and finite numbers, where no hashes are recorded.
    Structure,
}

/// Linears that are quantized alike.
#[derive(Debug, Serialize)]
pub struct SchemeFacts {
    pub bits: u64,
    /// -1: one group a channel.
    pub group_size: i64,
    pub symmetric: bool,
    pub modules: usize,
    /// Of the modules whose shapes the config tells.
    pub weights: u64,
}

#[derive(Debug, Serialize)]
pub struct ConsumerFacts {
    pub name: &'static str,
    pub title: &'static str,
    pub loads: bool,
    /// Why not.
    pub refusals: Vec<String>,
}

impl Facts {
    pub fn file(&mut self, path: &Path, name: &str) -> Result<()> {
        let bytes = fs::metadata(path).with_context(|| format!("cannot read `{}`", path.display()))?.len();
        self.files.push(FileFacts { file: name.into(), bytes });
        self.bytes += bytes;
        Ok(())
    }

    /// What a quantization config says of most weights, whichever method it belongs to.
    pub fn quantization(&mut self, value: &Json) {
        // compressed-tensors has groups of modules, each with its own settings; ModelOpt's file has one more level.
        let first = value.get("config_groups").and_then(Json::as_object).and_then(|groups| groups.values().next());
        let places = [Some(value), value.get("quantization"), first.and_then(|group| group.get("weights"))];
        let find = |keys: &[&str]| {
            let at = |place: &&Json| keys.iter().find_map(|key| place.get(key).filter(|v| !v.is_null()).cloned());
            places.iter().flatten().find_map(at)
        };
        self.bits = find(&["bits", "w_bit", "num_bits"]).and_then(|v| v.as_u64());
        if self.bits.is_none() && self.layout.as_deref() == Some("fp8") {
            self.bits = Some(8);
        }
        self.group_size = find(&["group_size", "q_group_size"]).and_then(|v| v.as_i64());
        self.symmetric = match find(&["sym", "symmetric"]) {
            Some(flag) => flag.as_bool(),
            None => find(&["zero_point"]).and_then(|v| v.as_bool()).map(|zero| !zero),
        };
        let variant = find(&["packing_format", "checkpoint_format", "format", "version", "quant_algo", "mode"]);
        self.variant = variant.and_then(|v| v.as_str().map(Into::into));
    }

    /// How linears are quantized; where they differ, the scheme of most weights is that of the whole.
    pub fn schemes(&mut self, stored: &Quantization, config: Option<&ModelConfig>) {
        let sizes: BTreeMap<String, u64> =
            config.into_iter().flat_map(ModelConfig::linears).map(|(name, n, k)| (name, (n * k) as u64)).collect();
        let mut all: Vec<(Scheme, SchemeFacts)> = Vec::new();
        for (module, scheme) in &stored.schemes {
            let weights = sizes.get(module).copied().unwrap_or(0);
            match all.iter_mut().find(|(other, _)| other == scheme) {
                Some((_, facts)) => (facts.modules, facts.weights) = (facts.modules + 1, facts.weights + weights),
                None => {
                    let (bits, group_size) = (scheme.bits.into(), scheme.group_size.raw().into());
                    let facts = SchemeFacts { bits, group_size, symmetric: scheme.sym, modules: 1, weights };
                    all.push((*scheme, facts));
                }
            }
        }
        // Stable: of schemes of as many weights, the first in the order of names.
        all.sort_by_key(|(_, facts)| Reverse((facts.weights, facts.modules)));
        if let Some((_, most)) = all.first()
            && (all.len() > 1 || self.bits != Some(most.bits))
        {
            (self.bits, self.group_size) = (Some(most.bits), Some(most.group_size));
            self.symmetric = Some(most.symmetric);
        }
        self.schemes = Some(all.into_iter().map(|(_, facts)| facts).collect());
    }

    /// What `quantkit.json` says, or why it cannot be read.
    pub fn manifest(&mut self, dir: &Path) -> Option<String> {
        match Manifest::read(dir) {
            Ok(manifest) => {
                if self.layout.is_some() {
                    self.method = manifest.method().map(Into::into).or(self.method.take());
                }
                self.manifest = Some(ManifestFacts {
                    tool: manifest.tool,
                    options: manifest.options,
                    calibration: manifest.calibration.map(|c| c.description),
                    source_files: manifest.source.len(),
                    output_files: manifest.outputs.len(),
                });
                None
            }
            Err(error) => Some(error.to_string()),
        }
    }

    /// Names and shapes; a config that the engine cannot run is told of in a warning.
    pub fn architecture(&mut self, checkpoint: &Checkpoint) -> Option<ModelConfig> {
        let json = checkpoint.config();
        let name = json.pointer("/architectures/0").or(json.get("model_type")).and_then(Json::as_str);
        self.architecture.name = name.map(Into::into);
        match ChatTemplate::load(checkpoint) {
            Ok(template) => self.chat_template |= template.is_some(),
            Err(error) => self.warnings.push(error.to_string()),
        }
        if self.format == "safetensors" {
            let has = |name: &&str| match *name {
                "chat_template.jinja" => checkpoint.side_text(name).is_ok_and(|text| text.is_some()),
                _ => checkpoint.side_json(name).is_ok_and(|json| json.is_some_and(|j| !j["chat_template"].is_null())),
            };
            let places = ["chat_template.jinja", "tokenizer_config.json", "chat_template.json"];
            self.chat_template_places = places.into_iter().filter(has).map(Into::into).collect();
        }
        match ModelConfig::stated_by(checkpoint) {
            Ok(mut config) => {
                // What a whole folder lacks is damage; of one that is cut off, that was found before.
                if let Err(error) = config.settle(checkpoint)
                    && self.damage.is_empty()
                {
                    self.damage.push(error.to_string());
                }
                self.warnings.append(&mut config.warnings);
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
    pub fn parameters(&mut self, checkpoint: &Checkpoint, config: Option<&ModelConfig>) {
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

    /// The scales of keys and values that a folder holds.
    pub fn cache_scales(&mut self, checkpoint: &Checkpoint) {
        let Some(scales) = format::cache_scales(checkpoint) else { return };
        let (mut layers, mut range) = (BTreeSet::new(), [None, None]);
        for (name, entry) in checkpoint.tensors() {
            let Some((layer, at)) = ["k_scale", "v_scale"]
                .iter()
                .enumerate()
                .find_map(|(at, end)| Some((name.strip_suffix(end)?.strip_suffix('.')?, at)))
            else {
                continue;
            };
            layers.insert(layer);
            if entry.dtype.is_float() {
                for value in widened(entry.dtype, &entry.bytes) {
                    let [low, high] = range[at].unwrap_or([value, value]);
                    range[at] = Some([value.min(low), value.max(high)]);
                }
            }
        }
        self.kv_cache = Some(CacheFacts { scales, layers: layers.len(), keys: range[0], values: range[1] });
    }

    /// Tensors that the config asks for and are not there as it says.
    pub fn missing(&mut self, checkpoint: &Checkpoint, config: &ModelConfig, quantized: &dyn Fn(&str) -> bool) {
        let wrong = |(name, shape): &(String, Vec<usize>)| {
            let stored = name.strip_suffix(".weight").is_some_and(quantized);
            if stored { None } else { checkpoint.expect_float(name, shape).err() }
        };
        let wrong: Vec<_> = config.tensors().iter().filter_map(wrong).collect();
        if let Some(first) = wrong.first() {
            let more =
                if wrong.len() > 1 { format!("; {} more tensors like it", wrong.len() - 1) } else { String::new() };
            self.damage.push(format!("{first}{more}"));
        }
    }

    /// Tensors that are not read, where nothing is damaged.
    pub fn unread(&mut self, checkpoint: &Checkpoint, config: &ModelConfig, plain: bool) {
        self.unread_tensors = config.unread(checkpoint, plain).filter(|_| self.damage.is_empty());
        self.warnings.extend(self.unread_tensors.as_ref().map(ToString::to_string));
    }

    /// Of a model that is damaged or not read counts would mislead, and nothing runs it.
    pub fn not_run(&mut self) {
        (self.runs, self.consumers) = (false, None);
        (self.parameters, self.quantized_parameters) = (None, None);
        (self.bits_per_weight, self.bits_per_quantized_weight) = (None, None);
    }

    /// Takes up numbers of parameters with their bytes.
    pub fn counted(&mut self, all: (u64, u64), quantized: (u64, u64)) {
        let bits = |(count, size): (u64, u64)| (count > 0).then(|| 8.0 * size as f64 / count as f64);
        self.parameters = Some(all.0);
        self.bits_per_weight = bits(all);
        self.quantized_parameters = Some(quantized.0);
        self.bits_per_quantized_weight = bits(quantized);
    }
}
