//! From what the user named to an open model: a folder, a hub id, or the built-in demo checkpoint.

use std::cell::{Cell, OnceCell};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use serde::Serialize;
use tempfile::TempDir;

use crate::backend::Backend;
use crate::calibrate::corpus::{Corpus, RenderChat};
use crate::checkpoint::Checkpoint;
use crate::cli::args::ModelArgs;
use crate::cli::interrupt;
use crate::cli::print::{Printer, report_as};
use crate::engine::score;
use crate::evaluate::perplexity::{BATCH_TOKENS, Measured, Request, measure};
use crate::evaluate::windows::{Convention, plan};
use crate::format;
use crate::format::manifest::Manifest;
use crate::hub::{self, HubError, HubEvent, HubOptions};
use crate::model::Model;
use crate::model::block::Chunk;
use crate::model::chat::{ChatTemplate, Message};
use crate::model::presence::Unread;
use crate::model::tokenizer::{BosMode, BosRule, Tokenizer};
use crate::num::size::bytes;

/// What the demo checkpoints are called.
const DEMO_NAME: &str = "quantkit-demo";
const DEMO_DRAFT_NAME: &str = "quantkit-demo-draft";

/// The files of the demo checkpoint.
const DEMO: [(&str, &[u8]); 5] = [
    ("config.json", include_bytes!("../../calib/demo/target/config.json")),
    ("generation_config.json", include_bytes!("../../calib/demo/target/generation_config.json")),
    ("model.safetensors", include_bytes!("../../calib/demo/target/model.safetensors")),
    ("tokenizer.json", include_bytes!("../../calib/demo/target/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../../calib/demo/target/tokenizer_config.json")),
];

/// The files of a small model with the same tokenizer.
const DEMO_DRAFT: [(&str, &[u8]); 5] = [
    ("config.json", include_bytes!("../../calib/demo/draft/config.json")),
    ("generation_config.json", include_bytes!("../../calib/demo/draft/generation_config.json")),
    ("model.safetensors", include_bytes!("../../calib/demo/draft/model.safetensors")),
    ("tokenizer.json", include_bytes!("../../calib/demo/target/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../../calib/demo/draft/tokenizer_config.json")),
];

/// Bytes of memory that a tokenizer takes for each byte of text that it is given at once, about.
const BYTES_PER_BYTE: u64 = 120;

/// A model folder that has been found.
pub struct Located {
    pub dir: PathBuf,
    /// What reports and default file names call it.
    pub name: String,
    /// Keeps a folder made for it, such as the unpacked demo checkpoint.
    _unpacked: Option<TempDir>,
}

/// A model in a folder that is gone with the result.
pub fn unpacked(dir: PathBuf, name: &str, folder: TempDir) -> Located {
    Located { dir, name: name.into(), _unpacked: Some(folder) }
}

/// Finds the model: downloads it, or unpacks the demo, where need be.
pub fn locate(args: &ModelArgs, printer: Printer) -> Result<Located> {
    let Some(spec) = &args.model else {
        warn_of_revision(args, "the built-in demo checkpoint", printer);
        printer.note("no model given: using the built-in demo checkpoint (Llama architecture, 3.7 M parameters)");
        return unpack(DEMO_NAME, &DEMO);
    };
    let path = Path::new(spec);
    if !path.exists() && hub::looks_like_id(spec) {
        let mut options = HubOptions::from_env()?;
        options.revision.clone_from(&args.revision);
        let dir = transfer(spec, printer, |events| Ok(hub::fetch(spec, &options, events)?))?;
        let name = spec.rsplit('/').next().unwrap_or(spec).to_string();
        return Ok(Located { dir, name, _unpacked: None });
    }
    warn_of_revision(args, &format!("`{spec}` on this machine"), printer);
    let name = path.canonicalize().ok().and_then(|p| {
        let name = if p.is_file() { p.file_stem() } else { p.file_name() };
        name.map(|n| n.to_string_lossy().into_owned())
    });
    Ok(Located { dir: path.into(), name: name.unwrap_or_else(|| "model".into()), _unpacked: None })
}

