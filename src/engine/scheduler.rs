//! Continuous batching: requests join and leave between steps, prompts are read in chunks, and what does not fit into
//! the cache waits, or goes to host memory for a while.
//!
//! A request's tokens do not depend on what else there is. Tokens are decoded in passes of at most `few_rows` rows, in
//! which every row has the bits it has alone; so are short chunks of prompts, a longer one is a pass of its own, and where
//! a chunk ends depends on the prompt alone; a sequence whose cache was given up is brought back in the same two ways.

use std::collections::VecDeque;

use thiserror::Error;

use super::cache::{Cache, EngineError, SeqId};
use super::generate::{GenerateError, Stop, broken, choose_each};
use super::pass::{PROMPT_TOKENS, Part, Wanted, pass};
use super::sampler::Sampler;
use crate::backend::cache::BLOCK;
use crate::backend::tensor::Tensor;
use crate::model::{Model, ModelError};

/// Bounds of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerOptions {
    /// Most sequences that go on side by side.
    pub max_num_seqs: usize,
    /// Most tokens that a step takes through the model.
    pub max_num_batched_tokens: usize,
}

impl Default for SchedulerOptions {
    fn default() -> Self {
        Self { max_num_seqs: 64, max_num_batched_tokens: 2048 }
    }
}

/// A prompt, and how it is to be continued.
#[derive(Clone, Debug)]
pub struct Request {
    pub prompt: Vec<u32>,
    /// Most tokens that each sample gets.
    pub limit: usize,
    /// Tokens that end a sample.
    pub end: Vec<u32>,
    /// One for each sample.
    pub samplers: Vec<Sampler>,
}

/// What happened to a sample. Requests are counted in the order in which they came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    pub request: usize,
    pub sample: usize,
    pub what: Happened,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Happened {
    Token(u32),
    Stopped(Stop),
}

#[derive(Debug, Error)]
pub enum ScheduleError {
    #[error(
        "max-num-seqs is {seqs} and max-num-batched-tokens {tokens}: a step must have room for one sequence, and for more \
         tokens than sequences"
    )]
    Options { seqs: usize, tokens: usize },
    #[error("request {request}: {error}")]
    Request { request: usize, error: GenerateError },
    #[error("request {request} wants {samples} samples side by side; max-num-seqs allows for 1 to {seqs}")]
    Samples { request: usize, samples: usize, seqs: usize },
    #[error(
        "request {request} does not fit into the key-value cache: {tokens} tokens take {wanted} blocks of {BLOCK}, and \
         there are {blocks}; give it more memory, or take a narrower type of cache"
    )]
    TooLong { request: usize, tokens: usize, wanted: usize, blocks: usize },
    // Not transparent: that would hide the cause that decides the exit code.
    #[error("{0}")]
    Model(#[from] ModelError),
    #[error(transparent)]
    Cache(EngineError),
}

impl From<EngineError> for ScheduleError {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::Model(error) => ScheduleError::Model(error),
            other => ScheduleError::Cache(other),
        }
    }
}

/// What a scheduler has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Totals {
    pub steps: usize,
    pub prompt_tokens: usize,
    pub tokens: usize,
    /// Sequences moved to host memory.
    pub swapped: usize,
    /// Sequences whose cache was given up.
    pub recomputed: usize,
    /// Most sequences that went on side by side.
    pub most_sequences: usize,
    /// Most blocks in use, and tokens that were in them.
    pub most_blocks: usize,
    /// Slots of blocks in use, and those of them without a token, summed over steps.
    slots: usize,
    wasted: usize,
}

impl Totals {
    /// Share of the blocks in use that no token had.
    pub fn waste(&self) -> f64 {
        if self.slots == 0 { 0.0 } else { self.wasted as f64 / self.slots as f64 }
    }
}

/// Where a sequence's keys and values are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Pool(SeqId),
    Swap(SeqId),
    /// To be computed, for the first time or again.
    Nowhere,
}

/// One sequence; the prompt of a request until it is read, then one of its samples.
#[derive(Debug)]
struct Lane {
    request: usize,
    sample: usize,
    /// The prompt and what came after.
    tokens: Vec<u32>,
    prompt: usize,
    /// How many of the tokens the cache has, wherever it is.
    cached: usize,
    limit: usize,
    end: Vec<u32>,
    /// One; of a prompt that has not been read, those of all samples.
    samplers: Vec<Sampler>,
    place: Place,
}

