// The inverse factor of a Hessian, in f64 and in place, tile by tile: A = LL', then X = L^-1, then the upper
// factor in the order of the columns (`num::linalg::inverse_factor` is the twin). `a` is [n][n], row-major;
// only its lower triangle is read. For t = 0, 1, ... below ceil(n/64) the host launches cholesky_tile,
// cholesky_panel, cholesky_update; then, for each t again, inverse_row and inverse_update; last, inverse_store.
// Tiles on the diagonal hold their inverse as soon as they are factored: nothing needs them otherwise.
#include "device.cuh"

namespace {

constexpr uint32_t TILE = 64;
constexpr uint32_t THREADS = 256;
// Columns of the operands that are in shared memory at a time.
constexpr uint32_t DEPTH = 16;
constexpr uint32_t PADDED = TILE + 1;

// What a thread has of a 64x64 product: rows y + 16r, columns x + 16c.
struct Part {
    double v[4][4];
};

QK_INLINE uint32_t here_x() { return threadIdx.x % 16; }
QK_INLINE uint32_t here_y() { return threadIdx.x / 16; }
QK_INLINE uint32_t tile_size(uint32_t n, uint32_t t) { return n - t * TILE < TILE ? n - t * TILE : TILE; }

// a (`rows` x `depth`) times b (`depth` x `cols`), or times b' where b is stored as `cols` x `depth`.
template <bool TRANSPOSED>
QK_INLINE Part tile_product(const double* a, uint64_t a_stride, uint32_t rows, const double* b, uint64_t b_stride,
                            uint32_t cols, uint32_t depth) {
    __shared__ double left[DEPTH][PADDED];
    __shared__ double right[DEPTH][PADDED];
    Part part = {};
    for (uint32_t first = 0; first < depth; first += DEPTH) {
        __syncthreads();
#pragma unroll
        for (uint32_t e = threadIdx.x; e < TILE * DEPTH; e += THREADS) {
            const uint32_t i = e / DEPTH;
            const uint32_t k = e % DEPTH;
            const bool in = first + k < depth;
            left[k][i] = in && i < rows ? a[i * a_stride + first + k] : 0.0;
            if (TRANSPOSED) right[k][i] = in && i < cols ? b[i * b_stride + first + k] : 0.0;
        }
        if (!TRANSPOSED) {
#pragma unroll
            for (uint32_t e = threadIdx.x; e < TILE * DEPTH; e += THREADS) {
                const uint32_t k = e / TILE;
                const uint32_t j = e % TILE;
                right[k][j] = first + k < depth && j < cols ? b[(first + k) * b_stride + j] : 0.0;
            }
        }
        __syncthreads();
#pragma unroll
        for (uint32_t k = 0; k < DEPTH; ++k) {
            double x[4];
            double y[4];
#pragma unroll
            for (uint32_t r = 0; r < 4; ++r) {
                x[r] = left[k][here_y() + 16 * r];
                y[r] = right[k][here_x() + 16 * r];
            }
#pragma unroll
            for (uint32_t r = 0; r < 4; ++r) {
#pragma unroll
                for (uint32_t c = 0; c < 4; ++c) part.v[r][c] += x[r] * y[c];
            }
        }
    }
    return part;
}

// out = keep * out + sign * part, inside `rows` x `cols`.
QK_INLINE void store(const Part& part, double* out, uint64_t stride, uint32_t rows, uint32_t cols, bool keep,
                     double sign) {
#pragma unroll
    for (uint32_t r = 0; r < 4; ++r) {
        const uint32_t i = here_y() + 16 * r;
#pragma unroll
        for (uint32_t c = 0; c < 4; ++c) {
            const uint32_t j = here_x() + 16 * c;
            if (i >= rows || j >= cols) continue;
            double* to = out + i * stride + j;
            *to = (keep ? *to : 0.0) + sign * part.v[r][c];
        }
    }
}

QK_INLINE double* tile_at(double* a, uint32_t n, uint32_t i, uint32_t j) {
    return a + static_cast<uint64_t>(i) * TILE * n + static_cast<uint64_t>(j) * TILE;
}

}  // namespace

