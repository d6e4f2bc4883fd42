//! GPTQ on the device, the twin of `quantize::curvature` and `quantize::pass`. Weights are `[rows, columns]` in the
//! order in which columns are taken; a row never depends on another.

use std::sync::Arc;

use super::super::solver::{BLOCK as COLUMNS, Factor as AnyFactor, Ordered, Rounding, Solution, Solver, block_end};
use super::super::weight::Weight;
use super::super::{Done, Drift, Gram, Matrix};
use super::device::Launch;
use super::weights::{DeviceMatrix, Plane};
use super::{BLOCK, Buffer, Cuda, Device, blocks, floats};
use crate::tensor::Dtype;

/// Rows and columns of the tiles in which a Hessian is factored, as the kernels have it.
const TILE: usize = 64;
/// Rows that a block takes, a warp each.
const WARPS: usize = 8;
/// Weights solved at once, so that large layers do not decide the memory needed.
const WEIGHTS_AT_ONCE: usize = 64 << 20;

/// What the solver keeps of a Hessian.
pub struct Factor {
    /// Upper triangle U, f32 row-major, in order.
    pub u: Buffer,
    /// The whole damped H in order, where sweeps want it.
    pub h: Option<Buffer>,
    /// The drift in order.
    pub drift: Option<Buffer>,
}

/// The diagonal of a lower triangle of `n` rows.
pub fn diagonal(lower: &Buffer, n: usize) -> Done<Vec<f64>> {
    let device = lower.device();
    let out = device.alloc(n * 8)?;
    device.launch("gram_diagonal", blocks(n), BLOCK).buffer(lower).buffer(&out).u32(n).go()?;
    device.download(&out, 0, n)
}

impl Solver for Cuda {
    fn factor(
        &self,
        gram: &Gram,
        drift: Option<&Drift>,
        order: Ordered,
        scale: f64,
        diagonal: &[f64],
        whole: bool,
    ) -> Done<Option<AnyFactor>> {
        let (device, n) = (self.first(), gram.n);
        let (columns, diagonal) = (numbers(device, order.columns)?, device.upload(diagonal)?);
        let hessian = |kernel, out: &Buffer| {
            let launch = device.launch(kernel, by_columns(n, n), BLOCK).buffer(gram.lower.buffer());
            launch.buffer(&columns).buffer(&diagonal).buffer(out).u32(n).f64(scale).go()
        };
        let a = device.alloc(n * n * 8)?;
        hessian("reversed_hessian", &a)?;
        let Some(u) = inverse_factor(a, n)? else { return Ok(None) };
        let h = whole.then(|| floats(device, n, n)).transpose()?;
        if let Some(h) = &h {
            hessian("ordered_hessian", h)?;
        }
        let drift = drift.map(|drift| {
            let out = floats(device, n, n)?;
            let launch = device.launch("ordered_drift", by_columns(n, n), BLOCK).buffer(drift.values.buffer());
            launch.buffer(&columns).buffer(&out).u32(n).f32(scale as f32).go()?;
            Ok(out)
        });
        Ok(Some(AnyFactor(Factor { u, h, drift: drift.transpose()? })))
    }

    fn solve(&self, weight: &Matrix, factor: &AnyFactor, order: Ordered, rounding: &Rounding) -> Done<Solution> {
        let (rows, n) = (weight.weight().rows(), weight.weight().cols());
        let job = Job::new(self.first(), &factor.0, order, rounding)?;
        let groups = job.group_count;
        let mut solution = Solution {
            codes: Vec::with_capacity(rows * n),
            scales: vec![0.0; groups * rows],
            zeros: vec![0; groups * rows],
            loss: 0.0,
        };
        let at_once = (WEIGHTS_AT_ONCE / n).max(1);
        for first in (0..rows).step_by(at_once) {
            let count = at_once.min(rows - first);
            let solved = job.solve(self.ordered(weight, first, count, &job)?, count)?;
            let scales = job.device.download::<f32>(&solved.scales, 0, count * groups)?;
            let zeros = job.device.download::<f32>(&solved.zeros, 0, count * groups)?;
            for row in 0..count {
                for g in 0..groups {
                    solution.scales[g * rows + first + row] = scales[row * groups + g];
                    solution.zeros[g * rows + first + row] = zeros[row * groups + g] as u8;
                }
            }
            solution.codes.extend(job.device.download::<u8>(&solved.codes, 0, count * n)?);
            solution.loss +=
                job.device.download::<f32>(&solved.loss, 0, count)?.iter().map(|&l| f64::from(l)).sum::<f64>();
        }
        Ok(solution)
    }
}

