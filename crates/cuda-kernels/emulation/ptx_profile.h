// How well the lanes of a warp use memory together, counted as a card's profiler does.
//
// LOW_MEM_T5_EMULATED_PROFILE names a file that gets a line for each instruction of the PTX that loads or stores: the kernel, the space, the line
// of the PTX, bytes of a lane, requests of a warp, the transactions that they take, and the least that these bytes can take. A transaction is 32
// bytes of global memory (a sector), or one pass over the 32 banks of shared memory. Lanes are taken together by how often they have come to the
// instruction.
#pragma once
#include <array>
#include <tuple>

#include "execution.h"

namespace emulation {

class Profile {
public:
    explicit Profile(const char* path) : path(path) {}
    // This thread loads or stores so many bytes there.
    void ask(unsigned line, bool is_shared, uint64_t address, size_t bytes);
    void write();

private:
    struct Request {
        std::array<uint64_t, 32> addresses;
        uint32_t lanes = 0;
    };
    struct Instruction {
        size_t bytes = 0, requests = 0, transactions = 0, least = 0;
    };
    void end_block();

    std::string path;
    size_t block = 0;
    std::string kernel; // whose block it is
    // Of this block, by warp, line, space and bytes: how often each lane was there, and what it asked for.
    using Place = std::tuple<unsigned, unsigned, bool, size_t>;
    std::map<Place, std::pair<std::array<size_t, 32>, std::vector<Request>>> asked;
    // By kernel, line, and whether it is of shared memory.
    std::map<std::tuple<std::string, unsigned, bool>, Instruction> instructions;
};

// Null where nobody asked for one.
extern Profile* profile;

} // namespace emulation
