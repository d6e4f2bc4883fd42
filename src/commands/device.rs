//! From what the user named to a backend.

use std::sync::Arc;

use anyhow::Result;

use crate::backend::cpu::Cpu;
use crate::backend::cuda::{self, Cuda, CudaOptions};
use crate::backend::{Backend, DeviceError};
use crate::cli::args::DeviceArg;
use crate::cli::print::Printer;

/// Opens the device that was asked for; `options` for the case that it is a CUDA device. By default all CUDA
/// devices are taken, and the CPU where there is none that can be used.
pub fn backend(device: &DeviceArg, options: CudaOptions, printer: Printer) -> Result<Arc<dyn Backend>> {
    let all = |why: String| DeviceError { device: "cuda".into(), why };
    let devices = match device {
        DeviceArg::Cpu => return Ok(Arc::new(Cpu)),
        DeviceArg::Cuda(ordinals) => ordinals.clone(),
        DeviceArg::AllCuda => (0..cuda::count().map_err(all)?).collect(),
        DeviceArg::Auto => match cuda::count() {
            Ok(count) if count > 0 => (0..count).collect(),
            Ok(_) => return Ok(Arc::new(Cpu)),
            Err(why) => {
                if cuda::installed() {
                    printer.warn(format!("computing on the CPU: {why}"));
                }
                return Ok(Arc::new(Cpu));
            }
        },
    };
    match Cuda::open(CudaOptions { devices, ..options }) {
        Ok(cuda) => {
            printer.note(format!("device: {}", cuda.device()));
            Ok(Arc::new(cuda))
        }
        Err(error) if *device == DeviceArg::Auto => {
            printer.warn(format!("computing on the CPU: {error}"));
            Ok(Arc::new(Cpu))
        }
        Err(error) => Err(error.into()),
    }
}
