//! Compact baselines: what they keep, what they tell, and files that lie.

use std::path::Path;

use proptest::prelude::*;
use quantkit::evaluate::baseline::{
    BaselineCorpus, BaselineError, CorpusRecord, Header, Reader, Record, ReferenceRecord, Settings, Writer,
};
use quantkit::evaluate::divergence::{Divergence, KlBound, Position, from_logits};
use quantkit::evaluate::windows::{Convention, Window};
use sha2::{Digest, Sha256};

/// Deterministic numbers from -1 to 1, many of them near 0.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Logits of a vocabulary, some far above the others, and what noise makes of them.
    fn rows(&mut self, vocab: usize, noise: f32) -> (Vec<f32>, Vec<f32>) {
        let reference: Vec<f32> = (0..vocab).map(|_| 4.0 * (self.next() + self.next() + self.next())).collect();
        let artifact = reference.iter().map(|x| x + noise * (self.next() + self.next())).collect();
        (reference, artifact)
    }
}

fn exact_but_kl(got: Position, wanted: Position) -> Result<(), TestCaseError> {
    prop_assert_eq!(got.same_top, wanted.same_top);
    for (got, wanted) in [
        (got.delta_p, wanted.delta_p),
        (got.nll_reference, wanted.nll_reference),
        (got.nll_artifact, wanted.nll_artifact),
    ] {
        prop_assert!((got - wanted).abs() < 1e-10, "{} {}", got, wanted);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn the_divergence_lies_within_its_bounds(
        vocab in 1usize..700,
        most in 1usize..300,
        tail in prop::sample::select(vec![0.0, 1e-6, 1e-3, 0.05, 0.5]),
        noise in prop::sample::select(vec![0.0f32, 0.05, 0.5, 3.0, 20.0]),
        seed in any::<u64>(),
    ) {
        let mut numbers = Numbers(seed);
        let (reference, artifact) = numbers.rows(vocab, noise);
        let target = (seed % vocab as u64) as u32;
        let record = Record::of(&reference, target, seed, Settings { tail, most });
        let (got, wanted) = (record.compare(&artifact, target), from_logits(&reference, &artifact, target));
        exact_but_kl(got, wanted)?;
        let within = got.within.unwrap();
        let slack = 2e-6 * (1.0 + wanted.kl);
        prop_assert!(within.least <= wanted.kl + slack && wanted.kl <= within.most + slack, "{:?} {:?}", got, wanted);
        prop_assert!(within.least <= got.kl && got.kl <= within.most, "{:?}", got);
        if most >= vocab && tail == 0.0 {
            prop_assert!((got.kl - wanted.kl).abs() < slack && within.most - within.least < slack);
        }
        if noise == 0.0 {
            prop_assert!(got.kl < slack, "{:?}", got);
        }
    }
}

/// Over many predictions the estimate has no bias, though the bounds leave room: a planted one of a tenth of the
/// tail's part would be seen.
#[test]
fn the_estimate_is_not_biased() {
    let settings = Settings { tail: 0.01, most: 8 };
    for noise in [0.1, 1.0] {
        let mut numbers = Numbers(7);
        let (mut positions, mut exact, mut kept) = (Vec::new(), 0.0, 0.0);
        for seed in 0..1500 {
            let (reference, artifact) = numbers.rows(400, noise);
            let got = Record::of(&reference, 0, seed, settings).compare(&artifact, 0);
            exact += from_logits(&reference, &artifact, 0).kl;
            kept += got.within.unwrap().least;
            positions.push(got);
        }
        let n = positions.len() as f64;
        let (exact, kept) = (exact / n, kept / n);
        let (kl, bound) = (Divergence::of(&positions).unwrap().kl, KlBound::of(&positions).unwrap());
        assert!(exact - kept > 0.2 * exact, "the tail is to matter: {exact} {kept}");
        assert!((kl.mean - exact).abs() < 3.0 * bound.sampling_stderr + 1e-6, "{} {exact} {bound:?}", kl.mean);
        assert!(bound.sampling_stderr < 0.03 * (exact - kept), "{bound:?} {exact} {kept}");
        assert!(bound.lower <= exact && exact <= bound.upper && (bound.lower - kept).abs() < 1e-12, "{bound:?}");
    }
    let exact = from_logits(&[1.0, 2.0], &[2.0, 1.0], 0);
    assert_eq!(KlBound::of(&[exact]), None);
}

#[test]
fn what_is_kept() {
    // p = 1/2, 1/4, 1/8, 1/8.
    let logits: Vec<f32> = [4f32, 8.0, 2.0, 2.0].iter().map(|x| x.ln()).collect();
    let keep = |tail, most| Record::of(&logits, 3, 1, Settings { tail, most });
    let two = keep(0.3, 4);
    assert_eq!(two.ids, [1, 0]);
    assert!((two.tail_log_mass - 0.25f64.ln()).abs() < 1e-6);
    assert!((two.tail_log_sum - 0.25 * 0.125f64.ln()).abs() < 1e-6);
    assert!((two.target_log_prob - 0.125f64.ln()).abs() < 1e-6);
    // Of equals the lower id; a draw for each 1/1000, at most 32, half of them each.
    assert_eq!(keep(0.0, 3).ids, [1, 0, 2]);
    assert_eq!(two.drawn.len(), 32);
    assert_eq!(two.drawn.iter().filter(|(id, _)| *id == 2).count(), 16);
    let all = keep(0.0, 9);
    assert_eq!((all.ids.len(), all.drawn.len(), all.tail_log_mass), (4, 0, f64::NEG_INFINITY));
    assert_eq!(keep(0.3, 1).ids, [1]);
    assert_eq!(two, keep(0.3, 4));
}

const VOCAB: usize = 50;

fn sample() -> (Header, BaselineCorpus) {
    let windows =
        vec![Window { tokens: vec![1, 2, 3, 4], score_from: 1 }, Window { tokens: vec![1, 49, 0], score_from: 2 }];
    let mut numbers = Numbers(3);
    let targets = [2, 3, 4, 0];
    let records: Vec<Record> = targets
        .iter()
        .map(|&t| Record::of(&numbers.rows(VOCAB, 0.0).0, t, 9, Settings { tail: 0.2, most: 20 }))
        .collect();
    assert!(records.iter().all(|r| (2..20).contains(&r.ids.len()) && r.drawn.len() == 32));
    let record = CorpusRecord {
        name: "text".into(),
        text_sha256: "0".repeat(64),
        convention: Convention::Gptq,
        window: 4,
        bos: "once".into(),
        windows: 2,
        positions: 4,
    };
    let header = Header {
        tool: "quantkit 0.0.0".into(),
        reference: ReferenceRecord { name: "model".into(), sha256: "1".repeat(64), tokenizer_sha256: None },
        vocab: VOCAB,
        settings: Settings::default(),
        corpora: vec![record.clone()],
    };
    (header, BaselineCorpus { record, windows, records })
}

fn written(header: &Header, corpora: &[BaselineCorpus]) -> Vec<u8> {
    let mut writer = Writer::new(header.clone());
    corpora.iter().for_each(|corpus| writer.add(corpus).unwrap());
    writer.bytes().unwrap()
}

fn read(bytes: &[u8]) -> Result<Reader, BaselineError> {
    Reader::parse(bytes, Path::new("base.qkl"))
}

#[test]
fn files_are_read_as_written() {
    let (header, corpus) = sample();
    for vocab in [VOCAB, 1 << 16, (1 << 16) + 1] {
        let (header, mut corpus) = (Header { vocab, ..header.clone() }, corpus.clone());
        corpus.windows[1].tokens[1] = vocab as u32 - 1;
        let bytes = written(&header, &[corpus.clone(), corpus.clone()]);
        assert_eq!(bytes, written(&header, &[corpus.clone(), corpus.clone()]));
        let got = read(&bytes).unwrap();
        assert_eq!(got.corpora, [corpus.clone(), corpus.clone()]);
        assert_eq!(got.header.corpora, [corpus.record.clone(), corpus.record.clone()]);
        assert_eq!((got.bytes, got.positions(), &got.header.reference), (bytes.len(), 8, &header.reference));
        assert!((0.01..0.2).contains(&got.mean_tail_mass()));
    }
    let mut short = corpus;
    short.records.pop();
    assert!(Writer::new(header).add(&short).unwrap_err().to_string().contains("4 predictions and records of 3"));
}

/// With its hash made right again.
fn sealed(mut content: Vec<u8>) -> Vec<u8> {
    let hash = Sha256::digest(&content);
    content.extend_from_slice(&hash);
    content
}

fn refused(bytes: &[u8], words: &[&str]) {
    let error = read(bytes).unwrap_err().to_string();
    for word in words.iter().chain(&["base.qkl"]) {
        assert!(error.contains(word), "no `{word}` in: {error}");
    }
}

#[test]
fn damaged_files_are_refused() {
    let (header, corpus) = sample();
    let whole = written(&header, std::slice::from_ref(&corpus));
    for bytes in [&b""[..], b"QKLBASE", b"GGUF and more", b"_logits_ of another program"] {
        refused(bytes, &["does not begin with `QKLBASE`"]);
    }
    for end in [8, 15, 40, 60, whole.len() - 1] {
        refused(&whole[..end], &["truncated or damaged", "--save-baseline"]);
    }
    refused(&[&whole[..], &[0]].concat(), &["truncated or damaged"]);
    for at in (12..whole.len()).step_by(37) {
        let mut bytes = whole.clone();
        bytes[at] ^= 4;
        refused(&bytes, &["truncated or damaged"]);
    }
    let mut other = whole.clone();
    other[8] = 9;
    refused(&other, &["version 9", "--save-baseline"]);
}

/// A file that another program wrote, whose hash is right.
#[test]
fn hostile_files_are_refused() {
    let (header, corpus) = sample();
    let with = |change: &dyn Fn(&mut BaselineCorpus)| {
        let mut changed = corpus.clone();
        change(&mut changed);
        written(&header, &[changed])
    };
    let record = |change: &dyn Fn(&mut Record)| with(&|corpus| change(&mut corpus.records[1]));
    for (bytes, word) in [
        (record(&|r| r.ids[1] = VOCAB as u32), "token 50 is outside the vocabulary of 50"),
        (record(&|r| r.ids[1] = r.ids[0]), "is kept twice"),
        (record(&|r| r.drawn[0].0 = r.ids[0]), "drawn from those that are not"),
        (record(&|r| r.log_probs.swap(0, 1)), "not in the order"),
        (record(&|r| r.log_probs[1] = f32::NAN), "NaN is no log-probability"),
        (record(&|r| r.log_probs[0] = 1.0), "1 is no log-probability"),
        (record(&|r| r.drawn[0].1 = f32::NEG_INFINITY), "-inf is no log-probability"),
        (record(&|r| r.target_log_prob = f64::NAN), "NaN is no log-probability"),
        (record(&|r| r.tail_log_mass = f64::NEG_INFINITY), "ln of the others' mass is -inf"),
        (record(&|r| r.tail_log_mass = -0.01), "the probabilities sum to"),
        (record(&|r| r.tail_log_sum = f64::INFINITY), "the sum of p ln p is inf"),
        (record(&|r| (r.ids, r.log_probs) = (vec![], vec![])), "0 tokens of 50 are kept"),
        (with(&|c| c.windows[1].tokens[0] = 77), "token 77 is outside"),
    ] {
        refused(&bytes, &[word, "damaged"]);
    }
    refused(&record(&|r| r.log_probs.swap(0, 1)), &["prediction 1 of `text`"]);

    // Counts of the header and of windows.
    let whole = written(&header, std::slice::from_ref(&corpus));
    let length = u32::from_le_bytes(whole[12..16].try_into().unwrap()) as usize;
    let text = std::str::from_utf8(&whole[16..16 + length]).unwrap();
    let body = &whole[16 + length..whole.len() - 32];
    let headed = |text: &str, body: &[u8]| {
        let length = (text.len() as u32).to_le_bytes();
        sealed([&whole[..12], &length, text.as_bytes(), body].concat())
    };
    assert_eq!(headed(text, body), whole);
    for (from, to, word) in [
        ("\"positions\":4", "\"positions\":5", "is to have 5 predictions; its windows have 4"),
        ("\"windows\":2", "\"windows\":99999999999", "window 2 of `text`"),
        ("\"windows\":2", "\"windows\":0", "its windows have 0"),
        ("\"vocab\":50", "\"vocab\":0", "the vocabulary has 0 tokens"),
        ("\"vocab\":50", "\"vocab\":99999999999", "the vocabulary has 99999999999 tokens"),
        ("\"vocab\":50", "\"vocab\":-1", "the header is not valid"),
        ("\"tool\"", "\"told\"", "the header is not valid"),
    ] {
        assert!(text.contains(from), "{text}");
        refused(&headed(&text.replace(from, to), body), &[word]);
    }
    refused(&headed(text, &[body, &[0]].concat()), &["1 bytes follow the last record"]);
    refused(&headed(text, &body[..body.len() - 1]), &["are left"]);
    let mut long = body.to_vec();
    long[..4].copy_from_slice(&u32::MAX.to_le_bytes());
    refused(&headed(text, &long), &["are left"]);
    long[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
    refused(&headed(text, &long), &["window 0 of `text`"]);
    let mut far = whole[..whole.len() - 32].to_vec();
    far[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
    refused(&sealed(far), &["are left"]);
}
