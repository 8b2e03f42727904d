// Tiles of attention on tensor cores: rows of K elements of bf16 in shared memory, in pieces of eight. The same piece of eight rows lies in
// different banks, and a copied row fills whole lines of banks.
#pragma once
#include "attention.h"
#include "tensor_cores.h"

// The index of this thread, held in a register. If registers are scarce, the compiler reads the special register again in each part of a
// loop, which takes as long as shared memory. It cannot do that with the result of another instruction.
DEVICE unsigned held_thread() { return shuffle_from(uint32_t(threadIdx.x), threadIdx.x % WARP); }

constexpr int PIECE_BYTES = 16;
// Bytes from the start of a tile to a piece.
template <int K>
DEVICE unsigned piece_at(unsigned row, unsigned piece) {
    return row * (K * 2) + (piece ^ (K == 32 ? row / 2 % 4 : row % 8)) * PIECE_BYTES;
}
DEVICE const unsigned char* bytes_of(const bf16* tile, unsigned at) { return reinterpret_cast<const unsigned char*>(tile) + at; }

// Begins to copy rows `first` to `first + ROWS` of `rows`, and zeros after the last row. A sequence has fewer than 2^31 rows, a row fewer
// than 2^31 bytes.
template <int K, int ROWS>
DEVICE void copy_tile(bf16* to, const bf16* from, int row, int first, int rows, unsigned thread = threadIdx.x) {
    // A thread copies pieces of eight elements, `APART` rows from one to the next.
    constexpr int PIECES = K / 8, APART = ATTENTION_THREADS / PIECES;
    static_assert(ROWS % APART == 0, "every thread copies as many pieces");
    static_assert(APART % 8 == 0, "pieces of these rows are moved alike");
    const int begin = thread / PIECES, c = thread % PIECES;
    // Unsigned, so that an address is one multiplication of 32 bits.
    const unsigned row_bytes = unsigned(row) * sizeof(bf16);
    const unsigned char* bytes = reinterpret_cast<const unsigned char*>(from + c * 8);
    unsigned char* tile = reinterpret_cast<unsigned char*>(to) + piece_at<K>(begin, c);
#pragma unroll
    for (int r = 0; r < ROWS; r += APART) {
        const int at = first + begin + r;
        const bool is_valid = at < rows;
        copy_ahead(tile + r * K * 2, bytes + size_t(is_valid ? unsigned(at) : 0u) * row_bytes, is_valid);
    }
}

// Loads sixteen rows from `row` on as the left factor: columns 16 * step to 16 * step + 16. The pieces of a step are those of the first
// step, moved.
template <int K>
DEVICE void load_left(uint32_t (&m)[4], const bf16* tile, int row, int step, unsigned thread) {
    const int lane = thread % WARP;
    load_matrices(m, bytes_of(tile + row * K, piece_at<K>(lane % 16, lane / 16) ^ step * 32));
}

// The sixteen rows of a tile from `row` on that are a warp's left factor for every tile of the other side. They stay in registers if that
// costs no resident block: these kernels wait mostly for shared memory.
template <int K, bool ARE_KEPT>
struct LeftRows {
    const bf16* tile;
    int row;
    unsigned thread;
    uint32_t kept[ARE_KEPT ? K / 16 : 1][4];

    // Called once the tile is in shared memory.
    DEVICE void keep() {
        if constexpr (ARE_KEPT) {
#pragma unroll
            for (int step = 0; step < K / 16; step++) load_left<K>(kept[step], tile, row, step, thread);
        }
    }
    DEVICE void read(uint32_t (&m)[4], int step) const {
        if constexpr (ARE_KEPT) {
#pragma unroll
            for (int i = 0; i < 4; i++) m[i] = kept[step][i];
        } else {
            load_left<K>(m, tile, row, step, thread);
        }
    }
};

// products (16, 8 N) = left (16, K) * tile (8 N, K) transposed.
template <int K, int N, bool ARE_KEPT>
DEVICE void multiply_rows(float (&products)[N][4], const LeftRows<K, ARE_KEPT>& left, const bf16* tile) {
    const int lane = left.thread % WARP;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) products[n][c] = 0;
    // For the largest heads the sums alone take 128 registers in the backward: with two steps at once they would spill.
#pragma unroll(K > 64 ? 1 : K / 32)
    for (int step = 0; step < K / 16; step += 2) {
        uint32_t a[2][4];
        left.read(a[0], step);
        left.read(a[1], step + 1);
#pragma unroll
        for (int n = 0; n < N; n++) {
            uint32_t b[4];
            load_matrices(b, bytes_of(tile + n * 8 * K, piece_at<K>(lane % 8, lane / 8) ^ step * 32));
            multiply_add(products[n], a[0], b[0], b[1]);
            multiply_add(products[n], a[1], b[2], b[3]);
        }
    }
}

// sums (16, K) += left (16, 8 N) * tile (8 N, K); the left factor is the result of `multiply_rows`, rounded to bf16.
template <int K, int N>
DEVICE void add_products(float (&sums)[K / 8][4], const float (&left)[N][4], const bf16* tile, unsigned thread = threadIdx.x) {
    const int lane = thread % WARP;
#pragma unroll
    for (int step = 0; step < N / 2; step++) {
        const float(&x)[4] = left[2 * step], (&y)[4] = left[2 * step + 1];
        const uint32_t a[4] = {pack(x[0], x[1]), pack(x[2], x[3]), pack(y[0], y[1]), pack(y[2], y[3])};
#pragma unroll
        for (int n = 0; n < K / 8; n += 2) {
            uint32_t b[4];
            load_matrices_transposed(b, bytes_of(tile + step * 16 * K, piece_at<K>(lane % 16, lane / 16) ^ n * 16));
            multiply_add(sums[n], a, b[0], b[1]);
            multiply_add(sums[n + 1], a, b[2], b[3]);
        }
    }
}

