//! Continuous batching: a request's tokens are the same alone and in any company.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use quantkit::backend::Backend;
use quantkit::backend::cache::CacheType;
use quantkit::backend::cpu::Cpu;
use quantkit::checkpoint::Checkpoint;
use quantkit::engine::cache::{Cache, CacheOptions, Room};
use quantkit::engine::generate::{Stop, generate};
use quantkit::engine::pass::{Part, Wanted, pass};
use quantkit::engine::sampler::{Sampler, SamplerOptions};
use quantkit::engine::scheduler::{Happened, Request, Scheduler, SchedulerOptions, Totals};
use quantkit::format;
use quantkit::model::Model;
use quantkit::model::source::DenseSource;

use crate::support::scene::Scene;
use crate::support::{fixture, golden_logits};

pub fn demo(backend: Arc<dyn Backend>) -> Model {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("calib/demo/target");
    Model::open(Box::new(DenseSource(Checkpoint::open(&dir).unwrap())), backend).unwrap()
}

fn sampler(temperature: f64, seed: u64) -> Sampler {
    Sampler::new(SamplerOptions { temperature, top_p: 0.95, seed, ..SamplerOptions::default() }).unwrap()
}

/// Prompts shorter and longer than a chunk, greedy and sampled, one of them several times.
fn requests(scale: usize) -> Vec<Request> {
    let (tokens, _) = golden_logits(&fixture("demo/logits.safetensors"));
    let text: Vec<u32> = tokens.iter().cycle().copied().take(400).collect();
    let request = |from: usize, len: usize, limit: usize, samplers: Vec<Sampler>| Request {
        prompt: text[from..from + len].to_vec(),
        limit,
        end: vec![],
        samplers,
    };
    vec![
        request(0, 3, 30 * scale, vec![sampler(0.0, 0)]),
        request(5, 9 * scale, 6, vec![sampler(0.9, 1), sampler(0.9, 2), sampler(0.9, 3)]),
        request(11, 30 * scale, 8 * scale, vec![sampler(0.9, 4)]),
        request(2, 1, 25 * scale, vec![sampler(1.2, 5)]),
        request(40, 17, 5, vec![sampler(0.0, 6)]),
        request(1, 16 * scale, 4 * scale, vec![sampler(0.7, 7)]),
        request(3, 4, 0, vec![sampler(0.7, 7)]),
    ]
}

/// Tokens and the end of each sample of each request.
type Outcome = BTreeMap<(usize, usize), (Vec<u32>, Option<Stop>)>;

/// How requests come, and what there is for them.
struct Case {
    kind: CacheType,
    blocks: usize,
    swap_blocks: usize,
    options: SchedulerOptions,
    /// Requests in the order in which they come, one after so many steps each.
    order: Vec<usize>,
    apart: usize,
}

impl Case {
    fn run(&self, model: &Model, requests: &[Request]) -> (Outcome, Totals) {
        let mut options = CacheOptions::for_sequences(64, 160);
        (options.kind, options.room) = (Some(self.kind), Room::Blocks(self.blocks));
        let block = Cache::new(model, options.clone()).unwrap().block_bytes();
        options.swap_bytes = (self.swap_blocks * block) as u64;
        let mut scheduler = Scheduler::new(model, Cache::new(model, options).unwrap(), self.options).unwrap();
        let (mut outcome, mut numbers, mut next) = (Outcome::new(), Vec::new(), 0);
        while next < self.order.len() || !scheduler.is_idle() {
            while next < self.order.len() && (self.apart == 0 || scheduler.totals().steps >= next * self.apart) {
                numbers.push(self.order[next]);
                assert_eq!(scheduler.submit(requests[self.order[next]].clone()).unwrap() + 1, numbers.len());
                next += 1;
            }
            for event in scheduler.step().unwrap() {
                let entry = outcome.entry((numbers[event.request], event.sample)).or_default();
                assert_eq!(entry.1, None, "more after the end");
                match event.what {
                    Happened::Token(token) => entry.0.push(token),
                    Happened::Stopped(stop) => entry.1 = Some(stop),
                }
            }
            assert!(scheduler.totals().steps < 10_000, "no progress: {:?}", scheduler.totals());
            let now = scheduler.cache().statistics();
            assert!(now.used <= now.blocks && now.swapped <= self.swap_blocks);
        }
        assert!(scheduler.cache().is_empty());
        assert_eq!(scheduler.cache().free_blocks(), scheduler.cache().blocks());
        (outcome, scheduler.totals())
    }
}

