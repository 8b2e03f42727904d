// Attention without tensor cores, for f32, for cards before Ampere, and for heads of any size up to 128; and what both kinds share.
//
// A block has four warps and 32 rows, 8 a warp; a lane has one row of the tile that the block goes through, and some columns of the sums.
// A block copies its own rows to shared memory, too. Lean kernels read them where they lie, and add up the same in the same order: they are
// for cards whose shared memory has no room for these rows of the largest heads.
#include "attention.h"

namespace attention_plain {

constexpr int ROWS = 32, WARPS = ATTENTION_THREADS / WARP, OWN = ROWS / WARPS, MOST_COLUMNS = 128 / WARP;
// Rows of scores are one element apart more than they are long, so that columns are in different banks.
constexpr int SCORES_ROW = ROWS + 1;

// A tile of rows: `width` is the head size, to a multiple of four; `row` is from one to the next.
struct Tile {
    float* at;
    int row;
};

template <class T>
DEVICE void read_tile(const Tile& to, const T* from, int row, int first, int rows, int head_size, int width) {
    for (int i = threadIdx.x; i < ROWS * width; i += ATTENTION_THREADS) {
        const int r = i / width, c = i % width;
        to.at[r * to.row + c] = first + r < rows && c < head_size ? to_float(from[size_t(first + r) * row + c]) : 0.0f;
    }
}

// Rows that a block reads where they lie. Rows behind the last one count as the last one: nobody stores what is computed of them.
struct Far {
    const float* at;
    int row, last, head_size;
};

// The rows of a block. Those that it copies lie at `shared`, which is moved behind them.
template <bool IS_LEAN, class T>
DEVICE auto own_rows(float*& shared, const T* from, int row, int first, int rows, int head_size, int width) {
    if constexpr (IS_LEAN) {
        return Far{from + size_t(first) * row, row, rows - first - 1, head_size};
    } else {
        const Tile tile{shared, width};
        shared += ROWS * width;
        read_tile(tile, from, row, first, rows, head_size, width);
        return tile;
    }
}

// Four elements of a row from `c`: zeros behind its end. Where rows lie, they may begin at any element.
DEVICE Four four_of(const Tile& rows, int r, int c) { return *together_at<const Four>(rows.at + r * rows.row + c); }
DEVICE Four four_of(const Far& rows, int r, int c) {
    const float* at = rows.at + size_t(min(r, rows.last)) * rows.row + c;
    Four four;
#pragma unroll
    for (int i = 0; i < 4; i++) four.x[i] = c + i < rows.head_size ? at[i] : 0.0f;
    return four;
}

// products[r] = row `own + r` of `rows` times this lane's row of `lanes`.
template <class Rows>
DEVICE void multiply(float (&products)[OWN], const Rows& rows, int own, const Tile& lanes, int width) {
    const float* lane = lanes.at + threadIdx.x % WARP * lanes.row;
#pragma unroll
    for (int r = 0; r < OWN; r++) products[r] = 0;
    // Unrolled, the loads ahead take registers until sums spill.
#pragma unroll 1
    for (int c = 0; c < width; c += 4) {
        const float x[4] = {lane[c], lane[c + 1], lane[c + 2], lane[c + 3]};
#pragma unroll
        for (int r = 0; r < OWN; r++) {
            const Four four = four_of(rows, own + r, c);
#pragma unroll
            for (int i = 0; i < 4; i++) products[r] += four.x[i] * x[i];
        }
    }
}

// sums[r][c] += the sum over rows j of scores[own + r][j] * tile[j][this lane's column c].
DEVICE void add(float (&sums)[OWN][MOST_COLUMNS], const float* scores, int own, const Tile& tile, int width) {
    const int lane = threadIdx.x % WARP;
    for (int j = 0; j < ROWS; j++) {
        float x[OWN];
#pragma unroll
        for (int r = 0; r < OWN; r++) x[r] = scores[(own + r) * SCORES_ROW + j];
#pragma unroll
        for (int c = 0; c < MOST_COLUMNS; c++) {
            if (c * WARP + lane >= width) break;
            const float y = tile.at[j * tile.row + c * WARP + lane];
#pragma unroll
            for (int r = 0; r < OWN; r++) sums[r][c] += x[r] * y;
        }
    }
}

DEVICE void clear(float (&sums)[OWN][MOST_COLUMNS]) {
#pragma unroll
    for (int r = 0; r < OWN; r++)
#pragma unroll
        for (int c = 0; c < MOST_COLUMNS; c++) sums[r][c] = 0;
}

template <class T>
DEVICE void store_rows(T* to, int row, int first, int rows, int head_size, const float (&sums)[OWN][MOST_COLUMNS], const float (&factors)[OWN]) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int r = 0; r < OWN; r++)
#pragma unroll
        for (int c = 0; c < MOST_COLUMNS; c++)
            if (first + r < rows && c * WARP + lane < head_size)
                from_float(to[size_t(first + r) * row + c * WARP + lane], sums[r][c] * factors[r]);
}

