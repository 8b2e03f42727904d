// The emulated card: its memory, its streams, its abilities, and the counts of its requests. Only the parts of the driver use this.
//
// LOW_MEM_T5_EMULATED_CAPABILITY is its compute capability, such as 75 (default 80). It decides which kernels load, how much shared memory
// a block may ask for, and whether cuBLAS multiplies bf16. LOW_MEM_T5_EMULATED_LOCKABLE is the number of bytes of the process that it can
// page-lock, and LOW_MEM_T5_EMULATED_PINNABLE the number of pinned bytes that it allocates. LOW_MEM_T5_EMULATED_POOLS=none is a card
// without memory pools.
#pragma once
#include <stdlib.h>
#include <string.h>

#include <list>
#include <new>

#include "driver.h"
#include "execution.h"
#include "trace.h"

namespace emulation {

using Address = unsigned long long;

constexpr size_t ALIGNMENT = 512;  // of its allocations
constexpr size_t MARGIN = 512;     // behind it
constexpr size_t CONTEXT = 64 << 20;
constexpr size_t HOST_PAGE = 4096; // the host's memory is locked in pages
// Addresses for each byte of memory that the program allocates itself: memory at `at` has those from base + SPREAD * (at - base) on.
constexpr size_t SPREAD = 2;

// Memory that tensors come from: the driver's pool, where freed blocks stay until it is trimmed, or addresses that the program has backed
// with memory and allocates itself.
struct Pool {
    size_t used = 0, reserved = 0, peak_used = 0, peak_reserved = 0, threshold = 0;

    void use(size_t bytes) { used += bytes, peak_used = std::max(peak_used, used); }
    void reserve(size_t bytes) { reserved += bytes, peak_reserved = std::max(peak_reserved, reserved); }
};
// Memory that backs addresses, until it is neither mapped nor held by its handle.
struct Backing {
    size_t bytes = 0;
    bool is_held = true, is_mapped = false;
};

struct Card {
    std::recursive_mutex lock;
    size_t total = 0, failure = 0, page = 0;
    int capability = 80;
    int cards = 1, opened = 0;
    size_t contexts = 0; // retained and not released
    Pool own, given;
    bool maps = true; // addresses can be backed by memory
    bool has_pools = true;
    std::map<Address, size_t> addresses; // that are reserved
    std::map<Address, Backing*> mapped;
    struct Block {
        size_t size, bytes; // of which were asked for
        Pool* pool;
    };
    std::map<Address, Block> blocks;
    Streams streams;
    std::map<const char*, size_t> pinned; // of the host, by their ends
    size_t pinned_bytes = 0, peak_pinned = 0, max_pinnable = SIZE_MAX;
    std::list<std::pair<const char*, size_t>> underway; // parts of it that copies will read or write
    size_t locked_bytes = 0, peak_locked = 0, max_lockable = SIZE_MAX; // of the process's own memory
    std::map<Address, size_t> beside; // memory of no pool
    size_t beside_bytes = 0;
    bool has_failed = false;
    size_t allocations = 0, uploads = 0, uploaded = 0, waiting_uploads = 0, downloads = 0, downloaded = 0, copies = 0, waits = 0;
    std::map<std::string, size_t> launches;
    emulation::Schedule schedule;

    Card() {
        const char* bytes = getenv("LOW_MEM_T5_EMULATED_MEMORY");
        total = bytes ? strtoull(bytes, nullptr, 10) : size_t(4) << 30;
        const char* at_a_time = getenv("LOW_MEM_T5_EMULATED_PAGE");
        page = at_a_time ? strtoull(at_a_time, nullptr, 10) : size_t(2) << 20;
        if (const char* able = getenv("LOW_MEM_T5_EMULATED_CAPABILITY")) capability = atoi(able);
        const char* several = getenv("LOW_MEM_T5_EMULATED_CARDS");
        cards = several ? atoi(several) : 1;
        const char* failing = getenv("LOW_MEM_T5_EMULATED_FAILURE");
        failure = failing ? strtoull(failing, nullptr, 10) : 0;
        const char* lockable = getenv("LOW_MEM_T5_EMULATED_LOCKABLE");
        if (lockable) max_lockable = strtoull(lockable, nullptr, 10);
        const char* pinnable = getenv("LOW_MEM_T5_EMULATED_PINNABLE");
        if (pinnable) max_pinnable = strtoull(pinnable, nullptr, 10);
        const char* pools = getenv("LOW_MEM_T5_EMULATED_POOLS");
        has_pools = !pools || strcmp(pools, "none");
        const char* order = getenv("LOW_MEM_T5_EMULATED_ORDER");
        if (order && !strcmp(order, "last")) schedule.order = emulation::Order::LastFirst;
        if (order && !strcmp(order, "random")) schedule.order = emulation::Order::Random;
        const char* mapping = getenv("LOW_MEM_T5_EMULATED_MAPPING");
        maps = !mapping || strcmp(mapping, "none");
        const char* late = getenv("LOW_MEM_T5_EMULATED_STREAMS");
        using Late = Streams::Late;
        const std::pair<const char*, Late> kinds[] = {{"early", Late::First}, {"late", Late::Others}, {"all-late", Late::All}};
        for (const auto& [name, kind] : kinds)
            if (late && !strcmp(late, name)) streams.late = kind;
    }
    // Whether these bytes of the host are pinned, so that copies are asynchronous.
    bool is_pinned(const void* at, size_t bytes) const {
        auto found = pinned.lower_bound(static_cast<const char*>(at) + bytes);
        return found != pinned.end() && static_cast<const char*>(at) >= found->first - found->second;
    }
    // Whether any of these bytes are pinned.
    bool is_pinned_in_part(const char* from, const char* end) const {
        auto found = pinned.upper_bound(from);
        return found != pinned.end() && found->first - found->second < end;
    }
    // The first and the end address of the allocation that has this address: memory of a pool, of no pool, or of a graph. Zeros if there is
    // none.
    std::pair<Address, Address> allocation(Address at) const {
        auto block = blocks.upper_bound(at);
        if (block != blocks.begin()) {
            --block;
            if (at < block->first + block->second.bytes) return {block->first, block->first + block->second.bytes};
        }
        auto other = beside.upper_bound(at);
        if (other != beside.begin()) {
            --other;
            if (at < other->first + other->second) return {other->first, other->first + other->second};
        }
        return allocation_of_graphs(at);
    }
    bool has(Address at, size_t bytes) const {
        auto [from, end] = allocation(at);
        return from <= at && at + bytes <= end;
    }
    // The most shared memory of a block that asks for it: the programming guide's table of compute capabilities, minus a reserved KiB.
    int max_shared_bytes() const {
        switch (capability) {
        case 70: return 96 << 10;
        case 72: return 96 << 10;
        case 75: return 64 << 10;
        case 80: case 87: return 163 << 10;
        case 86: case 89: case 120: case 121: return 99 << 10;
        default: return capability < 70 ? 48 << 10 : 227 << 10;
        }
    }
    Result state() const { return has_failed ? LAUNCH_FAILED : SUCCESS; }
    size_t held() const { return (contexts ? CONTEXT : 0) + own.reserved + given.reserved + beside_bytes + graph_counts().bytes; }
};

Card& card();
inline size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

} // namespace emulation
