//! What a recipe came to, for people, programs and CI.

use std::path::Path;

use anyhow::Result;
use serde_json::{Value, json};

use super::super::validate::summarize;
use super::estimate::spoken;
use super::{Task, Work};
use crate::format::output::free_space;
use crate::num::size::bytes;

/// Says all of it; returns what failed.
pub fn results(work: &Work, tasks: &[Task]) -> Result<Vec<String>> {
    let failures: Vec<String> = tasks.iter().flat_map(failures).collect();
    let dry = work.args.dry_run;
    work.printer.object(&json!({
        "recipe": work.args.recipe,
        "out": work.recipe.out,
        "dry_run": dry,
        "passed": if dry { Value::Null } else { failures.is_empty().into() },
        "artifacts": tasks.iter().map(|task| object(work, task)).collect::<Vec<_>>(),
    }))?;
    let lines = if dry { plan(work, tasks)? } else { tasks.iter().flat_map(outcome).collect() };
    for line in lines {
        work.printer.text(line)?;
    }
    if !dry {
        summarize(|| summary(tasks), work.printer);
    }
    Ok(failures)
}

fn failures(task: &Task) -> Vec<String> {
    let name = &task.step.name;
    let gate = task.done.judged.iter().flat_map(|(_, _, verdict)| verdict.failures());
    task.done.failed.iter().cloned().chain(gate).map(|why| format!("{name}: {why}")).collect()
}

/// Bytes of the artifact that is there.
fn size(task: &Task) -> Option<u64> {
    let record = task.record.as_ref().filter(|_| task.done.failed.is_none())?;
    Some(record.outputs.iter().map(|file| file.bytes).sum())
}

fn object(work: &Work, task: &Task) -> Value {
    let ahead = task.ahead.as_ref().filter(|_| work.args.dry_run).map(|ahead| {
        json!({
            "memory_bytes": ahead.forecast.memory,
            "output_bytes": ahead.forecast.output,
            "disk_bytes": ahead.forecast.disk,
            "device": ahead.forecast.device,
            "seconds": ahead.time.seconds,
            "seconds_basis": ahead.time.basis,
        })
    });
    let validation = task.done.judged.as_ref().map(|(fresh, _, verdict)| {
        json!({
            "measured_now": fresh,
            "report": work.recipe.out.join("reports").join(format!("{}.json", task.step.name)),
            "passed": verdict.passed(),
            "rows": verdict.rows,
        })
    });
    json!({
        "name": task.step.name,
        "method": task.step.method,
        "path": task.step.target,
        "state": task.state.name(),
        "why": task.state.why(),
        "bytes": size(task),
        "seconds": task.done.seconds,
        "error": task.done.failed,
        "estimate": ahead,
        "validation": validation,
    })
}

/// What would be done.
fn plan(work: &Work, tasks: &[Task]) -> Result<Vec<String>> {
    let mut out = Vec::new();
    for task in tasks {
        let name = &task.step.name;
        let Some(ahead) = &task.ahead else {
            out.push(format!("{name}: up to date"));
            continue;
        };
        let why = task.state.why().map_or(String::new(), |why| format!(" ({why})"));
        out.push(format!("{name}: {}{why}: {}", task.state.name(), task.step.method));
        let memory =
            ahead.forecast.memory.map_or("memory not estimated".into(), |m| format!("memory about {}", bytes(m)));
        let time = ahead.time.seconds.map_or("time not known".into(), |s| format!("about {}", spoken(s)));
        out.push(format!(
            "    {memory}; writes {}, at most {} on the disk meanwhile; {time} ({})",
            bytes(ahead.forecast.output),
            bytes(ahead.forecast.disk),
            ahead.time.basis
        ));
    }
    let todo: Vec<_> = tasks.iter().filter_map(|task| task.ahead.as_ref()).collect();
    if !todo.is_empty() {
        // One after the other; the work folder of each goes before the next begins.
        let output: u64 = todo.iter().map(|ahead| ahead.forecast.output).sum();
        let most = todo.iter().map(|ahead| ahead.forecast.disk - ahead.forecast.output).max().unwrap_or(0);
        let there = work.recipe.out.ancestors().find(|path| path.exists() || path.as_os_str().is_empty());
        let there = there.filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let time: Option<f64> = todo.iter().map(|ahead| ahead.time.seconds).sum();
        out.push(format!(
            "{} of {} to make on {}: {}, disk {} at most of {} free; measuring is not in it",
            todo.len(),
            tasks.len(),
            work.device()?,
            time.map_or("time not known".into(), |s| format!("about {}", spoken(s))),
            bytes(output + most),
            bytes(free_space(there)?)
        ));
    }
    Ok(out)
}

/// What came of a step.
fn outcome(task: &Task) -> Vec<String> {
    let name = &task.step.name;
    if let Some(why) = &task.done.failed {
        return vec![format!("{name}: FAILED: {why}")];
    }
    let how = task.done.seconds.map_or("up to date".into(), |s| format!("made in {s:.1} s"));
    let mut out = vec![format!("{name}: {} ({how})", size(task).map_or("-".into(), bytes))];
    if let Some((fresh, report, verdict)) = &task.done.judged {
        for on in &report.perplexity {
            out.push(format!(
                "    {}: perplexity {:.4} ({:+.2} % ± {:.2})",
                on.corpus.name,
                on.artifact,
                (on.ratio - 1.0) * 100.0,
                on.ratio_stderr * 100.0
            ));
        }
        for on in &report.divergence {
            out.push(format!(
                "    {}: KL {:.6} ± {:.6} nats, same top token {:.2} %",
                on.corpus.name,
                on.figures.kl.mean,
                on.figures.kl.stderr,
                on.figures.same_top.share * 100.0
            ));
        }
        let asked = verdict.rows.iter().filter(|row| row.limit.is_some()).count();
        let when = if *fresh { "" } else { ", measured earlier" };
        out.push(match (verdict.passed(), asked) {
            (true, 0) => format!("    no limit was set{when}"),
            (true, _) => format!("    passes its limits{when}"),
            (false, _) => format!("    FAILED{when}: {}", verdict.failures().join("; ")),
        });
    }
    out
}

/// A table in Markdown.
fn summary(tasks: &[Task]) -> String {
    let mut out = String::from("| artifact | size | perplexity | KL, nats | limits |\n|---|---|---|---|---|\n");
    for task in tasks {
        let (mut perplexity, mut kl, mut gate) = (String::from("-"), String::from("-"), String::from("-"));
        if let Some((_, report, verdict)) = &task.done.judged {
            let shown: Vec<String> = report
                .perplexity
                .iter()
                .map(|on| format!("{:.4} ({:+.2} %)", on.artifact, (on.ratio - 1.0) * 100.0))
                .collect();
            perplexity = shown.join("<br>");
            let shown: Vec<String> = report.divergence.iter().map(|on| format!("{:.6}", on.figures.kl.mean)).collect();
            kl = shown.join("<br>");
            gate = if verdict.passed() { "passed".into() } else { verdict.failures().join("<br>") };
        }
        if let Some(why) = &task.done.failed {
            gate.clone_from(why);
        }
        let cell = |text: &str| text.replace('|', "\\|").replace('\n', " ");
        let size = size(task).map_or("-".into(), bytes);
        out += &format!("| {} | {size} | {} | {kl} | {} |\n", task.step.name, cell(&perplexity), cell(&gate));
    }
    out
}