// Shared memory, f32, with W the head size to a multiple of four: 2 * ROWS * (W + 1) + ROWS * (ROWS + 1) + 2 * ROWS, and ROWS * W if not lean.
template <bool IS_LEAN, class T>
DEVICE void forward(const T* q, const T* k, const T* v, const float* bias, const uint32_t* lengths, const Dropout& dropout,
                    const uint32_t* samples, T* out, float* lse, const AttentionShape& s) {
    const AttentionBlock block = attention_block(lengths, s.queries, ROWS);
    const int own = threadIdx.x / WARP * OWN, lane = threadIdx.x % WARP, width = (s.head_size + 3) / 4 * 4, head = block.head * s.head_size;
    q += size_t(block.batch) * s.q_batch + head;
    k += size_t(block.batch) * s.k_batch + head;
    v += size_t(block.batch) * s.v_batch + head;
    SHARED(float, shared);
    const auto rows_q = own_rows<IS_LEAN>(shared, q, s.q_row, block.first, s.queries, s.head_size, width);
    const Tile tile_k{shared, width + 1}, tile_v{tile_k.at + ROWS * (width + 1), width + 1};
    float* probabilities = tile_v.at + ROWS * (width + 1);
    float* near = probabilities + ROWS * SCORES_ROW;
    const int seen = visible(s, block.length, block.first + ROWS - 1);
    const bool drops = dropout.threshold > 0;
    float most[OWN], sum[OWN], results[OWN][MOST_COLUMNS], scores[OWN];
    uint64_t hashes[OWN];
    clear(results);
#pragma unroll
    for (int r = 0; r < OWN; r++) {
        most[r] = HIDDEN;
        sum[r] = 0;
        hashes[r] = drops ? query_key(dropout, samples, block, block.first + own + r) : 0;
    }
    for (int first = 0; first < seen; first += ROWS) {
        BARRIER();
        read_tile(tile_k, k, s.k_row, first, s.keys, s.head_size, width);
        read_tile(tile_v, v, s.v_row, first, s.keys, s.head_size, width);
        if (bias) read_bias<ROWS, ROWS>(near, bias, s, block.head, block.first, first, 1.0f);
        BARRIER();
        multiply(scores, rows_q, own, tile_k, width);
        const int key = first + lane;
#pragma unroll
        for (int r = 0; r < OWN; r++) {
            float score = scores[r] + (bias ? near[lane - (own + r) + ROWS - 1] : 0.0f);
            if (key >= visible(s, block.length, block.first + own + r)) score = HIDDEN;
            const float highest = fmaxf(most[r], warp_max(score));
            const float p = score == HIDDEN ? 0.0f : expf(score - highest), shrink = expf(most[r] - highest);
            most[r] = highest;
            // A lane has the sum of its keys.
            sum[r] = sum[r] * shrink + p;
#pragma unroll
            for (int c = 0; c < MOST_COLUMNS; c++) results[r][c] *= shrink;
            const bool is_kept = !drops || hash(hashes[r], uint32_t(key)) >= dropout.threshold;
            probabilities[(own + r) * SCORES_ROW + lane] = is_kept ? p : 0.0f;
        }
        WARP_BARRIER();
        add(results, probabilities, own, tile_v, width);
    }
    float factors[OWN];
#pragma unroll
    for (int r = 0; r < OWN; r++) {
        sum[r] = warp_sum(sum[r]);
        factors[r] = sum[r] > 0 ? dropout.scale / sum[r] : 0.0f;
        const int query = block.first + own + r;
        if (lane == 0 && query < s.queries)
            lse[(size_t(block.batch) * s.heads + block.head) * s.queries + query] = sum[r] > 0 ? most[r] + logf(sum[r]) : -INFINITY;
    }
    const int row = s.heads * s.head_size;
    store_rows(out + size_t(block.batch) * s.queries * row + head, row, block.first + own, s.queries, s.head_size, results, factors);
}

