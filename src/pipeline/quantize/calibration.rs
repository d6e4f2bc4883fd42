//! Calibration text to windows.

use anyhow::{Result, bail};

use super::super::open::{Runnable, corpus};
use super::super::options::TextCalibration;
use super::super::source::file_name;
use crate::calibrate::corpus::{Corpus, CorpusError, Sampling, windows};
use crate::model::tokenizer::{BosHabit, BosMode, ids_sha256};
use crate::recipe::CalibrationRecord;

/// Calibration windows and their record.
pub type Calibrated = (Vec<Vec<u32>>, CalibrationRecord);

/// Where calibration windows come from.
pub trait CalibrationSource {
    /// The windows for `model`, each of the same number of tokens, and what the artifact records of them.
    ///
    /// # Errors
    ///
    /// When there are no such windows.
    fn windows(&self, model: &Runnable, bos: BosMode) -> Result<Calibrated>;
}

impl CalibrationSource for TextCalibration {
    /// Cuts the text into windows.
    fn windows(&self, original: &Runnable, bos: BosMode) -> Result<Calibrated> {
        let (model, tokenizer) = (&original.model, original.tokenizer()?);
        let corpus = corpus(self.text.as_deref(), Corpus::builtin, model.checkpoint())?;
        let context = model.config.max_positions;
        let seqlen = self.seqlen.unwrap_or(512.min(context));
        if seqlen > context {
            bail!("--seqlen {seqlen} is longer than the {context} positions the model was made for");
        }
        let bos = bos.settle(tokenizer, model.config.family.needs_bos, BosHabit::Once)?;
        let wanted = self.nsamples.unwrap_or(128);
        let enough = match self.sampling {
            Sampling::InOrder => wanted.saturating_mul(seqlen).saturating_add(1),
            // Places are drawn from the whole text.
            Sampling::Random { .. } => usize::MAX,
        };
        let tokens = original.document_tokens(&corpus, enough)?;
        let windows = match (windows(&tokens, wanted, seqlen, self.sampling, bos), self.nsamples) {
            // Nobody asked for 128: take what there is.
            (Err(CorpusError::TooShort { fits, .. }), None) if fits > 0 => {
                windows(&tokens, fits, seqlen, self.sampling, bos)?
            }
            (windows, _) => windows?,
        };
        let record = CalibrationRecord {
            text: self.text.as_deref().map_or(corpus.name.clone(), file_name),
            text_sha256: corpus.sha256,
            nsamples: windows.len(),
            seqlen,
            sampling: match self.sampling {
                Sampling::InOrder => "in-order".into(),
                Sampling::Random { seed } => format!("random, seed {seed}"),
            },
            bos: bos.name().into(),
            tokens_sha256: ids_sha256(&windows.concat()),
        };
        Ok((windows, record))
    }
}
