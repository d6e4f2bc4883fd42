//! One CUDA device: its context and streams, memory, kernels, and the launching of them.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use bytemuck::Pod;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{CUdeviceptr, CUfunction, CUresult};
use cudarc::driver::{CudaContext, CudaStream};

use super::super::{DeviceError, Done, OUT_OF_MEMORY};
use super::blas::Blas;
use super::graph::Phase;
use super::memory::{self, Buffer, Origin};
use super::modules::Modules;

/// Devices older than this lack the tensor-core instructions of the kernels.
const LEAST_CAPABILITY: (i32, i32) = (8, 0);
/// The driver that takes the PTX version of the kernels, as CUDA numbers it (12.2: driver 535).
const LEAST_DRIVER: i32 = 12020;

/// Whether there is a CUDA driver at all.
pub fn installed() -> bool {
    // SAFETY: asks the dynamic loader whether the driver library is there; nothing is called in it.
    unsafe { cudarc::driver::sys::is_culib_present() }
}

/// How many CUDA devices there are; `Err` tells why none can be used.
pub fn count() -> Result<usize, String> {
    if !installed() {
        return Err("no CUDA driver is installed".into());
    }
    let mut version = 0;
    // SAFETY: the library is there, and the pointer is valid for the one write.
    unsafe { cudarc::driver::sys::cuDriverGetVersion(&mut version) }.result().map_err(|e| words(&e))?;
    if version < LEAST_DRIVER {
        return Err(format!(
            "the CUDA driver is too old: it knows CUDA {}.{}, and {}.{} is needed (driver 535 or newer)",
            version / 1000,
            version % 1000 / 10,
            LEAST_DRIVER / 1000,
            LEAST_DRIVER % 1000 / 10
        ));
    }
    result::init().map_err(|e| words(&e))?;
    result::device::get_count().map(|n| n as usize).map_err(|e| words(&e))
}

/// What the driver says, in its own words.
fn words(error: &DriverError) -> String {
    match error.0 {
        CUresult::CUDA_ERROR_NO_DEVICE => "the CUDA driver finds no device".into(),
        _ => {
            let text = error.error_string().ok().map(|s| s.to_string_lossy().into_owned());
            let name = error.error_name().ok().map(|s| s.to_string_lossy().into_owned());
            match (name, text) {
                (Some(name), Some(text)) if name != text => format!("{text} ({name})"),
                (Some(name), _) => name,
                _ => format!("CUDA error {:?}", error.0),
            }
        }
    }
}

/// Whether there was too little memory.
fn short(error: &DriverError) -> bool {
    error.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY
}

/// One device. All its work runs on one stream, in order; weights come in on a second one.
pub struct Device {
    pub context: Arc<CudaContext>,
    pub stream: Arc<CudaStream>,
    /// The stream on which weights arrive.
    pub copies: Arc<CudaStream>,
    /// `cuda:0 (its model)`.
    pub name: String,
    /// What the driver calls it.
    pub model: String,
    /// Place among the devices that work side by side.
    pub slot: usize,
    /// cuBLAS where it is wanted and a fitting version is installed, otherwise why it is not used.
    pub blas: Result<Blas, String>,
    modules: Modules,
    functions: Mutex<HashMap<&'static str, Function>>,
    phase: Mutex<Phase>,
}

#[derive(Clone, Copy)]
struct Function {
    handle: CUfunction,
    /// Dynamic shared memory it has been allowed.
    shared: u32,
}

// SAFETY: a function handle may be used from any thread of the process that owns its context.
unsafe impl Send for Function {}

/// Lets all devices compute with the same cuBLAS or none: on which device a product is computed must not change its bits.
pub fn agree_on_cublas(devices: &mut [Arc<Device>]) {
    let mut versions = devices.iter().map(|device| device.blas.as_ref().map(Blas::version));
    let refused = versions.clone().find_map(|version| version.err().cloned());
    let first = versions.next();
    let differ = versions.any(|version| Some(version) != first).then(|| "its versions differ between devices".into());
    let Some(why) = refused.or(differ) else { return };
    for device in devices.iter_mut().filter_map(Arc::get_mut) {
        device.blas = Err(why.clone());
    }
}

