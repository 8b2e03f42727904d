// Code that attention's kernels share: T queries, S keys, H heads of K elements. The score of query i and key j is their product plus
// bias[h][j - i + T - 1]; there is no scale.
#pragma once
#include "device.h"
#include "random.h"

struct AttentionShape {
    // Elements from one sequence to the next, and from one row to the next. A gradient has the layout of its tensor. The result and its
    // gradient are contiguous.
    int64_t q_batch, k_batch, v_batch;
    int q_row, k_row, v_row;
    int queries, keys, heads, head_size;
    int is_causal;
};

// Threads of a block.
constexpr int ATTENTION_THREADS = 128;
// The score of a key that a query does not see.
constexpr float HIDDEN = -1e30f;

// The number of keys that a query sees: they are a prefix.
DEVICE int visible(const AttentionShape& s, int length, int query) {
    const int seen = min(length, s.keys);
    return s.is_causal ? min(seen, max(query + 1 + s.keys - s.queries, 0)) : seen;
}

// The tile of rows that a block works on: tiles of all sequences along x, heads along y. In causal attention heads of all sequences lie
// along x and tiles along y, those with the most work first. Otherwise the last blocks to start would be among the longest, and most of the
// card would wait for them.
enum class Most { Last, First };
struct AttentionBlock {
    int batch, head, first, length;
};
DEVICE AttentionBlock attention_block(const uint32_t* lengths, const AttentionShape& s, int rows, int tile, Most work) {
    int batch, head, at;
    if (s.is_causal) {
        batch = blockIdx.x / unsigned(s.heads);
        head = int(blockIdx.x) - batch * s.heads;
        at = work == Most::Last ? gridDim.y - 1 - blockIdx.y : blockIdx.y;
    } else {
        const unsigned tiles = (rows + tile - 1) / tile;
        batch = blockIdx.x / tiles;
        head = blockIdx.y;
        at = blockIdx.x - batch * tiles;
    }
    return {batch, head, at * tile, int(lengths[batch])};
}

// The sample of a block; without dropout there are no samples. A kernel reads the sample before it begins to copy, because reads after a
// copy wait for the copy.
DEVICE uint32_t block_sample(const Dropout& dropout, const uint32_t* samples, const AttentionBlock& block) {
    return dropout.threshold > 0 ? samples[block.batch] : 0;
}
// The key of the block's dropout.
DEVICE uint64_t block_key(const Dropout& dropout, uint32_t sample) { return dropout.threshold > 0 ? sample_key(dropout, sample) : 0; }
// The hash of the dropout of a query's probabilities.
DEVICE RowHash query_hash(uint64_t key, const AttentionBlock& block, int query) {
    return row_hash(mix(key ^ (uint64_t(block.head + 1) << 32 | uint32_t(query))));
}

// The data of a query that a tile of scores needs.
struct alignas(16) OfQuery {
    float lse, delta;
    RowHash hash;
};
// The data of a query, from its log-sum-exp in the units in which probabilities are computed. A query that sees no key, or that does not
// exist, has probabilities 0.
DEVICE OfQuery of_query(float lse, float delta, bool drops, uint64_t key, const AttentionBlock& block, int query) {
    OfQuery of{lse == -INFINITY ? INFINITY : lse, delta, {0, 0}};
    if (drops) of.hash = query_hash(key, block, query);
    return of;
}
// The data of a query of a sequence and head whose statistics begin at `lse`, which is multiplied by `unit`, and at `delta`.
DEVICE OfQuery of_query(const float* lse, float unit, const float* delta, bool drops, uint64_t key, const AttentionBlock& block, int query, int queries) {
    if (query >= queries) return of_query(-INFINITY, 0, drops, key, block, query);
    return of_query(lse[query] * unit, delta[query], drops, key, block, query);
}

// Element `element` of a tile's bias: the bias of query `first_query + i` and key `first_key + j` is at [j - i + QUERIES - 1].
template <int QUERIES>
DEVICE float near_bias(const float* bias, const AttentionShape& s, int head, int first_query, int first_key, int element) {
    const int offsets = s.queries + s.keys - 1, at = first_key - first_query - QUERIES + s.queries + element;
    return bias && at >= 0 && at < offsets ? bias[size_t(head) * offsets + at] : 0.0f;
}
// The same for this thread's element.
template <int QUERIES, int KEYS>
DEVICE float near_bias(const float* bias, const AttentionShape& s, int head, int first_query, int first_key) {
    static_assert(QUERIES + KEYS - 1 <= ATTENTION_THREADS, "a thread has one element");
    return near_bias<QUERIES>(bias, s, head, first_query, first_key, int(threadIdx.x));
}

// The gradient of the bias by the keys of one block: sums of dS along diagonals. The block goes through tiles of queries in ascending
// order. Its row of partial sums, T + KEYS - 1 long, holds at [j + T - 1 - i] the sum over queries i and the block's keys j (from 0).
//
// As queries go up, the window of offsets that a tile touches goes down. A thread keeps the sum of one offset while the offset is in the
// window.
template <int QUERIES, int KEYS>
struct DiagonalSums {
    static constexpr int RING = QUERIES + KEYS <= 64 ? 64 : 128;
    static_assert(QUERIES + KEYS - 1 <= RING && RING <= ATTENTION_THREADS, "a thread has one offset of a tile");
    static_assert((QUERIES & (QUERIES - 1)) == 0, "queries are counted by their lower bits");
    float* to;
    int length, at;
    float sum;

    // The lowest offset of a tile of queries.
    DEVICE int lowest(int queries, int first_query) { return queries - QUERIES - first_query; }
    DEVICE int own(int low) { return low + ((int(threadIdx.x) - low) & (RING - 1)); }
    DEVICE void keep() {
        if (int(threadIdx.x) < RING && at >= 0 && at < length) to[at] = sum;
    }
    // Offsets of queries before the first tile have no sums.
    DEVICE void begin(float* row, int queries, int first_query) {
        to = row;
        length = queries + KEYS - 1;
        const int low = lowest(queries, first_query);
        at = own(low);
        sum = 0;
        for (int i = max(low + RING, 0) + int(threadIdx.x); i < length; i += ATTENTION_THREADS) to[i] = 0;
    }
    // Moves the window to a tile of queries: writes the sums of offsets that left it, and begins sums for offsets that entered it.
    DEVICE void move_to(int low) {
        const int now = own(low);
        if (now == at) return;
        keep();
        at = now;
        sum = 0;
    }
    // `ds`: (KEYS, QUERIES) in shared memory, rows ROW apart. A thread begins with the query of its offset. If ROW is 1 or 8 more than the
    // length of a row, the threads of a warp read different banks.
    template <int ROW>
    DEVICE void add(const float* ds, int queries, int first_query) {
        const int low = lowest(queries, first_query);
        move_to(low);
        const int offset = at - low - (QUERIES - 1);
        if (int(threadIdx.x) >= RING) return;
        for (int step = 0; step < QUERIES; step++) {
            const int i = (step + offset) & (QUERIES - 1), j = i + offset;
            if (j >= 0 && j < KEYS) sum += ds[j * ROW + i];
        }
    }
    DEVICE void end() { keep(); }
};
