//! One file a verb; no algorithm.

mod device;
mod eval_kl;
mod eval_ppl;
mod generate;
pub mod gguf;
mod inspect;
mod list;
mod open;
mod quantize;

use anyhow::{Context, Result};

use crate::cli::args::{Cli, Command, EvalCommand};
use crate::cli::print::Printer;

/// Runs the command that was asked for.
pub fn run(cli: Cli) -> Result<()> {
    let threads = cli.global.threads.map_or(0, usize::from);
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().context("cannot start the worker threads")?;
    let printer = |json: bool| Printer::new(cli.global.quiet, json);
    match cli.command {
        Command::Gptq(args) => quantize::gptq(&args, printer(args.output.json)),
        Command::Rtn(args) => quantize::rtn(&args, printer(args.output.json)),
        Command::Awq(args) => quantize::awq(&args, printer(args.output.json)),
        Command::Smoothquant(args) => quantize::smoothquant(&args, printer(args.output.json)),
        Command::Fp8(args) => quantize::fp8(&args, printer(args.output.json)),
        Command::Gguf(args) => gguf::run(&args, printer(args.json)),
        Command::Imatrix(args) => gguf::imatrix(&args, printer(args.json)),
        Command::Convert(args) => gguf::convert(&args, printer(args.json)),
        Command::Eval(EvalCommand::Ppl(args)) => eval_ppl::run(&args, printer(args.json)),
        Command::Eval(EvalCommand::Kl(args)) => eval_kl::run(&args, printer(args.json)),
        Command::Generate(args) => generate::run(&args, printer(args.json)),
        Command::Inspect(args) => inspect::run(&args, printer(args.json)),
        Command::List(args) => list::run(printer(args.json)),
    }
}
