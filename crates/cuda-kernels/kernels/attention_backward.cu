// The backward of attention of bf16 on tensor cores: probabilities again, from scores and their log-sum-exp. The gradients of keys,
// values and bias by blocks of keys, those of queries by blocks of queries: each is added by one block, in one order.
#include "attention_tiles.h"

namespace attention_backward {

// Rows of a block, and of a tile that it goes through.
constexpr int ROWS = 64, TILE = 32, N = TILE / 8;

// Where a query's statistics are.
DEVICE size_t statistics(const AttentionShape& s, const AttentionBlock& block) {
    return (size_t(block.batch) * s.heads + block.head) * s.queries;
}
// The log-sum-exp times log2(e). A query that sees no key, or that does not exist, has probabilities 0.
DEVICE float finite_lse(float lse) { return lse == -INFINITY ? INFINITY : lse * LOG2_E; }

// dk, dv, and if `partial` is not null the bias's gradient: a row of T + ROWS - 1 partial sums for each block, by sequence, head, tile.
// A warp has 16 keys and the scores of TILE queries, transposed.
// Shared memory: 2 * ROWS + 4 * TILE rows of K + 8 bf16; f32: ROWS * (TILE + 8) + 2 * (ROWS + TILE + 2 * TILE); 2 * TILE of 8 bytes.
template <int K>
DEVICE void keys(const bf16* q, const bf16* k, const bf16* v, const bf16* dout, const float* bias, const float* lse, const float* delta,
                 const uint32_t* lengths, const Dropout& dropout, const uint32_t* samples, bf16* dk, bf16* dv, float* partial,
                 const AttentionShape& s) {
    constexpr int ROW = TILE_ROW<K>, DS_ROW = TILE + 8;
    const AttentionBlock block = attention_block(lengths, s.keys, ROWS);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4, width = s.heads * K;
    SHARED(bf16, shared);
    bf16* tile_k = shared;
    bf16* tile_v = tile_k + ROWS * ROW;
    bf16* tiles_q = tile_v + ROWS * ROW;
    bf16* tiles_dout = tiles_q + 2 * TILE * ROW;
    uint64_t* tiles_hash = reinterpret_cast<uint64_t*>(tiles_dout + 2 * TILE * ROW);
    float* tiles_lse = reinterpret_cast<float*>(tiles_hash + 2 * TILE);
    float* tiles_delta = tiles_lse + 2 * TILE;
    float* biases = tiles_delta + 2 * TILE;
    float* ds_tile = biases + 2 * (ROWS + TILE);

    q += size_t(block.batch) * s.q_batch + block.head * K;
    k += size_t(block.batch) * s.k_batch + block.head * K;
    v += size_t(block.batch) * s.v_batch + block.head * K;
    dk += size_t(block.batch) * s.k_batch + block.head * K;
    dv += size_t(block.batch) * s.v_batch + block.head * K;
    dout += size_t(block.batch) * s.queries * width + block.head * K;
    lse += statistics(s, block);
    delta += statistics(s, block);
    // Queries before the first that sees the block's first key see none of its keys.
    const int begin = s.is_causal ? max(block.first + s.queries - s.keys, 0) / TILE : 0;
    const int end = block.first < min(block.length, s.keys) ? (s.queries + TILE - 1) / TILE : begin;
    auto copy = [&](int tile) {
        const int stage = tile & 1;
        copy_tile<K, TILE>(tiles_q + stage * TILE * ROW, q, s.q_row, tile * TILE, s.queries);
        copy_tile<K, TILE>(tiles_dout + stage * TILE * ROW, dout, width, tile * TILE, s.queries);
    };
    copy_tile<K, ROWS>(tile_k, k, s.k_row, block.first, s.keys);
    copy_tile<K, ROWS>(tile_v, v, s.v_row, block.first, s.keys);
    if (begin < end) copy(begin);
    end_copies();

    const int row = warp * 16 + g, key = block.first + row; // and 8 further
    // The first query that sees a key.
    int seen_from[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int j = key + 8 * r;
        seen_from[r] = j >= min(block.length, s.keys) ? s.queries : s.is_causal ? j + s.queries - s.keys : 0;
    }
    const bool drops = dropout.threshold > 0;
    DiagonalSums<TILE, ROWS> diagonals;
    if (partial) {
        const int tiles = (s.keys + ROWS - 1) / ROWS, tile = block.first / ROWS;
        float* sums = partial + ((size_t(block.batch) * s.heads + block.head) * tiles + tile) * (s.queries + ROWS - 1);
        diagonals.begin(sums, s.queries, begin < end ? begin * TILE : s.queries + diagonals.RING);
    }
    float of_k[K / 8][4], of_v[K / 8][4];
#pragma unroll
    for (int n = 0; n < K / 8; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) of_k[n][c] = of_v[n][c] = 0;

    LeftRows<K, (K <= 64)> own_k{tile_k, warp * 16, {}};
    LeftRows<K, K == 64> own_v{tile_v, warp * 16, {}};
    for (int tile = begin; tile < end; tile++) {
        const int stage = tile & 1, first = tile * TILE;
        float* near = biases + stage * (ROWS + TILE);
        if (bias) read_bias<TILE, ROWS>(near, bias, s, block.head, first, block.first, LOG2_E);
        if (int(threadIdx.x) < TILE) {
            const int query = first + threadIdx.x, at = stage * TILE + threadIdx.x;
            tiles_lse[at] = query < s.queries ? finite_lse(lse[query]) : INFINITY;
            tiles_delta[at] = query < s.queries ? delta[query] : 0.0f;
            if (drops) tiles_hash[at] = query_key(dropout, samples, block, query);
        }
        wait_for_copies<0>();
        BARRIER();
        if (tile == begin) own_k.keep(), own_v.keep();
        if (tile + 1 < end) {
            copy(tile + 1);
            end_copies();
        }
        const bf16* tile_q = tiles_q + stage * TILE * ROW;
        const bf16* tile_dout = tiles_dout + stage * TILE * ROW;
        const float* tile_lse = tiles_lse + stage * TILE;
        const float* tile_delta = tiles_delta + stage * TILE;
        const uint64_t* tile_hash = tiles_hash + stage * TILE;
        float p[N][4], ds[N][4];
        multiply_rows<K, N>(p, own_k, tile_q);
        multiply_rows<K, N>(ds, own_v, tile_dout);
        near += row - 2 * t + TILE - 1;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int i = n * 8 + 2 * t + c % 2, j = key + c / 2 * 8;
                float score = p[n][c] * LOG2_E;
                if (bias) score += near[c / 2 * 8 - n * 8 - c % 2];
                float probability = exp2_fast(score - tile_lse[i]);
                if (first + i < seen_from[c / 2]) probability = 0;
                const float kept = drops ? factor(dropout, tile_hash[i], uint32_t(j)) : 1.0f;
                p[n][c] = probability * kept;
                ds[n][c] = probability * (ds[n][c] * kept - tile_delta[i]);
            }
        add_products<K, N>(of_v, p, tile_dout);
        add_products<K, N>(of_k, ds, tile_q);
        if (partial) {
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    Two two{{ds[n][2 * r], ds[n][2 * r + 1]}};
                    *together_at<Two>(ds_tile + (row + r * 8) * DS_ROW + n * 8 + 2 * t) = two;
                }
            BARRIER();
            diagonals.template add<DS_ROW>(ds_tile, s.queries, first);
        }
    }
    if (partial) diagonals.end();
    const float whole[2] = {1.0f, 1.0f};
    store_rows<K>(dk, s.k_row, block.first + warp * 16, s.keys, of_k, whole);
    store_rows<K>(dv, s.v_row, block.first + warp * 16, s.keys, of_v, whole);
}