impl Device {
    /// Opens device `ordinal` as the one in place `slot`. `cublas` tells whether the library may be used where it
    /// is installed.
    pub fn open(ordinal: usize, slot: usize, cublas: bool) -> Done<Arc<Self>> {
        let label = format!("cuda:{ordinal}");
        let fail = |e: DriverError| DeviceError { device: label.clone(), why: words(&e) };
        let context = CudaContext::new(ordinal).map_err(fail)?;
        let name = context.name().map_err(fail)?;
        let label = format!("cuda:{ordinal} ({name})");
        let fail = |e: DriverError| DeviceError { device: label.clone(), why: words(&e) };
        let capability = context.compute_capability().map_err(fail)?;
        if capability < LEAST_CAPABILITY {
            let why = format!(
                "its compute capability is {}.{}; {}.{} (Ampere) or newer is needed",
                capability.0, capability.1, LEAST_CAPABILITY.0, LEAST_CAPABILITY.1
            );
            return Err(DeviceError { device: label, why });
        }
        if !context.has_async_alloc() {
            return Err(DeviceError { device: label, why: "its driver offers no memory pools".into() });
        }
        memory::keep_freed(&context).map_err(fail)?;
        let stream = context.new_stream().map_err(fail)?;
        let copies = context.new_stream().map_err(fail)?;
        let blas = if cublas { Blas::new(&stream) } else { Err("it is switched off".into()) };
        let device = Self {
            context,
            stream,
            copies,
            name: label,
            model: name,
            slot,
            blas,
            modules: Modules::default(),
            functions: Mutex::default(),
            phase: Mutex::new(Phase::Other),
        };
        Ok(Arc::new(device))
    }

    /// The error of this device for a driver's answer.
    pub fn error(&self, error: DriverError) -> DeviceError {
        self.failed(words(&error))
    }

    /// An error of this device.
    pub fn failed(&self, why: impl Into<String>) -> DeviceError {
        DeviceError { device: self.name.clone(), why: why.into() }
    }

    /// Makes the device current for the calling thread.
    pub fn bind(&self) -> Done<()> {
        self.context.bind_to_thread().map_err(|e| self.error(e))
    }

    /// Bytes that can still be allocated.
    pub fn free_memory(&self) -> Done<usize> {
        let (free, _) = self.context.mem_get_info().map_err(|e| self.error(e))?;
        Ok(free + memory::kept(&self.context))
    }

    /// Waits for all work so far; errors of kernels come to light here.
    pub fn synchronize(&self) -> Done<()> {
        self.stream.synchronize().map_err(|e| self.error(e))
    }

    /// The current phase. Do not drop buffers while holding this lock: dropping locks it too.
    pub(super) fn phase(&self) -> MutexGuard<'_, Phase> {
        self.phase.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn recording(&self) -> bool {
        matches!(*self.phase(), Phase::Recording(_))
    }

    /// Whether a decoding step is computed or recorded.
    pub(super) fn decoding(&self) -> bool {
        !matches!(*self.phase(), Phase::Other)
    }

    /// Memory that the main stream uses; its contents are undefined.
    pub fn alloc(self: &Arc<Self>, bytes: usize) -> Done<Buffer> {
        let measured = match &mut *self.phase() {
            Phase::Recording(recorder) => return recorder.alloc(self, bytes),
            Phase::Step(space) => space.clone(),
            Phase::Other => None,
        };
        let pointer = self.take(&self.stream, bytes)?;
        let origin = measured.map_or(Origin::Main, |space| Origin::Measured { _part: space.take(bytes) });
        Ok(Buffer::new(self.clone(), pointer, bytes, origin))
    }

