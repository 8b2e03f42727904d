// The efficiency of a warp's memory accesses, counted like a card's profiler.
//
// LOW_MEM_T5_EMULATED_PROFILE names a file that gets a line for each instruction of the PTX that loads or stores: the kernel, the space,
// the line of the PTX, bytes of a lane, requests of a warp, the transactions that they take, and the fewest transactions for these bytes. A
// transaction is 32 bytes of global memory (a sector), or one pass over the 32 banks of shared memory. Lanes are grouped by the number of
// times that they have reached the instruction.
#pragma once
#include <array>
#include <tuple>

#include "execution.h"

namespace emulation {

class Profile {
public:
    explicit Profile(const char* path) : path(path) {}
    // This thread loads or stores this many bytes there.
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
    // For this block, by warp, line, space and bytes: the number of times that each lane was there, and its addresses.
    using Place = std::tuple<unsigned, unsigned, bool, size_t>;
    std::map<Place, std::pair<std::array<size_t, 32>, std::vector<Request>>> asked;
    // By kernel, line, and whether the access is to shared memory.
    std::map<std::tuple<std::string, unsigned, bool>, Instruction> instructions;
};

// Null unless a profile was requested.
extern Profile* profile;

} // namespace emulation
