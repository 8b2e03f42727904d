// CUDA's execution model on one thread of the host.
//
// Each thread of a block is a fibre. A fibre runs until it ends, reaches a barrier, or takes part in an operation of its warp; then another
// fibre runs. The order is a parameter: results that depend on it are races. Shared memory starts as NaN, and ends where a page begins that
// nothing may touch. Behaviour that a card leaves undefined (a barrier that some threads do not reach, a collective operation of a part of a
// warp, an access to such a page) is an error here.
#pragma once
#include <stdint.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#define DEVICE inline
#define CONSTANT static const
#define __restrict__ __restrict
#define BARRIER() emulation::wait(emulation::At::Barrier, __LINE__)
#define WARP_BARRIER() emulation::wait(emulation::At::Warp, __LINE__)
#define SHARED(type, name) type* name = reinterpret_cast<type*>(emulation::shared_memory())
#define KERNEL(threads, name, ...) \
    static void name(__VA_ARGS__); \
    static const emulation::Registered registered_##name(#name, __FILE__, threads, emulation::kernel<name>(name)); \
    static void name(__VA_ARGS__)

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
using std::max;
using std::min;
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

// The order of fibres and blocks, and the time when copies in flight arrive.
enum class Order { FirstFirst, LastFirst, Random };
struct Schedule {
    Order order = Order::FirstFirst;
    bool copies_arrive_at_once = false;
};

enum class At { Running, Barrier, Warp, Ended };

struct Copy {
    void* to;
    unsigned char bytes[16];
};

struct Fibre {
    void* stack_pointer = nullptr;
    std::unique_ptr<unsigned char[]> stack;
    At at = At::Running;
    unsigned line = 0;         // where it waits
    uint64_t slot[4] = {};     // its values for its warp
    const void* row = nullptr; // of a matrix that its warp loads together
    std::vector<std::vector<Copy>> copies; // groups in flight; the last one is open
    unsigned barriers = 0, warp_barriers = 0; // that it has passed; counted for kernels from PTX alone
};

// Stops this fibre until the others have reached this point.
void wait(At at, unsigned line);
// Ends the launch with an error.
[[noreturn]] void fail(const std::string& problem);
// Aligned to exactly 16 bytes, as the kernels require.
unsigned char* shared_memory();
size_t shared_bytes();
// A block's number among all that ever ran.
size_t block_number();
// The name of the launched kernel.
const std::string& kernel_name();
Fibre& self();
// The fibre of a lane of the same warp.
Fibre& peer(int lane);
Schedule schedule();
// Whether these bytes are memory of the card. Null if that is unknown.
extern bool (*is_memory)(uint64_t address, size_t bytes);

struct Kernel {
    std::string name;
    std::string source; // the name of its file, which becomes a module
    unsigned max_threads = 0;
    std::vector<size_t> sizes; // of its arguments
    void (*run)(void** arguments) = nullptr;
};
std::map<std::string, Kernel>& kernels();

template <auto F, class... A, size_t... I>
void call(void** arguments, std::index_sequence<I...>) {
    F(*static_cast<A*>(arguments[I])...);
}
template <auto F, class... A>
Kernel kernel(void (*)(A...)) {
    return {"", "", 0, {sizeof(A)...}, [](void** arguments) { call<F, A...>(arguments, std::index_sequence_for<A...>{}); }};
}
struct Registered {
    Registered(const char* name, const std::string& file, unsigned max_threads, Kernel kernel) {
        const size_t from = file.rfind('/') + 1;
        kernel.source = file.substr(from, file.rfind('.') - from);
        kernel.max_threads = max_threads;
        kernel.name = name;
        kernels()[name] = kernel;
    }
};

// Runs a kernel. Returns an empty string on success, otherwise the problem.
std::string launch(const Kernel& kernel, dim3 grid, unsigned threads, size_t shared_bytes, void** arguments, Schedule schedule);

} // namespace emulation

DEVICE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
DEVICE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
#define CHECK_ALIGNED(address, bytes) \
    if (reinterpret_cast<uintptr_t>(address) % (bytes) != 0) emulation::fail("elements that are read or written together are not aligned")
DEVICE float times(float x, float y) { return x * y; }
DEVICE float plus(float x, float y) { return x + y; }
DEVICE float exp2_fast(float x) { return exp2f(x); }
DEVICE float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

// Lines of waits within collective operations: no source is as long.
enum : unsigned { SHUFFLE_LINE = 1u << 20 };

template <class T>
DEVICE T shuffle_any(T x, int from) {
    static_assert(sizeof(T) <= 8, "a slot has eight bytes");
    memcpy(&emulation::self().slot[0], &x, sizeof x);
    emulation::wait(emulation::At::Warp, SHUFFLE_LINE);
    memcpy(&x, &emulation::peer(from).slot[0], sizeof x);
    emulation::wait(emulation::At::Warp, SHUFFLE_LINE + 1);
    return x;
}
DEVICE float shuffle_xor(float x, int lanes) { return shuffle_any(x, int(threadIdx.x % 32) ^ lanes); }
DEVICE double shuffle_xor(double x, int lanes) { return shuffle_any(x, int(threadIdx.x % 32) ^ lanes); }
DEVICE uint32_t shuffle_xor(uint32_t x, int lanes) { return shuffle_any(x, int(threadIdx.x % 32) ^ lanes); }
DEVICE int64_t shuffle_xor(int64_t x, int lanes) { return shuffle_any(x, int(threadIdx.x % 32) ^ lanes); }
DEVICE float shuffle_from(float x, int lane) { return shuffle_any(x, lane); }
DEVICE uint32_t shuffle_from(uint32_t x, int lane) { return shuffle_any(x, lane); }