    /// Memory that the stream of copies fills first.
    pub fn alloc_for_copies(self: &Arc<Self>, bytes: usize) -> Done<Buffer> {
        let pointer = self.take(&self.copies, bytes)?;
        Ok(Buffer::new(self.clone(), pointer, bytes, Origin::Copies(OnceLock::new())))
    }

    /// What a call of the driver gives that needs memory. If there is too little, it tries again after the pool has
    /// released its unused memory. The error says what needed it and how much is free.
    pub(super) fn with_memory<T>(
        &self,
        needed: impl Fn() -> String,
        call: impl Fn() -> Result<T, DriverError>,
    ) -> Done<T> {
        let mut result = call();
        // A recording allows neither waiting nor what follows it.
        if result.as_ref().is_err_and(short) && !self.recording() {
            // What was freed is free once the work before is done.
            let _ = self.synchronize();
            memory::trim(&self.context);
            result = call();
        }
        result.map_err(|error| match self.context.mem_get_info() {
            Ok((free, total)) if short(&error) => self.failed(format!(
                "{OUT_OF_MEMORY}: {}, {} of {} are free",
                needed(),
                megabytes(free),
                megabytes(total)
            )),
            _ => self.error(error),
        })
    }

    /// Memory of the pool, first used on `stream`.
    fn take(&self, stream: &CudaStream, bytes: usize) -> Done<CUdeviceptr> {
        self.bind()?;
        let needed = || format!("{} more are needed", megabytes(bytes));
        // SAFETY: the stream belongs to the context that is current; nobody reads the memory before it is written.
        self.with_memory(needed, || unsafe { result::malloc_async(stream.cu_stream(), bytes.max(4)) })
    }

    /// Memory with `values` in it.
    pub fn upload<T: Pod>(self: &Arc<Self>, values: &[T]) -> Done<Buffer> {
        let buffer = self.alloc(size_of_val(values))?;
        self.write(&buffer, 0, values)?;
        Ok(buffer)
    }

    /// Writes `values` at byte `at`. A recorded copy would read `values` when the graph runs, and they may be gone by then.
    pub fn write<T: Pod>(&self, buffer: &Buffer, at: usize, values: &[T]) -> Done<()> {
        if values.is_empty() {
            return Ok(());
        }
        assert!(at + size_of_val(values) <= buffer.bytes());
        if self.recording() {
            return Err(self.failed("a recording cannot copy from host memory"));
        }
        self.bind()?;
        // SAFETY: the range lies inside the buffer; copies from pageable memory have read it when they return.
        unsafe { result::memcpy_htod_async(buffer.pointer() + at as u64, values, self.stream.cu_stream()) }
            .map_err(|e| self.error(e))
    }

    /// Zeroes the buffer.
    pub fn zero(&self, buffer: &Buffer) -> Done<()> {
        if let Phase::Recording(recorder) = &mut *self.phase() {
            recorder.keep(buffer);
        }
        self.bind()?;
        // SAFETY: the range is the whole buffer.
        unsafe { result::memset_d8_async(buffer.pointer(), 0, buffer.bytes(), self.stream.cu_stream()) }
            .map_err(|e| self.error(e))
    }

    /// Reads `count` values from byte `at` on; waits for all work so far.
    pub fn download<T: Pod>(&self, buffer: &Buffer, at: usize, count: usize) -> Done<Vec<T>> {
        let mut out = vec![T::zeroed(); count];
        assert!(at + size_of_val(&out[..]) <= buffer.bytes());
        self.bind()?;
        // SAFETY: the range lies inside the buffer, and `out` outlives the copy: the stream is waited for.
        unsafe { result::memcpy_dtoh_async(&mut out[..], buffer.pointer() + at as u64, self.stream.cu_stream()) }
            .map_err(|e| self.error(e))?;
        self.synchronize()?;
        Ok(out)
    }

