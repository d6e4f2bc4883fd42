//! From what the user named to a backend.

use std::sync::Arc;

use anyhow::Result;

use crate::backend::cpu::Cpu;
use crate::backend::cuda::{self, Cuda, CudaOptions};
use crate::backend::{Backend, DeviceError};
use crate::cli::args::DeviceArg;
use crate::cli::print::Printer;

/// Opens the devices that were asked for; `options` for the case that they are CUDA devices. By default all CUDA
/// devices that can be used are taken, and the CPU where there is none.
pub fn backend(device: &DeviceArg, options: CudaOptions, printer: Printer) -> Result<Arc<dyn Backend>> {
    open(device, usize::MAX, options, printer)
}

/// The first of them: for one sequence at a time, which others cannot help.
pub fn one(device: &DeviceArg, options: CudaOptions, printer: Printer) -> Result<Arc<dyn Backend>> {
    open(device, 1, options, printer)
}

fn open(device: &DeviceArg, most: usize, options: CudaOptions, printer: Printer) -> Result<Arc<dyn Backend>> {
    let all = |why: String| DeviceError { device: "cuda".into(), why };
    let mut devices = match device {
        DeviceArg::Cpu => return Ok(Arc::new(Cpu)),
        DeviceArg::Cuda(ordinals) => ordinals.clone(),
        DeviceArg::AllCuda => (0..cuda::count().map_err(all)?).collect(),
        DeviceArg::Auto => usable(&options, printer),
    };
    if devices.is_empty() && *device == DeviceArg::Auto {
        return Ok(Arc::new(Cpu));
    }
    devices.truncate(most);
    let cuda = Cuda::open(CudaOptions { devices, ..options })?;
    printer.note(format!("device: {}; {}", cuda.device(), cuda.library()));
    Ok(Arc::new(cuda))
}

/// Warns if decoding steps could not be recorded.
pub fn warn_of_unrecorded_steps<'a>(reasons: impl IntoIterator<Item = &'a str>, printer: Printer) {
    for why in reasons {
        printer.warn(format!("some decoding steps ran without CUDA graphs, which is slower: {why}"));
    }
}

/// The CUDA devices that open; why others do not is told.
fn usable(options: &CudaOptions, printer: Printer) -> Vec<usize> {
    let count = match cuda::count() {
        Ok(count) => count,
        Err(why) => {
            if cuda::installed() {
                printer.warn(format!("computing on the CPU: {why}"));
            }
            return Vec::new();
        }
    };
    let opens = |ordinal: &usize| match Cuda::open(CudaOptions { devices: vec![*ordinal], ..options.clone() }) {
        Ok(_) => true,
        Err(error) => {
            printer.warn(format!("not used: {error}"));
            false
        }
    };
    (0..count).filter(opens).collect()
}
