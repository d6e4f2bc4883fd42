//! Whole models: logits, text, several sequences, weights that do not fit.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use quantkit::backend::cache::CacheType;
use quantkit::backend::cpu::Cpu;
use quantkit::backend::cuda::{CudaOptions, Precision};
use quantkit::backend::{Backend, spans_of};
use quantkit::checkpoint::Checkpoint;
use quantkit::engine::cache::CacheOptions;
use quantkit::engine::generate::{Session, generate};
use quantkit::engine::sampler::{Sampler, SamplerOptions};
use quantkit::format::{self, gguf::read::GgufFile};
use quantkit::model::Model;
use quantkit::model::source::DenseSource;
use quantkit::num::ggml::GgmlType;

use super::cuda;
use crate::families::check_on;
use crate::support::scene::Scene;
use crate::support::{fixture, golden_logits};

macro_rules! families {
    ($($name:ident)*) => { $(
        #[test]
        fn $name() {
            // The cache holds f16.
            check_on(cuda(CudaOptions::default()), stringify!($name), [5e-4, 2e-2]);
        }
    )* };
}

families!(llama llama3 llama_linear llama_yarn mistral qwen2 qwen3 gemma3_text smollm2);

#[test]
fn without_cublas() {
    check_on(cuda(CudaOptions { cublas: false, ..Default::default() }), "llama", [5e-4, 2e-2]);
}

fn demo(backend: Arc<dyn Backend>) -> Model {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("calib/demo/target");
    Model::open(Box::new(DenseSource(Checkpoint::open(&dir).unwrap())), backend).unwrap()
}

fn logits(model: &Model, tokens: &[u32]) -> Vec<f32> {
    let mut chunks = [model.embed(&[tokens], spans_of([tokens.len()])).unwrap()];
    model.forward(&mut chunks, None).unwrap();
    model.backend().download(&model.logits(&chunks[0].hidden).unwrap()).unwrap()
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn logits_of_the_demo_checkpoint() {
    let (tokens, wanted) = golden_logits(&fixture("demo/logits.safetensors"));
    for (precision, ceiling) in [(Precision::Double, 1e-3), (Precision::Single, 2e-2)] {
        for cublas in [true, false] {
            let model = demo(cuda(CudaOptions { precision, cublas, ..Default::default() }));
            let difference = largest_difference(&logits(&model, &tokens), &wanted);
            assert!(difference < ceiling, "{precision:?}, cuBLAS {cublas}: {difference}");
        }
    }
}

fn greedy_text(model: &Model, prompt: &[u32]) -> Vec<u32> {
    let mut sampler = Sampler::new(SamplerOptions { temperature: 0.0, ..Default::default() }).unwrap();
    let mut text = Vec::new();
    generate(model, prompt, &[], 64, &mut sampler, &mut |token| {
        text.push(token);
        true
    })
    .unwrap();
    assert_eq!(text.len(), 64);
    text
}

/// Both prompts cross the border of a cache page while decoding.
#[test]
fn greedy_text_is_the_cpus() {
    let (tokens, _) = golden_logits(&fixture("demo/logits.safetensors"));
    let (host, options) = (demo(Arc::new(Cpu)), CudaOptions { precision: Precision::Single, ..Default::default() });
    for prompt in [&tokens[..9], &tokens[3..40]] {
        let wanted = greedy_text(&host, prompt);
        for graphs in [true, false] {
            let model = demo(cuda(CudaOptions { graphs, ..options.clone() }));
            assert_eq!(greedy_text(&model, prompt), wanted, "graphs {graphs}");
        }
    }
}

/// A GGUF file with blocks of many types, from the file to the text.
#[test]
fn greedy_text_of_mixed_blocks_is_the_cpus() {
    let scene = Scene::demo();
    let types = [
        "attn_q=Q5_0",
        "attn_k=Q8_0",
        "attn_v=IQ4_XS",
        "attn_output=Q6_K",
        "ffn_gate=Q4_K",
        "ffn_up=Q3_K",
        "blk.0.ffn_down=Q5_K",
        "ffn_down=Q4_0",
    ];
    let mut args = vec!["gguf", "--type", "Q4_K_M", "--token-embedding-type", "Q6_K", "-o", "mixed.gguf"];
    types.iter().for_each(|kind| args.extend(["--tensor-type", kind]));
    scene.run(&args).ok();
    let path = scene.path("mixed.gguf");
    let kinds: BTreeSet<GgmlType> = GgufFile::open(&path).unwrap().tensors().iter().map(|t| t.kind).collect();
    assert_eq!(kinds.len(), 9, "{kinds:?}");
    let open = |backend| Model::open(format::open_file(&path).unwrap().source, backend).unwrap();
    let (tokens, _) = golden_logits(&fixture("demo/logits.safetensors"));
    let wanted = greedy_text(&open(Arc::new(Cpu)), &tokens[..9]);
    for graphs in [true, false] {
        let model = open(cuda(CudaOptions { graphs, ..Default::default() }));
        assert_eq!(greedy_text(&model, &tokens[..9]), wanted, "graphs {graphs}");
    }
}

/// The types that devices have.
const CACHES: [CacheType; 4] = [CacheType::F16, CacheType::Fp8E4m3, CacheType::Fp8E5m2, CacheType::Int8];

fn session(model: &Model, cache: CacheType) -> Session<'_> {
    Session::with(model, CacheOptions { kind: Some(cache), ..CacheOptions::for_sequences(1, 64) }).unwrap()
}

