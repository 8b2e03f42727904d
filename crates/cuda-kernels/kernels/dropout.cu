// Dropout, alone and beside a residual; the activation of the feed-forward with its gate and dropout.
#include "random.h"

// A block a row. All are along x, because a grid has 65,535 blocks at most along its other sides. A sequence has `positions` rows.

// The key of the row of this block. Where nothing is dropped there are no samples.
DEVICE uint64_t key_of_block(const Dropout& dropout, const uint32_t* samples, int positions) {
    return dropout.threshold > 0 ? row_key(dropout, samples[blockIdx.x / positions], blockIdx.x % positions) : 0;
}

// y = residual + dropout(x); `residual` may be null.
template <int N, class T>
DEVICE void dropout_row(const Dropout& dropout, const uint32_t* samples, const T* residual, const T* x, T* y, int positions,
                        int width) {
    const size_t at = size_t(blockIdx.x) * width;
    const uint64_t key = key_of_block(dropout, samples, positions);
    float values[N], others[N];
    for (int i = threadIdx.x * N; i < width; i += blockDim.x * N) {
        load<N>(x, at + i, values);
        if (residual) load<N>(residual, at + i, others);
        for (int k = 0; k < N; k++) {
            // The CPU rounds the product.
            if (dropout.threshold > 0) values[k] = times(values[k], factor(dropout, key, i + k));
            if (residual) values[k] = plus(others[k], values[k]);
        }
        store<N>(y, at + i, values);
    }
}

#define DROPOUT(suffix, T) \
    KERNEL(256, dropout_##suffix, Dropout dropout, const uint32_t* samples, const T* residual, const T* x, T* y, int positions, \
           int width) { \
        if (in_fours(width, residual, x, y)) dropout_row<4>(dropout, samples, residual, x, y, positions, width); \
        else dropout_row<1>(dropout, samples, residual, x, y, positions, width); \
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
DEVICE void activation_row(int kind, const Dropout& dropout, const uint32_t* samples, const T* gate, const T* up, T* h, int positions,
                           int width) {
    const size_t at = size_t(blockIdx.x) * width;
    const uint64_t key = key_of_block(dropout, samples, positions);
    float values[N], others[N], value, slope;
    for (int i = threadIdx.x * N; i < width; i += blockDim.x * N) {
        load<N>(gate, at + i, values);
        if (up) load<N>(up, at + i, others);
        for (int k = 0; k < N; k++) {
            activation(kind, values[k], value, slope);
            if (up) value *= others[k];
            values[k] = dropout.threshold > 0 ? value * factor(dropout, key, i + k) : value;
        }
        store<N>(h, at + i, values);
    }
}

// The result of the forward in the memory of `gate`, the gradient of `gate` in that of `dh`, that of `up`, if there is one, in its own.
template <int N, class T>
DEVICE void activation_backward_row(int kind, const Dropout& dropout, const uint32_t* samples, T* gate, T* up, T* dh, int positions,
                                    int width) {
    const size_t at = size_t(blockIdx.x) * width;
    const uint64_t key = key_of_block(dropout, samples, positions);
    float values[N], others[N], gradients[N], value, slope;
    for (int i = threadIdx.x * N; i < width; i += blockDim.x * N) {
        load<N>(gate, at + i, values);
        load<N>(dh, at + i, gradients);
        if (up) load<N>(up, at + i, others);
        for (int k = 0; k < N; k++) {
            const float kept = dropout.threshold > 0 ? factor(dropout, key, i + k) : 1.0f;
            const float gradient = gradients[k] * kept, beside = up ? others[k] : 1.0f;
            activation(kind, values[k], value, slope);
            values[k] = value * beside * kept;
            gradients[k] = gradient * beside * slope;
            others[k] = gradient * value;
        }
        store<N>(gate, at + i, values);
        store<N>(dh, at + i, gradients);
        if (up) store<N>(up, at + i, others);
    }
}

#define ACTIVATION(suffix, T) \
    KERNEL(256, activation_##suffix, int kind, Dropout dropout, const uint32_t* samples, const T* gate, const T* up, T* h, int positions, \
           int width) { \
        if (in_fours(width, gate, up, h)) activation_row<4>(kind, dropout, samples, gate, up, h, positions, width); \
        else activation_row<1>(kind, dropout, samples, gate, up, h, positions, width); \
    } \
    KERNEL(256, activation_backward_##suffix, int kind, Dropout dropout, const uint32_t* samples, T* gate, T* up, T* dh, int positions, \
           int width) { \
        if (in_fours(width, gate, up, dh)) activation_backward_row<4>(kind, dropout, samples, gate, up, dh, positions, width); \
        else activation_backward_row<1>(kind, dropout, samples, gate, up, dh, positions, width); \
    }
ACTIVATION(f32, float)
ACTIVATION(bf16, bf16)