impl Lane {
    /// Tokens that the cache is to take up by reading: a prompt, or, after the cache was given up, all but the last,
    /// which is decoded.
    fn unread(&self) -> usize {
        let decoded = usize::from(self.tokens.len() > self.prompt);
        self.tokens.len() - decoded - self.cached
    }

    fn order(&self) -> (usize, usize) {
        (self.request, self.sample)
    }

    fn seq(&self) -> Option<SeqId> {
        match self.place {
            Place::Pool(seq) => Some(seq),
            Place::Swap(_) | Place::Nowhere => None,
        }
    }
}

/// What is read of a sequence in one pass.
struct Chunk {
    order: (usize, usize),
    seq: SeqId,
    rows: usize,
}

/// Takes requests through a model, step by step.
pub struct Scheduler<'a> {
    model: &'a Model,
    cache: Cache<'a>,
    options: SchedulerOptions,
    /// Tokens of a prompt that are read at once.
    chunk: usize,
    /// In the order of arrival.
    waiting: VecDeque<Lane>,
    /// In the pool, in the order of arrival.
    running: Vec<Lane>,
    /// Had to give way, in the order of arrival.
    preempted: Vec<Lane>,
    next: usize,
    /// What has not been told yet.
    events: Vec<Event>,
    totals: Totals,
}

impl<'a> Scheduler<'a> {
    pub fn new(model: &'a Model, cache: Cache<'a>, options: SchedulerOptions) -> Result<Self, ScheduleError> {
        let SchedulerOptions { max_num_seqs: seqs, max_num_batched_tokens: tokens } = options;
        if seqs == 0 || tokens <= seqs {
            return Err(ScheduleError::Options { seqs, tokens });
        }
        Ok(Self {
            model,
            cache,
            options,
            chunk: PROMPT_TOKENS.min(tokens - seqs),
            waiting: VecDeque::new(),
            running: Vec::new(),
            preempted: Vec::new(),
            next: 0,
            events: Vec::new(),
            totals: Totals::default(),
        })
    }

    /// Takes up a request; its number.
    pub fn submit(&mut self, request: Request) -> Result<usize, ScheduleError> {
        let Request { prompt, limit, end, samplers } = request;
        let (request, samples) = (self.next, samplers.len());
        let wrong = |error| ScheduleError::Request { request, error };
        self.model.check(&prompt).map_err(|error| wrong(error.into()))?;
        let context = self.context();
        if prompt.is_empty() {
            return Err(wrong(GenerateError::EmptyPrompt));
        }
        if prompt.len() >= context {
            return Err(wrong(GenerateError::PromptTooLong { tokens: prompt.len(), limit: context - 1 }));
        }
        if samples == 0 || samples > self.options.max_num_seqs {
            return Err(ScheduleError::Samples { request, samples, seqs: self.options.max_num_seqs });
        }
        let (wanted, blocks) = ((prompt.len() + 1).div_ceil(BLOCK), self.cache.blocks());
        if wanted > blocks {
            return Err(ScheduleError::TooLong { request, tokens: prompt.len() + 1, wanted, blocks });
        }
        self.next += 1;
        let (prompt, tokens) = (prompt.len(), prompt);
        let lane = Lane { request, sample: 0, tokens, prompt, cached: 0, limit, end, samplers, place: Place::Nowhere };
        self.waiting.push_back(lane);
        Ok(request)
    }

    /// Gives up all samples of a request.
    pub fn cancel(&mut self, request: usize) -> Result<(), ScheduleError> {
        self.waiting.retain(|lane| lane.request != request);
        for lanes in [&mut self.running, &mut self.preempted] {
            let (gone, rest) = std::mem::take(lanes).into_iter().partition(|lane| lane.request == request);
            *lanes = rest;
            let gone: Vec<Lane> = gone;
            for lane in gone {
                if let Place::Pool(seq) | Place::Swap(seq) = lane.place {
                    self.cache.remove(seq)?;
                }
            }
        }
        Ok(())
    }

