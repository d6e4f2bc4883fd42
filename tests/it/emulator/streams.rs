//! Streams, events, graphs, pinned memory, and several devices.

use std::ptr;

use CUresult::*;
use cudarc::driver::sys::{CUevent_flags, CUgraph, CUgraphExec, CUstreamCaptureMode};
use cudarc::driver::sys::{CUstreamCaptureMode::*, cuMemAlloc_v2, cuStreamBeginCapture_v2, cuStreamEndCapture};

use super::*;

pub const CASES: &[Case] = &[
    ("with_event", || assert_eq!(two_streams(true), [8.0; 64])),
    ("without_event", || assert_ne!(two_streams(false), [8.0; 64])),
    ("without_event_eager", || assert_eq!(two_streams(false), [8.0; 64])),
    ("pinned", pinned),
    ("queued_use_of_freed", queued_use_of_freed),
    ("two_devices", two_devices),
    ("other_memory", other_memory),
    ("capture_rules", capture_rules),
    ("replay", graphs_replay),
];

fn stream() -> CUstream {
    result::stream::create(result::stream::StreamKind::NonBlocking).unwrap()
}

/// One stream makes ones of what the other one then scales.
fn two_streams(event_wait: bool) -> Vec<f32> {
    let gpu = Gpu::open(0);
    let (first, second) = (stream(), stream());
    let n = 64;
    let (ones, x) = (device(&vec![1f32; n]), device(&vec![3f32; n]));
    let done = result::event::create(CUevent_flags::CU_EVENT_DEFAULT).unwrap();
    let add = [Pointer(ones), Pointer(x), Pointer(x), Int(n as i32)];
    assert_eq!(gpu.launch_on(first, "emu_add", 1, 64, 0, &add), CUDA_SUCCESS);
    // SAFETY: handles made above.
    unsafe {
        result::event::record(done, first).unwrap();
        if event_wait {
            result::stream::wait_event(second, done, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT).unwrap();
        }
    }
    assert_eq!(gpu.launch_on(second, "emu_scale", 1, 64, 0, &[Pointer(x), Float(2.0), Int(n as i32)]), CUDA_SUCCESS);
    // SAFETY: as above; the memory is not freed.
    unsafe { result::stream::synchronize(second) }.unwrap();
    gpu.context.synchronize().unwrap();
    host(x, n)
}

#[test]
fn a_forgotten_event_wait_shows_in_lazy_streams() {
    in_child("with_event", &[("SCHEDULE", "lazy")]);
    in_child("without_event", &[("SCHEDULE", "lazy")]);
    in_child("without_event_eager", &[]);
}

#[test]
fn copies_of_pinned_memory_wait_for_the_stream() {
    in_child("pinned", &[("SCHEDULE", "lazy")]);
}

fn pinned() {
    let _gpu = Gpu::open(0);
    let stream = stream();
    let x = device(&[0f32; 4]);
    // SAFETY: the ranges are four floats each; pinned memory is read through its pointer only.
    unsafe {
        let page = result::malloc_host(16, 0).unwrap().cast::<f32>();
        let pinned = std::slice::from_raw_parts_mut(page, 4);
        pinned.fill(1.0);
        result::memcpy_htod_async(x, pinned, stream).unwrap();
        page.write(5.0); // too early: the copy has not been made
        result::stream::synchronize(stream).unwrap();
        assert_eq!(host::<f32>(x, 4), [5.0, 1.0, 1.0, 1.0]);

        let mut ordinary = [2f32; 4];
        result::memcpy_htod_async(x, &ordinary, stream).unwrap();
        ordinary.fill(9.0); // allowed: the driver has taken them
        result::memcpy_dtoh_async(std::slice::from_raw_parts_mut(page, 4), x, stream).unwrap();
        assert_eq!(page.read(), 5.0, "not there yet");
        result::stream::synchronize(stream).unwrap();
        assert_eq!(std::slice::from_raw_parts(page, 4), [2.0; 4]);

        let done = result::event::create(CUevent_flags::CU_EVENT_DEFAULT).unwrap();
        result::event::record(done, stream).unwrap();
        assert_eq!(result::event::query(done).unwrap_err().0, CUDA_ERROR_NOT_READY);
        result::event::synchronize(done).unwrap();
        result::event::query(done).unwrap();
        assert!(result::event::elapsed(done, done).unwrap() >= 0.0);
        result::free_host(page.cast()).unwrap();
    }
}

