//! The house against the picture in `src/lib.rs`: who may import whom, where `unsafe` may stand, how long a
//! file may be; circles of files and doubled names of types. Sources are read as tokens, so comments, strings and the
//! layout of a `use` do not matter.

mod circles;
mod names;
mod tokens;

use std::path::{Path, PathBuf};

use tokens::{paths, tokens, without_tests};

/// The rooms, from the bottom up: each may use those of lower floors. A room that does not exist yet does no harm.
const FLOORS: &[&[&str]] = &[
    &["fault"],
    &["num", "scheme"],
    &["tensor"],
    &["backend", "checkpoint"],
    &["model"],
    &["calibrate"],
    &["quantize"],
    &["pack"],
    &["format"],
    &["engine"],
    &["evaluate", "integrity"],
    &["report", "hub"],
    &["recipe"],
    &["pipeline"],
    &["cli"],
    &["commands"],
    &["main"],
];

/// Rooms of one floor of which the first may use the second.
const BESIDE: &[(&str, &str)] = &[];

/// Lower rooms that are out of reach all the same.
const APART: &[(&[&str], &[&str])] = &[
    // Pure mathematics: nothing of files or models.
    (&["quantize", "pack"], &["checkpoint", "model", "calibrate"]),
    (&["format"], &["calibrate"]),
    // It runs what is on disk, however that was made.
    (&["engine"], &["calibrate", "quantize", "pack"]),
];

/// Rooms that may use no more than these.
const ONLY: &[(&str, &[&str])] = &[("hub", &["fault", "num"]), ("main", &["cli", "commands"])];

/// Rooms that may hold `unsafe`: vector instructions, devices, memory maps.
const UNSAFE: &[&str] = &["num", "backend", "checkpoint"];

const MAX_LINES: usize = 600;

fn floor(room: &str) -> Option<usize> {
    FLOORS.iter().position(|rooms| rooms.contains(&room))
}

/// The rooms that one may use, from the bottom up; `None` for one without a floor.
fn allowed(room: &str) -> Option<Vec<&'static str>> {
    let floor = floor(room)?;
    let lower = FLOORS[..floor].concat().into_iter();
    let beside = BESIDE.iter().filter(|(user, _)| *user == room).map(|(_, used)| *used);
    let apart = |name: &str| APART.iter().any(|(rooms, out)| rooms.contains(&room) && out.contains(&name));
    let only = ONLY.iter().find(|(name, _)| *name == room);
    let fine = |name: &&str| !apart(name) && only.is_none_or(|(_, rooms)| rooms.contains(name));
    Some(lower.chain(beside).filter(fine).collect())
}

/// `src/model/block.rs` is `["model", "block"]`, `src/model/mod.rs` is `["model"]`, `src/lib.rs` is `[]`.
fn module_path(path: &str) -> Vec<&str> {
    let inside = path.trim_start_matches("src/").trim_end_matches(".rs");
    let mut parts: Vec<&str> = inside.split('/').collect();
    parts.pop_if(|last| *last == "mod" || *last == "lib");
    parts
}

fn room(path: &str) -> &str {
    module_path(path).first().copied().unwrap_or("lib")
}

/// Imports of one file that run against the picture.
fn violations(path: &str, source: &str) -> Vec<String> {
    let module = module_path(path);
    let Some(&room) = module.first() else { return Vec::new() };
    let Some(allowed) = allowed(room) else {
        return vec![format!("{path}:1: room `{room}` has no floor in tests/it/architecture.rs")];
    };
    let fine = |name: &str| name == room || allowed.contains(&name);
    let tokens = without_tests(&tokens(source));
    let reached = paths(&module, &tokens).into_iter();
    let heads = reached.map(|(line, names)| (line, names.first().copied().unwrap_or("crate")));
    let wrong = heads.filter(|(_, name)| !fine(name));
    wrong
        .map(|(line, name)| match &allowed[..] {
            [] => format!("{path}:{line}: `crate::{name}`, but `{room}` may use no other room"),
            _ => format!("{path}:{line}: `crate::{name}`, but `{room}` may use only {}", allowed.join(", ")),
        })
        .collect()
}

