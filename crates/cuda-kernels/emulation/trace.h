// The requests to the emulated card, one by one. LOW_MEM_T5_EMULATED_TRACE is a file that gets a line for each, with the nanoseconds of the
// host's clock, the request, and its bytes or its kernel.
#pragma once
#include <cstddef>

namespace emulation {

void trace(const char* request, size_t bytes);
void trace(const char* request, const char* kernel);

} // namespace emulation
