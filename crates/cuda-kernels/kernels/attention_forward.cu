// Attention of bf16 on tensor cores (Dao 2023, FlashAttention-2): scores are in registers, a tile at a time.
//
// A block has four warps and 64 queries, 16 a warp. It goes through the keys that it sees, 64 at a time, and copies the next keys
// meanwhile.
#include "attention_tiles.h"

namespace attention_forward {

constexpr int QUERIES = 64, KEYS = 64;

// Shared memory: QUERIES + 4 * KEYS rows of K bf16, and two biases of 128 f32.
template <int K>
DEVICE void run(const bf16* q, const bf16* k, const bf16* v, const float* bias, const uint32_t* lengths, const Dropout& dropout,
                const uint32_t* samples, bf16* out, float* lse, const AttentionShape& s) {
    constexpr int N = KEYS / 8;
    const AttentionBlock block = attention_block(lengths, s, s.queries, QUERIES, Most::Last);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    SHARED(bf16, shared);
    bf16* tile_q = shared;
    bf16* tiles_k = tile_q + QUERIES * K;
    bf16* tiles_v = tiles_k + 2 * KEYS * K;
    float* biases = reinterpret_cast<float*>(tiles_v + 2 * KEYS * K);

    q += size_t(block.batch) * s.q_batch + block.head * K;
    k += size_t(block.batch) * s.k_batch + block.head * K;
    v += size_t(block.batch) * s.v_batch + block.head * K;
    const uint32_t sample = block_sample(dropout, samples, block);
    const float first_bias = near_bias<QUERIES, KEYS>(bias, s, block.head, block.first, 0);
    // Copied before it is known whether the block sees a key.
    copy_tile<K, QUERIES>(tile_q, q, s.q_row, block.first, s.queries);
    copy_tile<K, KEYS>(tiles_k, k, s.k_row, 0, s.keys);
    copy_tile<K, KEYS>(tiles_v, v, s.v_row, 0, s.keys);
    end_copies();
    // The last query of the tile sees the most keys.
    const int seen = visible(s, block.length, block.first + QUERIES - 1), tiles = (seen + KEYS - 1) / KEYS;

    const int row = block.first + warp * 16 + g; // and row + 8
    const bool drops = dropout.threshold > 0;
    RowHash hashes[2] = {{0, 0}, {0, 0}};
    const uint64_t key_of_block = block_key(dropout, sample);
    if (drops)
        for (int r = 0; r < 2; r++) hashes[r] = query_hash(key_of_block, block, row + 8 * r);
    const int see[2] = {visible(s, block.length, row), visible(s, block.length, row + 8)};
    // All queries of the warp see at least the keys of its first query.
    const int all_see = visible(s, block.length, block.first + warp * 16);
    float most[2] = {HIDDEN, HIDDEN}, sum[2] = {0, 0}, results[K / 8][4];
#pragma unroll
    for (int n = 0; n < K / 8; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) results[n][c] = 0;

    biases[threadIdx.x] = LOG2_E * first_bias;
    LeftRows<K, (K <= 64)> own{tile_q, warp * 16, threadIdx.x, {}};
    for (int tile = 0; tile < tiles; tile++) {
        const int stage = tile & 1, first = tile * KEYS;
        const float* near = biases + stage * 128 + 2 * t - (warp * 16 + g) + QUERIES - 1;
        wait_for_copies<0>();
        BARRIER();
        if (tile == 0) own.keep();
        if (tile + 1 < tiles) {
            copy_tile<K, KEYS>(tiles_k + (stage ^ 1) * KEYS * K, k, s.k_row, first + KEYS, s.keys);
            copy_tile<K, KEYS>(tiles_v + (stage ^ 1) * KEYS * K, v, s.v_row, first + KEYS, s.keys);
            end_copies();
        }
        // In flight while scores are computed.
        const float next_bias = near_bias<QUERIES, KEYS>(bias, s, block.head, block.first, first + KEYS);
        float scores[N][4];
        multiply_rows<K, N>(scores, own, tiles_k + stage * KEYS * K);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int c = 0; c < 4; c++) scores[n][c] = scores[n][c] * LOG2_E + near[n * 8 + c % 2 - c / 2 * 8];
        // Only tiles at an edge hide any key.
        if (first + KEYS > all_see) {
            const int from_here[2] = {see[0] - first - 2 * t, see[1] - first - 2 * t};
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int c = 0; c < 4; c++)
                    if (n * 8 + c % 2 >= from_here[c / 2]) scores[n][c] = HIDDEN;
        }
        float highest[2] = {most[0], most[1]};
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int n = 0; n < N; n++) highest[r] = fmaxf(highest[r], fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
            highest[r] = fmaxf(highest[r], shuffle_xor(highest[r], 1));
            highest[r] = fmaxf(highest[r], shuffle_xor(highest[r], 2));
        }
        // Rarely true after the first tiles.
        if (highest[0] > most[0] || highest[1] > most[1]) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float shrink = exp2_fast(most[r] - highest[r]);
                most[r] = highest[r];
                sum[r] *= shrink;
#pragma unroll
                for (int n = 0; n < K / 8; n++) {
                    results[n][2 * r] *= shrink;
                    results[n][2 * r + 1] *= shrink;
                }
            }
        }
        // In a row that has seen no key, every exponential is 0.
        const float base[2] = {most[0] == HIDDEN ? 0.0f : most[0], most[1] == HIDDEN ? 0.0f : most[1]};
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                scores[n][c] = exp2_fast(scores[n][c] - base[c / 2]);
                sum[c / 2] += scores[n][c];
            }
        biases[(stage ^ 1) * 128 + threadIdx.x] = LOG2_E * next_bias;
        if (drops) {
            const RowHash here[2] = {from_channel(hashes[0], first + 2 * t), from_channel(hashes[1], first + 2 * t)};
#pragma unroll
            for (int n = 0; n < N; n += 2)
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    const Pair kept = pair_kept(dropout, here[c / 2], n * 8 + c % 2);
                    if (!kept.first) scores[n][c] = 0;
                    if (!kept.second) scores[n + 1][c] = 0;
                }
        }
        add_products<K, N>(results, scores, tiles_v + stage * KEYS * K);
    }

    float factors[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        sum[r] += shuffle_xor(sum[r], 1);
        sum[r] += shuffle_xor(sum[r], 2);
        factors[r] = sum[r] > 0 ? dropout.scale / sum[r] : 0.0f;
        if (t == 0 && row + 8 * r < s.queries)
            lse[(size_t(block.batch) * s.heads + block.head) * s.queries + row + 8 * r] =
                sum[r] > 0 ? (most[r] + log2f(sum[r])) / LOG2_E : -INFINITY;
    }
    const int width = s.heads * K;
    store_rows<K>(out + size_t(block.batch) * s.queries * width + block.head * K, width, block.first + warp * 16, s.queries, results, factors);
}

} // namespace attention_forward

// `BLOCKS` blocks at once, or 0 if the compiler chooses. For the largest heads shared memory has room for two at most.
#define ATTENTION_FORWARD(K, BLOCKS) \
    KERNEL_OF_BLOCKS(ATTENTION_THREADS, BLOCKS, attention_forward_##K, const bf16* q, const bf16* k, const bf16* v, const float* bias, const uint32_t* lengths, \
           Dropout dropout, const uint32_t* samples, bf16* out, float* lse, AttentionShape s) { \
        attention_forward::run<K>(q, k, v, bias, lengths, dropout, samples, out, lse, s); \
    }
ATTENTION_FORWARD(32, 4)
ATTENTION_FORWARD(64, 0)
ATTENTION_FORWARD(128, 2)