// Shared memory of both backwards, f32: 2 * ROWS * (W + 1) + 2 * ROWS * (ROWS + 1) + 4 * ROWS, and ROWS of 8 bytes. At its end, if not lean,
// are the block's rows: 2 * ROWS * W.
struct Shared {
    Tile lanes[2];
    uint64_t* hashes;
    float *p, *ds, *near, *lse, *delta, *rows;
};
DEVICE Shared divide(float* shared, int width) {
    Shared parts;
    parts.hashes = reinterpret_cast<uint64_t*>(shared);
    float* at = shared + 2 * ROWS;
    for (int i = 0; i < 2; i++) parts.lanes[i] = {at + i * ROWS * (width + 1), width + 1};
    at += 2 * ROWS * (width + 1);
    parts.p = at;
    parts.ds = at + ROWS * SCORES_ROW;
    parts.near = at + 2 * ROWS * SCORES_ROW;
    parts.lse = parts.near + 2 * ROWS;
    parts.delta = parts.lse + ROWS;
    parts.rows = parts.delta + ROWS;
    return parts;
}

// A query that sees no key, or that does not exist, has probabilities 0.
DEVICE float finite_lse(const float* lse, int query, int queries) { return query < queries && lse[query] != -INFINITY ? lse[query] : INFINITY; }

