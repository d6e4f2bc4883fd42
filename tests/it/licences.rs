//! Every dependency's licence against the list in `deny.toml`.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// Whether an SPDX expression can be satisfied with the allowed licences. `/` is the old way to write OR.
fn satisfiable(expression: &str, allowed: &[String]) -> Result<bool, String> {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let mut words = spaced.split_whitespace().peekable();
    let fine = any(&mut words, allowed)?;
    match words.next() {
        None => Ok(fine),
        Some(word) => Err(format!("`{word}` is not expected")),
    }
}

type Words<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

/// terms joined by OR
fn any(words: &mut Words, allowed: &[String]) -> Result<bool, String> {
    let mut fine = all(words, allowed)?;
    while words.next_if_eq(&"OR").is_some() {
        fine |= all(words, allowed)?;
    }
    Ok(fine)
}

/// terms joined by AND, which binds tighter
fn all(words: &mut Words, allowed: &[String]) -> Result<bool, String> {
    let mut fine = one(words, allowed)?;
    while words.next_if_eq(&"AND").is_some() {
        fine &= one(words, allowed)?;
    }
    Ok(fine)
}

/// a licence, with its exception if it has one, or an expression in parentheses
fn one(words: &mut Words, allowed: &[String]) -> Result<bool, String> {
    match words.next() {
        Some("(") => {
            let fine = any(words, allowed)?;
            words.next_if_eq(&")").map(|_| fine).ok_or_else(|| "a `)` is missing".into())
        }
        None | Some(")" | "OR" | "AND" | "WITH") => Err("a licence is missing".into()),
        Some(name) => {
            let name = match words.next_if_eq(&"WITH") {
                Some(_) => format!("{name} WITH {}", words.next().ok_or("an exception is missing")?),
                None => name.to_owned(),
            };
            Ok(allowed.contains(&name))
        }
    }
}

/// The quoted names of `allow = [...]` under `[licenses]`.
fn allow_list(deny: &str) -> Vec<String> {
    let text: String = deny.lines().map(|line| line.split('#').next().unwrap_or("").to_owned() + "\n").collect();
    let section = text.split_once("[licenses]").expect("deny.toml has [licenses]").1;
    let list = section.split_once("allow = [").expect("[licenses] has `allow = [`").1.split_once(']').unwrap().0;
    list.split('"').skip(1).step_by(2).map(str::to_owned).collect()
}

/// What is wrong with one package of `cargo metadata`.
fn complaint(package: &Value, allowed: &[String]) -> Option<String> {
    let name = format!("{} {}", package["name"].as_str()?, package["version"].as_str()?);
    let Some(licence) = package["license"].as_str() else {
        return Some(format!("{name}: no licence expression"));
    };
    match satisfiable(licence, allowed) {
        Ok(true) => None,
        Ok(false) => Some(format!("{name}: `{licence}` is not allowed by deny.toml")),
        Err(why) => Some(format!("{name}: `{licence}` cannot be read: {why}")),
    }
}

fn cargo(arguments: &[&str]) -> Result<String, String> {
    let cargo = std::env::var_os("CARGO").unwrap_or("cargo".into());
    let output = Command::new(cargo).args(arguments).current_dir(env!("CARGO_MANIFEST_DIR")).output();
    let output = output.map_err(|e| format!("cargo does not start: {e}"))?;
    match output.status.success() {
        true => Ok(String::from_utf8(output.stdout).unwrap()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

/// Every package in Cargo.lock. Building fetches only what this platform needs; then those are looked at.
fn metadata() -> Value {
    let arguments = ["metadata", "--format-version", "1", "--offline", "--locked"];
    let found = cargo(&arguments).or_else(|all| {
        let host = cargo(&["-vV"])?;
        let host = host.lines().find_map(|line| line.strip_prefix("host: ")).ok_or(all)?;
        cargo(&[&arguments[..], &["--filter-platform", host]].concat())
    });
    match found {
        Ok(json) => serde_json::from_str(&json).unwrap(),
        Err(why) => panic!(
            "licences cannot be checked, because `cargo metadata --offline --locked` fails; run `cargo fetch --locked` first:\n{why}"
        ),
    }
}

#[test]
fn every_licence_is_allowed() {
    let deny = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("deny.toml")).unwrap();
    let allowed = allow_list(&deny);
    let metadata = metadata();
    let packages = metadata["packages"].as_array().unwrap();
    assert!(packages.len() > 50, "only {} packages found", packages.len());
    let wrong: Vec<String> = packages.iter().filter_map(|package| complaint(package, &allowed)).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn expressions() {
    let allowed = ["MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception"].map(str::to_owned);
    for (expression, wanted) in [
        ("MIT", true),
        ("GPL-3.0", false),
        ("GPL-3.0 OR MIT", true),
        ("GPL-3.0/MIT", true),
        ("Apache-2.0 / MIT", true),
        ("GPL-3.0 AND MIT", false),
        ("MIT OR GPL-3.0 AND ISC", true),
        ("(MIT OR GPL-3.0) AND ISC", false),
        ("(MIT OR GPL-3.0) AND Apache-2.0", true),
        ("Apache-2.0 WITH LLVM-exception", true),
        ("MIT WITH LLVM-exception", false),
        ("Apache-2.0 WITH LLVM-exception AND MIT", true),
        ("((MIT))", true),
    ] {
        assert_eq!(satisfiable(expression, &allowed), Ok(wanted), "{expression}");
    }
    for expression in ["", "MIT OR", "(MIT", "MIT)", "MIT MIT", "MIT WITH", "AND MIT"] {
        assert!(satisfiable(expression, &allowed).is_err(), "{expression}");
    }
}

#[test]
fn a_bad_package_is_named() {
    let allowed = allow_list("[licenses]\nallow = [ # \"GPL-3.0\"\n  \"MIT\",\n  \"ISC\" ]\n[bans]\n");
    assert_eq!(allowed, ["MIT", "ISC"]);
    let package = |licence: Value| serde_json::json!({"name": "left-pad", "version": "1.0.0", "license": licence});
    assert_eq!(complaint(&package("MIT".into()), &allowed), None);
    assert_eq!(
        complaint(&package("GPL-3.0".into()), &allowed).unwrap(),
        "left-pad 1.0.0: `GPL-3.0` is not allowed by deny.toml"
    );
    assert_eq!(complaint(&package(Value::Null), &allowed).unwrap(), "left-pad 1.0.0: no licence expression");
    assert!(complaint(&package("(MIT".into()), &allowed).unwrap().contains("cannot be read"));
}
