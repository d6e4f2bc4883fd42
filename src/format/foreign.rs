//! What other programs write and quantkit does not read, one row a kind: the signs by which it is known, its name, and
//! what to do next. Forms of a method that has a reader are refused by that reader.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_json::Value;

use super::FormatError;
use super::config::Found;
use crate::checkpoint::{self, Checkpoint};
use crate::tensor::Dtype;

/// A kind of folder or file.
struct Kind {
    /// Its name in words with its own details, if the signs match this kind.
    name: fn(&Signs) -> Option<String>,
    /// What to do next.
    advice: fn(&Signs) -> String,
}

/// What is seen of a path without its weights.
struct Signs<'a> {
    path: &'a Path,
    /// Names of what is in a folder, sorted; of a file its own name alone.
    names: Vec<String>,
    is_folder: bool,
    /// The first bytes of a file.
    head: [u8; 4],
}

/// Paths, in the order in which they are asked: whatever has the weights of a model folder is one, unless an adapter or
/// another layout claims them.
const PATHS: &[Kind] = &[
    Kind { name: adapter, advice: merge },
    Kind { name: original, advice: convert_original },
    Kind { name: pipeline, advice: |_| "give the folder of its language model, such as `text_encoder`".into() },
    Kind { name: engine, advice: from_transformers },
    Kind { name: ggufs, advice: one_gguf },
    Kind { name: openvino, advice: from_transformers },
    Kind { name: pickles, advice: to_safetensors },
    Kind { name: onnx, advice: from_transformers },
    Kind { name: keras, advice: to_safetensors },
    Kind { name: misnamed, advice: |_| "give it that ending".into() },
    Kind { name: ggml, advice: |_| "convert it with `convert_llama_ggml_to_gguf.py` of llama.cpp".into() },
    Kind { name: lone_safetensors, advice: folder_of },
];

/// Refuses a path that is of one of these kinds.
pub fn refuse(path: &Path) -> Result<(), FormatError> {
    match Signs::of(path).and_then(|signs| signs.named()) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

/// The kind of a hub repository, by the names of its files alone.
pub fn listed(id: &str, files: &[String]) -> Option<FormatError> {
    let root = |file: &String| file.split('/').next().map(Into::into);
    let mut names: Vec<String> = files.iter().filter_map(root).collect();
    names.sort();
    names.dedup();
    Signs { path: Path::new(id), names, is_folder: true, head: [0; 4] }.named()
}

impl<'a> Signs<'a> {
    /// `None` for what is not there; opening it says so.
    fn of(path: &'a Path) -> Option<Self> {
        let is_folder = path.is_dir();
        let (mut names, mut head) = (Vec::new(), [0; 4]);
        if is_folder {
            let dir = checkpoint::snapshot(path).ok()?;
            names.extend(dir.read_dir().ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok()));
            names.sort();
        } else if path.is_file() {
            names.push(path.file_name()?.to_str()?.into());
            let mut first = Vec::new();
            File::open(path).ok()?.take(head.len() as u64).read_to_end(&mut first).ok()?;
            head[..first.len()].copy_from_slice(&first);
        } else {
            return None;
        }
        Some(Self { path, names, is_folder, head })
    }

    /// The first kind that it is of.
    fn named(&self) -> Option<FormatError> {
        let (name, kind) = PATHS.iter().find_map(|kind| Some(((kind.name)(self)?, kind)))?;
        Some(FormatError::Foreign { path: self.path.into(), name, advice: (kind.advice)(self) })
    }

    fn has(&self, name: &str) -> bool {
        self.names.iter().any(|n| n == name)
    }

    /// The first name that begins and ends like this.
    fn like(&self, start: &str, ends: &[&str]) -> Option<&str> {
        let fits = |n: &&String| n.starts_with(start) && ends.iter().any(|end| n.to_lowercase().ends_with(end));
        self.names.iter().find(fits).map(String::as_str)
    }

    /// The first weights as transformers names them.
    fn weights(&self) -> Option<&str> {
        let other = |n: &str| n.contains("adapter") || n.starts_with("consolidated") || n.starts_with("rank");
        let own = |n: &&String| n.ends_with(".safetensors") && !other(n);
        self.names.iter().find(own).map(String::as_str)
    }

    /// A folder without weights that are read.
    fn is_bare(&self) -> bool {
        self.is_folder && self.weights().is_none()
    }

    fn json(&self, name: &str) -> Value {
        let dir = checkpoint::snapshot(self.path).unwrap_or_else(|_| self.path.into());
        let text = std::fs::read_to_string(dir.join(name)).unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    }
}

