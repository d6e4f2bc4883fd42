//! A draft beside the model it is to serve.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};

use crate::backend::Backend;
use crate::cli::print::Printer;
use crate::engine::speculate::{self, Ahead};
use crate::pipeline::open::{Runnable, open};
use crate::pipeline::source::{Located, ModelSource, demo_draft, locate};

/// Finds the draft: the built-in one where none is named.
pub fn find(draft: Option<&str>, revision: Option<&str>, printer: Printer) -> Result<Located> {
    if draft.is_none() {
        return demo_draft(printer);
    }
    locate(ModelSource { model: draft, revision }, printer).context("the draft")
}

/// Opens it, and refuses what cannot serve the target.
pub fn open_for(
    target: &Runnable,
    dir: &Path,
    ahead: Ahead,
    backend: Arc<dyn Backend>,
    printer: Printer,
) -> Result<Runnable> {
    let draft = open(dir, backend, printer).context("the draft")?;
    serves(target, &draft, ahead, printer)?;
    Ok(draft)
}

/// Refuses a draft that cannot serve the target.
pub fn serves(target: &Runnable, draft: &Runnable, ahead: Ahead, printer: Printer) -> Result<()> {
    speculate::check(&target.model, &draft.model, ahead)?;
    same_tokens(target, draft, printer)
}

/// Proposals are token numbers: they must mean the same to both.
fn same_tokens(target: &Runnable, draft: &Runnable, printer: Printer) -> Result<()> {
    let file = |of: &Runnable| of.model.checkpoint().side_text("tokenizer.json");
    let Some(own) = file(draft)? else {
        printer.warn("the draft has no `tokenizer.json`: that its tokens are the target's was not checked");
        return Ok(());
    };
    if file(target)?.as_ref() == Some(&own) {
        return Ok(());
    }
    let (one, other) = (target.tokenizer()?, draft.tokenizer().context("the draft")?);
    for id in 0..target.model.config.vocab {
        let (wanted, found) = (one.token(id as u32), other.token(id as u32));
        if wanted != found {
            let name = |token: Option<String>| token.map_or("nothing".into(), |token| format!("{token:?}"));
            bail!(
                "the draft's tokenizer is not the target's: token {id} is {} for the target and {} for the draft; a draft \
                 must have the target's tokens",
                name(wanted),
                name(found)
            );
        }
    }
    Ok(())
}
