//! Decoding steps: measured while they are computed, then recorded as CUDA graphs, which run many times with other
//! contents of the same buffers.
//!
//! Nothing is allocated and nothing is loaded while a step is recorded: the step before it of the same shape has loaded
//! its kernels, and its memory was measured and allocated beforehand.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use cudarc::driver::result;
use cudarc::driver::result::DriverError;
use cudarc::driver::sys::{CUgraph, CUgraphExec, CUgraphInstantiate_flags, CUstreamCaptureMode};

use super::super::Done;
use super::device::Device;
use super::memory::{Buffer, Freed, Origin};

/// The work that the device receives now.
pub enum Phase {
    /// Prompts, windows of a text, weights.
    Other,
    /// A decoding step that is computed at once; its memory is measured if it is to be recorded.
    Step(Option<Arc<Space>>),
    Recording(Recorder),
}

// ---- Memory of a step.

/// Parts of a stretch of memory: each takes the lowest gap that is large enough. The same calls in the same order give
/// the same places.
#[derive(Default)]
pub struct Space(Mutex<Parts>);

#[derive(Debug, Default, PartialEq)]
struct Parts {
    /// Start and end of what lies free below `top`; no two touch.
    gaps: BTreeMap<usize, usize>,
    /// One past the highest byte that was ever taken.
    top: usize,
}

impl Parts {
    /// Parts start where the driver would let allocations start.
    const ALIGNMENT: usize = 256;

    fn size(bytes: usize) -> usize {
        bytes.max(1).next_multiple_of(Self::ALIGNMENT)
    }

    fn take(&mut self, bytes: usize) -> usize {
        let bytes = Self::size(bytes);
        let fits = self.gaps.iter().find(|(start, end)| *end - *start >= bytes || **end == self.top);
        let Some((start, end)) = fits.map(|(start, end)| (*start, *end)) else {
            self.top += bytes;
            return self.top - bytes;
        };
        self.gaps.remove(&start);
        if start + bytes < end {
            self.gaps.insert(start + bytes, end);
        }
        self.top = self.top.max(start + bytes);
        start
    }

    fn give(&mut self, start: usize, bytes: usize) {
        let (mut start, mut end) = (start, start + Self::size(bytes));
        if let Some(after) = self.gaps.remove(&end) {
            end = after;
        }
        if let Some((&before, _)) = self.gaps.range(..start).next_back().filter(|(_, stop)| **stop == start) {
            start = before;
        }
        self.gaps.insert(start, end);
    }
}

impl Space {
    fn parts(&self) -> MutexGuard<'_, Parts> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    pub(super) fn take(self: &Arc<Self>, bytes: usize) -> SpacePart {
        SpacePart { space: self.clone(), start: self.parts().take(bytes), bytes }
    }

    /// Bytes that all parts together have needed at most.
    fn needed(&self) -> usize {
        self.parts().top
    }
}

/// A part of a [`Space`]. Dropping it frees the part.
pub struct SpacePart {
    space: Arc<Space>,
    start: usize,
    bytes: usize,
}

impl Drop for SpacePart {
    fn drop(&mut self) {
        self.space.parts().give(self.start, self.bytes);
    }
}

/// A decoding step that runs at once. The step ends when this is dropped.
pub struct Measuring {
    device: Arc<Device>,
    space: Option<Arc<Space>>,
}

impl Measuring {
    /// Begins a step; `measured` if it is to be recorded later.
    pub fn new(device: &Arc<Device>, measured: bool) -> Done<Self> {
        let space = measured.then(Arc::default);
        let mut phase = device.phase();
        if !matches!(*phase, Phase::Other) {
            return Err(device.failed("a decoding step is under way already"));
        }
        *phase = Phase::Step(space.clone());
        Ok(Self { device: device.clone(), space })
    }

    /// Bytes of memory that it takes to record such a step; `None` where it is not to be recorded.
    pub fn bytes(&self) -> Option<usize> {
        self.space.as_ref().map(|space| space.needed())
    }
}

