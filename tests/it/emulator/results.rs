//! What emulated kernels and cuBLAS compute, against plain loops.

use cudarc::cublas::{result as blas, sys as blas_sys};
use half::{bf16, f16};

use super::*;

pub const CASES: &[Case] = &[
    ("computes", everything),
    ("no_cublas", no_cublas),
    ("speed", measure),
    ("ampere", || cut_sums([8.0, 0.0, 0.0, 0.0, 7.0])),
    ("hopper", || cut_sums([8.0, 4.0, 4.0, 0.0, 11.0])),
];

/// Small numbers that look random.
fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

fn everything() {
    vector_addition_in_blocks_that_do_not_fill();
    block_sums();
    collectives();
    lanes_that_leave();
    tensor_cores();
    copies_in_stages();
    number_formats();
    word_intrinsics();
}

#[test]
fn results_do_not_depend_on_order_schedule_or_threads() {
    for (order, schedule, threads) in
        [("reverse", "eager", "1"), ("random", "lazy", "2"), ("forward", "lazy", "3"), ("random", "eager", "1")]
    {
        in_child("computes", &[("ORDER", order), ("SCHEDULE", schedule), ("THREADS", threads), ("SEED", "7")]);
    }
}

#[test]
fn the_checked_build_computes_the_same() {
    in_child("computes", &[("CHECKED", "1")]);
}

#[test]
fn vector_addition_in_blocks_that_do_not_fill() {
    let gpu = Gpu::open(0);
    let n = 10_007;
    let a: Vec<f32> = (0..n).map(|i| i as f32).collect();
    let (da, db, out) = (device(&a), device(&a), device(&vec![0f32; n]));
    let status = gpu.launch("emu_add", 40, 256, 0, &[Pointer(da), Pointer(db), Pointer(out), Int(n as i32)]);
    assert_eq!(status, CUresult::CUDA_SUCCESS);
    assert_eq!(host::<f32>(out, n), a.iter().map(|x| 2.0 * x).collect::<Vec<_>>());
    for place in [da, db, out] {
        assert_eq!(free(place), CUresult::CUDA_SUCCESS);
    }
}

#[test]
fn block_sums() {
    let gpu = Gpu::open(0);
    for threads in [32u32, 96, 1024] {
        let x: Vec<f32> = (0..7 * threads).map(|i| (i % 13) as f32).collect();
        let (dx, sums) = (device(&x), device(&[0f32; 7]));
        assert_eq!(gpu.launch("emu_block_sums", 7, threads, 0, &[Pointer(dx), Pointer(sums)]), CUresult::CUDA_SUCCESS);
        let expected: Vec<f32> = x.chunks(threads as usize).map(|block| block.iter().sum()).collect();
        assert_eq!(host::<f32>(sums, 7), expected, "{threads} threads");
    }
}

#[test]
fn collectives() {
    let gpu = Gpu::open(0);
    let x: Vec<i32> = (0..32).map(|i| (i * 37 + 11) % 101).collect();
    let (dx, out) = (device(&x), device(&[0i32; 32 * 12 + 1]));
    assert_eq!(gpu.launch("emu_collectives", 1, 32, 0, &[Pointer(dx), Pointer(out)]), CUresult::CUDA_SUCCESS);
    let out = host::<i32>(out, 32 * 12 + 1);
    let votes = (0..32).fold(0u32, |votes, i| votes | ((x[i] & 1) as u32) << i);
    let mut partial_sums: Vec<i32> = Vec::new();
    for lane in 0..32usize {
        let row = &out[lane * 12..][..12];
        let expected = [
            x[5],
            if lane >= 3 { x[lane - 3] } else { x[lane] },
            if lane + 3 < 32 { x[lane + 3] } else { x[lane] },
            x[lane ^ 9],
            if lane % 8 + 2 < 8 { x[lane + 2] } else { x[lane] },
            x[7],
            votes as i32,
            i32::from(x.contains(&100)),
            1,
            if lane < 16 { x[lane ^ 1] } else { x[if lane == 16 { 16 } else { lane - 1 }] },
        ];
        assert_eq!(row[..10], expected, "lane {lane}");
        partial_sums.push(row[10]);
        // Bytes of a value below 128: only the lowest is not zero.
        assert_eq!(row[11], x[lane] * 4 + 1);
    }
    assert_eq!(out[32 * 12], x.iter().sum::<i32>());
    partial_sums.sort_unstable();
    partial_sums.dedup();
    assert!(partial_sums.len() > 16, "atomicAdd gives the sum before");
}

