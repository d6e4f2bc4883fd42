//! Mistakes: each is reported with kernel, block and thread, and gives the driver's error.

use CUresult::*;

use super::*;

pub const CASES: &[Case] = &[
    ("past_the_end", past_the_end),
    ("on_many_threads", on_many_threads),
    ("into_the_slack", into_the_slack),
    ("into_the_slack_of_another", into_the_slack_of_another),
    ("before_the_start", before_the_start),
    ("freed", freed),
    ("null_pointer", null_pointer),
    ("dynamic_shared", || write_shared(300, 1024)),
    ("dynamic_shared_slack", || write_shared(250, 1000)),
    ("divergent_barrier", || fails("emu_divergent_barrier", CUDA_ERROR_LAUNCH_FAILED)),
    ("different_collectives", || fails("emu_different_collectives", CUDA_ERROR_LAUNCH_FAILED)),
    ("shuffle_outside", || fails("emu_shuffle_outside", CUDA_ERROR_LAUNCH_FAILED)),
    ("outside_mask", || fails("emu_outside_mask", CUDA_ERROR_LAUNCH_FAILED)),
    ("misaligned_copy", misaligned_copy),
    ("assertion", assertion),
    ("endless_stack", endless_stack),
    ("static_shared", static_shared),
    ("misaligned_vector", misaligned_vector),
    ("uncleared_shared", uncleared_shared),
    ("host_pointer", host_pointer),
    ("bad_launches", bad_launches),
    ("bad_ranges", bad_ranges),
    ("drift", drift),
    ("out_of_memory", out_of_memory),
    ("no_device", no_device),
    ("old_driver", old_driver),
    ("racy_reverse", || races("emu_racy_reverse", true)),
    ("race_write_write", || races("emu_race_write_write", false)),
    ("race_read_write", || races("emu_race_read_write", false)),
    ("race_bytes", || races("emu_race_bytes", false)),
    ("race_in_warp", || races("emu_race_in_warp", false)),
    ("race_across_warps", || races("emu_race_across_warps", false)),
    ("race_atomic", || races("emu_race_atomic", false)),
    ("race_copy_not_awaited", || races("emu_race_copy_not_awaited", true)),
    ("race_copy_without_barrier", || races("emu_race_copy_without_barrier", true)),
    ("race_ring", || races("emu_race_ring", true)),
    ("race_ldmatrix", || races("emu_race_ldmatrix", false)),
];

/// Runs the case in a child and looks for all of `words` in what it reports.
fn reports(case: &str, settings: &[(&str, &str)], words: &[&str]) {
    let text = in_child(case, settings);
    for word in words {
        assert!(text.contains(word), "{case}: `{word}` is not in\n{text}");
    }
}

/// The launch gives `code`, and so does everything after it.
fn stays(gpu: &Gpu, launched: CUresult, code: CUresult) {
    assert_eq!(launched, code);
    assert_eq!(gpu.context.synchronize().unwrap_err().0, code);
    // SAFETY: refused.
    assert_eq!(unsafe { result::malloc_sync(16) }.unwrap_err().0, code);
}

/// A kernel whose one parameter is a place for 32 floats.
fn fails(kernel: &str, code: CUresult) {
    let gpu = Gpu::open(0);
    let out = device(&[0f32; 32]);
    stays(&gpu, gpu.launch(kernel, 1, 32, 0, &[Pointer(out)]), code);
}

#[test]
fn writes_past_the_end() {
    let place = "kernel emu_write_at block (0,0,0) thread (0,0,0)";
    reports(
        "past_the_end",
        &[],
        &["illegal address: write of", "112 bytes past the end of an allocation of 400 bytes", place],
    );
    reports("past_the_end", &[("SCHEDULE", "lazy")], &["112 bytes past the end of an allocation of 400 bytes", place]);
}

fn past_the_end() {
    let gpu = Gpu::open(0);
    let out = device(&[0f32; 100]);
    let launched = gpu.launch("emu_write_at", 1, 1, 0, &[Pointer(out), Long(128)]);
    if env::var("QUANTKIT_EMULATOR_SCHEDULE").is_ok() {
        // The launch itself succeeds when it is only queued.
        assert_eq!(launched, CUDA_SUCCESS);
        assert_eq!(gpu.context.synchronize().unwrap_err().0, CUDA_ERROR_ILLEGAL_ADDRESS);
    } else {
        stays(&gpu, launched, CUDA_ERROR_ILLEGAL_ADDRESS);
    }
}

