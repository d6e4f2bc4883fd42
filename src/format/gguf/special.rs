//! Special tokens, whether texts begin and end with them, and chat templates, as llama.cpp's converter reads them
//! from tokenizer.json, tokenizer_config.json and config.json (gguf-py, `SpecialVocab`).

use serde_json::Value as Json;

use super::value::Metadata;
use crate::checkpoint::{Checkpoint, CheckpointError, JsonKeys, KeyError, whole};
use crate::model::chat::ChatError;
use crate::model::chat::templates::{DEFAULT, NamedTemplate, templates};

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
    templates: Vec<NamedTemplate>,
    normalizer: Vec<(&'static str, bool)>,
}

/// What the files call the special tokens that the post-processor may change.
struct Names<'a> {
    config: &'a JsonKeys<'a>,
    bos: Option<&'a str>,
    eos: Option<&'a str>,
    sep: Option<&'a str>,
    cls: Option<&'a str>,
    /// The end of a text as tokenizer_config.json has it, when the post-processor ends texts otherwise.
    eot: Option<&'a str>,
}

impl Special {
    /// Reads the files of a model. Ids beyond `rows` are left out.
    pub fn read(checkpoint: &Checkpoint, tokenizer: &JsonKeys, rows: usize) -> Result<Self, ChatError> {
        let mut special = Self { templates: templates(checkpoint)?, ..Self::default() };
        special.read_files(checkpoint, tokenizer, rows)?;
        Ok(special)
    }

    fn read_files(
        &mut self,
        checkpoint: &Checkpoint,
        tokenizer: &JsonKeys,
        rows: usize,
    ) -> Result<(), CheckpointError> {
        let config = checkpoint.side("tokenizer_config.json")?;
        let config = config.keys();
        if let Some(normalizer) = tokenizer.get("normalizer") {
            self.read_normalizer(normalizer);
        }
        let text = |key| Ok::<_, KeyError>(config.token(key)?.filter(|text| !text.is_empty()));
        let (cls, sep) = (text("cls_token")?, text("sep_token")?);
        let mut names = Names {
            config: &config,
            bos: text("bos_token")?.or(cls),
            eos: text("eos_token")?.or(sep),
            sep,
            cls,
            eot: None,
        };
        if let Some(post) = tokenizer.get("post_processor") {
            match post.get("processors").and_then(Json::as_array) {
                Some(list) => list.iter().for_each(|p| self.read_post_processor(p, &mut names)),
                None => self.read_post_processor(post, &mut names),
            }
        }
        Ok(self.read_ids(&names, tokenizer, &checkpoint.keys(), rows)?)
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

    fn read_ids(
        &mut self,
        names: &Names,
        tokenizer: &JsonKeys,
        config: &JsonKeys,
        rows: usize,
    ) -> Result<(), KeyError> {
        let inside = |id: i64| u32::try_from(id).ok().filter(|id| (*id as usize) < rows);
        let tokens = tokenizer.list("added_tokens")?;
        let id_of = |text: &str| {
            let same = |token: &&Json| token.get("content").and_then(Json::as_str) == Some(text);
            whole(tokens?.iter().find(same)?.get("id")?).and_then(inside)
        };
        let extra = |kind: &str| kind != "eot" && kind != "eom";
        for (kind, _) in KINDS {
            if let Some(add) = names.config.given_flag(&format!("add_{kind}_token"))? {
                self.default_added(kind, add);
            }
            let text = match kind {
                "bos" => names.bos,
                "eos" => names.eos,
                "sep" => names.sep,
                "cls" => names.cls,
                "eot" => names.eot,
                "eom" => None,
                other => names.config.token(&format!("{other}_token"))?,
            };
            if let Some(id) = text.and_then(id_of) {
                self.ids.push((kind, id));
            }
        }
        let text_config = config.object("text_config")?;
        for (kind, _) in KINDS.into_iter().filter(|(kind, _)| extra(kind)) {
            let key = format!("{kind}_token_id");
            let level = text_config.as_ref().filter(|_| config.get(&key).is_none()).unwrap_or(config);
            // Of several ends the first: a file without any would never stop. `write_ends` adds the others.
            let id = level.ids(&key)?.first().copied().and_then(inside);
            if let Some(id) = id.filter(|_| self.id(kind).is_none()) {
                self.ids.push((kind, id));
            }
        }
        Ok(())
    }

    /// Writes ids, flags, templates and normalizer keys. Returns what the user should know.
    pub fn write(self, metadata: &mut Metadata) -> Vec<String> {
        for (kind, id) in self.ids {
            if let Some((_, Some(name))) = KINDS.into_iter().find(|(k, _)| *k == kind) {
                metadata.set(format!("tokenizer.ggml.{name}_token_id"), id);
            }
        }
        for (kind, add) in self.added.into_iter().filter(|(kind, _)| ["bos", "eos", "sep"].contains(kind)) {
            metadata.set(format!("tokenizer.ggml.add_{kind}_token"), add);
        }
        let warnings = write_templates(metadata, &self.templates);
        for (key, value) in self.normalizer {
            metadata.set(format!("tokenizer.ggml.normalizer.{key}"), value);
        }
        warnings
    }
}

fn is_object(config: &JsonKeys, key: &str) -> bool {
    config.get(key).is_some_and(Json::is_object)
}

/// Writes all templates but the default one under their names, then the list of these names, then the default one, as
/// gguf-py's `add_chat_template` does.
fn write_templates(metadata: &mut Metadata, all: &[NamedTemplate]) -> Vec<String> {
    let (mut names, mut warnings): (Vec<String>, Vec<String>) = Default::default();
    for template in all.iter().filter(|template| template.name != DEFAULT) {
        let name = key_name(&template.name);
        if names.contains(&name) || name == DEFAULT {
            warnings.push(format!(
                "the chat template `{}` is left out: in GGUF its name is `{name}`, which another template has",
                template.name
            ));
            continue;
        }
        metadata.set(format!("{TEMPLATE_KEY}.{name}"), &*template.source);
        names.push(name);
    }
    if !names.is_empty() {
        metadata.set(TEMPLATES_KEY, names);
    }
    if let Some(default) = all.iter().find(|template| template.name == DEFAULT) {
        metadata.set(TEMPLATE_KEY, &*default.source);
    }
    warnings
}

/// The key of the default chat template; with `.NAME` behind it, that of another one.
pub(super) const TEMPLATE_KEY: &str = "tokenizer.chat_template";
/// The key of the names of all other chat templates.
pub(super) const TEMPLATES_KEY: &str = "tokenizer.chat_templates";

/// Names are parts of keys.
fn key_name(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect()
}
