//! Reading compressed-tensors artifacts. Tensors tell which linears are quantized, the config tells how.

use std::collections::BTreeSet;

use super::settings::{Arguments, Settings, Strategy};
use crate::backend::weight::{Gptq, Int8, Weight};
use crate::checkpoint::{Checkpoint, Entry};
use crate::format::config::{Found, Unfit};
use crate::format::float8::{self, Names};
use crate::format::kind::{Form, InputsKind, Kind, Tile};
use crate::format::stored::{
    FLOATS, Linear, StoredSource, Tensors, checked_groups, having, in_order, left_out, nothing_quantized,
};
use crate::format::{FormatError, Opened};
use crate::num::bits;
use crate::pack::compressed::{densified, is_dense, transposed, zero_points};
use crate::scheme::{GroupSize, Scheme};
use crate::tensor::{Dtype, bytes_to_words};

/// Opens a folder whose config says `compressed-tensors`.
pub fn open(checkpoint: Checkpoint, found: &Found) -> Result<Opened, FormatError> {
    let settings = Settings::parse(&found.value).map_err(|why| why.of(found))?;
    let mut names: BTreeSet<String> = having(&checkpoint, "weight_packed", &[Dtype::I32]).into_iter().collect();
    names.extend(having(&checkpoint, "weight", &[Dtype::I8, Dtype::F8E4M3]));
    let names: Vec<String> = names.into_iter().collect();
    if names.is_empty() {
        return Err(nothing_quantized(found, "ends in `.weight_packed`, or is bytes and ends in `.weight`"));
    }
    for name in settings
        .named()
        .filter(|name| !settings.ignores(name) && names.binary_search_by(|n| n.as_str().cmp(name)).is_err())
    {
        if let Some(entry) = checkpoint.tensors().get(&format!("{name}.weight")) {
            let why = format!("the config says that it is quantized, but its `weight` is {}", entry.dtype);
            return Err(FormatError::Damaged { module: name.into(), dir: checkpoint.dir().into(), why });
        }
    }
    let mut warnings = left_out(&names, |name| settings.ignores(name));
    warnings.extend(settings.ambiguous.iter().cloned());
    for pattern in &settings.unreadable {
        warnings.push(format!("the pattern `{pattern}` cannot be evaluated here; tensors tell what is quantized"));
    }
    let source = StoredSource::open(checkpoint, &found.method, &names, |tensors| Stored::check(tensors, &settings))?;
    let quantization = source.quantization(Stored::described);
    Ok(Opened { method: Some("compressed-tensors"), source: Box::new(source), quantization, warnings })
}

/// A linear that was found.
enum Stored {
    Packed(Packed),
    Whole(Whole),
    Float8(float8::Found),
}

/// Integers in words.
struct Packed {
    rows: usize,
    cols: usize,
    bits: u8,
    scales: Scales,
    zeros: Zeros,
    g_idx: Option<Vec<u32>>,
    /// Whether words begin with a whole field each.
    loose: bool,
}

/// Integers in bytes.
struct Whole {
    rows: usize,
    cols: usize,
    scales: Scales,
    asymmetric: bool,
    inputs: InputsKind,
}

/// How scales lie over the weight.
#[derive(Clone, Copy)]
struct Scales {
    /// Input channels that share one.
    group: usize,
    /// How many a row has.
    count: usize,
    /// One for all rows and columns.
    single: bool,
}

/// Where zero points are.
#[derive(Clone, Copy)]
enum Zeros {
    Middle,
    Words,
    Bytes,
}

impl Stored {
    /// As consumers look at it.
    fn described(&self) -> (Kind, Scheme) {
        let grouped = |scales: &Scales, cols: usize| match scales.count {
            1 => GroupSize::CHANNEL,
            _ => i32::try_from(scales.group.min(cols)).ok().and_then(GroupSize::new).unwrap_or(GroupSize::CHANNEL),
        };
        match self {
            Stored::Packed(stored) => {
                let sym = matches!(stored.zeros, Zeros::Middle);
                let group_size = grouped(&stored.scales, stored.cols);
                (Kind::Compressed(Form::Packed), Scheme { bits: stored.bits, group_size, sym })
            }
            Stored::Whole(stored) => {
                let group_size = grouped(&stored.scales, stored.cols);
                (Kind::Compressed(Form::Int8(stored.inputs)), Scheme { bits: 8, group_size, sym: !stored.asymmetric })
            }
            Stored::Float8(found) => {
                let form = Form::Float8 { tile: found.shared, inputs: found.inputs };
                (Kind::Compressed(form), Scheme::FLOAT8)
            }
        }
    }