impl Cuda {
    /// Rows `first..first + count` of a weight in order, those of dead channels zero.
    fn ordered(&self, weight: &Matrix, first: usize, count: usize, job: &Job) -> Done<Buffer> {
        let (device, n) = (&job.device, job.n);
        let out = floats(device, count, n)?;
        let (kernel, values, at, stride) = match weight.weight() {
            Weight::Dense(w) if w.dtype == Dtype::F32 => {
                // What products use of such a weight lacks its last bits.
                let mut values = vec![0.0; count * n];
                weight.weight().panel(first..first + count, &mut values);
                ("gather_f32", device.upload(&values)?, 0, n)
            }
            _ => match &*self.matrix(weight, device)? {
                DeviceMatrix::Dense { plane, high, stride, .. } => {
                    let kernel = if *plane == Plane::F16 { "gather_f16" } else { "gather_bf16" };
                    (kernel, high.clone(), first * stride * 2, *stride)
                }
                DeviceMatrix::Quant(_) | DeviceMatrix::Ggml { .. } | DeviceMatrix::Int8(_) | DeviceMatrix::Fp8(_) => {
                    return Err(device.failed("a weight that is quantized already"));
                }
            },
        };
        let launch = device.launch(kernel, by_columns(count, n), BLOCK).buffer_at(&values, at);
        launch.buffer(&job.columns).buffer(&job.dead).buffer(&out).u32(n).u32(stride).go()?;
        Ok(out)
    }
}

/// Blocks of `BLOCK` columns in each of some rows.
fn by_columns(rows: usize, n: usize) -> [usize; 3] {
    [rows, n.div_ceil(BLOCK), 1]
}

fn numbers(device: &Arc<Device>, values: &[usize]) -> Done<Buffer> {
    device.upload(&values.iter().map(|&v| v as u32).collect::<Vec<u32>>())
}

/// U with H^-1 = U'U for the lower triangle `a` (f64) of H in reversed order, which is used up; `None` when H is not
/// positive definite. `num::linalg::inverse_factor` tells why the order is reversed.
fn inverse_factor(a: Buffer, n: usize) -> Done<Option<Buffer>> {
    let device = a.device();
    let tiles = n.div_ceil(TILE);
    let failed = device.alloc(4)?;
    device.zero(&failed)?;
    for t in 0..tiles {
        let below = tiles - 1 - t;
        device.launch("cholesky_tile", [1, 1, 1], BLOCK).buffer(&a).buffer(&failed).u32(n).u32(t).go()?;
        device.launch("cholesky_panel", [below, 1, 1], BLOCK).buffer(&a).u32(n).u32(t).go()?;
        device.launch("cholesky_update", [below, below, 1], BLOCK).buffer(&a).u32(n).u32(t).go()?;
    }
    let panel = device.alloc(n * TILE * 8)?;
    for t in 0..tiles {
        let below = tiles - 1 - t;
        device.launch("inverse_row", [tiles, 1, 1], BLOCK).buffer(&a).buffer(&panel).u32(n).u32(t).go()?;
        let launch = device.launch("inverse_update", [t + 1, below, 1], BLOCK);
        launch.buffer(&a).buffer(&panel).u32(n).u32(t).go()?;
    }
    let u = floats(device, n, n)?;
    let launch = device.launch("inverse_store", by_columns(n, n), BLOCK);
    launch.buffer(&a).buffer(&u).buffer(&failed).u32(n).go()?;
    Ok((device.download::<u32>(&failed, 0, 1)? == [0]).then_some(u))
}

/// A matrix in device memory: element (r, c) is at `at + r * row + c * col`, all in elements.
#[derive(Clone, Copy)]
struct View<'a> {
    buffer: &'a Buffer,
    at: usize,
    row: usize,
    col: usize,
}

impl<'a> View<'a> {
    /// Rows `stride` apart.
    fn new(buffer: &'a Buffer, stride: usize) -> Self {
        Self { buffer, at: 0, row: stride, col: 1 }
    }

    fn from(self, row: usize, col: usize) -> Self {
        Self { at: self.at + row * self.row + col * self.col, ..self }
    }

    fn t(self) -> Self {
        Self { row: self.col, col: self.row, ..self }
    }
}

/// `out = out * keep + scale * a * b` for `a` of `m` x `k` and `b` of `k` x `n`, with `keep` 1 or 0.
fn product(out: View, keep: bool, scale: f32, a: View, b: View, [m, n, k]: [usize; 3]) -> Done<()> {
    let launch = out.buffer.device().launch("sgemm", [m.div_ceil(128), n.div_ceil(64), 1], 256);
    let operands = [out, a, b].into_iter().fold(launch, |launch, v| launch.buffer_at(v.buffer, v.at * 4));
    let sizes = operands.u32(m).u32(n).u32(k).u64(out.row).u64(a.row).u64(a.col).u64(b.row).u64(b.col);
    sizes.f32(scale).i32(keep.into()).go()
}

