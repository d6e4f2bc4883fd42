//! Options of `quantkit gguf` that fit the model in part or not at all: importance, patterns, earlier files.

use std::collections::BTreeMap;
use std::fs;

use quantkit::format::gguf::imatrix::{Entry, Imatrix};
use quantkit::format::gguf::read::GgufFile;

use crate::support::scene::Scene;

/// The linears of a block of the demo checkpoint, with their columns.
const LINEARS: [(&str, usize); 7] = [
    ("attn_q", 256),
    ("attn_k", 256),
    ("attn_v", 256),
    ("attn_output", 256),
    ("ffn_gate", 256),
    ("ffn_up", 256),
    ("ffn_down", 768),
];

/// A file of importance for these tensors.
fn importance(scene: &Scene, file: &str, entries: &[(String, usize)]) {
    let entry = |(name, cols): &(String, usize)| {
        let sums = (0..*cols).map(|col| 512.0 * (0.1 + (col % 17) as f32)).collect();
        (name.clone(), Entry { sums, counts: vec![512.0] })
    };
    let entries: BTreeMap<_, _> = entries.iter().map(entry).collect();
    let imatrix = Imatrix { datasets: vec!["text".into()], chunks: Some(7), chunk_size: 512, entries };
    imatrix.write_dat(&scene.path(file)).unwrap();
}

/// All linears of some blocks.
fn blocks(range: std::ops::Range<usize>) -> Vec<(String, usize)> {
    range.flat_map(|block| LINEARS.map(|(name, cols)| (format!("blk.{block}.{name}.weight"), cols))).collect()
}

/// What the metadata of a file say of importance.
fn claims(scene: &Scene, file: &str) -> Vec<String> {
    let file = GgufFile::open(&scene.path(file)).unwrap();
    let keys = file.metadata().iter().filter_map(|(key, value)| {
        key.strip_prefix("quantize.imatrix.").filter(|key| *key != "file").map(|key| format!("{key} {value:?}"))
    });
    keys.collect()
}

#[test]
fn importance_that_does_not_fit_is_refused() {
    let scene = Scene::demo();
    let gguf = |kind: &'static str, file: &'static str| ["gguf", "--type", kind, "--imatrix", file, "-o", "x.gguf"];
    importance(&scene, "foreign.dat", &[("blk.97.attn_q.weight".into(), 256)]);
    let words = [
        "`foreign.dat` has importance for no tensor",
        "names `blk.97.attn_q.weight`",
        "the model has `blk.0.attn_k.weight`",
    ];
    scene.refused(&gguf("Q4_K_M", "foreign.dat"), &words);

    importance(&scene, "narrow.dat", &[("blk.1.ffn_down.weight".into(), 256)]);
    let words =
        ["the importance in `narrow.dat` does not fit", "`blk.1.ffn_down.weight` has 256 values", "768 columns"];
    scene.refused(&gguf("Q4_K_M", "narrow.dat"), &words);

    importance(&scene, "half.dat", &blocks(0..2));
    let words = ["tensor `blk.2.", "would be IQ2_XS, which needs importance", "`half.dat` has none for it"];
    scene.refused(&gguf("IQ2_XS", "half.dat"), &words);

    // A type that is never encoded without, for a tensor that llama-imatrix leaves out.
    importance(&scene, "all.dat", &blocks(0..4));
    let words = ["tensor `token_embd.weight` would be IQ2_XXS", "`all.dat` has none for it"];
    scene.refused(&[&gguf("Q4_0", "all.dat")[..], &["--token-embedding-type", "IQ2_XXS"]].concat(), &words);
    let words = ["tensor `token_embd.weight` would be IQ2_XXS", "cannot be encoded without importance"];
    scene.refused(&["gguf", "--type", "Q4_0", "--token-embedding-type", "IQ2_XXS", "-o", "x.gguf"], &words);
}

