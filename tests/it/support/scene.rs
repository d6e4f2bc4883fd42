//! A folder with a small model and texts, in which the program is run.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use quantkit::format::manifest::sha256_bytes;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::command::{Ran, quantkit};
use super::fixture;

/// Quantization of the tiny models: few samples, group sizes that fit.
pub const TINY: [&str; 12] = [
    "--group-size",
    "32",
    "--calib",
    "calib.txt",
    "--nsamples",
    "4",
    "--seqlen",
    "32",
    "--eval-text",
    "eval.txt",
    "--eval-windows",
    "2",
];

/// `args` with what else [`TINY`] says, as far as the command reads it.
pub fn tiny_args<'a>(args: &[&'a str]) -> Vec<&'a str> {
    let unread = |option: &str| match option {
        "--eval-text" | "--eval-windows" => args.contains(&"--no-eval"),
        "--group-size" => false,
        _ => args[0] == "rtn" && !args.contains(&"hessian"),
    };
    let others = TINY.chunks(2).filter(|option| !args.contains(&option[0]) && !unread(option[0]));
    [args, &others.flatten().copied().collect::<Vec<_>>()].concat()
}

/// A tensor as it stands in a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
}

/// `model/`, `calib.txt`, `eval.txt`, and an empty `tmp/` for temporary files.
pub struct Scene {
    root: TempDir,
}

impl Scene {
    /// A family fixture with a tokenizer beside it.
    pub fn tiny(family: &str) -> Self {
        let scene = Self::demo();
        copy_folder(&fixture(&format!("families/{family}")), &scene.model());
        for left_over in ["golden.safetensors", "config_legacy.json"] {
            let _ = fs::remove_file(scene.model().join(left_over));
        }
        scene.write("model/tokenizer.json", character_tokenizer(128));
        scene.write("model/tokenizer_config.json", r#"{"bos_token": "<s>", "eos_token": "</s>"}"#);
        scene
    }

    /// No `model/`: the program's own demo checkpoint is used.
    pub fn demo() -> Self {
        let scene = Self { root: TempDir::new().unwrap() };
        fs::create_dir(scene.path("tmp")).unwrap();
        scene.write("calib.txt", text("calibration.txt", 0, 40_000));
        scene.write("eval.txt", text("heldout.txt", 2_000, 12_000));
        scene
    }

    pub fn root(&self) -> &Path {
        self.root.path()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.root().join(name)
    }

    pub fn model(&self) -> PathBuf {
        self.path("model")
    }

    pub fn write(&self, name: &str, contents: impl AsRef<[u8]>) {
        fs::write(self.path(name), contents).unwrap();
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    pub fn json(&self, name: &str) -> Value {
        serde_json::from_slice(&self.read(name)).unwrap()
    }

    /// Changes a JSON file.
    pub fn edit_json(&self, name: &str, change: impl FnOnce(&mut Value)) {
        let mut value = self.json(name);
        change(&mut value);
        self.write(name, value.to_string());
    }

    /// Changes the tensors of `model/model.safetensors`.
    pub fn edit_weights(&self, change: impl FnOnce(&mut BTreeMap<String, Stored>)) {
        let path = self.path("model/model.safetensors");
        let mut tensors = tensors(&path);
        change(&mut tensors);
        let views = tensors.iter().map(|(name, t)| (name, TensorView::new(t.dtype, t.shape.clone(), &t.data).unwrap()));
        self.write("model/model.safetensors", safetensors::serialize(views, None).unwrap());
    }

    /// Runs `quantkit ARGS` here.
    pub fn run(&self, args: &[&str]) -> Ran {
        quantkit(self.root(), args)
    }

    /// Runs `quantkit ARGS` with [`TINY`] here.
    pub fn tiny_run(&self, args: &[&str]) -> Ran {
        self.run(&tiny_args(args))
    }

    /// The run ends with `code`, an error in one line with these words, nothing on stdout, and every file here
    /// as it was before.
    #[track_caller]
    pub fn fails(&self, args: &[&str], code: i32, words: &[&str]) -> Ran {
        let before = self.listing();
        let ran = self.run(args).ended(code).says(words);
        assert_eq!(ran.stdout, "");
        let last = ran.stderr.lines().last().unwrap_or_default();
        assert!(last.starts_with("error: "), "the last line is no error:\n{}", ran.stderr);
        assert_eq!(self.listing(), before, "something was left behind");
        ran
    }

    /// [`Self::fails`] with code 2: the input is at fault.
    #[track_caller]
    pub fn refused(&self, args: &[&str], words: &[&str]) -> Ran {
        self.fails(args, 2, words)
    }

    /// Every file and folder here, hidden ones included, with the hash of what it holds.
    pub fn listing(&self) -> BTreeMap<String, String> {
        listing(self.root())
    }
}

/// Every file and folder under `dir`, with hashes.
pub fn listing(dir: &Path) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut waiting = vec![dir.to_path_buf()];
    while let Some(folder) = waiting.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(dir).unwrap().display().to_string();
            if path.is_dir() {
                found.insert(name, "folder".into());
                waiting.push(path);
            } else {
                found.insert(name, sha256_bytes(&fs::read(&path).unwrap()));
            }
        }
    }
    found
}

/// The tensors of a safetensors file.
pub fn tensors(path: &Path) -> BTreeMap<String, Stored> {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let stored =
        |view: TensorView| Stored { dtype: view.dtype(), shape: view.shape().to_vec(), data: view.data().to_vec() };
    file.tensors().into_iter().map(|(name, view)| (name, stored(view))).collect()
}

/// A part of a shipped text, cut at ends of characters.
pub fn text(name: &str, from: usize, len: usize) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("calib").join(name);
    fs::read_to_string(path).unwrap().chars().skip(from).take(len).collect()
}

pub fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}

/// A `tokenizer.json` with one token for each ASCII character, and spare ones up to `entries`.
pub fn character_tokenizer(entries: usize) -> String {
    let mut tokens = vec!["<unk>".to_string(), "<s>".into(), "</s>".into(), "\n".into()];
    tokens.extend((' '..='~').map(String::from));
    (tokens.len()..entries).for_each(|id| tokens.push(format!("<spare {id}>")));
    let special = |id: usize| {
        json!({
            "id": id, "content": tokens[id], "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        })
    };
    let vocab: serde_json::Map<String, Value> =
        tokens.iter().enumerate().map(|(id, token)| (token.clone(), id.into())).collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(0), special(1), special(2)],
        "normalizer": null,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": false},
        "post_processor": null,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    })
    .to_string()
}
