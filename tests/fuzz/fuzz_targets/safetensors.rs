//! A checkpoint whose weights are any bytes: `cargo fuzz run -s none safetensors`.
#![no_main]

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use quantkit::checkpoint::Checkpoint;
use tempfile::TempDir;

fn folder() -> &'static TempDir {
    static FOLDER: OnceLock<TempDir> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a folder for the checkpoint");
        std::fs::write(folder.path().join("config.json"), "{}").expect("its config");
        folder
    })
}

fuzz_target!(|data: &[u8]| {
    let dir = folder().path();
    // A new file each time: some file systems flush one that is cut and filled again.
    let path = dir.join("model.safetensors");
    let _ = std::fs::remove_file(&path);
    std::fs::write(&path, data).expect("the weights");
    if let Ok(checkpoint) = Checkpoint::open(dir) {
        for entry in checkpoint.tensors().values() {
            assert_eq!(entry.bytes.len(), entry.shape.iter().product::<usize>() * entry.dtype.size());
        }
        checkpoint.non_finite();
    }
});
