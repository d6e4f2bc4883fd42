// The part of cuBLAS that is wanted: matrix products of f32, f16 and bf16 with f32 sums from the lowest k to
// the highest, whatever the number of threads. Those of 16-bit floats are sums of tensor cores (truncation.h).
#include "truncation.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace {

using namespace emu;

enum Status { OK = 0, BAD_VALUE = 7, EXECUTION_FAILED = 13, UNSUPPORTED = 15 };
enum Type { F32 = 0, F16 = 2, BF16 = 14 };

struct Handle {
    void* stream = nullptr;
    int device = 0;
};

// Element (i, j) lies at data[i * row + j * column].
struct Matrix {
    Address data;
    int type;
    long row, column;
};

enum class Part { All, Lower, Upper };

struct Product {
    long m, n, k;
    float alpha, beta;
    Matrix a, b, c;
    Part part;
};

size_t size_of(int type) { return type == F32 ? 4 : type == F16 || type == BF16 ? 2 : 0; }

float load(const Matrix& from, long i, long j) {
    const long at = i * from.row + j * from.column;
    switch (from.type) {
        case F16: return half_to_float(reinterpret_cast<const uint16_t*>(from.data)[at]);
        case BF16: return bfloat16_to_float(reinterpret_cast<const uint16_t*>(from.data)[at]);
        default: return reinterpret_cast<const float*>(from.data)[at];
    }
}

void store(const Matrix& to, long i, long j, float value) {
    const long at = i * to.row + j * to.column;
    switch (to.type) {
        case F16: reinterpret_cast<uint16_t*>(to.data)[at] = half_from_float(value); break;
        case BF16: reinterpret_cast<uint16_t*>(to.data)[at] = bfloat16_from_float(value); break;
        default: reinterpret_cast<float*>(to.data)[at] = value;
    }
}

// A tile of the result: ROWS by COLUMNS sums stay in registers over all of k.
typedef float Lanes __attribute__((vector_size(32)));
constexpr long ROWS = 16, COLUMNS = 6;

void tile(const float* a, const float* b, long k, Lanes (&sums)[COLUMNS][2]) {
    Lanes local[COLUMNS][2] = {};
    for (long p = 0; p < k; ++p) {
        Lanes low, high;
        memcpy(&low, a + p * ROWS, sizeof low);
        memcpy(&high, a + p * ROWS + 8, sizeof high);
        for (int j = 0; j < COLUMNS; ++j) {
            local[j][0] += low * b[p * COLUMNS + j];
            local[j][1] += high * b[p * COLUMNS + j];
        }
    }
    memcpy(sums, local, sizeof local);
}

// The same on tensor cores, one chain of sums over all of k.
void truncated_tile(const float* a, const float* b, long k, int exponent, const Truncation& device,
                    Lanes (&sums)[COLUMNS][2]) {
    memset(sums, 0, sizeof sums);
    for (long p = 0; p < k; p += 16) {
        Lanes rows[2][16] = {};
        float factors[COLUMNS][16] = {};
        for (long q = 0; q < 16 && p + q < k; ++q) {
            memcpy(&rows[0][q], a + (p + q) * ROWS, sizeof(Lanes));
            memcpy(&rows[1][q], a + (p + q) * ROWS + 8, sizeof(Lanes));
            for (int j = 0; j < COLUMNS; ++j) factors[j][q] = b[(p + q) * COLUMNS + j];
        }
        for (int j = 0; j < COLUMNS; ++j)
            for (int half = 0; half < 2; ++half)
                sums[j][half] = add_truncated(sums[j][half], factors[j], rows[half], exponent, device);
    }
}

bool wanted(Part part, long i, long j) { return part == Part::All || (part == Part::Lower ? i >= j : i <= j); }

// Panels of `width` rows of op(A) or columns of op(B), k after k, padded with zeros.
void pack(const Matrix& from, bool rows, long first, long width, long end, long k, float* to) {
    for (long p = 0; p < k; ++p)
        for (long i = 0; i < width; ++i) {
            const long at = first + i;
            to[p * width + i] = at >= end ? 0.0f : rows ? load(from, at, p) : load(from, p, at);
        }
}