/// One linear being solved: all that its rows share.
struct Job<'a> {
    device: Arc<Device>,
    factor: &'a Factor,
    n: usize,
    order: Ordered<'a>,
    rounding: &'a Rounding<'a>,
    group_count: usize,
    columns: Buffer,
    groups: Buffer,
    /// In order, unlike `order.dead`.
    dead: Buffer,
    importance: Buffer,
    /// Candidates as the kernels take them.
    trials: Buffer,
}

/// What becomes of some rows; codes are in stored order, levels `[rows, groups]`.
struct Solved {
    codes: Buffer,
    scales: Buffer,
    zeros: Buffer,
    loss: Buffer,
}

impl<'a> Job<'a> {
    fn new(device: &Arc<Device>, factor: &'a Factor, order: Ordered<'a>, rounding: &'a Rounding<'a>) -> Done<Self> {
        let n = order.columns.len();
        let dead: Vec<u8> = order.columns.iter().map(|&c| order.dead[c].into()).collect();
        let trials: Vec<f32> = rounding.candidates.iter().flat_map(|c| [c.shrink, c.sign, c.shift]).collect();
        Ok(Self {
            device: device.clone(),
            factor,
            n,
            order,
            rounding,
            group_count: rounding.scheme.group_size.count(n),
            columns: numbers(device, order.columns)?,
            groups: numbers(device, order.groups)?,
            dead: device.upload(&dead)?,
            importance: device.upload(rounding.importance)?,
            trials: device.upload(&trials)?,
        })
    }

    fn solve(&self, original: Buffer, rows: usize) -> Done<Solved> {
        let (device, n) = (&self.device, self.n);
        self.follow_drift(&original, rows)?;
        let mut solved = Solved {
            codes: device.alloc(rows * n)?,
            scales: floats(device, rows, self.group_count)?,
            zeros: floats(device, rows, self.group_count)?,
            loss: floats(device, rows, 1)?,
        };
        device.zero(&solved.loss)?;
        if self.rounding.sweeps == 0 {
            self.compensate(original, rows, &solved)?;
        } else {
            self.compensate(device.fetch(&original)?, rows, &solved)?;
            for _ in 0..self.rounding.sweeps {
                self.sweep(&original, rows, &solved)?;
            }
        }
        let stored = device.alloc(rows * n)?;
        let launch = device.launch("scatter_codes", by_columns(rows, n), BLOCK);
        launch.buffer(&solved.codes).buffer(&self.columns).buffer(&stored).u32(n).go()?;
        solved.codes = stored;
        Ok(solved)
    }

    /// w' = w + (U'U D) w for each row, with D the drift.
    fn follow_drift(&self, w: &Buffer, rows: usize) -> Done<()> {
        let Some(drift) = &self.factor.drift else { return Ok(()) };
        let n = self.n;
        let square = |m| View::new(m, n);
        let sizes = [rows, n, n];
        let (a, b) = (floats(&self.device, rows, n)?, floats(&self.device, rows, n)?);
        product(square(&a), false, 1.0, square(w), square(drift).t(), sizes)?;
        product(square(&b), false, 1.0, square(&a), square(&self.factor.u).t(), sizes)?;
        product(square(w), true, 1.0, square(&b), square(&self.factor.u), sizes)
    }

    /// Levels of all groups if they are static, then GPTQ's pass; `w` is used up.
    fn compensate(&self, w: Buffer, rows: usize, solved: &Solved) -> Done<()> {
        let (device, n, fixed) = (&self.device, self.n, self.rounding.static_groups);
        let Solved { codes, scales, zeros, loss } = solved;
        let blocks = rows.div_ceil(WARPS);
        if fixed {
            let (members, offsets) = members(self.order.groups, self.group_count);
            let (members, offsets) = (numbers(device, &members)?, numbers(device, &offsets)?);
            let launch = device.launch("original_grids", [blocks, self.group_count.min(65535), 1], BLOCK);
            let launch = self.search(launch.buffer(&w).buffer(&members).buffer(&offsets));
            launch.buffer(scales).buffer(zeros).u32(rows).u32(n).u32(self.group_count).go()?;
        }
        let run_ends = if fixed { None } else { Some(numbers(device, &run_ends(self.order.groups))?) };
        let errors = floats(device, rows, COLUMNS)?;
        let (u, weights) = (View::new(&self.factor.u, n), View::new(&w, n));
        let mut start = 0;
        while start < n {
            let end = block_end(self.order.groups, start, fixed);
            let launch = device.launch("gptq_block", [blocks, 1, 1], BLOCK).buffer(&w).buffer(&self.factor.u);
            let launch = self.search(launch.buffer(&self.groups).optional(run_ends.as_ref()));
            let launch = launch.buffer(codes).buffer(&errors).buffer(scales).buffer(zeros).buffer(loss);
            launch.u32(rows).u32(n).u32(self.group_count).u32(start).u32(end).go()?;
            if end < n {
                let sizes = [rows, n - end, end - start];
                product(weights.from(0, end), true, -1.0, View::new(&errors, COLUMNS), u.from(start, end), sizes)?;
            }
            start = end;
        }
        Ok(())
    }

