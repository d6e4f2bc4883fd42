//! Stored weights on their way to a device, and the forms they have there.
//!
//! Weights stay where the file is mapped until they are needed. Where all of a model fits, they then stay on the
//! device; where not, a block's weights go when it is done, and the next block's come in meanwhile through
//! page-locked memory on a stream of their own.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};

use bytemuck::cast_slice;
use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaEvent, PinnedHostSlice, result};
use half::bf16;

use super::super::Done;
use super::super::weight::{Dense, Fp8, Gptq, Inputs, Int8, Weight};
use super::device::Device;
use super::memory::Buffer;
use crate::num::bits;
use crate::num::ggml::GgmlType;
use crate::tensor::{Dtype, widened};

/// Input columns that kernels take at once; rows are padded to a multiple.
pub const UNIT: usize = 32;
/// Bytes of a segment that the kernels for bytes take at once.
pub const SEGMENT_UNIT: usize = 64;
/// Bytes of one page-locked buffer. Two take turns.
const STAGING: usize = 16 << 20;

/// Element type of a dense weight's planes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plane {
    F16,
    Bf16,
}

/// A weight in the form that kernels take.
#[derive(Debug)]
pub enum DeviceMatrix {
    /// One plane as in the file, or two bf16 planes whose sum is the f32 weight to 16 bits.
    Dense {
        plane: Plane,
        high: Buffer,
        low: Option<Buffer>,
        stride: usize,
    },
    Quant(Quant),
    /// ggml blocks as in the file, of any type but plain floats, which are `Dense` here.
    Ggml {
        kind: GgmlType,
        blocks: Buffer,
    },
    Int8(Bytes),
    Fp8(Floats),
}

/// Signed bytes in segments of input columns, as [`Inputs::segment`] has them.
#[derive(Debug)]
pub struct Bytes {
    /// `[rows, segments * padded]`: each segment filled up with zeros.
    pub values: Buffer,
    /// `[rows]` f32.
    pub scales: Buffer,
    /// `[segments, rows]` i32: sums of the values, where zero points of inputs need them.
    pub sums: Option<Buffer>,
    pub segments: usize,
    /// Bytes of a segment with what fills it up, a multiple of [`SEGMENT_UNIT`].
    pub padded: usize,
    pub inputs: Inputs,
}

/// E4M3 numbers.
#[derive(Debug)]
pub struct Floats {
    /// `[rows, cols]`
    pub values: Buffer,
    /// `[ceil(rows / tile.0), ceil(cols / tile.1)]` f32.
    pub scales: Buffer,
    pub tile: (usize, usize),
    /// `[rows]` f32, where an output has one scale.
    pub of_outputs: Option<Buffer>,
    pub inputs: Inputs,
}

/// Integers in units of [`UNIT`] input columns, each group whole units.
#[derive(Debug)]
pub struct Quant {
    pub bits: u8,
    /// `[units * bits, rows]` words.
    pub q: Buffer,
    /// `[groups, rows]` f32.
    pub scales: Buffer,
    /// `[groups, rows]` u8.
    pub zeros: Buffer,
    pub units: usize,
    pub units_per_group: usize,
    /// `[units * UNIT]` i32: the input column at each place, -1 for none. Absent where places are columns.
    pub gather: Option<Buffer>,
}

impl DeviceMatrix {
    fn buffers(&self) -> impl Iterator<Item = &Buffer> {
        let all = match self {
            DeviceMatrix::Dense { high, low, .. } => [Some(high), low.as_ref(), None, None],
            DeviceMatrix::Ggml { blocks, .. } => [Some(blocks), None, None, None],
            DeviceMatrix::Int8(w) => [Some(&w.values), Some(&w.scales), w.sums.as_ref(), None],
            DeviceMatrix::Fp8(w) => [Some(&w.values), Some(&w.scales), w.of_outputs.as_ref(), None],
            DeviceMatrix::Quant(q) => [Some(&q.q), Some(&q.scales), Some(&q.zeros), q.gather.as_ref()],
        };
        all.into_iter().flatten()
    }
}

/// A stored weight with its copies on the devices.
pub struct Stored {
    pub weight: Weight,
    slots: Vec<Mutex<Slot>>,
    bytes: u64,
    /// Bytes of all weights of the backend.
    total: Arc<AtomicU64>,
}

/// A weight's copy on one device.
#[derive(Default)]
struct Slot {
    matrix: Option<Arc<DeviceMatrix>>,
    /// It will be used soon: what was released meanwhile is not brought in ahead.
    wanted: bool,
}

impl std::fmt::Debug for Stored {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}x{} weight", self.weight.rows(), self.weight.cols())
    }
}