#[test]
fn faults_on_many_threads() {
    let words = ["illegal address: read of", "an allocation of 4000 bytes: kernel emu_add block ("];
    reports("on_many_threads", &[("THREADS", "4")], &words);
}

fn on_many_threads() {
    let gpu = Gpu::open(0);
    let (x, out) = (device(&[0f32; 1000]), device(&[0f32; 1000]));
    let add = |blocks, n| gpu.launch("emu_add", blocks, 256, 0, &[Pointer(x), Pointer(x), Pointer(out), Int(n)]);
    assert_eq!(add(4096, 1000), CUDA_SUCCESS);
    stays(&gpu, add(4096, 1 << 20), CUDA_ERROR_ILLEGAL_ADDRESS);
}

#[test]
fn writes_into_the_slack_behind() {
    reports(
        "into_the_slack",
        &[],
        &["write 0 bytes past the end of an allocation of 400 bytes, found after kernel emu_write_at"],
    );
    reports(
        "into_the_slack_of_another",
        &[],
        &["write 0 bytes past the end of an allocation of 400 bytes, found when it was freed"],
    );
}

fn into_the_slack() {
    let gpu = Gpu::open(0);
    let out = device(&[0f32; 100]);
    stays(&gpu, gpu.launch("emu_write_at", 1, 1, 0, &[Pointer(out), Long(100)]), CUDA_ERROR_ILLEGAL_ADDRESS);
}

fn into_the_slack_of_another() {
    let gpu = Gpu::open(0);
    let (out, other) = (device(&[0f32; 100]), device(&[0f32; 100]));
    let index = (other as i64 + 400 - out as i64) / 4;
    assert_eq!(gpu.launch("emu_write_at", 1, 1, 0, &[Pointer(out), Long(index)]), CUDA_SUCCESS);
    assert_eq!(free(out), CUDA_SUCCESS);
    assert_eq!(free(other), CUDA_ERROR_ILLEGAL_ADDRESS);
}

#[test]
fn writes_before_the_start() {
    reports(
        "before_the_start",
        &[],
        &["write of", "3588 bytes before an allocation of 400 bytes", "kernel emu_write_at"],
    );
}

fn before_the_start() {
    let gpu = Gpu::open(0);
    let out = device(&[0f32; 100]);
    let launched = gpu.launch("emu_write_at", 1, 1, 0, &[Pointer(out), Long(-897)]);
    stays(&gpu, launched, CUDA_ERROR_ILLEGAL_ADDRESS);
}

#[test]
fn reads_of_freed_memory_and_of_null() {
    reports(
        "freed",
        &[],
        &["illegal address: read of", "40 bytes into freed memory of 400 bytes", "kernel emu_read_at"],
    );
    reports("null_pointer", &[], &["a null pointer", "kernel emu_read_at block (0,0,0) thread (0,0,0)"]);
}

fn freed() {
    let gpu = Gpu::open(0);
    let (x, out) = (device(&[0f32; 100]), device(&[0f32]));
    assert_eq!(free(x), CUDA_SUCCESS);
    let launched = gpu.launch("emu_read_at", 1, 1, 0, &[Pointer(x), Long(10), Pointer(out)]);
    stays(&gpu, launched, CUDA_ERROR_ILLEGAL_ADDRESS);
}

fn null_pointer() {
    let gpu = Gpu::open(0);
    let out = device(&[0f32]);
    let launched = gpu.launch("emu_read_at", 1, 1, 0, &[Pointer(0), Long(10), Pointer(out)]);
    stays(&gpu, launched, CUDA_ERROR_ILLEGAL_ADDRESS);
}

#[test]
fn writes_outside_dynamic_shared_memory() {
    reports(
        "dynamic_shared",
        &[],
        &["write outside dynamic shared memory (1024 bytes) at offset 1200: kernel emu_write_shared_at"],
    );
    reports(
        "dynamic_shared_slack",
        &[],
        &["write 0 bytes past the dynamic shared memory (1000 bytes): kernel emu_write_shared_at"],
    );
}

fn write_shared(index: i64, bytes: u32) {
    let gpu = Gpu::open(0);
    let out = device(&[0f32; 1]);
    let launched = gpu.launch("emu_write_shared_at", 1, 1, bytes, &[Pointer(out), Long(index)]);
    stays(&gpu, launched, CUDA_ERROR_ILLEGAL_ADDRESS);
}

