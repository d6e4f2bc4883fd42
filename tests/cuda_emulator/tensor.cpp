// Twins of the tensor-core instructions: the last lane to arrive gathers the fragments of the warp in the
// layouts of the PTX manual, multiplies, and scatters the result. Products of 16-bit floats are exact in f32,
// so fused and separate multiply-add agree; sums go from the lowest k to the highest, or as truncation.h says.
#include "truncation.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace {

typedef float Row __attribute__((vector_size(32)));
typedef int IntRow __attribute__((vector_size(32)));

template <class D>
struct Fragments {
    D* d;
    const uint32_t* a;
    const uint32_t* b;
};

void need_whole_warp(unsigned lanes, const char* what) {
    if (lanes != ~0u) emu::fault(emu::LAUNCH_FAILED, what);
}

// Eight 16-bit floats of four registers.
inline void widen_half(const uint32_t* packed, float* out, int words) {
#if defined(__F16C__)
    if (words == 4) {
        _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed))));
    } else {
        _mm_storeu_ps(out, _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(packed))));
    }
#else
    for (int i = 0; i < 2 * words; ++i) out[i] = emu::half_to_float(uint16_t(packed[i / 2] >> 16 * (i % 2)));
#endif
}

inline void widen_bfloat16(const uint32_t* packed, float* out, int words) {
    for (int i = 0; i < words; ++i) {
        out[2 * i] = emu::bits_as<float>(packed[i] << 16);
        out[2 * i + 1] = emu::bits_as<float>(packed[i] & 0xffff0000);
    }
}

// D to the lanes that hold it.
template <class D>
void scatter(Fragments<D>** fragments, const D (&d)[16][8]) {
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane >> 2, t = lane & 3;
        memcpy(fragments[lane]->d, &d[g][2 * t], 8);
        memcpy(fragments[lane]->d + 2, &d[g + 8][2 * t], 8);
    }
}

// m16n8k16. Lane 4g+t holds of A rows g, g+8 and columns 2t, 2t+1, +8; of B rows 2t, 2t+1, +8 and column g;
// of D rows g, g+8 and columns 2t, 2t+1.
template <void (*WIDEN)(const uint32_t*, float*, int), int EXPONENT>
void multiply_16bit(void** arguments, unsigned lanes) {
    need_whole_warp(lanes, "mma needs all 32 lanes");
    auto** fragments = reinterpret_cast<Fragments<float>**>(arguments);
    alignas(32) float a[16][16], b[16][8], d[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const Fragments<float>& of = *fragments[lane];
        const int g = lane >> 2, t = lane & 3;
        float wide[8];
        WIDEN(of.a, wide, 4);
        memcpy(&a[g][2 * t], wide, 8);
        memcpy(&a[g + 8][2 * t], wide + 2, 8);
        memcpy(&a[g][2 * t + 8], wide + 4, 8);
        memcpy(&a[g + 8][2 * t + 8], wide + 6, 8);
        WIDEN(of.b, wide, 2);
        b[2 * t][g] = wide[0], b[2 * t + 1][g] = wide[1];
        b[2 * t + 8][g] = wide[2], b[2 * t + 9][g] = wide[3];
        memcpy(&d[g][2 * t], of.d, 8);
        memcpy(&d[g + 8][2 * t], of.d + 2, 8);
    }
    Row columns[16];
    memcpy(columns, b, sizeof columns);
    if (const emu::Truncation* device = emu::truncation()) {
        for (int i = 0; i < 16; ++i) {
            Row sum;
            memcpy(&sum, d[i], sizeof sum);
            sum = emu::add_truncated(sum, a[i], columns, EXPONENT, *device);
            memcpy(d[i], &sum, sizeof sum);
        }
        return scatter(fragments, d);
    }
    for (int i = 0; i < 16; i += 4) {
        Row sums[4];
        memcpy(sums, d[i], sizeof sums);
        for (int k = 0; k < 16; ++k)
            for (int r = 0; r < 4; ++r) sums[r] += a[i + r][k] * columns[k];
        memcpy(d[i], sums, sizeof sums);
    }
    scatter(fragments, d);
}

// m16n8k32. Lane 4g+t holds of A rows g, g+8 and columns 4t to 4t+3, +16; of B rows 4t to 4t+3, +16 and column g.
void multiply_8bit(void** arguments, unsigned lanes) {
    need_whole_warp(lanes, "mma needs all 32 lanes");
    auto** fragments = reinterpret_cast<Fragments<int>**>(arguments);
    alignas(32) int a[16][32], b[32][8], d[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const Fragments<int>& of = *fragments[lane];
        const int g = lane >> 2, t = lane & 3;
        for (int i = 0; i < 4; ++i) {
            for (int r = 0; r < 4; ++r) a[g + 8 * (r & 1)][4 * t + i + 16 * (r >> 1)] = int8_t(of.a[r] >> 8 * i);
            for (int r = 0; r < 2; ++r) b[4 * t + i + 16 * r][g] = int8_t(of.b[r] >> 8 * i);
        }
        memcpy(&d[g][2 * t], of.d, 8);
        memcpy(&d[g + 8][2 * t], of.d + 2, 8);
    }
    for (int i = 0; i < 16; ++i) {
        IntRow sum, row;
        memcpy(&sum, d[i], sizeof sum);
        for (int k = 0; k < 32; ++k) {
            memcpy(&row, b[k], sizeof row);
            sum += a[i][k] * row;
        }
        memcpy(d[i], &sum, sizeof sum);
    }
    scatter(fragments, d);
}

struct MatrixRows {
    uint32_t* r;
    const char* row;
};

// Lane 8i+j names row j of matrix i; every lane receives two values of row lane/4.
template <int COUNT>
void load_matrices(void** arguments, unsigned lanes) {
    need_whole_warp(lanes, "ldmatrix needs all 32 lanes");
    auto** rows = reinterpret_cast<MatrixRows**>(arguments);
    for (int i = 0; i < COUNT; ++i)
        for (int lane = 0; lane < 32; ++lane) memcpy(&rows[lane]->r[i], rows[8 * i + lane / 4]->row + 4 * (lane % 4), 4);
}

}  // namespace

void emu_mma_f16(float* d, const uint32_t* a, const uint32_t* b) {
    Fragments<float> own{d, a, b};
    emu::meet(emu::self, ~0u, multiply_16bit<widen_half, emu::F16_EXPONENT>, &own);
}
void emu_mma_bf16(float* d, const uint32_t* a, const uint32_t* b) {
    Fragments<float> own{d, a, b};
    emu::meet(emu::self, ~0u, multiply_16bit<widen_bfloat16, emu::F32_EXPONENT>, &own);
}
void emu_mma_s8(int* d, const uint32_t* a, const uint32_t* b) {
    Fragments<int> own{d, a, b};
    emu::meet(emu::self, ~0u, multiply_8bit, &own);
}
void emu_ldmatrix(uint32_t* r, const void* row, int count) {
    MatrixRows own{r, static_cast<const char*>(row)};
    const bool addressed = int(emu::self->lane) < 8 * count;
    if (addressed && uintptr_t(row) % 16) emu::fault(emu::MISALIGNED_ADDRESS, "misaligned row for ldmatrix");
    if (addressed) emu::shadow_read(row, 16, __builtin_return_address(0));
    emu::meet(emu::self, ~0u, count == 4 ? load_matrices<4> : count == 2 ? load_matrices<2> : load_matrices<1>, &own);
}