// dk, dv, and partial sums of the bias's gradient, as on tensor cores.
template <bool IS_LEAN, class T>
DEVICE void keys(const T* q, const T* k, const T* v, const T* dout, const float* bias, const float* lse, const float* delta,
                 const uint32_t* lengths, const Dropout& dropout, const uint32_t* samples, T* dk, T* dv, float* partial, const AttentionShape& s) {
    const AttentionBlock block = attention_block(lengths, s.keys, ROWS);
    const int own = threadIdx.x / WARP * OWN, lane = threadIdx.x % WARP, width = (s.head_size + 3) / 4 * 4, head = block.head * s.head_size;
    const int out_row = s.heads * s.head_size;
    SHARED(float, shared);
    Shared parts = divide(shared, width);
    const size_t statistics = (size_t(block.batch) * s.heads + block.head) * s.queries;
    q += size_t(block.batch) * s.q_batch + head;
    dout += size_t(block.batch) * s.queries * out_row + head;
    k += size_t(block.batch) * s.k_batch + head;
    v += size_t(block.batch) * s.v_batch + head;
    const auto rows_k = own_rows<IS_LEAN>(parts.rows, k, s.k_row, block.first, s.keys, s.head_size, width);
    const auto rows_v = own_rows<IS_LEAN>(parts.rows, v, s.v_row, block.first, s.keys, s.head_size, width);
    const int begin = s.is_causal ? max(block.first + s.queries - s.keys, 0) / ROWS * ROWS : 0;
    const int end = block.first < min(block.length, s.keys) ? s.queries : begin;
    const bool drops = dropout.threshold > 0;
    DiagonalSums<ROWS, ROWS> diagonals;
    if (partial) {
        const int tiles = (s.keys + ROWS - 1) / ROWS, tile = block.first / ROWS;
        float* sums = partial + ((size_t(block.batch) * s.heads + block.head) * tiles + tile) * (s.queries + ROWS - 1);
        diagonals.begin(sums, s.queries, begin < end ? begin : s.queries + diagonals.RING);
    }
    float of_k[OWN][MOST_COLUMNS], of_v[OWN][MOST_COLUMNS], scores[OWN], dp[OWN];
    clear(of_k);
    clear(of_v);
    for (int first = begin; first < end; first += ROWS) {
        BARRIER();
        read_tile(parts.lanes[0], q, s.q_row, first, s.queries, s.head_size, width);
        read_tile(parts.lanes[1], dout, out_row, first, s.queries, s.head_size, width);
        if (bias) read_bias<ROWS, ROWS>(parts.near, bias, s, block.head, first, block.first, 1.0f);
        if (int(threadIdx.x) < ROWS) {
            const int query = first + threadIdx.x;
            parts.lse[threadIdx.x] = finite_lse(lse + statistics, query, s.queries);
            parts.delta[threadIdx.x] = query < s.queries ? delta[statistics + query] : 0.0f;
            if (drops) parts.hashes[threadIdx.x] = query_key(dropout, samples, block, query);
        }
        BARRIER();
        multiply(scores, rows_k, own, parts.lanes[0], width);
        multiply(dp, rows_v, own, parts.lanes[1], width);
        const int seen = visible(s, block.length, first + lane);
#pragma unroll
        for (int r = 0; r < OWN; r++) {
            const int key = block.first + own + r;
            const float score = scores[r] + (bias ? parts.near[own + r - lane + ROWS - 1] : 0.0f);
            const float p = key < seen ? expf(score - parts.lse[lane]) : 0.0f;
            const float kept = drops ? factor(dropout, parts.hashes[lane], uint32_t(key)) : 1.0f;
            parts.p[(own + r) * SCORES_ROW + lane] = p * kept;
            parts.ds[(own + r) * SCORES_ROW + lane] = p * (dp[r] * kept - parts.delta[lane]);
        }
        WARP_BARRIER();
        add(of_v, parts.p, own, parts.lanes[1], width);
        add(of_k, parts.ds, own, parts.lanes[0], width);
        if (partial) {
            BARRIER();
            diagonals.template add<SCORES_ROW>(parts.ds, s.queries, first);
        }
    }
    if (partial) diagonals.end();
    float whole[OWN];
#pragma unroll
    for (int r = 0; r < OWN; r++) whole[r] = 1;
    store_rows(dk + size_t(block.batch) * s.k_batch + head, s.k_row, block.first + own, s.keys, s.head_size, of_k, whole);
    store_rows(dv + size_t(block.batch) * s.v_batch + head, s.v_row, block.first + own, s.keys, s.head_size, of_v, whole);
}

