//! A table of a recipe as a command line: options have one definition, that of the command.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Arg, ArgAction, ArgMatches, CommandFactory, FromArgMatches};
use regex::Regex;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::recipe::{Reader, Source, unknown};
use crate::cli::args::{Cli, Command, DeviceArg};
use crate::report::thresholds::Thresholds;

/// The commands that make artifacts.
const METHODS: [&str; 6] = ["gptq", "rtn", "awq", "smoothquant", "fp8", "gguf"];

/// Options that are not a table's to set, and where they belong.
const ELSEWHERE: [(&str, &str); 11] = [
    ("model", "`[source]` names the model"),
    ("revision", "`[source]` names the revision"),
    ("out", "the recipe's `out` is the folder of all artifacts, and `name` that of this one in it"),
    ("overwrite", "artifacts of a recipe are replaced when something has changed"),
    ("resume", "an interrupted run goes on by itself"),
    ("json", "give it to `quantkit run`"),
    ("no_eval", "`[validate]` says what is measured"),
    ("eval_text", "`[validate]` has `texts`"),
    ("eval_windows", "`[validate]` has `windows`"),
    ("max_increase", "`[thresholds]` has `max_ppl_increase`"),
    ("help", "ask `quantkit METHOD --help`"),
];

/// One artifact, settled.
#[derive(Debug)]
pub struct Step {
    pub name: String,
    pub method: String,
    /// The folder or file to be.
    pub target: PathBuf,
    pub thresholds: Thresholds,
    /// Ready to run.
    pub command: Command,
    /// Every option that decides what is made, defaults included, as the command line has it.
    pub options: BTreeMap<String, Vec<String>>,
    /// Files that options name.
    pub files: BTreeMap<String, PathBuf>,
}

/// What all artifacts have in common.
pub struct Place<'a> {
    pub base: &'a Path,
    pub out: &'a Path,
    pub source: &'a Source,
    pub device: &'a DeviceArg,
}

/// Settles a table `[[artifact]]`.
pub fn step(reader: &Reader, value: &Spanned<DeValue<'_>>, place: &Place, everywhere: &Thresholds) -> Result<Step> {
    let DeValue::Table(table) = value.get_ref() else {
        return Err(reader.error(Some(value.span()), "write `[[artifact]]`, once for each"));
    };
    let text = |key: &str| match table.get(key) {
        Some(found) => reader.typed::<String>(found),
        None => Err(reader.error(Some(value.span()), format!("an `[[artifact]]` has no `{key}`"))),
    };
    let (name, method) = (text("name")?, text("method")?);
    let span = |key: &str| table.get(key).map(Spanned::span);
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.starts_with('.') || !name.chars().all(plain) || ["records", "reports"].contains(&&*name)
    {
        let why = format!("`{name}` is no name for an artifact: letters, digits, `-`, `_` and `.` make one");
        return Err(reader.error(span("name"), why));
    }
    if !METHODS.contains(&&*method) {
        return Err(reader.error(span("method"), unknown("method", &method, &METHODS)));
    }
    let own = table.get("thresholds").map(|value| reader.thresholds(value)).transpose()?.unwrap_or_default();
    let cli = Cli::command();
    let command = cli.find_subcommand(&method).context("a method is a command")?;
    let gguf = method == "gguf";
    let target = place.out.join(if gguf { format!("{name}.gguf") } else { name.clone() });

    let mut argv: Vec<String> = vec!["quantkit".into(), method.clone()];
    argv.extend(place.source.revision.iter().map(|revision| format!("--revision={revision}")));
    argv.push(format!("--out={}", target.display()));
    argv.push("--no-eval".into());
    if table.get("device").is_none() {
        argv.push(format!("--device={}", place.device));
    }
    let mut files = BTreeMap::new();
    for (key, value) in table {
        let key = key.get_ref().as_ref();
        if !["name", "method", "thresholds"].contains(&key) {
            let given = Given { reader, key, value, base: place.base };
            argv.extend(given.arguments(command, &mut files)?);
        }
    }
    // Last, so that a model is never taken for the value of an option.
    argv.extend(place.source.model.iter().flat_map(|model| ["--".to_string(), model.clone()]));
    let failed = |error: clap::Error| refused(reader, table, value, &error);
    let matches = Cli::command().try_get_matches_from(&argv).map_err(failed)?;
    let mut settled = Cli::from_arg_matches(&matches).map_err(failed)?.command;
    if let Some(output) = settled.output_mut() {
        (output.overwrite, output.resume_same) = (true, true);
    } else if let Command::Gguf(args) = &mut settled {
        args.overwrite = true;
    }
    let (_, chosen) = matches.subcommand().context("a method is a command")?;
    let options = options(command, chosen);
    Ok(Step { name, method, target, thresholds: own.or(everywhere.clone()), command: settled, options, files })
}

