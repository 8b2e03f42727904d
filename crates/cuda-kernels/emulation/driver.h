// Code that the parts of the emulated driver share: its results, its lock, and streams that may be captured.
#pragma once
#include <mutex>

#include "streams.h"

namespace emulation {

using Result = int;
// With the values of CUresult.
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

// An error unless a context is current on this thread: few calls work without one.
Result unless_here(const char* call);
// An error unless these bytes of the card are allocated.
Result unless_memory(const char* call, unsigned long long at, size_t bytes);
// The card's compute capability, such as 80.
int capability();

// Each call holds this lock.
std::recursive_mutex& lock();
// An error of a kernel, which persists.
Result card_state();

// Whether a stream accepts work: not while its capture is invalid.
Result state_of(Stream& stream);
// Makes a capture invalid, and reports the reason once.
Result invalidate(Stream& stream, Result error);
// An error for calls that are forbidden on a stream that is captured.
Result unless_captured(Stream& stream);
// An error for calls that are forbidden while this thread captures any stream, unless the capture is a relaxed one, or while another thread
// has begun a global capture.
Result unless_anything_is_captured();
// Allocates memory of a graph; null if the host has none.
void* allocate_in(Capture& capture, size_t bytes);
// Frees memory of a graph; false if the memory is not the graph's.
bool free_in(Capture& capture, void* block);

} // namespace emulation
