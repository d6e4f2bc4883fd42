//! The way back from `general.*` to a model card: README.md of which [`super::card`] makes the same keys again.

use super::card::matches_case;
use super::value::{Metadata, MetadataError};

/// Keys of texts, and what a card calls them.
const TEXTS: [(&str, &str); 14] = [
    ("license", "license"),
    ("license.name", "license_name"),
    ("license.link", "license_link"),
    ("name", "name"),
    ("author", "author"),
    ("version", "version"),
    ("organization", "organization"),
    ("finetune", "finetune"),
    ("basename", "basename"),
    ("description", "description"),
    ("size_label", "size_label"),
    ("source.url", "url"),
    ("source.doi", "doi"),
    ("source.uuid", "uuid"),
];
/// Keys that are otherwise taken from the name of a folder.
const OF_NAME: [&str; 4] = ["version", "organization", "finetune", "basename"];

/// The model card (README.md) that says what the keys `general.*` say, such that a file made of the folder says the
/// same; nothing where there are no such keys. Keys that cannot be read are left out with a warning.
pub(super) fn readme(metadata: &Metadata, warnings: &mut Vec<String>) -> Option<String> {
    let mut lines = Vec::new();
    let mut unread = |error: MetadataError| warnings.push(format!("{error}; it is left out of README.md"));
    let repository = ("source.repo_url", "repo_url");
    for (key, name) in TEXTS.into_iter().chain([repository]) {
        match metadata.read::<&str>(&format!("general.{key}")) {
            Ok(Some(text)) => lines.push(format!("{name}: {}", yaml(text))),
            Ok(None) if OF_NAME.contains(&key) => lines.push(format!("{name}: \"\"")),
            Ok(None) => {}
            Err(error) => unread(error),
        }
    }
    for (key, name) in [("tags", "tags"), ("languages", "language")] {
        match metadata.read::<Vec<&str>>(&format!("general.{key}")) {
            Ok(list) => lines.extend(list.map(|all| listed(name, &all))),
            Err(error) => unread(error),
        }
    }
    for (key, name) in [("base_model", "base_model"), ("dataset", "datasets")] {
        match ancestors(metadata, key) {
            Ok(ids) if ids.is_empty() => {}
            Ok(ids) => lines.push(listed(name, &ids)),
            Err(error) => unread(error),
        }
    }
    if lines.len() == OF_NAME.len() && lines.iter().all(|line| line.ends_with(" \"\"")) {
        return None;
    }
    let title = metadata.read::<&str>("general.name").ok().flatten().unwrap_or("Model");
    Some(format!("---\n{}\n---\n\n# {}\n", lines.join("\n"), title.replace(['\n', '\r'], " ")))
}

/// A list of YAML.
fn listed<S: AsRef<str>>(name: &str, all: &[S]) -> String {
    let items = all.iter().map(|item| format!("\n- {}", yaml(item.as_ref())));
    format!("{name}:{}", items.collect::<String>())
}

/// Hub ids or addresses of what a model came from.
fn ancestors(metadata: &Metadata, kind: &str) -> Result<Vec<String>, MetadataError> {
    let count = metadata.read::<u32>(&format!("general.{kind}.count"))?.unwrap_or(0);
    let mut ids = Vec::new();
    for at in 0..count.min(MOST_ANCESTORS) {
        let text = |key: &str| metadata.read::<&str>(&format!("general.{kind}.{at}.{key}"));
        let plain = |text: &str| text.replace(' ', "-");
        let id = match (text("repo_url")?, text("organization")?, text("name")?) {
            (Some(address), ..) => Some(address.strip_prefix(HUB).unwrap_or(address).to_owned()),
            (None, Some(organization), Some(name)) => Some(format!("{}/{}", plain(organization), plain(name))),
            (None, None, Some(name)) => Some(plain(name)),
            (None, _, None) => None,
        };
        ids.extend(id);
    }
    Ok(ids)
}

const HUB: &str = "https://huggingface.co/";
/// More than any card names.
const MOST_ANCESTORS: u32 = 1000;

/// A text as YAML: plain where no reader can take it for anything else.
fn yaml(text: &str) -> String {
    let word = |word: &str| matches!(&*word.to_lowercase(), "true" | "false" | "null" | "yes" | "no" | "on" | "off");
    let plain = matches_case(r"[A-Za-z][\w./+-]*(?: [\w./+-]+)*", text) && !word(text);
    if plain { text.to_owned() } else { serde_json::Value::from(text).to_string() }
}

#[cfg(test)]
mod tests {
    use super::super::card::{write_ancestor, write_origin};
    use super::*;

    /// A card that is made of metadata gives the same metadata, whatever the folder is called.
    #[test]
    fn cards_say_what_metadata_said() {
        let mut wanted = Metadata::new();
        for (key, text) in [
            ("name", "Some \"Model\": v2"),
            ("author", "yes"),
            ("version", "v2"),
            ("organization", "Some Lab"),
            ("basename", "Some-Model"),
            ("description", "two\nlines # and more"),
            ("size_label", "3.7M"),
            ("license", "apache-2.0,mit"),
            ("license.name", "own"),
            ("license.link", "https://some.lab/LICENSE"),
            ("source.url", "https://some.lab"),
            ("source.repo_url", "https://huggingface.co/lab/model"),
        ] {
            wanted.set(format!("general.{key}"), text);
        }
        wanted.set("general.base_model.count", 2u32);
        write_ancestor(&mut wanted, "general.base_model.0", "lab/Base-7B-v1", 7_000_000_000);
        write_ancestor(&mut wanted, "general.base_model.1", "https://other.place/base", 7_000_000_000);
        wanted.set("general.tags", vec!["text-generation".to_owned(), "a: b".into(), "1".into()]);
        wanted.set("general.languages", vec!["en".to_owned(), "no".into()]);
        let mut warnings = Vec::new();
        let card = readme(&wanted, &mut warnings).unwrap_or_default();
        assert_eq!(warnings, [""; 0]);
        let mut found = Metadata::new();
        write_origin(&mut found, Some(&card), None, "other-7B-chat-v9", 7_000_000_000);
        assert_eq!(found, wanted, "{card}");

        wanted.set("general.license", 5u32);
        assert!(!readme(&wanted, &mut warnings).unwrap_or_default().contains("license: "));
        assert!(warnings[0].starts_with("the metadata key `general.license` is the u32 5;"), "{warnings:?}");
        assert_eq!(readme(&Metadata::new(), &mut warnings), None);
    }
}