    /// Reads parts, each from byte `at` on and of whole words, one after the other; waits for all work so far.
    pub fn download_parts(&self, parts: &[(&Buffer, usize, usize)]) -> Done<Vec<u32>> {
        let mut out = vec![0u32; parts.iter().map(|(_, _, bytes)| bytes / 4).sum()];
        let mut rest = &mut out[..];
        self.bind()?;
        for &(buffer, at, bytes) in parts {
            assert!(at + bytes <= buffer.bytes());
            let (now, later) = rest.split_at_mut(bytes / 4);
            // SAFETY: the range lies inside the buffer, and `out` outlives the copies: the stream is waited for, also
            // where one of them fails.
            let copied =
                unsafe { result::memcpy_dtoh_async(now, buffer.pointer() + at as u64, self.stream.cu_stream()) };
            if let Err(error) = copied {
                let _ = self.synchronize();
                return Err(self.error(error));
            }
            rest = later;
        }
        self.synchronize()?;
        Ok(out)
    }

    /// Copies `bytes` between two buffers of this device.
    pub fn copy(&self, from: &Buffer, from_at: usize, to: &Buffer, to_at: usize, bytes: usize) -> Done<()> {
        assert!(from_at + bytes <= from.bytes() && to_at + bytes <= to.bytes());
        if bytes == 0 {
            return Ok(());
        }
        if let Phase::Recording(recorder) = &mut *self.phase() {
            recorder.keep(from);
            recorder.keep(to);
        }
        self.bind()?;
        let (source, target) = (from.pointer() + from_at as u64, to.pointer() + to_at as u64);
        // SAFETY: both ranges lie inside their buffers.
        unsafe { result::memcpy_dtod_async(target, source, bytes, self.stream.cu_stream()) }.map_err(|e| self.error(e))
    }

    /// A copy on this device of a buffer of any device, after the work there so far.
    pub fn fetch(self: &Arc<Self>, from: &Buffer) -> Done<Buffer> {
        let to = self.alloc(from.bytes())?;
        let other = from.device();
        if Arc::ptr_eq(other, self) {
            self.copy(from, 0, &to, 0, from.bytes())?;
            return Ok(to);
        }
        let ready = other.stream.record_event(None).map_err(|e| other.error(e))?;
        self.stream.wait(&ready).map_err(|e| self.error(e))?;
        self.bind()?;
        // SAFETY: both buffers are whole allocations of the contexts named, of equal size.
        unsafe {
            result::memcpy_peer_async(
                self.context.cu_ctx(),
                to.pointer(),
                other.context.cu_ctx(),
                from.pointer(),
                from.bytes(),
                self.stream.cu_stream(),
            )
        }
        .map_err(|e| self.error(e))?;
        // The source may be freed or written again once this device has read it.
        let read = self.stream.record_event(None).map_err(|e| self.error(e))?;
        other.stream.wait(&read).map_err(|e| other.error(e))?;
        Ok(to)
    }

    /// The buffer itself if it is on this device, otherwise a copy of it here.
    pub fn fetch_shared(self: &Arc<Self>, from: &Buffer) -> Done<Buffer> {
        if Arc::ptr_eq(from.device(), self) { Ok(from.clone()) } else { self.fetch(from) }
    }

    /// Prepares a launch of `kernel`.
    pub fn launch(self: &Arc<Self>, kernel: &'static str, grid: [usize; 3], block: usize) -> Launch<'_> {
        Launch { device: self, kernel, grid, block, shared: 0, arguments: Vec::with_capacity(16) }
    }

    fn function(&self, kernel: &'static str, shared: u32) -> Done<CUfunction> {
        let mut functions = self.functions.lock().unwrap_or_else(|e| e.into_inner());
        let loaded = functions.get(kernel).is_some_and(|function| shared <= function.shared);
        if !loaded && self.recording() {
            return Err(self.failed(format!("kernel `{kernel}` is not loaded, and a recording cannot load it")));
        }
        let function = match functions.get_mut(kernel) {
            Some(function) => function,
            None => {
                let handle = self.modules.function(self, kernel)?;
                functions.entry(kernel).or_insert(Function { handle, shared: 48 << 10 })
            }
        };
        if shared > function.shared {
            use cudarc::driver::sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as LIMIT;
            // SAFETY: the handle is that of a function of a loaded module.
            unsafe { result::function::set_function_attribute(function.handle, LIMIT, shared as i32) }
                .map_err(|e| self.error(e))?;
            function.shared = shared;
        }
        Ok(function.handle)
    }
}

fn megabytes(bytes: usize) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}

