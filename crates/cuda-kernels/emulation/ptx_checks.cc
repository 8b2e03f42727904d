// The last users of shared memory, and the arrays of modules. See ptx_checks.h.
#include "ptx_checks.h"

namespace {

std::vector<std::pair<uint64_t, size_t>>& constants() {
    static auto* all = new std::vector<std::pair<uint64_t, size_t>>;
    return *all;
}

// The last user of a byte of shared memory, and the time of use: counted in blocks, barriers, and barriers of the warp.
struct Use {
    size_t block = 0;
    unsigned thread = 0, barriers = 0, warp_barriers = 0;
};
struct Uses {
    Use write, read;
    bool several_read = false; // since the last barrier, from more than one warp
};

// Whether a barrier separates that use from a use by this thread now.
bool is_before(const Use& use, const emulation::Fibre& now, unsigned thread) {
    if (use.block != emulation::block_number() || use.barriers != now.barriers || use.thread == thread) return true;
    return use.thread / 32 == thread / 32 && use.warp_barriers != now.warp_barriers;
}

bool is_constant(uint64_t address, size_t bytes) {
    for (const auto& [at, size] : constants())
        if (address >= at && address + bytes <= at + size) return true;
    return false;
}

} // namespace

Constant::Constant(const uint8_t* at, size_t bytes) { constants().emplace_back(reinterpret_cast<uint64_t>(at), bytes); }

void use_shared(uint32_t offset, size_t bytes, bool writes) {
    // Never destroyed: see execution.cc.
    static auto& all = *new std::vector<Uses>;
    if (all.size() < offset + bytes) all.resize(emulation::shared_bytes());
    const unsigned thread = threadIdx.x;
    const emulation::Fibre& now = emulation::self();
    const Use use{emulation::block_number(), thread, now.barriers, now.warp_barriers};
    for (size_t i = offset; i < offset + bytes; i++) {
        Uses& of = all[i];
        if (!is_before(of.write, now, thread)) emulation::fail(writes ? "two threads write shared memory without a barrier between" : "a thread reads shared memory that another one writes without a barrier between");
        const bool is_read_now = of.read.block == use.block && of.read.barriers == use.barriers;
        if (writes) {
            if (!is_before(of.read, now, thread) || (is_read_now && of.several_read)) emulation::fail("a thread writes shared memory that another one reads without a barrier between");
            of.write = use;
        } else {
            of.several_read = is_read_now && (of.several_read || of.read.thread / 32 != thread / 32);
            of.read = use;
        }
    }
}

void check_global(uint64_t address, size_t bytes) {
    if (!emulation::is_memory || emulation::is_memory(address, bytes) || is_constant(address, bytes)) return;
    emulation::fail("memory that is nobody's");
}
