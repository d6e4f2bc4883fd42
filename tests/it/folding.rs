//! Scales moved between operations leave the model what it was, in every family.

use std::sync::Arc;

use quantkit::backend::Span;
use quantkit::backend::cpu::Cpu;
use quantkit::checkpoint::Checkpoint;
use quantkit::model::Model;
use quantkit::model::fold::{Fold, Joint, tied};
use quantkit::model::source::DenseSource;

use crate::support::{fixture, golden_logits};

fn logits(model: &Model, tokens: &[u32]) -> Vec<f32> {
    let mut chunks = [model.embed(&[tokens], vec![Span { rows: tokens.len(), start: 0 }]).unwrap()];
    model.forward(&mut chunks, None).unwrap();
    model.backend().download(&model.logits(&chunks[0].hidden).unwrap()).unwrap()
}

/// Scales from 1/8 to 8, different at every joint.
fn scales(channels: usize, seed: usize) -> Vec<f32> {
    (0..channels).map(|c| (((c * 37 + seed * 101) % 61) as f32 / 10.0 - 3.0).exp2()).collect()
}

fn check(name: &str) {
    let dir = fixture(&format!("families/{name}"));
    let (tokens, _) = golden_logits(&dir.join("golden.safetensors"));
    let open = || Model::open(Box::new(DenseSource(Checkpoint::open(&dir).unwrap())), Arc::new(Cpu)).unwrap();
    let (original, mut model) = (open(), open());
    let wanted = logits(&original, &tokens);
    for index in 0..model.blocks.len() {
        let block = &original.blocks[index];
        let fold = |(i, joint): (usize, Joint)| {
            let scales = scales(block.linears(joint.readers())[0].cols, index * 4 + i);
            let scales = if joint == Joint::Values { tied(&original, &scales, |s| s[0]) } else { scales };
            Fold { joint, scales }
        };
        let folds: Vec<Fold> = Joint::ALL.into_iter().enumerate().map(fold).collect();
        let folded = block.folded(&original, &folds).unwrap();
        assert_eq!(folded.linears.len(), 7, "every linear takes part");
        let norms = folded.tensors.keys().filter(|name| name.contains("norm")).count();
        assert_eq!(norms, 2, "{name}");
        model.blocks[index] = folded.block;
    }
    let found = logits(&model, &tokens);
    let worst = found.iter().zip(&wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst < 1e-3, "{name}: logits differ by {worst}");
}

macro_rules! families {
    ($($name:ident)*) => { $(#[test] fn $name() { check(stringify!($name)); })* };
}

families!(llama llama3 mistral qwen2 qwen3 gemma3_text smollm2);
