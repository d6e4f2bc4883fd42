//! The weights themselves, module by module: each row of an artifact's weight is a rounded row of its reference.
//!
//! What rounding may do depends on the grid, so that nothing is held against a fixed error: a row is told to be another
//! when it points elsewhere than its reference *and* lies further off than rounding to its grid can explain; a zero
//! point, when the weights below it are off by whole steps on average. Scales that methods move between linears (AWQ,
//! SmoothQuant) multiply whole columns or rows and are taken out first.

use std::collections::BTreeSet;
use std::ops::Range;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::folds::reads_norm;
use super::{Findings, Side};
use crate::backend::weight::{Gptq, Weight};
use crate::model::head_path;

/// Rows taken up at once.
const PANEL: usize = 64;

/// The least cosine between a row and its reference, in parts of the module's median;
const LEAST_COSINE: f64 = 0.5;
/// a module all of whose rows are wrong has no median worth the name.
const USUAL_COSINE: f64 = 0.6;
/// The cosine, in parts of the module's median, from which on a row is told to be one of the reference's.
const ALIKE: f64 = 0.6;
/// The median cosine below which a type is coarse: four bits reach 0.99, two 0.9 where weights have no outliers.
const COARSE: f64 = 0.8;
/// Root mean square of the error, in steps of the grid, that no rounding reaches. To the nearest it is 0.29; error
/// feedback and clipped outliers bring it up to some 0.7.
const MOST_STEPS: f64 = 0.8;
/// Rows that are next to nothing beside the others have no direction.
const LEAST_NORM: f64 = 1e-3;
/// Steps by which the weights of a group are off on average where its zero point is wrong,
const SHIFT: f64 = 0.5;
/// and the share of groups at which the module's zero points are told to be.
const SHIFTED: f64 = 0.5;
/// Groups off by whole steps, alone among others, that are no chance: this many, or two and one in a hundred.
const MANY: usize = 4;
/// Root mean square of a group of the reference, in steps, below which there is nothing to be off from.
const EMPTY: f64 = 0.05;

/// A module's weight against that of the reference.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WeightError {
    pub module: String,
    /// Whether the artifact stores it in fewer bits.
    pub quantized: bool,
    /// Norm of the difference over that of the reference's weight, scales of whole rows and columns taken out.
    pub error: f64,
    /// Root mean square of the difference in steps of the grid, where the grid has steps.
    pub steps: Option<f64>,
    /// The median cosine between a row and its reference.
    pub cosine: f64,
    /// Outputs and inputs.
    pub shape: [usize; 2],
    /// Stored bits of a weight, scales and zero points included, a bias not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits: Option<f64>,
}

/// What was seen of a module.
#[derive(Clone, Debug)]
pub struct Compared {
    pub error: WeightError,
    /// Whether its weights have failed: what follows from them says nothing new.
    pub failed: bool,
    /// By how much columns and rows are larger than the reference's; 1 where there is nothing to compare.
    pub columns: Vec<f64>,
    pub rows: Vec<f64>,
    /// The factor of each column by which the reference's comes nearest, rows scaled; empty where there is nothing to
    /// compare, or no norm before it.
    pub factors: Vec<Factor>,
}

/// A factor of a column, as the weights of its rows tell it.
#[derive(Clone, Copy, Debug)]
pub struct Factor {
    pub value: f64,
    /// Square of what rounding has left of the difference, in parts of the column; infinite where there is no factor.
    pub error: f64,
}

/// Messages on their way, of all modules.
#[derive(Default)]
struct Told {
    weights: Vec<String>,
    shifts: Vec<String>,
    doubts: Vec<String>,
}