    fn check(tensors: Tensors, settings: &Settings) -> Result<Self, Unfit> {
        let group = settings.group_of(tensors.module)?;
        let weights = &group.weights;
        if tensors.find("weight_packed").is_some() {
            integers(weights)?;
            if group.inputs != InputsKind::Float {
                return Err(Unfit::Unread("its integers are packed, though its inputs are rounded too".into()));
            }
            return Packed::check(tensors, weights).map(Stored::Packed);
        }
        if tensors.get("weight")?.dtype == Dtype::I8 {
            integers(weights)?;
            return Whole::check(tensors, weights, group.inputs).map(Stored::Whole);
        }
        if !weights.float {
            return Err(format!("its `weight` is {}, but the config says integers", Dtype::F8E4M3).into());
        }
        if !weights.symmetric {
            return Err(Unfit::Unread("its floats have zero points".into()));
        }
        let tile = match weights.strategy {
            Strategy::Tensor => Tile::Tensor,
            Strategy::Channel => Tile::Channel,
            Strategy::Group(width) => Tile::Block(1, width),
            Strategy::Block(height, width) => Tile::Block(height, width),
            Strategy::Token => return Err("its weight cannot have a scale a token".into()),
        };
        Ok(Stored::Float8(float8::Found::check(tensors, Names::COMPRESSED, tile, group.inputs)?))
    }
}

fn integers(weights: &Arguments) -> Result<(), String> {
    if weights.float { Err("its weight is integers, but the config says floats".into()) } else { Ok(()) }
}

impl Scales {
    /// Checks the scales of integers, `[rows, groups]`.
    fn check(tensors: Tensors, weights: &Arguments, rows: usize, cols: usize) -> Result<Self, Unfit> {
        let (group, single) = match weights.strategy {
            Strategy::Tensor => (cols, true),
            Strategy::Channel => (cols, false),
            Strategy::Group(size) => (size, false),
            Strategy::Block(..) | Strategy::Token => {
                return Err(Unfit::Unread("integers have a scale a block or token".into()));
            }
        };
        let count = cols.div_ceil(group);
        if single {
            tensors.one("weight_scale", FLOATS)?;
        } else if tensors.typed("weight_scale", FLOATS)?.shape != [rows] || count != 1 {
            tensors.expect("weight_scale", FLOATS, &[rows, count])?;
        }
        Ok(Self { group, count, single })
    }

    /// `[groups, rows]`
    fn load(self, tensors: Tensors, rows: usize) -> Result<Vec<f32>, String> {
        let scales = tensors.scales("weight_scale")?;
        Ok(if self.single { vec![scales[0]; rows] } else { transposed(&scales, rows) })
    }

    /// `[groups, rows]` codes of zero points that lie beside the scales as signed bytes.
    fn zeros(self, tensors: Tensors, rows: usize, middle: u8) -> Result<Vec<u8>, String> {
        let stored: Vec<u8> = tensors.get("weight_zero_point")?.bytes.iter().map(|b| b.wrapping_add(middle)).collect();
        Ok(if self.single { vec![stored[0]; rows] } else { transposed(&stored, rows) })
    }
}

/// The shape that packing has hidden.
fn hidden_shape(tensors: Tensors) -> Result<(usize, usize), String> {
    let entry = tensors.expect("weight_shape", &[Dtype::I64, Dtype::I32], &[2])?;
    let half = entry.bytes.len() / 2;
    let number = |bytes: &[u8]| {
        let mut wide = [0; 8];
        wide[..half].copy_from_slice(bytes);
        // A negative number becomes one too large for any weight.
        u64::from_le_bytes(wide) as usize
    };
    Ok((number(&entry.bytes[..half]), number(&entry.bytes[half..])))
}

impl Packed {
    fn check(tensors: Tensors, weights: &Arguments) -> Result<Self, Unfit> {
        let (_, rows, words) = tensors.matrix("weight_packed", &[Dtype::I32])?;
        let (n, cols) = hidden_shape(tensors)?;
        let bits = weights.bits;
        // No width leaves more fields than bits; what follows cannot overflow.
        let plausible = n == rows && cols > 0 && cols <= words.saturating_mul(32);
        if !plausible || is_dense(words, cols, bits).is_none() {
            return Err(format!(
                "`weight_packed` has {rows} rows of {words} words, in which {n} by {cols} integers of {bits} bits do \
                 not lie"
            )
            .into());
        }
        let loose = is_dense(words, cols, bits) == Some(false);
        let scales = Scales::check(tensors, weights, rows, cols)?;
        let zeros = if weights.symmetric { Zeros::Middle } else { zero_kind(tensors, rows, scales, bits)? };
        let g_idx = match tensors.find("weight_g_idx") {
            None => None,
            Some(_) => {
                let entry = tensors.expect("weight_g_idx", &[Dtype::I32], &[cols])?;
                checked_groups(bytes_to_words(&entry.bytes), scales.count, scales.group)?
            }
        };
        Ok(Self { rows, cols, bits, scales, zeros, g_idx, loose })
    }

