//! The commands on a CUDA device.

use std::path::Path;

use super::run;
use crate::support::command::{Ran, command};
use crate::support::emulator;
use crate::support::scene::{Scene, tiny_args};

const GPTQ: [&str; 10] =
    ["gptq", "--bits", "4", "--calib", "calib.txt", "--nsamples", "8", "--seqlen", "128", "--no-eval"];

/// Whole runs part ways at the first weight between two codes (see `calibration.rs`): their codes differ, their
/// quality may not.
#[test]
fn gptq_is_as_good_as_on_the_cpu() {
    let scene = Scene::demo();
    for (more, kind) in [(&[][..], "default"), (&["--drift-correction", "--desc-act"][..], "drift, activation order")] {
        let on = |device: &str| {
            let args = [&GPTQ[..], &["--device", device, "-o", "out", "--overwrite"], more].concat();
            run(&scene, &args, true, &[]).ok();
            // The device measures other artifacts, in `scaled_and_8_bit_artifacts`.
            let args = ["eval", "ppl", "out", "--text", "eval.txt", "--max-windows", "8", "--json"];
            scene.run(&args).ok().json()["perplexity"].as_f64().unwrap()
        };
        let (host, device) = (on("cpu"), on("cuda:0"));
        assert!((device / host - 1.0).abs() < 1e-2, "{kind}: {device} against {host}");
    }
}

/// The artifact does not depend on how many devices calibrate, nor on the order of the emulator's threads.
#[test]
fn devices_and_schedules_give_the_same_bytes() {
    if emulator::on_gpu() {
        return;
    }
    let scene = Scene::tiny("llama");
    type Setting<'a> = (&'a str, &'a str, &'a [(&'a str, &'a str)]);
    let settings: [Setting; 4] = [
        ("cuda:0", "one", &[]),
        ("cuda:0,1", "two", &[("QUANTKIT_EMULATOR_DEVICES", "2")]),
        ("cuda", "three", &[("QUANTKIT_EMULATOR_DEVICES", "3"), ("QUANTKIT_EMULATOR_SCHEDULE", "lazy")]),
        ("cuda:0", "random", &[("QUANTKIT_EMULATOR_ORDER", "random"), ("QUANTKIT_EMULATOR_SCHEDULE", "lazy")]),
    ];
    let mut weights = Vec::new();
    // Devices take 4096 tokens at a time: three batches.
    for (device, out, settings) in settings {
        let args = tiny_args(&["gptq", "-o", out, "--device", device, "--nsamples", "257"]);
        run(&scene, &[&args[..], &["model"]].concat(), true, settings).ok().says(&["CPU emulator of CUDA"]);
        weights.push(scene.read(&format!("{out}/model.safetensors")));
    }
    assert!(weights.windows(2).all(|pair| pair[0] == pair[1]));
    // Scales of a cache are tried on batches of every device: here two.
    let scales = |device: &str, out: &str, settings| {
        let more = ["--kv-cache", "fp8-per-head", "--nsamples", "129", "-o", out, "--device", device];
        let args =
            [&["smoothquant", "model", "--calib", "calib.txt", "--seqlen", "32", "--no-eval"], &more[..]].concat();
        run(&scene, &args, true, settings).ok();
        scene.read(&format!("{out}/model.safetensors"))
    };
    let two = scales("cuda:0,1", "scales-two", &[("QUANTKIT_EMULATOR_DEVICES", "2")][..]);
    assert!(two == scales("cuda:0", "scales-one", &[]));
}

#[test]
fn own_kernels_serve_without_cublas() {
    let scene = Scene::tiny("qwen2");
    for (out, cublas) in [("with", true), ("without", false)] {
        let args = tiny_args(&["gptq", "-o", out, "--device", "cuda:0", "--json"]);
        run(&scene, &[&args[..], &["model"]].concat(), cublas, &[]).ok();
    }
    let evaluate = |out| {
        let args = ["eval", "ppl", out, "--text", "eval.txt", "--window", "32", "--max-windows", "2", "--json"];
        scene.run(&args).ok().json()["perplexity"].as_f64().unwrap()
    };
    let (with, without) = (evaluate("with"), evaluate("without"));
    assert!((with / without - 1.0).abs() < 1e-2, "{with} {without}");
}

