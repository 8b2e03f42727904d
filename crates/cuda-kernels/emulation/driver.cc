// A driver for a card that does not exist: memory is the host's, each call is done before it returns, and kernels are the
// host-compiled ones, by name. It has the functions that candle and t5-ops call of NVIDIA's driver, with the signatures of cuda.h 13.0.
//
// Variables, each with the prefix LOW_MEM_T5_EMULATED_: MEMORY, bytes of the card (default 4 GiB); CARDS, how many there are to choose from
// (default 1; a process opens one of them); ORDER, `last` or `random` for another order of threads and blocks; STREAMS, `early` or `late`:
// work of every stream but the first is done as early or as late as its order allows, where calls otherwise do it; FAILURE, N: the N-th
// allocation finds no memory; REPORT, a file that gets the counts as JSON in the end, with the card's number behind its name but for the first.
#include <stdio.h>

#include <new>

#include "driver.h"
#include "execution.h"

// Of cuBLAS.
extern size_t products;

namespace {

using namespace emulation;
using Address = unsigned long long;

constexpr size_t PAGE = 2 << 20;   // what a pool takes from the card
constexpr size_t ALIGNMENT = 512;  // of what it gives
constexpr size_t CONTEXT = 64 << 20;

// Memory that tensors are taken from. Freed blocks stay in it until it is trimmed.
struct Pool {
    size_t used = 0, reserved = 0, most_used = 0, most_reserved = 0, most = 0, threshold = 0;
};

struct Card {
    std::recursive_mutex lock;
    size_t total = 0, failure = 0;
    int cards = 1, opened = 0;
    size_t contexts = 0; // retained and not released
    Pool own, *now = &own;
    struct Block {
        size_t bytes;
        Pool* pool;
    };
    std::map<Address, Block> blocks;
    Streams streams;
    std::map<const char*, size_t> pinned; // of the host, by their ends
    size_t pinned_bytes = 0, most_pinned = 0;
    std::map<Address, size_t> beside; // memory of no pool
    size_t beside_bytes = 0;
    bool has_failed = false;
    size_t allocations = 0, uploads = 0, uploaded = 0, downloads = 0, downloaded = 0, copies = 0, waits = 0;
    std::map<std::string, size_t> launches;
    emulation::Schedule schedule;

