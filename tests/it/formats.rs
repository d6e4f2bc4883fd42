//! Packing, writing and reading artifacts: round trips, hostile files, folders that appear whole or not at all.

mod autoround;
mod awq;
mod compressed;
mod folder;
mod foreign;
mod fp8;
mod layouts;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fs;
use std::path::Path;

use half::{bf16, f16};
use proptest::prelude::*;
use quantkit::backend::weight::Weight;
use quantkit::checkpoint::Checkpoint;
use quantkit::format::atomic::OutputFolder;
use quantkit::format::config::config_json;
use quantkit::format::gptq::{GptqConfig, Rule, linear_specs, linear_tensors};
use quantkit::format::manifest::{Manifest, verify_manifest};
use quantkit::format::output::{OutputError, write_atomic};
use quantkit::format::safetensors::{TensorSpec, write_sharded};
use quantkit::format::{FormatError, Opened, pretty};
use quantkit::pack::gptq::{Packed, Version, pack, unpack};
use quantkit::quantize::Quantized;
use quantkit::scheme::{GroupSize, Scheme};
use quantkit::tensor::{Bytes, Dtype, words_to_bytes};
use serde_json::{Value, json};

const VERSIONS: [Version; 2] = [Version::V1, Version::V2];

fn scheme(bits: u8, group: i32, sym: bool) -> Scheme {
    Scheme { bits, group_size: GroupSize::new(group).unwrap(), sym }
}

/// A deterministic source of test numbers.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % bound
    }
}

/// Random integers that both versions hold; with `scattered`, groups as activation order leaves them.
fn quantized(rows: usize, cols: usize, scheme: Scheme, scattered: bool, seed: u64) -> Quantized {
    let mut numbers = Numbers(seed);
    let groups = scheme.group_size.count(cols);
    let size = scheme.group_size.columns(cols);
    let mut order: Vec<usize> = (0..cols).collect();
    if scattered {
        for i in (1..cols).rev() {
            order.swap(i, numbers.below(i + 1));
        }
    }
    let top = scheme.top() as usize;
    let sign = |negative: usize| if negative == 0 { -1.0 } else { 1.0 };
    Quantized {
        rows,
        cols,
        scheme,
        codes: (0..rows * cols).map(|_| numbers.below(top + 1) as u8).collect(),
        scales: (0..groups * rows)
            .map(|_| f16::from_f32((1 + numbers.below(999)) as f32 / 512.0 * sign(numbers.below(8))))
            .collect(),
        zeros: (0..groups * rows)
            .map(|_| if scheme.sym { scheme.middle() } else { 1 + numbers.below(top) as u8 })
            .collect(),
        g_idx: order.into_iter().map(|k| (k / size) as u32).collect(),
    }
}