// dq.
template <bool IS_LEAN, class T>
DEVICE void queries(const T* q, const T* k, const T* v, const T* dout, const float* bias, const float* lse, const float* delta,
                    const uint32_t* lengths, const Dropout& dropout, const uint32_t* samples, T* dq, const AttentionShape& s) {
    const AttentionBlock block = attention_block(lengths, s.queries, ROWS);
    const int own = threadIdx.x / WARP * OWN, lane = threadIdx.x % WARP, width = (s.head_size + 3) / 4 * 4, head = block.head * s.head_size;
    const int out_row = s.heads * s.head_size;
    SHARED(float, shared);
    Shared parts = divide(shared, width);
    const size_t statistics = (size_t(block.batch) * s.heads + block.head) * s.queries;
    k += size_t(block.batch) * s.k_batch + head;
    v += size_t(block.batch) * s.v_batch + head;
    q += size_t(block.batch) * s.q_batch + head;
    dout += size_t(block.batch) * s.queries * out_row + head;
    const auto rows_q = own_rows<IS_LEAN>(parts.rows, q, s.q_row, block.first, s.queries, s.head_size, width);
    const auto rows_dout = own_rows<IS_LEAN>(parts.rows, dout, out_row, block.first, s.queries, s.head_size, width);
    const int seen = visible(s, block.length, block.first + ROWS - 1);
    const bool drops = dropout.threshold > 0;
    float of_q[OWN][MOST_COLUMNS], scores[OWN], dp[OWN], own_lse[OWN], own_delta[OWN];
    uint64_t hashes[OWN];
    clear(of_q);
#pragma unroll
    for (int r = 0; r < OWN; r++) {
        const int query = block.first + own + r;
        own_lse[r] = finite_lse(lse + statistics, query, s.queries);
        own_delta[r] = query < s.queries ? delta[statistics + query] : 0.0f;
        hashes[r] = drops ? query_key(dropout, samples, block, query) : 0;
    }
    for (int first = 0; first < seen; first += ROWS) {
        BARRIER();
        read_tile(parts.lanes[0], k, s.k_row, first, s.keys, s.head_size, width);
        read_tile(parts.lanes[1], v, s.v_row, first, s.keys, s.head_size, width);
        if (bias) read_bias<ROWS, ROWS>(parts.near, bias, s, block.head, block.first, first, 1.0f);
        BARRIER();
        multiply(scores, rows_q, own, parts.lanes[0], width);
        multiply(dp, rows_dout, own, parts.lanes[1], width);
        const int key = first + lane;
#pragma unroll
        for (int r = 0; r < OWN; r++) {
            const float score = scores[r] + (bias ? parts.near[lane - (own + r) + ROWS - 1] : 0.0f);
            const float p = key < visible(s, block.length, block.first + own + r) ? expf(score - own_lse[r]) : 0.0f;
            const float kept = drops ? factor(dropout, hashes[r], uint32_t(key)) : 1.0f;
            parts.ds[(own + r) * SCORES_ROW + lane] = p * (dp[r] * kept - own_delta[r]);
        }
        WARP_BARRIER();
        add(of_q, parts.ds, own, parts.lanes[0], width);
    }
    float whole[OWN];
#pragma unroll
    for (int r = 0; r < OWN; r++) whole[r] = 1;
    store_rows(dq + size_t(block.batch) * s.q_batch + head, s.q_row, block.first + own, s.queries, s.head_size, of_q, whole);
}

// delta (B, H, T): of each query of each head the sum of dout * out, both (B, T, H*K). A block has a sum for four of its threads. `LANES`
// lanes add one, each N elements at a time. They read for R sums at once.
template <int LANES, int N, int R, class T>
DEVICE void row_products(const T* out, const T* dout, float* delta, uint32_t sums, uint32_t queries, uint32_t heads, int head_size) {
    const uint32_t teams = blockDim.x / LANES, team = threadIdx.x / LANES, end = (blockIdx.x + 1) * (blockDim.x / 4);
    const int lane = threadIdx.x % LANES;
    for (uint32_t first = end - blockDim.x / 4 + team; first < end; first += R * teams) {
        float products[R];
        for (int r = 0; r < R; r++) products[r] = 0;
        for (int i = lane * N; i < head_size; i += LANES * N) {
            float values[R][N], gradients[R][N];
            for (int r = 0; r < R; r++) {
                const size_t at = size_t(min(first + r * teams, sums - 1)) * head_size + i;
                load<N>(out, at, values[r]);
                load<N>(dout, at, gradients[r]);
            }
            for (int r = 0; r < R; r++)
                for (int k = 0; k < N; k++) products[r] += values[r][k] * gradients[r][k];
        }
        // A lane writes one of them: divisions take long.
        float own = 0;
        for (int r = 0; r < R; r++) {
            for (int lanes = LANES / 2; lanes > 0; lanes /= 2) products[r] += shuffle_xor(products[r], lanes);
            if (lane == r) own = products[r];
        }
        const uint32_t sum = first + lane * teams, head = sum % heads, position = sum / heads;
        if (lane < R && sum < sums)
            delta[(size_t(position / queries) * heads + head) * queries + position % queries] = own;
    }
}

} // namespace attention_plain

