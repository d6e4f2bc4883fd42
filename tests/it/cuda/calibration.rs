//! Calibration on the device: each stage given what the CPU's calibration gave it.
//!
//! Whole runs part ways: a weight that lies on the border between two codes goes one way here and the other way
//! there, which moves the inputs of all that follows by as much as quantizing does. So each stage is compared with
//! the weights before it being those of the CPU's run.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use quantkit::backend::cache::LayerScales;
use quantkit::backend::cpu::Cpu;
use quantkit::backend::cuda::CudaOptions;
use quantkit::backend::{Backend, Matrix};
use quantkit::calibrate::corpus::Corpus;
use quantkit::calibrate::driver::{Course, Inputs, Needs, Quantizing, run};
use quantkit::checkpoint::Checkpoint;
use quantkit::model::block::{Block, Stage};
use quantkit::model::source::DenseSource;
use quantkit::model::tokenizer::Tokenizer;
use quantkit::model::{Model, ModelError};
use quantkit::pack::gptq::{Version, pack};
use quantkit::quantize::Quantized;
use quantkit::quantize::gptq::{Curvature, GptqOptions, PassOptions, gptq};
use quantkit::quantize::order::Order;
use quantkit::quantize::scale_search::ScaleSearch;
use quantkit::scheme::{GroupSize, Scheme};

use super::cuda;

fn options() -> GptqOptions {
    GptqOptions {
        scheme: Scheme { bits: 4, group_size: GroupSize::new(128).unwrap(), sym: true },
        pass: PassOptions {
            order: Order::GroupAware,
            static_groups: false,
            damp_percent: 0.05,
            damp_auto_increment: 0.01,
            sweeps: 1,
        },
        grid: ScaleSearch::Hessian,
        least_zero: 0,
    }
}

/// Quantizes with GPTQ on `backend`; carries on with the results of `leader` where there is one.
struct Job {
    backend: Arc<dyn Backend>,
    leader: Option<BTreeMap<String, Quantized>>,
    results: BTreeMap<String, Quantized>,
}

impl Quantizing for Job {
    type Error = ModelError;

    fn needs(&self) -> Needs {
        Needs { gram: true, ..Needs::default() }
    }

    fn restored(&mut self, _block: &Block, _stage: Stage) -> Result<Option<Vec<Matrix>>, ModelError> {
        Ok(None)
    }

    fn quantize(&mut self, block: &Block, stage: Stage, inputs: &Inputs) -> Result<Vec<Matrix>, ModelError> {
        let backend = &*self.backend;
        let gram = inputs.gram.as_ref().unwrap();
        let (size, drift, pass) = (options().scheme.group_size, inputs.drift.as_ref(), options().pass);
        let curvature = Curvature::new(backend, gram, &inputs.diagonal, drift, size, &pass).unwrap();
        let linears = block.linears(stage).into_iter().map(|linear| {
            let found = gptq(backend, &linear.weight, &curvature, &options())?.0;
            let leading = self.leader.as_ref().map_or(&found, |leader| &leader[&linear.path]);
            let matrix = backend.load(pack(leading, Version::V1).unwrap().to_weight())?;
            self.results.insert(linear.path.clone(), found);
            Ok(matrix)
        });
        linears.collect()
    }

    fn finished(&mut self, _block: &Block, _cache: Option<LayerScales>) -> Result<(), ModelError> {
        Ok(())
    }
}

fn calibrate(
    backend: Arc<dyn Backend>,
    leader: Option<BTreeMap<String, Quantized>>,
    drift: bool,
) -> BTreeMap<String, Quantized> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("calib/demo/target");
    let model = Model::open(Box::new(DenseSource(Checkpoint::open(&dir).unwrap())), backend.clone()).unwrap();
    let tokens = Tokenizer::load(model.checkpoint()).unwrap().encode(&Corpus::builtin().text().unwrap()).unwrap();
    let windows: Vec<Vec<u32>> = tokens.chunks(128).take(8).map(<[u32]>::to_vec).collect();
    let mut job = Job { backend, leader, results: BTreeMap::new() };
    run(&model, &windows, Course { true_sequential: true, drift, sample: None }, &mut job).unwrap();
    job.results
}

#[test]
fn every_stage_chooses_the_cpus_codes() {
    for drift in [false, true] {
        let host = calibrate(Arc::new(Cpu), None, drift);
        let device = calibrate(cuda(CudaOptions::default()), Some(host.clone()), drift);
        let (mut equal, mut all) = (0, 0);
        for (path, host) in &host {
            let pairs = || host.codes.iter().zip(&device[path].codes);
            let same = pairs().filter(|(a, b)| a == b).count();
            // A flip goes on through its row; of a small weight a few rows are much.
            assert!(same as f64 >= 0.97 * host.codes.len() as f64, "{path}: {same} of {}", host.codes.len());
            (equal, all) = (equal + same, all + host.codes.len());
        }
        eprintln!("drift {drift}: {equal} of {all} codes are equal");
        assert!(equal as f64 >= 0.99 * all as f64, "drift {drift}: {equal} of {all} codes are equal");
    }
}
