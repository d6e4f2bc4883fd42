//! Finished blocks on disk, so that an interrupted run can go on. Each block is a little artifact of its
//! own: what is read back has passed the same checks as any artifact.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::super::observer::Reporter;
use super::super::options::Resume;
use crate::checkpoint::Checkpoint;
use crate::format::atomic::{OutputFolder, lock};
use crate::format::output::write_atomic;
use crate::format::safetensors::TensorSpec;
use crate::format::{self, pretty, safetensors};
use crate::model::fold::Fold;
use crate::tensor::Bytes;

/// What came of one module.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModuleReport {
    pub module: String,
    /// `gptq`, `rtn`, or why a fallback was taken.
    pub method: String,
    pub bits: u8,
    pub group_size: i32,
    pub sym: bool,
    /// Half the squared output error per token of calibration, as GPTQ reports it.
    pub loss: f64,
    /// Tokens of calibration that it was seen to read; absent where its inputs were not looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub damp_percent: Option<f64>,
    /// Input channels that calibration saw only as zero.
    pub dead_channels: usize,
    /// The largest magnitude among its inputs.
    #[serde(default, skip_serializing_if = "Option::is_none", serialize_with = "crate::num::short::option")]
    pub input_max: Option<f32>,
    /// That in parts of their root mean square.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_crest: Option<f64>,
}

/// What came of one block.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BlockReport {
    /// Its path.
    pub block: String,
    pub modules: Vec<ModuleReport>,
    /// Scales that were moved before rounding.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub folds: Vec<Fold>,
    /// What they made of the error that the search measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_ratio: Option<f64>,
    /// How strongly inputs were smoothed.
    #[serde(default, skip_serializing_if = "Option::is_none", serialize_with = "crate::num::short::option")]
    pub alpha: Option<f32>,
}

/// A block that an earlier run finished.
pub struct Finished {
    pub opened: format::Opened,
    pub report: BlockReport,
}

/// What [`Work::open`] found.
pub struct Found {
    pub work: Work,
    /// The blocks of an equal run are there.
    pub resumed: bool,
    /// How many blocks of another run were removed.
    pub removed: usize,
}

/// The folder beside the output that holds finished blocks. It goes when it is dropped without any.
pub struct Work {
    /// The output that the blocks are for.
    out: PathBuf,
    dir: PathBuf,
    quantization: Value,
    reporter: Reporter,
    _lock: Option<File>,
}

impl Work {
    fn folder(out: &Path) -> Result<PathBuf> {
        let name = out.file_name().context("the output folder needs a name")?.to_string_lossy();
        Ok(out.with_file_name(format!(".{name}.quantkit-work")))
    }

