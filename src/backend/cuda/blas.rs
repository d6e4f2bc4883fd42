//! cuBLAS, where a version that fits is installed.
//!
//! cudarc would take the first library of that name in the path, of any version. Results depend on the library. So this
//! file chooses the newest version that fits, and the device's recorded name contains its version.

use std::error::Error;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::sync::{Arc, OnceLock};

use cudarc::cublas::sys::{cublasComputeType_t, cublasGemmAlgo_t, cublasHandle_t, cublasOperation_t, cudaDataType_t};
use cudarc::driver::CudaStream;
use libloading::Library;

/// Names of the library, the preferred first. The name without a version may be that of any.
#[cfg(not(windows))]
const NAMES: [&str; 3] = ["libcublas.so.13", "libcublas.so.12", "libcublas.so"];
#[cfg(windows)]
const NAMES: [&str; 2] = ["cublas64_13.dll", "cublas64_12.dll"];
/// Major versions whose functions are called as they are here.
const FITTING: std::ops::RangeInclusive<c_int> = 12..=13;

/// cublasStatus_t, of which a library may know more than is known here.
type Status = c_int;
type Create = unsafe extern "C" fn(*mut cublasHandle_t) -> Status;
type Destroy = unsafe extern "C" fn(cublasHandle_t) -> Status;
type SetStream = unsafe extern "C" fn(cublasHandle_t, *mut c_void) -> Status;
type GetProperty = unsafe extern "C" fn(c_int, *mut c_int) -> Status;
type GemmEx = unsafe extern "C" fn(
    cublasHandle_t,
    cublasOperation_t,
    cublasOperation_t,
    c_int,
    c_int,
    c_int,
    *const c_void,
    *const c_void,
    cudaDataType_t,
    c_int,
    *const c_void,
    cudaDataType_t,
    c_int,
    *const c_void,
    *mut c_void,
    cudaDataType_t,
    c_int,
    cublasComputeType_t,
    cublasGemmAlgo_t,
) -> Status;
type Sgemm = unsafe extern "C" fn(
    cublasHandle_t,
    cublasOperation_t,
    cublasOperation_t,
    c_int,
    c_int,
    c_int,
    *const f32,
    *const f32,
    c_int,
    *const f32,
    c_int,
    *const f32,
    *mut f32,
    c_int,
) -> Status;

/// A library that fits, with the functions that are called. It is never unloaded.
struct BlasLibrary {
    version: [c_int; 3],
    create: Create,
    destroy: Destroy,
    set_stream: SetStream,
    gemm_ex: GemmEx,
    sgemm: Sgemm,
}

/// An error status of cuBLAS.
pub struct BlasError(Status);

impl fmt::Display for BlasError {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let name = match self.0 {
            1 => "CUBLAS_STATUS_NOT_INITIALIZED",
            3 => "CUBLAS_STATUS_ALLOC_FAILED",
            7 => "CUBLAS_STATUS_INVALID_VALUE",
            8 => "CUBLAS_STATUS_ARCH_MISMATCH",
            13 => "CUBLAS_STATUS_EXECUTION_FAILED",
            14 => "CUBLAS_STATUS_INTERNAL_ERROR",
            15 => "CUBLAS_STATUS_NOT_SUPPORTED",
            other => return write!(f, "status {other}"),
        };
        f.write_str(name)
    }
}

fn done(status: Status) -> Result<(), BlasError> {
    if status == 0 { Ok(()) } else { Err(BlasError(status)) }
}

impl BlasLibrary {
    /// `None` where there is no library of this name; `Err` with the reason where it cannot be loaded or does not fit.
    fn open(name: &'static str) -> Option<Result<Self, String>> {
        // SAFETY: loading runs the library's initialisers, as every CUDA program does.
        let library = match unsafe { Library::new(name) } {
            Ok(library) => library,
            Err(error) => return broken(name, &error).map(Err),
        };
        let found = Self::of(name, &library);
        // The library stays loaded: it may have started threads.
        std::mem::forget(library);
        Some(found)
    }

    fn of(name: &'static str, library: &Library) -> Result<Self, String> {
        macro_rules! function {
            ($symbol:literal as $kind:ty) => {
                // SAFETY: the function has this type in all versions that fit, and the library stays.
                *unsafe { library.get::<$kind>($symbol) }
                    .map_err(|_| format!("{name} lacks {}", String::from_utf8_lossy($symbol)))?
            };
        }
        let property = function!(b"cublasGetProperty" as GetProperty);
        let mut version = [0; 3];
        for (which, value) in version.iter_mut().enumerate() {
            // SAFETY: it writes one number, and needs neither a device nor a handle.
            done(unsafe { property(which as c_int, value) }).map_err(|e| format!("{name} has no version: {e}"))?;
        }
        if !FITTING.contains(&version[0]) {
            let (least, most) = (FITTING.start(), FITTING.end());
            return Err(format!("{name} is version {}, and {least} or {most} is needed", dotted(version)));
        }
        Ok(Self {
            version,
            create: function!(b"cublasCreate_v2" as Create),
            destroy: function!(b"cublasDestroy_v2" as Destroy),
            set_stream: function!(b"cublasSetStream_v2" as SetStream),
            gemm_ex: function!(b"cublasGemmEx" as GemmEx),
            sgemm: function!(b"cublasSgemm_v2" as Sgemm),
        })
    }
}

