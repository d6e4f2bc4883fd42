//! What readers of quantized folders share: every module is checked when the folder is opened, and loaded when it
//! is used.

use std::collections::BTreeMap;

use rayon::prelude::*;

use super::config::Unfit;
use super::kind::Kind;
use super::{FormatError, Quantization, cache_scales, config};
use crate::backend::weight::Weight;
use crate::checkpoint::{Checkpoint, Entry};
use crate::model::source::{SourceError, WeightSource, dense};
use crate::scheme::Scheme;
use crate::tensor::{Dtype, bytes_to_words, widened};

/// Element types of scales.
pub const FLOATS: &[Dtype] = &[Dtype::F16, Dtype::BF16, Dtype::F32];

/// The tensors of one module.
#[derive(Clone, Copy)]
pub struct Tensors<'a> {
    pub checkpoint: &'a Checkpoint,
    pub module: &'a str,
}

impl<'a> Tensors<'a> {
    pub fn find(self, what: &str) -> Option<&'a Entry> {
        self.checkpoint.tensors().get(&format!("{}.{what}", self.module))
    }

    pub fn get(self, what: &str) -> Result<&'a Entry, String> {
        self.find(what).ok_or_else(|| format!("its `{what}` is missing"))
    }

    /// A tensor that must be there with one of these types and this shape.
    pub fn expect(self, what: &str, dtypes: &[Dtype], shape: &[usize]) -> Result<&'a Entry, String> {
        let entry = self.typed(what, dtypes)?;
        if entry.shape != shape {
            return Err(format!("`{what}` has shape {:?}; its config asks for {shape:?}", entry.shape));
        }
        Ok(entry)
    }

    /// A tensor that must be there with one of these types.
    pub fn typed(self, what: &str, dtypes: &[Dtype]) -> Result<&'a Entry, String> {
        let entry = self.get(what)?;
        if dtypes.contains(&entry.dtype) {
            return Ok(entry);
        }
        let wanted: Vec<&str> = dtypes.iter().map(|d| d.name()).collect();
        Err(format!("`{what}` is {}; it should be {}", entry.dtype, wanted.join(" or ")))
    }

    /// A matrix of one of these types, with its shape; not empty.
    pub fn matrix(self, what: &str, dtypes: &[Dtype]) -> Result<(&'a Entry, usize, usize), String> {
        let entry = self.typed(what, dtypes)?;
        match entry.shape[..] {
            [rows, cols] if rows > 0 && cols > 0 => Ok((entry, rows, cols)),
            [_, _] => Err(format!("`{what}` has shape {:?}; it is empty", entry.shape)),
            _ => Err(format!("`{what}` has shape {:?}; it should have two dimensions", entry.shape)),
        }
    }

    /// A number that must be there, alone in its tensor.
    pub fn one(self, what: &str, dtypes: &[Dtype]) -> Result<&'a Entry, String> {
        let entry = self.typed(what, dtypes)?;
        if entry.shape.iter().product::<usize>() == 1 {
            return Ok(entry);
        }
        Err(format!("`{what}` has shape {:?}; it should be one number", entry.shape))
    }

    pub fn words(self, what: &str) -> Result<Vec<u32>, String> {
        Ok(bytes_to_words(&self.get(what)?.bytes))
    }

    /// Floats, all of them finite.
    pub fn scales(self, what: &str) -> Result<Vec<f32>, String> {
        let entry = self.get(what)?;
        let scales = widened(entry.dtype, &entry.bytes);
        match scales.iter().position(|s| !s.is_finite()) {
            Some(at) => Err(format!("element {at} of `{what}` is {}; scales must be finite", scales[at])),
            None => Ok(scales),
        }
    }
}

/// A quantized linear that has passed all checks of its types and shapes.
pub trait Linear: Send + Sync {
    /// Outputs and inputs.
    fn shape(&self) -> (usize, usize);

    /// Its weight; values that mean nothing are found here.
    fn load(&self, tensors: Tensors) -> Result<Weight, String>;
}

/// A folder of quantized linears; all others are floats.
pub struct StoredSource<L> {
    checkpoint: Checkpoint,
    modules: BTreeMap<String, L>,
}

impl<L: Linear> StoredSource<L> {
    /// Checks every module of `names`, in a folder whose config says `method`.
    pub fn open<E: Into<Unfit>>(
        checkpoint: Checkpoint,
        method: &str,
        names: &[String],
        check: impl Fn(Tensors) -> Result<L, E> + Sync,
    ) -> Result<Self, FormatError> {
        let dir = || checkpoint.dir().into();
        let read = |name: &String| match check(Tensors { checkpoint: &checkpoint, module: name }).map_err(E::into) {
            Ok(linear) => Ok((name.clone(), linear)),
            Err(Unfit::Invalid(why)) => Err(FormatError::Damaged { module: name.clone(), dir: dir(), why }),
            Err(Unfit::Unread(why)) => {
                let why = format!("module `{name}`: {why}");
                Err(FormatError::Variant { dir: dir(), method: method.into(), why })
            }
        };
        let read: Vec<Result<_, FormatError>> = names.par_iter().map(read).collect();
        // Not collected in parallel: the first fault in order is reported, whichever thread finds one first.
        let modules = read.into_iter().collect::<Result<_, _>>()?;
        Ok(Self { checkpoint, modules })
    }
}

