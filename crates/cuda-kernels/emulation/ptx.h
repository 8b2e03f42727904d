// Instructions of PTX: a function of its name for each. crates/ptx-on-host turns PTX into calls of them.
//
// Written from the Parallel Thread Execution ISA (9.0), not from the kernels. Registers are bits: an f32 is a uint32_t here. In addition to
// the errors of execution.h, these are errors, as in compute-sanitizer: misaligned addresses, shared memory that was not requested, memory
// of a card that is not allocated, and shared memory that two threads use without a barrier between them.
#pragma once
#include "execution.h"
#include "ptx_memory.h"
#include "ptx_numbers.h"

// The position of a thread.
#define PLACE(name, of) \
    inline uint32_t name##_x() { return of.x; } \
    inline uint32_t name##_y() { return of.y; } \
    inline uint32_t name##_z() { return of.z; }
PLACE(tid, threadIdx)
PLACE(ntid, blockDim)
PLACE(ctaid, blockIdx)
PLACE(nctaid, gridDim)

// A warp waits twice: until all lanes have shown their values, and until all have read them.
inline void shown(unsigned line) { emulation::wait(emulation::At::Warp, 2 * line); }
inline void seen(unsigned line) { emulation::wait(emulation::At::Warp, 2 * line + 1); }
inline int lane() { return int(threadIdx.x % 32); }

inline void all_lanes(uint32_t mask) {
    if (mask != 0xFFFFFFFFu) emulation::fail("a part of a warp is named");
}

inline void bar_sync(unsigned line, uint32_t barrier) {
    if (barrier != 0) emulation::fail("a barrier other than the first");
    emulation::wait(emulation::At::Barrier, 2 * line);
    emulation::self().barriers++;
}
inline void bar_warp_sync(unsigned line, uint32_t mask) {
    all_lanes(mask);
    shown(line);
    emulation::self().warp_barriers++;
}

// `c`: lanes of a segment (the mask in its upper half, none here) and the last lane.
inline uint32_t shuffled(unsigned line, bool& is_within, uint32_t x, int from, uint32_t c, uint32_t mask) {
    all_lanes(mask);
    if (c != 31) emulation::fail("a part of a warp is shuffled");
    emulation::self().slot[0] = x;
    shown(line);
    is_within = from <= 31;
    x = uint32_t(emulation::peer(from).slot[0]);
    seen(line);
    return x;
}
inline uint32_t shfl_sync_bfly_b32(unsigned line, bool& is_within, uint32_t x, uint32_t lanes, uint32_t c, uint32_t mask) {
    return shuffled(line, is_within, x, lane() ^ int(lanes & 31), c, mask);
}
inline uint32_t shfl_sync_idx_b32(unsigned line, bool& is_within, uint32_t x, uint32_t from, uint32_t c, uint32_t mask) {
    return shuffled(line, is_within, x, int(from & 31), c, mask);
}

// 9.7.14, "Matrix Fragments for mma.m16n8k16 with floating point type". With group = lane / 4 and t = lane % 4, element i of a lane is:
// of A row group (i < 2 or 4 <= i < 6) or group + 8, column 2t + i % 2, 8 further for i >= 4; of B row 2t + i % 2, 8 further for i >= 2, column
// group; of C and D row group (i < 2) or group + 8, column 2t + i % 2.
inline void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(unsigned line, uint32_t& d0, uint32_t& d1, uint32_t& d2, uint32_t& d3, uint32_t a0,
                                                                uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, uint32_t c0,
                                                                uint32_t c1, uint32_t c2, uint32_t c3) {
    auto& slot = emulation::self().slot;
    slot[0] = a0 | uint64_t(a1) << 32, slot[1] = a2 | uint64_t(a3) << 32, slot[2] = b0 | uint64_t(b1) << 32;
    shown(line);
    auto element = [](const uint64_t* words, int i) { return double(number(uint32_t(words[i / 4] >> (16 * (i % 4)) & 0xFFFF) << 16)); };
    auto a = [&](int row, int column) {
        const int i = column % 2 + (row >= 8 ? 2 : 0) + (column >= 8 ? 4 : 0);
        return element(&emulation::peer(row % 8 * 4 + column % 8 / 2).slot[0], i);
    };
    auto b = [&](int row, int column) { return element(&emulation::peer(column * 4 + row % 8 / 2).slot[2], row % 2 + (row >= 8 ? 2 : 0)); };
    const uint32_t c[4] = {c0, c1, c2, c3};
    uint32_t d[4];
    for (int i = 0; i < 4; i++) {
        const int row = lane() / 4 + (i < 2 ? 0 : 8), column = lane() % 4 * 2 + i % 2;
        double sum = number(c[i]);
        for (int k = 0; k < 16; k++) sum += a(row, k) * b(k, column);
        d[i] = bits(float(sum));
    }
    d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
    seen(line);
}

