// Matrix products on tensor cores with GPTQ integers: out = x w' + bias, w[n,k] = scale[g,n] (q[k,n] - zero[g,n]).
//
// The differences q - zero are exact in either 16-bit float. They are multiplied as they are, and a group's
// sum is scaled once, in f32: no weight is ever rounded. Codes go from global memory to the registers where
// the tensor cores want them, without passing through shared memory.
// x planes are [rows][units * 32], aligned to 16 bytes, their rows in units of of_rows as in gemm.cu; zero points are at
// most 2^bits.
#pragma once
#include "gemm_tile.cuh"

#define QUANT_ARGUMENTS                                                                                        \
    const uint16_t *__restrict__ xh, const uint16_t *__restrict__ xl, const uint32_t *__restrict__ q,          \
        const float *__restrict__ scales, const uint8_t *__restrict__ zeros, const float *__restrict__ bias,   \
        const float *__restrict__ of_rows, float *__restrict__ out, uint32_t rows, uint32_t n, uint32_t units, \
        uint32_t units_per_group
#define QUANT_PASSED xh, xl, q, scales, zeros, bias, of_rows, out, rows, n, units, units_per_group

// Two codes of equal width in the low bits of the two halves, minus two zero points. OR-ing a code into a
// power of two whose last place is 1 makes a float of it; subtracting power + zero leaves the difference.
QK_INLINE uint32_t minus_f16(uint32_t codes, uint32_t zero) {
    const uint32_t x = codes | 0x64006400, y = zero * 0x10001 | 0x64006400;
    const __half2 d = __hsub2(*reinterpret_cast<const __half2*>(&x), *reinterpret_cast<const __half2*>(&y));
    return *reinterpret_cast<const uint32_t*>(&d);
}

// bf16 has room for codes below 128 only: up to four bits.
QK_INLINE uint32_t minus_bf16(uint32_t codes, uint32_t zero) {
    const uint32_t x = codes | 0x43004300, y = zero * 0x10001 | 0x43004300;
    const __nv_bfloat162 d =
        __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&x), *reinterpret_cast<const __nv_bfloat162*>(&y));
    return *reinterpret_cast<const uint32_t*>(&d);
}

// Wider codes pass through f32, whose upper half is the bf16: the difference has at most eight bits.
QK_INLINE uint32_t minus_bf16_wide(uint32_t codes, uint32_t zero) {
    const float y = __uint_as_float(zero | 0x4b000000);
    const float low = __uint_as_float((codes & 0xffff) | 0x4b000000) - y;
    const float high = __uint_as_float((codes >> 16) | 0x4b000000) - y;
    return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}

template <typename T, int BITS>
struct Minus;
template <int BITS>
struct Minus<F16, BITS> {
    QK_INLINE static uint32_t pair(uint32_t codes, uint32_t zero) { return minus_f16(codes, zero); }
};
template <int BITS>
struct Minus<Bf16, BITS> {
    QK_INLINE static uint32_t pair(uint32_t codes, uint32_t zero) {
        return BITS == 8 ? minus_bf16_wide(codes, zero) : minus_bf16(codes, zero);
    }
};

// What a lane needs of one unit: for NT outputs (its row of NT tiles of eight), the words with its eight codes,
// and the zero points, a byte each.
template <int BITS, int NT>
struct CodesUnit {
    static constexpr int WORDS = BITS == 3 || BITS == 8 ? 2 : 1;
    uint32_t words[WORDS][NT];
    uint32_t zeros[NT / 4];

