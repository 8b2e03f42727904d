// The emulated card's memory: the driver's pool, addresses backed by memory, memory of no pool, and pinned memory of the host.
#include <stdio.h>
#include <sys/mman.h>

#include "card.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define __asan_poison_memory_region(address, bytes)
#define __asan_unpoison_memory_region(address, bytes)
#endif

namespace {

using namespace emulation;

// Fills uninitialised or freed memory, and a margin after it, with NaN, so that uses of such values are detected. A write into the margin
// ends the process. A sanitizer detects every other use of freed memory, and of memory that was not allocated.
void begin_life(char* block, size_t bytes, size_t size) {
    __asan_unpoison_memory_region(block, size + MARGIN);
    memset(block, 0xFF, size + MARGIN);
    __asan_poison_memory_region(block + bytes, size + MARGIN - bytes);
}
// Called for each access of a kernel from PTX: most access the same allocation as the access before. Nothing is freed during a launch. If
// streams are late, memory has already been freed in their order when the work that uses it is done, so this cannot be checked.
bool is_memory_of_the_card(uint64_t at, size_t bytes) {
    if (streams().late != Streams::Late::None) return true;
    static size_t block;
    static std::pair<Address, Address> last;
    if (block != block_number() || at < last.first || at + bytes > last.second) block = block_number(), last = card().allocation(at);
    return last.first <= at && at + bytes <= last.second;
}
const bool card_knows = (is_memory = is_memory_of_the_card, true);
void end_life(char* block, size_t bytes, size_t size) {
    __asan_unpoison_memory_region(block, size + MARGIN);
    if (std::any_of(block + bytes, block + size + MARGIN, [](char byte) { return byte != char(0xFF); })) {
        fprintf(stderr, "emulated card: some kernel has written behind an allocation of %zu bytes\n", bytes);
        abort();
    }
    memset(block, 0xFF, size);
    __asan_poison_memory_region(block, size + MARGIN);
}
// Forgets pinned memory of the host, and returns its bytes: 0 if none begins there.
size_t unpin(void* at) {
    auto& pinned = card().pinned;
    auto found = pinned.upper_bound(static_cast<char*>(at));
    if (found == pinned.end() || found->first - found->second != at) return 0;
    const size_t bytes = found->second;
    for (auto [from, length] : card().underway)
        if (from < found->first && from + length > at) {
            fprintf(stderr, "emulated card: %zu bytes of locked memory are given up before a copy of them is done\n", bytes);
            abort();
        }
    pinned.erase(found);
    return bytes;
}
// The host address that the program uses for memory mapped at an address.
void* spread(Address at) {
    const Address base = std::prev(card().addresses.upper_bound(at))->first;
    return reinterpret_cast<void*>(base + SPREAD * (at - base));
}
// Frees memory that no handle holds and that backs no address.
void forget(Backing* memory) {
    if (memory->is_held || memory->is_mapped) return;
    card().given.reserved -= memory->bytes;
    delete memory;
}

} // namespace