/// Compares all linears that both have, and the tables beside the blocks. Also gives the modules that cannot be read.
pub fn compare<E>(
    artifact: &Side,
    reference: &Side,
    findings: &mut Findings,
    progress: &mut dyn FnMut(usize, usize) -> Result<(), E>,
) -> Result<(Vec<Compared>, BTreeSet<String>), E> {
    let mut modules = artifact.config.linears();
    let (own_prefix, prefix) = (artifact.config.prefix, reference.config.prefix);
    modules.push((format!("{own_prefix}embed_tokens"), artifact.config.vocab, artifact.config.hidden));
    let head = head_path(own_prefix);
    if !artifact.config.tied {
        modules.push((head.into(), artifact.config.vocab, artifact.config.hidden));
    }
    let (mut out, mut unread, mut told) = (Vec::new(), BTreeSet::new(), Told::default());
    for (done, (module, rows, cols)) in modules.iter().enumerate() {
        progress(done, modules.len())?;
        let same = match module.strip_prefix(own_prefix) {
            Some(inner) => format!("{prefix}{inner}"),
            None => head_path(prefix).to_string(),
        };
        let own = match artifact.opened.source.linear(module, *rows, *cols) {
            Ok(own) => own,
            Err(error) => {
                told.weights.push(format!("{error}: quantize the module again"));
                unread.insert(module.clone());
                continue;
            }
        };
        // One that the reference lacks, the accounting tells of.
        let Ok(wanted) = reference.opened.source.linear(&same, *rows, *cols) else { continue };
        out.push(one(module, &own, &wanted, &mut told));
    }
    findings.fail_each("weights", told.weights);
    findings.fail_each("zeros.shift", told.shifts);
    findings.warn_each("zeros.shift", told.doubts);
    let worst = out.iter().filter(|c| c.error.quantized).max_by(|a, b| a.error.error.total_cmp(&b.error.error));
    let whole = match worst {
        Some(worst) => format!(
            "the rows of {} modules are those of the reference, rounded; the largest error, {:.1} %, is that of `{}`",
            out.len(),
            100.0 * worst.error.error,
            worst.error.module
        ),
        None => format!("the rows of {} modules are those of the reference", out.len()),
    };
    findings.otherwise("weights", whole);
    findings.otherwise("zeros.shift", "no module is off by whole steps");
    Ok((out, unread))
}

fn one(module: &str, own: &Weight, wanted: &Weight, told: &mut Told) -> Compared {
    let (rows, cols) = (own.rows(), own.cols());
    let quantized = !matches!(own, Weight::Dense(_));
    let unlike = |columns: Vec<f64>, failed: bool| Compared {
        failed,
        error: WeightError {
            module: module.into(),
            quantized,
            error: 0.0,
            steps: None,
            cosine: 1.0,
            shape: [rows, cols],
            bits: None,
        },
        rows: vec![1.0; rows],
        columns,
        factors: Vec::new(),
    };
    if let (Weight::Dense(one), Weight::Dense(other)) = (own, wanted)
        && one.dtype == other.dtype
        && one.bytes[..] == other.bytes[..]
    {
        return unlike(vec![1.0; cols], false);
    }
    let columns = column_scales(own, wanted);
    let seen: Vec<Row> = panels(rows).flat_map_iter(|range| rows_of(own, wanted, &columns, range)).collect();
    if let Some((row, _)) = seen.iter().enumerate().find(|(_, row)| !row.error.is_finite()) {
        let count = seen.iter().filter(|row| !row.error.is_finite()).count();
        told.weights.push(format!(
            "`{module}`: {count} of {rows} outputs (first {row}) have weights that are no finite numbers: quantize the \
             module again"
        ));
        return unlike(columns, true);
    }
    let squares: f64 = seen.iter().map(|row| row.norm).sum();
    let errors: f64 = seen.iter().map(|row| row.error).sum();
    let stepped: f64 = seen.iter().map(|row| row.error_in_steps).sum();
    let steps = matches!(own, Weight::Gptq(_)).then(|| (stepped / (rows * cols) as f64).sqrt());
    let mut norms: Vec<f64> = seen.iter().map(|row| row.norm.sqrt()).collect();
    let usual_norm = median(&mut norms);
    let counts = |row: &&Row| row.norm.sqrt() > LEAST_NORM * usual_norm;
    let mut cosines: Vec<f64> = seen.iter().filter(counts).map(|row| row.cosine).collect();
    let cosine = if cosines.is_empty() { 1.0 } else { median(&mut cosines) };
    let least = LEAST_COSINE * cosine.max(USUAL_COSINE);
    let wrong: Vec<usize> = (0..rows)
        .filter(|&n| {
            let row = &seen[n];
            let far = steps.is_none() || (row.error_in_steps / cols as f64).sqrt() > MOST_STEPS;
            counts(&row) && row.cosine < least && far
        })
        .collect();
    let mut failed = !wrong.is_empty();
    if let Some(&first) = wrong.first() {
        told.weights.push(wrong_rows(module, own, wanted, &columns, first, wrong.len(), cosine));
    } else if let Weight::Gptq(own) = own {
        failed = shifted(module, own, wanted, &columns, &seen, told);
    }
    Compared {
        failed,
        error: WeightError {
            module: module.into(),
            quantized,
            error: if squares > 0.0 { (errors / squares).sqrt() } else { 0.0 },
            steps,
            cosine,
            shape: [rows, cols],
            bits: None,
        },
        rows: seen.iter().map(|row| row.scale).collect(),
        factors: if reads_norm(module) { factors(own, wanted, &seen) } else { Vec::new() },
        columns,
    }
}

