//! What may be chosen about the CUDA backend.

/// How products with many rows are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// Activations as the sum of two 16-bit numbers: as good as f32.
    #[default]
    Double,
    /// Activations rounded to 16 bits, in half the time: as engines do that serve models.
    Single,
}

/// What may be chosen about the backend.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// Ordinals of the devices that work side by side; the first also solves and decodes.
    pub devices: Vec<usize>,
    pub precision: Precision,
    /// Whether a decoding step may be recorded as a graph.
    pub graphs: bool,
    /// Whether cuBLAS may be used where it is installed.
    pub cublas: bool,
    /// Bytes of weights that may stay on a device [default: half of what is free].
    pub weight_bytes: Option<u64>,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self { devices: vec![0], precision: Precision::default(), graphs: true, cublas: true, weight_bytes: None }
    }
}