    // Codes 2i and 2i+1 of tile j in the halves of pair[i], less the zero point.
    template <typename T>
    QK_INLINE void differences(int j, uint32_t (&pair)[4]) const {
        const uint32_t zero = zeros[j / 4] >> (j % 4 * 8) & 0xff;
        if (BITS == 8) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                pair[i] = Minus<T, BITS>::pair(
                    __byte_perm(words[i / 2 * (WORDS - 1)][j], 0, i % 2 == 0 ? 0x4140 : 0x4342), zero);
            return;
        }
        // A quad's codes are one string of bits; this lane's are at 8 * BITS * (lane % 4).
        const uint32_t shift = threadIdx.x % 4 * 8 * BITS % 32;
        uint32_t codes = words[0][j] >> shift;
        if (BITS == 3) codes |= words[WORDS - 1][j] << 1 << (31 - shift);
        constexpr uint32_t FOUR = (1u << (4 * BITS % 32)) - 1, TWO = ((1u << BITS) - 1) * 0x10001;
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const uint32_t four = codes >> (i * 2 * BITS) & FOUR;
            const uint32_t apart = four | four << (16 - BITS);
            pair[i] = Minus<T, BITS>::pair(apart & TWO, zero);
            pair[i + 1] = Minus<T, BITS>::pair(apart >> (2 * BITS) & TWO, zero);
        }
    }
};

// Reads a lane's units in their order. Lane (g, t) = (lane / 4, lane % 4) feeds column g of each of NT tiles;
// tile j's column c stands for output first + c * NT + j, so that a lane's outputs are neighbours in memory.
template <int BITS, int NT>
struct CodesSource {
    const uint32_t* words;
    const uint8_t* zeros;
    uint32_t n, left, per_group, count;   // count: how many of the lane's NT outputs exist
    bool wide;                            // whether whole vectors may be read

    QK_INLINE CodesSource(const uint32_t* q, const uint8_t* zero_points, uint32_t first, uint32_t n, uint32_t unit,
                          uint32_t per_group)
        : n(n), per_group(per_group) {
        const uint32_t output = first + threadIdx.x % 32 / 4 * NT;
        count = output >= n ? 0 : n - output < NT ? n - output : NT;
        wide = n % 4 == 0 && count == NT;
        words = q + static_cast<uint64_t>(unit) * BITS * n + output;
        zeros = zero_points + static_cast<uint64_t>(unit / per_group) * n + output;
        left = per_group - unit % per_group;
    }

    QK_INLINE void next(CodesUnit<BITS, NT>& unit) {
        constexpr int WORDS = CodesUnit<BITS, NT>::WORDS;
        const uint32_t start = threadIdx.x % 4 * 8 * BITS / 32;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            const uint32_t word = start + w < BITS ? start + w : BITS - 1;
            const uint32_t* from = words + static_cast<uint64_t>(word) * n;
#pragma unroll
            for (int j = 0; j < NT; j += 4) {
                uint4 four = make_uint4(0, 0, 0, 0);
                if (wide) {
                    four = *reinterpret_cast<const uint4*>(from + j);
                } else {
                    if (j < count) four.x = from[j];
                    if (j + 1 < count) four.y = from[j + 1];
                    if (j + 2 < count) four.z = from[j + 2];
                    if (j + 3 < count) four.w = from[j + 3];
                }
                unit.words[w][j] = four.x;
                unit.words[w][j + 1] = four.y;
                unit.words[w][j + 2] = four.z;
                unit.words[w][j + 3] = four.w;
            }
        }
#pragma unroll
        for (int j = 0; j < NT; j += 4) {
            uint32_t four = 0;
            if (wide) {
                four = *reinterpret_cast<const uint32_t*>(zeros + j);
            } else {
#pragma unroll
                for (int b = 0; b < 4; ++b) {
                    if (j + b < count) four |= static_cast<uint32_t>(zeros[j + b]) << (b * 8);
                }
            }
            unit.zeros[j / 4] = four;
        }
        words += static_cast<uint64_t>(BITS) * n;
        if (--left == 0) {
            left = per_group;
            zeros += n;
        }
    }
};

