// Weights in codes, in the layout of `t5_ops::Quantised`: signed codes with a scale for each row, and NF4 with doubly quantised scales. The
// parts follow each other without padding, so an f32 among them may lie at any byte.
#pragma once
#include "device.h"

// Reads an f32 at any byte.
DEVICE float number_at(const uint8_t* bytes, size_t place) {
    bytes += 4 * place;
    return float_of(uint32_t(bytes[0]) | uint32_t(bytes[1]) << 8 | uint32_t(bytes[2]) << 16 | uint32_t(bytes[3]) << 24);
}

struct alignas(8) EightCodes {
    uint32_t x[2];
};
// A signed byte for each element, times the scale of its row.
struct Int8 {
    const uint8_t* codes;
    const uint8_t* scales;

    DEVICE float scale(size_t, size_t row) const { return number_at(scales, row); }
    DEVICE float value(size_t at) const { return float(int8_t(codes[at])); }
    DEVICE void eight(size_t at, float (&low)[4], float (&high)[4]) const {
        const EightCodes eight = *together_at<const EightCodes>(codes + at);
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

// The boundary between parts `j - 1` and `j` of [0.1, 1], cut into equal parts, rounded like torch's `linspace`: from the nearer end.
DEVICE float boundary(int j, int parts) {
    const float step = (1.0f - 0.1f) / float(parts);
    return j < (parts + 1) / 2 ? fmaf(step, float(j), 0.1f) : fmaf(-step, float(parts - j), 1.0f);
}

// The value of a code among 256 in ascending order: zero, one, and for each power of ten the middles of 2^i parts with both signs.
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
        const uint32_t pairs = *together_at<const uint32_t>(codes + at / 2);
        for (int i = 0; i < 4; i++) {
            const int shift = 8 * (i / 2) + (i % 2 == 0 ? 4 : 0);
            low[i] = values[pairs >> shift & 15];
            high[i] = values[pairs >> (16 + shift) & 15];
        }
    }
};

// Values of NF4's codes and of the codes of its scales: a block fills this table before any of its threads reads it.
constexpr int NF4_TABLE = 16 + 256;
DEVICE void fill_nf4_table(float* table) {
    for (int i = threadIdx.x; i < 256; i += blockDim.x) table[16 + i] = dynamic_value(i);
    for (int i = threadIdx.x; i < 16; i += blockDim.x) table[i] = NF4_VALUES[i];
    BARRIER();
}
