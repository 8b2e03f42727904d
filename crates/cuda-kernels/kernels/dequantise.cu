// Weights in codes as numbers: signed codes with a scale for each row, and NF4 with doubly quantised scales, laid out as
// `t5_ops::Quantised` says. Parts follow each other without padding, so that an f32 among them may lie at any byte.
//
// Values are those of the processor to the bit: a product (for scales of NF4 a product and a sum) rounded each by itself.
#include "device.h"

// An f32 whose bytes lie anywhere.
DEVICE float number_at(const uint8_t* bytes, size_t place) {
    bytes += 4 * place;
    return float_of(uint32_t(bytes[0]) | uint32_t(bytes[1]) << 8 | uint32_t(bytes[2]) << 16 | uint32_t(bytes[3]) << 24);
}

struct alignas(8) EightCodes {
    uint32_t x[2];
};
struct alignas(16) EightNarrow {
    uint32_t x[4];
};
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
    *reinterpret_cast<EightNarrow*>(to + at) = eight;
}

// A signed byte for each element, times the scale of its row.
struct Int8 {
    const uint8_t* codes;
    const uint8_t* scales;

    DEVICE float scale(size_t, size_t row) const { return number_at(scales, row); }
    DEVICE float value(size_t at) const { return float(int8_t(codes[at])); }
    DEVICE void eight(size_t at, float (&low)[4], float (&high)[4]) const {
        const EightCodes eight = *reinterpret_cast<const EightCodes*>(codes + at);
        for (int i = 0; i < 4; i++) {
            low[i] = float(int8_t(eight.x[0] >> (8 * i)));
            high[i] = float(int8_t(eight.x[1] >> (8 * i)));
        }
    }
};

// NF4's values: quantiles of a normal distribution (Dettmers et al. 2023, QLoRA, appendix E).
CONSTANT float NF4_VALUES[16] = {-1.0f,         -0.6961928f,   -0.52507305f,  -0.3949175f,  -0.28444138f, -0.18477343f,
                                 -0.091050036f, 0.0f,          0.0795803f,    0.1609302f,   0.2461123f,   0.33791524f,
                                 0.44070983f,   0.562617f,     0.72295684f,   1.0f};
CONSTANT float POWERS_OF_TEN[7] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f};

// The end between parts `j - 1` and `j` of [0.1, 1] in equal ones, as torch's `linspace` rounds it: from the nearer end.
DEVICE float boundary(int j, int parts) {
    const float step = (1.0f - 0.1f) / float(parts);
    return j < (parts + 1) / 2 ? fmaf(step, float(j), 0.1f) : fmaf(-step, float(parts - j), 1.0f);
}

// Of 256 codes in ascending order the value: zero, one, and for each power of ten the middles of 2^i parts with both signs.
DEVICE float dynamic_value(int code) {
    if (code == 127 || code == 255) return code == 127 ? 0.0f : 1.0f;
    const int place = code < 127 ? 127 - code : code - 127;
    int power = 0;
    while (place >> (power + 1)) power++;
    const int parts = 1 << power, part = place - parts;
    const float middle = (boundary(part, parts) + boundary(part + 1, parts)) / 2;
    const float value = POWERS_OF_TEN[power] * middle;
    return code < 127 ? -value : value;
}

constexpr int BLOCK = 64;  // elements that share a scale
constexpr int GROUP = 256; // blocks whose scales share a scale

// Two codes a byte, the first in its upper half. Values of codes and of scales are looked up in shared memory.
struct Nf4 {
    const uint8_t* codes;
    const uint8_t* absmax;
    const uint8_t* scales;
    const uint8_t* offset;
    const float* values;
    const float* map;

    DEVICE float scale(size_t at, size_t) const {
        const size_t block = at / BLOCK;
        return plus(times(map[absmax[block]], number_at(scales, block / GROUP)), number_at(offset, 0));
    }
    DEVICE float value(size_t at) const {
        const uint32_t pair = codes[at / 2];
        return values[at % 2 == 0 ? pair >> 4 : pair & 15];
    }
    DEVICE void eight(size_t at, float (&low)[4], float (&high)[4]) const {
        const uint32_t pairs = *reinterpret_cast<const uint32_t*>(codes + at / 2);
        for (int i = 0; i < 4; i++) {
            const int shift = 8 * (i / 2) + (i % 2 == 0 ? 4 : 0);
            low[i] = values[pairs >> shift & 15];
            high[i] = values[pairs >> (16 + shift) & 15];
        }
    }
};

// Rows and columns of a weight whose rows have `width` elements.
struct Part {
    int width, row, column, rows, columns;
};

// A thread has so many units of eight elements, or of one.
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

// Eight elements of a row are of one block, and their codes and numbers are aligned, where all sizes are multiples of eight.
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
        SHARED(float, tables); \
        float* map = tables + 16; \
        for (int i = threadIdx.x; i < 256; i += blockDim.x) map[i] = dynamic_value(i); \
        for (int i = threadIdx.x; i < 16; i += blockDim.x) tables[i] = NF4_VALUES[i]; \
        BARRIER(); \
        dequantise_any(Nf4{codes, absmax, scales, offset, tables, map}, to, Part{width, row, column, rows, columns}); \
    }
DEQUANTISE(f32, float)
DEQUANTISE(bf16, bf16)