/// The built-in draft of the demo checkpoint.
pub fn demo_draft(printer: Printer) -> Result<Located> {
    printer.note("no draft given: using the built-in demo draft (0.7 M parameters)");
    unpack(DEMO_DRAFT_NAME, &DEMO_DRAFT)
}

fn unpack(name: &str, files: &[(&str, &[u8])]) -> Result<Located> {
    let failed = "cannot unpack the demo checkpoint";
    let unpacked = tempfile::Builder::new().prefix("quantkit-").tempdir().context(failed)?;
    // Formats that tell the name of a model take that of its folder.
    let dir = unpacked.path().join(name);
    std::fs::create_dir(&dir).context(failed)?;
    report_as(&dir, Path::new(name));
    for (file, contents) in files {
        std::fs::write(dir.join(file), contents).context(failed)?;
    }
    Ok(Located { dir, name: name.into(), _unpacked: Some(unpacked) })
}

/// Lets `fetch` bring files of the hub model `spec`, and shows how they come.
pub fn transfer(
    spec: &str,
    printer: Printer,
    fetch: impl FnOnce(&mut hub::Events<'_>) -> Result<PathBuf>,
) -> Result<PathBuf> {
    let (mut bar, mut size, mut done, mut fetched) = (None, 0, 0, 0);
    let dir = fetch(&mut |event| match event {
        HubEvent::FileStarted { name, bytes } => {
            (size, done) = (bytes, 0);
            bar = Some(printer.transfer(&name, bytes));
        }
        HubEvent::Bytes(more) => {
            (done, fetched) = (done + more, fetched + more);
            if let Some(bar) = &mut bar {
                bar.set(done, size);
            }
        }
        HubEvent::FileDone { .. } => bar = None,
    })
    .map_err(|error| {
        let listing = error.downcast_ref().and_then(HubError::listing);
        listing.and_then(|files| format::foreign_listing(spec, files)).map_or(error, Into::into)
    })?;
    if fetched > 0 {
        printer.note(format!("fetched {} of {spec}", bytes(fetched)));
    }
    Ok(dir)
}

fn warn_of_revision(args: &ModelArgs, what: &str, printer: Printer) {
    if let Some(revision) = &args.revision {
        printer.warn(format!("{what} has no revisions; --revision {revision} is ignored"));
    }
}

/// A model ready to run, with its text side.
pub struct Runnable {
    pub model: Model,
    /// Loaded when first asked for: what reads no text needs none.
    tokenizer: OnceCell<Tokenizer>,
    /// The form that quantized weights are stored in: `quant_method` of a folder, `gguf` for blocks.
    pub format: Option<&'static str>,
    /// The quantization method, where the artifact records it.
    pub method: Option<String>,
    /// How the artifact's linears round their inputs; empty where all stay floats.
    pub inputs: Vec<String>,
    /// Tensors that the model does not read.
    pub unread: Option<Unread>,
    printer: Printer,
    /// Whether the user was warned of a text that is tokenized in one piece.
    warned: Cell<bool>,
}

/// What `--json` prints of a model, with the tensors that were not read.
#[derive(Serialize)]
pub struct Accounted<'a, T> {
    #[serde(flatten)]
    value: T,
    #[serde(skip_serializing_if = "Option::is_none")]
    unread_tensors: Option<&'a Unread>,
}

