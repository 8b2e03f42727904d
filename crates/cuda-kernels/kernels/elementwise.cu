// Operations on each element by itself, with the names and arguments that candle's `cuda_backend` launches them with.
#include "elements.h"

// to[i] = f(from[i])
template <class T, class F>
DEVICE void unary(size_t count, size_t dims, const size_t* layout, const T* from, T* to, F f) {
    each_element(count, [=](size_t i) { assign(to[i], f(wide(from[place(i, dims, layout)]))); });
}

// to[i] = f(left[i], right[i])
template <class T, class R, class F>
DEVICE void binary(size_t count, size_t dims, const size_t* layout, const T* left, const T* right, R* to, F f) {
    each_element(count, [=](size_t i) {
        const Places<2> at(i, dims, layout);
        assign(to[i], f(wide(left[at.of[0]]), wide(right[at.of[1]])));
    });
}

// A function of f32 and one of f64 under one name.
#define FUNCTION(name, of_f32, of_f64) \
    DEVICE float name(float x) { return of_f32(x); } \
    DEVICE double name(double x) { return of_f64(x); }
FUNCTION(exp_of, expf, exp)
FUNCTION(log_of, logf, log)
FUNCTION(sin_of, sinf, sin)
FUNCTION(cos_of, cosf, cos)
FUNCTION(tanh_of, tanhf, tanh)
FUNCTION(erf_of, erff, erf)
FUNCTION(ceil_of, ceilf, ceil)
FUNCTION(floor_of, floorf, floor)
FUNCTION(round_of, roundf, round)
FUNCTION(abs_of, fabsf, fabs)
FUNCTION(sqrt_of, sqrtf, sqrt)
DEVICE float power(float x, float exponent) { return powf(x, exponent); }
DEVICE double power(double x, double exponent) { return pow(x, exponent); }

template <class W>
DEVICE W sigmoid(W x) {
    return 1 / (1 + exp_of(-x));
}
template <class W>
DEVICE W gelu_by_tanh(W x) {
    return W(0.5) * x * (1 + tanh_of(W(0.79788456080286536) * x * (1 + W(0.044715) * x * x)));
}
template <class W>
DEVICE W gelu_by_erf(W x) {
    return W(0.5) * x * (1 + erf_of(x * W(0.70710678118654752)));
}
template <class W>
DEVICE W elu(W x, W alpha) {
    return x > 0 ? x : alpha * (exp_of(x) - 1);
}

// A division of integers by zero ends a process of the host, and is undefined on a card. Here it gives zero.
DEVICE float quotient(float x, float y) { return x / y; }
DEVICE double quotient(double x, double y) { return x / y; }
DEVICE uint32_t quotient(uint32_t x, uint32_t y) { return y == 0 ? 0 : x / y; }
DEVICE int64_t quotient(int64_t x, int64_t y) { return y == 0 ? 0 : x / y; }

#define UNARY_OF(name, suffix, T, ...) \
    KERNEL(1024, name##_##suffix, size_t count, size_t dims, const size_t* layout, const T* from, T* to) { \
        unary(count, dims, layout, from, to, [](Wide<T> x) { return __VA_ARGS__; }); \
    }
#define UNARY(name, ...) \
    UNARY_OF(name, f32, float, __VA_ARGS__) UNARY_OF(name, f64, double, __VA_ARGS__) UNARY_OF(name, bf16, bf16, __VA_ARGS__)
UNARY(uneg, -x)
UNARY(urecip, 1 / x)
UNARY(uexp, exp_of(x))
UNARY(ulog, log_of(x))
UNARY(usin, sin_of(x))
UNARY(ucos, cos_of(x))
UNARY(utanh, tanh_of(x))
UNARY(uerf, erf_of(x))
UNARY(uceil, ceil_of(x))
UNARY(ufloor, floor_of(x))
UNARY(uround, round_of(x))
UNARY(usign, (x > 0) - (x < 0))
UNARY(uabs, abs_of(x))
UNARY(usqr, x * x)
UNARY(usqrt, sqrt_of(x))
UNARY(ugelu, gelu_by_tanh(x))
UNARY(ugelu_erf, gelu_by_erf(x))
// For NaN the result is zero, as on candle's CPU.
UNARY(urelu, x > 0 ? x : 0)
UNARY(usilu, x * sigmoid(x))
UNARY(usigmoid, sigmoid(x))

#define WITH_PARAMETER(suffix, T) \
    KERNEL(1024, upowf_##suffix, size_t count, size_t dims, const size_t* layout, T exponent, const T* from, T* to) { \
        unary(count, dims, layout, from, to, [=](Wide<T> x) { return power(x, wide(exponent)); }); \
    } \
    KERNEL(1024, uelu_##suffix, size_t count, size_t dims, const size_t* layout, T alpha, const T* from, T* to) { \
        unary(count, dims, layout, from, to, [=](Wide<T> x) { return elu(x, wide(alpha)); }); \
    }
EACH_FLOATING(WITH_PARAMETER)

#define AFFINE(suffix, T) \
    KERNEL(1024, affine_##suffix, size_t count, size_t dims, const size_t* layout, const T* from, T* to, T factor, T term) { \
        unary(count, dims, layout, from, to, [=](Wide<T> x) { return x * wide(factor) + wide(term); }); \
    }
EACH_TYPE(AFFINE)

// One block: two would spill in the divisions of integers.
#define BINARY_OF(name, suffix, T, R, ...) \
    KERNEL_OF_BLOCKS(1024, 1, name##_##suffix, size_t count, size_t dims, const size_t* layout, const T* left, const T* right, R* to) { \
        binary(count, dims, layout, left, right, to, [](Wide<T> x, Wide<T> y) { return __VA_ARGS__; }); \
    }