#[test]
fn text_is_written_on_the_device() {
    let scene = Scene::demo();
    let args = ["generate", "--prompt", "It was a dark night", "--max-tokens", "16", "--ignore-eos"];
    let host = scene.run(&args).ok().stdout;
    let on = |more: &[&str]| run(&scene, &[&args[..], more].concat(), true, &[]).ok().stdout;
    assert_eq!(on(&["--device", "cuda:0"]), host);
    assert_eq!(on(&["--no-cuda-graph"]), host);
    if !emulator::on_gpu() {
        // A sequence stays on one device, however many there are.
        let two = [("QUANTKIT_EMULATOR_DEVICES", "2")];
        let ran = run(&scene, &args, true, &two).ok();
        assert_eq!(ran.stdout, host);
    }
}

#[test]
fn without_a_driver() {
    let scene = Scene::demo();
    let generate = ["generate", "--prompt", "It", "--max-tokens", "1"];
    if !emulator::on_gpu() {
        // Exit code 3: the device.
        let asked = [&generate[..], &["--device", "cuda:0"]].concat();
        scene.run(&asked).ended(3).says(&["no CUDA driver is installed"]);
        let auto = [&generate[..], &["--device", "auto"]].concat();
        let ran = scene.run(&auto).ok();
        assert!(!ran.stderr.contains("CUDA"), "{}", ran.stderr);
    }
    let missing = [&generate[..], &["--device", "cuda:99"]].concat();
    run(&scene, &missing, true, &[]).ended(3).says(&["there is no device 99; there are cuda:0"]);
    for (name, why) in [("gpu", "known are auto, cpu"), ("cuda:", "known are auto, cpu"), ("cuda:1,1", "named twice")] {
        scene.run(&[&generate[..], &["--device", name]].concat()).ended(2).says(&[why]);
    }
}

#[test]
fn drivers_that_are_too_old_and_memory_that_is_too_small() {
    if emulator::on_gpu() {
        return;
    }
    let scene = Scene::demo();
    let generate = ["generate", "--prompt", "It", "--max-tokens", "1", "--device"];
    let old = [("QUANTKIT_EMULATOR_DRIVER", "12010")];
    let on = |device, settings: &[(&str, &str)]| run(&scene, &[&generate[..], &[device]].concat(), true, settings);
    on("cuda:0", &old).ended(3).says(&["the CUDA driver is too old: it knows CUDA 12.1, and 12.2 is needed"]);
    on("auto", &old).ok().says(&["computing on the CPU: the CUDA driver is too old"]);
    let none = [("QUANTKIT_EMULATOR_DEVICES", "0")];
    on("cuda", &none).ended(3).says(&["the CUDA driver finds no device"]);
    for (megabytes, what) in [("1", "MB more are needed"), ("2", "the driver needs more for the kernels")] {
        on("cuda:0", &[("QUANTKIT_EMULATOR_MEMORY_MB", megabytes)]).ended(3).says(&[
            "error: too little device memory (another --device may fit): ",
            "out of memory",
            what,
            "are free",
        ]);
    }
    assert!(!scene.path("device").exists());
}

/// Scaling, and products of bytes and of E4M3 numbers: equal in quality, and read back on the device to the digit
/// that the run told.
#[test]
fn scaled_and_8_bit_artifacts() {
    let scene = Scene::tiny("qwen2");
    let texts = ["--calib", "calib.txt", "--nsamples", "4", "--seqlen", "32"];
    let commands: [(&str, &[&str]); 5] = [
        ("awq", &["awq", "--group-size", "32", "--search-tokens", "64"]),
        ("int8", &["smoothquant", "--search-tokens", "64", "--kv-cache", "fp8"]),
        ("fp8", &["fp8", "--weights", "tensor", "--static-activations"]),
        ("fp8-gptq", &["fp8", "--rounding", "gptq"]),
        ("blocks", &["fp8", "--weights", "block", "--format", "fp8", "--kv-cache", "fp8"]),
    ];
    for (name, command) in commands {
        let on = |device: &str| {
            let more = ["model", "-o", name, "--overwrite", "--device", device, "--json"];
            let measured = ["--eval-text", "eval.txt", "--eval-windows", "2"];
            let result = run(&scene, &[command, &more, &texts, &measured].concat(), true, &[]).ok().json();
            let after = result["perplexity_after"]["perplexity"].as_f64().unwrap();
            let read = ["eval", "ppl", name, "--text", "eval.txt", "--max-windows", "2", "--device", device, "--json"];
            let again = run(&scene, &read, true, &[]).ok().json();
            assert_eq!(again["perplexity"].as_f64().unwrap(), after, "{name} {device}");
            after
        };
        let (host, device) = (on("cpu"), on("cuda:0"));
        assert!((device / host - 1.0).abs() < 1e-2, "{name}: {device} against {host}");
    }
}

