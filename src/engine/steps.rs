//! Steps of decoding: computed, then recorded where the backend can, then replayed.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::backend::cache::{Pool, Tables};
use crate::backend::tensor::Tensor;
use crate::backend::{Backend, Batch, Recording, Span, Workspace};
use crate::model::{Model, ModelError};

/// Steps over one more token of each of some sequences, by their rows.
#[derive(Default)]
pub struct Steps {
    by_rows: BTreeMap<usize, Step>,
    /// Memory of all recorded steps, which run one at a time.
    workspace: Option<Workspace>,
    /// Why a step that could have been recorded is not.
    pub unrecorded: Option<String>,
}

/// Steps of one number of rows.
struct Step {
    batch: Arc<Batch>,
    replay: Replay,
}

/// What a step is computed by the next time.
enum Replay {
    /// Its kernels: it is not recorded.
    Never,
    /// Not recorded yet; recording takes this many bytes.
    Next(usize),
    Recorded {
        bytes: usize,
        recording: Recording,
        logits: Tensor,
    },
}

impl Steps {
    /// The logits `[rows, vocab]` of a step, one row a sequence. The first time a step of that size is computed, the
    /// second time recorded where the backend can, and from then on replayed.
    ///
    /// # Errors
    /// When the device fails.
    pub fn run(
        &mut self,
        model: &Model,
        pool: &mut Pool,
        ids: Vec<u32>,
        spans: Vec<Span>,
        tables: Tables,
    ) -> Result<Tensor, ModelError> {
        let (backend, size) = (model.backend(), ids.len());
        if let Some(step) = self.by_rows.get_mut(&size) {
            step.batch = Arc::new(backend.rebatch(&step.batch, ids, spans, tables)?);
            return self.again(model, size, pool);
        }
        let batch = Arc::new(backend.paged_batch(ids, spans, tables)?);
        let (logits, bytes) = computed(model, batch.clone(), pool)?;
        let replay = bytes.map_or(Replay::Never, Replay::Next);
        self.by_rows.insert(size, Step { batch, replay });
        Ok(logits)
    }

    /// Sizes of steps that are replayed.
    pub fn recorded(&self) -> usize {
        self.by_rows.values().filter(|step| matches!(step.replay, Replay::Recorded { .. })).count()
    }

    /// A step of a size that has been computed before, over the batch that it has now. Any error, usually too little memory,
    /// only makes the step slower: from then on it is computed without a recording.
    fn again(&mut self, model: &Model, size: usize, pool: &mut Pool) -> Result<Tensor, ModelError> {
        match self.replayed(model, size, pool) {
            Ok(Some(logits)) => return Ok(logits),
            Ok(None) => {}
            Err(why) => {
                self.unrecorded.get_or_insert(why.to_string());
                if let Some(step) = self.by_rows.get_mut(&size) {
                    step.replay = Replay::Never;
                }
                if self.recorded() == 0 {
                    self.workspace = None;
                }
            }
        }
        Ok(computed(model, self.by_rows[&size].batch.clone(), pool)?.0)
    }

    /// The logits by replaying, which may have to be recorded before; `None` where that is not to be.
    fn replayed(&mut self, model: &Model, size: usize, pool: &mut Pool) -> Result<Option<Tensor>, ModelError> {
        let step = &self.by_rows[&size];
        if let Replay::Next(bytes) = step.replay {
            let batch = step.batch.clone();
            let workspace = self.workspace(model.backend(), bytes)?;
            let guard = model.backend().begin_recording(workspace)?;
            let logits = logits(model, batch, pool)?;
            let recording = guard.finish()?;
            if let Some(step) = self.by_rows.get_mut(&size) {
                step.replay = Replay::Recorded { bytes, recording, logits };
            }
        }
        match self.by_rows.get_mut(&size).map(|step| &mut step.replay) {
            Some(Replay::Recorded { recording, logits, .. }) => {
                recording.run()?;
                Ok(Some(logits.clone()))
            }
            _ => Ok(None),
        }
    }

    /// Memory of at least so many bytes. Growing it discards all recordings; they are made again.
    fn workspace(&mut self, backend: &dyn Backend, bytes: usize) -> Result<&Workspace, ModelError> {
        let workspace = match self.workspace.take().filter(|workspace| workspace.bytes() >= bytes) {
            Some(workspace) => workspace,
            None => {
                for step in self.by_rows.values_mut() {
                    if let Replay::Recorded { bytes, .. } = step.replay {
                        step.replay = Replay::Next(bytes);
                    }
                }
                backend.workspace(bytes)?
            }
        };
        Ok(self.workspace.insert(workspace))
    }
}

/// The logits of a step that is computed at once, with the memory that it takes to record it, where that can be done.
fn computed(model: &Model, batch: Arc<Batch>, pool: &mut Pool) -> Result<(Tensor, Option<usize>), ModelError> {
    let step = model.backend().begin_step()?;
    let logits = logits(model, batch, pool)?;
    Ok((logits, step.bytes()))
}

/// The logits after every row of a batch.
fn logits(model: &Model, batch: Arc<Batch>, pool: &mut Pool) -> Result<Tensor, ModelError> {
    let mut chunks = [model.embed_batch(batch)?];
    model.forward(&mut chunks, Some(pool))?;
    model.logits(&chunks[0].hidden)
}
