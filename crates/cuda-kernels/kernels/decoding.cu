// Generation: the likeliest next tokens, the cache of keys and values, and attention of few queries over it.
#include "attention.h"

// Choosing tokens. Logits are (rows, width); a block works on a row of them, and each warp has an element of `shared`.

// A token and the key that tokens are compared by.
struct Choice {
    float key;
    uint32_t token;
};
// Comes after every token.
DEVICE Choice no_choice() { return {-INFINITY, 0xFFFFFFFFu}; }

// The larger key comes first, and with equal keys the first token.
DEVICE bool is_before(Choice a, Choice b) { return a.key > b.key || (a.key == b.key && a.token < b.token); }

// Returns the first choice of a block, in every thread of the block.
DEVICE Choice block_first(Choice own, Choice* shared) {
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) {
        const Choice other{shuffle_xor(own.key, lanes), shuffle_xor(own.token, lanes)};
        if (is_before(other, own)) own = other;
    }
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = own;
    BARRIER();
    for (int warp = 0; warp < int(blockDim.x) / WARP; warp++)
        if (is_before(shared[warp], own)) own = shared[warp];
    BARRIER();
    return own;
}

// The index of the largest logit of each row. NaN is skipped; if all are NaN, the index is 0.
template <class T>
DEVICE void largest(const T* logits, uint32_t* tokens, int width) {
    SHARED(Choice, shared);
    const T* row = logits + size_t(blockIdx.x) * width;
    Choice best = no_choice();
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const float x = to_float(row[i]);
        if (x > best.key) best = {x, uint32_t(i)};
    }
    best = block_first(best, shared);
    if (threadIdx.x == 0) tokens[blockIdx.x] = best.token < uint32_t(width) ? best.token : 0;
}

// The logarithm of the sum of a row's exponentials.
template <class T>
DEVICE float log_sum(const T* row, int width, float* shared) {
    float most = -INFINITY, sum = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) most = fmaxf(most, to_float(row[i]));
    most = block_max(most, shared);
    for (int i = threadIdx.x; i < width; i += blockDim.x) sum += expf(to_float(row[i]) - most);
    return most + logf(block_sum(sum, shared));
}

// The log-softmax of each row.
template <class T>
DEVICE void log_probabilities(const T* logits, float* to, int width) {
    SHARED(float, shared);
    const size_t first = size_t(blockIdx.x) * width;
    const float shift = log_sum(logits + first, width, shared);
    for (int i = threadIdx.x; i < width; i += blockDim.x) to[first + i] = to_float(logits[first + i]) - shift;
}

// The `count` likeliest tokens of each row and their log-probabilities, in order. Tokens are compared by the sum of their log-probability
// and the row's offset, in f32, in which small differences may vanish.
template <class T>
DEVICE void candidates(const T* logits, const float* offsets, uint32_t* tokens, float* scores, int width, int count) {
    SHARED(Choice, shared);
    const T* row = logits + size_t(blockIdx.x) * width;
    const float shift = log_sum(row, width, reinterpret_cast<float*>(shared)), offset = offsets[blockIdx.x];
    Choice last = no_choice();
    for (int place = 0; place < count; place++) {
        Choice best = no_choice();
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            const float score = to_float(row[i]) - shift;
            const Choice own{score != score ? -INFINITY : score + offset, uint32_t(i)};
            if ((place == 0 || is_before(last, own)) && is_before(own, best)) best = own;
        }
        last = block_first(best, shared);
        if (threadIdx.x > 0) continue;
        tokens[size_t(blockIdx.x) * count + place] = last.token;
        scores[size_t(blockIdx.x) * count + place] = to_float(row[last.token]) - shift;
    }
}

// The cache, (rows, capacity, width).

// A recorded launch reads a position from memory, which changes between launches: it is added to the position argument.
DEVICE int moved(const uint32_t* position) { return position ? int(*position) : 0; }

// Writes keys and values (rows, width) at a position of both caches: a block works on a row, of keys or of values.
template <class T>
DEVICE void append(const T* keys, const T* values, T* key_cache, T* value_cache, int capacity, int width, int position, const uint32_t* at) {
    position += moved(at);
    const T* from = (blockIdx.y == 0 ? keys : values) + size_t(blockIdx.x) * width;
    T* to = (blockIdx.y == 0 ? key_cache : value_cache) + (size_t(blockIdx.x) * capacity + position) * width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) to[i] = from[i];
}

// Copies the first `count` elements of rows, which are `row` apart, over those of other rows: pairs of numbers, from and to. No row is both
// copied from and copied to. Blocks of one pair lie along y.
template <class T>
DEVICE void copy_rows(const uint32_t* pairs, T* cache, int64_t row, int64_t count) {
    const T* from = cache + pairs[2 * blockIdx.x] * row;
    T* to = cache + pairs[2 * blockIdx.x + 1] * row;
    for (int64_t i = blockIdx.y * blockDim.x + threadIdx.x; i < count; i += gridDim.y * blockDim.x) to[i] = from[i];
}

// Attention of few queries, without dropout: a block has one query of one head. Its warps take keys in turn, four at a time.
// Without `lengths` each sequence has `length` keys plus the position `at`. The bias moves to the left by that position. Rows of the bias
// are `bias_row` apart.
// Shared memory, f32, for each warp: the head size and two.
constexpr int FEW_THREADS = 256, FEW_WARPS = FEW_THREADS / WARP, KEYS_AT_ONCE = 4, MAX_PARTS = 128 / WARP;

