// Products of few rows with a weight in codes, as a token of an answer has them: codes become numbers where they are read, and no weight of
// numbers is written. A warp has some columns of the result. Its lanes read codes that follow each other, eight at a time.
//
// Numbers are those that `dequantise.cu` makes, in the dtype of the rows. Sums are in f32, and rounded once.
#include "codes.h"

constexpr int AT_ONCE = 512; // columns of the rows that are in shared memory at a time

// A number as the product takes it.
template <class T>
DEVICE float in_dtype(float x) {
    T y;
    from_float(y, x);
    return to_float(y);
}

// The numbers of N codes of a row of the weight.
template <int N, class T, class Codes>
DEVICE void numbers(const Codes& codes, size_t at, int row, float (&to)[N]) {
    const float scale = codes.scale(at, row);
    if constexpr (N == 1) {
        to[0] = in_dtype<T>(times(codes.value(at), scale));
    } else {
        float low[4], high[4];
        codes.eight(at, low, high);
        for (int i = 0; i < 4; i++) {
            to[i] = in_dtype<T>(times(low[i], scale));
            to[4 + i] = in_dtype<T>(times(high[i], scale));
        }
    }
}

struct Sizes {
    int rows, width, outputs;
};

// y[r][o] = the sum over k of x[r][k] times the weight's element (o, k), for at most ROWS rows. A warp has OUTPUTS of the columns.
template <int ROWS, int OUTPUTS, int N, class Codes, class T>
DEVICE void multiply_few(const Codes& codes, float* tile, const T* x, T* y, const Sizes& of) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int first = (blockIdx.x * (blockDim.x / WARP) + warp) * OUTPUTS;
    float sums[OUTPUTS][ROWS] = {};
    for (int from = 0; from < of.width; from += AT_ONCE) {
        const int columns = min(AT_ONCE, of.width - from);
        for (int i = threadIdx.x; i < ROWS * AT_ONCE; i += blockDim.x) {
            const int row = i / AT_ONCE, column = i % AT_ONCE;
            const bool is_there = row < of.rows && column < columns;
            tile[i] = is_there ? to_float(x[size_t(row) * of.width + from + column]) : 0.0f;
        }
        BARRIER();
        for (int at = lane * N; at < columns; at += WARP * N) {
            for (int o = 0; o < OUTPUTS; o++) {
                if (first + o >= of.outputs) break;
                float weight[N];
                numbers<N, T>(codes, size_t(first + o) * of.width + from + at, first + o, weight);
                for (int row = 0; row < ROWS; row++)
                    for (int k = 0; k < N; k++) sums[o][row] = fmaf(weight[k], tile[row * AT_ONCE + at + k], sums[o][row]);
            }
        }
        BARRIER();
    }
    for (int o = 0; o < OUTPUTS; o++) {
        for (int row = 0; row < ROWS; row++) {
            const float sum = warp_sum(sums[o][row]);
            if (lane == 0 && row < of.rows && first + o < of.outputs) from_float(y[size_t(row) * of.outputs + first + o], sum);
        }
    }
}

// Eight elements of a row are of one block, and their codes are aligned, where rows are multiples of eight.
template <int ROWS, int OUTPUTS, class Codes, class T>
DEVICE void multiply_few_any(const Codes& codes, float* tile, const T* x, T* y, const Sizes& of) {
    if (of.width % 8 == 0) multiply_few<ROWS, OUTPUTS, 8>(codes, tile, x, y, of);
    else multiply_few<ROWS, OUTPUTS, 1>(codes, tile, x, y, of);
}

#define FEW_ROWS(most, each, suffix, T) \
    KERNEL(256, few_rows_##most##_int8_##suffix, const uint8_t* codes, const uint8_t* scales, const T* x, T* y, int rows, int width, \
           int outputs) { \
        SHARED(float, tile); \
        multiply_few_any<most, each>(Int8{codes, scales}, tile, x, y, Sizes{rows, width, outputs}); \
    } \
    KERNEL(256, few_rows_##most##_nf4_##suffix, const uint8_t* codes, const uint8_t* absmax, const uint8_t* scales, const uint8_t* offset, \
           const T* x, T* y, int rows, int width, int outputs) { \
        SHARED(float, table); \
        fill_nf4_table(table); \
        const Nf4 of{codes, absmax, scales, offset, table, table + 16}; \
        multiply_few_any<most, each>(of, table + NF4_TABLE, x, y, Sizes{rows, width, outputs}); \
    }
FEW_ROWS(4, 1, f32, float)
FEW_ROWS(4, 1, bf16, bf16)
FEW_ROWS(16, 2, f32, float)
FEW_ROWS(16, 2, bf16, bf16)
