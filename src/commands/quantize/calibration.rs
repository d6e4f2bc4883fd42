//! Calibration text to windows.

use anyhow::{Result, bail};

use super::super::open::{Runnable, corpus};
use super::run::file_name;
use crate::calibrate::corpus::{Corpus, CorpusError, Sampling, windows};
use crate::cli::args::{CalibrationArgs, SamplingArg};
use crate::model::tokenizer::{BosHabit, BosMode, ids_sha256};
use crate::recipe::CalibrationRecord;

/// Calibration windows and their record.
pub type Calibrated = (Vec<Vec<u32>>, CalibrationRecord);

/// Cuts the text into windows.
pub fn calibrated(args: &CalibrationArgs, bos: BosMode, original: &Runnable) -> Result<Calibrated> {
    let (model, tokenizer) = (&original.model, original.tokenizer()?);
    let corpus = corpus(args.calib.as_deref(), Corpus::builtin, model.checkpoint())?;
    let context = model.config.max_positions;
    let seqlen = args.seqlen.unwrap_or(512.min(context));
    if seqlen > context {
        bail!("--seqlen {seqlen} is longer than the {context} positions the model was made for");
    }
    let bos = bos.settle(tokenizer, model.config.family.needs_bos, BosHabit::Once)?;
    let (sampling, described) = match args.sampling {
        None | Some(SamplingArg::InOrder) => (Sampling::InOrder, "in-order".to_string()),
        Some(SamplingArg::Random) => {
            let seed = args.seed.unwrap_or(0);
            (Sampling::Random { seed }, format!("random, seed {seed}"))
        }
    };
    let enough = match sampling {
        Sampling::InOrder => args.nsamples.unwrap_or(128).saturating_mul(seqlen).saturating_add(1),
        // Places are drawn from the whole text.
        Sampling::Random { .. } => usize::MAX,
    };
    let tokens = original.document_tokens(&corpus, enough)?;
    let windows = match (windows(&tokens, args.nsamples.unwrap_or(128), seqlen, sampling, bos), args.nsamples) {
        // Nobody asked for 128: take what there is.
        (Err(CorpusError::TooShort { fits, .. }), None) if fits > 0 => windows(&tokens, fits, seqlen, sampling, bos)?,
        (windows, _) => windows?,
    };
    let record = CalibrationRecord {
        text: args.calib.as_deref().map_or(corpus.name.clone(), file_name),
        text_sha256: corpus.sha256,
        nsamples: windows.len(),
        seqlen,
        sampling: described,
        bos: bos.name().into(),
        tokens_sha256: ids_sha256(&windows.concat()),
    };
    Ok((windows, record))
}
