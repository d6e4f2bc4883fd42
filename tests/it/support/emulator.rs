//! Builds the CPU emulator of CUDA (`tests/cuda_emulator`) with the kernels of `kernels/` in it, and puts it in the
//! place of the driver. With `QUANTKIT_TEST_GPU=1` the machine's own driver serves instead.

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_long};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock};
use std::{env, fs, io};

use libloading::Library;
use regex::Regex;
use sha2::{Digest, Sha256};

/// Sums are never contracted: what the kernels fuse, they fuse by name. `-mtls-dialect=gnu2` must not be added:
/// glibc 2.36 then loses vector registers.
const FLAGS: &[&str] =
    &["-std=c++17", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-ffp-contract=off", "-w"];
/// The twins of the tensor cores and cuBLAS are the emulator's own arithmetic: as fast as it gets.
const FAST: &[(&str, &[&str])] =
    &[("tensor", &["-O3", "-ffp-contract=fast"]), ("cublas", &["-O3", "-ffp-contract=fast"])];
/// Out-of-range indices of static arrays, misaligned vectors, and accesses to shared memory that no barrier orders; the
/// emulator has the functions that the instrumentation calls.
const CHECKED: &[&str] =
    &["-O1", "-fsanitize=bounds,alignment", "-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"];

/// Whether the tests use the machine's GPU.
pub fn on_gpu() -> bool {
    env::var("QUANTKIT_TEST_GPU").is_ok_and(|v| v == "1")
}

/// Loads the emulator as this process's CUDA driver, once, before the first CUDA call. Settings in the
/// environment (`QUANTKIT_EMULATOR_...`, see its README) are those the process was started with.
pub fn preload() {
    if !on_gpu() {
        loaded();
    }
}

/// A folder with the emulator under the names of the driver and of cuBLAS, for `LD_LIBRARY_PATH` of child
/// processes; with `cublas: false` it has the driver alone.
pub fn library_path(cublas: bool) -> PathBuf {
    built(checked()).join(if cublas { "cublas" } else { "plain" })
}

/// PTX without code that declares the entries of a kernel file, for `cuModuleLoadData`.
pub fn ptx_of(file: &str) -> String {
    let file = CString::new(file).unwrap();
    let mut text = vec![0u8; 1 << 20];
    // SAFETY: the function has this signature and writes at most as many bytes as it is told.
    let length = unsafe {
        let describe =
            loaded().get::<unsafe extern "C" fn(*const c_char, *mut c_char, usize) -> usize>(b"emu_ptx_of").unwrap();
        describe(file.as_ptr(), text.as_mut_ptr().cast(), text.len())
    };
    text.truncate(length);
    String::from_utf8(text).unwrap()
}

/// What the emulator reported last, or nothing.
pub fn last_report() -> String {
    let mut text = [0 as c_char; 1024];
    // SAFETY: the function has this signature and writes a text that ends with a zero byte, in the room it is told.
    unsafe {
        let report = loaded().get::<unsafe extern "C" fn(*mut c_char, usize)>(b"emu_last_report").unwrap();
        report(text.as_mut_ptr(), text.len());
        CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned()
    }
}

/// Lets `count` allocations of device memory fail, the first of them the `first` from now on, from 1; making a graph
/// executable is one too. They are those of the whole process.
pub fn fail_allocations(first: usize, count: usize) {
    // SAFETY: the function has this signature.
    unsafe {
        let fail = loaded().get::<unsafe extern "C" fn(c_long, c_long)>(b"emu_fail_allocations").unwrap();
        fail(first as c_long, count as c_long);
    }
}

/// Allocations of device memory since then.
pub fn allocations() -> usize {
    // SAFETY: the function has this signature.
    unsafe { loaded().get::<unsafe extern "C" fn() -> c_long>(b"emu_allocations").unwrap()() as usize }
}

/// Bytes of the first device that are allocated.
pub fn allocated() -> usize {
    // SAFETY: the function has this signature.
    unsafe { loaded().get::<unsafe extern "C" fn(c_int) -> usize>(b"emu_allocated").unwrap()(0) }
}

/// Writes a library that calls itself cuBLAS of a version and does not work: creating a handle fails, or where `traps`
/// ends the process.
pub fn broken_cublas(file: &Path, [major, minor, patch]: [u32; 3], traps: bool) {
    let create = if traps { "__builtin_trap();" } else { "return 1;" };
    let text = format!(
        "extern \"C\" int cublasGetProperty(int which, int* value) {{ \
         return *value = which == 0 ? {major} : which == 1 ? {minor} : {patch}, 0; }}\n\
         extern \"C\" int cublasCreate_v2(void**) {{ {create} }}\n\
         extern \"C\" void cublasDestroy_v2() {{ __builtin_trap(); }}\n\
         extern \"C\" void cublasSetStream_v2() {{ __builtin_trap(); }}\n\
         extern \"C\" void cublasGemmEx() {{ __builtin_trap(); }}\n\
         extern \"C\" void cublasSgemm_v2() {{ __builtin_trap(); }}\n"
    );
    library(file, &text, &[]);
}

/// Writes a library that calls itself cuBLAS and cannot be loaded, because another one of the name `needed`, which it
/// links, is gone.
pub fn cublas_without_its_library(file: &Path, needed: &str) {
    let gone = file.with_file_name(needed);
    library(&gone, "", &[]);
    library(file, "", &["-Wl,--no-as-needed".as_ref(), gone.as_os_str()]);
    fs::remove_file(gone).unwrap();
}

/// Makes a library of some C++, with more arguments of the linker; its name is also its soname.
pub fn library(file: &Path, text: &str, more: &[&OsStr]) {
    let source = file.with_extension("cpp");
    write(&source, text).unwrap();
    let name = format!("-Wl,-soname,{}", file.file_name().unwrap().display());
    output(compiler().args(["-shared", "-fPIC", &name, "-o"]).arg(file).arg(&source).args(more)).unwrap();
}

/// Builds the emulator with its checks, so that no process that has a time limit needs to.
pub fn build_checked() {
    built(true);
}

/// Whether the kernels are to be built with checks of indices and alignment.
fn checked() -> bool {
    env::var("QUANTKIT_EMULATOR_CHECKED").is_ok_and(|v| v == "1")
}

/// The loaded emulator; it stays for the life of the process.
fn loaded() -> &'static Library {
    static LOADED: OnceLock<(Library, Vec<Library>)> = OnceLock::new();
    let (driver, _) = LOADED.get_or_init(|| {
        let folder = library_path(true);
        // By absolute path; a later dlopen("libcuda.so") finds what is loaded by its soname.
        // SAFETY: the library's initialisers register kernels and do nothing else.
        let driver = unsafe { Library::new(folder.join("libcuda.so")) }.unwrap();
        let wanted = env::var("QUANTKIT_EMULATOR_CUBLAS").map_or(true, |v| v != "0");
        // By the names under which quantkit and cudarc look for it.
        let names = if wanted { &["libcublas.so.13", "libcublas.so"][..] } else { &[] };
        // SAFETY: empty libraries that depend on the one just loaded.
        let cublas = names.iter().map(|name| unsafe { Library::new(folder.join(name)) }.unwrap()).collect();
        (driver, cublas)
    });
    driver
}

