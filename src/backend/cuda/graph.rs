//! A pass over the model as one CUDA graph: recorded once, run many times with other contents of the same
//! buffers.

use std::sync::{Arc, Mutex};

use cudarc::driver::result;
use cudarc::driver::sys::{CUdeviceptr, CUgraph, CUgraphExec, CUgraphInstantiate_flags, CUstreamCaptureMode};

use super::super::Done;
use super::device::Device;
use super::memory::{Buffer, Origin};

/// Memory of a graph: taken while it is recorded, reused inside it, freed with it.
pub struct GraphMemory {
    device: Arc<Device>,
    /// All of it.
    taken: Mutex<Vec<CUdeviceptr>>,
    /// Parts that an earlier step of the recording needs no longer.
    free: Mutex<Vec<(CUdeviceptr, usize)>>,
}

impl GraphMemory {
    /// A part is free for later steps of the recording.
    pub fn give_back(&self, pointer: CUdeviceptr, bytes: usize) {
        self.free.lock().unwrap_or_else(|e| e.into_inner()).push((pointer, bytes));
    }
}

impl Drop for GraphMemory {
    fn drop(&mut self) {
        let _ = self.device.synchronize();
        for &pointer in self.taken.get_mut().unwrap_or_else(|e| e.into_inner()).iter() {
            // SAFETY: allocated by `Recorder::alloc`, freed once; no graph or buffer that names it is left.
            let _ = unsafe { result::free_sync(pointer) };
        }
    }
}

/// A recording in progress.
pub struct Recorder {
    memory: Arc<GraphMemory>,
    /// Buffers from outside that the graph reads or writes.
    kept: Vec<Buffer>,
    later: Vec<CUdeviceptr>,
}

impl Recorder {
    /// Memory of the graph: a part that is free again, or fresh.
    pub fn alloc(&mut self, device: &Arc<Device>, bytes: usize) -> Done<Buffer> {
        let mut free = self.memory.free.lock().unwrap_or_else(|e| e.into_inner());
        let pointer = match free.iter().position(|(_, size)| *size == bytes) {
            Some(at) => free.swap_remove(at).0,
            None => {
                // SAFETY: the context is current. Not stream-ordered, which would make it part of the graph.
                let pointer = device.allocated(bytes, || unsafe { result::malloc_sync(bytes.max(4)) })?;
                self.memory.taken.lock().unwrap_or_else(|e| e.into_inner()).push(pointer);
                pointer
            }
        };
        drop(free);
        Ok(Buffer::new(device.clone(), pointer, bytes, Origin::Graph(self.memory.clone())))
    }

    /// The graph uses `buffer`, which therefore must live as long. Its own memory does so anyway.
    pub fn keep(&mut self, buffer: &Buffer) {
        if !buffer.is_of_graph() && !self.kept.iter().any(|kept| kept.pointer() == buffer.pointer()) {
            self.kept.push(buffer.clone());
        }
    }

    /// Memory from outside was dropped meanwhile.
    pub fn free_later(&mut self, pointer: CUdeviceptr) {
        self.later.push(pointer);
    }
}

/// A recorded graph, ready to run.
pub struct Graph {
    device: Arc<Device>,
    graph: CUgraph,
    executable: CUgraphExec,
    _kept: Vec<Buffer>,
    _memory: Arc<GraphMemory>,
}

// SAFETY: graph handles may be used from any thread, one at a time; `run` takes `&mut self`.
unsafe impl Send for Graph {}

/// Starts recording what the device is given from now on.
pub fn begin(device: &Arc<Device>) -> Done<()> {
    device.bind()?;
    // SAFETY: the stream is this device's own.
    // Relaxed: memory is allocated while recording.
    unsafe {
        result::stream::begin_capture(device.stream.cu_stream(), CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)
    }
    .map_err(|e| device.error(e))?;
    let memory = Arc::new(GraphMemory { device: device.clone(), taken: Mutex::default(), free: Mutex::default() });
    *device.recorder() = Some(Recorder { memory, kept: Vec::new(), later: Vec::new() });
    Ok(())
}

/// Ends the recording.
pub fn end(device: &Arc<Device>) -> Done<Graph> {
    let Some(mut recorder) = device.recorder().take() else {
        return Err(device.failed("no recording is in progress"));
    };
    device.bind()?;
    // SAFETY: the stream is being captured.
    let graph = unsafe { result::stream::end_capture(device.stream.cu_stream()) };
    for pointer in std::mem::take(&mut recorder.later) {
        // SAFETY: handed over by the last owner of that memory.
        let _ = unsafe { result::free_async(pointer, device.stream.cu_stream()) };
    }
    let graph = graph.map_err(|e| device.error(e))?;
    // SAFETY: the graph was just made; flag 0 is the default.
    let executable = unsafe { result::graph::instantiate(graph, CUgraphInstantiate_flags(0)) };
    match executable {
        Ok(executable) => {
            let Recorder { memory: _memory, kept: _kept, .. } = recorder;
            Ok(Graph { device: device.clone(), graph, executable, _kept, _memory })
        }
        Err(error) => {
            // SAFETY: the graph was just made and goes nowhere else.
            let _ = unsafe { result::graph::destroy(graph) };
            Err(device.error(error))
        }
    }
}

impl Graph {
    /// Enqueues everything that was recorded.
    pub fn run(&mut self) -> Done<()> {
        self.device.bind()?;
        // SAFETY: the graph is whole, and the buffers it names are kept.
        unsafe { result::graph::launch(self.executable, self.device.stream.cu_stream()) }
            .map_err(|e| self.device.error(e))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.device.synchronize();
        // SAFETY: made by `end`, destroyed once, and idle.
        unsafe {
            let _ = result::graph::exec_destroy(self.executable);
            let _ = result::graph::destroy(self.graph);
        }
    }
}
