// Tiles of attention on tensor cores: bf16 rows of K elements in shared memory, 16 bytes apart more than they are long, so that the
// rows of a matrix are in different banks.
#pragma once
#include "attention.h"
#include "tensor_cores.h"

template <int K>
constexpr int TILE_ROW = K + 8;

// Begins to copy rows `first` to `first + ROWS` of `rows`; zeros behind the last one. A sequence has less than 2^31 rows, a row less than
// 2^31 bytes.
template <int K, int ROWS>
DEVICE void copy_tile(bf16* to, const bf16* from, int row, int first, int rows) {
    // A thread copies pieces of eight elements, `APART` rows from one to the next.
    constexpr int PIECES = K / 8, APART = ATTENTION_THREADS / PIECES;
    static_assert(ROWS % APART == 0, "every thread copies as many pieces");
    const int begin = threadIdx.x / PIECES, c = threadIdx.x % PIECES * 8;
    // Unsigned, so that an address is one multiplication of 32 bits.
    const unsigned row_bytes = unsigned(row) * sizeof(bf16);
    const unsigned char* bytes = reinterpret_cast<const unsigned char*>(from + c);
#pragma unroll
    for (int r = 0; r < ROWS; r += APART) {
        const int at = first + begin + r;
        const bool is_valid = at < rows;
        copy_ahead(to + (begin + r) * TILE_ROW<K> + c, bytes + size_t(is_valid ? unsigned(at) : 0u) * row_bytes, is_valid);
    }
}

// Sixteen rows from `row` as the left factor: columns 16 * step to 16 * step + 16.
template <int K>
DEVICE void load_left(uint32_t (&m)[4], const bf16* tile, int row, int step) {
    const int lane = threadIdx.x % WARP;
    load_matrices(m, tile + (row + lane % 16) * TILE_ROW<K> + step * 16 + lane / 16 * 8);
}

// The sixteen rows from `row` of a tile that are a warp's left factor for every tile of the other side. They stay in registers where that
// costs no resident block: these kernels wait for shared memory more than for anything else.
template <int K, bool ARE_KEPT>
struct LeftRows {
    const bf16* tile;
    int row;
    uint32_t kept[ARE_KEPT ? K / 16 : 1][4];

    // When the tile is there.
    DEVICE void keep() {
        if constexpr (ARE_KEPT) {
#pragma unroll
            for (int step = 0; step < K / 16; step++) load_left<K>(kept[step], tile, row, step);
        }
    }
    DEVICE void read(uint32_t (&m)[4], int step) const {
        if constexpr (ARE_KEPT) {
#pragma unroll
            for (int i = 0; i < 4; i++) m[i] = kept[step][i];
        } else {
            load_left<K>(m, tile, row, step);
        }
    }
};

// products (16, 8 N) = left (16, K) * tile (8 N, K) transposed.
template <int K, int N, bool ARE_KEPT>
DEVICE void multiply_rows(float (&products)[N][4], const LeftRows<K, ARE_KEPT>& left, const bf16* tile) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) products[n][c] = 0;
    // Of the largest heads the sums alone take 128 registers in the backward: with two steps at once they spill.
#pragma unroll(K > 64 ? 1 : K / 32)
    for (int step = 0; step < K / 16; step += 2) {
        uint32_t a[2][4];
        left.read(a[0], step);
        left.read(a[1], step + 1);
#pragma unroll
        for (int n = 0; n < N; n++) {
            uint32_t b[4];
            load_matrices(b, tile + (n * 8 + lane % 8) * TILE_ROW<K> + step * 16 + lane / 8 * 8);
            multiply_add(products[n], a[0], b[0], b[1]);
            multiply_add(products[n], a[1], b[2], b[3]);
        }
    }
}

// sums (16, K) += left (16, 8 N) * tile (8 N, K); the left factor is what `multiply_rows` left, rounded to bf16.
template <int K, int N>
DEVICE void add_products(float (&sums)[K / 8][4], const float (&left)[N][4], const bf16* tile) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int step = 0; step < N / 2; step++) {
        const float(&x)[4] = left[2 * step], (&y)[4] = left[2 * step + 1];
        const uint32_t a[4] = {pack(x[0], x[1]), pack(x[2], x[3]), pack(y[0], y[1]), pack(y[2], y[3])};
#pragma unroll
        for (int n = 0; n < K / 8; n += 2) {
            uint32_t b[4];
            load_matrices_transposed(b, tile + (step * 16 + lane % 16) * TILE_ROW<K> + n * 8 + lane / 16 * 8);
            multiply_add(sums[n], a, b[0], b[1]);
            multiply_add(sums[n + 1], a, b[2], b[3]);
        }
    }
}

// Writes sums (16, K) times a factor for each of a lane's two rows, where these are below `rows`.
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