void multiply(const Product& product) {
    const auto [m, n, k] = std::tuple(product.m, product.n, product.k);
    const long row_panels = (m + ROWS - 1) / ROWS, column_panels = (n + COLUMNS - 1) / COLUMNS;
    const Truncation* device = product.a.type == F32 ? nullptr : truncation();
    const int exponent = product.a.type == F16 ? F16_EXPONENT : F32_EXPONENT;
    std::vector<float> a(size_t(row_panels * ROWS * k));
    run_parallel(row_panels, [&](long panel) { pack(product.a, true, panel * ROWS, ROWS, m, k, &a[size_t(panel * ROWS * k)]); });
    run_parallel(column_panels, [&](long panel) {
        std::vector<float> b(size_t(COLUMNS * k));
        pack(product.b, false, panel * COLUMNS, COLUMNS, n, k, b.data());
        for (long rows = 0; rows < row_panels; ++rows) {
            const long i0 = rows * ROWS, j0 = panel * COLUMNS;
            Lanes sums[COLUMNS][2];
            if (device) truncated_tile(&a[size_t(i0 * k)], b.data(), k, exponent, *device, sums);
            else tile(&a[size_t(i0 * k)], b.data(), k, sums);
            for (long j = 0; j < COLUMNS && j0 + j < n; ++j)
                for (long i = 0; i < ROWS && i0 + i < m; ++i) {
                    if (!wanted(product.part, i0 + i, j0 + j)) continue;
                    const float before = product.beta == 0.0f ? 0.0f : product.beta * load(product.c, i0 + i, j0 + j);
                    store(product.c, i0 + i, j0 + j, product.alpha * sums[j][i / 8][i % 8] + before);
                }
        }
    });
}

// As cuBLAS stores it: column after column, `lead` elements apart.
struct Stored {
    Address data;
    int type;
    long rows, columns, lead;
    bool fits() const { return size_of(type) && lead >= (rows > 1 ? rows : 1); }
    bool usable_on(int device) const {
        if (!rows || !columns) return true;
        return usable(device, data, size_t((columns - 1) * lead + rows) * size_of(type), "cuBLAS");
    }
    Matrix as(bool transposed) const { return transposed ? Matrix{data, type, lead, 1} : Matrix{data, type, 1, lead}; }
};

int submit_product(Handle* handle, long m, long n, long k, float alpha, Stored a, bool a_transposed, Stored b, bool b_transposed,
                   float beta, Stored c, Part part, long strides[3], long batch) {
    if (m < 0 || n < 0 || k < 0 || batch < 0 || !a.fits() || !b.fits() || !c.fits()) {
        report(format("cuBLAS: bad sizes or types: m %ld, n %ld, k %ld, leading dimensions %ld, %ld, %ld", m, n, k, a.lead, b.lead, c.lead));
        return size_of(a.type) && size_of(b.type) && size_of(c.type) ? BAD_VALUE : UNSUPPORTED;
    }
    if (m == 0 || n == 0) return OK;
    Locked hold(driver_lock());
    Stream* stream = stream_of(handle->stream);
    if (!stream) return BAD_VALUE;
    const int device = device_of(stream);
    for (long i = 0; i < batch; ++i) {
        auto check = [=, a = a, b = b, c = c]() mutable {
            a.data += Address(i * strides[0]) * size_of(a.type);
            b.data += Address(i * strides[1]) * size_of(b.type);
            c.data += Address(i * strides[2]) * size_of(c.type);
            return a.usable_on(device) && b.usable_on(device) && c.usable_on(device);
        };
        if (!check()) return EXECUTION_FAILED;
        Stored at[3] = {a, b, c};
        for (int which = 0; which < 3; ++which) at[which].data += Address(i * strides[which]) * size_of(at[which].type);
        const Product product{m, n, k, alpha, beta, at[0].as(a_transposed), at[1].as(b_transposed), at[2].as(false), part};
        const int code = submit(stream, [=] {
            // Memory may have been freed since.
            if (!at[0].usable_on(device) || !at[1].usable_on(device) || !at[2].usable_on(device)) return make_sticky(device, ILLEGAL_ADDRESS);
            open_for(device);
            multiply(product);
        });
        if (code) return EXECUTION_FAILED;
    }
    return OK;
}

