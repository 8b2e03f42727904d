// Streams and events of the emulated card. Work of a stream is done in order: at once, or as late as the order of all streams allows.
//
// A late stream does its work only when the host, or another stream's event wait, needs it. So work that nothing waits for comes too late,
// and work that lacks a wait for another stream comes too early.
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

// A place in a stream's work, and the time when the stream reached it.
struct Event {
    Stream* stream = nullptr;
    size_t place = 0;
    std::shared_ptr<std::chrono::steady_clock::time_point> reached;
    bool is_captured = false;
    bool is_timed = true;
};

class Streams {
    static constexpr size_t MAX_FREED_BYTES = 64 << 20;
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
    // A stream that is captured runs no work.
    void give(Stream& stream, std::function<void()> work, NodeKind kind = NodeKind::Kernel) {
        if (stream.capture) {
            stream.capture->graph->nodes.push_back({kind, std::move(work)});
            return;
        }
        stream.given++;
        stream.waiting.push_back(std::move(work));
        if (!stream.is_late) finish(stream, stream.given);
    }
    // Has pieces of a stream's work done up to `until`.
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
    // Returns memory of this size that the stream has freed last, or null. Earlier work may still use it, and runs before any other.
    void* again(Stream& stream, size_t bytes) {
        auto& freed = stream.freed[bytes];
        if (freed.empty()) return nullptr;
        void* block = freed.back();
        freed.pop_back();
        return block;
    }
    // Freed memory stays with its stream, as in a pool, until there is much of it, so that the reuse of memory does not depend on the host.
    // Memory is returned to the host once no work can use it any more.
    void release(Stream& stream, void* block, size_t bytes) {
        stream.freed[bytes].push_back(block);
        freed_bytes += bytes;
        if (freed_bytes < MAX_FREED_BYTES) return;
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
// The capture of a stream; null if its work is done.
Capture* capture_of(void* stream);
// Whether the stream's work is done later. Otherwise all work given so far is done.
bool is_late(void* stream);

} // namespace emulation
