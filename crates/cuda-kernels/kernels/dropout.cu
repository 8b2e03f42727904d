// Dropout, alone and with a residual; the activation of the feed-forward with its gate and dropout.
#include "random.h"

// A block has `ROWS` rows, and reads a column of each at once. All blocks are along x, because a grid has at most 65,535 along its other
// sides. A sequence has `positions` rows. Shared memory: a key (8 bytes) for each row of a block.
constexpr int ROWS = 4;

// The columns of a row that a thread has at once: one; four contiguous ones; or two times four, PAIR apart, which share hashes.
template <int N>
struct Columns {
    static_assert(N == 1 || N == 4 || N == 8);
    static constexpr int TOGETHER = N == 8 ? 4 : N, PARTS = N / TOGETHER;

    // The first column of this thread, where the columns of all threads begin at `from`.
    DEVICE static int first(int from) {
        const int thread = threadIdx.x;
        return from + (N == 8 ? thread / 2 * 16 + thread % 2 * 4 : thread * N);
    }
    // The columns as they lie in memory.
    template <class T>
    struct Row {
        Packed<TOGETHER, T> parts[PARTS];
    };
    template <class T>
    DEVICE static void read(const T* x, size_t at, Row<T>& row) {
#pragma unroll
        for (int part = 0; part < PARTS; part++) row.parts[part] = packed<TOGETHER>(x, at + part * PAIR);
    }
    // Writes a part of the columns from `at` on if the thread `is_inside`, or all of them with the last part. Two threads have 16
    // contiguous bf16: they exchange four, so that each writes eight at once. Writing fewer bytes takes as long. All threads of a warp take
    // part.
    template <class T>
    DEVICE static void write(T* y, size_t at, const Row<T>& row, int part, bool is_inside) {
        if constexpr (N == 8 && sizeof(T) == 2) {
            if (part < PARTS - 1) return;
            const bool is_second = threadIdx.x % 2;
            EightNarrow eight;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t first = row.parts[0].x[i], last = row.parts[1].x[i];
                const uint32_t other = shuffle_xor(is_second ? first : last, 1);
                eight.x[i] = is_second ? other : first;
                eight.x[2 + i] = is_second ? last : other;
            }
            if (is_inside) *together_at<EightNarrow>(y + at + (is_second ? 4 : 0)) = eight;
        } else if (is_inside) {
            *together_at<Packed<TOGETHER, T>>(y + at + part * PAIR) = row.parts[part];
        }
    }
    // The numbers that decide which elements are kept (`half_hash`), for the thread's columns from `i` on.
    DEVICE static void hash(uint64_t key, int i, uint32_t (&hashes)[N]) {
        const RowHash row = row_hash(key);
#pragma unroll
        for (int k = 0; k < TOGETHER; k++) {
            hashes[k] = half_hash(row, i + k);
            if constexpr (N == 8) {
                hashes[k] = upper_hash(row, i + k);
                hashes[4 + k] = lower_hash(hashes[k]);
            }
        }
    }
};

// Calls f(item, at, hashes, is_inside) for rows of the block, and for N columns of this thread from element `at` on. The item is the result
// of `load(at)`: rows as they lie in memory. A thread loads the next item before it works on the current one. After the last row it loads
// the last row, and after the last column the first column. All threads of a warp call f. A thread after the last column is not inside, and
// writes nothing.
template <int N, class L, class F>
DEVICE void each_of_rows(const Dropout& dropout, const uint32_t* samples, int rows, int positions, int width, L load, F f) {
    SHARED(uint64_t, keys);
    const int first = blockIdx.x * ROWS;
    const bool drops = dropout.threshold > 0;
    const auto load_of = [&](int from, int row) {
        const int i = Columns<N>::first(from), column = i < width ? i : 0;
        return load(size_t(min(first + row, rows - 1)) * width + column);
    };
    auto next = load_of(0, 0);
    if (drops) {
        // A key takes long: one thread for each row computes it, while rows are in flight.
        const int row = first + threadIdx.x;
        if (threadIdx.x < ROWS && row < rows) keys[threadIdx.x] = row_key(dropout, samples[row / positions], row % positions);
        BARRIER();
    }
#pragma unroll 1
    for (int from = 0, row = 0; from < width;) {
        const auto item = next;
        const int i = Columns<N>::first(from), own = row++;
        if (row == ROWS) row = 0, from += blockDim.x * N;
        if (from < width) next = load_of(from, row);
        if (first + own >= rows) continue;
        uint32_t hashes[N];
        if (drops) Columns<N>::hash(keys[own], i, hashes);
        f(item, size_t(first + own) * width + i, hashes, i < width);
    }
}