/// Each request alone, then in all kinds of company.
fn company_does_not_matter(model: &Model, kind: CacheType, scale: usize) {
    let requests = requests(scale);
    let options = SchedulerOptions { max_num_seqs: 9, max_num_batched_tokens: 33 };
    let case = |blocks, swap_blocks, options, order: &[usize], apart| Case {
        kind,
        blocks,
        swap_blocks,
        options,
        order: order.to_vec(),
        apart,
    };
    let forwards: Vec<usize> = (0..requests.len()).collect();
    let backwards: Vec<usize> = forwards.iter().rev().copied().collect();
    let mut want = Outcome::new();
    for i in &forwards {
        want.extend(case(100, 0, options, &[*i], 0).run(model, &requests).0);
    }
    assert_eq!(want.len(), 9);
    for ((request, _), (tokens, stop)) in &want {
        assert_eq!((tokens.len(), *stop), (requests[*request].limit, Some(Stop::Limit)));
    }
    // The samples of one prompt differ, so that mixing them up would show.
    assert!(want[&(1, 0)] != want[&(1, 1)] && want[&(1, 1)] != want[&(1, 2)]);

    let check = |what: &str, case: Case| {
        let (outcome, totals) = case.run(model, &requests);
        assert!(outcome == want, "{kind}, {what}:\n{outcome:?}\n{want:?}");
        totals
    };
    let at_once = check("all at once", case(100, 0, options, &forwards, 0));
    assert_eq!((at_once.swapped, at_once.recomputed), (0, 0));
    assert!(at_once.most_sequences > 5, "{at_once:?}");
    check("backwards", case(100, 0, options, &backwards, 0));
    check("one by one", case(100, 0, options, &[3, 0, 6, 5, 1, 4, 2], 2));
    // The longest request alone just fits.
    let longest = requests.iter().map(|r| (r.prompt.len() + r.limit).div_ceil(16)).max().unwrap();
    let swapped = check("swapping", case(longest + 1, 100, options, &forwards, 0));
    assert!(swapped.swapped > 0 && swapped.recomputed == 0, "{swapped:?}");
    let recomputed = check("recomputing", case(longest + 1, 0, options, &forwards, 0));
    assert!(recomputed.swapped == 0 && recomputed.recomputed > 0, "{recomputed:?}");
    check("both", case(longest + 2, 2, options, &[2, 1, 0, 3, 4, 5, 6], 1));
    check("both, backwards", case(longest, 1, options, &backwards, 0));
    // As many tokens are left for a chunk.
    let narrow = SchedulerOptions { max_num_seqs: 3, max_num_batched_tokens: 27 };
    check("few at a time", case(100, 0, narrow, &forwards, 0));
}

#[test]
fn company_does_not_matter_on_the_cpu() {
    let model = demo(Arc::new(Cpu));
    for kind in [CacheType::F32, CacheType::F16, CacheType::Int8] {
        company_does_not_matter(&model, kind, 2);
    }
}

#[test]
fn nor_for_artifacts_of_four_bits() {
    let scene = Scene::demo();
    scene.run(&["rtn", "--bits", "4", "--group-size", "32", "--no-eval", "-o", "four"]).ok();
    let opened = format::open(Checkpoint::open(&scene.path("four")).unwrap()).unwrap();
    let model = Model::open(opened.source, Arc::new(Cpu)).unwrap();
    company_does_not_matter(&model, CacheType::F32, 2);
    company_does_not_matter(&model, CacheType::Fp8E4m3, 1);
}