impl<L> StoredSource<L> {
    /// The linears, as consumers look at them.
    pub fn quantization(&self, of: impl Fn(&L) -> (Kind, Scheme)) -> Option<Quantization>
    where
        L: Linear,
    {
        // The kind and scheme of most weights.
        let mut shares: Vec<((Kind, Scheme), usize)> = Vec::new();
        for linear in self.modules.values() {
            let (own, (rows, cols)) = (of(linear), linear.shape());
            match shares.iter_mut().find(|(other, _)| *other == own) {
                Some((_, weights)) => *weights += rows * cols,
                None => shares.push((own, rows * cols)),
            }
        }
        // The first of several as large.
        let ((kind, base), _) = shares.into_iter().rev().max_by_key(|(_, weights)| *weights)?;
        let schemes = self.modules.iter().map(|(name, linear)| (name.clone(), of(linear).1)).collect();
        let mut inputs: Vec<String> = Vec::new();
        for reading in self.modules.values().filter_map(|linear| of(linear).0.inputs()) {
            if !inputs.contains(&reading) {
                inputs.push(reading);
            }
        }
        Some(Quantization { kind, base, schemes, kv_cache: cache_scales(&self.checkpoint), inputs })
    }
}

impl<L: Linear> WeightSource for StoredSource<L> {
    fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    fn linear(&self, module: &str, rows: usize, cols: usize) -> Result<Weight, SourceError> {
        let Some(stored) = self.modules.get(module) else { return dense(&self.checkpoint, module, rows, cols) };
        let tensors = Tensors { checkpoint: &self.checkpoint, module };
        let loaded = same_shape(stored.shape(), (rows, cols)).and_then(|()| stored.load(tensors));
        loaded.map_err(|why| SourceError::Stored { module: module.into(), dir: self.checkpoint.dir().into(), why })
    }
}

/// Holds a stored shape against that of the model.
pub fn same_shape(stored: (usize, usize), wanted: (usize, usize)) -> Result<(), String> {
    if stored == wanted {
        return Ok(());
    }
    let ((rows, cols), (n, k)) = (stored, wanted);
    Err(format!("it has {rows} outputs and {cols} inputs; the model's config asks for {n} and {k}"))
}

/// The modules that have a tensor of this name and one of these types.
pub fn having(checkpoint: &Checkpoint, what: &str, dtypes: &[Dtype]) -> Vec<String> {
    let name = |(name, entry): (&String, &Entry)| {
        let module = name.strip_suffix(what)?.strip_suffix('.')?;
        dtypes.contains(&entry.dtype).then(|| module.to_string())
    };
    checkpoint.tensors().iter().filter_map(name).collect()
}

/// The complaint about a folder whose config says what its tensors do not.
pub fn nothing_quantized(found: &config::Found, what: &str) -> FormatError {
    let why = format!("the config says `{}`, but no tensor {what}", found.method);
    FormatError::Config { path: found.path.clone(), why }
}

/// A warning about quantized modules that the config leaves out.
pub fn left_out(names: &[String], is_left: impl Fn(&str) -> bool) -> Vec<String> {
    let mut left = names.iter().filter(|name| is_left(name));
    let Some(first) = left.next() else { return Vec::new() };
    vec![format!(
        "the config says that {} of {} quantized modules (first `{first}`) are not quantized, but they are; they are \
         read as quantized",
        1 + left.count(),
        names.len()
    )]
}

/// Range and counts of a `g_idx`. `None` for one that says nothing though there are several groups: some writers
/// leave it at 0 or -1 without activation order.
pub fn checked_groups(g_idx: Vec<u32>, groups: usize, size: usize) -> Result<Option<Vec<u32>>, String> {
    if g_idx.iter().all(|&g| g == u32::MAX) || (groups > 1 && g_idx.iter().all(|&g| g == 0)) {
        return Ok(None);
    }
    let mut counts = vec![0; groups];
    for (k, &g) in g_idx.iter().enumerate() {
        match counts.get_mut(g as usize) {
            Some(count) => *count += 1,
            None => {
                return Err(format!("`g_idx` puts input {k} into group {}, but there are {groups} groups", g as i32));
            }
        }
    }
    match counts.iter().position(|&count| count > size) {
        Some(g) => Err(format!("`g_idx` puts {} inputs into group {g}; the group size is {size}", counts[g])),
        None => Ok(Some(g_idx)),
    }
}

/// Groups of `size` neighbouring inputs.
pub fn in_order(cols: usize, size: usize) -> Vec<u32> {
    (0..cols).map(|k| (k / size.max(1)) as u32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unset_and_wrong_groups() {
        assert_eq!(checked_groups(vec![0; 8], 2, 4), Ok(None));
        assert_eq!(checked_groups(vec![u32::MAX; 8], 2, 4), Ok(None));
        assert_eq!(checked_groups(vec![1, 0, 1, 0], 2, 2), Ok(Some(vec![1, 0, 1, 0])));
        let far = checked_groups(vec![0, u32::MAX], 2, 4);
        assert!(far.is_err_and(|e| e.contains("input 1 into group -1")));
        assert!(checked_groups(vec![1, 1, 1, 0], 2, 2).is_err_and(|e| e.contains("3 inputs into group 1")));
    }
}
