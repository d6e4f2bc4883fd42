//! `general.*`: what a model is called, where it comes from and how to sample from it, from its model card, its
//! folder's name and `generation_config.json`. The rules are those of llama.cpp's converter (gguf-py,
//! `metadata.py`). None of it matters to the mathematics: what a card does not say plainly is left out.

use std::collections::BTreeMap;

use regex::Regex;

use super::value::{Metadata, Value};
use crate::checkpoint::{JsonKeys, KeyError, whole};

/// A value of a card's front matter; other forms of YAML are passed over.
#[derive(Clone, Debug, PartialEq)]
enum Field {
    One(String),
    Many(Vec<String>),
}

impl Field {
    fn into_list(self) -> Vec<String> {
        match self {
            Field::One(text) => vec![text],
            Field::Many(list) => list,
        }
    }
}

/// The front matter of a model card, by key.
#[derive(Debug, Default)]
struct Card(BTreeMap<String, Field>);

impl Card {
    fn parse(text: &str) -> Self {
        let mut lines = text.lines();
        if lines.next() != Some("---") {
            return Self::default();
        }
        let mut fields = BTreeMap::new();
        let mut key: Option<String> = None;
        for line in lines.take_while(|line| *line != "---") {
            let plain = line.trim();
            if plain.is_empty() || plain.starts_with('#') {
                continue;
            }
            if let (Some(item), Some(key)) = (plain.strip_prefix("- "), &key) {
                // Items of nested lists and of lists of objects are not what these keys hold.
                let indent = line.len() - line.trim_start().len();
                if indent <= 2 && split_key(item).is_none() {
                    match fields.entry(key.clone()).or_insert(Field::Many(Vec::new())) {
                        Field::Many(list) => list.extend(scalar(item)),
                        Field::One(_) => {}
                    }
                }
                continue;
            }
            if line.starts_with([' ', '\t']) {
                continue;
            }
            let Some((name, value)) = split_key(line) else {
                key = None;
                continue;
            };
            key = Some(name.into());
            if let Some(inner) = value.strip_prefix('[').and_then(|v| v.strip_suffix(']')) {
                let items = split_list(inner).into_iter().filter_map(scalar).collect();
                fields.insert(name.to_owned(), Field::Many(items));
            } else if !value.starts_with(['{', '|', '>'])
                && let Some(text) = scalar(value)
            {
                fields.insert(name.to_owned(), Field::One(text));
            }
        }
        Self(fields)
    }

    fn text(&self, keys: &[&str]) -> Option<String> {
        keys.iter().find_map(|key| match self.0.get(*key)? {
            Field::One(text) => Some(text.clone()),
            Field::Many(_) => None,
        })
    }

    /// All values of several keys, or nothing if no key is there.
    fn list(&self, keys: &[&str]) -> Option<Vec<String>> {
        let found: Vec<_> = keys.iter().filter_map(|key| self.0.get(*key).cloned()).collect();
        if found.is_empty() { None } else { Some(found.into_iter().flat_map(Field::into_list).collect()) }
    }

    /// The values of the first of several keys.
    fn first_list(&self, keys: &[&str]) -> Option<Vec<String>> {
        keys.iter().find_map(|key| self.list(&[key]))
    }
}

/// `key: value`, or `key:`; not a URL or a quoted text.
fn split_key(line: &str) -> Option<(&str, &str)> {
    let (name, value) = line.split_once(": ").or_else(|| Some((line.trim_end().strip_suffix(':')?, "")))?;
    let named = !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || "_-".contains(c));
    named.then(|| (name, value.trim()))
}

/// A plain or quoted text, without a comment behind it; nothing for null.
fn scalar(text: &str) -> Option<String> {
    let text = text.trim();
    if text.starts_with('"') {
        // YAML's escapes are JSON's, and more that cards do not use.
        return serde_json::Deserializer::from_str(text).into_iter::<String>().next()?.ok();
    }
    if let Some(rest) = text.strip_prefix('\'') {
        return rest.rsplit_once('\'').map(|(inner, _)| inner.replace("''", "'"));
    }
    let text = text.split(" #").next().unwrap_or_default().trim();
    (!matches!(text, "" | "~" | "null")).then(|| text.to_owned())
}

