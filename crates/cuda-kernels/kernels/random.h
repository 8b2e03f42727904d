// Masks and noise that are functions of what an element is: the hashes of t5-ops' `keys` and `random_mask`, bit for bit.
#pragma once
#include "device.h"

DEVICE uint64_t mix(uint64_t x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// The hash of one element of the row whose key this is.
DEVICE uint32_t hash(uint64_t key, uint32_t channel) {
    uint32_t x = channel * 0x9E3779B9u + uint32_t(key);
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = ((x ^ (x >> 15)) + uint32_t(key >> 32)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

// Dropout at one place of the model, at one step. A threshold of 0 drops nothing.
struct Dropout {
    uint64_t step;      // mix(seed ^ mix(step + 1))
    uint32_t site;
    uint32_t threshold; // an element is kept when its hash is at least this
    float scale;        // of kept elements
    // Where `step` lies instead, or null: launches of a graph have another one each time.
    const uint64_t* step_on_card;
};

// The key of a row of a sample: a position, or (head + 1) << 32 | query.
DEVICE uint64_t row_key(const Dropout& dropout, uint32_t sample, uint64_t row) {
    const uint64_t step = dropout.step_on_card ? *dropout.step_on_card : dropout.step;
    return mix(mix(step ^ (uint64_t(dropout.site) << 32 | sample)) ^ row);
}

// Factor of an element: the scale, or zero.
DEVICE float factor(const Dropout& dropout, uint64_t key, uint32_t channel) {
    return hash(key, channel) >= dropout.threshold ? dropout.scale : 0.0f;
}