/// Columns against those of the reference, by least squares over the rows, each row of the reference scaled as it is
/// seen.
fn factors(own: &Weight, wanted: &Weight, seen: &[Row]) -> Vec<Factor> {
    let cols = own.cols();
    let parts: Vec<Vec<[f64; 3]>> = panels(own.rows())
        .map(|range| {
            let mut sums = vec![[0.0; 3]; cols];
            let (one, other) = (panel(own, range.clone()), panel(wanted, range.clone()));
            for (n, (one, other)) in range.zip(one.chunks_exact(cols).zip(other.chunks_exact(cols))) {
                for ((sum, &y), &x) in sums.iter_mut().zip(one).zip(other) {
                    let (x, y) = (seen[n].scale * f64::from(x), f64::from(y));
                    *sum = [sum[0] + x * x, sum[1] + x * y, sum[2] + y * y];
                }
            }
            sums
        })
        .collect();
    let mut all = vec![[0.0; 3]; cols];
    parts.iter().for_each(|part| all.iter_mut().zip(part).for_each(|(a, b)| (0..3).for_each(|i| a[i] += b[i])));
    let factor = |[xx, xy, yy]: [f64; 3]| {
        let value = xy / xx;
        let error = (yy - value * xy).max(0.0) / (value * xy);
        Factor { value, error: if value > 0.0 && error.is_finite() { error } else { f64::INFINITY } }
    };
    all.into_iter().map(factor).collect()
}

fn panels(rows: usize) -> impl IndexedParallelIterator<Item = Range<usize>> {
    (0..rows.div_ceil(PANEL)).into_par_iter().map(move |i| i * PANEL..((i + 1) * PANEL).min(rows))
}

fn panel(weight: &Weight, rows: Range<usize>) -> Vec<f32> {
    let mut out = vec![0.0; rows.len() * weight.cols()];
    weight.panel(rows, &mut out);
    out
}

/// By how much each column of the one is larger than that of the other. Norms do not depend on the order of rows, so
/// that rows which were exchanged are still found.
fn column_scales(own: &Weight, wanted: &Weight) -> Vec<f64> {
    let cols = own.cols();
    let squares = |weight: &Weight| {
        let parts: Vec<Vec<f64>> = panels(weight.rows())
            .map(|range| {
                let mut sums = vec![0.0; cols];
                for row in panel(weight, range).chunks_exact(cols) {
                    sums.iter_mut().zip(row).for_each(|(sum, &w)| *sum += f64::from(w) * f64::from(w));
                }
                sums
            })
            .collect();
        let mut all = vec![0.0; cols];
        parts.iter().for_each(|part| all.iter_mut().zip(part).for_each(|(sum, part)| *sum += part));
        all
    };
    let ratio = |(own, wanted): (f64, f64)| {
        let ratio = (own / wanted).sqrt();
        if ratio.is_finite() && ratio > 0.0 { ratio } else { 1.0 }
    };
    squares(own).into_iter().zip(squares(wanted)).map(ratio).collect()
}