// Writes sums (16, K) times a factor for each of a lane's two rows, if these are below `rows`.
template <int K>
DEVICE void store_rows(bf16* to, int row, int first, int rows, const float (&sums)[K / 8][4], const float (&factors)[2]) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int at = first + lane / 4 + 8 * r;
        if (at >= rows) continue;
        uint32_t* pairs = together_at<uint32_t>(to + size_t(at) * row);
#pragma unroll
        for (int n = 0; n < K / 8; n++) pairs[n * 4 + lane % 4] = pack(sums[n][2 * r] * factors[r], sums[n][2 * r + 1] * factors[r]);
    }
}

// The gradient of the bias by the keys of one block, like `DiagonalSums`, from products: no thread waits for another's scores.
//
// A warp has the keys from 16 * warp on, and goes through tiles of 32 queries. With g and t as in tensor_cores.h, a lane's scores of key g
// + 8r and query 8n + 2t + c belong to offset 8(r - n) + (g - 2t - c): scores with the same r - n and c are one sum. The sums of the
// smallest two r - n are not complete after a tile, because the next tile is 32 offsets below. Shuffles add the sums of all lanes, so that
// each lane has the sum of one of 32 offsets that the tile completes. These sums lie in shared memory until all warps have theirs.
struct ProductDiagonals {
    static constexpr int TILE = 32, WARPS = ATTENTION_THREADS / WARP, KEYS = 16 * WARPS;
    // The ring of a warp: the offsets of four tiles.
    static constexpr int RING = 4 * TILE;
    unsigned thread;
    float* ring; // WARPS rows of RING
    float* to;
    int queries;
    float next[2], last[2]; // of each c, the sums that go on: of r - n = -2, which some lanes still need, and of -3

    // All offsets above those of the first tile have sums of zero. `is_empty`: no query sees the keys.
    DEVICE void begin(unsigned of_thread, float* shared, float* row, int of_queries, int first_tile, bool is_empty) {
        thread = of_thread;
        ring = shared;
        to = row;
        queries = of_queries;
        next[0] = next[1] = last[0] = last[1] = 0;
        for (int i = thread; i < WARPS * RING; i += ATTENTION_THREADS) ring[i] = 0;
        const int above = is_empty ? 0 : queries - 1 + KEYS - first_tile * TILE;
        for (int i = above + int(thread); i < queries + KEYS - 1; i += ATTENTION_THREADS) to[i] = 0;
    }
    // `ds`: (16, TILE), this warp's part of a tile.
    DEVICE void add(const float (&ds)[TILE / 8][4], int tile) {
        const int warp = thread / WARP, lane = thread % WARP, g = lane / 4, t = lane % 4;
        float sums[2][TILE / 8];
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const float first = ds[0][2 + c] + last[c], second = ds[0][c] + ds[1][2 + c], third = ds[1][c] + ds[2][2 + c];
            const float fourth = ds[2][c] + ds[3][2 + c];
            // If g - 2t - c is negative, the sum belongs to the eight offsets below.
            const bool is_below = g < 2 * t + c;
            sums[c][0] = is_below ? next[c] : first;
            sums[c][1] = is_below ? first : second;
            sums[c][2] = is_below ? second : third;
            sums[c][3] = is_below ? third : fourth;
            next[c] = fourth;
            last[c] = ds[3][c];
        }
        // Offsets of c = 1 are those of c = 0, one row of lanes earlier.
        float all[TILE / 8];
#pragma unroll
        for (int i = 0; i < TILE / 8; i++) all[i] = sums[0][i] + shuffle_from(sums[1][i], (lane + 4) % WARP);
        // Four lanes have the same offsets, each one column and two rows from the previous lane. Each of them ends up with the sum of i =
        // t.
        float half[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float given = shuffle_from(t < 2 ? all[2 + i] : all[i], (t < 2 ? lane + 18 : lane + 14) % WARP);
            half[i] = (t < 2 ? all[i] : all[2 + i]) + given;
        }
        const float given = shuffle_from(t % 2 == 0 ? half[1] : half[0], (t % 2 == 0 ? lane + 9 : lane + 23) % WARP);
        const int offset = 8 * (3 - t) + (g - 2 * t & 7);
        ring[warp * RING + (offset - tile * TILE & RING - 1)] = (t % 2 == 0 ? half[0] : half[1]) + given;
    }
    // Writes the 32 sums that all warps have completed with `tile`. One of the warps calls this, after a barrier.
    DEVICE void write(int tile) {
        const int warp = thread / WARP, lane = thread % WARP;
        if (warp != (tile & WARPS - 1)) return;
        const int at = queries - 1 + TILE * (1 - tile) + lane;
        if (at < 0 || at >= queries + KEYS - 1) return;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += ring[w * RING + (16 * (WARPS - w) - 16 + lane - tile * TILE & RING - 1)];
        to[at] = sum;
    }
    // After the last tile: writes the sums that it has not completed.
    DEVICE void finish(int end) {
        const float none[TILE / 8][4] = {};
#pragma unroll 1
        for (int tile = end; tile < end + 2; tile++) {
            BARRIER();
            write(tile - 1);
            add(none, tile);
        }
        BARRIER();
        write(end + 1);
    }
};
