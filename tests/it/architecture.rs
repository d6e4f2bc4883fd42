//! The house against the picture in `src/lib.rs`: who may import whom, where `unsafe` may stand, how long a
//! file may be. Sources are read as tokens, so comments, strings and the layout of a `use` do not matter.

use std::path::{Path, PathBuf};

/// Every room and the rooms it may use. Each names only rooms above it, so no circle can form.
const ROOMS: &[(&str, &[&str])] = &[
    ("num", &[]),
    ("scheme", &[]),
    ("hub", &["num"]),
    ("tensor", &["num"]),
    ("backend", &["num", "scheme", "tensor"]),
    ("checkpoint", &["num", "scheme", "tensor"]),
    ("model", &["checkpoint", "backend", "num", "scheme", "tensor"]),
    ("calibrate", &["checkpoint", "model", "backend", "num", "scheme", "tensor"]),
    // Pure mathematics: nothing of files or models, though both stand to the left.
    ("quantize", &["backend", "num", "scheme", "tensor"]),
    ("pack", &["quantize", "backend", "num", "scheme", "tensor"]),
    ("format", &["checkpoint", "model", "quantize", "pack", "backend", "num", "scheme", "tensor"]),
    ("engine", &["checkpoint", "model", "format", "backend", "num", "scheme", "tensor"]),
    ("integrity", &["checkpoint", "model", "calibrate", "pack", "format", "backend", "num", "scheme", "tensor"]),
    (
        "evaluate",
        &[
            "checkpoint",
            "model",
            "calibrate",
            "quantize",
            "pack",
            "format",
            "engine",
            "backend",
            "num",
            "scheme",
            "tensor",
        ],
    ),
    (
        "report",
        &[
            "checkpoint",
            "model",
            "calibrate",
            "quantize",
            "pack",
            "format",
            "engine",
            "evaluate",
            "integrity",
            "backend",
            "num",
            "scheme",
            "tensor",
        ],
    ),
    (
        "recipe",
        &[
            "hub",
            "checkpoint",
            "model",
            "calibrate",
            "quantize",
            "pack",
            "format",
            "engine",
            "evaluate",
            "integrity",
            "report",
            "backend",
            "num",
            "scheme",
            "tensor",
        ],
    ),
    (
        "pipeline",
        &[
            "recipe",
            "hub",
            "checkpoint",
            "model",
            "calibrate",
            "quantize",
            "pack",
            "format",
            "engine",
            "evaluate",
            "backend",
            "num",
            "scheme",
            "tensor",
        ],
    ),
    (
        "cli",
        &[
            "pipeline",
            "recipe",
            "hub",
            "checkpoint",
            "model",
            "calibrate",
            "quantize",
            "pack",
            "format",
            "engine",
            "evaluate",
            "integrity",
            "report",
            "backend",
            "num",
            "scheme",
            "tensor",
        ],
    ),
    (
        "commands",
        &[
            "cli",
            "pipeline",
            "recipe",
            "hub",
            "checkpoint",
            "model",
            "calibrate",
            "quantize",
            "pack",
            "format",
            "engine",
            "evaluate",
            "integrity",
            "report",
            "backend",
            "num",
            "scheme",
            "tensor",
        ],
    ),
    ("main", &["cli", "commands"]),
];

/// Rooms that may hold `unsafe`: vector instructions, devices, memory maps.
const UNSAFE: &[&str] = &["num", "backend", "checkpoint"];

const MAX_LINES: usize = 600;

type Token<'a> = (usize, &'a str);

/// Words, `::` and single signs with their lines; no comments, strings or characters.
fn tokens(source: &str) -> Vec<Token<'_>> {
    let bytes = source.as_bytes();
    let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b >= 0x80;
    let find = |from: usize, what: &str| source[from..].find(what).map_or(source.len(), |at| from + at);
    let mut out = Vec::new();
    let (mut at, mut counted, mut line) = (0, 0, 1);
    while at < bytes.len() {
        line += source[counted..at].matches('\n').count();
        counted = at;
        let rest = &source[at..];
        at = if rest.starts_with("//") {
            find(at, "\n")
        } else if rest.starts_with("/*") {
            end_of_block_comment(bytes, at)
        } else if bytes[at] == b'"' {
            end_of_quotes(bytes, at + 1, b'"')
        } else if bytes[at] == b'\'' {
            let one = rest[1..].chars().next().map_or(0, char::len_utf8);
            match rest[1..].starts_with('\\') || rest[1 + one..].starts_with('\'') {
                true => end_of_quotes(bytes, at + 1, b'\''),
                false => at + 1, // A lifetime.
            }
        } else if word(bytes[at]) {
            let end = (at..bytes.len()).find(|&i| !word(bytes[i])).unwrap_or(bytes.len());
            let hashes = source[end..].len() - source[end..].trim_start_matches('#').len();
            if ["r", "br", "cr"].contains(&&source[at..end]) && source[end + hashes..].starts_with('"') {
                let close = format!("\"{}", &source[end..end + hashes]);
                find(end + hashes + 1, &close) + close.len()
            } else {
                out.push((line, &source[at..end]));
                end
            }
        } else if rest.starts_with("::") {
            out.push((line, "::"));
            at + 2
        } else {
            if !bytes[at].is_ascii_whitespace() {
                out.push((line, &rest[..1]));
            }
            at + 1
        };
    }
    out
}

