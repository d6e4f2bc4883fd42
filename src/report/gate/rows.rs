//! The rows of a verdict, section by section.

use serde_json::Value;

use super::statistics::{Estimate, Side, paired};
use super::{Outcome, Row};
use crate::integrity::Status;
use crate::report::Report;
use crate::report::number::{Unit, significant};
use crate::report::sections::{
    Acceptance, CacheFigures, DivergenceOn, PerplexityOn, Role, ScaleSource, WindowedCorpus,
};
use crate::report::thresholds::{Percent, Thresholds};

/// Broken numbers that are named; of the rest only the number is told.
const NAMED: usize = 8;

pub struct Rows<'a> {
    pub(super) report: &'a Report,
    pub(super) baseline: Option<&'a Report>,
    pub(super) limits: &'a Thresholds,
    pub(super) rows: Vec<Row>,
}

impl<'a> Rows<'a> {
    pub fn new(report: &'a Report, baseline: Option<&'a Report>, limits: &'a Thresholds) -> Self {
        Self { report, baseline, limits, rows: Vec::new() }
    }

    pub fn done(self) -> Vec<Row> {
        self.rows
    }

    pub fn perplexity(&mut self) {
        if self.report.perplexity.is_empty() {
            self.absent("max_ppl_increase", self.limits.max_ppl_increase.is_some(), "perplexity");
            self.absent("max_ppl_over_reference", self.limits.max_ppl_over_reference.is_some(), "perplexity");
        }
        for on in &self.report.perplexity {
            let over_reference = self.limits.max_ppl_over_reference;
            let over_reference = match self.baseline {
                None => over_reference.or(self.limits.max_ppl_increase),
                Some(_) => over_reference,
            };
            let what = format!("perplexity over the reference, {}", on.corpus.name);
            let note = format!("the reference has {}", Unit::Plain.show(on.reference));
            let mut row = Row { note, ..of(what, Unit::Plain, on.artifact) };
            moved_by(&mut row, log_ratio(on.ratio, on.ratio_stderr), over_reference);
            self.rows.push(row);
            if let Some(baseline) = self.baseline {
                let row = over_baseline(on, self.report, baseline, self.limits.max_ppl_increase);
                self.rows.push(row);
            }
        }
    }

    pub fn divergence(&mut self) {
        let limits = self.limits;
        if self.report.divergence.is_empty() {
            let asked = [
                ("max_kl", limits.max_kl.is_some()),
                ("max_kl_p99_9", limits.max_kl_p99_9.is_some()),
                ("max_kl_increase", limits.max_kl_increase.is_some()),
                ("min_same_top", limits.min_same_top.is_some()),
            ];
            asked.into_iter().for_each(|(name, asked)| self.absent(name, asked, "divergence"));
        }
        if self.baseline.is_none() && limits.max_kl_increase.is_some() {
            let note = "`max_kl_increase` needs a baseline (--baseline)";
            self.rows.push(Row::said("mean divergence over the baseline", Outcome::Fail, note));
        }
        for on in &self.report.divergence {
            let theirs = self.counterpart(&on.corpus, |baseline| &baseline.divergence, |on| &on.corpus, true);
            let (name, before) = (&on.corpus.name, theirs.as_ref().and_then(|found| found.as_ref().ok()));
            let kl = |on: &DivergenceOn| Estimate::new(on.figures.kl.mean, on.figures.kl.stderr);
            let mut row = absolute(format!("mean divergence, {name}"), Unit::Nats, kl(on), before.map(|on| kl(on)));
            at_most(&mut row, kl(on), limits.max_kl);
            self.push(row, &theirs);
            if let (Some(limit), Some(found)) = (limits.max_kl_increase, &theirs) {
                let mut row = of(format!("mean divergence over the baseline, {name}"), Unit::Nats, kl(on).value);
                row.limit = Some(format!("at most +{limit}"));
                match found {
                    Ok(theirs) => {
                        row.baseline = Some(kl(theirs).value);
                        growth(&mut row, kl(on), kl(theirs), limit);
                    }
                    Err(why) => (row.outcome, row.note) = (Outcome::Unknown, why.clone()),
                }
                self.rows.push(row);
            }
            let tail = |on: &DivergenceOn| Estimate::exact(on.figures.kl.p99_9);
            let mut row =
                absolute(format!("divergence, 99.9 %, {name}"), Unit::Nats, tail(on), before.map(|on| tail(on)));
            at_most(&mut row, tail(on), limits.max_kl_p99_9);
            self.push(row, &theirs);
            let top = |on: &DivergenceOn| Estimate::new(on.figures.same_top.share, on.figures.same_top.stderr);
            let mut row = absolute(format!("same top token, {name}"), Unit::Share, top(on), before.map(|on| top(on)));
            at_least(&mut row, top(on), limits.min_same_top);
            self.push(row, &theirs);
        }
    }