/// PEFT's and MLX's, beside whole weights too: transformers would add it to them.
fn adapter(signs: &Signs) -> Option<String> {
    let weights = signs.like("adapter", &[".safetensors", ".bin", ".npz"]);
    if weights.is_none() && !(signs.is_bare() && signs.has("adapter_config.json")) {
        return None;
    }
    let config = if signs.is_folder { signs.json("adapter_config.json") } else { Value::Null };
    let text = |key: &str| config.get(key).and_then(Value::as_str);
    let kind = match text("peft_type").or(text("fine_tune_type")).unwrap_or("lora") {
        lora if lora.eq_ignore_ascii_case("lora") => "a LoRA adapter".to_string(),
        other => format!("an adapter of the type {}", other.to_uppercase()),
    };
    let rank = config.get("r").or(config.pointer("/lora_parameters/rank")).and_then(Value::as_u64);
    let rank = rank.map_or(String::new(), |rank| format!(" of rank {rank}"));
    let base = text("base_model_name_or_path").filter(|base| !base.is_empty());
    let base = base.map_or(String::new(), |base| format!(" for `{base}`"));
    let beside = signs.weights().filter(|_| signs.is_folder);
    let beside = beside.map_or(String::new(), |file| format!(" beside the weights of a model (`{file}`)"));
    Some(format!("{kind}{rank}{base}{beside}"))
}

fn merge(signs: &Signs) -> String {
    let merged =
        "merge it into its base model (in PEFT `merge_and_unload`, then `save_pretrained`) and give that folder";
    match signs.is_folder && signs.weights().is_some() {
        true => format!("{merged}, or move `adapter*` elsewhere if the weights have it already"),
        false => merged.into(),
    }
}

/// `params.json` and `consolidated.*`, as Mistral and Meta publish their models beside Hugging Face's layout.
fn original(signs: &Signs) -> Option<String> {
    let weights = signs.like("consolidated", &[".safetensors", ".pth", ".pt", ".index.json"]);
    if !signs.is_bare() || (weights.is_none() && (signs.has("config.json") || !signs.has("params.json"))) {
        return None;
    }
    let meta = weights.is_some_and(|name| !name.contains(".safetensors"));
    let whose = if meta { "Meta's original Llama layout" } else { "Mistral's original layout" };
    let params = signs.json("params.json");
    let size = params.get("n_layers").zip(params.get("dim"));
    let size = size.map_or(String::new(), |(layers, dim)| format!(", {layers} layers of width {dim}"));
    let file = weights.unwrap_or("params.json");
    Some(format!("a model in {whose} (`{file}`{size})"))
}

fn convert_original(signs: &Signs) -> String {
    let meta = signs.like("consolidated", &[".pth", ".pt"]).is_some();
    let family = if meta { "llama" } else { "mistral" };
    format!(
        "give the same model in Hugging Face's layout (`config.json` and `model*.safetensors`), or convert it with \
         `convert_{family}_weights_to_hf.py` of transformers"
    )
}

fn pipeline(signs: &Signs) -> Option<String> {
    (signs.is_folder && signs.has("model_index.json") && !signs.has("config.json"))
        .then(|| "a pipeline of diffusers, made of several models".into())
}

fn engine(signs: &Signs) -> Option<String> {
    let file = signs.like("rank", &[".engine", ".safetensors"])?;
    signs.is_bare().then(|| format!("a model for TensorRT-LLM (`{file}`)"))
}

fn ggufs(signs: &Signs) -> Option<String> {
    let file = signs.like("", &[".gguf"])?;
    signs.is_bare().then(|| format!("a folder of GGUF files (`{file}`)"))
}

fn one_gguf(signs: &Signs) -> String {
    let file = signs.like("", &[".gguf"]).unwrap_or_default();
    match signs.path.join(file) {
        here if here.exists() => format!("give one of them: `{}`", here.display()),
        _ => "download one of them and give that file".into(),
    }
}

fn openvino(signs: &Signs) -> Option<String> {
    let file = signs.like("openvino", &[".xml"])?;
    (signs.is_bare() || !signs.is_folder).then(|| format!("a model for OpenVINO (`{file}`)"))
}

/// State of a training run, which is no model.
const TRAINING: [&str; 5] = ["training_args", "optimizer", "scheduler", "scaler", "rng_state"];