fn values(weight: &Quantized) -> Vec<f32> {
    (0..weight.rows * weight.cols).map(|i| weight.value(i / weight.cols, i % weight.cols)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn packing_is_undone(
        bits in prop::sample::select(vec![2u8, 3, 4, 8]),
        group in prop::sample::select(vec![-1, 16, 32, 40, 128]),
        (sym, scattered) in any::<(bool, bool)>(),
        (rows, cols) in (1usize..5, 1usize..9),
        seed in any::<u64>(),
    ) {
        let weight = quantized(rows * 32, cols * 32, scheme(bits, group, sym), scattered, seed);
        for version in VERSIONS {
            let packed = pack(&weight, version).unwrap();
            prop_assert_eq!(&unpack(&packed), &weight);
            prop_assert_eq!(packed.to_weight().to_f32(), values(&weight));
        }
    }
}

#[test]
fn widths_of_whole_words_suffice() {
    for (rows, cols, bits) in [(8, 24, 4), (16, 48, 2), (4, 12, 8), (96, 32, 3)] {
        let weight = quantized(rows, cols, scheme(bits, 16, false), true, 7);
        assert_eq!(unpack(&pack(&weight, Version::V1).unwrap()), weight, "{rows}x{cols} at {bits} bits");
    }
}

/// A small artifact in memory, to be spoiled before it is written.
struct Artifact {
    config: Value,
    tensors: BTreeMap<String, (TensorSpec, Bytes)>,
}

fn config(scheme: Scheme, version: Version, rules: Vec<Rule>) -> GptqConfig {
    GptqConfig {
        scheme,
        version,
        desc_act: true,
        static_groups: false,
        group_aware: false,
        damp_percent: Some(0.01),
        true_sequential: true,
        grid: "minmax".into(),
        rules,
    }
}

impl Artifact {
    fn new(config: &GptqConfig, linears: &[(&str, &Quantized)]) -> Self {
        let source = json!({"model_type": "llama", "torch_dtype": "float16"});
        let mut artifact =
            Self { config: config_json(&source, &config.quantization_config()), tensors: BTreeMap::new() };
        artifact.add(TensorSpec::new("model.norm.weight", Dtype::F16, [4]), vec![0; 8]);
        artifact.add(
            TensorSpec::new("lm_head.weight", Dtype::F32, [2, 2]),
            bytemuck::cast_slice(&[1f32, 2., 3., 4.]).to_vec(),
        );
        for (name, weight) in linears {
            let packed: Packed = pack(weight, config.version).unwrap();
            let tensors = linear_tensors(name, &packed);
            let specs: Vec<TensorSpec> = tensors.iter().map(|(spec, _)| spec.clone()).collect();
            assert_eq!(specs, linear_specs(name, weight.rows, weight.cols, weight.scheme));
            artifact.tensors.extend(tensors.into_iter().map(|(spec, bytes)| (spec.name.clone(), (spec, bytes))));
        }
        artifact
    }

    fn add(&mut self, spec: TensorSpec, bytes: Vec<u8>) {
        self.tensors.insert(spec.name.clone(), (spec, bytes.into()));
    }

    fn write(&self, dir: &Path, max_shard_bytes: u64) {
        fs::write(dir.join("config.json"), pretty(&self.config)).unwrap();
        let specs = self.tensors.values().map(|(spec, _)| spec.clone()).collect();
        write_sharded(dir, specs, max_shard_bytes, |spec| Ok::<_, Infallible>(self.tensors[&spec.name].1.clone()))
            .unwrap();
    }

    fn open(&self) -> Result<Opened, FormatError> {
        let dir = tempfile::tempdir().unwrap();
        self.write(dir.path(), u64::MAX);
        // The map keeps the file's contents after the folder is gone.
        quantkit::format::open(Checkpoint::open(dir.path()).unwrap())
    }

    fn damage(&self) -> String {
        match self.open() {
            Ok(_) => panic!("accepted"),
            Err(error) => error.to_string(),
        }
    }
}

const UP: &str = "model.layers.0.mlp.up_proj";
const DOWN: &str = "model.layers.0.mlp.down_proj";

#[test]
fn artifacts_are_read_as_written() {
    let (up, down) = (
        quantized(64, 96, scheme(4, 32, false), true, 1),
        // The last group is short.
        quantized(96, 64, scheme(3, 48, true), false, 2),
    );
    for version in VERSIONS {
        let rules = [Rule::for_modules(&[DOWN], Some(down.scheme)), Rule::for_modules(&["lm_head"], None)].concat();
        let artifact = Artifact::new(&config(up.scheme, version, rules), &[(UP, &up), (DOWN, &down)]);
        let dir = tempfile::tempdir().unwrap();
        artifact.write(dir.path(), 3000);
        assert!(dir.path().join("model.safetensors.index.json").exists());
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        assert_eq!(checkpoint.config()["dtype"], "float16");
        let opened = quantkit::format::open(checkpoint).unwrap();
        assert_eq!(opened.method, Some("gptq"));
        assert_eq!(opened.warnings, [""; 0]);
        for (name, weight) in [(UP, &up), (DOWN, &down)] {
            let read = opened.source.linear(name, weight.rows, weight.cols).unwrap();
            assert_eq!(read.to_f32(), values(weight), "{name} {version:?}");
        }
        let head = opened.source.linear("lm_head", 2, 2).unwrap();
        assert!(matches!(head, Weight::Dense(_)));
        assert_eq!(head.to_f32(), [1., 2., 3., 4.]);
        let error = opened.source.linear(UP, 96, 64).unwrap_err().to_string();
        assert!(error.contains("64 outputs and 96 inputs") && error.contains(UP), "{error}");
    }
}

#[test]
fn configs_are_found_wherever_writers_put_them() {
    let weight = quantized(32, 64, scheme(4, 32, true), false, 3);
    let artifact = Artifact::new(&config(weight.scheme, Version::V1, vec![]), &[(UP, &weight)]);
    let quantization = artifact.config["quantization_config"].clone();
    let bare = json!({"bits": 4, "group_size": 32, "desc_act": false});
    for (config, side) in [
        (json!({"text_config": {"quantization_config": quantization}}), None),
        (json!({"quantization_config": null}), Some(("quantize_config.json", &quantization))),
        (json!({}), Some(("quant_config.json", &quantization))),
        (json!({}), Some(("quantize_config.json", &bare))),
    ] {
        let dir = tempfile::tempdir().unwrap();
        artifact.write(dir.path(), u64::MAX);
        fs::write(dir.path().join("config.json"), pretty(&config)).unwrap();
        if let Some((name, value)) = side {
            fs::write(dir.path().join(name), pretty(value)).unwrap();
        }
        let opened = quantkit::format::open(Checkpoint::open(dir.path()).unwrap()).unwrap();
        assert_eq!(opened.source.linear(UP, 32, 64).unwrap().to_f32(), values(&weight));
    }

    let mut plain = artifact;
    plain.config = json!({});
    assert_eq!(plain.open().unwrap().method, None);
    plain.config = json!({"quantization_config": {"quant_method": "aqlm"}});
    let known = "gptq, awq, compressed-tensors, fp8, auto-round, modelopt";
    assert!(plain.damage().contains(&format!("quantized by `aqlm`, which is not read; readable are: {known}")));
    plain.config = json!({"quantization_config": {"bits": 4}});
    assert!(plain.damage().contains("no `quant_method`"));
}

#[test]
fn foreign_variants_are_read() {
    let weight = quantized(32, 64, scheme(4, 32, true), false, 4);
    let mut artifact = Artifact::new(&config(weight.scheme, Version::V1, vec![]), &[(UP, &weight)]);
    artifact.tensors.remove(&format!("{UP}.g_idx"));
    for dtype in [Dtype::BF16, Dtype::F32] {
        let scales: Vec<f32> = weight.scales.iter().map(|s| bf16::from_f32(s.to_f32()).to_f32()).collect();
        let bytes = match dtype {
            Dtype::F32 => bytemuck::cast_slice(&scales).to_vec(),
            _ => scales.iter().flat_map(|&s| bf16::from_f32(s).to_le_bytes()).collect(),
        };
        artifact.add(TensorSpec::new(format!("{UP}.scales"), dtype, [2, 32]), bytes);
        let rounded = Quantized { scales: scales.iter().map(|&s| f16::from_f32(s)).collect(), ..weight.clone() };
        let read = artifact.open().unwrap().source.linear(UP, 32, 64).unwrap();
        assert_eq!(read.to_f32(), values(&rounded), "{dtype}");
    }
    artifact.add(TensorSpec::new(format!("{UP}.g_idx"), Dtype::I32, [64]), vec![0; 256]);
    assert!(artifact.open().is_ok());
}

#[test]
fn the_values_decide_the_version() {
    let weight = quantized(32, 64, scheme(4, 32, true), false, 5);
    for (stored, labelled) in [(Version::V2, "gptq"), (Version::V1, "gptq_v2")] {
        let mut artifact = Artifact::new(&config(weight.scheme, stored, vec![]), &[(UP, &weight)]);
        for key in ["checkpoint_format", "format"] {
            artifact.config["quantization_config"][key] = labelled.into();
        }
        let opened = artifact.open().unwrap();
        assert_eq!(opened.source.linear(UP, 32, 64).unwrap().to_f32(), values(&weight));
        let [warning] = &opened.warnings[..] else { panic!("{:?}", opened.warnings) };
        assert!(warning.contains(labelled) && warning.contains(UP) && warning.contains("1 of 1"), "{warning}");
    }
    let odd = Quantized { zeros: vec![3; 64], ..weight };
    let opened = Artifact::new(&config(odd.scheme, Version::V1, vec![]), &[(UP, &odd)]).open().unwrap();
    assert!(opened.warnings[0].contains("says symmetric"), "{:?}", opened.warnings);
    assert_eq!(opened.source.linear(UP, 32, 64).unwrap().to_f32(), values(&odd));
}

#[test]
fn hostile_artifacts_are_refused() {
    let weight = quantized(32, 64, scheme(4, 32, false), true, 6);
    let fresh = || Artifact::new(&config(weight.scheme, Version::V2, vec![]), &[(UP, &weight)]);
    let with = |suffix: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>| {
        let mut artifact = fresh();
        artifact.add(TensorSpec::new(format!("{UP}.{suffix}"), dtype, shape), bytes);
        artifact.damage()
    };
    for (error, part) in [
        (with("qweight", Dtype::I32, &[7, 32], vec![0; 7 * 128]), "`qweight` has shape [7, 32]"),
        (with("qweight", Dtype::F32, &[8, 32], vec![0; 1024]), "`qweight` is F32"),
        (with("qweight", Dtype::I32, &[256], vec![0; 1024]), "two dimensions"),
        (with("qweight", Dtype::I32, &[1 << 60, 0], vec![]), "empty"),
        (with("scales", Dtype::F16, &[1, 32], vec![0; 64]), "`scales` has shape [1, 32]"),
        (with("scales", Dtype::I32, &[2, 32], vec![0; 256]), "`scales` is I32"),
        (with("qzeros", Dtype::I32, &[2, 5], vec![0; 40]), "`qzeros` has shape [2, 5]"),
        (with("g_idx", Dtype::I32, &[64], words_to_bytes(&[2; 64])), "input 0 into group 2"),
        (with("g_idx", Dtype::I32, &[64], words_to_bytes(&[1; 64])), "64 inputs into group 1"),
        (with("g_idx", Dtype::I64, &[64], vec![0; 512]), "`g_idx` is I64"),
    ] {
        assert!(error.contains(part) && error.contains(UP), "{error}");
    }
    for suffix in ["qzeros", "scales"] {
        let mut artifact = fresh();
        artifact.tensors.remove(&format!("{UP}.{suffix}"));
        let error = artifact.damage();
        assert!(error.contains(&format!("`{suffix}` is missing")), "{error}");
    }
    let mut nothing = fresh();
    nothing.tensors.retain(|name, _| !name.starts_with(UP));
    assert!(nothing.damage().contains("no tensor ends in `.qweight`"));
    let mut infinite = fresh();
    infinite.add(TensorSpec::new(format!("{UP}.scales"), Dtype::F16, [2, 32]), [0, 0x7C].repeat(64));
    let error = infinite.open().unwrap().source.linear(UP, 32, 64).unwrap_err().to_string();
    assert!(error.contains("the scale of output 0 in group 0 is inf"), "{error}");
}

/// A fault is reported by the first name in order, whatever the order of a map or of threads.
#[test]
fn the_first_fault_in_order_is_reported() {
    let header = |names: &[&str]| {
        let tensor = |(i, name): (usize, &&str)| {
            format!(r#""{name}":{{"dtype":"F4","shape":[4],"data_offsets":[{},{}]}}"#, 2 * i, 2 * i + 2)
        };
        let tensors: Vec<String> = names.iter().enumerate().map(tensor).collect();
        let text = format!("{{{}}}", tensors.join(","));
        [&(text.len() as u64).to_le_bytes(), text.as_bytes(), &vec![0; 2 * names.len()]].concat()
    };
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), "{}").unwrap();
    let names: Vec<String> = (0..20).map(|i| format!("layer.{i:02}.weight")).collect();
    let names: Vec<&str> = names.iter().rev().map(String::as_str).collect();
    fs::write(dir.path().join("model.safetensors"), header(&names)).unwrap();
    for _ in 0..8 {
        let error = Checkpoint::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains("tensor `layer.00.weight` is F4, which is not read"), "{error}");
    }

    let mut folder = folder::Folder::bare(json!({"quant_method": "fp8"}));
    for layer in 0..64 {
        folder.add(&format!("layer.{layer:02}.weight"), Dtype::F8E4M3, &[2, 2], vec![0x38; 4]);
    }
    for _ in 0..8 {
        assert!(folder.damage().contains("module `layer.00` in"));
    }
}

