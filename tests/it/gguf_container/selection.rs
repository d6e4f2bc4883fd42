//! The types of tensors against llama-quantize's own tables (`tests/golden/gguf/schemas/`), and against what it did to
//! SmolLM2-135M.

use std::collections::BTreeMap;

use quantkit::format::gguf::select::{
    Choice, FileType, ModelFacts, Options, fitting, is_quantized, parse_tensor_type, select,
};
use quantkit::num::ggml::GgmlType::{self, *};

use crate::support::fixture;

type Shapes = Vec<(String, Vec<usize>)>;

/// A dense decoder as GGUF names it. Shapes are `[out, in]`.
fn dense(layers: usize, hidden: usize, ffn: usize, vocab: usize, q: usize, kv: usize, tied: bool) -> Shapes {
    let mut shapes =
        vec![("token_embd.weight".into(), vec![vocab, hidden]), ("output_norm.weight".into(), vec![hidden])];
    if !tied {
        shapes.push(("output.weight".into(), vec![vocab, hidden]));
    }
    for i in 0..layers {
        let mut add = |name: &str, shape: &[usize]| shapes.push((format!("blk.{i}.{name}.weight"), shape.to_vec()));
        add("attn_norm", &[hidden]);
        add("attn_q", &[q, hidden]);
        add("attn_k", &[kv, hidden]);
        add("attn_v", &[kv, hidden]);
        add("attn_output", &[hidden, q]);
        add("ffn_norm", &[hidden]);
        add("ffn_gate", &[ffn, hidden]);
        add("ffn_up", &[ffn, hidden]);
        add("ffn_down", &[hidden, ffn]);
    }
    shapes
}

/// DeepSeek V3.1: latent attention, three dense layers, then 256 experts and a shared one.
fn deepseek() -> Shapes {
    let (hidden, heads, latent, expert) = (7168, 128, 512, 2048);
    let mut shapes: Shapes = vec![
        ("token_embd.weight".into(), vec![129_280, hidden]),
        ("output_norm.weight".into(), vec![hidden]),
        ("output.weight".into(), vec![129_280, hidden]),
    ];
    for i in 0..61 {
        let mut add = |name: &str, shape: &[usize]| shapes.push((format!("blk.{i}.{name}"), shape.to_vec()));
        add("attn_norm.weight", &[hidden]);
        add("attn_q_a.weight", &[1536, hidden]);
        add("attn_q_a_norm.weight", &[1536]);
        add("attn_q_b.weight", &[heads * 192, 1536]);
        add("attn_kv_a_mqa.weight", &[latent + 64, hidden]);
        add("attn_kv_a_norm.weight", &[latent]);
        add("attn_k_b.weight", &[heads, latent, 128]);
        add("attn_v_b.weight", &[heads, 128, latent]);
        add("attn_output.weight", &[hidden, heads * 128]);
        add("ffn_norm.weight", &[hidden]);
        if i < 3 {
            add("ffn_gate.weight", &[18_432, hidden]);
            add("ffn_up.weight", &[18_432, hidden]);
            add("ffn_down.weight", &[hidden, 18_432]);
            continue;
        }
        add("ffn_gate_inp.weight", &[256, hidden]);
        add("exp_probs_b.bias", &[256]);
        add("ffn_gate_exps.weight", &[256, expert, hidden]);
        add("ffn_up_exps.weight", &[256, expert, hidden]);
        add("ffn_down_exps.weight", &[256, hidden, expert]);
        add("ffn_gate_shexp.weight", &[expert, hidden]);
        add("ffn_up_shexp.weight", &[expert, hidden]);
        add("ffn_down_shexp.weight", &[hidden, expert]);
    }
    shapes
}

/// The base type of each file type, and the tensors that get another.
type Schema = BTreeMap<String, (GgmlType, BTreeMap<String, GgmlType>)>;

fn schema(text: &str) -> Schema {
    let mut schema = Schema::new();
    let mut section = String::new();
    let kind = |name: &str| GgmlType::parse(name).unwrap_or_else(|| panic!("type {name}"));
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (left, right) = line.split_once(' ').unwrap();
        if let Some(name) = left.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            section = name.into();
            schema.insert(name.into(), (kind(right), BTreeMap::new()));
        } else {
            schema.get_mut(&section).unwrap().1.insert(left.into(), kind(right));
        }
    }
    schema
}

/// The tables were made without importance, and without asking whether it is needed.
fn types(shapes: &Shapes, facts: &ModelFacts, options: &Options) -> Vec<Choice> {
    select(shapes, facts, &Options { require_importance: false, ..options.clone() }).unwrap()
}

