//! Scales that methods move from one tensor into the next: what one was divided by, the other takes back.
//!
//! Only some linears tell what was moved. AWQ and SmoothQuant also divide the rows of up (for down) and of v (for o), so
//! that the norms of their columns hold a constant of their own; q, k and gate are scaled by the norm before them alone.

use std::collections::{BTreeMap, BTreeSet};

use super::weights::{Compared, Factor, median};
use super::{Findings, Side};
use crate::tensor::widened;

/// How far, in logarithms, a norm may be from what the linears after it take back: they are known up to rounding.
const FOLD_SLACK: f64 = 0.1;

/// The same of the median of a module at no rounding at all; coarse grids shrink or stretch all weights, by about the
/// square of the sine between a row and its reference.
const LEVEL_SLACK: f64 = 0.08;
const LEVEL_BY_SINE: f64 = 2.0;

/// Root mean square, in logarithms, up to which linears of one norm may be scaled alike,
const TOGETHER_SLACK: f64 = 0.008;
/// the more the coarser the grid, in parts of the squared relative error of a column: what is small beside its group is
/// shrunk in all of them, and drift correction moves columns of all of them. What is seen of honest artifacts, of every
/// method and of other programs, is up to 0.7 of the sum.
const TOGETHER_BY_ERROR: f64 = 0.15;
/// Squared relative error of a column, in parts of the median, from which on it is too small for its groups.
const TOO_SMALL: f64 = 2.25;
/// Standard errors from which on that is no chance.
const SIGNIFICANT: f64 = 6.0;
/// Median deviations at which a channel stands out; three standard deviations of a normal distribution.
const STANDS_OUT: f64 = 4.4;

/// Linears that read a norm. In some the rows are scaled, too.
const AFTER_ATTENTION_NORM: [&str; 3] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
const AFTER_MLP_NORM: [&str; 2] = ["mlp.gate_proj", "mlp.up_proj"];

/// Whether a linear reads a norm.
pub fn reads_norm(module: &str) -> bool {
    AFTER_ATTENTION_NORM.iter().chain(&AFTER_MLP_NORM).any(|reader| module.ends_with(reader))
}

type Modules<'a> = BTreeMap<&'a str, &'a Compared>;

/// What linears and norms say of each other.
pub struct Folds<'a> {
    artifact: &'a Side<'a>,
    reference: &'a Side<'a>,
    modules: Modules<'a>,
    /// Modules that could not be read.
    unread: &'a BTreeSet<String>,
}

impl<'a> Folds<'a> {
    pub fn new(artifact: &'a Side, reference: &'a Side, modules: Modules<'a>, unread: &'a BTreeSet<String>) -> Self {
        Self { artifact, reference, modules, unread }
    }

