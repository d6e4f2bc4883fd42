//! The CUDA kernels as text: the PTX in `kernels/ptx` belongs to the sources beside it, and the sources keep
//! the rules of `kernels/README.md`. `.ci/kernels` compiles them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels")
}

/// File names in a folder with an extension, without it.
fn stems(folder: &Path, extension: &str) -> BTreeSet<String> {
    let paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let with = paths.filter(|p| p.extension().is_some_and(|e| e == extension));
    with.map(|p| p.file_stem().unwrap().to_str().unwrap().to_owned()).collect()
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Every kernel file by stem.
fn kernel_files() -> BTreeMap<String, String> {
    let files = stems(&folder(), "cu");
    assert!(!files.is_empty(), "no kernels in {}", folder().display());
    files.into_iter().map(|stem| (stem.clone(), read(&folder().join(format!("{stem}.cu"))))).collect()
}

fn ptx(stem: &str) -> String {
    read(&folder().join("ptx").join(format!("{stem}.ptx")))
}

/// Comments become a space each; line ends stay.
fn without_comments(source: &str) -> String {
    let comment = regex::Regex::new(r#"//[^\n]*|(?s:/\*.*?\*/)|("(?:\\.|[^"\\\n])*")"#).unwrap();
    comment.replace_all(source, |c: &regex::Captures| c.get(1).map_or(" ", |s| s.as_str()).to_owned()).into_owned()
}

/// A macro: its parameters, none for a plain word, and its body.
struct Macro {
    parameters: Option<Vec<String>>,
    body: String,
}

/// The preprocessor as far as kernels need it to name themselves: macros with `##`, no conditions.
fn preprocessed(source: &str) -> String {
    let define = regex::Regex::new(r"^\s*#\s*define\s+(\w+)(?:\(([^)]*)\))?(.*)$").unwrap();
    let (mut macros, mut text) = (BTreeMap::new(), String::new());
    for line in without_comments(source).replace("\\\n", " ").lines() {
        if let Some(found) = define.captures(line) {
            let parameters = found.get(2).map(|p| p.as_str().split(',').map(|p| p.trim().to_owned()).collect());
            macros.insert(found[1].to_owned(), Macro { parameters, body: found[3].to_owned() });
        } else if !line.trim_start().starts_with('#') {
            text.push_str(line);
            text.push('\n');
        }
    }
    expand(&text, &macros, 0)
}

fn expand(text: &str, macros: &BTreeMap<String, Macro>, depth: usize) -> String {
    assert!(depth < 20, "macros that expand to themselves: {text}");
    let word = regex::Regex::new(r"\b[A-Za-z_]\w*").unwrap();
    let glue = regex::Regex::new(r"\s*##\s*").unwrap();
    let (mut out, mut at) = (String::new(), 0);
    while let Some(found) = word.find_at(text, at) {
        out.push_str(&text[at..found.start()]);
        at = found.end();
        let Some(rule) = macros.get(found.as_str()) else {
            out.push_str(found.as_str());
            continue;
        };
        let mut body = rule.body.clone();
        if let Some(parameters) = &rule.parameters {
            let rest = &text[at..];
            let Some((given, length)) = rest.trim_start().starts_with('(').then(|| arguments(rest)) else {
                out.push_str(found.as_str());
                continue;
            };
            at += length;
            let value_of = |w: &str| parameters.iter().position(|p| p == w).and_then(|i| given.get(i));
            body =
                word.replace_all(&body, |c: &regex::Captures| value_of(&c[0]).map_or(&c[0], |v| v).to_owned()).into();
        }
        out.push_str(&expand(&glue.replace_all(&body, ""), macros, depth + 1));
    }
    out.push_str(&text[at..]);
    out
}

/// The arguments of the call that `text` begins with, and its length.
fn arguments(text: &str) -> (Vec<String>, usize) {
    let (mut found, mut depth) = (vec![String::new()], 0);
    for (at, c) in text.char_indices() {
        match c {
            '(' if depth == 0 => {
                depth = 1;
                continue;
            }
            '(' => depth += 1,
            ')' if depth == 1 => return (found.iter().map(|a| a.trim().to_owned()).collect(), at + 1),
            ')' => depth -= 1,
            ',' if depth == 1 => {
                found.push(String::new());
                continue;
            }
            _ => {}
        }
        found.last_mut().unwrap().push(c);
    }
    panic!("no end to {text}");
}

/// Names of the kernels that a source defines.
fn kernels_in(source: &str) -> BTreeSet<String> {
    let word = regex::Regex::new(r"\w+").unwrap();
    let text = preprocessed(source);
    let heads = regex::Regex::new(r#"extern\s+"C"\s+__global__\s"#).unwrap();
    let name_at = |mut at: usize| {
        loop {
            let found = word.find_at(&text, at).unwrap();
            at = found.end();
            match found.as_str() {
                "void" => {}
                "__launch_bounds__" => at += arguments(&text[at..]).1,
                name => return name.to_owned(),
            }
        }
    };
    heads.find_iter(&text).map(|head| name_at(head.end())).collect()
}

/// Names of the kernels that PTX offers.
fn entries(ptx: &str) -> BTreeSet<String> {
    let entry = regex::Regex::new(r"(?m)^\.visible \.entry (\w+)\(").unwrap();
    entry.captures_iter(ptx).map(|c| c[1].to_owned()).collect()
}

/// A kernel file and, by name, the kernel headers that it includes, directly or through another.
fn sources_of(file: &str) -> Vec<String> {
    let include = regex::Regex::new(r#"(?m)^\s*#\s*include\s*"([^"]+)""#).unwrap();
    let (mut found, mut queue) = (BTreeSet::new(), vec![file.to_owned()]);
    while let Some(name) = queue.pop() {
        if found.insert(name.clone()) {
            let source = read(&folder().join(name));
            queue.extend(include.captures_iter(&source).map(|c| c[1].to_owned()));
        }
    }
    found.remove(file);
    [file.to_owned()].into_iter().chain(found).collect()
}

/// The grids stand twice: kernels cannot read Rust.
#[test]
fn kernels_have_the_grids_of_the_cpu() {
    use quantkit::num::ggml::grids;
    let text = read(&folder().join("ggml_grids.cuh"));
    let mut found: BTreeMap<&str, Vec<u16>> = BTreeMap::new();
    for array in text.split("static __device__ const uint16_t GRID_").skip(1) {
        let (head, rest) = array.split_once("] = {").unwrap();
        let (name, count) = head.split_once('[').unwrap();
        let (numbers, _) = rest.split_once("};").unwrap();
        let numbers: Vec<u16> =
            numbers.split(',').map(str::trim).filter(|n| !n.is_empty()).map(|n| n.parse().unwrap()).collect();
        assert_eq!(numbers.len(), count.parse::<usize>().unwrap(), "{name}");
        found.insert(name, numbers);
    }
    let wanted: [(&str, &[u16]); 6] = [
        ("IQ2_XXS", &grids::IQ2_XXS),
        ("IQ2_XS", &grids::IQ2_XS),
        ("IQ2_S", &grids::IQ2_S),
        ("IQ3_XXS", &grids::IQ3_XXS),
        ("IQ3_S", &grids::IQ3_S),
        ("IQ1", &grids::IQ1),
    ];
    assert_eq!(found.len(), wanted.len());
    for (name, grid) in wanted {
        assert!(found[name] == grid, "{name}");
    }
}

#[test]
fn every_kernel_file_has_its_ptx() {
    let sources: BTreeSet<_> = kernel_files().into_keys().collect();
    assert_eq!(sources, stems(&folder().join("ptx"), "ptx"), "`.ci/kernels generate` writes kernels/ptx");
}

#[test]
fn every_kernel_file_is_embedded_and_explained() {
    let readme = read(&folder().join("README.md"));
    let table = read(&folder().join("../src/backend/cuda/modules.rs"));
    let found = regex::Regex::new(r"(?s)\nfiles!\((.*?)\)").unwrap().captures(&table).unwrap()[1].to_owned();
    let embedded: BTreeSet<_> = found.split_whitespace().map(|name| name.trim_matches('"').to_owned()).collect();
    assert_eq!(kernel_files().into_keys().collect::<BTreeSet<_>>(), embedded, "`files!` in modules.rs");
    let headers = stems(&folder(), "cuh").into_iter().map(|stem| format!("{stem}.cuh"));
    for name in headers.chain(embedded.iter().map(|stem| format!("{stem}.cu"))) {
        assert!(readme.contains(&format!("`{name}`")), "kernels/README.md does not name {name}");
    }
}

#[test]
fn kernels_have_names_of_their_own() {
    let mut seen = BTreeMap::new();
    for stem in kernel_files().keys() {
        for kernel in entries(&ptx(stem)) {
            if let Some(other) = seen.insert(kernel.clone(), stem.clone()) {
                panic!("{kernel} is in {other}.cu and in {stem}.cu");
            }
        }
    }
}

fn sha256(parts: impl IntoIterator<Item = Vec<u8>>) -> String {
    let mut hasher = Sha256::new();
    parts.into_iter().for_each(|part| hasher.update(part));
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn ptx_is_made_from_the_sources_as_they_are() {
    for stem in kernel_files().keys() {
        let names = sources_of(&format!("{stem}.cu"));
        let sources = sha256(names.iter().map(|name| std::fs::read(folder().join(name)).unwrap()));
        let ptx = ptx(stem);
        let lines: Vec<_> = ptx.splitn(6, '\n').collect();
        let [_, of, digest, _, rest_digest, rest] = lines[..] else { panic!("{stem}: no head") };
        let fresh = of == format!("// sources: {}", names.join(" ")) && digest == format!("// sha256: {sources}");
        assert!(fresh, "kernels/ptx/{stem}.ptx is stale; run `.ci/kernels generate`");
        let want = format!("// sha256 of the rest: {}", sha256([rest.as_bytes().to_vec()]));
        assert_eq!(rest_digest, want, "kernels/ptx/{stem}.ptx was edited; run `.ci/kernels generate`");
    }
}

/// `.ci/kernels` tries some of it again.
#[test]
fn what_assembling_gives_is_recorded() {
    let text = read(&folder().join("assembled.txt"));
    let (mut files, mut kernels) = (BTreeMap::new(), BTreeSet::new());
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let words: Vec<_> = line.split_whitespace().collect();
        if line.starts_with(' ') {
            kernels.insert(words[0].to_owned());
            assert_eq!(words[words.len() - 1], "0", "{}: spills registers", words[0]);
        } else {
            files.insert(words[0].to_owned(), words[1].to_owned());
        }
    }
    let of_ptx = |stem: &String| {
        let ptx = ptx(stem);
        sha256([ptx.splitn(6, '\n').nth(5).unwrap().as_bytes().to_vec()])[..16].to_owned()
    };
    let wanted = kernel_files().into_keys().map(|stem| (stem.clone(), of_ptx(&stem))).collect();
    assert_eq!(files, wanted, "`.ci/kernels generate` writes kernels/assembled.txt");
    assert_eq!(kernels, kernel_files().keys().flat_map(|stem| entries(&ptx(stem))).collect());
}

#[test]
fn ptx_offers_what_the_sources_define() {
    for (stem, source) in kernel_files() {
        assert_eq!(kernels_in(&source), entries(&ptx(&stem)), "{stem}: source and PTX");
    }
}

#[test]
fn ptx_runs_where_it_is_meant_to() {
    for stem in kernel_files().keys() {
        let ptx = ptx(stem);
        let lines: Vec<_> = ptx.lines().collect();
        assert!(lines.contains(&".version 8.2"), "{stem}: PTX 8.2 is what drivers from 535 on take");
        assert!(lines.contains(&".target sm_80"), "{stem}: sm_80 is what all supported GPUs can run");
    }
}

#[test]
fn assembly_stands_in_one_file() {
    let assembly = regex::Regex::new(r"\b(asm|__asm__|__asm)\b").unwrap();
    let headers = stems(&folder(), "cuh").into_iter().map(|stem| format!("{stem}.cuh"));
    for name in headers.chain(kernel_files().into_keys().map(|stem| format!("{stem}.cu"))) {
        let source = read(&folder().join(&name));
        let found = assembly.is_match(&without_comments(&source));
        assert_eq!(
            found,
            name == "device.cuh",
            "{name}: assembly belongs into device.cuh, with a twin for the emulator"
        );
    }
}

#[test]
fn every_kernel_says_how_it_is_launched() {
    let reference = regex::Regex::new(r"as (\w+)").unwrap();
    for (stem, source) in kernel_files() {
        let kernels = kernels_in(&source);
        // Kernels that follow one another share the comment above the first; one may point to another kernel.
        let (mut note, mut in_comment) = (String::new(), false);
        for (number, line) in source.lines().enumerate() {
            if let Some(comment) = line.strip_prefix("//") {
                if !in_comment {
                    note.clear();
                }
                note.push_str(&comment.to_lowercase());
            }
            in_comment = line.starts_with("//");
            let points = || reference.captures_iter(&note).any(|found| kernels.contains(&found[1]));
            let said = note.contains("grid") && note.contains("block") || points();
            let at = number + 1;
            assert!(!line.contains("__global__") || said, "{stem}.cu:{at}: say above it which grid and block it takes");
        }
    }
}

#[test]
fn kernels_made_by_macros_are_found() {
    let source = r#"
        #define ONE(bits, type) extern "C" __global__ void __launch_bounds__(4 * (2 + 1)) gemm_q##bits##_##type( \
            const uint16_t* x) { body(x, (bits), f(1, 2)); } // ONE(9, f64)
        #define BOTH(bits) ONE(bits, f16) ONE(bits, bf16)
        BOTH(4)
        ONE(8, f16)
        extern "C" __global__ void plain(float* x) {}
        /* extern "C" __global__ void gone(float* x) {} */
    "#;
    let want = ["gemm_q4_f16", "gemm_q4_bf16", "gemm_q8_f16", "plain"];
    assert_eq!(kernels_in(source), want.map(str::to_owned).into());
}
