//! Special tokens, whether texts begin and end with them, and chat templates, as llama.cpp's converter reads them
//! from tokenizer.json, tokenizer_config.json and config.json (gguf-py, `SpecialVocab`).

use serde_json::Value as Json;

use super::value::Metadata;
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::model::tokenizer::token_text;

/// Kinds of special tokens in the order of writing, and what their keys call them; `cls` has no key.
const KINDS: [(&str, Option<&str>); 9] = [
    ("bos", Some("bos")),
    ("eos", Some("eos")),
    ("unk", Some("unknown")),
    ("sep", Some("seperator")),
    ("pad", Some("padding")),
    ("cls", None),
    ("mask", Some("mask")),
    ("eot", Some("eot")),
    ("eom", Some("eom")),
];

/// Everything about special tokens that a GGUF file states.
#[derive(Debug, Default)]
pub(super) struct Special {
    /// Kind and id, in the order found.
    pub ids: Vec<(&'static str, u32)>,
    /// Kind and whether it is added to a text.
    pub added: Vec<(&'static str, bool)>,
    templates: Vec<(String, String)>,
    normalizer: Vec<(&'static str, bool)>,
}

/// What the files call the special tokens that the post-processor may change.
struct Names<'a> {
    config: &'a Json,
    bos: Option<&'a str>,
    eos: Option<&'a str>,
    sep: Option<&'a str>,
    cls: Option<&'a str>,
    /// The end of a text as tokenizer_config.json has it, when the post-processor ends texts otherwise.
    eot: Option<&'a str>,
}

impl Special {
    /// Reads the files of a model. Ids beyond `rows` are left out.
    pub fn read(checkpoint: &Checkpoint, tokenizer: &Json, rows: usize) -> Result<Self, CheckpointError> {
        let config = checkpoint.side_json("tokenizer_config.json")?.unwrap_or_default();
        let mut special = Self { templates: templates(checkpoint, &config)?, ..Self::default() };
        if let Some(normalizer) = tokenizer.get("normalizer") {
            special.read_normalizer(normalizer);
        }
        let text = |key| token_text(&config, key).filter(|t| !t.is_empty());
        let (cls, sep) = (text("cls_token"), text("sep_token"));
        let mut names = Names {
            config: &config,
            bos: text("bos_token").or(cls),
            eos: text("eos_token").or(sep),
            sep,
            cls,
            eot: None,
        };
        if let Some(post) = tokenizer.get("post_processor").filter(|p| !p.is_null()) {
            match post.get("processors").and_then(Json::as_array) {
                Some(list) => list.iter().for_each(|p| special.read_post_processor(p, &mut names)),
                None => special.read_post_processor(post, &mut names),
            }
        }
        special.read_ids(&names, tokenizer, checkpoint.config(), rows);
        Ok(special)
    }

    fn set_added(&mut self, kind: &'static str, value: bool) {
        match self.added.iter_mut().find(|(k, _)| *k == kind) {
            Some((_, old)) => *old = value,
            None => self.added.push((kind, value)),
        }
    }

    /// States whether `kind` is added, unless that is stated already.
    pub fn default_added(&mut self, kind: &'static str, value: bool) {
        if !self.added.iter().any(|(k, _)| *k == kind) {
            self.added.push((kind, value));
        }
    }

    /// States whether `kind` is added, whatever was stated.
    pub fn overrule_added(&mut self, kind: &'static str, value: bool) {
        self.set_added(kind, value);
    }

    pub fn id(&self, kind: &str) -> Option<u32> {
        self.ids.iter().find(|(k, _)| *k == kind).map(|(_, id)| *id)
    }

    fn read_normalizer(&mut self, normalizer: &Json) {
        let flag = |key: &str| normalizer.get(key).and_then(Json::as_bool);
        match normalizer.get("type").and_then(Json::as_str) {
            Some("Lowercase") => self.normalizer.push(("lowercase", true)),
            Some("StripAccents") => self.normalizer.push(("strip_accents", true)),
            Some("BertNormalizer") => {
                let both = ["lowercase", "strip_accents"].into_iter();
                self.normalizer.extend(both.filter_map(|key| Some((key, flag(key)?))));
            }
            Some("Sequence") => {
                let list = normalizer.get("normalizers").and_then(Json::as_array);
                list.into_iter().flatten().for_each(|inner| self.read_normalizer(inner));
            }
            _ => {}
        }
    }

    fn read_post_processor<'a>(&mut self, processor: &'a Json, names: &mut Names<'a>) {
        match processor.get("type").and_then(Json::as_str) {
            Some("ByteLevel") => {
                self.default_added("bos", false);
                self.default_added("eos", false);
            }
            Some("RobertaProcessing") => {
                ["bos", "eos", "sep"].into_iter().for_each(|kind| self.set_added(kind, true));
                let first = |key: &str| processor.get(key)?.get(0)?.as_str();
                names.cls = names.cls.or(first("cls")).or(names.bos);
                names.sep = names.sep.or(first("sep")).or(names.eos);
            }
            Some("TemplateProcessing") => self.read_template(processor, names),
            _ => {}
        }
    }

    /// Texts begin with BOS and end with EOS if the template does so.
    fn read_template<'a>(&mut self, processor: &'a Json, names: &mut Names<'a>) {
        let steps = |key: &str| processor.get(key).and_then(Json::as_array).map_or(&[][..], |list| list);
        let special = |step: &'a Json| step.pointer("/SpecialToken/id").and_then(Json::as_str);
        let (mut first, mut last) = (None, None);
        if let [start, .., end] = steps("single") {
            first = special(start);
            last = special(end);
        }
        if let Some(token) = first {
            names.bos = names.bos.or(first);
            names.cls = names.cls.or(first.filter(|_| names.bos != first || is_object(names.config, "bos_token")));
            self.set_added("bos", names.bos == Some(token) || names.cls == Some(token));
        }
        if let Some(token) = last {
            // An EOS that is spelled as an object counts as another one, as in the converter; it does no harm.
            if names.eos != Some(token) || is_object(names.config, "eos_token") {
                names.eot = names.eos;
                names.eos = last;
            }
            self.set_added("eos", true);
        }
        let pair = steps("pair");
        let pair = if first.is_some() && pair.first().and_then(special) == first { &pair[1..] } else { pair };
        let pair = if last.is_some() && pair.last().and_then(special) == last { &pair[..pair.len() - 1] } else { pair };
        let sequence = |step: &'a Json| step.pointer("/Sequence/id").and_then(Json::as_str);
        if let [a, between @ .., b] = pair
            && !between.is_empty()
            && (sequence(a), sequence(b)) == (Some("A"), Some("B"))
        {
            let separates =
                |step: &'a Json| special(step).is_some_and(|t| names.sep == Some(t) || names.eos == Some(t));
            let add = separates(&between[0]) && last.is_none() || between.len() == 2 && separates(&between[1]);
            self.set_added("sep", add);
            if add {
                names.sep = names.sep.or(names.eos);
            }
        }
    }