    pub fn modules(&mut self) {
        let worst = |report: &'a Report| {
            report.modules.iter().fold(None::<&crate::report::ModuleError>, |worst, module| match worst {
                // NaN is worse than any number.
                Some(worst) if worst.output_error.is_nan() || module.output_error <= worst.output_error => Some(worst),
                _ => Some(module),
            })
        };
        let Some(now) = worst(self.report) else {
            return self.absent("max_module_error", self.limits.max_module_error.is_some(), "error of modules");
        };
        let theirs = self.baseline.map(|baseline| {
            same_reference(self.report, baseline)?;
            if self.report.module_corpus != baseline.module_corpus {
                return Err("not comparable: the modules were measured on other tokens".to_string());
            }
            worst(baseline).ok_or_else(|| "the baseline has no errors of modules".to_string())
        });
        let before = theirs.as_ref().and_then(|found| found.as_ref().ok());
        let error = |module: &crate::report::ModuleError| Estimate::exact(module.output_error);
        let what = format!("largest error of a module, {}", now.module);
        let mut row = absolute(what, Unit::Error, error(now), before.map(|module| error(module)));
        if let Some(before) = before.filter(|before| before.module != now.module) {
            row.note = format!("in the baseline {}", before.module);
        }
        at_most(&mut row, error(now), self.limits.max_module_error);
        self.push(row, &theirs);
    }

    pub fn cache(&mut self) {
        let limits = self.limits;
        let Some(cache) = self.report.cache.as_ref().filter(|cache| !cache.types.is_empty()) else {
            self.absent("max_cache_ppl_increase", limits.max_cache_ppl_increase.is_some(), "error of caches");
            return self.absent("min_cache_agreement", limits.min_cache_agreement.is_some(), "error of caches");
        };
        for kind in &cache.types {
            // Scales of 1.0 are what engines fall back to; where the artifact has better ones they only inform.
            let informs = !cache.taken_by_engines(kind);
            let name = format!("{} cache{}", kind.kind, scales(kind.scales));
            let theirs = self.baseline.map(|baseline| {
                let theirs = baseline.cache.as_ref().ok_or("the baseline has no errors of caches")?;
                if let Some(why) = differs(&cache.corpus, &theirs.corpus) {
                    return Err(why);
                }
                if cache.baseline != theirs.baseline {
                    return Err("not comparable: the caches were held against another type".to_string());
                }
                let same = |other: &&CacheFigures| other.kind == kind.kind && other.scales == kind.scales;
                theirs.types.iter().find(same).ok_or_else(|| format!("the baseline has no {name}"))
            });
            let before = theirs.as_ref().and_then(|found| found.as_ref().ok());
            let mut row = of(format!("perplexity change, {name}"), Unit::Change, kind.ratio - 1.0);
            let ratio = |kind: &CacheFigures| log_ratio(kind.ratio, kind.ratio_stderr);
            if let Some(limit) = limits.max_cache_ppl_increase.filter(|_| !informs) {
                row.limit = Some(format!("at most +{limit}"));
                settle(&mut row, ratio(kind), Side::AtMost, limit.0.ln_1p());
            }
            if let Some(before) = before {
                let moved = ratio(kind).minus(ratio(before));
                row.baseline = Some(before.ratio - 1.0);
                row.moved = Some(kind.ratio - before.ratio);
                row.moved_stderr = Some(kind.ratio * moved.stderr);
            }
            self.push(row, &theirs);
            let agreement = |kind: &CacheFigures| {
                let share = kind.greedy_agreement;
                Estimate::new(share, binomial(share, cache.corpus.tokens))
            };
            let what = format!("greedy agreement, {name}");
            let mut row = absolute(what, Unit::Share, agreement(kind), before.map(|before| agreement(before)));
            at_least(&mut row, agreement(kind), limits.min_cache_agreement.filter(|_| !informs));
            self.push(row, &theirs);
        }
    }

    pub fn acceptance(&mut self) {
        let limits = self.limits;
        if self.report.acceptance.is_empty() {
            self.absent("min_acceptance", limits.min_acceptance.is_some(), "acceptance of draft tokens");
            self.absent("min_acceptance_length", limits.min_acceptance_length.is_some(), "acceptance of draft tokens");
        }
        for pair in &self.report.acceptance {
            let name = pair_name(pair);
            let theirs = self.baseline.map(|baseline| same_pair(pair, self.report, baseline));
            let before = theirs.as_ref().and_then(|found| found.as_ref().ok());
            let rate = |pair: &Acceptance| Estimate::new(pair.rate, pair.rate_stderr);
            let what = format!("acceptance rate, {name}");
            let mut row = absolute(what, Unit::Share, rate(pair), before.map(|before| rate(before)));
            at_least(&mut row, rate(pair), limits.min_acceptance);
            if pair.drafted == 0 {
                (row.outcome, row.note) = (Outcome::Fail, "no token was drafted".into());
            }
            self.push(row, &theirs);
            // The length is 1 + rate × k, and so is its error.
            let length = |pair: &Acceptance| Estimate::new(pair.mean_length, pair.rate_stderr * pair.k as f64);
            let what = format!("acceptance length, {name}");
            let mut row = absolute(what, Unit::Plain, length(pair), before.map(|before| length(before)));
            at_least(&mut row, length(pair), limits.min_acceptance_length);
            self.push(row, &theirs);
        }
    }

    pub fn size(&mut self) {
        let limits = self.limits;
        let Some(now) = &self.report.accounting else {
            self.absent("max_bits", limits.max_bits.is_some(), "accounting");
            return self.absent("max_bytes", limits.max_bytes.is_some(), "accounting");
        };
        let before = self.baseline.and_then(|baseline| baseline.accounting.as_ref());
        let exact = Estimate::exact;
        let bits = exact(now.bits_per_weight);
        let mut row = absolute("bits per weight", Unit::Bits, bits, before.map(|before| exact(before.bits_per_weight)));
        at_most(&mut row, bits, limits.max_bits);
        self.rows.push(row);
        let size = exact(now.artifact_bytes as f64);
        let theirs = before.map(|before| exact(before.artifact_bytes as f64));
        let mut row = absolute("size of the weights", Unit::Bytes, size, theirs);
        at_most(&mut row, size, limits.max_bytes.map(|bytes| bytes.0 as f64));
        self.rows.push(row);
        if now.missing.tensors > 0 {
            let note = format!("{} tensors of the source are missing, and nothing says why", now.missing.tensors);
            self.rows.push(Row::said("accounting", Outcome::Fail, note));
        }
    }

    pub fn consumers(&mut self) {
        for name in &self.limits.consumers {
            let what = format!("loads in {name}");
            let mut row = match self.report.consumers.iter().find(|consumer| consumer.name == *name) {
                Some(consumer) if consumer.loads => Row::said(what, Outcome::Pass, ""),
                Some(consumer) => Row::said(what, Outcome::Fail, consumer.refusals.join("; ")),
                None => Row::said(what, Outcome::Fail, "the report does not know this engine; see `quantkit list`"),
            };
            row.limit = Some("must load".into());
            self.rows.push(row);
        }
        for before in self.baseline.iter().flat_map(|baseline| &baseline.consumers).filter(|before| before.loads) {
            // Those that are asked for have their rows.
            if self.limits.consumers.contains(&before.name) {
                continue;
            }
            let note = match self.report.consumers.iter().find(|consumer| consumer.name == before.name) {
                Some(now) if now.loads => continue,
                Some(now) => format!("loaded the baseline, and not this: {}", now.refusals.join("; ")),
                None => "loaded the baseline; whether it loads this, the report does not say".into(),
            };
            self.rows.push(Row::said(format!("loads in {}", before.name), Outcome::Warn, note));
        }
    }

    pub fn checks(&mut self) {
        for check in &self.report.checks {
            let before = self.baseline.and_then(|b| b.checks.iter().find(|before| before.id == check.id));
            let mut note = check.message.clone();
            if let Some(before) = before.filter(|before| before.status < check.status && check.status > Status::Pass) {
                note = format!("{note} (in the baseline: {})", before.status.name());
            }
            self.rows.push(Row::said(format!("check {}", check.id), check.status.into(), note));
        }
        for before in self.baseline.iter().flat_map(|baseline| &baseline.checks) {
            if !self.report.checks.iter().any(|check| check.id == before.id) {
                let note = "was looked at for the baseline, and not now";
                self.rows.push(Row::said(format!("check {}", before.id), Outcome::Warn, note));
            }
        }
    }

    /// Whatever in the report is not finite.
    pub fn broken(&mut self) {
        let mut found = Vec::new();
        match serde_json::to_value(self.report) {
            Ok(value) => nulls(&value, String::new(), &mut found),
            Err(e) => found.push(e.to_string()),
        }
        if !found.is_empty() {
            let more = found.len().saturating_sub(NAMED);
            found.truncate(NAMED);
            let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
            let note = format!("not finite: {}{rest}", found.join(", "));
            self.rows.push(Row::said("finite numbers", Outcome::Fail, note));
        }
    }

    /// A limit on what was not measured.
    fn absent(&mut self, limit: &str, asked: bool, what: &str) {
        if asked {
            let note = format!("`{limit}` is asked for, and the report has no {what}");
            let row = Row::said(what, Outcome::Fail, note);
            self.rows.push(Row { limit: Some(format!("`{limit}`")), ..row });
        }
    }

    /// What the baseline has on the same tokens; why not, where it has none. `None` without a baseline.
    fn counterpart<T>(
        &self,
        corpus: &WindowedCorpus,
        section: fn(&Report) -> &Vec<T>,
        on: fn(&T) -> &WindowedCorpus,
        needs_reference: bool,
    ) -> Option<Result<&'a T, String>> {
        let baseline = self.baseline?;
        Some(counterpart(self.report, baseline, corpus, section, on, needs_reference))
    }

    /// The row, with a note where a baseline is there and has nothing to compare with.
    fn push<T>(&mut self, mut row: Row, theirs: &Option<Result<T, String>>) {
        if let Some(Err(why)) = theirs {
            row.note = if row.note.is_empty() { why.clone() } else { format!("{}; {why}", row.note) };
            if row.outcome == Outcome::Info {
                row.outcome = Outcome::Unknown;
            }
        }
        self.rows.push(row);
    }
}