impl Runnable {
    /// `value`, an object, with `unread_tensors` where there are some.
    pub fn accounted<T: Serialize>(&self, value: T) -> Accounted<'_, T> {
        Accounted { value, unread_tensors: self.unread.as_ref() }
    }

    pub fn tokenizer(&self) -> Result<&Tokenizer> {
        if let Some(tokenizer) = self.tokenizer.get() {
            return Ok(tokenizer);
        }
        let tokenizer = Tokenizer::load(self.model.checkpoint())?;
        if let Some(warning) = tokenizer.warning() {
            self.printer.warn(warning);
        }
        Ok(self.tokenizer.get_or_init(|| tokenizer))
    }

    /// How the model is quantized, in words; `None` for plain floats.
    pub fn quantized(&self) -> Option<String> {
        let format = self.format?;
        Some(match self.method.as_deref() {
            Some(method) if method == format => method.into(),
            Some(method) => format!("{method}, stored as {format}"),
            None => format!("stored as {format}"),
        })
    }

    /// The first tokens of a text, at least `enough` if it has so many, for measurements.
    pub fn text_tokens(&self, corpus: &Corpus, enough: usize) -> Result<Vec<u32>> {
        let tokenizer = self.tokenizer()?;
        Ok(corpus.first_text_tokens_warning(tokenizer, enough, &|part| self.warn_of_memory(corpus, tokenizer, part))?)
    }

    /// The first tokens of its documents, at least `enough` if it has so many, for calibration.
    pub fn document_tokens(&self, corpus: &Corpus, enough: usize) -> Result<Vec<u32>> {
        let tokenizer = self.tokenizer()?;
        Ok(corpus.first_tokens_warning(tokenizer, enough, &|part| self.warn_of_memory(corpus, tokenizer, part))?)
    }

    /// A long part of a text, of so many bytes, that is tokenized at once takes memory that grows with it.
    fn warn_of_memory(&self, corpus: &Corpus, tokenizer: &Tokenizer, part: usize) {
        if self.warned.replace(true) {
            return;
        }
        let why = match tokenizer.cuts() {
            Err(why) => format!("{why}, so that no place to cut a text is known to be safe"),
            Ok(_) => "it has no place at which a cut is known to be safe".into(),
        };
        let part = part as u64;
        self.printer.warn(format!(
            "a part of `{}` ({}) has to be tokenized in one piece, which may take {} of memory: {why}; give a shorter text",
            corpus.name,
            bytes(part),
            bytes(part * BYTES_PER_BYTE)
        ));
    }
}

/// Opens a folder or a GGUF file as a model, and reports what of it is not as its config says, or not read.
pub fn open(dir: &Path, backend: Arc<dyn Backend>, printer: Printer) -> Result<Runnable> {
    let runnable = open_made(dir, backend, printer)?;
    runnable.model.config.warnings.iter().for_each(|warning| printer.warn(warning));
    if let Some(unread) = &runnable.unread {
        printer.warn(unread.to_string());
    }
    Ok(runnable)
}

/// The same for what was just made of a model that [`open`] reported on.
pub fn open_made(dir: &Path, backend: Arc<dyn Backend>, printer: Printer) -> Result<Runnable> {
    let opened = format::open_path(dir)?;
    for warning in opened.source.checkpoint().notes().iter().chain(&opened.warnings) {
        printer.warn(warning);
    }
    let model =
        Model::open(opened.source, backend).with_context(|| format!("cannot open the model in `{}`", dir.display()))?;
    let unread = model.config.unread(model.checkpoint(), opened.method.is_none());
    let inputs = opened.quantization.map(|stored| stored.inputs).unwrap_or_default();
    let method = Manifest::read(dir).ok().and_then(|manifest| manifest.method().map(Into::into));
    Ok(Runnable {
        model,
        tokenizer: OnceCell::new(),
        format: opened.method,
        method: method.filter(|_| opened.method.is_some()),
        inputs,
        unread,
        printer,
        warned: Cell::new(false),
    })
}