// ---- Building: objects are kept by the hash of all that went into them, libraries by that of their objects.

/// One compilation.
struct Unit {
    name: String,
    source: PathBuf,
    flags: Vec<String>,
    kernels: bool,
}

/// The folder with the finished libraries.
fn built(checked: bool) -> PathBuf {
    static PLAIN: OnceLock<PathBuf> = OnceLock::new();
    static CHECKED: OnceLock<PathBuf> = OnceLock::new();
    let cell = if checked { &CHECKED } else { &PLAIN };
    cell.get_or_init(|| build(checked).unwrap_or_else(|e| panic!("the CUDA emulator could not be built: {e}"))).clone()
}

fn build(checked: bool) -> Result<PathBuf, String> {
    let version = output(compiler().arg("--version")).map_err(|e| {
        format!("{e}\nIt needs g++ 11 or later (set CXX for another name). Debian: apt-get install g++")
    })?;
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let units = units(root, checked)?;
    // What any unit may include.
    let mut common = Sha256::new();
    common.update(&version);
    for header in files(
        &[&root.join("tests/cuda_emulator"), &root.join("tests/cuda_emulator/include"), &root.join("kernels")],
        &["h", "cuh"],
    )? {
        common.update(read(&header)?);
    }
    let work = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-emulator");
    fs::create_dir_all(work.join("objects")).map_err(|e| format!("{}: {e}", work.display()))?;

    // Of several test processes one builds, and the others take what it made.
    let lock = fs::File::create(work.join("lock")).map_err(|e| format!("{}: {e}", work.display()))?;
    lock.lock().map_err(|e| format!("{}: {e}", work.display()))?;
    let objects = compile(&units, &common, &work.join("objects"))?;
    let mut all = Sha256::new();
    for object in &objects {
        all.update(object.as_os_str().as_encoded_bytes());
    }
    let folder = work.join(hex(all));
    if !folder.is_dir() {
        link(&objects, &folder)?;
    }
    Ok(folder)
}

