//! Reading AutoAWQ artifacts.

use serde_json::Value;

use crate::backend::weight::Weight;
use crate::checkpoint::{Checkpoint, JsonKeys, whole};
use crate::format::config::{Found, Unfit, group_size};
use crate::format::kind::Kind;
use crate::format::stored::{FLOATS, Linear, StoredSource, Tensors, having, left_out, nothing_quantized};
use crate::format::{FormatError, Opened};
use crate::pack::awq::{BITS, FIELDS, unpack, weight};
use crate::scheme::{GroupSize, Scheme};
use crate::tensor::Dtype;

/// What the config says.
struct Settings {
    group_size: GroupSize,
    zero_point: bool,
}

/// A linear that was found.
struct Stored {
    rows: usize,
    cols: usize,
    group_size: GroupSize,
    /// Whether it has zero points; the middle of the range without.
    zeros: bool,
}

/// Opens a folder whose config says `awq`.
pub fn open(checkpoint: Checkpoint, found: &Found) -> Result<Opened, FormatError> {
    open_grouped(checkpoint, found, None)
}

/// [`open`], where modules may have group sizes of their own.
pub fn open_grouped(
    checkpoint: Checkpoint,
    found: &Found,
    group_of: Option<&(dyn Fn(&str) -> GroupSize + Sync)>,
) -> Result<Opened, FormatError> {
    let settings = parse(&found.value).map_err(|why| why.of(found))?;
    let names = having(&checkpoint, "qweight", &[Dtype::I32]);
    if names.is_empty() {
        return Err(nothing_quantized(found, "of I32 ends in `.qweight`"));
    }
    let left = JsonKeys::of("", &found.value).texts("modules_to_not_convert");
    let left =
        left.map_err(|why| FormatError::Config { path: found.path.clone(), why: why.into() })?.unwrap_or_default();
    let warnings = left_out(&names, |name| left.iter().any(|part| name.contains(part)));
    let source = StoredSource::open(checkpoint, &found.method, &names, |tensors| {
        let group_size = group_of.map_or(settings.group_size, |of| of(tensors.module));
        check(tensors, group_size, settings.zero_point)
    })?;
    let quantization = source
        .quantization(|stored| (Kind::Awq, Scheme { bits: BITS, group_size: stored.group_size, sym: !stored.zeros }));
    Ok(Opened { method: Some("awq"), source: Box::new(source), quantization, warnings })
}

fn parse(value: &Value) -> Result<Settings, Unfit> {
    let keys = JsonKeys::of("", value);
    // AutoAWQ's names, and those of its older side file.
    let either = |names: [&'static str; 2]| match names.map(|key| keys.get(key)) {
        [Some(one), Some(other)] if one != other => Err(keys.contradiction(names[0], &keys, names[1])),
        [Some(_), _] => Ok(names[0]),
        [None, Some(_)] => Ok(names[1]),
        [None, None] => Err(keys.missing(names[0])),
    };
    let key = either(["bits", "w_bit"])?;
    let four = |bits: &i64| *bits == i64::from(BITS);
    if let Some(other @ 1..=8) = keys.get(key).and_then(whole).filter(|bits| !four(bits)) {
        return Err(Unfit::Unread(format!("`{key}` is {other}; AWQ words of 4 are read")));
    }
    keys.read(key, "AWQ words of 4 are read", |value| whole(value).filter(four))?;
    let size = either(["group_size", "q_group_size"])?;
    let group_size = keys.read(size, "it must be positive or -1", group_size)?.ok_or_else(|| keys.missing(size))?;
    let zero_point = keys.read("zero_point", "it must be true or false", Value::as_bool)?.unwrap_or(true);
    for key in ["version", "format", "checkpoint_format"] {
        if let Some(version) = keys.text(key)?
            && !version.eq_ignore_ascii_case("gemm")
        {
            return Err(Unfit::Unread(format!("tensors are laid out as `{version}`; only `gemm` is read")));
        }
    }
    Ok(Settings { group_size, zero_point })
}

fn check(tensors: Tensors, group_size: GroupSize, zero_point: bool) -> Result<Stored, String> {
    let (_, cols, words) = tensors.matrix("qweight", &[Dtype::I32])?;
    let rows = words.checked_mul(FIELDS).ok_or_else(|| format!("`qweight` is {words} words wide"))?;
    if !group_size.divides(cols) {
        return Err(format!("group size {group_size} does not divide its {cols} input channels"));
    }
    let groups = group_size.count(cols);
    tensors.expect("scales", FLOATS, &[groups, rows])?;
    let zeros = zero_point || tensors.find("qzeros").is_some();
    if zeros {
        tensors.expect("qzeros", &[Dtype::I32], &[groups, words])?;
    }
    Ok(Stored { rows, cols, group_size, zeros })
}

impl Linear for Stored {
    fn shape(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    fn load(&self, tensors: Tensors) -> Result<Weight, String> {
        let Stored { rows, cols, group_size, zeros } = *self;
        let group = group_size.columns(cols);
        let scales = tensors.scales("scales")?;
        let zeros = if zeros { unpack(&tensors.words("qzeros")?) } else { vec![1 << (BITS - 1); scales.len()] };
        Ok(weight(rows, cols, group, &tensors.words("qweight")?, zeros, scales))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn spellings_of_the_config() {
        let old = parse(&json!({"w_bit": 4, "q_group_size": 128, "zero_point": true, "version": "GEMM"})).unwrap();
        assert_eq!((old.group_size.raw(), old.zero_point), (128, true));
        for (value, part) in [
            (json!({"group_size": 128}), "`bits` is missing"),
            (json!({"bits": 8, "group_size": 128}), "`bits` is 8"),
            (json!({"bits": 4, "group_size": 0}), "`group_size` is 0"),
            (json!({"bits": 4, "group_size": 64, "version": "gemv_fast"}), "`gemv_fast`"),
            (json!({"bits": 4, "group_size": 64, "zero_point": 1}), "`zero_point` is 1"),
        ] {
            let error = parse(&value).err().unwrap().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