/// A key of a table with its value.
struct Given<'a, 'i> {
    reader: &'a Reader<'a>,
    key: &'a str,
    value: &'a Spanned<DeValue<'i>>,
    base: &'a Path,
}

/// The key that stands for an option.
fn key_of(arg: &Arg) -> Option<String> {
    arg.get_long().map(|long| long.replace('-', "_"))
}

/// Whether an option names a file to read.
fn is_file(arg: &Arg) -> bool {
    arg.get_value_names().into_iter().flatten().any(|name| name.contains("FILE"))
}

impl Given<'_, '_> {
    fn wrong(&self, why: impl std::fmt::Display) -> anyhow::Error {
        self.reader.error(Some(self.value.span()), why)
    }

    fn arguments(&self, command: &clap::Command, files: &mut BTreeMap<String, PathBuf>) -> Result<Vec<String>> {
        if let Some((_, why)) = ELSEWHERE.iter().find(|(key, _)| *key == self.key) {
            return Err(self.wrong(format!("`{}` is not set here: {why}", self.key)));
        }
        let Some(arg) = command.get_arguments().find(|arg| key_of(arg).as_deref() == Some(self.key)) else {
            let known: Vec<String> = command.get_arguments().filter_map(key_of).collect();
            let mut known: Vec<&str> = known.iter().map(String::as_str).collect();
            known.retain(|key| ELSEWHERE.iter().all(|(other, _)| other != key));
            return Err(self.wrong(unknown(&format!("option of `{}`", command.get_name()), self.key, &known)));
        };
        let long = self.key.replace('_', "-");
        let one = |value: &DeValue<'_>| match value {
            DeValue::String(text) => Ok(text.to_string()),
            DeValue::Integer(number) => Ok(number.to_string()),
            DeValue::Float(number) => Ok(number.to_string()),
            DeValue::Boolean(flag) => Ok(flag.to_string()),
            _ => Err(self.wrong(format!("`{}` takes a text or a number", self.key))),
        };
        match (arg.get_action(), self.value.get_ref()) {
            (ArgAction::SetTrue, DeValue::Boolean(flag)) => Ok(flag.then(|| format!("--{long}")).into_iter().collect()),
            (ArgAction::SetTrue, _) => Err(self.wrong(format!("`{}` takes true or false", self.key))),
            (ArgAction::Append, DeValue::Array(all)) => {
                all.iter().map(|value| Ok(format!("--{long}={}", one(value.get_ref())?))).collect()
            }
            (_, value) => {
                let mut text = one(value)?;
                if is_file(arg) && text != "auto" {
                    let path = self.base.join(&text);
                    if !path.is_file() {
                        return Err(self.wrong(format!("`{}`: `{}` is no file", self.key, path.display())));
                    }
                    text = path.to_string_lossy().into_owned();
                    files.insert(self.key.into(), path);
                }
                Ok(vec![format!("--{long}={text}")])
            }
        }
    }
}

/// What the command line said, with the key of the recipe and its line.
fn refused(reader: &Reader, table: &DeTable<'_>, value: &Spanned<DeValue<'_>>, error: &clap::Error) -> anyhow::Error {
    let text = error.to_string();
    let first = text.strip_prefix("error: ").unwrap_or(&text).split("\n\n").next().unwrap_or_default();
    let mut text = first.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut key = None;
    if let Ok(option) = Regex::new(r"'--([a-z0-9-]+)(?:[ =][^']*)?'") {
        key = option.captures(&text).map(|found| found[1].replace('-', "_"));
        let named = option.replace_all(&text, |found: &regex::Captures| format!("`{}`", found[1].replace('-', "_")));
        text = named.into_owned();
    }
    let span = key.and_then(|key| table.get(&*key)).map_or(value.span(), Spanned::span);
    reader.error(Some(span), text)
}

/// Every option by its key, as the command has taken it.
fn options(command: &clap::Command, matches: &ArgMatches) -> BTreeMap<String, Vec<String>> {
    let mut out = BTreeMap::new();
    for arg in command.get_arguments() {
        let Some(key) = key_of(arg).filter(|key| ELSEWHERE.iter().all(|(other, _)| other != key)) else { continue };
        let raw = matches.try_get_raw(arg.get_id().as_str()).ok().flatten();
        let values: Vec<String> = raw.into_iter().flatten().map(|v| v.to_string_lossy().into_owned()).collect();
        // Files count by what is in them.
        if (!values.is_empty() && !is_file(arg)) || values == ["auto"] {
            out.insert(key, values);
        }
    }
    out
}