    fn read_ids(&mut self, names: &Names, tokenizer: &Json, config: &Json, rows: usize) {
        let inside = |id: u64| u32::try_from(id).ok().filter(|id| (*id as usize) < rows);
        let tokens = tokenizer.get("added_tokens").and_then(Json::as_array);
        let id_of = |text: &str| {
            let same = |token: &&Json| token.get("content").and_then(Json::as_str) == Some(text);
            tokens?.iter().find(same)?.get("id")?.as_u64().and_then(inside)
        };
        let extra = |kind: &str| kind != "eot" && kind != "eom";
        for (kind, _) in KINDS {
            if let Some(add) = names.config.get(format!("add_{kind}_token")).and_then(Json::as_bool) {
                self.default_added(kind, add);
            }
            let text = match kind {
                "bos" => names.bos,
                "eos" => names.eos,
                "sep" => names.sep,
                "cls" => names.cls,
                "eot" => names.eot,
                "eom" => None,
                other => token_text(names.config, &format!("{other}_token")),
            };
            if let Some(id) = text.and_then(id_of) {
                self.ids.push((kind, id));
            }
        }
        for (kind, _) in KINDS.into_iter().filter(|(kind, _)| extra(kind)) {
            let key = format!("{kind}_token_id");
            let value = config.get(&key).filter(|v| !v.is_null());
            let value = value.or_else(|| config.get("text_config")?.get(&key));
            // Of several ends the first: a file without any would never stop.
            let id = value.and_then(|v| v.as_u64().or_else(|| v.get(0)?.as_u64())).and_then(inside);
            if let Some(id) = id.filter(|_| self.id(kind).is_none()) {
                self.ids.push((kind, id));
            }
        }
    }

