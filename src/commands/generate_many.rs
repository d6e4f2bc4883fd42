//! `quantkit generate` with several prompts or samples: all side by side.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::accounted;
use super::device::{one, warn_of_unrecorded_steps};
use super::generate::{end_of, reason, tokens_of};
use super::kv_cache;
use crate::backend::cache::BLOCK;
use crate::backend::cuda::{CudaOptions, Precision};
use crate::calibrate::corpus::messages;
use crate::cli::args::GenerateArgs;
use crate::cli::interrupt;
use crate::cli::print::Printer;
use crate::engine::cache::Cache;
use crate::engine::generate::{Stop, capacity};
use crate::engine::sampler::{Sampler, SamplerOptions};
use crate::engine::scheduler::{Event, Happened, Request, Scheduler, SchedulerOptions};
use crate::model::chat::{ChatTemplate, Message};
use crate::num::size::bytes;
use crate::pipeline::observer::Progress;
use crate::pipeline::open::{Runnable, open};
use crate::pipeline::source::locate;

/// What is to be continued: text, or turns of a chat.
enum Prompt {
    Text(String),
    Messages(Vec<Message>),
}

/// One sample on its way.
#[derive(Default)]
struct Sample {
    tokens: Vec<u32>,
    stop: Option<Stop>,
}

pub fn run(args: &GenerateArgs, sampling: SamplerOptions, printer: Printer) -> Result<()> {
    let prompts = match (&args.many.prompts, &args.prompt) {
        (Some(path), _) => read(path)?,
        (None, prompt) => vec![Prompt::Text(super::generate::prompt(prompt.as_deref().unwrap_or_default())?)],
    };
    let located = locate(&args.model, printer)?;
    // Prompts go in as serving engines take them.
    let options = CudaOptions { precision: Precision::Single, graphs: !args.no_cuda_graph, ..CudaOptions::default() };
    let runnable = open(&located.dir, one(&args.model.device, options, printer)?, printer)?;
    let model = &runnable.model;
    if args.many.num_samples > args.many.max_num_seqs {
        bail!(
            "--num-samples {} is more than the {} sequences of --max-num-seqs, which all samples of a prompt start \
             together in",
            args.many.num_samples,
            args.many.max_num_seqs
        );
    }
    let samplers = (0..args.many.num_samples as u64)
        .map(|i| Sampler::new(SamplerOptions { seed: sampling.seed.wrapping_add(i), ..sampling }))
        .collect::<Result<Vec<_>, _>>()?;
    let requests = prompts
        .into_iter()
        .enumerate()
        .map(|(i, prompt)| {
            let prompt = tokens(prompt, args, &runnable).with_context(|| format!("prompt {}", i + 1))?;
            capacity(model, &prompt, args.max_tokens).with_context(|| format!("prompt {}", i + 1))?;
            let end = end_of(args, runnable.tokenizer()?).to_vec();
            Ok(Request { prompt, limit: args.max_tokens, end, samplers: samplers.clone() })
        })
        .collect::<Result<Vec<_>>>()?;
    let longest = requests.iter().map(|request| request.prompt.len()).max().unwrap_or(0);
    let most = model.config.max_positions.min(longest.saturating_add(args.max_tokens.max(1)));
    let sequences = args.many.max_num_seqs.min(requests.len().saturating_mul(args.many.num_samples));
    let cache = Cache::new(model, kv_cache::options(&args.many.cache, &runnable, sequences, most, printer)?)?;
    let limits = SchedulerOptions {
        max_num_seqs: args.many.max_num_seqs,
        max_num_batched_tokens: args.many.max_num_batched_tokens,
    };
    let mut scheduler = Scheduler::new(model, cache, limits)?;
    // Before any work: what could never be finished.
    let (tokens, bytes_of) = (scheduler.cache().blocks() * BLOCK, scheduler.cache().block_bytes());
    for (i, request) in requests.iter().enumerate() {
        let needed = model.config.max_positions.min(request.prompt.len() + request.limit);
        if needed > tokens {
            bail!(
                "prompt {}: its {} tokens and {} more take {} of key-value cache, and there are {}; shorten it, or raise \
                 --gpu-memory-utilization or --kv-cache-memory-bytes",
                i + 1,
                request.prompt.len(),
                request.limit,
                bytes((needed.div_ceil(BLOCK) * bytes_of) as u64),
                bytes((tokens / BLOCK * bytes_of) as u64)
            );
        }
    }
    let lengths: Vec<usize> = requests.iter().map(|request| request.prompt.len()).collect();
    let began = Instant::now();
    for request in requests {
        scheduler.submit(request)?;
    }
    // Steps are short, but a prompt may be long.
    interrupt::listen();
    let mut results = Results::new(lengths, args.many.num_samples);
    let mut bar = printer.steps("generating", 0);
    while !scheduler.is_idle() {
        interrupt::check()?;
        for event in scheduler.step()? {
            results.take(event);
        }
        results.show(&runnable, args.json)?;
        bar.set(results.shown as u64, (results.lengths.len() * results.samples) as u64);
    }
    drop(bar);
    let seconds = began.elapsed().as_secs_f64();
    let (totals, cache) = (scheduler.totals(), scheduler.cache());
    let (blocks, block) = (cache.blocks(), cache.block_bytes());
    warn_of_unrecorded_steps(cache.unrecorded(), printer);
    printer.note(format!(
        "{} tokens of {} sequences after {} of prompts, {:.1} tokens/s; up to {} sequences side by side",
        totals.tokens,
        results.lengths.len() * results.samples,
        results.lengths.iter().sum::<usize>(),
        totals.tokens as f64 / seconds,
        totals.most_sequences
    ));
    printer.note(format!(
        "cache of {}: up to {} of {blocks} blocks ({}), {:.1} % of them wasted; {} to others",
        cache.kind(),
        totals.most_blocks,
        bytes((blocks * block) as u64),
        100.0 * totals.waste(),
        match (totals.swapped, totals.recomputed) {
            (0, 0) => "no sequence gave way".into(),
            (swapped, 0) => format!("{swapped} times a sequence gave way"),
            (swapped, again) => format!("{} times a sequence, {again} to be computed again, gave way", swapped + again),
        }
    ));
    let texts = results.texts(&runnable)?;
    printer.object(&accounted(
        json!({
            "results": results.objects(&texts, sampling.seed),
            "tokens": totals.tokens,
            "tokens_per_second": totals.tokens as f64 / seconds,
            "cache": {
                "type": cache.kind(),
                "blocks": blocks,
                "bytes": blocks * block,
                "most_blocks": totals.most_blocks,
                "waste": totals.waste(),
                "swapped": totals.swapped,
                "recomputed": totals.recomputed,
            },
        }),
        runnable.unread.as_ref(),
    ))?;
    Ok(())
}

