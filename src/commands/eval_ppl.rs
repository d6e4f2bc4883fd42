//! `quantkit eval ppl`

use anyhow::{Result, bail};

use super::accounted;
use super::device::backend;
use crate::backend::cuda::CudaOptions;
use crate::calibrate::corpus::Corpus;
use crate::cli::args::PplArgs;
use crate::cli::exit::CheckFailed;
use crate::cli::interrupt;
use crate::cli::print::Printer;
use crate::evaluate::finite::DAMAGED;
use crate::model::tokenizer::BosMode;
use crate::pipeline::measure::{Measurement, perplexity};
use crate::pipeline::open::{corpus, open};
use crate::pipeline::source::locate;

pub fn run(args: &PplArgs, printer: Printer) -> Result<()> {
    let located = locate(&args.model, printer)?;
    let runnable = open(&located.dir, backend(&args.model.device, CudaOptions::default(), printer)?, printer)?;
    let corpus = corpus(args.text.as_deref(), Corpus::heldout, runnable.model.checkpoint())?;
    if args.bos == BosMode::Auto {
        printer.note(format!("BOS: {}", runnable.tokenizer()?.bos_evidence()));
    }
    for reading in &runnable.inputs {
        printer.note(format!("inputs of linears are rounded: {reading}"));
    }
    let how = Measurement {
        corpus: &corpus,
        convention: args.convention,
        window: args.window,
        max_windows: args.max_windows,
        bos: args.bos,
    };
    interrupt::listen();
    let mut result = perplexity(&runnable, &how, "perplexity", printer)?.result;
    result.inputs.clone_from(&runnable.inputs);
    printer.object(&accounted(&result, runnable.unread.as_ref()))?;
    printer.text(format!(
        "perplexity {:.4} ± {:.4}  ({} tokens in {} windows of {}, convention {}, BOS {}, {:.0} tokens/s on {})",
        result.perplexity,
        result.stderr,
        result.tokens,
        result.windows,
        result.window,
        result.convention,
        result.bos,
        result.tokens_per_second,
        result.device
    ))?;
    if let (Some(word), Some(byte), Some(bits)) = (result.word_perplexity, result.byte_perplexity, result.bits_per_byte)
    {
        printer.text(format!("word perplexity {word:.4}, byte perplexity {byte:.4}, bits per byte {bits:.4}"))?;
    }
    match &result.reason {
        Some(reason) => bail!(CheckFailed(format!("`{}`: {reason}: {DAMAGED}", located.name))),
        None => Ok(()),
    }
}