    /// Writes ids, flags, templates and normalizer keys.
    pub fn write(self, metadata: &mut Metadata) {
        for (kind, id) in self.ids {
            if let Some((_, Some(name))) = KINDS.into_iter().find(|(k, _)| *k == kind) {
                metadata.set(format!("tokenizer.ggml.{name}_token_id"), id);
            }
        }
        for (kind, add) in self.added.into_iter().filter(|(kind, _)| ["bos", "eos", "sep"].contains(kind)) {
            metadata.set(format!("tokenizer.ggml.add_{kind}_token"), add);
        }
        let (default, named): (Vec<_>, Vec<_>) = self.templates.into_iter().partition(|(name, _)| name == "default");
        for (name, source) in &named {
            metadata.set(format!("tokenizer.chat_template.{name}"), source.as_str());
        }
        if !named.is_empty() {
            metadata.set("tokenizer.chat_templates", named.into_iter().map(|(name, _)| name).collect::<Vec<_>>());
        }
        if let Some((_, source)) = default.into_iter().next() {
            metadata.set("tokenizer.chat_template", source);
        }
        for (key, value) in self.normalizer {
            metadata.set(format!("tokenizer.ggml.normalizer.{key}"), value);
        }
    }
}

fn is_object(config: &Json, key: &str) -> bool {
    config.get(key).is_some_and(Json::is_object)
}

/// Chat templates by name, from the first place that has any: `chat_template.jinja` with
/// `additional_chat_templates/`, tokenizer_config.json, `chat_template.json`.
fn templates(checkpoint: &Checkpoint, config: &Json) -> Result<Vec<(String, String)>, CheckpointError> {
    if let Some(source) = checkpoint.side_text("chat_template.jinja")? {
        let mut all = vec![("default".to_owned(), source)];
        let more = std::fs::read_dir(checkpoint.dir().join("additional_chat_templates"));
        let mut files: Vec<String> =
            more.into_iter().flatten().filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
        files.sort();
        for file in files {
            if let Some(name) = file.strip_suffix(".jinja")
                && let Some(source) = checkpoint.side_text(&format!("additional_chat_templates/{file}"))?
            {
                all.push((key_name(name), source));
            }
        }
        return Ok(all);
    }
    let file = checkpoint.side_json("chat_template.json")?.unwrap_or_default();
    let stored = config.get("chat_template").filter(|v| !v.is_null()).or_else(|| file.get("chat_template"));
    let named = |entry: &Json| {
        let text = |key: &str| entry.get(key).and_then(Json::as_str);
        Some((key_name(text("name").filter(|n| !n.is_empty())?), text("template")?.to_owned()))
    };
    Ok(match stored {
        Some(Json::String(source)) => vec![("default".into(), source.clone())],
        Some(Json::Array(list)) => list.iter().filter_map(named).collect(),
        _ => Vec::new(),
    })
}

/// Names are parts of keys.
fn key_name(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect()
}