fn counterpart<'b, T>(
    report: &Report,
    baseline: &'b Report,
    corpus: &WindowedCorpus,
    section: fn(&Report) -> &Vec<T>,
    on: fn(&T) -> &WindowedCorpus,
    needs_reference: bool,
) -> Result<&'b T, String> {
    if needs_reference {
        same_reference(report, baseline)?;
    }
    let theirs = partner(corpus, section(baseline), on);
    let theirs = theirs.ok_or_else(|| format!("the baseline was not measured on {}", corpus.name))?;
    match differs(corpus, on(theirs)) {
        Some(why) => Err(why),
        None => Ok(theirs),
    }
}

/// The entry on this text: whatever it is called, else what is called so.
pub(super) fn partner<'b, T>(corpus: &WindowedCorpus, all: &'b [T], on: fn(&T) -> &WindowedCorpus) -> Option<&'b T> {
    let named = |theirs: &&T| on(theirs).name == corpus.name;
    let same = |theirs: &&T| !corpus.sha256.is_empty() && on(theirs).sha256 == corpus.sha256;
    let both = all.iter().find(|theirs| same(theirs) && named(theirs));
    both.or_else(|| all.iter().find(same)).or_else(|| all.iter().find(named))
}

/// What of two corpora is not the same.
fn differs(now: &WindowedCorpus, before: &WindowedCorpus) -> Option<String> {
    let mut parts = Vec::new();
    if now.sha256 != before.sha256 {
        parts.push("another text".to_string());
    }
    let mut part = |what: &str, now: String, before: String| {
        if now != before {
            parts.push(format!("{what} {now}, the baseline's {before}"));
        }
    };
    part("convention", now.convention.to_string(), before.convention.to_string());
    part("window", now.window.to_string(), before.window.to_string());
    part("windows", now.windows.to_string(), before.windows.to_string());
    part("BOS", now.bos.clone(), before.bos.clone());
    part("tokens", now.tokens.to_string(), before.tokens.to_string());
    (!parts.is_empty()).then(|| format!("not comparable: {}", parts.join("; ")))
}

