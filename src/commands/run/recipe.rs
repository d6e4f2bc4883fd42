//! The file of a recipe: sections that are known, paths that count from it, and mistakes told with their line.

use std::fmt::Display;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Error, Result, anyhow};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use toml::Spanned;
use toml::de::{DeTable, DeValue, ValueDeserializer};

use super::options::{self, Step};
use crate::cli::args::DeviceArg;
use crate::hub::looks_like_id;
use crate::report::thresholds::Thresholds;

/// What is to be made, measured and held against limits.
#[derive(Debug)]
pub struct Recipe {
    /// The folder that artifacts, records and reports go to.
    pub out: PathBuf,
    pub source: Source,
    pub steps: Vec<Step>,
    /// `None` where nothing is to be measured.
    pub validate: Option<Validate>,
}

/// The model that everything is made from.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Source {
    /// A folder, counted from the recipe, or a hub id; the built-in demo checkpoint if there is none.
    pub model: Option<String>,
    pub revision: Option<String>,
}

/// How artifacts are measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Validate {
    /// Texts, counted from the recipe; the built-in held-out text if there is none.
    pub texts: Vec<PathBuf>,
    /// `gptq`, `llamacpp` or `lmeval`.
    pub convention: Option<String>,
    /// Tokens of a window.
    pub window: Option<usize>,
    /// Windows of each text at most.
    pub windows: Option<usize>,
    /// `auto`, `none`, `window` or `once`.
    pub bos: Option<String>,
    /// A draft model for speculative decoding: the name of an artifact of the recipe, a folder or a hub id.
    pub draft: Option<String>,
    /// Parts to leave out: `control`, `modules`, `kv`, `spec`.
    pub skip: Vec<String>,
}

/// Keys of the file itself.
const KEYS: [&str; 5] = ["out", "source", "artifact", "validate", "thresholds"];

impl Recipe {
    /// Reads the file; `device` is where artifacts are made that do not say.
    pub fn read(path: &Path, device: &DeviceArg) -> Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read the recipe `{}`", path.display()))?;
        let reader = Reader { path, text: &text };
        let table = DeTable::parse(&text).map_err(|e| reader.error(e.span(), e.message()))?;
        let base = path.parent().unwrap_or(Path::new("")).to_path_buf();
        let (mut source, mut validate, mut thresholds) = (Source::default(), None, None);
        let (mut out, mut artifacts) = (None, Vec::new());
        for (key, value) in table.get_ref() {
            match key.get_ref().as_ref() {
                "out" => out = Some(base.join(reader.typed::<PathBuf>(value)?)),
                "source" => source = reader.typed(value)?,
                "validate" => validate = Some(reader.typed::<Validate>(value)?),
                "thresholds" => thresholds = Some(reader.thresholds(value)?),
                "artifact" => match value.get_ref() {
                    DeValue::Array(all) => artifacts.extend(all.iter().cloned()),
                    _ => return Err(reader.error(Some(key.span()), "write `[[artifact]]`, once for each")),
                },
                other => return Err(reader.error(Some(key.span()), unknown("key", other, &KEYS))),
            }
        }
        if artifacts.is_empty() {
            return Err(reader.error(None, "there is no `[[artifact]]` to make"));
        }
        let out = out.unwrap_or_else(|| base.join("artifacts"));
        if let Some(model) = source.model.as_mut().filter(|model| base.join(&**model).exists()) {
            *model = base.join(&**model).to_string_lossy().into_owned();
        }
        let everywhere = thresholds.clone().unwrap_or_default();
        let place = options::Place { base: &base, out: &out, source: &source, device };
        let mut steps: Vec<Step> = Vec::new();
        for artifact in &artifacts {
            let step = options::step(&reader, artifact, &place, &everywhere)?;
            if steps.iter().any(|earlier| earlier.name == step.name) {
                let why = format!("two artifacts are called `{}`", step.name);
                return Err(reader.error(Some(artifact.span()), why));
            }
            if let Some(earlier) = steps.iter().find(|earlier| earlier.target == step.target) {
                let target = step.target.display();
                let why = format!("`{}` and `{}` would both be written to `{target}`", earlier.name, step.name);
                return Err(reader.error(Some(artifact.span()), why));
            }
            steps.push(step);
        }
        // Limits ask for figures.
        if validate.is_none() && (thresholds.is_some() || steps.iter().any(|s| s.thresholds != Thresholds::default())) {
            validate = Some(Validate::default());
        }
        if let Some(validate) = &mut validate {
            validate.texts.iter_mut().for_each(|text| *text = base.join(&*text));
            if let Some(missing) = validate.texts.iter().find(|text| !text.is_file()) {
                return Err(anyhow!("{}: `texts`: `{}` is no file", path.display(), missing.display()));
            }
            if let Some(draft) = &mut validate.draft {
                let made = steps.iter().find(|step| step.name == *draft).map(|step| step.target.clone());
                let there = Some(base.join(&*draft)).filter(|path| path.exists());
                match made.or(there) {
                    Some(path) => *draft = path.to_string_lossy().into_owned(),
                    None if looks_like_id(draft) => {}
                    None => {
                        let why = "is no artifact of the recipe, no folder and no hub id";
                        return Err(anyhow!("{}: `draft`: `{draft}` {why}", path.display()));
                    }
                }
            }
        }
        Ok(Self { out, source, steps, validate })
    }
}

