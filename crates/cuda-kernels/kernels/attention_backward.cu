// The backward of attention of bf16 on tensor cores: probabilities are computed again, from scores and their log-sum-exp. Blocks of keys
// compute the gradients of keys, values and bias, and blocks of queries the gradients of queries. Each gradient is added by one block, in
// one order.
#include "attention_tiles.h"

namespace attention_backward {

// Rows of a block, and of a tile.
constexpr int ROWS = 64, TILE = 32, N = TILE / 8;
// Tiles of queries whose data are read together: each thread then reads the data of one query, and no warp waits for another.
constexpr int TOGETHER = ATTENTION_THREADS / TILE, MANY = TOGETHER * TILE;
// Biases of these queries and the keys of a block.
constexpr int BIASES = ROWS + MANY;

// The first query that sees a key.
DEVICE int first_query(const AttentionShape& s, const AttentionBlock& block, int key) {
    return key >= min(block.length, s.keys) ? s.queries : s.is_causal ? key + s.queries - s.keys : 0;
}

// The offset of a query's statistics.
DEVICE size_t statistics(const AttentionShape& s, const AttentionBlock& block) {
    return (size_t(block.batch) * s.heads + block.head) * s.queries;
}

// dk, dv, and if `partial` is not null the bias's gradient: a row of T + ROWS - 1 partial sums for each block, by sequence, head, tile.
// A warp has 16 keys and the scores of TILE queries, transposed.
// Shared memory: 2 * ROWS + 4 * TILE rows of K bf16; numbers of 4 bytes: 8 * MANY + 2 * BIASES + 512.
template <int K>
DEVICE void keys(const bf16* q, const bf16* k, const bf16* v, const bf16* dout, const float* bias, const float* lse, const float* delta,
                 const uint32_t* lengths, const Dropout& dropout, const uint32_t* samples, bf16* dk, bf16* dv, float* partial,
                 const AttentionShape& s) {
    const AttentionBlock block = attention_block(lengths, s, s.keys, ROWS, Most::First);
    // For the largest heads no register is left.
    const unsigned thread = K > 64 ? threadIdx.x : held_thread();
    const int warp = thread / WARP, lane = thread % WARP, g = lane / 4, t = lane % 4, width = s.heads * K;
    SHARED(bf16, shared);
    bf16* tile_k = shared;
    bf16* tile_v = tile_k + ROWS * K;
    bf16* tiles_q = tile_v + ROWS * K;
    bf16* tiles_dout = tiles_q + 2 * TILE * K;
    OfQuery* tiles_query = reinterpret_cast<OfQuery*>(tiles_dout + 2 * TILE * K);
    float* biases = reinterpret_cast<float*>(tiles_query + 2 * MANY);
    float* ring = biases + 2 * BIASES;

    q += size_t(block.batch) * s.q_batch + block.head * K;
    k += size_t(block.batch) * s.k_batch + block.head * K;
    v += size_t(block.batch) * s.v_batch + block.head * K;
    dk += size_t(block.batch) * s.k_batch + block.head * K;
    dv += size_t(block.batch) * s.v_batch + block.head * K;
    dout += size_t(block.batch) * s.queries * width + block.head * K;
    lse += statistics(s, block);
    delta += statistics(s, block);
    // Queries before the first that sees the block's first key see none of the block's keys.
    const int begin = s.is_causal ? max(block.first + s.queries - s.keys, 0) / TILE : 0;
    const int end = block.first < min(block.length, s.keys) ? (s.queries + TILE - 1) / TILE : begin;
    auto copy = [&](int tile) {
        const int stage = tile & 1;
        copy_tile<K, TILE>(tiles_q + stage * TILE * K, q, s.q_row, tile * TILE, s.queries, thread);
        copy_tile<K, TILE>(tiles_dout + stage * TILE * K, dout, width, tile * TILE, s.queries, thread);
    };
    const uint32_t sample = block_sample(dropout, samples, block);
    // Copied before it is known whether a query sees the block's keys. Rows after the last query are zeros.
    copy_tile<K, ROWS>(tile_k, k, s.k_row, block.first, s.keys, thread);
    copy_tile<K, ROWS>(tile_v, v, s.v_row, block.first, s.keys, thread);
    copy(begin);
    end_copies();

    const int row = warp * 16 + g, key = block.first + row; // and 8 further
    const int seen_from[2] = {first_query(s, block, key), first_query(s, block, key + 8)};
    // From here on every query sees all keys of the warp.
    const int all_from = first_query(s, block, block.first + warp * 16 + 15);
    const bool drops = dropout.threshold > 0;
    const uint64_t key_of_block = block_key(dropout, sample);
    // Each thread has data of the next tiles: of one query, and one or two biases.
    static_assert(BIASES <= 2 * ATTENTION_THREADS, "a thread has two biases");
    float lse_read = -INFINITY, delta_read = 0, near_read[2] = {0, 0};
    auto read = [&](int tile) {
        const int first = tile / TOGETHER * MANY, query = first + int(thread);
        lse_read = -INFINITY, delta_read = 0;
        if (query < s.queries) lse_read = lse[query], delta_read = delta[query];
#pragma unroll
        for (int i = 0; i < 2; i++) near_read[i] = near_bias<MANY>(bias, s, block.head, first, block.first, int(thread) + i * ATTENTION_THREADS);
    };
    auto write = [&](int tile) {
        const int stage = tile / TOGETHER & 1, query = tile / TOGETHER * MANY + int(thread);
        tiles_query[stage * MANY + thread] = of_query(lse_read * LOG2_E, delta_read, drops, key_of_block, block, query);
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (int(thread) + i * ATTENTION_THREADS < BIASES) biases[stage * BIASES + thread + i * ATTENTION_THREADS] = LOG2_E * near_read[i];
    };
    if (begin < end) read(begin), write(begin);
    ProductDiagonals diagonals;
    if (partial) {
        const int tiles = (s.keys + ROWS - 1) / ROWS, tile = block.first / ROWS;
        float* sums = partial + ((size_t(block.batch) * s.heads + block.head) * tiles + tile) * (s.queries + ROWS - 1);
        diagonals.begin(thread, ring, sums, s.queries, begin, begin >= end);
    }
    float of_k[K / 8][4], of_v[K / 8][4];
#pragma unroll
    for (int n = 0; n < K / 8; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) of_k[n][c] = of_v[n][c] = 0;

    LeftRows<K, K == 32> own_k{tile_k, warp * 16, thread, {}};
    LeftRows<K, K == 32> own_v{tile_v, warp * 16, thread, {}};
    for (int tile = begin; tile < end; tile++) {
        const int stage = tile & 1, first = tile * TILE;
        wait_for_copies<0>();
        BARRIER();
        if (tile == begin) own_k.keep(), own_v.keep();
        else if (partial) diagonals.write(tile - 1);
        const bool reads = tile + 1 < end && (tile + 1) % TOGETHER == 0;
        if (tile + 1 < end) {
            copy(tile + 1);
            end_copies();
        }
        // In flight while this tile is computed.
        if (reads) read(tile + 1);
        const bf16* tile_q = tiles_q + stage * TILE * K;
        const bf16* tile_dout = tiles_dout + stage * TILE * K;
        const int many = tile / TOGETHER & 1, within = tile % TOGETHER * TILE;
        const float* near = biases + many * BIASES + row - 2 * t + MANY - 1 - within;
        const OfQuery* queries = tiles_query + many * MANY + within + 2 * t;
        float p[N][4], ds[N][4];
        multiply_rows<K, N>(p, own_k, tile_q);
        if (reads) write(tile + 1);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                p[n][c] = exp2_fast(p[n][c] * LOG2_E + (near[c / 2 * 8 - n * 8 - c % 2] - queries[n * 8 + c % 2].lse));
        // Overlaps with the exponentials.
        multiply_rows<K, N>(ds, own_v, tile_dout);
        if (first < all_from) {
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int c = 0; c < 4; c++)
                    if (first + n * 8 + 2 * t + c % 2 < seen_from[c / 2]) p[n][c] = 0;
        }
        if (drops) {
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const OfQuery& of = queries[n * 8 + c];
                    const Pair kept = pair_kept(dropout, of.hash, key);
                    const float factors[2] = {factor(dropout, kept.first), factor(dropout, kept.second)};
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        float& probability = p[n][c + 2 * r];
                        float& gradient = ds[n][c + 2 * r];
                        gradient = probability * (gradient * factors[r] - of.delta);
                        probability *= factors[r];
                    }
                }
        } else {
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int c = 0; c < 4; c++) ds[n][c] = p[n][c] * (ds[n][c] - queries[n * 8 + c % 2].delta);
        }
        add_products<K, N>(of_v, p, tile_dout, thread);
        add_products<K, N>(of_k, ds, tile_q, thread);
        if (partial) diagonals.add(ds, tile);
    }
    if (partial && begin < end) diagonals.finish(end);
    const float whole[2] = {1.0f, 1.0f};
    store_rows<K>(dk, s.k_row, block.first + warp * 16, s.keys, of_k, whole);
    store_rows<K>(dv, s.v_row, block.first + warp * 16, s.keys, of_v, whole);
}

