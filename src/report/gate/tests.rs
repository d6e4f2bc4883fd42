#![allow(clippy::unwrap_used)]

use std::path::Path;

use super::*;
use crate::evaluate::perplexity::WindowNats;
use crate::integrity::Check;
use crate::report::thresholds::Percent;

fn sample(name: &str) -> Report {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/report").join(name);
    Report::read(&path).unwrap()
}

fn both() -> (Report, Report) {
    (sample("report.json"), sample("baseline.json"))
}

fn row<'a>(verdict: &'a Verdict, what: &str) -> &'a Row {
    let all = || verdict.rows.iter().map(|row| row.what.as_str()).collect::<Vec<_>>();
    verdict.rows.iter().find(|row| row.what == what).unwrap_or_else(|| panic!("no `{what}` in {:?}", all()))
}

fn outcome(report: &Report, baseline: Option<&Report>, limits: &Thresholds, what: &str) -> Outcome {
    row(&judge(report, baseline, limits), what).outcome
}

#[test]
fn without_limits_only_faults_fail() {
    let (report, baseline) = both();
    for baseline in [None, Some(&baseline)] {
        let verdict = judge(&report, baseline, &Thresholds::default());
        assert!(verdict.passed(), "{:?}", verdict.failures());
        assert_eq!(verdict.count(Outcome::Warn), 2, "the two checks that warn");
    }
    let strict = Thresholds { fail_on_warnings: true, ..Thresholds::default() };
    assert_eq!(judge(&report, None, &strict).failures().len(), 2);
}

#[test]
fn perplexity_is_judged_by_its_paired_error() {
    let (mut report, _) = both();
    let what = "perplexity over the reference, heldout";
    let limit = |percent| Thresholds { max_ppl_increase: Some(Percent(percent)), ..Thresholds::default() };
    // 2.31 % with an error of 0.21 points.
    assert_eq!(outcome(&report, None, &limit(0.024), what), Outcome::Pass);
    assert_eq!(outcome(&report, None, &limit(0.021), what), Outcome::Warn);
    assert_eq!(outcome(&report, None, &limit(0.019), what), Outcome::Fail);
    assert!(!judge(&report, None, &limit(0.019)).passed());
    report.perplexity[0].ratio_stderr = 0.0;
    assert_eq!(outcome(&report, None, &limit(0.023), what), Outcome::Fail, "without noise there is no doubt");
}

#[test]
fn windows_sharpen_the_comparison_with_a_baseline() {
    let (mut report, mut baseline) = both();
    let what = "perplexity, heldout";
    let limit = Thresholds { max_ppl_increase: Some(Percent(0.001)), ..Thresholds::default() };
    let verdict = judge(&report, Some(&baseline), &limit);
    let sharp = row(&verdict, what).clone();
    assert!((sharp.moved.unwrap() - (1.0231 / 1.0187 - 1.0)).abs() < 1e-6, "{sharp:?}");
    assert_eq!(sharp.outcome, Outcome::Fail);
    // Without windows the same move is within the noise of two ratios.
    for on in report.perplexity.iter_mut().chain(&mut baseline.perplexity) {
        on.windows.clear();
    }
    let verdict = judge(&report, Some(&baseline), &limit);
    let blunt = row(&verdict, what);
    assert!((blunt.moved.unwrap() - sharp.moved.unwrap()).abs() < 1e-6);
    assert!(blunt.moved_stderr.unwrap() > 2.0 * sharp.moved_stderr.unwrap());
    assert_eq!(blunt.outcome, Outcome::Warn);
    // The same artifact again.
    let verdict = judge(&baseline, Some(&baseline), &limit);
    assert_eq!((row(&verdict, what).moved, row(&verdict, what).outcome), (Some(0.0), Outcome::Pass));
}

