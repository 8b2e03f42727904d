// Graphs of the emulated card: the work that a stream got while it was captured.
//
// While a stream is captured, no work runs. A call that cannot be captured gives the driver's error and makes the capture invalid. From
// then on each call on the stream fails until the capture is ended. Other streams cannot join a capture here.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <vector>

namespace emulation {

// With the values of CUgraphNodeType.
enum class NodeKind : int { Kernel = 0, Copy = 1, Set = 2, Nothing = 5, Allocation = 10, Free = 11 };

// With the values of CUstreamCaptureMode.
enum class CaptureMode : int { Global = 0, ThreadLocal = 1, Relaxed = 2 };

// With the values of CUmemorytype.
enum class MemoryType : int { Host = 1, Device = 2 };

struct Node {
    NodeKind kind;
    std::function<void()> work;
    MemoryType from = MemoryType::Device, to = MemoryType::Device; // of a copy
};

// Nodes in their order, and the memory that belongs to them: its addresses stay the same for the life of the graph.
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

// Counts for the report.
struct GraphCounts {
    size_t graphs = 0, launches = 0, nodes_launched = 0, allocations = 0, bytes = 0;
};
GraphCounts& graph_counts();
// The first and the end address of the graph's memory that has this address. Zeros if there is none.
std::pair<unsigned long long, unsigned long long> allocation_of_graphs(unsigned long long at);

} // namespace emulation
