// Modules of the emulated driver, their kernels, and launches.
#include <stdio.h>

#include <memory>

#include "card.h"

namespace {

using namespace emulation;

// CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
constexpr int MAX_SHARED_BYTES = 8;
constexpr unsigned MAX_BLOCKS_BESIDE = 65535; // along y and z
constexpr unsigned MAX_BLOCKS = 0x7FFFFFFF;   // along x

// A kernel of a module. Its attributes stay as they were set.
struct Function {
    const Kernel* kernel;
    unsigned max_shared_bytes = 48 << 10;
    bool was_launched = false;
};

struct Module {
    std::string source; // none of a text without kernels
    std::map<std::string, Function> functions;
};

// Sources with instructions that the driver accepts only on Ampere and later.
bool takes_ampere(const std::string& source) { return source == "attention_forward" || source == "attention_backward"; }

// The reason why a card refuses a launch, and the driver's error. Empty if it accepts the launch.
std::pair<std::string, Result> refusal(const Function& f, dim3 grid, dim3 threads, unsigned shared_bytes) {
    if (!grid.x || !grid.y || !grid.z) return {"a grid without blocks", INVALID_VALUE};
    if (grid.x > MAX_BLOCKS || grid.y > MAX_BLOCKS_BESIDE || grid.z > MAX_BLOCKS_BESIDE) return {"too many blocks along one side", INVALID_VALUE};
    if (threads.y != 1 || threads.z != 1 || !threads.x || threads.x > 1024) return {"a block that no kernel here has", INVALID_VALUE};
    if (threads.x > f.kernel->max_threads) return {"more threads than the kernel is compiled for", OUT_OF_RESOURCES};
    if (shared_bytes > f.max_shared_bytes) return {"more shared memory than the kernel was allowed", INVALID_VALUE};
    return {"", SUCCESS};
}

} // namespace

extern "C" {

Result cuModuleLoadData(void** module, const void* text) {
    std::lock_guard guard(lock());
    if (Result result = unless_here(__func__)) return result;
    if (Result result = unless_anything_is_captured()) return result;
    const std::string image = static_cast<const char*>(text), prefix = "// emulated: ";
    std::string source;
    if (!image.compare(0, prefix.size(), prefix)) source = image.substr(prefix.size(), image.find('\n') - prefix.size());
    if (takes_ampere(source) && capability() < 80) {
        fprintf(stderr, "emulated card: %s: asynchronous copies take a compute capability of 8.0\n", source.c_str());
        return INVALID_PTX;
    }
    *module = new Module{source, {}};
    return SUCCESS;
}
Result cuModuleLoad(void**, const char*) { return NOT_FOUND; }
Result cuModuleUnload(void* module) {
    // Work that waits still has its functions.
    std::lock_guard guard(lock());
    streams().finish_all();
    delete static_cast<Module*>(module);
    return SUCCESS;
}
Result cuModuleGetFunction(void** function, void* module, const char* name) {
    std::lock_guard guard(lock());
    if (Result result = unless_here(__func__)) return result;
    Module& m = *static_cast<Module*>(module);
    auto found = kernels().find(name);
    if (found == kernels().end() || found->second.source != m.source) {
        fprintf(stderr, "emulated card: there is no kernel %s in the module of %s\n", name, m.source.c_str());
        return NOT_FOUND;
    }
    *function = &m.functions.try_emplace(name, Function{&found->second}).first->second;
    return SUCCESS;
}
Result cuFuncSetAttribute(void* function, int attribute, int value) {
    std::lock_guard guard(lock());
    if (Result result = unless_here(__func__)) return result;
    Function& f = *static_cast<Function*>(function);
    if (attribute != MAX_SHARED_BYTES || value < 0 || value > card().max_shared_bytes()) {
        fprintf(stderr, "emulated card: %s: %d bytes of shared memory are more than a block can have\n", f.kernel->name.c_str(), value);
        return INVALID_VALUE;
    }
    f.max_shared_bytes = unsigned(value);
    return SUCCESS;
}
Result cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y, unsigned threads_z,
                      unsigned shared_bytes, void* stream, void** arguments, void**) {
    std::lock_guard guard(lock());
    if (Result result = unless_here(__func__)) return result;
    Function& f = *static_cast<Function*>(function);
    Stream& of = streams().of(stream);
    if (Result result = state_of(of)) return result;
    // A driver loads a kernel at its first launch. Before CUDA 12.3 it loads nothing while a stream is captured.
    if (of.capture && !f.was_launched) {
        fprintf(stderr, "emulated card: %s: captured before it was ever launched\n", f.kernel->name.c_str());
        return invalidate(of, CAPTURE_UNSUPPORTED);
    }
    const auto [problem, result] = refusal(f, {x, y, z}, {threads, threads_y, threads_z}, shared_bytes);
    if (result) {
        fprintf(stderr, "emulated card: %s: %s\n", f.kernel->name.c_str(), problem.c_str());
        return result;
    }
    f.was_launched = true;
    // Launches of a graph are counted when the graph is launched.
    if (!of.capture) card().launches[f.kernel->name]++;
    trace("launch", f.kernel->name.c_str());
    // Arguments are read when the kernel is launched, not when it runs.
    auto values = std::make_shared<std::vector<std::vector<uint64_t>>>();
    for (size_t i = 0; i < f.kernel->sizes.size(); i++) {
        values->emplace_back((f.kernel->sizes[i] + 7) / 8);
        memcpy(values->back().data(), arguments[i], f.kernel->sizes[i]);
    }
    give(stream, [=, kernel = f.kernel] {
        std::vector<void*> taken;
        for (auto& value : *values) taken.push_back(value.data());
        const std::string problem = launch(*kernel, {x, y, z}, threads, shared_bytes, taken.data(), card().schedule);
        if (problem.empty()) return;
        fprintf(stderr, "emulated card: %s: %s\n", kernel->name.c_str(), problem.c_str());
        card().has_failed = true;
    });
    return card().state();
}

}