fn same_reference(now: &Report, before: &Report) -> Result<(), String> {
    match (&now.reference, &before.reference) {
        (Some(now), Some(before)) if now.sha256 == before.sha256 => Ok(()),
        (Some(now), Some(before)) => Err(format!(
            "not comparable: the reference is {} ({}), the baseline's {} ({})",
            now.name,
            short(&now.sha256),
            before.name,
            short(&before.sha256)
        )),
        _ => Err("not comparable: a report does not say what its reference was".into()),
    }
}

/// The start of a hash.
fn short(hash: &str) -> String {
    hash.chars().take(12).collect()
}

/// The entry of the same models, else of the same part of the artifact.
pub(super) fn pair_of<'b>(now: &Acceptance, all: &'b [Acceptance]) -> Option<&'b Acceptance> {
    let same =
        |before: &&Acceptance| before.role == now.role && before.target == now.target && before.draft == now.draft;
    all.iter().find(same).or_else(|| all.iter().find(|before| before.role == now.role))
}

pub(super) fn pair_name(pair: &Acceptance) -> String {
    match pair.role {
        Role::Target => format!("verifying {}", pair.draft),
        Role::Draft => format!("drafting for {}", pair.target),
    }
}

fn same_pair<'b>(now: &Acceptance, report: &Report, baseline: &'b Report) -> Result<&'b Acceptance, String> {
    let before = pair_of(now, &baseline.acceptance);
    let before = before.ok_or("the baseline has no acceptance of this kind")?;
    let drafts = |report: &Report| report.draft.as_ref().map(|draft| draft.sha256.clone());
    match now.role {
        Role::Target if drafts(report) != drafts(baseline) => Err("not comparable: another draft model".to_string()),
        Role::Draft => same_reference(report, baseline),
        Role::Target => Ok(()),
    }?;
    if now.text_sha256 != before.text_sha256 {
        Err("not comparable: other prompts".into())
    } else if (now.k, now.temperature) != (before.k, before.temperature) {
        Err(format!(
            "not comparable: {} drafted tokens at temperature {}, the baseline's {} at {}",
            now.k, now.temperature, before.k, before.temperature
        ))
    } else {
        Ok(before)
    }
}

