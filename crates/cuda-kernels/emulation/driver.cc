// A driver for a card that does not exist: memory is the host's, each call is done before it returns, and kernels are the
// host-compiled ones, by name. It has the functions that candle and t5-ops call of NVIDIA's driver, with the signatures of cuda.h 13.0.
//
// Variables, each with the prefix LOW_MEM_T5_EMULATED_: MEMORY, bytes of the card (default 4 GiB); PAGE, bytes that a pool takes from it at a
// time (default 2 MiB); CARDS, how many there are to choose from (default 1; a process opens one of them); ORDER, `last` or `random` for
// another order of threads and blocks; STREAMS, `early` or `late`: work of every stream but the first is done as early or as late as its order
// allows, where calls otherwise do it; WORK, `none`: kernels and products compute nothing, and memory is zeros, to see the host's part of a
// large step; FAILURE, N: the N-th allocation finds no memory; REPORT, a file that gets the counts as JSON in the end, with the card's number
// behind its name but for the first; TRACE, a file that gets each request (trace.h).
#include <stdio.h>

#include "card.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define __asan_poison_memory_region(address, bytes)
#define __asan_unpoison_memory_region(address, bytes)
#endif

// Of cuBLAS.
extern size_t products;

namespace emulation {
Card& card() {
    static Card* one = new Card; // other destructors still use it
    return *one;
}
} // namespace emulation

namespace {

using namespace emulation;

// The context that is current on this thread.
thread_local void* context_here = nullptr;

void report() {
    const char* path = getenv("LOW_MEM_T5_EMULATED_REPORT");
    if (!path) return;
    Card& c = card();
    const std::string name = c.opened ? path + std::to_string(c.opened) : path;
    FILE* file = fopen(name.c_str(), "w");
    if (!file) return;
    size_t launches = 0;
    for (auto& [name, count] : c.launches) launches += count;
    const GraphCounts& graphs = graph_counts();
    fprintf(file, "{\"launches\":%zu,\"products\":%zu,\"allocations\":%zu,\"uploads\":%zu,\"uploaded_bytes\":%zu,\"waiting_uploads\":%zu,\"downloads\":%zu,\"downloaded_bytes\":%zu,"
            "\"copies\":%zu,\"waits\":%zu,\"graphs\":%zu,\"graph_launches\":%zu,\"graph_nodes\":%zu,\"graph_allocations\":%zu,\"most_pinned_bytes\":%zu,\"most_locked_bytes\":%zu,\"locked_bytes\":%zu,\"most_used_bytes\":%zu,\"most_reserved_bytes\":%zu,\"left_bytes\":%zu,\"open_contexts\":%zu,\"kernels\":{",
            launches, products, c.allocations, c.uploads, c.uploaded, c.waiting_uploads, c.downloads, c.downloaded, c.copies, c.waits, graphs.graphs, graphs.launches, graphs.nodes_launched, graphs.allocations, c.most_pinned, c.most_locked, c.locked_bytes, c.now->most_used,
            c.now->most_reserved, c.now->used, c.contexts);
    const char* comma = "";
    for (auto& [name, count] : c.launches) {
        fprintf(file, "%s\"%s\":%zu", comma, name.c_str(), count);
        comma = ",";
    }
    fprintf(file, "}}\n");
    fclose(file);
}
struct Reporter {
    ~Reporter() { report(); }
} reporter;

// So much of memory that the driver does not know is copied without a wait for the stream, by CUDA's programming guide.
constexpr size_t MOST_STAGED = 64 << 10;
// Bytes of memory that is set to zero where nothing is computed.
constexpr size_t MOST_CLEARED = 1 << 20;

// Memory that nobody has written, or that nobody may read any more, and a margin behind it: NaN, so that such a value shows. Who writes into
// a margin ends the process. A sanitizer sees each other use of what was freed, and of what was not asked for.
void begin_life(char* block, size_t bytes, size_t size) {
    // Large blocks are fresh pages, which are zeros, and copies alone write to them.
    if (!card().works) {
        if (size < MOST_CLEARED) memset(block, 0, size);
        return;
    }
    __asan_unpoison_memory_region(block, size + MARGIN);
    memset(block, 0xFF, size + MARGIN);
    __asan_poison_memory_region(block + bytes, size + MARGIN - bytes);
}
// Asked for each access of a kernel from PTX: most are to the allocation of the access before. Nothing is given back during a launch. Where
// streams are late, memory has been given back in their order when the work that uses it is done, so that nobody knows.
bool is_memory_of_the_card(uint64_t at, size_t bytes) {
    if (streams().late != Streams::Late::None) return true;
    static size_t block;
    static std::pair<Address, Address> last;
    if (block != block_number() || at < last.first || at + bytes > last.second) block = block_number(), last = card().allocation(at);
    return last.first <= at && at + bytes <= last.second;
}
const bool card_knows = (is_memory = is_memory_of_the_card, true);
void end_life(char* block, size_t bytes, size_t size) {
    if (!card().works) return;
    __asan_unpoison_memory_region(block, size + MARGIN);
    if (std::any_of(block + bytes, block + size + MARGIN, [](char byte) { return byte != char(0xFF); })) {
        fprintf(stderr, "emulated card: some kernel has written behind an allocation of %zu bytes\n", bytes);
        abort();
    }
    memset(block, 0xFF, size);
    __asan_poison_memory_region(block, size + MARGIN);
}

} // namespace

