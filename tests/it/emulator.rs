//! The CPU emulator of CUDA itself: what it computes, and that it reports the mistakes it is there to find.
//! Cases that need settings of their own, or that end in an error that stays, run in a child process.

mod faults;
mod memory;
mod results;
mod streams;

use std::env;
use std::ffi::{CString, c_void};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::{self, CUdeviceptr, CUmodule, CUresult, CUstream};
use cudarc::driver::{CudaContext, result};

use crate::support::emulator;

/// One emulated device with the emulator's test kernels.
struct Gpu {
    context: Arc<CudaContext>,
    module: CUmodule,
}

/// A launch's parameters: values of 4 or 8 bytes.
enum Value {
    Pointer(CUdeviceptr),
    Int(i32),
    Long(i64),
    Float(f32),
}
use Value::{Float, Int, Long, Pointer};

const NULL_STREAM: CUstream = std::ptr::null_mut();

impl Gpu {
    fn open(ordinal: usize) -> Self {
        emulator::preload();
        let context = CudaContext::new(ordinal).unwrap();
        let module = load(&emulator::ptx_of("faults")).unwrap();
        Self { context, module }
    }

    fn bind(&self) {
        self.context.bind_to_thread().unwrap();
    }

    fn launch_on(
        &self,
        stream: CUstream,
        kernel: &str,
        blocks: u32,
        threads: u32,
        shared: u32,
        values: &[Value],
    ) -> CUresult {
        let mut values: Vec<*mut c_void> = values
            .iter()
            .map(|value| match value {
                Pointer(v) => std::ptr::from_ref(v).cast_mut().cast(),
                Int(v) => std::ptr::from_ref(v).cast_mut().cast(),
                Long(v) => std::ptr::from_ref(v).cast_mut().cast(),
                Float(v) => std::ptr::from_ref(v).cast_mut().cast(),
            })
            .collect();
        // SAFETY: what is unsafe about the launch is what the emulator checks.
        unsafe {
            let function = result::module::get_function(self.module, CString::new(kernel).unwrap()).unwrap();
            result::launch_kernel(function, (blocks, 1, 1), (threads, 1, 1), shared, stream, &mut values)
                .map_or_else(|e| e.0, |()| CUresult::CUDA_SUCCESS)
        }
    }

    /// Launches on the default stream.
    fn launch(&self, kernel: &str, blocks: u32, threads: u32, shared: u32, values: &[Value]) -> CUresult {
        self.launch_on(NULL_STREAM, kernel, blocks, threads, shared, values)
    }
}

fn load(ptx: &str) -> Result<CUmodule, CUresult> {
    let text = CString::new(ptx).unwrap();
    // SAFETY: the text ends with a zero byte.
    unsafe { result::module::load_data(text.as_ptr().cast()) }.map_err(|e| e.0)
}

/// Device memory on the current device that holds the data.
fn device<T: Copy>(data: &[T]) -> CUdeviceptr {
    // SAFETY: the allocation is as long as the data.
    unsafe {
        let place = result::malloc_sync(size_of_val(data)).unwrap();
        result::memcpy_htod_sync(place, data).unwrap();
        place
    }
}

fn host<T: Copy + Default>(from: CUdeviceptr, n: usize) -> Vec<T> {
    let mut data = vec![T::default(); n];
    // SAFETY: the emulator refuses what does not lie in one allocation.
    unsafe { result::memcpy_dtoh_sync(&mut data, from) }.unwrap();
    data
}

fn free(place: CUdeviceptr) -> CUresult {
    // SAFETY: the emulator refuses what is no allocation.
    unsafe { sys::cuMemFree_v2(place) }
}

// ---- Child processes.

/// Runs a case in a process of its own with these settings; gives what it wrote to standard error. One that hangs fails.
pub fn in_child(case: &str, settings: &[(&str, &str)]) -> String {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["emulator::child", "--exact", "--nocapture"]).env("QUANTKIT_EMULATOR_CASE", case);
    for (name, value) in settings {
        command.env(format!("QUANTKIT_EMULATOR_{name}"), value);
    }
    let output = assert_cmd::Command::from_std(command).timeout(Duration::from_secs(300)).output().unwrap();
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{case} with {settings:?}:\n{}{words}", String::from_utf8_lossy(&output.stdout));
    words
}

/// What [`in_child`] runs; does nothing among the other tests.
#[test]
fn child() {
    let Ok(case) = env::var("QUANTKIT_EMULATOR_CASE") else { return };
    let cases = [faults::CASES, memory::CASES, streams::CASES, results::CASES, crate::cuda::graphs::CASES];
    let (_, run) = cases.iter().flat_map(|c| c.iter()).find(|(name, _)| *name == case).unwrap();
    run();
}

pub type Case = (&'static str, fn());