template <class T>
DEVICE void attention_few(const T* q, const T* k, const T* v, const float* bias, int bias_row, const uint32_t* lengths, int length,
                          const uint32_t* at, T* out, float* lse, const AttentionShape& s) {
    SHARED(float, shared);
    const int batch = blockIdx.x / s.queries, query = blockIdx.x % s.queries, head = blockIdx.y;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, size = s.head_size;
    const int position = moved(at), seen = visible(s, lengths ? int(lengths[batch]) : length + position, query);
    q += batch * s.q_batch + int64_t(query) * s.q_row + head * size;
    k += batch * s.k_batch + head * size;
    v += batch * s.v_batch + head * size;
    if (bias) bias += int64_t(head) * bias_row + s.queries - 1 - query - position;
    float own[MAX_PARTS], sums[MAX_PARTS], most = HIDDEN, total = 0;
#pragma unroll
    for (int c = 0; c < MAX_PARTS; c++) {
        own[c] = c * WARP + lane < size ? to_float(q[c * WARP + lane]) : 0.0f;
        sums[c] = 0;
    }
    for (int first = warp * KEYS_AT_ONCE; first < seen; first += FEW_WARPS * KEYS_AT_ONCE) {
        float scores[KEYS_AT_ONCE], highest = most;
#pragma unroll
        for (int i = 0; i < KEYS_AT_ONCE; i++) {
            const T* row = k + int64_t(first + i) * s.k_row;
            scores[i] = 0;
#pragma unroll
            for (int c = 0; c < MAX_PARTS; c++)
                if (first + i < seen && c * WARP + lane < size) scores[i] += own[c] * to_float(row[c * WARP + lane]);
        }
#pragma unroll
        for (int i = 0; i < KEYS_AT_ONCE; i++) {
            scores[i] = warp_sum(scores[i]);
            if (first + i >= seen) scores[i] = HIDDEN;
            else if (bias) scores[i] += bias[first + i];
            highest = fmaxf(highest, scores[i]);
        }
        const float shrink = expf(most - highest);
        most = highest;
        total *= shrink;
#pragma unroll
        for (int c = 0; c < MAX_PARTS; c++) sums[c] *= shrink;
#pragma unroll
        for (int i = 0; i < KEYS_AT_ONCE; i++) {
            if (first + i >= seen) continue;
            const T* row = v + int64_t(first + i) * s.v_row;
            const float weight = expf(scores[i] - highest);
            total += weight;
#pragma unroll
            for (int c = 0; c < MAX_PARTS; c++)
                if (c * WARP + lane < size) sums[c] += weight * to_float(row[c * WARP + lane]);
        }
    }
    float* of_warp = shared + warp * (size + 2);
#pragma unroll
    for (int c = 0; c < MAX_PARTS; c++)
        if (c * WARP + lane < size) of_warp[2 + c * WARP + lane] = sums[c];
    if (lane == 0) of_warp[0] = most, of_warp[1] = total;
    BARRIER();
    float highest = HIDDEN, sum = 0;
    for (int w = 0; w < FEW_WARPS; w++) highest = fmaxf(highest, shared[w * (size + 2)]);
    for (int w = 0; w < FEW_WARPS; w++) sum += shared[w * (size + 2) + 1] * expf(shared[w * (size + 2)] - highest);
    T* to = out + ((size_t(batch) * s.queries + query) * s.heads + head) * size;
    for (int c = threadIdx.x; c < size; c += FEW_THREADS) {
        float value = 0;
        for (int w = 0; w < FEW_WARPS; w++) value += shared[w * (size + 2) + 2 + c] * expf(shared[w * (size + 2)] - highest);
        from_float(to[c], sum > 0 ? value / sum : 0.0f);
    }
    if (threadIdx.x == 0) lse[(size_t(batch) * s.heads + head) * s.queries + query] = sum > 0 ? highest + logf(sum) : -INFINITY;
}

#define DECODING(suffix, T) \
    KERNEL(1024, largest_##suffix, const T* logits, uint32_t* tokens, int width) { largest(logits, tokens, width); } \
    KERNEL(1024, log_probabilities_##suffix, const T* logits, float* to, int width) { log_probabilities(logits, to, width); } \
    KERNEL(1024, candidates_##suffix, const T* logits, const float* offsets, uint32_t* tokens, float* scores, int width, int count) { \
        candidates(logits, offsets, tokens, scores, width, count); \
    } \
    KERNEL(256, append_##suffix, const T* keys, const T* values, T* key_cache, T* value_cache, int capacity, int width, int position, \
           const uint32_t* at) { \
        append(keys, values, key_cache, value_cache, capacity, width, position, at); \
    } \
    KERNEL(256, copy_rows_##suffix, const uint32_t* pairs, T* cache, int64_t row, int64_t count) { copy_rows(pairs, cache, row, count); } \
    KERNEL(FEW_THREADS, attention_few_##suffix, const T* q, const T* k, const T* v, const float* bias, int bias_row, \
           const uint32_t* lengths, int length, const uint32_t* at, T* out, float* lse, AttentionShape s) { \
        attention_few(q, k, v, bias, bias_row, lengths, length, at, out, lse, s); \
    }
DECODING(f32, float)
DECODING(bf16, bf16)
