// Masks and noise that are functions of an element's identity: the hashes of t5-ops' `keys` and `random_mask`, bit for bit.
#pragma once
#include "device.h"

DEVICE uint64_t mix(uint64_t x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// A row's key, prepared for many elements.
struct RowHash {
    uint32_t low, high;
};
constexpr uint32_t HIGH = 0x846CA68Bu;
DEVICE RowHash row_hash(uint64_t key) { return {uint32_t(key), uint32_t(key >> 32) * HIGH}; }

// The same row, its channels counted from `channel` on.
DEVICE RowHash from_channel(const RowHash& row, uint32_t channel) { return {channel * 0x9E3779B9u + row.low, row.high}; }

// The upper half of the hash of an element. The lower half of the result lacks the hash's last step.
DEVICE uint32_t upper_hash(const RowHash& row, uint32_t channel) {
    uint32_t x = from_channel(row, channel).low;
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    return (x ^ (x >> 15)) * HIGH + row.high;
}

// The lower half of the hash that belongs to this upper half, moved to the upper half.
DEVICE uint32_t lower_hash(uint32_t upper) { return upper << 16 ^ (upper & 0xFFFF0000u); }

// The hash of one element of the row whose key this is.
DEVICE uint32_t hash(uint64_t key, uint32_t channel) {
    const uint32_t x = upper_hash(row_hash(key), channel);
    return x ^ (x >> 16);
}

// Dropout at one place of the model, at one step. A threshold of 0 drops nothing.
struct Dropout {
    uint64_t step;      // mix(seed ^ mix(step + 1))
    uint32_t site;
    // An element is kept if its hash is at least this, a multiple of 65,536: so the upper half of the hash decides.
    uint32_t threshold;
    float scale;        // of kept elements
    // The address of `step` instead, or null: each launch of a graph has another step.
    const uint64_t* step_on_card;
};

// The key of a row of a sample: a position, or (head + 1) << 32 | query.
DEVICE uint64_t sample_key(const Dropout& dropout, uint32_t sample) {
    const uint64_t step = dropout.step_on_card ? *dropout.step_on_card : dropout.step;
    return mix(step ^ (uint64_t(dropout.site) << 32 | sample));
}
DEVICE uint64_t row_key(const Dropout& dropout, uint32_t sample, uint64_t row) { return mix(sample_key(dropout, sample) ^ row); }

// Two elements of a row, whose channels differ by PAIR alone, share the hash of the first. The first has its upper half, the second its
// lower half. One thread has both in the fragments of tensor cores.
constexpr uint32_t PAIR = 8;
struct Pair {
    bool first, second;
};
// Whether an element, the first of its pair, and the element of channel + PAIR are kept.
DEVICE Pair pair_kept(const Dropout& dropout, const RowHash& row, uint32_t channel) {
    const uint32_t x = upper_hash(row, channel);
    return {x >= dropout.threshold, lower_hash(x) >= dropout.threshold};
}

// An element is kept if this is at least the threshold.
DEVICE uint32_t half_hash(const RowHash& row, uint32_t channel) {
    const uint32_t x = upper_hash(row, channel & ~PAIR);
    return channel & PAIR ? lower_hash(x) : x;
}
DEVICE bool is_kept(const Dropout& dropout, const RowHash& row, uint32_t channel) { return half_hash(row, channel) >= dropout.threshold; }

// Factor of an element: the scale, or zero.
DEVICE float factor(const Dropout& dropout, bool is_kept) { return is_kept ? dropout.scale : 0.0f; }
DEVICE float factor(const Dropout& dropout, const RowHash& row, uint32_t channel) { return factor(dropout, is_kept(dropout, row, channel)); }
