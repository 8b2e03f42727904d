// The cross-entropy of rows of logits, and its gradient with respect to them.
#include "device.h"

constexpr uint32_t IGNORED_LABEL = 0xFFFFFFFFu;

// A block a row of `width` logits. losses[row] = log-sum-exp(logits) - logits[label], zero where the label is ignored. `gradients`, unless
// it is null, gets scale * (softmax - one-hot of the label); it may be the memory of the logits where both have one type.
// Shared memory: 32 f32.
template <class L, class T>
DEVICE void cross_entropy(const L* logits, const uint32_t* labels, double* losses, T* gradients, float scale, int width) {
    SHARED(float, scratch);
    const int row = blockIdx.x;
    const uint32_t label = labels[row];
    const size_t at = size_t(row) * width;
    if (label == IGNORED_LABEL) {
        if (gradients)
            for (int i = threadIdx.x; i < width; i += blockDim.x) from_float(gradients[at + i], 0.0f);
        if (threadIdx.x == 0) losses[row] = 0;
        return;
    }
    // The largest logit so far, and the sum of the exponentials below it. A NaN makes the sum one.
    float most = -INFINITY, sum = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const float logit = to_float(logits[at + i]);
        if (logit > most) {
            sum *= expf(most - logit);
            most = logit;
        }
        sum += most == -INFINITY && logit == logit ? 0.0f : expf(logit - most);
    }
    const float largest = block_max(most, scratch);
    // Threads without a finite logit have nothing to add.
    const float total = block_sum(most == -INFINITY ? sum : sum * expf(most - largest), scratch);
    if (threadIdx.x == 0) losses[row] = log(double(total)) + double(largest) - double(to_float(logits[at + label]));
    if (!gradients) return;
    // The label's logit is read above by one thread, and may be overwritten below by another.
    BARRIER();
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const float probability = expf(to_float(logits[at + i]) - largest) / total;
        from_float(gradients[at + i], (uint32_t(i) == label ? probability - 1.0f : probability) * scale);
    }
}

#define CROSS_ENTROPY(suffix, L, T) \
    KERNEL(1024, cross_entropy_##suffix, const L* logits, const uint32_t* labels, double* losses, T* gradients, float scale, int width) { \
        cross_entropy(logits, labels, losses, gradients, scale, width); \
    }
CROSS_ENTROPY(f32_f32, float, float)
CROSS_ENTROPY(f32_bf16, float, bf16)
CROSS_ENTROPY(bf16_bf16, bf16, bf16)

// total[0] += the sum of `count` values; one block. Shared memory: 32 f64.
KERNEL(1024, add_total, const double* values, double* total, int count) {
    SHARED(double, partial);
    double sum = 0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) sum += values[i];
    sum = block_sum(sum, partial);
    if (threadIdx.x == 0) total[0] += sum;
}
