//! Names of types that several files define: readers must look at the imports to know which one is meant.

use std::collections::{BTreeMap, BTreeSet};

use super::rust_files;
use super::tokens::{tokens, without_tests};

/// How many names may be doubled. It may only fall.
const MOST_DOUBLED: usize = 99;

/// Types that a file defines at the level of its modules: inside functions and traits names have a narrow place.
fn types(source: &str) -> BTreeSet<&str> {
    let tokens = without_tests(&tokens(source));
    let (mut depth, mut modules) = (0, Vec::new());
    let mut out = BTreeSet::new();
    for (i, (_, token)) in tokens.iter().enumerate() {
        match *token {
            "{" | "(" | "[" => {
                depth += 1;
                if i >= 2 && tokens[i - 2].1 == "mod" {
                    modules.push(depth);
                }
            }
            "}" | ")" | "]" => {
                modules.pop_if(|open| *open == depth);
                depth -= 1;
            }
            "struct" | "enum" | "trait" | "type" | "union" if depth == modules.len() => {
                out.extend(
                    tokens.get(i + 1).map(|(_, name)| *name).filter(|name| name.starts_with(char::is_uppercase)),
                );
            }
            _ => {}
        }
    }
    out
}

#[test]
fn names_of_types_are_unique() {
    let sources = rust_files();
    let mut homes = BTreeMap::<&str, Vec<&str>>::new();
    for (path, source) in &sources {
        for name in types(source) {
            homes.entry(name).or_default().push(path);
        }
    }
    let doubled: Vec<String> = homes
        .iter()
        .filter(|(_, files)| files.len() > 1)
        .map(|(name, files)| format!("{name}: {}", files.join(", ")))
        .collect();
    assert!(
        doubled.len() <= MOST_DOUBLED,
        "{} names of types are defined in more than one file; at most {MOST_DOUBLED} may be:\n{}",
        doubled.len(),
        doubled.join("\n")
    );
}

#[test]
fn the_checker_sees_types() {
    let source = r#"
        pub(crate) struct A<'a>(&'a str); // struct No;
        enum B { C { struct_: u8 } }
        mod inner { pub trait D { type No; } pub type E = [u8; 2]; }
        impl D for A<'_> { type No = u8; }
        fn f() { struct No; let union = "enum No"; }
        macro_rules! m { ($name:ident) => { struct $name; } }
        #[cfg(test)] mod tests { struct No; }
        union F { a: u8 }
    "#;
    assert_eq!(types(source).into_iter().collect::<Vec<_>>(), ["A", "B", "D", "E", "F"]);
}
