//! A small artifact in memory, made by a layout or by hand, to be spoiled before it is written.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fs;
use std::path::Path;

use half::f16;
use quantkit::backend::weight::{Inputs, Weight};
use quantkit::checkpoint::Checkpoint;
use quantkit::format::config::config_json;
use quantkit::format::kind::{Module, Tile};
use quantkit::format::layout::{Description, Layout, Solution};
use quantkit::format::safetensors::{TensorSpec, write_sharded};
use quantkit::format::{FormatError, Opened, pretty};
use quantkit::num::e4m3;
use quantkit::quantize::Quantized;
use quantkit::quantize::float8::Float8;
use quantkit::scheme::{GroupSize, Scheme};
use quantkit::tensor::{Bytes, Dtype};
use serde_json::{Value, json};

use super::Numbers;

pub const UP: &str = "model.layers.0.mlp.up_proj";
pub const DOWN: &str = "model.layers.0.mlp.down_proj";

/// What solutions have in common with schemes where those say nothing: floats of 8 bits.
pub const EIGHT: Scheme = Scheme { bits: 8, group_size: GroupSize::CHANNEL, sym: true };

pub struct Folder {
    pub config: Value,
    pub tensors: BTreeMap<String, (TensorSpec, Bytes)>,
}

/// A linear to be stored: its path, the scheme that the layout hears of, and the solution.
pub type Solved<'a> = (&'a str, Scheme, Solution);

impl Folder {
    /// A folder with nothing quantized in it.
    pub fn bare(quantization: Value) -> Self {
        let mut folder = Self { config: json!({"quantization_config": quantization}), tensors: BTreeMap::new() };
        folder.add("model.norm.weight", Dtype::F16, &[4], vec![0; 8]);
        folder.add("lm_head.weight", Dtype::F32, &[2, 2], bytemuck::cast_slice(&[1f32, 2., 3., 4.]).to_vec());
        folder
    }

    /// What `layout` makes of `linears`. Everything that it promises beforehand is held against what it does.
    pub fn new(layout: &dyn Layout, linears: &[Solved]) -> Self {
        let modules: Vec<Module> =
            linears.iter().map(|(name, scheme, solution)| module(name, *scheme, solution)).collect();
        layout.accepts(&modules).unwrap();
        let outside = ["lm_head".to_string()];
        let description = Description {
            method: "rtn",
            base: linears[0].1,
            modules: &modules,
            outside: &outside,
            gptq: None,
            grid: "minmax",
            kv_cache: None,
        };
        let source = json!({"model_type": "llama", "torch_dtype": "float16"});
        let quantization = layout.config(&description);
        assert_eq!(quantization["quant_method"], layout.method());
        let mut folder = Self::bare(Value::Null);
        folder.config = config_json(&source, &quantization);
        for (module, (name, scheme, solution)) in modules.iter().zip(linears) {
            layout.check(module.rows, module.cols, *scheme).unwrap();
            let stored = layout.store(name, solution).unwrap();
            let specs: Vec<TensorSpec> = stored.tensors.iter().map(|(spec, _)| spec.clone()).collect();
            assert_eq!(specs, layout.specs(module, *scheme));
            same(&stored.weight.to_f32(), &values(solution), name);
            assert_eq!(inputs(&stored.weight), given(solution));
            for (spec, bytes) in stored.tensors {
                assert_eq!(spec.bytes(), bytes.len() as u64, "{}", spec.name);
                folder.tensors.insert(spec.name.clone(), (spec, bytes));
            }
        }
        folder
    }

    pub fn add(&mut self, name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) {
        self.tensors.insert(name.into(), (TensorSpec::new(name, dtype, shape), bytes.into()));
    }

    /// A tensor of [`UP`].
    pub fn set(&mut self, what: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) {
        self.add(&format!("{UP}.{what}"), dtype, shape, bytes);
    }

    pub fn quantization(&mut self) -> &mut Value {
        &mut self.config["quantization_config"]
    }

    pub fn write(&self, dir: &Path) {
        fs::write(dir.join("config.json"), pretty(&self.config)).unwrap();
        let specs = self.tensors.values().map(|(spec, _)| spec.clone()).collect();
        let data = |spec: &TensorSpec| Ok::<_, Infallible>(self.tensors[&spec.name].1.clone());
        write_sharded(dir, specs, u64::MAX, data).unwrap();
    }

    pub fn open(&self) -> Result<Opened, FormatError> {
        let dir = tempfile::tempdir().unwrap();
        self.write(dir.path());
        // The map keeps the file's contents after the folder is gone.
        quantkit::format::open(Checkpoint::open(dir.path()).unwrap())
    }