    /// Bytes that the work folder of `out` holds: blocks that need not be written, or will be removed.
    pub fn held_bytes(out: &Path) -> Result<u64> {
        let (mut bytes, mut waiting) = (0, vec![Self::folder(out)?]);
        while let Some(dir) = waiting.pop() {
            for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
                match entry.metadata() {
                    Ok(found) if found.is_dir() => waiting.push(entry.path()),
                    Ok(found) => bytes += found.len(),
                    Err(_) => {}
                }
            }
        }
        Ok(bytes)
    }

    /// Opens the work folder of `out` for a run described by `job`.
    pub fn open(out: &Path, job: &Value, quantization: Value, resume: Resume, reporter: &Reporter) -> Result<Found> {
        let dir = Self::folder(out)?;
        let record = dir.join("job.json");
        let (mut resumed, mut removed) = (false, 0);
        // Where folders cannot be locked, two runs at once are the user's affair.
        let take = || match lock(&dir) {
            Ok(None) => {
                bail!("another run is writing `{}`; wait for it, or name another folder with --out", out.display())
            }
            held => Ok(held.ok().flatten()),
        };
        if dir.exists() {
            let _held = take()?;
            let earlier: Value =
                fs::read(&record).ok().and_then(|b| serde_json::from_slice(&b).ok()).unwrap_or_default();
            let finished = blocks_in(&dir);
            let same = earlier == *job;
            if resume == Resume::Yes || (resume == Resume::IfSame && same) {
                if !same {
                    bail!(
                        "--resume: `{}` comes from other options, another model or another version{}; run without --resume to start anew",
                        dir.display(),
                        difference(&earlier, job)
                    );
                }
                resumed = true;
            } else if same && finished > 0 {
                bail!(
                    "an earlier run with the same options finished {}, kept in `{}`; use `--resume` to go on from there, or delete that folder to start anew",
                    blocks(finished),
                    dir.display()
                );
            } else {
                removed = finished;
                fs::remove_dir_all(&dir)
                    .with_context(|| format!("cannot remove `{}` of an earlier run", dir.display()))?;
            }
        }
        fs::create_dir_all(&dir).with_context(|| format!("cannot create `{}`", dir.display()))?;
        let work = Self { _lock: take()?, out: out.into(), dir, quantization, reporter: reporter.clone() };
        if !resumed {
            reporter.renamed(&record, out);
            write_atomic(&record, &pretty(job))?;
        }
        Ok(Found { work, resumed, removed })
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// How many blocks there are that `--resume` could take up.
    pub fn finished(&self) -> usize {
        blocks_in(&self.dir)
    }

    fn block(&self, index: usize) -> PathBuf {
        self.dir.join(format!("block-{index:05}"))
    }

    /// The finished block `index`, if there is one.
    pub fn load(&self, index: usize) -> Result<Option<Finished>> {
        let dir = self.block(index);
        if !dir.exists() {
            return Ok(None);
        }
        let read = || -> Result<_> {
            let report = serde_json::from_slice(&fs::read(dir.join("report.json"))?)?;
            Ok(Finished { opened: format::open(Checkpoint::open(&dir)?)?, report })
        };
        read()
            .map(Some)
            .with_context(|| format!("`{}` is damaged; delete it and run with --resume again", dir.display()))
    }

    /// Stores block `index`: whole, or not at all.
    pub fn store(&self, index: usize, tensors: &[(TensorSpec, Bytes)], report: &BlockReport) -> Result<()> {
        let folder = OutputFolder::create(&self.block(index))?;
        self.reporter.renamed(folder.path(), &self.out);
        let mut config = json!({});
        if !report.modules.is_empty() {
            config["quantization_config"] = self.quantization.clone();
        }
        let specs = tensors.iter().map(|(spec, _)| spec.clone()).collect();
        safetensors::write(&folder.path().join("model.safetensors"), specs, |spec| {
            let found = tensors.iter().find(|(s, _)| s.name == spec.name).map(|(_, bytes)| bytes.clone());
            found.context("a planned tensor has no data")
        })?;
        folder.write("config.json", &pretty(&config))?;
        folder.write("report.json", &pretty(&serde_json::to_value(report)?))?;
        Ok(folder.commit()?)
    }

    /// Removes the folder: the artifact has taken its place, or its blocks are of no use.
    pub fn remove(self) -> Result<()> {
        fs::remove_dir_all(&self.dir).with_context(|| format!("cannot remove `{}`", self.dir.display()))
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        if self.finished() == 0 {
            // Without blocks it is worth nothing to anyone, and nobody is left to hear of a failure.
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}

fn blocks_in(dir: &Path) -> usize {
    let is_block = |name: &str| name.starts_with("block-");
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_name().to_str().is_some_and(is_block)).count()
}

/// So many blocks, in words.
pub fn blocks(count: usize) -> String {
    format!("{count} block{}", if count == 1 { "" } else { "s" })
}

/// The first top-level key in which two records differ, for the message.
fn difference(a: &Value, b: &Value) -> String {
    let (Some(a), Some(b)) = (a.as_object(), b.as_object()) else { return String::new() };
    let differs = |key: &&String| a.get(*key) != b.get(*key);
    match b.keys().chain(a.keys()).find(differs).map(String::as_str) {
        Some(key) => match (a[key].as_object(), b[key].as_object()) {
            (Some(_), Some(_)) => format!(" (`{key}`{})", difference(&a[key], &b[key])),
            _ => format!(" (`{key}` differs)"),
        },
        None => String::new(),
    }
}
