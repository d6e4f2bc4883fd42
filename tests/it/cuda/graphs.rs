//! Decoding steps recorded as graphs: their results, and what happens when memory is short, when a recording panics, and
//! when caches are dropped during a recording.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use quantkit::backend::Backend;
use quantkit::backend::cuda::CudaOptions;
use quantkit::checkpoint::Checkpoint;
use quantkit::engine::cache::{Cache, CacheOptions, EngineError, SeqId};
use quantkit::engine::pass::{Part, Wanted, pass};
use quantkit::engine::sampler::{Sampler, SamplerOptions};
use quantkit::engine::speculate::{self, Ahead, Speculation};
use quantkit::model::Model;
use quantkit::model::source::DenseSource;

use super::{cuda, noise};
use crate::emulator::{Case, in_child};
use crate::support::{emulator, fixture};

/// Tests in separate processes: the emulator counts the allocations of all threads.
pub const CASES: &[Case] = &[
    ("graphs_out_of_memory", out_of_memory),
    ("graphs_speculation", speculation),
    ("graphs_kept_memory", kept_memory),
    ("graphs_dropped", dropped),
];

fn tiny(backend: Arc<dyn Backend>) -> Model {
    let checkpoint = Checkpoint::open(&fixture("families/llama")).unwrap();
    Model::open(Box::new(DenseSource(checkpoint)), backend).unwrap()
}

/// Sequences in one cache, which all get the same tokens but for their first.
struct Decoding<'a> {
    model: &'a Model,
    cache: Cache<'a>,
    sequences: Vec<SeqId>,
}

impl<'a> Decoding<'a> {
    fn new(model: &'a Model, sequences: usize) -> Self {
        let mut cache = Cache::new(model, CacheOptions::for_sequences(sequences, 40)).unwrap();
        let sequences = (0..sequences).map(|_| cache.add()).collect();
        Self { model, cache, sequences }
    }

    /// Logits after `tokens` of each of the first `count` sequences; the first token differs from one to the other.
    fn pass(&mut self, count: usize, tokens: &[u32]) -> Result<Vec<f32>, EngineError> {
        let vocab = self.model.config.vocab as u32;
        let texts: Vec<Vec<u32>> =
            (0..count as u32).map(|i| [&[(tokens[0] + 7 * i) % vocab], &tokens[1..]].concat()).collect();
        let all = self.sequences.iter().zip(&texts);
        let parts: Vec<Part> = all.map(|(seq, tokens)| Part { seq: *seq, tokens, wanted: Wanted::Last }).collect();
        let logits = pass(self.model, &mut self.cache, &parts)?;
        assert_eq!(logits.rows, count);
        Ok(self.model.backend().download(&logits).unwrap())
    }
}

/// Recorded steps give the bits of launched ones, also where many rows go to the tensor cores while cuBLAS is there, and
/// where rows are filled up.
#[test]
fn recorded_steps_are_the_same() {
    for sequences in [3, 20, 70] {
        let decoded = |graphs| {
            let model = tiny(cuda(CudaOptions { graphs, ..Default::default() }));
            let mut decoding = Decoding::new(&model, sequences);
            decoding.pass(sequences, &[3, 5]).unwrap();
            let steps: Vec<_> = (0..4).map(|i| decoding.pass(sequences, &[11 + i]).unwrap()).collect();
            assert_eq!(decoding.cache.recorded_steps(), usize::from(graphs));
            assert_eq!(decoding.cache.unrecorded(), None);
            steps
        };
        let (recorded, launched) = (decoded(true), decoded(false));
        for (i, (recorded, launched)) in recorded.iter().zip(&launched).enumerate() {
            assert!(recorded == launched, "{sequences} sequences: step {i}");
        }
    }
}

/// A few sizes serve all numbers of sequences; their memory is one, which grows, so that smaller ones are recorded again.
#[test]
fn sizes_share_their_memory() {
    const COUNTS: [usize; 17] = [1, 1, 3, 4, 1, 2, 2, 8, 5, 3, 7, 1, 2, 9, 16, 6, 1];
    const RECORDED: [usize; 17] = [0, 1, 1, 1, 2, 2, 3, 3, 1, 2, 2, 3, 4, 4, 1, 2, 3];
    let decoded = |graphs| {
        let model = tiny(cuda(CudaOptions { graphs, ..Default::default() }));
        let mut decoding = Decoding::new(&model, 16);
        decoding.pass(16, &[3, 5]).unwrap();
        COUNTS.map(|count| {
            let logits = decoding.pass(count, &[count as u32]).unwrap();
            (logits, decoding.cache.recorded_steps())
        })
    };
    let (recorded, launched) = (decoded(true), decoded(false));
    for (i, count) in COUNTS.into_iter().enumerate() {
        assert!(recorded[i].0 == launched[i].0, "step {i}, {count} sequences");
        assert_eq!((recorded[i].1, launched[i].1), (RECORDED[i], 0), "step {i}, {count} sequences");
    }
}

