//! Runs that are stopped half-way, and taken up again.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ExitStatus, Stdio};

use quantkit::format::atomic::lock;
use rustix::process::{Pid, Signal, kill_process};

use crate::support::command::std_command;
use crate::support::scene::{Scene, listing};

const RUN: [&str; 8] = ["gptq", "--calib", "calib.txt", "--nsamples", "24", "--seqlen", "128", "--no-eval"];

fn to<'a>(out: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&RUN[..], &["-o", out], more].concat()
}

/// A run that has finished its first block and is at work on the second.
struct HalfWay {
    child: Child,
    stderr: BufReader<std::process::ChildStderr>,
}

impl HalfWay {
    fn start(dir: &Path, args: &[&str]) -> Self {
        Self::after(dir, args, "gptq 1/4 ")
    }

    /// A run that has just said `words`.
    fn after(dir: &Path, args: &[&str], words: &str) -> Self {
        let mut command = std_command(dir, args);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        while !said.contains(words) {
            assert!(stderr.read_line(&mut said).unwrap() > 0, "it ended too early:\n{said}");
        }
        Self { child, stderr }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// How it ended, and what it said since.
    fn end(mut self) -> (ExitStatus, String) {
        let mut rest = String::new();
        self.stderr.read_to_string(&mut rest).unwrap();
        (self.child.wait().unwrap(), rest)
    }
}

/// Names in the folder itself, those of the scene left out.
fn made(scene: &Scene) -> Vec<String> {
    let scenery = ["calib.txt", "eval.txt", "tmp"];
    listing(scene.root()).into_keys().filter(|n| !n.contains('/') && !scenery.contains(&n.as_str())).collect()
}

fn blocks(scene: &Scene) -> Vec<String> {
    let work = listing(&scene.path(".out.quantkit-work"));
    work.into_keys().filter(|name| name.starts_with("block-") && !name.contains('/')).collect()
}

#[test]
fn interrupted_and_resumed() {
    let scene = Scene::demo();
    let run = HalfWay::start(scene.root(), &to("out", &[]));
    run.signal(Signal::INT);
    let (status, said) = run.end();
    assert_eq!(status.code(), Some(130), "{said}");
    assert!(said.contains("stopped: interrupted") && said.contains("--resume"), "{said}");
    assert!(said.contains("kept in `.out.quantkit-work`"), "{said}");
    assert_eq!(made(&scene), [".out.quantkit-work"]);
    let kept = blocks(&scene);
    assert!((1..4).contains(&kept.len()), "{kept:?}");
    assert_eq!(kept[0], "block-00000");
    assert_eq!(listing(&scene.path("tmp")).len(), 0, "the demo checkpoint was left unpacked");

    // Nothing but the same run may go on from here.
    for (more, words) in [
        (&["--bits", "3"][..], &["`scheme`", "`bits` differs"][..]),
        (&["--order", "natural"], &["`order` differs"]),
        (&["--skip", "layers.3"], &["`skips` differs"]),
        (&["--max-shard-size", "1"], &["`max_shard_bytes` differs"]),
        (&["--seed", "5", "--sampling", "random"], &["`calibration`", "`sampling` differs"]),
    ] {
        scene.refused(
            &to("out", &[&["--resume"], more].concat()),
            &[&["--resume: `.out.quantkit-work`"], words].concat(),
        );
    }
    let calib = scene.read("calib.txt");
    scene.write("calib.txt", [&b"x"[..], &calib].concat());
    scene.refused(&to("out", &["--resume"]), &["`calibration`", "`text_sha256` differs"]);
    scene.write("calib.txt", calib);

    // What it did is not thrown away unasked.
    let words = format!("finished {} block", kept.len());
    scene.refused(&to("out", &[]), &[&words, "`.out.quantkit-work`", "`--resume`", "delete that folder"]);

    scene
        .run(&to("out", &["--resume"]))
        .ok()
        .says(&["gptq 1/4 model.layers.0 restored", "gptq 4/4 model.layers.3 loss"]);
    assert_eq!(made(&scene), ["out"]);
    scene.run(&to("whole", &["--threads", "1"])).ok();
    assert_eq!(listing(&scene.path("out")), listing(&scene.path("whole")));
}

#[test]
fn killed_and_resumed() {
    for more in [&[][..], &["--drift-correction"]] {
        let scene = Scene::demo();
        let run = HalfWay::start(scene.root(), &to("out", more));
        run.signal(Signal::KILL);
        let (status, _) = run.end();
        assert_eq!(status.code(), None);
        assert!(!scene.path("out").exists());
        assert!(made(&scene).iter().all(|name| name.starts_with(".out.")), "{:?}", made(&scene));
        assert!(blocks(&scene).contains(&"block-00000".to_string()));

        let ran = scene.run(&to("out", &[&["--resume"], more].concat())).ok();
        assert!(ran.stderr.contains("gptq 1/4 model.layers.0 restored"), "{}", ran.stderr);
        assert_eq!(made(&scene), ["out"]);
        scene.run(&to("whole", more)).ok();
        assert_eq!(listing(&scene.path("out")), listing(&scene.path("whole")), "{more:?}");
    }
}

#[test]
fn killed_and_begun_anew() {
    let scene = Scene::demo();
    let run = HalfWay::start(scene.root(), &to("out", &[]));
    run.signal(Signal::TERM);
    assert_eq!(run.end().0.code(), Some(130));
    assert_eq!(blocks(&scene).first().map(String::as_str), Some("block-00000"));
    // Without --resume, other options are no obstacle, and nothing of the old run is used.
    let ran = scene.run(&to("out", &["--bits", "8"])).ok();
    assert!(!ran.stderr.contains("restored"), "{}", ran.stderr);
    assert!(ran.stderr.contains("of an earlier run with other options"), "{}", ran.stderr);
    assert_eq!(made(&scene), ["out"]);
    assert_eq!(scene.json("out/quantize_config.json")["bits"], 8);
}

/// Between the last block and the end nothing is lost either: the artifact has no name before it was measured.
#[test]
fn interrupted_while_measuring() {
    let scene = Scene::demo();
    let args = [&RUN[..7], &["-o", "out", "--eval-windows", "32"]].concat();
    let run = HalfWay::after(scene.root(), &args, "gptq 4/4 ");
    std::thread::sleep(std::time::Duration::from_millis(100));
    run.signal(Signal::INT);
    let (status, said) = run.end();
    assert_eq!(status.code(), Some(130), "{said}");
    assert_eq!(made(&scene), [".out.quantkit-work"]);
    assert_eq!(blocks(&scene).len(), 4);
    let again = [&args[..], &["--resume"]].concat();
    scene.run(&again).ok().says(&["gptq 4/4 model.layers.3 restored"]);
    assert_eq!(made(&scene), ["out"]);
}

/// Where nothing is to be tidied up, Ctrl-C ends the process at once, as everywhere.
#[test]
fn interrupted_before_the_work() {
    use std::os::unix::process::ExitStatusExt;
    let scene = Scene::tiny("llama");
    let mut command = std_command(scene.root(), &["generate", "model", "--prompt", "-"]);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(500));
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(500));
    let ended = child.try_wait().unwrap();
    let _ = child.kill();
    assert_eq!(ended.and_then(|status| status.signal()), Some(Signal::INT.as_raw()));
}