#[test]
fn lanes_that_leave() {
    let gpu = Gpu::open(0);
    let out = device(&[0i32; 32]);
    assert_eq!(gpu.launch("emu_leaving", 1, 32, 0, &[Pointer(out)]), CUresult::CUDA_SUCCESS);
    for (lane, seen) in host::<i32>(out, 32).into_iter().enumerate() {
        assert_eq!(seen as u32, u32::MAX << lane, "lane {lane}");
    }
}

#[test]
fn tensor_cores() {
    let gpu = Gpu::open(0);
    // The order of sums is that of the twin: from the lowest k to the highest, on top of what is there.
    let expected = |a: &[f32], b: &[f32], c: &[f32]| -> Vec<f32> {
        (0..128).map(|at| (0..16).fold(c[at], |sum, k| sum + a[at / 8 * 16 + k] * b[at % 8 * 16 + k])).collect()
    };
    let (a, b, c) = (noise(256, 1), noise(128, 2), noise(128, 3));
    let run = |kernel: &str, a: &[u16], b: &[u16]| {
        let (da, db, d) = (device(a), device(b), device(&c));
        assert_eq!(gpu.launch(kernel, 1, 32, 0, &[Pointer(da), Pointer(db), Pointer(d)]), CUresult::CUDA_SUCCESS);
        host::<f32>(d, 128)
    };
    let halves = |x: &[f32]| x.iter().map(|v| f16::from_f32(*v)).collect::<Vec<_>>();
    let (ha, hb) = (halves(&a), halves(&b));
    let bits = |x: &[f16]| x.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    let wide = |x: &[f16]| x.iter().map(|v| v.to_f32()).collect::<Vec<_>>();
    assert_eq!(run("emu_mma_half", &bits(&ha), &bits(&hb)), expected(&wide(&ha), &wide(&hb), &c));

    let brains = |x: &[f32]| x.iter().map(|v| bf16::from_f32(*v)).collect::<Vec<_>>();
    let (ba, bb) = (brains(&a), brains(&b));
    let bits = |x: &[bf16]| x.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    let wide = |x: &[bf16]| x.iter().map(|v| v.to_f32()).collect::<Vec<_>>();
    assert_eq!(run("emu_mma_bfloat", &bits(&ba), &bits(&bb)), expected(&wide(&ba), &wide(&bb), &c));

    let bytes = |n: usize, step: usize| (0..n).map(|i| (i * step % 251) as u8).collect::<Vec<_>>();
    let (ia, ib) = (bytes(16 * 32, 77), bytes(8 * 32, 91));
    let (da, db, d) = (device(&ia), device(&ib), device(&[0i32; 128]));
    assert_eq!(gpu.launch("emu_mma_bytes", 1, 32, 0, &[Pointer(da), Pointer(db), Pointer(d)]), CUresult::CUDA_SUCCESS);
    let expected: Vec<i32> = (0..128)
        .map(|at| (0..32).map(|k| (ia[at / 8 * 32 + k] as i8) as i32 * (ib[at % 8 * 32 + k] as i8) as i32).sum())
        .collect();
    assert_eq!(host::<i32>(d, 128), expected);
}

/// Sums of 16 equal products on top of 1: how far they are from 1, in units of f32 there (2^-23), for products of half a
/// unit, 3/8, 1/4, less than that; then on top of nothing, the first product 1 and the others 3/4.
fn cut_sums(expected: [f32; 5]) {
    let gpu = Gpu::open(0);
    let unit = f32::EPSILON;
    let sum = |start: f32, first: f32, product: f32| {
        // Powers of two apart, so that f16 holds both factors.
        let factor = |size: f32| f16::from_f32(size * 4096.0).to_bits();
        let mut a = vec![factor(product); 256];
        a.iter_mut().step_by(16).for_each(|x| *x = factor(first));
        let (da, db, d) = (device(&a), device(&[f16::from_f32(1.0 / 4096.0).to_bits(); 128]), device(&[start; 128]));
        let status = gpu.launch("emu_mma_half", 1, 32, 0, &[Pointer(da), Pointer(db), Pointer(d)]);
        assert_eq!(status, CUresult::CUDA_SUCCESS);
        let got = host::<f32>(d, 128);
        assert!(got.iter().all(|v| v.to_bits() == got[0].to_bits()));
        got[0]
    };
    for (i, part) in [0.5, 0.375, 0.25, 0.124].into_iter().enumerate() {
        let product = part * unit;
        for sign in [1.0, -1.0] {
            let got = sum(sign, sign * product, sign * product) * sign;
            assert_eq!((got - 1.0) / unit, expected[i], "{part}");
        }
    }
    assert_eq!((sum(0.0, 1.0, 0.75 * unit) - 1.0) / unit, expected[4]);
    assert_eq!(sum(f32::INFINITY, 1.0, 1.0), f32::INFINITY);
    assert!(sum(f32::NAN, 1.0, 1.0).is_nan());
}

