//! Device memory: buffers, and the driver's pool that they come from.

use std::sync::{Arc, OnceLock};

use cudarc::driver::result::{self, DriverError, mem_pool};
use cudarc::driver::sys::{
    self, CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemLocation, CUmemLocationType, CUmemPool_attribute,
    CUmemoryPool,
};
use cudarc::driver::{CudaContext, CudaEvent};

use super::device::Device;
use super::graph::{Later, SpacePart};

/// The pool of a device that is current.
fn pool(context: &CudaContext) -> Result<CUmemoryPool, DriverError> {
    // SAFETY: the context names a device of the driver.
    unsafe { result::device::get_default_mem_pool(context.cu_device()) }
}

/// Lets the pool keep what is freed: by default the driver gives it back to the system at each synchronisation.
pub(super) fn keep_freed(context: &CudaContext) -> Result<(), DriverError> {
    let mut all = u64::MAX;
    let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the pool is the device's own, and this attribute is 64 bits wide.
    unsafe { mem_pool::set_attribute(pool(context)?, attribute, (&raw mut all).cast()) }
}

/// Gives what the pool keeps back to the system.
pub(super) fn trim(context: &CudaContext) {
    if let Ok(pool) = pool(context) {
        // SAFETY: the pool is the device's own.
        let _ = unsafe { mem_pool::trim_to(pool, 0) };
    }
}

/// Bytes that the pool keeps and nobody uses.
pub(super) fn kept(context: &CudaContext) -> usize {
    let value = |attribute| -> Result<u64, DriverError> {
        let mut value = 0u64;
        // SAFETY: the pool is the device's own, and these attributes are 64 bits wide.
        unsafe { mem_pool::get_attribute(pool(context)?, attribute, (&raw mut value).cast()) }?;
        Ok(value)
    };
    let reserved = value(CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT).unwrap_or(0);
    reserved.saturating_sub(value(CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT).unwrap_or(reserved)) as usize
}

/// Lets `reader` read the memory of `owner` directly, where the hardware can; otherwise copies go through the host.
pub(super) fn share(owner: &Device, reader: &Device) {
    let (owner, reader) = (&owner.context, &reader.context);
    let mut can = 0;
    // SAFETY: both are devices of the driver, and the answer has a place.
    let asked = unsafe { sys::cuDeviceCanAccessPeer(&mut can, reader.cu_device(), owner.cu_device()) };
    let (Ok(()), 1, Ok(pool)) = (asked.result(), can, pool(owner)) else { return };
    let access = CUmemAccessDesc {
        location: CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: reader.cu_device() },
        flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    // SAFETY: the pool is the owner's, and one description is given. Failing leaves copies slower, not wrong.
    let _ = unsafe { sys::cuMemPoolSetAccess(pool, &access, 1) };
}

/// Device memory, freed in stream order when the last owner goes.
#[derive(Clone)]
pub struct Buffer(Arc<Memory>);

struct Memory {
    device: Arc<Device>,
    pointer: CUdeviceptr,
    bytes: usize,
    origin: Origin,
}

/// Where memory came from, and so where it goes.
pub(super) enum Origin {
    Main,
    /// As `Main`, of a decoding step whose memory is measured.
    Measured {
        _part: SpacePart,
    },
    /// Filled by the stream of copies; the event passes when it is.
    Copies(OnceLock<Arc<CudaEvent>>),
    /// A part of the memory of recorded steps.
    Graph {
        _part: SpacePart,
        workspace: Buffer,
    },
}

impl Buffer {
    pub(super) fn new(device: Arc<Device>, pointer: CUdeviceptr, bytes: usize, origin: Origin) -> Self {
        Self(Arc::new(Memory { device, pointer, bytes, origin }))
    }

    pub fn pointer(&self) -> CUdeviceptr {
        self.0.pointer
    }

    pub fn bytes(&self) -> usize {
        self.0.bytes
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.0.device
    }

    /// Tells when the copies into it are through.
    pub(super) fn filled_at(&self, event: &Arc<CudaEvent>) {
        if let Origin::Copies(filled) = &self.0.origin {
            let _ = filled.set(event.clone());
        }
    }

    /// The memory of recorded steps that it is a part of.
    pub(super) fn workspace(&self) -> Option<&Buffer> {
        match &self.0.origin {
            Origin::Graph { workspace, .. } => Some(workspace),
            _ => None,
        }
    }

    /// Whether nobody else holds it, so that it may be written in place.
    pub fn is_unique(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes on {}", self.bytes(), self.0.device.name)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let filled = match std::mem::replace(&mut self.origin, Origin::Main) {
            // Dropping the origin frees the part.
            Origin::Graph { .. } => return,
            Origin::Main | Origin::Measured { .. } => None,
            Origin::Copies(filled) => Some(filled),
        };
        Later::Memory(Freed { pointer: self.pointer, filled }).drop_on(&self.device);
    }
}

/// Memory of the pool without an owner.
pub(super) struct Freed {
    pointer: CUdeviceptr,
    /// Where the stream of copies fills it, when that is done.
    filled: Option<OnceLock<Arc<CudaEvent>>>,
}

impl Freed {
    /// Gives it back to the pool, in the order of the main stream.
    pub(super) fn free(self, device: &Device) {
        if device.bind().is_err() {
            return;
        }
        if let Some(filled) = &self.filled {
            // No copy into it may be under way.
            let waited = match filled.get() {
                Some(filled) => device.stream.wait(filled),
                None => device.stream.join(&device.copies),
            };
            if waited.is_err() {
                return;
            }
        }
        // SAFETY: allocated by `alloc` or `alloc_for_copies`, freed once, after everything enqueued so far.
        let _ = unsafe { result::free_async(self.pointer, device.stream.cu_stream()) };
    }
}
