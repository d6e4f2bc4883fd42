//! What a report says of a model: its name, form and files, and who loads it.

use std::path::Path;

use anyhow::{Context, Result};

use super::facts::Facts;
use crate::format::manifest::{FILE, Manifest, hash_files};
use crate::report::{ConsumerVerdict, Identity};

/// Looks at the model at `path` and hashes its files.
pub fn identity(path: &Path, name: &str) -> Result<(Identity, Vec<ConsumerVerdict>)> {
    let facts = super::look(path)?;
    let dir = if path.is_file() { path.parent().unwrap_or(Path::new(".")) } else { path };
    let names = if path.is_file() { facts.files.iter().map(|f| f.file.clone()).collect() } else { files(path)? };
    let mut files = hash_files(dir, &names)?;
    files.sort_by(|a, b| a.file.cmp(&b.file));
    let manifest = dir.join(FILE).exists().then(|| Manifest::read(dir)).transpose()?;
    let chosen_by = manifest.as_ref().and_then(|manifest| manifest.method()).map(Into::into);
    let options = manifest.map(|manifest| manifest.options);
    let consumers = facts.consumers.iter().flatten().map(|consumer| ConsumerVerdict {
        name: consumer.name.into(),
        title: consumer.title.into(),
        loads: consumer.loads,
        refusals: consumer.refusals.clone(),
    });
    let consumers = consumers.collect();
    let identity = Identity {
        name: name.into(),
        format: facts.layout.clone().unwrap_or_else(|| facts.format.into()),
        method: chosen_by,
        scheme: scheme(&facts),
        inputs: facts.inputs.clone().unwrap_or_default(),
        bits: facts.bits.map(|bits| bits as f64),
        family: facts.architecture.family.map(Into::into),
        sha256: Identity::digest(&files),
        files,
        options,
    };
    Ok((identity, consumers))
}

/// The scheme in words.
fn scheme(facts: &Facts) -> Option<String> {
    if facts.layout.as_deref() == Some("gguf") {
        return facts.variant.clone();
    }
    let mut parts = Vec::new();
    parts.extend(facts.bits.map(|bits| format!("{bits} bits")));
    parts.extend(facts.group_size.map(|size| match size {
        -1 => "a scale a channel".to_string(),
        size => format!("group size {size}"),
    }));
    parts.extend(facts.symmetric.map(|sym| if sym { "symmetric" } else { "asymmetric" }.to_string()));
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// The files right in a folder, hidden ones left out.
fn files(dir: &Path) -> Result<Vec<String>> {
    let failed = || format!("cannot list `{}`", dir.display());
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).with_context(failed)? {
        let entry = entry.with_context(failed)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.starts_with('.') && entry.path().is_file() {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}
