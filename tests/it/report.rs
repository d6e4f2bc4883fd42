//! Reports in all their forms, and the commands that read them.

use std::fs;
use std::path::{Path, PathBuf};

use predicates::str::contains;
use quantkit::report::gate::judge;
use quantkit::report::thresholds::Thresholds;
use quantkit::report::{Report, schema, terminal, write_judged};
use serde_json::Value;

use crate::support::command::{command, quantkit};
use crate::support::fixture;

fn golden(name: &str) -> PathBuf {
    fixture("report").join(name)
}

fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap()
}

/// A folder with `report.json`, `baseline.json` and `gate.toml`.
fn scene() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in ["report.json", "baseline.json", "gate.toml"] {
        fs::copy(golden(name), dir.path().join(name)).unwrap();
    }
    dir
}

fn change(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut value: Value = serde_json::from_str(&text(path)).unwrap();
    change(&mut value);
    fs::write(path, value.to_string()).unwrap();
}

/// The forms of the sample report, byte for byte. After a change that is meant: in `tests/golden/report`,
/// `quantkit compare report.json --baseline baseline.json --thresholds gate.toml --html report.html --markdown report.md
/// --junit junit.xml > compare.txt`, and a look at `reference/screenshot_report.py`.
#[test]
fn forms_are_as_they_were_looked_at() {
    let dir = scene();
    let out = ["--html", "report.html", "--markdown", "report.md", "--junit", "junit.xml"];
    let args =
        [&["compare", "report.json", "--baseline", "baseline.json", "--thresholds", "gate.toml"][..], &out].concat();
    let ran = quantkit(dir.path(), &args);
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    assert_eq!(ran.stdout, text(&golden("compare.txt")));
    for name in ["report.html", "report.md", "junit.xml"] {
        let got = text(&dir.path().join(name));
        let wanted = text(&golden(name));
        let line = got.lines().zip(wanted.lines()).find(|(got, wanted)| got != wanted);
        assert!(got == wanted, "{name} is another: {line:?}");
    }
}

#[test]
fn the_page_needs_nothing_else() {
    let page = text(&golden("report.html"));
    for outside in ["<script", "http:", "https:", "url(", "<img", "<link", "@import"] {
        assert!(!page.contains(outside), "{outside}");
    }
    for chart in
        ["perplexity-0", "divergence-1", "modules-0", "cache-0-keys", "cache-3-attention", "positions-1", "speed-0"]
    {
        let title = format!("<title id=\"{chart}-t\">");
        assert!(page.contains(&title) && page.contains(&format!("aria-labelledby=\"{chart}-t {chart}-d\"")), "{chart}");
    }
    assert_eq!(page.matches("<svg role=\"img\"").count(), page.matches("<desc").count());
    assert!(page.contains("prefers-color-scheme: dark") && page.contains("lang=\"en\""));
    // Every element that is opened is closed, as a parser of XML sees it.
    let body = page.split("<body>").nth(1).unwrap().split("</body>").next().unwrap();
    let body = format!("<body>{}</body>", body.replace("<wbr>", ""));
    let mut reader = quick_xml::Reader::from_str(&body);
    loop {
        match reader.read_event() {
            Ok(quick_xml::events::Event::Eof) => break,
            Ok(_) => {}
            Err(e) => panic!("at {}: {e}", reader.error_position()),
        }
    }
}

#[test]
fn all_forms_of_a_partial_report() {
    let full = Report::read(&golden("report.json")).unwrap();
    let mut bare = Report::new(full.artifact.clone(), "cpu");
    bare.artifact.name = "<b>a&b</b> | `x`\u{1}".into();
    let mut reports = vec![bare.clone()];
    let mut add = |change: &dyn Fn(&mut Report)| {
        let mut report = bare.clone();
        change(&mut report);
        reports.push(report);
    };
    add(&|r| r.perplexity = full.perplexity.clone());
    add(&|r| r.divergence = full.divergence.clone());
    add(&|r| r.modules = full.modules.clone());
    add(&|r| r.cache = full.cache.clone());
    add(&|r| r.acceptance = full.acceptance.clone());
    add(&|r| r.checks = full.checks.clone());
    add(&|r| r.accounting = full.accounting.clone());
    add(&|r| {
        r.divergence = full
            .divergence
            .iter()
            .cloned()
            .map(|mut on| {
                on.histogram = None;
                on
            })
            .collect()
    });
    for report in reports {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("a/b");
        let verdict = judge(&report, None, &Thresholds::default());
        let written = write_judged(&report, &verdict, &out).unwrap();
        assert_eq!(written.len(), 4);
        assert_eq!(fs::read_dir(&out).unwrap().count(), 4, "no temporary files");
        assert_eq!(Report::read(&written[0]).unwrap(), report);
        let page = text(&out.join("report.html"));
        assert!(page.contains("&lt;b&gt;") && !page.contains("<b>a&b"), "names are no HTML");
        let mut reader = quick_xml::Reader::from_file(out.join("junit.xml")).unwrap();
        let mut buffer = Vec::new();
        while !matches!(reader.read_event_into(&mut buffer).unwrap(), quick_xml::events::Event::Eof) {}
        // Again in place: files are replaced.
        write_judged(&report, &verdict, &out).unwrap();
        assert!(terminal::summary(&report, Some(&verdict)).ends_with(if report.checks.is_empty() {
            "passed\n"
        } else {
            "passed with 2 warnings\n"
        }));
    }
}

