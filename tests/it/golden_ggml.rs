//! ggml's blocks against the bytes of ggml itself and the values of its Python package (`tests/golden/gguf/blocks`).

use quantkit::num::ggml::GgmlType;
use quantkit::pack::ggml::{EncodeError, encode, encode_into};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::support::fixture;

const COLS: usize = 1536;

fn bytes(name: &str) -> Vec<u8> {
    std::fs::read(fixture("gguf/blocks").join(name)).unwrap()
}

fn numbers(name: &str) -> Vec<f32> {
    npy(&bytes(name))
}

/// The numbers of a `.npy` file of version 1 with f32 in C order.
fn npy(file: &[u8]) -> Vec<f32> {
    let start = 10 + u16::from_le_bytes([file[8], file[9]]) as usize;
    file[start..].chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// Type, with importance, the encoded rows: every golden file.
fn goldens() -> Vec<(GgmlType, bool, Vec<u8>)> {
    let mut all = Vec::new();
    for kind in GgmlType::ALL {
        for (important, name) in [(false, format!("{kind}.bin")), (true, format!("{kind}.imatrix.bin"))] {
            if fixture("gguf/blocks").join(&name).exists() {
                all.push((kind, important, bytes(&name)));
            }
        }
    }
    assert_eq!(all.len(), 40);
    all
}

#[test]
fn every_type_is_encoded_to_the_bytes_of_ggml() {
    let (rows, importance) = (numbers("rows.npy"), numbers("importance.npy"));
    for (kind, important, want) in goldens() {
        let got = encode(kind, &rows, COLS, important.then_some(&importance[..])).unwrap();
        let wrong = got.chunks(kind.bytes()).zip(want.chunks(kind.bytes())).position(|(a, b)| a != b);
        assert_eq!(wrong, None, "{kind}, importance {important}: first block that differs");
        assert_eq!(got.len(), want.len());
    }
}

/// Single blocks, each with its own importance, that take rare paths: levels that wrap in ggml's bytes, scales that are
/// zero or have no inverse, values near the smallest there are.
#[test]
fn odd_blocks_are_encoded_to_the_bytes_of_ggml() {
    let folder = fixture("gguf/edges");
    let blocks = npy(&std::fs::read(folder.join("edges.npy")).unwrap());
    let mut files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let mut compared = 0;
    for path in files.iter().filter(|path| path.extension().is_some_and(|end| end == "bin")) {
        let name = path.file_stem().unwrap().to_str().unwrap();
        let (kind, important) = name.strip_suffix(".imatrix").map_or((name, false), |kind| (kind, true));
        let kind = GgmlType::parse(kind).unwrap();
        let want = std::fs::read(path).unwrap();
        let want: Vec<_> = want.chunks(kind.row_bytes(256).unwrap()).collect();
        assert_eq!(want.len(), blocks.len() / 512);
        for (i, (block, want)) in blocks.chunks(512).zip(want).enumerate() {
            let (values, importance) = block.split_at(256);
            let empty = values.chunks(32).any(|run| run.iter().all(|v| *v == 0.0));
            // ggml puts what follows a run of zeros in the wrong place; see below.
            if kind == GgmlType::IQ3_S && empty {
                continue;
            }
            let got = encode(kind, values, 256, important.then_some(importance)).unwrap();
            assert_eq!(got, want, "{name}, block {i}");
            compared += 1;
        }
    }
    assert!(compared > 300, "{compared}");
}

/// The place of each run of an IQ3_S block is its own, whatever the runs before it hold.
#[test]
fn zeros_before_other_values() {
    let mut values = vec![0.0; 256];
    (64..256).for_each(|i| values[i] = ((i * 37 % 101) as f32 - 50.0) * 0.01);
    let block = encode(GgmlType::IQ3_S, &values, 256, None).unwrap();
    let mut decoded = vec![0.0; 256];
    GgmlType::IQ3_S.decode(&block, &mut decoded);
    let (error, size) = values
        .iter()
        .zip(&decoded)
        .skip(64)
        .fold((0.0, 0.0), |(error, size), (a, b)| (error + (a - b) * (a - b), size + a * a));
    assert!(error < 0.05 * size, "{error} of {size}");
}

#[test]
fn every_type_is_decoded_to_the_values_of_the_python_package() {
    let want: Value = serde_json::from_slice(&bytes("decoded.json")).unwrap();
    let rows = numbers("rows.npy");
    for (kind, important, block) in goldens() {
        let mut values = vec![0.0; rows.len()];
        kind.decode(&block, &mut values);
        let mut hash = Sha256::new();
        values.iter().for_each(|v| hash.update(v.to_le_bytes()));
        let hash: String = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
        let name = if important { format!("{kind}.imatrix") } else { kind.to_string() };
        assert_eq!(want[&name].as_str(), Some(&hash[..]), "{name}");
    }
}

/// Ceilings on the error of ordinary rows, relative to their root mean square.
#[test]
fn decoded_blocks_are_close_to_the_rows() {
    let rows = numbers("rows.npy");
    let ordinary = 24 * COLS;
    for (kind, important, block) in goldens() {
        let mut values = vec![0.0; rows.len()];
        kind.decode(&block, &mut values);
        let pairs = || rows[..ordinary].iter().zip(&values);
        let error: f64 = pairs().map(|(a, b)| ((a - b) as f64).powi(2)).sum();
        let size: f64 = pairs().map(|(a, _)| (*a as f64).powi(2)).sum();
        use GgmlType::*;
        let ceiling = match kind {
            F32 => 0.0,
            F16 => 2e-5,
            BF16 => 0.002,
            Q8_0 => 0.006,
            Q6_K => 0.023,
            Q5_K | Q5_1 => 0.041,
            Q5_0 => 0.049,
            Q4_K | Q4_1 => 0.084,
            IQ4_NL | IQ4_XS => 0.087,
            Q4_0 => 0.096,
            MXFP4 => 0.125,
            IQ3_S | Q3_K => 0.18,
            IQ3_XXS => 0.25,
            Q2_K | IQ2_S => 0.32,
            IQ2_XS => 0.38,
            IQ2_XXS => 0.46,
            IQ1_S | IQ1_M => 0.59,
            TQ1_0 | TQ2_0 => 0.84,
        };
        let error = (error / size).sqrt();
        assert!(error <= ceiling, "{kind}, importance {important}: {error} > {ceiling}");
    }
}

/// Blocks do not depend on their neighbours, wherever they lie in a matrix and however many there are.
#[test]
fn rows_alone_give_the_bytes_of_rows_together() {
    let (rows, importance) = (numbers("rows.npy"), numbers("importance.npy"));
    for (kind, important, want) in goldens() {
        let row_bytes = kind.row_bytes(COLS).unwrap();
        for row in [0, 26, 28, 33] {
            let mut got = vec![0; row_bytes];
            let values = &rows[row * COLS..(row + 1) * COLS];
            encode_into(kind, values, COLS, important.then_some(&importance[..]), &mut got).unwrap();
            assert_eq!(got, want[row * row_bytes..(row + 1) * row_bytes], "{kind}, row {row}");
        }
    }
}

#[test]
fn what_cannot_be_encoded_is_refused() {
    let rows = vec![0.5; 512];
    // Those that ggml's own quantizer does not take without importance; the other coarse ones have golden files.
    for kind in [GgmlType::IQ1_S, GgmlType::IQ2_XXS, GgmlType::IQ2_XS] {
        assert_eq!(encode(kind, &rows, 256, None), Err(EncodeError::NeedsImportance { kind }));
        assert!(encode(kind, &rows, 256, Some(&[1.0; 256])).is_ok(), "{kind}");
    }
    let columns = EncodeError::Columns { kind: GgmlType::Q4_K, block: 256, cols: 128 };
    assert_eq!(encode(GgmlType::Q4_K, &rows, 128, None), Err(columns));
    let values = EncodeError::Values { values: 512, cols: 384 };
    assert_eq!(encode(GgmlType::Q8_0, &rows, 384, None), Err(values));
    assert_eq!(encode(GgmlType::Q8_0, &rows, 0, None), Err(EncodeError::Values { values: 512, cols: 0 }));
    let importance = EncodeError::Importance { given: 2, cols: 256 };
    assert_eq!(encode(GgmlType::Q4_K, &rows, 256, Some(&[1.0, 1.0])), Err(importance));
    let mut bad = vec![1.0; 256];
    bad[7] = -1.0;
    let importance = EncodeError::BadImportance { col: 7, value: -1.0 };
    assert_eq!(encode(GgmlType::Q4_K, &rows, 256, Some(&bad)), Err(importance));
    let mut infinite = rows.clone();
    infinite[300] = f32::INFINITY;
    let not_finite = EncodeError::NotFinite { row: 1, col: 44, value: f32::INFINITY };
    assert_eq!(encode(GgmlType::F16, &infinite, 256, None), Err(not_finite));
    let length = EncodeError::Length { given: 1, needed: 288 };
    assert_eq!(encode_into(GgmlType::Q4_K, &rows, 256, None, &mut [0]), Err(length));
}