    /// Whether nothing is left to do.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty() && self.preempted.is_empty()
    }

    pub fn totals(&self) -> Totals {
        self.totals
    }

    pub fn cache(&self) -> &Cache<'a> {
        &self.cache
    }

    /// Tokens that a sequence can have.
    fn context(&self) -> usize {
        self.model.config.max_positions.min(self.cache.capacity())
    }

    /// Runs until nothing is left; every event goes to `each`.
    pub fn run(&mut self, each: &mut dyn FnMut(Event)) -> Result<(), ScheduleError> {
        while !self.is_idle() {
            self.step()?.into_iter().for_each(&mut *each);
        }
        Ok(())
    }

    /// One token more for every running sequence, as far as there is room, and some of the prompts. After an error about
    /// a request the others can go on once it is cancelled.
    pub fn step(&mut self) -> Result<Vec<Event>, ScheduleError> {
        self.totals.steps += 1;
        self.bring_back()?;
        self.admit();
        let decoded = self.decode()?;
        self.read(self.options.max_num_batched_tokens.saturating_sub(decoded))?;
        let now = self.cache.statistics();
        self.totals.slots += now.used * BLOCK;
        self.totals.wasted += now.used * BLOCK - now.tokens;
        Ok(std::mem::take(&mut self.events))
    }

    /// Those that had to give way come back, the first first.
    fn bring_back(&mut self) -> Result<(), ScheduleError> {
        while let Some(lane) = self.preempted.first() {
            // A block more for each of the others, lest it goes again at once.
            let wanted = (lane.tokens.len() + 1).div_ceil(BLOCK) + self.growth() + self.running.len();
            let full = self.samples() + lane.samplers.len() > self.options.max_num_seqs;
            if full || (wanted > self.cache.free_blocks() && !self.running.is_empty()) {
                break;
            }
            let mut lane = self.preempted.remove(0);
            match lane.place {
                Place::Swap(seq) => {
                    self.cache.swap_in(seq)?;
                    lane.place = Place::Pool(seq);
                }
                _ => lane.place = Place::Pool(self.cache.add()),
            }
            self.enter(lane);
        }
        Ok(())
    }

    /// Blocks that running sequences are about to want: for the rest of what they have to read, and the next token.
    fn growth(&self) -> usize {
        let of = |lane: &Lane| {
            let more = (lane.tokens.len() + 1).div_ceil(BLOCK) - lane.cached.div_ceil(BLOCK);
            more + lane.samplers.len() - 1
        };
        self.running.iter().map(of).sum()
    }

    /// Sequences that are running, or will be once their prompts are read.
    fn samples(&self) -> usize {
        self.running.iter().map(|lane| lane.samplers.len()).sum()
    }

    fn enter(&mut self, lane: Lane) {
        let at = self.running.partition_point(|other| other.order() < lane.order());
        self.running.insert(at, lane);
        self.totals.most_sequences = self.totals.most_sequences.max(self.running.len());
    }

    /// Requests begin, the first first, where there is room for the whole prompt.
    fn admit(&mut self) {
        while let Some(lane) = self.waiting.front() {
            let samples = lane.samplers.len();
            let wanted = (lane.prompt + 1).div_ceil(BLOCK) + samples - 1 + self.growth();
            let full = self.samples() + samples > self.options.max_num_seqs
                || (wanted > self.cache.free_blocks() && !self.running.is_empty());
            if full || !self.preempted.is_empty() {
                break;
            }
            let Some(mut lane) = self.waiting.pop_front() else { break };
            lane.place = Place::Pool(self.cache.add());
            self.enter(lane);
        }
    }

    /// Makes room for more tokens of some sequences, of which `lane` is the newest; those that came last give way. `false`
    /// if `lane` is among them.
    fn make_room(&mut self, lane: (usize, usize), more: &[(SeqId, usize)]) -> Result<bool, ScheduleError> {
        while !self.cache.room(more) {
            if let [only] = &self.running[..] {
                let tokens = only.cached + more.last().map_or(1, |(_, tokens)| *tokens);
                let (wanted, blocks) = (tokens.div_ceil(BLOCK), self.cache.blocks());
                return Err(ScheduleError::TooLong { request: only.request, tokens, wanted, blocks });
            }
            let Some(newest) = self.running.pop() else { return Ok(false) };
            let gone = newest.order();
            self.preempt(newest)?;
            if gone == lane {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Moves a sequence to host memory, or gives its cache up where that is full.
    fn preempt(&mut self, mut lane: Lane) -> Result<(), ScheduleError> {
        if let Place::Pool(seq) = lane.place {
            // What has not been read yet has nothing to lose.
            let nothing = lane.cached == 0;
            match self.cache.swap_out(seq) {
                Ok(()) if !nothing => {
                    self.totals.swapped += 1;
                    lane.place = Place::Swap(seq);
                }
                Ok(()) | Err(EngineError::Blocks(_)) => {
                    self.cache.remove(seq)?;
                    self.totals.recomputed += usize::from(!nothing);
                    (lane.place, lane.cached) = (Place::Nowhere, 0);
                }
                Err(error) => return Err(error.into()),
            }
        }
        let at = self.preempted.partition_point(|other| other.order() < lane.order());
        self.preempted.insert(at, lane);
        Ok(())
    }

    fn find(&self, order: (usize, usize)) -> Option<usize> {
        self.running.binary_search_by_key(&order, Lane::order).ok()
    }

    /// One more token of all that have only their last one to take up; how many those are.
    fn decode(&mut self) -> Result<usize, ScheduleError> {
        let ready = self.running.iter().filter(|lane| lane.unread() == 0).map(Lane::order).collect::<Vec<_>>();
        let mut decoded = 0;
        for group in ready.chunks(self.model.backend().few_rows()) {
            let (mut lanes, mut more, mut last) = (Vec::new(), Vec::new(), Vec::new());
            for &order in group {
                // Those before it may have taken its place.
                let Some(lane) = self.find(order).map(|at| &self.running[at]) else { break };
                let (Some(seq), Some(&token)) = (lane.seq(), lane.tokens.last()) else { break };
                more.push((seq, 1));
                if !self.make_room(order, &more)? {
                    more.pop();
                    break;
                }
                lanes.push(order);
                last.push([token]);
            }
            if lanes.is_empty() {
                break;
            }
            let parts: Vec<Part> = more
                .iter()
                .zip(&last)
                .map(|((seq, _), tokens)| Part { seq: *seq, tokens, wanted: Wanted::Last })
                .collect();
            let logits = self.pass(&parts)?;
            decoded += lanes.len();
            for &order in &lanes {
                if let Some(at) = self.find(order) {
                    self.running[at].cached += 1;
                }
            }
            self.choose(&lanes, &logits)?;
        }
        Ok(decoded)
    }

    /// Reads prompts, and what has to be read again, by up to `budget` tokens; the first comes first.
    fn read(&mut self, budget: usize) -> Result<(), ScheduleError> {
        let mut left = budget;
        loop {
            let chunks = self.next_chunks(left)?;
            if chunks.is_empty() {
                return Ok(());
            }
            left -= chunks.iter().map(|chunk| chunk.rows).sum::<usize>();
            self.read_together(&chunks)?;
        }
    }

    /// What is read in the next pass: a chunk of the first sequence that has any, and beside it those of others as long as
    /// there are few rows.
    fn next_chunks(&mut self, budget: usize) -> Result<Vec<Chunk>, ScheduleError> {
        let few = self.model.backend().few_rows();
        let unread = self.running.iter().filter(|lane| lane.unread() > 0).map(Lane::order).collect::<Vec<_>>();
        let (mut chunks, mut more, mut total) = (Vec::new(), Vec::new(), 0);
        for order in unread {
            // Those before it may have taken its place.
            let Some(lane) = self.find(order).map(|at| &self.running[at]) else { break };
            // A prompt is read in chunks of its own; what came after it was decoded, and is read as few rows.
            let most =
                if lane.cached < lane.prompt { self.chunk.min(lane.prompt - lane.cached) } else { self.chunk.min(few) };
            let rows = most.min(lane.unread());
            let Some(seq) = lane.seq() else { break };
            if total + rows > budget || (total > 0 && total + rows > few) {
                break;
            }
            more.push((seq, rows));
            if !self.make_room(order, &more)? {
                break;
            }
            total += rows;
            chunks.push(Chunk { order, seq, rows });
        }
        Ok(chunks)
    }

    fn read_together(&mut self, chunks: &[Chunk]) -> Result<(), ScheduleError> {
        let mut tokens = Vec::new();
        for chunk in chunks {
            let Some(at) = self.find(chunk.order) else { continue };
            let lane = &self.running[at];
            let end = lane.cached + chunk.rows;
            let wanted = if end == lane.tokens.len() { Wanted::Last } else { Wanted::None };
            tokens.push((chunk, lane.tokens[lane.cached..end].to_vec(), wanted));
        }
        let parts: Vec<Part> =
            tokens.iter().map(|(chunk, tokens, wanted)| Part { seq: chunk.seq, tokens, wanted: *wanted }).collect();
        let logits = self.pass(&parts)?;
        for (chunk, tokens, _) in &tokens {
            if let Some(at) = self.find(chunk.order) {
                self.running[at].cached += tokens.len();
                self.totals.prompt_tokens += tokens.len();
            }
        }
        let mut failed = None;
        let read = tokens.iter().filter(|(_, _, wanted)| *wanted == Wanted::Last);
        for (row, (chunk, ..)) in read.enumerate() {
            let own = self.model.backend().rows(&logits, &[row]).map_err(ModelError::from)?;
            let Some(at) = self.find(chunk.order) else { continue };
            let lanes = self.split(at)?;
            // The others have been read as well, and are to have their tokens.
            if let Err(error) = self.choose(&lanes, &own) {
                failed.get_or_insert(error);
            }
        }
        failed.map_or(Ok(()), Err)
    }

    fn pass(&mut self, parts: &[Part]) -> Result<Tensor, ScheduleError> {
        let logits = pass(self.model, &mut self.cache, parts)?;
        let used = self.cache.blocks() - self.cache.free_blocks();
        self.totals.most_blocks = self.totals.most_blocks.max(used);
        Ok(logits)
    }

    /// Makes a sequence of each sample of a prompt that has been read.
    fn split(&mut self, at: usize) -> Result<Vec<(usize, usize)>, ScheduleError> {
        let lane = &mut self.running[at];
        let Some(seq) = lane.seq() else { return Ok(Vec::new()) };
        let others = lane.samplers.split_off(1);
        let mut lanes = vec![lane.order()];
        let mut more = Vec::new();
        for (i, sampler) in others.into_iter().enumerate() {
            let place = Place::Pool(self.cache.fork(seq)?);
            let lane = &self.running[at];
            let (tokens, end) = (lane.tokens.clone(), lane.end.clone());
            more.push(Lane { sample: i + 1, tokens, end, samplers: vec![sampler], place, ..*lane });
        }
        lanes.extend(more.iter().map(Lane::order));
        more.into_iter().for_each(|lane| self.enter(lane));
        Ok(lanes)
    }

    /// The next token of some sequences, from a row of logits for each or one for all. Where there is none to choose, the
    /// last token counts as not read, and the first such error comes once the others have theirs.
    fn choose(&mut self, lanes: &[(usize, usize)], logits: &Tensor) -> Result<(), ScheduleError> {
        let wanted = self.running.iter_mut().filter(|lane| lanes.binary_search(&lane.order()).is_ok());
        let samplers = wanted.filter_map(|lane| lane.samplers.first_mut()).collect();
        let chosen = choose_each(self.model, samplers, logits)?;
        let context = self.context();
        let mut failed = None;
        for (&order, chosen) in lanes.iter().zip(chosen) {
            let Some(at) = self.find(order) else { continue };
            let lane = &mut self.running[at];
            let event = |what| Event { request: order.0, sample: order.1, what };
            let stop = if lane.limit == 0 {
                Some(Stop::Limit)
            } else {
                let token = match chosen {
                    Ok(token) => token,
                    Err(error) => {
                        failed.get_or_insert_with(|| match broken(self.model, &lane.tokens, error) {
                            GenerateError::Model(error) => ScheduleError::Model(error),
                            error => ScheduleError::Request { request: order.0, error },
                        });
                        lane.cached = lane.cached.saturating_sub(1);
                        if let Some(seq) = lane.seq() {
                            self.cache.truncate(seq, lane.cached)?;
                        }
                        continue;
                    }
                };
                match lane.end.contains(&token) {
                    true => Some(Stop::End),
                    false => {
                        self.events.push(event(Happened::Token(token)));
                        self.totals.tokens += 1;
                        let full = lane.tokens.len() == context;
                        lane.tokens.push(token);
                        let written = lane.tokens.len() - lane.prompt;
                        if full { Some(Stop::Context) } else { (written == lane.limit).then_some(Stop::Limit) }
                    }
                }
            };
            if let Some(stop) = stop {
                self.events.push(event(Happened::Stopped(stop)));
                if let Some(seq) = self.running.remove(at).seq() {
                    self.cache.remove(seq)?;
                }
            }
        }
        failed.map_or(Ok(()), Err)
    }
}