namespace emulation {
Result unless_here(const char* call) {
    if (context_here) return SUCCESS;
    fprintf(stderr, "emulated card: %s: no context is current on this thread\n", call);
    return INVALID_CONTEXT;
}
Result unless_memory(const char* call, unsigned long long at, size_t bytes) {
    std::lock_guard guard(card().lock);
    if (!bytes || card().has(at, bytes)) return SUCCESS;
    fprintf(stderr, "emulated card: %s: %zu bytes that are not all of one allocation\n", call, bytes);
    return INVALID_VALUE;
}
int capability() { return card().capability; }
Streams& streams() { return card().streams; }
std::recursive_mutex& lock() { return card().lock; }
Result card_state() { return card().state(); }
void give(void* stream, std::function<void()> work, NodeKind kind) {
    std::lock_guard guard(card().lock);
    streams().give(streams().of(stream), std::move(work), kind);
}
Capture* capture_of(void* stream) {
    std::lock_guard guard(card().lock);
    return streams().of(stream).capture.get();
}
bool works() { return card().works; }
bool is_late(void* stream) {
    std::lock_guard guard(card().lock);
    return streams().of(stream).is_late;
}
} // namespace emulation

extern "C" {

Result cuInit(unsigned) { return SUCCESS; }
Result cuDriverGetVersion(int* version) {
    *version = 13000;
    return SUCCESS;
}
Result cuDeviceGetCount(int* count) {
    *count = card().cards;
    return SUCCESS;
}
Result cuDeviceGet(int* device, int ordinal) {
    *device = card().opened = ordinal;
    return ordinal < card().cards ? SUCCESS : INVALID_DEVICE;
}
Result cuDeviceGetName(char* name, int room, int) {
    snprintf(name, size_t(room), "emulated card");
    return SUCCESS;
}
Result cuDeviceGetUuid_v2(void* uuid, int device) {
    memset(uuid, device, 16);
    return SUCCESS;
}
Result cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
    case 1: *value = 1024; break;    // threads of a block
    case 8: *value = 48 << 10; break; // shared memory of a block
    case 10: *value = 32; break;     // lanes of a warp
    case 16: *value = 108; break;    // multiprocessors
    case 75: *value = card().capability / 10; break; // compute capability
    case 76: *value = card().capability % 10; break;
    case 97: *value = card().most_shared_bytes(); break; // shared memory of a block that asks for it
    case 115: *value = 1; break;     // memory pools
    default: *value = 0;
    }
    return SUCCESS;
}
Result cuDeviceTotalMem_v2(size_t* bytes, int) {
    *bytes = card().total;
    return SUCCESS;
}
Result cuMemGetInfo_v2(size_t* free, size_t* total) {
    if (Result result = unless_here(__func__)) return result;
    std::lock_guard guard(card().lock);
    *total = card().total;
    *free = card().total - std::min(card().total, card().held());
    return SUCCESS;
}

// A context is the number of its card, from 1.
Result cuDevicePrimaryCtxRetain(void** context, int device) {
    std::lock_guard guard(card().lock);
    card().contexts++;
    *context = reinterpret_cast<void*>(size_t(device) + 1);
    return SUCCESS;
}
Result cuDevicePrimaryCtxRelease_v2(int) {
    std::lock_guard guard(card().lock);
    card().contexts--;
    return SUCCESS;
}
Result cuCtxDestroy_v2(void*) { return SUCCESS; }
Result cuCtxSetCurrent(void* context) {
    context_here = context;
    return SUCCESS;
}
Result cuCtxGetCurrent(void** context) {
    *context = context_here;
    return SUCCESS;
}
Result cuCtxGetDevice(int* device) {
    if (Result result = unless_here(__func__)) return result;
    *device = int(reinterpret_cast<size_t>(context_here)) - 1;
    return SUCCESS;
}
Result cuCtxSynchronize() {
    if (Result result = unless_here(__func__)) return result;
    std::lock_guard guard(card().lock);
    if (Result result = unless_anything_is_captured()) return result;
    card().waits++;
    trace("wait", size_t(0));
    streams().finish_all();
    return card().state();
}

