// Dropout, alone and beside a residual; the activation of the feed-forward with its gate and dropout.
#include "random.h"

// A block has `ROWS` rows, which it reads at once, a column of each. All blocks are along x, because a grid has 65,535 at most along its
// other sides. A sequence has `positions` rows. Shared memory: a key (8 bytes) for each row of a block.
constexpr int ROWS = 4;

// f(r, at, i, key) for the rows r < R of a part of the block's rows, from `first`, and for columns i that this thread has, as many as it
// loads together; `load(r, at)` before. Here `at` is the element. A thread beyond the last row or column loads the last, and has no f.
template <int N, int R, class L, class F>
DEVICE void each_of_rows(const Dropout& dropout, const uint32_t* samples, int rows, int positions, int width, L load, F f) {
    SHARED(uint64_t, keys);
    const int first = blockIdx.x * ROWS;
    const bool drops = dropout.threshold > 0;
    bool has_keys = !drops;
    for (int from = 0; from < width; from += blockDim.x * N) {
        const int i = from + threadIdx.x * N, column = min(i, width - N);
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
            for (int r = 0; r < R; r++)
                if (first + part + r < rows)
                    f(r, size_t(first + part + r) * width + i, i, drops ? keys[part + r] : 0);
        }
    }
}

// y = residual + dropout(x); `residual` may be null.
template <int N, class T>
DEVICE void dropout_rows(const Dropout& dropout, const uint32_t* samples, const T* residual, const T* x, T* y, int rows, int positions,
                         int width) {
    float values[ROWS][N], others[ROWS][N];
    each_of_rows<N, ROWS>(
        dropout, samples, rows, positions, width,
        [&](int r, size_t at) {
            load<N>(x, at, values[r]);
            if (residual) load<N>(residual, at, others[r]);
        },
        [&](int r, size_t at, int i, uint64_t key) {
            for (int k = 0; k < N; k++) {
                // The CPU rounds the product.
                if (dropout.threshold > 0) values[r][k] = times(values[r][k], factor(dropout, key, i + k));
                if (residual) values[r][k] = plus(others[r][k], values[r][k]);
            }
            store<N>(y, at, values[r]);
        });
}

#define DROPOUT(suffix, T) \
    KERNEL(256, dropout_##suffix, Dropout dropout, const uint32_t* samples, const T* residual, const T* x, T* y, int rows, int positions, \
           int width) { \
        if (in_fours(width, residual, x, y)) dropout_rows<4>(dropout, samples, residual, x, y, rows, positions, width); \
        else dropout_rows<1>(dropout, samples, residual, x, y, rows, positions, width); \
    }
DROPOUT(f32, float)
DROPOUT(bf16, bf16)

enum Activation { RELU, GELU_NEW, GELU, SILU };

// The value and the derivative of an activation function at `x`.
DEVICE void activation(int kind, float x, float& value, float& slope) {
    if (kind == RELU) {
        // NaN stays NaN.
        value = x < 0.0f ? 0.0f : x;
        slope = x > 0.0f ? 1.0f : 0.0f;
    } else if (kind == GELU) {
        const float cdf = 0.5f * (1.0f + erff(x * 0.70710678f));
        value = x * cdf;
        slope = cdf + x * 0.39894228f * expf(-0.5f * x * x);
    } else {
        // GELU by tanh is x s(2u) with the logistic function s, and SiLU is x s(x).
        const float square = x * x;
        const float inner = kind == GELU_NEW ? 1.5957691f * x * (1.0f + 0.044715f * square) : x;
        const float of_inner = kind == GELU_NEW ? 1.5957691f * (1.0f + 3.0f * 0.044715f * square) : 1.0f;
        const float sigmoid = 1.0f / (1.0f + expf(-inner));
        value = x * sigmoid;
        slope = sigmoid + value * (1.0f - sigmoid) * of_inner;
    }
}

// h = dropout(act(gate) * up); `up` may be null.
template <int N, class T>
DEVICE void activation_rows(int kind, const Dropout& dropout, const uint32_t* samples, const T* gate, const T* up, T* h, int rows,
                            int positions, int width) {
    float values[ROWS][N], others[ROWS][N];
    each_of_rows<N, ROWS>(
        dropout, samples, rows, positions, width,
        [&](int r, size_t at) {
            load<N>(gate, at, values[r]);
            if (up) load<N>(up, at, others[r]);
        },
        [&](int r, size_t at, int i, uint64_t key) {
            float value, slope;
            for (int k = 0; k < N; k++) {
                activation(kind, values[r][k], value, slope);
                if (up) value *= others[r][k];
                values[r][k] = dropout.threshold > 0 ? value * factor(dropout, key, i + k) : value;
            }
            store<N>(h, at, values[r]);
        });
}

// The result of the forward in the memory of `gate`, the gradient of `gate` in that of `dh`, that of `up`, if there is one, in its own.
template <int N, class T>
DEVICE void activation_backward_rows(int kind, const Dropout& dropout, const uint32_t* samples, T* gate, T* up, T* dh, int rows,
                                     int positions, int width) {
    constexpr int R = ROWS / 2;
    float values[R][N], others[R][N], gradients[R][N];
    each_of_rows<N, R>(
        dropout, samples, rows, positions, width,
        [&](int r, size_t at) {
            load<N>(gate, at, values[r]);
            load<N>(dh, at, gradients[r]);
            if (up) load<N>(up, at, others[r]);
        },
        [&](int r, size_t at, int i, uint64_t key) {
            float value, slope;
            for (int k = 0; k < N; k++) {
                const float kept = dropout.threshold > 0 ? factor(dropout, key, i + k) : 1.0f;
                const float gradient = gradients[r][k] * kept, beside = up ? others[r][k] : 1.0f;
                activation(kind, values[r][k], value, slope);
                values[r][k] = value * beside * kept;
                gradients[r][k] = gradient * beside * slope;
                others[r][k] = gradient * value;
            }
            store<N>(gate, at, values[r]);
            store<N>(dh, at, gradients[r]);
            if (up) store<N>(up, at, others[r]);
        });
}

#define ACTIVATION(suffix, T) \
    KERNEL(256, activation_##suffix, int kind, Dropout dropout, const uint32_t* samples, const T* gate, const T* up, T* h, int rows, \
           int positions, int width) { \
        if (in_fours(width, gate, up, h)) activation_rows<4>(kind, dropout, samples, gate, up, h, rows, positions, width); \
        else activation_rows<1>(kind, dropout, samples, gate, up, h, rows, positions, width); \
    } \
    KERNEL(256, activation_backward_##suffix, int kind, Dropout dropout, const uint32_t* samples, T* gate, T* up, T* dh, int rows, \
           int positions, int width) { \
        if (in_fours(width, gate, up, dh)) activation_backward_rows<4>(kind, dropout, samples, gate, up, dh, rows, positions, width); \
        else activation_backward_rows<1>(kind, dropout, samples, gate, up, dh, rows, positions, width); \
    }
ACTIVATION(f32, float)
ACTIVATION(bf16, bf16)
