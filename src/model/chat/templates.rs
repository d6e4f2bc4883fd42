//! Chat templates by name, from wherever a model folder keeps them.

use serde_json::Value;

use super::ChatError;
use crate::checkpoint::{Checkpoint, JsonKeys, TEMPLATES};

/// The template that is used unless another one is asked for.
pub const DEFAULT: &str = "default";

const FILE: &str = "chat_template.jinja";
/// JSON files with a key `chat_template`, in the order in which they count.
const JSON_FILES: [&str; 2] = ["tokenizer_config.json", "chat_template.json"];

/// One chat template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedTemplate {
    pub name: String,
    pub source: String,
    /// The file that holds it, relative to the folder.
    pub file: String,
}

impl NamedTemplate {
    /// Whether both write the same. Jinja drops one line end at the end of a template.
    pub fn writes_as(&self, other: &Self) -> bool {
        let text = |template: &'_ Self| template.source.strip_suffix('\n').unwrap_or(&template.source).to_owned();
        text(self) == text(other)
    }
}

/// All templates of a model, the default one first, else in the order of their files.
///
/// transformers takes `chat_template.jinja` with the folder beside it, and only without it what tokenizer_config.json
/// has: a template, a list of `{name, template}`, or an object of templates by name. llama.cpp's converter prefers the
/// latter. So a template that is in both places must be the same. `chat_template.json`, which belongs to the processor of
/// a multimodal model, counts where both are absent.
pub fn templates(checkpoint: &Checkpoint) -> Result<Vec<NamedTemplate>, ChatError> {
    let mut all: Vec<NamedTemplate> = Vec::new();
    let mut add = |template: NamedTemplate| {
        match all.iter().find(|known| known.name == template.name) {
            Some(known) if !known.writes_as(&template) => {
                return Err(ChatError::TwoTemplates {
                    dir: checkpoint.dir().into(),
                    name: template.name,
                    files: Box::new([known.file.clone(), template.file]),
                });
            }
            Some(_) => {}
            None => all.push(template),
        }
        Ok(())
    };
    if let Some(source) = checkpoint.side_text(FILE)? {
        add(NamedTemplate { name: DEFAULT.into(), source, file: FILE.into() })?;
    }
    for file in checkpoint.side_files()? {
        let name = file.strip_prefix(TEMPLATES).and_then(|rest| rest.strip_prefix('/')?.strip_suffix(".jinja"));
        let Some(name) = name.map(String::from) else { continue };
        if let Some(source) = checkpoint.side_text(&file)? {
            add(NamedTemplate { name, source, file })?;
        }
    }
    let [config, processor] = JSON_FILES;
    stored(&checkpoint.side(config)?.keys(), config)?.into_iter().try_for_each(&mut add)?;
    if all.is_empty() {
        all = stored(&checkpoint.side(processor)?.keys(), processor)?;
    }
    all.sort_by_key(|template| template.name != DEFAULT);
    Ok(all)
}

/// The key `chat_template` of a file, in its three forms.
fn stored(keys: &JsonKeys, file: &str) -> Result<Vec<NamedTemplate>, ChatError> {
    const KEY: &str = "chat_template";
    let wanted = "a template, a list of `{name, template}` or an object of templates by name is needed";
    let named =
        |name: &str, source: &str| NamedTemplate { name: name.into(), source: source.into(), file: file.into() };
    let item = |item: &Value| {
        let text = |key: &str| item.get(key).and_then(Value::as_str).filter(|text| !text.is_empty());
        Some(named(text("name")?, text("template")?))
    };
    let read = keys.read(KEY, wanted, |value| match value {
        Value::String(source) => Some(vec![named(DEFAULT, source)]),
        Value::Array(list) => list.iter().map(item).collect(),
        Value::Object(object) => object.iter().map(|(name, source)| Some(named(name, source.as_str()?))).collect(),
        _ => None,
    });
    let all = read?.unwrap_or_default();
    match (1..all.len()).find(|&i| all[..i].iter().any(|known| known.name == all[i].name)) {
        Some(i) => Err(ChatError::Repeated { file: file.into(), name: all[i].name.clone() }),
        None => Ok(all),
    }
}