    Card() {
        const char* bytes = getenv("LOW_MEM_T5_EMULATED_MEMORY");
        total = bytes ? strtoull(bytes, nullptr, 10) : size_t(4) << 30;
        const char* several = getenv("LOW_MEM_T5_EMULATED_CARDS");
        cards = several ? atoi(several) : 1;
        const char* failing = getenv("LOW_MEM_T5_EMULATED_FAILURE");
        failure = failing ? strtoull(failing, nullptr, 10) : 0;
        const char* order = getenv("LOW_MEM_T5_EMULATED_ORDER");
        if (order && !strcmp(order, "last")) schedule.order = emulation::Order::LastFirst;
        if (order && !strcmp(order, "random")) schedule.order = emulation::Order::Random;
        const char* late = getenv("LOW_MEM_T5_EMULATED_STREAMS");
        using Late = Streams::Late;
        if (late) streams.late = !strcmp(late, "early") ? Late::First : !strcmp(late, "late") ? Late::Others : Late::None;
    }
    // Whether the driver knows these bytes of the host, so that copies do not wait for them.
    bool is_pinned(const void* at, size_t bytes) const {
        auto found = pinned.lower_bound(static_cast<const char*>(at) + bytes);
        return found != pinned.end() && static_cast<const char*>(at) >= found->first - found->second;
    }
    Result state() const { return has_failed ? LAUNCH_FAILED : SUCCESS; }
    size_t held() const { return (contexts ? CONTEXT : 0) + own.reserved + (now == &own ? 0 : now->reserved) + beside_bytes + graph_counts().bytes; }
};

Card& card() {
    static Card* one = new Card; // other destructors still use it
    return *one;
}

size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

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
    fprintf(file, "{\"launches\":%zu,\"products\":%zu,\"allocations\":%zu,\"uploads\":%zu,\"uploaded_bytes\":%zu,\"downloads\":%zu,\"downloaded_bytes\":%zu,"
            "\"copies\":%zu,\"waits\":%zu,\"graphs\":%zu,\"graph_launches\":%zu,\"graph_nodes\":%zu,\"graph_allocations\":%zu,\"most_pinned_bytes\":%zu,\"most_used_bytes\":%zu,\"most_reserved_bytes\":%zu,\"left_bytes\":%zu,\"open_contexts\":%zu,\"kernels\":{",
            launches, products, c.allocations, c.uploads, c.uploaded, c.downloads, c.downloaded, c.copies, c.waits, graphs.graphs, graphs.launches, graphs.nodes_launched, graphs.allocations, c.most_pinned, c.now->most_used,
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

struct Function {
    std::string name;
    const emulation::Kernel* kernel;
};

} // namespace

namespace emulation {
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
    case 75: *value = 8; break;      // compute capability
    case 76: *value = 0; break;
    case 97: *value = 163 << 10; break; // shared memory of a block that asks for it
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
    std::lock_guard guard(card().lock);
    *total = card().total;
    *free = card().total - std::min(card().total, card().held());
    return SUCCESS;
}

Result cuDevicePrimaryCtxRetain(void** context, int) {
    std::lock_guard guard(card().lock);
    card().contexts++;
    *context = reinterpret_cast<void*>(1);
    return SUCCESS;
}
Result cuDevicePrimaryCtxRelease_v2(int) {
    std::lock_guard guard(card().lock);
    card().contexts--;
    return SUCCESS;
}
Result cuCtxDestroy_v2(void*) { return SUCCESS; }
Result cuCtxSetCurrent(void*) { return SUCCESS; }
Result cuCtxGetCurrent(void** context) {
    *context = reinterpret_cast<void*>(1);
    return SUCCESS;
}
Result cuCtxGetDevice(int* device) {
    *device = card().opened;
    return SUCCESS;
}
Result cuCtxSynchronize() {
    std::lock_guard guard(card().lock);
    if (Result result = unless_anything_is_captured()) return result;
    card().waits++;
    streams().finish_all();
    return card().state();
}

Result cuStreamCreate(void** stream, unsigned) {
    std::lock_guard guard(card().lock);
    *stream = streams().make();
    return SUCCESS;
}
Result cuStreamSynchronize(void* stream) {
    std::lock_guard guard(card().lock);
    if (Result result = unless_captured(streams().of(stream))) return result;
    card().waits++;
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
Result cuEventCreate(void** event, unsigned) {
    *event = new Event;
    return SUCCESS;
}
Result cuEventRecord(void* event, void* stream) {
    std::lock_guard guard(card().lock);
    Stream& of = streams().of(stream);
    if (of.capture) {
        *static_cast<Event*>(event) = {&of, 0, nullptr, true};
        return state_of(of);
    }
    auto reached = std::make_shared<std::chrono::steady_clock::time_point>();
    streams().give(of, [reached] { *reached = std::chrono::steady_clock::now(); });
    *static_cast<Event*>(event) = {&of, of.given, reached};
    return SUCCESS;
}
Result cuEventSynchronize(void* event) {
    std::lock_guard guard(card().lock);
    const Event& e = *static_cast<Event*>(event);
    if (e.is_captured) return e.stream->capture ? invalidate(*e.stream, CAPTURED_EVENT) : CAPTURED_EVENT;
    if (e.stream) streams().finish(*e.stream, e.place);
    return card().state();
}
Result cuEventQuery(void* event) {
    std::lock_guard guard(card().lock);
    const Event& e = *static_cast<Event*>(event);
    if (e.is_captured) return e.stream->capture ? invalidate(*e.stream, CAPTURED_EVENT) : CAPTURED_EVENT;
    return e.stream && e.stream->done < e.place ? NOT_READY : SUCCESS;
}
Result cuEventElapsedTime_v2(float* ms, void* from, void* to) {
    std::lock_guard guard(card().lock);
    const Event &first = *static_cast<Event*>(from), &last = *static_cast<Event*>(to);
    if (!first.stream || !last.stream) return INVALID_VALUE;
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
    p.reserved = std::min(p.reserved, rounded(std::max(p.used, kept), PAGE));
    return SUCCESS;
}
Result cuMemPoolSetAttribute(void* pool, int attribute, void* value) {
    std::lock_guard guard(card().lock);
    Pool& p = *static_cast<Pool*>(pool);
    switch (attribute) {
    case 4: memcpy(&p.threshold, value, sizeof p.threshold); break;
    case 6: p.most_reserved = p.reserved; break;
    case 8: p.most_used = p.used; break;
    default: break;
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
    const size_t reserved = std::max(pool.reserved, rounded(pool.used + size, PAGE));
    const size_t more = reserved - pool.reserved;
    if (++c.allocations == c.failure) return OUT_OF_MEMORY;
    if (c.held() + more > c.total || (pool.most > 0 && reserved > pool.most)) return OUT_OF_MEMORY;
    void* block = c.streams.again(of, size);
    if (!block) block = aligned_alloc(ALIGNMENT, size);
    if (!block) return OUT_OF_MEMORY;
    // NaN, so that a value that nobody wrote shows.
    give(stream, [=] { memset(block, 0xFF, size); });
    *to = reinterpret_cast<Address>(block);
    c.blocks[*to] = {size, &pool};
    pool.used += size;
    pool.reserved = reserved;
    pool.most_used = std::max(pool.most_used, pool.used);
    pool.most_reserved = std::max(pool.most_reserved, pool.reserved);
    return SUCCESS;
}
Result cuMemFreeAsync(Address at, void* stream) {
    std::lock_guard guard(card().lock);
    Stream& of = streams().of(stream);
    // A graph frees what it allocates, and nothing else.
    if (of.capture && of.capture->is_valid) return free_in(*of.capture, reinterpret_cast<void*>(at)) ? SUCCESS : invalidate(of, INVALID_VALUE);
    if (Result result = state_of(of)) return result;
    auto found = card().blocks.find(at);
    if (found == card().blocks.end()) return INVALID_VALUE;
    const size_t size = found->second.bytes;
    found->second.pool->used -= size;
    void* block = reinterpret_cast<void*>(at);
    give(stream, [=] { memset(block, 0xFF, size); });
    card().blocks.erase(found);
    streams().release(of, block, size);
    return SUCCESS;
}
// Memory of no pool: whoever asks for it waits.
Result cuMemAlloc_v2(Address* to, size_t bytes) {
    std::lock_guard guard(card().lock);
    Card& c = card();
    if (Result result = unless_anything_is_captured()) return result;
    const size_t size = rounded(std::max<size_t>(bytes, 1), ALIGNMENT);
    void* block = c.held() + size > c.total ? nullptr : aligned_alloc(ALIGNMENT, size);
    if (!block) return OUT_OF_MEMORY;
    memset(block, 0xFF, size);
    *to = reinterpret_cast<Address>(block);
    c.beside[*to] = size;
    c.beside_bytes += size;
    return SUCCESS;
}
Result cuMemFree_v2(Address at) {
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
    std::lock_guard guard(card().lock);
    Card& c = card();
    if (Result result = unless_anything_is_captured()) return result;
    *to = malloc(bytes);
    if (!*to) return OUT_OF_MEMORY;
    c.pinned[static_cast<char*>(*to) + bytes] = bytes;
    c.pinned_bytes += bytes;
    c.most_pinned = std::max(c.most_pinned, c.pinned_bytes);
    return SUCCESS;
}
Result cuMemFreeHost(void* at) {
    std::lock_guard guard(card().lock);
    if (Result result = unless_anything_is_captured()) return result;
    auto found = card().pinned.upper_bound(static_cast<char*>(at));
    if (found == card().pinned.end() || found->first - found->second != at) return INVALID_VALUE;
    card().pinned_bytes -= found->second;
    card().pinned.erase(found);
    free(at);
    return SUCCESS;
}

Result cuMemsetD8Async(Address to, unsigned char value, size_t bytes, void* stream) {
    std::lock_guard guard(card().lock);
    if (Result result = state_of(streams().of(stream))) return result;
    give(stream, [=] { memset(reinterpret_cast<void*>(to), value, bytes); }, NodeKind::Set);
    return SUCCESS;
}
// Whether a copy between host and card may be captured: that of memory which the driver knows. Each launch reads or writes it anew.
static Result captured(const void* host, size_t bytes, Stream& stream) {
    if (!stream.capture) return SUCCESS;
    return card().is_pinned(host, bytes) ? state_of(stream) : unless_captured(stream);
}
Result cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, void* stream) {
    std::lock_guard guard(card().lock);
    Stream& of = streams().of(stream);
    if (Result result = captured(from, bytes, of)) return result;
    card().uploads++;
    card().uploaded += bytes;
    if (card().is_pinned(from, bytes) || !of.is_late) {
        give(stream, [=] { memcpy(reinterpret_cast<void*>(to), from, bytes); }, NodeKind::Copy);
        return SUCCESS;
    }
    // Of memory that the driver does not know it makes a copy before it returns.
    auto copy = std::make_shared<std::vector<char>>(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
    give(stream, [=] { memcpy(reinterpret_cast<void*>(to), copy->data(), bytes); });
    return SUCCESS;
}
Result cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, void* stream) {
    std::lock_guard guard(card().lock);
    Stream& of = streams().of(stream);
    if (Result result = captured(to, bytes, of)) return result;
    card().downloads++;
    card().downloaded += bytes;
    give(stream, [=] { memcpy(to, reinterpret_cast<const void*>(from), bytes); }, NodeKind::Copy);
    // Memory that the driver does not know has the bytes when it returns.
    if (!card().is_pinned(to, bytes)) streams().finish(of);
    return card().state();
}
Result cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, void* stream) {
    std::lock_guard guard(card().lock);
    if (Result result = state_of(streams().of(stream))) return result;
    card().copies++;
    give(stream, [=] { memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes); }, NodeKind::Copy);
    return SUCCESS;
}
Result cuMemcpyPeerAsync(Address to, void*, Address from, void*, size_t bytes, void* stream) {
    return cuMemcpyDtoDAsync_v2(to, from, bytes, stream);
}

