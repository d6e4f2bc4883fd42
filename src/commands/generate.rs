//! `quantkit generate`

use std::io::{self, Read, Write};
use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::json;

use super::accounted;
use super::device::{one, warn_of_unrecorded_steps};
use super::{draft, generate_many, kv_cache};
use crate::backend::cuda::{CudaOptions, Precision};
use crate::cli::args::GenerateArgs;
use crate::cli::interrupt;
use crate::cli::print::Printer;
use crate::engine::cache::{CacheOptions, Room};
use crate::engine::generate::{Session, Stop, capacity, generate_in};
use crate::engine::sampler::{Sampler, SamplerOptions};
use crate::engine::speculate::{self, Ahead, Rounds, Speculation};
use crate::model::chat::{ChatTemplate, Message};
use crate::model::tokenizer::{BosHabit, BosMode, BosRule, Tokenizer};
use crate::pipeline::open::{Runnable, open};
use crate::pipeline::source::locate;

pub fn run(args: &GenerateArgs, printer: Printer) -> Result<()> {
    let sampling = SamplerOptions {
        temperature: args.temperature,
        top_p: args.top_p.unwrap_or(1.0),
        top_k: args.top_k.unwrap_or(0),
        seed: args.seed.unwrap_or(0),
    };
    let mut sampler = Sampler::new(sampling)?;
    let unused =
        [("--top-p", args.top_p.is_some()), ("--top-k", args.top_k.is_some()), ("--seed", args.seed.is_some())];
    let ignored: Vec<&str> = unused.into_iter().filter(|(_, given)| *given).map(|(name, _)| name).collect();
    if args.temperature == 0.0 && !ignored.is_empty() {
        printer.note(format!(
            "at temperature 0 the likeliest token is taken every time; {} has no effect",
            ignored.join(", ")
        ));
    }
    if args.many.prompts.is_some() || args.many.num_samples > 1 {
        return generate_many::run(args, sampling, printer);
    }
    let prompt = prompt(args.prompt.as_deref().unwrap_or_default())?;
    let located = locate(&args.model, printer)?;
    // Prompts go in as serving engines take them.
    let options = CudaOptions { precision: Precision::Single, graphs: !args.no_cuda_graph, ..CudaOptions::default() };
    let device = one(&args.model.device, options, printer)?;
    let runnable = open(&located.dir, device.clone(), printer)?;
    let ahead = args.draft.num_speculative_tokens.unwrap_or(Ahead::Auto);
    let draft = match &args.draft.draft {
        Some(named) => {
            let found = draft::find(Some(named), args.draft.draft_revision.as_deref(), printer)?;
            Some((draft::open_for(&runnable, &found.dir, ahead, device, printer)?, found))
        }
        None => None,
    };
    let (model, tokenizer) = (&runnable.model, runnable.tokenizer()?);
    let tokens = tokens_of(&rendered(prompt, args, &runnable)?, &runnable)?;
    let end = end_of(args, tokenizer);
    let capacity = capacity(model, &tokens, args.max_tokens)?;
    let cache = kv_cache::options(&args.many.cache, &runnable, 1, capacity, printer)?;
    // One sequence takes what it needs.
    let room = if args.many.cache.kv_cache_memory_bytes.is_some() { cache.room } else { Room::Blocks(usize::MAX) };
    let mut stream = tokenizer.decode_stream(true);
    let (mut written, mut text) = (0usize, String::new());
    let mut failed: Option<anyhow::Error> = None;
    let cache = CacheOptions { room, swap_bytes: 0, ..cache };
    let kind = cache.kind.unwrap_or(model.backend().cache_type());
    let draft_scales = match &draft {
        Some((draft, _)) => kv_cache::draft_scales(&args.many.cache.kind, kind, draft, printer)?,
        None => None,
    };
    let began = Instant::now();
    let each = &mut |token| {
        if written == 0 {
            // The prompt is taken up in steps too long to wait for.
            interrupt::listen();
        }
        written += 1;
        let shown = interrupt::check().map_err(anyhow::Error::from).and_then(|()| {
            let piece = stream.push(token)?;
            show(args.json, &piece)?;
            text.push_str(&piece);
            Ok(())
        });
        shown.map_err(|e| failed = Some(e)).is_ok()
    };
    let (stop, rounds) = match &draft {
        Some((draft, _)) => {
            let with = Speculation { draft: &draft.model, ahead, cache: Some(cache), draft_scales };
            let (stop, rounds) = speculate::generate(model, &with, &tokens, end, args.max_tokens, &mut sampler, each)?;
            warn_of_unrecorded_steps(rounds.unrecorded.iter().map(String::as_str), printer);
            (stop, Some(rounds))
        }
        None => {
            let mut session = Session::with(model, cache)?;
            let stop = generate_in(&mut session, &tokens, end, args.max_tokens, &mut sampler, each)?;
            warn_of_unrecorded_steps(session.cache().unrecorded(), printer);
            (stop, None)
        }
    };
    if let Some(error) = failed {
        return Err(error);
    }
    let rest = stream.finish()?;
    show(args.json, &rest)?;
    text.push_str(&rest);
    printer.text("")?;
    let seconds = began.elapsed().as_secs_f64();
    let reason = reason(stop);
    printer.note(format!(
        "{written} tokens after {} of prompt, {:.1} tokens/s, {reason}",
        tokens.len(),
        written as f64 / seconds
    ));
    let speculation = rounds.as_ref().map(|rounds| speculation(rounds, written, printer));
    printer.object(&accounted(
        json!({
            "text": text,
            "prompt_tokens": tokens.len(),
            "tokens": written,
            "tokens_per_second": written as f64 / seconds,
            "stop": reason,
            "seed": args.seed.unwrap_or(0),
            "speculation": speculation,
        }),
        runnable.unread.as_ref(),
    ))?;
    Ok(())
}