/// What is known of the hardware: see `truncation.h`.
#[test]
fn tensor_cores_that_cut_sums() {
    for device in ["ampere", "hopper"] {
        in_child(device, &[("MMA", device)]);
    }
}

#[test]
fn copies_in_stages() {
    let gpu = Gpu::open(0);
    let x = noise(128, 5);
    let (dx, out) = (device(&x), device(&[0f32; 256]));
    assert_eq!(
        gpu.launch("emu_copy_stages", 1, 32, 1024, &[Pointer(dx), Pointer(out), Int(1)]),
        CUresult::CUDA_SUCCESS
    );
    let got = host::<f32>(out, 256);
    assert_eq!(got[..128], x);
    assert_eq!(got[128..], [0.0; 128]);
    // Waiting for the older group only: the second stage still holds what shared memory begins with. The checked build
    // refuses that.
    if env::var("QUANTKIT_EMULATOR_CHECKED").is_ok() {
        return;
    }
    assert_eq!(
        gpu.launch("emu_copy_stages", 1, 32, 1024, &[Pointer(dx), Pointer(out), Int(0)]),
        CUresult::CUDA_SUCCESS
    );
    let got = host::<f32>(out, 256);
    assert_eq!(got[..128], x);
    assert!(got[128..].iter().all(|v| v.is_nan()));
}

/// The nearest of an 8-bit format's finite values, ties to the even code; beyond the largest, that one.
fn nearest(x: f32, values: &[f32]) -> u8 {
    let sign = if x.is_sign_negative() { 128 } else { 0 };
    let size = f64::from(x.abs().min(values[values.len() - 1]));
    let off = |code: usize| (f64::from(values[code]) - size).abs();
    let best = (0..values.len()).min_by(|a, b| off(*a).total_cmp(&off(*b)).then((a & 1).cmp(&(b & 1)))).unwrap();
    best as u8 | sign
}

/// Non-negative finite values of a format with this many mantissa bits, by code.
fn values(mantissa: u32, bias: i32, count: usize) -> Vec<f32> {
    let value = |code: usize| {
        let (exponent, fraction) = ((code >> mantissa) as i32, (code & ((1 << mantissa) - 1)) as f32);
        let one = if exponent > 0 { (1u32 << mantissa) as f32 } else { 0.0 };
        (one + fraction) * 2f32.powi(exponent.max(1) - bias - mantissa as i32)
    };
    (0..count).map(value).collect()
}

#[test]
fn number_formats() {
    let gpu = Gpu::open(0);
    let mut x: Vec<f32> = noise(20_000, 9).iter().enumerate().map(|(i, v)| v * 2f32.powi(i as i32 % 60 - 30)).collect();
    x.extend([0.0, -0.0, f32::INFINITY, -f32::INFINITY, 65519.9, 65520.0, 448.0, 464.0, 1e-8, 3.3e38, 1e-45]);
    let n = x.len();
    let (dx, codes, back) = (device(&x), device(&vec![0u32; 4 * n]), device(&vec![0f32; 4 * n]));
    let launched = gpu.launch(
        "emu_formats",
        n.div_ceil(128) as u32,
        128,
        0,
        &[Pointer(dx), Pointer(codes), Pointer(back), Int(n as i32)],
    );
    assert_eq!(launched, CUresult::CUDA_SUCCESS);
    let (codes, back) = (host::<u32>(codes, 4 * n), host::<f32>(back, 4 * n));
    let (e4m3, e5m2) = (values(3, 7, 127), values(2, 15, 124));
    for (i, &x) in x.iter().enumerate() {
        let (half, brain) = (f16::from_f32(x), bf16::from_f32(x));
        let (small, smaller) = (nearest(x, &e4m3), nearest(x, &e5m2));
        let expected = [half.to_bits().into(), brain.to_bits().into(), small.into(), u32::from(smaller)];
        assert_eq!(codes[4 * i..][..4], expected, "{x:e}");
        let sign = 1f32.copysign(x);
        let wide = [
            half.to_f32(),
            brain.to_f32(),
            sign * e4m3[usize::from(small & 127)],
            sign * e5m2[usize::from(smaller & 127)],
        ];
        assert_eq!(back[4 * i..][..4], wide, "{x:e}");
    }
}

