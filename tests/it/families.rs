//! Logits of every model family against transformers (`reference/make_family_fixtures.py`).

use std::path::Path;
use std::sync::Arc;

use quantkit::backend::cpu::Cpu;
use quantkit::backend::{Backend, Span};
use quantkit::checkpoint::Checkpoint;
use quantkit::engine::generate::Session;
use quantkit::model::Model;
use quantkit::model::source::DenseSource;

use crate::support::{fixture, golden_logits};

fn open_on(dir: &Path, backend: Arc<dyn Backend>) -> Model {
    Model::open(Box::new(DenseSource(Checkpoint::open(dir).unwrap())), backend).unwrap()
}

fn open(dir: &Path) -> Model {
    open_on(dir, Arc::new(Cpu))
}

fn logits(model: &Model, tokens: &[u32]) -> Vec<f32> {
    let mut chunks = [model.embed(&[tokens], vec![Span { rows: tokens.len(), start: 0 }]).unwrap()];
    model.forward(&mut chunks, None).unwrap();
    model.backend().download(&model.logits(&chunks[0].hidden).unwrap()).unwrap()
}

#[track_caller]
fn close(found: &[f32], wanted: &[f32], ceiling: f32, what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    let worst = found.iter().zip(wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst < ceiling, "{what}: logits differ by {worst}");
}

/// Logits against transformers, then those of cached decoding against those of one pass. The ceilings are for
/// the one and the other.
pub fn check_on(backend: Arc<dyn Backend>, name: &str, ceilings: [f32; 2]) {
    let (tokens, wanted) = golden_logits(&fixture(&format!("families/{name}/golden.safetensors")));
    let model = open_on(&fixture(&format!("families/{name}")), backend);
    close(&logits(&model, &tokens), &wanted, ceilings[0], name);
    cached_decoding_equals_recomputation(&model, &tokens, ceilings[1], name);
}

fn check(name: &str) {
    check_on(Arc::new(Cpu), name, [3e-4, 2e-4]);
}

/// One token at a time through the cache gives the logits of one pass over all tokens.
fn cached_decoding_equals_recomputation(model: &Model, tokens: &[u32], ceiling: f32, name: &str) {
    let whole = logits(model, tokens);
    let vocab = model.config.vocab;
    let mut session = Session::new(model, tokens.len()).unwrap();
    let prefill = 7.min(tokens.len());
    let mut at = 0;
    for (i, step) in std::iter::once(&tokens[..prefill]).chain(tokens[prefill..].chunks(1)).enumerate() {
        let last = model.backend().download(&session.feed(step).unwrap()).unwrap();
        at += step.len();
        close(&last, &whole[(at - 1) * vocab..at * vocab], ceiling, &format!("{name}, step {i}"));
    }
}

macro_rules! families {
    ($($name:ident)*) => { $(#[test] fn $name() { check(stringify!($name)); })* };
}

families!(llama llama3 llama_linear llama_yarn mistral qwen2 qwen3 gemma3_text smollm2);

#[test]
fn shards_hold_the_same_model() {
    let (tokens, wanted) = golden_logits(&fixture("families/llama/golden.safetensors"));
    let model = open(&fixture("families/llama_sharded"));
    assert!(model.checkpoint().files().len() > 1);
    close(&logits(&model, &tokens), &wanted, 3e-4, "sharded");
}

#[test]
fn configs_written_before_transformers_5_mean_the_same() {
    for name in ["qwen3", "gemma3_text"] {
        let dir = tempfile::tempdir().unwrap();
        for (from, to) in [("config_legacy.json", "config.json"), ("model.safetensors", "model.safetensors")] {
            std::fs::copy(fixture(&format!("families/{name}/{from}")), dir.path().join(to)).unwrap();
        }
        let (tokens, wanted) = golden_logits(&fixture(&format!("families/{name}/golden.safetensors")));
        close(&logits(&open(dir.path()), &tokens), &wanted, 3e-4, name);
    }
}

#[test]
fn demo_checkpoint() {
    let (tokens, wanted) = golden_logits(&fixture("demo/logits.safetensors"));
    let model = open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("calib/demo/target"));
    close(&logits(&model, &tokens), &wanted, 1e-3, "demo");
}

/// A model saved over a folder of shards leaves their index behind; transformers reads the single file.
#[test]
fn a_single_file_outranks_a_stale_index() {
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture(&format!("families/llama/{file}")), dir.path().join(file)).unwrap();
    }
    let index = "model.safetensors.index.json";
    std::fs::copy(fixture(&format!("families/llama_sharded/{index}")), dir.path().join(index)).unwrap();
    let files = Checkpoint::open(dir.path()).unwrap().files().to_vec();
    assert_eq!(files.iter().map(|f| &**f).collect::<Vec<_>>(), ["model.safetensors"]);
}

#[test]
fn tensors_of_other_parts_are_only_passed_on() {
    let model = open(&fixture("families/llama"));
    for name in model.checkpoint().tensors().keys() {
        assert!(model.config.reads(name), "{name}");
    }
    for name in ["vision_tower.embeddings.weight", "model.layers.99.self_attn.q_proj.weight", "model.normal.weight"] {
        assert!(!model.config.reads(name), "{name}");
    }
}
