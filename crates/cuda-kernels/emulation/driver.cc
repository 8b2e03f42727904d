// A driver for a card that does not exist. Memory is the host's, each call is done before it returns, and kernels are compiled for the host
// and found by name. It has the functions of NVIDIA's driver that candle and t5-ops call, with the signatures of cuda.h 13.0.
//
// It is a library of its own, with cuBLAS (blas.cc) and NCCL (nccl.cc), and the program opens it as it opens NVIDIA's. The program allocates
// memory itself, by functions under the driver's names, and asks this library for the driver's own.
//
// Variables, each with the prefix LOW_MEM_T5_EMULATED_:
// - MEMORY: bytes of the card (default 4 GiB).
// - PAGE: the unit of memory that backs addresses, and of the driver's pool (default 2 MiB).
// - MAPPING, `none`: the driver cannot back addresses with memory.
// - CARDS: the number of cards to choose from (default 1; a process opens one of them).
// - ORDER, `last` or `random`: another order of threads and blocks.
// - STREAMS, `early` or `late`: work of every stream but the first is done as early or as late as its order allows; by default calls do it at
//   once. `all-late`: the work of all streams is done late.
// - FAILURE, N: the N-th allocation finds no memory.
// - REPORT: a file that gets the counts as JSON at the end. For every card but the first, the card's number is appended to its name.
// - TRACE: a file that gets each request (trace.h).
#include <stdio.h>

#include "card.h"

// From cuBLAS.
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
            launches, products, c.allocations, c.uploads, c.uploaded, c.waiting_uploads, c.downloads, c.downloaded, c.copies, c.waits, graphs.graphs, graphs.launches, graphs.nodes_launched, graphs.allocations, c.peak_pinned, c.peak_locked, c.locked_bytes, c.own.peak_used + c.given.peak_used,
            c.own.peak_reserved + c.given.peak_reserved, c.own.used + c.given.used, c.contexts);
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

// The most bytes of unpinned memory that are copied without a wait for the stream, by CUDA's programming guide.
constexpr size_t MAX_STAGED = 64 << 10;

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
// Whether a copy can be of these bytes of the host: all of them are memory that the driver knows, or none.
Result unless_partly_known(const char* call, const void* at, size_t bytes) {
    const char* from = static_cast<const char*>(at);
    if (card().is_pinned(at, bytes) || !card().is_pinned_in_part(from, from + bytes)) return SUCCESS;
    fprintf(stderr, "emulated card: %s: %zu bytes of the host, of which the driver knows a part\n", call, bytes);
    return INVALID_VALUE;
}
// The work of a copy of memory that the driver knows: until it is done, that memory stays.
template <class Work>
std::function<void()> keeping(const void* at, size_t bytes, Work work) {
    auto& underway = card().underway;
    auto place = underway.insert(underway.end(), {static_cast<const char*>(at), bytes});
    return [=, &underway] {
        work();
        underway.erase(place);
    };
}
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
    case 75: *value = card().capability / 10; break; // compute capability
    case 76: *value = card().capability % 10; break;
    case 97: *value = card().max_shared_bytes(); break; // shared memory of a block that asks for it
    case 102: *value = card().maps; break; // addresses that memory backs
    case 115: *value = card().has_pools; break; // memory pools
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
    // A capture knows nothing of work recorded outside of it, and nothing outside waits for work that is only captured.
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
    if (Result result = unless_partly_known(__func__, from, bytes)) return result;
    if (Result result = state_of(of)) return result;
    card().uploads++;
    card().uploaded += bytes;
    const bool waits = bytes > MAX_STAGED && !card().is_pinned(from, bytes);
    card().waiting_uploads += waits;
    trace(waits ? "waiting-upload" : "upload", bytes);
    auto copies = [=] { memcpy(reinterpret_cast<void*>(to), from, bytes); };
    // Each launch of a graph reads the host's bytes of that time, from pinned and unpinned memory alike.
    if (of.capture) {
        of.capture->graph->nodes.push_back({NodeKind::Copy, copies, MemoryType::Host, MemoryType::Device});
        return SUCCESS;
    }
    if (card().is_pinned(from, bytes)) {
        give(stream, keeping(from, bytes, copies));
        return SUCCESS;
    }
    if (!of.is_late) {
        give(stream, copies);
        return SUCCESS;
    }
    // The driver copies unpinned memory before it returns.
    auto copy = std::make_shared<std::vector<char>>(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
    give(stream, [=] { memcpy(reinterpret_cast<void*>(to), copy->data(), bytes); });
    return SUCCESS;
}
Result cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, void* stream) {
    if (Result result = unless_here(__func__)) return result;
    std::lock_guard guard(card().lock);
    Stream& of = streams().of(stream);
    if (Result result = unless_memory(__func__, from, bytes)) return result;
    if (Result result = unless_partly_known(__func__, to, bytes)) return result;
    if (Result result = state_of(of)) return result;
    card().downloads++;
    card().downloaded += bytes;
    trace("download", bytes);
    auto copies = [=] { memcpy(to, reinterpret_cast<const void*>(from), bytes); };
    if (of.capture) {
        // Only a launch writes to the host. Until then the memory is NaN, so that early reads are detected.
        memset(to, 0xFF, bytes);
        of.capture->graph->nodes.push_back({NodeKind::Copy, copies, MemoryType::Device, MemoryType::Host});
        return SUCCESS;
    }
    if (card().is_pinned(to, bytes)) {
        give(stream, keeping(to, bytes, copies));
        return card().state();
    }
    // Unpinned memory has the bytes when the call returns.
    give(stream, copies);
    streams().finish(of);
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

}