/// A little of the same, for the emulator.
pub fn a_little_company_does_not_matter(backend: Arc<dyn Backend>) {
    let model = demo(backend);
    let all = requests(1);
    let shorter = |i: usize, prompt: usize, limit: usize| Request {
        prompt: all[i].prompt[..prompt].to_vec(),
        limit,
        ..all[i].clone()
    };
    let requests = [shorter(0, 3, 15), shorter(1, 9, 12), shorter(2, 22, 4)];
    let options = SchedulerOptions { max_num_seqs: 6, max_num_batched_tokens: 25 };
    let run = |order: &[usize], blocks, swap_blocks| {
        Case { kind: CacheType::F16, blocks, swap_blocks, options, order: order.to_vec(), apart: 0 }
            .run(&model, &requests)
    };
    let mut want = Outcome::new();
    for i in 0..requests.len() {
        want.extend(run(&[i], 100, 0).0);
    }
    assert_eq!(want.len(), 5);
    let (outcome, totals) = run(&[0, 1, 2], 4, 100);
    assert!(outcome == want, "{outcome:?}\n{want:?}");
    assert!(totals.swapped > 0, "{totals:?}");
    let (outcome, totals) = run(&[0, 1, 2], 4, 0);
    assert!(outcome == want, "{outcome:?}\n{want:?}");
    assert!(totals.recomputed > 0, "{totals:?}");
}

/// A sample of several is the sample of one with that seed, and a request is what `generate` makes of it.
#[test]
fn samples_are_those_of_single_runs() {
    let model = demo(Arc::new(Cpu));
    let options = SchedulerOptions::default();
    let case = Case { kind: CacheType::F32, blocks: 100, swap_blocks: 0, options, order: vec![0, 1], apart: 0 };
    let all = requests(2);
    let (outcome, _) = case.run(&model, &[all[1].clone(), all[2].clone()]);
    for (request, sample, seed) in [(0, 0, 1), (0, 1, 2), (0, 2, 3), (1, 0, 4)] {
        let Request { prompt, limit, .. } = &all[request + 1];
        let mut tokens = Vec::new();
        let each = &mut |token| {
            tokens.push(token);
            true
        };
        let stop = generate(&model, prompt, &[], *limit, &mut sampler(0.9, seed), each).unwrap();
        assert_eq!(outcome[&(request, sample)], (tokens, Some(stop)), "{request}, {sample}");
    }
}

/// What ends a sample ends it in company too: an end token, a full context.
#[test]
fn samples_end() {
    let model = demo(Arc::new(Cpu));
    let cache = || Cache::new(&model, CacheOptions::for_sequences(4, 40)).unwrap();
    let mut greedy = requests(1)[0].clone();
    greedy.limit = 100;
    let run = |requests: Vec<Request>| {
        let mut scheduler = Scheduler::new(&model, cache(), SchedulerOptions::default()).unwrap();
        for request in requests {
            scheduler.submit(request).unwrap();
        }
        let mut ends: Vec<(Vec<u32>, Option<Stop>)> = vec![Default::default(); 2];
        scheduler
            .run(&mut |event| match event.what {
                Happened::Token(token) => ends[event.request].0.push(token),
                Happened::Stopped(stop) => ends[event.request].1 = Some(stop),
            })
            .unwrap();
        ends
    };
    let whole = run(vec![greedy.clone(), greedy.clone()]);
    // 40 tokens are in the cache; the one after them is the last.
    assert_eq!((whole[0].0.len(), whole[0].1), (38, Some(Stop::Context)));
    assert_eq!(whole[0], whole[1]);
    let end = whole[0].0[5];
    let first = whole[0].0.iter().position(|token| *token == end).unwrap();
    let ended = run(vec![greedy.clone(), Request { end: vec![end], ..greedy }]);
    assert_eq!(ended[0], whole[0]);
    assert_eq!(ended[1], (whole[0].0[..first].to_vec(), Some(Stop::End)));
}

