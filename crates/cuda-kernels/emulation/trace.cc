// A file of requests. Lines stay in its buffer: writing each one would take longer than most requests.
#include "trace.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>

namespace {

// Null unless a trace was requested.
FILE* file() {
    static FILE* one = [] {
        const char* path = getenv("LOW_MEM_T5_EMULATED_TRACE");
        return path ? fopen(path, "w") : nullptr;
    }();
    return one;
}

long long now() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

} // namespace

namespace emulation {

void trace(const char* request, size_t bytes) {
    if (FILE* to = file()) fprintf(to, "%lld %s %zu\n", now(), request, bytes);
}
void trace(const char* request, const char* kernel) {
    if (FILE* to = file()) fprintf(to, "%lld %s %s\n", now(), request, kernel);
}

} // namespace emulation