// The scales of the 2 NT outputs whose sums a lane holds: in each tile columns 2t and 2t+1, t = lane % 4.
template <int NT>
struct Scales {
    float value[2 * NT];
    QK_INLINE void load(const float* scales, uint32_t group, uint32_t first, uint32_t n) {
        const uint32_t output = first + threadIdx.x % 4 * 2 * NT;
        const float* from = scales + static_cast<uint64_t>(group) * n + output;
        if (n % 4 == 0 && output + 2 * NT <= n) {
#pragma unroll
            for (int j = 0; j < 2 * NT; j += 4) {
                const float4 four = *reinterpret_cast<const float4*>(from + j);
                value[j] = four.x;
                value[j + 1] = four.y;
                value[j + 2] = four.z;
                value[j + 3] = four.w;
            }
        } else {
#pragma unroll
            for (int j = 0; j < 2 * NT; ++j) value[j] = output + j < n ? from[j] : 0.0f;
        }
    }
    // sum += scale * part; part = 0, for tile j.
    QK_INLINE void add(int j, float (&sum)[4], float (&part)[4]) const {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            sum[c] += value[c % 2 * NT + j] * part[c];
            part[c] = 0.0f;
        }
    }
};

const int BIG_ROWS = 128, BIG_COLS = 128, BIG_THREADS = 256, STAGES = 4;
const int PLANE = BIG_ROWS * UNIT;

// 2 x 4 warps of 64 rows x 32 outputs; x through a ring of stages in shared memory, codes one unit ahead.
template <typename T, int BITS, int XP>
QK_INLINE void quant_big(QUANT_ARGUMENTS) {
    QK_DYN_SMEM(uint16_t, ring);
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t row0 = blockIdx.x * BIG_ROWS, col0 = blockIdx.y * BIG_COLS + warp % 4 * 32;
    const uint32_t k = units * UNIT;

    // A shared row is 64 bytes as they are: lanes read 16 bytes each of two rows, 128 contiguous bytes.
    uint64_t from[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t chunk = threadIdx.x + i * BIG_THREADS;
        const uint32_t row = row0 + chunk / 4 < rows ? row0 + chunk / 4 : rows - 1;
        from[i] = static_cast<uint64_t>(row) * k + chunk % 4 * 8;
    }
    auto fetch = [&](uint32_t unit, uint32_t slot) {
#pragma unroll
        for (int p = 0; p < XP; ++p) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                qk_cp_async16(ring + (slot * XP + p) * PLANE + (threadIdx.x + i * BIG_THREADS) * 8,
                              (p == 0 ? xh : xl) + from[i] + unit * UNIT);
        }
    };
#pragma unroll
    for (uint32_t u = 0; u < STAGES - 1; ++u) {
        if (u < units) fetch(u, u);
        qk_cp_async_commit();
    }

    CodesSource<BITS, 4> source(q, zeros, col0, n, 0, units_per_group);
    CodesUnit<BITS, 4> codes;
    source.next(codes);
    Scales<4> scale;
    float sum[4][4][4] = {}, part[4][4][4] = {};
    uint32_t slot = 0, group = 0, left = 0, chain = 0;
    for (uint32_t u = 0; u < units; ++u) {
        if (left == 0) {
            scale.load(scales, group++, col0, n);
            left = units_per_group;
        }
        uint32_t b[4][4];
#pragma unroll
        for (int j = 0; j < 4; ++j) codes.template differences<T>(j, b[j]);
        if (u + 1 < units) source.next(codes);

        qk_cp_async_wait<STAGES - 2>();
        __syncthreads();
        if (u + STAGES - 1 < units) fetch(u + STAGES - 1, slot == 0 ? STAGES - 1 : slot - 1);
        qk_cp_async_commit();

        const uint16_t* stage = ring + slot * XP * PLANE + (warp / 4 * 64 + lane / 4) * UNIT + lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int p = 0; p < XP; ++p) {
                RowsUnit<1> x;
                x.upper[0] = *reinterpret_cast<const uint4*>(stage + p * PLANE + i * 16 * UNIT);
                x.lower[0] = *reinterpret_cast<const uint4*>(stage + p * PLANE + (i * 16 + 8) * UNIT);
#pragma unroll
                for (int step = 0; step < 2; ++step) {
                    uint32_t a[4];
                    x.fragment(0, step, a);
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const uint32_t two[2] = {b[j][step * 2], b[j][step * 2 + 1]};
                        T::mma(part[i][j], a, two);
                    }
                }
            }
        }
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        if (--left == 0 || ++chain == CHAIN || u + 1 == units) {
            chain = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) scale.add(j, sum[i][j], part[i][j]);
            }
        }
    }

    // A lane's outputs are eight neighbours: columns 2t of tiles 0 to 3, then columns 2t+1.
    const uint32_t row = row0 + warp / 4 * 64 + lane / 4, col = col0 + lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
                const uint32_t r = row + i * 16 + h * 8;
                store_pair(out, bias, of_rows, r, col + j, rows, n, sum[i][j][h * 2], sum[i][j + 1][h * 2]);
                store_pair(out, bias, of_rows, r, col + 4 + j, rows, n, sum[i][j][h * 2 + 1], sum[i][j + 1][h * 2 + 1]);
            }
        }
    }
}