    /// The values of [`UP`] as they are read.
    pub fn read(&self, rows: usize, cols: usize) -> Vec<f32> {
        self.open().unwrap().source.linear(UP, rows, cols).unwrap().to_f32()
    }

    /// Why the folder cannot be opened.
    pub fn damage(&self) -> String {
        match self.open() {
            Ok(_) => panic!("accepted"),
            Err(error) => error.to_string(),
        }
    }

    /// Why [`UP`] cannot be loaded from a folder that can be opened.
    pub fn unloadable(&self, rows: usize, cols: usize) -> String {
        self.open().unwrap().source.linear(UP, rows, cols).err().unwrap().to_string()
    }
}

fn module(name: &str, scheme: Scheme, solution: &Solution) -> Module {
    let (rows, cols) = match solution {
        Solution::Integers { weight, .. } => (weight.rows, weight.cols),
        Solution::Float8 { weight, .. } => (weight.rows, weight.cols),
    };
    Module { name: name.into(), rows, cols, scheme: Some(scheme) }
}

/// What a solution stands for.
pub fn values(solution: &Solution) -> Vec<f32> {
    match solution {
        Solution::Integers { weight, .. } => super::values(weight),
        Solution::Float8 { weight, .. } => {
            let Float8 { rows, cols, tile, .. } = *weight;
            let at = |i: usize| i / cols / tile.0 * cols.div_ceil(tile.1) + i % cols / tile.1;
            (0..rows * cols).map(|i| weight.scales[at(i)] * e4m3::decode(weight.values[i])).collect()
        }
    }
}

fn given(solution: &Solution) -> Inputs {
    match solution {
        Solution::Integers { inputs, .. } | Solution::Float8 { inputs, .. } => *inputs,
    }
}

/// Equal numbers; the first that differ are named.
#[track_caller]
pub fn same(found: &[f32], wanted: &[f32], what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    if let Some(at) = found.iter().zip(wanted).position(|(a, b)| a != b) {
        panic!("{what}: element {at} is {}, not {}", found[at], wanted[at]);
    }
}

/// What a weight does to its inputs.
pub fn inputs(weight: &Weight) -> Inputs {
    match weight {
        Weight::Int8(weight) => weight.inputs,
        Weight::Fp8(weight) => weight.inputs,
        _ => Inputs::Float,
    }
}

/// Opens a folder and holds every linear against its solution.
pub fn read_back(layout: &dyn Layout, linears: &[Solved]) {
    let opened = Folder::new(layout, linears).open().unwrap();
    assert_eq!(opened.method, Some(layout.method()));
    assert_eq!(opened.warnings, [""; 0]);
    for (name, _, solution) in linears {
        let (rows, cols) = match solution {
            Solution::Integers { weight, .. } => (weight.rows, weight.cols),
            Solution::Float8 { weight, .. } => (weight.rows, weight.cols),
        };
        let weight = opened.source.linear(name, rows, cols).unwrap();
        same(&weight.to_f32(), &values(solution), name);
        assert_eq!(inputs(&weight), given(solution), "{name}");
        let error = opened.source.linear(name, rows + 1, cols).err().unwrap().to_string();
        assert!(error.contains(&format!("it has {rows} outputs and {cols} inputs")) && error.contains(name), "{error}");
    }
    let head = opened.source.linear("lm_head", 2, 2).unwrap();
    assert!(matches!(head, Weight::Dense(_)));
    assert_eq!(head.to_f32(), [1., 2., 3., 4.]);
}

/// Random integers; symmetric ones with the middle as zero point.
pub fn integers(rows: usize, cols: usize, scheme: Scheme, seed: u64) -> Quantized {
    let mut weight = super::quantized(rows, cols, scheme, false, seed);
    let mut numbers = Numbers(seed ^ 77);
    // Nothing here shifts zero points, so that 0 is one like any other.
    if !scheme.sym {
        weight.zeros.iter_mut().for_each(|zero| *zero = numbers.below(scheme.top() as usize + 1) as u8);
    }
    weight.scales.iter_mut().for_each(|scale| *scale = f16::from_f32(scale.to_f32() / 8.0));
    weight
}

/// Random E4M3 numbers.
pub fn floats(rows: usize, cols: usize, tile: Tile, seed: u64) -> Float8 {
    let mut numbers = Numbers(seed);
    let count = tile.scales(rows, cols).iter().product();
    let value = |code: usize| if code & 127 == 127 { 0 } else { code as u8 };
    Float8 {
        rows,
        cols,
        values: (0..rows * cols).map(|_| value(numbers.below(256))).collect(),
        scales: (0..count).map(|_| (1 + numbers.below(999)) as f32 / 3.0).collect(),
        tile: tile.size(rows, cols),
    }
}