#define ATTENTION(suffix, T, is_lean, blocks) \
    KERNEL_OF_BLOCKS(ATTENTION_THREADS, blocks, attention_forward_##suffix, const T* q, const T* k, const T* v, const float* bias, const uint32_t* lengths, \
           Dropout dropout, const uint32_t* samples, T* out, float* lse, AttentionShape s) { \
        attention_plain::forward<is_lean>(q, k, v, bias, lengths, dropout, samples, out, lse, s); \
    } \
    KERNEL_OF_BLOCKS(ATTENTION_THREADS, blocks, attention_backward_keys_##suffix, const T* q, const T* k, const T* v, const T* dout, const float* bias, \
           const float* lse, const float* delta, const uint32_t* lengths, Dropout dropout, const uint32_t* samples, T* dk, T* dv, \
           float* partial, AttentionShape s) { \
        attention_plain::keys<is_lean>(q, k, v, dout, bias, lse, delta, lengths, dropout, samples, dk, dv, partial, s); \
    } \
    KERNEL_OF_BLOCKS(ATTENTION_THREADS, blocks, attention_backward_queries_##suffix, const T* q, const T* k, const T* v, const T* dout, const float* bias, \
           const float* lse, const float* delta, const uint32_t* lengths, Dropout dropout, const uint32_t* samples, T* dq, AttentionShape s) { \
        attention_plain::queries<is_lean>(q, k, v, dout, bias, lse, delta, lengths, dropout, samples, dq, s); \
    }
ATTENTION(f32, float, false, 3)
ATTENTION(bf16, bf16, false, 3)
// Cards that take these have shared memory for one block or two.
ATTENTION(lean_f32, float, true, 2)

#define DELTA(suffix, T) \
    KERNEL(256, attention_delta_##suffix, const T* out, const T* dout, float* delta, int batch, int queries, int heads, int head_size) { \
        using attention_plain::row_products; \
        const uint32_t sums = uint32_t(batch) * queries * heads; \
        const bool fours = in_fours(head_size, out, dout); \
        if (fours && head_size == 64) row_products<16, 4, 4>(out, dout, delta, sums, queries, heads, head_size); \
        else if (fours) row_products<32, 4, 4>(out, dout, delta, sums, queries, heads, head_size); \
        else row_products<32, 1, 4>(out, dout, delta, sums, queries, heads, head_size); \
    }
DELTA(f32, float)
DELTA(bf16, bf16)

// dbias (H, T+S-1) += the partial sums of blocks of `tile` keys, in the order of sequences and tiles. A thread a value.
KERNEL(256, attention_add_bias_gradient, const float* partial, float* dbias, int batch, int heads, int queries, int keys, int tile) {
    const int offsets = queries + keys - 1, i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= heads * offsets) return;
    const int head = i / offsets, offset = i % offsets, tiles = (keys + tile - 1) / tile, length = queries + tile - 1;
    float sum = dbias[i];
    for (int b = 0; b < batch; b++)
        for (int part = 0; part < tiles; part++) {
            const int at = offset - part * tile;
            if (at >= 0 && at < length) sum += partial[((size_t(b) * heads + head) * tiles + part) * length + at];
        }
    dbias[i] = sum;
}
