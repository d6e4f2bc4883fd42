//! One file a verb; no algorithm.

mod compare;
mod device;
mod draft;
mod eval_kl;
mod eval_kv;
mod eval_ppl;
mod eval_spec;
mod generate;
mod generate_many;
mod gguf;
mod history;
mod inspect;
mod kv_cache;
mod list;
mod plan;
mod quantize;
mod run;
mod task;
mod validate;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::backend::DeviceError;
use crate::cli::args::{Cli, Command, EvalCommand};
use crate::cli::print::Printer;
use crate::model::ModelError;
use crate::model::presence::Unread;

/// Bytes of a worker's stack: what a main thread has.
const STACK: usize = 8 << 20;

/// What `--json` prints of a model, with the tensors that were not read.
#[derive(Serialize)]
struct Accounted<'a, T> {
    #[serde(flatten)]
    value: T,
    #[serde(skip_serializing_if = "Option::is_none")]
    unread_tensors: Option<&'a Unread>,
}

/// `value`, an object, with `unread_tensors` where there are some.
fn accounted<T: Serialize>(value: T, unread_tensors: Option<&Unread>) -> Accounted<'_, T> {
    Accounted { value, unread_tensors }
}

/// Runs the command that was asked for.
pub fn execute(cli: Cli) -> Result<()> {
    let threads = cli.global.threads.map_or(0, usize::from);
    let workers = rayon::ThreadPoolBuilder::new().num_threads(threads).stack_size(STACK);
    workers.build_global().context("cannot start the worker threads")?;
    // On a worker: handing over every small operation of a decoding step would take longer than the operation.
    let advice = advice(&cli.command);
    rayon::scope(|_| dispatch(cli)).map_err(|error| {
        if lacks_memory(&error) { error.context(format!("too little device memory ({advice})")) } else { error }
    })
}

/// What the options of a command can do about too little memory of a device.
fn advice(command: &Command) -> &'static str {
    match command {
        Command::Gptq(_) | Command::Rtn(_) | Command::Awq(_) | Command::Smoothquant(_) | Command::Fp8(_) => {
            "fewer --nsamples, a shorter --seqlen or another --device may fit"
        }
        Command::Eval(EvalCommand::Ppl(_) | EvalCommand::Kl(_) | EvalCommand::Kv(_)) | Command::Validate(_) => {
            "a shorter --window or another --device may fit"
        }
        _ => "another --device may fit",
    }
}

fn lacks_memory(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| match cause.downcast_ref() {
        // Transparent: its cause is that of the device's error.
        Some(ModelError::Device(device)) => device.out_of_memory(),
        _ => cause.downcast_ref().is_some_and(DeviceError::out_of_memory),
    })
}

fn dispatch(cli: Cli) -> Result<()> {
    let printer = |json: bool| Printer::new(cli.global.quiet, json);
    let json = cli.command.output().is_some_and(|output| output.json);
    if let Some(run) = quantize::prepared(&cli.command, printer(json)) {
        return run?.go();
    }
    match cli.command {
        // Ready above.
        Command::Gptq(_) | Command::Rtn(_) | Command::Awq(_) | Command::Smoothquant(_) | Command::Fp8(_) => Ok(()),
        Command::Gguf(args) => gguf::run(&args, printer(args.json)),
        Command::Imatrix(args) => gguf::imatrix(&args, printer(args.json)),
        Command::Convert(args) => gguf::convert(&args, printer(args.json)),
        Command::Eval(EvalCommand::Ppl(args)) => eval_ppl::run(&args, printer(args.json)),
        Command::Eval(EvalCommand::Kl(args)) => eval_kl::run(&args, printer(args.json)),
        Command::Eval(EvalCommand::Kv(args)) => eval_kv::run(&args, printer(args.json)),
        Command::Eval(EvalCommand::Spec(args)) => eval_spec::run(&args, printer(args.json)),
        Command::Generate(args) => generate::run(&args, printer(args.json)),
        Command::Inspect(args) => inspect::run(&args, printer(args.json)),
        Command::Plan(args) => plan::run(&args, printer(args.json)),
        Command::Run(args) => run::run(&args, printer(args.json)),
        Command::Validate(args) => validate::run(&args, printer(args.json)),
        Command::Compare(args) => compare::run(&args, printer(args.json)),
        Command::History(args) => history::run(&args, printer(args.json)),
        Command::List(args) => list::run(&args, printer(args.json || args.report_schema)),
    }
}
