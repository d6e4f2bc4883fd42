//! The readers of GGUF files and of importance, on any bytes: `cargo fuzz run -s none gguf`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use quantkit::format::gguf::imatrix::Imatrix;
use quantkit::format::gguf::parse::parse;

fuzz_target!(|data: &[u8]| {
    if let Ok(part) = parse(data.to_vec().into()) {
        for tensor in &part.tensors {
            let rows = tensor.len().checked_div(tensor.cols()).unwrap_or(0);
            let row = tensor.kind.row_bytes(tensor.cols()).expect("rows are whole blocks");
            assert_eq!(tensor.bytes.len(), rows * row);
        }
    }
    let _ = Imatrix::parse(data.to_vec().into());
});
