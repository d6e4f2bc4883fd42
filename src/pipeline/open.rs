//! Models opened from disk, with their text side.

use std::cell::{Cell, OnceCell};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};

use super::observer::Reporter;
use crate::backend::Backend;
use crate::calibrate::corpus::{Corpus, RenderChat};
use crate::checkpoint::Checkpoint;
use crate::format::manifest::Manifest;
use crate::format::{self, Opened};
use crate::model::Model;
use crate::model::chat::{ChatTemplate, Message};
use crate::model::presence::Unread;
use crate::model::tokenizer::Tokenizer;
use crate::num::size::bytes;

/// Bytes of memory that a tokenizer takes for each byte of text that it is given at once, about.
const BYTES_PER_BYTE: u64 = 120;

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
    reporter: Reporter,
    /// Whether the user was warned of a text that is tokenized in one piece.
    warned: Cell<bool>,
}

impl Runnable {
    /// Its tokenizer, loaded when first asked for.
    ///
    /// # Errors
    ///
    /// When the model has none, or one that cannot be read.
    pub fn tokenizer(&self) -> Result<&Tokenizer> {
        if let Some(tokenizer) = self.tokenizer.get() {
            return Ok(tokenizer);
        }
        let tokenizer = Tokenizer::load(self.model.checkpoint())?;
        if let Some(warning) = tokenizer.warning() {
            self.reporter.warn(warning);
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
        self.reporter.warn(format!(
            "a part of `{}` ({}) has to be tokenized in one piece, which may take {} of memory: {why}; give a shorter text",
            corpus.name,
            bytes(part),
            bytes(part * BYTES_PER_BYTE)
        ));
    }
}

/// Opens a folder or a GGUF file as a model, and reports what of it is not as its config says, or not read.
pub fn open(dir: &Path, backend: Arc<dyn Backend>, reporter: impl Into<Reporter>) -> Result<Runnable> {
    let reporter = reporter.into();
    let runnable = open_made(dir, backend, &reporter)?;
    runnable.model.config.warnings.iter().for_each(|warning| reporter.warn(warning));
    if let Some(unread) = &runnable.unread {
        reporter.warn(unread.to_string());
    }
    Ok(runnable)
}

/// The same for what was just made of a model that [`open`] reported on.
pub fn open_made(dir: &Path, backend: Arc<dyn Backend>, reporter: impl Into<Reporter>) -> Result<Runnable> {
    made_of(format::open_path(dir)?, dir, backend, reporter.into())
}

/// The same for weights that are open; messages call the model `dir`.
pub(super) fn made_of(opened: Opened, dir: &Path, backend: Arc<dyn Backend>, reporter: Reporter) -> Result<Runnable> {
    for warning in opened.source.checkpoint().notes().iter().chain(&opened.warnings) {
        reporter.warn(warning);
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
        reporter,
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