// y = residual + dropout(x); `residual` may be null.
template <int N, class T>
DEVICE void dropout_rows(const Dropout& dropout, const uint32_t* samples, const T* residual, const T* x, T* y, int rows, int positions,
                         int width) {
    struct Item {
        typename Columns<N>::template Row<T> x, residual;
    };
    each_of_rows<N>(
        dropout, samples, rows, positions, width,
        [&](size_t at) {
            Item item;
            Columns<N>::read(x, at, item.x);
            if (residual) Columns<N>::read(residual, at, item.residual);
            return item;
        },
        [&](const Item& item, size_t at, const uint32_t (&hashes)[N], bool is_inside) {
            constexpr int COUNT = Columns<N>::TOGETHER;
            typename Columns<N>::template Row<T> result;
#pragma unroll
            for (int part = 0; part < Columns<N>::PARTS; part++) {
                float values[COUNT], others[COUNT];
                unpack(item.x.parts[part], values);
                // The CPU rounds the product.
                if (dropout.threshold > 0)
                    for (int k = 0; k < COUNT; k++)
                        values[k] = hashes[part * COUNT + k] >= dropout.threshold ? times(values[k], dropout.scale) : 0.0f;
                if (residual) {
                    unpack(item.residual.parts[part], others);
                    for (int k = 0; k < COUNT; k++) values[k] = plus(others[k], values[k]);
                }
                repack(values, result.parts[part]);
                Columns<N>::write(y, at, result, part, is_inside);
            }
        });
}

// Whether rows can be written 16 bytes at a time, eight columns to a thread.
template <class... T>
DEVICE bool in_eights(int width, const T*... rows) {
    return width % 16 == 0 && ((reinterpret_cast<size_t>(rows) % 16 == 0) && ...);
}

// Chooses the function by the columns of a thread.
#define BY_COLUMNS(function, width, tensors, ...) \
    if (in_eights tensors) function<8>(__VA_ARGS__); \
    else if (in_fours tensors) function<4>(__VA_ARGS__); \
    else function<1>(__VA_ARGS__);

#define DROPOUT(suffix, T, blocks) \
    KERNEL_OF_BLOCKS(256, blocks, dropout_##suffix, Dropout dropout, const uint32_t* samples, const T* residual, const T* x, T* y, \
                     int rows, int positions, int width) { \
        BY_COLUMNS(dropout_rows, width, (width, residual, x, y), dropout, samples, residual, x, y, rows, positions, width) \
    }
DROPOUT(f32, float, 4)
DROPOUT(bf16, bf16, 6)

enum Activation { RELU, GELU_NEW, GELU, SILU };

// An activation that is a constant for the compiler.
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

