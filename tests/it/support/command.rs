//! The built program, and what came of running it.

use std::ffi::c_int;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Output;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

/// Variables that would change what the program does.
pub const VARIABLES: [&str; 11] = [
    "QUANTKIT_DEVICE",
    "QUANTKIT_THREADS",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "HF_ENDPOINT",
    "HF_TOKEN",
    "XDG_CACHE_HOME",
    "GITHUB_STEP_SUMMARY",
    "GITHUB_SHA",
    "TMPDIR",
];

/// The program, to be run in `dir`; temporary files of its own go to `tmp` there, if that exists.
pub fn command(dir: &Path, args: &[&str]) -> assert_cmd::Command {
    assert_cmd::Command::from_std(std_command(dir, args))
}

/// [`command`] for tests that talk to the running program.
pub fn std_command(dir: &Path, args: &[&str]) -> std::process::Command {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_quantkit"));
    command.current_dir(dir).args(args);
    if args.first() == Some(&"gguf") && !args.iter().any(|arg| arg.starts_with("--eval-") || *arg == "--help") {
        // Most tests of GGUF files are about their bytes; those that measure say on how much.
        command.arg("--no-eval");
    }
    VARIABLES.iter().for_each(|name| {
        command.env_remove(name);
    });
    // What these tests expect must not depend on the machine; those of CUDA say otherwise.
    command.env("QUANTKIT_DEVICE", "cpu");
    if dir.join("tmp").is_dir() {
        command.env("TMPDIR", dir.join("tmp"));
    }
    with_signals(&mut command);
    command
}

/// Signals do to the child what they do by default. Tests that run in the background, under `nohup` or on some CI runners
/// were started with some of them ignored, and children inherit that.
fn with_signals(command: &mut std::process::Command) {
    unsafe extern "C" {
        fn signal(number: c_int, handler: usize) -> usize;
    }
    const DEFAULT: usize = 0;
    let reset = || {
        for number in [Signal::HUP, Signal::INT, Signal::QUIT, Signal::TERM] {
            // SAFETY: POSIX's function, with the handler `SIG_DFL`.
            unsafe { signal(number.as_raw(), DEFAULT) };
        }
        Ok(())
    };
    // SAFETY: between fork and exec only `signal` is called, which is async-signal-safe.
    unsafe { command.pre_exec(reset) };
}

/// Runs `quantkit ARGS` in `dir` to its end.
pub fn quantkit(dir: &Path, args: &[&str]) -> Ran {
    Ran::new(command(dir, args).timeout(Duration::from_secs(300)).output().unwrap(), args)
}

/// A finished run.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
    args: String,
}

impl Ran {
    pub fn new(output: Output, args: &[&str]) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Self {
            code: output.status.code(),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
            args: args.join(" "),
        }
    }

    /// It ended with this exit code, and not by a panic.
    #[track_caller]
    pub fn ended(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "quantkit {}\n{}{}", self.args, self.stdout, self.stderr);
        assert!(!self.stderr.contains("panicked"), "quantkit {}\n{}", self.args, self.stderr);
        self
    }

    #[track_caller]
    pub fn ok(self) -> Self {
        self.ended(0)
    }

    /// stderr has all of these words.
    #[track_caller]
    pub fn says(self, words: &[&str]) -> Self {
        for word in words {
            assert!(self.stderr.contains(word), "quantkit {}\nwanted `{word}` in:\n{}", self.args, self.stderr);
        }
        self
    }

    /// The one JSON value that stdout is.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e} in stdout:\n{}", self.stdout))
    }
}
