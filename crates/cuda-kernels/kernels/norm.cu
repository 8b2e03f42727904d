// RMS layer normalisation: y = weight * x / sqrt(mean(x^2) + eps), over rows of `width`; lengths of rows.
#include "device.h"

// A warp a row. `inv_rms` gets 1 / rms of each row.
template <int N, class T, class W>
DEVICE void rms_norm(const T* x, const W* weight, float eps, T* y, float* inv_rms, int rows, int width) {
    const int row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= rows) return;
    const T* from = x + size_t(row) * width;
    T* to = y + size_t(row) * width;
    float squares = 0, values[N], factors[N];
    for (int i = lane * N; i < width; i += WARP * N) {
        load<N>(from, i, values);
        for (int k = 0; k < N; k++) squares += values[k] * values[k];
    }
    const float inv = 1.0f / sqrtf(warp_sum(squares) / float(width) + eps);
    for (int i = lane * N; i < width; i += WARP * N) {
        load<N>(from, i, values);
        load<N>(weight, i, factors);
        for (int k = 0; k < N; k++) values[k] = values[k] * inv * factors[k];
        store<N>(to, i, values);
    }
    if (lane == 0) inv_rms[row] = inv;
}

// Like the above, for a row of at most FOURS * 4 elements a lane, which the lane keeps: all loads are in flight at once, and each element
// is read once.
template <int FOURS, class T, class W>
DEVICE void rms_norm_in_registers(const T* x, const W* weight, float eps, T* y, float* inv_rms, int rows, int width) {
    const int row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= rows) return;
    const size_t at = size_t(row) * width;
    const T* from = x + at;
    T* to = y + at;
    Packed<4, T> kept[FOURS];
    float squares = 0, values[4], factors[4];
#pragma unroll
    for (int j = 0; j < FOURS; j++)
        if (lane * 4 + j * WARP * 4 < width) kept[j] = packed<4>(from, lane * 4 + j * WARP * 4);
#pragma unroll
    for (int j = 0; j < FOURS; j++) {
        if (lane * 4 + j * WARP * 4 >= width) break;
        unpack(kept[j], values);
        for (int k = 0; k < 4; k++) squares += values[k] * values[k];
    }
    const float inv = 1.0f / sqrtf(warp_sum(squares) / float(width) + eps);
    if (lane == 0) inv_rms[row] = inv;
#pragma unroll
    for (int j = 0; j < FOURS; j++) {
        const int i = lane * 4 + j * WARP * 4;
        if (i >= width) break;
        unpack(kept[j], values);
        load<4>(weight, i, factors);
        for (int k = 0; k < 4; k++) values[k] = values[k] * inv * factors[k];
        store<4>(to, i, values);
    }
}

// `dy` becomes residual + inv_rms * (g - n * mean(g * n)) with n = x * inv_rms and g = dy * weight; `residual` may be null.
// A block works on `rows_each` rows, one after the other, and writes its part of the weight's gradient, the sum of dy * n, to row
// blockIdx.x of `partial` (gridDim.x, width). Shared memory: (width + 64) f32.
template <int N, class T, class W>
DEVICE void rms_norm_backward(const T* x, const W* weight, const float* inv_rms, T* dy, const T* residual, float* partial, int rows,
                              int rows_each, int width) {
    SHARED(float, sums);
    float* scratch = sums + width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) sums[i] = 0;
    BARRIER();
    const int first = blockIdx.x * rows_each, end = min(first + rows_each, rows);
    float values[N], gradients[N], factors[N], others[N];
    for (int row = first; row < end; row++) {
        const size_t at = size_t(row) * width;
        const float inv = inv_rms[row];
        float product = 0;
        for (int i = threadIdx.x * N; i < width; i += blockDim.x * N) {
            load<N>(x, at + i, values);
            load<N>(dy, at + i, gradients);
            load<N>(weight, i, factors);
            for (int k = 0; k < N; k++) product += values[k] * gradients[k] * factors[k];
        }
        const float mean = block_sum(product, scratch) * inv * inv / float(width);
        for (int i = threadIdx.x * N; i < width; i += blockDim.x * N) {
            load<N>(x, at + i, values);
            load<N>(dy, at + i, gradients);
            load<N>(weight, i, factors);
            if (residual) load<N>(residual, at + i, others);
            for (int k = 0; k < N; k++) {
                // Each thread has its own columns.
                sums[i + k] += gradients[k] * (values[k] * inv);
                const float gradient = inv * (gradients[k] * factors[k] - values[k] * mean);
                values[k] = residual ? others[k] + gradient : gradient;
            }
            store<N>(dy, at + i, values);
        }
    }
    BARRIER();
    for (int i = threadIdx.x; i < width; i += blockDim.x) partial[size_t(blockIdx.x) * width + i] = sums[i];
}