/// The artifact's perplexity against the baseline's.
fn over_baseline(on: &PerplexityOn, report: &Report, baseline: &Report, limit: Option<Percent>) -> Row {
    let mut row = of(format!("perplexity, {}", on.corpus.name), Unit::Plain, on.artifact);
    match counterpart(report, baseline, &on.corpus, |baseline| &baseline.perplexity, |on| &on.corpus, true) {
        Ok(theirs) => {
            row.baseline = Some(theirs.artifact);
            let by_ratios = || log_ratio(on.ratio, on.ratio_stderr).minus(log_ratio(theirs.ratio, theirs.ratio_stderr));
            moved_by(&mut row, paired(&on.windows, &theirs.windows).unwrap_or_else(by_ratios), limit);
        }
        Err(why) => {
            row.limit = limit.map(|limit| format!("at most +{limit}"));
            (row.outcome, row.note) = (Outcome::Unknown, why);
        }
    }
    row
}

pub(super) fn scales(source: ScaleSource) -> &'static str {
    match source {
        ScaleSource::Unit => ", scale 1.0",
        ScaleSource::Calibrated => ", calibrated scales",
        ScaleSource::Proposed => ", proposed scales",
        ScaleSource::ProposedPerHead => ", proposed scales per head",
        ScaleSource::Dynamic => ", scales by token",
        ScaleSource::None => "",
    }
}

