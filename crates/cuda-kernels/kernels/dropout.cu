// Dropout, alone and beside a residual; the activation of the feed-forward with its gate and dropout.
#include "random.h"

// A block has `ROWS` rows, which it reads at once, a column of each. All blocks are along x, because a grid has 65,535 at most along its
// other sides. A sequence has `positions` rows. Shared memory: a key (8 bytes) for each row of a block.
constexpr int ROWS = 4;

// The columns of a row that a thread has at once: one; four that follow each other; or two times four, PAIR apart, which share hashes.
template <int N>
struct Columns {
    static_assert(N == 1 || N == 4 || N == 8);
    static constexpr int TOGETHER = N == 8 ? 4 : N;

    // The first column of a thread, those of all threads being from `from` on.
    DEVICE static int first(int from) {
        const int thread = threadIdx.x;
        return from + (N == 8 ? thread / 2 * 16 + thread % 2 * 4 : thread * N);
    }
    template <class T>
    DEVICE static void read(const T* x, size_t at, float (&values)[N]) {
#pragma unroll
        for (int part = 0; part < N / TOGETHER; part++) {
            float some[TOGETHER];
            load<TOGETHER>(x, at + part * PAIR, some);
            for (int k = 0; k < TOGETHER; k++) values[part * TOGETHER + k] = some[k];
        }
    }
    template <class T>
    DEVICE static void write(T* y, size_t at, const float (&values)[N]) {
#pragma unroll
        for (int part = 0; part < N / TOGETHER; part++) {
            float some[TOGETHER];
            for (int k = 0; k < TOGETHER; k++) some[k] = values[part * TOGETHER + k];
            store<TOGETHER>(y, at + part * PAIR, some);
        }
    }
    // Which elements are kept, where those of the thread begin at column `i`.
    DEVICE static void kept(const Dropout& dropout, uint64_t key, int i, bool (&kept)[N]) {
        const RowHash row = row_hash(key);
#pragma unroll
        for (int k = 0; k < TOGETHER; k++) {
            if constexpr (N == 8) {
                const Pair pair = pair_kept(dropout, row, i + k);
                kept[k] = pair.first;
                kept[4 + k] = pair.second;
            } else {
                kept[k] = is_kept(dropout, row, i + k);
            }
        }
    }
};

// f(r, at, kept) for the rows r < R of a part of the block's rows, and for N columns of this thread; `load(r, at)` before. Here `at` is the
// first element. A thread beyond the last row or column loads the last or first, and has no f.
template <int N, int R, class L, class F>
DEVICE void each_of_rows(const Dropout& dropout, const uint32_t* samples, int rows, int positions, int width, L load, F f) {
    SHARED(uint64_t, keys);
    const int first = blockIdx.x * ROWS;
    const bool drops = dropout.threshold > 0;
    bool has_keys = !drops;
    for (int from = 0; from < width; from += blockDim.x * N) {
        const int i = Columns<N>::first(from), column = i < width ? i : 0;
#pragma unroll 1
        for (int part = 0; part < ROWS; part += R) {
#pragma unroll
            for (int r = 0; r < R; r++) load(r, size_t(min(first + part + r, rows - 1)) * width + column);
            // A key takes long: one thread computes it, while rows are on their way.
            if (!has_keys) {
                const int row = first + threadIdx.x;
                if (threadIdx.x < ROWS && row < rows)
                    keys[threadIdx.x] = row_key(dropout, samples[row / positions], row % positions);
                BARRIER();
                has_keys = true;
            }
            if (i >= width) continue;
#pragma unroll
            for (int r = 0; r < R; r++) {
                if (first + part + r >= rows) break;
                bool kept[N];
                if (drops) Columns<N>::kept(dropout, keys[part + r], i, kept);
                f(r, size_t(first + part + r) * width + i, kept);
            }
        }
    }
}

// Rows that a thread reads at once of each tensor, where that is `fewer` than it could.
template <int N>
constexpr int at_once(int fewer) { return (N == 8 ? ROWS / 2 : ROWS) / fewer; }

// y = residual + dropout(x); `residual` may be null.
template <int N, class T>
DEVICE void dropout_rows(const Dropout& dropout, const uint32_t* samples, const T* residual, const T* x, T* y, int rows, int positions,
                         int width) {
    constexpr int R = at_once<N>(1);
    float values[R][N], others[R][N];
    each_of_rows<N, R>(
        dropout, samples, rows, positions, width,
        [&](int r, size_t at) {
            Columns<N>::read(x, at, values[r]);
            if (residual) Columns<N>::read(residual, at, others[r]);
        },
        [&](int r, size_t at, const bool (&kept)[N]) {
#pragma unroll
            for (int k = 0; k < N; k++) {
                // The CPU rounds the product.
                if (dropout.threshold > 0) values[r][k] = kept[k] ? times(values[r][k], dropout.scale) : 0.0f;
                if (residual) values[r][k] = plus(others[r][k], values[r][k]);
            }
            Columns<N>::write(y, at, values[r]);
        });
}

// By how many columns a thread has.
#define BY_COLUMNS(function, width, tensors, ...) \
    if (in_fours tensors) { \
        if (width % 16 == 0) function<8>(__VA_ARGS__); \
        else function<4>(__VA_ARGS__); \
    } else { \
        function<1>(__VA_ARGS__); \
    }