/// Whatever allocation fails: a pass gives the right logits, or an error and the sequences as they were. It never hangs.
#[test]
fn no_allocation_is_the_wrong_one_to_fail() {
    if !emulator::on_gpu() {
        in_child("graphs_out_of_memory", &[]);
    }
}

fn out_of_memory() {
    /// Sequences of each pass, and their tokens. The fourth records steps of one sequence, the fifth those of three: it makes
    /// the workspace larger, so that the last records those of one again.
    const PASSES: [(usize, &[u32]); 7] =
        [(3, &[3, 5]), (3, &[7]), (1, &[2]), (1, &[9]), (3, &[11]), (3, &[13]), (1, &[4])];
    let model = tiny(cuda(CudaOptions::default()));
    // The first pass that may fail, the first allocation that fails then, and how many after it do; the logits.
    let run = |from: usize, first: usize, count: usize| {
        let mut decoding = Decoding::new(&model, 3);
        let (mut logits, mut reached) = (Vec::new(), false);
        for (i, (sequences, tokens)) in PASSES.into_iter().enumerate() {
            if i == from {
                emulator::fail_allocations(first, count);
            }
            let before: Vec<usize> = decoding.sequences.iter().map(|s| decoding.cache.len(*s).unwrap()).collect();
            let given = decoding.pass(sequences, tokens);
            reached |= i >= from && emulator::allocations() >= first;
            let given = given.or_else(|error| {
                let place = format!("pass {i}, allocation {first} and {count} in all: {error}");
                assert!(reached && error.to_string().contains("out of memory"), "{place}");
                let after: Vec<usize> = decoding.sequences.iter().map(|s| decoding.cache.len(*s).unwrap()).collect();
                assert_eq!(after, before, "{place}");
                emulator::fail_allocations(0, 0);
                decoding.pass(sequences, tokens)
            });
            logits.push(given.unwrap());
        }
        emulator::fail_allocations(0, 0);
        let why = decoding.cache.unrecorded().map(str::to_string);
        assert!(why.is_none() || why.as_ref().is_some_and(|why| why.contains("out of memory")), "{why:?}");
        assert_eq!(decoding.cache.recorded_steps(), 2 - usize::from(why.is_some()));
        (logits, reached, why.is_some())
    };
    let (wanted, ..) = run(PASSES.len(), 1, 1);
    let held = emulator::allocated();
    let mut without_graph = 0;
    // One that fails is tried again without what the pool keeps; of two both fail.
    for (from, count) in [(3, 1), (0, 2), (3, 1_000_000)] {
        for first in 1.. {
            let (logits, reached, unrecorded) = run(from, first, count);
            assert!(logits == wanted, "pass {from} on, allocation {first} and {count} in all");
            assert_eq!(emulator::allocated(), held, "pass {from} on, allocation {first} and {count} in all");
            assert!(!unrecorded || count > 1, "allocation {first} is not tried again");
            without_graph += usize::from(unrecorded);
            if !reached {
                assert!(!unrecorded && first > 5);
                break;
            }
        }
    }
    // The memory of two recordings and three graphs, by two failures and by failures without end.
    assert!(without_graph >= 10, "{without_graph}");
}

/// Speculative decoding tells why steps of the draft were not recorded.
#[test]
fn speculation_tells_of_unrecorded_steps() {
    if !emulator::on_gpu() {
        in_child("graphs_speculation", &[]);
    }
}

fn speculation() {
    let model = tiny(cuda(CudaOptions::default()));
    let with = Speculation { draft: &model, ahead: Ahead::Fixed(3), cache: None, draft_scales: None };
    // Two allocations fail: one of them is tried again.
    let run = |first: usize| {
        let mut sampler = Sampler::new(SamplerOptions { temperature: 0.0, ..SamplerOptions::default() }).unwrap();
        emulator::fail_allocations(first, 2);
        let generated = speculate::generate(&model, &with, &[3, 5, 7], &[], 12, &mut sampler, &mut |_| true);
        let allocations = emulator::allocations();
        emulator::fail_allocations(0, 0);
        (generated.map(|(_, told)| told.unrecorded), allocations)
    };
    let (unrecorded, allocations) = run(0);
    assert_eq!(unrecorded.unwrap(), [""; 0]);
    let told = (1..=allocations).rev().find_map(|first| run(first).0.ok().filter(|reasons| !reasons.is_empty()));
    let told = told.unwrap();
    assert!(told.len() == 1 && told[0].contains("out of memory"), "{told:?}");
}

/// Memory kept by the pool is used for recorded steps, and given back where the driver needs it for graphs and modules.
#[test]
fn memory_that_the_pool_keeps_is_enough() {
    if !emulator::on_gpu() {
        in_child("graphs_kept_memory", &[("MEMORY_MB", "32")]);
    }
}

