// NCCL between processes of one host whose cards do not exist, for tests alone. It has the functions that t5-ops calls, with the signatures
// of nccl.h 2.30. A call is work of its stream; a call that fails there ends the process.
//
// A message is a file in a folder of the communicator: written under another name, renamed, and removed by its reader. So no sender waits.
// Sums are added from the last process to the first: in another order than the tree's, and the same everywhere.
//
// Two processes of a communicator on one card are refused, as NCCL refuses them: with an invalid usage, when they join.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../kernels/device.h"
#include "streams.h"

namespace {

using Result = int;
enum : Result { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };
enum : int { FLOAT32 = 7, FLOAT64 = 8, BFLOAT16 = 9 };
constexpr int LOOK_EVERY_US = 50;
constexpr int LOOKS = 120 * 1000 * 1000 / LOOK_EVERY_US; // two minutes

struct Id {
    char name[128];
};

struct Communicator {
    std::string folder;
    int size, rank;
    std::vector<size_t> sent, received; // messages to and from each process
};

struct Message {
    Communicator* of;
    int process;
    void* at;
    size_t bytes;
};

// Messages of a thread's group, which are exchanged at its end.
thread_local bool is_in_group = false;
thread_local std::vector<Message> to_send, to_receive;
thread_local void* stream_of_group = nullptr;

size_t width(int type) { return type == FLOAT64 ? 8 : type == FLOAT32 ? 4 : type == BFLOAT16 ? 2 : 0; }

std::string name(const Communicator& c, int from, int to, size_t number) {
    return c.folder + "/" + std::to_string(from) + "-" + std::to_string(to) + "-" + std::to_string(number);
}

Result send(const Message& m) {
    Communicator& c = *m.of;
    const std::string to = name(c, c.rank, m.process, c.sent[size_t(m.process)]++), written = to + ".part";
    FILE* file = fopen(written.c_str(), "wb");
    if (!file) return SYSTEM_ERROR;
    const bool is_whole = fwrite(m.at, 1, m.bytes, file) == m.bytes;
    return fclose(file) == 0 && is_whole && rename(written.c_str(), to.c_str()) == 0 ? SUCCESS : SYSTEM_ERROR;
}

Result receive(const Message& m) {
    Communicator& c = *m.of;
    const std::string from = name(c, m.process, c.rank, c.received[size_t(m.process)]++);
    FILE* file = nullptr;
    for (int look = 0; look < LOOKS && !(file = fopen(from.c_str(), "rb")); look++) usleep(LOOK_EVERY_US);
    if (!file) return SYSTEM_ERROR;
    char more;
    const bool is_whole = fread(m.at, 1, m.bytes, file) == m.bytes && fread(&more, 1, 1, file) == 0;
    fclose(file);
    unlink(from.c_str());
    return is_whole ? SUCCESS : INVALID_USAGE;
}

template <class T>
void add_as(void* sum, const void* other, size_t count) {
    for (size_t i = 0; i < count; i++) {
        T& left = static_cast<T*>(sum)[i];
        from_float(left, to_float(left) + to_float(static_cast<const T*>(other)[i]));
    }
}

void add(void* sum, const void* other, size_t count, int type) {
    if (type == FLOAT32) add_as<float>(sum, other, count);
    if (type == BFLOAT16) add_as<bf16>(sum, other, count);
    if (type == FLOAT64)
        for (size_t i = 0; i < count; i++) static_cast<double*>(sum)[i] += static_cast<const double*>(other)[i];
}

// Adds up the tensors of all processes: for process `root` alone, or for all of them without a root.
Result sum(const void* from, void* into, size_t count, int type, Communicator* c, int root) {
    const size_t bytes = count * width(type);
    if (!bytes && count) return INVALID_ARGUMENT;
    for (int process = 0; process < c->size; process++) {
        if (root >= 0 && process != root) continue;
        if (Result error = send({c, process, const_cast<void*>(from), bytes})) return error;
    }
    if (root >= 0 && c->rank != root) return SUCCESS;
    std::vector<char> sum, other(bytes);
    for (int process = c->size; process-- > 0;) {
        if (Result error = receive({c, process, other.data(), bytes})) return error;
        if (sum.empty()) sum = other;
        else add(sum.data(), other.data(), count, type);
    }
    memcpy(into, sum.data(), bytes);
    return SUCCESS;
}

Result broadcast(const void* from, void* into, size_t bytes, Communicator* c, int root) {
    if (c->rank != root) return receive({c, root, into, bytes});
    for (int process = 0; process < c->size; process++) {
        if (process == root) continue;
        if (Result error = send({c, process, const_cast<void*>(from), bytes})) return error;
    }
    return SUCCESS;
}

Result exchange(const std::vector<Message>& sent, const std::vector<Message>& received) {
    Result result = SUCCESS;
    for (const Message& m : sent) result = result ? result : send(m);
    for (const Message& m : received) result = result ? result : receive(m);
    return result;
}

// Tells the other processes the card of this one, and waits for theirs.
Result meet(Communicator* c, int card) {
    for (int process = 0; process < c->size; process++)
        if (Result error = send({c, process, &card, sizeof card})) return error;
    std::set<int> cards;
    for (int process = 0; process < c->size; process++) {
        int theirs = 0;
        if (Result error = receive({c, process, &theirs, sizeof theirs})) return error;
        cards.insert(theirs);
    }
    if (int(cards.size()) == c->size) return SUCCESS;
    fprintf(stderr, "emulated NCCL: two processes of a communicator have one card\n");
    return INVALID_USAGE;
}

// Work of a stream. No caller asks for the result of late work. Work that is done at once does not lock the card, because processes may be
// threads of one process, and wait for each other.
template <class Work>
Result give(void* stream, Work work) {
    if (!emulation::is_late(stream)) return work();
    emulation::give(stream, [work = std::move(work)] {
        if (Result error = work()) {
            fprintf(stderr, "the emulated NCCL failed: %d\n", error);
            abort();
        }
    });
    return SUCCESS;
}

} // namespace