/// The text of a recipe, for messages that say where.
pub struct Reader<'a> {
    pub path: &'a Path,
    pub text: &'a str,
}

impl Reader<'_> {
    /// What is wrong, with the line where that begins.
    pub fn error(&self, span: Option<Range<usize>>, why: impl Display) -> Error {
        let line = span.map_or(String::new(), |span| {
            let before = self.text.as_bytes().iter().take(span.start);
            format!(", line {}", 1 + before.filter(|byte| **byte == b'\n').count())
        });
        let why = why.to_string();
        anyhow!("`{}`{line}: {}", self.path.display(), why.trim_end())
    }

    /// A value of a known form.
    pub fn typed<T: DeserializeOwned>(&self, value: &Spanned<DeValue<'_>>) -> Result<T> {
        T::deserialize(ValueDeserializer::from(value.clone())).map_err(|e| {
            let span = e.span().or_else(|| Some(value.span()));
            let parts: Vec<&str> = e.message().split('`').collect();
            match parts[..] {
                [start, found, _, ..] if start.starts_with("unknown field") => {
                    let known: Vec<&str> = parts.iter().skip(3).step_by(2).copied().collect();
                    self.error(span, unknown("key", found, &known))
                }
                _ => self.error(span, e.message()),
            }
        })
    }

    /// Limits that can be met.
    pub fn thresholds(&self, value: &Spanned<DeValue<'_>>) -> Result<Thresholds> {
        let thresholds: Thresholds = self.typed(value)?;
        thresholds.check().map_err(|e| self.error(Some(value.span()), e))?;
        if thresholds.max_kl_increase.is_some() {
            let why =
                "`max_kl_increase` needs a baseline, and a recipe has none; `quantkit compare --baseline` takes it";
            return Err(self.error(Some(value.span()), why));
        }
        thresholds.with_known_consumers().map_err(|e| self.error(Some(value.span()), e))
    }
}

/// What to say of a word that is none of the known ones.
pub fn unknown(what: &str, found: &str, known: &[&str]) -> String {
    // Further off than this it is another word.
    let near = |word: &&&str| strsim::damerau_levenshtein(found, word) <= (found.len() / 3).max(2);
    let nearest = known.iter().filter(near).min_by_key(|word| strsim::damerau_levenshtein(found, word));
    match nearest {
        Some(word) => format!("`{found}` is no {what} here; is `{word}` meant?"),
        None => format!("`{found}` is no {what} here; known are {}", known.join(", ")),
    }
}
