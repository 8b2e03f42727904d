// Rows by number: the embedding and its gradient, rows that count gathered and put back, the relative-position bias.
#include "device.h"

// to[i] = from[ids[i]]; a block a row.
template <int N, class S, class T>
DEVICE void gather(const uint32_t* ids, const S* from, T* to, int width) {
    const size_t source = size_t(ids[blockIdx.x]) * width, target = size_t(blockIdx.x) * width;
    float values[N];
    for (int i = threadIdx.x * N; i < width; i += blockDim.x * N) {
        load<N>(from, source + i, values);
        store<N>(to, target + i, values);
    }
}

// to[ids[i]] = from[i]; a block a row. No number is there twice.
template <int N, class T>
DEVICE void scatter(const uint32_t* ids, const T* from, T* to, int width) {
    const size_t source = size_t(blockIdx.x) * width, target = size_t(ids[blockIdx.x]) * width;
    float values[N];
    for (int i = threadIdx.x * N; i < width; i += blockDim.x * N) {
        load<N>(from, source + i, values);
        store<N>(to, target + i, values);
    }
}

#define GATHER(suffix, S, T) \
    KERNEL(256, gather_##suffix, const uint32_t* ids, const S* from, T* to, int width) { \
        if (in_fours(width, from, to)) gather<4>(ids, from, to, width); \
        else gather<1>(ids, from, to, width); \
    }
GATHER(f32_f32, float, float)
GATHER(f32_bf16, float, bf16)
GATHER(bf16_f32, bf16, float)
GATHER(bf16_bf16, bf16, bf16)

#define SCATTER(suffix, T) \
    KERNEL(256, scatter_##suffix, const uint32_t* ids, const T* from, T* to, int width) { \
        if (in_fours(width, from, to)) scatter<4>(ids, from, to, width); \
        else scatter<1>(ids, from, to, width); \
    }
SCATTER(f32, float)
SCATTER(bf16, bf16)

// sums[ids[i]] += rows[i] for all `count` rows. The block of the first row with an id adds all of them, in their order; the others end.
// Shared memory: a number for each thread.
template <int N, class T>
DEVICE void scatter_add(const uint32_t* ids, const T* rows, float* sums, int count, int width) {
    SHARED(int, found);
    const int first = blockIdx.x;
    const uint32_t id = ids[first];
    int earlier = 0;
    for (int i = threadIdx.x; i < first; i += blockDim.x) earlier |= ids[i] == id;
    found[threadIdx.x] = earlier;
    BARRIER();
    for (int i = 0; i < int(blockDim.x); i++)
        if (found[i]) return;
    float values[N], gradients[N];
    // Rows are looked for as many at a time as there are threads.
    for (int from = first; from < count; from += blockDim.x) {
        BARRIER();
        const int row = from + threadIdx.x;
        found[threadIdx.x] = row < count && ids[row] == id;
        BARRIER();
        for (int i = 0; i < int(blockDim.x); i++) {
            if (!found[i]) continue;
            for (int column = threadIdx.x * N; column < width; column += blockDim.x * N) {
                load<N>(sums, size_t(id) * width + column, values);
                load<N>(rows, size_t(from + i) * width + column, gradients);
                for (int k = 0; k < N; k++) values[k] += gradients[k];
                store<N>(sums, size_t(id) * width + column, values);
            }
        }
    }
}

#define SCATTER_ADD(suffix, T) \
    KERNEL(256, scatter_add_##suffix, const uint32_t* ids, const T* rows, float* sums, int count, int width) { \
        if (in_fours(width, rows, sums)) scatter_add<4>(ids, rows, sums, count, width); \
        else scatter_add<1>(ids, rows, sums, count, width); \
    }
SCATTER_ADD(f32, float)
SCATTER_ADD(bf16, bf16)

// bias[h][offset] = table[buckets[offset]][h]; a thread an element of the bias (heads, offsets).
template <class T>
DEVICE void relative_bias(const T* table, const uint32_t* buckets, float* bias, int heads, int offsets) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < heads * offsets) bias[i] = to_float(table[size_t(buckets[i % offsets]) * heads + i / offsets]);
}
KERNEL(256, relative_bias_f32, const float* table, const uint32_t* buckets, float* bias, int heads, int offsets) {
    relative_bias(table, buckets, bias, heads, offsets);
}
KERNEL(256, relative_bias_bf16, const bf16* table, const uint32_t* buckets, float* bias, int heads, int offsets) {
    relative_bias(table, buckets, bias, heads, offsets);
}

// dtable[bucket][h] += the sum of dbias[h][offset] over the offsets of the bucket, in their order; a thread an element of the table.
KERNEL(256, relative_bias_backward, const float* dbias, const uint32_t* buckets, float* dtable, int count, int heads, int offsets) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count * heads) return;
    const uint32_t bucket = i / heads;
    const int head = i % heads;
    float sum = 0;
    for (int offset = 0; offset < offsets; offset++)
        if (buckets[offset] == bucket) sum += dbias[size_t(head) * offsets + offset];
    dtable[i] += sum;
}