/// A recipe says so before it makes anything.
#[test]
fn a_recipe_with_foreign_importance_is_refused_at_once() {
    let scene = Scene::demo();
    importance(&scene, "foreign.dat", &[("blk.97.attn_q.weight".into(), 256)]);
    scene.write(
        "quantkit.toml",
        "out = 'out'\n[[artifact]]\nname = 'a'\nmethod = 'rtn'\n[[artifact]]\nname = 'b'\nmethod = 'gguf'\nimatrix = 'foreign.dat'\n",
    );
    scene.refused(&["run"], &["artifact `b`", "`foreign.dat` has importance for no tensor"]);
}

#[test]
fn importance_of_some_tensors_is_named_and_counted() {
    let scene = Scene::demo();
    let gguf = |kind, out, more: &[&str]| {
        scene.run(&[&["gguf", "--type", kind, "-o", out, "--imatrix", "some.dat"], more].concat()).ok()
    };
    let others = [("blk.97.attn_q.weight".to_string(), 256), ("output.weight".into(), 256)];
    importance(&scene, "some.dat", &[blocks(0..2), others.to_vec()].concat());
    let names = "`blk.2.attn_k.weight`, `blk.2.attn_output.weight`, `blk.2.attn_q.weight` and 11 more";
    gguf("Q4_K_M", "half.gguf", &[]).says(&[
        &format!("has no importance for 14 of 28 tensors, which are encoded without: {names}"),
        "has importance for 2 tensors that this model lacks: `blk.97.attn_q.weight`, `output.weight`",
    ]);
    let said = ["dataset Text(\"text\")", "entries_count U32(14)", "chunks_count U32(7)"];
    assert_eq!(claims(&scene, "half.gguf"), said);

    // Only what weighs by importance counts: here eight tensors of the two blocks.
    let types = ["--tensor-type", "attn=Q8_0", "--tensor-type", "ffn_(gate|up)=Q4_0"];
    let said = gguf("Q8_0", "few.gguf", &types).stderr;
    assert!(said.contains("has no importance for 4 of 8 tensors"), "{said}");
    assert_eq!(claims(&scene, "few.gguf")[1], "entries_count U32(4)");

    for (kind, more, why) in [
        ("Q8_0", &[][..], "no tensor that it covers gets a type that weighs by importance"),
        (
            "Q4_0",
            &["--error-feedback", "--chunks", "1"],
            "--error-feedback computes importance from its calibration text",
        ),
    ] {
        gguf(kind, "none.gguf", &[more, &["--overwrite"]].concat()).says(&["`some.dat` is not used", why]);
        assert_eq!(claims(&scene, "none.gguf"), [""; 0]);
    }
    let feedback = ["gguf", "--type", "Q4_0", "-o", "fed.gguf", "--error-feedback", "--chunks", "1"];
    scene.run(&feedback).ok();
    assert_eq!(scene.read("none.gguf"), scene.read("fed.gguf"));
    let auto = [&feedback[..], &["--overwrite", "--imatrix", "auto"]].concat();
    scene.run(&auto).ok().says(&["importance is not computed, --error-feedback gathers its own"]);
    assert_eq!(scene.read("none.gguf"), scene.read("fed.gguf"));

    // Rounded again without it, the file does not claim what its source did; copied, it does.
    scene.run(&["gguf", "half.gguf", "--type", "Q8_0", "-o", "again.gguf"]).ok();
    assert_eq!(claims(&scene, "again.gguf"), [""; 0]);
    scene.run(&["gguf", "half.gguf", "--type", "Q4_K_M", "-o", "copy.gguf"]).ok();
    assert_eq!(claims(&scene, "copy.gguf"), claims(&scene, "half.gguf"));
}