    /// The arguments that a search for levels wants.
    fn search<'l>(&self, launch: Launch<'l>) -> Launch<'l> {
        let Rounding { scheme, candidates, least_zero, .. } = *self.rounding;
        let launch = launch.buffer(&self.importance).buffer(&self.trials).u32(candidates.len());
        launch.f32(scheme.top().into()).f32(scheme.middle().into()).f32(least_zero.into()).u32(scheme.sym.into())
    }

    /// One sweep of coordinate descent.
    fn sweep(&self, original: &Buffer, rows: usize, solved: &Solved) -> Done<()> {
        let (device, n, groups) = (&self.device, self.n, self.order.groups);
        let Some(h) = &self.factor.h else { return Err(device.failed("sweeps want the whole Hessian")) };
        let Solved { codes, scales, zeros, loss } = solved;
        let residual = floats(device, rows, n)?;
        let find_residual = || {
            let launch = device.launch("residual", by_columns(rows, n), BLOCK).buffer(original).buffer(codes);
            let launch = launch.buffer(&self.groups).buffer(scales).buffer(zeros).buffer(&residual);
            launch.u32(n).u32(self.group_count).go()
        };
        find_residual()?;
        let gradient = floats(device, rows, n)?;
        let (g, whole) = (View::new(&gradient, n), View::new(h, n));
        product(g, false, 1.0, View::new(&residual, n), whole, [rows, n, n])?;
        let moved = floats(device, rows, COLUMNS)?;
        let whole_ends = numbers(device, &whole_ends(groups, self.group_count))?;
        let mut start = 0;
        while start < n {
            let end = block_end(groups, start, false);
            let launch = device.launch("sweep_block", [rows.div_ceil(WARPS), 1, 1], BLOCK).buffer(&gradient).buffer(h);
            let launch = launch.buffer(&self.groups).buffer(&whole_ends).buffer(codes).buffer(scales).buffer(zeros);
            let launch = launch.buffer(&moved).u32(rows).u32(n).u32(self.group_count).u32(start).u32(end);
            launch.f32(self.rounding.scheme.top().into()).go()?;
            for part in [0..start, end..n] {
                let sizes = [rows, part.len(), end - start];
                let (g, h) = (g.from(0, part.start), whole.from(start, part.start));
                product(g, true, -1.0, View::new(&moved, COLUMNS), h, sizes)?;
            }
            start = end;
        }
        find_residual()?;
        let launch = device.launch("sweep_loss", [rows, 1, 1], BLOCK);
        launch.buffer(&residual).buffer(&gradient).buffer(loss).u32(n).go()
    }
}

/// For each column with which a run of one group begins, the end of the run; 0 for the others.
fn run_ends(groups: &[usize]) -> Vec<usize> {
    let mut ends = vec![0; groups.len()];
    let mut start = 0;
    for run in groups.chunk_by(|a, b| a == b) {
        ends[start] = start + run.len();
        start += run.len();
    }
    ends
}

/// The same for runs that are all of their group and lie in one block.
fn whole_ends(groups: &[usize], group_count: usize) -> Vec<usize> {
    let mut sizes = vec![0; group_count];
    groups.iter().for_each(|&g| sizes[g] += 1);
    let mut ends = run_ends(groups);
    for (i, end) in ends.iter_mut().enumerate() {
        let length = end.saturating_sub(i);
        // Blocks do not cut groups that fit into one.
        if length != sizes[groups[i]] || length > COLUMNS {
            *end = 0;
        }
    }
    ends
}

/// The columns of each group, one group after another, and where each group begins and the last one ends.
fn members(groups: &[usize], group_count: usize) -> (Vec<usize>, Vec<usize>) {
    let mut members: Vec<usize> = (0..groups.len()).collect();
    members.sort_by_key(|&i| groups[i]);
    let mut offsets = vec![0; group_count + 1];
    groups.iter().for_each(|&g| offsets[g + 1] += 1);
    for g in 0..group_count {
        offsets[g + 1] += offsets[g];
    }
    (members, offsets)
}