fn kept_memory() {
    let model = tiny(cuda(CudaOptions::default()));
    let mut decoding = Decoding::new(&model, 2);
    decoding.pass(2, &[3, 5]).unwrap();
    decoding.pass(2, &[7]).unwrap();
    let x = model.backend().upload(1, 8, vec![1.0; 8]).unwrap();
    let mut gram = model.backend().gram(8).unwrap();
    // All that is free is used once, so that the pool keeps it.
    let fill = || {
        let free = model.backend().free_memory().unwrap() as usize / 4;
        drop(model.backend().upload(1, free, vec![0.0; free]).unwrap());
        assert!(cudarc::driver::result::mem_get_info().unwrap().0 < 4);
    };
    fill();
    decoding.pass(2, &[7]).unwrap();
    assert_eq!((decoding.cache.recorded_steps(), decoding.cache.unrecorded()), (1, None));
    fill();
    // Its kernel is in a module that is not loaded yet.
    model.backend().add_gram(&x, &mut gram).unwrap();
    assert!(cudarc::driver::result::mem_get_info().unwrap().0 > 64 << 10);
}

#[test]
fn caches_are_dropped_while_another_step_is_recorded() {
    if !emulator::on_gpu() {
        in_child("graphs_dropped", &[]);
        in_child("graphs_dropped", &[("SCHEDULE", "lazy")]);
    }
}

fn dropped() {
    let backend = cuda(CudaOptions::default());
    let model = tiny(backend.clone());
    let decoding = |steps: usize| {
        let mut decoding = Decoding::new(&model, 3);
        decoding.pass(3, &[3, 5]).unwrap();
        let logits: Vec<_> = (0..steps).map(|i| decoding.pass(3, &[i as u32]).unwrap()).collect();
        (decoding, logits)
    };
    let (mut stays, mut first) = decoding(3);
    let x = backend.upload(1, 64, noise(64, 1)).unwrap();
    let doubled: Vec<f32> = noise(64, 1).into_iter().map(|x| x + x).collect();
    let double = || {
        let mut y = x.clone();
        backend.add(&mut y, &x).unwrap();
        y
    };
    assert_eq!(backend.download(&double()).unwrap(), doubled);
    let workspace = backend.workspace(1 << 16).unwrap();
    // What is enqueued is through after a download.
    let allocated = || {
        backend.download(&x).unwrap();
        emulator::allocated()
    };
    let held = allocated();
    let (goes, _) = decoding(3);
    assert_eq!(goes.cache.recorded_steps(), 1);

    let recording = backend.begin_recording(&workspace).unwrap();
    drop(goes);
    let y = double();
    let mut recording = recording.finish().unwrap();
    recording.run().unwrap();
    assert_eq!(backend.download(&y).unwrap(), doubled);
    assert_eq!(allocated(), held);
    // Discarding a recording releases them as well.
    let (goes, _) = decoding(3);
    let thrown = backend.begin_recording(&workspace).unwrap();
    drop((goes, double()));
    drop(thrown);
    assert_eq!(allocated(), held);
    // The others are as before.
    first.push(stays.pass(3, &[3]).unwrap());
    assert!(decoding(4).1 == first);
}

/// A recording that is not finished, for a panic or an error, leaves a device that works, and records.
#[test]
fn broken_recordings_end() {
    let backend = cuda(CudaOptions::default());
    let values = noise(96, 1);
    let doubled: Vec<f32> = values.iter().map(|x| x + x).collect();
    let x = backend.upload(1, 96, values).unwrap();
    let double = || {
        let mut y = x.clone();
        backend.add(&mut y, &x).map(|()| y)
    };
    let check = || assert_eq!(backend.download(&double().unwrap()).unwrap(), doubled);
    check();
    let workspace = backend.workspace(512).unwrap();
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let _recording = backend.begin_recording(&workspace).unwrap();
        let _y = double().unwrap();
        panic!("while it is recorded");
    }));
    assert!(panicked.is_err());
    check();
    // What asks for more memory than was measured, and what would have to be loaded.
    let recording = backend.begin_recording(&workspace).unwrap();
    let (_first, second) = (double().unwrap(), double());
    let why = second.map(drop).unwrap_err().to_string();
    assert!(why.contains("more than the 512 bytes that were measured"), "{why}");
    drop(recording);
    check();
    let recording = backend.begin_recording(&workspace).unwrap();
    let why = backend.abs_max(&x).unwrap_err().to_string();
    assert!(why.contains("kernel `column_abs_max` is not loaded, and a recording cannot load it"), "{why}");
    let why = backend.upload(1, 8, vec![0.0; 8]).unwrap_err().to_string();
    assert!(why.contains("a recording cannot copy from host memory"), "{why}");
    assert!(backend.begin_recording(&workspace).map(drop).unwrap_err().to_string().contains("under way already"));
    assert!(backend.begin_step().map(drop).unwrap_err().to_string().contains("under way already"));
    drop(recording);
    check();
    let recording = backend.begin_recording(&workspace).unwrap();
    let y = double().unwrap();
    let mut recording = recording.finish().unwrap();
    recording.run().unwrap();
    assert_eq!(backend.download(&y).unwrap(), doubled);
}