// dq. A warp has 16 queries and their scores of TILE keys.
// Shared memory: 2 * ROWS + 4 * TILE rows of K bf16, 2 * (ROWS + TILE) f32.
template <int K>
DEVICE void queries(const bf16* q, const bf16* k, const bf16* v, const bf16* dout, const float* bias, const float* lse, const float* delta,
                    const uint32_t* lengths, const Dropout& dropout, const uint32_t* samples, bf16* dq, const AttentionShape& s) {
    const AttentionBlock block = attention_block(lengths, s, s.queries, ROWS, Most::Last);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4, width = s.heads * K;
    SHARED(bf16, shared);
    bf16* tile_q = shared;
    bf16* tile_dout = tile_q + ROWS * K;
    bf16* tiles_k = tile_dout + ROWS * K;
    bf16* tiles_v = tiles_k + 2 * TILE * K;
    float* biases = reinterpret_cast<float*>(tiles_v + 2 * TILE * K);

    q += size_t(block.batch) * s.q_batch + block.head * K;
    k += size_t(block.batch) * s.k_batch + block.head * K;
    v += size_t(block.batch) * s.v_batch + block.head * K;
    dout += size_t(block.batch) * s.queries * width + block.head * K;
    lse += statistics(s, block);
    delta += statistics(s, block);
    const uint32_t sample = block_sample(dropout, samples, block);
    const int row = warp * 16 + g; // and row + 8
    OfQuery own[2];
#pragma unroll
    for (int r = 0; r < 2; r++) own[r] = of_query(lse, LOG2_E, delta, false, 0, block, block.first + row + 8 * r, s.queries);
    auto copy = [&](int tile) {
        const int stage = tile & 1;
        copy_tile<K, TILE>(tiles_k + stage * TILE * K, k, s.k_row, tile * TILE, s.keys);
        copy_tile<K, TILE>(tiles_v + stage * TILE * K, v, s.v_row, tile * TILE, s.keys);
    };
    copy_tile<K, ROWS>(tile_q, q, s.q_row, block.first, s.queries);
    copy_tile<K, ROWS>(tile_dout, dout, width, block.first, s.queries);
    copy(0);
    end_copies();
    const int seen = visible(s, block.length, block.first + ROWS - 1), tiles = (seen + TILE - 1) / TILE;

    const bool drops = dropout.threshold > 0;
    const uint64_t key_of_block = block_key(dropout, sample);
    int see[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int query = block.first + row + 8 * r;
        see[r] = visible(s, block.length, query);
        if (drops) own[r].hash = query_hash(key_of_block, block, query);
    }
    // All queries of the warp see at least the keys of its first query.
    const int all_see = visible(s, block.length, block.first + warp * 16);
    if (int(threadIdx.x) < ROWS + TILE) biases[threadIdx.x] = LOG2_E * near_bias<ROWS, TILE>(bias, s, block.head, block.first, 0);
    float of_q[K / 8][4];
#pragma unroll
    for (int n = 0; n < K / 8; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) of_q[n][c] = 0;

    const LeftRows<K, false> own_q{tile_q, warp * 16, threadIdx.x, {}}, own_dout{tile_dout, warp * 16, threadIdx.x, {}};
    for (int tile = 0; tile < tiles; tile++) {
        const int stage = tile & 1, first = tile * TILE;
        wait_for_copies<0>();
        BARRIER();
        if (tile + 1 < tiles) {
            copy(tile + 1);
            end_copies();
        }
        // In flight while this tile is computed.
        const float next_bias = near_bias<ROWS, TILE>(bias, s, block.head, block.first, first + TILE);
        const bf16* tile_k = tiles_k + stage * TILE * K;
        const float* near = biases + stage * (ROWS + TILE) + 2 * t - row + ROWS - 1;
        float p[N][4], ds[N][4];
        multiply_rows<K, N>(p, own_q, tile_k);
        if (int(threadIdx.x) < ROWS + TILE) biases[(stage ^ 1) * (ROWS + TILE) + threadIdx.x] = LOG2_E * next_bias;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int c = 0; c < 4; c++) p[n][c] = exp2_fast(p[n][c] * LOG2_E + (near[n * 8 + c % 2 - c / 2 * 8] - own[c / 2].lse));
        if (first + TILE > all_see) {
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int c = 0; c < 4; c++)
                    if (first + n * 8 + 2 * t + c % 2 >= see[c / 2]) p[n][c] = 0;
        }
        multiply_rows<K, N>(ds, own_dout, tiles_v + stage * TILE * K);
        if (drops) {
            const RowHash here[2] = {from_channel(own[0].hash, first + 2 * t), from_channel(own[1].hash, first + 2 * t)};
#pragma unroll
            for (int n = 0; n < N; n += 2)
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    const Pair kept = pair_kept(dropout, here[c / 2], n * 8 + c % 2);
                    ds[n][c] *= factor(dropout, kept.first);
                    ds[n + 1][c] *= factor(dropout, kept.second);
                }
        }
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int c = 0; c < 4; c++) ds[n][c] = p[n][c] * (ds[n][c] - own[c / 2].delta);
        add_products<K, N>(of_q, ds, tile_k);
    }
    const float whole[2] = {1.0f, 1.0f};
    dq += size_t(block.batch) * s.q_batch + block.head * K;
    store_rows<K>(dq, s.q_row, block.first + warp * 16, s.queries, of_q, whole);
}

} // namespace attention_backward

