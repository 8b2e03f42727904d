// Rows by index: the embedding and its gradient, rows that count gathered and written back, the relative-position bias.
#include "device.h"

// to[i] = from[ids[i]]; a block has a row.
template <int N, class S, class T>
DEVICE void gather(const uint32_t* ids, const S* from, T* to, int width) {
    const size_t source = size_t(ids[blockIdx.x]) * width, target = size_t(blockIdx.x) * width;
    float values[N];
    for (int i = threadIdx.x * N; i < width; i += blockDim.x * N) {
        load<N>(from, source + i, values);
        store<N>(to, target + i, values);
    }
}

// to[ids[i]] = from[i]; a block has a row. No index occurs twice.
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

// Four ids at a time.
struct alignas(16) FourIds {
    uint32_t x[4];
};
// Ids that a warp has in shared memory at a time.
constexpr int STAGED = 4 * WARP;

// Sorts `count` rows by id, and rows of the same id in their own order: `order` (2, count) gets the row of each place, then the id of each
// place. A block works on 32 rows, and each lane of every warp on one of them: a warp counts the ids that come before the row's in the
// warp's part of the ids. Shared memory: (STAGED + 32) u32 for each warp.
KERNEL(256, order_by_id, const uint32_t* ids, uint32_t* order, int count) {
    SHARED(uint32_t, shared);
    const int warps = blockDim.x / WARP, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    uint32_t* staged = shared + warp * STAGED;
    uint32_t* counts = shared + warps * STAGED;
    const int first = blockIdx.x * WARP, row = first + lane;
    const uint32_t id = row < count ? ids[row] : 0;
    uint32_t before = 0;
    for (int from = warp * STAGED; from < count; from += warps * STAGED) {
        const int until = min(count - from, STAGED);
        uint32_t loaded[4];
        for (int k = 0; k < 4; k++) loaded[k] = k * WARP + lane < until ? ids[from + k * WARP + lane] : 0;
        for (int k = 0; k < 4; k++) staged[k * WARP + lane] = loaded[k];
        WARP_BARRIER();
        const bool are_earlier = from + STAGED <= first, are_later = from >= first + WARP;
        if (until == STAGED && (are_earlier || are_later)) {
            for (int i = 0; i < STAGED; i += 4) {
                const FourIds four = *together_at<const FourIds>(staged + i);
                for (int k = 0; k < 4; k++) before += are_earlier ? four.x[k] <= id : four.x[k] < id;
            }
        } else {
            for (int i = 0; i < until; i++) before += staged[i] < id || (staged[i] == id && from + i < row);
        }
        WARP_BARRIER();
    }
    counts[threadIdx.x] = before;
    BARRIER();
    if (warp > 0 || row >= count) return;
    uint32_t place = 0;
    for (int i = 0; i < warps; i++) place += counts[i * WARP + lane];
    order[place] = row;
    order[count + place] = id;
}

// sums[id] += rows[row] for the `count` rows and ids of an `order`, see `order_by_id`, in their order. A block adds all rows of the ids
// whose first place is one of its 32, in its columns. Many rows are loaded before the first is added.
template <int N, class T>
DEVICE void scatter_add(const uint32_t* order, const T* rows, float* sums, int count, int width) {
    constexpr int ROWS = 8, ROWS_OF_ONE_ID = sizeof(T) == 2 ? 32 : 16;
    const uint32_t* sorted = order + count;
    const int own = blockIdx.x * WARP + threadIdx.x % WARP, end = min(int(blockIdx.x + 1) * WARP, count);
    const bool begins = own < end && (own == 0 || sorted[own - 1] != sorted[own]);
    uint32_t first = begins ? own : end;
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) first = min(first, shuffle_xor(first, lanes));
    if (int(first) == end) return;
    for (int column = (blockIdx.y * blockDim.x + threadIdx.x) * N; column < width; column += gridDim.y * blockDim.x * N) {
        uint32_t id = sorted[first];
        float sum[N];
        load<N>(sums, size_t(id) * width + column, sum);
        for (int at = first; at < end; at += ROWS) {
            uint32_t ids[ROWS];
            float gradients[ROWS][N], others[ROWS][N];
#pragma unroll
            for (int k = 0; k < ROWS; k++) {
                const int place = min(at + k, end - 1);
                ids[k] = sorted[place];
                load<N>(rows, size_t(order[place]) * width + column, gradients[k]);
                for (int n = 0; n < N; n++) others[k][n] = 0;
                if (ids[k] != (k > 0 ? ids[k - 1] : id)) load<N>(sums, size_t(ids[k]) * width + column, others[k]);
            }
#pragma unroll
            for (int k = 0; k < ROWS; k++) {
                if (at + k >= end) break;
                if (ids[k] != id) {
                    store<N>(sums, size_t(id) * width + column, sum);
                    id = ids[k];
                    for (int n = 0; n < N; n++) sum[n] = others[k][n];
                }
                for (int n = 0; n < N; n++) sum[n] += gradients[k][n];
            }
        }
        // The last id may have further rows.
        for (int at = end; at < count; at += ROWS_OF_ONE_ID) {
            int places[ROWS_OF_ONE_ID], matches = 0;
#pragma unroll
            for (int k = 0; k < ROWS_OF_ONE_ID; k++) matches += at + k < count && sorted[at + k] == id;
            if (matches == 0) break;
            float gradients[ROWS_OF_ONE_ID][N];
            // If there are fewer, one of them is loaded again and not added.
#pragma unroll
            for (int k = 0; k < ROWS_OF_ONE_ID; k++) places[k] = order[at + min(k, matches - 1)];
#pragma unroll
            for (int k = 0; k < ROWS_OF_ONE_ID; k++) load<N>(rows, size_t(places[k]) * width + column, gradients[k]);
#pragma unroll
            for (int k = 0; k < ROWS_OF_ONE_ID; k++)
                if (k < matches)
                    for (int n = 0; n < N; n++) sum[n] += gradients[k][n];
            if (matches < ROWS_OF_ONE_ID) break;
        }
        store<N>(sums, size_t(id) * width + column, sum);
    }
}

#define SCATTER_ADD(suffix, T) \
    KERNEL_OF_BLOCKS(64, 8, scatter_add_##suffix, const uint32_t* order, const T* rows, float* sums, int count, int width) { \
        if (in_fours(width, rows, sums)) scatter_add<4>(order, rows, sums, count, width); \
        else scatter_add<1>(order, rows, sums, count, width); \
    }
SCATTER_ADD(f32, float)
SCATTER_ADD(bf16, bf16)

// bias[h][offset] = table[buckets[offset]][h]; a thread has an element of the bias (heads, offsets).
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

// dtable[bucket][h] += the sum of dbias[h][offset] over the offsets of the bucket, in their order; a thread has an element of the table.
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