impl Drop for Measuring {
    fn drop(&mut self) {
        *self.device.phase() = Phase::Other;
    }
}

// ---- Recording.

/// A recording in progress: where its memory is, and what it uses.
pub struct Recorder {
    workspace: Buffer,
    space: Arc<Space>,
    /// Buffers from outside that the graph reads or writes.
    kept: Vec<Buffer>,
    later: Vec<Later>,
}

impl Recorder {
    /// A part of the workspace. It calls nothing of the driver, so that it may be called with the phase locked.
    pub(super) fn alloc(&mut self, device: &Arc<Device>, bytes: usize) -> Done<Buffer> {
        let part = self.space.take(bytes);
        if part.start + bytes > self.workspace.bytes() {
            let room = self.workspace.bytes();
            return Err(device.failed(format!("a recorded step needs more than the {room} bytes that were measured")));
        }
        let pointer = self.workspace.pointer() + part.start as u64;
        Ok(Buffer::new(
            device.clone(),
            pointer,
            bytes,
            Origin::Graph { _part: part, workspace: self.workspace.clone() },
        ))
    }

    /// The graph uses `buffer`, which therefore must live as long. The workspace does so anyway.
    pub(super) fn keep(&mut self, buffer: &Buffer) {
        let own = buffer.workspace().is_some_and(|other| other.pointer() == self.workspace.pointer());
        if !own && !self.kept.iter().any(|kept| kept.pointer() == buffer.pointer()) {
            self.kept.push(buffer.clone());
        }
    }
}

/// Memory and graphs dropped during a recording. Their release must not become part of the graph.
pub(super) enum Later {
    Memory(Freed),
    Graph(CUgraphExec),
}

// SAFETY: graph handles may be used from any thread, one at a time.
unsafe impl Send for Later {}

impl Later {
    /// Gives it back now, or once the recording is over.
    pub(super) fn drop_on(self, device: &Device) {
        let mut phase = device.phase();
        match &mut *phase {
            Phase::Recording(recorder) => recorder.later.push(self),
            _ => self.give_back(device),
        }
    }

    fn give_back(self, device: &Device) {
        match self {
            Later::Memory(memory) => memory.free(device),
            Later::Graph(executable) => {
                if device.bind().is_ok() {
                    // SAFETY: made by `Capture::finish`, destroyed once. The driver lets a graph that runs come to its end.
                    let _ = unsafe { result::graph::exec_destroy(executable) };
                }
            }
        }
    }
}

/// Memory that recorded steps share: they run one at a time.
pub struct GraphSpace(Buffer);

impl GraphSpace {
    pub fn new(device: &Arc<Device>, bytes: usize) -> Done<Self> {
        device.alloc(bytes).map(Self)
    }

    pub fn bytes(&self) -> usize {
        self.0.bytes()
    }
}

/// What was recorded, before it can run.
struct Recorded(CUgraph);

impl Drop for Recorded {
    fn drop(&mut self) {
        // SAFETY: made by `Capture::end` and has no other user.
        let _ = unsafe { result::graph::destroy(self.0) };
    }
}

/// A recording in progress. Dropping it before `finish` discards the recording.
pub struct Capture {
    device: Arc<Device>,
    open: bool,
}

impl Capture {
    /// Starts recording all later work of the device; memory comes from `space`.
    pub fn begin(device: &Arc<Device>, space: &GraphSpace) -> Done<Self> {
        device.bind()?;
        let mut phase = device.phase();
        if !matches!(*phase, Phase::Other) {
            return Err(device.failed("a decoding step is under way already"));
        }
        // SAFETY: the stream is this device's own.
        // Relaxed: another thread may bring in weights on another stream meanwhile.
        unsafe {
            result::stream::begin_capture(
                device.stream.cu_stream(),
                CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
            )
        }
        .map_err(|e| device.error(e))?;
        *phase = Phase::Recording(Recorder {
            workspace: space.0.clone(),
            space: Arc::default(),
            kept: Vec::new(),
            later: Vec::new(),
        });
        drop(phase);
        Ok(Self { device: device.clone(), open: true })
    }