#[test]
fn what_cannot_be_done_is_told() {
    let model = demo(Arc::new(Cpu));
    let cache = |blocks| {
        let options = CacheOptions::for_sequences(8, 160);
        Cache::new(&model, CacheOptions { room: Room::Blocks(blocks), ..options }).unwrap()
    };
    let scheduler = |blocks| Scheduler::new(&model, cache(blocks), SchedulerOptions::default()).unwrap();
    let says = |error: String, words: &str| assert!(error.contains(words), "{error}");
    let error = |seqs, tokens| {
        let options = SchedulerOptions { max_num_seqs: seqs, max_num_batched_tokens: tokens };
        Scheduler::new(&model, cache(9), options).err().unwrap().to_string()
    };
    says(error(0, 10), "max-num-seqs is 0");
    says(error(10, 10), "max-num-batched-tokens 10");
    let good = requests(1)[0].clone();
    let submit = |blocks: usize, request: Request| scheduler(blocks).submit(request).unwrap_err().to_string();
    says(submit(9, Request { prompt: vec![], ..good.clone() }), "request 0: the prompt is empty");
    says(submit(9, Request { prompt: vec![1; 160], ..good.clone() }), "has 160 tokens");
    says(submit(9, Request { prompt: vec![u32::MAX], ..good.clone() }), "outside the vocabulary");
    says(submit(9, Request { samplers: vec![], ..good.clone() }), "wants 0 samples");
    says(submit(2, Request { prompt: vec![1; 32], ..good.clone() }), "33 tokens take 3 blocks of 16, and there are 2");

    // The second one outgrows the pool once it is alone; without it the others go on.
    let mut scheduler = scheduler(3);
    let long = Request { limit: 100, ..good.clone() };
    for request in [good.clone(), long, good.clone()] {
        scheduler.submit(request).unwrap();
    }
    let error = loop {
        if let Err(error) = scheduler.step() {
            break error.to_string();
        }
    };
    says(error, "request 1 does not fit into the key-value cache: 49 tokens take 4 blocks of 16, and there are 3");
    scheduler.cancel(1).unwrap();
    let mut ended = Vec::new();
    scheduler
        .run(&mut |event| {
            if let Happened::Stopped(stop) = event.what {
                ended.push((event.request, stop));
            }
        })
        .unwrap();
    assert_eq!(ended, [(2, Stop::Limit)]);
    assert!(scheduler.cache().is_empty());
}

/// A token that breaks the model breaks its own request alone.
#[test]
fn broken_logits_are_of_one_request() {
    let scene = Scene::tiny("llama");
    let open = || {
        let source = Box::new(DenseSource(Checkpoint::open(&scene.model()).unwrap()));
        Model::open(source, Arc::new(Cpu)).unwrap()
    };
    let prompts: [&[u32]; 3] = [&[5, 9, 3], &[17, 40], &[60, 2, 8, 31]];
    let text = |model: &Model, prompt: &[u32]| {
        let mut tokens = Vec::new();
        generate(model, prompt, &[], 12, &mut sampler(0.0, 0), &mut |token| {
            tokens.push(token);
            true
        })
        .unwrap();
        tokens
    };
    let sound = open();
    let texts = prompts.map(|prompt| text(&sound, prompt));
    // A token that only one of them writes, and not as its last: reading it breaks its sequence.
    let alone = |i: usize| {
        let others = || prompts.iter().map(|p| p.to_vec()).chain((0..3).filter(|j| *j != i).map(|j| texts[j].clone()));
        texts[i][..11].iter().copied().find(|token| !others().flatten().any(|other| other == *token))
    };
    let (bad, token) = [0, 1, 2].iter().find_map(|i| Some((*i, alone(*i)?))).unwrap();
    scene.edit_weights(|tensors| {
        let table = tensors.get_mut("model.embed_tokens.weight").unwrap();
        let row = table.data.len() / table.shape[0];
        table.data[token as usize * row..(token as usize + 1) * row].fill(0xff);
    });
    let broken = open();
    // The one that breaks first, before those that it could ruin.
    let order = [bad, (bad + 1) % 3, (bad + 2) % 3];
    let cache = Cache::new(&broken, CacheOptions::for_sequences(3, 40)).unwrap();
    let mut scheduler = Scheduler::new(&broken, cache, SchedulerOptions::default()).unwrap();
    for i in order {
        let (prompt, samplers) = (prompts[i].to_vec(), vec![sampler(0.0, 0)]);
        scheduler.submit(Request { prompt, limit: 12, end: vec![], samplers }).unwrap();
    }
    let mut found = [Vec::new(), Vec::new(), Vec::new()];
    let mut failed = 0;
    while !scheduler.is_idle() {
        match scheduler.step() {
            Ok(events) => events.into_iter().for_each(|event| {
                if let Happened::Token(token) = event.what {
                    found[order[event.request]].push(token);
                }
            }),
            Err(error) => {
                failed += 1;
                assert!(error.to_string().contains("not finite"), "{error}");
                // It fails again as long as it is there.
                if failed > 1 {
                    scheduler.cancel(0).unwrap();
                }
            }
        }
    }
    assert_eq!(failed, 2);
    let until = texts[bad].iter().position(|other| *other == token).unwrap() + 1;
    assert_eq!(found[bad], texts[bad][..until]);
    for i in [order[1], order[2]] {
        assert_eq!(found[i], texts[i], "request {i}");
    }
    assert!(scheduler.cache().is_empty());

    // A prompt that breaks does not take those along that are read with it: they have their first tokens from the step
    // that fails.
    let cache = Cache::new(&broken, CacheOptions::for_sequences(3, 40)).unwrap();
    let mut scheduler = Scheduler::new(&broken, cache, SchedulerOptions::default()).unwrap();
    for prompt in [prompts[order[1]], &[token, 5], prompts[order[2]]] {
        let samplers = vec![sampler(0.0, 0)];
        scheduler.submit(Request { prompt: prompt.to_vec(), limit: 12, end: vec![], samplers }).unwrap();
    }
    let error = scheduler.step().unwrap_err();
    assert!(error.to_string().contains("not finite"), "{error}");
    scheduler.cancel(1).unwrap();
    let mut found = [Vec::new(), Vec::new()];
    scheduler
        .run(&mut |event| {
            if let Happened::Token(token) = event.what {
                found[event.request / 2].push(token);
            }
        })
        .unwrap();
    assert_eq!(found, [texts[order[1]].clone(), texts[order[2]].clone()]);
    assert_eq!(scheduler.totals().steps, 12);
}