Result cuStreamCreate(void** stream, unsigned) {
    if (Result result = unless_here(__func__)) return result;
    std::lock_guard guard(card().lock);
    *stream = streams().make();
    return SUCCESS;
}
Result cuStreamSynchronize(void* stream) {
    std::lock_guard guard(card().lock);
    if (Result result = unless_anything_is_captured()) return result;
    if (Result result = unless_captured(streams().of(stream))) return result;
    card().waits++;
    trace("wait", size_t(0));
    streams().finish(streams().of(stream));
    return card().state();
}
Result cuStreamDestroy_v2(void* stream) {
    std::lock_guard guard(card().lock);
    streams().finish(streams().of(stream));
    return SUCCESS;
}
Result cuStreamWaitEvent(void* stream, void* event, unsigned) {
    std::lock_guard guard(card().lock);
    Stream& of = streams().of(stream);
    const Event& e = *static_cast<Event*>(event);
    // A capture knows nothing of what was recorded outside of it, and nothing outside waits for what is only captured.
    if (of.capture && !e.is_captured) return invalidate(of, CAPTURE_ISOLATION);
    if (e.is_captured) return of.capture ? state_of(of) : CAPTURED_EVENT;
    streams().wait(of, e);
    return SUCCESS;
}
Result cuEventCreate(void** event, unsigned flags) {
    if (Result result = unless_here(__func__)) return result;
    Event* made = new Event;
    made->is_timed = !(flags & DISABLE_TIMING);
    *event = made;
    return SUCCESS;
}
Result cuEventRecord(void* event, void* stream) {
    std::lock_guard guard(card().lock);
    Stream& of = streams().of(stream);
    Event& e = *static_cast<Event*>(event);
    if (of.capture) {
        e = {&of, 0, nullptr, true, e.is_timed};
        return state_of(of);
    }
    auto reached = std::make_shared<std::chrono::steady_clock::time_point>();
    streams().give(of, [reached] { *reached = std::chrono::steady_clock::now(); });
    e = {&of, of.given, reached, false, e.is_timed};
    return SUCCESS;
}
Result cuEventSynchronize(void* event) {
    std::lock_guard guard(card().lock);
    if (Result result = unless_anything_is_captured()) return result;
    const Event& e = *static_cast<Event*>(event);
    if (e.is_captured) return e.stream->capture ? invalidate(*e.stream, CAPTURED_EVENT) : CAPTURED_EVENT;
    if (e.stream) streams().finish(*e.stream, e.place);
    return card().state();
}
Result cuEventQuery(void* event) {
    std::lock_guard guard(card().lock);
    if (Result result = unless_anything_is_captured()) return result;
    const Event& e = *static_cast<Event*>(event);
    if (e.is_captured) return e.stream->capture ? invalidate(*e.stream, CAPTURED_EVENT) : CAPTURED_EVENT;
    return e.stream && e.stream->done < e.place ? NOT_READY : SUCCESS;
}
Result cuEventElapsedTime_v2(float* ms, void* from, void* to) {
    std::lock_guard guard(card().lock);
    const Event &first = *static_cast<Event*>(from), &last = *static_cast<Event*>(to);
    if (!first.stream || !last.stream || !first.is_timed || !last.is_timed) return INVALID_HANDLE;
    if (first.stream->done < first.place || last.stream->done < last.place) return NOT_READY;
    *ms = std::chrono::duration<float, std::milli>(*last.reached - *first.reached).count();
    return SUCCESS;
}
Result cuEventDestroy_v2(void* event) {
    delete static_cast<Event*>(event);
    return SUCCESS;
}