/// A text file, or the built-in one when there is none; chats go through the model's template, which is loaded when the
/// first chat is met.
pub fn corpus(path: Option<&Path>, otherwise: fn() -> Corpus, checkpoint: &Checkpoint) -> Result<Corpus> {
    let Some(path) = path else { return Ok(otherwise()) };
    let mut load = || {
        let template = ChatTemplate::load(checkpoint)?;
        Ok(template.map(|t| Arc::new(move |messages: &[Message]| t.render(messages, false)) as RenderChat))
    };
    Ok(Corpus::read_with(path, &mut load)?)
}

/// How perplexity is to be measured.
pub struct Measurement<'a> {
    pub corpus: &'a Corpus,
    pub convention: Convention,
    pub window: Option<usize>,
    pub max_windows: Option<usize>,
    pub bos: BosMode,
}

impl Measurement<'_> {
    /// Tokens of the text that a measurement with windows of this length looks at, and one more, so that a last window is
    /// told from one with text after it.
    pub fn tokens(&self, window: usize) -> usize {
        self.max_windows.map_or(usize::MAX, |most| most.saturating_mul(window).saturating_add(2))
    }
}

/// Window, BOS and tokens of a measurement; of a text that is longer than its windows, only the first tokens.
pub fn settle(runnable: &Runnable, how: &Measurement) -> Result<(usize, BosRule, Vec<u32>)> {
    let (model, tokenizer) = (&runnable.model, runnable.tokenizer()?);
    let context = model.config.max_positions;
    let window = match how.window {
        Some(window) if how.convention.positions(window) > context => {
            bail!("--window {window} is longer than the {context} positions the model was made for")
        }
        Some(window) => window,
        None => how.convention.default_window().min(context),
    };
    let bos = how.bos.settle(tokenizer, model.config.family.needs_bos, how.convention.bos_habit())?;
    if how.convention == Convention::LmEval && how.corpus.documents > 1 {
        bail!("lmeval scores documents one by one: give one document as plain text");
    }
    Ok((window, bos, runnable.text_tokens(how.corpus, how.tokens(window))?))
}

/// Refuses a measurement that [`perplexity`] would refuse, without running the model.
pub fn check_measurement(runnable: &Runnable, how: &Measurement) -> Result<()> {
    let (window, bos, tokens) = settle(runnable, how)?;
    plan(how.convention, &tokens, window, bos, runnable.tokenizer()?.rolling_prefix())?;
    Ok(())
}

/// What scoring may fail with. Not `anyhow::Error`, which would hide the cause that decides the exit code.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Measures the perplexity of a model.
pub fn perplexity(runnable: &Runnable, how: &Measurement, what: &str, printer: Printer) -> Result<Measured> {
    let mut forward = |chunks: &mut [Chunk]| Ok(runnable.model.forward(chunks, None)?);
    let at_once = runnable.model.backend().devices();
    perplexity_through(runnable, how, what, printer, at_once, &mut forward)
}

/// The same where `forward` takes up to `at_once` chunks through the blocks, with other weights perhaps.
pub fn perplexity_through(
    runnable: &Runnable,
    how: &Measurement,
    what: &str,
    printer: Printer,
    at_once: usize,
    forward: &mut dyn FnMut(&mut [Chunk]) -> Result<(), Failure>,
) -> Result<Measured> {
    let (model, tokenizer) = (&runnable.model, runnable.tokenizer()?);
    let (window, bos, tokens) = settle(runnable, how)?;
    let device = model.backend().device();
    let request = Request {
        text: &how.corpus.facts,
        tokens: &tokens,
        convention: how.convention,
        window,
        max_windows: how.max_windows,
        bos,
        prefix: tokenizer.rolling_prefix(),
        batch_tokens: BATCH_TOKENS * at_once,
        device: &device,
    };
    let mut steps = printer.steps(what, 0);
    let measured = measure(&request, &mut |done, total| steps.set(done as u64, total as u64), &mut |windows| {
        interrupt::check()?;
        score::nll_through(model, windows, at_once, forward)
    })?;
    Ok(measured)
}
