// Attention without tensor cores: for f32, for cards before Ampere, and for heads of any size up to 128; and the code that both kinds of
// attention share.
//
// A block has four warps. It has 64 rows for heads of up to 64 elements, and 32 rows for larger heads. It goes through the rows of the
// other side 32 at a time.
// A warp computes the scores of a quarter of the block's rows, and the sums of these rows. A thread has both in rectangles, so that one
// load of four elements from shared memory serves several products. A block copies its own rows to shared memory, too. Lean kernels read
// their own rows from global memory, and add up in the same order. They are for cards whose shared memory has no room for the block's rows
// of the largest heads.
#include "attention.h"

namespace attention_plain {

// Rows of a tile, and elements from one row of scores to the next, so that a warp stores to different banks at once.
constexpr int TILE = 32, SCORES_ROW = TILE + 8;
// A thread has scores of ACROSS rows of the tile, APART rows apart, and of rows of the block that are GROUPS apart.
constexpr int ACROSS = 4, APART = TILE / ACROSS, GROUPS = WARP / APART;
// Rows of a thread's sums, of four columns each.
constexpr int SUMMED = 8;

// The layout for heads of up to COLUMNS elements.
template <int COLUMNS>
struct Layout {
    static constexpr int ROWS = ATTENTION_THREADS * SUMMED * 4 / COLUMNS, OWN = ROWS / (ATTENTION_THREADS / WARP);
    static constexpr int SCORED = OWN / GROUPS, LANES = COLUMNS / 4, STEP = WARP / LANES;

    // Rows of the block: the warp's first row, and the first row of this thread's scores and of its sums.
    DEVICE static int own() { return int(threadIdx.x) / WARP * OWN; }
    DEVICE static int scored() { return own() + int(threadIdx.x) % WARP / APART; }
    DEVICE static int summed() { return own() + int(threadIdx.x) % WARP / LANES; }
    DEVICE static int column() { return int(threadIdx.x) % LANES * 4; }
};
// The first row of the tile of this thread's scores.
DEVICE int across() { return int(threadIdx.x) % APART; }

// The head size, rounded up to a multiple of four.
DEVICE int width_of(const AttentionShape& s) { return (s.head_size + 3) / 4 * 4; }

// Elements from one row in shared memory to the next: an odd number of fours, so that consecutive rows are in different banks.
template <int COLUMNS>
DEVICE int row_in_shared(const AttentionShape& s) {
    // A constant for the compiler if heads have their usual size.
    return COLUMNS == 64 ? COLUMNS + 4 : (width_of(s) / 4 | 1) * 4;
}

// Rows in shared memory; `row` is the number of elements from one row to the next.
struct Tile {
    float* at;
    int row;
};

// Rows of an operand in memory: `are_fours` if four elements can be read at once.
template <class T>
struct Operand {
    const T* at;
    int row, rows, head_size;
    bool are_fours;

    DEVICE Operand(const T* begin, int row, int rows, const AttentionShape& s)
        : at(begin), row(row), rows(rows), head_size(s.head_size), are_fours(row % 4 == 0 && in_fours(s.head_size, begin)) {}
    // Four elements of a row from `c` on: zeros after its end and after the last row.
    DEVICE Four read(int r, int c) const {
        Four four{{0, 0, 0, 0}};
        if (r >= rows || c >= head_size) return four;
        const size_t from = size_t(r) * row + c;
        if (are_fours) {
            load<4>(at, from, four.x);
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (c + i < head_size) four.x[i] = to_float(at[from + i]);
        }
        return four;
    }
};

// A thread's part of COUNT rows of an operand, on its way to shared memory.
template <int COLUMNS, int COUNT>
struct Rows {
    static constexpr int STEP = ATTENTION_THREADS / (COLUMNS / 4);
    Four fours[COUNT / STEP];