// 9.7.14, "ldmatrix": lanes 8m to 8m + 7 give the rows of matrix m. Lane l gets of it elements 2 (l % 4) and the next of row l / 4.
inline void load_four_matrices(unsigned line, bool is_transposed, uint32_t* m[4], uint64_t row) {
    check_aligned(row, 16);
    emulation::self().slot[0] = row;
    shown(line);
    for (int matrix = 0; matrix < 4; matrix++) {
        uint32_t pair = 0;
        for (int k = 0; k < 2; k++) {
            const int i = is_transposed ? lane() % 4 * 2 + k : lane() / 4, j = is_transposed ? lane() / 4 : lane() % 4 * 2 + k;
            const uint64_t of_row = emulation::peer(8 * matrix + i).slot[0];
            pair |= uint32_t(load<uint16_t, Space::Shared>(of_row + 2 * uint64_t(j))) << (16 * k);
        }
        *m[matrix] = pair;
    }
    seen(line);
}
inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned line, uint32_t& m0, uint32_t& m1, uint32_t& m2, uint32_t& m3, uint64_t row) {
    uint32_t* m[4] = {&m0, &m1, &m2, &m3};
    load_four_matrices(line, false, m, row);
}
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(unsigned line, uint32_t& m0, uint32_t& m1, uint32_t& m2, uint32_t& m3, uint64_t row) {
    uint32_t* m[4] = {&m0, &m1, &m2, &m3};
    load_four_matrices(line, true, m, row);
}

// 9.7.9, "cp.async": 16 bytes. The first `read` bytes are copied and the others are zero.
inline void cp_async_cg_shared_global(unsigned line, uint64_t to, uint64_t from, uint32_t bytes, uint32_t read) {
    if (bytes != 16 || read > bytes) emulation::fail("a copy of other than 16 bytes");
    check_aligned(to, 16);
    check_aligned(from, 16);
    emulation::Copy copy{reinterpret_cast<void*>(to), {}};
    for (uint32_t i = 0; i < read; i += 4) {
        const uint32_t word = load<uint32_t, Space::Global>(from + i);
        memcpy(copy.bytes + i, &word, 4);
    }
    if (emulation::schedule().copies_arrive_at_once) arrive(copy);
    else emulation::self().copies.back().push_back(copy);
}
inline void cp_async_commit_group(unsigned) { emulation::self().copies.emplace_back(); }
inline void cp_async_wait_group(unsigned, uint32_t on_their_way) {
    auto& groups = emulation::self().copies; // the last one is open
    while (groups.size() - 1 > on_their_way) {
        for (const emulation::Copy& copy : groups.front()) arrive(copy);
        groups.erase(groups.begin());
    }
}

#define PTX_KERNEL(name, source, threads, ...) \
    static const emulation::Registered registered_##name(#name, source ".ptx", threads, emulation::Kernel{"", "", 0, __VA_ARGS__, name});