#[test]
fn memory_freed_too_early_shows_in_lazy_streams() {
    let text = in_child("queued_use_of_freed", &[("SCHEDULE", "lazy")]);
    assert!(text.contains("copy on the device: 16 bytes from"), "{text}");
    assert!(text.contains("0 bytes into freed memory of 16 bytes"), "{text}");
}

fn queued_use_of_freed() {
    let gpu = Gpu::open(0);
    let (first, second) = (stream(), stream());
    let (a, b) = (device(&[0f32; 4]), device(&[0f32; 4]));
    // SAFETY: the mistake is the point.
    unsafe {
        result::memcpy_dtod_async(b, a, 16, first).unwrap();
        result::free_async(a, second).unwrap();
        result::stream::synchronize(second).unwrap();
        assert_eq!(result::stream::synchronize(first).unwrap_err().0, CUDA_ERROR_ILLEGAL_ADDRESS);
    }
    assert!(gpu.context.synchronize().is_err());
}

// ---- Graphs.

fn begin(stream: CUstream, mode: CUstreamCaptureMode) -> CUresult {
    // SAFETY: the stream is one of this test.
    unsafe { cuStreamBeginCapture_v2(stream, mode) }
}

fn end(stream: CUstream) -> (CUresult, CUgraph) {
    let mut graph = ptr::null_mut();
    // SAFETY: as above; writes the one pointer.
    (unsafe { cuStreamEndCapture(stream, &mut graph) }, graph)
}

fn replay(graph: CUgraph, stream: CUstream, times: usize) {
    let mut executable: CUgraphExec = ptr::null_mut();
    // SAFETY: the graph was captured from kernels whose memory is not freed.
    unsafe {
        sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0).result().unwrap();
        for _ in 0..times {
            sys::cuGraphLaunch(executable, stream).result().unwrap();
        }
        sys::cuGraphExecDestroy(executable).result().unwrap();
        sys::cuGraphDestroy(graph).result().unwrap();
        result::stream::synchronize(stream).unwrap();
    }
}