#[test]
fn schema_on_the_command_line() {
    let dir = tempfile::tempdir().unwrap();
    let ran = quantkit(dir.path(), &["list", "--report-schema"]).ok();
    assert_eq!(serde_json::from_str::<Value>(&ran.stdout).unwrap(), schema::report());
    assert_eq!(ran.stdout, include_str!("../../reference/report/schema.json"));
}

/// Labels and messages may hold what a terminal obeys.
#[test]
fn control_characters_stay_inside() {
    let dir = scene();
    change(&dir.path().join("report.json"), |report| {
        report["label"] = "\u{1b}[2Jlabel\u{9b}31m".into();
        report["checks"][0]["message"] = "bell\u{7}\nfailed: all rows".into();
        report["checks"][0]["status"] = "fail".into();
        report["artifact"]["name"] = "name\u{1b}]0;x\u{7}".into();
    });
    let ran = quantkit(dir.path(), &["compare", "report.json", "--html", "r.html"]).ended(1);
    let history = quantkit(dir.path(), &["history", ".", "--html", "h.html"]).ok();
    let report = Report::read(&dir.path().join("report.json")).unwrap();
    let summary = terminal::summary(&report, Some(&judge(&report, None, &Thresholds::default())));
    let pages = ["r.html", "h.html"].map(|name| text(&dir.path().join(name)));
    for shown in [&ran.stdout, &ran.stderr, &history.stdout, &summary, &pages[0], &pages[1]] {
        let odd = shown.chars().find(|c| c.is_control() && *c != '\n');
        assert_eq!(odd, None, "{shown:?}");
    }
    for shown in [&ran.stdout, &ran.stderr, &summary] {
        assert!(!shown.lines().any(|line| line == "failed: all rows"), "a message makes lines of its own: {shown}");
    }
}

#[test]
fn compare_decides_by_exit_code() {
    let dir = scene();
    let run = |args: &[&str]| quantkit(dir.path(), &[&["compare", "report.json"], args].concat());
    let code = |args: &[&str]| run(args).code;
    assert_eq!(code(&[]), Some(0));
    assert_eq!(code(&["--baseline", "baseline.json"]), Some(0));
    assert_eq!(code(&["--max-kl", "0.05", "--min-acceptance", "0.4", "--max-ppl-increase", "3%"]), Some(0));
    let ran = run(&["--max-kl", "0.02"]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("mean divergence, heldout: 0.0363 nats, at most 0.02 nats"), "{}", ran.stderr);
    assert_eq!(code(&["--baseline", "baseline.json", "--max-ppl-increase", "0.1%"]), Some(1));
    assert_eq!(code(&["--thresholds", "gate.toml"]), Some(1));
    // An option goes before the file.
    assert_eq!(code(&["--thresholds", "gate.toml", "--min-acceptance", "0.4", "--min-same-top", "0.8"]), Some(0));
    assert_eq!(code(&["--fail-on-warnings"]), Some(1));

    let ran = run(&["--max-kl", "0.02", "--json", "--baseline", "baseline.json"]);
    let value: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!((ran.code, &value["passed"]), (Some(1), &Value::Bool(false)));
    let row = value["rows"].as_array().unwrap().iter().find(|row| row["what"] == "mean divergence, heldout").unwrap();
    assert_eq!((row["outcome"].as_str(), row["unit"].as_str()), (Some("fail"), Some("nats")));
    assert!(row["moved"].as_f64().unwrap() > 0.0 && row["moved_stderr"].as_f64().unwrap() > 0.0);
}

