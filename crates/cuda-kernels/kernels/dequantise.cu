// Conversion of weights in codes to numbers.
//
// Values are those of the processor to the bit: a product (for scales of NF4 a product and a sum), each rounded separately.
#include "codes.h"

DEVICE void store_eight(float* to, size_t at, const float (&low)[4], const float (&high)[4]) {
    store<4>(to, at, low);
    store<4>(to, at + 4, high);
}
DEVICE void store_eight(bf16* to, size_t at, const float (&low)[4], const float (&high)[4]) {
    EightNarrow eight;
    for (int i = 0; i < 2; i++) {
        eight.x[i] = pack(low[2 * i], low[2 * i + 1]);
        eight.x[2 + i] = pack(high[2 * i], high[2 * i + 1]);
    }
    *together_at<EightNarrow>(to + at) = eight;
}

// Rows and columns of a weight whose rows have `width` elements.
struct Part {
    int width, row, column, rows, columns;
};

// Units of eight elements, or of one, for each thread.
constexpr int UNITS_EACH = 4;

// to[r][c] = the element (row + r, column + c).
template <int N, class Codes, class T>
DEVICE void dequantise(const Codes& codes, T* to, const Part& part) {
    const unsigned in_row = unsigned(part.columns) / N, units = unsigned(part.rows) * in_row;
    const unsigned first = blockIdx.x * blockDim.x * UNITS_EACH + threadIdx.x;
    for (int i = 0; i < UNITS_EACH; i++) {
        const unsigned unit = first + i * blockDim.x;
        if (unit >= units) return;
        const size_t row = part.row + unit / in_row, at = row * part.width + part.column + unit % in_row * N;
        const float scale = codes.scale(at, row);
        if (N == 1) {
            from_float(to[unit], times(codes.value(at), scale));
        } else {
            float low[4], high[4];
            codes.eight(at, low, high);
            for (int k = 0; k < 4; k++) low[k] = times(low[k], scale), high[k] = times(high[k], scale);
            store_eight(to, size_t(unit) * N, low, high);
        }
    }
}

// If all sizes are multiples of eight, eight elements of a row belong to one block, and their codes and numbers are aligned.
template <class Codes, class T>
DEVICE void dequantise_any(const Codes& codes, T* to, const Part& part) {
    if ((part.width | part.column | part.columns) % 8 == 0) dequantise<8>(codes, to, part);
    else dequantise<1>(codes, to, part);
}

#define DEQUANTISE(suffix, T) \
    KERNEL(256, dequantise_int8_##suffix, const uint8_t* codes, const uint8_t* scales, T* to, int width, int row, int column, int rows, \
           int columns) { \
        dequantise_any(Int8{codes, scales}, to, Part{width, row, column, rows, columns}); \
    } \
    KERNEL(256, dequantise_nf4_##suffix, const uint8_t* codes, const uint8_t* absmax, const uint8_t* scales, const uint8_t* offset, T* to, \
           int width, int row, int column, int rows, int columns) { \
        SHARED(float, table); \
        fill_nf4_table(table); \
        dequantise_any(Nf4{codes, absmax, scales, offset, table, table + 16}, to, Part{width, row, column, rows, columns}); \
    }
DEQUANTISE(f32, float)
DEQUANTISE(bf16, bf16)