#[test]
fn patterns_without_effect_are_refused() {
    let scene = Scene::demo();
    let refused = |types: &[&str], words: &[&str]| {
        let options = types.iter().flat_map(|text| ["--tensor-type", text]);
        let args: Vec<&str> = ["gguf", "--type", "Q4_0", "-o", "x.gguf"].into_iter().chain(options).collect();
        scene.refused(&args, words);
    };
    refused(&["ffn_dwn=Q8_0"], &["`ffn_dwn` gives no tensor its type", "no tensor matches it", "`ffn_down` is one"]);
    refused(
        &["down_proj=Q8_0"],
        &[
            "`down_proj` gives no tensor",
            "names are GGUF's, such as `blk.3.ffn_up.weight`",
            "`down_proj` is `ffn_down` there",
        ],
    );
    refused(&["attn_norm=Q8_0"], &["never quantized, such as `blk.0.attn_norm.weight`"]);
    refused(&["ffn_=Q8_0", "ffn_down=Q6_K"], &["`ffn_down` gives no tensor", "an earlier pattern or another option"]);
    refused(&[r"^output\.weight=Q8_0"], &["no `output.weight`: `token_embd.weight` is the output head as well"]);
    let args = ["gguf", "--type", "Q4_0", "-o", "x.gguf", "--leave-output-tensor"];
    scene.run(&[&args[..], &["--output-tensor-type", "Q8_0"]].concat()).ended(2).says(&["cannot be used with"]);
    scene
        .run(&args)
        .ok()
        .says(&["`token_embd.weight` is the output head as well: --leave-output-tensor has no effect"]);
    for (more, what) in [
        (&[][..], "--output-tensor-type makes it Q8_0"),
        (&["--token-embedding-type", "Q5_0"], "--output-tensor-type has no effect; its type is Q5_0"),
        (&["--pure"], "--output-tensor-type has no effect with --pure"),
    ] {
        let args = ["gguf", "--type", "Q4_0", "-o", "x.gguf", "--overwrite", "--output-tensor-type", "Q8_0"];
        scene.run(&[&args[..], more].concat()).ok().says(&[&format!("is the output head as well: {what}")]);
    }
}

/// Names of parts in `x-*`, and whether `x.gguf` is there.
fn files(scene: &Scene) -> Vec<String> {
    let names = scene.listing().into_keys();
    names.filter(|name| name.contains("x.gguf") || name.starts_with("x-") || name.starts_with(".x")).collect()
}

#[test]
fn earlier_files_of_another_number_of_parts_are_replaced() {
    let scene = Scene::demo();
    let gguf = |size: &[&str]| {
        let args = ["gguf", "--type", "Q8_0", "-o", "x.gguf", "--overwrite"];
        scene.run(&[&args[..], size].concat()).ok()
    };
    gguf(&["--split-max-size", "1M"]);
    let many = files(&scene);
    assert!(many.len() > 3, "{many:?}");
    gguf(&["--split-max-size", "2M"]).says(&[&format!("removed `{}` and {} more", many[0], many.len() - 1)]);
    let few = files(&scene);
    assert!(few.len() < many.len() && few.iter().all(|name| !many.contains(name)), "{few:?} after {many:?}");
    gguf(&[]).says(&["removed `x-00001-of-"]);
    assert_eq!(files(&scene), ["x.gguf"]);
    gguf(&["--split-max-size", "2M"]).says(&["removed `x.gguf`"]);
    assert_eq!(files(&scene), few);

    // Another type of the model, another's parts, and what is no file of a model at all stay.
    fs::rename(scene.path(&few[0]), scene.path("kept")).unwrap();
    let lost: Vec<String> = few[1..].to_vec();
    let args = ["gguf", "--type", "Q4_0", "-o", "x.gguf", "--overwrite"];
    scene.run(&args).ok().says(&[&format!("`{}`", lost[0]), "stay: they hold"]);
    assert_eq!(files(&scene), [&lost[..], &["x.gguf".to_string()]].concat());
    fs::rename(scene.path("kept"), scene.path(&few[0])).unwrap();
    scene.run(&args).ok().says(&[&format!("`{}` and {} more stay", few[0], few.len() - 1)]);

    // The source is never among them.
    scene.run(&["gguf", "x.gguf", "--type", "Q4_0", "-o", "x.gguf", "--overwrite", "--split-max-size", "1M"]).ok();
    assert!(scene.path("x.gguf").exists());
}