/// Lines of one file with `unsafe` where none may stand.
fn misplaced_unsafe(path: &str, source: &str) -> Vec<String> {
    if UNSAFE.contains(&room(path)) {
        return Vec::new();
    }
    let found = tokens(source).into_iter().filter(|(_, token)| *token == "unsafe");
    found.map(|(line, _)| format!("{path}:{line}: `unsafe` may stand only in {}", UNSAFE.join(", "))).collect()
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Files below a folder of the repository: their names from the root, with `/`, and their text.
fn files(folder: &str) -> Vec<(String, String)> {
    fn walk(dir: &Path, out: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { walk(&path, out) } else { out.push(path) }
        }
    }
    let mut paths = Vec::new();
    if root().join(folder).is_dir() {
        walk(&root().join(folder), &mut paths);
    }
    paths.sort();
    let name = |path: &Path| path.strip_prefix(root()).unwrap().to_str().unwrap().replace('\\', "/");
    paths.iter().map(|path| (name(path), String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned())).collect()
}

fn rust_files() -> Vec<(String, String)> {
    let sources: Vec<_> = files("src").into_iter().filter(|(path, _)| path.ends_with(".rs")).collect();
    assert!(sources.iter().any(|(path, _)| path == "src/lib.rs"), "no sources found below {}", root().display());
    sources
}

fn check_all(check: fn(&str, &str) -> Vec<String>, rule: &str) {
    let wrong: Vec<String> = rust_files().iter().flat_map(|(path, source)| check(path, source)).collect();
    assert!(wrong.is_empty(), "{rule}\n{}", wrong.join("\n"));
}

#[test]
fn imports_follow_the_picture() {
    check_all(violations, "imports against the picture in src/lib.rs:");
}

#[test]
fn unsafe_has_its_rooms() {
    check_all(misplaced_unsafe, "`unsafe` out of place:");
}

#[test]
fn no_file_is_too_long() {
    let made = |path: &str| path.starts_with("kernels/ptx/") || path == "src/report/schema.json";
    let written = |(path, _): &(String, String)| !made(path);
    for (path, source) in files("src").into_iter().chain(files("kernels")).filter(written) {
        let lines = source.lines().count();
        assert!(lines <= MAX_LINES, "{path} has {lines} lines; at most {MAX_LINES} may be in one file");
    }
}

#[test]
fn every_room_is_in_the_picture() {
    let lib = std::fs::read_to_string(root().join("src/lib.rs")).unwrap();
    let picture = lib.split("```text").nth(1).and_then(|rest| rest.split("```").next());
    let picture = picture.expect("src/lib.rs has a block of text with the picture");
    let drawn: Vec<&str> = picture.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').collect();
    for (path, _) in rust_files() {
        let room = room(&path);
        assert!(["lib", "main"].contains(&room) || drawn.contains(&room), "{path}: `{room}` is not in the picture");
    }
    // The drawn flow and the table run the same way.
    let flow = picture.lines().find(|line| line.contains('►')).expect("the picture has a line of arrows");
    let flow: Vec<&str> = flow.split("─►").map(|name| name.trim_matches(|c: char| !c.is_alphanumeric())).collect();
    for pair in flow.windows(2) {
        let (left, right) = (floor(pair[0]), floor(pair[1]));
        assert!(left.is_some() && left < right, "`{}` must be lower than `{}`", pair[0], pair[1]);
    }
}

#[test]
fn the_floors_have_no_circle() {
    let rooms = FLOORS.concat();
    for (i, room) in rooms.iter().enumerate() {
        assert!(!rooms[..i].contains(room), "`{room}` is on two floors");
    }
    for (i, (user, used)) in BESIDE.iter().enumerate() {
        assert_eq!(floor(user), floor(used), "`{user}` and `{used}` are not on one floor");
        assert!(BESIDE[i..].iter().all(|(other, _)| other != used), "`{used}` must come before `{user}`");
    }
    let lower = |room: &str, name: &str| floor(name).is_some() && floor(name) < floor(room);
    for (room, out) in APART
        .iter()
        .flat_map(|(rooms, out)| rooms.iter().map(move |room| (room, out)))
        .chain(ONLY.iter().map(|(room, rooms)| (room, rooms)))
    {
        assert!(out.iter().all(|name| lower(room, name)), "`{room}`: {out:?} are not all lower");
    }
}

/// Line and name of each import that the checker refuses.
fn refused(path: &str, source: &str) -> Vec<(usize, String)> {
    let part =
        |text: &str, left: &str, right: &str| text.split_once(left).unwrap().1.split_once(right).unwrap().0.to_owned();
    let parse = |text: String| (part(&text, ".rs:", ":").parse().unwrap(), part(&text, "`crate::", "`"));
    violations(path, source).into_iter().map(parse).collect()
}

