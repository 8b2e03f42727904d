// The functions that kernels may use. Under nvcc these are CUDA's own; otherwise ../emulation/execution.h replaces the card, so that the
// same source is compiled for the host and tested there.
//
// A kernel's threads are one-dimensional. Warps have 32 lanes. Dynamic shared memory is the only kind.
#pragma once
#include <stdint.h>

#ifdef __CUDACC__
#define DEVICE __device__ __forceinline__
#define KERNEL(threads, name, ...) extern "C" __global__ void __launch_bounds__(threads) name(__VA_ARGS__)
// A kernel of which `blocks` blocks should fit a multiprocessor at once. The compiler then spills only if these blocks leave too few
// registers, not to fit one more block.
#define KERNEL_OF_BLOCKS(threads, blocks, name, ...) extern "C" __global__ void __launch_bounds__(threads, blocks) name(__VA_ARGS__)
#define SHARED(type, name) \
    extern __shared__ __align__(16) unsigned char name##_bytes[]; \
    type* name = reinterpret_cast<type*>(name##_bytes)
#define CONSTANT static __constant__ const
#define CHECK_ALIGNED(address, bytes)
#define BARRIER() __syncthreads()
#define WARP_BARRIER() __syncwarp()

DEVICE float shuffle_xor(float x, int lanes) { return __shfl_xor_sync(0xFFFFFFFFu, x, lanes); }
DEVICE double shuffle_xor(double x, int lanes) { return __shfl_xor_sync(0xFFFFFFFFu, x, lanes); }
DEVICE uint32_t shuffle_xor(uint32_t x, int lanes) { return __shfl_xor_sync(0xFFFFFFFFu, x, lanes); }
DEVICE int64_t shuffle_xor(int64_t x, int lanes) { return __shfl_xor_sync(0xFFFFFFFFu, x, lanes); }
DEVICE float shuffle_from(float x, int lane) { return __shfl_sync(0xFFFFFFFFu, x, lane); }
DEVICE uint32_t shuffle_from(uint32_t x, int lane) { return __shfl_sync(0xFFFFFFFFu, x, lane); }
DEVICE uint32_t bits_of(float x) { return __float_as_uint(x); }
DEVICE float float_of(uint32_t bits) { return __uint_as_float(bits); }
// Rounded separately: otherwise the compiler makes one operation of a product and a sum.
DEVICE float times(float x, float y) { return __fmul_rn(x, y); }
DEVICE float plus(float x, float y) { return __fadd_rn(x, y); }
// 2^x, to two units in the last place.
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#else
#include "execution.h"
#define KERNEL_OF_BLOCKS(threads, blocks, ...) KERNEL(threads, __VA_ARGS__)
#endif

constexpr int WARP = 32;
constexpr float LOG2_E = 1.44269504088896340736f;

// A bf16: the upper half of an f32.
struct bf16 {
    uint16_t bits;
};

DEVICE uint32_t rounded_bits(float x) {
    uint32_t bits = bits_of(x);
    return x != x ? (bits >> 16) | 0x40u : (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
}
// Two f32 as a pair of bf16, the first in the lower half: rounded to nearest, ties to even. NaN stays NaN, with any bits.
DEVICE uint32_t pack(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return rounded_bits(low) | rounded_bits(high) << 16;
#endif
}

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return float_of(uint32_t(x.bits) << 16); }
DEVICE void from_float(float& to, float x) { to = x; }
DEVICE void from_float(bf16& to, float x) { to.bits = uint16_t(pack(x, 0.0f)); }

// Four elements at a time: 16 bytes of f32, 8 of bf16. Also two f32, and eight bf16.
struct alignas(16) Four {
    float x[4];
};
struct alignas(8) Two {
    float x[2];
};
struct alignas(8) FourNarrow {
    uint32_t x[2];
};
struct alignas(16) EightNarrow {
    uint32_t x[4];
};

// Several elements at once. A card ends a program that accesses them at an address that is not a multiple of their bytes.
template <class M, class T>
DEVICE M* together_at(T* elements) {
    CHECK_ALIGNED(elements, sizeof(M));
    return reinterpret_cast<M*>(elements);
}

// Whether contiguous rows of `width` elements can be read four elements at a time: a view may begin at any element.
template <class... T>
DEVICE bool in_fours(int width, const T*... rows) {
    return width % 4 == 0 && ((reinterpret_cast<size_t>(rows) % (4 * sizeof(T)) == 0) && ...);
}

// N elements as they lie in memory. A thread that reads well ahead keeps them in this form: converting them to numbers would wait for them
// at once.
template <int N, class T>
struct InMemory {
    static_assert(N == 1, "only f32 and bf16 are read four at a time");
    using Type = T;
};
template <>
struct InMemory<4, float> {
    using Type = Four;
};
template <>
struct InMemory<4, bf16> {
    using Type = FourNarrow;
};
template <int N, class T>
using Packed = typename InMemory<N, T>::Type;

// Elements `at` to `at + N`. With N = 4 see `in_fours`.
template <int N, class T>
DEVICE Packed<N, T> packed(const T* from, size_t at) {
    return *together_at<const Packed<N, T>>(from + at);
}
template <class T>
DEVICE void unpack(const T& one, float (&x)[1]) {
    x[0] = to_float(one);
}
DEVICE void unpack(const Four& four, float (&x)[4]) {
    for (int i = 0; i < 4; i++) x[i] = four.x[i];
}
DEVICE void unpack(const FourNarrow& four, float (&x)[4]) {
    for (int i = 0; i < 2; i++) {
        x[2 * i] = float_of(four.x[i] << 16);
        x[2 * i + 1] = float_of(four.x[i] & 0xFFFF0000u);
    }
}
DEVICE void repack(const float (&x)[4], FourNarrow& four) {
    for (int i = 0; i < 2; i++) four.x[i] = pack(x[2 * i], x[2 * i + 1]);
}
DEVICE void repack(const float (&x)[4], Four& four) {
    for (int i = 0; i < 4; i++) four.x[i] = x[i];
}
template <class T>
DEVICE void repack(const float (&x)[1], T& one) {
    from_float(one, x[0]);
}
template <int N, class T>
DEVICE void load(const T* from, size_t at, float (&x)[N]) {
    unpack(packed<N>(from, at), x);
}

// Elements `at` to `at + 4` of a row that has `count` more; zeros after the row's end. With N = 4, see `in_fours`, all four exist.
template <int N, class T>
DEVICE void load_four(const T* from, size_t at, int count, float (&x)[4]) {
    if constexpr (N == 4) {
        load<4>(from, at, x);
    } else {
        for (int j = 0; j < 4; j++) x[j] = j < count ? to_float(from[at + j]) : 0.0f;
    }
}
template <int N, class T>
DEVICE void store(T* to, size_t at, const float (&x)[N]) {
    Packed<N, T> elements;
    repack(x, elements);
    *together_at<Packed<N, T>>(to + at) = elements;
}

// The sum over a warp, in every lane.
template <class T>
DEVICE T warp_sum(T x) {
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) x += shuffle_xor(x, lanes);
    return x;
}
DEVICE float warp_max(float x) {
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) {
        float y = shuffle_xor(x, lanes);
        x = y > x ? y : x;
    }
    return x;
}