#define BINARY(name, ...) \
    BINARY_OF(name, f32, float, float, __VA_ARGS__) \
    BINARY_OF(name, f64, double, double, __VA_ARGS__) \
    BINARY_OF(name, bf16, bf16, bf16, __VA_ARGS__) \
    BINARY_OF(name, u8, uint8_t, uint8_t, __VA_ARGS__) \
    BINARY_OF(name, u32, uint32_t, uint32_t, __VA_ARGS__) \
    BINARY_OF(name, i64, int64_t, int64_t, __VA_ARGS__)
BINARY(badd, x + y)
BINARY(bsub, x - y)
BINARY(bmul, x * y)
BINARY(bdiv, quotient(x, y))
// For NaN and a number the result is the left one, as on candle's CPU.
BINARY(bmaximum, x < y ? y : x)
BINARY(bminimum, x > y ? y : x)

#define COMPARISON(name, ...) \
    BINARY_OF(name, f32, float, uint8_t, __VA_ARGS__) \
    BINARY_OF(name, f64, double, uint8_t, __VA_ARGS__) \
    BINARY_OF(name, bf16, bf16, uint8_t, __VA_ARGS__) \
    BINARY_OF(name, u8, uint8_t, uint8_t, __VA_ARGS__) \
    BINARY_OF(name, u32, uint32_t, uint8_t, __VA_ARGS__) \
    BINARY_OF(name, i64, int64_t, uint8_t, __VA_ARGS__)
COMPARISON(eq, x == y)
COMPARISON(ne, x != y)
COMPARISON(lt, x < y)
COMPARISON(le, x <= y)
COMPARISON(gt, x > y)
COMPARISON(ge, x >= y)

// The limits of an integer type: the least value, and the first value after the greatest.
template <class T>
struct Integers;
template <>
struct Integers<uint8_t> {
    static constexpr double LEAST = 0, END = 256;
};
template <>
struct Integers<uint32_t> {
    static constexpr double LEAST = 0, END = 4294967296;
};
template <>
struct Integers<int64_t> {
    static constexpr double LEAST = -9223372036854775808.0, END = 9223372036854775808.0;
};

// A number without its fraction, or the nearest integer of the type; zero for NaN. Rust converts like this.
template <class T, class W>
DEVICE T integer(W x) {
    if (x >= W(Integers<T>::END)) return T(uint64_t(Integers<T>::END) - 1);
    return x > W(Integers<T>::LEAST) ? T(x) : x == x ? T(Integers<T>::LEAST) : T(0);
}

template <class T, class W>
DEVICE void convert(T& to, W x) {
    assign(to, x);
}
DEVICE void convert(uint8_t& to, float x) { to = integer<uint8_t>(x); }
DEVICE void convert(uint8_t& to, double x) { to = integer<uint8_t>(x); }
DEVICE void convert(uint32_t& to, float x) { to = integer<uint32_t>(x); }
DEVICE void convert(uint32_t& to, double x) { to = integer<uint32_t>(x); }
DEVICE void convert(int64_t& to, float x) { to = integer<int64_t>(x); }
DEVICE void convert(int64_t& to, double x) { to = integer<int64_t>(x); }

#define CAST(from_suffix, S, to_suffix, T) \
    KERNEL(1024, cast_##from_suffix##_##to_suffix, size_t count, size_t dims, const size_t* layout, const S* from, T* to) { \
        each_element(count, [=](size_t i) { convert(to[i], wide(from[place(i, dims, layout)])); }); \
    }
#define CASTS(suffix, S) \
    CAST(suffix, S, f32, float) \
    CAST(suffix, S, f64, double) \
    CAST(suffix, S, bf16, bf16) \
    CAST(suffix, S, f16, f16) \
    CAST(suffix, S, u8, uint8_t) \
    CAST(suffix, S, u32, uint32_t) \
    CAST(suffix, S, i64, int64_t)
EACH_TYPE(CASTS)
CASTS(f16, f16)

// Copies keep the bits of a NaN. Rows of `copy2d` are `from_stride` elements apart in the source, and `to_stride` in the target.
#define COPIES(suffix, T) \
    KERNEL(1024, ucopy_##suffix, size_t count, size_t dims, const size_t* layout, const T* from, T* to) { \
        each_element(count, [=](size_t i) { to[i] = from[place(i, dims, layout)]; }); \
    } \
    KERNEL(1024, const_set_##suffix, size_t count, size_t dims, const size_t* layout, T value, T* to) { \
        each_element(count, [=](size_t i) { to[place(i, dims, layout)] = value; }); \
    } \
    KERNEL(1024, copy2d_##suffix, const T* from, T* to, uint32_t rows, uint32_t width, uint32_t from_stride, uint32_t to_stride) { \
        each_element(size_t(rows) * width, [=](size_t i) { \
            to[i / width * to_stride + i % width] = from[i / width * from_stride + i % width]; \
        }); \
    }
EACH_TYPE(COPIES)
COPIES(f16, f16)

// to[i] = conditions[i] != 0 ? yes[i] : no[i]
#define WHERE_OF(condition, C, suffix, T) \
    KERNEL(1024, where_##condition##_##suffix, size_t count, size_t dims, const size_t* layout, const C* conditions, const T* yes, \
           const T* no, T* to) { \
        each_element(count, [=](size_t i) { \
            const Places<3> at(i, dims, layout); \
            to[i] = conditions[at.of[0]] != 0 ? yes[at.of[1]] : no[at.of[2]]; \
        }); \
    }
#define WHERE(suffix, T) EACH_ID(WHERE_OF, suffix, T)
EACH_TYPE(WHERE)
