// See ptx_profile.h.
#include "ptx_profile.h"

#include <stdio.h>

#include <set>

namespace emulation {
namespace {

constexpr size_t SECTOR = 32, BANKS = 32, WORD = 4;

// Passes over the banks: a pass serves 32 words in different banks. Lanes of 8 bytes go in two halves, those of 16 in four quarters.
size_t passes(const std::array<uint64_t, 32>& addresses, uint32_t lanes, size_t bytes, size_t& least) {
    const size_t together = 32 * WORD / std::max(bytes, WORD);
    size_t sum = 0;
    for (size_t from = 0; from < 32; from += together) {
        std::map<uint64_t, std::set<uint64_t>> banks;
        for (size_t lane = from; lane < from + together; lane++)
            if (lanes >> lane & 1)
                for (uint64_t word = addresses[lane] / WORD; word * WORD < addresses[lane] + bytes; word++) banks[word % BANKS].insert(word);
        size_t most = 0;
        for (const auto& [bank, words] : banks) most = std::max(most, words.size());
        sum += most;
        least += most > 0;
    }
    return sum;
}

size_t sectors(const std::array<uint64_t, 32>& addresses, uint32_t lanes, size_t bytes, size_t& least) {
    std::set<uint64_t> touched, different;
    for (size_t lane = 0; lane < 32; lane++) {
        if (!(lanes >> lane & 1)) continue;
        different.insert(addresses[lane]);
        for (uint64_t sector = addresses[lane] / SECTOR; sector * SECTOR < addresses[lane] + bytes; sector++) touched.insert(sector);
    }
    least += (different.size() * bytes + SECTOR - 1) / SECTOR;
    return touched.size();
}

} // namespace

void Profile::ask(unsigned line, bool is_shared, uint64_t address, size_t bytes) {
    if (block != block_number()) end_block();
    const unsigned lane = threadIdx.x % 32;
    auto& [times, requests] = asked[{threadIdx.x / 32, line, is_shared, bytes}];
    const size_t time = times[lane]++;
    if (requests.size() <= time) requests.resize(time + 1);
    requests[time].addresses[lane] = address;
    requests[time].lanes |= uint32_t(1) << lane;
}

void Profile::end_block() {
    for (const auto& [place, of] : asked) {
        const auto& [warp, line, is_shared, bytes] = place;
        Instruction& instruction = instructions[{kernel, line, is_shared}];
        instruction.bytes = bytes;
        for (const Request& request : of.second) {
            instruction.requests++;
            instruction.transactions += (is_shared ? passes : sectors)(request.addresses, request.lanes, bytes, instruction.least);
        }
    }
    asked.clear();
    block = block_number();
    kernel = kernel_name();
}

void Profile::write() {
    end_block();
    FILE* file = fopen(path.c_str(), "w");
    if (!file) return;
    fprintf(file, "kernel\tspace\tline\tbytes\trequests\ttransactions\tleast\n");
    for (const auto& [key, of] : instructions) {
        const auto& [kernel, line, is_shared] = key;
        fprintf(file, "%s\t%s\t%u\t%zu\t%zu\t%zu\t%zu\n", kernel.c_str(), is_shared ? "shared" : "global", line, of.bytes, of.requests, of.transactions, of.least);
    }
    fclose(file);
}

namespace {
// Also written if a process ends by `exit`. Never destroyed before that: see execution.cc.
Profile* begin() {
    const char* path = getenv("LOW_MEM_T5_EMULATED_PROFILE");
    if (path) atexit([] { profile->write(); });
    return path ? new Profile(path) : nullptr;
}
} // namespace

Profile* profile = begin();

} // namespace emulation
