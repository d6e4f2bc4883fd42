//! Where every tensor of the reference went.

use std::collections::{BTreeMap, BTreeSet};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::folds::Folds;
use super::weights::{Compared, WeightError};
use super::{Findings, Side, Status};
use crate::checkpoint::Entry;
use crate::model::head_path;
use crate::model::presence::is_buffer;
use crate::tensor::{narrowed, widened};

/// What became of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Fate {
    /// Stored in fewer bits.
    Quantized,
    /// Stored as floating point.
    Copied,
    /// Gone into another tensor, as a norm's scale into the linear after it.
    Folded,
    /// Left out on purpose, as what tied weights say twice.
    Dropped,
    /// Left out, and nothing says why.
    Missing,
    /// Other numbers, and nothing says why.
    Changed,
    /// In the artifact only.
    Added,
}

/// A tensor of the reference, or one that only the artifact has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorRecord {
    pub tensor: String,
    pub fate: Fate,
    /// Numbers in the reference's.
    pub parameters: u64,
    /// Bytes in the reference, and of what stands for it in the artifact.
    pub source_bytes: u64,
    pub bytes: u64,
    /// The reason, where it is not plain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// All of them, and what they add up to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorAccounting {
    pub tensors: Vec<TensorRecord>,
    pub source_bytes: u64,
    pub artifact_bytes: u64,
    /// Stored bits of a weight, scales and zero points included: of all parameters, and of the quantized ones.
    pub bits_per_weight: f64,
    pub bits_per_quantized_weight: Option<f64>,
    /// The weights of modules against the reference's.
    pub weights: Vec<WeightError>,
}

impl TensorAccounting {
    /// How many tensors met this fate.
    pub fn count(&self, fate: Fate) -> usize {
        self.tensors.iter().filter(|tensor| tensor.fate == fate).count()
    }
}

/// Why parts of a multimodal model may be left out: that is seldom what its user wants.
const UNREAD: &str = "the language model does not read it";

/// Finds the fate of every tensor; `unread` are the modules that could not be read, which is told already.
pub fn account(
    artifact: &Side,
    reference: &Side,
    compared: &[Compared],
    unread: &BTreeSet<String>,
    findings: &mut Findings,
) -> TensorAccounting {
    let (own, source) = (artifact.checkpoint().tensors(), reference.checkpoint().tensors());
    let modules: BTreeMap<&str, &Compared> = compared.iter().map(|c| (c.error.module.as_str(), c)).collect();
    let folds = Folds::new(artifact, reference, modules.clone(), unread);
    let is_quantized = |module: &str| unread.contains(module) || modules.get(module).is_some_and(|c| c.error.quantized);
    let mut taken: BTreeSet<String> = BTreeSet::new();
    let mut tensors = Vec::new();
    // Bytes of weights, by module.
    let mut stored: BTreeMap<String, u64> = BTreeMap::new();
    for (name, entry) in source {
        let same = renamed(name, artifact, reference);
        let source_bytes = entry.bytes.len() as u64;
        let mut record = TensorRecord {
            tensor: name.clone(),
            fate: Fate::Copied,
            parameters: entry.shape.iter().product::<usize>() as u64,
            source_bytes,
            bytes: 0,
            note: None,
        };
        let module = same.strip_suffix(".weight").filter(|module| is_quantized(module));
        if let Some(module) = module {
            let parts = own.iter().filter(|(part, _)| belongs(part, module));
            record.fate = Fate::Quantized;
            for (part, entry) in parts {
                record.bytes += entry.bytes.len() as u64;
                taken.insert(part.clone());
            }
        } else if let Some(there) = own.get(&same) {
            taken.insert(same.clone());
            record.bytes = there.bytes.len() as u64;
            (record.fate, record.note) = kept(&same, there, entry, &folds);
        } else {
            (record.fate, record.note) = absent(name, artifact, reference);
        }
        if let Some(module) = same.strip_suffix(".weight").filter(|_| record.bytes > 0) {
            stored.insert(module.into(), record.bytes);
        }
        tensors.push(record);
    }
    for (name, entry) in own.iter().filter(|(name, _)| !taken.contains(*name)) {
        let scale = ["k_scale", "v_scale", "q_scale"].iter().any(|end| name.ends_with(end));
        tensors.push(TensorRecord {
            tensor: name.clone(),
            fate: Fate::Added,
            parameters: 0,
            source_bytes: 0,
            bytes: entry.bytes.len() as u64,
            note: scale.then(|| "a scale of the cache".into()),
        });
    }
    let out = summed(tensors, compared, &stored);
    tell(&out, findings);
    let changed = out.tensors.iter().filter(|t| t.fate == Fate::Changed);
    folds.check(&changed.map(|t| renamed(&t.tensor, artifact, reference)).collect(), findings);
    out
}

/// The name that the artifact has for a tensor of the reference.
fn renamed(name: &str, artifact: &Side, reference: &Side) -> String {
    let (own, prefix) = (artifact.config.prefix, reference.config.prefix);
    if let Some(inner) = name.strip_prefix(prefix) {
        return format!("{own}{inner}");
    }
    match name.strip_prefix(head_path(prefix)) {
        Some(rest) => format!("{}{rest}", head_path(own)),
        None => name.into(),
    }
}

/// Whether a tensor is a part of a quantized weight; a bias is not.
fn belongs(tensor: &str, module: &str) -> bool {
    tensor
        .strip_prefix(module)
        .and_then(|rest| rest.strip_prefix('.'))
        .is_some_and(|part| !part.contains('.') && part != "bias" && !["k_scale", "v_scale", "q_scale"].contains(&part))
}