fn end_of_quotes(bytes: &[u8], mut at: usize, quote: u8) -> usize {
    while at < bytes.len() && bytes[at] != quote {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(bytes.len())
}

fn end_of_block_comment(bytes: &[u8], mut at: usize) -> usize {
    let mut depth = 0;
    while at < bytes.len() {
        match bytes.get(at..at + 2) {
            Some(b"/*") => (depth, at) = (depth + 1, at + 2),
            Some(b"*/") if depth == 1 => return at + 2,
            Some(b"*/") => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
    }
    at
}

fn starts(tokens: &[Token], words: &[&str]) -> bool {
    tokens.len() >= words.len() && tokens.iter().zip(words).all(|((_, token), word)| token == word)
}

/// Without the items under `#[cfg(test)]`.
fn without_tests<'a>(tokens: &[Token<'a>]) -> Vec<Token<'a>> {
    let mut out = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let rest = &tokens[at..];
        if starts(rest, &["#", "[", "cfg", "(", "test", ")"])
            || starts(rest, &["#", "[", "cfg", "(", "all", "(", "test"])
        {
            at += end_of_item(rest);
        } else {
            out.push(tokens[at]);
            at += 1;
        }
    }
    out
}

/// How many tokens the item at the start takes: up to its `;` or closing brace, or the end of what holds it.
fn end_of_item(tokens: &[Token]) -> usize {
    let mut depth = 0;
    for (i, (_, token)) in tokens.iter().enumerate() {
        match *token {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" if depth == 0 => return i,
            "}" if depth == 1 => return i + 1,
            ")" | "]" | "}" => depth -= 1,
            ";" if depth == 0 => return i + 1,
            _ => {}
        }
    }
    tokens.len()
}

/// The names right below the crate that a file reaches for, with their lines. `module` is its own path.
fn imports<'a>(module: &[&str], tokens: &[Token<'a>]) -> Vec<Token<'a>> {
    let mut out = Vec::new();
    let (mut braces, mut inner) = (0, Vec::new());
    for (i, (_, token)) in tokens.iter().enumerate() {
        let rest = &tokens[i..];
        match *token {
            "{" => {
                braces += 1;
                if i >= 2 && tokens[i - 2].1 == "mod" {
                    inner.push(braces);
                }
            }
            "}" => {
                inner.pop_if(|depth| *depth == braces);
                braces -= 1;
            }
            "crate" | "quantkit" if starts(&rest[1..], &["::"]) => heads(&rest[2..], &mut out),
            "crate" if starts(&rest[1..], &["as"]) => out.push(rest[0]),
            "super" if i < 2 || tokens[i - 2].1 != "super" => {
                let ups = rest.chunks(2).take_while(|pair| starts(pair, &["super", "::"])).count();
                if ups > 0 && ups == module.len() + inner.len() {
                    heads(&rest[2 * ups..], &mut out);
                }
            }
            _ => {}
        }
    }
    out
}

/// The first name of a path, or of each path of a group.
fn heads<'a>(tokens: &[Token<'a>], out: &mut Vec<Token<'a>>) {
    let Some((_, "{")) = tokens.first() else {
        out.extend(tokens.first());
        return;
    };
    let mut depth = 0;
    for pair in tokens.windows(2) {
        match pair[0].1 {
            "{" => depth += 1,
            "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return;
        }
        if depth == 1 && (pair[0].1 == "{" || pair[0].1 == ",") && pair[1].1 != "}" {
            out.push(pair[1]);
        }
    }
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
    let Some((_, allowed)) = ROOMS.iter().find(|(name, _)| *name == room) else {
        return vec![format!("{path}:1: room `{room}` has no row in tests/it/architecture.rs")];
    };
    let fine = |name: &str| name == room || allowed.contains(&name);
    let tokens = without_tests(&tokens(source));
    let wrong = imports(&module, &tokens).into_iter().filter(|(_, name)| !fine(name));
    wrong
        .map(|(line, name)| match allowed {
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
    let row = |name: &str| ROOMS.iter().position(|(room, _)| *room == name);
    for pair in flow.windows(2) {
        assert!(row(pair[0]).is_some() && row(pair[0]) < row(pair[1]), "`{}` must come before `{}`", pair[0], pair[1]);
    }
}

#[test]
fn the_table_has_no_circle() {
    for (i, (room, allowed)) in ROOMS.iter().enumerate() {
        for name in *allowed {
            let above = ROOMS[..i].iter().any(|(other, _)| other == name);
            assert!(
                above || (*room, *name) == ("commands", "cli"),
                "`{room}` uses `{name}`, which has no row above it"
            );
        }
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
        ["src/num/bits.rs:1: `crate::tensor`, but `num` may use no other room"]
    );
    assert_eq!(
        violations("src/backend/cpu/mod.rs", "\nuse crate::model::Model;"),
        ["src/backend/cpu/mod.rs:2: `crate::model`, but `backend` may use only num, scheme, tensor"]
    );
    assert!(violations("src/odds.rs", "")[0].contains("`odds` has no row"));
}

#[test]
fn the_checker_knows_the_doors() {
    for (path, source, name) in [
        ("src/calibrate/driver.rs", "use crate::quantize::Quantized;", "quantize"),
        ("src/quantize/gptq.rs", "use crate::checkpoint::Checkpoint;", "checkpoint"),
        ("src/report/mod.rs", "use crate::cli::print;", "cli"),
        ("src/recipe.rs", "use crate::commands::Verb;", "commands"),
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
