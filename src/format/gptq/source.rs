//! Reading GPTQ artifacts, trusting nothing: each module is checked against the config when the folder is
//! opened, and the zero-point version is taken from the values where they tell it.

use std::collections::BTreeMap;

use rayon::prelude::*;

use super::settings::Settings;
use crate::backend::weight::{Gptq, Weight};
use crate::checkpoint::Checkpoint;
use crate::format::config::Found;
use crate::format::kind::Kind;
use crate::format::stored::{FLOATS, Tensors, checked_groups, in_order, nothing_quantized, same_shape};
use crate::format::{FormatError, Quantization, cache_scales};
use crate::model::source::{SourceError, WeightSource, dense};
use crate::num::bits;
use crate::pack::gptq::{Version, zero_points};
use crate::scheme::{GroupSize, Scheme};
use crate::tensor::{Dtype, bytes_to_words, widened};

/// A quantized linear of an artifact.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    pub rows: usize,
    pub cols: usize,
    pub scheme: Scheme,
    /// How its zero points are stored, which may differ from what the config says.
    pub version: Version,
    /// Whether `g_idx` differs from groups in column order.
    pub scattered: bool,
    /// `None` if the file has none, or one that means nothing.
    g_idx: Option<Vec<u32>>,
    pub zeros: ZeroPoints,
}

/// What the zero points of a module tell about their version.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ZeroPoints {
    Asymmetric,
    Agree,
    /// All are the middle of the other version.
    Contradict,
    /// The config says symmetric, but they are not all the same.
    Mixed,
}

/// A GPTQ artifact. Linears without `qweight` are floats.
#[derive(Debug)]
pub struct GptqSource {
    checkpoint: Checkpoint,
    /// What the config says of most linears.
    base: Scheme,
    modules: BTreeMap<String, Stored>,
    warnings: Vec<String>,
}

impl GptqSource {
    /// The linears, as consumers look at them.
    pub fn quantization(&self) -> Option<Quantization> {
        let version = self.modules.values().next()?.version;
        let desc_act = self.modules.values().any(|stored| stored.scattered);
        Some(Quantization {
            kind: Kind::Gptq { version, desc_act },
            base: self.base,
            schemes: self.modules.iter().map(|(name, stored)| (name.clone(), stored.scheme)).collect(),
            kv_cache: cache_scales(&self.checkpoint),
            inputs: Vec::new(),
        })
    }

    /// Opens an artifact and checks every module.
    pub fn open(checkpoint: Checkpoint, found: &Found) -> Result<Self, FormatError> {
        let settings = Settings::parse(found)?;
        let names: Vec<&str> = checkpoint.tensors().keys().filter_map(|name| name.strip_suffix(".qweight")).collect();
        if names.is_empty() {
            return Err(nothing_quantized(found, "ends in `.qweight`"));
        }
        let read = |name: &&str| match check(Tensors { checkpoint: &checkpoint, module: name }, &settings) {
            Ok(stored) => Ok((name.to_string(), stored)),
            Err(why) => Err(FormatError::Damaged { module: name.to_string(), dir: checkpoint.dir().into(), why }),
        };
        let read: Vec<Result<_, FormatError>> = names.par_iter().map(read).collect();
        // Not collected in parallel: the first fault in order is reported, whichever thread finds one first.
        let modules: BTreeMap<String, Stored> = read.into_iter().collect::<Result<_, _>>()?;
        let warnings = warnings(&modules, &settings);
        Ok(Self { checkpoint, base: settings.scheme, modules, warnings })
    }

    /// What is odd about the artifact, yet readable.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The quantized linears, by name.
    pub fn modules(&self) -> &BTreeMap<String, Stored> {
        &self.modules
    }
}

impl WeightSource for GptqSource {
    fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    fn linear(&self, module: &str, rows: usize, cols: usize) -> Result<Weight, SourceError> {
        match self.modules.get(module) {
            None => dense(&self.checkpoint, module, rows, cols),
            Some(stored) => {
                let tensors = Tensors { checkpoint: &self.checkpoint, module };
                let loaded = same_shape((stored.rows, stored.cols), (rows, cols)).and_then(|()| load(tensors, stored));
                let dir = self.checkpoint.dir().into();
                loaded.map_err(|why| SourceError::Stored { module: module.into(), dir, why })
            }
        }
    }
}

fn load(tensors: Tensors, stored: &Stored) -> Result<Weight, String> {
    let Stored { rows, cols, scheme, version, .. } = *stored;
    let entry = tensors.get("scales")?;
    let scales = widened(entry.dtype, &entry.bytes);
    if let Some(at) = scales.iter().position(|s| !s.is_finite()) {
        return Err(format!("the scale of output {} in group {} is {}", at % rows, at / rows, scales[at]));
    }
    let weight = Gptq {
        rows,
        cols,
        bits: scheme.bits,
        qweight: tensors.words("qweight")?,
        zeros: zero_points(&tensors.words("qzeros")?, rows, scheme.bits, version),
        scales,
        g_idx: stored.g_idx.clone().unwrap_or_else(|| in_order(cols, scheme.group_size.columns(cols))),
    };
    Ok(Weight::Gptq(weight.into()))
}