#[test]
fn only_like_is_compared() {
    let limits = Thresholds { max_ppl_increase: Some(Percent(1.0)), ..Thresholds::default() };
    type Change = fn(&mut Report);
    let cases: [(&str, Change); 6] = [
        ("another text", |r| r.perplexity[0].corpus.sha256 = "0".into()),
        ("convention llamacpp", |r| {
            r.perplexity[0].corpus.convention = crate::evaluate::windows::Convention::LlamaCpp;
        }),
        ("window 1024", |r| r.perplexity[0].corpus.window = 1024),
        ("tokens 7", |r| r.perplexity[0].corpus.tokens = 7),
        ("the reference is SmolLM2-135M", |r| r.reference.as_mut().unwrap().sha256 = "77".into()),
        ("does not say what its reference was", |r| r.reference = None),
    ];
    for (word, change) in cases {
        let (mut report, baseline) = both();
        change(&mut report);
        let verdict = judge(&report, Some(&baseline), &limits);
        let row = row(&verdict, "perplexity, heldout");
        assert_eq!((row.outcome, row.moved), (Outcome::Unknown, None), "{word}");
        assert!(row.note.contains("not comparable") && row.note.contains(word), "{word}: {}", row.note);
        assert!(verdict.fails(row), "a limit that cannot be told must not pass");
        let free = judge(&report, Some(&baseline), &Thresholds::default());
        assert!(free.passed(), "{word}: {:?}", free.failures());
    }
    let (mut report, baseline) = both();
    report.perplexity[0].corpus.name = "poems".into();
    report.perplexity[0].corpus.sha256 = "1".into();
    let verdict = judge(&report, Some(&baseline), &limits);
    assert!(row(&verdict, "perplexity, poems").note.contains("not measured on poems"));
}

#[test]
fn what_was_not_measured_cannot_pass() {
    let (report, baseline) = both();
    let bare = Report::new(report.artifact.clone(), "cpu");
    let limits: Thresholds = toml::from_str(
        "max_ppl_increase = '1%'\nmax_ppl_over_reference = '1%'\nmax_kl = 1\nmax_kl_p99_9 = 1\nmax_kl_increase = '1%'\n\
         min_same_top = 0\nmin_acceptance = 0\nmin_acceptance_length = 0\nmax_cache_ppl_increase = '1%'\n\
         min_cache_agreement = 0\nmax_module_error = 1\nmax_bits = 9\nmax_bytes = 99\nconsumers = ['vllm-0.33']",
    )
    .unwrap();
    let failures = judge(&bare, Some(&baseline), &limits).failures().join("\n");
    let names = serde_json::to_value(&limits).unwrap();
    for name in names.as_object().unwrap().keys().filter(|name| *name != "consumers") {
        assert!(failures.contains(&format!("`{name}` is asked for")), "{name}: {failures}");
    }
    assert!(failures.contains("loads in vllm-0.33"), "{failures}");
}

#[test]
fn every_limit_can_fail_and_pass() {
    let (report, baseline) = both();
    let cases = [
        ("max_ppl_over_reference = '2.5%'", "max_ppl_over_reference = '1%'", "perplexity over the reference, heldout"),
        ("max_kl = 0.06", "max_kl = 0.02", "mean divergence, heldout"),
        ("max_kl_p99_9 = 5", "max_kl_p99_9 = 0.1", "divergence, 99.9 %, heldout"),
        ("max_kl_increase = '90%'", "max_kl_increase = '0%'", "mean divergence over the baseline, heldout"),
        ("min_same_top = 0.5", "min_same_top = 0.99", "same top token, heldout"),
        ("min_acceptance = 0.4", "min_acceptance = 0.7", "acceptance rate, verifying quantkit-demo-draft"),
        (
            "min_acceptance_length = 2",
            "min_acceptance_length = 3.9",
            "acceptance length, verifying quantkit-demo-draft",
        ),
        (
            "max_cache_ppl_increase = '0.2%'",
            "max_cache_ppl_increase = '0%'",
            "perplexity change, fp8 cache, calibrated scales",
        ),
        ("min_cache_agreement = 0.9", "min_cache_agreement = 0.999", "greedy agreement, fp8 cache, calibrated scales"),
        ("max_bits = 7", "max_bits = 5", "bits per weight"),
        ("max_bytes = '1GB'", "max_bytes = '1MB'", "size of the weights"),
        ("consumers = ['vllm-0.33']", "consumers = ['autoawq-0.2']", ""),
    ];
    for (lax, strict, what) in cases {
        let limits = |text: &str| toml::from_str::<Thresholds>(text).unwrap();
        let lax_verdict = judge(&report, Some(&baseline), &limits(lax));
        // Scales of 1.0 for E5M2 have no better ones beside them, so they are judged too.
        assert!(lax_verdict.passed() || lax.contains("cache"), "{lax}: {:?}", lax_verdict.failures());
        let verdict = judge(&report, Some(&baseline), &limits(strict));
        assert!(!verdict.passed(), "{strict}");
        if !what.is_empty() {
            assert_eq!(row(&lax_verdict, what).outcome, Outcome::Pass, "{lax}");
            let failed = row(&verdict, what).outcome;
            assert!(matches!(failed, Outcome::Fail | Outcome::Warn), "{strict}: {failed:?}");
        }
    }
    let worst = Thresholds { max_module_error: Some(0.01), ..Thresholds::default() };
    let verdict = judge(&report, Some(&baseline), &worst);
    let failures = verdict.failures();
    assert!(failures.len() == 1 && failures[0].contains("largest error of a module, model.layers."), "{failures:?}");
}