/// A row against its reference.
struct Row {
    cosine: f64,
    /// The scale of the reference's row, columns scaled, that comes nearest.
    scale: f64,
    /// Sum of squares of the reference's row so scaled.
    norm: f64,
    /// That of the difference,
    error: f64,
    /// and in steps of the grid.
    error_in_steps: f64,
}

fn rows_of(own: &Weight, wanted: &Weight, columns: &[f64], range: Range<usize>) -> Vec<Row> {
    let cols = own.cols();
    let (one, other) = (panel(own, range.clone()), panel(wanted, range.clone()));
    let rows = range.zip(one.chunks_exact(cols).zip(other.chunks_exact(cols)));
    rows.map(|(n, (own_row, other))| {
        let scaled = || other.iter().zip(columns).map(|(&w, s)| f64::from(w) * s);
        let (mut dot, mut norm, mut square) = (0.0, 0.0, 0.0);
        for (&w, r) in own_row.iter().zip(scaled()) {
            let w = f64::from(w);
            (dot, norm, square) = (dot + w * r, norm + r * r, square + w * w);
        }
        let cosine = if norm * square > 0.0 { dot / (norm * square).sqrt() } else { 0.0 };
        // A row that points elsewhere has no scale by which it comes near.
        let scale = match cosine > LEAST_COSINE * USUAL_COSINE {
            true => dot / norm,
            false if norm * square > 0.0 => (square / norm).sqrt(),
            false => 1.0,
        };
        let (mut error, mut in_steps) = (0.0, 0.0);
        for (k, (&w, r)) in own_row.iter().zip(scaled()).enumerate() {
            let off = f64::from(w) - scale * r;
            error += off * off;
            if let Weight::Gptq(grid) = own {
                let step = f64::from(grid.scales[grid.g_idx[k] as usize * grid.rows + n]);
                in_steps += if step == 0.0 { 0.0 } else { off * off / (step * step) };
            }
        }
        Row { cosine, scale, norm: norm * scale * scale, error, error_in_steps: in_steps }
    })
    .collect()
}

/// Tells of rows that are not the reference's, and whose they are, if that is to be seen.
fn wrong_rows(
    module: &str,
    own: &Weight,
    wanted: &Weight,
    columns: &[f64],
    first: usize,
    count: usize,
    usual: f64,
) -> String {
    let row: Vec<f64> = panel(own, first..first + 1).into_iter().map(f64::from).collect();
    let square: f64 = row.iter().map(|w| w * w).sum();
    let cosine = |other: &[f32]| {
        let scaled = || other.iter().zip(columns).map(|(&w, s)| f64::from(w) * s);
        let (dot, norm): (f64, f64) =
            (row.iter().zip(scaled()).map(|(a, b)| a * b).sum(), scaled().map(|b| b * b).sum());
        if norm * square > 0.0 { dot / (norm * square).sqrt() } else { 0.0 }
    };
    let all: Vec<f64> = panels(wanted.rows())
        .flat_map_iter(|range| panel(wanted, range).chunks_exact(wanted.cols()).map(cosine).collect::<Vec<_>>())
        .collect();
    let best = (0..all.len()).fold(0, |best, n| if all[n] > all[best] { n } else { best });
    // In few bits even a row and its own reference point less than that alike.
    let clear = if usual > ALIKE / 2.0 { ALIKE * usual.min(1.0) } else { ALIKE };
    // Rows that have nothing to do with each other come as near as chance brings them.
    let itself = best == first && all[best] > 3.0 / (row.len() as f64).sqrt();
    let like = match all[best] > clear {
        _ if itself => "of all outputs its own is still the nearest".into(),
        true => format!("it is the reference's output {best}"),
        false => "it is none of the reference's outputs".into(),
    };
    let why = match itself {
        true if usual < COARSE => {
            "the others are hardly nearer to theirs, so that the type is too coarse for these weights; take one of more bits"
        }
        true => "it is damaged; quantize the module again",
        false => "rows were exchanged or damaged; quantize the module again",
    };
    format!(
        "`{module}`: {count} of {} outputs are not the reference's (first {first}: cosine {:.2}, where {:.2} is usual and \
         {usual:.2} is the module's median; {like}): {why}",
        own.rows(),
        all[first],
        USUAL_COSINE
    )
}