    template <class T>
    DEVICE void read(const Operand<T>& from, int first) {
        const int begin = first + int(threadIdx.x) / (COLUMNS / 4), c = Layout<COLUMNS>::column();
#pragma unroll
        for (int i = 0; i < COUNT / STEP; i++) fours[i] = from.read(begin + i * STEP, c);
    }
    DEVICE void store(const Tile& to, int width) const {
        const int begin = int(threadIdx.x) / (COLUMNS / 4), c = Layout<COLUMNS>::column();
        if (c >= width) return;
#pragma unroll
        for (int i = 0; i < COUNT / STEP; i++) *together_at<Four>(to.at + (begin + i * STEP) * to.row + c) = fours[i];
    }
};

// A block's rows in global memory, from `first` on.
template <class T>
struct Far {
    Operand<T> rows;
    int first;
};

// The rows of a block. Copied rows lie at `shared`, which is moved past them.
template <int COLUMNS, bool IS_LEAN, class T>
DEVICE auto own_rows(float*& shared, const Operand<T>& from, int first, int row, int width) {
    constexpr int ROWS = Layout<COLUMNS>::ROWS;
    if constexpr (IS_LEAN) {
        return Far<T>{from, first};
    } else {
        const Tile tile{shared, row};
        shared += ROWS * row;
        Rows<COLUMNS, ROWS> rows;
        rows.read(from, first);
        rows.store(tile, width);
        return tile;
    }
}

DEVICE Four four_of(const Tile& rows, int r, int c) { return *together_at<const Four>(rows.at + r * rows.row + c); }
template <class T>
DEVICE Four four_of(const Far<T>& rows, int r, int c) {
    return rows.rows.read(rows.first + r, c);
}

// products[i][k] = row `scored + GROUPS * i` of `rows` times row `across + APART * k` of a tile; `FOURS` of each row are in flight at once.
template <int FOURS, int SCORED, class Own>
DEVICE void multiply(float (&products)[SCORED][ACROSS], const Own& rows, int scored, const Tile& tile, int width) {
#pragma unroll
    for (int i = 0; i < SCORED; i++)
#pragma unroll
        for (int k = 0; k < ACROSS; k++) products[i][k] = 0;
#pragma unroll(FOURS)
    for (int c = 0; c < width; c += 4) {
        Four y[ACROSS];
#pragma unroll
        for (int k = 0; k < ACROSS; k++) y[k] = four_of(tile, across() + APART * k, c);
#pragma unroll
        for (int i = 0; i < SCORED; i++) {
            const Four x = four_of(rows, scored + GROUPS * i, c);
#pragma unroll
            for (int e = 0; e < 4; e++)
#pragma unroll
                for (int k = 0; k < ACROSS; k++) products[i][k] += x.x[e] * y[k].x[e];
        }
    }
}

// Stores a thread's scores to shared memory, where `add` reads them.
template <int SCORED>
DEVICE void put(float* scores, int scored, const float (&x)[SCORED][ACROSS]) {
#pragma unroll
    for (int i = 0; i < SCORED; i++)
#pragma unroll
        for (int k = 0; k < ACROSS; k++) scores[(scored + GROUPS * i) * SCORES_ROW + across() + APART * k] = x[i][k];
}

// sums[i][c] += the sum over rows j of scores[summed + STEP * i][j] * tile[j][column + c].
template <int COLUMNS>
DEVICE void add(float (&sums)[SUMMED][4], const float* scores, const Tile& tile, int width) {
    using L = Layout<COLUMNS>;
    // Sums of columns after the last are not stored.
    const int column = min(L::column(), width - 4);
    scores += L::summed() * SCORES_ROW;
#pragma unroll 1
    for (int j = 0; j < TILE; j += 4) {
        Four y[4];
#pragma unroll
        for (int e = 0; e < 4; e++) y[e] = four_of(tile, j + e, column);
#pragma unroll
        for (int i = 0; i < SUMMED; i++) {
            const Four x = *together_at<const Four>(scores + i * L::STEP * SCORES_ROW + j);
#pragma unroll
            for (int e = 0; e < 4; e++)
#pragma unroll
                for (int c = 0; c < 4; c++) sums[i][c] += x.x[e] * y[e].x[c];
        }
    }
}

DEVICE void clear(float (&sums)[SUMMED][4]) {
#pragma unroll
    for (int i = 0; i < SUMMED; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) sums[i][c] = 0;
}

// Stores a thread's sums to rows from `first` on, if these are below `rows`.
template <int COLUMNS, class T>
DEVICE void store_rows(T* to, int row, int first, int rows, int head_size, const float (&sums)[SUMMED][4]) {
    using L = Layout<COLUMNS>;
    const int column = L::column();
    const bool are_fours = row % 4 == 0 && in_fours(head_size, to);
#pragma unroll
    for (int i = 0; i < SUMMED; i++) {
        const int r = first + L::summed() + L::STEP * i;
        if (r >= rows || column >= head_size) continue;
        T* at = to + size_t(r) * row + column;
        if (are_fours) {
            store<4>(at, 0, sums[i]);
        } else {
#pragma unroll
            for (int c = 0; c < 4; c++)
                if (column + c < head_size) from_float(at[c], sums[i][c]);
        }
    }
}

// Multiplies each of a block's rows of sums by its factor.
template <int COLUMNS>
DEVICE void scale_rows(float (&sums)[SUMMED][4], const float* factors) {
    using L = Layout<COLUMNS>;
#pragma unroll
    for (int i = 0; i < SUMMED; i++) {
        const float factor = factors[L::summed() + L::STEP * i];
#pragma unroll
        for (int c = 0; c < 4; c++) sums[i][c] *= factor;
    }
}

// Shared memory, f32, with R the elements from a row to the next: 2 * TILE * R, ROWS * SCORES_ROW, 2 * ROWS + TILE, and ROWS * R if not lean.
template <int COLUMNS, bool IS_LEAN, class T>
DEVICE void forward(const T* q, const T* k, const T* v, const float* bias, const uint32_t* lengths, const Dropout& dropout,
                    const uint32_t* samples, T* out, float* lse, const AttentionShape& s) {
    using L = Layout<COLUMNS>;
    constexpr int ROWS = L::ROWS, SCORED = L::SCORED;
    const AttentionBlock block = attention_block(lengths, s, s.queries, ROWS, Most::Last);
    const int width = width_of(s), row = row_in_shared<COLUMNS>(s), head = block.head * s.head_size, scored = L::scored();
    const Operand<T> from_q(q + size_t(block.batch) * s.q_batch + head, s.q_row, s.queries, s);
    const Operand<T> from_k(k + size_t(block.batch) * s.k_batch + head, s.k_row, s.keys, s);
    const Operand<T> from_v(v + size_t(block.batch) * s.v_batch + head, s.v_row, s.keys, s);
    SHARED(float, shared);
    const auto rows_q = own_rows<COLUMNS, IS_LEAN>(shared, from_q, block.first, row, width);
    const Tile tile_k{shared, row}, tile_v{tile_k.at + TILE * row, row};
    float* probabilities = tile_v.at + TILE * row;
    float* near = probabilities + ROWS * SCORES_ROW;
    // Factors of rows, passed from threads with scores to threads with sums.
    float* factors = near + ROWS + TILE;
    // The last query of the tile sees the most keys, and its first query the fewest.
    const int seen = visible(s, block.length, block.first + ROWS - 1), all_see = visible(s, block.length, block.first);
    const bool drops = dropout.threshold > 0;
    const uint64_t key_of_block = block_key(dropout, block_sample(dropout, samples, block));
    float most[SCORED], sum[SCORED], results[SUMMED][4];
    RowHash hashes[SCORED];
    clear(results);
#pragma unroll
    for (int i = 0; i < SCORED; i++) {
        most[i] = HIDDEN;
        sum[i] = 0;
        hashes[i] = {0, 0};
        if (drops) hashes[i] = query_hash(key_of_block, block, block.first + scored + GROUPS * i);
    }
    for (int first = 0; first < seen; first += TILE) {
        Rows<COLUMNS, TILE> next_k, next_v;
        next_k.read(from_k, first);
        next_v.read(from_v, first);
        const float next_bias = near_bias<ROWS, TILE>(bias, s, block.head, block.first, first);
        BARRIER();
        next_k.store(tile_k, width);
        next_v.store(tile_v, width);
        if (int(threadIdx.x) < ROWS + TILE) near[threadIdx.x] = next_bias;
        BARRIER();
        float scores[SCORED][ACROSS];
        multiply<2>(scores, rows_q, scored, tile_k, width);
#pragma unroll
        for (int i = 0; i < SCORED; i++)
#pragma unroll
            for (int k = 0; k < ACROSS; k++) scores[i][k] += near[across() + APART * k - (scored + GROUPS * i) + ROWS - 1];
        // Only tiles at an edge hide any key.
        if (first + TILE > all_see) {
#pragma unroll
            for (int i = 0; i < SCORED; i++) {
                const int see = visible(s, block.length, block.first + scored + GROUPS * i);
#pragma unroll
                for (int k = 0; k < ACROSS; k++)
                    if (first + across() + APART * k >= see) scores[i][k] = HIDDEN;
            }
        }
#pragma unroll
        for (int i = 0; i < SCORED; i++) {
            float highest = most[i];
#pragma unroll
            for (int k = 0; k < ACROSS; k++) highest = fmaxf(highest, scores[i][k]);
#pragma unroll
            for (int lanes = APART / 2; lanes > 0; lanes /= 2) highest = fmaxf(highest, shuffle_xor(highest, lanes));
            const float shrink = expf(most[i] - highest), base = highest == HIDDEN ? 0.0f : highest;
            most[i] = highest;
            // A thread has the sum of its own keys. In a row that has seen no key, every exponential is 0.
            sum[i] *= shrink;
#pragma unroll
            for (int k = 0; k < ACROSS; k++) {
                scores[i][k] = expf(scores[i][k] - base);
                sum[i] += scores[i][k];
            }
            if (across() == 0) factors[scored + GROUPS * i] = shrink;
        }
        if (drops) {
#pragma unroll
            for (int i = 0; i < SCORED; i++)
#pragma unroll
                for (int k = 0; k < ACROSS; k++)
                    if (!is_kept(dropout, hashes[i], first + across() + APART * k)) scores[i][k] = 0;
        }
        put(probabilities, scored, scores);
        WARP_BARRIER();
        scale_rows<COLUMNS>(results, factors);
        add<COLUMNS>(results, probabilities, tile_v, width);
    }
    WARP_BARRIER();
#pragma unroll
    for (int i = 0; i < SCORED; i++) {
#pragma unroll
        for (int lanes = APART / 2; lanes > 0; lanes /= 2) sum[i] += shuffle_xor(sum[i], lanes);
        const int query = block.first + scored + GROUPS * i;
        if (across() != 0) continue;
        factors[scored + GROUPS * i] = sum[i] > 0 ? dropout.scale / sum[i] : 0.0f;
        if (query < s.queries)
            lse[(size_t(block.batch) * s.heads + block.head) * s.queries + query] = sum[i] > 0 ? most[i] + logf(sum[i]) : -INFINITY;
    }
    WARP_BARRIER();
    scale_rows<COLUMNS>(results, factors);
    const int out_row = s.heads * s.head_size;
    store_rows<COLUMNS>(out + size_t(block.batch) * s.queries * out_row + head, out_row, block.first, s.queries, s.head_size, results);
}

// Shared memory of both backward kernels, f32: 4 * TILE, 2 * TILE * R, ROWS * SCORES_ROW, and ROWS + TILE. If not lean, the block's rows
// follow: 2 * ROWS * R.
template <int COLUMNS>
struct Shared {
    OfQuery* queries;
    Tile tiles[2];
    float *scores, *near, *rows;

