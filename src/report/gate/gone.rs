//! What only the baseline has.

use super::rows::{Rows, pair_name, pair_of, partner, scales, trimmed};
use super::{Outcome, Row};
use crate::report::number::Unit;
use crate::report::sections::{CacheFigures, WindowedCorpus};
use crate::report::thresholds::Percent;

impl Rows<'_> {
    /// What was measured for the baseline, and is not any more: whoever leaves out what got worse must not pass.
    pub fn gone(&mut self) {
        let Some(baseline) = self.baseline else { return };
        let (now, limits) = (self.report, self.limits);
        let percent = |name: &str, limit: Option<Percent>| limit.map(|limit| format!("{name}: at most +{limit}"));
        let number = |name: &str, limit: Option<f64>| limit.map(|limit| format!("{name}: {}", trimmed(limit)));
        let mut gone = Vec::new();
        let limit = percent("`max_ppl_increase`", limits.max_ppl_increase)
            .or_else(|| percent("`max_ppl_over_reference`", limits.max_ppl_over_reference));
        for corpus in lost(&now.perplexity, &baseline.perplexity, |on| &on.corpus) {
            gone.push((format!("perplexity, {}", corpus.name), limit.clone()));
        }
        let limit = number("`max_kl`", limits.max_kl)
            .or_else(|| number("`max_kl_p99_9`", limits.max_kl_p99_9))
            .or_else(|| percent("`max_kl_increase`", limits.max_kl_increase))
            .or_else(|| number("`min_same_top`", limits.min_same_top));
        for corpus in lost(&now.divergence, &baseline.divergence, |on| &on.corpus) {
            gone.push((format!("divergence, {}", corpus.name), limit.clone()));
        }
        if now.modules.is_empty() && !baseline.modules.is_empty() {
            gone.push(("errors of modules".into(), number("`max_module_error`", limits.max_module_error)));
        }
        let limit = percent("`max_cache_ppl_increase`", limits.max_cache_ppl_increase)
            .or_else(|| number("`min_cache_agreement`", limits.min_cache_agreement));
        if let Some(cache) = &baseline.cache {
            let there = |kind: &CacheFigures| {
                let mut all = now.cache.iter().flat_map(|cache| &cache.types);
                all.any(|other| other.kind == kind.kind && other.scales == kind.scales)
            };
            for kind in cache.types.iter().filter(|kind| !there(kind)) {
                let limit = limit.clone().filter(|_| cache.taken_by_engines(kind));
                gone.push((format!("{} cache{}", kind.kind, scales(kind.scales)), limit));
            }
        }
        let limit = number("`min_acceptance`", limits.min_acceptance)
            .or_else(|| number("`min_acceptance_length`", limits.min_acceptance_length));
        for pair in &baseline.acceptance {
            let mut stand = now.acceptance.iter().filter_map(|now| pair_of(now, &baseline.acceptance));
            if !stand.any(|other| std::ptr::eq(other, pair)) {
                gone.push((format!("acceptance, {}", pair_name(pair)), limit.clone()));
            }
        }
        if now.accounting.is_none() && baseline.accounting.is_some() {
            let limit = number("`max_bits`", limits.max_bits)
                .or_else(|| limits.max_bytes.map(|bytes| format!("`max_bytes`: {}", Unit::Bytes.show(bytes.0 as f64))));
            gone.push(("accounting".into(), limit));
        }
        for (what, limit) in gone {
            let outcome = if limit.is_some() { Outcome::Unknown } else { Outcome::Warn };
            let row = Row::said(what, outcome, "was measured for the baseline, and not now");
            self.rows.push(Row { limit, ..row });
        }
    }
}

/// The texts of `before` that no entry of `now` stands for.
fn lost<'b, T>(now: &[T], before: &'b [T], on: fn(&T) -> &WindowedCorpus) -> Vec<&'b WindowedCorpus> {
    let taken = |theirs: &T| now.iter().any(|n| partner(on(n), before, on).is_some_and(|p| std::ptr::eq(p, theirs)));
    before.iter().filter(|theirs| !taken(theirs)).map(on).collect()
}