#[test]
fn compare_appends_to_a_job_s_summary() {
    let dir = scene();
    let summary = dir.path().join("summary.md");
    fs::write(&summary, "before\n").unwrap();
    let mut ran = command(dir.path(), &["compare", "report.json", "--max-kl", "0.02"]);
    ran.env("GITHUB_STEP_SUMMARY", &summary).assert().code(1);
    let text = text(&summary);
    assert!(
        text.starts_with("before\n# ❌ SmolLM2") && text.contains("| **fail** | mean divergence, heldout"),
        "{text}"
    );
}

#[test]
fn compare_refuses_bad_input() {
    let dir = scene();
    let cut = text(&golden("report.json"));
    fs::write(dir.path().join("cut.json"), &cut[..cut.len() / 3]).unwrap();
    fs::copy(golden("report.json"), dir.path().join("newer.json")).unwrap();
    change(&dir.path().join("newer.json"), |v| v["schema"] = "quantkit-report/2".into());
    fs::write(dir.path().join("odd.toml"), "max_lk = 1\n").unwrap();
    let cases: [(&[&str], &str); 11] = [
        (&["none.json"], "cannot read the report `none.json`"),
        (&["cut.json"], "`cut.json` is no report: it ends too early"),
        (&["gate.toml"], "`gate.toml` is no report: it is not JSON"),
        (&["newer.json"], "schema `quantkit-report/2`"),
        (&["report.json", "--baseline", "cut.json"], "the baseline"),
        (&["report.json", "--thresholds", "odd.toml"], "unknown field `max_lk`"),
        (&["report.json", "--thresholds", "none.toml"], "none.toml"),
        (&["report.json", "--max-ppl-increase", "0.5"], "write a percentage: `0.5%`"),
        (&["report.json", "--max-kl=-1"], "not negative"),
        (&["report.json", "--min-acceptance", "70"], "from 0 to 1"),
        (&["report.json", "--max-kl-increase", "5%"], "--baseline"),
    ];
    for (args, word) in cases {
        command(dir.path(), &[&["compare"], args].concat()).assert().code(2).stderr(contains(word));
    }
}

#[test]
fn compare_finds_what_is_broken() {
    let dir = scene();
    change(&dir.path().join("report.json"), |v| {
        v["modules"][7]["output_error"] = Value::Null;
        v["checks"][0]["status"] = "fail".into();
    });
    let ran = quantkit(dir.path(), &["compare", "report.json"]);
    assert_eq!(ran.code, Some(1));
    assert!(
        ran.stderr.contains("check integrity: ") && ran.stderr.contains("modules[7].output_error"),
        "{}",
        ran.stderr
    );
}

#[test]
fn history_of_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    let place = |name: &str| dir.path().join("runs").join(name);
    fs::create_dir_all(place("10")).unwrap();
    fs::copy(golden("baseline.json"), place("9.json")).unwrap();
    fs::copy(golden("report.json"), place("10/report.json")).unwrap();
    fs::write(place("notes.txt"), "").unwrap();
    let ran = quantkit(dir.path(), &["history", "runs", "--html", "history.html"]).ok();
    assert!(ran.stdout.starts_with("2 reports, 3f8c2d1 to a91e07b\n"), "{}", ran.stdout);
    let row = ran.stdout.lines().find(|line| line.contains("mean divergence, heldout")).unwrap();
    assert!(row.contains("0.0308 nats") && row.contains("0.0363 nats") && row.ends_with("▁█"), "{row}");
    let page = text(&dir.path().join("history.html"));
    assert!(
        page.contains("<title id=\"trend-0-t\">") && page.contains("10/report.<wbr>json") && !page.contains("<script")
    );

    fs::write(place("11.json"), "{").unwrap();
    let ran = quantkit(dir.path(), &["history", "runs", "--json"]).ok();
    assert!(ran.stderr.contains("left out: `runs/11.json` is no report"), "{}", ran.stderr);
    let value: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(value["names"].as_array().unwrap().len(), 2);
    let empty = dir.path().join("empty");
    fs::create_dir(&empty).unwrap();
    command(dir.path(), &["history", "empty"]).assert().code(2).stderr(contains("has no report"));
    command(dir.path(), &["history", "none"]).assert().code(2).stderr(contains("none"));
}
