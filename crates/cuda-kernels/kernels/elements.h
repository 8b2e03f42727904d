// Elements of candle's tensors, for the kernels that candle launches by name.
//
// f16, in which publishers store weights, has conversions and copies only. There is no i16, i32 or f8: this project makes no such tensors.
#pragma once
#include "device.h"

// Expands M(suffix, T) for each type of elements.
#define EACH_FLOATING(M) M(f32, float) M(f64, double) M(bf16, bf16)
#define EACH_TYPE(M) EACH_FLOATING(M) M(u8, uint8_t) M(u32, uint32_t) M(i64, int64_t)
// Expands M(id, I, suffix, T) for each type of indices.
#define EACH_ID(M, suffix, T) M(u8, uint8_t, suffix, T) M(u32, uint32_t, suffix, T) M(i64, int64_t, suffix, T)

// An IEEE half: 1 + 5 + 10 bits.
struct f16 {
    uint16_t bits;
};
DEVICE float to_float(f16 x) {
    const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, magnitude = x.bits & 0x7FFFu;
    if (magnitude >= 0x7C00u) return float_of(sign | 0x7F800000u | (magnitude & 0x3FFu) << 13);
    // As an f32 of the same exponent bits it is 2^112 times too small; so are subnormals.
    return float_of(sign | bits_of(float_of(magnitude << 13) * float_of(0x77800000u)));
}
// Rounds to nearest, ties to even.
DEVICE void from_float(f16& to, float x) {
    const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
    uint32_t half;
    if (magnitude > 0x7F800000u) half = 0x7E00u | (magnitude >> 13 & 0x3FFu);
    else if (magnitude >= 0x47800000u) half = 0x7C00u; // 65536
    else if (magnitude >= 0x38800000u) half = (magnitude + 0xFFFu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13;
    // Below 2^-14 the sum with 0.5 has the ten bits at its end, rounded.
    else half = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
    to.bits = uint16_t(sign | half);
}

// The type in which an element is computed. A u8 is cut to its eight bits when it is stored.
template <class T>
struct Computed {
    using Type = T;
};
template <>
struct Computed<bf16> {
    using Type = float;
};
template <>
struct Computed<uint8_t> {
    using Type = uint32_t;
};
template <class T>
using Wide = typename Computed<T>::Type;

template <class T>
DEVICE Wide<T> wide(T x) {
    return x;
}
DEVICE float wide(bf16 x) { return to_float(x); }
DEVICE float wide(f16 x) { return to_float(x); }

template <class T, class W>
DEVICE void assign(T& to, W x) {
    to = T(x);
}
template <class W>
DEVICE void assign(bf16& to, W x) {
    from_float(to, float(x));
}
template <class W>
DEVICE void assign(f16& to, W x) {
    from_float(to, float(x));
}

// The place of element `i` in each of N tensors of the same sizes. `layout` has `dims` sizes, then as many strides for each tensor.
// Null stands for contiguous tensors.
template <int N>
struct Places {
    size_t of[N];

    DEVICE Places(size_t i, size_t dims, const size_t* layout) {
        for (int k = 0; k < N; k++) of[k] = layout ? 0 : i;
        if (!layout) return;
        // Divisions of 64 bits compile to long code. Unrolled, this loop and the one of `each_element` take a driver three times as long to
        // load.
#pragma unroll 1
        for (size_t d = dims; d-- > 0;) {
            for (int k = 0; k < N; k++) of[k] += i % layout[d] * layout[(k + 1) * dims + d];
            i /= layout[d];
        }
    }
};
DEVICE size_t place(size_t i, size_t dims, const size_t* layout) { return Places<1>(i, dims, layout).of[0]; }

// Calls f(i) for each of `count` elements, by all threads of the grid.
template <class F>
DEVICE void each_element(size_t count, F f) {
#pragma unroll 1
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) f(i);
}
