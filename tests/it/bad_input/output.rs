//! Places where the artifact cannot go.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::gptq;
use crate::support::scene::{Scene, TINY, listing, tiny_args};

#[test]
fn a_file_stands_there() {
    let scene = Scene::tiny("llama");
    scene.write("out", "precious");
    scene.refused(&gptq(&[]), &["`out` exists already", "--out"]);
    scene.refused(&gptq(&["--overwrite"]), &["`out` exists and holds no artifact of quantkit"]);
}

#[test]
fn a_folder_stands_there() {
    let scene = Scene::tiny("llama");
    fs::create_dir(scene.path("out")).unwrap();
    scene.write("out/.hidden", "precious");
    scene.refused(&gptq(&[]), &["`out` exists already", "--out"]);
    scene.refused(&gptq(&["--overwrite"]), &["`out` exists and holds no artifact of quantkit"]);
    scene.refused(&["gptq", "model", "-o", "model", "--overwrite"], &["`model` exists and holds no artifact"]);
}

#[test]
fn an_empty_folder_is_welcome() {
    let scene = Scene::tiny("llama");
    fs::create_dir(scene.path("out")).unwrap();
    scene.run(&gptq(&["--no-eval"])).ok();
    assert!(scene.path("out/model.safetensors").exists());
    let names: Vec<String> = scene.listing().into_keys().filter(|name| name.starts_with('.')).collect();
    assert_eq!(names, [""; 0]);
}

#[test]
fn an_artifact_is_replaced_only_when_asked() {
    let scene = Scene::tiny("llama");
    scene.tiny_run(&["rtn", "model", "-o", "out", "--no-eval"]).ok();
    let first = scene.read("out/quantkit.json");
    scene.write("out/notes.txt", "of the first");
    scene.refused(&gptq(&[]), &["`out` exists already", "--overwrite"]);
    scene.run(&gptq(&["--overwrite", "--no-eval"])).ok();
    assert_ne!(scene.read("out/quantkit.json"), first);
    assert_eq!(scene.read("out/notes.txt"), b"of the first");
    scene.run(&["eval", "ppl", "out", "--text", "eval.txt"]).ok();
    let hidden: Vec<String> = scene.listing().into_keys().filter(|name| name.starts_with('.')).collect();
    assert_eq!(hidden, [""; 0]);
}

/// `--overwrite` replaces what the manifest lists, and nothing else.
#[test]
fn the_files_of_the_user_stay() {
    let scene = Scene::tiny("llama");
    let rtn = ["rtn", "model", "-o", "out", "--no-eval", "--group-size", "32"];
    let again = [&rtn[..], &["--overwrite"]].concat();
    scene.run(&rtn).ok();
    // As if the artifact before had had one more file.
    scene.write("out/stale.safetensors", "stale");
    let entry = |file: &str, text: &[u8]| serde_json::json!({"file": file, "bytes": text.len(), "sha256": quantkit::format::manifest::sha256_bytes(text)});
    scene.edit_json("out/quantkit.json", |manifest| {
        manifest["outputs"].as_array_mut().unwrap().push(entry("stale.safetensors", b"stale"));
    });
    fs::create_dir_all(scene.path("out/.git/refs")).unwrap();
    for (name, text) in [("out/.git/HEAD", "ref"), ("out/README.md", "card"), ("out/adapter.safetensors", "own")] {
        scene.write(name, text);
    }
    scene.run(&again).ok();
    for (name, text) in [("out/.git/HEAD", "ref"), ("out/README.md", "card"), ("out/adapter.safetensors", "own")] {
        assert_eq!(scene.read(name), text.as_bytes(), "{name}");
    }
    assert!(scene.path("out/.git/refs").is_dir() && !scene.path("out/stale.safetensors").exists());
    assert!(scene.listing().keys().all(|name| !name.starts_with('.')));

    // The new artifact would have a file of that name.
    scene.write("model/chat_template.jinja", "{{ messages }}");
    scene.write("out/chat_template.jinja", "mine");
    scene.refused(&again, &["`out/chat_template.jinja` is not quantkit's", "move it away"]);
    fs::remove_file(scene.path("out/chat_template.jinja")).unwrap();
    // The user has changed what quantkit wrote.
    let config = scene.read("out/config.json");
    scene.write("out/config.json", "{}");
    scene.refused(&again, &["`out/config.json` is not as quantkit wrote it", "remove it"]);
    scene.write("out/config.json", config);
    // Weights of the same size, so that only their hash tells.
    let weights = scene.read("out/model.safetensors");
    let mut other = weights.clone();
    *other.last_mut().unwrap() ^= 1;
    scene.write("out/model.safetensors", other);
    scene.refused(&again, &["`out/model.safetensors` is not as quantkit wrote it"]);
    fs::remove_file(scene.path("out/model.safetensors")).unwrap();
    scene.run(&again).ok();
    assert!(scene.path("out/model.safetensors").exists() && scene.path("out/chat_template.jinja").exists());
    assert_eq!(scene.read("out/README.md"), b"card");
}

#[test]
fn a_failed_replacement_leaves_the_old_artifact() {
    let scene = Scene::tiny("llama");
    scene.tiny_run(&["rtn", "model", "-o", "out", "--no-eval"]).ok();
    scene.refused(&gptq(&["--overwrite", "--calib", "absent.txt"])[..], &["cannot read `absent.txt`"]);
}