fn pickles(signs: &Signs) -> Option<String> {
    let pickled = |n: &&String| {
        let ends = [".bin", ".pth", ".pt", ".ckpt", ".pkl"].iter().any(|end| n.ends_with(end));
        ends && !TRAINING.iter().any(|start| n.starts_with(start))
    };
    let file = signs.names.iter().find(pickled)?;
    match signs.is_folder {
        true => signs.is_bare().then(|| format!("a folder of pickled PyTorch weights (`{file}`) without safetensors")),
        false => Some("a file of pickled PyTorch weights".into()),
    }
}

fn to_safetensors(_: &Signs) -> String {
    "load it with transformers and save it again (`save_pretrained` writes safetensors), and give that folder".into()
}

fn onnx(signs: &Signs) -> Option<String> {
    match signs.like("", &[".onnx", ".ort"]) {
        Some(_) if !signs.is_folder => Some("an ONNX graph".into()),
        Some(file) => signs.is_bare().then(|| format!("a folder of ONNX graphs (`{file}`)")),
        None => (signs.is_bare() && signs.has("onnx")).then(|| "a folder of ONNX graphs (`onnx/`)".into()),
    }
}

fn from_transformers(_: &Signs) -> String {
    "give the Hugging Face folder it was exported from".into()
}

fn keras(signs: &Signs) -> Option<String> {
    let file = signs.like("", &[".h5", ".msgpack", ".keras", ".tflite"])?;
    (signs.is_bare() || !signs.is_folder).then(|| format!("a model of TensorFlow or Flax (`{file}`)"))
}

fn misnamed(signs: &Signs) -> Option<String> {
    (signs.head == *b"GGUF").then(|| "a GGUF file whose name does not end in `.gguf`".into())
}

/// `ggml`, `ggmf`, `ggjt` and `ggla`, as numbers in little-endian order.
fn ggml(signs: &Signs) -> Option<String> {
    let magic = [b"lmgg", b"fmgg", b"tjgg", b"algg"];
    magic.contains(&&signs.head).then(|| "a GGML file, a format from before GGUF".into())
}

fn lone_safetensors(signs: &Signs) -> Option<String> {
    (!signs.is_folder && signs.like("", &[".safetensors"]).is_some()).then(|| "a safetensors file by itself".into())
}

fn folder_of(signs: &Signs) -> String {
    let dir = signs.path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match dir.join("config.json").exists() {
        true => format!("give its folder, `{}`", dir.display()),
        false => "give a folder that holds it with its `config.json` and tokenizer".into(),
    }
}

/// What a model folder is called, if it is of a kind.
type Recognised = fn(&Checkpoint, Option<&Found>) -> Option<String>;

/// Quantized model folders of a method that has no reader but is well known.
const QUANTIZED: &[(Recognised, &str)] =
    &[(mlx, "give the model it was converted from, or make floats of it (`mlx_lm.convert --dequantize`)")];

/// Refuses a model folder that is of one of these kinds.
pub fn refuse_quantized(checkpoint: &Checkpoint, found: Option<&Found>) -> Result<(), FormatError> {
    let named = QUANTIZED.iter().find_map(|(name, advice)| Some((name(checkpoint, found)?, advice)));
    match named {
        Some((name, advice)) => {
            Err(FormatError::Foreign { path: checkpoint.dir().into(), name, advice: (*advice).into() })
        }
        None => Ok(()),
    }
}

/// MLX: words of U32 with scales and biases of groups. The config says so; where it says nothing, tensors do.
fn mlx(checkpoint: &Checkpoint, found: Option<&Found>) -> Option<String> {
    let Some(found) = found else {
        let tensors = checkpoint.tensors();
        let words = tensors.iter().filter(|(_, entry)| entry.dtype == Dtype::U32);
        let mut modules = words.filter_map(|(name, _)| name.strip_suffix(".weight"));
        let grouped = modules.any(|module| tensors.contains_key(&format!("{module}.scales")));
        return grouped.then(|| "MLX, quantized, without the group size and bits in its config".into());
    };
    if found.method != "mlx" {
        return None;
    }
    let (bits, size) = (&found.value["bits"], &found.value["group_size"]);
    let mode = found.value.get("mode").and_then(Value::as_str).filter(|mode| *mode != "affine");
    let mode = mode.map_or(String::new(), |mode| format!(", {mode}"));
    let own = found.value.as_object().into_iter().flatten().filter(|(_, value)| value.is_object()).count();
    let own = if own > 0 { format!(", {own} modules otherwise") } else { String::new() };
    Some(format!("MLX {bits}-bit, group_size {size}{mode}{own}"))
}
