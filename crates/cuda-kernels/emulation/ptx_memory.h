// Memory as PTX sees it: its spaces, loads, stores and conversions of addresses.
#pragma once
#include "ptx_checks.h"

enum class Space { Generic, Global, Shared, Local, Param, Const };

// The start of shared memory in its own space. A card reserves memory there, too, from 8.0 on; and a missing offset is detected.
constexpr uint32_t SHARED_BEGIN = 1024;
inline uint32_t shared_symbol() { return SHARED_BEGIN; }

inline uint64_t symbol(const uint8_t* array) { return reinterpret_cast<uint64_t>(array); }
inline uint64_t symbol(uint8_t* array) { return reinterpret_cast<uint64_t>(array); }
// An address of shared memory, or a register that a scope declares without `%`.
template <class T>
T symbol(T x) {
    static_assert(std::is_integral_v<T>, "a number");
    return x;
}
// The target of unused results.
struct Nowhere {
    template <class T>
    void operator=(T) const {}
};

template <Space S>
unsigned char* place(uint64_t address, size_t bytes, bool writes) {
    if (address % bytes != 0) emulation::fail("an address is not aligned");
    if (S == Space::Shared) {
        if (address < SHARED_BEGIN || address - SHARED_BEGIN + bytes > emulation::shared_bytes()) emulation::fail("shared memory that was not asked for");
        use_shared(uint32_t(address - SHARED_BEGIN), bytes, writes);
        return emulation::shared_memory() + (address - SHARED_BEGIN);
    }
    if (S == Space::Global) check_global(address, bytes);
    return reinterpret_cast<unsigned char*>(address);
}

// Checks a load or a store: a vector is aligned as a whole.
inline void check_aligned(uint64_t address, size_t bytes) {
    if (address % bytes != 0) emulation::fail("elements that are read or written together are not aligned");
}
template <class T, Space S>
T load(uint64_t address) {
    T x;
    memcpy(&x, place<S>(address, sizeof x, false), sizeof x);
    return x;
}
template <class T, Space S>
void store(uint64_t address, uint64_t value) {
    const T x = T(value);
    memcpy(place<S>(address, sizeof x, true), &x, sizeof x);
}

// Marks shared memory that a copy has written, as used by the thread that began the copy.
inline void arrive(const emulation::Copy& copy) {
    const uint64_t to = reinterpret_cast<uint64_t>(copy.to);
    memcpy(place<Space::Shared>(to, sizeof copy.bytes, true), copy.bytes, sizeof copy.bytes);
}

// Global, local, constant and parameter memory have generic addresses here; shared memory has its place in the host's.
inline uint64_t cvta_to_global_u64(uint64_t address) { return address; }
inline uint64_t cvta_to_local_u64(uint64_t address) { return address; }
inline uint64_t cvta_local_u64(uint64_t address) { return address; }
inline uint64_t cvta_const_u64(uint64_t address) { return address; }
inline uint64_t cvta_shared_u64(uint64_t address) { return reinterpret_cast<uint64_t>(emulation::shared_memory()) + address - SHARED_BEGIN; }
inline uint64_t cvta_to_shared_u64(uint64_t address) { return address - reinterpret_cast<uint64_t>(emulation::shared_memory()) + SHARED_BEGIN; }
