// Checks of uses of memory by kernels that came from PTX.
#pragma once
#include "execution.h"

// An array of a module, which kernels may read like a card's memory.
struct Constant {
    Constant(const uint8_t* at, size_t bytes);
};

// Fails unless a thread may use these bytes of shared memory now. Marks them as used.
void use_shared(uint32_t offset, size_t bytes, bool writes);
// Fails unless these bytes are memory of a card.
void check_global(uint64_t address, size_t bytes);