#[test]
fn scales_of_one_only_inform_beside_better_ones() {
    let (report, _) = both();
    let limits = Thresholds { max_cache_ppl_increase: Some(Percent(0.0)), ..Thresholds::default() };
    let verdict = judge(&report, None, &limits);
    assert_eq!(row(&verdict, "perplexity change, fp8 cache, scale 1.0").outcome, Outcome::Info);
    assert_eq!(row(&verdict, "perplexity change, fp8_e5m2 cache, scale 1.0").outcome, Outcome::Fail);
}

#[test]
fn failed_checks_and_broken_numbers_fail() {
    let (mut report, baseline) = both();
    report.checks.push(Check { id: "labels".into(), status: Status::Fail, message: "v1 read as v2".into() });
    report.checks.retain(|check| check.id != "scales");
    let verdict = judge(&report, Some(&baseline), &Thresholds::default());
    assert_eq!(verdict.failures(), ["check labels: v1 read as v2"]);
    assert!(row(&verdict, "check scales").note.contains("not now"));

    let (mut report, _) = both();
    report.divergence[1].figures.kl.p99 = f64::NAN;
    report.cache.as_mut().unwrap().types[0].errors.as_mut().unwrap().keys[3][1] = f64::INFINITY;
    let text = report.to_json().unwrap();
    let again = Report::parse(&text, Path::new("report.json")).unwrap();
    let failures = judge(&again, None, &Thresholds::default()).failures().join("\n");
    for place in ["divergence[1].figures.kl.p99", "cache.types[0].errors.keys[3][1]"] {
        assert!(failures.contains(place), "{failures}");
    }
    let limits = Thresholds { max_ppl_increase: Some(Percent(9.0)), ..Thresholds::default() };
    report.perplexity[0].ratio = f64::NAN;
    assert_eq!(outcome(&report, None, &limits, "perplexity over the reference, heldout"), Outcome::Fail);
}