/// Why a library cannot be loaded that is there; `None` where there is none of this name.
fn broken(name: &str, error: &libloading::Error) -> Option<String> {
    let why = error.source().map_or_else(|| error.to_string(), ToString::to_string);
    // The loader names the file that it does not find: another name is that of a library that this one needs. Windows
    // names none (error 126).
    let absent = why.contains(&format!("{name}: ")) && why.contains("No such file") || why.contains("os error 126");
    (!absent).then(|| format!("{name} cannot be loaded: {why}"))
}

fn dotted(version: [c_int; 3]) -> String {
    version.map(|part| part.to_string()).join(".")
}

/// cuBLAS on the stream of one device.
pub struct Blas {
    library: &'static BlasLibrary,
    handle: cublasHandle_t,
    /// The stream of the handle, kept alive.
    stream: Arc<CudaStream>,
}

// SAFETY: a handle may be used from any thread; calls go to one stream; the caller orders them.
unsafe impl Send for Blas {}
// SAFETY: likewise; cuBLAS locks what a handle's calls share.
unsafe impl Sync for Blas {}

impl Blas {
    /// The first library that fits and works with the driver, for a device that is current; `Err` with the reason
    /// where there is none. The next name is only opened where the one before does not serve.
    pub fn new(stream: &Arc<CudaStream>) -> Result<Self, String> {
        type Opened = OnceLock<Option<Result<BlasLibrary, String>>>;
        static OPENED: [Opened; NAMES.len()] = [const { OnceLock::new() }; NAMES.len()];
        let mut reasons = Vec::new();
        for (name, opened) in NAMES.into_iter().zip(&OPENED) {
            match opened.get_or_init(|| BlasLibrary::open(name)) {
                Some(Ok(library)) => match Self::on(library, stream) {
                    Ok(blas) => return Ok(blas),
                    Err(e) => reasons.push(format!("{name} {} does not start: {e}", dotted(library.version))),
                },
                Some(Err(why)) => reasons.push(why.clone()),
                None => {}
            }
        }
        if reasons.is_empty() { Err("it is not installed".into()) } else { Err(reasons.join("; ")) }
    }

    fn on(library: &'static BlasLibrary, stream: &Arc<CudaStream>) -> Result<Self, BlasError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: it writes a handle, which is destroyed once.
        done(unsafe { (library.create)(&mut handle) })?;
        let blas = Self { library, handle, stream: stream.clone() };
        // SAFETY: both were just made or are alive.
        done(unsafe { (library.set_stream)(handle, stream.cu_stream().cast()) })?;
        Ok(blas)
    }

    /// Major, minor and patch.
    pub fn version(&self) -> String {
        dotted(self.library.version)
    }

    /// out `[rows][n]` = x w' + `beta` out in f32 for row-major x `[rows][k]` and w `[n][k]` of 16-bit numbers of
    /// `kind`, which are device addresses; rows of x and w are `stride` numbers apart.
    ///
    /// # Safety
    /// All three are device memory of these sizes that lives until the product is done; the device is current.
    pub unsafe fn product(
        &self,
        [rows, n, k]: [usize; 3],
        stride: usize,
        kind: cudaDataType_t,
        [x, w, out]: [u64; 3],
        beta: f32,
    ) -> Result<(), BlasError> {
        let [rows, n, k, stride] = [rows, n, k, stride].map(|size| size as c_int);
        let alpha = 1.0f32;
        // cuBLAS stores columns: what is row-major here is the transpose there.
        // SAFETY: the caller's; the factors are read before it returns.
        done(unsafe {
            (self.library.gemm_ex)(
                self.handle,
                cublasOperation_t::CUBLAS_OP_T,
                cublasOperation_t::CUBLAS_OP_N,
                n,
                rows,
                k,
                (&raw const alpha).cast(),
                w as *const _,
                kind,
                stride,
                x as *const _,
                kind,
                stride,
                (&raw const beta).cast(),
                out as *mut _,
                cudaDataType_t::CUDA_R_32F,
                n,
                cublasComputeType_t::CUBLAS_COMPUTE_32F,
                cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )
        })
    }

    /// out `[n][n]` = a' b in f32 for row-major a and b `[rows][n]`, which are device addresses.
    ///
    /// # Safety
    /// All three are device memory of these sizes that lives until the product is done; the device is current.
    pub unsafe fn across(&self, rows: usize, n: usize, [a, b, out]: [u64; 3]) -> Result<(), BlasError> {
        let [rows, n] = [rows, n].map(|size| size as c_int);
        let (alpha, beta) = (1.0f32, 0.0f32);
        // SAFETY: the caller's; the factors are read before it returns.
        done(unsafe {
            (self.library.sgemm)(
                self.handle,
                cublasOperation_t::CUBLAS_OP_N,
                cublasOperation_t::CUBLAS_OP_T,
                n,
                n,
                rows,
                &alpha,
                b as *const f32,
                n,
                a as *const f32,
                n,
                &beta,
                out as *mut f32,
                n,
            )
        })
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // The handle belongs to the context of its device.
        let _ = self.stream.context().bind_to_thread();
        // SAFETY: made by `on`, destroyed once.
        let _ = unsafe { (self.library.destroy)(self.handle) };
    }
}