    /// The norms of a block, and the linears that are scaled by nothing else.
    fn readers(&self) -> [(&'static str, &'static [&'static str]); 2] {
        let sandwich = self.artifact.config.family.sandwich_norms;
        let before_mlp = if sandwich { "pre_feedforward_layernorm" } else { "post_attention_layernorm" };
        [("input_layernorm", &["self_attn.q_proj", "self_attn.k_proj"]), (before_mlp, &["mlp.gate_proj"])]
    }

    fn find(&self, block: &str, module: &str) -> Option<&'a Compared> {
        self.modules.get(format!("{block}.{module}").as_str()).copied()
    }

    fn offset(&self) -> f64 {
        if self.artifact.config.family.norm_plus_one { 1.0 } else { 0.0 }
    }

    /// Whether a norm or bias was divided by what linears take back; `None` for what cannot be.
    pub fn taken_back(&self, name: &str, mine: &[f32], theirs: &[f32]) -> Option<bool> {
        if let Some(module) = name.strip_suffix(".bias") {
            // Rows and bias of a linear are divided alike.
            let Some(compared) = self.modules.get(module) else { return self.unread.contains(module).then_some(true) };
            let level = self.level_of_rows(module, compared);
            let wanted = |c: usize| compared.rows.get(c).map(|s| s.ln() + level);
            return Some(compared.failed || follows(mine, theirs, 0.0, wanted));
        }
        let (block, norm) = name.strip_suffix(".weight")?.rsplit_once('.')?;
        let (_, readers) = self.readers().into_iter().find(|(name, _)| *name == norm)?;
        let found: Vec<&Compared> = readers.iter().filter_map(|reader| self.find(block, reader)).collect();
        if found.is_empty() && !readers.iter().any(|reader| self.unread.contains(&format!("{block}.{reader}"))) {
            return None;
        }
        let sound: Vec<&Compared> = found.into_iter().filter(|reader| !reader.failed).collect();
        let mean = |c: usize| {
            let sum: Option<f64> = sound.iter().map(|r| r.columns.get(c).map(|s| s.ln())).sum();
            sum.map(|sum| -sum / sound.len() as f64)
        };
        // Linears that have failed say nothing of a norm.
        Some(sound.is_empty() || follows(mine, theirs, self.offset(), mean))
    }

    /// The logarithm of what a norm of a block was multiplied by, channel by channel.
    fn norm(&self, layer: usize, norm: &str) -> Option<Vec<f64>> {
        let values = |side: &Side| {
            let entry = side.checkpoint().tensors().get(&format!("{}.{norm}.weight", side.config.block_path(layer)))?;
            entry.dtype.is_float().then(|| widened(entry.dtype, &entry.bytes))
        };
        let (mine, theirs) = (values(self.artifact)?, values(self.reference)?);
        let ratio = |(&a, &b): (&f32, &f32)| {
            let ratio = (f64::from(a) + self.offset()) / (f64::from(b) + self.offset());
            if a == b || !(ratio > 0.0 && ratio.is_finite()) { 0.0 } else { ratio.ln() }
        };
        (mine.len() == theirs.len()).then(|| mine.iter().zip(&theirs).map(ratio).collect())
    }

    /// What all rows of a linear share, which the norms of its columns have taken up.
    fn level_of_rows(&self, module: &str, compared: &Compared) -> f64 {
        let found = (0..self.artifact.config.layers.len()).find_map(|layer| {
            let inner = module.strip_prefix(&self.artifact.config.block_path(layer))?.strip_prefix('.')?;
            Some((layer, inner))
        });
        let norm = found.and_then(|(layer, inner)| {
            let [attention, mlp] = self.readers();
            let norm = match inner {
                "self_attn.q_proj" | "self_attn.k_proj" | "self_attn.v_proj" => attention.0,
                "mlp.gate_proj" | "mlp.up_proj" => mlp.0,
                _ => return None,
            };
            self.norm(layer, norm)
        });
        median(&mut scaled(&compared.columns, norm.as_deref()))
    }

    /// Looks at all blocks. Norms in `changed` have failed already.
    pub fn check(&self, changed: &BTreeSet<String>, findings: &mut Findings) {
        const ID: &str = "folds";
        let mut messages = Vec::new();
        for layer in 0..self.artifact.config.layers.len() {
            let block = self.artifact.config.block_path(layer);
            for (norm, readers) in self.readers() {
                if !changed.contains(&format!("{block}.{norm}.weight")) {
                    let sound = readers.iter().filter_map(|name| Some((*name, self.find(&block, name)?)));
                    let told: Vec<String> =
                        sound.filter_map(|(name, reader)| self.after_norm(layer, norm, name, reader)).collect();
                    // Each by itself is no proof where scales are gentle; together they are.
                    let together = if told.is_empty() { self.together(layer, norm) } else { None };
                    messages.extend(told.into_iter().chain(together));
                }
            }
            for (first, second) in [("self_attn.v_proj", "self_attn.o_proj"), ("mlp.up_proj", "mlp.down_proj")] {
                let norm = self.readers()[usize::from(first == "mlp.up_proj")].0;
                if !changed.contains(&format!("{block}.{norm}.weight")) {
                    messages.extend(self.between(layer, first, second));
                }
            }
        }
        findings.fail_each(ID, messages);
        findings.otherwise(ID, "what was scaled in one tensor is taken back in the next");
    }

    /// A linear whose columns take back what its norm was divided by, and nothing else.
    fn after_norm(&self, layer: usize, norm: &str, name: &str, reader: &Compared) -> Option<String> {
        if reader.failed {
            return None;
        }
        let module = format!("{}.{name}", self.artifact.config.block_path(layer));
        let mut columns = scaled(&reader.columns, Some(&self.norm(layer, norm)?));
        let middle = median(&mut columns.clone());
        let level = middle + median(&mut scaled(&reader.rows, None));
        columns.iter_mut().for_each(|column| *column = (*column - middle).abs());
        let spread = median(&mut columns);
        let slack = slack(reader);
        if spread > slack {
            return Some(format!(
                "`{module}`: its inputs were scaled (by {:.0} % in the median), and `{norm}` does not take that back; \
                 quantize the layer again",
                100.0 * spread.exp_m1()
            ));
        }
        (level.abs() > slack).then(|| {
            format!(
                "`{module}`: its weights are {:.2} times the reference's in the median, and `{norm}` does not take that \
                 back: its scales are wrong; quantize the layer again",
                level.exp()
            )
        })
    }

    /// Linears that read the same norm, and columns of theirs that are scaled alike beyond what the norm takes back.
    ///
    /// What rounding does to a column of one linear says nothing of the same column of another, and neither does error
    /// feedback, whose errors come from each linear's own codes: by how much factors of columns vary together is what
    /// all of them were multiplied by.
    fn together(&self, layer: usize, norm: &str) -> Option<String> {
        let block = self.artifact.config.block_path(layer);
        let names: &[&str] = match norm == self.readers()[0].0 {
            true => &AFTER_ATTENTION_NORM,
            false => &AFTER_MLP_NORM,
        };
        let before = self.norm(layer, norm)?;
        let sound = |reader: &&Compared| !reader.failed && reader.factors.len() == before.len();
        let found: Vec<&Compared> = names.iter().filter_map(|name| self.find(&block, name)).filter(sound).collect();
        let worst = |c: usize| found.iter().map(|reader| reader.factors[c].error).fold(0.0, f64::max);
        let errors: Vec<f64> = (0..before.len()).map(worst).collect();
        let error = median(&mut errors.clone());
        let counts: Vec<bool> = errors.iter().map(|worst| worst.is_finite() && *worst <= TOO_SMALL * error).collect();
        let off: Vec<Vec<f64>> = found.iter().map(|reader| deviations(&reader.factors, &before, &counts)).collect();
        let channels = off.first().map_or(0, Vec::len).max(1) as f64;
        let product = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>() / channels;
        let (mut shared, mut variance, mut pairs) = (0.0, 0.0, 0.0);
        for (i, one) in off.iter().enumerate() {
            for other in &off[i + 1..] {
                shared += product(one, other);
                variance += product(one, one) * product(other, other) / channels;
                pairs += 1.0;
            }
        }
        let explained = TOGETHER_SLACK + TOGETHER_BY_ERROR * error;
        let scaled = (shared / pairs).max(0.0).sqrt();
        (pairs > 0.0 && scaled > explained && shared > SIGNIFICANT * variance.sqrt()).then(|| {
            let name = |reader: &&Compared| reader.error.module.rsplit('.').next().unwrap_or_default().to_string();
            let names: Vec<String> = found.iter().map(name).collect();
            format!(
                "`{block}.{norm}`: inputs of {} were scaled alike (by {:.1} %, root mean square, where rounding explains \
                 {:.1} %), and it does not take that back; quantize the layer again",
                names.join(", "),
                100.0 * scaled,
                100.0 * explained
            )
        })
    }

    /// Scales between two linears, which no norm shows.
    fn between(&self, layer: usize, first: &str, second: &str) -> Option<String> {
        let config = self.artifact.config;
        let block = config.block_path(layer);
        let (writer, reader) = (self.find(&block, first)?, self.find(&block, second)?);
        if writer.failed || reader.failed {
            return None;
        }
        let (dim, share) = (config.head_dim.max(1), (config.heads / config.kv_heads.max(1)).max(1));
        let row_of = |c: usize| if first == "mlp.up_proj" { c } else { c / dim / share * dim + c % dim };
        let columns = scaled(&reader.columns, None);
        let row = |c: usize| writer.rows.get(row_of(c)).map_or(0.0, |s| s.ln());
        let rows: Vec<f64> = (0..columns.len()).map(row).collect();
        let sum: Vec<f64> = rows.iter().zip(&columns).map(|(a, b)| a + b).collect();
        // What all channels share is no fold between channels; it has to cancel too.
        let shared = self.level_of_rows(&format!("{block}.{first}"), writer) + median(&mut scaled(&reader.rows, None));
        let level = median(&mut sum.clone()) + shared;
        let slack = slack(writer) + slack(reader);
        if level.abs() > slack {
            return Some(format!(
                "`{block}.{first}` and `{block}.{second}`: together they are {:.2} times the reference's in the median: \
                 the scales of one of them are wrong; quantize both again",
                level.exp()
            ));
        }
        let folded = spread(&rows).max(spread(&columns));
        (folded > 2.5 * FOLD_SLACK && spread(&sum) > 0.5 * folded).then(|| {
            format!(
                "`{block}.{first}` and `{block}.{second}`: outputs of the one were scaled, and the inputs of the other do \
                 not take that back; quantize both again"
            )
        })
    }
}

/// How far, in logarithms, the factors of columns that count are from their middle, those of the channels before them
/// taken out. Few that stand out count no more than others do.
fn deviations(factors: &[Factor], before: &[f64], counts: &[bool]) -> Vec<f64> {
    let counting = factors.iter().zip(before).zip(counts).filter(|(_, counts)| **counts);
    let logs: Vec<f64> = counting.map(|((factor, before), _)| factor.value.ln() + before).collect();
    let middle = median(&mut logs.clone());
    let most = STANDS_OUT * spread(&logs);
    logs.into_iter().map(|log| (log - middle).clamp(-most, most)).collect()
}

/// Logarithms of scales, with those of the channels before them.
fn scaled(scales: &[f64], before: Option<&[f64]>) -> Vec<f64> {
    let of = |c: usize| before.and_then(|before| before.get(c)).copied().unwrap_or(0.0);
    scales.iter().enumerate().map(|(c, scale)| scale.ln() + of(c)).collect()
}

/// How far the values are from their middle, in the median.
fn spread(values: &[f64]) -> f64 {
    let middle = median(&mut values.to_vec());
    median(&mut values.iter().map(|v| (v - middle).abs()).collect::<Vec<f64>>())
}

fn slack(module: &Compared) -> f64 {
    LEVEL_SLACK + LEVEL_BY_SINE * (1.0 - module.error.cosine.powi(2)).max(0.0)
}

/// Whether the logarithm of the ratio of two vectors is what `wanted` says, in each channel that was changed. Few may be
/// far off: those of little weight, whose scales are hardly known.
fn follows(mine: &[f32], theirs: &[f32], offset: f64, wanted: impl Fn(usize) -> Option<f64>) -> bool {
    let mut off = Vec::new();
    for (c, (&a, &b)) in mine.iter().zip(theirs).enumerate().filter(|(_, (a, b))| a != b) {
        let ratio = (f64::from(a) + offset) / (f64::from(b) + offset);
        off.push(match wanted(c) {
            Some(wanted) if ratio > 0.0 => (ratio.ln() - wanted).abs(),
            // A sign that no scale changes.
            _ => f64::INFINITY,
        });
    }
    off.sort_unstable_by(f64::total_cmp);
    let far = off.iter().filter(|off| **off > 5.0 * FOLD_SLACK).count();
    off.get(off.len() / 2).is_none_or(|off| *off < FOLD_SLACK) && far <= off.len() / 64
}