const int SMALL_TILES = 8, SMALL_COLS = SMALL_TILES * 8;

// 8 warps, each with its run of the units and all 16 x 64 sums; AHEAD units are on their way at any time.
template <typename T, int BITS, int XP>
QK_INLINE void quant_small(QUANT_ARGUMENTS) {
    constexpr int AHEAD = BITS == 3 || BITS == 8 ? 2 : 3;
    __shared__ float parts[SMALL_WARPS][SMALL_ROWS][SMALL_COLS];
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t row0 = blockIdx.x * SMALL_ROWS, col0 = blockIdx.y * SMALL_COLS;
    const Run run(units, warp);
    const RowsSource<XP> xs(xh, xl, row0, rows, units * UNIT);
    CodesSource<BITS, SMALL_TILES> source(q, zeros, col0, n, run.first, units_per_group);

    RowsUnit<XP> x[AHEAD];
    CodesUnit<BITS, SMALL_TILES> codes[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        if (run.first + i < run.last) {
            source.next(codes[i]);
            xs.load(x[i], run.first + i);
        }
    }

    Scales<SMALL_TILES> scale;
    float sum[SMALL_TILES][4] = {}, part[SMALL_TILES][4] = {};
    uint32_t group = run.first / units_per_group, left = units_per_group - run.first % units_per_group, chain = 0;
    bool fresh = true;
    for (uint32_t u = run.first; u < run.last; u += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            if (u + i >= run.last) break;
            if (fresh) scale.load(scales, group++, col0, n);
            uint32_t a[XP][2][4];
#pragma unroll
            for (int p = 0; p < XP; ++p) {
                x[i].fragment(p, 0, a[p][0]);
                x[i].fragment(p, 1, a[p][1]);
            }
#pragma unroll
            for (int j = 0; j < SMALL_TILES; ++j) {
                uint32_t b[4];
                codes[i].template differences<T>(j, b);
#pragma unroll
                for (int step = 0; step < 2; ++step) {
                    const uint32_t two[2] = {b[step * 2], b[step * 2 + 1]};
#pragma unroll
                    for (int p = 0; p < XP; ++p) T::mma(part[j], a[p][step], two);
                }
            }
            if (u + i + AHEAD < run.last) {
                source.next(codes[i]);
                xs.load(x[i], u + i + AHEAD);
            }
            fresh = --left == 0;
            if (fresh || ++chain == CHAIN || u + i + 1 == run.last) {
                chain = 0;
#pragma unroll
                for (int j = 0; j < SMALL_TILES; ++j) scale.add(j, sum[j], part[j]);
                left = fresh ? units_per_group : left;
            }
        }
    }

    const uint32_t r = lane / 4, c = lane % 4 * 2 * SMALL_TILES;
#pragma unroll
    for (int j = 0; j < SMALL_TILES; ++j) {
        parts[warp][r][c + j] = sum[j][0];
        parts[warp][r][c + SMALL_TILES + j] = sum[j][1];
        parts[warp][r + 8][c + j] = sum[j][2];
        parts[warp][r + 8][c + SMALL_TILES + j] = sum[j][3];
    }
    reduce_small(parts, bias, of_rows, out, row0, col0, rows, n);
}