/// Checks everything about a module but its scales and codes, which are read when they are used.
fn check(tensors: Tensors, settings: &Settings) -> Result<Stored, String> {
    let module = tensors.module;
    let qweight = tensors.get("qweight")?;
    let [packed, rows] = qweight.shape[..] else {
        return Err(format!("`qweight` has shape {:?}; it should have two dimensions", qweight.shape));
    };
    if rows == 0 || packed == 0 {
        return Err(format!("`qweight` has shape {:?}; it is empty", qweight.shape));
    }
    let g_idx = match tensors.find("g_idx") {
        None => None,
        Some(entry) if entry.dtype != Dtype::I32 || entry.shape.len() != 1 => {
            return Err(format!("`g_idx` is {} of shape {:?}; it should be a vector of I32", entry.dtype, entry.shape));
        }
        Some(entry) => Some(bytes_to_words(&entry.bytes)),
    };
    let scales = tensors.get("scales")?;
    // A rule that leaves out a module whose integers are there is wrong about it.
    let mut scheme = settings.scheme_of(module).unwrap_or(settings.scheme);
    if let (Some(g_idx), false) = (&g_idx, settings.unreadable.is_empty()) {
        scheme = seen(scheme, g_idx.len(), packed, scales.shape.first().copied());
    }
    let bits = scheme.bits;
    let cols = g_idx.as_ref().map_or(packed * 32 / bits as usize, Vec::len);
    if cols == 0 || !(rows * bits as usize).is_multiple_of(32) {
        return Err(format!("{rows} outputs by {cols} inputs at {bits} bits do not fill 32-bit words"));
    }
    let (groups, group) = (scheme.group_size.count(cols), scheme.group_size.columns(cols));
    tensors.expect("qweight", &[Dtype::I32], &[bits::words(cols, bits), rows])?;
    tensors.expect("scales", FLOATS, &[groups, rows])?;
    let qzeros = tensors.expect("qzeros", &[Dtype::I32], &[groups, bits::words(rows, bits)])?;

    let g_idx = match g_idx {
        Some(g_idx) => checked_groups(g_idx, groups, group)?,
        None => None,
    };
    let scattered = g_idx.iter().flatten().enumerate().any(|(k, &g)| g as usize != k / group);
    let (version, zeros) = infer(&bytes_to_words(&qzeros.bytes), rows, scheme, settings.version);
    Ok(Stored { rows, cols, scheme, version, scattered, g_idx, zeros })
}

/// The scheme that shapes show, for modules to which an unreadable rule may apply.
fn seen(scheme: Scheme, cols: usize, packed: usize, groups: Option<usize>) -> Scheme {
    let bits = [2u8, 3, 4, 8].into_iter().find(|&b| cols * b as usize == packed * 32).unwrap_or(scheme.bits);
    let group_size = match groups {
        Some(1) => GroupSize::CHANNEL,
        Some(groups) if groups > 1 && groups != scheme.group_size.count(cols) => {
            GroupSize::new(cols.div_ceil(groups) as i32).unwrap_or(scheme.group_size)
        }
        _ => scheme.group_size,
    };
    Scheme { bits, group_size, ..scheme }
}

/// The version of stored zero points: as labelled, unless a symmetric module holds nothing but the middle of
/// the other version. Published artifacts exist whose label is wrong.
fn infer(qzeros: &[u32], rows: usize, scheme: Scheme, labelled: Version) -> (Version, ZeroPoints) {
    if !scheme.sym {
        return (labelled, ZeroPoints::Asymmetric);
    }
    let all_middle = |version: Version| {
        let field = version.store(scheme.middle(), scheme.bits);
        let row = bits::pack(std::iter::repeat_n(field, rows), rows, scheme.bits);
        qzeros.chunks(row.len()).all(|words| words == row)
    };
    let other = if labelled == Version::V1 { Version::V2 } else { Version::V1 };
    if all_middle(labelled) {
        (labelled, ZeroPoints::Agree)
    } else if all_middle(other) {
        (other, ZeroPoints::Contradict)
    } else {
        (labelled, ZeroPoints::Mixed)
    }
}

fn warnings(modules: &BTreeMap<String, Stored>, settings: &Settings) -> Vec<String> {
    let mut out = Vec::new();
    let mut warn = |counts: &dyn Fn(&str, &Stored) -> bool, text: &dyn Fn(&str) -> String| {
        let mut found = modules.iter().filter(|(name, stored)| counts(name, stored));
        if let Some((first, _)) = found.next() {
            out.push(text(&format!("{} of {} quantized modules (first `{first}`)", 1 + found.count(), modules.len())));
        }
    };
    let label = settings.version.name();
    warn(&|_, stored| stored.zeros == ZeroPoints::Contradict, &|which| {
        format!(
            "the config says `{label}`, but the zero points of {which} are stored the other way; they are read as \
             they are, other readers may shift every weight by one step"
        )
    });
    warn(&|_, stored| stored.zeros == ZeroPoints::Mixed, &|which| {
        format!("the config says symmetric, but {which} have other zero points; they are read as `{label}`")
    });
    warn(&|name, _| settings.scheme_of(name).is_none(), &|which| {
        format!("the config says that {which} are not quantized, but they are; they are read as quantized")
    });
    for pattern in &settings.unreadable {
        out.push(format!("the rule `{pattern}` cannot be evaluated here; widths and groups are taken from shapes"));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_tell_bits_and_groups() {
        let base = Scheme { bits: 4, group_size: GroupSize::CHANNEL, sym: true };
        let eight = seen(base, 256, 64, Some(2));
        assert_eq!((eight.bits, eight.group_size.raw()), (8, 128));
        assert_eq!(seen(base, 256, 32, Some(1)), base);
    }
}