#[test]
fn word_intrinsics() {
    let gpu = Gpu::open(0);
    let x: Vec<u32> = (1..65u32).map(|i| i.wrapping_mul(2_654_435_761) ^ (i << 3)).collect();
    let (dx, out) = (device(&x), device(&[0u32; 8 * 32]));
    assert_eq!(gpu.launch("emu_words", 1, 32, 0, &[Pointer(dx), Pointer(out)]), CUresult::CUDA_SUCCESS);
    let out = host::<u32>(out, 8 * 32);
    for (pair, row) in x.chunks(2).zip(out.chunks(8)) {
        let (a, b) = (pair[0], pair[1]);
        let wide = u64::from(b) << 32 | u64::from(a);
        let bytes = wide.to_le_bytes();
        // 0x6c1b, from the lowest nibble on: sign of byte 3, byte 1, sign of byte 4, byte 6.
        let sign = |byte: u8| if byte & 128 != 0 { 255 } else { 0 };
        let permuted = u32::from_le_bytes([sign(bytes[3]), bytes[1], sign(bytes[4]), bytes[6]]);
        let dot: i32 = (0..4).map(|i| i32::from(bytes[i] as i8) * i32::from(bytes[4 + i] as i8)).sum();
        let expected = [
            permuted,
            (wide >> 13) as u32,
            a.reverse_bits(),
            a.count_ones() + 100 * b.leading_zeros() + 10_000 * (a.trailing_zeros() + 1),
            (dot + 5) as u32,
            f32::from_bits(a).round_ties_even() as i32 as u32,
            ((u64::from(a) * u64::from(b)) >> 32) as u32,
            ((wide << 5) >> 32) as u32,
        ];
        assert_eq!(row, expected, "{a:#x} {b:#x}");
    }
}

/// Column-major product in double precision.
fn product(
    ta: bool,
    tb: bool,
    (m, n, k): (usize, usize, usize),
    a: &[f32],
    lda: usize,
    b: &[f32],
    ldb: usize,
) -> Vec<f64> {
    let at =
        |x: &[f32], t: bool, ld: usize, i: usize, j: usize| f64::from(if t { x[i * ld + j] } else { x[j * ld + i] });
    (0..m * n).map(|o| (0..k).map(|p| at(a, ta, lda, o % m, p) * at(b, tb, ldb, p, o / m)).sum()).collect()
}