/// The emulator's files, then the kernel files and the emulator's own test kernels.
fn units(root: &Path, checked: bool) -> Result<Vec<Unit>, String> {
    let emulator = root.join("tests/cuda_emulator");
    let mut common: Vec<String> = FLAGS.iter().map(|f| f.to_string()).collect();
    for folder in [emulator.join("include"), root.join("kernels")] {
        common.push(format!("-I{}", folder.display()));
    }
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
        common.push("-march=x86-64-v3".into());
    }
    let unit = |source: PathBuf, kernels: bool| {
        let name = source.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let mut flags = common.clone();
        if kernels {
            flags.extend(["-include", "cuda_emulator.h"].map(String::from));
            flags.extend(checked.then_some(CHECKED).into_iter().flatten().map(|f| f.to_string()));
        } else if let Some((_, more)) = FAST.iter().find(|(fast, _)| *fast == name) {
            flags.extend(more.iter().map(|f| f.to_string()));
        }
        Unit { name, source, flags, kernels }
    };
    let own = files(&[&emulator], &["cpp"])?.into_iter().map(|f| unit(f, false));
    let kernels = files(&[&root.join("kernels"), &emulator], &["cu"])?.into_iter().map(|f| unit(f, true));
    // The long ones first.
    Ok(kernels.chain(own).collect())
}

/// Compiles what has not been, on as many threads as there are processors.
fn compile(units: &[Unit], common: &Sha256, objects: &Path) -> Result<Vec<PathBuf>, String> {
    let todo = Mutex::new(units.iter().enumerate());
    let done: Vec<OnceLock<Result<PathBuf, String>>> = units.iter().map(|_| OnceLock::new()).collect();
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()) {
            scope.spawn(|| {
                loop {
                    let next = todo.lock().unwrap().next();
                    let Some((i, unit)) = next else { break };
                    done[i].set(object(unit, common, objects)).unwrap();
                }
            });
        }
    });
    done.into_iter().map(|result| result.into_inner().unwrap()).collect()
}

fn object(unit: &Unit, common: &Sha256, objects: &Path) -> Result<PathBuf, String> {
    let mut hash = common.clone();
    hash.update(unit.flags.join(" "));
    hash.update(&unit.name);
    hash.update(read(&unit.source)?);
    let object = objects.join(format!("{}-{}.o", unit.name, hex(hash)));
    if object.is_file() {
        return Ok(object);
    }
    // Written under another name first: a build that is interrupted leaves no half of an object.
    let scratch = objects.join(format!("{}-{}.cpp", unit.name, std::process::id()));
    let unfinished = scratch.with_extension("o");
    let mut source = &unit.source;
    if unit.kernels {
        let include = format!("#include \"{}\"\n", unit.source.display());
        write(&scratch, &include)?;
        let mut scan = compiler();
        let preprocessed = output(scan.args(&unit.flags).args(["-E", "-P", "-DEMU_SCAN"]).arg(&scratch))?;
        let mut text = format!("#define EMU_FILE \"{}\"\n{include}", unit.name);
        for kernel in kernels(&String::from_utf8_lossy(&preprocessed)) {
            text += &format!("EMU_REGISTER({kernel})\n");
        }
        write(&scratch, &text)?;
        source = &scratch;
    }
    output(compiler().args(&unit.flags).arg("-c").arg(source).arg("-o").arg(&unfinished))?;
    fs::remove_file(&scratch).ok();
    fs::rename(&unfinished, &object).map_err(|e| format!("{}: {e}", object.display()))?;
    Ok(object)
}

