//! GPTQ (Frantar et al., 2210.17323): columns are rounded one after another, and what each rounding breaks
//! is mended in the columns not yet taken. Afterwards, coordinate descent on the same objective.
//!
//! Where it is known how far the inputs X of a linear have drifted from O, those of the original model, the
//! weights first move to the ridge solution of min |X W' - O w|², so that errors of earlier layers are
//! mended too (the asymmetric calibration of GPTAQ, 2504.02692, solved in closed form).

pub use super::curvature::{Curvature, GptqOptions, NotPositive};
use super::tile::{self, Tile};
use super::{Quantized, Report};

/// Quantizes `weight` (`rows` x `n`, row-major).
pub fn gptq(weight: &[f32], rows: usize, curvature: &Curvature, options: &GptqOptions) -> (Quantized, Report) {
    let n = curvature.n;
    tile::quantize(weight, rows, n, options.scheme, &curvature.sequence, &curvature.dead, |tile: &mut Tile| {
        tile.follow_drift(curvature);
        tile.compensate(curvature, options);
        for _ in 0..options.sweeps {
            tile.sweep(curvature, options.scheme);
        }
    })
}