// Calls f(kind) with a kind that is a constant for the compiler.
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
    struct Item {
        typename Columns<N>::template Row<T> gate, up;
    };
    each_of_rows<N>(
        dropout, samples, rows, positions, width,
        [&](size_t at) {
            Item item;
            Columns<N>::read(gate, at, item.gate);
            if (up) Columns<N>::read(up, at, item.up);
            return item;
        },
        [&](const Item& item, size_t at, const uint32_t (&hashes)[N], bool is_inside) {
            constexpr int COUNT = Columns<N>::TOGETHER;
            of_kind(kind, [&](auto known) {
                typename Columns<N>::template Row<T> result;
#pragma unroll
                for (int part = 0; part < Columns<N>::PARTS; part++) {
                    float values[COUNT], others[COUNT], value, slope;
                    unpack(item.gate.parts[part], values);
                    if (up) unpack(item.up.parts[part], others);
#pragma unroll
                    for (int k = 0; k < COUNT; k++) {
                        activation(known, values[k], value, slope);
                        if (up) value *= others[k];
                        if (dropout.threshold > 0)
                            value = hashes[part * COUNT + k] >= dropout.threshold ? value * dropout.scale : 0.0f;
                        values[k] = value;
                    }
                    repack(values, result.parts[part]);
                    Columns<N>::write(h, at, result, part, is_inside);
                }
            });
        });
}

// Writes the forward's result to the memory of `gate`, the gradient of `gate` to the memory of `dh`, and the gradient of `up`, if any, to
// its own.
template <int N, class T>
DEVICE void activation_backward_rows(int kind, const Dropout& dropout, const uint32_t* samples, T* gate, T* up, T* dh, int rows,
                                     int positions, int width) {
    struct Item {
        typename Columns<N>::template Row<T> gate, up, dh;
    };
    each_of_rows<N>(
        dropout, samples, rows, positions, width,
        [&](size_t at) {
            Item item;
            Columns<N>::read(gate, at, item.gate);
            Columns<N>::read(dh, at, item.dh);
            if (up) Columns<N>::read(up, at, item.up);
            return item;
        },
        [&](const Item& item, size_t at, const uint32_t (&hashes)[N], bool is_inside) {
            constexpr int COUNT = Columns<N>::TOGETHER;
            of_kind(kind, [&](auto known) {
                Item results;
#pragma unroll
                for (int part = 0; part < Columns<N>::PARTS; part++) {
                    float values[COUNT], others[COUNT], gradients[COUNT], value, slope;
                    unpack(item.gate.parts[part], values);
                    unpack(item.dh.parts[part], gradients);
                    if (up) unpack(item.up.parts[part], others);
#pragma unroll
                    for (int k = 0; k < COUNT; k++) {
                        const bool is_kept = hashes[part * COUNT + k] >= dropout.threshold;
                        const float factor = dropout.threshold == 0 ? 1.0f : is_kept ? dropout.scale : 0.0f;
                        const float gradient = gradients[k] * factor, beside = up ? others[k] : 1.0f;
                        activation(known, values[k], value, slope);
                        values[k] = value * beside * factor;
                        gradients[k] = gradient * beside * slope;
                        others[k] = gradient * value;
                    }
                    repack(values, results.gate.parts[part]);
                    repack(gradients, results.dh.parts[part]);
                    Columns<N>::write(gate, at, results.gate, part, is_inside);
                    Columns<N>::write(dh, at, results.dh, part, is_inside);
                    if (!up) continue;
                    repack(others, results.up.parts[part]);
                    Columns<N>::write(up, at, results.up, part, is_inside);
                }
            });
        });
}

#define ACTIVATION(suffix, T) \
    KERNEL(256, activation_##suffix, int kind, Dropout dropout, const uint32_t* samples, const T* gate, const T* up, T* h, int rows, \
           int positions, int width) { \
        BY_COLUMNS(activation_rows, width, (width, gate, up, h), kind, dropout, samples, gate, up, h, rows, positions, width) \
    } \
    KERNEL_OF_BLOCKS(256, 3, activation_backward_##suffix, int kind, Dropout dropout, const uint32_t* samples, T* gate, T* up, T* dh, int rows, \
           int positions, int width) { \
        BY_COLUMNS(activation_backward_rows, width, (width, gate, up, dh), kind, dropout, samples, gate, up, dh, rows, positions, width) \
    }
ACTIVATION(f32, float)
ACTIVATION(bf16, bf16)