// Blocks at once of the kernel by keys (OF_KEYS) and of the kernel by queries (OF_QUERIES).
#define ATTENTION_BACKWARD(K, OF_KEYS, OF_QUERIES) \
    KERNEL_OF_BLOCKS(ATTENTION_THREADS, OF_KEYS, attention_backward_keys_##K, const bf16* q, const bf16* k, const bf16* v, const bf16* dout, const float* bias, \
           const float* lse, const float* delta, const uint32_t* lengths, Dropout dropout, const uint32_t* samples, bf16* dk, bf16* dv, \
           float* partial, AttentionShape s) { \
        attention_backward::keys<K>(q, k, v, dout, bias, lse, delta, lengths, dropout, samples, dk, dv, partial, s); \
    } \
    KERNEL_OF_BLOCKS(ATTENTION_THREADS, OF_QUERIES, attention_backward_queries_##K, const bf16* q, const bf16* k, const bf16* v, const bf16* dout, const float* bias, \
           const float* lse, const float* delta, const uint32_t* lengths, Dropout dropout, const uint32_t* samples, bf16* dq, AttentionShape s) { \
        attention_backward::queries<K>(q, k, v, dout, bias, lse, delta, lengths, dropout, samples, dq, s); \
    }
ATTENTION_BACKWARD(32, 3, 4)
ATTENTION_BACKWARD(64, 3, 4)
ATTENTION_BACKWARD(128, 0, 0)
