// Products of few rows with a weight in codes, such as a token of an answer. Codes are converted to numbers as they are read, and no weight
// of numbers is written. A warp has a column of the result. Its lanes read consecutive codes, eight at a time.
//
// The numbers are those of `dequantise.cu`, in the dtype of the rows. Sums are in f32, and rounded once.
#include "codes.h"

constexpr int AT_ONCE = 512; // columns of the rows that are in shared memory at a time

// Rounds a number to the dtype of the product.
template <class T>
DEVICE float in_dtype(float x) {
    T y;
    from_float(y, x);
    return to_float(y);
}

// The place of a row's column in the tile. A lane reads eight columns. The first four columns of all lanes follow each other, and then the
// other four, so that lanes that read four at once read different banks. Among the other four, halves of a line are swapped, so that lanes
// that write columns in order use different banks, too.
template <int N>
DEVICE int place_in_tile(int column) {
    const int half = column % 8 / 4;
    return N == 1 ? column : ((column / 8 * 4 + column % 4) ^ half * 16) + half * (AT_ONCE / 2);
}

// Adds N numbers of the weight, each times an element of every row. The elements of the first row begin at `tile`.
template <int ROWS, int N, class T>
DEVICE void add_numbers(const float (&values)[N], float scale, const float* tile, float (&sums)[ROWS]) {
    float numbers[N];
    for (int k = 0; k < N; k++) numbers[k] = in_dtype<T>(times(values[k], scale));
    for (int row = 0; row < ROWS; row++) {
        float x[N];
        load<N>(tile, size_t(row) * AT_ONCE, x);
        for (int k = 0; k < N; k++) sums[row] = fmaf(numbers[k], x[k], sums[row]);
    }
}

struct Sizes {
    int rows, width, outputs;
};

// y[r][o] = the sum over k of x[r][k] times the weight's element (o, k), for ROWS rows from blockIdx.y * ROWS on, or fewer at the end. A
// warp has one of the columns.
template <int ROWS, int N, class Codes, class T>
DEVICE void multiply_few(const Codes& codes, float* tile, const T* x, T* y, const Sizes& of) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int output = blockIdx.x * (blockDim.x / WARP) + warp, first = blockIdx.y * ROWS;
    float sums[ROWS] = {};
    for (int from = 0; from < of.width; from += AT_ONCE) {
        const int columns = min(AT_ONCE, of.width - from);
        for (int i = threadIdx.x; i < ROWS * AT_ONCE; i += blockDim.x) {
            const int row = i / AT_ONCE, column = i % AT_ONCE;
            const bool is_there = first + row < of.rows && column < columns;
            tile[row * AT_ONCE + place_in_tile<N>(column)] = is_there ? to_float(x[size_t(first + row) * of.width + from + column]) : 0.0f;
        }
        BARRIER();
        for (int at = lane * N; at < columns && output < of.outputs; at += WARP * N) {
            const size_t place = size_t(output) * of.width + from + at;
            const float scale = codes.scale(place, output);
            if constexpr (N == 1) {
                const float value[1] = {codes.value(place)};
                add_numbers<ROWS, 1, T>(value, scale, tile + at, sums);
            } else {
                float low[4], high[4];
                codes.eight(place, low, high);
                add_numbers<ROWS, 4, T>(low, scale, tile + place_in_tile<N>(at), sums);
                add_numbers<ROWS, 4, T>(high, scale, tile + place_in_tile<N>(at + 4), sums);
            }
        }
        BARRIER();
    }
    for (int row = 0; row < ROWS; row++) {
        const float sum = warp_sum(sums[row]);
        if (lane == 0 && first + row < of.rows && output < of.outputs) from_float(y[size_t(first + row) * of.outputs + output], sum);
    }
}

// If rows are multiples of eight, eight elements of a row belong to one block, and their codes are aligned.
template <int ROWS, class Codes, class T>
DEVICE void multiply_few_any(const Codes& codes, float* tile, const T* x, T* y, const Sizes& of) {
    if (of.width % 8 == 0) multiply_few<ROWS, 8>(codes, tile, x, y, of);
    else multiply_few<ROWS, 1>(codes, tile, x, y, of);
}

// `BLOCKS` blocks at once.
#define SMALL_M(each, BLOCKS, suffix, T) \
    KERNEL_OF_BLOCKS(256, BLOCKS, small_m_##each##_int8_##suffix, const uint8_t* codes, const uint8_t* scales, const T* x, T* y, int rows, int width, \
           int outputs) { \
        SHARED(float, tile); \
        multiply_few_any<each>(Int8{codes, scales}, tile, x, y, Sizes{rows, width, outputs}); \
    } \
    KERNEL_OF_BLOCKS(256, BLOCKS, small_m_##each##_nf4_##suffix, const uint8_t* codes, const uint8_t* absmax, const uint8_t* scales, const uint8_t* offset, \
           const T* x, T* y, int rows, int width, int outputs) { \
        SHARED(float, table); \
        fill_nf4_table(table); \
        const Nf4 of{codes, absmax, scales, offset, table, table + 16}; \
        multiply_few_any<each>(of, table + NF4_TABLE, x, y, Sizes{rows, width, outputs}); \
    }
SMALL_M(4, 5, f32, float)
SMALL_M(4, 5, bf16, bf16)
SMALL_M(8, 4, f32, float)
SMALL_M(8, 4, bf16, bf16)
