// Arithmetic, comparisons and conversions of PTX.
#pragma once
#include <fenv.h>

#include <limits>
#include <type_traits>

#include "execution.h"

inline float number(uint32_t bits) { return float_of(bits); }
inline double number(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
inline uint32_t bits(float x) { return bits_of(x); }
inline uint64_t bits(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

// Moves, and the parts of a register. The first part is the lower one.
inline uint16_t mov_u16(uint16_t x) { return x; }
inline uint16_t mov_b16(uint16_t x) { return x; }
inline uint32_t mov_u32(uint32_t x) { return x; }
inline uint32_t mov_b32(uint32_t x) { return x; }
inline uint32_t mov_f32(uint32_t x) { return x; }
inline uint64_t mov_u64(uint64_t x) { return x; }
inline uint64_t mov_b64(uint64_t x) { return x; }
inline uint64_t mov_f64(uint64_t x) { return x; }
inline bool mov_pred(int64_t x) { return x != 0; }
template <int AT, int COUNT, class T>
auto part(T whole) {
    static_assert(COUNT == 2, "registers have two parts here");
    using Half = std::conditional_t<sizeof(T) == 8, uint32_t, uint16_t>;
    return Half(whole >> (8 * sizeof(Half) * AT));
}
inline uint32_t whole(uint16_t low, uint16_t high) { return low | uint32_t(high) << 16; }
inline uint64_t whole(uint32_t low, uint32_t high) { return low | uint64_t(high) << 32; }

// Signed and unsigned integers. Overflow wraps.
#define INTEGERS(U, S, N, WIDE_U, WIDE_S) \
    inline U add_u##N(U a, U b) { return U(a + b); } \
    inline U add_s##N(U a, U b) { return U(a + b); } \
    inline U sub_u##N(U a, U b) { return U(a - b); } \
    inline U sub_s##N(U a, U b) { return U(a - b); } \
    inline U mul_lo_u##N(U a, U b) { return U(WIDE_U(a) * b); } \
    inline U mul_lo_s##N(U a, U b) { return U(WIDE_U(a) * b); } \
    inline U mul_hi_u##N(U a, U b) { return U(WIDE_U(a) * b >> N); } \
    inline U mul_hi_s##N(U a, U b) { return U(WIDE_S(S(a)) * S(b) >> N); } \
    inline U mad_lo_u##N(U a, U b, U c) { return U(WIDE_U(a) * b + c); } \
    inline U mad_lo_s##N(U a, U b, U c) { return U(WIDE_U(a) * b + c); } \
    inline U div_u##N(U a, U b) { return b ? U(a / b) : U(~U(0)); } \
    inline U rem_u##N(U a, U b) { return b ? U(a % b) : a; } \
    inline U div_s##N(U a, U b) { return !b ? U(~U(0)) : S(b) == -1 ? U(-a) : U(S(a) / S(b)); } \
    inline U rem_s##N(U a, U b) { return !b ? a : S(b) == -1 ? U(0) : U(S(a) % S(b)); } \
    inline U neg_s##N(U a) { return U(-a); } \
    inline U abs_s##N(U a) { return S(a) < 0 ? U(-a) : a; } \
    inline U min_u##N(U a, U b) { return a < b ? a : b; } \
    inline U max_u##N(U a, U b) { return a > b ? a : b; } \
    inline U min_s##N(U a, U b) { return S(a) < S(b) ? a : b; } \
    inline U max_s##N(U a, U b) { return S(a) > S(b) ? a : b; } \
    inline U and_b##N(U a, U b) { return a & b; } \
    inline U or_b##N(U a, U b) { return a | b; } \
    inline U xor_b##N(U a, U b) { return a ^ b; } \
    inline U not_b##N(U a) { return U(~a); } \
    /* Shifts by as many bits as there are, or more, leave nothing but the sign. */ \
    inline U shl_b##N(U a, uint32_t by) { return by < N ? U(a << by) : U(0); } \
    inline U shr_u##N(U a, uint32_t by) { return by < N ? U(a >> by) : U(0); } \
    inline U shr_b##N(U a, uint32_t by) { return shr_u##N(a, by); } \
    inline U shr_s##N(U a, uint32_t by) { return U(S(a) >> (by < N ? by : N - 1)); } \
    inline U selp_b##N(U a, U b, bool is_first) { return is_first ? a : b; } \
    inline U selp_u##N(U a, U b, bool is_first) { return is_first ? a : b; } \
    inline U selp_s##N(U a, U b, bool is_first) { return is_first ? a : b; } \
    inline bool setp_eq_b##N(U a, U b) { return a == b; } \
    inline bool setp_ne_b##N(U a, U b) { return a != b; } \
    ORDER(U, U, u##N) \
    ORDER(U, S, s##N)
#define ORDER(U, T, name) \
    inline bool setp_eq_##name(U a, U b) { return a == b; } \
    inline bool setp_ne_##name(U a, U b) { return a != b; } \
    inline bool setp_lt_##name(U a, U b) { return T(a) < T(b); } \
    inline bool setp_le_##name(U a, U b) { return T(a) <= T(b); } \
    inline bool setp_gt_##name(U a, U b) { return T(a) > T(b); } \
    inline bool setp_ge_##name(U a, U b) { return T(a) >= T(b); }
INTEGERS(uint16_t, int16_t, 16, uint32_t, int32_t)
INTEGERS(uint32_t, int32_t, 32, uint64_t, int64_t)
using Wide = __int128;
using UnsignedWide = unsigned __int128;
INTEGERS(uint64_t, int64_t, 64, UnsignedWide, Wide)
inline uint32_t mul_wide_u16(uint16_t a, uint16_t b) { return uint32_t(a) * b; }
inline uint32_t mul_wide_s16(uint16_t a, uint16_t b) { return uint32_t(int32_t(int16_t(a)) * int16_t(b)); }
inline uint64_t mul_wide_u32(uint32_t a, uint32_t b) { return uint64_t(a) * b; }
inline uint64_t mul_wide_s32(uint32_t a, uint32_t b) { return uint64_t(int64_t(int32_t(a)) * int32_t(b)); }
inline uint64_t mad_wide_u32(uint32_t a, uint32_t b, uint64_t c) { return uint64_t(a) * b + c; }
inline uint64_t mad_wide_s32(uint32_t a, uint32_t b, uint64_t c) { return mul_wide_s32(a, b) + c; }
inline uint32_t clz_b64(uint64_t a) { return a ? uint32_t(__builtin_clzll(a)) : 64; }
inline uint32_t clz_b32(uint32_t a) { return a ? uint32_t(__builtin_clz(a)) : 32; }
inline bool and_pred(bool a, bool b) { return a && b; }
inline bool or_pred(bool a, bool b) { return a || b; }
inline bool xor_pred(bool a, bool b) { return a != b; }
inline bool not_pred(bool a) { return !a; }

// With the carry of the previous instruction.
inline uint32_t carried(uint32_t& carry, uint64_t sum) {
    carry = uint32_t(sum >> 32 & 1);
    return uint32_t(sum);
}
inline uint32_t add_cc_u32(uint32_t& carry, uint32_t a, uint32_t b) { return carried(carry, uint64_t(a) + b); }
inline uint32_t addc_cc_u32(uint32_t& carry, uint32_t a, uint32_t b) { return carried(carry, uint64_t(a) + b + carry); }
inline uint32_t addc_u32(uint32_t& carry, uint32_t a, uint32_t b) { return a + b + carry; }
inline uint32_t sub_cc_u32(uint32_t& carry, uint32_t a, uint32_t b) { return carried(carry, uint64_t(a) - b); }
inline uint32_t subc_cc_u32(uint32_t& carry, uint32_t a, uint32_t b) { return carried(carry, uint64_t(a) - b - carry); }
inline uint32_t subc_u32(uint32_t& carry, uint32_t a, uint32_t b) { return a - b - carry; }
inline uint32_t mad_lo_cc_u32(uint32_t& carry, uint32_t a, uint32_t b, uint32_t c) { return carried(carry, uint64_t(a * b) + c); }
inline uint32_t madc_lo_cc_u32(uint32_t& carry, uint32_t a, uint32_t b, uint32_t c) { return carried(carry, uint64_t(a * b) + c + carry); }
inline uint32_t madc_hi_cc_u32(uint32_t& carry, uint32_t a, uint32_t b, uint32_t c) { return carried(carry, (uint64_t(a) * b >> 32) + c + carry); }
inline uint32_t madc_hi_u32(uint32_t& carry, uint32_t a, uint32_t b, uint32_t c) { return uint32_t(uint64_t(a) * b >> 32) + c + carry; }

// `length` bits of `a` from bit `from` on. Signed, the bits above repeat the last of them, or the highest bit of `a` if that is passed.
inline uint32_t bfe_u32(uint32_t a, uint32_t from, uint32_t length) {
    from &= 255, length &= 255;
    const uint64_t bits = from < 32 ? uint64_t(a) >> from : 0;
    return uint32_t(length < 32 ? bits & ((uint64_t(1) << length) - 1) : bits);
}
inline uint32_t bfe_s32(uint32_t a, uint32_t from, uint32_t length) {
    from &= 255, length &= 255;
    if (length == 0) return 0;
    const uint32_t last = std::min(from + length - 1, 31u);
    const bool is_negative = a >> last & 1;
    uint32_t bits = bfe_u32(a, from, length);
    for (uint32_t i = 0; i < 32; i++)
        if (i >= length || from + i > 31) bits = (bits & ~(1u << i)) | uint32_t(is_negative) << i;
    return bits;
}
// The upper half of b:a shifted to the left.
inline uint32_t shf_l_wrap_b32(uint32_t a, uint32_t b, uint32_t by) { return uint32_t((uint64_t(b) << 32 | a) << (by & 31) >> 32); }
inline uint32_t shf_r_wrap_b32(uint32_t a, uint32_t b, uint32_t by) { return uint32_t((uint64_t(b) << 32 | a) >> (by & 31)); }

// Inserts the lower `length` bits of `a` into `b`, from bit `from` on.
template <class U>
U inserted(U a, U b, uint32_t from, uint32_t length) {
    constexpr uint32_t BITS = 8 * sizeof(U);
    from &= 255, length &= 255;
    for (uint32_t i = 0; i < length && from + i < BITS; i++) b = U((b & ~(U(1) << (from + i))) | (a >> i & 1) << (from + i));
    return b;
}
inline uint32_t bfi_b32(uint32_t a, uint32_t b, uint32_t from, uint32_t length) { return inserted(a, b, from, length); }
inline uint64_t bfi_b64(uint64_t a, uint64_t b, uint32_t from, uint32_t length) { return inserted(a, b, from, length); }
// Each nibble of `chosen` names one of the eight bytes of a (0 to 3) and b; its upper bit has the sign of that byte repeated.
inline uint32_t prmt_b32(uint32_t a, uint32_t b, uint32_t chosen) {
    const uint64_t both = a | uint64_t(b) << 32;
    uint32_t out = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t nibble = chosen >> (4 * i) & 15;
        uint32_t byte = uint32_t(both >> (8 * (nibble & 7)) & 255);
        if (nibble & 8) byte = byte & 128 ? 255 : 0;
        out |= byte << (8 * i);
    }
    return out;
}

// Rounded in another direction than to nearest.
template <class F, class Operation>
__attribute__((noinline)) F rounded(int direction, Operation operation) {
    const int before = fegetround();
    fesetround(direction);
    volatile F result = operation();
    fesetround(before);
    return result;
}

// Comparisons with NaN are false; those with a `u` are true.
#define FLOATS(U, F, N) \
    inline U add_##N(U a, U b) { return bits(number(a) + number(b)); } \
    inline U add_rn_##N(U a, U b) { return add_##N(a, b); } \
    inline U add_rz_##N(U a, U b) { \
        volatile F x = number(a), y = number(b); \
        return bits(rounded<F>(FE_TOWARDZERO, [&] { return x + y; })); \
    } \
    inline U sub_##N(U a, U b) { return bits(number(a) - number(b)); } \
    inline U sub_rn_##N(U a, U b) { return sub_##N(a, b); } \
    inline U mul_##N(U a, U b) { return bits(number(a) * number(b)); } \
    inline U mul_rn_##N(U a, U b) { return mul_##N(a, b); } \
    inline U fma_rn_##N(U a, U b, U c) { return bits(std::fma(number(a), number(b), number(c))); } \
    /* A product and a sum that became one operation: ab + c, ab - c, c - ab. */ \
    inline U product_plus_##N(U a, U b, U c) { return fma_rn_##N(a, b, c); } \
    inline U product_minus_##N(U a, U b, U c) { return bits(std::fma(number(a), number(b), -number(c))); } \
    inline U minus_product_##N(U a, U b, U c) { return bits(std::fma(-number(a), number(b), number(c))); } \
    inline U fma_rm_##N(U a, U b, U c) { \
        volatile F x = number(a), y = number(b), z = number(c); \
        return bits(rounded<F>(FE_DOWNWARD, [&] { return std::fma(F(x), F(y), F(z)); })); \
    } \
    inline U div_rn_##N(U a, U b) { return bits(number(a) / number(b)); } \
    inline U rcp_rn_##N(U a) { return bits(F(1) / number(a)); } \
    inline U sqrt_rn_##N(U a) { return bits(std::sqrt(number(a))); } \
    inline U neg_##N(U a) { return a ^ U(1) << (8 * sizeof(U) - 1); } \
    inline U abs_##N(U a) { return a & ~(U(1) << (8 * sizeof(U) - 1)); } \
    /* The magnitude of `b` with the sign of `a`. */ \
    inline U copysign_##N(U a, U b) { return (b & ~(U(1) << (8 * sizeof(U) - 1))) | (a & U(1) << (8 * sizeof(U) - 1)); } \
    /* A number goes before NaN. */ \
    inline U min_##N(U a, U b) { return bits(std::fmin(number(a), number(b))); } \
    inline U max_##N(U a, U b) { return bits(std::fmax(number(a), number(b))); } \
    inline U selp_##N(U a, U b, bool is_first) { return is_first ? a : b; } \
    inline bool setp_eq_##N(U a, U b) { return number(a) == number(b); } \
    inline bool setp_ne_##N(U a, U b) { return setp_num_##N(a, b) && number(a) != number(b); } \
    inline bool setp_lt_##N(U a, U b) { return number(a) < number(b); } \
    inline bool setp_le_##N(U a, U b) { return number(a) <= number(b); } \
    inline bool setp_gt_##N(U a, U b) { return number(a) > number(b); } \
    inline bool setp_ge_##N(U a, U b) { return number(a) >= number(b); } \
    inline bool setp_equ_##N(U a, U b) { return !setp_ne_##N(a, b); } \
    inline bool setp_neu_##N(U a, U b) { return !setp_eq_##N(a, b); } \
    inline bool setp_ltu_##N(U a, U b) { return !setp_ge_##N(a, b); } \
    inline bool setp_leu_##N(U a, U b) { return !setp_gt_##N(a, b); } \
    inline bool setp_gtu_##N(U a, U b) { return !setp_le_##N(a, b); } \
    inline bool setp_geu_##N(U a, U b) { return !setp_lt_##N(a, b); }
#define NUMBERS(U, N) \
    inline bool setp_num_##N(U a, U b) { return !std::isnan(number(a)) && !std::isnan(number(b)); } \
    inline bool setp_nan_##N(U a, U b) { return !setp_num_##N(a, b); }
NUMBERS(uint32_t, f32)
NUMBERS(uint64_t, f64)
FLOATS(uint32_t, float, f32)
FLOATS(uint64_t, double, f64)

// Approximations, here as exact as f32 and f64 are. `ftz`: subnormal operands and results are zero.
inline uint32_t flushed(uint32_t x) { return (x & 0x7F800000u) == 0 ? x & 0x80000000u : x; }
inline uint64_t flushed(uint64_t x) { return (x & 0x7FF0000000000000ull) == 0 ? x & 0x8000000000000000ull : x; }
inline uint32_t ex2_approx_ftz_f32(uint32_t a) { return flushed(bits(std::exp2(number(flushed(a))))); }
inline uint32_t ex2_approx_f32(uint32_t a) { return bits(std::exp2(number(a))); }
inline uint32_t lg2_approx_f32(uint32_t a) { return bits(std::log2(number(a))); }
inline uint32_t lg2_approx_ftz_f32(uint32_t a) { return bits(std::log2(number(flushed(a)))); }
inline uint32_t rcp_approx_ftz_f32(uint32_t a) { return flushed(bits(1.0f / number(flushed(a)))); }
// Only the upper half of the operand counts, and the lower half of the result is zero.
inline uint64_t rcp_approx_ftz_f64(uint64_t a) {
    const uint64_t x = bits(1.0 / number(flushed(uint64_t(a >> 32 << 32))));
    return flushed(x) >> 32 << 32;
}
inline uint32_t rsqrt_approx_f32(uint32_t a) { return bits(1.0f / std::sqrt(number(a))); }
inline uint32_t rsqrt_approx_ftz_f32(uint32_t a) { return flushed(bits(1.0f / std::sqrt(number(flushed(a))))); }
inline uint32_t sqrt_approx_f32(uint32_t a) { return bits(std::sqrt(number(a))); }
inline uint32_t div_full_f32(uint32_t a, uint32_t b) { return bits(number(a) / number(b)); }
inline uint32_t tanh_approx_f32(uint32_t a) { return bits(std::tanh(number(a))); }

// cvt between integers: the lower bits of the source, extended by its sign if it has one.
#define CONVERT(to, T, from, F, U) \
    inline U cvt_##to##_##from(uint64_t x) { return U(T(F(x))); }
#define CONVERT_TO(to, T, U) \
    CONVERT(to, T, u8, uint8_t, U) \
    CONVERT(to, T, s8, int8_t, U) \
    CONVERT(to, T, u16, uint16_t, U) \
    CONVERT(to, T, s16, int16_t, U) \
    CONVERT(to, T, u32, uint32_t, U) \
    CONVERT(to, T, s32, int32_t, U) \
    CONVERT(to, T, u64, uint64_t, U) \
    CONVERT(to, T, s64, int64_t, U)
CONVERT_TO(u8, uint8_t, uint16_t)
CONVERT_TO(s8, int8_t, uint16_t)
CONVERT_TO(u16, uint16_t, uint16_t)
CONVERT_TO(s16, int16_t, uint16_t)
CONVERT_TO(u32, uint32_t, uint32_t)
CONVERT_TO(s32, int32_t, uint32_t)
CONVERT_TO(u64, uint64_t, uint64_t)
CONVERT_TO(s64, int64_t, uint64_t)

// From integers, to nearest.
#define TO_FLOATS(from, F) \
    inline uint32_t cvt_rn_f32_##from(uint64_t x) { return bits(float(F(x))); } \
    inline uint64_t cvt_rn_f64_##from(uint64_t x) { return bits(double(F(x))); }
TO_FLOATS(u8, uint8_t)
TO_FLOATS(s8, int8_t)
TO_FLOATS(u16, uint16_t)
TO_FLOATS(s16, int16_t)
TO_FLOATS(u32, uint32_t)
TO_FLOATS(s32, int32_t)
TO_FLOATS(u64, uint64_t)
TO_FLOATS(s64, int64_t)

// To integers: to nearest with ties to even (rni), to zero, down, up. Values out of range become the nearest value in range. NaN becomes 0
// in up to 32 bits, and only the upper bit in 64.
template <class T>
T fitted(double x) {
    using Limits = std::numeric_limits<T>;
    if (std::isnan(x)) return sizeof(T) == 8 ? T(1ull << 63) : T(0);
    if (x <= double(Limits::min())) return Limits::min();
    return x >= double(Limits::max()) ? Limits::max() : T(x);
}
#define TO_INTEGERS(how, function) \
    inline uint32_t cvt_##how##_f32_f32(uint32_t x) { return bits(float(function(number(x)))); } \
    inline uint64_t cvt_##how##_f64_f64(uint64_t x) { return bits(double(function(number(x)))); } \
    TO_INTEGER(how, function, u8, uint8_t, uint16_t) \
    TO_INTEGER(how, function, s8, int8_t, uint16_t) \
    TO_INTEGER(how, function, u16, uint16_t, uint16_t) \
    TO_INTEGER(how, function, s16, int16_t, uint16_t) \
    TO_INTEGER(how, function, u32, uint32_t, uint32_t) \
    TO_INTEGER(how, function, s32, int32_t, uint32_t) \
    TO_INTEGER(how, function, u64, uint64_t, uint64_t) \
    TO_INTEGER(how, function, s64, int64_t, uint64_t)
#define TO_INTEGER(how, function, to, T, U) \
    inline U cvt_##how##_##to##_f32(uint32_t x) { return U(fitted<T>(double(function(number(x))))); } \
    inline U cvt_##how##_##to##_f64(uint64_t x) { return U(fitted<T>(double(function(number(x))))); }
TO_INTEGERS(rni, std::nearbyint)
TO_INTEGERS(rzi, std::trunc)
TO_INTEGERS(rmi, std::floor)
TO_INTEGERS(rpi, std::ceil)

inline uint64_t cvt_f64_f32(uint32_t x) { return bits(double(number(x))); }
inline uint32_t cvt_rn_f32_f64(uint64_t x) { return bits(float(number(x))); }
// Clamps to [0, 1]; NaN becomes 0.
inline uint32_t cvt_sat_f32_f32(uint32_t x) { return number(x) > 0 ? bits(std::min(number(x), 1.0f)) : 0; }
// The first operand is the upper half. NaN has one pattern.
inline uint32_t cvt_rn_bf16x2_f32(uint32_t high, uint32_t low) {
    auto narrow = [](uint32_t x) { return std::isnan(number(x)) ? 0x7FFFu : (x + 0x7FFFu + (x >> 16 & 1)) >> 16; };
    return narrow(high) << 16 | narrow(low);
}