fn check(file: &str, architecture: &str, facts: [usize; 4], shapes: Shapes) {
    let text = std::fs::read_to_string(fixture("gguf/schemas").join(file)).unwrap();
    let [layers, heads, kv_heads, experts] = facts;
    for word in [format!("n_layer={layers}"), format!("n_head={heads}"), format!("n_head_kv={kv_heads}")] {
        assert!(text.lines().nth(1).unwrap().contains(&word), "{word}");
    }
    let facts = ModelFacts { architecture: architecture.into(), layers, heads, kv_heads, experts };
    let schema = schema(&text);
    assert_eq!(schema.len(), FileType::all().count());
    for file_type in FileType::all() {
        let (base, exceptions) = &schema[file_type.name()];
        assert_eq!(file_type.base(), *base, "{file_type}");
        let chosen: BTreeMap<String, GgmlType> = types(&shapes, &facts, &Options::new(file_type))
            .into_iter()
            .filter_map(|choice| Some((choice.name, choice.kind?)))
            .filter(|(_, kind)| kind != base)
            .collect();
        let differ: Vec<_> = chosen
            .keys()
            .chain(exceptions.keys())
            .filter(|name| chosen.get(*name) != exceptions.get(*name))
            .map(|name| (name, chosen.get(name), exceptions.get(name)))
            .collect();
        assert!(differ.is_empty(), "{file} {file_type}: (tensor, ours, theirs) {:?}", &differ[..differ.len().min(5)]);
    }
}

#[test]
fn qwen3() {
    let shapes = dense(28, 1024, 3072, 151_936, 16 * 128, 8 * 128, false);
    check("qwen3-0.6b.schema", "qwen3", [28, 16, 8, 0], shapes);
}

#[test]
fn gemma3() {
    let shapes = dense(34, 2560, 10_240, 262_144, 8 * 256, 4 * 256, true);
    check("gemma-3-4b-it.schema", "gemma3", [34, 8, 4, 0], shapes);
}

#[test]
fn llama_70b() {
    let shapes = dense(80, 8192, 28_672, 128_256, 8192, 1024, false);
    check("meta-llama-3.1-70b-instruct.schema", "llama", [80, 64, 8, 0], shapes);
}

#[test]
fn deepseek_with_experts() {
    check("deepseek-v3.1.schema", "deepseek2", [61, 128, 1, 256], deepseek());
}

fn smollm2() -> (Shapes, ModelFacts) {
    let facts = ModelFacts { architecture: "llama".into(), layers: 30, heads: 9, kv_heads: 3, experts: 0 };
    (dense(30, 576, 1536, 49_152, 576, 192, true), facts)
}

/// The layers of 30 that get more bits.
const MORE: [usize; 14] = [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 26, 27, 28, 29];

/// Layers with the first type; the rest have the second.
type Layers = (Vec<usize>, GgmlType, GgmlType);

/// Rows of 576 are no multiples of 256, so nearly everything falls back.
#[test]
fn smollm2_as_llama_quantize_made_it() {
    let (shapes, facts) = smollm2();
    let first = |n: usize| (0..n).collect::<Vec<_>>();
    let more = MORE.to_vec();
    // q, k, gate, up; then v, output and down: layers with the first type, and the type of the rest.
    let none = || vec![];
    let table: Vec<(FileType, GgmlType, Layers, GgmlType, Layers)> = vec![
        (FileType::Q8_0, Q8_0, (none(), Q8_0, Q8_0), Q8_0, (none(), Q8_0, Q8_0)),
        (FileType::Q4_0, Q4_0, (none(), Q4_0, Q4_0), Q4_0, (none(), Q4_0, Q4_0)),
        (FileType::Q4_1, Q4_1, (none(), Q4_1, Q4_1), Q4_1, (none(), Q4_1, Q4_1)),
        (FileType::Q5_0, Q5_0, (none(), Q5_0, Q5_0), Q5_0, (none(), Q5_0, Q5_0)),
        (FileType::Q5_1, Q5_1, (none(), Q5_1, Q5_1), Q5_1, (none(), Q5_1, Q5_1)),
        (FileType::Q2_K, Q4_0, (none(), Q4_0, Q4_0), Q4_0, (none(), Q3_K, Q3_K)),
        (FileType::Q3_K_S, Q4_0, (none(), Q4_0, Q4_0), Q4_0, (none(), Q3_K, Q3_K)),
        (FileType::Q3_K_M, Q4_0, (first(2), Q5_1, Q5_0), Q5_0, (first(1), Q5_K, Q4_K)),
        (FileType::Q3_K_L, Q4_0, (none(), Q5_1, Q5_1), Q5_1, (none(), Q5_K, Q5_K)),
        (FileType::Q4_K_S, Q5_0, (first(4), Q5_1, Q5_0), Q5_0, (first(3), Q5_K, Q4_K)),
        (FileType::Q4_K_M, Q5_0, (more.clone(), Q8_0, Q5_0), Q5_0, (more.clone(), Q6_K, Q4_K)),
        (FileType::Q5_K_S, Q5_1, (none(), Q5_1, Q5_1), Q5_1, (none(), Q5_K, Q5_K)),
        (FileType::Q5_K_M, Q5_1, (more.clone(), Q8_0, Q5_1), Q5_1, (more, Q6_K, Q5_K)),
        (FileType::Q6_K, Q8_0, (none(), Q8_0, Q8_0), Q8_0, (none(), Q6_K, Q6_K)),
        (FileType::IQ4_NL, IQ4_NL, (none(), IQ4_NL, IQ4_NL), IQ4_NL, (first(3), Q5_K, IQ4_NL)),
        (FileType::IQ4_XS, IQ4_NL, (none(), IQ4_NL, IQ4_NL), IQ4_NL, (first(3), Q5_K, IQ4_XS)),
        (FileType::IQ3_S, IQ4_NL, (none(), IQ4_NL, IQ4_NL), IQ4_NL, (none(), IQ3_S, IQ3_S)),
        (FileType::IQ3_M, IQ4_NL, (none(), Q5_0, Q5_0), Q5_0, (first(3), Q4_K, IQ3_S)),
        (FileType::IQ3_XXS, IQ4_NL, (none(), IQ4_NL, IQ4_NL), IQ4_NL, (first(3), Q4_K, Q3_K)),
    ];
    for (file_type, plain, value, output, down) in table {
        for choice in types(&shapes, &facts, &Options::new(file_type)) {
            let Some(kind) = choice.kind else {
                assert!(choice.name.ends_with("_norm.weight"), "{}", choice.name);
                continue;
            };
            let layer: usize = choice.name.split('.').nth(1).and_then(|n| n.parse().ok()).unwrap_or(0);
            let of = |(layers, here, rest): &Layers| {
                if layers.contains(&layer) { *here } else { *rest }
            };
            let wanted = match choice.name.split('.').nth(2) {
                Some("attn_v") => of(&value),
                Some("attn_output") => output,
                Some("ffn_down") => of(&down),
                Some(_) => plain,
                None => Q8_0,
            };
            assert_eq!(kind, wanted, "{file_type} {}", choice.name);
        }
    }
}