#[test]
fn lanes_that_do_not_meet() {
    for order in ["forward", "reverse", "random"] {
        let order = &[("ORDER", order)];
        reports(
            "divergent_barrier",
            order,
            &[
                "deadlock: 16 threads wait in a warp operation, 16 at __syncthreads, 0 have exited: kernel emu_divergent_barrier block (0,0,0)",
            ],
        );
        reports(
            "different_collectives",
            order,
            &["different warp operations or with different masks: kernel emu_different_collectives"],
        );
        reports("shuffle_outside", order, &["a shuffle reads a lane outside the mask", "kernel emu_shuffle_outside"]);
        reports("outside_mask", order, &["whose mask leaves it out: kernel emu_outside_mask block (0,0,0) thread ("]);
    }
}

#[test]
fn misaligned_asynchronous_copies() {
    reports("misaligned_copy", &[], &["misaligned cp.async: kernel emu_misaligned_copy block (0,0,0) thread (0,0,0)"]);
}

fn misaligned_copy() {
    let gpu = Gpu::open(0);
    let (x, out) = (device(&[0f32; 100]), device(&[0f32]));
    let launched = gpu.launch("emu_misaligned_copy", 1, 1, 1024, &[Pointer(x), Pointer(out)]);
    stays(&gpu, launched, CUDA_ERROR_MISALIGNED_ADDRESS);
}

#[test]
fn assertions_and_stack_overflow() {
    reports("assertion", &[], &["assertion failed: value == 3: kernel emu_assertion"]);
    reports("endless_stack", &[], &["stack overflow: kernel emu_endless_stack block (0,0,0) thread (0,0,0)"]);
}

fn assertion() {
    let gpu = Gpu::open(0);
    assert_eq!(gpu.launch("emu_assertion", 1, 1, 0, &[Int(3)]), CUDA_SUCCESS);
    stays(&gpu, gpu.launch("emu_assertion", 1, 1, 0, &[Int(4)]), CUDA_ERROR_ASSERT);
}

fn endless_stack() {
    let gpu = Gpu::open(0);
    let out = device(&[0f32]);
    stays(&gpu, gpu.launch("emu_endless_stack", 1, 1, 0, &[Pointer(out), Int(1)]), CUDA_ERROR_LAUNCH_FAILED);
}

#[test]
fn the_checked_build_sees_indices_and_alignment() {
    let checked = &[("CHECKED", "1")];
    reports(
        "static_shared",
        checked,
        &["index 40 outside 'float [32]' at faults.cu:", "emu_shared_overrun block (0,0,0) thread (3,0,0)"],
    );
    reports(
        "misaligned_vector",
        checked,
        &["float4' is not aligned to 16 bytes at faults.cu:", "kernel emu_misaligned_vector"],
    );
}

fn static_shared() {
    let gpu = Gpu::open(0);
    let out = device(&[0f32]);
    let launched = gpu.launch("emu_shared_overrun", 1, 32, 0, &[Pointer(out), Int(40)]);
    stays(&gpu, launched, CUDA_ERROR_ILLEGAL_ADDRESS);
}

fn misaligned_vector() {
    let gpu = Gpu::open(0);
    let (x, out) = (device(&[0f32; 100]), device(&[0f32]));
    let launched = gpu.launch("emu_misaligned_vector", 1, 1, 0, &[Pointer(x), Pointer(out)]);
    stays(&gpu, launched, CUDA_ERROR_MISALIGNED_ADDRESS);
}

/// One block of 64 threads that races for shared memory. The plain build lets it pass.
fn races(kernel: &str, reads: bool) {
    let gpu = Gpu::open(0);
    let (x, out) = (device(&[1f32; 256]), device(&[0f32; 64]));
    let values = if reads { vec![Pointer(x), Pointer(out)] } else { vec![Pointer(out)] };
    let launched = gpu.launch(kernel, 1, 64, 1024, &values);
    if env::var("QUANTKIT_EMULATOR_CHECKED").is_ok() {
        stays(&gpu, launched, CUDA_ERROR_LAUNCH_FAILED);
    } else {
        assert_eq!(launched, CUDA_SUCCESS);
    }
}

