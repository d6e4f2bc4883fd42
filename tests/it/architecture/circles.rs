//! Circles of files inside a room. A module's own file and the files below it may use each other; apart from that,
//! what a file uses must not lead back to it.

use std::collections::{BTreeMap, BTreeSet};

use super::tokens::{Names, passed_on, paths, tokens, without_tests};
use super::{module_path, rust_files};

/// Circles of today, which are being taken apart. Nothing may be added; what is gone must be struck out.
const KNOWN_CIRCLES: &[&[&str]] = &[
    &["src/backend/cache.rs", "src/backend/cpu/mod.rs", "src/backend/cuda/mod.rs", "src/backend/solver.rs"],
    &[
        "src/backend/cuda/device.rs",
        "src/backend/cuda/graph.rs",
        "src/backend/cuda/memory.rs",
        "src/backend/cuda/modules.rs",
    ],
    &["src/backend/cuda/eight_bits.rs", "src/backend/cuda/ggml.rs", "src/backend/cuda/linear.rs"],
    &["src/calibrate/corpus.rs", "src/calibrate/text.rs"],
    &["src/commands/generate.rs", "src/commands/generate_many.rs"],
    &["src/commands/run/options.rs", "src/commands/run/recipe.rs"],
    &[
        "src/evaluate/baseline/record.rs",
        "src/evaluate/divergence.rs",
        "src/evaluate/finite.rs",
        "src/evaluate/perplexity.rs",
    ],
    &["src/integrity/folds.rs", "src/integrity/weights.rs"],
];

/// For each file the files of its room that it uses, without those above and below it in the tree.
type Uses<'a> = BTreeMap<&'a str, BTreeSet<&'a str>>;

fn uses(sources: &[(String, String)]) -> Uses<'_> {
    let modules: BTreeMap<Names, &str> = sources.iter().map(|(path, _)| (module_path(path), &**path)).collect();
    let read: Vec<_> =
        sources.iter().map(|(path, source)| (module_path(path), without_tests(&tokens(source)))).collect();
    let aliases: BTreeMap<Names, Names> = read.iter().flat_map(|(module, tokens)| passed_on(module, tokens)).collect();
    let mut out = Uses::new();
    for (module, tokens) in &read {
        let used = out.entry(modules[module]).or_default();
        for (_, path) in paths(module, tokens) {
            let Some(target) = home(&path, &modules, &aliases) else { continue };
            let family = target.starts_with(module) || module.starts_with(&target);
            if !family && target.first() == module.first() {
                used.insert(modules[&target]);
            }
        }
    }
    out
}

/// The module in which a path ends, through names that modules pass on.
fn home<'a>(
    path: &[&'a str],
    modules: &BTreeMap<Names<'a>, &str>,
    aliases: &BTreeMap<Names<'a>, Names<'a>>,
) -> Option<Names<'a>> {
    let mut path = path.to_vec();
    // Names are passed on a few times at most; more would be a circle of names.
    for _ in 0..8 {
        let passed = (1..=path.len()).find_map(|n| Some((n, aliases.get(&path[..n])?)));
        match passed {
            Some((n, real)) if !modules.contains_key(&path[..n]) => path = [&real[..], &path[n..]].concat(),
            _ => break,
        }
    }
    (1..=path.len()).rev().map(|n| path[..n].to_vec()).find(|module| modules.contains_key(module))
}

/// Every file that can be reached from one.
fn reached<'a>(from: &'a str, uses: &Uses<'a>) -> BTreeSet<&'a str> {
    let (mut seen, mut open) = (BTreeSet::new(), vec![from]);
    while let Some(file) = open.pop() {
        open.extend(uses.get(file).into_iter().flatten().filter(|next| seen.insert(**next)));
    }
    seen
}

/// Sets of files each of which leads to all others.
fn circles<'a>(uses: &Uses<'a>) -> BTreeSet<BTreeSet<&'a str>> {
    let reached: BTreeMap<&str, BTreeSet<&str>> = uses.keys().map(|file| (*file, reached(file, uses))).collect();
    let circle = |file: &&'a str| -> BTreeSet<&'a str> {
        reached[file]
            .iter()
            .copied()
            .filter(|other| reached.get(other).is_some_and(|back| back.contains(file)))
            .collect()
    };
    uses.keys().map(circle).filter(|circle| circle.len() > 1).collect()
}

/// A circle as a row of `KNOWN_CIRCLES`, and what in it uses what.
fn shown(circle: &BTreeSet<&str>, uses: &Uses) -> String {
    let files: Vec<&&str> = circle.iter().collect();
    let mut out = format!("    &{files:?},");
    for file in circle {
        let used: Vec<&str> = uses[file].intersection(circle).copied().collect();
        out += &format!("\n        // {file} uses {}", used.join(", "));
    }
    out
}

#[test]
fn files_of_a_room_form_no_circle() {
    let sources = rust_files();
    let uses = uses(&sources);
    let found = circles(&uses);
    let known: Vec<BTreeSet<&str>> = KNOWN_CIRCLES.iter().map(|files| files.iter().copied().collect()).collect();
    let new: Vec<String> = found
        .iter()
        .filter(|circle| !known.iter().any(|files| circle.is_subset(files)))
        .map(|circle| shown(circle, &uses))
        .collect();
    assert!(new.is_empty(), "circles of files:\n{}", new.join("\n"));
    let gone: Vec<_> = known.iter().filter(|files| !found.iter().any(|circle| circle.is_subset(files))).collect();
    assert!(gone.is_empty(), "these circles are gone; strike them out of KNOWN_CIRCLES:\n{gone:#?}");
}

#[test]
fn the_checker_sees_circles() {
    let files = |files: &[(&str, &str)]| -> Vec<(String, String)> {
        files.iter().map(|(path, source)| (format!("src/{path}.rs"), source.to_string())).collect()
    };
    let found = |sources: &[(String, String)]| -> Vec<Vec<String>> {
        circles(&uses(sources)).iter().map(|circle| circle.iter().map(|file| file.to_string()).collect()).collect()
    };
    // A module and its parts use each other, tests use what they like, another room is not looked at.
    let fine = files(&[
        ("num/mod", "pub mod a; pub mod b; pub use a::A; use crate::num::b::B;"),
        ("num/a", "use super::Shape; use super::b::B; use crate::pack;"),
        ("num/b", "use crate::num::{self, Shape}; #[cfg(test)] mod tests { use super::super::a::A; }"),
        ("pack", "use crate::num::a;"),
    ]);
    assert!(found(&fine).is_empty());
    let mut bad = files(&[
        ("num/mod", "pub mod a; pub mod b; pub mod c; pub use a::A;"),
        ("num/a", "fn f() { super::b::f() }"),
        ("num/b", "use crate::{pack, num::{bits, c::{C, D}}};"),
        ("num/c/mod", "mod deep;"),
        ("num/c/deep", "use super::super::A as B;"),
    ]);
    assert!(found(&bad).is_empty(), "a file uses c, a part of c uses a: no circle of files");
    bad[3].1 = "use super::A;".into();
    assert_eq!(found(&bad), [["src/num/a.rs", "src/num/b.rs", "src/num/c/mod.rs"]]);
}
