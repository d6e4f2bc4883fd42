//! Activations, in the memory of the backend that made them.

use std::sync::Arc;

use super::cuda::{Buffer, Device};

/// Where the numbers of a [`Tensor`] live. A backend reads only its own kind.
#[derive(Clone, Debug)]
enum Storage {
    /// Row-major f32 in host memory.
    Host(Vec<f32>),
    /// Row-major f32 in device memory; shared until written.
    Cuda(Buffer),
    /// A parameter: a copy on each device.
    Everywhere(Arc<[Buffer]>),
}

/// Activations: `rows` tokens of `cols` channels.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub rows: usize,
    pub cols: usize,
    storage: Storage,
}

impl Tensor {
    /// Wraps row-major host values.
    ///
    /// # Panics
    /// If `data` is not `rows * cols` long.
    pub fn host(rows: usize, cols: usize, data: Vec<f32>) -> Self {
        assert_eq!(data.len(), rows * cols, "a {rows}x{cols} tensor");
        Self { rows, cols, storage: Storage::Host(data) }
    }

    /// Zeros in host memory.
    pub fn zeros(rows: usize, cols: usize) -> Self {
        Self::host(rows, cols, vec![0.0; rows * cols])
    }

    /// Wraps device memory.
    ///
    /// # Panics
    /// If `buffer` does not hold `rows * cols` values.
    pub(super) fn cuda(rows: usize, cols: usize, buffer: Buffer) -> Self {
        assert_eq!(buffer.bytes(), rows * cols * 4, "a {rows}x{cols} tensor");
        Self { rows, cols, storage: Storage::Cuda(buffer) }
    }

    /// Wraps copies of a parameter, one a device.
    ///
    /// # Panics
    /// If one does not hold `rows * cols` values.
    pub(super) fn everywhere(rows: usize, cols: usize, buffers: Vec<Buffer>) -> Self {
        assert!(buffers.iter().all(|b| b.bytes() == rows * cols * 4), "a {rows}x{cols} tensor");
        Self { rows, cols, storage: Storage::Everywhere(buffers.into()) }
    }

    /// The host values, row-major.
    ///
    /// # Panics
    /// If another backend made the tensor: backends are not mixed.
    pub fn as_host(&self) -> &[f32] {
        match &self.storage {
            Storage::Host(data) => data,
            other => panic!("a host tensor is wanted, not {other:?}"),
        }
    }

    /// The host values, to be changed. Panics like [`Self::as_host`].
    pub fn as_host_mut(&mut self) -> &mut [f32] {
        match &mut self.storage {
            Storage::Host(data) => data,
            other => panic!("a host tensor is wanted, not {other:?}"),
        }
    }

    /// The device memory of an activation, or a parameter's first copy.
    ///
    /// # Panics
    /// If another backend made the tensor: backends are not mixed.
    pub(super) fn buffer(&self) -> &Buffer {
        match &self.storage {
            Storage::Cuda(buffer) => buffer,
            Storage::Everywhere(copies) => &copies[0],
            Storage::Host(_) => panic!("a device tensor is wanted, not one in host memory"),
        }
    }

    /// Whether nobody else holds the memory, so that it may be written in place. Parameters never may.
    pub(super) fn is_unique(&self) -> bool {
        match &self.storage {
            Storage::Host(_) => true,
            Storage::Cuda(buffer) => buffer.is_unique(),
            Storage::Everywhere(_) => false,
        }
    }

    /// The device memory on `device`. Panics like [`Self::buffer`].
    pub(super) fn buffer_on(&self, device: &Device) -> &Buffer {
        match &self.storage {
            Storage::Everywhere(copies) => &copies[device.slot],
            _ => self.buffer(),
        }
    }
}
