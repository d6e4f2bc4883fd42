//! The compiled kernels: PTX that travels in the binary, loaded by the driver when first needed.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Mutex, OnceLock};

use cudarc::driver::result::module;
use cudarc::driver::sys::{CUfunction, CUmodule};

use super::super::Done;
use super::device::Device;

macro_rules! files {
    ($($name:literal)*) => {
        /// Kernel files and their PTX.
        pub const FILES: &[(&str, &str)] =
            &[$(($name, include_str!(concat!("../../../kernels/ptx/", $name, ".ptx")))),*];
    };
}

files!(
    "attention_64" "attention_128" "attention_256" "attention_combine" "cache" "cholesky" "eight_bits" "elementwise" "gather"
    "gemm" "gemv" "ggml_basic" "ggml_iq" "ggml_k" "ggml_panel" "ggml_ternary" "gptq" "int8" "quant_2" "quant_3" "quant_4" "quant_8"
    "simt" "sweep"
);

/// Names of the kernels in a PTX text.
pub fn entries(ptx: &str) -> impl Iterator<Item = &str> {
    ptx.split(".entry ").skip(1).map(|rest| rest.split(['(', ' ', '\n']).next().unwrap_or_default())
}

/// Modules of one device.
#[derive(Default)]
pub struct Modules {
    loaded: Mutex<HashMap<&'static str, Loaded>>,
}

#[derive(Clone, Copy)]
struct Loaded(CUmodule);

// SAFETY: a module handle may be used from any thread of the process that owns its context.
unsafe impl Send for Loaded {}

impl Modules {
    /// The function of `kernel`; its file is loaded if it has not been. The device is current.
    pub fn function(&self, device: &Device, kernel: &'static str) -> Done<CUfunction> {
        static INDEX: OnceLock<HashMap<&str, &(&str, &str)>> = OnceLock::new();
        let index = INDEX
            .get_or_init(|| FILES.iter().flat_map(|file| entries(file.1).map(move |entry| (entry, file))).collect());
        let Some((file, ptx)) = index.get(kernel) else {
            return Err(device.failed(format!("there is no kernel `{kernel}`")));
        };
        let mut loaded = self.loaded.lock().unwrap_or_else(|e| e.into_inner());
        let module = match loaded.get(file) {
            Some(module) => *module,
            None => {
                let text = CString::new(*ptx).map_err(|e| device.failed(format!("kernels `{file}`: {e}")))?;
                let needed = || format!("the driver needs more for the kernels `{file}`");
                // SAFETY: the text is whole PTX, ended by a zero byte. The module stays as long as the process.
                let module = device.with_memory(needed, || unsafe { module::load_data(text.as_ptr().cast()) });
                let module = module.map_err(|error| match error.out_of_memory() {
                    true => error,
                    false => device.failed(format!("the driver does not take the kernels `{file}`: {}", error.why)),
                })?;
                loaded.insert(file, Loaded(module));
                Loaded(module)
            }
        };
        let name = CString::new(kernel).map_err(|e| device.failed(format!("kernel `{kernel}`: {e}")))?;
        // SAFETY: the module is loaded and stays so.
        unsafe { module::get_function(module.0, name) }.map_err(|e| device.failed(format!("kernel `{kernel}`: {e}")))
    }
}