/// A recorded step gives bit for bit what launching its kernels gives.
#[test]
fn graphs_change_nothing() {
    let (tokens, _) = golden_logits(&fixture("demo/logits.safetensors"));
    for cache in CACHES {
        let decoded = |graphs| {
            let model = demo(cuda(CudaOptions { graphs, ..Default::default() }));
            let mut session = session(&model, cache);
            session.feed(&tokens[..13]).unwrap();
            let steps = tokens[13..24].iter();
            steps.map(|token| model.backend().download(&session.feed(&[*token]).unwrap()).unwrap()).collect::<Vec<_>>()
        };
        assert!(decoded(true) == decoded(false), "{cache:?}");
    }
}

/// How far logits move when the cache is narrow: bounds a gross error, not a measurement.
#[test]
fn narrow_caches_stay_near() {
    let (tokens, _) = golden_logits(&fixture("demo/logits.safetensors"));
    let last = |backend: Arc<dyn Backend>, cache| {
        let model = demo(backend);
        let mut session = session(&model, cache);
        session.feed(&tokens[..30]).unwrap();
        model.backend().download(&session.feed(&tokens[30..31]).unwrap()).unwrap()
    };
    let wanted = last(Arc::new(Cpu), CacheType::F32);
    for (cache, ceiling) in CACHES.into_iter().zip([1e-2, 0.6, 1.2, 0.2]) {
        let [host, device] = [Arc::new(Cpu) as Arc<dyn Backend>, cuda(CudaOptions::default())].map(|b| last(b, cache));
        let difference = largest_difference(&device, &wanted);
        assert!(difference < ceiling, "{cache}: {difference}");
        // What the cache does is the same; a number in the middle between two codes may fall to either side.
        let apart = largest_difference(&device, &host);
        assert!(apart < difference.max(1e-2), "{cache}: {apart} from the CPU, {difference} from f32");
    }
}

#[test]
fn company_does_not_matter() {
    crate::batching::a_little_company_does_not_matter(cuda(CudaOptions::default()));
}

/// Weights that come and go give the bits of weights that stay, also while decoding.
#[test]
fn weights_that_do_not_fit() {
    let (tokens, _) = golden_logits(&fixture("demo/logits.safetensors"));
    let run = |weight_bytes| {
        let model = demo(cuda(CudaOptions { weight_bytes, ..Default::default() }));
        let mut session = Session::new(&model, 64).unwrap();
        session.feed(&tokens[..5]).unwrap();
        let step = |session: &mut Session, token| model.backend().download(&session.feed(&[token]).unwrap()).unwrap();
        let decoded: Vec<_> = tokens[5..9].iter().map(|token| step(&mut session, *token)).collect();
        (logits(&model, &tokens), decoded)
    };
    assert!(run(Some(0)) == run(None));
}