/// What became of the proposals, told and as JSON.
fn speculation(rounds: &Rounds, written: usize, printer: Printer) -> serde_json::Value {
    let (drafted, accepted) = (rounds.drafted(), rounds.accepted());
    let rate = rounds.acceptance_rate();
    let length = 1.0 + accepted as f64 / rounds.rounds.len().max(1) as f64;
    printer.note(match rate {
        Some(rate) => format!(
            "{accepted} of {drafted} proposed tokens stood ({:.1} %); {} passes of the model for {written} tokens",
            100.0 * rate,
            rounds.passes
        ),
        None => "the draft proposed nothing".into(),
    });
    json!({
        "drafts": rounds.rounds.len(),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": rate,
        "mean_length": length,
        "passes": rounds.passes,
        "draft_seconds": rounds.draft_seconds,
        "target_seconds": rounds.target_seconds,
    })
}

/// What was given as prompt, or what stdin says.
pub fn prompt(given: &str) -> Result<String> {
    if given != "-" {
        return Ok(given.into());
    }
    let mut prompt = String::new();
    io::stdin().read_to_string(&mut prompt).context("cannot read the prompt from stdin")?;
    Ok(prompt)
}

/// A prompt as the model is to see it: with --chat, through its template.
pub fn rendered(prompt: String, args: &GenerateArgs, runnable: &Runnable) -> Result<String> {
    if !args.chat {
        return Ok(prompt);
    }
    let template = ChatTemplate::load(runnable.model.checkpoint())?;
    let system = args.system.iter().map(|s| Message { role: "system".into(), content: s.clone() });
    let messages: Vec<Message> = system.chain([Message { role: "user".into(), content: prompt }]).collect();
    Ok(template.context("--chat: the model has no chat template")?.render(&messages, true)?)
}

/// The tokens of a prompt, with the BOS that the model wants.
pub fn tokens_of(prompt: &str, runnable: &Runnable) -> Result<Vec<u32>> {
    let tokenizer = runnable.tokenizer()?;
    let mut tokens = tokenizer.encode(prompt)?;
    let rule = BosMode::Auto.settle(tokenizer, runnable.model.config.family.needs_bos, BosHabit::Once)?;
    if let BosRule::Once(bos) | BosRule::Window(bos) = rule
        && tokens.first() != Some(&bos)
    {
        tokens.insert(0, bos);
    }
    Ok(tokens)
}

/// The tokens that end a text.
pub fn end_of<'a>(args: &GenerateArgs, tokenizer: &'a Tokenizer) -> &'a [u32] {
    if args.ignore_eos { &[] } else { tokenizer.eos() }
}

/// Why a text ended, in words.
pub fn reason(stop: Stop) -> &'static str {
    match stop {
        Stop::End => "end of sequence",
        Stop::Limit => "token limit",
        Stop::Context => "context full",
        Stop::Caller => "stopped",
    }
}

/// Text as it comes, unless the whole goes out as JSON.
fn show(json: bool, piece: &str) -> io::Result<()> {
    if json {
        return Ok(());
    }
    let mut out = io::stdout().lock();
    out.write_all(piece.as_bytes())?;
    out.flush()
}