/// The device calibrates, codes are chosen on the CPU.
#[test]
fn gguf_with_error_feedback() {
    let scene = Scene::demo();
    let on = |device: &str| {
        let args = ["gguf", "--type", "Q4_0", "--error-feedback", "--calib", "calib.txt", "--chunks", "2"];
        let out = format!("{}.gguf", device.replace(':', ""));
        run(&scene, &[&args[..], &["-o", &out, "--device", device]].concat(), true, &[]).ok();
        let args = ["eval", "ppl", &out, "--text", "eval.txt", "--max-windows", "8", "--json"];
        scene.run(&args).ok().json()["perplexity"].as_f64().unwrap()
    };
    let (host, device) = (on("cpu"), on("cuda:0"));
    assert!((device / host - 1.0).abs() < 1e-2, "{device} against {host}");
}

/// The first cuBLAS serves that can be loaded, has a version that fits, and starts with this driver, wherever it is in the
/// path. The records name the one that serves; where none does, the program says why.
#[test]
fn only_a_cublas_that_fits() {
    if emulator::on_gpu() {
        return;
    }
    let scene = Scene::tiny("llama");
    let folder = |name: &str| {
        let path = scene.path(name);
        std::fs::create_dir(&path).unwrap();
        path
    };
    let [old, broken, lacking, last] = ["old", "broken", "lacking", "last"].map(folder);
    // Any call but that for the version ends the process.
    emulator::broken_cublas(&old.join("libcublas.so"), [11, 11, 3], true);
    emulator::broken_cublas(&broken.join("libcublas.so.13"), [13, 1, 0], false);
    emulator::cublas_without_its_library(&lacking.join("libcublas.so.12"), "libgone.so.1");
    // Loading it ends the process.
    emulator::library(
        &last.join("libcublas.so.12"),
        "__attribute__((constructor)) void load() { __builtin_trap(); }",
        &[],
    );
    let gptq = |out: &str, first: &Path, cublas: bool| {
        let path = std::env::join_paths([first, &emulator::library_path(cublas)]).unwrap();
        let args = tiny_args(&["gptq", "-o", out, "--no-eval", "--device", "cuda:0", "model"]);
        let mut command = command(scene.root(), &args);
        let ran = Ran::new(command.env("LD_LIBRARY_PATH", path).output().unwrap(), &args).ok();
        (ran, scene.read(&format!("{out}/model.safetensors")))
    };
    let emulated = "device: cuda:0 (CPU emulator of CUDA (no GPU)); cuBLAS 13.0.0";
    let why = "no cuBLAS: libcublas.so is version 11.11.3, and 12 or 13 is needed";
    let (ran, with) = gptq("newer", &old, true);
    ran.says(&[emulated]);
    assert!(String::from_utf8(scene.read("newer/quantkit.json")).unwrap().contains("(no GPU), cuBLAS 13.0.0\""));
    let (ran, without) = gptq("none", &old, false);
    ran.says(&[why]);
    assert!(String::from_utf8(scene.read("none/quantkit.json")).unwrap().contains("(no GPU)\""));
    // The next one is tried.
    let (ran, other) = gptq("next", &broken, true);
    ran.says(&[emulated]);
    assert!(other == with);
    let (ran, other) = gptq("unstarted", &broken, false);
    ran.says(&["no cuBLAS: libcublas.so.13 13.1.0 does not start: CUBLAS_STATUS_NOT_INITIALIZED"]);
    assert!(other == without);
    let (ran, other) = gptq("lacks", &lacking, false);
    ran.says(&["no cuBLAS: libcublas.so.12 cannot be loaded: libgone.so.1: cannot open shared object file"]);
    assert!(other == without);
    // No other is opened where the first serves.
    let (ran, other) = gptq("first", &last, true);
    ran.says(&[emulated]);
    assert!(other == with);
    let (ran, other) = gptq("plain", scene.root(), false);
    ran.says(&["no cuBLAS: it is not installed"]);
    assert!(other == without);
}
