//! `quantkit generate`

use std::io::{self, Read, Write};
use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::json;

use super::device::one;
use super::open::{locate, open};
use crate::backend::cuda::{CudaOptions, Precision};
use crate::cli::args::GenerateArgs;
use crate::cli::interrupt;
use crate::cli::print::Printer;
use crate::engine::generate::{Stop, generate};
use crate::engine::sampler::{Sampler, SamplerOptions};
use crate::model::chat::{ChatTemplate, Message};
use crate::model::tokenizer::{BosHabit, BosMode, BosRule};

pub fn run(args: &GenerateArgs, printer: Printer) -> Result<()> {
    let mut sampler = Sampler::new(SamplerOptions {
        temperature: args.temperature,
        top_p: args.top_p.unwrap_or(1.0),
        top_k: args.top_k.unwrap_or(0),
        seed: args.seed.unwrap_or(0),
    })?;
    let sampling =
        [("--top-p", args.top_p.is_some()), ("--top-k", args.top_k.is_some()), ("--seed", args.seed.is_some())];
    let ignored: Vec<&str> = sampling.into_iter().filter(|(_, given)| *given).map(|(name, _)| name).collect();
    if args.temperature == 0.0 && !ignored.is_empty() {
        printer.note(format!(
            "at temperature 0 the likeliest token is taken every time; {} has no effect",
            ignored.join(", ")
        ));
    }
    let mut prompt = args.prompt.clone();
    if prompt == "-" {
        prompt.clear();
        io::stdin().read_to_string(&mut prompt).context("cannot read the prompt from stdin")?;
    }
    let located = locate(&args.model, printer)?;
    // Prompts go in as serving engines take them.
    let options = CudaOptions { precision: Precision::Single, graphs: !args.no_cuda_graph, ..CudaOptions::default() };
    let runnable = open(&located.dir, one(&args.model.device, options, printer)?, printer)?;
    let (model, tokenizer) = (&runnable.model, runnable.tokenizer()?);
    if args.chat {
        let template = ChatTemplate::load(model.checkpoint())?.context("--chat: the model has no chat template")?;
        let system = args.system.iter().map(|s| Message { role: "system".into(), content: s.clone() });
        let messages: Vec<Message> = system.chain([Message { role: "user".into(), content: prompt }]).collect();
        prompt = template.render(&messages, true)?;
    }
    let mut tokens = tokenizer.encode(&prompt)?;
    let rule = BosMode::Auto.settle(tokenizer, model.config.family.needs_bos, BosHabit::Once)?;
    if let BosRule::Once(bos) | BosRule::Window(bos) = rule
        && tokens.first() != Some(&bos)
    {
        tokens.insert(0, bos);
    }
    let end: &[u32] = if args.ignore_eos { &[] } else { tokenizer.eos() };
    let mut stream = tokenizer.decode_stream(true);
    let (mut written, mut text) = (0usize, String::new());
    let mut failed: Option<anyhow::Error> = None;
    let began = Instant::now();
    let stop = generate(model, &tokens, end, args.max_tokens, &mut sampler, &mut |token| {
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
    })?;
    if let Some(error) = failed {
        return Err(error);
    }
    let rest = stream.finish()?;
    show(args.json, &rest)?;
    text.push_str(&rest);
    printer.text("")?;
    let seconds = began.elapsed().as_secs_f64();
    let reason = match stop {
        Stop::End => "end of sequence",
        Stop::Limit => "token limit",
        Stop::Context => "context full",
        Stop::Caller => "stopped",
    };
    printer.note(format!(
        "{written} tokens after {} of prompt, {:.1} tokens/s, {reason}",
        tokens.len(),
        written as f64 / seconds
    ));
    printer.object(&json!({
        "text": text,
        "prompt_tokens": tokens.len(),
        "tokens": written,
        "tokens_per_second": written as f64 / seconds,
        "stop": reason,
        "seed": args.seed.unwrap_or(0),
    }))?;
    Ok(())
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
