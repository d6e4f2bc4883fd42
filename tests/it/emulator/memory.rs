//! Memory that the pool keeps, allocations that are made to fail, and what a capture does not allow.

use CUresult::*;
use cudarc::driver::result::mem_pool;
use cudarc::driver::sys::{CUfunction_attribute_enum, CUmemPool_attribute, CUstreamCaptureMode};

use super::*;

pub const CASES: &[Case] = &[
    ("kept_by_the_pool", kept_by_the_pool),
    ("failing_allocations", failing_allocations),
    ("loading_in_a_capture", loading_in_a_capture),
];

const MB: usize = 1 << 20;

/// An allocation by itself.
fn single(bytes: usize) -> Result<CUdeviceptr, CUresult> {
    // SAFETY: nothing reads it.
    unsafe { result::malloc_sync(bytes) }.map_err(|e| e.0)
}

/// One from the pool.
fn pooled(bytes: usize) -> Result<CUdeviceptr, CUresult> {
    // SAFETY: nothing reads it.
    unsafe { result::malloc_async(NULL_STREAM, bytes) }.map_err(|e| e.0)
}

fn give_back(place: CUdeviceptr) {
    // SAFETY: allocated from the pool.
    unsafe { result::free_async(place, NULL_STREAM) }.unwrap();
}

#[test]
fn what_the_pool_keeps_is_used() {
    in_child("kept_by_the_pool", &[("MEMORY_MB", "8")]);
}

fn kept_by_the_pool() {
    let gpu = Gpu::open(0);
    let free = || result::mem_get_info().unwrap().0 / MB;
    let keep = |bytes: u64| {
        let mut bytes = bytes;
        let threshold = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: the pool of a device, and a value of 64 bits.
        unsafe {
            let pool = result::device::get_default_mem_pool(gpu.context.cu_device()).unwrap();
            mem_pool::set_attribute(pool, threshold, (&raw mut bytes).cast()).unwrap();
            pool
        }
    };
    let pool = keep(u64::MAX);
    give_back(pooled(6 * MB).unwrap());
    gpu.context.synchronize().unwrap();
    // The pool uses it again; nobody else can.
    assert_eq!((free(), single(3 * MB)), (2, Err(CUDA_ERROR_OUT_OF_MEMORY)));
    let part = pooled(5 * MB).unwrap();
    assert_eq!(free(), 2);
    give_back(part);
    // SAFETY: the pool of a device.
    unsafe { mem_pool::trim_to(pool, 2 * MB) }.unwrap();
    assert_eq!(free(), 6);
    assert_eq!(super::free(single(3 * MB).unwrap()), CUDA_SUCCESS);
    // By default it gives all back when something is waited for.
    keep(0);
    assert_eq!(free(), 6);
    gpu.context.synchronize().unwrap();
    assert_eq!(free(), 8);
}

#[test]
fn allocations_fail_on_demand() {
    in_child("failing_allocations", &[]);
}

fn failing_allocations() {
    let _gpu = Gpu::open(0);
    let before = emulator::allocated();
    emulator::fail_allocations(2, 2);
    let made = [single(64), pooled(64), single(64), pooled(64)];
    assert_eq!(made.map(|place| place.is_ok()), [true, false, false, true]);
    assert_eq!(
        (made[1], emulator::allocations(), emulator::allocated() - before),
        (Err(CUDA_ERROR_OUT_OF_MEMORY), 4, 128)
    );
    emulator::fail_allocations(0, 0);
    assert!(single(64).is_ok());
}

#[test]
fn captures_load_nothing() {
    let text = in_child("loading_in_a_capture", &[]);
    for what in ["loading a module", "changing an attribute of a function", "a copy from pageable host memory"] {
        let words = format!("{what} during stream capture: CUDA does not document this as allowed");
        assert!(text.contains(&words), "`{words}` is not in\n{text}");
    }
}

fn loading_in_a_capture() {
    let gpu = Gpu::open(0);
    let stream = result::stream::create(result::stream::StreamKind::NonBlocking).unwrap();
    let limit = CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // SAFETY: the function and the stream are alive.
    unsafe {
        let function = result::module::get_function(gpu.module, CString::new("emu_scale").unwrap()).unwrap();
        let attribute = || result::function::set_function_attribute(function, limit, 1024);
        let code = |result: Result<(), result::DriverError>| result.unwrap_err().0;
        let (place, values) = (device(&[0f32; 4]), [1f32; 4]);
        let calls: [&dyn Fn() -> CUresult; 3] =
            [&|| code(attribute()), &|| load(&emulator::ptx_of("faults")).unwrap_err(), &|| {
                code(result::memcpy_htod_async(place, &values, stream))
            }];
        for call in calls {
            result::stream::begin_capture(stream, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
            assert_eq!(call(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
            let ended = result::stream::end_capture(stream).map(drop);
            assert_eq!(ended.unwrap_err().0, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        attribute().unwrap();
    }
}