#define DROPOUT(suffix, T) \
    KERNEL(256, dropout_##suffix, Dropout dropout, const uint32_t* samples, const T* residual, const T* x, T* y, int rows, int positions, \
           int width) { \
        BY_COLUMNS(dropout_rows, width, (width, residual, x, y), dropout, samples, residual, x, y, rows, positions, width) \
    }
DROPOUT(f32, float)
DROPOUT(bf16, bf16)

enum Activation { RELU, GELU_NEW, GELU, SILU };

// A kind that the compiler knows.
template <Activation KIND>
struct Kind {};

// The value and the derivative of an activation function at `x`.
template <Activation KIND>
DEVICE void activation(Kind<KIND>, float x, float& value, float& slope) {
    if constexpr (KIND == RELU) {
        // NaN stays NaN.
        value = x < 0.0f ? 0.0f : x;
        slope = x > 0.0f ? 1.0f : 0.0f;
    } else if constexpr (KIND == GELU) {
        const float cdf = 0.5f * (1.0f + erff(x * 0.70710678f));
        value = x * cdf;
        slope = cdf + x * 0.39894228f * expf(-0.5f * x * x);
    } else {
        // GELU by tanh is x s(2u) with the logistic function s, and SiLU is x s(x).
        const float square = x * x;
        const float inner = KIND == GELU_NEW ? 1.5957691f * x * (1.0f + 0.044715f * square) : x;
        const float of_inner = KIND == GELU_NEW ? 1.5957691f * (1.0f + 3.0f * 0.044715f * square) : 1.0f;
        const float sigmoid = 1.0f / (1.0f + expf(-inner));
        value = x * sigmoid;
        slope = sigmoid + value * (1.0f - sigmoid) * of_inner;
    }
}

// f(kind) of a kind that the compiler knows.
template <class F>
DEVICE void of_kind(int kind, F f) {
    switch (kind) {
    case RELU: return f(Kind<RELU>{});
    case GELU_NEW: return f(Kind<GELU_NEW>{});
    case GELU: return f(Kind<GELU>{});
    default: return f(Kind<SILU>{});
    }
}

// h = dropout(act(gate) * up); `up` may be null.
template <int N, class T>
DEVICE void activation_rows(int kind, const Dropout& dropout, const uint32_t* samples, const T* gate, const T* up, T* h, int rows,
                            int positions, int width) {
    constexpr int R = at_once<N>(1);
    float values[R][N], others[R][N];
    each_of_rows<N, R>(
        dropout, samples, rows, positions, width,
        [&](int r, size_t at) {
            Columns<N>::read(gate, at, values[r]);
            if (up) Columns<N>::read(up, at, others[r]);
        },
        [&](int r, size_t at, const bool (&kept)[N]) {
            of_kind(kind, [&](auto known) {
                float value, slope;
#pragma unroll
                for (int k = 0; k < N; k++) {
                    activation(known, values[r][k], value, slope);
                    if (up) value *= others[r][k];
                    if (dropout.threshold > 0) value = kept[k] ? value * dropout.scale : 0.0f;
                    values[r][k] = value;
                }
            });
            Columns<N>::write(h, at, values[r]);
        });
}

// The result of the forward in the memory of `gate`, the gradient of `gate` in that of `dh`, that of `up`, if there is one, in its own.
template <int N, class T>
DEVICE void activation_backward_rows(int kind, const Dropout& dropout, const uint32_t* samples, T* gate, T* up, T* dh, int rows,
                                     int positions, int width) {
    constexpr int R = at_once<N>(2);
    float values[R][N], others[R][N], gradients[R][N];
    each_of_rows<N, R>(
        dropout, samples, rows, positions, width,
        [&](int r, size_t at) {
            Columns<N>::read(gate, at, values[r]);
            Columns<N>::read(dh, at, gradients[r]);
            if (up) Columns<N>::read(up, at, others[r]);
        },
        [&](int r, size_t at, const bool (&kept)[N]) {
            of_kind(kind, [&](auto known) {
                float value, slope;
#pragma unroll
                for (int k = 0; k < N; k++) {
                    const float factor = dropout.threshold == 0 ? 1.0f : kept[k] ? dropout.scale : 0.0f;
                    const float gradient = gradients[r][k] * factor, beside = up ? others[r][k] : 1.0f;
                    activation(known, values[r][k], value, slope);
                    values[r][k] = value * beside * factor;
                    gradients[r][k] = gradient * beside * slope;
                    others[r][k] = gradient * value;
                }
            });
            Columns<N>::write(gate, at, values[r]);
            Columns<N>::write(dh, at, gradients[r]);
            if (up) Columns<N>::write(up, at, others[r]);
        });
}

#define ACTIVATION(suffix, T) \
    KERNEL(256, activation_##suffix, int kind, Dropout dropout, const uint32_t* samples, const T* gate, const T* up, T* h, int rows, \
           int positions, int width) { \
        BY_COLUMNS(activation_rows, width, (width, gate, up, h), kind, dropout, samples, gate, up, h, rows, positions, width) \
    } \
    KERNEL(256, activation_backward_##suffix, int kind, Dropout dropout, const uint32_t* samples, T* gate, T* up, T* dh, int rows, \
           int positions, int width) { \
        BY_COLUMNS(activation_backward_rows, width, (width, gate, up, dh), kind, dropout, samples, gate, up, dh, rows, positions, width) \
    }
ACTIVATION(f32, float)
ACTIVATION(bf16, bf16)