fn tokens(prompt: Prompt, args: &GenerateArgs, runnable: &Runnable) -> Result<Vec<u32>> {
    let text = match prompt {
        Prompt::Text(text) => super::generate::rendered(text, args, runnable)?,
        Prompt::Messages(messages) => {
            let template = ChatTemplate::load(runnable.model.checkpoint())?;
            template.context("`messages`: the model has no chat template")?.render(&messages, true)?
        }
    };
    tokens_of(&text, runnable)
}

/// The prompts of a file.
fn read(path: &Path) -> Result<Vec<Prompt>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read `{}`", path.display()))?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let objects = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("jsonl"));
    let prompts = lines
        .map(|(i, line)| match objects {
            true => object(line).with_context(|| format!("`{}`, line {}", path.display(), i + 1)),
            false => Ok(Prompt::Text(line.into())),
        })
        .collect::<Result<Vec<_>>>()?;
    if prompts.is_empty() {
        bail!("`{}` holds no prompts", path.display());
    }
    Ok(prompts)
}

fn object(line: &str) -> Result<Prompt> {
    let value: Value = serde_json::from_str(line).context("not JSON")?;
    match (value.get("prompt"), value.get("messages")) {
        (Some(Value::String(text)), None) => Ok(Prompt::Text(text.clone())),
        (Some(_), None) => bail!("`prompt` is not a string"),
        (None, Some(list)) => Ok(Prompt::Messages(messages(list).map_err(anyhow::Error::msg)?)),
        (Some(_), Some(_)) => bail!("has both `prompt` and `messages`"),
        (None, None) => bail!("has neither `prompt` nor `messages`"),
    }
}

/// What has come of the requests.
struct Results {
    /// Tokens of each prompt.
    lengths: Vec<usize>,
    /// Of each prompt.
    samples: usize,
    done: BTreeMap<(usize, usize), Sample>,
    /// How many have been printed.
    shown: usize,
}

impl Results {
    fn new(lengths: Vec<usize>, samples: usize) -> Self {
        Self { lengths, samples, done: BTreeMap::new(), shown: 0 }
    }

    fn take(&mut self, event: Event) {
        let sample = self.done.entry((event.request, event.sample)).or_default();
        match event.what {
            Happened::Token(token) => sample.tokens.push(token),
            Happened::Stopped(stop) => sample.stop = Some(stop),
        }
    }

    /// Prints those that have ended, in the order of the prompts: a line each.
    fn show(&mut self, runnable: &Runnable, json: bool) -> Result<()> {
        while let Some(sample) = self.done.get(&(self.shown / self.samples, self.shown % self.samples))
            && sample.stop.is_some()
        {
            self.shown += 1;
            if !json {
                let text = text(runnable, &sample.tokens)?;
                let mut out = io::stdout().lock();
                writeln!(out, "{}", text.replace('\\', "\\\\").replace('\n', "\\n").replace('\r', "\\r"))?;
            }
        }
        Ok(())
    }

    fn texts(&self, runnable: &Runnable) -> Result<Vec<String>> {
        self.done.values().map(|sample| text(runnable, &sample.tokens)).collect()
    }

    fn objects(&self, texts: &[String], seed: u64) -> Vec<Value> {
        let object = |((&(prompt, number), sample), text): ((&(usize, usize), &Sample), &String)| {
            json!({
                "prompt": prompt,
                "sample": number,
                "text": text,
                "prompt_tokens": self.lengths[prompt],
                "tokens": sample.tokens.len(),
                "stop": sample.stop.map(reason),
                "seed": seed.wrapping_add(number as u64),
            })
        };
        self.done.iter().zip(texts).map(object).collect()
    }
}

/// What tokens say.
fn text(runnable: &Runnable, tokens: &[u32]) -> Result<String> {
    let mut stream = runnable.tokenizer()?.decode_stream(true);
    let mut text = String::new();
    for token in tokens {
        text.push_str(&stream.push(*token)?);
    }
    text.push_str(&stream.finish()?);
    Ok(text)
}
