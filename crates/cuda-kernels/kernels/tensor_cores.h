// Products of small matrices on tensor cores, and copies into shared memory that run while threads compute: Ampere and later.
//
// A warp multiplies a (16, 16) and b (16, 8), bf16, and adds to d (16, 8), f32. Let g = lane / 4 and t = lane % 4.
// Of d, a lane has rows g and g + 8, columns 2t and 2t + 1: d[0], d[1] of the first row, d[2], d[3] of the second.
// Of a, it has pairs: a[0] row g and columns 2t, 2t + 1; a[1] row g + 8; a[2], a[3] the same rows, 8 columns further.
// Of b, it has rows 2t, 2t + 1 and 8 rows further, of column g.
#pragma once
#include "device.h"

#ifdef __CUDACC__
DEVICE uint32_t shared_address(const void* at) { return uint32_t(__cvta_generic_to_shared(at)); }

DEVICE void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Loads four matrices (8, 8) of bf16 from shared memory. Lane i gives the address of row i % 8 of matrix i / 8, a multiple of 16 bytes.
// From each matrix it gets row g, columns 2t and 2t + 1.
DEVICE void load_matrices(uint32_t (&m)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address(row)));
}
// Loads the transposed matrices in the same way.
DEVICE void load_matrices_transposed(uint32_t (&m)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address(row)));
}
// Begins to copy 16 bytes to shared memory, or zeros if they are not valid. Both addresses are multiples of 16.
DEVICE void copy_ahead(void* to, const void* from, bool is_valid) {
    const int bytes = is_valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
}
// Ends a group of this thread's copies.
DEVICE void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N of this thread's groups are in flight. Other threads see its copies after a barrier.
template <int N>
DEVICE void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
#else
#include "../emulation/tensor_cores.h"
#endif