/// What importance changes, by the same measurements.
#[test]
fn smollm2_with_importance() {
    let (shapes, facts) = smollm2();
    for (file_type, early, late) in [
        (FileType::Q4_0, Q4_1, Q4_0),
        (FileType::Q5_0, Q5_1, Q5_0),
        (FileType::IQ4_NL, IQ4_NL, IQ4_NL),
        (FileType::IQ4_XS, IQ4_XS, IQ4_XS),
        (FileType::IQ3_XXS, IQ3_XXS, IQ3_XXS),
    ] {
        let options = Options { importance: true, ..Options::new(file_type) };
        let chosen = types(&shapes, &facts, &options);
        let kind = |name: &str| chosen.iter().find(|choice| choice.name == name).unwrap().kind;
        assert_eq!(kind("blk.2.ffn_down.weight"), Some(early), "{file_type}");
        assert_eq!(kind("blk.3.ffn_down.weight"), Some(late), "{file_type}");
    }
}

#[test]
fn what_fell_back_says_what_was_wanted() {
    let (shapes, facts) = smollm2();
    let chosen = types(&shapes, &facts, &Options::new(FileType::Q4_K_M));
    let choice = |name: &str| chosen.iter().find(|choice| choice.name == name).unwrap().clone();
    assert_eq!(choice("token_embd.weight").wanted, None);
    assert_eq!(choice("blk.0.attn_v.weight").wanted, Some(Q6_K));
    assert_eq!(choice("blk.3.attn_v.weight").wanted, Some(Q4_K));
    assert_eq!(choice("blk.3.ffn_down.weight").wanted, None);
    let strict = Options { fallback: false, ..Options::new(FileType::Q4_K_M) };
    let error = select(&shapes, &facts, &strict).unwrap_err().to_string();
    assert!(error.contains("576 columns") && error.contains("multiple of 256"), "{error}");
    assert_eq!(fitting(Q4_K, 100), F16);
    assert_eq!(fitting(Q4_0, 48), F16);
    assert_eq!(fitting(MXFP4, 48), F16);
}

