//! A warning where calibration sees so few tokens that what it finds is chance.

use crate::cli::print::Printer;
use crate::model::Model;

/// Tokens from which on statistics of single channels are steady.
const ENOUGH: usize = 4096;

/// What is found by calibration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Hessians, whose rank is no more than the number of tokens.
    Hessians,
    /// Scales, ranges and importance of channels.
    Statistics,
}

/// Warns where `tokens` are too few; `remedy` says how to have more.
pub fn warn(model: &Model, tokens: usize, found: Found, remedy: &str, printer: Printer) {
    let widest = model.blocks.iter().flat_map(|block| block.all_linears()).max_by_key(|linear| linear.cols);
    let inputs = widest.map_or(0, |linear| linear.cols);
    if let Some(why) = why(tokens, inputs, found) {
        printer.warn(format!("calibration sees {tokens} tokens: {why}; {remedy}"));
    }
}

fn why(tokens: usize, inputs: usize, found: Found) -> Option<String> {
    match found {
        Found::Hessians if tokens < inputs => Some(format!(
            "the widest linear has {inputs} inputs, so that its Hessian has a rank of {tokens} at most and the rest is damping"
        )),
        _ if tokens < ENOUGH => Some(format!("what is found on fewer than {ENOUGH} varies with the text")),
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
    }
}