/// Tests that were themselves started with signals ignored, as in the background or under `nohup`.
#[test]
fn signals_that_the_tests_ignore() {
    let name = "end_to_end::interruption::interrupted_before_the_work";
    let mut command = std::process::Command::new("sh");
    command.args(["-c", "trap '' HUP INT TERM; exec \"$0\" \"$@\""]);
    let output = command.arg(std::env::current_exe().unwrap()).args([name, "--exact"]).output().unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && told.contains("1 passed"), "{told}");
}

#[test]
fn nothing_to_resume() {
    let scene = Scene::tiny("llama");
    let args = ["gptq", "model", "-o", "out", "--no-eval", "--resume"];
    scene.tiny_run(&args).ok().says(&["no earlier run is there"]);
    scene.refused(&args[..4], &["`out` exists already"]);
}

#[test]
fn damaged_blocks_are_not_used() {
    let scene = Scene::demo();
    let run = HalfWay::start(scene.root(), &to("out", &[]));
    run.signal(Signal::INT);
    run.end();
    let block = ".out.quantkit-work/block-00000/model.safetensors";
    let whole = scene.read(block);
    scene.write(block, &whole[..whole.len() - 1]);
    let ran = scene.run(&to("out", &["--resume"])).ended(2);
    assert!(ran.stderr.contains("block-00000` is damaged; delete it"), "{}", ran.stderr);
    assert!(!scene.path("out").exists());
}