// dq. A warp has 16 queries and their scores of TILE keys.
// Shared memory: 2 * ROWS + 4 * TILE rows of K + 8 bf16, 2 * (ROWS + TILE) f32.
template <int K>
DEVICE void queries(const bf16* q, const bf16* k, const bf16* v, const bf16* dout, const float* bias, const float* lse, const float* delta,
                    const uint32_t* lengths, const Dropout& dropout, const uint32_t* samples, bf16* dq, const AttentionShape& s) {
    constexpr int ROW = TILE_ROW<K>;
    const AttentionBlock block = attention_block(lengths, s.queries, ROWS);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4, width = s.heads * K;
    SHARED(bf16, shared);
    bf16* tile_q = shared;
    bf16* tile_dout = tile_q + ROWS * ROW;
    bf16* tiles_k = tile_dout + ROWS * ROW;
    bf16* tiles_v = tiles_k + 2 * TILE * ROW;
    float* biases = reinterpret_cast<float*>(tiles_v + 2 * TILE * ROW);

    q += size_t(block.batch) * s.q_batch + block.head * K;
    dq += size_t(block.batch) * s.q_batch + block.head * K;
    k += size_t(block.batch) * s.k_batch + block.head * K;
    v += size_t(block.batch) * s.v_batch + block.head * K;
    dout += size_t(block.batch) * s.queries * width + block.head * K;
    lse += statistics(s, block);
    delta += statistics(s, block);
    const int seen = visible(s, block.length, block.first + ROWS - 1), tiles = (seen + TILE - 1) / TILE;
    auto copy = [&](int tile) {
        const int stage = tile & 1;
        copy_tile<K, TILE>(tiles_k + stage * TILE * ROW, k, s.k_row, tile * TILE, s.keys);
        copy_tile<K, TILE>(tiles_v + stage * TILE * ROW, v, s.v_row, tile * TILE, s.keys);
    };
    copy_tile<K, ROWS>(tile_q, q, s.q_row, block.first, s.queries);
    copy_tile<K, ROWS>(tile_dout, dout, width, block.first, s.queries);
    if (tiles > 0) copy(0);
    end_copies();

    const int row = warp * 16 + g; // and row + 8
    const bool drops = dropout.threshold > 0;
    float own_lse[2], own_delta[2];
    uint64_t hashes[2] = {0, 0};
    int see[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int query = block.first + row + 8 * r;
        own_lse[r] = query < s.queries ? finite_lse(lse[query]) : INFINITY;
        own_delta[r] = query < s.queries ? delta[query] : 0.0f;
        see[r] = visible(s, block.length, query);
        if (drops) hashes[r] = query_key(dropout, samples, block, query);
    }
    float of_q[K / 8][4];
#pragma unroll
    for (int n = 0; n < K / 8; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) of_q[n][c] = 0;

    const LeftRows<K, false> own_q{tile_q, warp * 16, {}}, own_dout{tile_dout, warp * 16, {}};
    for (int tile = 0; tile < tiles; tile++) {
        const int stage = tile & 1, first = tile * TILE;
        float* near = biases + stage * (ROWS + TILE);
        if (bias) read_bias<ROWS, TILE>(near, bias, s, block.head, block.first, first, LOG2_E);
        wait_for_copies<0>();
        BARRIER();
        if (tile + 1 < tiles) {
            copy(tile + 1);
            end_copies();
        }
        const bf16* tile_k = tiles_k + stage * TILE * ROW;
        float p[N][4], ds[N][4];
        multiply_rows<K, N>(p, own_q, tile_k);
        multiply_rows<K, N>(ds, own_dout, tiles_v + stage * TILE * ROW);
        near += 2 * t - row + ROWS - 1;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int r = c / 2, j = first + n * 8 + 2 * t + c % 2;
                float score = p[n][c] * LOG2_E;
                if (bias) score += near[n * 8 + c % 2 - r * 8];
                float probability = exp2_fast(score - own_lse[r]);
                if (j >= see[r]) probability = 0;
                const float kept = drops ? factor(dropout, hashes[r], uint32_t(j)) : 1.0f;
                ds[n][c] = probability * (ds[n][c] * kept - own_delta[r]);
            }
        add_products<K, N>(of_q, ds, tile_k);
    }
    const float whole[2] = {1.0f, 1.0f};
    store_rows<K>(dq, s.q_row, block.first + warp * 16, s.queries, of_q, whole);
}

} // namespace attention_backward

#define ATTENTION_BACKWARD(K) \
    KERNEL(ATTENTION_THREADS, attention_backward_keys_##K, const bf16* q, const bf16* k, const bf16* v, const bf16* dout, const float* bias, \
           const float* lse, const float* delta, const uint32_t* lengths, Dropout dropout, const uint32_t* samples, bf16* dk, bf16* dv, \
           float* partial, AttentionShape s) { \
        attention_backward::keys<K>(q, k, v, dout, bias, lse, delta, lengths, dropout, samples, dk, dv, partial, s); \
    } \
    KERNEL(ATTENTION_THREADS, attention_backward_queries_##K, const bf16* q, const bf16* k, const bf16* v, const bf16* dout, const float* bias, \
           const float* lse, const float* delta, const uint32_t* lengths, Dropout dropout, const uint32_t* samples, bf16* dq, AttentionShape s) { \
        attention_backward::queries<K>(q, k, v, dout, bias, lse, delta, lengths, dropout, samples, dq, s); \
    }
ATTENTION_BACKWARD(32)
ATTENTION_BACKWARD(64)
ATTENTION_BACKWARD(128)