#[test]
fn output_appears_whole_or_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("deep/out");
    let entries = |dir: &Path| fs::read_dir(dir).unwrap().count();

    let out = OutputFolder::create(&target).unwrap();
    let record = out.write("config.json", b"{}").unwrap();
    assert!(!target.exists());
    assert_eq!(entries(&dir.path().join("deep")), 1);
    drop(out);
    assert!(!dir.path().join("deep").exists());

    fs::create_dir_all(&target).unwrap();
    let out = OutputFolder::create(&target).unwrap();
    let twin = OutputFolder::create(&target).unwrap();
    for out in [&out, &twin] {
        out.write("config.json", b"{}").unwrap();
        let manifest = Manifest {
            tool: "quantkit".into(),
            options: json!({}),
            source: vec![],
            calibration: None,
            outputs: vec![record.clone()],
            modules: json!({}),
        };
        manifest.write(out.path()).unwrap();
    }
    out.commit().unwrap();
    assert_eq!(verify_manifest(&target).unwrap(), []);
    assert!(matches!(twin.commit(), Err(OutputError::Exists(path)) if path == target));
    assert_eq!(entries(&dir.path().join("deep")), 1);
    let error = OutputFolder::create(&target).unwrap_err().to_string();
    assert!(error.contains("exists already") && error.contains("deep/out"), "{error}");
    assert_eq!(verify_manifest(&target).unwrap(), []);

    let file = dir.path().join("file");
    write_atomic(&file, b"x").unwrap();
    assert!(matches!(OutputFolder::create(&file), Err(OutputError::Exists(_))));
    let below = OutputFolder::create(&file.join("out")).unwrap_err().to_string();
    assert!(below.contains("cannot write in"), "{below}");
    assert!(OutputFolder::create(Path::new("/")).is_err());
}

#[cfg(unix)]
#[test]
fn unwritable_parents_are_found_before_work() {
    use std::os::unix::fs::PermissionsExt;
    // No permission holds the superuser back.
    if rustix::process::geteuid().is_root() {
        assert!(matches!(OutputFolder::create(Path::new("/proc/out")), Err(OutputError::Parent { .. })));
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o555)).unwrap();
    assert!(matches!(OutputFolder::create(&dir.path().join("out")), Err(OutputError::Parent { .. })));
    fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
}