#[test]
fn the_checker_sees_bad_imports() {
    let bad = r##"//! use crate::report;
use crate::engine::generate;
use crate::{
    backend::{Backend, weight::Weight},
    cli, // crate::commands
    tensor::Tensor, evaluate::{self as e},
};
pub use super::super::hub;
use super::config;
fn f<'a>(x: &'a str) -> char {
    let text = "use crate::report; \" // ";
    let raw = r#"crate::report " "#; /* crate::report /* */ crate::report */
    crate::calibrate::driver::run(text, '"', '\'', 'é');
    crate::num::bits::read(raw)
}
mod inner {
    use super::super::super::pack;
    use super::super::config;
}
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::report;
    fn f(x: [u8; 3]) {}
}
#[cfg(test)]
use crate::report::Row;
use crate::format;
"##;
    let wanted =
        [(2, "engine"), (5, "cli"), (6, "evaluate"), (8, "hub"), (13, "calibrate"), (17, "pack"), (28, "format")];
    assert_eq!(refused("src/model/block.rs", bad), wanted.map(|(line, name)| (line, name.to_owned())));
    assert_eq!(
        violations("src/num/bits.rs", "use crate::tensor::Tensor;"),
        ["src/num/bits.rs:1: `crate::tensor`, but `num` may use only fault"]
    );
    assert_eq!(
        violations("src/backend/cpu/mod.rs", "\nuse crate::model::Model;"),
        ["src/backend/cpu/mod.rs:2: `crate::model`, but `backend` may use only fault, num, scheme, tensor"]
    );
    assert_eq!(
        violations("src/fault.rs", "use crate::num;"),
        ["src/fault.rs:1: `crate::num`, but `fault` may use no other room"]
    );
    assert!(violations("src/odds.rs", "")[0].contains("`odds` has no floor"));
}

#[test]
fn the_checker_knows_the_doors() {
    for (path, source, name) in [
        ("src/calibrate/driver.rs", "use crate::quantize::Quantized;", "quantize"),
        ("src/quantize/gptq.rs", "use crate::checkpoint::Checkpoint;", "checkpoint"),
        ("src/report/mod.rs", "use crate::cli::print;", "cli"),
        ("src/recipe.rs", "use crate::commands::Verb;", "commands"),
        ("src/cli/mod.rs", "use crate::commands::Verb;", "commands"),
        ("src/hub/mod.rs", "use crate::tensor::Tensor;", "tensor"),
        ("src/report/mod.rs", "use crate::hub;", "hub"),
        ("src/evaluate/mod.rs", "use crate::integrity;", "integrity"),
        ("src/tensor.rs", "use super::model::Model;", "model"),
        ("src/hub/mod.rs", "use crate as all;", "crate"),
        ("src/model/mod.rs", "use crate::*;", "*"),
        ("src/main.rs", "use quantkit::hub;", "hub"),
    ] {
        if name == "crate" {
            assert_eq!(violations(path, source).len(), 1);
        } else {
            assert_eq!(refused(path, source), [(1, name.to_owned())], "{path}");
        }
    }
    for (path, source) in [
        ("src/format/gptq/write.rs", "use crate::{pack::gptq::Packed, quantize::Quantized, model, checkpoint};"),
        ("src/commands/quantize.rs", "use crate::cli::Printer; use crate::recipe::Recipe;"),
        ("src/main.rs", "fn main() -> ExitCode { quantkit::cli::run() }"),
        ("src/lib.rs", "pub(crate) use crate::model::Model;"),
        ("src/backend/cpu/attention.rs", "use super::super::{KvCache, Span};"),
    ] {
        assert_eq!(violations(path, source), Vec::<String>::new(), "{path}");
    }
}

#[test]
fn the_checker_sees_unsafe() {
    let source = "// unsafe\n#![deny(unsafe_code)]\nfn f() { unsafe { g(\"unsafe\") } }";
    assert_eq!(misplaced_unsafe("src/hub/mod.rs", source).len(), 1);
    assert!(misplaced_unsafe("src/hub/mod.rs", source)[0].starts_with("src/hub/mod.rs:3: "));
    assert!(misplaced_unsafe("src/backend/cpu/mod.rs", source).is_empty());
}
