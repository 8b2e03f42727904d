// What the emulated card was asked for, request by request: LOW_MEM_T5_EMULATED_TRACE is a file that gets a line for each, with the
// nanoseconds of the host's clock, the request, its bytes or its kernel.
#pragma once
#include <cstddef>

namespace emulation {

void trace(const char* request, size_t bytes);
void trace(const char* request, const char* kernel);

} // namespace emulation