/// Looks for groups whose weights are off by whole steps: their zero points are wrong. Whether that fails the module.
fn shifted(module: &str, own: &Gptq, wanted: &Weight, columns: &[f64], seen: &[Row], told: &mut Told) -> bool {
    let groups = own.scales.len() / own.rows;
    let mut sizes = vec![0usize; groups];
    own.g_idx.iter().for_each(|&g| sizes[g as usize] += 1);
    let stored = Weight::Gptq(own.clone().into());
    let means: Vec<f64> = panels(own.rows)
        .flat_map_iter(|range| {
            let (one, other) = (panel(&stored, range.clone()), panel(wanted, range.clone()));
            let rows = range.zip(one.chunks_exact(own.cols).zip(other.chunks_exact(own.cols)));
            rows.flat_map(|(n, (one, other))| {
                let (mut sums, mut squares) = (vec![0.0; groups], vec![0.0; groups]);
                for k in 0..own.cols {
                    let g = own.g_idx[k] as usize;
                    let step = f64::from(own.scales[g * own.rows + n]);
                    if step != 0.0 {
                        let there = seen[n].scale * columns[k] * f64::from(other[k]) / step;
                        sums[g] += f64::from(one[k]) / step - there;
                        squares[g] += there * there;
                    }
                }
                for (g, &size) in sizes.iter().enumerate() {
                    // Where the reference is zero, error feedback puts there what other columns lost.
                    let empty = squares[g] <= EMPTY * EMPTY * size as f64;
                    sums[g] = if empty { 0.0 } else { sums[g] / size.max(1) as f64 };
                }
                sums
            })
            .collect::<Vec<_>>()
        })
        .collect();
    let off: Vec<usize> = (0..means.len()).filter(|&at| means[at].abs() > SHIFT).collect();
    let share = off.len() as f64 / means.len().max(1) as f64;
    if share > SHIFTED {
        let mut all = means.clone();
        told.shifts.push(format!(
            "`{module}`: the weights of {} of {} groups are off by {:+.2} steps in the median: its zero points are wrong, \
             or stored in another version than the config says; correct `checkpoint_format` or quantize the module again",
            off.len(),
            means.len(),
            median(&mut all)
        ));
        return true;
    }
    // Groups of their own, among others that are right: off by a whole step, as no group beside them is. Up to half of
    // the groups may be wrong, so that it is the lower quarter that tells what is usual.
    let mut usual: Vec<f64> = means.iter().map(|mean| mean.abs()).filter(|mean| *mean > 0.0).collect();
    usual.sort_unstable_by(f64::total_cmp);
    let usual = usual.get(usual.len() / 4).copied().unwrap_or(0.0);
    let alone = |&at: &usize| {
        let mean = means[at].abs();
        sizes[at % groups] >= 16 && mean > 16.0 * usual && (mean - mean.round()).abs() < 0.25 && mean > 0.75
    };
    let found: Vec<usize> = off.into_iter().filter(alone).collect();
    let Some(&first) = found.first() else { return false };
    let message = format!(
        "`{module}`: the weights of {} of {} groups are off by whole steps on average (first output {} in group {}: \
         {:+.2}), where other groups are not",
        found.len(),
        means.len(),
        first / groups,
        first % groups,
        means[first]
    );
    let many = found.len() >= MANY || found.len() > 1 && 100 * found.len() > means.len();
    match many {
        true => told.shifts.push(format!("{message}: their zero points are wrong; quantize the module again")),
        false => told.doubts.push(format!("{message}: their zero points may be wrong")),
    }
    many
}

/// The value in the middle.
pub fn median(values: &mut [f64]) -> f64 {
    let middle = values.len() / 2;
    if values.is_empty() { 0.0 } else { *values.select_nth_unstable_by(middle, f64::total_cmp).1 }
}