/// Each is found in every order of lanes; which of the two accesses comes second depends on the order.
#[test]
fn the_checked_build_sees_races_for_shared_memory() {
    let planted = [
        ("racy_reverse", "a read by thread 31 (warp 0) and this write of static shared memory"),
        ("race_write_write", "a write by thread 0 (warp 0) and this write of static shared memory"),
        ("race_read_write", "a write by thread 63 (warp 1) and this read of static shared memory"),
        ("race_bytes", "a read by thread 63 (warp 1) and this write of byte 32 of dynamic shared memory"),
        ("race_in_warp", "a read by thread 31 (warp 0) and this write of byte 120 of dynamic shared memory"),
        ("race_across_warps", "a read by thread 0 (warp 0) and this write of byte 128 of dynamic shared memory"),
        ("race_atomic", "a read by thread 63 (warp 1) and this atomic update of static shared memory"),
        ("race_copy_not_awaited", "an asynchronous copy under way by thread 15 (warp 0) and this read of byte 252 of"),
        (
            "race_copy_without_barrier",
            "a read by thread 0 (warp 0) and this write of byte 512 of dynamic shared memory",
        ),
        ("race_ring", "a write by thread 32 (warp 1) and this read of byte 512 of dynamic shared memory"),
        ("race_ldmatrix", "a read by thread 0 (warp 0) and this write of byte 2 of dynamic shared memory"),
    ];
    for (case, words) in planted {
        reports(case, &[("CHECKED", "1")], &["race: no barrier orders", words, "kernel emu_rac"]);
        for order in ["reverse", "random"] {
            reports(case, &[("CHECKED", "1"), ("ORDER", order)], &["race: no barrier orders", "kernel emu_rac"]);
        }
    }
    // The plain build sees none of them: the result is right.
    in_child("race_read_write", &[]);
}

#[test]
fn static_shared_memory_is_not_cleared() {
    in_child("uncleared_shared", &[("CHECKED", "1")]);
}

fn uncleared_shared() {
    let gpu = Gpu::open(0);
    let out = device(&[0f32; 32]);
    assert_eq!(gpu.launch("emu_uncleared", 3, 32, 0, &[Pointer(out)]), CUDA_SUCCESS);
    assert!(host::<f32>(out, 32).iter().all(|v| v.is_nan()));
}

#[test]
fn host_pointers_are_no_device_pointers() {
    let words = ["parameter 0 points at 0x", "which is neither device nor pinned memory: kernel emu_scale"];
    reports("host_pointer", &[], &words);
}

fn host_pointer() {
    let gpu = Gpu::open(0);
    let mut x = [1f32; 8];
    let place = x.as_mut_ptr() as CUdeviceptr;
    let launched = gpu.launch("emu_scale", 1, 32, 0, &[Pointer(place), Float(2.0), Int(8)]);
    stays(&gpu, launched, CUDA_ERROR_ILLEGAL_ADDRESS);
}

#[test]
fn bad_launches_are_refused() {
    let words = ["block (2048,1,1)", "grid (0,1,1)", "50000 bytes of dynamic shared memory, the limit set is 49152"];
    reports("bad_launches", &[], &words);
    reports("bad_launches", &[], &["parameter 0 is a null pointer", "module has been unloaded"]);
}

fn bad_launches() {
    let gpu = Gpu::open(0);
    assert_eq!(gpu.launch("emu_nothing", 1, 2048, 0, &[]), CUDA_ERROR_INVALID_VALUE);
    assert_eq!(gpu.launch("emu_nothing", 0, 32, 0, &[]), CUDA_ERROR_INVALID_VALUE);
    assert_eq!(gpu.launch("emu_nothing", 1, 32, 50_000, &[]), CUDA_ERROR_INVALID_VALUE);
    // SAFETY: handles of this module; the emulator refuses what is wrong.
    unsafe {
        let nothing = result::module::get_function(gpu.module, c"emu_nothing".into()).unwrap();
        let limit = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        assert!(result::function::set_function_attribute(nothing, limit, 99 * 1024 + 1).is_err());
        result::function::set_function_attribute(nothing, limit, 99 * 1024).unwrap();
        assert_eq!(gpu.launch("emu_nothing", 1, 32, 50_000, &[]), CUDA_SUCCESS);

        let scale = result::module::get_function(gpu.module, c"emu_scale".into()).unwrap();
        let mut missing = [std::ptr::null_mut(); 3];
        let launched = result::launch_kernel(scale, (1, 1, 1), (32, 1, 1), 0, NULL_STREAM, &mut missing);
        assert_eq!(launched.unwrap_err().0, CUDA_ERROR_INVALID_VALUE);

        result::module::unload(gpu.module).unwrap();
        let launched = result::launch_kernel(nothing, (1, 1, 1), (32, 1, 1), 0, NULL_STREAM, &mut []);
        assert_eq!(launched.unwrap_err().0, CUDA_ERROR_INVALID_HANDLE);
    }
    // None of these stays.
    gpu.context.synchronize().unwrap();
}

#[test]
fn bad_ranges_are_refused() {
    let words =
        ["copy from the device: 404 bytes from", "memset: 401 bytes from", "which is not the start of an allocation"];
    reports("bad_ranges", &[], &words);
}