// Compute types 64 and 65 take scalars in half precision.
float scalar(const void* value, int compute) {
    return compute == 64 || compute == 65 ? half_to_float(*static_cast<const uint16_t*>(value)) : *static_cast<const float*>(value);
}

}  // namespace

EMU_API int cublasCreate_v2(void** handle) {
    *handle = new Handle;
    return OK;
}
EMU_API int cublasDestroy_v2(void* handle) {
    delete static_cast<Handle*>(handle);
    return OK;
}
EMU_API int cublasSetStream_v2(void* handle, void* stream) {
    static_cast<Handle*>(handle)->stream = stream;
    return OK;
}
EMU_API int cublasGetStream_v2(void* handle, void** stream) {
    *stream = static_cast<Handle*>(handle)->stream;
    return OK;
}
EMU_API int cublasSetMathMode(void*, int) { return OK; }
EMU_API int cublasSetWorkspace_v2(void*, void*, size_t) { return OK; }
EMU_API int cublasSetPointerMode_v2(void*, int mode) { return mode == 0 ? OK : UNSUPPORTED; }
EMU_API int cublasGetPointerMode_v2(void*, int* mode) {
    *mode = 0;
    return OK;
}
// 13.0.0, whole and in parts: major, minor, patch.
EMU_API int cublasGetVersion_v2(void*, int* version) {
    *version = 130000;
    return OK;
}
EMU_API int cublasGetProperty(int which, int* value) {
    *value = which == 0 ? 13 : 0;
    return OK;
}

EMU_API int cublasGemmStridedBatchedEx(void* handle, int a_op, int b_op, int m, int n, int k, const void* alpha, const void* a, int a_type,
                                       int lda, long long a_stride, const void* b, int b_type, int ldb, long long b_stride, const void* beta,
                                       void* c, int c_type, int ldc, long long c_stride, int batch, int compute, int) {
    long strides[3] = {long(a_stride), long(b_stride), long(c_stride)};
    const Stored as{Address(a), a_type, a_op ? k : m, a_op ? m : k, lda};
    const Stored bs{Address(b), b_type, b_op ? n : k, b_op ? k : n, ldb};
    const Stored cs{Address(c), c_type, m, n, ldc};
    return submit_product(static_cast<Handle*>(handle), m, n, k, scalar(alpha, compute), as, a_op, bs, b_op, scalar(beta, compute), cs,
                          Part::All, strides, batch);
}
EMU_API int cublasGemmEx(void* handle, int a_op, int b_op, int m, int n, int k, const void* alpha, const void* a, int a_type, int lda,
                         const void* b, int b_type, int ldb, const void* beta, void* c, int c_type, int ldc, int compute, int algorithm) {
    return cublasGemmStridedBatchedEx(handle, a_op, b_op, m, n, k, alpha, a, a_type, lda, 0, b, b_type, ldb, 0, beta, c, c_type, ldc, 0, 1,
                                      compute, algorithm);
}
EMU_API int cublasSgemm_v2(void* handle, int a_op, int b_op, int m, int n, int k, const float* alpha, const float* a, int lda, const float* b,
                           int ldb, const float* beta, float* c, int ldc) {
    return cublasGemmEx(handle, a_op, b_op, m, n, k, alpha, a, F32, lda, b, F32, ldb, beta, c, F32, ldc, 68, -1);
}
// C = alpha op(A) op(A)^T + beta C, one triangle.
EMU_API int cublasSsyrk_v2(void* handle, int upper, int op, int n, int k, const float* alpha, const float* a, int lda, const float* beta,
                           float* c, int ldc) {
    long strides[3] = {0, 0, 0};
    const Stored as{Address(a), F32, op ? k : n, op ? n : k, lda}, cs{Address(c), F32, n, n, ldc};
    return submit_product(static_cast<Handle*>(handle), n, n, k, *alpha, as, op, as, !op, *beta, cs, upper ? Part::Upper : Part::Lower, strides, 1);
}
