// Sums and extremes over dimensions, with the names and arguments that candle's `cuda_backend` launches them with.
//
// Each element of the result reduces `each` elements, which follow each other: `layout` has the reduced dimensions last.
#include "elements.h"

// The threads of a block that work on its result: the first warp, or one thread if the block is smaller. candle's blocks have any power of
// two of threads and no shared memory, and this project spends little time in its reductions.
DEVICE unsigned workers() { return blockDim.x < WARP ? 1 : WARP; }

// In f32 for bf16. The order of additions depends only on `each`.
template <class T>
DEVICE void sum_of_block(size_t each, size_t dims, const size_t* layout, const T* from, T* to) {
    if (threadIdx.x >= workers()) return;
    const size_t first = blockIdx.x * each;
    Wide<T> sum = 0;
    for (size_t i = threadIdx.x; i < each; i += workers()) sum += wide(from[place(first + i, dims, layout)]);
    if (workers() == WARP) sum = warp_sum(sum);
    if (threadIdx.x == 0) assign(to[blockIdx.x], sum);
}

// A thread for each result: candle uses this for up to 32 elements each, and for none.
template <class T>
DEVICE void sum_of_thread(size_t count, size_t each, size_t dims, const size_t* layout, const T* from, T* to) {
    each_element(count, [=](size_t result) {
        Wide<T> sum = 0;
        for (size_t i = 0; i < each; i++) sum += wide(from[place(result * each + i, dims, layout)]);
        assign(to[result], sum);
    });
}

// The greatest or the least element, or its index among the elements of the result. Of equal elements it is the first.
template <bool GREATEST, bool NUMBER, class T, class R>
DEVICE void extreme_of_block(size_t each, size_t dims, const size_t* layout, const T* from, R* to) {
    if (threadIdx.x >= workers()) return;
    const size_t first = blockIdx.x * each;
    // Every thread begins with the first element. A NaN there stays, and a later NaN is skipped, as on candle's CPU.
    Wide<T> best = wide(from[place(first, dims, layout)]);
    uint32_t at = 0;
    for (size_t i = threadIdx.x; i < each; i += workers()) {
        const Wide<T> x = wide(from[place(first + i, dims, layout)]);
        if (GREATEST ? x > best : x < best) best = x, at = uint32_t(i);
    }
    for (int lanes = workers() / 2; lanes > 0; lanes /= 2) {
        const Wide<T> x = shuffle_xor(best, lanes);
        const uint32_t i = shuffle_xor(at, lanes);
        if ((GREATEST ? x > best : x < best) || (x == best && i < at)) best = x, at = i;
    }
    if (threadIdx.x > 0) return;
    if (NUMBER) assign(to[blockIdx.x], at);
    else assign(to[blockIdx.x], best);
}

// One block: two would spill with elements of 64 bits.
#define EXTREME(name, GREATEST, NUMBER, suffix, T, R) \
    KERNEL_OF_BLOCKS(1024, 1, fast_##name##_##suffix, size_t, size_t each, size_t dims, const size_t* layout, const T* from, R* to) { \
        extreme_of_block<GREATEST, NUMBER>(each, dims, layout, from, to); \
    }
#define REDUCE(suffix, T) \
    KERNEL(1024, fast_sum_##suffix, size_t, size_t each, size_t dims, const size_t* layout, const T* from, T* to) { \
        sum_of_block(each, dims, layout, from, to); \
    } \
    KERNEL(1024, fast_sum_small_##suffix, size_t count, size_t each, size_t dims, const size_t* layout, const T* from, T* to) { \
        sum_of_thread(count, each, dims, layout, from, to); \
    } \
    EXTREME(min, false, false, suffix, T, T) \
    EXTREME(max, true, false, suffix, T, T) \
    EXTREME(argmin, false, true, suffix, T, uint32_t) \
    EXTREME(argmax, true, true, suffix, T, uint32_t)
EACH_TYPE(REDUCE)