    fn load(&self, tensors: Tensors) -> Result<Weight, String> {
        let Packed { rows, cols, bits, scales, loose, .. } = *self;
        let middle = 1 << (bits - 1);
        let zeros = match self.zeros {
            Zeros::Middle => vec![middle; scales.count * rows],
            Zeros::Bytes => scales.zeros(tensors, rows, middle)?,
            Zeros::Words => {
                let entry = tensors.get("weight_zero_point")?;
                let words = bytes_to_words(&entry.bytes);
                // Where both counts are equal, the words of the weight have told.
                if loose && entry.shape[0] == rows.div_ceil(32 / bits as usize) {
                    let dense = densified(&transposed(&words, entry.shape[0]), scales.count, rows, bits);
                    dense.chunks(bits::words(rows, bits)).flat_map(|row| bits::unpack(row, rows, bits)).collect()
                } else {
                    zero_points(&words, rows, scales.count, bits)
                }
            }
        };
        let mut words = tensors.words("weight_packed")?;
        if loose {
            words = densified(&words, rows, cols, bits);
        }
        let weight = Gptq {
            rows,
            cols,
            bits,
            qweight: transposed(&words, rows),
            zeros,
            scales: scales.load(tensors, rows)?,
            g_idx: self.g_idx.clone().unwrap_or_else(|| in_order(cols, scales.group)),
        };
        Ok(Weight::Gptq(weight.into()))
    }
}

/// Zero points of packed integers: packed along the outputs, or bytes as older versions left them.
fn zero_kind(tensors: Tensors, rows: usize, scales: Scales, bits: u8) -> Result<Zeros, String> {
    let entry = tensors.typed("weight_zero_point", &[Dtype::I32, Dtype::I8])?;
    if entry.dtype == Dtype::I8 {
        byte_zeros(entry, rows, scales)?;
        return Ok(Zeros::Bytes);
    }
    match entry.shape[..] {
        [words, count] if count == scales.count && is_dense(words, rows, bits).is_some() => Ok(Zeros::Words),
        _ => Err(format!(
            "`weight_zero_point` has shape {:?}; its config asks for [{}, {}]",
            entry.shape,
            bits::words(rows, bits),
            scales.count
        )),
    }
}

/// Signed bytes beside the scales.
fn byte_zeros(entry: &Entry, rows: usize, scales: Scales) -> Result<(), String> {
    let wanted = if scales.single { 1 } else { rows * scales.count };
    if entry.shape.iter().product::<usize>() == wanted {
        return Ok(());
    }
    Err(format!("`weight_zero_point` has shape {:?}; its config asks for {wanted} numbers", entry.shape))
}

impl Whole {
    fn check(tensors: Tensors, weights: &Arguments, inputs: InputsKind) -> Result<Self, Unfit> {
        let (_, rows, cols) = tensors.matrix("weight", &[Dtype::I8])?;
        let scales = Scales::check(tensors, weights, rows, cols)?;
        let asymmetric = !weights.symmetric;
        if inputs != InputsKind::Float && (asymmetric || scales.count != 1) {
            let what = "integers with zero points or groups though inputs are rounded too";
            return Err(Unfit::Unread(what.into()));
        }
        if asymmetric {
            byte_zeros(tensors.typed("weight_zero_point", &[Dtype::I8])?, rows, scales)?;
        }
        if inputs.is_static() {
            tensors.one("input_scale", FLOATS)?;
        }
        if inputs == InputsKind::TensorAsymmetric {
            tensors.one("input_zero_point", &[Dtype::I8, Dtype::I32])?;
        }
        Ok(Self { rows, cols, scales, asymmetric, inputs })
    }

    fn load(&self, tensors: Tensors) -> Result<Weight, String> {
        let Whole { rows, cols, scales, asymmetric, inputs } = *self;
        let values = tensors.get("weight")?.bytes.clone();
        let loaded = scales.load(tensors, rows)?;
        if inputs != InputsKind::Float {
            let inputs = float8::inputs(tensors, inputs, "input_scale", "input_zero_point")?;
            return Ok(Weight::Int8(Int8 { rows, cols, values, scales: loaded, inputs }.into()));
        }
        // Without inputs in bytes these are integers like any others.
        let words: Vec<u32> =
            values.chunks_exact(cols).flat_map(|row| bits::pack(row.iter().map(|b| b ^ 0x80), cols, 8)).collect();
        let zeros = if asymmetric { scales.zeros(tensors, rows, 0x80)? } else { vec![0x80; loaded.len()] };
        let weight = Gptq {
            rows,
            cols,
            bits: 8,
            qweight: transposed(&words, rows),
            zeros,
            scales: loaded,
            g_idx: in_order(cols, scales.group),
        };
        Ok(Weight::Gptq(weight.into()))
    }
}

impl Linear for Stored {
    fn shape(&self) -> (usize, usize) {
        match self {
            Stored::Packed(stored) => (stored.rows, stored.cols),
            Stored::Whole(stored) => (stored.rows, stored.cols),
            Stored::Float8(stored) => stored.shape(),
        }
    }

    fn load(&self, tensors: Tensors) -> Result<Weight, String> {
        match self {
            Stored::Packed(stored) => stored.load(tensors),
            Stored::Whole(stored) => stored.load(tensors),
            Stored::Float8(stored) => stored.load(tensors),
        }
    }
}
