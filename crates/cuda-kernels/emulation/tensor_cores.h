// Tensor cores and asynchronous copies on the host, with the layouts of a card. See ../kernels/tensor_cores.h.
#pragma once

enum : unsigned { PRODUCT_LINE = 2u << 20, MATRICES_LINE = 3u << 20 };

DEVICE void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    auto& slot = emulation::self().slot;
    slot[0] = a[0] | uint64_t(a[1]) << 32;
    slot[1] = a[2] | uint64_t(a[3]) << 32;
    slot[2] = b0 | uint64_t(b1) << 32;
    emulation::wait(emulation::At::Warp, PRODUCT_LINE);
    const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
    auto half = [](uint64_t word, int at) { return float_of(uint32_t(word >> (16 * at) & 0xFFFF) << 16); };
    float left[2][16], right[2][16];
    for (int t = 0; t < 4; t++) {
        const emulation::Fibre& of_rows = emulation::peer(row * 4 + t);
        for (int i = 0; i < 2; i++) {
            // The low word of each slot is the upper row. The second slot is eight columns further.
            for (int k = 0; k < 2; k++) left[0][2 * t + 8 * i + k] = half(of_rows.slot[i], k), left[1][2 * t + 8 * i + k] = half(of_rows.slot[i], 2 + k);
            const emulation::Fibre& of_columns = emulation::peer((column + i) * 4 + t);
            for (int k = 0; k < 2; k++) right[i][2 * t + k] = half(of_columns.slot[2], k), right[i][2 * t + 8 + k] = half(of_columns.slot[2], 2 + k);
        }
    }
    for (int c = 0; c < 4; c++)
        for (int k = 0; k < 16; k++) d[c] += left[c / 2][k] * right[c % 2][k];
    emulation::wait(emulation::At::Warp, PRODUCT_LINE + 1);
}

DEVICE void load_matrices_any(uint32_t (&m)[4], const void* row, bool is_transposed) {
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0) emulation::fail("a row of a matrix is not aligned to 16 bytes");
    emulation::self().row = row;
    emulation::wait(emulation::At::Warp, MATRICES_LINE);
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int matrix = 0; matrix < 4; matrix++) {
        auto at = [&](int i, int j) { return uint32_t(static_cast<const uint16_t*>(emulation::peer(matrix * 8 + i).row)[j]); };
        m[matrix] = is_transposed ? at(2 * t, g) | at(2 * t + 1, g) << 16 : at(g, 2 * t) | at(g, 2 * t + 1) << 16;
    }
    emulation::wait(emulation::At::Warp, MATRICES_LINE + 1);
}
DEVICE void load_matrices(uint32_t (&m)[4], const void* row) { load_matrices_any(m, row, false); }
DEVICE void load_matrices_transposed(uint32_t (&m)[4], const void* row) { load_matrices_any(m, row, true); }

DEVICE void copy_ahead(void* to, const void* from, bool is_valid) {
    if (reinterpret_cast<uintptr_t>(to) % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0)
        emulation::fail("a copy is not aligned to 16 bytes");
    emulation::Copy copy{to, {}};
    if (is_valid) memcpy(copy.bytes, from, sizeof copy.bytes);
    if (emulation::schedule().copies_arrive_at_once) memcpy(to, copy.bytes, sizeof copy.bytes);
    else emulation::self().copies.back().push_back(copy);
}
DEVICE void end_copies() { emulation::self().copies.emplace_back(); }
template <int N>
DEVICE void wait_for_copies() {
    auto& groups = emulation::self().copies; // the last one is open
    while (int(groups.size()) - 1 > N) {
        for (const emulation::Copy& copy : groups.front()) memcpy(copy.to, copy.bytes, sizeof copy.bytes);
        groups.erase(groups.begin());
    }
}
