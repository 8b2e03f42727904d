// Stream capture, and graphs of captured work.
//
// LOW_MEM_T5_EMULATED_GRAPHS: `none` for a driver that captures nothing.
#include <stdlib.h>
#include <string.h>

#include <algorithm>

#include "driver.h"

using namespace emulation;

namespace emulation {

GraphCounts& graph_counts() {
    static GraphCounts* one = new GraphCounts; // other destructors still use it
    return *one;
}

namespace {
// Memory of all graphs.
std::map<void*, size_t>& all_memory() {
    static auto* one = new std::map<void*, size_t>;
    return *one;
}
} // namespace

std::pair<unsigned long long, unsigned long long> allocation_of_graphs(unsigned long long at) {
    for (auto& [block, bytes] : all_memory()) {
        const auto from = reinterpret_cast<unsigned long long>(block);
        if (from <= at && at < from + bytes) return {from, from + bytes};
    }
    return {};
}

Graph::~Graph() {
    for (auto& [block, bytes] : memory) {
        all_memory().erase(block);
        graph_counts().bytes -= bytes;
        free(block);
    }
}

Result state_of(Stream& stream) {
    return stream.capture && !stream.capture->is_valid ? CAPTURE_INVALIDATED : SUCCESS;
}

Result invalidate(Stream& stream, Result error) {
    const bool was_valid = stream.capture->is_valid;
    stream.capture->is_valid = false;
    return was_valid ? error : CAPTURE_INVALIDATED;
}

Result unless_captured(Stream& stream) { return stream.capture ? invalidate(stream, CAPTURE_UNSUPPORTED) : SUCCESS; }

Result unless_anything_is_captured() {
    Result result = SUCCESS;
    streams().each([&](Stream& stream) {
        if (!stream.capture || stream.capture->mode == CaptureMode::Relaxed) return;
        const bool is_ours = stream.capture->thread == std::this_thread::get_id();
        if (is_ours || stream.capture->mode == CaptureMode::Global) result = unless_captured(stream);
    });
    return result;
}

void* allocate_in(Capture& capture, size_t bytes) {
    Graph& graph = *capture.graph;
    void* block = aligned_alloc(512, bytes);
    if (!block) return nullptr;
    graph.memory[block] = all_memory()[block] = bytes;
    graph.not_freed++;
    graph_counts().allocations++;
    graph_counts().bytes += bytes;
    // NaN, like every allocation.
    graph.nodes.push_back({NodeKind::Allocation, [=] { memset(block, 0xFF, bytes); }});
    return block;
}

bool free_in(Capture& capture, void* block) {
    Graph& graph = *capture.graph;
    auto found = graph.memory.find(block);
    if (found == graph.memory.end()) return false;
    const size_t bytes = found->second;
    graph.not_freed--;
    graph.nodes.push_back({NodeKind::Free, [=] { memset(block, 0xFF, bytes); }});
    return true;
}

} // namespace emulation

namespace {

// The graph of a handle, and the number of its launches.
struct Executable {
    std::shared_ptr<Graph> graph;
    size_t launches = 0;
};
std::shared_ptr<Graph>& graph_of(void* handle) { return *static_cast<std::shared_ptr<Graph>*>(handle); }

bool has_graphs() {
    const char* graphs = getenv("LOW_MEM_T5_EMULATED_GRAPHS");
    return !graphs || strcmp(graphs, "none");
}

} // namespace

extern "C" {

Result cuStreamBeginCapture_v2(void* stream, int mode) {
    std::lock_guard guard(lock());
    if (!has_graphs()) return NOT_SUPPORTED;
    // The default stream cannot be captured.
    if (!stream) return CAPTURE_UNSUPPORTED;
    Stream& of = streams().of(stream);
    if (of.capture) return ILLEGAL_STATE;
    of.capture = std::make_unique<Capture>();
    of.capture->mode = CaptureMode(mode);
    return SUCCESS;
}
Result cuStreamEndCapture(void* stream, void** graph) {
    std::lock_guard guard(lock());
    Stream& of = streams().of(stream);
    *graph = nullptr;
    if (!of.capture) return ILLEGAL_STATE;
    if (of.capture->thread != std::this_thread::get_id()) return invalidate(of, CAPTURE_WRONG_THREAD);
    const std::unique_ptr<Capture> capture = std::move(of.capture);
    if (!capture->is_valid) return CAPTURE_INVALIDATED;
    *graph = new std::shared_ptr<Graph>(capture->graph);
    return SUCCESS;
}
Result cuStreamIsCapturing(void* stream, int* status) {
    std::lock_guard guard(lock());
    const Stream& of = streams().of(stream);
    *status = !of.capture ? 0 : of.capture->is_valid ? 1 : 2;
    return SUCCESS;
}

Result cuGraphGetNodes(void* graph, void** nodes, size_t* count) {
    auto& all = graph_of(graph)->nodes;
    if (nodes)
        for (size_t i = 0; i < std::min(*count, all.size()); i++) nodes[i] = &all[i];
    *count = nodes ? std::min(*count, all.size()) : all.size();
    return SUCCESS;
}
Result cuGraphNodeGetType(void* node, int* kind) {
    *kind = int(static_cast<Node*>(node)->kind);
    return SUCCESS;
}
// CUDA_MEMCPY3D: only the types of memory, at their offsets.
Result cuGraphMemcpyNodeGetParams(void* node, void* parameters) {
    const Node& of = *static_cast<Node*>(node);
    if (of.kind != NodeKind::Copy) return INVALID_VALUE;
    memset(parameters, 0, 200);
    memcpy(static_cast<char*>(parameters) + 32, &of.from, sizeof of.from);
    memcpy(static_cast<char*>(parameters) + 120, &of.to, sizeof of.to);
    return SUCCESS;
}
Result cuGraphDestroy(void* graph) {
    std::lock_guard guard(lock());
    delete &graph_of(graph);
    return SUCCESS;
}
Result cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
    std::lock_guard guard(lock());
    graph_counts().graphs++;
    *executable = new Executable{graph_of(graph)};
    return SUCCESS;
}
Result cuGraphExecDestroy(void* executable) {
    std::lock_guard guard(lock());
    // Work that waits keeps the graph alive.
    delete static_cast<Executable*>(executable);
    return SUCCESS;
}
Result cuGraphUpload(void*, void*) { return SUCCESS; }
Result cuGraphLaunch(void* executable, void* stream) {
    std::lock_guard guard(lock());
    Executable& e = *static_cast<Executable*>(executable);
    // Graphs within graphs are not emulated.
    if (Result result = unless_captured(streams().of(stream))) return result;
    if (e.launches > 0 && e.graph->not_freed > 0) return INVALID_VALUE;
    e.launches++;
    graph_counts().launches++;
    graph_counts().nodes_launched += e.graph->nodes.size();
    give(stream, [graph = e.graph] {
        for (auto& node : graph->nodes) node.work();
    });
    return card_state();
}

}
