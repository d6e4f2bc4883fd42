//! Files beside the weights: what came along, and whether it says the same.

use serde_json::Value;

use super::Findings;
use crate::calibrate::corpus::Corpus;
use crate::checkpoint::{self, Checkpoint};
use crate::model::chat::templates::{DEFAULT, templates};
use crate::model::tokenizer::Tokenizer;

/// Where a chat template may stand, in the order in which it is believed.
const TEMPLATES: [&str; 3] = ["chat_template.jinja", "tokenizer_config.json", "chat_template.json"];

/// Files without which text is read in another way.
const TOKENIZERS: [&str; 6] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
];

/// Holds the artifact's side files against the reference's.
pub fn check(artifact: &Checkpoint, reference: &Checkpoint, findings: &mut Findings) {
    chat_template(artifact, reference, findings);
    tokenizer(artifact, reference, findings);
    // What a GGUF file holds in its own way has no files to compare.
    if artifact.is_assembled() || reference.is_assembled() {
        findings.otherwise("side.files", "side files live inside the GGUF file");
        return;
    }
    files(artifact, reference, findings);
}

fn chat_template(artifact: &Checkpoint, reference: &Checkpoint, findings: &mut Findings) {
    const ID: &str = "side.chat-template";
    let (own, wanted) = match (templates(artifact), templates(reference)) {
        (Ok(own), Ok(wanted)) => (own, wanted),
        (Err(why), _) | (_, Err(why)) => return findings.fail(ID, why.to_string()),
    };
    for template in &wanted {
        let (name, file) = (&template.name, &template.file);
        let which = if name == DEFAULT { String::new() } else { format!(" `{name}`") };
        let exact = own.iter().find(|found| found.name == *name);
        match exact.or_else(|| own.iter().find(|found| same_name(&found.name, name))) {
            None => findings.fail(
                ID,
                format!(
                    "the chat template{which} is lost: the reference has one in `{file}`, the artifact none in {}; copy \
                     `{file}`",
                    TEMPLATES.map(|file| format!("`{file}`")).join(", ")
                ),
            ),
            Some(found) if !found.writes_as(template) => findings.fail(
                ID,
                format!(
                    "the chat template{which} in the artifact's `{}` is not that in the reference's `{file}`: chats \
                     would be written in another way; copy `{file}`",
                    found.file
                ),
            ),
            Some(_) => {}
        }
    }
    for found in own.iter().filter(|found| !wanted.iter().any(|template| same_name(&template.name, &found.name))) {
        findings.warn(
            ID,
            format!("the artifact has a chat template `{}` in `{}`; the reference has none", found.name, found.file),
        );
    }
    match (own.first(), wanted.first()) {
        (Some(found), Some(_)) => {
            findings.otherwise(ID, format!("the chat template in `{}` is the reference's", found.file));
        }
        (Some(_), None) => {}
        (None, _) => findings.otherwise(ID, "neither has a chat template"),
    }
}

/// Names in a GGUF file are parts of keys: letters and digits, all else is replaced by `_`.
fn same_name(one: &str, other: &str) -> bool {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
    one.chars().map(plain).eq(other.chars().map(plain))
}

fn tokenizer(artifact: &Checkpoint, reference: &Checkpoint, findings: &mut Findings) {
    const ID: &str = "side.tokenizer";
    let text = |checkpoint: &Checkpoint| checkpoint.side_text("tokenizer.json").ok().flatten();
    match (text(artifact), text(reference)) {
        (_, None) => findings.otherwise(ID, "the reference has no `tokenizer.json`"),
        (None, Some(_)) => {
            findings.fail(ID, "`tokenizer.json` is missing: the reference has one; copy it");
        }
        (Some(own), Some(wanted)) if own == wanted => findings.otherwise(ID, "`tokenizer.json` is the reference's"),
        (Some(one), Some(other)) => match (Tokenizer::load(artifact), Tokenizer::load(reference)) {
            (Ok(own), Ok(wanted)) => same_tokens(&own, &wanted, [merges(&one), merges(&other)], findings),
            (Err(error), _) => findings.fail(ID, format!("the artifact's tokenizer cannot be read: {error}")),
            (_, Err(error)) => findings.warn(ID, format!("the reference's tokenizer cannot be read: {error}")),
        },
    }
}

