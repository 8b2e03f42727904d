// What the parts of the emulated driver share: its results, its lock, and streams that may be captured.
#pragma once
#include <mutex>

#include "streams.h"

namespace emulation {

using Result = int;
// With the numbers of CUresult.
enum : Result {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_PTX = 218,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    NOT_FOUND = 500,
    NOT_READY = 600,
    OUT_OF_RESOURCES = 701,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    LAUNCH_FAILED = 719,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_ISOLATION = 905,
    CAPTURED_EVENT = 907,
    CAPTURE_WRONG_THREAD = 908,
};

// CU_EVENT_DISABLE_TIMING.
constexpr unsigned DISABLE_TIMING = 2;

// Whether a context is current on this thread: few calls do without.
Result unless_here(const char* call);
// Whether these bytes of the card are allocated.
Result unless_memory(const char* call, unsigned long long at, size_t bytes);
// The card's compute capability, such as 80.
int capability();

// Held by each call.
std::recursive_mutex& lock();
// An error of a kernel, which stays.
Result card_state();

// Whether a stream takes work: not while its capture is invalid.
Result state_of(Stream& stream);
// Makes a capture invalid, and says why: once.
Result invalidate(Stream& stream, Result error);
// For calls that nobody may make of a stream that is captured.
Result unless_captured(Stream& stream);
// For calls that a thread may not make while it captures any stream, unless the capture is a relaxed one, nor while another thread has begun
// a global one.
Result unless_anything_is_captured();
// Memory of the graph: nothing where the host has none.
void* allocate_in(Capture& capture, size_t bytes);
// Whether the memory was the graph's.
bool free_in(Capture& capture, void* block);

} // namespace emulation