Result cuDeviceGetDefaultMemPool(void** pool, int) {
    *pool = &card().own;
    return SUCCESS;
}
Result cuDeviceGetMemPool(void** pool, int) {
    *pool = card().now;
    return SUCCESS;
}
Result cuDeviceSetMemPool(int, void* pool) {
    card().now = static_cast<Pool*>(pool);
    return SUCCESS;
}
// CUmemPoolProps: type, handle types, location (two ints), security attributes, maxSize.
Result cuMemPoolCreate(void** pool, const void* properties) {
    const int* words = static_cast<const int*>(properties);
    // Pinned memory of this card.
    if (words[0] != 1 || words[2] != 1 || words[3] != card().opened) return INVALID_VALUE;
    Pool* made = new Pool;
    memcpy(&made->most, static_cast<const char*>(properties) + 24, sizeof made->most);
    *pool = made;
    return SUCCESS;
}
Result cuMemPoolDestroy(void* pool) {
    std::lock_guard guard(card().lock);
    if (card().now == pool) card().now = &card().own;
    return SUCCESS;
}
// What is not used goes back, but for `kept` bytes.
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
    // A peak is set to zero, which stands for now.
    case 6: p.most_reserved = p.reserved; return *static_cast<uint64_t*>(value) ? INVALID_VALUE : SUCCESS;
    case 8: p.most_used = p.used; return *static_cast<uint64_t*>(value) ? INVALID_VALUE : SUCCESS;
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
    case 6: memcpy(value, &p.most_reserved, sizeof p.most_reserved); break;
    case 7: memcpy(value, &p.used, sizeof p.used); break;
    case 8: memcpy(value, &p.most_used, sizeof p.most_used); break;
    default: return INVALID_VALUE;
    }
    return SUCCESS;
}

Result cuMemAllocAsync(Address* to, size_t bytes, void* stream) {
    // A stream has its context.
    if (!stream)
        if (Result result = unless_here(__func__)) return result;
    std::lock_guard guard(card().lock);
    Card& c = card();
    Pool& pool = *c.now;
    const size_t size = rounded(std::max<size_t>(bytes, 1), ALIGNMENT);
    Stream& of = c.streams.of(stream);
    if (of.capture) {
        if (Result result = state_of(of)) return result;
        *to = reinterpret_cast<Address>(allocate_in(*of.capture, size));
        return *to ? SUCCESS : OUT_OF_MEMORY;
    }
    const size_t reserved = std::max(pool.reserved, rounded(pool.used + size, c.page));
    const size_t more = reserved - pool.reserved;
    trace("allocate", bytes);
    if (++c.allocations == c.failure) return OUT_OF_MEMORY;
    if (c.held() + more > c.total || (pool.most > 0 && reserved > pool.most)) return OUT_OF_MEMORY;
    void* block = c.streams.again(of, size);
    if (!block) block = aligned_alloc(ALIGNMENT, size + MARGIN);
    if (!block) return OUT_OF_MEMORY;
    give(stream, [=] { begin_life(static_cast<char*>(block), bytes, size); });
    *to = reinterpret_cast<Address>(block);
    c.blocks[*to] = {size, bytes, &pool};
    pool.used += size;
    pool.reserved = reserved;
    pool.most_used = std::max(pool.most_used, pool.used);
    pool.most_reserved = std::max(pool.most_reserved, pool.reserved);
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
// Memory of no pool: whoever asks for it waits.
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
    *to = malloc(bytes);
    if (!*to) return OUT_OF_MEMORY;
    memset(*to, 0xFF, bytes);
    c.pinned[static_cast<char*>(*to) + bytes] = bytes;
    c.pinned_bytes += bytes;
    c.most_pinned = std::max(c.most_pinned, c.pinned_bytes);
    return SUCCESS;
}
Result cuMemFreeHost(void* at) {
    if (Result result = unless_here(__func__)) return result;
    std::lock_guard guard(card().lock);
    if (Result result = unless_anything_is_captured()) return result;
    auto found = card().pinned.upper_bound(static_cast<char*>(at));
    if (found == card().pinned.end() || found->first - found->second != at) return INVALID_VALUE;
    card().pinned_bytes -= found->second;
    card().pinned.erase(found);
    free(at);
    return SUCCESS;
}

// Memory of the process becomes memory that the driver knows. It counts apart from memory that the driver gives.
Result cuMemHostRegister_v2(void* at, size_t bytes, unsigned) {
    if (Result result = unless_here(__func__)) return result;
    std::lock_guard guard(card().lock);
    if (Result result = unless_anything_is_captured()) return result;
    Card& c = card();
    char* from = static_cast<char*>(at);
    if (!from || !bytes) return INVALID_VALUE;
    auto next = c.pinned.upper_bound(from);
    if (next != c.pinned.end() && next->first - next->second < from + bytes) return ALREADY_REGISTERED;
    if (c.locked_bytes + bytes > c.most_lockable) return OUT_OF_MEMORY;
    c.pinned[from + bytes] = bytes;
    c.locked_bytes += bytes;
    c.most_locked = std::max(c.most_locked, c.locked_bytes);
    return SUCCESS;
}
Result cuMemHostUnregister(void* at) {
    if (Result result = unless_here(__func__)) return result;
    std::lock_guard guard(card().lock);
    if (Result result = unless_anything_is_captured()) return result;
    Card& c = card();
    auto found = c.pinned.upper_bound(static_cast<char*>(at));
    if (found == c.pinned.end() || found->first - found->second != at) return NOT_REGISTERED;
    c.locked_bytes -= found->second;
    c.pinned.erase(found);
    return SUCCESS;
}