extern "C" {

Result cuCtxSynchronize();

Result cuDeviceGetDefaultMemPool(void** pool, int) {
    if (!card().has_pools) return NOT_SUPPORTED;
    *pool = &card().own;
    return SUCCESS;
}
Result cuDeviceGetMemPool(void** pool, int) {
    if (!card().has_pools) return NOT_SUPPORTED;
    *pool = &card().own;
    return SUCCESS;
}
// Frees unused memory, except `kept` bytes.
Result cuMemPoolTrimTo(void* pool, size_t kept) {
    std::lock_guard guard(card().lock);
    Pool& p = *static_cast<Pool*>(pool);
    p.reserved = std::min(p.reserved, rounded(std::max(p.used, kept), card().page));
    return SUCCESS;
}
Result cuMemPoolSetAttribute(void* pool, int attribute, void* value) {
    std::lock_guard guard(card().lock);
    Pool& p = *static_cast<Pool*>(pool);
    switch (attribute) {
    case 4: memcpy(&p.threshold, value, sizeof p.threshold); break;
    // Setting a peak to zero resets it to the current value.
    case 6: p.peak_reserved = p.reserved; return *static_cast<uint64_t*>(value) ? INVALID_VALUE : SUCCESS;
    case 8: p.peak_used = p.used; return *static_cast<uint64_t*>(value) ? INVALID_VALUE : SUCCESS;
    default: return INVALID_VALUE;
    }
    return SUCCESS;
}
Result cuMemPoolGetAttribute(void* pool, int attribute, void* value) {
    std::lock_guard guard(card().lock);
    const Pool& p = *static_cast<Pool*>(pool);
    switch (attribute) {
    case 4: memcpy(value, &p.threshold, sizeof p.threshold); break;
    case 5: memcpy(value, &p.reserved, sizeof p.reserved); break;
    case 6: memcpy(value, &p.peak_reserved, sizeof p.peak_reserved); break;
    case 7: memcpy(value, &p.used, sizeof p.used); break;
    case 8: memcpy(value, &p.peak_used, sizeof p.peak_used); break;
    default: return INVALID_VALUE;
    }
    return SUCCESS;
}

// Reserves addresses, which memory backs later.
Result cuMemAddressReserve(Address* at, size_t bytes, size_t, Address, unsigned long long) {
    if (!bytes) return INVALID_VALUE;
    void* found = mmap(nullptr, SPREAD * bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return OUT_OF_MEMORY;
    std::lock_guard guard(card().lock);
    *at = reinterpret_cast<Address>(found);
    card().addresses[*at] = bytes;
    return SUCCESS;
}
Result cuMemGetAllocationGranularity(size_t* bytes, const void*, int) {
    *bytes = card().page;
    return SUCCESS;
}
// CUmemAllocationProp: type, handle types, location (two ints).
Result cuMemCreate(Backing** memory, size_t bytes, const void* properties, unsigned long long) {
    std::lock_guard guard(card().lock);
    Card& c = card();
    const int* words = static_cast<const int*>(properties);
    if (words[0] != 1 || words[2] != 1 || words[3] < 0 || words[3] >= c.cards || !bytes || bytes % c.page) return INVALID_VALUE;
    if (c.held() + bytes > c.total) return OUT_OF_MEMORY;
    *memory = new Backing{bytes};
    c.given.reserve(bytes);
    return SUCCESS;
}
Result cuMemRelease(Backing* memory) {
    std::lock_guard guard(card().lock);
    memory->is_held = false;
    forget(memory);
    return SUCCESS;
}
Result cuMemMap(Address at, size_t bytes, size_t offset, Backing* memory, unsigned long long) {
    std::lock_guard guard(card().lock);
    Card& c = card();
    auto reserved = c.addresses.upper_bound(at);
    if (reserved == c.addresses.begin()) return INVALID_VALUE;
    --reserved;
    auto next = c.mapped.lower_bound(at);
    const bool is_free = (next == c.mapped.end() || next->first >= at + bytes) &&
                         (next == c.mapped.begin() || std::prev(next)->first + std::prev(next)->second->bytes <= at);
    if (offset || bytes != memory->bytes || memory->is_mapped || at + bytes > reserved->first + reserved->second || !is_free) return INVALID_VALUE;
    memory->is_mapped = true;
    c.mapped[at] = memory;
    return SUCCESS;
}
// CUmemAccessDesc: a location (two ints), flags. Mapped memory must not be used before this call.
Result cuMemSetAccess(Address at, size_t bytes, const void* access, size_t count) {
    std::lock_guard guard(card().lock);
    const int* words = static_cast<const int*>(access);
    auto found = card().mapped.find(at);
    if (found == card().mapped.end() || found->second->bytes != bytes || count != 1 || words[0] != 1 || words[1] < 0 || words[1] >= card().cards || words[2] != 3) return INVALID_VALUE;
    return mprotect(spread(at), SPREAD * bytes, PROT_READ | PROT_WRITE) ? OUT_OF_MEMORY : SUCCESS;
}
Result cuMemUnmap(Address at, size_t bytes) {
    std::lock_guard guard(card().lock);
    Card& c = card();
    auto found = c.mapped.find(at);
    if (found == c.mapped.end() || found->second->bytes != bytes) return INVALID_VALUE;
    const Address from = reinterpret_cast<Address>(spread(at));
    auto block = c.blocks.lower_bound(from);
    if (block != c.blocks.end() && block->first < from + SPREAD * bytes) {
        fprintf(stderr, "emulated card: memory is taken from a tensor of %zu bytes\n", block->second.bytes);
        abort();
    }
    void* fresh = mmap(spread(at), SPREAD * bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (fresh == MAP_FAILED) return OUT_OF_MEMORY;
    found->second->is_mapped = false;
    forget(found->second);
    c.mapped.erase(found);
    return SUCCESS;
}

// The program has allocated `bytes` bytes of memory that backs addresses.
Result emulated_begin_life(Address at, size_t bytes, void* stream) {
    std::lock_guard guard(card().lock);
    Card& c = card();
    trace("allocate", bytes);
    if (++c.allocations == c.failure) return OUT_OF_MEMORY;
    const size_t size = rounded(std::max<size_t>(bytes, 1), ALIGNMENT);
    char* block = reinterpret_cast<char*>(at);
    give(stream, [=] { begin_life(block, bytes, size); });
    c.blocks[at] = {size, bytes, &c.given};
    c.given.use(size);
    return SUCCESS;
}
// The program has freed the memory.
void emulated_end_life(Address at, void* stream) {
    std::lock_guard guard(card().lock);
    auto found = card().blocks.find(at);
    const size_t size = found->second.size, bytes = found->second.bytes;
    char* block = reinterpret_cast<char*>(at);
    trace("free", bytes);
    give(stream, [=] { end_life(block, bytes, size); });
    card().given.used -= size;
    card().blocks.erase(found);
}

Result cuMemAllocAsync(Address* to, size_t bytes, void* stream) {
    // A stream has its context.
    if (!stream)
        if (Result result = unless_here(__func__)) return result;
    std::lock_guard guard(card().lock);
    Card& c = card();
    if (!c.has_pools) return NOT_SUPPORTED;
    Pool& pool = c.own;
    const size_t size = rounded(std::max<size_t>(bytes, 1), ALIGNMENT);
    Stream& of = c.streams.of(stream);
    if (of.capture) {
        if (Result result = state_of(of)) return result;
        *to = reinterpret_cast<Address>(allocate_in(*of.capture, size));
        return *to ? SUCCESS : OUT_OF_MEMORY;
    }
    const size_t more = std::max(pool.reserved, rounded(pool.used + size, c.page)) - pool.reserved;
    trace("allocate", bytes);
    if (++c.allocations == c.failure) return OUT_OF_MEMORY;
    if (c.held() + more > c.total) return OUT_OF_MEMORY;
    void* block = c.streams.again(of, size);
    if (!block) block = aligned_alloc(ALIGNMENT, size + MARGIN);
    if (!block) return OUT_OF_MEMORY;
    give(stream, [=] { begin_life(static_cast<char*>(block), bytes, size); });
    *to = reinterpret_cast<Address>(block);
    c.blocks[*to] = {size, bytes, &pool};
    pool.use(size);
    pool.reserve(more);
    return SUCCESS;
}
Result cuMemFreeAsync(Address at, void* stream) {
    // A stream has its context.
    if (!stream)
        if (Result result = unless_here(__func__)) return result;
    std::lock_guard guard(card().lock);
    Stream& of = streams().of(stream);
    // A graph frees what it allocates, and nothing else.
    if (of.capture && of.capture->is_valid) return free_in(*of.capture, reinterpret_cast<void*>(at)) ? SUCCESS : invalidate(of, INVALID_VALUE);
    if (Result result = state_of(of)) return result;
    auto found = card().blocks.find(at);
    if (found == card().blocks.end()) return INVALID_VALUE;
    const size_t size = found->second.size, bytes = found->second.bytes;
    found->second.pool->used -= size;
    char* block = reinterpret_cast<char*>(at);
    trace("free", bytes);
    give(stream, [=] { end_life(block, bytes, size); });
    card().blocks.erase(found);
    streams().release(of, block, size);
    return SUCCESS;
}
// Memory of no pool: the caller waits.
Result cuMemAlloc_v2(Address* to, size_t bytes) {
    if (Result result = unless_here(__func__)) return result;
    std::lock_guard guard(card().lock);
    Card& c = card();
    if (Result result = unless_anything_is_captured()) return result;
    if (!bytes) return INVALID_VALUE;
    const size_t size = rounded(bytes, ALIGNMENT);
    void* block = c.held() + size > c.total ? nullptr : aligned_alloc(ALIGNMENT, size);
    if (!block) return OUT_OF_MEMORY;
    memset(block, 0xFF, size);
    *to = reinterpret_cast<Address>(block);
    c.beside[*to] = size;
    c.beside_bytes += size;
    return SUCCESS;
}
Result cuMemFree_v2(Address at) {
    if (Result result = unless_here(__func__)) return result;
    std::lock_guard guard(card().lock);
    Card& c = card();
    if (Result result = cuCtxSynchronize()) return result;
    auto found = c.beside.find(at);
    if (found == c.beside.end()) return cuMemFreeAsync(at, nullptr);
    c.beside_bytes -= found->second;
    c.beside.erase(found);
    free(reinterpret_cast<void*>(at));
    return SUCCESS;
}
Result cuMemHostAlloc(void** to, size_t bytes, unsigned) {
    if (Result result = unless_here(__func__)) return result;
    std::lock_guard guard(card().lock);
    Card& c = card();
    if (Result result = unless_anything_is_captured()) return result;
    *to = c.pinned_bytes + bytes > c.max_pinnable ? nullptr : aligned_alloc(HOST_PAGE, rounded(bytes, HOST_PAGE));
    if (!*to) return OUT_OF_MEMORY;
    memset(*to, 0xFF, bytes);
    c.pinned[static_cast<char*>(*to) + bytes] = bytes;
    c.pinned_bytes += bytes;
    c.peak_pinned = std::max(c.peak_pinned, c.pinned_bytes);
    return SUCCESS;
}
Result cuMemFreeHost(void* at) {
    if (Result result = unless_here(__func__)) return result;
    std::lock_guard guard(card().lock);
    if (Result result = unless_anything_is_captured()) return result;
    const size_t bytes = unpin(at);
    if (!bytes) return INVALID_VALUE;
    card().pinned_bytes -= bytes;
    free(at);
    return SUCCESS;
}

// Pins memory of the process. It counts apart from pinned memory that the driver allocates.
Result cuMemHostRegister_v2(void* at, size_t bytes, unsigned) {
    if (Result result = unless_here(__func__)) return result;
    std::lock_guard guard(card().lock);
    if (Result result = unless_anything_is_captured()) return result;
    Card& c = card();
    char* from = static_cast<char*>(at);
    if (!from || !bytes) return INVALID_VALUE;
    // Whole pages are registered, and each once.
    char* first = from - reinterpret_cast<size_t>(from) % HOST_PAGE;
    if (c.is_pinned_in_part(first, first + rounded(from + bytes - first, HOST_PAGE))) return ALREADY_REGISTERED;
    if (c.locked_bytes + bytes > c.max_lockable) return OUT_OF_MEMORY;
    c.pinned[from + bytes] = bytes;
    c.locked_bytes += bytes;
    c.peak_locked = std::max(c.peak_locked, c.locked_bytes);
    return SUCCESS;
}
Result cuMemHostUnregister(void* at) {
    if (Result result = unless_here(__func__)) return result;
    std::lock_guard guard(card().lock);
    if (Result result = unless_anything_is_captured()) return result;
    const size_t bytes = unpin(at);
    if (!bytes) return NOT_REGISTERED;
    card().locked_bytes -= bytes;
    return SUCCESS;
}

} // extern "C"