#[test]
fn what_is_no_longer_measured_is_told() {
    let (mut report, baseline) = both();
    report.perplexity.truncate(1);
    report.divergence.truncate(1);
    report.modules.clear();
    report.acceptance.clear();
    report.accounting = None;
    let cache = report.cache.as_mut().unwrap();
    let kept = cache.types.len() - 1;
    cache.types.truncate(kept);
    let engine = baseline.consumers.iter().find(|consumer| consumer.loads).unwrap().name.clone();
    report.consumers.retain(|consumer| consumer.name != engine);
    let gone = |limits: &Thresholds| {
        let verdict = judge(&report, Some(&baseline), limits);
        let rows = verdict.rows.into_iter().filter(|row| row.note.contains("measured for the baseline, and not now"));
        rows.map(|row| (row.what, row.outcome)).collect::<Vec<_>>()
    };
    let free = gone(&Thresholds::default());
    assert!(free.iter().all(|(_, outcome)| *outcome == Outcome::Warn), "{free:?}");
    let names: Vec<&str> = free.iter().map(|(what, _)| what.as_str()).collect();
    let mut wanted = vec!["perplexity, code".to_string(), "divergence, code".into(), "errors of modules".into()];
    let last = &baseline.cache.as_ref().unwrap().types[kept];
    assert!(names.iter().any(|name| name.starts_with(&format!("{} cache", last.kind))), "{names:?}");
    wanted.extend(baseline.acceptance.iter().map(|pair| match pair.role {
        crate::report::Role::Target => format!("acceptance, verifying {}", pair.draft),
        crate::report::Role::Draft => format!("acceptance, drafting for {}", pair.target),
    }));
    wanted.push("accounting".into());
    assert!(wanted.iter().all(|name| names.contains(&name.as_str())), "{wanted:?} {names:?}");
    assert_eq!(names.len(), wanted.len() + 1);
    let verdict = judge(&report, Some(&baseline), &Thresholds::default());
    assert_eq!(row(&verdict, &format!("loads in {engine}")).outcome, Outcome::Warn);
    let limits = Thresholds { max_ppl_increase: Some(Percent(1.0)), max_kl: Some(9.0), ..Thresholds::default() };
    let strict = gone(&limits);
    assert!(strict.contains(&("perplexity, code".into(), Outcome::Unknown)), "{strict:?}");
    assert!(strict.contains(&("divergence, code".into(), Outcome::Unknown)), "{strict:?}");
    let failures = judge(&report, Some(&baseline), &limits).failures();
    assert!(failures.len() == 2 && failures[0].starts_with("perplexity, code: "), "{failures:?}");
    assert_eq!(gone_of(&baseline, &baseline), 0);
}

fn gone_of(report: &Report, baseline: &Report) -> usize {
    let verdict = judge(report, Some(baseline), &Thresholds::default());
    verdict.rows.iter().filter(|row| row.note.contains("not now")).count()
}

/// Names say less than hashes: two texts that have changed places are each held against themselves.
#[test]
fn texts_go_by_what_is_in_them() {
    let (mut report, baseline) = both();
    let name = |report: &mut Report, i: usize, name: &str| report.perplexity[i].corpus.name = name.into();
    name(&mut report, 0, "code");
    name(&mut report, 1, "heldout");
    let verdict = judge(&report, Some(&baseline), &Thresholds::default());
    let row = row(&verdict, "perplexity, code");
    assert_eq!((row.outcome, row.baseline), (Outcome::Info, Some(baseline.perplexity[0].artifact)), "{row:?}");
    assert_eq!(gone_of(&report, &baseline), 0);
}

#[test]
fn growth_from_and_to_nothing_is_told() {
    let (mut report, baseline) = both();
    let limit = Thresholds { max_kl_increase: Some(Percent(0.1)), ..Thresholds::default() };
    let what = "mean divergence over the baseline, heldout";
    for mean in [0.0, -1e-9] {
        report.divergence[0].figures.kl.mean = mean;
        report.divergence[0].figures.kl.stderr = 1e-3;
        let verdict = judge(&report, Some(&baseline), &limit);
        let row = row(&verdict, what);
        assert_eq!(row.outcome, Outcome::Pass, "{row:?}");
        assert!(row.moved_stderr.is_some_and(f64::is_finite), "{row:?}");
    }
}

#[test]
fn nothing_drafted_is_a_failure() {
    let (mut report, _) = both();
    (report.acceptance[0].drafted, report.acceptance[0].rate) = (0, 0.0);
    assert!(!judge(&report, None, &Thresholds::default()).passed());
}

#[test]
fn odd_reports_do_not_panic() {
    let (mut report, baseline) = both();
    report.perplexity[0].windows = vec![WindowNats { nats: f64::NAN, tokens: 0 }; 9];
    let mut other = baseline.clone();
    other.perplexity[0].windows = report.perplexity[0].windows.clone();
    for on in &mut other.divergence {
        on.figures.kl.mean = 0.0;
    }
    let all = Thresholds { max_kl_increase: Some(Percent(0.1)), ..Thresholds::default() };
    let verdict = judge(&report, Some(&other), &all);
    assert!(row(&verdict, "mean divergence over the baseline, heldout").note.contains("does not diverge"));
    judge(&Report::new(Default::default(), ""), Some(&report), &all);
}
