// Graphs of the emulated card: the work that a stream was given while it was captured.
//
// Nothing is done while a stream is captured. A call that cannot be captured gives the driver's error and makes the capture invalid; from
// then on each call on the stream fails, until the capture is ended. Other streams cannot join a capture here.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <vector>

namespace emulation {

// With the numbers of CUgraphNodeType.
enum class NodeKind : int { Kernel = 0, Copy = 1, Set = 2, Nothing = 5, Allocation = 10, Free = 11 };

// With the numbers of CUstreamCaptureMode.
enum class CaptureMode : int { Global = 0, ThreadLocal = 1, Relaxed = 2 };

// With the numbers of CUmemorytype.
enum class MemoryType : int { Host = 1, Device = 2 };

struct Node {
    NodeKind kind;
    std::function<void()> work;
    MemoryType from = MemoryType::Device, to = MemoryType::Device; // of a copy
};

// Nodes in their order, and the memory that belongs to them: it has the same addresses as long as the graph is there.
struct Graph {
    std::vector<Node> nodes;
    std::map<void*, size_t> memory;
    size_t not_freed = 0; // allocations that no node frees
    ~Graph();
};

struct Capture {
    std::shared_ptr<Graph> graph = std::make_shared<Graph>();
    std::thread::id thread = std::this_thread::get_id();
    CaptureMode mode = CaptureMode::Global;
    bool is_valid = true;
};

// What graphs did, for the report.
struct GraphCounts {
    size_t graphs = 0, launches = 0, nodes_launched = 0, allocations = 0, bytes = 0;
};
GraphCounts& graph_counts();
// The memory of a graph that has this address, from its first byte to behind its last one. Nothing where none has.
std::pair<unsigned long long, unsigned long long> allocation_of_graphs(unsigned long long at);

} // namespace emulation