extern "C" {

// From the driver.
int cuCtxGetDevice(int* device);

// The last process to leave finds the folder empty.
Result ncclCommAbort(Communicator* c) {
    rmdir(c->folder.c_str());
    delete c;
    return SUCCESS;
}
Result ncclGetUniqueId(Id* id) {
    memset(id, 0, sizeof *id);
    snprintf(id->name, sizeof id->name, "%s/low-mem-t5-nccl-XXXXXX", access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    return mkdtemp(id->name) ? SUCCESS : SYSTEM_ERROR;
}
Result ncclCommInitRank(Communicator** made, int size, Id id, int rank) {
    struct stat found;
    int card = 0;
    if (stat(id.name, &found) != 0 || rank < 0 || rank >= size || cuCtxGetDevice(&card) != SUCCESS) return INVALID_ARGUMENT;
    *made = new Communicator{id.name, size, rank, std::vector<size_t>(size_t(size)), std::vector<size_t>(size_t(size))};
    const Result met = meet(*made, card);
    if (met) ncclCommAbort(std::exchange(*made, nullptr));
    return met;
}

Result ncclAllReduce(const void* from, void* into, size_t count, int type, int, Communicator* c, void* stream) {
    return give(stream, [=] { return sum(from, into, count, type, c, -1); });
}
Result ncclReduce(const void* from, void* into, size_t count, int type, int, int root, Communicator* c, void* stream) {
    return give(stream, [=] { return sum(from, into, count, type, c, root); });
}
Result ncclBroadcast(const void* from, void* into, size_t count, int type, int root, Communicator* c, void* stream) {
    return give(stream, [=] { return broadcast(from, into, count * width(type), c, root); });
}

Result ncclSend(const void* from, size_t count, int type, int process, Communicator* c, void* stream) {
    if (!is_in_group) return INVALID_USAGE;
    stream_of_group = stream;
    to_send.push_back({c, process, const_cast<void*>(from), count * width(type)});
    return SUCCESS;
}
Result ncclRecv(void* into, size_t count, int type, int process, Communicator* c, void* stream) {
    if (!is_in_group) return INVALID_USAGE;
    stream_of_group = stream;
    to_receive.push_back({c, process, into, count * width(type)});
    return SUCCESS;
}
Result ncclGroupStart() {
    is_in_group = true;
    return SUCCESS;
}
Result ncclGroupEnd() {
    is_in_group = false;
    return give(stream_of_group, [sent = std::exchange(to_send, {}), received = std::exchange(to_receive, {})] {
        return exchange(sent, received);
    });
}

}