/// Passes over a cache: several positions at once, forks, and going back.
#[test]
fn sequences_can_be_forked_and_cut() {
    let model = demo(Arc::new(Cpu));
    let (tokens, _) = golden_logits(&fixture("demo/logits.safetensors"));
    let mut cache = Cache::new(&model, CacheOptions::for_sequences(3, 64)).unwrap();
    let download = |logits| model.backend().download(&logits).unwrap();
    let seq = cache.add();
    pass(&model, &mut cache, &[Part { seq, tokens: &tokens[..20], wanted: Wanted::None }]).unwrap();
    let fork = cache.fork(seq).unwrap();
    assert_eq!(cache.statistics().used, 2);
    let next = &tokens[20..26];
    let all = download(pass(&model, &mut cache, &[Part { seq, tokens: next, wanted: Wanted::All }]).unwrap());
    assert_eq!((cache.statistics().used, cache.len(seq).unwrap(), cache.len(fork).unwrap()), (3, 26, 20));
    let vocab = model.config.vocab;
    // The fork one by one, beside a sequence that is cut again and again.
    for (i, token) in next.iter().enumerate() {
        cache.truncate(seq, 10 + i).unwrap();
        let parts = [
            Part { seq, tokens: &tokens[1..3], wanted: Wanted::Last },
            Part { seq: fork, tokens: &[*token], wanted: Wanted::Last },
        ];
        let both = download(pass(&model, &mut cache, &parts).unwrap());
        assert!(both[vocab..] == all[i * vocab..(i + 1) * vocab], "token {i}");
    }
    let none: [u32; 0] = [];
    assert!(pass(&model, &mut cache, &[Part { seq, tokens: &none, wanted: Wanted::All }]).is_err());
    assert!(pass(&model, &mut cache, &[Part { seq, tokens: &[u32::MAX], wanted: Wanted::All }]).is_err());
    let before = cache.len(seq).unwrap();
    assert!(pass(&model, &mut cache, &[Part { seq, tokens: &tokens[..50], wanted: Wanted::All }]).is_err());
    assert_eq!(cache.len(seq).unwrap(), before);
}

#[test]
fn caches_are_no_larger_than_what_they_are_for() {
    let model = demo(Arc::new(Cpu));
    let blocks = |room| {
        Cache::new(&model, CacheOptions { room, ..CacheOptions::for_sequences(3, 100) }).map(|cache| cache.blocks())
    };
    let block = Cache::new(&model, CacheOptions::for_sequences(1, 1)).unwrap().block_bytes() as u64;
    assert_eq!(blocks(Room::Blocks(1000)).unwrap(), 21);
    assert_eq!(blocks(Room::Bytes(5 * block + 1)).unwrap(), 5);
    assert_eq!(blocks(Room::Share(0.5)).unwrap(), 21);
    for (room, word) in [(Room::Bytes(block - 1), "a block of 16 tokens takes"), (Room::Share(1.5), "a share of 1.5")] {
        let error = blocks(room).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
}