/// Even root cannot make a folder under a file.
#[test]
fn the_parent_cannot_be_written() {
    let scene = Scene::tiny("llama");
    for out in ["calib.txt/out", "calib.txt/deep/out"] {
        let args = ["gptq", "model", "-o", out];
        scene.refused(&[&args, &TINY[..]].concat(), &["cannot write in `calib.txt", "choose another output folder"]);
    }
}

#[cfg(unix)]
#[test]
fn the_parent_may_not_be_written() {
    use std::os::unix::fs::PermissionsExt;
    let scene = Scene::tiny("llama");
    let parent = scene.path("locked");
    fs::create_dir(&parent).unwrap();
    fs::set_permissions(&parent, PermissionsExt::from_mode(0o555)).unwrap();
    if fs::write(parent.join("probe"), "").is_ok() {
        fs::remove_file(parent.join("probe")).unwrap();
        eprintln!("skipped: this user may write anywhere");
        return;
    }
    let args = ["gptq", "model", "-o", "locked/out"];
    scene.refused(&[&args, &TINY[..]].concat(), &["cannot write in `locked`", "choose another output folder"]);
}

#[test]
fn no_name_for_the_folder() {
    let scene = Scene::tiny("llama");
    for out in ["..", "/"] {
        let args = ["gptq", "model", "-o", out];
        scene.refused(&[&args, &TINY[..]].concat(), &[&format!("`{out}` exists already")]);
    }
    scene.refused(&[&["gptq", "model", "-o", "absent/.."], &TINY[..]].concat(), &["`absent/..`", "name of a folder"]);
}

/// A small file system, for as long as the value lives.
struct Disk<'a>(&'a Path);

impl<'a> Disk<'a> {
    /// `None` where the user may not mount.
    fn mount(at: &'a Path, options: &str) -> Option<Self> {
        fs::create_dir(at).unwrap();
        let done = Command::new("mount").args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(at).output();
        if done.is_ok_and(|d| d.status.success()) {
            return Some(Self(at));
        }
        eprintln!("skipped: no file system can be mounted here");
        None
    }

    fn remount(&self, options: &str) {
        let done = Command::new("mount").args(["-o", &format!("remount,{options}")]).arg(self.0).status();
        assert!(done.unwrap().success());
    }
}

impl Drop for Disk<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0).status();
    }
}

#[test]
fn the_disk_is_full() {
    let scene = Scene::tiny("llama");
    let path = scene.path("disk");
    let Some(_disk) = Disk::mount(&path, "size=4m") else { return };
    for out in ["disk/out", "disk/new/deep/out"] {
        let args = ["gptq", "model", "-o", out];
        scene.refused(&[&args, &TINY[..]].concat(), &["the output needs", "MB free", "make room"]);
    }
}

/// The disk takes block 0 and no more; finished blocks are not lost.
#[test]
fn the_disk_fills_up() {
    let scene = Scene::tiny("llama");
    let path = scene.path("disk");
    // Itself, output and work folders, job.json, a block of one folder and three files, and one to spare.
    let Some(disk) = Disk::mount(&path, "size=64m,nr_inodes=10") else { return };
    let args = tiny_args(&["gptq", "model", "-o", "disk/out", "--no-eval"]);
    let ran = scene.run(&args).ended(2).says(&["gptq 1/2", "No space left on device", "--resume goes on"]);
    assert!(ran.stderr.lines().any(|line| line.starts_with("error: cannot write `disk/")), "{}", ran.stderr);
    let left: Vec<String> = listing(&path).into_keys().filter(|name| !name.contains('/')).collect();
    assert_eq!(left, [".out.quantkit-work"]);

    // What finished blocks hold is not asked for again.
    disk.remount("nr_inodes=1000");
    scene.write("disk/.out.quantkit-work/block-00000/padding", vec![0; 40 << 20]);
    scene.write("disk/other", vec![0; 15 << 20]);
    scene.run(&[&args[..], &["--resume"]].concat()).ok().says(&["model.layers.0 restored"]);
    let left: Vec<String> = listing(&path).into_keys().filter(|name| !name.contains('/')).collect();
    assert_eq!(left, ["other", "out"]);
}

/// Files may have no more than some bytes: those of blocks and those of the artifact are written under other names first, and
/// the user asked for none of these.
#[cfg(unix)]
#[test]
fn errors_name_the_folder_that_was_asked_for() {
    let scene = Scene::tiny("llama");
    let weights = {
        scene.tiny_run(&["rtn", "model", "-o", "out", "--no-eval"]).ok();
        fs::metadata(scene.path("out/model.safetensors")).unwrap().len()
    };
    fs::remove_dir_all(scene.path("out")).unwrap();
    let program = env!("CARGO_BIN_EXE_quantkit");
    // In units of 512 bytes: less than a block, and a little less than the artifact.
    for limit in [8, weights / 512 - 2] {
        let run = format!("trap '' XFSZ; ulimit -f {limit}; exec {program} rtn model -o out --no-eval --group-size 32");
        let done = Command::new("sh").args(["-c", &run]).current_dir(scene.root()).output().unwrap();
        let said = String::from_utf8(done.stderr).unwrap();
        assert_eq!(done.status.code(), Some(2), "{said}");
        let error = said.lines().find(|line| line.starts_with("error: ")).unwrap();
        assert!(error.contains("`out/"), "{error}");
        assert!(!error.contains("partial") && !error.contains("quantkit-work"), "{error}");
        assert!(!scene.path("out").exists());
        let _ = fs::remove_dir_all(scene.path(".out.quantkit-work"));
    }
}