/// A launch being put together: arguments in the order of the kernel's parameters.
pub struct Launch<'a> {
    device: &'a Arc<Device>,
    kernel: &'static str,
    grid: [usize; 3],
    block: usize,
    shared: usize,
    /// Each argument in the low bytes of a word.
    arguments: Vec<u64>,
}

impl Launch<'_> {
    /// Bytes of dynamic shared memory.
    pub fn shared(mut self, bytes: usize) -> Self {
        self.shared = bytes;
        self
    }

    pub fn buffer(self, buffer: &Buffer) -> Self {
        self.buffer_at(buffer, 0)
    }

    /// A pointer into a buffer, `at` bytes from its start.
    pub fn buffer_at(mut self, buffer: &Buffer, at: usize) -> Self {
        debug_assert!(at <= buffer.bytes());
        if let Phase::Recording(recorder) = &mut *self.device.phase() {
            recorder.keep(buffer);
        }
        self.arguments.push(buffer.pointer() + at as u64);
        self
    }

    /// A buffer, or a null pointer.
    pub fn optional(mut self, buffer: Option<&Buffer>) -> Self {
        match buffer {
            Some(buffer) => self.buffer(buffer),
            None => {
                self.arguments.push(0);
                self
            }
        }
    }

    /// A 32-bit unsigned number.
    pub fn u32(mut self, value: usize) -> Self {
        debug_assert!(u32::try_from(value).is_ok());
        self.arguments.push(value as u32 as u64);
        self
    }

    pub fn i32(mut self, value: i32) -> Self {
        self.arguments.push(value as u32 as u64);
        self
    }

    /// A 64-bit number.
    pub fn u64(mut self, value: usize) -> Self {
        self.arguments.push(value as u64);
        self
    }

    pub fn f32(mut self, value: f32) -> Self {
        self.arguments.push(value.to_bits() as u64);
        self
    }

    pub fn f64(mut self, value: f64) -> Self {
        self.arguments.push(value.to_bits());
        self
    }

    /// Puts the launch into the stream.
    pub fn go(mut self) -> Done<()> {
        if self.grid.contains(&0) {
            return Ok(());
        }
        let device = self.device;
        if self.grid[0] > i32::MAX as usize || self.grid[1..].iter().any(|&g| g > 65535) {
            return Err(device.failed(format!("kernel `{}`: a grid of {:?} is too large", self.kernel, self.grid)));
        }
        device.bind()?;
        let function = device.function(self.kernel, self.shared as u32)?;
        let mut pointers: Vec<*mut c_void> =
            self.arguments.iter_mut().map(|argument| (argument as *mut u64).cast()).collect();
        let [x, y, z] = self.grid.map(|g| g as u32);
        // SAFETY: the caller gives arguments in the order and kinds of the kernel's parameters, which the
        // conformance tests check on an emulation that knows their sizes; the buffers are alive, and freeing is
        // ordered after this launch on the same stream.
        unsafe {
            result::launch_kernel(
                function,
                (x, y, z),
                (self.block as u32, 1, 1),
                self.shared as u32,
                device.stream.cu_stream(),
                &mut pointers,
            )
        }
        .map_err(|e| device.failed(format!("kernel `{}`: {}", self.kernel, words(&e))))
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)
    }
}