/// The fate of a tensor that is there under its name.
fn kept(name: &str, own: &Entry, source: &Entry, folds: &Folds) -> (Fate, Option<String>) {
    if own.shape != source.shape {
        return (
            Fate::Changed,
            Some(format!("its shape is {:?}, that of the reference {:?}", own.shape, source.shape)),
        );
    }
    if own.dtype == source.dtype && own.bytes[..] == source.bytes[..] {
        return (Fate::Copied, None);
    }
    if !(own.dtype.is_float() && source.dtype.is_float()) {
        return (Fate::Changed, Some("its bytes are not the reference's".into()));
    }
    let (mine, theirs) = (widened(own.dtype, &own.bytes), widened(source.dtype, &source.bytes));
    let rounded = widened(own.dtype, &narrowed(own.dtype, &theirs));
    let equal = |a: f32, b: f32| a == b || (a - b).abs() <= 1e-6 * b.abs();
    if mine.iter().zip(&rounded).all(|(&a, &b)| equal(a, b)) {
        return (Fate::Copied, Some(format!("{} in place of {}", own.dtype, source.dtype)));
    }
    let at = mine.iter().zip(&rounded).position(|(&a, &b)| !equal(a, b)).unwrap_or(0);
    let count = mine.iter().zip(&rounded).filter(|&(&a, &b)| !equal(a, b)).count();
    let what =
        format!("{count} of {} elements are others (element {at}: {}, was {})", mine.len(), mine[at], theirs[at]);
    match folds.taken_back(name, &mine, &theirs) {
        Some(true) => (Fate::Folded, None),
        Some(false) => (Fate::Changed, Some(format!("{what}, and the linears that read it do not make up for it"))),
        None => (Fate::Changed, Some(what)),
    }
}

/// The fate of a tensor that is not there.
fn absent(name: &str, artifact: &Side, reference: &Side) -> (Fate, Option<String>) {
    if reference.config.is_repeated(name) && artifact.config.tied {
        return (Fate::Dropped, Some("the output head is the embedding".into()));
    }
    if is_buffer(name) {
        return (Fate::Dropped, Some("a buffer that readers compute".into()));
    }
    if !reference.config.reads(name) {
        return (Fate::Dropped, Some(UNREAD.into()));
    }
    (Fate::Missing, None)
}

fn summed(tensors: Vec<TensorRecord>, compared: &[Compared], stored: &BTreeMap<String, u64>) -> TensorAccounting {
    let artifact_bytes: u64 = tensors.iter().map(|t| t.bytes).sum();
    let source_bytes: u64 = tensors.iter().map(|t| t.source_bytes).sum();
    let quantized = || tensors.iter().filter(|t| t.fate == Fate::Quantized);
    let bytes: u64 = quantized().map(|t| t.bytes).sum();
    let size = |error: &WeightError| error.shape.iter().product::<usize>();
    let weights: usize = compared.iter().filter(|c| c.error.quantized).map(|c| size(&c.error)).sum();
    let with_bits = |c: &Compared| {
        let bytes = stored.get(&c.error.module).filter(|_| size(&c.error) > 0);
        let bits = bytes.map(|&bytes| 8.0 * bytes as f64 / size(&c.error) as f64);
        WeightError { bits, ..c.error.clone() }
    };
    let there = tensors.iter().filter(|t| !matches!(t.fate, Fate::Dropped | Fate::Missing | Fate::Added));
    let all: u64 = there.map(|t| t.parameters).sum();
    TensorAccounting {
        bits_per_weight: 8.0 * artifact_bytes as f64 / all.max(1) as f64,
        bits_per_quantized_weight: (weights > 0).then(|| 8.0 * bytes as f64 / weights as f64),
        source_bytes,
        artifact_bytes,
        weights: compared.iter().map(with_bits).collect(),
        tensors,
    }
}

/// Findings of what went another way.
fn tell(accounting: &TensorAccounting, findings: &mut Findings) {
    const ID: &str = "tensors";
    let with = |fate: Fate| accounting.tensors.iter().filter(move |t| t.fate == fate);
    let note = |t: &TensorRecord| t.note.clone().unwrap_or_default();
    findings.fail_each(
        ID,
        with(Fate::Missing)
            .map(|t| {
                format!("`{}` is missing: the reference has it, and nothing in the artifact stands for it", t.tensor)
            })
            .collect(),
    );
    findings.fail_each(
        ID,
        with(Fate::Changed)
            .map(|t| format!("`{}` was changed: {}; take it from the reference again", t.tensor, note(t)))
            .collect(),
    );
    for tensor in with(Fate::Added).filter(|t| t.note.is_none()) {
        findings.warn(ID, format!("`{}` is in the artifact only", tensor.tensor));
    }
    let dropped: Vec<&TensorRecord> = with(Fate::Dropped).collect();
    if let Some(first) = dropped.first() {
        let unread = dropped.iter().any(|t| note(t) == UNREAD);
        findings.add(
            "tensors.dropped",
            if unread { Status::Warn } else { Status::Pass },
            format!("{} tensors are left out (first `{}`: {})", dropped.len(), first.tensor, note(first)),
        );
    }
    let counts = [Fate::Quantized, Fate::Copied, Fate::Folded, Fate::Dropped].map(|fate| accounting.count(fate));
    findings.otherwise(
        ID,
        format!(
            "all {} tensors of the reference are accounted for: {} quantized, {} copied, {} folded, {} dropped",
            counts.iter().sum::<usize>(),
            counts[0],
            counts[1],
            counts[2],
            counts[3]
        ),
    );
}