/// Standard error of a share of `n`.
fn binomial(share: f64, n: u64) -> f64 {
    if n == 0 { 0.0 } else { (share * (1.0 - share) / n as f64).max(0.0).sqrt() }
}

fn log_ratio(ratio: f64, stderr: f64) -> Estimate {
    Estimate::new(ratio.ln(), stderr / ratio)
}

fn of(what: impl Into<String>, unit: Unit, now: f64) -> Row {
    Row { now: Some(now), ..Row::new(what, unit) }
}

/// A row that moved by a difference.
fn absolute(what: impl Into<String>, unit: Unit, now: Estimate, before: Option<Estimate>) -> Row {
    let mut row = of(what, unit, now.value);
    if let Some(before) = before {
        let moved = now.minus(before);
        row.baseline = Some(before.value);
        row.moved = Some(moved.value);
        row.moved_stderr = Some(moved.stderr).filter(|error| *error > 0.0);
    }
    row
}

/// A row that moved by a factor, given its logarithm.
fn moved_by(row: &mut Row, log: Estimate, limit: Option<Percent>) {
    row.moved = Some(log.value.exp_m1());
    row.moved_stderr = Some(log.value.exp() * log.stderr);
    row.moved_unit = Unit::Change;
    if let Some(limit) = limit {
        row.limit = Some(format!("at most +{limit}"));
        settle(row, log, Side::AtMost, limit.0.ln_1p());
    }
}

fn growth(row: &mut Row, now: Estimate, before: Estimate, limit: Percent) {
    if before.value > 0.0 {
        let ratio = now.value / before.value;
        // Without a division by what is now: that may be nothing, or by rounding less.
        let stderr = (now.stderr / before.value).hypot(ratio * before.stderr / before.value);
        row.moved = Some(ratio - 1.0);
        row.moved_stderr = Some(stderr);
        row.moved_unit = Unit::Change;
        settle(row, Estimate::new(ratio - 1.0, stderr), Side::AtMost, limit.0);
    } else {
        // From nothing, any growth is beyond any percentage.
        settle(row, now, Side::AtMost, 0.0);
        row.note = "the baseline does not diverge at all".into();
    }
}

fn at_most(row: &mut Row, value: Estimate, limit: Option<f64>) {
    if let Some(limit) = limit {
        row.limit = Some(format!("at most {}", limit_text(row.unit, limit)));
        settle(row, value, Side::AtMost, limit);
    }
}

fn at_least(row: &mut Row, value: Estimate, limit: Option<f64>) {
    if let Some(limit) = limit {
        row.limit = Some(format!("at least {}", limit_text(row.unit, limit)));
        settle(row, value, Side::AtLeast, limit);
    }
}

fn limit_text(unit: Unit, limit: f64) -> String {
    match unit {
        Unit::Share => format!("{} %", trimmed(100.0 * limit)),
        Unit::Nats => format!("{} nats", trimmed(limit)),
        Unit::Bytes => unit.show(limit),
        _ => trimmed(limit),
    }
}

/// As it was written, without the digits that binary fractions add.
pub(super) fn trimmed(value: f64) -> String {
    let text = significant(value, 12);
    if text.contains('.') && !text.contains('e') {
        text.trim_end_matches('0').trim_end_matches('.').to_string()
    } else {
        text
    }
}

fn settle(row: &mut Row, value: Estimate, side: Side, limit: f64) {
    row.outcome = value.against(side, limit);
    let note = match row.outcome {
        Outcome::Warn => "beyond the limit, but within what chance explains",
        Outcome::Fail if !value.is_finite() => "not finite",
        _ => return,
    };
    row.note = if row.note.is_empty() { note.into() } else { format!("{}; {note}", row.note) };
}

/// Where a value is `null`. Options are the artifact's own.
fn nulls(value: &Value, path: String, found: &mut Vec<String>) {
    match value {
        Value::Null => found.push(path),
        Value::Array(all) => {
            all.iter().enumerate().for_each(|(i, value)| nulls(value, format!("{path}[{i}]"), found));
        }
        Value::Object(map) => {
            for (key, value) in map.iter().filter(|(key, _)| *key != "options") {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                nulls(value, path, found);
            }
        }
        _ => {}
    }
}