/// Names of the kernels in preprocessed text, in which macros have been expanded.
fn kernels(text: &str) -> Vec<&str> {
    let pattern = Regex::new(r"\bemu_kernel_follows\s+(?:void\s+)?(\w+)\s*\(").unwrap();
    let mut names: Vec<&str> = pattern.captures_iter(text).map(|found| found.get(1).unwrap().as_str()).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// The emulator with the driver's soname, and empty libraries with cuBLAS's sonames that depend on it.
fn link(objects: &[PathBuf], folder: &Path) -> Result<(), String> {
    let scratch = folder.with_extension(std::process::id().to_string());
    let (with, without) = (scratch.join("cublas"), scratch.join("plain"));
    for place in [&with, &without] {
        fs::create_dir_all(place).map_err(|e| format!("{}: {e}", place.display()))?;
    }
    output(
        compiler()
            .args(["-shared", "-pthread", "-Wl,-soname,libcuda.so", "-Wl,-z,defs", "-o"])
            .arg(with.join("libcuda.so"))
            .args(objects),
    )?;
    let empty = scratch.join("empty.cpp");
    write(&empty, "")?;
    for name in ["libcublas.so", "libcublas.so.13", "libcublas.so.12"] {
        output(
            compiler()
                .args(["-shared", "-fPIC", "-Wl,--no-as-needed", "-nostdlib"])
                .arg(format!("-Wl,-soname,{name}"))
                .arg("-o")
                .arg(with.join(name))
                .arg(&empty)
                .arg(format!("-L{}", with.display()))
                .arg("-lcuda"),
        )?;
    }
    fs::copy(with.join("libcuda.so"), without.join("libcuda.so")).map_err(|e| format!("libcuda.so: {e}"))?;
    for place in [&with, &without] {
        std::os::unix::fs::symlink("libcuda.so", place.join("libcuda.so.1"))
            .map_err(|e| format!("libcuda.so.1: {e}"))?;
    }
    // Somebody else may have been quicker.
    if fs::rename(&scratch, folder).is_err() {
        fs::remove_dir_all(&scratch).ok();
    }
    if folder.is_dir() { Ok(()) } else { Err(format!("{} could not be made", folder.display())) }
}

fn compiler() -> Command {
    Command::new(env::var("CXX").unwrap_or_else(|_| "g++".into()))
}

/// The output of a command that succeeds.
fn output(command: &mut Command) -> Result<Vec<u8>, String> {
    let line = format!("{command:?}").replace('"', "");
    let result = match command.output() {
        Ok(result) => result,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Err(format!("`{}` was not found", command.get_program().to_string_lossy()));
        }
        Err(e) => return Err(format!("{}: {e}", line)),
    };
    let words = String::from_utf8_lossy(&result.stderr).into_owned();
    if result.status.success() { Ok(result.stdout) } else { Err(format!("{}\n{words}", line)) }
}

/// Files with one of the extensions in the folders themselves, sorted.
fn files(folders: &[&Path], extensions: &[&str]) -> Result<Vec<PathBuf>, String> {
    let mut found = Vec::new();
    for folder in folders {
        for entry in fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))? {
            let path = entry.map_err(|e| format!("{}: {e}", folder.display()))?.path();
            if path.extension().is_some_and(|e| extensions.iter().any(|wanted| e == *wanted)) {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|e| format!("{}: {e}", path.display()))
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()))
}

fn hex(hash: Sha256) -> String {
    hash.finalize().iter().take(12).map(|byte| format!("{byte:02x}")).collect()
}