fn bad_ranges() {
    let gpu = Gpu::open(0);
    let x = device(&[0f32; 100]);
    let mut long = vec![0f32; 101];
    // SAFETY: refused.
    unsafe {
        assert_eq!(result::memcpy_dtoh_sync(&mut long, x).unwrap_err().0, CUDA_ERROR_INVALID_VALUE);
        assert_eq!(result::memcpy_htod_sync(x + 4, &long[..100]).unwrap_err().0, CUDA_ERROR_INVALID_VALUE);
        assert_eq!(result::memset_d8_sync(x, 0, 401).unwrap_err().0, CUDA_ERROR_INVALID_VALUE);
    }
    assert_eq!(free(x + 4), CUDA_ERROR_INVALID_VALUE);
    assert_eq!(free(x), CUDA_SUCCESS);
    assert_eq!(free(x), CUDA_ERROR_INVALID_VALUE);
    gpu.context.synchronize().unwrap();
}

#[test]
fn stale_ptx_is_refused() {
    let words =
        ["entry emu_gone of the PTX is missing in the host build", "entry emu_scale has parameters of (8, 4, 8) bytes"];
    reports("drift", &[], &words);
}

fn drift() {
    let _gpu = Gpu::open(0);
    let entry = |name: &str, last: &str| {
        format!(
            "//\n.version 8.2\n.target sm_80\n.address_size 64\n\n.visible .entry {name}(\n\t.param .u64 {name}_param_0,\n\
             \t.param .f32 {name}_param_1,\n\t.param {last} {name}_param_2\n)\n.maxntid 256, 1, 1\n{{\n\tret;\n}}\n"
        )
    };
    load(&entry("emu_scale", ".u32")).unwrap();
    load(&entry("emu_scale", ".align 4 .b8").replace("_param_2", "_param_2[4]")).unwrap();
    assert_eq!(load(&entry("emu_scale", ".u64")), Err(CUDA_ERROR_INVALID_PTX));
    assert_eq!(load(&entry("emu_gone", ".u32")), Err(CUDA_ERROR_INVALID_PTX));
    assert_eq!(load("not PTX"), Err(CUDA_ERROR_INVALID_PTX));
    assert_eq!(load("\u{7f}ELF"), Err(CUDA_ERROR_NO_BINARY_FOR_GPU));
}

#[test]
fn the_ptx_that_ships_belongs_to_the_sources() {
    let _gpu = Gpu::open(0);
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/ptx");
    for file in std::fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        load(&std::fs::read_to_string(&path).unwrap()).unwrap_or_else(|e| panic!("{}: {e:?}", path.display()));
    }
}

#[test]
fn devices_may_be_full_missing_or_old() {
    in_child("out_of_memory", &[("MEMORY_MB", "1")]);
    in_child("no_device", &[("DEVICES", "0")]);
    in_child("old_driver", &[("DRIVER", "11080"), ("CAPABILITY", "75")]);
}

fn out_of_memory() {
    let gpu = Gpu::open(0);
    let first = device(&vec![0u8; 700_000]);
    let (available, total) = gpu.context.mem_get_info().unwrap();
    assert_eq!((available, total), ((1 << 20) - 700_000, 1 << 20));
    // SAFETY: refused.
    assert_eq!(unsafe { result::malloc_sync(700_000) }.unwrap_err().0, CUDA_ERROR_OUT_OF_MEMORY);
    assert_eq!(free(first), CUDA_SUCCESS);
    device(&vec![0u8; 1 << 20]);
}

fn no_device() {
    emulator::preload();
    assert_eq!(CudaContext::new(0).unwrap_err().0, CUDA_ERROR_NO_DEVICE);
}

fn old_driver() {
    emulator::preload();
    let context = CudaContext::new(0).unwrap();
    assert_eq!(context.name().unwrap(), "CPU emulator of CUDA (no GPU)");
    assert_eq!(context.compute_capability().unwrap(), (7, 5));
    let mut version = 0;
    // SAFETY: writes one number.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().unwrap();
    assert_eq!(version, 11080);
}

#[test]
fn missing_barriers_give_wrong_results() {
    let gpu = Gpu::open(0);
    let x: Vec<f32> = (1..257).map(|i| i as f32).collect();
    let (dx, out) = (device(&x), device(&[0f32; 256]));
    assert_eq!(gpu.launch("emu_racy_reverse", 1, 256, 0, &[Pointer(dx), Pointer(out)]), CUDA_SUCCESS);
    let reversed: Vec<f32> = x.iter().rev().copied().collect();
    assert_ne!(host::<f32>(out, 256), reversed);
}