#[test]
fn two_runs_for_one_folder() {
    let scene = Scene::demo();
    let first = HalfWay::start(scene.root(), &to("out", &[]));
    first.signal(Signal::STOP);
    for more in [&[][..], &["--resume"]] {
        let ran = scene.run(&to("out", more)).ended(2);
        assert!(ran.stderr.contains("another run is writing `out`"), "{}", ran.stderr);
    }
    first.signal(Signal::CONT);
    let (status, said) = first.end();
    assert!(status.success(), "{said}");
    assert_eq!(made(&scene), ["out"]);
}

/// Folders of runs that were killed neither stop a new run nor outlive it.
#[test]
fn leftovers_of_dead_runs() {
    let scene = Scene::tiny("llama");
    let dead = format!(".out.partial-{}", i32::MAX);
    for name in [&dead, ".out.partial-1", ".out.quantkit-work"] {
        std::fs::create_dir(scene.path(name)).unwrap();
        scene.write(&format!("{name}/model.safetensors"), "half of it");
    }
    scene.tiny_run(&["gptq", "model", "-o", "out", "--no-eval"]).ok();
    assert!(!scene.path(&dead).exists() && !scene.path(".out.quantkit-work").exists());
    // Process 1 lives, and might be writing.
    assert!(scene.path(".out.partial-1").exists());
}

/// A recipe goes on by itself, to the same bytes.
#[test]
fn recipes_go_on() {
    let scene = Scene::demo();
    let artifact =
        "[[artifact]]\nname = \"w4\"\nmethod = \"gptq\"\ncalib = \"calib.txt\"\nnsamples = 24\nseqlen = 128\n";
    scene.write("quantkit.toml", artifact);
    let run = HalfWay::start(scene.root(), &["run"]);
    run.signal(Signal::INT);
    let (status, said) = run.end();
    assert_eq!(status.code(), Some(130), "{said}");
    assert!(said.contains("the same recipe goes on from there"), "{said}");
    assert!(!scene.path("artifacts/w4").exists());
    // Two at once would be in each other's way.
    let held = lock(&scene.path("artifacts")).unwrap();
    scene.run(&["run"]).ended(2).says(&["another run works in `artifacts`"]);
    drop(held);
    let plan = scene.run(&["run", "--dry-run"]).ok().stdout;
    assert!(plan.starts_with("w4: damaged (an earlier run did not finish it): gptq"), "{plan}");
    let ran = scene.run(&["run"]).ok().says(&["w4: damaged (an earlier run did not finish it)", "restored"]);
    assert!(ran.stdout.starts_with("w4: "), "{}", ran.stdout);
    scene.run(&to("whole", &[])).ok();
    assert_eq!(listing(&scene.path("artifacts/w4")), listing(&scene.path("whole")));

    // Blocks of other options are of no use, and in nobody's way.
    scene.write("quantkit.toml", artifact.replace("nsamples = 24", "nsamples = 23"));
    let run = HalfWay::start(scene.root(), &["run"]);
    run.signal(Signal::INT);
    run.end();
    scene.write("quantkit.toml", artifact.replace("nsamples = 24", "nsamples = 3"));
    let ran = scene.run(&["run"]).ok().says(&["of an earlier run with other options"]);
    assert!(!ran.stderr.contains("restored"), "{}", ran.stderr);
}