#[test]
fn graphs_replay() {
    let gpu = Gpu::open(0);
    gpu.bind();
    let stream = stream();
    let (x, one) = (device(&[0f32; 8]), device(&[1f32; 8]));
    assert_eq!(begin(stream, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    let add = [Pointer(one), Pointer(x), Pointer(x), Int(8)];
    assert_eq!(gpu.launch_on(stream, "emu_add", 1, 32, 0, &add), CUDA_SUCCESS);
    assert_eq!(gpu.launch_on(stream, "emu_scale", 1, 32, 0, &[Pointer(x), Float(2.0), Int(8)]), CUDA_SUCCESS);
    // Allowed in this mode.
    let during = device(&[0f32; 8]);
    assert_eq!(free(during), CUDA_SUCCESS);
    let (status, graph) = end(stream);
    assert_eq!(status, CUDA_SUCCESS);
    assert_eq!(host::<f32>(x, 8), [0.0; 8], "nothing ran");
    replay(graph, stream, 10);
    assert_eq!(host::<f32>(x, 8), [2046.0; 8]);
}

#[test]
fn graphs_replay_in_lazy_streams() {
    in_child("replay", &[("SCHEDULE", "lazy")]);
}

#[test]
fn capture_has_its_rules() {
    let text = in_child("capture_rules", &[]);
    for words in [
        "the default stream cannot be captured",
        "not allowed while a stream is captured",
        "was not recorded in its capture",
    ] {
        assert!(text.contains(words), "`{words}` is not in\n{text}");
    }
}

fn capture_rules() {
    let _gpu = Gpu::open(0);
    let stream = stream();
    assert_eq!(begin(NULL_STREAM, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    assert_eq!(end(stream).0, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);

    assert_eq!(begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
    let mut place = 0;
    // SAFETY: refused.
    assert_eq!(unsafe { cuMemAlloc_v2(&mut place, 16) }, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    assert_eq!(end(stream).0, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

    let event = result::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING).unwrap();
    // SAFETY: handles made above.
    unsafe {
        result::event::record(event, NULL_STREAM).unwrap();
        assert_eq!(begin(stream, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
        let wait = result::stream::wait_event(stream, event, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT);
        assert_eq!(wait.unwrap_err().0, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
        assert_eq!(end(stream).0, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

        assert_eq!(begin(stream, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
        assert_eq!(result::stream::synchronize(stream).unwrap_err().0, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        assert_eq!(end(stream).0, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    }
}

// ---- Several devices.

#[test]
fn memory_belongs_to_a_device() {
    let text = in_child("two_devices", &[("DEVICES", "2")]);
    for words in [
        "copy on the device: memory of device 0 used by device 1 without peer access",
        "its module belongs to device 0",
    ] {
        assert!(text.contains(words), "`{words}` is not in\n{text}");
    }
    let text = in_child("other_memory", &[("DEVICES", "2")]);
    assert!(
        text.contains("which is memory of device 0, without peer access: kernel emu_scale block (0,0,0)"),
        "{text}"
    );
}

fn two_devices() {
    let first = Gpu::open(0);
    let x = device(&[3f32; 8]);
    let second = Gpu::open(1);
    let y = device(&[1f32; 8]);
    let stream = stream();
    let scale = |place| [Pointer(place), Float(2.0), Int(8)];
    assert_eq!(second.launch_on(stream, "emu_scale", 1, 32, 0, &scale(y)), CUDA_SUCCESS);
    // SAFETY: ranges of eight floats; the emulator refuses what is wrong.
    unsafe {
        assert_eq!(result::memcpy_dtod_async(y, x, 32, stream).unwrap_err().0, CUDA_ERROR_INVALID_VALUE);
        // Copies between devices need no access.
        result::memcpy_peer_async(second.context.cu_ctx(), y, first.context.cu_ctx(), x, 32, stream).unwrap();
        result::stream::synchronize(stream).unwrap();
        assert_eq!(host::<f32>(y, 8), [3.0; 8]);
        assert_eq!(first.launch_on(stream, "emu_scale", 1, 32, 0, &scale(x)), CUDA_ERROR_INVALID_HANDLE);

        let mut can = 0;
        sys::cuDeviceCanAccessPeer(&mut can, 1, 0).result().unwrap();
        assert_eq!(can, 1);
        sys::cuCtxEnablePeerAccess(first.context.cu_ctx(), 0).result().unwrap();
    }
    assert_eq!(second.launch_on(stream, "emu_scale", 1, 32, 0, &scale(x)), CUDA_SUCCESS);
    assert_eq!(second.launch_on(stream, "emu_scale", 1, 32, 0, &scale(y)), CUDA_SUCCESS);
    second.context.synchronize().unwrap();
    first.bind();
    assert_eq!(first.launch("emu_scale", 1, 32, 0, &scale(x)), CUDA_SUCCESS);
    assert_eq!(host::<f32>(x, 8), [12.0; 8]);
}

fn other_memory() {
    let first = Gpu::open(0);
    let x = device(&[3f32; 8]);
    let second = Gpu::open(1);
    device(&[1f32; 8]);
    let launched = second.launch("emu_scale", 1, 32, 0, &[Pointer(x), Float(2.0), Int(8)]);
    assert_eq!(launched, CUDA_ERROR_ILLEGAL_ADDRESS);
    // The other device is well.
    first.bind();
    assert_eq!(first.launch("emu_scale", 1, 32, 0, &[Pointer(x), Float(2.0), Int(8)]), CUDA_SUCCESS);
    assert_eq!(host::<f32>(x, 8), [6.0; 8]);
}
