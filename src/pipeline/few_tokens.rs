//! A warning where calibration sees so few tokens that what it finds is chance.

use super::observer::Reporter;
use crate::model::Model;

/// Tokens from which on statistics of single channels are steady, and those from which on the ranges of heads are, each of
/// which has many channels.
const ENOUGH: usize = 4096;
const ENOUGH_FOR_HEADS: usize = 2048;

/// What is found by calibration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Hessians, whose rank is no more than the number of tokens.
    Hessians,
    /// Scales, ranges and importance of channels.
    Statistics,
    /// Scales of a key-value cache alone.
    CacheScales,
}

/// Warns where `tokens` are too few; `remedy` says how to have more.
pub fn warn(model: &Model, tokens: usize, found: Found, remedy: &str, reporter: impl Into<Reporter>) {
    let widest = model.blocks.iter().flat_map(|block| block.all_linears()).max_by_key(|linear| linear.cols);
    let inputs = widest.map_or(0, |linear| linear.cols);
    if let Some(why) = why(tokens, inputs, found) {
        reporter.into().warn(format!("calibration sees {tokens} tokens: {why}; {remedy}"));
    }
}

fn why(tokens: usize, inputs: usize, found: Found) -> Option<String> {
    let enough = if found == Found::CacheScales { ENOUGH_FOR_HEADS } else { ENOUGH };
    match found {
        Found::Hessians if tokens < inputs => Some(format!(
            "the widest linear has {inputs} inputs, so that its Hessian has a rank of {tokens} at most and the rest is damping"
        )),
        _ if tokens < enough => Some(format!("what is found on fewer than {enough} varies with the text")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_limits_count() {
        assert!(
            why(500, 704, Found::Hessians).is_some_and(|why| why.contains("704 inputs") && why.contains("rank of 500"))
        );
        assert!(why(4095, 704, Found::Hessians).is_some_and(|why| why.contains("fewer than 4096")));
        assert!(why(8191, 8192, Found::Hessians).is_some());
        assert_eq!(why(8191, 8192, Found::Statistics), None);
        assert!(why(64, 8192, Found::Statistics).is_some());
        assert_eq!(why(4096, 704, Found::Hessians), None);
        assert!(why(2047, 704, Found::CacheScales).is_some_and(|why| why.contains("fewer than 2048")));
        assert_eq!(why(2048, 704, Found::CacheScales), None);
    }
}