// The sum over a block, in every thread. `shared` has room for a value for each warp, and is free again afterwards.
template <class T>
DEVICE T block_sum(T x, T* shared) {
    x = warp_sum(x);
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = x;
    BARRIER();
    T sum = 0;
    for (int warp = 0; warp < int(blockDim.x) / WARP; warp++) sum += shared[warp];
    BARRIER();
    return sum;
}
DEVICE float block_max(float x, float* shared) {
    x = warp_max(x);
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = x;
    BARRIER();
    float most = shared[0];
    for (int warp = 1; warp < int(blockDim.x) / WARP; warp++) most = shared[warp] > most ? shared[warp] : most;
    BARRIER();
    return most;
}

// sum + read(0) + read(1) + .. of `parts` numbers, in this order: a column for each lane, in the first warp. All warps of the block read,
// many parts at a time, and read the next parts while the first warp adds. Shared memory: (PARTS_READ, 32) f32 for each warp.
constexpr int PARTS_READ = 16;
template <class Read>
DEVICE float add_in_order(float sum, int parts, float* staged, Read read) {
    const int warps = blockDim.x / WARP, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, at_once = warps * PARTS_READ;
    float values[PARTS_READ];
    const auto read_from = [&](int first) {
#pragma unroll
        for (int k = 0; k < PARTS_READ; k++) values[k] = read(min(first + k * warps + warp, parts - 1));
    };
    if (parts > 0) read_from(0);
    for (int first = 0; first < parts; first += at_once) {
        BARRIER();
#pragma unroll
        for (int k = 0; k < PARTS_READ; k++) staged[(k * warps + warp) * WARP + lane] = values[k];
        BARRIER();
        if (first + at_once < parts) read_from(first + at_once);
        if (warp > 0) continue;
        const int count = min(parts - first, at_once);
#pragma unroll 16
        for (int part = 0; part < count; part++) sum += staged[part * WARP + lane];
    }
    return sum;
}