#[test]
fn cublas_products() {
    let gpu = Gpu::open(0);
    gpu.bind();
    let handle = blas::create_handle().unwrap();
    let op =
        |t: bool| if t { blas_sys::cublasOperation_t::CUBLAS_OP_T } else { blas_sys::cublasOperation_t::CUBLAS_OP_N };
    let close = |got: &[f32], expected: &[f64]| {
        for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
            assert!((f64::from(*got) - expected).abs() < 1e-4, "{at}: {got} and {expected}");
        }
    };
    let (m, n, k) = (37, 29, 65);
    for (ta, tb) in [(false, false), (true, false), (false, true), (true, true)] {
        let (lda, ldb) = (if ta { k } else { m } + 3, if tb { n } else { k } + 1);
        let (a, b, c) = (noise(lda * 80, 1), noise(ldb * 80, 2), noise(m * n, 3));
        let (da, db, dc) = (device(&a), device(&b), device(&c));
        let (alpha, beta) = (0.5f32, 2.0f32);
        // SAFETY: the emulator checks that the matrices lie in their allocations.
        unsafe {
            blas::sgemm(
                handle,
                op(ta),
                op(tb),
                m as i32,
                n as i32,
                k as i32,
                &alpha,
                da as *const f32,
                lda as i32,
                db as *const f32,
                ldb as i32,
                &beta,
                dc as *mut f32,
                m as i32,
            )
            .unwrap();
        }
        let mut expected = product(ta, tb, (m, n, k), &a, lda, &b, ldb);
        expected.iter_mut().zip(&c).for_each(|(e, c)| *e = 0.5 * *e + 2.0 * f64::from(*c));
        close(&host::<f32>(dc, m * n), &expected);
    }

    // f16 in, f32 out; three products, strided.
    let halves = |x: &[f32]| x.iter().map(|v| f16::from_f32(*v)).collect::<Vec<_>>();
    let wide = |x: &[f16]| x.iter().map(|v| v.to_f32()).collect::<Vec<_>>();
    let (a, b) = (halves(&noise(3 * m * k, 4)), halves(&noise(3 * k * n, 5)));
    let (da, db, dc) = (device(&a), device(&b), device(&vec![0f32; 3 * m * n]));
    let (alpha, beta) = (1.0f32, 0.0f32);
    // SAFETY: as above.
    unsafe {
        blas::gemm_strided_batched_ex(
            handle,
            op(true),
            op(false),
            m as i32,
            n as i32,
            k as i32,
            (&raw const alpha).cast(),
            da as *const c_void,
            blas_sys::cudaDataType_t::CUDA_R_16F,
            k as i32,
            (m * k) as i64,
            db as *const c_void,
            blas_sys::cudaDataType_t::CUDA_R_16F,
            k as i32,
            (k * n) as i64,
            (&raw const beta).cast(),
            dc as *mut c_void,
            blas_sys::cudaDataType_t::CUDA_R_32F,
            m as i32,
            (m * n) as i64,
            3,
            blas_sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            blas_sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
        )
        .unwrap();
    }
    let got = host::<f32>(dc, 3 * m * n);
    for batch in 0..3 {
        let (a, b) = (wide(&a[batch * m * k..][..m * k]), wide(&b[batch * k * n..][..k * n]));
        close(&got[batch * m * n..][..m * n], &product(true, false, (m, n, k), &a, k, &b, k));
    }

    // One triangle of A A^T; the other one is left alone.
    let a = noise(m * k, 6);
    let (da, dc) = (device(&a), device(&vec![7f32; m * m]));
    // SAFETY: as above.
    let status = unsafe {
        blas_sys::cublasSsyrk_v2(
            handle,
            blas_sys::cublasFillMode_t::CUBLAS_FILL_MODE_LOWER,
            op(false),
            m as i32,
            k as i32,
            &alpha,
            da as *const f32,
            m as i32,
            &beta,
            dc as *mut f32,
            m as i32,
        )
    };
    assert_eq!(status, blas_sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS);
    let mut expected = product(false, true, (m, m, k), &a, m, &a, m);
    expected.iter_mut().enumerate().filter(|(at, _)| at % m < at / m).for_each(|(_, e)| *e = 7.0);
    close(&host::<f32>(dc, m * m), &expected);

    // A leading dimension that is too small.
    // SAFETY: refused.
    let refused = unsafe {
        blas::sgemm(
            handle,
            op(false),
            op(false),
            8,
            8,
            8,
            &alpha,
            da as *const f32,
            4,
            da as *const f32,
            8,
            &beta,
            dc as *mut f32,
            8,
        )
    };
    assert!(refused.is_err());
    assert!(emulator::last_report().contains("leading dimensions 4, 8, 8"), "{}", emulator::last_report());
    // SAFETY: the handle is not used again.
    unsafe { blas::destroy_handle(handle) }.unwrap();
}

#[test]
fn cublas_can_be_hidden() {
    in_child("no_cublas", &[("CUBLAS", "0")]);
}

fn no_cublas() {
    emulator::preload();
    // SAFETY: asks the dynamic loader.
    unsafe {
        assert!(sys::is_culib_present());
        assert!(!blas_sys::is_culib_present());
    }
}

#[test]
#[ignore = "measures"]
fn speed() {
    eprintln!("{}", in_child("speed", &[("THREADS", "1")]));
}

fn measure() {
    let gpu = Gpu::open(0);
    let n = 1 << 22;
    let place = || device(&vec![1f32; n]);
    let (a, b, out) = (place(), place(), place());
    // Nanoseconds of a launch, the best of five times.
    let time = |kernel: &str, blocks: u32, threads: u32, values: &[Value]| {
        let once = || {
            let begin = std::time::Instant::now();
            assert_eq!(gpu.launch(kernel, blocks, threads, 0, values), CUresult::CUDA_SUCCESS);
            begin.elapsed().as_nanos() as f64
        };
        (0..5).map(|_| once()).fold(f64::INFINITY, f64::min)
    };
    let rounds = 1000;
    let many = |kernel: &str| time(kernel, 8, 256, &[Pointer(out), Int(rounds)]) / f64::from(8 * 256 * rounds);
    eprintln!("launch of one thread {:.0} ns", time("emu_nothing", 1, 1, &[]));
    eprintln!("launch of 256 threads {:.0} ns", time("emu_nothing", 1, 256, &[]));
    let add = [Pointer(a), Pointer(b), Pointer(out), Int(n as i32)];
    eprintln!("thread without barriers {:.1} ns", time("emu_add", n as u32 / 256, 256, &add) / n as f64);
    eprintln!("lane in a warp collective {:.1} ns", many("emu_many_shuffles"));
    eprintln!("thread in a barrier {:.1} ns", many("emu_many_barriers"));
    eprintln!("mma {:.1} GFLOP/s", 4096.0 / 32.0 / many("emu_many_mma"));
}