// Like the above, for at most 256 threads with at most four columns each. A thread keeps its inputs and its sums in registers. Several rows
// share one barrier, and the next rows are read before it.
template <class T, class W>
DEVICE void rms_norm_backward_in_registers(const T* x, const W* weight, const float* inv_rms, T* dy, const T* residual, float* partial,
                                           int rows, int rows_each, int width) {
    constexpr int ROWS = sizeof(T) == 2 ? 4 : 2;
    SHARED(float, scratch);
    constexpr int WARPS = 256 / WARP;
    const int warps = blockDim.x / WARP, own = threadIdx.x * 4;
    const bool has_columns = own < width;
    // Threads and rows after the last read the last one, and write nothing.
    const int column = min(own, width - 4);
    float factors[4], sums[4] = {};
    load<4>(weight, column, factors);
    const int first = blockIdx.x * rows_each, end = min(first + rows_each, rows);
    struct Row {
        Packed<4, T> x, dy, residual;
        float inv;
    } next[ROWS];
    const auto load_next = [&](int row) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int of = min(row + r, end - 1);
            const size_t at = size_t(of) * width + column;
            next[r].inv = inv_rms[of];
            next[r].x = packed<4>(x, at);
            next[r].dy = packed<4>(dy, at);
            if (residual) next[r].residual = packed<4>(residual, at);
        }
    };
    load_next(first);
#pragma unroll 1
    for (int row = first, turn = 0; row < end; row += ROWS, turn ^= 1) {
        // Read in one turn and written again in the turn after next: there is a barrier in between.
        float* of_turn = scratch + turn * ROWS * WARPS;
        Row read[ROWS];
        float values[4], gradients[4];
#pragma unroll
        for (int r = 0; r < ROWS; r++) read[r] = next[r];
        if (row + ROWS < end) load_next(row + ROWS);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float product = 0;
            unpack(read[r].x, values);
            unpack(read[r].dy, gradients);
            for (int k = 0; k < 4; k++) product += values[k] * gradients[k] * factors[k];
            product = warp_sum(has_columns ? product : 0.0f);
            if (threadIdx.x % WARP == 0) of_turn[r * WARPS + threadIdx.x / WARP] = product;
        }
        BARRIER();
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float product = 0, others[4];
#pragma unroll
            for (int warp = 0; warp < WARPS; warp++)
                if (warp < warps) product += of_turn[r * WARPS + warp];
            if (!has_columns || row + r >= end) continue;
            const float inv = read[r].inv, mean = product * inv * inv / float(width);
            unpack(read[r].x, values);
            unpack(read[r].dy, gradients);
            if (residual) unpack(read[r].residual, others);
            for (int k = 0; k < 4; k++) {
                sums[k] += gradients[k] * (values[k] * inv);
                const float gradient = inv * (gradients[k] * factors[k] - values[k] * mean);
                values[k] = residual ? others[k] + gradient : gradient;
            }
            store<4>(dy, size_t(row + r) * width + column, values);
        }
    }
    if (has_columns) store<4>(partial, size_t(blockIdx.x) * width + column, sums);
}

#define RMS_NORM(suffix, T, W) \
    KERNEL_OF_BLOCKS(256, 8, rms_norm_##suffix, const T* x, const W* weight, float eps, T* y, float* inv_rms, int rows, int width) { \
        /* Of 32 registers: all warps of a multiprocessor are resident. */ \
        constexpr int FOURS = sizeof(T) == 2 ? 6 : 3; \
        const bool fours = in_fours(width, x, weight, y); \
        if (fours && width <= FOURS * 4 * WARP) rms_norm_in_registers<FOURS>(x, weight, eps, y, inv_rms, rows, width); \
        else if (fours) rms_norm<4>(x, weight, eps, y, inv_rms, rows, width); \
        else rms_norm<1>(x, weight, eps, y, inv_rms, rows, width); \
    } \
    KERNEL_OF_BLOCKS(256, 3, rms_norm_backward_##suffix, const T* x, const W* weight, const float* inv_rms, T* dy, const T* residual, float* partial, \
           int rows, int rows_each, int width) { \
        const bool fours = in_fours(width, x, weight, dy, residual, partial); \
        if (fours && width <= 4 * int(blockDim.x)) \
            rms_norm_backward_in_registers(x, weight, inv_rms, dy, residual, partial, rows, rows_each, width); \
        else if (fours) rms_norm_backward<4>(x, weight, inv_rms, dy, residual, partial, rows, rows_each, width); \
        else rms_norm_backward<1>(x, weight, inv_rms, dy, residual, partial, rows, rows_each, width); \
    }
RMS_NORM(f32_f32, float, float)
RMS_NORM(f32_bf16, float, bf16)
RMS_NORM(bf16_f32, bf16, float)
RMS_NORM(bf16_bf16, bf16, bf16)

// lengths[row] = the square root of the sum of x[row][i]^2; a warp a row.
KERNEL(256, row_lengths, const float* x, float* lengths, int rows, int width) {
    const int row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= rows) return;
    float squares = 0;
    for (int i = lane; i < width; i += WARP) {
        const float value = x[size_t(row) * width + i];
        squares += value * value;
    }
    squares = warp_sum(squares);
    if (lane == 0) lengths[row] = sqrtf(squares);
}

// sums[i] += partial[0][i] + partial[1][i] + .., in this order. A block has 32 columns. Shared memory: see `add_in_order`.
KERNEL(512, add_partial_sums, const float* partial, float* sums, int parts, int width) {
    SHARED(float, staged);
    const int i = blockIdx.x * WARP + threadIdx.x % WARP, column = min(i, width - 1);
    const float sum = add_in_order(sums[column], parts, staged, [&](int part) { return partial[size_t(part) * width + column]; });
    if (threadIdx.x < WARP && i < width) sums[i] = sum;
}