/// The parts of `a, "b, c"`.
fn split_list(text: &str) -> Vec<&str> {
    let (mut parts, mut start, mut quote) = (Vec::new(), 0, None);
    for (at, c) in text.char_indices() {
        match (c, quote) {
            (',', None) => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            ('"' | '\'', None) => quote = Some(c),
            (c, Some(open)) if c == open => quote = None,
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}

/// The parts of a model's name, as Hugging Face names are built: `org/Base-1.5-7B-Instruct-v2`.
#[derive(Clone, Debug, Default, PartialEq)]
struct Name {
    full: Option<String>,
    organization: Option<String>,
    basename: Option<String>,
    finetune: Option<String>,
    version: Option<String>,
    size: Option<String>,
}

#[derive(Default)]
struct Marks {
    base: bool,
    size: bool,
    finetune: bool,
    version: bool,
    stored_type: bool,
}

impl Marks {
    fn none(&self) -> bool {
        !(self.base || self.size || self.finetune || self.version || self.stored_type)
    }
}

fn matches(pattern: &str, text: &str) -> bool {
    Regex::new(&format!("(?i)^(?:{pattern})$")).is_ok_and(|r| r.is_match(text))
}

impl Name {
    /// `parameters` tells a size (`7B`) from a length of context (`128k`).
    fn parse(id: &str, parameters: u64) -> Self {
        if id.contains(' ') {
            return Self { full: Some(id.into()), ..Self::default() };
        }
        let (organization, full) = match id.split_once('/') {
            Some((org, name)) => (Some(org).filter(|o| !o.starts_with('.')), name),
            None => (None, id),
        };
        let mut parts: Vec<(String, Marks)> =
            full.split('-').filter(|p| !p.is_empty()).map(|p| (p.to_owned(), Marks::default())).collect();
        for (at, (part, marks)) in parts.iter_mut().enumerate() {
            annotate(at, part, marks, parameters);
        }
        // `small` and `mini` are no sizes beside a number.
        if parts.iter().any(|(part, marks)| marks.size && part.contains(|c: char| c.is_ascii_digit())) {
            for (part, marks) in &mut parts {
                marks.size &= !part.chars().all(char::is_alphabetic);
            }
        }
        let mut at_start = true;
        for (part, marks) in &mut parts {
            if at_start && (marks.version || marks.none() && part.starts_with(char::is_alphabetic)) {
                marks.base = true;
            } else {
                at_start = false;
                marks.finetune |= marks.none();
            }
        }
        for (_, marks) in parts.iter_mut().rev() {
            if !(marks.base && (marks.size || marks.finetune || marks.version || marks.stored_type)) {
                break;
            }
            marks.base = false;
        }
        let join = |wanted: fn(&Marks) -> bool| -> Option<String> {
            let chosen: Vec<&str> = parts.iter().filter(|(_, m)| wanted(m)).map(|(p, _)| &**p).collect();
            (!chosen.is_empty()).then(|| chosen.join("-"))
        };
        let mut sizes: Vec<&str> = Vec::new();
        for (part, marks) in &parts {
            if marks.size && !sizes.contains(&&**part) {
                sizes.push(part);
            }
        }
        let size = (!sizes.is_empty()).then(|| sizes.join("-"));
        let finetune = join(|m| m.finetune);
        let version = join(|m| m.version && !m.base);
        // A bare word may be anything.
        let clear = size.is_some() || finetune.is_some() || version.is_some();
        let basename = join(|m| m.base).filter(|_| clear);
        Self {
            full: Some(full.into()),
            organization: organization.map(str::to_owned),
            basename,
            finetune,
            version,
            size,
        }
    }
}

fn annotate(at: usize, part: &mut String, marks: &mut Marks, parameters: u64) {
    if matches(r"(v|iter)?\d+([.]\d+)*", part) {
        marks.version = true;
    } else if matches(r"i?q\d(_\w)*|b?fp?(16|32)", part) {
        marks.stored_type = true;
        *part = part.to_uppercase();
    } else if at > 0 && matches(r"(A|\d+x)?\d+([._]\d+)?[KMBT]\d?|small|mini|medium|large|x?xl", part) {
        let mut size: Vec<char> = part.replace('_', ".").chars().collect();
        // `7b1` is 7.1B.
        if let [.., unit, last] = *size
            && last.is_ascii_digit()
        {
            size.truncate(size.len() - 2);
            size.extend(['.', last, unit]);
        }
        let last = size.len() - 1;
        if last > 0 && size[last - 1].is_ascii_digit() && "kmbt".contains(size[last]) {
            size[last].make_ascii_uppercase();
        }
        let number: Option<f64> = size[..last].iter().collect::<String>().parse().ok();
        if let (Some(number), Some(unit)) = (number, "KMBT".find(size[last]))
            && parameters > 0
        {
            let stated = number * 1000f64.powi(unit as i32 + 1);
            if (stated - parameters as f64).abs() > (7 * parameters / 8) as f64 {
                marks.finetune = true;
                size[last].make_ascii_lowercase();
            }
        }
        marks.size = marks.none();
        *part = size.into_iter().collect();
    } else if at > 0 && matches("chat|instruct|vision|lora", part) {
        marks.finetune = true;
    }
}

/// `some-model-v2` as `Some Model v2`.
fn title(text: &str) -> String {
    let plain = |word: &str| {
        let lower = word.chars().any(char::is_lowercase) && !word.chars().any(char::is_uppercase);
        !lower || matches_case(r"v\d+(?:\.\d+)*|\d.*", word)
    };
    let capital = |word: &str| {
        let mut inside = false;
        let each = |c: char| {
            let cased = if inside || !c.is_alphabetic() { c.to_string() } else { c.to_uppercase().collect() };
            inside = c.is_alphabetic();
            cased
        };
        word.chars().map(each).collect::<String>()
    };
    let words = text.replace('-', " ");
    words.split_whitespace().map(|w| if plain(w) { w.to_owned() } else { capital(w) }).collect::<Vec<_>>().join(" ")
}

pub(super) fn matches_case(pattern: &str, text: &str) -> bool {
    Regex::new(&format!("^(?:{pattern})$")).is_ok_and(|r| r.is_match(text))
}

/// Parameters in two digits or more: `135M`, `1.5B`.
pub(super) fn size_label(parameters: u64) -> String {
    let count = parameters as f64;
    let (scaled, unit) = match count {
        n if n > 1e12 => (n * 1e-12, "T"),
        n if n > 1e9 => (n * 1e-9, "B"),
        n if n > 1e6 => (n * 1e-6, "M"),
        n => (n * 1e-3, "K"),
    };
    let digits = scaled.round_ties_even().to_string().trim_start_matches('0').len();
    format!("{scaled:.*}{unit}", 2usize.saturating_sub(digits))
}

/// Recommended sampling, from the keys of `generation_config.json`.
pub(super) fn write_sampling(metadata: &mut Metadata, generation: &JsonKeys) -> Result<(), KeyError> {
    if let Some(sequence) = generation.text("sequence")? {
        metadata.set("general.sampling.sequence", sequence);
    }
    const NUMBERS: [(&str, &[&str], bool); 11] = [
        ("top_k", &["top_k"], true),
        ("top_p", &["top_p"], false),
        ("min_p", &["min_p"], false),
        ("xtc_probability", &["xtc_probability"], false),
        ("xtc_threshold", &["xtc_threshold"], false),
        ("temp", &["temperature"], false),
        ("penalty_last_n", &["penalty_last_n"], true),
        ("penalty_repeat", &["penalty_repeat", "repetition_penalty"], false),
        ("mirostat", &["mirostat"], true),
        ("mirostat_tau", &["mirostat_tau"], false),
        ("mirostat_eta", &["mirostat_eta"], false),
    ];
    for (name, keys, is_whole) in NUMBERS {
        let Some(key) = keys.iter().find(|key| generation.get(key).is_some()) else { continue };
        let value = if is_whole {
            let wanted = "a whole number of 32 bits is needed";
            generation.read(key, wanted, |v| i32::try_from(whole(v)?).ok())?.map(Value::I32)
        } else {
            generation.number(key)?.map(|n| Value::F32(n as f32))
        };
        if let Some(value) = value {
            metadata.set(format!("general.sampling.{name}"), value);
        }
    }
    Ok(())
}

/// Name, origin, licence, tags. `card` is the text of README.md, `path` what config.json names as
/// `_name_or_path`, `folder` the name of the model's folder.
pub(super) fn write_origin(
    metadata: &mut Metadata,
    card: Option<&str>,
    path: Option<&str>,
    folder: &str,
    parameters: u64,
) {
    let card = Card::parse(card.unwrap_or_default());
    // Paths of the machine that saved the model say nothing.
    let path = path.filter(|path| !path.is_empty() && path.matches('/').count() <= 1);
    let names: Vec<Name> = path.into_iter().chain([folder]).map(|id| Name::parse(id, parameters)).collect();
    let from_name =
        |part: fn(&Name) -> &Option<String>| names.iter().find_map(|name| part(name).clone().filter(|t| !t.is_empty()));
    // An empty text in a card says that there is none, whatever the folder is called.
    let mut set = |key: &str, value: Option<String>| {
        if let Some(text) = value.filter(|text| !text.is_empty()) {
            metadata.set(format!("general.{key}"), text);
        }
    };
    set("name", card.text(&["name", "model_name"]).or_else(|| from_name(|n| &n.full).map(|n| title(&n))));
    set("author", card.text(&["author", "model_author", "model_creator"]));
    set("version", card.text(&["version", "model_version"]).or_else(|| from_name(|n| &n.version)));
    let organization = || from_name(|n| &n.organization).map(|n| title(&n));
    set("organization", card.text(&["organization", "model_organization"]).or_else(organization));
    set("finetune", card.text(&["finetune", "model_finetune"]).or_else(|| from_name(|n| &n.finetune)));
    set("basename", card.text(&["basename", "model_basename", "model_type"]).or_else(|| from_name(|n| &n.basename)));
    set("description", card.text(&["description", "model_description"]));
    let size = card.text(&["size_label", "model_size_label"]).or_else(|| from_name(|n| &n.size));
    set("size_label", size.or_else(|| (parameters > 0).then(|| size_label(parameters))));
    set("license", card.list(&["license"]).map(|all| all.join(",")));
    set("license.name", card.text(&["license_name"]));
    set("license.link", card.text(&["license_link"]));
    set("source.url", card.text(&["url", "model_url"]));
    set("source.doi", card.text(&["doi", "model_doi"]));
    set("source.uuid", card.text(&["uuid", "model_uuid"]));
    set("source.repo_url", card.text(&["repo_url", "model_repo_url"]));
    let ancestors = [
        ("base_model", card.first_list(&["base_model", "base_models", "base_model_sources"])),
        ("dataset", card.first_list(&["datasets", "dataset", "dataset_sources"])),
    ];
    for (kind, ids) in ancestors {
        let Some(ids) = ids else { continue };
        metadata.set(format!("general.{kind}.count"), ids.len() as u32);
        for (at, id) in ids.iter().enumerate() {
            write_ancestor(metadata, &format!("general.{kind}.{at}"), id, parameters);
        }
    }
    for (key, keys) in [("tags", ["tags", "pipeline_tag"]), ("languages", ["languages", "language"])] {
        if let Some(list) = card.list(&keys) {
            metadata.set(format!("general.{key}"), list);
        }
    }
}

/// A model or data set that this one came from: a hub id or an address.
pub(super) fn write_ancestor(metadata: &mut Metadata, prefix: &str, id: &str, parameters: u64) {
    let address = ["http://", "https://", "ssh://"].iter().any(|start| id.starts_with(start));
    let hub = id.strip_prefix("https://huggingface.co/").or_else(|| id.strip_prefix("http://huggingface.co/"));
    let named = if address { hub.filter(|id| id.matches('/').count() == 1) } else { Some(id) };
    let name = named.map(|id| Name::parse(id, parameters)).unwrap_or_default();
    let mut set = |key: &str, value: Option<String>| {
        if let Some(text) = value {
            metadata.set(format!("{prefix}.{key}"), text);
        }
    };
    set("name", name.full.as_deref().map(title));
    set("version", name.version);
    set("organization", name.organization.as_deref().map(title));
    let from_id = || Some(format!("https://huggingface.co/{}/{}", name.organization?, name.full?));
    set("repo_url", if address { Some(id.to_owned()) } else { from_id() });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(id: &str, parameters: u64) -> [Option<String>; 4] {
        let name = Name::parse(id, parameters);
        [name.basename, name.finetune, name.version, name.size]
    }

    fn some<const N: usize>(wanted: [&str; N]) -> [Option<String>; N] {
        wanted.map(|text| (!text.is_empty()).then(|| text.to_owned()))
    }

    #[test]
    fn names_come_apart() {
        let seven = 7_000_000_000;
        assert_eq!(parts("meta-llama/Llama-3.1-8B-Instruct", seven), some(["Llama-3.1", "Instruct", "", "8B"]));
        assert_eq!(parts("Mistral-7B-Instruct-v0.2", seven), some(["Mistral", "Instruct", "v0.2", "7B"]));
        assert_eq!(parts("Phi-3-mini-4k-instruct", 3_800_000_000), some(["Phi-3", "4k-instruct", "", "mini"]));
        assert_eq!(parts("bloom-7b1", seven), some(["bloom", "", "", "7.1B"]));
        assert_eq!(parts("smollm2", 134_515_008), some(["", "", "", ""]));
        assert_eq!(parts("Some name", seven), some(["", "", "", ""]));
    }

    #[test]
    fn titles_and_sizes() {
        assert_eq!(title("some-model-v0.2-7b-GGUF"), "Some Model v0.2 7b GGUF");
        assert_eq!(size_label(134_515_008), "135M");
        assert_eq!(size_label(1_543_714_304), "1.5B");
        assert_eq!(size_label(70_400), "70K");
    }

    #[test]
    fn odd_front_matter_is_passed_over() {
        let card =
            Card::parse("---\nlicense: mit # free\nlist:\n  - a\n  - 'b: c'\n  - x: y\nmore: |\n  text\n: no\n---\n");
        assert_eq!(card.text(&["license"]), Some("mit".into()));
        assert_eq!(card.list(&["list"]), Some(vec!["a".into(), "b: c".into()]));
        assert_eq!(card.text(&["more"]), None);
        assert!(Card::parse("no front matter").0.is_empty());
        assert!(Card::parse("---\n\"").0.is_empty());
    }
}