// Factors tile t of the diagonal and inverts the factor; zeros above. *failed = 1 when a pivot is not positive.
// Grid 1, block 256.
extern "C" __global__ void __launch_bounds__(THREADS)
    cholesky_tile(double* a, uint32_t* failed, uint32_t n, uint32_t t) {
    // L below the diagonal; later its inverse, transposed, above.
    __shared__ double tile[TILE][PADDED];
    __shared__ double inverse_diagonal[TILE];
    const uint32_t size = tile_size(n, t);
    double* at = tile_at(a, n, t, t);
    for (uint32_t e = threadIdx.x; e < TILE * TILE; e += THREADS) {
        const uint32_t i = e / TILE;
        const uint32_t j = e % TILE;
        if (i < size && j <= i) tile[i][j] = at[static_cast<uint64_t>(i) * n + j];
    }
    __syncthreads();
    for (uint32_t k = 0; k < size; ++k) {
        const double pivot = tile[k][k];
        const double inverse = 1.0 / sqrt(pivot);
        if (threadIdx.x == 0) {
            if (!(pivot > 0.0)) *failed = 1;
            inverse_diagonal[k] = inverse;
        }
        if (threadIdx.x > k && threadIdx.x < size) tile[threadIdx.x][k] *= inverse;
        __syncthreads();
        const uint32_t j = k + 1 + threadIdx.x % TILE;
        for (uint32_t i = k + 1 + threadIdx.x / TILE; i < size; i += THREADS / TILE) {
            if (j <= i) tile[i][j] -= tile[i][k] * tile[j][k];
        }
        __syncthreads();
    }
    // Column j of the inverse by forward substitution, one thread each.
    if (threadIdx.x < size) {
        const uint32_t j = threadIdx.x;
        for (uint32_t i = j + 1; i < size; ++i) {
            double sum = tile[i][j] * inverse_diagonal[j];
            for (uint32_t k = j + 1; k < i; ++k) sum += tile[i][k] * tile[j][k];
            tile[j][i] = -sum * inverse_diagonal[i];
        }
    }
    __syncthreads();
    for (uint32_t e = threadIdx.x; e < TILE * TILE; e += THREADS) {
        const uint32_t i = e / TILE;
        const uint32_t j = e % TILE;
        if (i >= size || j >= size) continue;
        at[static_cast<uint64_t>(i) * n + j] = j < i ? tile[j][i] : j == i ? inverse_diagonal[i] : 0.0;
    }
}

// The tiles below tile t become L: A_it L_tt'^-1. Grid: tiles below (none: no launch), block 256.
extern "C" __global__ void __launch_bounds__(THREADS) cholesky_panel(double* a, uint32_t n, uint32_t t) {
    const uint32_t i = t + 1 + blockIdx.x;
    const uint32_t rows = tile_size(n, i);
    double* at = tile_at(a, n, i, t);
    const Part part = tile_product<true>(at, n, rows, tile_at(a, n, t, t), n, TILE, TILE);
    store(part, at, n, rows, TILE, false, 1.0);
}

// What follows column t of tiles, lower triangle only: A_ij -= L_it L_jt'. Grid (m, m) for m tiles below,
// block 256.
extern "C" __global__ void __launch_bounds__(THREADS) cholesky_update(double* a, uint32_t n, uint32_t t) {
    if (blockIdx.x > blockIdx.y) return;
    const uint32_t i = t + 1 + blockIdx.y;
    const uint32_t j = t + 1 + blockIdx.x;
    const uint32_t rows = tile_size(n, i);
    const uint32_t cols = tile_size(n, j);
    const Part part = tile_product<true>(tile_at(a, n, i, t), n, rows, tile_at(a, n, j, t), n, cols, TILE);
    store(part, tile_at(a, n, i, j), n, rows, cols, true, -1.0);
}

// Row t of tiles of the inverse: what has gathered there times L_tt^-1. Column t of L makes room and goes to
// `panel` [n][64]. Grid: all tiles of a row, block 256.
extern "C" __global__ void __launch_bounds__(THREADS) inverse_row(double* a, double* panel, uint32_t n, uint32_t t) {
    const uint32_t j = blockIdx.x;
    if (j < t) {
        const uint32_t rows = tile_size(n, t);
        double* at = tile_at(a, n, t, j);
        const Part part = tile_product<false>(tile_at(a, n, t, t), n, rows, at, n, TILE, rows);
        store(part, at, n, rows, TILE, false, 1.0);
    } else if (j > t) {
        const double* from = tile_at(a, n, j, t);
        double* to = panel + static_cast<uint64_t>(j) * TILE * TILE;
        const uint32_t rows = tile_size(n, j);
        for (uint32_t e = threadIdx.x; e < rows * TILE; e += THREADS) {
            to[e] = from[static_cast<uint64_t>(e / TILE) * n + e % TILE];
        }
    }
}

// Rows below tile t take their share: R_ij -= L_it X_tj for j <= t, where R_it begins at zero.
// Grid (t + 1, tiles below), block 256.
extern "C" __global__ void __launch_bounds__(THREADS)
    inverse_update(double* a, const double* panel, uint32_t n, uint32_t t) {
    const uint32_t i = t + 1 + blockIdx.y;
    const uint32_t j = blockIdx.x;
    const uint32_t rows = tile_size(n, i);
    const double* left = panel + static_cast<uint64_t>(i) * TILE * TILE;
    const Part part = tile_product<false>(left, TILE, rows, tile_at(a, n, t, j), n, TILE, TILE);
    store(part, tile_at(a, n, i, j), n, rows, TILE, j < t, -1.0);
}

// U[i][j] = X[n-1-i][n-1-j], zeros below the diagonal. *failed = 1 when a value is not finite.
// Grid (n, ceil(n/256)), block 256.
extern "C" __global__ void inverse_store(const double* a, float* u, uint32_t* failed, uint32_t n) {
    const uint32_t i = blockIdx.x;
    const uint32_t j = blockIdx.y * blockDim.x + threadIdx.x;
    if (j >= n) return;
    double value = 0.0;
    if (j >= i) value = a[static_cast<uint64_t>(n - 1 - i) * n + (n - 1 - j)];
    if (!isfinite(value)) *failed = 1;
    u[static_cast<uint64_t>(i) * n + j] = static_cast<float>(value);
}