#[test]
fn what_the_user_asks_for_comes_first() {
    let shapes = dense(4, 1024, 2048, 1000, 1024, 1024, false);
    let facts = ModelFacts { architecture: "llama".into(), layers: 4, heads: 8, kv_heads: 8, experts: 0 };
    let mut options = Options::new(FileType::Q4_K_M);
    options.output = Some(F16);
    options.token_embedding = Some(Q8_0);
    options.tensors = vec![
        parse_tensor_type(r"blk\.[01]\.attn_k=q6_k").unwrap(),
        parse_tensor_type("attn_k=Q5_K").unwrap(),
        parse_tensor_type("output.weight=Q2_K").unwrap(),
    ];
    let of = |options: &Options, name: &str| {
        let chosen = select(&shapes, &facts, options).unwrap();
        chosen.into_iter().find(|choice| choice.name == name).unwrap().kind
    };
    assert_eq!(of(&options, "output.weight"), Some(F16));
    assert_eq!(of(&options, "token_embd.weight"), Some(Q8_0));
    assert_eq!(of(&options, "blk.1.attn_k.weight"), Some(Q6_K));
    assert_eq!(of(&options, "blk.2.attn_k.weight"), Some(Q5_K));
    assert_eq!(of(&options, "blk.2.attn_output.weight"), Some(Q2_K));
    assert_eq!(of(&options, "output_norm.weight"), None);
    let pure = Options { pure: true, ..Options::new(FileType::Q4_K_M) };
    assert_eq!(of(&pure, "output.weight"), Some(Q4_K));
    assert_eq!(of(&pure, "blk.0.ffn_down.weight"), Some(Q4_K));
    let kept = Options { keep_output: true, ..Options::new(FileType::Q4_K_M) };
    assert_eq!(of(&kept, "output.weight"), None);
    assert_eq!(of(&Options::new(FileType::BF16), "output.weight"), Some(BF16));
    for (wrong, part) in [("attn_k", "no REGEX=TYPE"), ("attn_k=Q9", "`Q9`"), ("(=Q4_0", "`(`")] {
        let error = parse_tensor_type(wrong).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

/// An embedding that is the output too follows the wish for the output, unless there is one of its own.
#[test]
fn tied_embeddings() {
    let shapes = dense(1, 256, 256, 1000, 256, 256, true);
    let facts = ModelFacts { architecture: "llama".into(), layers: 1, heads: 2, kv_heads: 2, experts: 0 };
    let embedding = |options: &Options| {
        let chosen = select(&shapes, &facts, options).unwrap();
        chosen.into_iter().find(|choice| choice.name == "token_embd.weight").unwrap().kind
    };
    let mut options = Options::new(FileType::Q4_K_M);
    assert_eq!(embedding(&options), Some(Q6_K));
    options.output = Some(Q8_0);
    assert_eq!(embedding(&options), Some(Q8_0));
    options.token_embedding = Some(Q5_K);
    assert_eq!(embedding(&options), Some(Q5_K));
}

#[test]
fn types_that_need_importance() {
    let facts = ModelFacts { architecture: "llama".into(), layers: 4, heads: 8, kv_heads: 8, experts: 0 };
    let wide = dense(4, 1024, 2048, 1000, 1024, 1024, false);
    let needing: Vec<&str> = FileType::all()
        .filter(|file_type| select(&wide, &facts, &Options::new(*file_type)).is_err())
        .map(FileType::name)
        .collect();
    assert_eq!(needing, ["Q2_K_S", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "IQ3_XS"]);
    let error = select(&wide, &facts, &Options::new(FileType::IQ2_M)).unwrap_err().to_string();
    assert!(error.contains("`blk.0.attn_k.weight` would be IQ2_S"), "{error}");
    for file_type in FileType::all() {
        select(&wide, &facts, &Options { importance: true, ..Options::new(file_type) }).unwrap();
    }
    // Where the shape forces other types, nothing is needed.
    let narrow = dense(4, 576, 1632, 1000, 576, 576, false);
    for file_type in FileType::all() {
        select(&narrow, &facts, &Options::new(file_type)).unwrap();
    }
}

#[test]
fn what_is_never_quantized() {
    for (name, shape, quantized) in [
        ("blk.0.attn_q.weight", &[4, 4][..], true),
        ("blk.0.attn_q.bias", &[4], false),
        ("blk.0.attn_norm.weight", &[4, 4], false),
        ("blk.0.attn_q.weight", &[4], false),
        ("blk.0.ffn_gate_inp.weight", &[4, 4], false),
        ("blk.0.ffn_gate_exps.weight", &[2, 4, 4], true),
        ("position_embd.weight", &[4, 4], false),
        ("rope_freqs.weight", &[4], false),
        ("per_layer_model_proj.weight", &[4, 4], false),
    ] {
        assert_eq!(is_quantized(name, shape), quantized, "{name}");
    }
}

#[test]
fn file_types_by_name_and_number() {
    for file_type in FileType::all() {
        assert_eq!(FileType::parse(&file_type.name().to_lowercase()), Some(file_type));
        assert_eq!(FileType::from_number(file_type.number()), Some(file_type));
        assert_eq!(file_type.name(), format!("{file_type:?}"));
    }
    assert_eq!(FileType::parse("Q4_K"), Some(FileType::Q4_K_M));
    assert_eq!(FileType::parse("Q9"), None);
    assert_eq!(FileType::from_number(4), None);
}