Result cuModuleLoadData(void** module, const void*) {
    std::lock_guard guard(card().lock);
    if (Result result = unless_anything_is_captured()) return result;
    *module = reinterpret_cast<void*>(2);
    return SUCCESS;
}
Result cuModuleLoad(void** module, const char*) { return cuModuleLoadData(module, nullptr); }
Result cuModuleUnload(void*) { return SUCCESS; }
Result cuModuleGetFunction(void** function, void*, const char* name) {
    auto found = emulation::kernels().find(name);
    if (found == emulation::kernels().end()) {
        fprintf(stderr, "emulated card: there is no kernel %s\n", name);
        return NOT_FOUND;
    }
    *function = new Function{name, &found->second}; // one for each name and module
    return SUCCESS;
}
Result cuFuncSetAttribute(void*, int, int) { return SUCCESS; }
Result cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y, unsigned threads_z,
                      unsigned shared_bytes, void* stream, void** arguments, void**) {
    std::lock_guard guard(card().lock);
    const Function& f = *static_cast<Function*>(function);
    Stream& of = streams().of(stream);
    if (Result result = state_of(of)) return result;
    // Those of a graph are counted when it is launched.
    if (!of.capture) card().launches[f.name]++;
    // Arguments are taken when the kernel is launched, not when it runs.
    auto values = std::make_shared<std::vector<std::vector<uint64_t>>>();
    for (size_t i = 0; i < f.kernel->sizes.size(); i++) {
        values->emplace_back((f.kernel->sizes[i] + 7) / 8);
        memcpy(values->back().data(), arguments[i], f.kernel->sizes[i]);
    }
    give(stream, [=, &f] {
        std::vector<void*> taken;
        for (auto& value : *values) taken.push_back(value.data());
        std::string problem = threads_y != 1 || threads_z != 1 || !x || !y || !z ? "a grid that no kernel here has" : "";
        if (problem.empty()) problem = emulation::launch(*f.kernel, {x, y, z}, threads, shared_bytes, taken.data(), card().schedule);
        if (problem.empty()) return;
        fprintf(stderr, "emulated card: %s: %s\n", f.name.c_str(), problem.c_str());
        card().has_failed = true;
    });
    return card().state();
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