/// Whether two tokenizers that are written differently have the same vocabulary and merges, and read the shipped texts
/// alike.
fn same_tokens(own: &Tokenizer, wanted: &Tokenizer, merges: [Option<Vec<String>>; 2], findings: &mut Findings) {
    const ID: &str = "side.tokenizer";
    const REMEDY: &str = "`tokenizer.json` is not the reference's";
    for id in 0..u32::try_from(wanted.rows()).unwrap_or(u32::MAX) {
        // A GGUF file gives names to ids that have none.
        let Some(there) = wanted.token(id) else { continue };
        let here = own.token(id);
        if here.as_deref() != Some(&*there) {
            let here = here.map_or("none".into(), |token| format!("{token:?}"));
            let message = format!("{REMEDY}: token {id} is {here}, there {there:?}; copy the reference's");
            return findings.fail(ID, message);
        }
    }
    if let [Some(one), Some(other)] = &merges
        && one != other
    {
        let at = one.iter().zip(other).take_while(|(a, b)| a == b).count();
        let told = |merges: &[String]| merges.get(at).map_or("none".into(), |merge| format!("{merge:?}"));
        let message = format!("{REMEDY}: merge {at} is {}, there {}; copy the reference's", told(one), told(other));
        return findings.fail(ID, message);
    }
    for corpus in [Corpus::heldout(), Corpus::heldout_science()] {
        let tokens = |tokenizer| corpus.first_text_tokens(tokenizer, usize::MAX);
        match (tokens(own), tokens(wanted)) {
            (Ok(one), Ok(other)) if one != other => {
                let at = one.iter().zip(&other).take_while(|(a, b)| a == b).count();
                let message = format!("{REMEDY}: token {at} of a text is another; copy the reference's");
                return findings.fail(ID, message);
            }
            (Err(error), _) => return findings.fail(ID, format!("the artifact's tokenizer fails: {error}")),
            _ => {}
        }
    }
    findings.otherwise(
        ID,
        "`tokenizer.json` is written differently; its vocabulary and merges are the reference's, and the shipped texts \
         become the same tokens",
    );
}

/// The merges of a BPE tokenizer, in order: older files write `a b`, newer `["a", "b"]`.
fn merges(tokenizer: &str) -> Option<Vec<String>> {
    let json: Value = serde_json::from_str(tokenizer).ok()?;
    let list = json.pointer("/model/merges")?.as_array()?;
    let one = |merge: &Value| match merge {
        Value::String(merge) => merge.clone(),
        Value::Array(parts) => parts.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" "),
        _ => String::new(),
    };
    Some(list.iter().map(one).collect())
}

fn files(artifact: &Checkpoint, reference: &Checkpoint, findings: &mut Findings) {
    const ID: &str = "side.files";
    let (own, wanted) = match (artifact.side_files(), reference.side_files()) {
        (Ok(own), Ok(wanted)) => (own, wanted),
        (Err(error), _) | (_, Err(error)) => return findings.fail(ID, error.to_string()),
    };
    let mut same = 0;
    for file in &wanted {
        let template = file.starts_with("chat_template.") || file.starts_with(&format!("{}/", checkpoint::TEMPLATES));
        let checked_elsewhere = file == "tokenizer.json" || template;
        if !own.contains(file) {
            if checked_elsewhere {
                continue;
            }
            let message = |what: &str| format!("`{file}` is missing: {what}; copy it from the reference");
            match file.as_str() {
                name if TOKENIZERS.contains(&name) => findings.fail(ID, message("it belongs to the tokenizer")),
                "generation_config.json" => {
                    findings.warn(ID, message("engines take sampling defaults and end-of-text tokens from it"));
                }
                name if name.ends_with(".py") => findings.warn(ID, message("it is code that the model needs")),
                name if name.ends_with(".json") => findings.warn(ID, message("it may belong to the model")),
                // Cards and licences.
                _ => {}
            }
            continue;
        }
        match differing(artifact, reference, file) {
            Ok(None) => same += 1,
            Ok(Some(_)) if checked_elsewhere => {}
            Ok(Some(what)) => findings.warn(ID, format!("`{file}` is not the reference's: {what}")),
            Err(why) => findings.fail(ID, why),
        }
    }
    findings.otherwise(ID, format!("{same} side files are the reference's"));
}

/// What differs in a file that both have. JSON may be written in any way.
fn differing(artifact: &Checkpoint, reference: &Checkpoint, file: &str) -> Result<Option<String>, String> {
    let bytes = |checkpoint: &Checkpoint| {
        let path = checkpoint.dir().join(file);
        std::fs::read(&path).map_err(|e| format!("cannot read `{}`: {e}", path.display()))
    };
    let (own, wanted) = (bytes(artifact)?, bytes(reference)?);
    if own == wanted {
        return Ok(None);
    }
    if !file.ends_with(".json") {
        return Ok(Some(format!("{} bytes that are not its {}", own.len(), wanted.len())));
    }
    let parse = |bytes: &[u8]| {
        serde_json::from_slice::<Value>(bytes).map_err(|e| format!("the artifact's `{file}` is not valid: {e}"))
    };
    let (own, wanted) = (parse(&own)?, parse(&wanted)?);
    let (Some(own), Some(wanted)) = (own.as_object(), wanted.as_object()) else {
        return Ok((own != wanted).then(|| "other values".into()));
    };
    let mut keys: Vec<&String> = own.keys().chain(wanted.keys()).filter(|key| *key != "chat_template").collect();
    keys.retain(|key| own.get(*key) != wanted.get(*key));
    keys.sort();
    keys.dedup();
    Ok((!keys.is_empty()).then(|| {
        let named: Vec<String> = keys.iter().map(|key| format!("`{key}`")).collect();
        format!("{} differ", named.join(", "))
    }))
}
