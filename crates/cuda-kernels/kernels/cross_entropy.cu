// The cross-entropy of rows of logits, and its gradient with respect to them.
#include "device.h"

constexpr uint32_t IGNORED_LABEL = 0xFFFFFFFFu;

// e^x for x of at most 0, to a few units in the last place for terms that matter in a sum: the error grows with -x.
DEVICE float exp_below(float x) { return exp2_fast(x * LOG2_E); }

// A block works on a row of `width` logits of `gridDim.x` rows. losses[0, row] = of_log_z * log-sum-exp(logits) - logits[label], and
// losses[1, row] is what is minimised (`of_log_z`, `z_loss` and `smoothing` as in `TokenLoss`); both are zero if the label is ignored. `gradients`, unless it is null, gets scale times the gradient of the latter; it may
// be the memory of the logits if both have one type.
// A thread reads some logits at once, N of them together. Shared memory: 32 f32.
template <int N, class L, class T>
DEVICE void cross_entropy(const L* logits, const uint32_t* labels, double* losses, T* gradients, float scale, double of_log_z, double z_loss, double smoothing, int width) {
    constexpr int AT_ONCE = 4;
    SHARED(float, scratch);
    const int row = blockIdx.x, stride = blockDim.x * N, step = AT_ONCE * stride;
    const uint32_t label = labels[row];
    const size_t at = size_t(row) * width;
    float values[AT_ONCE][N] = {}, earlier[AT_ONCE][N];
    if (label == IGNORED_LABEL) {
        for (int k = 0; k < N; k++) values[0][k] = 0;
        if (gradients)
            for (int i = threadIdx.x * N; i < width; i += stride) store<N>(gradients, at + i, values[0]);
        if (threadIdx.x == 0) losses[row] = losses[gridDim.x + row] = 0;
        return;
    }
    // The largest logit so far, and the sum of the exponentials below it. A NaN makes the sum NaN.
    float most = -INFINITY, sum = 0;
    // The sum of the logits, which smoothed labels need.
    const bool smooths = smoothing != 0;
    float plain = 0;
    int from = threadIdx.x * N;
    for (; from < width; from += step) {
        float largest = most;
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++)
            for (int k = 0; k < N; k++) earlier[u][k] = values[u][k];
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) load<N>(logits, at + min(from + u * stride, width - N), values[u]);
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++)
            for (int k = 0; k < N; k++) {
                // After the last logit there is none.
                if (from + u * stride >= width) values[u][k] = -INFINITY;
                else if (smooths) plain += values[u][k];
                largest = fmaxf(largest, values[u][k]);
            }
        if (largest > most) {
            sum *= exp_below(most - largest);
            most = largest;
        }
        // If every logit so far is minus infinity or NaN, exponentials are 0 or NaN.
        const float base = most == -INFINITY ? 0.0f : most;
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++)
            for (int k = 0; k < N; k++) sum += exp_below(values[u][k] - base);
    }
    const float largest = block_max(most, scratch);
    // Threads without a finite logit have nothing to add.
    const float total = block_sum(most == -INFINITY ? sum : sum * exp_below(most - largest), scratch);
    if (smooths) plain = block_sum(plain, scratch);
    const double log_z = log(double(total)) + double(largest);
    if (threadIdx.x == 0) {
        const double of_label = double(to_float(logits[at + label]));
        double objective = of_log_z * log_z - of_label;
        losses[row] = objective;
        if (smooths) objective += smoothing * (of_label - double(plain) / width);
        if (z_loss != 0) objective += z_loss * log_z * log_z;
        losses[gridDim.x + row] = objective;
    }
    if (!gradients) return;
    // The label's logit is read above by one thread, and may be overwritten below by another.
    BARRIER();
    const float of_row = z_loss != 0 || of_log_z != 1 ? float(double(scale) * (of_log_z + 2 * z_loss * log_z)) : scale;
    const float unit = of_row / total, of_label = float(double(scale) * (1 - smoothing));
    const float of_each = float(double(scale) * (smoothing / width));
    // From the end: the thread still has the last logits of two turns, and the logits read just before are the most likely to be in a
    // cache.
    bool has_earlier = true;
    for (from -= step; from >= 0; has_earlier = false) {
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            const int i = from + u * stride;
            if (i >= width) break;
            for (int k = 0; k < N; k++) {
                const float gradient = exp_below(values[u][k] - largest) * unit - of_each;
                values[u][k] = uint32_t(i + k) == label ? gradient - of_label : gradient;
            }
            store<N>(gradients, at + i, values[u]);
        }
        from -= step;
        if (from < 0) break;
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            for (int k = 0; k < N; k++) values[u][k] = earlier[u][k];
            if (!has_earlier) load<N>(logits, at + from + u * stride, values[u]);
        }
    }
}

#define CROSS_ENTROPY(suffix, L, T) \
    KERNEL(512, cross_entropy_##suffix, const L* logits, const uint32_t* labels, double* losses, T* gradients, float scale, double of_log_z, \
           double z_loss, double smoothing, int width) { \
        if (in_fours(width, logits, gradients)) cross_entropy<4>(logits, labels, losses, gradients, scale, of_log_z, z_loss, smoothing, width); \
        else cross_entropy<1>(logits, labels, losses, gradients, scale, of_log_z, z_loss, smoothing, width); \
    }
CROSS_ENTROPY(f32_f32, float, float)
CROSS_ENTROPY(f32_bf16, float, bf16)
CROSS_ENTROPY(bf16_bf16, bf16, bf16)

// totals[i] += the sum of the `count` values of row i; a block for each row. Shared memory: 32 f64.
KERNEL(1024, add_totals, const double* values, double* totals, int count) {
    SHARED(double, partial);
    values += size_t(blockIdx.x) * count;
    double sum = 0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) sum += values[i];
    sum = block_sum(sum, partial);
    if (threadIdx.x == 0) totals[blockIdx.x] += sum;
}
