// cuBLAS's products on the host, by columns as there: operands of f32, f64 or bf16, sums in f32 (f64 for f64).
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <vector>

#include "../kernels/device.h"
#include "streams.h"

// Products so far, which the driver reports.
size_t products = 0;

extern "C" {
int cuMemAllocAsync(unsigned long long* to, size_t bytes, void* stream);
int cuMemFreeAsync(unsigned long long at, void* stream);
}

namespace {

enum : int { F32 = 0, F64 = 1, BF16 = 14 }; // cudaDataType
constexpr int NOT_SUPPORTED = 15, FAILED = 13;
constexpr size_t WORKSPACE = 4 << 20;

struct Handle {
    void* stream = nullptr;
    bool has_workspace = false; // of the caller
};

template <class T>
struct Sum {
    using Type = float;
};
template <>
struct Sum<double> {
    using Type = double;
};
double to_number(double x) { return x; }
float to_number(float x) { return x; }
float to_number(bf16 x) { return to_float(x); }
void from_number(double& to, double x) { to = x; }
void from_number(float& to, float x) { to = x; }
void from_number(bf16& to, float x) { from_float(to, x); }

// c (m, n) = alpha a (m, k) b (k, n) + beta c; a transposed operand is (k, m) or (n, k) in memory.
template <class T, class R>
void multiply(bool a_is_transposed, bool b_is_transposed, int m, int n, int k, double alpha, const T* a, int lda, const T* b, int ldb,
              double beta, R* c, int ldc) {
    using S = typename Sum<T>::Type;
    // Columns of a, contiguous, so that the innermost loop goes along them.
    std::vector<S> columns(size_t(m) * k), sums(m);
    for (int l = 0; l < k; l++)
        for (int i = 0; i < m; i++) columns[size_t(l) * m + i] = to_number(a_is_transposed ? a[l + size_t(i) * lda] : a[i + size_t(l) * lda]);
    for (int j = 0; j < n; j++) {
        std::fill(sums.begin(), sums.end(), S(0));
        for (int l = 0; l < k; l++) {
            const S factor = to_number(b_is_transposed ? b[j + size_t(l) * ldb] : b[l + size_t(j) * ldb]);
            const S* column = columns.data() + size_t(l) * m;
            for (int i = 0; i < m; i++) sums[i] += factor * column[i];
        }
        for (int i = 0; i < m; i++) {
            R& to = c[i + size_t(j) * ldc];
            // Without a factor it is not read: it may be no number.
            const S before = beta != 0 ? S(beta) * S(to_number(to)) : S(0);
            from_number(to, S(alpha) * sums[i] + before);
        }
    }
}

} // namespace

extern "C" {

int cublasCreate_v2(void** handle) {
    *handle = new Handle;
    return 0;
}
int cublasDestroy_v2(void* handle) {
    delete static_cast<Handle*>(handle);
    return 0;
}
// Another stream has the workspace of the library.
int cublasSetStream_v2(void* handle, void* stream) {
    *static_cast<Handle*>(handle) = {stream, false};
    return 0;
}
int cublasSetWorkspace_v2(void* handle, void* workspace, size_t bytes) {
    static_cast<Handle*>(handle)->has_workspace = workspace && bytes > 0;
    return 0;
}
int cublasSetMathMode(void*, int) { return 0; }

int cublasGemmStridedBatchedEx(void* handle, int transa, int transb, int m, int n, int k, const void* alpha, const void* a, int type_a, int lda,
                               long long stride_a, const void* b, int type_b, int ldb, long long stride_b, const void* beta, void* c,
                               int type_c, int ldc, long long stride_c, int batch, int, int) {
    if (type_a != type_b) return NOT_SUPPORTED;
    const Handle& h = *static_cast<Handle*>(handle);
    unsigned long long workspace = 0;
    // A capture that has no workspace of the caller's gets memory of its own for one.
    if (!emulation::capture_of(h.stream)) products++;
    else if (!h.has_workspace && (cuMemAllocAsync(&workspace, WORKSPACE, h.stream) || cuMemFreeAsync(workspace, h.stream))) return FAILED;
    auto run = [&](auto* of, auto* to, auto scalar) {
        using T = std::remove_pointer_t<decltype(of)>;
        using R = std::remove_pointer_t<decltype(to)>;
        using A = decltype(scalar);
        // The host's scalars are read before the call returns.
        const double by = *static_cast<const A*>(alpha), with = *static_cast<const A*>(beta);
        emulation::give(h.stream, [=] {
            for (int i = 0; i < batch; i++)
                multiply(transa != 0, transb != 0, m, n, k, by, static_cast<const T*>(a) + i * stride_a, lda,
                         static_cast<const T*>(b) + i * stride_b, ldb, with, static_cast<R*>(c) + i * stride_c, ldc);
        });
    };
    if (type_a == F32 && type_c == F32) run((float*)0, (float*)0, 0.0f);
    else if (type_a == BF16 && type_c == BF16) run((bf16*)0, (bf16*)0, 0.0f);
    else if (type_a == BF16 && type_c == F32) run((bf16*)0, (float*)0, 0.0f);
    else if (type_a == F64 && type_c == F64) run((double*)0, (double*)0, 0.0);
    else return NOT_SUPPORTED;
    return 0;
}

int cublasGemmEx(void* handle, int transa, int transb, int m, int n, int k, const void* alpha, const void* a, int type_a, int lda,
                 const void* b, int type_b, int ldb, const void* beta, void* c, int type_c, int ldc, int compute, int algorithm) {
    return cublasGemmStridedBatchedEx(handle, transa, transb, m, n, k, alpha, a, type_a, lda, 0, b, type_b, ldb, 0, beta, c, type_c, ldc,
                                      0, 1, compute, algorithm);
}

int cublasDgemmStridedBatched(void* handle, int transa, int transb, int m, int n, int k, const double* alpha, const double* a, int lda,
                              long long stride_a, const double* b, int ldb, long long stride_b, const double* beta, double* c, int ldc,
                              long long stride_c, int batch) {
    return cublasGemmStridedBatchedEx(handle, transa, transb, m, n, k, alpha, a, F64, lda, stride_a, b, F64, ldb, stride_b, beta, c, F64,
                                      ldc, stride_c, batch, 0, 0);
}

}