    /// Ends the recording and gives the graph.
    pub fn finish(mut self) -> Done<Graph> {
        let device = self.device.clone();
        let (graph, recorder) = self.end();
        let (graph, Some(recorder)) = (graph.map_err(|e| device.error(e))?, recorder) else {
            return Err(device.failed("no recording is in progress"));
        };
        let needed = || "the driver needs more for the recorded steps".to_string();
        // SAFETY: the graph is whole; flag 0 is the default. The graph that can run does not need the recorded one.
        let instantiate = || unsafe { result::graph::instantiate(graph.0, CUgraphInstantiate_flags(0)) };
        let executable = device.with_memory(needed, instantiate)?;
        let Recorder { workspace: _workspace, kept: _kept, .. } = recorder;
        Ok(Graph { device, executable, _kept, _workspace })
    }

    fn end(&mut self) -> (Result<Recorded, DriverError>, Option<Recorder>) {
        self.open = false;
        let device = &self.device;
        // Without this the call might go to another device; if it fails, so does the call.
        let _ = device.bind();
        let mut phase = device.phase();
        // SAFETY: the stream is being captured.
        let graph = unsafe { result::stream::end_capture(device.stream.cu_stream()) }.map(Recorded);
        let ended = std::mem::replace(&mut *phase, Phase::Other);
        // The calls below lock the phase.
        drop(phase);
        let Phase::Recording(mut recorder) = ended else { return (graph, None) };
        std::mem::take(&mut recorder.later).into_iter().for_each(|later| later.give_back(device));
        (graph, Some(recorder))
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        if self.open {
            let _ = self.end();
        }
    }
}

/// A recorded graph, ready to run.
pub struct Graph {
    device: Arc<Device>,
    executable: CUgraphExec,
    _kept: Vec<Buffer>,
    _workspace: Buffer,
}

// SAFETY: graph handles may be used from any thread, one at a time; `run` takes `&mut self`.
unsafe impl Send for Graph {}

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
        // Its memory is freed after it, in stream order.
        Later::Graph(self.executable).drop_on(&self.device);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_take_the_lowest_gap() {
        let mut parts = Parts::default();
        assert_eq!([1, 256, 257, 0].map(|bytes| parts.take(bytes)), [0, 256, 512, 1024]);
        assert_eq!(parts.top, 1280);
        parts.give(256, 256);
        parts.give(512, 257);
        assert_eq!(parts.gaps, [(256, 1024)].into());
        assert_eq!(parts.take(300), 256);
        // Too large for the gap that is left, and the last part is taken.
        assert_eq!((parts.take(300), parts.top), (1280, 1792));
        // The gap at the end grows.
        parts.give(1280, 300);
        assert_eq!((parts.take(1000), parts.top), (1280, 2304));
        // Neighbours on both sides come together.
        parts.give(0, 1);
        parts.give(1024, 0);
        parts.give(256, 300);
        assert_eq!(parts.gaps, [(0, 1280)].into());
        parts.give(1280, 1000);
        assert_eq!(parts.gaps, [(0, 2304)].into());
    }

    #[test]
    fn parts_never_overlap() {
        let space = Arc::new(Space::default());
        let (mut held, mut state) = (Vec::<SpacePart>::new(), 1u64);
        for _ in 0..2000 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let draw = (state >> 33) as usize;
            if draw % 5 < 2 && !held.is_empty() {
                held.swap_remove(draw / 5 % held.len());
                continue;
            }
            let part = space.take(draw % 3000);
            let end = |part: &SpacePart| part.start + Parts::size(part.bytes);
            assert!(held.iter().all(|other| end(other) <= part.start || end(&part) <= other.start));
            assert!(end(&part) <= space.needed());
            held.push(part);
        }
        drop(held);
        let top = space.needed();
        assert_eq!(*space.parts(), Parts { gaps: [(0, top)].into(), top });
    }
}
