// Streams of the emulated card, and events. Work of a stream is done in its order: at once, or as late as the order of all streams allows.
//
// A stream that is late does its work when somebody waits for it: the host, or another stream for an event. So work that nobody waits for
// comes too late, and work that does not wait for another stream's comes too early.
#pragma once
#include <chrono>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "graphs.h"

namespace emulation {

struct Stream {
    bool is_late = false;
    size_t given = 0, done = 0; // pieces of work
    std::deque<std::function<void()>> waiting;
    std::map<size_t, std::vector<void*>> freed; // memory by its bytes, which serves this stream again
    std::unique_ptr<Capture> capture;
};

// A place in a stream's work, and when the stream came there.
struct Event {
    Stream* stream = nullptr;
    size_t place = 0;
    std::shared_ptr<std::chrono::steady_clock::time_point> reached;
    bool is_captured = false;
    bool is_timed = true;
};

class Streams {
    static constexpr size_t MOST_FREED_BYTES = 64 << 20;
    std::vector<std::unique_ptr<Stream>> all;
    Stream null;
    size_t freed_bytes = 0; // since memory went back to the host

  public:
    enum class Late { None, First, Others, All } late = Late::None;

    Stream* make() {
        all.push_back(std::make_unique<Stream>());
        all.back()->is_late = late == Late::All || (late != Late::None && (all.size() == 1) == (late == Late::First));
        return all.back().get();
    }
    Stream& of(void* stream) { return stream ? *static_cast<Stream*>(stream) : null; }
    // A stream that is captured does nothing.
    void give(Stream& stream, std::function<void()> work, NodeKind kind = NodeKind::Kernel) {
        if (stream.capture) {
            stream.capture->graph->nodes.push_back({kind, std::move(work)});
            return;
        }
        stream.given++;
        stream.waiting.push_back(std::move(work));
        if (!stream.is_late) finish(stream, stream.given);
    }
    // Has the first so many pieces of a stream's work done.
    void finish(Stream& stream, size_t until) {
        while (stream.done < until && !stream.waiting.empty()) {
            auto work = std::move(stream.waiting.front());
            stream.waiting.pop_front();
            stream.done++;
            work();
        }
    }
    void finish(Stream& stream) { finish(stream, stream.given); }
    template <class F>
    void each(F f) {
        for (auto& stream : all) f(*stream);
    }
    void finish_all() {
        each([this](Stream& stream) { finish(stream); });
    }
    void wait(Stream& stream, const Event& event) {
        if (event.stream) give(stream, [this, event] { finish(*event.stream, event.place); });
    }
    // Memory of so many bytes that the stream has freed: none, or the latest. Work from before may still use it, and comes before any other.
    void* again(Stream& stream, size_t bytes) {
        auto& freed = stream.freed[bytes];
        if (freed.empty()) return nullptr;
        void* block = freed.back();
        freed.pop_back();
        return block;
    }
    // Memory stays with its stream, as in a pool, until there is much of it: so which memory serves again does not depend on the host. It goes
    // back to the host when no work may look at it any more.
    void release(Stream& stream, void* block, size_t bytes) {
        stream.freed[bytes].push_back(block);
        freed_bytes += bytes;
        if (freed_bytes < MOST_FREED_BYTES) return;
        for (auto& other : all)
            if (!other->waiting.empty()) return;
        for (auto& other : all) clear(*other);
        clear(null);
        freed_bytes = 0;
    }

  private:
    static void clear(Stream& stream) {
        for (auto& [bytes, blocks] : stream.freed)
            for (void* block : blocks) free(block);
        stream.freed.clear();
    }
};

// The streams of the card.
Streams& streams();
// Work of a stream, for the libraries beside the driver.
void give(void* stream, std::function<void()> work, NodeKind kind = NodeKind::Kernel);
// The capture of a stream: none where its work is done.
Capture* capture_of(void* stream);
// Whether that work is done later: otherwise all that was given is done.
bool is_late(void* stream);
// Whether kernels and products compute.
bool works();

} // namespace emulation
