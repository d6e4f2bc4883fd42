//! What a GPU reaches of its own ceilings: copy bandwidth and the rate of bf16 products, then prefill and decoding.
//!
//! ```text
//! cargo bench --bench gpu -- ARTIFACT MODEL
//! ```
//!
//! ARTIFACT is a quantized folder, MODEL its source. One JSON object on stdout; every ratio is against a ceiling
//! measured in the same run.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, clippy::print_stderr)]

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use half::bf16;
use quantkit::backend::cuda::{Cuda, CudaOptions, Device, Precision};
use quantkit::backend::weight::{Dense, Weight};
use quantkit::backend::{Backend, spans_of};
use quantkit::checkpoint::Checkpoint;
use quantkit::engine::generate::Session;
use quantkit::format;
use quantkit::model::Model;
use quantkit::model::block::Stage;
use quantkit::tensor::{Bytes, Dtype};
use serde_json::{Value, json};

const PREFILL: usize = 4096;
const DECODED: usize = 128;

/// Waits for all work on the device, whatever stream it is on.
fn finish(device: &Device) {
    device.context.synchronize().unwrap();
}

/// The median of seven runs, in seconds, after one that does not count.
fn seconds(device: &Device, mut run: impl FnMut()) -> f64 {
    run();
    finish(device);
    let mut times: Vec<f64> = (0..7)
        .map(|_| {
            let began = Instant::now();
            run();
            finish(device);
            began.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[3]
}

/// Bytes read and written in a second by the driver's own copy.
fn copy_bandwidth(device: &Arc<Device>) -> f64 {
    let bytes = 1 << 30;
    let (from, to) = (device.alloc(bytes).unwrap(), device.alloc(bytes).unwrap());
    device.zero(&from).unwrap();
    let time = seconds(device, || (0..8).for_each(|_| device.copy(&from, 0, &to, 0, bytes).unwrap()));
    8.0 * 2.0 * bytes as f64 / time
}

/// Operations a second of bf16 products of 8192³, each value rounded once.
fn product_rate(device: &Device, cublas: bool) -> f64 {
    let n = 8192;
    let cuda = Cuda::open(CudaOptions { precision: Precision::Single, cublas, ..Default::default() }).unwrap();
    let values: Vec<bf16> = (0..n * n).map(|i| bf16::from_f32((i * 7919 % 1009) as f32 / 1009.0 - 0.5)).collect();
    let bytes = Bytes::from(bytemuck::cast_slice(&values).to_vec());
    let weight = cuda.load(Weight::Dense(Dense { rows: n, cols: n, dtype: Dtype::BF16, bytes })).unwrap();
    let x = cuda.upload(n, n, values.iter().map(|v| v.to_f32()).collect()).unwrap();
    let time = seconds(device, || drop(cuda.linear(&x, &weight, None).unwrap()));
    2.0 * (n as f64).powi(3) / time
}

fn open(dir: &str, precision: Precision) -> Model {
    let opened = format::open(Checkpoint::open(Path::new(dir)).unwrap()).unwrap();
    let backend = Arc::new(Cuda::open(CudaOptions { precision, ..Default::default() }).unwrap());
    Model::open(opened.source, backend).unwrap()
}

/// Weights that a token passes, and the bytes they take.
fn size(model: &Model) -> (f64, f64) {
    let (mut weights, mut bytes) = (0.0, 0.0);
    for linear in model.blocks.iter().flat_map(|b| Stage::ALL.into_iter().flat_map(|s| b.linears(s))) {
        weights += (linear.rows * linear.cols) as f64;
        bytes += match linear.weight.weight() {
            Weight::Dense(dense) => dense.bytes.len() as f64,
            Weight::Ggml(blocks) => blocks.bytes.len() as f64,
            Weight::Gptq(q) => (q.qweight.len() * 4 + q.scales.len() * 5) as f64,
            Weight::Int8(w) => (w.values.len() + w.scales.len() * 4) as f64,
            Weight::Fp8(w) => (w.values.len() + w.scales.len() * 4) as f64,
        };
    }
    let head = (model.config.vocab * model.config.hidden) as f64;
    (weights + head, bytes + 2.0 * head)
}

fn prefill(device: &Device, dir: &str, precision: Precision, peak: f64) -> Value {
    let model = open(dir, precision);
    let tokens: Vec<u32> = (0..PREFILL).map(|i| (i % 90) as u32).collect();
    let time = seconds(device, || {
        let windows: Vec<&[u32]> = tokens.chunks(2048).collect();
        let mut chunks = [model.embed(&windows, spans_of(windows.iter().map(|w| w.len()))).unwrap()];
        model.forward(&mut chunks, None).unwrap();
        model.logits(&chunks[0].hidden).unwrap();
    });
    let rate = 2.0 * size(&model).0 * PREFILL as f64 / time;
    json!({"tokens_per_second": PREFILL as f64 / time, "flops": rate, "of_bf16_rate": rate / peak})
}

fn decode(device: &Device, dir: &str, graphs: bool, bandwidth: f64) -> Value {
    let opened = format::open(Checkpoint::open(Path::new(dir)).unwrap()).unwrap();
    let backend = Cuda::open(CudaOptions { precision: Precision::Single, graphs, ..Default::default() }).unwrap();
    let model = Model::open(opened.source, Arc::new(backend)).unwrap();
    let mut session = Session::new(&model, 1024).unwrap();
    session.feed(&[1; 64]).unwrap();
    // The first steps load, the second records.
    (0..4).for_each(|_| drop(session.feed(&[2]).unwrap()));
    finish(device);
    let began = Instant::now();
    for _ in 0..DECODED {
        let logits = session.feed(&[3]).unwrap();
        model.backend().argmax(&logits).unwrap();
    }
    let time = began.elapsed().as_secs_f64() / DECODED as f64;
    let rate = size(&model).1 / time;
    json!({"tokens_per_second": 1.0 / time, "bytes_per_second": rate, "of_copy_bandwidth": rate / bandwidth})
}

fn main() {
    let folders: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let [artifact, source] = &folders[..] else {
        eprintln!("usage: cargo bench --bench gpu -- ARTIFACT MODEL");
        std::process::exit(2);
    };
    let device = Device::open(0, 0, false).unwrap();
    let bandwidth = copy_bandwidth(&device);
    let own = product_rate(&device, false);
    let cublas = product_rate(&device, true);
    let peak = own.max(cublas);
    eprintln!("copy {bandwidth:.3e} bytes/s, bf16 products {own:.3e} by own kernels, {cublas:.3e} with cuBLAS");
    let result = json!({
        "device": device.name,
        "copy_bytes_per_second": bandwidth,
        "bf16_flops_own_kernels": own,
        "bf16_flops_with_cublas_where_installed": cublas,
        "prefill": {
            "source": prefill(&device, source, Precision::Single, peak),
            "source_double": prefill(&device, source, Precision::Double, peak),
            "artifact": prefill(&device, artifact, Precision::Single, peak),
        },
        "decode": {
            "artifact": decode(&device, artifact, true, bandwidth),
            "artifact_without_graph": decode(&device, artifact, false, bandwidth),
            "source": decode(&device, source, true, bandwidth),
        },
    });
    println!("{result:#}");
}