impl Stored {
    pub fn new(weight: Weight, devices: usize, total: &Arc<AtomicU64>) -> Self {
        let bytes = match &weight {
            Weight::Dense(w) => (w.rows * w.cols.next_multiple_of(UNIT) * w.dtype.size()) as u64,
            Weight::Gptq(w) => (w.qweight.len() * 4 + w.scales.len() * 5) as u64,
            Weight::Ggml(w) => w.bytes.len() as u64,
            Weight::Int8(w) => (w.values.len() + w.scales.len() * 4) as u64,
            Weight::Fp8(w) => (w.values.len() + w.scales.len() * 4) as u64,
        };
        total.fetch_add(bytes, Ordering::Relaxed);
        Self { weight, slots: (0..devices).map(|_| Mutex::default()).collect(), bytes, total: total.clone() }
    }

    fn slot(&self, device: &Device) -> MutexGuard<'_, Slot> {
        self.slots[device.slot].lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Gives up the copy on `device`.
    pub fn release(&self, device: &Device) {
        *self.slot(device) = Slot::default();
    }
}

impl Drop for Stored {
    fn drop(&mut self) {
        self.total.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Brings weights to one device.
pub struct Loader {
    device: Arc<Device>,
    staging: Mutex<Staging>,
    /// Weights that were to come in beforehand, to a thread of their own.
    ahead: Mutex<Option<Sender<Arc<Stored>>>>,
    /// A weight came in since the main stream last waited for the copies.
    unseen: AtomicBool,
}

/// Page-locked buffers, and what tells that a copy from one is through.
#[derive(Default)]
struct Staging {
    buffers: Vec<(PinnedHostSlice<u8>, Option<CudaEvent>)>,
    next: usize,
}

impl Loader {
    pub fn new(device: Arc<Device>) -> Arc<Self> {
        Arc::new(Self { device, staging: Mutex::default(), ahead: Mutex::default(), unseen: AtomicBool::new(false) })
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The weight on this device; brought in if it is not there. The main stream may use it.
    pub fn get(&self, stored: &Stored) -> Done<Arc<DeviceMatrix>> {
        let matrix = self.fetch(&mut stored.slot(&self.device), &stored.weight)?;
        if self.unseen.swap(false, Ordering::AcqRel) {
            self.device.stream.join(&self.device.copies).map_err(|e| self.device.error(e))?;
        }
        Ok(matrix)
    }

    /// Starts bringing in weights that will be wanted soon.
    pub fn ahead(self: &Arc<Self>, matrices: impl IntoIterator<Item = Arc<Stored>>) {
        let mut sender = self.ahead.lock().unwrap_or_else(|e| e.into_inner());
        let sender = sender.get_or_insert_with(|| {
            let (sender, receiver) = channel::<Arc<Stored>>();
            let loader = Arc::downgrade(self);
            std::thread::spawn(move || {
                while let Ok(stored) = receiver.recv() {
                    let Some(loader) = loader.upgrade() else { break };
                    let mut slot = stored.slot(&loader.device);
                    if slot.wanted {
                        // What fails here fails again, and is told, where the weight is used.
                        let _ = loader.fetch(&mut slot, &stored.weight);
                    }
                }
            });
            sender
        });
        for stored in matrices {
            stored.slot(&self.device).wanted = true;
            let _ = sender.send(stored);
        }
    }

    fn fetch(&self, slot: &mut Slot, weight: &Weight) -> Done<Arc<DeviceMatrix>> {
        if let Some(matrix) = &slot.matrix {
            return Ok(matrix.clone());
        }
        let matrix = Arc::new(self.bring(weight)?);
        let filled = self.device.copies.record_event(None).map_err(|e| self.device.error(e))?;
        let filled = Arc::new(filled);
        matrix.buffers().for_each(|buffer| buffer.filled_at(&filled));
        self.unseen.store(true, Ordering::Release);
        slot.matrix = Some(matrix.clone());
        Ok(matrix)
    }

    fn bring(&self, weight: &Weight) -> Done<DeviceMatrix> {
        match weight {
            Weight::Dense(w) => self.bring_dense(w),
            Weight::Gptq(w) => Ok(DeviceMatrix::Quant(self.bring_quant(w)?)),
            Weight::Ggml(w) => {
                let dtype = match w.kind {
                    GgmlType::F32 => Dtype::F32,
                    GgmlType::F16 => Dtype::F16,
                    GgmlType::BF16 => Dtype::BF16,
                    kind => return Ok(DeviceMatrix::Ggml { kind, blocks: self.copy(&w.bytes)? }),
                };
                self.bring_dense(&Dense { rows: w.rows, cols: w.cols, dtype, bytes: w.bytes.clone() })
            }
            Weight::Int8(w) => Ok(DeviceMatrix::Int8(self.bring_bytes(w)?)),
            Weight::Fp8(w) => Ok(DeviceMatrix::Fp8(self.bring_floats(w)?)),
        }
    }

    fn bring_dense(&self, w: &Dense) -> Done<DeviceMatrix> {
        let stride = w.cols.next_multiple_of(UNIT);
        let plane = if w.dtype == Dtype::F16 { Plane::F16 } else { Plane::Bf16 };
        if w.dtype == Dtype::F32 {
            let (high, low) = split(&widened(w.dtype, &w.bytes));
            let high = self.copy(&padded(cast_slice(&high), w.cols * 2, stride * 2))?;
            let low = Some(self.copy(&padded(cast_slice(&low), w.cols * 2, stride * 2))?);
            return Ok(DeviceMatrix::Dense { plane, high, low, stride });
        }
        let high =
            if stride == w.cols { self.copy(&w.bytes)? } else { self.copy(&padded(&w.bytes, w.cols * 2, stride * 2))? };
        Ok(DeviceMatrix::Dense { plane, high, low: None, stride })
    }

    fn bring_quant(&self, w: &Gptq) -> Done<Quant> {
        let groups = w.scales.len() / w.rows;
        let bits = w.bits as usize;
        let Layout { places, units_per_group } = Layout::of(&w.g_idx, groups);
        let units = places.len() / UNIT;
        let (scales, zeros) = (self.copy(cast_slice(&w.scales))?, self.copy(&w.zeros)?);
        let natural = places.iter().enumerate().all(|(at, column)| *column == Some(at));
        let (q, gather) = if natural {
            (self.copy(cast_slice(&w.qweight))?, None)
        } else {
            let mut words = vec![0u32; units * bits * w.rows];
            for n in 0..w.rows {
                for (at, column) in places.iter().enumerate() {
                    let Some(column) = column else { continue };
                    let code = u32::from(bits::get(|word| w.qweight[word * w.rows + n], *column, w.bits));
                    let bit = at * bits;
                    words[bit / 32 * w.rows + n] |= code << (bit % 32);
                    if bit % 32 + bits > 32 {
                        words[(bit / 32 + 1) * w.rows + n] |= code >> (32 - bit % 32);
                    }
                }
            }
            let gather: Vec<i32> = places.iter().map(|column| column.map_or(-1, |c| c as i32)).collect();
            (self.copy(cast_slice(&words))?, Some(self.copy(cast_slice(&gather))?))
        };
        Ok(Quant { bits: w.bits, q, scales, zeros, units, units_per_group, gather })
    }

    fn bring_bytes(&self, w: &Int8) -> Done<Bytes> {
        let segment = w.inputs.segment(w.cols);
        let (segments, padded) = (w.cols.div_ceil(segment), segment.next_multiple_of(SEGMENT_UNIT));
        let values = if segments * padded == w.cols {
            self.copy(&w.values)?
        } else {
            let mut filled = vec![0; w.rows * segments * padded];
            for (to, row) in filled.chunks_mut((segments * padded).max(1)).zip(w.values.chunks(w.cols.max(1))) {
                for (to, part) in to.chunks_mut(padded).zip(row.chunks(segment)) {
                    to[..part.len()].copy_from_slice(part);
                }
            }
            self.copy(&filled)?
        };
        let sums = if w.inputs.has_zeros() {
            let mut sums = vec![0i32; segments * w.rows];
            for (n, row) in w.values.chunks(w.cols.max(1)).enumerate() {
                for (s, part) in row.chunks(segment).enumerate() {
                    sums[s * w.rows + n] = part.iter().map(|v| i32::from(*v as i8)).sum();
                }
            }
            Some(self.copy(cast_slice(&sums))?)
        } else {
            None
        };
        let scales = self.copy(cast_slice(&w.scales))?;
        Ok(Bytes { values, scales, sums, segments, padded, inputs: w.inputs })
    }

    fn bring_floats(&self, w: &Fp8) -> Done<Floats> {
        let of_outputs = if w.tile.1 >= w.cols {
            let each: Vec<f32> = (0..w.rows).map(|n| w.scales[n / w.tile.0]).collect();
            Some(self.copy(cast_slice(&each))?)
        } else {
            None
        };
        let (values, scales) = (self.copy(&w.values)?, self.copy(cast_slice(&w.scales))?);
        Ok(Floats { values, scales, tile: w.tile, of_outputs, inputs: w.inputs })
    }

    /// Fresh memory with `bytes` in it, through the page-locked buffers.
    fn copy(&self, bytes: &[u8]) -> Done<Buffer> {
        let device = &self.device;
        let buffer = device.alloc_for_copies(bytes.len())?;
        let mut staging = self.staging.lock().unwrap_or_else(|e| e.into_inner());
        for (i, part) in bytes.chunks(STAGING).enumerate() {
            staging.copy(device, part, buffer.pointer() + (i * STAGING) as u64)?;
        }
        Ok(buffer)
    }
}

impl Staging {
    fn copy(&mut self, device: &Arc<Device>, bytes: &[u8], to: CUdeviceptr) -> Done<()> {
        let error = |e| device.error(e);
        if self.buffers.len() < 2 {
            // SAFETY: the contents are written before they are read.
            let buffer = unsafe { device.context.alloc_pinned::<u8>(STAGING) }.map_err(error)?;
            self.buffers.push((buffer, None));
            self.next = self.buffers.len() - 1;
        }
        let (buffer, busy) = &mut self.buffers[self.next];
        self.next = (self.next + 1) % 2;
        if let Some(event) = busy.take() {
            event.synchronize().map_err(error)?;
        }
        let staged = &mut buffer.as_mut_slice().map_err(error)?[..bytes.len()];
        staged.copy_from_slice(bytes);
        device.bind()?;
        // SAFETY: the target was allocated for these bytes; the staged ones stay until the event has passed.
        unsafe { result::memcpy_htod_async(to, &*staged, device.copies.cu_stream()) }.map_err(error)?;
        *busy = Some(device.copies.record_event(None).map_err(error)?);
        Ok(())
    }
}

/// f32 as the sum of two bf16.
fn split(values: &[f32]) -> (Vec<bf16>, Vec<bf16>) {
    let high: Vec<bf16> = values.iter().map(|v| bf16::from_f32(*v)).collect();
    let low = values.iter().zip(&high).map(|(v, h)| bf16::from_f32(v - h.to_f32())).collect();
    (high, low)
}

/// Rows of `row` bytes, each filled up with zeros to `stride` bytes.
fn padded(bytes: &[u8], row: usize, stride: usize) -> Vec<u8> {
    let mut out = vec![0; bytes.len() / row * stride];
    for (out, row) in out.chunks_exact_mut(stride).zip(bytes.chunks_exact(row)) {
        out[..row.len()].copy_from_slice(row);
    }
    out
}

/// The order of columns in which every group is whole units.
struct Layout {
    /// The column at each place.
    places: Vec<Option<usize>>,
    units_per_group: usize,
}

impl Layout {
    fn of(g_idx: &[u32], groups: usize) -> Self {
        let mut members = vec![Vec::new(); groups];
        for (column, &group) in g_idx.iter().enumerate() {
            members[group as usize].push(column);
        }
        let longest = members.iter().map(Vec::len).max().unwrap_or(0);
        let units_per_group = longest.div_ceil(UNIT).max(1);
        let mut places = Vec::new();
        for (group, columns) in members.iter().enumerate() {
            places.extend(columns.iter().map(|c| Some(*c)));
            // The last group may end early, on a unit; the others are as long as the longest.
            let end = if group + 1 == groups {
                places.len().next_multiple_of(UNIT)
            } else {
                (group + 1) * units_per_group * UNIT
            };
            places.resize(end, None);
        }
        Self { places, units_per_group }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts() {
        let natural = |n: usize, size: usize| (0..n).map(|k| (k / size) as u32).collect::<Vec<_>>();
        let layout = Layout::of(&natural(96, 64), 2);
        assert_eq!((layout.places.len(), layout.units_per_group), (96, 2));
        assert!(layout.places.iter().enumerate().all(|(i, p)| *p == Some(i)));
        // Groups of 16 are filled up to a unit each.
        let layout = Layout::of(&natural(40, 16), 3);
        assert_eq!((layout.places.len(), layout.units_per_group), (96, 1));
        assert_eq!((layout.places[15], layout.places[16], layout.places[32]), (Some(15), None, Some(16)));
        // Scattered columns come together.
        let layout = Layout::of(&[1, 0, 1, 0], 2);
        assert_eq!((layout.places[0], layout.places[1], layout.places[32]), (Some(1), Some(3), Some(0)));
    }

    #[test]
    fn planes_add_up() {
        let values = [1.0f32, -0.1, 3.0e-5, 123.456];
        let (high, low) = split(&values);
        for ((v, h), l) in values.iter().zip(high).zip(low) {
            assert!((v - h.to_f32() - l.to_f32()).abs() <= v.abs() * 1.0 / 65536.0);
        }
    }
}