Result cuMemsetD8Async(Address to, unsigned char value, size_t bytes, void* stream) {
    if (Result result = unless_here(__func__)) return result;
    std::lock_guard guard(card().lock);
    if (Result result = unless_memory(__func__, to, bytes)) return result;
    if (Result result = state_of(streams().of(stream))) return result;
    give(stream, [=] { memset(reinterpret_cast<void*>(to), value, bytes); }, NodeKind::Set);
    return SUCCESS;
}
Result cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, void* stream) {
    if (Result result = unless_here(__func__)) return result;
    std::lock_guard guard(card().lock);
    Stream& of = streams().of(stream);
    if (Result result = unless_memory(__func__, to, bytes)) return result;
    if (Result result = state_of(of)) return result;
    card().uploads++;
    card().uploaded += bytes;
    const bool waits = bytes > MOST_STAGED && !card().is_pinned(from, bytes);
    card().waiting_uploads += waits;
    trace(waits ? "waiting-upload" : "upload", bytes);
    auto copies = [=] { memcpy(reinterpret_cast<void*>(to), from, bytes); };
    // Each launch reads what the host has there by then, whether the driver knows that memory or not.
    if (of.capture) {
        of.capture->graph->nodes.push_back({NodeKind::Copy, copies, MemoryType::Host, MemoryType::Device});
        return SUCCESS;
    }
    if (card().is_pinned(from, bytes) || !of.is_late) {
        give(stream, copies);
        return SUCCESS;
    }
    // Of memory that the driver does not know it makes a copy before it returns.
    auto copy = std::make_shared<std::vector<char>>(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
    give(stream, [=] { memcpy(reinterpret_cast<void*>(to), copy->data(), bytes); });
    return SUCCESS;
}
Result cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, void* stream) {
    if (Result result = unless_here(__func__)) return result;
    std::lock_guard guard(card().lock);
    Stream& of = streams().of(stream);
    if (Result result = unless_memory(__func__, from, bytes)) return result;
    if (Result result = state_of(of)) return result;
    card().downloads++;
    card().downloaded += bytes;
    trace("download", bytes);
    auto copies = [=] { memcpy(to, reinterpret_cast<const void*>(from), bytes); };
    if (of.capture) {
        // Only a launch writes to the host. Until then nobody has: NaN, so that who reads it shows.
        memset(to, 0xFF, bytes);
        of.capture->graph->nodes.push_back({NodeKind::Copy, copies, MemoryType::Device, MemoryType::Host});
        return SUCCESS;
    }
    give(stream, copies);
    // Memory that the driver does not know has the bytes when it returns.
    if (!card().is_pinned(to, bytes)) streams().finish(of);
    return card().state();
}
Result cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, void* stream) {
    if (Result result = unless_here(__func__)) return result;
    std::lock_guard guard(card().lock);
    if (Result result = unless_memory(__func__, to, bytes)) return result;
    if (Result result = unless_memory(__func__, from, bytes)) return result;
    if (Result result = state_of(streams().of(stream))) return result;
    card().copies++;
    give(stream, [=] { memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes); }, NodeKind::Copy);
    return SUCCESS;
}
Result cuMemcpyPeerAsync(Address to, void*, Address from, void*, size_t bytes, void* stream) {
    return cuMemcpyDtoDAsync_v2(to, from, bytes, stream);
}

Result cuGetErrorName(Result error, const char** name) {
    *name = error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR";
    return SUCCESS;
}
Result cuGetErrorString(Result error, const char** text) {
    *text = error == OUT_OF_MEMORY ? "out of memory" : "an error of the emulated card";
    return SUCCESS;
}

// candle opens a generator of random numbers and never uses it here.
int curandCreateGenerator(void** generator, int) {
    *generator = reinterpret_cast<void*>(3);
    return SUCCESS;
}
int curandDestroyGenerator(void*) { return SUCCESS; }
int curandSetPseudoRandomGeneratorSeed(void*, unsigned long long) { return SUCCESS; }
int curandSetStream(void*, void*) { return SUCCESS; }
int curandGenerateNormal(void*, float*, size_t, float, float) { return 999; }
int curandGenerateNormalDouble(void*, double*, size_t, double, double) { return 999; }
int curandGenerateUniform(void*, float*, size_t) { return 999; }
int curandGenerateUniformDouble(void*, double*, size_t) { return 999; }

}