    DEVICE Shared(float* shared, int row) {
        constexpr int ROWS = Layout<COLUMNS>::ROWS;
        queries = together_at<OfQuery>(shared);
        for (int i = 0; i < 2; i++) tiles[i] = {shared + 4 * TILE + i * TILE * row, row};
        scores = shared + 4 * TILE + 2 * TILE * row;
        near = scores + ROWS * SCORES_ROW;
        rows = near + ROWS + TILE;
    }
};

// dk, dv, and partial sums of the bias's gradient, as on tensor cores.
template <int COLUMNS, bool IS_LEAN, class T>
DEVICE void keys(const T* q, const T* k, const T* v, const T* dout, const float* bias, const float* lse, const float* delta,
                 const uint32_t* lengths, const Dropout& dropout, const uint32_t* samples, T* dk, T* dv, float* partial, const AttentionShape& s) {
    using L = Layout<COLUMNS>;
    constexpr int ROWS = L::ROWS, SCORED = L::SCORED;
    const AttentionBlock block = attention_block(lengths, s, s.keys, ROWS, Most::First);
    const int width = width_of(s), row = row_in_shared<COLUMNS>(s), head = block.head * s.head_size, scored = L::scored();
    const int out_row = s.heads * s.head_size;
    SHARED(float, shared);
    Shared<COLUMNS> parts(shared, row);
    const Tile tile_q = parts.tiles[0], tile_dout = parts.tiles[1];
    const size_t statistics = (size_t(block.batch) * s.heads + block.head) * s.queries;
    const Operand<T> from_q(q + size_t(block.batch) * s.q_batch + head, s.q_row, s.queries, s);
    const Operand<T> from_dout(dout + size_t(block.batch) * s.queries * out_row + head, out_row, s.queries, s);
    const Operand<T> from_k(k + size_t(block.batch) * s.k_batch + head, s.k_row, s.keys, s);
    const Operand<T> from_v(v + size_t(block.batch) * s.v_batch + head, s.v_row, s.keys, s);
    const auto rows_k = own_rows<COLUMNS, IS_LEAN>(parts.rows, from_k, block.first, row, width);
    const auto rows_v = own_rows<COLUMNS, IS_LEAN>(parts.rows, from_v, block.first, row, width);
    const int begin = s.is_causal ? max(block.first + s.queries - s.keys, 0) / TILE * TILE : 0;
    const int end = block.first < min(block.length, s.keys) ? s.queries : begin;
    const bool drops = dropout.threshold > 0;
    const uint64_t key_of_block = block_key(dropout, block_sample(dropout, samples, block));
    DiagonalSums<TILE, ROWS> diagonals;
    if (partial) {
        const int tiles = (s.keys + ROWS - 1) / ROWS, tile = block.first / ROWS;
        float* sums = partial + ((size_t(block.batch) * s.heads + block.head) * tiles + tile) * (s.queries + ROWS - 1);
        diagonals.begin(sums, s.queries, begin < end ? begin : s.queries + diagonals.RING);
    }
    float of_k[SUMMED][4], of_v[SUMMED][4];
    clear(of_k);
    clear(of_v);
    for (int first = begin; first < end; first += TILE) {
        Rows<COLUMNS, TILE> next_q, next_dout;
        next_q.read(from_q, first);
        next_dout.read(from_dout, first);
        const float next_bias = near_bias<TILE, ROWS>(bias, s, block.head, first, block.first);
        OfQuery next_query{0, 0, {0, 0}};
        if (int(threadIdx.x) < TILE)
            next_query = of_query(lse + statistics, 1.0f, delta + statistics, drops, key_of_block, block, first + int(threadIdx.x), s.queries);
        BARRIER();
        next_q.store(tile_q, width);
        next_dout.store(tile_dout, width);
        if (int(threadIdx.x) < ROWS + TILE) parts.near[threadIdx.x] = next_bias;
        if (int(threadIdx.x) < TILE) parts.queries[threadIdx.x] = next_query;
        BARRIER();
        float p[SCORED][ACROSS], ds[SCORED][ACROSS];
        // With two fours at once the sums of keys and values would spill.
        multiply<1>(p, rows_k, scored, tile_q, width);
        multiply<1>(ds, rows_v, scored, tile_dout, width);
        // Later queries see at least as many keys as the first.
        const bool is_edge = block.first + ROWS > visible(s, block.length, first);
#pragma unroll
        for (int k = 0; k < ACROSS; k++) {
            const OfQuery of = parts.queries[across() + APART * k];
            const int seen = is_edge ? visible(s, block.length, first + across() + APART * k) : s.keys;
#pragma unroll
            for (int i = 0; i < SCORED; i++) {
                const int key = block.first + scored + GROUPS * i;
                p[i][k] = expf(p[i][k] + (parts.near[scored + GROUPS * i - (across() + APART * k) + TILE - 1] - of.lse));
                if (is_edge && key >= seen) p[i][k] = 0;
                const float kept = drops ? factor(dropout, of.hash, key) : 1.0f;
                ds[i][k] = p[i][k] * (ds[i][k] * kept - of.delta);
                p[i][k] *= kept;
            }
        }
        put(parts.scores, scored, p);
        WARP_BARRIER();
        add<COLUMNS>(of_v, parts.scores, tile_dout, width);
        WARP_BARRIER();
        put(parts.scores, scored, ds);
        WARP_BARRIER();
        add<COLUMNS>(of_k, parts.scores, tile_q, width);
        if (partial) {
            BARRIER();
            diagonals.template add<SCORES_ROW>(parts.scores, s.queries, first);
        }
    }
    if (partial) diagonals.end();
    store_rows<COLUMNS>(dk + size_t(block.batch) * s.k_batch + head, s.k_row, block.first, s.keys, s.head_size, of_k);
    store_rows<COLUMNS>(dv + size_t(block.batch) * s.v_batch + head, s.v_row, block.first, s.keys, s.head_size, of_v);
}

// dq.
template <int COLUMNS, bool IS_LEAN, class T>
DEVICE void queries(const T* q, const T* k, const T* v, const T* dout, const float* bias, const float* lse, const float* delta,
                    const uint32_t* lengths, const Dropout& dropout, const uint32_t* samples, T* dq, const AttentionShape& s) {
    using L = Layout<COLUMNS>;
    constexpr int ROWS = L::ROWS, SCORED = L::SCORED;
    const AttentionBlock block = attention_block(lengths, s, s.queries, ROWS, Most::Last);
    const int width = width_of(s), row = row_in_shared<COLUMNS>(s), head = block.head * s.head_size, scored = L::scored();
    const int out_row = s.heads * s.head_size;
    SHARED(float, shared);
    Shared<COLUMNS> parts(shared, row);
    const Tile tile_k = parts.tiles[0], tile_v = parts.tiles[1];
    const size_t statistics = (size_t(block.batch) * s.heads + block.head) * s.queries;
    const Operand<T> from_q(q + size_t(block.batch) * s.q_batch + head, s.q_row, s.queries, s);
    const Operand<T> from_dout(dout + size_t(block.batch) * s.queries * out_row + head, out_row, s.queries, s);
    const Operand<T> from_k(k + size_t(block.batch) * s.k_batch + head, s.k_row, s.keys, s);
    const Operand<T> from_v(v + size_t(block.batch) * s.v_batch + head, s.v_row, s.keys, s);
    const auto rows_q = own_rows<COLUMNS, IS_LEAN>(parts.rows, from_q, block.first, row, width);
    const auto rows_dout = own_rows<COLUMNS, IS_LEAN>(parts.rows, from_dout, block.first, row, width);
    const int seen = visible(s, block.length, block.first + ROWS - 1), all_see = visible(s, block.length, block.first);
    const bool drops = dropout.threshold > 0;
    const uint64_t key_of_block = block_key(dropout, block_sample(dropout, samples, block));
    float of_q[SUMMED][4];
    OfQuery of[SCORED];
    clear(of_q);
#pragma unroll
    for (int i = 0; i < SCORED; i++)
        of[i] = of_query(lse + statistics, 1.0f, delta + statistics, drops, key_of_block, block, block.first + scored + GROUPS * i, s.queries);
    for (int first = 0; first < seen; first += TILE) {
        Rows<COLUMNS, TILE> next_k, next_v;
        next_k.read(from_k, first);
        next_v.read(from_v, first);
        const float next_bias = near_bias<ROWS, TILE>(bias, s, block.head, block.first, first);
        BARRIER();
        next_k.store(tile_k, width);
        next_v.store(tile_v, width);
        if (int(threadIdx.x) < ROWS + TILE) parts.near[threadIdx.x] = next_bias;
        BARRIER();
        float p[SCORED][ACROSS], ds[SCORED][ACROSS];
        multiply<2>(p, rows_q, scored, tile_k, width);
        multiply<2>(ds, rows_dout, scored, tile_v, width);
        const bool is_edge = first + TILE > all_see;
#pragma unroll
        for (int i = 0; i < SCORED; i++) {
            const int see = is_edge ? visible(s, block.length, block.first + scored + GROUPS * i) : s.keys;
#pragma unroll
            for (int k = 0; k < ACROSS; k++) {
                const int key = first + across() + APART * k;
                p[i][k] = expf(p[i][k] + (parts.near[across() + APART * k - (scored + GROUPS * i) + ROWS - 1] - of[i].lse));
                if (is_edge && key >= see) p[i][k] = 0;
                if (drops) ds[i][k] *= factor(dropout, of[i].hash, key);
                ds[i][k] = p[i][k] * (ds[i][k] - of[i].delta);
            }
        }
        put(parts.scores, scored, ds);
        WARP_BARRIER();
        add<COLUMNS>(of_q, parts.scores, tile_k, width);
    }
    store_rows<COLUMNS>(dq + size_t(block.batch) * s.q_batch + head, s.q_row, block.first, s.queries, s.head_size, of_q);
}

// delta (B, H, T): for each query of each head the sum of dout * out, both (B, T, H*K). A block computes one sum for four of its threads.
// `LANES` lanes add one sum, each lane four elements at a time (with N = 4). They read for R sums at once.
template <int LANES, int N, int R, class T>
DEVICE void row_products(const T* out, const T* dout, float* delta, uint32_t sums, uint32_t queries, uint32_t heads, int head_size) {
    const uint32_t teams = blockDim.x / LANES, team = threadIdx.x / LANES, end = (blockIdx.x + 1) * (blockDim.x / 4);
    const int lane = threadIdx.x % LANES;
    for (uint32_t first = end - blockDim.x / 4 + team; first < end; first += R * teams) {
        float products[R];
        for (int r = 0; r < R; r++) products[r] = 0;
        for (int i = lane * 4; i < head_size; i += LANES * 4) {
            float values[R][4], gradients[R][4];
            for (int r = 0; r < R; r++) {
                const size_t at = size_t(min(first + r * teams, sums - 1)) * head_size + i;
                load_four<N>(out, at, head_size - i, values[r]);
                load_four<N>(dout, at, head_size - i, gradients[r]);
            }
            for (int r = 0; r < R; r++)
                for (int k = 0; k < 4; k++) products[r] += values[r][k] * gradients[r][k];
        }
        // A lane writes one of the sums: the divisions take long.
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

// Kernels for heads of up to `columns` elements.
#define ATTENTION(suffix, T, columns, is_lean, blocks) \
    KERNEL_OF_BLOCKS(ATTENTION_THREADS, blocks, attention_forward_##suffix, const T* q, const T* k, const T* v, const float* bias, const uint32_t* lengths, \
           Dropout dropout, const uint32_t* samples, T* out, float* lse, AttentionShape s) { \
        attention_plain::forward<columns, is_lean>(q, k, v, bias, lengths, dropout, samples, out, lse, s); \
    } \
    KERNEL_OF_BLOCKS(ATTENTION_THREADS, blocks, attention_backward_keys_##suffix, const T* q, const T* k, const T* v, const T* dout, const float* bias, \
           const float* lse, const float* delta, const uint32_t* lengths, Dropout dropout, const uint32_t* samples, T* dk, T* dv, \
           float* partial, AttentionShape s) { \
        attention_plain::keys<columns, is_lean>(q, k, v, dout, bias, lse, delta, lengths, dropout, samples, dk, dv, partial, s); \
    } \
    KERNEL_OF_BLOCKS(ATTENTION_THREADS, blocks, attention_backward_queries_##suffix, const T* q, const T* k, const T* v, const T* dout, const float* bias, \
           const float* lse, const float* delta, const uint32_t* lengths, Dropout dropout, const uint32_t* samples, T* dq, AttentionShape s) { \
        attention_plain::queries<columns, is_lean>(q, k, v, dout, bias, lse, delta, lengths, dropout, samples, dq, s); \
    }
ATTENTION(narrow_f32, float, 64, false, 3)
ATTENTION(f32, float, 128, false, 3)
ATTENTION(bf16, bf16, 128, false, 3)
// Cards that need these have shared memory for one block or two.
ATTENTION(lean_f32, float, 128, true, 2)

#define DELTA(suffix, T) \
    KERNEL(256, attention_delta_##suffix, const T* out, const T* dout, float* delta, int batch, int queries, int heads, int head_size) { \
        using attention_plain::row_products; \
        const uint32_t sums = uint32_t(batch) * queries * heads; \
        const bool are_together = in_fours(head_size, out, dout); \
        /* The order of a sum depends on the size alone. */ \
        if (head_size > 64 && are_together) row_products<32, 4, 4>(out, dout, delta, sums, queries, heads, head_size); \
        else if (head_size > 64) row_products<32, 1, 4>(out, dout, delta, sums, queries, heads, head_size); \
        else if (are_together) row_products<16, 4, 4>(out, dout, delta, sums, queries, heads, head_size); \
        else row_products<16, 1, 4>(out, dout, delta, sums, queries, heads, head_size); \
    }
DELTA(f32, float)
DELTA(bf16, bf16)

// dbias (H, T+S-1) += the partial sums of blocks of `tile` keys, in the order of sequences and tiles. A block has 32 numbers of a head, and
// the blocks of a head follow each other. Shared memory: see `add_in_order`.
KERNEL(256, attention_add_bias_gradient, const float* partial, float* dbias, int batch, int heads, int queries, int keys, int tile) {
    SHARED(float, staged);
    const int offsets = queries + keys - 1, blocks = (offsets + WARP - 1) / WARP;
    const int head = blockIdx.x / blocks, offset = blockIdx.x % blocks * WARP + threadIdx.x % WARP;
    const uint32_t tiles = (keys + tile - 1) / tile, length = queries + tile - 1;
    float* own = dbias + size_t(head) * offsets + min(offset, offsets - 1);
    const float sum = add_in_order(*own, batch * tiles, staged, [&](uint32_t i) {
        const uint32_t sequence = i / tiles, part = i - sequence * tiles, at = offset - part * tile;
        // Most blocks of keys contribute to few offsets. Minus zero changes no sum. An offset before the first wraps around.
        return at < length ? partial[((size_t(sequence) * heads + head) * tiles + part) * length + at] : -0.0f;
    });
    if (threadIdx.x < WARP && offset < offsets) *own = sum;
}
