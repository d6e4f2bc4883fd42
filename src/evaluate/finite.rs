//! Why a figure is not finite, in words: JSON has only `null` for it.

use super::divergence::Divergence;

/// The largest x for which e to the power of x is finite in f64, rounded down.
const LARGEST_NATS: f64 = 709.7;

/// What to do about a model whose own perplexity is not finite.
pub const DAMAGED: &str = "its weights are damaged, or its config.json does not describe them";

/// Why a perplexity is not finite, from the mean negative log-likelihood in nats; `None` if it is.
pub fn perplexity(nll: f64) -> Option<String> {
    if nll.exp().is_finite() {
        return None;
    }
    Some(match nll.is_nan() {
        true => "the perplexity is not a number".into(),
        false => format!(
            "the perplexity is infinite: a token costs {nll:.1} nats on average, and exp overflows beyond {LARGEST_NATS}"
        ),
    })
}

/// The same from the perplexity alone.
pub fn of_value(perplexity: f64) -> Option<String> {
    match perplexity {
        value if value.is_finite() => None,
        value if value.is_nan() => Some("the perplexity is not a number".into()),
        _ => Some(format!("the perplexity is infinite: a token costs more than {LARGEST_NATS} nats on average")),
    }
}

/// Why a comparison with a reference has figures that are not finite; the reference is named where it is at fault.
pub fn comparison(figures: &Divergence) -> Option<String> {
    if let Some(why) = of_value(figures.perplexity.reference) {
        return Some(format!("of the reference {why}: {DAMAGED}"));
    }
    if let Some(why) = of_value(figures.perplexity.artifact) {
        return Some(format!("of the artifact {why}; the reference has {:.4}", figures.perplexity.reference));
    }
    let Divergence { kl, delta_p, perplexity, .. } = figures;
    let others = [("divergence", kl.mean), ("change of probability", delta_p.mean), ("ratio", perplexity.ratio)];
    others.into_iter().find(|(_, value)| !value.is_finite()).map(|(what, value)| format!("the mean {what} is {value}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_have_numbers() {
        assert_eq!(perplexity(LARGEST_NATS), None);
        let infinite =
            "the perplexity is infinite: a token costs 710.0 nats on average, and exp overflows beyond 709.7";
        assert_eq!(perplexity(710.0).as_deref(), Some(infinite));
        assert_eq!(perplexity(f64::NAN).as_deref(), Some("the perplexity is not a number"));
        assert_eq!(of_value(3.0), None);
        assert!(of_value(f64::INFINITY).is_some_and(|why| why.contains("more than 709.7 nats")));
    }
}
